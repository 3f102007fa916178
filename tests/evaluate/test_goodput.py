"""Percentiles, goodput and comparison by hand."""

from __future__ import annotations

import json
import math

import numpy
import pytest

from headtrain.evaluate.goodput import (
    ALL,
    Level,
    Record,
    ServerError,
    ServerRun,
    Slo,
    compare,
    percentile,
    summaries,
    summarise,
)
from headtrain.evaluate.prometheus import Acceptance

SETTINGS = {
    "prompts_sha256": "x",
    "prompts": 4,
    "concurrency": [2],
    "requests": [4],
    "max_tokens": 9,
    "seed": 0,
    "top_p": 1.0,
    "top_k": 0,
}


def record(index, ttft, tpot, tokens=10, route="chat", text="same", failure=None):
    if failure:
        return Record(index, f"p{index}", route, failure=failure, detail="why")
    return Record(index, f"p{index}", route, None, "", ttft, tpot, 1.0, tokens, 3, "stop", text)


def level(*records, seconds=4.0, concurrency=2, complete=True):
    return Level(concurrency, seconds, 2, complete, list(records), Acceptance("off", "vllm"))


FOUR = (
    record(0, 0.100, 0.010, route="code"),
    record(1, 0.300, 0.010),
    record(2, 0.100, 0.030),
    record(3, None, None, failure="timeout"),
    record(4, 0.200, None, tokens=1, route="code"),
)


def run(*levels, temperature=0.0, **settings):
    return ServerRun({**SETTINGS, "temperature": temperature, **settings}, {"model": "m"}, {}, list(levels))


def test_percentiles_are_numpys():
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    for share in (0, 0.1, 0.5, 0.9, 0.99, 1):
        assert percentile(values, share) == pytest.approx(numpy.percentile(values, share * 100), rel=1e-12)
    assert percentile([2.0], 0.99) == 2.0 and math.isnan(percentile([], 0.5))


def test_goodput_by_hand():
    s = summarise(level(*FOUR), ALL, Slo(tpot_ms=20, ttft_ms=200))
    # 0 meets both, 1 is late, 2 is slow, 3 failed, 4 (one token) meets its first token exactly
    assert s.requests == 5 and s.failures == {"timeout": 1}
    assert s.requests_per_second == 2 / 4 and s.share == 2 / 5
    assert s.tokens_per_second == 31 / 4
    assert s.ttft[0] == pytest.approx(0.150) and s.tpot[0] == 0.010
    assert summarise(level(*FOUR), ALL, Slo(ttft_ms=200)).share == 3 / 5
    assert summarise(level(*FOUR), ALL, Slo(tpot_ms=20)).share == 3 / 5
    none = summarise(level(*FOUR))
    assert none.share is None and none.requests_per_second is None
    everything = summarise(level(*FOUR), ALL, Slo(tpot_ms=1e9))
    assert everything.share == 4 / 5  # a failed request is never good


def test_routes_add_up():
    slo = Slo(tpot_ms=20, ttft_ms=200)
    code, chat, whole = (summarise(level(*FOUR), route, slo) for route in ("code", "chat", ALL))
    assert code.requests == 2 and chat.requests == 3 and chat.failures == {"timeout": 1} and code.failures == {}
    assert code.tokens_per_second + chat.tokens_per_second == whole.tokens_per_second
    assert code.requests_per_second + chat.requests_per_second == whole.requests_per_second
    assert [s.route for s in summaries(run(level(*FOUR)), slo)] == ["chat", "code", ALL]
    assert [s.route for s in summaries(run(level(record(0, 0.1, 0.1))), slo)] == [ALL]


def test_a_run_against_a_baseline():
    slow = run(level(*(record(i, 0.1, 0.040, text=f"t{i}") for i in range(4)), seconds=8.0))
    fast = run(level(*(record(i, 0.1, 0.016, text=f"t{i}") for i in range(3)), record(3, 0.1, 0.016, text="other")))
    (c,) = compare(fast, slow, Slo(tpot_ms=50))
    assert (c.tpot, c.tokens, c.goodput, c.identical, c.compared) == (2.5, 2.0, 2.0, 3, 4)
    (c,) = compare(fast, slow, Slo())
    assert c.goodput is None and c.goodputs is None
    (c,) = compare(fast, slow, Slo(tpot_ms=20))
    assert math.isnan(c.goodput) and c.goodputs == (0.0, 1.0)  # the baseline met nothing
    failed = run(level(record(0, None, None, failure="timeout"), *fast.levels[0].records[1:]))
    (c,) = compare(failed, slow, Slo())
    assert (c.identical, c.compared) == (2, 3)
    (c,) = compare(run(*fast.levels, temperature=1.0), run(*slow.levels, temperature=1.0), Slo())
    assert c.identical is None
    assert compare(fast, run(level(*FOUR, complete=False)), Slo()) == []
    assert compare(run(level(*FOUR, complete=False)), slow, Slo()) == []


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", 64),
        ("prompts_sha256", "y"),
        ("concurrency", [1]),
        ("temperature", 1.0),
        ("seed", 3),
        ("top_p", 0.5),
        ("top_k", 4),
    ],
)
def test_another_load_is_refused_with_both_values(name, value):
    with pytest.raises(ValueError) as caught:
        compare(run(level(*FOUR)), run(level(*FOUR), **{name: value}), Slo())
    here = run().settings[name]
    assert f"{name}: {here!r} here, {value!r} in the baseline" in str(caught.value)


def test_json_round_trip():
    measured = run(level(*FOUR))
    measured.levels[0].acceptance = Acceptance("measured", "vllm", 3, 9, 4, [(3, 3), (1, 3)], tau=7 / 3)
    text = json.dumps(measured.to_dict(), allow_nan=False)
    again = ServerRun.from_dict(json.loads(text))
    assert again.levels[0].records == list(FOUR) and again.levels[0].acceptance.alpha == [(3, 3), (1, 3)]
    assert math.isnan(again.levels[0].acceptance.tau_all) and again.to_dict() == measured.to_dict()
    for bad in ([], {"format": 9, "kind": "server"}, {"format": 1}, {**json.loads(text), "levels": [{"x": 1}]}):
        with pytest.raises(ValueError):
            ServerRun.from_dict(bad)


@pytest.mark.parametrize("limit", [math.nan, -3.0, 0.0, math.inf])
def test_a_limit_that_is_none_is_refused(limit):
    for name in ("tpot_ms", "ttft_ms"):
        with pytest.raises(ServerError, match=f"{name[:4].upper()}: expected milliseconds above 0"):
            Slo(**{name: limit})
    assert Slo(tpot_ms=0.1, ttft_ms=5)


def test_what_a_stored_run_lacks():
    """A route that has the total's name, and a load from before top_p and top_k were sent."""
    stored = run(level(record(0, 0.1, 0.1, route="all"), record(1, 0.1, 0.1))).to_dict()
    del stored["settings"]["top_p"], stored["settings"]["top_k"]
    again = ServerRun.from_dict(stored)
    assert {s.route: s.requests for s in summaries(again, Slo())} == {"all (route)": 1, "chat": 1, ALL: 2}
    assert (again.settings["top_p"], again.settings["top_k"]) == (1.0, 0)


def test_a_damaged_run_is_refused_at_reading():
    good = run(level(*FOUR)).to_dict()
    ServerRun.from_dict(good)
    for name, value in (("settings", []), ("settings", {}), ("server", 3), ("versions", None), ("levels", {"a": 1})):
        with pytest.raises(ValueError, match="damaged"):
            ServerRun.from_dict({**good, name: value})
    for name, value in (("ttft", None), ("tokens", "x"), ("route", 5), ("tpot", "fast")):
        damaged = [
            {**good["levels"][0], "complete": False, "records": [{**good["levels"][0]["records"][0], name: value}]}
        ]
        with pytest.raises(ValueError, match="damaged"):
            ServerRun.from_dict({**good, "levels": damaged})
