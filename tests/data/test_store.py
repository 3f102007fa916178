from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from storing import (
    assert_same_batch,
    assert_same_features,
    identity,
    manifest,
    store,
    wants_of,
    write,
)

from headtrain.data.manifest import as_json
from headtrain.data.quantize import as_stored, decode, encode
from headtrain.data.storage import open_storage
from headtrain.data.store import (
    FeatureStore,
    ShardRecord,
    StoreError,
    StoreWriter,
    bytes_per_token,
    check_disk,
    human,
    pack,
    plan_shards,
    row_hash,
    shard_file,
)
from headtrain.data.workers import Workers
from headtrain.shift import final_positions
from headtrain.types import Batch, Features, Row, Wants

LENGTHS = (24, 9, 33, 12, 40, 7, 21)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return tiny.rows(LENGTHS)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "features"


def reseal(folder, number, tensors=None):
    """Make a shard's checksum right again, so that the checks behind it are reached."""
    import hashlib

    path = shard_file(folder, number)
    if tensors is not None:
        save_file(tensors, path)
    record = json.loads(path.with_suffix(".json").read_text())
    record |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    path.with_suffix(".json").write_text(json.dumps(record))


# ---- what comes out is what went in


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("final", ["supervised", "all"])
def test_stored_features_equal_the_targets_bit_for_bit_after_the_forms_rounding(folder, rows, target, form, final):
    got = store(folder, rows, target, dtype=form, final=final)
    for picked in ([0], [3, 1], [6, 0, 4, 2, 5]):
        batch, features = got.batch(picked)
        plain = Batch.pack([rows[i] for i in picked])
        assert_same_batch(batch, plain)
        assert_same_features(features, as_stored(target.features(plain, wants_of(got.manifest)), form))
    assert features.layers.dtype == (torch.bfloat16 if form == "bfloat16" else torch.float32)


def test_float32_stores_lose_nothing(folder, rows, target):
    got = store(folder, rows, target)
    assert_same_features(got.batch([2, 0])[1], target.features(Batch.pack([rows[2], rows[0]]), wants_of(got.manifest)))


def test_ids_0_to_9_give_the_same_triples_offline_and_on_the_fly(folder, target):
    row = Row(list(range(10)), [0, 0, 0, 1, 1, 1, 1, 0, 1, 1], "golden", "chat")
    other = tiny.rows((11,))[0]
    rows = [other, row]
    batch, features = store(folder, rows, target).batch([1, 0])
    plain = Batch.pack([row, other])
    fly = target.features(plain, wants_of(manifest(rows)))
    assert batch.ids[:10].tolist() == list(range(10))
    # the token after the kept final is supervised: tokens 3..6 and 8, 9
    assert [int(i) for i in features.final_at if i < 10] == [2, 3, 4, 5, 7, 8]
    triples = [(int(plain.ids[i]), fly.layers[i], int(plain.ids[i + 1])) for i in range(9)]
    stored = [(int(batch.ids[i]), features.layers[i], int(batch.ids[i + 1])) for i in range(9)]
    for (a, x, b), (c, y, d) in zip(triples, stored, strict=True):
        assert (a, b) == (c, d) and torch.equal(x, y)


def test_read_gives_the_row_with_its_source_and_route(folder, rows, target):
    got = store(folder, rows, target)
    assert len(got) == len(rows) and got.lengths == list(LENGTHS)
    for i, row in enumerate(rows):
        read, features = got.read(i)
        assert read == row
        assert_same_features(features, target.features(Batch.pack([row]), wants_of(got.manifest)))
    with pytest.raises(IndexError):
        got.read(len(rows))


def test_without_summary(folder, rows, target):
    features = store(folder, rows, target, summary=False).batch([0, 1])[1]
    assert features.argmax is None and features.lse is None


def test_what_is_read_outlives_the_file(folder, rows, target):
    got = store(folder, rows, target)
    batch, features = got.batch([0])
    before = features.layers.clone()
    path = shard_file(folder, 0)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * 64)
    assert torch.equal(features.layers, before)


def test_pack_equals_batch_pack(rows):
    rows = [*rows, Row([5], [1]), Row([6, 7], [0, 0])]
    ids = torch.tensor([i for row in rows for i in row.ids], dtype=torch.int32)
    turn = torch.tensor([t for row in rows for t in row.turn], dtype=torch.int32)
    assert_same_batch(pack(ids, turn, [len(row) for row in rows]), Batch.pack(rows))


def test_a_row_costs_only_its_own_bytes(folder, target):
    rows = tiny.rows((8,) * 40)
    got = store(folder, rows, target, shard_tokens=10_000)
    part = got._parts(7)
    shard = got._shard(0)
    assert part["layers"].untyped_storage().data_ptr() <= part["layers"].data_ptr()
    assert not isinstance(shard["layers"], torch.Tensor)  # a slice into the mapped file, not a loaded tensor
    assert got.batch([7])[1].layers.untyped_storage().nbytes() == 8 * 3 * 64 * 4


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_no_python_step_for_each_token(tmp_path, form):
    """The lines run while writing and reading do not depend on the number of tokens."""
    counts = []
    for n in (60, 600):
        rows = tiny.rows((n, n))
        of = manifest(rows, dtype=form, shard_tokens=10_000)
        ready = Features(torch.randn(n, 3, 64), final_positions(Batch.pack(rows[:1])), torch.empty(0))
        ready.final, ready.argmax, ready.lse = torch.randn(m := len(ready.final_at), 64), torch.ones(m), torch.ones(m)
        lines = 0

        def count(frame, event, argument):
            nonlocal lines
            if Path(frame.f_code.co_filename).name not in ("store.py", "store_writer.py", "quantize.py", "loader.py"):
                return None
            lines += event == "line"
            return count

        writer = StoreWriter(tmp_path / str(n), of)
        before = sys.gettrace()
        sys.settrace(count)
        shard = writer.shard(0, rows)
        shard.add(ready)
        shard.add(ready)
        shard.close()
        FeatureStore(tmp_path / str(n), rows=rows).batch([1, 0])
        sys.settrace(before)
        counts.append(lines)
    assert counts[0] == counts[1] > 50


# ---- int8


def test_int8_error_is_half_a_step_of_its_token_and_layer():
    x = torch.randn(50, 3, 64) * torch.logspace(-4, 4, 50)[:, None, None]
    x[7, 1, 3] = 5e4  # one outlier coarsens its own token and layer only
    x[9, 2] = 0
    values, scale = encode(x, "int8")
    assert values.dtype == torch.int8 and scale.shape == (50, 3)
    error = (decode(values, scale) - x).abs().amax(-1)
    step = x.abs().amax(-1) / 127
    assert bool((error <= step * 0.5001).all())  # 0.0001: float32 rounding of x / step
    assert bool((decode(values, scale)[9, 2] == 0).all())


# ---- size


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_the_size_that_is_promised_is_the_size_on_disk(folder, target, form):
    rows = tiny.rows((200, 300, 250, 270), vocab=384)
    of = manifest(rows, dtype=form, shard_tokens=100_000)
    write(folder, rows, target, of)
    real = shard_file(folder, 0).stat().st_size
    assert abs(real - of.bytes(of.tokens, of.finals, of.rows)) < 2000  # the safetensors header
    each = bytes_per_token(64, 3, form, "supervised", of.finals / of.tokens)
    assert of.bytes(of.tokens, of.finals, 0) == round(each * of.tokens)


def test_bytes_per_token_by_hand():
    assert bytes_per_token(4096, 3, "bfloat16", "supervised", 0.5) == 3 * 4096 * 2 + 8 + 0.5 * (4096 * 2 + 12)
    assert bytes_per_token(4096, 3, "int8", "all", 0.5) == 3 * (4096 + 4) + 8 + 4096 * 2 + 12
    assert bytes_per_token(576, 0, "float32", "supervised", 1.0) == 8 + 576 * 4 + 12


def test_a_disk_that_cannot_hold_the_features_stops_with_figures_and_remedies(tmp_path):
    free = check_disk(tmp_path / "not" / "there" / "yet", 1)
    assert free > 0 and not (tmp_path / "not").exists()
    with pytest.raises(StoreError) as error:
        check_disk(tmp_path, 740 * 10**12)
    for part in ("740 TB", "free", "int8", "features.mode=online"):
        assert part in str(error.value)


def test_a_disk_that_cannot_hold_so_many_files_is_refused(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    def with_files(free, all_of_them):
        values = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
        monkeypatch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(**values | dict(f_favail=free, f_files=all_of_them))
        )

    with_files(9, 1000)
    check_disk(tmp_path, 1, 9)
    with pytest.raises(StoreError, match="need 10 files, .* has room for 9 more .*features.shard_tokens"):
        check_disk(tmp_path, 1, 10)
    with_files(0, 0)  # a file system that has no such number
    check_disk(tmp_path, 1, 10)


def test_human_sizes():
    assert [human(x) for x in (12, 7400, 7.4e11, 7.4e15)] == ["12 B", "7.4 kB", "740 GB", "7,400 TB"]


def test_shards_hold_whole_rows():
    assert plan_shards([10, 20, 30, 5, 100, 1], 35) == [0, 2, 4, 5, 6]
    assert plan_shards([], 35) == [0]


# ---- resume


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_a_killed_capture_resumes_by_shard_to_the_same_bytes(tmp_path, rows, target, form):
    of = manifest(rows, dtype=form)
    write(tmp_path / "whole", rows, target, of)
    folder = tmp_path / "killed"
    write(folder, rows, target, of, stop_after=2)
    # killed while writing shard 2: a temporary file; and between the shard and its record: a shard without one
    (folder / "shard-00002.safetensors.tmp").write_bytes(b"half")
    (folder / "manifest.json.tmp").write_bytes(b"half")
    shard_file(folder, 1).with_suffix(".json").unlink()
    kept = shard_file(folder, 0).stat().st_mtime_ns
    with pytest.raises(StoreError, match="did not finish"):
        FeatureStore(folder)
    writer = StoreWriter(folder, of)
    assert writer.todo() == list(range(1, len(of.shards) - 1))
    write(folder, rows, target, of)
    assert files(folder) == files(tmp_path / "whole")
    assert shard_file(folder, 0).stat().st_mtime_ns == kept


def test_a_truncated_shard_is_captured_again(folder, rows, target):
    of = manifest(rows)
    write(folder, rows, target, of)
    before = files(folder)
    shard_file(folder, 1).write_bytes(before["shard-00001.safetensors"][:-5])
    writer = StoreWriter(folder, of)
    assert writer.todo() == [1]
    write(folder, rows, target, of)
    assert files(folder) == before


def test_another_manifest_is_refused_with_old_and_new_values(folder, rows, target):
    write(folder, rows, target, manifest(rows, settings={"limit": 7, "last_turn_only": False}), stop_after=1)
    other = manifest(
        rows[:5],
        layers=[1, 4, 5],
        dtype="int8",
        target=identity(chat_template="c1", weights={"embed": "e1", "final_norm": "n0"}),
        settings={"limit": 5, "last_turn_only": False},
    )
    with pytest.raises(StoreError) as error:
        StoreWriter(folder, other)
    text = str(error.value)
    for line in (
        "layers: [2, 4, 5] / [1, 4, 5]",
        "dtype: float32 / int8",
        "target chat_template: 'c0' / 'c1'",
        "target weights.embed: 'e0' / 'e1'",
        "rows: 7 / 5",
        "(data.limit: 7 / 5)",
    ):
        assert line in text
    assert "final_norm" not in text and "last_turn_only" not in text


def test_shards_are_as_readable_as_the_manifest(folder, rows, target):
    store(folder, rows, target)
    assert len({path.stat().st_mode for path in (folder / "manifest.json", shard_file(folder, 0))}) == 1


def test_the_same_target_by_another_name_is_the_same(folder, rows, target):
    write(folder, rows, target, manifest(rows), stop_after=1)
    write(folder, rows, target, manifest(rows, target=identity(name="copy", revision="abc")))
    assert len(FeatureStore(folder, rows=rows)) == len(rows)


def test_a_manifest_without_any_shard_protects_nothing(folder, rows, target):
    write(folder, rows, target, manifest(rows), stop_after=0)
    assert not (folder / "manifest.json").exists()
    writer = StoreWriter(folder, manifest(rows))
    writer.shard(0, rows[: writer.manifest.shards[1]])  # killed before its close
    assert json.loads((folder / "manifest.json").read_text())["dtype"] == "float32"
    assert store(folder, rows, target, dtype="int8").manifest.dtype == "int8"


def test_a_store_that_does_not_say_what_its_target_computed_in_is_as_before(folder, rows, target):
    """Of an earlier headtrain: the digest that its shards name is of a manifest without the key."""
    of = manifest(rows)
    fields = of.model_dump(mode="json")
    del fields["target_dtype"]
    assert of.digest == hashlib.sha256(as_json(fields)).hexdigest()[:16]
    assert of.digest != manifest(rows, target_dtype="float32").digest
    write(folder, rows, target, of, stop_after=1)
    write(folder, rows, target, manifest(rows, target_dtype="bfloat16"))
    assert FeatureStore(folder, rows=rows).manifest.target_dtype is None


def test_shards_without_a_manifest_are_refused(folder, rows, target):
    write(folder, rows, target, manifest(rows))
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match="without manifest.json"):
        StoreWriter(folder, manifest(rows))


def test_two_captures_of_different_features_into_one_folder_are_refused(folder, rows, target):
    """Also before any shard is complete; and one whose manifest was replaced all the same writes nothing."""
    of, quiet = manifest(rows), Console(quiet=True)
    with Workers(open_storage(folder), "capture", quiet, 60) as first:
        writer = StoreWriter(first.storage, of, first)
        writer.shard(0, rows[: of.shards[1]])
        with Workers(open_storage(folder), "capture", quiet, 60) as second:
            StoreWriter(second.storage, of, second)  # the same features: together
            with pytest.raises(StoreError, match=r"and capture rank 0 .* is at it (.|\n)*dtype: float32 / int8"):
                StoreWriter(second.storage, manifest(rows, dtype="int8"), second)
        (folder / "manifest.json").write_text(manifest(rows, dtype="int8").model_dump_json())
        with pytest.raises(StoreError, match="dtype: int8 / float32"):
            writer.check_manifest()
    assert not list(folder.glob("worker-*"))


# ---- the writer refuses features that are not the rows'


def test_features_of_other_rows_or_non_finite_are_refused(folder, rows, target):
    of = manifest(rows)
    writer = StoreWriter(folder, of)
    mine = rows[: of.shards[1]]
    good = target.features(Batch.pack(mine[:1]), wants_of(of))
    with pytest.raises(StoreError, match="other positions"):
        writer.shard(0, mine).add(target.features(Batch.pack(mine[1:2]), wants_of(of)))
    shifted = target.features(Batch.pack(mine[:1]), wants_of(of))
    shifted.final_at[0] -= 1  # as many finals, one of another position
    with pytest.raises(StoreError, match="other positions"):
        writer.shard(0, mine).add(shifted)
    bad = target.features(Batch.pack(mine[:1]), wants_of(of))
    bad.layers[3, 1, 2] = float("inf")
    with pytest.raises(StoreError, match=r"tiny:1.*non-finite layers"):
        writer.shard(0, mine).add(bad)
    with pytest.raises(StoreError, match="layers"):
        writer.shard(0, mine).add(target.features(Batch.pack(mine[:1]), Wants((1, 2))))
    half = writer.shard(0, mine)
    half.add(good)
    with pytest.raises(StoreError, match="24 of 33 tokens"):
        half.close()
    with pytest.raises(StoreError, match="the plan says"):
        writer.shard(0, mine[:1])
    assert not shard_file(folder, 0).exists()


# ---- the reader refuses what is damaged


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match="holds no features"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("value", [None, "pre-norm"])
def test_a_manifest_that_does_not_say_post_norm_is_refused(folder, rows, target, value):
    store(folder, rows, target)
    data = json.loads((folder / "manifest.json").read_text())
    del data["normed"]
    if value:
        data["normed"] = value
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(StoreError, match="`normed` is .*final norm"):
        FeatureStore(folder)


def test_another_schema_and_broken_json_are_refused(folder, rows, target):
    store(folder, rows, target)
    path = folder / "manifest.json"
    good = path.read_text()
    path.write_text(good.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(StoreError, match="schema version 2.*update headtrain.*delete"):
        FeatureStore(folder)
    without = {name: value for name, value in json.loads(good).items() if name not in ("rows", "dtype")}
    for content, found in [
        (good.replace('"schema_version": 1', '"schema_version": 0').encode(), "schema version 0"),
        (b"{}", "schema version None"),
        (good[:50].encode(), "not valid JSON"),
        (good.replace("tiny", "t\xefny").encode("latin-1"), "utf-8"),
        (b"[1]", "no JSON object but a list"),
        (json.dumps(without).encode(), "dtype: Field required; rows: Field required"),
    ]:
        path.write_bytes(content)
        with pytest.raises(StoreError, match=rf"manifest.json.*{found}.*: delete {folder} and capture again, or set f"):
            FeatureStore(folder)
        with pytest.raises(StoreError, match=found):
            StoreWriter(folder, manifest(rows))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_manifest_that_cannot_be_read_is_said(folder, rows, target, monkeypatch, code):
    store(folder, rows, target)

    def read_bytes(path):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(
        StoreError, match=rf"manifest.json cannot be read \({os.strerror(code)}\): see that this user may"
    ):
        FeatureStore(folder)


def test_missing_truncated_and_flipped(folder, rows, target):
    store(folder, rows, target)
    path = shard_file(folder, 1)
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(StoreError, match="shard-00001.safetensors is missing"):
        FeatureStore(folder)
    path.write_bytes(whole[:-10])
    with pytest.raises(StoreError, match="truncated"):
        FeatureStore(folder)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    path.write_bytes(flipped)
    got = FeatureStore(folder)
    got.batch([0])  # another shard: not touched, not checked
    with pytest.raises(StoreError, match=r"shard-00001.safetensors is damaged: sha256"):
        got.batch([2])
    with pytest.raises(StoreError, match="is damaged"):
        got.verify_all()
    path.write_bytes(whole)
    FeatureStore(folder).verify_all()


def test_a_truncated_shard_with_a_matching_record_is_refused(folder, rows, target):
    store(folder, rows, target)
    path = shard_file(folder, 1)
    path.write_bytes(path.read_bytes()[:-10])
    reseal(folder, 1)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        FeatureStore(folder).batch([2])


def test_a_stored_row_that_is_too_short_is_refused_and_named(folder, target):
    """CASES 30: prompts that share a prefix; one stored row lost its tail."""
    prefix = list(range(3, 20))
    rows = [Row(prefix + [40 + i] * 8, [0] * 17 + [1] * 8, f"prompts.jsonl:{i + 1}") for i in range(3)]
    short = [rows[0], Row(rows[1].ids[:-3], rows[1].turn[:-3], rows[1].source), rows[2]]
    store(folder, short, target, shard_tokens=1000)
    with pytest.raises(StoreError, match=r"row 1 \(prompts.jsonl:2\): 22 tokens stored, the data has 25"):
        FeatureStore(folder, rows=rows).batch([0])


@pytest.mark.parametrize("change", ["ids", "turn"])
def test_a_stored_row_with_other_tokens_is_refused_and_named(folder, rows, target, change):
    store(folder, rows, target)
    other = list(rows)
    ids, turn = list(rows[2].ids), list(rows[2].turn)
    if change == "ids":
        ids[5] += 1
    else:
        turn[-1] = 0
    other[2] = Row(ids, turn, rows[2].source)
    got = FeatureStore(folder, rows=other)
    got.batch([0, 1])
    with pytest.raises(StoreError, match=r"row 2 \(tiny:3\): other tokens"):
        got.batch([2])
    with pytest.raises(StoreError, match="7 rows, the data has 6"):
        FeatureStore(folder, rows=rows[:-1])


def test_tokens_that_do_not_match_their_own_hash_are_refused(folder, rows, target):
    store(folder, rows, target)
    tensors = load_file(shard_file(folder, 1))
    tensors["ids"][3] += 1
    reseal(folder, 1, tensors)
    with pytest.raises(StoreError, match=r"row 2 \(tiny:3\): its tokens do not match its own hash"):
        FeatureStore(folder).batch([2])


def test_missing_and_misshapen_tensors_are_refused(folder, rows, target):
    store(folder, rows, target)
    good = load_file(shard_file(folder, 1))
    reseal(folder, 1, {k: v for k, v in good.items() if k != "lse"})
    with pytest.raises(StoreError, match="missing or unknown: lse"):
        FeatureStore(folder).batch([2])
    reseal(folder, 1, good | {"layers": good["layers"][:-1].contiguous()})
    with pytest.raises(StoreError, match="layers has shape"):
        FeatureStore(folder).batch([2])
    cu = good["cu"].clone()
    cu[1:-1] -= 1
    reseal(folder, 1, good | {"cu": cu})
    with pytest.raises(StoreError, match="boundaries differ"):
        FeatureStore(folder).batch([2])


def test_the_checksum_can_be_left_out(folder, rows, target):
    store(folder, rows, target)
    path = shard_file(folder, 1)
    record = ShardRecord.model_validate_json(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(record.model_copy(update={"sha256": "0"}).model_dump_json())
    FeatureStore(folder, verify=False).batch([2])


def test_unmet_wants(rows):
    of = manifest(rows, summary=False)
    assert of.unmet(Wants((2, 4, 5), "supervised", summary=False)) == []
    assert of.unmet(Wants((5, 2), "supervised", summary=False)) == []
    assert of.unmet(Wants((2, 3), "all")) == [
        "layer 3 (it holds 2, 4, 5)",
        "final features at every position (it holds those at supervised ones)",
        "the teacher's argmax and log-sum-exp",
    ]


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize(
    "wants",
    [Wants((2, 4, 5)), Wants((5, 2)), Wants((), "all"), Wants((4,), "all")],
    ids=["all", "turned", "none", "one"],
)
def test_a_store_of_more_gives_each_head_what_its_own_store_would(tmp_path, rows, target, form, wants):
    store(tmp_path / "wide", rows, target, layers=[1, 2, 4, 5], final="all", dtype=form)
    own = store(tmp_path / "own", rows, target, layers=list(wants.layers), final=wants.final, dtype=form)
    wide = FeatureStore(tmp_path / "wide", rows=rows, wants=wants)
    picked = [2, 0, 1]
    (batch, features), (other, others) = own.batch(picked), wide.batch(picked)
    assert_same_batch(batch, other)
    assert_same_features(features, others)


def test_a_store_of_less_is_refused_with_what_is_missing(folder, rows, target):
    store(folder, rows, target)
    with pytest.raises(
        StoreError, match=r"lacks layer 3 .*2, 4, 5.*every position.*extra_layers=\[2, 3, 4, 5\].*final=all"
    ):
        FeatureStore(folder, wants=Wants((2, 3), "all"))


def test_row_hash_tells_ids_and_turns_apart():
    a, b = torch.tensor([1, 2]), torch.tensor([0, 1])
    assert len({row_hash(a, b), row_hash(b, a), row_hash(a, a), row_hash(torch.tensor([1, 3]), b)}) == 4


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_a_head_that_reads_no_layer_stores_final_features_alone(folder, rows, target, form):
    got = store(folder, rows, target, layers=[], dtype=form)
    features = got.batch([3, 1])[1]
    plain = target.features(Batch.pack([rows[3], rows[1]]), Wants(()))
    assert features.layers.shape == (21, 0, 64)
    assert_same_features(features, as_stored(plain, form))


def test_a_disk_that_is_full_while_a_shard_is_written(folder, rows, target):
    """safetensors has an error of its own for it. A limit on the size of files stands in for the disk."""
    of = manifest(rows)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        with pytest.raises(
            StoreError, match="shard-00000.safetensors could not be written: a file may not .*make room"
        ):
            write(folder, rows, target, of)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("shard-*"))
    assert len(store(folder, rows, target)) == len(rows)
