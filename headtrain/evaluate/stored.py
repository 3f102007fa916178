"""A teacher-forced estimate of tau from stored features: nothing is decoded, so it takes seconds.

Each stored answer is walked round by round as if the target had just written it (see ``replay``). Where the stored
answers are the target's own greedy ones (``headtrain regenerate``) that is what decoding would accept, up to the
store's rounding and the length of the answers; where they are somebody else's, the draft is judged against text that
the target would not write, and tau comes out lower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..data.store import FeatureStore
from ..decode.drafters import HeadDrafter
from ..types import Batch, Features, Row
from .acceptance import route_name
from .progress import progress
from .replay import Matches, replay
from .results import STORED, Evaluation, PromptResult, Side
from .sweep import Sweep

BATCH_TOKENS = 4096


def measure_stored(
    store: FeatureStore,
    drafter: HeadDrafter,
    ks: Sequence[int],
    target: dict[str, Any],
    versions: dict[str, Any],
    *,
    limit: int | None = None,
    quiet: bool = False,
) -> Sweep:
    """One case for each chain length of ``ks``; every assistant turn of the first ``limit`` rows is one result. The
    store must be of the target that the head was trained on, with the features that the head reads (the caller
    compares fingerprints). Raises ValueError for a chain that the head cannot draft."""
    for k in ks:
        drafter.check(k, context=2**31)
    settings = {"tree": "", "temperature": 0.0, "max_new_tokens": 0, "mode": STORED}
    cases = [Evaluation(target, drafter.describe(), {"k": k, **settings}, versions) for k in ks]
    rows = list(range(len(store)))[:limit]
    with progress(len(rows), "replaying stored rows", quiet) as advance:
        for numbers in _runs(rows, store.lengths):
            batch, features = store.batch(numbers)
            right = _right(drafter, batch, features, max(ks))
            for number, begin in zip(numbers, batch.cu.tolist(), strict=False):
                row = store.row(number)
                for turn, first, count in _turns(row):
                    here = right[begin + first - 1 : begin + first - 1 + count]
                    for case in cases:
                        rounds = replay(Matches([case.settings["k"]] * count, here), case.settings["k"], prompt=first)
                        case.results.append(_result(row, turn, first, count, rounds))
                advance()
    return Sweep(target, versions, cases)


def _runs(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    run, tokens = [], 0
    for row in rows:
        if run and tokens + lengths[row] > BATCH_TOKENS:
            yield run
            run, tokens = [], 0
        run.append(row)
        tokens += lengths[row]
    if run:
        yield run


def _right(drafter: HeadDrafter, batch: Batch, features: Features, k: int) -> list[int]:
    """For each position, how many drafts from it are right, from the first on."""
    device = drafter.head.device
    hits = drafter.head.chain_hits(batch.to(device), features.to(device, torch.float32), k)
    return hits.long().cumprod(0).sum(0).tolist()


def _turns(row: Row) -> Iterator[tuple[int, int, int]]:
    """(turn, its first token, its tokens); a turn that begins the row has no position that could draft it."""
    for turn in dict.fromkeys(t for t in row.turn if t):
        first = row.turn.index(turn)
        if first:
            yield turn, first, row.turn.count(turn)


def _result(row: Row, turn: int, first: int, count: int, rounds: list) -> PromptResult:
    side = Side(count, "stored", 0.0, 0.0, 0.0, 0.0)
    return PromptResult(f"{row.source}#{turn}", route_name(row.route), first, side, side, rounds)
