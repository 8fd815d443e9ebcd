"""AgentBench's knowledge graph (arXiv:2308.03688): questions that seven tools answer step by step.

    rl-core train --env_path envs/agentbench_kg.py --model M --max_prompt_tokens 1024 --out runs/kg

Tools give variables (#0, #1, ...): sets of entities that the model does not see. It ends with
`Final Answer: #3`. Reward: 1 if that set is the answer, else 0. Metric: `f1`. Rows: a question,
`entities` (name -> id), `answer` ([{"answer_argument": id}, ...]), and `actions`, the calls that
answer it, which `rl-core check --oracle` plays. $KG_GRAPH is a file of triples, a JSON list a line:
["m.1", "town.in_province", "m.2"]; a number as object is an attribute. AgentBench's own graph,
Freebase, is not public as a file. Without it: a made-up country, questions of 4 levels; a hash of
the question says which tenth is held out. Needs a GPU, not run.
"""

import json
import os
import random
import re
import zlib

from programs.calling import answers, tool
from programs.country import QUESTIONS, made_up

from rl_core import reward

VARIABLE = "an entity, or a variable such as #0"
TWO_SETS = {"variable1": "a variable", "variable2": "a variable"}
max_turns = 15
tools = [
    tool("get_relations", "Lists the relations of an entity or variable.", variable=VARIABLE),
    tool(
        "get_neighbors",
        "Makes a variable: what a relation leads to.",
        variable=VARIABLE,
        relation="one of those that get_relations lists",
    ),
    tool("intersection", "Makes a variable: what both hold.", **TWO_SETS),
    tool("get_attributes", "Lists the numbers that a variable has.", variable="a variable"),
    tool("argmax", "Makes a variable: where a number is largest.", variable="", attribute=""),
    tool("argmin", "Makes a variable: where a number is smallest.", variable="", attribute=""),
    tool("count", "Makes a variable: how many a variable holds.", variable="a variable"),
]
system_prompts = {
    "policy": (
        "Answer by calling tools over a knowledge graph, one call at a time. Tools make variables "
        "(#0, #1, ...), sets that you cannot see. When one is the answer, reply without a call: "
        "Final Answer: #3. Entities: {{ entities | join(', ') }}"
    )
}


class Graph:
    """Subject -> relation -> objects, and subject -> attribute -> number."""

    def __init__(self, triples):
        self.links, self.numbers = {}, {}
        for subject, relation, things in triples:
            if isinstance(things, str):
                self.links.setdefault(subject, {}).setdefault(relation, set()).add(things)
            else:
                self.numbers.setdefault(subject, {})[relation] = things


def read_graph():
    path = os.environ.get("KG_GRAPH")
    if not path:
        return Graph(made_up()[0])
    with open(path, encoding="utf-8") as file:
        return Graph(map(json.loads, file))


GRAPH = read_graph()


def load_tasks(split):
    rng, rows, kinds = random.Random(1), {}, made_up()[1]
    graph = Graph(made_up()[0])
    for number in range(1400):
        level, form, actions = QUESTIONS[number % len(QUESTIONS)]
        chosen = {kind: rng.choice(names) for kind, names in kinds.items()}
        question = form.format(**chosen)
        actions = [action.format(**chosen) for action in actions]
        things = played(Desk(graph, {}), actions)
        entities = {name: name for kind, name in chosen.items() if f"{{{kind}}}" in form}
        row = {"question": question, "level": level, "entities": entities, "actions": actions}
        row["answer"] = [{"answer_argument": argument} for argument in sorted(things)]
        is_held_out = zlib.crc32(question.encode()) % 10 == 0
        if things and is_held_out == (split != "train"):
            rows[question] = row
    return list(rows.values())


class Desk:
    """The variables of one episode, and the tools that make them."""

    def __init__(self, graph, entities):
        self.graph, self.entities, self.variables = graph, entities, []
        names = [schema["function"]["name"] for schema in tools]
        self.tools = {name: getattr(self, name) for name in names}

    def read(self, variable):
        """The set that an entity or a variable stands for. Raises ValueError."""
        number = re.fullmatch(r"#([0-9]{1,4})", variable)
        if number is None:
            return {self.entities.get(variable, variable)}
        if int(number[1]) >= len(self.variables):
            raise ValueError(f"there is no variable {variable}")
        return self.variables[int(number[1])]

    def keep(self, things):
        self.variables.append(set(things))
        return f"#{len(self.variables) - 1}"

    def get_relations(self, variable):
        return self.names(self.graph.links, variable)

    def names(self, table, variable):
        return json.dumps(sorted(set().union(*(table.get(one, ()) for one in self.read(variable)))))

    def get_neighbors(self, variable, relation):
        things = set()
        for one in self.read(variable):
            things |= self.graph.links.get(one, {}).get(relation, set())
        if not things:
            raise ValueError(f"{relation!r} is no relation of {variable}; call get_relations")
        return self.keep(things)

    def intersection(self, variable1, variable2):
        return self.keep(self.read(variable1) & self.read(variable2))

    def get_attributes(self, variable):
        return self.names(self.graph.numbers, variable)

    def argmax(self, variable, attribute):
        return self.best(max, variable, attribute)

    def argmin(self, variable, attribute):
        return self.best(min, variable, attribute)

    def best(self, pick, variable, attribute):
        numbers = {}
        for one in self.read(variable):
            if attribute in self.graph.numbers.get(one, {}):
                numbers[one] = self.graph.numbers[one][attribute]
        if not numbers:
            raise ValueError(f"{attribute!r} is no attribute of {variable}; call get_attributes")
        best = pick(numbers.values())
        return self.keep(one for one, number in numbers.items() if number == best)

    def count(self, variable):
        return self.keep({str(len(self.read(variable)))})


def played(desk, actions):
    """The last variable that these calls make, such as get_neighbors(#0,town.in_province)."""
    for action in actions:
        name, arguments = re.fullmatch(r"(\w+)\((.*)\)", action).groups()
        desk.tools[name](*arguments.split(","))
    return desk.variables[-1]


def start(task):
    return Desk(GRAPH, task.row["entities"])


def interact(messages, state):
    return answers(messages[-1], state.tools)


def found_by(messages, desk):
    """The set that the last message names; empty if it names none."""
    last = messages[-1]
    final = re.findall(r"Final Answer: (#[0-9]+)", str(last["content"] or ""))
    if last.get("tool_calls") or not final:
        return set()
    try:
        return desk.read(final[-1])
    except ValueError:
        return set()


def reward_fn(messages, state, answer):
    wanted = {str(one["answer_argument"]) for one in answer}
    return float(found_by(messages, state) == wanted)


@reward(weight=0)
def f1(messages, state, answer):
    things, wanted = found_by(messages, state), {str(one["answer_argument"]) for one in answer}
    return 2 * len(things & wanted) / max(1, len(things) + len(wanted))


def oracle(task):
    desk = start(task)
    played(desk, task.row["actions"])
    final = f"Final Answer: #{len(desk.variables) - 1}"
    return reward_fn([{"role": "assistant", "content": final}], desk, task.row["answer"])
