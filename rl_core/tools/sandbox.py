"""rl-core sandbox run FILE: runs a program as environments run what models write. It reads stdin;
the exit status is 0 if it ended well. rl-core sandbox level: says how this machine closes programs
in. docs/sandbox.md"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rl_core.sandbox import Limits, Sandbox
from rl_core.sandbox.isolation import LEVELS, REMOTE
from rl_core.tools.parser import Parser

WITHOUT_SECCOMP = (
    "without seccomp: system calls are not filtered, because pyseccomp is not installed where the "
    "level sees it "
)
WITHOUT_SECCOMP += (
    "(not by PYTHONPATH or a .pth file); pip install 'rl_core[sandbox]' into the run's Python"
)
SUFFIXES = {".py": "python", ".sh": "bash", ".cpp": "cpp", ".cc": "cpp"}


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a file: .py, .sh or .cpp")
    run.add_argument("file", type=Path)
    run.add_argument(
        "--timeout_s",
        type=float,
        default=5.0,
        help="wall-clock seconds, and CPU seconds rounded up",
    )
    run.add_argument(
        "--memory_mib", type=int, default=Limits().memory_mib, help="address space of each process"
    )
    run.add_argument(
        "--language", choices=sorted(set(SUFFIXES.values())), help="default: by the file's suffix"
    )
    for command in (run, commands.add_parser("level", help="print the level of isolation")):
        command.add_argument(
            "--level",
            choices=[*LEVELS, *(REMOTE if command is run else ())],
            default="",
            help="default: the strongest that works here",
        )
    args = parser.parse_args(argv)
    sandbox = Sandbox(level=args.level)
    try:
        if args.command == "level":
            level = sandbox.start()
            print(f"{level}: {LEVELS[level]}")
            if not sandbox.has_seccomp:
                print(WITHOUT_SECCOMP)
            return 0
        sandbox.limits.memory_mib = args.memory_mib
        language = args.language or SUFFIXES.get(args.file.suffix, "python")
        stdin = "" if sys.stdin.isatty() else sys.stdin.read()
        code = args.file.read_text(encoding="utf-8")
        result = asyncio.run(
            sandbox.run(code, stdin=stdin, timeout_s=args.timeout_s, language=language)
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    finally:
        sandbox.close()
    print(result.stdout, end="", flush=True)
    print(result.stderr, end="", file=sys.stderr)
    print(f"{result.status}, {result.wall_s:.3f} s, {result.cpu_s:.3f} CPU s", file=sys.stderr)
    return 0 if result.status == "ok" else 1
