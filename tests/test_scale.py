"""What a rank holds and sends: the formulas against hand counts and against real ranks; the model of time by hand."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from pathlib import Path

import pytest
import ranks
import tiny
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from headtrain import scale as scale_module
from headtrain.cli import app
from headtrain.config import RecipeError, TargetSection, load_recipe
from headtrain.estimate import duration, estimate
from headtrain.scale import (
    BACKENDS,
    Cluster,
    TargetOnRanks,
    all_reduced,
    gathered,
    head_memory,
    head_traffic,
    part,
    scale,
)
from headtrain.train.plan import check_accumulation
from headtrain.types import Batch, Wants

ROOT = Path(__file__).resolve().parent.parent
WORLD, MICRO, LAYERS, HIDDEN, VOCAB = 3, 2, 8, 64, 384
SMALL = 60  # bytes: norms for clipping (8 for each of 7 tensors), flags and counters are not counted
FLAGS = {"ddp": {}, "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}} | {
    f"zero{n}": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(n)} for n in (1, 2, 3)
}


# -- real ranks ---------------------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Bytes by address of every fp32 storage that this process made since ``gc.freeze``, scalars aside."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = getattr(thing, "_local_tensor", thing)
            if local.device.type == "cpu" and local.dtype == torch.float32 and local.untyped_storage().nbytes() > 4:
                found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


class Wire(TorchDispatchMode):
    """Counts what a rank hands to collectives, as a ring sends it."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.sent = world, {}

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        if op.namespace == "c10d":
            name = op.name().split("::")[1]
            if name == "allreduce_":
                self.add("all-reduce", 2, args[0])
            elif name == "_allgather_base_":
                self.add("all-gather", 1, args[:1])
            elif name == "_reduce_scatter_base_":
                self.add("reduce-scatter", 1, args[1:2])
            else:
                self.add(name, 1, args[0])
        return op(*args, **(kwargs or {}))

    def add(self, name: str, times: int, tensors) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > SMALL:
            self.sent[name] = self.sent.get(name, 0) + times * size * (self.world - 1) / self.world


def measure_backends(rank: int, folder: str, names: list[str]) -> None:
    """On each backend the second optimizer step of the toy head: what is there when its last backward pass has ended,
    what is there more when a loss begins, and what is sent."""
    import toyhead

    from headtrain.train.backend import Backend

    results = {}
    for name in names:
        os.environ.update(FLAGS[name])
        backend = Backend("fp32", timeout=60.0)
        for flag in FLAGS[name]:
            os.environ.pop(flag, None)
        gc.freeze()  # all that is there already: neither searched nor counted
        recipe = toyhead.recipe(Path(folder) / "run", steps=2)
        setup = toyhead.setup(recipe, backend)
        items = list(setup.train.batches(0, WORLD * MICRO))
        data = [x for of in (setup.teacher, *(features for _, features in items)) for x in vars(of).values()]
        others = {x.untyped_storage().data_ptr() for x in data if isinstance(x, torch.Tensor)}
        backend.prepare(setup.head)
        optimizer = backend.optimizer(setup.head, recipe.train)
        loss, working = setup.head.loss, []

        def held(others=others) -> int:
            return sum(size for at, size in storages().items() if at not in others)

        def at_loss(*args, loss=loss, working=working, held=held):
            if not working:
                working.append(held())
            return loss(*args)

        setup.head.loss = at_loss
        for step in range(2):  # the first one sets things up
            working.clear()
            with Wire(WORLD) as wire:
                for number, item in enumerate(items):
                    backend.backward(item, setup.teacher, 3, 0, number == MICRO - 1)
                there = [backend._strategy.gradients(), [p.grad for p in setup.head.parameters()]]
                # twice: a thread of gloo may still be letting go of what it sent
                total = min(held(), time.sleep(0.2) or held()) if step else 0
                del there
                backend.normalise(10.0, 1.0)
                optimizer.step(1.0)
                optimizer.zero_grad()
        shapes = [tuple(shape) for shape in optimizer.shapes.values()]
        results[name] = {"held": total, "working": max(working), "sent": wire.sent, "shapes": shapes}
        del setup.head.loss, held, at_loss, optimizer, setup, items, backend
    torch.save(results, Path(folder) / f"backends-{rank}.pt")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("scale")
    names = [n for n in BACKENDS if not n.startswith("zero") or importlib.util.find_spec("deepspeed")]
    codes = ranks.finish(ranks.start_ranks(measure_backends, WORLD, folder, str(folder), names), 200.0)
    assert codes == [0] * WORLD, (folder / "rank-0.log").read_text()[-3000:]
    return [torch.load(folder / f"backends-{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_holds_what_the_formula_says(measured, backend):
    """The largest part is rank 0's; no rank holds more."""
    if backend not in measured[0]:
        pytest.skip("deepspeed is not installed")
    found = [rank[backend] for rank in measured]
    of = head_memory(found[0]["shapes"], backend, WORLD)
    expected = sum(size for name, size in of.items() if name != "working")
    assert found[0]["held"] == expected
    # what fills up the last rank's part comes in a copy of it
    filled = 4 * part(found[0]["shapes"], backend, WORLD) if backend in ("zero1", "zero2") else 0
    assert all(rank["held"] <= expected + filled for rank in found)
    # what is gathered for a forward pass is there when the loss begins, and is counted
    assert all(rank["working"] <= expected + of["working"] for rank in found)
    if backend in ("fsdp2", "zero3"):
        whole = 4 * WORLD * part(found[0]["shapes"], backend, WORLD)
        gradients = of["gradients"]  # of this step: not there yet at its first micro-batch
        assert found[0]["working"] >= expected - gradients + whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_sends_what_the_formula_says(measured, backend):
    if backend not in measured[0]:
        pytest.skip("deepspeed is not installed")
    for rank in measured:
        found = rank[backend]
        assert found["sent"] == pytest.approx(head_traffic(found["shapes"], backend, WORLD, MICRO))


def measure_targets(rank: int, folder: str) -> None:
    from headtrain.target.load import load_target
    from headtrain.target.sharded import Sharding
    from headtrain.train.backend import Backend

    backend, results = Backend("fp32", timeout=60.0), {}
    for kind in ("tp", "fsdp"):
        sharding = Sharding.of(kind, None, backend.device)
        target = load_target(TargetSection(path=f"{folder}/target"), backend.device, sharding)
        params = [getattr(p, "to_local", lambda p=p: p)() for p in target.model.parameters()]
        batch = Batch.pack(tiny.rows())
        forwards = sharding.size if kind == "tp" else 1  # every member's micro-batch, or its own
        with Wire(2) as wire, torch.no_grad():
            for _ in range(forwards):
                target.features(batch, Wants(layers=(1, 4)))
        results[kind] = {"held": sum(p.numel() * 4 for p in params), "sent": sum(wire.sent.values()), "n": len(batch)}
    torch.save(results, Path(folder) / f"targets-{rank}.pt")


def test_a_split_target_takes_and_sends_what_the_formulas_say(tmp_path):
    tiny.save(tmp_path / "target")
    codes = ranks.finish(ranks.start_ranks(measure_targets, 2, tmp_path, str(tmp_path)), 120.0)
    assert codes == [0, 0], (tmp_path / "rank-0.log").read_text()[-3000:]
    every = 4 * sum(p.numel() for p in tiny.model().parameters())
    rest = 4 * (VOCAB * HIDDEN + HIDDEN)
    for rank in range(2):
        found = torch.load(tmp_path / f"targets-{rank}.pt")
        for kind in ("tp", "fsdp"):
            of = TargetOnRanks(kind, 2, LAYERS, HIDDEN, every - rest, rest, 4)
            norms = 4 * LAYERS * 2 * HIDDEN if kind == "tp" else 0  # whole on each rank, not counted
            held = of.memory()
            assert found[kind]["held"] == held["layers"] + held["embedding and lm_head"] + norms // 2
            assert found[kind]["sent"] == pytest.approx(of.traffic(found[kind]["n"]))


def scale_script():
    spec = importlib.util.spec_from_file_location("scale_table", ROOT / "scripts/scale_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_formulas_numbers():
    script = scale_script()
    readme = script.README.read_text()
    assert script.rewritten(readme) == readme, "stale tables: run `python scripts/scale_table.py`"


def test_the_dry_run_says_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = ["train", "recipes/llama-3.1-8b-eagle3.yaml", "--dry-run"]
    got = CliRunner().invoke(app, [*command, "--gpus", "16", "--device", "h200", "--backend", "fsdp2", "--busy", "0.5"])
    expected = scale(recipe("llama-3.1-8b-eagle3"), Cluster.of(16, "h200", busy=0.5), "fsdp2").lines()
    assert got.exit_code == 0 and got.output.splitlines()[: len(expected)] == expected
    assert "target      LlamaForCausalLM" in got.output
    assert not CliRunner().invoke(app, command).output.startswith("scale")
    refused = CliRunner().invoke(app, [*command[:2], "--gpus", "16"])
    assert isinstance(refused.exception, RecipeError) and "--gpus is for --dry-run" in str(refused.exception)


# -- by hand ------------------------------------------------------------------------------------------------------

SHAPES = [(3, 3), (7,)]  # 16 elements


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("ddp", (64, 64, 128, 64)),
        # 2 rows of 3, and 4: 10 elements
        ("fsdp2", (40, 40, 80, 2 * 80 + 64)),
        # 9 in two parts of 6, in pairs, and 7 in two of 4: 10 elements; the whole and its masters
        ("zero1", (80 + 40, 64, 80, 64 + 64)),
        ("zero2", (80 + 40, 64, 80, 64 + 64)),
        ("zero3", (72, 36 + 64, 72, 72 + 128)),  # parts of 5 and 4
    ],
)
def test_two_ranks_by_hand(backend, expected):
    assert tuple(head_memory(SHAPES, backend, 2).values()) == expected
    assert tuple(head_memory(SHAPES, backend, 1).values()) == (64, 64, 128, 64)
    assert head_traffic(SHAPES, backend, 1, 3) == {}


def test_what_a_ring_sends():
    """Four ranks, 8 bytes: each passes three quarters on, twice for a sum that all get."""
    assert gathered(8, 4) == 6 and all_reduced(8, 4) == 12 and all_reduced(8, 1) == 0
    assert head_traffic(SHAPES, "ddp", 2, 3) == {"all-reduce": 64}
    assert head_traffic(SHAPES, "zero1", 2, 3) == {"all-reduce": 64, "all-gather": 40}
    assert head_traffic(SHAPES, "zero2", 2, 3) == {"all-reduce": 64, "all-gather": 40}
    assert head_traffic(SHAPES, "fsdp2", 2, 3) == {"all-gather": 40, "reduce-scatter": 40}
    assert head_traffic(SHAPES, "zero3", 2, 3) == {"all-gather": 3 * 36, "reduce-scatter": 36}


def test_time_of_exchanges_and_forwards():
    cluster = Cluster.of(16, "h100", busy=0.5, sent=0.5, network=100.0)
    assert cluster.seconds(225e9, 8) == 1.0  # half of NVLink's 450 GB/s
    assert cluster.seconds(50e9, 16) == 1.0  # the network's 100
    assert Cluster.of(16, sent=1.0, network=1000.0).seconds(450e9, 16) == 1.0  # a ring passes NVLink, too
    assert cluster.arithmetic(989e12 / 2) == 1.0
    whole = TargetOnRanks("none", 1, 10, 100, 3000e9, 350e9)
    assert whole.seconds(cluster, 1, 1.0) == 1.0  # few tokens: 3.35 TB of weights at 3.35 TB/s
    assert whole.seconds(cluster, 1000, 989e9) == 2.0
    assert whole.traffic(1000) == 0 and whole.memory() == {"layers": 3000e9, "embedding and lm_head": 350e9}
    split = TargetOnRanks("fsdp", 8, 10, 100, 3000e9, 350e9)
    assert split.memory() == {"layers": 375e9, "embedding and lm_head": 350e9, "gathered layers": 600e9}
    assert split.seconds(cluster, 1, 1.0) == 3000e9 * 7 / 8 / 225e9  # the gather hides the rest
    assert split.seconds(cluster, 10000, 989e9) == 20.0
    matrices = TargetOnRanks("tp", 8, 10, 100, 3000e9, 350e9)
    sent = 8 * 2 * 10 * 2 * 7 / 8 * 1000 * 100 * 2
    assert matrices.traffic(1000) == sent
    assert matrices.seconds(cluster, 1000, 989e9) == pytest.approx(2.0 + sent / 225e9)


# -- recipes ------------------------------------------------------------------------------------------------------


def recipe(name: str, *overrides: str):
    return load_recipe(ROOT / f"recipes/{name}.yaml", list(overrides))


@pytest.mark.parametrize(("gpus", "planned"), [(4, 4), (2, 4), (64, 64), (3, 6)])
def test_both_halves_of_the_dry_run_have_one_batch(monkeypatch, gpus, planned):
    """The recipe has train.accumulation 4. Everything printed is of what ``planned`` says, the recipe included, and
    where that is not what was asked for the output says so."""
    monkeypatch.chdir(ROOT)
    command = ["train", "recipes/llama-3.1-8b-eagle3.yaml", "--dry-run", "--gpus", str(gpus)]
    first, second = CliRunner().invoke(app, command, catch_exceptions=False).output.split("\n\n", 1)
    second, shown = second.split("\n\n", 1)
    step = f"{planned * 8192:,} tokens"
    assert f"{step} a step (train.accumulation={planned}, {planned // gpus} a rank)" in first
    assert f"optimizer steps of {step} (train.batch_tokens=8192 x train.accumulation={planned})" in second
    train = yaml.safe_load(shown)["train"]
    assert (train["accumulation"], train["batch_tokens"]) == (planned, 8192)
    check_accumulation(
        recipe("llama-3.1-8b-eagle3", f"train.accumulation={planned}"), gpus, resumes=False
    )  # as it says
    told = f"train.accumulation=4 is no multiple of {gpus} ranks, which training refuses" in first
    assert told == (planned != 4)


@pytest.mark.parametrize("option", ["--device", "--backend", "--network", "--busy"])
def test_an_option_for_gpus_without_gpus_is_refused(option, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("training begins"))
    value = {"--device": "h100", "--backend": "ddp", "--network": "400", "--busy": "0.4"}[option]  # also the defaults
    for more in ([], ["--dry-run"]):
        got = CliRunner().invoke(app, ["train", str(ROOT / "recipes/quickstart.yaml"), option, value, *more])
        assert isinstance(got.exception, RecipeError) and f"{option}: says what --dry-run --gpus N" in str(
            got.exception
        )


def dry_run(*words: str) -> str:
    return CliRunner().invoke(app, ["train", *words, "--dry-run"], catch_exceptions=False).output


def test_hours_of_data_that_is_not_at_hand(monkeypatch):
    """Steps of the tokens given, each as long as the training line says; epochs are counted in them, too."""
    monkeypatch.chdir(ROOT)
    words = ("recipes/llama-3.1-8b-eagle3.yaml", "--gpus", "64", "train.epochs=2")
    assert "time        not known" in dry_run(*words) and "--tokens N" in dry_run(*words)
    of = recipe("llama-3.1-8b-eagle3", "train.epochs=2")
    got, steps = scale(of, Cluster.of(64), tokens=300_000_000), round(2 * 3e8 / (64 * 8192))
    assert got.plan.steps == steps and got.plan.tokens == 300_000_000
    told = dry_run(*words, "--tokens", "300000000")
    assert f"time        {duration(steps * got.step_seconds)} for {steps:,} optimizer steps\n" in told
    assert "300,000,000 tokens as given" in told and "for each 1,000,000" not in told and ", 2 epochs" in told
    assert "300,000,000 tokens as given" in dry_run(words[0], "--tokens", "300000000")
    known = scale(recipe("llama-3.1-8b-eagle3", "train.steps=100"), Cluster.of(64))
    assert f"time        {duration(100 * known.step_seconds)} for 100 optimizer steps" in known.lines()
    stored = scale(recipe("qwen3-8b-eagle3", "features.mode=offline"), Cluster.of(8), tokens=10**9)
    capture = duration(1e9 / stored.features_second)
    assert any(
        line.startswith("time") and line.endswith(f"and {capture} for capture before") for line in stored.lines()
    )
    refused = CliRunner().invoke(app, ["train", words[0], "--tokens", "9"])
    assert isinstance(refused.exception, RecipeError) and "--tokens is for --dry-run" in str(refused.exception)


def test_the_answer_for_many_gpus_has_none_for_one_process(monkeypatch):
    monkeypatch.chdir(ROOT)
    alone = dry_run("recipes/llama-3.1-8b-eagle3.yaml")
    many = dry_run("recipes/llama-3.1-8b-eagle3.yaml", "--gpus", "64")
    for text in ("in one process", "two CPU cores", "a third of an H100's peak"):
        assert text in alone and text not in many
    assert "head: buffers of forward and backward" in many and "working" not in many.split("\n\n")[0]


@pytest.mark.parametrize(("tokens", "warned"), [(64 * 8192 - 1, True), (64 * 8192, False)])
def test_a_step_of_more_tokens_than_the_data_is_warned_of(tokens, warned):
    lines = scale(recipe("llama-3.1-8b-eagle3"), Cluster.of(64), tokens=tokens).plan.lines(alone=False)
    assert any(line.startswith("warning     one optimizer step takes 524,288 tokens") for line in lines) == warned
    unknown = scale(recipe("llama-3.1-8b-eagle3"), Cluster.of(512)).plan.lines()
    assert not any("warning" in line for line in unknown)


def test_the_head_is_built_once(monkeypatch):
    from headtrain.heads import catalog as module  # where ``outline`` finds it

    built = []
    monkeypatch.setattr(module, "build_head", lambda *args, build=module.build_head: built.append(1) or build(*args))
    scale(recipe("llama-3.1-8b-eagle3"), Cluster.of(64))
    assert built == [1] and not any(hasattr(scale_module, name) for name in ("build_head", "outline"))


def test_an_online_recipe_adds_up():
    of = recipe("llama-3.1-8b-eagle3")
    plan, got = estimate(of), scale(of, Cluster.of(64))
    assert (got.micro, got.tokens_a_step) == (1, 64 * 8192)
    assert got.sent == {"head's all-reduce": 2 * 63 / 64 * 4 * plan.head_parameters, "target's forward": 0}
    assert got.memory["target: layers"] + got.memory["target: embedding and lm_head"] == plan.target_bytes
    head = sum(size for name, size in got.memory.items() if name.startswith("head"))
    assert head == 20 * plan.head_parameters and got.fits and not got.stored
    forward = 8192 * 2 * 8030261248 / (0.4 * 989e12)
    assert got.features_second == pytest.approx(64 * 8192 / forward)
    assert got.seconds["target"] == pytest.approx(forward)
    assert got.seconds["head"] == pytest.approx(
        plan.head_flops / plan.steps / 4 / (0.4 * 989e12)
    )  # 4 micro-batches a step
    assert got.seconds["exchange of gradients"] == pytest.approx(got.sent["head's all-reduce"] / (0.8 * 400e9))
    assert got.tokens_second == pytest.approx(got.tokens_a_step / sum(got.seconds.values()))
    assert scale(of, Cluster.of(1)).sent == {"target's forward": 0} and scale(of, Cluster.of(1)).micro == 4
    assert scale(of, Cluster.of(3)).micro == 2 and of.train.accumulation == 4  # the recipe given is not changed


def test_stored_features_are_read_and_the_target_is_away():
    of = recipe("deepseek-v3-eagle3")
    plan, got = estimate(of), scale(of, Cluster.of(64))
    assert got.stored and not got.target_fits and got.fits
    assert not any(name.startswith("target:") for name in got.memory) and "target" not in got.seconds
    assert got.token_bytes == pytest.approx(plan.feature_bytes / plan.tokens, rel=1e-6)
    assert got.read_per_node == pytest.approx(got.tokens_second * got.token_bytes / 8)
    features, disk = got.lines()[5:7]
    assert "which does not fit" in features and disk.startswith("disk")


def test_a_split_recipe():
    got = scale(recipe("llama-3.3-70b-eagle3"), Cluster.of(64), "fsdp2")
    whole = 2 * 70553706496
    rest = 2 * 8192 * (2 * 128256 + 1)
    assert got.memory["target: layers"] == (whole - rest) / 8 and got.fits
    assert got.memory["features"] == pytest.approx(2 * 4096 * (8192 * 2 * 3 + 8 + 0.6 * (8192 * 2 + 12)))
    assert got.sent["target's forward"] == 8 * 2 * 80 * 2 * 7 / 8 * 4096 * 8192 * 2
    assert "does not fit" in "\n".join(
        scale(recipe("llama-3.3-70b-eagle3", "target.shard=none"), Cluster.of(8)).lines()
    )


@pytest.mark.parametrize(
    ("overrides", "make", "message"),
    [
        (["target.shard=tp", "target.group=16"], lambda: Cluster.of(64), "a node has 8; use target.shard=fsdp"),
        (["target.shard=fsdp", "target.group=5"], lambda: Cluster.of(64), "64 GPUs cannot be split into groups of 5,"),
        (["target.expect.parameters=null"], lambda: Cluster.of(8), "target.expect.parameters: needed"),
        ([], lambda: Cluster.of(0), "gpus 0; expected more than 0"),
        ([], lambda: Cluster.of(8, busy=1.5), "busy 1.5; expected a share"),
        ([], lambda: Cluster.of(8, "h900"), "device 'h900': expected one of h100"),
    ],
)
def test_what_cannot_be_is_refused(overrides, make, message):
    with pytest.raises(RecipeError, match=message):
        scale(recipe("llama-3.1-8b-eagle3", *overrides), make())
    with pytest.raises(RecipeError, match="backend 'zero4': expected one of ddp"):
        scale(recipe("llama-3.1-8b-eagle3"), Cluster.of(8), "zero4")


def test_muon_is_planned_where_training_takes_it():
    of = recipe("llama-3.1-8b-eagle3", "train.optimizer=muon")
    scale(of, Cluster.of(8), "fsdp2")
    with pytest.raises(RecipeError, match="muon does not go with ZeRO; use adamw"):
        scale(of, Cluster.of(8), "zero1")
