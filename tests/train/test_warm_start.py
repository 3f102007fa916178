"""Warm starts: what is copied, what is refused before anything expensive, and another draft vocabulary on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoint_families
import pytest
import tiny
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from headtrain import capture
from headtrain.capture import plan_rows
from headtrain.commands.vocab import vocab as verb
from headtrain.config import Recipe, RecipeError, TargetSection, load_recipe
from headtrain.export.core import export_head
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata, load_head, save_head
from headtrain.heads.resize import draft_rows
from headtrain.target.load import load_target, load_tokenizer
from headtrain.train import checkpoint, setup
from headtrain.train.backend import Backend
from headtrain.train.trainer import train
from headtrain.train.warm import WarmStart, check_warm_start, read_trained
from headtrain.vocab import count_tokens

WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "system"]


@pytest.fixture(scope="module")
def backend():
    made = Backend("fp32")
    torch.set_num_threads(1)  # these heads are too small for two
    return made


@pytest.fixture(scope="module")
def base(tiny_folder, tmp_path_factory) -> Recipe:
    """A recipe over twelve short rows, and its trained run with stored features."""
    folder = tmp_path_factory.mktemp("warm")
    lines = []
    for i in range(12):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % len(WORDS)] for j in range(14)]
        turns = [("user", " ".join(words[:3])), ("assistant", " ".join(words[2:]))]
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return Recipe(
        name="tiny",
        target={"path": str(tiny_folder)},
        data={"train": [str(folder / "train.jsonl")], "max_length": 200},
        features={"dtype": "float32"},
        head={"kind": "eagle3", "depth": 2, "draft_vocab_size": 24},
        train=dict(
            depth_schedule=[{"fraction": 1, "depth": 1}],
            steps=2,
            batch_tokens=256,
            lr=3e-3,
            save_every=2,
            eval_every=2,
            precision="fp32",
        ),
        output=str(folder / "run"),
    )


@pytest.fixture(scope="module")
def run(base, backend) -> Path:
    train(base, setup.prepare_run(base, backend, quiet()), backend)
    return base.output_dir


def quiet() -> Console:
    return Console(stderr=True, quiet=True)


def again(base: Recipe, run: Path, **head) -> Recipe:
    """The same recipe in another folder, warm-started from the run, on the run's stored features."""
    recipe = base.model_copy(deep=True)
    recipe.output, recipe.features.dir = str(run.parent / "again"), str(base.features_dir)
    recipe.head = {**recipe.head, **head}
    recipe.train.warm_start = str(run)
    return recipe


@pytest.fixture
def no_forward(monkeypatch):
    """The target is loaded (its embedding and lm_head are needed), but its features are not computed again."""

    def fill(*_):
        raise AssertionError("features were computed again")

    monkeypatch.setattr(capture, "fill", fill)


# -- refused early -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_target(monkeypatch):
    def load(*_):
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(setup, "load_target", load)


def damaged(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    path = next((to / "checkpoints").glob("step-*")) / "head.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    return to


def foreign(run: Path, to: Path) -> Path:
    """Another tool's export: no headtrain.json."""
    export_head(next((run / "checkpoints").glob("step-*")), "vllm", to)
    (to / "headtrain.json").unlink()
    return to


def changed(run: Path, to: Path) -> Path:
    export_head(next((run / "checkpoints").glob("step-*")), "vllm", to)
    config = json.loads((to / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (to / "config.json").write_text(json.dumps(config))
    return to


def empty(run: Path, to: Path) -> Path:
    to.mkdir()
    return to


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run, to: "someone/a-head-on-the-hub", "no folder 'someone/a-head-on-the-hub'.*download.*at random"),
        (lambda run, to: run / "nowhere", "no folder"),
        (empty, "no checkpoint under"),
        (damaged, "is damaged: head.safetensors has sha256"),
        (foreign, "no headtrain.json .*headtrain import"),
        (changed, "rms_norm_eps is 0.5, the training record gives"),
    ],
    ids=["hub id", "missing", "empty", "damaged", "foreign export", "changed export"],
)
def test_refused_before_the_target_is_loaded(base, run, backend, tmp_path, no_target, make, message):
    """CASES 40: never a random start."""
    recipe = again(base, run)
    recipe.train.warm_start = str(make(run, tmp_path / "other"))
    with pytest.raises(RecipeError, match=rf"train\.warm_start: .*{message}"):
        setup.prepare_run(recipe, backend, quiet())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"kind": "medusa"}, "is a 'eagle3' head, the recipe's 'medusa'"),
        ({"norm_output": True}, "computes something else.*head.norm_output: False when trained, True in the recipe"),
        ({"fc_norm": True}, "head.fc_norm: False when trained"),
    ],
)
def test_another_head_is_refused_before_the_target_is_loaded(base, run, backend, no_target, head, message):
    recipe = again(base, run)
    recipe.head = head if "kind" in head else {**recipe.head, **head}
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        setup.prepare_run(recipe, backend, quiet())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"draft_vocab_size": 25}, "vocabulary of 24, the recipe asks for 25.*train.warm_start_vocab=recipe"),
        ({"draft_vocab_size": None}, "vocabulary of 24, the recipe asks for all tokens"),
        ({"layers": [1, 2, 3]}, r"reads target layers \[2, 4, 5\], this recipe's head \[1, 2, 3\]"),
    ],
)
def test_refused_before_capture(base, run, backend, monkeypatch, head, message):
    monkeypatch.setattr(setup, "fill_stores", lambda *_, **__: pytest.fail("captured first"))
    with pytest.raises(RecipeError, match=message):
        setup.prepare_run(again(base, run, **head), backend, quiet())


def test_another_targets_head_and_vocabulary_are_refused(base, run, backend, tmp_path, monkeypatch):
    """Its ids are another tokenizer's: neither kept nor matched by number."""
    monkeypatch.setattr(setup, "fill_stores", lambda *_, **__: pytest.fail("captured first"))
    tiny.save(tmp_path / "wide", vocab_size=400)
    tiny.save(tmp_path / "tokens", template=None)
    tiny.tokenizer(vocab_size=300).save_pretrained(tmp_path / "tokens")
    for name, message in (("wide", "shape.vocab_size: 384 against 400"), ("tokens", "target tokenizer")):
        for mode in ("keep", "recipe"):
            recipe = again(base, run)
            recipe.target.path, recipe.train.warm_start_vocab = str(tmp_path / name), mode
            with pytest.raises(RecipeError, match=f"(?s)another target .its draft vocabulary.*{message}"):
                setup.prepare_run(recipe, backend, quiet())


def test_what_a_family_decides_is_compared_where_the_recipe_leaves_it_open(tmp_path):
    """A DeepSeek module that was trained with another recursion than its family's."""
    checkpoint_families.save(tmp_path / "t", "deepseek", tokenizer=tiny.tokenizer(), vocab_size=384)
    target = load_target(TargetSection(path=str(tmp_path / "t")))
    trained, open_one = (parse_head({"kind": "mtp-checkpoint", **more}) for more in ({"recycle": "normed"}, {}))
    head = build_head(trained, target.shape, None)
    warm = WarmStart(head, head_metadata(head, target.identity), tmp_path, keep=True)
    with pytest.raises(RecipeError, match="head.recycle: 'normed' when trained, 'raw' in the recipe"):
        check_warm_start(warm, open_one, target.shape, head.wants(), target.identity, quiet())
    check_warm_start(warm, trained, target.shape, head.wants(), target.identity, quiet())


def test_an_engines_export_gives_the_settings_on_record(tmp_path, tiny_folder):
    """An EAGLE-1 that drafts 3 deep: no engine's form says how deep."""
    target = load_target(TargetSection(path=str(tiny_folder)))
    head = build_head(parse_head({"kind": "eagle1", "depth": 3, "noise": 0.2}), target.shape, None)
    save_head(tmp_path / "c", head, head_metadata(head, target.identity))
    export_head(tmp_path / "c", "vllm", tmp_path / "export", dtype="float32")
    again, metadata, folder = read_trained(tmp_path / "export")
    assert again.config == head.config and metadata.head.depth == 1 and folder == tmp_path / "export"
    assert all(torch.equal(t, head.state_dict()[n]) for n, t in again.state_dict().items())


# -- started -------------------------------------------------------------------------------------------------------


def test_the_same_target_in_another_version_is_what_it_is_for(base, run, backend, tmp_path):
    tiny.save(tmp_path / "tuned", seed=5)
    recipe, said = again(base, run), Console(record=True, file=open("/dev/null", "w"), width=300)  # noqa: SIM115
    recipe.target.path, recipe.features.mode = str(tmp_path / "tuned"), "online"
    warm = setup.prepare_run(recipe, backend, said)
    assert "another version of the target: target weights." in said.export_text()
    trained, _ = load_head(next((run / "checkpoints").glob("step-*")))
    assert all(torch.equal(warm.head.state_dict()[n], t) for n, t in trained.state_dict().items())


def test_what_only_trains_may_change_and_an_export_starts_it_too(base, run, backend, tmp_path, no_forward):
    """Depth, decay and loss are the new run's; every tensor and the map are the old one's (CASES 18)."""
    saved = next((run / "checkpoints").glob("step-*"))
    trained, _ = load_head(saved)
    export_head(saved, "vllm", tmp_path / "export", dtype="float32")
    for path in (run, saved, tmp_path / "export"):
        recipe = again(base, run, depth=3, depth_decay=0.5, loss="reverse_kl")
        recipe.train.warm_start = str(path)
        head = setup.prepare_run(recipe, backend, quiet()).head
        assert head.wants().depth == 3 and head.config.loss == "reverse_kl"
        assert torch.equal(head.draft_ids, trained.draft_ids)
        assert all(torch.equal(head.state_dict()[n], t) for n, t in trained.state_dict().items())


@pytest.mark.parametrize("size", [8, 48, None])
def test_the_recipes_vocabulary_without_capturing_again(base, run, backend, tmp_path, no_forward, size):
    """Stored features serve any vocabulary. Rows of kept tokens are the trained ones, new ones the target's; and the
    run trains, and resumes, from there."""
    trained, _ = load_head(next((run / "checkpoints").glob("step-*")))
    recipe = again(base, run, draft_vocab_size=size)
    recipe.output, recipe.train.warm_start_vocab = str(tmp_path), "recipe"
    start = setup.prepare_run(recipe, backend, quiet())
    head = start.head
    assert head.draft_vocab_size == (size or 384)
    ids = list(range(384)) if size is None else head.draft_ids.tolist()
    old = {token: row for row, token in enumerate(trained.draft_ids.tolist())}
    assert set(ids) <= set(old) if size == 8 else set(old) <= set(ids)  # the same counts choose nested vocabularies
    target_rows = load_target(recipe.target).weights().lm_head
    for row, token in enumerate(ids):
        expected = trained.lm_head.weight[old[token]] if token in old else target_rows[token]
        assert torch.equal(head.lm_head.weight[row], expected)
    assert draft_rows(head) == ["lm_head.weight"]
    for name, tensor in trained.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(head.state_dict()[name], tensor)
    assert train(recipe, start, backend).step == 2
    assert train(recipe, setup.prepare_run(recipe, backend, quiet()), backend).step == 2


def test_the_key_counts_in_a_warm_start_alone(base, run):
    """A run without one resumes whatever the key says, and one from before the key existed, too."""
    trained, _ = load_head(next((run / "checkpoints").glob("step-*")))
    for recipe, there in ((base, False), (again(base, run), True)):
        origin = checkpoint.made_from(recipe, trained, "data", "fp32", {})
        assert ("train.warm_start_vocab" in origin) == there


# -- the verb ------------------------------------------------------------------------------------------------------


def command(*arguments: str):
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(arguments))


def test_the_verb_writes_a_head_that_trains_on(base, run, backend, tmp_path, no_forward, monkeypatch):
    saved = next((run / "checkpoints").glob("step-*"))
    trained, record = load_head(saved)
    got = command(str(run), "--size", "40", "--out", str(tmp_path / "grown"))
    assert got.exit_code == 0, got.output
    assert "40 tokens (was 24); 24 kept as trained, 16 start as in a fresh head, 0 left out" in got.output
    grown, metadata = load_head(tmp_path / "grown")
    rows = plan_rows(base, load_tokenizer(base.target))["train"].rows
    counts = count_tokens(rows, 384)
    assert f"cover {float(counts[grown.draft_ids].sum() / counts.sum()):.2%} of the supervised" in got.output
    expected = sorted(range(384), key=lambda i: (-int(counts[i]), i))[:40]
    assert grown.draft_ids.tolist() == sorted(expected)
    assert metadata.draft_vocab.size == 40 and metadata.training == record.training
    assert metadata.head.depth == record.head.depth == 1 and not metadata.acceptance

    monkeypatch.chdir(tmp_path)  # the recipe's output is under runs/
    onward = load_recipe(tmp_path / "grown/recipe.yaml")
    start = setup.prepare_run(onward, backend, quiet())
    assert all(torch.equal(start.head.state_dict()[n], t) for n, t in grown.state_dict().items())
    result = train(onward, start, backend)
    assert result.step == 2 and result.last.parts[:2] == ("runs", "tiny-vocab40")


def test_counting_elsewhere_leaves_the_recipes_rows(base, run, backend, tmp_path, no_forward, monkeypatch):
    """--data says which tokens are frequent; what is trained on, and stored, are the run's rows."""
    other = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "zebra zebra zebra zoo"}]}
    (tmp_path / "other.jsonl").write_text(json.dumps(other) + "\n")
    with pytest.warns(UserWarning, match="fewer than the draft vocabulary"):
        got = command(
            str(run), "--size", "40", "--out", str(tmp_path / "grown"), "--data", str(tmp_path / "other.jsonl")
        )
    assert got.exit_code == 0, got.output
    ids = set(load_head(tmp_path / "grown")[0].draft_ids.tolist())
    tokens = load_tokenizer(base.target)("zebra zebra zebra zoo", add_special_tokens=False)["input_ids"]
    assert set(tokens[1:]) <= ids
    onward = load_recipe(tmp_path / "grown/recipe.yaml")
    assert onward.data.train == base.data.train
    monkeypatch.chdir(tmp_path)
    setup.prepare_run(onward, backend, quiet())  # its stored features are there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "--size 0: expected 1 to 384"),
        (["--size", "385"], "--size 385: expected 1 to 384"),
        (["--size", "30", "--target", "OTHER"], "was trained on another target"),
        (["--size", "30", "--data", "/nowhere.jsonl"], "nowhere"),
    ],
)
def test_the_verb_refuses(run, tmp_path, arguments, message):
    if "OTHER" in arguments:
        arguments = [*arguments[:-1], str(tiny.save(tmp_path / "other", seed=9))]
    got = command(str(run), *arguments, "--out", str(tmp_path / "out"))
    assert got.exception is not None and message in str(got.exception)
    assert not (tmp_path / "out").exists()


def test_the_verb_overwrites_nothing_and_needs_the_rows(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("x")
    got = command(str(run), "--size", "30", "--out", str(tmp_path / "out"))
    assert isinstance(got.exception, RecipeError) and "is not empty" in str(got.exception)
    shutil.copytree(next((run / "checkpoints").glob("step-*")), tmp_path / "alone")
    got = command(str(tmp_path / "alone"), "--size", "30", "--out", str(tmp_path / "new"))
    assert isinstance(got.exception, RecipeError) and "it says how rows are read" in str(got.exception)
