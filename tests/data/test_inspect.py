from __future__ import annotations

import io

import tiny
from chats import chat
from rich.console import Console

from headtrain.config import DataSection
from headtrain.data.chat import render_all
from headtrain.data.inspect import render_inspection

TALK = chat("Hello! [bold]", "I am fine,\nnaïve 🙂.", route="chat")
MARKED = "<|im_start|>user↵\nHello! [bold]<|im_end|>↵\n<|im_start|>assistant↵\n⟦I am fine,↵\nnaïve 🙂.<|im_end|>⟧\n"


def shown(limit: int, rows: int = 1, **options) -> str:
    tok = tiny.tokenizer()
    made, report = render_all(tok, [TALK] * rows, DataSection(train=["x"]))
    out = io.StringIO()
    render_inspection(tok, made, Console(file=out, width=20, **options), limit, [report])
    return out.getvalue()


def test_without_colour_supervised_runs_are_in_brackets():
    text = shown(1)
    assert MARKED in text and "\x1b" not in text
    assert text.startswith("row 1 of 1  t.jsonl:1  chat\n")
    assert MARKED in shown(1, force_terminal=True, no_color=True)


def test_with_colour_they_are_green_and_the_rest_is_dim():
    text = shown(1, force_terminal=True, color_system="standard")
    assert "⟦" not in text
    assert "\x1b[32mI am fine," in text.replace("\x1b[0m", "") and "\x1b[1;32m<|im_end|>" in text
    assert "\x1b[2muser" in text and "\x1b[2;36m<|im_start|>" in text


def test_counts_limit_and_reports():
    text = shown(2, rows=5)
    assert text.count("⟦") == 2 and "... and 3 more rows" in text
    assert text.count("tokens, ") == 3 and "5 conversations, 5 rows" in text
    tok = tiny.tokenizer()
    rows, _ = render_all(tok, [TALK], DataSection(train=["x"]))
    supervised = sum(t > 0 for t in rows[0].turn)
    assert f"{len(rows[0])} tokens, {supervised} supervised ({supervised / len(rows[0]):.0%}), 1 turns" in text
    assert "⟦" not in shown(0)
