"""Acceptance from a server's counters: sums, definitions, restarts, strangers."""

from __future__ import annotations

import math

import pytest

from headtrain.evaluate.prometheus import Acceptance, Sent, Snapshot, acceptance, parse


def vllm(requests=0, tokens=0, drafts=0, drafted=0, accepted=0, positions=(), engine="0", speculates=True, extra=""):
    label = f'engine="{engine}",model_name="m"'
    lines = [
        "# HELP vllm:request_success_total Count of successfully processed requests.",
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{{label},finished_reason="stop"}} {requests - 1 if requests else 0}.0',
        f'vllm:request_success_total{{{label},finished_reason="length"}} {1 if requests else 0}.0',
        f"vllm:generation_tokens_total{{{label}}} {tokens}.0",
        f"vllm:generation_tokens_created{{{label}}} 1.79e+09",
    ]
    if speculates:
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts}.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {drafted}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {accepted}.0",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{j}"}} {n}.0'
            for j, n in enumerate(positions)
        ]
    return "\n".join([*lines, extra, ""])


def read(*pages: str) -> Snapshot:
    return Snapshot.of("\n".join(pages))


def test_the_text_form():
    text = (
        "# HELP a b\n# TYPE a counter\n"
        'a_total{x="1",y="two, {\\"three\\"}\\n\\\\"} 3.5\n'
        "b 1e3 1700000000\nc{} NaN\nd +Inf\nnot a sample\nbroken{ 3\ne twelve\n"
    )
    found = parse(text)
    assert found["a", (("x", "1"), ("y", 'two, {"three"}\n\\'))] == 3.5
    assert found["b", ()] == 1000 and math.isnan(found["c", ()]) and found["d", ()] == math.inf
    assert len(found) == 4


def test_alpha_and_tau_by_hand():
    """10 drafts of 3 tokens: 6, then 3, then 1 accepted. The counters did not start at zero."""
    before = read(vllm(5, 100, 7, 21, 4, (3, 1, 0)))
    after = read(vllm(7, 100 + 32, 17, 51, 14, (9, 4, 1)))
    a = acceptance(before, after, Sent(2, 2, 32))
    assert (a.state, a.engine, a.drafts, a.drafted, a.accepted) == ("measured", "vllm", 10, 30, 10)
    assert a.alpha == [(6, 10), (3, 6), (1, 3)] and a.tau == 2.0 and a.notes == []
    # 32 tokens, 2 of them of the prefill: 30 from steps of one own token and the accepted 10: 20 steps
    assert a.tau_all == 30 / 20


def test_engines_are_summed_and_new_series_count_from_zero():
    before = read(vllm(1, 10, 4, 8, 3, (2, 1), "0"))
    after = read(vllm(2, 20, 8, 16, 5, (3, 2), "0"), vllm(3, 30, 6, 12, 7, (4, 3), "1"))
    a = acceptance(before, after, Sent(4, 4, 40))
    assert (a.drafts, a.drafted, a.accepted) == (10, 20, 9)
    assert a.alpha == [(5, 10), (4, 5)] and a.tau == 1.9 and a.notes == []


def test_shorter_drafts_are_said():
    a = acceptance(read(vllm(positions=(0, 0))), read(vllm(1, 20, 10, 15, 6, (5, 1))), Sent(1, 1, 20))
    assert a.tau == 1.6 and a.alpha == [(5, 10), (1, 5)]
    assert "15 tokens in 10 drafts" in a.notes[0] and "lower bound" in a.notes[0]


def test_a_restart_of_one_engine_is_seen_although_the_sum_grew():
    before = read(vllm(9, 90, 50, 100, 30, (20, 10), "0"), vllm(1, 10, 5, 10, 3, (2, 1), "1"))
    after = read(vllm(2, 20, 8, 16, 5, (3, 2), "0"), vllm(90, 900, 500, 1000, 300, (200, 100), "1"))
    a = acceptance(before, after, Sent(3, 3, 30))
    assert a.state == "unknown" and math.isnan(a.tau)
    assert "restarted" in a.notes[0] and 'engine="0"' in a.notes[0] and "was 8 and fell to 1" in a.notes[0]


def test_a_restart_is_seen_by_the_process_start_and_by_lost_series():
    start = "process_start_time_seconds {}\n".format
    a = acceptance(read(vllm(extra=start(100))), read(vllm(5, 50, 10, 20, 5, (4, 1), extra=start(200))), Sent(5, 5, 50))
    assert a.state == "unknown" and "process_start_time_seconds" in a.notes[0]
    both = read(vllm(2, 20, 1, 2, 1, (1, 0))), read(vllm(3, 30, speculates=False))
    assert "is gone" in acceptance(*both, Sent(1, 1, 10)).notes[0]


@pytest.mark.parametrize(
    "sent, says",
    [
        (Sent(4, 4, 50), "finished 5 requests, 4 were sent"),
        (Sent(6, 6, 50), "several servers"),
        (Sent(5, 5, 40), "made 50 tokens, 40 were received"),
        (Sent(6, 5, 40), None),  # one broke off: its tokens are unknown, and it may or may not be counted
        (Sent(5, 5, 50), None),
    ],
)
def test_other_traffic(sent, says):
    a = acceptance(read(vllm(positions=(0,))), read(vllm(5, 50, 10, 10, 5, (5,))), sent)
    assert a.state == "measured" and a.tau == 1.5
    assert bool(a.notes) == (says is not None) and (says is None or says in a.notes[0])
    assert math.isnan(a.tau_all) == (says is not None or sent.requests != sent.answered)


def test_off_idle_and_unknown():
    off = acceptance(read(vllm(speculates=False)), read(vllm(1, 9, speculates=False)), Sent(1, 1, 9))
    assert off == Acceptance("off", "vllm")
    idle = acceptance(read(vllm(positions=(0,))), read(vllm(1, 9, positions=(0,))), Sent(1, 1, 9))
    assert idle.state == "measured" and math.isnan(idle.tau) and "nothing was drafted" in idle.notes[0]
    other = acceptance(read("up 1\n"), read("llamacpp:tokens 1\n"), Sent(1, 1, 9))
    assert other.state == "unknown" and "vLLM or SGLang" in other.notes[0]
    none = acceptance("/metrics: http 404", read(vllm()), Sent(1, 1, 9))
    assert none.state == "unknown" and none.notes == ["/metrics: http 404"]


def sglang(requests=0, tokens=0, verifications=None, length=None, planned=None):
    lines = [
        f'sglang:num_requests_total{{model_name="m",is_streaming="true"}} {requests}',
        f'sglang:generation_tokens_total{{model_name="m",is_streaming="true"}} {tokens}',
    ]
    if verifications is not None:
        lines.append(f'sglang:spec_verify_calls_total{{model_name="m"}} {verifications}')
    if length is not None:
        lines += [f'sglang:spec_accept_length{{tp_rank="{r}"}} {x}' for r, x in enumerate(length)]
    if planned is not None:
        lines.append(f'sglang:spec_num_draft_tokens{{tp_rank="0"}} {planned}')
    return read("\n".join(lines))


def test_sglang():
    # 22 tokens of 2 requests: 20 from 8 verifications
    a = acceptance(sglang(1, 5, 3), sglang(3, 27, 11, length=(2.0, 3.0, 0.0)), Sent(2, 2, 22))
    assert a.state == "measured" and a.tau == 20 / 8 == a.tau_all and a.accepted == 12 and a.alpha == []
    assert a.gauge == {"length": 2.5} and any("window" in note for note in a.notes)
    old = acceptance(sglang(1, 5), sglang(3, 27, length=(2.0,)), Sent(2, 2, 22))
    assert old.state == "unknown" and old.gauge == {"length": 2.0} and math.isnan(old.tau)
    assert acceptance(sglang(), sglang(2, 22, length=(0.0,), planned=0), Sent(2, 2, 22)).state == "off"
    quiet = acceptance(sglang(), sglang(2, 22), Sent(2, 2, 22))
    assert quiet.state == "unknown" and "too little traffic" in quiet.notes[0]


def test_positions_that_are_none_leave_alpha_unknown():
    """Without the label, or with one that is no position: tau stays."""
    family = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for labels in ("", '{position="x"}', '{position="-1"}', '{position="1.0"}', '{position="999999999"}', '{p="0"}'):
        pages = [vllm(n, 5 * n, 2 * n, 4 * n, 2 * n, extra=f"{family}{labels} {2 * n}") for n in (1, 2)]
        a = acceptance(read(pages[0]), read(pages[1]), Sent(1, 1, 5))
        assert (a.state, a.tau, a.alpha) == ("measured", 2.0, []) and len(a.notes) == 1, labels
        assert "alpha unknown" in a.notes[0]


@pytest.mark.parametrize("family", ["request_success", "generation_tokens", "spec_decode_num_drafts"])
@pytest.mark.parametrize("values", [(1, "NaN"), ("NaN", 1), (1, "+Inf"), ("+Inf", "+Inf"), ("-Inf", 3), (0, "1e300")])
def test_a_counter_that_is_no_count_makes_acceptance_unknown(family, values):
    lines = [f'vllm:{family}_total{{engine="7"}} {value}' for value in values]
    before, after = (read(vllm(n, 5, 2, 4, 2, (2, 0), extra=line)) for n, line in zip((1, 2), lines, strict=True))
    a = acceptance(before, after, Sent(1, 1, 5))
    assert a.state == "unknown" and "no count" in a.notes[0] and f'{family}{{engine="7"}}' in a.notes[0]


def test_a_gauge_that_is_no_number_is_left_out():
    a = acceptance(sglang(1, 5), sglang(3, 27, length=("NaN", "+Inf", 2.0)), Sent(2, 2, 22))
    assert a.gauge == {"length": 2.0}
