"""The forms in which hidden states are stored, and what each costs on disk.

``layers`` may be bfloat16, float32, or int8 with a float32 scale for each token and layer (absmax / 127). The scale
is float32 and not float16: embeddings of about 1e-3 would put it among float16's subnormals, and 4 bytes beside H
bytes are nothing. Outlier channels ("massive activations", largest on the first token of a sequence) coarsen the
int8 grid of their own token and layer, of no other: on SmolLM2-135M (layers 2, 15, 27), where the largest entry is 12
to 17 times the root mean square, int8 moves a hidden state by 2.6 to 3.8 % of its norm, bfloat16 by at most 0.2 %.

``final`` is never int8: the teacher's distribution is a product of it with the whole lm_head, where an error of
1/254 of the largest entry moves argmax and acceptance, and there is one final vector against L layer vectors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..types import Features

Form = Literal["bfloat16", "float32", "int8"]
LAYER_DTYPE: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
ROW_BYTES = 48  # boundaries and token hash of one row
ID_BYTES = 8  # token id and turn number, int32 each


def final_dtype(form: Form) -> torch.dtype:
    """The dtype of stored final features: float32 in a float32 store, else bfloat16."""
    return torch.float32 if form == "float32" else torch.bfloat16


def encode(layers: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    """layers [T, L, H] -> (stored values [T, L, H], scale [T, L] float32 for int8, else None)."""
    if form != "int8":
        return layers.to(LAYER_DTYPE[form]), None
    x = layers.float()
    scale = x.abs().amax(-1) / 127
    step = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / step[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def decode(values: Tensor, scale: Tensor | None) -> Tensor:
    """Stored values -> layers [T, L, H]; int8 becomes float32, other forms stay as they are."""
    return values if scale is None else values.float() * scale[..., None]


def as_stored(features: Features, form: Form) -> Features:
    """The features with the rounding that a store of this form gives: what makes on-the-fly equal offline."""
    return replace(
        features,
        layers=decode(*encode(features.layers, form)),
        final=features.final.to(final_dtype(form)),
        lse=None if features.lse is None else features.lse.float(),
    )


def bytes_per_token(
    hidden: int, n_layers: int, form: Form, final: Literal["supervised", "all"], supervised_fraction: float = 1.0
) -> float:
    """Bytes on disk of one token: its layers, its id and turn mark, and its share of the final features (with their
    position, argmax and log-sum-exp: 12 bytes). ``supervised_fraction`` counts where ``final`` is "supervised"."""
    layers = n_layers * (hidden * LAYER_DTYPE[form].itemsize + (4 if form == "int8" else 0))
    share = 1.0 if final == "all" else supervised_fraction
    return layers + ID_BYTES + share * (hidden * final_dtype(form).itemsize + 12)
