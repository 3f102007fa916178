"""One training run, or one evaluation, in a folder at a time.

The lock is the kernel's (flock): it ends with the process that holds it, however that ends, so a stale lock is one that
can be had. The file says who holds it, for people and for machines that share a folder without sharing locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ..config import RecipeError

FILE = "train.lock"


@contextmanager
def run_lock(run: Path, console: Console, file: str = FILE, does: str = "trains") -> Iterator[None]:
    """Hold ``run`` for this process, which ``does`` something in it. The lock of a dead process on this machine is
    taken over. Raises RecipeError, naming process, machine and file, where another process holds it, or one on
    another machine left it behind."""
    run.mkdir(parents=True, exist_ok=True)
    path, me = run / file, {"pid": os.getpid(), "host": socket.gethostname(), "does": does}
    handle = _open(path, console)
    try:
        holder = _holder(handle)
        if holder.get("host", me["host"]) != me["host"]:
            raise RecipeError(_taken(path, holder, f"if that process is gone, remove {path}"))
        if holder:
            console.print(f"taking over the lock of process {holder.get('pid')}, which is gone", markup=False)
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(me | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is held: who opens it now finds another file below
    finally:
        os.close(handle)


def _open(path: Path, console: Console) -> int:
    """A locked handle of the file that is at ``path``."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise RecipeError(_taken(path, holder, "wait for it, stop it, or give another folder")) from None
        except OSError as error:  # some cluster file systems have no locks
            console.print(f"{path}: no locks on this file system ({error}); start one run in {path.parent} at a time")
        if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
        os.close(handle)  # its holder ended and removed it between our opening and locking


def _holder(handle: int) -> dict:
    try:
        value = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _taken(path: Path, holder: dict, what_to_do: str) -> str:
    who = f"process {holder.get('pid', '(unknown)')} on {holder.get('host', '(unknown)')}"
    since = f" since {holder['since']}" if "since" in holder else ""
    return f"{path.parent} is in use: {who} {holder.get('does', 'trains')} in it{since} (lock {path}); {what_to_do}"
