"""Write a trained part of a checkpoint back into its safetensors files.

The tensors keep name, shape and type, so a stitched file is the old file with some byte ranges overwritten: headers
and index stay true, and every other tensor is bit-identical whatever its type. Either a full copy of the folder is
made, or a small patch: the tensors alone, with the index that names them, to be applied to the same checkpoint later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.io import read_tensors, save_tensors
from ..metadata import Metadata, write_json
from ..target.files import tensor_files
from .engines import ExportError
from .files import read_json, staged

INDEX = "model.safetensors.index.json"
RECORD = "headtrain_stitch.json"  # what was stitched, in every folder that this module writes
# sorts behind the usual names of shards: a loader that reads every file of the index takes the last of two equal names
PATCH = "model.zz-patch.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """One tensor in its file: ``offset`` counts from the file's start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def places(folder: Path) -> dict[str, Place]:
    """Every tensor of a folder of safetensors, sharded or not. Raises ExportError, TargetError: names that leave the
    folder, files that are not there or cut off, an index that names tensors which its files do not hold."""
    files = tensor_files(folder)
    if outside := sorted({str(f) for f in files.values() if f.parent != folder or not f.name.endswith(".safetensors")}):
        raise ExportError(f"{folder / INDEX} names files outside the folder or of another kind: {', '.join(outside)}")
    headers = {path: _header(path) for path in sorted(set(files.values()))}
    if lost := sorted(n for n, f in files.items() if n not in headers[f]):
        raise ExportError(f"{folder / INDEX} names tensors that its files do not hold: {', '.join(lost[:4])}")
    return {name: headers[path][name] for name, path in files.items()}


def _header(path: Path) -> dict[str, Place]:
    """The safetensors header: 8 bytes with its length, then JSON; offsets count from its end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        try:
            entries = json.loads(file.read(start - 8)) if 8 < start <= size else {}
        except ValueError:
            entries = {}
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - start:
            raise ExportError(f"{path}: {name} lies beyond the end of the file: is the download whole?")
        found[name] = Place(path, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    if not found:
        raise ExportError(f"{path} is not a safetensors file, or holds no tensor")
    return found


def stitch(
    source: str | Path,
    tensors: dict[str, Tensor],
    out: str | Path,
    *,
    patch: bool = False,
    force: bool = False,
    metadata: Metadata | None = None,
    before: dict[str, str] | None = None,
) -> Path:
    """Write ``tensors`` into a copy of the checkpoint ``source``: a full copy (every file of the folder, unchanged but
    for these tensors), or with ``patch`` only these tensors. ``out`` appears when it is complete.

    tensors: by their names in the files; they are cast to the type that they have there. force: replace an ``out``
    that this function made. metadata: of the trained head, for the record. before: sha256 of what the tensors replace
    (``read_patch``). Raises ExportError and writes nothing: names or shapes that the checkpoint does not have, types
    that are no floats, values that are not finite, another checkpoint than the one that ``before`` was taken from.
    """
    source, out = Path(source), Path(out)
    found = places(source)
    data = {name: _bytes(name, tensor, found.get(name)) for name, tensor in sorted(tensors.items())}
    old = {name: hashlib.sha256(found[name].read()).hexdigest() for name in data}
    if changed := sorted(n for n, digest in (before or {}).items() if old.get(n) != digest):
        raise ExportError(
            f"{source} is not the checkpoint that the patch was made for: it holds other values of "
            + ", ".join(changed[:4])
        )
    _check_out(source, out, force)
    record = {
        "form": "patch" if patch else "full",
        "tensors": {
            name: {"file": found[name].file.name, "before": old[name], "after": hashlib.sha256(raw).hexdigest()}
            for name, raw in data.items()
        },
        "head": metadata.model_dump(mode="json") if metadata else None,
    }
    with staged(out) as temporary:
        if patch:
            _write_patch(source, temporary, {name: _tensor(raw, found[name]) for name, raw in data.items()})
        else:
            _check_disk(source, out)
            shutil.copytree(source, temporary, dirs_exist_ok=True)  # follows links: the Hub's cache is links
            for name, raw in data.items():
                _overwrite(temporary / found[name].file.name, found[name], raw)
            again = places(temporary)
            if wrong := [name for name, raw in data.items() if again[name].read() != raw]:
                raise ExportError(f"{out}: what was written is not what was read back: {', '.join(wrong[:4])}")
        write_json(temporary / RECORD, record)
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
    return out


def read_patch(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, str], Metadata | None]:
    """A patch folder: its tensors, the sha256 of those that they replace, and the trained head's metadata. Raises
    ExportError for any other folder."""
    folder = Path(folder)
    record = read_json(folder / RECORD)
    if record.get("form") != "patch":
        raise ExportError(f"{folder} is no patch but a whole checkpoint: use it as it is")
    tensors = read_tensors(folder / PATCH)
    if tensors.keys() != record["tensors"].keys():
        raise ExportError(
            f"{folder}: {PATCH} and {RECORD} disagree on {sorted(tensors.keys() ^ record['tensors'].keys())}"
        )
    head = record.get("head")
    return tensors, {n: t["before"] for n, t in record["tensors"].items()}, head and Metadata.model_validate(head)


def is_patch(folder: str | Path) -> bool:
    return (Path(folder) / PATCH).is_file()


def _bytes(name: str, tensor: Tensor, place: Place | None) -> bytes:
    """The tensor as the file holds it."""
    if place is None:
        raise ExportError(f"the checkpoint has no tensor {name}")
    if place.dtype not in DTYPES:
        raise ExportError(
            f"{name} is stored as {place.dtype}, expected {', '.join(DTYPES)}: convert the checkpoint first"
        )
    if tuple(tensor.shape) != place.shape:
        raise ExportError(f"{name}: shape {tuple(tensor.shape)}, the checkpoint has {place.shape}")
    cast = tensor.detach().cpu().to(DTYPES[place.dtype]).contiguous()
    if not bool(cast.isfinite().all()):
        raise ExportError(f"{name}: non-finite values in {place.dtype}, not written")
    return cast.flatten().view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, place: Place) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=DTYPES[place.dtype]).reshape(place.shape)


def _overwrite(path: Path, place: Place, raw: bytes) -> None:
    path.chmod(path.stat().st_mode | 0o200)
    with open(path, "r+b") as file:
        file.seek(place.offset)
        file.write(raw)


def _write_patch(source: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """The tensors and, where the checkpoint has an index, that index with their new file: copied over the checkpoint's
    folder the two make the stitched checkpoint."""
    save_tensors(folder / PATCH, tensors)
    if (source / INDEX).is_file():
        index: dict[str, Any] = read_json(source / INDEX)
        index["weight_map"] |= dict.fromkeys(tensors, PATCH)  # total_size: the same tensors, the same bytes
        write_json(folder / INDEX, index)


def _check_out(source: Path, out: Path, force: bool) -> None:
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ExportError(f"{out} is, holds or lies inside the checkpoint {source}: name another folder")
    if not out.exists():
        return
    if not force:
        raise ExportError(f"{out} exists: name another folder, or pass force to replace an earlier one")
    if not (out / RECORD).is_file():
        raise ExportError(f"{out} was not made by stitching (no {RECORD}): it is not replaced even by force")


def _check_disk(source: Path, out: Path) -> None:
    need, free = sum(p.stat().st_size for p in source.rglob("*") if p.is_file()), shutil.disk_usage(out.parent).free
    if need > free:
        raise ExportError(
            f"a copy of {source} needs {need / 1e9:.1f} GB, {out.parent} has {free / 1e9:.1f} GB free: write a patch, "
            "or choose another disk"
        )
