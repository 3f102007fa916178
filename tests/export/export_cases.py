"""Checkpoints of real heads on the tiny target, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import torch

from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata, save_head
from headtrain.metadata import TargetIdentity, TrainingPart
from headtrain.types import TargetShape, TargetWeights

SHAPE = TargetShape(
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=384,
    max_positions=512,
    tied=True,
)

# every engine that is known to compute the same with this very head
EVERYWHERE = ("headtrain", "vllm", "speculators", "sglang", "trtllm", "hf")
ENGINES_OF = {
    "eagle3": EVERYWHERE,
    "eagle3-whole": EVERYWHERE,
    "eagle3-3.1": EVERYWHERE[:-1],
    "eagle3-concat": EVERYWHERE[:-1],
    "eagle3-residual": ("headtrain", "vllm", "speculators"),
    "eagle1": ("headtrain", "vllm", "sglang", "hf"),
    "eagle1-bias": ("headtrain", "sglang", "hf"),
    "medusa": ("headtrain", "vllm", "trtllm"),
    "medusa-one": ("headtrain", "vllm", "trtllm", "hf"),
    "medusa-shared": ("headtrain", "vllm", "hf"),
    "medusa-reduced": ("headtrain",),
}
HEADS = {
    "eagle3": {"kind": "eagle3", "draft_vocab_size": 48, "depth": 3},
    "eagle3-whole": {"kind": "eagle3", "draft_vocab_size": None, "depth": 3},
    "eagle3-3.1": {"kind": "eagle3", "draft_vocab_size": 48, "depth": 2, "fc_norm": True, "norm_output": True},
    "eagle3-concat": {"kind": "eagle3", "draft_vocab_size": 48, "depth": 2, "norm_before_fc": True},
    "eagle3-residual": {"kind": "eagle3", "draft_vocab_size": 48, "depth": 2, "norm_before_residual": True},
    "eagle1": {"kind": "eagle1", "depth": 3},
    "eagle1-bias": {"kind": "eagle1", "depth": 2, "bias": True},
    "medusa": {"kind": "medusa", "num_heads": 3, "num_layers": 2},
    "medusa-one": {"kind": "medusa", "num_heads": 2},
    "medusa-shared": {"kind": "medusa", "num_heads": 2, "own_lm_head": False},
    "medusa-reduced": {"kind": "medusa", "num_heads": 2, "draft_vocab_size": 40},
}


def weights(shape: TargetShape = SHAPE) -> TargetWeights:
    generator = torch.Generator().manual_seed(5)
    embed = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return TargetWeights(embed, embed, torch.ones(shape.hidden_size))


def identity(shape: TargetShape = SHAPE, **changes) -> TargetIdentity:
    values = dict(
        name="acme/tiny",
        shape=vars(shape),
        dtype="float32",
        weights={"embed": "a" * 64, "final_norm": "b" * 64},
        tokenizer="c" * 64,
        chat_template="d" * 64,
    )
    return TargetIdentity(**{**values, **changes})


def head(name: str, shape: TargetShape = SHAPE, seed: int = 0):
    """A head with every parameter random, so that nothing equals a default."""
    config = parse_head(HEADS[name])
    size = type_of(config).uses_draft_vocab(config, shape)
    generator = torch.Generator().manual_seed(seed)
    ids = None if size is None else torch.randperm(shape.vocab_size, generator=generator)[:size].sort().values
    out = build_head(config, shape, ids)
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1)
    return out


def type_of(config):
    from headtrain.heads.catalog import head_class

    return head_class(config.kind)


def checkpoint(folder: Path, name: str, target: TargetIdentity | None = None, max_length: int = 512, **kw) -> Path:
    target = target or identity()
    made = head(name, target.target_shape(), **kw)
    training = TrainingPart(recipe_sha256="e" * 64, data_sha256="f" * 64, steps=7, tokens=99, max_length=max_length)
    save_head(folder, made, head_metadata(made, target, training=training))
    return folder
