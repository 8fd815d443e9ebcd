"""Turns of an episode -> TrainingSamples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rl_core.types import TrainingSample, Turn


def samples_from_turns(
    turns: Sequence[Turn], advantages: float | Sequence[float], group_id: str = ""
) -> list[TrainingSample]:
    """One sample for each fresh turn and those that extend it. `advantages` is one number, or one
    for each turn. A sample needs a sampled token."""
    if isinstance(advantages, (int, float)):
        advantages = [advantages] * len(turns)
    drafts: list[dict[str, list]] = []
    for turn, advantage in zip(turns, advantages, strict=True):
        if turn.is_fresh or not drafts:
            drafts.append(defaultdict(list))
        draft, completion = drafts[-1], turn.completion
        num_new, num = len(turn.new_ids), len(completion.token_ids)
        assert len(completion.logprobs) == num, (len(completion.logprobs), num)
        draft["token_ids"] += [*turn.new_ids, *completion.token_ids]
        draft["loss_mask"] += [*[False] * num_new, *[True] * num]
        draft["rollout_logprobs"] += [*[0.0] * num_new, *completion.logprobs]
        draft["policy_versions"] += [*[-1] * num_new, *completion.policy_versions]
        draft["advantages"] += [*[0.0] * num_new, *[advantage] * num]
        draft["experts"] = completion.experts  # of the stream up to here
    found = []
    for draft in drafts:
        if any(draft["loss_mask"]):
            found.append(TrainingSample(**draft, group_id=group_id))
    return found
