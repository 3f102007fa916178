"""Capture: run the frozen target once over the data and keep its hidden states, so that training never runs it.

python -m headtrain.capture recipes/RECIPE.yaml [key=value ...]
accelerate launch -m headtrain.capture recipes/RECIPE.yaml [key=value ...]     # on every GPU, and on every node
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from .config import Recipe, RecipeError, Url, load_recipe
from .data import DataError
from .data.chat import render_all, rows_digest
from .data.manifest import MANIFEST, Manifest, StoreError, check_disk, human, plan_shards, shard_name
from .data.meter import Meter
from .data.order import Windows
from .data.produce import fill, tokens_of
from .data.sources import read_conversations
from .data.storage import Storage, no_room, open_storage
from .data.store import FeatureStore, StoreWriter
from .data.store_writer import ROOM
from .data.stream import FeatureStream, produce, shard_sizes
from .data.workers import Workers
from .heads.catalog import HEADS, outline, parse_head
from .metadata import TargetIdentity
from .shift import final_count
from .target.load import load_target
from .target.model import Target
from .target.shape import TargetError
from .types import Row, TargetShape, TargetWeights, Wants


@dataclass
class Rows:
    """The rendered rows of one split; what became of the others, as lines for people; and how many were left out, by
    reason."""

    rows: list[Row]
    report: list[str]
    dropped: dict[str, int] = field(default_factory=dict)

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
        dropped = source.dropped() + Counter(reason for _, reason in rendering.dropped)
        out[name] = Rows(rows, [*source.lines(), *rendering.lines()], dict(dropped))
    return out


def head_wants(recipe: Recipe, shape: TargetShape, weights: TargetWeights | None = None) -> Wants:
    """What the recipe's head reads of its target; no draft vocabulary is needed. Raises RecipeError where it cannot
    start from ``weights``."""
    config = parse_head(recipe.head)
    head = outline(config, shape)
    fitted = recipe.train.init == "induction" and recipe.train.warm_start is None
    if fitted and not head.can_copy:
        able = ", ".join(kind for kind, cls in HEADS.items() if cls.can_copy)
        raise RecipeError(
            f"train.init=induction: a head of kind {config.kind!r} has no such start (kinds that have: {able}); set "
            "train.init to target or random"
        )
    if fitted and recipe.train.joint is not None:
        why = "train.init=induction is fitted before the steps, in which train.joint computes the features"
        raise RecipeError(f"{why}: give a head that was trained alone as train.warm_start, or set train.init to target")
    if recipe.train.joint is not None and head.instead_of_export:
        raise RecipeError(
            f"train.joint: a head of kind {config.kind!r} belongs into its target's own checkpoint, which the adapted "
            "target is not. Train it alone (leave train.joint out), or a head of another kind with its target"
        )
    if weights is not None:
        try:
            head.check_start(weights)
        except ValueError as error:
            raise RecipeError(f"target {recipe.target.path}: {error}") from None
    return head.wants()


def plan_manifest(
    recipe: Recipe, identity: TargetIdentity, wants: Wants, rows: Sequence[Row], target_dtype: str | None = None
) -> Manifest:
    """The manifest of a store of these rows. target_dtype: what the target computes in."""
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
        finals=tokens if wants.final == "all" else sum(map(final_count, rows)),
        rows_sha256=rows_digest(rows),
        max_length=recipe.data.max_length,
        shards=plan_shards([len(row) for row in rows], recipe.features.shard_tokens),
        settings=recipe.data.model_dump(mode="json"),
        target_dtype=target_dtype,
    )


def plan_store(recipe: Recipe, target: Any, wants: Wants, rows: Sequence[Row], split: str) -> Manifest:
    """The manifest of the store of a split: what the head reads and what the recipe adds for other heads; where a
    store is there that holds more than that, all that it holds."""
    folder = recipe.features_dir / split
    wants = recipe.features.widen(wants, target.shape.num_layers)
    if MANIFEST in open_storage(folder).names() and not (stored := Manifest.read(folder)).unmet(wants):
        wants = stored.holds(wants)
    computed_in = str(target.dtype).removeprefix("torch.")
    return plan_manifest(recipe, target.identity, wants, rows, computed_in)


def capture(
    recipe: Recipe, *, target: Any = None, rows: dict[str, Rows] | None = None, console: Console | None = None
) -> FeatureStore:
    """Fill ``features_dir/train`` (and ``/eval``) and return the training store. Complete shards are kept, so a killed
    capture goes on, and a finished one costs only the reading and rendering of the data. Any number of processes may
    do this at a time; each returns when all is there.

    target: a loaded Target, else the recipe's is loaded. rows: as ``plan_rows`` gives, else they are read. Raises
    RecipeError, DataError, TargetError, StoreError (other features in the folder, no room on the disk).
    """
    console = console or Console(stderr=True, soft_wrap=True, highlight=False)
    target, wants, rows = load(recipe, target, rows, console)
    fill_stores(recipe, target, wants, rows, console)
    return open_store(recipe, target, wants, rows["train"].rows, "train")


def open_store(recipe: Recipe, target: Any, wants: Wants, rows: Sequence[Row], split: str) -> FeatureStore:
    """A captured split. Raises StoreError where it is not complete, or not of this target, these rows and settings."""
    plan = plan_store(recipe, target, wants, rows, split)
    return FeatureStore(recipe.features_dir / split, rows=rows, wants=wants, plan=plan)


def load(
    recipe: Recipe, target: Any, rows: dict[str, Rows] | None, console: Console
) -> tuple[Target, Wants, dict[str, Rows]]:
    """The target, on this process's own device, what the head reads of it, and the rows. Target and rows are loaded as
    far as they are not given; a head that cannot start from this target is refused before rows are read."""
    if target is None:
        if recipe.target.shard != "none":
            raise RecipeError(
                f"target.shard={recipe.target.shard}: features are captured by whole targets only, one in each "
                "process. Set target.shard=none (and target.dtype, or a device that holds it); or train without "
                "stored features, where a target may be split: features.mode=online"
            )
        console.print(f"loading the target {recipe.target.path}", markup=False)
        target = load_target(recipe.target, f"cuda:{launched('LOCAL_RANK')}" if torch.cuda.is_available() else "cpu")
    wants = head_wants(recipe, target.shape, target.weights())
    if rows is None:
        rows = plan_rows(recipe, target.tokenizer)
        for name, split in rows.items():
            for line in split.report:
                console.print(f"{name}: {line}", markup=False)
    return target, wants, rows


def launched(name: str) -> int:
    """RANK or LOCAL_RANK, as torchrun, accelerate and others set it; 0 for a process that is started alone."""
    return int(os.environ.get(name, 0))


def fill_stores(recipe: Recipe, target: Any, wants: Wants, rows: dict[str, Rows], console: Console) -> None:
    """Complete the store of each of these splits, together with whoever else is at it. What is complete may lie where
    nothing can be written."""
    folder = recipe.features_dir
    if launched("WORLD_SIZE") > 1:
        refuse_own_memory(folder, "the processes of this launch")
    plans = {name: plan_store(recipe, target, wants, split.rows, name) for name, split in rows.items()}
    writers = {name: StoreWriter(folder / name, plan) for name, plan in plans.items()}
    todo = {name: writer.todo() for name, writer in writers.items()}
    sizes = {name: shard_sizes(plans[name], rows[name].rows) for name, shards in todo.items() if shards}
    announce(console, folder, plans, todo, sizes)
    if sizes:
        with saying_why_not_written(folder), ExitStack() as stack:
            workers = {name: stack.enter_context(join(recipe, writers[name].storage, console)) for name in sizes}
            for name, those in workers.items():
                writers[name].join(those)
            with Meter(console, sum(tokens_of(plans[n], rows[n].lengths, todo[n]) for n in sizes)) as meter:
                for name in sizes:
                    asked, tokens = plans[name].holds(wants), recipe.features.batch_tokens
                    fill(writers[name], workers[name], rows[name].rows, target, asked, tokens, meter)
            console.print(meter.summary(), markup=False)
    for name, plan in plans.items():
        storage, before = writers[name].storage, "" if name in sizes else "; it was complete already"
        if name not in sizes:
            join(recipe, storage, console).tidy()
        size = sum(storage.size(shard_name(n)) for n in range(len(plan.shards) - 1))
        console.print(f"{storage}: {plan.rows:,} rows, {plan.tokens:,} tokens, {human(size)}{before}", markup=False)


def stream(recipe: Recipe, *, console: Console) -> None:
    """Capture for a training that reads at the same time: the held-out rows wholly, then what training needs next,
    until it has finished. Raises as ``capture`` does, and StoreError where training does not come (back)."""
    refuse_own_memory(recipe.features_dir, "capture and the training that reads beside it")
    target, wants, rows = load(recipe, None, None, console)
    settings = recipe.features
    fill_stores(recipe, target, wants, {name: split for name, split in rows.items() if name != "train"}, console)
    place, train = recipe.features_dir / "train", rows["train"]
    plan = plan_store(recipe, target, wants, train.rows, "train")
    sizes, windows, seed = shard_sizes(plan, train.rows), windows_of(recipe, plan), recipe.train.seed
    budget = settings.keep_gb * 1e9 if settings.keep_gb else math.inf
    keep, order = (None, None) if sum(sizes) <= budget else (round(budget), windows.name(seed))
    writer = StoreWriter(place, plan)
    todo = writer.todo()
    announce(console, recipe.features_dir, {"train": plan}, {"train": todo}, {"train": sizes}, keep)
    with saying_why_not_written(place), join(recipe, writer.storage, console, order, keep) as workers:
        writer.join(workers)
        with Meter(console, train.tokens) as meter:
            produce(
                writer,
                workers,
                train.rows,
                target,
                plan.holds(wants),
                meter,
                batch_tokens=settings.batch_tokens,
                sizes=sizes,
                windows=windows,
                seed=seed,
                budget=budget,
                wait=settings.wait,
            )
        console.print(meter.summary(), markup=False)


def open_stream(
    recipe: Recipe, target: Any, wants: Wants, rows: Sequence[Row], rank: int, console: Console
) -> FeatureStream:
    """The training rows' features as ``stream`` captures them, in other processes."""
    refuse_own_memory(recipe.features_dir, "training and the capture that writes beside it")
    return FeatureStream(
        open_storage(recipe.features_dir / "train"),
        plan_store(recipe, target, wants, rows, "train"),
        rows,
        console,
        wants=wants,
        timeout=recipe.features.timeout,
        wait=recipe.features.wait,
        rank=rank,
    )


def windows_of(recipe: Recipe, plan: Manifest) -> Windows | None:
    """In what windows training shuffles the rows of the store; None: all together."""
    size = recipe.features.window_size
    return None if size is None else Windows(plan.shards, size)


def join(
    recipe: Recipe, storage: Storage, console: Console, order: str | None = None, keep: int | None = None
) -> Workers:
    """This process as a worker on a store; the first of a launch looks after the others. order, keep: see
    ``Worker``."""
    rank = launched("RANK")
    loud = console if rank == 0 else Console(stderr=True, soft_wrap=True, highlight=False)
    return Workers(storage, "capture", loud, recipe.features.timeout, rank, rank == 0, order, keep)


def announce(
    console: Console,
    folder: Path | Url,
    plans: dict[str, Manifest],
    todo: dict[str, list[int]],
    sizes: dict[str, list[int]],
    keep: int | None = None,
) -> None:
    """Say what will be stored and what is left of it, ``keep`` bytes at a time where that is given. sizes:
    ``shard_sizes`` of the stores that are not complete. Raises StoreError where it does not fit on the disk."""
    for name, plan in plans.items():
        whole, shards = plan.bytes(plan.tokens, plan.finals, plan.rows), len(plan.shards) - 1
        layers = f"layers {', '.join(map(str, plan.layers))} and " if plan.layers else ""
        done = f"; {shards - len(todo[name])} of {shards} shards are there" if len(todo[name]) < shards else ""
        console.print(
            f"{name}: {plan.rows:,} rows, {plan.tokens:,} tokens; {layers}final at {plan.finals:,} positions "
            f"({plan.finals / plan.tokens:.0%}) as {plan.dtype}: {human(whole)}, {human(whole / plan.tokens)} a token"
            f"{done}",
            markup=False,
        )
    left = [sizes[name][number] for name, shards in todo.items() for number in shards]
    if not left:
        return
    needed = sum(left) if keep is None else min(sum(left), keep)
    console.print(f"writing {human(needed)} to {folder}", markup=False)
    check_disk(folder, needed, 2 * len(left))
    if isinstance(folder, Url):
        check_disk(folder.cache, max(left))  # where a shard is written before it is sent


def refuse_own_memory(place: Path | Url, who: str) -> None:
    """Raises StoreError for fsspec's memory://, which is a dictionary in each process."""
    if "memory" in str(place).partition("://")[0].split("::"):
        raise StoreError(
            f"features.dir {place}: memory:// is each process's own memory, which {who} cannot share. Set features.dir "
            "to a folder (/dev/shm/NAME is memory, too) or to an address that all of them see (s3://, gs://, ...)"
        )


@contextmanager
def saying_why_not_written(place: Path | Url) -> Iterator[None]:
    """Raises StoreError for an OSError that says that there is no room, or that nothing may be written."""
    try:
        yield
    except OSError as error:
        if why := no_room(error):
            raise StoreError(f"{place}: {why}; {ROOM}") from None
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreError(
                f"{place} is not complete and cannot be written ({error.strerror}): make it writable for the capture, "
                "or set features.dir to another folder"
            ) from None
        raise


def command(recipe: Recipe, console: Console) -> None:
    """What `headtrain capture` and `python -m headtrain.capture` do. Raises as ``capture`` and ``stream`` do."""
    refuse_own_memory(recipe.features_dir, "this command and the training that reads after it")
    if recipe.features.mode == "stream":
        stream(recipe, console=console)
    else:
        capture(recipe, console=console)


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
    capture is needed: training runs the target itself. With features.mode=stream this stays ahead of a training that
    is started beside it, on at most features.keep_gb of disk, and ends with it.

    Several processes, on any number of nodes, share the work: accelerate launch -m headtrain.capture RECIPE.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=launched("RANK") > 0)
    try:
        command(load_recipe(recipe, overrides or []), console)
    except (RecipeError, DataError, TargetError, StoreError) as error:
        console.quiet = False
        console.print(f"error: {error}", style="red", markup=False)
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
