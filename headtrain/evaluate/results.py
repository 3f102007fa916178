"""What an evaluation measured: the record of each prompt, and every number that follows from these records.

Only the records are kept and written; tau, alpha, rates and intervals are computed from them, so that a file can be
summed up again, or joined with another, without a loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..decode.generate import Generation, Round
from ..metadata import RouteAcceptance

ALL = "all"
RESAMPLES = 2000
FEWEST = 3  # prompts of an interval: resampling one prompt would claim certainty

DECODE, REPLAY, STORED = "decode", "replay", "stored"  # how a case was measured, see ``Evaluation.settings``


@dataclass(frozen=True)
class Side:
    """One decoding of one prompt: its new tokens, why it stopped, and the seconds of each phase (see
    ``generate.Times``)."""

    tokens: int
    stop: str
    prefill: float
    draft: float
    verify: float
    other: float

    @classmethod
    def of(cls, out: Generation) -> Side:
        return cls(len(out.tokens), out.stop, **asdict(out.times))

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part: the 0-based position among the new tokens, both tokens (None: that text was over),
    and ``gap``, the distance between the best two logits there, the smaller of the two decodings'. A gap within the
    dtype's rounding is a tie that the order of summation decided; a larger one is a fault."""

    position: int
    plain: int | None
    speculative: int | None
    gap: float

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Difference:
        """JSON has no NaN: an unknown gap comes as null."""
        return cls(**{**data, "gap": math.nan if data["gap"] is None else float(data["gap"])})


@dataclass(frozen=True)
class PromptResult:
    """difference: None where the texts are the same, and at temperature > 0, where nothing can be compared."""

    id: str
    route: str
    prompt_tokens: int
    plain: Side
    speculative: Side
    rounds: list[Round]
    difference: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rounds": [[x.drafted, x.accepted, x.committed, x.nodes] for x in self.rounds]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PromptResult:
        """Raises KeyError, TypeError for a damaged record."""
        more = {
            "plain": Side(**data["plain"]),
            "speculative": Side(**data["speculative"]),
            "rounds": [Round(*x) for x in data["rounds"]],
            "difference": None if data["difference"] is None else Difference.from_dict(data["difference"]),
        }
        return cls(**{**data, **more})


@dataclass(frozen=True)
class RouteSummary:
    """Pooled over a route's prompts (sums over sums, so that long answers weigh more).

    tau: tokens committed for each target forward after prefill, the target's own token included; NaN without rounds.
    tau_low, tau_high: a 95 % interval by resampling prompts, NaN for fewer than ``FEWEST``. alpha[j-1]: [accepted,
    offered] of the j-th drafted token where all before were accepted; cumulative: the running product of their
    ratios. nodes: drafted tokens a round. Rates: tokens after the first, by seconds after prefill. shares: of the
    speculative decode time, by phase. plain_step, draft_step, verify_step: seconds of one plain forward, of one
    round's drafting and of its verification. What was not timed (replay) is NaN. identical: of ``prompts`` greedy
    texts (None where nothing was compared).
    """

    route: str
    prompts: int
    tokens: int
    rounds: int
    tau: float
    tau_low: float
    tau_high: float
    alpha: list[tuple[int, int]]
    cumulative: list[float]
    plain_rate: float
    speculative_rate: float
    speedup: float
    shares: dict[str, float]
    identical: int | None
    nodes: float = math.nan
    plain_step: float = math.nan
    draft_step: float = math.nan
    verify_step: float = math.nan


@dataclass
class Evaluation:
    """One case: a drafter, drafting one shape at one temperature.

    target, drafter: who was measured. settings: k (depth), tree ("" for chains), temperature, top_p, top_k,
    max_new_tokens, seed, eos_ids, acceptance ("lossless", "typical"), and mode: "decode" (decoded and timed), "replay"
    (the rounds that decoding would have had, from one batched pass: not timed), "stored" (replayed on stored rows).
    versions: of the software and the machine.
    """

    target: dict[str, Any]
    drafter: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]
    results: list[PromptResult] = field(default_factory=list)
    _summaries: dict[str, RouteSummary] = field(default_factory=dict, repr=False, compare=False)
    _summarised: int = field(default=0, repr=False, compare=False)  # results that the summaries are of

    @property
    def routes(self) -> list[str]:
        """In order of first appearance; the overall summary is ``ALL``."""
        return list(dict.fromkeys(r.route for r in self.results))

    def summary(self, route: str = ALL) -> RouteSummary:
        if self._summarised != len(self.results):
            self._summaries, self._summarised = {}, len(self.results)
        if not self._summaries:
            groups: dict[str, list[PromptResult]] = {route: [] for route in self.routes}
            for r in self.results:
                groups[r.route].append(r)
            groups[ALL] = self.results
            self._summaries = {name: summarise(name, group, self.settings) for name, group in groups.items()}
        return self._summaries[route]

    @property
    def timed(self) -> bool:
        return self.settings["mode"] == DECODE

    @property
    def shape(self) -> str:
        """What is drafted in a round, for people."""
        return self.settings["tree"] or f"chain of {self.settings['k']}"

    def summaries(self) -> list[RouteSummary]:
        """One for each route, and ``ALL`` last."""
        return [self.summary(route) for route in [*self.routes, ALL]]

    @property
    def differences(self) -> list[PromptResult]:
        return [r for r in self.results if r.difference is not None]

    @property
    def lossless(self) -> bool:
        """False: typical acceptance, whose text is not distributed as the target's."""
        return self.settings.get("acceptance", "lossless") == "lossless"

    def acceptance(self) -> dict[str, RouteAcceptance]:
        """For headtrain.json, which holds what lossless decoding accepts: nothing of stored rows. Routes where nothing
        was decoded past the first token are left out."""
        out: dict[str, RouteAcceptance] = {}
        if not self.lossless or self.settings["mode"] == STORED:
            return out
        for s in self.summaries():
            if s.rounds:
                out[s.route] = RouteAcceptance(
                    k=self.settings["k"],
                    temperature=self.settings["temperature"],
                    tau=s.tau,
                    alpha=s.alpha,
                    tokens=s.tokens,
                    prompts=s.prompts,
                    speedup=s.speedup if math.isfinite(s.speedup) else None,
                )
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON without what a ``Sweep`` shares (target, versions). ``summary`` follows from ``results`` and is there
        for readers; NaN is null."""
        return clean(
            {
                "drafter": self.drafter,
                "settings": self.settings,
                "summary": [asdict(s) for s in self.summaries()],
                "results": [r.to_dict() for r in self.results],
            }
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any], target: dict[str, Any], versions: dict[str, Any]) -> Evaluation:
        """Raises ValueError for a damaged record."""
        try:
            results = [PromptResult.from_dict(r) for r in data["results"]]
            case = cls(target, data["drafter"], data["settings"], versions, results)
            case.check()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a damaged evaluation: {type(error).__name__}: {error}") from None
        return case

    def check(self) -> None:
        """Raises ValueError, KeyError or TypeError for a record that no measurement leaves."""
        for name in ("kind", "family", "label"):
            if not isinstance(self.drafter[name], str):
                raise ValueError(f"a damaged evaluation: drafter.{name} is {self.drafter[name]!r}, expected a text")
        k, t = self.settings["k"], self.settings["temperature"]
        if not isinstance(k, int) or k < 1 or not 0 <= t < math.inf:
            raise ValueError(f"a damaged evaluation: k {k!r}, temperature {t!r}")
        for name in ("tree", "mode"):
            if not isinstance(self.settings[name], str):
                raise ValueError(f"a damaged evaluation: settings.{name} is {self.settings[name]!r}, expected a text")
        for r in self.results:
            if not (isinstance(r.route, str) and isinstance(r.id, str)):
                raise ValueError(f"a damaged evaluation: a result of route {r.route!r}, id {r.id!r}")
            for x in r.rounds:
                counts = (x.drafted, x.accepted, x.committed, x.nodes)
                sound = all(isinstance(n, int) and n >= 0 for n in counts)
                if not sound or x.accepted > x.drafted or not x.accepted <= x.committed <= x.accepted + 1:
                    raise ValueError(f"a damaged evaluation: {r.id} has a round of {counts}, which cannot be")
            for side in (r.plain, r.speculative):
                if side.tokens < 0 or any(not 0 <= s < math.inf for s in (side.prefill, side.decode)):
                    raise ValueError(f"a damaged evaluation: {r.id} has {side}")


def clean(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def alpha_counts(rounds: Sequence[Round], k: int) -> list[tuple[int, int]]:
    """[accepted, offered] for depths 1..k. The j-th token of a round was offered where it was drafted and all before
    it were accepted."""
    accepted, offered = [0] * (k + 2), [0] * (k + 2)
    for r in rounds:
        for j in range(1, min(r.accepted, k) + 1):
            accepted[j] += 1
        for j in range(1, min(r.drafted, r.accepted + 1, k) + 1):
            offered[j] += 1
    return list(zip(accepted[1 : k + 1], offered[1 : k + 1], strict=True))


def cumulative(alpha: Sequence[tuple[int, int]]) -> list[float]:
    """Running product of the ratios; zero from a depth that was never offered on."""
    out, product = [], 1.0
    for accepted, offered in alpha:
        product *= accepted / offered if offered else 0.0
        out.append(product)
    return out


def bootstrap_tau(results: Sequence[PromptResult], resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the pooled tau over prompts drawn with replacement; (NaN, NaN) for fewer than
    ``FEWEST`` prompts with rounds.

    The prompt is the unit, since rounds of one text are not independent.
    """
    pairs = [(sum(x.committed for x in r.rounds), len(r.rounds)) for r in results if r.rounds]
    if len(pairs) < FEWEST:
        return math.nan, math.nan
    table = torch.tensor(pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = table[torch.randint(len(pairs), (resamples, len(pairs)), generator=generator)].sum(1)
    low, high = (drawn[:, 0] / drawn[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def summarise(route: str, results: Sequence[PromptResult], settings: dict[str, Any]) -> RouteSummary:
    rounds = [x for r in results for x in r.rounds]
    low, high = bootstrap_tau(results)
    alpha = alpha_counts(rounds, settings["k"])
    seconds = {name: sum(getattr(r.speculative, name) for r in results) for name in ("draft", "verify", "other")}
    total = sum(seconds.values())
    plain_tokens, plain_seconds = sum(r.plain.tokens - 1 for r in results), sum(r.plain.decode for r in results)
    plain_rate = _ratio(plain_tokens, plain_seconds)
    rate = _ratio(sum(r.speculative.tokens - 1 for r in results), total)
    timed = settings["mode"] == DECODE
    compared = timed and settings["temperature"] == 0
    return RouteSummary(
        route=route,
        prompts=len(results),
        tokens=sum(r.speculative.tokens for r in results),
        rounds=len(rounds),
        tau=_ratio(sum(x.committed for x in rounds), len(rounds)),
        tau_low=low,
        tau_high=high,
        alpha=alpha,
        cumulative=cumulative(alpha),
        plain_rate=plain_rate,
        speculative_rate=rate,
        speedup=_ratio(rate, plain_rate),
        shares={name: _ratio(value, total) for name, value in seconds.items()},
        identical=sum(r.difference is None for r in results) if compared else None,
        nodes=_ratio(sum(x.nodes for x in rounds), len(rounds)),
        plain_step=_ratio(plain_seconds, plain_tokens) if plain_seconds else math.nan,
        draft_step=_ratio(seconds["draft"], len(rounds)) if timed else math.nan,
        verify_step=_ratio(seconds["verify"], len(rounds)) if timed else math.nan,
    )
