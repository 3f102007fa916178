"""The speed-up model against the paper's numbers, a walk through rounds, and a simulation."""

from __future__ import annotations

import math
import random

import pytest

from headtrain.evaluate.speedup import (
    LARGEST_K,
    VerifyCost,
    alphas_to,
    best,
    chain_point,
    curve,
    iid_tokens_per_round,
    tokens_per_round,
    tree_speedup,
    verify_break_even,
)


def test_check_values_of_the_paper():
    assert round(iid_tokens_per_round(0.8, 5), 2) == 3.69
    assert round(iid_tokens_per_round(0.5, 5), 2) == 1.97
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for k in (1, 2, 5, 9):
            assert iid_tokens_per_round(alpha, k) == pytest.approx(tokens_per_round([alpha] * k), abs=1e-12)
    assert iid_tokens_per_round(1.0, 4) == 5


def test_tokens_per_round_by_hand():
    # 1 + .5 + .5*.4 + .5*.4*.2
    assert tokens_per_round([0.5, 0.4, 0.2]) == pytest.approx(1.74)
    assert tokens_per_round([0.0, 1.0]) == 1
    assert tokens_per_round([0.5, 0.0, 1.0]) == 1.5


def test_a_simulation_of_rounds_agrees():
    """Draft k tokens, accept the j-th with alpha_j until one fails, count what is committed and what it costs.
    Bound: five standard errors (a committed length lies in 1..k+1, so its deviation is at most k/2)."""
    rng, alphas, c, rounds = random.Random(5), [0.7, 0.55, 0.8, 0.3], 0.1, 40_000
    committed = 0
    for _ in range(rounds):
        for alpha in alphas:
            if rng.random() >= alpha:
                break
            committed += 1
        committed += 1
    point = chain_point(alphas, 4, c, VerifyCost(((5, 1.25),)))
    bound = 5 * (4 / 2) / math.sqrt(rounds)
    assert committed / rounds == pytest.approx(point.tau, abs=bound)
    plain_steps, spent = committed, rounds * (4 * c + 1.25)
    assert plain_steps / spent == pytest.approx(point.speedup, abs=bound / (4 * c + 1.25))


def test_speedup_by_hand():
    p = chain_point([0.8, 0.5], 2, 0.1)
    assert (p.tau, p.cost) == pytest.approx((2.2, 1.2))
    assert p.speedup == pytest.approx(2.2 / 1.2)
    assert chain_point([0.8, 0.5], 2, 0.1, VerifyCost(((3, 1.6),))).speedup == pytest.approx(2.2 / 1.8)
    assert tree_speedup(3.0, 1.5, 0.5) == 1.5
    assert verify_break_even(3.0, 0.5) == 2.5
    assert tree_speedup(3.0, verify_break_even(3.0, 0.5), 0.5) == 1


def test_limits():
    assert all(p.speedup < 1 for p in curve([0.0] * 4, 0.01))  # nothing accepted: drafting is a loss
    assert all(p.speedup == 1 for p in curve([0.0] * 4, 0.0))
    assert best(curve([0.0] * 4, 0.0)) is None and best([]) is None
    assert chain_point([1.0] * 5, 5, 0.0).speedup == 6
    assert best(curve([0.9] * 5, 1.0)) is None  # a draft as slow as its target


def test_more_acceptance_is_faster_and_more_cost_slower():
    values = [[chain_point([a] * 4, 4, c).speedup for a in (0.1, 0.4, 0.7, 0.95)] for c in (0.01, 0.1, 0.5)]
    for row in values:
        assert row == sorted(row) and len(set(row)) == 4
    for column in zip(*values, strict=True):
        assert list(column) == sorted(column, reverse=True)


def test_best_k_by_trying_all():
    alphas, c = [0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 0.12
    slow = {}
    for k in range(1, 7):
        tau, product = 1.0, 1.0
        for a in alphas[:k]:
            product *= a
            tau += product
        slow[k] = tau / (k * c + 1)
    top = best(curve(alphas, c))
    assert top.k == max(slow, key=slow.get) and top.speedup == pytest.approx(max(slow.values()))
    tied = curve([0.5, 0.0], 0.0)
    assert [p.speedup for p in tied] == [1.5, 1.5] and best(tied).k == 1


def test_beyond_the_measured_depths_is_said():
    with pytest.raises(ValueError, match="k 4, but acceptance was measured to depth 2.*--hold-last"):
        curve([0.5, 0.4], 0.1, k_max=4)
    held = curve([0.5, 0.4], 0.1, k_max=4, hold_last=True)
    assert [p.extrapolated for p in held] == [False, False, True, True]
    assert held[3].tau == pytest.approx(tokens_per_round([0.5, 0.4, 0.4, 0.4]))
    assert alphas_to([0.5, 0.4, 0.3], 2) == [0.5, 0.4]


def test_measured_tokens_a_round_replace_those_of_the_alphas():
    measured = curve([0.5, 0.4], 0.1, k_max=3, hold_last=True, taus=[1.45, 1.6])
    assert [p.tau for p in measured] == pytest.approx([1.45, 1.6, 1.6 + 0.5 * 0.4 * 0.4])
    assert [p.speedup for p in measured] == pytest.approx([p.tau / (p.k * 0.1 + 1) for p in measured])


def test_one_step_for_all_depths_is_charged_once():
    points = curve([0.5, 0.4], 0.1, VerifyCost(((3, 1.4),)), parallel=True)
    assert [p.cost for p in points] == pytest.approx([0.1 + 1.2, 0.1 + 1.4])


def test_the_longest_curve_is_linear_work_and_a_longer_one_is_refused():
    """Every alpha is read once or twice, not once for each k."""

    class Counted(list):
        reads = 0

        def __iter__(self):
            for value in super().__iter__():
                Counted.reads += 1
                yield value

    points = curve(Counted([0.5] * LARGEST_K), 0.01)
    assert len(points) == LARGEST_K and points[-1].tau == pytest.approx(2) and Counted.reads <= 8 * LARGEST_K
    with pytest.raises(ValueError, match="k 200000: .* at most 4096"):
        curve([0.5], 0.01, k_max=200_000, hold_last=True)
    with pytest.raises(ValueError, match="k 4097"):
        curve([0.5] * 4097, 0.01)


def test_verify_cost_is_measured_or_one():
    assert VerifyCost().at(64) == 1
    v = VerifyCost.parse("5:1.4, 9:2")
    assert v.measured == ((1, 1.0), (5, 1.4), (9, 2.0))
    assert [v.at(n) for n in (1, 3, 5, 7, 9)] == pytest.approx([1, 1.2, 1.4, 1.7, 2])
    with pytest.raises(ValueError, match="measured to 9 tokens, 10 are needed"):
        v.at(10)
    for text in ("5", "a:b", "5:1.2:3", ""):
        with pytest.raises(ValueError, match="expected tokens:cost pairs"):
            VerifyCost.parse(text)
    assert VerifyCost(((1, 1.0), (5, 1.4))) == VerifyCost(((5, 1.4),))
    # T(1) / T(1) is 1, and no forward is cheaper than one of a single token
    for bad in (((1, 9.0),), ((9, 0.1),), ((9, 0.99),), ((9, 1e300),)):
        with pytest.raises(ValueError, match="verify cost"):
            VerifyCost(bad)
    for bad in (((0, 1.0),), ((5, 0.0),), ((5, -1.0),), ((5, math.nan),), ((5, 1.0), (5, 2.0))):
        with pytest.raises(ValueError, match="verify cost"):
            VerifyCost(bad)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_alphas_must_be_probabilities(alpha):
    with pytest.raises(ValueError, match="alpha_2 .*expected a probability"):
        tokens_per_round([0.5, alpha])
    with pytest.raises(ValueError, match="alpha_1"):
        iid_tokens_per_round(alpha, 3)


def test_bad_k_and_costs():
    for bad in (lambda: iid_tokens_per_round(0.5, 0), lambda: curve([0.5], 0.1, k_max=0), lambda: alphas_to([0.5], 0)):
        with pytest.raises(ValueError, match="k 0"):
            bad()
    for c in (-0.1, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="cost ratio"):
            chain_point([0.5], 1, c)
    with pytest.raises(ValueError, match="no alphas"):
        curve([], 0.1)
    with pytest.raises(ValueError, match="tau 0.9"):
        tree_speedup(0.9, 1, 0)
    for verify, draft in ((0, 0), (-1, 0), (1, -1), (math.nan, 0), (1, math.inf)):
        with pytest.raises(ValueError, match="verification|drafting"):
            tree_speedup(2, verify, draft)
