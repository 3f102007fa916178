"""A feature store that is not on a disk here: s3://, gs://, hf://, memory:// and all else that fsspec knows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec

from .manifest import StoreError
from .storage import Local, no_room


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Remote(Local):
    """As ``Local``. Credentials are the provider's business (its environment variables and files); they are neither
    taken from an address nor put into messages.

    An object appears whole or not at all where it is put in one request, as object stores do. A file system that shows
    half a file is covered, too: a record is written after its shard, and half a record is none.

    cache: folder for local copies of shards that are read, of at most ``cache_bytes`` together; the ones that were not
    used for longest go. Several processes may share it.
    """

    poll = 2.0  # each look is a request or more

    def __init__(self, url: str, cache: Path, cache_bytes: float) -> None:
        super().__init__(cache)
        self._copies: dict[str, Path] = {}  # of this object's calls of ``open``
        self.url, self.cache_bytes = url.rstrip("/"), cache_bytes
        try:
            # listings are never remembered: other machines write here
            self.fs, self.root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"{self.url}: {error}") from None

    def __str__(self) -> str:
        return self.url

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> set[str]:
        try:
            return {
                PurePosixPath(entry["name"]).name
                for entry in self.fs.ls(self.root, detail=True, refresh=True)
                if entry["type"] == "file"
            }
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self._path(name))

    def size(self, name: str) -> int:
        return self.fs.info(self._path(name), refresh=True)["size"]

    def write(self, name: str, data: bytes, sync: bool = True) -> None:
        self.fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return self.read(name) == data  # where the store cannot create exclusively, the last one has it

    def delete(self, name: str) -> None:
        try:
            self.fs.rm_file(self._path(name))
        except (FileNotFoundError, KeyError):
            return

    def staging(self, name: str) -> Path:
        return super().staging(f"{_key(self.url)}-{name}")

    def publish(self, path: Path, name: str) -> None:
        try:
            self.fs.put_file(str(path), self._path(name))
        finally:
            path.unlink()

    def open(self, name: str) -> BinaryIO:
        """Download it unless it is in the cache. A cached copy is told from one that was captured again by its name,
        which holds the record's checksum. Other processes make room at any moment: so a new copy
        is opened before they see it, and stays readable."""
        record = self.read(f"{PurePosixPath(name).stem}.json")
        path = self._copies[name] = self.folder / f"{_key(self.url)}-{_key(record.decode())}-{name}"
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return open(path, "rb")
        self._make_room(self.size(name))
        temporary = path.with_name(f"{path.name}.{self.tag}.tmp")
        try:
            self.fs.get_file(self._path(name), str(temporary))
            file = open(temporary, "rb")  # noqa: SIM115, the caller's
            os.replace(temporary, path)
            return file
        except OSError as error:
            if (why := no_room(error)) is None:
                raise
            raise StoreError(
                f"{self.folder}, where copies of {self.url} lie: {why}; a smaller features.cache_gb needs less"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)

    def holds(self, name: str) -> bool:
        return name in self._copies and self._copies[name].exists()

    def discard(self, name: str) -> None:
        if name in self._copies:
            self._copies.pop(name).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """A file that some process has mapped stays readable for it; its room is free when it is unmapped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if size > self.cache_bytes:
            raise StoreError(
                f"{self.url}: a shard of {size:,} bytes does not fit into features.cache_gb ({self.cache_bytes:,.0f} "
                "bytes)"
            )
        kept = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process's doing
                of = path.stat()
                if path.suffix == ".safetensors":
                    kept.append((of.st_mtime, of.st_size, path))
                elif time.time() - of.st_mtime > 24 * 3600:  # of a process that was killed
                    path.unlink()
        used = sum(bytes_ for _, bytes_, _ in kept)
        for _, bytes_, path in sorted(kept):
            if used + size <= self.cache_bytes:
                break
            path.unlink(missing_ok=True)
            used -= bytes_
