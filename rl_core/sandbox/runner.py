"""The process of the program: runs code that a model wrote and answers calls to its functions.
Nothing here is secret or trusted: whatever a program does to this module, it can send out only
plain values."""

from __future__ import annotations

import atexit
import linecache
import os
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from rl_core.sandbox.values import decode, encode, read_frame, receive, send, write_frame

FILE = "program.py"
MAX_TEXT = 300  # Characters of an exception's message.
NO_COMPILER = 127  # Exit status, as of a shell.


def run(job: socket.socket, rpc: socket.socket | None) -> int:
    """Runs the program that the job's first frame describes and returns the exit status."""
    wanted = receive(job)
    if wanted["do"] == "call":
        return answer_calls(wanted["code"], rpc)
    for name, text in wanted.get("files", {}).items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    if wanted["do"] == "compile":
        return compile_program(wanted["argv"], job)
    if wanted["do"] == "execute":
        binary = read_frame(job)
        if binary:
            with open(
                "program", "wb", opener=lambda path, flags: os.open(path, flags, 0o700)
            ) as file:
                file.write(binary)
        os.dup2(job.fileno(), 0)
        os.execvp(wanted["argv"][0], wanted["argv"])
    os.dup2(job.fileno(), 0)  # The program's stdin follows the frame.
    open_streams()
    return as_program(wanted["code"])


def open_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    lines = {"errors": "backslashreplace", "closefd": False, "buffering": 1}
    sys.stderr = open(2, "w", encoding="utf-8", **lines)  # noqa: SIM115


def execute(code: str, name: str) -> dict[str, Any]:
    """Runs code as a module with this __name__ and returns the module's names."""
    module = types.ModuleType(name)
    module.__file__ = FILE
    sys.modules[name], sys.argv = module, [FILE]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    exec(compile(code, FILE, "exec"), module.__dict__)
    return module.__dict__


def as_program(code: str) -> int:
    """Runs code as `python program.py` does and returns the exit status."""
    status = 0
    try:
        execute(code, "__main__")
        threading._shutdown()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        print(traceback_of(error), end="", file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF


def traceback_of(error: BaseException) -> str:
    """The traceback without the lines of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def compile_program(argv: list[str], job: socket.socket) -> int:
    """Compiles a program and sends the file, without running it."""
    try:
        status = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
    except FileNotFoundError:
        return NO_COMPILER
    if status == 0:
        with open("program", "rb") as file:
            write_frame(job, file.read())
    return status


def answer_calls(code: str, rpc: socket.socket) -> int:
    """Runs the module, then answers calls until the other side closes the socket."""
    open_streams()
    objects: list[Any] = []
    try:
        names = execute(code, "program")
    except BaseException as error:
        send(rpc, failure(error))
        return finish(1)
    send(rpc, {"value": None})
    while True:
        try:
            request = receive(rpc)
        except EOFError:
            return finish(0)
        try:
            answer = answer_call(request, names, objects)
        except BaseException as error:
            answer = failure(error)
        send(rpc, answer)


def finish(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def answer_call(
    request: dict[str, Any], names: dict[str, Any], objects: list[Any]
) -> dict[str, Any]:
    """Returns the plain value of a call, or the number of an object that stays here, and the
    arguments that the call changed."""

    def remote(name: str | None, number: int | None, path: Sequence[str]) -> Any:
        if name is not None and name not in names:
            raise NameError(f"name {name!r} is not defined")
        target = names[name] if name is not None else objects[number or 0]
        return reduce(getattr, path, target)

    args = [decode(value, remote) for value in request["args"]]
    verb, path = request["verb"], request["path"]
    target = remote(request["name"], request["object"], path[:-1] if verb == "set" else path)
    if verb == "call":
        kwargs = {name: decode(value, remote) for name, value in request["kwargs"].items()}
        value = target(*args, **kwargs)
    elif verb == "set":
        value = setattr(target, path[-1], args[0])
    elif verb == "list":
        value = list(target)
    else:
        value = target
    changed = {}
    for number, (arg, before) in enumerate(zip(args, request["args"], strict=True)):
        with suppress(TypeError):  # An argument with values of the program.
            if (now := encode(arg)) != before:
                changed[number] = now
    try:
        return {"value": encode(value), "changed": changed}
    except TypeError:
        objects.append(value)
        return {"object": len(objects) - 1, "type": type(value).__name__, "changed": changed}


def failure(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    line = next(
        (
            f.lineno
            for f in reversed(traceback.extract_tb(error.__traceback__))
            if f.filename == FILE
        ),
        None,
    )
    return {
        "error": kinds,
        "text": str(error)[:MAX_TEXT],
        "line": getattr(error, "lineno", None) or line,
    }
