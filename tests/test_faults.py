"""What ends badly ends soon, says why once, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENV = """
import os, time
def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]
def reward_fn(completion):
    open(f"{folder}/seen_" + os.environ["RANK"], "w").close()
    {what}
    return float(len(completion))
"""


def start(folder: Path, model: Path, what: str, *flags: str) -> subprocess.Popen:
    """A run on two ranks in a process group of its own, once both ranks have scored an episode."""
    (folder / "env.py").write_text(ENV.replace("{folder}", str(folder)).replace("{what}", what))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "rl_core.train",
    ]
    command += [
        "--model",
        str(model),
        "--env_path",
        str(folder / "env.py"),
        "--out",
        str(folder / "run"),
        "--max_tokens",
        "8",
    ]
    command += ["--tasks_per_step", "8", "--num_steps", "100000", "--rollout.save", "false", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not all((folder / f"seen_{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return process


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(c) for c in children if b"rl_core.train" in Path(f"/proc/{c}/cmdline").read_bytes()]


def assert_all_ended(process: subprocess.Popen, within_s: float = 40) -> str:
    try:
        _, errors = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {within_s} s")
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return errors


def test_a_killed_rank_ends_the_others(tiny_model, tmp_path):
    process = start(tmp_path, tiny_model, "pass")
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    errors = assert_all_ended(process)
    assert "SIGKILL" in errors or "Signal 9" in errors, errors


def test_a_rank_that_stands_still_is_named_by_what_the_others_wait_for(tiny_model, tmp_path):
    process = start(tmp_path, tiny_model, "pass", "--timeout_s", "5")
    stopped = ranks_of(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(8)
    os.kill(stopped, signal.SIGCONT)  # torchrun would wait for half a minute before it kills what stands still
    errors = assert_all_ended(process)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert re.search(
        r"rank 0 waited in the phase '(step|generate|learn|sync|start, log or save)' for .* --timeout_s=5", lines[0]
    ), errors


def test_ctrl_c_ends_every_rank(tiny_model, tmp_path):
    process = start(tmp_path, tiny_model, "pass")
    os.kill(process.pid, signal.SIGINT)
    assert_all_ended(process)


def test_a_hook_that_hangs_on_one_rank_fails_its_episodes_and_then_the_run_on_both(tiny_model, tmp_path):
    hangs = "time.sleep(1000 if os.environ['RANK'] == '1' else 0)"
    process = start(tmp_path, tiny_model, hangs, "--rollout.hook_timeout_s", "2")
    errors = assert_all_ended(process)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "reward_fn() ran longer than 2 s" in lines[0], errors


def test_what_was_saved_survives_a_kill_and_is_gone_on_from(tiny_model, tmp_path):
    process = start(tmp_path, tiny_model, "pass", "--save_every", "1")
    saved = tmp_path / "run/checkpoints"
    while len(list(saved.glob("step_*"))) < 2:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    newest = max(int(p.name[5:]) for p in saved.glob("step_*"))
    command = [sys.executable, "-m", "rl_core.train", "--config", str(tmp_path / "run/config.yaml"), "--resume"]
    done = subprocess.run(
        [*command, "--num_steps", str(newest + 1)],
        cwd=ROOT,
        env=os.environ | {"RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (saved / f"step_{newest + 1:06d}/manifest.json").is_file()
