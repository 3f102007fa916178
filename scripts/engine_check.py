"""Serve exports of trained heads in a real engine, and hold its text and its acceptance against this project's own.

For every run and every form that the engine reads: export; decode held-out prompts of every route at temperature 0 in
the engine, without and with the head; evaluate the same export with headtrain's own decoding of the same prompts. It
is required that the engine's text with the head is its text without, and that at every drafted position the rate of
acceptance lies within two standard errors of headtrain's. Exit code 0 where both hold for all, else 1.

    python scripts/engine_check.py --engine-python .venv-vllm/bin/python runs/quickstart runs/smollm2-135m-eagle1

``engine_check.sh`` makes the engine's environment first. Prompts are handed over as token ids in headtrain's rendering.

What is counted. An engine drafts a whole chain in every round and counts all that the target accepts, before it cuts
the text at its limit or its end. ``headtrain eval`` counts what can become text. The same counts as the engine's are
had here by decoding beyond limit and end, and taking the rounds that begin before them.

Near-ties. Two float32 implementations add up in different orders, so where the best two logits are closer than that,
texts may part. Such a place is printed with the gap between the two logits and is a fault only above ``--gap``; the
prompt's rounds are then not compared.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headtrain.commands.common import checkpoint_of, device, read_head, require_same_target
from headtrain.config import TargetSection
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Generation, generate
from headtrain.evaluate.acceptance import Prompt, load_prompts
from headtrain.export.core import export_head
from headtrain.export.engines import ENGINES, form_of
from headtrain.heads.catalog import head_class
from headtrain.metadata import FILE as METADATA_FILE
from headtrain.metadata import Metadata, file_sha256, write_json, write_text
from headtrain.target.load import load_target
from headtrain.target.model import Target

# One run of each kind that vLLM serves. A module from scratch must draft the whole vocabulary there:
# headtrain vocab runs/smollm2-135m-mtp --size 49152 --out runs/smollm2-135m-mtp-whole
DEFAULT_RUNS = ("smollm2-135m-eagle1", "quickstart", "smollm2-135m-medusa", "smollm2-135m-mtp-whole")
DIALECTS = {"vllm": ("vllm", "speculators"), "sglang": ("sglang",)}
ERRORS = 2  # standard errors that the two rates may be apart


def counts_of(out: Generation, tokens: int, ends: Sequence[int], k: int) -> tuple[list[int], int, list[int]]:
    """Of a decoding that went on: the text up to its end or to ``tokens``, the rounds that began before that, and of
    these those whose first, second ... k-th draft was accepted."""
    end = next((i for i, token in enumerate(out.tokens[:tokens], 1) if token in ends), tokens)
    before, accepted = 1, []  # the first token is prefill's
    for entry in out.rounds:
        if before >= end:
            break
        accepted.append(entry.accepted)
        before += entry.committed
    return out.tokens[:end], len(accepted), [sum(a >= j for a in accepted) for j in range(1, k + 1)]


def ours(target: Target, drafter: HeadDrafter, prompts: list[Prompt], args: argparse.Namespace) -> list[dict]:
    found = []
    for prompt in prompts:
        limit = args.tokens + args.k + 1  # so that the rounds that count draft whole chains
        out = generate(target, prompt.ids, drafter=drafter, k=args.k, max_new_tokens=limit, eos_ids=())
        text, drafts, accepted = counts_of(out, args.tokens, target.eos_ids, args.k)
        found.append({"tokens": text, "drafts": drafts, "accepted": accepted})
    return found


@torch.no_grad()
def part(target: Target, prompt: Prompt, a: list[int], b: list[int]) -> dict[str, Any] | None:
    """Where two greedy texts part, and how far apart the target's best two logits are there; None: nowhere."""
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ids = torch.tensor([[*prompt.ids, *a[:at]]], device=target.device)
    logits, _, _ = target.step(ids, target.new_cache())
    best = logits[-1].topk(2).values
    return {"prompt": prompt.id, "route": prompt.route, "at": at, "gap": float(best[0] - best[1])}


def agreement(engine: list[dict], own: list[dict], k: int) -> list[dict[str, Any]]:
    """One entry a drafted position. The standard error is of our own rate; (accepted + 1) / (drafts + 2) in it keeps
    it above zero where everything or nothing was accepted."""
    totals = [(sum(x["drafts"] for x in side), [sum(x["accepted"][j] for x in side) for j in range(k)])
              for side in (engine, own)]  # fmt: skip
    (theirs, their_hits), (mine, my_hits) = totals
    out = []
    for j in range(k):
        p = (my_hits[j] + 1) / (mine + 2)
        error = math.sqrt(p * (1 - p) / max(mine, 1))
        rates = [hits / max(drafts, 1) for hits, drafts in ((their_hits[j], theirs), (my_hits[j], mine))]
        apart = abs(rates[0] - rates[1]) / error
        agrees = bool(mine and theirs) and apart <= ERRORS
        out.append({"engine": [their_hits[j], theirs], "headtrain": [my_hits[j], mine], "errors_apart": apart,
                    "agrees": agrees})  # fmt: skip
    return out


def judge(
    target: Target, prompts: list[Prompt], plain: list[dict], engine: list[dict], own: list[dict], gap: float, k: int
) -> dict[str, Any]:
    """differences: places where texts part; faults: those that no tie explains. Only prompts of one text are
    compared."""
    differences, same = [], []
    for n, prompt in enumerate(prompts):
        pairs = {"engine with and without the head": engine[n], "engine and headtrain": own[n]}
        found = [
            {"between": between, **place}
            for between, other in pairs.items()
            if (place := part(target, prompt, plain[n]["tokens"], other["tokens"]))
        ]
        differences += found
        if not found:
            same.append(n)
    positions = agreement([engine[n] for n in same], [own[n] for n in same], k)
    faults = [d for d in differences if not d["gap"] <= gap]
    return {
        "prompts": len(prompts),
        "compared": len(same),
        "differences": differences,
        "faults": faults,
        "positions": positions,
        "tau": [1 + sum(x[side][0] for x in positions) / max(positions[0][side][1], 1)
                for side in ("engine", "headtrain")],
        "passed": not faults and all(x["agrees"] for x in positions),
    }  # fmt: skip


class Engine:
    """Runs ``engine_check_serve.py`` in the engine's own environment, one process a job. What an earlier, interrupted
    check was answered for the very same job is not asked again."""

    def __init__(self, args: argparse.Namespace, target: str, prompts: list[Prompt]) -> None:
        self.args, self.target, self.prompts = args, target, prompts

    def answers(self, name: str, export: Path | None = None) -> list[dict]:
        """Raises CalledProcessError where the engine fails; what it said is in NAME.log."""
        path, model, settings = self.args.out / f"{name}.json", self.target, None
        if export is not None:
            model, settings = self._speculative(export)
        job = {"server": self.args.server, "model": model, "speculative": settings, "k": self.args.k}
        job |= {"dtype": self.args.dtype, "tokens": self.args.tokens, "prompts": [p.ids for p in self.prompts]}
        if export is not None:
            job["export_sha256"] = file_sha256(export / METADATA_FILE)  # which names the digests of the other files
        done = path.with_suffix(".answers.json")
        if done.is_file() and path.is_file() and json.loads(path.read_text(encoding="utf-8")) == job:
            return json.loads(done.read_text(encoding="utf-8"))
        done.unlink(missing_ok=True)
        write_json(path, job)
        with open(path.with_suffix(".log"), "w", encoding="utf-8") as log:
            script = Path(__file__).with_name("engine_check_serve.py")
            subprocess.run([self.args.engine_python, script, path], stdout=log, stderr=log, check=True)
        return json.loads(done.read_text(encoding="utf-8"))

    def _speculative(self, export: Path) -> tuple[str, dict[str, Any]]:
        metadata, k = Metadata.read(export), self.args.k
        folder = str(export.resolve())
        combined = form_of(ENGINES[metadata.export.engine], head_class(metadata.head.kind)).with_target
        if self.args.server == "vllm":
            settings = {"method": metadata.export.method, "num_speculative_tokens": k}
            return (folder, settings) if combined else (self.target, settings | {"model": folder})
        return self.target, {
            "speculative_algorithm": metadata.export.method,
            "speculative_draft_model_path": folder,
            "speculative_num_steps": k,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": k + 1,
        }


def exports(run: Path, target: Target, folder: Path, args: argparse.Namespace) -> list[tuple[str, Path]]:
    """One export for each form of this run's head that the engine reads. Raises ValueError where there is none."""
    checkpoint = checkpoint_of(run)
    metadata = Metadata.read(checkpoint)
    require_same_target(metadata, target.identity, checkpoint)
    kind, made = head_class(metadata.head.kind), []
    for dialect in DIALECTS[args.server]:
        if form_of(ENGINES[dialect], kind) is not None:
            name = f"{run.name}-{dialect}"
            path = export_head(checkpoint, dialect, args.out / "exports" / name, force=True, weights=target.weights(),
                               target_folder=folder, target_name=str(folder), dtype=args.dtype)  # fmt: skip
            made.append((name, path))
    if not made:
        raise ValueError(f"{run}: {args.server} serves no {metadata.head.kind} head")
    return made


def table(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    header = ["export", "text", *(f"position {j}" for j in range(1, args.k + 1)), "tau", "verdict"]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for name, r in results.items():
        parted = len(r["differences"])
        text = f"{r['compared']} of {r['prompts']} equal" + (f", {len(r['faults'])} faults" if parted else "")
        cells = []
        for x in r["positions"]:
            pair = [f"{hits / max(drafts, 1):.1%} ({hits}/{drafts})" for hits, drafts in (x["engine"], x["headtrain"])]
            cells.append(" against ".join(pair))
        tau = "{:.2f} against {:.2f}".format(*r["tau"])
        lines.append("| " + " | ".join([name, text, *cells, tau, "agrees" if r["passed"] else "DIFFERS"]) + " |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="default: " + ", ".join(f"runs/{n}" for n in DEFAULT_RUNS))
    parser.add_argument("--engine-python", required=True, help="the Python that has the engine")
    parser.add_argument("--server", choices=tuple(DIALECTS), default="vllm")
    parser.add_argument("--target", type=Path, default=Path("targets/smollm2-135m-instruct"), help="a folder")
    parser.add_argument("--prompts", nargs="+", default=["data/heldout"], help="files or folders of conversations")
    parser.add_argument("--limit-per-route", type=int, default=4)
    parser.add_argument("--limit", type=int, help="prompts in all")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--k", type=int, default=3, help="drafted tokens of a round")
    parser.add_argument("--dtype", default="float32", help="in bfloat16 texts part without any speculation")
    parser.add_argument("--gap", type=float, default=1e-3, help="logits closer than this may change places")
    parser.add_argument("--out", type=Path, default=Path("runs/engine_check"), help="for exports, jobs and the result")
    args = parser.parse_args()
    args.runs = args.runs or [Path("runs") / name for name in DEFAULT_RUNS]
    return args


def main() -> int:
    args = arguments()
    (args.out / "exports").mkdir(parents=True, exist_ok=True)
    folder = args.target.resolve()
    target = load_target(TargetSection(path=str(folder), dtype=args.dtype), device())
    prompts = load_prompts(target.tokenizer, args.prompts, args.limit_per_route)[: args.limit]
    made = [(name, path) for run in args.runs for name, path in exports(run, target, folder, args)]
    engine, began, results = Engine(args, str(folder), prompts), time.monotonic(), {}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f}s] {text}", flush=True)

    say(f"{len(prompts)} prompts in {args.server} without a head")
    plain = engine.answers("plain")
    for name, path in made:
        say(f"{name}: headtrain's own decoding")
        head = read_head(path)[0]
        head.attach(target.weights())
        drafter = HeadDrafter(head.to(target.device))
        drafter.check(args.k, target.shape.max_positions)
        own = ours(target, drafter, prompts, args)
        say(f"{name}: {args.server}")
        theirs = engine.answers(name, path)
        results[name] = judge(target, prompts, plain, theirs, own, args.gap, args.k)
        results[name]["by_prompt"] = [
            {"id": p.id, "route": p.route, "engine": a, "headtrain": b}
            for p, a, b in zip(prompts, theirs, own, strict=True)
        ]
    shown = {key: str(value) for key, value in vars(args).items()}
    write_json(args.out / "engine_check.json", {"settings": shown, "results": results})
    write_text(args.out / "engine_check.md", table(results, args))
    print(table(results, args))
    for name, r in results.items():
        for d in r["differences"]:
            tie = "a near-tie" if d not in r["faults"] else "A FAULT"
            print(f"{name}: {d['between']} part at token {d['at']} of {d['prompt']}: gap {d['gap']:.2g}, {tie}")
    print(f"{args.out / 'engine_check.json'}\n{args.out / 'engine_check.md'}")
    return 0 if all(r["passed"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
