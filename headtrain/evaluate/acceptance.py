"""Acceptance by lossless decoding: every prompt once without and once with each drafter, batch 1, on one machine."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..config import digest
from ..decode.drafters import Drafter
from ..decode.generate import Acceptance, Generation, Round, generate
from .journal import Journal
from .progress import progress
from .replay import match, replay
from .results import ALL, DECODE, REPLAY, Difference, Evaluation, PromptResult, Side
from .sweep import Sweep

if TYPE_CHECKING:
    from ..target.model import Target

WARM_UP = 8  # new tokens of the untimed decodings at the start


@dataclass(frozen=True)
class Prompt:
    """ids: as a server feeds them, generation prompt included."""

    ids: list[int]
    route: str = ""
    id: str = ""


def load_prompts(
    tokenizer: Any,
    specs: Sequence[str],
    limit_per_route: int | None = None,
    *,
    system: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts from files, globs, folders or ``hub:NAME`` (see ``data.sources``), rendered with the generation prompt.
    A row that ends with an answer gives the prompt before that answer. The first ``limit_per_route`` of each route.

    Raises DataError for unreadable files and for rows that the template refuses.
    """
    from ..data.chat import Renderer
    from ..data.sources import read_conversations

    renderer, taken, prompts = Renderer(tokenizer, template_kwargs), Counter(), []
    for conversation in read_conversations(list(specs), system=system)[0]:
        if limit_per_route is not None and taken[conversation.route] >= limit_per_route:
            continue
        taken[conversation.route] += 1
        messages = conversation.messages
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        asked = changed(conversation, messages=messages, verbatim=False)
        prompts.append(Prompt(renderer.prompt_ids(asked), route_name(conversation.route), _text(conversation.id)))
    return prompts


def route_name(route: str) -> str:
    """As reports have it: never empty, never the name of the total."""
    return f"{ALL} (route)" if route == ALL else _text(route) or "other"


def _text(name: str) -> str:
    """Without lone surrogates, which JSON can hold and no file can."""
    return name.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Case:
    """k: the depth of its drafts. replay: find the rounds from one batched pass (chains at temperature 0)."""

    drafter: Drafter
    k: int
    temperature: float = 0.0
    replay: bool = False


@dataclass(frozen=True)
class Settings:
    """What all cases share. eos_ids: None for the target's own. acceptance: typical is not lossless, and for
    temperatures above 0."""

    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    seed: int = 0
    eos_ids: Collection[int] | None = None
    acceptance: Acceptance = "lossless"


def measure(
    target: Target,
    cases: Sequence[Case],
    prompts: Sequence[Prompt],
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    *,
    journal: Path | None = None,
    quiet: bool = False,
) -> Sweep:
    """Decode every prompt plainly and with every case, batch 1, and record what happened.

    The decodings of a prompt follow each other, in an order that rotates from prompt to prompt, so that a machine that
    grows slower or warmer hits all alike; short untimed decodings come first. journal: a file that each finished
    prompt is appended to; an interrupted measurement of the same cases and prompts, on the same machine, goes on from
    there. It is left to the caller, who removes it once the results are safe. Prompts longer than the target's context
    are left out, as a server refuses them, and named in ``Sweep.skipped``. Raises ValueError for no prompts, or none
    that fits, a draft that a drafter cannot make, or a replay of anything but greedy chains.
    """
    if not prompts:
        raise ValueError("no prompts to evaluate")
    if not cases:
        raise ValueError("no drafter to evaluate")
    context = target.shape.max_positions
    skipped = [f"{p.id or number} ({len(p.ids):,} tokens)" for number, p in enumerate(prompts) if len(p.ids) > context]
    if len(skipped) == len(prompts):
        raise ValueError(f"every prompt is longer than the target's context of {context:,} tokens: {_some(skipped)}")
    for case in cases:
        case.drafter.check(case.k, context)
        if case.replay and (case.temperature > 0 or case.drafter.tree):
            raise ValueError("replay answers greedy chains only: use decoding for trees and for temperatures above 0")
        if settings.acceptance == "typical" and case.temperature == 0:
            raise ValueError("typical acceptance is for temperatures above 0: leave temperature 0 out")
    # numbers stay those of the whole list: they are in the results' names and in the seeds
    fitting = [(number, p) for number, p in enumerate(prompts) if len(p.ids) <= context]
    run = _Measurement(target, cases, settings)
    sweep = Sweep(describe_target(target), versions(target), [run.empty(case) for case in cases], skipped)
    for case in sweep.cases:
        case.target, case.versions = sweep.target, sweep.versions
    asked = [[c.drafter, c.settings] for c in sweep.cases]
    key = digest([sweep.target, sweep.versions, asked, [[p.ids, p.route] for p in prompts]])
    with Journal(journal, key) as done, progress(len(fitting), "decoding", quiet) as advance:
        if len(done) < len(fitting):
            run.warm_up(fitting[0][1])
        for at, (number, prompt) in enumerate(fitting):
            if at >= len(done):
                done.append([result.to_dict() for result in run.prompt(number, prompt)])
            for case, record in zip(sweep.cases, done[at], strict=True):
                case.results.append(PromptResult.from_dict(record))
            advance()
    return sweep


def _some(names: Sequence[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")


class _Measurement:
    def __init__(self, target: Target, cases: Sequence[Case], settings: Settings) -> None:
        self.target, self.cases, self.settings = target, cases, settings

    def empty(self, case: Case) -> Evaluation:
        shared = self.settings
        settings = {
            "k": case.k,
            "tree": case.drafter.tree,
            "temperature": case.temperature,
            "top_p": shared.top_p,
            "top_k": shared.top_k,
            "max_new_tokens": shared.max_new_tokens,
            "seed": shared.seed,
            "eos_ids": sorted(self.target.eos_ids if shared.eos_ids is None else shared.eos_ids),
            "mode": REPLAY if case.replay else DECODE,
            "acceptance": shared.acceptance,
        }
        return Evaluation({}, case.drafter.describe(), settings, {})

    def decode(
        self, prompt: Prompt, number: int, case: Case | None, temperature: float, limit: int | None = None
    ) -> Generation:
        shared = self.settings
        return generate(
            self.target,
            prompt.ids,
            drafter=None if case is None else case.drafter,
            k=1 if case is None else case.k,
            max_new_tokens=shared.max_new_tokens if limit is None else limit,
            temperature=temperature,
            top_p=shared.top_p,
            top_k=shared.top_k,
            seed=shared.seed + number,
            eos_ids=shared.eos_ids,
            acceptance="lossless" if case is None else shared.acceptance,
        )

    def warm_up(self, prompt: Prompt) -> None:
        limit = min(WARM_UP, self.settings.max_new_tokens)
        for case in (None, *(c for c in self.cases if not c.replay)):
            self.decode(prompt, 0, case, 0.0 if case is None else case.temperature, limit)

    def prompt(self, number: int, prompt: Prompt) -> list[PromptResult]:
        """One result for each case."""
        results: dict[int, PromptResult] = {}
        for temperature in dict.fromkeys(case.temperature for case in self.cases):
            timed = [n for n, c in enumerate(self.cases) if c.temperature == temperature and not c.replay]
            turn = [None, *timed]
            at = number % len(turn)
            outs = {
                n: self.decode(prompt, number, None if n is None else self.cases[n], temperature)
                for n in turn[at:] + turn[:at]
            }
            plain = outs.pop(None)
            for n, out in outs.items():
                difference = first_difference(plain, out) if temperature == 0 else None
                results[n] = self._result(number, prompt, plain, Side.of(out), out.rounds, difference)
            for n, rounds in self._replayed(prompt, plain, temperature).items():
                side = Side(len(plain.tokens), plain.stop, 0.0, 0.0, 0.0, 0.0)
                results[n] = self._result(number, prompt, plain, side, rounds, None)
        return [results[n] for n in range(len(self.cases))]

    def _replayed(self, prompt: Prompt, plain: Generation, temperature: float) -> dict[int, list[Round]]:
        """One pass for each drafter serves all its chain lengths."""
        wanted = [n for n, c in enumerate(self.cases) if c.replay and c.temperature == temperature]
        deepest: dict[int, int] = {}
        for n in wanted:
            drafter = id(self.cases[n].drafter)
            deepest[drafter] = max(deepest.get(drafter, 0), self.cases[n].k)
        drafters = {id(c.drafter): c.drafter for c in self.cases}
        found = {i: match(self.target, drafters[i], prompt.ids, plain.tokens, k) for i, k in deepest.items()}
        ends = {"limit": self.settings.max_new_tokens, "context": self.target.shape.max_positions}
        return {
            n: replay(found[id(self.cases[n].drafter)], self.cases[n].k, prompt=len(prompt.ids), **ends) for n in wanted
        }

    @staticmethod
    def _result(
        number: int,
        prompt: Prompt,
        plain: Generation,
        side: Side,
        rounds: list[Round],
        difference: Difference | None,
    ) -> PromptResult:
        return PromptResult(
            id=prompt.id or str(number),
            route=prompt.route,
            prompt_tokens=len(prompt.ids),
            plain=Side.of(plain),
            speculative=side,
            rounds=rounds,
            difference=difference,
        )


def first_difference(plain: Generation, speculative: Generation) -> Difference | None:
    a, b = plain.tokens, speculative.tokens
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if at == len(a) == len(b):
        return None
    gaps = [side.gaps[at] for side in (plain, speculative) if at < len(side.gaps)]
    return Difference(
        position=at,
        plain=a[at] if at < len(a) else None,
        speculative=b[at] if at < len(b) else None,
        gap=min(gaps, default=math.nan),
    )


def describe_target(target: Target) -> dict[str, Any]:
    """folder: of a converted target, whose name is what it was converted from."""
    from ..target.load import SOURCE_FILE

    identity, folder = target.identity, target.folder
    return {
        "name": identity.name,
        "folder": str(folder) if folder is not None and (folder / SOURCE_FILE).is_file() else None,
        "revision": identity.revision,
        "dtype": identity.dtype,
        "weights": identity.weights,
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "model_type": target.shape.model_type,
    }


def versions(target: Target) -> dict[str, Any]:
    import transformers

    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "headtrain": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
    }
