"""Makes an Env from a user's environment file. Its rollout() plays an episode.

A file with a rollout() plays its episodes itself. All others are compiled to one: episode.py's
TurnLoop, in which actors take turns, and hooks answer and score. Nobody above asks which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.environments.data_hooks import advantages_of, rows_of
from rl_core.environments.file_hash import hash_of
from rl_core.sampling.env import ARGUMENTS, OF_GROUP, SPOKEN, Env
from rl_core.sampling.episode import TurnLoop
from rl_core.sampling.hooks import Hook
from rl_core.sandbox import run_flags

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig

AGENT_TURNS = 64  # Default max_turns of agents, if as many turns fit into the context.
# Rewards without the decorator: weight, and True if batched.
REWARDS = {"reward_fn": (1.0, False), "group_reward_fn": (1.0, True)}


def make_env(
    module: ModuleType,
    path: str,
    agents: AgentsConfig | None = None,
    *,
    hook_timeout_s: float = 60.0,
    max_turns: int | None = None,
    fitting_turns: Callable[[], int] = lambda: AGENT_TURNS,
) -> Env:
    """The environment of a file's module. `max_turns` overrides the file's; fitting_turns() bounds
    the default of agents. Raises ValueError."""
    has = {name: value for name, value in vars(module).items() if value is not None}
    rewards = marked_rewards(module)
    hooks = make_hooks(has, rewards, path, hook_timeout_s)
    turns = tools = None
    prompts = {}
    if "agent" in has:
        from rl_core.environments.agents.rollout import agent_hooks

        agent = hooks.pop("agent", has["agent"])
        hooks = agent_hooks(path, agent, hooks, has.get("box"), agents)
    if "turns" in has:
        from rl_core.environments.turn_order import make_turns

        turns = make_turns(has["turns"], path, hooks)
    if has.keys() & {"tools", "system_prompts"}:
        from rl_core.environments.system_prompts import load_prompts, tool_schemas

        tools = tool_schemas(has.get("tools", ()), path) or None
        prompts = load_prompts(has.get("system_prompts", {}), path)
    if max_turns:
        longest, turns_from = max_turns, "--max_turns"
    elif has.get("max_turns"):
        longest, turns_from = has["max_turns"], f"max_turns of {path}"
    elif turns is not None:
        longest, turns_from = turns.longest, f"the longest schedule of {path}"
    elif "agent" in has:
        longest, turns_from = min(AGENT_TURNS, fitting_turns()), "the default of agents"
    else:
        longest = 8 if hooks.keys() & {"interact", "rollout"} else 1
        turns_from = f"the default of {path}"
    check_machine = None
    if run_flags.is_imported or "box" in has:
        from rl_core.environments.machine_check import machine_check

        check_machine = machine_check(has)
    turn_loop = TurnLoop(
        path=path,
        hooks=hooks,
        rewards=[hooks[name] for name in rewards if name in hooks],
        turns=turns,
        tools=tools,
        system_prompts=prompts,
        name_prefix=has.get("name_prefix", False),
        truncated_reward=has.get("truncated_reward"),
    )
    rollout = turn_loop.rollout
    if "rollout" in hooks:
        from rl_core.sampling.own_rollout import play

        rollout = partial(play, hooks["rollout"])
    advantage_fn = has.get("advantage_fn")
    return Env(
        name=Path(path.partition("?")[0]).stem,
        path=path,
        rollout=rollout,
        hooks=hooks,
        turn_loop=turn_loop,
        load_tasks=has.get("load_tasks") and partial(rows_of, has["load_tasks"], path=path),
        advantage_fn=advantage_fn and partial(advantages_of, advantage_fn, path=path),
        row_to_prompt=has.get("row_to_prompt"),
        max_turns=longest,
        turns_from=turns_from,
        tools=turn_loop.tools,
        check_machine=check_machine,
        code=module.heard_code if "://" in path else partial(str, hash_of(module)),
    )


def make_hooks(
    has: dict[str, Any],
    marked: dict[str, tuple[Callable, float, bool]],
    path: str,
    timeout_s: float,
) -> dict[str, Hook]:
    functions = {name: (has[name], 1.0, False) for name in ARGUMENTS if callable(has.get(name))}
    hooks = {}
    for name, (function, weight, batched) in (functions | marked).items():
        ours = ARGUMENTS.get(name) or (OF_GROUP if batched else SPOKEN)
        if "start" in has and ours is SPOKEN:
            ours = ours | {"state"}
        if "agent" in has and ours is SPOKEN:
            ours = ours | {"result", "box"}
        # An episode has a deadline, and a served hook that of the service.
        has_deadline = (
            name not in ("rollout", "agent", "task_weight", "oracle") and "://" not in path
        )
        hooks[name] = Hook(
            name=name,
            function=function,
            path=path,
            timeout_s=timeout_s if has_deadline else None,
            ours=ours,
            weight=weight,
            batched=batched,
        )
    return hooks


def marked_rewards(module: ModuleType) -> dict[str, tuple[Callable, float, bool]]:
    """Name -> (function, weight, True if batched). A function with two names counts once."""
    rewards: dict[str, tuple[Callable, float, bool]] = {}
    known: set[int] = set()
    for name, value in vars(module).items():
        mark = getattr(value, "__dict__", {}).get("reward_mark", REWARDS.get(name))
        if mark and callable(value) and id(value) not in known:
            known.add(id(value))
            weight, batched = mark
            rewards[name] = (value, weight, batched or name == "group_reward_fn")
    return rewards
