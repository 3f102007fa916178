"""The one place that shifts tokens against positions.

A position i is *supervised* when token i+1 belongs to an assistant turn: the target has just produced token i+1,
so drafting can start. The drafted token of depth k is token i+1+k, and the pair (i, k) counts only when that
token lies in the same assistant turn. The first token of a turn is never drafted: prefill gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Batch, Row


def _ahead(x: Tensor, by: int, fill: int) -> Tensor:
    """x shifted so that entry i holds x[i + by]; the end is filled."""
    if by >= x.numel():
        return torch.full_like(x, fill)
    return torch.cat([x[by:], x.new_full((by,), fill)])


def pair_mask(batch: Batch, depths: int) -> Tensor:
    """[depths, T] bool: whether the pair (position i, depth k) counts. Row k-1 is a subset of row k-2."""
    first = _ahead(batch.turn, 1, 0)
    starts = (first > 0) & (_ahead(batch.doc, 1, -1) == batch.doc)
    return torch.stack([starts & (_ahead(batch.turn, 1 + k, 0) == first) for k in range(1, depths + 1)])


def final_positions(batch: Batch) -> Tensor:
    """[M] int64: the sorted positions whose *next* token is supervised. The final feature there is the one that
    produced a supervised token: what teachers read as p, and what Medusa reads as input."""
    return ((_ahead(batch.turn, 1, 0) > 0) & (_ahead(batch.doc, 1, -1) == batch.doc)).nonzero().squeeze(1)


def final_count(row: Row) -> int:
    """How many ``final_positions`` lie in a row, without a Python step for each token."""
    after = row.turn[1:]
    return len(after) - after.count(0)
