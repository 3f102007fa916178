"""Multi-token prediction from scratch: one module applied recursively.

The module is DeepSeek-V3's (arXiv 2412.19437, section 2.2): a projection M of [norm(state); norm(embedding)], one
decoder block of the target's kind, a final norm, and the target's own lm_head. Fed with the token i+1+s at step s it
drafts token i+2+s. All depths share it, as in MiMo and FastMTP (arXiv 2509.18362).

The defaults are what vLLM 0.32 computes for MiMo, the form in which it serves a dense module: the first state is the
target's residual stream *before* its final norm, the later ones are the module's output *after* its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..attention import Runs, training_time_test
from ..layers import RMSNorm
from ..losses import HardTargets, SoftTargets, align, align_pairs, vocab_loss, zero_sums
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from . import mtp_export
from .base import DraftHead, ExportSpec, HeadConfig, SoftLoss
from .recurrent import Block, RecurrentHead, seen_positions

# what the attention of a dense family has beside Llama's matrices: biases of q/k/v, norms of queries and keys
FAMILIES = {"qwen2": (True, False), "qwen3": (False, True)}


class MtpConfig(HeadConfig):
    training_only: ClassVar[frozenset[str]] = frozenset({"depth", "context", "labels", "loss", "beta"})

    kind: Literal["mtp"] = "mtp"
    depth: int = Field(3, ge=1, description="times that the module is applied in training")
    concat: Literal["hidden_first", "embed_first"] = Field(
        "hidden_first", description="order of M's input; hidden_first: MiMo's, which vLLM serves"
    )
    start: Literal["raw", "normed"] = Field(
        "raw", description="first state; raw: before the target's final norm (MiMo), normed: after it (DeepSeek)"
    )
    recycle: Literal["normed", "raw"] = Field(
        "normed", description="state fed back; normed: after the final norm (MiMo), raw: before it (DeepSeek)"
    )
    context: Literal["first", "own"] = Field(
        "first",
        description="keys that step s sees in training; first: as in decoding, step 0's and its own chain's; "
        "own: step s's of every position (FastMTP)",
    )
    labels: Literal["hard", "soft"] = Field("hard", description="hard: the token that followed; soft: the target's p")
    loss: SoftLoss = "kl"
    beta: float = Field(0.6, gt=0, le=1, description="step s is weighted beta^s, over the sum of these")
    zero_first_embedding: bool = Field(True, description="the embedding fed at position 0 is zero, as in vLLM's MiMo")
    attention_bias: bool | None = Field(None, description="biases of q/k/v; default: as the target's family (Qwen2)")
    qk_norm: bool | None = Field(None, description="norms of queries and keys; default: as the family (Qwen3)")
    intermediate_size: int | None = Field(None, description="default: the target's")
    own_lm_head: bool = Field(False, description="train an lm_head of its own; false: the target's, frozen")
    draft_vocab_size: int | None = Field(None, ge=1, description="draft these many frequent tokens; null: all")

    @model_validator(mode="after")
    def _hard_labels_have_one_loss(self) -> MtpConfig:
        if self.labels == "hard" and self.loss != "kl":
            raise ValueError(
                f"loss={self.loss} needs the target's distribution, but labels=hard trains on the token that followed; "
                "set head.labels=soft, or head.loss=kl (cross entropy)"
            )
        return self


class Mtp(RecurrentHead):
    Config = MtpConfig
    dialects = mtp_export.FORMS

    def __init__(self, config: MtpConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        bias, qk_norm = FAMILIES.get(shape.model_type, (False, False))
        bias = bias if config.attention_bias is None else config.attention_bias
        qk_norm = qk_norm if config.qk_norm is None else config.qk_norm
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.block = Block(shape, config.intermediate_size or shape.intermediate_size, bias, qk_norm)
        self.final_layernorm = RMSNorm(size, eps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, self.draft_vocab_size, bias=False)

    @classmethod
    def uses_draft_vocab(cls, config: MtpConfig, shape: TargetShape) -> int | None:
        size = config.draft_vocab_size
        return None if size is None or size >= shape.vocab_size else size

    def wants(self) -> Wants:
        if self.config.start == "raw":  # the last index of hidden_states is the final norm's input
            return Wants(layers=(self.shape.num_layers,), final="supervised", depth=self.config.depth)
        return Wants(layers=(), final="all", depth=self.config.depth)

    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """M passes the state through, the block is the target's last layer, adding nothing at first, and the final norm
        is the target's."""
        size = self.shape.hidden_size
        hidden = slice(0, size) if self.config.concat == "hidden_first" else slice(size, None)
        done = ["input_proj = identity on the state", "final_layernorm = the target's final norm"]
        with torch.no_grad():
            self.input_proj.weight.zero_()
            self.input_proj.weight[:, hidden] = torch.eye(size)
            self.final_layernorm.weight.copy_(weights.final_norm)
            done.append(self.block.copy_layer(weights.last_layer))
            if weights.last_layer.get("input_layernorm.weight") is not None:
                self.input_layernorm.weight.copy_(weights.last_layer["input_layernorm.weight"])
            if self.config.own_lm_head:
                rows = weights.lm_head if self.draft_ids is None else weights.lm_head[self.draft_ids]
                self.lm_head.weight.copy_(rows)
                done.append("lm_head = the target's rows")
        return done

    def lm_head_weight(self) -> Tensor:
        return self.lm_head.weight if self.config.own_lm_head else super().lm_head_weight()

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = super().embedding(tokens, positions)
        if not self.config.zero_first_embedding:
            return embedded
        return embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)

    def first_state(self, layers: Tensor, final: Tensor) -> Tensor:
        return layers[:, 0].to(self.dtype) if self.config.start == "raw" else super().first_state(layers, final)

    def fuse(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.hidden_layernorm(state), self.token_layernorm(embedded)]
        if self.config.concat == "embed_first":
            parts.reverse()
        x = self.input_proj(torch.cat(parts, -1))
        return self.input_layernorm(x), x

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.final_layernorm(x)
        return (normed if self.config.recycle == "normed" else x), normed

    # -- training ----------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        """In eval mode the context is decoding's, whatever it is in training: what is measured is what will be
        drafted."""
        pairs = pair_mask(batch, depth)
        start = pairs[0].nonzero().squeeze(1)
        if start.numel() == 0:
            return zero_sums(depth, list(self.trainable().values()))
        own_context = self.training and self.config.context == "own"
        unroll = self.unroll_own_context if own_context else self.unroll
        hidden = align(unroll(batch, self.states(batch, features), start, depth), depth)
        where = torch.searchsorted(features.final_at, start + 1)
        greedy, labels = features.argmax[where], batch.ids[start + 2]
        if self.to_draft is not None:
            greedy, labels = self.to_draft[greedy], self.to_draft[labels]
        if self.config.labels == "hard":
            targets = HardTargets(labels=labels, greedy=greedy)
        else:
            targets = SoftTargets(features.final[where], self.restricted(teacher), greedy, features.lse[where])
        weight = self.config.beta ** torch.arange(depth, dtype=torch.float32)
        pairs = align_pairs(pairs, start)
        weight = weight / weight.sum()
        return vocab_loss(hidden, [self.lm_head_weight()], targets, pairs, weight, loss=self.config.loss)

    def unroll_own_context(self, batch: Batch, state: Tensor, start: Tensor, depth: int) -> list[Tensor]:
        """FastMTP's published training, with the result of ``unroll``: every step is causal over that step's own
        states of all positions, at unshifted RoPE positions. A position whose token i+1+s lies in the next document
        is read by no pair that counts: only later positions of its own document see it."""
        attention, rows = self.block.self_attn, start.numel()
        everywhere = torch.arange(len(batch), device=start.device)
        runs, last_runs = (Runs.of(at, batch.cu[batch.doc[at]]) for at in (everywhere, start))
        angles, out = self.rope(batch.pos), []
        for s in range(min(depth, rows)):
            # zero_first_embedding is about RoPE position 0 of decoding, which later steps never stand at
            embedded = self.embedding(batch.ids.roll(-1 - s), batch.pos + s)
            read, residual = self.fuse(embedded, state)
            k, v, at = attention.keys(read, angles), attention.values(read), everywhere
            if s == min(depth, rows) - 1:  # nobody reads the states of the last step
                at, runs = start, last_runs
            q = attention.queries(read[at], tuple(x[at] for x in angles))
            attended = training_time_test(q, k, v, [], runs, self.scale)
            state, seen = self.outputs(self.block.finish(attended, residual[at]))
            out.append((seen if at is start else seen[start])[: rows - s])
        return out

    def flops(self, batch: Batch, depth: int) -> float:
        pairs = pair_mask(batch, depth)
        matrix = self.shape.hidden_size * self.draft_vocab_size
        logits = (3 if self.config.own_lm_head else 2) * int(pairs.sum()) * matrix
        if self.config.labels == "soft":
            logits += int(pairs[0].sum()) * matrix
        own = self.config.context == "own"
        layer = self._own_context_macs(batch, depth) if own else self.layer_macs(batch, depth, through=True)
        return 2.0 * (layer + logits)

    def _own_context_macs(self, batch: Batch, depth: int) -> int:
        pairs, shape = pair_mask(batch, depth), self.shape
        start = pairs[0].nonzero().squeeze(1)
        keys, rows, size = seen_positions(batch, start), start.numel(), shape.hidden_size
        last = batch.pos.new_full((batch.cu.numel() - 1,), -1)
        last = last.scatter_reduce(0, batch.doc[start], batch.pos[start], "amax") + 1
        seen = (depth - 1) * int((last * (last + 1) // 2).sum()) + int((batch.pos[start] + 1).sum())
        queries = (depth - 1) * keys + rows
        macs = 2 * keys * 2 * size * size + 3 * (depth - 1) * keys * size * size
        macs += 3 * depth * keys * self.key_weights()
        return macs + 3 * queries * self.row_weights() + 6 * seen * shape.num_heads * self.key_shape[1]

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        if self.config.context == "own":  # every position at every step but the last
            return super().kept_values(tokens * depth, tokens * max(depth - 1, 0) // depth + supervised, depth)
        return super().kept_values(tokens, supervised, depth)

    # -- export ------------------------------------------------------------------------------------------------

    def export_spec(self, dialect: str) -> ExportSpec:
        return mtp_export.spec(self, dialect)

    @classmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        if dialect not in cls.dialects:
            raise KeyError(dialect)
        return mtp_export.expected_tensors(dialect, config)

    @classmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        return mtp_export.read(cls, dialect, config, tensors, shape)
