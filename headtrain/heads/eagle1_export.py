"""EAGLE-1 as engines load it (see ``headtrain.export.engines`` for which engine reads which dialect).

Dialect ``vllm``: a plain Llama config of one layer with ``fc`` [H, 2H] (embedding, feature) and ``layers.0.*`` without
an input norm; there is no final norm, and the embedding and lm_head are the target's, which engines share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..types import TargetShape
from .base import ExportSpec
from .eagle3_export import rope_forms

ARCHITECTURE = "LlamaForCausalLM"


def spec(head, dialect: str) -> ExportSpec:
    if dialect != "vllm":
        raise KeyError(dialect)
    if head.config.bias:  # seen in 0.32: no error, and nothing is accepted as trained
        raise ValueError("vLLM drops fc.bias without a word; train with head.bias=false")
    shape = head.shape
    if shape.hidden_act != "silu":
        raise ValueError(f"{ARCHITECTURE} has silu only; this head was trained with {shape.hidden_act}")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": head.intermediate,
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
        **rope_forms(shape.rope),
    }
    return ExportSpec(config=config, tensors=dict(head.state_dict()), method="eagle")


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if dialect != "vllm":
        raise KeyError(dialect)
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures {config.get('architectures')!r}, expected [{ARCHITECTURE!r}]")
    if config.get("num_hidden_layers") != 1:
        raise ValueError(f"num_hidden_layers {config.get('num_hidden_layers')!r}: the head has one layer, expected 1")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("attention_bias or mlp_bias is true: the head's layer has no biases, expected false")
    size, middle = config["hidden_size"], config["intermediate_size"]
    inner = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (inner, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, inner),
        "mlp.gate_proj": (middle, size),
        "mlp.up_proj": (middle, size),
        "mlp.down_proj": (size, middle),
        "post_attention_layernorm": (size,),
    }
    return {"fc.weight": (size, 2 * size)} | {f"layers.0.{name}.weight": s for name, s in layer.items()}


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The head of an exported folder; ``shape``: the target's. RoPE, eps and sizes are the config's own."""
    from .io import load_strict

    expected_tensors(dialect, config)
    own = shape.replace(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        hidden_act=config["hidden_act"],
        rope=dict(config["rope_parameters"]),
    )
    head = cls(cls.Config(intermediate_size=config["intermediate_size"]), own, None)
    load_strict(head, tensors, f"{dialect} export")
    return head
