"""Every backend, on every head, gives one process's answer; a run goes on with another backend and number of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

import backend_ranks
import checkpoint_families
import pytest
import ranks
import test_joint
import tiny
import torch
from test_conformance import FAMILIES

from headtrain.config import RecipeError, TrainSection
from headtrain.heads.catalog import HEADS
from headtrain.heads.io import read_tensors
from headtrain.train import launched
from headtrain.train.replicated import Replicated
from headtrain.train.sharded import Sharded
from headtrain.train.zero import Zero, require_deepspeed

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks
ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'headtrain[deepspeed]'")
NAMES = ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero1-offload", "zero2-offload", "zero3-offload"]
KINDS = [*HEADS, "eagle3+lora", "medusa+joint", "medusa+stages", "mtp+muon"]
ON = {"lora": ["fsdp2", "zero2", "zero3"], "joint": NAMES, "stages": NAMES[:5], "muon": ["fsdp2"]}
PAIRS = [
    pytest.param(name, kind, marks=[ZERO] if name.startswith("zero") else [])
    for name in NAMES
    for kind in KINDS
    if "+" not in kind or name in ON[kind.split("+")[1]]
]


def run_ranks(target, world: int, folder: Path, *args) -> None:
    """All ranks end well."""
    folder.mkdir()
    codes = ranks.finish(ranks.start_ranks(target, world, folder, *args))
    assert codes == [0] * world, "\n".join(p.read_text()[-3000:] for p in sorted(folder.glob("rank-*.log")))


@pytest.fixture(scope="module")
def targets(tiny_folder, tmp_path_factory) -> dict[str, str]:
    found = {}
    for kind in HEADS:
        folder = tiny_folder
        if kind in FAMILIES:
            folder = tmp_path_factory.mktemp(kind)
            checkpoint_families.save(folder, FAMILIES[kind][0], tokenizer=tiny.tokenizer(), vocab_size=384)
        found[kind] = str(folder)
    return found | {kind: str(tiny_folder) for kind in KINDS if "+" in kind}


@pytest.fixture(scope="module")
def measured(targets, tmp_path_factory) -> Path:
    """All backends and heads in one pair of processes."""
    out = tmp_path_factory.mktemp("ranks")
    there = [p.values for p in PAIRS if not p.marks or not ZERO.args[0]]
    run_ranks(backend_ranks.measure_all, 2, out / "logs", str(out), targets, there)
    return out


@pytest.fixture(scope="module")
def alone(targets, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("alone")
    run_ranks(backend_ranks.measure_all, 1, out / "logs", str(out), targets, [("single", kind) for kind in KINDS])
    return {kind: read_tensors(out / f"single-{kind}.safetensors") for kind in targets}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_two_ranks_give_one_process_s_answer(measured, alone, name, kind):
    """Loss, norm and first gradient within 1e-6 of their size, and later ones within 1e-5 or by 1e-6,
    as the KL of an adapter that has barely moved is a difference of nearly equal terms. Parameters: AdamW divides a
    gradient by its own size, so that rounding in an element that is nearly zero moves it as far as any other; five
    steps of 1e-3 move a tensor by less than 5e-3 a value, and the ranks' differ by less than a thousandth of that on
    average."""
    mine, theirs = alone[kind], read_tensors(measured / f"{name}-{kind}.safetensors")
    assert mine.keys() == theirs.keys()
    assert any(key.startswith("gradient/") for key in mine)
    for key, value in mine.items():
        other = theirs[key]
        if key.startswith("numbers/"):
            first = key == "numbers/0"
            torch.testing.assert_close(other, value, rtol=1e-6 if first else 1e-5, atol=0 if first else 1e-6)
        elif key.startswith("gradient/"):
            assert float((other - value).norm()) <= 1e-6 * float(value.norm()), key
        elif value.is_floating_point():
            assert other.shape == value.shape and float((other - value).abs().mean()) <= 5e-6, key
        else:
            assert torch.equal(other, value), key


STAGES = [{"fraction": 0.5, "depth": 1}, {"fraction": 0.5, "depth": 3}]
TOY = dict(steps=6, accumulation=6, log_every=1, eval_every=3, save_every=6, warmup=1, depth_schedule=STAGES)
CHAINS = [
    [("ddp", 3, 2), ("fsdp2", 4, None)],
    pytest.param([("fsdp2", 2, 2), ("zero3", 4, 3), ("single", 1, 4), ("zero1", 4, None)], marks=ZERO),
    pytest.param([("zero3", 3, 2), ("zero2-offload", 4, 4), ("ddp", 4, None)], marks=ZERO),
    pytest.param([("zero2", 3, 4), ("zero3-offload", 2, None)], marks=ZERO),
]


@pytest.fixture(scope="module")
def toy_alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(backend_ranks.train_toy, 1, folder / "logs", str(folder / "run"), "single", TOY, None)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(f"{name}x{n}" for name, n, _ in c))
def test_a_run_goes_on_with_other_ranks_and_backends(tmp_path, toy_alone, chain):
    """Checkpoints know neither. With noise, a parameter that early stages leave unused, parts that do not divide by
    three, six micro-batches over four ranks, and a step whose loss is not finite. Tolerance: AdamW's first steps
    amplify rounding."""
    run = tmp_path / "run"
    for number, (name, world, stop) in enumerate(chain):
        run_ranks(backend_ranks.train_toy, world, tmp_path / f"logs-{number}", str(run), name, TOY, stop)
    one, many = ([json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (toy_alone, run))
    assert [(x["kind"], x["step"]) for x in one] == [(x["kind"], x["step"]) for x in many]
    assert 0 < one[-2]["bad_steps"] < 3 and one[-2]["bad_steps"] == many[-2]["bad_steps"]
    for a, b in zip(one, many, strict=True):
        for key in ("loss", "tau", "grad_norm", "supervised"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-5, nan_ok=True), (a["step"], key)
    for file in ("head", "optimizer"):
        one, many = (read_tensors(f / f"checkpoints/step-000006/{file}.safetensors") for f in (toy_alone, run))
        assert one.keys() == many.keys()
        for name in one:
            torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=5e-5)


JOINT_CHAINS = [
    [("ddp", 2, 1), ("fsdp2", 3, 3), ("single", 1, None)],
    pytest.param([("zero3", 2, 1), ("zero2", 2, 3), ("fsdp2", 2, None)], marks=ZERO),
    pytest.param([("zero1", 2, 3), ("zero3", 3, None)], marks=ZERO),
]


@pytest.fixture(scope="module")
def joint_alone(tiny_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("joint")
    run_ranks(backend_ranks.train_joint, 1, folder / "logs", joint_recipe(tiny_folder, folder / "run"), "single", None)
    return folder / "run"


def joint_recipe(target: Path, output: Path) -> dict:
    data = output.parent / "rows.jsonl"
    test_joint.write_rows(data)
    return test_joint.recipe_for(target, data, output, keep=1, log_every=1).model_dump()


@pytest.mark.slow
@pytest.mark.parametrize("chain", JOINT_CHAINS, ids=lambda c: "-".join(name for name, *_ in c))
def test_a_joint_run_on_several_backends_is_one_process_s(tmp_path, tiny_folder, joint_alone, chain):
    """Head and target trained together, through a stage of the head alone, dropout, evaluation and saving the merged
    target, stopped and gone on with elsewhere."""
    recipe = joint_recipe(tiny_folder, tmp_path / "run")
    for number, (name, world, stop) in enumerate(chain):
        run_ranks(backend_ranks.train_joint, world, tmp_path / f"logs-{number}", recipe, name, stop)
    one, many = ([json.loads(x) for x in (f / "metrics.jsonl").open()] for f in (joint_alone, tmp_path / "run"))
    assert [(x["kind"], x["step"]) for x in one] == [(x["kind"], x["step"]) for x in many]
    for a, b in zip(one, many, strict=True):
        for key in ("loss", "tau", "grad_norm", "supervised"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)
    for file in ("head", "optimizer", "adapter/adapter_model", "merged/model"):
        path = f"checkpoints/step-000004/{file}.safetensors"
        one, many = (read_tensors(f / path) for f in (joint_alone, tmp_path / "run"))
        assert one.keys() == many.keys()
        for name in one:
            assert float((many[name].float() - one[name].float()).abs().mean()) <= 2e-5, (file, name)


ENVIRONMENTS = [
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 1, expected 2"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "zero_stage 0"),
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "nvme"),
    (
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        },
        "needs zero_stage 3",
    ),
]


@pytest.mark.parametrize(("env", "message"), ENVIRONMENTS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_there_is_refused(monkeypatch, env, message):
    for name, value in {**env, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=message):
        launched.strategy()


def test_all_that_a_rank_must_know_or_nothing(monkeypatch):
    whole = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name in (*whole, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def check(**env: str) -> None:
        with mock.patch.dict(os.environ, env):
            launched.check_ranks()

    for fine in ({}, whole, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_PORT": "29500"}):
        check(**fine)
    for name in whole:
        with pytest.raises(RecipeError, match=rf"is set, and {name} not: .*accelerate launch.*torchrun"):
            check(**{n: value for n, value in whole.items() if n != name})
    with pytest.raises(RecipeError, match="OMPI_COMM_WORLD_SIZE=2 is set, and RANK, LOCAL_RANK"):
        check(OMPI_COMM_WORLD_SIZE="2")
    for name, value in (("RANK", "-1"), ("RANK", "2"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "70000")):
        with pytest.raises(RecipeError, match=f"{name}={value}.*expected"):
            check(**{**whole, name: value})


def test_as_many_ranks_as_the_launch_script_asked_for():
    """Nodes that did not find each other: each one's launcher started a training of its own."""
    whole = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for asked, env in (("2", whole), ("1", {}), ("1", {"WORLD_SIZE": "1"})):
        with mock.patch.dict(os.environ, {launched.ASKED: asked, **env}):
            launched.check_ranks()
    for asked, env, found in (("4", whole, "2"), ("2", {}, "1"), ("1", whole, "2"), ("", {}, "1")):
        with (
            mock.patch.dict(os.environ, {launched.ASKED: asked, **env}),
            pytest.raises(
                RecipeError, match=f"HEADTRAIN_WORLD={asked}, but WORLD_SIZE={found}: .*unset HEADTRAIN_WORLD"
            ),
        ):
            launched.check_ranks()


def test_strategy_follows_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched.strategy() is Replicated
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert launched.strategy() is Sharded
    with launched.hidden():
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched.strategy() is Replicated


def test_zero_says_what_it_needs(monkeypatch):
    with pytest.raises(RecipeError, match="muon updates whole matrices, which ZeRO cuts up; use adamw"):
        Zero.optimizer(None, None, TrainSection(optimizer="muon"), torch.float32, None)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RecipeError, match=r"which is not installed: pip install 'headtrain\[deepspeed\]'"):
        require_deepspeed(torch.device("cpu"))
