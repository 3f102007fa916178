"""``train.init=induction``: the part of a head's start that reads features, before the first step of a fresh run."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import torch

from ..config import RecipeError
from ..heads.base import DraftHead
from .backend import Backend


@torch.no_grad()
def fit_induction(head: DraftHead, source: Any, batch_tokens: int, window: int, backend: Backend) -> list[str]:
    """``DraftHead.fit_induction`` on the first micro-batches of ``source`` (a trainer's ``Source``): the same ones for
    any number of ranks, each of which reads its own. Raises RecipeError where the head cannot start so."""
    count = max(1, min(math.ceil(head.induction_tokens / batch_tokens), source.micro_batches_per_epoch))
    rounds = math.ceil(count / backend.world)  # the same for each rank: a split target computes in step
    numbers = range(backend.rank, rounds * backend.world, backend.world)
    head.to(backend.device)
    with closing(source.batches()) as stream:
        sample = (item for number, item in zip(numbers, stream, strict=False) if number < count)
        try:
            done = head.fit_induction(sample, backend.sum, window)
        except ValueError as error:
            raise RecipeError(f"train.init=induction: {error}") from None
    if backend.world > 1:  # processors of two kinds round differently, and a basis may be any one of many
        for p in head.trainable().values():
            p.copy_(backend.sum(p if backend.main else torch.zeros_like(p)))
    return done
