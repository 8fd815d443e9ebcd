"""Fixtures of several test files: tiny real models, real data, and real ranks. Session fixtures are
made once, whichever of pytest's workers needs them first."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent

# All that is imported and collected stays. Garbage is looked for once tests begin.
gc.disable()

# Set before torch is imported: tiny models gain nothing from more threads, and parallel ranks share
# the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Else a page for each tiny model that is loaded.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="run long learning runs and benchmarks too"
    )
    parser.addoption(
        "--golden-write",
        action="store_true",
        help="write tests/golden/ anew, of runs that -k chooses",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs an `async def` test in an event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# Files that take longest begin first, so that no worker is left with one at the end.
LONGEST = """
runs served faults rank_groups sandbox mesh service envs_tools boxes stale_policy kills agentbench
logprobs multi_lora server client train_api http_guard watchdog
""".split()
LONG = {f"test_{name}.py": n for n, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(config, items):
    # Stable: the rest keeps its order.
    items.sort(key=lambda item: LONG.get(item.path.name, len(LONG)))
    if not config.option.slow:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish(session):
    """Ranks are forked from a process that is made here, before any test starts a thread."""
    needs_ranks = "kit" in sys.modules or any(
        "torchrun" in item.fixturenames for item in session.items
    )
    if session.items and needs_ranks and not session.config.option.collectonly:
        import kit

        kit.start_server()
    gc.enable()


# Continuous integration names the reasons for which a test may be skipped there. Any other skip
# fails.
MAY_SKIP = os.environ.get("RL_CORE_MAY_SKIP")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return without_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return without_skip((yield))


def without_skip(report):
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if MAY_SKIP and is_skip and not re.search(MAY_SKIP, str(report.longrepr)):
        report.outcome, report.longrepr = (
            "failed",
            f"skipped where nothing may be: {report.longrepr}",
        )
    return report


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """made_once(name, make) -> the path of that name, which make(path) made for all workers of this
    session."""
    folder = tmp_path_factory.getbasetemp()
    folder = (
        folder.parent / "made_once" if "PYTEST_XDIST_WORKER" in os.environ else folder / "made_once"
    )
    folder.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        with FileLock(folder / f"{name}.lock", timeout=300):
            if not (folder / name).exists():
                temporary = folder / f"{name}.part"
                shutil.rmtree(temporary, ignore_errors=True)
                make(temporary)
                temporary.rename(folder / name)
        return folder / name

    return get


@pytest.fixture(scope="session")
def make_model(made_once):
    """make_model(arch="qwen3", hidden=64, layers=2, heads=4, seed=0) -> folder of such a model."""
    from make_tiny_model import make_tiny_model

    def make(
        arch: str = "qwen3", hidden: int = 64, layers: int = 2, heads: int = 4, seed: int = 0
    ) -> Path:
        name = f"{arch}_{hidden}x{layers}_{heads}_{seed}"
        return made_once(
            name, lambda out: make_tiny_model(out, hidden, layers, heads, seed, arch=arch)
        )

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
        pytest.skip(
            f"no gsm8k_train.jsonl.gz in {folder}; set RL_CORE_TEST_DATA to a folder that has it"
        )
    return folder


@pytest.fixture(scope="session")
def sort_data(made_once) -> Path:
    """Folder with rows of sort_digits: train.jsonl, eval.jsonl, sft.jsonl, and few.jsonl, 64 of the
    last."""
    from demo_data import demo_data

    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        data = demo_data("sort", 0, 32000, 64, 64)
        for name, rows in (data | {"few": data["sft"][:64]}).items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    return made_once("sort", make)


@pytest.fixture(scope="session")
def warm_model(tiny_model, sort_data, made_once) -> Path:
    """The tiny model after 400 steps of SFT on the form of an answer."""
    from kit import run, words

    sft = (
        "--algorithm sft --max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 64 --num_steps 400 "
        "--optim.lr 3e-3"
    )
    flags = words(
        "--model", tiny_model, sft, "--optim.schedule cosine --data.train", sort_data / "sft.jsonl"
    )
    return made_once("warm", lambda out: run(out, flags)) / "hf/policy"


@pytest.fixture(scope="module")
def places(make_model, tmp_path_factory) -> dict[str, str]:
    """Places that flags name: a folder with the environments and rows of kit.py, and three tiny models."""
    from kit import DATA, ENVS

    folder = tmp_path_factory.mktemp("places")
    for name, text in ENVS.items():
        (folder / f"{name}.py").write_text(text)
    for name, rows in DATA.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, other = (
        make_model(hidden=32, heads=4),
        make_model(hidden=32, heads=4, arch="llama", seed=1),
    )
    # bitsandbytes scales blocks of 64 weights; its kernels for CPUs take rows of other widths for
    # rows of whole blocks.
    wide = make_model(hidden=64)
    return {"dir": str(folder), "model": str(model), "other": str(other), "wide": str(wide)}


@pytest.fixture
def env_of(tmp_path, monkeypatch):
    """env_of(code) -> the environment of a file x.py in the current folder."""
    from rl_core.environments.env_file import load_env

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def make(code: str, name: str = "x.py", **options):
        Path(name).write_text(textwrap.dedent(code))
        return load_env(name, **options)

    return make


@pytest.fixture
def own_server(tmp_path, monkeypatch):
    """kit.OwnServer in place of SGLang."""
    from kit import ROOT, OwnServer

    from rl_core.engines import server_process

    monkeypatch.setattr(server_process, "POLL_S", 0.05)
    monkeypatch.setattr(server_process, "DYING_S", 0.3)
    result = OwnServer(tmp_path)
    monkeypatch.syspath_prepend(result.packages)
    monkeypatch.setenv("PYTHONPATH", f"{result.packages}:{ROOT}")
    monkeypatch.setenv("STANDIN_DIARY", str(result.diary))
    return result


@pytest.fixture(scope="session")
def torchrun():
    """kit.run_ranks, which forks the ranks: torchrun(num_ranks, "file.py" or "-m", *args) ->
    CompletedProcess."""
    from kit import run_ranks

    return run_ranks
