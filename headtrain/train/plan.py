"""What each step of a run is, from the recipe alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..config import Recipe, RecipeError, Stage, TrainSection


def check_accumulation(recipe: Recipe, ranks: int, resumes: bool) -> None:
    """Raises RecipeError where the micro-batches of a step do not divide over the ranks. A run that goes on keeps its
    accumulation, so it may have ranks left over; not where ranks run a split target together, as often each."""
    count = recipe.train.accumulation
    if count % ranks == 0 or (resumes and recipe.target.shard == "none"):
        return
    if resumes:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise RecipeError(
            f"train.accumulation: {count} micro-batches do not divide over {ranks} ranks, as they must where target."
            f"shard={recipe.target.shard}; this run can go on with {fitting} ranks"
        )
    raise RecipeError(
        f"train.accumulation: {count} micro-batches do not divide over {ranks} ranks; use a multiple of {ranks}"
    )


def total_steps(settings: TrainSection, micro_batches: int) -> int:
    """Optimizer steps of a run whose epoch has ``micro_batches``."""
    return settings.steps or max(1, round(settings.epochs * micro_batches / settings.accumulation))


def depth_at(stages: Sequence[Stage], step: int, total: int, full: int) -> int:
    """The depth of optimizer step ``step`` (1-based): stages end at rounded fractions of ``total``; ``full`` without
    stages."""
    gone = 0.0
    for stage in stages:
        gone += stage.fraction
        if step <= round(gone * total):
            return stage.depth
    return stages[-1].depth if stages else full


def micro_seed(seed: int, index: int) -> int:
    """32 bits for the generators while micro-batch ``index`` is computed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big")
