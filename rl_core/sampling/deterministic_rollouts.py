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
from collections import Counter
from collections.abc import Container
from dataclasses import replace

from rl_core.sampling.conversation import TokenConversation
from rl_core.types import Completion, SamplingParams

POLL_S = 0.002  # Interval of polls of this rank's groups.
Episode = tuple[str, str]  # Id of the group, and the episode's number.


class Window:
    """Tokens that turns may have until the next step. Between two steps nothing is sampled."""

    def __init__(self):
        self.number = 0  # Number of calls of open().
        self.num_sampled: Counter[Episode] = Counter()  # Turns that are being sampled.
        self.waited_in: dict[Episode, int] = {}  # The last window in which a turn waited.
        self.open((), has_parts=False)

    def open(self, due: Container[str], has_parts: bool) -> None:
        """`due`: ids of the groups that the step takes. `has_parts`: other conversations get half
        of a turn."""
        self.number += 1
        self.due = due
        self.has_parts = has_parts
        self.had_part: set[str] = set()

    def limit(self, group: str, session: str, num_tokens: int, max_tokens: int) -> int:
        """Tokens that a turn may have in this window; 0: it waits."""
        if group in self.due:
            return max_tokens
        if session in self.had_part or not self.has_parts:
            return 0
        self.had_part.add(session)
        return min(max_tokens, num_tokens + (max_tokens + 1) // 2)

    async def generate(
        self,
        episode: Episode,
        talk: TokenConversation,
        params: SamplingParams,
        seed: int,
        unfinished: Completion,
    ) -> Completion:
        """The turn with the tokens that it may have. Without a finish_reason more follow."""
        most, num_tokens = params.max_tokens, len(unfinished.token_ids)
        while not (limit := self.limit(episode[0], talk.session, num_tokens, most)):
            self.waited_in[episode] = self.number
            await asyncio.sleep(POLL_S)
        limited = replace(params, max_tokens=limit)
        self.num_sampled[episode] += 1
        try:
            ids, images = talk.stream.prompt_ids, talk.stream.images
            done = await talk.speaker.generate(
                ids, limited, seed, images=images, unfinished=unfinished
            )
        finally:
            self.num_sampled[episode] -= 1
        if done.finish_reason == "length" and limit < most:
            done.finish_reason = ""
        return done

    def is_waiting(self, episode: Episode) -> bool:
        """True if all turns of an episode wait for the next open(). An episode whose hook does
        something else does not wait."""
        return self.waited_in.get(episode) == self.number and not self.num_sampled[episode]
