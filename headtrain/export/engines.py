"""The explicit table of engines: what each loads, since when, and how it is started.

A head says in ``DraftHead.dialects`` which forms it has (``heads.forms.Form``: versions, what was tried, notes,
source); an engine names the dialect that it reads. Nothing here knows a head's name.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path

from ..heads.base import DraftHead
from ..heads.catalog import HEADS
from ..heads.forms import Form, Launch

NATIVE = "headtrain"


class ExportError(ValueError):
    """An export that cannot be made or trusted; the message says what was found, what was expected, what to do."""


@dataclass(frozen=True)
class DraftTokens:
    """How many tokens a launch command drafts in a round, and why so many (words without local paths: for the card)."""

    count: int
    why: str


@dataclass(frozen=True)
class Engine:
    """name: what a user types, which is also the dialect of a head's forms that it reads. notes: true of every head in
    it; source: where they are from."""

    name: str
    title: str
    notes: tuple[str, ...]
    source: str

    @property
    def dialect(self) -> str:
        return self.name


_CASTS = "The engine casts the head to the target's dtype."
_SILENT = "leaves missing tensors at random values without a word: trust the measured acceptance, not the load."

ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine(
            name=NATIVE,
            title="headtrain",
            notes=("The project's own form: the trained tensors under their own names; also what warm_start reads.",),
            source="headtrain/heads/io.py",
        ),
        Engine(
            name="vllm",
            title="vLLM",
            notes=(_CASTS, f"vLLM {_SILENT}"),
            source="vllm/config/speculative.py of vLLM 0.32",
        ),
        Engine(
            name="speculators",
            title="vLLM through speculators",
            notes=(_CASTS, f"vLLM {_SILENT}"),
            source="vllm/transformers_utils/configs/speculators/ of vLLM 0.32",
        ),
        Engine(
            name="sglang",
            title="SGLang",
            notes=(_CASTS, f"SGLang {_SILENT}", "Never run here: it needs CUDA or Intel AMX."),
            source="sglang/srt/models/ and srt/speculative/ of SGLang 0.5.23",
        ),
        Engine(
            name="trtllm",
            title="TensorRT-LLM",
            notes=("Never run here: it needs CUDA.",),
            source="github.com/NVIDIA/TensorRT-LLM",
        ),
        Engine(
            name="hf",
            title="the reference code",
            notes=("The layout of the checkpoints that the papers' authors published.",),
            source="the papers' repositories",
        ),
    )
}


def _native_launch(form: Form, at: Launch) -> str:
    return f"headtrain eval {shlex.quote(at.folder)} --target {shlex.quote(at.target)} --k {at.k}"


_NATIVE_FORM = Form("", _native_launch, "schema 1", source="headtrain/heads/io.py", tested="this version")


def form_of(engine: Engine, head_class: type[DraftHead]) -> Form | None:
    """How the engine has this kind of head; None: it has not."""
    return _NATIVE_FORM if engine.name == NATIVE else head_class.dialects.get(engine.dialect)


def serves(engine: Engine, head_class: type[DraftHead]) -> bool:
    return form_of(engine, head_class) is not None


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
        works = head_class.instead_of_export or f"the nearest export that works is --engine {nearest}"
        raise ExportError(
            f"no known version of {engine.title} loads a {kind} head; {works}. {engine.title} loads: "
            f"{', '.join(kinds) or 'none of the heads here'}"
        )
    return engine


def engine_table() -> list[dict[str, str]]:
    """One row for each (engine, kind of head), for people: engine, head, served, versions, tested, notes, source."""
    rows = []
    for engine in ENGINES.values():
        for kind, head_class in HEADS.items():
            form = form_of(engine, head_class)
            rows.append(
                {
                    "engine": engine.name,
                    "head": kind,
                    "served": "yes" if form else "no",
                    "versions": form.versions if form else "",
                    "tested": form.tested if form else "",
                    "notes": " ".join(form.notes) if form else "",
                    "source": form.source if form else engine.source,
                }
            )
    return rows


def engines_load(target: str) -> bool:
    """Whether engines can load a target of this name: not a GGUF file, nor one inside a package."""
    return not target.startswith("package:") and not target.endswith(".gguf")


def launch_command(engine: Engine, head_class: type[DraftHead], at: Launch) -> str:
    """The engine's start command. A target that only this project loads is converted to a folder first."""
    form = form_of(engine, head_class)
    if form is None:
        raise ExportError(f"{engine.title} has no form of this head")
    if engine.name == NATIVE or form.with_target or engines_load(at.target):
        return form.launch(form, at)
    plain = f"targets/{Path(at.target.removeprefix('package:')).stem}"
    convert = f"headtrain convert {shlex.quote(at.target)} {shlex.quote(plain)}"
    return f"{convert} && {form.launch(form, Launch(plain, at.folder, at.k, at.layers))}"


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
_TRT = ("trtllm", "TensorRT-LLM")
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
    """The engines that ship a way of drafting; with a head, only those that draft so with its kind."""
    return [m for m in MODES if m.mode == mode and m.served and (head_class is None or _drafts(m, head_class))]


def _drafts(mode: Mode, head_class: type[DraftHead]) -> bool:
    form = form_of(ENGINES[mode.engine], head_class) if mode.engine in ENGINES else None
    return form is not None and mode.mode in form.modes


def modes_of(engine: str) -> list[str] | None:
    """The engine of ``MODES`` that serves an export in this form; None where none is listed."""
    served = "vllm" if engine == "speculators" else engine
    return [served] if any(m.engine == served for m in MODES) else None
