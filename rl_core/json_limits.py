"""Values of JSON that parsers accept and later code does not: halves of surrogate pairs, which no
tokenizer takes, and deep nesting, which templates and json.dumps() cannot follow."""

from __future__ import annotations

import re
from typing import Any

ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # JSON writes half of a pair, or a whole pair, so.
SURROGATES = re.compile("[\ud800-\udfff]")


def may_be_deeper(text: str, most: int) -> bool:
    """False if JSON text cannot hold more than `most` levels, as it has no more brackets."""
    return text.count("[") + text.count("{") > most


def nesting(value: Any) -> int:
    """Number of objects and lists within one another."""
    depth, level = 0, [value]
    while level:
        inside = [each for each in level if isinstance(each, (dict, list))]
        depth += bool(inside)
        level = []
        for each in inside:
            level += each.values() if isinstance(each, dict) else each
    return depth


def half_character(value: Any) -> str | None:
    """The first half of a surrogate pair in the texts and keys of a value."""
    level = [value]
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str) and (match := SURROGATES.search(each)):
                return match[0]
            if isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += each
        level = inner
    return None
