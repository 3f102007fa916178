"""The pieces of a Llama-like decoder layer that heads are built from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .types import TargetShape


def wide(x: Tensor) -> Tensor:
    """x in the precision for sums and exponentials: float32, or float64 as it is (gradient checks)."""
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(torch.autograd.Function):
    """With its own backward: half the passes over memory of the composed form, which CPUs have no kernel for."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = wide(x)
        scale = torch.rsqrt(torch.linalg.vecdot(x32, x32) / x.shape[-1] + eps).unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        grad, normed = wide(grad), wide(x) * scale
        d_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        inner = grad * weight
        mean = torch.linalg.vecdot(inner, normed).unsqueeze(-1) / x.shape[-1]
        return inner.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), d_weight, None


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, in float32 inside (Zhang and Sennrich 2019). x [..., H]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return nn.functional.rms_norm(wide(x), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Rope(nn.Module):
    """Rotary position embedding in transformers' conventions (half rotation), for every rope_type it knows. With a
    ``partial_rotary_factor`` the first such part of each head is turned, as engines do it."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        from transformers import LlamaConfig  # deferred: importing headtrain stays light
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        parameters = dict(shape.rope)
        turned = int(shape.head_dim * parameters.pop("partial_rotary_factor", 1.0))
        self.table = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_heads,
                head_dim=turned,
                max_position_embeddings=shape.max_positions,
                rope_parameters=parameters,
            )
        )
        for name in list(self.table._buffers):  # computed from the config: never part of a checkpoint
            self.table._non_persistent_buffers_set.add(name)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cos, sin [n, 1, d] float32, to broadcast over heads; d: the part that is turned."""
        cos, sin = self.table(torch.empty((), dtype=torch.float32, device=positions.device), positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, d] turned by the angles of its positions; what they do not reach stays."""
    if (size := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], -1)
    a, b = wide(x).chunk(2, -1)
    half = cos.shape[-1] // 2
    c, s = cos[..., :half], sin[..., :half]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (SwiGLU and kin)."""

    def __init__(self, hidden: int, intermediate: int, act: str = "silu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act = ACTIVATIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
}
