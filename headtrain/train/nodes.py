"""Nodes that share storage and nodes that do not: who writes where, and checkpoints where they are needed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from ..metadata import file_sha256
from . import checkpoint
from .watch import Watch

CHUNK = 64 << 20  # bytes of one broadcast


def keeps(folder: Path, watch: Watch) -> bool:
    """Whether this process writes into ``folder``: rank 0 does, and on a node that does not see rank 0's folder under
    that name (storage of its own) its first rank. Every rank calls it; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    if watch.world == 1:
        return True
    mark = f".seen-{uuid.uuid4().hex}"  # a new name: network file systems remember for a while what was not there
    if watch.rank == 0:
        try:
            (folder / mark).touch()
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            mark = ""  # nothing can be written there: every node looks for itself at what there is
    try:
        mark = watch.share("storage", mark)[0]
        sees = mark != "" and (folder / mark).exists()
        watch.share("seen")
    finally:
        if watch.rank == 0 and mark:
            (folder / mark).unlink(missing_ok=True)
    return watch.rank == 0 or (watch.first_on_node and not sees)


def same_everywhere(what: str, value: str, watch: Watch) -> str | None:
    """A line that names the ranks whose ``value`` differs from rank 0's, or None. Every rank calls it."""
    values = watch.share(what, value)
    others = [str(rank) for rank, found in enumerate(values) if found != values[0]]
    if not others:
        return None
    return f"{what}: rank 0 has {values[0]}, rank {', '.join(others[:16])} has {values[int(others[0])]}"


def spread(run: Path, keeper: bool, device: torch.device, watch: Watch) -> None:
    """Give every node the newest checkpoint of any (with the best one and the curve), so that a run goes on wherever
    its ranks are started. Nothing is sent where all see the same. Every rank calls it, after old runs were set aside.
    Raises CheckpointError where nodes have two different ones of the same step."""
    root = run / "checkpoints"
    step = max(checkpoint.steps(root), default=0)
    found = [json.loads(text) for text in watch.share("newest checkpoint", json.dumps([step, _content(root, step)]))]
    newest = max(found)
    source = found.index(newest)
    other = [rank for rank, (s, content) in enumerate(found) if s == newest[0] and content != newest[1]]
    if other:
        raise checkpoint.CheckpointError(
            f"rank {source} and rank {other[0]} have different checkpoints {checkpoint.name_of(newest[0])} in {root}, "
            "each on storage of its own: move one of them away"
        )
    if all(one == newest for one in found):
        return
    names = json.loads(watch.share("its files", json.dumps(_files(run, step) if watch.rank == source else {}))[source])
    staging = root / ".tmp-received" if keeper and step < newest[0] else None
    for name, size in names.items():
        _send(run / name, size, staging and staging / name, source, device)
    if staging is not None:
        _put_in_place(staging, run)
    watch.share("checkpoint sent")


def _content(root: Path, step: int) -> str:
    """A digest of the checkpoint: its trainer.json holds the others' checksums."""
    path = root / checkpoint.name_of(step) / checkpoint.TRAINER_FILE
    return file_sha256(path) if path.is_file() else ""


def _files(run: Path, step: int) -> dict[str, int]:
    """Name in the run's folder -> bytes of what a resumed run reads."""
    root = run / "checkpoints"
    folders = {root / checkpoint.name_of(step), checkpoint.find(run, "best")}
    paths = [p for folder in sorted(folders) for p in sorted(folder.rglob("*"))]
    paths.append(run / "metrics.jsonl")
    return {p.relative_to(run).as_posix(): p.stat().st_size for p in paths if p.is_file()}


def _send(path: Path, size: int, into: Path | None, source: int, device: torch.device) -> None:
    """One file, in chunks: read by rank ``source``, written where ``into`` says so. Every rank calls it."""
    mine = dist.get_rank() == source
    if into is not None:
        into.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") if mine else nullcontext() as read, open(into, "wb") if into else nullcontext() as write:
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            chunk = torch.frombuffer(bytearray(read.read(length) if mine else length), dtype=torch.uint8).to(device)
            dist.broadcast(chunk, source)
            if into is not None:
                write.write(chunk.cpu().numpy().tobytes())
        if into is not None:
            write.flush()
            os.fsync(write.fileno())


def _put_in_place(staging: Path, run: Path) -> None:
    """The newest checkpoint last: what is killed before that receives it again."""
    if (staging / "metrics.jsonl").exists():
        os.replace(staging / "metrics.jsonl", run / "metrics.jsonl")
    for folder in checkpoint.steps(staging / "checkpoints").values():
        mine = run / "checkpoints" / folder.name
        if mine.is_dir():  # the best one, of this run or of an earlier one that was never resumed here
            checkpoint.remove(mine)
        os.rename(folder, mine)
    shutil.rmtree(staging)
