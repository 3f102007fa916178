"""transformers' own decoder layer of a family as the block of a recursive head: split where the recursion needs it,
into keys and values of a position, queries, and what follows attention. Matrices and their names stay transformers'."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ..layers import rotate

Angles = tuple[Tensor, Tensor]


class FamilyRope(nn.Module):
    """The family's rotary embedding: positions [n] -> cos, sin [n, 1, rotary size] float32, to broadcast over heads."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, positions: Tensor) -> Angles:
        like = torch.empty((), dtype=torch.float32, device=positions.device)
        cos, sin = self.table(like, positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def turn(x: Tensor, angles: Angles, interleaved: bool = False) -> Tensor:
    """x [n, heads, d] with its first ``cos.shape[-1]`` coordinates turned. interleaved: pairs are neighbours
    (DeepSeek); they come out as two halves, in queries and keys alike."""
    size = angles[0].shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
    return torch.cat([rotate(turned, *angles), rest], -1)


def columns(layer: nn.Linear, x: Tensor, width: int, chosen: slice) -> Tensor:
    """``layer(x)`` as [n, heads, width], of which only ``chosen`` of each head is computed."""
    weight = layer.weight.unflatten(0, (-1, width))[:, chosen]
    bias = None if layer.bias is None else layer.bias.unflatten(0, (-1, width))[:, chosen].flatten()
    return linear(x, weight.flatten(0, 1), bias).unflatten(1, (weight.shape[0], -1))


class _Attention(nn.Module):
    """Takes over the children of transformers' attention under their names."""

    gated = False
    key_matrices: tuple[str, ...] = ("k_proj", "v_proj")

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        self.scale = float(source.scaling)

    def output(self, attended: Tensor, read: Tensor | None) -> Tensor:
        """attended [n, heads, d] -> [n, H]; read [n, H]: what the queries were made of, where a gate needs it."""
        return self.o_proj(attended.flatten(1))


class GroupedAttention(_Attention):
    """Grouped-query attention with what the family has of biases, norms of queries and keys, and partial rotation."""

    def __init__(self, source: nn.Module, config) -> None:
        super().__init__(source)
        self.width = source.head_dim
        self.key_shape = config.num_key_value_heads, self.width

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules.get(name)
        return x if norm is None else norm(x).to(x.dtype)  # GLM's norm gives its weight's type under autocast

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        return turn(self._normed("q_norm", self.q_proj(x).unflatten(1, (-1, self.width))), angles)

    def keys(self, x: Tensor, angles: Angles) -> Tensor:
        return turn(self._normed("k_norm", self.k_proj(x).unflatten(1, (-1, self.width))), angles)

    def values(self, x: Tensor) -> Tensor:
        return self.v_proj(x).unflatten(1, (-1, self.width))


class GatedAttention(GroupedAttention):
    """Qwen3-Next's: each head's rows of q_proj are a query and a gate on that head's output."""

    gated = True

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        q = columns(self.q_proj, x, 2 * self.width, slice(0, self.width))
        return turn(self._normed("q_norm", q), angles)

    def output(self, attended: Tensor, read: Tensor | None) -> Tensor:
        gate = columns(self.q_proj, read, 2 * self.width, slice(self.width, None))
        return self.o_proj((attended * torch.sigmoid(gate)).flatten(1))


class LatentAttention(_Attention):
    """DeepSeek's multi-head latent attention with expanded keys. Values are padded with zeros to the size of a key: the
    attention kernels know one size. A session's cache so holds 2 * heads * (key size) numbers a position, not the
    latent's few hundred."""

    key_matrices = ("kv_a_proj_with_mqa", "kv_b_proj")

    def __init__(self, source: nn.Module, config) -> None:
        super().__init__(source)
        self.plain, self.turned = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.rank, self.value = config.kv_lora_rank, config.v_head_dim
        self.interleaved = bool(config.rope_interleave)
        self.width = self.plain + self.turned
        self.key_shape = config.num_attention_heads, self.width
        if self.value > self.width:
            raise ValueError(f"v_head_dim {self.value} is larger than a key ({self.width}): not supported")

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        low = "q_a_proj" in self._modules
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low else self.q_proj(x)
        q = q.unflatten(1, (-1, self.width))
        return torch.cat([q[..., : self.plain], turn(q[..., self.plain :], angles, self.interleaved)], -1)

    def _expand(self, compressed: Tensor, chosen: slice) -> Tensor:
        latent = self.kv_a_layernorm(compressed[:, : self.rank])
        return columns(self.kv_b_proj, latent, self.plain + self.value, chosen)

    def keys(self, x: Tensor, angles: Angles) -> Tensor:
        compressed = self.kv_a_proj_with_mqa(x)
        plain = self._expand(compressed, slice(0, self.plain))
        shared = turn(compressed[:, None, self.rank :], angles, self.interleaved)  # one for all heads
        return torch.cat([plain, shared.expand(-1, plain.shape[1], -1)], -1)

    def values(self, x: Tensor) -> Tensor:
        values = self._expand(self.kv_a_proj_with_mqa(x), slice(self.plain, None))
        return pad(values, (0, self.width - self.value))

    def output(self, attended: Tensor, read: Tensor | None) -> Tensor:
        return self.o_proj(attended[..., : self.value].flatten(1))


class FamilyBlock(nn.Module):
    """One decoder layer; ``input_layernorm`` is applied by the head, whose residual is what it reads."""

    def __init__(self, layer: nn.Module, attention: _Attention) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = attention
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual and MLP or experts: the layer's un-normed output [n, H]."""
        read = self.input_layernorm(residual) if self.self_attn.gated else None  # once more: only a gate needs it here
        x = residual + self.self_attn.output(attended, read)
        return x + self.mlp(self.post_attention_layernorm(x).unsqueeze(0)).squeeze(0)
