"""Writing a feature store: shard by shard, each whole or absent, so that a capture can be killed at any time."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..metadata import write_json
from ..shift import final_positions
from ..types import Batch, Features, Row
from .manifest import MANIFEST, Manifest, ShardRecord, StoreError, differences, row_hash, shard_file
from .quantize import LAYER_DTYPE, encode, final_dtype


class StoreWriter:
    """Writes a store shard by shard; complete shards of an interrupted capture are kept.

    The manifest is written before the first shard. Raises StoreError where the folder's manifest differs, with every
    difference (old / new), where shards lie there without a manifest, and where another process is writing.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self._begun = Path(folder), manifest, False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "capture.lock", "w")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreError(f"another process is capturing into {self.folder}; wait for it or stop it") from None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        if (self.folder / MANIFEST).is_file():
            lines = differences(Manifest.read(self.folder), self.manifest)
            if not lines or not any(self.folder.glob("shard-*.json")):  # nothing captured: nothing to protect
                return
            raise StoreError(
                f"{self.folder} holds features made otherwise (stored / now):\n  "
                + "\n  ".join(lines)
                + "\nSet features.dir to another folder, or delete this one"
            )
        if any(self.folder.glob("shard-*.json")):
            raise StoreError(f"{self.folder} holds shards without {MANIFEST}: delete them or choose another folder")

    def todo(self) -> list[int]:
        """Numbers of the shards that are not complete."""
        return [n for n in range(len(self.manifest.shards) - 1) if not self._complete(n)]

    def _complete(self, number: int) -> bool:
        path = shard_file(self.folder, number)
        try:
            record = ShardRecord.model_validate_json(path.with_suffix(".json").read_text(encoding="utf-8"))
            return path.stat().st_size == record.bytes
        except (OSError, ValueError):
            return False

    def shard(self, number: int, rows: Sequence[Row]) -> ShardWriter:
        """Start shard ``number`` over its rows (all of them: manifest.shards[number] to [number + 1])."""
        first, end = self.manifest.shards[number : number + 2]
        if len(rows) != end - first:
            raise StoreError(f"shard {number}: {len(rows)} rows, the plan says {end - first}")
        if not self._begun:  # here and not at the start, so that a capture refused for want of disk leaves no trace
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            if not (self.folder / MANIFEST).is_file() or differences(Manifest.read(self.folder), self.manifest):
                write_json(self.folder / MANIFEST, self.manifest.model_dump(mode="json"))
            self._begun = True
        return ShardWriter(shard_file(self.folder, number), self.manifest, rows)

    def close(self) -> None:
        self._lock.close()  # releases the lock

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShardWriter:
    """One shard in memory, in its stored form; ``add`` features run by run, then ``close``."""

    def __init__(self, path: Path, manifest: Manifest, rows: Sequence[Row]) -> None:
        self.path, self.manifest, self.rows = path, manifest, rows
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
        where = f"{self.path.name}, tokens {a} to {b}"
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
            raise StoreError(f"{self.path.name}: features of {self.done} of {n} tokens were given")
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
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, temporary)
        except SafetensorError as error:  # its own kind, also for a full disk
            temporary.unlink(missing_ok=True)
            raise StoreError(f"{self.path} cannot be written ({error}); complete shards are kept") from None
        # safetensors writes files that only their owner can read: make them as readable as the manifest
        temporary.chmod((self.path.parent / MANIFEST).stat().st_mode & 0o777)
        with open(temporary, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        record = ShardRecord(
            sha256=digest,
            bytes=temporary.stat().st_size,
            lengths=[len(row) for row in self.rows],
            finals=finals.tolist(),
            sources=[row.source for row in self.rows],
            routes=[row.route for row in self.rows],
        )
        os.replace(temporary, self.path)
        write_json(self.path.with_suffix(".json"), record.model_dump(mode="json"))
