"""What a person sees of a training run: a progress bar on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainConsole:
    """Use as a context. quiet: print nothing (ranks other than 0)."""

    def __init__(self, total: int, done: int, packed: int, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task("training", total=total, completed=done, status="")
        self.last_time, self.last_step, self.last_packed = time.monotonic(), done, packed

    def __enter__(self) -> TrainConsole:
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluations and saves inside do not count in tokens/s."""
        began = time.monotonic()
        yield
        self.last_time += time.monotonic() - began

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def line(self, step: int, packed: int, numbers: dict[str, Any]) -> float:
        """Show a window's numbers; packed: all tokens so far. Returns tokens/s since the last line."""
        now = time.monotonic()
        took, steps = max(now - self.last_time, 1e-9), step - self.last_step
        speed = (packed - self.last_packed) / took
        status = f"loss {numbers['loss']:.3f} tau {numbers['tau']:.3f} depth {numbers['depth']} {speed:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, status=status)
        if self.bar.disable:
            left = (self.total - step) * took / max(steps, 1)
            self.say(f"step {step}/{self.total}  {status}  lr {numbers['lr']:.2e}  left {clock(left)}")
        self.last_time, self.last_step, self.last_packed = now, step, packed
        return speed


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
