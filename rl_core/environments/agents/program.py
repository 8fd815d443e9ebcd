"""Runs an agent's command as a child of a reaper, so that none of its processes outlives the
episode."""

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

from rl_core.errors import nearest
from rl_core.sandbox import reaper
from rl_core.sandbox.output import Output
from rl_core.scratch import scratch_prefix
from rl_core.types import Row

# Environment variables that a program inherits. None holds keys, tokens or addresses of the run.
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
COLUMN = re.compile(r"\{\{|\}\}|\{(\w+)\}")  # A column's name in a command, or a brace.
# Time to read the rest of a program's output; an escaped process may hold the pipe open.
PIPE_TIMEOUT_S = 2.0


@dataclass(kw_only=True, slots=True)
class CommandResult:
    """A command's exit code and output; rewards receive it as `result`."""

    # After a signal: minus its number, or in a box 128 plus its number, as in a shell.
    exit_code: int
    stdout: str
    stderr: str
    # The working folder (a path inside the box, if any). It is removed after the rewards.
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
    num_left = max_chars
    for line in reversed(text.splitlines()):
        line = " ".join(line.split())
        if len(line) > num_left:
            half = num_left // 2
            kept += [f"{line[:half]} [...] {line[-half:]}"] if half > 100 or not kept else []
            break
        kept += [line] if line else []
        num_left -= len(line) + 1
    raised = RAISED.findall(text)
    if raised and not any(line.startswith(raised[-1][:100]) for line in kept):
        kept.append(f"{raised[-1][:max_chars]} [...]")
    return " ".join(reversed(kept))


def folder_of(path: str) -> Path:
    """The folder of an environment's file."""
    return Path(path).expanduser().resolve().parent


def files_named(command: Sequence[str], path: str) -> set[str]:
    """Words of a command that name files next to the environment's file, or in folders there."""
    env_folder = folder_of(path)
    names = set()
    for word in command:
        is_below = not os.path.isabs(word) and ".." not in word.split("/")
        if is_below and os.path.isfile(env_folder / word):
            names.add(word)
    return names


def placed(command: Sequence[str], path: str) -> list[str]:
    """The command with absolute paths of the files that it names, to run in another folder."""
    named = files_named(command, path)
    env_folder = folder_of(path)
    return [str(env_folder / word) if word in named else word for word in command]


def columns_named(command: Sequence[str]) -> set[str]:
    """Columns of the row that a command names, such as {question}."""
    columns = set()
    for word in command:
        columns.update(match[1] for match in COLUMN.finditer(word) if match[1])
    return columns


def filled(command: Sequence[str], row: Row, path: str) -> list[str]:
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
        content = row[name]
        return content if isinstance(content, str) else json.dumps(content)

    return [COLUMN.sub(value, word) for word in command]


async def run_command(
    command: Sequence[str], row: Row, environ: Mapping[str, str]
) -> CommandResult:
    """Runs the command in a new folder that holds the row as task.json. Raises FileNotFoundError
    if the program does not exist. Cancellation ends the program first."""
    workspace = Path(tempfile.mkdtemp(prefix=scratch_prefix("agent")))
    (workspace / TASK_FILE).write_text(json.dumps(row, default=str), encoding="utf-8")
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    episode_environ = {"HOME": str(workspace), "TMPDIR": str(workspace)}
    episode_environ["RL_CORE_TASK"] = str(workspace / TASK_FILE)
    stdout, stderr = Output(), Output()
    try:
        failure = Output()  # The errno of a command that cannot be started.
        async with reading(stdout) as out, reading(stderr) as err, reading(failure) as report:
            process = await asyncio.create_subprocess_exec(
                *below_reaper(command, report),
                cwd=workspace,
                env=kept | episode_environ | dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(report,),
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                # Processes that the program left behind hold the pipes, so end them first.
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
    """The command as a child of sandbox/reaper.py, which exits with this process."""
    python = [sys.executable, "-I", "-S", reaper.__file__]
    return [*python, str(os.getpid()), str(report), *command]


@asynccontextmanager
async def reading(output: Output) -> AsyncIterator[int]:
    """Gives the write end of a pipe for a program; `output` collects the written bytes. With a
    pipe of asyncio, process.wait() would wait for every process that holds the pipe."""
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
    """Kills the reaper and all its descendants. A program may have killed its reaper, so also
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
