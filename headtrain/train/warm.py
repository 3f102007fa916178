"""Warm start: which trained head a run continues from, checked before anything expensive begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import Tensor

from ..config import Recipe, RecipeError
from ..export.engines import ExportError
from ..export.folder import recorded_head, verify_folder
from ..heads.base import DraftHead, HeadConfig
from ..heads.catalog import head_class, outline
from ..heads.io import FILE, load_head
from ..heads.resize import continue_from
from ..metadata import Metadata, TargetIdentity
from ..types import TargetShape, TargetWeights, Wants
from . import checkpoint


@dataclass
class WarmStart:
    """A trained head to continue from. keep: its draft vocabulary stays as it was trained, whatever the data holds."""

    head: DraftHead
    metadata: Metadata
    folder: Path
    keep: bool

    @property
    def draft_ids(self) -> Tensor | None:
        return self.head.draft_ids

    def start(self, head: DraftHead, weights: TargetWeights) -> list[str]:
        """Give ``head`` the trained tensors; returns lines for the log. Raises RecipeError where they do not fit."""
        try:
            head.init_from_target(weights)  # what rows of new tokens start from
            kept = continue_from(head, self.head, str(self.folder))
        except ValueError as error:
            raise RecipeError(f"train.warm_start: {error}") from None
        lines = [f"started from {self.folder}"]
        new, old = head.draft_vocab_size - kept, self.head.draft_vocab_size - kept
        if new or old:
            lines.append(
                f"draft vocabulary of {head.draft_vocab_size:,}: {kept:,} tokens kept as trained, {new:,} start as in "
                f"a fresh head, {old:,} left out"
            )
        return lines


def read_warm_start(recipe: Recipe, config: HeadConfig) -> WarmStart | None:
    """The head that ``train.warm_start`` names: a run's best checkpoint, a checkpoint, or an export in any engine's
    form. Raises RecipeError, without loading a target, where it is not there, damaged, or another kind of head."""
    path = recipe.train.warm_start
    if path is None:
        return None
    if not Path(path).is_dir():
        raise RecipeError(
            f"train.warm_start: no folder {path!r}; expected a run, a checkpoint or an export on this machine (nothing "
            "is fetched: download a Hub repository first; and nothing is started at random instead)"
        )
    try:
        head, metadata, folder = read_trained(Path(path))
    except (ExportError, checkpoint.CheckpointError, ValueError) as error:
        raise RecipeError(f"train.warm_start: {error}") from None
    if metadata.head.kind != config.kind:
        raise RecipeError(f"train.warm_start: {folder} is a {metadata.head.kind!r} head, the recipe's {config.kind!r}")
    _refuse_differences(folder, head.config, config)
    return WarmStart(head, metadata, folder, keep=recipe.train.warm_start_vocab == "keep")


def read_trained(path: Path) -> tuple[DraftHead, Metadata, Path]:
    """A head from a run, a checkpoint, or an export in any engine's form (read strictly), its metadata, and the folder
    that it came from."""
    if (path / "config.json").is_file() and not (path / FILE).is_file():  # an engine's form
        read = verify_folder(path)
        if read.metadata is None or read.head is None:
            raise RecipeError(f"{path} has no headtrain.json (another tool's?): `headtrain import` it first")
        return recorded_head(read.head, read.metadata), read.metadata, path
    folder = checkpoint.find_sound(path)
    return *load_head(folder), folder


def _refuse_differences(folder: Path, trained: HeadConfig, asked: HeadConfig) -> None:
    if lines := config_differences(trained, asked):
        raise RecipeError(
            f"train.warm_start: {folder} computes something else than the recipe's head:\n  " + "\n  ".join(lines)
        )


def config_differences(trained: HeadConfig, asked: HeadConfig) -> list[str]:
    """One line for each setting that changes what the head computes. A setting that one of the two leaves open shows in
    the layers that are read, in the tensors' shapes, or once a head was built with it, which are compared, too."""
    free = asked.training_only | {"draft_vocab_size"}
    pairs = {name: (getattr(trained, name), getattr(asked, name)) for name in type(asked).model_fields.keys() - free}
    return [
        f"head.{name}: {was!r} when trained, {now!r} in the recipe"
        for name, (was, now) in sorted(pairs.items())
        if was != now and was is not None and now is not None
    ]


def check_warm_start(
    warm: WarmStart, config: HeadConfig, shape: TargetShape, wants: Wants, identity: TargetIdentity, console: Console
) -> None:
    """Whether the trained head fits this target and this recipe. Raises RecipeError naming both sides."""
    # what a family decides where the recipe does not
    _refuse_differences(warm.folder, warm.head.config, outline(config, shape).config)
    differences = warm.metadata.target.differences(identity)
    fatal = [line for line in differences if line.startswith(("target shape", "target tokenizer"))]
    if fatal:
        raise RecipeError(
            f"train.warm_start: {warm.folder} was trained on another target (its draft vocabulary and its features are "
            "that target's):\n  " + "\n  ".join(fatal)
        )
    for line in differences:  # the same target in another version: what a warm start is for
        console.print(f"warm start on another version of the target: {line}", markup=False)
    if warm.metadata.target.adapter is not None and identity.adapter is None:
        console.print(
            f"warm start: the adapter that {warm.folder} was trained with is not continued (train.joint begins one of "
            "its own, at zero), so the head starts on a target that it was not trained for. To go on from the adapted "
            "target: target.path=CHECKPOINT/merged, which train.joint.save=merged writes",
            markup=False,
        )
    if warm.head.wants().layers != wants.layers:
        raise RecipeError(
            f"train.warm_start: {warm.folder} reads target layers {list(warm.head.wants().layers)}, this recipe's head "
            f"{list(wants.layers)}"
        )
    asked = head_class(config.kind).uses_draft_vocab(config, shape)
    found = None if warm.draft_ids is None else warm.draft_ids.numel()
    if warm.keep and found != asked:
        raise RecipeError(
            f"train.warm_start: {warm.folder} has a draft vocabulary of {found or 'all tokens'}, the recipe asks for "
            f"{asked or 'all tokens'}; it stays as it was trained: set the head's draft_vocab_size to it, or "
            "train.warm_start_vocab=recipe to choose another one from this data"
        )
