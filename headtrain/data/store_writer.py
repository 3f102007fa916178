"""Writing a feature store: shard by shard, each whole or absent, so that a capture can be killed at any time."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..config import Url
from ..shift import final_positions
from ..types import Batch, Features, Row
from .manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    StoreError,
    as_json,
    differences,
    record_name,
    row_hash,
    shard_name,
)
from .quantize import LAYER_DTYPE, encode, final_dtype
from .storage import Storage, no_room, open_storage
from .workers import Workers

ROOM = (
    "make room (or use smaller files, features.shard_tokens) and run the same command again; complete shards are kept"
)
_SCRAP = re.compile(r"(shard|manifest).*\.tmp$")
_RECORD = re.compile(r"shard-\d+\.json")


class StoreWriter:
    """Writes a store shard by shard; complete shards of an interrupted capture are kept. Several processes may write
    one store, each other shards (see ``workers``).

    The manifest is made before the first shard, by one process alone, and never replaced while anything of it is there:
    two captures of different features that start at once in an empty folder are told apart by it. Raises StoreError
    where the stored manifest differs, with every difference (old / new), and where shards lie there without a manifest.
    """

    def __init__(self, place: str | Path | Url | Storage, manifest: Manifest, workers: Workers | None = None) -> None:
        self.storage = place if isinstance(place, Storage) else open_storage(place)
        self.manifest, self.workers, self._begun = manifest, workers, False
        self._under: str | None = None  # digest of the stored manifest, once it was compared
        self._checked: set[int] = set()  # shards whose record was read
        names = self.storage.names()
        if MANIFEST not in names:
            if any(_RECORD.fullmatch(name) for name in names):
                raise StoreError(f"{place} holds shards without {MANIFEST}: delete them or choose another folder")
        elif any(_RECORD.fullmatch(name) for name in names) or self._others():
            self.check_manifest()  # where nothing was captured there is nothing to protect

    def join(self, workers: Workers) -> None:
        """Write beside these. Raises StoreError where they are at other features."""
        self.workers = workers
        if self._others() and MANIFEST in self.storage.names():
            self.check_manifest()

    def _others(self) -> list[str]:
        return [w.name for w in self.workers.look() if w.id != self.workers.me.id] if self.workers else []

    def check_manifest(self) -> None:
        """Raises StoreError where the stored manifest is another one."""
        stored = Manifest.read(self.storage)
        if differences(stored, self.manifest):
            by = f", and {', '.join(others)} is at it" if (others := self._others()) else ""
            raise stored.otherwise(self.storage, self.manifest, by)
        self._under = stored.digest

    def complete(self) -> set[int]:
        """Numbers of the shards that are complete, whoever wrote them. Raises StoreError where they are of other
        features."""
        names = self.storage.names()
        there = {n for n in range(len(self.manifest.shards) - 1) if record_name(n) in names and shard_name(n) in names}
        if there and self._under is None:  # others were first, since this process looked
            self.check_manifest()
        self._checked = {n for n in there if n in self._checked or self._whole(n)}
        return set(self._checked)

    def todo(self) -> list[int]:
        """Numbers of the shards that are not complete."""
        complete = self.complete()
        return [n for n in range(len(self.manifest.shards) - 1) if n not in complete]

    def _whole(self, number: int) -> bool:
        try:
            record = ShardRecord.model_validate_json(self.storage.read(record_name(number)))
            return record.manifest == self._under and self.storage.size(shard_name(number)) == record.bytes
        except (FileNotFoundError, ValueError):
            return False

    def shard(self, number: int, rows: Sequence[Row]) -> ShardWriter:
        """Start shard ``number`` over its rows (all of them: manifest.shards[number] to [number + 1])."""
        first, end = self.manifest.shards[number : number + 2]
        if len(rows) != end - first:
            raise StoreError(f"shard {number}: {len(rows)} rows, the plan says {end - first}")
        if not self._begun:  # here and not at the start, so that a capture refused for want of disk leaves no trace
            self._begin()
        return ShardWriter(self.storage, number, self.manifest, rows, self._under)

    def _begin(self) -> None:
        working = {w.id for w in self.workers.look()} if self.workers else set()
        names = self.storage.names()  # after the look: who has left by then has left its records
        for name in names:
            if _SCRAP.match(name) and name.split(".")[-2] not in working:
                self.storage.delete(name)
        alone = len(working) <= 1 and not any(_RECORD.fullmatch(name) for name in names)
        if alone and MANIFEST in names and Manifest.read(self.storage).digest != self.manifest.digest:
            self.storage.delete(MANIFEST)  # of a capture that ended before its first shard
            names.remove(MANIFEST)
        if MANIFEST not in names and not self.storage.create(MANIFEST, as_json(self.manifest.model_dump(mode="json"))):
            time.sleep(self.storage.poll)  # the other's content may follow its name
        self.check_manifest()
        self._check_dtype()
        self._begun = True

    def _check_dtype(self) -> None:
        """Raises StoreError where the stored shards are of a target that computed in another dtype. Only for who adds
        some: a complete store serves a training whatever its target.dtype."""
        stored, own = Manifest.read(self.storage).target_dtype, self.manifest.target_dtype
        if stored != own and None not in (stored, own):
            raise StoreError(
                f"{self.storage} lacks features, and those in it are of a target that computed in {stored}; this one "
                f"computes in {own}. One store is of one dtype: set target.dtype={stored} to go on with it, or "
                "features.dir to another folder"
            )

    def remove(self, number: int) -> None:
        """Delete a shard: its record first, so that it is never taken for complete."""
        self.storage.delete(record_name(number))
        self.storage.delete(shard_name(number))


class ShardWriter:
    """One shard in memory, in its stored form; ``add`` features run by run, then ``close``. under: digest of the stored
    manifest."""

    def __init__(self, storage: Storage, number: int, manifest: Manifest, rows: Sequence[Row], under: str) -> None:
        self.storage, self.number, self.name = storage, number, shard_name(number)
        self.manifest, self.rows, self.under = manifest, rows, under
        self.batch = Batch.pack(rows)
        everything = torch.arange(len(self.batch))
        self.final_at = everything if manifest.final == "all" else final_positions(self.batch)
        n, m, layers, hidden = len(self.batch), len(self.final_at), len(manifest.layers), manifest.hidden_size
        self.layers = torch.empty(n, layers, hidden, dtype=LAYER_DTYPE[manifest.dtype])
        self.scale = torch.empty(n, layers) if manifest.dtype == "int8" else None
        self.final = torch.empty(m, hidden, dtype=final_dtype(manifest.dtype))
        self.argmax = torch.empty(m, dtype=torch.int32) if manifest.summary else None
        self.lse = torch.empty(m) if manifest.summary else None
        self.done = self.finals_done = 0

    def add(self, features: Features) -> None:
        """Features of the next tokens of the shard: any run of whole rows, packed. Raises StoreError where they do not
        belong to those rows or are not finite."""
        a, f = self.done, self.finals_done
        b, g = a + features.layers.shape[0], f + features.final.shape[0]
        where = f"{self.name}, tokens {a} to {b}"
        expected = self.final_at[(self.final_at >= a) & (self.final_at < b)] - a
        if not torch.equal(features.final_at.cpu(), expected) or g - f != len(expected):
            raise StoreError(f"{where}: final features at other positions than the rows' supervised ones")
        if features.layers.shape != (b - a, *self.layers.shape[1:]) or features.final.shape[1:] != self.final.shape[1:]:
            raise StoreError(f"{where}: layers {tuple(features.layers.shape)}, planned {tuple(self.layers.shape)}")
        for name in ("layers", "final"):
            if not bool(getattr(features, name).isfinite().all()):
                raise StoreError(f"{where} (first row {self._row_at(a).source}): non-finite {name}; try another dtype")
        values, scale = encode(features.layers, self.manifest.dtype)
        self.layers[a:b], self.final[f:g] = values, features.final
        if self.scale is not None:
            self.scale[a:b] = scale
        if self.argmax is not None and self.lse is not None:
            if features.argmax is None or features.lse is None:
                raise StoreError(f"{where}: no argmax and lse although the manifest wants a summary")
            self.argmax[f:g], self.lse[f:g] = features.argmax, features.lse
        self.done, self.finals_done = b, g

    def _row_at(self, token: int) -> Row:
        return self.rows[int(self.batch.doc[token])]

    def close(self) -> None:
        """Write the shard, then its record, each atomically. Raises StoreError where there is no room for it."""
        batch, n = self.batch, len(self.batch)
        if self.done != n:
            raise StoreError(f"{self.name}: features of {self.done} of {n} tokens were given")
        rows_of_finals = batch.doc[self.final_at]
        finals = torch.bincount(rows_of_finals, minlength=len(self.rows))
        parts = [(torch.tensor(row.ids), torch.tensor(row.turn)) for row in self.rows]
        hashes = b"".join(row_hash(*part) for part in parts)
        tensors = {
            "ids": batch.ids.to(torch.int32),
            "turn": torch.cat([turn for _, turn in parts]).to(torch.int32),
            "cu": batch.cu,
            "final_cu": torch.nn.functional.pad(finals.cumsum(0), (1, 0)),
            "row_hash": torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(-1, 32),
            "layers": self.layers,
            "layers_scale": self.scale,
            "final": self.final,
            "final_at": batch.pos[self.final_at].to(torch.int32),
            "argmax": self.argmax,
            "lse": self.lse,
        }
        temporary = self.storage.staging(self.name)
        try:
            save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, temporary)
        except SafetensorError as error:  # what it makes of a full disk, a quota or a limit of file sizes
            temporary.unlink(missing_ok=True)
            raise StoreError(
                f"{self.storage.where(self.name)} could not be written: {no_room(error) or error}; {ROOM}"
            ) from None
        with open(temporary, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        record = ShardRecord(
            manifest=self.under,
            sha256=digest,
            bytes=temporary.stat().st_size,
            lengths=[len(row) for row in self.rows],
            finals=finals.tolist(),
            sources=[row.source for row in self.rows],
            routes=[row.route for row in self.rows],
        )
        self.storage.delete(record_name(self.number))  # of a damaged shard: never beside other bytes
        self.storage.publish(temporary, self.name)
        self.storage.write(record_name(self.number), as_json(record.model_dump(mode="json")))
