from __future__ import annotations

import json
import shutil
import warnings

import export_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.export import core, files
from headtrain.export.core import export_head
from headtrain.export.engines import ExportError, engine_table, resolve
from headtrain.export.folder import verify_folder
from headtrain.heads.catalog import head_class
from headtrain.heads.forms import rope_forms
from headtrain.heads.io import load_head
from headtrain.metadata import Metadata, MetadataError

WEIGHTS = cases.weights()


@pytest.fixture
def exported(tmp_path):
    """An EAGLE-3 head's vLLM export, to be damaged."""
    return export_head(cases.checkpoint(tmp_path / "ckpt", "eagle3"), "vllm", tmp_path / "out")


def rewrite(folder, tensors=None, config=None):
    """Apply functions to the folder's tensors and config in place."""
    if tensors:
        loaded = load_file(folder / "model.safetensors")
        tensors(loaded)
        save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        loaded = json.loads((folder / "config.json").read_text())
        config(loaded)
        (folder / "config.json").write_text(json.dumps(loaded))


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_export_is_recorded_and_repeatable(tmp_path, exported):
    """Every head and every engine: test_importing's round trips."""
    assert Metadata.read(exported).export.engine == "vllm"
    assert contents(exported) == contents(export_head(tmp_path / "ckpt", "vllm", tmp_path / "elsewhere"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "elsewhere", "out"]


def test_vllm_form_of_an_eagle3_head(exported, tmp_path):
    """Tensors and keys as FORMATS.md has them, written down independently of the head's own table."""
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (384, 48)  # the target's, the draft's
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM counts as hidden_states does
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["tie_word_embeddings"] is False and "quantization_config" not in config
    trained, _ = load_head(tmp_path / "ckpt")
    tensors = load_file(exported / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(48), trained.draft_ids)
    assert "t2d" not in tensors  # vLLM reads the offsets alone
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 128)
    assert tensors["fc.weight"].shape == (64, 192)
    assert torch.equal(tensors["lm_head.weight"], trained.lm_head.weight)


def test_a_shared_lm_head_travels_with_the_export(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "medusa-shared")
    with pytest.raises(ExportError, match="carries the target's own tensors.*attach"):
        export_head(checkpoint, "vllm", tmp_path / "out")
    out = export_head(checkpoint, "vllm", tmp_path / "out", weights=WEIGHTS)
    assert json.loads((out / "config.json").read_text())["original_lm_head"] is True
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], WEIGHTS.lm_head)


def test_what_the_engine_cannot_load_is_refused_by_name(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "medusa-reduced")
    with pytest.raises(ExportError, match="vLLM cannot serve this head: lm_heads of 40 of 384 rows"):
        export_head(checkpoint, "vllm", tmp_path / "out")
    out = export_head(cases.checkpoint(tmp_path / "m", "medusa"), "vllm", tmp_path / "out")
    rewrite(out, config=lambda c: c.update(truncated_vocab_size=40))
    with pytest.raises(ValueError, match="truncated_vocab_size"):
        verify_folder(out)


def test_rope_of_the_target_survives(tmp_path):
    """Theta 5e6 and llama3 scaling, in the forms of transformers 4 and 5 (CASES 26)."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    target = cases.identity(cases.SHAPE.replace(rope=rope))
    out = export_head(cases.checkpoint(tmp_path / "ckpt", "eagle3", target), "vllm", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 5e6 and config["rope_scaling"]["rope_type"] == "llama3"
    assert verify_folder(out).head.shape.rope == rope


BROKEN = {
    "missing tensor": (lambda t: t.pop("midlayer.hidden_norm.weight"), None, "missing tensor midlayer.hidden_norm"),
    "missing lm_head": (lambda t: t.pop("lm_head.weight"), None, "missing tensor lm_head.weight"),
    "missing d2t": (lambda t: t.pop("d2t"), None, "missing tensor d2t"),
    "extra tensor": (lambda t: t.update(x=torch.ones(2)), None, "unknown tensor x"),
    "absolute d2t": (lambda t: t.update(d2t=t["d2t"] + torch.arange(48)), None, "d2t: draft vocabulary"),
    "renamed tensor": (lambda t: t.update({"layers.0.norm": t.pop("norm.weight")}), None, "missing tensor norm.weight"),
    "swapped q and k": (
        lambda t: t.update(
            {
                "midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.k_proj.weight"],
                "midlayer.self_attn.k_proj.weight": t["midlayer.self_attn.q_proj.weight"],
            }
        ),
        None,
        "q_proj.weight: shape",
    ),
    "wrong shape": (lambda t: t.update({"norm.weight": torch.ones(63)}), None, "norm.weight: shape"),
    "non-finite": (lambda t: t["fc.weight"].view(-1)[3].fill_(float("nan")), None, "fc.weight: non-finite"),
    "another draft vocabulary": (lambda t: t["d2t"].add_(1), None, "different draft vocabularies|not the one"),
    "layer ids off by one": (
        None,
        lambda c: c.update(
            eagle_aux_hidden_state_layer_ids=[1, 3, 4],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        ),
        r"reads the target's layers \[1, 3, 4\], but was trained on \[2, 4, 5\]",
    ),
    "layer ids in one place only": (None, lambda c: c.pop("eagle_config"), "eagle_config"),
    "wrong theta": (
        None,
        lambda c: c.update(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "rope_theta is 500000.0, the training record gives 10000.0",
    ),
    "old-form theta alone": (None, lambda c: c.update(rope_theta=5e5), "rope_theta"),
    "norm switch turned": (None, lambda c: c.update(norm_before_residual=True), "norm_before_residual is True"),
    "norm switch omitted": (None, lambda c: c.pop("norm_before_residual"), "norm_before_residual is not there"),
    "draft vocabulary as vocabulary": (None, lambda c: c.update(vocab_size=48), "vocab_size"),
    "tied": (None, lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
    "quantised config": (None, lambda c: c.update(quantization_config={"quant_method": "awq"}), "quantization_config"),
    "layers of the target": (None, lambda c: c.update(num_hidden_layers=48), "num_hidden_layers 48: the head has one"),
    "eps": (None, lambda c: c.update(rms_norm_eps=1e-5), "rms_norm_eps"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_found(exported, fault):
    tensors, config, message = BROKEN[fault]
    verify_folder(exported)
    rewrite(exported, tensors, config)
    with pytest.raises(ValueError, match=message):
        verify_folder(exported)


def test_export_writes_nothing_when_the_form_is_wrong(tmp_path, monkeypatch):
    """A form that loses a switch, or swaps two tensors of one shape, is found before the folder has its name."""
    cls = head_class("eagle3")
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "eagle3")
    right = cls.export_spec

    def swapped(self, dialect):
        spec = right(self, dialect)
        k, v = "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"
        spec.tensors[k], spec.tensors[v] = spec.tensors[v], spec.tensors[k]
        return spec

    def other_theta(self, dialect):
        spec = right(self, dialect)
        spec.config |= rope_forms({"rope_type": "default", "rope_theta": 5e5})
        return spec

    def quantised(self, dialect):
        spec = right(self, dialect)
        spec.config["quantization_config"] = {"quant_method": "fp8"}
        return spec

    for wrong, message in ((swapped, "k_proj"), (other_theta, "drafts otherwise"), (quantised, "quantization_config")):
        monkeypatch.setattr(cls, "export_spec", wrong)
        with pytest.raises(ExportError, match=message):
            export_head(checkpoint, "vllm", tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_non_finite_head_is_refused(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "medusa")
    tensors = load_file(checkpoint / "head.safetensors")
    tensors["blocks.0.layers.0.bias"][0] = float("inf")
    save_file(tensors, checkpoint / "head.safetensors")
    with pytest.raises(ValueError, match="non-finite"):
        export_head(checkpoint, "vllm", tmp_path / "out")
    tensors["blocks.0.layers.0.bias"][0] = 1e30  # finite, but not in float16
    save_file(tensors, checkpoint / "head.safetensors")
    with pytest.raises(ValueError, match="non-finite"):
        export_head(checkpoint, "vllm", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_reduced_precision_is_exact_in_that_precision(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "eagle3")
    out = export_head(checkpoint, "vllm", tmp_path / "out", dtype="bfloat16")
    trained, _ = load_head(checkpoint)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], trained.fc.weight.to(torch.bfloat16))
    assert tensors["d2t"].dtype == torch.int64
    with pytest.raises(ExportError, match="int8"):
        export_head(checkpoint, "vllm", tmp_path / "other", dtype="int8")


def test_folders_are_not_overwritten(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "medusa")
    out = tmp_path / "out"
    out.mkdir()
    export_head(checkpoint, "vllm", out)  # an empty folder is fine
    with pytest.raises(ExportError, match="not empty"):
        export_head(checkpoint, "vllm", out)
    (out / "stray").write_text("x")
    export_head(checkpoint, "headtrain", out, force=True)
    assert not (out / "stray").exists() and verify_folder(out).dialect == "headtrain"
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "a.jpg").write_text("x")
    for force in (False, True):
        with pytest.raises(ExportError, match="not empty|no earlier export"):
            export_head(checkpoint, "vllm", foreign, force=force)
    for place in (checkpoint, tmp_path):
        with pytest.raises(ExportError, match="the checkpoint itself"):
            export_head(checkpoint, "vllm", place, force=True)
    assert (foreign / "a.jpg").exists() and (checkpoint / "head.safetensors").exists()


def test_layers_come_from_the_training_record_or_not_at_all(tmp_path):
    """CASES 29 and 28: the record decides; a record without layers, or with others, is refused."""
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "eagle3")
    path = checkpoint / "headtrain.json"
    data = json.loads(path.read_text())
    data["features"]["layers"] = [1, 3, 4]
    path.write_text(json.dumps(data))
    with pytest.raises(ExportError, match=r"\[2, 4, 5\].*\[1, 3, 4\]"):
        export_head(checkpoint, "vllm", tmp_path / "out")
    del data["features"]
    path.write_text(json.dumps(data))
    with pytest.raises(MetadataError, match="features"):
        export_head(checkpoint, "vllm", tmp_path / "out")


def test_shorter_training_is_warned_and_recorded_never_rewritten(tmp_path):
    """CASES 41."""
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "eagle3", max_length=128)
    with pytest.warns(UserWarning, match="up to 128 tokens, the target serves 512"):
        out = export_head(checkpoint, "vllm", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
    assert Metadata.read(out).training.max_length == 128
    assert "128 tokens" in (out / "README.md").read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_head(cases.checkpoint(tmp_path / "long", "eagle3"), "vllm", tmp_path / "out2")


def test_acceptance_is_merged(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "ckpt", "medusa")
    route = {"k": 3, "temperature": 0.0, "tau": 1.75, "alpha": [[30, 60], [15, 30]], "tokens": 105, "prompts": 4}
    (tmp_path / "eval.json").write_text(json.dumps({"acceptance": {"all": route}}))
    out = export_head(checkpoint, "vllm", tmp_path / "out", acceptance=tmp_path / "eval.json")
    assert Metadata.read(out).acceptance["all"].tau == 1.75
    assert "| all | 1.75 | 0.50 (30/60) | 0.50 (15/30) | - |" in (out / "README.md").read_text()
    with pytest.raises(ExportError, match="expected measured acceptance"):
        export_head(checkpoint, "vllm", tmp_path / "o2", acceptance={"acceptance": {"all": {"tau": 1}}})


def test_wrong_inputs_are_named(tmp_path, exported):
    checkpoint = tmp_path / "ckpt"
    with pytest.raises(ExportError, match="did you mean 'vllm'"):
        export_head(checkpoint, "vlm", tmp_path / "x")
    with pytest.raises(ExportError, match="no checkpoint folder"):
        export_head(tmp_path / "nothing", "vllm", tmp_path / "x")
    with pytest.raises(ExportError, match="no folder"):
        verify_folder(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match="not an export"):
        verify_folder(tmp_path / "empty")
    (exported / "config.json").write_text("{")
    with pytest.raises(ExportError, match="config.json is not readable JSON"):
        verify_folder(exported)


def test_damaged_and_escaping_weights_are_refused(exported):
    path = exported / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportError, match="model.safetensors"):
        verify_folder(exported)
    path.write_bytes(whole)
    path.rename(exported / "part.safetensors")
    index = exported / "model.safetensors.index.json"
    names = load_file(exported / "part.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    verify_folder(exported)  # shards are read
    for name in ("../part.safetensors", "/etc/passwd", "..", "a/../part.safetensors"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
        with pytest.raises(ExportError, match="leaves the folder"):
            verify_folder(exported)


def test_an_export_of_another_kind_is_refused(exported, tmp_path):
    other = export_head(cases.checkpoint(tmp_path / "m", "medusa"), "vllm", tmp_path / "medusa")
    shutil.copy(other / "model.safetensors", exported / "model.safetensors")
    with pytest.raises(ExportError, match="missing tensor fc.weight"):
        verify_folder(exported)
    shutil.copy(other / "config.json", exported / "config.json")
    with pytest.raises(ValueError, match="MedusaModel"):
        verify_folder(exported)


def test_a_folder_without_metadata_is_recognised_by_its_tensors(exported, tmp_path):
    (exported / "headtrain.json").unlink()
    verified = verify_folder(exported)
    assert (verified.kind, verified.dialect, verified.head) == ("eagle3", "vllm", None)
    rewrite(exported, lambda t: t["norm.weight"][0].fill_(float("nan")))
    with pytest.raises(ExportError, match="norm.weight: non-finite"):
        verify_folder(exported)
    rewrite(exported, lambda t: (t.pop("fc.weight"), t["norm.weight"][0].fill_(1)))
    with pytest.raises(ExportError, match="nearest is eagle3 for vllm: missing tensor fc.weight"):
        verify_folder(exported)


def test_a_pair_that_no_version_serves_is_refused():
    class Other(head_class("medusa")):
        dialects = {}

    with pytest.raises(ExportError, match="--engine headtrain"):
        resolve("vllm", Other, "other")
    assert resolve("headtrain", Other, "other").name == "headtrain"
    rows = {(r["engine"], r["head"]): r["served"] for r in engine_table()}
    assert rows[("vllm", "eagle3")] == rows[("vllm", "medusa")] == rows[("headtrain", "medusa")] == "yes"


def test_an_export_that_fails_leaves_the_earlier_one_and_folders_beside_it_alone(tmp_path, monkeypatch):
    checkpoint, out = cases.checkpoint(tmp_path / "c", "eagle3"), tmp_path / "out"
    for end in ("old", "tmp"):
        (tmp_path / f"out.{end}").mkdir()
        (tmp_path / f"out.{end}/thesis.txt").write_text("mine")
    export_head(checkpoint, "vllm", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(core, "_prove", lambda *_: (_ for _ in ()).throw(ExportError("lost")))
    with pytest.raises(ExportError, match="lost"):
        export_head(checkpoint, "vllm", out, force=True)
    monkeypatch.undo()
    moves, move = [], files.os.replace

    def fails(source, to):  # when the earlier export is aside already, and once
        moves.append(to)
        if to == out and moves.count(out) == 1:
            raise OSError("gone")
        move(source, to)

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(OSError, match="gone"):
        export_head(checkpoint, "vllm", out, force=True)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    export_head(checkpoint, "vllm", out, force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"c", "out", "out.old", "out.tmp"}
    assert all((tmp_path / f"out.{end}/thesis.txt").read_text() == "mine" for end in ("old", "tmp"))


def test_what_a_killed_export_left_is_cleared_away_and_the_earlier_one_comes_back(tmp_path):
    checkpoint, out = cases.checkpoint(tmp_path / "c", "eagle3"), tmp_path / "out"
    export_head(checkpoint, "vllm", out)
    out.rename(tmp_path / ".out.headtrain-old")  # killed between the two moves
    (tmp_path / ".out.headtrain-new").mkdir()
    (tmp_path / ".out.headtrain-new/model.safetensors").write_bytes(b"half")
    with pytest.raises(ExportError, match="lost"), files.staged(out):
        raise ExportError("lost")
    assert verify_folder(out) and {p.name for p in tmp_path.iterdir()} == {"c", "out"}
