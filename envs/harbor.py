"""Tasks in Harbor's format, each in a separate box, played by an agent with a shell.

    rl-core check envs/harbor.py --data.train TASKS --oracle
    rl-core train --env_path envs/harbor.py --data.train TASKS --model Qwen/Qwen3-4B
    --out runs/harbor --max_prompt_tokens 4096 --max_tokens 1024 --learner.microbatch_tokens 24576

TASKS is a folder of task folders, or one of these. Without --data.train the tasks are those in
envs/tasks, of which every fourth is held out. Reward: as the task's tests/test.sh writes it.
Metric: number of `commands`. $HARBOR_DRIVER is the kind of box, by default --sandbox.box_driver;
HARBOR_NETWORK=1 gives agents of tasks that want it the network. HARBOR_AGENT="my-agent {prompt}" is
a command that replaces the built-in agent. docs/agents.md.
"""

import os
import shlex
from pathlib import Path

from programs.terminal_agent import BASH, solve

from rl_core.environments.agents.boxed import run_boxed
from rl_core.environments.agents.harbor import TaskBoxes
from rl_core.environments.agents.harbor_tasks import read_task, task_rows
from rl_core.environments.agents.program import filled
from rl_core.environments.agents.rollout import unasked

TASKS = Path(__file__).parent / "tasks"
networks = {"build": True, "verify": True}  # --agents.build_network, --agents.verify_network
BOXES = TaskBoxes(
    driver=os.environ.get("HARBOR_DRIVER", ""),
    network=os.environ.get("HARBOR_NETWORK") == "1",
    networks=networks,
)
AGENT = shlex.split(os.environ.get("HARBOR_AGENT", ""))
max_turns = 20
tools = [BASH]


def load_tasks(split):
    rows = task_rows(TASKS, networks)
    is_held_out = split != "train"
    return [row for number, row in enumerate(rows) if (number % 4 == 3) == is_held_out]


async def play_command(task, actor):
    """An episode by the command in $HARBOR_AGENT, as a program in the task's box."""
    async with actor.endpoint() as llm:
        binds = await llm.binds()
        async with BOXES.open(task.row["task_folder"], binds=binds) as box:
            settings = {"environ": box.environ, "workspace": box.cwd}
            async for step in box.steps():
                command = filled(AGENT, task.row | {"prompt": step.instruction}, __file__)
                limit_s = step.agent_timeout_s
                result = await run_boxed(box.box, command, llm, timeout_s=limit_s, **settings)
                await box.verify()
            score = box.score()
        trajectories = llm.trajectories(score.parts)
        if not trajectories:
            raise RuntimeError(f"$HARBOR_AGENT asked no model; {unasked(result, llm)}")
        for trajectory in trajectories:
            trajectory.log = score.wrote
        return trajectories


async def rollout(task, actors):
    actor = next(iter(actors.values()))
    if AGENT:
        return await play_command(task, actor)
    async with BOXES.open(task.row["task_folder"]) as box:
        reply, messages = None, task.messages
        async for step in box.steps():
            if reply:
                messages = [{"role": "user", "content": step.instruction}]
            limits = {"max_turns": actors.max_turns, "timeout_s": step.agent_timeout_s}
            reply = await solve(actor, messages, box, reply=reply, **limits)
            await box.verify()
        score = box.score()
    commands = sum(message["role"] == "tool" for message in reply.messages)
    played = reply.trajectory(score.parts, metrics=score.metrics | {"commands": commands})
    played.log = score.wrote
    return [played]


async def oracle(task):
    folder = task.row["task_folder"]
    if not read_task(folder).has_solution:
        return None
    wrote = []
    async with BOXES.open(folder) as box:
        async for _ in box.steps():
            await box.solve()
            wrote.append(f"solution/solve.sh: {box.wrote}")
            await box.verify()
        score = box.score()
        if box.not_installed and score.reward <= 0:
            raise box.not_installed
        return score.parts, "\n".join([*wrote, f"tests/test.sh: {score.wrote}"])
