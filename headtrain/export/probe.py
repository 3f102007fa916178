"""A behavioural probe: what the target made of one short text, stored beside an export and compared at check time.

Fingerprints say whether a target *is* the trained one; the probe says whether it *behaves* as one, and so measures
how far a derivative is away, and sees what no fingerprint does (a wrong RoPE setting, a norm applied twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..heads.io import read_tensors
from ..target.sample import weight_sample
from ..types import Batch, Row, Wants
from .engines import ExportError

FILE = "probe.safetensors"
SAMPLE = "sample/"  # before the names of the target's sampled weights, which lie in the same file
LENGTH = 32
TEXT = (
    "The river rises in the mountains, crosses three countries and reaches the sea after 1,233 km. "
    'def area(width, height): return width * height  # {"unit": "m2"}'
)
# Relative error of a hidden state: float32 runs differ by summation order alone; bf16 carries 8 bits through every
# layer. A wrong theta, a missing norm or other weights are off by tens of per cent.
TOLERANCE = {"float32": 2e-3, "bfloat16": 6e-2, "float16": 2e-2}


@dataclass(frozen=True)
class ProbeResult:
    """layers: mean relative error by layer index; final: the same of the final feature; greedy: share of positions
    where the greedy token is the stored one; tolerance: what rounding explains, by the coarser of the two dtypes."""

    layers: dict[int, float]
    final: float
    greedy: float
    tolerance: float

    @property
    def worst(self) -> float:
        return max([self.final, *self.layers.values()])


def make_probe(target, layers: tuple[int, ...] | list[int]) -> dict[str, Tensor]:
    """Run ``target`` (a loaded ``headtrain.target`` Target) over the probe's text.

    Returns ids [n] int64, layer_ids [L] int64, layers [n, L, H] (absent where L is 0), final [n, H], argmax [n], and
    a few of its weights under ``sample/`` (``target.sample``).
    """
    ids = target.tokenizer(TEXT, add_special_tokens=False)["input_ids"][:LENGTH]
    if len(ids) < 8:
        raise ExportError(f"the probe's text gives {len(ids)} tokens with this tokenizer, expected at least 8")
    found = _features(target, ids, tuple(layers))
    tensors = {"ids": torch.tensor(ids), "final": found.final.cpu(), "argmax": found.argmax.cpu()}
    if layers:
        tensors["layer_ids"] = torch.tensor(list(layers))
        tensors["layers"] = found.layers.cpu()
    return tensors | {SAMPLE + name: values for name, values in weight_sample(target.model).items()}


def _features(target, ids: list[int], layers: tuple[int, ...]):
    # every token in one assistant turn: features of all positions are kept
    batch = Batch.pack([Row(ids, [1] * len(ids), source="probe")])
    return target.features(batch, Wants(layers=layers, final="all", depth=1, summary=True))


def read_probe(folder: Path) -> dict[str, Tensor]:
    """Raises ExportError where the file is damaged or incomplete."""
    try:
        tensors = read_tensors(folder / FILE)
    except ValueError as error:
        raise ExportError(str(error)) from None
    missing = {"ids", "final", "argmax"} - tensors.keys()
    if missing:
        raise ExportError(f"{folder / FILE}: missing {sorted(missing)}")
    return tensors


def stored_sample(probe: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trained target's sampled weights; empty in a probe of an earlier version."""
    return {name.removeprefix(SAMPLE): values for name, values in probe.items() if name.startswith(SAMPLE)}


def compare(probe: dict[str, Tensor], target) -> ProbeResult:
    """Run ``target`` over the stored ids and compare. The ids must lie inside its vocabulary, the sizes must fit."""
    layer_ids = probe["layer_ids"].tolist() if "layer_ids" in probe else []
    found = _features(target, probe["ids"].tolist(), tuple(layer_ids))
    errors = {layer: _relative(found.layers[:, j], probe["layers"][:, j]) for j, layer in enumerate(layer_ids)}
    same = (found.argmax.cpu() == probe["argmax"]).float().mean()
    tolerance = max(TOLERANCE.get(str(x.dtype).removeprefix("torch."), 0.06) for x in (found.final, probe["final"]))
    return ProbeResult(errors, _relative(found.final, probe["final"]), float(same), tolerance)


def _relative(found: Tensor, stored: Tensor) -> float:
    """Mean over positions of |found - stored| / |stored|."""
    found, stored = found.float().cpu(), stored.float()
    return float(((found - stored).norm(dim=-1) / stored.norm(dim=-1).clamp_min(1e-12)).mean())
