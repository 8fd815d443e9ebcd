"""The CUDA installation that SGLang's server is given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.engines import sglang_cuda
from rl_core.engines.sglang_cuda import (
    check_build_tools,
    cuda_environment,
    cuda_toolkit,
    runtime_folders,
)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def toolkit(folder: Path) -> Path:
    executable(folder / "bin/nvcc")
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()
    return folder


@pytest.mark.parametrize("folder", ["cu13", "cuda_runtime", "cu12"])
def test_a_process_without_a_toolkit_loads_the_runtime_of_torchs_wheels(
    folder, tmp_path, monkeypatch
):
    """Any shared library under the runtime's name: the loader searches by name."""
    library = Path(subprocess.getoutput("ldconfig -p | grep -m1 libm.so.6").split()[-1])
    wheels = tmp_path / "nvidia"
    (wheels / folder / "lib").mkdir(parents=True)
    shutil.copy(library, wheels / folder / "lib/libcudart.so.99")
    (wheels / "cublas/lib").mkdir(parents=True)
    assert runtime_folders([str(wheels)]) == [str(wheels / folder / "lib")]

    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcudart.so.99')"]
    without = {"PATH": "/usr/bin:/bin"}
    assert (
        "libcudart.so.99"
        in subprocess.run(load, env=without, capture_output=True, text=True).stderr
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    subprocess.run(load, env=cuda_environment(without), check=True)
    kept = cuda_environment({**without, "LD_LIBRARY_PATH": "/first"})
    assert kept["LD_LIBRARY_PATH"].startswith(f"/first:{wheels}/{folder}/lib")


def test_the_toolkit_is_the_one_with_nvcc_and_headers(tmp_path, monkeypatch):
    real, wrapper = toolkit(tmp_path / "cuda"), executable(tmp_path / "wrapped/bin/nvcc")
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", ())
    wrapped = {"PATH": str(wrapper.parent)}
    assert cuda_toolkit(wrapped) is None
    assert cuda_toolkit({"PATH": str(real / "bin")}) == real
    assert cuda_toolkit({**wrapped, "CUDA_HOME": str(real)}) == real
    assert cuda_toolkit({"PATH": str(real / "bin"), "CUDA_HOME": str(wrapper.parent)}) is None
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", (str(real),))
    assert cuda_environment(wrapped)["CUDA_HOME"] == str(real)


def test_missing_build_tools_are_named_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", ())
    tools = tmp_path / "bin"
    environ = {"PATH": str(tools)}
    with pytest.raises(
        ValueError, match=r"not found: nvcc .*CUDA_HOME.*, ninja .*, a C\+\+ compiler"
    ):
        check_build_tools(environ)
    check_build_tools({**environ, "TVM_FFI_CACHE_DIR": str(tmp_path)})
    executable(tools / "g++")
    environ["CUDA_HOME"] = str(toolkit(tmp_path / "cuda"))
    with pytest.raises(ValueError, match=r"not found: ninja \(pip install ninja\)$"):
        check_build_tools(environ)
    executable(tools / "ninja")
    check_build_tools(environ)
