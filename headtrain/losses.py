"""Chunked vocabulary losses: lm_head product, softmax, loss, metrics and gradients, a chunk of positions at a time.

No [positions, vocabulary] tensor is kept, in either direction. The gradient of the logits is formed in the forward
pass, while the chunk is in cache, and turned at once into gradients of the hidden states and of the lm_head; the
backward pass only scales them. (Sums come back, never means: the caller divides by the global count.)

Layout: everything is indexed by *teacher row* t, not by where the draft started. The draft of depth s+1 that starts
at supervised row r is judged against teacher row t = r + s (row t holds the target's distribution for the token
after next of supervised position t). One chunk of teacher rows therefore serves every depth, and each teacher row is
computed once. ``align`` brings hidden states into this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .divergences import MEANING, LossName, SoftRows, hard_loss_, soft_loss_
from .teacher import Teacher
from .types import LossSums

CHUNK_LOGITS = 1 << 22  # logits of one chunk over all depths, 16 MB in fp32: large enough for the matrix products


@dataclass
class SoftTargets:
    """The target's distribution as labels. final [N, H]: the teacher's features; teacher: restricted to the draft
    vocabulary; greedy [N] int64: the target's argmax over its whole vocabulary, as a *draft* index, -1 where the
    draft vocabulary lacks it; lse [N] float32: log-sum-exp over the whole vocabulary."""

    final: Tensor
    teacher: Teacher
    greedy: Tensor
    lse: Tensor
    hard: bool = False

    def trains(self) -> Tensor:
        """[N] bool: rows whose greedy token can be drafted; the others are excluded from the loss, never from the
        metrics (EAGLE-3)."""
        return self.greedy >= 0


@dataclass
class HardTargets:
    """The token that followed as the label. labels [N] int64 draft indices, -1 outside the draft vocabulary;
    greedy [N] as in SoftTargets, for the metrics."""

    labels: Tensor
    greedy: Tensor
    hard: bool = True

    def trains(self) -> Tensor:
        return self.labels >= 0


def align(hidden: Sequence[Tensor], depth: int) -> Tensor:
    """hidden[s] [N - s, H]: the states of depth s+1 by starting row -> [depth, N, H] by teacher row, zeros in front.
    Fewer than ``depth`` entries (N < depth) leave the deeper rows zero."""
    rows = hidden[0].shape[0]
    filled = [*hidden, *(hidden[0][:0],) * (depth - len(hidden))]
    return torch.stack([torch.nn.functional.pad(h, (0, 0, rows - h.shape[0], 0)) for h in filled])


def align_pairs(pairs: Tensor, start: Tensor) -> Tensor:
    """``shift.pair_mask`` [S, T] at the supervised positions ``start`` [N] -> [S, N] bool by teacher row."""
    rows = start.numel()
    out = pairs.new_zeros(pairs.shape[0], rows)
    for s in range(min(pairs.shape[0], rows)):
        out[s, s:] = pairs[s, start[: rows - s]]
    return out


def chunk_rows(depths: int, vocab: int) -> int:
    """Teacher rows of one chunk, for logits of ``depths`` depths over a draft vocabulary of ``vocab``."""
    return max(16, CHUNK_LOGITS // (depths * vocab))


def chunk_values(depths: int, vocab: int) -> int:
    """At most so many numbers (float32) live while a chunk is computed, over the losses of ``divergences``: of the size
    of all depths' logits the logits themselves and three of their loss; of the size of one depth's the target's
    probabilities, their logarithm, and as they stand in the whole vocabulary."""
    return chunk_rows(depths, vocab) * vocab * (4 * depths + 3)


class _Fused(torch.autograd.Function):
    """forward(hidden [S, N, H], pairs [S, N], depth_weight [S], targets, name of the loss, want_accept, *weights):
    one weight [Vd, H] shared by all depths, or one for each. Returns total, loss sums [S], hits [S, N] bool,
    acceptance sums [S]."""

    @staticmethod
    def forward(ctx, hidden, pairs, depth_weight, targets, name, want_accept, *weights):
        depths, rows, size = hidden.shape
        device_type = hidden.device.type
        autocast = torch.is_autocast_enabled(device_type)
        compute = torch.get_autocast_dtype(device_type) if autocast else hidden.dtype
        with torch.autocast(device_type, enabled=False):
            cast = [w.to(compute) for w in weights]
            need_h, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[6:])
            d_hidden = torch.zeros_like(hidden) if need_h else None
            d_weights = [torch.zeros_like(w, dtype=torch.float32) for w in weights] if need_w else []
            hits = torch.zeros(depths, rows, dtype=torch.bool, device=hidden.device)
            loss = torch.zeros(depths, dtype=torch.float64, device=hidden.device)
            accept = torch.zeros(depths, dtype=torch.float64, device=hidden.device)
            row_weight = (pairs & targets.trains()).float()
            chunk = chunk_rows(depths, weights[0].shape[0])
            # one matrix product for all depths where they share their lm_head
            groups = [(0, depths)] if len(weights) == 1 else [(s, s + 1) for s in range(depths)]
            for begin in range(0, rows, chunk):
                span = slice(begin, min(begin + chunk, rows))
                soft = None
                if not targets.hard:
                    final, lse = targets.final[span], targets.lse[span]
                    soft = SoftRows.of(targets.teacher, final, lse, name, want_accept)
                for (first, last), w, index in zip(groups, cast, range(len(cast)), strict=True):
                    h = hidden[first:last, span].reshape(-1, size).to(compute)
                    z = (h @ w.t()).float().unflatten(0, (last - first, -1))
                    top, best = z.max(-1)
                    hits[first:last, span] = best == targets.greedy[span]
                    if soft is None:
                        label = targets.labels[span].clamp(min=0).expand(last - first, -1)
                        value, kept = hard_loss_(z, top, best, label, need_h or need_w), None
                    else:
                        value, kept = soft_loss_(name, z, top, best, soft, need_h or need_w)
                    weight = row_weight[first:last, span]
                    loss[first:last] += (value * weight).double().sum(-1)
                    if kept is not None:
                        accept[first:last] += (kept * pairs[first:last, span]).double().sum(-1)
                    if not (need_h or need_w):
                        continue
                    scale = (weight * depth_weight[first:last, None]).unsqueeze(-1)
                    g = z.mul_(scale).flatten(0, 1).to(compute)
                    if need_h:
                        d_hidden[first:last, span] = (g @ w).unflatten(0, (last - first, -1)).to(hidden.dtype)
                    if need_w:
                        target = d_weights[index]
                        if compute == torch.float32:
                            target.addmm_(g.t(), h)
                        else:
                            target += g.t() @ h
        ctx.save_for_backward(d_hidden, *(d.to(w.dtype) for d, w in zip(d_weights, weights, strict=False)))
        ctx.weights = len(weights)
        total = (loss * depth_weight).sum().float()
        ctx.mark_non_differentiable(hits)
        return total, loss.float(), hits, accept.float()

    @staticmethod
    def backward(ctx, grad_total, *_):
        d_hidden, *d_weights = ctx.saved_tensors
        out_h = None if d_hidden is None else d_hidden * grad_total.to(d_hidden.dtype)
        out_w = [d * grad_total.to(d.dtype) for d in d_weights] or [None] * ctx.weights
        return out_h, None, None, None, None, None, *out_w


def vocab_loss(
    hidden: Tensor,
    weights: Sequence[Tensor],
    targets: SoftTargets | HardTargets,
    pairs: Tensor,
    depth_weight: Tensor,
    want_accept: bool = True,
    loss: LossName = "kl",
) -> LossSums:
    """Loss of drafts against the target, with greedy and expected acceptance.

    hidden [S, N, H] and pairs [S, N] bool in teacher-row layout (see the module's text); weights: one lm_head
    [Vd, H] for all depths, or S of them; depth_weight [S]. With SoftTargets the labels are the target's distribution
    over the draft vocabulary (EAGLE-3) and ``loss`` is one of ``divergences``; with HardTargets the label is the token
    that followed (Medusa-1) and the loss is cross entropy: ValueError for any other. ``accept`` is NaN where it was
    not asked for, or the target's distribution is not known (hard labels).
    """
    if loss not in MEANING:
        raise ValueError(f"no loss named {loss!r}; known: {', '.join(MEANING)}")
    if targets.hard and loss != "kl":
        raise ValueError(f"loss {loss!r} needs the target's distribution, the labels are hard; use soft ones, or kl")
    depths, rows, _ = hidden.shape
    depth_weight = depth_weight.to(hidden.device, torch.float32)
    want_accept = want_accept and not targets.hard
    total, sums, hits, accept = _Fused.apply(hidden, pairs, depth_weight, targets, loss, want_accept, *weights)
    with torch.no_grad():
        if not want_accept:
            accept = torch.full_like(accept, float("nan"))
        # from teacher rows back to starting rows, to follow one draft through its depths
        start_hits, start_pairs = torch.zeros_like(hits), torch.zeros_like(pairs)
        for s in range(min(depths, rows)):
            start_hits[s, : rows - s], start_pairs[s, : rows - s] = hits[s, s:], pairs[s, s:]
        alive = torch.ones(rows, dtype=torch.bool, device=hits.device)
        chain_hits, chain_pairs = [], []
        for s in range(depths):
            offered = alive & start_pairs[s]
            alive = offered & start_hits[s]
            chain_pairs.append(offered.sum())
            chain_hits.append(alive.sum())
        count = pairs[0].sum() if depths else total.new_zeros(())
        return_hits = (hits & pairs).sum(-1)
        trained = (pairs & targets.trains()).sum(-1)
    return LossSums(
        total=total,
        count=count.float(),
        loss=sums.detach(),
        loss_count=trained.float(),
        hits=return_hits.float(),
        accept=accept.detach(),
        pairs=pairs.sum(-1).float(),
        chain_hits=torch.stack(chain_hits).float(),
        chain_pairs=torch.stack(chain_pairs).float(),
    )


def zero_sums(depths: int, parameters: Sequence[Tensor]) -> LossSums:
    """An all-masked batch: a finite zero that still depends on every parameter, so that distributed backward passes
    find the same gradients on every rank."""
    total = sum((p.sum() * 0.0 for p in parameters), torch.zeros((), device=parameters[0].device))
    return LossSums(total, *(torch.zeros((), device=total.device),), *(torch.zeros(depths, device=total.device),) * 7)
