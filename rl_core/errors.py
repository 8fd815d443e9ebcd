"""Texts of errors: similar names, tables of rules, extras that are not installed."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePath


def split(text: str | None) -> list[str]:
    """Items of a flag's value, separated by commas."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def printable(text: str, also: str = "") -> str:
    """The text with escapes for characters that a terminal cannot show."""
    return "".join(c if c.isprintable() or c in also else repr(c)[1:-1] for c in text)


def counted(n: int, noun: str) -> str:
    """`1 step`, `2,000 steps`"""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def keep_ends(text: str, most: int) -> str:
    """The text without its middle if it has more than `most` characters: the first line says what
    was done, and an exception stands at the end."""
    if len(text) <= most:
        return text
    start = most // 3
    return f"{text[:start]} ... {text[start + 5 - most :]}"


def without_middle(text: str, most: int) -> str:
    """The text, with a mark instead of its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of the known names."""
    known = list(known)
    near = near_name(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


def needs_column(name: str, row: Iterable[str], what: str = "") -> str:
    """`it needs a column 'x', WHAT`, the columns that there are, and the flag that reads one."""
    columns = list(map(str, row))
    near = near_name(name, columns)
    has = f"it has {', '.join(columns)}; read another"
    if name in columns:
        near, has = None, "it is null in this row; give a value, or read another"
    if near:
        has = f"did you mean {near!r}? Read it"
    return f"it needs a column {name!r}{what}; {has} by --data.columns {name}={near or 'NAME'}"


def near_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like `name`. Equal file suffixes do not count."""
    known = list(known)
    suffix = PurePath(name).suffix
    if not any(other.endswith(suffix) for other in known):
        suffix = ""
    stems = {other.removesuffix(suffix): other for other in known}
    close = difflib.get_close_matches(name.removesuffix(suffix), stems, n=1, cutoff=cutoff)
    return stems[close[0]] if close else None


def nearest_folder(path: Path) -> str:
    """`; did you mean models/qwen3?`, or "" if no neighbouring folder has a similar name."""
    names = []
    if path.parent.is_dir():
        names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def as_one_line(error: Exception) -> Exception:
    """Returns the error, which IPython then prints without a traceback, as the command line does.
    RL_CORE_DEBUG=1 keeps the traceback."""
    if not os.environ.get("RL_CORE_DEBUG"):
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        # IPython's hook; an attribute keeps the type, and a partial can be pickled.
        setattr(error, "_render_traceback_", partial(list, [text]))  # noqa: B010
    return error


def refuse(
    rules: Iterable[tuple[Callable[..., object], str]], prefix: str = "", **read: object
) -> None:
    for is_broken, message in rules:
        if is_broken(**read):
            raise ValueError(prefix + message.format(**read))


def require(library: str, flag: str, extra: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ValueError(
            f"{flag} needs {library}, which is not installed: pip install 'rl_core[{extra}]'"
        )
