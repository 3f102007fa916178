#!/usr/bin/env bash
# The same as engine_check.sh in vLLM or SGLang proper, on a machine with an NVIDIA GPU.
# UNTESTED: there was no GPU with network where this was written. The engines' side (scripts/engine_check_serve.py) was
# run on vLLM's CPU build; SGLang's was written from its source.
#   bash scripts/engine_check_gpu.sh vllm|sglang --target FOLDER RUN ... [options of engine_check.py]
# float32 by default: in bfloat16 texts part at near-ties without any speculation; then give --dtype bfloat16 --gap 0.25
# and read the differences that are printed. SGLang reads EAGLE-1 and EAGLE-3 only.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} server=${1:?vllm or sglang}
shift
case $server in
    vllm) package=vllm==0.32.0 ;;
    sglang) package="sglang==0.5.23" ;;
    *) echo "first argument: vllm or sglang, not $server" >&2; exit 2 ;;
esac
command -v nvidia-smi >/dev/null || { echo "no NVIDIA GPU here: bash scripts/engine_check.sh runs on a CPU" >&2; exit 2; }
place=.venv-$server-gpu
case " $* " in *" --engine-python"*) ;; *)
    if ! [ -f "$place/.installed" ]; then
        "$python" -m venv "$place"
        "$place/bin/python" -m pip --disable-pip-version-check --quiet install "$package"
        touch "$place/.installed"
    fi
    set -- --engine-python "$place/bin/python" "$@" ;;
esac
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" scripts/engine_check.py --server "$server" "$@"
