"""SGLang's server on CUDA devices: libraries that its preloaded memory saver links, the tools with
which it compiles kernels at its first start, and its memory and arguments."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from rl_core.engines.sglang_versions import KEEPS_HEAD
from rl_core.sampling.engine import EngineSpec

GRAPH_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"  # Sleep frees the memory of CUDA graphs.
MAX_GRAPH_ROWS = 512  # Largest decode graph that SGLang captures by default.
MAX_ASLEEP_BYTES = 1 << 30  # Of the memory of CUDA graphs that a sleeping server may keep.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Expandable segments are shared as file descriptors, which a child may not take from its parent;
# cudaMallocAsync has no CUDA IPC.
UNSHARED = {"expandable_segments": "True", "backend": "cudaMallocAsync"}
# Folders of the driver in containers whose loader does not list them.
DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")


def cuda_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the additions that the server needs: LD_LIBRARY_PATH finds the CUDA runtime of
    torch's wheels, which a preloaded library does not find by itself, and CUDA_HOME names a
    toolkit."""
    folders = [environ.get("LD_LIBRARY_PATH", ""), *runtime_folders()]
    folders += [folder for folder in DRIVER_FOLDERS if Path(folder, "libcuda.so.1").exists()]
    changed = {"LD_LIBRARY_PATH": ":".join(filter(None, folders))}
    toolkit = cuda_toolkit(environ)
    if toolkit:
        changed["CUDA_HOME"] = str(toolkit)
    return {**environ, **{name: value for name, value in changed.items() if value}}


def copied_head_bytes(spec: EngineSpec, version: tuple[int, ...]) -> float:
    """Bytes of the fp32 copy of the head that each decode step of this version makes, on one
    device. The head is the largest matrix of the model."""
    if version >= KEEPS_HEAD or spec.dtype.itemsize > 2:
        return 0
    matrices = [p.numel() for p in spec.module.parameters() if p.ndim == 2]
    return 4 * max(matrices) / spec.server.tp


def sets_graphs(spec: EngineSpec) -> bool:
    """True if --engine_args has arguments of CUDA graphs: rl_core then adds none."""
    return "cuda-graph" in spec.server.args.replace("_", "-")


def releases_graphs(spec: EngineSpec, version: tuple[int, ...], environ: Mapping[str, str]) -> bool:
    """True if sleep frees the memory of CUDA graphs. SGLang then captures no graphs for prompts,
    whose launches matter for small models: worth it where decode graphs hold a large fp32 copy of
    the head. A variable of `environ` overrides this rule, and --engine_args about graphs end it."""
    if sets_graphs(spec):
        return False
    if GRAPH_SAVER in environ:
        return environ[GRAPH_SAVER].lower() in ("1", "true", "yes", "y")  # As SGLang reads it.
    return copied_head_bytes(spec, version) > MAX_ASLEEP_BYTES


def cuda_args(spec: EngineSpec, version: tuple[int, ...], environ: Mapping[str, str]) -> list[str]:
    """Arguments of a server of this version on CUDA devices, without arguments of CUDA graphs if
    --engine_args has some.

    TF32 makes the fp32 head of old versions faster and leaves its logits exact up to the order of
    summation. Its significand has 11 bits and its exponent 8, so each bf16 value (8 and 8 bits) and
    each fp16 value (11 and 5) is a TF32 value. A product of two has at most 22 bits of the 24 of
    fp32, and sums are in fp32, with TF32 or without."""
    # Pixels are computed on the CPU. 0.5.17 reserves 1 GiB on the GPU for others.
    args = ["--mm-feature-transport", "cpu"]
    if copied_head_bytes(spec, version):
        args.append("--enable-tf32-matmul")
    if sets_graphs(spec):
        return args
    # SGLang captures no more rows than it runs requests, and on small GPUs only 8 to 32 by default.
    num_rows = min(max(spec.num_slots, spec.server.tp), MAX_GRAPH_ROWS)
    args += ["--cuda-graph-max-bs-decode", str(num_rows)]
    if releases_graphs(spec, version, environ):
        args.append("--disable-prefill-cuda-graph")
    return args


def unshared_memory(environ: Mapping[str, str]) -> str:
    """The setting of torch's allocator that keeps other processes from mapping this one's device
    memory, as VARIABLE=option:value, or "". The last value of an option counts, as in torch."""
    for variable in ALLOCATOR_VARIABLES:
        settings = "".join(environ.get(variable, "").split()).split(",")
        for option, value in UNSHARED.items():
            of_option = [one for one in settings if one.startswith(f"{option}:")]
            if of_option[-1:] == [f"{option}:{value}"]:
                return f"{variable}={option}:{value}"
    return ""


def check_allocator(environ: Mapping[str, str]) -> None:
    """Raises ValueError if --weight_sync device is impossible."""
    if setting := unshared_memory(environ):
        raise ValueError(
            f"--weight_sync=device: with {setting} the server cannot map the rank's memory; unset "
            "it, or give --weight_sync files"
        )


def runtime_folders() -> list[str]:
    """Folders of libcudart in NVIDIA's wheels: nvidia/cu13/lib, or nvidia/cuda_runtime/lib of CUDA
    12."""
    spec = importlib.util.find_spec("nvidia")
    packages = (spec and spec.submodule_search_locations) or ()
    libraries = [
        library for folder in packages for library in Path(folder).glob("cu*/lib/libcudart.so.*")
    ]
    return sorted({str(library.parent) for library in libraries})


def cuda_toolkit(environ: Mapping[str, str]) -> Path | None:
    """The toolkit of CUDA_HOME or CUDA_PATH, or else the first with nvcc and headers. The `nvcc` of
    the PATH may be a script, and the parent of its folder no toolkit."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named:
        return Path(named) if is_toolkit(Path(named)) else None
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    on_path = [Path(nvcc).resolve().parent.parent] if nvcc else []
    return next(filter(is_toolkit, [*on_path, *map(Path, TOOLKITS)]), None)


def is_toolkit(folder: Path) -> bool:
    return (folder / "bin/nvcc").is_file() and (folder / "include/cuda_runtime.h").is_file()


def check_build_tools(environ: Mapping[str, str]) -> None:
    """Raises ValueError if a tool is missing with which SGLang compiles kernels at its first start.
    A set TVM_FFI_CACHE_DIR names kernels that were compiled before, which need none."""
    if environ.get("TVM_FFI_CACHE_DIR"):
        return
    path = environ.get("PATH", os.defpath)
    missing = []
    if cuda_toolkit(environ) is None:
        missing.append("nvcc and the headers of the CUDA toolkit (set CUDA_HOME to its folder)")
    if not shutil.which("ninja", path=path):
        missing.append("ninja (pip install ninja)")
    if not any(shutil.which(name, path=path) for name in ("c++", "g++", "clang++")):
        missing.append("a C++ compiler (apt install g++)")
    if missing:
        raise ValueError(
            "--engine=sglang: SGLang compiles kernels at its first start; "
            f"not found: {', '.join(missing)}"
        )


def check_tp_devices(tp: int, num_visible: int, first: int = 0) -> None:
    """Raises ValueError if torch sees fewer GPUs than a server over `tp` of them needs, the first
    of which is the GPU `first` of its rank."""
    if first + tp > num_visible:
        raise ValueError(
            f"--engine_tp={tp}: a server needs the GPUs {first} to {first + tp - 1} and this rank "
            f"sees {num_visible}. Show every rank all GPUs of its machine (CUDA_VISIBLE_DEVICES), "
            "and start a number of ranks on each that --engine_tp divides"
        )


def with_room(spec: EngineSpec, is_first: bool) -> EngineSpec:
    """`spec` with the fraction of the memory that is free now which the server takes. A restart may
    come before the memory of the dead server is free, and does not raise ValueError."""
    weights = 0.0
    is_quantized = "--quantization" in spec.server.args or hasattr(
        spec.module.config, "quantization_config"
    )
    if is_first and not is_quantized:
        num_weights = sum(weight.numel() for weight in spec.module.parameters())
        weights = spec.dtype.itemsize * num_weights / spec.server.tp
    free = torch.cuda.mem_get_info(spec.device)[0]
    pool = pool_bytes(spec.memory_frac, free, spec.server.reserved(), weights)
    return replace(spec, memory_frac=round(pool / free, 3))


def pool_bytes(fraction: float, free: float, reserved: float, weights: float) -> float:
    """The memory that a server takes for its weights and KV cache, of the bytes that are free now,
    so that it can wake again once `reserved` bytes more are in use. Raises ValueError if the
    weights do not fit."""
    left = max(0.0, free - reserved)
    pool = fraction * left
    if weights and pool <= weights:
        fix = "--learner.offload phase" if reserved else "--engine_tp or --engine_memory_frac"
        raise ValueError(
            f"the engine gets {fraction:g} (--engine_memory_frac) of the {left / 2**30:.1f} GiB "
            f"that learners leave it, and its weights take {weights / 2**30:.1f} GiB; set {fix} "
            "(rl-core plan --gpu_gib finds flags that fit)"
        )
    return pool
