"""Service desks in tau2-bench's format (arXiv:2506.07982): a policy, tools over records, a user.

    export TAU2_DOMAIN=tau2-bench/data/tau2/domains/retail TAU2_TOOLS=tau2.domains.retail.tools
    rl-core train --env_path envs/tau2_env.py --actors.agent.model M --actors.user.api https://h/v1
    --actors.user.model U --actors.user.train false --max_prompt_tokens 8192
    --learner.microbatch_tokens 16384 --out runs/retail

The folder has policy.md, db.json, tasks.json and maybe split_tasks.json (`train`, and the rest;
without it a tenth is held out). TAU2_TOOLS, a module or a .py file, is run: of tau2's package, or
your own with a class that is made with the records, `db`, and whose public methods are the tools
(those named `assert_...` only judge). An actor `user` plays the customer, and ends with ###STOP###;
without it the customer says at once all that it knows, and stops at the second answer. Reward: the
product of the terms in a task's `reward_basis`: DB (records as after its actions), COMMUNICATE,
ACTION, ENV_ASSERTION. NL_ASSERTION needs a judge, and is left out (metric `unjudged`). Tasks with
tools of the user or a history are left out. docs/environments.md. Needs a GPU, not run.
"""

import asyncio
import json
import zlib

from programs.calling import MAX_SHOWN
from programs.tau2_desk import Desk, folder, read, schema

HELLO = "Hi! How can I help you today?"
ENDS = ("###STOP###", "###TRANSFER###")
PLAY = (
    "You are a customer who writes to a service desk. Say one thing at a time, make nothing up, "
    f"and never call tools. When your request is settled or refused, say {ENDS[0]}. You:\n"
)
max_turns = 30


def scenario_of(task):
    facts = task["user_scenario"]["instructions"]
    if isinstance(facts, dict):
        facts = "\n".join(facts[key] for key in facts if key != "domain" and facts[key])
    return facts


def is_played(task):
    """True if the customer needs neither tools nor a history."""
    actions = (task.get("evaluation_criteria") or {}).get("actions") or []
    return not task.get("initial_state") and all(
        action.get("requestor") in (None, "assistant") for action in actions
    )


def load_tasks(split):
    rows, splits = [], {}
    if (folder() / "split_tasks.json").is_file():
        splits = read("split_tasks.json")
    for task in filter(is_played, read("tasks.json")):
        is_train = zlib.crc32(task["id"].encode()) % 10 != 0
        if "train" in splits:
            is_train = task["id"] in splits["train"]
        if is_train == (split == "train"):
            criteria = task.get("evaluation_criteria") or {}
            row = {"id": task["id"], "prompt": scenario_of(task), "criteria": json.dumps(criteria)}
            rows.append(row)
    return rows


def judged(desk, texts, criteria):
    wanted, actions = Desk(), criteria.get("actions") or []
    for action in actions:
        wanted.call(action["name"], action["arguments"])
    text = "\n".join(texts).lower().replace(",", "")
    parts = {
        "DB": lambda: desk.state() == wanted.state(),
        "COMMUNICATE": lambda: all(
            fact.lower().replace(",", "") in text for fact in criteria.get("communicate_info") or []
        ),
        "ACTION": lambda: all((a["name"], a["arguments"]) in desk.calls for a in actions),
        "ENV_ASSERTION": lambda: all(
            getattr(desk.kit, one["func_name"])(**one["arguments"]) == one.get("assert_value", True)
            for one in criteria.get("env_assertions") or []
        ),
        "NL_ASSERTION": lambda: True,
    }
    return float(
        all(parts[name]() for name in criteria.get("reward_basis") or ("DB", "COMMUNICATE"))
    )


class TellingUser:
    """Tells all at once, hears one answer, and stops."""

    def __init__(self, row):
        self.left = [row["prompt"], "Go on, please.", ENDS[0]]

    async def hear(self, text):
        return self.left.pop(0)


class PlayedUser:
    """A customer whom an actor plays: in its conversation the agent is the user."""

    def __init__(self, actor, row):
        self.talk = actor
        self.opening = [{"role": "system", "content": PLAY + row["prompt"]}]

    async def hear(self, text):
        messages = [*self.opening, {"role": "user", "content": text or "..."}]
        self.opening, self.talk = [], await self.talk.respond(messages)
        return ENDS[0] if self.talk.truncated else self.talk.answer


def answer(desk, call):
    result = desk.call(call["function"]["name"], call["function"]["arguments"])[:MAX_SHOWN]
    return {"role": "tool", "content": result, "tool_call_id": call.get("id", "")}


async def rollout(task, actors):
    # Records may have megabytes: copied and compared in a thread, they stop no other episode.
    desk, texts, row = await asyncio.to_thread(Desk), [], task.row
    names = [name for name in actors if name != "user"]
    agent = actors["agent" if "agent" in names else names[0]]
    user = PlayedUser(actors["user"], row) if "user" in actors else TellingUser(row)
    policy = (folder() / "policy.md").read_text(encoding="utf-8")
    opening = [{"role": "system", "content": policy}]
    opening.append({"role": "user", "content": await user.hear(HELLO)})
    tools = [schema(name, function) for name, function in desk.tools.items()]
    reply, is_done = await agent.respond(opening, tools=tools), False
    for _ in range(agent.max_turns - 1):
        calls = reply.messages[-1].get("tool_calls") or []
        heard = [answer(desk, call) for call in calls]
        if not calls:
            texts.append(reply.answer)
            text = await user.hear(reply.answer)
            is_done = any(end in text for end in ENDS)
            heard = [{"role": "user", "content": text}]
        if is_done or reply.truncated:
            break
        reply = await reply.respond(heard)
    criteria = json.loads(row["criteria"])
    is_over = is_done and not reply.truncated
    reward = await asyncio.to_thread(judged, desk, texts, criteria) if is_over else 0.0
    unjudged = float("NL_ASSERTION" in (criteria.get("reward_basis") or ()))
    metrics = {"refused_calls": float(desk.num_errors), "unjudged": unjudged}
    return [reply.trajectory(reward, metrics=metrics)]


async def oracle(task):
    """Carries out the task's actions and says the required facts."""
    desk, criteria = Desk(), json.loads(task.row["criteria"])
    for action in criteria.get("actions") or []:
        desk.call(action["name"], action["arguments"])
    return judged(desk, criteria.get("communicate_info") or [], criteria)
