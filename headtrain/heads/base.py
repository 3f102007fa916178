"""The head protocol: the one seam between draft heads and everything else.

Capture, store, trainer, decoder and exporter know a head only through this file; they never learn its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from .. import vocab
from ..config import Strict
from ..divergences import MEANING, LossName
from ..losses import CHUNK_LOGITS
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from .forms import Form


class HeadConfig(Strict):
    """Base of each head's own section of the recipe. ``kind`` selects the head.

    training_only: the keys that say how a head is trained, not what it computes: a warm start may change them.
    """

    training_only: ClassVar[frozenset[str]] = frozenset({"depth", "depth_decay", "labels", "loss"})

    kind: str


# the type of the field ``loss`` in every head that learns from the target's distribution
SoftLoss = Annotated[LossName, Field(description="; ".join(f"{name}: {text}" for name, text in MEANING.items()))]


@dataclass
class ExportSpec:
    """What one engine dialect loads for this head: tensors by their final names, and the keys of config.json.

    ``DraftHead.expected_tensors`` gives the shape of every tensor as it follows from ``config`` alone, so that a
    folder can be verified without the trained head. method: the name by which the engine's launch command calls this
    kind of head. notes: what a user of that engine must know about this head.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    method: str = ""


class Session(ABC):
    """Drafting for one sequence: a key/value cache over accepted tokens, and a scratch tree over guessed ones.

    ``extend`` feeds the target's true features for newly accepted tokens, forgets all guesses and returns the
    first draft distribution. ``expand`` walks from a node to its child: chains call it with one node a time, trees
    with many. Logits are over the draft vocabulary; ``DraftHead.draft_ids`` maps it to the target's.
    """

    @abstractmethod
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        """next_tokens [n]: for each new position the token that *follows* it; layers [n, L, H], final [n, H].
        Returns logits [Vd] float32 of the token after the last of ``next_tokens``: the root's distribution."""

    @abstractmethod
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """parents [n]: node numbers (-1: the root); tokens [n], in the target's vocabulary: the guess taken at that
        parent. Creates n nodes, numbered on in order of creation since the last ``extend``, and returns their
        next-token logits [n, Vd] float32."""


def node_mask(parents: Sequence[int], length: int, first: int, device: torch.device) -> Tensor | None:
    """[n, length + nodes] bool for the nodes numbered ``first`` and on: what each sees of a buffer of ``length``
    accepted positions and then every node of the round: the positions, its ancestors and itself. ``parents``: of all
    nodes, -1 for the root. None where that is everything."""
    n = len(parents) - first
    if n == 1 and list(parents) == list(range(-1, first)):
        return None  # a chain: every earlier node is an ancestor
    mask = torch.zeros(n, length + first + n, dtype=torch.bool)
    mask[:, :length] = True
    for row in range(n):
        node = first + row
        while node >= 0:
            mask[row, length + node] = True
            node = parents[node]
    return mask.to(device)


class DraftHead(nn.Module, ABC):
    """A draft head. Its parameters are what is trained; tensors shared with the target are buffers that are
    attached, never saved."""

    Config: ClassVar[type[HeadConfig]]

    def __init__(self, config: HeadConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        """draft_ids: [Vd] sorted int64 target ids of the draft vocabulary, or None for the whole vocabulary."""
        super().__init__()
        self.config, self.shape = config, shape
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        inverse = None if draft_ids is None else vocab.inverse(draft_ids, shape.vocab_size)
        self.register_buffer("to_draft", inverse, persistent=False)

        self._teacher: tuple[Teacher, Teacher] | None = None

    def drafted(self, tokens: Tensor) -> Tensor:
        """Target ids -> their places in the draft vocabulary, of any shape; -1 where it does not have them."""
        return tokens if self.to_draft is None else self.to_draft[tokens]

    def drafted_rows(self, weights: TargetWeights) -> Tensor:
        """[Vd, H]: the target's lm_head rows of the draft vocabulary."""
        return weights.lm_head if self.draft_ids is None else weights.lm_head[self.draft_ids]

    def restricted(self, teacher: Teacher) -> Teacher:
        """The teacher over the draft vocabulary, gathered once for each teacher."""
        if self.draft_ids is None:
            return teacher
        if self._teacher is None or self._teacher[0] is not teacher:
            self._teacher = teacher, teacher.restricted(self.draft_ids)
        return self._teacher[1]

    @property
    def draft_vocab_size(self) -> int:
        return self.shape.vocab_size if self.draft_ids is None else self.draft_ids.numel()

    @property
    def max_depth(self) -> int | None:
        """The most tokens that a session of this head can draft in a row; None: any number (a recursive head can be
        unrolled further than it was trained, at falling acceptance)."""
        return None

    @classmethod
    def usual_depth(cls, config: Mapping[str, Any], trained: int | None) -> int | None:
        """How deep a head of this ``config`` drafts unless asked otherwise; None: nobody says (an imported head)."""
        return trained

    def trained_depth(self, unrolled: int) -> int:
        """The deepest draft that is trained where training unrolls to ``unrolled``."""
        return unrolled

    @classmethod
    def uses_draft_vocab(cls, config: HeadConfig, shape: TargetShape) -> int | None:
        """The size of the reduced draft vocabulary that this configuration asks for, or None: ``draft_vocab_size`` of
        kinds that have it, where it is less than the target's."""
        size = getattr(config, "draft_vocab_size", None)
        return None if size is None or size >= shape.vocab_size else size

    @abstractmethod
    def wants(self) -> Wants: ...

    @abstractmethod
    def attach(self, weights: TargetWeights) -> None:
        """Share the target's frozen tensors (embedding, lm_head rows). Needed before loss and drafting."""

    def check_start(self, weights: TargetWeights) -> None:
        """Raises ValueError, before anything is captured, where ``init_from_target`` would not find what it needs."""
        return None

    @abstractmethod
    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """Start the trained parameters from the target's; returns what was done, for the log."""

    def init_at_random(self, weights: TargetWeights) -> list[str]:
        """Likewise where the head starts as it was built: copy what it saves but does not train."""
        return []

    can_copy: ClassVar[bool] = False  # has the three below
    induction_tokens: int = 0  # of the training rows, that ``fit_induction`` wants to see

    def init_for_induction(self, weights: TargetWeights) -> list[str]:
        """What ``fit_induction`` needs of the target; returns what was done."""
        raise NotImplementedError

    def fit_induction(
        self, sample: Iterable[tuple[Batch, Features]], total: Callable[[Tensor], Tensor], window: int
    ) -> list[str]:
        """Start the attention as one that finds the token at hand earlier in the text and copies what followed it.
        sample: this rank's part of some training rows; total: adds a tensor up over the ranks; window: tokens of the
        longest row. Returns what was done."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        """Loss and metrics of one packed batch, unrolled to ``depth`` (<= wants().depth). An all-masked batch gives
        a finite zero with zero gradients."""

    @abstractmethod
    def chain_hits(self, batch: Batch, features: Features, depth: int) -> Tensor:
        """[depth, T] bool: whether the greedy draft of depth k from position i is the text's own token i+1+k, when
        every shallower draft was fed from the text; False where ``shift.pair_mask`` has no pair. Until its first miss
        a chain feeds exactly the text's tokens, so on the target's own greedy text this answers what a session would
        draft at every position, in one pass. Without gradient; no [positions, vocabulary] tensor beyond a chunk.
        Raises ValueError for a depth beyond ``max_depth``."""

    @abstractmethod
    def flops(self, batch: Batch, depth: int) -> float:
        """Floating-point operations (a multiply-add is two) of the matrix products that one training step of
        ``batch`` cannot avoid, forward and backward; what is recomputed to save memory is not counted."""

    @abstractmethod
    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        """About how many numbers autograd keeps between forward and backward for a micro-batch of ``tokens`` tokens,
        ``supervised`` of them supervised: the activations of the memory estimate."""

    @abstractmethod
    def session(self, max_length: int) -> Session: ...

    @abstractmethod
    def export_spec(self, dialect: str) -> ExportSpec:
        """Tensors and config for ``dialect``; raises KeyError for one that this head has no form in."""

    def checkpoint_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """For a head that is a part of its target's checkpoint: what was trained, under the names that it has there.
        names: those of the module's tensors in the files. Raises ValueError for any other head."""
        raise ValueError(
            f"a head of kind {self.config.kind!r} is no part of its target's checkpoint: export it, headtrain export"
        )

    parallel: ClassVar[bool] = False  # one step says all depths (Medusa)
    dialects: ClassVar[Mapping[str, Form]] = {}
    instead_of_export: ClassVar[str] = ""  # what to do with a part of the target's own checkpoint

    @classmethod
    @abstractmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that ``config`` (an exported config.json) implies; the strict readers
        compare folders with it. Raises ValueError where the config contradicts itself."""

    @classmethod
    @abstractmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        """Rebuild a head from an exported folder's config and (already verified) tensors."""

    def no_decay(self, name: str, parameter: Tensor) -> bool:
        return parameter.ndim < 2

    def trainable(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


@torch.no_grad()
def text_hits(
    batch: Batch,
    start: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    draft_ids: Tensor | None,
    depth: int,
) -> Tensor:
    """``DraftHead.chain_hits`` from the states that the lm_head reads: hidden[s] [n, H] of depth s+1 for the first n of
    the supervised positions ``start``; weights: one lm_head [Vd, H], or one for each depth."""
    pairs = pair_mask(batch, depth)
    hits = torch.zeros_like(pairs)
    for s, states in enumerate(hidden[:depth]):
        counts = pairs[s, start[: states.shape[0]]]
        at, states = start[: states.shape[0]][counts], states[counts]
        weight = weights[s if len(weights) > 1 else 0]
        chunk = max(16, CHUNK_LOGITS // weight.shape[0])
        for rows, chosen in zip(at.split(chunk), states.split(chunk), strict=True):
            best = torch.nn.functional.linear(chosen.to(weight.dtype), weight).argmax(-1)
            tokens = best if draft_ids is None else draft_ids[best]
            hits[s, rows] = tokens == batch.ids[rows + 2 + s]
    return hits
