"""Turns of an episode -> TrainingSamples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rl_core.types import TrainingSample, Turn


def samples_from_turns(
    turns: Sequence[Turn],
    advantages: float | Sequence[float],
    group_id: str = "",
    trained: set[str] | None = None,
) -> list[TrainingSample]:
    """One sample for each fresh turn and those that extend it. `advantages` is one number, or one
    for each turn. A sample needs a sampled token. `trained` grows by the names of these turns:
    those that it had are context, for branches of a conversation share turns."""
    trained = set() if trained is None else trained
    if isinstance(advantages, (int, float)):
        advantages = [advantages] * len(turns)
    drafts: list[defaultdict] = []
    for turn, advantage in zip(turns, advantages, strict=True):
        if turn.is_fresh or not drafts:
            drafts.append(defaultdict(list))
        draft, sampled = drafts[-1], turn.completion
        num_sampled = len(sampled.token_ids)
        assert len(sampled.logprobs) == num_sampled, (len(sampled.logprobs), num_sampled)
        extend_context(draft, turn.new_ids)
        if turn.name in trained:
            extend_context(draft, sampled.token_ids)
        else:
            draft["token_ids"] += sampled.token_ids
            draft["loss_mask"] += [True] * num_sampled
            draft["rollout_logprobs"] += sampled.logprobs
            draft["policy_versions"] += sampled.policy_versions
            draft["advantages"] += [advantage] * num_sampled
            draft["kept_ids"] += sampled.kept_ids
            if turn.name:
                trained.add(turn.name)
        draft["experts"] = sampled.experts  # Of the stream up to this turn.
        if turn.images:
            draft["images"] += turn.images
    samples = []
    for draft in drafts:
        if any(draft["loss_mask"]):
            if "images" in draft:
                draft["images"] = tuple(dict.fromkeys(draft["images"]))
            samples.append(TrainingSample(**draft, group_id=group_id))
    return samples


def extend_context(draft: defaultdict, token_ids: Sequence[int]) -> None:
    """Adds tokens that are not trained."""
    num = len(token_ids)
    draft["token_ids"] += token_ids
    draft["loss_mask"] += [False] * num
    draft["rollout_logprobs"] += [0.0] * num
    draft["policy_versions"] += [-1] * num
    draft["advantages"] += [0.0] * num
