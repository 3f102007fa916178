"""The sizes of a target from its config alone, and the comparison with what a recipe expects."""

from __future__ import annotations

import math
from typing import Any

from ..config import ExpectedShape
from ..types import TargetShape
from .own_module import expert_settings, module_settings

ROPE_THETA = 10000.0


class TargetError(ValueError):
    """A target that cannot be used; the message says what was found, what was expected and what to do."""


def text_config(config: Any) -> Any:
    """The part of a config that describes the text decoder (the config itself where nothing is nested)."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", None) or config


def _first(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of ``names`` that the config has with a value."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def rope_from_config(config: Any) -> dict[str, Any]:
    """RoPE settings in transformers 5's form: ``rope_type``, ``rope_theta`` and the scaling's own keys.

    Reads ``rope_parameters`` (transformers 5; where they are nested by layer type, those of full attention) and
    ``rope_theta`` / ``rope_scaling`` (transformers 4, where the type may be called ``type``).
    """
    rope = _first(config, ("rope_parameters", "rope_scaling"), {})
    nested = {name: value for name, value in rope.items() if isinstance(value, dict) and "_attention" in name}
    if nested:
        rope = nested.get("full_attention") or next(iter(nested.values()))
    rope = {name: list(v) if isinstance(v, tuple) else v for name, v in rope.items() if v is not None}
    old_name = rope.pop("type", None)
    rope.setdefault("rope_type", old_name or "default")
    theta = rope.get("rope_theta", _first(config, ("rope_theta", "default_theta"), ROPE_THETA))
    rope["rope_theta"] = float(theta)
    partial = _first(config, ("partial_rotary_factor",))
    if partial is not None and partial != 1.0:
        rope.setdefault("partial_rotary_factor", partial)
    return rope


def _architecture(config: Any) -> str:
    if names := getattr(config, "architectures", None):
        return names[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)  # a GGUF file names no class
    return name if isinstance(name, str) else f"{config.model_type}"


def _intermediate(config: Any) -> int:
    """The MLP width of a dense layer of this target; for a mixture without one, that of the experts of one token."""
    size = _first(config, ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"))
    if isinstance(size, list | tuple):
        size = max(size)
    if size is None and (expert := _first(config, ("moe_intermediate_size",))) is not None:
        size = expert * _first(config, ("num_experts_per_tok", "moe_topk"), 1)
    return int(size if size is not None else 4 * config.hidden_size)


def shape_from_config(config: Any) -> TargetShape:
    """A ``PreTrainedConfig`` -> TargetShape, through a nested ``text_config`` too. Raises TargetError with the
    config's keys where a size is not to be found."""
    text = text_config(config)
    heads = _first(text, ("num_attention_heads", "n_head"))
    hidden = _first(text, ("hidden_size", "n_embd", "d_model"))
    layers = _first(text, ("num_hidden_layers", "n_layer"))
    vocab = _first(text, ("vocab_size",), getattr(config, "vocab_size", None))
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    if missing := [name for name, value in sizes.items() if value is None]:
        keys = ", ".join(sorted(k for k in vars(text) if not k.startswith("_")))
        raise TargetError(f"the target's config ({text.model_type}) gives no {', '.join(missing)}; it has: {keys}")
    return TargetShape(
        architecture=_architecture(config),
        model_type=text.model_type,
        hidden_size=hidden,
        intermediate_size=_intermediate(text),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_first(text, ("num_key_value_heads",), heads),
        head_dim=_first(text, ("head_dim",), hidden // heads),
        vocab_size=vocab,
        rms_norm_eps=_first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-6),
        max_positions=_first(text, ("max_position_embeddings", "n_positions"), 2048),
        tied=bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))),
        hidden_act=_first(text, ("hidden_act", "hidden_activation", "activation_function"), "silu"),
        rope=rope_from_config(text),
        module=module_settings(text),
        experts=expert_settings(text),
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)  # a GGUF file stores 1e-5 as float32
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def shape_differences(expected: TargetShape, found: TargetShape) -> list[str]:
    """One line for each field (and each RoPE key) in which the two differ."""
    lines = []
    for name in TargetShape.__dataclass_fields__:
        mine, theirs = getattr(expected, name), getattr(found, name)
        if name == "rope":
            for key in sorted({*mine, *theirs}):
                if not _same(mine.get(key), theirs.get(key)):
                    lines.append(f"rope.{key}: expected {mine.get(key)!r}, found {theirs.get(key)!r}")
        elif name in ("module", "experts"):  # a recipe gives what its head needs of it
            for key, value in (mine or {}).items():
                if not _same(value, (theirs or {}).get(key)):
                    lines.append(f"{name}.{key}: expected {value!r}, found {(theirs or {}).get(key)!r}")
        elif not _same(mine, theirs):
            lines.append(f"{name}: expected {mine!r}, found {theirs!r}")
    return lines


def check_expected(expect: ExpectedShape | None, found: TargetShape, path: str) -> None:
    """Raises TargetError with every difference between the recipe's ``target.expect`` and the real config."""
    if expect is None:
        return
    if lines := shape_differences(expect.shape(), found):
        listed = "\n  ".join(lines)
        raise TargetError(
            f"target {path} is not what the recipe's target.expect describes:\n  {listed}\n"
            "correct target.expect, or target.path if this is the wrong model"
        )
