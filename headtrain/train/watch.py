"""Ranks look after each other: one that fails, dies or never starts ends the others, which say who it was and why.

Each rank has a thread that gives a sign of life every second through the launcher's rendezvous store and looks there
for an end: the first failure, or a request to stop, that any rank has put down. No rank waits for a dead one, so
waiting for a living one (rank 0 captures for hours, say) needs no time limit. One process alone has no thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

BEAT = 1.0  # seconds between signs of life
LAPSE = 60.0  # a rank without one for so long is dead; with a broken connection to some rank, a tenth is enough
GRACE = 5.0  # for the main thread to end by itself once there is a reason to, and for others to read that reason
WAKE = signal.SIGURG  # wakes the main thread; by default nobody sends it and nobody minds it


class RankError(RuntimeError):
    """Another rank failed, or never started; the message says which, where and why."""


class Stopped(BaseException):
    """SIGTERM before training began, or after it ended; no Exception, so that nothing takes it for a failure."""


@dataclass
class End:
    """Why a run ends early: rank ``rank`` failed with ``message``, or was told to stop."""

    rank: int
    message: str
    failed: bool


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
        keys = [f"{name}/{self._shared}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], value)
        self._place, before = f"waiting for all ranks at {name}", self._place
        wait = 0.01
        while not self._store.check(keys):
            self._raise_end()
            time.sleep(wait)
            wait = min(2 * wait, 0.5)
        self._place = before
        return [self._store.get(key).decode() for key in keys]

    # -- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._caught) for number in (signal.SIGTERM, WAKE)}
        try:
            if self.world > 1:
                self._join()
                threading.Thread(target=self._look, name="headtrain-watch", daemon=True).start()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._old:
            signal.signal(WAKE, signal.SIG_IGN)
            if error is not None:  # a launcher sends SIGTERM to the ranks that are left: first find out why
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if self.world > 1:
                self._leave(error)
        finally:
            self._over.set()
            self._restore()

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self._say_goodbye(self.timeout)
            return
        end = self._end or self._read_end()
        if end is None and _is_connection(error):
            end = self._who_is_gone(error)
        if end is None:
            failed = not isinstance(error, Stopped | KeyboardInterrupt)
            name = "" if type(error).__module__.startswith("headtrain") else f"{type(error).__name__}: "
            end = End(self.rank, f"{name}{error}", failed)
        end = self._put_down(end)
        self._end = end
        self._say_goodbye(GRACE)
        if end.rank != self.rank or _is_connection(error):
            self._raise_end(error)

    def _say_goodbye(self, patience: float) -> None:
        """The store lives in rank 0 unless the launcher has it: rank 0 goes last."""
        try:
            self._store.set(f"bye/{self.rank}", "")
            until = time.monotonic() + patience
            keys = [f"bye/{rank}" for rank in range(self.world)]
            while self._hosts and not self._store.check(keys) and time.monotonic() < until:
                if self._end is None and self._read_end():
                    until = min(until, time.monotonic() + GRACE)
                    self._end = self._read_end()
                time.sleep(0.05)
        except RuntimeError:
            pass  # the others are gone

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if number == WAKE and self._end is None:
            return  # not ours
        self._raise_end()
        raise Stopped("SIGTERM")

    def _raise_end(self, cause: BaseException | None = None) -> None:
        end = self._end
        if end is None:
            return
        if not end.failed:
            raise Stopped(end.message) from cause
        raise RankError(f"{self._names.get(end.rank, f'rank {end.rank}')} failed: {end.message}") from cause

    # -- starting together ----------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connect to the store and wait until all ranks have. Raises RankError naming those that did not come."""
        env, until = os.environ, time.monotonic() + self.timeout
        host, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 29500))
        self._where = f"{host}:{port}"
        self._hosts = self.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:  # torch's own rendezvous shares the server: multi_tenant
            base = dist.TCPStore(
                host,
                port,
                None,
                self._hosts,
                timedelta(seconds=self.timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
            mine = base.clone()
        except dist.DistError as error:
            raise RankError(
                f"rank {self.rank}: no rendezvous at {self._where} within {self.timeout:g} s: rank 0 of {self.world} "
                f"did not start there, or the address or port is wrong ({str(error).splitlines()[0]})"
            ) from None
        prefix = f"headtrain/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self._store, self._beats = dist.PrefixStore(prefix, base), dist.PrefixStore(prefix, mine)
        self._store.set(f"here/{self.rank}", self._me)
        keys = [f"here/{rank}" for rank in range(self.world)]
        while not self._store.check(keys):
            if self._read_end():
                self._end = self._read_end()
                self._raise_end()
            if time.monotonic() > until:
                self._nobody_came([rank for rank, key in enumerate(keys) if not self._store.check([key])])
            time.sleep(0.1)
        self._names = {rank: self._store.get(key).decode() for rank, key in enumerate(keys)}

    def _nobody_came(self, missing: list[int]) -> None:
        ranks = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        text = (
            f"did not start: {len(missing)} of {self.world} ranks ({ranks}) were not at {self._where} within "
            f"{self.timeout:g} s; see what their nodes say, and that every node starts the same number of processes"
        )
        self._put_down(End(missing[0], text, failed=True))
        self._say_goodbye(GRACE)
        raise RankError(f"rank {missing[0]} {text}")

    # -- the thread -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        count, seen = 0, {}
        while not self._over.wait(BEAT if count else 0.0):
            count += 1
            try:
                self._beats.set(f"beat/{self.rank}", f"{count} {self._place}")
                end = self._read_end(self._beats)
                # rank 0 looks at all, the others at rank 0: work in proportion to the number of ranks
                for rank in range(self.world) if self.rank == 0 else [0]:
                    if end is None and rank != self.rank and _silent(self._beats, rank, seen) > self.lapse:
                        end = self._put_down(_gone(rank, self.lapse, seen), self._beats)
            except RuntimeError as error:
                end = self._store_is_gone(error)
            if end is not None:
                self._finish(end)
                return

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

    def _who_is_gone(self, error: BaseException) -> End | None:
        """After a broken or timed-out exchange: the rank that failed or that gives no signs of life any more. Where
        all live, an end that says where each of them is."""
        patience, began = max(self.lapse / 10, 3 * BEAT), time.monotonic()
        seen: Seen = {}
        while time.monotonic() < began + patience + 2 * BEAT:
            if end := (self._end or self._read_end()):
                return end
            try:
                for rank in range(self.world):
                    if rank != self.rank and _silent(self._store, rank, seen) > patience:
                        return _gone(rank, patience, seen)
            except RuntimeError as gone:
                return self._end or self._store_is_gone(gone)
            time.sleep(BEAT / 4)
        places = {rank: beat.decode().partition(" ")[2] for rank, (beat, _) in sorted(seen.items())}
        at = "; ".join(f"rank {rank}: {place}" for rank, place in list(places.items())[:16])
        return End(self.rank, f"{type(error).__name__}: {error} (here: {self._place}; {at})", failed=True)

    def _store_is_gone(self, error: RuntimeError) -> End:
        where = f"the rendezvous at {self._where} is gone with it ({str(error).splitlines()[0]})"
        return End(0, f"it was killed, or its node or launcher was: {where}", failed=True)

    def _read_end(self, store: dist.Store | None = None) -> End | None:
        store = store or self._store
        try:
            return End(**json.loads(store.get("end"))) if store.check(["end"]) else None
        except dist.DistError:
            return None

    def _put_down(self, end: End, store: dist.Store | None = None) -> End:
        """The first end counts; returns it."""
        try:
            return End(**json.loads((store or self._store).compare_set("end", "", json.dumps(asdict(end)))))
        except (RuntimeError, ValueError):
            return end


Seen = dict[int, tuple[bytes, float]]  # by rank: the last sign of life and when it was noticed


def _silent(store: dist.Store, rank: int, seen: Seen) -> float:
    """Seconds since this process noticed the last sign of life of ``rank``; 0 once that has finished."""
    key, now = f"beat/{rank}", time.monotonic()
    if store.check([f"bye/{rank}"]):
        return 0.0
    beat = store.get(key) if store.check([key]) else b""
    if rank not in seen or seen[rank][0] != beat:
        seen[rank] = (beat, now)
    return now - seen[rank][1]


def _gone(rank: int, seconds: float, seen: Seen) -> End:
    place = seen[rank][0].decode().partition(" ")[2] or "starting"
    text = f"no sign of life for {seconds:.0f} s: killed, out of memory, or its node is gone (last seen: {place})"
    return End(rank, text, failed=True)


def _is_connection(error: BaseException) -> bool:
    """Whether the error is of an exchange between ranks. gloo's are plain RuntimeErrors that name it or its files."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed by peer"))
    )


ALONE = Watch(rank=0, world=1)
