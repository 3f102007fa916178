"""Rows as a person sees them: what is supervised in colour, or between brackets where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..types import Row
from .chat import RenderReport
from .sources import SourceReport
from .template import special_ids

OPEN, CLOSE = "⟦", "⟧"
STYLES = {(False, False): "dim", (False, True): "dim cyan", (True, False): "green", (True, True): "bold green"}


def render_inspection(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    console: Console,
    limit: int = 5,
    reports: Sequence[SourceReport | RenderReport] = (),
) -> None:
    """Print the first ``limit`` rows, supervised tokens in green, then counts over all rows and the reports.

    Without colour (a pipe, NO_COLOR) supervised runs are put between ⟦ and ⟧. Special tokens are always written
    out, and a line break inside a run is shown as ↵ before it breaks the line.
    """
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    special = special_ids(tokenizer)
    shown = rows[: max(limit, 0)]
    for number, row in enumerate(shown, 1):
        supervised = len(row) - row.turn.count(0)
        head = f"row {number} of {len(rows)}  {row.source}  {row.route}".rstrip()
        counts = f"{len(row)} tokens, {supervised} supervised ({supervised / max(len(row), 1):.0%}), "
        counts += f"{max(row.turn, default=0)} turns"
        console.print(Text(head, "bold"), soft_wrap=True)
        console.print(Text(counts), soft_wrap=True)
        console.print(marked(tokenizer, row, special, colour), soft_wrap=True)
        console.print()
    if len(rows) > len(shown):
        console.print(Text(f"... and {len(rows) - len(shown)} more rows"), soft_wrap=True)
    tokens = sum(map(len, rows))
    supervised = sum(len(row) - row.turn.count(0) for row in rows)
    share = supervised / tokens if tokens else 0.0
    console.print(Text(f"{len(rows)} rows, {tokens} tokens, {supervised} supervised ({share:.1%})"), soft_wrap=True)
    for report in reports:
        for line in report.lines():
            console.print(Text(line), soft_wrap=True)


def marked(tokenizer: PreTrainedTokenizerBase, row: Row, special: frozenset[int], colour: bool) -> Text:
    """One row's tokens as a Text; each run of one turn is decoded whole, so that characters of several tokens show."""
    out = Text()
    for turn, run in groupby(zip(row.ids, row.turn, strict=True), key=lambda pair: pair[1]):
        ids = [i for i, _ in run]
        if turn and not colour:
            out.append(OPEN)
        for is_special, text in _pieces(tokenizer, ids, special):
            out.append(text.replace("\n", "↵\n"), STYLES[turn > 0, is_special] if colour else None)
        if turn and not colour:
            out.append(CLOSE)
    return out


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], special: frozenset[int]) -> Iterator[tuple[bool, str]]:
    for is_special, run in groupby(ids, key=special.__contains__):
        text = tokenizer.decode(list(run), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield is_special, text
