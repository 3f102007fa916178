"""accelerate launch --config_file recipes/backend/single.yaml -m headtrain.train RECIPE [key=value ...]"""

from __future__ import annotations

import os

# Large pages for large tensors: torch reads this once, at its first allocation. An eighth off a step on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import ctypes
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below: no traceback of each rank's

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ..config import Recipe, RecipeError, load_recipe
from ..data import DataError
from ..data.manifest import StoreError
from ..estimate import plan_lines
from ..metadata import MetadataError
from ..target.shape import TargetError
from .backend import Backend
from .checkpoint import CheckpointError
from .launched import check_ranks
from .lock import run_lock
from .nodes import keeps
from .setup import prepare_run
from .trainer import TrainError, TrainResult, summary, train
from .watch import RankError, Stopped, Watch

EXPECTED = (
    RecipeError, DataError, TargetError, StoreError, CheckpointError, TrainError, MetadataError, OSError,
)  # fmt: skip


def follow_launcher() -> None:
    """`accelerate launch` does not pass SIGTERM on to a single process and would leave it behind. On Linux the kernel
    is asked to send it when the launcher ends, so that the run saves and exits."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if parent.exists() and b"accelerate" in parent.read_bytes():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.lr=1e-4")] = None,
    fresh: Annotated[bool, typer.Option(help="start over; an earlier run is kept aside as previous-N")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print an estimate and the resolved recipe only")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="seconds for all ranks to start, and for one exchange between them")
    ] = 600.0,
) -> None:
    """Train the recipe's head. Running the same command again resumes from the last checkpoint.

    Features are captured first where they are not there yet. SIGTERM and Ctrl-C, to any rank, save and exit: after the
    optimizer step at hand (alone: the micro-batch); of an evaluation or a save that is running, after that and (not
    alone) one step more; at once before training has begun (complete shards are kept). Exit codes: 0 done or stopped by
    SIGTERM, 130 stopped by Ctrl-C, 2 an error that the message explains. A rank that fails, dies or does not start ends
    the others, which name it.
    """
    follow_launcher()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_ranks()
    except RecipeError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    try:
        if dry_run:
            of = load_recipe(recipe, overrides or [])
            if os.environ.get("RANK", "0") == "0":
                print("\n".join(plan_lines(of)))
            return
        with Watch(timeout) as watch:
            result = run(load_recipe(recipe, overrides or []), watch, console, fresh)
    except (*EXPECTED, RankError) as error:
        _end(2, f"error: {'' if isinstance(error, RankError) else _who()}{error}", "red")
    except Stopped:
        _end(0, "stopped at once: complete shards and checkpoints are kept; the same command goes on")
    except KeyboardInterrupt:
        _end(130, "interrupted: complete shards and checkpoints are kept; the same command goes on")
    except Exception as error:
        if not _who():
            raise
        traceback.print_exc()
        _end(1, f"error: {_who()}{type(error).__name__}: {error}", "red")
    if result.stopped:
        raise typer.Exit(130 if result.stopped == "SIGINT" else 0)
    console.print(f"trained {result.total} steps; last {result.last}, best {result.best or '(no held-out rows)'}")
    if result.evaluation:
        console.print(f"held-out at the end: {summary(result.evaluation)}", markup=False)
    if result.bad_steps:
        console.print(f"{result.bad_steps} steps had a non-finite loss or gradient and were skipped")


def run(recipe: Recipe, watch: Watch, console: Console, fresh: bool) -> TrainResult:
    backend = Backend(recipe.train.precision, recipe.train.trackers, recipe.output_dir, watch.timeout)
    console.quiet = not backend.main
    if backend.idle_gpus:
        console.print(f"warning: {backend.idle_gpus}", style="yellow", markup=False)
    with run_lock(recipe.output_dir, console) if keeps(recipe.output_dir, watch) else nullcontext():
        return train(recipe, prepare_run(recipe, backend, console, watch), backend, fresh, watch)


def _who() -> str:
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""


def _end(code: int, message: str, style: str | None = None) -> NoReturn:
    """Say it on every rank; one of several then leaves at once, as process groups wait for peers when they end."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(message, style=style, markup=False)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code) from None


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(typer.run(main))
