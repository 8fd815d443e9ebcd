"""A made-up country as triples, and questions about it with the calls that answer them
(envs/agentbench_kg.py)."""

import random

# A relation, the one that leads back, and the attribute of who has it.
RELATIONS = {
    "person.born_in": ("town.birthplace_of", "person.height"),
    "person.works_as": ("trade.worked_by", "person.height"),
    "town.in_province": ("province.contains", "town.population"),
}


def made_up():
    """(triples, names by kind) of a country."""
    rng = random.Random(0)
    parts = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "or")]
    names = sorted({"".join(rng.sample(parts, 3)).capitalize() for _ in range(400)})
    rng.shuffle(names)
    kinds = {"person": names[:250], "town": names[250:280], "province": names[280:286]}
    kinds["trade"] = ["baker", "pilot", "singer", "smith", "weaver"]
    triples = []
    for relation, (back, attribute) in RELATIONS.items():
        kind, to = relation.split(".")[0], back.split(".")[0]
        numbers = rng.sample(range(100, 1000), len(kinds[kind]))
        for name, number in zip(kinds[kind], numbers, strict=True):
            other = rng.choice(kinds[to])
            triples += [(name, relation, other), (other, back, name), (name, attribute, number)]
    return triples, kinds


# Level, question, calls. {person}, {town}, ... stand for a name of that kind.
BORN = "get_neighbors({town},town.birthplace_of)"
QUESTIONS = [
    (1, "Where was {person} born?", ["get_neighbors({person},person.born_in)"]),
    (1, "What does {person} work as?", ["get_neighbors({person},person.works_as)"]),
    (2, "How many people were born in {town}?", [BORN, "count(#0)"]),
    (
        2,
        "In which province was {person} born?",
        ["get_neighbors({person},person.born_in)", "get_neighbors(#0,town.in_province)"],
    ),
    (
        3,
        "Which people born in {town} work as {trade}?",
        [BORN, "get_neighbors({trade},trade.worked_by)", "intersection(#0,#1)"],
    ),
    (
        3,
        "Who is the tallest person born in {town}?",
        [BORN, "get_attributes(#0)", "argmax(#0,person.height)"],
    ),
    (
        4,
        "How many people were born in the smallest town of {province}?",
        [
            "get_neighbors({province},province.contains)",
            "argmin(#0,town.population)",
            "get_neighbors(#1,town.birthplace_of)",
            "count(#2)",
        ],
    ),
]
