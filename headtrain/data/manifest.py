"""What a feature store says about itself: the manifest, the record beside each shard, the plan and its size."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..config import Url
from ..metadata import TargetIdentity
from ..types import Wants
from .quantize import ROW_BYTES, Form, bytes_per_token
from .storage import Storage, open_storage

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


class StoreError(ValueError):
    """Features that are absent, damaged, or made from something else; the message says what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Manifest(_Part):
    """What a store holds. ``shards``: row boundaries of the shards, [number of shards + 1], starting at 0.
    ``settings``: the recipe's data section, which only explains a difference in ``rows_sha256``. ``target_dtype``: what
    the target computed in, with which who adds shards must agree, and who reads them need not; None: not recorded."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: TargetIdentity
    layers: list[int]
    final: Literal["supervised", "all"]
    normed: Literal["post-norm"] = Field(description="no default: a store that does not say is refused")
    dtype: Form
    summary: bool
    rows: int
    tokens: int
    finals: int
    rows_sha256: str
    max_length: int
    shards: list[int]
    settings: dict[str, Any] = Field(default_factory=dict)
    target_dtype: str | None = None

    @property
    def hidden_size(self) -> int:
        return self.target.shape["hidden_size"]

    @property
    def template_sha256(self) -> str | None:
        return self.target.chat_template

    def bytes(self, tokens: int, finals: int, rows: int) -> int:
        """Size on disk of so many tokens, kept finals and rows."""
        share = finals / max(tokens, 1)
        each = bytes_per_token(self.hidden_size, len(self.layers), self.dtype, "supervised", share)
        return round(each * tokens) + ROW_BYTES * rows

    def holds(self, wants: Wants) -> Wants:
        """``wants`` widened to all that this store holds: what a capture into it asks of the target."""
        return replace(wants, layers=tuple(self.layers), final=self.final, summary=self.summary)

    @property
    def wants(self) -> Wants:
        """What a head that reads all of it would want."""
        return Wants(tuple(self.layers), self.final, summary=self.summary)

    def unmet(self, wants: Wants) -> list[str]:
        """What a head wants and this store does not hold, in words; it may hold more."""
        missing, lines = [layer for layer in wants.layers if layer not in self.layers], []
        if missing:
            held = f"holds {_numbers(self.layers)}" if self.layers else "holds none"
            lines.append(f"layer{'s' * (len(missing) > 1)} {_numbers(missing)} (it {held})")
        if wants.final == "all" and self.final != "all":
            lines.append("final features at every position (it holds those at supervised ones)")
        if wants.summary and not self.summary:
            lines.append("the teacher's argmax and log-sum-exp")
        return lines

    def refuse(self, place: object, wants: Wants) -> StoreError:
        """The error for a head that wants what is ``unmet``."""
        layers = sorted({*self.layers, *wants.layers})
        final = " features.final=all" if "all" in (self.final, wants.final) else ""
        return StoreError(
            f"{place} does not hold all that the head reads; it lacks {' and '.join(self.unmet(wants))}. To serve this "
            f"head and others from one store, capture once with features.extra_layers=[{_numbers(layers)}]{final} into "
            "another features.dir. Or give this head a features.dir of its own, which keeps both. Delete the stored "
            "features only where no other head needs them"
        )

    @property
    def digest(self) -> str:
        """Names this very manifest in the records of its shards."""
        unknown = {"target_dtype"} if self.target_dtype is None else None  # keeps the digests of earlier stores
        return hashlib.sha256(as_json(self.model_dump(mode="json", exclude=unknown))).hexdigest()[:16]

    def otherwise(self, place: object, plan: Manifest, by: str = "") -> StoreError:
        """The error where features are wanted that ``plan`` says, and it has ``differences`` from this one. by: who is
        at it."""
        parts = ("layers", "final", "finals", "summary")
        alike = self.model_copy(update={name: getattr(plan, name) for name in parts})
        if self.unmet(plan.wants) and not differences(alike, plan):
            return self.refuse(place, plan.wants)
        return StoreError(
            f"{place} holds features made otherwise{by} (stored / now):\n  "
            + "\n  ".join(differences(self, plan))
            + "\nSet features.dir to another folder, which keeps both; or delete this one, if nothing needs it"
        )

    @classmethod
    def read(cls, folder: str | Path | Url | Storage) -> Manifest:
        """Raises StoreError."""
        storage = folder if isinstance(folder, Storage) else open_storage(folder)
        path = storage.where(MANIFEST)
        again = f"delete {storage} and capture again, or set features.dir to another folder"
        try:
            data = json.loads(storage.read(MANIFEST))
        except FileNotFoundError:
            raise StoreError(
                f"{storage} holds no features ({MANIFEST} is missing); run `headtrain capture` first"
            ) from None
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read ({error.strerror or error}): see that this user may read it and that its disk "
                "works, or set features.dir to another folder"
            ) from None
        except ValueError as error:  # also where it is not UTF-8
            raise StoreError(f"{path} is damaged, it is not valid JSON ({error}): {again}") from None
        if not isinstance(data, dict):
            raise StoreError(f"{path} is damaged, it holds no JSON object but a {type(data).__name__}: {again}")
        found = data.get("schema_version")
        if found != SCHEMA_VERSION:
            newer = isinstance(found, int) and found > SCHEMA_VERSION
            raise StoreError(
                f"{path}: schema version {found!r}, this headtrain reads {SCHEMA_VERSION}: "
                + (f"update headtrain, which captured this with a newer one, or {again}" if newer else again)
            )
        if data.get("normed") != "post-norm":
            raise StoreError(
                f"{path}: `normed` is {data.get('normed', 'not given')!r}, expected 'post-norm': without knowing that "
                f"the target's final norm was applied once, the teacher's logits would be wrong; {again}"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise StoreError(f"{path} is damaged or of another headtrain ({wrong}): {again}") from None


def differences(stored: Manifest, wanted: Manifest) -> list[str]:
    """One line for each item that differs, old value / new value. Names and revisions of targets whose weights are
    equal do not count, nor does what the target computed in: any serves to train on."""
    lines = [line.replace(" against ", " / ") for line in stored.target.differences(wanted.target)]
    for name in Manifest.model_fields:
        old, new = getattr(stored, name), getattr(wanted, name)
        if old == new or name in ("target", "settings", "target_dtype"):
            continue
        if name == "shards":
            old, new = f"{len(old) - 1} shards", f"{len(new) - 1} shards, other boundaries"
        lines.append(f"{name}: {old} / {new}")
    if stored.rows_sha256 != wanted.rows_sha256:
        for key in sorted({*stored.settings, *wanted.settings}):
            old, new = stored.settings.get(key), wanted.settings.get(key)
            if old != new:
                lines.append(f"  (data.{key}: {old!r} / {new!r})")
    return lines


class ShardRecord(_Part):
    """The small JSON beside a shard; its presence says that the shard is whole. ``manifest``: digest of the one that it
    was captured under, so that a shard of other features never passes for one of this store."""

    manifest: str
    sha256: str
    bytes: int
    lengths: list[int] = Field(description="tokens of each row")
    finals: list[int] = Field(description="kept final features of each row")
    sources: list[str]
    routes: list[str]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def record_name(number: int) -> str:
    return f"shard-{number:05d}.json"


def shard_file(folder: Path, number: int) -> Path:
    return folder / shard_name(number)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[int]:
    """Row boundaries of shards of at most ``shard_tokens`` tokens; a longer row has a shard of its own."""
    cuts, used = [0], 0
    for row, n in enumerate(lengths):
        if used and used + n > shard_tokens:
            cuts.append(row)
            used = 0
        used += n
    return [*cuts, len(lengths)] if lengths else [0]


def row_hash(ids: Tensor, turn: Tensor) -> bytes:
    """sha256 of a row's tokens and turn marks as int32."""
    both = torch.stack([ids, turn]).to(torch.int32).contiguous()
    return hashlib.sha256(both.numpy().tobytes()).digest()


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def human(size: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB" if size < 1000 else f"{size:,.0f} TB"


def check_disk(folder: str | Path | Url, needed: int, files: int = 0) -> int:
    """Free bytes where ``folder`` lies or will lie; raises StoreError where ``needed`` bytes in ``files`` files do not
    fit. What a quota leaves is not known. Elsewhere than on a disk of this machine nothing is, and 0 returned."""
    if isinstance(folder, Url):
        return 0
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free, system = shutil.disk_usage(place).free, os.statvfs(place)
    if needed > free:
        raise StoreError(
            f"the features need {human(needed)}, {place} has {human(free)} free. Nothing was captured. "
            "Remedies: features.dtype=int8 (about half of bfloat16), features.mode=online (no disk; the target runs "
            "during training), data.limit=N (fewer rows), or features.dir=ANOTHER_DISK"
        )
    if files > system.f_favail and system.f_files:  # some file systems make inodes as they need them, and say 0
        raise StoreError(
            f"the features need {files:,} files, {place} has room for {system.f_favail:,} more (inodes). Nothing was "
            "captured. A larger features.shard_tokens makes fewer files; or set features.dir=ANOTHER_DISK"
        )
    return free
