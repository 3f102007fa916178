"""Filling a store: shard after shard, by any number of processes at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..types import Batch, Row, Wants
from .manifest import Manifest
from .meter import Meter
from .store_writer import StoreWriter
from .workers import Workers


def runs(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows of at most ``batch_tokens`` tokens for one forward; a longer row goes alone."""
    run: list[Row] = []
    used = 0
    for row in rows:
        if run and used + len(row) > batch_tokens:
            yield run
            run, used = [], 0
        run.append(row)
        used += len(row)
    if run:
        yield run


def tokens_of(plan: Manifest, lengths: Sequence[int], shards: Iterable[int]) -> int:
    return sum(sum(lengths[plan.shards[n] : plan.shards[n + 1]]) for n in shards)


def fill(
    writer: StoreWriter,
    workers: Workers,
    rows: Sequence[Row],
    target: Any,
    wants: Wants,
    batch_tokens: int,
    meter: Meter,
) -> None:
    """Return when every shard of the store is complete, whoever captured it."""
    lengths, mine = [len(row) for row in rows], set[int]()
    before, others, shards = writer.complete(), meter.others, len(writer.manifest.shards) - 1
    while True:
        complete = writer.complete()
        meter.advance(0, others + tokens_of(writer.manifest, lengths, complete - before - mine))
        if len(complete) == shards:
            break
        number = workers.take(n for n in range(shards) if n not in complete)
        if number is None:
            time.sleep(writer.storage.poll)
        elif capture_shard(writer, workers, number, rows, target, wants, batch_tokens, meter):
            mine.add(number)
    writer.check_manifest()  # where a storage cannot create exclusively, another capture's may have come later
    for number in workers.claimed():  # of processes that died between a record and the end of their claim
        workers.forget(number)


def capture_shard(
    writer: StoreWriter,
    workers: Workers,
    number: int,
    rows: Sequence[Row],
    target: Any,
    wants: Wants,
    batch_tokens: int,
    meter: Meter,
) -> bool:
    """Capture a shard that this process has claimed, and release it; False: another process completed it. Forwards
    never cross a shard, so that whoever captures it runs the very same ones."""
    try:
        if number in writer.complete():
            return False
        first, end = writer.manifest.shards[number : number + 2]
        shard = writer.shard(number, rows[first:end])
        for run in runs(rows[first:end], batch_tokens):
            shard.add(target.features(Batch.pack(run), wants))
            meter.advance(sum(map(len, run)))
        writer.check_manifest()
        if not workers.mine(number):  # this process stood still for so long that it was given up
            return False
        shard.close()
        return True
    finally:
        workers.release(number)
