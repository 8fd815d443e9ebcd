"""An engine with scripted replies, and a byte tokenizer: environments run without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from rl_core.data import pretrained
from rl_core.data.chat import Chat, ToolReader
from rl_core.data.image_families import ImageFamily
from rl_core.sampling.actor import Actor, OpenEndpoint
from rl_core.sampling.engine import Engine
from rl_core.types import Completion, InputImage, SamplingParams

START, END, IMAGE = "<|start|>", "<|end|>", "<|image|>"
PLAIN_TEMPLATE = (
    "{%- if tools %}{{- '<|start|>tools\n' + tools | tojson + '<|end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|start|>' + message.role + '\n' }}"
    "{%- if message.content is string or not message.content %}{{- message.content or '' }}"
    "{%- else %}{%- for part in message.content %}"
    "{{- '<|image|>' if part.type == 'image' else part.text }}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
)


class PlainImages(ImageFamily):
    """Images of plain_chat(), each of which is one token."""

    def __init__(self, token_id: int):
        self.token_id = self.placeholder_id = token_id

    def num_tokens(self, image: InputImage) -> int:
        return 1


class ScriptedEngine(Engine):
    """Returns its replies in order, then repeats the last one, with logprobs of 0. The engine has
    no weights."""

    sees = True

    def __init__(self, chat: Chat, replies: Sequence[str], capacity: int = 256):
        self.chat, self.replies, self.capacity = chat, list(replies), capacity
        self.version = self.num_requests = 0

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        images: Sequence[InputImage] = (),
    ) -> Completion:
        text = self.replies[min(self.num_requests, len(self.replies) - 1)]
        self.num_requests += 1
        stops = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        ids = self.chat.encode(
            self.chat.marked(text[: min(stops, default=len(text))]), continues=True
        )
        ids += [] if stops else params.stop_token_ids[:1]
        is_cut = len(ids) > params.max_tokens
        ids = ids[: params.max_tokens]
        return Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            text=self.chat.decode(ids),
            finish_reason="length" if is_cut else "stop",
            policy_version=self.version,
        )


@dataclass(kw_only=True)
class ScriptedActor:
    """An actor with scripted replies. Every episode begins with the first reply."""

    name: str
    chat: Chat
    replies: Sequence[str]
    max_context_tokens: int = 1 << 20
    capacity: int = 256
    is_trainable: bool = True
    open_endpoint: OpenEndpoint | None = None  # See Actor.

    def bind_episode(
        self, params: SamplingParams, seed: int, session: str, max_turns: int = 0
    ) -> Actor:
        same = {
            name: getattr(self, name)
            for name in ("name", "chat", "max_context_tokens", "is_trainable", "open_endpoint")
        }
        engine, stops = ScriptedEngine(self.chat, self.replies), self.chat.stop_token_ids
        return Actor(engine=engine, stop_token_ids=stops, **same).bind_episode(
            params, seed, session, max_turns
        )


def plain_chat(tool_reader: Callable[[Chat], ToolReader] | None = None) -> Chat:
    """A chat with one token per byte, so that any text round-trips, and a plain template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([START, END, *alphabet, IMAGE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, IMAGE])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=[START, IMAGE],
        chat_template=PLAIN_TEMPLATE,
    )
    images = PlainImages(vocab[IMAGE])
    return Chat(cast(pretrained.Tokenizer, fast_tokenizer), None, None, tool_reader, images)
