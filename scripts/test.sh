#!/usr/bin/env bash
# Sets up what the tests need and runs them: the quick ones first, then those marked slow.
#   bash scripts/test.sh                        everything
#   bash scripts/test.sh -k packing -x          arguments go to pytest, which then leaves out slow tests unless asked with -m
# An active virtual environment is reused; without one, .venv is made in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=test
. scripts/install.sh

if [ "$#" -eq 0 ]; then
    set -- -m ""
fi
exec "$python" -m pytest "$@"
