"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077) and, as its options, HASS (Zhang et al. 2024, arXiv 2408.15766).

At position i the layer reads fc([embedding of token i+1; final_i]) and predicts the target's next feature final_{i+1},
from which the target's own frozen lm_head drafts token i+2. The layer has no input norm and no norm follows it.
Deeper drafts feed the predicted feature back. EAGLE-1 trains the first step alone (``steps: 1``), on true features
made noisy; HASS trains ``steps`` > 1 on the head's own features, in the context that decoding gives them (harmonised
context) and without a gradient from a step into the one before, and adds a cross entropy over the target's top-k.
(HASS's code gives masked keys a score of zero, not minus infinity, so that they dilute its softmax. Decoding has no
such keys, nor has this.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..layers import wide
from ..losses import CHUNK_LOGITS, SoftTargets, align, align_pairs, vocab_loss, zero_sums
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from . import eagle1_export
from .base import DraftHead, ExportSpec, HeadConfig, SoftLoss
from .recurrent import Block, RecurrentHead


class Eagle1Config(HeadConfig):
    training_only: ClassVar[frozenset[str]] = frozenset(  # so that HASS can continue an EAGLE-1
        {"depth", "steps", "noise", "regression_weight", "classification_weight", "loss", "topk", "topk_weight"}
    )

    kind: Literal["eagle1"] = "eagle1"
    depth: int = Field(5, ge=1, description="tokens drafted in a row, and the depth to which it is measured")
    steps: int = Field(1, ge=1, description="steps that train; 1: EAGLE-1, more: HASS (3 in the paper)")
    bias: bool = Field(False, description="of fc; published checkpoints have one, vLLM drops it without a word")
    intermediate_size: int | None = Field(None, description="default: the target's")
    noise: float = Field(0.1, ge=0, description="training only: features + uniform(-noise, noise) * 512 / row's length")
    regression_weight: float = Field(1.0, ge=0, description="of SmoothL1(prediction, next feature), mean over H")
    classification_weight: float = Field(0.1, ge=0, description="of `loss` against the target's distribution")
    loss: SoftLoss = "kl"
    topk: int = Field(10, ge=1, description="HASS: tokens of the top-k loss")
    topk_weight: float = Field(0.0, ge=0, description="HASS: weight of the top-k loss (1.0 in the paper)")
    draft_vocab_size: int | None = Field(None, ge=1, description="draft these many frequent tokens; null: all")

    @model_validator(mode="after")
    def _trains_no_deeper_than_it_drafts(self) -> Eagle1Config:
        if self.steps > self.depth:
            raise ValueError(f"steps {self.steps} is more than depth {self.depth}: expected at most the drafted depth")
        return self


class Eagle1(RecurrentHead):
    Config = Eagle1Config
    dialects = eagle1_export.FORMS

    def __init__(self, config: Eagle1Config, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        size = shape.hidden_size
        self.intermediate = config.intermediate_size or shape.intermediate_size
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList([Block(shape, self.intermediate)])  # the published checkpoints' names

    @property
    def block(self) -> Block:
        return self.layers[0]

    def wants(self) -> Wants:
        return Wants(layers=(), final="all", depth=self.config.depth)

    @classmethod
    def usual_depth(cls, config: Mapping[str, Any], trained: int | None) -> int | None:
        return config["depth"]  # one step trains, and more are drafted from what it gives: as the paper does

    def trained_depth(self, unrolled: int) -> int:
        return min(unrolled, self.config.steps)

    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """fc passes the feature through and the layer is the target's last one, adding nothing at first."""
        size = self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, size:] = torch.eye(size)
            if self.fc.bias is not None:
                self.fc.bias.zero_()
        return ["fc = identity on the feature", self.block.copy_layer(weights.last_layer)]

    def fuse(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, state], -1))
        return x, x

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        """Training: the steps that train, so that the sums have min(steps, depth) depths. In eval mode all ``depth``
        are measured, of which the first ``steps`` make the total. ``loss`` of a depth is that against the target's
        distribution; ``total`` holds the regression and the top-k loss beside it.

        The noise is drawn from torch's default generator, which the trainer seeds for every micro-batch: a resumed
        run, or one of more ranks, draws the same.
        """
        trained = min(depth, self.config.steps)
        unrolled = trained if self.training else depth
        pairs = pair_mask(batch, unrolled)
        start = pairs[0].nonzero().squeeze(1)
        if start.numel() == 0:
            return zero_sums(unrolled, list(self.trainable().values()))
        state = self.states(batch, features)
        if self.training and self.config.noise:
            state = state + self._noise(batch, state)
        hidden = align(self.unroll(batch, state, start, unrolled, detach=True), unrolled)
        pairs = align_pairs(pairs, start)
        where = torch.searchsorted(features.final_at, start + 1)
        final, config = features.final[where].detach(), self.config  # labels, also where the target is trained, too
        greedy, teacher = self.drafted(features.argmax[where]), self.restricted(teacher)
        targets = SoftTargets(final, teacher, greedy, features.lse[where])
        weight = torch.zeros(unrolled)
        weight[:trained] = config.classification_weight
        sums = vocab_loss(hidden, [self.lm_head_weight()], targets, pairs, weight, loss=config.loss)
        hidden, pairs = hidden[:trained], pairs[:trained]
        sums.total = sums.total + config.regression_weight * _smooth_l1(hidden, final, pairs)
        if config.topk_weight:
            distilled = _TopK.apply(
                hidden, self.lm_head_weight(), teacher, final, pairs & targets.trains(), config.topk
            )
            sums.total = sums.total + config.topk_weight * distilled
        return sums

    def _noise(self, batch: Batch, state: Tensor) -> Tensor:
        lengths = (batch.cu[1:] - batch.cu[:-1])[batch.doc].unsqueeze(1)
        return (2 * torch.rand_like(state) - 1) * (self.config.noise * 512 / lengths).to(state.dtype)

    def flops(self, batch: Batch, depth: int) -> float:
        steps = min(depth, self.config.steps)
        pairs = pair_mask(batch, steps)
        # draft logits forward and back to the states (the lm_head is frozen); the teacher's rows once
        logits = (2 * int(pairs.sum()) + int(pairs[0].sum())) * self.lm_macs
        return 2.0 * (self.layer_macs(batch, steps, through=False) + logits)

    @property
    def lm_macs(self) -> int:
        return self.shape.hidden_size * self.draft_vocab_size

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        return super().kept_values(tokens, supervised, min(depth, self.config.steps))

    # -- export ------------------------------------------------------------------------------------------------

    def export_spec(self, dialect: str) -> ExportSpec:
        return eagle1_export.spec(self, dialect)

    @classmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return eagle1_export.expected_tensors(dialect, config)

    @classmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        return eagle1_export.read(cls, dialect, config, tensors, shape)


def _smooth_l1(hidden: Tensor, final: Tensor, pairs: Tensor) -> Tensor:
    """hidden [S, N, H] against final [N, H], both by teacher row: mean over H, sum over the pairs [S, N] that count."""
    hidden = wide(hidden)
    each = nn.functional.smooth_l1_loss(hidden, final.to(hidden.dtype).expand_as(hidden), reduction="none").mean(-1)
    return (each * pairs).sum().float()


class _TopK(torch.autograd.Function):
    """HASS's top-k distillation (section 3.1): -sum over the target's k likeliest tokens x of p(x) log q(x), p and q
    over the draft vocabulary; the sum over pairs. forward(hidden [S, N, H], weight [Vd, H] frozen, teacher, final
    [N, H], pairs [S, N], k). Chunked as ``losses`` is: the gradient is formed in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher, final, pairs, k):
        depths, rows, size = hidden.shape
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradient = torch.zeros_like(hidden)
        chunk = max(16, CHUNK_LOGITS // (depths * weight.shape[0]))
        device_type = hidden.device.type
        autocast = torch.is_autocast_enabled(device_type)
        weight = weight.to(torch.get_autocast_dtype(device_type) if autocast else hidden.dtype)
        with torch.autocast(device_type, enabled=False):
            for begin in range(0, rows, chunk):
                span = slice(begin, begin + chunk)
                p, best = torch.softmax(teacher.logits(final[span]), -1).topk(min(k, weight.shape[0]), -1)
                h, best = hidden[:, span].to(weight.dtype), best.expand(depths, -1, -1)
                q = torch.log_softmax((h @ weight.t()).float(), -1)
                counts = pairs[:, span, None].float()
                total -= (q.gather(-1, best) * p * counts).sum(dtype=torch.float64)
                q = q.exp_().mul_(p.sum(-1, keepdim=True)).scatter_add_(-1, best, -p.expand(depths, -1, -1))
                gradient[:, span] = (q.mul_(counts).to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None, None
