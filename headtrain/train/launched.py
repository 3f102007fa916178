"""What `accelerate launch` was asked for: how the head is split over ranks.

The launcher tells its processes by environment variables. accelerate itself would act on them in each process, with
plugins that turn FSDP off on CPUs and know nothing of a gradient that is divided by a global count; so here they are
read, and kept from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate.utils import parse_flag_from_env

from ..config import RecipeError
from .replicated import HeadLoss, Replicated
from .sharded import Sharded

FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


def strategy() -> Callable[[HeadLoss, int], Replicated]:
    """Makes the strategy that the launcher's config asks for from (loss, world). Raises RecipeError for one that this
    project or this machine does not have."""
    if parse_flag_from_env(FSDP):
        _check_fsdp()
        return Sharded
    return Replicated


def _check_fsdp() -> None:
    found = {
        "fsdp_version": (os.environ.get("FSDP_VERSION", "1"), "2"),
        "fsdp_offload_params": (os.environ.get("FSDP_OFFLOAD_PARAMS", "false"), "false"),
        # transformers would load the target on one rank only
        "fsdp_cpu_ram_efficient_loading": (os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false"), "false"),
    }
    if wrong := [f"{name}: {value}, expected {need}" for name, (value, need) in found.items() if value != need]:
        raise RecipeError(f"launcher's config: {'; '.join(wrong)}; recipes/backend/fsdp2.yaml is one that works")


@contextmanager
def hidden() -> Iterator[None]:
    """The launcher's flags out of accelerate's sight."""
    kept = {name: os.environ.pop(name) for name in (FSDP, DEEPSPEED) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
