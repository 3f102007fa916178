"""`headtrain import`: a published head becomes a head of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ..config import RecipeError, TargetSection
from .common import device, err, out


def import_(
    folder: Annotated[
        Path,
        typer.Argument(help="what another tool wrote (config.json, tensors), or user/name on the Hub"),
    ],
    target: Annotated[str, typer.Option(help="the target that the head drafts for: Hub id, folder, package:NAME")],
    to: Annotated[Path, typer.Option("--out", help="folder to write")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of config.json that the folder lacks or has wrong; repeat for several"),
    ] = None,
) -> None:
    """Read a published head strictly, and write it as a checkpoint: to evaluate, to continue from, to export again.

    Layouts: EAGLE and HASS, EAGLE-3, Medusa, speculators, SpecForge, ModelOpt, and those that engines load. Pickles are
    read as tensors only.

    \b
    headtrain import EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --out imported
    headtrain eval imported --target meta-llama/Llama-3.1-8B-Instruct --prompts data/heldout
    headtrain export imported --engine sglang --target meta-llama/Llama-3.1-8B-Instruct --out for-sglang
    """
    from ..export.hub import download_export, is_hub_id
    from ..export.importing import import_head, read_source
    from ..target.load import identify_section, load_target

    section = TargetSection(path=target)
    folder = download_export(str(folder)) if is_hub_id(folder) else folder
    source = read_source(folder, read_settings(settings or []))
    weights = None
    if source.needs_weights:
        err.print(f"loading {target}: {', '.join(source.needs_weights)} must be its own", markup=False)
        loaded = load_target(section, device())
        identity, weights = loaded.identity, loaded.weights()
    else:
        identity = identify_section(section)
    metadata = import_head(source, identity, to, weights)
    if metadata.imported is None:
        out.print(f"wrote {to}: a {metadata.head.kind} head with the training record of its export", markup=False)
        return
    out.print(f"wrote {to}: a {metadata.head.kind} head from {metadata.imported.layout}'s layout", markup=False)
    for note in metadata.imported.notes:
        out.print(f"  {note}", markup=False)
    out.print("Nothing shows whether it was trained on exactly this target: measure it, headtrain eval", markup=False)


def read_settings(given: list[str]) -> dict[str, Any]:
    """``["a=1", "b=[2, 3]"]`` -> {"a": 1, "b": [2, 3]}; values are YAML. Raises RecipeError."""
    out: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RecipeError(f"--set {text!r}: expected KEY=VALUE, for example norm_before_residual=false")
        try:
            out[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RecipeError(f"--set {text!r}: {value!r} is no YAML value") from None
    return out
