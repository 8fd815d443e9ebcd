"""Checks that engines sample with their learners' weights: compares both logprobs on short fixed
prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_core.data.chat import Chat
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import all_gather_json
from rl_core.engines.engine_weights import WeightState
from rl_core.learning.learner import Learner
from rl_core.metrics import Max
from rl_core.plugin import Plugin, RunState
from rl_core.sampling.actor import Actor, revived
from rl_core.sampling.conversation import SAMPLING_FLAGS
from rl_core.sampling.deadlines import wait_for_all
from rl_core.types import (
    Completion,
    InputImage,
    Message,
    RunError,
    SamplingParams,
    TrainingSample,
    Turn,
    counter_seed,
)

if TYPE_CHECKING:
    from rl_core.actors import ActorRuntime


NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4
Prompt = tuple[list[int], tuple[InputImage, ...]]
# In nats. Kernels of engine and learner round differently.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def image_prompts(chat: Chat, max_tokens: int) -> list[Prompt]:
    """A prompt with a small image for a model that sees; [] if it has more tokens than
    `max_tokens`, or the chat template renders no image of a user."""
    from rl_core.data.images import image_in_bytes, png_of

    picture = (37 * np.arange(16 * 16 * 3) % 256).astype(np.uint8).reshape(16, 16, 3)
    parts = [{"type": "image", "image": image_in_bytes(png_of(picture)).url}]
    messages: list[Message] = [{"role": "user", "content": parts}]
    try:
        ids, images = chat.prompt_ids(messages), chat.images_of(messages)
    except ValueError:  # Rows with images raise the same error, with its reason.
        return []
    return [(ids, images)] if len(ids) <= max_tokens else []


class Canary(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        # Actor -> the engine's completions, until the learner checks their logprobs.
        self.answers: dict[str, list[TrainingSample]] = {}

    async def before_rollout(self, step: int) -> None:
        """Lets each engine with a learner continue the fixed prompts. An engine that shares the
        learner's weights cannot miss an update, so it is checked once, at the start of a run."""
        ranks, is_first = self.trainer.ranks, step == self.trainer.first_step
        for name in self.trainer.learners:
            actor = self.trainer.actors[name]
            if actor.weight_state is WeightState.SHARED and not is_first:
                continue
            # With separate engine ranks, rank 0 samples from all engines.
            is_asked = actor.engine and (not ranks.rollout_ranks or ranks.rank == 0)
            self.answers[name] = await self._ask(actor) if is_asked else []

    async def before_learn(self, actor: str, step: int) -> None:
        self.check(actor)

    async def finish(self) -> None:
        """Checks the engines' weights after the last update, since no later step does."""
        await self.before_rollout(self.trainer.step)
        for name in self.trainer.learners:
            async with self.trainer.actors[name].learning():
                self.check(name)

    async def _ask(self, actor: ActorRuntime) -> list[TrainingSample]:
        assert isinstance(actor.speaker, Actor) and actor.learner
        speaker, learner = replace(actor.speaker, stale_engine=None), actor.learner
        engine, chat = speaker.engine, speaker.chat
        assert engine is not None and chat is not None
        vocabulary = learner.policy.hf.config.get_text_config().vocab_size
        num_ids = min(len(chat.tokenizer), vocabulary)
        size = min(PROMPT_TOKENS, speaker.max_context_tokens // 2)
        prompts: list[Prompt] = []
        for i in range(max(NUM_PROMPTS, self.trainer.ranks.rollout_ranks)):
            prompts.append(([counter_seed("canary", i, j) % num_ids for j in range(size)], ()))
        limit = min(NEW_TOKENS, speaker.max_context_tokens - size)
        if engine.sees and not isinstance(chat.vision, str):
            prompts += image_prompts(chat, speaker.max_context_tokens - limit)
        sampling = {name: getattr(learner.config.sampling, name) for name in SAMPLING_FLAGS}
        params = SamplingParams(max_tokens=limit, keeps_ids=True, **sampling)

        async def speak() -> list[Completion]:
            if engine.lacks_weights:
                # The engine died just now. The next step checks the weights that other ranks send.
                return []
            asked = []
            for i, (ids, images) in enumerate(prompts):
                asked.append(speaker.generate(ids, params, i, images=images))
            return await wait_for_all(asked)

        samples = []
        answers = await revived(speak, [speaker], "the canary")
        for (ids, images), completion in zip(prompts, answers, strict=bool(answers)):
            turn = Turn(new_ids=ids, is_fresh=True, completion=completion, images=images)
            samples += samples_from_turns([turn], 1.0)
        return samples

    def check(self, name: str) -> None:
        """Raises RunError on every rank if a token's logprob in the engine is not the learner's.
        Every rank must call it, with the learner on its device and the weights that the engine
        received last."""
        if name not in self.answers:
            return
        trainer, actor = self.trainer, self.trainer.actors[name]
        assert actor.learner is not None
        largest = self._largest_difference(actor.learner, self.answers.pop(name))
        tolerance = trainer.config.canary_tolerance
        if tolerance is None:
            tolerance = TOLERANCES[actor.learner.policy.compute_dtype]
        if not largest <= tolerance:
            raise RunError(
                f"the engine of {name} does not sample with its learner's weights: on fixed "
                f"prompts their logprobs differ by up to {largest:.3g} nats, and "
                f"--canary_tolerance allows {tolerance:g}"
            )
        if actor.weight_state is not WeightState.SHARED:
            trainer.add_metrics(f"learn/{name}/", {"canary_max_diff": Max(largest)})

    @torch.no_grad()
    def _largest_difference(self, learner: Learner, samples: list[TrainingSample]) -> float:
        """Largest difference in nats over all ranks; NaN if any difference is NaN."""
        minibatches, _ = learner.shard(samples)
        differences = [0.0]
        for minibatch in minibatches:
            for batch in minibatch.batches:
                logprobs = learner.forward(batch)[0]
                differences += (logprobs - batch.rollout_logprobs).abs().tolist()
        # np.max returns NaN if a value is NaN; max() may skip it.
        largest = float(np.max(differences))
        return float(np.max(all_gather_json(largest, self.trainer.ranks)))
