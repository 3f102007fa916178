"""Sums of a window of training or of an evaluation, and the numbers that people read."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..types import LossSums


def zeros(depths: int, device: torch.device | str = "cpu") -> LossSums:
    """Sums of nothing."""
    scalar = torch.zeros((), device=device)
    return LossSums(scalar, scalar, *[torch.zeros(depths, device=device) for _ in LossSums.PER_DEPTH])


def flatten(sums: LossSums, depths: int) -> Tensor:
    """[2 + 7 * depths] float64 on the CPU, so that ranks add up in one all-reduce and counts stay exact."""
    padded = sums.detached() + zeros(depths, sums.loss.device)
    return torch.cat([getattr(padded, f.name).reshape(-1) for f in fields(LossSums)]).cpu().double()


def unflatten(flat: Tensor) -> LossSums:
    depths = (flat.numel() - 2) // len(LossSums.PER_DEPTH)
    return LossSums(flat[0], flat[1], *flat[2:].split(depths))


def report(sums: LossSums) -> dict[str, Any]:
    """JSON-able numbers. loss: weighted, a supervised position. The lists have one entry a depth: loss, greedy
    accuracy, expected acceptance under sampling, alpha (conditional acceptance of greedy drafting), cumulative
    (product of alphas). tau: the simulated acceptance length of a chain as deep as the sums (``LossSums.simulated``),
    not that of a decoding. A depth without any pair reads None, and 0 in ``cumulative``.
    """
    sums = sums.detached()
    tau, alpha, cumulative = sums.simulated()
    return {
        "loss": float(sums.total) / max(float(sums.count), 1.0),
        "tau": tau,
        "supervised": int(sums.count),
        "alpha": alpha,
        "cumulative": cumulative,
        "accuracy": _ratios(sums.hits, sums.pairs),
        "acceptance": _ratios(sums.accept, sums.pairs),
        "depth_loss": _ratios(sums.loss, sums.loss_count),
    }


def _ratios(part: Tensor, whole: Tensor) -> list[float | None]:
    return [float(a) / float(b) if float(b) else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]


def scalars(numbers: dict[str, Any], prefix: str) -> dict[str, float]:
    """The same numbers as flat scalars for trackers: ``prefix/loss``, ``prefix/alpha_1`` ..."""
    out = {}
    for name, value in numbers.items():
        values = {f"{name}_{k}": v for k, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        out |= {f"{prefix}/{n}": float(v) for n, v in values.items() if isinstance(v, (int, float))}
    return out


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line with its optimizer ``step``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        """On disk at once: a machine that dies takes no line of a checkpoint that it leaves."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All lines that are whole; what a kill or a dying machine left of others is passed over."""
        return self._read()[0]

    def truncate(self, step: int) -> int:
        """Forget every line after ``step``, so that a resumed curve has no duplicates, and those that cannot be read.
        Returns the number of these, without a last one that was cut off."""
        lines, torn = self._read()
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line["step"] <= step)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        return torn

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        if not self.path.exists():
            return [], 0
        *texts, last = self.path.read_bytes().split(b"\n")
        lines = [_parsed(text) for text in [*texts, last]]
        whole = [line for line in lines if line is not None]
        return whole, sum(line is None for line in lines[:-1])


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: no JSON, no UTF-8
        return None
    sound = isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("kind"), str)
    return line if sound else None
