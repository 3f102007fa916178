"""The speed-up model for people: over k, over the batch size, and the GPUs of a load; console, JSON and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.table import Table

from .advise import RouteAdvice
from .advisor import Advisor
from .candidates import Candidate, drafter_key
from .curves import Series, html_list, html_table, line_plot, page
from .results import Evaluation, clean
from .roofline import LARGEST_BATCH, PLAIN, Capacity, Load, Plan, Setup, capacity, cheapest
from .speedup import FLAT, ChainPoint, VerifyCost, best, curve, tree_speedup

SHOWN_BATCHES = 10  # powers of two: 1 .. 512


@dataclass(frozen=True)
class BatchPoint:
    """One batch size. fixed: the speed-up of the plan that is best alone; best: the plan that is best here, with its
    speed-up and 95 % interval (NaN without an evaluation). Rates: tokens a second of all sequences. memory_gb: with the
    best plan; fits: into the usable memory."""

    batch: int
    plain_ms: float
    fixed: float
    best: str
    speedup: float
    plain_rate: float
    rate: float
    memory_gb: float
    fits: bool
    low: float = math.nan
    high: float = math.nan


@dataclass
class Report:
    """points: the chain over k; tree, tree_speedup: a tree at batch 1, where one was given. The rest needs the target's
    sizes and a device: batches, fixed (the plan that is best at batch 1) and stops_at (Setup.stops_paying_at, up to
    the batch ``searched``, 0 where not one sequence fits), and under a load the GPUs without and with speculation.
    advised: by the number of sequences, what ``advise`` says; ``best`` and ``fixed`` are its choice then."""

    title: str
    alphas: list[float]
    c: float | None
    points: list[ChainPoint]
    best: ChainPoint | None
    notes: list[str]
    tree: Plan | None = None
    tree_speedup: float | None = None
    batches: list[BatchPoint] = field(default_factory=list)
    fixed: str = ""
    stops_at: int | None = None
    searched: int = 0
    without: Capacity | None = None
    served: Capacity | None = None
    advised: dict[int, RouteAdvice] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        advised = {
            n: {"verdict": a.verdict, "strategy": a.chosen and a.chosen.to_dict(), "reasons": a.reasons}
            for n, a in self.advised.items()
        }
        return clean({**asdict(replace(self, advised={})), "advised": advised, "lines": self.lines()})

    # -- words -------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """What the tables say."""
        if self.advised:
            out = [
                f"{'one sequence at a time' if n == 1 else f'{n} at once'}: {line}"
                for n, a in sorted(self.advised.items())
                for line in a.reasons
            ]
        elif self.best is None:
            out = ["no k is faster than no speculation at these costs"]
        else:
            out = [f"best k: {self.best.k}, {self.best.speedup:.2f} times as fast ({self.best.tau:.2f} tokens a round)"]
        if self.tree is not None:
            out.append(f"{self.tree.name}, {self.tree.k} deep: {self.tree_speedup:.2f} times as fast at batch 1")
        if any(p.extrapolated for p in self.points):
            deepest = max(p.k for p in self.points if not p.extrapolated)
            out.append(f"beyond k {deepest} nothing was measured: the last alpha is held, which is usually too hopeful")
        if self.batches:
            if not self.searched:
                out.append(f"with {self.fixed} the weights and one sequence do not fit into memory: nothing to serve")
            elif self.fixed == PLAIN.name:
                out += [] if self.advised else ["by the roofline speculation pays at no batch size"]
            elif self.stops_at is None:
                out.append(f"{self.fixed} pays up to the largest batch that fits or was searched, {self.searched}")
            else:
                out.append(f"{self.fixed} stops paying from a batch of {self.stops_at} on: switch it off there")
        if self.without and self.served:
            out += [_capacity_line("without speculation", self.without), _capacity_line("with the best", self.served)]
            if self.without.gpus and self.served.gpus:
                saved = self.without.gpus - self.served.gpus
                out.append(
                    f"speculation saves {saved} of {self.without.gpus} GPUs" if saved else "it saves no GPU here"
                )
            elif self.served.gpus:
                out.append("only speculation meets this SLO on this device")
            else:
                out.append("this SLO cannot be met on this device, with or without speculation")
        return out

    # -- tables ------------------------------------------------------------------------------------------------

    @property
    def chain_head(self) -> list[str]:
        return ["k", "tokens/round", "round costs", "speed-up", *(["95 %"] if self.advised else [])]

    @property
    def batch_head(self) -> list[str]:
        first = ["batch", "plain ms/token", "fixed", "best", "speed-up", *(["95 %"] if self.advised else [])]
        return [*first, "plain tok/s", "best tok/s", "memory GB"]

    LOAD_HEAD = ("", "plan", "batch", "limited by", "ms/token", "tok/s", "GPUs")

    def chain_rows(self) -> list[list[str]]:
        return [
            [f"{p.k}{'*' if p.extrapolated else ''}", f"{p.tau:.2f}", f"{p.cost:.2f}", f"{p.speedup:.2f}x"]
            + ([_ends(p)] if self.advised else [])
            for p in self.points
        ]

    def batch_rows(self) -> list[list[str]]:
        return [
            [
                str(b.batch),
                f"{b.plain_ms:.2f}",
                f"{b.fixed:.2f}x",
                b.best,
                f"{b.speedup:.2f}x",
                *([_ends(b)] if self.advised else []),
                f"{b.plain_rate:,.0f}",
                f"{b.rate:,.0f}",
                f"{b.memory_gb:.1f}" + ("" if b.fits else "!"),
            ]
            for b in self.batches
        ]

    def load_rows(self) -> list[list[str]]:
        pairs = (("without", self.without), ("with", self.served))
        return [
            [
                name,
                c.plan.name,
                str(c.batch) if c.batch else "-",
                c.limit,
                _number(c.token_ms, ".1f"),
                _number(c.rate, ",.0f"),
                str(c.gpus) if c.gpus else "cannot",
            ]
            for name, c in pairs
            if c is not None
        ]

    def tables(self) -> list[Table]:
        """For a rich Console, each at most 80 columns wide."""
        caption = "round costs: in plain target steps" + ("; 95 %: over prompts" if self.advised else "")
        out = [_table(self.chain_head, self.chain_rows(), caption)]
        if self.batches:
            out.append(
                _table(self.batch_head, self.batch_rows(), f"fixed: {self.fixed} at every batch; !: does not fit")
            )
        if self.without:
            out.append(_table(self.LOAD_HEAD, self.load_rows(), "for one replica; GPUs: for the whole load"))
        return out

    def html(self) -> str:
        """One self-contained page."""
        chain = Series("chain of k", [(p.k, p.speedup) for p in self.points if not p.extrapolated])
        held = Series("last alpha held", [(p.k, p.speedup) for p in self.points if p.extrapolated])
        lines = [chain] + ([held] if held.points else [])
        plot = line_plot(lines, "speed-up over k", "k, drafted tokens a round", "speed-up", 1.0, reference=1.0)
        sections = [("What it says", html_list([*self.lines(), *self.notes]))]
        sections.append(("Speed-up over k", plot + html_table(self.chain_head, self.chain_rows())))
        if self.batches:
            pairs = [(self.fixed, "fixed"), ("the best k of each batch", "speedup")]
            made = [Series(name, [(b.batch, getattr(b, of)) for b in self.batches]) for name, of in pairs]
            plot = line_plot(
                made, "speed-up over the batch size", "batch, sequences", "speed-up", 1.0, reference=1.0, log_x=True
            )
            sections.append(("Speed-up over the batch size", plot + html_table(self.batch_head, self.batch_rows())))
        if self.without:
            sections.append(("GPUs for the load", html_table(self.LOAD_HEAD, self.load_rows())))
        return page(self.title, sections)


def report(
    title: str,
    alphas: Sequence[float],
    c: float | None = None,
    verify: VerifyCost = FLAT,
    k_max: int | None = None,
    hold_last: bool = False,
    tree: Plan | None = None,
    setup: Setup | None = None,
    load: Load | None = None,
    per_replica: int = 1,
    notes: Sequence[str] = (),
    taus: Sequence[float] = (),
    parallel: bool = False,
    advisor: Advisor | None = None,
    case: Evaluation | None = None,
) -> Report:
    """Everything that follows from acceptance and costs, and with a setup from batch size and load.

    c: of one draft step, None: the costs at batch 1 are the setup's. taus, parallel: see ``curve``. advisor: what was
    evaluated, and ``case`` of it is the chain whose k are shown: speed-ups, intervals and the choice are ``advise``'s
    then. Raises ValueError for values that cannot be (see speedup, roofline), for neither c nor setup, and for a load
    without a setup.
    """
    if setup is None and c is None:
        raise ValueError("what a draft step costs is not known: give --cost-ratio, or --device and --target")
    if setup is None and load is not None:
        raise ValueError("a load needs step times: give --device and --target")
    k_max = len(alphas) if k_max is None else k_max
    points = curve(alphas, 0.0 if c is None else c, verify, k_max, hold_last, taus, parallel)
    plans = [Plan(p.k, p.tau, p.k) for p in points]
    if c is None:
        points = [_on_device(setup, p, len(alphas)) for p in plans]
    if advisor is not None:
        alone = advisor.at(1)
        points = [_with_interval(p, advisor.chain(alone, case, p.k)) for p in points]
    out = Report(title, list(alphas), c, points, best(points), list(notes), tree)
    if advisor is not None:
        out.advised[1], chosen = alone, alone.chosen
        mine = chosen is not None and chosen.tree is None and chosen.key == drafter_key(case)
        out.best = next((p for p in points if mine and p.k == chosen.k), None)
    if tree is not None:
        plans.append(tree)
        by_costs = (
            None if c is None else tree_speedup(tree.tau, verify.at(tree.nodes + 1), (1 if parallel else tree.k) * c)
        )
        out.tree_speedup = setup.speedup(tree, 1) if by_costs is None else by_costs
    batches = {2**power for power in range(SHOWN_BATCHES)}
    if load is not None and load.users is not None and load.users <= LARGEST_BATCH:
        batches.add(math.ceil(load.users))
    if setup is not None and advisor is None:
        _add_batches(out, plans, setup, sorted(batches))
    elif setup is not None:
        _add_advised_batches(out, advisor, sorted(batches))
    if load is not None:
        out.without = capacity(setup, PLAIN, load, per_replica)
        out.served = cheapest(setup, [PLAIN, *plans], load, per_replica)
        if advisor is not None:
            _serve_as_advised(out, advisor, load, per_replica)
    return out


def _with_interval(p: ChainPoint, c: Candidate | None) -> ChainPoint:
    if c is None or p.extrapolated:
        return p
    return ChainPoint(p.k, c.tau, c.tau / c.speedup, c.speedup, False, c.low, c.high)


def _serve_as_advised(out: Report, advisor: Advisor, load: Load, per_replica: int) -> None:
    """Serve what is advised for as many sequences as a replica holds, unless that needs more GPUs."""
    if load.users is not None and load.users <= LARGEST_BATCH:
        out.advised[math.ceil(load.users)] = advisor.at(math.ceil(load.users))
    if out.served.gpus is None:
        return
    replicas, held = out.served.gpus // per_replica, out.served.batch
    if load.users is not None:
        held = min(held, math.ceil(load.users / replicas))
    advice = out.advised[held] = out.advised.get(held) or advisor.at(held)
    setup, plan = advisor.serving(advice.chosen)
    other = capacity(setup, plan, load, per_replica)
    if other.gpus is not None and other.gpus <= out.served.gpus:
        out.served = other
    else:
        out.notes.append(
            f"{plan.name} is advised for the {held} sequences of a replica, but cannot meet the SLO with as few GPUs: "
            f"{out.served.plan.name} is taken"
        )


def _on_device(setup: Setup, plan: Plan, measured: int) -> ChainPoint:
    cost = setup.round_seconds(plan, 1) / setup.round_seconds(PLAIN, 1)
    return ChainPoint(plan.k, plan.tau, cost, plan.tau / cost, plan.k > measured)


def _add_batches(out: Report, plans: Sequence[Plan], setup: Setup, batches: Sequence[int]) -> None:
    fixed = setup.best(plans, 1)
    out.searched = min(setup.largest_in_memory(fixed), LARGEST_BATCH)
    out.fixed, out.stops_at = fixed.name, 1 if fixed == PLAIN else setup.stops_paying_at(fixed, out.searched)
    room = setup.usable * setup.device.memory_gb * 1e9
    for batch in batches:
        top = setup.best(plans, batch)
        needed = setup.memory_bytes(top, batch)
        out.batches.append(
            BatchPoint(
                batch=batch,
                plain_ms=setup.token_seconds(PLAIN, batch) * 1e3,
                fixed=setup.speedup(fixed, batch),
                best=top.name,
                speedup=setup.speedup(top, batch),
                plain_rate=setup.rate(PLAIN, batch),
                rate=setup.rate(top, batch),
                memory_gb=needed / 1e9,
                fits=needed <= room,
            )
        )
    out.notes += memory_notes(setup, fixed)


def _add_advised_batches(out: Report, advisor: Advisor, batches: Sequence[int]) -> None:
    """As ``_add_batches``, where each batch has what ``advise`` says of it."""
    alone = out.advised[1].chosen
    setup, fixed = advisor.serving(alone)
    out.searched = min(setup.largest_in_memory(fixed), LARGEST_BATCH)
    out.fixed, out.stops_at = fixed.name, 1 if alone is None else setup.stops_paying_at(fixed, out.searched)
    room = setup.usable * setup.device.memory_gb * 1e9
    for batch in batches:
        advice = advisor.at(batch)
        chosen = advice.chosen
        served, top = advisor.serving(chosen)
        needed, plain = served.memory_bytes(top, batch), setup.rate(PLAIN, batch)
        gain = 1.0 if chosen is None else chosen.speedup
        own = next((c.speedup for c in advice.fastest_first if alone is not None and _same(c, alone)), 1.0)
        out.batches.append(
            BatchPoint(
                batch=batch,
                plain_ms=setup.token_seconds(PLAIN, batch) * 1e3,
                fixed=own,
                best=chosen.name if chosen is not None and alone is not None and chosen.key != alone.key else top.name,
                speedup=gain,
                plain_rate=plain,
                rate=plain * gain,
                memory_gb=needed / 1e9,
                fits=needed <= room,
                low=math.nan if chosen is None else chosen.low,
                high=math.nan if chosen is None else chosen.high,
            )
        )
    out.notes += memory_notes(setup, fixed)


def _same(a: Candidate, b: Candidate) -> bool:
    return (a.key, a.k, a.tree) == (b.key, b.k, b.tree)


def memory_notes(setup: Setup, plan: Plan) -> list[str]:
    """What speculation costs in memory, and what it does not save."""
    target, extra = setup.target, setup.fixed_bytes(plan) - setup.target.memory
    lines = [
        f"memory: weights {target.memory / 1e9:.2f} GB, the drafter's {extra / 1e9:.2f} GB more; KV cache "
        f"{target.kv_per_token / 1e3:.1f} kB a position, {setup.sequence_bytes(PLAIN) / 1e6:.1f} MB a sequence of "
        f"{setup.context:,}, {setup.sequence_bytes(plan) / 1e6:.1f} MB with {plan.name}",
        "KV cache: accepted tokens append as many positions as without speculation, so it does not shrink the cache; "
        "each round adds its drafted nodes until they are verified",
        f"at most {setup.largest_in_memory(PLAIN)} sequences fit without speculation, {setup.largest_in_memory(plan)} "
        "with it",
        *target.notes,
    ]
    if target.experts:
        e = target.experts
        lines.append(
            f"mixture of experts: about {target.active / 1e9:.2f} G parameters are active for a token (approximated); "
            f"a step of 1, 8, 64 tokens reads {', '.join(f'{e.touched(n):.0f}' for n in (1, 8, 64))} of {e.count} "
            "experts a layer in expectation, if routing is even"
        )
    return lines


def _capacity_line(name: str, c: Capacity) -> str:
    if c.gpus is None and c.limit == "memory":
        return f"{name}: the weights and one sequence do not fit into the memory of one replica"
    if c.gpus is None:
        return f"{name}: even one sequence alone takes {c.token_ms:.1f} ms a token ({c.plan.name})"
    how = f"{c.batch} sequences at once, {c.token_ms:.1f} ms a token, {c.rate:,.0f} tokens/s a replica"
    return f"{name} ({c.plan.name}): {how}; {c.gpus} GPU{'s' * (c.gpus != 1)}"


def _ends(p: ChainPoint | BatchPoint) -> str:
    return "-" if math.isnan(p.low) else f"{p.low:.2f}-{p.high:.2f}"


def _number(value: float, form: str) -> str:
    return "-" if value != value else f"{value:{form}}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", caption_style="dim", caption=caption)
    for name in head:
        out.add_column(name, justify="right", overflow="fold", no_wrap=name == "95 %")
    for row in rows:
        out.add_row(*row)
    return out
