"""Progress with the remaining time, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 30.0  # seconds between lines where stderr is no terminal


@contextmanager
def progress(total: int, doing: str, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of ``total`` pieces. A bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = quiet or not sys.stderr.isatty()
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=hidden)
    task = bar.add_task(doing, total=total)
    started = spoken = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, spoken
        done += 1
        bar.advance(task)
        now = time.monotonic()
        if hidden and (now - spoken >= LINE_EVERY or done == total):
            spoken = now
            left = (now - started) / done * (total - done)
            console.print(f"{doing}: {done}/{total}, {left:.0f} s left", markup=False)

    with bar:
        yield advance
