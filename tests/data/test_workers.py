from __future__ import annotations

import os
import signal
import time

import pytest
import tiny
from storing import FakeTarget, console, fork, forked, manifest, wants_of, write

from headtrain.data import produce
from headtrain.data.meter import Meter
from headtrain.data.storage import Local
from headtrain.data.store import FeatureStore, StoreWriter
from headtrain.data.workers import Worker, Workers, _claim_file

ROWS = tiny.rows((24, 9, 33, 12, 40, 7, 21, 30, 25))


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def said(workers) -> str:
    return workers.console.file.getvalue()


def worker(place, timeout=60.0, rank=0, watch=False, machine=None):
    one = Workers(Local(place), "capture", console(), timeout, rank, watch)
    if machine is not None:
        one.me.machine = machine
    return one


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# ---- claims


def test_a_shard_is_one_workers_until_it_gives_it_back(place):
    with worker(place) as a, worker(place) as b:
        assert a.take([0, 1]) == 0 and b.take([0, 1]) == 1
        assert a.take([0, 1]) is None
        assert a.mine(0) and not b.mine(0)
        b.release(0)  # not its own: stays
        assert a.mine(0)
        a.release(0)
        assert b.take([0, 1]) == 0
    assert said(a) == said(b) == ""


def test_creating_is_exclusive_whatever_the_file_system(place, monkeypatch):
    a, b = Local(place), Local(place)
    assert a.create("x", b"1") and not b.create("x", b"2")

    def link(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    assert a.create("y", b"1") and not b.create("y", b"2")
    assert files(place) == {"x": b"1", "y": b"1"}


def test_of_many_processes_one_gets_each_shard(place):
    """Eight claim the same 20 shards at once."""
    results, all_are_through = fork.Queue(), fork.Barrier(8)

    def work():
        with worker(place) as me:
            got = [me.take(range(20)) for _ in range(6)]
            results.put([n for n in got if n is not None])
            all_are_through.wait(60)  # what a process leaves behind is taken over

    processes = [forked(work) for _ in range(8)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(sum(got, [])) == list(range(20))


def test_a_process_that_is_gone_is_named_at_once_and_its_shard_taken_over_by_one(place):
    ready = fork.Event()

    def work():
        with worker(place, rank=3) as me:
            me.take([0])
            (place / f"shard-00000.safetensors.{me.me.id}.tmp").touch()
            ready.set()
            time.sleep(600)

    process = forked(work)
    process.start()
    assert ready.wait(30)
    with worker(place) as a, worker(place) as b:
        assert a.take([0]) is None
        os.kill(process.pid, signal.SIGKILL)
        while len(a.look()) > 2:
            time.sleep(0.01)
        assert f"capture rank 3 ({a.me.host}, process {process.pid}) died: it was killed" in said(a)
        assert "(last seen: shard 0)" in said(a) and not list(place.glob("*.tmp"))
        old = b.claimed()
        assert a.take([0]) == 0 and "taking over shard 0" in said(a)
        assert a.claimed() == {0: 2}
        b.claimed = lambda: old  # it looked before a took it over, and acts after
        assert b.take([0]) is None
        del b.claimed
        a.release(0)
        assert a.claimed() == {}
    process.join()


def test_what_the_killed_left_is_cleared_away_by_the_next(place):
    def killed():
        worker(place).tell()
        os.kill(os.getpid(), signal.SIGKILL)

    dead = forked(killed)
    dead.start()
    dead.join()
    assert [name for name in os.listdir(place) if name.startswith("worker-")]
    with worker(place, watch=True) as next_one:
        assert [name for name in os.listdir(place) if name.startswith("worker-")] == [f"worker-{next_one.me.id}.json"]
    assert f"process {dead.pid}) died: it was killed" in said(next_one)


def test_a_damaged_claim_is_nobodys(place):
    with worker(place) as me:
        (place / _claim_file(0, 1)).write_bytes(b"\xff\xfe\x00")
        assert me.take([0]) == 0 and me.mine(0)


def test_one_of_another_machine_is_given_up_after_the_timeout_and_sees_that(place):
    """Its clock does not matter, and it goes on giving signs of life later."""
    with worker(place, timeout=60, machine="other") as other, worker(place, timeout=1, watch=True) as me:
        assert other.take([0]) == 0
        other.tell = lambda **_: None  # stands still
        began = time.monotonic()
        assert me.take([0]) is None
        while not me.dead:
            assert time.monotonic() < began + 20
            time.sleep(0.02)
        assert 0.9 < time.monotonic() - began < 10
        assert "no sign of life for 1 s (last seen: shard 0)" in me.dead[0]
        assert me.take([0]) == 0 and not other.mine(0) and me.mine(0)
        del other.tell
        other.release(0)  # takes nothing from its successor
        assert me.mine(0)
        other.tell()
        assert len(me.look()) == 2  # it lives


def test_a_slow_one_that_gives_signs_of_life_is_not_given_up(place):
    with worker(place, timeout=0.8, machine="other") as other, worker(place, timeout=0.8, watch=True) as me:
        assert other.take([0]) == 0
        time.sleep(2)
        assert me.take([0]) is None and said(me) == ""


def test_one_that_has_left_gives_no_more_signs_of_life(place):
    """Its file would live as long as its process: a capture would wait for a training that is not there."""
    with worker(place) as me:
        pass
    me.tell(at=3)  # from a thread that did not know
    assert not list(place.iterdir())


# ---- filling a store


def fill(place, of, target, me):
    writer = StoreWriter(me.storage, of, me)
    produce.fill(writer, me, ROWS, target, wants_of(of), 60, Meter(console(), of.tokens))


def test_processes_fill_one_store_to_one_process_bytes_though_one_is_killed(place, tmp_path):
    """Byte for byte, each shard once, and nothing else is left in the folder."""
    of, target = manifest(ROWS), FakeTarget()
    with worker(tmp_path / "alone") as me:
        fill(tmp_path / "alone", of, target, me)
    counts, dying = fork.Queue(), fork.Event()

    def work(kill):
        calls, features = [], target.features

        def slow(*args):
            calls.append(1)
            if len(calls) == kill:
                dying.set()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            return features(*args)

        target.features = slow
        with worker(place) as me:
            assert kill or dying.wait(60)  # on a loaded machine the others might leave it nothing to die of
            fill(place, of, target, me)
            counts.put(len(calls))

    processes = [forked(work, kill) for kill in (0, 2, 0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL, 0]
    assert files(place) == files(tmp_path / "alone")
    shards = len(of.shards) - 1
    assert shards == 5 and counts.get() + counts.get() >= shards - 1


def test_one_that_was_given_up_drops_its_shard(place, tmp_path):
    of, target = manifest(ROWS), FakeTarget()
    with worker(place) as me:
        writer = StoreWriter(me.storage, of, me)
        assert me.take([0]) == 0
        me.storage.create(_claim_file(0, 2), b"another")
        meter = Meter(console(), of.tokens)
        assert not produce.capture_shard(writer, me, 0, ROWS, target, wants_of(of), 60, meter)
        assert writer.complete() == set() and me.claimed() == {0: 2}


def test_a_claim_left_beside_a_complete_shard_does_no_harm(place):
    """Killed after the record, before the end of its claim."""
    of, target = manifest(ROWS), FakeTarget()
    write(place, ROWS, target, of)
    (place / _claim_file(2, 1)).write_bytes(b"gone")
    with worker(place) as me:
        fill(place, of, target, me)
    assert not list(place.glob("claim-*")) and len(FeatureStore(place)) == len(ROWS)


# ---- claims that changed between two looks


def test_a_shard_is_taken_over_again_where_the_next_one_died_too(place):
    with worker(place) as me:
        for generation in (1, 2):
            (place / _claim_file(0, generation)).write_bytes(b"gone")
        assert me.take([0]) == 0 and me.claimed() == {0: 3} and me.mine(0)


def test_a_claim_that_is_released_this_moment_is_not_abandoned(place):
    with worker(place) as a, worker(place) as b:
        assert a.take([0]) == 0
        old = b.storage.names()
        a.release(0)
        b.storage.names = lambda: old
        assert b.abandoned() == set()


def test_what_is_being_released_never_looks_abandoned(place):
    """A process that looks between two deletions would capture the shard again."""
    with worker(place) as a, worker(place) as b:
        (place / _claim_file(0, 1)).write_bytes(b"gone")
        assert a.take([0]) == 0
        seen, delete = [], a.storage.delete

        def slowly(name):
            delete(name)
            seen.append(b.abandoned())

        a.storage.delete = slowly
        a.release(0)
        assert seen == [set(), set()] and b.claimed() == {}


def test_another_process_of_the_same_number_is_not_taken_for_the_dead_one(place):
    with worker(place) as me:
        dead = worker(place)  # its number is that of a process that lives
        dead.me.started = "1"
        dead.tell()
        assert me.look() == [me.me] and "died: it was killed" in said(me)


def test_a_training_that_finished_binds_nobody(place):
    with Workers(Local(place), "training", console(), 60.0, order="one") as training:
        training.tell(finished=True)
    with Workers(Local(place), "capture", console(), 60.0, order="another", keep=5) as me:
        assert len(me.look()) == 2


def test_a_moment_without_the_storage_ends_no_worker(place):
    with worker(place, timeout=0.8) as me:  # a sign of life every 0.1 s
        write, failed = me.storage.write, []

        def broken(*args, **more):
            if len(failed) < 3:
                failed.append(1)
                raise OSError("a stale handle")
            write(*args, **more)

        me.storage.write = broken
        end = time.monotonic() + 20
        while len(failed) < 3 or _written(place, me).beat <= len(failed):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert "a stale handle; trying again" in said(me)


def _written(place, of: Workers) -> Worker:
    return Worker.model_validate_json((place / f"worker-{of.me.id}.json").read_bytes())


def test_a_training_that_finished_and_is_gone_did_not_die(place):
    """Its last word is kept for the captures that have not read it yet."""
    past = Workers(Local(place), "training", console(), 60.0)
    past.me.started = "1"
    past.tell(finished=True)
    with worker(place) as me:
        assert [one.finished for one in me.look()] == [False, True] and said(me) == ""
