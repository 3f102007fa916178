"""A target's own files beside a head: for an engine that reads a head inside its target's checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..metadata import TargetIdentity, write_json
from ..target.files import tensor_files
from ..target.fingerprint import local_weight_digests
from .engines import ExportError
from .files import CONFIG, read_json

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
COMPUTED = ".rotary_emb.inv_freq"  # a table that older files carry and no loader reads


def target_tensors(
    folder: Path | None, target: TargetIdentity, wanted: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The tensors of the target that lies in ``folder``, by the names and with the shapes that ``wanted`` gives them.

    What an otherwise equal decoder has besides is added: zeros for a bias that the target does not have, its embedding
    for an lm_head that is tied to it. The tensors stay in their files until they are read. Raises ExportError,
    TargetError: not the target that ``target`` describes, or tensors that ``wanted`` has no place for.
    """
    if folder is None or not any(folder.glob("*.safetensors")):
        raise ExportError(
            f"this form holds the target as well, and {folder or target.name} is no folder of safetensors: name one by "
            "--target (a GGUF file becomes one by `headtrain convert`)"
        )
    if read_json(folder / CONFIG).get("use_sliding_window"):
        raise ExportError(f"{folder}: a target with sliding windows, which the combined checkpoint's class has not")
    found = local_weight_digests(folder)
    if differ := sorted(n for n in {*found, *target.acting} if found.get(n) != target.acting.get(n)):
        adapted = " with its adapter merged" if target.adapter is not None else ""
        raise ExportError(
            f"{folder} is not the target that the head was trained on{adapted}: {', '.join(differ)} of the weights "
            "differ"
        )
    tensors = {}
    for name, path in tensor_files(folder).items():
        if not name.endswith(COMPUTED):
            with safe_open(path, framework="pt") as file:
                tensors[name] = file.get_tensor(name)
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise ExportError(f"{folder}: tensors that the combined checkpoint has no place for: {', '.join(unknown[:4])}")
    for name in wanted.keys() - tensors.keys():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(wanted[name])
    if LM_HEAD not in tensors and target.target_shape().tied:
        tensors[LM_HEAD] = tensors[EMBEDDING].clone()
    wrong = [n for n, shape in wanted.items() if n not in tensors or tuple(tensors[n].shape) != tuple(shape)]
    if wrong:
        raise ExportError(f"{folder}: missing, or of another shape than its config gives: {', '.join(wrong[:4])}")
    return tensors


def copy_beside(folder: Path, out: Path) -> None:
    """The target's tokenizer and generation settings; the latter made from its config where it has none, as engines
    take the end of a text from there."""
    for name in TOKENIZER:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if (folder / GENERATION).is_file():
        shutil.copyfile(folder / GENERATION, out / GENERATION)
        return
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(out / GENERATION, {key: config[key] for key in keys if config.get(key) is not None})
