"""Marks around a model's thoughts: `<think>` and its counterparts in other families."""

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
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
}
THOUGHT_MARK = re.compile("|".join(re.escape(mark) for pair in MARKS.items() for mark in pair))
# gpt-oss writes thoughts as messages of the analysis channel; a recipient may precede its name.
ANALYSIS = (
    r"(?:to=[^\s<]+\s*)?<\|channel\|>analysis(?:(?!<\|message\|>).){0,200}<\|message\|>.*?"
    r"(?:<\|end\|>|<\|call\|>|\Z)"
)
# Thoughts that are not closed begin a line, or stand behind another mark: elsewhere a text mentions
# the mark, as it does in quotes.
PATTERNS = [
    pattern
    for opening, closing in MARKS.items()
    for pattern in (
        rf"(?<![`'\"]){re.escape(opening)}.*?{re.escape(closing)}",
        rf"(?:\A|(?<=[\n>\]]))[ \t]*{re.escape(opening)}.*\Z",
    )
]
# Pattern for thoughts up to their closing mark or the end of the text. It needs re.DOTALL and has
# no capturing group.
THOUGHTS = "|".join([*PATTERNS, ANALYSIS])


def without_thoughts(text: str) -> str:
    """The text without its thoughts; those that are not closed reach to its end. A closing mark
    alone ends thoughts that the prompt opened."""
    answer = re.sub(THOUGHTS, "", text, flags=re.DOTALL)
    for mark in MARKS.values():
        answer = answer.rpartition(mark)[2]
    return text if answer == text else answer.lstrip("\n")


def open_mark(prompt: str) -> str | None:
    """The opening mark that a prompt ends in, or None. A reply to such a prompt begins with
    thoughts."""
    prompt = prompt.rstrip()
    return next((mark for mark in MARKS if prompt.endswith(mark)), None)


def unclosed_mark(prompt: str, reply: str) -> str:
    """The opening mark, as a line, of thoughts that `prompt` opens and `reply` does not close;
    otherwise ""."""
    mark = open_mark(prompt)
    return f"{mark}\n" if mark and MARKS[mark] not in reply else ""


def leading_thoughts(text: str, prompt: str = "") -> int:
    """Length of the thoughts at the start of a turn that follows `prompt`; the length of the turn
    if they are not closed."""
    start, mark = 0, open_mark(prompt)
    if mark is None:
        start = len(text) - len(text.lstrip())
        mark = next((mark for mark in MARKS if text.startswith(mark, start)), None)
    if mark is None:
        return 0
    end = text.find(MARKS[mark], start)
    return len(text) if end < 0 else end + len(MARKS[mark])
