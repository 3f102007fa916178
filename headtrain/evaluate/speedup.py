"""What speculation gains, from acceptance and costs alone (Leviathan et al., arXiv 2211.17192, theorem 3.8).

Words. alpha_j: P(drafted token j accepted | those before it were). tau: tokens a round, the target's own included.
c: cost of one draft step / cost of one plain target step. verify(n): cost of a target forward of n tokens / cost of a
plain one; 1 where the forward is bound by reading the weights. A round of k drafted tokens then costs k*c + verify(k+1)
plain steps, and the speed-up is tau divided by that.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST_K = 4096
LARGEST_COST = 1e6  # plain steps: beyond it a value is a slip of the keyboard, and far beyond floats overflow


def require(value: float, name: str, low: float = 0.0, above: bool = False, high: float = math.inf) -> float:
    """``value`` if it is finite, at least ``low`` (``above``: larger than it) and at most ``high``. Raises ValueError
    with the name."""
    if not math.isfinite(value) or value < low or value > high or (above and value == low):
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(
            f"{name} {value!r}: expected a finite number {'above' if above else 'of at least'} {low:g}{most}"
        )
    return value


def _check_alphas(alphas: Sequence[float]) -> None:
    if not alphas:
        raise ValueError("no alphas: expected one acceptance rate for each drafted token")
    for j, alpha in enumerate(alphas, 1):
        if not 0 <= alpha <= 1:  # NaN fails too
            raise ValueError(f"alpha_{j} {alpha!r}: expected a probability, 0 to 1")


def tokens_per_round(alphas: Sequence[float]) -> float:
    """tau = 1 + sum over k of alpha_1 * ... * alpha_k, for conditional acceptances."""
    _check_alphas(alphas)
    return 1 + sum(itertools.accumulate(alphas, lambda a, b: a * b))


def iid_tokens_per_round(alpha: float, k: int) -> float:
    """Closed form for the same alpha at every depth: (1 - alpha^(k+1)) / (1 - alpha); k + 1 at alpha 1."""
    _check_alphas([alpha])
    require(k, "k", 1)
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def alphas_to(alphas: Sequence[float], k: int, hold_last: bool = False) -> list[float]:
    """The first k alphas. Beyond the measured depths raises ValueError, or with ``hold_last`` repeats the deepest one
    (usually too hopeful: acceptance falls with depth)."""
    _check_alphas(alphas)
    require(k, "k", 1, high=LARGEST_K)
    if k > len(alphas) and not hold_last:
        raise ValueError(
            f"k {k}, but acceptance was measured to depth {len(alphas)}: draft at most {len(alphas)}, measure deeper, "
            "or hold the last alpha (--hold-last)"
        )
    return [*alphas[:k], *[alphas[-1]] * (k - len(alphas))]


@dataclass(frozen=True)
class VerifyCost:
    """verify(n) as measured: (n, T_target(n) / T_target(1)) for some n; straight lines in between. Nothing measured:
    a forward of any n costs one plain step. Raises ValueError for less than that, which no forward costs."""

    measured: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        points = dict(self.measured)
        if len(points) != len(self.measured):
            raise ValueError(f"verify cost {self.measured}: a number of tokens is given twice")
        for n, ratio in self.measured:
            require(n, "verify cost: tokens", 1)
            require(ratio, f"verify cost of {n} tokens", 1, high=LARGEST_COST)
            if n == 1 and ratio != 1:
                raise ValueError(f"verify cost of 1 token {ratio!r}: it is the unit, T(1) / T(1), so 1; leave it out")
        if self.measured:
            points.setdefault(1, 1.0)
            object.__setattr__(self, "measured", tuple(sorted(points.items())))

    @classmethod
    def parse(cls, text: str) -> VerifyCost:
        """``"6:1.3,16:2"``: 6 tokens cost 1.3 plain steps, 16 cost 2. Raises ValueError."""
        try:
            pairs = [part.split(":") for part in text.split(",")]
            points = tuple((int(n), float(ratio)) for n, ratio in pairs)
        except ValueError:
            raise ValueError(f"verify cost {text!r}: expected tokens:cost pairs, for example 6:1.3,16:2") from None
        return cls(points)

    def at(self, n: int) -> float:
        """Raises ValueError beyond the largest n that was measured."""
        if not self.measured:
            return 1.0
        largest = self.measured[-1][0]
        if n > largest:
            raise ValueError(f"the verify cost was measured to {largest} tokens, {n} are needed: measure further")
        i = bisect_left(self.measured, n, key=lambda point: point[0])
        (n1, r1) = self.measured[i]
        if n1 == n:
            return r1
        (n0, r0) = self.measured[i - 1]
        return r0 + (r1 - r0) * (n - n0) / (n1 - n0)


FLAT = VerifyCost()


@dataclass(frozen=True)
class ChainPoint:
    """One k of a curve. cost: of a round, in plain steps. extrapolated: k lies beyond the measured depths. low, high:
    the speed-up's 95 % interval over prompts, NaN where no prompts are known."""

    k: int
    tau: float
    cost: float
    speedup: float
    extrapolated: bool = False
    low: float = math.nan
    high: float = math.nan


def chain_point(alphas: Sequence[float], k: int, c: float, verify: VerifyCost = FLAT, hold_last: bool = False):
    """The ChainPoint of k drafted tokens (see ``curve``)."""
    return curve(alphas, c, verify, k, hold_last)[-1]


def curve(
    alphas: Sequence[float],
    c: float,
    verify: VerifyCost = FLAT,
    k_max: int | None = None,
    hold_last: bool = False,
    taus: Sequence[float] = (),
    parallel: bool = False,
) -> list[ChainPoint]:
    """k = 1 .. k_max (None: the measured depths).

    taus: tokens a round as measured with k = 1, 2, ..., instead of those that follow from the alphas (an accepted end
    of text ends a round without a token of the target's own). parallel: one draft step says all k tokens. Raises
    ValueError for alphas outside 0..1, k < 1 or above LARGEST_K, c < 0, and beyond what was measured (see
    ``alphas_to``, ``VerifyCost.at``).
    """
    _check_alphas(alphas)
    require(c, "cost ratio", high=LARGEST_COST)
    wanted = alphas_to(alphas, len(alphas) if k_max is None else k_max, hold_last)
    points, tau, product = [], 1.0, 1.0
    for k, alpha in enumerate(wanted, 1):
        product *= alpha
        tau = taus[k - 1] if k <= len(taus) else tau + product
        cost = (1 if parallel else k) * c + verify.at(k + 1)
        points.append(ChainPoint(k, tau, cost, tau / cost, k > len(alphas)))
    return points


def best(points: Sequence[ChainPoint]) -> ChainPoint | None:
    """The fastest, the smaller k among equals; None where every k is slower than no speculation (or just as fast)."""
    top = max(points, key=lambda p: (p.speedup, -p.k), default=None)
    return top if top is not None and top.speedup > 1 else None


def tree_speedup(tau: float, verify: float, draft: float) -> float:
    """tau * T(1) / (T_verify(N) + T_draft), both times in plain steps. Raises ValueError for tau < 1, costs that are
    not finite and positive (draft may be 0)."""
    require(tau, "tau", 1)
    return tau / (require(verify, "verification", above=True) + require(draft, "drafting"))


def verify_break_even(tau: float, draft: float) -> float:
    """The cost of a verification, in plain steps, above which a round of ``tau`` tokens loses: tau - draft."""
    return require(tau, "tau", 1) - require(draft, "drafting")
