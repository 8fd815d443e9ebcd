"""Whether engines sample with the weights that their learners have: the logprobs of both on short fixed prompts."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import torch

from rl_core.build import Run, compute_dtype
from rl_core.data.packing import pack_samples, shard_sequences
from rl_core.distributed import all_gather_json
from rl_core.learning.learner import Learner, to_device
from rl_core.learning.model import reads_in_place
from rl_core.metrics import Max
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import EngineDied
from rl_core.types import Completion, PackedBatch, RunError, SamplingParams, TrainingSample, counter_seed

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # nats; kernels of engine and learner round differently
SHOWN_TENSORS = 5
Fact = list  # [prompt's tokens, tokens said, their logprobs, version, rank among those that have engines]


def tolerance(run: Run) -> float:
    asked = run.config.canary_tolerance
    return TOLERANCES[compute_dtype(run.config)] if asked is None else asked


async def sample_canaries(run: Run, is_first: bool = False) -> None:
    """Asks each engine that has a learner to go on with the fixed prompts now; ranks that only sample answer by the link. The
    learner checks it before it learns on. An engine that reads the learner's own tensors cannot miss an update: it is
    asked once, when a run starts or goes on."""
    link, names = run.ranks.link, list(run.learners) if tolerance(run) else []
    if link is not None:
        run.canaries = {name: [] for name in names}
        for name in names if run.ranks.rank == 0 else ():
            link.say({"canary": name} | question(run, name))
        return
    names = [name for name in names if name in run.engines]
    names = [n for n in names if is_first or not is_reader(run, n)]
    run.canaries = {n: await answer(run.actors[n], run.ranks.rank, **question(run, n)) for n in names}


def question(run: Run, name: str) -> dict[str, Any]:
    """What `answer` is to do."""
    tokenizer, config = run.chats[name].tokenizer, run.learners[name].policy.hf.config.get_text_config()
    context = run.config.max_context_tokens
    length = min(PROMPT_TOKENS, context // 2)
    draw = random.Random(counter_seed("canary"))
    words = range(min(len(tokenizer), config.vocab_size))
    prompts = [[draw.choice(words) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    params = {"max_tokens": min(NEW_TOKENS, context - length), "temperature": run.learners[name].temperature}
    return {"prompts": prompts, "params": params}


async def answer(actor: Actor, rank: int, prompts: list[list[int]], params: dict[str, Any]) -> list[Fact]:
    if actor.engine is None:  # another rank's engine has this one's device
        return []
    newest = replace(actor, older=None)
    try:
        said = await speak_all(newest, prompts, SamplingParams(**params))
    except EngineDied:
        await newest.wake()
        said = await speak_all(newest, prompts, SamplingParams(**params))
    pairs = zip(prompts, said, strict=True)
    return [[prompt, one.token_ids, one.logprobs, one.policy_version, rank] for prompt, one in pairs]


async def speak_all(actor: Actor, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    return await asyncio.gather(*(actor.generate(prompt, params, i) for i, prompt in enumerate(prompts)))


async def check_canary(run: Run, name: str) -> None:
    """Raises RunError, on every rank alike, if a token's logprob in the engine is not the learner's. Every rank must call
    it, with the learner on its device and the weights that the engine was given last."""
    if name not in run.canaries:
        return
    learner, ranks, link = run.learners[name], run.ranks, run.ranks.link
    said = run.canaries.pop(name)
    if link is not None and ranks.rank == 0:
        said = [fact for facts in link.answers(f"canary/{name}") for fact in facts]
    batch = batch_of(learner, all_gather_json(said, ranks))
    with torch.no_grad():
        logprobs, _ = learner.policy(batch, learner.temperature)
    apart, worst = (logprobs - batch.rollout_logprobs).abs(), (0.0, 0)
    if apart.numel():
        worst = apart.max().item(), int(batch.advantages[apart.argmax()])
    largest, speaker = max(all_gather_json(worst, ranks), key=lambda x: (x[0] != x[0], x[0]))  # NaN counts as most
    if not is_reader(run, name):  # of which no step of a run knows more than another
        run.note(f"learn/{name}/", {"canary_max_diff": Max(largest)})
    if largest <= (limit := tolerance(run)):
        return
    version = max(all_gather_json(max(batch.policy_versions.tolist(), default=-1), ranks))
    if link is not None:
        where = f"most of all on rank {speaker} of --engine_ranks={link.num_engines}, torchrun's {ranks.size + speaker}"
    else:
        where = await differing_rank(run, name)
    raise RunError(
        f"the engine of {name} does not sample with its learner's weights: on fixed prompts their logprobs differ by up to "
        f"{largest:.3g} nats at version {version}, and --canary_tolerance allows {limit:g}; {where}"
    )


def batch_of(learner: Learner, gathered: list[list[Fact]]) -> PackedBatch:
    """Of the ranks that compute together with this one."""
    ranks, samples = learner.ranks, []
    together = [part for r, part in enumerate(gathered) if ranks.dp_rank_of(r) == ranks.dp_rank]
    for prompt, said, logprobs, version, rank in (fact for part in together for fact in part):
        before, n = len(prompt), len(said)
        samples.append(
            TrainingSample(
                token_ids=prompt + said,
                loss_mask=[0] * before + [1] * n,
                rollout_logprobs=[0.0] * before + logprobs,
                policy_versions=[-1] * before + [version] * n,
                advantages=[float(rank)] * (before + n),  # nobody learns from it: who said it
            )
        )
    batch = pack_samples(samples, ranks.mesh.cp)
    if ranks.mesh.cp > 1:
        batch = shard_sequences(batch, ranks.mesh.cp, ranks.cp_rank)
    return to_device(batch, ranks.device)


def is_reader(run: Run, name: str) -> bool:
    """Whether an actor's engine has no weights but its learner's own."""
    is_here = run.ranks.link is None and run.config.engine_of(name) == "embedded"
    return is_here and reads_in_place(run.learners[name].policy)


async def differing_rank(run: Run, name: str) -> str:
    """The first rank whose engine has other tensors, and which. Every rank must call it."""
    engine = run.engines[name]
    if hasattr(engine, "named_weights"):
        await engine.wake()
    found = all_gather_json(differing_tensors(run, name), run.ranks)
    rank = next((r for r, (num, _) in enumerate(found) if num), 0)
    return f"on rank {rank} {found[rank][1]}"


@torch.no_grad()
def differing_tensors(run: Run, name: str) -> tuple[int, str]:
    """How many, and `2 of 24 tensors differ, most of all A (by up to 0.1), B (by up to 0.01)`. Every rank must call it."""
    if is_reader(run, name):
        return 0, "it reads the learner's own tensors, so that the two compute differently"
    learner, engine = run.learners[name], run.engines[name]
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
        if not num:
            return 0, "its tensors cannot be read here"
        return 0, "no tensor that it was given differs, so that the two compute differently"
    worst = sorted(found, key=lambda x: (x[0] != x[0], x[0]), reverse=True)[:SHOWN_TENSORS]
    names = ", ".join(f"{name} (by up to {apart:.3g})" for _, apart, name in worst)
    return len(found), f"{len(found)} of {num} tensors differ, most of all {names}"
