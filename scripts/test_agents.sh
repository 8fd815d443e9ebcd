#!/usr/bin/env bash
# Agent programs that exist already, each installed in a folder of its own, play an episode against the endpoint. They run
# without network, by bubblewrap. Those from npm need Node.js.
#   bash scripts/test_agents.sh [FOLDER [NAME ...]]      installed in FOLDER, by default .venv-agents
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=test
. scripts/install.sh
folder="${1:-.venv-agents}"
shift || true

list="$("$python" scripts/test_agents.py --folder "$folder" --packages "$@")"
while read -r name installer packages; do
    [ ! -e "$folder/$name/.installed" ] || continue
    echo "installing $name into $folder/$name"
    read -ra packages <<< "$packages"
    if [ "$installer" = npm ]; then
        npm install --silent --no-audit --no-fund --prefix "$folder/$name" "${packages[@]}"
    else
        "$python" -m venv "$folder/$name"
        "$folder/$name/bin/python" -m pip install -q "${packages[@]}"
    fi
    touch "$folder/$name/.installed"
done <<< "$list"
exec "$python" scripts/test_agents.py --folder "$folder" "$@"
