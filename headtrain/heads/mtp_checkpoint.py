"""Fine-tuning of the MTP module that a checkpoint holds itself, applied recursively as FastMTP does (arXiv 2509.18362):
FastMTP's MiMo-7B rose from an acceptance length of 1.83 to 2.73 by it.

``mtp_families`` says what the module is in each family. The start is read from the target's files, and what was trained
goes back into them: ``headtrain stitch``. The target's embedding and lm_head stay frozen. Where the module holds copies
of them (DeepSeek, GLM) they must equal the target's, and are left in the files as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..types import TargetShape, TargetWeights
from .base import HeadConfig, SoftLoss
from .mtp import Mtp
from .mtp_families import State, build_block, by_file_name, copies_of, family_of
from .recurrent import RecurrentHead


class MtpCheckpointConfig(HeadConfig):
    training_only: ClassVar[frozenset[str]] = frozenset({"depth", "context", "labels", "loss", "beta"})
    own_lm_head: ClassVar[bool] = False
    balance: ClassVar[float] = 0.0  # the router is DeepSeek's, balanced by the bias that the checkpoint has

    kind: Literal["mtp-checkpoint"] = "mtp-checkpoint"
    depth: int = Field(3, ge=1, description="times that the module is applied in training")
    start: State | None = Field(
        None, description="first state, before or after the target's final norm; null: as the family does"
    )
    recycle: State | None = Field(
        None, description="state fed back, before or after the module's final norm; null: as the family's table says"
    )
    zero_first_embedding: bool | None = Field(
        None, description="the embedding fed at position 0 is zero; null: as vLLM does for the family"
    )
    context: Literal["first", "own"] = Field(
        "first",
        description="keys that step s sees in training; first: as in decoding, step 0's and its own chain's; "
        "own: step s's of every position (FastMTP)",
    )
    labels: Literal["hard", "soft"] = Field("hard", description="the token that followed, or the target's distribution")
    loss: SoftLoss = "kl"
    beta: float = Field(0.6, gt=0, le=1, description="step s is weighted beta^s, over the sum of these")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="draft these many frequent tokens; null: all, as engines do with such a module"
    )

    @property
    def own_context(self) -> bool:
        return self.context == "own"

    @model_validator(mode="after")
    def _hard_labels_have_one_loss(self) -> MtpCheckpointConfig:
        if self.labels == "hard" and self.loss != "kl":
            raise ValueError(
                f"loss={self.loss} needs the target's distribution, but labels=hard trains on the token that followed; "
                "set head.labels=soft, or head.loss=kl (cross entropy)"
            )
        return self


class MtpCheckpoint(Mtp):
    """``Mtp`` with the module of the target's own checkpoint. Its form follows from the target alone; ``config`` holds
    the family's ``start``, ``recycle`` and ``zero_first_embedding`` where the recipe left them open."""

    Config = MtpCheckpointConfig
    dialects: ClassVar = {}
    instead_of_export = "`headtrain stitch RUN --target MODEL_FOLDER --out TUNED` puts it back into its own checkpoint"

    def __init__(self, config: MtpCheckpointConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        """Raises ValueError for a target without a module of its own."""
        family = family_of(shape)
        facts = {"start": family.start, "recycle": family.recycle, "zero_first_embedding": family.zero_first}
        open_ones = {key: value for key, value in facts.items() if getattr(config, key) is None}
        RecurrentHead.__init__(self, config.model_copy(update=open_ones), shape, draft_ids)  # not Mtp's own module
        self.family, self.later = family, nn.ModuleList()
        self.block, self.rope, norm = build_block(family, shape)
        self.scale = self.block.self_attn.scale
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (norm(size, eps=eps) for _ in range(3))
        self.input_proj = nn.Linear(2 * size, size, bias=False)

    # -- the checkpoint's files --------------------------------------------------------------------------------

    def checkpoint_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """The head's tensors, or views into them, by their names in the files. Raises ValueError where ``names`` does
        not hold all of them, or holds something unknown."""
        views = by_file_name(self.family, self.shape, self.state_dict(), names)
        if not any(name in names for name in views):
            listed = ", ".join(sorted(names)[:6]) or "none of a draft module"
            raise ValueError(
                f"this {self.family.title} checkpoint lacks the MTP module that its config announces: no tensor under "
                f"`{self.family.prefix.format(n=self.shape.num_layers)}` (found: {listed}). Some copies leave it "
                "out (GGUF files, folders saved again by transformers): take the published safetensors"
            )
        missing = sorted(views.keys() - set(names))
        unknown = sorted(set(names) - views.keys() - copies_of(self.family, self.shape).keys())
        if missing or unknown:
            quantised = any("scale" in name for name in unknown)
            raise ValueError(
                f"the MTP module of this {self.family.title} checkpoint is not as expected: "
                f"{_listed('missing', missing)}{_listed('not known', unknown)}"
                + ("it is quantised (its scales are there): convert the checkpoint to bf16 first" if quantised else "")
            )
        return views

    def check_start(self, weights: TargetWeights) -> None:
        """Of what it starts from, the module itself: whole, of the expected shapes, its copies of embedding and lm_head
        the target's. Its families have plain logits."""
        for _ in self._module(weights):
            pass

    def _module(self, weights: TargetWeights) -> Iterator[tuple[Tensor, Tensor]]:
        """This head's tensors, or views into them, each with the one that the files hold (read one by one: together
        they may be gigabytes)."""
        views = self.checkpoint_tensors(weights.module.keys())
        found = copies_of(self.family, self.shape)
        self._compare_copies(weights, {name: which for name, which in found.items() if name in weights.module})
        for name, view in views.items():
            tensor = weights.module[name]
            if tensor.shape != view.shape or not tensor.is_floating_point():
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {tuple(view.shape)} of floats"
                )
            yield view, tensor

    @torch.no_grad()
    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """The module as the files hold it, in this head's precision. Raises ValueError as ``check_start`` does."""
        count = 0
        for view, tensor in self._module(weights):
            view.copy_(tensor)
            count += 1
        return [f"the {self.family.title} module of the checkpoint: {count} tensors from its files"]

    def _compare_copies(self, weights: TargetWeights, copies: Mapping[str, str]) -> None:
        for name, which in copies.items():
            own, copy = getattr(weights, which), weights.module[name]
            if copy.shape != own.shape or not torch.equal(copy.to(own.device, own.dtype), own):
                raise ValueError(
                    f"{name} differs from the target's own {which}: engines draft with this copy, which a head that "
                    "shares the target's cannot train for"
                )

    # -- what differs from a module of our own -------------------------------------------------------------------

    def fuse(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.token_layernorm(embedded), self.hidden_layernorm(state)]
        if self.family.hidden_first:
            parts.reverse()
        x = self.input_proj(torch.cat(parts, -1))
        return self.block.input_layernorm(x), x

    @property
    def key_shape(self) -> tuple[int, int]:
        return self.block.self_attn.key_shape

    def key_weights(self) -> int:
        attention = self.block.self_attn
        return sum(getattr(attention, name).weight.numel() for name in attention.key_matrices)

    def row_weights(self) -> int:
        """Of the experts, those that one token is sent to."""
        sizes = {name: p.numel() for name, p in self.block.named_parameters() if p.ndim > 1}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        return sum(sizes.values()) - self.key_weights() - experts + round(experts * self._active_share())

    def _active_share(self) -> float:
        module = self.shape.module or {}
        count = module.get("n_routed_experts") or module.get("num_experts")
        return module.get("num_experts_per_tok", 0) / count if count else 0.0

    def mlp_width(self) -> int:
        module = self.shape.module or {}
        width = module.get("moe_intermediate_size")
        if not width:
            return self.shape.intermediate_size
        shared = module.get("shared_expert_intermediate_size") or width * module.get("n_shared_experts", 0)
        return width * module["num_experts_per_tok"] + shared


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{what}: {', '.join(names[:4])}{more}; " if names else ""
