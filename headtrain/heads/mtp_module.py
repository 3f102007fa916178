"""The parts of one MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2): a projection M of [norm(state);
norm(embedding)], one decoder block of the target's kind, and a final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layers import RMSNorm
from ..types import TargetShape, TargetWeights
from .experts import KINDS, Experts, expert_sizes
from .mtp_config import MtpConfig
from .recurrent import Block

# what the attention of a family has beside Llama's matrices: biases of q/k/v, norms of queries and keys
FAMILIES = {
    "qwen2": (True, False), "qwen2_moe": (True, False), "glm4_moe": (True, False), "qwen3": (False, True),
    "qwen3_moe": (False, True), "qwen3_next": (False, True), "qwen3_5_moe_text": (False, True),
}  # fmt: skip


def build_block(config: MtpConfig, shape: TargetShape) -> Block:
    """Raises ValueError where ``block: moe`` is asked for and the target's experts are not known."""
    bias, qk_norm = FAMILIES.get(shape.model_type, (False, False))
    bias = bias if config.attention_bias is None else config.attention_bias
    qk_norm = qk_norm if config.qk_norm is None else config.qk_norm
    dense = config.block == "dense" or config.intermediate_size is not None
    sizes = None if dense else expert_sizes(shape)
    if sizes is not None:
        return Block(shape, bias=bias, qk_norm=qk_norm, mlp=Experts(shape.hidden_size, sizes, shape.hidden_act))
    if config.block == "moe":
        if shape.model_type in KINDS:
            problem = "gives no sizes of its experts (in a recipe: target.expect.experts)"
        else:
            problem = f"has experts of no kind that is built here ({', '.join(KINDS)})"
        own = "; to tune the module that its own checkpoint holds: head.kind=mtp-checkpoint" if shape.module else ""
        raise ValueError(
            f"head.block=moe: a target of family {shape.model_type!r} {problem}; set head.block=dense, a dense layer "
            f"of the target's sizes{own}"
        )
    return Block(shape, config.intermediate_size or shape.intermediate_size, bias, qk_norm)


class ModuleParts:
    """What a module is made of and computes; mixed into the head itself, which is its first module, and into the
    later ones."""

    config: MtpConfig

    def build_parts(self, shape: TargetShape) -> None:
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.block = build_block(self.config, shape)
        self.final_layernorm = RMSNorm(size, eps)

    def fuse(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """embedded [n, H], state [n, H] -> what q/k/v read, and the layer's residual [n, H]."""
        parts = [self.hidden_layernorm(state), self.token_layernorm(embedded)]
        if self.config.concat == "embed_first":
            parts.reverse()
        x = self.input_proj(torch.cat(parts, -1))
        return self.input_layernorm(x), x

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's un-normed output [n, H] -> the state that is handed on, and what the lm_head reads."""
        normed = self.final_layernorm(x)
        return (normed if self.config.recycle == "normed" else x), normed

    @torch.no_grad()
    def start_parts(self, weights: TargetWeights) -> list[str]:
        """M passes the state through, the block is the target's last layer, adding nothing at first, and the final norm
        is the target's. Returns the log's lines."""
        size = weights.final_norm.numel()
        hidden = slice(0, size) if self.config.concat == "hidden_first" else slice(size, None)
        self.input_proj.weight.zero_()
        self.input_proj.weight[:, hidden] = torch.eye(size)
        self.final_layernorm.weight.copy_(weights.final_norm)
        done = ["input_proj = identity on the state", "final_layernorm = the target's final norm"]
        done.append(self.block.copy_layer(weights.last_layer))
        if weights.last_layer.get("input_layernorm.weight") is not None:
            self.input_layernorm.weight.copy_(weights.last_layer["input_layernorm.weight"])
        return done


class LaterModule(ModuleParts, nn.Module):
    """Module 2 and on of a chain."""

    def __init__(self, config: MtpConfig, shape: TargetShape) -> None:
        super().__init__()
        self.config = config
        self.build_parts(shape)
