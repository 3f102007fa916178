"""Acceptance by lossless decoding: every prompt once without and once with drafts, batch 1, on the same machine."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import __version__
from ..config import digest
from ..decode.drafters import Drafter, HeadDrafter
from ..decode.generate import Generation, generate
from ..heads.base import DraftHead
from .results import Difference, Evaluation, PromptResult, Side

if TYPE_CHECKING:
    from ..target.model import Target

WARM_UP = 8  # new tokens of the untimed decodings at the start
LINE_EVERY = 30.0  # seconds between progress lines where stderr is no terminal


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
        asked = replace(conversation, messages=messages, verbatim=False)
        prompts.append(Prompt(renderer.prompt_ids(asked), conversation.route or "other", conversation.id))
    return prompts


def evaluate(
    target: Target,
    head: DraftHead | Drafter,
    prompts: Sequence[Prompt],
    *,
    k: int = 5,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 128,
    seed: int = 0,
    eos_ids: Collection[int] | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Decode every prompt plainly and speculatively and record what happened.

    The two decodings of a prompt follow each other, the order alternating from prompt to prompt, so that a machine
    that grows slower or warmer hits both alike; short untimed decodings come first. head: a trained head (attached
    to the target's tensors here), or any drafter. eos_ids: None for the target's own. Raises ValueError for no
    prompts, a chain that the head cannot draft, or a prompt longer than the target's context.
    """
    if not prompts:
        raise ValueError("no prompts to evaluate")
    context = target.shape.max_positions
    if long := [f"{p.id} ({len(p.ids)})" for p in prompts if len(p.ids) > context]:
        raise ValueError(f"prompts longer than the target's context of {context} tokens: {', '.join(long)}")
    drafter = _drafter(target, head)
    drafter.check(k, context)
    settings = {
        "k": k,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "eos_ids": sorted(target.eos_ids if eos_ids is None else eos_ids),
    }
    both: dict[str, Drafter | None] = {"plain": None, "speculative": drafter}
    evaluation = Evaluation(_describe_target(target), describe_drafter(head), settings, _versions(target))

    def decode(prompt: Prompt, number: int, side: str, limit: int) -> Generation:
        chosen = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed + number, "eos_ids": eos_ids}
        return generate(target, prompt.ids, drafter=both[side], k=k, max_new_tokens=limit, **chosen)

    for side in both:
        decode(prompts[0], 0, side, min(WARM_UP, max_new_tokens))
    with _progress(len(prompts), quiet) as advance:
        for number, prompt in enumerate(prompts):
            order = list(both) if number % 2 == 0 else list(both)[::-1]
            outs = {side: decode(prompt, number, side, max_new_tokens) for side in order}
            plain, speculative = outs["plain"], outs["speculative"]
            evaluation.results.append(
                PromptResult(
                    id=prompt.id or str(number),
                    route=prompt.route,
                    prompt_tokens=len(prompt.ids),
                    plain=Side.of(plain),
                    speculative=Side.of(speculative),
                    rounds=speculative.rounds,
                    difference=first_difference(plain, speculative) if temperature == 0 else None,
                )
            )
            advance()
    return evaluation


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


def _drafter(target: Target, head: DraftHead | Drafter) -> Drafter:
    if not isinstance(head, DraftHead):
        return head
    head.attach(target.weights())
    return HeadDrafter(head.to(target.device))


def describe_drafter(head: DraftHead | Drafter) -> dict[str, Any]:
    """Kind, and for a head the sha256 of its config and its trained depth."""
    if isinstance(head, HeadDrafter):
        head = head.head
    if not isinstance(head, DraftHead):
        return {"kind": type(head).__name__}
    config = head.config.model_dump(mode="json")
    return {
        "kind": head.config.kind,
        "config_sha256": digest(config),
        "depth": head.wants().depth,
        "draft_vocab": head.draft_vocab_size,
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }


def _describe_target(target: Target) -> dict[str, Any]:
    identity = target.identity
    return {"name": identity.name, "revision": identity.revision, "dtype": identity.dtype, "weights": identity.weights}


def _versions(target: Target) -> dict[str, Any]:
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


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """A bar with the remaining time on a terminal, a line now and then elsewhere; on stderr."""
    console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=quiet or not sys.stderr.isatty()
    )
    task = bar.add_task("decoding", total=total)
    started = spoken = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, spoken
        done += 1
        bar.advance(task)
        now = time.monotonic()
        if bar.disable and (now - spoken >= LINE_EVERY or done == total):
            spoken = now
            left = (now - started) / done * (total - done)
            console.print(f"decoded {done}/{total} prompts, {left:.0f} s left", markup=False)

    with bar:
        yield advance
