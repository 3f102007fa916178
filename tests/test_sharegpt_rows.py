"""Committed answers find their prompts in a ShareGPT file that is cut off at its end, and no others."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from headtrain.data.sources import read_conversations

SCRIPT = Path(__file__).parent.parent / "scripts" / "sharegpt_rows.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("sharegpt_rows", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = [("a", "one?", "stop"), ("b", "two?", "length"), ("changed", "before?", "stop"), ("lost", "x?", "stop")]
    with gzip.open(tmp_path / "answers.jsonl.gz", "wt", encoding="utf-8") as file:
        for name, prompt, finish in answers:
            digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
            line = {"id": name, "prompt_sha256": digest, "answer": f"answer {name}", "finish": finish}
            file.write(json.dumps(line) + "\n")
    monkeypatch.setattr(module, "ANSWERS", tmp_path / "answers.jsonl.gz")
    return module


def sharegpt(path, *prompts) -> Path:
    turns = [
        {"id": name, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "theirs"}]}
        for name, text in prompts
    ]
    path.write_text(json.dumps(turns)[:-9], encoding="utf-8")  # as the package's file: cut off
    return path


def test_rows_are_the_prompts_with_the_targets_answers(script, tmp_path, capsys):
    file = sharegpt(
        tmp_path / "s.json", ("z", "zero?"), ("a", " one? \n"), ("changed", "after?"), ("b", "two?"), ("cut", "?")
    )
    script.main([str(tmp_path / "deep" / "rows.jsonl"), "--json", str(file)])
    rows, _ = read_conversations([str(tmp_path / "deep" / "rows.jsonl")])
    assert [(row.id, row.route, row.truncated) for row in rows] == [("a", "sharegpt", False), ("b", "sharegpt", True)]
    assert [[m["content"] for m in row.messages] for row in rows] == [["one?", "answer a"], ["two?", "answer b"]]
    assert "2 rows" in (said := capsys.readouterr().out) and "2 answers without their prompt" in said


def test_a_file_without_the_prompts_is_refused(script, tmp_path):
    with pytest.raises(SystemExit, match="none of the 4 answers belongs to a conversation"):
        script.main(
            [str(tmp_path / "rows.jsonl"), "--json", str(sharegpt(tmp_path / "s.json", ("z", "?"), ("y", "?")))]
        )
    assert not (tmp_path / "rows.jsonl").exists()


def test_every_committed_answer_has_what_the_script_reads():
    with gzip.open(SCRIPT.parent.parent / "data" / "sharegpt" / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert len({line["id"] for line in lines}) == len(lines) == 1722
    assert all(line["answer"].strip() and line["finish"] in ("stop", "length") for line in lines)
