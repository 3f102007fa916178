"""An evaluation for people: one table for the console, one HTML file that needs nothing else."""

from __future__ import annotations

import math
from html import escape

from rich import box
from rich.table import Table

from .results import ALL, Evaluation, RouteSummary

BLUE, GREY = "#2f6fb3", "#9aa5b1"


def table(evaluation: Evaluation) -> Table:
    """A row for each route and one for all; 80 columns wide for a chain of 5. Print it with a rich Console."""
    k = evaluation.settings["k"]
    out = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="dim")
    out.caption = caption(evaluation)
    out.add_column("route", no_wrap=True, max_width=13)
    for name in ("n", "tau ±", *[f"α{j}" for j in range(1, k + 1)], "plain", "spec", "speed", "equal"):
        out.add_column(name, justify="right", no_wrap=True)
    for s in evaluation.summaries():
        if s.route == ALL:
            out.add_section()
        out.add_row(*cells(s), style="bold" if s.route == ALL else "")
    return out


def cells(s: RouteSummary) -> list[str]:
    """One summary as text; what was not measured is a dash."""
    half = _number((s.tau_high - s.tau_low) / 2, ".2f")
    return [
        s.route,
        str(s.prompts),
        f"{s.tau:.2f} ±{half}" if s.rounds else "-",
        *[f"{a / o:.2f}".removeprefix("0")[:3] if o else "-" for a, o in s.alpha],
        _number(s.plain_rate, ".0f" if s.plain_rate >= 100 else ".1f"),
        _number(s.speculative_rate, ".0f" if s.speculative_rate >= 100 else ".1f"),
        _number(s.speedup, ".2f", "x"),
        "-" if s.identical is None else f"{s.identical}/{s.prompts}",
    ]


def _with_interval(s: RouteSummary) -> str:
    interval = "" if math.isnan(s.tau_low) else f"  ({s.tau_low:.2f} to {s.tau_high:.2f})"
    return f"{s.tau:.2f}{interval}"


def _number(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


def caption(evaluation: Evaluation) -> str:
    """What the columns mean, where the time went, and every text that differed."""
    s, settings = evaluation.summary(), evaluation.settings
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    drafter = evaluation.drafter["kind"]
    lines = [
        f"{drafter} on {evaluation.target['name']} ({evaluation.target['dtype']}), chain of {settings['k']}, {how}, "
        f"up to {settings['max_new_tokens']} new tokens",
        "tau: tokens for each target forward, the target's own included, ± 95 % over prompts; "
        "αk: k-th draft accepted where all before were; plain, spec: tokens/s without and with drafts",
    ]
    if s.rounds:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in s.shares.items())
        lines.append(f"time with drafts: {shares}")
        if s.speedup < 1:
            lines.append(
                f"slower than without drafts here: a forward of {settings['k'] + 1} tokens costs more here "
                f"than tau {s.tau:.2f} gives back; try a smaller --k"
            )
    lines += difference_lines(evaluation)
    return "\n".join(lines)


def difference_lines(evaluation: Evaluation, shown: int = 5) -> list[str]:
    """One line for each of the first ``shown`` greedy texts that are not the target's own."""
    lines = [
        f"{r.id}: the texts part at new token {r.difference.position} (the best two logits are "
        f"{r.difference.gap:.2g} apart there)"
        for r in evaluation.differences[:shown]
    ]
    more = len(evaluation.differences) - shown
    return lines + ([f"... and {more} more that part"] if more > 0 else [])


def html_report(evaluation: Evaluation) -> str:
    """One self-contained page: tau by route, alpha by depth, the table. Readable on a phone; no scripts."""
    summaries = evaluation.summaries()
    whole = summaries[-1]
    title = f"{evaluation.drafter['kind']} on {evaluation.target['name']}"
    alpha = [(f"depth {j}", a / o, f"{a / o:.2f}  ({a}/{o})") for j, (a, o) in enumerate(whole.alpha, 1) if o]
    taus = [(s.route, s.tau, f"{s.tau:.2f}  ({s.tau_low:.2f} to {s.tau_high:.2f})") for s in summaries if s.rounds > 0]
    head = ["route", "prompts", "tau", *[f"α{j}" for j in range(1, evaluation.settings["k"] + 1)]]
    head += ["tokens/s plain", "tokens/s with drafts", "speed-up", "identical"]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(s))}</tr>\n" for s in summaries)
    notes = "".join(f"<li>{escape(line)}</li>\n" for line in caption(evaluation).splitlines())
    made = ", ".join(f"{name} {value}" for name, value in evaluation.versions.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 1rem auto; padding: 0 1rem; color: #1d2733; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
svg {{ width: 100%; height: auto; }} svg text {{ font: 13px system-ui, sans-serif; fill: #1d2733; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: .85rem; }}
th, td {{ padding: .25rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #d9dee4; }}
th:first-child, td:first-child {{ text-align: left; }} tr:last-child {{ font-weight: bold; }}
li, footer {{ font-size: .85rem; }} footer {{ color: #5b6773; }}
</style></head><body>
<h1>{escape(title)}</h1>
<h2>tau by route: tokens for each target forward</h2>
{bars(taus, start=1.0)}
<h2>Acceptance by depth, all routes</h2>
{bars(alpha)}
<h2>All numbers</h2>
<div class="wide"><table><thead><tr>{"".join(f"<th>{escape(name)}</th>" for name in head)}</tr></thead>
<tbody>
{rows}</tbody></table></div>
<ul>
{notes}</ul>
<footer>{escape(made)}</footer>
</body></html>
"""


def bars(items: list[tuple[str, float, str]], start: float = 0.0) -> str:
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
