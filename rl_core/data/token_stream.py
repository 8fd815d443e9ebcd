"""The tokens of one conversation as one actor sees it: sampled tokens are kept, and the template's
text is appended."""

from __future__ import annotations

import copy

from rl_core.data.chat import LONG_CHARS, Chat, num_chars
from rl_core.data.messages import without_prefix
from rl_core.data.token_marks import MARK
from rl_core.types import Completion, Message, Turn


class TokenStream:
    """The tokens of one conversation as one actor sees it. They only grow, unless the template
    rewrites history."""

    def __init__(self, chat: Chat, messages: list[Message], tools: list | None = None):
        self._chat = chat
        self._tools = tools
        self.messages = list(messages)
        self.replies: tuple[int, ...] = ()  # Indices of the actor's turns.
        self.rendered, self.prompt_ids = chat.first_prompt(messages, tools)
        self.images = chat.images_of(messages)  # Of all messages.
        # Fields of the next Turn.
        self.new_ids, self.new_images = self.prompt_ids, self.images
        self.is_fresh = True

    def append(
        self,
        token_ids: list[int],
        text: str,
        new_messages: list[Message],
        calls: Message | None = None,
    ) -> bool:
        """Adds the actor's sampled token_ids (decoded: text; read: calls, if it called tools) and
        new_messages of others; prompt_ids then ends with the next generation prompt. False if the
        template rewrote history, so that prompt_ids begins anew."""
        before, prefix = without_prefix(self.messages)
        sampled, message = text, self._chat.template.assistant_message(prefix + text)
        if calls is not None:
            sampled, message = self._chat.tool_calls.in_stream(
                self.rendered, self.messages, calls, text, new_messages, self._tools
            )
        messages = [*before, message, *new_messages]
        self.replies += (len(before),)
        self._chat.check(messages, self._tools, replies=self.replies)
        return self.extend(token_ids, sampled, messages)

    async def append_soon(
        self,
        token_ids: list[int],
        text: str,
        new_messages: list[Message],
        calls: Message | None = None,
    ) -> None:
        """Does the same as append(), in a thread if the conversation is long."""
        if len(self.rendered) + num_chars(new_messages) <= LONG_CHARS:
            self.append(token_ids, text, new_messages, calls)
            return

        def appended(twin: Chat) -> dict[str, object]:
            stream = copy.copy(self)
            stream._chat = twin
            stream.append(token_ids, text, new_messages, calls)
            return vars(stream)

        from rl_core.data.chat_threads import in_thread

        state = await in_thread(self._chat, appended)
        vars(self).update(state | {"_chat": self._chat})

    def extend(
        self,
        token_ids: list[int],
        turn_text: str,
        messages: list[Message],
        rendered: str | None = None,
    ) -> bool:
        """Does the same as append(), with all messages, for a turn that the template renders as
        `turn_text`. `rendered`: rendering of the messages, if the caller has it."""
        if rendered is None:
            rendered = self._chat.render(messages, self._tools)
        suffix = text_after(rendered, self.rendered, turn_text)
        images, num_seen = self._chat.images_of(messages), len(self.images)
        new_messages = messages[len(self.messages) :]
        if images[:num_seen] != self.images:
            suffix = None
        self.messages, self.rendered, self.is_fresh = messages, rendered, suffix is None
        self.images = self.new_images = images
        if suffix is None:
            ids = self._chat.encode(rendered)
            self.prompt_ids = self.new_ids = self._chat.expand(ids, messages)
        else:
            ids = self._chat.encode_after(token_ids, suffix)
            self.new_images = images[num_seen:]
            self.new_ids = self._chat.expand(ids, new_messages)
            self.prompt_ids = [*self.prompt_ids, *token_ids, *self.new_ids]
        return not self.is_fresh

    def turn(self, completion: Completion, name: str = "", state_key: str = "") -> Turn:
        """The turn in which the actor answers the prompt."""
        return Turn(
            new_ids=self.new_ids,
            is_fresh=self.is_fresh,
            completion=completion,
            name=name,
            state_key=state_key,
            images=self.new_images,
        )


def text_after(rendered: str, seen: str, reply: str) -> str | None:
    """The text after seen + reply in rendered; None if rendered does not begin with them. Ignores
    marks, and whitespace, which templates trim."""
    wanted = seen + reply
    if rendered.startswith(seen):
        rendered, wanted = rendered[len(seen) :], reply
    if rendered.startswith(wanted):
        return rendered[len(wanted) :]
    index = 0
    for char in wanted:
        if is_unseen(char):
            continue
        while is_unseen(rendered[index : index + 1]):
            index += 1
        if rendered[index : index + 1] != char:
            return None
        index += 1
    suffix = rendered[index:].lstrip(MARK)
    return suffix.lstrip() if wanted[-1:].isspace() else suffix


def is_unseen(char: str) -> bool:
    return char.isspace() or char == MARK
