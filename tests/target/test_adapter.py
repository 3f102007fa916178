from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headtrain.config import LoraSection, RecipeError, TargetSection
from headtrain.metadata import write_json
from headtrain.target.adapter import CONFIG_FILE, FOLDER, WEIGHTS_FILE, Adapter, adopt, linear_layers
from headtrain.target.features import compute_features, features_in_graph
from headtrain.target.load import load_target
from headtrain.target.model import Target
from headtrain.target.shape import TargetError
from headtrain.types import Batch, Wants

IDS = torch.arange(20).unsqueeze(0) * 7 % 300
SECTION = LoraSection(r=4, alpha=6)


def adapted(folder, section=SECTION, seed=0, spread=0.3):
    target = load_target(TargetSection(path=str(folder)))
    adapter = Adapter(target, section, seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * spread)
    return target, adapter


def write(adapter, folder):
    place = folder / FOLDER
    place.mkdir(parents=True)
    save_file({n: p.detach().clone() for n, p in adapter.named().items()}, place / WEIGHTS_FILE)
    write_json(place / CONFIG_FILE, adapter.config_json())


@torch.no_grad()
def logits(target):
    return target.model(input_ids=IDS).logits[0]


def test_starts_as_the_base_and_can_be_disabled(tiny_folder):
    base = load_target(TargetSection(path=str(tiny_folder)))
    target, adapter = adapted(tiny_folder, spread=0.0)
    assert torch.equal(logits(target), logits(base))
    assert adapter.identity().acting == base.identity.weights
    target, adapter = adapted(tiny_folder)
    assert not torch.allclose(logits(target), logits(base), atol=0.1)
    with adapter.disabled():
        assert torch.equal(logits(target), logits(base))  # bit for bit
    assert not torch.allclose(logits(target), logits(base), atol=0.1)
    assert all(p.requires_grad for p in adapter.parameters()) and len(adapter.layers) == 8 * 7
    trained = {id(p) for p in target.model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in adapter.parameters()} == {id(p) for p in adapter.named().values()}
    one, same, other = (adapted(tiny_folder, seed=seed, spread=0.0)[1].named() for seed in (0, 0, 1))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not all(torch.equal(one[n], other[n]) for n in one)


def test_peft_reads_the_files(tiny_folder, tmp_path):
    target, adapter = adapted(tiny_folder)
    write(adapter, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / FOLDER).eval()
    with torch.no_grad():
        found = model(input_ids=IDS).logits[0]
    torch.testing.assert_close(found, logits(target), rtol=1e-4, atol=1e-4)  # attention in another form
    assert json.loads((tmp_path / FOLDER / CONFIG_FILE).read_text())["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip


def test_merged_and_adopted_targets_are_the_adapted_one(tiny_folder, tmp_path):
    target, adapter = adapted(tiny_folder)
    want, identity = logits(target), adapter.identity()
    assert identity.weights == adapter.base.weights != identity.acting
    adapter.merged_model().save_pretrained(tmp_path / "merged")
    tiny.tokenizer().save_pretrained(tmp_path / "merged")
    merged = load_target(TargetSection(path=str(tmp_path / "merged")))
    # x W + x A B against x (W + A B): sums in another order
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=1e-4)
    assert merged.identity.weights == identity.acting and identity.differences(merged.identity) == []
    assert list(load_file(tmp_path / "merged/model.safetensors")) == list(load_file(tiny_folder / "model.safetensors"))
    write(adapter, tmp_path)
    base = load_target(TargetSection(path=str(tiny_folder)))
    assert any("target weights" in line for line in identity.differences(base.identity))
    assert adopt(base, identity, tmp_path)
    assert torch.equal(logits(base), logits(merged)) and base.identity == identity
    assert not adopt(base, identity, tmp_path) and torch.equal(logits(base), logits(merged))  # never twice
    assert not adopt(merged, identity, tmp_path) and not adopt(base, base.identity.model_copy(), tmp_path / "no")
    _, other = adapted(tiny_folder, seed=3)
    assert any(line.startswith("target adapter:") for line in identity.differences(other.identity()))


def test_an_adapter_that_was_changed_or_is_missing_is_refused(tiny_folder, tmp_path):
    _, adapter = adapted(tiny_folder)
    identity = adapter.identity()
    base = load_target(TargetSection(path=str(tiny_folder)))
    with pytest.raises(TargetError, match="cannot be read"):
        adopt(base, identity, tmp_path)
    write(adapter, tmp_path)
    tensors = load_file(tmp_path / FOLDER / WEIGHTS_FILE)
    next(iter(tensors.values())).add_(1e-3)
    save_file(tensors, tmp_path / FOLDER / WEIGHTS_FILE)
    with pytest.raises(TargetError, match="it was changed since"):
        adopt(base, identity, tmp_path)
    with pytest.raises(ValueError, match="not the adapter of this recipe: 1 tensors"):
        adapter.load(dict(list(tensors.items())[1:]))


def test_a_half_precision_target_has_float32_masters():
    target = Target.of(tiny.model().bfloat16())
    adapter, batch = Adapter(target, SECTION, 0), Batch.pack(tiny.rows((24, 9)))
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    found = features_in_graph(target, batch, Wants(layers=(8,)))
    assert found.final.dtype == found.layers.dtype == torch.bfloat16
    found.final.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in adapter.parameters())


def test_targets_choose_layers_and_unknown_ones_are_named(tiny_folder):
    target, adapter = adapted(tiny_folder, LoraSection(r=2, targets=["self_attn.q_proj", "up_proj"]))
    assert len(adapter.layers) == 16 and adapter.config.target_modules == {"q_proj", "up_proj"}
    with pytest.raises(RecipeError, match="train.joint.lora.targets: no matrix is called qkv; there are down_proj"):
        adapted(tiny_folder, LoraSection(targets=["qkv"]))


def test_a_quantised_target_is_refused(tiny_folder):
    target = load_target(TargetSection(path=str(tiny_folder)))

    class QuantLinear(torch.nn.Module):
        def __init__(self, of):
            super().__init__()
            self.qweight = torch.nn.Parameter(of.weight.to(torch.int8), requires_grad=False)

    def quantise(but: str = "") -> None:
        for layer in target.parts.layers:
            for module in list(layer.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, torch.nn.Linear) and name != but:
                        setattr(module, name, QuantLinear(child))

    quantise(but="q_proj")
    with pytest.warns(UserWarning, match="only 8 linear layers can be adapted; 48 QuantLinear cannot"):
        assert {name.rpartition(".")[2] for name in linear_layers(target)} == {"q_proj"}
    quantise()
    with pytest.raises(
        TargetError, match=r"no layer that LoRA can adapt: .* QuantLinear .*load the target unquantised"
    ):
        Adapter(target, SECTION, 0)


@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_features_have_the_gradient_of_a_plain_model(attention):
    """Packed documents, or one at a time, against transformers' own model and hidden states, document by document."""
    target = Target.of(tiny.model(), attention=attention)
    assert target.packed == (attention == "auto")
    adapter = Adapter(target, SECTION, 0)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    rows, wants = tiny.rows((24, 9)), Wants(layers=(0, 3, 8), final="all")
    batch = Batch.pack(rows)
    found = features_in_graph(target, batch, wants)
    assert not compute_features(target, batch, wants).layers.requires_grad
    g = torch.Generator().manual_seed(3)
    weights = torch.randn(found.layers.shape, generator=g), torch.randn(found.final.shape, generator=g)
    value = (found.layers * weights[0]).sum() + (found.final * weights[1]).sum()
    value.backward()
    mine = {n: p.grad.clone() for n, p in adapter.named().items()}

    model = tiny.model()
    model.set_attn_implementation("eager")
    model = peft.get_peft_model(model, adapter.config)
    peft.set_peft_model_state_dict(model, {n: p.detach() for n, p in adapter.named().items()})
    hidden, finals, last = [], [], []
    final_norm = model.base_model.model.model.norm
    final_norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))  # the un-normed stream
    for row in rows:
        out = model(input_ids=torch.tensor([row.ids]), output_hidden_states=True)
        hidden.append(torch.stack([out.hidden_states[0][0], out.hidden_states[3][0], last[-1]], 1))
        finals.append(out.hidden_states[-1][0])
    reference = (torch.cat(hidden) * weights[0]).sum() + (torch.cat(finals) * weights[1]).sum()
    torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-3)
    reference.backward()
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert float((mine[name] - theirs[name]).norm()) <= 1e-3 * float(theirs[name].norm()) > 0, name
