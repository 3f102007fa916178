from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from headtrain.capture import Rows, capture, head_wants, plan_rows
from headtrain.config import Recipe, RecipeError
from headtrain.data.store import StoreError
from headtrain.heads.eagle3 import Eagle3
from headtrain.heads.io import load_head, read_tensors
from headtrain.metadata import Metadata
from headtrain.target import edges
from headtrain.target.load import load_target
from headtrain.target.shape import TargetError
from headtrain.train import __main__ as command
from headtrain.train import setup as preparing
from headtrain.train.backend import Backend, resolve_precision
from headtrain.train.setup import _online, _stored, prepare_run
from headtrain.train.trainer import train
from headtrain.types import Features, Row, Wants

WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "head"]


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, count, shift in (("train", 24, 0), ("eval", 6, 5)):
        lines = []
        for i in range(count):
            words = [WORDS[(i * 7 + j * (1 + i % 3) + shift) % 12] for j in range(14)]
            turns = [("user", " ".join(words[:3])), ("assistant", " ".join(words[2:]))]
            lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def recipe(tiny_folder, data, tmp_path) -> Recipe:
    return Recipe(
        name="tiny",
        target={"path": str(tiny_folder)},
        data={"train": [str(data / "train.jsonl")], "eval": [str(data / "eval.jsonl")], "max_length": 200},
        features={"dtype": "float32"},
        head={"kind": "eagle3", "depth": 3, "draft_vocab_size": 64},
        train=dict(steps=4, batch_tokens=256, accumulation=2, lr=3e-3, save_every=2, eval_every=2, precision="fp32"),
        output=str(tmp_path / "run"),
    )


def quiet() -> Console:
    return Console(stderr=True, quiet=True)


def test_offline_equals_online(recipe, backend, tmp_path):
    """The same head from stored and from fresh features; and the run leaves a loadable checkpoint."""
    offline = train(recipe, prepare_run(recipe, backend, quiet()), backend)
    online = recipe.model_copy(deep=True)
    online.features.mode, online.output = "online", str(tmp_path / "online")
    other = train(online, prepare_run(online, backend, quiet()), backend)
    a, b = read_tensors(offline.last / "head.safetensors"), read_tensors(other.last / "head.safetensors")
    # Tolerance: the target's forward over other neighbours rounds differently, and AdamW's first steps amplify it.
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)
    assert offline.evaluation["loss"] == pytest.approx(other.evaluation["loss"], rel=1e-3)
    head, metadata = load_head(offline.best)
    assert metadata.training.steps in (2, 4) and metadata.training.tokens > 0 and metadata.training.max_length > 20
    assert metadata.draft_vocab.size == 64 and head.draft_ids.numel() == 64
    again = train(recipe, prepare_run(recipe, backend, quiet()), backend)  # features are there, the run is finished
    assert again.step == 4 and again.last == offline.last


def test_stored_features_are_trained_on_without_the_targets_body(recipe, backend, monkeypatch):
    """A machine that cannot hold the target trains from what another one captured, and the head starts the same."""
    first = prepare_run(recipe, backend, quiet())  # captures
    for module in (preparing, edges):
        monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("the whole target is loaded"))
    second = prepare_run(recipe, backend, quiet())
    assert second.identity == first.identity and second.data_sha256 == first.data_sha256
    mine, theirs = second.head.state_dict(), first.head.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(second.teacher.weight, first.teacher.weight)
    train(recipe, second, backend)


@pytest.mark.parametrize("mode", ["offline", "online", "stream"])
def test_induction_is_fitted_on_the_runs_own_rows_and_once(recipe, backend, tmp_path, monkeypatch, mode):
    """Interrupted at step 2 and resumed is the uninterrupted run; the fit is the start's alone."""
    recipe.train.init, recipe.head["norm_output"] = "induction", True
    capture(recipe, console=quiet())
    fits, good = [], Eagle3.fit_induction

    def fit(head, sample, total, window):
        parts = list(sample)
        fits.append(sum(len(batch) for batch, _ in parts))
        said = good(head, iter(parts), total, window)
        assert not torch.equal(head.fc.weight, before["fc.weight"])
        return said

    monkeypatch.setattr(Eagle3, "fit_induction", fit)
    recipe.features.dir, recipe.features.mode = str(recipe.features_dir), mode
    setup = prepare_run(recipe, backend, quiet())
    before = {name: value.clone() for name, value in setup.head.state_dict().items()}
    whole = train(recipe, setup, backend)
    assert len(fits) == 1 and fits[0] >= 0.9 * sum(setup.train.source.lengths)  # few rows: all of them
    shutil.rmtree(whole.last)
    again = train(recipe, prepare_run(recipe, backend, quiet()), backend)
    assert len(fits) == 1 and again.step == 4
    assert whole.evaluation == again.evaluation


def test_another_kind_of_head(recipe, backend):
    recipe.head = {"kind": "medusa"}
    recipe.train.depth_schedule = [{"fraction": 0.5, "depth": 1}, {"fraction": 0.5, "depth": 2}]
    result = train(recipe, prepare_run(recipe, backend, quiet()), backend)
    assert result.step == 4 and result.evaluation["loss"] > 0


def test_warm_start_freezes_the_map(recipe, backend, data, tmp_path):
    """CASES 18."""
    first = train(recipe, prepare_run(recipe, backend, quiet()), backend)
    other = recipe.model_copy(deep=True)
    other.output = str(tmp_path / "second")
    text = json.dumps(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "0 1 2 + - * /"}]}
    )
    (tmp_path / "other.jsonl").write_text("\n".join([text] * 8))
    other.data.train = [str(tmp_path / "other.jsonl")]
    other.train.warm_start = str(tmp_path / "run")
    warm = prepare_run(other, backend, quiet())
    trained, _ = load_head(first.best)
    assert torch.equal(warm.head.draft_ids, trained.draft_ids)
    for name, value in trained.state_dict().items():
        assert torch.equal(warm.head.state_dict()[name], value), name
    for changes, message in (
        (dict(draft_vocab_size=32), "draft vocabulary of 64, the recipe asks for 32"),
        (dict(layers=[1, 2, 3]), r"reads target layers .*\[1, 2, 3\]"),
        (dict(kind="medusa"), "is a 'eagle3' head, the recipe's 'medusa'"),
    ):
        bad = other.model_copy(deep=True)
        bad.features.mode = "online"
        bad.head = {"kind": "medusa"} if "kind" in changes else {**other.head, **changes}
        with pytest.raises(RecipeError, match=message):
            prepare_run(bad, backend, quiet())
    meta = json.loads((first.best / "headtrain.json").read_text())
    meta["target"]["tokenizer"] = "other"
    (first.best / "headtrain.json").write_text(json.dumps(meta))
    (first.best / "trainer.json").unlink()  # it holds the file's hash
    other.train.warm_start = str(first.best)
    with pytest.raises(RecipeError, match="(?s)trained on another target.*tokenizer: 'other' against"):
        prepare_run(other, backend, quiet())


@pytest.mark.parametrize("path", ["someone/eagle3-head", "no/such/folder/here"])
def test_warm_start_that_is_no_folder_is_an_error(recipe, backend, path):
    """CASES 40: never a random start."""
    recipe.train.warm_start, recipe.features.mode = path, "online"
    with pytest.raises(RecipeError, match=f"no folder '{path}'"):
        prepare_run(recipe, backend, quiet())


class OneOfTwo:
    """What a second rank has of a watch, alone."""

    rank, world, first_on_node = 1, 2, False

    def at(self, place):
        pass

    def share(self, name, value=""):
        return [value]


def test_every_rank_checks_the_features_that_it_reads(recipe, backend, monkeypatch):
    """A rank that captured nothing refuses a flipped byte, too."""
    target = load_target(recipe.target)
    rows = plan_rows(recipe, target.tokenizer)
    capture(recipe, target=target, rows=rows, console=quiet())
    monkeypatch.setattr(preparing, "keeps", lambda folder, watch: False)
    stores = _stored(recipe, target, head_wants(recipe, target.shape), rows, OneOfTwo(), quiet())
    path = next((recipe.features_dir / "train").glob("shard-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged: sha256"):
        for row in range(len(rows["train"].rows)):
            stores["train"].batch([row])


def test_an_accumulation_that_ranks_cannot_share_is_refused_before_anything_is_loaded(recipe, backend, monkeypatch):
    monkeypatch.setattr(backend, "world", 2)
    recipe.train.accumulation, recipe.target.path = 3, "nowhere"
    with pytest.raises(RecipeError, match="3 micro-batches do not divide over 2 ranks"):
        prepare_run(recipe, backend, quiet(), OneOfTwo())
    (recipe.output_dir / "checkpoints/step-000002").mkdir(parents=True)  # a run that goes on may
    with pytest.raises(TargetError, match="nowhere"):
        prepare_run(recipe, backend, quiet(), OneOfTwo())


def test_same_start_every_time(recipe, backend):
    recipe.train.init, recipe.features.mode = "random", "online"
    one = prepare_run(recipe, backend, quiet()).head.state_dict()
    torch.manual_seed(99)
    two = prepare_run(recipe, backend, quiet()).head.state_dict()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_random_start_has_the_targets_rows_where_the_lm_head_is_frozen(recipe, backend):
    """And training leaves them: what is exported is what was trained with."""
    recipe.train.init, recipe.features.mode = "random", "online"
    recipe.head["train_lm_head"] = False
    setup = prepare_run(recipe, backend, quiet())
    head, rows = setup.head, load_target(recipe.target, "cpu").weights().lm_head
    assert torch.equal(head.lm_head.weight, rows[head.draft_ids])
    before = head.midlayer.mlp.up_proj.weight.clone()
    last, _ = load_head(train(recipe, setup, backend).last)
    assert torch.equal(last.lm_head.weight, rows[head.draft_ids])
    assert not torch.equal(last.midlayer.mlp.up_proj.weight, before)


def test_one_forward_of_the_target_at_a_time(recipe):
    """Reading ahead and evaluation ask from two threads; the target's hooks would mix their states."""
    busy, overlaps = [], []

    class Target:
        def features(self, batch, wants):
            overlaps.append(bool(busy))
            busy.append(1)
            time.sleep(0.01)
            busy.pop()
            return Features(torch.zeros(len(batch), 1, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))

    rows = {name: Rows([Row([1, 2, 3], [0, 0, 1])], []) for name in ("train", "eval")}
    sources = _online(recipe, Target(), Wants((1,), summary=False), rows)
    threads = [threading.Thread(target=lambda s=s: [s.batch([0]) for _ in range(10)]) for s in sources.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 20 and not any(overlaps)


def test_only_the_head_moves(recipe, backend):
    """The target's tensors that the head shares are the same after training."""
    recipe.features.mode = "online"
    run = prepare_run(recipe, backend, quiet())
    before = {n: b.clone() for n, b in run.head.named_buffers()}
    weight = run.teacher.weight.clone()
    train(recipe, run, backend)
    assert torch.equal(weight, run.teacher.weight) and not run.teacher.weight.requires_grad
    assert before and all(torch.equal(before[n], b) for n, b in run.head.named_buffers())


def write(recipe: Recipe, folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return path


def run_command(*arguments: str):
    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.lr=-1", "train.lr"),
        ("head.kind=eagel3", "did you mean 'eagle3'"),
        ("target.path=/nowhere", "nowhere"),
        ("train.warm_start=a/b", "no folder 'a/b'"),
        ("data.train=[/nowhere.jsonl]", "nowhere.jsonl"),
        ("train.depth_schedule=[{fraction: 1, depth: 9}]", "depth 9, but the head drafts 3"),
        ("head.draft_vocab_size=0", "head (eagle3)"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(recipe, tmp_path, override, message):
    got = run_command(str(write(recipe, tmp_path)), override)
    assert got.exit_code == 2, got.output
    assert message in got.output and "Traceback" not in got.output


@pytest.mark.slow
def test_trackers(recipe, tmp_path):
    """TensorBoard and offline wandb in a process of their own, since accelerate keeps its trackers for good."""
    recipe.train.trackers = ["tensorboard", "wandb"]
    recipe.train.log_every = 1
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "headtrain.train", str(write(recipe, tmp_path))], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").rglob("events.out.tfevents.*")) and list(tmp_path.rglob("*.wandb"))
    assert "held-out at the end" in done.stderr


def test_missing_tracker_names_the_extra(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'headtrain\[wandb\]'"):
        Backend("fp32", ["wandb"])


@pytest.mark.slow
def test_the_launcher_passes_sigterm_on(recipe, tmp_path):
    """`accelerate launch` told to stop: its child saves and ends, instead of training on as an orphan."""
    recipe.train.steps, recipe.train.log_every, recipe.train.save_every = 4000, 1, 4000
    config = Path(__file__).parents[2] / "recipes/backend/single.yaml"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        + ["-m", "headtrain.train", str(write(recipe, tmp_path))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    curve = tmp_path / "run/metrics.jsonl"
    for _ in range(1800):
        if (curve.exists() and curve.stat().st_size) or launcher.poll() is not None:
            break
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=60)  # ends when the child, too, has closed its output
    assert "SIGTERM: saved" in out and "Traceback" not in out and "not passed" not in out, out
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert Metadata.read(saved).training.steps == int(saved.name[5:])


def test_precision():
    cpu = torch.device("cpu")
    assert resolve_precision("bf16", cpu) == "bf16" and resolve_precision("fp32", cpu) == "fp32"
    flags = Path("/proc/cpuinfo").read_text()
    has = "avx512_bf16" in flags or "amx_bf16" in flags
    assert resolve_precision("auto", cpu) == ("bf16" if has else "fp32")
