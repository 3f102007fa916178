"""Tiny checkpoints that hold an MTP module of their own, one of each family, as they are published; and the module
written out slowly with transformers' own decoder layer: every step over the whole packed run, a dense mask.

Written from the table in ALGORITHMS.md; nothing here is headtrain's.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
)  # fmt: skip
MROPE = dict(
    LINEAR, rope_parameters=LINEAR["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
DEEPSEEK = {"token": "enorm", "hidden": "hnorm", "project": "eh_proj", "final": "shared_head.norm", "layer": ""}
QWEN = {
    "token": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "project": "fc", "final": "norm",
    "layer": "layers.0.",
}  # fmt: skip
MIMO = {
    "token": "token_layernorm", "hidden": "hidden_layernorm", "project": "input_proj", "final": "final_layernorm",
    "layer": "",
}  # fmt: skip


@dataclass
class Kind:
    """config: class and further sizes; model: the class that is saved; package, layer, rope: of transformers' decoder
    layer; index: the layer whose kind the module is."""

    config: str
    model: str
    package: str
    classes: tuple[str, str]
    more: dict
    prefix: str
    names: dict[str, str]
    order: str
    start: str
    recycle: str
    zero_first: bool
    index: int = 1
    copies: bool = False
    fused: bool = False
    rewrite: dict = field(default_factory=dict)


KINDS = {
    "deepseek": Kind(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", "deepseek_v3",
        ("DeepseekV3DecoderLayer", "DeepseekV3RotaryEmbedding"),
        dict(MOE, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8,
             v_head_dim=6, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, rope_parameters=YARN,
             num_nextn_predict_layers=1),
        "model.layers.3.", DEEPSEEK, "embedding first", "normed", "raw", True, copies=True,
    ),
    "glm": Kind(
        "Glm4MoeConfig", "Glm4MoeForCausalLM", "glm4_moe", ("Glm4MoeDecoderLayer", "Glm4MoeRotaryEmbedding"),
        dict(MOE, head_dim=8, n_routed_experts=4, attention_bias=True, use_qk_norm=True, first_k_dense_replace=1,
             rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
             num_nextn_predict_layers=1),
        "model.layers.3.", DEEPSEEK, "embedding first", "normed", "raw", True, copies=True,
    ),
    "mimo": Kind(
        "Qwen2Config", "Qwen2ForCausalLM", "qwen2", ("Qwen2DecoderLayer", "Qwen2RotaryEmbedding"),
        dict(head_dim=8, num_nextn_predict_layers=1), "model.mtp_layers.0.", MIMO, "hidden first", "raw", "normed",
        True, rewrite={"architectures": ["MiMoForCausalLM"]},
    ),
    "qwen3-next": Kind(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", "qwen3_next",
        ("Qwen3NextDecoderLayer", "Qwen3NextRotaryEmbedding"),
        dict(MOE, **LINEAR, num_experts=4, shared_expert_intermediate_size=20, attention_bias=True), "mtp.", QWEN,
        "embedding first", "normed", "normed", False,
    ),
    "qwen3.5": Kind(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "qwen3_5", ("Qwen3_5DecoderLayer", "Qwen3_5TextRotaryEmbedding"),
        dict(MROPE, mtp_num_hidden_layers=1), "mtp.", QWEN, "embedding first", "normed", "normed", False,
    ),
    "qwen3.5-moe": Kind(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", "qwen3_5_moe",
        ("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeTextRotaryEmbedding"),
        {k: v for k, v in dict(MOE, **MROPE, num_experts=4, shared_expert_intermediate_size=20,
                               mtp_num_hidden_layers=1).items() if k != "norm_topk_prob"},
        "mtp.", QWEN, "embedding first", "normed", "normed", False, fused=True,
    ),
}  # fmt: skip


def config_of(name: str, **changes):
    kind = KINDS[name]
    config = getattr(hf, kind.config)(**{**SIZES, **kind.more, **changes})
    config._attn_implementation = config._experts_implementation = "eager"
    return config


class Module(nn.Module):
    """The MTP module of one family at random, in transformers' own classes."""

    def __init__(self, name: str, config, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind, self.config = KINDS[name], config
        models = importlib.import_module(f"transformers.models.{self.kind.package}.modeling_{self.kind.package}")
        self.layer = getattr(models, self.kind.classes[0])(config, self.kind.index)
        self.rope = getattr(models, self.kind.classes[1])(config)
        norm = type(self.layer.input_layernorm)
        self.token, self.hidden, self.final = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.project = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        with torch.no_grad():
            for key, p in self.named_parameters():
                p.normal_(std=p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2)
                if "norm" in key or key.split(".")[0] in ("token", "hidden", "final"):
                    p += 1.0 if norm(4).weight[0] == 1 else 0.0  # Qwen3-Next's weights count from one
            for key, buffer in self.layer.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.2)
        self.eval()

    def published(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors (or others of the same names in here, such as gradients) as the family's files name them."""
        kind, out = self.kind, {}
        for key, tensor in (tensors if tensors is not None else self.state_dict()).items():
            part, _, rest = key.partition(".")
            if part == "layer":
                key = kind.prefix + kind.names["layer"] + rest
            else:
                key = f"{kind.prefix}{kind.names[part]}.{rest}"
            stem, _, leaf = key.rpartition(".")
            if leaf not in ("gate_up_proj", "down_proj") or kind.fused:
                out[key] = tensor
                continue
            for e in range(tensor.shape[0]):
                if leaf == "down_proj":
                    out[f"{stem}.{e}.down_proj.weight"] = tensor[e]
                else:
                    middle = tensor.shape[1] // 2
                    out[f"{stem}.{e}.gate_proj.weight"] = tensor[e, :middle]
                    out[f"{stem}.{e}.up_proj.weight"] = tensor[e, middle:]
        return out

    def steps(
        self, ids: Tensor, doc: Tensor, pos: Tensor, embed: Tensor, state: Tensor, depth: int,
        recycle: str | None = None, zero_first: bool | None = None, own: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """What the lm_head reads at every position and step, [T, H] each. Step s sees step 0's keys causally and, of
        each later step, the own position's; at RoPE position pos + s. The whole layer is run over all steps so far.
        own: FastMTP's training, every step causal over its own states, at RoPE position pos."""
        kind, T, out, inputs = self.kind, ids.numel(), [], []
        recycle = recycle or kind.recycle
        zero_first = kind.zero_first if zero_first is None else zero_first
        causal = (doc[:, None] == doc[None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
        for s in range(depth):
            following = torch.cat([ids[1 + s :], ids[: 1 + s]])
            fed = nn.functional.embedding(following, embed)
            if zero_first and s == 0:
                fed = fed * (pos > 0)[:, None]
            parts = [self.token(fed), self.hidden(state)]
            inputs.append(self.project(torch.cat(parts if kind.order == "embedding first" else parts[::-1], -1)))
            mask = torch.zeros((s + 1) * T, (s + 1) * T, dtype=torch.bool)
            for a in range(s + 1):
                mask[a * T : (a + 1) * T, :T] = causal
                for b in range(1, a + 1):
                    mask[a * T : (a + 1) * T, b * T : (b + 1) * T] = torch.eye(T, dtype=torch.bool)
            x, positions = torch.cat(inputs)[None], torch.cat([pos + a for a in range(s + 1)])[None]
            if own:
                x, positions, mask = inputs[-1][None], pos[None], causal
            added = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)[None, None]
            y = self.layer(x, attention_mask=added, position_embeddings=self.rope(x, positions))[0, -T:]
            normed = self.final(y)
            state = normed if recycle == "normed" else y
            out.append(normed)
        return out


def save(folder: Path, name: str, dtype: torch.dtype = torch.float32, tokenizer=None, **changes) -> Module:
    """A sharded checkpoint: the target, and its module's tensors partly in the target's last shard, partly in one of
    their own. Returns the module with the values that were written."""
    config, kind = config_of(name, **changes), KINDS[name]
    torch.manual_seed(1)
    model = getattr(hf, kind.model)(config).to(dtype)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("norm.weight"):
                p += torch.rand_like(p) - 0.5
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // 2)
    module = Module(name, config)
    tensors = {}
    for n, t in module.published().items():  # the router's bias is published in float32
        tensors[n] = t.to(torch.float32 if n.endswith("e_score_correction_bias") else dtype).contiguous()
    if kind.copies:
        tensors[f"{kind.prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{kind.prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    last, own = sorted(set(index["weight_map"].values()))[-1], "model-mtp.safetensors"
    half = sorted(tensors)[::2]
    shard = hf.modeling_utils.load_state_dict(folder / last)
    save_file(shard | {n: tensors[n] for n in half}, folder / last, metadata={"format": "pt"})
    save_file({n: t for n, t in tensors.items() if n not in half}, folder / own, metadata={"format": "pt"})
    index["weight_map"] |= {n: last if n in half else own for n in tensors}
    index["metadata"]["total_size"] += sum(t.numel() * t.element_size() for t in tensors.values())
    index_file.write_text(json.dumps(index))
    written = json.loads((folder / "config.json").read_text()) | kind.rewrite
    if name == "qwen3-next":
        assert "num_nextn_predict_layers" not in written
    (folder / "config.json").write_text(json.dumps(written))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return module
