"""Identity: the same for every way of holding the same target, another after any change."""

from __future__ import annotations

import json

import pytest
import target_families as families
import tiny
import torch

from headtrain.metadata import TargetIdentity
from headtrain.target import fingerprint
from headtrain.target.fingerprint import Source, identify, identify_local

SOURCE = Source("tiny")


def _identity(model, tokenizer=None) -> TargetIdentity:
    return identify(model, tokenizer if tokenizer is not None else tiny.tokenizer(), SOURCE)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma", "mixtral", "qwen3_moe", "llava", "gemma3_nested"])
@pytest.mark.parametrize("shard", ["5GB", "30KB"])
def test_files_give_the_loaded_models_digests(tmp_path, name, shard):
    """Single-file or sharded; experts and nested names are renamed between file and model."""
    model = families.build(name)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    tiny.tokenizer().save_pretrained(tmp_path)
    here = _identity(model)
    local = identify_local(tmp_path, SOURCE)
    assert local.differences(here) == []
    assert local.weights == here.weights and local.tokenizer == here.tokenizer
    expected = {"embed", "final_norm", "layer.0", "layer.2", "layer.3"}
    assert set(here.weights) - {"lm_head"} == expected
    assert ("lm_head" in here.weights) == (name not in ("llama_tied", "gemma", "gemma3_nested"))


def test_precision_of_the_loaded_model_does_not_matter():
    here = _identity(tiny.model())
    half = _identity(tiny.model().to(torch.bfloat16))
    assert here.weights == half.weights


@pytest.mark.parametrize(
    "name, key",
    [
        ("model.embed_tokens.weight", "embed"),
        ("model.norm.weight", "final_norm"),
        ("model.layers.0.self_attn.q_proj.weight", "layer.0"),
        ("model.layers.7.mlp.down_proj.weight", "layer.7"),
    ],
)
def test_one_weight_changes_one_digest(name, key):
    model = tiny.model()
    before = _identity(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 0.01
    lines = before.differences(_identity(model))
    assert len(lines) == 1 and lines[0].startswith(f"target weights.{key}:")


def test_untying_and_an_own_lm_head():
    same = tiny.model(tie_word_embeddings=False)
    with torch.no_grad():
        same.lm_head.weight.copy_(same.model.embed_tokens.weight)
    assert "lm_head" not in _identity(same).weights  # equal values: nothing to tell apart
    with torch.no_grad():
        same.lm_head.weight[0, 0] += 1
    assert "lm_head" in _identity(same).weights


def test_large_tensors_are_sampled_by_rows_at_a_fixed_stride():
    assert fingerprint.sampled_rows(10, 640) == list(range(10))
    rows = fingerprint.sampled_rows(5000, 5000 * 64)
    assert len(rows) == 64 and rows[0] == 0 and rows[-1] == 4999 and rows == sorted(set(rows))
    tensor = torch.randn(5000, 64)
    before = fingerprint.digest_of(tensor)
    tensor[rows[17], 3] += 1
    assert fingerprint.digest_of(tensor) != before
    assert fingerprint.digest_of(torch.zeros(2, 8)) != fingerprint.digest_of(torch.zeros(4, 4))
    assert fingerprint.digest_of(torch.ones(3, dtype=torch.uint8)) != fingerprint.digest_of(torch.ones(3))


def test_tokenizer_changes():
    def digest(change=lambda state: None, add=()) -> str:
        tok = tiny.tokenizer()
        state = json.loads(tok.backend_tokenizer.to_str())
        change(state)
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
        tok.add_tokens(list(add))
        return fingerprint.tokenizer_digest(tok)

    def swap_merges(state):
        merges = state["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    def rename(state):
        vocab = state["model"]["vocab"]
        a, b = [t for t in vocab if vocab[t] in (300, 301)]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    base = fingerprint.tokenizer_digest(tiny.tokenizer())
    assert digest() == base
    changed = [digest(swap_merges), digest(rename), digest(add=["<extra>"])]
    assert base not in changed and len(set(changed)) == 3


def test_template_text_and_named_templates():
    tok = tiny.tokenizer()
    before = fingerprint.template_digest(tok)
    tok.chat_template += " "
    assert fingerprint.template_digest(tok) != before
    tok.chat_template = {"default": tiny.CHATML, "tool_use": "x"}
    assert fingerprint.template_digest(tok) not in (None, before)
    assert fingerprint.template_digest(tiny.tokenizer(template=None)) is None


def test_identity_survives_json():
    here = _identity(families.build("gemma3_nested"))
    again = TargetIdentity.model_validate(json.loads(here.model_dump_json()))
    assert again == here and again.differences(here) == []
    assert again.target_shape().rope["rope_theta"] == 1e6
