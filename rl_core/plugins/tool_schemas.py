"""JSON schemas of tools that are Python functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def schemas(tools: Sequence[dict | Callable], path: str) -> list[dict[str, Any]]:
    """The tools as templates read them. Raises ValueError for a function that lacks type hints or a
    docstring."""
    found = []
    for tool in tools:
        try:
            found.append(tool if isinstance(tool, dict) else schema_of(tool))
        except (
            ModuleNotFoundError
        ) as error:  # where environments are served, transformers need not be
            raise ValueError(
                f"{path}: tools: {error}; pip install transformers, or write the OpenAI schemas"
            ) from error
        except Exception as error:
            name = getattr(tool, "__name__", tool)
            raise ValueError(
                f"{path}: tools: {name}(): {' '.join(str(error).split())}; a tool needs a type "
                "hint for each argument and a "
                "docstring in Google's format, with what it does and `Args:` with each argument"
            ) from error
    return found


def schema_of(tool: Callable) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    return get_json_schema(tool)
