"""A server that sends what no server should: each becomes a failed record, a note or a refusal, never a traceback."""

from __future__ import annotations

import json
import time

import pytest
from chat_server import ChatServer
from test_server import ONE, ask, command, only, prompts

from headtrain.commands.server import read_run
from headtrain.evaluate.client import ChatPrompt, ServerError
from headtrain.evaluate.server import Load, measure


def test_what_a_strange_server_streams_is_a_failed_record():
    delta = b'{"choices": [{"delta": %s}]}'
    strange = {
        "no usage": [
            b'{"usage": %s}' % usage
            for usage in (
                b'"3"',
                b"[1]",
                b"3",
                b'{"completion_tokens": true}',
                b'{"completion_tokens": 3.0}',
                b'{"completion_tokens": "3"}',
                b'{"completion_tokens": 0}',
                b'{"completion_tokens": 1' + b"0" * 400 + b"}",
            )
        ],
        "malformed stream": [
            delta % b'{"content": [{"type": "text", "text": "hi"}]}',
            delta % b'{"reasoning": {"a": 1}}',
            delta % b'{"content": 3}',
            delta % b'"x"',
            delta % b'{"tool_calls": [1]}',
            b'{"choices": [{"delta": {}, "finish_reason": 7}]}',
            b'{"choices": 1}',
            b"[1, 2]",
            b"[" * 100_000,
            b'{"usage": {"completion_tokens": 1' + b"0" * 5000 + b"}}",
            b"x" * (5 << 20),
        ],
    }
    faults = {f"{kind} {n}": event for kind, events in strange.items() for n, event in enumerate(events)}
    with ChatServer(faults=faults) as server:
        found = only(ask(server, ["fine", *faults], Load((1,), timeout=10.0)))
    for name, record in found.items():
        assert record.failure == (None if name == "fine" else name.rpartition(" ")[0]), (name, record)
        assert len(record.detail) <= 200
    endless = list(faults)[-1]
    assert "a line of more than 4194304 bytes" in found[endless].detail


def test_a_prompt_that_cannot_be_sent_costs_its_request_alone():
    bad = ChatPrompt([{"role": "user", "content": "b"}], [{"x": float("nan")}], "r", "bad")
    with ChatServer() as server:
        found = only(measure(server.url, [bad, *prompts("a")], ONE, quiet=True))
    assert found["bad"].failure == "unusable" and "ValueError" in found["bad"].detail and found["a"].failure is None


def test_half_characters_and_strange_counts_can_be_stored(tmp_path):
    event = '{"choices": [{"delta": {"content": "%s"}}], "usage": {"completion_tokens": 5, "prompt_tokens": "many"}}'
    faults = {"half": event % r"\ud83d!", "two": event % r"\ud83d\ude00"}
    pages = {"/version": json.dumps({"version": "\ud83d\x1b[1m"}), "/server_info": '{"version": {"a": [1]}}'}
    with ChatServer(faults={k: v.encode() for k, v in faults.items()}, pages=pages) as server:
        run = ask(server, list(faults), file=tmp_path / "server.json")
    found = only(read_run(tmp_path / "server.json"))
    assert found == only(run) and found["half"].text.endswith("\ufffd!") and found["two"].text.endswith("😀")
    assert found["half"].tokens == 5 and found["half"].prompt_tokens is None
    assert run.server["version"] == "\ufffd\ufffd[1m"


def test_a_page_that_drips_is_ended_by_the_timeout():
    load = Load((1,), timeout=0.5, requests=1)
    with ChatServer(drips=("/v1/models",)) as server:
        started = time.monotonic()
        with pytest.raises(ServerError, match="no server answers at .*not over after 0.5 s"):
            ask(server, load=load)
        assert time.monotonic() - started < 5
    with ChatServer(drips=("/version", "/server_info", "/metrics")) as server:
        started = time.monotonic()
        (level,) = ask(server, load=load).levels
        assert time.monotonic() - started < 10
    assert level.records[0].failure is None and "/metrics: timeout not over" in level.acceptance.notes[0]


@pytest.mark.parametrize("page", ['{"data": [{"id": 1}, {"id": 2}]}', '{"data": 1}', '{"data": [[]]}', "[" * 100_000])
def test_a_strange_list_of_models_is_refused(page):
    with ChatServer(pages={"/v1/models": page}, models=None) as server, pytest.raises(ServerError, match="no list of"):
        ask(server)


def test_counters_that_are_none_cost_no_measurement():
    with ChatServer() as server:
        server.metrics = lambda: "vllm:request_success_total NaN\nvllm:generation_tokens_total +Inf\n"
        run = ask(server, load=Load((1,), requests=1))
    assert run.levels[0].complete and run.levels[0].acceptance.state == "unknown"


def test_markup_from_prompts_and_servers_is_printed_as_it_stands(tmp_path):
    """Routes, model, version, errors, folder and baseline: as table cells and as lines."""
    routes = ("[/foo]", "[bold]x", ":smile:")
    pages = {"/version": json.dumps({"version": "[/v]:smile:"})}
    with ChatServer(models=["[/old]"]) as plain:
        command(plain, tmp_path, "[red]plain", routes=routes)
    with ChatServer(models=["[bold]m"], pages=pages, faults={"b": b'{"error": "[/oops] \\u001b[31m"}'}) as server:
        baseline = str(tmp_path / "[red]plain" / "server.json")
        _, said = command(server, tmp_path, "[/run]", routes=routes, baseline=baseline)
    for route in routes:
        assert said.count(f" {route} ") == 2
    for text in ("[bold]m at http", "version [/v]:smile:;", "[/oops]", "/[/run]/server.json", "[/old] in the baseline"):
        assert text in said.replace("/ ", "/")
    assert "\x1b" not in said
