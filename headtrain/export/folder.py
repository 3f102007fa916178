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
from ..heads.forms import TARGET_NAME
from ..heads.io import FILE as HEAD_FILE
from ..heads.io import load_head, read_tensors
from ..metadata import FILE as METADATA_FILE
from ..metadata import Metadata
from .engines import NATIVE, ExportError
from .files import CONFIG, read_json, read_weights
from .files import INDEX as INDEX

DTYPE_KEY = "torch_dtype"  # the one key that the export adds to the head's own
# Keys that belong to the target alone: copied into a head's config they make engines quantise or misread the head.
FORBIDDEN = ("quantization_config", "compression_config", "quantization", "auto_map", "_name_or_path")


class UnknownForm(ExportError):
    """A folder of another tool in no form that a head here has."""


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
    again = recorded_head(rebuilt, metadata).export_spec(dialect)
    expected = fill_target(json.loads(json.dumps(again.config)), metadata.target.name)
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


def recorded_head(rebuilt: DraftHead, metadata: Metadata) -> DraftHead:
    """The head as the training record describes it (with what no engine's form says, such as its depth), with the
    tensors of the one rebuilt from an export."""
    recorded = build_head(parse_head(metadata.head.config), metadata.target.target_shape(), rebuilt.draft_ids)
    recorded.load_state_dict(rebuilt.state_dict())
    for name, buffer in rebuilt.named_buffers(recurse=False):  # the target's tensors that travel in the export
        if getattr(recorded, name, None) is None:
            setattr(recorded, name, buffer)
    return recorded


def fill_target(value: Any, name: str) -> Any:
    """A head's config with the target's name where the form wants it."""
    if isinstance(value, dict):
        return {k: fill_target(v, name) for k, v in value.items()}
    if isinstance(value, list):
        return [fill_target(v, name) for v in value]
    return name if value == TARGET_NAME else value


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
    levels = [config, *(v for v in config.values() if isinstance(v, dict))]
    problems = [f"{CONFIG} holds the target's own key `{k}`" for k in FORBIDDEN if any(k in level for level in levels)]
    if metadata is not None:
        expected, found = metadata.target.target_shape().vocab_size, vocab_size(config)
        if found != expected:
            problems.append(f"{CONFIG}: vocab_size {found!r}, expected the target's {expected}")
    return problems


def vocab_size(config: dict[str, Any]) -> int | None:
    """The target's vocabulary in a config of any dialect: at the top, or in a nested layer's config."""
    levels = [config, *(v for v in config.values() if isinstance(v, dict))]
    return next((level["vocab_size"] for level in levels if "vocab_size" in level), None)


def map_problems(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """d2t holds offsets: added to 0, 1, 2 ... they give distinct rising ids of the target."""
    try:
        if "d2t" in tensors:
            vocab.from_offsets(tensors["d2t"], int(vocab_size(config) or 0))
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
    raise UnknownForm(f"{where}: no known form of a head; {min(near)[1]}")
