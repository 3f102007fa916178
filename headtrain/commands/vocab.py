"""headtrain vocab: another draft vocabulary for a trained head, without capturing again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import RecipeError
from .common import (
    RunArgument,
    TargetOption,
    err,
    load_for,
    out,
    read_head,
    recipe_of,
    require_same_target,
    target_section,
)


def vocab(
    run: RunArgument,
    size: Annotated[int, typer.Option(help="tokens of the new draft vocabulary; the target's own size: all of them")],
    to: Annotated[Path, typer.Option("--out", help="folder to write")],
    data: Annotated[
        list[str] | None, typer.Option(help="count tokens in these files; default: the training data of the run")
    ] = None,
    target: TargetOption = None,
) -> None:
    """Give a trained head a larger or smaller draft vocabulary: the most frequent tokens of its data.

    Rows of kept tokens are copied, new ones start as in a fresh head. Stored features serve the new head as they are.
    A recipe is written beside it that trains on from there.
    """
    import yaml

    from .. import vocab as vocabulary
    from ..capture import plan_rows
    from ..heads.io import head_metadata, save_head
    from ..heads.resize import with_draft_ids
    from ..metadata import write_text
    from ..target.adapter import copy_adapter

    head, metadata, folder = read_head(run)
    everything = head.shape.vocab_size
    if not 1 <= size <= everything:
        raise RecipeError(f"--size {size}: expected 1 to {everything}, the target's vocabulary")
    if to.exists() and any(to.iterdir()):
        raise RecipeError(f"--out {to} is not empty; give a new folder")
    recipe = recipe_of(run)
    if recipe is None:
        raise RecipeError(f"no recipe.yaml beside {run}: it says how rows are read; give the run or a checkpoint of it")
    counted = recipe.model_copy(deep=True)
    if data:
        counted.data.train = data
    loaded = load_for(target_section(target, recipe), folder)
    require_same_target(metadata, loaded.identity, folder)
    rows = plan_rows(counted, loaded.tokenizer)["train"].rows
    counts = vocabulary.count_tokens(rows, everything)
    try:
        ids = vocabulary.choose(counts, size) if size < everything else None
        new = with_draft_ids(head, ids, loaded.weights())
    except ValueError as error:
        raise RecipeError(str(error)) from None
    changed = head_metadata(new, metadata.target, training=metadata.training)
    changed.head.depth = metadata.head.depth
    save_head(to, new, changed)
    if metadata.target.adapter is not None:
        copy_adapter(folder, to)

    recipe.name, recipe.features.dir = f"{recipe.name}-vocab{size}", str(recipe.features_dir)
    recipe.output, recipe.head = None, new.config.model_dump(mode="json")
    recipe.train.warm_start, recipe.train.warm_start_vocab = str(to), "keep"
    write_text(to / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    before, after = (_ids(h, everything) for h in (head, new))
    kept = len(before & after)
    err.print(f"counted {int(counts.sum()):,} supervised tokens in {len(rows):,} rows", markup=False)
    out.print(
        f"{to}: {len(after):,} tokens (was {len(before):,}); {kept:,} kept as trained, {len(after) - kept:,} start as "
        f"in a fresh head, {len(before) - kept:,} left out; they cover {_share(counts, after):.2%} of the supervised "
        f"tokens (was {_share(counts, before):.2%})",
        markup=False,
    )
    out.print(f"train on from there:  headtrain train {to / 'recipe.yaml'}", markup=False)


def _ids(head, everything: int) -> set[int]:
    return set(range(everything)) if head.draft_ids is None else set(head.draft_ids.tolist())


def _share(counts, ids: set[int]) -> float:
    return float(counts[sorted(ids)].sum()) / max(1, int(counts.sum()))
