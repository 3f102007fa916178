"""Plots: where the marks lie, what is escaped, and that a page stands alone."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from headtrain.evaluate.curves import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    html_list,
    html_table,
    line_plot,
    log_ticks,
    page,
    ticks,
)

NS = "{http://www.w3.org/2000/svg}"


def draw(*series, **options):
    return ElementTree.fromstring(line_plot(series, "a plot", "k", "speed-up", **options))


def test_marks_lie_where_the_axes_say():
    root = draw(Series("a", [(1, 0), (2, 5), (3, 10)]), y_from=0)
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{NS}circle")]
    right, low, high = WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    assert circles[0] == pytest.approx((LEFT, low), abs=0.1)
    assert circles[1] == pytest.approx(((LEFT + right) / 2, low - (low - high) * 5 / 10.5), abs=0.1)
    assert circles[2] == pytest.approx((right, low - (low - high) * 10 / 10.5), abs=0.1)


def test_a_logarithmic_axis_spaces_doublings_evenly():
    root = draw(Series("a", [(1, 1), (2, 1), (4, 1), (64, 2)]), log_x=True)
    xs = [float(c.get("cx")) for c in root.iter(f"{NS}circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert xs[3] - xs[2] == pytest.approx(4 * (xs[1] - xs[0]), abs=0.3)
    with pytest.raises(ValueError, match="above 0"):
        draw(Series("a", [(0, 1)]), log_x=True)


def test_ticks_are_round_and_inside():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.83, 2.31) == [1.0, 1.5, 2.0]
    assert ticks(1, 5) == [1, 2, 3, 4, 5]
    for low, high in ((0.001, 0.0047), (-3, 12), (100, 101), (0, 1e6)):
        got = ticks(low, high)
        assert 2 <= len(got) <= 8 and all(low - 1e-9 <= t <= high + 1e-9 for t in got)
    assert log_ticks(1, 16) == [1, 2, 4, 8, 16]
    assert len(log_ticks(1, 4096)) <= 8


def test_a_point_that_is_not_finite_leaves_a_gap():
    root = draw(Series("a", [(1, 1), (2, 2), (3, math.nan), (4, 2), (5, 1), (6, math.inf)]))
    assert len(list(root.iter(f"{NS}circle"))) == 4
    lines = list(root.iter(f"{NS}polyline"))
    assert [len(line.get("points").split()) for line in lines] == [2, 2]
    assert "nan" not in ElementTree.tostring(root, encoding="unicode").lower()


def test_the_legend_and_the_label_for_those_who_do_not_see():
    many = [Series(f"s{i}", [(1, i), (2, i + 1)]) for i in range(9)]
    root = draw(*many)
    texts = [t.text for t in root.iter(f"{NS}text")]
    assert [f"s{i}" for i in range(9)] == [t for t in texts if t.startswith("s") and t != "speed-up"]
    assert "k" in texts and "speed-up" in texts
    assert root.get("role") == "img" and root.get("aria-label").startswith("a plot. s0: 0 at 1, 1 at 2; s1: ")
    styles = [(p.get("stroke"), p.get("stroke-dasharray")) for p in root.iter(f"{NS}polyline")]
    assert len(set(styles)) == 9 and styles[7][0] == COLOURS[0]
    bottom = max(float(t.get("y")) for t in root.iter(f"{NS}text") if t.get("y"))
    assert bottom < float(root.get("viewBox").split()[3])


def test_intervals_and_the_reference_widen_the_axis():
    root = draw(Series("a", [(1, 2.0), (2, 2.1)], band=[(1, 1.5, 2.5), (2, math.nan, 3)]), reference=1.0)
    ref = next(line for line in root.iter(f"{NS}line") if line.get("class") == "ref")
    assert float(ref.get("y1")) == HEIGHT - BOTTOM  # the lowest value there is
    bars = [line for line in root.iter(f"{NS}line") if line.get("stroke-width") == "5"]
    assert len(bars) == 1 and TOP <= float(bars[0].get("y2")) < float(bars[0].get("y1")) < HEIGHT - BOTTOM


def test_single_values_and_nothing():
    for root in (draw(Series("a", [(3, 1)])), draw(Series("a", [(3, 1)]), log_x=True)):
        circle = next(root.iter(f"{NS}circle"))
        assert LEFT < float(circle.get("cx")) < WIDTH and TOP < float(circle.get("cy")) < HEIGHT
    assert line_plot([], "x", "x", "y") == line_plot([Series("a", [(1, math.nan)])], "x", "x", "y")
    assert "Nothing was measured" in line_plot([], "x", "x", "y")


def test_everything_is_escaped_and_the_page_stands_alone():
    evil = '<script>alert("1")</script>&'
    svg = line_plot([Series(evil, [(1, 1), (2, 2)])], evil, evil, evil)
    made = page(evil, [(evil, svg + html_table([evil], [[evil]]) + html_list([evil]))])
    assert "<script" not in made and "&lt;script&gt;" in made
    assert not re.search(r'(src|href)="', made) and "viewport" in made
    ElementTree.fromstring(svg)
    body = made[made.index("<body>") : made.index("</body>") + 7]
    assert ElementTree.fromstring(body).find("h1").text == evil
