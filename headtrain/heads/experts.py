"""The mixture of experts of a target's family as the MLP of a draft layer.

A router scores every expert by a softmax; a token is sent to the k best, whose outputs are added up by their scores
(divided by their sum where the family does so); a shared expert behind a sigmoid gate is added where the family has
one. So do Mixtral (arXiv 2401.04088), Qwen2-MoE, Qwen3-MoE, Qwen3-Next and Qwen3.5-MoE. DeepSeek-V3 (arXiv 2412.19437,
section 2.1.2) and GLM-4.5 score each expert by a sigmoid, choose within the best groups of experts, scale the result,
and add shared experts without a gate; the bias that only steers their choice, and that no gradient reaches, is zero
here. All as transformers computes it; tensors have the names and shapes that they have there, so that the target's
last layer can be copied where the rest of it fits, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..layers import ACTIVATIONS, MLP, wide
from ..types import TargetShape

INITIAL_STD = 0.02  # of experts and router where the target's layer is not copied (initializer_range of the families)


@dataclass(frozen=True)
class ExpertSizes:
    """count: experts of the layer; chosen: those of one token; width: inner size of each; normalised: the chosen
    scores are divided by their sum; shared: inner size of the shared expert, 0: none, behind a gate where ``gated``;
    sigmoid: scored one by one, in ``groups`` of which a token takes ``open_groups``, the scores times ``scale``."""

    count: int
    chosen: int
    width: int
    normalised: bool
    shared: int = 0
    gated: bool = True
    sigmoid: bool = False
    groups: int = 1
    open_groups: int = 1
    scale: float = 1.0


SIGMOID = ("deepseek_v3", "glm4_moe")
SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # with a shared expert behind a gate
KINDS = ("mixtral", "qwen3_moe", *SHARED, *SIGMOID)


def expert_sizes(shape: TargetShape) -> ExpertSizes | None:
    """The experts of a target's layers; None where it has none, or of a kind that is not built here."""
    found = shape.experts
    if found is None or shape.model_type not in KINDS:
        return None
    kind = shape.model_type
    mixtral, sigmoid, always = kind == "mixtral", kind in SIGMOID, kind in ("mixtral", "qwen3_5_moe_text")
    try:
        sizes = ExpertSizes(
            count=found["num_local_experts" if mixtral else "n_routed_experts" if sigmoid else "num_experts"],
            chosen=found["num_experts_per_tok"],
            width=shape.intermediate_size if mixtral else found["moe_intermediate_size"],
            normalised=always or bool(found["norm_topk_prob"]),
            shared=found["shared_expert_intermediate_size"] if kind in SHARED else 0,
        )
        if not sigmoid:
            return sizes
        return replace(
            sizes,
            shared=sizes.width * found["n_shared_experts"],
            gated=False,
            sigmoid=True,
            groups=found["n_group"],
            open_groups=found["topk_group"],
            scale=found["routed_scaling_factor"],
        )
    except KeyError as missing:
        raise ValueError(
            f"the sizes of the target's experts lack {missing}: found {sorted(found)}; complete target.expect.experts "
            "from the target's config.json, or set head.block=dense"
        ) from None


class _Matrices(nn.Module):
    """gate_up_proj [experts, 2 * width, H], down_proj [experts, H, width]."""

    def __init__(self, size: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(sizes.count, 2 * sizes.width, size) * INITIAL_STD)
        self.down_proj = nn.Parameter(torch.randn(sizes.count, size, sizes.width) * INITIAL_STD)


@dataclass
class Routing:
    """Where each of n tokens was sent. scores [n, experts], of sum 1; chosen [n, k] int64; weights [n, k], of their
    outputs."""

    scores: Tensor
    chosen: Tensor
    weights: Tensor


class SoftmaxRouter(nn.Module):
    """x [n, H] -> ``Routing``: the k likeliest experts of a softmax."""

    def __init__(self, size: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.randn(sizes.count, size) * INITIAL_STD)

    def forward(self, x: Tensor) -> Routing:
        scores = torch.softmax(wide(linear(x, self.weight)), -1)
        chosen = scores.topk(self.sizes.chosen, -1).indices
        return Routing(scores, chosen, self._weights(scores, chosen))

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True) if self.sizes.normalised else weights


class SigmoidRouter(SoftmaxRouter):
    """DeepSeek-V3's: each expert is scored by itself, within the best groups of experts."""

    def forward(self, x: Tensor) -> Routing:
        scores = torch.sigmoid(wide(linear(x, self.weight)))
        chosen = self._open(scores.detach()).topk(self.sizes.chosen, -1).indices
        shares = scores / scores.sum(-1, keepdim=True)  # eq. 19
        return Routing(shares, chosen, self._weights(scores, chosen) * self.sizes.scale)

    def _open(self, scores: Tensor) -> Tensor:
        """scores, -inf in groups that are closed to the token. A group counts by its best two."""
        if self.sizes.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.sizes.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(self.sizes.open_groups, -1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, False)
        return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(nn.Module):
    """x [n, H] -> [n, H]. ``record``: a list to which every call adds its ``Routing``, or None."""

    def __init__(self, size: int, sizes: ExpertSizes, act: str) -> None:
        super().__init__()
        self.sizes, self.act = sizes, ACTIVATIONS[act]
        self.gate = (SigmoidRouter if sizes.sigmoid else SoftmaxRouter)(size, sizes)
        self.experts = _Matrices(size, sizes)
        if sizes.shared and sizes.gated:
            self.shared_expert = MLP(size, sizes.shared, act)
            self.shared_expert_gate = nn.Linear(size, 1, bias=False)
        elif sizes.shared:
            self.shared_experts = MLP(size, sizes.shared, act)
        self.record: list[Routing] | None = None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.gate(x)
        if self.record is not None:
            self.record.append(routing)
        chosen, weights = routing.chosen, routing.weights
        # one product for each expert that was chosen: copies of the tokens, sorted by their expert
        order = chosen.flatten().argsort(stable=True)
        copies = x[order // self.sizes.chosen]
        counts = torch.bincount(chosen.flatten(), minlength=self.sizes.count).tolist()
        outs = [self._expert(e, part) for e, part in enumerate(copies.split(counts)) if len(part)]
        out = torch.cat(outs)[order.argsort()] if outs else copies
        out = (out.unflatten(0, chosen.shape) * weights.unsqueeze(-1).to(out.dtype)).sum(1)
        return out + self._shared(x) if self.sizes.shared else out

    def _shared(self, x: Tensor) -> Tensor:
        if self.sizes.gated:
            return torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.shared_experts(x)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = linear(x, self.experts.gate_up_proj[number]).chunk(2, -1)
        return linear(self.act(gate) * up, self.experts.down_proj[number])

    # -- sizes, for the estimate -------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Inner sizes that one token passes, together."""
        return self.sizes.chosen * self.sizes.width + self.sizes.shared

    @property
    def active(self) -> int:
        """Matrix entries that one token passes: router, its experts, the shared one."""
        size = self.gate.weight.shape[1]
        gate = size if self.sizes.shared and self.sizes.gated else 0  # of the shared expert
        return self.gate.weight.numel() + 3 * size * self.width + gate

    @property
    def kept(self) -> int:
        """Numbers that autograd keeps for one token beyond those of an MLP of ``width``: scores, and the token's copy
        and output at each of its experts."""
        return 2 * self.sizes.count + 2 * self.sizes.chosen * self.gate.weight.shape[1]


def imbalance(routing: Routing, rows: Tensor, doc: Tensor) -> Tensor:
    """DeepSeek-V3's sequence-wise balance (arXiv 2412.19437, eq. 17 to 20) without its factor, times the tokens of each
    document, summed over documents: n * sum_e f_e P_e with f_e the share of the document's choices that went to expert
    e, times the number of experts, and P_e its mean score. It is n where experts are used alike. By document, so that
    it does not depend on how rows are packed.

    rows [n] int64: the tokens that count; doc [n] int64: their documents, from 0. Scalar, float32 or wider.
    """
    scores, chosen = routing.scores[rows], routing.chosen[rows]
    experts, documents = scores.shape[1], int(doc.max()) + 1 if doc.numel() else 0
    tokens = torch.bincount(doc, minlength=documents).clamp(min=1)
    sent = scores.new_zeros(documents, experts)
    sent.index_put_((doc.unsqueeze(1).expand_as(chosen), chosen), scores.new_ones(()), accumulate=True)
    mass = scores.new_zeros(documents, experts).index_add(0, doc, scores)  # n * P_e
    return (sent / tokens.unsqueeze(1) * (experts / chosen.shape[1]) * mass).sum()
