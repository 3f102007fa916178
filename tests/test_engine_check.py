"""The arithmetic of scripts/engine_check.py; the engine itself is run by hand (it needs an environment of its own)."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headtrain.decode.generate import Generation, Round
from headtrain.evaluate.acceptance import Prompt

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("engine_check", ROOT / "scripts/engine_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decoded(accepted, first=10):
    rounds = [Round(3, a, a + 1, 3) for a in accepted]
    return Generation(list(range(first, first + 1 + sum(a + 1 for a in accepted))), rounds)


def test_rounds_that_begin_before_the_limit_count_whole(script):
    out = decoded([2, 0, 3, 1])  # texts of 1, 4, 5, 9, 11 tokens
    assert script.counts_of(out, 5, (), 3) == ([10, 11, 12, 13, 14], 2, [1, 1, 0])
    assert script.counts_of(out, 6, (), 3) == (list(range(10, 16)), 3, [2, 2, 1])  # 3 were accepted, 1 has room
    assert script.counts_of(out, 1, (), 3) == ([10], 0, [0, 0, 0])


def test_rounds_end_with_the_text(script):
    out = decoded([2, 0, 3, 1])
    assert script.counts_of(out, 9, (11,), 3) == ([10, 11], 1, [1, 1, 0])  # it ends inside the first round
    assert script.counts_of(out, 9, (13,), 3) == ([10, 11, 12, 13], 1, [1, 1, 0])
    assert script.counts_of(out, 9, (10,), 3) == ([10], 0, [0, 0, 0])
    assert script.counts_of(out, 3, (13,), 3) == ([10, 11, 12], 1, [1, 1, 0])  # an end beyond the limit


def answers(drafts, *accepted):
    return [{"tokens": [1, 2, 3], "drafts": drafts, "accepted": list(accepted)}]


def test_two_standard_errors(script):
    """100 rounds, 50 accepted: 0.05 each."""
    near, far = answers(100, 59), answers(100, 61)
    own = answers(100, 50)
    assert script.agreement(near, own, 1)[0]["agrees"] and not script.agreement(far, own, 1)[0]["agrees"]
    assert math.isclose(script.agreement(far, own, 1)[0]["errors_apart"], 0.11 / 0.05)
    assert script.agreement(answers(50, 0), answers(50, 0), 1)[0]["agrees"]  # no error of zero
    assert not script.agreement(answers(50, 20), answers(50, 0), 1)[0]["agrees"]
    assert not script.agreement(answers(0, 0), answers(50, 0), 1)[0]["agrees"]  # nothing was drafted
    assert not script.agreement([], [], 1)[0]["agrees"]


class FlatTarget:
    """Whose best two logits are ``gap`` apart."""

    device = torch.device("cpu")

    def __init__(self, gap):
        self.gap = gap

    def new_cache(self):
        return None

    def step(self, ids, cache):
        self.read = ids[0].tolist()
        return torch.tensor([[0.0, self.gap]]).repeat(ids.shape[1], 1), None, None


def test_texts_that_part_are_ties_or_faults(script):
    prompts = [Prompt([7, 8], "chat", "a"), Prompt([7, 8], "chat", "b")]
    plain, own = answers(4, 2) * 2, answers(4, 2) * 2
    parted = [answers(4, 2)[0], {"tokens": [1, 9, 3], "drafts": 4, "accepted": [4]}]
    for gap, passed in ((1e-5, True), (0.5, False), (math.nan, False)):
        target = FlatTarget(gap)
        result = script.judge(target, prompts, plain, parted, own, 1e-3, 1)
        assert result["passed"] is passed and len(result["faults"]) == (not passed)
        assert result["compared"] == 1 and result["positions"][0]["engine"] == [2, 4]
        assert [d["at"] for d in result["differences"]] == [1] and target.read == [7, 8, 1]
    result = script.judge(FlatTarget(0.5), prompts, plain, plain, parted, 1e-3, 1)
    assert result["faults"][0]["between"] == "engine and headtrain"
    shorter = [plain[0], {**plain[1], "tokens": [1, 2]}]
    assert script.judge(FlatTarget(0.5), prompts, plain, shorter, own, 1e-3, 1)["faults"][0]["at"] == 2
    assert script.judge(FlatTarget(0.5), prompts, plain, plain, own, 1e-3, 1)["passed"]


def test_the_table_names_both(script):
    prompts = [Prompt([7], "chat", "a")]
    result = script.judge(FlatTarget(1), prompts, answers(4, 2), answers(4, 2), answers(4, 2), 1e-3, 1)
    text = script.table({"x": result}, SimpleNamespace(k=1))
    assert "| x | 1 of 1 equal | 50.0% (2/4) against 50.0% (2/4) | 1.50 against 1.50 | agrees |" in text
