"""The part of a CUDA installation that SGLang's server uses: libraries that its preloaded memory
saver links, and the tools with which it compiles kernels at its first start."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

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
