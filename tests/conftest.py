"""What several test files need: tiny real models, real data, and real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Set before torch is imported: tiny models gain nothing from more threads, and parallel ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    # A mistake should show within seconds; sort() is stable, so the files keep their order.
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish(session):
    if session.items and not session.config.option.collectonly:
        import kit

        kit.start_server()


def pytest_addoption(parser):
    parser.addoption(
        "--golden-write", action="store_true", help="write tests/golden/ anew, of the runs that -k chooses"
    )


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """make_model(arch="qwen3", hidden=64, layers=2, heads=4, seed=0) -> folder of such a model, made once."""
    from make_tiny_model import make_tiny_model

    folders = {}

    def make(arch: str = "qwen3", hidden: int = 64, layers: int = 2, heads: int = 4, seed: int = 0) -> Path:
        key = (arch, hidden, layers, heads, seed)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{arch}_{hidden}x{layers}")
            make_tiny_model(folders[key], hidden, layers, heads, seed, arch)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model) -> Path:
    """Folder of a Qwen3 with 0.1M parameters, one token per character."""
    return make_model()


@pytest.fixture(scope="session", params=["qwen3", "llama", "qwen2"])
def any_model(request, make_model) -> Path:
    """The same in each architecture in turn."""
    return make_model(arch=request.param)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the GSM8K files; $RL_CORE_TEST_DATA names another place."""
    folder = Path(os.environ.get("RL_CORE_TEST_DATA", ROOT.parent / "shared/data"))
    if not (folder / "gsm8k_train.jsonl.gz").exists():
        pytest.skip(f"no gsm8k_train.jsonl.gz in {folder}; set RL_CORE_TEST_DATA to a folder that has it")
    return folder


@pytest.fixture(scope="session")
def sort_data(tmp_path_factory) -> Path:
    from demo_data import demo_data

    folder = tmp_path_factory.mktemp("sort")
    for name, rows in demo_data("sort", 0, 32000, 64, 64).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="session")
def warm_model(tiny_model, sort_data, tmp_path_factory) -> Path:
    """The tiny model after 400 steps of SFT on the form of an answer."""
    out = tmp_path_factory.mktemp("warm") / "run"
    from rl_core.train import main

    sft = ["--algorithm", "sft", "--max_tokens", "8", "--max_prompt_tokens", "16", "--optim.lr", "3e-3"]
    flags = ["--data.train", str(sort_data / "sft.jsonl"), "--tasks_per_step", "64", "--num_steps", "400"]
    assert main(["--model", str(tiny_model), *sft, *flags, "--out", str(out), "--optim.schedule", "cosine"]) == 0
    return out / "hf/policy"


@pytest.fixture(scope="session")
def torchrun():
    """torchrun(num_ranks, "file.py" or "-m", *args, timeout_s=, check=) -> CompletedProcess with text output."""
    return run_ranks


def run_ranks(num_ranks: int, *args: str | Path, timeout_s: float = 180, check: bool = True, cwd: Path | None = None):
    """Runs a Python file or `-m module` under torchrun on gloo; fails with its output unless every rank ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += map(str, args)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    # A session of its own, so that a hang ends with its ranks and not only with their launcher.
    process = subprocess.Popen(
        command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"still running after {timeout_s} s: {' '.join(command)}\n{stdout}\n{stderr}")
    if check and process.returncode:
        pytest.fail(f"exit code {process.returncode}: {' '.join(command)}\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
