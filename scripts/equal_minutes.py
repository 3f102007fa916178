"""Train one head after the other for the same wall-clock minutes on the same rows, and print what each can draft.

    python scripts/equal_minutes.py --minutes 15 --out runs/equal \\
        recipes/quickstart.yaml recipes/smollm2-135m-eagle1.yaml recipes/smollm2-135m-medusa.yaml \\
        --set features.dir=runs/equal/features --set features.final=all --set "features.extra_layers=[2,15,27,30]"

A recipe may carry overrides of its own after a colon, parted by semicolons, and a name before an equals sign:
``"muon=recipes/quickstart.yaml:train.optimizer=muon;train.lr=1e-3"``. Those of --set go to all.

Steps come from a trial: a few optimizer steps of every stage of the depth schedule are timed, on a machine that was
made to work for two minutes before, and the run gets as many as fill the minutes, so that the learning rate ends where
it should. The seconds that it took are in the table. Keep the machine otherwise idle. Afterwards ``headtrain eval
--mode stored`` replays the held-out rows (data.eval) by chains of --k. A finished run is not trained again, so the
command can be repeated; the table is also written to OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from headtrain.config import load_recipe
from headtrain.evaluate.results import STORED
from headtrain.evaluate.sweep import FILES

TRIAL_STEPS = 20  # of each stage; fewer are too noisy
WARM_UP_STEPS = 60  # before them, not counted: a shard's first use reads its file and checks its sum
WARM_UP_SECONDS = 120  # of matrix multiplies before them: machines slow down by a fifth in the first minutes of work


@dataclass
class Entry:
    """One head of the comparison. overrides: key=value, as on the command line of ``headtrain train``."""

    name: str
    recipe: Path
    overrides: list[str]

    @classmethod
    def parse(cls, text: str, common: list[str]) -> Entry:
        head, _, own = text.partition(":")
        name, _, recipe = head.rpartition("=")  # a recipe's path holds no "="
        path = Path(recipe)
        return cls(name or path.stem.removeprefix("smollm2-135m-"), path, [*common, *(x for x in own.split(";") if x)])


def train(entry: Entry, out: Path, log: Path, *overrides: str) -> list[dict]:
    """Run ``headtrain.train`` in a process of its own; the lines of its metrics.jsonl."""
    command = [
        sys.executable,
        "-m",
        "headtrain.train",
        str(entry.recipe),
        *entry.overrides,
        f"output={out}",
        *overrides,
    ]
    with open(log, "a", encoding="utf-8") as file:
        if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
            sys.exit(f"{entry.name}: training failed, see {log}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def steps_for(entry: Entry, minutes: float, out: Path, log: Path) -> int:
    """Optimizer steps that fill ``minutes``, from the seconds of a few steps of each depth."""
    stages = load_recipe(entry.recipe, entry.overrides).train.depth_schedule
    depths = [stage.depth for stage in stages] or [None]
    steps = WARM_UP_STEPS + TRIAL_STEPS * len(depths)
    parts = [(WARM_UP_STEPS, depths[0]), *((TRIAL_STEPS, depth) for depth in depths)]
    trial = [{"fraction": count / steps, "depth": depth} for count, depth in parts]
    _warm_up()
    lines = train(
        entry,
        out / f"{entry.name}-trial",
        log,
        f"train.steps={steps}",
        "train.log_every=1",
        "data.eval=[]",
        *([f"train.depth_schedule={json.dumps(trial)}"] if stages else []),
    )
    ends = [line["seconds"] for line in lines if line["kind"] == "train"]
    last = [WARM_UP_STEPS + TRIAL_STEPS * number - 1 for number in range(len(depths) + 1)]  # step before each stage
    each = [(ends[end] - ends[begin]) / TRIAL_STEPS for begin, end in pairwise(last)]
    shares = [stage.fraction for stage in stages] or [1.0]
    return max(1, round(60 * minutes / sum(f * s for f, s in zip(shares, each, strict=True))))


def _warm_up() -> None:
    end, x = time.monotonic() + WARM_UP_SECONDS, torch.randn(1024, 1024)
    while time.monotonic() < end:
        x @ x


def measured(entry: Entry, out: Path, minutes: float, k: int) -> dict:
    """Train (unless done), evaluate, and return the row of the table."""
    run, log = out / entry.name, out / f"{entry.name}.log"
    settled = run / "equal.json"
    if not settled.is_file():
        run.mkdir(parents=True, exist_ok=True)
        settled.write_text(json.dumps({"steps": steps_for(entry, minutes, out, log), "minutes": minutes}))
    found = json.loads(settled.read_text())
    if found["minutes"] != minutes:
        sys.exit(f"{run} was begun for {found['minutes']:g} minutes, not {minutes:g}: give another --out, or remove it")
    steps = found["steps"]
    never = ("eval_every", "save_every")
    lines = train(entry, run, log, f"train.steps={steps}", *(f"train.{key}={steps}" for key in never))
    last = [line for line in lines if line["kind"] == "train"][-1]
    command = [sys.executable, "-m", "headtrain.cli", "eval", str(run), "--mode", "stored", "--k", str(k)]
    with open(log, "a", encoding="utf-8") as file:
        if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
            sys.exit(f"{entry.name}: evaluation failed, see {log}")
    figures = run / "eval" / FILES[STORED]
    case = json.loads(figures.read_text(encoding="utf-8"))["cases"][0]
    return {"name": entry.name, "steps": steps, "seconds": last["seconds"], "last": last} | case


def table(rows: list[dict]) -> str:
    """Markdown: one line a head, then tau by route."""
    routes = [part["route"] for part in rows[0]["summary"]]
    head = [
        "head",
        "M parameters",
        "steps",
        "min",
        "supervised tokens/s",
        "alpha 1 / 2 / 3 / 4",
        *(f"tau {r}" for r in routes),
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        whole = next((part for part in row["summary"] if part["route"] in ("all", "total")), row["summary"][-1])
        alpha = " / ".join(f"{hit / tried:.2f}" if tried else "-" for hit, tried in whole["alpha"][:4])
        taus = {p["route"]: f"{p['tau']:.2f} ({p['tau_low']:.2f} to {p['tau_high']:.2f})" for p in row["summary"]}
        cells = [
            row["name"],
            f"{row['drafter']['parameters'] / 1e6:.1f}",
            f"{row['steps']:,}",
            f"{row['seconds'] / 60:.1f}",
            f"{row['last']['tokens'] / row['seconds']:,.0f}",
            alpha,
            *(taus.get(route, "-") for route in routes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="[NAME=]RECIPE[:key=value;...]")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, without capture and evaluation")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the table")
    parser.add_argument("--k", type=int, default=5, help="tokens of a chain")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for every recipe")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    entries = [Entry.parse(text, args.set) for text in args.recipes]
    rows = []
    for entry in entries:
        print(f"{entry.name} ...", file=sys.stderr, flush=True)
        rows.append(measured(entry, args.out, args.minutes, args.k))
        (args.out / "table.md").write_text(table(rows) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
