"""The end of a process in which hooks run: in bounded time, and with an error status unless the
run came to its end."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit import ROOT, ForkedProcess, kill_session, metrics, run_ranks, words

SIZES = (
    "--data.shuffle false --max_tokens 4 --tasks_per_step 2 --group_size 2 --num_steps 6 "
    "--save_minutes 0 --save_every 100"
)
ROWS = (
    'import asyncio, ctypes, os, re, threading, time\ndef load_tasks(split): return [{"prompt": '
    "str(n)} for n in range(64)]\n"
)
SLOW_PATTERN = 're.match(r"(a+)+$", "a" * 40 + "b")'


@pytest.fixture
def command(tiny_model, tmp_path):
    """command(the reward function, *flags) -> arguments of a run with it, in tmp_path/run."""

    def of(code: str, *flags) -> list[str]:
        (tmp_path / "env.py").write_text(ROWS + code)
        arguments = words(
            "--model", tiny_model, "--env_path", tmp_path / "env.py", "--out", tmp_path / "run"
        )
        return ["-m", "rl_core.train", *arguments, *words(SIZES, *flags)]

    return of


def ended(*args) -> subprocess.CompletedProcess:
    """Output of a separate process, which must end by itself."""
    process = ForkedProcess(*args)
    try:
        stdout, stderr = process.communicate(timeout=90)
    finally:
        kill_session(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


HOLDING = f"""
import asyncio, re, sys, time
from rl_core.sampling import watchdog
from rl_core.sampling.hooks import Hook
from rl_core.types import Task

def slow_fn():
    {SLOW_PATTERN}

async def spinning_fn():
    while True:
        pass

def patient_fn():
    time.sleep(2.5)

async def main():
    function = globals()[sys.argv[1]]
    hook = Hook(name=sys.argv[1], function=function, path=__file__, timeout_s=100.0, ours=frozenset())
    await hook(Task(id="t", env="x", row={{}}, messages=[]), {{}})
    sys.setswitchinterval(1000)  # what follows keeps the lock, and no hook is running
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        pass
    print("done", flush=True)

__name__ = watchdog.MODULE_PREFIX + "holding"
watchdog.HELD_MARGIN_S = 1.5
watchdog.run_hooks(main(), 0.0)
"""


@pytest.mark.parametrize("name", ["slow_fn", "spinning_fn"])
def test_a_hook_that_lets_nothing_else_run_ends_the_process_with_its_stack(tmp_path, name):
    (tmp_path / "holding.py").write_text(HOLDING)
    done = ended(tmp_path / "holding.py", name)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert re.search(rf'Timeout .*File ".*holding.py", line \d+ in {name}', done.stderr, re.DOTALL)


def test_hooks_that_wait_and_work_without_hooks_may_take_long(tmp_path):
    (tmp_path / "holding.py").write_text(HOLDING)
    done = ended(tmp_path / "holding.py", "patient_fn")
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


SOON = """
import sys
from rl_core.sampling import watchdog
from rl_core.train import main
watchdog.HELD_MARGIN_S = 2.0
watchdog.exit_process(main(sys.argv[1:]))
"""


def test_a_run_ends_that_a_hook_holds(command, tmp_path):
    code = (
        f"def reward_fn(completion):\n    if os.path.exists('{tmp_path}/run/metrics.jsonl'): "
        f"{SLOW_PATTERN}\n    return 1"
    )
    flags = command(code, "--rollout.hook_timeout_s 0.5")[2:]
    done = run_ranks(1, "-c", SOON, *flags, check=False)
    assert done.returncode == 1 and len(metrics(tmp_path / "run")) == 1, done.stderr
    assert re.search(rf'File "{tmp_path}/env.py", line \d+ in reward_fn', done.stderr)


def test_a_run_that_is_done_ends_whatever_its_hooks_left_running(command, tmp_path):
    code = """
async def reward_fn(task):
    if task.id == "train/0":
        threading.Thread(target=time.sleep, args=(1000,), name="sleeper").start()
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    return int.from_bytes(os.urandom(4), "big")
"""
    done = ended(
        *command(
            code, "--num_steps 1 --rollout.hook_timeout_s 0.5 --rollout.max_failed_fraction 0.9"
        )
    )
    assert done.returncode == 0 and "saved step 1" in done.stdout, done.stderr
    assert f"left behind: reward_fn() of {tmp_path}/env.py" in done.stderr
    assert "without waiting for what still runs: sleeper" in done.stderr


def test_what_runs_hooks_runs_them_with_bounded_ends():
    """asyncio.run() waits for ever for a task that ignores its cancellation."""
    runs_no_hooks = {
        "verifier_cache.py",
        "data_hooks.py",
        "serve.py",
        "sandbox.py",
        "worker.py",
        "contained.py",
        "programs_main.py",
        "client.py",
        "tools/view.py",
        "tools/tinker.py",
        "reward_model.py",
        "tunnel.py",
        "vllm_server_main.py",
    }
    for file in (ROOT / "rl_core").rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        if any(ast.unparse(call.func) == "asyncio.run" for call in calls):
            assert runs_no_hooks & {file.name, f"{file.parent.name}/{file.name}"}, Path(
                file
            ).relative_to(ROOT)


WRAPPED = """
import asyncio, os, signal, threading, time, torch
from types import SimpleNamespace
from rl_core.distributed import Ranks
from rl_core.run.process.signals import SignalHandler

os.environ["LOCAL_WORLD_SIZE"] = "2"
ranks = Ranks(rank=0, size=2, device=torch.device("cpu"))
handler = SignalHandler(SimpleNamespace(ranks=ranks))
asyncio.run(handler.before_start())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
asyncio.run(handler.close())
print("done", flush=True)
"""


def test_a_rank_with_a_parent_of_its_own_misses_nobody(tmp_path):
    """Runs as under `torchrun --no-python wrapper.sh`, whose shell has one child. It saves after a
    signal."""
    (tmp_path / "rank.py").write_text(WRAPPED)
    (tmp_path / "wrapper.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, "
        "sys.argv[1]]).returncode)\n"
    )
    done = ended(tmp_path / "wrapper.py", tmp_path / "rank.py")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


TORN_APART = '''
import atexit, os, sys
from rl_core.sampling.watchdog import exit_process

class Thread:
    """As C++ does to a thread that lets go of a tensor in the interpreter's last moments."""

    def __del__(self):
        os.abort()

thread = Thread()
atexit.register(print, "a library's end")
print("the run's end")
'''


@pytest.mark.parametrize("end, status", [("exit_process", 3), ("sys.exit", -signal.SIGABRT)])
def test_exit_process_skips_interpreter_teardown(end, status):
    """The status is the run's, exit functions are called, and nothing printed is lost."""
    command = [sys.executable, "-c", f"{TORN_APART}{end}(3)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    if end == "exit_process":
        assert done.stdout.splitlines() == ["the run's end", "a library's end"]
