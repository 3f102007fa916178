"""Micro-batches whose features come from a target that a group of ranks holds together (``target.shard``).

Every rank trains on the micro-batches that it would train on with a target of its own (global number g on rank
g % ranks), and no token is forwarded twice: by tensor parallelism the group's ranks compute each member's micro-batch
together, one after the other, and only its owner taps it; by FSDP each forwards its own while layers are gathered.

Features are computed when they are asked for, in the thread that trains, and not ahead in another one. A forward of
the target is an exchange within the group, the head's backward pass one of all ranks; in one thread both come in the
order of the program, the same on every rank. In two threads the order would be the scheduler's, and ranks that
disagree about it wait for each other for ever. What is lost is little: both use the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..config import TargetSection
from ..data.loader import Loader
from ..target.model import Target
from ..target.sharded import Sharding
from ..types import Batch, Features, Row, Wants
from .backend import Backend

NOTHING = Wants(layers=(), summary=False)


def sharding_of(section: TargetSection, backend: Backend) -> Sharding | None:
    """This rank's group; None where each rank holds the whole target. Raises RecipeError."""
    return None if section.shard == "none" else Sharding.of(section.shard, section.group, backend.device)


class GroupLoader:
    """The micro-batches of ``loader``, whose source is ``target``, computed by the group together. A
    ``trainer.Source``; the ranks of a group advance and drain it in step, also those that have no micro-batch left."""

    def __init__(self, loader: Loader, target: Target, sharding: Sharding, rows: list[Row]) -> None:
        """rows: those of the loader's source."""
        self.loader, self.target, self.sharding, self.rows = loader, target, sharding, rows

    @property
    def micro_batches_per_epoch(self) -> int:
        return self.loader.micro_batches_per_epoch

    def batches(
        self, start: int = 0, stop: int | None = None, halted: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Batch, Features]]:
        """This rank's micro-batches numbered ``start`` <= g < ``stop`` (None: endless). halted: not asked, since each
        is computed at once."""
        ranks, own = self.loader.ranks, self.loader.rank
        base = start - start % ranks  # one micro-batch for each rank from here on
        while stop is None or base < stop:
            numbers = [base + rank for rank in self.sharding.members]
            numbers = [g for g in numbers if g >= start and (stop is None or g < stop)]
            together = self._matrices_split if self.sharding.kind == "tp" else self._layers_split
            item = together(numbers, base + own)
            if item is not None:
                yield item
            base += ranks

    def _matrices_split(self, numbers: list[int], own: int) -> tuple[Batch, Features] | None:
        """All ranks run the forward of every member's micro-batch, each with its slices."""
        item = None
        for number in numbers:
            if number == own:
                item = self.loader.at(number)
            else:
                self.target.features(self._batch(number), NOTHING)
        return item

    def _layers_split(self, numbers: list[int], own: int) -> tuple[Batch, Features] | None:
        """Each rank runs its own forward. Layers are gathered as often as the rank with the most forwards needs them
        (they may be as many as its documents); the others take part with a forward of one token."""
        forwards = {number: self.target.forwards(self._batch(number)) for number in numbers}
        item = self.loader.at(own) if own in forwards else None
        for _ in range(max(forwards.values(), default=0) - forwards.get(own, 0)):
            self.target.features(Batch.pack([Row([0], [0])]), NOTHING)
        return item

    def _batch(self, number: int) -> Batch:
        return Batch.pack([self.rows[i] for i in self.loader.rows_of(number)[1]])
