"""Marks around a model's thoughts: `<think>` and other families' words for it."""

from __future__ import annotations

import re

TAGS = ("think", "thinking", "thought", "thoughts", "reason", "reasoning", "seed:think")
# Opening mark -> closing mark.
MARKS = {f"<{tag}>": f"</{tag}>" for tag in TAGS} | {
    "[THINK]": "[/THINK]",  # Magistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "◁think▷": "◁/think▷",  # Kimi
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
# gpt-oss's thoughts are messages of a channel; a recipient may stand before its name.
ANALYSIS = (
    r"(?:to=[^\s<]+\s*)?<\|channel\|>analysis(?:(?!<\|message\|>).)*<\|message\|>.*?"
    r"(?:<\|end\|>|<\|call\|>|\Z)"
)
# Thoughts up to their end, or to the text's, as a pattern that wants re.DOTALL and has no group.
THOUGHTS = "|".join(
    [*(rf"{re.escape(a)}.*?(?:{re.escape(b)}|\Z)" for a, b in MARKS.items()), ANALYSIS]
)


def open_mark(prompt: str) -> str | None:
    """The opening mark that a prompt ends in, so that what follows are thoughts."""
    prompt = prompt.rstrip()
    return next((mark for mark in MARKS if prompt.endswith(mark)), None)


def leading_thoughts(text: str, prompt: str = "") -> int:
    """Length of the thoughts that a turn behind `prompt` begins with: all of the turn if they do
    not close."""
    start, mark = 0, open_mark(prompt)
    if mark is None:
        start = len(text) - len(text.lstrip())
        mark = next((mark for mark in MARKS if text.startswith(mark, start)), None)
    if mark is None:
        return 0
    end = text.find(MARKS[mark], start)
    return len(text) if end < 0 else end + len(MARKS[mark])
