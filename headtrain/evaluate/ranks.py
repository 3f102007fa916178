"""How often the head's r-th best token is the right one, by depth: what a static tree is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..decode.drafters import HeadDrafter
from ..target.model import Target
from ..types import Batch, Row
from .progress import progress


@torch.no_grad()
def rank_accuracy(
    target: Target,
    drafter: HeadDrafter,
    rows: Sequence[Row],
    *,
    depths: int,
    ranks: int = 10,
    positions: int = 1000,
    quiet: bool = False,
) -> tuple[Tensor, int]:
    """[depths, ranks]: P(the token of that rank is right at that depth | all shallower ones are right), over the
    answers in ``rows``, and the number of positions that were looked at (at most about ``positions``).

    The shallower tokens are taken from the text. Use rows that are not the prompts to be measured: a tree that was
    chosen on them would look better than it is. Raises ValueError where the rows hold no such position.
    """
    found = torch.zeros(depths, ranks, dtype=torch.float64)
    seen = torch.zeros(depths, dtype=torch.float64)
    ids = drafter.head.draft_ids
    everywhere = replace(drafter.head.wants(), final="all", summary=False)
    with progress(len(rows), "rank accuracies", quiet) as advance:
        for row in rows:
            advance()
            if seen[0] >= positions:
                continue
            batch = Batch.pack([row]).to(target.device)
            features = target.features(batch, everywhere)
            session = drafter.head.session(len(row))
            text = batch.ids
            for i in range(len(row) - 1):
                logits = session.extend(text[i + 1 : i + 2], features.layers[i : i + 1], features.final[i : i + 1])
                turn = row.turn[i + 1]
                if not turn:
                    continue
                for depth in range(depths):
                    at = i + 2 + depth
                    if at >= len(row) or row.turn[at] != turn:
                        break
                    if depth:
                        logits = session.expand(torch.tensor([depth - 2]), text[at - 1 : at])[0]
                    best = logits.topk(min(ranks, logits.numel())).indices
                    hit = ((best if ids is None else ids[best]) == text[at]).nonzero()
                    seen[depth] += 1
                    if hit.numel():
                        found[depth, int(hit[0])] += 1
    if not seen.all():
        raise ValueError(f"no answer of {depths + 1} tokens among {len(rows)} rows to measure rank accuracies on")
    return (found / seen[:, None]).float(), int(seen[0])
