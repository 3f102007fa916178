"""The values that flow between the layers of headtrain, and the legend of their shapes.

Shape legend, used in every docstring of the project:

    T   tokens in a packed batch (one flat run, no padding)     D   documents in a packed batch
    H   hidden size of the target                               L   target layers a head reads
    V   vocabulary of the target                                Vd  draft vocabulary (Vd <= V)
    S   depths (a draft of S tokens)                            M   positions whose final feature is kept
    N   supervised positions of a batch

Layer index i is the index into Hugging Face's ``hidden_states`` tuple: 0 is the embedding's output, i the
residual stream after decoder layer i (1-based), un-normed. ``final`` is the residual stream *after* the
target's final norm: exactly what its lm_head reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One rendered conversation.

    ids: token ids, [n]. turn: for each token the 1-based number of the assistant turn that it belongs to
    (its end-of-turn token included), 0 for everything else, [n]. source: where the row came from, for
    messages to people ("file.jsonl:17"). route: the kind of traffic, for reports.
    """

    ids: list[int]
    turn: list[int]
    source: str = ""
    route: str = ""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.turn):
            raise ValueError(f"{self.source}: {len(self.ids)} ids but {len(self.turn)} turn marks")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Batch:
    """Documents packed into one flat run of T tokens.

    ids [T] int64; doc [T] int64, the document's number (0..D-1, non-decreasing); pos [T] int64, the position
    inside its document; turn [T] int64, assistant-turn ids that are unique in the batch (0: not supervised);
    cu [D+1] int64, the documents' boundaries.
    """

    ids: Tensor
    doc: Tensor
    pos: Tensor
    turn: Tensor
    cu: Tensor

    @classmethod
    def pack(cls, rows: Sequence[Row]) -> Batch:
        """Pack rows one after the other; turn ids are renumbered so that no two documents share one."""
        ids, doc, pos, turn, cu = [], [], [], [], [0]
        used = 0
        for number, row in enumerate(rows):
            n = len(row)
            ids += row.ids
            doc += [number] * n
            pos += range(n)
            turn += [t + used if t else 0 for t in row.turn]
            used += max(row.turn, default=0)
            cu.append(cu[-1] + n)
        return cls(*(torch.tensor(x, dtype=torch.int64) for x in (ids, doc, pos, turn, cu)))

    def __len__(self) -> int:
        return self.ids.numel()

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True)
class Wants:
    """What a head reads of its target; capture, store and loader serve this blindly.

    layers: indices into hidden_states, in the order in which the head concatenates them. final: whether the
    final feature is needed at every position or only where the next token is supervised
    (see ``shift.final_positions``). depth: the deepest draft that the head is trained for. summary: whether the
    teacher's argmax and log-sum-exp over the whole vocabulary are read.
    """

    layers: tuple[int, ...]
    final: Literal["supervised", "all"] = "supervised"
    depth: int = 1
    summary: bool = True


@dataclass
class Features:
    """The target's hidden states for one batch.

    layers [T, L, H]; final_at [M] int64, the sorted flat positions whose final feature is kept; final [M, H],
    normed; argmax [M] int64 and lse [M] float32: the target's greedy token and log-sum-exp over its whole
    vocabulary at those positions (None where ``Wants.summary`` is false).
    """

    layers: Tensor
    final_at: Tensor
    final: Tensor
    argmax: Tensor | None = None
    lse: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Features:
        """Move; ``dtype`` is applied to the hidden states only."""
        return Features(
            self.layers.to(device, dtype or self.layers.dtype),
            self.final_at.to(device),
            self.final.to(device, dtype or self.final.dtype),
            None if self.argmax is None else self.argmax.to(device),
            None if self.lse is None else self.lse.to(device),
        )


@dataclass
class LossSums:
    """Sums, never means, so that ranks and micro-batches of any size add up to one process's numbers.

    total: scalar with gradient, the weighted loss summed over supervised positions and depths. count: scalar,
    the supervised positions, by which the *global* gradient is divided. The rest has one entry a depth, [S],
    without gradient:
    loss, the unweighted loss sum over ``loss_count`` pairs (those that train);
    hits, greedy hits against the target's argmax over its whole vocabulary, out of ``pairs``;
    accept, the sum of expected acceptance sum_x min(p(x), q(x)) under sampling, out of ``pairs``;
    chain_hits out of chain_pairs: the same hits where every shallower depth hit too, so that
    chain_hits / chain_pairs is the conditional acceptance alpha_k of greedy drafting.
    """

    total: Tensor
    count: Tensor
    loss: Tensor
    loss_count: Tensor
    hits: Tensor
    accept: Tensor
    pairs: Tensor
    chain_hits: Tensor
    chain_pairs: Tensor

    PER_DEPTH = ("loss", "loss_count", "hits", "accept", "pairs", "chain_hits", "chain_pairs")

    def simulated(self) -> tuple[float, list[float | None], list[float]]:
        """tau, alpha by depth, and their running products. Every supervised position counts once as the start of a
        chain, and a draft is right where the target itself would say it: tau = 1 + the sum of the products. A depth
        without any pair reads None, and 0 in the products."""
        counts = zip(self.chain_hits.tolist(), self.chain_pairs.tolist(), strict=True)
        alpha = [hits / pairs if pairs else None for hits, pairs in counts]
        products = list(accumulate(alpha, lambda product, a: product * (a or 0.0), initial=1.0))[1:]
        return 1.0 + sum(products), alpha, products

    def detached(self) -> LossSums:
        return LossSums(*(getattr(self, f.name).detach() for f in fields(self)))

    def __add__(self, other: LossSums) -> LossSums:
        """Sum of two; depth lists of unequal length are padded with zeros."""
        depths = max(self.loss.numel(), other.loss.numel())

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, depths - x.numel()))

        per_depth = {name: pad(getattr(self, name)) + pad(getattr(other, name)) for name in self.PER_DEPTH}
        return LossSums(self.total + other.total, self.count + other.count, **per_depth)


@dataclass(frozen=True)
class TargetShape:
    """The sizes and conventions of a target that a head's form follows from. ``rope`` is transformers 5's
    ``rope_parameters`` form (rope_theta inside). ``module``: where its checkpoints hold a draft module of their own,
    the further settings of their config that the module's form follows from; None elsewhere. ``experts``: the config's
    keys on its mixture of experts; None for a dense target."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    tied: bool = False
    hidden_act: str = "silu"
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    module: dict | None = None
    experts: dict | None = None

    def replace(self, **changes) -> TargetShape:
        return replace(self, **changes)


@dataclass
class TargetWeights:
    """The target's tensors that a head may read or start from, detached.

    embed [V, H] (scaled as the target feeds it to its first layer), lm_head [V, H] (times the factor that the target
    puts on its logits), lm_head_bias [V] and softcap: what else it does to them, as in ``Teacher``, final_norm [H] as
    the *effective* weight (Gemma's 1+w is already added), last_layer: the last decoder layer's state dict with
    Llama's names (``self_attn.q_proj.weight`` ...), empty where the family's names differ. module: the tensors of the
    checkpoint's own draft module by their names in its files, read when asked for; empty where it has none.
    """

    embed: Tensor
    lm_head: Tensor
    final_norm: Tensor
    last_layer: dict[str, Tensor] = field(default_factory=dict)
    module: Mapping[str, Tensor] = field(default_factory=dict)
    lm_head_bias: Tensor | None = None
    softcap: float | None = None


@dataclass
class Proposal:
    """A drafted tree: n nodes, each one token below its parent or below the root (the newest token of the text).

    tokens [n] int64, in the target's vocabulary. parents: for each node the number of an earlier node, -1 for the
    root; None: a chain, every node below the one before. q: where the tokens were drawn at random, the distributions
    [r, V] float32 that they were drawn from, and ``rows`` for each node its row there (None: row j for node j);
    siblings share a row and were drawn from it one after the other without replacement, in the order of their
    numbers. q None: the tokens were not drawn (greedy drafts, copies), so that q is one on each.
    """

    tokens: Tensor
    q: Tensor | None = None
    parents: list[int] | None = None
    rows: list[int] | None = None
