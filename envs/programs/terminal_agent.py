"""An agent with a shell: the model calls `bash`, reads the command's output, and continues until it
calls nothing. It works in any box with `exec(command, timeout_s)`: one of rl_core.sandbox.boxes, or
a task's of rl_core.environments.agents.harbor."""

import asyncio
import json

SYSTEM = (
    "You solve a task in a Linux shell. Call bash to run commands. Each command begins in the same "
    "folder, and files stay. When the task is done, answer without a call."
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in bash and gives what it writes.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}
COMMAND_TIMEOUT_S = 60.0
MAX_SHOWN = 4000  # Characters of a command's output; the middle of longer output is left out.


def shortened(text):
    left_out = len(text) - MAX_SHOWN
    if left_out <= 0:
        return text
    half = MAX_SHOWN // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"


def shown(result):
    """Text that the model reads when a command has ended."""
    text = shortened((result.stdout + result.stderr).rstrip("\n"))
    if result.timed_out:
        return f"{text}\n[ended: it ran too long]"
    if result.code != 0:
        return f"{text}\n[exit code {result.code}]"
    return text


def command_of(call):
    """The command that a call asks for. Raises ValueError."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if function["name"] != "bash" or not isinstance(command, str):
        raise ValueError('there is one tool, bash, with one argument: {"command": "..."}')
    if "\0" in command:
        raise ValueError("a command has no NUL characters")
    return command


async def answer(call, box, timeout_s):
    """The message that answers a call."""
    try:
        result = shown(await box.exec(command_of(call), timeout_s=timeout_s))
    except ValueError as error:
        result = f"error: {error}"
    return {"role": "tool", "content": result, "tool_call_id": call.get("id", "")}


def unanswered(reply):
    """Answers to the calls of a conversation whose time or turns were used up."""
    calls = reply.messages[-1].get("tool_calls") or []
    content = "[not run: the time is used up]"
    return [{"role": "tool", "content": content, "tool_call_id": c.get("id", "")} for c in calls]


async def solve(actor, messages, box, *, max_turns, timeout_s, system=SYSTEM, reply=None):
    """The conversation in which the actor works on a task, until it calls nothing, or its turns or
    its time are used up. `reply`: the conversation of a step before, which continues."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + timeout_s
    if reply is None:
        opening = [{"role": "system", "content": system}] if system else []
        reply = await actor.respond([*opening, *messages], tools=[BASH])
    elif reply.truncated or reply.num_replies >= max_turns:
        return reply
    else:
        reply = await reply.respond([*unanswered(reply), *messages])
    while reply.num_replies < max_turns:
        calls = reply.messages[-1].get("tool_calls") or []
        if reply.truncated or not calls or clock.time() >= deadline:
            break
        answers = []
        for call in calls:
            left_s = max(1.0, deadline - clock.time())
            answers.append(await answer(call, box, min(left_s, COMMAND_TIMEOUT_S)))
        reply = await reply.respond(answers)
    return reply
