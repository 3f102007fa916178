"""The order of the rows: a function of the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def _mix(seed: int, epoch: int, *more: str) -> int:
    """One generator seed for (seed, epoch); adjacent seeds share no epoch."""
    return int.from_bytes(hashlib.sha256("/".join([str(seed), str(epoch), *more]).encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Windows:
    """An order for features that do not lie all on the disk at a time: shards in a shuffled order, rows shuffled among
    each ``size`` of them. cuts: row boundaries of the shards.

    Visit v of the endless sequence of shards is the (v % shards)-th of epoch v // shards.
    """

    cuts: Sequence[int]
    size: int

    @property
    def shards(self) -> int:
        return len(self.cuts) - 1

    def name(self, seed: int) -> str:
        """All that fixes the order, for people and to be compared."""
        return f"train.seed {seed}, features.window {self.size}, {self.shards} shards"

    def order(self, seed: int, epoch: int) -> list[int]:
        """The shards in this epoch's order."""
        generator = torch.Generator().manual_seed(_mix(seed, epoch, "shards"))
        return torch.randperm(self.shards, generator=generator).tolist()

    def plan(
        self, lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
    ) -> tuple[list[list[int]], list[int]]:
        """As ``plan_epoch``, window after window; and for each micro-batch the first visit of its window."""
        order, micro_batches, visits = self.order(seed, epoch), [], []
        for first in range(0, self.shards, self.size):
            rows = [row for n in order[first : first + self.size] for row in range(self.cuts[n], self.cuts[n + 1])]
            mine = plan_epoch([lengths[row] for row in rows], batch_tokens, _mix(seed, epoch, str(first)), 0)
            micro_batches += [[rows[i] for i in one] for one in mine]
            visits += [epoch * self.shards + first] * len(mine)
        return micro_batches, visits

    def wanted(self, visit: int, seed: int, sizes: Sequence[int], budget: float) -> list[int]:
        """The different shards of ``visit`` and those after it, as many as fit into ``budget`` bytes together."""
        found: dict[int, None] = {}
        left = budget
        while len(found) < self.shards:
            epoch, place = divmod(visit, self.shards)
            for number in self.order(seed, epoch)[place:]:
                if number not in found:
                    if sizes[number] > left:
                        return list(found)
                    left -= sizes[number]
                    found[number] = None
            visit = (epoch + 1) * self.shards
        return list(found)
