"""Twenty questions between two models: `answerer` knows a word, `asker` finds out which of several
it is.

    rl-core train --env_path envs/word_game.py --actors.asker.model A --actors.answerer.model B
    --out runs/words --max_tokens 64

Rows: {"prompt", "word": "cat", "words": "cat, dog, ..."}; without --data.train, 2, 4, 8 or 16 words
(levels 1 to 4). `guess WORD` ends the game, and so does an answer that is not yes or no alone. Both
earn 1 if the guess is right. The answerer loses
0.5 for such an answer, and 0.5 times its share of lies among answers that can be checked: whether
there is a letter in the word. With a smaller --max_turns the game is shorter. Needs a GPU; not run
with one: a tiny model did not learn to repeat the words.
"""

import itertools
import random
import re
import zlib

turns = "(asker -> answerer)*19 -> asker"
HOW = (
    "Twenty questions. The asker asks one question for yes or no at a time, such as: is there a "
    "letter e? "
)
HOW += "The answerer says yes or no alone. When the asker knows the word, it says: guess WORD"
system_prompts = {
    "asker": "The secret is one of: {{ words }}.",
    "answerer": "The secret is {{ word }}.",
}
truncated_reward = 0.0  # who was cut off ends the game
WORDS = """ant apple arm ball bear bed bird boat book bread bridge brush cake candle car castle
cat chair cheese cloud coat corn cow crab crown cup desk dog door drum duck eagle egg fish flag
flower fly fork fox frog garden ghost glass goat gold grape hammer hand hat hen hill honey horse
house ice island jar key king kite knife ladder lake lamp leaf lemon lion lock map milk mirror
money moon mouse needle nest nut onion owl pan paper pear pen piano pig plane plate plum pot queen
rain ring river road robot rock rope rose ruler salt sand school ship shirt shoe silver snake snow
soap sock soup spider spoon star stone sugar sun sword table tea tent tiger tooth tower train tree
truck wall water wheel whale window wolf wood worm"""


def load_tasks(split):
    """A hash of the words says which tenth of the games is held out."""
    rng, found, words = random.Random(0), [], WORDS.split()
    for number in range(4000):
        drawn = rng.sample(words, 2 << number % 4)
        row = {
            "prompt": HOW,
            "word": rng.choice(drawn),
            "words": ", ".join(drawn),
            "level": 1 + number % 4,
        }
        found += [row] * ((zlib.crc32(row["words"].encode()) % 10 == 0) == (split != "train"))
    return found


def guess_of(text):
    said = re.fullmatch(r"\s*guess:?\s+(\w+)[\s.!?]*", text.rpartition("</think>")[2].lower())
    return said and said[1]


def answer_of(text):
    """`yes` or `no`; None if it is anything else, or more."""
    said = re.fullmatch(r"\s*(yes|no)[\s.!]*", text.rpartition("</think>")[2].lower())
    return said and said[1]


def interact(messages, actor):
    said = messages[-1]["content"]
    return {"done": bool(guess_of(said)) if actor == "asker" else answer_of(said) is None}


def lies(messages, word):
    """For each answer that can be checked: whether it is wrong."""
    found = []
    for question, answer in itertools.pairwise(messages):
        letter = re.search(r"letter ([a-z])\b", question["content"].lower())
        if letter and question.get("name") == "asker" and answer_of(answer["content"]):
            found.append((letter[1] in word) != (answer_of(answer["content"]) == "yes"))
    return found


def reward_fn(messages, actor, word):
    last, wrong = messages[-1], lies(messages, word)
    if actor == "answerer" and last["name"] == "answerer" and answer_of(last["content"]) is None:
        return {"guessed": 0.0, "lies": -0.5}  # else it would break the rule rather than risk a lie
    parts = {"guessed": float(last["name"] == "asker" and guess_of(last["content"]) == word)}
    return (
        parts
        if actor == "asker"
        else parts | {"lies": -0.5 * sum(wrong) / len(wrong) if wrong else 0.0}
    )
