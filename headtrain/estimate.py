"""What a recipe will cost, before it runs: parameters, memory, disk for features, tokens, steps, arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from .capture import Rows, plan_rows
from .config import Recipe, check_depths
from .data.manifest import human
from .data.quantize import bytes_per_token
from .data.sources import files_below
from .export import forecast
from .heads.base import DraftHead
from .heads.catalog import outline, parse_head
from .losses import chunk_values
from .shift import pair_mask
from .target.load import load_shape, load_tokenizer, locate
from .types import Batch, Row, TargetShape, Wants

CHARACTERS_PER_TOKEN = 4.0  # English text in the usual vocabularies
UNKNOWN_TOKENS = 1_000_000  # sizes are given for so many where the data is not at hand
USUAL_SUPERVISED = 0.6  # share of a conversation's tokens that assistants wrote, where it was not counted
# Rates that time is given for: two cores in fp32 (measured), and a third of an H100's dense bf16 peak of 989 TFLOP/s.
RATES = {"0.2 TFLOP/s (two CPU cores)": 0.2e12, "330 TFLOP/s (a third of an H100's peak)": 330e12}


@dataclass
class Estimate:
    """Sizes in bytes. ``tokens`` and ``rows`` are counted where ``counted``; else estimated from the files' size, or
    (``tokens_known`` false) stand for one million tokens. given: ``tokens`` are the caller's. dropped: rows left
    out of each split, by reason, where counted. engines: lines on which will load the head. absent: what of data.train
    is not on this machine. target_here: the sizes are those of a local copy, not of ``target.expect``. head_flops: of
    the whole training; target_flops: of the target's forwards (and backwards, where it is trained), without its
    attention scores (None where its parameters are not known). head_shapes: of the trained tensors. batch_tokens and
    accumulation: the recipe's, of a step."""

    shape: TargetShape
    wants: Wants
    engines: list[str]
    rows: int
    tokens: int
    supervised: int
    counted: bool
    tokens_known: bool
    given: bool
    dropped: dict[str, dict[str, int]]
    absent: list[str]
    target_here: bool
    head_shapes: list[tuple[int, ...]]
    target_bytes: int | None
    training_bytes: dict[str, int]
    feature_bytes: int
    steps: int
    batch_tokens: int
    accumulation: int
    epochs: float
    target_resident: bool
    target_split: str  # "" or how, for the line on memory
    head_flops: float
    target_flops: float | None

    def lines(self, alone: bool = True) -> list[str]:
        """alone: with the memory and the time of one process, which is not what many have."""
        how = "counted" if self.counted else "from the files' size"
        layers = ", ".join(map(str, self.wants.layers)) or "none"
        lines = [
            f"target      {self.shape.architecture}, H {self.shape.hidden_size:,}, {self.shape.num_layers} layers, "
            f"V {self.shape.vocab_size:,}"
            + (f"; weights {human(self.target_bytes)}" if self.target_bytes is not None else "")
            + ("" if self.target_here else "; as target.expect says, for target.path is no folder here"),
            f"head        {self.head_parameters / 1e6:,.1f} M trained parameters, drafts {self.wants.depth} deep, "
            f"reads hidden_states {layers} and the final feature at {self.wants.final} positions",
            *self.engines,
            f"data        {self.tokens:,} tokens as given, {self.supervised:,} supervised (the usual share)"
            if self.given
            else f"data        {self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} supervised ({how})"
            if self.tokens_known
            else f"data        not at hand ({', '.join(self.absent)}): the sizes below are for each "
            f"{UNKNOWN_TOKENS:,} tokens",
            *self._left_out(),
            f"features    {human(self.feature_bytes)} on disk, {human(self.feature_bytes / (self.tokens or 1))} a token"
            if self.feature_bytes
            else "features    none on disk: computed while training",
            f"steps       {self.steps:,} optimizer steps of {self.tokens_a_step:,} tokens (train.batch_tokens="
            f"{self.batch_tokens} x train.accumulation={self.accumulation}), {self._epochs} epochs"
            + ("" if self.tokens_known else f" (for each {UNKNOWN_TOKENS:,} tokens)"),
            *self._too_little(),
            f"memory      {human(sum(self.training_bytes.values()))} for training in one process"
            + (f", and the target's own weights beside it{self.target_split}" if self.target_resident else "")
            + "; of it "
            + ", ".join(f"{name} {human(size)}" for name, size in self.training_bytes.items()),
            f"arithmetic  {scaled(self.head_flops)}FLOP for the head, "
            + (f"{scaled(self.target_flops)}FLOP" if self.target_flops is not None else "an unknown number")
            + " for the target"
            + (
                ": " + ", ".join(f"{duration(self.flops / rate)} at {name}" for name, rate in RATES.items())
                if alone
                else ""
            )
            + ("" if self.tokens_known else f" (for each {UNKNOWN_TOKENS:,} tokens)"),
        ]
        return lines if alone else [line for line in lines if not line.startswith("memory ")]

    @property
    def _epochs(self) -> str:
        return f"{self.epochs:,.0f}" if self.epochs >= 100 else f"{self.epochs:.2g}"

    def _too_little(self) -> list[str]:
        if not self.tokens_known or self.tokens_a_step <= self.tokens:
            return []
        return [
            f"warning     one optimizer step takes {self.tokens_a_step:,} tokens, and the data has {self.tokens:,}: "
            "rows come more than once in one step. Take more data, fewer GPUs, or a smaller train.batch_tokens or "
            "train.accumulation"
        ]

    def _left_out(self) -> list[str]:
        if not self.counted:
            return ["left out    not known: that takes the rows and the target's tokenizer, as local files"]
        return [
            f"left out    {sum(reasons.values()):,} rows of data.{split}: "
            + ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=lambda x: -x[1]))
            for split, reasons in self.dropped.items()
            if reasons
        ] or ["left out    no row"]

    @property
    def head_parameters(self) -> int:
        return sum(map(math.prod, self.head_shapes))

    @property
    def tokens_a_step(self) -> int:
        return self.batch_tokens * self.accumulation

    @property
    def flops(self) -> float:
        return self.head_flops + (self.target_flops or 0.0)


def scaled(value: float) -> str:
    """1.5e13 as ``15 T``."""
    for unit in ("M", "G", "T", "P", "E"):
        value /= 1e6 if unit == "M" else 1e3
        if value < 1000 or unit == "E":
            break
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    for unit, size in (("days", 172800), ("h", 7200), ("min", 120)):
        if seconds >= size:
            return f"{seconds / (size / 2):,.3g} {unit}"
    return f"{seconds:.3g} s"


def plan_lines(recipe: Recipe, plan: Estimate | None = None, alone: bool = True) -> list[str]:
    """What ``--dry-run`` prints: the estimate (``plan``, if it was made already; ``alone``: see ``Estimate.lines``),
    and the recipe with every default."""
    resolved = recipe.model_dump(mode="json") | {"head": parse_head(recipe.head).model_dump(mode="json")}
    return [*(plan or estimate(recipe)).lines(alone), "", yaml.safe_dump(resolved, sort_keys=False).rstrip()]


def estimate(recipe: Recipe, given: int | None = None) -> Estimate:
    """Uses the real config, tokenizer and data where they are on this machine; the recipe's ``target.expect`` and the
    files' sizes elsewhere. given: tokens of the data, which is then not looked at. Nothing is fetched and no weights
    are loaded. Raises RecipeError, TargetError, DataError."""
    shape = load_shape(recipe.target)
    config = parse_head(recipe.head)
    head = outline(config, shape)
    wants = head.wants()
    check_depths(recipe.train.depth_schedule, wants.depth)
    rows, tokens, supervised, dropped, absent = _data(recipe, given)
    train = recipe.train
    per_step = train.batch_tokens * train.accumulation
    steps = train.steps or max(1, round(train.epochs * tokens / per_step))
    features = 0
    if recipe.features.mode != "online":
        share = supervised / max(tokens, 1)
        stored = recipe.features.widen(wants, shape.num_layers)
        per_token = bytes_per_token(shape.hidden_size, len(stored.layers), recipe.features.dtype, stored.final, share)
        features = round(min(tokens * per_token, (recipe.features.keep_gb or math.inf) * 1e9))
    return Estimate(
        shape=shape,
        wants=wants,
        engines=forecast.lines(head),
        rows=rows,
        tokens=tokens,
        supervised=supervised,
        counted=dropped is not None,
        tokens_known=not absent,
        given=given is not None,
        dropped=dropped or {},
        absent=absent,
        target_here=locate(recipe.target).local,
        head_shapes=[tuple(p.shape) for p in head.trainable().values()],
        target_bytes=_target_bytes(recipe),
        training_bytes=_training_bytes(recipe, head, shape, supervised / max(tokens, 1)),
        feature_bytes=features,
        steps=steps,
        batch_tokens=train.batch_tokens,
        accumulation=train.accumulation,
        epochs=steps * per_step / max(tokens, 1),
        target_resident=recipe.features.mode == "online",
        target_split=_target_split(recipe),
        head_flops=steps * train.accumulation * _batch_flops(recipe, head, rows, tokens, supervised),
        target_flops=_target_flops(recipe, tokens, steps * per_step),
    )


def _batch_flops(recipe: Recipe, head: DraftHead, rows: int, tokens: int, supervised: int) -> float:
    """Of one micro-batch: rows as long as these are on average, the last part of each supervised, over the stages of
    the depth schedule."""
    train = recipe.train
    length = min(recipe.data.max_length, round(tokens / rows) if rows else recipe.data.max_length, train.batch_tokens)
    answer = min(length, round(length * supervised / max(tokens, 1)))
    row = Row([0] * length, [0] * (length - answer) + [1] * answer)
    batch = Batch.pack([row] * max(1, train.batch_tokens // length))
    scale = train.batch_tokens / len(batch)
    stages = [(s.fraction, s.depth) for s in train.depth_schedule] or [(1.0, head.wants().depth)]
    return scale * sum(fraction * head.flops(batch, depth) for fraction, depth in stages)


def _target_flops(recipe: Recipe, tokens: int, trained: int) -> float | None:
    """Two for each parameter and token of a forward: of the data once where features are stored, of all that is trained
    on else. Trained jointly, as many again for the gradient of the activations (the weights are frozen, the adapter is
    small), and for the forward without the adapter where the base loss compares with it; in the first stage neither."""
    expected = recipe.target.expect
    active = expected and (expected.active_parameters or expected.parameters)
    if not active:
        return None
    forward = 2.0 * active * (tokens if recipe.features.mode == "offline" else trained)
    joint = recipe.train.joint
    if joint is None:
        return forward
    return forward * (1 + (1 - joint.heads_first) * (1 if joint.base_loss == "ce" else 2))


def _target_bytes(recipe: Recipe) -> int | None:
    expected = recipe.target.expect
    if expected is None or expected.parameters is None:
        return None
    width = {"float32": 4}.get(recipe.target.dtype, 2)
    return expected.parameters * width


def _target_split(recipe: Recipe) -> str:
    section = recipe.target
    if section.shard == "none":
        return ""
    ranks = f"{section.group} ranks" if section.group else "the ranks of a node"
    return f" (layers split over {ranks}, {section.shard})"


def _training_bytes(recipe: Recipe, head: DraftHead, shape: TargetShape, share: float) -> dict[str, int]:
    """fp32 masters, gradients and optimizer state; what autograd keeps; the target's embedding and lm_head."""
    train = recipe.train
    parameters = sum(p.numel() for p in head.trainable().values())
    values = head.kept_values(train.batch_tokens, round(train.batch_tokens * share), head.wants().depth)
    width = 4 if train.precision == "fp32" else 2
    matrices = (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size
    return {
        "parameters": 4 * parameters,
        "gradients and their buffers": 8 * parameters,  # the loss forms lm_head's beside the one it is added to
        "optimizer": 8 * parameters,
        "activations": width * values + 4 * chunk_values(head.wants().depth, head.draft_vocab_size),
        "the target's embedding and lm_head": width * matrices + width * head.draft_vocab_size * shape.hidden_size,
    }


def _data(recipe: Recipe, given: int | None) -> tuple[int, int, int, dict[str, dict[str, int]] | None, list[str]]:
    """rows, tokens, supervised, dropped (None: not counted), and what of the training data is not on this machine."""
    if given is not None:
        return 0, given, round(USUAL_SUPERVISED * given), None, []
    specs = recipe.data.train
    remote = [spec for spec in specs if spec.startswith("hub:")]
    if not remote and locate(recipe.target).local:
        splits = plan_rows(recipe, load_tokenizer(recipe.target))
        planned, dropped = splits["train"], {name: split.dropped for name, split in splits.items()}
        return len(planned), planned.tokens, _supervised(planned), dropped, []
    found = {spec: _files(spec) for spec in specs if spec not in remote}
    if absent := [*remote, *(f"no file {spec}" for spec, paths in found.items() if not paths)]:
        return 0, UNKNOWN_TOKENS, round(USUAL_SUPERVISED * UNKNOWN_TOKENS), None, absent
    paths = [path for files in found.values() for path in files]
    lines = sum(p.read_bytes().count(b"\n") for p in paths if p.suffix == ".jsonl")
    tokens = round(sum(p.stat().st_size for p in paths) / CHARACTERS_PER_TOKEN)
    return lines, tokens, round(USUAL_SUPERVISED * tokens), None, []


def _files(spec: str) -> list[Path]:
    path = Path(spec)
    if path.is_dir():
        return files_below(path, (".json", ".jsonl", ".parquet"))
    if path.is_file():
        return [path]
    return sorted(Path().glob(spec)) if not path.is_absolute() else sorted(Path("/").glob(spec.lstrip("/")))


def _supervised(rows: Rows) -> int:
    """Positions that drafting can start from."""
    return sum(int(pair_mask(Batch.pack(rows.rows[i : i + 256]), 1)[0].sum()) for i in range(0, len(rows.rows), 256))
