"""The draft vocabulary: choose it, validate it, map between it and the target's."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .shift import pair_mask
from .types import Batch, Row


def count_tokens(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """[V] int64: how often each token is drafted at depth 1, that is, occurs in a turn but not as its first token
    (prefill gives that one). For ``choose``."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(rows), 256):
        batch = Batch.pack(rows[start : start + 256])
        drafted = batch.ids[2:][pair_mask(batch, 1)[0][:-2]]
        counts += torch.bincount(drafted, minlength=vocab_size)
    return counts


def choose(counts: Tensor, size: int) -> Tensor:
    """The ``size`` most frequent ids, [size] int64 sorted. counts: [V] occurrences of each id among supervised tokens.

    Ties go to the smaller id. Ids that never occurred fill up a corpus with fewer distinct tokens than ``size``
    (lowest ids first, since byte-pair vocabularies are ordered by frequency), with a warning.
    """
    if not 0 < size <= counts.numel():
        raise ValueError(f"draft vocabulary of {size}: expected 1 to {counts.numel()}, the target's vocabulary")
    distinct = int((counts > 0).sum())
    if distinct < size:
        warnings.warn(
            f"the corpus has {distinct} distinct supervised tokens, fewer than the draft vocabulary of {size}: "
            f"filled with {size - distinct} unseen ids; a smaller draft_vocab_size would draft as well and faster",
            stacklevel=2,
        )
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def validate(ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless ids is a sorted int64 vector without duplicates inside the target's vocabulary."""
    if ids.ndim != 1 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise ValueError(f"draft vocabulary: expected an int64 vector, found {ids.dtype} of shape {tuple(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"draft vocabulary: ids {int(ids.min())}..{int(ids.max())} outside the target's 0..{vocab_size - 1}"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("draft vocabulary: ids must be strictly increasing (a duplicate or another order was found)")


def offsets(ids: Tensor) -> Tensor:
    """d2t as engines load it: target id = i + d2t[i]."""
    return ids - torch.arange(ids.numel(), device=ids.device)


def from_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """The ids of a d2t; raises ValueError where it is not an offset map (absolute ids fail here)."""
    ids = d2t.to(torch.int64) + torch.arange(d2t.numel(), device=d2t.device)
    validate(ids, vocab_size)
    return ids


def inverse(ids: Tensor, vocab_size: int) -> Tensor:
    """[V] int64: the draft index of each target id, -1 where it has none."""
    out = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
    out[ids] = torch.arange(ids.numel(), device=ids.device)
    return out


def sha256(ids: Tensor | None) -> str | None:
    if ids is None:
        return None
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()
