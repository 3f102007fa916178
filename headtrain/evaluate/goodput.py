"""What a load test of a server recorded, and what follows: percentiles, goodput, and one run against another.

Only the records are kept; everything else is computed from them, so that a stored run can be judged again under
another SLO.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .prometheus import Acceptance

ALL = "all"
FORMAT = 1
SHARES = (0.5, 0.9, 0.99)
# what must be equal before two runs can be compared
SAME = ("prompts_sha256", "prompts", "concurrency", "requests", "max_tokens", "temperature", "top_p", "top_k", "seed")


class ServerError(ValueError):
    """The server cannot be measured: not there, wrong address, key or model, no usage counts, or a load or SLO that
    makes no sense."""


def route_name(route: str) -> str:
    """As it stands in records: ``ALL`` is the total's name, and a route of that name would be counted as the total."""
    return f"{ALL} (route)" if route == ALL else whole(route)


def whole(text: str) -> str:
    """Half of a UTF-16 pair, which JSON can carry and no file can hold, becomes U+FFFD; two halves become one."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True)
class Record:
    """One request. Seconds from its sending: ``ttft`` to the first chunk with text, ``latency`` to the end of the
    stream. tpot: seconds per output token after the first. tokens, prompt_tokens: as the server's usage block counts
    them. failure: None, or its kind, with ``detail``; the measures of a failed request are None."""

    index: int
    prompt: str
    route: str
    failure: str | None = None
    detail: str = ""
    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    finish: str | None = None
    text: str = ""


@dataclass
class Level:
    """All requests at one concurrency. seconds: from the first request to the last answer. peak: the most requests
    that were under way at once. complete: False where the run was interrupted inside."""

    concurrency: int
    seconds: float = 0.0
    peak: int = 0
    complete: bool = False
    records: list[Record] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance("unknown", notes=["interrupted"]))


@dataclass
class ServerRun:
    """settings: of the load; server: url, model, and what the server tells of itself; versions: of this software.
    interrupted: not every level was measured."""

    settings: dict[str, Any]
    server: dict[str, Any]
    versions: dict[str, Any]
    levels: list[Level] = field(default_factory=list)
    interrupted: bool = False

    @property
    def routes(self) -> list[str]:
        return sorted({r.route for level in self.levels for r in level.records})

    @property
    def requests(self) -> int:
        return sum(len(level.records) for level in self.levels)

    @property
    def failed(self) -> list[Record]:
        """In the order of the levels and of sending."""
        return [r for level in self.levels for r in level.records if r.failure is not None]

    def require_answers(self) -> None:
        """Raises ServerError, naming the first failure, where requests were sent and none was answered."""
        if self.requests and len(self.failed) == self.requests:
            first = self.failed[0]
            raise ServerError(
                f"{self.server.get('url')}: none of {self.requests} requests was answered; the first, {first.prompt}, "
                f"failed with {first.failure}: {first.detail}"
            )

    def to_dict(self) -> dict[str, Any]:
        return _clean({"format": FORMAT, "kind": "server", **asdict(self)})

    @classmethod
    def from_dict(cls, data: Any) -> ServerRun:
        """Raises ValueError for another kind or format of file, or a damaged one."""
        found = (data.get("kind"), data.get("format")) if isinstance(data, dict) else type(data).__name__
        if found != ("server", FORMAT):
            raise ValueError(f"not a server measurement of format {FORMAT}: found (kind, format) {found}")
        try:
            levels = [
                Level(
                    **{
                        **level,
                        "records": [Record(**{**r, "route": route_name(r["route"])}) for r in level["records"]],
                        "acceptance": Acceptance.from_dict(level["acceptance"]),
                    }
                )
                for level in data["levels"]
            ]
            settings = {"top_p": 1.0, "top_k": 0, **data["settings"]}  # runs before these were sent
            run = cls(settings, {**data["server"]}, {**data["versions"]}, levels, data["interrupted"])
            summaries(run, Slo(1.0, 1.0)), compare(run, run, Slo())  # whatever is read of it later can be read
            return run
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a damaged server measurement: {type(error).__name__}: {error}") from None


def _clean(value: Any) -> Any:
    """JSON has no NaN or infinity, and UTF-8 no half characters."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds for each request; None: no limit on that measure. Raises ServerError for a limit that
    is not above 0."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("TPOT", self.tpot_ms), ("TTFT", self.ttft_ms)):
            if limit is not None and not 0 < limit < math.inf:
                raise ServerError(f"a limit of {limit:g} ms on the {name}: expected milliseconds above 0")

    def __bool__(self) -> bool:
        return self.tpot_ms is not None or self.ttft_ms is not None

    def met(self, record: Record) -> bool:
        """A failed request meets nothing. An answer of one token has no time between tokens to be too long."""
        if record.failure is not None:
            return False
        in_time = self.ttft_ms is None or record.ttft * 1000 <= self.ttft_ms
        return in_time and (self.tpot_ms is None or record.tpot is None or record.tpot * 1000 <= self.tpot_ms)


@dataclass(frozen=True)
class Summary:
    """One route at one concurrency. ttft, tpot: seconds at the shares of ``SHARES``, NaN without a value.
    tokens_per_second, requests_per_second (met the SLO), share (of all that were sent): None without an SLO."""

    concurrency: int
    route: str
    requests: int
    failures: dict[str, int]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    tokens_per_second: float
    requests_per_second: float | None
    share: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks (numpy's default); NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(level: Level, route: str = ALL, slo: Slo = Slo()) -> Summary:  # noqa: B008 (frozen)
    """Rates are over the whole level's seconds, since the routes run mixed; those of the routes add up to ALL's."""
    records = [r for r in level.records if route in (r.route, ALL)]
    good = [r for r in records if r.failure is None]
    tpots = [r.tpot for r in good if r.tpot is not None]
    met = sum(slo.met(r) for r in records)
    seconds = level.seconds or math.nan
    return Summary(
        concurrency=level.concurrency,
        route=route,
        requests=len(records),
        failures=dict(Counter(r.failure for r in records if r.failure is not None)),
        ttft=tuple(percentile([r.ttft for r in good], share) for share in SHARES),
        tpot=tuple(percentile(tpots, share) for share in SHARES),
        tokens_per_second=sum(r.tokens for r in good) / seconds,
        requests_per_second=met / seconds if slo else None,
        share=met / len(records) if slo and records else None,
    )


def summaries(run: ServerRun, slo: Slo) -> list[Summary]:
    """For each level the routes and ``ALL``; ``ALL`` alone where there is but one route."""
    routes = run.routes if len(run.routes) > 1 else []
    return [summarise(level, route, slo) for level in run.levels for route in [*routes, ALL]]


@dataclass(frozen=True)
class Comparison:
    """Run against baseline, one route at one concurrency. tpot: median of the baseline / median of the run, above 1
    where the run is faster. tokens: rates, run / baseline. goodput: the same, NaN where the baseline had none;
    goodputs: requests/s of (baseline, run); both None without an SLO. identical: greedy texts that are equal, of
    ``compared`` that both runs answered; None at temperature > 0."""

    concurrency: int
    route: str
    tpot: float
    tokens: float
    goodput: float | None
    goodputs: tuple[float, float] | None
    identical: int | None
    compared: int


def differences(settings: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """One line, with both values, for each setting that makes two runs incomparable."""
    return [
        f"{name}: {settings.get(name)!r} here, {baseline.get(name)!r} in the baseline"
        for name in SAME
        if settings.get(name) != baseline.get(name)
    ]


def compare(run: ServerRun, baseline: ServerRun, slo: Slo) -> list[Comparison]:
    """Levels that both runs completed. Raises ValueError where the two did not run the same load."""
    if lines := differences(run.settings, baseline.settings):
        raise ValueError("not the same load as the baseline's:\n  " + "\n  ".join(lines))
    others = {level.concurrency: level for level in baseline.levels if level.complete}
    out = []
    routes = run.routes if len(run.routes) > 1 else []
    for level in run.levels:
        other = others.get(level.concurrency)
        if other is None or not level.complete:
            continue
        texts = {r.index: r.text for r in other.records if r.failure is None}
        for route in [*routes, ALL]:
            mine, theirs = summarise(level, route, slo), summarise(other, route, slo)
            both = [r for r in level.records if r.failure is None and r.index in texts and route in (r.route, ALL)]
            out.append(
                Comparison(
                    level.concurrency,
                    route,
                    tpot=_ratio(theirs.tpot[0], mine.tpot[0]),
                    tokens=_ratio(mine.tokens_per_second, theirs.tokens_per_second),
                    goodput=_ratio(mine.requests_per_second, theirs.requests_per_second) if slo else None,
                    goodputs=(theirs.requests_per_second, mine.requests_per_second) if slo else None,
                    identical=sum(r.text == texts[r.index] for r in both) if run.settings["temperature"] == 0 else None,
                    compared=len(both),
                )
            )
    return out


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
