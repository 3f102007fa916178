"""Rows from conversations: reading (sources, conversations), rendering (chat), looking (inspect), regenerating."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; the message says where, what was found, what was expected and what to do."""
