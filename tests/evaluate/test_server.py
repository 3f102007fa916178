"""A load on a real HTTP server: times against the server's own schedule, failures, addresses, keys, baselines."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time

import pytest
from chat_server import ChatServer
from rich.console import Console
from test_prometheus import vllm
from typer.testing import CliRunner

from headtrain.cli import app
from headtrain.commands.server import api_key, read_run, run_server, title
from headtrain.evaluate.client import Answer, ChatPrompt, ServerError
from headtrain.evaluate.goodput import Slo, summaries
from headtrain.evaluate.server import Load, load_chats, measure

ONE = Load(concurrency=(1,), max_tokens=16)


def prompts(*texts, route="chat"):
    return [ChatPrompt([{"role": "user", "content": text}], None, route, text) for text in texts]


def ask(server, texts=("a",), load=ONE, **more):
    return measure(server.url, prompts(*texts), load, quiet=True, **more)


def only(run):
    (level,) = run.levels
    return {record.prompt: record for record in level.records}


def test_times_are_the_servers_own_and_tokens_are_not_chunks():
    """The server writes 1, 3 and 5 tokens in three chunks with known waits. Loopback, a thread switch and a busy
    machine delay each arrival by far less than 100 ms; counting chunks would give four times the TPOT (200 ms)."""
    pieces = {"a": [(0.2, "one", 1), (0.3, " two three four", 3), (0.1, " five six seven eight nine", 5)]}
    with ChatServer(pieces=pieces) as server:
        record = only(ask(server, load=Load((1,), requests=1)))["a"]
    first, _, last = server.times["a"]
    assert record.failure is None and record.tokens == 9 and record.prompt_tokens == 7 and record.finish == "stop"
    assert record.text == "one two three four five six seven eight nine"
    assert record.tpot * 8 == pytest.approx(last - first, abs=0.1) and record.tpot == pytest.approx(0.05, abs=0.0125)
    assert 0.2 <= record.ttft <= 0.3  # after the wait, although a chunk with the role came at once
    assert 0.6 <= record.latency <= 0.8


def test_times_by_hand():
    """The role's chunk is no token; the finishing chunk stands for the end-of-turn token; the usage chunk is none."""
    answer = Answer(10.0)
    for now, delta, finish in ((10.5, {"role": "assistant", "content": ""}, None), (11.0, {"content": "a b"}, None)):
        answer.take(json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode(), now)
    answer.take(b'{"choices": [{"delta": {"reasoning": "c"}}], "usage": null}', 12.0)
    answer.take(b'{"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}', 13.0)
    answer.take(b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}', 13.5)
    answer.take(b"[DONE]", 14.0)
    record = answer.record(3, prompts("p")[0])
    assert (record.ttft, record.tpot, record.latency, record.tokens) == (1.0, 2.0 / 4, 4.0, 5)
    assert (record.index, record.text, record.finish) == (3, "a bc", "stop")
    answer.usage = {"completion_tokens": 1}
    assert answer.record(3, prompts("p")[0]).tpot is None  # nothing between tokens


def test_each_failure_is_a_record_of_its_kind():
    faults = {"500": 500, "drop": "drop", "garbage": "garbage", "end": "end", "error": "error", "count": "no usage"}
    with ChatServer(faults=faults) as server:
        found = only(ask(server, ["fine", *faults], Load((1,), requests=7), key="sk-secret"))
    kinds = {name: record.failure for name, record in found.items()}
    assert kinds == {
        "fine": None,
        "500": "http 500",
        "drop": "cut off",
        "garbage": "malformed stream",
        "end": "cut off",
        "error": "server error",
        "count": "no usage",
    }
    assert "finish_reason" in found["end"].detail and "engine died" in found["error"].detail
    assert found["500"].detail == '{"error": "broken: Bearer [API key]"}'
    assert all(r.tpot is None and r.ttft is None and r.tokens == 0 for r in found.values() if r.failure)
    # one warm-up request, seven requests, and the first of all: nothing was tried again
    assert len(server.seen) == 9


def test_a_request_that_hangs_is_ended_by_its_timeout():
    with ChatServer(faults={"hang": "hang"}) as server:
        run = measure(server.url, prompts("hang", "a"), Load((1,), timeout=0.5, requests=2), quiet=True)
    found = only(run)
    assert found["hang"].failure == "timeout" and "0.5 s" in found["hang"].detail and found["a"].failure is None


def test_line_ends_inside_a_text_do_not_cut_the_json():
    text = "a\u2028b\u0085c\x0bd\re\nf ü€😀"
    with ChatServer(pieces={"a": [(0, text, 4), (0, "!", 1)]}) as server:
        assert only(ask(server))["a"].text == text + "!"


def test_the_concurrency_is_reached_and_not_passed():
    slow = {str(n): [(0.1, "x", 1), (0.0, "y", 1)] for n in range(6)}
    with ChatServer(pieces=slow) as server:
        run = ask(server, list(slow), Load((1, 3), requests=6))
        assert server.most == 3
    assert [(level.concurrency, level.peak, len(level.records)) for level in run.levels] == [(1, 1, 6), (3, 3, 6)]
    # six waits of 0.1 s one after the other, and by three at once
    assert run.levels[0].seconds >= 0.6 and 0.2 <= run.levels[1].seconds < 0.5


def test_the_order_is_fixed_by_the_seed_and_takes_every_prompt_before_any_again():
    given = prompts(*"abcdefgh")
    order = [p.id for p in Load(seed=1).order(given, 8)]
    assert len(order) == 16 and sorted(order[:8]) == sorted(order[8:]) == list("abcdefgh")
    assert order == [p.id for p in Load(seed=1).order(given, 8)] != [p.id for p in Load(seed=2).order(given, 8)]
    assert len(Load().order(given, 2)) == 8 and len(Load(requests=3).order(given, 2)) == 3
    with ChatServer() as server:
        ask(server, list("abcdefgh"), Load((1,), seed=1))
    sent = [body["messages"][0]["content"] for body in server.seen[2:]]  # after the first of all and the warm-up
    assert sent == [p.id for p in Load(seed=1).order(given, 1)]


def test_what_is_sent():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    asked = ChatPrompt([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], [tool], "r", "1")
    with ChatServer() as server:
        measure(server.url, [asked], Load((1,), max_tokens=33, temperature=0.5, requests=1), quiet=True)
    assert server.seen[-1] == {
        "model": "tiny",
        "messages": asked.messages,
        "tools": [tool],
        "max_tokens": 33,
        "temperature": 0.5,
        "top_p": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.seen[1]["max_tokens"] == 8  # the warm-up is short
    with ChatServer() as server:
        run = ask(server, load=Load((1,), temperature=0.7, top_p=0.5, top_k=3))
    assert all((body["top_p"], body["top_k"]) == (0.5, 3) for body in server.seen)
    assert (run.settings["top_p"], run.settings["top_k"]) == (0.5, 3)
    assert "temperature 0.7, top_p 0.5, top_k 3, at most" in title(run)


def test_addresses():
    with ChatServer() as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url + "/v1/"):
            run = measure(url, prompts("a"), Load((1,), requests=1), quiet=True)
            assert run.server["url"] == server.url and run.levels[0].records[0].failure is None
        with pytest.raises(ServerError, match=r"http 404.*ends before /v1"):
            measure(server.url + "/api", prompts("a"), ONE, quiet=True)
        dead = server.url
    with pytest.raises(ServerError, match=r"no server answers at http://127"):
        measure(dead, prompts("a"), ONE, quiet=True)
    for bad in ("localhost:8000", "ftp://x", "http://", "http://host/v1?a=b"):
        with pytest.raises(ServerError, match="HOST:PORT"):
            measure(bad, prompts("a"), ONE, quiet=True)
    with pytest.raises(ServerError, match="--api-key-env") as caught:
        measure("http://me:hunter2@host:1", prompts("a"), ONE, quiet=True)
    assert "hunter2" not in str(caught.value)


def test_models():
    with ChatServer(models=["big", "small"]) as server:
        with pytest.raises(ServerError, match=r"2 models \(big, small\)"):
            ask(server)
        with pytest.raises(ServerError, match="big, small, not tiny"):
            ask(server, model="tiny")
        assert ask(server, model="small").server["model"] == "small" == server.seen[-1]["model"]
    with ChatServer(models=None) as server:
        assert ask(server, model="hidden").levels[0].records[0].failure is None
    with ChatServer(pages={"/v1/models": "<html>"}, models=None) as server, pytest.raises(ServerError, match="no list"):
        ask(server)


def test_a_server_without_usage_is_refused():
    with ChatServer(usage=False) as server, pytest.raises(ServerError, match="sends no usage block"):
        ask(server)
    with ChatServer(faults={"Hello": 503}) as server, pytest.raises(ServerError, match="first request.*http 503"):
        ask(server)


def test_bad_loads():
    for places in ((), (0,), (1, 1)):
        with pytest.raises(ServerError, match="concurrency"):
            Load(places)
    nan, inf = float("nan"), float("inf")
    bad = {"temperature": (inf, nan, -1), "timeout": (nan, -1, 0, inf), "top_p": (nan, 0, 1.5), "top_k": (-1,)}
    for name, values in {**bad, "max_tokens": (0,), "requests": (0,)}.items():
        for value in values:
            with pytest.raises(ServerError, match=f"{name} {value}: expected"):
                Load(**{name: value})
    with pytest.raises(ServerError, match="no prompts"):
        measure("http://x", [], ONE)


def test_versions_by_named_keys_only():
    pages = {
        "/version": '{"version": "0.32.0"}',
        "/server_info": json.dumps({"api_key": "sk-server", "speculative_algorithm": "NGRAM", "port": 1}),
    }
    with ChatServer(pages=pages) as server:
        told = ask(server).server
    assert told == {"url": server.url, "model": "tiny", "version": "0.32.0", "speculative_algorithm": "NGRAM"}


def test_acceptance_is_read_around_each_level():
    """Each answer of six tokens: one from prefill, two steps that accept two and one of their drafts of two."""
    with ChatServer() as server:

        def page():
            n = server.finished
            return vllm(n, server.tokens, 2 * n, 4 * n, 3 * n, (2 * n, n))

        server.metrics = page
        run = ask(server, "abc", Load((1, 2), requests=5))
    for level in run.levels:
        a = level.acceptance
        assert (a.state, a.drafts, a.alpha, a.tau, a.tau_all) == ("measured", 10, [(10, 10), (5, 10)], 2.5, 2.5)
        assert a.notes == []


def test_without_metrics_times_are_still_reported():
    with ChatServer() as server:
        (level,) = ask(server).levels
    assert level.acceptance.state == "unknown" and "/metrics: http 404" in level.acceptance.notes[0]
    assert level.records[0].ttft > 0


def test_every_level_is_stored_when_it_is_over(tmp_path):
    file, stored = tmp_path / "server.json", {}
    with ChatServer() as server:

        def look(_):
            if file.exists():
                run = read_run(file)
                stored[len(run.levels)] = (run.interrupted, [len(level.records) for level in run.levels])

        server.on_request = look
        run = ask(server, "abc", Load((1, 2, 3), requests=4), file=file)
    assert stored == {1: (True, [4]), 2: (True, [4, 4])}
    assert not run.interrupted and read_run(file).to_dict() == run.to_dict() and len(run.levels) == 3


def test_ctrl_c_keeps_what_was_measured():
    with ChatServer(faults={"last": "hang"}) as server:

        def interrupt(body):
            if body["messages"][0]["content"] == "last" and body["max_tokens"] == 16:
                os.kill(os.getpid(), signal.SIGINT)

        server.on_request = interrupt
        texts = ["last", *"abc"]
        load = next(x for s in range(99) if (x := Load((1, 2), 16, seed=s)).order(prompts(*texts), 1)[-1].id == "last")
        started = time.monotonic()
        run = ask(server, texts, load)
        assert time.monotonic() - started < 10  # not the timeout of the hanging request
    assert run.interrupted and len(run.levels) == 1 and not run.levels[0].complete
    assert sorted(r.prompt for r in run.levels[0].records) == list("abc")


def command(server, tmp_path, name="run", load=ONE, routes="xxy", **more):
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"id": t, "route": r, "messages": [{"role": "user", "content": t}]} for t, r in zip("abc", routes, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=io.StringIO(), width=100)
    *_, run = run_server(server.url, [str(file)], tmp_path / name, console, load=load, quiet=True, **more)
    return run, " ".join(console.file.getvalue().split())


def test_prompts_by_route(tmp_path):
    file = tmp_path / "p.jsonl"
    turns = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"))]
    rows = [{"messages": turns, "route": "x"}] * 3 + [{"messages": turns[:1]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_chats([str(file)], limit_per_route=2)
    assert [(p.messages, p.route) for p in found] == [(turns[:1], "x")] * 2 + [(turns[:1], "other")]


def test_against_a_stored_baseline(tmp_path):
    slow = {t: [(0, "one", 1), (0.2, " two three", 2)] for t in "abc"}
    fast = {t: [(0, "one", 1), (0.05, " two three", 2)] for t in "ab"} | {"c": [(0, "one", 1), (0.05, " 2 three", 2)]}
    with ChatServer(pieces=slow) as server:
        command(server, tmp_path, "plain")
    file = str(tmp_path / "plain" / "server.json")
    with ChatServer(pieces=fast) as server:
        run, said = command(server, tmp_path, baseline=file, slo=Slo(tpot_ms=1e6))
        assert "2/3" in said and "2/2" in said and "0/1" in said  # all, route x, route y
        ratio = float(said.split("1 all ")[-1].split("x")[0])
        assert 2 < ratio < 6  # 100 ms against 25 ms, with room for a busy machine
        assert f"-> {3 / run.levels[0].seconds:.2f}" in said
        assert json.loads((tmp_path / "run" / "server.json").read_text()) == run.to_dict()
        assert not list(tmp_path.rglob("*.tmp"))
        asked = len(server.seen)
        with pytest.raises(ServerError) as caught:
            command(server, tmp_path, baseline=file, load=Load((1,), max_tokens=8))
        assert "max_tokens: 8 here, 16 in the baseline" in str(caught.value)
        for other in ("nowhere.json", str(tmp_path / "prompts.jsonl")):
            with pytest.raises(ServerError):
                command(server, tmp_path, baseline=other)
        assert len(server.seen) == asked  # refused before any load


def test_against_a_second_server(tmp_path):
    with ChatServer(models=["plain"]) as plain, ChatServer(models=["tuned"]) as server:
        run, said = command(server, tmp_path, baseline=plain.url)
    assert "3/3" in said and "model: tuned here, plain in the baseline" in said
    stored = json.loads((tmp_path / "run" / "baseline.json").read_text())
    assert stored["server"]["url"] == plain.url and run.server["url"] == server.url


def test_the_api_key_is_sent_and_shown_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("THE_KEY", " sk-very-secret\n")
    with ChatServer(key="sk-very-secret", faults={"b": 500}) as server:
        _, said = command(server, tmp_path, api_key_env="THE_KEY")
        assert {h["Authorization"] for h in server.headers} == {"Bearer sk-very-secret"}
        monkeypatch.setenv("THE_KEY", "sk-wrong")
        with pytest.raises(ServerError, match=r"refuses the API key \(http 401\): invalid key Bearer \[API key\]"):
            command(server, tmp_path, api_key_env="THE_KEY")
    shown = said + (tmp_path / "run" / "server.json").read_text() + "".join(capfd.readouterr())
    assert "http 500" in said and "secret" not in shown
    with pytest.raises(ServerError, match="NO_SUCH.*not set"):
        api_key("NO_SUCH")
    monkeypatch.setenv("THE_KEY", "sk-ключ")
    with pytest.raises(ServerError, match="header") as caught:
        api_key("THE_KEY")
    assert "ключ" not in str(caught.value)


def test_what_is_printed(tmp_path):
    with ChatServer() as server:
        server.metrics = lambda: vllm(server.finished, server.tokens, speculates=False)
        _, said = command(server, tmp_path, load=Load((1, 4), requests=3), slo=Slo(ttft_ms=1e6))
    assert "concurrency 1: the server does not speculate" in said and "100%" in said
    assert "concurrency 4: only 3 requests were under way at once" in said


def test_a_route_named_as_the_total_is_no_total(tmp_path):
    with ChatServer() as server:
        run, said = command(server, tmp_path, routes=("all", "all", "x"))
    assert run.routes == ["all (route)", "x"] and run.levels[0].records[0].route != "all"
    rows = {s.route: s.requests for s in summaries(run, Slo())}
    assert rows == {"all (route)": 2, "x": 1, "all": 3} and "1 all (route) 2" in said


def test_requests_that_failed_show_in_the_exit_code(tmp_path):
    words = ["eval", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--concurrency", "1,2"]

    def coded(server, *more):
        whole = [*words, "--server", server.url, "--out", str(tmp_path / "out"), *more]
        return CliRunner().invoke(app, whole, env={"COLUMNS": "200"})

    with ChatServer() as server:
        command(server, tmp_path)  # writes the prompts a, b, c
        assert coded(server).exit_code == 0
    with ChatServer(faults={"b": 500}) as server, ChatServer() as sound:
        some = coded(server)
        run = read_run(tmp_path / "out" / "server.json")
        assert (
            some.exit_code == 1 and f"{len(run.failed)} of {run.requests} requests failed, the first b" in some.output
        )
        assert {r.prompt for r in run.failed} == {"b"} and "none" not in some.output
        assert coded(sound, "--baseline", server.url).exit_code == 1  # a second server's count, too
    with ChatServer(faults=dict.fromkeys("abc", 503)) as server:
        none = coded(server)
        assert isinstance(none.exception, ServerError)  # `cli.main` ends these with exit code 2
        assert re.search(
            r"none of 7 requests was answered; the first, [abc], failed with http 503", str(none.exception)
        )
        stored = tmp_path / "out" / "server.json"
        assert len(read_run(stored).failed) == 7 and "7 of 7 requests failed" in none.output  # written, and shown
        asked = len(server.seen)
        with pytest.raises(ServerError, match="none of 7 requests was answered"):
            command(server, tmp_path, load=Load((1, 2), max_tokens=4), baseline=str(stored))
        assert len(server.seen) == asked
        assert coded(server, "--baseline", server.url).exit_code != 0 and len(server.seen) < 2 * asked + 2
    assert "1 some failed" in " ".join(CliRunner().invoke(app, ["eval", "--help"]).output.split())
