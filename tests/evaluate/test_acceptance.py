"""The measurement itself, on a tiny target with a real head; prompts from files."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from headtrain.config import TargetSection
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Generation, generate
from headtrain.decode.lookup import LookupDrafter
from headtrain.decode.tree import DynamicTree
from headtrain.evaluate.acceptance import Case, Prompt, Settings, first_difference, load_prompts, measure
from headtrain.evaluate.results import Difference
from headtrain.evaluate.sweep import Sweep
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata
from headtrain.target.load import load_target
from headtrain.types import Proposal


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    lively = {"tie_word_embeddings": False, "num_hidden_layers": 4, "initializer_range": 0.2}
    return load_target(TargetSection(path=str(tiny.save(tmp_path_factory.mktemp("lively"), **lively))))


PROMPTS = [Prompt([5, 9, 200 + n, 17], route, f"{route}-{n}") for n, route in enumerate(["a", "b", "a"])]


def head_drafter(target, plan=None, **config) -> HeadDrafter:
    head = build_head(parse_head(config), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    return HeadDrafter(head, plan)


def test_the_sweep_records_what_generate_does(target, capsys):
    drafter = head_drafter(target, kind="eagle3", draft_vocab_size=None, depth=3)
    tree = head_drafter(target, DynamicTree(8, 3, 3), kind="eagle3", draft_vocab_size=None, depth=3)
    cases = [Case(drafter, 3), Case(tree, 3), Case(drafter, 2, temperature=0.7)]
    settings = Settings(max_new_tokens=16, eos_ids=())
    sweep = measure(target, cases, PROMPTS, settings)
    for case, measured in zip(cases, sweep.cases, strict=True):
        assert [r.id for r in measured.results] == ["a-0", "b-1", "a-2"]
        for number, (prompt, r) in enumerate(zip(PROMPTS, measured.results, strict=True)):
            alone = generate(
                target, prompt.ids, drafter=case.drafter, k=case.k, max_new_tokens=16,
                temperature=case.temperature, eos_ids=(), seed=number,
            )  # fmt: skip
            assert r.rounds == alone.rounds and r.speculative.tokens == r.plain.tokens == 16
            assert r.plain.draft == 0 < r.plain.verify and min(r.speculative.draft, r.speculative.verify) > 0
            assert r.difference is None
    first, bushy, warm = (case.summary() for case in sweep.cases)
    assert first.identical == bushy.identical == 3 and warm.identical is None
    assert first.tau >= 1 and first.speedup > 0 and bushy.nodes > 3 > first.nodes - 1 and bushy.tau >= first.tau
    assert min(first.plain_step, first.draft_step, first.verify_step) > 0
    assert sweep.target["name"] == target.identity.name and sweep.target["weights"] == target.identity.weights
    measured = sweep.cases[0]
    assert measured.drafter["kind"] == "eagle3" and measured.drafter["config"]["depth"] == 3
    assert measured.settings["seed"] == 0 and measured.versions["torch"] == torch.__version__
    assert Sweep.from_dict(json.loads(json.dumps(sweep.to_dict()))).cases[1] == sweep.cases[1]
    assert sweep.headline is measured
    metadata = head_metadata(drafter.head, target.identity, acceptance=measured.acceptance())
    assert metadata.acceptance["all"].alpha == first.alpha
    printed = capsys.readouterr()
    assert printed.out == "" and "decoding: 3/3" in printed.err


def test_sampling_is_repeatable(target):
    cases = [Case(head_drafter(target, kind="medusa", num_heads=2), 2, temperature=0.8)]
    settings = Settings(max_new_tokens=8, top_p=0.9, seed=4)
    runs = [measure(target, cases, PROMPTS[:2], settings, quiet=True).cases[0] for _ in range(2)]
    assert [r.rounds for r in runs[0].results] == [r.rounds for r in runs[1].results]


def test_an_interrupted_measurement_goes_on(target, tmp_path, monkeypatch):
    """The finished prompts are kept, a cut line is not; another measurement does not take them for its own."""
    from headtrain.evaluate import acceptance as module

    cases = [Case(head_drafter(target, kind="medusa", num_heads=2), 2), Case(LookupDrafter(), 2, replay=True)]
    settings, journal = Settings(max_new_tokens=8), tmp_path / "journal"
    prompt_of = module._Measurement.prompt

    def stop_at(last):
        def prompt(self, number, prompt):
            asked.append(number)
            if number == last:
                raise KeyboardInterrupt
            return prompt_of(self, number, prompt)

        return prompt

    asked: list[int] = []
    monkeypatch.setattr(module._Measurement, "prompt", stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        measure(target, cases, PROMPTS, settings, journal=journal, quiet=True)
    journal.write_text(journal.read_text() + '[{"id": "cut')
    asked.clear()
    monkeypatch.setattr(module._Measurement, "prompt", stop_at(None))
    again = measure(target, cases, PROMPTS, settings, journal=journal, quiet=True)
    assert asked == [2]
    asked.clear()
    measure(target, cases, PROMPTS, settings, journal=journal, quiet=True)  # all of it is there
    assert asked == [] and journal.exists()
    journal.unlink()
    fresh = measure(target, cases, PROMPTS, settings, quiet=True)
    for a, b in zip(again.cases, fresh.cases, strict=True):
        assert [r.rounds for r in a.results] == [r.rounds for r in b.results]
    monkeypatch.setattr(module._Measurement, "prompt", stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        measure(target, cases, PROMPTS, settings, journal=journal, quiet=True)
    asked.clear()
    monkeypatch.setattr(module._Measurement, "prompt", stop_at(None))
    measure(target, cases, PROMPTS, Settings(max_new_tokens=7), journal=journal, quiet=True)
    assert asked == [0, 1, 2]
    asked.clear()
    with torch.no_grad():  # trained on in between: another head
        next(cases[0].drafter.head.parameters()).add_(0.01)
    other = [Case(HeadDrafter(cases[0].drafter.head), 2), cases[1]]
    measure(target, other, PROMPTS, Settings(max_new_tokens=7), journal=journal, quiet=True)
    assert asked == [0, 1, 2]
    journal.write_bytes(b"\xff\xfe garbage\n")
    asked.clear()
    measure(target, other, PROMPTS, Settings(max_new_tokens=7), journal=journal, quiet=True)
    assert asked == [0, 1, 2]


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

    settings = Settings(max_new_tokens=9, eos_ids=())
    honest = measure(target, [Case(Threes(), 2)], PROMPTS[:1], settings, quiet=True).cases[0]
    assert honest.drafter["kind"] == "threes" and honest.summary().identical == 1 and not honest.differences
    monkeypatch.setattr(module, "verify_greedy", lambda proposal, choices: list(range(proposal.tokens.numel())))
    lossy = measure(target, [Case(Threes(), 2)], PROMPTS[:1], settings, quiet=True).cases[0]
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
        (PROMPTS, 512, "does not fit the target's context of 512|at most 2"),
        ([Prompt([1] * 600, "x", "too-long")], 1, "512 tokens: too-long .600."),
        (PROMPTS, 3, "at most 2"),
    ],
)
def test_errors(target, prompts, k, message):
    drafter = head_drafter(target, kind="medusa", num_heads=2)
    with pytest.raises(ValueError, match=message):
        measure(target, [Case(drafter, k)], prompts, quiet=True)


def test_replay_refuses_what_it_cannot_answer(target):
    for case in (
        Case(head_drafter(target, DynamicTree(4, 2, 2), kind="medusa", num_heads=2), 2, replay=True),
        Case(head_drafter(target, kind="medusa", num_heads=2), 2, temperature=0.5, replay=True),
    ):
        with pytest.raises(ValueError, match="greedy chains only"):
            measure(target, [case], PROMPTS, quiet=True)


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
