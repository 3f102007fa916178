"""The fitted start over ranks: the same rows for any number of them, and one head for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from headtrain.train.induction import fit_induction


class Ranks:
    """``world`` ranks as threads: ``sum`` adds up what all of them give."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier, self.parts = Barrier(world, timeout=60), [None] * world

    def backend(self, rank: int) -> SimpleNamespace:
        def total(x):
            self.parts[rank] = x.clone()
            self.barrier.wait()
            found = sum(self.parts)
            self.barrier.wait()
            return found

        return SimpleNamespace(rank=rank, world=self.world, main=rank == 0, device=torch.device("cpu"), sum=total)


class Head(torch.nn.Module):
    """Fits the mean of the rows that it reads. off: its arithmetic's error, that of another kind of processor."""

    induction_tokens = 70

    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off
        self.mean = torch.nn.Parameter(torch.zeros(3))

    def trainable(self):
        return {"mean": self.mean}

    def fit_induction(self, sample, total, window):
        rows = list(sample)
        self.seen = [int(row[0]) for row in rows]
        sums = total(torch.stack([*rows, torch.zeros(4)]).sum(0))
        self.mean.copy_((sums / sums[3])[:3] * (1 + self.off))
        return [f"{window}"]


def fitted(world: int, rows: list[torch.Tensor], off: float = 0.0) -> list[Head]:
    ranks = Ranks(world)

    def one(rank: int) -> Head:
        source = SimpleNamespace(batches=lambda: (row for row in rows[rank::world]), micro_batches_per_epoch=len(rows))
        head = Head(off * rank)
        assert fit_induction(head, source, 10, 99, ranks.backend(rank)) == ["99"]
        return head

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [5, 7, 12])
def test_any_number_of_ranks_reads_the_same_rows(world, count):
    """70 tokens in micro-batches of 10 are seven, or all where there are fewer; of 8 ranks some have none."""
    g = torch.Generator().manual_seed(count)
    rows = [torch.tensor([n, *torch.randn(2, generator=g).tolist(), 1.0]) for n in range(count)]
    heads = fitted(world, rows)
    assert sorted(n for head in heads for n in head.seen) == list(range(min(count, 7)))
    expected = torch.stack(rows[:7]).mean(0)[:3]
    for head in heads:
        torch.testing.assert_close(head.mean.detach(), expected)


def test_all_ranks_start_with_what_the_first_one_computed():
    rows = [torch.tensor([n, n * n, 1.0, 1.0]) for n in range(7)]
    heads, alone = fitted(3, rows, off=1e-3), fitted(1, rows)[0]
    assert all(torch.equal(head.mean, alone.mean) for head in heads)
