"""Marks around a model's thoughts: `<think>` and its counterparts in other families."""

from __future__ import annotations

TAGS = ("think", "thinking", "thought", "thoughts", "reason", "reasoning", "seed:think")
# Opening mark -> closing mark.
MARKS = {f"<{tag}>": f"</{tag}>" for tag in TAGS} | {
    "[THINK]": "[/THINK]",  # Magistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "◁think▷": "◁/think▷",  # Kimi
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
}
# Characters around a mark that a text quotes.
QUOTES = {"''", '""', "``", "“”", "‘’"}


def closing_at(text: str, mark: str, start: int = 0) -> int:
    """Index of the first closing mark from `start` that is not in quotes; -1 without one."""
    at = text.find(mark, start)
    while at > 0 and text[at - 1] + text[at + len(mark) : at + len(mark) + 1] in QUOTES:
        at = text.find(mark, at + 1)
    return at


def open_mark(prompt: str) -> str | None:
    """The opening mark that a prompt ends in, or None. A reply to such a prompt begins with
    thoughts."""
    prompt = prompt.rstrip()
    return next((mark for mark in MARKS if prompt.endswith(mark)), None)


def unclosed_mark(prompt: str, reply: str) -> str:
    """The opening mark, as a line, of thoughts that `prompt` opens and `reply` does not close;
    otherwise ""."""
    mark = open_mark(prompt)
    return f"{mark}\n" if mark and closing_at(reply, MARKS[mark]) < 0 else ""
