"""The part of pytest that tests in data sets use. The checker imports it as `pytest`: a program's
tests run in images without that package."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any


def collect(scope: dict[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError if a test asks for a fixture that the file does not define."""
    for name in names:
        head, _, method = name.partition(".")
        function = getattr(scope[head], method) if method else scope[head]
        known = {"self", *cases_of(function)[0]}
        for asked in set(inspect.signature(function).parameters) - known:
            fixture = scope.get(asked)
            if not (inspect.isfunction(fixture) and hasattr(fixture, "autouse")):
                raise ValueError(f"{name}() asks for {asked}, which is not a fixture of the file")


def play(scope: dict[str, Any], name: str) -> None:
    """Runs a test function, or the method TestClass.test_name, with each case of its parameters."""
    head, _, method = name.partition(".")
    function = scope[head]
    if method:
        instance = scope[head]()
        for prepare in ("setUp", "setup_method"):
            if hasattr(instance, prepare):
                getattr(instance, prepare)()
        function = getattr(instance, method)
    for value in list(scope.values()):
        if inspect.isfunction(value) and getattr(value, "autouse", False):
            filled(value, scope, {})
    for case in cases_of(function):
        filled(function, scope, case)


def cases_of(function: Any) -> list[dict[str, Any]]:
    return getattr(function, "cases", None) or [{}]


def filled(function: Callable[..., Any], scope: dict[str, Any], case: dict[str, Any]) -> Any:
    """The result of a call with a case's arguments and fixtures."""
    asked = [name for name in inspect.signature(function).parameters if name not in case]
    result = function(**case, **{name: filled(scope[name], scope, {}) for name in asked})
    return next(result) if inspect.isgenerator(result) else result


class Raises:
    """Context in which an exception of these kinds is raised; `value` is the exception."""

    def __init__(self, expected: Any, match: str | None):
        self.expected = expected if isinstance(expected, tuple) else (expected,)
        self.match, self.value = match, None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError("it raised nothing")
        if not any(is_kind(error, kind) for kind in self.expected):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{self.match!r} is not in {str(error)!r}")
        self.value = error
        return True


def is_kind(error: BaseException, kind: Any) -> bool:
    """True if the exception is of this class, which may be the program's. `kinds` names all classes
    of an exception of the program."""
    kinds = getattr(error, "kinds", None)
    if kinds is None:
        return isinstance(kind, type) and isinstance(error, kind)
    return (kind.__name__ if isinstance(kind, type) else kind._where[1]) in kinds


def raises(expected: Any, *call: Any, match: str | None = None, **kwargs: Any) -> Raises:
    context = Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **kwargs)
    return context


class Approx:
    """Equal to numbers within a tolerance, also in lists, tuples and dicts."""

    def __init__(self, expected: Any, rel: float | None, abs: float | None):
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, value: Any) -> bool:
        expected = self.expected
        if isinstance(expected, dict):
            return expected.keys() == value.keys() and all(
                value[key] == self.like(expected[key]) for key in expected
            )
        if isinstance(expected, (list, tuple)):
            pairs = zip(value, expected, strict=False)
            return len(value) == len(expected) and all(a == self.like(b) for a, b in pairs)
        if not isinstance(expected, (int, float, complex)) or value == expected:
            return value == expected
        rel = self.rel if self.rel is not None else 0.0 if self.abs is not None else 1e-6
        bound = max(rel * abs(expected), 1e-12 if self.abs is None else self.abs)
        return abs(value - expected) <= bound < float("inf")

    def like(self, expected: Any) -> Approx:
        return Approx(expected, self.rel, self.abs)


def approx(expected: Any, rel: float | None = None, abs: float | None = None) -> Approx:
    return Approx(expected, rel, abs)


class Param(tuple):
    """The values of one case."""


def param(*values: Any, **_: Any) -> Param:
    return Param(values)


class Mark:
    """The decorators `pytest.mark.NAME`. All but parametrize do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def decorator(*args: Any, **_: Any) -> Any:
            return args[0] if args and callable(args[0]) else lambda function: function

        return decorator

    def parametrize(self, names: str | Sequence[str], values: Any, **_: Any) -> Callable[..., Any]:
        names = re.findall(r"\w+", names) if isinstance(names, str) else names

        def decorator(function: Any) -> Any:
            function.cases = [old | new for old in cases_of(function) for new in cases]
            return function

        is_single = len(names) == 1
        rows = [[v] if is_single and not isinstance(v, Param) else v for v in values]
        cases = [dict(zip(names, row, strict=True)) for row in rows]
        return decorator


mark = Mark()


def fixture(function: Any = None, *, autouse: bool = False, **_: Any) -> Any:
    def decorator(function: Any) -> Any:
        function.autouse = autouse
        return function

    return decorator(function) if function else decorator


def fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)
