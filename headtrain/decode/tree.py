"""Token trees: their form, which form to draft, and how to choose a static one.

A tree has ``nodes`` below the root (the newest token of the text). Two kinds of plan: a ``StaticTree`` says in advance
which ranks are tried where (Medusa, arXiv 2401.10774), a ``DynamicTree`` grows where the draft head is sure (EAGLE-2,
arXiv 2406.16858). A chain is the static tree of first ranks.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..types import Proposal
from .verify import children


def ancestors(parents: Sequence[int]) -> Tensor:
    """[n, n] bool: row j is True at node j and at every node above it. ``parents``: -1 for a node below nothing."""
    out = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(f"node {node} has parent {parent}: expected an earlier node")
        if parent >= 0:
            out[node] |= out[parent]
    return out


def offered(proposal: Proposal | None, path: Sequence[int]) -> int:
    """The length of the longest branch that begins with ``path``."""
    if proposal is None:
        return 0
    if proposal.parents is None:
        return proposal.tokens.numel()
    below, deepest = children(proposal), len(path)
    waiting = [(path[-1] if path else -1, len(path))]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(kid, depth + 1) for kid in below[node + 1]]
    return deepest


@dataclass(frozen=True)
class StaticTree:
    """paths: each node as the ranks that lead to it, (0, 2) being the third-best token after the best one. Every
    prefix of a path must be there too, and among siblings every smaller rank: a rank is tried after all better ones.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        given = set(self.paths)
        ordered = sorted(given, key=lambda path: (len(path), path))
        if not given or len(given) != len(self.paths):
            raise ValueError("a static tree needs at least one path, and each path once")
        for path in ordered:
            if not path or min(path) < 0:
                raise ValueError(f"path {list(path)}: expected one or more ranks of 0 or above")
            if path[:-1] and path[:-1] not in given:
                raise ValueError(f"path {list(path)} without its beginning {list(path[:-1])}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in given:
                raise ValueError(f"path {list(path)} without its better sibling {[*path[:-1], path[-1] - 1]}")
        object.__setattr__(self, "paths", tuple(ordered))  # level by level: parents before children

    @classmethod
    def of(cls, paths: Iterable[Iterable[int]]) -> StaticTree:
        return cls(tuple(tuple(int(rank) for rank in path) for path in paths))

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def parents(self) -> list[int]:
        number = {path: node for node, path in enumerate(self.paths)}
        return [number.get(path[:-1], -1) for path in self.paths]

    def __str__(self) -> str:
        which = hashlib.sha256(repr(self.paths).encode()).hexdigest()[:6]  # of many with as many nodes
        return f"static tree {which} of {self.nodes} nodes, depth {self.depth}"


@lru_cache(maxsize=64)
def chain(k: int) -> StaticTree:
    return StaticTree(tuple((0,) * depth for depth in range(1, k + 1)))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: the ``branch`` best tokens of the root; then, level by level, the ``branch`` best nodes by cumulative
    probability get ``branch`` children each; of all nodes seen the ``nodes`` best are kept. depth: levels in all (the
    reference's ``depth`` counts the expansions after the first level, and its ``total_token`` the root: its 60, 5 and
    10 are nodes=59, depth=6, branch=10 here)."""

    nodes: int = 59
    depth: int = 6
    branch: int = 10

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.branch) < 1:
            raise ValueError(f"{self}: expected nodes, depth and branch of at least 1")
        if self.nodes < self.depth:
            raise ValueError(f"{self}: {self.nodes} nodes cannot reach depth {self.depth}")

    def __str__(self) -> str:
        return f"dynamic tree of {self.nodes} nodes, depth {self.depth}, branch {self.branch}"


def build_static(accuracy: Tensor, nodes: int) -> StaticTree:
    """The static tree of ``nodes`` nodes with the largest expected accepted length.

    accuracy [depths, ranks]: the measured probability that the token of that rank is the right one at that depth, all
    shallower ones being right. A node's value is the product along its path; the most valuable node that may be
    added is added until the budget is spent (Medusa, section 2.3.3). Raises ValueError where the table is too small
    for the budget.
    """
    table = accuracy.double().tolist()
    if not table or any(not 0 <= value <= 1 for row in table for value in row):
        raise ValueError("rank accuracies: expected a [depths, ranks] table of values in 0..1")
    chosen: list[tuple[int, ...]] = []
    # a node may be added once its parent and its better sibling are in; ties go to the shallower, better-ranked path
    waiting = [(-table[0][0], 1, (0,), 1.0)]  # value, depth, path, the parent's value
    while waiting and len(chosen) < nodes:
        negative, depth, path, above = heapq.heappop(waiting)
        chosen.append(path)
        value, rank = -negative, path[-1] + 1
        if rank < len(table[depth - 1]):
            heapq.heappush(waiting, (-above * table[depth - 1][rank], depth, (*path[:-1], rank), above))
        if depth < len(table):
            heapq.heappush(waiting, (-value * table[depth][0], depth + 1, (*path, 0), value))
    if len(chosen) < nodes:
        raise ValueError(
            f"{nodes} nodes asked for, but {len(table)} depths of {len(table[0])} ranks give {len(chosen)}"
        )
    return StaticTree(tuple(chosen))
