"""Rows for SFT -> TrainingSamples: assistants' turns (actions), and the answers to them
(observations).

A row is a conversation, or an episode that a run wrote; an episode keeps its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rl_core.data.chat import Chat
from rl_core.data.chat_loading import fingerprint
from rl_core.data.messages import TRAIN_KEYS, as_context, read_flag, shorten, text_of
from rl_core.data.rendering import PROBE, Rendering
from rl_core.data.rows import is_trajectory
from rl_core.data.samples import samples_from_turns
from rl_core.data.task_rows import (
    CONVERSATIONS,
    column_messages,
    first_column,
    prompt_column,
    row_chat,
    row_tools,
    with_opening,
    with_prefix_mark,
)
from rl_core.data.thought_marks import MARKS, open_mark
from rl_core.data.thoughts import THOUGHT_MARK, leading_thoughts
from rl_core.data.token_marks import unmarked
from rl_core.data.token_stream import TokenStream, text_after
from rl_core.errors import needs_column
from rl_core.types import Completion, InputImage, Message, Row, TrainingSample, Turn

# Column of a prompt -> what may hold its reply, where a row has no column `response`.
ANSWERS = {"question": ("answer",), "problem": ("solution",)}


def sft_samples(
    chat: Chat, row: Row, action_weight: float = 1.0, observation_weight: float = 0.0
) -> list[TrainingSample]:
    """Samples of a row {"messages"} or {"prompt", "response"} (strings or lists of messages), in
    any form of docs/runs.md, or of an episode that a run wrote. Advantages are the two weights. A
    token of weight 0 is not trained. A column `tools` is given to the template. Raises ValueError
    if a row has nothing to train."""
    messages, tools, chat = sft_messages(row), row_tools(row), row_chat(chat, row)
    if is_trajectory(row) and row["tokenizer"] == fingerprint(chat):
        turns = [as_sampled(ids, new_ids, is_fresh) for new_ids, is_fresh, ids in row["turns"]]
        for turn in turns:
            turn.images = chat.images_of(messages)
    else:
        turns = sft_turns(chat, messages, tools)
    weights = [action_weight] * len(turns)
    if observation_weight:
        turns, is_action = with_observations(chat, messages, turns, tools)
        weights = [action_weight if action else observation_weight for action in is_action]
    return samples_of_turns(turns, weights)


def samples_of_messages(
    chat: Chat, messages: list[Message], tools: list | None
) -> list[TrainingSample]:
    """Samples of a conversation's trained messages, with advantages 1."""
    turns = sft_turns(chat, messages, tools)
    return samples_of_turns(turns, [1.0] * len(turns))


def samples_of_turns(turns: list[Turn], weights: list[float]) -> list[TrainingSample]:
    samples = []
    for sample in samples_from_turns(turns, weights):
        # Tokens of images, which have negative ids, are never trained.
        sample.loss_mask = (sample.advantages != 0) & (sample.token_ids >= 0)
        sample.advantages = sample.advantages * sample.loss_mask
        sample.policy_versions = np.where(sample.loss_mask, 0, -1)
        if sample.loss_mask.any():
            samples.append(sample)
    return samples


def as_sampled(
    token_ids: list[int],
    new_ids: list[int],
    is_fresh: bool,
    text: str = "",
    images: tuple[InputImage, ...] = (),
) -> Turn:
    """A turn as if an engine had sampled it. Its logprobs and policy version are placeholders."""
    completion = Completion(
        token_ids=list(token_ids),
        logprobs=[0.0] * len(token_ids),
        text=text,
        finish_reason="stop",
        policy_version=0,
    )
    return Turn(new_ids=list(new_ids), is_fresh=is_fresh, completion=completion, images=images)


def sft_messages(row: Row, notes: list[str] | None = None) -> list[Message]:
    """The conversation of a row; context has "train": False. `notes`: see canonical_messages()."""
    column = prompt_column(row)
    asked = with_prefix_mark(row, column_messages(row, column, notes=notes))
    messages = with_opening(row, with_row_mask(row, asked, notes), notes)
    if column not in CONVERSATIONS:
        replies = ["response", "completion", "output", *ANSWERS.get(column, ())]
        reply = first_column(row, replies)
        if reply is None:
            raise ValueError(needs_column("response", row, f" with the reply to {column!r}"))
        messages = as_context(messages) + text_reply(row, reply, notes)
    elif is_trajectory(row):
        # Assistants' messages before the first turn are part of the prompt.
        trained, num_turns = trained_messages(messages), len(row["turns"])
        first = trained[-num_turns] if len(trained) >= num_turns else 0
        messages = as_context(messages[:first]) + messages[first:]
    messages = with_prefixes(greeting_as_context(messages, notes))
    if not trained_messages(messages):
        roles = [m["role"] for m in messages]
        raise ValueError(
            f"messages with roles {roles} hold nothing to train: give one with role 'assistant' "
            "behind a message that it answers"
        )
    return messages


def with_row_mask(row: Row, messages: list[Message], notes: list[str] | None) -> list[Message]:
    """The messages, some of them context by a column of the row, such as `loss_mask`, that has a
    number for each message or for each one of assistants. Raises ValueError for other numbers."""
    for key in TRAIN_KEYS:
        mask = row.get(key)
        if not isinstance(mask, (list, tuple)):
            continue
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        numbers = {len(replies): replies, len(messages): [*range(len(messages))]}.get(len(mask))
        if numbers is None:
            raise ValueError(
                f"column {key!r} has {len(mask)} values, and there are {len(messages)} messages, "
                f"{len(replies)} of assistants: give one for each, or remove the column"
            )
        for i, value in zip(numbers, mask, strict=True):
            if messages[i]["role"] == "assistant" and not read_flag(key, value):
                messages[i] = {**messages[i], "train": False}
                if notes is not None:
                    notes.append(f"message {i + 1}: not trained (column {key!r})")
    return messages


def text_reply(row: Row, column: str, notes: list[str] | None) -> list[Message]:
    """The messages of a reply's column. A text has the thoughts in column `reasoning_content`."""
    reply, thoughts = column_messages(row, column, "assistant", notes), row.get("reasoning_content")
    if not thoughts or not isinstance(row[column], str):
        return reply
    if not isinstance(thoughts, str):
        raise ValueError(f"column 'reasoning_content' must be a text, is {shorten(thoughts)}")
    if notes is not None:
        notes.append("column 'reasoning_content' read as the thoughts of the reply")
    return [{**reply[0], "reasoning_content": thoughts}]


def greeting_as_context(messages: list[Message], notes: list[str] | None = None) -> list[Message]:
    """Assistants' messages at the beginning answer nothing: they are context."""
    number = 0
    while number < len(messages) and messages[number]["role"] == "assistant":
        number += 1
    if number and notes is not None:
        notes.append("message 1: the assistant begins, which is context")
    return as_context(messages[:number]) + messages[number:]


def is_trained(message: Message) -> bool:
    return message.get("train") is not False


def trained_messages(messages: list[Message]) -> list[int]:
    """Indices of the assistant messages that are trained."""
    indices = []
    for i, message in enumerate(messages):
        if message.get("role") == "assistant" and is_trained(message):
            indices.append(i)
    return indices


def sft_turns(chat: Chat, messages: list[Message], tools: list | None = None) -> list[Turn]:
    """A turn for every assistant message that is trained, as if an engine had sampled it behind the
    same prompt. Its last token is the end token that the template writes there. Messages with
    "train": False are context, as is the "prefix" of a message. A turn is fresh if the template
    rewrites earlier turns in its prompt."""
    trained, turns = trained_messages(messages), []
    stream = TokenStream(chat, prompt_of(messages, trained[0]), tools)
    for i, until in zip(trained, [*trained[1:], len(messages)], strict=True):
        check_turn(chat, messages[: i + 1], tools)
        text, end_id = said_text(chat, stream.rendered, messages[: i + 1], tools)
        following, is_last = prompt_of(messages, until), i == trained[-1]
        if i + 1 < len(messages):
            rendered = render_following(chat, following, tools, is_last)
            end_id = end_behind(chat, text_after(rendered, stream.rendered, text), end_id)
        token_ids = chat.encode(text, continues=True)
        if end_id is not None:
            token_ids.append(end_id)
        sampled = as_sampled(
            token_ids, stream.new_ids, stream.is_fresh, unmarked(text), stream.new_images
        )
        turns.append(sampled)
        if not is_last:
            stream.extend(token_ids, text, following, rendered)
    return turns


def prompt_of(messages: list[Message], index: int) -> list[Message]:
    """The messages before message `index`, and the prefix that it continues."""
    prefix = messages[index].get("prefix") if index < len(messages) else None
    unfinished = [{"role": "assistant", "content": prefix, "prefix": True}] if prefix else []
    return messages[:index] + unfinished


def check_turn(chat: Chat, messages: list[Message], tools: list | None) -> None:
    """Raises ValueError unless the turn of the last message has all of its content and thoughts,
    and its prompt has the content of all messages before."""
    last = len(messages) - 1

    def rendered(probes: list[Message]) -> list[Rendering]:
        prompt = chat.render(probes[:last], tools)
        text, _ = said_text(chat, prompt, probes, tools)
        return [
            Rendering(text=prompt, indices=range(last)),
            Rendering(text=text, indices=[last], with_thoughts=True),
        ]

    chat.shapes.check(messages, (bool(tools), "trained"), rendered)


def render_following(chat: Chat, messages: list[Message], tools: list | None, is_last: bool) -> str:
    """The rendering of a conversation up to the next trained turn. "" if no trained turn follows
    and the template refuses the messages after the last one."""
    if not is_last:
        return chat.render(messages, tools)
    with suppress(ValueError):
        return chat.render(messages, tools, add_generation_prompt=False)
    return ""


def end_behind(chat: Chat, suffix: str | None, end_id: int | None) -> int | None:
    """Id of the end token of the turn before `suffix` in the rendering. None if engines do not stop
    at the token that the template writes there. `end_id` if the template rewrites the turn, or
    writes no special token behind it."""
    token = chat.special_token.match(suffix.lstrip()) if suffix else None
    if token is None:
        return end_id
    token_id = chat.special_ids[token[0].strip()]
    return token_id if token_id in chat.stop_token_ids else None


def said_text(
    chat: Chat, prompt: str, messages: list[Message], tools: list | None
) -> tuple[str, int | None]:
    """(marked text of the last message as the template renders it behind `prompt`, id of the token
    that ends it). Raises ValueError if the prompt opens thoughts that the text does not close."""
    message, opening = messages[-1], open_mark(prompt)
    end_id = chat.call_end_token_id if message.get("tool_calls") else chat.end_token_id
    rendered = rendered_turn(chat, prompt, messages, tools)
    if opening is not None and MARKS[opening] not in rendered:
        rendered = closed_thoughts(chat, message, opening, len(messages)) + rendered.lstrip()
    return split_end(chat, rendered, end_id)


def rendered_turn(chat: Chat, prompt: str, messages: list[Message], tools: list | None) -> str:
    """The last message as the template renders it behind `prompt`, or behind the header of a prompt
    with thoughts that no message has. Raises ValueError if it is not found, or has thoughts behind
    those of the prompt."""
    conversation = chat.render(messages, tools, add_generation_prompt=False)
    if (text := text_after(conversation, prompt, "")) is not None:
        return text
    before, (usual, _) = "", generation_prompt(chat)
    not_found = ValueError(
        f"message {len(messages)} cannot be trained: the template renders it so that the "
        f'generation prompt {unmarked(prompt)[-40:]!r} is not before it; give it "train": false, '
        "or another template with --actors.NAME.chat_template FILE"
    )
    usual = THOUGHT_MARK.split(usual)[0].strip()
    with suppress(ValueError):
        before = chat.render(messages[:-1], tools, add_generation_prompt=False)
    if before and prompt.startswith(before) and conversation.startswith(before):
        prompt, conversation = prompt[len(before) :], conversation[len(before) :]
    else:
        # The history is rewritten: the message begins behind the last header before the text that
        # changes with it.
        other = [*messages[:-1], {"role": "assistant", "content": PROBE}]
        seen = shared_length(conversation, chat.render(other, tools, add_generation_prompt=False))
        start = conversation[:seen].rfind(usual) if usual in prompt else -1
        prompt, conversation = prompt[prompt.rfind(usual) :], conversation[start:]
        if start < 0 or not usual:
            raise not_found
        if (text := text_after(conversation, prompt, "")) is not None:
            return text
    header = THOUGHT_MARK.split(prompt)[0]
    text = text_after(conversation, header, "")
    if text is None or header == prompt or (usual and text.lstrip().startswith(usual)):
        raise not_found
    if open_mark(prompt) is None and leading_thoughts(text):
        raise ValueError(
            f"message {len(messages)} has thoughts, and the generation prompt ends in empty ones, "
            f"{unmarked(prompt)[-40:]!r}: remove the message's thoughts, or set the template's "
            'variable for thoughts, such as "chat_template_kwargs": {"enable_thinking": true}'
        )
    return text


def closed_thoughts(chat: Chat, message: Message, opening: str, number: int) -> str:
    """The message's marked thoughts behind a prompt that ends in the mark `opening`, and their
    closing mark. Raises ValueError if the message has no thoughts."""
    content, closing = text_of(message), MARKS[opening]
    if closing in content:
        thoughts, _, answer = content.partition(closing)
        space = answer[: len(answer) - len(answer.lstrip())]
        return chat.marked(thoughts.lstrip().removeprefix(opening).lstrip()) + closing + space
    if thoughts := message.get("reasoning_content"):
        return f"{chat.marked(thoughts.strip())}\n{closing}\n\n"
    raise ValueError(
        f"message {number} has no thoughts, but the generation prompt ends in {opening!r}, which "
        f'the chat template does not close: give the message thoughts by "reasoning_content", or '
        f"begin its content with '{opening}\\n\\n{closing}\\n\\n'"
    )


def split_end(chat: Chat, text: str, end_id: int | None = None) -> tuple[str, int | None]:
    """(rendered turn without its end token, id of the end token). The end token is the first stop
    token among the special tokens and whitespace that the text ends in; without one, `end_id`."""
    turn, end = text, len(text)
    for token in reversed(list(chat.special_token.finditer(text))):
        if text[token.end() : end].strip():
            break
        end = token.start()
        token_id = chat.special_ids.get(token[0].strip())
        if token_id in chat.stop_token_ids:
            turn, end_id = text[:end], token_id
    return turn, end_id


def with_observations(
    chat: Chat, messages: list[Message], turns: list[Turn], tools: list | None = None
) -> tuple[list[Turn], list[bool]]:
    """(turns, whether each is an action): the answer to a turn is a turn too, which is not an
    action. It is all that the template puts between that turn's end token and the generation
    prompt. An answer with a message of "train": False is context. Raises ValueError for a message
    with a prefix, which is neither."""
    if any(message.get("prefix") for message in messages):
        raise ValueError(
            '"prefix": true cannot be combined with --sft.weights that train answers: remove one'
        )
    trained = trained_messages(messages)
    if len(trained) != len(turns):  # The episode's messages are not those of its turns.
        return turns, [True] * len(turns)
    answers = turns[1:]
    if trained[-1] + 1 < len(messages):
        last = turns[-1].completion
        text = last.text or chat.decode(last.token_ids)
        stream = TokenStream(chat, messages[: trained[-1]], tools)
        chat.check(messages, tools)
        stream.extend(last.token_ids, text, messages)
        images = stream.new_images
        answers.append(as_sampled([], stream.new_ids, stream.is_fresh, images=images))
    observed, is_action = [turns[0]], [True]
    ends = [*trained[1:], len(messages)]
    for i, turn in enumerate(answers):
        begin, until = trained[i] + 1, ends[i]
        answer, ids = messages[begin:until], turn.new_ids
        if answer and all(map(is_trained, answer)):
            sampled_ids = turns[i].completion.token_ids
            start, end = answer_span(chat, sampled_ids, turn, messages[:until], begin, tools)
            fresh, images = turn.is_fresh, turn.images
            observed.append(as_sampled(ids[start:end], ids[:start], fresh, images=images))
            is_action.append(False)
            turn = replace(turn, new_ids=ids[end:], is_fresh=False)
        if until < len(messages):
            observed.append(turn)
            is_action.append(True)
    return observed, is_action


def answer_span(
    chat: Chat,
    sampled_ids: list[int],
    turn: Turn,
    messages: list[Message],
    first: int,
    tools: list | None,
) -> tuple[int, int]:
    """(start, end) of messages[first:] in turn.new_ids, which follow `sampled_ids`; empty
    if they are not found."""
    end = answer_end(chat, turn.new_ids)
    stops = set(chat.stop_token_ids)
    if not turn.is_fresh:
        # A truncated turn has no end token; the template's is not part of the answer.
        has_end = not stops.isdisjoint(sampled_ids[-1:])
        gets_end = not chat.end_token_ids.isdisjoint(turn.new_ids[:1])
        return int(gets_end and not has_end), end
    # The template rewrote what stands before: the answer's text begins behind the last end token
    # before its content.
    changed = list(messages)
    changed[first] = {**messages[first], "content": PROBE}
    rendered = chat.render(messages, tools, add_generation_prompt=False)
    other = chat.render(changed, tools, add_generation_prompt=False)
    seen = rendered[: shared_length(rendered, other)]
    begin = 0
    for token, token_id in chat.special_ids.items():
        if token_id in stops and token in seen:
            begin = max(begin, seen.rfind(token) + len(token))
    ids = chat.encode(rendered[begin or len(seen) :], continues=True)
    start = end - len(ids)
    return (start, end) if turn.new_ids[start:end] == ids else (end, end)


def answer_end(chat: Chat, prompt_ids: list[int]) -> int:
    """Index at which a prompt's generation prompt begins; the prompt's length without one."""
    text, ids = generation_prompt(chat)
    if not text:
        return len(prompt_ids)
    if prompt_ids[-len(ids) :] == ids:
        return len(prompt_ids) - len(ids)
    # A token may reach over its beginning.
    for n in range(1, min(len(ids) + 2, len(prompt_ids)) + 1):
        tail = chat.tokenizer.decode(prompt_ids[-n:], clean_up_tokenization_spaces=False)
        if tail.strip().endswith(text):
            return len(prompt_ids) - n
    return len(prompt_ids)


@lru_cache(8)
def generation_prompt(chat: Chat) -> tuple[str, list[int]]:
    """(text without the space around it, token ids) of the template's generation prompt."""
    talk = [{"role": "user", "content": "x"}]
    ids = chat.prompt_ids(talk)
    ids = ids[shared_length(chat.prompt_ids(talk, None, False), ids) :]
    return chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip(), ids


def shared_length(a: Sequence, b: Sequence) -> int:
    """Length of the common beginning."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def with_prefixes(messages: list[Message]) -> list[Message]:
    """The conversation with each assistant's message of "prefix": True and the reply that continues
    it as one message, whose "prefix" is the text that is not trained. Raises ValueError if no reply
    continues such a message."""
    joined: list[Message] = []
    for number, message in enumerate(messages, 1):
        unfinished = joined[-1] if joined else {}
        if unfinished.get("prefix") is True and message["role"] == "assistant":
            prefix, is_prefix = text_of(unfinished), message.get("prefix") is True
            content = prefix + text_of(message)
            joined[-1] = {**message, "content": content, "prefix": is_prefix or prefix}
        else:
            joined.append(message)
        is_last = number == len(messages) or messages[number]["role"] != "assistant"
        if is_last and joined[-1].get("prefix") is True and message["role"] == "assistant":
            raise ValueError(
                f"message {number} is to be continued, by its prefix or partial or the column "
                "continue_final_message, and no reply continues it; give the reply as the next "
                "message of the assistant, or remove the key"
            )
    return joined
