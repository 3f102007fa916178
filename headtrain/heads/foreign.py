"""Heads in folders that other tools wrote: which kind, and read strictly. The explicit table of those known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..types import TargetShape, TargetWeights
from . import eagle1_export, eagle3_export, medusa_export
from .base import DraftHead
from .catalog import HEADS

# in this order: the first that recognises a folder reads it
READERS = {"medusa": medusa_export, "eagle3": eagle3_export, "eagle1": eagle1_export}
# tensors of the target that tools put beside a head; they must be the target's own
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# half precision keeps 8 bits: what was rounded to either half of it differs by less than this share
ROUNDING = 2**-7


@dataclass
class ForeignHead:
    """layout: whose form it was; notes: what the folder left open and how it was taken."""

    head: DraftHead
    layout: str
    notes: list[str] = field(default_factory=list)


def kind_of(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Raises ValueError where no known layout is recognised."""
    for kind, reader in READERS.items():
        if reader.recognises(config, tensors):
            return kind
    raise ValueError(
        f"no known layout of a head; config keys: {', '.join(sorted(config)) or 'none'}; tensors: "
        f"{', '.join(sorted(tensors)[:8])}{' ...' * (len(tensors) > 8)}"
    )


def target_tensors(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """The names of those tensors that are the target's, not the head's."""
    names = [EMBEDDING] if EMBEDDING in tensors else []
    if kind_of(config, tensors) != "eagle3" and LM_HEAD in tensors:
        names.append(LM_HEAD)
    return names


def read_foreign(
    config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape, weights: TargetWeights | None
) -> ForeignHead:
    """The head in a folder of another tool, for a target of ``shape``.

    weights: the target's, needed where ``target_tensors`` names any: they must be the target's own (to the rounding of
    half precision), since a head here shares them. Raises ValueError, naming what was found.
    """
    if bad := [key for key in ("quantization_config", "compression_config", "quantization") if config.get(key)]:
        raise ValueError(f"{', '.join(bad)} in config.json: quantised heads are not read; expected plain tensors")
    kind, tensors, notes = kind_of(config, tensors), dict(tensors), []
    for name in target_tensors(config, tensors):
        if weights is None:
            raise ValueError(f"{name} must be compared with the target's, whose weights are needed for it")
        _require_same(name, tensors.pop(name), weights.embed if name == EMBEDDING else weights.lm_head)
        notes.append(f"{name} is the target's own, to rounding: shared, not stored")
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    layout, head = READERS[kind].foreign(HEADS[kind], config, tensors, shape, notes)
    if weights is not None:
        head.attach(weights)
    return ForeignHead(head, layout, notes)


def _require_same(name: str, found: Tensor, own: Tensor) -> None:
    found, own = found.float().cpu(), own.float().cpu()
    if found.shape != own.shape:
        raise ValueError(f"{name}: shape {tuple(found.shape)}, the target's is {tuple(own.shape)}")
    apart = (found - own).abs() > ROUNDING * own.abs() + 1e-6
    if bool(apart.any()):
        raise ValueError(
            f"{name}: {int(apart.any(1).sum())} of {found.shape[0]} rows are not the target's; a head with tensors of "
            "its own here (or one of another target) is not read"
        )
