"""A target split over a group of ranks gives the whole target's features, and no token is forwarded twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from rich.console import Console

from headtrain.config import Recipe, RecipeError, TargetSection
from headtrain.data.loader import Loader
from headtrain.heads.io import read_tensors
from headtrain.target import sharded
from headtrain.target.load import load_target
from headtrain.target.shape import TargetError
from headtrain.target.sharded import Sharding
from headtrain.train.backend import Backend
from headtrain.train.groups import GroupLoader
from headtrain.train.setup import prepare_run
from headtrain.train.trainer import train
from headtrain.train.watch import Watch
from headtrain.types import Row

WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "head"]


def conversations(path: Path, count: int) -> str:
    """Rows of unequal lengths."""
    lines = []
    for i in range(count):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % 12] for j in range(6 + 5 * (i % 4))]
        turns = [("user", " ".join(words[:3])), ("assistant", " ".join(words[2:]))]
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def recipe(folder: Path, name: str, world: int, **target) -> Recipe:
    return Recipe(
        name=name,
        target={"path": str(folder / "target"), **target},
        data={"train": [str(folder / "train.jsonl")], "eval": [str(folder / "eval.jsonl")], "max_length": 400},
        features={"mode": "online", "dtype": "float32"},
        head={"kind": "eagle3", "depth": 2, "draft_vocab_size": 64},
        train=dict(steps=3, batch_tokens=160, accumulation=4, lr=3e-3, precision="fp32", eval_every=3),
        output=str(folder / name),
    )


class Counted:
    """Tokens that pass the target's body on this rank."""

    def __init__(self, target) -> None:
        self.tokens = []
        target.parts.body.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs) -> None:
        self.tokens.append(kwargs["input_ids"].numel())


def run_rank(rank: int, folder: str, world: int, runs: list[tuple[dict, bool]]) -> None:
    """Each of ``runs`` (section of a target, whether it trains): features and weights against the whole target's."""
    folder, console = Path(folder), Console(quiet=True)
    with Watch(300.0) as watch:
        backend = Backend("fp32", timeout=300.0)
        for number, (section, trains) in enumerate(runs):
            r = recipe(folder, f"run-{number}", world, **section)
            setup = prepare_run(r, backend, console, watch)
            found = {"features": [], "reference": [], "own": [], "forwarded": []}
            if isinstance(setup.held_out, GroupLoader):
                loader, target = setup.held_out.loader, setup.held_out.target
                count = loader.micro_batches_per_epoch
                found["micro_batches"] = count
                counted = Counted(target)
                found["features"] = [vars(f) for _, f in setup.held_out.batches(0, count)]
                found["forwarded"] = list(counted.tokens)
                whole = load_target(TargetSection(path=r.target.path, attention=r.target.attention))
                loader.source.features = whole.features
                for batch, features in loader.batches(0, count):
                    found["reference"].append(vars(features))
                    found["own"].append(len(batch))
                loader.source.features = target.features
                found["same_identity"] = whole.identity == target.identity
                ours, theirs = target.weights(), whole.weights()
                found["same_weights"] = all(
                    torch.equal(a, b) and not hasattr(a, "full_tensor")
                    for a, b in [
                        (ours.embed, theirs.embed),
                        (ours.lm_head, theirs.lm_head),
                        *[(ours.last_layer[n], t) for n, t in theirs.last_layer.items()],
                    ]
                )
                stored = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in target.parts.layers.parameters())
                found["share"] = stored / sum(p.numel() for p in whole.parts.layers.parameters())
                found["class"] = type(target.model) is type(whole.model)
            if trains:
                found["evaluation"] = train(r, setup, backend, watch=watch).evaluation
            torch.save(found, folder / f"found-{number}-{rank}.pt")


def outcome(tmp_path: Path, world: int, runs: list[tuple[dict, bool]]) -> list[list[dict]]:
    """Of each run, by rank."""
    tiny.save(tmp_path / "target")
    conversations(tmp_path / "train.jsonl", 40)
    conversations(tmp_path / "eval.jsonl", 11)
    codes = ranks.finish(ranks.start_ranks(run_rank, world, tmp_path, str(tmp_path), world, runs))
    assert codes == [0] * world, (tmp_path / "rank-0.log").read_text()[-3000:]
    return [[torch.load(tmp_path / f"found-{n}-{r}.pt") for r in range(world)] for n in range(len(runs))]


def trained(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return read_tensors(folder / f"run-{number}" / "checkpoints" / "step-000003" / "head.safetensors")


def check(found: list[dict], exact: bool, group: int) -> None:
    for rank in found:
        assert rank["same_identity"] and rank["same_weights"] and rank["class"]
        assert len(rank["features"]) == len(rank["reference"])
        # norms are small and whole under tensor parallelism
        assert abs(rank["share"] - 1 / group) < 0.02
        for ours, theirs in zip(rank["features"], rank["reference"], strict=True):
            for name, value in theirs.items():
                # Tolerance: tensor parallelism adds each row's products up in ``group`` parts; fp32 activations of
                # order 1 to 10 through 8 layers. argmax may differ at near ties only.
                if exact or name == "final_at":
                    assert torch.equal(ours[name], value), name
                elif name != "argmax":
                    torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4)


def test_two_ranks(tmp_path):
    unpacked = {"shard": "fsdp", "attention": "sdpa"}  # one forward a document: ranks need unequal numbers of them
    runs = [({}, True), ({"shard": "tp"}, True), ({"shard": "fsdp"}, True), (unpacked, False)]
    whole, tp, fsdp, unpacked = outcome(tmp_path, 2, runs)
    check(tp, False, 2)
    check(fsdp, True, 2)
    check(unpacked, True, 2)
    assert tp[0]["micro_batches"] % 2 == 1  # in evaluation rank 1 has one less
    # a rank of a tensor-parallel group takes part in each member's forward, a rank of an FSDP group does its own
    everyone = [n for own in zip(tp[0]["own"], tp[1]["own"] + [0], strict=True) for n in own if n]
    assert tp[0]["forwarded"] == tp[1]["forwarded"] == everyone
    assert fsdp[0]["forwarded"] == fsdp[0]["own"]
    assert fsdp[1]["forwarded"] == [*fsdp[1]["own"], 1]  # one token, while rank 0 runs the last one
    padding = [n for rank in unpacked for n in rank["forwarded"]].count(1)
    assert sum(sum(rank["forwarded"]) for rank in unpacked) == sum(sum(rank["own"]) for rank in unpacked) + padding
    assert len(unpacked[0]["forwarded"]) == len(unpacked[1]["forwarded"]) > len(unpacked[0]["own"])
    reference = trained(tmp_path, 0)
    for name, value in reference.items():
        assert torch.equal(trained(tmp_path, 2)[name], value), name
        # Tolerance: AdamW's first steps amplify rounding in gradients near zero
        torch.testing.assert_close(trained(tmp_path, 1)[name], value, rtol=0, atol=2e-4)
    assert fsdp[0]["evaluation"] == whole[0]["evaluation"]
    assert tp[1]["evaluation"]["loss"] == pytest.approx(whole[1]["evaluation"]["loss"], rel=1e-4)


def test_two_groups_of_two(tmp_path):
    runs = [({}, True), ({"shard": "tp", "group": 2}, True), ({"shard": "fsdp", "group": 2}, False)]
    _, tp, fsdp = outcome(tmp_path, 4, runs)
    check(tp, False, 2)
    check(fsdp, True, 2)
    for name, value in trained(tmp_path, 0).items():
        torch.testing.assert_close(trained(tmp_path, 1)[name], value, rtol=0, atol=2e-4)
    for a, b in ((0, 1), (2, 3)):  # nothing of the other group's
        assert tp[a]["forwarded"] == tp[b]["forwarded"]
        assert sum(tp[a]["forwarded"]) == sum(tp[a]["own"]) + sum(tp[b]["own"])


# -- refused before anything is loaded or exchanged ---------------------------------------------------------------


@pytest.mark.parametrize(
    "world, local, kind, group, message",
    [
        (4, 4, "tp", 3, r"4 ranks cannot be split into groups of 3; use one of \[1, 2, 4\]"),
        (4, 2, "tp", 4, "4 ranks, but a node has 2: .*target.shard=fsdp"),
    ],
)
def test_groups_that_do_not_fit(monkeypatch, world, local, kind, group, message):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", str(world))
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", str(local))
    with pytest.raises(RecipeError, match=message):
        Sharding.of(kind, group, torch.device("cpu"))


def test_one_rank_holds_the_whole_target():
    assert Sharding.of("tp", None, torch.device("cpu")) is None


@pytest.mark.parametrize(
    "group, plan, message",
    [(3, None, "no tp_plan for LlamaForCausalLM; use target.shard=fsdp"), (4, "own", "2 key and value heads do not")],
)
def test_families_and_sizes_that_tensor_parallelism_cannot_split(group, plan, message):
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        model = tiny.LlamaForCausalLM(tiny.config())
    if plan is None:
        model.tp_plan = None
    stub = Sharding("tp", range(group), 1, torch.device("cpu"), None)
    with pytest.raises(TargetError, match=message):
        sharded._split_matrices(model, stub, DistributedConfig(tp_size=group))


def test_a_gguf_file_is_not_split(tmp_path):
    (tmp_path / "x.gguf").touch()
    with pytest.raises(TargetError, match="headtrain convert"):
        load_target(TargetSection(path=str(tmp_path / "x.gguf")), "cpu", Sharding("tp", range(2), 1, "cpu", None))


@pytest.mark.parametrize(
    "features, training, message",
    [("offline", {}, "features.mode=online"), ("online", {"joint": {}}, "leave train.joint out")],
)
def test_what_a_split_target_is_not_for(tmp_path, features, training, message):
    with pytest.raises(ValueError, match=message):
        Recipe(
            name="x",
            target={"path": "x", "shard": "tp"},
            data={"train": ["x"]},
            features={"mode": features},
            head={"kind": "eagle3"},
            train=training,
        )


# -- which micro-batches and ranks --------------------------------------------------------------------------------


class Rows:
    """A source whose features are the rows' indices."""

    lengths = [10] * 24

    def batch(self, indices):
        return tuple(indices), None


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_reads_from_any_start_what_a_loader_reads(kind, rank):
    class Target:
        def forwards(self, batch):
            return 1

        def features(self, batch, wants):
            forwarded.append(len(batch))

    loader = Loader(Rows(), 10, rank=rank, ranks=2)
    group = Sharding(kind, range(2), 1, torch.device("cpu"), None)
    rows = [Row([0] * 10, [0] * 10)] * 24
    for start, stop in ((0, 6), (3, 6), (3, 7), (4, 4), (5, 30)):
        forwarded: list[int] = []
        own = list(loader.batches(start, stop))
        assert list(GroupLoader(loader, Target(), group, rows).batches(start, stop)) == own
        # tp: the other's micro-batches; fsdp: one token wherever the other has one more
        others = stop - start - len(own)
        alone = start % 2 * (rank == 0) + stop % 2 * (rank == 1)
        assert forwarded == ([10] * others if kind == "tp" else [1] * alone)


def test_a_group_is_a_node_unless_it_is_said(monkeypatch):
    made = []
    monkeypatch.setattr(
        sharded, "init_device_mesh", lambda kind, shape, mesh_dim_names: made.append(shape) or {"tp": 0}
    )
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    found = Sharding.of("tp", None, torch.device("cpu"))
    assert made == [(2, 2)] and (found.members, found.copies, found.size) == (range(2, 4), 2, 2)


def test_a_family_that_transformers_does_not_have_is_refused():
    from transformers import AutoModelForCausalLM, PretrainedConfig

    class Own(PretrainedConfig):
        model_type = "own"

    group = Sharding("fsdp", range(2), 1, torch.device("cpu"), None)
    made, _ = group.loader(AutoModelForCausalLM, tiny.config())
    assert issubclass(made, tiny.LlamaForCausalLM)
    with pytest.raises(TargetError, match="Own is not one of transformers' own families.*use target.shard=none"):
        group.loader(AutoModelForCausalLM, Own())
