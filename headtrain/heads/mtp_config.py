"""The recipe's section of an MTP module trained from scratch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .base import HeadConfig, SoftLoss


class MtpConfig(HeadConfig):
    training_only: ClassVar[frozenset[str]] = frozenset({"depth", "context", "labels", "loss", "beta", "balance"})

    kind: Literal["mtp"] = "mtp"
    depth: int = Field(3, ge=1, description="tokens drafted in a row in training")
    modules: int = Field(
        1, ge=1, description="1: one module applied at every step; else one for each step, as many as depth (DeepSeek)"
    )
    block: Literal["auto", "dense", "moe"] = Field(
        "auto", description="decoder layer; moe: with the target's mixture of experts; auto: where its kind is known"
    )
    concat: Literal["hidden_first", "embed_first"] = Field(
        "hidden_first", description="order of M's input; hidden_first: MiMo's, which vLLM serves"
    )
    start: Literal["raw", "normed"] = Field(
        "raw", description="first state; raw: before the target's final norm (MiMo), normed: after it (DeepSeek)"
    )
    recycle: Literal["normed", "raw"] = Field(
        "normed", description="state handed on; normed: after the final norm (MiMo), raw: before it (DeepSeek)"
    )
    context: Literal["first", "own"] | None = Field(
        None,
        description="keys that step s sees in training; first: as one module decodes, step 0's and its own chain's; "
        "own: step s's of every position (FastMTP; always so with several modules, which also decode so); null: first, "
        "or own with several modules",
    )
    labels: Literal["hard", "soft"] = Field("hard", description="the token that followed, or the target's distribution")
    loss: SoftLoss = "kl"
    beta: float = Field(0.6, gt=0, le=1, description="step s is weighted beta^s, over the sum of these")
    balance: float = Field(
        1e-3, ge=0, description="moe: weight of the router's load balance, for each document (DeepSeek-V3, eq. 17)"
    )
    zero_first_embedding: bool = Field(True, description="the embedding fed at position 0 is zero, as in vLLM's MiMo")
    attention_bias: bool | None = Field(None, description="biases of q/k/v; default: as the target's family (Qwen2)")
    qk_norm: bool | None = Field(None, description="norms of queries and keys; default: as the family (Qwen3)")
    intermediate_size: int | None = Field(None, description="of a dense block; default: the target's")
    own_lm_head: bool = Field(False, description="train an lm_head of its own; false: the target's, frozen")
    draft_vocab_size: int | None = Field(None, ge=1, description="draft these many frequent tokens; null: all")

    @property
    def own_context(self) -> bool:
        return self.modules > 1 or self.context == "own"

    @model_validator(mode="after")
    def _hard_labels_have_one_loss(self) -> MtpConfig:
        if self.labels == "hard" and self.loss != "kl":
            raise ValueError(
                f"loss={self.loss} needs the target's distribution, but labels=hard trains on the token that followed; "
                "set head.labels=soft, or head.loss=kl (cross entropy)"
            )
        return self

    @model_validator(mode="after")
    def _a_module_for_each_step(self) -> MtpConfig:
        if self.modules > 1 and self.modules != self.depth:
            raise ValueError(
                f"modules={self.modules} with depth={self.depth}: of several modules each is one step, and an engine "
                f"drafts no deeper than it has modules; set head.depth={self.modules} (or head.modules={self.depth}), "
                "or head.modules=1 for one that is applied at every step"
            )
        if self.modules > 1 and self.context == "first":
            raise ValueError(
                f"context=first with modules={self.modules}: a module has its own keys of every position, in training "
                "and in decoding; leave head.context out"
            )
        return self

    @model_validator(mode="after")
    def _experts_have_their_own_size(self) -> MtpConfig:
        if self.block == "moe" and self.intermediate_size is not None:
            raise ValueError(
                f"intermediate_size={self.intermediate_size} with block=moe: experts have the target's sizes; leave it "
                "out, or set head.block=dense"
            )
        return self
