#!/usr/bin/env bash
# Every check of this repository: style, then tests. Makes the same .venv as speedrun.sh if it is missing.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
bash speedrun.sh setup
.venv/bin/ruff check .
.venv/bin/ruff format --check .
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 "$@" # two processes: the models are too small for two threads
