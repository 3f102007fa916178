"""Parts and conventions of a target, found in loaded models and in files."""

from __future__ import annotations

import pytest
import target_families as families
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headtrain.target.files import find_tensor_names
from headtrain.target.model import Target
from headtrain.target.parts import check_teacher, effective_norm_weight, find_parts
from headtrain.target.shape import TargetError
from headtrain.types import Batch, Features, Row, Wants


@pytest.mark.parametrize(
    "name, body, tied",
    [
        ("llama", "model", False),
        ("llama_tied", "model", True),
        ("gemma3_nested", "model.language_model", True),  # CASES 20
        ("llava", "model.language_model", False),
        ("phi", "model", False),
    ],
)
def test_parts_are_found(name, body, tied):
    model = families.build(name)
    parts = find_parts(model)
    assert parts.body is model.get_submodule(body)
    assert parts.tied == tied
    assert len(parts.layers) == 4 and parts.embed.weight.shape == parts.lm_head.weight.shape == (99, 32)
    assert parts.norm.weight.shape == (32,)


def test_candidates_are_listed_where_nothing_is_found():  # CASES 20
    model = families.build("llama")
    model.model.stack = model.model.layers[:3]
    del model.model.layers
    with pytest.raises(TargetError, match=r"list of 4 decoder layers; candidates: model: 3 x LlamaDecoderLayer"):
        find_parts(model)
    model = families.build("llama")
    model.model.last_scaling = nn.Identity()
    del model.model.norm
    with pytest.raises(TargetError, match=r"no final norm.*candidates: .*last_scaling \(Identity\)"):
        find_parts(model)
    with pytest.raises(TargetError, match=r"LlamaModel: no lm_head.*candidates: layers\.\d.*q_proj"):
        find_parts(families.build("llama").model)
    model = families.build("llama")
    model.get_input_embeddings = lambda: None
    with pytest.raises(TargetError, match=r"no token embedding.*candidates: model.embed_tokens \(99, 32\)"):
        find_parts(model)


class _OnePlus(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).to(x.dtype)


@pytest.mark.parametrize("hidden", [32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_effective_norm_weight_by_behaviour(hidden, dtype):
    weight = (torch.rand(hidden) + 0.5).to(dtype)
    rms = nn.RMSNorm(hidden, eps=1e-5, dtype=dtype)
    layer = nn.LayerNorm(hidden, dtype=dtype)
    with torch.no_grad():
        rms.weight.copy_(weight)
        layer.weight.copy_(weight)
        layer.bias.normal_()
    assert torch.equal(effective_norm_weight(rms, hidden), weight)
    assert torch.equal(effective_norm_weight(layer, hidden), weight)
    assert torch.equal(effective_norm_weight(_OnePlus(weight), hidden).float(), (1 + weight.float()).to(dtype).float())
    bare = nn.LayerNorm(hidden, elementwise_affine=False)
    torch.testing.assert_close(effective_norm_weight(bare, hidden), torch.ones(hidden), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "name, embed_scale, logit_scale, softcap, bias",
    [
        ("llama", 1.0, 1.0, None, False),
        ("cohere", 1.0, 0.0625, None, False),  # multiplies by logit_scale
        ("granite", 12.0, 0.125, None, False),  # divides by logits_scaling, multiplies the embedding in the body
        ("gemma2", 1.0, 1.0, 3.0, False),
        ("phi", 1.0, 1.0, None, True),
    ],
)
def test_conventions_are_measured(name, embed_scale, logit_scale, softcap, bias):
    target = Target.of(families.build(name))
    found = target.conventions
    assert (found.embed_scale, found.logit_scale, found.softcap) == (embed_scale, logit_scale, softcap)
    assert (target.teacher().bias is not None) == bias
    weights, teacher = target.weights(), target.teacher()  # what a head that shares the lm_head computes, or is told of
    x = torch.randn(5, target.shape.hidden_size)
    logits = torch.nn.functional.linear(x, weights.lm_head, weights.lm_head_bias)
    cap = weights.softcap
    torch.testing.assert_close(torch.tanh(logits / cap) * cap if cap else logits, teacher.logits(x))
    figures = check_teacher(target)
    assert figures["agree"] == 1 and figures["excess"] < 0.1


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma3", "granite", "llava", "cohere"])
def test_the_embedding_is_what_the_first_layer_is_fed(name):
    model = families.build(name)
    target = Target.of(model)
    ids = torch.arange(3, 30)
    fed = target.features(Batch.pack([Row(ids.tolist(), [0] * 27)]), Wants((0,))).layers[:, 0]
    assert torch.equal(target.weights().embed[ids], fed)
    shared = target.weights().embed.data_ptr() == target.parts.embed.weight.data_ptr()
    assert shared == (name not in ("gemma", "gemma3", "granite"))


def test_weights_are_effective_and_named_as_in_llama():
    model = families.build("llama")
    weights = Target.of(model).weights()
    assert torch.equal(weights.final_norm, model.model.norm.weight)
    assert set(weights.last_layer) == {n for n, _ in model.model.layers[-1].named_parameters()}
    model = families.build("gemma")
    weights = Target.of(model).weights()
    assert torch.equal(weights.final_norm, 1 + model.model.norm.weight)
    assert torch.equal(weights.last_layer["input_layernorm.weight"], 1 + model.model.layers[-1].input_layernorm.weight)
    for name in ("gemma3", "cohere"):  # four norms, one norm: not Llama's layer
        assert Target.of(families.build(name)).weights().last_layer == {}
    mixture = Target.of(families.build("qwen3_moe")).weights().last_layer
    assert "mlp.experts.gate_up_proj" in mixture and "mlp.gate_proj.weight" not in mixture
    assert not any(t.requires_grad for t in (weights.embed, weights.lm_head, weights.final_norm))


@pytest.mark.parametrize("times", [0, 2])
def test_a_norm_applied_never_or_twice_is_refused(times, monkeypatch):  # CASES 23
    target = Target.of(families.build("llama"))
    norm = target.parts.norm

    def wrong(batch: Batch, wants: Wants) -> Features:
        got = Target.features(target, batch, Wants((4,), final="all", summary=False))
        got.final = got.layers[:, 0] if times == 0 else norm(got.final)
        return got

    monkeypatch.setattr(target, "features", wrong)
    with pytest.raises(TargetError, match=r"largest difference [\d.]+ .*greedy token agrees at \d+%.*exactly once"):
        check_teacher(target)


def test_a_load_checks_the_teacher():
    """A factor that no part of the resolver knows (one for each token) is refused when the target is wrapped."""
    model = families.build("llama")
    factors = torch.rand(99) + 0.5
    model.lm_head.register_forward_hook(lambda module, args, out: out * factors)
    with pytest.raises(TargetError, match="does not give the target's own logits"):
        Target.of(model)


def test_features_that_are_not_numbers_are_refused(monkeypatch):
    target = Target.of(families.build("llama"))

    def broken(batch: Batch, wants: Wants) -> Features:
        got = Target.features(target, batch, wants)
        got.final = got.final * float("nan")
        return got

    monkeypatch.setattr(target, "features", broken)
    with pytest.raises(TargetError, match="largest difference nan"):
        check_teacher(target)


# -- files --------------------------------------------------------------------------------------------------------


def _save(tmp_path, name, **more):
    families.build(name).save_pretrained(tmp_path, **more)
    return tmp_path


def test_names_in_a_single_tied_file_fall_back_to_the_embedding(tmp_path):  # CASES 19
    found = find_tensor_names(_save(tmp_path, "llama_tied"))
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert found.lm_head == found.embed == "model.embed_tokens.weight"
    assert found.final_norm == "model.norm.weight" and len(found.layers) == 4
    assert found.layers[2]["self_attn.q_proj.weight"] == "model.layers.2.self_attn.q_proj.weight"


def test_names_in_shards_with_and_without_an_index(tmp_path):
    found = find_tensor_names(_save(tmp_path, "llama", max_shard_size="30KB"))
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() and len(set(found.files.values())) > 2
    assert found.lm_head == "lm_head.weight"
    index.unlink()
    assert find_tensor_names(tmp_path) == found
    last = sorted(set(found.files.values()))[-1]
    families.build("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    last.unlink()
    with pytest.raises(TargetError, match=f"not there: {last.name}"):
        find_tensor_names(tmp_path)


@pytest.mark.parametrize("name", ["llava", "gemma3_nested"])
def test_names_under_a_language_model(tmp_path, name):  # CASES 20
    found = find_tensor_names(_save(tmp_path, name))
    assert "language_model" in found.embed and "vision" not in found.final_norm and len(found.layers) == 4
    assert "self_attn.q_proj.weight" in found.layers[3]


def test_other_towers_are_passed_over(tmp_path):
    text = ("embed_tokens", "norm", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj")
    names = [f"model.language_model.{n}.weight" for n in text] + ["lm_head.weight"]
    others = [f"{tower}.{n}.weight" for tower in ("visual", "audio_tower", "mtp") for n in ("embed_tokens", "lm_head")]
    save_file({n: torch.ones(2, 2) for n in names + others}, tmp_path / "model.safetensors")
    found = find_tensor_names(tmp_path)
    assert [found.embed, found.final_norm, found.lm_head] == [names[0], names[1], "lm_head.weight"]


def test_candidates_in_files(tmp_path):
    save_file({"encoder.table": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(TargetError, match="no token embedding among 1 tensors.*candidates: encoder.table"):
        find_tensor_names(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(TargetError, match="model.safetensors"):
        find_tensor_names(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no"):
        find_tensor_names(tmp_path)


def test_a_missing_layer_is_seen(tmp_path):
    file = _save(tmp_path, "llama") / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if ".layers.1." not in n}, file)
    with pytest.raises(TargetError, match=r"\[0, 2, 3\]"):
        find_tensor_names(tmp_path)
