"""Features of two targets that meet in one folder, and files that others take away while a store is read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import tiny
from storing import FakeTarget, assert_same_features, console, identity, manifest, wants_of, write

from headtrain.config import Url
from headtrain.data.manifest import MANIFEST, as_json
from headtrain.data.meter import Meter
from headtrain.data.produce import capture_shard, fill
from headtrain.data.remote import Remote
from headtrain.data.storage import Local, open_storage
from headtrain.data.store import FeatureStore, StoreError, StoreWriter
from headtrain.data.workers import Workers
from headtrain.types import Batch

ROWS = tiny.rows((24, 9, 33, 12, 40, 7, 21, 30))
PLAN = manifest(ROWS)
THEIRS = identity(weights={"embed": "e1", "final_norm": "n1"})
MADE_OTHERWISE = r"features made otherwise(.|\n)*target weights.embed: 'e0' / 'e1'"


class Capture:
    """One that has looked at the folder and may start."""

    def __init__(self, place, plan, target) -> None:
        self.target, self.workers = target, Workers(open_storage(place), "capture", console(), 60)
        self.writer = StoreWriter(self.workers.storage, plan)

    def __enter__(self):
        self.writer.join(self.workers.__enter__())
        return self

    def __exit__(self, *_):
        self.workers.__exit__()

    def one(self) -> None:
        number = self.workers.take(self.writer.todo())
        capture_shard(self.writer, self.workers, number, ROWS, self.target, wants_of(PLAN), 64, Meter(console(), 1))

    def all(self) -> None:
        fill(self.writer, self.workers, ROWS, self.target, wants_of(PLAN), 64, Meter(console(), 1))


@pytest.fixture
def others() -> FakeTarget:
    return FakeTarget(seed=1)


# ---- two captures of different targets that start at once in an empty folder


@pytest.mark.parametrize("shard_tokens", [60, 10_000])
def test_the_second_of_two_captures_is_refused(tmp_path, target, others, shard_tokens):
    ours, theirs = manifest(ROWS, shard_tokens), manifest(ROWS, shard_tokens, target=THEIRS)
    with Capture(tmp_path, ours, target) as a, Capture(tmp_path, theirs, others) as b:
        a.one()
        for _ in range(2):
            with pytest.raises(StoreError, match=r"made otherwise, and capture rank 0 .* is at it (.|\n)*'e0' / 'e1'"):
                b.all()
        a.all()
    got = FeatureStore(tmp_path, rows=ROWS, plan=ours)
    for number, row in enumerate(ROWS):
        assert_same_features(got.batch([number])[1], target.features(Batch.pack([row]), wants_of(PLAN)))


def test_of_two_that_create_the_manifest_at_once_one_is_refused(tmp_path, target, others, monkeypatch):
    """Both have seen that there is none."""
    with Capture(tmp_path, PLAN, target) as a, Capture(tmp_path, manifest(ROWS, target=THEIRS), others) as b:
        create = b.writer.storage.create

        def second(name, data):
            if name == MANIFEST:
                a.one()
            return create(name, data)

        monkeypatch.setattr(b.writer.storage, "create", second)
        with pytest.raises(StoreError, match=MADE_OTHERWISE):
            b.one()
        a.all()
    FeatureStore(tmp_path, rows=ROWS, plan=PLAN).verify_all()


def test_where_no_storage_is_exclusive_no_shard_passes_for_the_others(tmp_path, target, others):
    """The other's manifest comes over the first's, who has a shard already."""
    theirs = manifest(ROWS, target=THEIRS)
    with Capture(tmp_path, PLAN, target) as a:
        a.one()
        (tmp_path / MANIFEST).write_bytes(as_json(theirs.model_dump(mode="json")))
        with pytest.raises(StoreError, match=r"'e1' / 'e0'"):
            a.one()
    with Capture(tmp_path, theirs, others) as b:
        assert b.writer.complete() == set()
        b.all()
    assert_same_features(FeatureStore(tmp_path).batch([0])[1], others.features(Batch.pack(ROWS[:1]), wants_of(PLAN)))


def test_a_manifest_that_came_over_the_last_shards_is_noticed_at_the_end(tmp_path, target):
    with Capture(tmp_path, PLAN, target) as a:
        a.all()
        (tmp_path / MANIFEST).write_bytes(as_json(manifest(ROWS, target=THEIRS).model_dump(mode="json")))
        with pytest.raises(StoreError, match=r"'e1' / 'e0'"):
            a.all()


def test_a_shard_of_another_manifest_is_not_read(tmp_path, target, others):
    write(tmp_path / "a", ROWS, target, PLAN)
    write(tmp_path / "b", ROWS, others, manifest(ROWS, target=THEIRS))
    for end in ("json", "safetensors"):
        (tmp_path / f"a/shard-00001.{end}").write_bytes((tmp_path / f"b/shard-00001.{end}").read_bytes())
    with pytest.raises(StoreError, match=r"shard-00001.safetensors was captured under another manifest.json"):
        FeatureStore(tmp_path / "a", rows=ROWS)
    assert StoreWriter(tmp_path / "a", PLAN).todo() == [1]


def test_a_store_of_another_target_than_planned_is_not_opened(tmp_path, target):
    write(tmp_path, ROWS, target, PLAN)
    FeatureStore(tmp_path, rows=ROWS, plan=manifest(ROWS, target=identity(name="a copy")))
    with pytest.raises(StoreError, match=MADE_OTHERWISE):
        FeatureStore(tmp_path, rows=ROWS, plan=manifest(ROWS, target=THEIRS))


# ---- files that are taken away


def test_a_shard_that_vanished_is_said(tmp_path, target):
    write(tmp_path, ROWS, target, PLAN)
    got = FeatureStore(tmp_path, rows=ROWS)
    before = got.batch([0])[1]
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert_same_features(got.batch([0])[1], before)  # mapped already
    with pytest.raises(StoreError, match=r"shard-0000\d.safetensors is gone: somebody deleted .*run the capture again"):
        got.batch([len(ROWS) - 1])


@pytest.mark.parametrize("moment", ["hashed", "downloaded", "found"])
def test_another_rank_may_delete_a_copy_at_any_moment(tmp_path, target, monkeypatch, moment):
    """Ranks of a node share the cache; one makes room by deleting what another is just opening."""
    write(tmp_path / "store", ROWS, target, PLAN)
    place = Url(f"file://{tmp_path / 'store'}", tmp_path / "cache", 1e9)
    if moment == "found":
        FeatureStore(place).batch([0])
    deleted = []

    def make_room(*_) -> None:
        for path in place.cache.glob("*.safetensors"):
            if not deleted:
                deleted.append(path.unlink())

    owner, name = {"hashed": (hashlib, "file_digest"), "downloaded": (os, "replace"), "found": (os, "utime")}[moment]
    real = getattr(owner, name)

    def meanwhile(*args, **more):
        if moment == "downloaded":
            real(*args, **more)
            return make_room()
        make_room()
        return real(*args, **more)

    monkeypatch.setattr(owner, name, meanwhile)
    got = FeatureStore(Remote(str(place), place.cache, place.cache_bytes), rows=ROWS).batch([0])[1]
    assert deleted
    assert_same_features(got, FeatureStore(tmp_path / "store").batch([0])[1])


# ---- claims with strange names


@pytest.mark.parametrize("name", [f"claim-00001-{10**22 - 1}.json", "claim-1-1.json"])
def test_a_claim_of_a_strange_name_holds_nobody_up(tmp_path, target, monkeypatch, name):
    deletes, delete = [], Local.delete

    def counted(self, name):
        deletes.append(name)
        assert len(deletes) < 100, "deletes without end"
        delete(self, name)

    monkeypatch.setattr(Local, "delete", counted)
    Path(tmp_path / name).write_bytes(b"nobody")
    with Capture(tmp_path, PLAN, target) as a:
        a.workers.tidy()
        Path(tmp_path / name).write_bytes(b"nobody")
        a.all()
    FeatureStore(tmp_path, rows=ROWS).verify_all()
