"""--rollout.fixed_order: which weights sample which tokens, and which groups a step takes, depends
on nothing but counters. So a run with --max_staleness or --engine_ranks can be compared, bit for
bit, with one that was stopped. For tests: it is slow.

A step takes the oldest groups, complete or not, and waits for them. Each conversation of a group of
later steps gets at most half of a turn's tokens meanwhile. Then all wait until the next step.
Requests are sampled one at a time, without a KV cache of earlier turns, so that no token depends on
what is computed beside it. Groups go to ranks in turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from rl_core.plugins.under_way import RecordedConversation, RecordingPlayer, RecordingWorker
from rl_core.sampling.rollout import Group
from rl_core.types import Completion, SamplingParams

LOOK_S = 0.002  # between looks at this rank's groups


class FixedOrderWorker(RecordingWorker):
    def _fill(self) -> None:
        begun = {*self.running, *self.done}
        for key, group in self.pending.items():
            if self.is_own(group.position) and key not in begun:
                self._begin(key)

    async def _wait_for_due(self, num_groups: int, oldest: int, label: str) -> None:
        """Waits until the oldest groups are done, and all others of this rank rest."""
        due = [key for key in self.pending if key[0] == label]
        due = due[:num_groups]
        self.player.open({self.pending[key].id for key in due}, has_parts=not label)
        while any(key in due or not self.player.rests(self.pending[key]) for key in self.running):
            await self._wait(LOOK_S)
        self.player.open(set(), has_parts=False)


class GatedConversation(RecordedConversation):
    def limit(self, num_tokens: int, max_tokens: int) -> int:
        """How many tokens a turn may have by now. 0: it waits."""
        player = self.player
        if self.group in player.due:
            return max_tokens
        if self.session in player.had_part or not player.has_parts:
            return 0
        player.had_part.add(self.session)
        return min(max_tokens, num_tokens + (max_tokens + 1) // 2)

    async def go_on(self, params: SamplingParams, seed: int, begun: Completion) -> Completion:
        """The turn with the tokens that it may have now. Without a finish_reason it has more to
        come."""
        episode, most = self.episode, params.max_tokens
        while not (limit := self.limit(len(begun.token_ids), most)):
            episode.held_in = self.player.window
            await asyncio.sleep(LOOK_S)
        limited = replace(params, max_tokens=limit)
        episode.num_sampled += 1
        try:
            done = await self.speaker.generate(self.stream.prompt_ids, limited, seed, begun=begun)
        finally:
            episode.num_sampled -= 1
        if done.finish_reason == "length" and limit < most:
            done.finish_reason = ""
        return done


class GatedPlayer(RecordingPlayer):
    """Between two steps nothing is sampled."""

    conversation = GatedConversation

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.window = 0  # counts the times that it was opened
        self.open(set(), has_parts=False)

    def open(self, due: set[str], has_parts: bool) -> None:
        """`due`: ids of the groups that the step takes. `has_parts`: other conversations get
        theirs."""
        self.window += 1
        self.due = due
        self.has_parts = has_parts
        self.had_part: set[str] = set()

    def rests(self, group: Group) -> bool:
        """Whether all its episodes wait for the next time. One whose hook does something else is
        waited for."""
        ended = {str(index) for index in group.ended}
        records = self.records[group.id]
        live = [records[name] for name in records.keys() - ended]
        return bool(live) and all(
            record.held_in == self.window and not record.num_sampled for record in live
        )
