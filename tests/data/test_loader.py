from __future__ import annotations

import threading
import time
import traceback
from itertools import islice

import pytest
import tiny
import torch
from storing import FakeTarget, assert_same_batch, assert_same_features, store, wants_of

from headtrain.data.loader import JOIN, Loader, OnlineSource, plan_epoch
from headtrain.types import Features, Wants

LENGTHS = [int(x) for x in torch.randint(5, 60, (60,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def rows():
    return tiny.rows(LENGTHS)


class Ids:
    """A source that only says which rows were asked for."""

    def __init__(self, lengths, slow=0.0, fail_at=None):
        self.lengths, self.slow, self.fail_at, self.asked = lengths, slow, fail_at, []

    def batch(self, indices):
        time.sleep(self.slow)
        self.asked.append(indices)
        if self.fail_at is not None and self.fail_at in indices:
            raise OSError("the disk went away")
        return indices, None


# ---- the plan


def test_a_plan_holds_every_row_once_within_the_budget():
    lengths = torch.randint(1, 900, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_epoch(lengths, 2048, seed=3, epoch=1)
    assert sorted(row for rows in plan for row in rows) == list(range(3000))
    assert all(sum(lengths[row] for row in rows) <= 2048 for rows in plan)
    assert sum(lengths) / (len(plan) * 2048) > 0.97  # under 3 % of the budget unused


def test_a_row_longer_than_the_budget_goes_alone():
    plan = plan_epoch([10, 500, 20, 100, 30], 100, seed=0, epoch=0)
    assert [1] in plan and [3] in plan
    assert sorted(row for rows in plan for row in rows) == [0, 1, 2, 3, 4]


def test_plans_depend_on_seed_and_epoch_alone():
    plan = plan_epoch(LENGTHS, 100, 0, 0)
    torch.manual_seed(123)
    assert plan_epoch(LENGTHS, 100, 0, 0) == plan
    others = [plan_epoch(LENGTHS, 100, 0, 1), plan_epoch(LENGTHS, 100, 1, 0)]
    assert plan not in others and others[0] != others[1]
    # pinned: a change of the algorithm breaks the resume of runs that began before it
    assert plan_epoch([3, 4, 5, 6, 7], 10, 0, 0) == [[4], [2], [3], [0, 1]]


# ---- order, ranks, resume


def test_ranks_share_one_order():
    one = list(Loader(Ids(LENGTHS), 100, 5).batches(0, 50))
    for ranks in (2, 3):
        parts = [list(Loader(Ids(LENGTHS), 100, 5, rank=r, ranks=ranks).batches(0, 50)) for r in range(ranks)]
        merged = [parts[g % ranks][g // ranks] for g in range(50)]
        assert merged == one


def test_any_start_equals_the_uninterrupted_run():
    loader = Loader(Ids(LENGTHS), 100, 5)
    n = loader.micro_batches_per_epoch
    whole = list(loader.batches(0, 3 * n))
    for start in (1, n - 1, n, 2 * n + 3):
        assert list(Loader(Ids(LENGTHS), 100, 5).batches(start, 3 * n)) == whole[start:]
        assert Loader(Ids(LENGTHS), 100, 5).at(start) == whole[start]
        assert loader.at(start) == whole[start]  # back from a later epoch
    assert list(Loader(Ids(LENGTHS), 100, 5, rank=1, ranks=2).batches(4, 9)) == [whole[5], whole[7]]
    assert list(Loader(Ids(LENGTHS), 100, 5, rank=1, ranks=2).batches(3, 9)) == [whole[3], whole[5], whole[7]]


def test_each_epoch_holds_every_row_once_in_another_order():
    loader = Loader(Ids(LENGTHS), 100, 5)
    epochs: dict[int, list[int]] = {}
    for g in range(4 * loader.micro_batches_per_epoch):
        epoch, indices = loader.rows_of(g)
        epochs.setdefault(epoch, []).extend(indices)
    for epoch in (0, 1, 2):
        assert sorted(epochs[epoch]) == list(range(len(LENGTHS)))
    assert epochs[0] != epochs[1]
    assert [loader.rows_of(g)[1] for g in range(loader.micro_batches_per_epoch)] == plan_epoch(LENGTHS, 100, 5, 0)


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        Loader(Ids([]), 100)


# ---- the thread


def loader_threads():
    return [t for t in threading.enumerate() if t.name == "headtrain-loader"]


def test_an_exception_in_the_thread_is_raised_here_with_its_traceback():
    source = Ids([10] * 20, fail_at=13)
    with pytest.raises(OSError, match="the disk went away") as error:
        list(Loader(source, 10).batches(0, 20))
    assert any(frame.name == "batch" for frame in traceback.extract_tb(error.value.__traceback__))
    assert not loader_threads()


def test_closing_early_stops_the_thread_and_read_ahead_is_bounded():
    source = Ids([10] * 1000)
    batches = Loader(source, 10, prefetch=2).batches()
    assert len(list(islice(batches, 3))) == 3
    time.sleep(0.3)
    assert len(source.asked) <= 3 + 2 + 1  # taken, queued, in hand
    batches.close()
    assert not loader_threads()


def test_who_waits_can_be_told_to_stop():
    """Also where the thread is in a read that does not end."""
    read, told = threading.Event(), threading.Event()
    source = Ids([10] * 20)
    source.batch = lambda indices: read.wait(60)
    threading.Timer(0.3, told.set).start()
    began = time.monotonic()
    assert list(Loader(source, 10).batches(0, 9, halted=told.is_set)) == []
    assert 0.25 < time.monotonic() - began < JOIN + 5
    read.set()
    source = Ids([10] * 20)
    assert len(list(Loader(source, 10).batches(0, 9, halted=lambda: len(source.asked) > 99))) == 9


def test_waiting_is_measured():
    loader = Loader(Ids([10] * 5, slow=0.05), 10)
    list(loader.batches(0, 4))
    assert loader.waited > 0.1


def test_on_the_fly_forwards_never_overlap(rows):
    """Training reads ahead while an evaluation runs the same target."""
    running, most = 0, 0

    def features(batch, wants):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return Features(torch.zeros(len(batch), 0, 4), torch.zeros(0), torch.zeros(0, 4))

    training, held_out = (Loader(OnlineSource(rows, features, Wants(())), 200, s) for s in (0, 1))
    stream = training.batches(0, 8)
    next(stream)
    assert len(list(held_out.batches(0, 5))) == 5
    assert len(list(stream)) == 7 and most == 1


# ---- offline equals on the fly


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_offline_equals_online(tmp_path, rows, form):
    target = FakeTarget()
    rows = rows[:12]
    kept = store(tmp_path / "f", rows, target, dtype=form, shard_tokens=150)
    fly = OnlineSource(rows, target.features, wants_of(kept.manifest), form)
    pairs = zip(Loader(kept, 90, 1).batches(0, 9), Loader(fly, 90, 1).batches(0, 9), strict=True)
    for (batch, features), (other, others) in pairs:
        assert_same_batch(batch, other)
        assert_same_features(features, others)
        assert len(batch) <= 90


def test_device_and_dtype_are_applied_to_hidden_states(tmp_path, rows):
    kept = store(tmp_path / "f", rows[:3], FakeTarget())
    batch, features = Loader(kept, 90, device="cpu", dtype=torch.bfloat16).at(0)
    assert features.layers.dtype == features.final.dtype == torch.bfloat16
    assert features.lse.dtype == torch.float32 and batch.ids.dtype == torch.int64
