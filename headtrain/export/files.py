"""The files of an exported folder: JSON, and tensors in one file, in shards with an index, or in a pickle."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.forms import INDEX, WEIGHT_FILES
from ..heads.io import read_tensors, save_tensors
from ..metadata import write_json
from .engines import ExportError

CONFIG = "config.json"
PICKLES = (".pt", ".bin")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path.parent} has no {path.name}") from None
    except (ValueError, OSError) as error:
        raise ExportError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_size(text: str) -> int:
    """ "200MB", "5GB", "1.5GiB" or plain bytes -> bytes. Raises ExportError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in UNITS or float(found[1]) <= 0:
        raise ExportError(f"size {text!r}: expected for example 200MB, 5GB or 4GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's tensors: one, or an index and its shards. Raises ExportError where none does."""
    for name in WEIGHT_FILES[:1]:
        if (folder / name).exists():
            return [folder / name]
    if (folder / INDEX).exists():
        return [folder / INDEX, *(_inside(folder, name) for name in sorted(set(_mapping(folder).values())))]
    for name in WEIGHT_FILES[1:]:
        if (folder / name).exists():
            return [folder / name]
    raise ExportError(f"{folder} has none of {', '.join((INDEX, *WEIGHT_FILES))}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder (``weight_files``). A pickle is read as tensors and nothing else. Raises ExportError."""
    first, *shards = weight_files(folder)
    if not shards:
        return _read(first)
    mapping, tensors = _mapping(folder), {}
    for path in shards:
        shard = _read(path)
        if twice := shard.keys() & tensors.keys():
            raise ExportError(f"{path}: tensors that another shard has too: {sorted(twice)}")
        tensors.update(shard)
    if tensors.keys() != mapping.keys():
        raise ExportError(f"{first} and its shards disagree on {sorted(tensors.keys() ^ mapping.keys())}")
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in PICKLES:
        try:
            return read_tensors(path)
        except ValueError as error:  # it names the file
            raise ExportError(str(error)) from None
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ExportError(f"{path} is no plain pickle of tensors; nothing else is read from one: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(k, str) and torch.is_tensor(v) for k, v in value.items()):
        raise ExportError(f"{path}: expected a dictionary from names to tensors")
    return {name: tensor.contiguous() for name, tensor in value.items()}


def _mapping(folder: Path) -> dict[str, str]:
    mapping = read_json(folder / INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
        raise ExportError(f"{folder / INDEX}: expected a `weight_map` from tensor names to file names")
    return mapping


def _inside(folder: Path, name: str) -> Path:
    """folder/name, refused where it would leave the folder. A link is followed only as the Hub's cache makes them:
    the name itself is plain."""
    if name != Path(name).name or name in ("", ".", ".."):
        raise ExportError(f"{folder}: file name {name!r} leaves the folder; expected a plain file name")
    return folder / name


def write_weights(
    folder: Path, tensors: dict[str, Tensor], file: str, max_shard: int, dtype: torch.dtype | None = None
) -> None:
    """Into ``file``; a safetensors file of more than ``max_shard`` bytes becomes shards with an index, filled in the
    order of the names, so that the same tensors always give the same bytes. dtype: what floats are cast to, one shard
    after the other: of tensors that lie in files, no more than one shard is in memory."""

    def cast(names: Iterable[str]) -> dict[str, Tensor]:
        return {n: tensors[n].to(dtype) if dtype and tensors[n].is_floating_point() else tensors[n] for n in names}

    if Path(file).suffix in PICKLES:
        _write_pickle(folder / file, cast(tensors))
        return
    sizes = {
        name: t.numel() * (dtype if dtype and t.is_floating_point() else t.dtype).itemsize
        for name, t in sorted(tensors.items())
    }
    if sum(sizes.values()) <= max_shard:
        save_tensors(folder / file, cast(tensors))
        return
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_shard:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    mapping: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        path = f"{Path(file).stem}-{number:05d}-of-{len(shards):05d}{Path(file).suffix}"
        save_tensors(folder / path, cast(names))
        mapping |= dict.fromkeys(names, path)
    write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": mapping})


def _write_pickle(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: non-finite values, not saved")
    buffer = io.BytesIO()  # through memory: the archive would hold the file's name otherwise
    torch.save({name: t.detach().cpu().contiguous().clone() for name, t in sorted(tensors.items())}, buffer)
    path.write_bytes(buffer.getvalue())


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``out`` when the block ends well, in place of an earlier one; after an
    error it is gone and ``out`` as it was. What a killed process left is cleared away the next time. The names are this
    project's alone: ``out.tmp`` and ``out.old`` may be the user's own."""
    temporary, old = (out.with_name(f".{out.name}.headtrain-{end}") for end in ("new", "old"))
    if old.exists() and not out.exists():  # killed between the two moves
        os.replace(old, out)
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out.exists():
            os.replace(out, old)
        os.replace(temporary, out)
    except BaseException:
        if old.exists() and not out.exists():
            os.replace(old, out)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
