from __future__ import annotations

import json
import shutil

import pytest
import torch
import toyhead

from headtrain.config import RecipeError, Stage
from headtrain.heads.io import read_tensors
from headtrain.train import checkpoint, trainer
from headtrain.train.backend import Backend
from headtrain.train.plan import check_accumulation, depth_at, micro_seed, total_steps
from headtrain.train.trainer import train
from headtrain.types import LossSums, Row


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


def lines(folder):
    clocks = ("seconds", "tokens_per_second")
    found = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k not in clocks} for x in found]


def same_tensors(a, b, file="head.safetensors"):
    x, y = read_tensors(a / file), read_tensors(b / file)
    assert x.keys() == y.keys() and x
    for name in x:
        assert torch.equal(x[name], y[name]), name


def test_learns_and_leaves_everything_behind(tmp_path, backend):
    recipe = toyhead.recipe(tmp_path / "run", steps=30, save_every=10, eval_every=10)
    result = train(recipe, toyhead.setup(recipe, backend), backend)
    curve = lines(tmp_path / "run")
    training = [x for x in curve if x["kind"] == "train"]
    held = [x for x in curve if x["kind"] == "eval"]
    assert [x["step"] for x in training] == list(range(2, 31, 2)) and [x["step"] for x in held] == [10, 20, 30]
    assert training[-1]["loss"] < 0.8 * training[0]["loss"] and training[-1]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert result.step == result.total == 30 and result.stopped is None and result.bad_steps == 0
    assert result.best_tau == max(x["tau"] for x in held) and result.evaluation["tau"] == held[-1]["tau"]
    assert checkpoint.find(tmp_path / "run", "best") == result.best
    assert checkpoint.find(tmp_path / "run", "last") == result.last == tmp_path / "run/checkpoints/step-000030"
    files = {"head.safetensors", "headtrain.json", "optimizer.safetensors", "trainer.json"}
    assert {p.name for p in result.last.iterdir()} == files
    assert (tmp_path / "run/recipe.yaml").is_file()
    meta = json.loads((result.last / "headtrain.json").read_text())
    assert meta["training"]["steps"] == 30 and meta["training"]["tokens"] == training[-1]["tokens"] > 0
    again = train(recipe, toyhead.setup(recipe, backend), backend)  # a finished run is left as it is
    assert again.step == 30 and again.evaluation["tau"] == held[-1]["tau"] and lines(tmp_path / "run") == curve


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "log_every": 3}])
def test_resume_equals_uninterrupted(tmp_path, backend, changes):
    """CASES 34, bit for bit, with noise in the head and a window of metrics that spans the interruption."""
    whole = toyhead.recipe(tmp_path / "whole", {"noise": 0.1}, keep=9, **changes)
    train(whole, toyhead.setup(whole, backend), backend)
    part = toyhead.recipe(tmp_path / "part", {"noise": 0.1}, keep=9, **changes)
    train(part, toyhead.setup(part, backend), backend)
    shutil.rmtree(tmp_path / "part/checkpoints/step-000010")  # as if killed after step 5's checkpoint
    same = {k: v for k, v in read_tensors(tmp_path / "part/checkpoints/step-000005/optimizer.safetensors").items()}
    assert any(v.abs().sum() > 0 for v in same.values())
    result = train(part, toyhead.setup(part, backend), backend)
    assert result.step == 10
    for file in ("head.safetensors", "optimizer.safetensors"):
        same_tensors(tmp_path / "whole/checkpoints/step-000010", tmp_path / "part/checkpoints/step-000010", file)
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")


def total_gradient(head, teacher, micro, depth):
    """The slow obvious reference: one backward over everything, divided by all supervised positions."""
    sums = [head.loss(batch, features, teacher, depth) for batch, features in micro]
    count = sum(float(s.count) for s in sums)
    grads = torch.autograd.grad(sum(s.total for s in sums) / count, list(head.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(head.parameters(), grads, strict=True)], count


def test_gradient_is_normalised_by_all_supervised_positions(tmp_path, backend):
    """CASES 36 within a process: micro-batches of few and many supervised tokens make one batch's gradient."""
    few = Row([5, 6, 7, 8, 9, 3], [0, 0, 0, 1, 1, 1])
    many = Row([3 + i % 40 for i in range(60)], [0] + [1] * 59)
    micro = [toyhead.Memory([r]).batch([0]) for r in (few, many)]
    head = toyhead.Toy(toyhead.ToyConfig())
    run = toyhead.setup(toyhead.recipe(tmp_path), backend)
    want, count = total_gradient(head, run.teacher, micro, 3)
    backend.prepare(head)
    sums = [backend.backward(m, run.teacher, 3, 0, last) for m, last in zip(micro, (False, True), strict=True)]
    assert sum(float(s.count) for s in sums) == count
    norm = backend.normalise(count, clip=1e9)
    for p, w in zip(head.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-5, atol=1e-7)
    assert norm == pytest.approx(float(torch.stack([w.norm() for w in want]).norm()), rel=1e-5)


def test_clipping_by_global_norm(backend):
    head = toyhead.Toy(toyhead.ToyConfig())
    backend.prepare(head)
    for p in head.parameters():
        p.grad = torch.full_like(p, 3.0)
    before = backend.normalise(2.0, clip=0.5)
    n = sum(p.numel() for p in head.parameters())
    assert before == pytest.approx(1.5 * n**0.5)
    after = torch.stack([p.grad.norm() for p in head.parameters()]).norm()
    assert float(after) == pytest.approx(0.5, rel=1e-4)


def test_a_parameter_without_gradient_is_left_alone(backend):
    """Zeros that an exchange between ranks fills in and no gradient at all are the same to the optimizer."""
    head = toyhead.Toy(toyhead.ToyConfig())
    backend.prepare(head)
    head.mix[0].grad, head.mix[1].grad = torch.ones_like(head.mix[0]), torch.zeros_like(head.mix[1])
    backend.normalise(1.0, 1e9)
    assert head.mix[0].grad is not None and head.mix[1].grad is None and head.mix[2].grad is None


def test_all_masked_batches(tmp_path, backend):
    """Nothing to learn: finite, no step taken, no bad step, the head stays, and the run says so."""
    rows = [Row(list(range(3, 23)), [0] * 20) for _ in range(6)]
    recipe = toyhead.recipe(tmp_path, steps=3)
    run = toyhead.setup(recipe, backend, held_out=False, data=rows)
    before = {n: p.detach().clone() for n, p in run.head.named_parameters()}
    with pytest.raises(trainer.TrainError, match="3 steps in a row supervised no position"):
        train(recipe, run, backend)
    assert lines(tmp_path)[-1]["loss"] == 0.0 and lines(tmp_path)[-1]["bad_steps"] == 0
    assert all(torch.equal(before[n], p) for n, p in run.head.named_parameters())


def test_half_masked_step_equals_the_other_half_alone(tmp_path, backend):
    masked = toyhead.Memory([Row(list(range(3, 23)), [0] * 20)]).batch([0])
    real = toyhead.Memory(toyhead.rows(1)).batch([0])
    run = toyhead.setup(toyhead.recipe(tmp_path), backend)
    grads = []
    for micro in ([real], [masked, real]):
        head = toyhead.Toy(toyhead.ToyConfig())
        backend.prepare(head)
        count = sum(float(backend.backward(m, run.teacher, 3, 0, True).count) for m in micro)
        backend.normalise(count, 1e9)
        grads.append([p.grad.clone() for p in head.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Spy(toyhead.Toy):
    seen: list[int]

    def loss(self, batch, features, teacher, depth) -> LossSums:
        if torch.is_grad_enabled():
            self.seen.append(depth)
        return super().loss(batch, features, teacher, depth)


def test_depth_schedule(tmp_path, backend):
    stages = [{"fraction": 0.6, "depth": 1}, {"fraction": 0.2, "depth": 2}, {"fraction": 0.2, "depth": 3}]
    recipe = toyhead.recipe(tmp_path, depth_schedule=stages, accumulation=1, log_every=1)
    run = toyhead.setup(recipe, backend)
    run.head = Spy(toyhead.ToyConfig())
    run.head.seen = []
    train(recipe, run, backend)
    assert run.head.seen == [1] * 6 + [2] * 2 + [3] * 2
    curve = lines(tmp_path)
    assert curve[0]["alpha"][1:] == [None, None]
    evals = [x for x in curve if x["kind"] == "eval"]
    assert all(a is not None for x in evals for a in x["accuracy"])  # always at full depth
    deep = toyhead.recipe(tmp_path / "deep", depth_schedule=[{"fraction": 1.0, "depth": 4}])
    with pytest.raises(RecipeError, match="depth 4, but the head drafts 3 deep"):
        train(deep, toyhead.setup(deep, backend), backend)


def test_depth_at_uses_every_step_once():
    stages = [Stage(fraction=0.6, depth=1), Stage(fraction=0.25, depth=3), Stage(fraction=0.15, depth=7)]
    got = [depth_at(stages, s, 101, 7) for s in range(1, 102)]
    assert got == [1] * 61 + [3] * 25 + [7] * 15
    assert depth_at([], 3, 10, 5) == 5


def test_non_finite_steps_are_skipped_and_counted(tmp_path, backend, capfd):
    data = toyhead.rows()
    spoiled = data[3].ids[-1]
    recipe = toyhead.recipe(tmp_path, {"spoil": spoiled}, steps=20, accumulation=1, max_bad_steps=20, log_every=1)
    # the token occurs in several rows, so some steps are bad and some are not
    run = toyhead.setup(recipe, backend, held_out=False, data=data)
    result = train(recipe, run, backend)
    assert 0 < result.bad_steps < 20
    assert all(p.isfinite().all() for p in run.head.parameters())
    assert lines(tmp_path)[-1]["bad_steps"] == result.bad_steps
    assert "update skipped" in capfd.readouterr().err


def test_many_non_finite_steps_stop_the_run(tmp_path, backend):
    recipe = toyhead.recipe(tmp_path, max_bad_steps=3, save_every=1, steps=9)
    run = toyhead.setup(recipe, backend, held_out=False)
    good = run.head.loss

    def loss(batch, features, teacher, depth):
        sums = good(batch, features, teacher, depth)
        if calls.append(1) or len(calls) > 4:  # two good steps of two micro-batches
            sums.total = sums.total * float("inf")
        return sums

    calls: list[int] = []
    run.head.loss = loss
    with pytest.raises(trainer.TrainError, match=r"3 steps in a row.*Last good checkpoint: .*step-00000[24]"):
        train(recipe, run, backend)


def test_fresh_keeps_the_old_run_aside(tmp_path, backend):
    recipe = toyhead.recipe(tmp_path, steps=4)
    first = train(recipe, toyhead.setup(recipe, backend), backend)
    train(recipe, toyhead.setup(recipe, backend), backend, fresh=True)
    assert (tmp_path / "previous-1/checkpoints" / first.last.name).is_dir()
    same_tensors(tmp_path / "previous-1/checkpoints" / first.last.name, first.last)
    (tmp_path / "previous-1").rename(tmp_path / "previous-2")  # a number that was given away once is free again
    for kept in ({"previous-1", "previous-2"}, {"previous-1", "previous-2", "previous-3"}):
        train(recipe, toyhead.setup(recipe, backend), backend, fresh=True)
        assert {p.name for p in tmp_path.glob("previous-*")} == kept
    assert {p.name for p in (tmp_path / "previous-1").iterdir()} == {"checkpoints", "metrics.jsonl", "recipe.yaml"}


def test_a_run_that_supervises_nothing_stops(tmp_path, backend):
    recipe = toyhead.recipe(tmp_path, steps=20)
    rows = [Row(row.ids, [0] * len(row), source=row.source) for row in toyhead.rows()]
    with pytest.raises(trainer.TrainError, match="10 steps in a row supervised no position"):
        train(recipe, toyhead.setup(recipe, backend, data=rows), backend)
    rows[0] = toyhead.rows()[0]  # it comes once in an epoch of fewer than ten steps
    train(recipe, toyhead.setup(recipe, backend, data=rows), backend, fresh=True)


def test_indivisible_accumulation(tmp_path):
    recipe = toyhead.recipe(tmp_path, accumulation=4)
    with pytest.raises(RecipeError, match="4 micro-batches do not divide over 3 ranks; use a multiple of 3"):
        check_accumulation(recipe, 3, resumes=False)
    check_accumulation(recipe, 3, resumes=True)  # ``test_backends`` has such runs
    check_accumulation(recipe, 2, resumes=False)
    recipe.target.shard = "tp"
    with pytest.raises(RecipeError, match="can go on with 1, 2, 4 ranks"):
        check_accumulation(recipe, 3, resumes=True)


def test_steps_from_epochs():
    settings = toyhead.recipe("x", steps=None, epochs=2.5, accumulation=4).train
    assert total_steps(settings, 40) == 25
    assert total_steps(settings, 1) == 1
    assert micro_seed(0, 1) != micro_seed(1, 0) and 0 <= micro_seed(7, 10**9) < 2**32


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_teacher_computes_in_the_training_precision(tmp_path, backend, monkeypatch, precision, dtype):
    """A bf16 run must not pay for fp32 products of the target's lm_head; an fp32 one must not lose its digits."""
    seen = []
    monkeypatch.setattr(backend, "precision", precision)
    monkeypatch.setattr(toyhead.Toy, "loss", _watched(toyhead.Toy.loss, seen))
    recipe = toyhead.recipe(tmp_path / "run", steps=2)
    train(recipe, toyhead.setup(recipe, backend), backend)
    assert seen and set(seen) == {dtype}


def _watched(loss, seen):
    def watched(self, batch, features, teacher, depth):
        seen.append(teacher.weight.dtype)
        return loss(self, batch, features, teacher, depth)

    return watched
