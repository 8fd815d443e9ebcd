"""Columns that are read next to a prompt."""

from __future__ import annotations

# Columns of the text of a system message before them.
SYSTEM_COLUMNS = ("system", "system_prompt")
# Columns that are read next to a prompt. A column of another kind needs another name.
CONTEXT_COLUMNS = (
    *SYSTEM_COLUMNS,
    "history",
    "tools",
    "chat_template_kwargs",
    "continue_final_message",
)


def renaming(column: str) -> str:
    """The end of an error about one of CONTEXT_COLUMNS that may hold something else."""
    return f"; a column of another kind is renamed by --data.columns my_{column}={column}"
