"""Translate a text. The reward is its overlap with a reference, chrF and BLEU, and a judge's score
if there is a judge.

    TRANSLATE_DATA=wmt/wmt14,de-en rl-core train --env_path envs/translate.py --model M
    --out runs/translate --max_prompt_tokens 256 --max_tokens 256

TRANSLATE_DATA: a data set of the hub, its configuration behind a comma, or a folder with
train.jsonl and validation.jsonl. Rows: `translation`, a dict of texts by language, as in WMT.
TRANSLATE_FROM (de) and TRANSLATE_TO (en) choose two; the first 100,000 rows are read. Rows of
--data.train have the text as `prompt` and the translation as `reference`. Reward: the mean of chrF
and of BLEU of the sentence, from 0 to 1 (pip install 'rl_core[text]'); both are metrics. An actor
`judge` (--actors.judge.api URL/v1 --actors.judge.model NAME) scores half of the reward;
TRANSLATE_JUDGE=0.3 another share. Without data: numbers of animals, German to English. Needs a GPU,
not run: only by scripted actors and for a few steps.
"""

import itertools
import os
import zlib

# A missing library ends the run here instead of each episode.
import sacrebleu  # noqa: F401

from rl_core import reward
from rl_core.rewards import bleu, chrf, judge

DATA = os.environ.get("TRANSLATE_DATA", "")
LANGUAGES = os.environ.get("TRANSLATE_FROM", "de"), os.environ.get("TRANSLATE_TO", "en")
SHARE = float(os.environ.get("TRANSLATE_JUDGE", "0.5"))
if not 0 <= SHARE <= 1:
    raise ValueError(f"TRANSLATE_JUDGE={SHARE} must be from 0 to 1, such as 0.5")
MAX_ROWS = 100_000
RUBRIC = "The reply is a translation of the question: complete, right and fluent. Language: {}."
NUMBERS = {"zwei": "two", "drei": "three", "vier": "four", "acht": "eight", "elf": "eleven"}
ANIMALS = {"Hunde": "dogs", "Katzen": "cats", "Kühe": "cows", "Vögel": "birds", "Bären": "bears"}
SEEN = {"Ich sehe": "I see", "Wir haben": "We have", "Hier sind": "Here are"}
turns = "policy"
system_prompts = {"policy": f"Translate from {LANGUAGES[0]} to {LANGUAGES[1]}."}


def load_tasks(split):
    if DATA:
        from datasets import load_dataset

        subset = "train" if split == "train" else "validation"
        table = load_dataset(*DATA.split(","), split=f"{subset}[:{MAX_ROWS}]")
        return [row_of(pair) for pair in table["translation"]]
    rows = []
    for parts in itertools.product(SEEN.items(), NUMBERS.items(), ANIMALS.items()):
        german, english = (" ".join(words) + "." for words in zip(*parts, strict=True))
        rows.append({"prompt": german, "reference": english})
    return [row for row in rows if is_held_out(row) == (split != "train")]


def row_of(pair):
    missing = [name for name in LANGUAGES if not pair.get(name)]
    if missing:
        raise ValueError(
            f"a row's translation has {', '.join(pair)}, and no {missing[0]}; set TRANSLATE_FROM "
            "and TRANSLATE_TO to two of its languages"
        )
    return {"prompt": pair[LANGUAGES[0]], "reference": pair[LANGUAGES[1]]}


def is_held_out(row):
    return zlib.crc32(row["prompt"].encode()) % 10 == 0


async def reward_fn(completion, prompt, reference, actors):
    translation = completion.rpartition("</think>")[2].strip()
    overlap = (chrf(translation, reference) + bleu(translation, reference)) / 2
    if "judge" not in actors:
        return {"overlap": overlap}
    rubric = RUBRIC.format(LANGUAGES[1])
    score = (
        await judge(actors["judge"], prompt[-1]["content"], translation, rubric)
        if translation
        else 0.0
    )
    return {"overlap": (1 - SHARE) * overlap, "judged": SHARE * score}


@reward(weight=0)
def kinds(completion, reference):
    translation = completion.rpartition("</think>")[2].strip()
    return {"chrf": chrf(translation, reference), "bleu": bleu(translation, reference)}
