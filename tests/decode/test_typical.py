"""Typical acceptance against the reference's form, which lists every path of the tree."""

from __future__ import annotations

import pytest
import rigs
import torch
from fakes import FixedDrafter, MarkovTarget, TableDrafter

from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import generate
from headtrain.decode.tree import StaticTree
from headtrain.decode.verify import verify_typical, warp
from headtrain.evaluate.acceptance import Case, Prompt, Settings, measure
from headtrain.evaluate.report import caption, html_report, title
from headtrain.types import Proposal


def reference(proposal: Proposal, p: torch.Tensor, epsilon: float, delta: float) -> tuple[list[int], int]:
    """Every root-to-node path; keep those all of whose tokens pass; longest, then likeliest."""
    parents = proposal.parents or list(range(-1, proposal.tokens.numel() - 1))
    best, score = [], (0, 0.0)
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        likelihood, good = 0.0, True
        for step in path:
            row = p[parents[step] + 1].double()
            entropy = -(row[row > 0] * row[row > 0].log()).sum()
            chance = float(row[proposal.tokens[step]])
            good &= chance > min(epsilon, delta * float(torch.exp(-entropy)))
            likelihood += float(torch.tensor(chance).log())
        if good and (len(path), likelihood) > (score if best else (0, 0.0)):
            best, score = path, (len(path), likelihood)
    return best, int(p[best[-1] + 1 if best else 0].argmax())


@pytest.mark.parametrize("tree", [False, True])
def test_equals_the_reference(tree):
    g = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(300):
        n, vocab = int(torch.randint(1, 9, (), generator=g)), 12
        parents = [int(torch.randint(-1, i, (), generator=g)) if i else -1 for i in range(n)] if tree else None
        tokens = torch.randint(vocab, (n,), generator=g)
        p = warp(torch.randn(n + 1, vocab, generator=g) * float(torch.rand((), generator=g) * 4), 1.0, top_k=6)
        found = verify_typical(Proposal(tokens, parents=parents), p, 0.09, 0.3)
        assert found == reference(Proposal(tokens, parents=parents), p, 0.09, 0.3)
        lengths.append(len(found[0]))
    assert lengths.count(0) > 20 and sum(x > 1 for x in lengths) > 20


def test_thresholds_by_hand():
    """Uniform over 4: exp(-H) = 1/4, so the limit is min(0.09, 0.3 / 4); over 2: min(0.09, 0.15). Strictly above."""
    even = torch.full((2, 4), 0.25)
    assert verify_typical(Proposal(torch.tensor([2])), even) == ([0], 0)
    assert verify_typical(Proposal(torch.tensor([2])), even, epsilon=0.25, delta=1.0) == ([], 0)  # 0.25 is not > 0.25
    assert verify_typical(Proposal(torch.tensor([2])), even, epsilon=0.3, delta=0.99) == ([0], 0)
    p = torch.tensor([[0.02, 0.08, 0.9], [0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.4, 0.3, 0.3]])
    # H of the first row is 0.374: the limit is 0.09, and 0.08 is below it
    assert verify_typical(Proposal(torch.tensor([1, 0])), p) == ([], 2)
    # two branches of one length: the likelier; a longer one beats it; a child of a rejected node counts for nothing
    fork = Proposal(torch.tensor([1, 2, 0]), parents=[-1, -1, 0])
    assert verify_typical(fork, p, epsilon=0.05) == ([0, 2], 0)
    assert verify_typical(fork, p) == ([1], 0)


def test_refuses_what_is_not_finite():
    with pytest.raises(ValueError, match="not finite"):
        verify_typical(Proposal(torch.tensor([1])), torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]))


@pytest.mark.parametrize("plan", [None, StaticTree([(0,), (1,), (0, 0), (1, 0)])])
def test_generates_tokens_that_are_typical_or_the_best(plan):
    """Every token of the text passed the threshold or was the most probable one; nothing is random, so seeds agree."""
    target = MarkovTarget(12)
    table = target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(5))
    drafter = TableDrafter(table, plan)
    more = dict(drafter=drafter, k=3, max_new_tokens=60, temperature=0.8, acceptance="typical")
    out = generate(target, [3, 1], **more)
    assert len(out.tokens) == 60 and out.stop == "length"
    text, outside, other = [3, 1, *out.tokens], 0, 0
    for a, b, x in zip(text, text[1:], text[2:], strict=False):
        p = warp(target.table[a, b][None], 0.8)[0]
        passes = float(p[x]) > min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p).sum())))
        outside += not passes and x != int(p.argmax())
        other += x != int(p.argmax())
    assert outside == 0 and other > 0 and sum(r.accepted for r in out.rounds) > 10
    lossless = generate(target, [3, 1], **{**more, "acceptance": "lossless"})
    assert lossless.tokens != out.tokens


def test_at_temperature_zero_it_is_refused():
    with pytest.raises(ValueError, match="temperatures above 0"):
        generate(MarkovTarget(5), [1], drafter=FixedDrafter(MarkovTarget(5).table), acceptance="typical")


def test_an_evaluation_says_what_it_is():
    target = rigs.tiny_target()
    case = Case(HeadDrafter(rigs.head_for(target, "medusa", num_heads=2)), 2, 0.9)
    prompts = [Prompt(rigs.PROMPT, "chat", "a")]
    sweep = measure(target, [case], prompts, Settings(max_new_tokens=6, acceptance="typical"), quiet=True)
    only = sweep.cases[0]
    assert only.settings["acceptance"] == "typical" and not only.lossless
    assert any("NOT lossless" in line for line in caption(only)) and "not lossless" in title(only)
    assert "NOT lossless" in html_report(sweep)
    assert only.acceptance() == {}  # headtrain.json records lossless figures only
    plain = measure(target, [case], prompts, Settings(max_new_tokens=6), quiet=True).cases[0]
    assert plain.lossless and "all" in plain.acceptance()
    assert not any("lossless" in line for line in caption(plain))
    with pytest.raises(ValueError, match="temperatures above 0"):
        measure(target, [Case(case.drafter, 2, 0.0)], prompts, Settings(acceptance="typical"), quiet=True)
