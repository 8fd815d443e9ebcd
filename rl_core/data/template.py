"""A tokenizer's chat template: renders messages in the form that the template reads."""

from __future__ import annotations

from functools import cached_property

from rl_core.data.messages import text_of, with_text_arguments
from rl_core.data.pretrained import Tokenizer
from rl_core.data.rendering import PROBE
from rl_core.types import JSON, JSONObject, Message

# Name of a tool that no template mentions.
TOOL = "q7x0z"


class Template:
    """Probes of the template find out which form it reads, when a message needs the answer."""

    def __init__(self, tokenizer: Tokenizer, variables: JSONObject | None = None):
        self.tokenizer = tokenizer
        self.variables = variables or {}  # More variables of the template.
        parts = [{"type": "text", "text": PROBE}]
        self._wants_parts = not self._reads(PROBE) and self._reads(parts)

    def apply(
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

    def render_plain(self, messages: list[Message]) -> str:
        """The template's text, without marks and a generation prompt."""
        return self.apply([self.in_form(message) for message in messages], None, False)

    def in_form(self, message: Message) -> Message:
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

    def assistant_message(self, text: str) -> Message:
        """An actor's text as the template's history needs it, with separate thinking if the
        template reads it so."""
        thinking, closed, answer = text.partition("</think>")
        if not closed or "reasoning_content" not in str(self.tokenizer.chat_template):
            return {"role": "assistant", "content": text}
        thinking = thinking.rpartition("<think>")[2].strip("\n")
        return {"role": "assistant", "content": answer.lstrip("\n"), "reasoning_content": thinking}

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
    def renders_tools(self) -> bool:
        """True if the template renders tools, or refuses the messages that would show it."""
        function = {"name": TOOL, "description": TOOL, "parameters": {"type": "object"}}
        function["parameters"]["properties"] = {}
        user = self._with_parts({"role": "user", "content": "x"})
        try:
            return TOOL in self.apply([user], [{"type": "function", "function": function}], True)
        except ValueError:
            return True

    def _reads(self, content: JSON) -> bool:
        return self._shows([{"role": "user", "content": content}], add_generation_prompt=True)

    def _shows(self, messages: list[Message], add_generation_prompt: bool = False) -> bool:
        try:
            return PROBE in self.apply(messages, None, add_generation_prompt)
        except ValueError:
            return False
