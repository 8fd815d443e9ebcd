#!/usr/bin/env bash
# Runs scripts/fake_cuda_check.py with a CUDA build of torch, on a machine without a GPU.
#   bash scripts/fake_cuda_check.sh [FOLDER]    the environment, made there once (4.7 GB); default .venv-fake-cuda
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
env=${1:-.venv-fake-cuda}
if [ ! -x "$env/bin/python" ]; then
    python3 -m venv "$env"
    "$env/bin/pip" install -q torch==2.12.0
    "$env/bin/pip" install -q -e .[lora]
fi
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} CUDA_VISIBLE_DEVICES="" exec "$env/bin/python" scripts/fake_cuda_check.py
