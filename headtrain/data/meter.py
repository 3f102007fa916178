"""How far a capture is."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 15.0  # between two lines of progress where there is no terminal


class Meter:
    """Progress in tokens, of all processes: a bar on a terminal, elsewhere a line every quarter of a minute."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.mine = self.others = 0
        self.began = self.said = time.monotonic()
        self.bar = Progress(
            TextColumn("capture"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("capture", total=total, status="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    @property
    def done(self) -> int:
        return self.mine + self.others

    @property
    def rate(self) -> float:
        """Tokens/s so far."""
        return self.done / max(time.monotonic() - self.began, 1e-9)

    def advance(self, tokens: int, others: int | None = None) -> None:
        """``tokens`` more of this process; ``others``: what other processes have done by now."""
        self.mine += tokens
        self.others = self.others if others is None else others
        self.total = max(self.total, self.done)  # in a stream, more than one epoch's
        status = f"{self.done:,}/{self.total:,} tokens {self.rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done, total=self.total, status=status)
        now = time.monotonic()
        if self.bar.disable and now - self.said > QUIET_SECONDS:
            self.said = now
            left = (self.total - self.done) / max(self.rate, 1e-9)
            self.console.print(f"capture: {status}, about {left:,.0f} s left", markup=False)

    def summary(self) -> str:
        if not self.done:
            return "nothing was left to capture"
        took = f"in {time.monotonic() - self.began:.1f} s, {self.rate:,.0f} tokens/s"
        return f"captured {self.done:,} tokens {took}" + (f" ({self.mine:,} by this process)" if self.others else "")
