from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from chats import QWEN3, chat
from torch import nn

from headtrain.config import DataSection
from headtrain.data import DataError
from headtrain.data import regenerate as module
from headtrain.data.chat import Renderer, prompt_ids, render, render_all
from headtrain.data.regenerate import regenerate
from headtrain.data.sources import read_conversations

EOS = 2
PROMPTS = ["Hello!", "And the fox?", "A draft head proposes tokens; the target verifies them.", "Why", "1 2 3"]
SETTINGS = {"max_new_tokens": 12, "temperature": 1.0, "batch_size": 2, "seed": 3, "model_name": "tiny"}


def talker(allowed: list[int] | None = None, eos: float = -2.0) -> nn.Module:
    """A tiny random target that says whole words only, so that its text gives its tokens again, unlike a random
    target's."""
    net, tok = tiny.model(tie_word_embeddings=False), tiny.tokenizer()
    words = [" the", " target", " fox", " jumps", " dog", " quick", " a", " is"]
    if allowed is None:
        ids = [tok(w, add_special_tokens=False)["input_ids"] for w in words]
        allowed = [i[0] for i in ids if len(i) == 1] + [EOS]
    old = net.lm_head.weight.data
    net.lm_head = nn.Linear(64, 384)
    net.lm_head.weight.data = old
    net.lm_head.bias.data.fill_(-1e4)
    net.lm_head.bias.data[allowed] = 0.0
    net.lm_head.bias.data[EOS] = eos if EOS in allowed else -1e4
    return net.eval()


def conversations(prompts=PROMPTS):
    return [chat(p, id=f"c{n}", route="chat", source=f"p:{n}") for n, p in enumerate(prompts)]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own_and_read_back_as_its_tokens(tmp_path):
    net, tok, out = talker(), tiny.tokenizer(), tmp_path / "out.jsonl"
    report = regenerate(net, tok, conversations(), out, **{**SETTINGS, "temperature": 0.0})
    assert (report.wanted, report.written, report.skipped) == (5, 5, 0) and not report.dropped
    assert not (tmp_path / "out.jsonl.partial").exists()
    found, _ = read_conversations([str(out)], bad_lines="stop")
    rows, _ = render_all(tok, found, DataSection(train=["x"]))
    for number, (text, row, line) in enumerate(zip(PROMPTS, rows, lines(out), strict=True)):
        prompt = prompt_ids(tok, chat(text))
        ids, end = list(prompt), None  # the slow reference: one forward a token, no cache, no padding
        while len(ids) - len(prompt) < 12 and end is None:
            token = int(net(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            end = token if token == EOS else None
        assert line["id"] == f"c{number}" and line["route"] == "chat" and line["generated_by"]["sample"] == 0
        assert line["generated_by"]["finish"] == ("stop" if end else "length")
        assert row.ids == ids + ([] if end else [EOS])
        assert row.turn == [0] * len(prompt) + [1] * (len(ids) - len(prompt)) + ([] if end else [0])


def test_both_ways_to_finish(tmp_path):
    tok = tiny.tokenizer()
    report = regenerate(talker(eos=5.0), tok, conversations(), tmp_path / "a.jsonl", **SETTINGS, samples=3)
    assert report.finish["stop"] and report.dropped["empty answer"]
    assert "empty answer" in "\n".join(report.lines())
    report = regenerate(talker(eos=-1e4), tok, conversations(), tmp_path / "b.jsonl", **SETTINGS)
    assert report.finish == {"length": 5}
    for line in lines(tmp_path / "b.jsonl"):
        assert line["truncated"] and line["generated_by"] == {
            "model": "tiny", "temperature": 1.0, "top_p": 1.0, "seed": 3, "max_new_tokens": 12, "sample": 0,
            "finish": "length",
        }  # fmt: skip


def test_stopping_and_resuming_changes_nothing(tmp_path):
    net, tok, whole = talker(), tiny.tokenizer(), tmp_path / "whole.jsonl"
    options = {**SETTINGS, "samples": 2}
    regenerate(net, tok, conversations(), whole, **options)
    text = whole.read_text()
    assert [(x["id"], x["generated_by"]["sample"]) for x in lines(whole)] == [
        (f"c{n}", s) for n in range(5) for s in range(2)
    ]
    torch.manual_seed(99)  # not the caller's generator
    state = torch.get_rng_state()
    out = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    rows = text.splitlines(keepends=True)
    partial.write_text(rows[7] + rows[2] + rows[4][:40])  # two answers, out of order, and a half-written line
    report = regenerate(net, tok, conversations(), out, **options)
    assert out.read_text() == text and report.skipped == 2 and not partial.exists()
    assert torch.equal(state, torch.get_rng_state())
    out.write_text(text[: len(text) - 30])  # the output itself was cut off
    assert regenerate(net, tok, conversations(), out, **options).skipped == 9
    assert out.read_text() == text


def test_nothing_is_generated_twice(tmp_path, monkeypatch):
    net, tok, out = talker(), tiny.tokenizer(), tmp_path / "out.jsonl"
    regenerate(net, tok, conversations(), out, **SETTINGS)
    options = {**SETTINGS, "seed": 5}
    report = regenerate(talker(eos=4.0), tok, conversations(), tmp_path / "b.jsonl", **options)
    assert report.dropped and report.written  # dropped ones are not tried again
    assert [x["dropped"] for x in lines(tmp_path / "b.jsonl.dropped")] == ["empty answer"] * report.dropped.total()
    monkeypatch.setattr(net, "generate", lambda **_: pytest.fail("generated again"))
    assert regenerate(net, tok, conversations(), tmp_path / "b.jsonl", **options).skipped == 5
    assert regenerate(net, tok, conversations(), out, **SETTINGS).skipped == 5


def test_other_settings_prompts_or_files_are_refused(tmp_path):
    net, tok, out = talker(), tiny.tokenizer(), tmp_path / "out.jsonl"
    regenerate(net, tok, conversations(), out, **SETTINGS)
    before = out.read_text()
    for changes, message in (
        ({"temperature": 0.5}, "temperature=1.0, now it is 0.5"),
        ({"seed": 4}, "seed=3, now it is 4"),
        ({"model_name": "other"}, "model='tiny', now it is 'other'"),
        ({"max_new_tokens": 13}, "max_new_tokens=12, now it is 13"),
        ({"dtype": "bfloat16"}, "dtype=None, now it is 'bfloat16'"),
    ):
        with pytest.raises(DataError, match=message):
            regenerate(net, tok, conversations(), out, **{**SETTINGS, **changes})
    with pytest.raises(DataError, match="'c4'.*not in the input"):
        regenerate(net, tok, conversations()[:4], out, **SETTINGS)
    assert out.read_text() == before
    out.write_text('{"id": "c0", "messages": []}\n')
    with pytest.raises(DataError, match="out.jsonl:1 is no answer"):
        regenerate(net, tok, conversations(), out, **SETTINGS)
    with pytest.raises(DataError, match="temperature 0"):
        regenerate(net, tok, conversations(), out, **{**SETTINGS, "temperature": 0.0}, samples=2)
    with pytest.raises(DataError, match="p:0: no user turn"):
        regenerate(net, tok, [chat(source="p:0")], out, **SETTINGS)


def test_an_edited_prompt_is_answered_again(tmp_path):
    net, tok, out = talker(), tiny.tokenizer(), tmp_path / "out.jsonl"
    regenerate(net, tok, conversations(), out, **SETTINGS)
    edited = conversations(["Hello, fox!", *PROMPTS[1:]])
    assert regenerate(net, tok, edited, out, **SETTINGS).skipped == 4
    assert lines(out)[0]["messages"][0]["content"] == "Hello, fox!"


def test_the_last_answer_is_replaced_and_ids_that_come_twice_are_told_apart(tmp_path):
    net, tok, out = talker(), tiny.tokenizer(), tmp_path / "out.jsonl"
    given = [chat("Hello!", "old", "Why", "older", id="same"), chat("Hello!", "old", id="same")]
    regenerate(net, tok, given, out, **SETTINGS)
    first, second = lines(out)
    assert [m["content"] for m in first["messages"][:3]] == ["Hello!", "old", "Why"] and len(first["messages"]) == 4
    assert first["messages"][-1]["content"] != "older" and len(second["messages"]) == 2
    assert (first["id"], second["id"]) == ("same", "same~2")


def test_spellings_that_the_tokenizer_never_writes_are_cut(tmp_path):
    """The target says 'f' 'o' 'x', which the tokenizer reads as other tokens: what comes before is kept."""
    tok = tiny.tokenizer()
    f, o = (tok.convert_tokens_to_ids(c) for c in "fo")
    the = tok(" the", add_special_tokens=False)["input_ids"]
    assert len(the) == 1 and tok("fo", add_special_tokens=False)["input_ids"] != [f, o]
    renderer = Renderer(tok)
    task = module._Task(0, ("a", 0), chat("Hello!"), prompt_ids(tok, chat("Hello!")))
    line = module._line(renderer, task, module._Answer(the * 10 + [f, o] + the, EOS), {})
    assert line["messages"][-1]["content"].startswith(" the" * 9) and "o the" not in line["messages"][-1]["content"]
    assert line["truncated"] and line["generated_by"]["finish"] == "cut"
    row = render(tok, read_back(tmp_path, line))
    kept = sum(row.turn)
    assert kept >= 9 and row.ids[len(task.prompt) :][:kept] == (the * 10 + [f, o])[:kept]
    line = module._line(renderer, task, module._Answer(the * 3 + [f, o] + the, EOS), {})
    assert "does not give the generated tokens" in line["dropped"]


def read_back(tmp_path: Path, line: dict):
    path = tmp_path / "line.jsonl"
    path.write_text(json.dumps(line) + "\n")
    return read_conversations([str(path)], bad_lines="stop")[0][0]


def test_limits_inside_a_character_and_other_stops(tmp_path):
    tok = tiny.tokenizer()
    renderer = Renderer(tok)
    task = module._Task(0, ("a", 0), chat("Hello!"), prompt_ids(tok, chat("Hello!")))
    the = tok(" the", add_special_tokens=False)["input_ids"]
    face = tok(" the🙂", add_special_tokens=False)["input_ids"]
    line = module._line(renderer, task, module._Answer(face[:-1], None), {})
    assert line["messages"][-1]["content"] == " the" and line["generated_by"]["finish"] == "length"
    line = module._line(renderer, task, module._Answer(the, 0), {})  # <|endoftext|>, not the template's end of turn
    assert line["truncated"] and line["generated_by"]["finish"] == "stop"
    assert render(tok, read_back(tmp_path, line)).turn[-1] == 0
    line = module._line(renderer, task, module._Answer(the, EOS), {})
    assert "truncated" not in line and render(tok, read_back(tmp_path, line)).turn[-1] == 1


def test_raw_answers_survive_templates_that_change_answers(tmp_path):
    tok = tiny.tokenizer(template=QWEN3)
    report = regenerate(talker(), tok, conversations(), tmp_path / "a.jsonl", **SETTINGS)
    assert report.written == 5 and all(
        x["messages"][-1]["content"].startswith(" ") for x in lines(tmp_path / "a.jsonl")
    )


def test_the_models_own_sampling_settings_are_left_out(tmp_path):
    net, tok = talker(eos=-1e4), tiny.tokenizer()
    regenerate(net, tok, conversations(), tmp_path / "a.jsonl", **SETTINGS)
    net.generation_config.top_k, net.generation_config.repetition_penalty = 1, 5.0
    regenerate(net, tok, conversations(), tmp_path / "b.jsonl", **SETTINGS)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    assert net.generation_config.top_k == 1  # put back


def test_prompts_over_the_window(tmp_path):
    net, tok = talker(), tiny.tokenizer()
    net.config.max_position_embeddings = 60
    report = regenerate(net, tok, conversations(["Hello!", "word " * 40]), tmp_path / "a.jsonl", **SETTINGS)
    assert report.written == 1 and report.dropped == {"prompt and max_new_tokens exceed the target's window": 1}
    with pytest.raises(DataError, match=r"no answer could be used(.*\n)*.*window"):
        regenerate(net, tok, conversations(["word " * 40]), tmp_path / "b.jsonl", **SETTINGS)
