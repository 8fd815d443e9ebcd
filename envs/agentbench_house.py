"""A household in text, after AgentBench's (arXiv:2308.03688) and ALFWorld (arXiv:2010.03768), in
rooms of our own.

    rl-core train --env_path envs/agentbench_house.py --model M --max_prompt_tokens 512
    --max_tokens 128 --out runs/house

The last line of a reply is an action, such as `go to shelf 1`; what can be done is listed. Kinds
of tasks (column `kind`) and levels: put (1); examine, two (2); clean, heat, cool (3). A row has a
seed, from which the rooms follow; a tenth is held out. Reward: 1 if the goal is reached within
--max_turns. Metric: `refused`, actions that cannot be done. Needs a GPU, not run.
"""

import random

from rl_core import reward

# Places where things are put, and those that do something.
STORES = ("shelf 1", "shelf 2", "table 1", "drawer 1", "drawer 2", "cabinet 1")
PLACES = (*STORES, "fridge 1", "microwave 1", "sink 1", "desk 1")
CLOSED = ("drawer 1", "drawer 2", "cabinet 1", "fridge 1", "microwave 1")
THINGS = ("apple", "mug", "plate", "potato", "egg", "knife")
# Treatment of a thing -> its location.
TREATED = {"clean": "sink 1", "heat": "microwave 1", "cool": "fridge 1"}
LEVELS = {"put": 1, "examine": 2, "two": 2, "clean": 3, "heat": 3, "cool": 3}
LAMP = "desk 1"
NUM_ROWS = 1200
max_turns = 24


def make_row(seed):
    rng = random.Random(seed)
    kind = [*LEVELS][seed % len(LEVELS)]
    thing = rng.choice(THINGS)
    goal = rng.choice(STORES)
    asked = {
        "put": f"put one {thing} in {goal}",
        "two": f"put two {thing}s in {goal}",
        "examine": f"look at one {thing} under the lamp",
    }.get(kind, f"{kind} one {thing} and put it in {goal}")
    row = {"kind": kind, "level": LEVELS[kind], "seed": seed, "thing": thing, "goal": goal}
    house = House(row)
    return row | {"prompt": f"Your task: {asked}.\n\n{house.shown('You are in a house.')}"}


def load_tasks(split):
    rows = [make_row(seed) for seed in range(NUM_ROWS)]
    return [row for row in rows if (row["seed"] // 6 % 10 == 0) == (split != "train")]


class House:
    """Locations of all things. Names of things are unique, such as `apple 2`."""

    def __init__(self, row):
        rng = random.Random(f"rooms of {row['seed']}")
        self.row = row
        self.at = ""
        self.held = ""
        self.open = set()
        self.treated = {}
        self.examined = set()
        self.num_refused = 0
        # Nothing lies where the task wants it.
        places = [location for location in PLACES if location != row["goal"]]
        self.where = {}
        for thing in THINGS:
            self.where[f"{thing} 1"] = rng.choice(places)
            self.where[f"{thing} 2"] = rng.choice(places)

    def is_shut(self):
        return self.at in CLOSED and self.at not in self.open

    def here(self):
        """Names of what can be reached."""
        if self.is_shut():
            return []
        return [name for name, location in self.where.items() if location == self.at]

    def actions(self):
        """Action -> (what does it, its argument)."""
        elsewhere = [location for location in PLACES if location != self.at]
        actions = {f"go to {location}": (self.go, location) for location in elsewhere}
        if self.is_shut():
            actions[f"open {self.at}"] = (self.open_up, self.at)
        elif self.held:
            actions[f"put {self.held} in {self.at}"] = (self.put, self.at)
            for verb, location in TREATED.items():
                if location == self.at:
                    actions[f"{verb} {self.held}"] = (self.treat, verb)
            if self.at == LAMP:
                actions["use lamp"] = (self.examine, LAMP)
        else:
            for name in self.here():
                actions[f"take {name}"] = (self.take, name)
        return actions

    def go(self, location):
        self.at = location
        return f"You are at {location}."

    def open_up(self, location):
        self.open.add(location)
        return f"You open {location}."

    def take(self, name):
        self.held, self.where[name] = name, ""
        return f"You take {name}."

    def put(self, location):
        name, self.held = self.held, ""
        self.where[name] = location
        return f"You put {name} in {location}."

    def treat(self, verb):
        self.treated.setdefault(self.held, set()).add(verb)
        return f"You {verb} {self.held}."

    def examine(self, _):
        self.examined.add(self.held)
        return f"You look at {self.held} under the lamp."

    def shown(self, note):
        lines = [note]
        if self.at:
            lines.append(f"You see: {', '.join(self.here()) or 'nothing'}.")
        if self.held:
            lines.append(f"You hold {self.held}.")
        return "\n".join([*lines, "You can: " + "; ".join(self.actions())])

    def act(self, text):
        """Text that the model sees after an action."""
        action = self.actions().get(text.strip().strip(">`. ").lower())
        if action is None:
            self.num_refused += 1
            return self.shown("That cannot be done.")
        do, argument = action
        return self.shown(do(argument))

    def is_done(self):
        kind = self.row["kind"]
        goal = self.row["goal"]
        names = self.wanted()
        if kind == "examine":
            return bool(self.examined & {*names})
        there = [name for name in names if self.where[name] == goal]
        if kind == "two":
            return there == names
        if kind in TREATED:
            there = [name for name in there if kind in self.treated.get(name, ())]
        return bool(there)

    def wanted(self):
        """Names of the things that the task asks for."""
        return [f"{self.row['thing']} 1", f"{self.row['thing']} 2"]


def start(task):
    return House(task.row)


def interact(completion, state):
    lines = completion.rpartition("</think>")[2].strip().split("\n")
    note = state.act(lines[-1])
    return {"messages": [{"role": "user", "content": note}], "done": state.is_done()}


def reward_fn(state):
    return float(state.is_done())


@reward(weight=0)
def refused(state):
    return float(state.num_refused)


def solution(house):
    """The actions of someone who knows where everything is."""
    kind = house.row["kind"]
    goal = house.row["goal"]
    names = house.wanted()
    if kind != "two":
        names = names[:1]
    actions = []
    for name in names:
        actions += [f"go to {house.where[name]}", f"open {house.where[name]}", f"take {name}"]
        if kind == "examine":
            return [*actions, f"go to {LAMP}", "use lamp"]
        if kind in TREATED:
            location = TREATED[kind]
            actions += [f"go to {location}", f"open {location}", f"{kind} {name}"]
        actions += [f"go to {goal}", f"open {goal}", f"put {name} in {goal}"]
    return actions


def oracle(task):
    """Impossible actions, such as opening an open drawer, are left out."""
    house = House(task.row)
    for action in solution(house):
        if action in house.actions():
            house.act(action)
    return reward_fn(house)
