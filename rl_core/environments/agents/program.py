"""Runs an agent's command below a reaper: no process of it outlives its episode."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import nearest
from rl_core.sandbox import reaper
from rl_core.sandbox.output import Output
from rl_core.scratch import scratch_prefix

# Of this process's variables, what a program gets: no keys, tokens and addresses of the run.
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "SSL_CERT_FILE")
TASK_FILE = "task.json"
# Characters of a command's output in an error.
MAX_REASON_CHARS = {"stderr": 1000, "stdout": 300}
VALID_SIGNALS = signal.valid_signals()
# The frames of a Python traceback, with the innermost, and the line that follows.
TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*  (?P<frame>File .*)\n(?:[ \t].*\n)*"
    r"(?P<error>\S.*)",
    re.MULTILINE,
)
RAISED = re.compile(r"^File \".*, line \d+.*: .*", re.MULTILINE)
PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")  # of a column in a command; or a brace
# For what a program wrote before it ended; a process that hid itself may hold the pipe for ever.
PIPE_TIMEOUT_S = 2.0


@dataclass(kw_only=True, slots=True)
class CommandResult:
    """How a command ended, as rewards get it by `result`."""

    # If a signal ended it: minus its number; in a box 128 plus its number, as in a shell.
    exit_code: int
    stdout: str
    stderr: str
    # The folder it ran in; of a box, a path inside. It is removed after the rewards.
    workspace: str

    @property
    def text(self) -> str:
        return self.stdout.strip()

    @property
    def end(self) -> str:
        """The exit code and the last lines that the command wrote, for an error."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        end = f"exit code {self.exit_code}"
        if number in VALID_SIGNALS:
            end += f" ({signal.Signals(number).name})"
        wrote = []
        for name, max_chars in MAX_REASON_CHARS.items():
            # The folder has another name in each episode, and equal reasons are counted together.
            text = getattr(self, name).replace(f"{self.workspace}/", "")
            if lines := last_lines(text, max_chars):
                wrote.append(f"{name}: {lines}")
        return f"{end}; {'; '.join(wrote) or 'it wrote nothing'}"


def last_lines(text: str, max_chars: int) -> str:
    """The last lines of an output in one line, after the last exception of Python if that comes
    before them. A line that does not fit keeps its beginning and end."""
    text = TRACEBACK.sub(r"\g<frame>: \g<error>", text)
    kept: list[str] = []
    room = max_chars
    for line in reversed(text.splitlines()):
        line = " ".join(line.split())
        if len(line) > room:
            half = room // 2
            kept += [f"{line[:half]} [...] {line[-half:]}"] if half > 100 or not kept else []
            break
        kept += [line] if line else []
        room -= len(line) + 1
    raised = RAISED.findall(text)
    if raised and not any(line.startswith(raised[-1][:100]) for line in kept):
        kept.append(f"{raised[-1][:max_chars]} [...]")
    return " ".join(reversed(kept))


def folder_of(path: str) -> Path:
    """Of an environment's file."""
    return Path(path).expanduser().resolve().parent


def files_named(command: Sequence[str], path: str) -> set[str]:
    """Parts of a command that name files beside the environment's file, or in folders there."""
    beside = folder_of(path)
    found = set()
    for part in command:
        is_beside = not os.path.isabs(part) and ".." not in part.split("/")
        if is_beside and os.path.isfile(beside / part):
            found.add(part)
    return found


def placed(command: Sequence[str], path: str) -> list[str]:
    """The command with the paths of the files that it names: it runs in another folder."""
    named = files_named(command, path)
    beside = folder_of(path)
    return [str(beside / part) if part in named else part for part in command]


def columns_named(command: Sequence[str]) -> set[str]:
    """Columns of the row that a command names, as {question}."""
    found = set()
    for part in command:
        found.update(match[1] for match in PLACE.finditer(part) if match[1])
    return found


def filled(command: Sequence[str], row: Mapping[str, Any], path: str) -> list[str]:
    """The command with each {column} replaced by the row's value; {{ and }} are braces. Raises
    ValueError for a column that the row lacks."""

    def value(match: re.Match) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name not in row:
            raise ValueError(
                f"{path}: agent: {match[0]}: the row has no such column; "
                f"{nearest(name, sorted(row))}"
            )
        found = row[name]
        return found if isinstance(found, str) else json.dumps(found)

    return [PLACE.sub(value, part) for part in command]


async def run_command(
    command: Sequence[str], row: Mapping[str, Any], environ: Mapping[str, str]
) -> CommandResult:
    """Runs the command in a new folder that holds the row as task.json. Raises FileNotFoundError
    if there is no such program. Cancelled, it ends the program first."""
    workspace = Path(tempfile.mkdtemp(prefix=scratch_prefix("agent")))
    (workspace / TASK_FILE).write_text(json.dumps(row, default=str), encoding="utf-8")
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    own = {"HOME": str(workspace), "TMPDIR": str(workspace)}
    own["RL_CORE_TASK"] = str(workspace / TASK_FILE)
    stdout, stderr = Output(), Output()
    try:
        failure = Output()  # the errno of a command that cannot be started
        async with reading(stdout) as out, reading(stderr) as err, reading(failure) as report:
            process = await asyncio.create_subprocess_exec(
                *below_reaper(command, report),
                cwd=workspace,
                env=kept | own | dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(report,),
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                # Before the pipes are read to their end: what still holds them was left behind.
                end_all(process, workspace)
        if number := failure.text():
            raise OSError(int(number), os.strerror(int(number)), command[0])
    except BaseException:
        remove(str(workspace))
        raise
    return CommandResult(
        exit_code=code, stdout=stdout.text(), stderr=stderr.text(), workspace=str(workspace)
    )


def below_reaper(command: Sequence[str], report: int) -> list[str]:
    """The command as a child of sandbox/reaper.py, which ends with this process."""
    python = [sys.executable, "-I", "-S", reaper.__file__]
    return [*python, str(os.getpid()), str(report), *command]


@asynccontextmanager
async def reading(output: Output) -> AsyncIterator[int]:
    """The writing end of a pipe for a program; at the end `output` has all that was written.
    A pipe of asyncio's own would make its wait() wait for whoever else holds the pipe."""
    read_end, write_end = os.pipe()
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    file = os.fdopen(read_end, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
    pumping = asyncio.ensure_future(pump(stream, output))
    try:
        yield write_end
    finally:
        os.close(write_end)
        await asyncio.wait({pumping}, timeout=PIPE_TIMEOUT_S)
        pumping.cancel()
        transport.close()


async def pump(stream: asyncio.StreamReader, output: Output) -> None:
    while data := await stream.read(1 << 16):
        output.add(data)


def end_all(process: asyncio.subprocess.Process, workspace: Path) -> None:
    """Kills the reaper with all processes below it. A program may have killed its reaper: then
    kills every process that was started with this workspace as its home."""
    if process.returncode is None:
        reaper.kill_descendants(process.pid)
        with suppress(ProcessLookupError):
            process.kill()
    mark = f"RL_CORE_TASK={workspace}/".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def remove(workspace: str) -> None:
    shutil.rmtree(workspace, ignore_errors=True)
