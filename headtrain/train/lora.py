"""LoRA for a head (Hu et al. 2021, arXiv 2106.09685): each matrix W acts as W + (alpha / r) B A, and A and B alone
are trained. A mixture's experts lie in one tensor, [experts, out, in]; each has an A and a B of its own.

peft makes A and B. Its layers are not used: they add B A x to what a linear layer returns, and heads read weights
directly (halves of a projection, the lm_head of a chunked loss), where the update would be left out in silence. Here
the weight *is* the sum, a parametrization of torch, whoever reads it. For the same reason dropout cannot differ from
token to token: it drops inputs of A for a whole micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..config import LoraSection
from ..heads.base import DraftHead
from ..heads.io import DRAFT_IDS, head_tensors
from ..target.adapter import require_peft, select

FILE = "lora.safetensors"


class _Sum(nn.Module):
    """forward: W [..., out, in] -> W + scaling * B [..., out, r] A [..., r, in]."""

    def __init__(self, weight: Tensor, section: LoraSection) -> None:
        super().__init__()
        require_peft()
        from peft import LoraConfig
        from peft.tuners.lora import Linear

        *stack, out, size = weight.shape
        # made on the CPU, so that the same seed gives the same A on every device; W itself is not needed
        base = torch.nn.utils.skip_init(nn.Linear, size, out, bias=False)
        config = LoraConfig(r=section.r, lora_alpha=section.alpha)
        made = [Linear(base, "default", config, r=section.r, lora_alpha=section.alpha) for _ in range(math.prod(stack))]
        a, b = (
            torch.stack([getattr(x, name)["default"].weight.detach() for x in made]) for name in ("lora_A", "lora_B")
        )
        self.lora_A, self.lora_B = (nn.Parameter(x.view(*stack, *x.shape[1:])) for x in (a, b))
        self.to(weight.device, weight.dtype)
        self.scaling, self.dropout = made[0].scaling["default"], section.dropout

    def forward(self, weight: Tensor) -> Tensor:
        a = self.lora_A
        if self.training and self.dropout:
            a = a * nn.functional.dropout(torch.ones_like(a[..., :1, :]), self.dropout)
        return weight + self.lora_B @ a * self.scaling


def inject(head: DraftHead, section: LoraSection, seed: int) -> list[str]:
    """Adapt ``head`` in place: its matrices (those whose names end in one of ``section.targets``) act with their
    updates, zero at first, and nothing but the updates is trainable. Returns the matrices' names.

    Raises RecipeError where peft is missing, or for a target that no matrix has.
    """
    matrices = [name for name, p in head.trainable().items() if p.ndim in (2, 3)]
    chosen = matrices if section.targets is None else select(matrices, section.targets, "train.lora.targets")
    head.requires_grad_(False)
    torch.manual_seed(seed)
    for name in chosen:
        module, _, last = name.rpartition(".")
        owner = head.get_submodule(module)
        parametrize.register_parametrization(owner, last, _Sum(getattr(owner, last), section))
    return chosen


def adapted(head: DraftHead) -> bool:
    return any(isinstance(module, _Sum) for module in head.modules())


def state(head: DraftHead) -> dict[str, Tensor]:
    """A and B of every adapted matrix, ``fc.weight.lora_A`` and so on: what a resumed run needs beside the head that
    it started from."""
    return {_plain(name): p for name, p in head.trainable().items()}


def _plain(name: str) -> str:
    return name.replace("parametrizations.", "").replace(".0.lora_", ".lora_")


@torch.no_grad()
def load(head: DraftHead, tensors: dict[str, Tensor], saved: dict[str, Tensor], where: str) -> None:
    """Put ``state``'s tensors back. saved: the head that was saved with them; the head at hand, with the updates, must
    be the same up to rounding: the head that a run started from may have been replaced in the meantime. Raises
    ValueError."""
    own = state(head)
    if own.keys() != tensors.keys() or any(own[n].shape != tensors[n].shape for n in own):
        odd = sorted(n for n in own.keys() | tensors.keys() if n not in own or n not in tensors) or "shapes"
        raise ValueError(f"{where}: not the adapter of this head ({odd} differ)")
    for name, p in own.items():
        p.copy_(tensors[name])
    for name, tensor in head_tensors(head).items():
        if name == DRAFT_IDS:
            continue  # known by its hash
        if name not in saved or not torch.allclose(tensor.float(), saved[name].to(tensor.device).float(), 1e-4, 1e-5):
            raise ValueError(
                f"{where}: with this adapter {name} is not what was saved beside it; the head that train.warm_start "
                "names is not the one that the run began with"
            )
