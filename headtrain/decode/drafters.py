"""What proposes tokens. A drafter knows one sequence at a time; ``generate`` drives it.

Everything that drafts through a ``Session`` (a trained head, a separate draft model) is one class, ``SessionDrafter``:
a chain, a static tree or a dynamic one, at any temperature. What it needs of its model is in the subclass.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..heads.base import DraftHead, Session
from ..heads.io import fingerprint
from ..types import Proposal
from .tree import DynamicTree, StaticTree, chain
from .verify import sample, strike, warp


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
    """layers: the target's hidden states that it reads. max_k: the deepest draft that it can make, None: any. tree:
    what it drafts, for people; "" for chains."""

    layers: tuple[int, ...]

    @property
    def max_k(self) -> int | None: ...

    @property
    def tree(self) -> str: ...

    def check(self, k: int, context: int) -> None:
        """Raises ValueError where drafts of depth k cannot be made, or need more than ``context`` positions."""

    def start(self, prompt: Tensor, max_length: int) -> None:
        """Forget the last sequence; prompt [n], and at most ``max_length`` positions in all."""

    def draft(self, next_tokens: Tensor, layers: Tensor, final: Tensor, k: int, sampling: Sampling) -> Proposal | None:
        """Take in the positions that the target has settled since the last call, with its true features, and
        propose tokens at most k >= 1 deep, or None. next_tokens [n]: the token that follows each of these positions,
        the last of them the newest of the text; layers [n, L, H], final [n, H]."""

    def describe(self) -> dict[str, Any]:
        """For the record: kind, family ("head", "lookup", "draft model"), name and label (short and long, unlike those
        of any other drafter beside it), parameters, and what else tells this drafter from another."""


class SessionDrafter:
    """Drafts through a Session over a draft vocabulary.

    A chain or a static tree is greedy at temperature 0 and else drawn from the (warped) draft distribution, siblings
    without replacement. A dynamic tree chooses its nodes by their probability at every temperature: which nodes exist
    then depends on what they are, so they are verified as drafts that were not drawn (see ``verify_sampled``).

    The guesses live for one round: ``Session.extend`` forgets them and is fed the target's true features.
    """

    layers: tuple[int, ...] = ()
    draft_ids: Tensor | None = None
    max_k: int | None = None
    trained_depth: int | None = None
    usual_depth: int | None = None  # drafted unless asked otherwise; None: nobody says

    def __init__(self, plan: StaticTree | DynamicTree | None = None) -> None:
        self.plan = plan
        self._warned = False

    # -- what a subclass gives ---------------------------------------------------------------------------------

    vocab_size: int
    label: str

    def open(self, prompt: Tensor, max_length: int) -> Session:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        raise NotImplementedError

    # -- the drafter's protocol --------------------------------------------------------------------------------

    @property
    def tree(self) -> str:
        return "" if self.plan is None else str(self.plan)

    def check(self, k: int, context: int) -> None:
        kind = self.label
        if self.max_k is not None and k > self.max_k:
            raise ValueError(
                f"a draft {k} tokens deep was asked for, but {kind} drafts at most {self.max_k}: set k to "
                f"{self.max_k} or less"
            )
        if k >= context:
            raise ValueError(f"a draft {k} tokens deep does not fit the target's context of {context}: set a smaller k")
        if self.plan is not None and self.plan.nodes >= context:
            raise ValueError(
                f"a {self.plan} and the token above it need {self.plan.nodes + 1} positions, the target's context "
                f"has {context}: draft fewer nodes"
            )
        if self.trained_depth is not None and k > self.trained_depth and not self._warned:
            self._warned = True
            warnings.warn(
                f"drafting {k} tokens deep with {kind} trained to depth {self.trained_depth}: the text stays the "
                f"target's own, but acceptance usually falls off after depth {self.trained_depth}, and each token "
                "drafted there costs time",
                stacklevel=3,
            )

    def start(self, prompt: Tensor, max_length: int) -> None:
        self.session = self.open(prompt, max_length)

    def draft(self, next_tokens: Tensor, layers: Tensor, final: Tensor, k: int, sampling: Sampling) -> Proposal | None:
        root = self.session.extend(next_tokens, layers, final)
        if isinstance(self.plan, DynamicTree):
            return self._dynamic(self.plan, root, k, sampling)
        return self._static(self.plan or chain(k), root, k, sampling)

    # -- how trees grow ----------------------------------------------------------------------------------------

    def _static(self, plan: StaticTree, root: Tensor, k: int, sampling: Sampling) -> Proposal:
        """Level by level; only nodes that have children are expanded."""
        below: dict[int, list[int]] = {}  # of the plan: a node's children, as deep as k
        for node, parent in enumerate(plan.parents):
            if len(plan.paths[node]) <= k:
                below.setdefault(parent, []).append(node)
        tokens, parents, rows, distributions = [], [], [], []
        number, in_session = {-1: -1}, {-1: -1}  # the plan's number -> the proposal's, the session's
        level, logits = [-1], root[None]
        while level:
            born = []
            for parent, its in zip(level, logits, strict=True):
                choices, probs = self._siblings(its, len(below[parent]), sampling)
                # fewer choices than planned (a distribution of few tokens): the rest of the plan falls away
                for node, choice in zip(below[parent], choices, strict=False):
                    number[node] = len(tokens)
                    tokens.append(self._target_id(choice))
                    parents.append(number[parent])
                    rows.append(len(distributions))
                    born.append(node)
                distributions.append(probs)
            level = [node for node in born if node in below]
            if level:
                above = torch.tensor([in_session[plan.parents[node]] for node in level])
                first = len(in_session) - 1
                logits = self.session.expand(above, torch.cat([tokens[number[node]] for node in level]))
                in_session |= {node: first + place for place, node in enumerate(level)}
        q = None if sampling.greedy else self._spread(torch.stack(distributions))
        if all(parent == node - 1 for node, parent in enumerate(parents)):
            return Proposal(torch.cat(tokens), q)
        return Proposal(torch.cat(tokens), q, parents, None if q is None else rows)

    def _siblings(self, logits: Tensor, count: int, sampling: Sampling) -> tuple[list[Tensor], Tensor | None]:
        """Up to ``count`` distinct draft indices below one node, and the distribution that they were drawn from: how
        many there are depends on that distribution alone, never on what was drawn."""
        if sampling.greedy:
            # argmax, not topk, for one: it is what every other greedy choice in the project is, ties included
            return ([logits.argmax(-1)] if count == 1 else list(logits.topk(min(count, logits.numel())).indices)), None
        probs = left = warp(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        chosen = [sample(left, sampling.generator)]
        for _ in range(min(count, int((probs > 0).sum())) - 1):
            left = strike(left, int(chosen[-1]))
            chosen.append(sample(left, sampling.generator))
        return chosen, probs

    def _dynamic(self, plan: DynamicTree, root: Tensor, k: int, sampling: Sampling) -> Proposal:
        temperature = sampling.temperature or 1.0
        branch = min(plan.branch, root.numel())
        scores, choices = (root / temperature).log_softmax(-1).topk(branch)
        pool = _Pool()
        frontier = pool.add([-1] * branch, choices, scores)
        in_session, expanded = {-1: -1}, 0
        for _ in range(1, min(k, plan.depth)):
            tokens = torch.stack([pool.choices[node] for node in frontier])
            above = torch.tensor([in_session[pool.parents[node]] for node in frontier])
            logits = self.session.expand(above, torch.cat([self._target_id(choice) for choice in tokens]))
            in_session |= {node: expanded + number for number, node in enumerate(frontier)}
            expanded += len(frontier)
            best, best_choices = (logits / temperature).log_softmax(-1).topk(branch)
            best = best + torch.tensor([pool.scores[node] for node in frontier], device=best.device)[:, None]
            born = pool.add([node for node in frontier for _ in range(branch)], best_choices.flatten(), best.flatten())
            order = sorted(born, key=lambda node: (-pool.scores[node], node))
            frontier = sorted(order[:branch])
        # a child never scores above its parent, and comes later: ties keep the parent
        kept = sorted(sorted(range(len(pool.scores)), key=lambda node: (-pool.scores[node], node))[: plan.nodes])
        number = {node: place for place, node in enumerate(kept)} | {-1: -1}
        tokens = torch.cat([self._target_id(pool.choices[node]) for node in kept])
        return Proposal(tokens, parents=[number[pool.parents[node]] for node in kept])

    def _target_id(self, choice: Tensor) -> Tensor:
        return (choice if self.draft_ids is None else self.draft_ids[choice])[None]

    def _spread(self, q: Tensor) -> Tensor:
        """q over the draft vocabulary -> over the target's, zero outside."""
        if self.draft_ids is None:
            return q
        return q.new_zeros(q.shape[0], self.vocab_size).index_copy_(1, self.draft_ids, q)


class _Pool:
    """Every node that a dynamic tree has seen, parents before children."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.choices: list[Tensor] = []  # draft indices, scalars
        self.scores: list[float] = []  # cumulative log-probabilities

    def add(self, parents: list[int], choices: Tensor, scores: Tensor) -> list[int]:
        first = len(self.parents)
        self.parents += parents
        self.choices += list(choices)
        self.scores += scores.tolist()
        return list(range(first, len(self.parents)))


class HeadDrafter(SessionDrafter):
    """Drafts from a trained head."""

    def __init__(
        self,
        head: DraftHead,
        plan: StaticTree | DynamicTree | None = None,
        *,
        name: str | None = None,
        trained_depth: int | None = None,
    ) -> None:
        """head: on the target's device, with the target's tensors attached. name: tells it from another head of its
        kind; default: the kind. trained_depth: of which a deeper draft warns; None: nobody says (an imported head)."""
        super().__init__(plan)
        self.name = name or head.config.kind
        self.head = head.eval()
        wants = head.wants()
        self.layers, self.trained_depth, self.max_k = wants.layers, trained_depth, head.max_depth
        self.draft_ids, self.vocab_size = head.draft_ids, head.shape.vocab_size

    def open(self, prompt: Tensor, max_length: int) -> Session:
        return self.head.session(max_length)

    @property
    def label(self) -> str:
        return f"the {self.name} head"

    @property
    def usual_depth(self) -> int | None:
        return self.head.usual_depth(self.head.config.model_dump(), self.trained_depth)

    @cached_property
    def weights(self) -> str:
        return fingerprint(self.head)

    def describe(self) -> dict[str, Any]:
        head = self.head
        return {
            "kind": head.config.kind,
            "name": self.name,
            "family": "head",
            "label": self.label,
            "weights": self.weights,
            "parallel": head.parallel,
            "parameters": sum(p.numel() for p in head.parameters()),
            "config": head.config.model_dump(mode="json"),
            "depth": self.trained_depth,
            "draft_vocab": head.draft_vocab_size,
            "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
        }
