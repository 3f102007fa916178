"""Which of several candidates to serve.

A candidate is worth serving where the lower end of its speed-up's interval is above 1. Of those the fastest
leads; where another one's interval overlaps with the leader's, the two cannot be told apart and the simpler is taken
(no weights before a head before a second model, a chain before a tree, fewer parameters, a smaller k). Among the k of
one drafter, prompts are compared one by one, which tells apart more than overlapping intervals do; there the larger k
must be faster by more than NEGLIGIBLE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .candidates import DRAFT_MODEL, HEAD, LOOKUP, Candidate

SIMPLEST_FIRST = {LOOKUP: 0, HEAD: 1, DRAFT_MODEL: 2}
NEGLIGIBLE = 0.02  # of the speed: not worth verifying more tokens for
RECOMMEND, INDIFFERENT, OFF = "recommend", "indifferent", "off"


def verdict(chosen: Candidate | None, found: Sequence[Candidate]) -> str:
    """RECOMMEND; INDIFFERENT where a gain was seen that cannot be told from none; OFF where there was none."""
    if chosen is not None:
        return RECOMMEND
    return INDIFFERENT if any((c.speedup if math.isnan(c.high) else c.high) > 1 for c in found) else OFF


def choose(found: Sequence[Candidate]) -> tuple[Candidate | None, list[str]]:
    """The recommendation among candidates of one route, and the reasons; None: no speculation."""
    if not found:
        return None, []
    top = max(found, key=lambda c: c.speedup)
    sure = [c for c in found if (c.speedup if math.isnan(c.low) else c.low) > 1]
    if not sure:
        if verdict(None, found) == OFF:
            return None, [f"every way of drafting is slower than none here; the best is {gain(top)}"]
        return None, [f"the best, {gain(top)}, cannot be told from no gain: leave speculation off, or measure more"]
    leader = max(sure, key=lambda c: c.speedup)
    drafters: dict[str, list[Candidate]] = {}
    for c in sure:
        drafters.setdefault(c.key, []).append(c)
    picks = [_shortest(group) for group in drafters.values()]
    tied = [c for c in picks if c.key == leader.key or _overlap(c, leader)]
    chosen = min(tied, key=_simplicity)
    reasons = [f"{gain(chosen)}; {chosen.tau:.2f} tokens a round"]
    if chosen is not leader:
        how = "compared prompt by prompt" if chosen.key == leader.key else "the intervals overlap"
        why = _why_simpler(chosen, leader)
        reasons.append(f"{gain(leader)} is not clearly faster ({how}), so the simpler is taken: {why}")
    return chosen, reasons


def _shortest(group: Sequence[Candidate]) -> Candidate:
    """Of one drafter's candidates: the smallest k that is not clearly slower than the fastest."""
    top = max(group, key=lambda c: c.speedup)
    return next(c for c in sorted(group, key=lambda c: c.k) if c is top or _not_slower(c, top))


def _not_slower(c: Candidate, top: Candidate) -> bool:
    if c.samples is None or top.samples is None:
        return c.speedup >= top.speedup
    if c.ids != top.ids:
        return _overlap(c, top)
    return (top.samples / c.samples).quantile(torch.tensor(0.025, dtype=torch.float64)).item() <= 1 + NEGLIGIBLE


def _overlap(a: Candidate, b: Candidate) -> bool:
    if math.isnan(a.low) or math.isnan(b.low):
        return False
    return a.low <= b.high and b.low <= a.high


def _simplicity(c: Candidate) -> tuple:
    return SIMPLEST_FIRST[c.family], c.tree is not None, c.parameters, c.nodes, -c.speedup


def _why_simpler(chosen: Candidate, other: Candidate) -> str:
    if chosen.family != other.family:
        return {LOOKUP: "it has no weights", HEAD: "it needs no second model"}.get(chosen.family, "")
    if (chosen.tree is None) != (other.tree is None):
        return "a chain needs no tree attention and fewer verified tokens"
    if chosen.parameters != other.parameters:
        return "it has fewer parameters"
    return "it verifies fewer tokens, which counts as soon as several sequences share the device"


def gain(c: Candidate) -> str:
    """ "the head, k 3: 1.20x (timed at batch 1, 1.10 to 1.31)"."""
    interval = ", too few prompts for an interval" if math.isnan(c.low) else f", {c.low:.2f} to {c.high:.2f}"
    return f"{c.name}: {c.speedup:.2f}x ({'timed at batch 1' if c.timed else 'computed'}{interval})"
