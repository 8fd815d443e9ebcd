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
        sampled = turn.completion
        num_new, num_sampled = len(turn.new_ids), len(sampled.token_ids)
        assert len(sampled.logprobs) == num_sampled, (len(sampled.logprobs), num_sampled)
        context = {
            "loss_mask": False,
            "rollout_logprobs": 0.0,
            "policy_versions": -1,
            "advantages": 0.0,
        }
        columns = {name: [value] * (num_new + num_sampled) for name, value in context.items()}
        if turn.name not in trained:
            columns["loss_mask"][num_new:] = [True] * num_sampled
            columns["rollout_logprobs"][num_new:] = sampled.logprobs
            columns["policy_versions"][num_new:] = sampled.policy_versions
            columns["advantages"][num_new:] = [advantage] * num_sampled
            drafts[-1]["kept_ids"] += sampled.kept_ids
            if turn.name:
                trained.add(turn.name)
        drafts[-1]["token_ids"] += [*turn.new_ids, *sampled.token_ids]
        for name, values in columns.items():
            drafts[-1][name] += values
        # Experts of the stream up to this turn.
        drafts[-1]["experts"] = sampled.experts
        if turn.images:
            drafts[-1]["images"] += turn.images
    samples = []
    for draft in drafts:
        if any(draft["loss_mask"]):
            if "images" in draft:
                draft["images"] = tuple(dict.fromkeys(draft["images"]))
            samples.append(TrainingSample(**draft, group_id=group_id))
    return samples
