"""What a recipe costs on many GPUs, on paper: what each rank holds, what it sends, how fast features and heads come.

What a rank holds and sends is compared with real ranks by the tests. Times are a model: the arithmetic at a stated
share of the peak, or the weights read from memory where that is longer; exchanges at a stated share of the links'
speed, and not hidden behind arithmetic except where layers of the target are gathered ahead. Left out: the target's
attention scores and working tensors, evaluation, checkpoints, launches, stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .config import Recipe, RecipeError
from .data.manifest import human
from .data.quantize import bytes_per_token
from .estimate import Estimate, duration, estimate
from .evaluate.roofline import DEVICES, USABLE, Device

BACKENDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")  # recipes/backend/NAME.yaml
FP32 = 4
BUCKET = 500_000_000  # elements that ZeRO reduces at once, at most (train/zero.py)
AHEAD = 4  # micro-batches of features on a rank: trained on, two ready, one in the making (data/loader.py)
# 1e9 bytes a second that a GPU sends to the others of its node
LINKS = {
    "h100": 450.0,  # NVIDIA H100 datasheet: NVLink 900 GB/s, both directions
    "h200": 450.0,  # NVIDIA H200 datasheet: the same
    "a100": 300.0,  # NVIDIA A100 datasheet: NVLink 600 GB/s, both directions
    "l40s": 32.0,  # NVIDIA L40S datasheet: PCIe 4 x16, 64 GB/s both directions
    "rtx4090": 32.0,  # PCIe 4 x16
}


@dataclass(frozen=True)
class Cluster:
    """``gpus`` in nodes of ``node``. link: 1e9 bytes a second that a GPU sends within its node; network: that a node
    sends to others (default: eight ports of 400 Gb/s, NVIDIA DGX H100 user guide). busy: share of the dense bf16 peak
    that forwards and training reach (Llama 3 trained at 0.38 to 0.43: arXiv 2407.21783, table 4). sent: share of link
    and network that a collective reaches (assumed). Raises RecipeError."""

    gpus: int
    device: Device = DEVICES["h100"]
    link: float = LINKS["h100"]
    node: int = 8
    network: float = 400.0
    busy: float = 0.4
    sent: float = 0.8

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("gpus", "node", "link", "network")}
        shares = {name: getattr(self, name) for name in ("busy", "sent")}
        if wrong := [f"{name} {x}" for name, x in sizes.items() if x <= 0]:
            raise RecipeError(f"cluster: {', '.join(wrong)}; expected more than 0")
        if wrong := [f"{name} {x}" for name, x in shares.items() if not 0 < x <= 1]:
            raise RecipeError(f"cluster: {', '.join(wrong)}; expected a share, above 0 and at most 1")

    @classmethod
    def of(cls, gpus: int, device: str = "h100", **more) -> Cluster:
        if device not in DEVICES:
            raise RecipeError(f"device {device!r}: expected one of {', '.join(DEVICES)}")
        return cls(gpus, DEVICES[device], LINKS[device], **more)

    def seconds(self, sent: float, ranks: int) -> float:
        """To send ``sent`` bytes from each of ``ranks`` neighbours. Rings over several nodes enter and leave each node
        once, and there are as many of them as ports: a node's whole network carries what one rank sends."""
        speed = self.link if ranks <= self.node else min(self.link, self.network)
        return sent / (speed * 1e9 * self.sent)

    def arithmetic(self, flops: float) -> float:
        return flops / (self.device.tflops * 1e12 * self.busy)


# -- collectives --------------------------------------------------------------------------------------------------


def all_reduced(size: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends for ``size`` bytes on each: a ring's reduce-scatter, then its all-gather
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations")."""
    return 2 * gathered(size, ranks)


def gathered(size: float, ranks: int) -> float:
    """The same for an all-gather of ``size`` bytes altogether, or a reduce-scatter of ``size`` bytes on each."""
    return size * (ranks - 1) / ranks


# -- the head -----------------------------------------------------------------------------------------------------


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def part(shapes: Sequence[Sequence[int]], backend: str, ranks: int) -> int:
    """Elements of the largest rank's part of trained tensors. FSDP2 splits each by rows, ZeRO each as a flat vector
    (stages 1 and 2 in pairs), and all fill up what does not divide."""
    if backend == "fsdp2":
        return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)
    unit = 1 if backend == "zero3" else 2
    return sum(math.ceil(math.prod(shape) / (unit * ranks)) * unit for shape in shapes)


def head_memory(shapes: Sequence[Sequence[int]], backend: str, ranks: int) -> dict[str, int]:
    """Bytes that a rank holds of trained tensors of these ``shapes`` when a backward pass has ended: fp32 masters,
    gradients, AdamW's two moments (Muon: one for its matrices; step counters are left out). ``working``: what is there
    besides during forward and backward, at most; the loss forms lm_head's gradient beside the one it is added to."""
    every = FP32 * _elements(shapes)
    bucket = FP32 * min(_elements(shapes), BUCKET)
    if backend == "ddp" or ranks == 1:
        return {"parameters": every, "gradients": every, "optimizer": 2 * every, "working": every}
    own = FP32 * part(shapes, backend, ranks)
    if backend == "fsdp2":  # the whole head as it arrives and as it is used; later its whole gradient
        return {"parameters": own, "gradients": own, "optimizer": 2 * own, "working": 2 * ranks * own + every}
    if backend == "zero3":  # parts of the parameters and of the masters; the bucket stays
        return {
            "parameters": 2 * own, "gradients": own + bucket, "optimizer": 2 * own, "working": ranks * own + 2 * every,
        }  # fmt: skip
    # Stages 1 and 2: the whole parameters, and the part's masters. Each parameter is split over all ranks, so that each
    # rank's part is a view of every gradient, and stage 2, too, keeps them whole until the step.
    return {
        "parameters": ranks * own + own, "gradients": every, "optimizer": 2 * own, "working": bucket + every,
    }  # fmt: skip


def head_traffic(shapes: Sequence[Sequence[int]], backend: str, ranks: int, micro: int) -> dict[str, float]:
    """Bytes that each rank sends in an optimizer step of ``micro`` micro-batches of its own, by collective. (The norms
    for clipping, 8 bytes a tensor, are left out.)"""
    if ranks == 1:
        return {}
    every = FP32 * _elements(shapes)
    whole = ranks * FP32 * part(shapes, backend, ranks)
    if backend == "ddp":
        return {"all-reduce": all_reduced(every, ranks)}
    if backend == "fsdp2":
        return {"all-gather": gathered(whole, ranks), "reduce-scatter": gathered(whole, ranks)}
    if backend == "zero3":
        return {"all-gather": micro * gathered(whole, ranks), "reduce-scatter": gathered(whole, ranks)}
    return {"all-reduce": all_reduced(every, ranks), "all-gather": gathered(whole, ranks)}


# -- the target ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetOnRanks:
    """A frozen target in bf16 (or ``width`` bytes a number) on a ``group`` of ranks, by ``shard`` as in the recipe.
    layers_bytes: of its decoder layers, which are split; rest_bytes: embedding, final norm and lm_head, which are not.
    """

    shard: str
    group: int
    layers: int
    hidden: int
    layers_bytes: float
    rest_bytes: float
    width: int = 2

    def memory(self) -> dict[str, float]:
        """Bytes on a rank. Under FSDP2 two layers are there whole: one that computes, and the next. Under tensor
        parallelism what a family's plan does not name (norms; all of latent attention) is whole and not counted."""
        held = {"layers": self.layers_bytes / self.group, "embedding and lm_head": self.rest_bytes}
        if self.shard == "fsdp" and self.group > 1:
            held["gathered layers"] = 2 * self.layers_bytes / self.layers
        return held

    def traffic(self, tokens: int) -> float:
        """Bytes that a rank sends for its micro-batch of ``tokens``. Tensor parallelism: after attention and MLP of
        each layer the hidden states are summed up, in the forward of every member's micro-batch. FSDP2: each layer is
        gathered once."""
        if self.shard == "tp":
            return self.group * 2 * self.layers * all_reduced(tokens * self.hidden * self.width, self.group)
        return gathered(self.layers_bytes, self.group) if self.shard == "fsdp" else 0.0

    def seconds(self, cluster: Cluster, tokens: int, flops: float) -> float:
        """Of a rank's micro-batch, with ``flops`` for one token."""
        exchange = cluster.seconds(self.traffic(tokens), self.group)
        computes = cluster.arithmetic(tokens * flops)
        # split matrices: as many forwards as members, each with a part of the weights
        reads = (self.layers_bytes + self.rest_bytes) / (cluster.device.gbps * 1e9)
        forward = max(computes, reads)
        return max(forward, exchange) if self.shard == "fsdp" else forward + exchange


# -- a recipe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """A recipe on a cluster. recipe, plan: what all figures are of; its ``train.accumulation`` is the one ``asked`` for
    or, where ranks cannot share that, the next multiple of their number. memory, by what, and sent, by what in an
    optimizer step: bytes of a rank. micro: micro-batches of a rank in a step. features_second: tokens that all GPUs'
    target forwards, none training beside (None: its parameters are not known); tokens_second: that are trained on.
    stored: features come from disk; target_fits: a device holds what a rank has of the target."""

    recipe: Recipe
    plan: Estimate
    asked: int
    cluster: Cluster
    backend: str
    micro: int
    memory: dict[str, float]
    sent: dict[str, float]
    seconds: dict[str, float]
    features_second: float | None
    token_bytes: float
    stored: bool
    target_fits: bool

    @property
    def tokens_a_step(self) -> int:
        return self.plan.tokens_a_step

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_second(self) -> float:
        return self.tokens_a_step / self.step_seconds

    @property
    def read_per_node(self) -> float:
        """Bytes a second of stored features that a node's ranks read together."""
        return self.tokens_second * self.token_bytes * min(self.cluster.node, self.cluster.gpus) / self.cluster.gpus

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= USABLE * self.cluster.device.memory_gb * 1e9

    def lines(self) -> list[str]:
        c, of, accumulation = self.cluster, self.cluster.device, self.recipe.train.accumulation
        held = ", ".join(f"{name} {human(size)}" for name, size in self.memory.items())
        sent = ", ".join(f"{name} {human(size)}" for name, size in self.sent.items() if size) or "nothing"
        times = ", ".join(f"{name} {s / self.step_seconds:.0%}" for name, s in self.seconds.items() if s)
        lines = [
            f"scale       {c.gpus:,} x {of.name}, {c.node} a node, {self.backend}: {self.tokens_a_step:,} tokens a "
            f"step (train.accumulation={accumulation}, {self.micro} a rank)",
            f"a rank      holds {human(sum(self.memory.values()))} of {of.memory_gb:g} GB"
            + ("" if self.fits else f", which does not fit ({USABLE:.0%} are usable)")
            + f": {held}",
            f"sends       {human(sum(self.sent.values()))} a step: {sent}",
            f"training    {self.tokens_second:,.0f} tokens/s, {self.step_seconds:.3g} s a step: {times}",
        ]
        if accumulation != self.asked:
            lines.insert(
                1,
                f"rounded     the recipe's train.accumulation={self.asked} is no multiple of {c.gpus:,} ranks, which "
                f"training refuses: all figures are for train.accumulation={accumulation}. Set it, and look at "
                f"train.lr and the number of steps again: a step has {accumulation / self.asked:.3g} times the tokens",
            )
        if self.features_second is not None:
            alone = " if it held the target, which does not fit" if self.stored and not self.target_fits else ""
            lines.append(f"features    {self.features_second:,.0f} tokens/s, every GPU doing nothing else{alone}")
        if self.stored:
            lines.append(
                f"disk        {human(self.token_bytes)} a token; training reads {human(self.read_per_node)}/s on a node"
            )
        return [
            *lines,
            f"time        {self._time()}",
            f"assumed     {c.busy:.0%} of {of.tflops:g} TFLOP/s, {c.sent:.0%} of {c.link:g} GB/s in a node and of "
            f"{c.network:g} GB/s from it",
        ]

    def _time(self) -> str:
        plan = self.plan
        if not plan.tokens_known and self.recipe.train.steps is None:
            return "not known: the data is not at hand; give the number of its tokens (--tokens N), or train.steps"
        text = f"{duration(plan.steps * self.step_seconds)} for {plan.steps:,} optimizer steps"
        if not (self.stored and self.features_second and self.target_fits):
            return text
        if not plan.tokens_known:
            return f"{text}, and capture before, as long as the data is (--tokens N)"
        return f"{text}, and {duration(plan.tokens / self.features_second)} for capture before"


def target_on_ranks(recipe: Recipe, plan: Estimate, cluster: Cluster) -> TargetOnRanks:
    """Of a target whose parameters are known. Raises RecipeError where its group does not divide the GPUs."""
    shard, shape = recipe.target.shard, plan.shape
    group = 1 if shard == "none" else recipe.target.group or min(cluster.node, cluster.gpus)
    if cluster.gpus % group:
        raise RecipeError(
            f"target.group: {cluster.gpus} GPUs cannot be split into groups of {group}, each of which holds one copy "
            f"of the target; take a multiple of {group}, or set target.group to a number that divides {cluster.gpus}"
        )
    if shard == "tp" and group > cluster.node:
        raise RecipeError(f"target.group: {group} ranks, but a node has {cluster.node}; use target.shard=fsdp")
    width = plan.target_bytes // recipe.target.expect.parameters
    rest = width * shape.hidden_size * ((1 if shape.tied else 2) * shape.vocab_size + 1)
    return TargetOnRanks(
        shard, group, shape.num_layers, shape.hidden_size, plan.target_bytes - rest, rest, width
    )  # fmt: skip


def scale(recipe: Recipe, cluster: Cluster, backend: str = "ddp", tokens: int | None = None) -> Scale:
    """tokens: of the data, where it is not at hand. Every rank has one micro-batch a step at least, so that the
    recipe's ``train.accumulation`` is rounded up to a multiple of the GPUs (see ``Scale``). Raises what
    ``estimate`` raises, and RecipeError for what cannot be split."""
    if backend not in BACKENDS:
        raise RecipeError(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend.startswith("zero") and recipe.train.optimizer != "adamw":
        raise RecipeError(
            f"train.optimizer: {recipe.train.optimizer} does not go with ZeRO; use adamw, or fsdp2 or ddp"
        )
    gpus, asked = cluster.gpus, recipe.train.accumulation
    micro = math.ceil(asked / gpus)
    recipe = recipe.model_copy(deep=True)
    recipe.train.accumulation = micro * gpus
    plan, train = estimate(recipe, tokens), recipe.train
    shapes, online = plan.head_shapes, recipe.features.mode == "online"
    share, features = plan.supervised / max(plan.tokens, 1), recipe.features
    form = "float32" if features.dtype == "int8" else features.dtype  # int8 is decoded when it is read
    counts = (plan.shape.hidden_size, len(plan.wants.layers))
    token = bytes_per_token(*counts, form, plan.wants.final, share)
    shown = {"working": "buffers of forward and backward"}
    memory = {f"head: {shown.get(name, name)}": size for name, size in head_memory(shapes, backend, gpus).items()}
    memory["activations"] = plan.training_bytes["activations"]
    held = AHEAD if recipe.target.shard == "none" else 2  # a split target computes when it is asked (train/groups.py)
    memory["features"] = held * train.batch_tokens * token
    sent = {f"head's {name}": size for name, size in head_traffic(shapes, backend, gpus, micro).items()}
    seconds, rate, fits = {}, None, True
    if plan.target_flops is not None:
        target = target_on_ranks(recipe, plan, cluster)
        flops = 2.0 * (recipe.target.expect.active_parameters or recipe.target.expect.parameters)
        one = target.seconds(cluster, train.batch_tokens, flops)
        rate = gpus * train.batch_tokens / one
        fits = sum(target.memory().values()) <= USABLE * cluster.device.memory_gb * 1e9
        if online:
            memory |= {f"target: {name}": size for name, size in target.memory().items()}
            sent["target's forward"] = micro * target.traffic(train.batch_tokens)
            seconds["target"] = micro * one
    elif online:
        raise RecipeError("target.expect.parameters: needed to say what an online target takes on many GPUs")
    if not online:
        memory["the target's embedding and lm_head"] = plan.training_bytes["the target's embedding and lm_head"]
    steps = plan.steps * train.accumulation
    seconds["head"] = micro * cluster.arithmetic(plan.head_flops / steps)
    seconds["exchange of gradients"] = cluster.seconds(
        sum(size for name, size in sent.items() if name.startswith("head")), gpus
    )
    return Scale(
        recipe=recipe,
        plan=plan,
        asked=asked,
        cluster=cluster,
        backend=backend,
        micro=micro,
        memory=memory,
        sent=sent,
        seconds=seconds,
        features_second=rate,
        token_bytes=bytes_per_token(*counts, features.dtype, plan.wants.final, share),
        stored=not online,
        target_fits=fits,
    )
