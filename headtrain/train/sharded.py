"""FSDP2: head, gradient and optimizer state are split over the ranks (torch's ``fully_shard``; ZeRO-3 by its idea,
Rajbhandari et al. 2020, arXiv 1910.02054).

Heads read each other's weights directly (an lm_head in a chunked loss, halves of a projection), so the head is one
unit: gathered before its forward pass, and its gradient scattered after the backward pass. It is small beside its
target; what is saved is the optimizer's state and the master weights between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .optim import local
from .replicated import Replicated


class Sharded(Replicated):
    """Every rank has its rows of each parameter, gradient and state, as DTensors."""

    sharded = True

    def wrap(self) -> nn.Module:
        device = next(self.loss.parameters()).device.type
        # the head is used at once from end to end: giving it back between forward and backward would save nothing
        return fully_shard(self.loss, mesh=init_device_mesh(device, (self.world,)), reshard_after_forward=False)

    def accumulating(self, last: bool) -> AbstractContextManager:
        self.wrapped.set_requires_gradient_sync(last)
        self.wrapped.set_reshard_after_backward(last)
        return nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        split = [
            (module, name, p)
            for module in self.loss.modules()
            for name, p in module.named_parameters(recurse=False)
            if isinstance(p, DTensor)
        ]
        for module, name, p in split:  # not FSDP's own unshard(): a state_dict() would split them again
            module.register_parameter(name, nn.Parameter(p.detach().full_tensor(), requires_grad=p.requires_grad))
        try:
            yield
        finally:
            for module, name, p in split:
                module.register_parameter(name, p)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: local(g) for p, g in super().gradients().items()}
