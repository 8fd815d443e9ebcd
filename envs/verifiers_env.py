"""Any installed environment of the `verifiers` library (0.1.x):
https://github.com/PrimeIntellect-ai/verifiers.

    pip install verifiers==0.1.10 && pip install my-environment
    VERIFIERS_ENV=my-environment VERIFIERS_ARGS='{"num_train_examples": 100}' rl-core train
    --env_path envs/verifiers_env.py \
        --model Qwen/Qwen3-0.6B --out runs/verifiers --max_prompt_tokens 1024 --max_tokens 512
        --max_turns 8

Rows, turns, tools and reward are the environment's: its data sets, its rollout(), its rubric, whose
parts are metrics. To it the actor is an OpenAI client. Where a request begins with the conversation
so far, that is continued, and sampled tokens stay as they are; else a conversation begins anew.
Each is trained with the same reward. Its sampling arguments do not count: --sampling does. An error
in it fails the episode, with the cause, but for reward functions that raise: the library logs them
and counts 0. Rubrics that score whole groups are not supported. What was run with verifiers 0.1.10:
docs/environments.md. Needs a GPU, not run.
"""

import json
import os
from types import SimpleNamespace

try:
    import verifiers
    from openai.types.chat import ChatCompletion
except ImportError:
    raise ImportError("verifiers is missing: pip install verifiers==0.1.10") from None

NAME, ARGS = os.environ.get("VERIFIERS_ENV", ""), json.loads(os.environ.get("VERIFIERS_ARGS", "{}"))
if not NAME:
    raise ValueError("name an installed environment with VERIFIERS_ENV")
ENV = verifiers.load_environment(NAME, **ARGS)
max_turns = ENV.max_turns if getattr(ENV, "max_turns", 0) > 0 else 8


def load_tasks(split):
    rows = ENV.get_dataset() if split == "train" else ENV.get_eval_dataset()
    return [dict(row) for row in rows]


class ContextFull(Exception):
    """The conversation holds no further turn."""


class Client:
    """What the environment takes for an OpenAI client. `replies`: the conversations of this
    episode."""

    def __init__(self, actor):
        self.actor, self.replies, self.seen = actor, [], []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, *, messages, tools=None, model="", **sampling):
        same = [(m["role"], m.get("content") or "") for m in messages]
        reply = self.replies[-1] if self.replies else None
        if reply and self.seen == same[: len(self.seen)]:
            await reply.respond([dict(m) for m in messages[len(self.seen) :]])
        else:
            reply = await self.actor.respond([dict(m) for m in messages], tools=tools)
            self.replies.append(reply)
        if reply.truncated and not reply.text:
            raise ContextFull("the context is full")
        said = reply.messages[-1]
        text, calls = said["content"] or "", said.get("tool_calls") or []
        # The library refuses a reply that is empty.
        self.seen = [*same, ("assistant", text or " " * (not calls))]
        calls = [
            {**c, "function": {**c["function"], "arguments": as_text(c["function"]["arguments"])}}
            for c in calls
        ]
        message = {
            "role": "assistant",
            "content": text or " " * (not calls),
            "tool_calls": calls or None,
        }
        finish = "length" if reply.truncated else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": model or "actor"}
        return ChatCompletion.model_validate(about | {"choices": [choice]})


def as_text(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


async def rollout(task, actors):
    [actor] = actors.values()
    client = Client(actor)
    state = await ENV.rollout(task.row, client, actor.name, {})
    error = state.get("error")
    if error is not None and not isinstance(error.__cause__, ContextFull):
        raise error
    await ENV.rubric.score_rollout(state)
    reward, metrics = (
        float(state["reward"]),
        {name: float(value) for name, value in state["metrics"].items()},
    )
    return [reply.trajectory(reward, metrics=metrics) for reply in client.replies]
