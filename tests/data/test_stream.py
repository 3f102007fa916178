from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny
import torch
from storing import assert_same_batch, assert_same_features, console, forked, manifest, wants_of, write

from headtrain.data.loader import Loader
from headtrain.data.manifest import StoreError
from headtrain.data.meter import Meter
from headtrain.data.order import Windows
from headtrain.data.produce import capture_shard
from headtrain.data.storage import Local
from headtrain.data.store import FeatureStore, StoreWriter
from headtrain.data.stream import FeatureStream, _position, check_budget, produce, shard_sizes
from headtrain.data.workers import Worker, Workers
from headtrain.types import Row

ROWS = tiny.rows((24, 9, 33, 12, 40, 7, 21, 30, 25, 14, 28, 35, 11, 22))
PLAN = manifest(ROWS, 40)
SIZES = shard_sizes(PLAN, ROWS)
WINDOWS = Windows(PLAN.shards, 2)
BUDGET = sum(sorted(SIZES)[-4:])
SEED = 3


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def stream(place, out=None, timeout=60.0, wait=30.0, rank=0):
    return FeatureStream(
        Local(place), PLAN, ROWS, out or console(), wants=wants_of(PLAN), timeout=timeout, wait=wait, rank=rank
    )


def loader(source, **more):
    return Loader(source, 80, SEED, windows=WINDOWS, **more)


def run_capture(
    place, target, out=None, budget=BUDGET, wait=30.0, timeout=60.0, windows=WINDOWS, seed=SEED, meter=None
):
    """``capture.stream`` without a recipe."""
    binding = dict(order=windows.name(seed), keep=budget) if budget < sum(SIZES) else {}
    with Workers(Local(place), "capture", out or console(), timeout, **binding) as me:
        writer = StoreWriter(me.storage, PLAN, me)
        produce(
            writer,
            me,
            ROWS,
            target,
            wants_of(PLAN),
            meter or Meter(console(), PLAN.tokens),
            batch_tokens=1,  # rows alone, as ``write`` captures them
            sizes=SIZES,
            windows=windows,
            seed=seed,
            budget=budget,
            wait=wait,
        )


def capturing(place, target, **more):
    """Capture in a process of its own."""
    process = forked(run_capture, place, target, **more)
    process.start()
    return process


def held(place) -> int:
    total = 0
    for path in place.glob("shard-*"):
        with contextlib.suppress(FileNotFoundError):  # deleted or renamed this moment
            total += path.stat().st_size
    return total


def until(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# ---- order


def test_windows_hold_every_row_once_and_follow_from_seed_and_epoch():
    lengths = [len(row) for row in ROWS]
    for epoch in (0, 1):
        plan, visits = WINDOWS.plan(lengths, 80, SEED, epoch)
        assert sorted(row for one in plan for row in one) == list(range(len(ROWS)))
        assert all(sum(lengths[row] for row in one) <= 80 for one in plan)
        order = WINDOWS.order(SEED, epoch)
        for one, visit in zip(plan, visits, strict=True):
            assert visit // WINDOWS.shards == epoch
            at = visit % WINDOWS.shards
            rows = {row for n in order[at : at + 2] for row in range(PLAN.shards[n], PLAN.shards[n + 1])}
            assert set(one) <= rows
        assert (plan, visits) == WINDOWS.plan(lengths, 80, SEED, epoch) and visits == sorted(visits)
    assert WINDOWS.order(SEED, 0) != WINDOWS.order(SEED, 1) and WINDOWS.order(SEED, 0) != WINDOWS.order(4, 0)
    assert sorted(WINDOWS.order(SEED, 5)) == list(range(WINDOWS.shards))


def test_wanted_are_the_next_shards_that_fit():
    n = WINDOWS.shards
    endless = [shard for epoch in range(4) for shard in WINDOWS.order(SEED, epoch)]
    for visit in (0, 2, n - 1, n + 3):
        slow, used = [], 0
        for shard in endless[visit:]:
            if shard in slow:
                continue
            if used + SIZES[shard] > BUDGET:
                break
            slow, used = [*slow, shard], used + SIZES[shard]
        assert WINDOWS.wanted(visit, SEED, SIZES, BUDGET) == slow and len(slow) >= 4
        assert sorted(WINDOWS.wanted(visit, SEED, SIZES, math.inf)) == list(range(n))


def test_sizes_are_those_on_the_disk_rounded_up(whole):
    for number, size in enumerate(SIZES):
        real = sum(path.stat().st_size for path in whole.glob(f"shard-{number:05d}.*"))
        assert 0 <= size - real < 6000


def test_a_budget_that_holds_no_window_is_refused():
    check_budget(SIZES, 2, sum(sorted(SIZES)[-2:]))
    with pytest.raises(StoreError, match=r"keep_gb: .* do not hold the 2 shards"):
        check_budget(SIZES, 2, sum(sorted(SIZES)[-2:]) - 1)


# ---- training while capture writes


def test_a_stream_gives_what_a_whole_store_gives_within_its_disk(place, whole, target):
    """Three epochs, bit for bit; bytes on the disk measured at every micro-batch and in between; capture then ends."""
    process, most = capturing(place, target), 0
    reading, stored = loader(stream(place)), loader(FeatureStore(whole))
    count = 3 * stored.micro_batches_per_epoch
    pairs = zip(reading.batches(0, count), stored.batches(0, count), strict=True)
    for (batch, features), (other, others) in pairs:
        assert_same_batch(batch, other), assert_same_features(features, others)
        most = max(most, held(place))
    assert 0.5 * BUDGET < most <= BUDGET < 0.6 * held(whole)
    process.join(30)
    assert process.exitcode == 0 and held(place) <= BUDGET
    assert not list(place.glob("claim-*")) and not list(place.glob("*.tmp"))


def test_capture_pauses_where_the_disk_is_used_up_and_gives_up_without_training(place, target):
    out = console()
    with pytest.raises(StoreError, match="no training has been reading for 1 s; start it"):
        run_capture(place, target, out, wait=1.0)
    wanted = WINDOWS.wanted(0, SEED, SIZES, BUDGET)
    assert {path.name for path in place.glob("shard-*.json")} == {f"shard-{n:05d}.json" for n in wanted}
    assert held(place) <= BUDGET and "captured ahead as far as" in out.file.getvalue()


def test_several_captures_keep_within_one_disk(place, whole, target):
    processes = [capturing(place, target) for _ in range(2)]
    reading, stored, most = loader(stream(place)), FeatureStore(whole), 0
    count = 2 * reading.micro_batches_per_epoch
    for number, (_, features) in enumerate(reading.batches(0, count)):
        assert_same_features(features, stored.batch(reading.rows_of(number)[1])[1])
        most = max(most, held(place))
    assert most <= BUDGET
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0, 0]


def test_a_budget_for_all_keeps_all_and_ends_without_training(place, whole, target):
    run_capture(place, target, budget=math.inf)
    assert {p.name: p.read_bytes() for p in place.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    assert len(list(loader(stream(place)).batches(0, 9))) == 9


def test_a_run_that_goes_back_gets_again_what_was_deleted(place, whole, target):
    """Stopped after an epoch, resumed in the middle of it; capture never stops meanwhile."""
    process = capturing(place, target)
    first = loader(stream(place))
    size = first.micro_batches_per_epoch
    assert len(list(zip(range(size), first.batches(0), strict=False))) == size
    assert process.exitcode is None
    again, stored = loader(stream(place)), FeatureStore(whole)
    for number, (_, features) in enumerate(again.batches(2, size), start=2):
        assert_same_features(features, stored.batch(again.rows_of(number)[1])[1])
    process.join(30)
    assert process.exitcode == 0


def test_ranks_are_waited_for_by_the_slowest(place, whole, target):
    """Rank 1 stays at its first micro-batch: its shards stay, however far rank 0 reads ahead."""
    process = capturing(place, target, budget=BUDGET)
    slow = stream(place, rank=1)
    slow.open(0, WINDOWS.name(SEED))
    rank0, stored = loader(stream(place, wait=2.0), rank=0, ranks=2), FeatureStore(whole)
    reading, read = rank0.batches(0), 0
    limit = WINDOWS.wanted(0, SEED, SIZES, BUDGET)
    while {row for row in rank0.rows_of(2 * read)[1]} <= {
        row for n in limit for row in range(PLAN.shards[n], PLAN.shards[n + 1])
    }:
        next(reading)
        read += 1
    time.sleep(0.6)
    assert {int(p.stem[6:]) for p in place.glob("shard-*.json")} == set(limit)
    slow.close(finished=True)
    _, features = next(reading)
    assert_same_features(features, stored.batch(rank0.rows_of(2 * read)[1])[1])
    reading.close()
    process.kill()
    process.join()


# ---- another order


OTHERS = {"seed": dict(seed=4), "window": dict(windows=Windows(PLAN.shards, 3)), "budget": dict(budget=BUDGET + 1)}


@pytest.mark.parametrize("what", ["seed", "window"])
def test_a_capture_of_another_order_than_the_training_there_is_refused(place, target, what):
    """Whichever comes second, also when it is started again while the other one goes on; with both values."""
    training = stream(place)
    training.open(0, WINDOWS.name(SEED))
    with pytest.raises(StoreError) as error:
        run_capture(place, target, **OTHERS[what])
    other = OTHERS[what].get("windows", WINDOWS).name(OTHERS[what].get("seed", SEED))
    for part in (WINDOWS.name(SEED), other, "training rank 0 (", "same train.seed, features.window", "features.dir"):
        assert part in str(error.value)
    assert len(list(place.glob("worker-*"))) == 1
    training.close(finished=False)
    assert not list(place.glob("worker-*"))


def test_a_training_of_another_order_than_the_capture_there_is_refused(place, target):
    process = capturing(place, target)
    until(lambda: list(place.glob("worker-*.json")))
    batches = Loader(stream(place), 80, SEED + 1, windows=WINDOWS).batches(0)
    with pytest.raises(StoreError, match=rf"capture .* {WINDOWS.name(SEED)}, but this training .* {WINDOWS.name(4)}:"):
        next(batches)
    assert len(list(loader(stream(place)).batches(0, 3))) == 3  # nothing is left in the way of the right one
    process.join(30)
    assert process.exitcode == 0


def test_captures_that_would_delete_each_others_shards_are_refused(place, target):
    process = capturing(place, target)
    until(lambda: list(place.glob("worker-*.json")))
    for other in (*OTHERS.values(), dict(budget=math.inf)):
        with pytest.raises(StoreError, match=r"capture rank 0 .* keeps .* of shards in the order of"):
            run_capture(place, target, **other)
    process.kill()
    process.join()


def test_where_all_is_kept_any_order_may_read(place, target):
    run_capture(place, target, budget=math.inf)
    mine, other = stream(place), Loader(stream(place), 80, SEED + 1, windows=WINDOWS)
    mine.open(0, WINDOWS.name(SEED))
    run_capture(place, target, budget=math.inf, seed=7)
    assert len(list(other.batches(0, 3))) == 3
    mine.close(finished=False)


# ---- death


def test_a_capture_that_dies_is_named_and_training_ends_if_none_comes(place, target):
    process, out = capturing(place, target), console()
    reading = loader(stream(place, out, wait=1.0)).batches(0)
    next(reading)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    until(lambda: not list(place.glob("worker-*")) or "died" in out.file.getvalue(), 20)
    name = rf"capture rank 0 \(.*, process {process.pid}\) died: it was killed"
    with pytest.raises(StoreError, match=rf"no capture has been running for 1 s \({name}(.|\n)*headtrain.capture"):
        for _ in range(1000):
            next(reading)
    assert f"process {process.pid}) died: it was killed" in out.file.getvalue()


def test_another_capture_takes_over(place, whole, target):
    process = capturing(place, target)
    reading = loader(stream(place))
    batches, stored = reading.batches(0, 12), FeatureStore(whole)
    next(batches)
    process.kill()
    process.join()
    other = capturing(place, target)
    for number, (_, features) in enumerate(batches, start=1):
        assert_same_features(features, stored.batch(reading.rows_of(number)[1])[1])
    other.join(30)
    assert other.exitcode == 0


def test_a_training_that_dies_is_named_by_capture(place, target):
    def read():
        for _ in loader(stream(place)).batches(0):
            time.sleep(0.05)

    training, out = forked(read), console()
    training.start()
    until(lambda: list(place.glob("worker-*.json")))
    killer = forked(lambda: (time.sleep(1.5), os.kill(training.pid, signal.SIGKILL)))
    killer.start()
    with pytest.raises(
        StoreError, match=rf"no training .* for 2 s \(training rank 0 \(.*{training.pid}\) died: it was"
    ):
        run_capture(place, target, out, wait=2.0)
    assert held(place) <= BUDGET
    for process in (training, killer):
        process.join()


def test_closing_does_not_wait_for_a_shard_that_is_not_there(place):
    reading = loader(stream(place, wait=60))
    batches = reading.batches(0)
    asked = threading.Thread(target=lambda: pytest.raises(StoreError, next, batches), daemon=True)
    asked.start()
    until(lambda: [p for p in place.glob("worker-*.json") if b"waiting for the store" in p.read_bytes()])
    began = time.monotonic()
    reading.source.close(finished=False)  # what closing the iterator does
    asked.join(20)
    assert not asked.is_alive() and time.monotonic() - began < 20 and not list(place.glob("worker-*"))


def test_a_store_of_other_features_is_refused(place, target):
    write(place, ROWS, target, manifest(ROWS, 40, dtype="int8"))
    with pytest.raises(StoreError, match="made otherwise.*dtype: int8 / float32"):
        next(loader(stream(place)).batches(0))


def test_a_damaged_shard_is_refused(place, target):
    run_capture(place, target, budget=math.inf)
    number = WINDOWS.order(SEED, 0)[0]
    path = place / f"shard-{number:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=rf"shard-{number:05d}.safetensors is damaged"):
        list(loader(stream(place)).batches(0, 6))


def test_order_follows_from_numbers_alone(whole):
    """Any start, any number of ranks: the same micro-batches."""
    one = loader(FeatureStore(whole))
    expected = [batch.ids for batch, _ in one.batches(0, 20)]
    for ranks in (2, 3):
        for rank in range(ranks):
            mine = loader(FeatureStore(whole), rank=rank, ranks=ranks)
            numbers = [g for g in range(5, 20) if g % ranks == rank]
            for number, (batch, _) in zip(numbers, mine.batches(5, 20), strict=True):
                assert torch.equal(batch.ids, expected[number])


def test_the_order_of_windows_is_pinned():
    """A change of the algorithm breaks the resume of runs that began before it."""
    lengths = [len(row) for row in ROWS]
    assert WINDOWS.order(SEED, 0) == [0, 5, 3, 1, 6, 9, 2, 4, 8, 7]
    assert WINDOWS.plan(lengths, 80, SEED, 1)[0] == [[5, 13, 6, 12], [11, 0, 1], [2, 4], [10, 7], [3, 8, 9]]


def test_a_stream_says_whether_it_needs_more(place, target):
    """To the last micro-batch of this rank: finished. Left before: away, and where it was is kept."""
    write(place, ROWS, target, PLAN)

    def left_behind() -> list[bool]:
        return [Worker.model_validate_json(path.read_bytes()).finished for path in place.glob("worker-*.json")]

    reading = loader(stream(place), rank=0, ranks=2)
    stop = 2 * reading.micro_batches_per_epoch + 1  # odd: rank 0 has one micro-batch more than rank 1
    batches = reading.batches(0, stop)
    for _ in range(stop // 4):
        next(batches)
    assert left_behind() == [False]
    batches.close()
    assert left_behind() == [] and int((place / "position.txt").read_text()) > 0
    assert len(list(loader(stream(place), rank=0, ranks=2).batches(stop - 5, stop))) == 3
    assert left_behind() == [True] and not (place / "position.txt").exists()
    batches = loader(stream(place)).batches(0)
    next(batches)
    assert left_behind() == [False]  # a finished one's is cleared away by the next


def test_a_stream_begins_where_training_does(place):
    """Capture is not to make again what was read before the run was stopped."""
    reading, visits = loader(stream(place)), []
    reading.source.open = lambda visit, order: visits.append(visit)
    start = reading.micro_batches_per_epoch + 3
    with pytest.raises(StoreError, match="is not there"):
        next(reading.batches(start))
    assert visits == [reading.visit_of(start)] and visits[0] > WINDOWS.shards


def test_rank_0_says_who_died_though_it_waits_for_nobody(place, target):
    """Long before training has read what a dead capture left."""
    write(place, ROWS, target, PLAN)
    outs = [console(), console()]
    reading = [loader(stream(place, out, timeout=0.8, rank=n), rank=n, ranks=2) for n, out in enumerate(outs)]
    batches = [one.batches(0) for one in reading]
    for one in batches:
        next(one)
    dead = Workers(Local(place), "capture", console(), 60.0)
    dead.me.started = "1"
    dead.tell()
    until(lambda: "died: it was killed" in outs[0].file.getvalue(), 20)
    assert "died" not in outs[1].file.getvalue()


def test_what_was_read_is_unmapped(place, target):
    """Of a mapped file that is deleted, the disk is freed only then."""
    write(place, ROWS, target, PLAN)
    reading = loader(stream(place))
    size, last = reading.micro_batches_per_epoch, WINDOWS.order(SEED, 0)[-2:]
    reading.source.open(0, WINDOWS.name(SEED))
    for number in range(size):
        reading.at(number)
    reading.source.close(finished=False)
    mapped = {
        line.rpartition("/")[2] for line in Path("/proc/self/maps").read_text().splitlines() if str(place) in line
    }
    assert 0 < len(mapped) <= 2 and mapped <= {f"shard-{number:05d}.safetensors" for number in last}


def test_a_shard_that_is_deleted_this_moment_is_waited_for(place, target):
    """By a capture that had not seen where this training is."""
    write(place, ROWS, target, PLAN)
    reading = loader(stream(place))
    expected = reading.at(0)[1]
    number = next(n for n in WINDOWS.order(SEED, 0) if PLAN.shards[n] <= reading.rows_of(0)[1][0] < PLAN.shards[n + 1])
    record, store = place / f"shard-{number:05d}.json", reading.source._store
    kept, read = record.read_bytes(), store.batch

    def batch(indices):
        store.batch = read
        record.unlink()
        threading.Timer(0.3, record.write_bytes, [kept]).start()
        raise StoreError("no such shard")

    store.batch = batch
    reading.source.open(0, WINDOWS.name(SEED))
    assert_same_features(reading.at(0)[1], expected)
    reading.source.close(finished=False)


def test_a_capture_that_starts_first_begins_where_training_was_and_waits_for_it(place, target):
    """Not at the start, and it does not take a training that has finished before for the one that is to come."""
    with Workers(Local(place), "training", console(), 60.0) as past:
        past.tell(finished=True)
    visit = WINDOWS.shards + 3
    (place / "position.txt").write_text(str(visit))
    with pytest.raises(StoreError, match="no training has been reading for 1 s"):
        run_capture(place, target, wait=1.0)
    wanted = WINDOWS.wanted(visit, SEED, SIZES, BUDGET)
    assert {path.name for path in place.glob("shard-*.json")} == {f"shard-{n:05d}.json" for n in wanted}
    assert set(wanted) != set(WINDOWS.wanted(0, SEED, SIZES, BUDGET))


def test_tokens_are_counted_as_this_process_s_or_others(place, target):
    """What was there before is neither."""
    write(place, ROWS, target, PLAN, stop_after=2)
    meter, features = Meter(console(), PLAN.tokens), target.features
    with Workers(Local(place), "capture", console(), 60.0) as other:

        def meanwhile(*args):
            target.features = features
            assert other.take([7]) == 7
            writer = StoreWriter(other.storage, PLAN, other)
            count = Meter(console(), PLAN.tokens)
            assert capture_shard(writer, other, 7, ROWS, target, wants_of(PLAN), 1, count)
            return features(*args)

        target.features = meanwhile
        try:
            run_capture(place, target, budget=math.inf, meter=meter)
        finally:
            target.features = features
    tokens = [sum(len(row) for row in ROWS[a:b]) for a, b in itertools.pairwise(PLAN.shards)]
    assert meter.others == tokens[7] and meter.mine == PLAN.tokens - sum(tokens[:2]) - tokens[7]


# ---- capture and what others leave


def unwanted(count: int) -> list[int]:
    """Shards that a stream from the start does not need soon."""
    wanted = WINDOWS.wanted(0, SEED, SIZES, BUDGET)
    return [n for n in range(WINDOWS.shards) if n not in wanted][:count]


def stored(place) -> set[str]:
    return {path.name for path in place.glob("shard-*.json")}


def test_what_a_dead_capture_left_of_a_shard_that_is_not_needed_is_deleted(place, target):
    """It would take room of the budget for as long as nobody needs it."""
    (number,) = unwanted(1)
    place.mkdir()
    (place / f"claim-{number:05d}-1.json").write_text("gone")
    (place / f"shard-{number:05d}.safetensors").write_text("without its record")
    with pytest.raises(StoreError, match="no training"):
        run_capture(place, target, wait=0.5)
    assert not list(place.glob("claim-*"))
    assert {path.stem for path in place.glob("shard-*.safetensors")} == {name[:-5] for name in stored(place)}


def test_what_others_capture_counts_until_they_are_done(place, target):
    """A shard that does not fit beside theirs is given back, and taken when it does."""
    with Workers(Local(place), "capture", console(), 60.0, order=WINDOWS.name(SEED), keep=BUDGET) as other:
        theirs = unwanted(2)
        assert [other.take([n]) for n in theirs] == theirs
        timer = threading.Timer(0.7, lambda: [other.release(n) for n in theirs])
        timer.start()
        with pytest.raises(StoreError, match="no training"):
            run_capture(place, target, wait=2.0)
        timer.join()
    assert stored(place) == {f"shard-{n:05d}.json" for n in WINDOWS.wanted(0, SEED, SIZES, BUDGET)}


def test_capture_waits_for_training_from_its_last_shard_on(place, target):
    times, features = [], target.features

    def slow(*args):
        time.sleep(0.3)
        times.append(time.monotonic())
        return features(*args)

    target.features = slow
    try:
        with pytest.raises(StoreError, match="no training"):
            run_capture(place, target, wait=1.0)
    finally:
        target.features = features
    assert times[-1] - times[0] > 1.0 and time.monotonic() - times[-1] > 1.0


def test_capture_waits_for_training_from_its_last_sign_on(place, target):
    process = capturing(place, target, wait=2.0)
    reading = stream(place)
    reading.open(0, WINDOWS.name(SEED))
    time.sleep(4)
    reading.close(finished=False)
    time.sleep(1)
    assert process.exitcode is None
    process.join(30)
    assert process.exitcode == 1


def test_names_count_in_a_shard_s_size():
    long = [Row(row.ids, row.turn, source="x" * 5000, route=row.route) for row in ROWS]
    more = [b - a for a, b in zip(SIZES, shard_sizes(PLAN, long), strict=True)]
    counts = [b - a for a, b in itertools.pairwise(PLAN.shards)]
    assert all(extra > 4900 * count for extra, count in zip(more, counts, strict=True))


def test_a_position_that_a_dying_machine_left_is_the_start(place):
    place.mkdir()
    (place / "position.txt").write_bytes(b"")
    assert _position(Local(place)) == 0


def test_a_store_that_holds_more_than_the_budget_loses_nothing(place, whole, target):
    """It was captured to stay; a stream would delete the most of it."""
    shutil.copytree(whole, place)
    with pytest.raises(StoreError, match=r"keep_gb: .* holds .* already, and .* would make this delete some"):
        run_capture(place, target)
    assert {p.name: p.read_bytes() for p in place.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
