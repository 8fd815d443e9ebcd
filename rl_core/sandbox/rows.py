"""Programs from replies, and tests from rows of data sets, for the sandbox."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from rl_core.sandbox import pytest_files

# Bounds keep the search linear in the length of a reply that repeats a character.
FENCE = re.compile(r"```[ \t]{0,9}([\w+#]{0,20})[^\n]{0,99}\n(.*?)(?:```|\Z)", re.DOTALL)
LANGUAGES = {"cpp": "cpp", "c++": "cpp", "cc": "cpp", "bash": "bash", "sh": "bash", "shell": "bash"}


def code_of(text: str) -> tuple[str, str]:
    """(the last fenced block, its language), or (the text after any thoughts, `python`)."""
    text = text.rpartition("</think>")[2]
    blocks = FENCE.findall(text)
    name, code = blocks[-1] if blocks else ("", text)
    return code, LANGUAGES.get(name.lower(), "python")


def function_tests(row: Mapping[str, Any], prompt: str = "") -> tuple[str, list[str]]:
    """(setup, tests) of a row as in HumanEval (`test`, `entry_point`, and `prompt` with helpers) or
    MBPP (`test_list`, and `test_setup_code`, `test_imports`, `code`), or in KodCode, whose `test`
    is a file for pytest that imports from `solution`. Each assert of HumanEval's check() is a test,
    after the statements between; each function or method test_* of a file is one."""
    if row.get("test_list"):
        defined = (
            set(re.findall(r"^def (\w+)", row.get("code", ""), re.MULTILINE))
            & vars(builtins).keys()
        )
        # MBPP asks for a function called sum.
        imports = [f"from program import {name}" for name in sorted(defined)]
        setup = [*row.get("test_imports", ()), row.get("test_setup_code", ""), *imports]
        return "\n".join(setup), list(row["test_list"])
    if not row.get("test"):
        raise ValueError(
            f"a row with {', '.join(row)} has no tests; give `test_list`, or `test` and "
            "`entry_point`, or a file for pytest as `test`"
        )
    tree = ast.parse(row["test"])
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        return pytest_tests(row["test"], tree)
    name, setup, tests = row["entry_point"], [], []
    for node in [*ast.parse(prompt).body, *tree.body]:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            check = node
        elif not (isinstance(node, ast.FunctionDef) and node.name == name):
            setup.append(ast.unparse(node))
    before = [f"{check.args.args[0].arg} = {name}"]
    for node in check.body:
        is_test = isinstance(node, (ast.Assert, ast.For))
        (tests if is_test else before).append(
            "\n".join([*before, ast.unparse(node)]) if is_test else ast.unparse(node)
        )
    if not tests:
        raise ValueError(
            f"check() of {name} holds no assert, so every program would pass; give a row with tests"
        )
    return "\n".join(setup), tests


def pytest_tests(text: str, tree: ast.Module) -> tuple[str, list[str]]:
    """(setup, tests) of a file for pytest. Raises ValueError if there are none, or for a name of
    pytest that rl_core.sandbox.pytest_files lacks."""
    names = []
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        functions = [each.name for each in inner if isinstance(each, ast.FunctionDef)]
        names += [prefix + name for name in functions if name.startswith("test")]
    if not names:
        raise ValueError(
            f"test={text[:99]!r} has no function check() or test_*; give a row with tests"
        )
    used = set(re.findall(r"\bpytest\.(\w+)", text))
    if unknown := sorted(used - vars(pytest_files).keys()):
        raise ValueError(
            f"test uses pytest.{unknown[0]}, which is not supported; leave the row out"
        )
    names = list(dict.fromkeys(names))
    ends = f"import pytest as _pytest\n_pytest.collect(globals(), {names!r})"
    return f"{text}\n{ends}", [f"_pytest.play(globals(), {name!r})" for name in names]


def stdin_tests(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(stdin, stdout) of a row's `tests` (DeepCoder), `verification_info` (PrimeIntellect),
    `official_tests` and `examples` (Codeforces), `input_output` (APPS, TACO), or `public_tests` and
    `private_tests` (CodeContests). Each may be JSON text: a list of pairs or of {"input",
    "output"}, or columns {"inputs", "outputs"}. Raises ValueError if there are none, and if they
    call a function."""
    if row.get("tests"):
        return pairs_in(row["tests"])
    verification = json_value(row.get("verification_info")) or {}
    tables = [
        verification.get("test_cases"),
        *(row.get(name) for name in ("official_tests", "examples", "input_output")),
        *(row.get(name) for name in ("public_tests", "private_tests")),
    ]
    pairs = list(chain.from_iterable(map(pairs_in, filter(None, tables))))
    if not pairs:
        raise ValueError(
            f"a row with {', '.join(row)} has no tests, so every program would pass; leave it out"
        )
    return list(dict.fromkeys(pairs))


def pairs_in(table: Any) -> list[tuple[str, str]]:
    """The pairs of one table of tests, or of its JSON text."""
    table = json_value(table)
    if isinstance(table, dict):
        cases = [table] if table.get("fn_name") else []
        names = ("inputs", "outputs") if "inputs" in table else ("input", "output")
        pairs = list(zip(*(table[name] for name in names), strict=True))
    else:
        cases = [case for case in table if isinstance(case, dict)]
        pairs = [(t["input"], t["output"]) if isinstance(t, dict) else tuple(t) for t in table]
    for case in cases:
        kind = case.get("type") or case.get("testtype")
        if case.get("fn_name") or kind in ("function_call", "functional"):
            raise ValueError(
                f"its tests call a function, {case.get('fn_name')!r}, and this environment runs "
                "programs that read stdin; leave the row out"
            )
    return pairs


def json_value(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
