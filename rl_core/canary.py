"""Whether engines sample with the weights that their learners have: the logprobs of both on short fixed prompts."""

from __future__ import annotations

import asyncio
import random

import torch

from rl_core.build import Run, compute_dtype
from rl_core.data.packing import pack_samples, shard_sequences
from rl_core.distributed import all_gather_json
from rl_core.learning.learner import Learner, to_device
from rl_core.learning.model import reads_in_place
from rl_core.metrics import Max
from rl_core.sampling.engine import Engine
from rl_core.sampling.request import EngineDied
from rl_core.types import Completion, PackedBatch, RunError, SamplingParams, TrainingSample, counter_seed

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # nats; kernels of engine and learner round differently
SHOWN_TENSORS = 5
Fact = list  # [prompt's tokens, tokens said, their logprobs, version]


def tolerance(run: Run) -> float:
    asked = run.config.canary_tolerance
    return TOLERANCES[compute_dtype(run.config)] if asked is None else asked


async def sample_canaries(run: Run) -> None:
    """What each engine that has a learner says to the fixed prompts now. The learner checks it before it learns on. One that
    reads the learner's own tensors cannot miss an update: it is asked once, when a run starts or goes on."""
    names = [name for name in run.learners if name in run.engines] if tolerance(run) else []
    names = [n for n in names if run.engines[n].policy_version == run.start or not is_reader(run.learners[n])]
    run.canaries = {name: await speak(run, name) for name in names}


async def speak(run: Run, name: str) -> list[Fact]:
    if not run.engines[name].capacity:  # another rank's engine has this one's device
        return []
    tokenizer, config = run.chats[name].tokenizer, run.learners[name].policy.hf.config.get_text_config()
    context = run.config.max_context_tokens
    length = min(PROMPT_TOKENS, context // 2)
    draw = random.Random(counter_seed("canary"))
    words = range(min(len(tokenizer), config.vocab_size))
    prompts = [[draw.choice(words) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    params = SamplingParams(max_tokens=min(NEW_TOKENS, context - length), temperature=run.learners[name].temperature)
    try:
        said = await speak_all(run.engines[name], prompts, params)
    except EngineDied:
        await run.engines[name].revive()
        said = await speak_all(run.engines[name], prompts, params)
    return [
        [prompt, one.token_ids, one.logprobs, one.policy_version] for prompt, one in zip(prompts, said, strict=True)
    ]


async def speak_all(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, params, seed=i) for i, prompt in enumerate(prompts)))


async def check_canary(run: Run, name: str) -> None:
    """Raises RunError, on every rank alike, if a token's logprob in the engine is not the learner's. Every rank must call
    it, with the learner on its device and the weights that the engine was given last."""
    if name not in run.canaries:
        return
    learner, engine, ranks = run.learners[name], run.engines[name], run.ranks
    batch = batch_of(learner, all_gather_json(run.canaries.pop(name), ranks))
    with torch.no_grad():
        logprobs, _ = learner.policy(batch, learner.temperature)
    apart = (logprobs - batch.rollout_logprobs).abs().max().item() if logprobs.numel() else 0.0
    largest = max(all_gather_json(apart, ranks), key=lambda x: (x != x, x))  # NaN counts as most
    if not is_reader(learner) or engine.policy_version == run.first:  # metrics are the same in a run that goes on
        run.note(f"learn/{name}/", {"canary_max_diff": Max(largest)})
    if largest <= (limit := tolerance(run)):
        return
    if hasattr(engine, "named_weights"):
        await engine.wake()
    version = max(all_gather_json(max(batch.policy_versions.tolist(), default=-1), ranks))
    found = all_gather_json(differing_tensors(learner, engine), ranks)
    rank = next((r for r, (num, _) in enumerate(found) if num), 0)
    raise RunError(
        f"the engine of {name} does not sample with its learner's weights: on fixed prompts their logprobs differ by up to "
        f"{largest:.3g} nats at version {version}, and --canary_tolerance allows {limit:g}; "
        f"on rank {rank} {found[rank][1]}"
    )


def batch_of(learner: Learner, gathered: list[list[Fact]]) -> PackedBatch:
    """Of the ranks that compute together with this one."""
    ranks, samples = learner.ranks, []
    together = [part for r, part in enumerate(gathered) if ranks.dp_rank_of(r) == ranks.dp_rank]
    for prompt, said, logprobs, version in (fact for part in together for fact in part):
        before, n = len(prompt), len(said)
        samples.append(
            TrainingSample(
                token_ids=prompt + said,
                loss_mask=[0] * before + [1] * n,
                rollout_logprobs=[0.0] * before + logprobs,
                policy_versions=[-1] * before + [version] * n,
                advantages=[0.0] * (before + n),
            )
        )
    batch = pack_samples(samples, ranks.mesh.cp)
    if ranks.mesh.cp > 1:
        batch = shard_sequences(batch, ranks.mesh.cp, ranks.cp_rank)
    return to_device(batch, ranks.device)


def is_reader(learner: Learner) -> bool:
    """Whether its engine has no weights but the learner's own."""
    return reads_in_place(learner.policy) and learner.config.engine == "embedded"


@torch.no_grad()
def differing_tensors(learner: Learner, engine: Engine) -> tuple[int, str]:
    """How many, and `2 of 24 tensors differ, most of all A (by up to 0.1), B (by up to 0.01)`. Every rank must call it."""
    if is_reader(learner):
        return 0, "it reads the learner's own tensors, so that the two compute differently"
    held = dict(engine.named_weights()) if hasattr(engine, "named_weights") else {}
    found, num = [], 0
    for name, value in learner.named_weights():  # every rank must exhaust it
        if name not in held:
            continue
        num, own = num + 1, held[name]
        apart = (own.float() - value.to(own.device, own.dtype).float()).abs().max().item()
        if apart != 0:  # NaN too
            found.append((apart / (value.float().abs().max().item() + 1e-30), apart, name))
    if not found:
        return 0, "no tensor differs, so that the two compute differently" if num else "its tensors cannot be read here"
    worst = sorted(found, key=lambda x: (x[0] != x[0], x[0]), reverse=True)[:SHOWN_TENSORS]
    names = ", ".join(f"{name} (by up to {apart:.3g})" for _, apart, name in worst)
    return len(found), f"{len(found)} of {num} tensors differ, most of all {names}"
