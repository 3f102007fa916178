"""A target without its body: what training on stored features uses of it, and that alone is read from its files.

Tokenizer, embedding, final norm, lm_head and the last layer. A model of one layer stands in for the whole: its modules
do around its layer what the whole one's do around all of theirs, so that the family's conventions show on it, too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TargetSection
from ..metadata import TargetIdentity
from ..teacher import Teacher
from ..types import Batch, Features, TargetShape, TargetWeights, Wants
from .files import find_tensor_names, opened
from .fingerprint import identify_local
from .load import class_of, folder_of, load_model, load_target, load_tokenizer, locate, read_config, source_of
from .model import Target
from .parts import LLAMA_NORMS, effective_norm_weight, find_parts, last_layer_names
from .shape import TargetError, shape_from_config, text_config

log = logging.getLogger(__name__)


@dataclass
class Edges:
    """The part of ``Target`` that serves stored features. Asked for features after all (a store lacks shards), it loads
    the whole target, once. short: the target of one layer; weights of the layer are not read off it but are the whole
    one's ``last_layer``."""

    short: Target
    shape: TargetShape
    identity: TargetIdentity
    last_layer: dict[str, Tensor]
    load: Callable[[], Target]
    _whole: Target | None = field(default=None, repr=False)

    @property
    def tokenizer(self) -> Any:
        return self.short.tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return self.short.dtype

    def teacher(self) -> Teacher:
        return self.short.teacher()

    def weights(self) -> TargetWeights:
        return replace(self.short.weights(), last_layer=self.last_layer)

    def features(self, batch: Batch, wants: Wants) -> Features:
        if self._whole is None:
            self._whole = self.load()
        return self._whole.features(batch, wants)


def shortened(config: Any) -> Any:
    """A copy of the config with one decoder layer."""
    short = copy.deepcopy(config)
    text = text_config(short)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.num_hidden_layers = 1
    return short


def read_last_layer(folder: Path, whole: nn.Module, short: nn.Module) -> dict[str, Tensor] | None:
    """``parts.last_layer_state`` of the whole model, from the files. whole: that model without storage; short: of one
    layer. None where the files call the layer's tensors otherwise than the model does, or its norms are not the first
    layer's kind, so that only the loaded model can say them."""
    last = find_parts(whole).layers[-1]
    names = last_layer_names(last)
    found = find_tensor_names(folder)
    if not set(names) <= found.layers[-1].keys():
        return None
    parts = find_parts(short)
    like = parts.embed.weight
    state = {}
    for name in names:
        with opened(found.files[found.layers[-1][name]]) as file:
            state[name] = file.get_tensor(found.layers[-1][name]).to(like.device, like.dtype)
    for name in LLAMA_NORMS if names else ():
        norm = getattr(parts.layers[0], name, None)
        if type(norm) is not type(getattr(last, name)):
            return None
        own = copy.deepcopy(norm)
        own.load_state_dict({"weight": state[f"{name}.weight"]})
        state[f"{name}.weight"] = effective_norm_weight(own, parts.config.hidden_size)
    return state


def without_storage(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        return make(config)


def load_edges(section: TargetSection, device: torch.device | str = "cpu") -> Target | Edges:
    """What training on stored features needs of the target, read from its safetensors without loading its body; the
    whole target, as ``load_target`` gives it, where they do not say all of it (GGUF, quantised weights, code of the
    repository's own, experts, files that are not here yet). Raises TargetError."""
    place, device = locate(section), torch.device(device)
    if place.gguf:
        return load_target(section, device)
    config = read_config(section, place)
    if getattr(config, "quantization_config", None) or hasattr(config, "auto_map"):
        return load_target(section, device)
    folder, made = folder_of(section, place), class_of(config)
    try:
        find_tensor_names(folder)
        with _no_report():
            short = load_model(section, place, shortened(config), device)
        whole = without_storage(getattr(made, "from_config", made), config)
        last_layer = read_last_layer(folder, whole, short)
    except (TargetError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # files under other names or of another format, or a family whose config does not say what one layer would be
        log.info("%s is loaded whole: %s", section.path, error)
        return load_target(section, device)
    if last_layer is None:
        return load_target(section, device)
    source, tokenizer = source_of(section, place, config), load_tokenizer(section)
    target = Target.of(short, tokenizer, source, section.attention)
    target.folder = folder
    identity = identify_local(folder, source, tokenizer, config)
    return Edges(target, shape_from_config(config), identity, last_layer, lambda: load_target(section, device))


@contextmanager
def _no_report() -> Iterator[None]:
    """transformers would list all layers but one as left in the files; what is missing we refuse ourselves."""
    reports = logging.getLogger("transformers")
    level = reports.level
    reports.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reports.setLevel(level)
