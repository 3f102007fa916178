"""The table of families whose checkpoints hold an MTP module of their own: names of its tensors, order of its input,
state that it starts from and feeds back, and the decoder layer that is its block.

Facts from the published checkpoints and from vLLM 0.32's classes (deepseek_mtp, glm4_moe_mtp, mimo_mtp, qwen3_next_mtp,
qwen3_5_mtp). Engines disagree on the state that DeepSeek's module feeds back: the paper's module (arXiv 2412.19437,
section 2.2) feeds it back before ``shared_head.norm``, vLLM 0.32, SGLang and transformers 5.24 after it; for GLM-4.5
vLLM before it, transformers after it. At one step there is no difference; ``head.recycle`` says which one to train.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ..types import TargetShape
from .family_block import FamilyBlock, FamilyRope, GatedAttention, GroupedAttention, LatentAttention

State = Literal["raw", "normed"]
DEEPSEEK = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
    "block": "",
}
MIMO = {name: name for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")} | {"block": ""}
QWEN = {
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "input_proj": "fc",
    "final_layernorm": "norm",
    "block": "layers.0.",
}


@dataclass(frozen=True)
class Family:
    """title: for messages. model_types, architectures: what tells that a target is of this family. prefix: of the
    module's tensors, {n} the target's number of layers; names: head's part -> its name there (``block``: prefix of the
    decoder layer). copies: tensors of the target that the module holds again. hidden_first: order of the projection's
    input. start: the target's final feature before or after its final norm; recycle: the same of the module's own
    output. zero_first: the embedding fed at position 0 is zero. package, classes: where transformers has the decoder
    layer; settings: what its config must say for layer 0 to be the module's block."""

    title: str
    model_types: tuple[str, ...]
    prefix: str
    names: dict[str, str]
    hidden_first: bool
    start: State
    recycle: State
    zero_first: bool
    package: str
    classes: tuple[str, str, str]  # config, decoder layer, rotary embedding
    attention: type[GroupedAttention] | type[LatentAttention]
    architectures: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def _qwen(title: str, model_types: tuple[str, ...], package: str, name: str, config: str, rope: str) -> Family:
    return Family(
        title, model_types, prefix="mtp.", names=QWEN, hidden_first=False, start="normed", recycle="normed",
        zero_first=False, package=package, classes=(config, f"{name}DecoderLayer", rope), attention=GatedAttention,
        settings={"layer_types": ["full_attention"]},
    )  # fmt: skip


FAMILIES = (
    Family(
        "DeepSeek-V3/R1", ("deepseek_v3",), prefix="model.layers.{n}.", names=DEEPSEEK, hidden_first=False,
        start="normed", recycle="raw", zero_first=True, package="deepseek_v3",
        classes=("DeepseekV3Config", "DeepseekV3DecoderLayer", "DeepseekV3RotaryEmbedding"),
        attention=LatentAttention, settings={"first_k_dense_replace": 0},
        copies={"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"},
    ),
    Family(
        "GLM-4.5", ("glm4_moe",), prefix="model.layers.{n}.", names=DEEPSEEK, hidden_first=False,
        start="normed", recycle="raw", zero_first=True, package="glm4_moe",
        classes=("Glm4MoeConfig", "Glm4MoeDecoderLayer", "Glm4MoeRotaryEmbedding"),
        attention=GroupedAttention, settings={"first_k_dense_replace": 0},
        copies={"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"},
    ),
    Family(
        "MiMo", ("mimo",), prefix="model.mtp_layers.0.", names=MIMO, hidden_first=True,
        start="raw", recycle="normed", zero_first=True, package="qwen2",
        classes=("Qwen2Config", "Qwen2DecoderLayer", "Qwen2RotaryEmbedding"),
        attention=GroupedAttention, architectures=("MiMoForCausalLM",),
    ),
    _qwen("Qwen3-Next", ("qwen3_next",), "qwen3_next", "Qwen3Next", "Qwen3NextConfig", "Qwen3NextRotaryEmbedding"),
    _qwen("Qwen3.5", ("qwen3_5_text",), "qwen3_5", "Qwen3_5", "Qwen3_5TextConfig", "Qwen3_5TextRotaryEmbedding"),
    _qwen(
        "Qwen3.5-MoE", ("qwen3_5_moe_text",), "qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeTextRotaryEmbedding",
    ),
)  # fmt: skip


def family_of(shape: TargetShape) -> Family:
    """Raises ValueError for a target whose family has no module in the table, or whose config announces none, or more
    than one."""
    for family in FAMILIES:
        if shape.model_type in family.model_types or shape.architecture in family.architectures:
            break
    else:
        known = ", ".join(f.title for f in FAMILIES)
        raise ValueError(
            f"a target of family {shape.model_type!r} ({shape.architecture}) has no MTP module of its own to be "
            f"fine-tuned; known families: {known}. Train one from scratch instead: head.kind=mtp"
        )
    count = (shape.module or {}).get("count", 0)
    if count != 1:
        raise ValueError(
            f"the config of this {family.title} target announces {count or 'no'} MTP modules, expected one "
            "(num_nextn_predict_layers or mtp_num_hidden_layers of config.json; in a recipe target.expect.module.count)"
        )
    return family


def build_block(family: Family, shape: TargetShape) -> tuple[FamilyBlock, FamilyRope, type[nn.Module]]:
    """The module's decoder layer at random, its rotary embedding, and the class of its norms."""
    models = importlib.import_module(f"transformers.models.{family.package}.modeling_{family.package}")
    config_class = getattr(importlib.import_module("transformers"), family.classes[0])
    settings = {key: value for key, value in (shape.module or {}).items() if key != "count"}
    sizes = dict(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_act=shape.hidden_act,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_positions,
        rope_parameters=dict(shape.rope),
    )
    config = config_class(**sizes, **settings, **family.settings)
    config._experts_implementation = "eager"  # one product for each expert that was chosen: exact, on every device
    layer = getattr(models, family.classes[1])(config, 0)
    experts = getattr(layer.mlp, "experts", None)
    if experts is not None:  # transformers leaves them uninitialised
        for parameter in (*experts.parameters(), *layer.mlp.gate.parameters()):
            nn.init.normal_(parameter, std=config.initializer_range)
    rope = FamilyRope(getattr(models, family.classes[2])(config))
    for name in list(rope.table._buffers):  # computed from the config: never part of a checkpoint
        rope.table._non_persistent_buffers_set.add(name)
    return FamilyBlock(layer, family.attention(layer.self_attn, config)), rope, type(layer.input_layernorm)


def by_file_name(
    family: Family, shape: TargetShape, state: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """The head's tensors (or views into them) under the names that the checkpoint's files have for them. Experts are
    one tensor in transformers 5, and in the files either that or three matrices for each expert: ``names`` tells."""
    prefix, out = family.prefix.format(n=shape.num_layers), {}
    for own, tensor in state.items():
        part, _, rest = own.partition(".")
        place = family.names[part]
        name = prefix + (place + rest if part == "block" else f"{place}.{rest}")
        fused = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name)
        if fused is None or name in names:
            out[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if fused[2] == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            out |= {f"{fused[1]}{number}.{matrix}.weight": view for matrix, view in parts.items()}
    return out


def copies_of(family: Family, shape: TargetShape) -> dict[str, str]:
    """Names of the tensors that the module may hold again -> which of the target's they are."""
    prefix = family.prefix.format(n=shape.num_layers)
    return {prefix + name: which for name, which in family.copies.items()}
