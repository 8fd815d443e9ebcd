"""An agent's command: its input, its end, and its traces afterwards: none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kit import wait_until

from rl_core import scratch
from rl_core.environments.agents.program import filled, run_command
from rl_core.sandbox import reaper
from rl_core.sandbox.output import MAX_OUTPUT_BYTES, Output

ROW = {"question": "1 + 2?", "answer": 3}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(command, environ=None):
    return asyncio.run(run_command(command, ROW, environ or {}))


def test_a_command_gets_its_columns_the_row_and_the_endpoint():
    command = filled(["say", "{question}", "{answer} {{x}}"], ROW, "f.py")
    assert command == ["say", "1 + 2?", "3 {x}"]
    code = (
        "import json, os; row = json.load(open(os.environ['RL_CORE_TASK'])); print(row['answer'])"
    )
    result = run(python(f"{code}; print(os.environ['OPENAI_BASE_URL'])"), {"OPENAI_BASE_URL": "u"})
    assert (result.exit_code, result.stdout) == (0, "3\nu\n")
    assert json.loads((Path(result.workspace) / "task.json").read_text()) == ROW


def test_a_column_that_the_row_lacks_is_named():
    with pytest.raises(ValueError, match=r"f.py: agent: \{questoin\}.*did you mean 'question'"):
        filled(["say", "{questoin}"], ROW, "f.py")


def test_a_command_sees_no_secret_of_the_run(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    result = run(python("import os; print(sorted(os.environ), os.getcwd(), os.environ['HOME'])"))
    assert "WANDB_API_KEY" not in result.stdout
    assert result.stdout.strip().endswith(f"{result.workspace} {result.workspace}")


def test_exit_code_and_errors_are_kept():
    result = run(python("import sys; sys.stderr.write('no'); sys.exit(7)"))
    assert (result.exit_code, result.stderr) == (7, "no")
    assert run(python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")).exit_code == -15


LONG = "a reason that is long" + " and more" * 60 + " END"
NOISE = "print('a line of a library ' * 20, file=sys.stderr);" * 5
RAISES = f"""
import sys
def f(n):
    if n == 0: raise ValueError({LONG!r})
    f(n - 1)
sys.excepthook = lambda *e: (sys.__excepthook__(*e), exec({NOISE!r}))
f(9)
"""
ENDS = {
    "exit": ("import sys; sys.exit('set X_KEY')", "exit code 1; stderr: set X_KEY"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "exit code -9 (SIGKILL); it wrote nothing"),
    "as in a shell": ("exit(139)", "exit code 139 (SIGSEGV); it wrote nothing"),
    "stdout": ("print('no tool'); exit(3)", "exit code 3; stdout: no tool"),
    "exception": (
        f"raise ValueError({LONG!r})",
        f'exit code 1; stderr: File "<string>", line 1, in <module>: ValueError: {LONG}',
    ),
    "exception before noise": (RAISES, f": ValueError: {LONG} [...] a line of a library"),
    "long line": ("exit('b' * 700 + 'c' * 700)", f"{'b' * 500} [...] {'c' * 500}"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_command_has_its_whole_reason(name):
    code, end = ENDS[name]
    assert end in run(python(code)).end


def test_a_program_that_is_missing_is_told():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run(["no-such-program"])


def test_output_keeps_its_beginning_and_end():
    result = run(python("print('begin' + 'x' * 5_000_000 + 'end')"))
    assert result.stdout.startswith("beginx") and result.stdout.endswith("xend\n")
    assert len(result.stdout) < MAX_OUTPUT_BYTES + 100
    assert f"[{5_000_000 + 9 - MAX_OUTPUT_BYTES} bytes left out]" in result.stdout


@pytest.mark.parametrize("sizes", [[4], [3, 3], [1] * 11, [20], [7, 5]])
def test_output_is_the_same_however_it_comes(sizes):
    text = bytes(range(97, 97 + sum(sizes)))
    output, position = Output(max_bytes=10), 0
    for size in sizes:
        output.add(text[position : position + size])
        position += size
    if len(text) <= 10:
        assert output.text() == text.decode()
    else:
        left_out = f"\n[{len(text) - 10} bytes left out]\n"
        assert output.text() == text[:5].decode() + left_out + text[-5:].decode()


def is_running(pid: int) -> bool:
    """True while a thread of the process runs; of a process that is killed a zombie may stay."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if file.read_text().rpartition(")")[2].split()[0] != "Z":
                return True
    return False


# A daemon: a grandchild in a new session, without variables and pipes of its parent.
DAEMON = """
import os, subprocess, sys
flags = dict(start_new_session=True, env={}, stdin=-3, stdout=-3, stderr=-3)
print(subprocess.Popen(["sleep", "1000"], **flags).pid, flush=True)
"""


# A daemon whose main thread ends, so that the process looks like a zombie; another thread runs.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[1000]).start()
ctypes.CDLL(None).pthread_exit(None)
"""
HEADLESS_DAEMON = f"""
import subprocess
flags = dict(start_new_session=True, env={{}}, stdin=-3, stdout=-3, stderr=-3)
pid = subprocess.Popen({python(HEADLESS)!r}, **flags).pid
while ") Z " not in open(f"/proc/{{pid}}/stat").read():
    pass
print(pid)
"""


LEFT_BEHIND = {
    "daemon": DAEMON,
    "headless daemon": HEADLESS_DAEMON,
    "child that holds the pipe": "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)",
}


@pytest.mark.parametrize("kind", LEFT_BEHIND)
def test_a_command_ends_with_all_that_it_started(kind):
    """No program ends by itself, so a command that waited for one would not return."""
    result = run(python(LEFT_BEHIND[kind]))
    wait_until(lambda: not is_running(int(result.stdout)), f"the end of the {kind}")


@pytest.fixture(params=["linux", "darwin"])
def platform(request, tmp_path, monkeypatch):
    """The platform that this process and its reapers take themselves to be on."""
    if request.param != sys.platform:
        file = tmp_path / "reaper.py"
        file.write_text(
            f"import runpy, sys; sys.platform = {request.param!r}\n"
            f"runpy.run_path({reaper.__file__!r}, run_name='__main__')\n"
        )
        monkeypatch.setattr(reaper, "__file__", str(file))
        monkeypatch.setattr(sys, "platform", request.param)
    return request.param


async def test_a_command_that_is_cancelled_ends_with_all_its_children(tmp_path, platform):
    pid_file = tmp_path / "pid"
    code = DAEMON.replace("print(", "print(os.getpid(), ").replace(
        "flush=True", f"file=open({str(pid_file)!r}, 'w'), flush=True"
    )
    command = python(f"{code}\nimport time; time.sleep(999)")
    work = asyncio.ensure_future(run_command(command, ROW, {}))
    await asyncio.to_thread(
        wait_until, lambda: pid_file.exists() and pid_file.read_text().strip(), "the pids"
    )
    work.cancel()
    await asyncio.wait({work})
    assert work.cancelled()
    pids = [int(pid) for pid in pid_file.read_text().split()]
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of all")


PLAYS = """
import asyncio, sys
from rl_core.environments.agents.program import reaper, run_command
reaper.__file__ = sys.argv[1]
asyncio.run(run_command(sys.argv[2:], {"answer": 3}, {}))
"""


def test_a_killed_run_leaves_no_process_and_the_next_cleans_up(tmp_path, platform):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    daemon = DAEMON.replace("flush=True", "file=open('../pid', 'w'), flush=True")
    command = [*python(PLAYS), reaper.__file__, *python(f"{daemon}\nimport time; time.sleep(999)")]
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)})
    pid_file = temporary / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), "the daemon's pid")
    assert len(list(temporary.glob("rl_core_agent_*/task.json"))) == 1
    scratch.remove_orphans(str(temporary))
    assert len(list(temporary.glob("rl_core_agent_*/task.json"))) == 1  # The owner is there.
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(int(pid_file.read_text())), "the daemon's end")
    scratch.remove_orphans(str(temporary))
    assert [path.name for path in temporary.iterdir()] == ["pid"]


def test_a_command_gets_the_signals_of_a_shell():
    """Python ignores SIGPIPE; a command that inherits that writes into closed pipes for ever."""
    line = run(["sh", "-c", "grep SigIgn /proc/self/status"]).stdout
    assert not int(line.split()[1], 16) & 1 << (signal.SIGPIPE - 1)


FOLDERS = {
    "rl_core_agent_{here}_1_{other}_abcd1234": False,  # Process 1 is another one by now.
    "rl_core_agent_{here}_{pid}_{start}_abcd1234": True,
    "rl_core_agent_{here}_4194304_1_abcd1234": False,
    "rl_core_agent_00000000_4194304_1_abcd1234": True,  # A folder of another machine.
    "rl_core_agent_abcd1234": True,
    "mine": True,
}


def test_only_folders_whose_owner_is_gone_are_removed(tmp_path):
    pid = os.getpid()
    start = int(Path(f"/proc/{pid}/stat").read_text().split()[21])
    _, _, _, here, *_ = scratch.scratch_prefix("agent").split("_")
    names = {"here": here, "pid": pid, "start": start, "other": start + 1}
    kept = []
    for name, stays in FOLDERS.items():
        folder = tmp_path / name.format(**names)
        (folder / "inside").mkdir(parents=True)
        kept += [folder.name] * stays
    scratch.remove_orphans(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
