"""Tiny random targets and rows that every test can afford."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headtrain.types import Row

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog while the target model reads every hidden state.",
    "system user assistant You are a helpful assistant. Hello! How are you? I am fine, thank you.",
    "A draft head proposes tokens; the target verifies them. 0 1 2 3 4 5 6 7 8 9 + - * / = ( ) { } [ ]",
]


def tokenizer(vocab_size: int = 384, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's special tokens; every byte is covered."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tok.chat_template = template
    return tok


def config(**changes) -> LlamaConfig:
    values = dict(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return LlamaConfig(**{**values, **changes})


def model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random fp32 Llama whose final norm differs from 1 (so that a norm applied twice or never is seen)."""
    torch.manual_seed(seed)
    net = LlamaForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        net.model.norm.weight.uniform_(0.5, 1.5)
    return net


def save(folder: Path, seed: int = 0, template: str | None = CHATML, **changes) -> Path:
    """A tiny target as a local folder: model and tokenizer."""
    model(seed, **changes).save_pretrained(folder)
    tokenizer(template=template).save_pretrained(folder)
    return folder


def rows(lengths=(24, 9, 33), seed: int = 0, vocab: int = 384) -> list[Row]:
    """Rows of random tokens, each with a prompt and one or two assistant turns."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for number, n in enumerate(lengths):
        ids = torch.randint(3, vocab, (n,), generator=g).tolist()
        turn = [0] * n
        start = max(1, n // 3)
        for i in range(start, n):
            turn[i] = 1
        if n >= 20:  # a second turn after two tokens of the user's
            cut = (start + n) // 2
            for i in range(cut, n):
                turn[i] = 2
            turn[cut] = turn[cut + 1] = 0
        out.append(Row(ids, turn, source=f"tiny:{number + 1}", route="tiny"))
    return out
