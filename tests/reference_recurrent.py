"""Training steps of the recursive heads, slow and obvious: every position at every step, a dense mask, whole logits.

Written from ALGORITHMS.md and the papers, with the head's own parameters and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable

import tiny
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from headtrain.heads.catalog import build_head, parse_head
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights

H, V = 32, 96
SHAPE = TargetShape("LlamaForCausalLM", "llama", H, 48, 8, 4, 2, 8, V, max_positions=256)

PATTERNS = {
    "two turns": tiny.rows((24, 9, 33), vocab=V),
    "supervised from the first token": [Row(list(range(3, 15)), [1] * 12), Row(list(range(20, 29)), [1] * 9)],
    "single supervised pair": [Row([5, 6, 7, 8], [0, 0, 1, 1]), Row([5, 6, 7], [0, 1, 1])],
    "adjacent turns": [Row(list(range(3, 19)), [0, 0] + [1] * 5 + [2] * 9)],
    "some rows unsupervised": [Row([9] * 7, [0] * 7), Row(list(range(4, 20)), [0] * 5 + [1] * 11), Row([3], [0])],
}


def make(kind: str, rows: list[Row], dtype=torch.float64, seed: int = 0, shape: TargetShape = SHAPE, **config):
    """A head with random parameters, random final features for ``rows``, and the target's random lm_head."""
    g = torch.Generator().manual_seed(seed)
    cfg = parse_head({"kind": kind, **config})
    size = getattr(cfg, "draft_vocab_size", None)
    ids = None if size is None else torch.randperm(V, generator=g)[:size].sort().values
    head = build_head(cfg, shape, ids).to(dtype)
    with torch.no_grad():
        for name, p in head.named_parameters():
            std = p.shape[1] ** -0.5 if p.ndim > 1 else 0.2  # no gain: rounding must not grow from step to step
            p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * std + ("norm" in name))
    batch = Batch.pack(rows)
    lm_head = torch.randn(V, H, generator=g, dtype=dtype) * 0.5
    embed = torch.randn(V, H, generator=g, dtype=dtype)
    head.attach(TargetWeights(embed, lm_head, torch.ones(H, dtype=dtype)))
    final = torch.randn(len(batch), H, generator=g, dtype=dtype)
    return head, batch, final, lm_head


def raw(final: Tensor) -> Tensor:
    """[n, 1, H]: what plays the residual stream before the final norm: another vector, and of another scale."""
    return (3 * final.roll(1, -1) + 0.5).unsqueeze(1)


def features_of(batch: Batch, final: Tensor, lm_head: Tensor) -> Features:
    argmax, lse = Teacher(lm_head).summary(final)
    return Features(raw(final), torch.arange(len(batch)), final, argmax, lse)


def fast(head, batch: Batch, final: Tensor, lm_head: Tensor, depth: int | None = None):
    depth = depth or head.wants().depth
    return head.loss(batch, features_of(batch, final, lm_head), Teacher(lm_head), depth)


def gradients(head, total: Tensor) -> dict[str, Tensor]:
    for p in head.parameters():
        p.grad = None
    total.backward()
    unused = {n: torch.zeros_like(p) for n, p in head.named_parameters() if p.grad is None}
    return unused | {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}


def equal(ours, theirs: dict[str, Tensor], head) -> None:
    """The fast LossSums against the reference's, and the gradients of every parameter."""
    for name in ("loss_count", "hits", "pairs", "chain_hits", "chain_pairs"):
        assert torch.equal(getattr(ours, name), theirs[name]), name
    assert ours.count == theirs["pairs"][0]
    for name in ("total", "loss", "accept"):
        torch.testing.assert_close(getattr(ours, name).double(), theirs[name].double(), rtol=1e-5, atol=1e-5)
    mine, expected = gradients(head, ours.total), gradients(head, theirs["total"])
    assert mine.keys() == expected.keys()
    for name, want in expected.items():
        # fp32 angles and logits move a gradient by some 1e-6 of its largest entry
        worst = (mine[name] - want).abs().max() / want.abs().max().clamp(min=1e-3)
        assert worst < 1e-5, f"{name}: off by {worst:.1e} of its largest entry"


@torch.no_grad()
def tree_equals_chains(case) -> None:
    """Nodes below earlier ones in no order, several at a time."""
    head, batch, final, _ = case

    def fresh():
        session = head.session(30)
        session.extend(batch.ids[1:13], raw(final[:12]), final[:12])
        return session

    parents = [-1, -1, 0, 0, 1, 2, 4, 4, 5, 3, -1, 10]
    tokens = [int(t) for t in torch.randint(3, V, (12,), generator=torch.Generator().manual_seed(3))]
    tree, got = fresh(), []
    for a, b in ((0, 2), (2, 5), (5, 6), (6, 10), (10, 11), (11, 12)):
        got.append(tree.expand(torch.tensor(parents[a:b]), torch.tensor(tokens[a:b])))
    got = torch.cat(got)
    for node in range(12):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        chain = fresh()
        for depth, token in enumerate(path):
            want = chain.expand(torch.tensor([depth - 1]), torch.tensor([token]))[0]
        torch.testing.assert_close(got[node], want, rtol=1e-5, atol=1e-5)


def ahead(x: Tensor, by: int) -> Tensor:
    return torch.cat([x[by:], torch.zeros_like(x[:by])])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, d] with half rotation."""
    d = x.shape[-1]
    inverse = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (positions.double()[:, None] * inverse).to(x.dtype)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def unroll(
    head,
    batch: Batch,
    state: Tensor,
    depth: int,
    fuse: Callable,
    outputs: Callable,
    prefix: Callable[[int], str],
    own: bool,
    cut: bool,
    shares: list[tuple[Tensor, Tensor]] | None = None,
) -> list[Tensor]:
    """[T, H] a step: what the lm_head reads at every position. fuse(s, state) -> what q/k/v read, residual;
    outputs(s, x) -> state, read by the lm_head; prefix(s): of the layer's parameters; own: step s sees step s's keys
    of all positions, at unshifted RoPE positions; cut: no gradient between steps; shares: gets the routers' scores, of
    sum 1, and their choice."""
    p, shape, T = dict(head.named_parameters()), head.shape, len(batch)
    groups = shape.num_heads // shape.num_kv_heads
    causal = (batch.doc[:, None] == batch.doc[None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    keys, values, out = [], [], []
    for s in range(depth):
        read, residual = fuse(s, state.detach() if cut and s else state)
        block, qkv = prefix(s), {}
        for n in "qkv":
            x = linear(read, p[f"{block}self_attn.{n}_proj.weight"], p.get(f"{block}self_attn.{n}_proj.bias"))
            qkv[n] = x.unflatten(1, (-1, shape.head_dim))
            if (weight := p.get(f"{block}self_attn.{n}_norm.weight")) is not None:
                qkv[n] = norm(qkv[n], weight, shape.rms_norm_eps)
        at = batch.pos + (0 if own else s)
        q, k = (rope(qkv[n], at, shape.rope["rope_theta"]) for n in "qk")
        if own:
            keys, values, mask = [], [], causal
        else:  # step 0's keys causally and, of each later step, only the own position's
            mask = torch.cat([causal] + [torch.eye(T, dtype=torch.bool)] * s, 1)
        keys.append(k.repeat_interleave(groups, 1))
        values.append(qkv["v"].repeat_interleave(groups, 1))
        scores = torch.einsum("ihd,jhd->hij", q, torch.cat(keys)) * shape.head_dim**-0.5
        attention = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        a = torch.einsum("hij,jhd->ihd", attention, torch.cat(values)).flatten(1)
        x = residual + linear(a, p[f"{block}self_attn.o_proj.weight"])
        y = norm(x, p[f"{block}post_attention_layernorm.weight"], shape.rms_norm_eps)
        state, seen = outputs(s, x + mlp(head, p, f"{block}mlp.", y, shares))
        out.append(seen)
    return out


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def mlp(head, p: dict[str, Tensor], at: str, x: Tensor, shares: list[tuple[Tensor, Tensor]] | None) -> Tensor:
    """Of a mixture of experts every expert computes every token; those that were not chosen count nothing."""
    if f"{at}gate.weight" not in p:
        return gated(x, *(p[f"{at}{n}_proj.weight"] for n in ("gate", "up", "down")))
    experts, logits = head.shape.experts, linear(x, p[f"{at}gate.weight"])
    each = "n_group" in experts
    share = torch.sigmoid(logits) if each else torch.softmax(logits, -1)
    may = torch.ones_like(share, dtype=torch.bool)
    if each:  # only experts of the groups whose two best make the most
        size = share.shape[1] // experts["n_group"]
        for i in range(len(x)):
            two = [float(part.sort().values[-2:].sum()) for part in share[i].split(size)]
            for group in sorted(range(len(two)), key=two.__getitem__)[: -experts["topk_group"]]:
                may[i, group * size : (group + 1) * size] = False
    least = (share * may).sort(-1, descending=True).values[:, experts["num_experts_per_tok"] - 1]
    chosen = may & (share >= least[:, None])
    if shares is not None:
        shares.append((share / share.sum(-1, keepdim=True), chosen))
    share = torch.where(chosen, share, torch.zeros_like(share))
    if experts.get("norm_topk_prob", head.shape.model_type == "mixtral"):
        share = share / share.sum(-1, keepdim=True)
    share = share * experts.get("routed_scaling_factor", 1.0)
    out = torch.zeros_like(x)
    for e in range(share.shape[1]):
        gate, up = p[f"{at}experts.gate_up_proj"][e].chunk(2)
        out = out + share[:, e, None] * gated(x, gate, up, p[f"{at}experts.down_proj"][e])
    if each:
        out = out + gated(x, *(p[f"{at}shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")))
    if f"{at}shared_expert_gate.weight" in p:
        shared = gated(x, *(p[f"{at}shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down")))
        out = out + torch.sigmoid(linear(x, p[f"{at}shared_expert_gate.weight"])) * shared
    return out


def eagle1_hidden(head, batch: Batch, final: Tensor, depth: int) -> list[Tensor]:
    p = dict(head.named_parameters())

    def fuse(s: int, state: Tensor):
        x = linear(torch.cat([embedding(ahead(batch.ids, 1 + s), head.embed), state], -1), p["fc.weight"])
        x = x + p["fc.bias"] if "fc.bias" in p else x
        return x, x

    return unroll(head, batch, final, depth, fuse, lambda s, x: (x, x), lambda s: "layers.0.", False, True)


def mtp_hidden(head, batch: Batch, final: Tensor, depth: int, own: bool, shares=None) -> list[Tensor]:
    """own: as in ``unroll``; of a chain of modules it is always so."""
    p, cfg, eps = dict(head.named_parameters()), head.config, head.shape.rms_norm_eps
    chain = cfg.modules > 1

    def module(s: int) -> str:
        return f"later.{s - 1}." if chain and s else ""

    def fuse(s: int, state: Tensor):
        e, at = embedding(ahead(batch.ids, 1 + s), head.embed), module(s)
        if cfg.zero_first_embedding and (s == 0 or chain):
            e = e * (batch.pos > 0)[:, None]
        e, h = norm(e, p[f"{at}token_layernorm.weight"], eps), norm(state, p[f"{at}hidden_layernorm.weight"], eps)
        both = torch.cat([h, e] if cfg.concat == "hidden_first" else [e, h], -1)
        x = linear(both, p[f"{at}input_proj.weight"])
        return norm(x, p[f"{at}input_layernorm.weight"], eps), x

    def outputs(s: int, x: Tensor):
        y = norm(x, p[f"{module(s)}final_layernorm.weight"], eps)
        return (y if cfg.recycle == "normed" else x), y

    state = raw(final)[:, 0] if cfg.start == "raw" else final
    return unroll(head, batch, state, depth, fuse, outputs, lambda s: f"{module(s)}block.", own or chain, False, shares)


def judged(head, batch: Batch, final: Tensor, lm_head: Tensor, hidden: list[Tensor], row_loss: Callable):
    """Sums over the pairs that count. row_loss(s, seen [T, H], logits [T, Vd], target's logits of the drafted token
    [T, V], drafted tokens [T]) -> (loss [T], trains [T] bool, its part of the total [T], which may train others)."""
    ids = torch.arange(V) if head.draft_ids is None else head.draft_ids
    own = dict(head.named_parameters()).get("lm_head.weight")
    weight = lm_head[ids] if own is None else own
    target_logits = linear(final, lm_head)
    total, alive = torch.zeros((), dtype=final.dtype), torch.ones(len(batch), dtype=torch.bool)
    out = {n: [] for n in ("loss", "loss_count", "hits", "accept", "pairs", "chain_hits", "chain_pairs")}
    for s, seen in enumerate(hidden):
        first, drafted = ahead(batch.turn, 1), ahead(batch.turn, 2 + s)
        pair = (first > 0) & (first == drafted) & (ahead(batch.doc + 1, 1) == batch.doc + 1)
        logits, p = linear(seen, weight), ahead(target_logits, 1 + s)
        loss, trains, weighted = row_loss(s, seen, logits, p, ahead(batch.ids, 2 + s))
        trains = trains & pair
        total = total + weighted[pair].sum()
        hit = (ids[logits.argmax(-1)] == p.argmax(-1)) & pair
        kept = torch.minimum(torch.softmax(p, -1)[:, ids], torch.softmax(logits, -1)).sum(-1)
        offered = alive & pair
        alive = offered & hit
        for name, value in (
            ("loss", loss[trains].sum()),
            ("loss_count", trains.sum()),
            ("hits", hit.sum()),
            ("accept", kept[pair].sum()),
            ("pairs", pair.sum()),
            ("chain_hits", alive.sum()),
            ("chain_pairs", offered.sum()),
        ):
            out[name].append(value.detach())
    return {"total": total, **{n: torch.stack(v).float() for n, v in out.items()}}


def eagle1(head, batch: Batch, final: Tensor, lm_head: Tensor, depth: int, steps: int):
    """The losses of the first ``steps`` of ``depth`` steps, term by term from EAGLE's section 4.2 and HASS's 3.1."""
    cfg, ids = head.config, torch.arange(V) if head.draft_ids is None else head.draft_ids

    def row_loss(s, seen, logits, p, tokens):
        q, soft, trains = torch.log_softmax(logits, -1), torch.softmax(p[:, ids], -1), torch.isin(p.argmax(-1), ids)
        cross = -(soft * q).sum(-1)
        error = (seen - ahead(final, 1 + s)).abs()
        smooth = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean(-1)
        best = soft.topk(min(cfg.topk, len(ids)), -1).indices
        distilled = -(soft * q).gather(-1, best).sum(-1)
        words = cfg.classification_weight * cross + cfg.topk_weight * distilled
        return cross, trains, (cfg.regression_weight * smooth + words * trains) * (s < steps)

    return judged(head, batch, final, lm_head, eagle1_hidden(head, batch, final, depth), row_loss)


def mtp(head, batch: Batch, final: Tensor, lm_head: Tensor, depth: int, own: bool):
    cfg, ids = head.config, torch.arange(V) if head.draft_ids is None else head.draft_ids
    weights = [cfg.beta**s / sum(cfg.beta**k for k in range(depth)) for s in range(depth)]

    def row_loss(s, seen, logits, p, tokens):
        q = torch.log_softmax(logits, -1)
        label = tokens if cfg.labels == "hard" else p.argmax(-1)
        trains = torch.isin(label, ids)
        if cfg.labels == "hard":
            place = torch.searchsorted(ids, label).clamp(max=len(ids) - 1)
            loss = -q.gather(-1, place[:, None])[:, 0]
        else:
            loss = -(torch.softmax(p[:, ids], -1) * q).sum(-1)
        return loss, trains, weights[s] * loss * trains

    shares: list[tuple[Tensor, Tensor]] = []
    sums = judged(head, batch, final, lm_head, mtp_hidden(head, batch, final, depth, own, shares), row_loss)
    if head.training:
        sums["total"] = sums["total"] + cfg.balance * balance(head, batch, shares, weights)
    return sums


def balance(head, batch: Batch, shares: list[tuple[Tensor, Tensor]], weights: list[float]):
    """DeepSeek-V3's sequence-wise balance (equations 17 to 20), for each step and document of n counted pairs n times
    sum_e f_e P_e."""
    total, k = 0.0, (head.shape.experts or {}).get("num_experts_per_tok")
    for s, (share, chosen) in enumerate(shares):
        count = share.shape[1]
        for d in range(int(batch.doc.max()) + 1):
            rows = [
                i
                for i in range(len(batch) - 2 - s)
                if batch.doc[i] == batch.doc[i + 2 + s] == d and 0 < batch.turn[i + 1] == batch.turn[i + 2 + s]
            ]
            if rows:
                sent = [sum(int(chosen[i, e]) for i in rows) * count / (k * len(rows)) for e in range(count)]
                total = total + weights[s] * len(rows) * sum(
                    f * p for f, p in zip(sent, share[rows].mean(0), strict=True)
                )
    return total
