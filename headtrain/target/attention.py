"""Attention over packed documents, as an attention implementation of transformers.

The function is registered under ``NAME``. A forward that passes a ``Run`` attends inside each document only; any
other forward (a decoding step, a plain call) goes to transformers' own SDPA with its own mask, so one setting
serves both and nothing is switched between calls.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "headtrain_packed"
KWARG = "headtrain_run"
BLOCK = 1024  # queries of one masked block, where a document is longer than a sliding window


class NotPacked(ValueError):
    """This family's attention asks for something that the packed implementation does not compute."""


@dataclass
class Run:
    """The documents of one packed forward. bounds: [D+1] cumulative lengths on the host; cu: the same as int32 on the
    device. windows: filled while running, the sliding window that each layer asked for (None: full)."""

    bounds: list[int]
    cu: Tensor
    windows: dict[int, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, cu: Tensor, device: torch.device) -> Run:
        return cls(cu.tolist(), cu.to(device, torch.int32))

    @property
    def longest(self) -> int:
        return max((b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)), default=0)


def register() -> None:
    """Make ``NAME`` known to transformers (idempotent). The mask of a plain call is SDPA's."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def no_mask(device: torch.device) -> Tensor:
    """A 4D mask: transformers hands it through as it is instead of building [T, T]; the packed function ignores it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d].

    Raises NotPacked for logit soft-capping, sinks and position biases.
    """
    run: Run | None = kwargs.pop(KWARG, None)
    if run is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotPacked(f"attention with {name}")
    if query.shape[0] != 1 or query.shape[2] != run.bounds[-1]:
        raise NotPacked(f"attention over {tuple(query.shape)}, expected one flat run of {run.bounds[-1]} tokens")
    run.windows[module.layer_idx] = sliding_window
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _has_varlen() and query.shape[-1] <= 256:
        return _varlen(query, key, value, run, scaling, sliding_window)[None], None
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for a, b in zip(run.bounds, run.bounds[1:], strict=False):
        if a < b:
            one = _document(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, sliding_window)
            out[:, a:b] = one.transpose(1, 2)
    return out, None


def _document(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention of one document, [1, heads, n, d]; each query sees the ``window`` keys up to itself."""
    n, gqa = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or n <= window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    parts = []
    for start in range(0, n, BLOCK):
        end, first = min(start + BLOCK, n), max(0, start - window + 1)
        at, to = torch.arange(start, end, device=q.device)[:, None], torch.arange(first, end, device=q.device)[None]
        mask = (to <= at) & (to > at - window)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        parts.append(
            scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=mask, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(parts, 2)


def _has_varlen() -> bool:
    """torch >= 2.10 has varlen_attn with a scale, a window and grouped heads; without them, one call a document."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _varlen(q: Tensor, k: Tensor, v: Tensor, run: Run, scaling: float | None, window: int | None) -> Tensor:
    """One flash-attention call over all documents: [1, heads, T, d] -> [T, heads, d]."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    left = -1 if window is None else window - 1  # the key at a distance of ``window`` is not seen
    return varlen_attn(
        q,
        k,
        v,
        run.cu,
        run.cu,
        run.longest,
        run.longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
