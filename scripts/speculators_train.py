"""Train speculators' own EAGLE-3 on a feature store of this project: the yardstick that ours is measured against.

It needs an environment of its own, where nothing of speculators is replaced:

    python3 -m venv .venv-spec && .venv-spec/bin/pip install 'speculators==0.9.*'
    .venv-spec/bin/pip uninstall -y torchvision torchaudio
    .venv-spec/bin/python scripts/speculators_train.py runs/features/train --eval runs/features/eval \\
        --target targets/smollm2-135m-instruct --minutes 15 --threads 2 --out runs/speculators
    headtrain import runs/speculators --target targets/smollm2-135m-instruct --out runs/speculators-head
    headtrain eval runs/speculators-head --prompts data/heldout --k 5

From speculators come the configuration with its defaults, the draft model and its start, shifts, packing, loss,
metrics, optimizers and the form on disk. Written here are three things: the reader of the store; the loop, since
their Trainer moves the model to a CUDA device; and the schedule, which is theirs as a function of the share of
--minutes or --steps that is used. Hidden states are read as float32, with their autocast to bf16 where --precision asks
for it (a CPU without bf16 instructions is several times slower with it). The attention is SDPA: their default, flex
attention, has no backward on a CPU, and neither have their fused losses (Triton), so the losses are their eager ones.

Minutes count training only: reading rows and packing them, but neither loading nor the measurement at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from headtrain import vocab  # noqa: E402
from headtrain.data.store import FeatureStore, StoreError  # noqa: E402
from headtrain.heads.eagle3 import default_layers  # noqa: E402
from headtrain.heads.io import DRAFT_IDS, FILE, read_tensors  # noqa: E402
from headtrain.metadata import MetadataError  # noqa: E402
from headtrain.shift import pair_mask  # noqa: E402
from headtrain.types import Wants  # noqa: E402

try:
    import loguru
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig
    from speculators.train.data import BaseDataset, CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from speculators.train.utils import normalize_counted_metrics
except ImportError as error:
    sys.exit(f"{error}: use the python of an environment that holds speculators 0.9 (first lines of this file)")

from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

SHAPES = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}
UNITS = 10_000  # the schedule's resolution: they count steps, whose number is not known when minutes are given
SHOWN = 30.0  # seconds between lines of progress


class UsageError(Exception):
    """Something that the caller gave; the message says what was expected."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="feature store of the training rows, written by headtrain capture")
    parser.add_argument("--eval", type=Path, required=True, help="feature store of the held-out rows")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder in transformers' form")
    parser.add_argument("--out", type=Path, required=True, help="folder to write: config.json, model.safetensors")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="wall-clock of training; the schedule ends with it")
    budget.add_argument("--steps", type=int, help="optimizer steps instead, to compare settings on a busy machine")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="muon (their default): Muon for "
                        "matrices, AdamW for norms")  # fmt: skip
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW, and of Muon unless --muon-lr (default 1e-3)")
    parser.add_argument("--muon-lr", type=float, help="default: --lr, as theirs")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW (default 0.01, as theirs)")
    parser.add_argument("--schedule", choices=[*SHAPES, "none"], default="linear", help="default linear, as theirs")
    parser.add_argument("--warmup", type=float, default=0.01, help="share of the budget (default 0.01, as theirs)")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="their total_seq_len: rows are packed into, and "
                        "padded to, so many (default 1024; theirs 8192: a dense mask of 8192 x 24576)")  # fmt: skip
    parser.add_argument("--ttt-steps", type=int, default=3, help="default 3, as theirs")
    parser.add_argument("--ttt-decay", type=float, default=1.0, help="weight of step s is this^s (default 1, theirs)")
    parser.add_argument("--loss", default="kl_div", help="kl_div (default), rkl, jsd, ce, tv, nla, lk_hybrid, or JSON "
                        "with weights as speculators reads it")  # fmt: skip
    parser.add_argument("--layers", type=int, nargs=3, help="hidden_states that the draft reads, of those in the store "
                        "(default 2, n//2, n-3)")  # fmt: skip
    parser.add_argument("--vocab-size", type=int, default=6144, help="draft vocabulary (default 6144): the tokens most "
                        "often drafted in the training rows; the target's size or more: all")  # fmt: skip
    parser.add_argument("--vocab-from", type=Path, help="take the draft vocabulary of this headtrain checkpoint, or "
                        "count in this store instead of the training rows")  # fmt: skip
    parser.add_argument("--train-lm-head", action="store_true", help="NOT speculators': it keeps the draft's lm_head "
                        "at the target's rows, frozen. Trained from there, with the norms' optimizer")  # fmt: skip
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: under autocast, as their "
                        "trainer does; for CPUs with AMX or AVX512_BF16 (default fp32)")  # fmt: skip
    parser.add_argument("--muon-precision", choices=["bf16", "fp32"], default="bf16", help="of Muon's Newton-Schulz "
                        "iteration. fp32 is NOT theirs: in their favour, on a CPU without bf16 instructions, where "
                        "theirs (PyTorch's, always bf16) takes longer than the rest of a step")  # fmt: skip
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch (default 2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="any other "
                        "field of speculators' TrainConfig (norm_before_residual=false, muon_momentum=0.9); "
                        "repeat for several")  # fmt: skip
    args = parser.parse_args()
    for name, value in vars(args).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and value <= 0 and name not in ("warmup", "weight_decay", "seed"):
            parser.error(f"--{name.replace('_', '-')} {value}: expected more than 0")
    if not 0 <= args.warmup < 1:
        parser.error(f"--warmup {args.warmup}: expected a share of the budget, 0 to 1")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out} exists and is not an empty folder: name another one")
    if not (args.target / "config.json").is_file():
        parser.error(f"--target {args.target}: no config.json there; expected what `headtrain convert` writes")
    return args


# -- the store as speculators' data -----------------------------------------------------------------------------


class StoreDataset(BaseDataset):
    """Rows of a feature store in speculators' form.

    verifier_last_hidden_states is what the target's final norm reads, and speculators applies that norm itself; a
    store holds what the norm gave, for supervised positions. Divided by the norm's gain that has root mean square 1,
    so that their norm gives it back (to 0.1 %, which its eps takes). Elsewhere it is zero, and masked: loss_mask is 1
    at a token that the target answered with where the token after it is in the same answer. (Theirs has the last
    token of an answer too; what comes after that nobody drafts, and it is not stored.)
    """

    def __init__(self, store: FeatureStore, gain: Tensor, max_len: int) -> None:
        self.store, self.gain = store, gain
        super().__init__(max_len, torch.float32)

    def __len__(self) -> int:
        return len(self.store)

    def _compute_approx_lengths(self) -> list[int]:
        return self.store.lengths

    def _get_raw_data(self, index: int) -> dict[str, Tensor]:
        batch, features = self.store.batch([index])
        before_norm = torch.zeros(len(batch.ids), self.gain.numel())
        before_norm[features.final_at] = features.final.float() / self.gain
        mask = torch.zeros(len(batch.ids), dtype=torch.bool)
        mask[1:] = pair_mask(batch, 1)[0][:-1]
        return {
            "hidden_states": features.layers.flatten(1).float(),
            "input_ids": batch.ids,
            "verifier_last_hidden_states": before_norm,
            "loss_mask": mask,
        }


def loader(dataset: StoreDataset, args: argparse.Namespace) -> DataLoader:
    """Their packing and padding: batches of exactly --batch-tokens positions."""
    sampler = MultipackDistributedBatchSamplerV2(args.batch_tokens, dataset.approx_lengths, 1, 0, seed=args.seed)
    store = dataset.store
    collate = CollateFn(
        args.batch_tokens,
        store.manifest.hidden_size,
        len(store.wants.layers),
        dtype=torch.float32,
        preprocess=shift_batch,
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


def endless(data: DataLoader) -> Iterator[dict[str, Any]]:
    epoch = 0
    while True:
        data.batch_sampler.set_epoch(epoch)
        yield from data
        epoch += 1


def draft_ids(args: argparse.Namespace, train: FeatureStore) -> Tensor | None:
    """[Vd] sorted target ids, or None for the whole vocabulary."""
    source = args.vocab_from
    if source is not None and (source / FILE).is_file():
        found = read_tensors(source / FILE).get(DRAFT_IDS)
        if found is None:
            raise UsageError(f"--vocab-from {source}: this head drafts from the whole vocabulary; leave it out")
        return found.long()
    if source is not None and not (source / "manifest.json").is_file():
        raise UsageError(f"--vocab-from {source}: neither a checkpoint ({FILE}) nor a feature store (manifest.json)")
    store = train if source is None else FeatureStore(source)
    everything = store.manifest.target.shape["vocab_size"]
    if args.vocab_size >= everything:
        return None
    return vocab.choose(vocab.count_tokens([store.row(i) for i in range(len(store))], everything), args.vocab_size)


# -- speculators' model and settings ----------------------------------------------------------------------------


def settings(args: argparse.Namespace, layers: list[int]) -> argparse.Namespace:
    """speculators' own flat settings, defaults included. Raises UsageError for a name that it does not have."""
    flat: dict[str, Any] = {
        "verifier_name_or_path": str(args.target),
        "target_layer_ids": layers,
        "full_attention_indices": [0],  # their window of 2048 is wider than any row here
        "draft_attn_impl": "sdpa",  # eager takes 1.3 times as long
        "total_seq_len": args.batch_tokens,
        "hidden_states_dtype": "float32",
        "loss_implementation": "eager",
        "loss_fn": args.loss,
        "ttt_steps": args.ttt_steps,
        "ttt_step_loss_decay": args.ttt_decay,
        "optimizer": args.optimizer,
        "lr": args.lr,
        "muon_lr": args.muon_lr,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
    }
    known = TrainConfig().flatten()
    for text in args.settings:
        key, sign, value = text.partition("=")
        if not sign or key not in known:
            raise UsageError(f"--set {text}: expected KEY=VALUE with a field of speculators' TrainConfig")
        if key in flat:
            raise UsageError(f"--set {text}: this script sets {key} itself; see --help for its option")
        try:
            flat[key] = json.loads(value)
        except ValueError:
            flat[key] = value
    try:
        return argparse.Namespace(**TrainConfig.from_flat(flat).flatten())
    except ValueError as error:
        raise UsageError(f"speculators refuses these settings: {error}") from None


def build(own: argparse.Namespace, ids: Tensor | None, vocab_size: int) -> SpeculatorModel:
    maps = None, None
    if ids is not None:
        to_draft = torch.zeros(vocab_size, dtype=torch.bool)
        to_draft[ids] = True
        maps = to_draft, vocab.offsets(ids)
    size = vocab_size if ids is None else ids.numel()
    try:
        model = build_draft_model(own, SpeculatorModel.registry["eagle3"], *maps, size).float()
    except (ValueError, OSError) as error:
        raise UsageError(f"speculators cannot build its model for {own.verifier_name_or_path}: {error}") from None
    if bad := [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]:
        raise UsageError(f"speculators left {', '.join(bad)} unset: {own.verifier_name_or_path} lacks tensors for it")
    return model


def optimizers(model: nn.Module, own: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Theirs; each group remembers its rate as ``initial_lr``."""
    names = set(TrainerConfig._fields) & set(vars(own))
    chosen = {name: getattr(own, name) for name in names} | {"num_epochs": own.epochs}
    found = build_optimizers(model, TrainerConfig(**chosen))
    for group in (g for optimizer in found for g in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return found


def schedule(shape: str, warmup: float) -> Callable[[float], float]:
    """Their schedule's factor as a function of the share of the budget that is used, 0 to 1."""
    if shape == "none":
        return lambda share: 1.0
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    by_unit = SHAPES[shape](unused, round(warmup * UNITS), UNITS).lr_lambdas[0]
    return lambda share: by_unit(share * UNITS)


# -- training and measuring -------------------------------------------------------------------------------------

PARTS = ("data", "forward", "backward", "clip", "optimizer")  # of a step, timed apart


@contextmanager
def in_fp32() -> Iterator[None]:
    """``torch.optim.Muon`` asks for ``grad.bfloat16()``, a copy that it then changes."""
    theirs, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, lambda self: self.to(torch.float32, copy=True)
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = theirs


def train(model: SpeculatorModel, data: DataLoader, args: argparse.Namespace, own: argparse.Namespace) -> dict:
    """Their train_epoch's steps, on the CPU, until the budget is spent; returns the record of the run."""
    call, _ = type(model).get_trainer_kwargs(**vars(own))
    model.train()
    steppers, factor_at = optimizers(model, own), schedule(args.schedule, args.warmup)
    spent, step, tokens, supervised, shown = dict.fromkeys(PARTS, 0.0), 0, 0, 0, 0.0
    batches, begin, clock = endless(data), time.perf_counter(), time.perf_counter

    def share() -> float:
        return step / args.steps if args.steps else (clock() - begin) / (60 * args.minutes)

    while (used := share()) < 1:
        at = [clock()]
        factor = factor_at(used)
        for group in (g for optimizer in steppers for g in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * factor
        batch = next(batches)
        at.append(clock())
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            _, loss, metrics = model(**batch, **call)
        at.append(clock())
        for optimizer in steppers:
            optimizer.zero_grad()
        loss.backward()
        at.append(clock())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        at.append(clock())
        with in_fp32() if args.muon_precision == "fp32" else nullcontext():
            for optimizer in steppers:
                optimizer.step()
        at.append(clock())
        for name, (start, end) in zip(PARTS, pairwise(at), strict=True):
            spent[name] += end - start
        if not bool(loss.isfinite()):
            raise UsageError(f"the loss is {float(loss)} at step {step}: lower --lr")
        step, tokens = step + 1, tokens + int((batch["document_ids"] >= 0).sum())
        supervised += int(batch["loss_mask"].sum())
        if (elapsed := clock() - begin) - shown >= SHOWN or share() >= 1:
            shown, done = elapsed, share()
            found = readable(metrics)
            print(
                f"step {step}  loss {found['loss']:.3f}  accepted {accepted(found):.3f}  "
                f"{tokens / elapsed:,.0f} tokens/s  lr {own.lr * factor:.2e}  "
                f"left {max(0.0, elapsed * (1 / done - 1)):.0f} s",
                flush=True,
            )
    seconds = clock() - begin
    return {"steps": step, "tokens": tokens, "supervised": supervised, "seconds": seconds, "spent": spent}


def readable(metrics: dict[str, Tensor]) -> dict[str, float]:
    return normalize_counted_metrics({name: float(value) for name, value in metrics.items()})


def accepted(found: dict[str, float]) -> float:
    """1 + the share of positions where the first 1, 2, .. drafts all equal the target's choice: what a round gives
    where the text goes as stored. (full_acc_k counts prefixes: their metric carries on what was wrong before.)"""
    return 1.0 + sum(value for name, value in found.items() if name.startswith("full_acc_"))


@torch.no_grad()
def measure(model: SpeculatorModel, data: DataLoader, own: argparse.Namespace) -> dict[str, float]:
    """Their metrics over all held-out batches; losses are means over batches, accuracies over positions."""
    _, call = type(model).get_trainer_kwargs(**vars(own))
    model.eval()
    sums: dict[str, Tensor] = {}
    for batch in data:
        for name, value in model(**batch, **call)[2].items():
            sums[name] = sums.get(name, 0.0) + value.double()
    return readable(sums)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    logging.getLogger("speculators").setLevel(logging.WARNING)
    loguru.logger.disable("speculators")
    warnings.filterwarnings("ignore", module="speculators")
    disable_progress_bar()
    layers = tuple(args.layers or default_layers(FeatureStore(args.train).manifest.target.shape["num_layers"]))
    rows, held_out = (FeatureStore(folder, wants=Wants(layers=layers)) for folder in (args.train, args.eval))
    manifest = rows.manifest
    if manifest.target.differences(held_out.manifest.target):
        raise UsageError(f"{args.train} and {args.eval} hold features of another target")
    ids, own = draft_ids(args, rows), settings(args, list(layers))
    set_seed(own.seed)
    model = build(own, ids, manifest.target.shape["vocab_size"])
    if model.hidden_size != manifest.hidden_size:
        raise UsageError(f"--target has hidden size {model.hidden_size}, the store {manifest.hidden_size}")
    if args.train_lm_head:
        model.lm_head.weight.requires_grad_(True)
    gain = model.verifier_norm.weight.detach().clone()
    if not bool(gain.all()):
        raise UsageError("the target's final norm has gains of zero: what it read cannot be had from a store")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    switches = {name: getattr(own, name) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}
    print(
        f"speculators {version('speculators')}, torch {torch.__version__}, {args.threads} threads: {len(rows)} rows, "
        f"{manifest.tokens:,} tokens; {trained / 1e6:.2f} M trained parameters, draft vocabulary "
        f"{model.draft_vocab_size:,}, {json.dumps(switches)}",
        flush=True,
    )
    record = train(model, loader(StoreDataset(rows, gain, args.batch_tokens), args), args, own)
    total = sum(record["spent"].values())
    print(
        f"trained {record['steps']} steps, {record['tokens']:,} tokens in {record['seconds']:.0f} s: "
        + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in record["spent"].items()),
        flush=True,
    )
    found = measure(model, loader(StoreDataset(held_out, gain, args.batch_tokens), args), own)
    print("held-out: " + "  ".join(f"{name} {value:.4f}" for name, value in sorted(found.items())))
    print(f"held-out: accepted {accepted(found):.4f} tokens a round by {args.ttt_steps} drafts, teacher-forced")
    model.save_pretrained(args.out)
    record |= {"arguments": {name: str(value) for name, value in vars(args).items()}, "held_out": found}
    record["speculators"] = version("speculators")
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {args.out}; next: headtrain import {args.out} --target {args.target} --out {args.out}-head")


def main() -> int:
    args = arguments()
    try:
        run(args)
    except (UsageError, StoreError, MetadataError) as error:
        print(f"speculators_train: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
