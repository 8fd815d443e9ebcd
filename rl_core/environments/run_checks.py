"""Checks that the actors of a run can play in its environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.sampling.env import Env
from rl_core.sampling.episode import check_name

if TYPE_CHECKING:
    from rl_core.config import Config
    from rl_core.data.chat import Chat


def speakers(env: Env, names: Sequence[str] = ()) -> list[str] | None:
    """Names of actors that may speak, out of `names`, or all names in the file. None if only a
    function of the file decides. Raises ValueError if the schedule has other names."""
    if "rollout" in env.hooks:
        return None
    turns = env.turn_loop.turns
    return list(names) if turns is None else turns.speakers(names)


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
    for name, env in envs.items():
        check_actors(env, [*config.trained, *frozen])
        if not config.is_rl:
            check_is_read(config, name, env)
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
        if settings.algo != type(settings.algo)():
            check_hooks_of_algorithm(settings, name, envs)
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(
            f"of {config.env_path} some define advantage_fn and others do not; let all do, or none"
        )


def check_is_read(config: Config, name: str, env: Env) -> None:
    """Raises ValueError for a file of which an algorithm without episodes reads nothing."""
    section = config.env(name)
    is_asked = not (section.train or config.data.train)
    is_asked |= bool(config.eval_every) and not (section.eval or config.data.eval)
    if env.row_to_prompt is None and not (env.load_tasks and is_asked):
        raise ValueError(
            f"--env_path {env.path}: --algorithm {config.algorithm} plays no episodes, so that it "
            "reads load_tasks() of a file, where --data.train names no rows, and row_to_prompt() "
            "alone; leave --env_path out"
        )


def check_hooks_of_algorithm(config: Config, name: str, envs: dict[str, Env]) -> None:
    """Raises ValueError if an actor's algorithm needs hooks that the environments lack. `config`:
    with the actor's settings."""
    if config.algo.teacher:
        from rl_core.sampling.teacher_prompts import check_taught

        check_taught(config, name, envs)
    if config.algo.gigpo_coef or config.algo.gigpo_discount:
        check_keys(config, envs)


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
