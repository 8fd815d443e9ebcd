"""Any installed environment of the `verifiers` library's 1.0 API (0.4 and newer):
https://github.com/PrimeIntellect-ai/verifiers.

    pip install verifiers==0.4.0 uv && pip install my-taskset
    VERIFIERS_ENV=my-taskset VERIFIERS_ARGS='{"agent": {"harness": {"id": "null"}}}' rl-core train \
        --env_path envs/verifiers_env.py --model Qwen/Qwen3-0.6B --out runs/verifiers

Tasks, program (the library's harness), tools and rewards are the environment's. To it the actor is
a model behind a URL: the run's endpoint, at which exactly the sampled tokens are trained
(docs/agents.md). VERIFIERS_ARGS is the configuration of its environment as JSON; the harness runs
as a process of this machine unless it says otherwise. Every tenth task is for evaluation. Its
sampling arguments do not count: --sampling does. An episode that fails there fails here, with the
cause, unless the conversation was full: then it is truncated, and what was scored counts.
Episodes of several agents are not supported. What was run: docs/environments.md.
"""

import json
import os
from itertools import islice

try:
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError:
    raise ImportError("verifiers is missing: pip install verifiers==0.4.0") from None

NAME, ARGS = os.environ.get("VERIFIERS_ENV", ""), json.loads(os.environ.get("VERIFIERS_ARGS", "{}"))
if not NAME:
    raise ValueError("name an installed taskset with VERIFIERS_ENV")
NUM_TASKS = int(os.environ.get("VERIFIERS_NUM_TASKS", "10000"))  # of a taskset without end
HELD_OUT = 10  # Every tenth task is for evaluation.


def make_environment():
    """The library's. Each episode has one: its servers end with it."""
    args = {"agent": {}} | ARGS
    args["taskset"] = {"id": NAME} | args.get("taskset", {})
    args["agent"] = {"runtime": {"type": "subprocess"}} | args["agent"]
    return load_environment(resolve_env_config(args))


TASKS = list(islice(make_environment().taskset, NUM_TASKS))


def load_tasks(split):
    rows = []
    for index, task in enumerate(TASKS):
        is_held_out = index % HELD_OUT == HELD_OUT - 1
        if is_held_out == (split != "train"):
            rows.append({"index": index, "prompt": task.data.prompt_text})
    return rows


async def rollout(task, actors):
    [actor] = actors.values()
    env = make_environment()
    async with actor.endpoint() as llm:
        episode = await play(env, TASKS[task.row["index"]], llm)
        check_episode(episode, llm)
        trace = episode.traces[-1]
        found = llm.trajectories(trace.reward)
        for trajectory in found:
            trajectory.metrics |= {name: float(value) for name, value in trace.metrics.items()}
        return found


async def play(env, task, llm):
    # The library reads keys from variables. Their name keeps them from the programs it starts.
    variable = f"EPISODE_API_KEY_{llm.api_key[-16:]}"
    os.environ[variable] = llm.api_key
    client = EvalClientConfig(base_url=llm.base_url, api_key_var=variable)
    try:
        async with env.serving():
            return await env.run_episode(task, ModelContext(model=llm.model, client=client))
    finally:
        del os.environ[variable]


def check_episode(episode, llm):
    if len(episode.traces) > 1:
        raise ValueError(f"{NAME}: an episode of {len(episode.traces)} agents; one is supported")
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.traces or (errors and not llm.is_truncated):
        raise RuntimeError(f"{NAME}: {errors[-1].type}: {errors[-1].message}")
