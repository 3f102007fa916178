"""The losses of one chunk of draft logits against their labels: values, and gradients formed in place.

p is the target's distribution, q = softmax(z) the draft's, and a = sum_x min(p(x), q(x)) the acceptance of one
position: the probability that speculative sampling keeps a token drawn from q (Leviathan et al. 2023, arXiv
2211.17192, theorem 3.5). With a draft vocabulary, two forms of p are in use:

* the divergences (kl, reverse_kl) read p restricted to the draft vocabulary and renormalised: the forward KL of the
  whole p is infinite, as q cannot cover it, and the reverse KL of the whole differs from this one by a constant;
* acceptance (tv, lk, nla) reads the whole vocabulary's p at the draft vocabulary's entries, which sum to less than
  one. Verification knows no draft vocabulary, so this a is the true one, and 1 - a is the total variation distance
  over the whole vocabulary (q is zero elsewhere). Renormalised, p would reward mass that verification rejects.

The authors' own code for LK losses in SpecForge (``core/lk_loss.py``) makes the same choice; speculators
(``losses/eager.py``) renormalises throughout. Here the lambda of lk is taken at each position, as in speculators.

Gradients with respect to z, with m(x) = 1 where q(x) < p(x) and else 0. min has a kink at p = q: the subgradient in q
is taken as 0 there, and next to it an entry's gradient keeps its size up to the optimum, unlike that of the KLs.

    kl          q - p
    reverse_kl  q (log(q/p) - KL(q || p))
    tv          q (sum_x q m - m)                      (= -da/dz)
    nla         tv's, divided by a
    lk          lambda kl's + (1 - lambda) tv's, lambda = exp(-3 a) held constant

lk and nla: Samarin et al. 2026, "LK losses", arXiv 2602.23881.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .teacher import Teacher

LossName = Literal["kl", "reverse_kl", "tv", "lk", "nla"]
MEANING: dict[LossName, str] = {
    "kl": "soft cross entropy, KL(target || draft) up to a constant",
    "reverse_kl": "KL(draft || target)",
    "tv": "total variation, 1 - acceptance (weak gradients until the draft overlaps the target)",
    "lk": "w*KL + (1-w)*TV with w = exp(-3 * acceptance), position by position",
    "nla": "-log(acceptance)",
}
LK_DECAY = 3.0  # eta of the paper: its best hybrid
# a is never negative but can underflow: the smallest normal float32 keeps log a and 1/a finite. Since q m <= a, the
# gradient stays below 1 at any clamp; a larger one would silence rows that can still learn.
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class SoftRows:
    """The target at the rows of one chunk, over the draft vocabulary, each [n, Vd]. p: renormalised; log_p: its
    logarithm, from a log-softmax and so finite where p underflows (reverse_kl, lk); full: p as it stands in the whole
    vocabulary's distribution (acceptance)."""

    p: Tensor
    log_p: Tensor | None
    full: Tensor | None

    @classmethod
    def of(cls, teacher: Teacher, final: Tensor, lse: Tensor, loss: LossName, want_accept: bool) -> SoftRows:
        """final [n, H]; lse [n]: log-sum-exp over the whole vocabulary."""
        raw = teacher.logits(final)
        p = torch.softmax(raw, -1)
        log_p = torch.log_softmax(raw, -1) if loss in ("reverse_kl", "lk") else None
        full = raw.sub_(lse.unsqueeze(-1)).exp_() if want_accept or loss in ("tv", "lk", "nla") else None
        return cls(p, log_p, full)


def softmax_(z: Tensor, top: Tensor, best: Tensor) -> Tensor:
    """Turns z [..., Vd] into its softmax; returns the log-sum-exp [...]. top, best [...]: z's maximum and its place."""
    q = torch.softmax(z, -1, out=z)
    # log-sum-exp from the softmax itself: max q = exp(max z - lse)
    return top - q.gather(-1, best.unsqueeze(-1)).squeeze(-1).log()


def hard_loss_(z: Tensor, top: Tensor, best: Tensor, label: Tensor, gradient: bool) -> Tensor:
    """Cross entropy [S, n] of labels [S, n] int64. z [S, n, Vd] becomes its gradient if ``gradient``, else q."""
    label = label.unsqueeze(-1)
    score = z.gather(-1, label).squeeze(-1)
    lse = softmax_(z, top, best)
    if gradient:
        z.scatter_add_(-1, label, torch.full_like(label, -1, dtype=z.dtype))
    return lse - score


def soft_loss_(
    loss: LossName, z: Tensor, top: Tensor, best: Tensor, rows: SoftRows, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss [S, n] and the acceptance [S, n] (None without ``rows.full``). z [S, n, Vd], with its maximum ``top``
    and the maximum's place ``best`` [S, n], becomes the loss's gradient if ``gradient``, else q."""
    score = torch.linalg.vecdot(z, rows.p.expand_as(z)) if loss in ("kl", "lk") else None
    ratio = z - rows.log_p if loss == "reverse_kl" else None  # log(q/p) + lse
    lse = softmax_(z, top, best)
    q = z
    accept = None if rows.full is None else torch.minimum(rows.full.expand_as(q), q).sum(-1)
    if loss == "kl":
        if gradient:
            q -= rows.p
        return lse - score, accept
    if loss == "reverse_kl":
        mean = torch.linalg.vecdot(q, ratio)
        if gradient:
            q *= ratio.sub_(mean.unsqueeze(-1))
        return mean - lse, accept
    if loss == "lk":
        weight = torch.exp(-LK_DECAY * accept)
        entropy = -torch.linalg.vecdot(rows.p, rows.log_p)
        value = weight * (lse - score - entropy) + (1 - weight) * (1 - accept)
    else:
        weight = None
        value = -accept.clamp(min=SMALLEST).log() if loss == "nla" else 1 - accept
    if gradient:
        factor = (q < rows.full).to(q.dtype)
        factor = factor.neg_().add_(torch.linalg.vecdot(q, factor).neg_().unsqueeze(-1))
        if loss == "nla":
            factor /= accept.clamp(min=SMALLEST).unsqueeze(-1)
        if weight is not None:
            weight = weight.unsqueeze(-1)
            factor.mul_(1 - weight).add_(weight)
            q.mul_(factor).addcmul_(rows.p, weight, value=-1)
        else:
            q *= factor
    return value, accept
