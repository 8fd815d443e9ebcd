"""Turns of a trajectory, or rows to imitate, -> TrainingSamples."""

from __future__ import annotations

from typing import Any

from rl_core.data.chat import Chat, imitation_turns
from rl_core.types import Message, TrainingSample, Turn


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
