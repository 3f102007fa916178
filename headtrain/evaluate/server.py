"""Load on a running OpenAI-compatible server (vLLM, SGLang): time to first token, time per output token, acceptance.

The server is measured as its users see it, from outside; run it once with and once without speculation.
"""

# Why not GuideLLM (0.8): it brings its own server, fakers and process pools, mixes all prompts into one stream of
# text without routes, keeps no texts by prompt, and reads no counters between levels. httpx2 is here already
# (huggingface_hub), and one event loop suffices for the concurrency of one server.

from __future__ import annotations

import asyncio
import math
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import digest
from ..metadata import write_json
from .client import WARM_UP, ChatPrompt, Server, address
from .goodput import Level, ServerError, ServerRun, route_name
from .progress import progress
from .prometheus import Sent, acceptance


@dataclass(frozen=True)
class Load:
    """requests: at each concurrency; None for every prompt once, and at least two for each place. timeout: seconds
    for a whole request. seed: of the order of the prompts. top_k: 0 for all tokens. Raises ServerError for a value
    that no load can have."""

    concurrency: tuple[int, ...] = (1, 4, 16)
    max_tokens: int = 128
    temperature: float = 0.0
    requests: int | None = None
    timeout: float = 300.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if min(self.concurrency, default=0) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ServerError(f"concurrency {list(self.concurrency)}: expected different numbers from 1 upward")
        # written so that NaN, which no comparison holds for, is refused
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a number above"),
            ("requests", self.requests is None or self.requests >= 1, "1 or more"),
            ("timeout", 0 < self.timeout < math.inf, "seconds above 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
        ):
            if not fits:
                raise ServerError(f"{name} {getattr(self, name)}: expected {expected}")

    @property
    def sampling(self) -> dict[str, Any]:
        """As a request's body says it. top_k is no field of OpenAI's: vLLM and SGLang know it, others may refuse it."""
        sent = {"temperature": self.temperature, "top_p": self.top_p}
        return {**sent, "top_k": self.top_k} if self.top_k else sent

    def order(self, prompts: Sequence[ChatPrompt], concurrency: int) -> list[ChatPrompt]:
        """The same list for the same seed and concurrency. Each prompt comes once before any comes again."""
        count = self.requests or max(len(prompts), 2 * concurrency)
        generator, out = random.Random(f"{self.seed}:{concurrency}"), []
        while len(out) < count:
            out += generator.sample(list(prompts), len(prompts))
        return out[:count]

    def settings(self, prompts: Sequence[ChatPrompt]) -> dict[str, Any]:
        """As a run stores them; see ``goodput.differences``."""
        return {
            **asdict(self),
            "concurrency": list(self.concurrency),
            "requests": [len(self.order(prompts, c)) for c in self.concurrency],
            "prompts": len(prompts),
            "prompts_sha256": digest([[p.messages, p.tools] for p in prompts]),
        }


def load_chats(specs: Sequence[str], limit_per_route: int | None = None) -> list[ChatPrompt]:
    """Prompts as messages, from whatever ``data.sources`` reads. A row that ends with an answer gives the prompt
    before that answer. Raises DataError for unreadable files."""
    from ..data.sources import read_conversations

    taken, prompts = Counter(), []
    for conversation in read_conversations(list(specs))[0]:
        route = route_name(conversation.route or "other")
        if limit_per_route is not None and taken[route] >= limit_per_route:
            continue
        taken[route] += 1
        messages = conversation.messages
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        prompts.append(ChatPrompt(messages, conversation.tools, route, conversation.id))
    return prompts


def measure(
    url: str,
    prompts: Sequence[ChatPrompt],
    load: Load,
    *,
    model: str | None = None,
    key: str | None = None,
    file: Path | None = None,
    quiet: bool = False,
) -> ServerRun:
    """Put ``load`` on the server at ``url`` (with or without /v1) and record every request.

    Nothing is tried again. Ctrl-C ends it cleanly: the run that comes back has ``interrupted`` set and keeps what was
    measured. key: sent as a bearer token, and cut out of every error text. file: the run is written there after every
    level, marked as interrupted until the last. Raises ServerError where no request could be measured at all, and for
    no prompts.
    """
    if not prompts:
        raise ServerError("no prompts to send")
    versions = {"headtrain": __version__, "python": platform.python_version()}
    run = ServerRun(load.settings(prompts), {"url": address(url)}, versions, interrupted=True)
    asyncio.run(_measure(run, prompts, load, model, key, file, quiet))
    return run


async def _measure(
    run: ServerRun,
    prompts: Sequence[ChatPrompt],
    load: Load,
    model: str | None,
    key: str | None,
    file: Path | None,
    quiet: bool,
) -> None:
    plans = {c: load.order(prompts, c) for c in load.concurrency}
    async with Server(run.server["url"], key, load.sampling, load.timeout) as server:
        try:
            run.server |= await server.introduce(model)
            with progress(sum(map(len, plans.values())), "requests", quiet) as advance:
                for concurrency, jobs in plans.items():
                    level = Level(concurrency)
                    await _put(server, jobs[:concurrency], Level(concurrency), min(WARM_UP, load.max_tokens))
                    before = await server.settled()
                    run.levels.append(level)
                    await _put(server, jobs, level, load.max_tokens, advance)
                    level.complete = True
                    level.acceptance = acceptance(before, await server.settled(), sent(level))
                    run.interrupted = len(run.levels) < len(plans)
                    _write(run, file)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
            _write(run, file)


def _write(run: ServerRun, file: Path | None) -> None:
    if file is not None:
        write_json(file, run.to_dict())


async def _put(
    server: Server, jobs: Sequence[ChatPrompt], level: Level, max_tokens: int, advance: Callable[[], None] | None = None
) -> None:
    """Keep ``level.concurrency`` requests under way until every job was sent; fills the level, also when cancelled."""
    waiting, under_way = iter(enumerate(jobs)), 0
    started = time.perf_counter()

    async def client() -> None:
        nonlocal under_way
        for index, prompt in waiting:
            under_way += 1
            level.peak = max(level.peak, under_way)
            level.records.append(await server.ask(index, prompt, max_tokens))
            under_way -= 1
            if advance is not None:
                advance()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(level.concurrency, len(jobs))):
                group.create_task(client())
    finally:
        level.seconds = time.perf_counter() - started
        level.records.sort(key=lambda r: r.index)


def sent(level: Level) -> Sent:
    good = [r for r in level.records if r.failure is None]
    return Sent(len(level.records), len(good), sum(r.tokens for r in good))
