"""DeepSpeed's ZeRO-1, -2 and -3 (Rajbhandari et al. 2020, arXiv 1910.02054), with or without CPU offload.

DeepSpeed moves and splits; what is computed stays this project's. Its loss scale is 1, its clipping off; the gradient
is divided by the global count and clipped between its backward pass and its step; the update is AdamW's for each
parameter by itself (one parameter group each), so that one that a step did not use is left alone, and the state can
be put together by name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import RecipeError, TrainSection
from ..heads.base import DraftHead
from .optim import HeadOptimizer
from .replicated import HeadLoss, Replicated

BUCKET = 500_000_000  # elements that are reduced at once


def require_deepspeed(device: torch.device) -> Any:
    """The package, told to use ``device``. Raises RecipeError where it is missing or unusable."""
    try:
        import deepspeed
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    except ImportError as error:
        why = "is not installed" if getattr(error, "name", "") == "deepspeed" else f"cannot be imported ({error})"
        raise RecipeError(
            f"ZeRO needs the package deepspeed, which {why}: pip install 'headtrain[deepspeed]'"
        ) from None
    if device.type == "cpu":
        set_accelerator(CPU_Accelerator())
        # gloo alone: a kernel that is compiled at the first use keeps all ranks waiting for a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_tested)
    # DeepSpeed calls both by older names, which do the same; torch attributes that to a module of its own
    old = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    return deepspeed


def _tested(record: logging.LogRecord) -> bool:
    """Not that ``_AdamW`` is unknown to DeepSpeed: tests/train/test_backends.py compares it with one process."""
    return "using ZeRO with an untested optimizer" not in record.getMessage()


class Unit(nn.Module):
    """The head as one module without children, to DeepSpeed: ZeRO-3 gathers a module's own parameters before its
    forward pass, and heads read each other's weights directly."""

    def __init__(self, loss: HeadLoss) -> None:
        super().__init__()
        self.call = loss.forward  # a bound method, not a submodule
        for number, p in enumerate(loss.parameters()):
            self.register_parameter(f"p{number}", p)

    def forward(self, *args) -> tuple[Tensor, Any]:
        return self.call(*args)


class Zero(Replicated):
    """stage: 1 (optimizer state is split), 2 (gradients, too), 3 (parameters, too). offload: what stays in the CPU's
    memory, ``optimizer`` and ``param``."""

    sharded = True

    def __init__(self, loss: HeadLoss, world: int, stage: int, offload: tuple[str, ...] = ()) -> None:
        self.stage, self.offload, self.accumulation = stage, offload, ExitStack()
        self.deepspeed = require_deepspeed(next(loss.parameters()).device)
        super().__init__(loss, world)

    def wrap(self) -> nn.Module:
        return self.loss  # DeepSpeed wraps it together with its optimizer

    def settings(self) -> dict[str, Any]:
        """DeepSpeed's config: the rest of what it can do is off."""
        count = sum(p.numel() for p in self.loss.parameters() if p.requires_grad)
        zero = {
            "stage": self.stage,
            "reduce_bucket_size": min(count, BUCKET),
            "allgather_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
        }
        for part in self.offload:
            zero[f"offload_{part}"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def optimizer(
        self, head: DraftHead, train: TrainSection, muon_dtype: torch.dtype, adapter: dict[str, nn.Parameter] | None
    ) -> HeadOptimizer:
        if train.optimizer != "adamw":
            raise RecipeError(
                f"train.optimizer: {train.optimizer} updates whole matrices, which ZeRO cuts up; use adamw, or the "
                "backend fsdp2 or ddp"
            )
        optimizer = ZeroOptimizer(head, train, muon_dtype, adapter)
        inner = optimizer.parts["adamw"]
        order = [optimizer.names[group["params"][0]] for group in inner.param_groups]
        engine, *_ = self.deepspeed.initialize(model=Unit(self.loss), optimizer=inner, config=self.settings())
        zero = engine.optimizer
        self.masters = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        self.groups = dict(zip(self.masters, inner.param_groups, strict=True))
        self.wrapped = engine
        optimizer.split(engine, dict(zip(self.masters, order, strict=True)))
        return optimizer

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Gradients are reduced once a step, parameter by parameter in the order of their groups. Left alone, stages 2
        and 3 reduce them in the order that they become ready in, which follows from the graph: a rank without anything
        to learn from would add other parameters' gradients to its peers'."""
        if not self.wrapped.inside_no_sync_ctxt:
            self.accumulation.enter_context(self.wrapped.coalesce_grad_reduction())
        yield
        if last:
            self.accumulation.close()

    def backward(self, total: Tensor) -> None:
        self.wrapped.backward(total)

    def whole(self) -> AbstractContextManager:
        return self.deepspeed.zero.GatheredParameters(list(self.loss.parameters()))

    def gradients(self) -> dict[Tensor, Tensor]:
        """By master: this rank's part of a parameter, flat, in fp32."""
        if "optimizer" in self.offload:
            return {master: master.grad for master in self.masters}
        pieces = self.wrapped.optimizer.averaged_gradients  # of each the part, and perhaps zeros that fill it up
        return {master: pieces[number][0] for number, master in enumerate(self.masters)}

    def unused(self, parameter: Tensor) -> None:
        self.groups[parameter]["used"] = False


class _AdamW(torch.optim.AdamW):
    """AdamW that leaves out groups that are not ``used``."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        every = self.param_groups
        self.param_groups = [group for group in every if group["used"]]
        try:
            super().step()
        finally:
            self.param_groups = every


class ZeroOptimizer(HeadOptimizer):
    """AdamW on each rank's part of each parameter, inside DeepSpeed's step."""

    def adamw(self, groups: list[dict], betas: tuple[float, float], fused: bool) -> torch.optim.AdamW:
        apart = [group | {"params": [p], "used": True} for group in groups for p in group["params"]]
        return _AdamW(apart, betas=betas, fused=fused)

    def split(self, engine: Any, names: dict[Tensor, str]) -> None:
        """The parameters are split now. names: by this rank's part of each, the rank-th of equal parts, flat and filled
        up with zeros."""
        self.engine, self.names, self.stepped = engine, names, False

    def update(self) -> None:
        self.engine.step()
        self.stepped = True

    def zero_grad(self) -> None:
        """DeepSpeed forgets gradients by a step alone; one that was not taken is made to change nothing."""
        groups = self.parts["adamw"].param_groups
        if not self.stepped:
            for group in groups:
                group["used"] = False
            self.engine.step()
        self.stepped = False
        for group in groups:
            group["used"] = True

    def gather(self, value: Tensor, name: str) -> Tensor:
        device = self.engine.device  # offloaded state is where no collective of a GPU reaches
        parts = [torch.empty_like(value, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.to(device))
        shape = self.shapes[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def place(self, value: Tensor, p: Tensor) -> Tensor:
        flat = torch.zeros(p.numel() * dist.get_world_size(), dtype=p.dtype)
        flat[: value.numel()] = value.reshape(-1)
        return flat.view(-1, p.numel())[dist.get_rank()].to(p.device, copy=True)
