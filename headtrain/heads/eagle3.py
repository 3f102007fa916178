"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and the 3.1 switches.

Step 0 at position i reads the target's features at i and the embedding of token i+1, and drafts token i+2. Step s
reads the layer's own output of step s-1 at the same position and the embedding of token i+1+s, and drafts token
i+2+s. It attends to step 0's keys up to i and to the keys of steps 1..s at i alone (training-time test).

What nobody reads is not computed: an unsupervised position contributes only its step-0 key and value. The embedding
half of q/k/v depends on the token alone, so it is computed once and serves every step (the projection of a
concatenation is the sum of two projections).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..attention import Runs, training_time_test
from ..layers import MLP, RMSNorm, Rope, rotate
from ..losses import SoftTargets, align, align_pairs, vocab_loss, zero_sums
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from . import eagle3_export, eagle3_induction
from .base import DraftHead, ExportSpec, HeadConfig, Session, SoftLoss, node_mask, text_hits
from .recurrent import seen_positions


class Eagle3Config(HeadConfig):
    training_only: ClassVar[frozenset[str]] = HeadConfig.training_only | {"train_lm_head"}

    kind: Literal["eagle3"] = "eagle3"
    depth: int = Field(7, ge=1, description="steps of the training-time test")
    layers: list[int] | None = Field(None, description="three hidden_states indices; default (2, n//2, n-3)")
    draft_vocab_size: int | None = Field(32000, ge=1, description="null: the target's whole vocabulary")
    intermediate_size: int | None = Field(None, description="default: the target's")
    depth_decay: float = Field(0.8, gt=0, le=1, description="weight of step s is depth_decay^s")
    loss: SoftLoss = "kl"
    train_lm_head: bool = Field(True, description="false: it stays the target's rows, which a step of training spares")
    fc_norm: bool = Field(False, description="EAGLE-3.1: an RMSNorm for each feature before fc")
    norm_before_fc: bool = Field(False, description="one RMSNorm over the concatenated features before fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: the normed output is fed to the next step")
    norm_before_residual: bool = Field(False, description="the residual starts from the normed hidden state")


def default_layers(num_layers: int) -> list[int]:
    """(2, n//2, n-3) as the reference and the engines have it; where those collide (n < 7) three distinct layers
    spread over the target, or fewer where it has fewer."""
    usual = [2, num_layers // 2, num_layers - 3]
    if num_layers >= 7:
        return usual
    return sorted({max(1, round(num_layers * f)) for f in (1 / 3, 2 / 3, 1.0)})


class _Attention(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        inner, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)


class _Layer(nn.Module):
    """The one decoder layer; q/k/v read [input_layernorm(embedding); hidden_norm(hidden)]."""

    def __init__(self, shape: TargetShape, intermediate: int) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, intermediate, shape.hidden_act)


class Eagle3(DraftHead):
    Config = Eagle3Config
    dialects = eagle3_export.FORMS

    def __init__(self, config: Eagle3Config, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        self.layer_ids = tuple(config.layers or default_layers(shape.num_layers))
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError(f"head.layers {list(self.layer_ids)}: expected distinct layers")
        if bad := [i for i in self.layer_ids if not 0 <= i <= shape.num_layers]:
            raise ValueError(f"head.layers: {bad} outside the target's hidden_states 0..{shape.num_layers}")
        if config.fc_norm and config.norm_before_fc:
            raise ValueError("head: fc_norm and norm_before_fc exclude each other; set one of them")
        size, eps, wide = shape.hidden_size, shape.rms_norm_eps, len(self.layer_ids) * shape.hidden_size
        self.intermediate = config.intermediate_size or shape.intermediate_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in self.layer_ids)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, eps)
        self.fc = nn.Linear(wide, size, bias=False)
        self.midlayer = _Layer(shape, self.intermediate)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, self.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.train_lm_head)
        self.rope = Rope(shape)
        self.scale = shape.head_dim**-0.5
        self.register_buffer("embed", None, persistent=False)

    def wants(self) -> Wants:
        return Wants(layers=self.layer_ids, final="supervised", depth=self.config.depth)

    def attach(self, weights: TargetWeights) -> None:
        self.embed = weights.embed.detach()

    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """fc passes the deepest feature through, the layer is the target's last one (the embedding half of q/k/v
        starts at zero), lm_head is the target's rows and norm its final norm."""
        done = ["fc = identity on the deepest feature", "norm = the target's final norm", *self._copy_rows(weights)]
        size = self.shape.hidden_size
        deepest = max(range(len(self.layer_ids)), key=lambda j: self.layer_ids[j])
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, deepest * size : (deepest + 1) * size] = torch.eye(size)
            self.norm.weight.copy_(weights.final_norm)
            own, last = dict(self.midlayer.named_parameters()), weights.last_layer
            targets = {n: own[n] for n in own if n not in ("input_layernorm.weight", "hidden_norm.weight")}
            source = {n: last.get(n) for n in targets}
            fits = {
                n: source[n] is not None and source[n].shape == (p.shape if not _reads_both(n) else (p.shape[0], size))
                for n, p in targets.items()
            }
            if all(fits.values()):
                for name, p in targets.items():
                    if _reads_both(name):
                        p.zero_()
                        p[:, size:] = source[name]
                    else:
                        p.copy_(source[name])
                if last.get("input_layernorm.weight") is not None:
                    own["hidden_norm.weight"].copy_(last["input_layernorm.weight"])
                done.append("decoder layer = the target's last layer, embedding half of q/k/v zero")
            else:
                bad = ", ".join(n for n, ok in fits.items() if not ok)
                done.append(f"decoder layer random: the target's last layer does not fit ({bad})")
        config = self.config
        if config.norm_before_fc or config.fc_norm or config.norm_before_residual:
            done.append(
                "note: norms rescale the residual stream that these weights were made for; train.init=induction (or "
                "random) learns faster with them, see recipes/EXPERIMENTS.md"
            )
        return done

    def init_at_random(self, weights: TargetWeights) -> list[str]:
        return [] if self.config.train_lm_head else self._copy_rows(weights)

    can_copy = True

    @property
    def induction_tokens(self) -> int:
        return eagle3_induction.SAMPLE * self.fc.in_features

    def init_for_induction(self, weights: TargetWeights) -> list[str]:
        return self._copy_rows(weights)

    def fit_induction(
        self, sample: Iterable[tuple[Batch, Features]], total: Callable[[Tensor], Tensor], window: int
    ) -> list[str]:
        return eagle3_induction.start(self, sample, total, window)

    @torch.no_grad()
    def _copy_rows(self, weights: TargetWeights) -> list[str]:
        self.lm_head.weight.copy_(self.drafted_rows(weights))
        return ["lm_head = the target's rows"]

    # -- pieces shared by training and drafting ----------------------------------------------------------------

    def fc_input(self, layers: Tensor) -> Tensor:
        """[n, L, H] target features -> what fc reads, [n, L * H]."""
        if self.config.fc_norm:
            layers = torch.stack([norm(layers[:, j]) for j, norm in enumerate(self.fc_norm)], 1)
        wide = layers.flatten(1)
        return self.input_norm(wide) if self.config.norm_before_fc else wide

    def fuse(self, layers: Tensor) -> Tensor:
        """[n, L, H] target features -> g [n, H]."""
        return self.fc(self.fc_input(layers))

    def _embedding(self, tokens: Tensor) -> Tensor:
        embedded = torch.nn.functional.embedding(tokens, self.embed)
        return self.midlayer.input_layernorm(embedded.to(self.midlayer.input_layernorm.weight.dtype))

    def _halves(self, name: str) -> tuple[Tensor, Tensor]:
        return getattr(self.midlayer.self_attn, name).weight.split(self.shape.hidden_size, 1)

    def _finish(self, attended: Tensor, g: Tensor, normed: Tensor) -> Tensor:
        """Output projection, residual and MLP: the layer's pre-norm output [n, H]."""
        layer = self.midlayer
        x = (normed if self.config.norm_before_residual else g) + layer.self_attn.o_proj(attended.flatten(1))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    # -- training ----------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        pairs = pair_mask(batch, depth)
        start = pairs[0].nonzero().squeeze(1)  # [N] supervised positions
        if start.numel() == 0:
            return zero_sums(depth, list(self.trainable().values()))
        hidden = align(self._unroll(batch, features, start, depth), depth)
        where = torch.searchsorted(features.final_at, start + 1)
        targets = SoftTargets(
            final=features.final[where],
            teacher=self.restricted(teacher),
            greedy=self.drafted(features.argmax[where]),
            lse=features.lse[where],
        )
        weight = self.config.depth_decay ** torch.arange(depth, dtype=torch.float32)
        return vocab_loss(
            hidden, [self.lm_head.weight], targets, align_pairs(pairs, start), weight, loss=self.config.loss
        )

    def _unroll(self, batch: Batch, features: Features, start: Tensor, depth: int) -> list[Tensor]:
        """hidden[s] [N - s, H]: the normed output of step s for the first N - s supervised positions. (The last s
        of them end the last turn: they have no token of depth s+1. Rows that end an earlier turn are computed on,
        with weight zero, so that every step is one contiguous block.)"""
        layer, rows = self.midlayer, start.numel()
        heads, dim = (-1, self.shape.head_dim), self.shape.head_dim
        g_all = self.fuse(features.layers.to(self.fc.weight.dtype))  # [T, H]
        normed_all = layer.hidden_norm(g_all)
        following = torch.cat([batch.ids[1:], batch.ids[:1]])  # the last entry is read by no supervised query
        embedded = self._embedding(following)  # [T, H]: of token i+1 at index i
        (qe, qh), (ke, kh), (ve, vh) = (self._halves(n) for n in ("q_proj", "k_proj", "v_proj"))
        linear = torch.nn.functional.linear
        k_token, v_token = linear(embedded, ke), linear(embedded, ve)  # [T, kv]: the embedding half, once
        q_token = linear(embedded[start], qe)  # [N, q]; step s reads rows s.. of it: token i+1+s is row r+s's i+1
        cos, sin = self.rope(batch.pos)
        k0 = rotate((k_token + linear(normed_all, kh)).unflatten(1, heads), cos, sin)
        v0 = (v_token + linear(normed_all, vh)).unflatten(1, heads)
        k_token, v_token = k_token[start], v_token[start]
        runs = Runs.of(start, batch.cu[batch.doc[start]])
        pos = batch.pos[start]
        g, normed, own, out = g_all[start], normed_all[start], [], []
        for s in range(min(depth, rows)):
            n = rows - s
            cos, sin = self.rope(pos[:n] + s)
            if s:
                g = g[:n]
                normed = layer.hidden_norm(g)
                key = rotate((k_token[s:] + linear(normed, kh)).unflatten(1, heads), cos, sin)
                own.append((key, (v_token[s:] + linear(normed, vh)).unflatten(1, heads)))
            q = rotate((q_token[s:] + linear(normed, qh)).unflatten(1, (-1, dim)), cos, sin)
            g = self._finish(training_time_test(q, k0, v0, own, runs, self.scale), g, normed)
            final = self.norm(g)
            out.append(final)
            if self.config.norm_output:
                g = final
        return out

    @torch.no_grad()
    def chain_hits(self, batch: Batch, features: Features, depth: int) -> Tensor:
        start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
        hidden = self._unroll(batch, features, start, depth)
        return text_hits(batch, start, hidden, [self.lm_head.weight], self.draft_ids, depth)

    def flops(self, batch: Batch, depth: int) -> float:
        pairs, shape = pair_mask(batch, depth), self.shape
        start = pairs[0].nonzero().squeeze(1)
        keys, rows = seen_positions(batch, start), start.numel()  # positions that some query sees; queries of step 0
        deep, later = int(pairs.sum()), int(pairs[1:].sum())  # (position, step) pairs; those of steps >= 1
        size, inner = shape.hidden_size, shape.num_heads * shape.head_dim
        kv = 2 * shape.num_kv_heads * shape.head_dim
        seen = sum(int((batch.pos[p] + 1 + s).sum()) for s, p in enumerate(pairs))  # keys over all queries
        macs = 2 * keys * self.fc.weight.numel()  # forward and weight gradient: the features are frozen
        macs += 3 * keys * 2 * size * kv + 3 * later * size * kv  # keys and values; the embedding half once a token
        macs += 3 * (rows + deep) * size * inner  # queries, likewise
        macs += 3 * deep * (inner * size + 3 * size * self.intermediate)
        macs += 6 * seen * inner  # two products forward, four backward
        each = 3 if self.config.train_lm_head else 2
        macs += (each * deep + rows) * size * self.draft_vocab_size  # draft logits; the teacher's rows once
        return 2.0 * macs

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        shape = self.shape
        size, inner, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        once = tokens * ((len(self.layer_ids) + 4) * size + 6 * kv)  # features, fc, norms, embeddings, keys, values
        row = 9 * size + 3 * inner + 4 * kv + 4 * self.intermediate  # one query at one step
        return once + supervised * depth * (row + 2 * size)  # and its hidden state by teacher row, with gradient

    # -- drafting ----------------------------------------------------------------------------------------------

    def session(self, max_length: int) -> Session:
        return _Eagle3Session(self, max_length)

    # -- export ------------------------------------------------------------------------------------------------

    def export_spec(self, dialect: str) -> ExportSpec:
        return eagle3_export.spec(self, dialect)

    @classmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return eagle3_export.expected_tensors(dialect, config)

    @classmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        return eagle3_export.read(cls, dialect, config, tensors, shape)


def _reads_both(name: str) -> bool:
    return name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


class _Eagle3Session(Session):
    """One key/value buffer: accepted positions first, then this round's nodes in order of creation."""

    SPARE = 256  # nodes of one round that fit without growing

    def __init__(self, head: Eagle3, max_length: int) -> None:
        self.head = head
        shape = head.shape
        room = (1, shape.num_kv_heads, max_length + self.SPARE, shape.head_dim)
        weight = head.fc.weight
        self.keys, self.values = weight.new_zeros(room), weight.new_zeros(room)
        self.length = 0
        self._forget()

    def _forget(self) -> None:
        self.states: list[Tensor] = []  # each node's g for its children, [1, H]
        self.depths: list[int] = []
        self.parents: list[int] = []

    def _project(self, embedded: Tensor, normed: Tensor, name: str) -> Tensor:
        both = torch.cat([embedded, normed], -1)
        return getattr(self.head.midlayer.self_attn, name)(both).unflatten(1, (-1, self.head.shape.head_dim))

    def _logits(self, g: Tensor) -> tuple[Tensor, Tensor]:
        final = self.head.norm(g)
        logits = self.head.lm_head(final).float()
        return logits, (final if self.head.config.norm_output else g)

    def _attend(self, q: Tensor, length: int, mask: Tensor | None) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            self.keys[:, :, :length],
            self.values[:, :, :length],
            attn_mask=mask,
            scale=self.head.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _write(self, at: int, key: Tensor, value: Tensor) -> None:
        self.keys[0, :, at : at + key.shape[0]] = key.transpose(0, 1)
        self.values[0, :, at : at + key.shape[0]] = value.transpose(0, 1)

    @torch.no_grad()
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        head, n = self.head, next_tokens.numel()
        if self.length + n > self.keys.shape[2] - self.SPARE:
            raise ValueError(f"session of {self.keys.shape[2] - self.SPARE} positions is full")
        self._forget()
        g = head.fuse(layers.to(head.fc.weight.dtype))
        normed, embedded = head.midlayer.hidden_norm(g), head._embedding(next_tokens)
        cos, sin = head.rope(torch.arange(self.length, self.length + n, device=g.device))
        self._write(
            self.length,
            rotate(self._project(embedded, normed, "k_proj"), cos, sin),
            self._project(embedded, normed, "v_proj"),
        )
        self.length += n
        last = slice(n - 1, n)  # only the root is drafted from: earlier queries are read by nobody
        q = rotate(self._project(embedded[last], normed[last], "q_proj"), cos[last], sin[last])
        logits, self.root = self._logits(head._finish(self._attend(q, self.length, None), g[last], normed[last]))
        return logits[0]

    @torch.no_grad()
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        head, n, parent_list = self.head, tokens.numel(), parents.tolist()
        first = len(self.parents)
        if self.length + first + n > self.keys.shape[2]:
            raise ValueError(f"more than {self.SPARE} nodes in one round")
        g = torch.cat([self.root if p < 0 else self.states[p] for p in parent_list])
        depths = [1 if p < 0 else self.depths[p] + 1 for p in parent_list]
        normed, embedded = head.midlayer.hidden_norm(g), head._embedding(tokens)
        # the node at depth s stands s positions after the root's feature (step s of the training-time test)
        cos, sin = head.rope(torch.tensor([self.length - 1 + d for d in depths], device=g.device))
        self._write(
            self.length + first,
            rotate(self._project(embedded, normed, "k_proj"), cos, sin),
            self._project(embedded, normed, "v_proj"),
        )
        self.parents += parent_list
        self.depths += depths
        total = self.length + first + n
        q = rotate(self._project(embedded, normed, "q_proj"), cos, sin)
        logits, states = self._logits(
            head._finish(
                self._attend(q, total, node_mask(self.parents, self.length, first, self.keys.device)), g, normed
            )
        )
        self.states += states.split(1)
        return logits
