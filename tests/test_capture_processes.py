"""``headtrain.capture`` as a launcher starts it: several processes, one of which may die."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import ranks
import yaml
from rich.console import Console

from headtrain import capture as command
from headtrain.capture import capture, head_wants, open_stream, plan_rows, windows_of
from headtrain.config import Recipe
from headtrain.data.loader import Loader
from headtrain.data.store import FeatureStore
from headtrain.target.load import load_target

QUIET = Console(quiet=True)


def write_recipe(tmp_path: Path, target: Path, name: str, **features) -> Recipe:
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
            head={"kind": "eagle3"},
        )
    )
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    return recipe


def run_rank(rank: int, path: str, dies: int | None = None) -> None:
    """The command in one process; ``dies``: the rank that is killed at its third forward."""
    load = command.load_target

    def load_slowly(*args):
        target, calls = load(*args), []
        features = target.features

        def slow(*args):
            calls.append(1)
            if rank == dies and len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)
            return features(*args)

        target.features = slow
        return target

    command.load_target = load_slowly
    command.main(Path(path), [])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_ranks_share_the_work_and_a_killed_ones_is_taken_over(tmp_path, tiny_folder):
    alone = write_recipe(tmp_path, tiny_folder, "alone")
    capture(alone, target=load_target(alone.target, "cpu"), console=QUIET)
    write_recipe(tmp_path, tiny_folder, "shared")
    started = ranks.start_ranks(run_rank, 3, tmp_path, str(tmp_path / "shared.yaml"), 1)
    assert ranks.finish(started, 120) == [0, -signal.SIGKILL, 0]
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert "capture rank 1 (" in said[0] + said[2] and f"process {started[1].pid}) died" in said[0] + said[2]
    assert "taking over shard" in said[0] + said[2]
    assert "tokens/s" in said[0] and "by this process)" in said[0] and "tokens/s" not in said[2]


def test_training_streams_from_the_command(tmp_path, tiny_folder):
    """The command of a stream ends when training has finished; what was read is what a whole store gives."""
    alone = write_recipe(tmp_path, tiny_folder, "alone", window=2)
    target = load_target(alone.target, "cpu")
    stored = capture(alone, target=target, console=QUIET)
    recipe = write_recipe(tmp_path, tiny_folder, "stream", mode="stream", window=2, keep_gb=0.001, wait=60.0)
    started = ranks.start_ranks(run_rank, 2, tmp_path, str(tmp_path / "stream.yaml"))
    rows, wants = plan_rows(recipe, target.tokenizer)["train"].rows, head_wants(recipe, target.shape)
    source = open_stream(recipe, target, wants, rows, 0, QUIET)
    windows = windows_of(recipe, source.manifest)
    assert windows == windows_of(alone, stored.manifest) and windows.size == 2
    streamed, whole = Loader(source, 200, 1, windows=windows), Loader(stored, 200, 1, windows=windows)
    count = 2 * whole.micro_batches_per_epoch
    with closing(streamed.batches(0, count)) as ones, closing(whole.batches(0, count)) as others:
        for (batch, features), (other, its) in zip(ones, others, strict=True):
            assert batch.ids.equal(other.ids) and features.layers.equal(its.layers) and features.final.equal(its.final)
    assert ranks.finish(started, 120) == [0, 0]
    assert len(FeatureStore(tmp_path / "stream" / "eval")) == 4
