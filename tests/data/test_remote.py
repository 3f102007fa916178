from __future__ import annotations

import itertools

import fsspec
import pytest
import tiny
from storing import FakeTarget, assert_same_features, console, manifest, wants_of

from headtrain.config import Recipe, RecipeError, Url
from headtrain.data.loader import Loader
from headtrain.data.manifest import StoreError, check_disk
from headtrain.data.meter import Meter
from headtrain.data.order import Windows
from headtrain.data.produce import fill
from headtrain.data.storage import open_storage
from headtrain.data.store import FeatureStore, StoreWriter
from headtrain.data.stream import FeatureStream
from headtrain.data.workers import Workers

ROWS = tiny.rows((24, 9, 33, 12, 40, 7, 21, 30))
PLAN = manifest(ROWS, 40)
_numbers = itertools.count()


@pytest.fixture
def place(tmp_path):
    return Url(f"memory://bucket{next(_numbers)}/f", tmp_path / "cache", 1e9) / "train"


def objects(place) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(str(place))
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def capture(place, target, of=PLAN):
    with Workers(open_storage(place), "capture", console(), 60) as me:
        writer = StoreWriter(me.storage, of, me)
        fill(writer, me, ROWS, target, wants_of(of), 1, Meter(me.console, of.tokens))


def test_a_remote_store_has_a_local_ones_bytes(place, whole, target):
    capture(place, target)
    assert objects(place) == {path.name: path.read_bytes() for path in whole.iterdir()}
    assert not list(place.cache.iterdir())  # where shards were written before they were sent
    got, local = FeatureStore(place, rows=ROWS), FeatureStore(whole)
    for rows in ([0, 7, 3], [5, 1]):
        assert_same_features(got.batch(rows)[1], local.batch(rows)[1])
    assert got.row(2).ids == ROWS[2].ids


def test_creating_is_exclusive(place):
    a, b = open_storage(place), open_storage(place)
    assert a.names() == set()
    assert a.create("x", b"1") and not b.create("x", b"2") and b.read("x") == b"1"
    a.delete("x"), a.delete("x")
    assert b.create("x", b"2")


def test_where_nothing_is_exclusive_the_last_one_has_it(place, monkeypatch):
    a = open_storage(place)
    plain = a.fs.pipe_file

    def another(path, data, mode="overwrite"):
        plain(path, data)
        if mode == "create":
            plain(path, b"another's, a moment later")

    monkeypatch.setattr(a.fs, "pipe_file", another)
    assert not a.create("x", b"1")


def test_copies_are_bounded_and_made_once(place, whole, target, monkeypatch):
    capture(place, target)
    sizes = [path.stat().st_size for path in sorted(whole.glob("*.safetensors"))]
    limit = sum(sorted(sizes)[-2:])
    small = Url(place.address, place.cache, limit)
    got, local, fetched = FeatureStore(small, rows=ROWS), FeatureStore(whole), []
    fetch = got.storage.fs.get_file
    monkeypatch.setattr(got.storage.fs, "get_file", lambda *args: (fetched.append(args[0]), fetch(*args))[1])
    for row in (0, 1, 0, 3, 5, 7, 0):
        assert_same_features(got.batch([row])[1], local.batch([row])[1])
        assert sum(path.stat().st_size for path in place.cache.iterdir()) <= limit
        assert len(got.opened()) == len(list(place.cache.glob("*.safetensors")))
    first = [name for name in fetched if name.endswith("shard-00000.safetensors")]
    assert len(first) == 2 and len(fetched) < 7  # gone once, and asked for again
    assert_same_features(got.batch(range(8))[1], local.batch(range(8))[1])  # more than fit at a time
    with pytest.raises(StoreError, match=r"does not fit into features.cache_gb"):
        FeatureStore(Url(place.address, place.cache / "other", 100)).batch([0])


def test_a_flipped_byte_is_refused_and_not_kept(place, whole, target):
    capture(place, target)
    fs, root = fsspec.core.url_to_fs(str(place))
    good = fs.cat_file(f"{root}/shard-00001.safetensors")
    fs.pipe_file(f"{root}/shard-00001.safetensors", good[:-1] + bytes([good[-1] ^ 1]))
    got = FeatureStore(place, rows=ROWS, verify=True)
    row = PLAN.shards[1]
    with pytest.raises(StoreError, match="shard-00001.safetensors is damaged"):
        got.batch([row])
    assert not list(place.cache.glob("*.safetensors"))
    fs.pipe_file(f"{root}/shard-00001.safetensors", good)
    assert_same_features(got.batch([row])[1], FeatureStore(whole).batch([row])[1])
    fs.pipe_file(f"{root}/shard-00002.safetensors", b"half")
    with pytest.raises(StoreError, match=r"memory://.*/shard-00002.safetensors is truncated: 4 bytes"):
        FeatureStore(place)
    writer = StoreWriter(place, PLAN)
    assert writer.todo() == [2]


def test_another_capture_of_a_shard_is_not_taken_from_old_copies(place, target):
    capture(place, target)
    FeatureStore(place).batch([0])
    for name in objects(place):
        open_storage(place).delete(name)
    other = FakeTarget(seed=1)
    capture(place, other)
    _, features = FeatureStore(place, rows=ROWS).batch([0])
    capture(local := Url(place.address + "2", place.cache / "2", 1e9), other)
    assert_same_features(features, FeatureStore(local).batch([0])[1])


def test_a_stream_reads_from_there(place, whole, target):
    capture(place, target)
    windows = Windows(PLAN.shards, 2)
    stream = FeatureStream(open_storage(place), PLAN, ROWS, console(), wants=wants_of(PLAN), timeout=60, wait=1)
    pairs = zip(
        Loader(stream, 80, windows=windows).batches(0, 6),
        Loader(FeatureStore(whole), 80, windows=windows).batches(0, 6),
        strict=True,
    )
    for (_, features), (_, others) in pairs:
        assert_same_features(features, others)
    assert any(worker.finished for worker in Workers(open_storage(place), "capture", console(), 60).look())


def test_other_features_there_are_refused(place, target):
    capture(place, target)
    with pytest.raises(StoreError, match=r"memory://(.|\n)*dtype: float32 / int8"):
        StoreWriter(place, manifest(ROWS, 40, dtype="int8"))
    with pytest.raises(StoreError, match=r"memory://.*holds no features"):
        FeatureStore(Url("memory://nowhere", place.cache, 1e9))
    assert check_disk(place, 10**15) == 0


def recipe(place, **features) -> Recipe:
    return Recipe(
        name="x", target={"path": "x"}, data={"train": ["x"]}, head={"kind": "x"}, features={"dir": place} | features
    )


def test_addresses_in_recipes(tmp_path):
    url = recipe("s3://bucket/some/features", cache_gb=3).features_dir
    assert str(url / "train") == "s3://bucket/some/features/train" and (url / "train").cache_bytes == 3e9
    assert recipe("file:///disk/features").features_dir.as_posix() == "/disk/features"
    assert recipe("some/folder").features_dir.as_posix() == "some/folder"
    for address in ("s3://key:verysecret@bucket/x", "https://host/x?sig=verysecret"):
        with pytest.raises(RecipeError, match="credentials") as error:
            recipe(address).features_dir  # noqa: B018
        assert "verysecret" not in str(error.value)


def test_a_scheme_that_nobody_knows_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nosuch://x.*nosuch"):
        open_storage(Url("nosuch://x", tmp_path, 1e9))
