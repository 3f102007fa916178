"""Decoding by a chain of separate MTP modules (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k (0-based) at position i reads module k-1's state at the same position (k = 0: the target's feature) and the
embedding of token i+1+k, attends causally to its own keys of all positions, stands at RoPE position i, and drafts token
i+2+k. Along the text, token t so enters module k at position t-1-k: each token is one column of modules, in which
module k takes over the state of module k-1 from the column before. Accepted tokens run through whole columns, once; a
guess at depth m enters modules m and deeper, whose positions before the newest it completes. That is how vLLM 0.32
decodes (multi_module_mtp, which runs the last positions once more after each acceptance to the same end).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from .. import few_rows
from .base import Session, node_mask
from .recurrent import Block


class ChainHead(Protocol):
    """What the session needs of its head. chain: the modules, each with ``block``, ``fuse`` and ``outputs``."""

    scale: float
    key_shape: tuple[int, int]

    @property
    def chain(self) -> list: ...
    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]: ...
    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor: ...
    def first_state(self, layers: Tensor, final: Tensor) -> Tensor: ...
    def lm_head_weight(self) -> Tensor: ...


class _Keys:
    """One module's keys and values: its accepted positions, then one place for each node of the round."""

    def __init__(self, block: Block, room: tuple[int, int, int], scale: float) -> None:
        self.attention, self.scale, self.length = block.self_attn, scale, 0
        weight = self.attention.o_proj.weight
        self.keys, self.values = weight.new_zeros(1, *room), weight.new_zeros(1, *room)

    def write(self, at: Tensor, read: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        self.keys[0][:, at] = self.attention.keys(read, angles).transpose(0, 1)
        self.values[0][:, at] = self.attention.values(read).transpose(0, 1)

    def attend(self, read: Tensor, angles: tuple[Tensor, Tensor], seen: int, mask: Tensor | None) -> Tensor:
        """[n, heads, d] of queries that see the first ``seen`` places under ``mask`` [n, seen]."""
        attended = nn.functional.scaled_dot_product_attention(
            self.attention.queries(read, angles).transpose(0, 1).unsqueeze(0),
            self.keys[:, :, :seen],
            self.values[:, :, :seen],
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


class ChainSession(Session):
    """After n accepted positions module k holds those before n-k; ``tails[k]`` is its state at the last of them, which
    the next token takes into module k+1."""

    SPARE = 256  # nodes of one round that fit without growing

    def __init__(self, head: ChainHead, max_length: int) -> None:
        self.head, self.modules, self.max_length = head, head.chain, max_length
        heads, size = head.key_shape
        room = heads, max_length + self.SPARE, size
        self.stores = [_Keys(module.block, room, head.scale) for module in self.modules]
        self.tails: list[Tensor | None] = [None] * len(self.modules)
        self.length = 0
        self._forget()

    def _forget(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.states: list[dict[int, Tensor]] = []  # of each node: module -> its state there, [1, H]

    def _logits(self, seen: Tensor) -> Tensor:
        weight = self.head.lm_head_weight()
        return few_rows.linear(seen.to(weight.dtype), weight).float()

    @torch.no_grad()
    def extend(self, next_tokens: Tensor, layers: Tensor, final: Tensor) -> Tensor:
        n, head = next_tokens.numel(), self.head
        if self.length + n > self.max_length:
            raise ValueError(f"session of {self.max_length} positions is full")
        self._forget()
        self.length += n
        state = head.first_state(layers, final)  # of module k-1 at the positions that are new to module k
        logits = None
        for k, (module, store) in enumerate(zip(self.modules, self.stores, strict=True)):
            first = store.length
            store.length = max(0, self.length - k)
            new = torch.arange(first, store.length, device=next_tokens.device)
            if not new.numel():
                break  # the text is too short for this module and those after it
            tokens = next_tokens[new - (self.length - n) + k]  # token i+1+k at position i
            read, residual = module.fuse(head.embedding(tokens, new), state)
            angles = head.rope(new)
            store.write(new, read, angles)
            if k == len(self.modules) - 1 and k:
                break  # nobody reads the last module's states of accepted positions
            mask = torch.arange(store.length, device=new.device) <= new.unsqueeze(1) if new.numel() > 1 else None
            out, seen = module.outputs(module.block.finish(store.attend(read, angles, store.length, mask), residual))
            if k == 0:
                logits = self._logits(seen[-1:])[0]
            # the last state waits for the next token; the one that waited comes first
            waited, self.tails[k] = self.tails[k], out[-1:]
            state = out[:-1] if waited is None else torch.cat([waited, out[:-1]])
        return logits

    @torch.no_grad()
    def expand(self, parents: Tensor, tokens: Tensor) -> Tensor:
        first, parent_list = len(self.parents), parents.tolist()
        depths = [1 if p < 0 else self.depths[p] + 1 for p in parent_list]
        if max(depths) >= len(self.modules):
            raise ValueError(f"{max(depths) + 1} tokens drafted, but there are {len(self.modules)} modules")
        if first + len(depths) > self.SPARE:
            raise ValueError(f"more than {self.SPARE} nodes in one round")
        self.parents += parent_list
        self.depths += depths
        self.states += [{} for _ in depths]
        logits: list[Tensor | None] = [None] * len(depths)
        for k in range(min(depths), len(self.modules)):
            # a node of depth m stands at position length + m - 1 - k of module k, where there is one
            nodes = [first + j for j, m in enumerate(depths) if m <= k and self.length + m - 1 - k >= 0]
            if not nodes:
                continue
            seen = self._run(k, nodes, tokens[torch.tensor(nodes, device=tokens.device) - first])
            for row, node in enumerate(nodes):
                if self.depths[node] == k:
                    logits[node - first] = seen[row]
        return self._logits(torch.stack(logits))

    def _run(self, k: int, nodes: list[int], tokens: Tensor) -> Tensor:
        """Module k at ``nodes``: stores their keys and states; [n, H], what the lm_head reads."""
        head, module, store, device = self.head, self.modules[k], self.stores[k], tokens.device
        parents = [self.parents[node] for node in nodes]
        state = torch.cat([self.tails[k - 1] if p < 0 else self.states[p][k - 1] for p in parents])
        at = torch.tensor(nodes, device=device)
        positions = torch.tensor([self.length + self.depths[node] - 1 - k for node in nodes], device=device)
        read, residual = module.fuse(head.embedding(tokens, positions), state)
        angles = head.rope(positions)
        store.write(store.length + at, read, angles)
        mask = node_mask(self.parents, store.length, 0, device)
        if mask is not None:  # nodes that this module has no position for are no keys
            mask = mask[at]
            outside = [node for node, m in enumerate(self.depths) if self.length + m - 1 - k < 0]
            mask[:, [store.length + node for node in outside]] = False
        attended = store.attend(read, angles, store.length + len(self.parents), mask)
        out, seen = module.outputs(module.block.finish(attended, residual))
        for row, node in enumerate(nodes):
            self.states[node][k] = out[row : row + 1]
        return seen
