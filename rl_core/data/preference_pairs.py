"""Rows of preference pairs -> TrainingSamples: two replies for DPO, two conversations for a reward
model. Rows of one reply and a label -> samples for KTO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from rl_core.data.chat import Chat
from rl_core.data.image_parts import SIDE_IMAGES
from rl_core.data.messages import as_context, text_of
from rl_core.data.row_forms import LABELS, PAIR
from rl_core.data.sft_samples import (
    samples_of_messages,
    sft_messages,
    sft_samples,
    shared_length,
    trained_messages,
    with_prefixes,
)
from rl_core.data.task_rows import (
    column_messages,
    prompt_messages,
    row_chat,
    row_tools,
    shorten,
    with_opening,
    with_prefix_mark,
)
from rl_core.errors import needs_column
from rl_core.types import PER_TOKEN, Message, Row, TrainingSample

REPLY_LABELS = ("label", "kto_tag")  # Columns that say if a single reply is good.
RATED = {"prompt", "response", "helpfulness"}


class LeftOutError(ValueError):
    """Raised for a pair that says nothing about which reply is better: it is left out and
    counted."""


class RatedRows(Sequence):
    """Pairs of two consecutive rows of HelpSteer 2: {"prompt", "response", "helpfulness"}. Raises
    ValueError for two rows with different prompts."""

    def __init__(self, rows: Sequence[Row], name: str):
        if len(rows) % 2:
            raise ValueError(
                f"{name}: two consecutive rows with `response` and `helpfulness` are a pair, and "
                f"there are {len(rows)} rows; remove a row without a partner"
            )
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> Row:
        number = 2 * range(len(self))[index]
        first, second = self.rows[number], self.rows[number + 1]
        if first["prompt"] != second["prompt"]:
            raise ValueError(
                f"rows {number + 1} and {number + 2} of {self.name} have different prompts: two "
                "consecutive rows with `response` and `helpfulness` are a pair; give each prompt "
                "two rows, or give `chosen` and `rejected`"
            )
        ratings = [row["helpfulness"] for row in (first, second)]
        if not all(isinstance(rating, (int, float)) for rating in ratings):
            raise ValueError(
                f"rows {number + 1} and {number + 2} of {self.name}: helpfulness must be a number, "
                f"is {shorten(ratings)}"
            )
        preference = ratings[1] - ratings[0]
        replies = {"response_1": first["response"], "response_2": second["response"]}
        return {"prompt": first["prompt"], "preference_strength": preference} | replies


def pair_rows(
    rows: Sequence[Row], files: Sequence[tuple[str, int]]
) -> tuple[Sequence[Row], Sequence[tuple[str, int]]]:
    """(rows of pairs, name and number of pairs of each file) of the result of load_rows(). Files of
    rated replies become RatedRows."""
    from torch.utils.data import ConcatDataset

    tables, counts = list(getattr(rows, "datasets", [rows])), list(files)
    for i, (table, (name, num_rows)) in enumerate(zip(tables, files, strict=True)):
        if num_rows > 1 and table[0].keys() >= RATED and "chosen" not in table[0]:
            tables[i] = RatedRows(table, name)
            counts[i] = f"{name}, two rows a pair", num_rows // 2
    pairs = tables[0] if len(tables) == 1 else ConcatDataset(tables)
    return cast("Sequence[Row]", pairs), counts


def reply_pair(chat: Chat, row: Row) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row: the same prompt and each reply. Assistants' tokens of
    the reply are trained."""
    pairs, samples = pair_messages(row), []
    chat = row_chat(chat, row)
    for side, (context, reply) in zip(PAIR, pairs, strict=True):
        messages = as_context(context) + reply
        sequences = sft_samples(chat, {"messages": messages, "tools": row_tools(row)})
        samples.append(only(sequences, f"column {side!r}"))
    return with_margin(samples, row)


def only(samples: list[TrainingSample], name: str) -> TrainingSample:
    if len(samples) != 1:
        raise ValueError(
            f"the chat template rewrites earlier turns of {name}, so that its tokens are "
            f"{len(samples)} sequences; give a reply of one assistant message"
        )
    return samples[0]


def scored_pair(chat: Chat, row: Row) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row, each the conversation as the chat template renders
    it, so that a sequence classifier reads the same tokens. A dummy last token stands for the
    score: the hidden state of the conversation's last token "predicts" it. Everything after the
    common beginning is trained."""
    sides = [with_prefixes(context + reply) for context, reply in pair_messages(row)]
    tools, pad, chat = row_tools(row), chat.tokenizer.pad_token_id, row_chat(chat, row)
    ids = [chat.prompt_ids(side, tools, add_generation_prompt=False) for side in sides]
    if pad is not None and any(i[-1:] == [pad] for i in ids):
        raise ValueError(
            f"the conversation ends in the padding token {chat.tokenizer.pad_token!r}, so that a "
            "sequence classifier "
            "would not see where it ends; give the tokenizer another pad_token"
        )
    shared, samples = shared_length(*ids), []
    for side, token_ids in zip(sides, ids, strict=True):
        num = len(token_ids) + 1
        zeros = {
            "rollout_logprobs": np.zeros(num),
            "policy_versions": np.full(num, -1),
            "advantages": np.zeros(num),
        }
        padded = np.array([*token_ids, 0])
        mask = (np.arange(num) >= shared) & (padded >= 0)
        images = tuple(dict.fromkeys(chat.images_of(side)))
        samples.append(TrainingSample(token_ids=padded, loss_mask=mask, images=images, **zeros))
    return with_margin(samples, row)


def row_label(row: Row) -> bool:
    """The label of a row's reply: column `label`, or LLaMA-Factory's `kto_tag`. Raises ValueError
    if it is not true, false, 1 or 0."""
    column = next((name for name in REPLY_LABELS if row.get(name) is not None), None)
    if column is None:
        meaning = ", true if the reply is good and false if it is bad"
        raise ValueError(
            f"{needs_column('label', row, meaning)}, or train pairs by --algorithm dpo"
        )
    value = row[column]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(
            f"column {column!r} holds {shorten(value)}: it must be true or 1 (a good reply), or "
            "false or 0; texts are not read"
        )
    return bool(value)


def labelled_messages(row: Row, notes: list[str] | None = None) -> list[Message]:
    """The conversation of a row with one reply; everything up to the last message of a user is
    context, with "train": False. Raises ValueError if its label or its reply is missing."""
    row_label(row)
    messages = sft_messages(row, notes)
    end = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    messages = as_context(messages[: end + 1]) + messages[end + 1 :]
    if not trained_messages(messages):
        raise ValueError("the last message of a user has no reply: end with an assistant's message")
    return messages


def labelled_reply(chat: Chat, row: Row) -> list[TrainingSample]:
    """[the sample of a row with one reply]. Advantages are 1 for a good reply, -1 for a bad one."""
    sign, messages = 1.0 if row_label(row) else -1.0, labelled_messages(row)
    samples = samples_of_messages(row_chat(chat, row), messages, row_tools(row))
    sample = only(samples, "the reply")
    return [replace(sample, advantages=sign * sample.loss_mask)]


def mismatched(sample: TrainingSample, other: TrainingSample, limit: int) -> TrainingSample:
    """The prompt of `sample` and the reply of `other`, cut to `limit` tokens."""
    first, start = sample.loss_mask.argmax(), other.loss_mask.argmax()
    columns = {}
    for name in PER_TOKEN:
        parts = getattr(sample, name)[:first], getattr(other, name)[start:]
        columns[name] = np.concatenate(parts)[:limit]
    columns["advantages"] = np.zeros(len(columns["token_ids"]))
    read = {-key for key in columns["token_ids"].tolist()}
    images = {image.key: image for image in (*sample.images, *other.images) if image.key in read}
    return replace(sample, **columns, images=tuple(images.values()))


def with_margin(samples: list[TrainingSample], row: Row) -> list[TrainingSample]:
    """The pair, with the row's margin as the advantage of the chosen side. Raises LeftOutError if
    both sides have the same tokens."""
    if samples[0].token_ids.tolist() == samples[1].token_ids.tolist():
        raise LeftOutError("equal replies")
    margin = row.get("margin") or 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"column 'margin' holds {shorten(margin)}: it must be a number")
    return [
        replace(s, advantages=m * s.loss_mask)
        for s, m in zip(samples, (float(margin), 0.0), strict=True)
    ]


def pair_messages(
    row: Row, notes: list[str] | None = None
) -> list[tuple[list[Message], list[Message]]]:
    """(context, chosen reply) and (context, rejected reply) of a row {"chosen", "rejected"}. Both
    are replies (strings, or messages that an assistant begins) to the row's `messages` or `prompt`,
    or conversations with a common beginning. The contexts differ in the images of SIDE_IMAGES
    alone. `notes`: as of canonical_messages. Raises LeftOutError for a tie, an empty reply or equal
    conversations, and ValueError for another row that is not a pair."""
    if row.get("tied"):
        raise LeftOutError("a tie")
    for column in PAIR:
        if column in row and row[column] in (None, "", []):
            raise LeftOutError(f"an empty {column!r}")
    label = next(filter(LABELS.search, row), None)
    if label is not None and row.keys().isdisjoint(PAIR):
        raise ValueError(
            f"it needs columns 'chosen' and 'rejected', and column {label!r} may say which reply "
            "is better: write both by it (docs/runs.md has the labels that are read)"
        )
    sides = [column_messages(row, column, "assistant", notes) for column in PAIR]
    shared = (
        None if all(side[0]["role"] == "assistant" for side in sides) else shared_length(*sides)
    )
    if sides[0] == sides[1] and shared and not any(map(row.get, SIDE_IMAGES)):
        raise LeftOutError("equal replies")
    pairs = []
    for column, images, side in zip(PAIR, SIDE_IMAGES, sides, strict=True):
        seen = row | {"images": row[images], "image": None} if row.get(images) else row
        if shared is None:
            context, reply = prompt_messages(seen, notes), side
        else:
            context = with_opening(seen, with_prefix_mark(seen, side[:shared]), notes)
            reply = side[shared:]
        last = reply[-1] if reply else {}
        if not context or not reply or not reply[0]["role"] == last["role"] == "assistant":
            raise ValueError(
                f"column {column!r} must be a reply that begins and ends with an assistant's text, "
                "or a conversation "
                "that begins as the other one does, differs, and ends so; is "
                f"{shorten(row[column])}"
            )
        if not last.get("tool_calls") and not text_of(last).strip():
            raise LeftOutError(f"an empty {column!r}")
        pairs.append((context, reply))
        notes = None  # The contexts have the same ones.
    return pairs


def trained_messages_of(row: Row, algorithm: str) -> tuple[list[list[Message]], list[Message]]:
    """(a row's conversations up to the last message that is trained, the trained messages)."""
    if algorithm in ("sft", "kto"):
        messages = sft_messages(row) if algorithm == "sft" else labelled_messages(row)
        trained = trained_messages(messages)
        return [messages[: trained[-1] + 1]], [messages[i] for i in trained]
    sides = pair_messages(row)
    replies = [message for _, reply in sides for message in reply]
    return [context + reply for context, reply in sides], replies
