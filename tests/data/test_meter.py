from __future__ import annotations

import io

import pytest
from rich.console import Console
from storing import console

from headtrain.data import meter as module
from headtrain.data.meter import Meter


@pytest.fixture
def clock(monkeypatch):
    """Seconds, to be set."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_quarter_of_a_minute_says_how_far_all_are(clock):
    out = console()
    meter = Meter(out, 1000)
    clock[0] += 10
    meter.advance(100)
    assert out.file.getvalue() == ""
    clock[0] += 10
    meter.advance(100, others=200)
    meter.advance(0)  # what others did is kept, and nothing is said again at once
    assert out.file.getvalue() == "capture: 400/1,000 tokens 20 tokens/s, about 30 s left\n"
    assert meter.summary() == "captured 400 tokens in 20.0 s, 20 tokens/s (200 by this process)"


def test_a_stream_captures_more_than_an_epoch(clock):
    """Shards that are captured again: never more than all, and never less than nothing left."""
    out = console()
    meter = Meter(out, 1000)
    clock[0] += 20
    meter.advance(1200)
    assert out.file.getvalue() == "capture: 1,200/1,200 tokens 60 tokens/s, about 0 s left\n"


def test_a_terminal_has_a_bar_and_no_lines(clock):
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Meter(out, 1000) as meter:
        clock[0] += 20
        meter.advance(100)
    assert "100/1,000 tokens" in out.file.getvalue() and "about" not in out.file.getvalue()
