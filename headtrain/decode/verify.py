"""Lossless verification of a drafted chain, as pure functions on tensors.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318): a token x drafted
from q is kept with probability min(1, p(x) / q(x)); at the first rejection the token comes from
norm(max(p - q, 0)); when all are kept, one more comes from p. What is committed is then distributed as p, whatever
the draft. Every random number comes from an explicit generator on the CPU, so that a seed means the same on any
device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def warp(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Logits [., V] -> the distribution [., V] float32 that is sampled from: temperature, then top_k (0: all), then
    the smallest set of tokens that holds ``top_p`` of what top_k left. Ties are kept in order of their ids."""
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # <= 0: no overflow at a tiny temperature
    probs = scaled.softmax(-1)
    if top_p >= 1.0 and not 0 < top_k < logits.shape[-1]:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ranked[..., top_k:] = 0
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if top_p < 1.0:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= top_p, 0)  # the first always stays: nothing is before it
        ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def sample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index drawn in proportion to ``weights`` [V] >= 0, as a scalar int64 on their device.

    The cumulative sum is inverted in float64; an index of weight zero is never drawn. Raises ValueError where the
    weights sum to nothing or are not finite.
    """
    cumulative = weights.double().cumsum(0)
    total = float(cumulative[-1])
    if not 0 < total < math.inf:
        raise ValueError(f"cannot sample: the weights sum to {total} (non-finite logits?)")
    at = float(torch.rand((), generator=generator, dtype=torch.float64)) * total
    if at >= total:  # rounded up: the last index of positive weight
        return torch.searchsorted(cumulative, total)
    return torch.searchsorted(cumulative, at, right=True)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) [V], not normalised; p itself where rounding leaves nothing of it.

    Where p and q agree up to rounding a rejection is as unlikely as that rounding, but it does happen; p is then the
    limit of what is right.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum() > 0, left, p)


def verify_greedy(draft: Tensor, choices: Tensor) -> int:
    """The accepted length of draft [k] under the target's greedy choices [k+1] (or more); choices[accepted] is then
    the target's own next token."""
    wrong = (draft != choices[: draft.numel()]).nonzero()
    return int(wrong[0]) if wrong.numel() else draft.numel()


def verify_sampled(draft: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """The accepted length of draft [k] and the token that follows it.

    p: the target's distributions [k+1, V]; row j follows the j-th drafted token. q: the distributions [k, V] that
    the drafted tokens were drawn from, or None where they were not drawn: a deterministic draft has q = 1 on its
    token, so it is accepted with p(x), and on rejection x is struck from p.
    """
    count = draft.numel()
    wanted = p[:count].gather(1, draft[:, None])[:, 0].tolist()  # p(x) and q(x) of every x, in one transfer
    drawn = [1.0] * count if q is None else q.gather(1, draft[:, None])[:, 0].tolist()
    for j in range(count):
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
        if not u * drawn[j] < wanted[j]:  # u < p/q without a division; a NaN is rejected, and then `sample` raises
            q_row = torch.zeros_like(p[j]).index_fill_(0, draft[j : j + 1], 1.0) if q is None else q[j]
            return j, int(sample(residual(p[j], q_row), generator))
    return count, int(sample(p[count], generator))


def top_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy choices [n] of logits [n, V], and the gap [n] between the best and the second best logit: how far each
    choice is from a tie that another order of summation could flip."""
    best = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    return logits.argmax(-1), best[:, 0] - best[:, -1]
