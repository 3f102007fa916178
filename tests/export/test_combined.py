"""An MTP module from scratch in one checkpoint with its target: a Llama or Qwen2 that becomes a MiMo."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from headtrain.config import TargetSection
from headtrain.export.check import check
from headtrain.export.core import export_head, launch_line
from headtrain.export.engines import ExportError
from headtrain.export.files import read_weights
from headtrain.export.folder import verify_folder
from headtrain.heads.catalog import HEADS, build_head, parse_head
from headtrain.heads.io import head_metadata, load_head, save_head
from headtrain.metadata import TrainingPart
from headtrain.target.load import load_target
from headtrain.types import Batch

MODULE = "model.mtp_layers.0."
DECODER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
DECODER += ("mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


def save_qwen2(folder, **changes):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2,
        initializer_range=0.1, rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
    model.save_pretrained(folder, max_shard_size="60KB")
    tiny.tokenizer().save_pretrained(folder)


def train_nothing(target, folder, **config):
    """A checkpoint whose every parameter is random."""
    head = build_head(parse_head({"kind": "mtp", "depth": 2, **config}), target.shape, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1)
    training = TrainingPart(recipe_sha256="e" * 64, data_sha256="f" * 64, steps=7, tokens=99, max_length=512)
    save_head(folder, head, head_metadata(head, target.identity, training=training))


@pytest.fixture(scope="module")
def rigs(tmp_path_factory):
    """For both families: target's folder, checkpoint, export."""
    out = {}
    for family in ("llama", "qwen2"):
        place = tmp_path_factory.mktemp(family)
        if family == "llama":
            tiny.save(place / "target", num_hidden_layers=3)
        else:
            save_qwen2(place / "target")
            (place / "target/generation_config.json").unlink()
        target = load_target(TargetSection(path=str(place / "target")))
        train_nothing(target, place / "head")
        export_head(place / "head", "vllm", place / "out", target_folder=place / "target", weights=target.weights())
        out[family] = place
    return out


@pytest.fixture
def place(rigs, tmp_path):
    """The Llama's, to be damaged."""
    shutil.copytree(rigs["llama"], tmp_path / "x")
    return tmp_path / "x"


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_checkpoint_is_the_target_and_the_module(rigs, family):
    """Names, keys and zeros as FORMATS.md has them, written down independently of the form's own table."""
    place = rigs[family]
    tensors, target = read_weights(place / "out"), read_weights(place / "target")
    trained = load_head(place / "head")[0].state_dict()
    layers = [f"model.layers.{i}." for i in range(3)] + [MODULE]
    names = {f"{layer}{part}.weight" for layer in layers for part in DECODER}
    names |= {f"{layer}self_attn.{part}_proj.bias" for layer in layers for part in "qkv"}
    names |= {MODULE + f"{part}.weight" for part in ("token_layernorm", "hidden_layernorm", "input_proj")}
    names |= {MODULE + "final_layernorm.weight", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert tensors.keys() == names
    assert all(torch.equal(tensors[name], tensor) for name, tensor in target.items())
    added = {n for n in tensors if not n.startswith(MODULE)} - target.keys()
    if family == "llama":
        assert len(added) == 10 and torch.equal(tensors["lm_head.weight"], target["model.embed_tokens.weight"])
        assert not any(t.any() for n, t in tensors.items() if n.endswith(".bias"))
    else:
        assert not added and all(t.any() for n, t in tensors.items() if n.endswith(".bias"))
    assert torch.equal(tensors[MODULE + "input_proj.weight"], trained["input_proj.weight"])
    assert torch.equal(tensors[MODULE + "mlp.up_proj.weight"], trained["block.mlp.up_proj.weight"])
    assert torch.equal(tensors[MODULE + "input_layernorm.weight"], trained["input_layernorm.weight"])

    config = config_of(place / "out")
    assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
    assert config["num_nextn_predict_layers"] == 1 and config["tie_word_embeddings"] is False
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (3, 64, 384)
    theta = 10000.0 if family == "llama" else 50000.0
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
    assert config["rms_norm_eps"] == config_of(place / "target")["rms_norm_eps"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_combined_checkpoint_computes_what_the_target_does(rigs, family):
    place = rigs[family]
    rows = Batch.pack(tiny.rows((24, 9)))
    found = []
    for folder in ("target", "out"):
        target = load_target(TargetSection(path=str(place / folder)))
        found.append(target.model(input_ids=rows.ids[None]).logits)
        assert target.eos_ids == (2,)  # with a generation_config.json and without
    # adding a zero bias is exact; which kernel adds it is not ours
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    old, new = (AutoTokenizer.from_pretrained(place / folder) for folder in ("target", "out"))
    assert old.get_vocab() == new.get_vocab() and old.chat_template == new.chat_template


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_is_read_back_strictly_and_written_twice_alike(rigs, family, tmp_path):
    place = rigs[family]
    export_head(place / "head", "vllm", tmp_path / "again", target_folder=place / "target")
    assert contents(tmp_path / "again") == contents(place / "out")
    verified = verify_folder(place / "out")
    trained = load_head(place / "head")[0].state_dict()
    rebuilt = verified.head.state_dict()
    assert rebuilt.keys() == trained.keys() and all(torch.equal(trained[n], rebuilt[n]) for n in trained)
    assert ("block.self_attn.q_proj.bias" in rebuilt) == (family == "qwen2")
    result = check(place / "out", str(place / "target"), probe=False)
    assert result.exit_code == 0, result.rows


def test_launch_is_of_the_folder_alone(rigs):
    line = launch_line(rigs["llama"] / "out")
    words = shlex.split(line)
    assert words[:3] == ["vllm", "serve", str(rigs["llama"] / "out")]
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 2}
    assert (
        "whole checkpoint" in (rigs["llama"] / "out/README.md").read_text()
        or "target's weights as well" in (rigs["llama"] / "out/README.md").read_text()
    )


def test_shards_and_dtype(rigs, tmp_path):
    place = rigs["qwen2"]
    out = export_head(
        place / "head", "vllm", tmp_path / "out", target_folder=place / "target", dtype="bfloat16",
        max_shard_size="50KB",
    )  # fmt: skip
    assert len(list(out.glob("model-*.safetensors"))) > 3
    tensors, whole = read_weights(out), read_weights(place / "out")
    assert all(torch.equal(tensors[n], whole[n].bfloat16()) for n in whole)
    assert config_of(out)["torch_dtype"] == "bfloat16"
    assert check(out, str(place / "target"), probe=False).exit_code == 0


# -- what is refused -------------------------------------------------------------------------------------------------

OTHER_FORMS = {
    "concat": ({"concat": "embed_first"}, 'head.concat="embed_first" (it computes "hidden_first")'),
    "start": ({"start": "normed"}, 'head.start="normed" (it computes "raw")'),
    "recycle": ({"recycle": "raw"}, 'head.recycle="raw" (it computes "normed")'),
    "zero": ({"zero_first_embedding": False}, "head.zero_first_embedding=false (it computes true)"),
    "own lm_head": ({"own_lm_head": True}, "head.own_lm_head=true (it computes false)"),
    "width": ({"intermediate_size": 48}, "head.intermediate_size=48 (the target's: 96)"),
    "norms": ({"qk_norm": True}, "head.qk_norm=true"),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_every_other_configuration_is_refused_by_name(rigs, tmp_path, name):
    config, message = OTHER_FORMS[name]
    target = load_target(TargetSection(path=str(rigs["llama"] / "target")))
    train_nothing(target, tmp_path / "head", **config)
    with pytest.raises(ExportError) as error:
        export_head(tmp_path / "head", "vllm", tmp_path / "out", target_folder=rigs["llama"] / "target")
    assert message in str(error.value) and "vLLM" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


def test_a_reduced_vocabulary_is_refused(rigs):
    shape = load_target(TargetSection(path=str(rigs["llama"] / "target"))).shape
    head = build_head(parse_head({"kind": "mtp", "draft_vocab_size": 8}), shape, torch.arange(8))
    with pytest.raises(ValueError, match=r"head.draft_vocab_size=8 \(it drafts the whole .*headtrain vocab RUN --size"):
        head.export_spec("vllm")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "'gemma3_text'"),
        ({"model_type": "qwen2", "module": {"count": 1}}, "a module of its own"),
        ({"head_dim": 32}, "4 heads of 32"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "a part of each head"),
    ],
)
def test_other_targets_are_refused(rigs, changes, message):
    shape = load_target(TargetSection(path=str(rigs["llama"] / "target"))).shape.replace(**changes)
    with pytest.raises(ValueError, match=message):
        build_head(parse_head({"kind": "mtp", "qk_norm": False}), shape, None).export_spec("vllm")


def test_biases_of_the_module_alone(rigs, tmp_path):
    """A module with trained biases on a target without: nothing is lost."""
    place = rigs["llama"]
    train_nothing(load_target(TargetSection(path=str(place / "target"))), tmp_path / "head", attention_bias=True)
    out = export_head(tmp_path / "head", "vllm", tmp_path / "out", target_folder=place / "target")
    tensors = read_weights(out)
    assert tensors[MODULE + "self_attn.k_proj.bias"].any()
    assert not tensors["model.layers.0.self_attn.k_proj.bias"].any()
    assert config_of(out)["mtp_attention_bias"] is True


def test_only_the_trained_target_goes_in(place):
    def export(folder):
        return export_head(place / "head", "vllm", place / "new", target_folder=folder)

    with pytest.raises(ExportError, match="holds the target as well.*--target"):
        export(None)
    with pytest.raises(ExportError, match="no folder of safetensors"):
        export(place / "nowhere")
    tensors = load_file(place / "target/model.safetensors")
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2}
    save_file(changed, place / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="not the target that the head was trained on: final_norm"):
        export(place / "target")
    more = {**tensors, "model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    save_file(more, place / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="no place for: model.layers.0.self_attn.o_proj.bias"):
        export(place / "target")
    less = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}
    save_file(less, place / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"missing, or of another shape.*layers\.1\.mlp\.up_proj"):
        export(place / "target")
    save_file(
        {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        place / "target/model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    config = config_of(place / "target")
    (place / "target/config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    with pytest.raises(ExportError, match="sliding windows"):
        export(place / "target")
    (place / "target/config.json").write_text(json.dumps(config))
    export(place / "target")
    assert contents(place / "new") == contents(place / "out")


def test_a_config_that_contradicts_the_form_is_refused_without_a_record(rigs):
    config, cls = config_of(rigs["llama"] / "out"), HEADS["mtp"]
    for key, value in (
        ("architectures", ["Qwen2ForCausalLM"]), ("model_type", "llama"), ("num_nextn_predict_layers", 2),
        ("hidden_act", "gelu"), ("tie_word_embeddings", True), ("use_sliding_window", True),
        ("mtp_attention_bias", None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=key):
            cls.expected_tensors("vllm", config | {key: value})
    shape = load_target(TargetSection(path=str(rigs["llama"] / "target"))).shape
    rope = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    head = cls.from_export("vllm", config | rope, read_weights(rigs["llama"] / "out"), shape)
    assert head.shape.rope["rope_theta"] == 5e5  # as the engine reads it


def swap(tensors):
    a, b = MODULE + "token_layernorm.weight", MODULE + "hidden_layernorm.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


FAULTS = {
    "missing of the target": (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), None, "missing tensor"),
    "missing of the module": (lambda t: t.pop(MODULE + "input_proj.weight"), None, "missing tensor"),
    "missing lm_head": (lambda t: t.pop("lm_head.weight"), None, "missing tensor lm_head"),
    "missing bias": (lambda t: t.pop(MODULE + "self_attn.q_proj.bias"), None, "missing tensor"),
    "extra": (lambda t: t.update(x=torch.ones(2)), None, "unknown tensor x"),
    "not finite": (lambda t: t["model.norm.weight"].fill_(float("nan")), None, "non-finite"),
    "a bias": (lambda t: t[MODULE + "self_attn.q_proj.bias"].fill_(1.0), None, "mtp_attention_bias is false"),
    "theta": (None, {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope"),
    "no module": (None, {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers"),
    "another class": (None, {"architectures": ["Qwen2ForCausalLM"]}, "architectures"),
    "tied": (None, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "eps": (None, {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    "biases unknown": (None, {"mtp_attention_bias": None}, "mtp_attention_bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rule_broken_once_is_refused(place, fault):
    tensors, config, message = FAULTS[fault]
    if tensors:
        loaded = load_file(place / "out/model.safetensors")
        tensors(loaded)
        save_file(loaded, place / "out/model.safetensors", metadata={"format": "pt"})
    if config:
        (place / "out/config.json").write_text(json.dumps(config_of(place / "out") | config))
    with pytest.raises(ValueError, match=message):
        verify_folder(place / "out")


def test_what_no_shape_shows_is_seen_by_the_file_digests(place):
    loaded = load_file(place / "out/model.safetensors")
    swap(loaded)
    save_file(loaded, place / "out/model.safetensors", metadata={"format": "pt"})
    result = check(place / "out", str(place / "target"), probe=False)
    assert result.exit_code == 1 and "changed since: model.safetensors" in result.rows[0].found


def test_only_heads_from_scratch_have_the_form():
    assert HEADS["mtp"].dialects.keys() == {"vllm"} and not HEADS["mtp-checkpoint"].dialects
    for kind in ("mtp", "mtp-checkpoint"):
        with pytest.raises(KeyError):
            HEADS[kind].expected_tensors("sglang", {})
