"""An environment file in a worker process: its description for clients, its tasks, and its
functions that run without a session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc import StatusCode

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.image_columns import with_images
from rl_core.data.task_rows import make_task
from rl_core.environments.env_file import execute_file, load_env
from rl_core.environments.run_checks import check_boxes
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.session import Session, is_whole, read_trajectory, too_slow
from rl_core.environments.service.wire import ServiceError, from_json, to_json, wrong
from rl_core.sampling.env import SPOKEN
from rl_core.sampling.hooks import HookError
from rl_core.types import JSONObject, Row, RunError, Task

SPLITS = ("train", "eval")
ROWS, ROW_BYTES = 1_000, 4 << 20  # Limits of one reply with tasks.


class LocalEnv:
    """An environment file that runs in this process. Raises ValueError if the file cannot be
    served."""

    def __init__(self, path: str, *, hook_timeout_s: float, idle_s: float):
        module = execute_file(path)
        self.env = load_env(path, hook_timeout_s=hook_timeout_s, module=module)
        check_boxes({self.env.name: self.env})
        has = vars(module)
        self.name = self.env.name
        self.path = path
        self.capacity = check_capacity(path, has.get("capacity"))
        self.rows: dict[str, asyncio.Task] = {}  # Split -> task that loads its rows.
        self.interactions = 0
        self.described = self.describe(has)
        self.described.idle_s = idle_s

    def describe(self, has: dict[str, object]) -> pb.Environment:
        env = self.env
        path = self.path
        turn_loop = env.turn_loop
        described = pb.Environment(
            name=env.name, max_turns=env.max_turns, name_prefix=turn_loop.name_prefix
        )
        described.tools = to_json(env.tools, f"{path}: tools") if env.tools else ""
        described.code = env.code()
        described.turns = turn_loop.turns.text if turn_loop.turns else ""
        if has.get("system_prompts"):
            described.system_prompts = to_json(has["system_prompts"], f"{path}: system_prompts")
        if turn_loop.truncated_reward is not None:
            described.truncated_reward = turn_loop.truncated_reward
        rewards = {hook.name for hook in env.rewards}
        for hook in env.hooks.values():
            described.hooks.add(
                name=hook.name,
                required=sorted(hook.required),
                optional=sorted(hook.named - hook.required),
                takes_all=hook.takes_all,
                is_reward=hook.name in rewards,
                weight=hook.weight,
                batched=hook.batched,
            )
        for name in ("load_tasks", "advantage_fn"):
            if getattr(env, name):
                described.hooks.add(name=name)
        return described

    async def session(self, name: str, request: pb.StartRequest) -> Session:
        task = await self.task_of(request)
        return Session(name, self.env, task, request, self.count)

    def count(self) -> None:
        self.interactions += 1

    async def task_of(self, request: pb.StartRequest) -> Task:
        """The task of a start. Raises ServiceError for a malformed row or an unknown task ID."""
        info = from_json(request.info, dict, "info") if request.info else {}
        if request.row:
            row = from_json(request.row, dict, "row")
            try:
                if not request.messages:
                    task = make_task(row, 0, self.name, "row")
                    task.id = request.task_id or task.id
                    task.info = info
                    return task
                messages = canonical_messages(from_json(request.messages, list, "messages"))
                return Task(
                    id=request.task_id, env=self.name, row=row, messages=messages, info=info
                )
            except ValueError as error:
                raise wrong(str(error)) from None
        split, _, index = request.task_id.rpartition("/")
        is_index = index.isascii() and index.isdecimal() and len(index) < 20
        rows = await self.rows_of(split) if split in SPLITS and is_index else []
        if not is_index or int(index) >= len(rows):
            hint = "its tasks are train/0, train/1 ... and eval/0 ...; name one, or send a row"
            raise ServiceError(
                StatusCode.NOT_FOUND, f"{self.name} has no task {request.task_id[:80]!r}; {hint}"
            )
        task = make_task(rows[int(index)], int(index), self.name, split)
        task.info = info
        return task

    async def rows_of(self, split: str) -> Sequence[Row]:
        """The rows of a split, loaded once."""
        if self.env.load_tasks is None:
            raise ServiceError(
                StatusCode.NOT_FOUND,
                f"{self.name} has no tasks because its file has no load_tasks(); send rows",
            )
        if split not in SPLITS:
            raise wrong(f"unknown split {split[:80]!r}; known: {' and '.join(SPLITS)}")
        if split not in self.rows or (self.rows[split].done() and self.rows[split].exception()):
            self.rows[split] = asyncio.ensure_future(asyncio.to_thread(self.env.load_tasks, split))
        try:
            return await asyncio.shield(self.rows[split])
        except ValueError as error:
            raise ServiceError(StatusCode.UNKNOWN, str(error)) from None

    async def tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        rows = await self.rows_of(request.split)
        size = 0
        reply = pb.TasksReply(total=len(rows))
        for index in range(
            request.first, min(request.first + min(request.count or ROWS, ROWS), len(rows))
        ):
            label = f"row {index} of {self.path}'s load_tasks({request.split!r})"
            try:
                row = rows[index]
                row = to_json(with_images(row, None) if isinstance(row, dict) else row, label)
            except ValueError as error:
                raise ServiceError(StatusCode.UNKNOWN, f"{label}: {error}") from None
            size += len(row)
            if size > ROW_BYTES and reply.rows:
                break
            reply.rows.append(row)
        return reply

    async def call(self, request: pb.CallRequest) -> pb.CallReply:
        """Runs a function without a session."""
        arguments = from_json(request.given, dict, "given")
        label = f"{self.path}: what {request.hook}() returned"
        try:
            if request.hook == "advantage_fn" and self.env.advantage_fn:
                rewards = from_list(arguments, "rewards")
                value = await asyncio.to_thread(self.env.advantage_fn, rewards)
                return pb.CallReply(value=to_json(value, label))
            hook = self.env.hooks.get(request.hook)
            # All other hooks need a session's state or actors.
            if hook is None or is_whole(hook) or hook.ours >= SPOKEN or hook.name == "start":
                raise wrong(f"{self.name} has no {request.hook[:80]!r} that runs without a session")
            try:
                fields = {"id": "", "row": {}, "messages": []} | arguments.get("task", {})
                fields["row"] |= arguments
                task = Task(env=self.name, **fields)
            except TypeError as error:
                raise wrong(f"given: task is malformed: {error}") from None
            messages = {"prompt": task.messages, "messages": task.messages}
            arguments = messages | arguments | {"task": task}
            if "trajectory" in arguments:
                arguments["trajectory"] = read_trajectory(arguments["trajectory"])
            if "trajectories" in arguments:
                arguments["trajectories"] = [
                    read_trajectory(t) for t in from_list(arguments, "trajectories")
                ]
            value = await hook(task, arguments)
            return pb.CallReply(value=to_json(value, label))
        except (HookError, RunError) as error:
            raise ServiceError(StatusCode.UNKNOWN, str(error)) from None
        except TimeoutError as error:
            raise too_slow(error) from None

    def close(self) -> None:
        """Does nothing: a file in this process holds no resources."""


def from_list(arguments: JSONObject, name: str) -> list:
    if not isinstance(arguments.get(name), list):
        raise wrong(f"given: {name} must be a list")
    return arguments[name]


def check_capacity(path: str, capacity: object) -> int | None:
    """Checks a file's `capacity`, the number of its sessions in one worker. Raises ValueError."""
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise ValueError(f"{path}: capacity = {capacity!r} must be a whole number of at least 1")
    return capacity
