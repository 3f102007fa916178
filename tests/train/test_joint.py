"""Joint training of a head and the target's adapter, against plain transformers + peft + autograd."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace

import peft
import pytest
import tiny
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from headtrain.cli import app
from headtrain.config import JointSection, Recipe, TargetSection
from headtrain.export.check import check
from headtrain.export.core import export_head
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import read_tensors
from headtrain.metadata import Metadata
from headtrain.target.features import features_in_graph
from headtrain.target.load import load_target
from headtrain.target.model import Target
from headtrain.train.backend import Backend
from headtrain.train.checkpoint import CheckpointError
from headtrain.train.joint import Joint, head_weight, no_features
from headtrain.train.optim import HeadOptimizer
from headtrain.train.setup import prepare_run
from headtrain.train.trainer import train
from headtrain.types import Batch

LORA = {"r": 4, "alpha": 6}
MEDUSA = {"kind": "medusa", "num_heads": 3}


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


def test_schedules():
    constant, sine = JointSection(), JointSection(base_loss="kl")
    assert [head_weight(constant, s, 10) for s in (1, 5, 10)] == [0.2] * 3
    want = [0.01 * math.sin(math.pi / 2 * s / 10) for s in (1, 5, 10)]
    assert [head_weight(sine, s, 10) for s in (1, 5, 10)] == pytest.approx(want) and want[-1] == 0.01
    staged = JointSection(base_loss="kl", heads_first=0.5, c=2.0)
    assert [head_weight(staged, s, 20) for s in (1, 10)] == [None, None]
    assert [head_weight(staged, s, 20) for s in (11, 20)] == pytest.approx([2 * math.sin(math.pi / 20), 2.0])
    assert head_weight(JointSection(schedule="sine"), 5, 10) == pytest.approx(0.2 * math.sin(math.pi / 4))
    assert head_weight(JointSection(base_loss="kl", schedule="constant"), 1, 10) == 0.01


def joint_of(head_config, section, spread=0.1, **changes):
    target = Target.of(tiny.model(tie_word_embeddings=False, **changes))
    config = parse_head(head_config)
    torch.manual_seed(1)
    head = build_head(config, target.shape, None)
    head.attach(target.weights())
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    joint = Joint(head, target, JointSection(**{"lora": LORA, **section}), seed=0)
    with torch.no_grad():
        for p in joint.adapter.parameters():
            p.add_(torch.randn_like(p) * spread)
    return joint


def reference(joint, rows, weight, kl):
    """Medusa-2's loss from its formula, with dense logits, one document at a time: returns L and its gradients."""
    model = peft.get_peft_model(tiny.model(tie_word_embeddings=False), copy.deepcopy(joint.adapter.config))
    peft.set_peft_model_state_dict(model, {n: p.detach() for n, p in joint.adapter.named().items()})
    head = copy.deepcopy(joint.head)
    lm_head = model.get_output_embeddings().weight
    total = torch.zeros(())
    for row in rows:
        ids, turn = torch.tensor(row.ids), row.turn
        out = model(input_ids=ids[None], output_hidden_states=True)
        final, logits = out.hidden_states[-1][0], out.logits[0]
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=ids[None]).logits[0]
        for i in range(len(ids) - 1):
            if not turn[i + 1]:
                continue
            if kl:
                p, q = base[i].log_softmax(-1), logits[i].log_softmax(-1)
                total = total + (p.exp() * (p - q)).sum()
            else:
                total = total + cross_entropy(logits[i], ids[i + 1])
            for k in range(1, 4):
                if i + 1 + k < len(ids) and turn[i + 1 + k] == turn[i + 1]:
                    x = final[i]
                    block = head.blocks[k - 1].layers[0]
                    x = x + torch.nn.functional.silu(x @ block.weight.T + block.bias)
                    loss = cross_entropy(x @ head.lm_heads[k - 1].weight.T, ids[i + 1 + k])
                    total = total + weight * 0.8**k * loss
    total.backward()
    assert lm_head.grad is None
    grads = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    return total.detach(), grads | {n: p.grad for n, p in head.named_parameters()}


@pytest.mark.parametrize("base_loss", ["ce", "kl"])
def test_loss_and_every_gradient_against_the_formula(base_loss):
    joint, rows = joint_of(MEDUSA, {"base_loss": base_loss}), tiny.rows((24, 9))
    joint.at(3, 4)
    weight = 0.2 if base_loss == "ce" else 0.01 * math.sin(math.pi / 2 * 0.75)
    assert joint.weight == pytest.approx(weight)
    batch = Batch.pack(rows)
    sums = joint.loss(batch, no_features(batch, joint.head.wants()), joint.target.teacher(), 3)
    sums.total.backward()
    total, grads = reference(joint, rows, weight, base_loss == "kl")
    torch.testing.assert_close(sums.total.detach(), total, rtol=1e-4, atol=1e-5)
    mine = {n: p.grad for n, p in joint.adapter.named().items()}
    mine |= {n: p.grad for n, p in joint.head.named_parameters()}
    assert mine.keys() == grads.keys()
    for name, g in grads.items():  # attention and sums in another order, through eight layers
        assert float((mine[name] - g).norm()) <= 1e-3 * float(g.norm()) > 0, name
    assert all(p.grad is None for n, p in joint.target.model.named_parameters() if "lora_" not in n)


def test_kl_is_zero_at_the_start_and_its_gradient_too():
    joint = joint_of(MEDUSA, {"base_loss": "kl", "c": 1e-30}, spread=0.0)
    batch = Batch.pack(tiny.rows((24, 9)))
    joint.at(1, 1)
    total = joint.loss(batch, None, joint.target.teacher(), 3).total
    assert float(total.detach()) == pytest.approx(0, abs=1e-20)
    total.backward()
    assert all(float(p.grad.norm()) < 1e-4 for p in joint.adapter.parameters())  # sums of p - q, which round


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "eagle1", "depth": 2, "noise": 0.0},
        {"kind": "eagle3", "depth": 2, "draft_vocab_size": None},
        {"kind": "mtp", "depth": 2, "labels": "soft"},
    ],
    ids=lambda c: c["kind"],
)
def test_any_head_passes_its_gradient_into_the_target_and_its_labels_are_constants(config):
    """Position n-2 of a document is the label of its last draft and no supervised draft's input."""
    joint = joint_of(config, {}, num_hidden_layers=4)
    batch, teacher = Batch.pack(tiny.rows((24, 9))), joint.target.teacher()
    head, depth = joint.head, joint.head.wants().depth
    found = features_in_graph(joint.target, batch, head.wants())
    layers, final = found.layers.detach().requires_grad_(), found.final.detach().requires_grad_()
    total = head.loss(batch, replace(found, layers=layers, final=final), teacher, depth).total
    gradients = torch.autograd.grad(total, (layers, final), allow_unused=True)
    inputs = [g for g in gradients if g is not None]
    assert len(inputs) == 1  # layers or final
    label_only = batch.cu[1:] - 2
    at = label_only if inputs[0].ndim == 3 else torch.searchsorted(found.final_at, label_only)
    assert float(inputs[0][at].norm()) == 0 < float(inputs[0].norm())
    head.loss(batch, found, teacher, depth).total.backward()
    assert all(float(p.grad.norm()) > 0 for p in joint.adapter.parameters())


def test_learning_rates_and_stages():
    joint = joint_of(MEDUSA, {"heads_first": 0.5, "head_lr_factor": 4.0}, spread=0.0)
    recipe = Recipe(
        name="x", target={"path": "x"}, data={"train": []}, features={"mode": "online"}, head=MEDUSA,
        train={"lr": 1e-3, "joint": {"head_lr_factor": 4.0}},
    )  # fmt: skip
    optimizer = HeadOptimizer(joint.head, recipe.train, adapter=joint.adapter.named())
    rates = {id(p): g["lr"] for g in optimizer.parts["adamw"].param_groups for p in g["params"]}
    assert {rates[id(p)] for p in joint.head.parameters()} == {4e-3}
    assert {rates[id(p)] for p in joint.adapter.parameters()} == {1e-3}
    batch, teacher = Batch.pack(tiny.rows((24, 9))), joint.target.teacher()
    joint.at(2, 4)  # the first stage: the head alone, with its own loss
    alone = joint.loss(batch, None, teacher, 3).total
    with joint.adapter.disabled():
        features = joint.target.features(batch, joint.head.wants())
    assert torch.equal(alone, joint.head.loss(batch, features, teacher, 3).total)
    alone.backward()
    assert all(p.grad is None for p in joint.adapter.parameters())
    joint.at(3, 4)
    joint.loss(batch, None, teacher, 3).total.backward()
    assert all(p.grad is not None for p in joint.adapter.parameters())


def test_dropout_is_on_in_training_only():
    joint = joint_of(MEDUSA, {"lora": {**LORA, "dropout": 0.5}})
    batch, teacher = Batch.pack(tiny.rows((24, 9))), joint.target.teacher()

    def total():
        return float(joint.loss(batch, None, teacher, 3).total.detach())

    joint.train()
    assert total() != total()
    joint.eval()
    assert total() == total()


def test_features_are_not_stored(tmp_path):
    with pytest.raises(ValueError, match="features.mode=online"):
        Recipe(name="x", target={"path": "x"}, data={"train": []}, head=MEDUSA, train={"joint": {}})


WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "head"]


def recipe_for(folder, data, output, **train) -> Recipe:
    return Recipe(
        name="tiny",
        target={"path": str(folder)},
        data={"train": [str(data)], "eval": [str(data)], "max_length": 200},
        features={"mode": "online", "dtype": "float32"},
        head=MEDUSA,
        train={
            "steps": 4, "batch_tokens": 128, "accumulation": 2, "lr": 1e-2, "save_every": 2, "eval_every": 4, "keep": 9,
            "precision": "fp32", "joint": {"lora": {**LORA, "dropout": 0.1}, "heads_first": 0.25, "save": "merged"},
            **train,
        },
        output=str(output),
        eval={"prompts": [str(data)], "max_new_tokens": 6, "limit_per_route": 2, "k": 2},
    )  # fmt: skip


def write_rows(data) -> None:
    lines = []
    for i in range(10):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % 12] for j in range(12)]
        turns = [("user", " ".join(words[:3])), ("assistant", " ".join(words[2:]))]
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    data.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("joint")
    data, quiet = folder / "rows.jsonl", Console(quiet=True)
    write_rows(data)
    recipe = recipe_for(tiny_folder, data, folder / "whole")
    setup = prepare_run(recipe, backend, quiet)
    return folder, data, train(recipe, setup, backend)


def test_resume_equals_uninterrupted(tiny_folder, trained, backend):
    folder, data, result = trained
    part = recipe_for(tiny_folder, data, folder / "part")
    shutil.copytree(folder / "whole", folder / "part")
    shutil.rmtree(folder / "part/checkpoints/step-000004")
    again = train(part, prepare_run(part, backend, Console(quiet=True)), backend)
    files = (
        "head.safetensors",
        "optimizer.safetensors",
        "adapter/adapter_model.safetensors",
        "merged/model.safetensors",
    )
    for file in files:
        a, b = read_tensors(result.last / file), read_tensors(again.last / file)
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a), file
    updates = {n: int(t) for n, t in read_tensors(result.last / "optimizer.safetensors").items() if n.endswith("/step")}
    # a quarter of four steps trains the head alone; A has no gradient yet in the first step of both, as B is zero
    for kind, count in (("lora_B", 3), ("lora_A", 2), ("blocks.", 4), ("lm_heads.", 4)):
        assert {n for name, n in updates.items() if kind in name} == {count}, kind
    early = read_tensors(folder / "part/checkpoints/step-000002/adapter/adapter_model.safetensors")
    late = read_tensors(again.last / "adapter/adapter_model.safetensors")
    assert all(not torch.equal(early[n], late[n]) for n in late)
    (again.last / "adapter/adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="adapter/adapter_model.safetensors has sha256"):
        train(part, prepare_run(part, backend, Console(quiet=True)), backend)


def test_the_record_names_the_adapted_target_and_check_knows_it(tiny_folder, trained):
    _, _, result = trained
    target = Metadata.read(result.last).target
    base = load_target(TargetSection(path=str(tiny_folder))).identity
    assert target.weights == base.weights and target.adapter.config["r"] == 4 and target.acting != base.weights
    against_base = check(result.last, str(tiny_folder), probe=False)
    assert against_base.verdict == "incompatible" and "base of the trained target" in against_base.relation
    against_merged = check(result.last, str(result.last / "merged"), probe=False)
    assert against_merged.verdict == "compatible" and "merged in it" in against_merged.relation


def test_a_trained_medusa_1_starts_the_second_stage(tiny_folder, trained, backend):
    folder, data, _ = trained
    quiet = Console(quiet=True)
    alone = recipe_for(tiny_folder, data, folder / "medusa-1", joint=None)
    first = train(alone, prepare_run(alone, backend, quiet), backend).last
    later = dict(warm_start=str(folder / "medusa-1"), joint={"lora": LORA, "heads_first": 0.0})
    recipe = recipe_for(tiny_folder, data, folder / "medusa-2", **later)
    setup = prepare_run(recipe, backend, quiet)
    begun, trained_alone = setup.head.state_dict(), read_tensors(first / "head.safetensors")
    assert all(torch.equal(begun[name], value) for name, value in trained_alone.items())
    second = train(recipe, setup, backend).last
    after = read_tensors(second / "head.safetensors")
    assert all(not torch.equal(after[name], value) for name, value in trained_alone.items())
    adapter = read_tensors(second / "adapter/adapter_model.safetensors")
    assert all(float(value.norm()) > 0 for value in adapter.values())


def test_an_adapter_that_a_warm_start_does_not_continue_is_said(tiny_folder, trained, backend, capsys):
    folder, data, _ = trained
    recipe = recipe_for(tiny_folder, data, folder / "again", warm_start=str(folder / "whole"))
    prepare_run(recipe, backend, Console(stderr=True, soft_wrap=True))
    said = capsys.readouterr().err
    assert "is not continued" in said and "target.path=CHECKPOINT/merged" in said


def test_another_draft_vocabulary_keeps_the_adapter(tiny_folder, trained, tmp_path, backend):
    folder, data, _ = trained
    recipe = recipe_for(tiny_folder, data, folder / "few")
    recipe.head = {**MEDUSA, "draft_vocab_size": 24}
    train(recipe, prepare_run(recipe, backend, Console(quiet=True)), backend)
    grown = ["vocab", str(folder / "few"), "--size", "384", "--out", str(tmp_path / "grown")]
    done = CliRunner().invoke(app, grown)
    assert done.exit_code == 0, done.output + str(done.exception)
    found = check(
        tmp_path / "grown", str(next((folder / "few/checkpoints").glob("step-000004")) / "merged"), probe=False
    )
    assert found.verdict == "compatible"
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "grown"), "--out", str(tmp_path / "eval")])
    assert done.exit_code == 0, done.output + str(done.exception)


def test_eval_and_export_take_the_adapter(tiny_folder, trained, tmp_path):
    folder, _, result = trained
    run = folder / "whole"
    for more in ([], ["--target", str(result.best / "merged")]):
        done = CliRunner().invoke(app, ["eval", str(run), "--out", str(tmp_path / "eval"), *more])
        assert done.exit_code == 0, done.output + str(done.exception)
    other = CliRunner().invoke(app, ["eval", str(run), "--out", str(tmp_path / "x"), "--target", str(folder / "no")])
    assert other.exit_code != 0
    with pytest.warns(UserWarning, match="the target was trained with this head"):
        out = export_head(result.last, "vllm", tmp_path / "export")
    assert (out / "adapter/adapter_config.json").is_file()
    assert "adapter/adapter_model.safetensors" in Metadata.read(out).export.files
    assert check(out, str(result.last / "merged"), probe=False).verdict == "compatible"
