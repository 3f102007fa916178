"""Acceptance as a running server counted it: its Prometheus text before and after a piece of load.

vLLM counts drafts, drafted tokens, accepted tokens, and accepted tokens by position (``vllm:spec_decode_*``; the
families exist only where speculation is on). SGLang counts verification calls (``sglang:spec_verify_calls``, in newer
versions) and beside that shows gauges, which are averages over its last logging window and not over ours.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

Key = tuple[str, tuple[tuple[str, str], ...]]  # family without _total, sorted labels
Growth = dict[Key, float] | None  # by series; None: the server has no such family

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\"": '"', r"\\": "\\", r"\n": "\n"}

# what is read, by engine; families without the suffix _total
COUNTERS = {
    "vllm": {
        "requests": "vllm:request_success",
        "tokens": "vllm:generation_tokens",
        "drafts": "vllm:spec_decode_num_drafts",
        "drafted": "vllm:spec_decode_num_draft_tokens",
        "accepted": "vllm:spec_decode_num_accepted_tokens",
        "positions": "vllm:spec_decode_num_accepted_tokens_per_pos",
    },
    "sglang": {
        "requests": "sglang:num_requests",
        "tokens": "sglang:generation_tokens",
        "verifications": "sglang:spec_verify_calls",
    },
}
SGLANG_GAUGES = {"length": "sglang:spec_accept_length", "rate": "sglang:spec_accept_rate"}
SGLANG_PLANNED = "sglang:spec_num_draft_tokens"  # a gauge; 0 without speculation
START = "process_start_time_seconds"
LARGEST = 2.0**53  # a float above it no longer counts by ones
DEEPEST = 1000  # drafted tokens a round; a larger position is none


@dataclass(frozen=True)
class Acceptance:
    """What the server's counters say about one window of time.

    state: "measured"; "off", the server does not speculate; "unknown", see ``notes``. alpha[j-1]: [accepted, offered]
    of the j-th drafted token where all before were accepted. tau: tokens committed for each verification, the
    target's own token included (1 + accepted/drafts). tau_all: the same over every decoding step, those without a
    draft (an n-gram that found nothing) included; NaN where the server's counters are not this load's alone. gauge:
    the server's own average, over a window that it chose. notes: whatever a reader must know.
    """

    state: Literal["measured", "off", "unknown"]
    engine: str = ""
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    alpha: list[tuple[int, int]] = field(default_factory=list)
    tau: float = math.nan
    tau_all: float = math.nan
    gauge: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Acceptance:
        taus = {name: math.nan if data[name] is None else data[name] for name in ("tau", "tau_all")}
        return cls(**{**data, **taus, "alpha": [tuple(pair) for pair in data["alpha"]]})


@dataclass(frozen=True)
class Sent:
    """What this client did in the window: requests sent, answered in full, and the tokens of those answers."""

    requests: int
    answered: int
    tokens: int


def parse(text: str) -> dict[Key, float]:
    """Every sample of a Prometheus text page; lines in another form are passed over."""
    out: dict[Key, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line) if not line.startswith("#") else None
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        pairs = sorted(
            (k, re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), v)) for k, v in _LABEL.findall(labels or "")
        )
        out[name.removesuffix("_total"), tuple(pairs)] = number
    return out


@dataclass(frozen=True)
class Snapshot:
    """One reading of /metrics."""

    samples: dict[Key, float]

    @classmethod
    def of(cls, text: str) -> Snapshot:
        return cls(parse(text))

    @property
    def engine(self) -> str:
        """ "vllm", "sglang", or "" for a page of something else."""
        prefixes = {name.partition(":")[0] for name, _ in self.samples if ":" in name}
        return next((engine for engine in COUNTERS if engine in prefixes), "")

    def counters(self) -> dict[Key, float]:
        """The series that are read as counters, for ``restarted`` and for telling when they have settled."""
        names = set(COUNTERS.get(self.engine, {}).values())
        return {key: value for key, value in self.samples.items() if key[0] in names}

    def series(self, family: str) -> dict[Key, float]:
        return {key: value for key, value in self.samples.items() if key[0] == family}


def restarted(before: Snapshot, after: Snapshot) -> str | None:
    """What shows that an engine began anew in between, or None. Each series is looked at alone: a sum over engines
    can grow although one of them restarted."""
    now = after.counters()
    for key, value in before.counters().items():
        if now.get(key, 0.0) < value:
            found = f"fell to {now[key]:g}" if key in now else "is gone"
            return f"{_show(key)} was {value:g} and {found}"
    started = {key: value for key, value in before.series(START).items() if after.samples.get(key, value) != value}
    return next((f"{_show(key)} changed" for key in started), None)


def acceptance(before: Snapshot | str, after: Snapshot | str, sent: Sent) -> Acceptance:
    """Acceptance between two readings, summed over engines and every other label. A string in place of a reading
    says why there is none. Never raises: what cannot be known is said in ``notes``."""
    for reading in (before, after):
        if isinstance(reading, str):
            return Acceptance("unknown", notes=[reading])
    engine = after.engine
    if not engine:
        return Acceptance("unknown", notes=["/metrics has no family of vLLM or SGLang"])
    if what := restarted(before, after):
        return Acceptance("unknown", engine, notes=[f"the server restarted during this load: {what}"])
    grown = {role: _growth(before, after, family) for role, family in COUNTERS[engine].items()}
    for series in grown.values():
        for key, value in (series or {}).items():
            if not 0 <= value < LARGEST:  # so that NaN, too, is refused
                return Acceptance("unknown", engine, notes=[f"{_show(key)} grew by {value:g}, which is no count"])
    foreign = _foreign(grown, sent)
    return (_vllm if engine == "vllm" else _sglang)(grown, after, sent, foreign)


def _growth(before: Snapshot, after: Snapshot, family: str) -> Growth:
    now = after.series(family)
    return {key: value - before.samples.get(key, 0.0) for key, value in now.items()} if now else None


def _sum(growth: Growth) -> int:
    return round(sum(growth.values())) if growth else 0


def _foreign(grown: dict[str, Growth], sent: Sent) -> str | None:
    """A sign that the counters are not this load's alone, or None. Tokens are compared only where every request was
    answered: those of a broken-off answer are counted by the server and unknown here."""
    if grown["requests"] is None:
        return "the server counts no requests: other traffic cannot be told apart"
    counted, tokens = _sum(grown["requests"]), _sum(grown["tokens"])
    if counted > sent.requests:
        return f"other traffic is in these counts: the server finished {counted} requests, {sent.requests} were sent"
    if counted < sent.answered:
        return (
            f"the server counted {counted} requests of the {sent.answered} it answered: are there several servers "
            "behind this address?"
        )
    if grown["tokens"] is not None and sent.answered == sent.requests and tokens > sent.tokens:
        return f"other traffic is in these counts: the server made {tokens} tokens, {sent.tokens} were received"
    return None


def _vllm(grown: dict[str, Growth], after: Snapshot, sent: Sent, foreign: str | None) -> Acceptance:
    notes = [foreign] if foreign else []
    if grown["drafts"] is None:
        return Acceptance("off", "vllm", notes=notes)
    drafts, drafted, accepted = (_sum(grown[role]) for role in ("drafts", "drafted", "accepted"))
    if not drafts:
        return Acceptance("measured", "vllm", notes=[*notes, "speculation is on, but nothing was drafted"])
    alpha = _alpha(drafts, grown["positions"])
    if not alpha:
        notes.append("alpha unknown: the server does not count accepted tokens by positions 0, 1, ...")
    elif drafted != drafts * len(alpha):
        notes.append(
            f"some drafts were shorter than {len(alpha)} tokens ({drafted} tokens in {drafts} drafts) and the server "
            "does not say which: alpha past depth 1 is a lower bound"
        )
    # every decoding step yields one token of the target and the accepted ones; a request's first token is prefill's
    steps = sent.tokens - sent.answered - accepted
    alone = foreign is None and sent.answered == sent.requests and steps > 0
    return Acceptance(
        "measured",
        "vllm",
        drafts,
        drafted,
        accepted,
        alpha,
        tau=1 + accepted / drafts,
        tau_all=1 + accepted / steps if alone else math.nan,
        notes=notes,
    )


def _alpha(drafts: int, grown: Growth) -> list[tuple[int, int]]:
    """Empty where the positions are missing or no numbers."""
    by_position: dict[int, float] = {}
    for (_, labels), value in (grown or {}).items():
        label = dict(labels).get("position", "")
        if not re.fullmatch("[0-9]{1,9}", label) or int(label) >= DEEPEST:
            return []
        by_position[int(label)] = by_position.get(int(label), 0.0) + value
    reached = [drafts, *[round(by_position.get(j, 0)) for j in range(max(by_position, default=-1) + 1)]]
    return [(now, offered) for offered, now in zip(reached, reached[1:], strict=False)]


def _sglang(grown: dict[str, Growth], after: Snapshot, sent: Sent, foreign: str | None) -> Acceptance:
    notes = [foreign] if foreign else []
    gauge = {}
    for role, family in SGLANG_GAUGES.items():
        values = [value for value in after.series(family).values() if 0 < value < math.inf]  # an idle rank shows 0
        if values:
            gauge[role] = sum(values) / len(values)
    if gauge:
        notes.append("SGLang's gauges are averages over its last logging window, not over this load")
    verifications = _sum(grown["verifications"])
    if not verifications:
        if not gauge and (planned := after.series(SGLANG_PLANNED)) and not any(planned.values()):
            return Acceptance("off", "sglang", notes=notes)
        notes.append(
            "SGLang counted no verification (versions without sglang:spec_verify_calls do not) "
            + ("" if gauge else "and shows no accept length: no speculation, or too little traffic for its log")
        )
        return Acceptance("unknown", "sglang", gauge=gauge, notes=notes)
    tokens = _sum(grown["tokens"]) - _sum(grown["requests"])  # a request's first token is prefill's
    tau = tokens / verifications
    notes.append("tau from tokens and verifications: what was accepted past the end of an answer is not in it")
    return Acceptance(
        "measured",
        "sglang",
        drafts=verifications,
        accepted=max(0, tokens - verifications),
        tau=tau,
        tau_all=math.nan if foreign else tau,
        gauge=gauge,
        notes=notes,
    )


def _show(key: Key) -> str:
    name, labels = key
    inside = ",".join(f'{k}="{v}"' for k, v in labels if k != "model_name")
    return f"{name}{{{inside}}}" if inside else name
