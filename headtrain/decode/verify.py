"""Verification of a drafted tree (a chain is the tree without branches), as pure functions on tensors.

Lossless but for ``verify_typical``, which is offered beside the lossless rules and says so.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318): a token x drafted
from q is kept with probability min(1, p(x) / q(x)); at the first rejection the token comes from
norm(max(p - q, 0)); when all are kept, one more comes from p. What is committed is then distributed as p, whatever
the draft. Siblings are tried one by one under the same rule, each against what the rejected ones left of p and of q
(recursive rejection sampling without replacement: SpecInfer, arXiv 2305.09781; Jeon et al., arXiv 2402.14160). Every
random number comes from an explicit generator on the CPU, so that a seed means the same on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..types import Proposal


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


def children(proposal: Proposal) -> list[list[int]]:
    """For the root (first) and for each node the numbers of its children, in order."""
    count = proposal.tokens.numel()
    below: list[list[int]] = [[] for _ in range(count + 1)]
    for node, parent in enumerate(range(-1, count - 1) if proposal.parents is None else proposal.parents):
        below[parent + 1].append(node)
    return below


def verify_greedy(proposal: Proposal, choices: Tensor) -> list[int]:
    """The accepted path (node numbers, from the root down) under the target's greedy choices [n+1]: entry 0 follows
    the root, entry j+1 node j. The choice after the path's last node is the target's own next token."""
    drafted, wanted, below = proposal.tokens.tolist(), choices.tolist(), children(proposal)
    path, node = [], -1
    while True:
        node = next((kid for kid in below[node + 1] if drafted[kid] == wanted[node + 1]), -1)
        if node < 0:
            return path
        path.append(node)


def verify_sampled(proposal: Proposal, p: Tensor, generator: torch.Generator) -> tuple[list[int], int]:
    """The accepted path (node numbers, from the root down) and the token that follows it.

    p: the target's distributions [n+1, V], row 0 after the root, row j+1 after node j. Tokens that were not drawn
    (``proposal.q`` None) have q = 1: such a token is accepted with p(x), and on rejection x is struck from p.
    """
    tokens, q, below = proposal.tokens.tolist(), proposal.q, children(proposal)
    parent_of = {kid: node for node, kids in enumerate(below) for kid in kids}
    at = torch.tensor([parent_of[node] for node in range(len(tokens))], dtype=torch.int64, device=p.device)
    wanted = p[at, proposal.tokens].tolist()  # p(x) and q(x) of every x, in one transfer
    row_of = list(range(len(tokens))) if proposal.rows is None else proposal.rows
    drawn = [1.0] * len(tokens)
    if q is not None:
        drawn = q[torch.tensor(row_of, dtype=torch.int64, device=q.device), proposal.tokens].tolist()
    path, node = [], -1
    while True:
        left, accepted = p[node + 1], None
        kids = below[node + 1]
        draw = q[row_of[kids[0]]] if q is not None and kids else None
        for kid in kids:
            x, first = tokens[kid], kid == kids[0]
            want = wanted[kid] if first else float(left[x])
            drew = drawn[kid] if first or draw is None else float(draw[x])
            u = float(torch.rand((), generator=generator, dtype=torch.float64))
            if u * drew < want:  # u < p/q without a division; a NaN is rejected, and then `sample` raises
                accepted = kid
                break
            if draw is None:
                left = residual(left, torch.zeros_like(left).index_fill_(0, proposal.tokens[kid : kid + 1], 1.0))
            else:
                left, draw = residual(left, draw), strike(draw, x)
            left = left / left.sum()
        if accepted is None:
            return path, int(sample(left, generator))
        path.append(accepted)
        node = accepted


EPSILON, DELTA = 0.09, 0.3  # of typical acceptance: the reference code's defaults


def verify_typical(
    proposal: Proposal, p: Tensor, epsilon: float = EPSILON, delta: float = DELTA
) -> tuple[list[int], int]:
    """Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1), which is NOT lossless: the text is not
    distributed as the target's own. The accepted path (node numbers, from the root down) and the token after it.

    p as in ``verify_sampled``. A token x is accepted after its parent when p(x) > min(epsilon, delta exp(-H(p))); the
    longest accepted path is taken, of several the likeliest, and the token after it is the target's most probable one,
    as in the reference code. Nothing is drawn at random. Raises ValueError where p is not finite.
    """
    if not bool(p.isfinite().all()):
        raise ValueError("the target's distribution is not finite")
    parents = range(-1, proposal.tokens.numel() - 1) if proposal.parents is None else proposal.parents
    above = torch.tensor([parent + 1 for parent in parents], dtype=torch.int64, device=p.device)
    limit = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=epsilon)
    chance = p[above, proposal.tokens]
    accepted, log_chance = (chance > limit[above]).tolist(), chance.double().log().tolist()
    paths: list[tuple[list[int], float]] = [([], 0.0)]  # of the root, then of each node: its path and log likelihood
    best = paths[0]
    for node, parent in enumerate(parents):
        path, likelihood = paths[parent + 1]
        reached = accepted[node] and (parent < 0 or path[-1:] == [parent])
        paths.append(([*path, node], likelihood + log_chance[node]) if reached else ([], 0.0))
        if (len(paths[-1][0]), paths[-1][1]) > (len(best[0]), best[1]) and reached:
            best = paths[-1]
    path = best[0]
    return path, int(p[path[-1] + 1 if path else 0].argmax())


def strike(q: Tensor, token: int) -> Tensor:
    """q [V] without ``token``, renormalised: what the next sibling is drawn from. All zero where nothing is left."""
    left = q.clone()
    left[token] = 0
    return left / left.sum().clamp(min=torch.finfo(left.dtype).tiny)


def top_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy choices [n] of logits [n, V], and the gap [n] between the best and the second best logit: how far each
    choice is from a tie that another order of summation could flip."""
    best = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    return logits.argmax(-1), best[:, 0] - best[:, -1]
