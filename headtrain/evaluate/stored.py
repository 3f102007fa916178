"""A teacher-forced estimate of tau from stored features: nothing is decoded, so it takes seconds.

Each stored answer is walked round by round as if the target had just written it (see ``replay``). Where the stored
answers are the target's own greedy ones (``headtrain regenerate``) that is what decoding would accept, up to the
store's rounding and the length of the answers; where they are somebody else's, the draft is judged against text that
the target would not write, and tau comes out lower. How much of the text is the target's own is therefore measured
too, and so is the simulated tau of the same rows, which is what training prints: there every position begins a chain,
and a draft is right where the target itself would say it (``LossSums.simulated``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..data.store import FeatureStore
from ..decode.drafters import HeadDrafter
from ..shift import final_positions, pair_mask
from ..teacher import Teacher
from ..types import Batch, Features, Row
from .acceptance import route_name
from .progress import progress
from .replay import Matches, replay
from .results import STORED, Evaluation, PromptResult, Side
from .sweep import Simulated, Sweep

BATCH_TOKENS = 4096


def measure_stored(
    store: FeatureStore,
    drafter: HeadDrafter,
    teacher: Teacher,
    ks: Sequence[int],
    target: dict[str, Any],
    versions: dict[str, Any],
    *,
    limit: int | None = None,
    quiet: bool = False,
) -> Sweep:
    """One case for each chain length of ``ks``; every assistant turn of the first ``limit`` rows is one result. The
    store must be of the target that the head was trained on, with the features that the head reads (the caller
    compares fingerprints), and ``teacher`` that target's. Raises ValueError for a chain that the head cannot draft."""
    for k in ks:
        drafter.check(k, context=2**31)
    settings = {"tree": "", "temperature": 0.0, "max_new_tokens": 0, "mode": STORED}
    cases = [Evaluation(target, drafter.describe(), {"k": k, **settings}, versions) for k in ks]
    rows = list(range(len(store)))[:limit]
    simulated = _Simulation(drafter, teacher)
    with progress(len(rows), "replaying stored rows", quiet) as advance:
        for numbers in _runs(rows, store.lengths):
            batch, features = store.batch(numbers)
            batch, features = batch.to(drafter.head.device), features.to(drafter.head.device, torch.float32)
            right = drafter.head.chain_hits(batch, features, max(ks)).long().cumprod(0).sum(0).tolist()
            simulated.add(batch, features)
            for number, begin in zip(numbers, batch.cu.tolist(), strict=False):
                row = store.row(number)
                for turn, first, count in _turns(row):
                    here = right[begin + first - 1 : begin + first - 1 + count]
                    for case in cases:
                        rounds = replay(Matches([case.settings["k"]] * count, here), case.settings["k"], prompt=first)
                        case.results.append(_result(row, turn, first, count, rounds))
                advance()
    return Sweep(target, versions, cases, simulated=simulated.result())


class _Simulation:
    """What training measures, summed over batches, and how much of the text is the target's own."""

    def __init__(self, drafter: HeadDrafter, teacher: Teacher) -> None:
        self.head, self.teacher = drafter.head, teacher
        self.depth = self.head.wants().depth
        self.sums, self.own, self.all = None, 0, 0

    @torch.no_grad()
    def add(self, batch: Batch, features: Features) -> None:
        if pair_mask(batch, 1).any():  # a frozen head has no zero to give
            sums = self.head.loss(batch, features, self.teacher, self.depth).detached()
            self.sums = sums if self.sums is None else self.sums + sums
        answers = final_positions(batch)
        kept = torch.isin(features.final_at, answers)
        greedy = features.argmax if features.argmax is not None else self.teacher.summary(features.final)[0]
        self.own += int((greedy[kept] == batch.ids[answers + 1]).sum())
        self.all += answers.numel()

    def result(self) -> Simulated | None:
        if self.sums is None or not self.all:
            return None
        tau, alpha, _ = self.sums.simulated()
        return Simulated(tau, alpha, own=self.own / self.all)


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


def _turns(row: Row) -> Iterator[tuple[int, int, int]]:
    """(turn, its first token, its tokens); a turn that begins the row has no position that could draft it."""
    for turn in dict.fromkeys(t for t in row.turn if t):
        first = row.turn.index(turn)
        if first:
            yield turn, first, row.turn.count(turn)


def _result(row: Row, turn: int, first: int, count: int, rounds: list) -> PromptResult:
    side = Side(count, "stored", 0.0, 0.0, 0.0, 0.0)
    return PromptResult(f"{row.source}#{turn}", route_name(row.route), first, side, side, rounds)
