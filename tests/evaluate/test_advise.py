"""Advice on cases made by hand: what is chosen, what is refused, and the numbers behind it."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from headtrain.decode.generate import Round
from headtrain.evaluate.advise import advise
from headtrain.evaluate.candidates import drafter_key, measured_costs
from headtrain.evaluate.report import html_report
from headtrain.evaluate.results import RESAMPLES, Difference, Evaluation, PromptResult, Side
from headtrain.evaluate.roofline import PLAIN, Cache, Device, Draft, Model, Setup
from headtrain.evaluate.speedup import VerifyCost, chain_point
from headtrain.evaluate.sweep import Sweep
from headtrain.export.engines import MODES, shipping
from headtrain.heads.catalog import HEADS

HEAD = {"kind": "eagle3", "family": "head", "label": "the head", "parameters": 10}
NGRAM = {"kind": "ngram", "family": "lookup", "label": "n-gram lookup", "parameters": 0}
SMALL = {"kind": "draft-model", "family": "draft model", "label": "the draft model s", "parameters": 15}


def walk(rng, alphas, k, tree_nodes=0):
    """One round, token by token."""
    accepted = 0
    while accepted < k and rng.random() < alphas[accepted]:
        accepted += 1
    return Round(k, accepted, accepted + 1, tree_nodes or k)


def case(
    drafter=HEAD,
    alphas=(0.8, 0.7, 0.6, 0.5, 0.4),
    k=None,
    c=0.05,
    verify=1.0,
    prompts=10,
    rounds=60,
    mode="decode",
    tree=None,
    nodes=0,
    temperature=0.0,
    route="code",
    seed=1,
    differences=(),
):
    """Times are in plain steps of 0.01 s: a plain token takes one, a round k*c + verify."""
    k, rng, results = k or len(alphas), random.Random(seed), []
    for n in range(prompts):
        made = [walk(rng, alphas, k, nodes) for _ in range(rounds)]
        tokens = 1 + sum(r.committed for r in made)
        times = (0.0, 0.0, 0.0) if mode == "replay" else (0.01 * rounds * k * c, 0.01 * rounds * verify, 0.0)
        results.append(
            PromptResult(
                id=f"{route}-{n}",
                route=route,
                prompt_tokens=5,
                plain=Side(tokens, "length", 0.1, 0.0, 0.0 if mode == "replay" else 0.01 * (tokens - 1), 0.0),
                speculative=Side(tokens, "length", 0.1, *times),
                rounds=made,
                difference=differences[n] if n < len(differences) else None,
            )
        )
    return Evaluation(
        target={"name": "t", "dtype": "float32", "parameters": 100, "model_type": "llama"},
        drafter=drafter,
        settings={"k": k, "temperature": temperature, "mode": mode, "tree": tree, "max_new_tokens": 9},
        versions={},
        results=results,
    )


def only(advice):
    (route,) = advice.routes
    return route


# -- numbers -----------------------------------------------------------------------------------------------------


def test_a_timed_speed_is_used_as_it_is():
    made = case(c=0.1, verify=1.3)
    got = only(advise([made])).chosen
    assert got.timed and got.k == 5
    assert got.speedup == pytest.approx(made.summary("code").speedup)
    tau = made.summary("code").tau
    assert got.speedup == pytest.approx(tau / (5 * 0.1 + 1.3)) and got.tau == pytest.approx(tau)
    assert (got.draft_cost, got.break_even) == pytest.approx((0.5, tau - 0.5))


def test_the_interval_is_that_of_the_pooled_ratio_over_resampled_prompts():
    made = case(prompts=6, rounds=20)
    drawn = torch.randint(6, (RESAMPLES, 6), generator=torch.Generator().manual_seed(0)).tolist()
    ratios = []
    for numbers in drawn:
        picked = [made.results[n] for n in numbers]
        spec = sum(r.speculative.tokens - 1 for r in picked) / sum(r.speculative.decode for r in picked)
        ratios.append(spec / (sum(r.plain.tokens - 1 for r in picked) / sum(r.plain.decode for r in picked)))
    low, high = torch.tensor(ratios, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    got = only(advise([made])).chosen
    assert (got.low, got.high) == pytest.approx((float(low), float(high)))
    assert got.low < got.speedup < got.high


def test_every_shorter_chain_follows_from_a_replay():
    """Against the formula on the measured alphas: the same rounds, so exactly the same."""
    made = case(mode="replay", rounds=100)
    got = {c.k: c for c in only(advise([made], cost_ratio=0.15)).fastest_first}
    assert sorted(got) == [1, 2, 3, 4, 5]
    alphas = [a / o for a, o in made.summary("code").alpha]
    for k, c in got.items():
        assert not c.timed and c.nodes == k
        assert (c.tau, c.speedup) == pytest.approx(
            (chain_point(alphas, k, 0.15).tau, chain_point(alphas, k, 0.15).speedup)
        )
    verify = VerifyCost(((2, 1.1), (6, 1.5)))
    for c in only(advise([made], cost_ratio=0.15, verify_cost=verify)).fastest_first:
        assert c.speedup == pytest.approx(chain_point(alphas, c.k, 0.15, verify).speedup)


def test_a_length_with_a_case_of_its_own_is_not_computed_from_a_longer_one():
    cases = [case(mode="replay", k=k, seed=k) for k in (2, 5)]
    got = sorted(only(advise(cases, cost_ratio=0.1)).fastest_first, key=lambda c: c.k)
    assert [c.k for c in got] == [1, 2, 3, 4, 5]
    assert got[1].tau == pytest.approx(cases[0].summary("code").tau)
    timed = case(k=2, seed=2)
    both = only(advise([timed, cases[0]])).fastest_first
    assert [(c.k, c.timed) for c in both if c.k == 2] == [(2, True)]


def test_a_lookup_that_found_nothing_verifies_one_token_and_costs_one_step():
    rounds = [Round(0, 0, 1), Round(0, 0, 1), Round(3, 3, 4), Round(3, 1, 2)]
    made = case(NGRAM, k=3, mode="replay", prompts=4)
    made.results = [
        PromptResult(f"p{n}", "code", 5, r.plain, r.speculative, rounds) for n, r in enumerate(made.results)
    ]
    verify = VerifyCost(((4, 1.6),))
    got = {c.k: c for c in only(advise([made], verify_cost=verify)).fastest_first}
    assert got[3].tau == 2 and got[3].draft_cost == 0
    assert got[3].speedup == pytest.approx(8 / (1 + 1 + 1.6 + 1.6))
    assert got[1].speedup == pytest.approx(6 / (1 + 1 + 1.2 + 1.2))


def test_costs_that_were_timed_serve_the_replays():
    timed, replay = case(c=0.12, verify=1.4), case(mode="replay", seed=9)
    c, verify = measured_costs([timed, replay])
    assert list(c.values()) == pytest.approx([0.12]) and verify.at(6) == pytest.approx(1.4)
    # a lookup's verifications are of fewer tokens wherever it found fewer: they say nothing about k + 1
    assert measured_costs([timed, case(NGRAM, verify=9.0)])[1].at(6) == pytest.approx(1.4)
    got = {c.k: c for c in only(advise([timed, replay])).fastest_first}
    assert got[5].timed and not got[3].timed
    alphas = [a / o for a, o in replay.summary("code").alpha]
    assert got[3].speedup == pytest.approx(chain_point(alphas, 3, 0.12, verify).speedup)


def test_without_any_time_the_ratio_of_parameters_stands_in_and_that_is_said():
    advice = advise([case(mode="replay")])
    assert any(
        "0.1 of a target step (the ratio of the parameters, not measured)" in line for line in advice.assumptions
    )
    assert any("taken to cost one plain step" in line for line in advice.assumptions)
    with pytest.raises(ValueError, match="the head: nothing says what a draft step costs; give --cost-ratio"):
        advise([case({**HEAD, "parameters": None}, mode="replay")])


def test_drafts_beyond_the_known_verification_costs_are_left_out_and_that_is_said():
    advice = advise([case(mode="replay")], cost_ratio=0.1, verify_cost=VerifyCost(((4, 1.2),)))
    assert sorted(c.k for c in only(advice).fastest_first) == [1, 2, 3]
    assert any("known to 4 tokens" in line for line in advice.assumptions)


def test_other_costs_replace_times_and_may_differ_by_drafter():
    cases = [case(c=0.1), case(SMALL, c=0.1, seed=2)]
    advice = advise(cases, cost_ratio={"the head": 0.2, "the draft model s": 0.01})
    got = {c.label: c for c in only(advice).fastest_first if c.k == 5}
    assert got["the head"].speedup == pytest.approx(cases[0].summary("code").tau / 2)
    assert got["the draft model s"].speedup == pytest.approx(cases[1].summary("code").tau / 1.05)
    assert any("not used" in line for line in advice.assumptions)
    lookup = case(NGRAM)  # one ratio for all is not meant for a lookup, which runs no model
    for c in only(advise([lookup, cases[0]], cost_ratio=0.3)).fastest_first:
        assert c.draft_cost == pytest.approx(0.25 if c.label == "n-gram lookup" else 1.5)
    tree = case(tree="tree of 20", nodes=20, k=5)
    got = only(advise([tree], cost_ratio=0.1, verify_cost=VerifyCost(((21, 2.0),)))).fastest_first
    assert [c.speedup for c in got] == pytest.approx([tree.summary("code").tau / (5 * 0.1 + 2.0)])


# -- the choice --------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_where_it_is_clearly_so():
    got = only(advise([case(c=0.02), case(NGRAM, (0.3, 0.3), c=0.0)]))
    assert got.chosen.label == "the head" and got.fastest_first[0] is got.chosen
    assert "the head, k 5: " in got.reasons[0] and "timed at batch 1" in got.reasons[0]


def test_where_intervals_overlap_the_simpler_is_taken_and_that_is_said():
    few = dict(prompts=8, rounds=8)
    head, ngram = case(c=0.0, **few), case(NGRAM, c=0.02, seed=3, **few)
    got = only(advise([head, ngram]))
    fastest = got.fastest_first[0]
    assert fastest.label == "the head" and fastest.low <= got.chosen.high
    assert got.chosen.label == "n-gram lookup"
    assert "intervals overlap" in got.reasons[1] and "no weights" in got.reasons[1]
    chain, tree = case(c=0.02, seed=3, **few), case(c=0.0, tree="tree", nodes=5, **few)
    got = only(advise([chain, tree], engines=None))
    assert got.chosen.tree is None


def test_a_smaller_k_is_taken_where_it_is_not_clearly_slower_prompt_by_prompt():
    replay = case(mode="replay", alphas=(0.8, 0.7, 0.02, 0.5, 0.5), rounds=100)
    got = only(advise([replay], cost_ratio=0.0))
    assert got.fastest_first[0].k == 5  # without costs a longer draft cannot be slower
    assert got.chosen.k == 2 and "compared prompt by prompt" in got.reasons[1]
    # though the intervals of k 1 and k 2 overlap here, each prompt says that 2 is faster
    few = case(mode="replay", alphas=(0.8, 0.3), rounds=10, prompts=6)
    got = only(advise([few], cost_ratio=0.0))
    one, two = sorted(got.fastest_first, key=lambda c: c.k)
    assert one.high > two.low and got.chosen.k == 2


def test_no_speculation_where_it_is_slower_or_cannot_be_told_from_no_gain():
    got = only(advise([case(alphas=(0.1, 0.1), c=0.2)]))
    assert got.chosen is None and "slower than none" in got.reasons[0] and not got.engines
    got = only(advise([case(alphas=(0.5, 0.3), prompts=5, rounds=4, c=0.4)]))
    (best,) = got.fastest_first
    assert best.low < 1 < best.speedup
    assert got.chosen is None and "cannot be told from no gain" in got.reasons[0]


def test_a_sure_gain_is_preferred_to_a_larger_one_that_may_be_none():
    wild = case(NGRAM, (0.6,) * 8, c=0.0, prompts=4, rounds=2)
    for n, r in enumerate(wild.results):  # one prompt that copies everything, three that lose
        rounds = [Round(8, 8, 9)] * 9 if n == 0 else [Round(8, 0, 1)] * 9
        tokens = 1 + sum(x.committed for x in rounds)
        plain = Side(tokens, "length", 0, 0, 0.01 * (tokens - 1), 0)
        wild.results[n] = PromptResult(r.id, "code", 5, plain, Side(tokens, "length", 0, 0, 0.11 * 1.2, 0), rounds)
    sure = case(c=0.1)
    got = only(advise([wild, sure]))
    assert got.fastest_first[0].label == "n-gram lookup" and got.fastest_first[0].low < 1
    assert got.chosen.label == "the head"


def test_each_route_and_temperature_has_its_own_advice_and_all_of_them_together():
    good, bad, warm = case(c=0.02), case(alphas=(0.05,) * 5, route="maths", seed=3), case(temperature=1.0, seed=4)
    good.results += bad.results
    advice = advise([good, warm])
    greedy, sampled = [("code", 0.0), ("maths", 0.0), ("all", 0.0)], [("code", 1.0), ("all", 1.0)]
    assert [(r.route, r.temperature) for r in advice.routes] == [*greedy, *sampled]
    assert advice.routes[0].chosen is not None and advice.routes[1].chosen is None


def test_a_gain_that_only_the_clock_shows_is_not_claimed_and_not_recommended():
    """A round costs a plain step at least, so that tau bounds the speed-up."""
    useless = case(NGRAM, (0.0,) * 5, c=0.0, verify=0.8)
    got = only(advise([useless]))
    (candidate,) = got.fastest_first
    assert got.chosen is None and "the clock disagrees" in " ".join(got.reasons) and "1.25x" in got.reasons[0]
    assert (candidate.speedup, candidate.low, candidate.high) == (1, 1, 1)
    # some acceptance, so that the bounded interval lies above 1: still no gain to rely on
    slight = case(NGRAM, (0.5,), c=0.0, verify=0.8)
    got = only(advise([slight]))
    (candidate,) = got.fastest_first
    tau = slight.summary("code").tau
    assert candidate.low > 1 and candidate.speedup == pytest.approx(tau) and candidate.high < 1.6
    assert got.chosen is None and f"more than its {tau:.2f} tokens a round" in got.reasons[0]
    # drafting alone eats what is accepted
    eaten = case(alphas=(0.3,), c=0.35, verify=0.8)
    assert only(advise([eaten])).fastest_first[0].speedup > 1
    assert only(advise([eaten])).chosen is None and "do not pay for drafting" in only(advise([eaten])).reasons[0]
    # within the clock's noise the claim is cut, and another drafter is not touched
    close = case(NGRAM, (0.5,), c=0.0, verify=0.99)
    assert only(advise([close])).chosen.speedup == pytest.approx(close.summary("code").tau)
    assert only(advise([useless, case(c=0.1)])).chosen.label == "the head"


def test_a_verification_timed_below_a_plain_step_serves_replays_as_one():
    timed, replay = case(c=0.1, verify=0.8), case(mode="replay", seed=9)
    assert measured_costs([timed])[1].at(6) == 1
    alphas = [a / o for a, o in replay.summary("code").alpha]
    got = {c.k: c for c in only(advise([timed, replay])).fastest_first}
    assert got[3].speedup == pytest.approx(chain_point(alphas, 3, 0.1).speedup)


def test_drafters_of_one_kind_are_told_apart():
    """By their weights or their label: neither's chains stand in for the other's."""
    first, second = {**HEAD, "weights": "a" * 64}, {**HEAD, "weights": "b" * 64, "label": "the other head"}
    cases = [case(first, mode="replay", k=5), case(second, mode="replay", k=2, alphas=(0.9, 0.9), seed=2)]
    found = only(advise(cases, cost_ratio=0.1)).fastest_first
    assert sorted((c.label, c.k) for c in found) == [
        *(("the head", k) for k in (1, 2, 3, 4, 5)),
        *(("the other head", k) for k in (1, 2)),
    ]
    one = {**HEAD, "weights": "b" * 64}
    assert len({drafter_key(case(d)) for d in (first, one, {**first, "label": "x"})}) == 3
    # a record that cannot tell is said to be one
    assert "cannot tell apart" in advise([case(), case(seed=2)]).warnings[0]
    assert advise([case(first), case(one, seed=2)]).warnings == []


def test_a_head_that_says_all_depths_at_once_is_charged_once():
    kind = {**HEAD, "kind": "medusa", "parallel": True}
    made = case(kind, mode="replay", rounds=100)
    alphas = [a / o for a, o in made.summary("code").alpha]
    for k, c in {c.k: c for c in only(advise([made])).fastest_first}.items():  # the ratio of the parameters, 0.1
        tau = chain_point(alphas, k, 0).tau
        assert (c.draft_cost, c.speedup) == pytest.approx((0.1, tau / 1.1))
    timed = case(kind, c=0.04)  # 0.2 plain steps a round
    assert list(measured_costs([timed])[0].values()) == pytest.approx([0.2])
    tree = case(kind, tree="tree of 20", nodes=20, k=5)
    (c,) = only(advise([tree], cost_ratio=0.1, verify_cost=VerifyCost(((21, 2.0),)))).fastest_first
    assert c.speedup == pytest.approx(tree.summary("code").tau / (0.1 + 2.0))
    on_device = only(advise([case({**REAL, "kind": "medusa", "parallel": True})], setup=SETUP)).fastest_first[0]
    with_head = Setup(SETUP.target, SETUP.device, Draft(Model(50_000_000, 1, 8, 2, 50), parallel=True), 200)
    assert on_device.speedup == pytest.approx(with_head.speedup(on_device.plan, 1))


# -- what is refused or warned of --------------------------------------------------------------------------------


def test_typical_acceptance_is_left_out_and_kept_apart():
    loose = case(c=0.0, seed=2, alphas=(0.95,) * 5)
    loose.settings["acceptance"] = "typical"
    advice = advise([case(c=0.05), loose])
    assert [c.tau for c in only(advice).fastest_first] == pytest.approx([case().summary("code").tau])
    assert "typical acceptance" in advice.refused[0] and "left out" in advice.refused[0]
    assert drafter_key(loose) != drafter_key(case())
    alone = only(advise([loose]))
    assert alone.chosen is None and not alone.engines and "is refused" in alone.reasons[0]


def test_there_is_always_a_row_and_a_reason():
    costs = VerifyCost(((2, 1.2),))
    timed = only(advise([case(tree="tree of 20", nodes=20)], verify_cost=costs, cost_ratio=0.1))
    assert timed.chosen is None and "known to 2 tokens" in timed.reasons[0]
    slow = only(advise([case({**HEAD, "kind": "homemade"}, alphas=(0.1,), c=0.9)]))
    assert slow.chosen is None and "no engine that is known ships" in slow.reasons[0]


def test_texts_that_were_not_the_targets_own_are_refused_unless_rounding_decided():
    fault = case(differences=[Difference(3, 1, 2, 0.4)])
    advice = advise([fault])
    assert "not lossless" in advice.refused[0] and "code-0 at token 3" in advice.refused[0]
    assert only(advice).chosen is None and "is refused" in only(advice).reasons[0]
    tie = advise([case(differences=[Difference(3, 1, 2, 1e-6)])])
    assert only(tie).chosen and "rounding" in tie.warnings[0]
    warm = case(temperature=1.0)
    assert only(advise([warm])).chosen


def test_engines_are_named_and_none_is_promised_that_ships_none():
    chain = only(advise([case(c=0.02)]))
    assert [m.title for m in chain.engines][:1] == ["vLLM"] and chain.engines[0].versions == ">=0.32"
    # no engine is known to draft trees on this head: the chain is advised, and the tree is refused by name
    kind = {**HEAD, "kind": "medusa"}
    tree = case(kind, c=0.0, tree="tree of 20", nodes=20)
    advice = advise([tree, case(kind, c=0.1)])
    route = only(advice)
    assert route.fastest_first[0].tree and route.chosen.tree is None
    assert any("no engine that is known ships head tree" in line for line in route.reasons)
    assert "promised for no engine" in advice.refused[0]
    alone = only(advise([tree]))
    assert alone.chosen is None and not alone.engines
    unknown = only(advise([case({**HEAD, "kind": "homemade"})]))
    assert unknown.chosen is None


def test_only_the_users_engines_count():
    lookup = case(NGRAM, c=0.0)
    assert [m.engine for m in only(advise([lookup], engines=["sglang"])).engines] == ["sglang"]
    vllm_only = only(advise([case(NGRAM, c=0.0, tree="tree", nodes=9)], engines=["vllm"]))
    assert vllm_only.chosen is None and "no engine of yours" in vllm_only.reasons[-1]
    with pytest.raises(ValueError, match="no engine named 'tgi'; known: sglang"):
        advise([lookup], engines=["tgi"])


def test_the_table_of_modes():
    assert len({(m.engine, m.mode) for m in MODES}) == len(MODES)
    assert all(m.source and (m.versions if m.served else m.note) for m in MODES)
    assert {m.engine for m in shipping("lookup")} >= {"vllm", "sglang"}
    assert "vllm" not in {m.engine for m in shipping("head tree")}
    for head in HEADS.values():  # an engine that loads no such head is not promised for it
        assert all(m.engine != "sglang" or "sglang" in head.dialects for m in shipping("head", head))


def test_misfits_are_warned_of():
    def warned(parameters, **more):
        return " ".join(advise([case({**SMALL, "parameters": parameters, **more}, c=0.01)]).warnings)

    assert "20 times smaller" in warned(5) and "only 2.5 times smaller" in warned(40)
    assert warned(10) == warned(20) == ""  # 10 and 5 times
    assert "another family (gpt2; the target's is llama)" in warned(15, model_type="gpt2")
    assert warned(15, model_type="llama") == ""
    assert advise([case({**HEAD, "parameters": 1})]).warnings == []  # a head may be any size


def test_lookups_on_open_ended_text_and_small_samples_are_warned_of():
    chat = only(advise([case(NGRAM, c=0.0, route="chat")]))
    assert chat.chosen.family == "lookup" and "open-ended" in chat.warnings[0]
    assert only(advise([case(c=0.0, route="chat")])).warnings == []  # a head
    assert only(advise([case(NGRAM, c=0.0)])).warnings == []
    assert "4 prompts and 240 rounds" in only(advise([case(prompts=4)])).warnings[0]
    assert "5 prompts and 195 rounds" in only(advise([case(prompts=5, rounds=39)])).warnings[0]
    assert only(advise([case(prompts=5, rounds=40)])).warnings == []
    two = only(advise([case(prompts=2)]))
    assert math.isnan(two.chosen.low) and "too few prompts for an interval" in two.reasons[0]


# -- batch size --------------------------------------------------------------------------------------------------

SETUP = Setup(
    target=Model(1_000_000_000, layers=10, heads=8, kv_heads=2, head_dim=50),
    device=Device("toy", tflops=100, gbps=1000, memory_gb=10),
    context=200,
)
REAL = {**HEAD, "parameters": 50_000_000}


def test_a_large_batch_switches_speculation_off():
    one = only(advise([case(REAL)], concurrency=1, setup=SETUP))
    assert one.chosen and any("switch it off" in line for line in one.reasons)
    with_head = Setup(SETUP.target, SETUP.device, Draft(Model(50_000_000, 1, 8, 2, 50)), 200)
    assert one.off_from_batch == with_head.stops_paying_at(one.chosen.plan) and one.off_from_batch > 4
    assert one.chosen.speedup == pytest.approx(with_head.speedup(one.chosen.plan, 1))
    many = only(advise([case(REAL)], concurrency=one.off_from_batch, setup=SETUP))
    assert many.chosen is None
    speeds = [only(advise([case(REAL)], concurrency=b, setup=SETUP)).fastest_first[0].speedup for b in (1, 20, 80, 400)]
    assert speeds == sorted(speeds, reverse=True)


def test_what_does_not_fit_into_memory_is_not_recommended():
    big = Model(70_000_000_000, layers=80, heads=64, kv_heads=8, head_dim=128)
    card = Device("a card", tflops=165, gbps=1008, memory_gb=24)
    got = only(advise([case(REAL)], setup=Setup(big, card)))
    assert got.chosen is None and got.off_from_batch is None
    assert "does not fit into the 21.6 GB of a card" in got.reasons[0] and "at most 0 fit" in got.reasons[0]
    fits = SETUP.largest_in_memory(PLAIN)
    crowd = only(advise([case(REAL)], concurrency=fits + 1, setup=SETUP))
    assert crowd.chosen is None and f"with or without speculation: at most {fits} fit" in crowd.reasons[0]
    tight = only(advise([case(REAL)], concurrency=fits, setup=SETUP))
    assert tight.chosen is None and f"{fits} without it" in tight.reasons[0]


def test_a_gain_at_every_batch_that_fits_is_said_with_their_number():
    roomy = Setup(SETUP.target, Device("small", tflops=10_000, gbps=1000, memory_gb=3), context=20_000)
    got = only(advise([case(REAL)], setup=roomy))
    assert got.chosen and got.off_from_batch is None
    with_head = Setup(roomy.target, roomy.device, Draft(Model(50_000_000, 1, 8, 2, 50)), 20_000)
    fits = with_head.largest_in_memory(got.chosen.plan)
    assert 0 < fits < 20 and f"at no batch up to the {fits} that fit into memory" in got.reasons[-1]


def test_a_draft_models_cache_is_of_the_targets_kind():
    latent = Model(1_000_000_000, 20, 8, 8, 50, cache=Cache(576, 20, 1088))
    made = case({**SMALL, "parameters": 100_000_000})
    got = only(advise([made], setup=Setup(latent, SETUP.device, context=200))).fastest_first[0]
    own = Model(100_000_000, 2, 8, 8, 50, cache=Cache(576, 2, 1088))
    assert got.speedup == pytest.approx(Setup(latent, SETUP.device, Draft(own), 200).speedup(got.plan, 1))


def test_a_concurrency_needs_costs():
    with pytest.raises(ValueError, match="concurrency 8: what a verification costs there must be known"):
        advise([case()], concurrency=8)
    got = only(advise([case()], concurrency=8, verify_cost=VerifyCost(((6, 3.0),))))
    assert got.fastest_first[0].speedup == pytest.approx(case().summary("code").tau / (5 * 0.05 + 3))


# -- the edges ---------------------------------------------------------------------------------------------------


def test_json_has_no_nan_and_no_tensor():
    made = advise([case(prompts=2), case(NGRAM, (0.2,), prompts=2, mode="replay")])
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert data["routes"][0]["strategy"]["low"] is None
    assert data["routes"][0]["strategy"]["k"] == 5 and "samples" not in data["routes"][0]["strategy"]


def test_bad_input():
    with pytest.raises(ValueError, match="no evaluated cases"):
        advise([])
    for ratio in (-0.1, math.nan, {"the head": math.inf}):
        with pytest.raises(ValueError, match="cost ratio"):
            advise([case()], cost_ratio=ratio)
    with pytest.raises(ValueError, match="concurrency 0"):
        advise([case()], concurrency=0)
    with pytest.raises(ValueError, match="no family, label"):
        advise([case({"kind": "eagle3"})])
    with pytest.raises(ValueError, match="family 'other'; expected one of lookup, head, draft model"):
        advise([case({**HEAD, "family": "other"})])
    empty = case()
    empty.results = []
    nothing = only(advise([empty]))
    assert nothing.chosen is None and "nothing was decoded past the first token" in nothing.reasons[0]


# -- verdicts ----------------------------------------------------------------------------------------------------


def test_the_verdict_is_one_of_three():
    sure, none = only(advise([case(c=0.02)])), only(advise([case(alphas=(0.1, 0.1), c=0.2)]))
    open_ = only(advise([case(alphas=(0.5, 0.3), prompts=5, rounds=4, c=0.4)]))
    assert [r.verdict for r in (sure, open_, none)] == ["recommend", "indifferent", "off"]
    assert sure.best is sure.chosen and open_.best.low < 1 < open_.best.high and none.best.high <= 1
    # slower as measured, but with an interval that reaches above 1: not known to be slower, and so not said to be
    close = only(advise([case(alphas=(0.4, 0.3), prompts=5, rounds=4, c=0.4)]))
    assert close.best.speedup < 1 < close.best.high
    assert close.verdict == "indifferent" and "cannot be told from no gain" in close.reasons[0]
    # what is refused, barred or shipped by nobody is no reason to hope
    assert only(advise([case(NGRAM, (0.0,) * 5, c=0.0, verify=0.8)])).verdict == "off"
    assert only(advise([case({**HEAD, "kind": "homemade"})])).verdict == "off"
    assert only(advise([case(differences=[Difference(3, 1, 2, 0.4)])])).verdict == "off"


def test_the_report_begins_with_the_verdict():
    cases = [case(c=0.02), case(alphas=(0.1,) * 5, route="maths", c=0.2)]
    cases[0].results += cases[1].results
    cases[0].results += case(alphas=(0.5, 0.3, 0, 0, 0), prompts=5, rounds=4, c=0.16, route="chat").results
    page = html_report(Sweep(cases[0].target, {"torch": "x"}, cases[:1]))
    top = page[: page.index("tau by route")]
    assert top.index("Verdict") > 0 and "<td>code</td><td>recommended: serve the head, k 5</td>" in top
    assert "<td>maths</td><td>off: the best, the head, k 5, is no faster</td>" in top
    assert "<td>chat</td><td>indifferent: the head, k 5 cannot be told from no speculation" in top
    code = advise(cases[:1], only=["code"]).routes[0].chosen
    assert f"<td>{code.speedup:.2f}x</td><td>{code.low:.2f} to {code.high:.2f}</td><td>timed</td>" in top
    unknown = case({**HEAD, "parameters": None}, mode="replay")
    assert "nothing says what a draft step costs" in html_report(Sweep(unknown.target, {}, [unknown]))


def test_only_the_routes_that_were_asked_for():
    both = case(c=0.02)
    both.results += case(route="maths", seed=3).results
    assert [r.route for r in advise([both], only=["maths", "all", "maths"]).routes] == ["maths", "all"]
    assert [r.route for r in advise([case()], only=["all"]).routes] == ["code"]  # the only one is all there is
    with pytest.raises(ValueError, match="no route 'x' in this evaluation; it has: code, maths, all"):
        advise([both], only=["x", "code"])
