from __future__ import annotations

import json
import resource
import shutil

import pytest
import toyhead

from headtrain.train import checkpoint
from headtrain.train.backend import Backend
from headtrain.train.checkpoint import CheckpointError
from headtrain.train.trainer import train


@pytest.fixture(scope="module")
def backend():
    return Backend("fp32")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, backend):
    """A run of 12 steps with checkpoints at 4, 8 and 12."""
    recipe = toyhead.recipe(tmp_path_factory.mktemp("finished"), steps=12, save_every=4, eval_every=100, keep=5)
    train(recipe, toyhead.setup(recipe, backend), backend)
    return recipe


@pytest.fixture
def run(finished, tmp_path):
    """The same, a copy for each test."""
    recipe = finished.model_copy(deep=True)
    recipe.output = str(tmp_path / "run")
    shutil.copytree(finished.output, recipe.output)
    return recipe


def folder(run, step=12):
    return run.output_dir / f"checkpoints/step-{step:06d}"


def test_another_recipe_is_refused_with_both_values(run, backend):
    other = run.model_copy(deep=True)
    other.train.lr, other.head, other.train.log_every = 0.01, {"kind": "toy", "noise": 0.5}, 7
    with pytest.raises(CheckpointError) as error:
        train(other, toyhead.setup(other, backend), backend)
    message = str(error.value)
    assert "train.lr: 0.05 in the checkpoint, 0.01 now" in message
    assert "head.noise: 0.0 in the checkpoint, 0.5 now" in message
    assert "log_every" not in message and "--fresh" in message
    data = toyhead.setup(run, backend)
    data.data_sha256 = "others"
    data.identity.weights["embed"] = "z"
    with pytest.raises(CheckpointError, match="(?s)data_sha256: 'rows-digest'.*target.weights.embed: 'a'.*'z' now"):
        train(run, data, backend)


def test_harmless_changes_resume(run, backend):
    run.train.log_every, run.train.save_every, run.train.keep = 1, 3, 1
    run.eval.k = 2
    assert train(run, toyhead.setup(run, backend), backend).step == 12


@pytest.mark.parametrize("file", ["head.safetensors", "optimizer.safetensors", "headtrain.json"])
@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
def test_damage_names_the_intact_one(run, backend, file, how):
    path = folder(run) / file
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[:-7])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"step-000012 is damaged: {file}.*step-000008 is intact"):
        train(run, toyhead.setup(run, backend), backend)
    (folder(run, 8) / file).unlink()
    with pytest.raises(CheckpointError, match="step-000004 is intact"):
        train(run, toyhead.setup(run, backend), backend)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}'])
def test_damaged_trainer_json(run, backend, text):
    (folder(run) / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match="trainer.json"):
        train(run, toyhead.setup(run, backend), backend)
    assert checkpoint.damage(folder(run)) and checkpoint.damage(folder(run, 8)) is None


def test_half_written_folder_is_removed(run, backend):
    half = run.output_dir / "checkpoints/.tmp-step-000014"
    half.mkdir()
    (half / "head.safetensors").write_bytes(b"x")
    assert train(run, toyhead.setup(run, backend), backend).step == 12
    assert not half.exists()


def test_keeps_the_newest_and_the_best(tmp_path, backend):
    recipe = toyhead.recipe(tmp_path, steps=12, save_every=1, eval_every=100, keep=2)
    setup = toyhead.setup(recipe, backend)
    train(recipe, setup, backend)
    root = tmp_path / "checkpoints"
    assert list(checkpoint.steps(root)) == [11, 12]
    progress = checkpoint.Progress(step=13, best_step=11, best_tau=2.0)
    head = toyhead.Toy(toyhead.ToyConfig())
    metadata = checkpoint.Metadata.read(root / "step-000012")
    for step in (13, 14, 15):
        progress.step = step
        checkpoint.save(root, head, metadata, {}, progress, {}, keep=2)
    assert list(checkpoint.steps(root)) == [11, 14, 15]
    assert checkpoint.find(tmp_path, "best").name == "step-000011"
    assert checkpoint.find(tmp_path, "last").name == "step-000015"
    assert checkpoint.find(tmp_path, "14").name == checkpoint.find(root / "step-000014").name == "step-000014"
    with pytest.raises(CheckpointError, match="expected best, last or one of"):
        checkpoint.find(tmp_path, "3")
    with pytest.raises(CheckpointError, match="train first"):
        checkpoint.find(tmp_path / "nowhere")


def test_a_write_that_fails_leaves_the_earlier_one(run, backend, tmp_path):
    """A real short write: the file-size limit stands in for a full disk."""
    head, metadata = toyhead.Toy(toyhead.ToyConfig()), checkpoint.Metadata.read(folder(run))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match="step-000013 could not be written.*step-000012 is intact"):
            checkpoint.save(folder(run).parent, head, metadata, {}, checkpoint.Progress(step=13), {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in folder(run).parent.iterdir() if p.is_dir()) == [
        "step-000004",
        "step-000008",
        "step-000012",
    ]
    assert checkpoint.damage(folder(run)) is None


def test_disk_full_is_said(run):
    error = OSError(28, "No space left on device")
    assert "the disk is full" in checkpoint._why_not_saved(error, folder(run, 13))
    assert "none was saved" in checkpoint._why_not_saved(error, run.output_dir / "empty/step-000001")


def test_no_pickle_anywhere(run):
    for path in folder(run).iterdir():
        assert path.suffix in (".safetensors", ".json")
    trainer = json.loads((folder(run) / "trainer.json").read_text())
    assert trainer["files"].keys() == {"head.safetensors", "headtrain.json", "optimizer.safetensors"}
