"""Conversations to rows: token ids, and for each token the assistant turn that it belongs to.

``template`` gives a text and the places of the turns in it, in characters. Here the text is tokenised once, and a
token belongs to a turn when all its characters do (by the tokenizer's offsets).
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from ..config import DataSection
from ..shift import pair_mask
from ..types import Batch, Row
from . import DataError
from .conversations import Conversation
from .template import ChatTemplate, Rendered, special_ids

CHUNK = 256  # conversations tokenised in one call
COVERAGE_LIMIT = 0.995


@dataclass
class RenderReport:
    """What became of the conversations. dropped: (source, reason). notes: what was done to rows that stayed."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    turns: int = 0
    mask: str = ""
    end_of_turn: str = ""
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def coverage(self) -> float:
        return self.supervised / self.tokens if self.tokens else 0.0

    def lines(self, shown: int = 3) -> list[str]:
        """A short table for people; of each reason the first ``shown`` sources are named."""
        out = [
            f"{self.conversations} conversations, {self.rows} rows, {self.tokens} tokens",
            f"{self.supervised} tokens supervised ({self.coverage:.1%}) in {self.turns} assistant turns",
            f"mask from {self.mask}; a turn ends with {self.end_of_turn}",
        ]
        out += [f"{count:>7} x {note}" for note, count in sorted(self.notes.items())]
        for reason, count in sorted(Counter(reason for _, reason in self.dropped).items()):
            sources = [source for source, why in self.dropped if why == reason]
            more = ", ..." if count > shown else ""
            out.append(f"{count:>7} x row dropped: {reason} ({', '.join(sources[:shown])}{more})")
        return out


@dataclass(frozen=True)
class _Encoded:
    ids: list[int]
    starts: list[int]
    ends: list[int]


class Renderer:
    """A tokenizer with its chat template, read once. Raises DataError without a template, or without offsets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} gives no character offsets; a tokenizer.json (fast tokenizer) is needed"
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self.special = special_ids(tokenizer)
        self._encoder = _untrimmed(tokenizer)
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        adds = bool(whole) and whole[0] == tokenizer.bos_token_id and whole[:1] != plain[:1]
        self.bos: int | None = tokenizer.bos_token_id if adds else None
        self._tails: dict[str, list[int]] = {}

    def render(self, conversation: Conversation, *, last_turn_only: bool = False, serve_last: bool = True) -> Row:
        rendered = self.template.render(conversation, last_turn_only, serve_last)
        return self.row(conversation, rendered, self.encode([rendered.text])[0])

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """What a server feeds the target to answer this conversation, exactly one BOS included."""
        return self._with_bos(self.encode([self.template.prompt(conversation)])[0].ids)

    def encode(self, texts: list[str]) -> list[_Encoded]:
        if not texts:
            return []
        encoded = self._encoder(texts, add_special_tokens=False, return_attention_mask=False)
        out = []
        for ids, one in zip(encoded["input_ids"], encoded.encodings, strict=True):
            starts, ends = zip(*one.offsets, strict=True) if ids else ((), ())
            out.append(_Encoded(ids, list(starts), list(ends)))
        return out

    def row(self, conversation: Conversation, rendered: Rendered, encoded: _Encoded) -> Row:
        encoded = self._as_served(rendered, encoded)
        turn = [0] * len(encoded.ids)
        number = 0
        for start, end in rendered.spans:
            low, high = bisect_left(encoded.starts, start), bisect_right(encoded.ends, end)
            if high > low:
                number += 1
                turn[low:high] = [number] * (high - low)
        ids = self._with_bos(encoded.ids)
        turn = [0] * (len(ids) - len(turn)) + turn
        return Row(ids, turn, source=conversation.source, route=conversation.route)

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def _as_served(self, rendered: Rendered, whole: _Encoded) -> _Encoded:
        """A server tokenises the prompt alone. Where one tokenisation of the whole text differs from that (a token
        across the boundary, as two line breaks in one), prompt and answer are tokenised apart, provided that they
        still decode to the same text. Only the part after the prompt's last special token can differ."""
        at, text = rendered.last, rendered.text
        if not at:
            return whole
        cut = bisect_left(whole.starts, at)
        head = next((i for i in range(cut - 1, -1, -1) if whole.ids[i] in self.special), 0)
        if cut < 1:
            return whole
        begin = whole.starts[head]
        tail = text[begin:at]
        if tail not in self._tails:
            self._tails[tail] = self.encode([tail])[0].ids
        if self._tails[tail] == whole.ids[head:cut]:
            return whole
        first, second = self.encode([tail, text[at:]])
        apart = _Encoded(
            whole.ids[:head] + first.ids + second.ids,
            whole.starts[:head] + [x + begin for x in first.starts] + [x + at for x in second.starts],
            whole.ends[:head] + [x + begin for x in first.ends] + [x + at for x in second.ends],
        )
        return apart if self.decode(apart.ids) == self.decode(whole.ids) else whole

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy whose offsets include a token's leading spaces (Llama 3's leave them out, and a token
    at a turn's start would seem to begin later than it does). Ids are the same."""
    offsets = tokenizer("a a", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or all(before[1] == after[0] for before, after in zip(offsets, offsets[1:], strict=False)):
        return tokenizer
    clone = copy.deepcopy(tokenizer)
    clone.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return clone


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    last_turn_only: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    serve_last: bool = True,
) -> Row:
    """One conversation as a Row: [n] ids and turn marks (1, 2 ... for each supervised assistant turn, its content
    and its end-of-turn token; 0 elsewhere). serve_last: the row is the generation prompt, the last answer and its
    end-of-turn token, as a server produces them. Messages after the last answer are left out. Raises DataError.
    For many conversations use ``render_all``."""
    return Renderer(tokenizer, template_kwargs).render(
        conversation, last_turn_only=last_turn_only, serve_last=serve_last
    )


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of the messages as they are with the generation prompt, as a server feeds them. Raises DataError."""
    return Renderer(tokenizer, template_kwargs).prompt_ids(conversation)


def render_all(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], data: DataSection
) -> tuple[list[Row], RenderReport]:
    """All conversations as rows, in order, by ``data``'s max_length, overlong, last_turn_only, template_kwargs,
    bad_lines (a conversation that the template refuses stops, or is dropped) and add_generation_prompt_answer.
    Rows without one draftable pair are dropped. Raises DataError when nothing is left, or when none or nearly all
    of the tokens are supervised."""
    renderer = Renderer(tokenizer, data.template_kwargs)
    template = renderer.template
    report = RenderReport(len(conversations))
    report.mask = "the template's generation tags" if template.has_tags else "renderings of prefixes"
    report.end_of_turn = (
        repr(tokenizer.convert_ids_to_tokens(template.end_id))
        if template.end_id is not None
        else "its text alone: the template closes answers by no special token"
    )
    rows: list[Row] = []
    for start in range(0, len(conversations), CHUNK):
        chunk = []
        for conversation, rendered in _texts(template, conversations[start : start + CHUNK], data, report):
            chunk.append((conversation, rendered))
        encoded = renderer.encode([rendered.text for _, rendered in chunk])
        made = [renderer.row(c, rendered, one) for (c, rendered), one in zip(chunk, encoded, strict=True)]
        rows += _fitting(made, data, report)
    _count(rows, report)
    _check(report)
    return rows, report


def _texts(
    template: ChatTemplate, conversations: Sequence[Conversation], data: DataSection, report: RenderReport
) -> Iterator[tuple[Conversation, Rendered]]:
    for conversation in conversations:
        try:
            rendered = template.render(conversation, data.last_turn_only, data.add_generation_prompt_answer)
        except DataError as error:
            if data.bad_lines == "stop":
                raise DataError(f"{error}. data.bad_lines=skip drops such rows") from error
            report.dropped.append((conversation.source, str(error).removeprefix(f"{conversation.source}: ")))
            continue
        if not rendered.text:
            report.dropped.append((conversation.source, "no assistant turn"))
            continue
        for note, count in (
            ("earlier turn without its head (thoughts), as the template shows it later", rendered.shortened),
            ("turn not supervised: the template renders it otherwise than when served", rendered.rewritten),
            ("last answer put after the generation prompt: the template renders it otherwise", rendered.joined),
            ("message left out after the last answer", rendered.dropped),
        ):
            report.notes[note] += count
        yield conversation, rendered


def _fitting(rows: list[Row], data: DataSection, report: RenderReport) -> list[Row]:
    """The rows that are short enough and have a pair (position, depth 1) to train on."""
    short = []
    for row in rows:
        if len(row) > data.max_length and data.overlong == "drop":
            report.dropped.append((row.source, f"longer than data.max_length={data.max_length}"))
            continue
        if len(row) > data.max_length:
            report.notes[f"row cut at data.max_length={data.max_length}"] += 1
            row = Row(row.ids[: data.max_length], row.turn[: data.max_length], row.source, row.route)
        short.append(row)
    if not short:
        return []
    batch = Batch.pack(short)
    usable = set(batch.doc[pair_mask(batch, 1)[0]].tolist())
    report.dropped += [(r.source, "nothing to draft") for number, r in enumerate(short) if number not in usable]
    return [row for number, row in enumerate(short) if number in usable]


def _count(rows: list[Row], report: RenderReport) -> None:
    report.rows = len(rows)
    report.tokens = sum(map(len, rows))
    report.supervised = sum(len(row) - row.turn.count(0) for row in rows)
    report.turns = sum(max(row.turn) for row in rows)
    report.notes = +report.notes  # without the zeros


def _check(report: RenderReport) -> None:
    table = "\n  ".join(report.lines())
    if not report.rows:
        raise DataError(f"no row is left to train on:\n  {table}")
    if not report.supervised or report.coverage > COVERAGE_LIMIT:
        raise DataError(
            f"{report.coverage:.1%} of the tokens are supervised; prompts and answers should both be there. Either "
            "the conversations have no prompts, or the template's generation tags enclose too much. "
            f"`headtrain inspect` shows the rows:\n  {table}"
        )


def rows_digest(rows: Sequence[Row]) -> str:
    """sha256 over the ids and turns of all rows, in order."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(len(row).to_bytes(8, "little"))
        for values in (row.ids, row.turn):
            sha.update(array("q", values).tobytes())
    return sha.hexdigest()
