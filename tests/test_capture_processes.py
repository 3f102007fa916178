"""``headtrain.capture`` as a launcher starts it: several processes, one of which may die."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import yaml
from rich.console import Console

from headtrain import capture as command
from headtrain.capture import capture
from headtrain.config import Recipe
from headtrain.data.storage import Local
from headtrain.data.store import FeatureStore, StoreError
from headtrain.heads.io import read_tensors
from headtrain.target.load import load_target
from headtrain.train import __main__ as training
from headtrain.train.backend import Backend
from headtrain.train.checkpoint import CheckpointError
from headtrain.train.setup import prepare_run
from headtrain.train.trainer import train

QUIET = Console(quiet=True)


def write_recipe(tmp_path: Path, target: Path, name: str, train_as: dict | None = None, **features) -> Recipe:
    lines = [
        f'{{"messages": [{{"role": "user", "content": "Say {i}"}}, {{"role": "assistant", "content": "{i} " }}]}}'
        for i in range(24)
    ]
    for split, count in (("train", 24), ("eval", 4)):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines[:count]) + "\n")
    settings = dict(dir=str(tmp_path / name), dtype="float32", shard_tokens=100, batch_tokens=60)
    recipe = Recipe.model_validate(
        dict(
            name="tiny",
            target={"path": str(target)},
            data={"train": [str(tmp_path / "train.jsonl")], "eval": [str(tmp_path / "eval.jsonl")]},
            features=settings | features,
            head={"kind": "eagle3", "depth": 2, "draft_vocab_size": 64},
            train=train_as or {},
            output=str(tmp_path / f"run-{name}"),
        )
    )
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    return recipe


def run_rank(rank: int, path: str, world: int = 0, dies: int | None = None) -> None:
    """The command in one process; ``dies``: the rank that is killed at its second forward. No rank goes on to that
    before all of ``world`` (if given) are at it, each with a shard of its own, however late one of them started."""
    load = command.load_target

    def load_slowly(*args):
        target, calls = load(*args), []
        features = target.features

        def slow(*args):
            calls.append(1)
            if world and len(calls) == 2:
                Path(path).with_suffix(f".{rank}.there").touch()
                while any(not Path(path).with_suffix(f".{r}.there").exists() for r in range(world) if r != rank):
                    time.sleep(0.02)
                if rank == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
            return features(*args)

        target.features = slow
        return target

    command.load_target = load_slowly
    command.main(Path(path), [])


def run_training(rank: int, path: str) -> None:
    training.main(Path(path), [], False, False, 60.0)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_ranks_share_the_work_and_a_killed_ones_is_taken_over(tmp_path, tiny_folder):
    alone = write_recipe(tmp_path, tiny_folder, "alone")
    capture(alone, target=load_target(alone.target, "cpu"), console=QUIET)
    write_recipe(tmp_path, tiny_folder, "shared")
    started = ranks.start_ranks(run_rank, 3, tmp_path, str(tmp_path / "shared.yaml"), 3, 1)
    assert ranks.finish(started, 120) == [0, -signal.SIGKILL, 0]
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert "capture rank 1 (" in said[0] + said[2] and f"process {started[1].pid}) died" in said[0] + said[2]
    assert "taking over shard" in said[0] + said[2]
    assert "tokens/s" in said[0] and "by this process)" in said[0] and "tokens/s" not in said[2], said[0]


def test_training_streams_from_the_command_to_the_same_head(tmp_path, tiny_folder):
    """Two captures started by the command, which ends when training has; more than an epoch, half of the features
    on the disk. The head is, bit for bit, that of a store that was captured before."""
    train_as = dict(steps=6, accumulation=2, batch_tokens=100, save_every=6, eval_every=6, precision="fp32")
    more = dict(window=2, batch_tokens=1)
    alone = write_recipe(tmp_path, tiny_folder, "alone", train_as, **more)
    backend = Backend("fp32")
    whole = train(alone, prepare_run(alone, backend, QUIET), backend)
    size = sum(path.stat().st_size for path in (tmp_path / "alone" / "train").iterdir())
    recipe = write_recipe(
        tmp_path, tiny_folder, "stream", train_as, **more, mode="stream", keep_gb=size / 2e9, wait=60.0, timeout=20.0
    )
    started = ranks.start_ranks(run_rank, 2, tmp_path, str(tmp_path / "stream.yaml"))
    setup = prepare_run(recipe, backend, QUIET)
    assert setup.train.windows.size == 2 and setup.held_out.windows is None
    streamed = train(recipe, setup, backend)
    assert ranks.finish(started, 120) == [0, 0], (tmp_path / "rank-0.log").read_text()
    ones, others = (read_tensors(result.last / "head.safetensors") for result in (streamed, whole))
    assert all(torch.equal(ones[name], others[name]) for name in others) and ones.keys() == others.keys()
    assert streamed.evaluation["loss"] == whole.evaluation["loss"]
    left = sum(path.stat().st_size for path in (tmp_path / "stream" / "train").glob("shard-*"))
    assert 0 < left <= size / 2
    assert len(FeatureStore(tmp_path / "stream" / "eval")) == 4
    other = recipe.model_copy(deep=True)
    other.features.window = 3
    with pytest.raises(CheckpointError, match="features.window"):
        train(other, setup, backend)


@pytest.mark.parametrize(
    "world, told, by, code",
    [
        (1, 0, signal.SIGTERM, 0),
        (1, 0, signal.SIGINT, 130),
        (2, 0, signal.SIGTERM, 0),
        (2, 1, signal.SIGTERM, 0),
    ],
)
def test_training_that_waits_for_features_saves_when_it_is_told_to_stop(
    one_thread, tmp_path, tiny_folder, world, told, by, code
):
    """One rank waits for a shard that nobody captures, another one in an exchange with it; whoever is told. What is
    trained after it has come is the uninterrupted run's."""
    train_as = dict(steps=4, accumulation=2, batch_tokens=60, save_every=9, eval_every=9, precision="fp32", log_every=1)
    more = dict(window=1, shard_tokens=60, mode="stream", timeout=20.0)
    recipe = write_recipe(tmp_path, tiny_folder, "store", train_as, **more)
    everything = recipe.model_copy(deep=True)
    everything.features.mode = "offline"
    capture(everything, console=QUIET)
    backend = Backend("fp32")
    setup = prepare_run(recipe, backend, QUIET)
    visit = setup.train.visit_of(4 if told else 5)  # of the third step's two micro-batches, rank 0's or rank 1's
    number = setup.train.windows.order(recipe.train.seed, 0)[visit]
    kept = {path: path.read_bytes() for path in (tmp_path / "store/train").glob(f"shard-{number:05d}.*")}
    for path in kept:
        path.unlink()

    started = ranks.start_ranks(run_training, world, tmp_path, str(tmp_path / "store.yaml"))
    until = time.monotonic() + 120
    while not any(b"waiting for shard" in read(p) for p in (tmp_path / "store/train").glob("worker-*.json")):
        assert time.monotonic() < until, (tmp_path / "rank-0.log").read_text()
        time.sleep(0.1)
    time.sleep(1.0)  # the other rank has come to the exchange
    began = time.monotonic()
    os.kill(started[told].pid, by)
    assert ranks.finish(started, 60) == [code] * world, (tmp_path / "rank-0.log").read_text()
    assert time.monotonic() - began < 20
    said = (tmp_path / "rank-0.log").read_text()
    assert "run the same command again to resume at step 2" in said, said
    if world == 2:
        return
    assert [path.name for path in (tmp_path / "run-store/checkpoints").glob("step-*")] == ["step-000002"]
    for path, content in kept.items():
        path.write_bytes(content)
    resumed = train(recipe, setup, backend)
    recipe.output = str(tmp_path / "whole")
    whole = train(recipe, prepare_run(recipe, backend, QUIET), backend)
    ones, others = (read_tensors(result.last / "head.safetensors") for result in (resumed, whole))
    assert all(torch.equal(ones[name], others[name]) for name in others) and ones.keys() == others.keys()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_a_complete_split_is_tidied_though_the_other_one_is_not_complete(tmp_path, tiny_folder):
    """A capture was killed between a shard's record and the end of its claim, or while it made one."""
    recipe = write_recipe(tmp_path, tiny_folder, "store")
    capture(recipe, console=QUIET)
    before = files(tmp_path / "store")
    (tmp_path / "store/train/claim-00000-1.json").write_text("of a process that was killed")
    (tmp_path / "store/eval/shard-00000.json").unlink()
    capture(recipe, console=QUIET)
    assert files(tmp_path / "store") == before


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (Local(tmp_path).write, Local(tmp_path).create):
        with pytest.raises(OSError, match="No space left"):
            write("claim-00000-1.json", b"content")
    assert not files(tmp_path)


@pytest.mark.parametrize("mode", ["offline", "stream"])
def test_a_complete_store_that_cannot_be_written_is_trained_on(tmp_path, tiny_folder, monkeypatch, mode):
    train_as = dict(steps=3, batch_tokens=100, precision="fp32")
    recipe = write_recipe(tmp_path, tiny_folder, "store", train_as, window=2)
    capture(recipe, console=QUIET)
    (tmp_path / "store/train/claim-00000-1.json").write_text("of a process that was killed")
    before = files(tmp_path / "store")

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("write", "create", "delete", "staging", "publish"):
        monkeypatch.setattr(Local, name, refused)
    recipe.features.mode = mode
    backend = Backend("fp32")
    assert train(recipe, prepare_run(recipe, backend, QUIET), backend).step == 3
    assert files(tmp_path / "store") == before
    (tmp_path / "store/train/shard-00001.json").unlink()
    with pytest.raises(StoreError, match=r"is not complete and cannot be written \(.*Read-only"):
        train(recipe, prepare_run(recipe, backend, QUIET), backend, fresh=True)
