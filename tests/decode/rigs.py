"""Heads on a tiny random Llama, random or overfitted to the target's own greedy text."""

from __future__ import annotations

import tiny
import torch

from headtrain.heads.catalog import build_head, parse_head
from headtrain.target.model import Target
from headtrain.types import Batch, Row

PROMPT = [5, 17, 230, 41, 8, 99, 312, 7, 77]


def tiny_target(seed: int = 0, **changes) -> Target:
    """Untied and with large weights: its greedy text keeps changing instead of repeating one token."""
    lively = {"tie_word_embeddings": False, "num_hidden_layers": 4, "initializer_range": 0.2}
    return Target.of(tiny.model(seed, **{**lively, **changes}))


def reference_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's greedy text by whole forwards without a cache."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, target.model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def head_for(target: Target, kind: str, seed: int = 1, draft_ids: list[int] | None = None, **more):
    """A head with every parameter random (all-zero blocks would hide faults)."""
    torch.manual_seed(seed)
    size = None if draft_ids is None else len(draft_ids)
    reduced = {} if size is None else {"draft_vocab_size": size}
    config = parse_head({"kind": kind, **reduced, **more})
    head = build_head(config, target.shape, None if size is None else torch.tensor(sorted(draft_ids)))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.1)
    head.attach(target.weights())
    return head.requires_grad_(True)


def overfit(target: Target, head, text: list[int], steps: int = 30) -> None:
    """Train on one text until most of it is accepted."""
    head.init_from_target(target.weights())
    batch = Batch.pack([Row(text, [1] * len(text))])
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.trainable().values(), lr=5e-3, weight_decay=0.0)
    for _ in range(steps):
        sums = head.loss(batch, features, target.teacher(), head.wants().depth)
        (sums.total / sums.count).backward()
        optimizer.step()
        optimizer.zero_grad()
