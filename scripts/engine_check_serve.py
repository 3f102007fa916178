"""The engine's side of ``engine_check.py``: decode prompts greedily, one at a time, and say what was drafted.

It runs inside an environment that has vLLM or SGLang and imports nothing of headtrain, so that an export is judged by
the engine alone. Reads the job (JSON) that is named, writes the answers beside it:

    {"server": "vllm" | "sglang", "model": FOLDER, "speculative": the engine's own settings or null, "k": 3,
     "dtype": "float32", "prompts": [[token ids]], "tokens": 64}
    -> [{"tokens": [ids], "drafts": rounds, "accepted": [of the first drafted token, of the second, ...]}]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Engines read their settings from the environment when they are imported. In one process vLLM starts in seconds; the
# folders are local.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def room(job: dict) -> int:
    """Positions of the longest text; whole chains are drafted up to its last token."""
    return max(map(len, job["prompts"])) + job["tokens"] + job["k"] + 16


def vllm(job: dict) -> list[dict]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=room(job),
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
    )
    sampling, out, before = SamplingParams(temperature=0.0, max_tokens=job["tokens"]), [], [0] * (job["k"] + 1)
    for prompt in job["prompts"]:
        answer = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
        counts = [0] * (job["k"] + 1)
        if job["speculative"]:
            metrics = {m.name: m for m in llm.get_metrics()}
            drafts = metrics["vllm:spec_decode_num_drafts"].value
            counts = [drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values[: job["k"]]]
        new = [int(b - a) for a, b in zip(before, counts, strict=True)]  # the engine counts on from prompt to prompt
        out.append({"tokens": list(answer.token_ids), "drafts": new[0], "accepted": new[1:]})
        before = counts
    return out


def sglang(job: dict) -> list[dict]:
    """Untested: written from srt/entrypoints/engine.py and srt/managers/tokenizer_manager.py of SGLang 0.5.23."""
    import sglang

    engine = sglang.Engine(
        model_path=job["model"],
        dtype=job["dtype"],
        context_length=room(job),
        disable_radix_cache=True,
        disable_cuda_graph=True,
        **(job["speculative"] or {}),
    )
    sampling, out = {"temperature": 0.0, "max_new_tokens": job["tokens"]}, []
    for prompt in job["prompts"]:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        meta = answer["meta_info"]
        steps = meta.get("spec_correct_drafts_histogram") or []  # rounds by how many of their drafts were accepted
        out.append(
            {
                "tokens": list(answer["output_ids"]),
                "drafts": meta.get("spec_verify_ct", 0),
                "accepted": [sum(steps[j:]) for j in range(1, job["k"] + 1)],
            }
        )
    engine.shutdown()
    return out


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    answers = {"vllm": vllm, "sglang": sglang}[job["server"]](job)
    path.with_suffix(".answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":  # SGLang starts its workers as fresh processes
    main()
