"""The processes that work on one feature store, over any number of nodes: signs of life, claims on shards, the dead.

    worker-ID.json          a living process: who it is, how far it is; written every few seconds
    claim-00012-1.json      shard 12 is being captured by the process named inside

They need no process group and no server, only the storage of the store itself. A claim is made by creating its file,
which one process alone can do. The claim of a dead process is not removed but outdone, by creating that of the next
generation: so two processes that notice the same death cannot both take its place, and a process that was given up
while it only stood still sees, before it writes, that its shard is another's by now.

Clocks of different machines are never compared: a process is dead when its file has not changed for ``timeout`` seconds
of the one that watches; or at once, where that runs on the same machine and sees that the process is gone.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from rich.console import Console

from .manifest import StoreError, human
from .storage import Storage

BEAT = 5.0  # seconds between signs of life, or an eighth of the timeout where that is less
_CLAIM = re.compile(r"claim-(\d+)-(\d+)\.json")
_WORKER = re.compile(r"worker-([0-9a-f]+)\.json")

Role = Literal["capture", "training"]


class Worker(BaseModel):
    """What a process says about itself. order: of the shards, in words, that training reads them in or a capture within
    ``keep`` bytes captures and deletes them in; None of a capture that keeps all. at: the first visit of a shard (see
    ``order``) that training still needs. finished: training came to its end and is gone."""

    id: str
    role: Role
    rank: int
    host: str
    pid: int
    machine: str
    started: str
    order: str | None = None
    keep: int | None = None
    beat: int = 0
    place: str = "starting"
    at: int = 0
    finished: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def way(self) -> str:
        if self.role == "training":
            return f"reads shards in the order of {self.order}"
        if self.keep is None:
            return "captures all shards and keeps them"
        return f"keeps {human(self.keep)} of shards in the order of {self.order}"

    def agrees(self, other: Worker) -> bool:
        """Whether neither waits for shards that the other deletes."""
        keeps = {worker.keep for worker in (self, other) if worker.role == "capture"}
        return keeps <= {None} or (len(keeps) == 1 and self.order == other.order)


class Workers:
    """This process among the workers of a store; use as a context. ``rank`` is the launcher's. watch: look at the
    others at every sign of life, and say who died; else only where ``look`` is called. order, keep: see ``Worker``;
    entering raises StoreError where another worker's do not go with them."""

    def __init__(
        self,
        storage: Storage,
        role: Role,
        console: Console,
        timeout: float,
        rank: int = 0,
        watch: bool = True,
        order: str | None = None,
        keep: int | None = None,
    ) -> None:
        self.storage, self.console, self.timeout, self.watch = storage, console, timeout, watch
        self.me = Worker(
            id=storage.tag,
            role=role,
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            started=_started(os.getpid()) or "",
            order=order,
            keep=keep,
        )
        self.dead: list[str] = []  # names of those that died, as they were noticed
        self._seen: dict[str, tuple[int, float]] = {}  # id -> last beat, and when it was noticed
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="headtrain-worker", daemon=True)

    def __enter__(self) -> Workers:
        self.tell()
        try:
            self._check_order(self.look())  # told first: of two that start at once, one at least sees the other
        except BaseException:
            self.storage.delete(f"worker-{self.me.id}.json")
            raise
        self._thread.start()
        return self

    def _check_order(self, others: list[Worker]) -> None:
        for other in others:
            if not other.finished and not self.me.agrees(other):
                raise StoreError(
                    f"{self.storage}: {other.name} {other.way}, but this {self.me.role} {self.me.way}: each would wait "
                    "for shards that the other does not need. Start both with the same train.seed, features.window, "
                    "features.shard_tokens and features.keep_gb, or give this one another features.dir (what was "
                    f"killed on another machine is forgotten after {self.timeout:g} s)"
                )

    def __exit__(self, *_: object) -> None:
        with self._lock:  # no sign of life after the last one: it would stay
            self._over.set()
        self._thread.join()
        if not self.me.finished:
            self.storage.delete(f"worker-{self.me.id}.json")

    def tell(self, **changes: object) -> None:
        """A sign of life, at once, with changes of what this process says about itself; nothing once it has left."""
        with self._lock:
            if self._over.is_set():
                return
            self.me = self.me.model_copy(update=changes | {"beat": self.me.beat + 1})
            self.storage.write(f"worker-{self.me.id}.json", self.me.model_dump_json().encode(), sync=False)

    def _live(self) -> None:
        while not self._over.wait(min(BEAT, self.timeout / 8)):
            try:
                self.tell()
                if self.watch:
                    self.look()
            except Exception as error:  # a moment without the storage; the others wait for some of them
                self.console.print(f"{self.storage}: {error}; trying again", markup=False)

    def look(self) -> list[Worker]:
        """All living workers (and training that finished), this one first. One that died is named, once."""
        with self._lock:
            living, now = [self.me], time.monotonic()
            for name in self.storage.names():
                match = _WORKER.fullmatch(name)
                if match and match[1] != self.me.id and (worker := self._read(name)):
                    beat, noticed = self._seen.get(worker.id, (-1, now))
                    if beat != worker.beat:
                        noticed = now
                    self._seen[worker.id] = (worker.beat, noticed)
                    if worker.finished or not (_is_gone(worker) or now - noticed > self.timeout):
                        living.append(worker)
                    else:
                        self._bury(worker, now - noticed)
            return living

    def _read(self, name: str) -> Worker | None:
        try:
            return Worker.model_validate_json(self.storage.read(name))
        except (FileNotFoundError, ValidationError):  # it left this moment
            return None

    def _bury(self, worker: Worker, silent: float) -> None:
        why = "it was killed, or its memory ran out" if _is_gone(worker) else f"no sign of life for {silent:.0f} s"
        self.dead.append(f"{worker.name} died: {why} (last seen: {worker.place})")
        self.console.print(f"{self.storage}: {self.dead[-1]}", markup=False, style="yellow")
        for name in self.storage.names():
            if name.endswith(f".{worker.id}.tmp"):
                self.storage.delete(name)
        self.storage.delete(f"worker-{worker.id}.json")

    def tidy(self) -> None:
        """Clear away what the dead left in a complete store, without entering; not where nothing may be written."""
        with suppress(OSError):
            self.look()
            for number in self.claimed():
                self.forget(number)

    # -- claims ---------------------------------------------------------------------------------------------------

    def claimed(self) -> dict[int, int]:
        """Shard -> the newest generation of a claim on it, whether its owner lives or not."""
        return {number: generations[-1] for number, generations in self._claims().items()}

    def _claims(self) -> dict[int, list[int]]:
        """Shard -> the generations of the claims on it, ascending, of files that are there and no others."""
        found: dict[int, list[int]] = {}
        for name in self.storage.names():
            if (match := _CLAIM.fullmatch(name)) and name == _claim_file(int(match[1]), int(match[2])):
                found.setdefault(int(match[1]), []).append(int(match[2]))
        return {number: sorted(generations) for number, generations in found.items()}

    def abandoned(self) -> set[int]:
        """Shards whose claim is a dead process's."""
        claimed, living = self.claimed(), {worker.id for worker in self.look()}
        return {number for number, of in claimed.items() if self._owner(number, of) not in living}

    def take(self, shards: Iterable[int]) -> int | None:
        """Claim the first of ``shards`` that nobody captures, or that a dead process has left; None: all are taken."""
        shards, claimed = list(shards), self.claimed()
        for number in shards:
            if number not in claimed and self._claim(number, 1):
                return number
        abandoned = self.abandoned() if any(number in claimed for number in shards) else ()
        for number in shards:
            if number in abandoned and number in claimed and self._claim(number, claimed[number] + 1):
                self.console.print(f"{self.storage}: taking over shard {number} of a dead process", markup=False)
                return number
        return None

    def _claim(self, number: int, generation: int) -> bool:
        if not self.storage.create(_claim_file(number, generation), self.me.id.encode()):
            return False
        self.tell(place=f"shard {number}")
        return True

    def _owner(self, number: int, generation: int) -> str:
        """Whoever made the claim; of a damaged one nobody who lives."""
        try:
            return self.storage.read(_claim_file(number, generation)).decode(errors="replace")
        except FileNotFoundError:  # released this moment: the next look will see what became of it
            return self.me.id

    def mine(self, number: int) -> bool:
        """Whether this process still has the claim on a shard that it took."""
        generation = self.claimed().get(number)
        return generation is not None and self._owner(number, generation) == self.me.id

    def release(self, number: int) -> None:
        """Give a claim back. Those that it outdid go first: what is left never makes the shard look abandoned."""
        if self.mine(number):
            self.forget(number)
        self.tell(place="between shards")

    def forget(self, number: int) -> None:
        """Remove all claims on a shard that is complete, or that this process has the newest claim on."""
        for generation in self._claims().get(number, ()):
            self.storage.delete(_claim_file(number, generation))


def _claim_file(number: int, generation: int) -> str:
    return f"claim-{number:05d}-{generation}.json"


def _machine() -> str:
    """Names this running kernel and this view of its processes; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process started, in ticks: tells it from a later one of the same number. None: there is none, or it has
    ended and its parent has not looked yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_gone(worker: Worker) -> bool:
    """Whether this machine can tell for sure."""
    return worker.machine != "" and worker.machine == _machine() and _started(worker.pid) != worker.started
