"""The roofline by hand, against real parameter counts, a simulation of routing, and searches by trying every batch."""

from __future__ import annotations

import math
import random

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

from headtrain.config import load_recipe
from headtrain.evaluate.roofline import (
    DEVICES,
    PLAIN,
    Cache,
    Capacity,
    Device,
    Draft,
    Experts,
    Load,
    Model,
    Plan,
    Setup,
    capacity,
    cheapest,
    dense_parameters,
    step_seconds,
)
from headtrain.target.shape import shape_from_config

GPU = Device("toy", tflops=100, gbps=1000, memory_gb=10)
TARGET = Model(1_000_000_000, layers=10, heads=8, kv_heads=2, head_dim=50)
HEAD = Model(50_000_000, layers=1, heads=8, kv_heads=2, head_dim=50)
ALPHAS = [0.8, 0.7, 0.6, 0.5]
CHAIN = Plan.chain(ALPHAS, 4)


def setup(**changes):
    return Setup(**{"target": TARGET, "device": GPU, "draft": Draft(HEAD), "context": 1000, **changes})


def test_one_step_by_hand():
    # batch 1: 2 GB of weights and 1001 positions of 2*10*2*50*2 = 4000 bytes, at 1000 GB/s
    assert step_seconds(TARGET, GPU, 1, 1, 1000) == pytest.approx((2e9 + 1001 * 4000) / 1e12)
    # five tokens of one sequence share the weights and the cache
    assert step_seconds(TARGET, GPU, 1, 5, 1000) == pytest.approx((2e9 + 1005 * 4000) / 1e12)
    # batch 400: 400 * (2 * 1e9 + 4*10*8*50*1000) flops at 100 TFLOPS, more than the bytes' time
    flops = 400 * (2e9 + 16e6)
    assert step_seconds(TARGET, GPU, 400, 1, 1000) == pytest.approx(flops / 100e12)
    assert step_seconds(TARGET, GPU, 400, 5, 1000) == pytest.approx(5 * flops / 100e12)
    half = Device("half", 100, 1000, 10, efficiency=0.5)
    assert step_seconds(TARGET, half, 1, 1, 1000) == pytest.approx(2 * (2e9 + 1001 * 4000) / 1e12)
    two = GPU.times(2)
    assert (two.tflops, two.gbps, two.memory_gb, GPU.times(1)) == (200, 2000, 20, GPU)


def test_speedup_by_hand():
    verify = (2e9 + 1005 * 4000) / 1e12
    draft = 4 * (100e6 + 1001 * 400) / 1e12
    tau = 1 + 0.8 + 0.56 + 0.336 + 0.168
    s = setup()
    assert s.round_seconds(CHAIN, 1) == pytest.approx(verify + draft)
    assert s.token_seconds(CHAIN, 1) == pytest.approx((verify + draft) / tau)
    assert s.speedup(CHAIN, 1) == pytest.approx(tau * (2e9 + 1001 * 4000) / 1e12 / (verify + draft))
    assert s.rate(CHAIN, 8) == pytest.approx(8 * tau / s.round_seconds(CHAIN, 8))
    assert s.speedup(PLAIN, 7) == 1
    assert setup(draft=Draft()).draft_seconds(CHAIN, 1) == 0
    # all at once, in one step
    assert setup(draft=Draft(HEAD, parallel=True)).draft_seconds(CHAIN, 1) == pytest.approx(draft / 4)
    # 60 nodes in 6 levels: 6 steps of 10 tokens
    tree = Plan.tree(3.5, 60, 6)
    assert s.draft_seconds(tree, 3) == pytest.approx(6 * step_seconds(HEAD, GPU, 3, 10, 1000))
    assert s.verify_seconds(tree, 3) == step_seconds(TARGET, GPU, 3, 61, 1000)


def test_parameters_are_counted_as_the_real_model_has_them():
    for changes in ({"tie_word_embeddings": False}, {"tie_word_embeddings": True, "num_key_value_heads": 2}):
        config = tiny.config(**changes)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        assert dense_parameters(shape_from_config(config)) == sum(p.numel() for p in model.parameters())
    expect = load_recipe("recipes/llama-3.1-8b-eagle3.yaml").target.expect
    assert dense_parameters(expect.shape()) == expect.parameters == 8_030_261_248
    model = Model.of(expect.shape())
    assert model.active == 8_030_261_248 - 128256 * 4096  # rows of the embedding are looked up, not multiplied
    assert model.kv_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    tied = expect.shape().replace(tied=True)
    assert Model.of(tied).active == dense_parameters(tied)


def test_distinct_experts_as_simulated():
    """Bound: five standard errors; a count's deviation is below sqrt(E)/2 (its variance is below E/4)."""
    e, rng, trials = Experts(32, 4, 1), random.Random(3), 4000
    for tokens in (1, 5, 40):
        total = sum(len({x for _ in range(tokens) for x in rng.sample(range(32), 4)}) for _ in range(trials))
        assert total / trials == pytest.approx(e.touched(tokens), abs=5 * math.sqrt(32) / 2 / math.sqrt(trials))
    assert e.touched(1) == pytest.approx(4)


def test_a_mixture_reads_more_experts_for_more_tokens():
    moe = Model(1_000_000_000, 10, 8, 2, 50, experts=Experts(32, 4, 800_000_000))
    assert moe.active == pytest.approx(300e6)
    assert moe.bytes_read(1) == pytest.approx(600e6)
    assert moe.bytes_read(10**6) == pytest.approx(2e9)
    # so that verifying five tokens is not free at batch 1, as it nearly is for a dense target: nearly twice the bytes
    assert moe.bytes_read(5) == pytest.approx(2 * (200e6 + 800e6 * (1 - (7 / 8) ** 5)))
    assert step_seconds(moe, GPU, 1, 5, 0) > 1.9 * step_seconds(moe, GPU, 1, 1, 0)
    assert setup(target=moe).speedup(CHAIN, 1) < setup().speedup(CHAIN, 1)
    with pytest.raises(ValueError, match="give the number of all parameters"):
        Model(800_000_000, 10, 8, 2, 50, experts=Experts(32, 4, 800_000_000))
    with pytest.raises(ValueError, match="40 of 32 experts"):
        Model(1_000_000_000, 10, 8, 2, 50, experts=Experts(32, 40, 800_000_000))


def test_speculation_stops_paying_at_a_large_batch():
    s = setup(context=200)
    assert s.speedup(CHAIN, 1) > 2
    assert s.speedup(CHAIN, 4096) < 1
    at = s.stops_paying_at(CHAIN, 1000)
    assert s.speedup(CHAIN, at - 1) > 1 and all(s.speedup(CHAIN, b) <= 1 for b in range(at, 1001))
    assert s.best([CHAIN], at) == PLAIN and s.best([CHAIN], 1) == CHAIN
    # a useless drafter never pays; a batch that is bound by its KV caches pays at any size, since k+1 tokens share them
    assert setup().stops_paying_at(Plan.chain([0.0], 1)) == 1
    assert setup(context=2_000_000, device=Device("wide", 10_000, 1000, 10)).stops_paying_at(CHAIN) is None
    assert s.best([Plan.chain([0.0], 1)], 1) == PLAIN


def test_more_batch_never_makes_a_token_faster():
    for plan in (PLAIN, CHAIN):
        times = [setup().token_seconds(plan, b) for b in range(1, 600)]
        assert times == sorted(times)


def test_memory_by_hand():
    s = setup()
    assert s.memory_bytes(PLAIN, 10) == 2e9 + 10 * 1000 * 4000
    # the head's weights, four nodes for the length of a round, and the head's own cache of 400 bytes a position
    assert s.memory_bytes(CHAIN, 10) == 2e9 + 0.1e9 + 10 * 1004 * 4400
    assert s.largest_in_memory(PLAIN) == math.floor((9e9 - 2e9) / 4e6) == 1750
    assert setup(draft=Draft()).sequence_bytes(CHAIN) == 1004 * 4000
    assert s.largest_in_memory(CHAIN) < s.largest_in_memory(PLAIN)  # it does not shrink the cache
    assert setup(device=Device("small", 1, 1, 2)).largest_in_memory(PLAIN) == 0


def test_layers_that_keep_less_than_all_keys_and_values_by_hand():
    # 2 full layers, 3 that keep 400 positions, 576 values of 2 bytes in each
    model = Model(1_000_000_000, 6, 8, 8, 50, cache=Cache(576, full=2, width=1088, windowed=3, window=400))
    assert model.kv_per_token == 5 * 576 * 2
    assert model.kv_of(100, 4) == 5 * 104 * 1152
    assert model.kv_of(1000, 4) == (2 * 1004 + 3 * 404) * 1152
    s = setup(target=model, draft=Draft())
    assert s.sequence_bytes(PLAIN) == (2 * 1000 + 3 * 400) * 1152
    assert s.sequence_bytes(CHAIN) == model.kv_of(1000, 4)
    # batch 1 moves the weights and the caches; batch 2000 computes 2 flops for each multiplication
    assert step_seconds(model, GPU, 1, 1, 1000) == pytest.approx((2e9 + (2 * 1001 + 3 * 401) * 1152) / 1e12)
    flops = 2000 * (2e9 + 2 * 8 * 1088 * (2 * 1000 + 3 * 400))
    assert step_seconds(model, GPU, 2000, 1, 1000) == pytest.approx(flops / 100e12)
    # as a model without this field counts: keys and values of all layers
    assert Model(10**9, 10, 8, 2, 50, cache=Cache(200, 10, 100)).kv_of(7) == TARGET.kv_of(7)
    assert step_seconds(Model(10**9, 10, 8, 2, 50, cache=Cache(200, 10, 100)), GPU, 400, 5, 1000) == step_seconds(
        TARGET, GPU, 400, 5, 1000
    )
    small = model.cache.smaller(0.5)
    assert (small.full, small.windowed) == (1, 2)
    assert Cache(576, 3, 1).smaller(0.01).full == 1


@pytest.mark.parametrize("plan", [PLAIN, CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("slo", [0.0025, 0.004, 0.02])
def test_capacity_is_what_trying_every_batch_finds(plan, slo):
    s = setup()
    fits = [b for b in range(1, s.largest_in_memory(plan) + 1) if s.token_seconds(plan, b) <= slo]
    found = capacity(s, plan, Load(slo, users=5000))
    assert found.batch == max(fits) and found.gpus == math.ceil(5000 / max(fits))
    assert found.limit == ("SLO" if max(fits) < s.largest_in_memory(plan) else "memory")
    assert found.token_ms <= slo * 1e3
    by_rate = capacity(s, plan, Load(slo, tokens_per_second=1e6))
    assert by_rate.gpus == math.ceil(1e6 / s.rate(plan, max(fits)))


def test_fewer_gpus_for_an_slo_that_plain_decoding_barely_meets():
    s, tight = setup(), Load(0.0021, users=1000)
    plain, fast = capacity(s, PLAIN, tight), cheapest(s, [PLAIN, *[Plan.chain(ALPHAS, k) for k in (1, 2, 3, 4)]], tight)
    assert fast.plan.k > 0 and fast.gpus < plain.gpus
    loose = Load(1.0, tokens_per_second=1e6)  # throughput alone: speculation only adds arithmetic
    assert cheapest(s, [PLAIN, CHAIN], loose).plan == PLAIN


def test_an_slo_that_cannot_be_met_is_said():
    s = setup()
    none = capacity(s, PLAIN, Load(0.001, users=10))  # one step takes 2 ms
    assert (none.batch, none.limit, none.gpus) == (0, "SLO", None)
    assert none.token_ms == pytest.approx(2.004004)
    assert capacity(s, CHAIN, Load(0.001, users=10)).gpus == 1  # speculation meets it
    assert cheapest(s, [PLAIN, CHAIN], Load(0.0001, users=10)).gpus is None
    assert cheapest(s, [PLAIN, CHAIN], Load(0.0001, users=10)).plan == CHAIN  # the nearest
    too_big = capacity(setup(device=Device("small", 1, 1, 2)), PLAIN, Load(1, users=1))
    assert isinstance(too_big, Capacity) and (too_big.limit, too_big.gpus) == ("memory", None)


def test_replicas_of_several_gpus():
    s = setup(device=GPU.times(4))
    assert capacity(s, PLAIN, Load(0.002, users=5000), 4).gpus % 4 == 0


def test_bad_input():
    for bad in (0, -1, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="SLO"):
            Load(bad, users=1)
        with pytest.raises(ValueError, match="load"):
            Load(1, users=bad)
        for name in ("tflops", "gbps", "memory_gb", "efficiency"):
            with pytest.raises(ValueError, match=name):
                Device("x", **{**dict(tflops=1, gbps=1, memory_gb=1), name: bad})
        with pytest.raises(ValueError, match="context"):
            setup(context=bad)
        for name in ("parameters", "weight_bytes", "kv_bytes"):
            with pytest.raises(ValueError, match=name):
                Model(**{**dict(parameters=1, layers=1, heads=1, kv_heads=1, head_dim=1), name: bad})
        with pytest.raises(ValueError, match="batch"):
            setup().speedup(CHAIN, bad)
        with pytest.raises(ValueError, match="GPUs"):
            GPU.times(bad)
    with pytest.raises(ValueError, match="tflops 1e-300"):
        Device("x", 1e-300, 1, 1)
    for both in ({}, {"users": 1, "tokens_per_second": 1}):
        with pytest.raises(ValueError, match="give either"):
            Load(1, **both)
    with pytest.raises(ValueError, match="efficiency"):
        Device("x", 1, 1, 1, 1.5)
    with pytest.raises(ValueError, match="context"):
        setup(context=0)
    with pytest.raises(ValueError, match="usable"):
        setup(usable=0)
    with pytest.raises(ValueError, match="batch"):
        setup().speedup(CHAIN, 0)
    with pytest.raises(ValueError, match="parameters"):
        Model(0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="tau 8"):
        Plan.tree(8, 60, 6)
    with pytest.raises(ValueError, match="tree nodes 3"):
        Plan.tree(2, 3, 6)
    with pytest.raises(ValueError, match="GPUs"):
        GPU.times(0)


def test_named_devices_are_usable():
    for device in DEVICES.values():
        ridge = device.tflops * 1e12 / (device.gbps * 1e9)  # flops a byte where compute begins to bound
        assert 100 < ridge < 500, device
