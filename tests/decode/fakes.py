"""Targets and drafters made of tables, with every distribution known."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from headtrain.decode.drafters import SessionDrafter
from headtrain.decode.verify import sample, warp
from headtrain.types import Proposal


class MarkovTarget:
    """The next token's logits are table[token before last, last]; ``first`` always follows token 0 at the start."""

    def __init__(self, vocab: int, seed: int = 0, first: int | None = None, context: int = 10_000) -> None:
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.rows = [list(rows) for rows in self.table]  # plain lists: faster to look up
        self.first = first
        self.shape = SimpleNamespace(vocab_size=vocab, max_positions=context)
        self.eos_ids, self.device = (), torch.device("cpu")
        self.forwards = 0

    def new_cache(self) -> list[int]:
        return []

    def keep(self, cache: list[int], length: int, rows) -> None:
        cache[length:] = [cache[length + row] for row in rows]

    def step(self, ids, cache, layers=(), positions=None, mask=None):
        self.forwards += 1
        start = len(cache)
        cache += ids[0].tolist()
        before = [i - 1 for i in range(start, len(cache))]  # the token before each: in a tree its parent
        if mask is None:
            assert len(cache) <= self.shape.max_positions
        else:
            assert int(positions.max()) < self.shape.max_positions
            for row in range(len(mask)):
                above = mask[row, : start + row].nonzero().flatten().tolist()
                assert len(above) == positions[row], "a node sees the prefix and its ancestors, as many as its position"
                before[row] = above[-1] if above else -1
        rows = torch.stack([self.rows[cache[b] if b >= 0 else 0][cache[start + n]] for n, b in enumerate(before)])
        if self.first is not None and start == 0:
            rows[0] = torch.full_like(rows[0], -torch.inf)
            rows[0, self.first] = 0.0
        n = ids.shape[1]
        return rows, torch.zeros(n, 0, 1), torch.zeros(n, 1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.table[text[-2] if len(text) > 1 else 0, text[-1]].argmax()))
        return text[len(prompt) :]


def counting(vocab: int = 40, context: int = 10_000) -> MarkovTarget:
    """A target that counts: after [0] its text is 1, 2, 3 ..."""
    target = MarkovTarget(vocab, context=context)
    target.table = torch.eye(vocab).roll(1, 1).expand(vocab, vocab, vocab)
    target.rows = target.table
    return target


class FixedDrafter:
    """Drafts from a table like the target's; sampled=False: its best token, with q of one (None)."""

    layers, max_k = (), None

    def __init__(self, table: torch.Tensor, sampled: bool = True) -> None:
        self.table, self.sampled = table, sampled

    tree = ""

    def check(self, k: int, context: int) -> None: ...

    def describe(self):
        return {"kind": "fake", "family": "fake", "label": "a fake", "parameters": 0}

    def start(self, prompt, max_length: int) -> None:
        self.text = prompt[:1].tolist()

    def draft(self, next_tokens, layers, final, k, sampling) -> Proposal:
        self.text += next_tokens.tolist()
        text, tokens, rows = list(self.text), [], []
        for _ in range(k):
            logits = self.table[text[-2] if len(text) > 1 else 0, text[-1]]
            if self.sampled and not sampling.greedy:
                rows.append(warp(logits, sampling.temperature, sampling.top_p, sampling.top_k))
                tokens.append(int(sample(rows[-1], sampling.generator)))
            else:
                tokens.append(int(logits.argmax()))
            text.append(tokens[-1])
        return Proposal(torch.tensor(tokens), torch.stack(rows) if rows else None)


class ScriptedDrafter:
    """Knows the text to come; is wrong on purpose at the text positions in ``wrong`` (0: the first new token)."""

    layers, max_k = (), None

    def __init__(self, text: list[int], wrong=(), short: int | None = None) -> None:
        self.text, self.wrong, self.short = text, set(wrong), short
        self.asked: list[int] = []

    tree = ""

    def check(self, k: int, context: int) -> None: ...

    def describe(self):
        return {"kind": "fake", "family": "fake", "label": "a fake", "parameters": 0}

    def start(self, prompt, max_length: int) -> None:
        self.at = 1 - prompt.numel()  # becomes 1 after the prompt's positions: token 0 is prefill's

    def draft(self, next_tokens, layers, final, k, sampling) -> Proposal:
        self.asked.append(k)
        self.at += next_tokens.numel()
        count = k if self.short is None else min(k, self.short)
        tokens = [self.text[i] ^ (i in self.wrong) for i in range(self.at, self.at + count)]
        return Proposal(torch.tensor(tokens, dtype=torch.int64))


class TableDrafter(SessionDrafter):
    """Chains and trees through a session whose logits come from a table like the target's."""

    label = "a table"

    def __init__(self, table: torch.Tensor, plan=None) -> None:
        super().__init__(plan)
        self.table, self.vocab_size = table, table.shape[0]

    def open(self, prompt, max_length: int) -> TableSession:
        return TableSession(self.table, prompt[:1].tolist())

    def describe(self):
        return {"kind": "table", "family": "fake", "label": "a table", "parameters": 0}


class TableSession:
    def __init__(self, table: torch.Tensor, text: list[int]) -> None:
        self.table, self.text = table, text

    def extend(self, next_tokens, layers, final):
        self.text += next_tokens.tolist()
        self.last: list[tuple[int, int]] = []  # each node's (token before, token)
        return self.table[self.text[-2] if len(self.text) > 1 else 0, self.text[-1]]

    def expand(self, parents, tokens):
        above = [self.text[-1] if p < 0 else self.last[p][1] for p in parents.tolist()]
        self.last += zip(above, tokens.tolist(), strict=True)
        return torch.stack([self.table[a, t] for a, t in self.last[-len(above) :]])
