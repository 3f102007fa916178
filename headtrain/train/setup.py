"""From a recipe to what the loop trains: target, rows, features, draft vocabulary, head."""

from __future__ import annotations

import gc
import threading

import torch
from rich.console import Console
from torch import Tensor

from .. import vocab
from ..capture import (
    Rows,
    fill_stores,
    head_wants,
    open_store,
    open_stream,
    plan_rows,
    windows_of,
)
from ..config import Recipe, RecipeError, Url, check_depths
from ..data.chat import rows_digest
from ..data.loader import Loader, OnlineSource
from ..data.store import FeatureStore
from ..data.stream import FeatureStream
from ..heads.base import DraftHead, HeadConfig
from ..heads.catalog import build_head, head_class, parse_head
from ..target.edges import load_edges
from ..target.load import load_target
from ..target.model import Target
from ..types import Batch, Features, TargetShape, TargetWeights, Wants
from . import checkpoint, lora
from .backend import Backend
from .groups import GroupLoader, sharding_of
from .joint import Joint, no_features
from .nodes import keeps
from .plan import check_accumulation
from .trainer import Setup
from .warm import WarmStart, check_warm_start, read_warm_start
from .watch import ALONE, Watch


def prepare_run(recipe: Recipe, backend: Backend, console: Console, watch: Watch = ALONE) -> Setup:
    """Load the target (its teacher is checked on a probe there), render rows, see that features are there, choose the
    draft vocabulary, build and start the head.

    Where features are stored only embedding, norm, lm_head and last layer are loaded; the whole target, too, while
    shards are missing.
    watch: over the ranks of ``backend``. Raises RecipeError, DataError, TargetError, StoreError, CheckpointError.
    """
    if watch.world != backend.world:
        raise ValueError(f"{backend.world} ranks prepare a run, and the watch is over {watch.world}")
    if backend.main:  # before a capture that may take hours; where the run is not on this node, only rank 0 knows of it
        resumes = bool(checkpoint.steps(recipe.output_dir / "checkpoints"))
        check_accumulation(recipe, backend.world, resumes)
    config = parse_head(recipe.head)
    warm = read_warm_start(recipe, config)
    console.print(f"loading the target {recipe.target.path}", markup=False)
    sharding = sharding_of(recipe.target, backend)
    stored = recipe.features.mode != "online"
    if stored:
        target = load_edges(recipe.target, backend.device)
    else:
        target = load_target(recipe.target, backend.device, sharding)
    wants = head_wants(recipe, target.shape, target.weights())  # refused now, not after hours of capture
    check_depths(recipe.train.depth_schedule, wants.depth)
    if warm is not None:
        check_warm_start(warm, config, target.shape, wants, target.identity, console)
    rows = plan_rows(recipe, target.tokenizer)
    for name, split in rows.items():
        for line in split.report:
            console.print(f"{name}: {line}", markup=False)
    sources = _stored(recipe, target, wants, rows, watch, console) if stored else None
    if recipe.train.joint is not None:
        sources = {name: OnlineSource(split.rows, no_features, wants) for name, split in rows.items()}
    elif sources is None:
        sources = _online(recipe, target, wants, rows)
    loaders = {
        name: Loader(
            source,
            recipe.train.batch_tokens,
            recipe.train.seed if name == "train" else 0,
            rank=backend.rank,
            ranks=backend.world,
            device=backend.device,
            windows=windows_of(recipe, source.manifest) if stored and name == "train" else None,
        )
        for name, source in sources.items()
    }
    if sharding is not None:
        loaders = {name: GroupLoader(loader, target, sharding, rows[name].rows) for name, loader in loaders.items()}
        console.print(f"the target is split over {sharding.size} ranks ({sharding.kind}); copies: {sharding.copies}")
    weights, train_rows = target.weights(), rows["train"].rows
    head = make_head(recipe, config, target.shape, weights, rows["train"], console, warm)
    if recipe.train.lora is not None:
        adapted = lora.inject(head, recipe.train.lora, recipe.train.seed)
        console.print(f"LoRA of rank {recipe.train.lora.r} on {len(adapted)} matrices; the rest of the head is frozen")
    joint = None
    if recipe.train.joint is not None:
        joint = Joint(head, target, recipe.train.joint, recipe.train.seed)
        count = sum(p.numel() for p in joint.adapter.parameters())
        layers = len(joint.adapter.layers)
        console.print(f"the target is trained through LoRA: {count / 1e6:.1f} M parameters on {layers} matrices")
    setup = Setup(
        head=head,
        teacher=target.teacher(),
        identity=target.identity,
        train=loaders["train"],
        held_out=loaders.get("eval"),
        data_sha256=rows_digest(train_rows),
        max_length=max(map(len, train_rows)),
        joint=joint,
    )
    if stored:
        del target, weights
        gc.collect()
        if backend.device.type == "cuda":
            torch.cuda.empty_cache()
    parameters = sum(p.numel() for p in head.trainable().values())
    console.print(
        f"{config.kind}: {parameters / 1e6:.1f} M trained parameters, draft vocabulary {head.draft_vocab_size:,}, "
        f"{rows['train'].tokens:,} tokens in {len(train_rows):,} rows, precision {backend.precision} on "
        f"{backend.world} x {backend.device.type}",
        markup=False,
    )
    return setup


# -- features ---------------------------------------------------------------------------------------------------


def _stored(
    recipe: Recipe, target: Target, wants: Wants, rows: dict[str, Rows], watch: Watch, console: Console
) -> dict[str, FeatureStore | FeatureStream]:
    """Open the stores. One process of each storage first captures what is missing (nothing, where all is there); the
    others wait for it, outside of any exchange that could time out. In a stream that is the held-out rows; the
    training rows are captured by others, while training reads."""
    folder, stream = recipe.features_dir, recipe.features.mode == "stream"
    keeper = watch.rank == 0 if isinstance(folder, Url) else keeps(folder, watch)
    watch.at("capturing")
    whole = {name: split for name, split in rows.items() if not (stream and name == "train")}
    if keeper:
        fill_stores(recipe, target, wants, whole, console)
    watch.share("features")
    stores: dict[str, FeatureStore | FeatureStream] = {
        name: open_store(recipe, target, wants, split.rows, name)  # every rank checks what it reads
        for name, split in whole.items()
    }
    if stream:
        stores["train"] = open_stream(recipe, target, wants, rows["train"].rows, watch.rank, console)
    return stores


def _online(recipe: Recipe, target: Target, wants: Wants, rows: dict[str, Rows]) -> dict[str, OnlineSource]:
    """Features computed when asked for, rounded as a store would. Training reads ahead in a thread while evaluation
    asks from another one, and the target's hooks serve one forward at a time: hence the lock."""
    lock = threading.Lock()

    def features(batch: Batch, wants: Wants) -> Features:
        with lock:
            return target.features(batch, wants)

    return {name: OnlineSource(split.rows, features, wants, recipe.features.dtype) for name, split in rows.items()}


# -- the head ---------------------------------------------------------------------------------------------------


def make_head(
    recipe: Recipe,
    config: HeadConfig,
    shape: TargetShape,
    weights: TargetWeights,
    rows: Rows,
    console: Console,
    warm: WarmStart | None = None,
) -> DraftHead:
    """Build, attach and start the head: from ``warm``, from the target, or at random, as the recipe says (for
    ``train.init=induction`` the trainer does the rest). The same recipe gives the same head on every rank and at every
    resume."""
    size = head_class(config.kind).uses_draft_vocab(config, shape)
    if warm is not None and warm.keep:
        draft_ids = warm.draft_ids
    else:
        draft_ids = None if size is None else _choose(rows, shape, size)
    torch.manual_seed(recipe.train.seed)
    head = build_head(config, shape, draft_ids)
    head.attach(weights)
    if warm is not None:
        for line in warm.start(head, weights):
            console.print(line, markup=False)
    else:
        starts = {"target": head.init_from_target, "random": head.init_at_random, "induction": head.init_for_induction}
        try:
            lines = starts[recipe.train.init](weights)
        except ValueError as error:
            raise RecipeError(f"target {recipe.target.path}: {error}") from None
        for line in lines:
            console.print(f"init: {line}", markup=False)
    return head


def _choose(rows: Rows, shape: TargetShape, size: int) -> Tensor:
    try:
        return vocab.choose(vocab.count_tokens(rows.rows, shape.vocab_size), size)
    except ValueError as error:
        raise RecipeError(f"head: {error}") from None
