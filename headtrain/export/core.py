"""Write a trained head as a folder that an engine loads, and prove it by reading the folder back."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.base import DraftHead, ExportSpec
from ..heads.catalog import head_class
from ..heads.forms import Launch
from ..heads.io import FILE as HEAD_FILE
from ..heads.io import fingerprint, head_tensors, load_head, save_tensors
from ..metadata import FILE as METADATA_FILE
from ..metadata import ExportPart, Metadata, RouteAcceptance, file_sha256, write_json
from ..target.adapter import FOLDER as ADAPTER
from ..target.adapter import copy_adapter
from ..types import TargetShape, TargetWeights
from .card import write_card
from .combined import copy_beside, target_tensors
from .engines import ENGINES, NATIVE, DraftTokens, Engine, ExportError, engines_load, form_of, launch_command, resolve
from .files import CONFIG, parse_size, staged, write_weights
from .folder import DTYPE_KEY, fill_target, verify_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD = "5GB"


def export_head(
    checkpoint: str | Path,
    engine: str,
    out: str | Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    acceptance: str | Path | dict[str, Any] | None = None,
    probe: dict[str, Tensor] | None = None,
    weights: TargetWeights | None = None,
    max_shard_size: str = MAX_SHARD,
    target_name: str | None = None,
    target_folder: str | Path | None = None,
    license: str | None = None,
    draft: DraftTokens | None = None,
) -> Path:
    """Export a checkpoint folder for ``engine`` (a row of ``engines.ENGINES``); returns the folder written.

    dtype: of the exported tensors, default the target's own; acceptance: an evaluation's JSON (or its path), merged
    into the metadata; probe: ``probe.make_probe``'s tensors, stored for ``headtrain check``; weights: the target's
    tensors, needed where the export carries one of them (a shared lm_head); force: replace an earlier export;
    max_shard_size: a larger safetensors file becomes several with an index; target_name: what the target is called
    where the engine runs, default what the record calls it; target_folder: the target's files, for a form that holds
    the target as well (``Form.with_target``); license: for the card, as the Hub spells it.
    Two exports of one checkpoint are byte-identical. The folder appears under its name only after it was read back
    strictly, and the head rebuilt from it equals the trained one bit for bit and drafts the same.

    Raises ExportError, MetadataError, ValueError; none leaves a half-written folder.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if not checkpoint.is_dir():
        raise ExportError(f"no checkpoint folder at {checkpoint}")
    _refuse_overwrite(checkpoint, out, force)
    head, metadata = load_head(checkpoint)
    measured = None if acceptance is None else read_acceptance(acceptance, fingerprint(head))  # before it is cast
    row = resolve(engine, type(head), metadata.head.kind)
    max_shard = parse_size(max_shard_size)
    if target_name is not None:
        metadata.target.name = target_name
    name = dtype or metadata.target.dtype
    if name not in DTYPES:
        raise ExportError(f"dtype {name!r}: expected one of {', '.join(DTYPES)}")
    if weights is not None:  # the head, and what it is compared on, are on the CPU
        weights = TargetWeights(weights.embed.cpu(), weights.lm_head.cpu(), weights.final_norm.cpu())
        head.attach(weights)
    with torch.no_grad():  # exactly the values that the folder will hold; buffers such as RoPE's stay as they are
        for tensor in head.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(DTYPES[name]))
    metadata.acceptance = metadata.acceptance | (measured or {})

    with staged(out) as temporary:
        form = form_of(row, type(head))
        if metadata.target.adapter is not None and not form.with_target:
            copy_adapter(checkpoint, temporary)
            warnings.warn(
                f"the target was trained with this head: serve the base with {ADAPTER}/ merged into it, or a "
                "checkpoint's merged/ (train.joint.save=merged); the plain base accepts fewer drafts",
                stacklevel=2,
            )
        spec = _write(temporary, head, metadata, row, name, probe, max_shard, target_folder and Path(target_folder))
        _prove(temporary, head, row, spec, probe, weights)
        for note in _length_warnings(metadata):
            warnings.warn(note, stacklevel=2)
        write_card(temporary, metadata, row, type(head), spec.notes, draft or usual_draft(metadata), license)
    return out


def _write(
    folder: Path,
    head: DraftHead,
    metadata: Metadata,
    row: Engine,
    dtype: str,
    probe: dict[str, Tensor] | None,
    max_shard: int,
    target: Path | None,
) -> ExportSpec:
    spec = ExportSpec({}, {}) if row.dialect == NATIVE else _spec(head, row)
    form = form_of(row, type(head))
    if form.with_target:
        shapes = type(head).expected_tensors(row.dialect, spec.config)
        rest = {name: size for name, size in shapes.items() if name not in spec.tensors}
        spec = replace(spec, tensors=spec.tensors | target_tensors(target, metadata.target, rest))
        copy_beside(target, folder)
    named = fill_target(spec.config, metadata.target.name)
    if named != spec.config and not engines_load(metadata.target.name):
        raise ExportError(
            f"the {row.title} form names its target, and {metadata.target.name} is nothing that it loads: "
            "`headtrain convert` it to a folder, and export again with --target FOLDER"
        )
    metadata.export = ExportPart(
        engine=row.name, dialect=row.dialect, dtype=dtype, method=spec.method, probe=probe is not None
    )
    if probe is not None:
        from .probe import FILE as PROBE_FILE

        save_tensors(folder / PROBE_FILE, probe)

    def record() -> ExportSpec:
        """headtrain.json last: it names what the other files hold."""
        found = sorted(p for p in folder.rglob("*") if p.is_file())
        metadata.export.files = {p.relative_to(folder).as_posix(): file_sha256(p) for p in found}
        metadata.write(folder)
        return spec

    if row.dialect == NATIVE:
        write_weights(folder, head_tensors(head), HEAD_FILE, sys.maxsize, DTYPES[dtype])
        return record()
    write_weights(folder, spec.tensors, form.file, max_shard, DTYPES[dtype])
    write_json(folder / CONFIG, named | {DTYPE_KEY: dtype})
    return record()


def _spec(head: DraftHead, row: Engine) -> ExportSpec:
    try:
        return head.export_spec(row.dialect)
    except RuntimeError as error:  # not attached: the form carries a tensor of the target's
        raise ExportError(f"the {row.title} form of this head carries the target's own tensors: {error}") from None
    except ValueError as error:
        raise ExportError(f"{row.title} cannot serve this head: {error}") from None


def _prove(
    folder: Path,
    trained: DraftHead,
    row: Engine,
    spec: ExportSpec,
    probe: dict[str, Tensor] | None,
    real: TargetWeights | None,
) -> None:
    """Read the folder back, rebuild the head, and compare parameters bit for bit and drafts on a made-up sequence;
    where the probe holds the target's features on a text, and its weights are given, on that text, too.

    The drafts catch what parameters cannot: a switch or a RoPE setting lost on the way through config.json.
    """
    verified = verify_folder(folder)
    rebuilt = verified.head
    if rebuilt is None:
        raise ExportError(f"{folder}: no head could be rebuilt")
    for name, value in spec.tensors.items():
        if not torch.equal(value.to(verified.tensors[name].dtype), verified.tensors[name]):
            raise ExportError(f"{name}: what was written is not what was read back")
    mine, theirs = trained.state_dict(), rebuilt.state_dict()
    if mine.keys() != theirs.keys():
        raise ExportError(f"the rebuilt head has other tensors: {sorted(mine.keys() ^ theirs.keys())}")
    for name, value in mine.items():
        if not torch.equal(value, theirs[name].to(value.dtype)):
            raise ExportError(f"{name}: the tensor read back for {row.title} differs from the trained one")
    sequences = [(_made_up_weights(trained.shape), *_made_up_features(trained))]
    if probe is not None and real is not None:
        sequences.append((real, *_probed_features(trained, probe)))
    depth = min(trained.wants().depth, 4)  # an engine's form does not say how deep a recurrent head was trained
    for weights, tokens, layers, final in sequences:
        expected, found = (_drafts(head, weights, tokens, layers, final, depth) for head in (trained, rebuilt))
        if not torch.equal(expected, found):
            raise ExportError(
                f"the head rebuilt from the {row.title} form drafts otherwise than the trained one (largest difference "
                f"{float((expected - found).abs().max()):.3g}): a setting was lost in {CONFIG}"
            )


def _made_up_weights(shape: TargetShape) -> TargetWeights:
    """Target tensors that only have the right shapes: both heads get the same, so any will do. [V, H] float32."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return TargetWeights(embed, embed, torch.ones(shape.hidden_size))


def _made_up_features(head: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """For 12 positions: the tokens that follow [n], layers [n, L, H], final [n, H]."""
    generator, n, size = torch.Generator().manual_seed(1), 12, head.shape.hidden_size
    tokens = torch.randint(head.shape.vocab_size, (n,), generator=generator)
    layers = torch.randn(n, len(head.wants().layers), size, generator=generator)
    return tokens, layers, torch.randn(n, size, generator=generator)


def _probed_features(head: DraftHead, probe: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the probe's text: every position that a token follows."""
    ids, final = probe["ids"], probe["final"]
    layers = probe["layers"] if "layers" in probe else final.new_zeros(ids.numel(), 0, head.shape.hidden_size)
    return ids[1:], layers[:-1], final[:-1]


@torch.no_grad()
def _drafts(
    head: DraftHead, weights: TargetWeights, tokens: Tensor, layers: Tensor, final: Tensor, depth: int
) -> Tensor:
    """Logits of a greedy chain after the given positions, one row a depth."""
    head.eval()
    head.attach(weights)
    session = head.session(max_length=tokens.numel() + depth)
    rows = [session.extend(tokens, layers, final)]
    for node in range(depth - 1):
        best = rows[-1].argmax(-1, keepdim=True)
        token = best if head.draft_ids is None else head.draft_ids[best]
        rows.append(session.expand(torch.tensor([node - 1]), token)[0])
    return torch.stack(rows)


def launch_line(export: str | Path, target: str | None = None, draft: DraftTokens | None = None) -> str:
    """The command that starts the engine with an exported folder. target: default what the metadata calls it; draft:
    default ``usual_draft``."""
    metadata = Metadata.read(export)
    if metadata.export is None:
        raise ExportError(f"{export} is a checkpoint; export it first")
    row, name = ENGINES[metadata.export.engine], target or metadata.target.name
    count = (draft or usual_draft(metadata)).count
    at = Launch(name, str(export), count, tuple(metadata.features.layers))
    return launch_command(row, head_class(metadata.head.kind), at)


def usual_draft(metadata: Metadata) -> DraftTokens:
    """A chain of 3, or of the head's usual depth where that is less."""
    head = metadata.head
    depth = head_class(head.kind).usual_depth(head.config, head.depth)
    return DraftTokens(
        min(depth or 3, 3),
        "the default, not measured: `headtrain eval --k 1,2,3,5` before the export finds the best",
    )


def _length_warnings(metadata: Metadata) -> list[str]:
    trained = metadata.training.max_length if metadata.training else None
    serves = metadata.target.target_shape().max_positions
    if trained is None or trained >= serves:
        return []
    return [
        f"the head was trained on rows of up to {trained} tokens, the target serves {serves} positions: beyond that "
        "length acceptance is unmeasured. The config keeps the target's limit; limit the server or train on longer rows"
    ]


def read_acceptance(source: str | Path | dict[str, Any], head: str | None = None) -> dict[str, RouteAcceptance]:
    """Acceptance by route from an evaluation's JSON: under `acceptance`, or all of it. head: the fingerprint of the
    head it must be of; another head's figures are left out with a warning. Raises ExportError."""
    where = "acceptance" if isinstance(source, dict) else str(source)
    try:
        data = source if isinstance(source, dict) else json.loads(Path(source).read_text(encoding="utf-8"))
        if head is not None and data.get("acceptance_of", head) != head:
            warnings.warn(
                f"{where} measured another head, or other weights of this one: its acceptance is left out; "
                "`headtrain eval` measures this one",
                stacklevel=3,
            )
            return {}
        data = data.get("acceptance", data)
        return {route: RouteAcceptance.model_validate(value) for route, value in data.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(f"{where}: expected measured acceptance by route: {error}") from None


def _refuse_overwrite(checkpoint: Path, out: Path, force: bool) -> None:
    inside, outer = checkpoint.resolve(), out.resolve()
    if inside == outer or outer in inside.parents:
        raise ExportError(f"{out} is, or holds, the checkpoint itself: name another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ExportError(f"{out} is a file; expected a folder to write")
    if not any(out.iterdir()):
        return
    if not force:
        raise ExportError(f"{out} is not empty: name another folder, or pass force to replace an earlier export")
    try:
        earlier = Metadata.read(out).export is not None
    except ValueError:
        earlier = False
    if not earlier:
        raise ExportError(f"{out} is no earlier export (no {METADATA_FILE} of one): it is not replaced even by force")
