"""Results from what a program's processes gave back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.sandbox.pool import Outcome

MAX_SHOWN = 200  # characters of one text in a failure


@dataclass(kw_only=True, slots=True)
class Result:
    """What a program did.

    status: `ok` if it ended well and passed every test, otherwise why not: `wrong` (another value
    or output than expected), `error` (an exception, or an exit status other than 0), `syntax` (it
    does not compile), `exit` (it called sys.exit in a test), `timeout`, `memory`, `output` (more
    than the limit), `ended` (its process ended before its tests).
    """

    status: str
    passed: list[bool]  # one for each test
    failures: list[str]  # one for each test: what was called, expected and given; "" if it passed
    stdout: str  # of the first run, if tests are (stdin, stdout) pairs
    stderr: str
    wall_s: float  # of all its runs
    cpu_s: float
    supervisor_s: float  # CPU seconds of what watched them

    @property
    def share(self) -> float:
        """Of its tests that passed, 0 to 1; without tests 1 if it ended well."""
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
    """`tests`: did it pass, and why not."""
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
    """Why a program ended."""
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
    reason = "it does not compile: " + text_of(done.stderr)[:MAX_SHOWN].strip()
    return as_result([done], status, [(False, reason)] * num_tests)


def judge_runs(outcomes: list[Outcome], tests: Sequence[Any], cpu_s: int) -> Result:
    """Of whole programs: one run for each test, or one run without tests."""
    statuses = [status_of(outcome, cpu_s) for outcome in outcomes]
    found = []
    for n, (given, expected) in enumerate(tests):
        printed = text_of(outcomes[n].stdout)
        if statuses[n] == "ok" and lines_of(printed) != lines_of(expected):
            statuses[n] = "wrong"
        what = (
            f"printed {shown(printed)}"
            if statuses[n] == "wrong"
            else f"{statuses[n]}, {last_line(outcomes[n])}"
        )
        reason = f"input {shown(given)}: expected {shown(expected)}, {what}"
        found.append((statuses[n] == "ok", "" if statuses[n] == "ok" else reason))
    return as_result(outcomes, next((status for status in statuses if status != "ok"), "ok"), found)


def lines_of(text: str) -> list[str]:
    """Without spaces at ends of lines, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")


def shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


def last_line(outcome: Outcome) -> str:
    said = text_of(outcome.stderr).strip().rpartition("\n")[2]
    return said[:MAX_SHOWN] or f"exit status {outcome.exit}"


def judge_calls(done: Outcome, checked: Outcome, tests: Sequence[Any], cpu_s: int) -> Result:
    """Of a program's functions, from what the tests' process says. Raises ValueError for tests that
    are broken themselves."""
    ends = {
        "timeout": f"no answer within {cpu_s} s",
        "output": "too much output",
        "memory": "out of memory",
    }
    found, data = [], checked.back
    while len(data) >= 4 and len(data) >= (size := 4 + int.from_bytes(data[:4], "big")):
        found.append(json.loads(data[4:size]))
        data = data[size:]
    broken = next((row["broken"] for row in found if "broken" in row), None)
    if broken is not None:
        raise ValueError(f"the tests are broken: {broken}")
    ended = status_of(done, cpu_s)
    ended = ended if ended in ends else "timeout" if checked.timed_out else "ended"
    rows = found + [{"passed": False, "status": "ended", "reason": ""} for _ in tests[len(found) :]]
    for row in rows:
        if row["status"] == "ended":
            row["status"] = ended
            row["reason"] += f" ({ends.get(ended) or last_line(done)})"
    status = next((row["status"] for row in rows if not row["passed"]), "ok")
    return as_result(
        [done, checked], status, [(row["passed"], row["reason"].strip()) for row in rows]
    )
