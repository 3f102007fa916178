"""A Watch alone: ranks that wait, leave early, live on or are interrupted, without a training."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import ranks

from headtrain.train import watch
from headtrain.train.board import Board, End, RankError
from headtrain.train.nodes import same_everywhere
from headtrain.train.watch import Stopped, Watch


def started(target, tmp_path) -> list[int]:
    return ranks.finish(ranks.start_ranks(target, 2, tmp_path), 60.0)


def watched() -> Watch:
    watch.BEAT, watch.GRACE, watch.LAPSE = 0.1, 0.3, 2.0
    return Watch(60.0)


def test_a_rank_may_live_on_when_it_has_left(tmp_path):
    """The rendezvous ends with rank 0, which is nobody's business any more."""
    assert started(leave_and_live_on, tmp_path) == [0, 0]


def leave_and_live_on(rank: int) -> None:
    with watched():
        pass
    if rank == 1:
        time.sleep(2.5)


def test_a_rank_that_has_left_is_not_missed(tmp_path):
    """However long rank 0 has something left to do."""
    assert started(leave_early, tmp_path) == [0, 0]


def leave_early(rank: int) -> None:
    with watched() as run:
        run.share("all are there")
        began = time.monotonic()
        if rank == 0:
            time.sleep(4)
    assert rank == 0 or time.monotonic() - began < 2  # nor does it wait for those that stay


def test_one_that_is_killed_while_others_wait_for_it_is_named(tmp_path):
    """No exchange breaks where ranks wait for one that captures, say: the signs of life alone tell."""
    assert started(die, tmp_path) == [3, -signal.SIGKILL]
    text = (tmp_path / "rank-0.log").read_text()
    assert "rank 1 (" in text and "no sign of life for 2 s" in text


def die(rank: int) -> None:
    try:
        with watched() as run:
            run.share("all are there")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.share("never")
    except RankError as error:
        print(error)
        sys.exit(3)


def test_ctrl_c_to_one_rank_stops_the_others_and_is_no_failure(tmp_path):
    assert started(interrupt, tmp_path) == [4, 130]


def interrupt(rank: int) -> None:
    try:
        with watched() as run:
            if rank == 1:
                raise KeyboardInterrupt
            run.share("never")
    except Stopped:
        sys.exit(4)
    except KeyboardInterrupt:
        sys.exit(130)


def test_a_rank_that_no_signal_reaches_is_told_while_it_waits(tmp_path):
    """Python runs handlers in the main thread alone, and what they raise may be swallowed there."""
    assert started(wait_in_a_thread, tmp_path) == [3, 1]


def wait_in_a_thread(rank: int) -> None:
    if rank == 1:
        with watched():
            raise ValueError("a strange row")
    told = []

    def work() -> None:
        try:
            with watched() as run:
                run.share("never")
        except RankError as error:
            told.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "a strange row" in told[0]
    sys.exit(3)


def test_signals_are_as_before_where_nobody_came(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    numbers = (signal.SIGTERM, watch.WAKE)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(RankError, match="rank 0 of 2 did not start there"), Watch(0.5, rank=1, world=2):
        pass
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("reason, code", [("failure", 2), ("stop", 0)])
def test_a_rank_that_nothing_wakes_is_ended(tmp_path, reason, code):
    """As in an exchange that waits for ever, or in a library that swallows what a signal's handler raises."""
    logs = ranks.start_ranks(sleep_through, 2, tmp_path, reason)
    assert ranks.finish(logs, 60.0)[0] == code
    assert f"({reason})" in (tmp_path / "rank-0.log").read_text()


def sleep_through(rank: int, reason: str) -> None:
    with watched() as run:
        run.share("all are there")
        if rank == 1:
            time.sleep(1)  # until rank 0 sleeps, too
            raise Stopped("(stop)") if reason == "stop" else ValueError("(failure)")
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)


def test_a_wake_that_is_not_ours_is_nothing():
    with Watch(rank=0, world=1):
        os.kill(os.getpid(), watch.WAKE)
        time.sleep(0.01)


def test_a_broken_exchange_is_explained_as_soon_as_there_is_an_end(tmp_path):
    """Not after the time in which a rank without signs of life would be found."""
    codes = ranks.finish(ranks.start_ranks(break_off, 2, tmp_path), 30.0)
    assert codes == [3, 1] and "failed: ValueError: a strange row" in (tmp_path / "rank-0.log").read_text()


def break_off(rank: int) -> None:
    run = watched()
    run.lapse = 600.0
    try:
        with run:
            run.share("all are there")
            if rank == 0:  # its launcher, which sees that rank 1 ends, tells it to end, too
                threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
                raise RuntimeError("gloo: Connection closed by peer")
            time.sleep(1)
            raise ValueError("a strange row")
    except RankError as error:
        print(error)
        sys.exit(3)


def test_of_two_ends_the_first_counts_and_a_launcher_that_starts_again_begins_anew(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    one, other = Board(0, 2, 10.0), Board(1, 2, 10.0)
    first, second = End(0, "the first", True), End(1, "the second", False)
    assert other.end() is None
    assert one.put_down(first) == other.put_down(second) == one.end() == other.end() == first
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Board(1, 2, 10.0).end() is None


def test_only_signals_that_are_listened_for_stop_a_run(tmp_path):
    """Python reports each one that it has a handler for, also those that wake the main thread."""
    assert started(hear, tmp_path) == [0, 0]


def hear(rank: int) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with watched() as run:
        run.listen({signal.SIGUSR1})
        if rank == 1:
            os.kill(os.getpid(), watch.WAKE)
        time.sleep(1)
        assert not run.told
        run.share("nothing was heard")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        end = time.monotonic() + 20
        while not run.told:
            assert time.monotonic() < end
            time.sleep(0.05)
        run.listen(set())


def test_who_differs_is_named_with_what_it_has():
    class Four(Watch):
        def share(self, name, value=""):
            return ["a", "a", "b", "c"]

    line = same_everywhere("the data", "a", Four(rank=0, world=1))
    assert line == "the data: rank 0 has a, rank 2, 3 has b"


@pytest.mark.parametrize("dead, message", [(0, "rank 0 ("), (1, "rank 1 (")])
def test_a_busy_rank_is_told_who_died(tmp_path, dead, message):
    """It asks for nothing itself meanwhile. Rank 0 takes the rendezvous with it."""
    codes = ranks.finish(ranks.start_ranks(die_beside, 2, tmp_path, dead), 50.0)
    assert codes[dead] == -signal.SIGKILL and codes[1 - dead] == 3
    assert message in (tmp_path / f"rank-{1 - dead}.log").read_text()


def die_beside(rank: int, dead: int) -> None:
    try:
        with watched() as run:
            run.share("all are there")
            if rank == dead:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    except RankError as error:
        print(error)
        sys.exit(3)


def test_an_error_after_another_rank_s_end_is_said_to_follow_from_it(tmp_path):
    assert started(fail_later, tmp_path) == [3, 1]
    assert "failed: ValueError: a strange row" in (tmp_path / "rank-0.log").read_text()


def fail_later(rank: int) -> None:
    try:
        with watched() as run:
            run.share("all are there")
            if rank == 1:
                time.sleep(1)
                raise ValueError("a strange row")
            with contextlib.suppress(RankError):  # a library that swallows it, and fails itself
                time.sleep(60)
            raise OSError("half a file")
    except RankError as error:
        print(error)
        sys.exit(3)
