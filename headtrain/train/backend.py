"""The only importer of accelerate: devices, ranks, precision, gradients and trackers behind a small surface."""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from ..config import RecipeError
from ..heads.base import DraftHead
from ..teacher import Teacher
from ..types import Batch, Features, LossSums
from .joint import Joint


class HeadLoss(nn.Module):
    """A head's loss as ``forward``, the form that data-parallel wrappers hook into. head: or what is trained like one
    (``joint.Joint``)."""

    def __init__(self, head: DraftHead | Joint) -> None:
        super().__init__()
        self.head = head
        # Buffers are the target's frozen tensors, the same on every rank: never sent around.
        names = [name for name, _ in self.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(
        self, batch: Batch, features: Features, teacher: Teacher, depth: int, exchange: bool = False
    ) -> LossSums:
        """exchange: ranks add up their gradients in this backward pass, which waits for one of every parameter; a
        shallow stage of the depth schedule gives none to some, so each is made to have one (zero)."""
        with parametrize.cached():  # a weight that is computed (LoRA) is computed once
            sums = self.head.loss(batch, features, teacher, depth)
        if not exchange:
            return sums
        nothing = sum(p.reshape(-1)[0] for p in self.head.parameters() if p.requires_grad) * 0.0
        return replace(sums, total=sums.total + nothing)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX or AVX512_BF16); elsewhere bf16 is several times slower than
    fp32. macOS and Windows have no /proc/cpuinfo: False."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in flags.split() for flag in ("amx_bf16", "avx512_bf16"))


def resolve_precision(wanted: str, device: torch.device) -> str:
    """``auto`` as fp32 or bf16: bf16 where the hardware is fast at it."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and cpu_has_bf16() else "fp32"


class Backend:
    """One process of a run. ``rank`` of ``world``; ``device``; ``precision``: fp32, or bf16 (autocast over fp32
    masters). Trackers are started on the main process alone."""

    def __init__(self, precision: str = "auto", trackers: list[str] | None = None, folder: Path | None = None) -> None:
        trackers = trackers or []
        for name in trackers:
            if importlib.util.find_spec(name) is None:
                raise RecipeError(f"train.trackers: {name} is not installed; pip install 'headtrain[{name}]'")
        # Without an accelerator a run is a CPU run, also where `accelerate launch` was not told `--cpu`.
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        self.device = PartialState(cpu=cpu).device
        self.precision = resolve_precision(precision, self.device)
        self.accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="bf16" if self.precision == "bf16" else "no",
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            log_with=trackers or None,
            project_dir=str(folder) if folder else None,
        )
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        if self.device.type == "cpu":
            # `accelerate launch` gives each process one thread; a run takes the machine's cores, shared by its ranks
            local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        self.main = self.accelerator.is_main_process

    def prepare(self, head: DraftHead | Joint) -> None:
        """Wrap what is trained, and nothing else."""
        self._loss = HeadLoss(head.to(self.device))
        self._wrapped = self.accelerator.prepare(self._loss)
        self._parameters = [p for p in head.parameters() if p.requires_grad]

    def backward(self, micro: tuple[Batch, Features], teacher: Teacher, depth: int, seed: int, last: bool) -> LossSums:
        """One micro-batch: loss and its gradient, added to what is there. Ranks exchange gradients at the ``last``
        one of an optimizer step only. The generators are seeded, so that a head's noise does not depend on the number
        of ranks or on interruptions."""
        set_seed(seed)
        exchange = last and self.world > 1
        local = nullcontext() if exchange or self.world == 1 else self.accelerator.no_sync(self._wrapped)
        with local:
            sums = self._wrapped(*micro, teacher, depth, exchange)
            self.accelerator.backward(sums.total)
        return sums.detached()

    @torch.no_grad()
    def evaluate(self, micro: tuple[Batch, Features], teacher: Teacher, depth: int) -> LossSums:
        """Loss sums without gradient or communication, so that ranks may hold unequal numbers of batches."""
        set_seed(0)
        self._loss.eval()
        try:
            return self._loss(*micro, teacher, depth).detached()
        finally:
            self._loss.train()

    def normalise(self, count: float, clip: float) -> float:
        """Divide the accumulated gradient by the global supervised ``count`` and clip it by its global norm, in one
        pass. Returns the norm before clipping (not finite: nothing was changed).

        A gradient that is zero throughout is taken away: nothing of this step used the parameter, and its optimizer
        state must not depend on whether an exchange between ranks filled in the zeros.
        """
        used = [p for p in self._parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([p.grad for p in used])).double().tolist() if used else []
        for p, norm in zip(used, norms, strict=True):
            if norm == 0:
                p.grad = None
        # DDP averaged the ranks' sums: times world is their sum.
        scale = self.world / max(count, 1.0)
        total = math.sqrt(sum(n * n for n in norms)) * scale
        grads = [p.grad for p in used if p.grad is not None]
        if grads and math.isfinite(total):
            torch._foreach_mul_(grads, scale * min(1.0, clip / (total + 1e-6)))
        return total

    def sum(self, values: Tensor) -> Tensor:
        """All ranks' values added up; on the CPU."""
        if self.world == 1:
            return values.cpu()
        return self.accelerator.reduce(values.to(self.device), reduction="sum").cpu()

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def start_trackers(self, run: str, config: dict[str, Any]) -> None:
        """wandb reads WANDB_MODE and its own login; nothing of the environment is logged."""
        names = [str(t) for t in self.accelerator.log_with]
        plain = {k: v if isinstance(v, int | float | str) else repr(v) for k, v in config.items()}
        try:
            self.accelerator.init_trackers("headtrain", plain, {"wandb": {"name": run}} if "wandb" in names else {})
        except Exception as error:  # each tracker raises its own kinds
            hint = "; WANDB_MODE=offline needs no account" if "wandb" in names else ""
            raise RecipeError(f"train.trackers: {', '.join(names)} did not start: {error}{hint}") from error

    def log(self, values: dict[str, float], step: int) -> None:
        self.accelerator.log(values, step=step)

    def finish(self) -> None:
        self.accelerator.end_training()
