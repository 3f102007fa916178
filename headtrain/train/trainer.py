"""The one training loop, to be read from top to bottom.

An optimizer step is ``accumulation`` micro-batches over all ranks, whatever their number. Micro-batch g of the run
(g = (step - 1) * accumulation + j) is a function of the seed alone, and so is the state of the random generators
while it is computed: the number of ranks and interruptions change nothing. The gradient is the sum of the losses over
the global number of supervised positions.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import yaml

from ..config import Recipe, RecipeError, check_depths, digest
from ..heads.base import DraftHead
from ..heads.io import head_metadata
from ..metadata import Metadata, TargetIdentity, TrainingPart
from ..teacher import Teacher
from ..types import Batch, Features, Row
from . import checkpoint
from .backend import Backend
from .checkpoint import Progress as Counters
from .console import TrainConsole
from .induction import fit_induction
from .joint import Joint
from .metrics import MetricsFile, flatten, report, scalars, unflatten, zeros
from .nodes import keeps, same_everywhere, spread
from .optim import lr_factor
from .plan import check_accumulation, depth_at, micro_seed, total_steps
from .watch import ALONE, Watch


class Source(Protocol):
    """What the trainer reads; ``data.loader.Loader`` is one. ``batches(start, stop)`` yields this rank's micro-batches
    (every g with g % ranks == rank) by their global number, always the same for the same g; it ends where ``halted()``
    while the next one has to be waited for."""

    @property
    def micro_batches_per_epoch(self) -> int: ...

    def batches(
        self, start: int = 0, stop: int | None = None, halted: Callable[[], bool] = ...
    ) -> Iterator[tuple[Batch, Features]]: ...


@dataclass
class Setup:
    """What a run trains: a head (target tensors attached), its teacher, and where micro-batches come from. joint: the
    head with the target that is trained, too; the features of the sources are not read then.
    max_length: the longest training row; data_sha256: of the rows and their features."""

    head: DraftHead
    teacher: Teacher
    identity: TargetIdentity
    train: Source
    held_out: Source | None
    data_sha256: str
    max_length: int
    joint: Joint | None = None


@dataclass
class TrainResult:
    """best: the best checkpoint by simulated tau on held-out rows (None without any); last: the newest. evaluation:
    the last evaluation's numbers. stopped: the signal that ended the run early, or None."""

    step: int
    total: int
    last: Path
    best: Path | None
    best_tau: float
    bad_steps: int
    evaluation: dict[str, Any] | None
    stopped: str | None


class TrainError(RuntimeError):
    """A run that cannot go on."""


def train(recipe: Recipe, setup: Setup, backend: Backend, fresh: bool = False, watch: Watch = ALONE) -> TrainResult:
    """Train ``setup.head`` in place; resumes the run folder's last checkpoint unless ``fresh`` (an old run is then
    moved to ``previous-N``). Raises RecipeError, CheckpointError, TrainError."""
    settings, head, teacher, joint = recipe.train, setup.head, setup.teacher, setup.joint
    if setup.train.micro_batches_per_epoch < 1:
        raise RecipeError("data.train: no rows to train on")
    total = total_steps(settings, setup.train.micro_batches_per_epoch)
    full = head.wants().depth
    check_depths(settings.depth_schedule, full)

    # --- resume or start
    run = recipe.output_dir
    root, curve = run / "checkpoints", MetricsFile(run / "metrics.jsonl")
    target = setup.identity.model_dump(include={"weights", "tokenizer", "chat_template", "shape"}, mode="json")
    origin = checkpoint.made_from(recipe, head, setup.data_sha256, backend.precision, target)
    keeper = keeps(run, watch) if watch.world == backend.world else backend.main
    if differs := same_everywhere("what the run is made from", digest(origin), watch):
        raise TrainError(f"{differs}: give every node the same recipe, data, target and versions")
    if keeper:
        if fresh:
            set_aside(run)
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.clean(root)
    backend.wait()
    spread(run, keeper, backend.device, watch)
    counters, state, torn = Counters(), {}, 0
    found = list(checkpoint.steps(root).values())
    if found:
        state, counters = checkpoint.resume(found[-1], head, origin, joint)
    check_accumulation(recipe, backend.world, resumes=bool(found))
    if backend.main:
        torn = curve.truncate(counters.step)
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    started: list[str] = []
    if settings.init == "induction" and settings.warm_start is None and not found:
        watch.at("fitting the start")
        begun = time.monotonic()
        started = fit_induction(head, setup.train, settings.batch_tokens, setup.max_length, backend)
        counters.seconds = time.monotonic() - begun
    backend.prepare(joint or head)
    # labels as a bf16 target computes them: a head that trains no lm_head would spend most of a step on an fp32 one
    teacher = teacher.to(backend.device, torch.bfloat16 if backend.precision == "bf16" else None)
    optimizer = backend.optimizer(head, settings, joint.adapter.named() if joint else None)
    optimizer.load_state(state)
    if settings.trackers:
        backend.start_trackers(recipe.name, origin)

    saved = counters.step if found else None  # the step of the newest checkpoint, which is this run's

    def save() -> Path:
        """Write a checkpoint (rank 0), unless the newest is of this step; all ranks wait for it."""
        nonlocal saved
        if saved != counters.step:
            state = optimizer.state(keep=backend.main)
            with backend.whole():
                if backend.main:
                    checkpoint.save(root, head, metadata(), state, counters, origin, joint)
            saved = counters.step
        if backend.main:
            checkpoint.prune(root, settings.keep, counters.best_step)
        backend.wait()
        return root / checkpoint.name_of(saved)

    def metadata() -> Metadata:
        training = TrainingPart(
            recipe_sha256=digest(origin),
            data_sha256=setup.data_sha256,
            tokens=counters.tokens,
            steps=counters.step,
            seed=settings.seed,
            max_length=setup.max_length,
            versions=versions(),
        )
        found = head_metadata(head, joint.adapter.identity() if joint else setup.identity, training=training)
        found.head.depth = head.trained_depth(max((s.depth for s in settings.depth_schedule), default=full))
        return found

    stop, evaluation, empty = StopSignal(watch), None, 0
    window = unflatten(torch.tensor(counters.window, dtype=torch.float64)) if counters.window else zeros(full)
    began, before = time.monotonic(), counters.seconds
    began_at = counters.step
    first, end = began_at * settings.accumulation, total * settings.accumulation
    stream = setup.train.batches(first, end, halted=lambda: stop.requested or watch.told)
    depths = [depth_at(settings.depth_schedule, step, total, full) for step in range(1, total + 1)]
    with stop, closing(stream), TrainConsole(depths, counters.step, counters.packed, quiet=not backend.main) as console:
        for line in started:
            console.say(f"init: {line}")
        if found:
            console.say(f"resuming from {found[-1]}: step {counters.step} of {total}")
        if idle := -settings.accumulation % backend.world:
            console.say(
                f"train.accumulation: {settings.accumulation} micro-batches over {backend.world} ranks: {idle} of them "
                "wait through a micro-batch of each step; a number of ranks that divides it wastes nothing"
            )
        if torn:
            console.say(f"{curve.path}: {torn} lines could not be read and were left out; the training needs none")
        while counters.step < total and not stop.agreed:
            step = counters.step + 1
            watch.at(f"step {step}")
            depth = depths[step - 1]
            console.begins(step)
            if joint:
                joint.at(step, total)

            # --- gradient of one optimizer step: this rank's share of its micro-batches
            sums, packed, short = zeros(full, backend.device), 0, False
            numbers = range((step - 1) * settings.accumulation, step * settings.accumulation)
            mine = [g for g in numbers if g % backend.world == backend.rank]
            slots = math.ceil(settings.accumulation / backend.world)  # as many on all ranks: they exchange in each
            for slot, g in enumerate([*mine, *[None] * (slots - len(mine))], start=1):
                # alone, finishing the micro-batch at hand is enough; ranks stop together, after the exchange below
                if stop.requested and backend.world == 1:
                    stop.agreed = True
                    break
                item = nothing(head) if g is None else next(stream, None)
                if item is None:  # told to stop while waiting for features
                    short = True
                    if backend.world == 1:
                        stop.agreed = True
                        break
                    item = nothing(head)  # the others wait for this rank's part of the exchange
                batch, features = item
                console.cost_of(partial(head.flops, batch))
                micro = batch.to(backend.device), features.to(backend.device)
                seed = micro_seed(settings.seed, numbers.stop if g is None else g)
                sums = sums + backend.backward(micro, teacher, depth, seed, slot == slots)
                packed += 0 if g is None else len(batch)
            if stop.agreed:
                break  # the part of a gradient that is there is dropped; the resumed run makes it again

            # --- one exchange of numbers between ranks: loss sums, tokens, and whether anyone was told to stop
            more = torch.tensor([packed, float(stop.requested), float(short)], dtype=torch.float64)
            everyone = backend.sum(torch.cat([flatten(sums, full), more]))
            sums, packed, short = unflatten(everyone[:-3]), int(everyone[-3]), bool(everyone[-1])
            stop.agreed = short or bool(everyone[-2])
            if short:
                optimizer.zero_grad()
                break  # as above

            # --- update, or skip a step whose loss or gradient is not finite
            norm = backend.normalise(float(sums.count), settings.clip)
            factor = lr_factor(step, total, settings.schedule, settings.warmup, settings.decay, settings.min_lr)
            good = math.isfinite(norm) and math.isfinite(float(sums.total))
            if good:
                optimizer.step(factor)
            optimizer.zero_grad()
            counters.count(good, packed, int(sums.count), before + time.monotonic() - began)
            if good:
                window = window + sums
            else:
                console.say(f"step {step}: loss sum {float(sums.total):g}, gradient norm {norm:g}: update skipped")
                if counters.bad_row >= settings.max_bad_steps:
                    raise TrainError(too_many_bad(counters, root))
            empty = 0 if sums.count else empty + 1
            if empty >= min(settings.max_bad_steps, total - began_at):
                raise TrainError(nothing_supervised(empty, head))
            console.advance(step)

            # --- log, evaluate, save
            if step % settings.log_every == 0 or step == total:
                line = {"step": step, "kind": "train", "depth": depth, "lr": settings.lr * factor, "grad_norm": norm}
                line |= {"bad_steps": counters.bad, "tokens": counters.tokens} | report(window)
                line |= {"tokens_per_second": console.line(step, counters.packed, line), "seconds": counters.seconds}
                write(backend, curve, line)
                window = zeros(full)
            counters.window = flatten(window, full).tolist()
            with console.paused():
                if setup.held_out is not None and (step % settings.eval_every == 0 or step == total):
                    evaluation = evaluate(backend, setup.held_out, teacher, full)
                    write(backend, curve, {"step": step, "kind": "eval"} | evaluation)
                    console.say(f"step {step}: held-out {summary(evaluation)}")
                    if evaluation["tau"] > counters.best_tau:
                        counters.best_step, counters.best_tau = step, evaluation["tau"]
                if step % settings.save_every == 0 or step in (total, counters.best_step):
                    save()

        last = save()
        if counters.step < total:
            console.say(f"{stop.name}: saved {last}; run the same command again to resume at step {counters.step}")
    if settings.trackers:
        backend.finish()
    best = root / checkpoint.name_of(counters.best_step) if counters.best_step else None
    evaluation = evaluation or next((x for x in reversed(curve.read()) if x["kind"] == "eval"), None)
    stopped = stop.name if counters.step < total else None
    return TrainResult(counters.step, total, last, best, counters.best_tau, counters.bad, evaluation, stopped)


def nothing(head: DraftHead) -> tuple[Batch, Features]:
    """A micro-batch that supervises nothing, of features that the head could read."""
    batch, wants, hidden = Batch.pack([Row([0] * 8, [0] * 8)]), head.wants(), head.shape.hidden_size
    at = torch.arange(len(batch) if wants.final == "all" else 0)
    summary = (at, torch.zeros(len(at))) if wants.summary else (None, None)
    layers = torch.zeros(len(batch), len(wants.layers), hidden)
    return batch, Features(layers, at, torch.zeros(len(at), hidden), *summary)


def evaluate(backend: Backend, source: Source, teacher: Teacher, depth: int) -> dict[str, Any]:
    """``metrics.report`` over one pass of ``source`` at ``depth``; every rank takes its share, all get the same."""
    sums = zeros(depth, backend.device)
    with backend.whole(), closing(source.batches(0, source.micro_batches_per_epoch)) as stream:
        for batch, features in stream:
            sums = sums + backend.evaluate((batch.to(backend.device), features.to(backend.device)), teacher, depth)
    return report(unflatten(backend.sum(flatten(sums, depth))))


def write(backend: Backend, curve: MetricsFile, line: dict[str, Any]) -> None:
    """One line of numbers to metrics.jsonl and the trackers."""
    if backend.main:
        curve.append(line)
    numbers = {name: value for name, value in line.items() if name not in ("step", "kind")}
    backend.log(scalars(numbers, line["kind"]), line["step"])


def summary(numbers: dict[str, Any]) -> str:
    alpha = " ".join("-" if a is None else f"{a:.2f}" for a in numbers["alpha"])
    return f"loss {numbers['loss']:.3f} simulated tau {numbers['tau']:.3f} alpha {alpha}"


def set_aside(run: Path) -> None:
    """Move an old run's checkpoints and curve into ``previous-N``; nothing that was trained is deleted."""
    old = [p for p in (run / "metrics.jsonl", run / "checkpoints", run / "recipe.yaml") if p.exists()]
    if old:
        aside = next(p for n in count(1) if not (p := run / f"previous-{n}").exists())
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)


def too_many_bad(counters: Counters, root: Path) -> str:
    kept = list(checkpoint.steps(root).values())
    return (
        f"stopped at step {counters.step}: {counters.bad_row} steps in a row had a non-finite loss or gradient "
        f"({counters.bad} of {counters.step} in all). Last good checkpoint: {kept[-1] if kept else 'none yet'}. "
        "A lower train.lr, a longer train.warmup or train.precision=fp32 is the usual cure; bad features show at the "
        "same steps again"
    )


def nothing_supervised(steps: int, head: DraftHead) -> str:
    reasons = "the rows' answers are too short for their loss mask to leave anything"
    if head.draft_ids is not None:
        size = head.draft_vocab_size
        reasons += (
            f", or the target chooses none of the {size:,} tokens of the draft vocabulary (head.draft_vocab_size)"
        )
    return (
        f"{steps} steps in a row supervised no position, so nothing is learned: {reasons}. `headtrain inspect RECIPE` "
        "shows what is supervised"
    )


def versions() -> dict[str, str]:
    names = ("headtrain", "torch", "transformers", "accelerate", "safetensors")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


class StopSignal:
    """SIGTERM and SIGINT as a request to save and stop; a second SIGINT ends the process as usual, a second SIGTERM
    does not: a scheduler and a launcher may each send one. ``requested``: this rank was told; ``agreed``: all ranks
    stop. The watch hears of it even while the main thread is in an exchange, where no handler runs."""

    def __init__(self, watch: Watch = ALONE) -> None:
        self.requested = self.agreed = False
        self._watch = watch
        self.name = "a signal to another rank"
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._caught) for number in (signal.SIGTERM, signal.SIGINT)}
            self._watch.listen(set(self._old))
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            self._watch.listen(set())
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._old[number])
