"""``train.init=induction``: EAGLE-3's attention starts as an induction head (Olsson et al. 2022, arXiv 2209.11895).

What a text repeats is most of what a draft head can get right, and a layer at random takes a thousand steps to find
how: look where the token at hand stood before, and say what followed there. EAGLE-3's one layer has all that this
needs. Position s reads the target's features of token s, which tell that token, and the embedding of token s+1. So

- keys: a part of fc's output tells the token of the features. Which directions, say the canonical correlations
  (Hotelling 1936) between tokens' embeddings and their features, over a sample of the training rows;
- queries: the same directions of the embedding of the newest token, at every step of a draft;
- both in those parts of each attention head that RoPE hardly turns within the training window, so that distance
  does not matter;
- values and o_proj: a random projection of the token's lm_head row, whitened, and its way back.

The part of fc that the keys read writes where the lm_head reads least. Everything is trained on from there: where
queries, keys, values or o_proj have no part in this, one of the two factors keeps its random start (both at zero would
have no gradient, ever), which also parts the heads of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..types import Batch, Features

if TYPE_CHECKING:
    from .eagle3 import Eagle3

MATCH = 16.0  # nats by which a key of the same token is expected to outweigh another
COPY = 1.0  # size of what is copied, as a part of the residual's
TURN = 1.0  # radians that RoPE may turn a used part of a head within the window
SAMPLE = 20  # tokens for each number that fc reads: of fewer, covariances show what is not there
RIDGE = 1e-2  # of each variance, on the diagonal of a covariance


@dataclass
class Moments:
    """Sums over a sample, centred within documents: embeddings [H] against features [W] of the same token, float64."""

    count: float
    embeddings: Tensor
    cross: Tensor
    features: Tensor
    log_size: float


@torch.no_grad()
def moments(head: Eagle3, batches: Iterable[tuple[Batch, Features]], total: Callable[[Tensor], Tensor]) -> Moments:
    """total: adds a tensor up over the ranks, each of which has micro-batches of its own; on the CPU."""
    size, wide = head.shape.hidden_size, head.fc.in_features
    shapes = (size, size), (size, wide), (wide, wide)
    ee, ex, xx = (torch.zeros(shape, dtype=torch.float64, device=head.device) for shape in shapes)
    count = logs = 0.0
    for batch, features in batches:
        batch = batch.to(head.device)
        x = head.fc_input(features.layers.to(head.device, head.fc.weight.dtype)).float()
        rms = x.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        e = centred(head._embedding(batch.ids).float(), batch)
        x = centred(x / rms, batch)
        for sums, a, b in ((ee, e, e), (ex, e, x), (xx, x, x)):
            sums += a.T @ b
        count += len(batch)
        logs += float(rms.log().sum())
    count, logs = total(torch.tensor([count, logs], dtype=torch.float64)).tolist()
    return Moments(count, total(ee), total(ex), total(xx), logs)


def centred(x: Tensor, batch: Batch) -> Tensor:
    """[T, n] less its mean over each document: what tells tokens of one text apart, not texts."""
    lengths = (batch.cu[1:] - batch.cu[:-1]).unsqueeze(1)
    means = x.new_zeros(len(lengths), x.shape[1]).index_add_(0, batch.doc, x) / lengths
    return x - means[batch.doc]


def canonical(found: Moments, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """a [H, size], b [W, size], r [size]: e @ a and x @ b have variance 1, and correlate by r, descending, each with
    its own partner alone."""
    left, right = (_cholesky(m / found.count) for m in (found.embeddings, found.features))
    solve = torch.linalg.solve_triangular
    cross = solve(left, found.cross / found.count, upper=False)
    cross = solve(right, cross.T, upper=False).T
    squares, u = torch.linalg.eigh(cross @ cross.T)
    u, r = u.flip(1)[:, :size], squares.flip(0)[:size].clamp(min=1e-12).sqrt()
    a = solve(left.T, u, upper=True)
    b = solve(right.T, cross.T @ u / r, upper=True)
    return a, b, r


def _cholesky(covariance: Tensor) -> Tensor:
    """Changes ``covariance``: of a large target it is too large for copies (4.8 GB of 3 x 8,192 features)."""
    diagonal = covariance.diagonal()
    diagonal += RIDGE * diagonal + 1e-6 * diagonal.mean()
    return torch.linalg.cholesky(covariance)


def still(head: Eagle3, window: int) -> Tensor:
    """The dimensions of an attention head that RoPE turns by at most ``TURN`` over ``window`` positions."""
    dim = head.shape.head_dim
    cos, sin = head.rope(torch.tensor([0, 1], device=head.device))
    half = cos.shape[-1] // 2
    angle = torch.atan2(sin[1, 0, :half], cos[1, 0, :half]).abs().cpu() * window
    slow = (angle <= TURN).nonzero().squeeze(1)
    return torch.cat([slow, slow + half, torch.arange(2 * half, dim)])


@torch.no_grad()
def start(
    head: Eagle3, batches: Iterable[tuple[Batch, Features]], total: Callable[[Tensor], Tensor], window: int
) -> list[str]:
    """Change fc and the attention of ``head``, whose lm_head has the target's rows. window: tokens of the longest row.
    Returns lines for the log; raises ValueError where RoPE leaves no room."""
    attention, places = head.midlayer.self_attn, still(head, window)
    if len(places) == 0:
        raise ValueError(
            f"RoPE (theta {head.shape.rope.get('rope_theta')}) turns every dimension of an attention head by more than "
            f"{TURN:g} rad within the window of {window:,} tokens: no attention over such distances can be fitted; "
            "set train.init to random, or data.max_length lower"
        )
    found = moments(head, batches, total)
    if not bool(found.features.isfinite().all()):
        raise ValueError(
            "non-finite features in the first rows: nothing can be fitted to them; another target.dtype (bfloat16, "
            "float32) is the usual cure"
        )
    codes = min(head.shape.num_kv_heads * len(places), head.shape.hidden_size // 4)
    a, b, r = canonical(found, codes)
    rows = head.lm_head.weight.double().cpu()
    power, basis = torch.linalg.eigh(rows.T @ rows / len(rows))  # ascending: the lm_head reads the first ones least
    told = basis[:, :codes]  # the directions of fc's output in which the token is told
    q, k = _queries_and_keys(head, a, told, r, places)
    v, o = _values(head, rows, power.clamp(min=0), basis)
    matrices = {head.fc: _fc(head, found, b, told), attention.q_proj: q, attention.k_proj: k}
    for matrix, value in (matrices | {attention.v_proj: v, attention.o_proj: o}).items():
        matrix.weight.copy_(value)
    done = (
        f"attention copies what followed the token before: {codes} directions tell it, correlations {r[0]:.2f} to "
        f"{r[-1]:.2f} over {int(found.count):,} tokens"
    )
    wanted = head.induction_tokens
    few = f"few tokens for such a start ({wanted:,} would do): correlations look better than they are"
    return [done] if found.count >= wanted / 2 else [done, few]


def _fc(head: Eagle3, found: Moments, b: Tensor, told: Tensor) -> Tensor:
    """The token in the directions ``told``, each of variance 1; in the others, what is there, at that size, too."""
    rest = head.fc.weight.double().cpu()
    rest = rest - told @ (told.T @ rest)
    variance = ((rest @ (found.features / found.count)) * rest).sum(1).mean()
    return (rest / variance.sqrt() + told @ b.T) / torch.tensor(found.log_size / found.count).exp()


def _queries_and_keys(head: Eagle3, a: Tensor, told: Tensor, r: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dimensions ``places`` of each head, every group with its own part of the directions. Queries read
    the embedding, keys fc's output; a direction counts as in the log-likelihood of a match (Gaussian)."""
    attention, size, groups = head.midlayer.self_attn, head.shape.hidden_size, head.shape.num_kv_heads
    weight = r / (1 - r.square()).clamp(min=0.05)
    q, k = attention.q_proj.weight.clone(), torch.zeros_like(attention.k_proj.weight)
    queries, keys = _by_group(head, q, 0), _by_group(head, k, 0)
    for group in range(groups):
        pick = torch.arange(group, len(r), groups)
        sharp = (weight[pick] * (MATCH / head.scale / (weight[pick] * r[pick]).sum())).sqrt()
        at = places[: len(pick)]
        keys[group, 0][at, size:] = (told[:, pick] * sharp).T.to(k)
        queries[group][:, at] = 0
        queries[group][:, at, :size] = (a[:, pick] * sharp).T.to(q)
    return q, k


def _by_group(head: Eagle3, matrix: Tensor, at: int) -> Tensor:
    """A view of q, k, v or o whose dimension ``at`` (heads times their size) is [groups, heads of a group, size]."""
    return matrix.unflatten(at, (head.shape.num_kv_heads, -1, head.shape.head_dim))


def _values(head: Eagle3, rows: Tensor, power: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """From a token's embedding to its lm_head row, through as many directions as there are values: at random ones of
    the whitened rows. (The best-fitting ones would say how large rows are, and not tell them apart.)"""
    shape, attention = head.shape, head.midlayer.self_attn
    size = shape.hidden_size
    ids = torch.arange(shape.vocab_size) if head.draft_ids is None else head.draft_ids
    embedded = head._embedding(ids.to(head.device)).double().cpu()
    floor = power + RIDGE * power.mean()
    white = (basis / floor.sqrt()) @ basis.T
    way_back = (basis * (power / floor**1.5)) @ basis.T  # what the lm_head does not read is not written
    gram = embedded.T @ embedded
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    to_code = torch.linalg.solve(gram, embedded.T @ (rows @ white))
    kept = min(size, shape.num_kv_heads * shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    projection = torch.linalg.qr(torch.randn(size, kept, generator=generator, dtype=torch.float64))[0]
    into, back = to_code @ projection, projection.T @ way_back
    back = back * (COPY / (embedded @ into @ back).square().mean().sqrt())
    v, o = attention.v_proj.weight.clone(), torch.zeros_like(attention.o_proj.weight)
    v[:kept] = 0
    v[:kept, :size] = into.T.to(v)
    columns = _by_group(head, o, 1)
    for group, part in enumerate(back.split(shape.head_dim)):
        columns[:, group, :, : len(part)] = (part.T / columns.shape[2]).unsqueeze(1).to(o)
    return v, o
