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
import itertools
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from rl_core.sampling.rollout import SCORING, Group, RolloutWorker
from rl_core.types import Completion, SamplingParams

LOOK_S = 0.002  # between looks at this rank's groups


class FixedOrderWorker(RolloutWorker):
    """A RolloutWorker. Between two steps nothing is sampled."""

    def __init__(self, play: Callable, ranks, width: int, name: str, timeout_s: float):
        self.window = 0  # counts the times that it was opened
        self.due: set[int] = set()  # numbers of the groups that the step takes
        # Conversations of later steps that had their part.
        self.had_part: set[str] = set()
        self.is_open = False
        self.opened = asyncio.Event()
        super().__init__(play, ranks, sys.maxsize, name, timeout_s)

    def go_on(self, num_collected: int, num_begun: int) -> None:
        super().go_on(num_collected, num_begun)
        self.assigned = filter(self.is_own, itertools.count(num_collected))

    def _begin(self, number: int) -> None:
        self.pending[number].under_way.make_gate = partial(Gate, order=self, number=number)
        super()._begin(number)

    def _age(self, number: int) -> int:
        return 0

    async def _wait_for_due(self, num_groups: int, oldest: int) -> None:
        """Waits until these groups are done, and all others of this rank wait for the next time."""
        self._open(set(sorted(self.pending)[:num_groups]))
        while self.due & self.running.keys() or not self._are_others_at_rest():
            await self._has_finished(LOOK_S)
        self.is_open = False

    def _open(self, due: set[int]) -> None:
        self.window += 1
        self.due, self.had_part, self.is_open = due, set(), True
        before, self.opened = self.opened, asyncio.Event()
        before.set()

    def _are_others_at_rest(self) -> bool:
        return all(is_at_rest(self.pending[number]) for number in self.running)


def is_at_rest(group: Group) -> bool:
    """Whether all its episodes wait for the next time. One whose hook does something else is
    waited for."""
    episodes = group.under_way.episodes
    parts = [episodes.get(str(index)) for index in range(group.size)]
    live = [part for part in parts if part is None or part.trajectories is None]
    live = live or [episodes.get(SCORING)]
    return all(part is not None and part.gate.is_held for part in live)


@dataclass(kw_only=True, slots=True)
class Gate:
    """Of one episode."""

    order: FixedOrderWorker
    number: int  # of its group
    num_sampled: int = 0  # requests that are sampled
    held_in: int = -1  # the window in which a request was held last

    @property
    def is_held(self) -> bool:
        return self.held_in == self.order.window and not self.num_sampled

    async def sample(
        self,
        turn: str,
        params: SamplingParams,
        begun: Completion,
        sample: Callable[..., Awaitable[Completion]],
    ) -> Completion:
        """The turn with the tokens that it may have now. Without a finish_reason it has more to
        come."""
        limit = self.limit(turn, params, len(begun.token_ids))
        while not limit:
            self.held_in = self.order.window
            await self.order.opened.wait()
            limit = self.limit(turn, params, len(begun.token_ids))
        self.num_sampled += 1
        try:
            done = await sample(replace(params, max_tokens=limit), begun=begun)
        finally:
            self.num_sampled -= 1
        if done.finish_reason == "length" and limit < params.max_tokens:
            done.finish_reason = ""
        return done

    def limit(self, turn: str, params: SamplingParams, num_tokens: int) -> int:
        """How many tokens the turn may have by now. 0: it waits."""
        conversation, _, _ = turn.rpartition("#")
        if not self.order.is_open:
            return 0
        if self.number in self.order.due:
            return params.max_tokens
        if conversation in self.order.had_part:
            return 0
        self.order.had_part.add(conversation)
        return min(params.max_tokens, num_tokens + (params.max_tokens + 1) // 2)
