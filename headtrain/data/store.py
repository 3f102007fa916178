"""The feature store: the target's hidden states on disk, row by row, so that training never runs the target.

    manifest.json               what the features are; written first, and what every resume is compared with
    shard-00000.safetensors     whole rows: tokens, layers, final features
    shard-00000.json            its checksum, written last: a shard without it is not complete

Tensors of a shard of n tokens, R rows, m kept finals: ``ids``, ``turn`` int32 [n]; ``cu``, ``final_cu`` int64 [R+1]
(boundaries of the rows in tokens and in finals); ``row_hash`` uint8 [R, 32]; ``layers`` [n, L, H] in the store's form
and, for int8, ``layers_scale`` float32 [n, L]; ``final_at`` int32 [m], relative to its row; ``final`` [m, H] post-norm;
and where a summary was wanted ``argmax`` int32 [m] and ``lse`` float32 [m].
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import Url
from ..shift import final_positions
from ..types import Batch, Features, Row, Wants
from .manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    StoreError,
    check_disk,
    differences,
    human,
    plan_shards,
    record_name,
    row_hash,
    shard_file,
    shard_name,
)
from .quantize import bytes_per_token, decode
from .storage import Storage, open_storage
from .store_writer import ShardWriter, StoreWriter

__all__ = [
    "FeatureStore",
    "Manifest",
    "ShardRecord",
    "ShardWriter",
    "StoreError",
    "StoreWriter",
    "bytes_per_token",
    "check_disk",
    "differences",
    "human",
    "plan_shards",
    "row_hash",
    "shard_file",
]


class FeatureStore:
    """A store, read by memory-mapping: a row costs only its own bytes.

    verify: check a shard's sha256 when it is first touched (once in this object's life; it reads the whole shard, so
    with several ranks let one do it, see ``verify_all``). rows: the rows that the data gives now; a stored row whose
    tokens differ is refused by name. wants: what the head reads, in its order, of a store that may hold more (other
    heads' layers, final features everywhere); None: all there is. plan: the manifest of the features that are meant (of
    which target, for one), as ``StoreWriter`` compares it; None: any. growing: shards may be absent until they are read
    (``rows`` is needed then). Raises StoreError. One reader thread at a time.
    """

    def __init__(
        self,
        folder: str | Path | Url | Storage,
        *,
        verify: bool = True,
        rows: Sequence[Row] | None = None,
        wants: Wants | None = None,
        plan: Manifest | None = None,
        growing: bool = False,
    ) -> None:
        self.storage = folder if isinstance(folder, Storage) else open_storage(folder)
        self.verify, self.expected, self.wants = verify, rows, wants
        self.manifest = Manifest.read(self.storage)
        if wants is not None and self.manifest.unmet(wants):
            raise self.manifest.refuse(self.storage, wants)
        if plan is not None and differences(self.manifest, plan):
            raise self.manifest.otherwise(self.storage, plan)
        self._cuts = self.manifest.shards
        self._under = self.manifest.digest
        self._open: dict[int, dict[str, Any]] = {}
        self.records: dict[int, ShardRecord] = {}
        if rows is not None and len(rows) != len(self):
            raise StoreError(f"{folder} holds {len(self)} rows, the data has {len(rows)}; capture into another folder")
        if growing:
            self.lengths = [len(row) for row in rows or ()]
        else:
            self.records = {number: self._record(number) for number in range(len(self._cuts) - 1)}
            self.lengths = [n for record in self.records.values() for n in record.lengths]

    def __len__(self) -> int:
        return self.manifest.rows

    def _record(self, number: int) -> ShardRecord:
        name = record_name(number)
        path, beside = self.storage.where(shard_name(number)), self.storage.where(name)
        rows = self._cuts[number + 1] - self._cuts[number]
        again = "run the capture again (complete shards are kept)"
        try:
            record = ShardRecord.model_validate_json(self.storage.read(name))
            name = shard_name(number)
            size = self.storage.size(name)
        except FileNotFoundError:
            raise StoreError(
                f"{self.storage}: {name} is missing (shard {number + 1} of {len(self._cuts) - 1}): the capture did not "
                f"finish, or the file was deleted; {again}"
            ) from None
        except ValueError as error:
            raise StoreError(f"{beside} is damaged ({error}); delete it and {again}") from None
        if record.manifest != self._under:
            raise StoreError(
                f"{path} was captured under another {MANIFEST} ({record.manifest}, this store's is {self._under}): two "
                f"captures of different features met here, or files were copied or changed by hand; {again}"
            )
        if size != record.bytes:
            raise StoreError(f"{path} is truncated: {size} bytes, expected {record.bytes}; {again}")
        if len(record.lengths) != rows:
            raise StoreError(f"{beside} lists {len(record.lengths)} rows, the manifest {rows}")
        return record

    def _shard(self, number: int) -> dict[str, Any]:
        """The shard's tensors: small ones in memory, wide ones as slices into the mapped file; checked once."""
        if number not in self._open:
            if number not in self.records:
                self.records[number] = self._record(number)
            where = self.storage.where(shard_name(number))
            try:
                file = self.storage.open(shard_name(number))
            except FileNotFoundError:
                raise StoreError(
                    f"{where} is gone: somebody deleted or moved it, or its record, while this store was read; run the "
                    "capture again (what is missing is captured, the rest kept)"
                ) from None
            with file:
                for other in [n for n in self._open if not self.storage.holds(shard_name(n))]:
                    del self._open[other]  # made room for this one
                self._open[number] = self._map(number, where, file)
        return self._open[number]

    def _map(self, number: int, where: str, file: BinaryIO) -> dict[str, Any]:
        """The tensors of a shard's open file, checked. It is hashed and mapped through its descriptor: both see one
        file, though another process may delete or replace it in between."""
        record = self.records[number]
        if self.verify and (found := hashlib.file_digest(file, "sha256").hexdigest()) != record.sha256:
            self.storage.discard(shard_name(number))
            raise StoreError(
                f"{where} is damaged: sha256 {found[:16]}..., its record says {record.sha256[:16]}...; delete "
                f"{record_name(number)} and run the capture again (other shards are kept)"
            )
        try:
            mapped = safe_open(f"/dev/fd/{file.fileno()}", framework="pt")
            names = set(mapped.keys())
            if missing := set(self._layout(number)) ^ names:
                raise StoreError(f"{where}: tensors missing or unknown: {', '.join(sorted(missing))}")
            tensors = {name: mapped.get_slice(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{where}: {error}; delete it and run the capture again") from None
        self._check(number, where, tensors)
        return tensors

    def _layout(self, number: int) -> dict[str, list[int]]:
        """Name -> shape of every tensor of a shard, from its record and the manifest alone."""
        record, of = self.records[number], self.manifest
        n, m, rows = sum(record.lengths), sum(record.finals), len(record.lengths)
        shapes = {"ids": [n], "turn": [n], "cu": [rows + 1], "final_cu": [rows + 1], "row_hash": [rows, 32]}
        shapes |= {"layers": [n, len(of.layers), of.hidden_size], "final": [m, of.hidden_size], "final_at": [m]}
        if of.dtype == "int8":
            shapes["layers_scale"] = [n, len(of.layers)]
        if of.summary:
            shapes |= {"argmax": [m], "lse": [m]}
        return shapes

    def _check(self, number: int, path: str, tensors: dict[str, Any]) -> None:
        """Shapes, boundaries and the hash of every row; keeps the small tensors in memory."""
        for name, shape in self._layout(number).items():
            if tensors[name].get_shape() != shape:
                raise StoreError(f"{path}: {name} has shape {tensors[name].get_shape()}, expected {shape}")
        for name in ("ids", "turn", "cu", "final_cu", "row_hash"):
            tensors[name] = tensors[name][:].clone()
        record, cu = self.records[number], tensors["cu"]
        if cu.diff().tolist() != record.lengths or tensors["final_cu"].diff().tolist() != record.finals:
            raise StoreError(f"{path}: row boundaries differ from its record; capture again")
        for local, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
            row = self._cuts[number] + local
            stored = row_hash(tensors["ids"][a:b], tensors["turn"][a:b])
            name = f"{path}: row {row} ({record.sources[local]})"
            if stored != tensors["row_hash"][local].numpy().tobytes():
                raise StoreError(f"{name}: its tokens do not match its own hash; capture again")
            if self.expected is None:
                continue
            want = self.expected[row]
            if b - a != len(want):
                raise StoreError(
                    f"{name}: {b - a} tokens stored, the data has {len(want)} ({want.source}); capture again"
                )
            if stored != row_hash(torch.tensor(want.ids), torch.tensor(want.turn)):
                raise StoreError(f"{name}: other tokens than the data's row ({want.source}); capture again")

    def verify_all(self) -> None:
        """Open and check every shard now; raises StoreError at the first damaged one."""
        for number in range(len(self._cuts) - 1):
            self._shard(number)

    def shards_of(self, indices: Sequence[int]) -> list[int]:
        """Numbers of the shards that hold these rows."""
        return sorted({self._locate(index)[0] for index in indices})

    def opened(self) -> list[int]:
        return list(self._open)

    def forget(self, number: int) -> None:
        """Unmap a shard and forget its record, as it may be deleted and captured again."""
        self._open.pop(number, None)
        self.records.pop(number, None)

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect_right(self._cuts, row) - 1
        return number, row - self._cuts[number]

    def _parts(self, row: int) -> dict[str, Tensor]:
        """The row's slices, as stored; wide ones are views into the mapped file."""
        number, local = self._locate(row)
        tensors = self._shard(number)
        a, b = tensors["cu"][local : local + 2].tolist()
        f, g = tensors["final_cu"][local : local + 2].tolist()
        by_token = ("ids", "turn", "layers", "layers_scale")
        return {
            name: tensors[name][a:b] if name in by_token else tensors[name][f:g]
            for name in (*by_token, "final", "final_at", "argmax", "lse")
            if name in tensors
        }

    def row(self, index: int) -> Row:
        """The row's tokens without its features."""
        number, local = self._locate(index)
        tensors, record = self._shard(number), self.records[number]
        a, b = tensors["cu"][local : local + 2].tolist()
        ids, turn = tensors["ids"][a:b].tolist(), tensors["turn"][a:b].tolist()
        return Row(ids, turn, record.sources[local], record.routes[local])

    def read(self, index: int) -> tuple[Row, Features]:
        """One row and its features (``final_at`` counts inside the row)."""
        return self.row(index), self.batch([index])[1]

    def batch(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        """Rows packed one after the other, as ``Batch.pack`` does, with the features that the target gives for that
        batch in the store's form (int8 comes back as float32). Everything is copied out of the mapped files."""
        parts = [self._parts(index) for index in indices]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        batch = pack(joined["ids"], joined["turn"], [len(part["ids"]) for part in parts])
        starts = batch.cu[:-1].repeat_interleave(torch.tensor([len(part["final_at"]) for part in parts]))
        argmax = joined.get("argmax")
        features = Features(
            layers=decode(joined["layers"], joined.get("layers_scale")),
            final_at=joined["final_at"].long() + starts,
            final=joined["final"],
            argmax=None if argmax is None else argmax.long(),
            lse=joined.get("lse"),
        )
        return batch, features if self.wants is None else self._wanted(batch, features, self.wants)

    def _wanted(self, batch: Batch, features: Features, wants: Wants) -> Features:
        """The part of the stored features that capturing for this head alone would have stored."""
        if list(wants.layers) != self.manifest.layers:
            features.layers = features.layers[:, [self.manifest.layers.index(layer) for layer in wants.layers]]
        if wants.final != self.manifest.final:  # all are stored, the supervised ones are wanted
            at = final_positions(batch)
            features.final_at, features.final = at, features.final[at]
            if features.argmax is not None and features.lse is not None:
                features.argmax, features.lse = features.argmax[at], features.lse[at]
        return features


def pack(ids: Tensor, turn: Tensor, lengths: Sequence[int]) -> Batch:
    """``Batch.pack`` from tensors [T] and row lengths, without a Python step for each token."""
    sizes = torch.tensor(lengths)
    cu = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    doc = torch.arange(len(sizes)).repeat_interleave(sizes)
    turn = turn.long()
    turns = torch.zeros(len(sizes), dtype=torch.int64).scatter_reduce_(0, doc, turn, "amax")
    before = turns.cumsum(0) - turns
    return Batch(
        ids=ids.long(),
        doc=doc,
        pos=torch.arange(len(doc)) - cu[doc],
        turn=torch.where(turn > 0, turn + before[doc], 0),
        cu=cu,
    )
