"""A features function built directly on a tiny HF model, and a store written with it."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
import torch
from rich.console import Console

from headtrain.data.store import FeatureStore, Manifest, StoreWriter, plan_shards, row_hash
from headtrain.metadata import TargetIdentity
from headtrain.shift import final_positions
from headtrain.types import Batch, Features, Row, Wants

LAYERS = (2, 4, 5)
fork = multiprocessing.get_context("fork")


def forked(function: Callable, *args, **more):
    """A process that has this one's objects, for closures. Its torch must stay on one thread: OpenMP's others are not
    copied by fork, and the first product that waits for them waits for ever."""

    def run():
        torch.set_num_threads(1)
        function(*args, **more)

    return fork.Process(target=run, daemon=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """On some CPUs a product's last bits depend on the number of threads, and a ``forked`` process has one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class FakeTarget:
    """Document by document through ``output_hidden_states``; nothing of headtrain.target."""

    def __init__(self, seed: int = 0) -> None:
        self.model = tiny.model(seed)

    @torch.no_grad()
    @one_thread()
    def features(self, batch: Batch, wants: Wants) -> Features:
        layers, final, logits = [], [], []
        for a, b in zip(batch.cu[:-1].tolist(), batch.cu[1:].tolist(), strict=True):
            out = self.model(batch.ids[None, a:b], output_hidden_states=True)
            states = [out.hidden_states[i][0] for i in wants.layers]
            layers.append(torch.stack(states, 1) if states else out.logits.new_zeros(b - a, 0, 64))
            final.append(out.hidden_states[-1][0])
            logits.append(out.logits[0])
        at = torch.arange(len(batch)) if wants.final == "all" else final_positions(batch)
        kept = torch.cat(logits)[at].float()
        summary = (kept.argmax(-1), kept.logsumexp(-1)) if wants.summary else (None, None)
        return Features(torch.cat(layers), at, torch.cat(final)[at], *summary)


def identity(**changes) -> TargetIdentity:
    values = dict(
        name="tiny",
        shape={"hidden_size": 64, "vocab_size": 384},
        dtype="float32",
        weights={"embed": "e0", "final_norm": "n0"},
        tokenizer="t0",
        chat_template="c0",
    )
    return TargetIdentity(**{**values, **changes})


def manifest(rows: list[Row], shard_tokens: int = 60, **changes) -> Manifest:
    batch = Batch.pack(rows)
    final = changes.get("final", "supervised")
    values = dict(
        target=identity(),
        layers=list(LAYERS),
        final=final,
        normed="post-norm",
        dtype="float32",
        summary=True,
        rows=len(rows),
        tokens=len(batch),
        finals=len(batch) if final == "all" else len(final_positions(batch)),
        rows_sha256=hashlib.sha256(
            b"".join(row_hash(torch.tensor(r.ids), torch.tensor(r.turn)) for r in rows)
        ).hexdigest(),
        max_length=512,
        shards=plan_shards([len(row) for row in rows], shard_tokens),
    )
    return Manifest(**{**values, **changes})


def wants_of(of: Manifest) -> Wants:
    return Wants(tuple(of.layers), of.final, summary=of.summary)


def write(folder: Path, rows: list[Row], target: FakeTarget, of: Manifest, stop_after: int | None = None) -> None:
    """Capture in the plainest way: one forward a row. ``stop_after``: complete so many shards, then stop."""
    writer = StoreWriter(folder, of)
    for number in writer.todo()[:stop_after]:
        mine = rows[of.shards[number] : of.shards[number + 1]]
        shard = writer.shard(number, mine)
        for row in mine:
            shard.add(target.features(Batch.pack([row]), wants_of(of)))
        shard.close()


def store(folder: Path, rows: list[Row], target: FakeTarget, **changes) -> FeatureStore:
    write(folder, rows, target, manifest(rows, **changes))
    return FeatureStore(folder, rows=rows)


def assert_same_batch(a: Batch, b: Batch) -> None:
    for name in ("ids", "doc", "pos", "turn", "cu"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and torch.equal(x, y), name


def assert_same_features(a: Features, b: Features) -> None:
    for name in ("layers", "final_at", "final", "argmax", "lse"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype and torch.equal(x, y), name


def console() -> Console:
    """What is said is ``file.getvalue()``."""
    return Console(file=io.StringIO(), width=300)


# ---- fixtures (conftest.py shows them to the tests)


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory, target) -> Path:
    """The module's ROWS, all stored as its PLAN says."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, request.module.ROWS, target, request.module.PLAN)
    return folder
