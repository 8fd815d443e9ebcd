"""Any installed environment of the `verifiers` library's 1.0 API (0.4 and newer):
https://github.com/PrimeIntellect-ai/verifiers.

    pip install 'verifiers>=0.4' uv && pip install my-taskset
    VERIFIERS_ENV=my-taskset VERIFIERS_ARGS='{"agent": {"harness": {"id": "null"}}}' rl-core train \
        --env_path envs/verifiers_env.py --model Qwen/Qwen3-0.6B --out runs/verifiers
    VERIFIERS_ENV=my-taskset VERIFIERS_ARGS='{"id": "user-sim"}' rl-core train ... \
        --actors.assistant.model A --actors.user.model B --actors.user.trainable false

VERIFIERS_ENV is the taskset. VERIFIERS_ARGS is the configuration of the library's environment as
JSON; its `id` pairs the taskset with an environment such as user-sim. The agents' names are the
environment's (`agent`, `player`, `assistant` and `user`). One actor plays all of them; with several
actors each agent is played by the actor of its name. An agent with a `client` in VERIFIERS_ARGS
asks that endpoint instead, and needs no actor.

Tasks, programs (the library's harnesses), tools and rewards are the environment's. An actor is a
model behind a URL: the run's endpoint, at which exactly the sampled tokens are trained
(docs/agents.md). Harnesses run as processes of this machine unless VERIFIERS_ARGS names another
runtime. Agents that the environment marks as not trainable are not trained. Every tenth task is
for evaluation. --sampling replaces the environment's sampling arguments. An episode that fails in
the library fails here, with the cause, unless a conversation was full: then the episode is
truncated, and its rewards count. Results by taskset: docs/environments.md.
"""

import asyncio
import json
import os
import re
from contextlib import AsyncExitStack, ExitStack
from itertools import islice

try:
    from verifiers.v1 import AgentConfig, EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config
except ImportError:
    raise ImportError("verifiers is missing: pip install 'verifiers>=0.4' uv") from None

NAME, ARGS = os.environ.get("VERIFIERS_ENV", ""), json.loads(os.environ.get("VERIFIERS_ARGS", "{}"))
if not NAME:
    raise ValueError("name an installed taskset with VERIFIERS_ENV")
ARGS["taskset"] = {"id": NAME} | ARGS.get("taskset", {})
if ARGS["taskset"]["id"] == "openenv":
    try:
        from openenv.core import CallToolAction  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"verifiers' taskset openenv: {error}; openenv 0.10 and verifiers 0.4 need different "
            "versions of mcp. Play the server by envs/openenv_client.py with OPENENV_URL"
        ) from None
FIELDS = env_config_type(ARGS["taskset"]["id"], ARGS.get("id", "")).model_fields
AGENTS = [name for name, field in FIELDS.items() if isinstance(field.default, AgentConfig)]
NUM_TASKS = int(os.environ.get("VERIFIERS_NUM_TASKS", "1000"))  # Bounds an endless taskset.
NLTK = "words averaged_perceptron_tagger_eng"  # the word lists of the taskset textarena
HELD_OUT = 10  # Every tenth task is for evaluation.


def make_environment(clients=None):
    """The library's environment. Each episode has one: its servers end with it.

    clients: agent -> its model and client, for the agents that actors play.
    """
    args = dict(ARGS)
    for name in AGENTS:
        runtime = {"runtime": {"type": "subprocess"}}
        args[name] = runtime | args.get(name, {}) | (clients or {}).get(name, {})
    return load_environment(resolve_env_config(args))


def load_taskset():
    """The first tasks. Raises ValueError, in one line, for a word list that is not installed."""
    try:
        taskset = make_environment().taskset
        return list(islice(taskset, NUM_TASKS) if taskset.INFINITE else taskset)
    except LookupError as error:
        missing = re.search(r"nltk\.download\('(\w+)'\)", str(error))
        if missing is None:
            raise
        raise ValueError(
            f"{NAME} needs NLTK's {missing[1]}: run `python -m nltk.downloader {NLTK}` where "
            "there is a network, and name the folder with NLTK_DATA"
        ) from None


TASKS = load_taskset()


def load_tasks(split):
    rows = []
    for index, task in enumerate(TASKS):
        is_held_out = index % HELD_OUT == HELD_OUT - 1
        if is_held_out == (split != "train"):
            prompt = task.data.prompt_text or task.data.name or f"{NAME} #{index}"
            rows.append({"index": index, "prompt": prompt})
    return rows


def players(actors):
    """Agent -> the actor that plays it. Raises ValueError for actors that name no agent."""
    names = [name for name in AGENTS if "client" not in ARGS.get(name, {})]
    if len(actors) == 1:
        [actor] = actors.values()
        return dict.fromkeys(names, actor)
    if {*actors} != {*names}:
        raise ValueError(
            f"the actors are {', '.join(sorted(actors))}, the agents of {NAME} are "
            f"{', '.join(names)}; give one actor, or one for each agent by its name"
        )
    return {name: actors[name] for name in names}


async def rollout(task, actors):
    async with AsyncExitStack() as stack:
        played = players(actors)
        endpoints = {}
        for name, actor in played.items():
            endpoints[name] = await stack.enter_async_context(actor.endpoint())
        episode = await play(TASKS[task.row["index"]], endpoints)
        traces = traces_of(episode, endpoints)
        trained = []
        for name, llm in endpoints.items():
            if name not in traces:
                continue
            if not traces[name].agent.trainable:
                if len(actors) > 1 and played[name].is_trainable:
                    raise ValueError(
                        f"{NAME} does not train its agent {name!r}: --actors.{name}.trainable false"
                    )
                continue
            trajectories = llm.trajectories(traces[name].reward)
            for trajectory in trajectories:
                trajectory.player = name if len(played) > len(actors) else ""
                for metric, value in traces[name].metrics.items():
                    trajectory.metrics[metric] = float(value)
            trained += trajectories
        return trained


async def play(task, endpoints):
    """The library's episode of a task."""
    with ExitStack() as stack:
        clients = {}
        for name, llm in endpoints.items():
            # The library reads keys from variables and hides variables of this name from programs.
            variable = f"EPISODE_API_KEY_{llm.api_key[-16:]}"
            os.environ[variable] = llm.api_key
            stack.callback(os.environ.pop, variable)
            client = EvalClientConfig(base_url=llm.base_url, api_key_var=variable)
            clients[name] = {"model": llm.model, "client": client.model_dump()}
        env = await asyncio.to_thread(make_environment, clients)
        first = next(iter(clients.values()))
        context = ModelContext(model=first["model"], client=client)
        async with env.serving():
            return await env.run_episode(task, context)


def traces_of(episode, endpoints):
    """Agent -> its trace. Raises RuntimeError if the episode failed, unless it was truncated."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    is_truncated = any(llm.is_truncated for llm in endpoints.values())
    if errors and not (is_truncated and episode.traces):
        raise RuntimeError(f"{NAME}: {errors[-1].type}: {errors[-1].message}")
    traces = {trace.agent.name: trace for trace in episode.traces}
    if len(traces) < len(episode.traces):
        raise ValueError(
            f"{NAME}: an agent plays several times in an episode; once is supported "
            "(instead of best-of-n use --group_size)"
        )
    return traces
