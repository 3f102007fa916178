"""A few values of a target's weights: two sets of weights that are not equal can still be seen to be relatives.

A digest says equal or not. Fine-tuning, merging and quantising move every value a little (the cosine of two samples
stays near 1); the weights of a model that was trained from another start have nothing to do with it (near 0).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .files import find_tensor_names, opened
from .parts import find_parts

SIDE = 24  # rows, and columns of each, at a fixed stride
# of the middle layer, the first that is there; engines and converters neither permute nor fuse these
OF_LAYER = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def _indices(count: int) -> list[int]:
    return sorted({(count - 1) * i // (SIDE - 1) for i in range(SIDE)})


def _take(rows: Tensor, columns: int) -> Tensor:
    return rows[:, _indices(columns)].to(torch.float32).flatten().contiguous()


def weight_sample(model: nn.Module) -> dict[str, Tensor]:
    """Of a loaded model: {"embed": [n], "layer.I.NAME": [n]} float32."""
    parts = find_parts(model)
    middle = len(parts.layers) // 2
    state = parts.layers[middle].state_dict()
    chosen = {"embed": parts.embed.weight}
    name = next((n for n in OF_LAYER if n in state), None)
    if name is not None:
        chosen[f"layer.{middle}.{name}"] = state[name]
    return {
        key: _take(t.detach()[_indices(t.shape[0])].cpu(), t.shape[1])
        for key, t in chosen.items()
        if t.ndim == 2 and t.is_floating_point()
    }


def local_weight_sample(folder: str | Path) -> dict[str, Tensor]:
    """The same from a folder's safetensors, a few rows of each; packed integers are left out. Raises TargetError."""
    found = find_tensor_names(folder)
    middle = len(found.layers) // 2
    chosen = {"embed": found.embed}
    name = next((n for n in OF_LAYER if n in found.layers[middle]), None)
    if name is not None:
        chosen[f"layer.{middle}.{name}"] = found.layers[middle][name]
    sample = {}
    for key, tensor in chosen.items():
        with opened(found.files[tensor]) as file:
            piece = file.get_slice(tensor)
            shape = piece.get_shape()
            if len(shape) != 2:
                continue
            rows = torch.cat([piece[i : i + 1] for i in _indices(shape[0])])
        if rows.is_floating_point():
            sample[key] = _take(rows, shape[1])
    return sample


def likeness(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Cosine of what both have, by name; 1 for equal and scaled weights, 0 for unrelated ones."""
    return {
        key: float(torch.cosine_similarity(a[key].float(), b[key].float(), dim=0))
        for key in a
        if key in b and a[key].shape == b[key].shape
    }
