"""What the verbs share: consoles, how a run or an export is found and read, the same-target rule."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..config import Recipe, RecipeError, TargetSection, load_recipe

if TYPE_CHECKING:
    from ..heads.base import DraftHead
    from ..metadata import Metadata, TargetIdentity
    from ..target.model import Target

WIDE = 240  # columns of a file or a pipe, in which nothing needs to be cut; COLUMNS says otherwise, as in other tools


def _console() -> Console:
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(soft_wrap=True, highlight=False, width=None if narrow else WIDE)


out = _console()
err = Console(stderr=True, soft_wrap=True, highlight=False)

RunArgument = Annotated[Path, typer.Argument(help="a run (its best checkpoint), a checkpoint, or an export")]
TargetOption = Annotated[
    str | None, typer.Option(help="Hub id, folder, .gguf file or package:NAME; default: as the run's recipe has it")
]


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def existing(run: Path) -> Path:
    """``run`` itself. Raises RecipeError where it is no folder: a mistyped path is not an untrained run."""
    if not run.is_dir():
        found = "is a file" if run.exists() else "is not there"
        raise RecipeError(f"no run, checkpoint or export at {run}: it {found}; give a folder that headtrain wrote")
    return run


def checkpoint_of(run: Path) -> Path:
    """A run's best checkpoint, or the folder itself where it already holds a head. Raises RecipeError,
    CheckpointError."""
    from ..train.checkpoint import find_sound

    return find_sound(existing(run))


def read_head(run: Path) -> tuple[DraftHead, Metadata, Path]:
    """A head from a run, a checkpoint, or an export in any engine's form (read strictly), its metadata, and the folder
    that it came from."""
    from ..train.warm import read_trained

    return read_trained(existing(run))


def recipe_of(run: Path) -> Recipe | None:
    """The resolved recipe that a run keeps, looked for in the folder and above (a checkpoint lies inside its run)."""
    for folder in (run, *run.resolve().parents[:2]):
        if (folder / "recipe.yaml").is_file():
            return load_recipe(folder / "recipe.yaml")
    return None


def target_section(path: str | None, recipe: Recipe | None, required: bool = True) -> TargetSection | None:
    if path is not None:
        return TargetSection(path=path)
    if recipe is not None:
        return recipe.target
    if required:
        raise RecipeError("which target? give --target (no recipe.yaml beside this head names one)")
    return None


def load_for(section: TargetSection, run: Path | None) -> Target:
    """Load a target; where ``run``'s head was trained with an adapter on it, with that adapter."""
    from ..metadata import FILE, Metadata
    from ..target.adapter import adopt
    from ..target.load import load_target

    target = load_target(section, device())
    if run is not None and ((run / FILE).is_file() or (run / "checkpoints").is_dir()):
        folder = run if (run / FILE).is_file() else checkpoint_of(run)
        adopt(target, Metadata.read(folder).target, folder)
    return target


def require_same_target(metadata: Metadata, found: TargetIdentity, where: Path) -> None:
    """A head drafts for the target it was trained on; anything else stops here with both values."""
    if lines := metadata.target.differences(found):
        raise RecipeError(f"{where} was trained on another target:\n  " + "\n  ".join(lines))
