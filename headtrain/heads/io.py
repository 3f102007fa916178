"""Save and load a head in this project's own form: head.safetensors + headtrain.json."""

from __future__ import annotations

import hashlib
import os
from operator import attrgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .. import vocab
from ..metadata import DraftVocabPart, FeaturesPart, HeadPart, Metadata, MetadataError, TargetIdentity
from .base import DraftHead
from .catalog import build_head, head_class, parse_head

FILE = "head.safetensors"
DRAFT_IDS = "draft_ids"


def head_metadata(head: DraftHead, target: TargetIdentity, **more) -> Metadata:
    """The metadata of ``head`` trained on ``target``; ``more``: training, acceptance."""
    wants = head.wants()
    return Metadata(
        head=HeadPart(
            kind=head.config.kind, config=head.config.model_dump(mode="json"), depth=head.trained_depth(wants.depth)
        ),
        target=target,
        features=FeaturesPart(layers=list(wants.layers)),
        draft_vocab=DraftVocabPart(size=head.draft_vocab_size, sha256=vocab.sha256(head.draft_ids)),
        **more,
    )


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors, atomically: temporary name, fsync, rename. Refuses empty and non-finite tensors."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise ValueError(f"{name}: empty tensor, not saved")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: non-finite values, not saved")
    temporary = path.with_name(path.name + ".tmp")
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, metadata={"format": "pt"})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)  # safetensors writes 0600, which a group could not read
    os.replace(temporary, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one safetensors file; a damaged file is a ValueError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise MetadataError(f"{path} cannot be read: {error}") from None


@torch.no_grad()
def head_tensors(head: DraftHead) -> dict[str, torch.Tensor]:
    """What is saved of a head. A parametrized weight (training by LoRA) is saved as it acts, under its own name."""
    tensors, training = {}, head.training
    head.eval()
    for name, tensor in head.state_dict().items():
        if "parametrizations." not in name:
            tensors[name] = tensor
        elif name.endswith(".original"):
            name = name.replace("parametrizations.", "").removesuffix(".original")
            tensors[name] = attrgetter(name)(head)
    head.train(training)
    if head.draft_ids is not None:
        tensors[DRAFT_IDS] = head.draft_ids
    return tensors


def save_head(folder: str | Path, head: DraftHead, metadata: Metadata) -> None:
    """head.safetensors first, headtrain.json last: a folder with metadata is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / FILE, head_tensors(head))
    metadata.write(folder)


def load_head(folder: str | Path) -> tuple[DraftHead, Metadata]:
    """Rebuild a head; every tensor must be there, none extra. Attach the target's tensors before use.

    Raises MetadataError, ValueError (missing, extra or misshapen tensors, a draft vocabulary without its map).
    """
    folder = Path(folder)
    metadata = Metadata.read(folder)
    tensors = read_tensors(folder / FILE)
    shape = metadata.target.target_shape()
    draft_ids = tensors.pop(DRAFT_IDS, None)
    if metadata.draft_vocab.sha256 is not None:
        if draft_ids is None:
            raise MetadataError(
                f"{folder}: draft vocabulary of {metadata.draft_vocab.size} without its map `{DRAFT_IDS}`"
            )
        vocab.validate(draft_ids, shape.vocab_size)
        if vocab.sha256(draft_ids) != metadata.draft_vocab.sha256:
            raise MetadataError(f"{folder}: the draft vocabulary in {FILE} is not the one that headtrain.json names")
    config = parse_head(metadata.head.config)
    asked = head_class(config.kind).uses_draft_vocab(config, shape)
    found = None if draft_ids is None else draft_ids.numel()
    if asked != found or (metadata.draft_vocab.sha256 is None) != (draft_ids is None):
        raise MetadataError(
            f"{folder}: its config asks for a draft vocabulary of {asked or 'all tokens'}, headtrain.json records "
            f"{metadata.draft_vocab.size}, and {FILE} has a map `{DRAFT_IDS}` of {found or 'no'} ids; they must agree"
        )
    head = build_head(config, shape, draft_ids)
    load_strict(head, tensors, str(folder / FILE))
    return head, metadata


def load_strict(head: DraftHead, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy tensors into the head; missing, extra, misshapen or non-finite ones are a ValueError that names them."""
    own = head.state_dict()
    problems = [f"missing {n}" for n in own if n not in tensors]
    problems += [f"unknown {n}" for n in tensors if n not in own]
    for name in own.keys() & tensors.keys():
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name}: shape {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}")
        elif tensors[name].is_floating_point() and not bool(tensors[name].isfinite().all()):
            problems.append(f"{name}: non-finite values")
    if problems:
        raise MetadataError(f"{where}: " + "; ".join(sorted(problems)))
    head.load_state_dict(tensors)


def fingerprint(head: DraftHead) -> str:
    """sha256 over the head's tensors, names and shapes included: which head was measured."""
    found = hashlib.sha256()
    for name, tensor in sorted(head_tensors(head).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
