"""Turns of a trajectory, rows to imitate, or preference pairs, -> TrainingSamples."""

from __future__ import annotations

import math
from typing import Any

from rl_core.config import nearest
from rl_core.data.chat import Chat, imitation_turns
from rl_core.data.tasks import check_messages, shorten
from rl_core.types import Message, TrainingSample, Turn

PAIR = ("chosen", "rejected")


def samples_from_turns(turns: list[Turn], advantages: float | list[float], group_id: str = "") -> list[TrainingSample]:
    """One sample for each run of turns whose prompt extends the tokens before it, so that shared tokens are computed
    once. `advantages` is of all turns or of each. Turns in which nothing was sampled leave no sample."""
    if not isinstance(advantages, list):
        advantages = [advantages] * len(turns)
    assert len(advantages) == len(turns), (len(advantages), len(turns))
    samples: list[TrainingSample] = []
    for turn, advantage in zip(turns, advantages, strict=True):
        if not samples or turn.prompt_ids[: len(samples[-1].token_ids)] != samples[-1].token_ids:
            samples.append(_empty_sample(group_id))
        _append_turn(samples[-1], turn, advantage)
    return [s for s in samples if any(s.loss_mask)]


def imitation_samples(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """Samples of a row {"messages"} or {"prompt", "response"} (strings or lists of messages), with advantage 1 on what
    assistants say. A column `tools` is given to the template."""
    turns = imitation_turns(chat, imitation_messages(row), row.get("tools") or None)
    return samples_from_turns(turns, 1.0)


def imitation_messages(row: dict[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        messages = _as_messages(row, "messages", "user")
    elif row.get("prompt") is not None and row.get("response") is not None:
        prompt = [{**m, "train": False} for m in _as_messages(row, "prompt", "user")]
        messages = prompt + _as_messages(row, "response", "assistant")
    else:
        raise ValueError(
            f'a row with columns {sorted(row)} cannot be imitated: it needs "messages", or "prompt" and "response"'
        )
    if not any(m["role"] == "assistant" and m.get("train") is not False for m in messages):
        roles = [m["role"] for m in messages]
        raise ValueError(f"messages with roles {roles} hold nothing to imitate: give one with role 'assistant'")
    return messages


def _as_messages(row: dict[str, Any], column: str, role: str) -> list[Message]:
    value = row[column]
    if isinstance(value, str) and column != "messages":
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise ValueError(f'column {column!r} holds {value!r:.80}: it must be a list of {{"role", "content"}} messages')
    return value


def reply_pair(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row: the same prompt and each reply, of which what assistants say is trained."""
    context, *replies = pair_messages(row)
    context = [{**m, "train": False} for m in context]
    samples = []
    for side, reply in zip(PAIR, replies, strict=True):
        found = imitation_samples(chat, {"messages": context + reply, "tools": row.get("tools")})
        if len(found) != 1:
            raise ValueError(
                f"the chat template rewrites earlier turns of column {side!r}, so that its tokens are {len(found)} "
                "sequences; give a reply of one assistant message"
            )
        samples += found
    return _as_pair(samples, row)


def scored_pair(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row, each the whole conversation as the chat template renders it, so that a
    sequence classifier reads the same tokens. A last token of no meaning stands for the score: it is what the hidden
    state of the conversation's own last token "predicts". Trained is all that the two do not begin with alike."""
    context, *replies = pair_messages(row)
    tools, pad = row.get("tools") or None, chat.tokenizer.pad_token_id
    ids = [chat.encode(chat.render(context + r, tools, add_generation_prompt=False)) for r in replies]
    if pad is not None and any(i[-1:] == [pad] for i in ids):
        raise ValueError(
            f"the conversation ends in the padding token {chat.tokenizer.pad_token!r}, so that a sequence classifier "
            "would not see where it ends; give the tokenizer another pad_token"
        )
    shared = shared_length(*ids)
    samples = []
    for token_ids in ids:
        num = len(token_ids) + 1
        sample = _empty_sample("")
        sample.token_ids, sample.loss_mask = [*token_ids, 0], [0] * shared + [1] * (num - shared)
        sample.rollout_logprobs, sample.policy_versions, sample.advantages = [0.0] * num, [-1] * num, [0.0] * num
        samples.append(sample)
    return _as_pair(samples, row)


def _as_pair(samples: list[TrainingSample], row: dict[str, Any]) -> list[TrainingSample]:
    """Its advantage says by how much the chosen reply must be better: the row's margin."""
    chosen, rejected = samples
    if chosen.token_ids == rejected.token_ids:
        raise ValueError("the two replies have the same tokens: a pair must differ")
    margin = row.get("margin") or 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"column 'margin' holds {shorten(margin)}: it must be a number")
    for sample, advantage in ((chosen, float(margin)), (rejected, 0.0)):
        sample.advantages = [advantage * m for m in sample.loss_mask]
    return samples


def pair_messages(row: dict[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """(context, chosen reply, rejected reply) of a row {"chosen", "rejected"}. Both are replies (strings, or messages that
    an assistant begins) to the row's `messages` or `prompt`, or whole conversations that begin alike. Raises ValueError."""
    sides = []
    for column in PAIR:
        if row.get(column) is None:
            raise ValueError(f"a preference pair needs a column {column!r}; {nearest(column, row)}")
        sides.append(_pair_side(row[column], column, "assistant"))
    is_reply = [side[0]["role"] == "assistant" for side in sides]
    if all(is_reply):
        column = next((c for c in ("messages", "prompt") if row.get(c) is not None), None)
        if column is None:
            raise ValueError(
                f"the replies of a pair need the column 'messages' or 'prompt' that they reply to; {nearest('prompt', row)}"
            )
        context = _pair_side(row[column], column, "user")
    else:
        shared = shared_length(*sides)
        context, sides = sides[0][:shared], [side[shared:] for side in sides]
    if sides[0] == sides[1]:
        raise ValueError(f"'chosen' and 'rejected' are equal, {shorten(row['chosen'])}: a pair must differ")
    for column, side in zip(PAIR, sides, strict=True):
        said = side[-1] if side else {}
        if not said.get("tool_calls") and not str(said.get("content") or "").strip():
            raise ValueError(f"column {column!r} has an empty reply, {shorten(row[column])}: it must say something")
        if not context or side[0]["role"] != "assistant" or said["role"] != "assistant":
            raise ValueError(
                f"column {column!r} must be a reply that begins and ends with an assistant's message, or a conversation "
                f"that begins as the other one does and ends so; is {shorten(row[column])}"
            )
    return context, sides[0], sides[1]


def shared_length(a: list, b: list) -> int:
    """How many items the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _pair_side(value: Any, column: str, role: str) -> list[Message]:
    if isinstance(value, str) and column != "messages":
        return [{"role": role, "content": value}]
    try:
        return check_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def _empty_sample(group_id: str) -> TrainingSample:
    return TrainingSample(
        token_ids=[], loss_mask=[], rollout_logprobs=[], policy_versions=[], advantages=[], group_id=group_id
    )


def _append_turn(sample: TrainingSample, turn: Turn, advantage: float) -> None:
    done = turn.completion
    new_ids = turn.prompt_ids[len(sample.token_ids) :]
    num_new, num_done = len(new_ids), len(done.token_ids)
    assert len(done.logprobs) == num_done, (len(done.logprobs), num_done)
    sample.token_ids += new_ids + done.token_ids
    sample.loss_mask += [0] * num_new + [1] * num_done
    sample.rollout_logprobs += [0.0] * num_new + list(done.logprobs)
    sample.policy_versions += [-1] * num_new + [done.policy_version] * num_done
    sample.advantages += [0.0] * num_new + [advantage] * num_done
