"""A sweep for people: tables for the console, one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rich import box
from rich.markup import escape as plain
from rich.table import Table

from .advise import advise
from .choice import INDIFFERENT, OFF, RECOMMEND
from .curves import Series, html_list, html_table, line_plot, page
from .results import ALL, DECODE, STORED, Evaluation, RouteSummary
from .sweep import Sweep

NOT_LOSSLESS = "typical acceptance: NOT lossless, the text is not distributed as the target's own"
FOREIGN = (
    "; elsewhere a draft that says what the target would counts as wrong in the table above, whose tau is no estimate "
    "of decoding's then: go by the simulated tau, or decode (`headtrain regenerate` makes rows of the target's own)"
)
BLUE, GREY = "#2f6fb3", "#9aa5b1"
NAMED = 5  # prompts left out that are named; eval.json has them all
OWN_TEXT = 0.98  # share of greedy tokens from which rows count as the target's own; the rest is rounding
SHOWN = 10  # depths that the tables show; eval.json has them all


def tables(sweep: Sweep) -> list[Table]:
    """What to print: the case by route where there is one, else all cases, and tau of each by route."""
    if len(sweep.cases) == 1:
        return [route_table(sweep.cases[0])]
    return [case_table(sweep), matrix(sweep)]


def notes(sweep: Sweep) -> list[str]:
    """What the tables leave out: prompts that were not evaluated, and how stored rows read beside training's own
    figures. Each a line."""
    lines = []
    if sweep.skipped:
        named = ", ".join(sweep.skipped[:NAMED]) + (", ..." if len(sweep.skipped) > NAMED else "")
        lines.append(
            f"{len(sweep.skipped)} prompts left out, longer than the target's context, which no server takes: {named}"
        )
    if (of := sweep.simulated) is not None:
        alpha = " ".join("-" if a is None else f"{a:.2f}" for a in of.alpha)
        lines += [
            f"simulated tau {of.tau:.3f}, alpha {alpha}: the same rows as training measures held-out ones (every "
            "position begins a chain, a draft is right where the target itself would say it)",
            f"the rows' text is what the target itself would say, greedily, at {of.own:.1%} of its tokens"
            + (FOREIGN if of.own < OWN_TEXT else ""),
        ]
    return lines


def route_table(case: Evaluation) -> Table:
    """A row for each route and one for all; 80 columns wide for a chain of 5. Print it with a rich Console."""
    k = case.settings["k"]
    out = _table("\n".join(caption(case)))
    out.add_column("route", overflow="fold")
    for name in ("n", "tau ±", *[f"α{j}" for j in range(1, min(k, SHOWN) + 1)], "plain", "spec", "speed", "equal"):
        out.add_column(name, justify="right", no_wrap=True)
    for s in case.summaries():
        if s.route == ALL:
            out.add_section()
        out.add_row(*map(plain, cells(s)), style="bold" if s.route == ALL else "")
    return out


def case_table(sweep: Sweep) -> Table:
    """A row for each case, all routes together."""
    timed = next((case for case in sweep.cases if case.timed), None)
    lines = [
        f"{target_name(sweep.target)}, {len(sweep.cases[0].results)} prompts; "
        "tau: tokens for each target forward, the target's own included, ± 95 % over prompts",
        "nodes: drafted tokens a round; draft, verify: milliseconds of a round; spec: tokens/s with drafts",
    ]
    if timed:
        s = timed.summary()
        lines.append(f"without drafts: {s.plain_rate:.1f} tokens/s, {1e3 * s.plain_step:.1f} ms a forward")
    if not all(case.lossless for case in sweep.cases):
        lines.append(NOT_LOSSLESS)
    for case in sweep.cases:
        lines += difference_lines(case, shown=2)
    out = _table("\n".join(lines))
    out.add_column("drafter", overflow="fold")
    for name in ("tau ±", "nodes", "draft", "verify", "spec", "speed", "equal"):
        out.add_column(name, justify="right", no_wrap=True)
    best = max((c.summary().speedup for c in sweep.cases if c.timed), default=math.nan)
    for case in sweep.cases:
        s = case.summary()
        out.add_row(
            plain(title(case)),
            _tau(s),
            _number(s.nodes, ".1f"),
            _number(1e3 * s.draft_step, ".1f"),
            _number(1e3 * s.verify_step, ".1f"),
            _number(s.speculative_rate, ".1f"),
            _number(s.speedup, ".2f", "x"),
            _equal(s),
            style="bold" if case.timed and s.speedup == best else "",
        )
    return out


def matrix(sweep: Sweep) -> Table:
    """tau of each case by route."""
    routes = sweep.cases[0].routes
    out = _table("tau by route")
    out.add_column("drafter", overflow="fold")
    for route in routes:
        out.add_column(plain(route), justify="right", overflow="fold", min_width=4)
    for case in sweep.cases:
        out.add_row(plain(title(case)), *(_number(case.summary(route).tau, ".2f") for route in routes))
    return out


def title(case: Evaluation) -> str:
    """ "eagle3, chain of 5", with the temperature where it is not greedy and the mode where it was not decoded."""
    t, mode = case.settings["temperature"], case.settings["mode"]
    warm = (f", T {t:g}" if t else "") + ("" if case.lossless else ", typical acceptance (not lossless)")
    return f"{drafter_name(case)}, {case.shape}{warm}" + (f" ({mode})" if mode != DECODE else "")


def drafter_name(case: Evaluation) -> str:
    """Of the drafter, unlike that of any other beside it."""
    return case.drafter.get("name") or case.drafter["kind"]


def target_name(target: dict[str, Any]) -> str:
    """As it was asked for, with what a converted folder was made from, and the dtype."""
    made = f"converted from {target['name']}, " if target.get("folder") else ""
    return f"{target.get('folder') or target['name']} ({made}{target['dtype']})"


def cells(s: RouteSummary) -> list[str]:
    """One summary as text; what was not measured is a dash."""
    return [
        s.route,
        str(s.prompts),
        _tau(s),
        *[f"{a / o:.2f}".removeprefix("0")[:3] if o else "-" for a, o in s.alpha[:SHOWN]],
        _number(s.plain_rate, ".0f" if s.plain_rate >= 100 else ".1f"),
        _number(s.speculative_rate, ".0f" if s.speculative_rate >= 100 else ".1f"),
        _number(s.speedup, ".2f", "x"),
        _equal(s),
    ]


def caption(case: Evaluation) -> list[str]:
    """What the columns mean, where the time went, and every text that differed."""
    s, settings = case.summary(), case.settings
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    lines = [
        f"{drafter_name(case)} on {target_name(case.target)}, {case.shape}, {how}"
        + (f", up to {settings['max_new_tokens']} new tokens" if settings["mode"] != STORED else ""),
        "tau: tokens for each target forward, the target's own included, ± 95 % over prompts; "
        "αk: k-th draft accepted where all before were; plain, spec: tokens/s without and with drafts",
    ]
    if not case.lossless:
        lines.append(NOT_LOSSLESS)
    if settings["mode"] == STORED:
        lines.append("stored: walked over the rows' own text, a draft is right where it is that text; nothing decoded")
    if s.rounds and case.timed:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in s.shares.items())
        lines.append(f"time with drafts: {shares}")
        if s.speedup < 1:
            lines.append(
                f"slower than without drafts here: a forward of {s.nodes + 1:.0f} tokens costs more here "
                f"than tau {s.tau:.2f} gives back; try a smaller --k"
            )
    return lines + difference_lines(case)


def difference_lines(case: Evaluation, shown: int = 5) -> list[str]:
    """One line for each of the first ``shown`` greedy texts that are not the target's own."""
    lines = [
        f"{r.id}: the texts part at new token {r.difference.position} (the best two logits are "
        f"{r.difference.gap:.2g} apart there)"
        for r in case.differences[:shown]
    ]
    more = len(case.differences) - shown
    return lines + ([f"... and {more} more that part"] if more > 0 else [])


# -- HTML --------------------------------------------------------------------------------------------------------


def html_report(sweep: Sweep) -> str:
    """One self-contained page: the verdict by route, tau by route, alpha by depth, speed-up over k, every table.
    Readable on a phone; no scripts."""
    head = sweep.headline
    taus = [(s.route, s.tau, f"{s.tau:.2f}{_interval(s)}") for s in head.summaries() if s.rounds > 0]
    sections = [
        ("Verdict", _verdict_html(sweep)),
        (f"tau by route: {title(head)}", bars(taus, start=1.0)),
        ("Acceptance by depth, all routes", _alpha_plot(sweep)),
    ]
    if lines := _over_k(sweep, "tau"):
        sections.append(("tau over k", line_plot(lines, "tau over k", "k", "tau", y_from=1.0)))
    if lines := _over_k(sweep, "speedup"):
        plot = line_plot(lines, "measured speed-up over k", "k", "speed-up", y_from=0.0, reference=1.0)
        sections.append(("Measured speed-up over k (dashed: no drafts)", plot))
    if len(sweep.cases) > 1:
        sections.append(("All cases", _cases_html(sweep)))
    for case in sweep.cases:
        sections.append((title(case), _routes_html(case) + html_list(caption(case))))
    if lines := notes(sweep):
        sections.insert(1, ("Notes", html_list(lines)))
    made = ", ".join(f"{name} {value}" for name, value in sweep.versions.items())
    sections.append(("Made with", html_list([made])))
    kinds = ", ".join(dict.fromkeys(map(drafter_name, sweep.cases)))
    return page(f"{kinds} on {sweep.target['name']}", sections)


WORDS = {
    RECOMMEND: "recommended: serve {}",
    INDIFFERENT: "indifferent: {} cannot be told from no speculation; leave it off, or measure more",
    OFF: "off: {}",
}


def _verdict_html(sweep: Sweep) -> str:
    """What ``advise`` says of these cases at batch 1, as they were timed, with 95 % intervals over prompts."""
    try:
        made = advise(sweep.cases)
    except ValueError as error:
        return html_list([f"none: {error}"])
    rows = []
    for r in made.routes:
        best = r.best.name if r.best else ""
        none = f"the best, {best}, is no faster" if best else r.reasons[0]
        gain = _number(r.best.speedup, ".2f", "x") if r.best else "-"
        ends = "-" if r.best is None or math.isnan(r.best.low) else f"{r.best.low:.2f} to {r.best.high:.2f}"
        how = "-" if r.best is None else "timed" if r.best.timed else "computed"
        at = r.route if r.temperature == 0 else f"{r.route}, T {r.temperature:g}"
        rows.append([at, WORDS[r.verdict].format(none if r.verdict == OFF else best), gain, ends, how])
    notes = [*made.refused, *made.warnings, *made.assumptions]
    notes.append("one sequence at a time; `headtrain advise` answers for other devices and loads, with the reasons")
    return html_table(("route", "verdict", "speed-up", "95 %", ""), rows) + html_list(notes)


def _routes_html(case: Evaluation) -> str:
    """A row for each route; acceptance as accepted/offered, cumulative in brackets."""
    names = ["route", "prompts", "tau (95 %)", *[f"α{j}" for j in range(1, min(case.settings["k"], SHOWN) + 1)]]
    names += ["nodes a round", "draft ms", "verify ms", "tokens/s plain", "with drafts", "speed-up", "identical"]
    rows = []
    for s in case.summaries():
        alpha = [
            f"{a / o:.2f} {a}/{o} ({c:.2f})" if o else "-"
            for (a, o), c in zip(s.alpha[:SHOWN], s.cumulative, strict=False)
        ]
        tau = f"{s.tau:.2f}{_interval(s)}" if s.rounds else "-"
        times = [_number(1e3 * s.draft_step, ".1f"), _number(1e3 * s.verify_step, ".1f")]
        speeds = [_number(s.plain_rate, ".1f"), _number(s.speculative_rate, ".1f"), _number(s.speedup, ".2f", "x")]
        rows.append([s.route, str(s.prompts), tau, *alpha, _number(s.nodes, ".1f"), *times, *speeds, _equal(s)])
    return html_table(names, rows)


def _cases_html(sweep: Sweep) -> str:
    routes = sweep.cases[0].routes
    names = ["drafter", "tau", "draft ms", "verify ms", "speed-up", "identical", *(f"tau {route}" for route in routes)]
    rows = []
    for case in sweep.cases:
        s = case.summary()
        row = [title(case), _tau(s), _number(1e3 * s.draft_step, ".1f"), _number(1e3 * s.verify_step, ".1f")]
        row += [_number(s.speedup, ".2f", "x"), _equal(s)]
        rows.append([*row, *(_number(case.summary(route).tau, ".2f") for route in routes)])
    return html_table(names, rows)


def _alpha_plot(sweep: Sweep) -> str:
    """A line for the deepest chain of each drafter and temperature, and one for each tree."""
    series = []
    for case in _deepest(sweep):
        points = [(float(j), a / o) for j, (a, o) in enumerate(case.summary().alpha, 1) if o]
        if points:
            series.append(Series(title(case), points))
    return line_plot(series, "acceptance by depth", "depth", "accepted where all before were", y_from=0.0)


def _deepest(sweep: Sweep) -> list[Evaluation]:
    groups: dict[tuple, Evaluation] = {}
    for case in sweep.cases:
        key = (_key(case), case.settings["tree"])
        if key not in groups or case.settings["k"] > groups[key].settings["k"]:
            groups[key] = case
    return list(groups.values())


def _key(case: Evaluation) -> tuple:
    drafter, settings = case.drafter, case.settings
    return drafter["label"], drafter.get("weights"), settings["temperature"], settings["mode"], case.lossless


def _over_k(sweep: Sweep, what: str) -> list[Series]:
    """``what`` of every drafter whose chains were measured at several lengths."""
    groups: dict[tuple, list[Evaluation]] = {}
    for case in sweep.cases:
        if not case.settings["tree"]:
            groups.setdefault(_key(case), []).append(case)
    series = []
    for cases in groups.values():
        points = sorted((float(c.settings["k"]), getattr(c.summary(), what)) for c in cases)
        if len(points) > 1 and any(math.isfinite(y) for _, y in points):
            t = cases[0].settings["temperature"]
            series.append(Series(drafter_name(cases[0]) + (f", T {t:g}" if t else ""), points))
    return series


def bars(items: Sequence[tuple[str, float, str]], start: float = 0.0) -> str:
    """Horizontal bars as inline SVG: (label, value, what is written beside it). ``start``: the value of a bar of no
    length (a plain decoder has tau 1); the longest scale end is the next whole number."""
    if not items:
        return "<p>Nothing was decoded past the first token.</p>"
    left, width, line = 110, 330, 26
    end = max(start + 1, math.ceil(max(value for _, value, _ in items)))
    parts = []
    for row, (label, value, text) in enumerate(items):
        y = row * line
        length = width * max(0.0, value - start) / (end - start)
        colour = GREY if label == ALL else BLUE
        parts.append(
            f'<text x="0" y="{y + 17}">{escape(label[:16])}</text>'
            f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{line - 8}" rx="2" fill="{colour}"/>'
            f'<text x="{left + length + 6:.1f}" y="{y + 17}">{escape(text)}</text>'
        )
    summary = ", ".join(f"{label} {value:.2f}" for label, value, _ in items)
    height = len(items) * line
    return (
        f'<svg viewBox="0 0 {left + width + 160} {height}" role="img" aria-label="{escape(summary)}">'
        f"{''.join(parts)}</svg>"
    )


def _table(caption: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=0, caption=plain(caption), caption_justify="left", caption_style="dim")


def _tau(s: RouteSummary) -> str:
    half = _number((s.tau_high - s.tau_low) / 2, ".2f")
    return f"{s.tau:.2f} ±{half}" if s.rounds else "-"


def _interval(s: RouteSummary) -> str:
    return "" if math.isnan(s.tau_low) else f"  ({s.tau_low:.2f} to {s.tau_high:.2f})"


def _equal(s: RouteSummary) -> str:
    return "-" if s.identical is None else f"{s.identical}/{s.prompts}"


def _number(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"
