"""Capture: run the frozen target once over the data and keep its hidden states, so that training never runs it.

python -m headtrain.capture recipes/RECIPE.yaml [key=value ...]
"""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from .config import Recipe, RecipeError, load_recipe
from .data import DataError
from .data.chat import render_all, rows_digest
from .data.manifest import MANIFEST
from .data.sources import read_conversations
from .data.store import FeatureStore, Manifest, StoreError, StoreWriter, check_disk, human, plan_shards, shard_file
from .heads.catalog import build_head, parse_head
from .metadata import TargetIdentity
from .shift import final_positions, pair_mask
from .target.load import load_target
from .target.shape import TargetError
from .types import Batch, Row, TargetShape, TargetWeights, Wants

QUIET_SECONDS = 15.0  # between two lines of progress where there is no terminal


@dataclass
class Rows:
    """The rendered rows of one split and what was dropped on the way, as lines for people."""

    rows: list[Row]
    report: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]


def plan_rows(recipe: Recipe, tokenizer: Any) -> dict[str, Rows]:
    """Read and render ``data.train`` and, if given, ``data.eval``: {"train": Rows, "eval": Rows}. Raises DataError."""
    settings = recipe.data
    out = {}
    for name, specs in (("train", settings.train), ("eval", settings.eval)):
        if name == "eval" and not specs:
            continue
        conversations, source = read_conversations(
            specs,
            bad_lines=settings.bad_lines,
            limit=settings.limit if name == "train" else None,
            system=settings.system,
        )
        rows, rendering = render_all(tokenizer, conversations, settings)
        out[name] = Rows(rows, [*source.lines(), *rendering.lines()])
    return out


def head_wants(recipe: Recipe, shape: TargetShape, weights: TargetWeights | None = None) -> Wants:
    """What the recipe's head reads of its target. The head is built without memory: no draft vocabulary is needed.
    Raises RecipeError where it cannot start from ``weights``."""
    config = parse_head(recipe.head)
    with torch.device("meta"):
        head = build_head(config, shape, None)
    if weights is not None:
        try:
            head.check_start(weights)
        except ValueError as error:
            raise RecipeError(f"target {recipe.target.path}: {error}") from None
    return head.wants()


def count_tokens(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """[V] int64: how often each token is drafted at depth 1, that is, occurs in a turn but not as its first token
    (prefill gives that one). For ``vocab.choose``."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(rows), 256):
        batch = Batch.pack(rows[start : start + 256])
        drafted = batch.ids[2:][pair_mask(batch, 1)[0][:-2]]
        counts += torch.bincount(drafted, minlength=vocab_size)
    return counts


def plan_manifest(recipe: Recipe, identity: TargetIdentity, wants: Wants, rows: Sequence[Row]) -> Manifest:
    """The manifest of a store of these rows."""
    batches = (Batch.pack(rows[start : start + 256]) for start in range(0, len(rows), 256))
    tokens = sum(map(len, rows))
    return Manifest(
        target=identity,
        layers=list(wants.layers),
        final=wants.final,
        normed="post-norm",
        dtype=recipe.features.dtype,
        summary=wants.summary,
        rows=len(rows),
        tokens=tokens,
        finals=tokens if wants.final == "all" else sum(len(final_positions(batch)) for batch in batches),
        rows_sha256=rows_digest(rows),
        max_length=recipe.data.max_length,
        shards=plan_shards([len(row) for row in rows], recipe.features.shard_tokens),
        settings=recipe.data.model_dump(mode="json"),
    )


def plan_store(recipe: Recipe, identity: TargetIdentity, wants: Wants, rows: Sequence[Row], folder: Path) -> Manifest:
    """The manifest of the store in ``folder``: what the head reads and what the recipe adds for other heads; where a
    store is there that holds more than that, all that it holds."""
    if (folder / MANIFEST).is_file() and not (stored := Manifest.read(folder)).unmet(wants):
        wants = stored.holds(wants)
    return plan_manifest(recipe, identity, wants, rows)


def runs(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows of at most ``batch_tokens`` tokens for one forward; a longer row goes alone."""
    run: list[Row] = []
    used = 0
    for row in rows:
        if run and used + len(row) > batch_tokens:
            yield run
            run, used = [], 0
        run.append(row)
        used += len(row)
    if run:
        yield run


def capture(
    recipe: Recipe, *, target: Any = None, rows: dict[str, Rows] | None = None, console: Console | None = None
) -> FeatureStore:
    """Fill ``features_dir/train`` (and ``/eval``) and return the training store. Complete shards are kept, so a killed
    capture goes on, and a finished one costs only the reading and rendering of the data.

    target: a loaded Target, else the recipe's is loaded. rows: as ``plan_rows`` gives, else they are read. Raises
    RecipeError, DataError, TargetError, StoreError (other features in the folder, no room on the disk).
    """
    console = console or Console(stderr=True, soft_wrap=True, highlight=False)
    if target is None:
        console.print(f"loading the target {recipe.target.path}", markup=False)
        target = load_target(recipe.target, "cuda" if torch.cuda.is_available() else "cpu")
    wants = head_wants(recipe, target.shape, target.weights())
    if rows is None:
        rows = plan_rows(recipe, target.tokenizer)
        for name, split in rows.items():
            for line in split.report:
                console.print(f"{name}: {line}", markup=False)
    folder = recipe.features_dir
    stored = recipe.features.widen(wants, target.shape.num_layers)
    plans = {
        name: plan_store(recipe, target.identity, stored, split.rows, folder / name) for name, split in rows.items()
    }
    writers: dict[str, StoreWriter] = {}
    try:
        for name, plan in plans.items():
            writers[name] = StoreWriter(folder / name, plan)
        todo = {name: writer.todo() for name, writer in writers.items()}
        needed = announce(console, folder, plans, todo)
        if needed:
            check_disk(folder, needed)
            work = sum(tokens_of(plans[name], rows[name].lengths, shards) for name, shards in todo.items())
            with Meter(console, work) as meter:
                for name, writer in writers.items():
                    asked = plans[name].holds(wants)
                    for number in todo[name]:
                        fill(writer, number, rows[name].rows, target, asked, recipe.features.batch_tokens, meter)
            console.print(meter.summary(), markup=False)
    finally:
        for writer in writers.values():
            writer.close()
    for name, plan in plans.items():
        size = sum(shard_file(folder / name, n).stat().st_size for n in range(len(plan.shards) - 1))
        console.print(f"{folder / name}: {plan.rows:,} rows, {plan.tokens:,} tokens, {human(size)}", markup=False)
    return FeatureStore(folder / "train", rows=rows["train"].rows, wants=wants)


def fill(
    writer: StoreWriter, number: int, rows: Sequence[Row], target: Any, wants: Wants, batch_tokens: int, meter: Meter
) -> None:
    """Capture one shard. Forwards never cross a shard, so that a resumed capture runs the very same ones."""
    first, end = writer.manifest.shards[number : number + 2]
    shard = writer.shard(number, rows[first:end])
    for run in runs(rows[first:end], batch_tokens):
        shard.add(target.features(Batch.pack(run), wants))
        meter.advance(sum(map(len, run)))
    shard.close()


def tokens_of(plan: Manifest, lengths: Sequence[int], shards: Sequence[int]) -> int:
    return sum(sum(lengths[plan.shards[n] : plan.shards[n + 1]]) for n in shards)


def announce(console: Console, folder: Path, plans: dict[str, Manifest], todo: dict[str, list[int]]) -> int:
    """Say what will be stored and what is left of it; returns the bytes that are still to be written."""
    needed = 0
    for name, plan in plans.items():
        whole = plan.bytes(plan.tokens, plan.finals, plan.rows)
        shards = len(plan.shards) - 1
        left = round(whole * len(todo[name]) / shards)
        needed += left
        layers = f"layers {', '.join(map(str, plan.layers))} and " if plan.layers else ""
        done = f"; {shards - len(todo[name])} of {shards} shards are there" if len(todo[name]) < shards else ""
        console.print(
            f"{name}: {plan.rows:,} rows, {plan.tokens:,} tokens; {layers}final at {plan.finals:,} positions "
            f"({plan.finals / plan.tokens:.0%}) as {plan.dtype}: {human(whole)}, {human(whole / plan.tokens)} a token"
            f"{done}",
            markup=False,
        )
    if needed:
        console.print(f"writing {human(needed)} to {folder}", markup=False)
    return needed


class Meter:
    """Progress in tokens: a bar on a terminal, elsewhere a line every quarter of a minute."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
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
    def rate(self) -> float:
        """Tokens/s so far."""
        return self.done / max(time.monotonic() - self.began, 1e-9)

    def advance(self, tokens: int) -> None:
        self.done += tokens
        status = f"{self.done:,}/{self.total:,} tokens {self.rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done, status=status)
        now = time.monotonic()
        if self.bar.disable and now - self.said > QUIET_SECONDS:
            self.said = now
            left = (self.total - self.done) / self.rate
            self.console.print(f"capture: {status}, about {left:,.0f} s left", markup=False)

    def summary(self) -> str:
        return f"captured {self.done:,} tokens in {time.monotonic() - self.began:.1f} s, {self.rate:,.0f} tokens/s"


def main(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, for example recipes/quickstart.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example features.dtype=int8")] = None,
) -> None:
    """Run the target over the recipe's data and store the hidden states that its head reads.

    The size is printed before anything is written, and nothing is written when the disk cannot hold it. Stop it
    whenever you like: the same command goes on at the first unfinished shard. Features made from another target,
    template, data or layers are never mixed in; the differences are shown instead.

    Useful overrides: features.dir=FOLDER (default OUTPUT/features), features.dtype=int8 (about half of bfloat16),
    features.batch_tokens=N (tokens of one forward: lower it when memory runs out), features.shard_tokens=N (work lost
    by an interruption, at most), data.limit=N (a trial on the first N conversations). With features.mode=online no
    capture is needed: training runs the target itself.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        capture(load_recipe(recipe, overrides or []), console=console)
    except (RecipeError, DataError, TargetError, StoreError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        console.print("error: the disk is full; make room and run the same command again", style="red")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; complete shards are kept, the same command goes on from there")
        raise typer.Exit(130) from None


def stop_on_sigterm() -> None:
    """SIGTERM ends this process with exit code 0 from now on: a preempted capture has kept its complete shards."""

    def stop(*_: object) -> None:
        print("SIGTERM: complete shards are kept, the same command goes on from there", file=sys.stderr)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(typer.run(main))
