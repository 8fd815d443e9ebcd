"""Rows of preference pairs -> TrainingSamples: two replies for DPO, two conversations for a reward
model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rl_core.data.chat import Chat
from rl_core.data.messages import as_context
from rl_core.data.tasks import (
    PROMPT_COLUMNS,
    column_messages,
    first_column,
    row_tools,
    shorten,
    with_opening,
)
from rl_core.plugins.sft import row_chat, sft_samples, shared_length
from rl_core.types import Message, TrainingSample

PAIR = ("chosen", "rejected")


def reply_pair(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row: the same prompt and each reply. Assistants' tokens of
    the reply are trained."""
    context, *replies = pair_messages(row)
    context, samples, chat = as_context(context), [], row_chat(chat, row)
    for side, reply in zip(PAIR, replies, strict=True):
        found = sft_samples(chat, {"messages": context + reply, "tools": row_tools(row)})
        if len(found) != 1:
            raise ValueError(
                f"the chat template rewrites earlier turns of column {side!r}, so that its tokens "
                f"are {len(found)} "
                "sequences; give a reply of one assistant message"
            )
        samples += found
    return with_margin(samples, row)


def scored_pair(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row, each the conversation as the chat template renders
    it, so that a sequence classifier reads the same tokens. A dummy last token stands for the
    score: the hidden state of the conversation's last token "predicts" it. Everything after the
    common beginning is trained."""
    context, *replies = pair_messages(row)
    tools, pad, chat = row_tools(row), chat.tokenizer.pad_token_id, row_chat(chat, row)
    ids = [
        chat.prompt_ids(context + reply, tools, add_generation_prompt=False) for reply in replies
    ]
    if pad is not None and any(i[-1:] == [pad] for i in ids):
        raise ValueError(
            f"the conversation ends in the padding token {chat.tokenizer.pad_token!r}, so that a "
            "sequence classifier "
            "would not see where it ends; give the tokenizer another pad_token"
        )
    shared, samples = shared_length(*ids), []
    for token_ids in ids:
        num = len(token_ids) + 1
        zeros = {
            "rollout_logprobs": [0.0] * num,
            "policy_versions": [-1] * num,
            "advantages": [0.0] * num,
        }
        mask = [0] * shared + [1] * (num - shared)
        samples.append(TrainingSample(token_ids=[*token_ids, 0], loss_mask=mask, **zeros))
    return with_margin(samples, row)


def with_margin(samples: list[TrainingSample], row: dict[str, Any]) -> list[TrainingSample]:
    """The pair, with the row's margin as the advantage of the chosen side."""
    if samples[0].token_ids.tolist() == samples[1].token_ids.tolist():
        raise ValueError(
            f"'chosen' and 'rejected' have the same tokens, {shorten(row['chosen'])}: a pair must "
            "differ; remove this row from the file"
        )
    margin = row.get("margin") or 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"column 'margin' holds {shorten(margin)}: it must be a number")
    return [
        replace(s, advantages=m * s.loss_mask)
        for s, m in zip(samples, (float(margin), 0.0), strict=True)
    ]


def pair_messages(
    row: dict[str, Any], notes: list[str] | None = None
) -> tuple[list[Message], list[Message], list[Message]]:
    """(context, chosen reply, rejected reply) of a row {"chosen", "rejected"}. Both are replies
    (strings, or messages that an assistant begins) to the row's `messages` or `prompt`, or
    conversations with a common beginning. `notes`: as of canonical_messages. Raises ValueError."""
    sides = [column_messages(row, column, "assistant", notes) for column in PAIR]
    if all(side[0]["role"] == "assistant" for side in sides):
        column = first_column(row, PROMPT_COLUMNS) or "prompt"
        context = with_opening(row, column_messages(row, column, notes=notes), notes)
    else:
        shared = shared_length(*sides)
        context = with_opening(row, sides[0][:shared], notes)
        sides = [side[shared:] for side in sides]
    for column, side in zip(PAIR, sides, strict=True):
        said = side[-1] if side else {}
        is_empty = not said.get("tool_calls") and not str(said.get("content") or "").strip()
        if is_empty or not context or not side[0]["role"] == said["role"] == "assistant":
            raise ValueError(
                f"column {column!r} must be a reply that begins and ends with an assistant's text, "
                "or a conversation "
                "that begins as the other one does, differs, and ends so; is "
                f"{shorten(row[column])}"
            )
    return context, *sides
