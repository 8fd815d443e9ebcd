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
        sampled = turn.completion
        num_new, num_sampled = len(turn.new_ids), len(sampled.token_ids)
        assert len(sampled.logprobs) == num_sampled, (len(sampled.logprobs), num_sampled)
        columns = {
            "token_ids": (turn.new_ids, sampled.token_ids),
            "loss_mask": ([False] * num_new, [True] * num_sampled),
            "rollout_logprobs": ([0.0] * num_new, sampled.logprobs),
            "policy_versions": ([-1] * num_new, sampled.policy_versions),
            "advantages": ([0.0] * num_new, [advantage] * num_sampled),
        }
        for name, (context, trained) in columns.items():
            drafts[-1][name] += context
            drafts[-1][name] += trained
        drafts[-1]["experts"] = sampled.experts  # of the stream up to here
    found = []
    for draft in drafts:
        if any(draft["loss_mask"]):
            found.append(TrainingSample(**draft, group_id=group_id))
    return found
