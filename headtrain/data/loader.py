"""Batches for training: whole rows packed to a token budget, in an order that seed and epoch alone decide."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ..types import Batch, Features, Row, Wants
from .order import Windows, plan_epoch
from .quantize import Form, as_stored
from .stream import FeatureStream

LOOK = 0.1  # seconds between looks at whether to stop, while there is nothing to yield
JOIN = 5.0  # seconds for the thread to end when all is to stop: it may be in a read that takes minutes

# The target's taps are hooks on its modules: two forwards at a time (training's read-ahead and an evaluation) would
# write into each other's features.
_ONE_FORWARD = threading.Lock()


class Source(Protocol):
    """What a loader reads: a ``FeatureStore``, a ``FeatureStream`` or an ``OnlineSource``."""

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
    ``micro_batches_per_epoch`` is epoch 0's, by which schedules are planned. windows: rows are shuffled within these
    only, not all together; a ``FeatureStream`` needs it. device, dtype: moved there (``dtype`` for
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
        windows: Windows | None = None,
    ) -> None:
        if not source.lengths:
            raise ValueError("no rows to train on: every row was dropped, or the data is empty")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self.source, self.batch_tokens, self.seed = source, batch_tokens, seed
        self.rank, self.ranks, self.prefetch = rank, ranks, prefetch
        self.device, self.dtype = device, dtype
        self.windows, self.waited = windows, 0.0
        self._load_epoch(0)
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
        lengths = self.source.lengths
        if self.windows is None:
            self._plan = plan_epoch(lengths, self.batch_tokens, self.seed, epoch)
        else:
            self._plan, self._visits = self.windows.plan(lengths, self.batch_tokens, self.seed, epoch)
        self._epoch = epoch

    def visit_of(self, number: int) -> int:
        """The first visit of a shard that global micro-batch ``number`` and those after it need (with windows)."""
        epoch, _ = self.rows_of(number)
        return self._visits[number - self._starts[epoch]]

    def at(self, number: int) -> tuple[Batch, Features]:
        """Global micro-batch ``number``, read now, in this thread."""
        rows = self.rows_of(number)[1]
        if isinstance(self.source, FeatureStream):
            self.source.reach(self.visit_of(number))
        batch, features = self.source.batch(rows)
        if self.device is None and self.dtype is None:
            return batch, features
        device = features.layers.device if self.device is None else self.device
        return batch.to(device), features.to(device, self.dtype)

    def batches(
        self, start: int = 0, stop: int | None = None, halted: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Batch, Features]]:
        """This rank's micro-batches numbered ``start`` <= g < ``stop`` (None: endless), read ahead by one background
        thread. An exception there is raised here, with its own traceback. Close the iterator (or leave it to the
        garbage collector) to stop the thread; do not call ``at`` while it is open. halted: asked while there is
        nothing to yield; the iterator ends once it is true."""
        first = start + (self.rank - start) % self.ranks
        ready: queue.Queue = queue.Queue(maxsize=self.prefetch)
        closed = threading.Event()
        stream = self.source if isinstance(self.source, FeatureStream) else None
        if stream is not None:
            stream.open(self.visit_of(first), self.windows.name(self.seed))

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
        left = -1 if stop is None else len(range(first, stop, self.ranks))
        try:
            while True:
                item = self._next(ready, halted)
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                left -= 1
                yield item
        finally:
            closed.set()
            if stream is not None:
                stream.close(finished=left == 0)
            thread.join(JOIN if halted() else None)

    def _next(self, ready: queue.Queue, halted: Callable[[], bool]) -> object:
        """The thread's next item; None where this is to stop instead of waiting for it."""
        begin = time.perf_counter()
        try:
            while True:
                try:
                    return ready.get(timeout=LOOK)
                except queue.Empty:
                    if halted():
                        return None
        finally:
            self.waited += time.perf_counter() - begin
