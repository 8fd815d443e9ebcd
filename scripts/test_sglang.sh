#!/usr/bin/env bash
# Tests the SGLang engine with the real package on a machine without a GPU: makes a virtual environment (2.9 GiB;
# the argument, or .venv-sglang), and runs the tests that need SGLang in it.
#   [SGLANG=0.5.17] bash scripts/test_sglang.sh [--short] [FOLDER [arguments of pytest]]
# SGLANG: the version, the oldest one that rl_core takes or the newest one (the default).
# --short: what every engine promises, images, adapters, weights in buckets, runs whose server is killed. Without it longer runs too,
# for half an hour.
# It is a trick for tests, not a supported mode. SGLang is installed without what it asks for: its compiled kernels and
# torchvision are stubs, in which nothing computes, and torch and transformers are not the versions that it pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tests=(tests/engines/test_engine_contract.py tests/engines/test_engine_images.py)
tests+=(tests/tinker_api/test_server.py::test_a_real_engine_samples_with_the_learners_logprobs)
if [ "${1:-}" = --short ]; then
    shift
    tests+=("tests/engines/test_sglang.py::test_two_actors_on_one_server_have_their_learners_weights")
    tests+=("tests/engines/test_sglang.py::test_a_running_server_gets_the_weights_after_a_new_start")
    tests+=("tests/engines/test_weight_transfer.py::test_a_servers_ranks_read_buckets_again_after_a_death")
    tests+=("tests/engines/test_sglang_again.py::test_two_learners_send_their_shards_again_to_servers_that_died")
else
    tests+=(tests/engines/test_sglang{,_cuda,_again}.py tests/engines/test_weight_transfer.py --slow)
    tests+=("tests/sampling/test_resumable_rollouts.py::test_what_was_sampled_before_a_checkpoint_is_in_the_run_that_goes_on")
    tests+=("tests/run/test_stale_policy.py::test_each_turn_has_version_and_logprobs_of_the_weights_that_spoke_it")
    tests+=("tests/run/test_stale_policy.py::test_tokens_name_the_weights_that_sampled_them_whatever_the_order")
fi
case "${SGLANG:=0.5.23}" in
    0.5.23) pins=(sglang==0.5.23 compressed-tensors==0.18.0 xgrammar==0.2.7) with=(openai==2.8.0 transformers==5.23.0) ;;
    0.5.17) pins=(sglang==0.5.17 compressed-tensors==0.18.0 xgrammar==0.2.1) with=(openai==2.6.1 transformers==5.12.1) ;;
    *) echo "SGLANG=$SGLANG: this script knows 0.5.17 and 0.5.23" >&2 && exit 2 ;;
esac
venv="${1:-$PWD/.venv-sglang}"
shift || true
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
wanted="$PWD $SGLANG $(cat setup.py scripts/test_sglang.sh | cksum)"
if [ "$(cat "$venv/.rl_core_sglang" 2> /dev/null)" != "$wanted" ]; then
    echo "installing SGLang $SGLANG into $venv"
    . scripts/lend_torch.sh
    install --no-deps "${pins[@]}"
    # What SGLang's server imports.
    install setuptools orjson pybase64 requests triton==3.9.0 pillow starlette msgspec pyzmq IPython aiohttp uvloop dill \
        apache-tvm-ffi==0.1.11 sentencepiece loguru gguf partial_json_parser uvicorn fastapi setproctitle \
        einops psutil jsonschema python-multipart prometheus-client soundfile
    install "${with[@]}" peft pytest pytest-xdist
    install -e .
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    mkdir -p "$site/sgl_kernel" "$site/torchvision"
    cat > "$site/sgl_kernel/__init__.py" << 'STUB'
import multiprocessing.context

import torch


def without_pinning(make):
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


# SGLang's adapters ask for pinned memory on every device, which torch refuses where there is no GPU.
torch.Tensor.pin_memory = lambda self: self
torch.tensor, torch.zeros = without_pinning(torch.tensor), without_pinning(torch.zeros)
# A server's processes are forked, not spawned: imports would take each of them ten seconds of CPU time.
contexts = multiprocessing.context._concrete_contexts
contexts["spawn"] = contexts["fork"]
# The checksums of its weights wait for the GPU.
torch.cuda.synchronize = lambda device=None: None
# SGLang's processor of Qwen-VL imports Qwen3.5, which looks these operators up.
operators = torch.library.Library("sgl_kernel", "FRAGMENT")
for name in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate",
             "qkvzba_split_reshape_cat_contiguous"):
    operators.define(f"fused_{name}_cpu(Tensor x) -> Tensor")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return missing
STUB
    cat > "$site/torchvision/__init__.py" << 'STUB'
"""Enough for SGLang and transformers to import torchvision and its modules."""
import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"


class Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (Missing,), {})


class Missing(metaclass=Names):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"torchvision's {type(self).__name__} is a stub")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Missing, name)


sys.meta_path.append(Finder())


def __getattr__(name):
    return getattr(Missing, name)
STUB
    echo "$wanted" > "$venv/.rl_core_sglang"
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -k "not embedded" \
    "${tests[@]}" "$@"
