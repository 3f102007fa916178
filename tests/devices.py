"""Finds tensors that code makes on the CPU and then uses beside those of an accelerator, without an accelerator.

Tensors that the test marks as being on the device hand the mark on to all that is computed from them; those that a
factory makes without a device (``torch.arange(n)``) have none. An operation that meets both kinds would be an error on
an accelerator, and is one here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

MAY_MIX = {  # from one device to the other, and what reads its indices wherever they are
    "torch.Tensor.to",
    "torch.Tensor.copy_",
    "torch.Tensor.__getitem__",
    "torch.Tensor.type_as",
    "torch.Tensor.new_tensor",
}
LEAVES = {"torch.Tensor.cpu", "torch.Tensor.tolist", "torch.Tensor.item", "torch.Tensor.numpy"}


def on_device(*values: object) -> None:
    """Mark tensors, those of modules (parameters and buffers), and those that other objects hold as attributes."""
    for value in values:
        if isinstance(value, Tensor):
            value._on_device = True
        elif isinstance(value, torch.nn.Module):
            on_device(*value.parameters(), *value.buffers())
        else:
            on_device(*(x for x in vars(value).values() if isinstance(x, Tensor)))


def is_on_device(value: object) -> bool:
    return getattr(value, "_on_device", False)


class Devices(TorchFunctionMode):
    """Within it, mixing raises AssertionError."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = resolve_name(function) or getattr(function, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marked = [x for x in tensors if is_on_device(x)]
        # a number on the CPU may meet any tensor
        others = [x for x in tensors if not is_on_device(x) and x.ndim]
        if name not in MAY_MIX and marked and others:
            shapes = [tuple(x.shape) for x in others]
            raise AssertionError(f"{name}: tensors of shape {shapes} are on the CPU, others on the device")
        out = function(*args, **kwargs)
        placed = any(isinstance(x, torch.device) for x in tree_leaves((args, kwargs)))
        if (marked or placed) and name not in LEAVES:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    x._on_device = True
        return out
