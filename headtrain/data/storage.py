"""Where a feature store lies: a folder's files by name, read and written so that each is whole or absent."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..config import Url

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not become that large (a limit of the file system or of `ulimit -f`)",
}


def no_room(error: BaseException) -> str | None:
    """Why there was no room to write; None of another error. Libraries may keep of it only the system's words."""
    code = getattr(error, "errno", None)
    return next((why for number, why in FULL.items() if code == number or os.strerror(number) in str(error)), None)


@contextmanager
def _gone_on_failure(temporary: Path) -> Iterator[None]:
    """A full disk, a signal: nobody else clears the file away once this process has left."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class Local:
    """A folder on a disk, or on a file system that several nodes share. ``tag``: names this object's temporary files,
    so that two writers never meet in one."""

    poll = 0.25  # seconds between looks at what others do

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.tag = Path(folder), uuid.uuid4().hex[:12]

    def __str__(self) -> str:
        return str(self.folder)

    def where(self, name: str) -> str:
        """The file's full name, for people."""
        return str(self.folder / name)

    def names(self) -> set[str]:
        """Of all files; empty where there is no folder."""
        try:
            return {entry.name for entry in os.scandir(self.folder) if entry.is_file()}
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return (self.folder / name).read_bytes()

    def size(self, name: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        return (self.folder / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        """A file on this machine that holds it, to be memory-mapped; readable whoever deletes it meanwhile. Raises
        FileNotFoundError."""
        return open(self.folder / name, "rb")

    def holds(self, name: str) -> bool:
        """Whether the file of ``open`` is still there; a copy makes room for others."""
        return True

    def discard(self, name: str) -> None:
        """The file of ``open`` is damaged: a copy is made anew the next time."""

    def write(self, name: str, data: bytes, sync: bool = True) -> None:
        """Atomically, in place of what is there. sync: safe against a power cut, too."""
        temporary = self._staged(name, data, sync)
        with _gone_on_failure(temporary):
            os.replace(temporary, self.folder / name)

    def _staged(self, name: str, data: bytes, sync: bool) -> Path:
        temporary = self.staging(name)
        with _gone_on_failure(temporary), open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        return temporary

    def create(self, name: str, data: bytes) -> bool:
        """Atomically, unless the file is there: one of several processes gets True. Safe against a power cut, too."""
        temporary = self._staged(name, data, sync=True)
        try:
            os.link(temporary, self.folder / name)
        except FileExistsError:
            return False
        except OSError:  # a file system without links: its name is exclusive, its content follows
            return self._create(name, data)
        finally:
            temporary.unlink(missing_ok=True)  # another process has cleared it away where this one was taken for dead
        return True

    def _create(self, name: str, data: bytes) -> bool:
        try:
            with open(self.folder / name, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        """Nothing happens where it is not there."""
        (self.folder / name).unlink(missing_ok=True)

    def staging(self, name: str) -> Path:
        """A local path to write a large file at before it is published as ``name``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}.{self.tag}.tmp"

    def publish(self, path: Path, name: str) -> None:
        """Move a finished local file, atomically, to ``name``."""
        usual = self.staging(f"{name}.mode")  # safetensors writes files that only their owner can read
        usual.touch()
        path.chmod(usual.stat().st_mode & 0o777)
        usual.unlink()
        os.replace(path, self.folder / name)


Storage = Local  # or one that behaves so


def open_storage(place: str | Path | Url) -> Storage:
    """The storage of a local folder, or of an address. Raises StoreError."""
    if isinstance(place, Url):
        from .remote import Remote  # a local store needs no fsspec

        return Remote(place.address, place.cache, place.cache_bytes)
    return Local(place)
