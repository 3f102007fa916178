"""One target over several devices: a group of ranks holds one copy of it together.

Two ways. ``tp``: each rank computes with its slice of every layer's matrices, by the family's own plan in transformers
(``tp_plan``; Shoeybi et al. 2019, arXiv 1909.08053); all ranks of the group run the same forward. ``fsdp``: each rank
stores its part of every layer, and a layer is gathered while any rank runs it (torch's ``fully_shard``); each rank runs
a forward of its own, at the same time as the others.

Only the decoder layers are split. Embedding, final norm and lm_head are whole on every rank, because the head that is
trained there reads them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import RecipeError
from .parts import find_parts
from .shape import TargetError, text_config


@dataclass(frozen=True)
class Sharding:
    """This rank's group: ``members`` are the ranks, of all, that hold one of the ``copies``."""

    kind: Literal["tp", "fsdp"]
    members: range
    copies: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def size(self) -> int:
        return len(self.members)

    @classmethod
    def of(cls, kind: Literal["tp", "fsdp"], group: int | None, device: torch.device) -> Sharding | None:
        """group: ranks of one copy; None: those of a node. None where that is one rank, which holds it whole. Every
        rank calls it, with torch.distributed running where there are several. Raises RecipeError."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        group = local if group is None else group
        if world % group:
            fits = [n for n in range(1, world + 1) if world % n == 0]
            raise RecipeError(f"target.group: {world} ranks cannot be split into groups of {group}; use one of {fits}")
        if kind == "tp" and local % group:
            raise RecipeError(
                f"target.group: {group} ranks, but a node has {local}: tensor parallelism exchanges activations in "
                "every layer and stays within a node; use a group that divides the node, or target.shard=fsdp"
            )
        if group == 1:
            return None
        # groups of their own: what the target exchanges never mixes with the exchange of the head's gradients
        mesh = init_device_mesh(device.type, (world // group, group), mesh_dim_names=("copies", kind))[kind]
        first = int(os.environ["RANK"]) // group * group
        return cls(kind, range(first, first + group), world // group, device, mesh)

    # -- what transformers asks of us while it loads ----------------------------------------------------------------

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """transformers' own meshes span all ranks; ours is that of the group, whatever part it asks for."""
        return self.mesh

    def loader(self, model_class: type, config: Any) -> tuple[type, Any]:
        """(class, ``distributed_config``) for ``from_pretrained``: the model is made without storage and split, then
        each rank reads its own parts from the files, so that none ever holds the whole. ``unsplit_class`` of the
        loaded model brings its class back. Raises TargetError."""
        import transformers

        needed = ("prepare_distribute_model", "maybe_distribute_model", "_resolve_parallel_plans")
        if not all(hasattr(transformers.PreTrainedModel, name) for name in needed):
            raise TargetError(
                f"target.shard needs transformers 5.24 or newer, found {transformers.__version__}; "
                "pip install -U transformers"
            )
        if not issubclass(model_class, transformers.PreTrainedModel):  # an Auto class
            found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
            if found is None:
                raise TargetError(
                    f"target.shard: {type(config).__name__} is not one of transformers' own families, whose loading "
                    "can be split; use target.shard=none"
                )
            model_class = found

        def prepare(cls: type, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            return distributed_config, self.device, self

        def split(cls: type, model: nn.Module, distributed_config: Any, mesh_manager: Any) -> nn.Module:
            {"tp": _split_matrices, "fsdp": _split_layers}[self.kind](model, self, distributed_config)
            return model

        hooks = {"prepare_distribute_model": classmethod(prepare), "maybe_distribute_model": classmethod(split)}
        own = type(model_class.__name__, (model_class,), {"__module__": model_class.__module__} | hooks)
        from transformers.distributed import DistributedConfig

        return own, DistributedConfig(**{f"{self.kind}_size": self.size})


def unsplit_class(model: nn.Module) -> None:
    """Back to the family's own class; the hooks were for loading."""
    model.__class__ = type(model).__mro__[1]


def _split_matrices(model: nn.Module, group: Sharding, distributed_config: Any) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    layers = next(name for name, m in model.named_modules() if m is find_parts(model).layers)
    plan = {}
    if model.tp_plan:
        plan = model._resolve_parallel_plans(distributed_config)[0]
    plan = {name: style for name, style in plan.items() if name.startswith(f"{layers}.")}
    if not plan:
        raise TargetError(
            f"target.shard=tp: transformers has no tp_plan for {type(model).__name__}; use target.shard=fsdp, which "
            "splits any family"
        )
    config = text_config(model.config)
    keys = any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())
    heads = {"attention heads": config.num_attention_heads}
    if keys:
        heads["key and value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in heads.items():
        if count % group.size:
            fits = [n for n in range(1, count + 1) if all(number % n == 0 for number in heads.values())]
            raise TargetError(
                f"target.shard=tp: {count} {what} do not divide over target.group={group.size} ranks; use a group of "
                f"{', '.join(map(str, fits))}, or target.shard=fsdp"
            )
    apply_tensor_parallelism(model, group.mesh, plan)


def _split_layers(model: nn.Module, group: Sharding, distributed_config: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    parts = find_parts(model)
    for layer in parts.layers:
        fully_shard(layer, mesh=group.mesh, reshard_after_forward=True)
    inside = {p for layer in parts.layers for p in layer.parameters()}
    rest = {p for p in parts.body.parameters() if p not in inside}
    # the root that every forward goes through: under it the next layer's gather overlaps with this one's work
    fully_shard(parts.body, mesh=group.mesh, ignored_params=rest)
