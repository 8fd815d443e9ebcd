"""Helpers of many tests: ranks that start at once, and files of a run.

Importing torch and rl_core takes seconds, so ranks are forked from a process that has done it. That
process is forked itself when pytest has collected the tests: then everything is imported, and no
test has started a thread yet.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import functools
import gc
import importlib
import io
import json
import logging
import os
import pkgutil
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import zstandard

ROOT = Path(__file__).parent.parent
# Environments and rows of tiny runs. Rewards vary from the first sample on, as replies of
# an untrained model do. Hooks are async: others run in threads, whose timing decides which requests
# an engine computes together, and so the rounding.
LETTERS = """
def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

async def reward_fn(completion):
    return sum(map(ord, completion)) / 1000
"""
DIGITS = LETTERS.replace(
    "sum(map(ord, completion))", "(300 * completion.count('4') + len(completion))"
)
ASK = LETTERS
ASK += """
max_turns = 3

async def interact(messages):
    return [{"role": "user", "content": str(len(messages))}]
"""
# Some of its states come again in other episodes of a group.
KEYED = ASK
KEYED += """
async def state_key(messages):
    return [len(messages), len(messages[-2:][0]["content"]) % 3]
"""
TALK = LETTERS.replace("(completion):", "(completion, actor):").replace(
    "/ 1000", "/ (1000 if actor == 'bob' else -1000)"
)
TALK += 'turns = "bob -> alice -> bob"\n'
ROWS = [
    {
        "messages": [
            {"role": "user", "content": str(n)},
            {"role": "assistant", "content": f"it is {n * n}"},
        ]
    }
    for n in range(3, 19)
]
DIALOGS = [
    {"messages": [*row["messages"], *row["messages"][::-1][1:], *row["messages"][1:]]}
    for row in ROWS
]
PAIRS = [{"prompt": str(n), "chosen": "a" * (n % 4 + 1), "rejected": f"{n} b"} for n in range(16)]
ENVS = {"letters": LETTERS, "digits": DIGITS, "ask": ASK, "keyed": KEYED, "talk": TALK}
LABELLED = [
    {"prompt": row["prompt"], "response": row[side], "helpfulness": n, "label": side == "chosen"}
    for row in PAIRS
    for n, side in enumerate(("rejected", "chosen"))
]
DATA = {"rows": ROWS, "dialogs": DIALOGS, "pairs": PAIRS, "labelled": LABELLED}

# A cut turn ends its episode, and an untrained model seldom ends a turn.
STOP = "--sampling.stop " + json.dumps(list(ascii_lowercase), separators=(",", ":"))
SORT = [
    "--env_path",
    str(ROOT / "envs/sort_digits.py"),
    "--max_tokens",
    "8",
    "--max_prompt_tokens",
    "16",
]
GRACE_S = 20.0  # between asking ranks to end and ending them
MAX_LINES, MAX_COMMAND = 40, 400  # lines of what failed ranks said, characters of their command


class ForkServer:
    """A process that forks others for tests. It must be made before the tests start threads."""

    def __init__(self):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.folder = tempfile.mkdtemp(prefix="rl_core_ranks_")
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            in_child(lambda: serve(theirs))
        theirs.close()
        self.replies = self.socket.makefile("r")

    def start(self, request: dict[str, Any]) -> int:
        """Process id of the launcher, which leads a separate session and process group."""
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        return int(self.replies.readline())


def in_child(run: Callable[[], Any]) -> None:
    """Never returns: ends the process with the status that run() gives, as the interpreter
    would."""
    code = 1
    try:
        atexit._clear()  # Exit handlers are the parent's.
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def serve(requests: socket.socket) -> int:
    """Forks a launcher for every line, until the tests are gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers that end are reaped by the kernel
    for line in requests.makefile("r"):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            run = launch if "ranks" in request else launch_program
            in_child(lambda request=request, run=run: run(request))
        requests.sendall(f"{pid}\n".encode())
    return 0


def launch(request: dict[str, Any]) -> int:
    """Forks the ranks, as torchrun does, and waits for them. Writes the exit status where the test
    looks for it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    redirect(request["out"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    receive, send = os.pipe()
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.close(send)
            in_child(lambda rank=rank: run_rank(request, rank, int(os.read(receive, 8))))
        pids.append(pid)
    from torch.distributed import TCPStore

    # Made after the ranks were forked: it starts a thread. Each read takes its eight digits.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:08d}".encode() * len(pids))
    code = wait_for_ranks(pids)
    write_result(request["out"] + ".code", code)
    return code


def launch_program(request: dict[str, Any]) -> int:
    """Forks a program, and writes its exit status where ForkedProcess looks for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        in_child(lambda: be_program(request))
    write_result(request["out"] + ".code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return 0


def be_program(request: dict[str, Any]) -> int:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(request["out"] + ".pid").write_text(str(os.getpid()))
    redirect(request["out"])  # Waits until the test reads.
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return run_program(*request["args"])


def write_result(path: str, value: object) -> None:
    Path(path + ".tmp").write_text(str(value))
    os.rename(path + ".tmp", path)


def redirect(out: str) -> None:
    for number, name in ((1, ".stdout"), (2, ".stderr")):
        file = os.open(out + name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))


def wait_for_ranks(pids: list[int]) -> int:
    """0 if all ranks end well. After the first that does not, the others are asked to end, and then
    made to."""
    left, code, deadline = set(pids), 0, None
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG if deadline else 0)
        if pid:
            left.discard(pid)
            code = code or abs(os.waitstatus_to_exitcode(status))
        if code and deadline is None:
            time.sleep(0.2)  # torchrun looks after its ranks every 0.1 s
            deadline = time.monotonic() + GRACE_S
            end_all(left, signal.SIGTERM)
        if not pid and deadline:
            if time.monotonic() > deadline:
                end_all(left, signal.SIGKILL)
            time.sleep(0.01)
    return code


def end_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run_rank(request: dict[str, Any], rank: int, port: int) -> int:
    for number, does in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, does)
    size = str(request["ranks"])
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GROUP_RANK": "0",
    }
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(
        Path(request["out"]).parent / str(rank) / "error.json"
    )
    try:
        return run_program(*request["args"])
    except Exception:
        # The first failure is the cause; the others follow from it.
        with suppress(FileExistsError), open(request["out"] + ".failure", "x") as file:
            file.write(f"rank {rank}: {traceback.format_exc()}")
        raise


def run_program(first: str, *args: str) -> int:
    if first == "-c":
        sys.argv = [first, *args[1:]]
        exec(args[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = list(args)
        sys.path.insert(0, os.getcwd())  # As Python does.
        if args[0] == "rl_core.train":  # Imported already, from the code under test.
            from rl_core.sampling.watchdog import exit_process
            from rl_core.train import main

            exit_process(main(args[1:]))
        if args[0] == "rl_core.tools.cli":
            from rl_core.tools.cli import command

            fork_ranks_of_torchrun()
            command()
        if args[0] == "torch.distributed.run":
            fork_ranks_of_torchrun()
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *args]
        sys.path.insert(0, str(Path(first).parent))
        run_file(Path(first))
    return 0


def fork_ranks_of_torchrun() -> None:
    """The real torchrun in this process then forks its ranks, in which imports are done."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessHandler

    SubprocessHandler._popen = lambda handler, args, env: ForkedRank(args, env)


class ForkedRank:
    """The part of Popen's interface that torchrun uses. args: those of `python -u -m MODULE`."""

    returncode: int | None = None

    def __init__(self, args: Sequence[str], env: dict[str, str]):
        self.pid = os.fork()
        if self.pid == 0:
            in_child(lambda: self.run(args[2:], env))

    def run(self, args: Sequence[str], env: dict[str, str]) -> int:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.disable(logging.NOTSET)
        # A store of the launcher must end with the launcher.
        kept = {0, 1, 2, sys.stdout.fileno(), sys.stderr.fileno()}
        for number in set(map(int, os.listdir("/proc/self/fd"))) - kept:
            with suppress(OSError):
                os.close(number)
        os.environ.clear()
        os.environ.update(env)
        return run_program(*args)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(0.01)
        return self.returncode


def run_file(path: Path) -> None:
    """Runs a file as a program whose asserts say their values, as in a test."""
    from _pytest.assertion import util
    from _pytest.assertion.rewrite import rewrite_asserts

    util._reprcompare = differing_items
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    rewrite_asserts(tree, source, str(path))
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(tree, str(path), "exec"), vars(main))


def differing_items(operator: str, left: Any, right: Any) -> str | None:
    """The message of an assert of two dicts, of which pytest alone would show the beginning."""
    if operator != "==" or not (isinstance(left, dict) and isinstance(right, dict)):
        return None
    names = [name for name in left | right if left.get(name) != right.get(name)]
    return "".join(f"\n{name}: {left.get(name)} == {right.get(name)}" for name in names)


server: ForkServer | None = None


def start_server() -> None:
    global server
    import torch
    from transformers import (  # noqa: F401
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import rl_core
    from rl_core.run.saving import run_files

    # The viewer's process takes longer than a tiny run.
    run_files.write_report = functools.partial(report_if_asked, run_files.write_report)
    for module in pkgutil.walk_packages(rl_core.__path__, "rl_core."):
        if ".sglang_images." in module.name:
            continue  # SGLang changes models of transformers when it is imported.
        with suppress(
            ImportError, ValueError
        ):  # Not installed here; without gRPC a client raises ValueError.
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    get_checkpoint_conversion_mapping("qwen3")  # Patterns of all models are compiled once.
    # Else each forked process looks through all of this, and copies it, for 0.3 s.
    gc.collect()
    gc.freeze()
    server = ForkServer()


def report_if_asked(write: Callable[[Path], None], out: Path) -> None:
    """Writes report.html of a run that is done if the test has set the variable KIT_REPORT."""
    if "KIT_REPORT" in os.environ:
        write(out)


def program_env() -> dict[str, str]:
    """Variables of programs that tests start."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


class RanksProcess:
    """Ranks that run: their output so far, their end, and signals to all of them. communicate() and
    returncode are those of Popen."""

    returncode: int | None = None

    def __init__(
        self,
        num_ranks: int,
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ):
        assert server is not None, "conftest.py starts it"
        self.args = list(map(str, args))
        self.out = tempfile.mkdtemp(dir=server.folder) + "/ranks"
        request = {
            "ranks": num_ranks,
            "args": self.args,
            "cwd": str(cwd or os.getcwd()),
            "env": program_env() | (env or {}),
        }
        self.pid = server.start(request | {"out": self.out})

    def text(self, kind: str) -> str:
        file = Path(f"{self.out}.{kind}")
        return file.read_text(errors="replace") if file.exists() else ""

    def ask_to_end(self) -> None:
        """Sends SIGTERM to every rank, as torchrun does. Without their launcher they would be
        killed."""
        ranks = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        end_all(set(map(int, ranks)), signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Sends a signal to every rank and to their launcher."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def poll(self) -> int | None:
        is_gone = not Path(f"/proc/{self.pid}").exists()
        code = self.text("code")
        return int(code) if code else -signal.SIGKILL if is_gone else None

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {timeout_s} s: {self.why()}")
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float) -> list[str]:
        self.returncode = self.wait(timeout)
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists(), "the launcher ends")
        return [self.text(kind) for kind in ("stdout", "stderr")]

    def both(self) -> str:
        return f"{self.text('stdout')}\n{self.text('stderr')}"

    def why(self) -> str:
        """The command, and the error of the first rank that failed, or the last lines that they
        printed."""
        command = " ".join(self.args)[:MAX_COMMAND]
        lines = self.text("failure").splitlines() or self.both().splitlines()
        lines = [line for line in lines if line.strip() and "it/s]" not in line]
        return "\n".join(
            [command, *lines[-MAX_LINES:], f"All that they printed: {self.out}.stdout, .stderr"]
        )


def run_ranks(
    num_ranks: int,
    *args: str | Path,
    timeout_s: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs a Python file or `-m module` on `num_ranks` forked ranks with gloo, as torchrun would, and
    returns their output and status. Fails with the error of the first that did not end well."""
    __tracebackhide__ = True
    ranks = RanksProcess(num_ranks, *args, cwd=cwd, env=env)
    code = ranks.wait(timeout_s)
    if check and code:
        raise AssertionError(f"exit code {code}: {ranks.why()}")
    return subprocess.CompletedProcess(ranks.args, code, ranks.text("stdout"), ranks.text("stderr"))


def of_ranks(num_ranks: int, file: str, name: str, *args: Any, **options: Any) -> list[Any]:
    """Results of a function of a test file on each of `num_ranks` ranks. The function gets the ranks,
    and the arguments as text."""
    __tracebackhide__ = True
    out = Path(tempfile.mkdtemp(dir=server.folder)) / "found.0"
    run_ranks(num_ranks, file, name, out, *args, **options)
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(num_ranks)]


def answer(functions: dict[str, Any]) -> None:
    """Runs such a file as a program, for of_ranks()."""
    from rl_core.distributed import close_ranks
    from rl_core.run.process.joining import init_ranks

    ranks, (name, out, *args) = init_ranks(60), sys.argv[1:]
    result = functions[name](ranks, *args)
    Path(out).with_suffix(f".{ranks.rank}").write_text(json.dumps(result))
    close_ranks(ranks)


def start_process(*args: str | Path) -> subprocess.Popen:
    """This Python with these arguments."""
    env = program_env() | {"PYTHONUNBUFFERED": "1"}
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    # A suite that was started in the background ignores SIGINT, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [sys.executable, *map(str, args)]
        return subprocess.Popen(command, env=env, cwd=ROOT, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


class ForkedProcess:
    """A forked start_process() with the parts of Popen's interface that tests use: imports are
    done."""

    def __init__(self, *args: str | Path):
        assert server is not None, "conftest.py starts it"
        self.args, self.returncode = args, None
        self.out = tempfile.mkdtemp(dir=server.folder) + "/program"
        pipes = [f"{self.out}.{name}" for name in ("stdout", "stderr")]
        for pipe in pipes:
            os.mkfifo(pipe)
        request = {"args": [*map(str, args)], "env": program_env(), "cwd": str(ROOT)}
        server.start(request | {"out": self.out})
        self.stdout, self.stderr = map(open, pipes)
        self.pid = int(Path(self.out + ".pid").read_text())

    def poll(self) -> int | None:
        file = Path(self.out + ".code")
        if self.returncode is None and file.exists():
            self.returncode = int(file.read_text())
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        wait_until(lambda: self.poll() is not None, f"{self.args} ends", timeout)
        return self.returncode

    def communicate(self, timeout: float) -> list[str]:
        texts = ["", ""]

        def read(number: int) -> None:
            texts[number] = (self.stdout, self.stderr)[number].read()

        threads = [threading.Thread(target=read, args=(n,), daemon=True) for n in (0, 1)]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return texts

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


AFRESH = """
import os, sys
os.environ.update({variables})
for name in [*sys.modules]:
    if name.partition(".")[0] in ("rl_core", "triton") and "._C" not in name or name[:5] == "test_":
        del sys.modules[name]
sys.modules |= dict.fromkeys({missing})
{code}
"""


def run_afresh(
    code: str, *args: str, missing: Sequence[str] = (), check: bool = True, **variables: str
) -> list[str]:
    """Output and errors of a program that imports rl_core, Triton and files of tests anew, where
    other imports are done. missing: packages as if not installed."""
    text = AFRESH.format(variables=variables, missing=[*missing], code=code)
    process = ForkedProcess("-c", text, *args)
    output, errors = process.communicate(timeout=300)
    assert not (check and process.returncode), errors[-3000:]
    return [output, errors]


def kill_session(process: subprocess.Popen | ForkedProcess | RanksProcess) -> None:
    """Ends a process that leads a session, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def load_rows(source: str, split: str = "train", **rollouts: Any) -> Sequence[dict]:
    """Rows of any kind of source."""
    from rl_core.data import row_files
    from rl_core.data.tasks.sources import load_other

    return row_files.load_rows(source, split, functools.partial(load_other, **rollouts))[0]


def wait_until(happened: Callable[[], Any], name: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {name}"
        time.sleep(0.05)


def words(*parts: Any) -> list[str]:
    """Arguments of a command: words("--model", path, "--seed 1"). Strings are split at spaces,
    items of lists are not."""
    result: list[str] = []
    for piece in parts:
        listed = (
            piece.split()
            if isinstance(piece, str)
            else piece
            if isinstance(piece, (list, tuple))
            else [piece]
        )
        result += map(str, listed)
    return result


def run(out: Path, *flags: Any, ranks: int = 1, status: int = 0) -> Path:
    """The folder of a run with these flags, which must end well, or here with this status: in this
    process, or on forked ranks. On several ranks weights are sharded, as on GPUs, if the flags do
    not say otherwise."""
    arguments = [*words(*flags), "--out", str(out)]
    if ranks > 1:
        if "--dp_replicate" not in arguments:
            arguments += ["--dp_replicate", "1"]
        run_ranks(ranks, "-m", "rl_core.train", *arguments)
    else:
        from rl_core.train import main

        assert main(arguments) == status, arguments
    return out


def rewind(out: Path, step: int) -> Path:
    """Removes the export and the later checkpoints of a run, and returns the checkpoint of this
    step."""
    checkpoint = out / f"checkpoints/step_{step:06d}"
    later = [folder for folder in checkpoint.parent.glob("step_*") if folder > checkpoint]
    assert checkpoint.is_dir() and later, (checkpoint, later)
    for folder in later:
        shutil.rmtree(folder)
    shutil.rmtree(out / "hf")
    return checkpoint


def resume_after(out: Path, step: int, *flags: Any, ranks: int = 1) -> Path:
    """Resumes a finished run from its checkpoint of this step, and returns a copy of the run as it
    was before."""
    before = shutil.copytree(out, out.with_name(f"{out.name}_before"))
    rewind(out, step)
    run(out, *flags, "--resume", ranks=ranks)
    return before


def steps(out: Path) -> list[dict]:
    """Lines of metrics.jsonl about learning."""
    return [row for row in metrics(out) if any(name.startswith("learn/") for name in row)]


def weights(out: Path, actor: str = "policy") -> dict[str, Any]:
    """Name -> tensor of an actor's exported weights or adapter."""
    from safetensors.torch import load_file

    return {
        n: w
        for file in sorted((out / "hf" / actor).glob("*.safetensors"))
        for n, w in load_file(file).items()
    }


def sample(token_ids: list[int], mask: list[int], advantage: float, group_id: str = "") -> Any:
    """A sample of which the masked tokens are trained, each with this advantage."""
    from rl_core.types import TrainingSample

    values = {
        "rollout_logprobs": [-4.6 * m for m in mask],
        "policy_versions": [m - 1 for m in mask],
    }
    values["advantages"] = [advantage * m for m in mask]
    return TrainingSample(token_ids=token_ids, loss_mask=mask, group_id=group_id, **values)


# Llama's layout twice, one family on padded rows, and mixtures of experts.
FAST_FAMILIES = ("llama", "seed_oss", "lfm2", "mixtral", "qwen3_moe")


def families(names: Iterable[str]) -> list[Any]:
    """Parameters of these model families; all but FAST_FAMILIES run with --slow alone."""
    import pytest

    return [
        pytest.param(name, marks=() if name in FAST_FAMILIES else pytest.mark.slow)
        for name in names
    ]


def make_learner(model: Path | str, *flags: Any, ranks: Any = None) -> Any:
    """The learner of a run with these flags, with its reference and critic if it has them; in fp32
    on a GPU too, unless a flag says otherwise."""
    import torch

    from rl_core.algorithms import make_algorithm
    from rl_core.config import parse_config
    from rl_core.learners import make_learner as make
    from rl_core.run.process.joining import init_ranks

    sizes = "--env_path x.py --out x --max_prompt_tokens 40 --max_tokens 60 --engine embedded"
    on_gpu = "--learner.dtype float32" if torch.cuda.is_available() else ""
    config = parse_config(words("--model", model, sizes, on_gpu, *flags))
    algorithm = make_algorithm(config.algorithm, config.algo)
    return make(config, algorithm, "policy", ranks or init_ranks(60))


def part_of(learner: Any, kind: str) -> Any:
    """The learner's part of this class; None if it has none."""
    return next((piece for piece in learner.extensions if type(piece).__name__ == kind), None)


def learn(learner: Any, *steps_of_samples: list, first: int = 0) -> list[dict[str, float]]:
    """The metrics of each step, after which the learner has learned from these samples."""
    result = []
    for step, samples in enumerate(steps_of_samples, first):
        minibatches, _ = learner.shard(samples)
        metrics = learner.annotate(minibatches)
        metrics |= learner.step(minibatches, step)
        result.append({name: metric.value for name, metric in metrics.items()})
    return result


def gradient(
    model: Path | str, samples: list, *flags: Any, ranks: Any = None
) -> tuple[float, dict[str, Any]]:
    """The loss of these samples under these flags, and its gradient by the names of the weights:
    what one step of SGD with rate 1 takes away."""
    learner = make_learner(
        model,
        "--optim.name sgd --optim.lr 1 --optim.betas 0,0 --optim.eps 0 --optim.max_grad_norm 0",
        *flags,
        ranks=ranks,
    )
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    [row] = learn(learner, samples)
    return row["loss"], {name: before[name] - weight for name, weight in learner.named_weights()}


def assert_same(grads: dict, wanted: dict, tolerance: float = 2e-6) -> None:
    """Asserts that gradients are equal by name. A weight that is not in `wanted` has the gradient
    0."""
    import torch

    assert wanted.keys() <= grads.keys(), wanted.keys() - grads.keys()
    assert max(value.abs().max() for value in wanted.values()) > 1e-4, "no gradient to compare"
    for name, value in grads.items():
        expected = wanted.get(name, torch.zeros_like(value)).float()
        torch.testing.assert_close(
            value.float(),
            expected,
            atol=tolerance,
            rtol=1e-4,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def metrics(out: Path) -> list[dict]:
    """Every line of a run's metrics.jsonl. Each name must have a row in the table of metrics."""
    from rl_core.run.display.metric_table import describe

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    unknown = {name for line in lines for name in line if name != "step" and describe(name) is None}
    assert not unknown, f"{unknown}: add a row to rl_core/run/display/metric_table.yaml"
    return lines


def prompts_of(turns: Sequence[Any]) -> list[list[int]]:
    """The prompt of each turn, as the engine got it."""
    prompts: list[list[int]] = []
    for number, turn in enumerate(turns):
        before = [] if turn.is_fresh else [*prompts[-1], *turns[number - 1].completion.token_ids]
        prompts.append([*before, *turn.new_ids])
    return prompts


def trajectories(file: Path) -> list[dict]:
    """A rollout file's rows, each turn with all that the actor saw before it as `prompt_ids`."""
    with zstandard.ZstdDecompressor().stream_reader(file.open("rb")) as stream:
        rows = [json.loads(line) for line in io.TextIOWrapper(stream)]
    for turns in (row["turns"] for row in rows):
        seen: list[int] = []
        for turn in turns:
            turn["prompt_ids"] = [*([] if turn["is_fresh"] else seen), *turn["new_ids"]]
            seen = turn["prompt_ids"] + turn["completion"]["token_ids"]
    return rows


def engine_spec(module: Any, **more: Any) -> Any:
    """The EngineSpec of a tiny model. `more`: fields of it and of its parts."""
    import torch

    from rl_core.engines.options import make_sampler
    from rl_core.sampling.engine import EmbeddedSpec, EngineSpec, ServerSpec

    usual = {
        "name": "policy",
        "model": "",
        "tokenizer": None,
        "num_slots": 8,
        "max_context_tokens": 128,
        "memory_frac": 0.5,
        "seed": 0,
    }
    usual |= {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "log": Path(),
        "start_timeout_s": 600,
    }
    more = {"sampler": make_sampler} | more
    parts = {}
    for field_name, cls in {"embedded": EmbeddedSpec, "server": ServerSpec}.items():
        names = [field.name for field in dataclasses.fields(cls) if field.name in more]
        parts[field_name] = cls(**{name: more.pop(name) for name in names})
    return EngineSpec(module=module, **usual | parts | more)


def longrope(config: Any, num_short: int) -> dict[str, Any]:
    """Rotary parameters for a model of this configuration: sequences of more than `num_short`
    tokens have other frequencies."""
    num_pairs = config.hidden_size // config.num_attention_heads // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + pair / num_pairs for pair in range(num_pairs)],
        "long_factor": [3.0 + pair for pair in range(num_pairs)],
        "original_max_position_embeddings": num_short,
    }


def make_skeleton(path: str) -> Any:
    """The shapes of a model's weights."""
    from rl_core.models.loading import load_model_config, on_meta

    return on_meta(load_model_config(path))


def embedded(module: Any, **more: Any) -> Any:
    """An embedded engine of a model."""
    from rl_core.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(engine_spec(module, **more))


STANDIN_SERVER = """
import glob, itertools, os
from aiohttp import web

DIARY = os.environ["STANDIN_DIARY"]

def run_server(port):
    tokens = itertools.count()

    async def answer(request):
        path, body = request.match_info["path"], await request.json() if request.can_read_body else {}
        with open(DIARY, "a") as file:
            print(port, path, body.get("model_path", ""), *body.get("tags", []), file=file)
        if deaths := glob.glob(f"{DIARY}.{path}.*"):
            os.remove(deaths[0])
            os._exit(3)
        token = 24 + next(tokens) % 10  # a digit
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, token]]}
        return web.json_response({"success": True, "output_ids": [token], "meta_info": meta})

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)
"""


STANDIN_ARGUMENTS = """
import os

def prepare_server_args(args):
    with open(os.environ["STANDIN_DIARY"] + ".starts", "a") as file:
        print(*args, file=file)
    return int(args[args.index("--port") + 1])
"""


class OwnServer:
    """A package named sglang: SGLang's server as a run starts it, which computes nothing, and keeps a
    diary of its requests. Each line of `starts` has the arguments of one start."""

    def __init__(self, folder: Path):
        self.diary, self.packages = folder / "diary", folder / "packages"
        self.starts = folder / "diary.starts"
        of_package = self.packages / "sglang/srt"
        of_package.mkdir(parents=True)
        for file in (of_package.parent / "__init__.py", of_package / "__init__.py"):
            file.write_text("")
        (of_package.parent / "launch_server.py").write_text(STANDIN_SERVER)
        (of_package / "server_args.py").write_text(STANDIN_ARGUMENTS)
        (of_package / "utils.py").write_text("def kill_process_tree(pid, include_parent): pass")
        facts = self.packages / "sglang-0.5.23.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")

    def dies_of(self, path: str, num_times: int = 1) -> None:
        """At its next answers to requests of this path."""
        for number in range(num_times):
            Path(f"{self.diary}.{path}.{number}").touch()

    def note(self, *name: object) -> None:
        with open(self.diary, "a") as file:
            print(*name, file=file)

    def lines(self) -> list[str]:
        return self.diary.read_text().splitlines()
