"""Sums, alpha, intervals and the file, on records made by hand."""

from __future__ import annotations

import json
import math
import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from headtrain.decode.generate import Round
from headtrain.evaluate.report import html_report, tables
from headtrain.evaluate.results import (
    Difference,
    Evaluation,
    PromptResult,
    Side,
    alpha_counts,
    bootstrap_tau,
    cumulative,
)
from headtrain.evaluate.sweep import Sweep


def result(route, number, rounds, difference=None, plain=2.0, speculative=1.0):
    tokens = 1 + sum(r.committed for r in rounds)
    return PromptResult(
        id=f"{route}-{number}",
        route=route,
        prompt_tokens=10,
        plain=Side(tokens, "length", 0.5, 0.0, plain, 0.0),
        speculative=Side(tokens, "length", 0.5, 0.25 * speculative, 0.5 * speculative, 0.25 * speculative),
        rounds=rounds,
        difference=difference,
    )


def evaluation(results, k=3, temperature=0.0, tree="", mode="decode"):
    return Evaluation(
        target={"name": "tiny <target>", "dtype": "float32"},
        drafter={"kind": "some", "family": "head", "label": "the head", "parameters": 5, "weights": "w1"},
        settings={"k": k, "tree": tree, "temperature": temperature, "max_new_tokens": 32, "mode": mode},
        versions={"torch": "x"},
        results=results,
    )


ROUNDS = [Round(3, 3, 4), Round(3, 1, 2), Round(3, 0, 1), Round(2, 2, 3), Round(1, 1, 1), Round(0, 0, 1)]


def some():
    return evaluation(
        [
            result("chat", 1, ROUNDS),
            result("code", 1, [Round(3, 2, 3)] * 4, Difference(5, 7, 8, 3e-6)),
            result("chat", 2, [Round(3, 0, 1)] * 3),
            result("empty", 1, []),
        ]
    )


def test_alpha_is_conditional_and_counts_only_what_was_offered():
    """Reference: walk each round token by token, as a decoder does."""
    offered, accepted = [0, 0, 0], [0, 0, 0]
    for r in ROUNDS:
        for j in range(r.drafted):
            offered[j] += 1
            if j >= r.accepted:
                break
            accepted[j] += 1
    assert alpha_counts(ROUNDS, 3) == list(zip(accepted, offered, strict=True)) == [(4, 5), (2, 3), (1, 1)]
    assert cumulative([(4, 5), (2, 3), (1, 1)]) == pytest.approx([0.8, 0.8 * 2 / 3, 0.8 * 2 / 3])
    assert cumulative([(1, 2), (0, 0), (0, 0)]) == [0.5, 0.0, 0.0]


def test_tau_is_one_plus_the_cumulatives_where_no_round_is_cut():
    rounds = [Round(3, a, a + 1) for a in (0, 0, 1, 2, 3, 3, 1)]
    s = evaluation([result("x", 1, rounds)]).summary()
    assert s.tau == pytest.approx(1 + sum(s.cumulative)) == pytest.approx(17 / 7)


def test_summaries_pool_sums():
    e = some()
    assert e.routes == ["chat", "code", "empty"]
    chat, code, empty, whole = e.summaries()
    assert chat.tau == (12 + 3) / 9 and code.tau == 3.0 and whole.tau == (12 + 12 + 3) / 13
    assert (chat.prompts, code.prompts, whole.prompts) == (2, 1, 4)
    assert whole.tokens == 13 + 13 + 4 + 1
    assert whole.alpha == [
        tuple(map(sum, zip(*pair, strict=True))) for pair in zip(chat.alpha, code.alpha, strict=True)
    ]
    assert (chat.identical, code.identical, whole.identical) == (2, 0, 3)
    assert chat.plain_rate == 15 / 4.0 and chat.speculative_rate == 15 / 2.0 and chat.speedup == 2.0
    assert chat.shares == {"draft": 0.25, "verify": 0.5, "other": 0.25}
    assert math.isnan(empty.tau) and empty.alpha == [(0, 0)] * 3
    assert evaluation([result("x", 1, ROUNDS)], temperature=0.7).summary().identical is None


def test_the_interval_is_seeded_and_contains_tau():
    results = [result("x", n, [Round(3, (n + i) % 4, (n + i) % 4 + 1) for i in range(n + 1)]) for n in range(12)]
    low, high = bootstrap_tau(results, seed=1)
    assert (low, high) == bootstrap_tau(results, seed=1) != bootstrap_tau(results, seed=2)
    tau = evaluation(results).summary().tau
    assert low < tau < high < low + 1
    same = [result("x", n, [Round(3, 1, 2)] * 5) for n in range(6)]
    assert bootstrap_tau(same) == (2.0, 2.0)
    for few in ([result("x", 1, [])], same[:2], [*same[:2], result("x", 1, [])]):  # too few to claim anything
        assert all(map(math.isnan, bootstrap_tau(few)))


def sweep(*cases) -> Sweep:
    return Sweep(cases[0].target, cases[0].versions, list(cases))


def test_the_file_gives_the_sweep_back(tmp_path):
    e = sweep(some(), evaluation([result("x", 1, ROUNDS)], mode="replay"))
    text = json.dumps(e.to_dict(), allow_nan=False)
    again = Sweep.from_dict(json.loads(text))
    assert again == e and again.to_dict() == e.to_dict()
    e.write(tmp_path / "eval.json")
    assert Sweep.read(tmp_path / "eval.json") == e
    with pytest.raises(ValueError, match="format 99"):
        Sweep.from_dict({"format": 99})
    whole = some().to_dict()
    (first, *others) = whole["results"]
    changes = [
        {"route": None}, {"rounds": [[3, 4, 5, 3]]}, {"rounds": [[-1, 0, 1, 0]]}, {"rounds": [[3, 1, math.nan, 3]]},
        {"rounds": [[3, 1, 3, 3]]}, {"plain": {**first["plain"], "verify": -1.0}}, {"difference": {"gap": 1}},
    ]  # fmt: skip
    edited = [
        {**whole, "settings": {**whole["settings"], "k": 0}},
        {**whole, "settings": {**whole["settings"], "temperature": math.nan}},
        {**whole, "settings": {"k": 3, "temperature": 0.0}},
        {**whole, "drafter": {"kind": "some"}},
        *({**whole, "results": [{**first, **change}, *others]} for change in changes),
    ]
    for case in edited:
        with pytest.raises(ValueError, match="damaged"):
            Sweep.from_dict({**e.to_dict(), "cases": [case]})
    for target in (None, {}):
        with pytest.raises(ValueError, match="damaged"):
            Sweep.from_dict({**e.to_dict(), "target": target})
    unknown = {**first, "difference": {"position": 1, "plain": 2, "speculative": 3, "gap": None}}
    again = Sweep.from_dict({**e.to_dict(), "cases": [{**whole, "results": [unknown]}]})
    assert math.isnan(again.cases[0].results[0].difference.gap) and printed(tables(again))
    for damage in (
        {"cases": []},
        {"cases": [{}]},
        {"cases": 3},
        {"cases": [{**some().to_dict(), "results": [{"id": "x"}]}]},
    ):
        with pytest.raises(ValueError, match="damaged|without a case"):
            Sweep.from_dict({**e.to_dict(), **damage})
    (tmp_path / "eval.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Sweep.read(tmp_path / "eval.json")


def test_acceptance_is_what_an_export_reads():
    """Of the first head's deepest greedy chain."""
    from headtrain.export.core import read_acceptance

    e = some()
    others = [
        evaluation([result("x", 1, ROUNDS)], **more)
        for more in ({"k": 2}, {"temperature": 0.5, "k": 9}, {"tree": "t", "k": 8})
    ]
    read = read_acceptance(sweep(others[1], others[0], e, others[2]).to_dict())
    assert read == e.acceptance() and list(read) == ["chat", "code", "all"]  # nothing was decoded on `empty`
    assert read["chat"].alpha == e.summary("chat").alpha and read["chat"].prompts == 2 and read["chat"].k == 3


def test_an_export_takes_the_acceptance_of_its_own_head_only():
    from headtrain.export.core import read_acceptance

    mine = sweep(some()).to_dict()
    assert read_acceptance(mine, "w1").keys() == read_acceptance(mine).keys() != set()
    with pytest.warns(UserWarning, match="measured another head"):
        assert read_acceptance(mine, "w2") == {}
    lookup = some()
    lookup.drafter = {"kind": "ngram", "family": "lookup", "label": "n-gram lookup", "parameters": 0}
    with pytest.warns(UserWarning, match="measured another head"):
        assert read_acceptance(sweep(lookup).to_dict(), "w1") == {}


def test_names_from_files_are_no_markup():
    strange = ["[/foo]", "[bold]code", "all (route)", "x" * 300]
    e = evaluation([result(route, 1, ROUNDS, Difference(1, 2, 3, 0.5)) for route in strange])
    for shown in (sweep(e), sweep(e, evaluation(e.results, k=2))):
        text = printed(tables(shown))
        assert "[/foo]" in text and "[bold]" in text


def test_two_drafters_of_one_kind_are_told_apart():
    a, b = some(), some()
    a.drafter = {**a.drafter, "name": "some of a", "label": "the some of a head", "weights": "wa"}
    e = sweep(a, evaluation(a.results, k=2), b, evaluation(b.results, k=2))
    e.cases[1].drafter = a.drafter
    assert "some of a, chain of 3" in printed(tables(e)) and "some, chain of 3" in printed(tables(e))
    assert html_report(e).count(">some of a<") >= 1


def test_long_chains_show_their_first_depths():
    e = evaluation([result("x", 1, [Round(40, 40, 41)])], k=40)
    assert "α10" in printed(tables(sweep(e))) and "α11" not in printed(tables(sweep(e))) + html_report(sweep(e))
    assert len(e.summary().alpha) == 40


def test_what_was_not_timed_claims_no_speed():
    s = evaluation([result("x", 1, ROUNDS, speculative=0.0)], mode="replay").summary()
    assert math.isnan(s.speedup) and math.isnan(s.draft_step) and s.identical is None and s.tau > 1


def test_the_table_fits_a_terminal_and_says_all():
    long = [result("quite a long route name", n, [Round(5, 5, 6), Round(5, 0, 1)] * 9) for n in range(120)]
    e = evaluation(long + [result("b", 1, [Round(5, 4, 5)], Difference(5, 7, 8, 3e-6))], k=5)
    text = printed(tables(sweep(e)))
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text and "±0.…" not in text
    assert re.search(r"all +121 +3\.5\d ±0\.\d\d +\.5\d +1\.0 ", text) and "120/121" in text
    assert "…" not in text and re.search(r"^ quite a long route 120 .*\n name +$", text, re.M)
    assert "120/121" in text and "b-1: the texts part at new token 5" in text and "3e-06" in text


def test_names_are_whole_where_there_is_room():
    long = [result("summarise a long letter", n, ROUNDS) for n in range(3)]
    one, many = sweep(evaluation(long)), sweep(evaluation(long), evaluation(long, k=2))
    assert "summarise a long letter" in printed(tables(one), 120)
    assert "summarise a long letter" in printed(tables(many), 120)
    narrow = printed(tables(many))
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80


def test_a_target_is_called_as_it_was_asked_for():
    e = sweep(some())
    assert "some on tiny <target> (float32), chain of 3, greedy, up to 32 new tokens" in " ".join(
        printed(tables(e), 200).split()
    )
    for case in (e, e.cases[0]):
        case.target = {**case.target, "folder": "targets/t"}
    told = "targets/t (converted from tiny <target>, float32)"
    assert f"some on {told}, chain of 3" in " ".join(printed(tables(e), 200).split())
    e.cases.append(e.cases[0])
    assert f"{told}, 4 prompts" in " ".join(printed(tables(e), 200).split())


def test_stored_rows_have_no_limit_of_new_tokens():
    text = printed(tables(sweep(evaluation(some().results, mode="stored"))), 200)
    assert "new tokens" not in text and "nothing decoded" in text


def printed(renderables, width: int = 80) -> str:
    file = StringIO()
    console = Console(file=file, width=width)
    for renderable in renderables:
        console.print(renderable)
    return file.getvalue()


def test_many_cases_are_set_beside_each_other():
    e = sweep(some(), evaluation(some().results, k=2), evaluation(some().results, tree="dynamic tree of 9 nodes"),
              evaluation(some().results, mode="replay", temperature=0.0))  # fmt: skip
    text = printed(tables(e))
    assert "some, chain of 3 " in text and "some, chain of 3 (replay)" in text and "dynamic tree of 9 nodes" in text
    assert max(map(len, text.splitlines())) <= 80
    page = html_report(e)
    assert "tau over k" in page and "Measured speed-up over k" in page and "All cases" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(svg)


def test_the_page_is_whole_and_escaped():
    page = html_report(sweep(some()))
    assert "tiny &lt;target&gt;" in page and "<target>" not in page
    assert "<script" not in page and not re.search(r"(src|href)=", page) and 'name="viewport"' in page
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(svgs) == 2
    for svg in svgs:
        ElementTree.fromstring(svg)
    assert svgs[0].count("<rect") == 3  # chat, code, all: nothing was decoded on `empty`
    assert "Nothing was decoded" in html_report(sweep(evaluation([result("empty", 1, [])])))
