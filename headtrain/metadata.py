"""``headtrain.json``: what a head was made from, in every checkpoint and export."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .types import TargetShape

SCHEMA_VERSION = 1
FILE = "headtrain.json"


class MetadataError(ValueError):
    """A headtrain.json that is missing, unreadable, or of a schema that this version does not know."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AdapterPart(_Part):
    """A LoRA adapter that a target was trained with. sha256: of its tensors; config: rank, alpha, dropout and the
    layers it is on; weights: the fingerprint (as ``TargetIdentity.weights``) of the target with it merged."""

    sha256: str
    config: dict[str, Any]
    weights: dict[str, str]


class TargetIdentity(_Part):
    """Who the target is. ``weights``: sha256 by sampled tensor (embedding, lm_head, final norm, first, middle and
    last layer); ``tokenizer``: sha256 of vocabulary, merges and added tokens; ``chat_template``: sha256 of the text;
    ``tokenizer_parts``: the same three apart (empty in older records);
    ``adapter``: set where the target is these weights and an adapter."""

    name: str
    revision: str | None = None
    shape: dict[str, Any]
    dtype: str
    quantization: str | None = None
    weights: dict[str, str]
    tokenizer: str
    tokenizer_parts: dict[str, str] = Field(default_factory=dict)
    chat_template: str | None = None
    adapter: AdapterPart | None = None

    @property
    def acting(self) -> dict[str, str]:
        """The fingerprint of what the target computes with: the weights, the adapter merged."""
        return self.weights if self.adapter is None else self.adapter.weights

    def target_shape(self) -> TargetShape:
        return TargetShape(**self.shape)

    def differences(self, other: TargetIdentity) -> list[str]:
        """One line for each item that differs, with both values; empty when features of one fit the other."""
        lines = []
        merged = (self.adapter is None) != (other.adapter is None)  # the one's adapter may be in the other's weights
        for name in ("shape", "dtype", "quantization", "weights", "tokenizer", "chat_template"):
            if merged and name in ("dtype", "quantization"):
                continue  # of the base
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "weights":
                mine, theirs = self.acting, other.acting
            if isinstance(mine, dict):
                for key in sorted({*mine, *theirs}):
                    if mine.get(key) != theirs.get(key):
                        lines.append(f"target {name}.{key}: {mine.get(key)!r} against {theirs.get(key)!r}")
            elif mine != theirs:
                lines.append(f"target {name}: {mine!r} against {theirs!r}")
        if self.adapter and other.adapter and self.adapter.sha256 != other.adapter.sha256:
            lines.append(f"target adapter: {self.adapter.sha256!r} against {other.adapter.sha256!r}")
        return lines


class HeadPart(_Part):
    kind: str
    config: dict[str, Any]
    depth: int | None = Field(description="deepest draft that was trained; None: not known (an imported head)")


class FeaturesPart(_Part):
    """layers: indices into hidden_states (0 = embedding output), un-normed; final: always post-norm here."""

    layers: list[int]
    convention: str = "hidden_states index, 0 = embedding output, un-normed"
    final: str = "post-norm"


class DraftVocabPart(_Part):
    size: int
    sha256: str | None = Field(None, description="of the sorted ids as int64; None: the whole vocabulary")


class TrainingPart(_Part):
    recipe_sha256: str
    data_sha256: str
    tokens: int = Field(0, description="supervised tokens seen")
    steps: int = 0
    seed: int = 0
    max_length: int = Field(description="longest training row: positions beyond it are untrained")
    versions: dict[str, str] = Field(default_factory=dict)


class RouteAcceptance(_Part):
    """Measured by lossless decoding: alpha[k-1] conditional, as [accepted, offered] pairs so that sums stay exact."""

    k: int
    temperature: float
    tau: float
    alpha: list[tuple[int, int]]
    tokens: int
    prompts: int
    speedup: float | None = Field(None, description="decoding with drafts / without, as timed where it was measured")


class ImportedPart(_Part):
    """Of a head that another tool trained: nothing more is known of its training than its files say. layout: whose
    form it was in; files: their sha256; notes: what they left open, and how it was taken."""

    layout: str
    files: dict[str, str]
    notes: list[str] = Field(default_factory=list)


class ExportPart(_Part):
    """Only in exports. engine: the row of the engine table; method: what the engine calls this kind of head; probe:
    whether the target's features on a short text lie beside it, for ``headtrain check``."""

    engine: str
    dialect: str
    dtype: str
    method: str = ""
    probe: bool = False
    files: dict[str, str] = Field(default_factory=dict, description="sha256 of the files beside headtrain.json")


class Metadata(_Part):
    schema_version: int = SCHEMA_VERSION
    head: HeadPart
    target: TargetIdentity
    features: FeaturesPart
    draft_vocab: DraftVocabPart
    training: TrainingPart | None = None
    imported: ImportedPart | None = None
    acceptance: dict[str, RouteAcceptance] = Field(default_factory=dict, description="by route, and `all`")
    export: ExportPart | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.model_dump(mode="json"))

    @classmethod
    def read(cls, folder: str | Path) -> Metadata:
        path = Path(folder) / FILE
        if not path.is_file():
            raise MetadataError(f"{folder} has no {FILE}: not a head trained or exported by headtrain")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise MetadataError(f"{path} is not valid JSON: {error}") from None
        found = data.get("schema_version") if isinstance(data, dict) else None
        if found != SCHEMA_VERSION:
            raise MetadataError(f"{path}: schema version {found!r}, this headtrain reads {SCHEMA_VERSION}")
        try:
            return cls.model_validate(data)
        except ValueError as error:
            raise MetadataError(f"{path}: {error}") from None


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write atomically: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
