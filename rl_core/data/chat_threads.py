"""Work with a chat in a thread, for texts that take long to encode."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from rl_core.data.chat import LONG_CHARS, Chat, num_chars
from rl_core.data.pretrained import Tokenizer
from rl_core.types import Message

T = TypeVar("T")
COPYING = threading.Lock()  # Held while a tokenizer is copied, which is done once.


@lru_cache(8)
def spare(tokenizer: Tokenizer) -> tuple[Tokenizer, threading.Lock]:
    """A copy of a tokenizer, because two threads may not use one tokenizer at the same time. The
    lock is held while the copy is used."""
    return copy.deepcopy(tokenizer), threading.Lock()


async def in_thread(chat: Chat, work: Callable[[Chat], T]) -> T:
    """Returns work(copy of the chat), called in a thread."""

    def run() -> T:
        with COPYING:
            tokenizer, lock = spare(chat.tokenizer)
        with lock:
            twin = copy.copy(chat)
            twin.template = copy.copy(chat.template)
            twin.tokenizer = twin.template.tokenizer = tokenizer
            twin._variants = {}
            if chat.tool_reader is not None:
                twin.tool_calls = copy.copy(chat.tool_calls)
                twin.tool_calls.chat = twin
            return work(twin)

    return await asyncio.to_thread(run)


async def prepare(
    chat: Chat, messages: list[Message], tools: list | None, max_tokens: float = math.inf
) -> None:
    """Computes the chat's first_prompt() of a long text, and checks its tools, in a thread, so that
    the event loop is not blocked."""
    if num_chars([messages, tools]) <= LONG_CHARS or (messages, tools) == chat.first_asked:
        return

    def work(twin: Chat) -> tuple:
        answer = twin.first_prompt(messages, tools, max_tokens)
        if tools and twin.tool_reader:
            twin.tool_calls.check(tools, "the request")
        return twin.first_asked, answer

    chat.first_asked, chat.first_answer = await in_thread(chat, work)


async def num_prompt_tokens(
    chat: Chat, messages: list[Message], tools: list | None, max_tokens: float = math.inf
) -> int:
    """Tokens of a conversation's first messages. Raises as first_prompt() does."""
    await prepare(chat, messages, tools, max_tokens)
    return len(chat.first_prompt(messages, tools)[1])
