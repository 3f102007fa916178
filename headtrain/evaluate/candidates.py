"""Each way of drafting that an evaluation measured, with its speed-up and interval on one route.

Two sources. *Timed*: both decodings ran here, at batch 1. *Modelled*: the rounds say what was accepted, and the costs
of a draft step and of a verification (given, measured elsewhere, or from a roofline) say what a round takes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..decode.generate import Round
from .results import ALL, FEWEST, RESAMPLES, Evaluation, PromptResult
from .roofline import HUGE, PLAIN, Draft, Model, Plan, Setup
from .speedup import FLAT, LARGEST_COST, VerifyCost, require

LOOKUP, HEAD, DRAFT_MODEL = "lookup", "head", "draft model"
NOISE = 0.02  # of a speed: a clock may be that far off before it is said to disagree with the acceptance


@dataclass(frozen=True)
class Candidate:
    """One drafter with one k or tree on one route. draft_cost: of a round, in plain steps; break_even: what a
    verification may cost, in plain steps, before this loses; timed: whether the speed was measured here. speedup, low
    and high are tau at most, since a verification costs no less than a plain step. barred: why it is not to be
    recommended however fast, empty where it may be."""

    label: str
    family: str
    kind: str
    parameters: int
    k: int
    tree: str | None
    nodes: int
    prompts: int
    rounds: int
    tau: float
    speedup: float
    low: float
    high: float
    draft_cost: float
    break_even: float
    timed: bool
    key: str = field(repr=False)
    ids: tuple[str, ...] = field(repr=False)
    samples: Tensor | None = field(repr=False, compare=False)
    barred: str = ""

    @property
    def name(self) -> str:
        return f"{self.label}, {self.tree or f'k {self.k}'}"

    @property
    def mode(self) -> str:
        """As ``export.engines.MODES`` calls it."""
        return f"{self.family} tree" if self.tree else self.family

    @property
    def plan(self) -> Plan:
        return Plan(self.k, self.tau, max(self.nodes, self.k))

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.repr}


@dataclass(frozen=True)
class Costs:
    """In plain target steps: c of one draft step, verify(n) of a forward of n tokens; parallel: one draft step says
    all depths; source: in words."""

    c: float
    verify: VerifyCost
    source: str
    parallel: bool = False


def drafter_key(case: Evaluation) -> str:
    """The same for all cases of one drafter (its label, its settings, its weights) in one form, with one rule of
    acceptance."""
    form = [case.drafter, case.settings.get("tree") or None, case.lossless]
    return json.dumps(form, sort_keys=True, default=str)


def says_all_at_once(case: Evaluation) -> bool:
    """Whether one step of the drafter says every depth."""
    return bool(case.drafter.get("parallel", False))


def plain_step(case: Evaluation) -> float:
    """Seconds of one target step without drafts; NaN where nothing was timed."""
    tokens = sum(r.plain.tokens - 1 for r in case.results)
    seconds = sum(r.plain.decode for r in case.results)
    return seconds / tokens if tokens > 0 and seconds > 0 else math.nan


def measured_costs(cases: Sequence[Evaluation]) -> tuple[dict[str, float], VerifyCost]:
    """From the timed chains: c for each drafter (bookkeeping included), and verify(n) at each n = k + 1 that a drafter
    which always drafts was timed with: 1 at least, where noise says less."""
    drafts, verifies = defaultdict(list), defaultdict(list)
    for case in cases:
        if not case.timed or case.settings.get("tree"):
            continue
        step, rounds = plain_step(case), [x for r in case.results for x in r.rounds]
        steps = sum(_drafting(x, case.settings["k"], False, 1.0, says_all_at_once(case)) for x in rounds)
        if not steps or math.isnan(step):
            continue
        spent = sum(r.speculative.draft + r.speculative.other for r in case.results)
        drafts[drafter_key(case)].append(spent / steps / step)
        if case.drafter.get("family") != LOOKUP:
            seconds = sum(r.speculative.verify for r in case.results)
            verifies[case.settings["k"] + 1].append(seconds / len(rounds) / step)
    points = tuple((n, max(1.0, sum(v) / len(v))) for n, v in verifies.items() if sum(v) > 0)
    return {key: sum(v) / len(v) for key, v in drafts.items()}, VerifyCost(points)


class CostBook:
    """Which costs hold for a case: those that were given; else a roofline's; else those timed in other cases of the
    same evaluation; else the ratio of the parameters."""

    def __init__(
        self,
        cases: Sequence[Evaluation],
        cost_ratio: float | Mapping[str, float] | None,
        verify: VerifyCost | None,
        setup: Setup | None,
        concurrency: int | None,
    ) -> None:
        """Raises ValueError for ratios that cannot be, and a concurrency without anything to compute its costs from."""
        for ratio in cost_ratio.values() if isinstance(cost_ratio, Mapping) else [cost_ratio]:
            if ratio is not None:
                require(ratio, "cost ratio", high=LARGEST_COST)
        if concurrency is not None:
            require(concurrency, "concurrency", 1, high=HUGE)
            if concurrency > 1 and setup is None and verify is None:
                raise ValueError(
                    f"concurrency {concurrency}: what a verification costs there must be known: give a device and the "
                    "target's sizes (--device, --target), or the cost as measured (--verify-cost)"
                )
        self.ratio, self.given, self.setup, self.batch = cost_ratio, verify, setup, concurrency or 1
        self.drafts, self.verify = measured_costs(cases)

    @property
    def replaces_times(self) -> bool:
        """Whether the user asked about other conditions than those that were timed."""
        return not (self.ratio is None and self.given is None and self.setup is None)

    @property
    def reach(self) -> float:
        """The most tokens of a verification whose cost is known; infinite where it is computed or taken as 1."""
        verify = self.given if self.given is not None else self.verify
        known = self.given is not None or not self.replaces_times
        return verify.measured[-1][0] if known and verify.measured else math.inf

    def of(self, case: Evaluation, largest: int) -> Costs:
        """``largest``: the most tokens of a verification, at most ``reach``."""
        c, why = self._ratio(case)
        if self.given is not None:
            verify, what = self.given, "verification as given"
        elif self.setup is not None:
            _, verify = self.setup.costs(self.batch, largest)
            what = f"verification by a roofline of {self.setup.device.name}"
        elif self.verify.measured and not self.replaces_times:
            verify, what = self.verify, "verification as timed here (one plain step at least)"
        else:
            verify, what = FLAT, "a verification taken to cost one plain step"
        parallel = says_all_at_once(case)
        step = "one draft step for all depths" if parallel else "draft step"
        return Costs(c, verify, f"{step} {c:.3g} of a target step ({why}), {what}, batch {self.batch}", parallel)

    def _ratio(self, case: Evaluation) -> tuple[float, str]:
        label, family = case.drafter["label"], case.drafter["family"]
        if isinstance(self.ratio, Mapping) and label in self.ratio:
            return self.ratio[label], "given"
        if isinstance(self.ratio, float | int) and family != LOOKUP:
            return float(self.ratio), "given"
        if self.setup is not None:
            return self.serving(case).costs(self.batch, 1)[0], "roofline"
        if (c := self.drafts.get(drafter_key(case))) is not None:
            return c, "timed here"
        if family == LOOKUP:
            return 0.0, "a lookup costs next to nothing"
        mine, target = case.drafter.get("parameters"), case.target.get("parameters")
        if not mine or not target:
            raise ValueError(f"{label}: nothing says what a draft step costs; give --cost-ratio")
        return mine / target, "the ratio of the parameters, not measured"

    def serving(self, case: Evaluation) -> Setup:
        """The setup with this case's drafter."""
        return with_drafter(self.setup, case)

    def misfit(self, case: Evaluation, plan: Plan) -> str:
        """Why ``plan`` cannot be served at this batch on the device, empty where it can or no device was named."""
        if self.setup is None:
            return ""
        setup, what = self.serving(case), f"{self.batch} sequence{'s' * (self.batch > 1)} of {self.setup.context:,}"
        alone, fits = setup.largest_in_memory(PLAIN), setup.largest_in_memory(plan)
        if min(alone, fits) >= self.batch:
            return ""
        room = f"the {setup.usable * setup.device.memory_gb:,.1f} GB of {setup.device.name} that can be used"
        if alone < self.batch:
            return (
                f"the target ({setup.target.memory / 1e9:,.1f} GB of weights) with {what} does not fit into {room}, "
                f"with or without speculation: at most {alone} fit"
            )
        return (
            f"{case.drafter['label']} beside the target does not fit into {room} with {what}: at most {fits} fit, "
            f"{alone} without it"
        )


def with_drafter(setup: Setup, case: Evaluation) -> Setup:
    """``setup`` with this case's drafter. A head has one layer with the target's heads; a draft model's cache is taken
    to be as much smaller than the target's as its weights."""
    target, parameters = setup.target, case.drafter.get("parameters") or 0
    if not parameters:
        return replace(setup, draft=Draft())
    layers, cache = 1, None
    if case.drafter["family"] != HEAD:
        share = parameters / target.parameters
        layers = max(1, round(target.layers * share))
        cache = None if target.cache is None else target.cache.smaller(share)
    sizes = (parameters, layers, target.heads, target.kv_heads, target.head_dim)
    return replace(setup, draft=Draft(Model(*sizes, kv_bytes=target.kv_bytes, cache=cache), says_all_at_once(case)))


def largest_forward(case: Evaluation, k: int) -> int:
    """Tokens of the largest verification, when a chain is cut to k."""
    nodes = max((_nodes(x) for r in case.results for x in r.rounds), default=0)
    return 1 + (nodes if case.settings.get("tree") else min(nodes, k))


def candidates(case: Evaluation, route: str, ks: Sequence[int], book: CostBook) -> list[Candidate]:
    """Of one case on one route: a chain of each length in ``ks`` (its own, or shorter), or its tree. Modelled ones
    whose verification is larger than ``book.reach`` are left out."""
    results = _answers(case, route)
    if results and case.timed and not book.replaces_times and not math.isnan(plain_step(case)):
        return [_candidate(case, results, k, None, plain_step(case)) for k in ks]
    return [c for k in ks if (c := modelled(case, route, k, book)) is not None]


def modelled(case: Evaluation, route: str, k: int, book: CostBook) -> Candidate | None:
    """One of ``candidates`` by its costs, whether it was timed or not."""
    results = _answers(case, route)
    return _candidate(case, results, k, book, math.nan) if results and largest_forward(case, k) <= book.reach else None


def _answers(case: Evaluation, route: str) -> list[PromptResult]:
    return [r for r in case.results if route in (r.route, ALL) and r.rounds]


def _candidate(case: Evaluation, results: list[PromptResult], k: int, book: CostBook | None, step: float) -> Candidate:
    rounds = [x for r in results for x in r.rounds]
    tree = case.settings.get("tree") or None
    forward, count = largest_forward(case, k), len(rounds)
    committed = [sum(min(x.committed, k + 1) for x in r.rounds) for r in results]
    tau = sum(committed) / count
    if book is None:
        table = [[r.speculative.tokens - 1, r.speculative.decode, r.plain.tokens - 1, r.plain.decode] for r in results]
        draft = sum(r.speculative.draft + r.speculative.other for r in results) / count / step
    else:
        costs = book.of(case, forward)
        table = [_modelled(r.rounds, k, bool(tree), costs) for r in results]
        draft = sum(_drafting(x, k, bool(tree), costs.c, costs.parallel) for x in rounds) / count
    table = [[*row, n, len(r.rounds)] for row, n, r in zip(table, committed, results, strict=True)]
    measured, speedup, low, high, samples = _interval(torch.tensor(table, dtype=torch.float64))
    if book is not None:
        barred = book.misfit(case, Plan(k, tau, max(forward - 1, k)))
    else:
        barred = _clock_disagrees(measured, tau, draft)
    return Candidate(
        label=case.drafter["label"],
        family=case.drafter["family"],
        kind=case.drafter["kind"],
        parameters=case.drafter.get("parameters") or 0,
        k=k,
        tree=tree,
        nodes=forward - 1,
        prompts=len(results),
        rounds=count,
        tau=tau,
        speedup=speedup,
        low=low,
        high=high,
        draft_cost=draft,
        break_even=tau - draft,
        timed=book is None,
        key=drafter_key(case),
        ids=tuple(r.id for r in results),
        samples=samples,
        barred=barred,
    )


def _clock_disagrees(speedup: float, tau: float, draft: float) -> str:
    """Why a timed gain cannot be one: a round commits tau tokens and costs a plain step at least."""
    if speedup > 1 and tau - draft <= 1:
        return (
            f"timed at {speedup:.2f}x, but {tau:.2f} tokens a round do not pay for drafting ({draft:.2f} of a plain "
            "step) and a verification of one plain step: the clock disagrees with the acceptance; time it again"
        )
    if speedup > tau * (1 + NOISE):
        return (
            f"timed at {speedup:.2f}x, more than its {tau:.2f} tokens a round, though a verification costs a plain "
            "step at least: the clock disagrees with the acceptance; time it again"
        )
    return ""


def _nodes(x: Round) -> int:
    return max(x.nodes, x.drafted)


def _drafting(x: Round, k: int, tree: bool, c: float, parallel: bool = False) -> float:
    """A chain takes a step a token; a tree one a level, whichever of its nodes are good; a drafter that says all
    depths at once takes one."""
    steps = (k if x.nodes else 0) if tree else min(_nodes(x), k)
    return (min(steps, 1) if parallel else steps) * c


def _modelled(rounds: Sequence[Round], k: int, tree: bool, costs: Costs) -> list[float]:
    """Tokens and plain steps with drafts, and without (a plain step a token)."""
    tokens = sum(min(x.committed, k + 1) for x in rounds)
    fed = [_nodes(x) if tree else min(_nodes(x), k) for x in rounds]
    drafting = [_drafting(x, k, tree, costs.c, costs.parallel) for x in rounds]
    spent = sum(d + costs.verify.at(n + 1) for d, n in zip(drafting, fed, strict=True))
    return [tokens, spent, tokens, tokens]


def _interval(table: Tensor) -> tuple[float, float, float, float, Tensor | None]:
    """table [prompts, 6]: tokens and cost with drafts, tokens and cost without, committed tokens and rounds -> the
    pooled speed-up as it is, and at most the tokens a round; of the latter the 95 % interval over prompts drawn with
    replacement (NaN for fewer than FEWEST), and the resampled ones."""

    def ratio(sums: Tensor) -> Tensor:
        return sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]

    def capped(sums: Tensor) -> Tensor:
        return torch.minimum(ratio(sums), sums[..., 4] / sums[..., 5])

    measured, whole = ratio(table.sum(0)).item(), capped(table.sum(0)).item()
    if len(table) < FEWEST:
        return measured, whole, math.nan, math.nan, None
    # the same prompts are drawn for every candidate: two of them can be compared prompt by prompt
    drawn = torch.randint(len(table), (RESAMPLES, len(table)), generator=torch.Generator().manual_seed(0))
    samples = capped(table[drawn].sum(1))
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return measured, whole, low, high, samples
