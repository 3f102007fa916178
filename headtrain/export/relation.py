"""What one target is to another: the trained one, a quantised form, a derivative, or another model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..metadata import TargetIdentity

Kind = Literal["trained target", "adapter's base", "quantised form", "derivative", "other model", "other tokenizer",
               "unknown"]  # fmt: skip
# Cosine of sampled weights. Measured on SmolLM2-135M: rounded to 8, 4 and 3 bits 1.00, 1.00 and 0.98; noise of 30% of
# the weights' spread 0.96; unrelated weights 0.00 (a sample of some hundred values: within 0.15).
RELATED = 0.5
LOSSLESS = "Speculation stays lossless, but fewer drafts may be accepted: measure it with `headtrain eval`"


@dataclass(frozen=True)
class Relation:
    """kind: for programs; text: for people; weights: what the fingerprints say; same_weights: all of them equal."""

    kind: Kind
    text: str
    weights: str
    same_weights: bool = False


def relate(
    trained: TargetIdentity, found: TargetIdentity, *, sizes: bool, tokenizer: bool, alike: dict[str, float]
) -> Relation:
    """sizes: the architecture, its sizes and RoPE are equal; tokenizer: equal too; alike: ``target.sample.likeness``
    of the two, empty where one of them has no sample."""
    wanted, given = trained.acting, found.acting
    names = sorted({*wanted, *given})
    differ = [n for n in names if wanted.get(n) != given.get(n)]
    kept = [n for n in names if n not in differ]
    if not differ:
        return _equal(trained, found, sizes, tokenizer, len(names))
    weights = "all differ" if not kept else f"differ: {', '.join(differ)}; equal: {', '.join(kept)}"
    if alike:
        weights += f"; cosine of samples: {', '.join(f'{k} {v:.2f}' for k, v in alike.items())}"
    related = sum(alike.values()) / len(alike) >= RELATED if alike else True if kept else None
    if not sizes:
        return Relation("other model", "not the trained target: another model", weights)
    if not tokenizer:
        who = {True: "a derivative of the trained target", False: "another model", None: "other weights"}[related]
        text = f"not the trained target: {who} with another tokenizer; the ids mean other tokens"
        return Relation("other tokenizer", text, weights)
    if trained.adapter is not None and found.weights == trained.weights:
        text = (
            "the base of the trained target, without the adapter that was trained with the head. Speculation stays "
            "lossless, but fewer drafts are accepted: merge the adapter that lies beside the head into it"
        )
        return Relation("adapter's base", text, weights)
    if related is False:
        return Relation("other model", "not the trained target: another model of the same shape", weights)
    if related is None:
        text = (
            "not the trained target: every weight differs, and the export keeps no sample of the trained ones, so "
            "another model of the same shape cannot be told from a fine-tune of all weights (the probe measures it)"
        )
        return Relation("unknown", text, weights)
    if trained.quantization != found.quantization:
        return Relation("quantised form", _quantised(trained, found), weights)
    text = (
        "a derivative of the trained target (fine-tune, LoRA or merge): same sizes and tokenizer, other weights. "
        f"{LOSSLESS}, or train the head further on it"
    )
    return Relation("derivative", text, weights)


def _equal(trained: TargetIdentity, found: TargetIdentity, sizes: bool, tokenizer: bool, count: int) -> Relation:
    weights = f"all {count} equal"
    if not tokenizer:
        text = "the trained target's weights with another tokenizer: the ids mean other tokens"
        return Relation("other tokenizer", text, weights, True)
    text = "the trained target" if sizes else "the trained target's weights in another form"
    if trained.adapter is not None and found.adapter is None:
        text += " (the adapter that was trained with the head is merged in it)"
    return Relation("trained target" if sizes else "other model", text, weights, True)


def _quantised(trained: TargetIdentity, found: TargetIdentity) -> str:
    was, now = trained.quantization or "not quantised", found.quantization or "not quantised"
    what = (
        "a quantised form of the trained target" if found.quantization else "an unquantised form of the trained target"
    )
    return (
        f"{what} ({now}; trained on: {was}), or of a derivative: what quantising changes and what a fine-tune changes "
        f"cannot be told apart from files. {LOSSLESS}"
    )
