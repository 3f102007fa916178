"""Who a target is: digests of sampled weights, of its tokenizer and of its chat template.

A digest is the same whether the model is loaded (in float32 or in bfloat16) or its safetensors files are only read,
and takes seconds for any size: large tensors are sampled by rows at a fixed stride.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import digest
from ..metadata import TargetIdentity
from .files import find_tensor_names, opened
from .parts import find_parts, whole
from .shape import TargetError, shape_from_config

WHOLE = 1 << 16  # elements up to which a tensor is read whole
ROWS = 64  # rows sampled of a larger one

# Tensors of a layer that are called the same in files and in loaded models of every version of transformers
# (experts and fused projections are renamed at load).
LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.qkv_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.down_proj.weight",
)


@dataclass(frozen=True)
class Source:
    """Where a target came from: what the recipe called it, how its weights were quantised there (None: not), and the
    precision they are stored in, whatever the model runs in."""

    name: str
    revision: str | None = None
    quantization: str | None = None
    dtype: str | None = None


def sampled_rows(count: int, elements: int) -> list[int]:
    """Indices of the rows that enter the digest: all of a small tensor, else ROWS at a fixed stride, ends included."""
    if elements <= WHOLE or count <= ROWS:
        return list(range(count))
    return [(count - 1) * i // (ROWS - 1) for i in range(ROWS)]


def tensor_digest(shape: Iterable[int], rows: Tensor) -> str:
    """sha256 of a tensor's shape and of its sampled rows.

    Floating values are rounded to bfloat16 and written as float32, so that a checkpoint has one digest whatever
    precision it is loaded in; packed integers of quantised weights are taken as they are.
    """
    if rows.is_floating_point():
        rows = rows.to(torch.float32).to(torch.bfloat16).to(torch.float32)
    data = rows.detach().cpu().contiguous()
    header = json.dumps([list(shape), str(data.dtype)]).encode()
    return hashlib.sha256(header + data.numpy().tobytes()).hexdigest()


def digest_of(tensor: Tensor) -> str:
    tensor = whole(tensor)
    if tensor.ndim == 0:
        return tensor_digest((), tensor.reshape(1))
    index = torch.tensor(sampled_rows(tensor.shape[0], tensor.numel()), device=tensor.device)
    return tensor_digest(tensor.shape, tensor.detach()[index])


def sampled_layers(count: int) -> list[int]:
    """Indices of the first, the middle and the last of ``count`` layers."""
    return sorted({0, count // 2, count - 1})


def _collect(
    names: dict[str, str], layers: list[dict[str, str]], digest_by_name: Callable[[str], str]
) -> dict[str, str]:
    """names: of embed, lm_head, final_norm; layers: for each layer {suffix: name}. lm_head is left out where it
    equals the embedding, tied or not."""
    weights = {"embed": digest_by_name(names["embed"]), "final_norm": digest_by_name(names["final_norm"])}
    if names["lm_head"] != names["embed"]:
        head = digest_by_name(names["lm_head"])
        if head != weights["embed"]:
            weights["lm_head"] = head
    for i in sampled_layers(len(layers)):
        known = [s for s in LAYER_TENSORS if s in layers[i]] or sorted(layers[i])
        weights[f"layer.{i}"] = digest({s: digest_by_name(layers[i][s]) for s in known})
    return weights


def weight_digests(model: nn.Module, states: dict[int, dict[str, Tensor]] | None = None) -> dict[str, str]:
    """Digests of a loaded model's embedding, lm_head (if it differs), final norm, first, middle and last layer.
    states: state dicts of ``sampled_layers`` to take instead of the model's own."""
    parts = find_parts(model)
    tensors = {
        "embed": parts.embed.weight,
        "lm_head": parts.lm_head.weight,
        "final_norm": getattr(parts.norm, "weight", torch.ones(1)),  # some families normalise without a weight
    }
    names = {"embed": "embed", "lm_head": "embed" if parts.tied else "lm_head", "final_norm": "final_norm"}
    layers = []
    for i, layer in enumerate(parts.layers):
        state = layer.state_dict() if states is None else states.get(i, {})
        layers.append({s: f"{i}/{s}" for s in state})
        tensors |= {f"{i}/{s}": t for s, t in state.items()}
    return _collect(names, layers, lambda name: digest_of(tensors[name]))


def local_weight_digests(folder: str | Path) -> dict[str, str]:
    """The same digests read from a folder's safetensors files, without building the model."""
    found = find_tensor_names(folder)

    def digest_by_name(name: str) -> str:
        with opened(found.files[name]) as file:
            piece = file.get_slice(name)
            shape = piece.get_shape()
            if not shape:
                return tensor_digest((), file.get_tensor(name).reshape(1))
            elements = torch.Size(shape).numel()
            rows = sampled_rows(shape[0], elements)
            if len(rows) == shape[0]:
                return tensor_digest(shape, file.get_tensor(name))
            return tensor_digest(shape, torch.cat([piece[i : i + 1] for i in rows]))

    names = {"embed": found.embed, "lm_head": found.lm_head, "final_norm": found.final_norm}
    return _collect(names, found.layers, digest_by_name)


def _tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer: its vocabulary is all that is common to them
        return {"vocab": tokenizer.get_vocab(), "added": sorted(tokenizer.get_added_vocab().items())}
    state = json.loads(backend.to_str())
    model = state["model"]
    vocab = model.get("vocab") or {}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
    # Added tokens may also stand in the model's vocabulary; which of the two holds them depends on the converter.
    added = {t["content"]: t["id"] for t in state.get("added_tokens") or ()}
    if isinstance(vocab, dict):
        vocab = {token: number for token, number in vocab.items() if token not in added}
    return {"type": model.get("type"), "vocab": vocab, "merges": merges, "added": added}


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over vocabulary, merges (or unigram scores) and added tokens."""
    return digest(_tokenizer_state(tokenizer))


def tokenizer_parts(tokenizer: Any) -> dict[str, str]:
    """sha256 of each of the three, so that a comparison can say which differs."""
    state = _tokenizer_state(tokenizer)
    vocabulary = {"type": state.get("type"), "vocab": state["vocab"]}
    return {
        "vocabulary": digest(vocabulary),
        "merges": digest({"merges": state.get("merges", [])}),
        "added tokens": digest({"added": state["added"]}),
    }


def template_digest(tokenizer: Any) -> str | None:
    """sha256 of the chat template's text (of all of them where the tokenizer names several)."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else digest(template)


def _identity(config: Any, tokenizer: Any, source: Source, weights: dict[str, str]) -> TargetIdentity:
    quantization = source.quantization
    if quantization is None and (made := getattr(config, "quantization_config", None)) is not None:
        made = made if isinstance(made, dict) else made.to_dict()
        quantization = str(getattr(made.get("quant_method"), "value", made.get("quant_method")))
    return TargetIdentity(
        name=source.name,
        revision=source.revision or getattr(config, "_commit_hash", None),
        shape=asdict(shape_from_config(config)),
        dtype=source.dtype or dtype_name(config),
        quantization=quantization,
        weights=weights,
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
        tokenizer_parts={} if tokenizer is None else tokenizer_parts(tokenizer),
        chat_template=template_digest(tokenizer),
    )


def dtype_name(config: Any) -> str:
    """The dtype that a config names, float32 where none."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def identify(model: nn.Module, tokenizer: Any, source: Source) -> TargetIdentity:
    """The identity of a loaded target."""
    return _identity(model.config, tokenizer, source, weight_digests(model))


def identify_local(
    folder: str | Path, source: Source | None = None, tokenizer: Any = None, config: Any = None
) -> TargetIdentity:
    """The identity of a local folder of safetensors, without building the model. tokenizer, config: where they are
    loaded already. Raises TargetError."""
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} has no config.json: expected a folder saved by transformers")
    config = config if config is not None else AutoConfig.from_pretrained(folder)
    tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(folder)
    return _identity(config, tokenizer, source or Source(str(folder)), local_weight_digests(folder))
