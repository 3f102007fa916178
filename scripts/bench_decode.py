"""Decoding on a real target: this project's plain loop beside transformers' own generate, then every drafter.

    python scripts/bench_decode.py                                    the default target, lookups only
    python scripts/bench_decode.py --run runs/quickstart --k 1,2,3,5 --tree 15

Prints tokens/s, and for each drafter the share of the time in drafting, verifying and bookkeeping (everything else:
at most 10 % is the goal). Plain decoding and generate take turns on the same prompts, so that their ratio is fair.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from headtrain.commands.common import device
from headtrain.commands.drafters import Maker, numbers
from headtrain.config import TargetSection, load_recipe
from headtrain.decode.generate import generate
from headtrain.evaluate.acceptance import Case, Settings, load_prompts, measure
from headtrain.evaluate.report import title
from headtrain.target.load import load_target

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.10


def theirs(target, ids: list[int], new: int) -> tuple[int, float]:
    """Greedy tokens after the first, and their seconds, of ``model.generate``; the prefill is timed apart."""
    prompt = torch.tensor([ids], device=target.device)
    fixed = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}

    def timed(count: int) -> float:
        begin = time.perf_counter()
        out = target.model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **fixed)
        assert out.shape[1] == len(ids) + count
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return new - 1, timed(new) - timed(1)


def beside_generate(target, prompts, new: int) -> dict[str, float]:
    tokens = {"ours": 0, "theirs": 0}
    seconds = {"ours": 0.0, "theirs": 0.0}
    generate(target, prompts[0].ids, max_new_tokens=4)
    theirs(target, prompts[0].ids, 4)
    for number, prompt in enumerate(prompts):
        for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            if side == "ours":
                out = generate(target, prompt.ids, max_new_tokens=new, eos_ids=())
                count, spent = len(out.tokens) - 1, out.times.decode
            else:
                count, spent = theirs(target, prompt.ids, new)
            tokens[side] += count
            seconds[side] += spent
    return {side: tokens[side] / seconds[side] for side in tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="targets/smollm2-135m-instruct")
    parser.add_argument("--run", type=Path, action="append", default=[], help="a trained head; repeat for several")
    parser.add_argument("--prompts", nargs="+", default=[str(ROOT / "data" / "heldout")])
    parser.add_argument("--limit-per-route", type=int, default=1)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--k", default="1,3,5")
    parser.add_argument("--tree", help="node budgets, for example 15")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    out = Console(soft_wrap=True, highlight=False)
    target = load_target(TargetSection(path=options.target), device())
    prompts = load_prompts(target.tokenizer, options.prompts, options.limit_per_route)
    rates = beside_generate(target, prompts, options.new)
    out.print(f"{options.target}, {torch.get_num_threads()} threads, {len(prompts)} prompts, {options.new} tokens each")
    out.print(
        f"plain decoding {rates['ours']:.1f} tokens/s, transformers' generate {rates['theirs']:.1f}: "
        f"{rates['ours'] / rates['theirs']:.2f}x"
    )
    cases = []
    for spec in [*map(str, options.run), "ngram", "prompt-lookup"]:
        recipe = next((p for p in (Path(spec) / "recipe.yaml",) if p.is_file()), None)
        maker = Maker(target, Path(spec) if recipe else None, load_recipe(recipe) if recipe else None)
        chain = maker.chain(spec)
        cases += [Case(chain, k) for k in numbers("--k", options.k, int, 1)]
        for nodes in numbers("--tree", options.tree, int, 1) if options.tree else []:
            cases.append(Case(*maker.tree(chain, nodes, 5)))
    sweep = measure(target, cases, prompts, Settings(max_new_tokens=options.new, eos_ids=()))
    table = Table()
    for name in ("drafter", "tau", "tokens/s", "speed-up", "draft", "verify", "bookkeeping", "equal"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    figures = []
    for case in sweep.cases:
        s = case.summary()
        shares = [f"{s.shares[name]:.1%}" for name in ("draft", "verify", "other")]
        style = "red" if s.shares["other"] > GOAL else ""
        speed = [f"{s.tau:.2f}", f"{s.speculative_rate:.1f}", f"{s.speedup:.2f}x"]
        table.add_row(title(case), *speed, *shares, f"{s.identical}/{s.prompts}", style=style)
        figures.append({"case": title(case), "tau": s.tau, "tokens_per_second": s.speculative_rate, **s.shares})
    out.print(table)
    worst = max(f["other"] for f in figures)
    out.print(f"bookkeeping: at most {worst:.1%} of the time (goal: {GOAL:.0%})")
    if options.json:
        options.json.write_text(json.dumps({"plain": rates, "drafters": figures}, indent=2))


if __name__ == "__main__":
    main()
