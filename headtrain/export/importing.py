"""Heads that others published become heads of this project: for evaluation, warm start and export to another engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.foreign import kind_of, read_foreign, target_tensors
from ..heads.io import head_metadata, save_head
from ..metadata import FILE as METADATA_FILE
from ..metadata import ImportedPart, Metadata, TargetIdentity, file_sha256
from ..types import TargetWeights
from .engines import ExportError
from .files import CONFIG, read_json, read_weights, staged, weight_files
from .folder import recorded_head, verify_folder


@dataclass
class Source:
    """A folder as it was read. metadata: where headtrain itself exported it. needs_weights: the names of tensors in it
    that have to be compared with the target's."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str]
    metadata: Metadata | None = None
    needs_weights: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def read_source(folder: str | Path, settings: dict[str, Any] | None = None) -> Source:
    """Read a head's folder: config.json and one file of tensors, or shards. Pickles are read as tensors only, and no
    name inside the folder leads out of it.

    settings: keys of config.json to add or to put in place of what it says; each is recorded. Raises ExportError.
    """
    folder, settings = Path(folder), dict(settings or {})
    if not folder.is_dir():
        raise ExportError(f"no folder at {folder}; download a Hub repository first (hf download)")
    if (folder / METADATA_FILE).exists() and Metadata.read(folder).export is not None:
        if settings:
            raise ExportError(f"{folder} was exported by headtrain: its record says all; settings {settings} not taken")
        verified = verify_folder(folder)
        return Source(folder, verified.config, verified.tensors, {}, verified.metadata)
    if (folder / METADATA_FILE).exists():
        raise ExportError(f"{folder} is a checkpoint of headtrain: there is nothing to import")
    config = read_json(folder / CONFIG) | settings
    tensors = read_weights(folder)
    if bad := [n for n, t in tensors.items() if t.numel() == 0 or (t.is_floating_point() and not t.isfinite().all())]:
        raise ExportError(f"{folder}: empty tensors or non-finite values in {', '.join(bad)}")
    files = {p.name: file_sha256(p) for p in [folder / CONFIG, *weight_files(folder)]}
    try:
        needs = target_tensors(config, tensors)
    except ValueError as error:
        raise ExportError(f"{folder}: {error}") from None
    return Source(folder, config, tensors, files, needs_weights=needs, settings=settings)


def import_head(
    source: Source, target: TargetIdentity, out: str | Path, weights: TargetWeights | None = None
) -> Metadata:
    """Write the head of ``source`` as a checkpoint of this project, for ``target``; returns its metadata.

    A folder that headtrain exported keeps its training record, and must belong to ``target``. For any other the record
    says that it was imported; its training stays unknown, and so does whether ``target`` is what it was trained on.
    weights: the target's, needed where ``source.needs_weights`` names tensors. Raises ExportError.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not an empty folder: name another one")
    if source.metadata is not None:
        head, metadata = _own(source, target)
    else:
        head, metadata = _foreign(source, target, weights)
    with staged(out) as temporary:
        save_head(temporary, head, metadata)
    return metadata


def _own(source: Source, target: TargetIdentity):
    if lines := source.metadata.target.differences(target):
        raise ExportError(f"{source.folder} was trained on another target:\n  " + "\n  ".join(lines))
    if source.metadata.target.adapter is not None:
        raise ExportError(f"{source.folder} belongs to an adapted target; use the checkpoint that it was exported from")
    head = verify_folder(source.folder).head
    if source.metadata.export.engine != "headtrain":
        head = recorded_head(head, source.metadata)
    return head, source.metadata.model_copy(update={"export": None})


def _foreign(source: Source, target: TargetIdentity, weights: TargetWeights | None):
    shape = target.target_shape()
    try:
        found = read_foreign(source.config, source.tensors, shape, weights)
    except (ValueError, KeyError, TypeError) as error:
        kind = kind_of(source.config, source.tensors)
        raise ExportError(f"{source.folder}, read as a {kind} head: {error}") from None
    notes = [f"{key} = {value!r} was given by hand" for key, value in source.settings.items()] + found.notes
    record = ImportedPart(layout=found.layout, files=source.files, notes=notes)
    metadata = head_metadata(found.head, target, imported=record)
    metadata.head.depth = found.head.max_depth  # of a recursive head nobody says how deep it was trained
    return found.head, metadata
