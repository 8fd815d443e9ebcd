"""Warnings about a run's rows: oddities that can be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.task_rows import Tasks, TaskSource, row_tools, row_variables
from rl_core.data.warnings.column_use import NUM_ROWS, column_use
from rl_core.sampling.env import Env
from rl_core.types import JSONObject, Task


def data_warnings(
    config: Config,
    train: Tasks,
    evals: dict[str, TaskSource],
    spelled: tuple[str, str] | None = None,
    envs: Mapping[str, Env] | None = None,
    chats: Mapping[str, Chat] | None = None,
) -> Iterator[str]:
    """Warnings about the sizes of a run and its held-out rows, and row_warnings()."""
    has_rows = not config.data.streaming and not config.online.on
    if config.tasks_per_step > len(train) and has_rows:
        yield (
            f"--tasks_per_step={config.tasks_per_step} draws rows twice in one step: "
            f"there are {len(train)} training rows"
        )
    if evals or config.num_epochs or len(config.env_paths) > 1 or config.algorithm == "kto":
        from rl_core.data.warnings.set_warnings import set_warnings

        yield from set_warnings(config, train, evals, envs or {})
    sources = [*train.sources, *evals.values()]
    yield from row_warnings(config, sources, spelled, envs or {}, chats or {})


def row_warnings(
    config: Config,
    sources: Sequence[TaskSource],
    spelled: tuple[str, str] | None,
    envs: Mapping[str, Env],
    chats: Mapping[str, Chat],
) -> Iterator[str]:
    """Warnings about rows. `spelled`: a row with a reply that spells a special token, and the
    token."""
    if spelled:
        row, token = spelled
        yield (
            f"{row}: a reply spells the special token {token!r}, which is trained as text: the "
            "model learns to write these characters, not the token (docs/sft.md); others may too"
        )
    for source in sources if config.is_rl else ():
        tasks = [(task, [m["role"] for m in task.messages]) for task in islice(source, NUM_ROWS)]
        odd = [task for task, roles in tasks if roles[-1] == "assistant" or "user" not in roles]
        if odd:
            yield (
                f"{len(odd)} of the first {len(tasks)} prompts of {source.env} end with an "
                "assistant's turn, or have no user "
                f"message, such as {odd[0].place}"
            )
    chat = next((chats[name] for name in config.trained if name in chats), None)
    yield from column_warnings(config, sources, envs, chat)
    yield from tool_warnings(config, sources, envs, chats)


def column_warnings(
    config: Config, sources: Sequence[TaskSource], envs: Mapping[str, Env], chat: Chat | None
) -> Iterator[str]:
    """Warnings about columns and messages, each once by environment and column or remark."""
    warned: dict[str, set[str]] = {}
    for source in sources:
        env = envs.get(source.env)
        use = column_use(config, source, env, chat)
        has_prompts = env and env.turn_loop.system_prompts
        if has_prompts or use.remarks or use.lost or use.long or use.keys or use.equal:
            from rl_core.data.warnings.use_warnings import use_warnings

            yield from use_warnings(use, warned.setdefault(source.env, set()))


def tool_warnings(
    config: Config,
    sources: Sequence[TaskSource],
    envs: Mapping[str, Env],
    chats: Mapping[str, Chat],
) -> Iterator[str]:
    """Warnings about tools that a trained actor does not read of, one by environment and actor."""
    warned: set[tuple[str, str]] = set()
    names = [name for name in config.trained if name in chats]
    for source in sources if names else ():
        env = envs.get(source.env)
        if env is not None and "rollout" in env.hooks:
            continue  # The function writes its own messages, which may describe the tools.
        for task, name in product(islice(source, NUM_ROWS), names):
            if (source.env, name) in warned:
                continue
            tools = env.turn_loop.tools_of(task) if env else row_tools(task.row)
            if tools and (tool := unread_tool(task, tools, env, name, chats[name])):
                warned.add((source.env, name))
                yield (
                    f"{task.place}: the chat template of actor {name} renders no tools, and no "
                    f"message names {tool!r}: the model does not know its tools; describe them in "
                    "a message, or give another template with --actors.NAME.chat_template FILE"
                )


def unread_tool(
    task: Task, tools: list[JSONObject], env: Env | None, actor: str, chat: Chat
) -> str | None:
    """A tool that neither the template nor a message shows to the actor."""
    messages = env.turn_loop.opening(task, actor) if env else task.messages
    unread = chat.with_variables(row_variables(task.row)).unread_tools(messages, tools)
    return unread[0] if unread else None
