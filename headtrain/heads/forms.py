"""What the engine forms of all heads share: the entry that a head has in the engine table, how engines are started,
RoPE in both generations of transformers, and the sizes of a Llama-like config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..types import TargetShape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MEDUSA_PICKLE = "medusa_lm_head.pt"
# One of these holds a head's tensors; of several the first is read. The others' are pickles, read as tensors only.
WEIGHT_FILES = (WEIGHTS, "medusa_lm_head.safetensors", MEDUSA_PICKLE, "pytorch_model.bin")
# stands in a config for what its target is called, which a head does not know
TARGET_NAME = "<target>"
UNTRIED = "no, from its source"
REFERENCE = "its own modules, on the CPU"


@dataclass(frozen=True)
class Launch:
    """target: Hub id or folder; folder: the export; k: drafted tokens; layers: hidden_states indices that are read."""

    target: str
    folder: str
    k: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Form:
    """One kind of head in one engine's dialect.

    method: what the engine calls this kind; versions: those known to load it; tested: the one that did, here; modes:
    the ways in which the engine then drafts, as ``export.engines.MODES`` names them; file: where the tensors lie;
    launch(form, where): the engine's start command; source: where the facts are from. with_target: the engine reads the
    head inside its target's checkpoint, so that the export is that whole checkpoint.
    """

    method: str
    launch: Callable[[Form, Launch], str]
    versions: str
    source: str
    tested: str = UNTRIED
    notes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("head",)
    file: str = WEIGHTS
    with_target: bool = False


def launch_vllm(form: Form, at: Launch) -> str:
    config = json.dumps({"method": form.method, "model": at.folder, "num_speculative_tokens": at.k})
    return f"vllm serve {shlex.quote(at.target)} --speculative-config {shlex.quote(config)}"


def launch_sglang(form: Form, at: Launch) -> str:
    """A chain; a tree with --speculative-eagle-topk above 1."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(at.target)} --speculative-algorithm {form.method} "
        f"--speculative-draft-model-path {shlex.quote(at.folder)} --speculative-num-steps {at.k} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {at.k + 1}"
    )


def rope_forms(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE in the forms of transformers 5 (rope_parameters) and 4 (rope_theta, rope_scaling)."""
    rest = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = rest.get("rope_type", "default") == "default" and len(rest) <= 1
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else rest,
    }


def reference_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE as EAGLE's own code reads it: rope_theta alone, or the scalings linear and dynamic, whose base is always
    10000 there. Raises ValueError for any other."""
    kind = rope.get("rope_type", "default")
    if set(rope) <= {"rope_type", "rope_theta"} and kind == "default":
        return {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    known = kind in ("linear", "dynamic") and set(rope) == {"rope_type", "rope_theta", "factor"}
    if not known or rope["factor"] <= 1 or rope["rope_theta"] != 10000.0:
        raise ValueError(f"the reference code has plain RoPE, linear and dynamic scaling; it cannot compute {rope}")
    scaling = {"type": kind, "factor": float(rope["factor"])}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def read_rope(config: dict[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """RoPE in transformers 5's form from a config of either generation. notes: what had to be assumed is added; None:
    nothing may be assumed. Raises ValueError where both forms are given and disagree."""
    scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None}
    old = {"rope_type": scaling.pop("type", None) or scaling.get("rope_type", "default")}
    old |= {k: v for k, v in scaling.items() if k != "rope_type"}
    theta = config.get("rope_theta", scaling.get("rope_theta"))
    if theta is not None:
        old["rope_theta"] = theta
    new = config.get("rope_parameters")
    if new and "rope_theta" in new:
        new = {"rope_type": new.get("rope_type", "default"), **new}
        given = {k: v for k, v in old.items() if k == "rope_theta" or config.get("rope_scaling")}
        wrong = {k: (v, new.get(k)) for k, v in given.items() if new.get(k) != v}
        if wrong:
            raise ValueError(
                f"rope_parameters and rope_theta/rope_scaling disagree (old form, new form): {wrong}; engines differ "
                "in which they read"
            )
        return new
    if theta is None:
        if notes is None:
            raise ValueError("no rope_theta and no rope_parameters")
        notes.append("rope_theta not given: 10000, the default of Llama's config and of the reference code")
        old["rope_theta"] = 10000.0
    return old


def llama_sizes(shape: TargetShape, intermediate: int) -> dict[str, Any]:
    """The keys of a Llama config of one layer, RoPE apart. Raises ValueError for another activation than silu."""
    if shape.hidden_act != "silu":
        raise ValueError(f"a Llama draft layer has silu only; this head has {shape.hidden_act}")
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }


def check_llama(config: dict[str, Any], architecture: str | None) -> None:
    """Raises ValueError where a config contradicts the one bias-free, untied layer that these heads have."""
    if architecture is not None and config.get("architectures") != [architecture]:
        raise ValueError(f"architectures {config.get('architectures')!r}, expected [{architecture!r}]")
    if config.get("tie_word_embeddings", False):
        raise ValueError("tie_word_embeddings is true: the lm_head is no copy of the embedding, expected false")
    if config.get("num_hidden_layers") != 1:
        raise ValueError(f"num_hidden_layers {config.get('num_hidden_layers')!r}: the head has one layer, expected 1")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("attention_bias or mlp_bias is true: the head's layer has no biases, expected false")


def shape_of(config: dict[str, Any], shape: TargetShape, rope: dict[str, Any]) -> TargetShape:
    """``shape`` (the target's) with the sizes that a head's config has."""
    return shape.replace(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        hidden_act=config["hidden_act"],
        rope=rope,
    )


def layer_shapes(config: dict[str, Any], prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama layer whose q/k/v read ``inputs`` numbers, without its input norms."""
    size, middle = config["hidden_size"], config["intermediate_size"]
    inner = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (inner, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (size, inner),
        "mlp.gate_proj": (middle, size),
        "mlp.up_proj": (middle, size),
        "mlp.down_proj": (size, middle),
        "post_attention_layernorm": (size,),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in layer.items()}


def foreign_llama(config: dict[str, Any], shape: TargetShape, notes: list[str]) -> dict[str, Any]:
    """A Llama config of another tool with its defaults filled in, checked against the target's shape. notes: what had
    to be assumed is added. Raises ValueError."""
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise ValueError(f"config.json gives no {key}: found {config.get(key)!r}")
    for key, value in (("hidden_size", shape.hidden_size), ("vocab_size", shape.vocab_size)):
        if config[key] != value:
            raise ValueError(f"{key} is {config[key]}, the target's {value}: a head of another target")
    if config.get("target_hidden_size", shape.hidden_size) not in (None, shape.hidden_size):
        raise ValueError(f"target_hidden_size is {config['target_hidden_size']}, the target's {shape.hidden_size}")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp {config['pretraining_tp']}: expected 1")
    defaults: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_hidden_layers": 1}
    for key, value in defaults.items():
        if config.get(key) is None:
            notes.append(f"{key} not given: {value}, Llama's default")
    heads = config["num_attention_heads"]
    rope = read_rope(config, notes)
    given = {k: config[k] for k in defaults if config.get(k) is not None}
    check_llama(config | {"num_hidden_layers": given.get("num_hidden_layers", 1)}, None)
    return {
        **{key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
        "model_type": "llama",
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_act": config.get("hidden_act") or "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **defaults,
        **given,
        **rope_forms(rope),
    }


def drafts_everything(head) -> str:
    """What to say of a draft vocabulary where an engine drafts with the target's whole lm_head; empty without one."""
    if head.draft_ids is None:
        return ""
    grow = f"`headtrain vocab RUN --size {head.shape.vocab_size} --out DIR` gives the trained module that, as it is"
    return f"head.draft_vocab_size={head.draft_vocab_size} (it drafts the whole vocabulary; {grow})"
