"""What test_backends has done on one process, and on each rank of several."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import toyhead
import yaml
from rich.console import Console
from test_conformance import VARIANTS

from headtrain.config import JointSection, LoraSection, Recipe, TargetSection, TrainSection
from headtrain.heads.base import DraftHead
from headtrain.heads.catalog import HEADS, build_head, parse_head
from headtrain.heads.io import head_tensors, save_tensors
from headtrain.target.load import load_target
from headtrain.target.model import Target
from headtrain.train.backend import Backend
from headtrain.train.joint import Joint, no_features
from headtrain.train.lora import inject
from headtrain.train.metrics import flatten, unflatten, zeros
from headtrain.train.setup import prepare_run
from headtrain.train.trainer import train
from headtrain.train.watch import Watch
from headtrain.types import Batch, Features, Row

RECIPES = Path(__file__).parents[2] / "recipes/backend"
JOINT = {"joint": {}, "stages": {"base_loss": "kl", "heads_first": 0.4}}
STRATEGIES = {"ddp": "Replicated", "fsdp2": "Sharded", "zero": "Zero"}
# supervised positions of each micro-batch of five steps: very unequal ranks, one without any, two micro-batches a rank
STEPS = [(10, 1000), (0, 100), (60, 10), (10, 0, 90, 20), (5, 5)]


def environment(name: str) -> dict[str, str]:
    """What `accelerate launch` makes of recipes/backend/NAME.yaml for its processes."""
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    kind = config["distributed_type"]
    parts, prefix = config.get("fsdp_config", {}), ""
    if kind == "DEEPSPEED":
        parts, prefix = config["deepspeed_config"], "ACCELERATE_DEEPSPEED_"
    flags = {f"ACCELERATE_USE_{kind}": "true"} if parts else {}
    return flags | {f"{prefix}{key.upper()}": str(value).lower() for key, value in parts.items()}


def backend_of(name: str) -> Backend:
    with mock.patch.dict(os.environ, environment(name)):
        backend = Backend("fp32")
    torch.set_num_threads(1)  # matrices are tiny
    want = next((s for n, s in STRATEGIES.items() if name.startswith(n)), "Replicated")
    made = backend._split
    assert (getattr(made, "func", made).__name__ == want) or backend.world == 1
    return backend


def micro_batch(supervised: int, seed: int) -> Batch:
    """Rows of at most 250 supervised tokens, and one more token each that has no next one; a prompt of four each."""
    g = torch.Generator().manual_seed(seed)
    rows, left = [], supervised
    while left > 0 or not rows:
        n = min(left, 250)
        ids = torch.randint(3, 384, (n + 5,), generator=g).tolist()
        rows.append(Row(ids, [0] * 4 + [1] * (n + 1 if n else 0) + [0] * (0 if n else 1), source=f"r:{len(rows)}"))
        left -= n
    return Batch.pack(rows)


@dataclass
class Case:
    """What is trained, and its micro-batches: kept from one backend to the next, as the features are the same."""

    head: DraftHead
    target: Target
    joint: Joint | None
    train: TrainSection
    micro_batches: dict[tuple[int, int], tuple[Batch, Features]]


def case_of(kind: str, target: Target, micro_batches: dict) -> Case:
    """kind: a head's, ``KIND+lora``, ``KIND+muon``, or what changes the target: ``KIND+joint``, and ``KIND+stages``,
    as in recipes/smollm2-135m-medusa2.yaml (the head alone at first, then held to the target's own distribution)."""
    kind, _, how = kind.partition("+")
    config = parse_head({"kind": kind, **VARIANTS[kind][0]})
    size = HEADS[kind].uses_draft_vocab(config, target.shape)
    torch.manual_seed(1)
    head = build_head(config, target.shape, None if size is None else torch.arange(0, 3 * size, 3))
    head.attach(target.weights())
    head.init_from_target(target.weights())
    if how == "lora":
        inject(head, LoraSection(r=3, alpha=7.5), seed=0)
    joint = None
    if how in JOINT:
        joint = Joint(head, target, JointSection(lora=LoraSection(r=4, alpha=6), **JOINT[how]), seed=0)
    train = TrainSection(lr=1e-3, muon_lr=1e-3, optimizer="muon" if how == "muon" else "adamw")
    return Case(head, target, joint, train, micro_batches)


def measure(backend: Backend, case: Case) -> dict[str, torch.Tensor]:
    """Losses and norms of each step, the first gradient (by its moment in AdamW), the head and its exports at the
    end."""
    head, joint, target = case.head, case.joint, case.target
    depth, teacher, out = head.wants().depth, target.teacher(), {}
    backend.prepare(joint or head)
    with mock.patch("headtrain.train.backend.cpu_has_bf16", return_value=False):  # Muon's iteration in fp32
        optimizer = backend.optimizer(head, case.train, joint.adapter.named() if joint else None)
    for step, counts in enumerate(STEPS):
        if joint:
            joint.at(step + 1, len(STEPS))
        sums = zeros(depth)
        for j in range(backend.rank, len(counts), backend.world):
            if (step, j) not in case.micro_batches:
                batch = micro_batch(counts[j], 10 * step + j)
                features = no_features(batch, head.wants()) if joint else target.features(batch, head.wants())
                case.micro_batches[step, j] = batch, features
            last = j + backend.world >= len(counts)
            sums = sums + backend.backward(case.micro_batches[step, j], teacher, depth, j, last)
        sums = unflatten(backend.sum(flatten(sums, depth)))
        norm = backend.normalise(float(sums.count), 0.5)
        optimizer.step(1.0)
        optimizer.zero_grad()
        out[f"numbers/{step}"] = torch.tensor([float(sums.total / sums.count), norm, float(sums.count)])
        if step == 0:
            out |= {f"gradient/{n}": t.clone() for n, t in optimizer.state().items() if n.endswith("exp_avg")}
    with backend.whole():
        out |= {f"head/{n}": t.detach().clone() for n, t in head_tensors(head).items()}
        out |= {f"adapter/{n}": t.detach().clone() for n, t in (joint.adapter.named() if joint else {}).items()}
        for dialect in head.dialects:
            try:
                tensors = head.export_spec(dialect).tensors
            except ValueError:
                continue  # this configuration has no such form
            out |= {f"export/{dialect}/{n}": t.detach().clone() for n, t in tensors.items()}
    return out


def measure_all(rank: int, out: str, targets: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    """Every (backend, case); rank 0 writes OUT/NAME-KIND.safetensors."""
    for kind, folder in targets.items():
        target, micro_batches = load_target(TargetSection(path=folder)), {}
        for name in [name for name, of in pairs if of == kind]:
            if kind.partition("+")[2] in JOINT:
                target = load_target(TargetSection(path=folder))
            found = measure(backend_of(name), case_of(kind, target, micro_batches))
            if rank == 0:
                save_tensors(Path(out) / f"{name}-{kind}.safetensors", found)
    leave()


def train_toy(rank: int, out: str, name: str, settings: dict, stop: int | None) -> None:
    """Train the toy head on backend ``name``; rank 0 is told to stop in step ``stop``, which is finished and saved. One
    row makes its steps' losses infinite."""
    backend = backend_of(name)
    recipe = toyhead.recipe(Path(out), {"noise": 0.1, "spoil": 1}, **settings)
    data = toyhead.rows(72)
    data[3].ids[-1] = 1  # no other row has it
    setup = toyhead.setup(recipe, backend, data=data)
    began = max((int(p.name[5:]) for p in Path(out).glob("checkpoints/step-*")), default=0)
    good, calls, each = setup.head.loss, [], math.ceil(settings["accumulation"] / backend.world)

    def loss(*args):
        if rank == 0 and stop and setup.head.training:
            calls.append(1)
            if len(calls) == each * (stop - began):  # the step's last: one process would not finish an earlier one's
                signal.raise_signal(signal.SIGTERM)
        return good(*args)

    setup.head.loss = loss
    result = train(recipe, setup, backend)
    assert result.step == (stop or result.total), result
    leave()


def train_joint(rank: int, recipe: dict, name: str, stop: int | None) -> None:
    """A recipe with ``train.joint``, as a command trains it, on backend ``name``; stopped in step ``stop``."""
    with Watch(60.0) as watch:
        of, backend = Recipe(**recipe), backend_of(name)
        setup = prepare_run(of, backend, Console(quiet=True), watch)
        good = setup.joint.at

        def at(step: int, total: int) -> None:
            good(step, total)
            if rank == 0 and step == stop:
                signal.raise_signal(signal.SIGTERM)

        setup.joint.at = at
        result = train(of, setup, backend, False, watch)
        assert result.step == (stop or result.total), result
    leave()


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
