"""Rows to imitate (SFT) -> TrainingSamples: assistants' turns (actions), and the answers to them
(observations).

A row is a conversation, or an episode that a run wrote; an episode keeps its sampled tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from rl_core.data.chat import PROBE, Chat, TokenStream, shared_length, text_after, text_of, unmarked
from rl_core.data.rows import is_trajectory
from rl_core.data.samples import samples_from_turns
from rl_core.data.tasks import column_messages, first_column, shorten
from rl_core.types import Completion, Message, TrainingSample, Turn


def imitation_samples(
    chat: Chat, row: dict[str, Any], action_weight: float = 1.0, observation_weight: float = 0.0
) -> list[TrainingSample]:
    """Samples of a row {"messages"} or {"prompt", "response"} (strings or lists of messages), in
    any form of docs/runs.md, or of an episode that a run wrote. Advantages are the two weights. A
    token of weight 0 is not trained. A column `tools` is given to the template. Raises ValueError
    if a row cannot be imitated."""
    messages, tools, heard = imitation_messages(row), row_tools(row), None
    if is_trajectory(row) and row["tokenizer"] == chat.fingerprint:
        turns = [imitated_turn(ids, new_ids, is_fresh) for new_ids, is_fresh, ids in row["turns"]]
    else:
        turns = imitation_turns(chat, messages, tools)
    if observation_weight:
        turns, spans = observations(chat, messages, turns, tools)
        pairs = zip(turns, spans, strict=True)
        heard = [
            [observation_weight * (i in span) for i in range(len(turn.new_ids))]
            for turn, span in pairs
        ]
    found = []
    for sample in samples_from_turns(turns, action_weight, "", heard):
        mask = sample.advantages != 0
        if mask.any():
            found.append(
                replace(
                    sample,
                    loss_mask=mask,
                    policy_versions=np.where(mask, sample.policy_versions, -1),
                )
            )
    return found


def imitated_turn(token_ids: list[int], new_ids: list[int], is_fresh: bool, text: str = "") -> Turn:
    """A turn as if it had been sampled; nothing reads its logprobs and version."""
    ids = list(token_ids)
    said = Completion(
        token_ids=ids, logprobs=[0.0] * len(ids), text=text, finish_reason="stop", policy_version=0
    )
    return Turn(new_ids=list(new_ids), is_fresh=is_fresh, completion=said)


def row_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools in a row's column `tools`: a list of JSON schemas, or the text of one, since the
    rows of a table must have equal keys. Raises ValueError for anything else."""
    given = row.get("tools") or None
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given)
        except ValueError:
            tools = given
    if tools and not (
        isinstance(tools, (list, tuple)) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError(
            "column 'tools' must be a list of JSON schemas, or such a list as JSON text; is "
            f"{shorten(given)}"
        )
    return tools or None


def imitation_messages(row: dict[str, Any]) -> list[Message]:
    column = first_column(row, ("messages", "prompt", "instruction", "conversations")) or "messages"
    if column in ("messages", "conversations"):
        messages = column_messages(row, column)
        if is_trajectory(row):  # assistants' messages before the first turn are part of the prompt
            spoken = imitated(messages)
            first = spoken[-len(row["turns"])] if len(spoken) >= len(row["turns"]) else 0
            messages = [{**m, "train": False} for m in messages[:first]] + messages[first:]
    else:
        prompt = [{**m, "train": False} for m in column_messages(row, column)]
        reply = first_column(row, ("response", "completion", "output")) or "response"
        messages = prompt + column_messages(row, reply, "assistant")
    if not imitated(messages):
        roles = [m["role"] for m in messages]
        raise ValueError(
            f"messages with roles {roles} hold nothing to imitate: give one with role 'assistant'"
        )
    return messages


def imitated(messages: list[Message]) -> list[int]:
    """Indices of messages to imitate: assistants' without "train": False."""
    return [
        i
        for i, m in enumerate(messages)
        if m.get("role") == "assistant" and m.get("train") is not False
    ]


def imitation_turns(chat: Chat, messages: list[Message], tools: list | None = None) -> list[Turn]:
    """Every assistant message as if it had been sampled, its end token included. A message with
    "train": False is context. The prompt is the one that an engine would get there. If the template
    rewrites earlier turns in it, it does not extend the turn before."""
    chosen, turns, said = imitated(messages), [], ""
    stream = TokenStream(chat, messages[: chosen[0]], tools)
    for i in chosen:
        if turns:
            stream.extend(turns[-1].completion.token_ids, said, messages[:i])
        said, end_id = said_text(chat, stream.rendered, messages[: i + 1], tools)
        token_ids = chat.encode(said, continues=True) + ([] if end_id is None else [end_id])
        turns.append(imitated_turn(token_ids, stream.new_ids, stream.is_fresh, unmarked(said)))
    return turns


def said_text(
    chat: Chat, prompt: str, messages: list[Message], tools: list | None
) -> tuple[str, int | None]:
    """(marked text of the last message as the template renders it behind `prompt`, id of the token
    that ends it)."""
    rendered = text_after(chat.render(messages, tools, add_generation_prompt=False), prompt, "")
    if rendered is not None:
        return split_end(chat, rendered)
    message = messages[-1]
    content = text_of(message)
    if message.get("tool_calls") or not content:
        raise ValueError(
            f"message {len(messages) - 1} cannot be imitated: the template renders it so that the "
            "generation prompt "
            f'{unmarked(prompt)[-40:]!r} is not before it; give its text as "content", or "train": '
            "false"
        )
    # Some generation prompts end in '<think>', with which the content begins too.
    opening = re.search(r"<[^<>|]+>\s*\Z", prompt)
    if opening and content.lstrip().startswith(opening[0].strip()):
        content = content.lstrip()[len(opening[0].strip()) :].lstrip()
    return chat.marked(content), chat.end_token_id


def split_end(chat: Chat, text: str) -> tuple[str, int | None]:
    """(a rendered turn up to its end token, the end token's id): of the special tokens and
    whitespace that the text ends in, the first that an engine stops at; else the template's end
    token."""
    said, end_id, place = text, chat.end_token_id, len(text)
    for token in reversed([*chat.special_token.finditer(text)]):
        if text[token.end() : place].strip():
            break
        place = token.start()
        if (found := chat.special_ids.get(token[0].strip())) in chat.stop_token_ids:
            said, end_id = text[:place], found
    return said, end_id


def observations(
    chat: Chat, messages: list[Message], turns: list[Turn], tools: list | None = None
) -> tuple[list[Turn], list[range]]:
    """(turns, spans): an empty turn is added if messages follow the last one. A span is the answer
    to the turn before, in a turn's new_ids: all that the template puts between that turn's end
    token and the generation prompt. It is empty for an answer with a message of "train": False, and
    for the first turn."""
    spoken, spans = imitated(messages), [range(0)]
    if len(spoken) != len(turns):  # an episode whose messages are not those of its turns
        return turns, spans * len(turns)
    if spoken[-1] + 1 < len(messages):
        stream, last = TokenStream(chat, messages[: spoken[-1]], tools), turns[-1].completion
        stream.extend(last.token_ids, last.text or chat.decode(last.token_ids), messages)
        new_ids = stream.new_ids[: answer_end(chat, stream.new_ids)]
        turns = [*turns, imitated_turn([], new_ids, stream.is_fresh)]
    places = zip(spoken, [*spoken[1:], len(messages)], strict=True)
    for before, turn, (place, until) in zip(turns, turns[1:], places, strict=False):
        answer, said = messages[place + 1 : until], before.completion.token_ids
        is_trained = answer and all(m.get("train") is not False for m in answer)
        spans.append(
            answer_span(chat, said, turn, messages[:until], place + 1, tools)
            if is_trained
            else range(0)
        )
    return turns, spans


def answer_span(
    chat: Chat, said: list[int], turn: Turn, messages: list[Message], first: int, tools: list | None
) -> range:
    """The span of messages[first:] in turn.new_ids, which follow the tokens `said`; empty if it is
    not found."""
    end, stops = answer_end(chat, turn.new_ids), set(chat.stop_token_ids)
    if not turn.is_fresh:
        # A truncated turn has no end token; the template's is not part of the answer.
        is_cut = stops.isdisjoint(said[-1:]) and not stops.isdisjoint(turn.new_ids[:1])
        return range(int(is_cut), end)
    # The template rewrote what stands before: the answer's text begins behind the last end token
    # before its content.
    changed = [*messages[:first], {**messages[first], "content": PROBE}, *messages[first + 1 :]]
    rendered, other = (
        chat.render(m, tools, add_generation_prompt=False) for m in (messages, changed)
    )
    seen = rendered[: shared_length(rendered, other)]
    ends = (seen.rfind(s) + len(s) for s, i in chat.special_ids.items() if i in stops and s in seen)
    ids = chat.encode(rendered[max(ends, default=len(seen)) :], continues=True)
    return range(end - len(ids), end) if turn.new_ids[end - len(ids) : end] == ids else range(0)


def answer_end(chat: Chat, prompt_ids: list[int]) -> int:
    """Where a prompt's generation prompt begins; the prompt's length if it ends in none."""
    text, ids = chat.generation_prompt
    if text and prompt_ids[-len(ids) :] == ids:
        return len(prompt_ids) - len(ids)
    # A token may reach over its beginning.
    for n in range(1, min(len(ids) + 2, len(prompt_ids)) + 1) if text else ():
        tail = chat.tokenizer.decode(prompt_ids[-n:], clean_up_tokenization_spaces=False)
        if tail.strip().endswith(text):
            return len(prompt_ids) - n
    return len(prompt_ids)
