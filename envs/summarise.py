"""Summarise a text. The reward is its overlap with a reference, ROUGE, and a judge's score if there
is a judge.

    rl-core train --env_path envs/summarise.py --data.train cnn_dailymail.parquet
    --data.columns prompt=article --model M --out runs/summaries --max_prompt_tokens 2048
    --max_tokens 256

Rows: the text as `prompt`, the reference as `highlights` (CNN/DailyMail), `summary` (XSum, whose
text is `document`) or `reference`. Reward: the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, which are
metrics too. An actor `judge` (--actors.judge.api URL/v1 --actors.judge.model NAME, or a model of
this run with --actors.judge.train=false) scores half of the reward; SUMMARISE_JUDGE=0.3 another
share. Words of a to z and digits count alone: for other scripts take chrf of rl_core.rewards.
Without rows: made-up news of a sentence that matters and others that do not. Needs a GPU, not run:
only by scripted actors and for a few steps.
"""

import itertools
import os
import random
import zlib

from rl_core import reward
from rl_core.rewards import judge, rouge

REFERENCES = ("reference", "highlights", "summary")
SHARE = float(os.environ.get("SUMMARISE_JUDGE", "0.5"))
if not 0 <= SHARE <= 1:
    raise ValueError(f"SUMMARISE_JUDGE={SHARE} must be from 0 to 1, such as 0.5")
RUBRIC = "The summary has what matters in the text, nothing that is not in it, and is short."
WHO = ("A baker", "The mayor", "A young pilot", "The museum", "A farmer", "The choir")
DID = ("opened a bridge", "won a prize", "found an old map", "planted a forest", "lost a lawsuit")
WHERE = ("in Lisbon", "in Oslo", "near Quito", "in Hanoi", "near Perth")
BESIDE = (
    "It rained in the morning.",
    "Many people came by train.",
    "A dog barked.",
    "Coffee was free.",
    "Nobody was late.",
)
turns = "policy"
system_prompts = {"policy": "Summarise the text in at most three sentences."}


def load_tasks(split):
    rng, rows = random.Random(0), []
    for parts in itertools.product(WHO, DID, WHERE):
        news = " ".join(parts) + "."
        sentences = [news, *rng.sample(BESIDE, 3)]
        rng.shuffle(sentences)
        rows.append({"prompt": " ".join(sentences), "reference": news})
    return [row for row in rows if is_held_out(row) == (split != "train")]


def is_held_out(row):
    return zlib.crc32(row["reference"].encode()) % 10 == 0


def overlaps(completion, row):
    """ROUGE's kind -> F1."""
    name = next((name for name in REFERENCES if row.get(name)), None)
    if name is None:
        raise ValueError(
            f"a row with {', '.join(row)} has no reference; it must be {', '.join(REFERENCES)}: "
            "give --data.columns reference=NAME"
        )
    summary = completion.rpartition("</think>")[2]
    return {f"rouge_{kind.lower()}": rouge(summary, row[name], kind) for kind in ("1", "2", "L")}


async def reward_fn(completion, prompt, task, actors):
    values = overlaps(completion, task.row).values()
    overlap = sum(values) / len(values)
    if "judge" not in actors:
        return {"overlap": overlap}
    summary = completion.rpartition("</think>")[2].strip()
    score = await judge(actors["judge"], prompt[-1]["content"], summary, RUBRIC) if summary else 0.0
    return {"overlap": (1 - SHARE) * overlap, "judged": SHARE * score}


@reward(weight=0)
def kinds(completion, task):
    return overlaps(completion, task.row)
