"""Line plots as inline SVG, and the page that holds them: self-contained, no scripts, readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("", "7 3", "2 3")  # a new one each time the colours start again
WIDTH, HEIGHT = 420, 250  # of the plot with its axes; text of 13 units stays legible at a phone's 360 pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 44
LEGEND_LINE = 20


@dataclass(frozen=True)
class Series:
    """A line with a mark at each (x, y). A point that is not finite leaves a gap. band: (x, low, high) of an interval,
    drawn as a vertical bar at x."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten apart) that lie in [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of two in [low, high], thinned to at most eight: batch sizes."""
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**p for p in powers][:: max(1, math.ceil(len(powers) / 8))]


def line_plot(
    series: Sequence[Series],
    label: str,
    x_label: str,
    y_label: str,
    y_from: float | None = None,
    reference: float | None = None,
    log_x: bool = False,
) -> str:
    """An ``<svg>``. label: what it shows, for readers who do not see it. y_from: the y axis starts no higher.
    reference: a horizontal line (a speed-up of 1). log_x: powers of two. A sentence where there is nothing to draw.
    Raises ValueError for x <= 0 on a logarithmic axis."""
    drawn = [[(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)] for s in series]
    bars = [[b for b in s.band if all(map(math.isfinite, b))] for s in series]
    xs = [x for points in drawn for x, _ in points]
    if not xs:
        return "<p>Nothing was measured.</p>"
    if log_x and min(xs) <= 0:
        raise ValueError(f"x {min(xs)}: a logarithmic axis needs values above 0")
    ys = [y for points in drawn for _, y in points] + [v for bar in bars for _, *ends in bar for v in ends]
    ys += [v for v in (y_from, reference) if v is not None]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x0 == x1:
        x0, x1 = (x0 / 2, x1 * 2) if log_x else (x0 - 0.5, x1 + 0.5)
    if y0 == y1:
        y0, y1 = y0 - 0.5, y1 + 0.5
    y1 += 0.05 * (y1 - y0)

    def across(x: float) -> float:
        part = math.log(x / x0) / math.log(x1 / x0) if log_x else (x - x0) / (x1 - x0)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = list(_axes(log_ticks(x0, x1) if log_x else ticks(x0, x1), ticks(y0, y1), across, up, x_label, y_label))
    if reference is not None:
        y = up(reference)
        style = 'class="ref" stroke="#5b6773" stroke-dasharray="4 4"'
        parts.append(f'<line {style} x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for i, points in enumerate(drawn):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        for x, low, high in bars[i]:
            where = f'x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{up(low):.1f}" y2="{up(high):.1f}"'
            parts.append(f'<line {where} stroke="{colour}" stroke-opacity=".45" stroke-width="5"/>')
        for run in _runs(series[i].points):
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in run)
            style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
            parts.append(f'<polyline points="{path}" fill="none" {style}/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = HEIGHT + LEGEND_LINE * i + 4
        style = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"'
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 26}" y1="{y}" y2="{y}" {style}/>')
        parts.append(f'<text x="{LEFT + 34}" y="{y + 4}">{escape(series[i].label)}</text>')
    height = HEIGHT + LEGEND_LINE * len(series)
    summary = f"{label}. " + "; ".join(_spoken(s.label, points) for s, points in zip(series, drawn, strict=True))
    style = "width: 100%; height: auto; font: 13px system-ui, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{style}" role="img" '
        f'aria-label="{escape(summary)}">{"".join(parts)}</svg>'
    )


def _axes(x_ticks, y_ticks, across, up, x_label: str, y_label: str) -> Iterable[str]:
    grid, bottom = 'stroke="#d9dee4" stroke-width="1"', HEIGHT - BOTTOM
    for y in y_ticks:
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}" {grid}/>'
        yield f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
    for x in x_ticks:
        yield f'<line x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#5b6773"/>'
        yield f'<text x="{across(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>'
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#5b6773"/>'
    middle = (TOP + bottom) / 2
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>'
    yield f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The stretches between points that are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _spoken(label: str, points: Sequence[tuple[float, float]]) -> str:
    return f"{label}: " + ", ".join(f"{y:.3g} at {x:g}" for x, y in points)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 1rem auto; padding: 0 1rem; color: #1d2733; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg text { fill: #1d2733; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #d9dee4; }
th:first-child, td:first-child { text-align: left; } li { font-size: .9rem; }
"""


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Escaped; scrolls sideways on a narrow screen."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def html_list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """One HTML file. sections: (heading, the HTML below it)."""
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""
