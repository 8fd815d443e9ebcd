"""Messages <-> token ids, by a tokenizer and its chat template.

User text never becomes a special token: `render` puts a mark inside each special token's string
that stands in a message, and `encode` reads the text before and behind a mark apart.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from rl_core.data.messages import text_of, without_prefix
from rl_core.data.pretrained import Tokenizer
from rl_core.data.rendering import PROBE, Rendering, ShapeCheck
from rl_core.data.template import Template
from rl_core.data.token_marks import MARK, TokenMarks, unmarked
from rl_core.data.turn_ends import TurnEnds
from rl_core.types import JSON, Completion, InputImage, JSONObject, Message

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily
    from rl_core.data.tokenizer_facts import TokenizerFacts

# Longer texts are encoded in a thread, and only if they may fit: a tokenizer encodes about half a
# megabyte per second.
LONG_CHARS = 1 << 14
# Limit of cached chats with other variables.
MAX_VARIANTS = 64


class ToolReader(Protocol):
    """The methods of ToolCalls (data/tool_calls.py, which imports this module)."""

    chat: Chat

    def read(
        self, completion: Completion, number: int, tools: Sequence[dict] = (), prompt: str = ""
    ) -> tuple[Message | None, bool]: ...

    def check(self, tools: list[dict], where: str) -> None: ...

    def in_stream(
        self,
        prompt: str,
        before: list[Message],
        reply: Message,
        text: str,
        after: list[Message],
        tools: list | None,
    ) -> tuple[str, Message]: ...


class TooLongError(ValueError):
    """A prompt with more tokens than fit."""


class Chat:
    """A tokenizer and its chat template. A template given here becomes the tokenizer's: an export
    then carries it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        variables: JSONObject | None = None,
        tool_reader: Callable[[Chat], ToolReader] | None = None,
        vision: ImageFamily | str = "the model reads text alone",
    ):
        """`tool_reader` makes what reads this chat's tool calls, if tools are given. `vision`: the
        family of a model that sees, else the reason why it does not."""
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.template = Template(tokenizer, variables)
        self.tool_reader = tool_reader
        self.vision = vision
        self.max_images: int | None = None  # Limit of a conversation.
        ends = TurnEnds(tokenizer, self.template.render_plain)
        self.end_token_id = ends.reply  # This token ends a last reply.
        self.call_end_token_id = ends.call
        # All tokens with which the template ends a turn. Engines do not stop at those that the
        # template also writes within a turn, such as gpt-oss's <|end|> after the analysis.
        self.end_token_ids = ends.all
        stops = (tokenizer.eos_token_id, *ends.stops)
        self.stop_token_ids = tuple(dict.fromkeys(i for i in stops if i is not None))
        self.special_ids = {}
        for i, token in tokenizer.added_tokens_decoder.items():
            if token.special or i in self.end_token_ids:
                self.special_ids[token.content] = i
        special = sorted(self.special_ids, key=len, reverse=True)
        self.special_token = re.compile("|".join(map(re.escape, special)) or "(?!)")
        # A message, or a part of one, in which `encode` makes no string a special token.
        self.marked = TokenMarks(self.special_token).marked
        self._newline_ids = tokenizer.encode("\n", add_special_tokens=False)
        # The last arguments of first_prompt() and its result.
        self.first_asked, self.first_answer = None, ("", [])
        self.shapes = ShapeCheck()
        self._variants: dict[str, Chat] = {}  # Chats with more variables, by these.

    def with_variables(self, variables: JSONObject) -> Chat:
        """This chat with further variables of its template, such as a row's."""
        return self._variant(variables) if variables else self

    def _variant(self, variables: JSONObject) -> Chat:
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            both = self.template.variables | variables
            variant = Chat(self.tokenizer, None, both, self.tool_reader, self.vision)
            variant.facts, variant.max_images = self.facts, self.max_images
            self._variants[key] = variant
        return self._variants[key]

    @cached_property
    def facts(self) -> TokenizerFacts:
        from rl_core.data.tokenizer_facts import TokenizerFacts

        return TokenizerFacts(self.tokenizer)

    @cached_property
    def template_words(self) -> list[str]:
        """Lower-case words of the template, among which are the keys and variables that it
        reads."""
        return re.findall(r"[a-z]\w+", str(self.chat_template))

    def render(
        self, messages: list[Message], tools: list | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The template's text for `encode`, with marks in special tokens' strings of messages.
        Raises ValueError if the template refuses the messages, or cannot end with a message that
        the reply continues."""
        before, prefix = without_prefix(messages)
        if prefix and add_generation_prompt:
            # The template may write anything behind the text, and trim the text.
            unfinished = {**messages[-1], "content": prefix + PROBE}
            rendered, probe, _ = self.render([*before, unfinished], tools, False).rpartition(PROBE)
            if not probe:
                raise ValueError("the chat template does not render the last message's text")
            return rendered
        marked = [self.marked(self.template.in_form(message)) for message in messages]
        return self.template.apply(marked, self.marked(tools or None), add_generation_prompt)

    def first_prompt(
        self, messages: list[Message], tools: list | None, max_tokens: float = math.inf
    ) -> tuple[str, list[int]]:
        """(rendering, token ids) of a conversation's first messages, cached for the episodes of a
        group. Raises TooLongError before encoding if a long rendering has more than max_tokens."""
        if self.first_asked != (messages, tools):
            self.check(messages, tools)
            rendered = self.render(messages, tools)
            if len(rendered) > LONG_CHARS:
                text, num_special = self.special_token.subn("", rendered)
                least = num_special + self._least_tokens_of(unmarked(text))
                if least > max_tokens:
                    raise TooLongError(f"the prompt has at least {least} tokens")
            self.first_answer = rendered, self.expand(self.encode(rendered), messages)
            self.first_asked = copy.deepcopy((messages, tools))
        return self.first_answer

    def least_tokens(self, messages: list[Message]) -> int:
        """A lower bound on the number of tokens of long messages, without encoding them; 0 for
        short ones."""
        if num_chars(messages) <= LONG_CHARS:
            return 0
        # Templates may drop thoughts and spaces.
        texts = [text_of(message).rpartition("</think>")[2].strip() for message in messages]
        return max(sum(map(bool, texts)), self._least_tokens_of(*texts))

    def _least_tokens_of(self, *texts: str) -> int:
        # A tokenizer may normalize characters that are not ASCII.
        least_bytes = sum(len(text) if text.isascii() else len(text) // 3 for text in texts)
        return int(least_bytes / self.facts.longest_token)

    def unread_tools(self, messages: list[Message], tools: list | None) -> list[str]:
        """Tools that never appear in the prompt: the template renders no tools, and no message of
        these that others wrote contains the name."""
        if not tools or self.template.renders_tools:
            return []
        texts = "\n".join(text_of(each) for each in messages if each["role"] != "assistant")
        names = [tool["function"]["name"] for tool in tools if "function" in tool]
        return [name for name in names if name not in texts]

    def check(
        self,
        messages: list[Message],
        tools: list | None = None,
        add_generation_prompt: bool = True,
        replies: Collection[int] = (),
    ) -> None:
        """Raises ValueError for a text, call or argument that the template does not render and,
        without a generation prompt, for thoughts of the last message. Each shape of conversation is
        checked once. `replies`: indices of the actor's turns, which a template may rewrite. Raises
        ValueError as images_of() too."""
        self.images_of(messages)

        def rendered(probes: list[Message]) -> list[Rendering]:
            text = self.render(probes, tools, add_generation_prompt)
            others = set(range(len(probes))).difference(replies)
            renderings = [Rendering(text=text, indices=others)]
            if not add_generation_prompt:
                last = [len(probes) - 1]
                renderings.append(Rendering(text=text, indices=last, with_thoughts=True))
            return renderings

        self.shapes.check(messages, (bool(tools), add_generation_prompt, *replies), rendered)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Token ids of a marked text, such as a rendering. `continues`: of a later piece of it."""
        ids: list[int] = []
        if not isinstance(self.vision, str):
            text = self.vision.framed(text)
        *pieces, last = text.split(MARK)
        for piece in pieces:
            # A special token of one character stands before its mark.
            plain = piece[-1:] if piece[-1:] in self.special_ids else ""
            ids += self._encode(piece.removesuffix(plain), continues or bool(ids))
            ids += self._encode(plain, continues or bool(ids), split_special_tokens=True)
        return ids + self._encode(last, continues or bool(ids))

    def _encode(self, text: str, continues: bool, **options: bool) -> list[int]:
        if not text:
            return []
        if continues:
            # SentencePiece puts a space before the start of a text; behind a newline it does not.
            ids = self.tokenizer.encode("\n" + text, add_special_tokens=False, **options)
            if ids[: len(self._newline_ids)] == self._newline_ids:
                return ids[len(self._newline_ids) :]
        return self.tokenizer.encode(text, add_special_tokens=False, **options)

    def prompt_ids(
        self, messages: list[Message], tools: list | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. Without a generation prompt they are the input of a reward
        model. Raises ValueError as check() and render()."""
        self.check(messages, tools, add_generation_prompt)
        ids = self.encode(self.render(messages, tools, add_generation_prompt))
        return self.expand(ids, messages)

    def images_of(self, messages: list[Message]) -> tuple[InputImage, ...]:
        """The images of messages in their order. Raises ValueError for images if the model does not
        see, and for more than --data.max_images."""
        if not any(isinstance(message.get("content"), list) for message in messages):
            return ()
        from rl_core.data.chat_images import checked_images

        return checked_images(messages, self.vision, self.max_images)

    def expand(self, ids: list[int], messages: list[Message]) -> list[int]:
        """The ids with the tokens of each image in place of the template's placeholder. Raises
        ValueError if the template renders another number of images than the messages have."""
        images = self.images_of(messages)
        if not images:
            return ids
        from rl_core.data.chat_images import expanded

        assert not isinstance(self.vision, str)
        return expanded(ids, images, self.vision, messages)

    @cached_property
    def tool_calls(self) -> ToolReader:
        """Reads a completion's calls, and checks that calls of tools can be read."""
        assert self.tool_reader is not None
        return self.tool_reader(self)

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens, and without a final stop token that is not flagged
        special."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def encode_after(self, token_ids: list[int], suffix: str) -> list[int]:
        """Token ids of the template's text after an assistant's tokens, without end tokens that
        they already have."""
        ids = self.encode(suffix.lstrip(), continues=True)
        for k in (2, 1):  # some templates end a turn with two tokens
            is_special = set(ids[:k]) <= set(self.special_ids.values())
            if is_special and ids[:k] == token_ids[-k:]:
                return ids[k:]
        return self.encode(suffix, continues=True)


def num_chars(value: JSON) -> int:
    """Number of characters of all strings and keys in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return sum(map(num_chars, value)) if isinstance(value, list) else 1
