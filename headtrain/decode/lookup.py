"""Drafts without a model: copy what followed an earlier occurrence of the newest tokens.

Prompt lookup (Saxena 2023) copies from the prompt alone; n-gram lookup from the whole text so far. The newest m tokens
are looked up for m from ``longest`` down to ``shortest``; the *most recent* earlier occurrence of the first m that is
found is taken, and what followed it is copied, at most to the end of the text that it is copied from. Where nothing
is found nothing is drafted.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..types import Proposal
from .drafters import Sampling

LONGEST, SHORTEST = 4, 2  # tokens of a match

Where = Literal["text", "prompt", "answer"]


class LookupDrafter:
    """where: "text" looks in prompt and answer (n-gram), "prompt" in the prompt alone, "answer" in what was generated.
    branches: how many occurrences become branches of a tree (1: a chain), the most recent ones that differ; longer
    matches come first. nodes: the tree's budget.
    """

    layers: tuple[int, ...] = ()
    max_k = None

    def __init__(
        self,
        where: Where = "text",
        longest: int = LONGEST,
        shortest: int = SHORTEST,
        branches: int = 1,
        nodes: int = 32,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest {shortest}, longest {longest}: expected 1 <= shortest <= longest")
        if branches < 1 or nodes < 1:
            raise ValueError(f"branches {branches}, nodes {nodes}: expected at least 1")
        self.where, self.longest, self.shortest, self.branches, self.nodes = where, longest, shortest, branches, nodes

    @property
    def tree(self) -> str:
        return "" if self.branches == 1 else f"tree of {self.branches} occurrences, {self.nodes} nodes"

    def check(self, k: int, context: int) -> None:
        if k >= context:
            raise ValueError(f"a draft {k} tokens deep does not fit the target's context of {context}: set a smaller k")
        if self.branches > 1 and self.nodes >= context:
            raise ValueError(f"a {self.tree} does not fit the target's context of {context}: draft fewer nodes")

    def describe(self) -> dict[str, Any]:
        kind = {"text": "ngram", "prompt": "prompt-lookup", "answer": "answer-lookup"}[self.where]
        words = {"text": "n-gram lookup", "prompt": "prompt lookup", "answer": "n-gram lookup in the answer"}
        usual = (self.longest, self.shortest) == (LONGEST, SHORTEST)
        sizes = "" if usual else f" {self.longest}-{self.shortest}"
        return {
            "kind": kind,
            "name": kind + sizes,
            "family": "lookup",
            "label": words[self.where] + sizes,
            "parameters": 0,
            "longest": self.longest,
            "shortest": self.shortest,
            "branches": self.branches,
        }

    def start(self, prompt: Tensor, max_length: int) -> None:
        self.text = prompt[:1].tolist()
        self.prompt_length = prompt.numel()
        # every m-gram of the searched text -> where the tokens after it begin, oldest first
        self.follows: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(self.longest + 1)]
        self.indexed = 0

    def draft(self, next_tokens: Tensor, layers: Tensor, final: Tensor, k: int, sampling: Sampling) -> Proposal | None:
        self.text += next_tokens.tolist()
        self._index()
        copies = self._copies(k)
        if not copies:
            return None
        tokens, parents = _merge(copies, self.nodes if self.branches > 1 else k)
        drafted = torch.tensor(tokens, dtype=torch.int64, device=next_tokens.device)
        return Proposal(drafted, parents=parents if self.branches > 1 else None)

    def _bounds(self) -> tuple[int, int]:
        """Where the searched text begins and ends."""
        if self.where == "prompt":
            return 0, self.prompt_length
        return (self.prompt_length if self.where == "answer" else 0), len(self.text)

    def _index(self) -> None:
        """Take in the grams that end before a newly known token (a gram at the very end has nothing after it)."""
        begin, end = self._bounds()
        for after in range(max(self.indexed, begin + 1), end):
            for m in range(self.shortest, self.longest + 1):
                if after - m >= begin:
                    self.follows[m].setdefault(tuple(self.text[after - m : after]), []).append(after)
        self.indexed = max(self.indexed, end)

    def _copies(self, k: int) -> list[list[int]]:
        end = self._bounds()[1]
        found: list[list[int]] = []
        for m in range(min(self.longest, len(self.text)), self.shortest - 1, -1):
            for after in reversed(self.follows[m].get(tuple(self.text[-m:]), [])):
                copy = self.text[after : min(after + k, end)]
                if copy not in found:
                    found.append(copy)
                if len(found) == self.branches:
                    return found
        return found


def _merge(copies: list[list[int]], budget: int) -> tuple[list[int], list[int]]:
    """The copies as one tree (equal beginnings shared), the first whole, then as the budget lasts: tokens, parents."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for copy in copies:
        node = -1
        for token in copy:
            if (node, token) not in known:
                if len(tokens) == budget:
                    break
                known[node, token] = len(tokens)
                parents.append(node)
                tokens.append(token)
            node = known[node, token]
    return tokens, parents
