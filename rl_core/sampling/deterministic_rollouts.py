"""--deterministic: sampled tokens and the groups of a step depend only on counters. So a run
with --max_staleness or --rollout_ranks can be compared, bit for bit, with one that was stopped. For
tests: it is slow.

A step takes the oldest groups, complete or not, and waits for them. Meanwhile each conversation of
a group of later steps gets at most half of a turn's tokens. Then all wait until the next step.
Requests are sampled one at a time, without a KV cache of earlier turns, so that no token depends on
other requests of its batch. Groups are assigned to ranks round-robin.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rl_core.sampling.resumable_rollouts import (
    ResumableConversation,
    ResumablePlayer,
    ResumableWorker,
)
from rl_core.sampling.rollout import Group
from rl_core.types import Completion, SamplingParams

LOOK_S = 0.002  # Interval of polls of this rank's groups.


class DeterministicWorker(ResumableWorker):
    player: DeterministicPlayer

    def _fill(self) -> None:
        begun = {*self.running, *self.done}
        for key, group in self.pending.items():
            if self.is_own(group.position) and key not in begun:
                self._begin(key)

    async def _wait_for_due(self, num_groups: int, oldest: int, label: str) -> None:
        """Waits until the oldest groups are done, and all other groups of this rank rest."""
        due = [key for key in self.pending if key[0] == label]
        due = due[:num_groups]
        self.player.open({self.pending[key].id for key in due}, has_parts=not label)
        while any(key in due or not self.player.rests(self.pending[key]) for key in self.running):
            await self._wait(LOOK_S)
        self.player.open(set(), has_parts=False)


class DeterministicConversation(ResumableConversation):
    player: DeterministicPlayer

    def limit(self, num_tokens: int, max_tokens: int) -> int:
        """Tokens that a turn may have now; 0: it waits."""
        player = self.player
        if self.group in player.due:
            return max_tokens
        if self.session in player.had_part or not player.has_parts:
            return 0
        player.had_part.add(self.session)
        return min(max_tokens, num_tokens + (max_tokens + 1) // 2)

    async def continue_turn(
        self, params: SamplingParams, seed: int, begun: Completion
    ) -> Completion:
        """The turn with the tokens that it may have now. Without a finish_reason more follow."""
        assert self.stream
        episode, most = self.episode, params.max_tokens
        while not (limit := self.limit(len(begun.token_ids), most)):
            episode.held_in = self.player.window
            await asyncio.sleep(LOOK_S)
        limited = replace(params, max_tokens=limit)
        episode.num_sampled += 1
        try:
            ids, images = self.stream.prompt_ids, self.stream.images
            done = await self.speaker.generate(ids, limited, seed, images=images, begun=begun)
        finally:
            episode.num_sampled -= 1
        if done.finish_reason == "length" and limit < most:
            done.finish_reason = ""
        return done


class DeterministicPlayer(ResumablePlayer):
    """Samples nothing between two steps."""

    conversation = DeterministicConversation

    def __init__(self, *args):
        super().__init__(*args)
        self.window = 0  # Number of calls of open().
        self.open(set(), has_parts=False)

    def open(self, due: set[str], has_parts: bool) -> None:
        """`due`: ids of the groups that the step takes. `has_parts`: other conversations get half
        of a turn."""
        self.window += 1
        self.due = due
        self.has_parts = has_parts
        self.had_part: set[str] = set()

    def rests(self, group: Group) -> bool:
        """True if all its episodes wait for the next open(). An episode whose hook does something
        else does not rest."""
        ended = {str(index) for index in group.ended}
        records = self.records[group.id]
        live = [records[name] for name in records.keys() - ended]
        return bool(live) and all(
            record.held_in == self.window and not record.num_sampled for record in live
        )
