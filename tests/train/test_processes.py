"""Runs in processes of their own: signals, and two ranks on gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toyhead

from headtrain.heads.io import read_tensors
from headtrain.train.backend import Backend
from headtrain.train.trainer import train

HERE = Path(__file__).parent
ONE = """
import sys, time
sys.path[:0] = [{here!r}, {tests!r}]
import toyhead
from headtrain.train.backend import Backend
from headtrain.train.trainer import train
backend = Backend("fp32")
recipe = toyhead.recipe({out!r}, {{"noise": 0.1}}, **{settings!r})
setup = toyhead.setup(recipe, backend)
good, pause = setup.head.loss, {pause}
setup.head.loss = lambda *a: (time.sleep(pause), good(*a))[1]
result = train(recipe, setup, backend)
print("done", result.step, result.stopped)
"""


def start(out: Path, pause: float = 0.0, env: dict | None = None, **settings) -> subprocess.Popen:
    code = ONE.format(here=str(HERE), tests=str(HERE.parent), out=str(out), settings=settings, pause=pause)
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


def here(out: Path, backend: Backend, **settings):
    recipe = toyhead.recipe(out, {"noise": 0.1}, **settings)
    return train(recipe, toyhead.setup(recipe, backend), backend)


def head_of(run: Path, step: int):
    return read_tensors(run / f"checkpoints/step-{step:06d}/head.safetensors")


SIGNAL = dict(steps=8, accumulation=4, save_every=100, eval_every=100, log_every=1)


def test_sigterm_saves_and_exits_with_0(tmp_path, backend):
    """Stopped in the middle of an optimizer step's micro-batches; the rest gives the uninterrupted run's bits."""
    process = start(tmp_path / "part", 0.02, **SIGNAL)
    curve = tmp_path / "part/metrics.jsonl"
    for _ in range(1200):
        if curve.exists() and curve.read_text().count("\n") >= 2:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    done, step, name = out.split()
    assert (done, name) == ("done", "SIGTERM") and 2 <= int(step) < 8
    assert "SIGTERM: saved" in err and f"run the same command again to resume at step {step}" in err
    assert here(tmp_path / "part", backend, **SIGNAL).step == 8
    here(tmp_path / "whole", backend, **SIGNAL)
    whole, part = head_of(tmp_path / "whole", 8), head_of(tmp_path / "part", 8)
    assert all(torch.equal(whole[n], part[n]) for n in whole)


@pytest.mark.parametrize("at", [1, 3, 4, 9])
def test_sigint_at_any_micro_batch(tmp_path, backend, at):
    """Ctrl-C during micro-batch ``at``: only whole optimizer steps count, and the rest is the same."""
    recipe = toyhead.recipe(tmp_path / "part", {"noise": 0.1}, **SIGNAL)
    run = toyhead.setup(recipe, backend)
    good, calls = run.head.loss, []

    def loss(*args):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return good(*args)

    run.head.loss = loss
    result = train(recipe, run, backend)
    assert result.stopped == "SIGINT" and result.step == at // 4 and len(calls) == at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert here(tmp_path / "part", backend, **SIGNAL).step == 8
    here(tmp_path / "whole", backend, **SIGNAL)
    whole, part = head_of(tmp_path / "whole", 8), head_of(tmp_path / "part", 8)
    assert all(torch.equal(whole[n], part[n]) for n in whole)


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, backend):
    """CASES 36 between processes: unequal supervised counts, noise, a depth schedule that leaves parameters unused, and
    an evaluation with an odd number of batches. Tolerance: sums are taken in another order."""
    stages = [{"fraction": 0.5, "depth": 1}, {"fraction": 0.5, "depth": 3}]
    settings = dict(steps=6, accumulation=4, log_every=1, eval_every=3, save_every=3, depth_schedule=stages)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start(tmp_path / "two", env={**world, "RANK": r, "LOCAL_RANK": r}, **settings) for r in "01"]
    here(tmp_path / "one", backend, **settings)
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.split()[:2] == ["done", "6"], err
        assert "Warning" not in err, err
    one, two = (
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    )
    assert len(one) == len(two) == 8
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "tau", "grad_norm", "supervised"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=2e-6), (a["step"], key)
    one, two = head_of(tmp_path / "one", 6), head_of(tmp_path / "two", 6)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-5)  # AdamW's first steps amplify 1e-7
