"""Where a folder of safetensors keeps embedding, lm_head, final norm and layers, without building the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from . import own_module
from .parts import NORM_NAMES
from .shape import TargetError

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
LM_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
LAYER_LISTS = ("layers", "h", "blocks")
OTHER_TOWERS = re.compile(r"(^|\.)(vision|visual|audio|image|mtp|draft|encoder)", re.IGNORECASE)


@dataclass
class TensorNames:
    """Names inside the files. lm_head is the embedding's name where the files hold none (tied). layers: for each layer
    {suffix: name}. files: the file of every tensor."""

    embed: str
    lm_head: str
    final_norm: str
    layers: list[dict[str, str]]
    files: dict[str, Path]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; raises TargetError with its name where it is cut off, damaged or none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise TargetError(f"{path}: damaged, or no safetensors file ({error}); fetch or copy it again") from None


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Name -> file, from ``model.safetensors.index.json`` or the headers of all safetensors files."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {n: folder / f for n, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        if absent := sorted({f.name for f in files.values() if not f.is_file()}):
            raise TargetError(f"{index} names files that are not there: {', '.join(absent)}")
        return files
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path) as file:
            files |= dict.fromkeys(file.keys(), path)
    if not files:
        raise TargetError(f"{folder} holds no *.safetensors; other weight formats are not read: save it as safetensors")
    return files


def _one(names: list[str], endings: tuple[str, ...], what: str, folder: Path) -> str:
    """The shortest name with one of the endings: towers of other modalities carry longer ones, or are named so."""
    found = [n for n in names if any(n == e or n.endswith("." + e) for e in endings)]
    found = [n for n in found if not OTHER_TOWERS.search(n)] or found
    if not found:
        near = [n for n in names if "layers." not in n and ".h." not in n][:12] or names[:12]
        raise TargetError(
            f"{folder}: no {what} among {len(names)} tensors (looked for {', '.join(endings)}); candidates: "
            + ", ".join(near)
        )
    return min(found, key=len)


def find_tensor_names(folder: str | Path) -> TensorNames:
    """Single-file or sharded, with an index or without; raises TargetError with candidates."""
    folder = Path(folder)
    files = tensor_files(folder)
    names = sorted(files)
    embed = _one(names, EMBEDDINGS, "token embedding", folder)
    prefix = embed[: -len(next(e for e in EMBEDDINGS if embed.endswith(e)))]
    inside = [n for n in names if n.startswith(prefix)]
    norms = tuple(f"{prefix}{n}.weight" for n in NORM_NAMES)
    final_norm = next((n for n in norms if n in files), None) or _one(inside, norms, "final norm", folder)
    heads = [n for n in names if any(n == e or n.endswith("." + e) for e in LM_HEADS) and not OTHER_TOWERS.search(n)]
    heads = [n for n in heads if not re.search(r"\.\d+\.", n)]  # attention outputs are called `output` in places
    layers: dict[int, dict[str, str]] = {}
    modules = own_module.layer_modules(names)  # numbered on after the decoder's layers
    pattern = re.compile(rf"{re.escape(prefix)}(?:{'|'.join(LAYER_LISTS)})\.(\d+)\.(.+)")
    for name in inside:
        if not name.startswith(modules) and (match := pattern.fullmatch(name)):
            layers.setdefault(int(match[1]), {})[match[2]] = name
    if not layers or sorted(layers) != list(range(len(layers))):
        raise TargetError(f"{folder}: decoder layers {sorted(layers)} under `{prefix}`, expected 0..n-1 without gaps")
    lm_head = min(heads, key=len) if heads else embed
    return TensorNames(embed, lm_head, final_norm, [layers[i] for i in range(len(layers))], files)
