"""Tokens/s of training on one and on several processes of this machine, features read from disk.

    python scripts/bench_scaling.py                                   # the quickstart's head, 1 and 2 processes
    python scripts/bench_scaling.py --processes 4 --json scaling.json
    python scripts/bench_scaling.py --hidden 64 --vocab 512 --draft-vocab 128 --tokens 256 --steps 3   # does it work?

The head is EAGLE-3 in the shape of the quickstart's target (SmolLM2-135M); its features are random, in a store as
`headtrain capture` writes it. Every process takes one micro-batch of --tokens a step, through the trainer's own loader
and backend: forward, backward, exchange, clipping, AdamW.

Rows: `one` process; `apart`, that is --processes at the same time that exchange nothing; and each backend.
Communication (`comm.`): the share of a step that it takes longer than a step of `apart`: what an exchange costs, what
waiting for the slowest costs, less what is hidden behind the backward pass. 0 at least: where noise makes a backend's
step the faster one, 0 is printed. `features`: the share of time that the loader kept the step waiting.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as headtrain.train does
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from headtrain.config import TrainSection  # noqa: E402
from headtrain.data.loader import Loader  # noqa: E402
from headtrain.data.manifest import Manifest, plan_shards  # noqa: E402
from headtrain.data.store import FeatureStore  # noqa: E402
from headtrain.data.store_writer import StoreWriter  # noqa: E402
from headtrain.heads.base import DraftHead  # noqa: E402
from headtrain.heads.catalog import build_head, parse_head  # noqa: E402
from headtrain.metadata import TargetIdentity  # noqa: E402
from headtrain.shift import final_positions  # noqa: E402
from headtrain.teacher import Teacher  # noqa: E402
from headtrain.train.backend import Backend  # noqa: E402
from headtrain.train.metrics import flatten, unflatten  # noqa: E402
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights  # noqa: E402

APART = "apart"  # processes that exchange nothing
LAUNCHED = {"ddp": {}, "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, APART: {}}  # as by the launcher
ROW = 256  # tokens; the first quarter is a prompt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--backends", nargs="+", choices=["ddp", "fsdp2"], default=["ddp", "fsdp2"])
    parser.add_argument("--tokens", type=int, default=1024, help=f"of a micro-batch, a multiple of {ROW}")
    parser.add_argument("--steps", type=int, default=20, help="timed steps after --warmup; the median is printed")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--store", default="bfloat16", choices=["bfloat16", "float32", "int8"], help="features' form")
    parser.add_argument("--folder", type=Path, help="where the features are written; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.tokens % ROW or args.hidden % 64 or args.processes < 2:
        parser.error(f"--tokens: a multiple of {ROW}; --hidden: a multiple of 64; --processes: 2 or more")
    return args


def shape_of(args) -> TargetShape:
    return TargetShape(
        "LlamaForCausalLM", "llama", args.hidden, args.hidden * 8 // 3, 30, args.hidden // 64, args.hidden // 64, 64,
        args.vocab, max_positions=8192,
    )  # fmt: skip


def build(args) -> tuple[DraftHead, Teacher]:
    """The same on every process."""
    torch.manual_seed(0)
    ids = torch.randperm(args.vocab)[: args.draft_vocab].sort().values
    config = parse_head({"kind": "eagle3", "depth": args.depth, "draft_vocab_size": args.draft_vocab})
    head = build_head(config, shape_of(args), ids)
    matrix = torch.randn(args.vocab, args.hidden) * 0.05
    head.attach(TargetWeights(matrix, matrix, torch.ones(args.hidden)))
    return head, Teacher(matrix)


def write_store(args, folder: Path) -> None:
    """Random features of as many rows as all steps read."""
    head, teacher = build(args)
    wants, batches = head.wants(), args.processes * (args.warmup + args.steps)
    rows = [
        Row(torch.randint(0, args.vocab, (ROW,)).tolist(), [0] * (ROW // 4) + [1] * (ROW - ROW // 4))
        for _ in range(batches * args.tokens // ROW)
    ]
    identity = TargetIdentity(
        name="random", shape=vars(shape_of(args)), dtype="float32", weights={"random": "0"}, tokenizer="none"
    )
    finals = sum(len(final_positions(Batch.pack([row]))) for row in rows)
    manifest = Manifest(
        target=identity, layers=list(wants.layers), final="supervised", normed="post-norm", dtype=args.store,
        summary=True, rows=len(rows), tokens=ROW * len(rows), finals=finals, rows_sha256="random", max_length=ROW,
        shards=plan_shards([ROW] * len(rows), 1 << 16),
    )  # fmt: skip
    writer = StoreWriter(folder, manifest)
    for number in writer.todo():
        mine = rows[slice(*manifest.shards[number : number + 2])]
        shard = writer.shard(number, mine)
        for row in mine:
            at = final_positions(Batch.pack([row]))
            final = torch.randn(len(at), args.hidden)
            layers = torch.randn(ROW, len(wants.layers), args.hidden)
            shard.add(Features(layers, at, final, *teacher.summary(final)))
        shard.close()


def work(index: int, count: int, name: str, port: int, args, folder: Path, together, results) -> None:
    """One process of ``count``: puts (index, threads, seconds of each step, seconds that the loader was waited for)."""
    env = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(count), **LAUNCHED[name]}
    if name != APART:
        env |= {"WORLD_SIZE": str(count), "RANK": str(index), "LOCAL_RANK": str(index)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(env)
    backend = Backend("fp32")
    head, teacher = build(args)
    backend.prepare(head)
    optimizer = backend.optimizer(head, TrainSection())
    loader = Loader(
        FeatureStore(folder, verify=False), args.tokens, rank=index, ranks=count, device=backend.device
    )  # fmt: skip
    total, seconds, waited = args.warmup + args.steps, [], 0.0
    stream = loader.batches(0, total * count)
    for step in range(total):
        if step == args.warmup:
            together.wait()
            waited = loader.waited
        begin = time.perf_counter()
        sums = backend.backward(next(stream), teacher, args.depth, step, True)
        sums = unflatten(backend.sum(flatten(sums, args.depth)))
        backend.normalise(float(sums.count), 0.5)
        optimizer.step(1.0)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    results.put((index, torch.get_num_threads(), seconds[args.warmup :], loader.waited - waited))
    together.wait()  # nobody leaves a group that others are in
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(name: str, count: int, args, folder: Path) -> dict:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    together, results = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=work, args=(i, count, name, port, args, folder, together, results), daemon=True)
        for i in range(count)
    ]
    for process in processes:
        process.start()
    found = []
    while len(found) < count:
        try:
            found.append(results.get(timeout=5))
        except queue.Empty:
            if any(p.exitcode for p in processes):
                sys.exit(f"error: {name} on {count} processes: one ended with {[p.exitcode for p in processes]}")
    for process in processes:
        process.join()
    step = median(s for _, _, seconds, _ in found for s in seconds)
    whole = sum(sum(seconds) for _, _, seconds, _ in found)
    return {
        "backend": name,
        "processes": count,
        "threads": found[0][1],
        "step_seconds": step,
        "tokens_per_second": count * args.tokens / step,
        "waiting_share": sum(wait for *_, wait in found) / whole,
    }


def main() -> None:
    args = arguments()
    head, _ = build(args)
    parameters = sum(p.numel() for p in head.trainable().values())
    print(f"eagle3, {parameters / 1e6:.1f} M parameters, {args.tokens} tokens a process and step, depth {args.depth}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write_store(args, Path(folder))
        rows = [measure(APART, count, args, Path(folder)) for count in (1, args.processes)]
        rows += [measure(name, args.processes, args, Path(folder)) for name in args.backends]
    one, apart = rows[:2]
    print(
        f"{'':10}{'processes':>10}{'threads':>9}{'s/step':>9}{'tokens/s':>10}{'speed-up':>10}{'comm.':>8}{'features':>10}"
    )
    for row in rows:
        row["speed_up"] = row["tokens_per_second"] / one["tokens_per_second"]
        row["communication_share"] = 0.0
        if row["backend"] != APART:
            row["communication_share"] = max(0.0, 1 - apart["step_seconds"] / row["step_seconds"])
        print(
            f"{row['backend'] if row['processes'] > 1 else 'one':10}{row['processes']:10}{row['threads']:9}"
            f"{row['step_seconds']:9.3f}{row['tokens_per_second']:10,.0f}{row['speed_up']:10.2f}"
            f"{row['communication_share']:8.1%}{row['waiting_share']:10.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps({"parameters": parameters, "tokens": args.tokens, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
