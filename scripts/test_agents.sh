#!/usr/bin/env bash
# Agent programs that exist already, each installed in a virtual environment of its own, play an episode against the endpoint.
#   bash scripts/test_agents.sh [FOLDER [NAME ...]]      environments in FOLDER, by default .venv-agents
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=test
. scripts/install.sh
folder="${1:-.venv-agents}"
shift || true
names=("$@")
if [ ${#names[@]} = 0 ]; then
    names=(openai_agents pydantic_ai smolagents langgraph mini_swe_agent)
fi
for name in "${names[@]}"; do
    if [ ! -x "$folder/$name/bin/python" ]; then
        echo "installing $name into $folder/$name"
        "$python" -m venv "$folder/$name"
        read -ra packages <<< "$("$python" scripts/test_agents.py --venvs "$folder" --packages "$name")"
        "$folder/$name/bin/python" -m pip install -q "${packages[@]}"
    fi
done
exec "$python" scripts/test_agents.py --venvs "$folder" "${names[@]}"
