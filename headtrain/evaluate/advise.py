"""Which way of drafting, for which route, and why: from evaluated cases to a recommendation in plain words.

The rule by which one is chosen is in ``choice``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..export.engines import MODES, Mode, shipping
from ..heads.catalog import HEADS
from .candidates import (
    DRAFT_MODEL,
    HEAD,
    LOOKUP,
    Candidate,
    CostBook,
    candidates,
    drafter_key,
    largest_forward,
)
from .choice import OFF, SIMPLEST_FIRST, choose, gain, verdict
from .results import ALL, Evaluation, clean
from .roofline import LARGEST_BATCH, Setup
from .speedup import VerifyCost

FEW_PROMPTS, FEW_ROUNDS = 5, 200
SMALLEST, LARGEST = 10, 5  # a draft model is usually 1/10 to 1/5 of its target
OPEN_ENDED = ("chat", "open", "creative", "writing", "story", "roleplay", "brainstorm")
# A gap between the best two logits below this is a tie that rounding decides: logits of about 30 in each type
TIES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}


@dataclass(frozen=True)
class RouteAdvice:
    """verdict: see ``choice.verdict``. chosen None: no speculation. best: the chosen one, else the fastest that could
    be. off_from_batch: the batch from which it never pays (None: unknown, or it pays as far as was searched). engines:
    (title, versions, note) of those that ship it. fastest_first: every candidate."""

    route: str
    temperature: float
    verdict: str
    chosen: Candidate | None
    best: Candidate | None
    off_from_batch: int | None
    reasons: list[str]
    warnings: list[str]
    engines: list[Mode]
    fastest_first: list[Candidate]


@dataclass
class Advice:
    """routes: one for each route and temperature; refused: cases and modes that are not recommended, and why;
    warnings: misfits of a drafter as a whole; assumptions: where the numbers come from."""

    routes: list[RouteAdvice] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON; numbers that were not measured are null."""
        routes = [
            {
                "route": r.route,
                "temperature": r.temperature,
                "verdict": r.verdict,
                "strategy": r.chosen.to_dict() if r.chosen else None,
                "off_from_batch": r.off_from_batch,
                "reasons": r.reasons,
                "warnings": r.warnings,
                "engines": [{"engine": m.title, "versions": m.versions, "note": m.note} for m in r.engines],
                "candidates": [c.to_dict() for c in r.fastest_first],
            }
            for r in self.routes
        ]
        more = {"refused": self.refused, "warnings": self.warnings, "assumptions": self.assumptions}
        return clean({"routes": routes, **more})


def advise(
    cases: Sequence[Evaluation],
    cost_ratio: float | Mapping[str, float] | None = None,
    verify_cost: VerifyCost | None = None,
    concurrency: int | None = None,
    setup: Setup | None = None,
    engines: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    drafter: str | None = None,
) -> Advice:
    """A strategy for each route (of ``only``, where it is given), or none; by a drafter whose label has the part
    ``drafter``, where that is given.

    cost_ratio: a draft step / a plain target step, for all drafters but lookups, or by their labels. verify_cost: of a
    target forward of n tokens. concurrency: sequences at the same time. setup: the target's sizes and its device, for a
    roofline. With none of these, speeds that were timed here (batch 1) are used as they are, and others follow from
    acceptance and the timed costs. engines: those that may be used; None: all known. Raises ValueError for no cases,
    impossible costs, unknown engines, routes or drafters, and a concurrency without costs.
    """
    if not cases:
        raise ValueError("no evaluated cases: run `headtrain eval` first")
    known = {m.engine for m in MODES}
    for case in cases:
        if missing := [name for name in ("kind", "family", "label") if name not in case.drafter]:
            raise ValueError(
                f"an evaluation whose drafter has no {', '.join(missing)}: an older headtrain wrote it; evaluate again"
            )
        if case.drafter["family"] not in SIMPLEST_FIRST:
            found, expected = case.drafter["family"], ", ".join(SIMPLEST_FIRST)
            raise ValueError(f"{case.drafter['label']}: family {found!r}; expected one of {expected}")
    if unknown := [name for name in engines or () if name not in known]:
        raise ValueError(f"no engine named {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}")
    routes = _routes(cases, only)
    book = CostBook(cases, cost_ratio, verify_cost, setup, concurrency)
    cases = of_drafter(cases, drafter)
    out = Advice()
    usable = []
    for case in cases:
        if why := parted(case):
            out.refused.append(why)
        else:
            usable.append(case)
            out.warnings += [line for line in misfits(case) if line not in out.warnings]
    out.warnings += twice(usable)
    for temperature in sorted({case.settings["temperature"] for case in cases}):
        measured = [case for case in cases if case.settings["temperature"] == temperature]
        group = [case for case in usable if case.settings["temperature"] == temperature]
        for route in routes:
            found = [c for case in group for c in candidates(case, route, _lengths(case, group, book), book)]
            if found:
                out.routes.append(_route(route, temperature, found, book, group, engines, out))
            elif route == ALL or any(route in case.routes for case in measured):
                reason = _nothing_left(route, group, book)
                out.routes.append(RouteAdvice(route, temperature, OFF, None, None, None, [reason], [], [], []))
    out.assumptions += _assumptions(usable, book)
    return out


def of_drafter(cases: Sequence[Evaluation], part: str | None) -> list[Evaluation]:
    """Those whose drafter's label has this part; all for None. Raises ValueError with what there is."""
    named = [c for c in cases if (part or "").lower() in c.drafter["label"].lower()]
    if not named:
        labels = ", ".join(dict.fromkeys(c.drafter["label"] for c in cases))
        raise ValueError(f"no drafter {part!r} in this evaluation; it has: {labels}")
    return named


def _routes(cases: Sequence[Evaluation], only: Sequence[str] | None) -> list[str]:
    """Each route, and ALL where there are several. Raises ValueError for one that was not measured."""
    single = list(dict.fromkeys(route for case in cases for route in case.routes))
    known = single if len(single) == 1 else [*single, ALL]
    asked = known if only is None else [single[0] if name == ALL and len(single) == 1 else name for name in only]
    if missing := [name for name in asked if name not in known]:
        raise ValueError(f"no route {', '.join(map(repr, missing))} in this evaluation; it has: {', '.join(known)}")
    return list(dict.fromkeys(asked))


def _nothing_left(route: str, group: Sequence[Evaluation], book: CostBook) -> str:
    """Why no way of drafting is left to choose from."""
    if not group:
        return "every way of drafting that was measured is refused, for the reasons given with each"
    if not any(r.rounds for case in group for r in case.results if route in (r.route, ALL)):
        return "nothing was decoded past the first token with a way of drafting that is not refused"
    return f"verification costs are known to {book.reach} tokens, and every draft that was measured needs more"


def parted(case: Evaluation) -> str:
    """Why a case is not to be recommended: acceptance that is not lossless, and greedy texts that were not the
    target's own; empty where they were, up to ties that rounding decided."""
    if not case.lossless:
        return (
            f"{_title(case)}: {case.settings['acceptance']} acceptance, whose text is not distributed as the target's: "
            "left out, since only lossless decoding is recommended"
        )
    bound = TIES.get(case.target.get("dtype", "float32"), TIES["float32"])
    faults = [r for r in case.differences if r.difference.gap > bound]
    if not faults or case.settings["temperature"] > 0:
        return ""
    first = faults[0]
    return (
        f"{_title(case)}: {len(faults)} of {len(case.results)} greedy texts were not the target's own ({first.id} at "
        f"token {first.difference.position}, the best two logits {first.difference.gap:.2g} apart): this decoding is "
        "not lossless, so it is not recommended"
    )


def twice(cases: Sequence[Evaluation]) -> list[str]:
    """Cases that nothing in the record tells apart: one measured again, or two drafters of an older record."""
    counts = Counter((drafter_key(c), c.settings["k"], c.settings["temperature"], c.timed, _title(c)) for c in cases)
    return [
        f"{title}: measured {n} times, or {n} drafters that the record cannot tell apart; evaluate again to be sure"
        for (*_, title), n in counts.items()
        if n > 1
    ]


def misfits(case: Evaluation) -> list[str]:
    """Known reasons why a drafter disappoints."""
    lines, label = [], case.drafter["label"]
    ties = len(case.differences)
    if ties:
        lines.append(f"{_title(case)}: {ties} greedy texts part at a tie of the best two logits (rounding, no fault)")
    if case.drafter["family"] != DRAFT_MODEL:
        return lines
    for what, name in (("family", "model_type"), ("tokenizer", "tokenizer")):
        theirs, own = case.drafter.get(name), case.target.get(name)
        if theirs and own and theirs != own:
            lines.append(
                f"{label} is of another {what} ({theirs}; the target's is {own}): tokens it drafts may mean something "
                "else or never be the target's choice"
            )
    size, target = case.drafter.get("parameters"), case.target.get("parameters")
    if size and target and target / size > SMALLEST:
        lines.append(
            f"{label} is {target / size:.0f} times smaller than its target: more than about {SMALLEST} times usually "
            "accepts too little"
        )
    if size and target and target / size < LARGEST:
        lines.append(
            f"{label} is only {target / size:.1f} times smaller than its target: less than about {LARGEST} times "
            "usually costs more than it saves"
        )
    return lines


def _route(
    route: str,
    temperature: float,
    found: list[Candidate],
    book: CostBook,
    group: Sequence[Evaluation],
    engines: Sequence[str] | None,
    out: Advice,
) -> RouteAdvice:
    ways = {c.key: _ships(c, engines) for c in found}
    allowed = [c for c in found if not c.barred]
    served = [c for c in allowed if ways[c.key]]
    chosen, reasons = choose(served)
    wished, _ = choose(allowed)
    barred = _barred(found)
    if wished is not None and not ways[wished.key]:
        among = "of yours" if engines else "that is known"
        reasons.append(f"{gain(wished)} is left out: no engine {among} ships {wished.mode} drafting of this kind")
        line = f"{route}: {wished.name} is promised for no engine; only headtrain's own decoding has it"
        out.refused.append(line)
    if not reasons and not barred:
        reasons.append(f"no engine {'of yours' if engines else 'that is known'} ships a way of drafting measured here")
    warnings, off = [], None
    if chosen is not None:
        if chosen.prompts < FEW_PROMPTS or chosen.rounds < FEW_ROUNDS:
            warnings.append(
                f"measured on {chosen.prompts} prompts and {chosen.rounds} rounds only; about {FEW_PROMPTS} and "
                f"{FEW_ROUNDS} are the least to rely on"
            )
        if chosen.family == LOOKUP and any(word in route.lower() for word in OPEN_ENDED):
            warnings.append(
                "a lookup on open-ended text gains only where answers repeat their prompt: other prompts of this "
                "route may gain nothing"
            )
        off = _when_off(chosen, book, group, reasons)
    reasons += barred
    ordered = sorted(found, key=lambda c: -c.speedup)
    shipped = ways[chosen.key] if chosen else []
    best = chosen or max(served, key=lambda c: c.speedup, default=None)
    said = verdict(chosen, served)
    return RouteAdvice(route, temperature, said, chosen, best, off, reasons, warnings, shipped, ordered)


def _barred(found: Sequence[Candidate]) -> list[str]:
    """One line for each reason to bar candidates; a clock's reason names the one that it was timed for."""
    return list(dict.fromkeys(f"{c.name}: {c.barred}" if c.timed else c.barred for c in found if c.barred))


def _when_off(chosen: Candidate, book: CostBook, group: Sequence[Evaluation], reasons: list[str]) -> int | None:
    reasons.append(
        f"switch it off where a target forward of {chosen.nodes + 1} tokens costs more than {chosen.break_even:.2f} "
        "times one of a single token"
    )
    if book.setup is None:
        return None
    setup = book.serving(next(case for case in group if drafter_key(case) == chosen.key))
    fits = setup.largest_in_memory(chosen.plan)  # one at least, or it were barred
    off = setup.stops_paying_at(chosen.plan, min(fits, LARGEST_BATCH))
    largest = f"the {fits} that fit into memory" if fits <= LARGEST_BATCH else f"{LARGEST_BATCH}, the largest searched"
    where = f"from a batch of {off} on" if off else f"at no batch up to {largest}"
    reasons.append(f"by the roofline of {setup.device.name} with a context of {setup.context:,}, that is {where}")
    return off


def _ships(c: Candidate, engines: Sequence[str] | None) -> list[Mode]:
    if c.family == HEAD and c.kind not in HEADS:
        return []
    shipped = shipping(c.mode, HEADS[c.kind] if c.family == HEAD else None)
    return [m for m in shipped if engines is None or m.engine in engines]


def _lengths(case: Evaluation, group: Sequence[Evaluation], book: CostBook) -> list[int]:
    """The k of a case; and where nothing was timed, the shorter chains that follow from it and have no case of their
    own. Of two cases of one k, one timed and one replayed, the timed one is taken unless times do not count."""
    k, key = case.settings["k"], drafter_key(case)
    same = [other for other in group if other is not case and drafter_key(other) == key]
    if not case.timed and not book.replaces_times and any(o.settings["k"] == k and o.timed for o in same):
        own = []
    else:
        own = [k]
    if case.timed or case.settings.get("tree"):
        return own
    deeper = [o for o in same if not o.timed and o.settings["k"] > k]
    if deeper:
        return own  # the deepest replay speaks for all lengths without a case
    taken = {o.settings["k"] for o in same}
    return [*own, *(j for j in range(1, k) if j not in taken)]


def _assumptions(cases: Sequence[Evaluation], book: CostBook) -> list[str]:
    lines = list(book.setup.target.notes) if book.setup else []
    if any(c.timed for c in cases) and not book.replaces_times:
        lines.append("speeds marked timed: both decodings on this machine, one sequence at a time")
    for case in cases:
        if book.replaces_times or not case.timed:
            needed = largest_forward(case, case.settings["k"])
            line = f"{case.drafter['label']}: {book.of(case, needed).source}"
            lines += [line] if line not in lines else []
            if needed > book.reach:
                line = f"verification costs are known to {book.reach} tokens: longer drafts are left out"
                lines += [line] if line not in lines else []
    if book.replaces_times and any(c.timed for c in cases):
        lines.append("the times measured here are not used, since other costs were asked for")
    return lines


def _title(case: Evaluation) -> str:
    return f"{case.drafter['label']}, {case.settings.get('tree') or 'k ' + str(case.settings['k'])}"
