"""Attention of the training-time test (EAGLE-3, section 3.2), exact, without a mask.

At step s a query at position i sees step 0's keys of its document up to i, and of the steps 1..s only the keys at its
own position. The first part is plain causal attention, which flash kernels do well and which they return with its
log-sum-exp; the second is s scores a query. A softmax over both is the average of the two parts weighted by their
exp(log-sum-exp). In the backward pass a flash kernel that is given the *merged* output and the *merged*
log-sum-exp returns exactly its own part of the gradient, since those two are all it reads of the other part
(dS = P * (dP - rowsum(dO * O)) with P = exp(S - lse)). So no [queries, keys] tensor exists at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layers import wide

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Runs:
    """The queries as runs of consecutive positions: run r holds query rows row[r]..row[r+1]-1, which are the flat
    positions first[r], first[r]+1, ...; its document's keys begin at start[r]. Plain ints: they drive kernel launches.
    """

    row: list[int]
    first: list[int]
    start: list[int]

    @classmethod
    def of(cls, positions: Tensor, doc_start: Tensor) -> Runs:
        """positions [N]: sorted flat positions of the queries; doc_start [N]: where each one's document begins."""
        n = positions.numel()
        if n == 0:
            return cls([0], [], [])
        breaks = (positions[1:] != positions[:-1] + 1) | (doc_start[1:] != doc_start[:-1])
        row = torch.cat([breaks.new_zeros(1, dtype=torch.int64), breaks.nonzero().squeeze(1) + 1])
        return cls([*row.tolist(), n], positions[row].tolist(), doc_start[row].tolist())

    def spans(self, queries: int):
        """Yields (row begin, row end, document start, first position) for the first ``queries`` rows."""
        for r, first in enumerate(self.first):
            begin, end = self.row[r], min(self.row[r + 1], queries)
            if begin < end:
                yield begin, end, self.start[r], first


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [n, heads, d] -> [1, heads, n, d], a view


def _merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmax parts [n, heads, d] with their log-sum-exp [n, heads] as one."""
    both = torch.logaddexp(lse, lse2)
    return (
        out * (lse - both).exp().unsqueeze(-1).to(out.dtype) + out2 * (lse2 - both).exp().unsqueeze(-1).to(out.dtype),
        both,
    )


class _CpuFlash:
    """Per run: the keys before it without a mask, its own keys causally (the CPU kernel aligns its causal mask to the
    top left, so the two cannot be one call). Grouped key/value heads are read in place."""

    def __init__(self, runs: Runs, queries: int) -> None:
        self.spans = list(runs.spans(queries))

    @staticmethod
    def _parts(begin: int, end: int, start: int, first: int):
        if first > start:
            yield slice(start, first), False
        yield slice(first, first + end - begin), True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for span in self.spans:
            rows = slice(*span[:2])
            merged = None
            for keys, causal in self._parts(*span):
                o, e = _cpu_forward(
                    _heads_first(q[rows]), _heads_first(k[keys]), _heads_first(v[keys]), 0.0, causal, scale=scale
                )
                part = o[0].transpose(0, 1), e[0].transpose(0, 1)
                merged = part if merged is None else _merge(*merged, *part)
            out[rows], lse[rows] = merged
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for span in self.spans:
            rows = slice(*span[:2])
            # the kernel expects the log-sum-exp as its own forward lays it out: [1, heads, n] over [n, heads]
            mine = [_heads_first(x[rows]) for x in (grad, q, out)]
            e = lse[rows].contiguous().transpose(0, 1).unsqueeze(0)
            for keys, causal in self._parts(*span):
                gq, gk, gv = _cpu_backward(
                    mine[0], mine[1], _heads_first(k[keys]), _heads_first(v[keys]), mine[2], e, 0.0, causal, scale=scale
                )
                dq[rows] += gq[0].transpose(0, 1)
                dk[keys] += gk[0].transpose(0, 1)
                dv[keys] += gv[0].transpose(0, 1)
        return dq, dk, dv


class _CudaVarlen:
    """One varlen flash call for all runs: run r's keys are its document up to its last query, and the kernel aligns
    its causal mask to the bottom right. Keys are gathered, since a document with two runs serves its keys twice; the
    gather also repeats grouped heads. Half precision only (flash attention has no fp32)."""

    def __init__(self, runs: Runs, queries: int, device: torch.device) -> None:
        cu_q, cu_k, index = [0], [0], []
        for begin, end, start, first in runs.spans(queries):
            last = first + end - begin
            index.append(torch.arange(start, last))
            cu_q.append(cu_q[-1] + end - begin)
            cu_k.append(cu_k[-1] + last - start)
        self.index = torch.cat(index).to(device)
        self.cu_q, self.cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k))
        self.max_q = max(b - a for a, b in zip(cu_q, cu_q[1:], strict=False))
        self.max_k = max(b - a for a, b in zip(cu_k, cu_k[1:], strict=False))

    def _gather(self, x: Tensor, heads: int) -> Tensor:
        return x[self.index].repeat_interleave(heads // x.shape[1], dim=1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        out, lse, *self.rng, _ = torch.ops.aten._flash_attention_forward(
            q, self._gather(k, heads), self._gather(v, heads), self.cu_q, self.cu_k, self.max_q, self.max_k,
            0.0, True, False, scale=scale,
        )  # fmt: skip
        return out, lse.transpose(0, 1)  # varlen lse is [heads, n]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[1]
        dq, gk, gv = torch.ops.aten._flash_attention_backward(
            grad, q, self._gather(k, heads), self._gather(v, heads), out, lse.transpose(0, 1).contiguous(),
            self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0, True, *self.rng, scale=scale,
        )  # fmt: skip

        def scatter(g: Tensor, like: Tensor) -> Tensor:
            summed = g.unflatten(1, (like.shape[1], -1)).sum(2, dtype=torch.float32)
            full = summed.new_zeros(like.shape)
            return full.index_add_(0, self.index, summed).to(like.dtype)

        return dq, scatter(gk, k), scatter(gv, v)


class _Plain:
    """On any device and in any precision, with the scores of ``ROWS`` queries at a time: where no flash kernel returns
    its log-sum-exp, as on CUDA in float32 (evaluation; GPUs without bf16)."""

    ROWS = 256

    def __init__(self, runs: Runs, queries: int) -> None:
        self.spans = [
            (row, min(row + self.ROWS, end), start, first + row - begin)
            for begin, end, start, first in runs.spans(queries)
            for row in range(begin, end, self.ROWS)
        ]

    @staticmethod
    def _by_group(x: Tensor, groups: int) -> Tensor:
        return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [n, heads, d] -> [groups, heads of one, n, d]

    def _scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        ahead = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        return wide(q @ k.mT * scale).masked_fill_(ahead, float("-inf"))

    def _spans(self, q: Tensor, k: Tensor, v: Tensor):
        """Yields the rows and keys of each span, and its q, k, v by group."""
        for begin, end, start, first in self.spans:
            rows, keys = slice(begin, end), slice(start, first + end - begin)
            yield rows, keys, *(self._by_group(x, k.shape[1]) for x in (q[rows], k[keys], v[keys]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, _, qs, ks, vs in self._spans(q, k, v):
            scores = self._scores(qs, ks, scale)
            total = scores.logsumexp(-1)
            part = (scores - total.unsqueeze(-1)).exp().to(v.dtype) @ vs
            out[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
            lse[rows] = total.permute(2, 0, 1).flatten(1)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys, qs, ks, vs in self._spans(q, k, v):
            gs, os = (self._by_group(x[rows], k.shape[1]) for x in (grad, out))
            total = lse[rows].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0)
            p = (self._scores(qs, ks, scale) - total.unsqueeze(-1)).exp()
            ds = p * (wide(gs @ vs.mT) - wide(gs * os).sum(-1, keepdim=True)) * scale
            p, ds = p.to(q.dtype), ds.to(q.dtype)
            dq[rows] = (ds @ ks).permute(2, 0, 1, 3).flatten(1, 2)
            dk[keys] += (ds.mT @ qs).sum(1).transpose(0, 1)
            dv[keys] += (p.mT @ gs).sum(1).transpose(0, 1)
        return dq, dk, dv


def _kernel(runs: Runs, q: Tensor):
    """Flash on the CPU, and on CUDA in half precision."""
    if q.device.type == "cpu":
        return _CpuFlash(runs, q.shape[0])
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        return _CudaVarlen(runs, q.shape[0], q.device)
    return _Plain(runs, q.shape[0])


class _TrainingTimeTest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, *own: Tensor) -> Tensor:
        kernel = _kernel(runs, q)
        out, lse = kernel.forward(q, k, v, scale)
        if own:
            n, group = q.shape[0], q.shape[1] // k.shape[1]
            queries = wide(q.unflatten(1, (-1, group)))  # [n, kv heads, group, d]
            own_k = wide(torch.stack([x[:n] for x in own[: len(own) // 2]], 2))  # [n, kv heads, s, d]
            own_v = wide(torch.stack([x[:n] for x in own[len(own) // 2 :]], 2))
            scores = (queries @ own_k.transpose(-1, -2) * scale).flatten(1, 2)  # [n, heads, s]
            both = torch.logaddexp(lse, scores.logsumexp(-1))
            weight = (scores - both.unsqueeze(-1)).exp()
            mine = weight.unflatten(1, (-1, group)) @ own_v
            out = (wide(out) * (lse - both).exp().unsqueeze(-1) + mine.flatten(1, 2)).to(q.dtype)
            lse = both
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad, scale = grad.contiguous(), ctx.scale
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse, scale)
        if not own:
            return dq, dk, dv, None, None
        n, group = q.shape[0], q.shape[1] // k.shape[1]
        steps = len(own) // 2
        queries, g = (wide(x.unflatten(1, (-1, group))) for x in (q, grad))
        own_k = wide(torch.stack([x[:n] for x in own[:steps]], 2))
        own_v = wide(torch.stack([x[:n] for x in own[steps:]], 2))
        p = (queries @ own_k.transpose(-1, -2) * scale - lse.unflatten(1, (-1, group)).unsqueeze(-1)).exp()
        delta = (g * wide(out.unflatten(1, (-1, group)))).sum(-1, keepdim=True)
        ds = p * (g @ own_v.transpose(-1, -2) - delta) * scale  # [n, kv heads, group, s]
        dq = dq + (ds @ own_k).flatten(1, 2).to(dq.dtype)
        gk, gv = (ds.transpose(-1, -2) @ queries), (p.transpose(-1, -2) @ g)  # [n, kv heads, s, d]

        def spread(x: Tensor, like: list[Tensor]) -> list[Tensor]:
            out = []
            for step, original in enumerate(like):
                full = torch.zeros_like(original)
                full[:n] = x[:, :, step].to(original.dtype)
                out.append(full)
            return out

        return dq, dk, dv, None, None, *spread(gk, own[:steps]), *spread(gv, own[steps:])


def training_time_test(
    q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], runs: Runs, scale: float
) -> Tensor:
    """q [n, heads, d]: the first n query rows of ``runs``; k, v [T, kv heads, d]: step 0's keys and values at every
    position; own: for each earlier or equal step >= 1 its (keys, values) [>= n, kv heads, d], one a query row.
    Returns [n, heads, d]."""
    if q.shape[0] == 0:
        return q
    keys, values = zip(*own, strict=True) if own else ((), ())
    return _TrainingTimeTest.apply(q, k, v, runs, scale, *keys, *values)
