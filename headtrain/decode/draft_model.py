"""A separate, smaller model of the same tokenizer as the drafter (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import digest
from ..heads.base import Session
from ..target.model import Target
from .drafters import SessionDrafter
from .tree import DynamicTree, StaticTree, ancestors

SHOWN = 5


class TokenizerMismatch(ValueError):
    """The draft model's tokens do not mean what the target's mean."""


class ModelDrafter(SessionDrafter):
    """Drafts from a causal language model that reads the text itself, not the target's features."""

    def __init__(self, draft: Target, target: Target, plan: StaticTree | DynamicTree | None = None) -> None:
        """Raises TokenizerMismatch unless every id that both can emit stands for the same token."""
        super().__init__(plan)
        check_tokenizers(draft, target)
        self.model, self.vocab_size = draft, target.shape.vocab_size
        shared = min(draft.shape.vocab_size, self.vocab_size)
        self.draft_ids = None if shared == self.vocab_size else torch.arange(shared, device=draft.device)

    def open(self, prompt: Tensor, max_length: int) -> Session:
        if max_length > self.model.shape.max_positions:
            raise ValueError(
                f"the text may grow to {max_length} tokens, the draft model's context is "
                f"{self.model.shape.max_positions}: ask for fewer new tokens, or take another draft model"
            )
        return _ModelSession(self.model, prompt[:1], min(self.model.shape.vocab_size, self.vocab_size))

    @property
    def label(self) -> str:
        return f"the draft model {self.model.identity.name}"

    def describe(self) -> dict[str, Any]:
        identity = self.model.identity
        return {
            "kind": "draft-model",
            "name": f"model {identity.name}",
            "family": "draft model",
            "label": self.label,
            "parameters": sum(p.numel() for p in self.model.model.parameters()),
            "target": identity.name,
            "weights": digest(identity.weights),
            "dtype": identity.dtype,
            "model_type": self.model.shape.model_type,
        }


class _ModelSession(Session):
    """The draft model's own key/value cache: settled tokens first, then this round's nodes in order of creation."""

    def __init__(self, model: Target, first: Tensor, vocab: int) -> None:
        self.model, self.vocab, self.cache = model, vocab, model.new_cache()
        self.waiting = first  # settled tokens that the model has not read yet
        self.settled, self.parents = 0, []

    @torch.no_grad()
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        self.model.keep(self.cache, self.settled, [])
        ids = torch.cat([self.waiting, next_tokens])
        self.waiting, self.parents = ids[:0], []
        logits, _, _ = self._step(ids)
        self.settled += ids.numel()
        return logits[-1, : self.vocab]

    @torch.no_grad()
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        before = len(self.parents)
        self.parents += parents.tolist()
        seen = ancestors(self.parents)[before:]
        positions = self.settled - 1 + seen.sum(1)
        mask = torch.cat([torch.ones(len(seen), self.settled, dtype=torch.bool), seen], 1)
        device = tokens.device
        logits, _, _ = self._step(tokens, positions=positions.to(device), mask=mask.to(device))
        return logits[:, : self.vocab]

    def _step(self, ids: Tensor, **tree: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # an id that pads the target's larger embedding has no token, and no row here: any row may stand for it
        return self.model.step(ids.clamp(max=self.model.shape.vocab_size - 1)[None], self.cache, **tree)


def check_tokenizers(draft: Target, target: Target) -> None:
    """Every id that the target can take in and the draft model can emit must be the same token in both; special
    tokens too. Ids beyond the smaller embedding do no harm: they are never drafted."""
    if draft.tokenizer is None or target.tokenizer is None:
        raise TokenizerMismatch("a draft model can be used only where both tokenizers are at hand to compare")
    shared = min(draft.shape.vocab_size, target.shape.vocab_size)
    ours = _by_id(target.tokenizer, shared)
    theirs = _by_id(draft.tokenizer, shared)
    wrong = [(i, ours.get(i), theirs.get(i)) for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    alone = sorted(ours.keys() ^ theirs.keys())
    if wrong or alone:
        lines = [f"id {i}: target {a!r}, draft model {b!r}" for i, a, b in wrong[:SHOWN]]
        lines += [f"id {i}: target {ours.get(i)!r}, draft model {theirs.get(i)!r}" for i in alone[: SHOWN - len(lines)]]
        raise TokenizerMismatch(
            f"the draft model's tokenizer is not the target's: {len(wrong) + len(alone)} of {shared} ids differ\n  "
            + "\n  ".join(lines)
        )


def _by_id(tokenizer: Any, below: int) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items() if i < below}
