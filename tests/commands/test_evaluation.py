"""`headtrain eval` from the outside, on a tiny target with real heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from headtrain.capture import capture
from headtrain.cli import app, expected_errors
from headtrain.commands import common
from headtrain.commands.evaluation import LOCK
from headtrain.commands.serving import read_cases
from headtrain.config import Recipe, RecipeError, TargetSection, load_recipe
from headtrain.data import DataError
from headtrain.decode.draft_model import TokenizerMismatch
from headtrain.evaluate.sweep import Sweep
from headtrain.export.core import export_head
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata, save_head
from headtrain.target.load import load_target
from headtrain.train.lock import run_lock

WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "head"]


def chats(path: Path, count: int, answered: bool) -> str:
    lines = []
    for i in range(count):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % 12] for j in range(14)]
        messages = [{"role": "user", "content": " ".join(words[:3])}]
        if answered:
            messages.append({"role": "assistant", "content": " ".join(words[2:])})
        lines.append(json.dumps({"id": f"p{i}", "route": "ab"[i % 2], "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Two runs on one target, their recipes and stored rows; another target; a smaller draft model."""
    place = tmp_path_factory.mktemp("place")
    tiny.save(place / "target", initializer_range=0.2, num_hidden_layers=4, tie_word_embeddings=False)
    tiny.save(place / "other", seed=7, initializer_range=0.2, num_hidden_layers=4, tie_word_embeddings=False)
    tiny.save(place / "small", seed=3, num_hidden_layers=1)
    target = load_target(TargetSection(path=str(place / "target")))
    for name, config in {
        "eagle": {"kind": "eagle3", "depth": 3, "draft_vocab_size": 64},
        "medusa": {"kind": "medusa", "num_heads": 3},
    }.items():
        recipe = Recipe(
            name=name,
            target={"path": str(place / "target")},
            data={
                "train": [chats(place / "train.jsonl", 12, answered=True)],
                "eval": [chats(place / "eval.jsonl", 4, answered=True)],
                "max_length": 200,
            },
            features={"dtype": "float32"},
            head=config,
            eval={"prompts": [chats(place / "prompts.jsonl", 4, answered=False)], "k": 3, "max_new_tokens": 12},
            output=str(place / name),
        )
        torch.manual_seed(1)
        parsed = parse_head(config)
        ids = None if name == "medusa" else torch.arange(0, 384, 6)
        head = build_head(parsed, target.shape, ids)
        head.attach(target.weights())
        head.init_from_target(target.weights())
        save_head(place / name, head, head_metadata(head, target.identity))
        (place / name / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        capture(recipe)
    return place


def run(*arguments: object):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)


def test_the_recipes_settings_are_the_default(place):
    result = run(place / "eagle")
    sweep = Sweep.read(place / "eagle" / "eval" / "eval.json")
    (case,) = sweep.cases
    assert case.settings["k"] == 3 and case.settings["max_new_tokens"] == 12 and case.summary().identical == 4
    assert "α3" in result.output and (place / "eagle" / "eval" / "eval.html").is_file()
    report = CliRunner().invoke(app, ["report", str(place / "eagle")], catch_exceptions=False)
    assert "4/4" in report.output and str(place / "eagle" / "eval" / "eval.html") in report.output
    assert not (place / "eagle" / "eval" / "eval.unfinished").exists()


def test_everything_at_once(place, tmp_path):
    result = run(
        place / "medusa", "--k", "1,3", "--tree", "6", "--temperature", "0,0.7", "--drafter", "head", "--drafter",
        "ngram:longest=3,shortest=1", "--drafter", f"model:{place / 'small'}", "--drafter", place / "eagle",
        "--max-new-tokens", 9, "--out", tmp_path,
    )  # fmt: skip
    sweep = Sweep.read(tmp_path / "eval.json")
    assert len(sweep.cases) == 2 * 4 * 3
    greedy = [case for case in sweep.cases if case.settings["temperature"] == 0]
    assert all(case.summary().identical == 4 for case in greedy)
    shapes = {(c.drafter["kind"], c.settings["tree"]) for c in greedy}
    assert ("medusa", "") in shapes and any(k == "medusa" and "of 6 nodes" in t and "static" in t for k, t in shapes)
    assert any(k == "eagle3" and "dynamic tree of 6 nodes, depth 3" in t for k, t in shapes)
    assert any(k == "draft-model" and "dynamic" in t for k, t in shapes)
    assert any(k == "ngram" and "occurrences" in t for k, t in shapes)
    assert "ngram 3-1, chain of 3, T 0.7" in result.output and "tau by route" in result.output


def test_replay_says_what_decoding_says(place, tmp_path):
    run(place / "eagle", "--k", "1,2,3", "--mode", "replay", "--out", tmp_path / "a")
    run(place / "eagle", "--k", "1,2,3", "--out", tmp_path / "b")
    files = tmp_path / "a" / "eval-replay.json", tmp_path / "b" / "eval.json"
    replayed, decoded = (Sweep.read(file).cases for file in files)
    for a, b in zip(replayed, decoded, strict=True):
        assert a.settings["mode"] == "replay" and [r.rounds for r in a.results] == [r.rounds for r in b.results]


def test_stored_rows_need_no_decoding(place, tmp_path, monkeypatch):
    from headtrain.decode import generate as module

    monkeypatch.setattr(module, "_plain", None)
    result = run(place / "medusa", "--k", "1,3", "--mode", "stored", "--out", tmp_path)
    cases = Sweep.read(tmp_path / "eval-stored.json").cases
    assert [case.settings["k"] for case in cases] == [1, 3] and {len(case.results) for case in cases} == {4}
    assert cases[0].routes == ["a", "b"] and "(stored)" in result.output
    # an identity head of a random target is never far from right nor from wrong: the sums must at least fit the rows
    for case in cases:
        for r in case.results:
            assert 1 + sum(x.committed for x in r.rounds) == r.speculative.tokens
    run(place / "medusa", "--k", "1", "--mode", "stored", "--limit-per-route", 2, "--out", tmp_path)
    assert len(Sweep.read(tmp_path / "eval-stored.json").cases[0].results) == 2


def test_a_head_without_a_recipe_is_measured_on_the_rows_of_another(place, tmp_path):
    """As an imported head of a peer is: the same rows give the same figures as its own run's."""
    run(place / "eagle", "--k", "2", "--mode", "stored", "--out", tmp_path / "own")
    shutil.copytree(
        place / "eagle", tmp_path / "head", ignore=shutil.ignore_patterns("recipe.yaml", "eval*", "features")
    )
    words = ["eval", str(tmp_path / "head"), "--k", "2", "--mode", "stored", "--out", str(tmp_path / "given")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, RecipeError) and "give --features" in str(result.exception)
    words += ["--features", str(place / "eagle" / "features"), "--target", str(place / "target")]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    own, given = (Sweep.read(tmp_path / name / "eval-stored.json") for name in ("own", "given"))
    assert own.cases[0].results == given.cases[0].results and own.simulated == given.simulated


def test_stored_rows_of_another_target_are_refused(place, tmp_path):
    """Somebody captured another target's features to where the run's were."""
    shutil.copytree(place / "medusa", tmp_path / "run", ignore=shutil.ignore_patterns("eval.*"))
    recipe = tmp_path / "run" / "recipe.yaml"
    of = load_recipe(recipe, [f"features.dir={tmp_path / 'features'}"])
    recipe.write_text(yaml.safe_dump(of.model_dump(mode="json")))
    of.target.path = str(place / "other")
    capture(of)
    words = ["eval", str(tmp_path / "run"), "--k", "1", "--mode", "stored"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, RecipeError) and "holds another target's features" in str(result.exception)
    assert "target weights" in str(result.exception)


@pytest.mark.parametrize("decoded", ["first", "last", "never"])
def test_no_mode_overwrites_what_was_decoded(place, tmp_path, decoded):
    """Every file that a decoded evaluation wrote stays, byte by byte, and is what all readers take."""
    shutil.copytree(place / "eagle", tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    at, decode = tmp_path / "run" / "eval", ["--k", "1,2", "--max-new-tokens", 6]
    files, before = ("eval.json", "eval.html"), None
    if decoded == "first":
        run(tmp_path / "run", *decode)
        before = [(at / name).read_bytes() for name in files]
    run(tmp_path / "run", "--k", "3", "--mode", "replay", "--max-new-tokens", 6)
    run(tmp_path / "run", "--k", "1", "--mode", "stored")
    if decoded == "last":
        run(tmp_path / "run", *decode)
    assert before is None or before == [(at / name).read_bytes() for name in files]
    modes = {path.name: Sweep.read(path).cases[0].settings["mode"] for path in at.glob("*.json")}
    expected = {"eval.json": "decode", "eval-replay.json": "replay", "eval-stored.json": "stored"}
    assert modes == {name: mode for name, mode in expected.items() if decoded != "never" or mode != "decode"}
    believed = [3] if decoded == "never" else [1, 2]
    assert [case.settings["k"] for case in read_cases(tmp_path / "run")] == believed
    assert [case.settings["k"] for case in read_cases(at)] == believed
    assert [case.settings["k"] for case in read_cases(at / "eval-stored.json")] == [1]
    told = CliRunner().invoke(app, ["report", str(tmp_path / "run")], catch_exceptions=False).output
    assert all(str(at / name) in told for name in modes)
    words = ["export", str(tmp_path / "run"), "--engine", "vllm", "--out", str(tmp_path / "export"), "--no-probe"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    acceptance = json.loads((tmp_path / "export" / "headtrain.json").read_text())["acceptance"]
    assert acceptance["all"]["k"] == believed[-1]


def test_stored_rows_alone_are_no_measured_acceptance_of_an_export(place, tmp_path):
    shutil.copytree(place / "eagle", tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    run(tmp_path / "run", "--k", "1", "--mode", "stored")
    words = ["export", str(tmp_path / "run"), "--engine", "vllm", "--out", str(tmp_path / "export"), "--no-probe"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert not json.loads((tmp_path / "export" / "headtrain.json").read_text())["acceptance"]
    assert "Not measured yet" in (tmp_path / "export" / "README.md").read_text()


def test_replay_leaves_an_interrupted_decoding_its_journal(place, tmp_path, monkeypatch):
    (tmp_path / "eval.json").mkdir()
    with pytest.raises(OSError):
        run(place / "eagle", "--k", "1", "--max-new-tokens", 4, "--out", tmp_path)
    (tmp_path / "eval.json").rmdir()
    kept = (tmp_path / "eval.unfinished").read_bytes()
    run(place / "eagle", "--k", "2", "--mode", "replay", "--max-new-tokens", 4, "--out", tmp_path)
    assert (tmp_path / "eval.unfinished").read_bytes() == kept and kept.count(b"\n") == 1 + 4
    assert not (tmp_path / "eval-replay.unfinished").exists()


def test_stored_rows_say_what_training_said_of_them(place, tmp_path):
    """The held-out tau that training prints comes back, to the last digit that it prints, under the same name."""
    from headtrain.train.backend import Backend
    from headtrain.train.setup import prepare_run
    from headtrain.train.trainer import summary, train

    recipe = load_recipe(place / "eagle" / "recipe.yaml")
    recipe.output, recipe.features.dir = str(tmp_path / "run"), str(place / "eagle" / "features")
    recipe.train.steps = recipe.train.eval_every = recipe.train.save_every = 2
    recipe.train.batch_tokens, recipe.train.precision = 64, "fp32"
    backend = Backend("fp32", [], recipe.output_dir)
    printed = summary(train(recipe, prepare_run(recipe, backend, Console(quiet=True)), backend).evaluation)
    result = run(tmp_path / "run", "--mode", "stored", "--k", "3")
    of = Sweep.read(tmp_path / "run" / "eval" / "eval-stored.json").simulated
    assert f"simulated tau {of.tau:.3f}" in printed and f"simulated tau {of.tau:.3f}" in result.output
    assert of.own < 0.5 and f"at {of.own:.1%} of its tokens; elsewhere a draft" in result.output
    again = CliRunner().invoke(app, ["report", str(tmp_path / "run")], catch_exceptions=False).output
    assert f"simulated tau {of.tau:.3f}" in again


@pytest.mark.parametrize("mode", ["decode", "replay"])
def test_a_prompt_longer_than_the_context_is_left_out_and_named(place, tmp_path, mode):
    """The others are evaluated as they would be without it, their sampling included."""
    asked = [json.loads(line) for line in (place / "prompts.jsonl").read_text().splitlines()]
    long = {"id": "longest", "route": "a", "messages": [{"role": "user", "content": "word " * 600}]}
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*asked, long]))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    told = {}
    for name in "pq":
        result = run(place / "eagle", "--mode", mode, "--prompts", tmp_path / f"{name}.jsonl", "--out", tmp_path / name)
        told[name] = result.output
    name = {"decode": "eval", "replay": "eval-replay"}[mode]
    p, q = (Sweep.read(tmp_path / folder / f"{name}.json") for folder in "pq")
    assert [r.rounds for r in p.cases[0].results] == [r.rounds for r in q.cases[0].results] != []
    (skipped,) = p.skipped
    assert skipped.startswith("longest (") and q.skipped == []
    assert f"1 prompts left out, longer than the target's context, which no server takes: {skipped}" in told["p"]
    assert "left out" not in told["q"]
    assert "longest" in (tmp_path / "p" / f"{name}.html").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval"], ["export", "--out", "{to}"], ["vocab", "--size", "10", "--out", "{to}"], ["stitch", "--out", "{to}"],
        ["report"], ["check", "--target", "{target}"], ["push", "a/b"],
        ["import", "--target", "{target}", "--out", "{to}"],
    ],
    ids=lambda a: a[0],
)  # fmt: skip
@pytest.mark.parametrize("there", ["nothing", "a file", "an empty folder"])
def test_a_run_that_is_not_there_is_called_so(place, tmp_path, arguments, there):
    """One line that names the path, and no advice to train what was mistyped."""
    path = tmp_path / "mistyped"
    if there == "a file":
        path.write_text("x")
    elif there == "an empty folder":
        path.mkdir()
    verb, *more = [a.format(to=tmp_path / "to", target=place / "target") for a in arguments]
    result = CliRunner().invoke(app, [verb, str(path), *more])
    said = str(result.exception)
    assert isinstance(result.exception, expected_errors()) and str(path) in said
    assert "Traceback" not in result.output and "Errno" not in said
    assert there == "an empty folder" or "checkpoints" not in said
    assert not (tmp_path / "to").exists()


def test_what_is_measured_is_safe_before_the_journal_goes(place, tmp_path):
    (tmp_path / "eval.json").mkdir()
    with pytest.raises(OSError):
        run(place / "eagle", "--k", "1", "--max-new-tokens", 4, "--out", tmp_path)
    assert len((tmp_path / "eval.unfinished").read_text().splitlines()) == 1 + 4
    (tmp_path / "eval.json").rmdir()
    run(place / "eagle", "--k", "1", "--max-new-tokens", 4, "--out", tmp_path)
    assert not (tmp_path / "eval.unfinished").exists() and not (tmp_path / "eval.lock").exists()


def test_a_converted_target_is_called_by_its_folder_and_its_source(place, tmp_path):
    shutil.copytree(place / "target", tmp_path / "copy")
    source = {"name": "package:some-model", "revision": None, "quantization": "gguf Q4_1", "dtype": "float32"}
    (tmp_path / "copy" / "headtrain_source.json").write_text(json.dumps(source))
    words = ["--prompts", place / "prompts.jsonl", "--drafter", "ngram", "--k", "1,2", "--max-new-tokens", 3]
    told = run("--target", tmp_path / "copy", *words, "--out", tmp_path / "a").output
    assert f"{tmp_path / 'copy'} (converted from package:some-model, float32)" in " ".join(told.split())
    told = run("--target", place / "target", *words, "--out", tmp_path / "b").output
    assert f"{place / 'target'} (float32)" in " ".join(told.split())


def test_what_is_piped_is_not_cut(place, tmp_path, monkeypatch):
    routes = [f"translation of the {word} kind" for word in WORDS[:6]]
    rows = [{"route": r, "messages": [{"role": "user", "content": "fox"}]} for r in routes]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--prompts", tmp_path / "p.jsonl", "--k", "1,2", "--max-new-tokens", 3, "--out", tmp_path]
    header = next(line for line in run(place / "eagle", *words).output.splitlines() if "translation" in line)
    assert all(route in header for route in routes)
    assert common._console().width == common.WIDE
    monkeypatch.setenv("COLUMNS", "70")
    assert common._console().width == 70


def test_one_evaluation_in_a_folder_at_a_time(place, tmp_path):
    said = pytest.raises(RecipeError, match="is in use: process [0-9]+ on .* evaluates in it")
    with run_lock(tmp_path, Console(quiet=True), LOCK, "evaluates"), said:
        run(place / "eagle", "--k", "1", "--max-new-tokens", 4, "--out", tmp_path)


def test_a_route_called_like_the_total_is_not_the_total(place, tmp_path):
    asked = [{"role": "user", "content": "fox"}]
    rows = [{"id": r, "route": r, "messages": asked} for r in ("all", "b", "\ud800[/x]")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    short = ["--k", "1", "--max-new-tokens", 4]
    result = run(place / "eagle", *short, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path)
    case = Sweep.read(tmp_path / "eval.json").cases[0]
    assert case.routes == ["all (route)", "b", "?[/x]"] and case.summary().prompts == 3
    assert "[/x]" in result.output


def test_an_export_keeps_the_depth_it_was_trained_to(place, tmp_path):
    target = load_target(TargetSection(path=str(place / "target")))
    export_head(place / "eagle", "vllm", tmp_path / "vllm", weights=target.weights())
    run(tmp_path / "vllm", "--target", place / "target", "--prompts", place / "prompts.jsonl", "--max-new-tokens", 6,
        "--k", "0", "--tree", 6, "--out", tmp_path / "a")  # fmt: skip
    assert Sweep.read(tmp_path / "a" / "eval.json").cases[0].settings["k"] == 3
    report = CliRunner().invoke(app, ["report", str(tmp_path / "vllm")])
    assert isinstance(report.exception, RecipeError)
    run(tmp_path / "vllm", "--target", place / "target", "--prompts", place / "prompts.jsonl", "--max-new-tokens", 6)
    report = CliRunner().invoke(app, ["report", str(tmp_path / "vllm")], catch_exceptions=False)
    assert report.exit_code == 0 and str(tmp_path / "vllm-eval" / "eval.json") in report.output
    assert not list((tmp_path / "vllm").glob("eval*"))  # an export is served and pushed as it is


def test_a_draft_model_with_the_targets_context_is_replayed_to_its_end(place, tmp_path):
    tiny.save(tmp_path / "short", initializer_range=0.2, num_hidden_layers=2, max_position_embeddings=64)
    run("--target", tmp_path / "short", "--drafter", f"model:{tmp_path / 'short'}", "--k", 2, "--max-new-tokens", 200,
        "--prompts", place / "prompts.jsonl", "--mode", "replay", "--out", tmp_path)  # fmt: skip
    results = Sweep.read(tmp_path / "eval-replay.json").cases[0].results
    assert any(r.plain.stop == "context" for r in results)


def test_an_engines_form_is_evaluated_as_the_head_it_holds(place, tmp_path):
    target = load_target(TargetSection(path=str(place / "target")))
    export_head(place / "eagle", "vllm", tmp_path / "vllm", weights=target.weights())
    prompts = ["--prompts", place / "prompts.jsonl", "--max-new-tokens", 12, "--k", 3]
    run(tmp_path / "vllm", "--target", place / "target", *prompts, "--out", tmp_path / "a")
    run(place / "eagle", *prompts, "--out", tmp_path / "b")
    a, b = (Sweep.read(tmp_path / name / "eval.json").cases[0] for name in "ab")
    assert [r.rounds for r in a.results] == [r.rounds for r in b.results]


def test_baselines_alone(place, tmp_path):
    run("--target", place / "target", "--prompts", place / "prompts.jsonl", "--drafter", "prompt-lookup",
        "--max-new-tokens", 8, "--out", tmp_path)  # fmt: skip
    (case,) = Sweep.read(tmp_path / "eval.json").cases
    assert case.drafter["family"] == "lookup" and case.settings["k"] == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["{eagle}", "--target", "{other}"], RecipeError, "trained on another target"),
        (["{eagle}", "--drafter", "model:{words}"], TokenizerMismatch, "ids differ"),
        (["{eagle}", "--prompts", "{empty}"], DataError, "empty"),
        (["{eagle}", "--prompts", "{long}"], RecipeError, "every prompt is longer than the target's context of 512"),
        (["{eagle}", "--tree", "512"], RecipeError, "need 513 positions, the target's context has 512"),
        (["{medusa}", "--k", "4"], RecipeError, "drafts at most 3"),
        (["{eagle}", "--k", "0"], RecipeError, "nothing to draft"),
        (["{eagle}", "--k", "1,x"], RecipeError, "--k 1,x: expected numbers of at least 1"),
        (["{eagle}", "--temperature", "-1"], RecipeError, "at least 0"),
        (["{eagle}", "--mode", "stored", "--drafter", "ngram"], RecipeError, "does not use --drafter"),
        (["{eagle}", "--mode", "stored", "--temperature", "0.5", "--tree", "4"], RecipeError, "--tree, --temperature"),
        (["{eagle}", "--server", "http://127.0.0.1:9"], RecipeError, "--server does not use RUN"),
        (["--server", "http://127.0.0.1:9", "--k", "3", "--prompts", "{prompts}"], RecipeError, "does not use --k"),
        (["{eagle}", "--k", "600"], RecipeError, "does not fit the target's context of 512"),
        (["{medusa}", "--k", "0", "--tree", "100000"], RecipeError, "100000 nodes asked for"),
        (["{eagle}", "--drafter", "ngram:longest=1"], RecipeError, "expected 1 <= shortest"),
        (["{eagle}", "--drafter", "ngram:longest=²"], RecipeError, "expected longest=NUMBER"),
        (["{eagle}", "--temperature", "inf"], RecipeError, "--temperature inf"),
        (["{eagle}/nothere"], RecipeError, "no run, checkpoint or export at"),
        (["{eagle}", "--mode", "guess"], RecipeError, "expected decode, replay or stored"),
        (["{eagle}", "--mode", "replay", "--tree", "4", "--temperature", "x"], RecipeError, "--temperature x"),
        (["{eagle}", "--drafter", "ngram:length=3"], RecipeError, "expected longest=NUMBER, shortest=NUMBER"),
        (["{eagle}", "--drafter", "nothere"], RecipeError, "no such folder"),
        (["{eagle}", "--drafter", "model:"], RecipeError, "which model"),
        (["--target", "{target}", "--prompts", "{prompts}"], RecipeError, "nothing to evaluate"),
        (["--target", "{target}", "--prompts", "{prompts}", "--drafter", "head"], RecipeError, "give the RUN"),
        (["--target", "{target}", "--drafter", "ngram"], RecipeError, "no prompts"),
        (["--target", "{target}", "--mode", "stored"], RecipeError, "give the RUN"),
        (["{eagle}", "--features", "{prompts}"], RecipeError, "read by --mode stored alone, not by decode"),
        (["{eagle}", "--mode", "stored", "--features", "{prompts}"], RecipeError, "no stored features at"),
    ],
)
def test_what_cannot_be_evaluated_says_why(place, tmp_path, arguments, error, message, monkeypatch):
    """Before anything is decoded."""
    from headtrain.decode import generate as module

    monkeypatch.setattr(module, "_plain", None)
    (tmp_path / "empty.jsonl").write_text("")
    long = {"messages": [{"role": "user", "content": "word " * 600}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(long) + "\n")
    words = tiny.save(tmp_path / "words", num_hidden_layers=1)
    tokenizer = tiny.tokenizer(vocab_size=300)
    tokenizer.save_pretrained(words)
    names = {name: place / name for name in ("eagle", "medusa", "other", "target")}
    names |= {"prompts": place / "prompts.jsonl", "words": words}
    names |= {name: tmp_path / f"{name}.jsonl" for name in ("empty", "long")}
    with pytest.raises(error, match=message):
        run(*(a.format(**names) for a in arguments), "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "eval.json").exists()


def test_a_malformed_prompt_file_gets_no_advice_that_the_command_does_not_have(place, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{broken}\n")
    bad, to = str(tmp_path / "bad.jsonl"), ["--out", str(tmp_path / "out")]
    for words in (
        ["eval", str(place / "eagle"), "--prompts", bad, *to],
        ["eval", "--server", "http://127.0.0.1:9", "--prompts", bad, *to],
        ["regenerate", "no-target", bad, *to],
    ):
        with pytest.raises(DataError, match="bad.jsonl:1: not valid JSON.*take it out$"):
            CliRunner().invoke(app, words, catch_exceptions=False)
    recipe = str(place / "eagle" / "recipe.yaml")
    with pytest.raises(DataError, match="bad.jsonl:1: not valid JSON.*set data.bad_lines=skip"):
        CliRunner().invoke(app, ["inspect", recipe, f"data.train=[{bad}]"], catch_exceptions=False)


def test_the_usual_order_begins_with_the_target():
    verbs = [
        line.split()[1] for line in CliRunner().invoke(app, ["--help"]).output.splitlines() if "headtrain " in line
    ]
    assert verbs[:3] == ["convert", "inspect", "train"]


def test_every_option_of_every_verb_says_what_it_is():
    import typer

    verbs = typer.main.get_command(app).commands
    silent = {name: [p.name for p in verb.params if not p.help] for name, verb in verbs.items()}
    assert not {name: options for name, options in silent.items() if options}
    assert all(verb.help for verb in verbs.values())
