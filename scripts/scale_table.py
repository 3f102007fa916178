"""The tables on scale in recipes/README.md, from the formulas of ``headtrain train RECIPE --dry-run --gpus N``.

python scripts/scale_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from headtrain.config import load_recipe
from headtrain.estimate import estimate
from headtrain.scale import BACKENDS, Cluster, head_memory, head_traffic, scale

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
README = RECIPES / "README.md"
MARKERS = ("<!-- scale: written by scripts/scale_table.py -->", "<!-- end of scale -->")
GPUS = (8, 64, 512)
TARGET = "target's forward"
SPLIT = "features.mode=online target.shard=fsdp"
# recipe, its overrides, backend, device
ROWS = [
    ("llama-3.1-8b-eagle3", "", "ddp", "h100"),
    ("llama-3.1-8b-eagle3", "features.mode=offline", "ddp", "h100"),
    ("llama-3.3-70b-eagle3", "", "fsdp2", "h100"),
    ("llama-3.3-70b-eagle3", "target.shard=fsdp", "fsdp2", "h100"),
    ("deepseek-v3-eagle3", f"{SPLIT} target.group={{group}}", "fsdp2", "h200"),
    ("deepseek-v3-eagle3", f"{SPLIT} target.group={{group}} train.batch_tokens=16384", "fsdp2", "h200"),
    ("deepseek-v3-eagle3", "features.mode=offline", "ddp", "h200"),
]
LARGEST_GROUP = 64  # ranks that hold one copy of DeepSeek-V3


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"


def thousand(rate: float) -> str:
    return f"{rate / 1e3:,.0f} k"


def row(name: str, overrides: str, backend: str, device: str, gpus: int) -> str:
    given = overrides.format(group=min(gpus, LARGEST_GROUP)).split()
    of = load_recipe(RECIPES / f"{name}.yaml", given)
    got = scale(of, Cluster.of(gpus, device), backend)
    target = sum(size for what, size in got.memory.items() if "target" in what)
    head = sum(size for what, size in got.memory.items() if what.startswith("head"))
    rest = sum(got.memory.values()) - target - head
    total = f"{gb(target + head + rest)}{'' if got.fits else ', does not fit'}"
    how = "stored" if got.stored else of.target.shard.replace("none", "whole")
    if of.target.shard != "none":
        how += f" over {of.target.group or min(gpus, got.cluster.node)}"
    share = got.seconds.get("target", 0.0) / got.step_seconds
    return "| " + " | ".join([
        of.name.removesuffix("-eagle3"), how, backend, f"{gpus} {got.cluster.device.name.split()[0]}",
        f"{got.tokens_a_step // gpus:,}",
        f"{gb(target)} + {gb(head)} + {gb(rest)} = {total}",
        f"{gb(sum(got.sent.values()) - got.sent.get(TARGET, 0))} + {gb(got.sent.get(TARGET, 0))}",
        thousand(got.features_second) if got.target_fits else "target does not fit",
        thousand(got.tokens_second) if got.fits else "",
        "" if got.stored or not got.fits else f"{share:.0%}",
        f"{got.token_bytes / 1e3:.0f} kB, {gb(got.read_per_node)} GB/s" if got.stored else "",
    ]) + " |"  # fmt: skip


def runs() -> list[str]:
    lines = [
        "| target | features | backend | GPUs | tokens a rank and step | a rank holds, GB: target + head + rest | "
        "a rank sends a step, GB: head + target | features, tokens/s | training, tokens/s | target's share of time | "
        "disk a token, read on a node |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [row(*of, gpus) for of in ROWS for gpus in GPUS]


def heads() -> list[str]:
    lines = [
        "| head for | backend | " + " | ".join(f"{n} GPUs: holds + working, GB; sends, GB" for n in GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for name in dict.fromkeys(name for name, *_ in ROWS):
        recipe = load_recipe(RECIPES / f"{name}.yaml")
        shapes = estimate(recipe).head_shapes
        for backend in BACKENDS:
            cells = []
            for gpus in GPUS:
                of = head_memory(shapes, backend, gpus)
                sent = sum(head_traffic(shapes, backend, gpus, 1).values())
                cells.append(f"{gb(sum(of.values()) - of['working'])} + {gb(of['working'])}; {gb(sent)}")
            lines.append(f"| {name.removesuffix('-eagle3')} | {backend} | {' | '.join(cells)} |")
    return lines


def rewritten(readme: str) -> str:
    """``readme`` with its tables as they should be. Raises ValueError where the markers are not there."""
    begin, end = MARKERS
    text = "\n".join([*runs(), "", *heads()])
    return f"{readme[: readme.index(begin)]}{begin}\n{text}\n{readme[readme.index(end) :]}"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{README}: {len(ROWS) * len(GPUS)} runs\n")
