from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from rich.console import Console

from headtrain import capture as module
from headtrain import vocab
from headtrain.capture import capture, head_wants, plan_manifest, plan_rows
from headtrain.config import Recipe, RecipeError
from headtrain.data.loader import Loader, OnlineSource
from headtrain.data.meter import Meter
from headtrain.data.produce import runs
from headtrain.data.quantize import as_stored
from headtrain.data.storage import FULL, Local
from headtrain.data.store import FeatureStore, StoreError, shard_file
from headtrain.shift import final_count, final_positions
from headtrain.target.load import load_target
from headtrain.train import setup
from headtrain.types import Batch, Row, TargetShape, Wants

CHATS = [
    [("user", "Hello! How are you?"), ("assistant", "I am fine, thank you.")],
    [
        ("system", "You are a helpful assistant."),
        ("user", "What is 1 + 2?"),
        ("assistant", "1 + 2 = 3"),
        ("user", "And 2 * 3?"),
        ("assistant", "2 * 3 = 6"),
    ],
    [("user", "Name a fox."), ("assistant", "The quick brown fox jumps over the lazy dog.")],
]


def jsonl(path, times=3):
    """``times`` variations of each chat."""
    lines = []
    for n in range(times):
        for chat in CHATS:
            messages = [{"role": role, "content": f"{text} {'again ' * n}".strip()} for role, text in chat]
            lines.append(json.dumps({"messages": messages, "route": "chat"}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture")
    jsonl(folder / "train.jsonl"), jsonl(folder / "eval.jsonl", 1)
    return folder


@pytest.fixture(scope="module")
def target(tiny_folder):
    return load_target(recipe_of(tiny_folder, tiny_folder, tiny_folder).target, "cpu")


def recipe_of(place, folder, out, kind="eagle3", **features) -> Recipe:
    settings = dict(dir=str(out), dtype="float32", shard_tokens=150, batch_tokens=120)
    return Recipe.model_validate(
        dict(
            name="tiny",
            target={"path": str(folder)},
            data={"train": [str(place / "train.jsonl")], "eval": [str(place / "eval.jsonl")]},
            features=settings | features,
            head={"kind": kind},
        )
    )


def quiet():
    return Console(file=io.StringIO(), width=200)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("shard-*")) if p.is_file()}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_offline_equals_on_the_fly(place, tiny_folder, tmp_path, target, kind, dtype):
    """On the very runs that capture packed, equality is exact."""
    recipe = recipe_of(place, tiny_folder, tmp_path / "f", kind, dtype=dtype)
    rows = plan_rows(recipe, target.tokenizer)
    store = capture(recipe, target=target, rows=rows, console=quiet())
    wants = head_wants(recipe, target.shape)
    assert store.manifest.unmet(wants) == []
    for name, split in rows.items():
        store = FeatureStore(tmp_path / "f" / name, rows=split.rows)
        cuts = store.manifest.shards
        for first, end in zip(cuts[:-1], cuts[1:], strict=True):
            at = first
            for run in runs(split.rows[first:end], recipe.features.batch_tokens):
                batch, features = store.batch(range(at, at + len(run)))
                fly = as_stored(target.features(Batch.pack(run), wants), dtype)
                for part in ("layers", "final_at", "final", "argmax", "lse"):
                    assert torch.equal(getattr(features, part), getattr(fly, part)), part
                at += len(run)


def test_one_capture_serves_every_head(place, tiny_folder, tmp_path, target):
    """The second head's capture finds all that it reads and writes nothing; a head that reads more is refused."""
    wide = recipe_of(place, tiny_folder, tmp_path / "f", "medusa", extra_layers=[2, 4, 5], final="all")
    capture(wide, target=target, console=quiet())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "f").rglob("shard-*")}
    eagle3 = recipe_of(place, tiny_folder, tmp_path / "f", "eagle3")
    reads = head_wants(eagle3, target.shape)
    assert reads.layers and set(reads.layers) <= {2, 4, 5} and reads.final == "supervised"
    store = capture(eagle3, target=target, console=quiet())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "f").rglob("shard-*")} == before
    _, features = store.batch([0, 1])
    _, alone = capture(recipe_of(place, tiny_folder, tmp_path / "own"), target=target, console=quiet()).batch([0, 1])
    assert torch.equal(features.layers, alone.layers) and torch.equal(features.final_at, alone.final_at)
    # logits of other numbers of rows may be summed in another order: 1e-5 of values of order 1
    torch.testing.assert_close(features.lse, alone.lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(StoreError) as error:
        capture(recipe_of(place, tiny_folder, tmp_path / "own", "mtp"), target=target, console=quiet())
    text, wanted = str(error.value), head_wants(recipe_of(place, tiny_folder, tmp_path, "mtp"), target.shape)
    held, missing = ", ".join(map(str, reads.layers)), set(wanted.layers) - set(reads.layers)
    assert f"layer {', '.join(map(str, missing))} (it holds {held})" in text and missing
    assert f"features.extra_layers=[{', '.join(map(str, sorted(missing | set(reads.layers))))}]" in text
    assert "which keeps both" in text and "features.final" not in text


def test_an_extra_layer_that_the_target_lacks_is_refused(place, tiny_folder, tmp_path, target):
    with pytest.raises(RecipeError, match=r"extra_layers: \[9\], but the target has hidden_states 0 to 8"):
        capture(recipe_of(place, tiny_folder, tmp_path, extra_layers=[9, 2]), target=target, console=quiet())


def test_other_packings_give_the_same_features_up_to_the_order_of_sums(place, tiny_folder, tmp_path, target):
    """A row's features do not depend on what it was packed with; a matrix product of another height may sum in
    another order, hence 1e-5 of values of order 1."""
    recipe = recipe_of(place, tiny_folder, tmp_path / "f")
    rows = plan_rows(recipe, target.tokenizer)["train"].rows
    store = capture(recipe, target=target, console=quiet())
    fly = OnlineSource(rows, target.features, head_wants(recipe, target.shape), "float32")
    pairs = zip(Loader(store, 100, 3).batches(0, 8), Loader(fly, 100, 3).batches(0, 8), strict=True)
    for (batch, features), (other, others) in pairs:
        assert torch.equal(batch.ids, other.ids) and torch.equal(batch.turn, other.turn)
        assert torch.equal(features.final_at, others.final_at) and torch.equal(features.argmax, others.argmax)
        torch.testing.assert_close(features.layers, others.layers, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(features.final, others.final, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(features.lse, others.lse, rtol=1e-5, atol=1e-5)


def test_stored_features_are_hugging_faces(place, tiny_folder, tmp_path, target):
    store = capture(recipe_of(place, tiny_folder, tmp_path / "f"), target=target, console=quiet())
    model = tiny.model()
    model.load_state_dict(target.model.state_dict())
    for index in (0, len(store) - 1):
        row, features = store.read(index)
        out = model(torch.tensor([row.ids]), output_hidden_states=True)
        for column, layer in enumerate(store.manifest.layers):
            torch.testing.assert_close(features.layers[:, column], out.hidden_states[layer][0], rtol=1e-4, atol=1e-5)
        logits = out.logits[0][features.final_at]
        torch.testing.assert_close(features.lse, logits.logsumexp(-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(target.teacher().logits(features.final), logits, rtol=1e-4, atol=1e-4)


class Killed(Exception):
    pass


class Mortal:
    """A target that dies at its n-th forward."""

    def __init__(self, target, lives):
        self.target, self.lives = target, lives
        self.shape, self.tokenizer, self.identity = target.shape, target.tokenizer, target.identity
        self.weights, self.dtype = target.weights, target.dtype

    def features(self, batch, wants):
        self.lives -= 1
        if self.lives < 0:
            raise Killed
        return self.target.features(batch, wants)


def test_a_killed_capture_goes_on_to_the_same_bytes(place, tiny_folder, tmp_path, target):
    whole = recipe_of(place, tiny_folder, tmp_path / "whole", dtype="bfloat16")
    capture(whole, target=target, console=quiet())
    killed = recipe_of(place, tiny_folder, tmp_path / "killed", dtype="bfloat16")
    for lives in (1, 3, 4):  # in the first shard, later, and later still
        with pytest.raises(Killed):
            capture(killed, target=Mortal(target, lives), console=quiet())
    with pytest.raises(StoreError, match="did not finish"):
        FeatureStore(tmp_path / "killed" / "train")
    console = quiet()
    capture(killed, target=target, console=console)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert "shards are there" in console.file.getvalue()
    # finished: no forward at all, whatever is asked
    capture(killed, target=Mortal(target, 0), console=quiet())


def test_two_captures_are_byte_identical(place, tiny_folder, tmp_path, target):
    for name in "ab":
        capture(recipe_of(place, tiny_folder, tmp_path / name, dtype="int8"), target=target, console=quiet())
    assert files(tmp_path / "a") == files(tmp_path / "b") != {}


def test_another_template_is_refused_with_the_difference(place, tiny_folder, tmp_path, target):
    """CASES 31: half a capture, then other rows."""
    recipe = recipe_of(place, tiny_folder, tmp_path / "f")
    with pytest.raises(Killed):
        capture(recipe, target=Mortal(target, 3), console=quiet())
    other = tiny.save(tmp_path / "other", template=tiny.CHATML.replace("user", "human").replace("\n", "\n\n"))
    changed = recipe_of(place, other, tmp_path / "f")
    with pytest.raises(StoreError) as error:
        capture(changed, console=quiet())
    old, new = target.identity.chat_template, load_target(changed.target, "cpu").identity.chat_template
    assert f"target chat_template: {old!r} / {new!r}" in str(error.value)
    assert "rows_sha256: " in str(error.value) and "weights" not in str(error.value)
    fewer = recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit": 4})})
    with pytest.raises(StoreError, match=r"data.limit: None / 4"):
        capture(fewer, target=target, console=quiet())


@pytest.mark.parametrize("by", ["capture", "training"])
def test_another_targets_store_is_not_opened(place, tiny_folder, tmp_path, target, monkeypatch, by):
    """It may have come there after this command had looked."""
    capture(recipe_of(place, tiny_folder, tmp_path / "f"), target=target, console=quiet())
    recipe = recipe_of(place, tiny.save(tmp_path / "other", seed=1), tmp_path / "f")
    for owner, name in ((module, "fill_stores"), (setup, "fill_stores"), (setup, "keeps")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    other, wants, rows = module.load(recipe, None, None, quiet())
    watch = SimpleNamespace(rank=0, at=lambda _: None, share=lambda _: None)
    with pytest.raises(StoreError, match=r"made otherwise(.|\n)*target weights\."):
        if by == "capture":
            capture(recipe, target=other, rows=rows, console=quiet())
        else:
            setup._stored(recipe, other, wants, rows, watch, quiet())


def test_the_size_is_printed_and_a_small_disk_stops_before_any_forward(
    place, tiny_folder, tmp_path, target, monkeypatch
):
    recipe, console = recipe_of(place, tiny_folder, tmp_path / "f"), quiet()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("headtrain.data.manifest.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"need .* kB.*1 kB free.*int8.*online"):
        capture(recipe, target=Mortal(target, 0), console=console)
    assert "a token" in console.file.getvalue() and "writing " in console.file.getvalue()
    assert not (tmp_path / "f" / "train" / "manifest.json").exists()  # so that int8 can be tried in the same folder
    monkeypatch.undo()
    capture(recipe_of(place, tiny_folder, tmp_path / "f", dtype="int8"), target=target, console=quiet())


def test_the_printed_size_is_the_size_on_disk(place, tiny_folder, tmp_path, target):
    recipe = recipe_of(place, tiny_folder, tmp_path / "f", dtype="bfloat16", shard_tokens=10_000)
    rows = plan_rows(recipe, target.tokenizer)["train"].rows
    capture(recipe, target=target, console=quiet())
    plan = plan_manifest(recipe, target.identity, head_wants(recipe, target.shape), rows)
    real = shard_file(tmp_path / "f" / "train", 0).stat().st_size
    assert 0 <= real - plan.bytes(plan.tokens, plan.finals, plan.rows) < 2000  # the safetensors header


def test_a_store_is_not_filled_by_targets_of_two_dtypes(place, tiny_folder, tmp_path, target):
    """A capture that goes on with another target.dtype is refused; a store that is complete serves any."""
    float32, bfloat16 = (recipe_of(place, tiny_folder, tmp_path / "f") for _ in range(2))
    bfloat16.target.dtype = "bfloat16"
    with pytest.raises(Killed):
        capture(float32, target=Mortal(target, 3), console=quiet())
    before = files(tmp_path / "f")
    with pytest.raises(StoreError, match=r"computed in float32.* in bfloat16.*target\.dtype=float32.*features\.dir"):
        capture(bfloat16, console=quiet())
    assert before and files(tmp_path / "f") == before
    capture(float32, target=target, console=quiet())
    store = capture(bfloat16, console=quiet())
    assert store.manifest.target_dtype == "float32" and files(tmp_path / "f").keys() > before.keys()


def test_a_complete_store_is_said_to_be_complete(place, tiny_folder, tmp_path, target):
    """Also where a capture that died left a claim, which is cleared away."""
    recipe, first, second = recipe_of(place, tiny_folder, tmp_path / "f"), quiet(), quiet()
    capture(recipe, target=target, console=first)
    assert "captured " in first.file.getvalue() and "complete already" not in first.file.getvalue()
    (tmp_path / "f/train/claim-00001-1.json").write_text("gone")
    capture(recipe, target=target, console=second)
    assert second.file.getvalue().count("it was complete already") == 2 and "captured" not in second.file.getvalue()
    assert not list((tmp_path / "f").rglob("claim-*")) and not list((tmp_path / "f").rglob("worker-*"))
    assert Meter(quiet(), 9).summary() == "nothing was left to capture"  # others were quicker


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("where", ["fsync", "replace", "link"])
def test_no_room_is_said_whatever_the_system_calls_it(place, tiny_folder, tmp_path, target, monkeypatch, code, where):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, where, full)
    if where == "link":  # a file system without links has another way
        monkeypatch.setattr(Local, "_create", full)
    with pytest.raises(StoreError, match=rf"{FULL[code].split('(')[0]}.*make room .* complete shards are kept"):
        capture(recipe_of(place, tiny_folder, tmp_path / "f"), target=target, console=quiet())
    assert not list((tmp_path / "f").rglob("*.tmp"))  # it would hold room that there is not


def test_the_room_for_records_and_files_is_asked_for(place, tiny_folder, tmp_path, target, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "check_disk", lambda *args: asked.append(args))
    recipe = recipe_of(place, tiny_folder, tmp_path / "f")
    capture(recipe, target=target, console=quiet())
    stored = [path for path in (tmp_path / "f").rglob("shard-*")]
    assert [args[2] for args in asked] == [len(stored)]
    assert asked[0][1] >= sum(path.stat().st_size for path in stored)
    far = recipe.model_copy(deep=True)
    far.features.dir, far.output = "memory://asked/f", str(tmp_path / "run")
    capture(far, target=target, console=quiet())
    cache, one_shard = asked[-1]
    assert cache == tmp_path / "run/features-cache" and one_shard >= max(path.stat().st_size for path in stored)


def test_the_memory_of_one_process_is_no_place_for_several(place, tiny_folder, tmp_path, target, monkeypatch):
    recipe = recipe_of(place, tiny_folder, "memory://own/f")
    for mode in ("offline", "stream"):
        recipe.features.mode = mode
        with pytest.raises(StoreError, match="memory:// is each process's own.*s3://"):
            module.command(recipe, quiet())
    with pytest.raises(StoreError, match="training and the capture"):
        module.open_stream(recipe, target, None, [], 0, quiet())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StoreError, match="the processes of this launch cannot share"):
        capture(recipe, target=target, console=quiet())


def test_a_split_target_is_refused_before_it_is_loaded(place, tiny_folder, tmp_path):
    recipe = recipe_of(place, tmp_path / "nowhere", tmp_path / "f").model_dump()
    recipe["features"]["mode"], recipe["target"]["shard"] = "online", "tp"
    with pytest.raises(RecipeError, match=r"target.shard=tp: .*whole targets only.*target.shard=none.*online"):
        module.command(Recipe.model_validate(recipe), quiet())


def test_runs_are_whole_rows_within_the_budget():
    rows = tiny.rows((30, 30, 30, 200, 5, 60, 40))
    assert [[len(row) for row in run] for run in runs(rows, 100)] == [[30, 30, 30], [200], [5, 60], [40]]


def test_head_wants_needs_neither_memory_nor_a_draft_vocabulary(tiny_folder, place, tmp_path):
    huge = TargetShape("LlamaForCausalLM", "llama", 16384, 53248, 126, 128, 8, 128, 128256)
    recipe = recipe_of(place, tiny_folder, tmp_path)
    recipe.head = {"kind": "eagle3", "draft_vocab_size": 32000}
    assert head_wants(recipe, huge).layers == (2, 63, 123)
    recipe.head = {"kind": "medusa"}
    assert head_wants(recipe, huge) == Wants((), "supervised", depth=4)


def test_counted_tokens_are_the_drafted_ones():
    rows = [
        Row([9, 9, 5, 6, 7, 9, 5], [0, 0, 1, 1, 1, 0, 2]),  # 6 and 7: 5 opens its turn twice
        Row([5, 6, 6, 6], [1, 1, 1, 1]),  # token 0 has no position before it: drafting starts at 1, drafts 2 and 3
        *tiny.rows((40, 11), vocab=12),
    ]
    slow = torch.zeros(12, dtype=torch.int64)
    for row in rows:
        for i in range(len(row) - 2):
            if row.turn[i + 1] and row.turn[i + 2] == row.turn[i + 1]:
                slow[row.ids[i + 2]] += 1
    assert torch.equal(vocab.count_tokens(rows, 12), slow)
    assert vocab.count_tokens(rows[:2], 12).tolist() == [0] * 6 + [3, 1] + [0] * 4
    many = rows * 100  # several chunks
    assert torch.equal(vocab.count_tokens(many, 12), slow * 100)


# ---- the command


def run(*args, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "headtrain.capture", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def test_the_command_captures(place, tiny_folder, tmp_path):
    import yaml

    recipe = recipe_of(place, tiny_folder, tmp_path / "f")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    done = run(path, "features.dtype=int8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "tokens/s" in done.stderr and "as int8" in done.stderr
    assert FeatureStore(tmp_path / "f" / "train").manifest.dtype == "int8"
    assert len(FeatureStore(tmp_path / "f" / "eval")) == 3


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("features.dtyp=int8", "did you mean `dtype`?"),
        ("data.train=[nothing.jsonl]", "nothing.jsonl"),
        ("target.path=./nowhere", "nowhere"),
        ("features.dtype=float32", "dtype: bfloat16 / float32"),
    ],
)
def test_errors_end_with_one_message_and_code_2(place, tiny_folder, tmp_path, monkeypatch, problem, message, target):
    import typer
    import yaml

    recipe = recipe_of(place, tiny_folder, tmp_path / "f", dtype="bfloat16")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    if "float32" in problem:
        with pytest.raises(Killed):
            capture(recipe, target=Mortal(target, 3), console=quiet())
    console = quiet()
    monkeypatch.setattr(module, "Console", lambda **_: console)
    with pytest.raises(typer.Exit) as error:
        module.main(path, [problem])
    assert error.value.exit_code == 2
    assert message in console.file.getvalue() and "Traceback" not in console.file.getvalue()


@pytest.mark.parametrize("mode", ["stream", "offline"])
def test_both_commands_do_what_the_mode_says(place, tiny_folder, tmp_path, monkeypatch, mode):
    """`headtrain capture` filled the disk where the recipe bounds it."""
    import yaml
    from typer.testing import CliRunner

    from headtrain import cli

    recipe, done = recipe_of(place, tiny_folder, tmp_path / "f", mode=mode), []
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    monkeypatch.setattr(module, "stream", lambda *_, **__: done.append("stream"))
    monkeypatch.setattr(module, "capture", lambda *_, **__: done.append("offline"))
    monkeypatch.setattr(module, "stop_on_sigterm", lambda: None)
    module.main(path, [])
    assert CliRunner().invoke(cli.app, ["capture", str(path)]).exit_code == 0
    assert done == [mode, mode]


def test_help_teaches(tmp_path):
    from typer.testing import CliRunner

    app = module.typer.Typer()
    app.command()(module.main)
    text = CliRunner().invoke(app, ["--help"]).output
    for word in ("recipes/", "features.dtype=int8", "same command goes on", "features.mode=online"):
        assert word in " ".join(text.split())


@pytest.mark.parametrize("turn", [[0, 0, 1, 1, 0, 2], [1, 1, 0], [0], [1], [0, 0], [1, 0, 0, 2, 2]])
def test_finals_are_counted_as_they_are_kept(turn):
    row, other = Row(list(range(len(turn))), turn), Row([5, 6], [1, 1])
    assert final_count(row) == len(final_positions(Batch.pack([row])))
    assert final_count(row) + final_count(other) == len(final_positions(Batch.pack([row, other])))
