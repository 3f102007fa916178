"""A LoRA adapter on the target's decoder layers, by peft: what changes of a target that is trained with its head.

The folder ``adapter/`` of a checkpoint is peft's own form: ``PeftModel.from_pretrained(base, folder)`` reads it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config import LoraSection, RecipeError
from ..metadata import AdapterPart, TargetIdentity
from .fingerprint import sampled_layers, weight_digests
from .model import Target
from .shape import TargetError

FOLDER, CONFIG_FILE, WEIGHTS_FILE = "adapter", "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in peft's files
PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def require_peft() -> Any:
    """The package peft; raises RecipeError where it is missing."""
    try:
        import peft
    except ImportError:
        raise RecipeError("LoRA needs the package peft: pip install 'headtrain[peft]'") from None
    return peft


def select(names: Sequence[str], targets: Sequence[str], key: str) -> list[str]:
    """Those of ``names`` (of parameters) that end in one of ``targets``, with or without ``.weight``. Raises
    RecipeError, with the recipe's ``key``, for a target that none ends in."""

    def meant(name: str, target: str) -> bool:
        return any(full == target or full.endswith(f".{target}") for full in (name, name.removesuffix(".weight")))

    if unknown := [t for t in targets if not any(meant(name, t) for name in names)]:
        ends = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names})
        raise RecipeError(f"{key}: no matrix is called {', '.join(unknown)}; there are {', '.join(ends)}")
    return [name for name in names if any(meant(name, t) for t in targets)]


def linear_layers(target: Target) -> list[str]:
    """Names in the model of the linear layers of its decoder layers, which an adapter can be put on. Raises
    TargetError where there is none: quantised layers hold no matrix that an update could be added to. Warns where some
    are and others are not (a quantised checkpoint whose routers stayed whole)."""
    inside = {id(m) for layer in target.parts.layers for m in layer.modules()}
    layers = [(name, m) for name, m in target.model.named_modules() if id(m) in inside]
    found = [name for name, m in layers if isinstance(m, nn.Linear) and m.weight.dtype in PLAIN]
    able = set(found)
    kinds = Counter(type(m).__name__ for name, m in layers if name not in able)
    others = {kind: count for kind, count in sorted(kinds.items()) if "linear" in kind.lower()}
    if not found:
        raise TargetError(
            f"train.joint: {target.source.name} has no layer that LoRA can adapt: its linear layers are "
            f"{', '.join(others) or 'none'} (quantised?); load the target unquantised (float32, bfloat16 or "
            "float16)"
        )
    if others:
        left = ", ".join(f"{count} {kind}" for kind, count in others.items())
        warnings.warn(
            f"train.joint: of {target.source.name} only {len(found)} linear layers can be adapted; {left} cannot "
            "(quantised?) and stay as they are. Load the target unquantised to train them, too",
            stacklevel=2,
        )
    return found


class Adapter(nn.Module):
    """An adapter, put into ``target`` in place: the target's forward has it from then on, with gradient to the
    adapter's parameters (float32), which are this module's own. The update is zero at first."""

    def __init__(self, target: Target, section: LoraSection, seed: int) -> None:
        """Raises RecipeError (peft is missing, unknown names in ``targets``), TargetError (no layer to adapt)."""
        super().__init__()
        peft = require_peft()
        self.target, self.base = target, target.identity  # who the target is without the adapter
        names = linear_layers(target)
        if section.targets is not None:
            names = select(names, section.targets, "train.joint.lora.targets")
        self.section = section.model_copy(update={"targets": _endings(names, target.model)})
        self.config = peft.LoraConfig(
            r=section.r,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=self.section.targets,
            base_model_name_or_path=target.source.name,
        )
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(self.config, target.model)
        self.layers = {name: target.model.get_submodule(name) for name in names}
        for layer in self.layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part.float()
        # registered here are the adapter's own modules, and not the target's: only they are trained and wrapped
        parts = [part for x in self.layers.values() for part in (x.lora_A, x.lora_B, x.lora_dropout)]
        self.parts = nn.ModuleList(parts)

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in peft's file."""
        return {
            f"{PREFIX}{name}.{part}.weight": getattr(layer, part)["default"].weight
            for name, layer in self.layers.items()
            for part in ("lora_A", "lora_B")
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The target as it is without the adapter."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    # -- files -------------------------------------------------------------------------------------------------

    def config_json(self) -> dict[str, Any]:
        found = self.config.to_dict() | {"inference_mode": True}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put ``named``'s tensors back. Raises ValueError for tensors of another adapter."""
        own = self.named()
        _same(own, tensors)
        for name, p in own.items():
            p.copy_(tensors[name])

    def identity(self) -> TargetIdentity:
        """Who the adapted target is: the base, the adapter, and the fingerprint of both together."""
        layers = self.target.parts.layers
        sampled = {i: merged_state(layers[i]) for i in sampled_layers(len(layers))}
        return _adapted(self.base, self.section, self.named(), weight_digests(self.target.model, sampled))

    def merged_model(self) -> nn.Module:
        """A model of the same class whose weights are the adapted ones; to be saved, not run."""
        model = self.target.model
        config = {n: v for n, v in model.config.to_dict().items() if n != "quantization_config"}
        with torch.device("meta"):  # nothing is initialised: the tensors are handed over
            plain = type(model)(type(model.config).from_dict(config))
        plain.load_state_dict(merged_state(model), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        return plain


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict that ``module`` had before an adapter was put in, with the updates in its weights."""
    layers = {name: m for name, m in module.named_modules() if hasattr(m, "get_delta_weight")}
    state = {}
    for name, tensor in module.state_dict().items():
        layer, _, inner = name.rpartition(".base_layer.")
        if any(part in name for part in (".lora_A.", ".lora_B.")):
            continue
        if not layer:
            state[name] = tensor
        elif inner == "weight":
            state[f"{layer}.weight"] = (tensor + layers[layer].get_delta_weight("default")).to(tensor.dtype)
        else:
            state[f"{layer}.{inner}"] = tensor
    return state


@torch.no_grad()
def adopt(target: Target, trained: TargetIdentity, folder: str | Path) -> bool:
    """Merge the adapter beside a head into ``target``, in place, where the head was trained with one (``trained``)
    and ``target`` is its base; anything else is left as it is (False). peft is not needed.

    Raises TargetError where the adapter is missing or is not the one that ``trained`` names.
    """
    if trained.adapter is None or target.identity.weights != trained.weights or target.identity.adapter is not None:
        return False
    folder, section = Path(folder) / FOLDER, LoraSection(**trained.adapter.config)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # a missing, cut or foreign file, each with an error of its own kind
        raise TargetError(f"{folder}: the adapter that this head was trained with cannot be read: {error}") from None
    if tensors_digest(tensors) != trained.adapter.sha256 or (config["r"], config["lora_alpha"]) != (
        section.r, section.alpha,
    ):  # fmt: skip
        raise TargetError(f"{folder}: not the adapter that headtrain.json names; it was changed since the training")
    for name in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")]:
        weight = target.model.get_submodule(name.removeprefix(PREFIX)).weight
        a, b = (tensors[f"{name}.{part}.weight"].to(weight.device) for part in ("lora_A", "lora_B"))
        weight.copy_((weight + b @ a * (section.alpha / section.r)).to(weight.dtype))
    target.identity = _adapted(target.identity, section, tensors, weight_digests(target.model))
    return True


def copy_adapter(checkpoint: Path, to: Path) -> None:
    """Copy the adapter beside a head to where the head goes: it drafts well for the adapted target only. Raises
    TargetError where there is none."""
    if not (checkpoint / FOLDER).is_dir():
        raise TargetError(
            f"{checkpoint}: the head was trained with an adapter of the target, but there is no {FOLDER}/; put it back"
        )
    shutil.copytree(checkpoint / FOLDER, to / FOLDER)


def _adapted(
    base: TargetIdentity, section: LoraSection, tensors: dict[str, Tensor], weights: dict[str, str]
) -> TargetIdentity:
    part = AdapterPart(sha256=tensors_digest(tensors), config=section.model_dump(mode="json"), weights=weights)
    return base.model_copy(update={"adapter": part})


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and float32 values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().float().cpu().contiguous()
        found.update(json.dumps([name, list(value.shape)]).encode() + value.numpy().tobytes())
    return found.hexdigest()


def _endings(names: Sequence[str], model: nn.Module) -> list[str]:
    """The last parts of ``names`` where these mean exactly the same layers (as serving engines expect them), else the
    whole names."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return ends if meant == set(names) else sorted(names)


def _same(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    odd = sorted(n for n in own.keys() ^ tensors.keys())
    odd += [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if odd:
        raise ValueError(f"not the adapter of this recipe: {len(odd)} tensors differ, for example {odd[0]}")
