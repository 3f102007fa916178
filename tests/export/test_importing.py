"""Folders in the layouts that others publish, written here from FORMATS.md's facts, become heads that draft alike."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import export_cases as cases
import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from headtrain import vocab
from headtrain.cli import app
from headtrain.config import RecipeError
from headtrain.export.core import export_head
from headtrain.export.engines import ExportError
from headtrain.export.folder import verify_folder
from headtrain.export.importing import import_head, read_source
from headtrain.heads.io import load_head
from headtrain.metadata import Metadata

WEIGHTS = cases.weights()
IDENTITY = cases.identity()
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 384,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
}
EAGLE3 = SIZES | {"draft_vocab_size": 48}
IDS = "eagle_aux_hidden_state_layer_ids"


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t.detach().clone().contiguous() for n, t in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def eagle3_tensors(head, **more) -> dict:
    """As EAGLE-3's own repository names them."""
    t2d = torch.zeros(384, dtype=torch.bool)
    t2d[head.draft_ids] = True
    return {**head.state_dict(), "d2t": vocab.offsets(head.draft_ids), "t2d": t2d, **more}


def layers0(tensors: dict) -> dict:
    return {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


@torch.no_grad()
def drafts(head, depth: int = 3) -> torch.Tensor:
    """A greedy chain on made-up features."""
    head.eval()
    head.attach(WEIGHTS)
    g = torch.Generator().manual_seed(3)
    n, layers = 9, len(head.wants().layers)
    session = head.session(max_length=n + depth)
    features = torch.randn(n, layers, 64, generator=g), torch.randn(n, 64, generator=g)
    rows = [session.extend(torch.randint(384, (n,), generator=g), *features)]
    for node in range(min(depth, head.max_depth or depth) - 1):
        best = rows[-1].argmax(-1, keepdim=True)
        token = best if head.draft_ids is None else head.draft_ids[best]
        rows.append(session.expand(torch.tensor([node - 1]), token)[0])
    return torch.stack(rows)


def imported(folder: Path, out: Path, weights=None, settings=None):
    import_head(read_source(folder, settings), IDENTITY, out, weights)
    head, metadata = load_head(out)
    assert metadata.training is None and metadata.export is None and metadata.target == IDENTITY
    return head, metadata.imported, metadata


LAYOUTS = {
    # layout -> (config, tensors of a head, file, what the record calls it)
    "EAGLE-3": (EAGLE3, eagle3_tensors, "pytorch_model.bin", "EAGLE-3"),
    "SpecForge": (
        EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4]}},
        eagle3_tensors,
        "model.safetensors",
        "SpecForge or ModelOpt",
    ),
    "ModelOpt": (
        EAGLE3
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "eagle_config": {
                IDS: [1, 3, 4],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        },
        lambda head: layers0({n: t for n, t in eagle3_tensors(head).items() if n != "t2d"}),
        "model.safetensors",
        "SpecForge or ModelOpt",
    ),
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": 48,
            "target_hidden_size": 64,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "tie_word_embeddings": False,
            IDS: [2, 4, 5],
            "transformer_layer_config": {
                k: v for k, v in SIZES.items() if k not in ("architectures", "tie_word_embeddings")
            }
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        },
        lambda head: layers0(eagle3_tensors(head, **{"embed_tokens.weight": WEIGHTS.embed})),
        "model.safetensors",
        "speculators",
    ),
    "vLLM": (
        EAGLE3 | {IDS: [2, 4, 5], "rope_theta": 10000.0},
        lambda head: layers0({n: t for n, t in eagle3_tensors(head).items() if n != "t2d"}),
        "model.safetensors",
        "vLLM",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle3_layouts(layout, tmp_path):
    config, tensors, file, name = LAYOUTS[layout]
    trained = cases.head("eagle3")
    folder = write(tmp_path / "published", config, tensors(trained), file)
    head, record, metadata = imported(folder, tmp_path / "out", WEIGHTS)
    assert record.layout == name and head.wants().layers == (2, 4, 5)
    assert sorted(record.files) == sorted(["config.json", file])
    assert metadata.head.depth is None and metadata.draft_vocab.size == 48
    assert torch.equal(drafts(head), drafts(trained))


@pytest.mark.parametrize("name", ["eagle1", "eagle1-bias"])
def test_eagle1_layout(name, tmp_path):
    """EAGLE's, which is HASS's, too: a pickle with a copy of the target's embedding in half precision."""
    trained = cases.head(name)
    tensors = {**trained.state_dict(), "embed_tokens.weight": WEIGHTS.embed.half()}
    folder = write(tmp_path / "e", SIZES, tensors, "pytorch_model.bin")
    source = read_source(folder)
    assert source.needs_weights == ["embed_tokens.weight"]
    with pytest.raises(ExportError, match="whose weights are needed"):
        import_head(source, IDENTITY, tmp_path / "out")
    head, record, _ = imported(folder, tmp_path / "out", WEIGHTS)
    assert record.layout == "EAGLE" and (head.fc.bias is not None) == (name == "eagle1-bias")
    assert torch.equal(drafts(head), drafts(trained))
    other = cases.weights()
    other.embed = other.embed.clone()
    other.embed[7, 3] += 1
    with pytest.raises(ExportError, match="1 of 384 rows are not the target's"):
        import_head(source, IDENTITY, tmp_path / "out2", other)


def test_a_bias_of_zero_is_none(tmp_path):
    """What SGLang wants for a head without; vLLM, which has no bias, can then serve it."""
    tensors = {**cases.head("eagle1").state_dict(), "fc.bias": torch.zeros(64)}
    head, record, _ = imported(write(tmp_path / "e", SIZES, tensors), tmp_path / "out")
    assert head.fc.bias is None and any("fc.bias is zero" in note for note in record.notes)
    assert export_head(tmp_path / "out", "vllm", tmp_path / "vllm")


class ResBlock(nn.Module):
    """The reference's block."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


def reference_medusa(heads: int, layers: int, own: bool = True) -> nn.ModuleList:
    """CASES 27: `[ResBlock(H)] * n` is one block applied n times."""
    torch.manual_seed(4)
    linear = [nn.Linear(64, 384, bias=False)] if own else []
    return nn.ModuleList(nn.Sequential(*([ResBlock(64)] * layers), *linear) for _ in range(heads))


@pytest.mark.parametrize("duplicates", [True, False])
def test_medusa_layers_that_share_one_block(tmp_path, duplicates):
    reference = reference_medusa(3, 2)
    tensors = reference.state_dict()
    if not duplicates:  # as safetensors' save_model leaves shared tensors out
        tensors = {n: t for n, t in tensors.items() if ".1.linear." not in n}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna"}
    file = "medusa_lm_head.pt" if duplicates else "medusa_lm_head.safetensors"
    head, record, metadata = imported(write(tmp_path / "m", config, tensors, file), tmp_path / "out")
    assert record.layout == "Medusa" and metadata.head.depth == 3 and head.config.num_layers == 2
    assert "3 of 3 heads apply one block 2 times" in record.notes[-1]
    final = torch.randn(5, 64)
    session = head.session(8)
    mine = [session.extend(torch.zeros(5, dtype=torch.long), torch.zeros(5, 0, 64), final)]
    mine += [session.expand(torch.tensor([node - 1]), torch.tensor([0]))[0] for node in range(2)]
    for k, logits in enumerate(mine):
        torch.testing.assert_close(logits, reference[k](final[-1]))  # the same products in another grouping
    again = export_head(tmp_path / "out", "hf", tmp_path / "hf")  # one block still says it all
    stored = torch.load(again / "medusa_lm_head.pt", weights_only=True)
    assert all(torch.equal(stored[n], t) for n, t in reference.state_dict().items())


def test_medusa_layers_that_differ_are_kept_and_noted(tmp_path):
    trained = cases.head("medusa")
    tensors = {}
    for i in range(3):
        for j in range(2):
            tensors[f"{i}.{j}.linear.weight"] = trained.blocks[i].layers[j].weight
            tensors[f"{i}.{j}.linear.bias"] = trained.blocks[i].layers[j].bias
        tensors[f"{i}.2.weight"] = trained.lm_heads[i].weight
    folder = write(tmp_path / "m", {"medusa_num_heads": 3, "medusa_num_layers": 2}, tensors, "medusa_lm_head.pt")
    head, record, _ = imported(folder, tmp_path / "out")
    assert torch.equal(drafts(head), drafts(trained)) and "not trained by the reference's code" in record.notes[0]


def test_medusa_with_the_targets_lm_head(tmp_path):
    reference = reference_medusa(2, 1, own=False)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    folder = write(tmp_path / "m", config, reference.state_dict(), "medusa_lm_head.pt")
    head, _, _ = imported(folder, tmp_path / "out")
    assert not head.config.own_lm_head
    # vLLM's form carries the target's lm_head
    out = export_head(tmp_path / "out", "vllm", tmp_path / "vllm", weights=WEIGHTS)
    (out / "headtrain.json").unlink()
    source = read_source(out)
    assert source.needs_weights == ["lm_head.weight"]
    again, _, _ = imported(out, tmp_path / "again", WEIGHTS)
    assert torch.equal(drafts(again), drafts(head))


def test_a_wrong_number_of_heads_can_be_put_right_by_hand(tmp_path):
    """Published configs name 2 heads of 5."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    folder = write(tmp_path / "m", config, reference_medusa(3, 1).state_dict(), "medusa_lm_head.pt")
    with pytest.raises(ExportError, match=r"says 2 heads, the tensors have 3.*--set medusa_num_heads=3"):
        import_head(read_source(folder), IDENTITY, tmp_path / "out")
    head, record, _ = imported(folder, tmp_path / "out", settings={"medusa_num_heads": 3})
    assert head.max_depth == 3 and record.notes[0] == "medusa_num_heads = 3 was given by hand"


# -- round trips ---------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", cases.HEADS)
def test_round_trips_are_byte_identical(name, tmp_path):
    """With its record, every byte; without, what the engine reads."""
    checkpoint = cases.checkpoint(tmp_path / "c", name)
    trained, _ = load_head(checkpoint)
    for engine in cases.ENGINES_OF[name]:
        first = export_head(checkpoint, engine, tmp_path / engine, weights=WEIGHTS)
        written = contents(first)
        verified = verify_folder(first)
        assert (verified.kind, verified.dialect) == (trained.config.kind, engine)
        assert verified.head.wants().layers == trained.wants().layers
        mine, theirs = trained.state_dict(), verified.head.state_dict()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine), engine
        import_head(read_source(first), IDENTITY, tmp_path / f"{engine}-own")
        assert Metadata.read(tmp_path / f"{engine}-own") == Metadata.read(checkpoint)
        again = export_head(tmp_path / f"{engine}-own", engine, tmp_path / f"{engine}-again", weights=WEIGHTS)
        assert contents(again) == written, engine
        if engine == "headtrain":
            continue
        (first / "headtrain.json").unlink()
        imported(first, tmp_path / f"{engine}-foreign", WEIGHTS)
        foreign = export_head(tmp_path / f"{engine}-foreign", engine, tmp_path / f"{engine}-third", weights=WEIGHTS)
        assert {n: b for n, b in contents(foreign).items() if n not in ("headtrain.json", "README.md")} == {
            n: b for n, b in written.items() if n not in ("headtrain.json", "README.md")
        }, engine
        assert "Imported from another tool" in (foreign / "README.md").read_text()
        assert "not known" in (foreign / "README.md").read_text()


# -- strictness ----------------------------------------------------------------------------------------------------


def broken(tmp_path, config=None, tensors=None, layout="vLLM"):
    base, made, file, _ = LAYOUTS[layout]
    base, values = json.loads(json.dumps(base)), made(cases.head("eagle3"))
    if config:
        config(base)
    if tensors:
        tensors(values)
    return write(tmp_path / "broken", base, values, file)


@pytest.mark.parametrize(
    ("config", "tensors", "layout", "message"),
    [
        (None, lambda t: t.pop("fc.weight"), "vLLM", "no known layout"),
        (None, lambda t: t.pop("norm.weight"), "vLLM", "missing norm.weight"),
        (None, lambda t: t.update(x=torch.ones(2)), "vLLM", "unknown x"),
        (
            None,
            lambda t: t.update({"layers.0.q_norm.weight": torch.ones(16)}),
            "speculators",
            "unknown .*q_norm",
        ),
        (None, lambda t: t.update({"fc.bias": torch.ones(64)}), "vLLM", "unknown fc.bias"),
        (None, lambda t: t.update(d2t=t["d2t"] + torch.arange(48)), "vLLM", "draft vocabulary"),
        (None, lambda t: t.update(t2d=t["t2d"].roll(1)), "SpecForge", "different draft vocabularies"),
        (None, lambda t: t["norm.weight"].fill_(float("nan")), "vLLM", "non-finite values in norm.weight"),
        (lambda c: c.update(hidden_size=128), None, "vLLM", "hidden_size is 128, the target's 64"),
        (lambda c: c.update(vocab_size=512), None, "vLLM", "vocab_size is 512, the target's 384"),
        (lambda c: c.update(target_hidden_size=96), None, "vLLM", "target_hidden_size is 96"),
        (lambda c: c.pop("intermediate_size"), None, "vLLM", "gives no intermediate_size"),
        (lambda c: c.update(num_hidden_layers=2), None, "vLLM", "num_hidden_layers 2"),
        (lambda c: c.update(tie_word_embeddings=True), None, "vLLM", "tie_word_embeddings"),
        (lambda c: c.update(quantization_config={"a": 1}), None, "vLLM", "quantised heads"),
        (lambda c: c.update(rope_parameters={"rope_theta": 5e5}), None, "vLLM", "disagree"),
        (lambda c: c.pop("norm_before_residual"), None, "speculators", "--set norm_before_residual"),
        (lambda c: c.pop(IDS), None, "speculators", f"--set {IDS}"),
        (lambda c: c.update(speculators_model_type="dflash"), None, "speculators", "'dflash'"),
        (lambda c: c["eagle_config"].update(use_mtp_layernorm=True), None, "ModelOpt", "another form"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), None, "ModelOpt", "another form"),
        (lambda c: c.update(eagle_config={IDS: [5, 6, 7]}), None, "vLLM", "contradict"),
        (lambda c: c.update({IDS: [2, 4, 9]}), None, "vLLM", "outside the target's"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config, tensors, layout, message, tmp_path):
    folder = broken(tmp_path, config, tensors, layout)
    with pytest.raises(ExportError, match=message):
        import_head(read_source(folder), IDENTITY, tmp_path / "out", WEIGHTS)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()


def test_a_missing_switch_is_given_by_hand_and_recorded(tmp_path):
    folder = broken(tmp_path, lambda c: c.pop("norm_before_residual"), layout="speculators")
    head, record, _ = imported(folder, tmp_path / "out", WEIGHTS, {"norm_before_residual": True})
    assert head.config.norm_before_residual and record.notes[0] == "norm_before_residual = True was given by hand"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/headtrain-evil",)


def test_a_pickle_that_runs_code_is_not_read(tmp_path):
    folder = write(tmp_path / "e", SIZES, {"fc.weight": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    for value in (Evil(), {"fc.weight": Evil()}):
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(value, protocol=2))
        with pytest.raises(ExportError, match="no plain pickle of tensors"):
            read_source(folder)
    assert not Path("/tmp/headtrain-evil").exists()
    torch.save({"fc.weight": [1, 2]}, folder / "pytorch_model.bin")
    with pytest.raises(ExportError, match="from names to tensors"):
        read_source(folder)


def test_folders_that_are_no_head(tmp_path):
    with pytest.raises(ExportError, match="no folder at"):
        read_source(tmp_path / "nothing")
    with pytest.raises(ExportError, match="none of"):
        read_source(_empty(tmp_path / "empty"))
    checkpoint = cases.checkpoint(tmp_path / "c", "medusa")
    with pytest.raises(ExportError, match="nothing to import"):
        read_source(checkpoint)
    out = export_head(checkpoint, "vllm", tmp_path / "v")
    with pytest.raises(ExportError, match="settings"):
        read_source(out, {"num_heads": 1})
    with pytest.raises(ExportError, match="trained on another target"):
        import_head(read_source(out), cases.identity(weights={"embed": "x"}), tmp_path / "o")
    with pytest.raises(ExportError, match="not an empty folder"):
        import_head(read_source(out), IDENTITY, checkpoint)


def _empty(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# -- the verb ------------------------------------------------------------------------------------------------------


def test_import_export_and_check_on_a_real_target(tiny_folder, tmp_path):
    """A published folder with the target's embedding in it: imported, exported for another engine, checked."""
    model = tiny.model()
    trained = cases.head("eagle3")
    tensors = eagle3_tensors(trained, **{"embed_tokens.weight": model.model.embed_tokens.weight.half()})
    folder = write(tmp_path / "published", EAGLE3, tensors, "pytorch_model.bin")
    run, target = CliRunner(), str(tiny_folder)
    result = run.invoke(app, ["import", str(folder), "--target", target, "--out", str(tmp_path / "in")])
    assert result.exit_code == 0, result.output
    assert "from EAGLE-3's layout" in result.output and "rope_theta not given" in result.output
    result = run.invoke(
        app, ["export", str(tmp_path / "in"), "--engine", "sglang", "--target", target, "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "sglang.launch_server" in result.output
    result = run.invoke(app, ["check", str(tmp_path / "out"), "--target", target])
    assert result.exit_code == 0, result.output
    bad = run.invoke(app, ["import", str(folder), "--target", target, "--out", str(tmp_path / "x"), "--set", "oops"])
    assert isinstance(bad.exception, RecipeError)
