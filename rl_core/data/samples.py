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
    """One sample for each fresh turn and those that extend it. `advantages` is one number, or one for each turn. `heard` gives
    each token of a turn's new_ids a weight to train it with; 0, the default, is context. A sample needs a trained token."""
    each = [advantages] * len(turns) if isinstance(advantages, (int, float)) else advantages
    drafts: list[dict[str, list]] = []
    for number, (turn, advantage) in enumerate(zip(turns, each, strict=True)):
        if turn.is_fresh or not drafts:
            drafts.append(defaultdict(list))
        said, draft = turn.completion, drafts[-1]
        weights = heard[number] if heard else [0.0] * len(turn.new_ids)
        assert len(said.logprobs) == len(said.token_ids), (len(said.logprobs), len(said.token_ids))
        draft["token_ids"] += [*turn.new_ids, *said.token_ids]
        draft["loss_mask"] += [*(int(w != 0) for w in weights), *[1] * len(said.token_ids)]
        draft["rollout_logprobs"] += [*[0.0] * len(weights), *said.logprobs]
        draft["policy_versions"] += [*(0 if w else -1 for w in weights), *said.policy_versions]
        draft["advantages"] += [*weights, *[advantage] * len(said.token_ids)]
    return [TrainingSample(**draft, group_id=group_id) for draft in drafts if any(draft["loss_mask"])]
