"""Messages <-> token ids. The only file that knows chat templates.

Tokens in, tokens out: a TokenStream keeps every sampled token and appends the template's text after
it. The template's text ("the rendering") is kept with the ids only to see whether the template
rewrote history.

User text never becomes a special token: `render` puts a mark inside each special token's string
that stands in a message, and `encode` reads the text before and behind a mark apart.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from rl_core.data.images import images_of, shown_image
from rl_core.data.messages import is_filled, text_of, with_text_arguments, without_prefix
from rl_core.data.pretrained import Tokenizer, load_pretrained
from rl_core.data.rendering import PROBE, Rendering, ShapeCheck, template_variables
from rl_core.data.rows import check_exists
from rl_core.data.tokenizer_facts import TokenizerFacts
from rl_core.data.turn_ends import TurnEnds
from rl_core.data.vision_models import load_family
from rl_core.errors import nearest
from rl_core.types import JSON, Completion, InputImage, JSONObject, Message, Turn

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily

T = TypeVar("T")

# Unicode keeps it for internal use: templates and tokenizers have no rule for it.
_MARK = "\ufdd0"
# Name of a tool that no template mentions.
TOOL = "q7x0z"
# Longer texts are encoded in a thread: a tokenizer encodes about half a megabyte per second.
LONG_CHARS = 1 << 14
# Limit of cached chats with other variables.
MAX_VARIANTS = 64
# Values of "role" and "type" that templates compare, or put into a token's name.
_ROLES = ("system", "developer", "user", "assistant", "model", "chatbot", "tool", "ipython")
_PARTS = ("text", "image", "image_url", "video", "audio", "thinking", "reasoning", "refusal")
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_KNOWN = (*_ROLES, *_PARTS, *_TYPES, "function", "tool_call", "tool_response")


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


class ImageLimits(Protocol):
    """The limits of images in config/data.py."""

    max_image_pixels: int | None
    max_images: int | None


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
        self.variables = variables or {}  # More variables of the template.
        self._tool_reader = tool_reader
        self.vision = vision
        self.max_images: int | None = None  # Limit of a conversation.
        parts = [{"type": "text", "text": PROBE}]
        self._wants_parts = not self._reads(PROBE) and self._reads(parts)
        ends = TurnEnds(tokenizer, self._render_unmarked)
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
        self._newline_ids = tokenizer.encode("\n", add_special_tokens=False)
        # Every turn renders a conversation's messages again.
        self._mark_text = lru_cache(512)(self._mark_text)
        self._first_asked, self._first_prompt = None, ("", [])
        self.shapes = ShapeCheck()
        self._variants: dict[str, Chat] = {}  # Chats with more variables, by these.
        self._facts, self._spare = TokenizerFacts(tokenizer), SpareTokenizer(tokenizer)

    def with_variables(self, variables: JSONObject) -> Chat:
        """This chat with further variables of its template, such as a row's."""
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            both = self.variables | variables
            variant = Chat(self.tokenizer, None, both, self._tool_reader, self.vision)
            variant._facts, variant._spare = self._facts, self._spare
            variant.max_images = self.max_images
            self._variants[key] = variant
        return self._variants[key]

    def check_variables(self, variables: JSONObject, where: str, fix: str = "") -> None:
        """Raises ValueError for a variable with a value that the template does not read."""
        for name, value in sorted(variables.items()):
            known = self._template_variables
            if name not in known and is_filled(value):
                reads = nearest(name, known) if known else "it reads no variables"
                raise ValueError(f"{where}: the chat template does not read {name!r}{fix}; {reads}")

    @cached_property
    def _template_variables(self) -> list[str]:
        return template_variables(str(self.chat_template), self.tokenizer.special_tokens_map)

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
            begun = {**messages[-1], "content": prefix + PROBE}
            rendered, probe, _ = self.render([*before, begun], tools, False).rpartition(PROBE)
            if not probe:
                raise ValueError("the chat template does not render the last message's text")
            return rendered
        marked = [self.marked(self._in_form(message)) for message in messages]
        return self._apply(marked, self.marked(tools or None), add_generation_prompt)

    def first_prompt(
        self, messages: list[Message], tools: list | None, max_tokens: float = math.inf
    ) -> tuple[str, list[int]]:
        """(rendering, token ids) of a conversation's first messages, cached for the
        episodes of a group. Raises TooLongError before encoding if the rendering has more than
        max_tokens."""
        asked = (messages, tools)
        if asked != self._first_asked:
            self.check(messages, tools)
            rendered = self.render(messages, tools)
            least = self._least_tokens_of(rendered)
            if least > max_tokens:
                raise TooLongError(f"the prompt has at least {least} tokens")
            self._first_prompt = rendered, self.expand(self.encode(rendered), messages)
            self._first_asked = copy.deepcopy(asked)
        return self._first_prompt

    async def prepare(
        self, messages: list[Message], tools: list | None, max_tokens: float = math.inf
    ) -> None:
        """Computes first_prompt() of a long text, and checks its tools, in a thread, so that the
        event loop is not blocked."""
        if num_chars([messages, tools]) <= LONG_CHARS or (messages, tools) == self._first_asked:
            return

        def work(twin: Chat) -> tuple:
            first = twin.first_prompt(messages, tools, max_tokens)
            if tools and self._tool_reader:
                twin.tool_calls.check(tools, "the request")
            return twin._first_asked, first

        self._first_asked, self._first_prompt = await self.in_thread(work)

    async def in_thread(self, work: Callable[[Chat], T]) -> T:
        """Returns work(copy of this chat), called in a thread. The copy has another tokenizer,
        because two threads may not use one tokenizer at the same time."""

        def run() -> T:
            with self._spare.lock:
                twin = copy.copy(self)
                twin.tokenizer, twin._variants = self._spare.copied(), {}
                if self._tool_reader is not None:
                    twin.tool_calls = copy.copy(self.tool_calls)
                    twin.tool_calls.chat = twin
                return work(twin)

        return await asyncio.to_thread(run)

    def least_tokens(self, messages: list[Message]) -> int:
        """A lower bound on the number of tokens of these messages, without encoding them."""
        num = num_texts = 0
        for message in messages:
            # Templates may drop thoughts and spaces.
            text = text_of(message).rpartition("</think>")[2].strip()
            num += least_bytes(text)
            num_texts += bool(text)
        return max(num_texts, int(num / self._facts.longest_token))

    def _least_tokens_of(self, rendered: str) -> int:
        text, num_special = self.special_token.subn("", rendered)
        return num_special + int(least_bytes(unmarked(text)) / self._facts.longest_token)

    def unread_tools(self, messages: list[Message], tools: list | None) -> list[str]:
        """Names of tools that the model does not read of: the template renders no tools, and no
        message of these that others wrote contains the name."""
        if not tools or self._renders_tools:
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
        *pieces, last = text.split(_MARK)
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

    def marked(self, value: JSON) -> JSON:
        """A message, or a part of one, in which `encode` makes no string a special token."""
        if isinstance(value, str):
            return self._mark_text(value)
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
        return self.special_token.sub(lambda m: m[0][0] + _MARK + self._mark_text(m[0][1:]), text)

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
        images = images_of(messages)
        if images and isinstance(self.vision, str):
            raise ValueError(f"a message has an image, and {self.vision}")
        most = None if isinstance(self.vision, str) else self.vision.max_images
        if most and len(images) > most:
            raise ValueError(
                f"a conversation has {len(images)} images; this model reads {most}, as each image "
                "has other tokens where there are more"
            )
        if self.max_images and len(images) > self.max_images:
            raise ValueError(
                f"a conversation has {len(images)} images, --data.max_images is {self.max_images}"
            )
        return tuple(images)

    def expand(self, ids: list[int], messages: list[Message]) -> list[int]:
        """The ids with the tokens of each image in place of the template's placeholder. Raises
        ValueError if the template renders another number of images than the messages have."""
        images = self.images_of(messages)
        if not images:
            return ids
        assert not isinstance(self.vision, str)
        num, expanded, left = ids.count(self.vision.placeholder_id), [], iter(images)
        if num != len(images):
            roles = " ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"the chat template renders {num} of the {len(images)} images in messages with "
                f"roles [{roles}]; move the images to a user's message, or give another template "
                "with --actors.NAME.chat_template FILE"
            )
        for token_id in ids:
            if token_id == self.vision.placeholder_id:
                expanded += self.vision.expand(next(left))
            else:
                expanded.append(token_id)
        return expanded

    @cached_property
    def tool_calls(self) -> ToolReader:
        """Reads a completion's calls, and checks that calls of tools can be read."""
        assert self._tool_reader is not None
        return self._tool_reader(self)

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens, and without a final stop token that is not flagged
        special."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def shown_text(self, token_ids: Sequence[int], images: Sequence[InputImage] = ()) -> str:
        """Text with special tokens, for people: an image is `[image 336x336, 144 tokens]`."""
        known, pieces = {image.key: image for image in images}, []
        for key, group in itertools.groupby(token_ids, lambda number: min(number, 0)):
            ids = [int(number) for number in group]
            if key < 0:
                size = shown_image(known[-key])[1:-1] if -key in known else "image"
                pieces.append(f"[{size}, {len(ids)} tokens]" if len(ids) > 1 else f"[{size}]")
            else:
                pieces.append(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return "".join(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in the middle of a text; see TokenizerFacts."""
        return self._facts.token_bytes(token_id)

    def encode_after(self, token_ids: list[int], suffix: str) -> list[int]:
        """Token ids of the template's text after an assistant's tokens, without end tokens that
        they already have."""
        ids = self.encode(suffix.lstrip(), continues=True)
        for k in (2, 1):  # some templates end a turn with two tokens
            is_special = set(ids[:k]) <= set(self.special_ids.values())
            if is_special and ids[:k] == token_ids[-k:]:
                return ids[k:]
        return self.encode(suffix, continues=True)

    def assistant_message(self, text: str) -> Message:
        """An actor's text as the template's history needs it, with separate thinking if the
        template reads it so."""
        thinking, closed, answer = text.partition("</think>")
        if not closed or "reasoning_content" not in str(self.chat_template):
            return {"role": "assistant", "content": text}
        thinking = thinking.rpartition("<think>")[2].strip("\n")
        return {"role": "assistant", "content": answer.lstrip("\n"), "reasoning_content": thinking}

    def _in_form(self, message: Message) -> Message:
        """The canonical message in the form that this template reads: content as a string or a list
        of parts, arguments as objects or JSON text, thoughts under each of their keys."""
        formed = self._with_parts(message)
        formed.pop("prefix", None)
        if message.get("role") == "developer" and not self._reads_developer:
            formed["role"] = "system"
        if "reasoning_content" in message:
            formed = {"thinking": message["reasoning_content"], **formed}
        if message.get("tool_calls") and self._wants_json_arguments:
            formed["tool_calls"] = [with_text_arguments(call) for call in message["tool_calls"]]
        return formed

    def _with_parts(self, message: Message) -> Message:
        content = message.get("content")
        if content is None:  # Next to calls. Some templates would write "None".
            content = ""
        if isinstance(content, str) and self._wants_parts:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and any(item["type"] == "image" for item in content):
            # Templates write a placeholder, whatever the image.
            content = [{"type": "image"} if p["type"] == "image" else p for p in content]
        elif isinstance(content, list) and not self._wants_parts:
            content = text_of(message)
        return {**message, "content": content}

    @cached_property
    def _reads_developer(self) -> bool:
        user = self._with_parts({"role": "user", "content": "x"})
        return self._shows([self._with_parts({"role": "developer", "content": PROBE}), user])

    @cached_property
    def _wants_json_arguments(self) -> bool:
        """True if the template renders a call's arguments only if they are JSON text."""
        call = {"type": "function", "function": {"name": "x", "arguments": {"x": PROBE}}}

        def is_shown(call: JSONObject) -> bool:
            user = self._with_parts({"role": "user", "content": "x"})
            reply = self._with_parts({"role": "assistant", "content": ""})
            return self._shows([user, reply | {"tool_calls": [call]}])

        return not is_shown(call) and is_shown(with_text_arguments(call))

    @cached_property
    def _renders_tools(self) -> bool:
        """True if the template renders tools, or refuses the messages that would show it."""
        function = {"name": TOOL, "description": TOOL, "parameters": {"type": "object"}}
        function["parameters"]["properties"] = {}
        user = self._with_parts({"role": "user", "content": "x"})
        try:
            return TOOL in self._apply([user], [{"type": "function", "function": function}], True)
        except ValueError:
            return True

    def _render_unmarked(self, messages: list[Message]) -> str:
        """The template's text, without marks and a generation prompt."""
        return self._apply([self._in_form(message) for message in messages], None, False)

    def _apply(
        self, messages: list[Message], tools: list | None, add_generation_prompt: bool
    ) -> str:
        # Imported with the first tokenizer, not with the command line.
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            roles = " ".join(str(m.get("role")) for m in messages)
            raise ValueError(
                f"the chat template refuses messages with roles [{roles}]: "
                f"{' '.join(str(error).split())}; change the "
                "messages, or give another template with --actors.NAME.chat_template FILE"
            ) from error

    def _reads(self, content: JSON) -> bool:
        return self._shows([{"role": "user", "content": content}], add_generation_prompt=True)

    def _shows(self, messages: list[Message], add_generation_prompt: bool = False) -> bool:
        try:
            return PROBE in self._apply(messages, None, add_generation_prompt)
        except ValueError:
            return False


class SpareTokenizer:
    """A copy of a tokenizer for threads, made when it is first needed."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.lock = threading.Lock()  # Held while the copy is used.
        self.copy: Tokenizer | None = None

    def copied(self) -> Tokenizer:
        if self.copy is None:
            self.copy = copy.deepcopy(self.tokenizer)
        return self.copy


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
        sampled, message = text, self._chat.assistant_message(prefix + text)
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

        state = await self._chat.in_thread(appended)
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


def load_chat(
    path: str,
    chat_template: str | None = None,
    variables: JSONObject | None = None,
    tool_reader: Callable[[Chat], ToolReader] | None = None,
    limits: ImageLimits | None = None,
) -> Chat:
    """The tokenizer at path (a folder or a hub name); chat_template is a file's path, or the
    template itself."""
    from transformers import AutoTokenizer  # seconds to import, which --help need not wait for

    if chat_template is not None and "{" not in chat_template:
        check_exists(Path(chat_template))
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer = load_pretrained(AutoTokenizer, path)
    if not (chat_template or tokenizer.chat_template):
        raise ValueError(
            f"model {path} has no chat template: copy the tokenizer's files of the model that it "
            "was made from into the folder, or give one with --actors.NAME.chat_template FILE"
        )
    # For some families transformers makes a tokenizer from nothing.
    if set(tokenizer.get_vocab().values()) <= tokenizer.added_tokens_decoder.keys():
        raise ValueError(
            f"model {path} has no tokenizer, such as tokenizer.json, but special tokens: copy the "
            "tokenizer's files of the model that it was made from into the folder"
        )
    vision = load_family(path, None if limits is None else limits.max_image_pixels)
    chat = Chat(tokenizer, chat_template, variables, tool_reader, vision)
    chat.max_images = None if limits is None else limits.max_images
    return chat


def least_bytes(text: str) -> int:
    """A lower bound on the bytes that a tokenizer reads, since it may normalize characters."""
    return len(text) if text.isascii() else len(text) // 3


def num_chars(value: JSON) -> int:
    """Number of characters of all strings and keys in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return sum(map(num_chars, value)) if isinstance(value, list) else 1


def unmarked(text: str) -> str:
    """The rendering without marks."""
    return text.replace(_MARK, "")


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
    suffix = rendered[index:].lstrip(_MARK)
    return suffix.lstrip() if wanted[-1:].isspace() else suffix


def is_unseen(char: str) -> bool:
    return char.isspace() or char == _MARK


@lru_cache(8)
def fingerprint(chat: Chat) -> str:
    """A hash that is equal for two chats with the same vocabulary and template."""
    known = [sorted(chat.tokenizer.get_vocab().items()), chat.chat_template]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
