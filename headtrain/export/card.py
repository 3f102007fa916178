"""README.md of an export: a model card whose front matter the Hub reads."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..heads.base import DraftHead
from ..heads.forms import Launch
from ..metadata import Metadata, RouteAcceptance
from .engines import ENGINES, NATIVE, DraftTokens, Engine, form_of, launch_command, serves

FILE = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def front_matter(metadata: Metadata, license: str | None = None) -> dict[str, Any]:
    """The card's YAML: license only as the user chose it; base_model only where the target has a Hub id."""
    matter: dict[str, Any] = {"library_name": "headtrain"}
    if license:
        matter["license"] = license
    if _on_hub(metadata.target.name):
        matter["base_model"] = metadata.target.name
    matter["tags"] = ["speculative-decoding", "draft-head", metadata.head.kind, "headtrain"]
    matter["pipeline_tag"] = "text-generation"
    return matter


def _on_hub(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not os.path.isdir(name)


def card_text(
    metadata: Metadata,
    engine: Engine,
    head_class: type[DraftHead],
    notes: list[str],
    draft: DraftTokens,
    license: str | None = None,
) -> str:
    """The whole card. draft: the drafted tokens of the launch command. Only what the metadata says, no dates and no
    local paths, so that two exports of one checkpoint have the same card wherever they lie."""
    target, head = metadata.target, metadata.head
    shape = target.target_shape()
    name = _shown(target.name)
    form, place = form_of(engine, head_class), target.name if _on_hub(target.name) else "TARGET"
    at = Launch(place, "THIS_FOLDER", draft.count, tuple(metadata.features.layers))
    launch = launch_command(engine, head_class, at)
    matter = yaml.safe_dump(front_matter(metadata, license), sort_keys=False, allow_unicode=True)
    trained = "trained" if metadata.imported is None else f"imported ({metadata.imported.layout}'s layout)"
    parts = [
        f"---\n{matter}---\n",
        f"# {head.kind} draft head for {name}\n",
        f"A draft head for speculative decoding, {trained} with headtrain and exported for {engine.title}. It proposes "
        f"tokens that {name} verifies: the output stays the target's own.\n",
        f"## Start\n\n```\n{launch}\n```\n\nDrafted tokens: {draft.count}, {draft.why}.\n",
        _table(
            "Fits",
            ("item", "value"),
            [
                ("engine", f"{engine.title} {form.versions} (tried: {form.tested})"),
                ("target", name + (f" at revision {target.revision}" if target.revision else "")),
                ("target architecture", f"{shape.architecture}, {shape.num_layers} layers, hidden {shape.hidden_size}"),
                ("target dtype", target.dtype + (f", quantised: {target.quantization}" if target.quantization else "")),
                ("vocabulary", f"{shape.vocab_size}, drafted: {metadata.draft_vocab.size}"),
                ("tokenizer sha256", target.tokenizer[:16]),
                ("chat template sha256", (target.chat_template or "none")[:16]),
                ("features read", f"hidden_states {metadata.features.layers}" if metadata.features.layers else "final"),
                ("depth trained", str(head.depth or "not known")),
                (
                    "length trained",
                    f"{metadata.training.max_length} tokens" if metadata.training else "not known",
                ),
                ("head dtype", metadata.export.dtype if metadata.export else "float32"),
            ],
        ),
        "`headtrain check THIS_FOLDER --target TARGET` compares all of it with a target at hand.\n",
        _acceptance(metadata.acceptance),
        _training(metadata),
        "" if target.adapter else _others(engine, head_class, replace(at, folder="DIR")),
        _limits(metadata, engine, [*notes, *form.notes], license),
    ]
    return "\n".join(p for p in parts if p)


def write_card(
    folder: Path,
    metadata: Metadata,
    engine: Engine,
    head_class: type[DraftHead],
    notes: list[str],
    draft: DraftTokens,
    license: str | None = None,
) -> None:
    (folder / FILE).write_text(card_text(metadata, engine, head_class, notes, draft, license), encoding="utf-8")


def _shown(name: str) -> str:
    """A local path is shown by its last part: it means nothing elsewhere."""
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"## {title}\n", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _acceptance(routes: dict[str, RouteAcceptance]) -> str:
    if not routes:
        return "## Measured acceptance\n\nNot measured yet: `headtrain eval`.\n"
    depth = max(len(r.alpha) for r in routes.values())
    rows = []
    for route, r in routes.items():
        alphas = [f"{hit / offered:.2f} ({hit}/{offered})" if offered else "-" for hit, offered in r.alpha]
        speed = f"{r.speedup:.2f}x" if r.speedup is not None else "-"
        rows.append(
            (route, f"{r.tau:.2f}", *alphas, *["-"] * (depth - len(alphas)), speed, f"{r.k}", f"{r.temperature:g}")
            + (str(r.prompts), str(r.tokens))
        )
    header = ("route", "tau", *[f"alpha {k}" for k in range(1, depth + 1)], "speed", "k", "temperature")
    header += ("prompts", "tokens")
    legend = (
        "tau: mean tokens committed for each forward of the target, the bonus token included (a plain decoder has 1). "
        "alpha k: share of k-th drafted tokens accepted where all before were (accepted/offered). speed: decoding with "
        "the head against decoding without, one sequence at a time with headtrain's own decoding on the machine that "
        "measured; an engine on another machine gains otherwise, `-` was not timed.\n"
    )
    return _table("Measured acceptance", header, rows) + "\n" + legend


def _training(metadata: Metadata) -> str:
    training = metadata.training
    if training is None:
        return ""
    rows = [
        ("head settings", ", ".join(f"{k} {v}" for k, v in metadata.head.config.items() if v is not None)),
        ("optimizer steps", str(training.steps)),
        ("supervised tokens seen", str(training.tokens)),
        ("longest row", f"{training.max_length} tokens"),
        ("seed", str(training.seed)),
        ("recipe sha256", training.recipe_sha256[:16]),
        ("data sha256", training.data_sha256[:16]),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(training.versions.items())) or "-"),
    ]
    return _table("Training", ("item", "value"), rows)


def _others(engine: Engine, head_class: type[DraftHead], at: Launch) -> str:
    """How the head is started in the engines whose form this folder is not."""
    others = [e for e in ENGINES.values() if e.name not in (engine.name, NATIVE) and serves(e, head_class)]
    if not others:
        return ""
    lines = [f"# {e.title}: --engine {e.name}\n{launch_command(e, head_class, at)}" for e in others]
    return (
        "## Other engines\n\nTheir forms are written from this one (an engine that cannot serve just this head is "
        "refused): `headtrain import THIS_FOLDER --target TARGET --out head`, `headtrain export head --engine NAME "
        "--target TARGET --out DIR`, and\n\n```\n" + "\n\n".join(lines) + "\n```\n"
    )


def _limits(metadata: Metadata, engine: Engine, notes: list[str], license: str | None) -> str:
    lines = []
    if metadata.imported is not None:
        lines.append(
            "Imported from another tool's folder: what it was trained on, how long and how deep is not known here, nor "
            "whether it was trained on exactly these weights of the target."
        )
        lines += metadata.imported.notes
    shape = metadata.target.target_shape()
    if metadata.training and metadata.training.max_length < shape.max_positions:
        lines.append(
            f"Trained on rows of up to {metadata.training.max_length} tokens; the target serves {shape.max_positions} "
            "positions. Beyond the trained length acceptance is unmeasured."
        )
    lines.append(
        "Drafts for exactly this target's weights. With a fine-tuned or re-quantised target the output stays right but "
        "fewer tokens may be accepted: measure."
    )
    lines += [*notes, *(engine.notes if engine.name != NATIVE else ())]
    if not license:
        lines.append("No licence is stated: the target's and the training data's bind what is derived from them.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
