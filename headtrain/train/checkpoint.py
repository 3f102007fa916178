"""Checkpoints: whole or not there, verified when read, never a pickle.

``RUN/checkpoints/step-000200/`` holds head.safetensors and headtrain.json (this project's own form of a head),
optimizer.safetensors and trainer.json: the trainer's counters, what the run was made from, a sha256 of each of the
other files and one of all that itself. A folder is written under a temporary name, fsynced and renamed. The last one
is the highest step, and its counters say which one is the best.

No random-generator state is kept: the trainer seeds every micro-batch from (seed, global micro-batch index).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import vocab
from ..config import Recipe, digest
from ..data.storage import no_room
from ..heads.base import DraftHead
from ..heads.io import FILE as HEAD_FILE
from ..heads.io import load_strict, read_tensors, save_head, save_tensors
from ..metadata import Metadata, file_sha256, write_json
from ..target import adapter
from . import lora
from .joint import Joint

OPTIMIZER_FILE, TRAINER_FILE = "optimizer.safetensors", "trainer.json"
MERGED = "merged"  # folder of the adapted target, where ``train.joint.save`` asks for it
FORMAT = 2
# What the result of training does not depend on; everything else must be the same at resume.
_NOT_TRAINING = {"eval_every", "save_every", "keep", "log_every", "trackers", "max_bad_steps"}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or resumed; the message says what to do."""


@dataclass
class Progress:
    """The trainer's counters. step: finished optimizer steps (skipped ones included); tokens: supervised positions
    trained on; packed: all tokens that went through; bad: skipped steps, bad_row: those in a row; best_step,
    best_tau: the best evaluation so far; seconds: time spent training; window: flat sums since the last line of
    metrics, so that a resumed run writes the same lines."""

    step: int = 0
    tokens: int = 0
    packed: int = 0
    bad: int = 0
    bad_row: int = 0
    best_step: int = 0
    best_tau: float = 0.0
    seconds: float = 0.0
    window: list[float] = field(default_factory=list)

    def count(self, good: bool, packed: int, supervised: int, seconds: float) -> None:
        """One more optimizer step is done, or skipped (not ``good``)."""
        self.step, self.packed, self.seconds = self.step + 1, self.packed + packed, seconds
        self.tokens += supervised if good else 0
        self.bad += not good
        self.bad_row = 0 if good else self.bad_row + 1


def made_from(recipe: Recipe, head: DraftHead, data_sha256: str, precision: str, target: dict) -> dict[str, Any]:
    """Everything that the course of training follows from, flat: dotted key -> value."""
    unused = set() if recipe.train.warm_start else {"warm_start_vocab"}
    train = recipe.train.model_dump(mode="json", exclude=_NOT_TRAINING | unused) | {"precision": precision}
    if train["joint"]:
        del train["joint"]["save"]
    features = {"dtype": recipe.features.dtype}
    if (window := recipe.features.window_size) and recipe.features.mode != "online":  # the order of rows
        features |= {"window": window, "shard_tokens": recipe.features.shard_tokens}
    parts = {"head": head.config.model_dump(mode="json"), "train": train, "features": features, "target": target}
    return _flat(parts) | {"data_sha256": data_sha256}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    out = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out


def steps(root: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint under ``root`` (RUN/checkpoints), ascending."""
    found = {}
    for folder in root.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", folder.name)
        if match and folder.name == name_of(int(match[1])) and folder.is_dir():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def find(run: str | Path, which: str = "best") -> Path:
    """The folder of a run's ``best``, ``last`` or ``NUMBER``-th step's checkpoint; a folder that is a checkpoint
    itself is returned as it is. Raises CheckpointError."""
    run = Path(run)
    if (run / HEAD_FILE).is_file():
        return run
    root = run / "checkpoints"
    found = steps(root)
    if not found:
        raise CheckpointError(f"no checkpoint under {root}; train first")
    last = list(found.values())[-1]
    if which == "last":
        return last
    if which == "best":
        return found.get(_best_step(last), last)
    if which.isdigit() and int(which) in found:
        return found[int(which)]
    raise CheckpointError(f"no checkpoint {which!r} under {root}; expected best, last or one of {list(found)}")


def find_sound(run: Path) -> Path:
    """``find``, and raises CheckpointError where the files are not those that were saved."""
    folder = find(run)
    if (folder / TRAINER_FILE).is_file() and (what := damage(folder)):
        raise CheckpointError(f"{folder} is damaged: {what}; take an earlier checkpoint, or train again")
    return folder


def _best_step(last: Path) -> int:
    """0: none was better than others, or the folder was moved here without its trainer.json."""
    if not (last / TRAINER_FILE).is_file():
        return 0
    try:
        return _trainer(last)["progress"]["best_step"]
    except CheckpointError as error:
        raise CheckpointError(f"which checkpoint is the best is not known: {error}. {_hint(last)}") from None


def save(
    root: Path,
    head: DraftHead,
    metadata: Metadata,
    optimizer: dict[str, Tensor],
    progress: Progress,
    origin: dict[str, Any],
    joint: Joint | None = None,
) -> Path:
    """Write the checkpoint of ``progress.step``. joint: the target's adapter is written, too, and where its section
    says so the whole adapted target.

    Raises CheckpointError where it cannot be written; earlier checkpoints are untouched then.
    """
    folder = root / name_of(progress.step)
    temporary = root / f".tmp-{folder.name}"
    if os.path.lexists(folder):
        raise CheckpointError(
            f"{folder} is there already, and this run did not write it: does another one write into {root}? Stop that, "
            f"move {folder} away and run the same command again."
        )
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_head(temporary, head, metadata)
        if lora.adapted(head):
            save_tensors(temporary / lora.FILE, lora.state(head))
        if optimizer:
            save_tensors(temporary / OPTIMIZER_FILE, optimizer)
        if joint:
            _save_adapter(temporary, joint)
        found = sorted(p for p in temporary.rglob("*") if p.is_file())
        files = {p.relative_to(temporary).as_posix(): file_sha256(p) for p in found}
        trainer = {"format": FORMAT, "progress": vars(progress), "files": files, "made_from": origin}
        write_json(temporary / TRAINER_FILE, trainer | {"sha256": digest(trainer)})
        _fsync_folder(temporary)
        os.rename(temporary, folder)
        _fsync_folder(root)
    except Exception as error:  # safetensors reports a full disk as its own SafetensorError
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_why_not_saved(error, folder)) from error
    return folder


def prune(root: Path, keep: int, best_step: int) -> None:
    """Remove all but the newest ``keep`` and the best."""
    for step, old in list(steps(root).items())[:-keep]:
        if step != best_step:
            remove(old)


def remove(folder: Path) -> None:
    """Under a name that ``clean`` knows, so that what a kill leaves is not taken for a checkpoint."""
    gone = folder.with_name(f".tmp-gone-{folder.name}")
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _save_adapter(folder: Path, joint: Joint) -> None:
    """``adapter/`` as peft has it; ``merged/``: a target like any other, with its tokenizer."""
    place = folder / adapter.FOLDER
    place.mkdir()
    save_tensors(place / adapter.WEIGHTS_FILE, joint.adapter.named())
    write_json(place / adapter.CONFIG_FILE, joint.adapter.config_json())
    if joint.section.save == "merged":
        joint.adapter.merged_model().save_pretrained(folder / MERGED)
        if joint.target.tokenizer is not None:
            joint.target.tokenizer.save_pretrained(folder / MERGED)


def _why_not_saved(error: Exception, folder: Path) -> str:
    why = no_room(error) or f"{type(error).__name__}: {error}"
    kept = list(steps(folder.parent).values())
    where = f"{kept[-1]} is intact: make room and run the same command to resume from it" if kept else "none was saved"
    return f"checkpoint {folder} could not be written: {why}. Last checkpoint: {where}"


def clean(root: Path) -> list[str]:
    """Remove what an interrupted save left behind; returns the names."""
    left = sorted(root.glob(".tmp-*"))
    for folder in left:
        shutil.rmtree(folder)
    return [p.name for p in left]


def resume(
    folder: Path, head: DraftHead, origin: dict[str, Any], joint: Joint | None = None
) -> tuple[dict[str, Tensor], Progress]:
    """Load the head's tensors (and the target's adapter) in place; returns the optimizer's state and the counters.

    Every file is verified first. Raises CheckpointError, naming the newest intact checkpoint before a damaged one, and
    each thing that this run is not made from (``origin``) with both values.
    """
    try:
        trainer = _verified(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is damaged: {error}. {_hint(folder)}") from None
    _check_same_run(folder, trainer["made_from"], origin)
    found, mine = Metadata.read(folder).draft_vocab.sha256, vocab.sha256(head.draft_ids)
    if found != mine:
        raise CheckpointError(f"{folder}: draft vocabulary {found}, this run chose {mine}")
    tensors = read_tensors(folder / HEAD_FILE)
    tensors.pop("draft_ids", None)
    try:
        if lora.adapted(head):
            lora.load(head, read_tensors(folder / lora.FILE), tensors, str(folder))
        else:
            load_strict(head, tensors, str(folder / HEAD_FILE))
        if joint:
            joint.adapter.load(read_tensors(folder / adapter.FOLDER / adapter.WEIGHTS_FILE))
    except ValueError as error:
        raise CheckpointError(f"{folder} cannot be resumed: {error}") from None
    state = read_tensors(folder / OPTIMIZER_FILE) if OPTIMIZER_FILE in trainer["files"] else {}
    return state, Progress(**trainer["progress"])


def _check_same_run(folder: Path, theirs: dict[str, Any], origin: dict[str, Any]) -> None:
    mine = json.loads(json.dumps(origin))
    lines = [
        f"{key}: {theirs.get(key, '(absent)')!r} in the checkpoint, {mine.get(key, '(absent)')!r} now"
        for key in sorted({*theirs, *mine})
        if theirs.get(key) != mine.get(key)  # an option that is newer than the checkpoint, and not in use, is None
    ]
    if lines:
        raise CheckpointError(
            f"{folder} was made by another run:\n  "
            + "\n  ".join(lines)
            + f"\nuse the old values to resume, `--fresh` to start over (the old run is kept aside), another `output`, "
            f"or train.warm_start={folder} to continue from its head"
        )


def _hint(folder: Path) -> str:
    """What to do about a damaged checkpoint."""
    found = list(steps(folder.parent).values())
    before = found[: found.index(folder)] if folder in found else []
    intact = next((p for p in reversed(before) if damage(p) is None), None)
    if intact is None:
        return "No earlier checkpoint is intact; `--fresh` starts over"
    return f"{intact} is intact: remove or move {folder} away and run the same command to resume from it"


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        _verified(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _verified(folder: Path) -> dict[str, Any]:
    """What trainer.json says, once every file is what was saved. Raises CheckpointError saying which is not."""
    trainer = _trainer(folder)
    name = name_of(trainer["progress"]["step"])
    if folder.name.startswith("step-") and folder.name != name:
        raise CheckpointError(f"{TRAINER_FILE} is of {name}; the folder was renamed or its files were exchanged")
    for file, expected in trainer["files"].items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{file} is missing")
        if (found := file_sha256(path)) != expected:
            raise CheckpointError(f"{file} has sha256 {found[:12]}..., {TRAINER_FILE} says {expected[:12]}...")
    return trainer


def _trainer(folder: Path) -> dict[str, Any]:
    """trainer.json, whose own checksum is right. Raises CheckpointError."""
    path = folder / TRAINER_FILE
    try:
        trainer = json.loads(path.read_text(encoding="utf-8"))
        stated = trainer.pop("sha256", None) if isinstance(trainer, dict) else None
        found = digest(trainer)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    version = trainer.get("format") if isinstance(trainer, dict) else None
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version!r}, this version of headtrain reads {FORMAT} only")
    if found != stated:
        raise CheckpointError(f"{path} was changed: its content has sha256 {found[:12]}..., it says {stated!s:.12}...")
    return trainer


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
