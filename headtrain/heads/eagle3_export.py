"""EAGLE-3 as engines load it (see ``headtrain.export.engines`` for which engine reads which dialect).

Dialect ``vllm``: ``LlamaForCausalLMEagle3`` with ``fc``, ``midlayer.*``, ``norm``, ``lm_head`` and the offsets ``d2t``;
layer ids as indices into hidden_states. The embedding is the target's: engines share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import vocab
from ..types import TargetShape
from .base import ExportSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def spec(head, dialect: str) -> ExportSpec:
    if dialect != "vllm":
        raise KeyError(dialect)
    if len(head.layer_ids) != 3:
        raise ValueError(f"engines read three layers; this head was trained on {list(head.layer_ids)}")
    if list(head.layer_ids) != sorted(head.layer_ids):
        raise ValueError(f"engines sort layer ids, this head was trained on the order {list(head.layer_ids)}")
    shape = head.shape
    if shape.hidden_act != "silu":
        raise ValueError(f"{ARCHITECTURE} has silu only; this head was trained with {shape.hidden_act}")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
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
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        **rope_forms(shape.rope),
        **{name: getattr(head.config, name) for name in SWITCHES},
        "eagle_aux_hidden_state_layer_ids": list(head.layer_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(head.layer_ids), "use_aux_hidden_state": True},
    }
    tensors = dict(head.state_dict())
    if head.draft_ids is not None:
        tensors["d2t"] = vocab.offsets(head.draft_ids)
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
        t2d[head.draft_ids] = True
        tensors["t2d"] = t2d
    return ExportSpec(config=config, tensors=tensors, method="eagle3")


def rope_forms(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE in the forms of transformers 5 (rope_parameters) and 4 (rope_theta, rope_scaling)."""
    rest = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = rest.get("rope_type", "default") == "default"
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else rest,
    }


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if dialect != "vllm":
        raise KeyError(dialect)
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures {config.get('architectures')!r}, expected [{ARCHITECTURE!r}]")
    if config.get("tie_word_embeddings", False):
        raise ValueError("tie_word_embeddings is true: the draft lm_head is the head's own, expected false")
    if config.get("num_hidden_layers") != 1:
        raise ValueError(f"num_hidden_layers {config.get('num_hidden_layers')!r}: the head has one layer, expected 1")
    ids = _layer_ids(config)
    size, middle = config["hidden_size"], config["intermediate_size"]
    inner = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    draft, whole = config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(ids) * config.get("target_hidden_size", size)),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
        "midlayer.self_attn.q_proj.weight": (inner, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, inner),
        "midlayer.mlp.gate_proj.weight": (middle, size),
        "midlayer.mlp.up_proj.weight": (middle, size),
        "midlayer.mlp.down_proj.weight": (size, middle),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (size,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (size,) for j in range(len(ids))}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(ids) * size,)
    if draft < whole:
        shapes |= {"d2t": (draft,), "t2d": (whole,)}
    return shapes


def _layer_ids(config: dict[str, Any]) -> list[int]:
    """The layer ids, which must stand in both places and agree."""
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not top and not nested:
        raise ValueError("no eagle_aux_hidden_state_layer_ids: an engine would fall back to its own default layers")
    if top and nested and top != nested:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids {top} at the top, {nested} in eagle_config")
    return list(top or nested)


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The head of an exported folder; ``shape``: the target's. RoPE, eps and sizes are the config's own."""
    from .io import load_strict

    expected_tensors(dialect, config)
    tensors = dict(tensors)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = None
    if config["draft_vocab_size"] < config["vocab_size"]:
        if d2t is None:
            raise ValueError("draft vocabulary without its map d2t")
        ids = vocab.from_offsets(d2t, config["vocab_size"])
        if t2d is not None and not torch.equal(t2d.nonzero().squeeze(1), ids):
            raise ValueError("t2d and d2t name different draft vocabularies")
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
    head_config = cls.Config(
        layers=_layer_ids(config),
        draft_vocab_size=config["draft_vocab_size"],
        intermediate_size=config["intermediate_size"],
        **{name: bool(config.get(name, False)) for name in SWITCHES},
    )
    head = cls(head_config, own, ids)
    load_strict(head, tensors, f"{dialect} export")
    return head
