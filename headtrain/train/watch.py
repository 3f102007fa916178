"""Ranks look after each other: one that fails, dies or never starts ends the others, which say who it was and why.

Each rank has a thread that gives a sign of life every second on the ``Board`` and looks there for an end: the first
failure, or a request to stop, that any rank has put down. No rank waits for a dead one, so waiting for a living one
(rank 0 captures for hours, say) needs no time limit. One process alone has no thread.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from .board import OTHER_PORT, Board, End, RankError

BEAT = 1.0  # seconds between signs of life
LAPSE = 60.0  # a rank without one for so long is dead; with a broken connection to some rank, a tenth is enough
GRACE = 5.0  # for the main thread to end by itself once there is a reason to, and for others to read that reason
WAKE = signal.SIGURG  # wakes the main thread; by default nobody sends it and nobody minds it


class Stopped(BaseException):
    """SIGTERM before training began, or after it ended; no Exception, so that nothing takes it for a failure."""


class Watch:
    """Use as a context around everything that ranks do together. ``rank`` of ``world``, as the launcher (torchrun,
    accelerate, srun) sets RANK and WORLD_SIZE; ``first_on_node``: local rank 0. timeout: seconds for all to start.

    Entering waits until all ranks are there. An exception that leaves the context is told to the other ranks; where it
    only follows from what happened to another one, RankError is raised instead. SIGTERM raises Stopped inside, on
    every rank, until training takes the signal over.
    """

    def __init__(self, timeout: float = 600.0, rank: int | None = None, world: int | None = None) -> None:
        env = os.environ
        self.rank = int(env.get("RANK", 0)) if rank is None else rank
        self.world = int(env.get("WORLD_SIZE", 1)) if world is None else world
        self.first_on_node = int(env.get("LOCAL_RANK", self.rank)) == 0
        self.timeout, self.lapse = timeout, min(LAPSE, timeout)
        self._me = f"rank {self.rank} ({socket.gethostname()}, process {os.getpid()})"
        self._names = {self.rank: self._me}
        self._place, self._shared = "starting", 0
        self._end: End | None = None
        self._over = threading.Event()
        self._old: dict[int, Any] = {}
        self.told = False  # some rank was told to stop by a signal that it listens for
        self._signals: set[int] = set()
        if self.world > 1:
            self._heard, self._wake = socket.socketpair()
            self._heard.setblocking(False), self._wake.setblocking(False)

    # -- what a run calls -----------------------------------------------------------------------------------------

    def at(self, place: str) -> None:
        """Say where this rank is, for the message of a rank that waits for it in vain."""
        self._place = place

    def share(self, name: str, value: str = "") -> list[str]:
        """All ranks' values in the order of ranks; every rank calls it with the same names in the same order. Waits
        for the slowest, however long it lives. Raises RankError."""
        if self.world == 1:
            return [value]
        self._shared += 1
        key = f"{name}/{self._shared}"
        self._board.put(key, value)
        self._place, before = f"waiting for all ranks at {name}", self._place
        wait = 0.01
        while (values := self._board.all(key)) is None:
            self._raise_end()  # the thread wakes this one, but a library may swallow what that raises
            time.sleep(wait)
            wait = min(2 * wait, 0.5)
        self._place = before
        return values

    def listen(self, signals: set[int]) -> None:
        """From now on ``told`` becomes true on every rank within two beats of one of these signals to any. Python
        runs its handlers between two steps of the main thread, and so never in an exchange that waits for a rank."""
        self._signals = signals
        if self.world > 1:
            signal.set_wakeup_fd(self._wake.fileno() if signals else -1, warn_on_full_buffer=False)

    # -- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._caught) for number in (signal.SIGTERM, WAKE)}
        try:
            if self.world > 1:
                self._join()
                threading.Thread(target=self._look, args=[self._board.clone()], daemon=True).start()
        except BaseException as error:
            self._restore()
            if isinstance(error, dist.DistError):
                self._end = self._board.lost(error)
                self._raise_end(error)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._old:
            signal.signal(WAKE, signal.SIG_IGN)
            if error is not None:  # a launcher sends SIGTERM to the ranks that are left: first find out why
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if self.world > 1 and error is None:
                self._say_goodbye()
            elif self.world > 1:
                self._leave(error)
        finally:
            self._over.set()
            self._restore()

    def _join(self) -> None:
        """Wait until all ranks are there. Raises RankError naming those that did not come."""
        until = time.monotonic() + self.timeout
        self._board = Board(self.rank, self.world, self.timeout)
        if (other := self._board.claim("here", self._me)) != self._me:  # nothing is put down there: it is not ours
            raise RankError(
                f"rank {self.rank}: another run has the port of {self._board.where}, {other} is there; {OTHER_PORT}"
            )
        while (names := self._board.all("here")) is None:
            self._end = self._board.end()
            self._raise_end()
            if time.monotonic() > until:
                self._nobody_came(self._board.missing("here"))
            time.sleep(0.1)
        self._names = dict(enumerate(names))

    def _nobody_came(self, missing: list[int]) -> None:
        ranks = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        text = (
            f"did not start: {len(missing)} of {self.world} ranks ({ranks}) were not at {self._board.where} within "
            f"{self.timeout:g} s; see what their nodes say, and that every node starts the same number of processes"
        )
        self._board.put_down(End(missing[0], text, failed=True))
        self._say_goodbye()
        raise RankError(f"rank {missing[0]} {text}")

    def _leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends; or find out whose end it follows from, and raise that."""
        end = self._end or (self._who_is_gone(error) if _is_connection(error) else None)
        if end is None:
            failed = not isinstance(error, Stopped | KeyboardInterrupt)
            name = "" if type(error).__module__.startswith("headtrain") else f"{type(error).__name__}: "
            end = End(self.rank, f"{name}{error}", failed)
        self._end = self._board.put_down(end)
        self._say_goodbye()
        if self._end.rank != self.rank or _is_connection(error):
            self._raise_end(error)

    def _say_goodbye(self) -> None:
        """Rank 0 goes last where the store lives in it: once there is an end, when all had time to read it."""
        until, ends = time.monotonic() + self.timeout, False
        try:
            self._board.put("bye")
            while self._board.hosted and self._board.all("bye") is None and time.monotonic() < until:
                if not ends and (self._end or self._board.end()):
                    until, ends = time.monotonic() + GRACE, True
                time.sleep(0.05)
        except RuntimeError:
            pass  # the others are gone

    def _raise_end(self, cause: BaseException | None = None) -> None:
        end = self._end
        if end is None:
            return
        if not end.failed:
            raise Stopped(end.message) from cause
        raise RankError(f"{self._names.get(end.rank, f'rank {end.rank}')} failed: {end.message}") from cause

    # -- signals --------------------------------------------------------------------------------------------------

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if number == WAKE and self._end is None:
            return  # not ours
        self._raise_end()
        raise Stopped("SIGTERM")

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _look(self, board: Board) -> None:
        count = 0
        # rank 0 looks at all, the others at rank 0: work in proportion to the number of ranks
        others = range(1, self.world) if self.rank == 0 else [0]
        while not self._over.wait(BEAT if count else 0.0):
            count += 1
            try:
                board.beat(count, self._place)
                if self._signals & self._received():
                    board.ask()
                self.told = board.asked()
                end = board.end()
                for rank in others:
                    if end is None and board.silent(rank) > self.lapse:
                        end = board.put_down(board.gone(rank, self.lapse))
            except RuntimeError as error:
                end = board.lost(error)
            if end is not None:
                self._finish(end)
                return

    def _received(self) -> set[int]:
        """Numbers of the signals that came since the last call."""
        try:
            return set(self._heard.recv(4096))
        except BlockingIOError:
            return set()

    def _finish(self, end: End) -> None:
        """End the main thread; the whole process, where that is stuck (in an exchange with a rank that is gone)."""
        self._end = end
        if self._old and not self._over.is_set():
            signal.pthread_kill(threading.main_thread().ident, WAKE)
        if self._over.wait(2 * GRACE):
            return
        try:
            self._raise_end()
        except BaseException as error:
            print(f"error: {self._me} stops: {error}", file=sys.stderr, flush=True)
        os._exit(2 if end.failed else 0)

    # -- a broken or timed-out exchange ---------------------------------------------------------------------------

    def _who_is_gone(self, error: BaseException) -> End:
        """The end that some rank put down, or of the one that gives no signs of life any more. Where all live, one
        that says where each of them is."""
        patience, board = max(self.lapse / 10, 3 * BEAT), self._board
        others = [rank for rank in range(self.world) if rank != self.rank]
        until = time.monotonic() + patience + 2 * BEAT
        try:
            while time.monotonic() < until:
                if end := (self._end or board.end()):
                    return end
                for rank in others:
                    if board.silent(rank) > patience:
                        return board.gone(rank, patience)
                time.sleep(BEAT / 4)
        except RuntimeError as gone:
            return self._end or board.lost(gone)
        at = "; ".join(f"rank {rank}: {board.place(rank)}" for rank in others[:16])
        return End(self.rank, f"{type(error).__name__}: {error} (here: {self._place}; {at})", failed=True)


def _is_connection(error: BaseException) -> bool:
    """Whether the error is of an exchange between ranks. gloo's are plain RuntimeErrors that name it or its files."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed by peer"))
    )


ALONE = Watch(rank=0, world=1)
