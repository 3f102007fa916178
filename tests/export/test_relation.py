"""One export, and everything that its target may be to the trained one: built from tiny variants."""

from __future__ import annotations

import json
import shutil
import time

import export_cases as cases
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headtrain.config import TargetSection
from headtrain.export.check import check
from headtrain.export.core import export_head
from headtrain.export.probe import make_probe
from headtrain.export.relation import relate
from headtrain.metadata import Metadata
from headtrain.target.load import identify_section, load_target


@pytest.fixture(scope="module")
def export(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("relation")
    section = TargetSection(path=str(tiny_folder))
    checkpoint = cases.checkpoint(folder / "c", "eagle3", identify_section(section))
    probe = make_probe(load_target(section), Metadata.read(checkpoint).features.layers)
    return export_head(checkpoint, "vllm", folder / "export", probe=probe)


@pytest.fixture
def copy(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "target")


def verdicts(result):
    return {row.item: row.verdict for row in result.rows}


def weights(result):
    return next(row for row in result.rows if row.item == "weights")


def change(folder, f):
    """f(name, tensor) -> tensor, for every tensor."""
    path = folder / "model.safetensors"
    tensors = {n: f(n, t) for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def rounded(bits):
    def f(name, tensor):
        if ".layers." not in name or tensor.ndim != 2:
            return tensor
        scale = tensor.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        return (tensor / scale).round() * scale

    return f


def call_quantised(folder, how):
    """As `headtrain convert` marks a plain copy of dequantised weights."""
    record = {"name": str(folder), "revision": None, "quantization": how, "dtype": "float32"}
    (folder / "headtrain_source.json").write_text(json.dumps(record))


def test_merged_lora(export, copy):
    def merge(name, tensor):
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
            return tensor
        return tensor + 0.02 * torch.randn(tensor.shape[0], 2) @ torch.randn(2, tensor.shape[1])

    change(copy, merge)
    result = check(export, str(copy))
    assert result.kind == "derivative" and result.exit_code == 1
    row = next(r for r in result.rows if r.item == "weights")
    assert row.found.startswith(
        "differ: layer.0, layer.4, layer.7; equal: embed, final_norm; cosine of samples: embed 1"
    )
    assert verdicts(result)["probe"] == "warn" and "of its greedy tokens" in result.relation


def test_a_fine_tune_of_every_weight_is_no_stranger(export, copy):
    change(copy, lambda name, t: t + 0.05 * t.std() * torch.randn_like(t))
    result = check(export, str(copy), probe=False)
    assert result.kind == "derivative"
    assert next(r for r in result.rows if r.item == "weights").found.startswith(
        "all differ; cosine of samples: embed 1.00"
    )


def test_without_a_sample_it_says_that_it_cannot_tell(tiny_folder, tmp_path, copy):
    section = TargetSection(path=str(tiny_folder))
    bare = export_head(
        cases.checkpoint(tmp_path / "c", "medusa-one", identify_section(section)), "vllm", tmp_path / "e"
    )
    change(copy, lambda name, t: t + 0.05 * t.std() * torch.randn_like(t))
    result = check(bare, str(copy))
    assert result.kind == "unknown" and result.exit_code == 1 and "cannot be told from a fine-tune" in result.relation


def test_another_model_of_the_same_shape(export, tmp_path):
    result = check(export, str(tiny.save(tmp_path / "other", seed=3)))
    assert result.kind == "other model" and result.exit_code == 1
    assert result.relation.startswith("not the trained target: another model of the same shape. On the probe")


@pytest.mark.parametrize(("bits", "code", "weights", "probe"), [(8, 0, "warn", "warn"), (2, 1, "mismatch", "warn")])
def test_a_quantised_form_is_judged_by_the_probe(export, copy, bits, code, weights, probe):
    change(copy, rounded(bits))
    call_quantised(copy, f"int{bits}")
    result = check(export, str(copy))
    assert result.kind == "quantised form" and result.exit_code == code, result.rows
    assert result.relation.startswith(f"a quantised form of the trained target (int{bits}; trained on: not quantised)")
    found = verdicts(result)
    assert (found["weights"], found["probe"], found["quantisation"]) == (weights, probe, "warn")
    without = check(export, str(copy), probe=False)  # files alone cannot tell
    assert without.exit_code == 2 and verdicts(without)["weights"] == "unknown"


def test_the_unquantised_form_of_a_target_trained_on_quantised(tiny_folder, tmp_path, copy):
    change(copy, rounded(4))
    call_quantised(copy, "int4")
    section = TargetSection(path=str(copy))
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3", identify_section(section))
    probe = make_probe(load_target(section), Metadata.read(checkpoint).features.layers)
    out = export_head(checkpoint, "vllm", tmp_path / "out", probe=probe)
    assert check(out, str(copy), probe=False).kind == "trained target"
    result = check(out, str(tiny_folder), probe=False)
    assert result.kind == "quantised form" and result.relation.startswith("an unquantised form of the trained target")


def test_packed_weights_that_do_not_load_here_are_seen_in_the_files(export, copy):
    """GPTQ's layout: no float weight is left in the layers, and no package here reads it."""
    path, packed = copy / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            packed[stem + "qweight"] = torch.zeros(tensor.shape[1] // 8, tensor.shape[0], dtype=torch.int32)
            packed[stem + "scales"] = torch.ones(1, tensor.shape[0], dtype=torch.float16)
        else:
            packed[name] = tensor.to(torch.float16)  # as such checkpoints store the rest
    save_file(packed, path, metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
    }
    (copy / "config.json").write_text(json.dumps(config))
    result = check(export, str(copy))
    assert result.kind == "quantised form" and result.exit_code == 2, result.rows
    row = next(r for r in result.rows if r.item == "probe")
    assert row.verdict == "unknown" and "does not load" in row.found
    assert "gptq" in next(r for r in result.rows if r.item == "quantisation").found


def swap_two(data):
    vocab = data["model"]["vocab"]
    a, b = list(vocab)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def swap_merges(data):
    merges = data["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def add_token(data):
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 384, "content": "<|tool|>"})


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (swap_two, "differ: vocabulary; equal: merges, added tokens"),
        (swap_merges, "differ: merges; equal: vocabulary, added tokens"),
        (add_token, "differ: added tokens; equal: vocabulary, merges"),
    ],
)
def test_another_tokenizer_and_what_differs(export, copy, f, found):
    data = json.loads((copy / "tokenizer.json").read_text())
    f(data)
    (copy / "tokenizer.json").write_text(json.dumps(data))
    result = check(export, str(copy), probe=False)
    assert result.kind == "other tokenizer" and result.exit_code == 1
    row = next(r for r in result.rows if r.item == "tokenizer")
    assert row.found == found and row.verdict == "mismatch"
    assert result.relation.startswith("the trained target's weights with another tokenizer")
    change(copy, lambda name, t: torch.randn_like(t))
    assert "another model with another tokenizer" in check(export, str(copy), probe=False).relation


def test_records_without_parts_still_compare(export, copy):
    """Exports made before the parts were recorded."""
    old = Metadata.read(export).target
    new = old.model_copy(update={"tokenizer_parts": {}})
    assert relate(new, old, sizes=True, tokenizer=True, alike={}).kind == "trained target"
    folder = shutil.copytree(export, copy.parent / "old")
    data = json.loads((folder / "headtrain.json").read_text())
    del data["target"]["tokenizer_parts"]
    (folder / "headtrain.json").write_text(json.dumps(data))
    assert check(folder, str(copy), probe=False).exit_code == 0


@pytest.mark.slow
def test_a_70b_target_is_identified_from_its_headers_and_a_few_rows(tmp_path):
    """129 GB in 81 shards that are holes: the files claim it, the disk does not hold it."""
    hidden, wide, layers, vocab = 1024, 262144, 80, 128256
    folder = tmp_path / "large"
    folder.mkdir()
    changes = dict(hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, vocab_size=vocab, head_dim=256)
    tiny.config(**changes, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    attention = {"q": (1024, hidden), "k": (512, hidden), "v": (512, hidden), "o": (hidden, 1024)}
    layer = {f"self_attn.{n}_proj.weight": shape for n, shape in attention.items()}
    layer |= {"mlp.gate_proj.weight": (wide, hidden), "mlp.up_proj.weight": (wide, hidden)}
    layer |= {"mlp.down_proj.weight": (hidden, wide)}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shards = [{"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}]
    shards += [{f"model.layers.{i}.{n}": shape for n, shape in layer.items()} for i in range(layers)]
    mapping, total = {}, 0
    for number, shard in enumerate(shards):
        header, end = {}, 0
        for name, shape in shard.items():
            size = 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        path = folder / f"model-{number:05d}.safetensors"
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        mapping |= dict.fromkeys(shard, path.name)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    assert total > 129e9 and sum(p.stat().st_blocks * 512 for p in folder.iterdir()) < 20e6

    identity = identify_section(TargetSection(path=str(folder)))
    checkpoint = cases.checkpoint(tmp_path / "c", "medusa-shared", identity)
    start = time.perf_counter()
    assert check(checkpoint, str(folder), probe=False).kind == "trained target"
    assert time.perf_counter() - start < 30  # seconds; reading it all would take minutes
    with open(folder / "model-00080.safetensors", "r+b") as file:  # the last layer's q_proj, first row
        skip = int.from_bytes(file.read(8), "little")
        file.seek(8 + skip)
        file.write(b"\x80\x3f" * 8)
    result = check(checkpoint, str(folder), probe=False)
    assert weights(result).found.startswith("differ: layer.79;")


def without_metadata(folder, to):
    copy = shutil.copytree(folder, to)
    (copy / "headtrain.json").unlink()
    return copy


def test_a_foreign_folder_says_what_its_config_allows(tiny_folder, tmp_path):
    target = load_target(TargetSection(path=str(tiny_folder)))
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3", target.identity)
    out = export_head(checkpoint, "speculators", tmp_path / "out", weights=target.weights())
    result = check(without_metadata(out, tmp_path / "foreign"), str(tiny_folder))
    found = verdicts(result)
    assert result.exit_code == 2 and found["weights"] == found["tokenizer"] == found["chat template"] == "unknown"
    told = ("contents", "hidden size", "vocabulary", "layers read", "architecture", "target's name", "RoPE theta")
    assert {found[item] for item in told} == {"ok"}, result.rows
    shallow = tiny.save(tmp_path / "shallow", num_hidden_layers=4)
    assert check(tmp_path / "foreign", str(shallow)).exit_code == 1
    theta = tiny.save(tmp_path / "theta", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert verdicts(check(tmp_path / "foreign", str(theta)))["RoPE theta"] == "warn"


def test_a_foreign_folders_copy_of_the_embedding_is_compared(export, tiny_folder, tmp_path):
    folder = without_metadata(export, tmp_path / "foreign")
    tensors = load_file(folder / "model.safetensors")
    embedding = load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors | {"embed_tokens.weight": embedding}, folder / "model.safetensors")
    result = check(folder, str(tiny_folder))
    assert result.exit_code == 2 and result.relation.endswith("the embedding in it is this target's")
    result = check(folder, str(tiny.save(tmp_path / "other", seed=3)))
    assert result.exit_code == 2 and "is not this target's (another target, or trained" in result.relation


def test_a_form_that_is_not_known_here_is_not_called_wrong(export, tiny_folder, tmp_path):
    folder = without_metadata(export, tmp_path / "foreign")
    save_file({"diffusion.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    result = check(folder, str(tiny_folder))
    assert result.exit_code == 2 and result.rows[0].verdict == "unknown" and "no known form" in result.rows[0].found
    wide = tiny.save(tmp_path / "wide", hidden_size=128, num_attention_heads=8)
    assert check(folder, str(wide)).exit_code == 1
