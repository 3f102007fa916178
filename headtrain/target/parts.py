"""Where a target keeps its decoder layers, embedding, final norm and lm_head: one resolver for every family.

Modules are found by structure, conventions (a 1+w norm, a scaled embedding, a factor on the logits) by behaviour on
a short probe: class names lie, numbers do not.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..teacher import Teacher
from ..types import Batch, Row, TargetWeights, Wants
from .features import Tap, body_forward, probe_rows
from .shape import TargetError, text_config

if TYPE_CHECKING:
    from .model import Target

log = logging.getLogger(__name__)

NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "embedding_norm")
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_MATRICES = tuple(f"self_attn.{x}_proj" for x in "qkvo") + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LLAMA_CHILDREN = {"self_attn", "mlp", *LLAMA_NORMS}


@dataclass
class Parts:
    """Modules of a loaded target. body: the text decoder without lm_head, whose forward ends in ``norm``."""

    body: nn.Module
    layers: nn.ModuleList
    embed: nn.Module
    norm: nn.Module
    lm_head: nn.Module
    config: Any  # of the text decoder

    @property
    def tied(self) -> bool:
        return self.lm_head.weight.data_ptr() == self.embed.weight.data_ptr()


@dataclass(frozen=True)
class Conventions:
    """What the family does around the parts. embed_scale: factor between what the embedding *module* returns and what
    the first layer is fed (None: it is fed something else too, such as learned positions); logit_scale and softcap: as
    in ``Teacher``."""

    embed_scale: float | None = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


def _listed(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], limit: int = 12) -> str:
    names = [
        f"{name} {tuple(m.weight.shape)}" for name, m in model.named_modules() if isinstance(m, kind) and name != ""
    ]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[-limit:]) or "none") + more


def _embedding(model: nn.Module) -> nn.Module:
    try:
        embed = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embed = None
    if getattr(embed, "weight", None) is None or embed.weight.ndim != 2:
        raise TargetError(
            f"{type(model).__name__}: no token embedding found (get_input_embeddings gives {type(embed).__name__}); "
            f"candidates: {_listed(model, nn.Embedding)}"
        )
    return embed


def _body(model: nn.Module, embed: nn.Module, count: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that owns both the token embedding and a list of ``count`` decoder layers."""
    lists = []
    for name, module in model.named_modules():
        children = list(module.children())
        owned = [c for c in children if isinstance(c, nn.ModuleList)]
        lists += [f"{name or '(model)'}: {len(c)} x {type(c[0]).__name__}" for c in owned if len(c)]
        if any(c is embed for c in children) and (found := [c for c in owned if len(c) == count]):
            return module, found[0]
    raise TargetError(
        f"{type(model).__name__}: no module holds the token embedding and a list of {count} decoder layers; "
        f"candidates: {'; '.join(lists) or 'no ModuleList at all'}"
    )


def _final_norm(body: nn.Module, hidden: int) -> nn.Module:
    children = dict(body.named_children())
    for name in NORM_NAMES:
        if name in children:
            return children[name]
    norms = {n: m for n, m in children.items() if "norm" in type(m).__name__.lower()}
    if len(norms) == 1:
        return next(iter(norms.values()))
    listed = ", ".join(f"{n} ({type(m).__name__})" for n, m in children.items())
    raise TargetError(
        f"{type(body).__name__}: no final norm of size {hidden} found under the names {', '.join(NORM_NAMES)}; "
        f"candidates: {listed}"
    )


def _lm_head(model: nn.Module, hidden: int) -> nn.Module:
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        head = None
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != hidden or not weight.is_floating_point():
        found = "nothing" if weight is None else f"{type(head).__name__} {tuple(weight.shape)} {weight.dtype}"
        raise TargetError(
            f"{type(model).__name__}: no lm_head of {hidden} columns found (get_output_embeddings gives {found}); "
            f"candidates: {_listed(model, nn.Linear)}. Load the class with a language-model head"
        )
    return head


def find_parts(model: nn.Module) -> Parts:
    """Raises TargetError with the candidates where a part is not found."""
    embed = _embedding(model)
    body, layers = _body(model, embed, text_config(model.config).num_hidden_layers)
    config = getattr(body, "config", None) or text_config(model.config)
    hidden = config.hidden_size
    return Parts(body, layers, embed, _final_norm(body, hidden), _lm_head(model, hidden), config)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be split over a group, gathered; every rank of the group calls it. Others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def effective_norm_weight(norm: nn.Module, hidden: int) -> Tensor:
    """[hidden]: the factor that the norm really applies to each normalised coordinate (``w``, ``1 + w``, or ones).

    A vector of +-32 has mean 0 and a root mean square of 32, against which eps vanishes, so RMSNorm and LayerNorm
    both return sign * weight (+ bias, which cancels in the difference). The result is snapped to the stored weight
    or to one plus it, so that no rounding of the probe remains.
    """
    weights = {name: whole(p) for name, p in norm.named_parameters()}
    reference = next(iter(weights.values()), torch.zeros(1))
    sign = torch.ones(hidden, dtype=reference.dtype, device=reference.device)
    sign[1::2] = -1
    high, low = (functional_call(norm, weights, (sign[None] * x,)) for x in (32, -32))
    measured = ((high - low)[0] / 2 * sign).float()
    stored = weights.get("weight")
    if stored is None:
        return measured
    tolerance = 1e-3 if hidden % 2 == 0 else 3.0 / hidden  # an odd size leaves a mean of 1/hidden
    tolerance = max(tolerance, 4 * torch.finfo(reference.dtype).eps)
    for candidate in (stored.float(), 1.0 + stored.float()):
        if torch.allclose(measured, candidate, rtol=tolerance, atol=tolerance):
            return candidate.to(stored.dtype) if candidate is not stored else stored
    return measured


def last_layer_names(layer: nn.Module) -> list[str]:
    """The names in the layer's state that are Llama's; empty where the family's layer has other parts (four norms,
    fused projections), so that nothing is copied into a place of another meaning. Experts have transformers' names
    (``mlp.experts.gate_up_proj``): no head takes them for a dense MLP."""
    state = layer.state_dict()
    experts = any(name.startswith("mlp.experts.") for name in state)
    matrices = [name for name in LLAMA_MATRICES if not (experts and name.startswith("mlp."))]
    needed = [f"{name}.weight" for name in (*matrices, *LLAMA_NORMS)]
    if {name for name, _ in layer.named_children()} != LLAMA_CHILDREN or any(
        name not in state or not state[name].is_floating_point() for name in needed
    ):
        return []
    return list(state)


def last_layer_state(parts: Parts) -> dict[str, Tensor]:
    """The last decoder layer under Llama's names (``last_layer_names``) with effective norm weights."""
    layer = parts.layers[-1]
    names, state = last_layer_names(layer), layer.state_dict()
    state = {name: whole(state[name].detach()) for name in names}
    for name in LLAMA_NORMS if names else ():
        state[f"{name}.weight"] = effective_norm_weight(getattr(layer, name), parts.config.hidden_size)
    return state


@torch.no_grad()
def target_weights(parts: Parts, conventions: Conventions) -> TargetWeights:
    """The tensors that heads read or start from; embedding and lm_head are copies only where the family scales
    them."""
    weight = parts.embed.weight
    probe = torch.arange(min(8, weight.shape[0]), device=weight.device)
    scale = conventions.embed_scale or 1.0
    if torch.equal(parts.embed(probe), weight[probe]):
        embed = weight.detach() if scale == 1.0 else weight.detach() * scale
    else:  # the module itself scales
        ids = torch.arange(weight.shape[0], device=weight.device)
        embed = torch.cat([parts.embed(x) * scale for x in ids.split(16384)])
    norm = effective_norm_weight(parts.norm, parts.config.hidden_size).detach()
    lm_head, bias, factor = parts.lm_head.weight.detach(), getattr(parts.lm_head, "bias", None), conventions.logit_scale
    return TargetWeights(
        embed,
        lm_head if factor == 1.0 else lm_head * factor,
        norm,
        last_layer_state(parts),
        lm_head_bias=None if bias is None else bias.detach() * factor,
        softcap=conventions.softcap,
    )


def _config_factors(config: Any) -> list[float]:
    """Factors that configs are known to put on logits or embeddings, each also as its inverse."""
    values = [float(v) for k, v in vars(config).items() if _is_factor(k, v)]
    if getattr(config, "dim_model_base", None):
        values.append(config.hidden_size / config.dim_model_base)
    values.append(math.sqrt(config.hidden_size))
    return [1.0, *values, *(1.0 / v for v in values)]


def _is_factor(name: str, value: Any) -> bool:
    named = any(part in name for part in ("logit", "multiplier", "lm_head", "scale"))
    return named and isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def _snap(measured: float, config: Any, tolerance: float) -> float:
    near = min(_config_factors(config), key=lambda c: abs(c / measured - 1) if measured else 0.0)
    return near if measured and abs(near / measured - 1) < tolerance else measured


def logit_tolerance(dtype: torch.dtype) -> float:
    """Largest |difference| allowed between rebuilt and own logits, as a share of the largest |logit|: 16-bit models
    round each logit to 8 bits after scaling or capping it."""
    return 1e-4 if dtype == torch.float32 else 2e-2


@torch.no_grad()
def measure(model: nn.Module, parts: Parts) -> Conventions:
    """Run the target once on a probe and read off how its embedding and its logits are scaled."""
    dtype, device = parts.lm_head.weight.dtype, parts.embed.weight.device
    ids = torch.tensor([probe_rows(parts.embed.weight.shape[0], (12,))[0].ids], device=device)
    with Tap(parts, (0,), ids.shape[1]) as tap:
        final = body_forward(parts, ids, use_cache=False)
    own = model(input_ids=ids, use_cache=False).logits[0].float()
    return Conventions(_embed_scale(parts, ids[0], tap.out[:, 0]), *_logit_factors(parts, final, own, dtype))


def _embed_scale(parts: Parts, ids: Tensor, fed: Tensor) -> float | None:
    given, fed = parts.embed(ids).float(), fed.float()
    if torch.equal(given, fed):
        return 1.0
    tolerance = 1e-4 if parts.embed.weight.dtype == torch.float32 else 1e-2
    scale = _snap(float((given * fed).sum() / (given * given).sum()), parts.config, tolerance)
    if float((given * scale - fed).norm()) <= tolerance * float(fed.norm()):
        return scale
    log.warning(
        "%s feeds its first layer more than the token embedding (positions?): heads read the plain embedding",
        type(parts.body).__name__,
    )
    return None


def _logit_factors(parts: Parts, final: Tensor, own: Tensor, dtype: torch.dtype) -> tuple[float, float | None]:
    raw = Teacher(parts.lm_head.weight, getattr(parts.lm_head, "bias", None)).logits(final)
    if raw.shape != own.shape:
        raise TargetError(f"the target's logits have shape {tuple(own.shape)}, its lm_head gives {tuple(raw.shape)}")
    softcap = getattr(parts.config, "final_logit_softcapping", None)
    linear, kept = own, torch.ones_like(own, dtype=torch.bool)
    if softcap:
        kept = own.abs() < 0.9 * softcap  # beyond, atanh only amplifies rounding
        linear = torch.atanh((own / softcap).clamp(-0.999, 0.999)) * softcap
    x, y = raw[kept].double(), linear[kept].double()
    measured = float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
    return _snap(measured, parts.config, 1e-3 if dtype == torch.float32 else 2e-2), softcap


def compare_logits(rebuilt: Tensor, own: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Figures of both [n, V] logits; ``excess`` > 1 when they differ by more than ``logit_tolerance``."""
    largest = float(own.abs().max())
    difference = float((rebuilt - own).abs().max())
    return {
        "largest": largest,
        "difference": difference,
        "agree": float((rebuilt.argmax(-1) == own.argmax(-1)).float().mean()),
        "excess": difference / max(logit_tolerance(dtype) * largest, 1e-6),
    }


@torch.no_grad()
def check_teacher(target: Target, rows: list[Row] | None = None) -> dict[str, float]:
    """Compare the teacher's logits, rebuilt from final features, with the target's own on probe rows.

    Tolerance: ``logit_tolerance``. Returns the figures; raises TargetError with them where the two differ: the norm
    was applied twice or never, or lm_head, bias, scale or soft-capping is not what the target does.
    """
    rows = rows or probe_rows(target.shape.vocab_size, (11, 7))
    features = target.features(Batch.pack(rows), Wants(layers=(), final="all", summary=False))
    rebuilt = target.teacher().logits(features.final)
    ids = [torch.tensor([row.ids], device=target.device) for row in rows]
    own = torch.cat([target.model(input_ids=x, use_cache=False).logits[0].float() for x in ids])
    figures = compare_logits(rebuilt, own, target.parts.lm_head.weight.dtype)
    if not figures["excess"] <= 1:  # NaN fails too
        raise TargetError(
            "the teacher rebuilt from final features does not give the target's own logits: largest difference "
            f"{figures['difference']:.4g} where the largest logit is {figures['largest']:.4g} (allowed "
            f"{logit_tolerance(target.parts.lm_head.weight.dtype):g} of it); the greedy token agrees at "
            f"{figures['agree']:.0%} of positions. Final features must be post-norm, the norm applied exactly once"
        )
    return figures
