"""`headtrain export` as a user types it: how many tokens the launch command drafts, and why."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from headtrain.cli import app
from headtrain.config import TargetSection
from headtrain.decode.generate import Round
from headtrain.evaluate.results import Evaluation, PromptResult, Side
from headtrain.evaluate.sweep import Sweep
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import fingerprint, head_metadata, load_head, save_head
from headtrain.target.load import load_target


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    tiny.save(place / "target", num_hidden_layers=8, tie_word_embeddings=False)
    target = load_target(TargetSection(path=str(place / "target")))
    config = {"kind": "eagle3", "depth": 3, "draft_vocab_size": 64}
    head = build_head(parse_head(config), target.shape, torch.arange(0, 384, 6))
    head.attach(target.weights())
    head.init_from_target(target.weights())
    save_head(place / "run", head, head_metadata(head, target.identity))
    return place / "run"


def evaluation(run: Path, weights: str, alphas: tuple[float, ...], c: float, tree: str = "") -> None:
    """A chain timed on eight prompts, k drafts of cost ``c`` plain steps each and a verification of one."""
    rng, results, k = random.Random(1), [], len(alphas)
    for n in range(8):
        accepted = [next((j for j, a in enumerate(alphas) if rng.random() > a), k) for _ in range(40)]
        tokens = 1 + sum(a + 1 for a in accepted)
        plain = Side(tokens, "length", 0.0, 0.0, 0.01 * (tokens - 1), 0.0)
        spent = Side(tokens, "length", 0.0, 0.01 * 40 * k * c, 0.01 * 40, 0.0)
        results.append(PromptResult(f"p{n}", "code", 4, plain, spent, [Round(k, a, a + 1, k) for a in accepted]))
    drafter = {"kind": "eagle3", "family": "head", "label": "the head", "parameters": 10, "weights": weights}
    settings = {"k": k, "temperature": 0.0, "mode": "decode", "tree": tree, "max_new_tokens": 9}
    target = {"name": "t", "dtype": "float32", "parameters": 100}
    (run / "eval").mkdir(exist_ok=True)
    file = run / "eval" / "eval.json"
    cases = Sweep.read(file).cases if file.is_file() else []
    Sweep(target, {}, [*cases, Evaluation(target, drafter, settings, {}, results)]).write(file)


def exported(run: Path, to: Path, engine: str = "vllm") -> str:
    words = ["export", str(run), "--engine", engine, "--out", str(to), "--no-probe"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("engine", ["vllm", "sglang", "headtrain"])
def test_the_launch_command_drafts_what_was_measured_best(run, tmp_path, engine):
    (run / "eval" / "eval.json").unlink(missing_ok=True)
    tokens = {"vllm": '"num_speculative_tokens": {}', "sglang": "--speculative-num-steps {}", "headtrain": "--k {}"}
    text = exported(run, tmp_path / "a", engine)
    assert tokens[engine].format(3) in text and "drafted tokens: 3, the default, not measured" in text
    assert "Drafted tokens: 3, the default, not measured" in (tmp_path / "a" / "README.md").read_text()

    head = fingerprint(load_head(run)[0])
    for k in (1, 2, 5):
        evaluation(run, head, (0.8, 0.7, 0.1, 0.1, 0.1)[:k], 0.05)
    evaluation(run, head, (0.9,) * 4, 0.0, tree="a tree")  # a launch command names a chain
    text, card = exported(run, tmp_path / "b", engine), (tmp_path / "b" / "README.md").read_text()
    assert tokens[engine].format(2) in text and tokens[engine].format(2) in card
    said = "2, the best of those measured ("
    assert f"drafted tokens: {said}" in text and f"Drafted tokens: {said}" in card and "timed at batch 1" in card


def test_a_default_that_stands_in_says_why(run, tmp_path):
    head = fingerprint(load_head(run)[0])
    for weights, alphas, c, said in (
        ("f" * 64, (0.8, 0.7), 0.05, "drafted tokens: 3, the default: the evaluation measured no chain of this head"),
        (head, (0.1, 0.1), 0.4, "drafted tokens: 2, the fastest of those measured, but no gain is sure (0.6"),
        (head, (0.0, 0.0), 0.0, "drafted tokens: 2, the fastest of those measured, but no gain is sure (1.00x"),
    ):
        (run / "eval" / "eval.json").unlink(missing_ok=True)
        evaluation(run, weights, alphas, c)
        with pytest.warns() if weights != head else nullcontext():
            assert said in exported(run, tmp_path / f"{weights[0]}{alphas[0]}{c}")
    (run / "eval" / "eval.json").unlink()
