"""Read an exported folder back as strictly as an engine should: nothing missing, nothing extra, nothing random."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import vocab
from ..heads.base import DraftHead
from ..heads.catalog import HEADS, build_head, head_class, parse_head
from ..heads.io import FILE as HEAD_FILE
from ..heads.io import load_head, read_tensors
from ..metadata import FILE as METADATA_FILE
from ..metadata import Metadata
from .engines import NATIVE, ExportError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_KEY = "torch_dtype"  # the one key that the export adds to the head's own
# Keys that belong to the target alone: copied into a head's config they make engines quantise or misread the head.
FORBIDDEN = ("quantization_config", "compression_config", "quantization", "auto_map", "_name_or_path")


@dataclass
class Verified:
    """A folder that passed: its metadata (None for another tool's export), dialect, config, tensors, rebuilt head
    (None without metadata: the target's shape is not known then)."""

    metadata: Metadata | None
    kind: str
    dialect: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: DraftHead | None


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: one file, or the shards that its index names (plain file names inside the folder)."""
    try:
        if (folder / WEIGHTS).exists():
            return read_tensors(_inside(folder, WEIGHTS))
        if not (folder / INDEX).exists():
            raise ExportError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
        mapping = read_json(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
            raise ExportError(f"{folder / INDEX}: expected a `weight_map` from tensor names to file names")
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(mapping.values())):
            shard = read_tensors(_inside(folder, name))
            twice = shard.keys() & tensors.keys()
            if twice:
                raise ExportError(f"{folder / name}: tensors that another shard has too: {sorted(twice)}")
            tensors.update(shard)
    except ExportError:
        raise
    except ValueError as error:  # read_tensors names the file
        raise ExportError(str(error)) from None
    if tensors.keys() != mapping.keys():
        raise ExportError(f"{folder / INDEX} and its shards disagree on {sorted(tensors.keys() ^ mapping.keys())}")
    return tensors


def _inside(folder: Path, name: str) -> Path:
    """folder/name, refused where it would leave the folder. A link is followed only as the Hub's cache makes them:
    the name itself is plain."""
    if name != Path(name).name or name in ("", ".", ".."):
        raise ExportError(f"{folder}: file name {name!r} leaves the folder; expected a plain file name")
    return folder / name


def verify_folder(folder: str | Path) -> Verified:
    """Read an export back. Raises ExportError, MetadataError or ValueError that names every problem.

    Checked: every tensor that the config implies is there, none extra, shapes right, all finite; the draft vocabulary's
    map is a bijection in the form that the dialect wants; the config has the target's vocabulary size and none of the
    target's own keys; the head can be rebuilt and reads the layers that the training record names.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ExportError(f"no folder at {folder}")
    if not (folder / METADATA_FILE).exists() and not (folder / CONFIG).exists():
        raise ExportError(f"{folder} has neither {METADATA_FILE} nor {CONFIG}: not an export")
    metadata = Metadata.read(folder) if (folder / METADATA_FILE).exists() else None
    dialect = metadata.export.dialect if metadata is not None and metadata.export is not None else None
    if dialect == NATIVE or (metadata is not None and dialect is None and (folder / HEAD_FILE).exists()):
        return _verify_native(folder)
    config, tensors = read_json(folder / CONFIG), read_weights(folder)
    if metadata is None:
        kind, dialect = recognise(config, tensors, folder)
    elif dialect is None:
        raise ExportError(f"{folder}: {METADATA_FILE} does not say for which engine the folder is (`export`)")
    else:
        kind = metadata.head.kind
    cls = head_class(kind)
    if dialect not in cls.dialects:
        raise ExportError(f"{folder}: a {kind} head has no form {dialect!r}; it has {', '.join(cls.dialects)}")
    problems = tensor_problems(cls.expected_tensors(dialect, config), tensors)
    problems += config_problems(config, metadata)
    problems += map_problems(config, tensors)
    if problems:
        raise ExportError(f"{folder}: " + "; ".join(problems))
    head = None
    if metadata is not None:
        head = cls.from_export(dialect, config, tensors, metadata.target.target_shape())
        _compare_with_record(folder, head, metadata)
        _compare_config(folder, head, metadata, dialect, config, tensors)
    return Verified(metadata, kind, dialect, config, tensors, head)


def _verify_native(folder: Path) -> Verified:
    head, metadata = load_head(folder)
    _compare_with_record(folder, head, metadata)
    try:
        tensors = read_tensors(folder / HEAD_FILE)
    except ValueError as error:
        raise ExportError(str(error)) from None
    return Verified(metadata, metadata.head.kind, NATIVE, dict(metadata.head.config), tensors, head)


def _compare_with_record(folder: Path, head: DraftHead, metadata: Metadata) -> None:
    """The rebuilt head must read what the trained one read; a wrong layer id loads everywhere and accepts nothing."""
    recorded, found = list(metadata.features.layers), list(head.wants().layers)
    if recorded != found:
        raise ExportError(f"{folder}: reads the target's layers {found}, but was trained on {recorded}")
    if head.draft_vocab_size != metadata.draft_vocab.size:
        raise ExportError(
            f"{folder}: drafts {head.draft_vocab_size} ids, the training record says {metadata.draft_vocab.size}"
        )
    if vocab.sha256(head.draft_ids) != metadata.draft_vocab.sha256:
        raise ExportError(f"{folder}: the draft vocabulary's map is not the one that was trained")


def _compare_config(
    folder: Path,
    rebuilt: DraftHead,
    metadata: Metadata,
    dialect: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """The training record written out again must give this very folder.

    This finds what no shape shows: a RoPE setting, an eps or a norm switch that config.json lost or changed.
    """
    shape = metadata.target.target_shape()
    recorded = build_head(parse_head(metadata.head.config), shape, rebuilt.draft_ids)
    recorded.load_state_dict(rebuilt.state_dict())
    for name, buffer in rebuilt.named_buffers(recurse=False):  # the target's tensors that travel in the export
        if getattr(recorded, name, None) is None:
            setattr(recorded, name, buffer)
    again = recorded.export_spec(dialect)
    expected = json.loads(json.dumps(again.config))
    found = {k: v for k, v in config.items() if k != DTYPE_KEY}
    nothing = "(absent)"
    problems = [
        f"{CONFIG}: {key} is {found.get(key, nothing)!r}, the training record gives {expected.get(key, nothing)!r}"
        for key in sorted({*expected, *found})
        if expected.get(key, nothing) != found.get(key, nothing)
    ]
    problems += [
        f"{name} is not where the training record puts it"
        for name, tensor in again.tensors.items()
        if not torch.equal(tensor, tensors[name].to(tensor.dtype))
    ]
    if problems:
        raise ExportError(f"{folder}: " + "; ".join(problems))


def tensor_problems(expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> list[str]:
    problems = [f"missing tensor {n} {shape}" for n, shape in expected.items() if n not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"unknown tensor {name} {tuple(tensor.shape)}")
        elif tuple(tensor.shape) != tuple(expected[name]):
            problems.append(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(expected[name])}")
        elif tensor.numel() == 0:
            problems.append(f"{name}: empty")
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"{name}: non-finite values")
    return problems


def config_problems(config: dict[str, Any], metadata: Metadata | None) -> list[str]:
    problems = [f"{CONFIG} holds the target's own key `{key}`" for key in FORBIDDEN if key in config]
    if metadata is not None:
        expected = metadata.target.target_shape().vocab_size
        if config.get("vocab_size") != expected:
            problems.append(f"{CONFIG}: vocab_size {config.get('vocab_size')!r}, expected the target's {expected}")
    return problems


def map_problems(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """d2t holds offsets: added to 0, 1, 2 ... they give distinct rising ids of the target."""
    try:
        if "d2t" in tensors:
            vocab.from_offsets(tensors["d2t"], int(config.get("vocab_size") or 0))
    except ValueError as error:
        return [f"d2t: {error}"]
    return []


def recognise(config: dict[str, Any], tensors: dict[str, Tensor], where: Path) -> tuple[str, str]:
    """(kind, dialect) of a folder without metadata: the one form whose tensors are exactly these."""
    near: list[tuple[int, str]] = []
    for kind, cls in HEADS.items():
        for dialect in cls.dialects:
            try:
                expected = cls.expected_tensors(dialect, config)
            except (ValueError, KeyError, TypeError) as error:
                near.append((10**6, f"not {kind} for {dialect}: {error}"))
                continue
            problems = tensor_problems(expected, tensors)
            if not problems:
                return kind, dialect
            near.append((len(problems), f"nearest is {kind} for {dialect}: " + "; ".join(problems[:5])))
    raise ExportError(f"{where}: no known form of a head; {min(near)[1]}")
