#!/usr/bin/env bash
# Runs tests with other versions of the requirements, in the virtual environment .venv-NAME (2 GiB with torch's build for CPUs).
#   bash scripts/test_versions.sh oldest [arguments of scripts/test.sh]     the lowest versions that setup.py allows, Python 3.11
#   bash scripts/test_versions.sh newest [arguments of scripts/test.sh]     the newest versions on the index, Python 3.13
#   bash scripts/test_versions.sh openenv [arguments of scripts/test.sh]    OpenEnv's server in .venv-openenv, the rest as usual
# PYTHON, TORCH, TRANSFORMERS and OPENENV replace a version: TORCH=2.13.0 TRANSFORMERS=5.14.1 bash scripts/test_versions.sh oldest learning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="${1:-}"
case "$name" in
    oldest) versions=(lowest-direct "${PYTHON:=python3.11}" "torch==${TORCH:=2.11.0}" "transformers==${TRANSFORMERS:=5.12.0}") ;;
    newest) versions=(highest "${PYTHON:=python3.13}" "torch${TORCH:+==$TORCH}" "transformers${TRANSFORMERS:+==$TRANSFORMERS}") ;;
    openenv) versions=("${OPENENV:=openenv==0.10.0}" "${PYTHON:=python3}") ;;
    *) echo "scripts/test_versions.sh needs oldest, newest or openenv, not '$name'" >&2 && exit 2 ;;
esac
shift
venv="$PWD/.venv-$name"
python="$("$PYTHON" -V)"
[ "$("$venv/bin/python" -V 2> /dev/null)" = "$python" ] || "$PYTHON" -m venv --clear "$venv"
install() { "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "$@"; }

stamp="$venv/.rl_core_test"
wanted="$PWD $(cksum < setup.py)"
if [ "$(cat "$stamp" "$venv/.versions" 2> /dev/null)" != "$wanted"$'\n'"${versions[*]}" ]; then
    echo "installing ${versions[*]} into $venv"
    "$venv/bin/python" -m pip install -q uv
    if [ "$name" = openenv ]; then
        install "$OPENENV"
    else
        # The usual index has a build for CUDA alone, of several GB, for Linux.
        UV_HTTP_TIMEOUT=10 install --torch-backend cpu "${versions[2]}" || "$venv/bin/python" -m pip install "${versions[2]}"
        torch="torch==$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')"
        install --resolution "${versions[0]}" --overrides <(echo "$torch") "${versions[3]}" -e '.[test]'
    fi
    # scripts/test.sh takes an environment with this stamp as it is.
    echo "$wanted" > "$stamp"
    echo "${versions[*]}" > "$venv/.versions"
fi
if [ "$name" = openenv ]; then
    export RL_CORE_OPENENV="$venv/bin/python"
    exec bash scripts/test.sh -k openenv tests/envs/test_envs_tools.py "$@"
fi
VIRTUAL_ENV="$venv" exec bash scripts/test.sh "$@"
