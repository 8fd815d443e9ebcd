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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rl_core.sampling.under_way import SCORING
from rl_core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from rl_core.sampling.rollout import Group


@dataclass(kw_only=True, slots=True)
class FixedOrder:
    """Of one rank. Between two steps nothing is sampled."""

    window: int = 0  # counts the times that it was opened
    due: set[int] = field(default_factory=set)  # numbers of the groups that the step takes
    # Conversations of later steps that had their part.
    had_part: set[str] = field(default_factory=set)
    is_open: bool = False
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, due: set[int]) -> None:
        self.window += 1
        self.due, self.had_part, self.is_open = due, set(), True
        before, self.opened = self.opened, asyncio.Event()
        before.set()

    def close(self) -> None:
        self.is_open = False

    def admit(self, group: Group, number: int) -> None:
        """The group is about to begin."""
        group.under_way.make_gate = partial(Gate, order=self, number=number)

    def is_at_rest(self, group: Group) -> bool:
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

    order: FixedOrder
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
