"""The draft module that some checkpoints hold beside the target: which of their tensors it is, and which settings of
their config it follows from. transformers drops these tensors when it loads the target: they are read from the files.

Nothing here knows what the module computes: a head does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

# keys that announce a module; families that leave it out of their config (it is there all the same)
ANNOUNCE = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
UNANNOUNCED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# settings of attention and experts that the sizes in ``TargetShape`` do not give
SETTINGS = (
    "attention_bias", "use_qk_norm", "rope_interleave",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "n_shared_experts", "shared_expert_intermediate_size", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_SETTINGS = (
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "shared_expert_intermediate_size",
    "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
# such a module is a layer numbered on after the decoder's, known by the projection that no decoder layer has ...
PROJECTION = re.compile(r"(.*\blayers\.\d+\.)eh_proj\.weight")
# ... or stands under a name of its own
PREFIXES = re.compile(r"(.*\.)?(mtp|mtp_layers)\..*")


def module_settings(text: Any) -> dict[str, Any] | None:
    """``TargetShape.module`` of a text decoder's config: {"count": modules, setting: value}, or None."""
    counts = [getattr(text, key, None) for key in ANNOUNCE]
    count = next((c for c in counts if c is not None), 1 if text.model_type in UNANNOUNCED else 0)
    if not count:
        return None
    return {"count": count} | {key: getattr(text, key) for key in SETTINGS if hasattr(text, key)}


def expert_settings(text: Any) -> dict[str, Any] | None:
    """``TargetShape.experts`` of a text decoder's config, or None where its layers have no experts."""
    if not any(getattr(text, key, None) for key in EXPERT_COUNTS):
        return None
    return {key: getattr(text, key) for key in (*EXPERT_COUNTS, *EXPERT_SETTINGS) if hasattr(text, key)}


def layer_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the modules that are numbered like decoder layers: ("model.layers.61.",)."""
    return tuple(sorted(match[1] for name in names if (match := PROJECTION.fullmatch(name))))


class ModuleTensors(Mapping[str, Tensor]):
    """The module's tensors by their names in the files, read when asked for (they may be gigabytes). Empty where there
    are none."""

    def __init__(self, files: dict[str, Path]) -> None:
        """files: the file of every tensor of the checkpoint (``files.tensor_files``)."""
        modules = layer_modules(files)
        self.files = {n: f for n, f in files.items() if n.startswith(modules) or PREFIXES.fullmatch(n)}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)
