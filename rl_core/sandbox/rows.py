"""What environments need between data sets and the sandbox: the program in a reply, the tests in a
row."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping
from typing import Any

# Bounds keep it linear in the length of a reply that repeats a character for ever.
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
    MBPP (`test_list`, and `test_setup_code`, `test_imports`, `code`). Each assert of HumanEval's
    check() is a test, after the statements between."""
    if row.get("test_list"):
        defined = (
            set(re.findall(r"^def (\w+)", row.get("code", ""), re.MULTILINE))
            & vars(builtins).keys()
        )
        # MBPP asks for a function called sum.
        own = [f"from program import {name}" for name in sorted(defined)]
        return "\n".join(
            [*row.get("test_imports", ()), row.get("test_setup_code", ""), *own]
        ), list(row["test_list"])
    if not row.get("test"):
        raise ValueError(
            f"a row with {', '.join(row)} has no tests; give `test_list`, or `test` and "
            "`entry_point`"
        )
    name, setup, tests = row["entry_point"], [], []
    for node in [*ast.parse(prompt).body, *ast.parse(row["test"]).body]:
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


def stdin_tests(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(stdin, stdout) of a row's `tests` (pairs), `official_tests` and `examples` (Codeforces),
    `input_output` (APPS, TACO), or `public_tests` and `private_tests` (CodeContests)."""
    if row.get("tests"):
        return [tuple(pair) for pair in row["tests"]]
    found = [
        (t["input"], t["output"])
        for name in ("official_tests", "examples")
        for t in row.get(name) or ()
    ]
    tables = [row.get("input_output"), row.get("public_tests"), row.get("private_tests")]
    for table in filter(None, tables):
        table = json.loads(table) if isinstance(table, str) else table
        names = ("inputs", "outputs") if "inputs" in table else ("input", "output")
        found += zip(*(table[name] for name in names), strict=True)
    if not found:
        raise ValueError(
            f"a row with {', '.join(row)} has no tests, so every program would pass; leave it out"
        )
    return list(dict.fromkeys(found))
