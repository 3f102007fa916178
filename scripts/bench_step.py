"""Time one training step of a draft head: tokens/s, peak memory, share of the machine's matrix-multiply rate.

    python scripts/bench_step.py                                        # SmolLM2-135M's shape, fp32 and bf16
    python scripts/bench_step.py --preset llama-8b --device cuda        # the GPU benchmark
    python scripts/bench_step.py --hidden 1024 --tokens 4096 --depth 3 --supervised 0.8

The rate is measured in the same run, on square fp32 (or bf16) matrices. Only the operations that a step cannot avoid
are counted (see the head's ``flops``). For a head with a plain reference in tests/ the reference is timed too, and
losses and gradients must agree to 1e-4.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as headtrain.train does
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from headtrain.heads.catalog import HEADS, build_head, parse_head  # noqa: E402
from headtrain.shift import final_positions  # noqa: E402
from headtrain.teacher import Teacher  # noqa: E402
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights  # noqa: E402

PRESETS = {
    "smollm2": dict(
        hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, draft_vocab=8192,
        tokens=2048, row=2048, depth=7, supervised=0.5,
    ),
    "llama-8b": dict(
        hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, draft_vocab=32000,
        tokens=8192, row=2048, depth=7, supervised=0.5,
    ),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=list(HEADS), default="eagle3")
    parser.add_argument("--preset", choices=list(PRESETS), default="smollm2")
    for name, value in PRESETS["smollm2"].items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), help=f"default: the preset's ({value})")
    parser.add_argument("--turns", type=int, default=2, help="assistant turns in a row, equally long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], help="default: both; bf16 alone on CUDA")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps after one warm-up; the median is printed")
    parser.add_argument("--no-reference", action="store_true", help="skip the plain reference")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.precision is None:
        args.precision = ["fp32", "bf16"] if args.device == "cpu" else ["bf16"]
    return args


def rows(args) -> list[Row]:
    """Rows of ``row`` tokens in which prompt and answer alternate ``turns`` times, ``supervised`` of it answers."""
    g = torch.Generator().manual_seed(0)
    out = []
    for begin in range(0, args.tokens, args.row):
        n = min(args.row, args.tokens - begin)
        part = n / args.turns
        turn = [0] * n
        for t in range(args.turns):
            for i in range(round(part * (t + 1 - args.supervised)), round(part * (t + 1))):
                turn[i] = t + 1
        out.append(Row(torch.randint(0, args.vocab, (n,), generator=g).tolist(), turn))
    return out


def build(args):
    """The head with its target's (random) tensors, and one batch of random features."""
    torch.manual_seed(0)
    shape = TargetShape(
        "LlamaForCausalLM", "llama", args.hidden, args.intermediate, 30, args.heads, args.kv_heads, args.head_dim,
        args.vocab, max_positions=8192,
    )  # fmt: skip
    section = {"kind": args.head, "draft_vocab_size": args.draft_vocab}
    fields = HEADS[args.head].Config.model_fields
    section["depth" if "depth" in fields else "num_heads"] = args.depth
    config = parse_head(section)
    ids = torch.randperm(args.vocab)[: args.draft_vocab].sort().values if args.draft_vocab < args.vocab else None
    head = build_head(config, shape, ids).to(args.device)
    matrix = torch.randn(args.vocab, args.hidden) * 0.05
    head.attach(TargetWeights(matrix.to(args.device), matrix.to(args.device), torch.ones(args.hidden)))
    batch = Batch.pack(rows(args)).to(args.device)
    wants = head.wants()
    at = final_positions(batch)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    teacher = Teacher(matrix.to(args.device, dtype))
    final = torch.randn(at.numel(), args.hidden).to(args.device, dtype)
    # argmax and log-sum-exp come with the stored features: capture ran the target's lm_head once for each token
    features = Features(
        torch.randn(len(batch), len(wants.layers), args.hidden).to(args.device, dtype),
        at, final, *teacher.summary(final),
    )  # fmt: skip
    return head, batch, features, teacher


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products: the best of several, since it stands for what the machine can do."""
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        sync(device)
        begin = time.perf_counter()
        a @ b
        sync(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class PeakMemory:
    """Bytes above what was in use when the block began: CUDA's allocator, or the process's resident set."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def __enter__(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            self.base = self._resident()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        return self

    @staticmethod
    def _resident(key: str = "VmRSS") -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def __exit__(self, *_):
        self.bytes = (torch.cuda.max_memory_allocated() if self.cuda else self._resident("VmHWM")) - self.base


def one_variant(args, variant: str) -> dict:
    """fp32 | bf16 | reference: timed in a process of its own, so that peak memory is its own."""
    torch.set_num_threads(args.threads)
    head, batch, features, teacher = build(args)
    precision = torch.bfloat16 if variant == "bf16" else torch.float32
    reference = importlib.import_module(f"reference_{args.head}") if variant == "reference" else None
    if reference:  # it wants the final feature at every position
        full = torch.zeros(len(batch), args.hidden)
        full[features.final_at] = features.final
        features = Features(features.layers, torch.arange(len(batch)), full)

    def step():
        for p in head.parameters():
            p.grad = None
        if reference:
            sums = reference.step(head, batch, features, teacher.weight, args.depth)
            total, per_depth = sums["total"], sums["loss"]
        else:
            with torch.autocast(args.device.split(":")[0], precision, enabled=precision != torch.float32):
                sums = head.loss(batch, features, teacher, args.depth)
            total, per_depth = sums.total, sums.loss
        total.backward()
        sync(args.device)
        return total.item(), per_depth.tolist()

    with PeakMemory(args.device) as peak:
        total, per_depth = step()
    # the machine's speed drifts: each step is set against the rate measured just before and after it
    times, rates = [], [matmul_rate(args.device, precision)]
    for _ in range(1 if reference else args.repeats):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
        rates.append(matmul_rate(args.device, precision))
    seconds, rate = median(times), median(rates)
    needed = head.flops(Batch(*(t.cpu() for t in vars(batch).values())), args.depth)
    norms = {n: p.grad.double().norm().item() for n, p in head.named_parameters() if p.grad is not None}
    sketch = {n: sketch_of(p.grad) for n, p in head.named_parameters() if p.grad is not None}
    shares = [2 * needed / t / (a + b) for t, a, b in zip(times, rates, rates[1:], strict=False)]
    return dict(
        variant=variant, seconds=seconds, tokens_per_second=len(batch) / seconds, peak_bytes=peak.bytes,
        rate=rate, needed=needed, share=median(shares), total=total, per_depth=per_depth, norms=norms, sketch=sketch,
    )  # fmt: skip


def sketch_of(grad: torch.Tensor) -> list[float]:
    """256 entries of a gradient at fixed places: enough to compare two processes' gradients entry by entry."""
    flat = grad.detach().float().cpu().flatten()
    g = torch.Generator().manual_seed(1)
    return flat[torch.randint(0, flat.numel(), (256,), generator=g)].tolist()


def disagreement(a: dict, b: dict) -> tuple[float, float]:
    """Largest relative difference of the losses; of gradient entries, relative to their tensor's root mean square."""
    losses = max(abs(x - y) / max(abs(y), 1e-9) for x, y in zip(a["per_depth"], b["per_depth"], strict=True))
    grads = 0.0
    for name, theirs in b["sketch"].items():
        mine, theirs = torch.tensor(a["sketch"][name]), torch.tensor(theirs)
        grads = max(grads, ((mine - theirs).abs().max() / theirs.pow(2).mean().sqrt().clamp(min=1e-12)).item())
    return losses, grads


def main() -> int:
    args = arguments()
    has_reference = (ROOT / "tests" / f"reference_{args.head}.py").is_file() and args.device == "cpu"
    variants = [*args.precision, *(["reference"] if has_reference and not args.no_reference else [])]
    print(
        f"{args.head}: H {args.hidden}, MLP {args.intermediate}, heads {args.heads}/{args.kv_heads}, draft vocabulary "
        f"{args.draft_vocab}, {args.tokens} tokens in rows of {args.row}, depth {args.depth}, "
        f"supervised {args.supervised:.0%}, {args.device}, {args.threads} threads"
    )
    context = multiprocessing.get_context("spawn")
    results = {}
    print(
        f"{'':>10} {'tokens/s':>9} {'s/step':>8} {'peak MB':>8} {'GFLOP needed':>13} {'rate GFLOP/s':>13} {'share':>6}"
    )
    for variant in variants:
        with context.Pool(1) as pool:
            r = results[variant] = pool.apply(one_variant, (args, variant))
        print(
            f"{variant:>10} {r['tokens_per_second']:9.0f} {r['seconds']:8.2f} {r['peak_bytes'] / 1e6:8.0f} "
            f"{r['needed'] / 1e9:13.0f} {r['rate'] / 1e9:13.0f} {r['share']:6.1%}",
            flush=True,
        )
    status = 0
    if "reference" in results and "fp32" in results:
        ours, plain = results["fp32"], results["reference"]
        losses, grads = disagreement(ours, plain)
        status = int(losses > 1e-4 or grads > 1e-4)
        print(
            f"against the plain reference: {ours['tokens_per_second'] / plain['tokens_per_second']:.2f}x the tokens/s, "
            f"{ours['peak_bytes'] / plain['peak_bytes']:.2f}x the peak memory; losses agree to {losses:.1e}, gradients "
            f"to {grads:.1e} of their tensor's size" + (" -- MORE THAN 1e-4" if status else "")
        )
    if "fp32" in results and "bf16" in results:
        a, b = results["bf16"], results["fp32"]
        slow = " (no fast bf16 product here: train.precision=auto stays in fp32)"
        print(
            f"bf16 autocast: {a['tokens_per_second'] / b['tokens_per_second']:.2f}x fp32's tokens/s; its "
            f"matrix-multiply rate is {a['rate'] / b['rate']:.2f}x fp32's" + (slow if a["rate"] < b["rate"] else "")
        )
    if args.json:
        args.json.write_text(json.dumps({v: {k: x for k, x in r.items() if k != "sketch"} for v, r in results.items()}))
    return status


if __name__ == "__main__":
    sys.exit(main())
