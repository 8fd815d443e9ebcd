#!/usr/bin/env bash
# Tests the workers' image, sessions in containers, boxes in containers and the sandbox's level of containers with a real engine: builds
# the image `rl-core-worker`, and runs tests/service/test_real_containers.py, tests/sandbox/test_boxes_containers.py,
# tests/agents/test_boxed_containers.py and, with images of tasks that this engine builds, tests/agents/test_built_boxes.py. Takes docker if it answers, else podman, which root on Debian installs.
#   bash scripts/test_containers.sh [arguments of pytest]
# BASE="..."         the image to build on, instead of python:3.12-slim; "debian": made here of Debian's packages, without a registry
# BUILD_FLAGS="..."  more flags of the build, such as "--network host"; podman takes --volume /etc/ssl/certs:/etc/ssl/certs:ro too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

packages() { # COMMAND PACKAGES...
    command -v "$1" > /dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${@:2}"; } > "$scratch/log" 2>&1 ||
        { cat "$scratch/log"; exit 1; }
}

engine=docker
if ! docker info > /dev/null 2>&1; then
    engine=podman
    packages podman podman runc catatonit netavark iptables
    if [ "$(id -u)" = 0 ]; then
        # Podman's own limits are above what root may set in some virtual machines; crun refuses a host with both versions of cgroups.
        export CONTAINERS_CONF="$scratch/containers.conf"
        printf '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n' > "$CONTAINERS_CONF"
        printf '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n' >> "$CONTAINERS_CONF"
    fi
fi

base="${BASE:-python:3.12-slim}"
if [ "$base" = debian ]; then
    base=rl-core-base
    if ! $engine image inspect "$base" > /dev/null 2>&1; then
        packages mmdebstrap mmdebstrap
        # Like python:3.12-slim: `python` and `pip` in /usr/local, without setuptools; no manuals.
        mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates,usr-is-merged \
            --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr --dpkgopt='path-exclude=/usr/share/man/*' \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
            --customize-hook='chroot "$1" python3 -m venv /usr/local' \
            --customize-hook='chroot "$1" /usr/local/bin/pip uninstall -q -y setuptools' \
            --customize-hook='chroot "$1" dpkg --purge --force-depends python3-venv python3.11-venv python3-pip-whl python3-setuptools-whl' \
            bookworm "$scratch/base.tar" > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
        $engine import "$scratch/base.tar" "$base" > /dev/null
    fi
fi

# shellcheck disable=SC2086  # several flags
$engine build ${BUILD_FLAGS:-} --build-arg "BASE=$base" -f scripts/worker.Dockerfile -t rl-core-worker . > "$scratch/log" 2>&1 ||
    { cat "$scratch/log"; exit 1; }
echo "$($engine --version): rl-core-worker of $($engine image inspect --format '{{.Size}}' rl-core-worker) bytes"
RL_CORE_TEST_IMAGE=rl-core-worker RL_CORE_MAY_SKIP="no GPU" "${PYTHON:-python3}" -m pytest -q tests/service/test_real_containers.py \
    tests/sandbox/test_boxes_containers.py "$@"
# The image of the environments' workers has a user who may not make folders; agents' commands and tasks need one who may.
RL_CORE_TEST_IMAGE="$base" RL_CORE_MAY_SKIP="no GPU" "${PYTHON:-python3}" -m pytest -q tests/agents/test_boxed_containers.py "$@"
# Builds have this machine's network, and here neither certificates nor limits of their own.
if [ "$engine" = podman ] && [ "$(id -u)" = 0 ]; then
    export BUILDAH_ISOLATION=chroot
    printf '[containers]\nnetns = "host"\n' > "$CONTAINERS_CONF"
fi
RL_CORE_TEST_IMAGE="$base" RL_CORE_MAY_SKIP="no GPU|no container runtime: (podman|buildah|docker)" "${PYTHON:-python3}" -m pytest -q \
    tests/agents/test_built_boxes.py "$@"
