from __future__ import annotations

import json
import shutil

import export_cases as cases
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headtrain.config import TargetSection
from headtrain.export.check import check
from headtrain.export.core import export_head
from headtrain.export.engines import ExportError
from headtrain.export.probe import compare, make_probe, read_probe
from headtrain.metadata import Metadata
from headtrain.target.load import identify_section, load_target
from headtrain.target.shape import TargetError


@pytest.fixture(scope="module")
def target(tiny_folder):
    return load_target(TargetSection(path=str(tiny_folder)))


@pytest.fixture(scope="module")
def exports(tiny_folder, target, tmp_path_factory):
    """Exports of both kinds for vLLM, with probes."""
    folder = tmp_path_factory.mktemp("exports")
    out = {}
    for name in ("eagle3", "medusa"):
        checkpoint = cases.checkpoint(
            folder / f"c-{name}", name, identify_section(TargetSection(path=str(tiny_folder)))
        )
        probe = make_probe(target, Metadata.read(checkpoint).features.layers)
        out[name] = export_head(checkpoint, "vllm", folder / name, probe=probe)
    return out


def verdicts(result):
    return {row.item: row.verdict for row in result.rows}


def change_weight(folder, name="model.layers.7.mlp.down_proj.weight", scale=1.5):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] * scale
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_the_trained_target_is_compatible(exports, tiny_folder, name):
    result = check(exports[name], str(tiny_folder))
    assert result.verdict == "compatible" and result.exit_code == 0, result.rows
    assert set(verdicts(result).values()) == {"ok"}
    assert result.relation == "the trained target"
    assert "probe" in verdicts(result)
    again = json.loads(json.dumps(result.to_dict()))
    assert again["verdict"] == "compatible" and again["rows"][0]["item"] == "contents"


def test_a_copy_of_the_folder_is_the_same_target(exports, tiny_folder, tmp_path):
    copy = shutil.copytree(tiny_folder, tmp_path / "elsewhere")
    assert check(exports["eagle3"], str(copy)).relation == "the trained target"


def test_one_changed_weight_is_a_derivative(exports, tiny_folder, tmp_path):
    copy = shutil.copytree(tiny_folder, tmp_path / "tuned")
    change_weight(copy)
    result = check(exports["eagle3"], str(copy))
    assert result.exit_code == 1 and verdicts(result)["weights"] == "mismatch"
    assert "derivative of the trained target" in result.relation and "of its greedy tokens" in result.relation
    row = next(r for r in result.rows if r.item == "weights")
    assert "differ: layer.7;" in row.found and "embed" in row.found.split("equal:")[1]
    assert verdicts(result)["probe"] == "warn"
    assert {v for k, v in verdicts(result).items() if k not in ("weights", "probe")} == {"ok"}


def test_another_model_of_the_same_form_differs_everywhere(exports, tmp_path):
    other = tiny.save(tmp_path / "other", seed=3)
    result = check(exports["eagle3"], str(other), probe=False)
    found = next(r for r in result.rows if r.item == "weights").found
    assert found.startswith("all differ; cosine of samples: embed ")
    assert result.exit_code == 1 and result.kind == "other model"
    assert result.relation == "not the trained target: another model of the same shape"


def test_another_tokenizer_is_a_wrong_target(exports, tiny_folder, tmp_path):
    copy = shutil.copytree(tiny_folder, tmp_path / "tok")
    path = copy / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    a, b = list(vocab)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(data))
    result = check(exports["eagle3"], str(copy), probe=False)
    assert verdicts(result)["tokenizer"] == "mismatch" and result.exit_code == 1


def test_another_template_is_a_warning(exports, tmp_path):
    other = tiny.save(tmp_path / "template", template=tiny.CHATML + " ")
    result = check(exports["eagle3"], str(other), probe=False)
    assert verdicts(result)["chat template"] == "warn" and result.exit_code == 0


def test_another_layer_count_is_a_wrong_target(exports, tmp_path):
    other = tiny.save(tmp_path / "shallow", num_hidden_layers=4)
    result = check(exports["eagle3"], str(other))
    found = verdicts(result)
    assert found["sizes"] == found["layers read"] == "mismatch" and found["probe"] == "unknown"
    assert "[5] outside 0..4" in next(r for r in result.rows if r.item == "layers read").found
    assert "not the trained target" in result.relation


def test_another_theta_is_seen_in_the_config_and_by_the_probe(exports, tiny_folder, tmp_path, target):
    copy = shutil.copytree(tiny_folder, tmp_path / "theta")
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (copy / "config.json").write_text(json.dumps(config))
    result = check(exports["eagle3"], str(copy), probe=False)
    assert verdicts(result)["RoPE"] == "mismatch" and verdicts(result)["weights"] == "ok"
    probe = read_probe(exports["eagle3"])
    right, wrong = compare(probe, target), compare(probe, load_target(TargetSection(path=str(copy))))
    assert right.worst == 0.0 and right.greedy == 1.0
    assert wrong.worst > 10 * wrong.tolerance


def test_bf16_run_of_the_trained_target_is_within_tolerance(exports, tiny_folder):
    result = check(exports["eagle3"], TargetSection(path=str(tiny_folder), dtype="bfloat16"))
    assert verdicts(result)["probe"] == "ok", result.rows


def test_longer_service_than_training_is_a_warning(tiny_folder, tmp_path):
    identity = identify_section(TargetSection(path=str(tiny_folder)))
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3", identity, max_length=128)
    result = check(checkpoint, str(tiny_folder))  # a checkpoint can be checked too
    assert verdicts(result)["trained length"] == "warn" and result.exit_code == 0


def test_a_damaged_export_is_a_mismatch_with_its_reason(exports, tiny_folder, tmp_path):
    copy = shutil.copytree(exports["eagle3"], tmp_path / "damaged")
    config = json.loads((copy / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    (copy / "config.json").write_text(json.dumps(config))
    result = check(copy, str(tiny_folder), probe=False)
    assert result.exit_code == 1
    assert "[1, 3, 4], but was trained on [2, 4, 5]" in result.rows[0].found
    (copy / "probe.safetensors").unlink()
    assert verdicts(check(copy, str(tiny_folder)))["probe"] == "mismatch"


def test_without_metadata_the_verdict_is_cannot_tell_unless_something_is_wrong(exports, tiny_folder, tmp_path):
    copy = shutil.copytree(exports["eagle3"], tmp_path / "foreign")
    (copy / "headtrain.json").unlink()
    result = check(copy, str(tiny_folder))
    assert result.verdict == "cannot tell" and result.exit_code == 2
    assert verdicts(result)["vocabulary"] == "ok"
    wrong = tiny.save(tmp_path / "wide", hidden_size=128, num_attention_heads=8)
    assert check(copy, str(wrong)).exit_code == 1


def test_wrong_inputs_are_named(exports, tiny_folder, tmp_path):
    with pytest.raises(ExportError, match="no export folder"):
        check(tmp_path / "nothing", str(tiny_folder))
    with pytest.raises(ExportError, match="not an export"):
        check(tmp_path, str(tiny_folder))
    with pytest.raises(TargetError, match="no such folder"):
        check(exports["eagle3"], str(tmp_path / "nothing"))


def test_probe_holds_what_the_target_computes(exports, tiny_folder):
    """Against transformers' own hidden states."""
    probe = read_probe(exports["eagle3"])
    states = tiny.model()(probe["ids"][None], output_hidden_states=True)
    for j, layer in enumerate(probe["layer_ids"].tolist()):
        torch.testing.assert_close(probe["layers"][:, j], states.hidden_states[layer][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(probe["final"], states.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(probe["argmax"], states.logits[0].argmax(-1))
    assert "layers" not in read_probe(exports["medusa"])  # reads the final feature alone


def test_a_file_changed_since_the_export_is_a_mismatch(tmp_path, tiny_folder):
    """A flipped byte that stays finite: shapes, names and ranges all still fit."""
    from headtrain.config import TargetSection
    from headtrain.export.core import export_head
    from headtrain.heads.catalog import build_head, parse_head
    from headtrain.heads.io import head_metadata, save_head
    from headtrain.target.load import load_target

    target = load_target(TargetSection(path=str(tiny_folder)))
    head = build_head(parse_head({"kind": "eagle3", "draft_vocab_size": 64}), target.shape, torch.arange(64) * 3)
    save_head(tmp_path / "head", head, head_metadata(head, target.identity))
    out = export_head(tmp_path / "head", "vllm", tmp_path / "out")
    assert check(out, str(tiny_folder), probe=False).exit_code == 0
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-500] ^= 1
    (out / "model.safetensors").write_bytes(data)
    result = check(out, str(tiny_folder), probe=False)
    assert result.exit_code == 1
    assert any("model.safetensors" in str(row.found) for row in result.rows if row.verdict == "mismatch")
