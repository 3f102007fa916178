"""The explicit table of heads: one line a head. Nothing else in the project lists them."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor

from ..config import RecipeError, parse
from ..types import TargetShape
from .base import DraftHead, HeadConfig
from .eagle1 import Eagle1
from .eagle3 import Eagle3
from .medusa import Medusa
from .mtp import Mtp
from .mtp_checkpoint import MtpCheckpoint

HEADS: dict[str, type[DraftHead]] = {
    "eagle1": Eagle1,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "mtp": Mtp,
    "mtp-checkpoint": MtpCheckpoint,
}


def head_class(kind: str) -> type[DraftHead]:
    if kind not in HEADS:
        near = difflib.get_close_matches(kind, HEADS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(HEADS)
        raise RecipeError(f"head.kind: no head named {kind!r}; {hint}")
    return HEADS[kind]


def parse_head(section: dict[str, Any]) -> HeadConfig:
    """The recipe's ``head`` section as that head's own typed config."""
    kind = section.get("kind", "")
    return parse(head_class(kind).Config, section, f"head ({kind})")


def build_head(config: HeadConfig, shape: TargetShape, draft_ids: Tensor | None) -> DraftHead:
    """A fresh head; ``draft_ids`` as chosen by ``vocab.choose`` where ``uses_draft_vocab`` asks for one."""
    try:
        return head_class(config.kind)(config, shape, draft_ids)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def outline(config: HeadConfig, shape: TargetShape) -> DraftHead:
    """A head without memory (on the meta device), with as many draft ids as it will have: for its shapes, its resolved
    config, and what it reads."""
    size = head_class(config.kind).uses_draft_vocab(config, shape)
    with torch.device("meta"):
        return build_head(config, shape, None if size is None else torch.arange(size))
