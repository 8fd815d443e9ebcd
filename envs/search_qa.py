r"""Multi-hop questions answered with a search engine, as in Search-R1 (arXiv:2503.09516).

    rl-core train --env_path envs/search_qa.py --model Qwen/Qwen3-0.6B --out runs/search
    --max_prompt_tokens 512
        --max_tokens 512 --sampling.stop '["</search>", "</answer>"]'

`<search>query</search>` brings passages, and `<answer>...</answer>` ends. Reward: 1 for one of the
row's `golden_answers`, apart from case, articles and punctuation.

Without --data.train the questions are about people of a made-up country, of 1 to 4 hops (column
`hops`): no model knows the answers without a search. Nobody is asked about in both splits. Passages
come from a BM25 index of the country, of the passages in $SEARCH_CORPUS (a .jsonl file with
`contents`, or `title` and `text`), or from Search-R1's retrieval server at $SEARCH_URL:
    POST {"queries": ["..."], "topk": 3, "return_scores": true} -> {"result": [[{"document":
    {"contents": "title\ntext"}}, ...]]}
A server that fails or does not answer in time fails the episode.
scripts/recipes/search_qwen3_4b.yaml: rows of Search-R1. Needs a GPU, not run.
"""

import asyncio
import json
import os
import random
import re

import aiohttp

from rl_core.rewards import exact

URL, CORPUS = os.environ.get("SEARCH_URL"), os.environ.get("SEARCH_CORPUS")
HOW = (
    "Think first. If you need to know more, write <search>query</search>. Then write "
    "<answer>...</answer>, the answer alone."
)
ASKED = [
    "In which town was {} born?",
    "In which province was {} born?",
    "What is the capital of the province in which {} was born?",
    "On which river lies the capital of the province in which {} was born?",
]
TOP_K, NUM_EVAL = 3, 200
max_turns = 6
system_prompts = {"policy": HOW}


def made_up():
    """(passages of the country, [(person, the answer to each question of ASKED)])."""
    rng = random.Random(0)
    parts = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    words = (f"{a}{b}{c}".capitalize() for a, b, c in iter(lambda: rng.sample(parts, 3), None))
    names = list(dict.fromkeys(next(words) for _ in range(2000)))  # all different
    provinces, rivers, towns, families = names[:24], names[24:48], names[48:144], names[144:1400]
    of_town = {town: n % 24 for n, town in enumerate(towns)}  # the first 24 are the capitals
    passages = [
        f"{town}\n{town} is a town in the province of {provinces[n]}."
        for town, n in of_town.items()
    ]
    for province, capital, river in zip(provinces, towns[:24], rivers, strict=True):
        passages.append(f"{province}\n{province} is a province. Its capital is {capital}.")
        passages.append(
            f"{capital}\n{capital} is the capital of {province}. It lies on the river {river}."
        )
    people = []
    for family in families:
        person, town = (
            f"{rng.choice(('Ada', 'Ivo', 'Mia', 'Leo', 'Una'))} {family}",
            rng.choice(towns),
        )
        passages.append(
            f"{person}\n{person} is a {rng.choice(('baker', 'pilot', 'singer'))}, born in {town}."
        )
        n = of_town[town]
        people.append((person, [town, provinces[n], towns[n], rivers[n]]))
    return passages, people


def load_tasks(split):
    people = made_up()[1]
    chosen = people[NUM_EVAL:] if split == "train" else people[:NUM_EVAL]
    rows = [(person, hops, answers) for person, answers in chosen for hops in range(1, 5)]
    random.Random(1).shuffle(rows)
    rows = [
        {"question": ASKED[h - 1].format(p), "golden_answers": [a[h - 1]], "hops": h, "person": p}
        for p, h, a in rows
    ]
    return rows


def make_index():
    """(passages, their BM25 index)."""
    try:
        import bm25s
    except ImportError:
        raise ImportError(
            "bm25s is missing: pip install 'rl_core[envs]', or name a server with SEARCH_URL"
        ) from None
    passages = made_up()[0]
    if CORPUS:
        with open(CORPUS, encoding="utf-8") as file:
            rows = map(json.loads, file)
            passages = [row.get("contents") or f"{row['title']}\n{row['text']}" for row in rows]
    index = bm25s.BM25(corpus=passages)
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return index, bm25s.tokenize


INDEX = None if URL else make_index()


def look_up(query):
    """The passages that share a word with the query, best first."""
    index, tokenize = INDEX
    words, k = tokenize(query[:1000], show_progress=False), min(TOP_K, len(index.corpus))
    [passages], [scores] = index.retrieve(words, k=k, show_progress=False)
    return [passage for passage, score in zip(passages, scores, strict=True) if score > 0]


async def search(query):
    if INDEX:
        return await asyncio.to_thread(look_up, query)
    asked = {"queries": [query], "topk": TOP_K, "return_scores": True}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(URL, json=asked) as reply,
    ):
        [passages] = (await reply.json())["result"]
    return [passage["document"]["contents"] for passage in passages]


async def interact(messages):
    if "<answer>" in messages[-1]["content"]:
        return None
    queries = re.findall(r"(?s)<search>(.*?)</search>", messages[-1]["content"])
    if not queries:
        return [{"role": "user", "content": HOW}]
    passages = await search(queries[-1].strip())
    return [
        {
            "role": "user",
            "content": "\n\n".join(passage[:1500] for passage in passages) or "Nothing was found.",
        }
    ]


def reward_fn(messages, golden_answers):
    if isinstance(golden_answers, str):  # A text alone, as MuSiQue's `answer`.
        golden_answers = [golden_answers]
    answers = re.findall(r"(?s)<answer>(.*?)</answer>", messages[-1]["content"])
    return (
        max((exact(answers[-1], golden) for golden in golden_answers), default=0.0)
        if answers
        else 0.0
    )
