from __future__ import annotations

import copy
import json
import shutil
import sys
from collections import Counter

import checkpoint_families
import pytest
import tiny
import torch
import transformers
from rich.console import Console
from test_conformance import CASES, VARIANTS

from headtrain.config import LoraSection, Recipe, RecipeError, TargetSection, TrainSection
from headtrain.heads.catalog import HEADS, build_head, parse_head
from headtrain.heads.io import head_metadata, head_tensors, load_head, read_tensors, save_head
from headtrain.target.load import load_target
from headtrain.target.model import Target
from headtrain.train import lora
from headtrain.train.backend import Backend
from headtrain.train.checkpoint import CheckpointError
from headtrain.train.replicated import HeadLoss
from headtrain.train.setup import prepare_run
from headtrain.train.trainer import train
from headtrain.types import Batch, Wants

ROWS = tiny.rows((24, 9))
SECTION = LoraSection(r=3, alpha=7.5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Of a family that every head fits: its checkpoints hold a draft module of their own."""
    folder = tmp_path_factory.mktemp("mimo")
    checkpoint_families.save(folder, "mimo", tokenizer=tiny.tokenizer(), vocab_size=384, num_hidden_layers=8)
    return load_target(TargetSection(path=str(folder)))


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


def build(target, kind, number=0, full_vocab=False):
    """A head without a zero in it: no branch is closed, so that every matrix matters."""
    config = parse_head({"kind": kind, **VARIANTS[kind][number], **({"draft_vocab_size": None} if full_vocab else {})})
    size = HEADS[kind].uses_draft_vocab(config, target.shape)
    ids = None
    if size is not None:  # with the target's own tokens in it, else no position trains
        batch = Batch.pack(ROWS)
        greedy = target.features(batch, Wants(layers=())).argmax.unique()
        others = [i for i in range(target.shape.vocab_size) if i not in set(greedy.tolist())]
        ids = torch.cat([greedy, torch.tensor(others)])[:size].sort().values
    torch.manual_seed(1)
    head = build_head(config, target.shape, ids)
    head.attach(target.weights())
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return head


def loss(head, target):
    batch = Batch.pack(ROWS)
    return head.loss(batch, target.features(batch, head.wants()), target.teacher(), head.wants().depth).total


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_adapted_matrix_acts_and_learns(target, case):
    check_adapted(build(target, *case), target)


@pytest.mark.parametrize(
    ("family", "kind"), [("deepseek", "mtp-checkpoint"), ("qwen3.5-moe", "mtp-checkpoint"), ("qwen3_moe", "mtp")]
)
def test_so_does_every_expert(tmp_path, family, kind):
    """They lie in one tensor [experts, out, in]: each has an A and a B of its own."""
    if family == "qwen3_moe":
        sizes = dict(checkpoint_families.SIZES, vocab_size=384, num_hidden_layers=8)
        more = dict(checkpoint_families.MOE, num_experts=4, head_dim=8)
        target = Target.of(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more)))
    else:
        checkpoint_families.save(tmp_path, family, tokenizer=tiny.tokenizer(), vocab_size=384)
        target = load_target(TargetSection(path=str(tmp_path)))
    head = build(target, kind)
    experts = {n: p.shape for n, p in head.named_parameters() if p.ndim == 3}
    assert len(experts) == 2
    check_adapted(head, target)
    ab = lora.state(head)
    for name, (count, out, size) in experts.items():
        a, b = ab[f"{name}.lora_A"], ab[f"{name}.lora_B"]
        assert a.shape == (count, 3, size) and b.shape == (count, out, 3) and len(a.flatten(1).unique(dim=0)) == count


def check_adapted(head, target):
    """Against a head whose matrices are plainly W + (alpha / r) B A: the same loss, and the gradients of A and B that
    follow from the gradient of W. And no update can be left out without changing the loss."""
    plain = copy.deepcopy(head)
    matrices = [n for n, p in plain.named_parameters() if p.ndim > 1]
    with torch.no_grad():
        before = loss(head, target)
        assert lora.inject(head, SECTION, seed=0) == matrices and len(matrices) > 1
        torch.testing.assert_close(loss(head, target), before, rtol=0, atol=0)  # B is zero
        ab = lora.state(head)
        assert set(ab) == {f"{n}.lora_{x}" for n in matrices for x in "AB"}
        for p in ab.values():
            p.copy_(torch.randn_like(p) * 0.1)
        for name in matrices:
            plain.get_parameter(name).add_(ab[f"{name}.lora_B"] @ ab[f"{name}.lora_A"] * 2.5)
    want = loss(plain, target)
    want.backward()
    got = loss(head, target)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for name in matrices:
        a, b, g = ab[f"{name}.lora_A"], ab[f"{name}.lora_B"], plain.get_parameter(name).grad
        assert float(g.norm()) > 0 and float(a.grad.norm()) > 0 and float(b.grad.norm()) > 0, name
        for mine, theirs in ((a.grad, 2.5 * b.detach().mT @ g), (b.grad, 2.5 * g @ a.detach().mT)):
            assert float((mine - theirs).norm()) <= 1e-4 * float(theirs.norm()), name  # sums in another order
        with torch.no_grad():
            kept = b.clone()
            b.zero_()
            assert float(loss(head, target)) != float(got), f"the update of {name} changes nothing"
            b.copy_(kept)
    frozen = [n for n, p in head.named_parameters() if not p.requires_grad]
    assert len(frozen) == len(list(plain.parameters())) and all(head.get_parameter(n).grad is None for n in frozen)


@pytest.mark.parametrize("kind", HEADS)
def test_a_saved_head_is_merged_and_an_adapter_comes_back(target, kind, tmp_path):
    head = build(target, kind)
    again = copy.deepcopy(head)
    names = list(head.state_dict())
    lora.inject(head, LoraSection(r=2, dropout=0.5), seed=0)
    with torch.no_grad():
        for p in lora.state(head).values():
            p.add_(torch.randn_like(p) * 0.1)
    save_head(tmp_path, head, head_metadata(head, target.identity))
    read, _ = load_head(tmp_path)
    assert list(read.state_dict()) == names
    read.attach(target.weights())
    assert head.training  # dropout is on while training only, and never in what is saved
    torch.testing.assert_close(loss(read.eval(), target), loss(head.eval(), target), rtol=1e-6, atol=0)
    lora.inject(again, LoraSection(r=2, dropout=0.5), seed=5)
    saved = head_tensors(head)
    saved.pop("draft_ids", None)  # as a checkpoint gives it
    lora.load(again, lora.state(head), saved, "here")
    assert all(
        torch.equal(a, b) for a, b in zip(head_tensors(again).values(), head_tensors(head).values(), strict=True)
    )
    with torch.no_grad():
        next(p for n, p in again.named_parameters() if n.endswith(".original")).add_(0.1)
    with pytest.raises(ValueError, match="train.warm_start"):
        lora.load(again, lora.state(head), saved, "here")
    with pytest.raises(ValueError, match="not the adapter of this head"):
        lora.load(again, dict(list(lora.state(head).items())[1:]), saved, "here")


def test_dropout_is_drawn_once_for_a_micro_batch_and_keeps_the_mean():
    torch.manual_seed(0)
    weight = torch.randn(6, 50)
    summed = lora._Sum(weight, LoraSection(r=4, alpha=4, dropout=0.25))
    with torch.no_grad():
        summed.lora_B.normal_()
        full = summed.eval()(weight) - weight
        torch.testing.assert_close(full, summed.lora_B @ summed.lora_A)
        draws = torch.stack([summed.train()(weight) - weight for _ in range(400)])
    dropped = (draws == 0).all(1)  # whole inputs
    assert 0.2 < float(dropped.float().mean()) < 0.3
    torch.testing.assert_close(draws[0][:, ~dropped[0]], full[:, ~dropped[0]] / 0.75)


def test_a_seed_gives_the_same_start(target):
    starts = []
    for drawn, seed in ((1, 3), (2, 3), (2, 4)):
        head = build(target, "eagle3")
        torch.rand(drawn)  # whatever was drawn before
        lora.inject(head, SECTION, seed)
        starts.append(lora.state(head)["fc.weight.lora_A"])
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_targets_choose_by_name(target):
    head = build(target, "eagle3")
    assert lora.inject(head, LoraSection(r=2, targets=["q_proj", "mlp.up_proj.weight"]), 0) == [
        "midlayer.self_attn.q_proj.weight", "midlayer.mlp.up_proj.weight",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match="train.lora.targets: no matrix is called roj; there are .*down_proj"):
        lora.inject(build(target, "eagle3"), LoraSection(targets=["roj"]), 0)


def test_says_what_is_missing(target, monkeypatch):
    with pytest.raises(ValueError, match="name it in train.warm_start"):
        TrainSection(lora={})
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match=r"pip install 'headtrain\[peft\]'"):
        lora.inject(build(target, "eagle3"), SECTION, 0)


def recipe(folder, data, output, **train) -> Recipe:
    return Recipe(
        name="tiny",
        target={"path": str(folder)},
        data={"train": [str(data)], "max_length": 200},
        features={"dtype": "float32", "dir": str(data.parent / "features")},
        head={"kind": "eagle3", "depth": 3, "draft_vocab_size": None},
        train={"steps": 4, "batch_tokens": 256, "lr": 3e-3, "save_every": 2, "precision": "fp32", "keep": 9, **train},
        output=str(output),
    )


def test_adapts_a_trained_head_and_resumes_bit_for_bit(target, tmp_path, backend):
    data, quiet = tmp_path / "rows.jsonl", Console(quiet=True)
    turns = [[("user", f"hello {i}"), ("assistant", "The quick brown fox " * (i % 3 + 1))] for i in range(12)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in turn]}) for turn in turns]
    data.write_text("\n".join(lines) + "\n")
    started, head = tmp_path / "started", build(target, "eagle3", full_vocab=True)
    save_head(started, head, head_metadata(head, target.identity))
    more = dict(warm_start=str(started), lora={"r": 4, "alpha": 8, "dropout": 0.1})
    whole, part = (recipe(target.folder, data, tmp_path / name, **more) for name in ("whole", "part"))
    one = train(whole, prepare_run(whole, backend, quiet), backend).last
    train(part, prepare_run(part, backend, quiet), backend)
    shutil.rmtree(tmp_path / "part/checkpoints/step-000004")
    setup = prepare_run(part, backend, quiet)
    assert {n.rpartition(".")[2] for n in setup.head.trainable()} == {"lora_A", "lora_B"}
    two = train(part, setup, backend).last
    for file in ("head.safetensors", "lora.safetensors", "optimizer.safetensors"):
        a, b = read_tensors(one / file), read_tensors(two / file)
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a), file
    base, saved = read_tensors(started / "head.safetensors"), read_tensors(one / "head.safetensors")
    assert base.keys() == saved.keys() and torch.equal(base["norm.weight"], saved["norm.weight"])
    ab = read_tensors(one / "lora.safetensors")
    for name in (n.removesuffix(".lora_A") for n in ab if n.endswith("_A")):
        assert not torch.equal(base[name], saved[name]), name
        torch.testing.assert_close(saved[name], base[name] + ab[f"{name}.lora_B"] @ ab[f"{name}.lora_A"] * 2)
    head, _ = load_head(one)  # any tool reads it as a head like any other
    assert not lora.adapted(head)
    again = recipe(target.folder, data, tmp_path / "whole", **{**more, "lora": {"r": 2}})
    with pytest.raises(CheckpointError, match="train.lora.r: 4 in the checkpoint, 2 now"):
        train(again, setup, backend)


def test_an_adapted_weight_is_computed_once_a_micro_batch(target):
    """However often a head reads it: in every chunk of a loss, at every depth."""
    head, batch, calls = build(target, "eagle3"), Batch.pack(ROWS), Counter()
    lora.inject(head, SECTION, seed=0)
    sums = [(name, module) for name, module in head.named_modules() if type(module).__name__ == "_Sum"]
    for name, module in sums:
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    HeadLoss(head)(batch, target.features(batch, head.wants()), target.teacher(), head.wants().depth)
    assert calls == {name: 1 for name, _ in sums}
