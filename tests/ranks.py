"""Processes forked from one that has imported everything: a rank starts in a moment, not in seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer

HERE = Path(__file__).parent
PRELOAD = [
    "headtrain.train.__main__",
    "headtrain.export.core",
    "headtrain.heads.catalog",
    "transformers.models.llama.modeling_llama",
    "deepspeed",  # where it is installed
    "tiny",
    "toyhead",
]
_context = multiprocessing.get_context("forkserver")


def start(target: Callable, *args, log: Path, env: dict[str, str] | None = None, cwd: Path | None = None):
    """A process that runs ``target(*args)``, its output in ``log``. It has ``pid``, ``kill``, ``exitcode``."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE / "train"), *([path] if path else [])])
    try:  # read when the server starts
        _context.set_forkserver_preload(PRELOAD)
        process = _context.Process(target=_run, args=(target, args, str(log), env or {}, cwd and str(cwd)), daemon=True)
        process.start()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    return process


def start_ranks(target: Callable, world: int, folder: Path, *args, only: tuple[int, ...] | None = None):
    """Ranks of a group on this machine; ``target(rank, *args)``; logs as ``folder/rank-N.log``. only: these start."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(target, r, *args, log=folder / f"rank-{r}.log", env=common | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in (range(world) if only is None else only)
    ]


def finish(processes, timeout: float = 300.0) -> list[int]:
    """Exit codes; kills what is left after ``timeout`` seconds and fails."""
    until = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    left = [p for p in processes if p.exitcode is None]
    for process in left:
        process.kill()
        process.join()
    assert not left, f"{len(left)} of {len(processes)} processes hang"
    return [p.exitcode for p in processes]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run(target: Callable, args: tuple, log: str, env: dict[str, str], cwd: str | None) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    import torch

    torch.set_num_threads(1)
    torch.set_num_threads = lambda _: None  # a run takes all cores; threads that wait for each other starve in tests
    try:
        target(*args)
    except typer.Exit as end:
        sys.exit(end.exit_code)
