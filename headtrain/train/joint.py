"""Head and target trained together, the target through a LoRA adapter (Medusa-2: Cai et al. 2024, arXiv 2401.10774,
section 2.2.2), for any head: its features are computed while training, in the graph.

    L = L_base + c * s(step) * L_head

summed over a step's positions and divided by the global count of supervised positions, as everywhere. L_base keeps the
target what it was: cross entropy on the text, or KL(target without the adapter || with it), at every position whose
next token is supervised. L_head is the head's own loss, its weights by depth included; the labels that it takes from
the target are constants.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ..config import JointSection
from ..heads.base import DraftHead
from ..shift import final_positions
from ..target.adapter import Adapter
from ..target.features import compute_features, features_in_graph
from ..target.model import Target
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, Wants

CHUNK_LOGITS = 1 << 24  # of the base loss: 64 MB in fp32


def head_weight(section: JointSection, step: int, total: int) -> float | None:
    """c * s(step) of optimizer step ``step`` (1-based, 1..total); None in the first stage, which trains the head alone.
    s is 1, or rises as sin(pi/2 * share of the second stage that is done)."""
    alone = round(section.heads_first * total)
    if step <= alone:
        return None
    share = (step - alone) / (total - alone)
    return section.head_weight * (math.sin(math.pi / 2 * share) if section.rises else 1.0)


class Joint(nn.Module):
    """What is trained: the head and the target's adapter, and no other module. ``loss`` has a head's form, so that the
    trainer wraps and calls it like one."""

    def __init__(self, head: DraftHead, target: Target, section: JointSection, seed: int) -> None:
        """Puts the adapter into ``target``. Raises RecipeError, TargetError."""
        super().__init__()
        self.target, self.section = target, section
        self.head, self.adapter = head, Adapter(target, section.lora, seed)
        self.weight: float | None = 1.0

    def at(self, step: int, total: int) -> None:
        """Weigh the losses as for optimizer step ``step`` (1-based) of ``total``."""
        self.weight = head_weight(self.section, step, total)

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        """The head's sums, with L in ``total``. features: not read, they are computed here."""
        with torch.autocast(batch.ids.device.type, enabled=False):  # the target's own precision, as where it decodes
            if self.weight is None:
                features = compute_features(self.target, batch, self.head.wants())
            else:
                features = features_in_graph(self.target, batch, self.head.wants())
                base = self._base_loss(batch, features, teacher)
        sums = self.head.loss(batch, features, teacher, depth)
        if self.weight is None:
            return sums
        return replace(sums, total=base + self.weight * sums.total)

    def _base_loss(self, batch: Batch, features: Features, teacher: Teacher) -> Tensor:
        at = final_positions(batch)
        final = features.final[torch.searchsorted(features.final_at, at)]
        if self.section.base_loss == "ce":
            labels, one = batch.ids[at + 1], _cross_entropy
        else:
            with self.adapter.disabled():
                wants = Wants(layers=(), final="supervised", summary=False)
                labels, one = compute_features(self.target, batch, wants).final, _divergence
        chunk = max(16, CHUNK_LOGITS // teacher.vocab_size)
        total = final.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(final.split(chunk), labels.split(chunk), strict=True):
            # the logits of a chunk are made again in the backward pass, not kept
            total = total + checkpoint(one, teacher, rows, wanted, use_reentrant=False)
        return total


def _cross_entropy(teacher: Teacher, final: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(teacher.logits(final), labels, reduction="sum")


def _divergence(teacher: Teacher, final: Tensor, base: Tensor) -> Tensor:
    """KL(base || adapted), summed over rows; both [n, H] post-norm."""
    wanted, log_q = teacher.logits(base).log_softmax(-1), teacher.logits(final).log_softmax(-1)
    return (wanted.exp() * (wanted - log_q)).sum()


def no_features(batch: Batch, wants: Wants) -> Features:
    """What the loader hands on in joint training: the features follow from the adapter of the moment."""
    nothing = torch.empty(0)
    return Features(nothing, nothing.long(), nothing)
