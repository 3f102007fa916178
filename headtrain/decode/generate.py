"""Decoding one sequence (batch 1): a plain loop and a speculative one, side by side.

Words. The *prefill* forward reads the prompt and yields the first token; it is no round. A *round* is one later target
forward and what it commits: the accepted drafts and the target's own token after them. A plain round drafts nothing
and commits one token.

At temperature 0 both loops commit the target's argmax, so the text is the same, up to one thing no decoder can avoid:
a forward of k+1 tokens adds up its sums in another order than a forward of one, so logits differ in their last bits
and where the best two are closer than that, the argmax may flip (float32: relative differences near 1e-6, bfloat16:
1e-2, where exact ties happen too). ``Generation.gaps`` has the distance between the best two logits at each token, so
that such a flip can be told from a fault: a different token at a gap above the noise is a fault.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..types import Proposal, TargetShape
from .drafters import Drafter, Sampling
from .tree import ancestors, offered
from .verify import sample, top_two, verify_greedy, verify_sampled, verify_typical, warp

Acceptance = Literal["lossless", "typical"]
PREFILL_CHUNK = 1024  # prompt tokens of one forward, so that a long prompt makes no [prompt, V] logits


class StepTarget(Protocol):
    """What decoding uses of ``headtrain.target``'s Target."""

    shape: TargetShape
    eos_ids: Collection[int]

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> Any: ...

    def keep(self, cache: Any, length: int, rows: Sequence[int]) -> None:
        """Of the tokens fed since the cache held ``length``, keep those numbered ``rows`` and forget the others."""

    def step(
        self,
        ids: Tensor,
        cache: Any,
        layers: tuple[int, ...] = (),
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ids [1, n] after the cached ones -> logits [n, V] float32, layers [n, L, H], post-norm final [n, H].
        positions [n] and mask [n, cached + n] bool (True: seen) for token trees."""


@dataclass(frozen=True)
class Round:
    """drafted: tokens that could count, accepted of them, and committed to the text (accepted + 1, the target's own
    token; only ``accepted`` where the text ended inside the accepted run). Tokens drafted after an accepted end of
    text could not count and are left out of ``drafted``. nodes: everything that was drafted and fed to the target.

    In a tree ``drafted`` is the length of the longest branch that begins with the accepted path: as in a chain, the
    j-th token was offered where drafted >= j and all before it were accepted."""

    drafted: int
    accepted: int
    committed: int
    nodes: int = 0


@dataclass
class Times:
    """Seconds. prefill: the prompt's forward and the first token. draft: the drafter, its reading of the prompt's
    features included. verify: the target's later forwards and the choice of tokens. other: everything else."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after prefill."""
        return self.draft + self.verify + self.other


@dataclass
class Generation:
    """tokens: the new ones, the end-of-text token included. stop: "eos", "length" or "context". gaps: at temperature
    0 the distance between the best two logits at each token, else empty."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    stop: str = ""
    gaps: list[float] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed for each target forward after prefill, the target's own token included; NaN without a
        round. The first token is prefill's and not counted. Every round counts, also the last, which an end of text
        or max_new_tokens may make short: a slightly low estimate for short texts."""
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, by the seconds after prefill; NaN where there are none."""
        return (len(self.tokens) - 1) / self.times.decode if self.rounds else math.nan

    @property
    def min_gap(self) -> float:
        return min(self.gaps, default=math.inf)


class _Clock:
    """Adds the time since the last lap to one entry of ``Times``; waits for the device first."""

    def __init__(self, times: Times, device: torch.device) -> None:
        self.times, self.cuda = times, device.type == "cuda"
        self.lap("other")
        times.other = 0.0

    def lap(self, name: str) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        setattr(self.times, name, getattr(self.times, name) + now - getattr(self, "last", now))
        self.last = now


@torch.no_grad()
def generate(
    target: StepTarget,
    prompt_ids: Sequence[int] | Tensor,
    *,
    drafter: Drafter | None = None,
    k: int = 5,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    eos_ids: Collection[int] | None = None,
    acceptance: Acceptance = "lossless",
) -> Generation:
    """Continue a prompt; with a drafter by chains or trees of up to k drafted tokens in depth, losslessly.

    acceptance="typical" is NOT lossless: drafts that the target finds typical are accepted, see ``verify_typical``.

    Stops at (and with) the first of ``eos_ids`` (None: the target's; empty: never), at exactly max_new_tokens, or
    where the target's context is full. Near an end fewer than k tokens are drafted, so that none is wasted. The same
    seed gives the same text again; at temperature > 0 the two loops use their random numbers differently, so their
    texts differ while their distributions are the same. Raises ValueError for settings or a prompt that cannot be
    used.
    """
    prompt = torch.as_tensor(prompt_ids, dtype=torch.int64).flatten()
    context = target.shape.max_positions
    _check(prompt, target.shape, max_new_tokens, temperature, top_p, top_k)
    if acceptance == "typical" and temperature == 0:
        raise ValueError("typical acceptance is for temperatures above 0; greedy drafts are verified losslessly")
    if drafter is not None:
        if k < 1:
            raise ValueError(f"k {k}: expected at least 1 drafted token")
        drafter.check(k, context)
    run = _Run(
        target=target,
        sampling=Sampling(temperature, top_p, top_k, torch.Generator().manual_seed(seed)),
        ends=frozenset(target.eos_ids if eos_ids is None else eos_ids),
        limit=max_new_tokens,
        context=context,
        typical=acceptance == "typical" and drafter is not None,
    )
    prompt = prompt.to(target.device)
    if drafter is None:
        _plain(run, prompt)
    else:
        _speculative(run, prompt, drafter, k)
    return run.out


def _check(prompt: Tensor, shape: TargetShape, max_new_tokens: int, temperature: float, top_p: float, top_k: int):
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty: expected at least one token")
    if prompt.numel() > shape.max_positions:
        raise ValueError(
            f"the prompt has {prompt.numel()} tokens, the target's context {shape.max_positions}: shorten the prompt"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= shape.vocab_size:
        raise ValueError(
            f"prompt ids {int(prompt.min())}..{int(prompt.max())} outside the target's 0..{shape.vocab_size - 1}: "
            "was it made by another tokenizer?"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: expected at least 1")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature}: expected a finite number of at least 0")
    if not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"top_p {top_p}, top_k {top_k}: expected 0 < top_p <= 1 and top_k >= 0 (0: all)")


class _Run:
    """What the two loops share: the text so far, where it ends, the clock."""

    def __init__(
        self, target: StepTarget, sampling: Sampling, ends: frozenset[int], limit: int, context: int, typical: bool
    ) -> None:
        self.target, self.sampling, self.ends, self.limit, self.context = target, sampling, ends, limit, context
        self.typical = typical
        self.out = Generation()
        self.clock = _Clock(self.out.times, target.device)

    def prefill(self, prompt: Tensor, cache: Any, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Read the prompt, commit the first token; returns the prompt's features [n, L, H] and [n, H]."""
        read, finals = [], []
        for chunk in prompt.split(PREFILL_CHUNK):
            logits, hidden, final = self.target.step(chunk[None], cache, layers)
            read.append(hidden)
            finals.append(final)
        _, tokens, gaps = self.verify(None, logits[-1:])
        self.commit(tokens, gaps)
        self.clock.lap("prefill")
        return torch.cat(read), torch.cat(finals)

    def verify(self, proposal: Proposal | None, logits: Tensor) -> tuple[list[int], list[int], list[float]]:
        """logits [nodes + 1, V] -> the accepted path (node numbers), its tokens and the target's own after them, and
        their gaps."""
        if self.sampling.greedy:
            choices, gaps = top_two(logits)
            path = [] if proposal is None else verify_greedy(proposal, choices)
            rows = [0, *(node + 1 for node in path)]
            kept = gaps[rows].tolist()
            if any(map(math.isnan, kept)):
                raise ValueError(f"the target's logits are not finite after {len(self.out.tokens)} new tokens")
            return path, choices[rows].tolist(), kept
        p = warp(logits, self.sampling.temperature, self.sampling.top_p, self.sampling.top_k)
        if self.typical:
            path, token = verify_typical(proposal or Proposal(p.new_empty(0).long()), p)
            return path, [*([] if proposal is None else proposal.tokens[path].tolist()), token], []
        if proposal is None:
            return [], [int(sample(p[0], self.sampling.generator))], []
        path, token = verify_sampled(proposal, p, self.sampling.generator)
        return path, [*proposal.tokens[path].tolist(), token], []

    def commit(self, tokens: list[int], gaps: list[float]) -> int:
        """Append tokens up to the first end of text; returns how many."""
        ended = next((n for n, token in enumerate(tokens, 1) if token in self.ends), None)
        count = ended or len(tokens)
        self.out.tokens += tokens[:count]
        self.out.gaps += gaps[:count]
        if ended:
            self.out.stop = "eos"
        elif len(self.out.tokens) >= self.limit:
            self.out.stop = "length"
        return count

    def room(self, cached: int) -> int:
        """How many tokens the next forward may take, the newest of the text included; 0: the text is over."""
        if not self.out.stop and cached >= self.context:
            self.out.stop = "context"
        return 0 if self.out.stop else min(self.limit - len(self.out.tokens), self.context - cached)


def _plain(run: _Run, prompt: Tensor) -> None:
    cache = run.target.new_cache()
    run.prefill(prompt, cache, ())
    cached = prompt.numel()  # every token but the newest
    while run.room(cached):
        newest = torch.tensor([run.out.tokens[-1:]], device=prompt.device)
        run.clock.lap("other")
        logits, _, _ = run.target.step(newest, cache, ())
        _, tokens, gaps = run.verify(None, logits)
        run.clock.lap("verify")
        cached += 1
        run.out.rounds.append(Round(0, 0, run.commit(tokens, gaps)))
    run.clock.lap("other")


def _speculative(run: _Run, prompt: Tensor, drafter: Drafter, k: int) -> None:
    target, cache = run.target, run.target.new_cache()
    drafter.start(prompt, min(run.context, prompt.numel() + run.limit))
    layers, final = run.prefill(prompt, cache, drafter.layers)
    cached = prompt.numel()
    newest = torch.tensor(run.out.tokens, device=prompt.device)
    following = torch.cat([prompt[1:], newest])  # the feature at i goes with token i+1
    while room := run.room(cached):
        run.clock.lap("other")
        proposal = None
        if room > 1:
            proposal = drafter.draft(following, layers, final, min(k, room - 1), run.sampling)
        run.clock.lap("draft")
        logits, layers, final = _feed(target, cache, cached, newest, proposal, drafter.layers)
        path, tokens, gaps = run.verify(proposal, logits)
        run.clock.lap("verify")
        count = run.commit(tokens, gaps)
        # after an accepted end of text nothing could count
        drafted = count if proposal is not None and count <= len(path) else offered(proposal, path)
        nodes = 0 if proposal is None else proposal.tokens.numel()
        run.out.rounds.append(Round(drafted, min(len(path), count), count, nodes))
        rows = [0, *(node + 1 for node in path)]
        target.keep(cache, cached, rows)
        cached += len(rows)
        following = torch.tensor(tokens, device=prompt.device)
        newest = following[-1:]
        layers, final = layers[rows], final[rows]
    run.clock.lap("other")


def _feed(
    target: StepTarget, cache: Any, cached: int, newest: Tensor, proposal: Proposal | None, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """One target forward over the newest token and the draft below it."""
    if proposal is None:
        return target.step(newest[None], cache, layers)
    ids = torch.cat([newest, proposal.tokens])[None]
    if proposal.parents is None:
        return target.step(ids, cache, layers)
    seen = ancestors([-1, *(parent + 1 for parent in proposal.parents)])  # the root is row 0
    positions = cached - 1 + seen.sum(1)
    mask = torch.cat([torch.ones(ids.shape[1], cached, dtype=torch.bool), seen], 1)
    return target.step(ids, cache, layers, positions=positions.to(ids.device), mask=mask.to(ids.device))
