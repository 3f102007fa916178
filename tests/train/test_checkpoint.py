from __future__ import annotations

import errno
import json
import os
import resource
import shutil

import pytest
import toyhead

from headtrain.data.storage import FULL
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"format": 99}',
        b'{"format": 1, "progress": {}}',
        b'{"format": 2}',
        b"\xff\xfe{}",
        b"[" * 9999,
    ],
)
def test_an_unreadable_trainer_json_names_the_intact_one(run, backend, content):
    (folder(run) / "trainer.json").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"step-000012 is damaged: .*trainer\.json .*step-000008 is intact: remove"
    ):
        train(run, toyhead.setup(run, backend), backend)
    with pytest.raises(CheckpointError, match=r"best is not known: .*trainer\.json .*step-000008 is intact"):
        checkpoint.find(run.output_dir)
    assert checkpoint.damage(folder(run)) and checkpoint.damage(folder(run, 8)) is None
    assert checkpoint.find(run.output_dir, "last") == folder(run)


def test_any_changed_byte_of_trainer_json_is_found(run, backend):
    """Its own checksum covers it: a wrong step, count or recipe is not trained on."""
    path = folder(run) / "trainer.json"
    good = path.read_text()
    assert json.loads(good)["progress"]["step"] == 12
    for old, new in (
        ('"step": 12', '"step": 11'),
        ('"tokens": ', '"tokens": 1'),
        ('"train.lr": 0.05', '"train.lr": 0.06'),
    ):
        assert old in good
        path.write_text(good.replace(old, new, 1))
        with pytest.raises(CheckpointError, match="step-000012 is damaged: .*was changed.*step-000008 is intact"):
            train(run, toyhead.setup(run, backend), backend)


def test_a_renamed_checkpoint_is_not_resumed(run, backend):
    folder(run).rename(folder(run, 11))
    with pytest.raises(
        CheckpointError, match="step-000011 is damaged: trainer.json is of step-000012; the folder was re"
    ):
        train(run, toyhead.setup(run, backend), backend)
    kept = folder(run, 11).rename(run.output_dir / "a-good-one")
    assert checkpoint.find_sound(kept) == kept  # a copy under a name of its own is no step of a run


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_stands_in_a_new_checkpoint_s_place_is_an_error(run, backend, kind):
    """Something that this run did not write: the new head is neither dropped in silence nor put over it."""
    shutil.rmtree(folder(run))
    there = toyhead.setup(run, backend)
    good, calls = there.head.loss, []

    def loss(*args):
        if not calls:
            folder(run).mkdir() if kind == "folder" else folder(run).touch()
        calls.append(1)
        return good(*args)

    there.head.loss = loss
    with pytest.raises(CheckpointError, match="step-000012 is there already, and this run did not write it"):
        train(run, there, backend)
    folder(run).rmdir() if kind == "folder" else folder(run).unlink()
    assert train(run, toyhead.setup(run, backend), backend).step == 12 and checkpoint.damage(folder(run)) is None


def test_a_run_that_was_killed_before_it_removed_old_checkpoints(run, backend):
    run.train.keep = 1
    train(run, toyhead.setup(run, backend), backend)  # nothing is left to train
    assert list(checkpoint.steps(folder(run).parent)) == [12]


def test_an_unusual_number_is_no_checkpoint(run):
    folder(run).rename(folder(run).with_name("step-13"))
    assert list(checkpoint.steps(folder(run).parent)) == [4, 8]


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
        checkpoint.save(root, head, metadata, {}, progress, {})
        checkpoint.prune(root, 2, progress.best_step)
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
            checkpoint.save(folder(run).parent, head, metadata, {}, checkpoint.Progress(step=13), {})
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_for_a_checkpoint_is_said_whatever_the_system_calls_it(tmp_path, code):
    """Also where safetensors kept only the system's words."""
    for error in (OSError(code, os.strerror(code)), RuntimeError(f"I/O error: {os.strerror(code)} (os error {code})")):
        assert f"could not be written: {FULL[code]}." in checkpoint._why_not_saved(error, tmp_path / "step-000001")
