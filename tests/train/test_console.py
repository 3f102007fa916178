from __future__ import annotations

import pytest

from headtrain.train import console as module
from headtrain.train.console import TrainConsole

NUMBERS = {"loss": 1.0, "tau": 1.5, "depth": 1, "lr": 1e-3}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that stand still until they are set."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def left_of(text: str) -> str:
    return text.strip().splitlines()[-1].rpartition("left ")[2]


def test_the_remaining_time_knows_that_deeper_steps_cost_more(clock, capsys):
    """10 steps of depth 1 at 2 s, 10 of depth 3 that the arithmetic says cost three times that, and in truth cost 5 s.
    Within a stage its own pace counts; the window that a change falls into times neither depth."""
    with TrainConsole([1] * 10 + [3] * 10, 0, 0) as console:
        console.cost_of({1: 100.0, 3: 300.0}.__getitem__)
        for step, seconds, expected in [
            (4, 8.0, 6 * 2 + 10 * 6),
            (8, 16.0, 2 * 2 + 10 * 6),
            (12, 30.0, 8 * 14 / 8 * 3),  # 14 s for 2 x 100 + 2 x 300: 1.75 s by 100, and no depth is timed by it
            (16, 50.0, 4 * 5),
            (20, 70.0, 0),
        ]:
            clock[0] = seconds
            console.line(step, step * 10, NUMBERS)
            minutes, rest = divmod(round(expected), 60)
            assert left_of(capsys.readouterr().err) == f"0:{minutes:02d}:{rest:02d}"


def test_a_depth_that_was_timed_is_not_reckoned(clock, capsys):
    with TrainConsole([1] * 4 + [3] * 4 + [1] * 4, 0, 0) as console:
        console.cost_of({1: 100.0, 3: 300.0}.__getitem__)
        for step, seconds in [(4, 8.0), (8, 28.0)]:
            clock[0] = seconds
            console.line(step, step * 10, NUMBERS)
    assert left_of(capsys.readouterr().err) == "0:00:08"


def test_a_window_over_two_depths_times_neither(clock, capsys):
    with TrainConsole([1] * 4 + [3] * 4 + [1] * 4, 0, 0) as console:
        console.cost_of({1: 100.0, 3: 300.0}.__getitem__)
        clock[0] = 20.0
        console.line(6, 60, NUMBERS)  # 4 x 100 + 2 x 300: 2 s by 100
    assert left_of(capsys.readouterr().err) == "0:00:20"


def test_a_resumed_run_counts_from_where_it_is(clock, capsys):
    with TrainConsole([1] * 10 + [3] * 10, 10, 100) as console:
        console.cost_of({1: 100.0, 3: 300.0}.__getitem__)
        clock[0] = 10.0
        assert console.line(15, 150, NUMBERS) == pytest.approx(5.0)
        assert left_of(capsys.readouterr().err) == "0:00:10"


def test_a_new_stage_says_that_the_loss_is_another(capsys):
    with TrainConsole([1, 1, 3], 0, 0) as console:
        for step in (1, 2):
            console.begins(step)
        assert not capsys.readouterr().err
        console.begins(3)
    assert "step 3: depth 1 -> 3" in capsys.readouterr().err
