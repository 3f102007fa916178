"""The measurement itself, on a tiny target with a real head; prompts from files."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from headtrain.config import TargetSection
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Generation, generate
from headtrain.evaluate.acceptance import Prompt, evaluate, first_difference, load_prompts
from headtrain.evaluate.results import Difference, Evaluation
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata
from headtrain.target.load import load_target
from headtrain.types import Proposal


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    lively = {"tie_word_embeddings": False, "num_hidden_layers": 4, "initializer_range": 0.2}
    return load_target(TargetSection(path=str(tiny.save(tmp_path_factory.mktemp("lively"), **lively))))


PROMPTS = [Prompt([5, 9, 200 + n, 17], route, f"{route}-{n}") for n, route in enumerate(["a", "b", "a"])]


def test_evaluate_records_what_generate_does(target, capsys):
    head = build_head(parse_head({"kind": "eagle3", "draft_vocab_size": None, "depth": 3}), target.shape, None)
    measured = evaluate(target, head, PROMPTS, k=3, max_new_tokens=16, eos_ids=())
    assert [r.id for r in measured.results] == ["a-0", "b-1", "a-2"]
    for prompt, r in zip(PROMPTS, measured.results, strict=True):
        alone = generate(
            target, prompt.ids, drafter=HeadDrafter(head), k=3, max_new_tokens=16, temperature=0.0, eos_ids=()
        )
        assert r.rounds == alone.rounds and r.speculative.tokens == r.plain.tokens == 16
        assert r.plain.draft == 0 < r.plain.verify and min(r.speculative.draft, r.speculative.verify) > 0
        assert r.difference is None
    summary = measured.summary()
    assert summary.identical == 3 and summary.tau >= 1 and summary.speedup > 0
    assert measured.target["name"] == target.identity.name and measured.target["weights"] == target.identity.weights
    assert measured.drafter["kind"] == "eagle3" and len(measured.drafter["config_sha256"]) == 64
    assert measured.settings["seed"] == 0 and measured.versions["torch"] == torch.__version__
    assert Evaluation.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    metadata = head_metadata(head, target.identity, acceptance=measured.acceptance())
    assert metadata.acceptance["all"].alpha == summary.alpha
    printed = capsys.readouterr()
    assert printed.out == "" and "decoded 3/3 prompts" in printed.err


def test_sampling_is_repeatable_and_claims_no_equality(target):
    head = build_head(parse_head({"kind": "medusa", "num_heads": 2}), target.shape, None)
    runs = [
        evaluate(target, head, PROMPTS[:2], k=2, max_new_tokens=8, temperature=0.8, top_p=0.9, seed=4, quiet=True)
        for _ in range(2)
    ]
    assert [r.rounds for r in runs[0].results] == [r.rounds for r in runs[1].results]
    assert runs[0].summary().identical is None


class Threes:
    """Drafts token 3, whatever the text."""

    layers, max_k, tree = (), None, ""

    def check(self, k, context): ...

    def describe(self):
        return {"kind": "threes", "family": "fake", "label": "threes", "parameters": 0}

    def start(self, prompt, max_length): ...

    def draft(self, next_tokens, layers, final, k, sampling):
        return Proposal(torch.full((k,), 3))


def test_a_lossy_decoder_is_found_out(target, monkeypatch):
    """With a verification that accepts all, the texts part at the first token after an unverified one."""
    from headtrain.decode import generate as module

    settings = dict(k=2, max_new_tokens=9, eos_ids=(), quiet=True)
    honest = evaluate(target, Threes(), PROMPTS[:1], **settings)
    assert honest.drafter["kind"] == "threes" and honest.summary().identical == 1 and not honest.differences
    monkeypatch.setattr(module, "verify_greedy", lambda proposal, choices: list(range(proposal.tokens.numel())))
    lossy = evaluate(target, Threes(), PROMPTS[:1], **settings)
    assert lossy.summary().identical == 0
    difference = lossy.differences[0].difference
    assert difference.position == 2 and difference.plain != difference.speculative and difference.gap > 1e-3


def test_first_difference():
    def text(tokens, gaps):
        return Generation(tokens=tokens, gaps=gaps)

    one = text([1, 2, 3], [0.5, 0.25, 2.0])
    assert first_difference(one, text([1, 2, 3], [9, 9, 9])) is None
    assert first_difference(one, text([1, 7, 8], [9.0, 0.125, 9.0])) == Difference(1, 2, 7, 0.125)
    assert first_difference(one, text([1, 2], [9.0, 9.0])) == Difference(2, 3, None, 2.0)


@pytest.mark.parametrize(
    ("prompts", "k", "message"),
    [
        ([], 1, "no prompts"),
        ([Prompt([1] * 600, "x", "too-long")], 1, "512 tokens: too-long .600."),
        (PROMPTS, 3, "at most 2"),
    ],
)
def test_errors(target, prompts, k, message):
    head = build_head(parse_head({"kind": "medusa", "num_heads": 2}), target.shape, None)
    with pytest.raises(ValueError, match=message):
        evaluate(target, head, prompts, k=k, quiet=True)


def test_prompts_are_rendered_as_served(tmp_path):
    rows = [
        {"id": "a1", "route": "a", "messages": [{"role": "user", "content": "Hello"}]},
        {
            "id": "a2",
            "route": "a",
            "messages": [{"role": "user", "content": "0 1"}, {"role": "assistant", "content": "2"}],
        },
        {"id": "b1", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "You"}]},
        {"id": "a3", "route": "a", "messages": [{"role": "user", "content": "left out"}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny.tokenizer()
    prompts = load_prompts(tokenizer, [str(file)], limit_per_route=2)
    assert [(p.id, p.route) for p in prompts] == [("a1", "a"), ("a2", "a"), ("b1", "other")]
    for prompt, row in zip(prompts, rows, strict=False):
        asked = [m for m in row["messages"] if m["role"] != "assistant"]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt.ids) == text
