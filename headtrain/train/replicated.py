"""The head whole on every rank: one process, and data parallel (DDP). The surface of all strategies is here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from ..config import TrainSection
from ..heads.base import DraftHead
from ..teacher import Teacher
from ..types import Batch, Features, LossSums
from .joint import Joint
from .optim import HeadOptimizer


class HeadLoss(nn.Module):
    """A head's loss as ``forward``, the form that wrappers hook into. head: or what is trained like one
    (``joint.Joint``)."""

    def __init__(self, head: DraftHead | Joint, autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """autocast: entered around the loss; in here, because DeepSpeed turns off what is entered outside."""
        super().__init__()
        self.head, self.autocast = head, autocast
        # Buffers are the target's frozen tensors, the same on every rank: never sent around.
        names = [name for name, _ in self.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(
        self, batch: Batch, features: Features, teacher: Teacher, depth: int, exchange: bool = False
    ) -> tuple[Tensor, LossSums]:
        """The total, which wrappers find as a tensor of its own, and the sums.

        exchange: ranks add up their gradients in this backward pass, which waits for one of every parameter; a
        shallow stage of the depth schedule gives none to some, so each is made to have one (zero)."""
        with self.autocast(), parametrize.cached():  # a weight that is computed (LoRA) is computed once
            sums = self.head.loss(batch, features, teacher, depth)
        total = sums.total
        if exchange:
            total = total + sum(p.reshape(-1)[0] for p in self.head.parameters() if p.requires_grad) * 0.0
        return total, sums.detached()


class Replicated:
    """Every rank has the whole head, its gradient and its optimizer state. The base of what shards them."""

    sharded = False  # whether ``gradients`` gives a part of each, and ``whole`` and ``HeadOptimizer.state`` communicate

    def __init__(self, loss: HeadLoss, world: int) -> None:
        self.loss, self.world = loss, world
        self.wrapped = self.wrap()

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.loss, gradient_as_bucket_view=True) if self.world > 1 else self.loss

    def exchanges(self, last: bool) -> bool:
        """Whether ranks exchange gradients in a micro-batch's backward pass, which is the ``last`` one of its step."""
        return last and self.world > 1

    def accumulating(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch; before the ``last`` one gradients are added up locally."""
        return nullcontext() if last or self.world == 1 else self.wrapped.no_sync()

    def backward(self, total: Tensor) -> None:
        total.backward()

    def whole(self) -> AbstractContextManager:
        """All parameters are there, whole, as ordinary tensors; to be entered by all ranks together."""
        return nullcontext()

    def optimizer(
        self, head: DraftHead, train: TrainSection, muon_dtype: torch.dtype, adapter: dict[str, nn.Parameter] | None
    ) -> HeadOptimizer:
        return HeadOptimizer(head, train, muon_dtype, adapter)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of the mean over ranks, by parameter, to be changed in place; the same parameters in the
        same order on every rank."""
        return {p: p.grad for p in self.loss.parameters() if p.grad is not None}

    def unused(self, parameter: nn.Parameter) -> None:
        """The optimizer is to leave ``parameter`` alone in this step."""
        parameter.grad = None
