"""The only importer of accelerate: devices, ranks, precision, gradients and trackers behind a small surface."""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from torch import Tensor, nn

from ..config import RecipeError, TrainSection
from ..heads.base import DraftHead
from ..teacher import Teacher
from ..types import Batch, Features, LossSums
from .joint import Joint
from .launched import hidden, idle_gpus, strategy
from .optim import HeadOptimizer
from .replicated import HeadLoss


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
    masters). Trackers are started on the main process alone. timeout: seconds that one exchange may take."""

    def __init__(
        self,
        precision: str = "auto",
        trackers: list[str] | None = None,
        folder: Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        trackers = trackers or []
        for name in trackers:
            if importlib.util.find_spec(name) is None:
                raise RecipeError(f"train.trackers: {name} is not installed; pip install 'headtrain[{name}]'")
        # Without an accelerator a run is a CPU run, also where `accelerate launch` was not told `--cpu`.
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        self._split = strategy()
        with hidden():  # accelerate brings ranks up and finds devices; what is split over them is split here
            self.device = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout)).device
            self.precision = resolve_precision(precision, self.device)
            self.accelerator = Accelerator(
                cpu=cpu,
                mixed_precision="bf16" if self.precision == "bf16" else "no",
                log_with=trackers or None,
                project_dir=str(folder) if folder else None,
            )
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        if self.device.type == "cpu":
            # `accelerate launch` gives each process one thread; a run takes the machine's cores, shared by its ranks
            local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        self.main = self.accelerator.is_main_process
        self.idle_gpus = idle_gpus(torch.accelerator.device_count()) if self.device.type != "cpu" else None

    def prepare(self, head: DraftHead | Joint) -> None:
        """Wrap what is trained, and nothing else."""
        self._strategy = self._split(HeadLoss(head.to(self.device), self.accelerator.autocast), self.world)

    def optimizer(
        self, head: DraftHead, train: TrainSection, adapter: dict[str, nn.Parameter] | None = None
    ) -> HeadOptimizer:
        """Of what was prepared; arguments as in ``HeadOptimizer``."""
        bf16_is_fast = self.device.type != "cpu" or cpu_has_bf16()
        return self._strategy.optimizer(head, train, torch.bfloat16 if bf16_is_fast else torch.float32, adapter)

    def whole(self) -> AbstractContextManager:
        """The head's parameters are there, whole, on every rank: to evaluate or to save. For all ranks together."""
        return self._strategy.whole()

    def backward(self, micro: tuple[Batch, Features], teacher: Teacher, depth: int, seed: int, last: bool) -> LossSums:
        """One micro-batch: loss and its gradient, added to what is there. Ranks exchange gradients at the ``last``
        one of an optimizer step only. The generators are seeded, so that a head's noise does not depend on the number
        of ranks or on interruptions."""
        set_seed(seed)
        with self._strategy.accumulating(last):
            total, sums = self._strategy.wrapped(*micro, teacher, depth, self._strategy.exchanges(last))
            self._strategy.backward(total)
        return sums

    @torch.no_grad()
    def evaluate(self, micro: tuple[Batch, Features], teacher: Teacher, depth: int) -> LossSums:
        """Loss sums without gradient or communication, so that ranks may hold unequal numbers of batches. Inside
        ``whole``."""
        set_seed(0)
        loss = self._strategy.loss
        loss.eval()
        try:
            return loss.forward(*micro, teacher, depth)[1]  # not called: wrappers' hooks stay out
        finally:
            loss.train()

    def normalise(self, count: float, clip: float) -> float:
        """Divide the accumulated gradient by the global supervised ``count`` and clip it by its global norm, in one
        pass. Returns the norm before clipping (not finite: nothing was changed).

        A gradient that is zero throughout is taken away: nothing of this step used the parameter, and its optimizer
        state must not depend on whether an exchange between ranks filled in the zeros.
        """
        used = self._strategy.gradients()
        squares = torch.zeros(0, dtype=torch.float64)
        if used:
            squares = torch.stack(torch._foreach_norm(list(used.values()))).double().square()
        squares = (self.sum(squares) if self._strategy.sharded else squares).tolist()
        grads = []
        for (p, grad), square in zip(used.items(), squares, strict=True):
            if square == 0:
                self._strategy.unused(p)
            else:
                grads.append(grad)
        # The ranks' sums were averaged: times world is their sum.
        scale = self.world / max(count, 1.0)
        total = math.sqrt(sum(squares)) * scale
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
