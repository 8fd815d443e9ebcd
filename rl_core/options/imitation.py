"""Rows to imitate (SFT) -> TrainingSamples: assistants' turns (actions), and the answers to them (observations).

A row is a conversation, or an episode that a run wrote; an episode keeps its sampled tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rl_core.data.chat import PROBE, Chat, TokenStream, shared_length, text_after, unmarked
from rl_core.data.rows import is_trajectory
from rl_core.data.samples import prompts_of, samples_from_turns
from rl_core.data.tasks import column_messages
from rl_core.types import Completion, Message, TrainingSample, Turn


def imitation_samples(
    chat: Chat, row: dict[str, Any], action_weight: float = 1.0, observation_weight: float = 0.0
) -> list[TrainingSample]:
    """Samples of a row {"messages"} or {"prompt", "response"} (strings or lists of messages), or of an episode that a run
    wrote. Advantages are the two weights. A token of weight 0 is not trained. A column `tools` is given to the template.
    Raises ValueError if a row cannot be imitated."""
    messages, tools, heard = imitation_messages(row), row.get("tools") or None, None
    if is_trajectory(row) and row["tokenizer"] == chat.fingerprint:
        turns = [imitated_turn(ids, new_ids, is_fresh) for new_ids, is_fresh, ids in row["turns"]]
    else:
        turns = imitation_turns(chat, messages, tools)
    if observation_weight:
        turns, spans = observations(chat, messages, turns, tools)
        pairs = zip(turns, spans, strict=True)
        heard = [[observation_weight * (i in span) for i in range(len(turn.new_ids))] for turn, span in pairs]
    samples = samples_from_turns(turns, action_weight, "", heard)
    if not action_weight:
        samples = [trained_where_weighty(s) for s in samples]
    return [s for s in samples if any(s.loss_mask)]


def trained_where_weighty(sample: TrainingSample) -> TrainingSample:
    mask = [int(a != 0) for a in sample.advantages]
    versions = [v if m else -1 for v, m in zip(sample.policy_versions, mask, strict=True)]
    return replace(sample, loss_mask=mask, policy_versions=versions)


def imitated_turn(token_ids: list[int], new_ids: list[int], is_fresh: bool, text: str = "") -> Turn:
    """A turn as if it had been sampled; nothing reads its logprobs and version."""
    ids = list(token_ids)
    said = Completion(token_ids=ids, logprobs=[0.0] * len(ids), text=text, finish_reason="stop", policy_version=0)
    return Turn(new_ids=list(new_ids), is_fresh=is_fresh, completion=said)


def imitation_messages(row: dict[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        messages = column_messages(row, "messages")
        if is_trajectory(row):  # assistants' messages before the first turn are part of the prompt
            spoken = imitated(messages)
            first = spoken[-len(row["turns"])] if len(spoken) >= len(row["turns"]) else 0
            messages = [{**m, "train": False} for m in messages[:first]] + messages[first:]
    elif row.get("prompt") is not None and row.get("response") is not None:
        prompt = [{**m, "train": False} for m in column_messages(row, "prompt")]
        messages = prompt + column_messages(row, "response", "assistant")
    else:
        raise ValueError(
            f'a row with columns {sorted(row)} cannot be imitated: it needs "messages", or "prompt" and "response"'
        )
    if not imitated(messages):
        roles = [m["role"] for m in messages]
        raise ValueError(f"messages with roles {roles} hold nothing to imitate: give one with role 'assistant'")
    return messages


def imitated(messages: list[Message]) -> list[int]:
    """Indices of messages to imitate: assistants' without "train": False."""
    return [i for i, m in enumerate(messages) if m.get("role") == "assistant" and m.get("train") is not False]


def imitation_turns(chat: Chat, messages: list[Message], tools: list | None = None) -> list[Turn]:
    """Every assistant message as if it had been sampled, its end token included. A message with "train": False is context.
    The prompt is the one that an engine would get there. If the template rewrites earlier turns in it, it does not extend the
    turn before."""
    chosen = imitated(messages)
    if not chosen:
        return []
    stream, said = TokenStream(chat, messages[: chosen[0]], tools), ""
    turns: list[Turn] = []
    for i in chosen:
        if turns:
            stream.extend(turns[-1].completion.token_ids, said, messages[:i])
        said, end_id = said_text(chat, stream.rendered, messages[: i + 1], tools)
        token_ids = chat.encode(said, continues=True) + ([] if end_id is None else [end_id])
        turns.append(imitated_turn(token_ids, stream.new_ids, stream.is_fresh, unmarked(said)))
    return turns


def said_text(chat: Chat, prompt: str, messages: list[Message], tools: list | None) -> tuple[str, int | None]:
    """(marked text of the last message as the template renders it behind `prompt`, id of the token that ends it)."""
    rendered = chat.render(messages, tools, add_generation_prompt=False)
    default_end = chat.end_token_id if chat.end_token_id is not None else chat.tokenizer.eos_token_id
    said = text_after(rendered, prompt, "")
    if said is not None:
        said, end_id = split_end(chat, said)
        return said, default_end if end_id is None else end_id
    message = messages[-1]
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if message.get("tool_calls") or not content:
        raise ValueError(
            f"message {len(messages) - 1} cannot be imitated: the template renders it so that the generation prompt "
            f'{unmarked(prompt)[-40:]!r} is not before it; give its text as "content", or "train": false'
        )
    return without_repeat(prompt, chat.marked(content)), default_end


def split_end(chat: Chat, text: str) -> tuple[str, int | None]:
    """(a rendered turn up to its end token, the end token's id or None): of the special tokens and whitespace
    that the text ends in, the first that an engine stops at."""
    special = tuple(sorted(chat.special_ids, key=len, reverse=True))
    rest, said, end_id = text.rstrip(), text, None
    while rest.endswith(special):
        token = next(s for s in special if rest.endswith(s))
        rest = rest[: -len(token)]
        if chat.special_ids[token] in chat.stop_token_ids:
            said, end_id = rest, chat.special_ids[token]
        rest = rest.rstrip()
    return said, end_id


def without_repeat(prompt: str, content: str) -> str:
    """content without a beginning that the prompt already ends with, such as '<think>' in some generation prompts."""
    opening = re.search(r"<[^<>|]+>\s*\Z", prompt)
    if opening and content.lstrip().startswith(opening[0].strip()):
        return content.lstrip()[len(opening[0].strip()) :].lstrip()
    return content


def observations(
    chat: Chat, messages: list[Message], turns: list[Turn], tools: list | None = None
) -> tuple[list[Turn], list[range]]:
    """(turns, spans): an empty turn is added if messages follow the last one. A span is the answer to the turn before, in a
    turn's new_ids: all that the template puts between that turn's end token and the generation prompt. It is empty for an
    answer with a message of "train": False, and for the first turn."""
    spoken = imitated(messages)
    if len(spoken) != len(turns):  # an episode whose messages are not those of its turns
        return turns, [range(0)] * len(turns)
    if spoken[-1] + 1 < len(messages):
        turns = turns + closing_turn(chat, turns, messages, spoken[-1], tools)
    spans = [range(0)]
    for number, turn in enumerate(turns[1:], 1):
        first, until = spoken[number - 1] + 1, spoken[number] if number < len(spoken) else len(messages)
        is_context = any(m.get("train") is False for m in messages[first:until])
        said = turns[number - 1].completion.token_ids
        spans.append(range(0) if is_context else answer_span(chat, said, turn, messages[:until], first, tools))
    return turns, spans


def closing_turn(chat: Chat, turns: list[Turn], messages: list[Message], place: int, tools: list | None) -> list[Turn]:
    """[an empty turn with the messages that follow the last turn, messages[place]]. Empty if the template rewrites history
    and the tokens may not be those of the messages."""
    stream, done = TokenStream(chat, messages[:place], tools), turns[-1].completion
    first_ids = stream.prompt_ids
    is_known = stream.extend(done.token_ids, done.text or chat.decode(done.token_ids), messages)
    if not is_known and first_ids != prompts_of(turns)[-1]:
        return []
    return [imitated_turn([], stream.new_ids[: answer_end(chat, stream.new_ids)], stream.is_fresh)]


def answer_span(
    chat: Chat, said: list[int], turn: Turn, messages: list[Message], first: int, tools: list | None
) -> range:
    """The span of messages[first:] in turn.new_ids; empty if the template rewrote them."""
    end = answer_end(chat, turn.new_ids)
    if not messages[first:]:
        return range(0)
    if not turn.is_fresh:
        # A truncated turn has no end token; the template's is not part of the answer.
        is_ended, follows = said and said[-1] in chat.stop_token_ids, turn.new_ids[:1]
        is_cut = not is_ended and follows and follows[0] in chat.stop_token_ids
        return range(bool(is_cut), end)
    ids = answer_ids(chat, messages, first, tools)
    return range(end - len(ids), end) if turn.new_ids[end - len(ids) : end] == ids else range(0)


def answer_end(chat: Chat, prompt_ids: list[int]) -> int:
    """Where a prompt's generation prompt begins; the prompt's length if it ends in none."""
    text, ids = chat.generation_prompt
    if not text:
        return len(prompt_ids)
    if prompt_ids[-len(ids) :] == ids:
        return len(prompt_ids) - len(ids)
    for n in range(1, min(len(ids) + 2, len(prompt_ids)) + 1):  # a token may reach over its beginning
        tail = chat.tokenizer.decode(prompt_ids[-n:], clean_up_tokenization_spaces=False)
        if tail.strip().endswith(text):
            return len(prompt_ids) - n
    return len(prompt_ids)


def answer_ids(chat: Chat, messages: list[Message], first: int, tools: list | None = None) -> list[int]:
    """Tokens of messages[first:], from the end token of the assistant's message before them on."""
    rendered = chat.render(messages, tools, add_generation_prompt=False)
    changed = {**messages[first], "content": PROBE}
    other = chat.render([*messages[:first], changed, *messages[first + 1 :]], tools, add_generation_prompt=False)
    seen = rendered[: shared_length(rendered, other)]  # up to the content of the first of them
    ends = [s for s, i in chat.special_ids.items() if i in chat.stop_token_ids]
    start = max((seen.rfind(s) + len(s) for s in ends if s in seen), default=len(seen))
    return chat.encode(rendered[start:], continues=True)
