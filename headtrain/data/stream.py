"""Training from a store while it is captured, on a disk that need not hold it all.

The order of the rows is fixed before (``order.Windows``), so capture knows which shards training will need next.
Training says how far it is; capture deletes what is not needed soon, captures what is, and pauses where the disk's
budget is used up. A shard that is needed again, in another epoch or by a run that was resumed at an earlier step, is
captured again.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..shift import final_positions
from ..types import Batch, Features, Row, Wants
from .manifest import MANIFEST, Manifest, StoreError, differences, human, record_name
from .meter import Meter
from .order import Windows
from .produce import capture_shard, tokens_of
from .storage import Storage, no_room
from .store import FeatureStore
from .store_writer import StoreWriter
from .workers import Workers

POSITION = "position.txt"  # the visit that training was at, for a capture that is started before it comes back
OVERHEAD = 4096  # bytes of a shard's header and record beside its rows'
ROW_OVERHEAD = 300  # bytes of a row in the record


def shard_sizes(plan: Manifest, rows: Sequence[Row]) -> list[int]:
    """Bytes of each shard with its record, rounded up."""
    sizes = []
    for first, end in zip(plan.shards[:-1], plan.shards[1:], strict=True):
        batch = Batch.pack(rows[first:end])
        finals = len(batch) if plan.final == "all" else len(final_positions(batch))
        names = sum(len(row.source) + len(row.route) for row in rows[first:end])
        sizes.append(plan.bytes(len(batch), finals, end - first) + OVERHEAD + ROW_OVERHEAD * (end - first) + names)
    return sizes


def check_budget(sizes: Sequence[int], window: int, budget: float) -> None:
    """Raises StoreError where the largest window does not fit."""
    if (need := sum(sorted(sizes)[-window:])) > budget:
        raise StoreError(
            f"features.keep_gb: {human(budget)} do not hold the {min(window, len(sizes))} shards among which rows are "
            f"shuffled ({human(need)}; twice that, to capture ahead of training). A smaller features.window or "
            "features.shard_tokens needs less"
        )


class FeatureStream:
    """A source for a ``Loader`` with ``windows`` whose shards are captured by other processes, now or soon.

    plan: the manifest that the store has or will have. wait: seconds that a missing shard is waited for while no
    capture lives. ``batch`` and ``open`` raise StoreError. One reader thread.
    """

    def __init__(
        self,
        storage: Storage,
        plan: Manifest,
        rows: Sequence[Row],
        console: Console,
        *,
        wants: Wants,
        timeout: float,
        wait: float,
        rank: int = 0,
    ) -> None:
        self.storage, self.manifest, self.rows, self.wants = storage, plan, rows, wants
        self.lengths = [len(row) for row in rows]
        self._console, self._timeout, self._wait, self._rank = console, timeout, wait, rank
        self._store: FeatureStore | None = None
        self._workers: Workers | None = None
        self._closed = threading.Event()

    def open(self, visit: int, order: str) -> None:
        """Tell capture that training is there and will read from ``visit`` on, in this ``Windows.name``. Raises
        StoreError where a capture goes by another."""
        self._closed.clear()
        workers = Workers(
            self.storage, "training", self._console, self._timeout, self._rank, watch=self._rank == 0, order=order
        )
        workers.me.at = visit
        try:
            for worker in workers.look():  # of an earlier run
                if worker.finished:
                    self.storage.delete(f"worker-{worker.id}.json")
            self._workers = workers.__enter__()
        except OSError as error:
            self._read_alone(error)

    def _read_alone(self, error: OSError) -> None:
        """A store that is complete is read where nothing may be written, too: nobody deletes there, either."""
        records = map(record_name, range(len(self.manifest.shards) - 1))
        if not {MANIFEST, *records} <= self.storage.names():
            raise StoreError(
                f"{self.storage} is not complete and cannot be written ({no_room(error) or error}): training says "
                "there how far it is. Make it writable, or capture all of it first (features.mode=offline)"
            ) from None
        why = error.strerror or error
        self._console.print(f"{self.storage} is complete and cannot be written ({why}): it is read", markup=False)

    def reach(self, visit: int) -> None:
        """Shards of earlier visits are not needed any more."""
        workers = self._workers  # ``close`` may take it away in another thread
        if workers is None or visit == workers.me.at:
            return
        if self._store is not None:
            for number in self._store.opened():
                self._store.forget(number)
        workers.tell(at=visit)
        if self._rank == 0:
            self.storage.write(POSITION, str(visit).encode(), sync=False)

    def close(self, finished: bool) -> None:
        """finished: training needs nothing more; else it may come back. Ends a ``batch`` that waits in its thread."""
        self._closed.set()
        if self._workers is not None:
            if finished:
                self._workers.tell(finished=True, place="finished")
                self.storage.delete(POSITION)
            self._workers.__exit__()
            self._workers = None

    def batch(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        """As ``FeatureStore.batch``; waits for shards that are not there yet."""
        self._await(MANIFEST, "the store")
        if self._store is None:
            if lines := differences(Manifest.read(self.storage), self.manifest):
                raise StoreError(f"{self.storage} holds features made otherwise (stored / now): {'; '.join(lines)}")
            self._store = FeatureStore(self.storage, rows=self.rows, wants=self.wants, growing=True)
        needed = self._store.shards_of(indices)
        while True:
            for number in needed:
                self._await(record_name(number), f"shard {number}")
            try:
                return self._store.batch(indices)
            except (StoreError, OSError):
                if {record_name(number) for number in needed} <= self.storage.names():
                    raise
                for number in needed:  # deleted this moment, by a capture that had not seen where this training is
                    self._store.forget(number)

    def _await(self, name: str, what: str) -> None:
        since, place, workers = time.monotonic(), f"waiting for {what}", self._workers
        while name not in self.storage.names():
            if workers is None:
                raise StoreError(f"{self.storage}: {what} is not there")
            if workers.me.place != place:
                workers.tell(place=place)
            if any(worker.role == "capture" for worker in workers.look()):
                since = time.monotonic()
            elif time.monotonic() - since > self._wait:
                died = f" ({workers.dead[-1]})" if workers.dead else ""
                raise StoreError(
                    f"{self.storage}: {what} is missing and no capture has been running for {self._wait:g} s{died}; "
                    "start `python -m headtrain.capture` with the same recipe, then this again"
                )
            if self._closed.wait(self.storage.poll):
                raise StoreError("closed")


def produce(
    writer: StoreWriter,
    workers: Workers,
    rows: Sequence[Row],
    target: Any,
    wants: Wants,
    meter: Meter,
    *,
    batch_tokens: int,
    sizes: Sequence[int],
    windows: Windows,
    seed: int,
    budget: float = math.inf,
    wait: float = 300.0,
) -> None:
    """Capture what training needs next, in its order, with at most ``budget`` bytes of shards on the disk; together
    with any number of other processes. Returns when training has finished, or all shards are there and may stay.

    sizes: ``shard_sizes``. wait: seconds that training is waited for when there is nothing else to do. Raises
    StoreError.
    """
    lengths = [len(row) for row in rows]
    check_budget(sizes, windows.size, budget)
    past = {worker.id for worker in workers.look() if worker.finished}
    at, known, paused, since = _position(writer.storage), writer.complete(), False, time.monotonic()
    mine: set[int] = set()
    if (held := sum(sizes[n] for n in known)) > budget:  # not a stream's: somebody captured them to stay
        raise StoreError(
            f"features.keep_gb: {writer.storage} holds {human(held)} of shards already, and {human(budget)} would make "
            "this delete some of them. Raise keep_gb or leave it out to keep all, or choose another features.dir; to "
            "give them up, delete the folder"
        )
    while True:
        complete = writer.complete()
        if theirs := complete - known - mine:
            meter.advance(0, meter.others + tokens_of(writer.manifest, lengths, theirs))
        known, mine = complete, set()
        training = [w for w in workers.look() if w.role == "training" and w.id not in past]
        running = [w for w in training if not w.finished]
        if (training and not running) or (len(complete) == windows.shards and sum(sizes) <= budget):
            return
        if running:
            at, since = min(worker.at for worker in running), time.monotonic()

        wanted = windows.wanted(at, seed, sizes, budget)
        for number in complete.difference(wanted):
            writer.remove(number)
        for number in workers.abandoned() - set(wanted):
            writer.remove(number)
            workers.forget(number)
        number = workers.take([n for n in wanted if n not in complete])
        if number is not None:
            held = sum(sizes[n] for n in writer.complete() | workers.claimed().keys())
            if held <= budget:
                if capture_shard(writer, workers, number, rows, target, wants, batch_tokens, meter):
                    mine, since = {number}, time.monotonic()
                continue
            workers.release(number)  # another process has seen an earlier position of training
            time.sleep(writer.storage.poll * random.random())
            continue
        if not paused:
            paused = True
            workers.console.print(
                f"{writer.storage}: captured ahead as far as {human(budget)} go; waits for training", markup=False
            )
        if time.monotonic() - since > wait:
            died = f" ({workers.dead[-1]})" if workers.dead else ""
            raise StoreError(
                f"{writer.storage}: no training has been reading for {wait:g} s{died}; start it, and this again: what "
                "is captured is kept"
            )
        time.sleep(writer.storage.poll)


def _position(storage: Storage) -> int:
    try:
        return int(storage.read(POSITION))
    except (FileNotFoundError, ValueError):
        return 0
