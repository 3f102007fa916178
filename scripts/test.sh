#!/usr/bin/env bash
# Set up .venv with the test extra and run the tests; arguments go to pytest: bash scripts/test.sh tests/heads -k chunk
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh gguf,test
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -m "not full" "$@"
