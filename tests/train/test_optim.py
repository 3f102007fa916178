from __future__ import annotations

import math

import pytest
import torch
import toyhead

from headtrain.config import TrainSection
from headtrain.train.optim import HeadOptimizer, Muon, hidden_matrix, lr_factor


def curve(schedule, total=100, warmup=0.1, decay=0.2, min_lr=0.0):
    return [lr_factor(s, total, schedule, warmup, decay, min_lr) for s in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
def test_schedule_reaches_its_end_at_the_last_step(schedule, min_lr):
    """CASES 33."""
    got = curve(schedule, min_lr=min_lr)
    assert got[-1] == pytest.approx(min_lr, abs=1e-12)
    assert got[9] == 1.0 and max(got) == 1.0
    assert got[:10] == pytest.approx([s / 10 for s in range(1, 11)])
    assert all(a >= b for a, b in zip(got[9:], got[10:], strict=False)) and got[-2] > min_lr


def test_schedule_shapes():
    assert curve("constant")[9:] == [1.0] * 91
    assert curve("linear")[54] == pytest.approx(0.5)
    assert curve("cosine")[54] == pytest.approx(0.5)
    wsd = curve("wsd")
    assert wsd[79] == 1.0 and wsd[89] == pytest.approx(0.5) and wsd[80] < 1
    assert curve("cosine", warmup=25)[24] == 1.0 and curve("cosine", warmup=25)[23] < 1  # in steps where not below 1
    for schedule in ("cosine", "linear", "constant", "wsd"):  # a run of one step still learns
        assert lr_factor(1, 1, schedule, 0.03, 0.2, 0.0) == 1.0


def test_muon_is_torchs():
    """Bit for bit in bf16; and in fp32 an update whose singular values are about 1."""
    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        a = torch.nn.Parameter(torch.randn(shape))
        b = torch.nn.Parameter(a.detach().clone())
        mine = Muon([a], lr=0.02, weight_decay=0.1, dtype=torch.bfloat16)
        theirs = torch.optim.Muon([b], lr=0.02, weight_decay=0.1)
        for _ in range(3):
            a.grad = torch.randn(shape)
            b.grad = a.grad.clone()
            mine.step()
            theirs.step()
        assert torch.equal(a, b)
    exact = Muon([torch.nn.Parameter(torch.randn(8, 30))], 1.0, 0.0, torch.float32)
    values = torch.linalg.svdvals(exact._orthogonal(torch.randn(8, 30)))
    assert values.min() > 0.5 and values.max() < 1.5


def test_muon_takes_hidden_matrices_alone():
    head = toyhead.Toy(toyhead.ToyConfig())
    opt = HeadOptimizer(head, TrainSection(optimizer="muon", muon_lr=0.02, lr=1e-3, weight_decay=0.1), torch.float32)
    taken = {opt.names[p] for g in opt.parts["muon"].param_groups for p in g["params"]}
    assert taken == {"mix.0", "mix.1", "mix.2"}
    assert not hidden_matrix(head, head.lm_head)
    decay = {opt.names[p]: g["weight_decay"] for g in opt.parts["adamw"].param_groups for p in g["params"]}
    assert decay == {"lm_head": 0.1, "norm.0": 0.0, "norm.1": 0.0, "norm.2": 0.0}


def test_step_scales_base_rates():
    head = toyhead.Toy(toyhead.ToyConfig())
    opt = HeadOptimizer(head, TrainSection(optimizer="muon", muon_lr=0.02, lr=1e-3), torch.float32)
    for factor in (0.5, 0.25):
        opt.step(factor)
        rates = {name: {g["lr"] for g in part.param_groups} for name, part in opt.parts.items()}
        assert rates == {"adamw": {1e-3 * factor}, "muon": {0.02 * factor}}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_round_trip(kind):
    """An optimizer restored from its flat state goes on bit for bit."""
    settings = TrainSection(optimizer=kind, lr=0.01)

    def gradients(head, seed):
        g = torch.Generator().manual_seed(seed)
        for p in head.parameters():
            p.grad = torch.randn(p.shape, generator=g)

    one = toyhead.Toy(toyhead.ToyConfig())
    opt = HeadOptimizer(one, settings, torch.float32)
    gradients(one, 1)
    opt.step(1.0)
    two = toyhead.Toy(toyhead.ToyConfig())
    two.load_state_dict(one.state_dict())
    again = HeadOptimizer(two, settings, torch.float32)
    again.load_state({k: v.clone() for k, v in opt.state().items()})
    for head, o in ((one, opt), (two, again)):
        gradients(head, 2)
        o.step(0.5)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="no such parameter"):
        again.load_state({f"{kind}/nowhere/exp_avg": torch.zeros(2)})
    state = opt.state()
    name = next(n for n in state if n.endswith(("exp_avg", "momentum_buffer")))
    with pytest.raises(ValueError, match="shape"):
        again.load_state({name: torch.zeros(3)})
    if kind == "adamw":
        with pytest.raises(ValueError, match="missing"):
            again.load_state({n: t for n, t in state.items() if n != name})


def test_unknown_schedule():
    with pytest.raises(ValueError, match="unknown schedule"):
        lr_factor(50, 100, "step", 0.1, 0.2, math.pi)
