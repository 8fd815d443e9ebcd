#!/usr/bin/env bash
# Sets up what the tests need and runs them: the quick ones first, then those marked slow.
#   bash scripts/test.sh                        everything
#   bash scripts/test.sh -k packing -x          arguments go to pytest, which then leaves out slow tests unless asked with -m
# An active virtual environment is reused; without one, .venv is made in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VIRTUAL_ENV:-$PWD/.venv}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python="$venv/bin/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "rl_core needs Python >= 3.10" >&2; exit 1; }

# The stamp says which requirements are installed for which checkout, so that a second run starts at once.
stamp="$venv/.rl_core_tests"
wanted="$PWD $(cksum < setup.py)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if ! command -v nvidia-smi > /dev/null && ! "$python" -c 'import torch' 2> /dev/null; then
        # Without a GPU the tests compare floating-point results; one pinned torch makes them the same everywhere.
        "$python" -m pip install -q "torch==2.13.0"
    fi
    "$python" -m pip install -q -e ".[test]"
    echo "$wanted" > "$stamp"
fi

# Tiny models gain nothing from more threads, and ranks that share the cores lose.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
if [ "$#" -eq 0 ]; then
    set -- -m ""
fi
exec "$python" -m pytest "$@"
