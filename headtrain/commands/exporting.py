"""`headtrain export`, `headtrain check` and `headtrain engines`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .common import (
    RunArgument,
    TargetOption,
    checkpoint_of,
    device,
    load_for,
    out,
    recipe_of,
    require_same_target,
    target_section,
)

if TYPE_CHECKING:
    from ..export.engines import DraftTokens


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--out", help="folder to write")],
    engine: Annotated[str, typer.Option(help="`headtrain engines` lists them")] = "vllm",
    target: TargetOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the target's")] = None,
    max_shard_size: Annotated[str, typer.Option(help="larger tensors files are split: 200MB, 5GB")] = "5GB",
    acceptance: Annotated[
        Path | None, typer.Option(help="an eval.json; default: the one in RUN/eval, if there")
    ] = None,
    probe: Annotated[bool, typer.Option(help="store a behavioural probe for `check` (loads the target)")] = True,
    license: Annotated[str | None, typer.Option(help="for the model card, as the Hub spells it: apache-2.0")] = None,
    force: Annotated[bool, typer.Option(help="replace an earlier export")] = False,
) -> None:
    """Write a trained head as an engine loads it, read it back strictly, and print the launch command."""
    from ..evaluate.sweep import found_in
    from ..export.core import export_head, launch_line, usual_draft
    from ..export.engines import engines_load
    from ..export.probe import make_probe
    from ..heads.io import fingerprint, load_head

    folder = checkpoint_of(run)
    head, metadata = load_head(folder)
    section = target_section(target, recipe_of(run), required=probe)
    stored = weights = loaded = None
    if probe:
        loaded = load_for(section, folder)
        require_same_target(metadata, loaded.identity, folder)
        stored, weights = make_probe(loaded, head.wants().layers), loaded.weights()
    measured = acceptance or next(iter(found_in(run / "eval")), None)
    # a head trained on a file that engines cannot load is named after the folder it was converted to
    renamed = target if target and engines_load(target) and not engines_load(metadata.target.name) else None
    draft = measured_draft(measured, fingerprint(head), engine, usual_draft(metadata)) if measured else None
    beside = loaded.folder if loaded else section and Path(section.path)
    path = export_head(
        folder, engine, to, dtype=dtype, force=force, acceptance=measured, probe=stored, weights=weights,
        max_shard_size=max_shard_size, target_name=renamed, target_folder=beside, license=license, draft=draft,
    )  # fmt: skip
    out.print(f"wrote {path}, read it back and compared: bit for bit the trained head", markup=False)
    draft = draft or usual_draft(metadata)
    out.print(f"serve it:  {launch_line(path, section.path if section else None, draft)}", markup=False)
    out.print(f"drafted tokens: {draft.count}, {draft.why}", markup=False)


def measured_draft(evaluation: Path, head: str, engine: str, usual: DraftTokens) -> DraftTokens:
    """The chain that `advise` takes of those that were measured with the head of this fingerprint, over all routes, as
    ``engine`` drafts; where none is worth serving the fastest, and that is said. Else ``usual``, with the reason."""
    from ..evaluate.advise import advise
    from ..evaluate.results import ALL
    from ..evaluate.sweep import Sweep
    from ..export.engines import DraftTokens, modes_of

    try:
        cases = Sweep.read(evaluation).cases
        own = [c for c in cases if c.drafter.get("weights") == head and not c.settings["tree"]]
        if not own:
            return replace(usual, why="the default: the evaluation measured no chain of this head")
        advice = advise(own, engines=modes_of(engine), only=[ALL]).routes[0]
    except ValueError as error:
        return replace(usual, why=f"the default: nothing can be read off the evaluation ({error})")
    best, how = advice.best, "the best of those measured"
    if best is None:
        return replace(usual, why=f"the default: {advice.reasons[0]}")
    if advice.chosen is None:
        how = "the fastest of those measured, but no gain is sure"
    gain = f"{best.speedup:.2f}x" + ("" if best.low != best.low else f", {best.low:.2f} to {best.high:.2f}")
    return DraftTokens(best.k, f"{how} ({gain}, {'timed' if best.timed else 'computed'} at batch 1, not in the engine)")


def check(
    export: Annotated[Path, typer.Argument(help="an exported folder, a checkpoint, or user/name on the Hub")],
    target: Annotated[str, typer.Option(help="Hub id, folder, .gguf file or package:NAME")],
    probe: Annotated[
        bool, typer.Option(help="compare the target's behaviour (loads it); --no-probe takes seconds")
    ] = True,
    revision: Annotated[str | None, typer.Option(help="of an export on the Hub")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows and the verdict as JSON")] = False,
) -> None:
    """Does this head belong to this target? Exit code 0 compatible, 1 not, 2 cannot tell."""
    from ..export.check import check as run

    folder = checkpoint_of(export) if (export / "checkpoints").is_dir() else export
    result = run(folder, target, probe=probe, device=device(), revision=revision)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        table = Table(title=f"{export} against {target}")
        for name in ("item", "expected", "found", "verdict"):
            table.add_column(name, overflow="fold")
        colours = {"ok": "green", "mismatch": "red", "warn": "yellow"}
        for row in result.rows:
            table.add_row(row.item, str(row.expected), str(row.found), row.verdict, style=colours.get(row.verdict))
        out.print(table)
        warned = sum(row.verdict == "warn" for row in result.rows)
        more = f"; {warned} warning{'s' * (warned > 1)}" if warned else ""
        out.print(f"{result.verdict} (exit code {result.exit_code}): {result.relation}{more}", markup=False)
    raise typer.Exit(result.exit_code)


def engines(as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False) -> None:
    """List which engine versions serve which head, what was tried here, and from where the rest is known."""
    from ..export.engines import ENGINES, engine_table

    rows = engine_table()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    columns = ("engine", "head", "served", "versions", "tested")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    out.print(table)
    for engine in ENGINES.values():
        out.print(f"{engine.name}: {' '.join(engine.notes)} Source: {engine.source}", markup=False)
        for row in rows:
            if row["engine"] == engine.name and row["served"] == "yes" and row["source"] != engine.source:
                out.print(f"  {row['head']}: {(row['notes'] + ' ').lstrip()}Source: {row['source']}", markup=False)
