"""A program, its limits, and the commands of its language."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Language -> the file, the command that compiles it (or none), the command that runs it. Python
# runs in a fork of a warm process.
LANGUAGES: dict[str, tuple[str, list[str], list[str]]] = {
    "python": ("program.py", [], []),
    "bash": ("program.sh", [], ["bash", "program.sh"]),
    "cpp": (
        "program.cpp",
        ["g++", "-O2", "-std=c++17", "-o", "program", "program.cpp"],
        ["./program"],
    ),
}
COMPILE_S, COMPILE_MIB = 30.0, 1024
WORKERS_IN_BOX = 2  # Processes at once of a program in a remote box.


@dataclass(kw_only=True, slots=True)
class Limits:
    """Limits of one program. Each process also gets timeout_s, rounded up, in CPU seconds."""

    memory_mib: int = 512  # Address space of each process.
    processes: int = 16  # Threads count too.
    file_mib: int = 16
    disk_mib: int = 64  # Size of the private folder; no limit at the level landlock.
    open_files: int = 64
    output_kib: int = 256  # Limit of stdout, and of stderr.


@dataclass(kw_only=True, slots=True)
class Job:
    """A program and all its runs, as plain values."""

    code: str
    language: str
    timeout_s: float
    inputs: list[str] = field(default_factory=list)  # The stdin of each run.
    calls: list[str | dict[str, Any]] = field(default_factory=list)  # Tests of its functions.
    setup: str = ""
