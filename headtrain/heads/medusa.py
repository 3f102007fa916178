"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): K heads on the target's final feature, each drafting one depth.

Head k reads ``final`` at position i and drafts token i+1+k (token i+1 is the target's own). A head is ``num_layers``
residual blocks x + SiLU(W x + b), then a linear to the vocabulary: its own, or the target's lm_head shared by all.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..losses import HardTargets, SoftTargets, align, align_pairs, vocab_loss, zero_sums
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from . import medusa_export
from .base import DraftHead, ExportSpec, HeadConfig, Session, SoftLoss, text_hits
from .shared import shared_lm_head


class MedusaConfig(HeadConfig):
    kind: Literal["medusa"] = "medusa"
    num_heads: int = Field(4, ge=1, description="K: one head a depth")
    num_layers: int = Field(1, ge=1, description="residual blocks in a head")
    own_lm_head: bool = Field(True, description="a linear to the vocabulary for each head; false: the target's lm_head")
    labels: Literal["hard", "soft"] = Field("hard", description="the token that followed, or the target's distribution")
    loss: SoftLoss = "kl"
    depth_decay: float = Field(0.8, gt=0, le=1, description="head k is weighted depth_decay^k")
    draft_vocab_size: int | None = Field(None, ge=1, description="reduced vocabulary of the own lm_heads")

    @model_validator(mode="after")
    def _hard_labels_have_one_loss(self) -> MedusaConfig:
        if self.labels == "hard" and self.loss != "kl":
            raise ValueError(
                f"loss={self.loss} needs the target's distribution, but labels=hard trains on the token that followed; "
                "set head.labels=soft, or head.loss=kl (cross entropy)"
            )
        return self


class _Block(nn.Module):
    """x + SiLU(W x + b), an exact identity at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(nn.functional.linear(x, self.weight, self.bias))


class _Blocks(nn.Module):
    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(size) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


class Medusa(DraftHead):
    Config = MedusaConfig
    parallel = True
    dialects = medusa_export.FORMS

    def __init__(self, config: MedusaConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        if config.draft_vocab_size is not None and not config.own_lm_head:
            raise ValueError("head: draft_vocab_size needs own_lm_head=true; a shared lm_head is the target's own")
        size = shape.hidden_size
        self.blocks = nn.ModuleList(_Blocks(size, config.num_layers) for _ in range(config.num_heads))
        if config.own_lm_head:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, self.draft_vocab_size, bias=False) for _ in range(config.num_heads)
            )
        self.register_buffer("shared_lm_head", None, persistent=False)

    @property
    def max_depth(self) -> int:
        return self.config.num_heads  # a head a depth: there is nothing to unroll

    def wants(self) -> Wants:
        return Wants(layers=(), final="supervised", depth=self.config.num_heads)

    def attach(self, weights: TargetWeights) -> None:
        if not self.config.own_lm_head:
            self.check_start(weights)
            self.shared_lm_head = weights.lm_head.detach()

    def check_start(self, weights: TargetWeights) -> None:
        if not self.config.own_lm_head:
            shared_lm_head(weights, "set head.own_lm_head=true")

    def init_from_target(self, weights: TargetWeights) -> list[str]:
        if not self.config.own_lm_head:
            return ["blocks = identity; lm_head shared with the target"]
        rows = self.drafted_rows(weights)
        with torch.no_grad():
            for lm_head in self.lm_heads:
                lm_head.weight.copy_(rows)
        return ["blocks = identity", "every lm_head = the target's rows"]

    def _lm_heads(self) -> list[Tensor]:
        if self.config.own_lm_head:
            return [lm_head.weight for lm_head in self.lm_heads]
        if self.shared_lm_head is None:
            raise RuntimeError("the target's lm_head is not attached: call attach(target weights) first")
        return [self.shared_lm_head]

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        pairs = pair_mask(batch, depth)
        start = pairs[0].nonzero().squeeze(1)
        if start.numel() == 0:
            return zero_sums(depth, list(self.trainable().values()))
        count = start.numel()
        parameter = self.blocks[0].layers[0].weight
        final = features.final[torch.searchsorted(features.final_at, start)].to(parameter.dtype)
        hidden = align([self.blocks[s](final[: count - s]) for s in range(min(depth, count))], depth)
        where = torch.searchsorted(features.final_at, start + 1)
        greedy, labels = features.argmax[where], batch.ids[start + 2]
        greedy, labels = self.drafted(greedy), self.drafted(labels)
        if self.config.labels == "hard":
            targets = HardTargets(labels=labels, greedy=greedy)
        else:
            targets = SoftTargets(features.final[where], self.restricted(teacher), greedy, features.lse[where])
        weight = self.config.depth_decay ** torch.arange(1, depth + 1, dtype=torch.float32)
        lm_heads = self._lm_heads()
        return vocab_loss(hidden, lm_heads[:depth], targets, align_pairs(pairs, start), weight, loss=self.config.loss)

    @torch.no_grad()
    def chain_hits(self, batch: Batch, features: Features, depth: int) -> Tensor:
        if depth > self.max_depth:
            raise ValueError(f"depth {depth}, but there are {self.max_depth} heads")
        start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
        parameter = self.blocks[0].layers[0].weight
        final = features.final[torch.searchsorted(features.final_at, start)].to(parameter.dtype)
        hidden = [block(final) for block in self.blocks[:depth]]
        return text_hits(batch, start, hidden, self._lm_heads(), self.draft_ids, depth)

    def flops(self, batch: Batch, depth: int) -> float:
        pairs, size = pair_mask(batch, depth), self.shape.hidden_size
        deep, rows = int(pairs.sum()), int(pairs[0].sum())
        blocks = 3 * self.config.num_layers - 1  # the first block's input is frozen: no gradient of it
        macs = deep * blocks * size * size
        macs += deep * (3 if self.config.own_lm_head else 2) * size * self.draft_vocab_size
        if self.config.labels == "soft":
            macs += rows * size * self.draft_vocab_size
        return 2.0 * macs

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        return supervised * (1 + depth * (3 * self.config.num_layers + 2)) * self.shape.hidden_size

    def session(self, max_length: int) -> Session:
        return _MedusaSession(self)

    # -- export ------------------------------------------------------------------------------------------------

    def export_spec(self, dialect: str) -> ExportSpec:
        return medusa_export.spec(self, dialect)

    @classmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return medusa_export.expected_tensors(dialect, config)

    @classmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        return medusa_export.read(cls, dialect, config, tensors, shape)


class _MedusaSession(Session):
    """Every head reads the same feature: guesses change nothing, only their depth selects the head."""

    def __init__(self, head: Medusa) -> None:
        self.head, self.lm_heads = head, head._lm_heads()

    def _logits(self, depth: int) -> Tensor:
        """[Vd] of the head for 0-based ``depth``."""
        if depth >= self.head.config.num_heads:
            raise ValueError(f"{depth + 1} tokens drafted, but there are {self.head.config.num_heads} heads")
        if depth not in self.cache:
            weight = self.lm_heads[depth if len(self.lm_heads) > 1 else 0]
            x = self.head.blocks[depth](self.final).to(weight.dtype)  # a shared lm_head has the target's type
            self.cache[depth] = nn.functional.linear(x, weight)[0].float()
        return self.cache[depth]

    @torch.no_grad()
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        self.final = final[-1:].to(self.head.blocks[0].layers[0].weight.dtype)
        self.cache: dict[int, Tensor] = {}
        self.depths: list[int] = []
        return self._logits(0)

    @torch.no_grad()
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        depths = [1 if p < 0 else self.depths[p] + 1 for p in parents.tolist()]
        self.depths += depths
        return torch.stack([self._logits(d) for d in depths])
