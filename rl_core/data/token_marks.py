"""Marks in the strings of special tokens that users write, so that they stay text."""

from __future__ import annotations

import re
from functools import lru_cache

from rl_core.types import AnyJSON

# Unicode keeps it for internal use: templates and tokenizers have no rule for it.
MARK = "\ufdd0"
# Values of "role" and "type" that templates compare, or put into a token's name.
_ROLES = ("system", "developer", "user", "assistant", "model", "chatbot", "tool", "ipython")
_PARTS = ("text", "image", "image_url", "video", "audio", "thinking", "reasoning", "refusal")
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_KNOWN = (*_ROLES, *_PARTS, *_TYPES, "function", "tool_call", "tool_response")


class TokenMarks:
    def __init__(self, special_token: re.Pattern[str]):
        self.special_token = special_token
        # Every turn renders a conversation's messages again.
        self._marked_text = lru_cache(512)(self._mark_text)

    def marked(self, value: AnyJSON) -> AnyJSON:
        """A message, or a part of one, in which Chat.encode() makes no string a special token."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            marked = {}
            for key, item in value.items():
                is_known = key in ("role", "type") and item in _KNOWN
                # Templates read the keys that are plain names.
                name = key if str(key).isidentifier() else self.marked(key)
                marked[name] = item if is_known else self.marked(item)
            return marked
        if isinstance(value, (list, tuple)):
            return [self.marked(v) for v in value]
        return value

    def _mark_text(self, text: str) -> str:
        return self.special_token.sub(lambda m: m[0][0] + MARK + self._marked_text(m[0][1:]), text)


def unmarked(text: str) -> str:
    """The rendering without marks."""
    return text.replace(MARK, "")
