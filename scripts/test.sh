#!/usr/bin/env bash
# Sets up what the tests need and runs them, all but long learning runs, benchmarks and the real SGLang.
#   bash scripts/test.sh                   every test, on two cores: waits of tests fill a third worker
#   bash scripts/test.sh learning data     the tests of these rooms: folders of tests/
#   bash scripts/test.sh -k packing -x     arguments go to pytest; -n 0 runs in one process
#   bash scripts/test.sh --slow            long learning runs and benchmarks too
# An active virtual environment is reused; without one, .venv is made in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=test
. scripts/install.sh

# Chromium is for the tests of the viewer's page, bubblewrap for those of the sandbox. Without them these are skipped.
for package in chromium bubblewrap; do
    command="${package/bubblewrap/bwrap}"
    if ! command -v "$command" > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends "$package"; } > /dev/null 2>&1 || echo "$package: not installed"
    fi
done

arguments=()
for argument in "$@"; do
    if [ -d "tests/$argument" ]; then
        argument="tests/$argument"
    fi
    arguments+=("$argument")
done
exec "$python" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "${arguments[@]}"
