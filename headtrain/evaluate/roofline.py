"""What batch size does to speculation: a roofline of the target, its memory, and the GPUs that a load needs.

A forward of n tokens for each of B sequences costs max(bytes / bandwidth, flops / compute). The weights are read once
a step however many tokens it has, which is why drafted tokens are nearly free at batch 1; the arithmetic grows with
B * n, which is why they are not at large batches. Each sequence's KV cache is read once a step too, also shared by its
n tokens. Left out: prefill, communication between GPUs, kernel launches and scheduling; ``efficiency`` stands for what
a real engine reaches of the two peaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..types import TargetShape
from .speedup import VerifyCost, alphas_to, require, tokens_per_round

LARGEST_BATCH = 4096
# Bounds of what a user may give: wide of every machine, and far from where floats overflow or vanish
TINY, HUGE, MOST_PARAMETERS, MOST_BYTES = 1e-6, 1e9, 1e15, 16
LARGEST_NODES = 2**20
USABLE = 0.9  # of the memory, for weights and KV cache; the rest is activations and the engine's own


@dataclass(frozen=True)
class Device:
    """tflops: dense bf16, 1e12 a second; gbps: memory bandwidth, 1e9 bytes a second; memory_gb: 1e9 bytes."""

    name: str
    tflops: float
    gbps: float
    memory_gb: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("tflops", "gbps", "memory_gb", "efficiency"):
            require(getattr(self, name), f"device {self.name}: {name}", TINY, high=HUGE)
        if self.efficiency > 1:
            raise ValueError(f"efficiency {self.efficiency}: expected a share of the peak, above 0 and at most 1")

    def times(self, count: int) -> Device:
        """``count`` of them as one, communication left out (ideal tensor parallelism)."""
        require(count, "GPUs of one replica", 1, high=HUGE)
        if count == 1:
            return self
        sizes = (self.tflops * count, self.gbps * count, self.memory_gb * count)
        return Device(f"{count} x {self.name}", *sizes, self.efficiency)


# Vendor's figures; with sparsity they are published at twice these TFLOPS.
DEVICES: dict[str, Device] = {
    "h100": Device("H100 SXM", 989, 3350, 80),  # NVIDIA H100 datasheet: 1979 with sparsity, 3.35 TB/s
    "h200": Device("H200", 989, 4800, 141),  # NVIDIA H200 datasheet: 1979 with sparsity, 4.8 TB/s
    "a100": Device("A100 80GB SXM", 312, 2039, 80),  # NVIDIA A100 datasheet: 312 dense, 2039 GB/s
    "l40s": Device("L40S", 362, 864, 48),  # NVIDIA L40S datasheet: 362 (733 with sparsity), 864 GB/s
    # NVIDIA Ada GPU architecture white paper, appendix: 165.2 dense with fp32 accumulation, 1008 GB/s
    "rtx4090": Device("RTX 4090", 165.2, 1008, 24),
}


@dataclass(frozen=True)
class Experts:
    """A mixture's routed experts: count in each layer, those of one token, and the parameters of all of them."""

    count: int
    per_token: int
    parameters: int

    def touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that ``tokens`` tokens read, routed independently and evenly (real
        routers are uneven and neighbours alike, so that fewer are touched): E * (1 - (1 - k/E)^tokens)."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Cache:
    """What a model keeps of each position. values: of one layer and position (keys and values of all KV heads; for
    latent attention the latent and the rotary key, DeepSeek-V2, arXiv 2405.04434, section 2.1). full, windowed: layers
    that keep every position, and those that keep the last ``window``; layers with a recurrent state are neither.
    width: multiplications of one query head with one position."""

    values: int
    full: int
    width: int
    windowed: int = 0
    window: int = 0

    def positions(self, context: int, new: int = 0) -> int:
        """Positions of all layers together, with ``new`` tokens that are not settled yet."""
        return self.full * (context + new) + self.windowed * (min(context, self.window) + new)

    def smaller(self, share: float) -> Cache:
        """Of a model with ``share`` of the layers, one at least."""
        windowed = round(self.windowed * share)
        return replace(self, full=max(0 if windowed else 1, round(self.full * share)), windowed=windowed)


@dataclass(frozen=True)
class Model:
    """Sizes of a target or a drafter. parameters: all, as they lie in memory; lookup: of these, the rows of an input
    embedding of its own, which a step does not read (0 where lm_head shares them). cache None: keys and values of every
    layer and position. notes: what was assumed about it, for people."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    lookup: int = 0
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    experts: Experts | None = None
    cache: Cache | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.parameters, "parameters", 1, high=MOST_PARAMETERS)
        require(self.layers, "layers", high=HUGE)
        for name in ("weight_bytes", "kv_bytes"):
            require(getattr(self, name), name, TINY, high=MOST_BYTES)
        routed = self.experts.parameters if self.experts else 0
        if self.parameters <= self.lookup + routed:
            raise ValueError(
                f"{self.parameters:,} parameters, but the embedding has {self.lookup:,} and the experts {routed:,}: "
                "give the number of all parameters"
            )
        if self.experts and not 0 < self.experts.per_token <= self.experts.count:
            raise ValueError(f"{self.experts.per_token} of {self.experts.count} experts for each token: cannot be")

    @classmethod
    def of(cls, shape: TargetShape, parameters: int | None = None, **more) -> Model:
        """From a target's shape; parameters None: counted as for a dense Llama-like model."""
        lookup = 0 if shape.tied else shape.vocab_size * shape.hidden_size
        count = dense_parameters(shape) if parameters is None else parameters
        return cls(count, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, lookup, **more)

    @property
    def memory(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.weight_bytes

    @property
    def kept(self) -> Cache:
        return self.cache or Cache(2 * self.kv_heads * self.head_dim, self.layers, 2 * self.head_dim)

    @property
    def kv_per_token(self) -> float:
        """Bytes of the KV cache of one position, in every layer that keeps it."""
        return (self.kept.full + self.kept.windowed) * self.kept.values * self.kv_bytes

    def kv_of(self, context: int, new: int = 0) -> float:
        """Bytes of the KV cache of one sequence (see ``Cache.positions``)."""
        return self.kept.positions(context, new) * self.kept.values * self.kv_bytes

    @property
    def active(self) -> float:
        """Parameters that one token multiplies with."""
        e = self.experts
        return self.parameters - self.lookup - (e.parameters * (1 - e.per_token / e.count) if e else 0)

    def bytes_read(self, tokens: int) -> float:
        """Weights that a step over ``tokens`` tokens reads."""
        e = self.experts
        unread = e.parameters * (1 - e.touched(tokens) / e.count) if e else 0
        return (self.parameters - self.lookup - unread) * self.weight_bytes


def dense_parameters(shape: TargetShape) -> int:
    """All parameters of a Llama-like model without biases: embedding, lm_head unless tied, and in each layer
    q/k/v/o, a gated MLP and two norms; one final norm."""
    h = shape.hidden_size
    attention = 2 * h * shape.num_heads * shape.head_dim + 2 * h * shape.num_kv_heads * shape.head_dim
    layer = attention + 3 * h * shape.intermediate_size + 2 * h
    return (1 if shape.tied else 2) * shape.vocab_size * h + shape.num_layers * layer + h


def step_seconds(model: Model, device: Device, batch: int, tokens: int, context: int) -> float:
    """One forward of ``tokens`` tokens for each of ``batch`` sequences that hold ``context`` positions each."""
    total = batch * tokens
    moved = model.bytes_read(total) + batch * model.kv_of(context, tokens)
    # q @ k and weights @ v, 2 flops for each multiplication
    attention = 2 * model.heads * model.kept.width * model.kept.positions(context)
    flops = total * (2 * model.active + attention)
    return max(moved / (device.gbps * 1e9), flops / (device.tflops * 1e12)) / device.efficiency


@dataclass(frozen=True)
class Draft:
    """What drafts. model None: costs nothing (n-gram lookup). parallel: all k tokens in one step, from several output
    layers, instead of one after the other."""

    model: Model | None = None
    parallel: bool = False

    def seconds(self, device: Device, batch: int, k: int, context: int, nodes: int | None = None) -> float:
        """Drafting a chain of k, or ``nodes`` tokens in k levels (as many on each)."""
        if self.model is None:
            return 0.0
        steps = 1 if self.parallel else k
        width = 1 if self.parallel else math.ceil((nodes or k) / k)
        return steps * step_seconds(self.model, device, batch, width, context)


@dataclass(frozen=True)
class Plan:
    """One way to serve: chains of k drafted tokens, or trees of ``nodes`` in k levels; tau: mean tokens a round.
    k 0: no speculation."""

    k: int = 0
    tau: float = 1.0
    nodes: int = 0

    @classmethod
    def chain(cls, alphas: Sequence[float], k: int, hold_last: bool = False) -> Plan:
        return cls(k, tokens_per_round(alphas_to(alphas, k, hold_last)), k)

    @classmethod
    def tree(cls, tau: float, nodes: int, depth: int) -> Plan:
        require(tau, "tau", 1)
        require(depth, "tree depth", 1)
        require(nodes, "tree nodes", depth, high=LARGEST_NODES)
        if tau > depth + 1:
            raise ValueError(f"tau {tau:g}: a tree {depth} deep commits at most {depth + 1} tokens a round")
        return cls(depth, tau, nodes)

    @property
    def name(self) -> str:
        return "none" if not self.k else f"k {self.k}" if self.nodes == self.k else f"tree {self.nodes}"


PLAIN = Plan()


@dataclass(frozen=True)
class Setup:
    """Where it runs: context is the mean number of positions that a sequence holds while it answers."""

    target: Model
    device: Device
    draft: Draft = Draft()
    context: int = 1024
    usable: float = USABLE

    def __post_init__(self) -> None:
        require(self.context, "context", 1, high=HUGE)
        if not 0 < self.usable <= 1:
            raise ValueError(f"usable memory {self.usable}: expected a share, above 0 and at most 1")

    def verify_seconds(self, plan: Plan, batch: int) -> float:
        return step_seconds(self.target, self.device, batch, plan.nodes + 1, self.context)

    def draft_seconds(self, plan: Plan, batch: int) -> float:
        return self.draft.seconds(self.device, batch, plan.k, self.context, plan.nodes) if plan.k else 0.0

    def round_seconds(self, plan: Plan, batch: int) -> float:
        require(batch, "batch", 1, high=HUGE)
        return self.verify_seconds(plan, batch) + self.draft_seconds(plan, batch)

    def token_seconds(self, plan: Plan, batch: int) -> float:
        """Mean time per output token of one sequence."""
        return self.round_seconds(plan, batch) / plan.tau

    def rate(self, plan: Plan, batch: int) -> float:
        """Tokens a second of all sequences together."""
        return batch / self.token_seconds(plan, batch)

    def speedup(self, plan: Plan, batch: int) -> float:
        return self.token_seconds(PLAIN, batch) / self.token_seconds(plan, batch)

    def costs(self, batch: int, largest: int) -> tuple[float, VerifyCost]:
        """c of one draft step and verify(n) up to ``largest`` tokens, in plain steps of this batch (see speedup)."""
        plain = self.round_seconds(PLAIN, batch)
        sizes = [(n, self.verify_seconds(Plan(nodes=n - 1), batch) / plain) for n in range(2, largest + 1)]
        return self.draft_seconds(Plan(1, nodes=1), batch) / plain, VerifyCost(tuple(sizes))

    def best(self, plans: Sequence[Plan], batch: int) -> Plan:
        """The fastest, no speculation included; the one that feeds fewer nodes among equals."""
        return max((PLAIN, *plans), key=lambda p: (self.speedup(p, batch), -p.nodes))

    def fixed_bytes(self, plan: Plan) -> float:
        """Weights: the target's and, where it speculates, the drafter's."""
        extra = self.draft.model.memory if plan.k and self.draft.model else 0
        return self.target.memory + extra

    def sequence_bytes(self, plan: Plan) -> float:
        """KV cache of one sequence. Accepted tokens append as many positions as plain decoding would: speculation does
        not shrink it. A round adds its nodes, until it is verified; a drafter with attention keeps its own cache."""
        own = self.draft.model.kv_of(self.context, plan.nodes) if plan.k and self.draft.model else 0
        return self.target.kv_of(self.context, plan.nodes) + own

    def memory_bytes(self, plan: Plan, batch: int) -> float:
        return self.fixed_bytes(plan) + batch * self.sequence_bytes(plan)

    def largest_in_memory(self, plan: Plan) -> int:
        """Sequences that fit; 0 where the weights alone leave no room for one."""
        free = self.usable * self.device.memory_gb * 1e9 - self.fixed_bytes(plan)
        per = self.sequence_bytes(plan)
        return max(0, math.floor(free / per) if per else LARGEST_BATCH)

    def stops_paying_at(self, plan: Plan, limit: int = LARGEST_BATCH) -> int | None:
        """The smallest batch from which on, up to ``limit``, ``plan`` is never faster than no speculation; None where
        it still pays at ``limit``."""
        last = next((b for b in range(limit, 0, -1) if self.speedup(plan, b) > 1), 0)
        return last + 1 if last < limit else None


@dataclass(frozen=True)
class Load:
    """What must be served: sequences at the same time (users), or tokens a second (requests a second x their length);
    slo: the longest mean time per output token, seconds."""

    slo: float
    users: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        require(self.slo, "SLO", TINY, high=HUGE)
        given = [v for v in (self.users, self.tokens_per_second) if v is not None]
        if len(given) != 1:
            raise ValueError("load: give either concurrent users, or requests a second and their output tokens")
        require(given[0], "load", above=True, high=HUGE)


@dataclass(frozen=True)
class Capacity:
    """One replica of ``plan`` under a load. batch: the largest that meets the SLO and fits, 0 where none does; gpus
    None there. limit: what keeps the batch from growing ("SLO", "memory", "searched"), or why there is none."""

    plan: Plan
    batch: int
    limit: str
    token_ms: float
    rate: float
    gpus: int | None


def capacity(setup: Setup, plan: Plan, load: Load, per_replica: int = 1) -> Capacity:
    """The largest batch and the GPUs for the load; ``setup.device`` already holds ``per_replica`` GPUs."""
    fits = min(setup.largest_in_memory(plan), LARGEST_BATCH)
    if fits == 0:
        return Capacity(plan, 0, "memory", math.nan, math.nan, None)
    low, high = 0, fits  # the time per token never falls as the batch grows
    while low < high:
        middle = (low + high + 1) // 2
        if setup.token_seconds(plan, middle) <= load.slo:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return Capacity(plan, 0, "SLO", setup.token_seconds(plan, 1) * 1e3, math.nan, None)
    limit = "SLO" if low < fits else "searched" if fits == LARGEST_BATCH else "memory"
    rate = setup.rate(plan, low)
    replicas = load.users / low if load.users is not None else load.tokens_per_second / rate
    return Capacity(plan, low, limit, setup.token_seconds(plan, low) * 1e3, rate, math.ceil(replicas) * per_replica)


def cheapest(setup: Setup, plans: Sequence[Plan], load: Load, per_replica: int = 1) -> Capacity:
    """Of ``plans``, the one that needs the fewest GPUs (then: serves the most tokens a second, drafts the least)."""
    found = [capacity(setup, plan, load, per_replica) for plan in plans]
    possible = [c for c in found if c.gpus is not None]
    if not possible:
        return min(found, key=lambda c: (math.isnan(c.token_ms), c.token_ms))
    return min(possible, key=lambda c: (c.gpus, -c.rate, c.plan.nodes))
