"""Tiny random models of unlike families, and the plain reference that features are compared with."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy as np
import tiny
import torch
import transformers as hf

SIZES = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
BASE = dict(SIZES, head_dim=8)
MOE = dict(BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
GEMMA3 = dict(BASE, sliding_window=5, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=28, patch_size=14
)

BUILD = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BASE)),
    "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BASE, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**BASE)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**BASE, sliding_window=5)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**BASE)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **BASE,
            sliding_window=5,
            query_pre_attn_scalar=8,
            final_logit_softcapping=3.0,
            attn_logit_softcapping=2.0,
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA3)),
    "gemma3_nested": lambda: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config=dict(GEMMA3), vision_config=dict(VISION))
    ),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=hf.LlamaConfig(**BASE), vision_config=hf.CLIPVisionConfig(**VISION))
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**MOE)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **BASE,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**BASE, logit_scale=0.0625)),
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**BASE, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22)
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES)),
    "phi3_longrope": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **SIZES,
            original_max_position_embeddings=20,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 20,
            },
        )
    ),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **MOE,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"] * 2,
        )
    ),
}
PACKED = {"llama", "llama_tied", "qwen3", "mistral", "gemma", "gemma3", "gemma3_nested", "llava", "qwen3_moe"}
PACKED |= {"mixtral", "cohere", "granite", "phi", "phi3_longrope"}


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """A random fp32 model whose norms differ from the identity and whose biases and sinks are not zero."""
    torch.manual_seed(seed)
    model = BUILD[name]().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key and p.ndim == 1:
                p += torch.rand_like(p) - 0.5
            if "sinks" in key or key.endswith("lm_head.bias"):
                p.normal_()
    return model


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """An independent copy: the target switches the attention of the model it is given."""
    return copy.deepcopy(model)


@torch.no_grad()
def alone(model: torch.nn.Module, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One document through Hugging Face's own forward: hidden_states, each [n, H], and logits [n, V]."""
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return [h[0] for h in out.hidden_states], out.logits[0]


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A tiny Llama with Q8_0 matrices and the tiny tokenizer, as a GGUF file of two layers."""
    tok = tiny.tokenizer()
    hidden, middle, vocab, kv = 64, 96, len(tok), 32
    rng = np.random.default_rng(seed)
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(512)
    out.add_embedding_length(hidden)
    out.add_block_count(2)
    out.add_feed_forward_length(middle)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(5e6)
    out.add_vocab_size(vocab)
    special = {i for i in range(3)}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list([tok.convert_ids_to_tokens(i) for i in range(vocab)])
    out.add_token_types([3 if i in special else 1 for i in range(vocab)])
    import json

    merges = json.loads(tok.backend_tokenizer.to_str())["model"]["merges"]
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(tiny.CHATML)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quantize(rng.normal(0, 0.1, (rows, columns)).astype(np.float32), kind)
        out.add_tensor(name, data, raw_dtype=kind)

    def vector(name: str) -> None:
        out.add_tensor(name, rng.uniform(0.5, 1.5, hidden).astype(np.float32))

    matrix("token_embd.weight", vocab, hidden)
    vector("output_norm.weight")
    for i in range(2):
        vector(f"blk.{i}.attn_norm.weight")
        vector(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", hidden, hidden)
        matrix(f"blk.{i}.attn_k.weight", kv, hidden)
        matrix(f"blk.{i}.attn_v.weight", kv, hidden)
        matrix(f"blk.{i}.attn_output.weight", hidden, hidden)
        matrix(f"blk.{i}.ffn_gate.weight", middle, hidden)
        matrix(f"blk.{i}.ffn_up.weight", middle, hidden)
        matrix(f"blk.{i}.ffn_down.weight", hidden, middle)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
