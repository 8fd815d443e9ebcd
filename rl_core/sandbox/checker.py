"""The process of the tests, which holds the expected values. No line of the program runs here. A
name that tests use and do not define stands for the program's: its calls go to the program's
process as plain values, and the results come back as plain values."""

from __future__ import annotations

import builtins
import reprlib
import socket
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

from rl_core.sandbox import pytest_files
from rl_core.sandbox.values import decode, encode, is_same, keep_ends, receive, send


class ShortRepr(reprlib.Repr):
    def repr_int(self, number: int, level: int) -> str:
        bits = number.bit_length()  # Python refuses to write more than 4,300 digits.
        return super().repr_int(number, level) if bits < 1000 else f"an integer of {bits} bits"


SHORT = ShortRepr()
SHORT.maxstring = SHORT.maxother = 120
MODULES = {
    "math",
    "cmath",
    "re",
    "random",
    "collections",
    "itertools",
    "functools",
    "datetime",
    "json",
    "sys",
}
# Exception of the program -> status of its tests.
STATUS = {"SyntaxError": "syntax", "MemoryError": "memory", "SystemExit": "exit"}
# Raised as Exception: the first two would end a map() of the tests early, and the third needs
# other arguments.
UNFIT = (StopIteration, StopAsyncIteration, UnicodeDecodeError)


class ProgramEnded(Exception):
    """The program's process is gone."""


class Program:
    """Calls into the program. `last` describes the result of the last call, `status` is the status
    of its failure, `error` its exception and `where` its line."""

    def __init__(self, rpc: socket.socket):
        self.rpc, self.last, self.status, self.broken = rpc, "", "wrong", None
        self.error: Exception | None = None
        self.where = ""
        try:
            self.read(receive(rpc))
        except Exception as error:
            self.broken = error
            self.status = "ended" if isinstance(error, (EOFError, ConnectionError)) else self.status

    def ask(
        self,
        name: str | None,
        number: int | None,
        path: tuple[str, ...],
        verb: str,
        args=(),
        kwargs=None,
    ) -> Any:
        if self.broken is not None:
            raise self.broken
        shown = ", ".join(
            [*map(SHORT.repr, args), *(f"{k}={SHORT.repr(v)}" for k, v in (kwargs or {}).items())]
        )
        call = ".".join([name or "object", *path]) + (f"({shown})" if verb == "call" else "")
        request = {
            "name": name,
            "object": number,
            "path": path,
            "verb": verb,
            "args": [encode(a, reference) for a in args],
        }
        kwargs = {k: encode(v, reference) for k, v in (kwargs or {}).items()}
        try:
            send(self.rpc, request | {"kwargs": kwargs})
            answer = receive(self.rpc)
        except (EOFError, ConnectionError):
            self.status, self.broken = "ended", ProgramEnded("the program ended before it answered")
            self.last = call
            raise self.broken from None
        try:
            value = self.read(answer, args)
        except Exception as error:
            self.last = f"{call} raised {type(error).__name__}"
            raise
        self.last = (
            f"{call} gave {value!r}"
            if isinstance(value, Remote)
            else f"{call} gave {SHORT.repr(value)}"
        )
        return value

    def read(self, answer: dict[str, Any], args=()) -> Any:
        if "error" in answer:
            kinds = list(map(str, answer["error"]))
            self.where = f" (line {answer['line']})" if answer.get("line") else ""
            self.status = next((STATUS[kind] for kind in kinds if kind in STATUS), "error")
            known = [getattr(builtins, kind, None) for kind in kinds]
            usable = [
                k
                for k in known
                if isinstance(k, type) and issubclass(k, Exception) and k not in UNFIT
            ]
            text = str(answer["text"])
            if self.status != "error" or not usable or kinds[0] != usable[0].__name__:
                text = f"{kinds[0]}: {text}"
            self.error = usable[0](text) if usable else Exception(text)
            vars(self.error)["kinds"] = kinds
            raise self.error
        for number, now in answer.get("changed", {}).items():
            change_in_place(args[int(number)], decode(now))
        return (
            Remote(self, None, int(answer["object"]))
            if "object" in answer
            else decode(answer["value"])
        )


def change_in_place(old: Any, now: Any) -> None:
    """Applies a change that the program made to its copy of an argument."""
    if type(old) is not type(now):
        return
    if isinstance(old, list):
        old[:] = now
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(now)


def reference(value: Any) -> dict[str, Any]:
    """JSON of a value that stays in the program. Raises TypeError for others."""
    if not isinstance(value, Remote):
        raise TypeError(f"{type(value).__name__} is not a plain value")
    return {"remote": value._where[1:]}


class Remote:
    """A function of the program, or a value of the program that is not plain. Supports calls,
    iteration and attributes. Equals nothing and is neither true nor false, so that no method of the
    program decides a test."""

    def __init__(
        self,
        program: Program,
        name: str | None,
        number: int | None = None,
        path: tuple[str, ...] = (),
    ):
        self._where = program, name, number, path

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute == "_where":
            object.__setattr__(self, attribute, value)
        else:
            program, name, number, path = self._where
            program.ask(name, number, (*path, attribute), "set", (value,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program, name, number, path = self._where
        return program.ask(name, number, path, "call", args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        program, name, number, path = self._where
        return program.ask(name, number, (*path, attribute), "get")

    def __iter__(self) -> Iterator[Any]:
        program, name, number, path = self._where
        return iter(program.ask(name, number, path, "list"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, key: Any) -> Any:
        return list(iter(self))[key]

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "the program returned an object that is not a plain value; tests cannot compare it"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse

    def __repr__(self) -> str:
        return "an object that is not a plain value"


def names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(
        *(names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    )


def stand_in(code: CodeType, names: dict[str, Any], program: Program) -> None:
    """Adds a Remote for each name that the tests use and do not define, except builtins and
    MODULES, which tests often use without an import."""
    for name in names_in(code) - names.keys() - vars(builtins).keys():
        names[name] = import_module(name) if name in MODULES else Remote(program, name)


def check(job: socket.socket, rpc: socket.socket) -> int:
    """Sends each test's result (passed, status, reason) as soon as the result is known, or `broken`
    if the tests do not compile or `setup` raises by its own fault."""
    wanted = receive(job)
    program, names = Program(rpc), {"__name__": "tests"}
    # Tests may write `from program import sum` for a name that is also a builtin.
    sys.modules["program"] = module = ModuleType("program")
    module.__getattr__ = lambda name: Remote(program, name)
    sys.modules["solution"] = module = ModuleType("solution")
    module.__getattr__ = partial(imported, program)
    sys.modules["pytest"] = pytest_files
    try:
        codes = [compile_test(test) for test in wanted["tests"]]
        if wanted["setup"]:
            setup = compile(wanted["setup"], "setup", "exec")
            stand_in(setup, names, program)
            exec(setup, names)
    except Exception as error:
        if error not in (program.error, program.broken):
            send(job, {"broken": f"{type(error).__name__}: {error}"})
            return 1
        program.broken = error
    for test, code in zip(wanted["tests"], codes, strict=True):
        send(job, run_test(test, code, dict(names), program))
    return 0


def imported(program: Program, name: str) -> Any:
    """A name of the module `solution`. Raises NameError or an error of the program."""
    if name.startswith("__"):
        raise AttributeError(name)
    value = program.ask(name, None, (), "get")
    return Remote(program, name) if isinstance(value, Remote) else value


def compile_test(test: str | dict[str, Any]) -> CodeType:
    return (
        compile(test, "test", "exec")
        if isinstance(test, str)
        else compile(test["call"].strip(), "test", "eval")
    )


def run_test(
    test: str | dict[str, Any], code: CodeType, names: dict[str, Any], program: Program
) -> dict[str, Any]:
    program.last, program.where, text = "", "", test if isinstance(test, str) else test["call"]
    if program.broken is None:
        program.status = "wrong"
    stand_in(code, names, program)
    try:
        if isinstance(test, str):
            exec(code, names)
            if program.broken is not None:
                raise program.broken
            return {"passed": True, "status": "ok", "reason": ""}
        value, expected = eval(code, names), decode(test["expected"])
        if not isinstance(value, Remote) and is_same(value, expected):
            return {"passed": True, "status": "ok", "reason": ""}
        reason = f"{text}: expected {SHORT.repr(expected)}, {program.last}"
    except AssertionError as error:
        reason = f"{text.strip()[-300:]}: {program.last} {error}".strip()
    except (Exception, SystemExit) as error:
        # With status "wrong" the test itself raised, after this call of the program.
        last = f"{program.last}: " if program.status == "wrong" and program.last else ""
        reason = f"{text.strip()[-300:]}: {last}{type(error).__name__}: {error}"
        reason += program.where
    return {"passed": False, "status": program.status, "reason": keep_ends(reason, 600)}
