"""Another draft vocabulary for a trained head: rows of kept tokens are copied, new ones start as in a fresh head.

Nothing needs capturing again: stored features hold the target's argmax and log-sum-exp over its whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import vocab
from ..types import TargetWeights
from .base import DraftHead
from .catalog import build_head, parse_head
from .io import load_strict


def draft_rows(head: DraftHead) -> list[str]:
    """Names of the tensors that have one row for each token of the draft vocabulary, found by building the head
    (without memory) for a vocabulary of another size: what changes shape follows it."""
    with torch.device("meta"):
        other = build_head(head.config, head.shape, torch.arange(2 if head.draft_vocab_size == 1 else 1)).state_dict()
    return [name for name, tensor in head.state_dict().items() if tensor.shape != other[name].shape]


@torch.no_grad()
def continue_from(head: DraftHead, trained: DraftHead, where: str) -> int:
    """Copy every tensor of ``trained`` into ``head``, matching the rows of the two draft vocabularies by token. Rows of
    tokens that ``trained`` did not draft stay as they are: ``init_from_target`` first. Returns the number of kept
    tokens. Raises MetadataError, naming each, for tensors that one of the two does not have or has in another shape."""
    everything = torch.arange(head.shape.vocab_size, device=head.device)
    mine = everything if head.draft_ids is None else head.draft_ids
    old = everything if trained.draft_ids is None else trained.draft_ids.to(mine.device)
    row = vocab.inverse(old, head.shape.vocab_size)[mine]  # in the trained head; -1: not there
    kept, own, tensors = row >= 0, head.state_dict(), dict(trained.state_dict())
    for name in draft_rows(head):
        if name in tensors and tensors[name].shape == (old.numel(), *own[name].shape[1:]):
            merged = own[name].clone()
            merged[kept] = tensors[name].to(merged)[row[kept]]
            tensors[name] = merged
    load_strict(head, tensors, where)
    return int(kept.sum())


def with_draft_ids(trained: DraftHead, ids: Tensor | None, weights: TargetWeights) -> DraftHead:
    """A head like ``trained`` that drafts ``ids`` ([Vd] sorted int64; None: the whole vocabulary), with the target's
    tensors ``weights`` attached. Raises ValueError for ids that are not of this target."""
    if ids is not None:
        vocab.validate(ids, trained.shape.vocab_size)
        ids = ids if ids.numel() < trained.shape.vocab_size else None
    size = None if ids is None else ids.numel()
    config = parse_head(trained.config.model_dump(mode="json") | {"draft_vocab_size": size})
    head = build_head(config, trained.shape, ids)
    head.attach(weights)
    head.init_from_target(weights)
    continue_from(head, trained, f"{trained.config.kind} head")
    return head
