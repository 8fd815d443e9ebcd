"""Loads an environment's file. Refuses a file that contradicts itself, the rows or the actors."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.data.env_names import env_path
from rl_core.data.rows import CHECKED_ROWS, is_trajectory, row_place
from rl_core.data.task_rows import (
    CONTEXT_COLUMNS,
    PROMPT_COLUMNS,
    first_column,
    make_task,
    shorten,
)
from rl_core.environments.env_hooks import execute_file, make_env, marked_rewards
from rl_core.errors import near_name
from rl_core.sampling.env import ARGUMENTS, Env
from rl_core.sampling.episode import check_name, is_list
from rl_core.types import JSON, Row

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig, Config
    from rl_core.data.chat import Chat

FUNCTIONS = (*ARGUMENTS, "reward_fn", "group_reward_fn", "load_tasks", "advantage_fn")
FUNCTIONS += ("row_to_prompt",)
# Hooks and settings that a file's rollout() replaces.
OF_DIALOGUE = ARGUMENTS.keys() - {"rollout", "agent", "task_weight", "oracle", "teacher_prompt"}
OF_DIALOGUE |= {"system_prompts", "name_prefix", "truncated_reward"}
UNUSED_BY_AGENT = OF_DIALOGUE | {"rollout"}


# Arguments of reward functions in TRL and verl, and the equivalent signature.
ONE_REPLY = "a reward is called for one reply: def reward_fn(completion, prompt, answer)"
OF_PEERS = {
    "completions": f"TRL passes lists, rl_core one reply: {ONE_REPLY} -> float",
    "prompts": f"TRL passes lists, rl_core one reply: {ONE_REPLY} -> float",
    "completion_ids": f"TRL passes lists of ids, rl_core one reply: {ONE_REPLY} -> float",
    "solution_str": f"verl's solution_str is `completion`: {ONE_REPLY} -> float",
}


def is_agent(value: JSON) -> bool:
    return callable(value) or (is_list(value, str) and len(value) > 0)


def is_turns(value: object) -> bool:
    return isinstance(value, str) or callable(value) or is_list(value, str)


def is_prompts(value: object) -> bool:
    return isinstance(value, dict) and is_list([*value, *value.values()], str)


def is_finite(value: JSON) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Setting -> (True if a value is valid, the rule).
SETTINGS = {
    "agent": (is_agent, "a function, or a command: a list of texts"),
    "box": (lambda v: v is True or isinstance(v, dict), "True, or a dict of a box's settings"),
    "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "tools": (
        lambda v: is_list(v, Callable | dict),
        "a list of functions or OpenAI schemas (dictionaries)",
    ),
    "turns": (is_turns, "a schedule, a list of names or a function"),
    "system_prompts": (is_prompts, "a dict of names and texts"),
    "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
    "truncated_reward": (is_finite, "None or a finite number"),
}


def load_env(
    path: str,
    *,
    module: ModuleType | None = None,
    agents: AgentsConfig | None = None,
    **limits: Any,
) -> Env:
    """The environment of a Python file, of a name in env_names, or of `module`, such as one behind
    a URL. `agents`: the address at which programs reach this process. `limits`: passed to
    make_env(). Raises ValueError for an exception in the file, with its line, and for hooks that
    are missing, misspelled or of the wrong kind."""
    if module is None:
        path = env_path(path)
        module = execute_file(path)
    if agents is not None and "networks" in vars(module):
        module.networks.update(build=agents.build_network, verify=agents.verify_network)
    check_names(module, path)
    env = make_env(module, path, agents, **limits)
    for name, hook in env.hooks.items():
        if hook.is_async and name == "task_weight":
            raise ValueError(
                f"{path}: task_weight() is called between steps, when nothing else runs; drop the "
                "async"
            )
        if not hook.is_async and name != "turns" and "actors" in hook.ours & hook.named:
            raise ValueError(
                f"{path}: {name}() names 'actors', who must be awaited; write async def {name}(...)"
            )
    return env


def own_functions(module: ModuleType) -> list[FunctionType]:
    """The functions that a file defines."""
    functions = filter(inspect.isfunction, vars(module).values())
    return [function for function in functions if function.__module__ == module.__name__]


def check_names(module: ModuleType, path: str) -> None:
    """Raises ValueError for misspelled hooks, settings of the wrong type, and a file without a hook
    that scores."""
    has = vars(module)
    for name, value in has.items():
        is_imported = callable(value) and getattr(value, "__module__", "") != module.__name__
        # Constants and names with a leading _ are free.
        if name.startswith("_") or name.isupper() or inspect.ismodule(value) or is_imported:
            continue
        known = FUNCTIONS if callable(value) else SETTINGS
        for close in difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75):
            if close not in has:  # Else the name is a helper of that hook.
                raise ValueError(
                    f"{path}: {name!r} is not a hook; did you mean {close!r}? Begin a helper's "
                    "name with _"
                )
    if "agent" in has and "tools" in has:
        raise ValueError(
            f"{path}: tools is a setting of conversations without an agent; an agent sends its "
            "tools with its requests. Rename the variable, for example to _tools"
        )
    rules = dict.fromkeys(FUNCTIONS, (callable, "a function")) | SETTINGS
    for name, (is_good, rule) in rules.items():
        if has.get(name) is not None and not is_good(has[name]):
            if name == "tools" and "rollout" in has:
                rule += "; rename a variable of the rollout's, for example to _tools"
            if name == "reward_fn" and isinstance(has[name], (list, tuple)):
                rule += "; mark each of several functions with @reward (from rl_core import reward)"
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}")
    if "box" in has and (not has.get("agent") or callable(has["agent"])):
        raise ValueError(
            f"{path}: box configures where an agent's command runs; write agent = [...], or open a "
            "box in a hook: from rl_core.sandbox import boxes"
        )
    rewards = marked_rewards(module)
    if not rewards and has.keys().isdisjoint(("interact", "rollout", "agent")):
        if callable(has.get("compute_score")):
            raise ValueError(
                f"{path}: compute_score() is verl's; add def reward_fn(completion, data_source, "
                "reward_model): return compute_score(data_source, completion, "
                'reward_model["ground_truth"])'
            )
        functions = [f for f in own_functions(module) if not f.__name__.startswith("_")]
        names = " and ".join(f"{function.__name__}()" for function in functions)
        arguments = [a for function in functions for a in inspect.signature(function).parameters]
        hint = next((f"; {OF_PEERS[name]}" for name in arguments if name in OF_PEERS), "")
        raise ValueError(
            f"{path}: defines no hook{f', only {names}' if names else ''}; it needs def "
            f"reward_fn(messages, ...) or def interact(messages){hint}"
        )
    if "agent" in has:
        for name in sorted(UNUSED_BY_AGENT & has.keys()):
            raise ValueError(
                f"{path}: agent replaces {name!r}, which nobody would call; drop one of them"
            )
        if not rewards:
            raise ValueError(
                f"{path}: an agent needs a hook that scores, such as def reward_fn(result)"
            )
    elif "rollout" in has:
        single = {name for name, (_, _, batched) in rewards.items() if not batched}
        if "state_key" in has:
            raise ValueError(
                f"{path}: rollout() replaces 'state_key', which nobody would call; it sets the "
                "key of a turn itself: respond(messages, state_key=...)"
            )
        for name in sorted(OF_DIALOGUE & has.keys() | single):
            raise ValueError(
                f"{path}: rollout() replaces {name!r}, which nobody would call; drop one of them"
            )


def speakers(env: Env, names: Sequence[str] = ()) -> list[str] | None:
    """Names of actors that may speak, out of `names`, or all names in the file. None if only a
    function of the file decides. Raises ValueError if the schedule has other names."""
    if "rollout" in env.hooks:
        return None
    turns = env.turn_loop.turns
    return list(names) if turns is None else turns.speakers(names)


def check_columns(
    env: Env,
    rows: Sequence[Row],
    files: Sequence[tuple[str, int]] = (),
    split: str = "train",
) -> None:
    """Raises ValueError if a hook or a system prompt names an argument that neither we nor every
    row has, and for a file of a run's episodes."""
    if files and is_trajectory(rows[0]):
        raise ValueError(
            f"{files[0][0]} holds a run's episodes, which are for --algorithm sft; name rows"
        )
    wanted = []
    for hook in env.hooks.values():
        wanted.append((f"{hook.name}()", hook.required - hook.ours, hook.ours))
    for name, prompt in env.turn_loop.system_prompts.items():
        wanted.append((f"system_prompts[{name!r}]", prompt.columns, ()))
    columns = getattr(rows, "column_names", None)
    if columns is not None:  # All rows of a table have the same columns.
        rows = [dict.fromkeys(columns)]
    limit = len(rows) if isinstance(rows, list) else CHECKED_ROWS
    for index, row in enumerate(itertools.islice(rows, limit)):
        for user, names, ours in wanted:
            for name in sorted(names - row.keys(), key=lambda name: (name not in OF_PEERS, name)):
                hint = OF_PEERS.get(name) or column_hint(env, name, ours, row, bool(files))
                if name == "state":
                    hint = "it needs start(task)"
                source = row_place(index, files, split)
                has_prompt = first_column(row, PROMPT_COLUMNS) is not None
                if not has_prompt and name not in PROMPT_COLUMNS:
                    # Raises: a row without a prompt is rarely meant for these hooks.
                    make_task(row, index, env.name, split, location=source)
                raise ValueError(
                    f"{env.path}: {user} asks for {name!r}; {source} has {', '.join(row)}"
                    + (f"; {hint}" if hint else "")
                )


def column_hint(env: Env, name: str, ours: Collection[str], row: Row, is_file: bool) -> str:
    """The argument or column that is spelled most like `name`, and the flag that reads a column by
    the name that a hook wants: that one, or the only one that nothing else reads."""
    close = difflib.get_close_matches(name, sorted({*ours, *row}), n=1, cutoff=0.8)
    if close and close[0] in ours:
        return f"did you mean {close[0]!r}?"
    meant = f"did you mean {close[0]!r}?" if close else ""
    if not is_file:
        return meant
    read = {*PROMPT_COLUMNS, *CONTEXT_COLUMNS}.union(*(hook.named for hook in env.hooks.values()))
    free = [column for column in row if column not in read]
    column = near_name(name, free) or (free[0] if len(free) == 1 else "COLUMN")
    read = f"{'Read' if meant else 'read'} one by --data.columns {name}={column}"
    return f"{meant} {read}".strip()


def check_actors(env: Env, names: Sequence[str]) -> None:
    """Raises ValueError unless these actors can play."""
    for name in env.turn_loop.system_prompts:
        check_name(env.path, name, names, "system_prompts")
    if speakers(env, names) and env.turn_loop.turns is None and len(names) > 1:
        raise ValueError(
            f"{env.path}: there are {len(names)} actors, {', '.join(names)}, and nothing says "
            f'whose turn it is; add turns = "{names[0]}" if hooks ask the others, as a judge, or '
            f'turns = "{" -> ".join(names)}", or write async def rollout(task, actors)'
        )


def check_boxes(envs: dict[str, Env]) -> None:
    """Raises ValueError if an environment opens boxes and this machine cannot run them."""
    for env in envs.values():
        try:
            if env.check_machine is not None:
                env.check_machine()
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{env.path}: {error}") from error


def check_environments(config: Config, envs: dict[str, Env]) -> None:
    """Raises ValueError unless the actors can play in these environments, and each trained actor
    can speak in an environment that is trained in."""
    frozen = [name for name in config.actors if name not in config.trained]
    for env in envs.values():
        check_actors(env, [*config.trained, *frozen])
    trained_in = [env for name, env in envs.items() if config.env(name).is_trained_in]
    heard = [speakers(env, list(config.actors)) for env in trained_in]
    for name in config.trained:
        is_heard = any(names is None or name in names for names in heard)
        if config.is_rl and not is_heard:
            raise ValueError(
                f"--actors.{name} would never speak, so that it cannot learn: `turns` of "
                f"{', '.join(env.path for env in trained_in)} does not name it; name it there, or "
                f"give --actors.{name}.train false"
            )
        settings = config.of(name)
        if settings.algo.teacher:
            from rl_core.sampling.teacher_prompts import check_taught

            check_taught(settings, name, envs)
        if settings.algo.gigpo_coef or settings.algo.gigpo_discount:
            check_keys(settings, envs)
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(
            f"of {config.env_path} some define advantage_fn and others do not; let all do, or none"
        )


def check_tools(config: Config, envs: dict[str, Env], chats: dict[str, Chat]) -> None:
    """Raises ValueError if an actor that gets an environment's tools has a template whose tool
    calls cannot be parsed. Other actors, such as a judge that hooks ask, get no tools."""
    for env in envs.values():
        names = speakers(env, list(config.actors))
        if names is None:
            # A function of the file decides; trained actors speak somewhere.
            names = config.trained
        for name in names:
            if name in chats and env.tools:
                chats[name].tool_calls.check(env.tools, env.path)


def check_keys(config: Config, envs: dict[str, Env]) -> None:
    """Raises ValueError for flags of equal states if no environment defines state_key()."""
    if not envs or any(env.hooks.keys() & {"state_key", "rollout"} for env in envs.values()):
        return
    for flag in ("gigpo_coef", "gigpo_discount"):
        value = getattr(config.algo, flag)
        if value:
            raise ValueError(
                f"--algo.{flag}={value} is for turns that begin in equal states, and "
                f"{config.env_path} defines none; add def state_key(messages, state)"
            )
