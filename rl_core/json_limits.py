"""Checks for JSON that parsers accept and later code does not: NaN and infinities, which are not
JSON, lone surrogates, which no tokenizer encodes, and nesting that is too deep for templates and
json.dumps(), which recurse."""

from __future__ import annotations

import json
import re

ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # Escape of a surrogate, lone or in a pair.
# Deepest nesting of JSON from others, because templates and json.dumps() recurse.
MAX_DEPTH = 128
SURROGATES = re.compile("[\ud800-\udfff]")


TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# json.loads() would make one for each call.
STRICT_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def check_value(value: object) -> None:
    """Raises ValueError for a value that is nested deeper than MAX_DEPTH levels, or that has a lone
    surrogate."""
    if nesting(value) > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if lone_surrogate(value):
        raise ValueError("a text has a lone surrogate, such as \\ud83d")


def may_be_deeper(text: str, most: int) -> bool:
    """False if JSON text has at most `most` opening brackets, and so no deeper nesting."""
    return text.count("[") + text.count("{") > most


def nesting(value: object) -> int:
    """Depth of nested objects and lists."""
    depth, level = 0, [value]
    while level:
        inside = [each for each in level if isinstance(each, (dict, list))]
        depth += bool(inside)
        level = []
        for each in inside:
            level += each.values() if isinstance(each, dict) else each
    return depth


def lone_surrogate(value: object) -> str | None:
    """The first lone surrogate in the strings and keys of a value, or None."""
    level = [value]
    while level:
        inner: list[object] = []
        for each in level:
            if isinstance(each, str) and (match := SURROGATES.search(each)):
                return match[0]
            if isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += each
        level = inner
    return None
