"""Checks that engines sample with their learners' weights: compares logprobs of both on short fixed
prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from rl_core.data.samples import samples_from_turns
from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.learner import Learner
from rl_core.metrics import Max, Metric
from rl_core.sampling.actor import Actor, revived
from rl_core.sampling.hooks import wait_for_all
from rl_core.types import Completion, RunError, SamplingParams, TrainingSample, Turn, counter_seed

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4
# Nats; kernels of engine and learner round differently.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(kw_only=True)
class Canary:
    learners: Mapping[str, Learner]
    actors: Mapping[str, Actor]
    readers: set[str]  # whose engine reads the learner's own tensors
    tolerance: float | None  # nats; None: by the dtype
    dtype: torch.dtype  # of compute
    ranks: Ranks
    said: dict[str, list[TrainingSample]] = field(default_factory=dict)  # that learners still check

    async def sample(self, is_first: bool = False) -> None:
        """Lets each engine with a learner continue the fixed prompts, for check(). An engine that
        reads the learner's tensors cannot miss an update: it is checked once, when a run starts or
        resumes."""
        for name in self.learners:
            if is_first or name not in self.readers:
                # One learner samples from all engines on other ranks.
                is_asked = self.actors[name].engine and (
                    not self.ranks.engine_ranks or self.ranks.rank == 0
                )
                self.said[name] = await self._ask(name) if is_asked else []

    async def _ask(self, name: str) -> list[TrainingSample]:
        actor, learner = replace(self.actors[name], older=None), self.learners[name]
        num_ids = min(
            len(actor.chat.tokenizer), learner.policy.hf.config.get_text_config().vocab_size
        )
        size, num = (
            min(PROMPT_TOKENS, actor.max_context_tokens // 2),
            max(NUM_PROMPTS, self.ranks.engine_ranks),
        )
        prompts = [
            [counter_seed("canary", i, j) % num_ids for j in range(size)] for i in range(num)
        ]
        limit = min(NEW_TOKENS, actor.max_context_tokens - size)
        params = SamplingParams(max_tokens=limit, temperature=learner.temperature)

        async def speak() -> list[Completion]:
            return await wait_for_all(
                [actor.generate(prompt, params, i) for i, prompt in enumerate(prompts)]
            )

        said = await revived(speak, [actor], "the canary")
        turns = [
            Turn(new_ids=p, is_fresh=True, completion=c) for p, c in zip(prompts, said, strict=True)
        ]
        return [sample for turn in turns for sample in samples_from_turns([turn], 1.0)]

    async def check(self, name: str) -> dict[str, Metric]:
        """Raises RunError, on every rank alike, if a token's logprob in the engine is not the
        learner's. Every rank must call it, with the learner on its device and the weights that the
        engine was given last."""
        if name not in self.said:
            return {}
        learner = self.learners[name]
        minibatches, _ = learner.shard(self.said.pop(name))
        with torch.no_grad():
            pairs = [
                (learner.forward(b)[0], b.rollout_logprobs) for m in minibatches for b in m.batches
            ]
        apart = [(own - found).abs().max().item() for own, found in pairs if len(own)]
        by_rank = all_gather_json(apart, self.ranks)
        # NaN is most.
        largest = max((x for part in by_rank for x in part), key=lambda x: (x != x, x))
        tolerance = TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance
        if not largest <= tolerance:
            where = [
                text for text in all_gather_json(await self._differing(name), self.ranks) if text
            ]
            raise RunError(
                f"the engine of {name} does not sample with its learner's weights: on fixed "
                "prompts their logprobs differ by "
                f"up to {largest:.3g} nats, and --canary_tolerance allows {tolerance:g}; "
                f"{where[0] if where else 'no tensor that can be read here differs'}"
            )
        return {} if name in self.readers else {"canary_max_diff": Max(largest)}

    @torch.no_grad()
    async def _differing(self, name: str) -> str:
        """`on rank 0 these tensors differ most: A (by up to 0.1)`, or nothing. It gathers weights:
        every rank must call it."""
        engine, found, held = self.actors[name].engine, [], {}
        if hasattr(engine, "named_weights") and name not in self.readers:
            await engine.wake()
            held = dict(engine.named_weights())
        for tensor, value in self.learners[name].named_weights():
            if tensor in held:
                own = held[tensor]
                apart = (own.float() - value.to(own.device, own.dtype).float()).abs().max().item()
                found += [(apart, tensor)] if apart != 0 else []  # NaN too
        shown = ", ".join(
            f"{tensor} (by up to {apart:.3g})" for apart, tensor in sorted(found, reverse=True)[:5]
        )
        return f"on rank {self.ranks.rank} these tensors differ most: {shown}" if found else ""
