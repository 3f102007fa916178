"""EAGLE-3's training step, slow and obvious: every position at every step, a dense mask, whole logits.

Written from the paper's section 3.2 and ALGORITHMS.md, with the head's own parameters and nothing else of it. It is
what the fast version is compared with, in tests and in scripts/bench_step.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, d] with half rotation."""
    d = x.shape[-1]
    inverse = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (positions.double()[:, None] * inverse).to(x.dtype)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _ahead(x: Tensor, by: int) -> Tensor:
    return torch.cat([x[by:], torch.zeros_like(x[:by])])


def step(head, batch, features, lm_head: Tensor, depth: int) -> dict[str, Tensor]:
    """lm_head [V, H]: the target's. ``features.final`` must be given at every position. Returns total (with
    gradient), and per depth loss, hits, accept, pairs, chain_hits, chain_pairs, loss_count."""
    p = dict(head.named_parameters())
    shape, cfg, T = head.shape, head.config, len(batch)
    eps, theta = shape.rms_norm_eps, shape.rope["rope_theta"]
    ids = torch.arange(shape.vocab_size) if head.draft_ids is None else head.draft_ids
    groups = shape.num_heads // shape.num_kv_heads

    x = features.layers
    if cfg.fc_norm:
        x = torch.stack([_norm(x[:, j], p[f"fc_norm.{j}.weight"], eps) for j in range(x.shape[1])], 1)
    x = x.flatten(1)
    if cfg.norm_before_fc:
        x = _norm(x, p["input_norm.weight"], eps)
    g = linear(x, p["fc.weight"])

    target_logits = linear(features.final, lm_head)
    whole = torch.softmax(target_logits, -1)
    best = target_logits.argmax(-1)

    same_doc = batch.doc[:, None] == batch.doc[None, :]
    causal = same_doc & torch.ones(T, T, dtype=torch.bool).tril()
    keys, values = [], []
    total = torch.zeros(())
    out = {n: [] for n in ("loss", "loss_count", "hits", "accept", "pairs", "chain_hits", "chain_pairs")}
    alive = torch.ones(T, dtype=torch.bool)
    for s in range(depth):
        tokens = _ahead(batch.ids, 1 + s)
        e = _norm(embedding(tokens, head.embed), p["midlayer.input_layernorm.weight"], eps)
        h = _norm(g, p["midlayer.hidden_norm.weight"], eps)
        both = torch.cat([e, h], -1)
        q, k, v = (
            linear(both, p[f"midlayer.self_attn.{n}_proj.weight"]).unflatten(1, (-1, shape.head_dim)) for n in "qkv"
        )
        q, k = _rope(q, batch.pos + s, theta), _rope(k, batch.pos + s, theta)
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        # scores against step 0's keys (causal) and, of each later step, only the own position
        mask = torch.cat([causal] + [torch.eye(T, dtype=torch.bool)] * s, 1)
        scores = torch.einsum("ihd,jhd->hij", q, torch.cat(keys)) * shape.head_dim**-0.5
        attention = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        a = torch.einsum("hij,jhd->ihd", attention, torch.cat(values)).flatten(1)
        x = (h if cfg.norm_before_residual else g) + linear(a, p["midlayer.self_attn.o_proj.weight"])
        y = _norm(x, p["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (p[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        g = x + linear(silu(linear(y, gate)) * linear(y, up), down)
        normed = _norm(g, p["norm.weight"], eps)
        logits = linear(normed, p["lm_head.weight"])  # [T, Vd]
        if cfg.norm_output:
            g = normed

        # the drafted token is i+2+s, which final[i+1+s] produced; it must lie in the turn of token i+1
        first, drafted = _ahead(batch.turn, 1), _ahead(batch.turn, 2 + s)
        pair = (first > 0) & (first == drafted) & (_ahead(batch.doc + 1, 1) == batch.doc + 1)
        teacher = _ahead(target_logits, 1 + s)[:, ids].detach()
        greedy = _ahead(best, 1 + s)
        inside = torch.isin(greedy, ids)
        soft = torch.softmax(teacher, -1)
        loss = -(soft * torch.log_softmax(logits, -1)).sum(-1)
        trains = pair & inside
        total = total + cfg.depth_decay**s * loss[trains].sum()
        draft = torch.softmax(logits, -1)
        hit = (ids[logits.argmax(-1)] == greedy) & pair
        accept = torch.minimum(_ahead(whole, 1 + s)[:, ids], draft).sum(-1)
        offered = alive & pair
        alive = offered & hit
        for name, value in (
            ("loss", loss[trains].sum()),
            ("loss_count", trains.sum()),
            ("hits", hit.sum()),
            ("accept", accept[pair].sum()),
            ("pairs", pair.sum()),
            ("chain_hits", alive.sum()),
            ("chain_pairs", offered.sum()),
        ):
            out[name].append(value.detach())
    return {"total": total, **{n: torch.stack(v).float() for n, v in out.items()}}
