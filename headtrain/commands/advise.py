"""`headtrain advise`: which way of drafting, for which route, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ..config import RecipeError
from . import serving
from .common import out

if TYPE_CHECKING:
    from ..evaluate.advise import Advice, RouteAdvice
    from ..evaluate.candidates import Candidate


def advise(
    evaluation: Annotated[Path, typer.Argument(help="an eval.json, or the run that holds one")],
    cost_ratio: Annotated[
        list[str] | None,
        typer.Option(help="draft step / target step: 0.05, or LABEL=0.05 for one drafter; default: as timed"),
    ] = None,
    verify_cost: Annotated[
        str | None, typer.Option(help="target forward of n tokens / of one, as measured: 4:1.1,8:1.4")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="sequences at the same time on one replica; needs a device or --verify-cost"),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="only modes that this engine ships; repeat for several")
    ] = None,
    route: Annotated[list[str] | None, typer.Option(help="only this route; repeat for several")] = None,
    drafter: Annotated[str | None, typer.Option(help="only drafters whose label has this part")] = None,
    target: serving.Target = None,
    parameters: serving.Parameters = None,
    device: serving.DeviceName = None,
    tflops: serving.Tflops = None,
    gbps: serving.Gbps = None,
    memory_gb: serving.MemoryGb = None,
    efficiency: serving.Efficiency = 1.0,
    gpus: serving.PerReplica = 1,
    context: serving.Context = 1024,
    weight_bytes: serving.WeightBytes = 2.0,
    kv_bytes: serving.KvBytes = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Which drafter and which k for each route, where to switch speculation off, and the reasons.

    Speeds that were timed count as they are, for one sequence at a time on the machine that timed them. Give the costs,
    or the device that will serve and how many sequences it will answer at once, to ask about other conditions.

    \b
    headtrain advise runs/quickstart
    headtrain advise runs/quickstart --route code --route all
    headtrain advise eval.json --target recipes/llama-3.1-8b-eagle3.yaml --device h100 --concurrency 32
    """
    from ..evaluate.advise import advise as recommend
    from ..evaluate.speedup import VerifyCost

    cases = serving.read_cases(evaluation)
    try:
        setup = serving.read_setup(
            serving.read_target(target, parameters, weight_bytes, kv_bytes),
            serving.read_device(device, tflops, gbps, memory_gb, efficiency, gpus),
            context,
        )
        serving.require_measured_on(cases, setup)
        ratio = read_ratio(cost_ratio or [], [case.drafter["label"] for case in cases])
        verify = None if verify_cost is None else VerifyCost.parse(verify_cost)
        made = recommend(cases, ratio, verify, concurrency, setup, engine or None, route or None, drafter)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"advise: {error}") from None
    if as_json:
        print(json.dumps(made.to_dict(), indent=2, allow_nan=False))
        return
    out.print(table(made))
    for line in lines(made):
        out.print(line, markup=False)


def read_ratio(given: list[str], labels: list[str]) -> float | dict[str, float] | None:
    """``["0.05"]``: for every drafter; ``["head=0.05", ...]``: by a part of its label. Raises RecipeError."""
    try:
        if len(given) == 1 and "=" not in given[0]:
            return float(given[0])
        pairs = [(name, float(value)) for name, value in (item.rsplit("=", 1) for item in given)]
    except ValueError:
        raise RecipeError(
            f"--cost-ratio {' '.join(given)}: expected one number, or LABEL=number for drafters"
        ) from None
    out = {}
    for name, value in pairs:
        if not name.strip():
            raise RecipeError(f"--cost-ratio ={value:g}: expected a part of a drafter's label before the =")
        found = [label for label in labels if name.strip().lower() in label.lower()]
        if not found:
            raise RecipeError(
                f"--cost-ratio {name}: no such drafter; the evaluation has: {', '.join(dict.fromkeys(labels))}"
            )
        out |= dict.fromkeys(found, value)
    return out or None


def table(made: Advice) -> Table:
    """A row for each route and temperature."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", caption_style="dim")
    grid.caption = "speed-up: with its 95 % interval over prompts, without speculation that of the best measured; "
    grid.caption += "off: the batch from which it never pays"
    for name in ("route", "T", "use", "speed-up", "off", "ships in"):
        grid.add_column(name, overflow="fold")
    for r in made.routes:
        grid.add_row(*cells(r))
    return grid


def cells(r: RouteAdvice) -> list[str]:
    first = [r.route, f"{r.temperature:g}"]
    if r.chosen is None:
        return [*first, "no speculation", speed(r.best), "always", "-"]
    engines = ", ".join(f"{m.title} {m.versions}" for m in r.engines)
    return [*first, r.chosen.name, speed(r.chosen), str(r.off_from_batch or "-"), engines]


def speed(c: Candidate | None) -> str:
    if c is None:
        return "-"
    return f"{c.speedup:.2f}x" + ("" if c.low != c.low else f" ({c.low:.2f}-{c.high:.2f})")


def lines(made: Advice) -> list[str]:
    """The reasons, then what is refused, warned of and assumed."""
    out = []
    for r in made.routes:
        at = f"{r.route}:" if r.temperature == 0 else f"{r.route}, T {r.temperature:g}:"
        out += [f"{at} {line}" for line in r.reasons] + [f"{at} warning: {line}" for line in r.warnings]
    modes = {(m.title, m.mode): m.note for r in made.routes for m in r.engines if m.note}  # once, for all routes
    out += [f"{title}, {mode}: {note}" for (title, mode), note in modes.items()]
    out += [f"refused: {line}" for line in made.refused] + [f"warning: {line}" for line in made.warnings]
    return out + [f"assumed: {line}" for line in made.assumptions]
