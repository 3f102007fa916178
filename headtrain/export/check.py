"""Does this export fit that target? A table of items, one verdict, and the kind of relation between the two targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import TargetSection
from ..metadata import FILE as METADATA_FILE
from ..metadata import Metadata, TargetIdentity, file_sha256
from .engines import ExportError
from .folder import CONFIG, read_json, verify_folder
from .probe import FILE as PROBE_FILE
from .probe import ProbeResult, compare, read_probe

Verdict = Literal["ok", "warn", "mismatch", "unknown"]
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "tied")
EXIT = {"compatible": 0, "incompatible": 1, "cannot tell": 2}


@dataclass(frozen=True)
class CheckRow:
    item: str
    expected: str
    found: str
    verdict: Verdict


@dataclass
class CheckResult:
    """rows: one an item; relation: what the given target is to the trained one, in words."""

    export: str
    target: str
    relation: str = ""
    rows: list[CheckRow] = field(default_factory=list)

    def add(self, item: str, expected: object, found: object, verdict: Verdict) -> None:
        self.rows.append(CheckRow(item, str(expected), str(found), verdict))

    def equal(self, item: str, expected: object, found: object, otherwise: Verdict = "mismatch") -> bool:
        """Add a row whose verdict is ok where both are equal."""
        self.add(item, expected, found, "ok" if expected == found else otherwise)
        return expected == found

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


def check(export: str | Path, target: str | TargetSection, *, probe: bool = True, device: str = "cpu") -> CheckResult:
    """Compare an export (or a checkpoint) with a target: Hub id, folder, GGUF file, ``package:NAME``, or a section.

    Only files are read, except that the probe loads the target (``probe=False`` leaves it out), and that a GGUF
    file has to be loaded to be identified. A damaged export is a mismatch with the reason in its row. Raises
    ExportError for a folder that is no export at all, TargetError for a target that cannot be read.
    """
    from ..target.load import identify_section, load_target, locate

    section = target if isinstance(target, TargetSection) else TargetSection(path=target)
    folder = Path(export)
    if not folder.is_dir():
        raise ExportError(f"no export folder at {folder}")
    result = CheckResult(str(folder), section.path)
    metadata = _contents(folder, result)
    loaded = None
    if locate(section).gguf or not locate(section).local:  # identified by loading: load once
        loaded = load_target(section, device)
    found = loaded.identity if loaded is not None else identify_section(section)
    if metadata is None:
        _compare_config(read_json(folder / CONFIG), found, result)
        return result
    fits = _compare_identity(metadata, found, result)
    if not probe:
        return result
    if not (folder / PROBE_FILE).exists():
        if metadata.export is not None and metadata.export.probe:
            result.add("probe", PROBE_FILE, "the file is missing", "mismatch")
        return result
    if not fits:
        result.add("probe", "the trained target's features", "not run: the sizes differ", "unknown")
        return result
    stored = read_probe(folder)
    outcome = compare(stored, loaded if loaded is not None else load_target(section, device))
    _judge_probe(outcome, metadata.target.acting == found.acting, result)
    return result


def _contents(folder: Path, result: CheckResult) -> Metadata | None:
    """The row about the folder itself; its metadata, or None for a folder of another tool."""
    if not (folder / METADATA_FILE).exists() and not (folder / CONFIG).exists():
        raise ExportError(f"{folder} has neither {METADATA_FILE} nor {CONFIG}: not an export")
    try:
        verified = verify_folder(folder)
    except ValueError as error:
        result.add("contents", "whole, as the training record says", str(error).removeprefix(f"{folder}: "), "mismatch")
        return Metadata.read(folder) if (folder / METADATA_FILE).exists() else None
    recorded = verified.metadata.export.files if verified.metadata and verified.metadata.export else {}
    changed = [n for n, sha in recorded.items() if not (folder / n).is_file() or file_sha256(folder / n) != sha]
    if changed:
        result.add("contents", "the files as they were exported", f"changed since: {', '.join(changed)}", "mismatch")
        return verified.metadata
    result.add("contents", "whole", f"{len(verified.tensors)} tensors, {verified.kind} for {verified.dialect}", "ok")
    return verified.metadata


def _compare_identity(metadata: Metadata, found: TargetIdentity, result: CheckResult) -> bool:
    """All rows that files alone decide; returns whether the target has the trained one's sizes."""
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
    tokenizer = _hashes(result, "tokenizer", trained.tokenizer, found.tokenizer, "mismatch")
    _hashes(result, "chat template", trained.chat_template, found.chat_template, "warn")
    _compare_weights(trained, found, same and tokenizer, result)
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
    return same


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


def _compare_weights(trained: TargetIdentity, found: TargetIdentity, same_form: bool, result: CheckResult) -> None:
    """The fingerprint's row, and the relation in words."""
    wanted, given = trained.acting, found.acting
    names = sorted({*wanted, *given})
    differ = [n for n in names if wanted.get(n) != given.get(n)]
    kept = [n for n in names if n not in differ]
    if not differ:
        result.add("weights", f"{len(names)} sampled tensors", "all equal", "ok")
        result.relation = "the trained target" if same_form else "the trained target's weights in another form"
        if trained.adapter is not None and found.adapter is None:
            result.relation += " (the adapter that was trained with the head is merged in it)"
        return
    which = "all differ" if not kept else f"differ: {', '.join(differ)}; equal: {', '.join(kept)}"
    result.add("weights", f"{len(names)} sampled tensors", which, "mismatch")
    if trained.adapter is not None and found.weights == trained.weights:
        result.relation = (
            "the base of the trained target, without the adapter that was trained with the head. Speculation stays "
            "lossless, but fewer drafts are accepted: merge the adapter that lies beside the head into it"
        )
    elif same_form:
        result.relation = (
            "a derivative of the trained target (fine-tune, LoRA or another quantisation): same sizes and tokenizer, "
            "other weights. Speculation stays lossless, but fewer drafts may be accepted: measure it with "
            "`headtrain eval`, or train the head further on it"
        )
    else:
        result.relation = "not the trained target: another model"


def _judge_probe(outcome: ProbeResult, same_weights: bool, result: CheckResult) -> None:
    """With equal weights a deviation is a mismatch; with other weights it measures how far away the target is."""
    layers = "".join(f"layer {i} {error:.1e}, " for i, error in outcome.layers.items())
    text = f"{layers}final {outcome.final:.1e}; greedy tokens equal {outcome.greedy:.0%}"
    verdict: Verdict = "ok" if outcome.worst <= outcome.tolerance else "mismatch" if same_weights else "warn"
    result.add("probe", f"relative error of features up to {outcome.tolerance:g}", text, verdict)
    if not same_weights:
        result.relation += f". On the probe {outcome.greedy:.0%} of its greedy tokens are the trained target's"


def _compare_config(config: dict[str, Any], found: TargetIdentity, result: CheckResult) -> None:
    """What a config.json alone can say: enough to refuse a wrong target, never enough to accept one."""
    shape = found.target_shape()
    hidden = config.get("target_hidden_size", config.get("hidden_size"))
    for item, expected, value in (
        ("hidden size", hidden, shape.hidden_size),
        ("vocabulary", config.get("vocab_size"), shape.vocab_size),
    ):
        if expected is None:
            result.add(item, f"not in {CONFIG}", value, "unknown")
        else:
            result.equal(item, expected, value)
    for ids in (v for k, v in config.items() if k.endswith("layer_ids") and isinstance(v, list)):
        outside = [i for i in ids if not 0 <= i <= shape.num_layers]
        result.add("layers read", ids, f"target has 0..{shape.num_layers}", "mismatch" if outside else "ok")
    theta, real = config.get("rope_theta"), shape.rope.get("rope_theta")
    if theta is not None:
        result.equal("RoPE theta", theta, real, "warn")
    for item in ("tokenizer", "chat template", "weights"):
        result.add(item, f"no {METADATA_FILE}", "-", "unknown")
    result.relation = f"cannot be told: the folder has no {METADATA_FILE}"
