"""Multi-token prediction from scratch: one module applied recursively, or a chain of separate ones.

A module is DeepSeek-V3's (arXiv 2412.19437, section 2.2; ``mtp_module``). Fed with the token i+1+s at step s it drafts
token i+2+s; embedding and lm_head are the target's. Either all steps share one module, as in MiMo and FastMTP (arXiv
2509.18362), or each has its own (``modules``, DeepSeek's chain; ``mtp_chain`` decodes it). A chain drafts as many
tokens as it has modules and no more: vLLM and SGLang would wrap around (step modulo modules), which no module is
trained for.

The defaults are what vLLM 0.32 computes for MiMo, the form in which it serves a dense module: the first state is the
target's residual stream *before* its final norm, the later ones are the module's output *after* its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Runs, training_time_test
from ..losses import HardTargets, SoftTargets, align, align_pairs, vocab_loss, zero_sums
from ..shift import pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, LossSums, TargetShape, TargetWeights, Wants
from . import mtp_export
from .base import DraftHead, ExportSpec, Session, text_hits
from .experts import KINDS, Experts, imbalance
from .mtp_chain import ChainSession
from .mtp_config import MtpConfig
from .mtp_module import LaterModule, ModuleParts
from .recurrent import RecurrentHead, RecurrentSession, seen_positions


class Mtp(ModuleParts, RecurrentHead):
    """The head is its own first module; ``later`` holds those of a chain after it."""

    Config = MtpConfig
    dialects = mtp_export.FORMS
    instead = "set head.own_lm_head=true, which trains one"

    def __init__(self, config: MtpConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        self.build_parts(shape)
        self.later = nn.ModuleList(LaterModule(config, shape) for _ in range(config.modules - 1))
        if config.own_lm_head:
            self.lm_head = nn.Linear(shape.hidden_size, self.draft_vocab_size, bias=False)

    @property
    def shares_lm_head(self) -> bool:
        return not self.config.own_lm_head

    @property
    def chain(self) -> list[ModuleParts]:
        return [self, *self.later]

    @property
    def max_depth(self) -> int | None:
        return len(self.chain) if self.later else None

    def wants(self) -> Wants:
        if self.config.start == "raw":  # the last index of hidden_states is the final norm's input
            return Wants(layers=(self.shape.num_layers,), final="supervised", depth=self.config.depth)
        return Wants(layers=(), final="all", depth=self.config.depth)

    def init_from_target(self, weights: TargetWeights) -> list[str]:
        """Every module starts as ``start_parts`` says."""
        done = [module.start_parts(weights) for module in self.chain][0]
        if self.shape.experts is not None and self.config.block == "auto" and not isinstance(self.block.mlp, Experts):
            done.append(
                f"a dense MLP in place of the target's mixture of experts: that of family {self.shape.model_type!r} is "
                f"not built here (only {', '.join(KINDS)})"
            )
        if self.later:
            done.append(f"{len(self.chain)} modules, all alike")
        if self.config.own_lm_head:
            rows = self.drafted_rows(weights)
            with torch.no_grad():
                self.lm_head.weight.copy_(rows)
            done.append("lm_head = the target's rows")
        return done

    def lm_head_weight(self) -> Tensor:
        return self.lm_head.weight if self.config.own_lm_head else super().lm_head_weight()

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = super().embedding(tokens, positions)
        if not self.config.zero_first_embedding:
            return embedded
        return embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)

    def first_state(self, layers: Tensor, final: Tensor) -> Tensor:
        return layers[:, 0].to(self.dtype) if self.config.start == "raw" else super().first_state(layers, final)

    def session(self, max_length: int) -> Session:
        return ChainSession(self, max_length) if self.later else RecurrentSession(self, max_length)

    # -- training ----------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        """In eval mode the context is decoding's, whatever it is in training: what is measured is what will be
        drafted."""
        if self.later and depth > len(self.chain):
            raise ValueError(f"depth {depth}, but there are {len(self.chain)} modules")
        pairs = pair_mask(batch, depth)
        start = pairs[0].nonzero().squeeze(1)
        if start.numel() == 0:
            return zero_sums(depth, list(self.trainable().values()))
        own_context = self.training and self.config.own_context
        unroll = self.unroll_own_context if own_context or self.later else self.unroll
        weight = self.config.beta ** torch.arange(depth, dtype=torch.float32)
        weight = weight / weight.sum()
        routers = self._routers() if self.training else []
        for router in routers:
            router.record = []
        hidden = align(unroll(batch, self.states(batch, features), start, depth), depth)
        routings = [x for router in routers for x in router.record]
        for router in routers:
            router.record = None
        where = torch.searchsorted(features.final_at, start + 1)
        greedy, labels = features.argmax[where], batch.ids[start + 2]
        greedy, labels = self.drafted(greedy), self.drafted(labels)
        if self.config.labels == "hard":
            targets = HardTargets(labels=labels, greedy=greedy)
        else:
            targets = SoftTargets(features.final[where], self.restricted(teacher), greedy, features.lse[where])
        aligned = align_pairs(pairs, start)
        sums = vocab_loss(hidden, [self.lm_head_weight()], targets, aligned, weight, loss=self.config.loss)
        for s, routing in enumerate(routings):
            rows = start[pairs[s, start]]  # what the router saw: every position, or the first of ``start``
            at = rows if routing.chosen.shape[0] == len(batch) else torch.searchsorted(start, rows)
            sums.total = sums.total + self.config.balance * weight[s] * imbalance(routing, at, batch.doc[rows])
        return sums

    def _routers(self) -> list[Experts]:
        mlps = [module.block.mlp for module in self.chain]
        return [mlp for mlp in mlps if isinstance(mlp, Experts) and self.config.balance]

    @torch.no_grad()
    def chain_hits(self, batch: Batch, features: Features, depth: int) -> Tensor:
        if not self.later:
            return super().chain_hits(batch, features, depth)
        if depth > len(self.chain):
            raise ValueError(f"depth {depth}, but there are {len(self.chain)} modules")
        start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
        hidden = self.unroll_own_context(batch, self.states(batch, features), start, depth)
        return text_hits(batch, start, hidden, [self.lm_head_weight()], self.draft_ids, depth)

    def unroll_own_context(self, batch: Batch, state: Tensor, start: Tensor, depth: int) -> list[Tensor]:
        """A chain of modules, or FastMTP's published training of a shared one, with the result of ``unroll``: every
        step is causal over that step's own states of all positions, at unshifted RoPE positions. A position whose token
        i+1+s lies in the next document is read by no pair that counts: only later positions of its own document see
        it."""
        rows = start.numel()
        everywhere = torch.arange(len(batch), device=start.device)
        runs, last_runs = (Runs.of(at, batch.cu[batch.doc[at]]) for at in (everywhere, start))
        angles, out = self.rope(batch.pos), []
        for s in range(min(depth, rows)):
            module = self.chain[s] if self.later else self
            attention = module.block.self_attn
            # zero_first_embedding is about RoPE position 0 of decoding, which a shared module's later steps never
            # stand at and those of a chain do
            embedded = self.embedding(batch.ids.roll(-1 - s), batch.pos if self.later else batch.pos + s)
            read, residual = module.fuse(embedded, state)
            k, v, at = attention.keys(read, angles), attention.values(read), everywhere
            if s == min(depth, rows) - 1:  # nobody reads the states of the last step
                at, runs = start, last_runs
            q = attention.queries(read[at], tuple(x[at] for x in angles))
            attended = training_time_test(q, k, v, [], runs, self.scale)
            state, seen = module.outputs(module.block.finish(attended, residual[at]))
            out.append((seen if at is start else seen[start])[: rows - s])
        return out

    def flops(self, batch: Batch, depth: int) -> float:
        pairs = pair_mask(batch, depth)
        matrix = self.shape.hidden_size * self.draft_vocab_size
        logits = (3 if self.config.own_lm_head else 2) * int(pairs.sum()) * matrix
        if self.config.labels == "soft":
            logits += int(pairs[0].sum()) * matrix
        own = self.config.own_context
        layer = self._own_context_macs(batch, depth) if own else self.layer_macs(batch, depth, through=True)
        return 2.0 * (layer + logits)

    def _own_context_macs(self, batch: Batch, depth: int) -> int:
        pairs, shape = pair_mask(batch, depth), self.shape
        start = pairs[0].nonzero().squeeze(1)
        keys, rows, size = seen_positions(batch, start), start.numel(), shape.hidden_size
        last = batch.pos.new_full((batch.cu.numel() - 1,), -1)
        last = last.scatter_reduce(0, batch.doc[start], batch.pos[start], "amax") + 1
        seen = (depth - 1) * int((last * (last + 1) // 2).sum()) + int((batch.pos[start] + 1).sum())
        queries = (depth - 1) * keys + rows
        macs = 2 * keys * 2 * size * size + 3 * (depth - 1) * keys * size * size
        if self.later:  # each has its own projection of the embedding
            macs += 2 * (depth - 1) * keys * size * size
        macs += 3 * depth * keys * self.key_weights()
        return macs + 3 * queries * self.row_weights() + 6 * seen * shape.num_heads * self.key_shape[1]

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        if self.config.own_context:  # every position at every step but the last
            return super().kept_values(tokens * depth, tokens * max(depth - 1, 0) // depth + supervised, depth)
        return super().kept_values(tokens, supervised, depth)

    # -- export ------------------------------------------------------------------------------------------------

    def export_spec(self, dialect: str) -> ExportSpec:
        return mtp_export.spec(self, dialect)

    @classmethod
    def expected_tensors(cls, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        if dialect not in cls.dialects:
            raise KeyError(dialect)
        return mtp_export.expected_tensors(dialect, config)

    @classmethod
    def from_export(
        cls, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape
    ) -> DraftHead:
        return mtp_export.read(cls, dialect, config, tensors, shape)
