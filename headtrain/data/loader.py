"""Batches for training: whole rows packed to a token budget, in an order that seed and epoch alone decide."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ..types import Batch, Features, Row, Wants
from .quantize import Form, as_stored

# The target's taps are hooks on its modules: two forwards at a time (training's read-ahead and an evaluation) would
# write into each other's features.
_ONE_FORWARD = threading.Lock()
OPEN_BINS = 32  # partly filled micro-batches that wait for a row that fits


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of each micro-batch of one epoch: every row once, at most ``batch_tokens`` tokens in one micro-batch (a
    longer row goes alone).

    Rows are shuffled, then each goes to the fullest of the last 32 open micro-batches that it fits in, or to a new one
    (where a longer row leaves room for no other). The micro-batches are shuffled again, so that the ill-filled ones do
    not all come last. The result depends on nothing else: not on ranks, not on where a run was interrupted.
    """
    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    done: list[list[int]] = []
    bins: list[list[int]] = []
    room: list[int] = []
    for row in torch.randperm(len(lengths), generator=generator).tolist():
        n = lengths[row]
        best = min((i for i, free in enumerate(room) if free >= n), key=room.__getitem__, default=None)
        if best is None:
            if len(bins) == OPEN_BINS:
                fullest = min(range(OPEN_BINS), key=room.__getitem__)
                done.append(bins.pop(fullest))
                room.pop(fullest)
            bins.append([])
            room.append(batch_tokens)
            best = -1
        bins[best].append(row)
        room[best] -= n
    done += bins
    return [done[i] for i in torch.randperm(len(done), generator=generator).tolist()]


def _mix(seed: int, epoch: int) -> int:
    """One generator seed for (seed, epoch); adjacent seeds share no epoch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")


class Source(Protocol):
    """What a loader reads: a ``FeatureStore`` or an ``OnlineSource``."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def batch(self, indices: Sequence[int]) -> tuple[Batch, Features]: ...


class OnlineSource:
    """Rows whose features are computed when they are asked for.

    features: ``Target.features``. form: round as a store of that form would, so that online training equals offline
    training; None keeps the target's own dtype.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        features: Callable[[Batch, Wants], Features],
        wants: Wants,
        form: Form | None = None,
    ) -> None:
        self.rows, self.features, self.wants, self.form = rows, features, wants, form
        self.lengths = [len(row) for row in rows]

    def batch(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        batch = Batch.pack([self.rows[i] for i in indices])
        with _ONE_FORWARD:
            features = self.features(batch, self.wants)
        return batch, features if self.form is None else as_stored(features, self.form)


class Loader:
    """Micro-batches by their global number, the same for any number of ranks and from any start.

    Global micro-batch g is the g-th of the endless sequence epoch 0, epoch 1, ...; rank r of R takes every g with
    g % R == r. Epochs are packed afresh, so their numbers of micro-batches may differ by a few:
    ``micro_batches_per_epoch`` is epoch 0's, by which schedules are planned. device, dtype: moved there (``dtype`` for
    hidden states only) in the background thread. ``waited``: seconds that ``batches`` kept its consumer waiting.
    """

    def __init__(
        self,
        source: Source,
        batch_tokens: int,
        seed: int = 0,
        *,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not source.lengths:
            raise ValueError("no rows to train on: every row was dropped, or the data is empty")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self.source, self.batch_tokens, self.seed = source, batch_tokens, seed
        self.rank, self.ranks, self.prefetch = rank, ranks, prefetch
        self.device, self.dtype = device, dtype
        self.waited = 0.0
        self._plan = plan_epoch(source.lengths, batch_tokens, seed, 0)
        self._epoch = 0
        self._starts = [0, len(self._plan)]  # global number of the first micro-batch of each epoch known so far

    @property
    def micro_batches_per_epoch(self) -> int:
        return self._starts[1]

    def rows_of(self, number: int) -> tuple[int, list[int]]:
        """(epoch, row indices) of global micro-batch ``number``."""
        while number >= self._starts[-1]:
            self._load_epoch(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + len(self._plan))
        epoch = next(e for e in range(len(self._starts) - 2, -1, -1) if self._starts[e] <= number)
        if epoch != self._epoch:
            self._load_epoch(epoch)
        return epoch, self._plan[number - self._starts[epoch]]

    def _load_epoch(self, epoch: int) -> None:
        self._plan = plan_epoch(self.source.lengths, self.batch_tokens, self.seed, epoch)
        self._epoch = epoch

    def at(self, number: int) -> tuple[Batch, Features]:
        """Global micro-batch ``number``, read now, in this thread."""
        batch, features = self.source.batch(self.rows_of(number)[1])
        if self.device is None and self.dtype is None:
            return batch, features
        device = features.layers.device if self.device is None else self.device
        return batch.to(device), features.to(device, self.dtype)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, Features]]:
        """This rank's micro-batches numbered ``start`` <= g < ``stop`` (None: endless), read ahead by one background
        thread. An exception there is raised here, with its own traceback. Close the iterator (or leave it to the
        garbage collector) to stop the thread; do not call ``at`` while it is open."""
        first = start + (self.rank - start) % self.ranks
        ready: queue.Queue = queue.Queue(maxsize=self.prefetch)
        closed = threading.Event()

        def put(item: object) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def work() -> None:
            try:
                number = first
                while stop is None or number < stop:
                    if closed.is_set() or not put(self.at(number)):
                        return
                    number += self.ranks
                put(None)
            except BaseException as error:  # carried to the consumer, whatever it is
                put(error)

        thread = threading.Thread(target=work, name="headtrain-loader", daemon=True)
        thread.start()
        try:
            while True:
                begin = time.perf_counter()
                item = ready.get()
                self.waited += time.perf_counter() - begin
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()
