"""Turns of an episode -> TrainingSamples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rl_core.types import TrainingSample, Turn


def samples_from_turns(
    turns: Sequence[Turn],
    advantages: float | Sequence[float],
    group_id: str = "",
    heard: Sequence[Sequence[float]] | None = None,
) -> list[TrainingSample]:
    """One sample for each fresh turn and those that extend it. `advantages` is one number, or one
    for each turn. `heard` gives each token of a turn's new_ids a weight to train it with; 0, the
    default, is context. A sample needs a trained token."""
    each = [advantages] * len(turns) if isinstance(advantages, (int, float)) else advantages
    drafts: list[dict[str, list]] = []
    for number, (turn, advantage) in enumerate(zip(turns, each, strict=True)):
        if turn.is_fresh or not drafts:
            drafts.append(defaultdict(list))
        said, draft = turn.completion, drafts[-1]
        num_new, num = len(turn.new_ids), len(said.token_ids)
        weights = heard[number] if heard else [0.0] * num_new
        assert len(said.logprobs) == num, (len(said.logprobs), num)
        draft["token_ids"] += [*turn.new_ids, *said.token_ids]
        draft["loss_mask"] += [*weights, *[1] * num]
        draft["rollout_logprobs"] += [*[0.0] * num_new, *said.logprobs]
        draft["policy_versions"] += [0 if w else -1 for w in weights] if heard else [-1] * num_new
        draft["policy_versions"] += said.policy_versions
        draft["advantages"] += [*weights, *[advantage] * num]
        draft["experts"] = said.experts  # of the stream up to here
    return [
        TrainingSample(**draft, group_id=group_id) for draft in drafts if any(draft["loss_mask"])
    ]
