"""What `accelerate launch` was asked for: how the head is split over ranks.

The launcher tells its processes by environment variables. accelerate itself would act on them in each process, with
plugins that turn FSDP off on CPUs and know nothing of a gradient that is divided by a global count; so here they are
read, and kept from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate.utils import parse_flag_from_env

from ..config import RecipeError
from .replicated import HeadLoss, Replicated
from .sharded import Sharded
from .zero import Zero

_EACH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # accelerate reads them
ASKED = "HEADTRAIN_WORLD"  # ranks of the whole run, as scripts/launch asked for them
FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


def check_ranks() -> None:
    """Whether all is set that a process of several needs to know. Raises RecipeError: with some of it missing, parts of
    torch and accelerate would take it for one process and others for a rank, and wait for each other."""
    env = os.environ
    _check_world(env.get(ASKED), env.get("WORLD_SIZE") or "1")
    several = [name for name in ("RANK", "LOCAL_RANK") if name in env]
    several += [name for name in ("WORLD_SIZE", *_MPI_SIZES) if env.get(name, "1") != "1"]
    if not several or (several == ["RANK"] and (env["RANK"], env.get("WORLD_SIZE")) == ("0", "1")):
        return
    if missing := [name for name in _EACH if not env.get(name)]:
        found = ", ".join(f"{name}={env[name]}" for name in several)
        raise RecipeError(
            f"{found} is set, and {', '.join(missing)} not: each of several processes needs {', '.join(_EACH)}. "
            "`accelerate launch --config_file recipes/backend/ddp.yaml --num_processes N -m headtrain.train` and "
            f"`torchrun -m headtrain.train` set them, see scripts/launch/README.md; for one process unset "
            f"{', '.join(several)}"
        )
    numbers = {name: env[name] for name in _EACH if name != "MASTER_ADDR"}
    if bad := [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]:
        raise RecipeError(f"{', '.join(bad)}: expected whole numbers from 0")
    rank, local, world, port = (int(value) for value in numbers.values())
    if not (rank < world and local < world and 0 < port < 65536):
        raise RecipeError(
            f"RANK={rank}, LOCAL_RANK={local}, WORLD_SIZE={world}, MASTER_PORT={port}: expected ranks below WORLD_SIZE "
            "and a port from 1 to 65535"
        )


def _check_world(asked: str | None, world: str) -> None:
    """Whether the launcher did what the launch script asked of it: nodes that did not find each other would train the
    same run several times over."""
    if asked is None or asked == world:
        return
    raise RecipeError(
        f"{ASKED}={asked}, but WORLD_SIZE={world}: the launch script asked for {asked} ranks (nodes x processes), and "
        f"this process was started as one of {world}. See what the launcher printed above this: it did not connect the "
        "nodes (a ZeRO config needs deepspeed_multinode_launcher: standard, as recipes/backend/zero2.yaml has it) or "
        f"started another number of processes. Without a launch script unset {ASKED}"
    )


def idle_gpus(there: int) -> str | None:
    """A line on GPUs that this process sees and no rank of its node uses, of ``there``."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    if there <= ranks:
        return None
    return (
        f"{ranks} of this node's {there} GPUs {'is' if ranks == 1 else 'are'} used. For all: accelerate launch "
        f"--config_file recipes/backend/ddp.yaml --num_processes {there} -m headtrain.train RECIPE. "
        "CUDA_VISIBLE_DEVICES=0,... keeps out of sight what is not for this run"
    )


def strategy() -> Callable[[HeadLoss, int], Replicated]:
    """Makes the strategy that the launcher's config asks for from (loss, world). Raises RecipeError for one that this
    project or this machine does not have."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Replicated  # nothing to split
    if parse_flag_from_env(DEEPSPEED):
        return partial(Zero, **_zero())
    if parse_flag_from_env(FSDP):
        _check_fsdp()
        return Sharded
    return Replicated


def _zero() -> dict[str, Any]:
    """Arguments of ``Zero``."""
    if path := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        raise RecipeError(f"launcher's config: deepspeed_config_file {path} is not read; set zero_stage and offload_*")
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    devices = {
        part: os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE", "none")
        for part in ("optimizer", "param")
    }
    if stage not in (1, 2, 3) or not set(devices.values()) <= {"none", "cpu"}:
        raise RecipeError(
            f"launcher's config: zero_stage {stage}, offload to {devices}; expected 1, 2 or 3, none or cpu"
        )
    offload = tuple(part for part, device in devices.items() if device == "cpu")
    if "param" in offload and stage != 3:
        raise RecipeError(f"launcher's config: offload_param_device cpu needs zero_stage 3, found {stage}")
    return {"stage": stage, "offload": offload}


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
