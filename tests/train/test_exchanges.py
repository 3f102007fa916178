"""What ranks send each other in a step (the gradients, once, and nothing else), and what a step leaves behind."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import backend_ranks
import pytest
import ranks
import torch
import toyhead

ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'headtrain[deepspeed]'")
GRADIENTS = {
    "ddp": {"allreduce_": 1},
    "fsdp2": {"_allgather_base_": 1, "_reduce_scatter_base_": 1},  # the head is gathered for all micro-batches at once
    "zero2": {"allreduce_": 1},
}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("zero2", marks=ZERO)])
def test_a_step_of_several_micro_batches_exchanges_its_gradients_once(tmp_path, name):
    codes = ranks.finish(ranks.start_ranks(step, 2, tmp_path, str(tmp_path), name))
    assert codes == [0, 0], (tmp_path / "rank-0.log").read_text()[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"sent": GRADIENTS[name], "buffer": rank}


def step(rank: int, folder: str, name: str) -> None:
    """Four micro-batches a rank. The buffer stands for the target's tensors that a head reads."""
    backend = backend_ranks.backend_of(name)
    recipe = toyhead.recipe(Path(folder) / "run")
    setup = toyhead.setup(recipe, backend)
    setup.head.register_buffer("frozen", torch.tensor(float(rank)))
    backend.prepare(setup.head)
    backend.optimizer(setup.head, recipe.train)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number, micro in enumerate(setup.train.batches(0, 8)):
            backend.backward(micro, setup.teacher, 3, number, number == 3)
    sent = {e.key.removeprefix("c10d::"): e.count for e in profile.key_averages() if e.key.startswith("c10d::")}
    found = {"sent": sent, "buffer": int(setup.head.frozen)}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    backend_ranks.leave()


ALL = ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero1-offload", "zero2-offload", "zero3-offload"]
# a factor of the loss, the depth (1 leaves parameters unused), and whether the step is taken: a loss may be infinite
# though its gradient is not
STEPS = [(1.0, 3, True), (math.nan, 3, False), (math.inf, 3, False), (1.0, 3, False), (2.0, 1, True), (1.0, 3, True)]


def test_steps_that_are_not_taken_and_parameters_that_are_not_used(tmp_path):
    """Nothing is left of a gradient that is not applied, two in a row: DeepSpeed, not asked to step, would add the next
    one to it. And moments and weights of a parameter stay where a step does not use it."""
    names = [name for name in ALL if not name.startswith("zero") or not ZERO.args[0]]
    codes = ranks.finish(ranks.start_ranks(skip, 2, tmp_path, str(tmp_path), names))
    assert codes == [0, 0], (tmp_path / "rank-0.log").read_text()[-3000:]
    found = torch.load(tmp_path / "found.pt")
    norms, weights = found["ddp"]
    for name in names[1:]:
        for (factor, _, _), mine, theirs in zip(STEPS, norms, found[name][0], strict=True):
            assert math.isfinite(factor) == math.isfinite(mine) == math.isfinite(theirs), name
            assert theirs == pytest.approx(mine, rel=1e-5) or not math.isfinite(factor), name
        for one, other in zip(weights, found[name][1], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=name)


def skip(rank: int, folder: str, names: list[str]) -> None:
    """The norm of each of STEPS, and the weights after them."""
    found = {}
    for name in names:
        backend = backend_ranks.backend_of(name)
        recipe = toyhead.recipe(Path(folder) / "run")
        torch.manual_seed(0)
        setup = toyhead.setup(recipe, backend)
        good, factors, norms = setup.head.loss, iter([factor for factor, _, _ in STEPS]), []

        def loss(*args, good=good, factors=factors):
            sums = good(*args)
            return replace(sums, total=sums.total * next(factors))

        setup.head.loss = loss
        backend.prepare(setup.head)
        optimizer = backend.optimizer(setup.head, recipe.train)
        for micro, (_, depth, taken) in zip(setup.train.batches(0, 2 * len(STEPS)), STEPS, strict=True):
            backend.backward(micro, setup.teacher, depth, 0, True)
            norms.append(backend.normalise(10.0, 1e9))
            if taken:
                optimizer.step(1.0)
            optimizer.zero_grad()
        with backend.whole():
            found[name] = norms, [p.detach().clone() for p in setup.head.parameters()]
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    backend_ranks.leave()
