"""Findings of prose per folder, which may only become fewer. `python tests/ground/test_prose.py [PATH
...]` lists them.

A finding is a docstring or a comment that begins with a clause, a comment behind code that continues
the line, a word of WORDS in prose, or a name of NAMES. Prose: docstrings, comments, texts of three
words and more, and pages in Markdown without their code."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADLESS = re.compile(
    r"(What|Whether|Those|That|Of|As|Which|How|If|So that|Where|When|Who|Whose)\b"
)
# A comment that begins with "If" or "When" may be a sentence.
CLAUSE = re.compile(r"(What|Whether|Those|Of|Which|How|So that|Whose)\b")
FRAGMENT = re.compile(
    "(of|by|that|as|with|without|in|on|at|from|for|to|before|after|beside|instead|which|whose|so|"
    r"than|if|where|when|and|or|but|not|also|too|only|then|both)\b"
)
WORDS = re.compile(
    r"\b(beside|(is|are|was|were) told|tells?|told|(goes|go|went|going) on|so many(-th)?|"
    r"(are|is) alike|of (its|their) own|what (is|was|are|were|it|they|an?|the)|has no --|"
    r"is no (JSON|model|actor|file|folder|flag|hook|number|list|dictionary)|here it is --|"
    r"whole cop(y|ies)|in the place of)\b"
)
NAMES = {"own", "how", "given", "found", "told", "said", "part", "place"}
NAMES |= {"what", "whole", "beside", "taken"}

# Findings of each folder or page. Lower a number as soon as its folder has fewer.
BUDGET = {
    "envs": 12,
    "rl_core": 6,
    "rl_core/config": 13,
    "scripts": 1,
    "tests": 3,
    "tests/agents": 1,
    "tests/ground": 2,
    "tests/service": 5,
    "tests/tools": 3,
}


def texts(tree: ast.Module, source: str) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of the prose of a Python file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield node.lineno, "docstring", node.value.strip()
            elif len(node.value.split()) >= 3:
                yield node.lineno, "message", node.value
    lines, last = source.splitlines(), -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_first = last != line - 1
            is_trailing = bool(lines[line - 1][:column].strip())
            kind = "trailing" if is_trailing else "first" if is_first else "comment"
            yield line, kind, token.string.lstrip("#! ").strip()
            last = -1 if is_trailing else line


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that the file binds: variables, attributes, arguments,
    functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of each finding in a Python file or a page in Markdown."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code:
                prose = re.sub("`[^`]*`", "", line)
                yield from ((number, "word", match[0]) for match in WORDS.finditer(prose))
        return
    tree = ast.parse(source)
    for line, kind, text in texts(tree, source):
        if kind == "docstring" and HEADLESS.match(text):
            yield line, "headless docstring", text.splitlines()[0]
        if kind == "first" and CLAUSE.match(text):
            yield line, "headless comment", text
        if kind == "trailing" and FRAGMENT.match(text):
            yield line, "fragment", text
        yield from ((line, "word", match[0]) for match in WORDS.finditer(text))
    yield from ((line, "name", name) for line, name in names(tree) if name in NAMES)


def files_of(where: Path) -> list[Path]:
    """The Python files and pages below a folder, or the file itself, without generated ones."""
    if where.is_file():
        return [where]
    every = [path for path in where.rglob("*") if path.suffix in (".py", ".md")]
    return sorted(path for path in every if not path.name.endswith("_pb2.py"))


def folder_of(path: Path) -> str:
    """The entry of BUDGET that a file counts for: two levels below rl_core and tests, else one."""
    parts = path.relative_to(ROOT).parts
    depth = 2 if parts[0] in ("rl_core", "tests") and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def counts() -> dict[str, int]:
    result: dict[str, int] = {}
    for top in ("rl_core", "envs", "scripts", "tests", "docs", "README.md"):
        for path in files_of(ROOT / top):
            if path != Path(__file__):
                folder = folder_of(path)
                result[folder] = result.get(folder, 0) + sum(1 for _ in findings(path))
    return result


def test_findings_of_prose_only_become_fewer():
    more = {name: num for name, num in counts().items() if num > BUDGET.get(name, 0)}
    assert not more, "python tests/ground/test_prose.py FOLDER lists them"


@pytest.mark.parametrize(
    "source, kinds",
    [
        ('"""What the file does."""', ["headless docstring"]),
        ('"""Returns the file."""', []),
        ("x = 1  # of the file", ["fragment"]),
        ("x = 1  # The size of the file.", []),
        ("# Whether it is told\n# of the file\nx = 1", ["headless comment", "word"]),
        ('raise ValueError(f"{x} is no JSON and goes on")', ["word", "word"]),
        ("found = 1\nself.own = found\ndef f(how): pass", ["name", "name", "name"]),
    ],
)
def test_a_finding_is_counted(tmp_path, source, kinds):
    path = tmp_path / "file.py"
    path.write_text(source)
    assert [kind for _, kind, _ in findings(path)] == kinds
    page = tmp_path / "page.md"
    page.write_text("Runs beside it.\n```\nruns beside it\n```\n`beside`")
    assert [line for line, _, _ in findings(page)] == [1]


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["rl_core"]:
        for path in files_of((ROOT / argument).resolve()):
            for line, kind, text in findings(path):
                print(f"{path.relative_to(ROOT)}:{line}: {kind}: {text[:120]}")
