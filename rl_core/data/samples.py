"""Turns of a trajectory, rows to imitate, or preference pairs, -> TrainingSamples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rl_core.config import nearest
from rl_core.data.chat import Chat, TokenStream, imitation_turns, shared_length
from rl_core.data.rows import is_trajectory
from rl_core.data.tasks import check_messages, shorten
from rl_core.types import PER_TOKEN, Completion, Message, TrainingSample, Turn

PAIR = ("chosen", "rejected")


def samples_from_turns(
    turns: list[Turn],
    advantages: float | list[float],
    group_id: str = "",
    observed: list[range] | None = None,
    observation_weight: float = 0.0,
) -> list[TrainingSample]:
    """One sample for each fresh turn and those that extend it. `advantages` is of all turns or of each. Turns in which
    nothing was sampled leave no sample. `observed` names the places of each turn's new_ids that are trained too, with a
    weight of their own."""
    if not isinstance(advantages, list):
        advantages = [advantages] * len(turns)
    assert len(advantages) == len(turns), (len(advantages), len(turns))
    drafts: list[dict[str, list]] = []
    for number, (turn, advantage) in enumerate(zip(turns, advantages, strict=True)):
        if turn.is_fresh or not drafts:
            drafts.append({name: [] for name in PER_TOKEN})
        _append_turn(drafts[-1], turn, advantage, observed[number] if observed else range(0), observation_weight)
    return [TrainingSample(**draft, group_id=group_id) for draft in drafts if any(draft["loss_mask"])]


def imitation_samples(
    chat: Chat, row: dict[str, Any], action_weight: float = 1.0, observation_weight: float = 0.0
) -> list[TrainingSample]:
    """Samples of a row {"messages"} or {"prompt", "response"} (strings or lists of messages), or of an episode that a run
    wrote. Its advantages are the weights: of what assistants say, and of what they are answered. A token of weight 0 is
    not trained. A column `tools` is given to the template. Raises ValueError if a row cannot be imitated."""
    messages, tools = imitation_messages(row), row.get("tools") or None
    if is_trajectory(row) and row["tokenizer"] == chat.fingerprint:
        turns = recorded_turns(row)
    else:
        turns = imitation_turns(chat, messages, tools)
    observed = None
    if observation_weight:
        turns, observed = observations(chat, messages, turns, tools)
    samples = samples_from_turns(turns, action_weight, "", observed, observation_weight)
    return [s for s in map(_without_zero_weights, samples) if s.loss_mask.any()]


def recorded_turns(row: dict[str, Any]) -> list[Turn]:
    """An episode's turns with the tokens that were sampled. Their logprobs are of no use here, and were not kept."""
    turns = []
    for new_ids, is_fresh, token_ids in row["turns"]:
        ids = list(token_ids)
        done = Completion(token_ids=ids, logprobs=[0.0] * len(ids), text="", finish_reason="stop", policy_version=0)
        turns.append(Turn(new_ids=list(new_ids), is_fresh=is_fresh, completion=done))
    return turns


def observations(
    chat: Chat, messages: list[Message], turns: list[Turn], tools: list | None = None
) -> tuple[list[Turn], list[range]]:
    """The turns, with one more in which nothing is said if messages follow the last, and where in each turn's prompt the
    answer to the turn before stands: what the template puts between that turn's end token and the generation prompt,
    headers and end tokens included. An answer with a message of "train": False is context, as all is before the first turn."""
    spoken = imitated(messages)
    if len(spoken) != len(turns):  # an episode whose messages are not those of its turns
        return turns, [range(0)] * len(turns)
    if spoken[-1] + 1 < len(messages):
        turns = turns + _closing_turn(chat, turns, messages, spoken[-1], tools)
    spans = [range(0)]
    for number, turn in enumerate(turns[1:], 1):
        first, until = spoken[number - 1] + 1, spoken[number] if number < len(spoken) else len(messages)
        is_context = any(m.get("train") is False for m in messages[first:until])
        said = turns[number - 1].completion.token_ids
        span = range(0) if is_context else _answer_span(chat, said, turn, messages[:until], first, tools)
        spans.append(span)
    return turns, spans


def prompts_of(turns: list[Turn]) -> list[list[int]]:
    """All that the actor saw before each turn, which is what the engine was given."""
    prompts: list[list[int]] = []
    for number, turn in enumerate(turns):
        before = [] if turn.is_fresh else [*prompts[-1], *turns[number - 1].completion.token_ids]
        prompts.append([*before, *turn.new_ids])
    return prompts


def _closing_turn(chat: Chat, turns: list[Turn], messages: list[Message], place: int, tools: list | None) -> list[Turn]:
    """A turn in which nothing is said, and which shows what follows the last one, said in messages[place]; none where the
    template rewrites a history whose tokens are not known to be those of the messages."""
    stream, done = TokenStream(chat, messages[:place], tools), turns[-1].completion
    first_ids = stream.prompt_ids
    is_known = stream.extend(done.token_ids, done.text or chat.decode(done.token_ids), messages)
    if not is_known and first_ids != prompts_of(turns)[-1]:
        return []
    nothing = Completion(token_ids=[], logprobs=[], text="", finish_reason="stop", policy_version=0)
    turn = stream.turn(nothing)
    turn.new_ids = turn.new_ids[: chat.answer_end(turn.new_ids)]
    return [turn]


def _answer_span(
    chat: Chat, said: list[int], turn: Turn, messages: list[Message], first: int, tools: list | None
) -> range:
    """Where messages[first:] stand in turn.new_ids; empty if they are not found, because the template rewrote them."""
    end = chat.answer_end(turn.new_ids)
    if not messages[first:]:
        return range(0)
    if not turn.is_fresh:
        # A turn cut short has no end token; the template's is nobody's answer.
        is_ended, follows = said and said[-1] in chat.stop_token_ids, turn.new_ids[:1]
        is_cut = not is_ended and follows and follows[0] in chat.stop_token_ids
        return range(bool(is_cut), end)
    ids = chat.answer_ids(messages, first, tools)
    return range(end - len(ids), end) if turn.new_ids[end - len(ids) : end] == ids else range(0)


def _without_zero_weights(sample: TrainingSample) -> TrainingSample:
    """The sample, in which tokens of weight 0 are context."""
    sample.loss_mask = sample.advantages != 0
    sample.policy_versions = np.where(sample.loss_mask, sample.policy_versions, -1)
    return sample


def imitation_messages(row: dict[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        messages = _as_messages(row, "messages", "user")
        if is_trajectory(row):  # what assistants said before the first turn was given to the actor
            spoken = imitated(messages)
            first = spoken[-len(row["turns"])] if len(spoken) >= len(row["turns"]) else 0
            messages = [{**m, "train": False} for m in messages[:first]] + messages[first:]
    elif row.get("prompt") is not None and row.get("response") is not None:
        prompt = [{**m, "train": False} for m in _as_messages(row, "prompt", "user")]
        messages = prompt + _as_messages(row, "response", "assistant")
    else:
        raise ValueError(
            f'a row with columns {sorted(row)} cannot be imitated: it needs "messages", or "prompt" and "response"'
        )
    if not imitated(messages):
        roles = [m["role"] for m in messages]
        raise ValueError(f"messages with roles {roles} hold nothing to imitate: give one with role 'assistant'")
    return messages


def imitated(messages: list[Message]) -> list[int]:
    """Which messages are to be imitated: assistants' without "train": False."""
    return [i for i, m in enumerate(messages) if m.get("role") == "assistant" and m.get("train") is not False]


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


def conversation_ids(chat: Chat, messages: list[Message], tools: list | None = None) -> list[int]:
    """Token ids of a whole conversation, which is what a reward model reads."""
    return chat.encode(chat.render(messages, tools, add_generation_prompt=False))


def scored_pair(chat: Chat, row: dict[str, Any]) -> list[TrainingSample]:
    """[chosen, rejected] of a preference row, each the whole conversation as the chat template renders it, so that a
    sequence classifier reads the same tokens. A last token of no meaning stands for the score: it is what the hidden
    state of the conversation's own last token "predicts". Trained is all that the two do not begin with alike."""
    context, *replies = pair_messages(row)
    tools, pad = row.get("tools") or None, chat.tokenizer.pad_token_id
    ids = [conversation_ids(chat, context + r, tools) for r in replies]
    if pad is not None and any(i[-1:] == [pad] for i in ids):
        raise ValueError(
            f"the conversation ends in the padding token {chat.tokenizer.pad_token!r}, so that a sequence classifier "
            "would not see where it ends; give the tokenizer another pad_token"
        )
    shared = shared_length(*ids)
    samples = []
    for token_ids in ids:
        num = len(token_ids) + 1
        mask = np.arange(num) >= shared
        zeros = np.zeros(num)
        of_tokens = {"rollout_logprobs": zeros, "policy_versions": zeros - 1, "advantages": zeros}
        samples.append(TrainingSample(token_ids=[*token_ids, 0], loss_mask=mask, **of_tokens))
    return _as_pair(samples, row)


def _as_pair(samples: list[TrainingSample], row: dict[str, Any]) -> list[TrainingSample]:
    """Its advantage says by how much the chosen reply must be better: the row's margin."""
    chosen, rejected = samples
    if np.array_equal(chosen.token_ids, rejected.token_ids):
        raise ValueError("the two replies have the same tokens: a pair must differ")
    margin = row.get("margin") or 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"column 'margin' holds {shorten(margin)}: it must be a number")
    for sample, advantage in ((chosen, float(margin)), (rejected, 0.0)):
        with np.errstate(over="ignore"):
            sample.advantages = np.where(sample.loss_mask, advantage, 0.0).astype(np.float32)
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


def _pair_side(value: Any, column: str, role: str) -> list[Message]:
    if isinstance(value, str) and column != "messages":
        return [{"role": role, "content": value}]
    try:
        return check_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def _append_turn(
    draft: dict[str, list], turn: Turn, advantage: float, observed: range = range(0), observation_weight: float = 0.0
) -> None:
    done, num_new, num_done = turn.completion, len(turn.new_ids), len(turn.completion.token_ids)
    assert len(done.logprobs) == num_done, (len(done.logprobs), num_done)
    heard = [int(place in observed) for place in range(num_new)]
    draft["token_ids"] += turn.new_ids + done.token_ids
    draft["loss_mask"] += heard + [1] * num_done
    draft["rollout_logprobs"] += [0.0] * num_new + list(done.logprobs)
    draft["policy_versions"] += [h - 1 for h in heard] + done.policy_versions
    draft["advantages"] += [h * observation_weight for h in heard] + [advantage] * num_done
