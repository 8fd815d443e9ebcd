"""Thoughts in a model's text, between the marks of its family."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_core.data.thought_marks import MARKS, closing_at, open_mark

THOUGHT_MARK = re.compile("|".join(re.escape(mark) for pair in MARKS.items() for mark in pair))
# gpt-oss writes thoughts as messages of the analysis channel; a recipient may precede its name.
ANALYSIS = (
    r"(?:to=[^\s<]{1,200}\s*)?<\|channel\|>analysis(?:(?!<\|message\|>).){0,200}<\|message\|>.*?"
    r"(?:<\|end\|>|<\|call\|>|\Z)"
)
# An opening mark; `line` matches if it begins a line or stands behind another mark.
OPENING = r"(?P<line>(?:\A|(?<=[\n>\]]))[ \t]*)?(?<![`'\"])"
OPENING += rf"(?P<mark>{'|'.join(map(re.escape, MARKS))})"


def thought_spans(
    text: str, other: str = "(?!)"
) -> Iterator[tuple[int, int, re.Match[str] | None]]:
    """(start, end, None) of thoughts, and (start, end, match) of the pattern `other` elsewhere.
    Thoughts that are not closed reach to the end of the text if their mark begins a line or stands
    behind another mark: elsewhere a text mentions the mark, as it does in quotes."""
    pattern = re.compile(f"{OPENING}|{ANALYSIS}|(?P<other>{other})", re.DOTALL)
    unclosed = set()  # Marks that no later mark closes; a search for each would take long.
    end = 0
    while match := pattern.search(text, end):
        end, mark = match.end(), match["mark"]
        closing = -1 if mark is None or mark in unclosed else closing_at(text, MARKS[mark], end)
        if closing < 0:
            unclosed.add(mark)
        if mark is not None and closing >= 0:
            end = closing + len(MARKS[mark])
        elif mark is not None and match["line"] is None:
            continue
        elif mark is not None:
            end = len(text)
        yield match.start(), end, None if match["other"] is None else match


def without_thoughts(text: str) -> str:
    """The text without its thoughts. A closing mark that is the first of its kind, and not in
    quotes, ends thoughts that the prompt opened. Where no thoughts are open it is text."""
    answer, end = "", 0
    openable = set(MARKS.values())  # Closing marks of thoughts that the prompt may have opened.
    for start, next_end, _ in [*thought_spans(text), (len(text), len(text), None)]:
        outside, thoughts = text[end:start], text[start:next_end]
        for mark in list(openable):
            closing = closing_at(outside, mark)
            if closing >= 0:
                answer, outside = "", outside[closing + len(mark) :]
                openable.discard(mark)
        answer, end = answer + outside, next_end
        # Thoughts in which the mark was opened again may close again.
        openable -= {
            closed
            for mark, closed in MARKS.items()
            if thoughts.endswith(closed) and thoughts.count(mark) == 1
        }
    return text if answer == text else answer.lstrip("\n")


def leading_thoughts(text: str, prompt: str = "") -> int:
    """Length of the thoughts at the start of a turn that follows `prompt`; the length of the turn
    if they are not closed."""
    start, mark = 0, open_mark(prompt)
    if mark is None:
        start = len(text) - len(text.lstrip())
        mark = next((mark for mark in MARKS if text.startswith(mark, start)), None)
    if mark is None:
        return 0
    end = closing_at(text, MARKS[mark], start)
    return len(text) if end < 0 else end + len(MARKS[mark])
