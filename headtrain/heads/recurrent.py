"""What recursive heads share: one decoder layer that is fed with its own output.

The input at position i, step s is made of the embedding of token i+1+s and a state: at step 0 the target's feature at
i, afterwards the layer's own output of step s-1 from the same starting position. The layer attends to step 0's keys up
to i and, of the steps 1..s, to the keys of the same starting position alone; it stands at RoPE position i+s. That is
what an engine's decoding of such a head does: true features for the accepted text, the head's own states for the
guesses after it. (EAGLE-3's training-time test and HASS's harmonised context are this, too.)

What nobody reads is not computed: an unsupervised position contributes only its step-0 key and value.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from .. import few_rows
from ..attention import Runs, training_time_test
from ..layers import MLP, RMSNorm, Rope, rotate
from ..shift import pair_mask
from ..types import Batch, Features, TargetShape, TargetWeights
from .base import DraftHead, HeadConfig, Session, node_mask, text_hits
from .experts import Experts
from .shared import shared_lm_head


class Attention(nn.Module):
    """The projections of a Llama-like attention. bias: on q/k/v (Qwen2); qk_norm: an RMSNorm for each head's query and
    key (Qwen3)."""

    def __init__(self, shape: TargetShape, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        size, inner, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(size, inner, bias=bias)
        self.k_proj = nn.Linear(size, kv, bias=bias)
        self.v_proj = nn.Linear(size, kv, bias=bias)
        self.o_proj = nn.Linear(inner, size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.head_dim))

    def queries(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x))), *angles)

    def keys(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.k_norm(self._heads(self.k_proj(x))), *angles)

    def values(self, x: Tensor) -> Tensor:
        return self._heads(self.v_proj(x))


class Block(nn.Module):
    """A Llama-like decoder layer without its input norm, which the head's ``fuse`` applies where it has one.
    intermediate: inner size of its MLP; mlp: a mixture of experts in its place."""

    def __init__(
        self,
        shape: TargetShape,
        intermediate: int = 0,
        bias: bool = False,
        qk_norm: bool = False,
        mlp: Experts | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(shape, bias, qk_norm)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, intermediate, shape.hidden_act) if mlp is None else mlp

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual and MLP: the layer's un-normed output [n, H]."""
        x = residual + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))

    @torch.no_grad()
    def copy_layer(self, layer: dict[str, Tensor]) -> str:
        """Start from the target's last layer (``TargetWeights.last_layer``); all of it or nothing. Returns the log's
        line.

        Both branches start closed: the target's add to a residual stream of another scale than the normed features
        of a head (SmolLM2-135M: rms 26 against 1.9; an EAGLE-1 with open branches starts at a loss of 88, not 2.3).
        """
        own = dict(self.named_parameters())
        if bad := [n for n, p in own.items() if n not in layer or layer[n].shape != p.shape]:
            return f"decoder layer random: the target's last layer does not fit ({', '.join(bad)})"
        for name, parameter in own.items():
            parameter.copy_(layer[name])
            if "o_proj" in name or "down_proj" in name:  # of each expert, too
                parameter.zero_()
        left = sorted(n for n in layer.keys() - own.keys() if n != "input_layernorm.weight")
        without = f" without {', '.join(left)}" if left else ""
        return f"decoder layer = the target's last layer{without}, with o_proj and down_proj zero"


class RecurrentHead(DraftHead):
    """A head of one recursive decoder layer ``block``. A subclass says how its input is made (``fuse``), what its
    output is used as (``outputs``), and what its lm_head is (``lm_head_weight``)."""

    block: Block
    shares_lm_head = True
    instead = "head.kind=eagle3 has an lm_head of its own"  # for a target whose lm_head cannot be shared

    def __init__(self, config: HeadConfig, shape: TargetShape, draft_ids: Tensor | None) -> None:
        super().__init__(config, shape, draft_ids)
        self.rope = Rope(shape)
        self.scale = shape.head_dim**-0.5
        self.register_buffer("embed", None, persistent=False)
        self.register_buffer("target_rows", None, persistent=False)

    # -- what a head defines -----------------------------------------------------------------------------------

    def first_state(self, layers: Tensor, final: Tensor) -> Tensor:
        """The target's features, layers [n, L, H] and final [n, H] -> the state of step 0 [n, H]."""
        return final.to(self.dtype)

    @abstractmethod
    def fuse(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """embedded [n, H], state [n, H] -> what q/k/v read, and the layer's residual [n, H]."""

    @abstractmethod
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's un-normed output [n, H] -> the state of the next step, and what the lm_head reads."""

    def lm_head_weight(self) -> Tensor:
        """[Vd, H]; by default the target's rows, frozen."""
        if self.target_rows is None:
            raise RuntimeError("the target's lm_head is not attached: call attach(target weights) first")
        return self.target_rows

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [n], each fed at RoPE position ``positions`` [n] -> [n, H]."""
        return nn.functional.embedding(tokens, self.embed).to(self.dtype)

    # -- what follows from it ----------------------------------------------------------------------------------

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and size of a key, and of a value."""
        return self.shape.num_kv_heads, self.shape.head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.block.self_attn.o_proj.weight.dtype

    def attach(self, weights: TargetWeights) -> None:
        self.embed = weights.embed.detach()
        if self.shares_lm_head:
            rows = shared_lm_head(weights, self.instead)
            self.target_rows = rows if self.draft_ids is None else rows[self.draft_ids]

    def check_start(self, weights: TargetWeights) -> None:
        if self.shares_lm_head:
            shared_lm_head(weights, self.instead)

    def states(self, batch: Batch, features: Features) -> Tensor:
        """[T, H]: the state of step 0 at every position. Raises ValueError where features are lacking."""
        state = self.first_state(features.layers, features.final)
        if state.shape[0] != len(batch):
            raise ValueError(
                f"final features at {state.shape[0]} of {len(batch)} positions; this head reads all of them: "
                'capture with its own Wants (final="all")'
            )
        return state

    def unroll(self, batch: Batch, state: Tensor, start: Tensor, depth: int, detach: bool = False) -> list[Tensor]:
        """state [T, H] of step 0; start [N]: the supervised positions. Returns for each step s what the lm_head reads,
        [N - s, H], of the first N - s of them. (The last s of them end the last turn: they have no token of depth
        s+1. Rows that end an earlier turn are computed on, to be weighted zero, so that every step is one block.)
        detach: no gradient flows from a step into the one before."""
        attention, rows = self.block.self_attn, start.numel()
        following = torch.cat([batch.ids[1:], batch.ids[:1]])  # the last entry is read by no supervised query
        embedded = self.embedding(following, batch.pos)  # of token i+1 at index i
        angles = self.rope(batch.pos)
        read, residual = self.fuse(embedded, state)
        k0, v0 = attention.keys(read, angles), attention.values(read)
        embedded, read, residual = embedded[start], read[start], residual[start]
        runs, pos = Runs.of(start, batch.cu[batch.doc[start]]), batch.pos[start]
        own, out = [], []
        for s in range(min(depth, rows)):
            n = rows - s
            angles = self.rope(pos[:n] + s)
            if s:  # token i+1+s is the token i+1 of the row s rows on, in every pair that counts
                previous = (state.detach() if detach else state)[:n]
                read, residual = self.fuse(embedded[s:], previous)
                own.append((attention.keys(read, angles), attention.values(read)))
            q = attention.queries(read, angles)
            state, seen = self.outputs(
                self.block.finish(training_time_test(q, k0, v0, own, runs, self.scale), residual)
            )
            out.append(seen)
        return out

    @torch.no_grad()
    def chain_hits(self, batch: Batch, features: Features, depth: int) -> Tensor:
        start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
        hidden = self.unroll(batch, self.states(batch, features), start, depth)
        return text_hits(batch, start, hidden, [self.lm_head_weight()], self.draft_ids, depth)

    def layer_macs(self, batch: Batch, depth: int, through: bool) -> int:
        """Multiply-adds of ``unroll`` and its backward pass, without the lm_head; through: gradients flow from a step
        into the one before."""
        pairs, shape = pair_mask(batch, depth), self.shape
        start = pairs[0].nonzero().squeeze(1)
        keys, deep, later = seen_positions(batch, start), int(pairs.sum()), int(pairs[1:].sum())
        size, inner = shape.hidden_size, shape.num_heads * self.key_shape[1]
        seen = sum(int((batch.pos[p] + 1 + s).sum()) for s, p in enumerate(pairs))  # keys over all queries
        macs = 2 * keys * 2 * size * size  # fuse: its inputs are frozen at step 0; the embedding half once a token
        macs += (3 if through else 2) * later * size * size
        macs += 3 * (keys + later) * self.key_weights()
        macs += 3 * deep * self.row_weights()
        return macs + 6 * seen * inner  # two products forward, four backward

    def key_weights(self) -> int:
        """Matrix entries that one key and its value pass: k and v."""
        return self.block.self_attn.k_proj.weight.numel() + self.block.self_attn.v_proj.weight.numel()

    def mlp_width(self) -> int:
        """Inner size of the MLP that one query passes."""
        mlp = self.block.mlp
        return mlp.width if isinstance(mlp, Experts) else mlp.gate_proj.out_features

    def row_weights(self) -> int:
        """Matrix entries that one query passes: q, o and the MLP, or the experts that it is sent to."""
        block = self.block
        matrices = [block.self_attn.q_proj, block.self_attn.o_proj]
        experts = isinstance(block.mlp, Experts)
        if not experts:
            matrices += [m for m in block.mlp.children() if isinstance(m, nn.Linear)]
        return sum(m.weight.numel() for m in matrices) + (block.mlp.active if experts else 0)

    def kept_values(self, tokens: int, supervised: int, depth: int) -> int:
        heads, width = self.key_shape
        size, inner, kv = self.shape.hidden_size, self.shape.num_heads * width, heads * width
        once = tokens * (7 * size + 4 * kv)  # feature, embedding, both normed and joined, input, keys, values
        row = 9 * size + 3 * inner + 4 * kv + 4 * self.mlp_width()  # one query at one step
        if isinstance(self.block.mlp, Experts):
            row += self.block.mlp.kept
        return once + supervised * depth * (row + 2 * size)  # and its hidden state by teacher row, with gradient

    def session(self, max_length: int) -> Session:
        return RecurrentSession(self, max_length)


def seen_positions(batch: Batch, start: Tensor) -> int:
    """Positions that some query of the supervised positions ``start`` sees: each document up to its last one."""
    last = batch.pos.new_full((batch.cu.numel() - 1,), -1)
    return int((last.scatter_reduce(0, batch.doc[start], batch.pos[start], "amax") + 1).sum())


class RecurrentSession(Session):
    """One key/value buffer: accepted positions first, then this round's nodes in order of creation."""

    SPARE = 256  # nodes of one round that fit without growing

    def __init__(self, head: RecurrentHead, max_length: int) -> None:
        self.head, self.attention = head, head.block.self_attn
        heads, size = head.key_shape
        weight, room = self.attention.o_proj.weight, (1, heads, max_length + self.SPARE, size)
        self.keys, self.values = weight.new_zeros(room), weight.new_zeros(room)
        self.length = 0
        self._forget()

    def _forget(self) -> None:
        self.states: list[Tensor] = []  # each node's state for its children, [1, H]
        self.depths: list[int] = []
        self.parents: list[int] = []

    def _write(self, at: int, read: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        end = at + read.shape[0]
        self.keys[0, :, at:end] = self.attention.keys(read, angles).transpose(0, 1)
        self.values[0, :, at:end] = self.attention.values(read).transpose(0, 1)

    def _run(
        self, read: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor], length: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> states [n, H] and logits [n, Vd] of queries that see the first ``length`` keys under ``mask``."""
        attended = nn.functional.scaled_dot_product_attention(
            self.attention.queries(read, angles).transpose(0, 1).unsqueeze(0),
            self.keys[:, :, :length],
            self.values[:, :, :length],
            attn_mask=mask,
            scale=self.head.scale,
            enable_gqa=True,
        )
        state, seen = self.head.outputs(self.head.block.finish(attended[0].transpose(0, 1), residual))
        weight = self.head.lm_head_weight()
        return state, few_rows.linear(seen.to(weight.dtype), weight).float()

    @torch.no_grad()
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        head, n = self.head, next_tokens.numel()
        if self.length + n > self.keys.shape[2] - self.SPARE:
            raise ValueError(f"session of {self.keys.shape[2] - self.SPARE} positions is full")
        self._forget()
        positions = torch.arange(self.length, self.length + n, device=next_tokens.device)
        read, residual = head.fuse(head.embedding(next_tokens, positions), head.first_state(layers, final))
        cos, sin = head.rope(positions)
        self._write(self.length, read, (cos, sin))
        self.length += n
        last = slice(n - 1, n)  # only the root is drafted from: earlier queries are read by nobody
        self.root, logits = self._run(read[last], residual[last], (cos[last], sin[last]), self.length, None)
        return logits[0]

    @torch.no_grad()
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        head, n, parent_list = self.head, tokens.numel(), parents.tolist()
        first = len(self.parents)
        if self.length + first + n > self.keys.shape[2]:
            raise ValueError(f"more than {self.SPARE} nodes in one round")
        state = torch.cat([self.root if p < 0 else self.states[p] for p in parent_list])
        depths = [1 if p < 0 else self.depths[p] + 1 for p in parent_list]
        # the node at depth s stands s positions after the root's feature (step s of ``unroll``)
        positions = torch.tensor([self.length - 1 + d for d in depths], device=tokens.device)
        read, residual = head.fuse(head.embedding(tokens, positions), state)
        angles = head.rope(positions)
        self._write(self.length + first, read, angles)
        self.parents += parent_list
        self.depths += depths
        states, logits = self._run(
            read,
            residual,
            angles,
            self.length + first + n,
            node_mask(self.parents, self.length, first, self.keys.device),
        )
        self.states += states.split(1)
        return logits
