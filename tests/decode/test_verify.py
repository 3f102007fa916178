"""The pure functions: warping against transformers' own, sampling, the acceptance rule, and its distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from fakes import FixedDrafter, MarkovTarget, TableDrafter
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headtrain.decode.generate import generate
from headtrain.decode.tree import DynamicTree, StaticTree
from headtrain.decode.verify import residual, sample, top_two, verify_greedy, verify_sampled, warp
from headtrain.types import Proposal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 9), (0.01, 0), (1.0, 999)])
def test_warp_equals_transformers(temperature, top_p, top_k):
    logits = torch.randn(7, 50, generator=generator())
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = warp(logits, temperature, top_p, top_k)
    assert torch.equal(got > 0, want.softmax(-1) > 0)
    torch.testing.assert_close(got, want.softmax(-1), rtol=1e-5, atol=1e-7)


def test_warp_survives_extremes():
    logits = torch.tensor([[1e34, 0.9e34, -math.inf, 3.0]])
    tiny = warp(logits, 1e-6)
    assert tiny.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert warp(torch.zeros(1, 4), 1.0, top_p=0.5).tolist() == [[0.5, 0.5, 0.0, 0.0]]  # ties: in order of ids
    assert warp(torch.zeros(1, 4), 1.0, top_k=1).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_sample_never_draws_weight_zero_and_follows_the_weights():
    weights = torch.tensor([0.0, 0.5, 0.0, 1.5, 2.0, 0.0])
    g = generator()
    counts = torch.zeros(6)
    for _ in range(2000):
        counts[sample(weights, g)] += 1
    assert counts[[0, 2, 5]].sum() == 0
    torch.testing.assert_close(counts / 2000, weights / 4, atol=0.035, rtol=0)  # 3 sigma of 2000 draws


def test_sample_at_the_ends_of_the_unit_interval(monkeypatch):
    weights = torch.tensor([0.0, 0.3, 0.7, 0.0])
    for u, want in ((0.0, 1), (1.0, 2), (math.nextafter(1, 0), 2)):  # 1.0: as if u * total had rounded up
        monkeypatch.setattr(torch, "rand", lambda *a, u=u, **k: torch.tensor(u, dtype=torch.float64))
        assert int(sample(weights, generator())) == want


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_sample_refuses_what_cannot_be_sampled(weights):
    with pytest.raises(ValueError, match="cannot sample"):
        sample(torch.tensor(weights), generator())


def test_residual_is_never_nothing():
    p = torch.tensor([0.2, 0.8])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.tensor([0.2, 0.8000001])), p)
    torch.testing.assert_close(residual(p, torch.tensor([0.9, 0.1])), torch.tensor([0.0, 0.7]))


def test_greedy_accepts_up_to_the_first_difference():
    choices = torch.tensor([4, 5, 6, 7])
    for draft, want in (([4, 5, 6], 3), ([4, 5, 0], 2), ([4, 0, 6], 1), ([0, 5, 6], 0), ([], 0)):
        assert verify_greedy(Proposal(torch.tensor(draft, dtype=torch.int64)), choices) == list(range(want))


def test_top_two_gap():
    choices, gaps = top_two(torch.tensor([[1.0, 3.0, 2.5], [2.0, 2.0, 0.0]]))
    assert choices.tolist() == [1, 0] and gaps.tolist() == [0.5, 0.0]


def test_certain_accept_and_certain_reject():
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    q = torch.tensor([[0.0, 1.0, 0.0]])
    for seed in range(20):
        right, wrong = torch.tensor([1]), torch.tensor([0])
        assert verify_sampled(Proposal(right, q), p, generator(seed)) == ([0], 2)  # p = q = 1, then the bonus
        assert verify_sampled(Proposal(right), p, generator(seed)) == ([0], 2)
        assert verify_sampled(Proposal(wrong, torch.tensor([[1.0, 0.0, 0.0]])), p, generator(seed)) == ([], 1)
        assert verify_sampled(Proposal(wrong), p, generator(seed)) == ([], 1)
        assert verify_sampled(Proposal(right[:0]), p, generator(seed)) == ([], 1)
        both = Proposal(torch.tensor([0, 1]), parents=[-1, -1])
        assert verify_sampled(both, torch.cat([p[:1], p]), generator(seed)) == ([1], 2)  # the second sibling is right


def test_the_acceptance_rate_is_one_minus_total_variation():
    p, q = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.5, 0.2, 0.3])
    g, kept, count = generator(3), 0, 2000
    for _ in range(count):
        token = sample(q, g)[None]
        kept += len(verify_sampled(Proposal(token, q[None]), torch.stack([p, p]), g)[0])
    assert abs(kept / count - float(torch.minimum(p, q).sum())) < 0.035


def test_siblings_that_were_not_drawn_are_accepted_with_the_weight_of_all():
    """Deterministic siblings a, b: one of them is accepted with p(a) + p(b)."""
    p, g, count = torch.tensor([0.1, 0.2, 0.3, 0.4]), generator(3), 2000
    proposal = Proposal(torch.tensor([1, 2]), parents=[-1, -1])
    kept = [verify_sampled(proposal, p.expand(3, 4), g)[0] for _ in range(count)]
    assert abs(sum(path == [0] for path in kept) / count - 0.2) < 0.03
    assert abs(sum(path == [1] for path in kept) / count - 0.3) < 0.035


# -- the whole loop: the joint distribution of three tokens ------------------------------------------------------

VOCAB, DRAWS = 8, 1000


def joint(target: MarkovTarget, first: int, settings: dict) -> torch.Tensor:
    """P(a, b, c | first) [V, V, V] by writing out the chain rule."""
    out = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    table = warp(target.table, **settings).double()  # [V, V, V]: after (before, last)
    for a, b, c in itertools.product(range(VOCAB), repeat=3):
        out[a, b, c] = table[0, first, a] * table[first, a, b] * table[a, b, c]
    return out


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard deviations of Pearson's statistic from its mean under the hypothesis; rare cells are pooled."""
    impossible = expected == 0
    assert counts[impossible].sum() == 0, "a token of probability zero was committed"
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    use = wanted > 0
    statistic = ((observed - wanted) ** 2 / wanted.clamp(min=1e-300))[use].sum()
    freedom = int(use.sum()) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def drafters(target: MarkovTarget) -> dict[str, FixedDrafter]:
    noise = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator(5))
    half = target.table.clone()
    half[..., ::2] = -math.inf  # a reduced draft vocabulary
    return {
        "good": FixedDrafter(target.table + 0.2 * noise),
        "bad": FixedDrafter(-target.table),
        "exact": FixedDrafter(target.table),
        "reduced": FixedDrafter(half),
        "deterministic": FixedDrafter(target.table + noise, sampled=False),
    }


STATIC = StaticTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
PLANS = {"chain": None, "static": STATIC, "dynamic": DynamicTree(nodes=8, depth=3, branch=3)}


@pytest.mark.parametrize(
    ("name", "plan", "top_p", "top_k"),
    [
        ("good", "chain", 1.0, 0),
        ("bad", "chain", 1.0, 0),
        ("reduced", "chain", 1.0, 0),
        ("deterministic", "chain", 1.0, 0),
        ("good", "chain", 0.8, 6),
        ("good", "static", 1.0, 0),
        ("bad", "static", 1.0, 0),
        ("good", "static", 0.8, 2),  # fewer tokens of any weight than siblings planned
        ("good", "dynamic", 1.0, 0),
        ("bad", "dynamic", 0.9, 0),
    ],
)
def test_three_tokens_are_distributed_as_the_targets(name, plan, top_p, top_k):
    target = MarkovTarget(VOCAB, seed=1, first=3)
    settings = dict(temperature=0.8, top_p=top_p, top_k=top_k)
    drafter = drafters(target)[name]
    if plan != "chain":
        drafter = TableDrafter(drafter.table, PLANS[plan])
    counts, accepted = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64), 0
    for seed in range(DRAWS):
        out = generate(target, [0], drafter=drafter, k=3, max_new_tokens=4, seed=seed, eos_ids=(), **settings)
        assert out.tokens[0] == 3
        counts[tuple(out.tokens[1:4])] += 1
        accepted += out.rounds[0].accepted
    deviation = chi_square(counts, joint(target, 3, settings) * DRAWS)
    assert abs(deviation) < 4, f"chi-square is {deviation:.1f} standard deviations off"
    if name == "bad":
        assert accepted < 0.8 * DRAWS
    if name == "good":
        assert accepted > DRAWS


def test_a_draft_from_the_targets_own_distribution_is_always_accepted():
    target = MarkovTarget(VOCAB, seed=2)
    out = generate(
        target, [0], drafter=FixedDrafter(target.table), k=4, max_new_tokens=201, temperature=0.9, eos_ids=()
    )
    assert [(r.drafted, r.accepted, r.committed) for r in out.rounds] == [(4, 4, 5)] * 40
