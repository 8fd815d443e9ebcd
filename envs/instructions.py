"""Instructions that a program can check, as in IFEval (arXiv:2311.07911): the reward is the share
of a prompt's two rules that the reply follows.

    rl-core train --env_path envs/instructions.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    --max_prompt_tokens 128 --max_tokens 48 --optim.lr 1e-5 --out runs/instructions

500 prompts to train, 200 held out with other topics, words and wordings of the same rules. A reply
of fewer than three words earns 0. Learning of a pretrained model: docs/evidence/real.md.
"""

import itertools
import json
import random
import re

from rl_core import reward

TOPICS = {
    "train": "a lighthouse|your favourite season|bees|an old bicycle|the first snow|a busy market|"
    "learning to swim|bread|a night train|the moon|a small garden|rain in the city|chess|"
    "a lost key|mountains|the radio|an umbrella|a good neighbour|paper|whales",
    "eval": "a windmill|the colour green|cats|a broken clock|autumn leaves|a quiet library|"
    "learning to cook|honey|a ferry|the desert|an apple tree|fog by the sea|music|a letter",
}
WORDS = {
    "train": "bright quiet early yellow always river table often gentle window music seven",
    "eval": "warm silver never garden together small morning stone under friend",
}
FORBIDDEN = {"train": ["the", "and", "is", "of"], "eval": ["a", "to", "in", "it"]}
FIRST = {
    "train": ["Today", "Sometimes", "Once", "People"],
    "eval": ["Perhaps", "Yesterday", "Most"],
}
LAST = {
    "train": ["That is all.", "Thank you for reading.", "What do you think?"],
    "eval": ["And that was it.", "Do you agree?"],
}
KEYS = {
    "train": ["title", "text", "mood", "place", "author", "colour"],
    "eval": ["name", "summary", "season", "reason"],
}


def words(reply):
    return re.findall(r"[A-Za-z']+", reply)


def sentences(reply):
    """Sentences of a reply that ends with one, otherwise none."""
    parts = re.findall(r"[^.!?]+[.!?]+[\"')]*", reply)
    return parts if "".join(parts).strip() == reply else []


def is_object(reply, keys):
    try:
        held = json.loads(reply)
    except (ValueError, RecursionError):
        return False
    return isinstance(held, dict) and sorted(held) == sorted(keys)


def bullets(reply):
    lines = [line for line in reply.splitlines() if line.strip()]
    return len(lines) if all(line.startswith(("- ", "* ")) for line in lines) else 0


# Rule -> (does a reply follow it?, wordings to train, wordings held out).
RULES = {
    "sentences": (
        lambda reply, number: len(sentences(reply)) == number,
        ["Write exactly {} sentence(s).", "Your answer must have {} sentence(s), no more."],
        ["Use {} sentence(s) in total.", "The number of sentences has to be {}."],
    ),
    "at_most": (
        lambda reply, number: len(words(reply)) <= number,
        ["Use at most {} words.", "Do not write more than {} words."],
        ["Keep it to {} words or fewer.", "The limit is {} words."],
    ),
    "bullets": (
        lambda reply, number: bullets(reply) == number,
        ["Answer with a list of {} lines that begin with '- '.", "Give {} bullet points: '- ...'."],
        ["Your reply is {} bullets, each on a line that starts with '- '."],
    ),
    "json": (
        is_object,
        ["Answer with a JSON object with the keys {}.", "Give only JSON; its keys are {}."],
        ["Reply as a JSON object that has exactly these keys: {}."],
    ),
    "include": (
        lambda reply, wanted: set(wanted) <= set(words(reply.lower())),
        ["Use the words {}.", "The words {} must occur in your answer."],
        ["Make sure that {} both appear."],
    ),
    "avoid": (
        lambda reply, word: word not in words(reply.lower()),
        ['Do not use the word "{}".', 'The word "{}" is forbidden.'],
        ['Never write "{}".', 'Leave out the word "{}".'],
    ),
    "first": (
        lambda reply, word: words(reply)[:1] == [word],
        ['Begin with the word "{}".', 'The first word of your answer must be "{}".'],
        ['Start your reply with "{}".'],
    ),
    "last": (
        lambda reply, phrase: reply.endswith(phrase),
        ['End with the sentence "{}"', 'The last sentence must be "{}"'],
        ['Finish your reply by "{}"'],
    ),
    "upper": (
        lambda reply, _: reply.isupper(),
        ["Use capital letters only.", "Write everything in CAPITAL LETTERS."],
        ["All letters must be upper case."],
    ),
    "lower": (
        lambda reply, _: reply.islower(),
        ["Use lower-case letters only.", "Do not use any capital letters."],
        ["Everything has to be in small letters."],
    ),
}
# Two rules of a prompt never contradict each other.
PAIRS = [
    *itertools.product(["sentences", "at_most", "bullets"], ["include", "avoid", "upper", "lower"]),
    *itertools.product(["include", "avoid"], ["upper", "lower", "first"]),
    *itertools.product(["sentences", "at_most"], ["first", "last"]),
    ("include", "last"),
    *itertools.product(["json"], ["include", "avoid"]),
]
LEAST_WORDS = 3
NUM_TASKS = {"train": 500, "eval": 200}


def draw_argument(rule, split, rng):
    """The value that a rule checks, and the text in its wording."""
    if rule == "include":
        drawn = rng.sample(WORDS[split].split(), 2)
        return drawn, f'"{drawn[0]}" and "{drawn[1]}"'
    if rule == "json":
        drawn = rng.sample(KEYS[split], 2)
        return drawn, f'"{drawn[0]}" and "{drawn[1]}"'
    choices = {
        "sentences": [1, 2, 3],
        "at_most": [10, 12, 15, 20],
        "bullets": [2, 3],
        "avoid": FORBIDDEN[split],
        "first": FIRST[split],
        "last": LAST[split],
    }
    drawn = rng.choice(choices.get(rule, [""]))
    return drawn, str(drawn)


def load_tasks(split):
    rng = random.Random(split)
    rows = {}
    while len(rows) < NUM_TASKS[split]:
        topic = rng.choice(TOPICS[split].split("|"))
        pair, texts = [], []
        for rule in rng.choice(PAIRS):
            argument, text = draw_argument(rule, split, rng)
            wording = rng.choice(RULES[rule][1 if split == "train" else 2])
            pair.append({"rule": rule, "argument": argument})
            texts.append(wording.format(text))
        rng.shuffle(texts)
        prompt = f"Write about {topic}. {' '.join(texts)}"
        rows[prompt] = {"prompt": prompt, "rules": pair}
    return list(rows.values())


def followed(completion, rules):
    """True for each rule that the reply follows."""
    reply = completion.strip()
    if len(words(reply)) < LEAST_WORDS:
        return [False] * len(rules)
    return [RULES[held["rule"]][0](reply, held["argument"]) for held in rules]


def reward_fn(completion, rules):
    held = followed(completion, rules)
    return sum(held) / len(held)


@reward(weight=0)
def all_rules(completion, rules):
    return float(all(followed(completion, rules)))
