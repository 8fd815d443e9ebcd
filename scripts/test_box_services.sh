#!/usr/bin/env bash
# Tests boxes at E2B, Daytona and Modal: the real SDKs talk to servers of the tests. Plays all hostile programs in pods. Makes an environment with the SDKs in
# .venv-boxes, on top of the one that runs the tests, as SDKs pin versions of other packages.
#   bash scripts/test_box_services.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
venv=.venv-boxes
if [ ! -x "$venv/bin/pytest" ]; then
    "$python" -m venv "$venv"
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/zz_base.pth"
    "$venv/bin/python" -m pip install -q "e2b>=2.63" "daytona>=0.226" "modal>=1.6" pytest pytest-xdist
fi
PYTHONPATH="$PWD" RL_CORE_MAY_SKIP="no container runtime" "$venv/bin/python" -m pytest -q tests/sandbox/test_boxes_services.py tests/sandbox/test_command_ends.py \
    tests/sandbox/test_boxes_containers.py tests/sandbox/test_remote_programs.py --slow -k "e2b or daytona or modal or hostile" "$@"
