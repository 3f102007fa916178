"""What ``advise`` says of an evaluation at any number of sequences.

The speed-up model's tables take k and interval from it, so that one load has one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .advise import RouteAdvice, advise, of_drafter
from .candidates import Candidate, CostBook, drafter_key, modelled, with_drafter
from .results import Evaluation
from .roofline import PLAIN, Plan, Setup
from .speedup import VerifyCost


@dataclass(frozen=True)
class Advisor:
    """cases, route: of an evaluation; drafter: a part of the label of those that may be chosen, None for all. The costs
    are as ``advise`` has them; setup: the target and the device, without a drafter."""

    cases: Sequence[Evaluation]
    route: str
    drafter: str | None = None
    cost_ratio: float | None = None
    verify: VerifyCost | None = None
    setup: Setup | None = None

    @property
    def book(self) -> CostBook:
        """The costs of one sequence at a time."""
        return CostBook(self.cases, self.cost_ratio, self.verify, self.setup, None)

    @property
    def among(self) -> list[Evaluation]:
        return of_drafter(self.cases, self.drafter)

    def at(self, sequences: int) -> RouteAdvice:
        """At the lowest temperature that was measured. Raises ValueError, see ``advise``."""
        made = advise(
            self.cases, self.cost_ratio, self.verify, sequences, self.setup, only=[self.route], drafter=self.drafter
        )
        return min(made.routes, key=lambda r: r.temperature)

    def chain(self, alone: RouteAdvice, case: Evaluation, k: int) -> Candidate | None:
        """Chains of k by the drafter of ``case``, one sequence at a time: as ``alone``, which is ``at(1)``, has them;
        where it has none, ``case`` cut to k. None where its costs are not known."""
        key = drafter_key(case)
        known = next((c for c in alone.fastest_first if (c.key, c.k, c.tree) == (key, k, None)), None)
        return known or modelled(case, self.route, k, self.book)

    def serving(self, chosen: Candidate | None) -> tuple[Setup, Plan]:
        """The setup with the drafter of ``chosen``, and what it drafts; None: no speculation."""
        if chosen is None:
            return self.setup, PLAIN
        return with_drafter(self.setup, next(c for c in self.cases if drafter_key(c) == chosen.key)), chosen.plan
