"""accelerate launch --config_file recipes/backend/single.yaml -m headtrain.train RECIPE [key=value ...]"""

from __future__ import annotations

import os

# Large pages for large tensors: torch reads this once, at its first allocation. An eighth off a step on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import ctypes
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..config import RecipeError, load_recipe
from ..data import DataError
from ..data.manifest import StoreError
from ..estimate import plan_lines
from ..metadata import MetadataError
from ..target.shape import TargetError
from .backend import Backend
from .checkpoint import CheckpointError
from .lock import run_lock
from .setup import prepare_run
from .trainer import TrainError, summary, train

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
) -> None:
    """Train the recipe's head. Running the same command again resumes from the last checkpoint.

    Features are captured first where they are not there yet. SIGTERM and Ctrl-C save and exit; exit codes: 0 done or
    stopped by SIGTERM, 130 stopped by Ctrl-C, 2 an error that the message explains.
    """
    follow_launcher()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        of = load_recipe(recipe, overrides or [])
        if dry_run:
            if os.environ.get("RANK", "0") == "0":
                print("\n".join(plan_lines(of)))
            return
        backend = Backend(of.train.precision, of.train.trackers, of.output_dir)
        console.quiet = not backend.main
        with run_lock(of.output_dir, console) if backend.main else nullcontext():
            result = train(of, prepare_run(of, backend, console), backend, fresh)
    except EXPECTED as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted before training began; the same command goes on")
        raise typer.Exit(130) from None
    if result.stopped:
        raise typer.Exit(130 if result.stopped == "SIGINT" else 0)
    console.print(f"trained {result.total} steps; last {result.last}, best {result.best or '(no held-out rows)'}")
    if result.evaluation:
        console.print(f"held-out at the end: {summary(result.evaluation)}", markup=False)
    if result.bad_steps:
        console.print(f"{result.bad_steps} steps had a non-finite loss or gradient and were skipped")


if __name__ == "__main__":
    sys.exit(typer.run(main))
