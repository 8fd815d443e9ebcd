"""Warnings about tools that neither the template nor a message shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.task_rows import TaskSource, row_tools, row_variables
from rl_core.data.warnings.column_use import NUM_ROWS
from rl_core.sampling.env import Env
from rl_core.types import JSONObject, Task


def tool_warnings(
    config: Config,
    sources: Sequence[TaskSource],
    envs: Mapping[str, Env],
    chats: Mapping[str, Chat],
) -> Iterator[str]:
    """Warnings about tools that neither the template nor a message shows to a trained actor, one
    for each environment and actor."""
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
