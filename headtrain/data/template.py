"""A chat template as a function from conversations to text and the exact places of the assistant's turns in it.

Everything here is in characters; ``chat`` maps characters to tokens. No string is ever searched for in a
conversation: places come from the template's own generation tags, or from the lengths of renderings of prefixes.

Where a turn is, without tags. For the assistant message i, P = template(messages[:i], generation prompt) is what a
server feeds the target, and F = template(messages[:i+1]). If F starts with P, the turn as served is F[len(P):] up to
its end-of-turn token: the first special token of the template's closing text (the line break that ChatML writes
after it is not supervised: the target stops before it). In the text T of the whole conversation the turn counts

* whole, where T starts with P and the turn as served;
* without its head, where that is all that T lacks: Qwen3 cuts the thoughts of earlier turns away, and the tokens that
  are left are what later prompts hold (counted as ``shortened``; ``last_turn_only`` leaves such turns out);
* not at all otherwise (counted as ``rewritten``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from . import DataError
from .conversations import Conversation

REASONING = ("reasoning_content", "reasoning", "thinking")
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "headtrainprobe"


@dataclass(frozen=True)
class Rendered:
    """text; spans: (start, end) of each supervised turn in it, in order, the end-of-turn token included;
    last: where the last answer starts (None where the text does not continue its generation prompt);
    shortened: earlier turns that lack their head (thoughts); rewritten: turns that are not as they were when served,
    and have no span; joined: the last answer was put
    after the generation prompt by hand, because the template does not render it so; dropped: messages after the
    last answer."""

    text: str
    spans: tuple[tuple[int, int], ...]
    last: int | None
    shortened: int = 0
    rewritten: int = 0
    joined: bool = False
    dropped: int = 0


class ChatTemplate:
    """The template of ``tokenizer`` with fixed ``kwargs``.

    closing: the text that ends the last assistant message; closing_end: how far its end-of-turn token reaches in it
    (0: the template closes answers by no special token, so none is supervised); end_id: that token.
    Raises DataError where there is no template or it cannot render one question and one answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        self.knows = cache(self._knows)
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat template, so "
                "conversations cannot be rendered as its server would. Use the instruction-tuned target, or put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        self.has_tags = bool(_TAGS.search(self.source(None)))
        try:
            text = self.text([_user("x"), {"role": "assistant", "content": _PROBE}], None)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template cannot render one question and one answer: {error}") from error
        before, found, self.closing = text.rpartition(_PROBE)
        if not found:
            raise DataError("the chat template does not render the content of an assistant message")
        self.closing_end, self.end_id = self._end_of_turn(self.closing)

    def source(self, tools: list[dict] | None) -> str:
        return self.tokenizer.get_chat_template(None, tools)

    def text(self, messages: list[dict], tools: list[dict] | None, generation_prompt: bool = False) -> str:
        return self._render(messages, tools, generation_prompt)[0]

    def prompt(self, conversation: Conversation) -> str:
        """The text that a server feeds the target to answer the messages as they are. Raises DataError."""
        try:
            return self.text(conversation.messages, conversation.tools, True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise _refused(conversation, error) from error

    def render(self, conversation: Conversation, last_turn_only: bool = False, serve_last: bool = True) -> Rendered:
        """Text and spans of one conversation. serve_last: the text is generation prompt + last answer + end of
        turn, nothing after it. Raises DataError where the template refuses the conversation or does not know one of
        its fields."""
        last = max((i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"), default=None)
        if last is None:
            return Rendered("", (), None, dropped=len(conversation.messages))
        messages = conversation.messages[: last + 1]
        self._check_fields(conversation)
        try:
            return self._place(conversation, messages, last_turn_only, serve_last)
        except (jinja2.TemplateError, TypeError) as error:
            raise _refused(conversation, error) from error

    def _place(self, c: Conversation, messages: list[dict], last_turn_only: bool, serve_last: bool) -> Rendered:
        n = len(messages) - 1
        full, tags = self._render(messages, c.tools, False, track=self.has_tags)
        prompt = self.text(messages[:n], c.tools, True) if n else None
        plain = not any(messages[n].get(key) for key in ("tool_calls", *REASONING))
        continues = prompt is not None and full.startswith(prompt)
        joined = serve_last and prompt is not None and not (continues and not (c.verbatim and plain))
        if joined and not plain:
            raise DataError(
                f"{c.source}: the generation prompt ends with {prompt[-40:]!r}, but the template does not render the "
                "last answer, which has thoughts or tool calls, as its continuation. Change data.template_kwargs "
                "(enable_thinking, for example), or set data.add_generation_prompt_answer=false"
            )
        text = prompt + messages[n]["content"] + self.closing if joined else full
        starts_last = len(prompt) if prompt is not None and text.startswith(prompt) else None
        end = self._end(text, starts_last or 0, closed=not c.truncated)
        shortened = rewritten = 0
        if self.has_tags:
            if joined:  # the tags inside the prompt; of the last answer only the place matters
                tags = self._render(messages[:n], c.tools, True, track=True)[1] + [(starts_last, end)]
            spans = self._tag_spans(tags, text, starts_last, end, c.truncated)
        else:
            spans = []
            for i in (i for i in range(n) if messages[i]["role"] == "assistant" and not last_turn_only):
                span, whole = self._earlier(messages, i, c.tools, text)
                shortened += span is not None and not whole
                rewritten += span is None
                spans += [span] if span is not None else []
            if starts_last is not None:
                spans.append((starts_last, end))
            else:
                rewritten += 1
        if serve_last:  # a server has seen nothing after the end of the turn
            text = text[: self._end(text, starts_last or 0, closed=True)]
        if last_turn_only:
            spans = spans[-1:] if starts_last is None else [s for s in spans if s[1] > starts_last]
        spans = tuple((a, b) for a, b in spans if b > a)
        by_hand = joined and not c.verbatim
        return Rendered(text, spans, starts_last, shortened, rewritten, by_hand, len(c.messages) - len(messages))

    def _earlier(
        self, messages: list[dict], i: int, tools: list[dict] | None, text: str
    ) -> tuple[tuple[int, int] | None, bool]:
        """The span of the earlier turn i in ``text``, or None, and whether the turn is as it was when served."""
        if i == 0:
            return None, False
        prompt, full = self.text(messages[:i], tools, True), self.text(messages[: i + 1], tools)
        mark = self.closing[: self.closing_end]
        if full.startswith(prompt):
            served = full[len(prompt) : self._end(full, len(prompt), closed=True)]
        elif not any(messages[i].get(key) for key in ("tool_calls", *REASONING)):
            served = messages[i]["content"] + mark
        else:
            return None, False
        if text.startswith(prompt) and text.startswith(served, len(prompt)):
            return (len(prompt), len(prompt) + len(served)), True
        start = _agree(text, prompt)  # also where the generation prompt has more than the answer's header
        least = text[start : start + len(mark) + 1]
        cut = served.find(least) if mark else -1
        while cut >= 0:  # the longest rest of the turn as served that stands at ``start``
            if text.startswith(served[cut:], start):
                return (start, start + len(served) - cut), False
            cut = served.find(least, cut + 1)
        return None, False

    def _end(self, text: str, start: int, closed: bool) -> int:
        """Where the turn ends that starts at ``start`` and ends ``text``; closed: its end-of-turn token included."""
        if text.endswith(self.closing) and len(text) - len(self.closing) >= start:
            return len(text) - len(self.closing) + (self.closing_end if closed else 0)
        return len(text.rstrip())  # another closing, as harmony's <|call|>

    def _tag_spans(
        self, tags: list[tuple[int, int]], text: str, last: int | None, end: int, truncated: bool
    ) -> list[tuple[int, int]]:
        """Spans from generation tags; adjacent ones are one turn. Rule for the end: whatever the template's author
        put inside the tags, a turn ends with its end-of-turn token. Rule for the start of the last: never inside
        the generation prompt."""
        spans: list[tuple[int, int]] = []
        for a, b in tags:
            if spans and spans[-1][1] == a != last:
                a = spans.pop()[0]
            spans.append((a, b))
        mark = self.closing[: self.closing_end]
        for number, (a, b) in enumerate(spans):
            if text.endswith(self.closing, a, b):
                b -= len(self.closing) - self.closing_end
            elif mark and not text.endswith(mark, a, b) and text.startswith(mark, b):
                b += len(mark)
            if last is not None and b > last:
                a, b = max(a, last), min(b, end) if truncated else b
            spans[number] = (a, b)
        return spans

    def _end_of_turn(self, closing: str) -> tuple[int, int | None]:
        encoded = self.tokenizer(closing, add_special_tokens=False, return_offsets_mapping=True)
        special = special_ids(self.tokenizer)
        for token, (_, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token in special:
                mark = self.tokenizer.convert_ids_to_tokens(token)
                start = closing.find(mark)  # the token may swallow white space around it; the mark itself ends the turn
                return (start + len(mark) if start >= 0 else stop), token
        return 0, None

    def _check_fields(self, c: Conversation) -> None:
        used = {key for m in c.messages for key in ("tool_calls", *REASONING) if m.get(key)}
        if c.tools:
            used.add("tools")
        for name in sorted(used):
            if not self.knows(name):
                raise DataError(
                    f"{c.source}: the conversation has `{name}`, which the target's chat template does not render. "
                    "Remove the field from the data, or use a template that knows it"
                )

    def _knows(self, name: str) -> bool:
        """Whether a rendering changes with the field ``name``: tried on one question and one answer."""
        call = {"type": "function", "id": "probe0000", "function": {"name": _PROBE, "arguments": {}}}
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        answers = [{"role": "assistant", "content": "y"}]
        if name == "tool_calls":
            answers = [{"role": "assistant", "content": "", name: [call]}]
        elif name in REASONING:  # gpt-oss renders thoughts beside a call only
            answers = [{**answers[0], name: _PROBE}]
            answers.append(
                {**answers[0], "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}]}
            )
        for answer in answers:
            try:
                if _PROBE in self.text([_user("x"), answer], [tool] if name == "tools" else None):
                    return True
            except (jinja2.TemplateError, TypeError, ValueError):
                continue
        return False

    def _render(
        self, messages: list[dict], tools: list[dict] | None, generation_prompt: bool, track: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        texts, tags = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.source(tools),
            return_assistant_tokens_mask=track,
            add_generation_prompt=generation_prompt,
            **{**self.tokenizer.special_tokens_map, **self.kwargs},
        )
        return texts[0], tags[0] if track else []


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that structure a conversation: the tokenizer's special tokens, the added ones included."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _agree(a: str, b: str) -> int:
    """How many leading characters are the same."""
    return len(b) if a.startswith(b) else len(commonprefix([a, b]))


def _refused(conversation: Conversation, error: Exception) -> DataError:
    return DataError(f"{conversation.source}: the target's chat template refuses this conversation: {error}")
