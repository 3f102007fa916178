"""The target's own next-token distribution, rebuilt from final features in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from .few_rows import linear


class Teacher:
    """final features [., H] -> the target's logits.

    weight [V, H] of the lm_head, bias [V] or None, scale: factor on the logits (Cohere, Granite), softcap:
    Gemma-2's tanh bound or None. The order is scale, then softcap, as in transformers. The features must be
    post-norm: capture stores nothing else.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self.weight, self.bias, self.scale, self.softcap = weight.detach(), bias, scale, softcap

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def logits(self, final: Tensor) -> Tensor:
        """[., H] -> [., V] float32. The matrix product runs in the weight's dtype, as in the target."""
        out = linear(final.to(self.weight.dtype), self.weight, self.bias).float()
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out

    @torch.no_grad()
    def summary(self, final: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
        """Greedy token [.] int64 and log-sum-exp [.] float32 over the whole vocabulary; no [., V] tensor is kept."""
        parts = [(x.argmax(-1), x.logsumexp(-1)) for x in map(self.logits, final.split(chunk))]
        if not parts:
            empty = final.new_zeros(0)
            return empty.long(), empty.float()
        return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])

    def restricted(self, ids: Tensor) -> Teacher:
        """The same teacher over the rows ``ids`` [Vd] only (a copy of those rows)."""
        return Teacher(self.weight[ids], None if self.bias is None else self.bias[ids], self.scale, self.softcap)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Teacher:
        """The same teacher elsewhere. dtype: that its products run in; None: as it is."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return Teacher(self.weight.to(device, dtype), bias, self.scale, self.softcap)
