"""Functions that several scripts share: flags, commands, files of rows, tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"rl_core needs Python >= 3.11; this is {sys.version.split()[0]}")

ROOT = Path(__file__).resolve().parent.parent


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, line by line."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=form, allow_abbrev=False)


def run(command: str, *more: str, is_quiet: bool = False) -> None:
    """Runs `python COMMAND` in the repository's root with one torch thread. Exits if it fails.
    is_quiet: shows the output only of a command that failed."""
    words = [*command.split(), *more]
    if not is_quiet:
        print("$ python", *words, flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    python = [sys.executable, *words]
    done = subprocess.run(python, cwd=ROOT, env=env, capture_output=is_quiet, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr if is_quiet else done.returncode)


def read_metrics(folder: str | Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.jsonl."""
    lines = (ROOT / folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path | None, value: object) -> None:
    """Writes the figures of a script if its flag --out names a file."""
    if path is not None:
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


class Table:
    """Prints a header, then each row as soon as it is measured. A missing value is "-".

    Example: Table(work="<12", cpu_s=">8.3f") has the columns `work` and `cpu_s`.
    """

    def __init__(self, **columns: str) -> None:
        self.columns = columns
        self.add({name: name for name in columns})

    def add(self, row: Mapping[str, object]) -> None:
        cells = []
        for name, form in self.columns.items():
            width = max(len(name), int(re.findall("[0-9]+", form)[0]))
            value = row.get(name, "-")
            text = value if isinstance(value, str) else "-" if value is None else f"{value:{form}}"
            cells.append(text.strip().ljust(width) if form[0] == "<" else text.rjust(width))
        print("  ".join(cells).rstrip(), flush=True)
