"""What ``--drafter`` and ``--tree`` mean: specs as people write them -> drafters on a loaded target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Recipe, RecipeError, TargetSection
from ..decode.draft_model import ModelDrafter
from ..decode.drafters import Drafter, HeadDrafter
from ..decode.lookup import LookupDrafter
from ..decode.tree import DynamicTree, StaticTree, build_static
from ..target.load import load_target
from ..target.model import Target
from ..types import Row
from .common import device, read_head, require_same_target

LOOKUPS = {"ngram": "text", "prompt-lookup": "prompt", "answer-lookup": "answer"}
CALIBRATION_ROWS = 64


@dataclass
class Maker:
    """Makes drafters on one target. run: RUN, recipe: its recipe (for the rows that static trees are chosen on)."""

    target: Target
    run: Path | None
    recipe: Recipe | None
    branch: int | None = None
    tree_depth: int | None = None
    _rows: list[Row] = field(default_factory=list)

    def chain(self, spec: str) -> Drafter:
        """Raises RecipeError, MetadataError, TokenizerMismatch."""
        name, _, more = spec.partition(":")
        if name in LOOKUPS:
            try:
                return LookupDrafter(LOOKUPS[name], **_numbers(spec, more, ("longest", "shortest")))
            except ValueError as error:
                raise RecipeError(f"--drafter {spec}: {error}") from None
        if name == "model":
            if not more:
                raise RecipeError(f"--drafter {spec}: which model? write model:FOLDER")
            return ModelDrafter(load_target(TargetSection(path=more), device()), self.target)
        if name == "head" and more:
            raise RecipeError(f"--drafter {spec}: `head` is RUN's own; for another one write its folder, {more}")
        if name == "head" and self.run is None:
            raise RecipeError("--drafter head: give the RUN whose head it is")
        folder = self.run if name == "head" else Path(spec)
        if not folder.is_dir():
            raise RecipeError(f"--drafter {spec}: no such folder, and not one of head, model:, {', '.join(LOOKUPS)}")
        head, metadata, where = read_head(folder)
        require_same_target(metadata, self.target.identity, where)
        head.attach(self.target.weights())
        name = None if folder == self.run else f"{metadata.head.kind} of {folder}"
        return HeadDrafter(head.to(self.target.device), name=name, trained_depth=metadata.head.depth)

    def tree(self, drafter: Drafter, nodes: int, depth: int) -> tuple[Drafter, int]:
        """The same drafter, drafting trees of ``nodes`` nodes, and their depth (``depth`` for a lookup): a static
        tree from measured rank accuracies where each
        depth has its own module, EAGLE-2's dynamic one where one module unrolls, several occurrences for a lookup."""
        if isinstance(drafter, LookupDrafter):
            depth = self.tree_depth or depth
            branches = self.branch or max(2, nodes // depth)
            return LookupDrafter(drafter.where, drafter.longest, drafter.shortest, branches, nodes), depth
        if isinstance(drafter, HeadDrafter):
            plan = self._static(drafter, nodes) if drafter.max_k is not None else self._dynamic(drafter, nodes)
            same = {"name": drafter.name, "trained_depth": drafter.trained_depth}
            return HeadDrafter(drafter.head, plan, **same), plan.depth
        plan = self._dynamic(drafter, nodes)
        return ModelDrafter(drafter.model, self.target, plan), plan.depth

    def _dynamic(self, drafter: Drafter, nodes: int) -> DynamicTree:
        depth = self.tree_depth or drafter.usual_depth or 6  # of a draft model, and of an imported head, nobody says
        depth = min(depth, nodes)
        # as many nodes a level as the budget can keep; ten, the reference's, from 60 nodes on
        return DynamicTree(nodes, depth, self.branch or max(2, min(10, -(-nodes // depth))))

    def _static(self, drafter: HeadDrafter, nodes: int) -> StaticTree:
        from ..capture import plan_rows
        from ..evaluate.ranks import rank_accuracy

        if not self._rows:
            if self.recipe is None:
                raise RecipeError(
                    "--tree: a static tree is chosen by rank accuracies on training rows, but no recipe.yaml beside "
                    "this head names them; give the run instead of the export"
                )
            self._rows = plan_rows(self.recipe, self.target.tokenizer)["train"].rows[:CALIBRATION_ROWS]
        depth = min(self.tree_depth or drafter.max_k, drafter.max_k)
        accuracy, _ = rank_accuracy(self.target, drafter, self._rows, depths=depth, ranks=self.branch or 10)
        return build_static(accuracy, nodes)


def numbers(option: str, text: str, kind: type, low: float) -> list:
    """ "1,2,3" as distinct finite numbers of at least ``low``. Raises RecipeError."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not low <= value < math.inf for value in found):
        raise RecipeError(f"{option} {text}: expected numbers of at least {low:g}, separated by commas")
    return list(dict.fromkeys(found))


def _numbers(spec: str, more: str, names: Sequence[str]) -> dict[str, int]:
    out = {}
    for part in filter(None, more.split(",")):
        name, _, value = part.partition("=")
        if name not in names or not (value.isascii() and value.isdigit()):
            raise RecipeError(f"--drafter {spec}: expected {', '.join(f'{n}=NUMBER' for n in names)}, found {part!r}")
        out[name] = int(value)
    return out
