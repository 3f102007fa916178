"""The loaded, frozen target: what capture, training and decoding use of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..few_rows import use_few_rows
from ..metadata import TargetIdentity
from ..teacher import Teacher
from ..types import Batch, Features, TargetShape, TargetWeights, Wants
from .features import Tap, body_forward, compute_features, enable_packing, packed_limit
from .files import tensor_files
from .fingerprint import Source, identify
from .own_module import ModuleTensors
from .parts import Conventions, Parts, check_teacher, find_parts, measure, target_weights
from .shape import TargetError, shape_from_config

LINEAR_KINDS = ("linear", "mamba", "conv", "recurrent", "hybrid")


@dataclass
class Target:
    """A frozen target. ``packed``: features come from one forward over the flat run; ``longest_packed``: and only
    where no document is longer than this (None: any length). ``folder``: where its files are, if any."""

    model: nn.Module
    tokenizer: Any
    source: Source
    parts: Parts
    conventions: Conventions
    shape: TargetShape
    packed: bool
    longest_packed: int | None
    eos_ids: tuple[int, ...]
    folder: Path | None = None
    _cache_argument: str = field(repr=False, default="past_key_values")

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer: Any = None, source: Source | None = None, attention: str = "auto"
    ) -> Target:
        """Wrap a loaded model: freeze it, find its parts, read its conventions, choose its attention, and check that
        its own logits come back from its final features."""
        model.eval().requires_grad_(False)
        use_few_rows(model)
        parts = find_parts(model)
        conventions = measure(model, parts)
        target = cls(
            model=model,
            tokenizer=tokenizer,
            source=source or Source(name=type(model).__name__),
            parts=parts,
            conventions=conventions,
            shape=shape_from_config(model.config),
            packed=enable_packing(parts, attention),
            longest_packed=packed_limit(parts.config),
            eos_ids=end_ids(model, tokenizer),
            # transformers >= 5.20 calls it `cache`
            _cache_argument=_cache_argument(parts.body),
        )
        check_teacher(target)
        return target

    @property
    def device(self) -> torch.device:
        return self.parts.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.embed.weight.dtype

    @cached_property
    def identity(self) -> TargetIdentity:
        return identify(self.model, self.tokenizer, self.source)

    @cached_property
    def _teacher(self) -> Teacher:
        head = self.parts.lm_head
        bias = getattr(head, "bias", None)
        return Teacher(head.weight, bias, self.conventions.logit_scale, self.conventions.softcap)

    def teacher(self) -> Teacher:
        return self._teacher

    @cached_property
    def _weights(self) -> TargetWeights:
        weights = target_weights(self.parts, self.conventions)
        if self.shape.module and self.folder is not None and any(self.folder.glob("*.safetensors")):
            weights.module = ModuleTensors(tensor_files(self.folder))
        return weights

    def weights(self) -> TargetWeights:
        return self._weights

    def packs(self, batch: Batch) -> bool:
        """Whether this batch runs as one forward."""
        if not self.packed or len(batch) == 0:
            return False
        return self.longest_packed is None or int(batch.cu.diff().max()) <= self.longest_packed

    def forwards(self, batch: Batch) -> int:
        """Of the body, in ``features`` of this batch."""
        return 1 if self.packs(batch) else int((batch.cu.diff() > 0).sum())

    def features(self, batch: Batch, wants: Wants) -> Features:
        """See ``features.compute_features``."""
        return compute_features(self, batch, wants)

    # -- decoding ------------------------------------------------------------------------------------------------

    def new_cache(self) -> Any:
        """An empty key/value cache for one sequence. Layers with a sliding window keep all their keys (the mask hides
        the old ones), so that any number of rejected tokens can be cropped."""
        from transformers import DynamicCache

        return DynamicCache(config=self.parts.config) if self._recurrent else DynamicCache()

    @property
    def _recurrent(self) -> bool:
        kinds = getattr(self.parts.config, "layer_types", None) or ()
        return any(part in kind for kind in kinds for part in LINEAR_KINDS)

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first ``length`` tokens. Raises TargetError for layers that cannot roll back."""
        excess = cache.get_seq_length() - length
        if excess < 0:
            raise ValueError(f"crop to {length} tokens: the cache holds {length + excess}")
        if excess and self._recurrent:
            self._refuse()
        if excess:
            cache.crop(-excess)

    def _refuse(self) -> NoReturn:
        raise TargetError(
            f"{self.shape.architecture} has recurrent layers, whose state cannot forget rejected tokens: "
            "decode it without speculation"
        )

    def keep(self, cache: Any, length: int, rows: Sequence[int]) -> None:
        """Of the tokens fed since the cache held ``length``, keep those numbered ``rows`` (increasing) and forget the
        others: the accepted path of a token tree moves to the front. Raises TargetError for layers that cannot."""
        end = length + len(rows)
        if list(rows) != list(range(len(rows))):
            if self._recurrent:
                self._refuse()
            chosen = torch.tensor([length + row for row in rows], device=self.device)
            for layer in cache.layers:
                if not layer.is_initialized:
                    continue  # shares the keys of another layer
                for name in ("keys", "values"):
                    stored = getattr(layer, name)
                    stored[:, :, length:end] = stored[:, :, chosen.to(stored.device)]
        self.crop(cache, end)

    @torch.no_grad()
    def step(
        self,
        ids: Tensor,
        cache: Any,
        layers: tuple[int, ...] = (),
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Feed n tokens, ids [1, n], after those in the cache; the cache grows by n.

        Returns logits [n, V] float32 of all n, the residual stream at ``layers`` [n, L, H], and the post-norm final
        features [n, H]. positions [n] and mask [n, cached + n] bool (True: seen) are for token trees; by default
        the tokens continue the sequence.
        """
        more: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if positions is not None:
            more["position_ids"] = positions[None]
        if mask is not None:
            more["attention_mask"] = self._masks(mask, positions)
        with Tap(self.parts, layers, ids.shape[1]) as tap:
            final = body_forward(self.parts, ids, **more)
        return self._teacher.logits(final), tap.out, final

    def _masks(self, mask: Tensor, positions: Tensor | None) -> Tensor | dict[str, Tensor]:
        """The tree's mask in the form that the family's layers take: one for all, or one for each kind of layer.
        transformers hands a 4D mask through as it is, so a sliding window has to be cut in here."""
        config = self.parts.config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not kinds and window and getattr(config, "use_sliding_window", True):
            kinds = {"sliding_attention"}
        if bad := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise TargetError(f"{self.shape.architecture}: no token trees for layers of kind {', '.join(bad)}")
        masks = {}
        for kind in kinds or {"full_attention"}:
            seen = mask
            if kind == "sliding_attention" and window:
                n, total = mask.shape
                own = positions if positions is not None else torch.arange(total - n, total, device=mask.device)
                keys = torch.cat([torch.arange(total - n, device=mask.device), own])
                seen = mask & (own[:, None] - keys[None] < window)
            masks[kind] = self._mask(seen)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, mask: Tensor) -> Tensor:
        if self.parts.config._attn_implementation != "eager":
            return mask[None, None]
        lowest = torch.finfo(self.dtype).min  # eager attention adds its mask
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(~mask, lowest)[None, None]


def _cache_argument(body: nn.Module) -> str:
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def end_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a generation, by the generation config, the config and the tokenizer; sorted."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))
