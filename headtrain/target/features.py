"""Hidden states of the frozen target: one forward of its body over a packed run, without lm_head."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import shift
from ..types import Batch, Features, Row, Wants
from . import attention
from .shape import TargetError, rope_from_config

if TYPE_CHECKING:
    from .model import Target
    from .parts import Parts

log = logging.getLogger(__name__)

PROBE = (9, 17, 12)  # lengths of the documents on which packing is tried


class Tap:
    """Copies the residual stream at the wanted indices into ``out`` [tokens, L, H] while a forward runs.

    Index i < n is the *input* of decoder layer i, index n the input of the final norm: the un-normed stream, whatever
    a family's layers return. ``start``: where the tokens of the next forward go.
    """

    def __init__(self, parts: Parts, layers: tuple[int, ...], tokens: int) -> None:
        count = len(parts.layers)
        if bad := [i for i in layers if not 0 <= i <= count]:
            raise TargetError(f"layers {bad} asked of a target whose hidden_states have indices 0..{count}")
        self.parts, self.wanted = parts, layers
        self.start, self.handles = 0, []
        reference = parts.norm.weight if hasattr(parts.norm, "weight") else parts.embed.weight
        shape = (tokens, len(layers), parts.config.hidden_size)
        self.out = torch.empty(shape, dtype=parts.embed.weight.dtype, device=reference.device)

    def _hook(self, column: int) -> Any:
        def copy(module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.out[self.start : self.start + hidden.shape[-2], column] = hidden.view(hidden.shape[-2:])

        return copy

    def __enter__(self) -> Tap:
        for column, index in enumerate(self.wanted):
            module = self.parts.layers[index] if index < len(self.parts.layers) else self.parts.norm
            self.handles.append(module.register_forward_pre_hook(self._hook(column), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def body_forward(parts: Parts, ids: Tensor, **kwargs: Any) -> Tensor:
    """ids [1, n] -> the residual stream after the final norm, [n, H]."""
    output = parts.body(input_ids=ids, **kwargs)
    return output[0][0]


def _packed(parts: Parts, batch: Batch) -> tuple[Tensor, attention.Run]:
    run = attention.Run.of(batch.cu, batch.ids.device)
    final = body_forward(
        parts,
        batch.ids[None],
        position_ids=batch.pos[None],
        attention_mask=attention.no_mask(batch.ids.device),
        use_cache=False,
        **{attention.KWARG: run},
    )
    return final, run


def _one_by_one(parts: Parts, batch: Batch, tap: Tap) -> Tensor:
    """Every document alone, through the family's own attention: exact for any family, slower for short documents."""
    bounds = batch.cu.tolist()
    finals = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        if a < b:
            tap.start = a
            finals.append(body_forward(parts, batch.ids[None, a:b], use_cache=False))
    return torch.cat(finals) if finals else parts.embed.weight.new_empty(0, parts.config.hidden_size)


@torch.no_grad()
def compute_features(target: Target, batch: Batch, wants: Wants) -> Features:
    """``features_in_graph`` without a graph. ``no_grad`` and not inference mode: the result enters the graph of a head
    that is trained on the fly."""
    return features_in_graph(target, batch, wants)


def features_in_graph(target: Target, batch: Batch, wants: Wants) -> Features:
    """The target's hidden states for a batch, on the target's device and in its dtype, with a graph to whatever of the
    target is trainable.

    One forward over the flat run where the family's attention can be packed exactly, else one a document.
    """
    batch = batch.to(target.device)
    with Tap(target.parts, wants.layers, len(batch)) as tap:
        if target.packs(batch):
            hidden, _ = _packed(target.parts, batch)
        else:
            hidden = _one_by_one(target.parts, batch, tap)
    if wants.final == "all":
        at = torch.arange(len(batch), device=hidden.device)
        final = hidden
    else:
        at = shift.final_positions(batch)
        final = hidden[at]
    argmax, lse = target.teacher().summary(final) if wants.summary else (None, None)
    return Features(tap.out, at, final, argmax, lse)


# -- may this family be packed? ---------------------------------------------------------------------------------


def probe_rows(vocab_size: int, lengths: tuple[int, ...]) -> list[Row]:
    """Rows of arbitrary tokens, the same for every run."""
    g = torch.Generator().manual_seed(7)
    return [Row(torch.randint(0, vocab_size, (n,), generator=g).tolist(), [0] * n, "probe") for n in lengths]


def packed_limit(config: Any) -> int | None:
    """Longest document that may be packed. Dynamic and long RoPE pick their frequencies by the longest position of a
    forward, so a document must not share one with another on the far side of the switch."""
    rope = rope_from_config(config)
    if rope["rope_type"] not in ("dynamic", "longrope"):
        return None
    return int(
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )


def expected_windows(config: Any, count: int) -> dict[int, int | None]:
    """The sliding window of each layer by the config; raises NotPacked for layer kinds other than full and sliding."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return dict.fromkeys(range(count), window)
    if other := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise attention.NotPacked(f"layers of kind {', '.join(other)}")
    return {i: window if kind == "sliding_attention" else None for i, kind in enumerate(kinds[:count])}


def _relative_error(a: Tensor, b: Tensor) -> float:
    """Per-token relative distance: the largest in fp32; the median in 16 bits, where rounding may send a token of a
    mixture to another expert, while a wrong mask moves every token of the later documents."""
    each = (a.float() - b.float()).flatten(1).norm(dim=1) / b.float().flatten(1).norm(dim=1).clamp(min=1e-12)
    return float(each.max() if a.dtype == torch.float32 else each.median())


@torch.no_grad()
def why_not_packed(parts: Parts) -> str | None:
    """Try packing on three short documents against a plain forward of each; None where they agree."""
    count, device = len(parts.layers), parts.embed.weight.device
    batch = Batch.pack(probe_rows(parts.embed.weight.shape[0], PROBE)).to(device)
    wanted = tuple(sorted({0, count // 2, count}))
    tolerance = 1e-4 if parts.embed.weight.dtype == torch.float32 else 5e-2
    try:
        windows = expected_windows(parts.config, count)
        with Tap(parts, wanted, len(batch)) as packed:
            final, run = _packed(parts, batch)
    except (attention.NotPacked, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if run.windows != windows:
        return f"the attention was told the windows {run.windows}, the config says {windows}"
    with Tap(parts, wanted, len(batch)) as plain:
        reference = _one_by_one(parts, batch, plain)
    errors = [_relative_error(packed.out[:, j], plain.out[:, j]) for j in range(len(wanted))]
    error = max([*errors, _relative_error(final, reference)])
    return None if error <= tolerance else f"packed features differ by {error:.2g} of their norm (allowed {tolerance})"


def enable_packing(parts: Parts, choice: str) -> bool:
    """Switch the body to packed attention where that is exact; say in the log where it is not.

    choice: the recipe's ``target.attention``. ``packed`` raises TargetError where it is not exact.
    """
    if choice in ("eager", "sdpa"):
        return False
    before = parts.config._attn_implementation
    if before != "sdpa":  # the family needs more than SDPA computes (soft-capping, sinks)
        reason = f"the family's attention here is {before!r}"
    else:
        attention.register()
        parts.body.set_attn_implementation(attention.NAME)
        reason = why_not_packed(parts)
        if reason is None:
            return True
        parts.body.set_attn_implementation(before)
    if choice == "packed":
        raise TargetError(f"target.attention is `packed`, which is not exact for this target: {reason}; use `auto`")
    log.info("features one document at a time: packing is not exact for this target (%s)", reason)
    return False
