"""Optimizers and learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config import TrainSection
from ..heads.base import DraftHead
from ..target.parts import whole


def lr_factor(step: int, total: int, schedule: str, warmup: float, decay: float, min_lr: float) -> float:
    """The learning rate of optimizer step ``step`` (1-based, 1..total) as a fraction of its peak.

    warmup: a fraction of ``total`` if below 1, else optimizer steps; linear, the peak is reached at its last step.
    The end (``min_lr``) is reached exactly at the last step, whatever epochs or micro-batches are.
    wsd: constant, then linear down over the last ``decay`` of the steps.
    """
    peak_at = max(1, min(total, round(warmup * total) if warmup < 1 else round(warmup)))
    if step < peak_at:
        return step / peak_at
    if schedule == "constant" or total == peak_at:
        return 1.0
    if schedule == "wsd":
        start = max(peak_at, total - max(1, round(decay * total)))
        gone = max(0.0, (step - start) / (total - start)) if total > start else 1.0
        return 1.0 + (min_lr - 1.0) * gone
    gone = (step - peak_at) / (total - peak_at)
    if schedule == "linear":
        return 1.0 + (min_lr - 1.0) * gone
    if schedule == "cosine":
        return min_lr + (1.0 - min_lr) * 0.5 * (1.0 + math.cos(math.pi * gone))
    raise ValueError(f"unknown schedule {schedule!r}")


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor that is split over ranks."""
    return value.to_local() if isinstance(value, DTensor) else value


def split_like(value: Tensor, p: Tensor) -> Tensor:
    """The whole ``value``, which each rank has, placed and split as ``p`` is."""
    value = value.to(p.device)
    if isinstance(p, DTensor):
        value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    return value


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan 2024), the update of ``torch.optim.Muon`` with its default
    ``sqrt(max(1, rows/columns))`` scale.

    The only difference is ``dtype``, the precision of the iteration: torch's is bfloat16 always, which a CPU without
    bf16 instructions runs about five times slower than fp32. A matrix that is split over ranks is gathered, and each
    rank orthogonalises all of it.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(self, params, lr: float, weight_decay: float, dtype: torch.dtype, momentum: float = 0.95) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = self._orthogonal(whole(p.grad.lerp(buffer, group["momentum"])))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(split_like(update, p), alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))

    def _orthogonal(self, x: Tensor, iterations: int = 5) -> Tensor:
        """[m, n] -> the nearest (semi-)orthogonal matrix, roughly: singular values in about 0.5 to 1.5."""
        a, b, c = self.COEFFICIENTS
        tall = x.shape[0] > x.shape[1]
        x = x.to(self.dtype)
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(iterations):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x


class HeadOptimizer:
    """All optimizers of a head behind one step, one learning-rate factor and one flat state.

    The state is a dict of tensors named ``optimizer/parameter/slot``, so that it can live in safetensors and is
    checked by name when it comes back.
    """

    def __init__(
        self,
        head: DraftHead,
        train: TrainSection,
        muon_dtype: torch.dtype = torch.bfloat16,
        adapter: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """adapter: parameters of the target that are trained with the head, at ``train.lr``; the head's rate is then
        ``train.joint.head_lr_factor`` times that."""
        named, adapter = head.trainable(), adapter or {}
        self.names = {p: n for n, p in [*named.items(), *adapter.items()]}
        self.shapes = {n: p.shape for p, n in self.names.items()}
        lr = train.lr * (train.joint.head_lr_factor if train.joint else 1.0)
        matrices = {n: p for n, p in named.items() if train.optimizer == "muon" and hidden_matrix(head, p)}
        rest = {n: p for n, p in named.items() if n not in matrices}
        decayed = [p for n, p in rest.items() if not head.no_decay(n, p)]
        plain = [p for n, p in rest.items() if head.no_decay(n, p)]
        kinds = [(decayed, train.weight_decay, lr), (plain, 0.0, lr)]
        kinds.append((list(adapter.values()), train.weight_decay, train.lr))
        groups = [dict(params=g, weight_decay=w, lr=rate) for g, w, rate in kinds if g]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if groups:
            fused = all(p.device.type in ("cpu", "cuda") for g in groups for p in g["params"])
            self.parts["adamw"] = self.adamw(groups, tuple(train.betas), fused)
        if matrices:
            self.parts["muon"] = Muon(list(matrices.values()), train.muon_lr, train.weight_decay, muon_dtype)
        for part in self.parts.values():
            for group in part.param_groups:
                group["base_lr"] = group["lr"]

    def adamw(self, groups: list[dict], betas: tuple[float, float], fused: bool) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, betas=betas, fused=fused)

    def step(self, factor: float) -> None:
        """One update at ``factor`` times each group's base learning rate."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = group["base_lr"] * factor
        self.update()

    def update(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for p in self.names:
            p.grad = None

    def state(self, keep: bool = True) -> dict[str, Tensor]:
        """Whole tensors, whatever they are split over; ranks do this together. keep: whether this rank wants them."""
        out = {}
        for name, part in self.parts.items():
            for p, slots in part.state.items():
                for slot, value in slots.items():
                    if slot != "step":
                        value = self.gather(value, self.names[p])
                    if keep:
                        out[f"{name}/{self.names[p]}/{slot}"] = value
        return out

    def gather(self, value: Tensor, name: str) -> Tensor:
        """All of what parameter ``name`` has on the ranks."""
        return whole(value)

    def place(self, value: Tensor, p: Tensor) -> Tensor:
        """A copy of the whole ``value``, or of this rank's part of it, where ``p`` is."""
        return split_like(value, p).clone()

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Raises ValueError for a name that no parameter has, a tensor of another shape, or half a state."""
        by_name = {n: p for p, n in self.names.items()}
        for part in self.parts.values():
            part.state.clear()
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            name, _, slot = rest.rpartition("/")
            part, p = self.parts.get(kind), by_name.get(name)
            if part is None or p is None:
                raise ValueError(f"optimizer state {key!r}: this head has no such parameter under {kind!r}")
            if slot != "step" and value.shape != self.shapes[name]:
                expected = tuple(self.shapes[name])
                raise ValueError(f"optimizer state {key!r}: shape {tuple(value.shape)}, expected {expected}")
            part.state[p][slot] = value.to(p.device, copy=True) if slot == "step" else self.place(value, p)
        for part in self.parts.values():
            slots = {frozenset(s) for s in part.state.values()}
            if len(slots) > 1:
                raise ValueError(f"optimizer state: some tensors are missing; found {sorted(map(sorted, slots))}")


def hidden_matrix(head: DraftHead, p: nn.Parameter) -> bool:
    """Whether Muon updates ``p``: matrices, except those with one row or column for each token (an lm_head or an
    embedding), which are no linear maps between hidden states. Decided by shape, so that no head is known here."""
    vocabularies = {head.draft_vocab_size, head.shape.vocab_size}
    return p.ndim == 2 and not vocabularies & set(p.shape)
