"""`headtrain stitch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import RecipeError, TargetSection
from .common import TargetOption, err, out, read_head, recipe_of, require_same_target, target_section


def stitch(
    run: Annotated[Path, typer.Argument(help="a run, a checkpoint or an export of a head; or a patch made by --patch")],
    to: Annotated[Path, typer.Option("--out", help="folder to write")],
    target: TargetOption = None,
    patch: Annotated[
        bool, typer.Option("--patch", help="write only the trained tensors; apply them with `headtrain stitch PATCH`")
    ] = False,
    force: Annotated[bool, typer.Option(help="replace an earlier stitched folder")] = False,
) -> None:
    """Write a fine-tuned draft module back into its target's checkpoint: a full copy, or a small patch folder.

    Every other tensor and file stays bit-identical; the trained tensors are cast to the type that they have there.

    \b
    headtrain stitch runs/mine --target models/mine --out models/mine-tuned
    headtrain stitch runs/mine --target models/mine --out patches/mine --patch
    headtrain stitch patches/mine --target models/mine --out models/mine-tuned
    """
    from ..export.engines import ExportError
    from ..export.stitch import is_patch, read_patch
    from ..export.stitch import stitch as write
    from ..target.files import tensor_files
    from ..target.load import identify_section
    from ..target.own_module import ModuleTensors

    before = None
    if is_patch(run):
        tensors, before, metadata = read_patch(run)
        section = target_section(target, None)
        source = _folder(section)
    else:
        head, metadata, where = read_head(run)
        recipe = recipe_of(run)
        section = target_section(target, recipe)
        if recipe is not None and target is not None:  # another copy of the recipe's target, read as the recipe says
            section = recipe.target.model_copy(update={"path": target})
        source = _folder(section)
        try:
            tensors = head.checkpoint_tensors(ModuleTensors(tensor_files(source)).keys())
        except ValueError as error:
            raise ExportError(f"{where}: {error}") from None
        err.print(f"comparing {source} with the target of {where}", markup=False)
        require_same_target(metadata, identify_section(section), where)
    path = write(source, tensors, to, patch=patch, force=force, metadata=metadata, before=before)
    out.print(f"{path}: {len(tensors)} tensors written, every other one as in {source}", markup=False)


def _folder(section: TargetSection) -> Path:
    from ..target.load import locate

    place = locate(section)
    if not place.local or place.gguf:
        raise RecipeError(f"--target {section.path}: expected the checkpoint's folder of safetensors on this machine")
    return Path(place.base)
