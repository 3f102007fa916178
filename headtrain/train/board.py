"""What ranks tell each other besides gradients: who is there, alive, done, and why the run ends.

It stands in the launcher's rendezvous store. That lives in rank 0, or in torchrun's agent on the first node.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

OTHER_PORT = (
    "choose another one: `accelerate launch --main_process_port N`, `torchrun --master-port N`, or MASTER_PORT=N for "
    "every rank of a launcher of your own"
)


class RankError(RuntimeError):
    """Another rank failed, or never started; the message says which, where and why."""


@dataclass
class End:
    """Why a run ends early: rank ``rank`` failed with ``message``, or was told to stop."""

    rank: int
    message: str
    failed: bool


class Board:
    """One client of the store, for one thread. Every method may raise RuntimeError: the store is gone."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        """Connects within ``timeout`` seconds, or raises RankError."""
        env = os.environ
        self.rank, self.world = rank, world
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        self.where = f"{host}:{port}"
        self.hosted = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # the store ends with this rank
        seconds, made = timedelta(seconds=timeout), Future()

        def connect() -> None:
            try:  # torch's own rendezvous shares the server: multi_tenant
                store = dist.TCPStore(host, port, None, self.hosted, seconds, wait_for_workers=False, multi_tenant=True)
                made.set_result(store)
            except Exception as error:
                made.set_exception(error)

        # in a thread: torch waits for ever for an answer of what listens there, and no signal is handled meanwhile
        threading.Thread(target=connect, daemon=True).start()
        try:
            self._client = made.result(timeout + 1)
        except TimeoutError:
            raise RankError(self._no_rendezvous("no answer", timeout)) from None
        except dist.DistError as error:
            raise RankError(self._no_rendezvous(_first_line(error), timeout)) from None
        self._open()

    def _open(self) -> None:
        prefix = f"headtrain/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self._store = dist.PrefixStore(prefix, self._client)
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: the last sign of life and when it was noticed

    def _no_rendezvous(self, why: str, timeout: float) -> str:
        if self.hosted and "EADDRINUSE" in why:
            port = self.where.rpartition(":")[2]
            return (
                f"rank 0: port {port}, where the ranks are to meet, is in use by another program ({why}); {OTHER_PORT}"
            )
        return (
            f"rank {self.rank}: no rendezvous at {self.where} within {timeout:g} s: rank 0 of {self.world} did not "
            f"start there (see what it says), or another program has that port, or the address or port is wrong ({why})"
        )

    def clone(self) -> Board:
        """Another client of the same store."""
        other = copy.copy(self)
        other._client = self._client.clone()
        other._open()
        return other

    # -- one value of each rank ---------------------------------------------------------------------------------------

    def put(self, name: str, value: str = "") -> None:
        self._store.set(f"{name}/{self.rank}", value)

    def claim(self, name: str, value: str) -> str:
        """``put``, unless this rank has a value already; returns the one that it has."""
        return self._store.compare_set(f"{name}/{self.rank}", "", value).decode()

    def all(self, name: str) -> list[str] | None:
        """The values of all ranks, in their order; None while one is missing."""
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        return [value.decode() for value in self._store.multi_get(keys)] if self._store.check(keys) else None

    def missing(self, name: str) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([f"{name}/{rank}"])]

    # -- signs of life ------------------------------------------------------------------------------------------------

    def beat(self, count: int, place: str) -> None:
        self.put("beat", f"{count} {place}")

    def silent(self, rank: int) -> float:
        """Seconds since this client noticed the last sign of life of ``rank``; 0 once that has said goodbye."""
        key, now = f"beat/{rank}", time.monotonic()
        if self._store.check([f"bye/{rank}"]):
            return 0.0
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        return now - self._seen[rank][1]

    def place(self, rank: int) -> str:
        """Where ``rank`` was at the last sign of life that this client noticed."""
        return self._seen[rank][0].partition(" ")[2] or "starting"

    def gone(self, rank: int, seconds: float) -> End:
        text = f"no sign of life for {seconds:.0f} s: killed, out of memory, or its node is gone"
        return End(rank, f"{text} (last seen: {self.place(rank)})", failed=True)

    # -- a request to stop --------------------------------------------------------------------------------------------

    def ask(self) -> None:
        self._store.set("stop", "")

    def asked(self) -> bool:
        """Whether any rank was told to stop training."""
        return self._store.check(["stop"])

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> End | None:
        return End(**json.loads(self._store.get("end"))) if self._store.check(["end"]) else None

    def put_down(self, end: End) -> End:
        """The first end counts; returns it."""
        try:
            return End(**json.loads(self._store.compare_set("end", "", json.dumps(asdict(end)))))
        except RuntimeError:
            return end

    def lost(self, error: RuntimeError) -> End:
        """The end of a run whose store is gone."""
        where = f"the rendezvous at {self.where} is gone with it ({_first_line(error)})"
        return End(0, f"it was killed, or its node or launcher was: {where}", failed=True)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
