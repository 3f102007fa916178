"""Does this export fit that target? A table of items, one verdict, and the kind of relation between the two targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..config import TargetSection
from ..metadata import FILE as METADATA_FILE
from ..metadata import Metadata, TargetIdentity, file_sha256
from ..target.fingerprint import digest_of
from ..target.sample import likeness, local_weight_sample, weight_sample
from .engines import ExportError
from .files import read_weights
from .folder import CONFIG, UnknownForm, read_json, verify_folder
from .hub import download_export, download_target, is_hub_id
from .probe import FILE as PROBE_FILE
from .probe import ProbeResult, compare, read_probe, stored_sample
from .relation import Kind, Relation, relate

Verdict = Literal["ok", "warn", "mismatch", "unknown"]
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "tied")
# Relative error of features that quantising the weights explains. Measured on SmolLM2-135M, rounded to the nearest:
# int8 0.03, fp8 0.07, int4 in groups of 64 0.33, int3 0.72 (larger models lose less). Unrelated weights: above 1.
QUANTISED_TOLERANCE = 0.35
EMBEDDING = "embed_tokens.weight"
EXIT = {"compatible": 0, "incompatible": 1, "cannot tell": 2}


@dataclass(frozen=True)
class CheckRow:
    item: str
    expected: str
    found: str
    verdict: Verdict


@dataclass
class CheckResult:
    """rows: one an item; relation: what the given target is to the trained one, in words; kind: the same for
    programs."""

    export: str
    target: str
    relation: str = ""
    kind: Kind = "unknown"
    rows: list[CheckRow] = field(default_factory=list)

    def add(self, item: str, expected: object, found: object, verdict: Verdict) -> None:
        self.rows.append(CheckRow(item, str(expected), str(found), verdict))

    def equal(self, item: str, expected: object, found: object, otherwise: Verdict = "mismatch") -> bool:
        """Add a row whose verdict is ok where both are equal."""
        self.add(item, expected, found, "ok" if expected == found else otherwise)
        return expected == found

    def settle(self, item: str, verdict: Verdict) -> None:
        """Another verdict for a row that is there."""
        self.rows = [replace(row, verdict=verdict) if row.item == item else row for row in self.rows]

    @property
    def verdict(self) -> str:
        """Any mismatch: incompatible; otherwise anything unknown: cannot tell; otherwise compatible."""
        found = {row.verdict for row in self.rows}
        if "mismatch" in found:
            return "incompatible"
        return "cannot tell" if "unknown" in found else "compatible"

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict, "exit_code": self.exit_code}


def check(
    export: str | Path,
    target: str | TargetSection,
    *,
    probe: bool = True,
    device: str = "cpu",
    revision: str | None = None,
) -> CheckResult:
    """Compare an export (or a checkpoint) with a target: Hub id, folder, GGUF file, ``package:NAME``, or a section.

    export: a folder, or a Hub id (``revision`` of it), whose files are downloaded as data. Only files are read, except
    that the probe loads the target (``probe=False`` leaves it out), and that a GGUF file has to be loaded to be
    identified. A damaged export is a mismatch with the reason in its row. Raises ExportError for a folder that is no
    export at all, TargetError for a target that cannot be read, HubError for what cannot be had from the Hub.
    """
    from ..target.load import identify_section, load_target, locate

    section = target if isinstance(target, TargetSection) else TargetSection(path=target)
    folder = Path(export)
    if not folder.is_dir():
        if not is_hub_id(export):
            raise ExportError(f"no export folder at {folder} (and it is not a Hub id)")
        folder = download_export(str(export), revision)
    result = CheckResult(str(export), section.path)
    metadata, tensors = _contents(folder, result)
    section = _at_hand(section)
    loaded = None
    if locate(section).gguf or not locate(section).local:  # identified by loading: load once
        loaded = load_target(section, device)
    found = loaded.identity if loaded is not None else identify_section(section)
    if metadata is None:
        _compare_config(read_json(folder / CONFIG), tensors, found, result)
        return result
    stored = _stored_probe(folder, metadata, result)
    alike = {}
    if stored is not None:
        here = weight_sample(loaded.model) if loaded is not None else local_weight_sample(locate(section).base)
        alike = likeness(stored_sample(stored), here)
    fits, relation = _compare_identity(metadata, found, alike, result)
    if stored is None or not probe:
        return result
    if not fits:
        result.add("probe", "the trained target's features", "not run: the sizes differ", "unknown")
        return result
    try:
        loaded = loaded if loaded is not None else load_target(section, device)
    except (ValueError, ImportError) as error:  # a quantised target may need what is not installed here
        reason = str(error).split("\n")[0]
        result.add("probe", "the trained target's features", f"not run, the target does not load: {reason}", "unknown")
        return result
    _judge_probe(compare(stored, loaded), relation, result)
    return result


def _at_hand(section: TargetSection) -> TargetSection:
    """A target on the Hub as a folder of its files, so that it is identified without being loaded."""
    from ..target.load import locate

    place = locate(section)
    if place.local or place.gguf or section.trust_remote_code:
        return section
    folder = download_target(place.base, section.revision)
    return section.model_copy(update={"path": str(folder), "revision": None}) if folder is not None else section


def _stored_probe(folder: Path, metadata: Metadata, result: CheckResult) -> dict[str, Tensor] | None:
    """The export's probe, if it has one; one that is promised and missing, or damaged, is a mismatch."""
    if not (folder / PROBE_FILE).exists():
        if metadata.export is not None and metadata.export.probe:
            result.add("probe", PROBE_FILE, "the file is missing", "mismatch")
        return None
    try:
        return read_probe(folder)
    except ExportError as error:
        result.add("probe", PROBE_FILE, str(error), "mismatch")
        return None


def _contents(folder: Path, result: CheckResult) -> tuple[Metadata | None, dict[str, Tensor]]:
    """The row about the folder itself; its metadata (None for a folder of another tool) and tensors."""
    if not (folder / METADATA_FILE).exists() and not (folder / CONFIG).exists():
        raise ExportError(f"{folder} has neither {METADATA_FILE} nor {CONFIG}: not an export")
    try:
        verified = verify_folder(folder)
    except UnknownForm as error:  # another tool's: perhaps a kind of head that is not known here
        result.add("contents", "a form that is known here", str(error).removeprefix(f"{folder}: "), "unknown")
        return None, read_weights(folder)
    except ValueError as error:
        result.add("contents", "whole, as the training record says", str(error).removeprefix(f"{folder}: "), "mismatch")
        return Metadata.read(folder) if (folder / METADATA_FILE).exists() else None, {}
    recorded = verified.metadata.export.files if verified.metadata and verified.metadata.export else {}
    changed = [n for n, sha in recorded.items() if not (folder / n).is_file() or file_sha256(folder / n) != sha]
    if changed:
        result.add("contents", "the files as they were exported", f"changed since: {', '.join(changed)}", "mismatch")
        return verified.metadata, verified.tensors
    result.add("contents", "whole", f"{len(verified.tensors)} tensors, {verified.kind} for {verified.dialect}", "ok")
    return verified.metadata, verified.tensors


def _compare_identity(
    metadata: Metadata, found: TargetIdentity, alike: dict[str, float], result: CheckResult
) -> tuple[bool, Relation]:
    """All rows that files alone decide; returns whether the target has the trained one's sizes, and the relation."""
    trained = metadata.target
    mine, theirs = trained.target_shape(), found.target_shape()
    same = result.equal("architecture", mine.architecture, theirs.architecture)
    sizes = {name: (getattr(mine, name), getattr(theirs, name)) for name in SIZES}
    differing = {name: pair for name, pair in sizes.items() if pair[0] != pair[1]}
    shown = differing or {"hidden_size": sizes["hidden_size"], "num_layers": sizes["num_layers"]}
    same &= result.equal(
        "sizes",
        ", ".join(f"{n} {a}" for n, (a, _) in shown.items()),
        ", ".join(f"{n} {b}" for n, (_, b) in shown.items()),
    )
    outside = [i for i in metadata.features.layers if not 0 <= i <= theirs.num_layers]
    result.add(
        "layers read",
        metadata.features.layers or "final only",
        f"{outside} outside 0..{theirs.num_layers}" if outside else f"within 0..{theirs.num_layers}",
        "mismatch" if outside else "ok",
    )
    same &= result.equal("vocabulary", mine.vocab_size, theirs.vocab_size)
    same &= result.equal("RoPE", mine.rope, theirs.rope)
    tokenizer = _compare_tokenizers(trained, found, result)
    _hashes(result, "chat template", trained.chat_template, found.chat_template, "warn")
    relation = relate(trained, found, sizes=same, tokenizer=tokenizer, alike=alike)
    # packed weights cannot be compared: the probe decides
    verdict: Verdict = "ok" if relation.same_weights else "unknown" if relation.kind == "quantised form" else "mismatch"
    result.add("weights", f"{len(trained.acting)} sampled tensors", relation.weights, verdict)
    result.relation, result.kind = relation.text, relation.kind
    result.equal("dtype", trained.dtype, found.dtype, "warn")
    # a plain copy of dequantised weights is the same target
    otherwise = "ok" if trained.acting == found.acting else "warn"
    result.equal("quantisation", trained.quantization or "none", found.quantization or "none", otherwise)
    length = metadata.training.max_length if metadata.training else None
    if length is None:
        result.add("trained length", "recorded", "not recorded", "warn")
    else:
        shorter = length < theirs.max_positions
        text = f"serves {theirs.max_positions}" + (": acceptance beyond the trained length is unmeasured" * shorter)
        result.add("trained length", f"rows up to {length}", text, "warn" if shorter else "ok")
    return same, relation


def _compare_tokenizers(trained: TargetIdentity, found: TargetIdentity, result: CheckResult) -> bool:
    """One row; where both records know the parts, it says which differs."""
    mine, theirs = trained.tokenizer_parts, found.tokenizer_parts
    if trained.tokenizer == found.tokenizer or not mine or not theirs:
        return _hashes(result, "tokenizer", trained.tokenizer, found.tokenizer, "mismatch")
    differ = [part for part in mine if mine[part] != theirs.get(part)]
    same = [part for part in mine if part not in differ]
    text = f"differ: {', '.join(differ)}" + (f"; equal: {', '.join(same)}" if same else "")
    result.add("tokenizer", ", ".join(f"{part} {sha[:12]}" for part, sha in mine.items()), text, "mismatch")
    return False


def _hashes(result: CheckResult, item: str, expected: str | None, found: str | None, otherwise: Verdict) -> bool:
    if not expected or not found:
        if bool(expected) == bool(found):
            result.add(item, "none", "none", "ok" if item == "chat template" else "unknown")
            return item == "chat template"
        result.add(item, _short(expected), _short(found), otherwise)
        return False
    result.add(item, _short(expected), _short(found), "ok" if expected == found else otherwise)
    return expected == found


def _short(value: str | None) -> str:
    return value[:12] if value else "none"


def _judge_probe(outcome: ProbeResult, relation: Relation, result: CheckResult) -> None:
    """With equal weights a deviation is a mismatch; with other weights it measures how far away the target is."""
    quantised = relation.kind == "quantised form"
    limit = max(outcome.tolerance, QUANTISED_TOLERANCE) if quantised else outcome.tolerance
    within = outcome.worst <= limit
    layers = "".join(f"layer {i} {error:.1e}, " for i, error in outcome.layers.items())
    text = f"{layers}final {outcome.final:.1e}; greedy tokens equal {outcome.greedy:.0%}"
    verdict: Verdict = "warn" if not relation.same_weights else "ok" if within else "mismatch"
    if quantised:  # what the files could not tell
        result.settle("weights", "warn" if within else "mismatch")
    elif within:
        verdict = "ok"
    result.add("probe", f"relative error of features up to {limit:g}", text, verdict)
    if not relation.same_weights:
        result.relation += f". On the probe {outcome.greedy:.0%} of its greedy tokens are the trained target's"


def _compare_config(
    config: dict[str, Any], tensors: dict[str, Tensor], found: TargetIdentity, result: CheckResult
) -> None:
    """What a folder of another tool can say: enough to refuse a wrong target, never enough to accept one."""
    shape = found.target_shape()
    levels = _levels(config)

    def first(*keys: str) -> Any:
        return next((level[key] for key in keys for level in levels if level.get(key) is not None), None)

    for item, expected, value in (
        ("hidden size", first("target_hidden_size", "hidden_size"), shape.hidden_size),
        ("vocabulary", first("vocab_size"), shape.vocab_size),
    ):
        if expected is None:
            result.add(item, f"not in {CONFIG}", value, "unknown")
        else:
            result.equal(item, expected, value)
    for level in levels:
        for ids in (v for k, v in level.items() if k.endswith("layer_ids") and isinstance(v, list)):
            outside = [i for i in ids if not 0 <= i <= shape.num_layers]
            result.add("layers read", ids, f"target has 0..{shape.num_layers}", "mismatch" if outside else "ok")
    theta = first("rope_theta")
    if theta is not None:
        result.equal("RoPE theta", float(theta), shape.rope.get("rope_theta"), "warn")
    verifier = first("verifier")
    if isinstance(verifier, dict):
        if verifier.get("architectures"):
            result.equal("architecture", verifier["architectures"][0], shape.architecture)
        if name := verifier.get("name_or_path"):
            result.add("target's name", name, found.name, "ok" if name == found.name else "warn")
    for item in ("tokenizer", "chat template"):
        result.add(item, f"no {METADATA_FILE}", "-", "unknown")
    result.relation = f"cannot be told: the folder has no {METADATA_FILE}"
    embedding = next((t for n, t in tensors.items() if n.endswith(EMBEDDING)), None)
    if embedding is None or tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        result.add("weights", f"no {METADATA_FILE}, no copy of the target's embedding", "-", "unknown")
        return
    same = digest_of(embedding) == found.weights["embed"]
    said = "is this target's" if same else "is not this target's (another target, or trained with the head)"
    result.add("weights", f"no {METADATA_FILE}", f"the embedding in the folder {said}", "unknown")
    result.relation += f"; the embedding in it {said}"


def _levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and every dictionary inside it, outermost first."""
    out, queue = [], [config]
    while queue:
        level = queue.pop(0)
        out.append(level)
        queue += [v for v in level.values() if isinstance(v, dict)]
    return out
