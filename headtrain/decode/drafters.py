"""What proposes tokens. A drafter knows one sequence at a time; ``generate`` drives it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..heads.base import DraftHead
from ..types import Proposal
from .verify import sample, warp


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else as ``verify.warp`` says, from ``generator`` (CPU)."""

    temperature: float
    top_p: float
    top_k: int
    generator: torch.Generator

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Drafter(Protocol):
    """layers: the target's hidden states that it reads; max_k: the longest chain that it can draft, None: any."""

    layers: tuple[int, ...]

    @property
    def max_k(self) -> int | None: ...

    def check(self, k: int) -> None:
        """Raises ValueError where a chain of k cannot be drafted."""

    def start(self, prompt: Tensor, max_length: int) -> None:
        """Forget the last sequence; prompt [n], and at most ``max_length`` positions in all."""

    def draft(self, next_tokens: Tensor, layers: Tensor, final: Tensor, k: int, sampling: Sampling) -> Proposal:
        """Take in the positions that the target has settled since the last call, with its true features, and
        propose at most k >= 1 tokens. next_tokens [n]: the token that follows each of these positions, the last of
        them the newest of the text; layers [n, L, H], final [n, H]."""


class HeadDrafter:
    """Chains from a trained head: greedy at temperature 0, else sampled from its own (warped) distribution.

    The head's guesses live for one round: ``Session.extend`` forgets them and is fed the target's true features.
    """

    def __init__(self, head: DraftHead) -> None:
        """head: on the target's device, with the target's tensors attached."""
        self.head = head.eval()
        wants = head.wants()
        self.layers, self.depth = wants.layers, wants.depth
        self._warned = False

    @cached_property
    def max_k(self) -> int | None:
        """The trained depth where the head cannot go deeper (one module for each depth), else None. Found by trying:
        one more token than trained is drafted from a zero feature."""
        try:
            self._walk(self.depth + 1)
        except ValueError:
            return self.depth
        return None

    def _walk(self, k: int) -> None:
        size, device = self.head.shape.hidden_size, self.head.device
        token = torch.zeros(1, dtype=torch.int64, device=device)
        session = self.head.session(1)
        session.extend(
            token, torch.zeros(1, len(self.layers), size, device=device), torch.zeros(1, size, device=device)
        )
        for depth in range(1, k):
            session.expand(torch.tensor([depth - 2]), token)

    def check(self, k: int) -> None:
        if self.max_k is not None and k > self.max_k:
            raise ValueError(
                f"a chain of {k} tokens was asked for, but this {self.head.config.kind} head drafts at most "
                f"{self.max_k}: set k to {self.max_k} or less"
            )
        if k > self.depth and not self._warned:
            self._warned = True
            warnings.warn(
                f"drafting {k} tokens with a head trained to depth {self.depth}: the text stays the target's own, but "
                f"acceptance usually falls off after depth {self.depth}, and each token drafted there costs time",
                stacklevel=3,
            )

    def start(self, prompt: Tensor, max_length: int) -> None:
        self.session = self.head.session(max_length)

    def draft(self, next_tokens: Tensor, layers: Tensor, final: Tensor, k: int, sampling: Sampling) -> Proposal:
        logits = self.session.extend(next_tokens, layers, final)
        tokens, rows = [], []
        for depth in range(k):
            if depth:  # a chain: node number depth-1 hangs below node depth-2, the first below the root (-1)
                logits = self.session.expand(torch.tensor([depth - 2]), tokens[-1])[0]
            if sampling.greedy:
                choice = logits.argmax(-1)
            else:
                probs = warp(logits, sampling.temperature, sampling.top_p, sampling.top_k)
                choice = sample(probs, sampling.generator)
                rows.append(probs)
            tokens.append(self._target_id(choice))
        return Proposal(torch.cat(tokens), self._spread(torch.stack(rows)) if rows else None)

    def _target_id(self, choice: Tensor) -> Tensor:
        ids = self.head.draft_ids
        return (choice if ids is None else ids[choice])[None]

    def _spread(self, q: Tensor) -> Tensor:
        """q over the draft vocabulary -> over the target's, zero outside."""
        ids = self.head.draft_ids
        if ids is None:
            return q
        return q.new_zeros(q.shape[0], self.head.shape.vocab_size).index_copy_(1, ids, q)
