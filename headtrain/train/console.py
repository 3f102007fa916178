"""What a person sees of a training run: a progress bar on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TrainConsole:
    """Use as a context. depths: the depth of every step of the run; done, packed: steps and tokens of an interrupted
    run; quiet: print nothing (ranks other than 0)."""

    def __init__(self, depths: Sequence[int], done: int, packed: int, quiet: bool = False) -> None:
        self.depths, self.total, self.quiet = depths, len(depths), quiet
        self.flops: dict[int, float] = {}  # of a step, by depth; filled by ``cost_of`` once there is a batch
        self.seconds: dict[int, float] = {}  # of a step, by depth, as measured
        self.console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=quiet or not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task("training", total=self.total, completed=done, status="")
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

    def cost_of(self, flops: Callable[[int], float | None]) -> None:
        """flops: of a step at a depth, None where a head does not say; asked once. For the remaining time, where deeper
        steps are still to come."""
        self.flops = self.flops or {depth: flops(depth) or 1.0 for depth in set(self.depths)}

    def begins(self, step: int) -> None:
        """Say where a stage of the depth schedule begins: the loss jumps there, although nothing was unlearnt."""
        if step > 1 and (before := self.depths[step - 2]) != (depth := self.depths[step - 1]):
            self.say(f"step {step}: depth {before} -> {depth}: the loss is now over {depth} drafts and not comparable")

    def left(self, step: int, took: float) -> float:
        """Seconds from ``step`` to the end; took: those since the last line. Depths that were not timed yet are
        reckoned from these by their arithmetic."""
        window = self.depths[self.last_step : step]
        if len(set(window)) == 1:
            self.seconds[window[0]] = took / len(window)
        rate = took / (sum(self.flops.get(depth, 1.0) for depth in window) or 1.0)
        counts = Counter(self.depths[step:])
        return sum(n * self.seconds.get(d, rate * self.flops.get(d, 1.0)) for d, n in counts.items())

    def line(self, step: int, packed: int, numbers: dict[str, Any]) -> float:
        """Show a window's numbers; packed: all tokens so far. Returns tokens/s since the last line."""
        now = time.monotonic()
        took = max(now - self.last_time, 1e-9)
        speed = (packed - self.last_packed) / took
        status = f"loss {numbers['loss']:.3f} simulated tau {numbers['tau']:.3f} depth {numbers['depth']}"
        status += f" {speed:,.0f} tokens/s"
        left = clock(self.left(step, took))
        self.bar.update(self.task, completed=step, status=f"{status} left {left}")
        if self.bar.disable:
            self.say(f"step {step}/{self.total}  {status}  lr {numbers['lr']:.2e}  left {left}")
        self.last_time, self.last_step, self.last_packed = now, step, packed
        return speed


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
