from __future__ import annotations

import json
import os
import shutil

import checkpoint_families as families
import pytest
import tiny
import torch
from checkpoint_families import KINDS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headtrain.commands.stitch import stitch as verb
from headtrain.config import RecipeError, TargetSection
from headtrain.export import stitch as stitching
from headtrain.export.engines import ExportError
from headtrain.export.stitch import PATCH, RECORD, places, read_patch, stitch
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata, save_head
from headtrain.target.files import tensor_files
from headtrain.target.load import identify_section, load_target
from headtrain.target.own_module import ModuleTensors
from headtrain.target.shape import TargetError
from headtrain.types import Batch

INDEX = "model.safetensors.index.json"


def contents(folder) -> dict[str, tuple]:
    """Every tensor of every safetensors file, whatever an index says: (file, name) -> (dtype, bytes)."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[path.name, name] = tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def others(folder) -> dict[str, bytes]:
    """Every other file but the record, those of inner folders too."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".safetensors" and p.name != RECORD]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def trained(section, run, step: bool = True):
    """A head that made one step from the checkpoint's own module, saved as a run's."""
    target = load_target(section if isinstance(section, TargetSection) else TargetSection(path=str(section)))
    head = build_head(parse_head({"kind": "mtp-checkpoint", "depth": 2}), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    if step:
        batch = Batch.pack(tiny.rows((24, 9, 33)))
        optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
        head.loss(batch, target.features(batch, head.wants()), target.teacher(), 2).total.backward()
        optimizer.step()
    save_head(run, head, head_metadata(head, target.identity))
    return head, target


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """A sharded bf16 checkpoint with a folder and other files beside it, and a head trained from it."""
    folder = tmp_path_factory.mktemp("mimo") / "source"
    families.save(folder, "mimo", torch.bfloat16, tiny.tokenizer(), vocab_size=384)
    (folder / "LICENSE").write_text("free\n")
    (folder / "more").mkdir()
    (folder / "more" / "notes.txt").write_text("kept\n")
    head, target = trained(folder, folder.parent / "run")
    return folder, folder.parent / "run", head.checkpoint_tensors(target.weights().module.keys())


@pytest.mark.parametrize("name", KINDS)
def test_only_the_module_changes_and_the_target_is_the_same(name, tmp_path):
    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    families.save(source, name, torch.bfloat16, tiny.tokenizer(), vocab_size=384)
    head, target = trained(source, run)
    verb(run=run, to=out, target=str(source), patch=False, force=False)
    before, after = contents(source), contents(out)
    assert list(before) == list(after)
    changed = {key for key in before if before[key] != after[key]}
    tensors = head.checkpoint_tensors(target.weights().module.keys())
    frozen = {n for n in tensors if n.endswith("e_score_correction_bias")}
    assert {n for _, n in changed} <= tensors.keys() - frozen
    unmoved = tensors.keys() - {n for _, n in changed} - frozen
    assert not [n for n in unmoved if "proj" in n and ".experts." not in n], "a matrix that was trained is as it was"
    for (_, tensor), (dtype, raw) in after.items():
        if tensor in tensors:
            assert dtype == (torch.float32 if tensor in frozen else torch.bfloat16)
            assert raw == tensors[tensor].detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes(), tensor
    assert others(source) == others(out)
    section = TargetSection(path=str(out))
    again = load_target(section)
    for identity in (again.identity, identify_section(section)):
        assert not target.identity.differences(identity)
    once_more = build_head(head.config, again.shape, None)
    once_more.init_from_target(again.weights())
    for key, value in head.state_dict().items():
        stored = value if key.endswith("e_score_correction_bias") else value.bfloat16().float()
        assert torch.equal(once_more.state_dict()[key], stored), key


def test_an_untrained_module_gives_the_same_bytes(mimo, tmp_path):
    source, _, _ = mimo
    trained(source, tmp_path / "run", step=False)
    verb(run=tmp_path / "run", to=tmp_path / "out", target=str(source), patch=False, force=False)
    for path in source.rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(source)).read_bytes() == path.read_bytes(), path


def test_a_patch_is_small_and_gives_the_same_checkpoint_when_applied(mimo, tmp_path):
    source, run, tensors = mimo
    full, patch, applied = tmp_path / "full", tmp_path / "patch", tmp_path / "applied"
    verb(run=run, to=full, target=str(source), patch=False, force=False)
    verb(run=run, to=patch, target=str(source), patch=True, force=False)
    assert sorted(p.name for p in patch.iterdir()) == sorted([PATCH, RECORD, INDEX])
    assert load_file(patch / PATCH).keys() == tensors.keys()
    verb(run=patch, to=applied, target=str(source), patch=False, force=False)
    assert contents(applied) == contents(full) and others(applied) == others(full)
    # and so does copying it over the checkpoint's folder: the index then names the new file
    shutil.copytree(source, tmp_path / "over")
    for file in (PATCH, INDEX):
        shutil.copy(patch / file, tmp_path / "over" / file)
    old, new = (json.loads((f / INDEX).read_text()) for f in (source, tmp_path / "over"))
    assert new["metadata"] == old["metadata"] and new["weight_map"].keys() == old["weight_map"].keys()
    assert {n for n in tensors if new["weight_map"][n] == PATCH} == tensors.keys()
    assert all(f == old["weight_map"][n] for n, f in new["weight_map"].items() if n not in tensors)
    over = load_target(TargetSection(path=str(tmp_path / "over"))).weights().module
    assert all(torch.equal(over[n], t.bfloat16()) for n, t in tensors.items())
    assert sorted(old["weight_map"].values())[-1] < PATCH  # loaders that read every file take the last of two


def test_a_patch_for_other_values_is_refused(mimo, tmp_path):
    source, run, _ = mimo
    verb(run=run, to=tmp_path / "patch", target=str(source), patch=True, force=False)
    verb(run=run, to=tmp_path / "tuned", target=str(source), patch=False, force=False)
    with pytest.raises(ExportError, match="not the checkpoint that the patch was made for.*mtp_layers"):
        verb(run=tmp_path / "patch", to=tmp_path / "out", target=str(tmp_path / "tuned"), patch=False, force=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ExportError, match="no patch but a whole checkpoint"):
        read_patch(tmp_path / "tuned")
    held = load_file(tmp_path / "patch" / PATCH)
    held.pop("model.mtp_layers.0.input_proj.weight")
    save_file(held, tmp_path / "patch" / PATCH)
    with pytest.raises(ExportError, match="disagree on .*input_proj"):
        read_patch(tmp_path / "patch")


def test_the_record_says_what_was_written(mimo, tmp_path):
    source, run, tensors = mimo
    verb(run=run, to=tmp_path / "out", target=str(source), patch=False, force=False)
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["form"] == "full" and record["tensors"].keys() == tensors.keys()
    assert all(t["before"] != t["after"] for t in record["tensors"].values())
    assert record["head"]["head"]["depth"] == 2


def test_one_file_without_an_index(mimo, tmp_path):
    source, run, _ = mimo
    single = tmp_path / "single"
    shutil.copytree(source, single, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    merged = {}
    for path in source.glob("*.safetensors"):
        merged |= load_file(path)
    save_file(merged, single / "model.safetensors", metadata={"format": "pt"})
    verb(run=run, to=tmp_path / "out", target=str(single), patch=False, force=False)
    verb(run=run, to=tmp_path / "patch", target=str(single), patch=True, force=False)
    assert not (tmp_path / "patch" / INDEX).exists()
    verb(run=tmp_path / "patch", to=tmp_path / "applied", target=str(single), patch=False, force=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "applied") != contents(single)


def test_types_that_torch_cannot_hold_are_kept(mimo, tmp_path):
    """Another tensor's type does not matter: here one that only its header knows."""
    source, _, tensors = mimo
    odd = tmp_path / "odd"
    shutil.copytree(source, odd)
    name = next(n for n in places(odd) if n.endswith("layers.1.mlp.up_proj.weight"))
    place = places(odd)[name]
    text = place.file.read_bytes()
    assert text.count(b'"dtype":"BF16"')
    start = text.index(b'"%s"' % name.encode())
    header = text[start : text.index(b"}", start)]
    place.file.write_bytes(text.replace(header, header.replace(b"BF16", b"U16 ").replace(b'"U16 "', b'"U16" '), 1))
    stitch(odd, tensors, tmp_path / "out")
    assert places(tmp_path / "out")[name].dtype == "U16"
    assert places(tmp_path / "out")[name].read() == places(source)[name].read()


CODE = {
    "configuration_mimo.py": """from transformers import Qwen2Config

class MiMoConfig(Qwen2Config):
    model_type = "mimo"
""",
    "modeling_mimo.py": """from transformers import Qwen2ForCausalLM
from .configuration_mimo import MiMoConfig

class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
""",
}


def test_a_checkpoint_with_its_own_code_is_read_as_the_recipe_says(mimo, tmp_path, monkeypatch):
    """The published MiMo: a model_type that transformers does not know."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source, _, _ = mimo
    coded, run = tmp_path / "coded", tmp_path / "run"
    shutil.copytree(source, coded)
    for name, text in CODE.items():
        (coded / name).write_text(text)
    config = json.loads((coded / "config.json").read_text()) | {"model_type": "mimo", "attention_bias": True}
    config["auto_map"] = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    (coded / "config.json").write_text(json.dumps(config))
    section = TargetSection(path=str(coded), trust_remote_code=True)
    head, target = trained(section, run)
    assert target.shape.model_type == "mimo" and target.shape.module["count"] == 1
    recipe = {"name": "x", "target": section.model_dump(), "data": {"train": ["x"]}, "head": {"kind": "mtp-checkpoint"}}
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    verb(run=run, to=tmp_path / "out", target=str(coded), patch=False, force=False)
    read = ModuleTensors(tensor_files(tmp_path / "out"))
    for name, tensor in head.checkpoint_tensors(read.keys()).items():
        assert torch.equal(read[name], tensor.bfloat16()), name


# -- guards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, n: {n + "x": t[n]}, "no tensor .*x"),
        (lambda t, n: {n: t[n][:-1]}, r"shape \(31, 64\), the checkpoint has \(32, 64\)"),
        (lambda t, n: {n: t[n] * float("nan")}, "non-finite"),
        (lambda t, n: {n: torch.full_like(t[n], 3.4e38)}, "non-finite values in BF16"),
    ],
    ids=["unknown", "misshapen", "nan", "overflow"],
)
def test_tensors_that_do_not_fit_write_nothing(mimo, tmp_path, change, words):
    source, _, tensors = mimo
    with pytest.raises(ExportError, match=words):
        stitch(source, change(tensors, "model.mtp_layers.0.input_proj.weight"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_integers_are_not_written_over(mimo, tmp_path):
    source, _, tensors = mimo
    shutil.copytree(source, tmp_path / "quantised")
    name, path = "model.mtp_layers.0.input_proj.weight", places(source)["model.mtp_layers.0.input_proj.weight"].file
    held = load_file(path)
    save_file(held | {name: held[name].to(torch.int8)}, tmp_path / "quantised" / path.name)
    with pytest.raises(ExportError, match="input_proj.weight is stored as I8, expected F64, F32, F16, BF16"):
        stitch(tmp_path / "quantised", tensors, tmp_path / "out")


def test_an_existing_folder_is_replaced_by_force_only_and_only_an_own_one(mimo, tmp_path):
    source, _, tensors = mimo
    out = tmp_path / "out"
    stitch(source, tensors, out)
    (out / "stale").write_text("x")
    with pytest.raises(ExportError, match="exists: name another folder, or pass force"):
        stitch(source, tensors, out)
    assert (out / "stale").exists()
    stitch(source, tensors, out, force=True)
    assert not (out / "stale").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / RECORD).unlink()
    with pytest.raises(ExportError, match="not made by stitching"):
        stitch(source, tensors, out, force=True)


def test_the_checkpoint_itself_is_never_written_to(mimo, tmp_path):
    source, _, tensors = mimo
    for out in (source, source / "inside", source.parent):
        with pytest.raises(ExportError, match="is, holds or lies inside the checkpoint"):
            stitch(source, tensors, out, force=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(ExportError, match="is, holds or lies inside"):
        stitch(source, tensors, link, force=True)


def test_links_of_the_hubs_cache_are_followed_and_their_files_stay(mimo, tmp_path):
    source, _, tensors = mimo
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in source.iterdir():
        (cache / path.name).symlink_to(path)
    before = contents(source)
    stitch(cache, tensors, tmp_path / "out")
    assert contents(source) == before != contents(tmp_path / "out")
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))


def index_of(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_names_of_the_index_never_leave_the_folder(mimo, tmp_path):
    source, _, tensors = mimo
    shutil.copytree(source, tmp_path / "in" / "bad")
    name = "model.mtp_layers.0.input_proj.weight"
    shutil.copy(places(source)[name].file, tmp_path / "in" / "outside.safetensors")
    before = (tmp_path / "in" / "outside.safetensors").read_bytes()
    for escape in ("../outside.safetensors", str(tmp_path / "in" / "outside.safetensors"), "config.json"):
        index_of(tmp_path / "in" / "bad", lambda m, to=escape: m.update({name: to}))
        with pytest.raises(ExportError, match="outside the folder or of another kind"):
            stitch(tmp_path / "in" / "bad", tensors, tmp_path / "out")
    assert (tmp_path / "in" / "outside.safetensors").read_bytes() == before and not (tmp_path / "out").exists()


def test_an_index_that_lies_and_files_cut_off_are_seen(mimo, tmp_path):
    source, _, tensors = mimo
    shutil.copytree(source, tmp_path / "bad")
    first = sorted(p.name for p in source.glob("*.safetensors"))[0]
    index_of(tmp_path / "bad", lambda m: m.update({"model.mtp_layers.0.input_proj.weight": first}))
    with pytest.raises(ExportError, match="names tensors that its files do not hold: model.mtp_layers.0.input_proj"):
        stitch(tmp_path / "bad", tensors, tmp_path / "out")
    (tmp_path / "bad" / first).unlink()
    with pytest.raises(TargetError, match="files that are not there"):
        stitch(tmp_path / "bad", tensors, tmp_path / "out")
    shutil.copytree(source, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / first, (source / first).stat().st_size - 1)
    with pytest.raises(ExportError, match="beyond the end of the file"):
        stitch(tmp_path / "cut", tensors, tmp_path / "out")
    (tmp_path / "cut" / first).write_bytes(b"\xff" * 64)
    with pytest.raises(ExportError, match="not a safetensors file"):
        stitch(tmp_path / "cut", tensors, tmp_path / "out")


def test_a_full_disk_is_seen_before_anything_is_copied(mimo, tmp_path, monkeypatch):
    source, _, tensors = mimo
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(stitching.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ExportError, match="needs .* free: write a patch"):
        stitch(source, tensors, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_write_that_is_interrupted_leaves_no_folder(mimo, tmp_path, monkeypatch):
    source, _, tensors = mimo
    monkeypatch.setattr(stitching, "_overwrite", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stitch(source, tensors, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(stitching, "_overwrite", lambda *a: None)  # a write that is lost
    with pytest.raises(ExportError, match="not what was read back"):
        stitch(source, tensors, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_folders_beside_it_are_the_users_own(mimo, tmp_path):
    """The checkpoint itself may be called so."""
    source, _, tensors = mimo
    stitch(source, tensors, tmp_path / "out")
    for end in ("old", "tmp"):
        shutil.copytree(source, tmp_path / f"out.{end}")
    stitch(tmp_path / "out.old", tensors, tmp_path / "out", force=True)
    for end in ("old", "tmp"):
        assert contents(tmp_path / f"out.{end}") == contents(source)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out.old", "out.tmp"}


def test_the_verb_refuses_another_target_and_another_kind_of_head(mimo, tmp_path, tiny_folder):
    source, run, _ = mimo
    other = tmp_path / "other"
    shutil.copytree(source, other)
    shard = next(p for p in sorted(other.glob("*.safetensors")) if "model.embed_tokens.weight" in load_file(p))
    held = load_file(shard)
    save_file(held | {"model.embed_tokens.weight": held["model.embed_tokens.weight"] + 1}, shard)
    with pytest.raises(RecipeError, match="trained on another target:\n.*weights.embed"):
        verb(run=run, to=tmp_path / "out", target=str(other), patch=False, force=False)
    target = load_target(TargetSection(path=str(tiny_folder)))
    head = build_head(parse_head({"kind": "medusa", "num_heads": 1}), target.shape, None)
    save_head(tmp_path / "medusa", head, head_metadata(head, target.identity))
    with pytest.raises(ExportError, match="'medusa' is no part of its target's checkpoint: export it"):
        verb(run=tmp_path / "medusa", to=tmp_path / "out", target=str(tiny_folder), patch=False, force=False)
    with pytest.raises(ExportError, match="lacks the MTP module"):
        verb(run=run, to=tmp_path / "out", target=str(tiny_folder), patch=False, force=False)
    assert not (tmp_path / "out").exists()
