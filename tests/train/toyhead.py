"""A head of a few parameters and an in-memory source, for tests of the trainer alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from headtrain.config import Recipe
from headtrain.data.loader import Loader
from headtrain.heads.base import DraftHead, HeadConfig
from headtrain.metadata import TargetIdentity
from headtrain.shift import final_positions, pair_mask
from headtrain.teacher import Teacher
from headtrain.train.backend import Backend
from headtrain.train.trainer import Setup
from headtrain.types import Batch, Features, LossSums, Row, TargetShape, Wants

H, V = 16, 48
SHAPE = TargetShape(
    architecture="Toy", model_type="toy", hidden_size=H, intermediate_size=8, num_layers=4, num_heads=2,
    num_kv_heads=2, head_dim=8, vocab_size=V,
)  # fmt: skip


class ToyConfig(HeadConfig):
    kind: str = "toy"
    depth: int = 3
    noise: float = 0.0
    spoil: int = -1  # batches that hold this token give a non-finite loss


class Toy(DraftHead):
    """One residual matrix and one vector a depth on the final feature; a depth that is not trained gets no gradient."""

    Config = ToyConfig

    def __init__(self, config: ToyConfig, shape: TargetShape = SHAPE, draft_ids=None) -> None:
        super().__init__(config, shape, draft_ids)
        g = torch.Generator().manual_seed(1)
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(H, H, generator=g) * 0.3) for _ in range(config.depth))
        self.norm = nn.ParameterList(nn.Parameter(torch.ones(H)) for _ in range(config.depth))
        self.lm_head = nn.Parameter(torch.randn(V, H, generator=g) * 0.3)

    def wants(self) -> Wants:
        return Wants(layers=(1,), depth=self.config.depth, summary=True)

    def loss(self, batch: Batch, features: Features, teacher: Teacher, depth: int) -> LossSums:
        full = torch.zeros(len(batch), H, device=batch.ids.device)
        full[features.final_at] = features.final.float()
        mask = pair_mask(batch, depth)
        total, sums, chain = torch.zeros(()), {n: [] for n in LossSums.PER_DEPTH}, mask[0]
        for k in range(depth):
            at = mask[k].nonzero().squeeze(1)
            x = full[at]
            if self.config.noise:
                x = x + self.config.noise * torch.rand_like(x)
            logits = (x * self.norm[k] + x @ self.mix[k].T) @ self.lm_head.T
            want = batch.ids[at + 1 + k + 1] if len(at) else at
            loss = nn.functional.cross_entropy(logits, want, reduction="sum")
            if self.config.spoil >= 0 and bool((batch.ids == self.config.spoil).any()):
                loss = loss * float("nan")
            total = total + 0.8**k * loss
            hit = torch.zeros(len(batch), dtype=torch.bool)
            hit[at] = logits.argmax(-1) == want
            live = chain & mask[k]
            n = torch.tensor(float(len(at)))
            values = (loss.detach(), n, hit.sum(), hit.sum(), n, (hit & live).sum(), live.sum())
            for name, value in zip(LossSums.PER_DEPTH, values, strict=True):
                sums[name].append(value.float())
            chain = hit & live
        return LossSums(total, mask[0].sum().float(), **{n: torch.stack(v) for n, v in sums.items()})


Toy.__abstractmethods__ = frozenset()  # it never drafts, attaches or exports


class Memory:
    """Rows with features that are a function of the row."""

    def __init__(self, rows) -> None:
        self.rows, self.lengths = rows, [len(r) for r in rows]

    def batch(self, indices):
        batch = Batch.pack([self.rows[i] for i in indices])
        table = torch.randn(V, H, generator=torch.Generator().manual_seed(5))
        at = final_positions(batch)
        final = table[batch.ids[at]] + 0.01 * batch.pos[at, None]
        return batch, Features(table[batch.ids][:, None], at, final, batch.ids[at] % V, torch.zeros(len(at)))


def rows(count: int = 24, seed: int = 0) -> list[Row]:
    g = torch.Generator().manual_seed(seed)
    lengths = [12 + (7 * i) % 25 for i in range(count)]
    ids = [torch.randint(3, V, (n,), generator=g).tolist() for n in lengths]
    return [Row(x, [0] * 4 + [1] * (len(x) - 4), source=f"toy:{i}") for i, x in enumerate(ids)]


def recipe(output: Path, head: dict | None = None, **train) -> Recipe:
    settings = dict(steps=10, batch_tokens=64, accumulation=2, lr=0.05, warmup=2, log_every=2, save_every=5)
    return Recipe(
        name="toy",
        target={"path": "none"},
        data={"train": ["none"]},
        head={"kind": "toy", **(head or {})},
        train={**settings, "eval_every": 5, "precision": "fp32", **train},
        output=str(output),
    )


def setup(of: Recipe, backend: Backend, held_out: bool = True, data=None) -> Setup:
    identity = TargetIdentity(
        name="toy", shape=vars(SHAPE), dtype="float32", weights={"embed": "a"}, tokenizer="b", chat_template="c"
    )
    where = dict(rank=backend.rank, ranks=backend.world)
    train = Loader(Memory(data or rows()), of.train.batch_tokens, of.train.seed, **where)
    held = Loader(Memory(rows(7, seed=9)), of.train.batch_tokens, **where) if held_out else None
    teacher = Teacher(torch.randn(V, H, generator=torch.Generator().manual_seed(2)))
    return Setup(Toy(ToyConfig(**of.head)), teacher, identity, train, held, "rows-digest", 64)
