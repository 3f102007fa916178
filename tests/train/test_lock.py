"""Two runs in one folder: the second one stops, a dead one's lock is taken over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from headtrain.config import RecipeError
from headtrain.train.lock import FILE, run_lock

HOLD = """
import sys, time
from pathlib import Path
from rich.console import Console
from headtrain.train.lock import run_lock
with run_lock(Path(sys.argv[1]), Console(quiet=True)):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def said():
    return Console(record=True, quiet=False, file=open(os.devnull, "w"), width=200)  # noqa: SIM115


def holder(run: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_names_the_first_and_a_dead_ones_lock_is_taken_over(tmp_path, said):
    run = tmp_path / "run"
    other = holder(run)
    try:
        with pytest.raises(RecipeError) as error, run_lock(run, said):
            pass
        for part in (f"process {other.pid} on {socket.gethostname()}", str(run / FILE), "another folder"):
            assert part in str(error.value)
    finally:
        other.send_signal(signal.SIGKILL)  # no chance to clean up
        other.wait()
    assert json.loads((run / FILE).read_text())["pid"] == other.pid
    with run_lock(run, said):
        assert json.loads((run / FILE).read_text())["pid"] == os.getpid()
    assert f"taking over the lock of process {other.pid}" in said.export_text()
    assert not (run / FILE).exists()


def test_one_process_cannot_hold_it_twice_and_an_error_lets_it_go(tmp_path, said):
    with pytest.raises(KeyError), run_lock(tmp_path, said):
        with pytest.raises(RecipeError, match=f"process {os.getpid()} "), run_lock(tmp_path, said):
            pass
        assert (tmp_path / FILE).exists()  # the refused one took nothing away
        raise KeyError
    with run_lock(tmp_path, said):
        pass


def test_a_lock_of_another_machine_is_left_alone(tmp_path, said):
    text = json.dumps({"pid": 7, "host": "another-machine", "since": "yesterday"})
    (tmp_path / FILE).write_text(text)
    with (
        pytest.raises(RecipeError, match="process 7 on another-machine.*since yesterday.*remove"),
        run_lock(tmp_path, said),
    ):
        pass
    assert (tmp_path / FILE).read_text() == text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1'])
def test_a_torn_lock_file_stops_nobody(tmp_path, said, text):
    (tmp_path / FILE).write_text(text + " " * 300)
    with run_lock(tmp_path, said):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
        assert len((tmp_path / FILE).read_text()) < 300


def test_a_lock_removed_between_opening_and_locking_is_not_held(tmp_path, said, monkeypatch):
    """The other run ends and removes its file just then: a lock on a removed file would keep nobody out."""
    import fcntl

    real, taken = fcntl.flock, []

    def flock(handle, how):
        if not taken:
            (tmp_path / FILE).unlink()
        taken.append(handle)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path, said):
        monkeypatch.undo()
        assert len(taken) == 2
        with pytest.raises(RecipeError), run_lock(tmp_path, said):
            pass


def test_a_file_system_without_locks_is_said(tmp_path, said, monkeypatch):
    import fcntl

    def flock(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path, said):
        pass
    assert "no locks on this file system" in said.export_text()


def test_training_holds_the_lock_from_capture_to_the_end(tmp_path, monkeypatch):
    import yaml
    from typer.testing import CliRunner

    from headtrain.train import __main__ as command

    import typer  # isort: skip

    recipe = {"name": "x", "target": {"path": "t"}, "data": {"train": ["a"]}, "head": {"kind": "medusa"}}
    recipe |= {"train": {"precision": "fp32"}}  # accelerate keeps one for the process: auto may be another than before
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe | {"output": str(tmp_path / "run")}))
    seen = []

    def step(*_):
        seen.append((tmp_path / "run" / FILE).exists())
        if len(seen) == 2:
            raise RecipeError("the end")

    monkeypatch.setattr(command, "prepare_run", step)
    monkeypatch.setattr(command, "train", step)
    app = typer.Typer()
    app.command()(command.main)
    got = CliRunner().invoke(app, [str(tmp_path / "r.yaml")])
    assert got.exit_code == 2 and "the end" in got.output and seen == [True, True]
    with run_lock(tmp_path / "run", Console(quiet=True)):
        got = CliRunner().invoke(app, [str(tmp_path / "r.yaml")])
    assert got.exit_code == 2 and f"process {os.getpid()} on" in got.output and len(seen) == 2
