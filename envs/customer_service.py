"""A shop's service desk, after tau-bench (arXiv:2406.12045): a policy, tools, and a user who asks.

    rl-core train --env_path envs/customer_service.py --model M --max_prompt_tokens 2048
    --max_tokens 512 --out runs/desk
    rl-core train ... --actors.agent.model M --actors.user.api https://host/v1 --actors.user.model U
    --actors.user.train false

With an actor `user` that one plays the customer from `scenario`, and says ###STOP### when it is
done. Without it the customer is scripted: it states its request, then one of its facts a turn.
The agent calls tools, or speaks. Reward: 1 if the shop's records are then as after the row's
`actions`, and the agent's replies hold all of the row's `outputs`; else 0. Kinds (column `kind`)
and levels: status (1), cancel, address (2), refuse (3), where the policy forbids the request.
Rows have a seed, which makes the records; a tenth is held out. Metric: `refused_calls`.
Needs a GPU, not run.
"""

import random

from programs.calling import answer, tool

POLICY = """You serve the customers of a shop. Rules:
1. Before anything else ask for the customer's e-mail address and postcode; both must fit the order.
2. An order can be cancelled, and its address changed, only while it is pending.
3. If a rule forbids what is asked, call refuse with the order and the rule's number.
4. Do what was asked and nothing else. Then tell the customer what you have done."""
STOP = "###STOP###"
PLAY = (
    "You are a customer. Say one thing at a time, only what you know, and never call tools. When "
    f"your request is settled or refused, say {STOP}. "
)
KINDS = {"status": 1, "cancel": 2, "address": 2, "refuse": 3}
NAMES = ("ada", "ben", "cleo", "dora", "emil", "fay")
STATUSES = ("pending", "shipped", "delivered")
NUM_ROWS = 1200
ORDER = "the number of the order"
max_turns = 12
tools = [
    tool("get_order", "Shows an order.", order=ORDER),
    tool("cancel_order", "Cancels an order.", order=ORDER),
    tool("change_address", "Changes where an order goes.", order=ORDER, address="the new one"),
    tool("refuse", "Notes that a rule forbids it.", order=ORDER, rule="the rule's number"),
]


class Shop:
    """Orders by number, and refusals."""

    def __init__(self, seed):
        rng = random.Random(f"orders {seed}")
        self.orders, self.refused, self.num_errors = {}, [], 0
        for number in rng.sample(range(1000, 10_000), 6):
            self.orders[str(number)] = {
                "email": f"{rng.choice(NAMES)}{rng.randrange(100)}@mail.test",
                "postcode": str(rng.randrange(10_000, 100_000)),
                "status": rng.choice(STATUSES),
                "address": f"{rng.randrange(1, 99)} Mill Lane",
            }
        names = [schema["function"]["name"] for schema in tools]
        self.tools = {name: getattr(self, name) for name in names}

    def find(self, order):
        if order not in self.orders:
            raise ValueError(f"there is no order {order!r}")
        return self.orders[order]

    def get_order(self, order):
        return self.find(order)

    def cancel_order(self, order):
        self.find(order)["status"] = "cancelled"
        return "cancelled"

    def change_address(self, order, address):
        self.find(order)["address"] = address
        return "changed"

    def refuse(self, order, rule):
        self.find(order)
        self.refused.append((order, rule))
        return "noted"

    def records(self):
        return self.orders, sorted(set(self.refused))


def make_row(seed):
    rng = random.Random(seed)
    kind = [*KINDS][seed % len(KINDS)]
    orders = Shop(seed).orders
    number = rng.choice([*orders])
    order = orders[number]
    asked = rng.choice(("cancel", "address")) if kind == "refuse" else kind
    new = f"{rng.randrange(1, 99)} Hill Road"
    wish, action = {
        "status": (f"What is the status of my order {number}?", None),
        "cancel": (f"Please cancel my order {number}.", ["cancel_order", number]),
        "address": (f"Please send my order {number} to {new}.", ["change_address", number, new]),
    }[asked]
    # A rule stands against it: the order has left, or the postcode is not the customer's.
    status, postcode, rule = "pending", order["postcode"], None
    if kind == "refuse":
        rule = rng.choice(("1", "2"))
        status = "shipped" if rule == "2" else "pending"
        postcode = postcode if rule == "2" else str(99_999 - int(postcode))
        action = ["refuse", number, rule]
    facts = [f"My e-mail address is {order['email']}.", f"My postcode is {postcode}."]
    return {
        "prompt": wish,
        "kind": kind,
        "level": KINDS[kind],
        "seed": seed,
        "order": number,
        "status": order["status"] if kind == "status" else status,
        "facts": facts,
        "scenario": f"{wish} {' '.join(facts)}",
        "actions": [action] if action else [],
        "outputs": [order["status"]] if kind == "status" else [],
    }


def load_tasks(split):
    rows = [make_row(seed) for seed in range(NUM_ROWS)]
    return [row for row in rows if (row["seed"] // 4 % 10 == 0) == (split != "train")]


def open_shop(row):
    shop = Shop(row["seed"])
    shop.orders[row["order"]]["status"] = row["status"]
    return shop


def is_right(row, shop, replies):
    """True if the records match the row's actions and the replies hold its outputs."""
    wanted = open_shop(row)
    for name, *arguments in row["actions"]:
        wanted.tools[name](*arguments)
    text = "\n".join(replies).lower()
    return shop.records() == wanted.records() and all(out in text for out in row["outputs"])


class ScriptedUser:
    """Tells one fact a turn, and is done a turn after the last one."""

    def __init__(self, row):
        self.left = [*row["facts"], STOP]

    async def hear(self, text):
        return self.left.pop(0)


class PlayedUser:
    """A customer whom an actor plays: in its conversation the agent is the user."""

    def __init__(self, actor, row):
        self.actor, self.reply = actor, None
        self.opening = [
            {"role": "system", "content": PLAY + row["scenario"]},
            {"role": "user", "content": "Hello, how can I help you?"},
            {"role": "assistant", "content": row["prompt"]},
        ]

    async def hear(self, text):
        heard = {"role": "user", "content": text or "..."}
        messages = [heard] if self.reply else [*self.opening, heard]
        self.reply = await (self.reply or self.actor).respond(messages)
        return STOP if self.reply.truncated else self.reply.answer


async def rollout(task, actors):
    row = task.row
    shop, replies = open_shop(row), []
    names = [name for name in actors if name != "user"]
    agent = actors["agent" if "agent" in names else names[0]]
    user = PlayedUser(actors["user"], row) if "user" in actors else ScriptedUser(row)
    messages = [{"role": "system", "content": POLICY}, *task.messages]
    reply = await agent.respond(messages, tools=tools)
    is_done = False
    for _ in range(agent.max_turns - 1):
        calls = reply.messages[-1].get("tool_calls") or []
        heard = [answer(call, shop.tools) for call in calls]
        shop.num_errors += sum(message["content"].startswith("error") for message in heard)
        if not calls:
            replies.append(reply.answer)
            text = await user.hear(reply.answer)
            is_done = STOP in text
            heard = [{"role": "user", "content": text}]
        if is_done or reply.truncated:
            break
        reply = await reply.respond(heard)
    reward = float(is_done and not reply.truncated and is_right(row, shop, replies))
    metrics = {"refused_calls": float(shop.num_errors)}
    return [reply.trajectory(reward, metrics=metrics)]


async def oracle(task):
    """Carries out the row's actions and says its outputs."""
    shop = open_shop(task.row)
    for name, *arguments in task.row["actions"]:
        shop.tools[name](*arguments)
    replies = [*task.row["outputs"], "Done."]
    return float(is_right(task.row, shop, replies))
