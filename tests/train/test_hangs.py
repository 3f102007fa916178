"""A rank that fails, dies, hangs or never starts ends the others, which name it; and nobody waits for the dead."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import ranks
import toyhead
import yaml

from headtrain.data.manifest import StoreError
from headtrain.train import __main__ as command
from headtrain.train import checkpoint, watch
from headtrain.train import setup as preparing
from headtrain.train.backend import Backend
from headtrain.train.optim import HeadOptimizer
from headtrain.train.watch import Watch

TIMEOUT = 6.0
SETTINGS = dict(steps=6, accumulation=2, save_every=2, eval_every=3, log_every=1)


def until(what, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def run_rank(rank: int, folder: str, does: dict, timeout: float) -> None:
    """One rank of ``python -m headtrain.train`` with the toy head; ``does``: what happens to which rank."""
    out, strikes = Path(folder), does.get("rank") == rank
    watch.BEAT, watch.GRACE = 0.3, 1.0
    if strikes and does["at"] == "start":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if strikes and does["at"] == "save":
        checkpoint.save_head = full_disk
    if does.get("told") == rank:
        told_within(does["term"])
    recipe = toyhead.recipe(out / "run", **{**SETTINGS, **does.get("train", {})})

    def prepare(of, backend, console, watch):
        if "capture" in does:
            stored(of, watch, console, rank, does)
        made = toyhead.setup(of, backend, data=toyhead.rows(does.get("rows", 24)))
        good, calls = made.head.loss, []

        def loss(*args):
            calls.append(1)
            if strikes and len(calls) == 3:
                print("now", flush=True)
                if does["at"] == "raise":
                    raise KeyError("a strange row")
                if does["at"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if does["at"] == "hang":
                    time.sleep(600)
            time.sleep(does.get("pause", 0))
            return good(*args)

        made.head.loss = loss
        return made

    command.prepare_run, command.load_recipe = prepare, lambda *_: recipe
    command.main(out / "recipe.yaml", [], False, False, timeout)


def told_within(what: str) -> None:
    """This rank gets SIGTERM in the first evaluation, or while rank 0 saves the first checkpoint."""
    owner, name = (Backend, "evaluate") if what == "evaluation" else (HeadOptimizer, "state")
    good = getattr(owner, name)

    def told(*args, **kwargs):
        setattr(owner, name, good)
        signal.raise_signal(signal.SIGTERM)
        return good(*args, **kwargs)

    setattr(owner, name, told)


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def stored(recipe, watch, console, rank: int, does: dict) -> None:
    """``setup._stored`` with a capture of which only the fate is real."""

    def capture(*_, **__):
        print("capturing", flush=True)
        if does["capture"] == "full":
            raise StoreError("the disk is full")
        if does["capture"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(does["capture"])
        (recipe.output_dir / f"captured-by-{rank}").touch()

    preparing.fill_stores = capture
    preparing._stored(recipe, None, None, {}, watch, console)


def go(tmp_path: Path, does: dict, timeout: float = TIMEOUT, only: tuple[int, ...] | None = None, world: int = 2):
    return ranks.start_ranks(run_rank, world, tmp_path, str(tmp_path), does, timeout, only=only)


def said(tmp_path: Path, rank: int) -> str:
    return (tmp_path / f"rank-{rank}.log").read_text()


def test_an_exception_on_one_rank_ends_both_with_its_message(tmp_path):
    assert ranks.finish(go(tmp_path, {"rank": 1, "at": "raise"})) == [2, 1]
    assert "error: rank 1 (" in said(tmp_path, 0) and "failed: KeyError: 'a strange row'" in said(tmp_path, 0)
    assert "Traceback" not in said(tmp_path, 0) and "Traceback" in said(tmp_path, 1)


def test_an_exception_on_rank_0_ends_the_others(tmp_path):
    does = {"rank": 0, "at": "raise", "train": {"accumulation": 3}}
    assert ranks.finish(go(tmp_path, does, world=3)) == [1, 2, 2]
    for rank in (1, 2):
        assert "error: rank 0 (" in said(tmp_path, rank) and "a strange row" in said(tmp_path, rank)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_is_named(tmp_path, dead):
    """kill -9, or out of memory: no message of its own. Rank 0 takes the rendezvous with it."""
    codes = ranks.finish(go(tmp_path, {"rank": dead, "at": "kill"}))
    assert codes[dead] == -signal.SIGKILL and codes[1 - dead] == 2
    text = said(tmp_path, 1 - dead)
    assert f"error: rank {dead} (" in text and "killed" in text and "Traceback" not in text


def test_a_checkpoint_that_rank_0_cannot_write_ends_who_waits_for_it(tmp_path):
    assert ranks.finish(go(tmp_path, {"rank": 0, "at": "save"})) == [2, 2]
    assert "error: rank 0: checkpoint" in said(tmp_path, 0) and "the disk is full" in said(tmp_path, 0)
    assert "error: rank 0 (" in said(tmp_path, 1) and "the disk is full" in said(tmp_path, 1)


def test_a_rank_0_that_dies_while_the_others_start(tmp_path):
    assert ranks.finish(go(tmp_path, {"rank": 0, "at": "start"}, world=3, only=(0, 1))) == [-signal.SIGKILL, 2]
    assert "rank 0 failed: it was killed" in said(tmp_path, 1) and "Traceback" not in said(tmp_path, 1)


def test_a_rank_that_hangs_is_named_with_its_place(tmp_path):
    assert ranks.finish(go(tmp_path, {"rank": 1, "at": "hang"}, 4.0)) == [2, 2]
    assert "rank 1: step 3" in said(tmp_path, 0) and "here: step 3" in said(tmp_path, 0)


@pytest.mark.parametrize("there, message", [(0, "1 of 2 ranks (1) were not"), (1, "rank 0 of 2 did not start there")])
def test_a_rank_that_never_starts(tmp_path, there, message):
    assert ranks.finish(go(tmp_path, {}, 2.0, only=(there,))) == [2]
    assert message in " ".join(said(tmp_path, there).split())


@pytest.fixture
def mute(monkeypatch):
    """A program that has the port where ranks would meet, accepts whoever comes and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(ranks, "free_port", lambda: server.getsockname()[1])
        yield


def test_a_port_that_another_program_has(mute, tmp_path):
    assert ranks.finish(go(tmp_path, {}, 2.0), 60.0) == [2, 2]
    texts = [" ".join(said(tmp_path, rank).split()) for rank in (0, 1)]
    assert "is in use by another program" in texts[0] and "--main_process_port" in texts[0]
    assert "no rendezvous at 127.0.0.1" in texts[1] and "another program has that port" in texts[1]


def test_sigterm_to_a_rank_that_waits_for_an_answer(mute, tmp_path):
    started = go(tmp_path, {}, 60.0, only=(1,))
    until(lambda: (tmp_path / "rank-1.log").exists())
    time.sleep(1.0)
    os.kill(started[0].pid, signal.SIGTERM)
    assert ranks.finish(started, 30.0) == [0], said(tmp_path, 1)


def test_two_runs_with_the_same_port_do_not_meet(tmp_path, monkeypatch):
    """The second one ends, the first one does not notice."""
    port = ranks.free_port()
    monkeypatch.setattr(ranks, "free_port", lambda: port)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    running, curve = go(first, {"pause": 0.2, "train": {"steps": 40}}), first / "run/metrics.jsonl"
    until(lambda: curve.exists() and curve.read_text())
    assert ranks.finish(go(second, {})) == [2, 2]
    assert "is in use by another program" in said(second, 0) and "another run has the port" in said(second, 1)
    assert ranks.finish(running) == [0, 0], said(first, 0)


@pytest.mark.parametrize("there", [("RANK",), ("RANK", "WORLD_SIZE"), ("WORLD_SIZE",), ("LOCAL_RANK",)])
def test_a_rank_that_was_told_half(tmp_path, there):
    """A launcher made by hand: nobody waits, and the error says what to set."""
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    env = {name: values[name] for name in there}
    process = ranks.start(run_rank, 1, str(tmp_path), {}, TIMEOUT, log=tmp_path / "rank-1.log", env=env)
    assert ranks.finish([process], 60.0) == [2]
    text = said(tmp_path, 1)
    missing = [n for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR") if n not in there]
    assert f"is set, and {', '.join(missing)} not" in text and "`torchrun" in text and "Traceback" not in text


def test_a_rank_that_would_wait_longer_reads_who_is_missing(tmp_path):
    assert ranks.finish(ranks.start_ranks(run_impatient, 3, tmp_path, str(tmp_path), only=(0, 1))) == [2, 2]
    assert "rank 2 failed: did not start: 1 of 3 ranks (2)" in " ".join(said(tmp_path, 1).split())


def run_impatient(rank: int, folder: str) -> None:
    run_rank(rank, folder, {}, 2.0 if rank == 0 else 60.0)


@pytest.mark.parametrize("fate, code, message", [("full", 2, "the disk is full"), ("kill", -9, "no sign of life")])
def test_a_capture_that_dies_ends_who_waits_for_it(tmp_path, fate, code, message):
    assert ranks.finish(go(tmp_path, {"capture": fate})) == [code, 2]
    assert "error: rank 0 (" in said(tmp_path, 1)
    assert message in said(tmp_path, 1) or "the rendezvous" in said(tmp_path, 1)


def test_a_long_capture_is_waited_for_and_happens_once(tmp_path):
    """Longer than an exchange may take."""
    assert ranks.finish(go(tmp_path, {"capture": 4.5}, 3.0)) == [0, 0]
    assert (tmp_path / "run/captured-by-0").exists() and not (tmp_path / "run/captured-by-1").exists()


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_to_one_rank_while_rank_0_captures(tmp_path, told):
    started = go(tmp_path, {"capture": 60.0})
    until(lambda: (tmp_path / "rank-0.log").exists() and "capturing" in said(tmp_path, 0))
    os.kill(started[told].pid, signal.SIGTERM)
    assert ranks.finish(started) == [0, 0]
    assert all("stopped at once: complete shards" in said(tmp_path, rank) for rank in (0, 1))


def test_sigterm_to_one_rank_in_training_saves_and_all_exit_with_0(tmp_path):
    does = {"pause": 0.1, "train": {"steps": 400, "save_every": 400, "eval_every": 400}}
    started, curve = go(tmp_path, does), tmp_path / "run/metrics.jsonl"
    until(lambda: curve.exists() and curve.read_text().count("\n") >= 2)
    os.kill(started[1].pid, signal.SIGTERM)
    assert ranks.finish(started) == [0, 0]
    assert "run the same command again to resume at step" in said(tmp_path, 0)
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("within", ["evaluation", "checkpoint"])
def test_sigterm_in_the_middle_of_an_evaluation_or_a_checkpoint(tmp_path, within, told):
    """What is going on is finished, and one more optimizer step at most: nothing is half done, both end with 0."""
    started = go(tmp_path, {"term": within, "told": told, "train": {"steps": 400, "save_every": 3, "keep": 9}})
    assert ranks.finish(started, 60.0) == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    run = tmp_path / "run"
    assert list(checkpoint.steps(run / "checkpoints")) in ([3], [3, 4])
    assert all(checkpoint.damage(folder) is None for folder in checkpoint.steps(run / "checkpoints").values())
    assert "to resume at step" in said(tmp_path, 0)
    assert not any("Traceback" in said(tmp_path, rank) for rank in (0, 1))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3]


def test_uneven_data(tmp_path):
    """An odd number of micro-batches to an epoch, and held-out rows that fill fewer batches than there are ranks."""
    assert ranks.finish(go(tmp_path, {"rows": 5, "train": {"accumulation": 3}}, world=3)) == [0, 0, 0]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "eval" for line in lines) == 2 and lines[-1]["step"] == 6


def test_different_recipes_on_two_ranks_are_refused(tmp_path):
    started = ranks.start_ranks(run_other_lr, 2, tmp_path, str(tmp_path))
    assert ranks.finish(started) == [2, 2]
    assert "what the run is made from: rank 0 has" in said(tmp_path, 0) and "rank 1 has" in said(tmp_path, 0)


def run_other_lr(rank: int, folder: str) -> None:
    run_rank(rank, folder, {"train": {"lr": 0.05 * (1 + rank)}}, TIMEOUT)


def test_one_process_needs_no_thread_and_restores_its_signals():
    before = signal.getsignal(signal.SIGTERM)
    with Watch(rank=0, world=1) as watch:
        assert watch.share("x", "mine") == ["mine"] and signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_recipe_files_are_read_inside_the_watch(tmp_path):
    """A node without the recipe says so to the others at once, instead of being waited for."""
    recipe = toyhead.recipe(tmp_path / "run", **SETTINGS)
    (tmp_path / "0.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert ranks.finish(ranks.start_ranks(read_own, 2, tmp_path, str(tmp_path))) == [2, 2]
    assert "no recipe at" in said(tmp_path, 0) and "error: rank 1 (" in said(tmp_path, 0)


def read_own(rank: int, folder: str) -> None:
    command.run = lambda recipe, watch, *_: watch.share("trained")
    command.main(Path(folder) / f"{rank}.yaml", [], False, False, TIMEOUT)
