"""``train.init=induction``: the part of a head's start that reads features, before the first step of a fresh run."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import islice
from typing import Any

from ..config import RecipeError
from ..heads.base import DraftHead
from .backend import Backend


def fit_induction(head: DraftHead, source: Any, batch_tokens: int, window: int, backend: Backend) -> list[str]:
    """``DraftHead.fit_induction`` on the first micro-batches of ``source`` (a trainer's ``Source``), the same number
    for each rank. Raises RecipeError where the head cannot start so."""
    each = math.ceil(head.induction_tokens / batch_tokens / backend.world)
    each = max(1, min(each, source.micro_batches_per_epoch // backend.world))
    head.to(backend.device)
    with closing(source.batches()) as stream:
        try:
            return head.fit_induction(islice(stream, each), backend.sum, window)
        except ValueError as error:
            raise RecipeError(f"train.init=induction: {error}") from None
