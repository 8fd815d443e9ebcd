"""The tokens that end an assistant's turn, as a chat template writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from rl_core.data.pretrained import Tokenizer
from rl_core.data.rendering import PROBE
from rl_core.types import Message

# Stands for thoughts, as PROBE for a text.
THOUGHT_PROBE = "\ufdd2"


class TurnEnds:
    """The tokens with which a chat template ends an assistant's turn: after the last reply, after a
    reply in the middle of a conversation, and after tool calls. If the next header ends a turn, the
    header's token; if nothing does, the tokenizer's end token."""

    def __init__(self, tokenizer: Tokenizer, render: Callable[[list[Message]], str]):
        """render(messages) returns the template's text without a generation prompt, or raises
        ValueError."""
        self._render_messages = render
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
        tokens = sorted(self._added, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        user, eos = {"role": "user", "content": "x"}, tokenizer.eos_token_id
        reply = {"role": "assistant", "content": PROBE}
        last = self._after_probe(user, reply)[:1]
        middle = self._after_probe(user, reply, user)[:1]
        self.reply = next(iter([*last, *middle]), eos)
        within = self._within_turn(user, reply)
        self.all = {*last, *middle}
        middle = [end for end in middle if end not in within]
        self.call = self._call_end(user, {eos, self.reply, *middle})
        # The end token of a reply comes last.
        others = dict.fromkeys([self.call, *middle])
        self.stops = [*(end for end in others if end not in (None, self.reply)), self.reply]
        self.all |= {*self.stops} - {None}

    def _render(self, *messages: Message) -> str:
        """The template's text; "" if it refuses the messages or leaves PROBE out."""
        with suppress(ValueError):
            text = self._render_messages(list(messages))
            return text if PROBE in text else ""
        return ""

    def _leading(self, text: str) -> list[int]:
        """Ids of the special tokens at the start of a text."""
        ids = []
        while token := self._token.match(text := text.lstrip()):
            ids.append(self._added[token[0]])
            text = text[token.end() :]
        return ids

    def _trailing(self, text: str) -> tuple[str, list[int]]:
        """(text without the special tokens at its end, their ids)."""
        ids: list[int] = []
        for token in reversed(list(self._token.finditer(text))):
            if text[token.end() :].strip():
                break
            ids.insert(0, self._added[token[0]])
            text = text[: token.start()]
        return text.rstrip(), ids

    def _after_probe(self, *messages: Message) -> list[int]:
        return self._leading(self._render(*messages).rpartition(PROBE)[2])

    def _within_turn(self, user: Message, reply: Message) -> set[int]:
        """Tokens between the thoughts and the text of one turn."""
        thoughts = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT_PROBE)
        _, between, text = self._render(user, reply | thoughts).partition(THOUGHT_PROBE)
        text = text.partition(PROBE)[0] if between else ""
        return {self._added[token] for token in self._token.findall(text)}

    def _call_end(self, user: Message, known: set[int | None]) -> int | None:
        """The token that ends a turn of tool calls."""
        function = {"name": PROBE, "arguments": {"x": PROBE}}
        calls = [{"id": f"call0000{n}", "type": "function", "function": function} for n in (0, 1)]
        called = [
            {"role": "assistant", "content": "", "tool_calls": calls[: n + 1]} for n in (0, 1)
        ]
        written = self._render(user, called[0])
        text, ends = self._trailing(written)
        if not text:
            return self.reply
        for end in ends:
            if end in known:
                return end
        # A token that occurs more often with two calls than with one closes a call.
        twice = self._token.findall(self._render(user, called[1]))
        once = self._token.findall(written)
        closing = {self._added[t] for t in once if twice.count(t) > once.count(t)}
        result = {"role": "tool", "name": PROBE, "content": "x", "tool_call_id": "call00000"}
        answered = self._render(user, called[0], result)
        after = self._leading(answered[len(text) :]) if answered.startswith(text) else []
        for end in [*reversed(ends), *after]:
            if end not in closing:
                return end
        return self.reply
