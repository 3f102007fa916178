"""Capture, training and export, killed or out of disk at any of their writes: nothing is lost, nothing loads wrongly.

One life is one process that does all three in a folder, as the commands do. Its writes (opening for writing, fsync,
rename, removal, mkdir, a tensor file half written, a line half written) are counted, and it dies at one of them. The
next life goes on in the same folder. In the end every file is that of a life that was never interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import ranks
import tiny
import yaml

from headtrain.data.manifest import ShardRecord
from headtrain.export.folder import verify_folder
from headtrain.heads.io import load_head
from headtrain.metadata import file_sha256
from headtrain.train import checkpoint

WORDS = ["quick", "brown", "fox", "lazy", "dog", "target", "model", "reads", "hidden", "state", "draft", "head"]
STEPS, SAVES = 6, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny target, data, a recipe."""
    folder = tmp_path_factory.mktemp("kill")
    tiny.save(folder / "target", num_hidden_layers=6, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    for name, count in (("train", 12), ("eval", 3)):
        texts = [" ".join(WORDS[(i * 7 + j * (1 + i % 3) + len(name)) % 12] for j in range(10)) for i in range(count)]
        turns = [[{"role": "user", "content": t[:9]}, {"role": "assistant", "content": t}] for t in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    recipe = dict(
        name="tiny",
        target={"path": str(folder / "target")},
        data={"train": [str(folder / "train.jsonl")], "eval": [str(folder / "eval.jsonl")], "max_length": 200},
        features={"shard_tokens": 200},
        head={"kind": "eagle3", "depth": 2, "draft_vocab_size": 64},
        train=dict(
            steps=STEPS,
            save_every=SAVES,
            eval_every=3,
            log_every=1,
            keep=1,
            batch_tokens=128,
            lr=3e-3,
            precision="fp32",
        ),
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def whole(place) -> tuple[Path, int, float]:
    """The folder of a life that was never interrupted, how many writes it made and how long it took."""
    ranks.finish([ranks.start(print, "warm", log=place / "warm.log")])  # the server that is forked from has started
    run, began = place / "whole", time.monotonic()
    assert live(place, run) == 0, (place / "whole.log").read_text()
    return run, int((place / "writes").read_text()), time.monotonic() - began


# -- a life -----------------------------------------------------------------------------------------------------


def live(place: Path, run: Path, at: int | None = None, how: str = "kill", seconds: float | None = None) -> int:
    """Exit code of a life in ``run`` whose write number ``at`` is its last, or that is killed after ``seconds``."""
    process = ranks.start(life, str(place), str(run), at, how, log=place / f"{run.name}.log")
    if seconds is not None:
        process.join(seconds)
        process.kill()
    return ranks.finish([process])[0]


def life(place: str, run: str, at: int | None, how: str) -> None:
    writes = Writes(run, at, how)
    from headtrain import cli
    from headtrain.train import __main__ as command

    command.main(Path(place) / "recipe.yaml", [f"output={run}"], False, False, 600.0)
    sys.argv = ["headtrain", "export", run, "--out", f"{run}/export", "--force"]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    (Path(place) / "writes").write_text(str(writes.count))


def capture_alone(place: str, run: str, at: int | None) -> None:
    """``python -m headtrain.capture``, which is told to stop at its write ``at``."""
    Writes(run, at, "term")
    from headtrain import capture

    capture.stop_on_sigterm()
    capture.main(Path(place) / "recipe.yaml", [f"output={run}"])


class Writes:
    """Counts this process's writes below ``folder``. At number ``at`` the process is killed or told to stop or, from
    there on, the disk is full (``how``)."""

    def __init__(self, folder: str, at: int | None, how: str) -> None:
        import safetensors
        import safetensors.torch

        self.folder, self.at, self.how, self.count = folder, at, how, 0
        real_fsync, real_serialize = os.fsync, safetensors.torch.serialize_file

        def fsync(handle):
            self.write(True)
            real_fsync(handle)

        def serialize(tensors, filename, metadata=None):
            def half():
                real_serialize(tensors, filename, metadata=metadata)
                os.truncate(filename, os.path.getsize(filename) // 2)

            try:
                self.write(True, half)
            except OSError as error:  # what safetensors makes of it
                raise safetensors.SafetensorError(f"Error while serializing: I/O error: {error}") from None
            real_serialize(tensors, filename, metadata=metadata)

        os.fsync, safetensors.torch.serialize_file = fsync, serialize
        self._tear_metrics()
        sys.addaudithook(self.audit)

    def _tear_metrics(self) -> None:
        from headtrain.train.metrics import MetricsFile

        real = MetricsFile.append

        def append(file, line):
            def half():
                with open(file.path, "a") as f:
                    f.write(json.dumps(line)[:25])

            self.write(True, half)
            real(file, line)

        MetricsFile.append = append

    def audit(self, event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate"):
            return
        path = arguments[0]
        if isinstance(path, bytes):
            path = path.decode()
        if not isinstance(path, str) or not path.startswith(self.folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.write(event in ("open", "os.mkdir"))

    def write(self, needs_room: bool, half=None) -> None:
        self.count += 1
        if self.at is None or self.count < self.at:
            return
        if self.how != "full":
            self.at = None
            if half:
                half()
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGTERM)
        elif needs_room:
            raise OSError(errno.ENOSPC, "No space left on device")


# -- what must hold -----------------------------------------------------------------------------------------------


def sound(run: Path) -> tuple[set[str], int]:
    """Whatever is under its final name is whole. Returns the complete shards and the last checkpoint's step."""
    shards = set()
    for record in run.glob("features/*/shard-*.json"):
        file = record.with_suffix(".safetensors")
        assert ShardRecord.model_validate_json(record.read_text()).sha256 == file_sha256(file), file
        shards.add(str(file.relative_to(run)))
    steps = checkpoint.steps(run / "checkpoints")
    for folder in steps.values():
        whole = checkpoint.damage(folder) is None or not (folder / checkpoint.TRAINER_FILE).exists()
        assert whole, checkpoint.damage(folder)  # one that is being removed has lost trainer.json first
        if (folder / checkpoint.TRAINER_FILE).exists():
            load_head(folder)
    if (run / "export").is_dir():
        verify_folder(run / "export")
    return shards, max(steps, default=0)


def files(run: Path) -> dict[str, str]:
    """Name -> what it holds, of all that a run leaves, without times and the last signs of life of killed captures
    (also half-written: nobody reads those, and nobody can tell them from one that is being written)."""
    out = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file() and not p.match("worker-*")):
        text = path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            text = json.dumps([{k: v for k, v in x.items() if "second" not in k} for x in lines]).encode()
        if path.name == checkpoint.TRAINER_FILE:
            trainer = json.loads(text)
            trainer["progress"]["seconds"] = trainer["sha256"] = 0
            text = json.dumps(trainer).encode()
        if path.name == "recipe.yaml":
            text = text.replace(str(run).encode(), b"RUN")
        out[str(path.relative_to(run))] = hashlib.sha256(text).hexdigest()
    return out


def check_equal(run: Path, whole: Path) -> None:
    mine, theirs = files(run), files(whole)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if mine[name] != theirs[name]]


def killed_until_done(place: Path, whole: tuple, run: Path, rng: random.Random) -> int:
    """Lives in one folder until one is not killed; returns how many were."""
    deaths, before = 0, (set(), 0)
    while True:
        if rng.random() < 0.3:  # at a random time
            code = live(place, run, seconds=rng.uniform(0.1, 0.9) * whole[2])
        else:
            code = live(place, run, at=rng.randint(1, whole[1] // 4))
        now = sound(run)
        assert before[0] <= now[0] and before[1] <= now[1], "something that was complete is gone"
        before = now
        if code == 0:
            check_equal(run, whole[0])
            return deaths
        assert code == -signal.SIGKILL, (place / f"{run.name}.log").read_text()
        deaths += 1


@pytest.mark.parametrize("least, seed", [(20, 5), pytest.param(200, 6, marks=pytest.mark.full)])
def test_killed_at_random_points_over_and_over(place, whole, least, seed):
    deaths, number, rng = 0, 0, random.Random(seed)
    while deaths < least:
        number += 1
        deaths += killed_until_done(place, whole, place / f"killed-{least}-{number}", rng)


@pytest.mark.full
def test_killed_at_every_write(place, whole):
    for at in range(1, whole[1] + 1):
        run = place / f"every-{at}"
        assert live(place, run, at) == -signal.SIGKILL
        sound(run)
        assert live(place, run) == 0
        check_equal(run, whole[0])


def full_disk(place: Path, whole: tuple, at: int) -> None:
    run = place / f"full-{at}"
    code, log = live(place, run, at, "full"), place / f"full-{at}.log"
    text = log.read_text()
    sound(run) if run.exists() else None
    assert code == 2 and "Traceback" not in text, (at, text)
    assert "No space left" in text or "disk is full" in text, (at, text)
    assert live(place, run) == 0, log.read_text()
    check_equal(run, whole[0])


def test_a_full_disk_is_said_and_costs_nothing(place, whole):
    rng = random.Random(7)
    for part in range(3):  # capture, training, export
        full_disk(place, whole, rng.randint(1 + part * whole[1] // 3, (part + 1) * whole[1] // 3))


def test_a_capture_that_is_told_to_stop_ends_with_0_and_goes_on(place, whole):
    run, log = place / "told", place / "told.log"
    for at in (20, None):
        assert ranks.finish([ranks.start(capture_alone, str(place), str(run), at, log=log)]) == [0], log.read_text()
        assert len(sound(run)[0]) < 4 if at else True
        assert "SIGTERM: complete shards are kept" in log.read_text()
    assert sound(run)[0] == sound(whole[0])[0]


@pytest.mark.full
def test_a_disk_full_at_every_write(place, whole):
    for at in range(1, whole[1] + 1):
        full_disk(place, whole, at)
