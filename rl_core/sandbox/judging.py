"""Results of programs, judged by the outcomes of their processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.sandbox.pool import Outcome
from rl_core.sandbox.values import keep_ends

MAX_SHOWN = 200  # Characters of one text in a failure.


@dataclass(kw_only=True, slots=True)
class Result:
    """The result of a program.

    status: `ok` if it ended well and passed every test, otherwise why not: `wrong` (another value
    or output than expected), `error` (an exception, or an exit status other than 0), `syntax` (it
    does not compile), `exit` (it called sys.exit in a test), `timeout`, `memory`, `output` (more
    than the limit), `ended` (its process ended before its tests).
    """

    status: str
    passed: list[bool]  # One for each test.
    failures: list[str]  # One for each test: call, expected and actual value; "" if passed.
    stdout: str  # With tests (stdin, stdout) only of the first run.
    stderr: str
    wall_s: float  # Sum over all runs.
    cpu_s: float
    supervisor_s: float  # CPU seconds of the supervisors.

    @property
    def share(self) -> float:
        """Fraction of tests that passed, 0 to 1. Without tests, 1 if the program ended well."""
        return sum(self.passed) / len(self.passed) if self.passed else float(self.status == "ok")


def is_pair(test: Any) -> bool:
    return (
        isinstance(test, (tuple, list))
        and len(test) == 2
        and all(isinstance(text, str) for text in test)
    )


def text_of(data: bytes) -> str:
    return data.decode(errors="replace")


def as_result(outcomes: Sequence[Outcome], status: str, tests: list[tuple[bool, str]]) -> Result:
    """`tests`: (passed, reason of the failure) for each test."""
    return Result(
        status=status,
        passed=[passed for passed, _ in tests],
        failures=[reason for _, reason in tests],
        stdout=text_of(outcomes[0].stdout),
        stderr=text_of(outcomes[0].stderr),
        wall_s=sum(outcome.wall_s for outcome in outcomes),
        cpu_s=sum(outcome.cpu_s for outcome in outcomes),
        supervisor_s=sum(outcome.supervisor_s for outcome in outcomes),
    )


def status_of(outcome: Outcome, cpu_s: int) -> str:
    """The status of a process by the way it ended."""
    last = text_of(outcome.stderr[-2000:]).strip().rpartition("\n")[2]
    if outcome.cut:
        return "output"
    if outcome.timed_out or (outcome.exit == -9 and outcome.cpu_s > cpu_s - 0.5):
        return "timeout"
    if outcome.exit == 0:
        return "ok"
    if last.startswith("MemoryError") or b"std::bad_alloc" in outcome.stderr[-2000:]:
        return "memory"
    return "syntax" if last.startswith(("SyntaxError", "IndentationError", "TabError")) else "error"


def not_compiled(done: Outcome, num_tests: int) -> Result:
    status = "timeout" if done.timed_out else "syntax"
    reason = f"it does not compile: {keep_ends(text_of(done.stderr).strip(), MAX_SHOWN)}"
    return as_result([done], status, [(False, reason)] * num_tests)


def judge_runs(outcomes: list[Outcome], tests: Sequence[Any], cpu_s: int) -> Result:
    """The result of a whole program: one run for each test, or one run without tests."""
    statuses = [status_of(outcome, cpu_s) for outcome in outcomes]
    judged = []
    for n, (stdin, expected) in enumerate(tests):
        printed = text_of(outcomes[n].stdout)
        if statuses[n] == "ok" and lines_of(printed) != lines_of(expected):
            statuses[n] = "wrong"
        actual = (
            f"printed {shown(printed)}"
            if statuses[n] == "wrong"
            else f"{statuses[n]}, {last_line(outcomes[n])}"
        )
        reason = f"input {shown(stdin)}: expected {shown(expected)}, {actual}"
        judged.append((statuses[n] == "ok", "" if statuses[n] == "ok" else reason))
    status = next((status for status in statuses if status != "ok"), "ok")
    return as_result(outcomes, status, judged)


def lines_of(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")


def shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


def last_line(outcome: Outcome) -> str:
    line = text_of(outcome.stderr).strip().rpartition("\n")[2]
    return line[:MAX_SHOWN] or f"exit status {outcome.exit}"


def judge_calls(done: Outcome, checked: Outcome, tests: Sequence[Any], cpu_s: int) -> Result:
    """The result of tests of functions, read from the output of the tests' process. Raises
    ValueError if the tests themselves are broken."""
    ends = {
        "timeout": f"no answer within {cpu_s} s",
        "output": "too much output",
        "memory": "out of memory",
    }
    results, data = [], checked.back
    while len(data) >= 4 and len(data) >= (size := 4 + int.from_bytes(data[:4], "big")):
        results.append(json.loads(data[4:size]))
        data = data[size:]
    broken = next((row["broken"] for row in results if "broken" in row), None)
    if broken is not None:
        raise ValueError(f"the tests are broken: {broken}")
    ended = status_of(done, cpu_s)
    ended = ended if ended in ends else "timeout" if checked.timed_out else "ended"
    missing = {"passed": False, "status": "ended", "reason": ""}
    rows = results + [dict(missing) for _ in tests[len(results) :]]
    for row in rows:
        if row["status"] == "ended":
            row["status"] = ended
            row["reason"] += f" ({ends.get(ended) or last_line(done)})"
    status = next((row["status"] for row in rows if not row["passed"]), "ok")
    return as_result(
        [done, checked], status, [(row["passed"], row["reason"].strip()) for row in rows]
    )
