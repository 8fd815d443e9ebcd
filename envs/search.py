"""Questions answered with a search engine, as in Search-R1 (arXiv:2503.09516). The model writes `<search>query</search>`, reads
passages, and ends with `<answer>...</answer>`. Reward: 1 if it equals one of the `golden_answers`, apart from case, articles and
punctuation. Rows need `golden_answers` and their `question`.

Passages come from Search-R1's retrieval server, or one that answers alike, at $SEARCH_URL:
    POST {"queries": ["..."], "topk": 3, "return_scores": true} -> {"result": [[{"document": {"contents": "title\\ntext"}}, ...]]}
"""

import os
import re
import string

import aiohttp

URL = os.environ.get("SEARCH_URL", "http://127.0.0.1:8000/retrieve")
HOW = (
    "Answer the question. Think first. If you need to know more, write <search>query</search>, and you get passages; you may "
    "search several times. Then write the answer alone, without explanations, as <answer>...</answer>."
)
max_turns = 4
system_prompts = {"policy": HOW}


async def search(query):
    asked = {"queries": [query], "topk": 3, "return_scores": True}
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(URL, json=asked) as reply:
        [found] = (await reply.json())["result"]
    return "\n\n".join(passage["document"]["contents"][:1500] for passage in found)


async def interact(messages):
    said = messages[-1]["content"]
    if "<answer>" in said:
        return None
    queries = re.findall(r"<search>(.*?)</search>", said, re.DOTALL)
    found = f"<information>{await search(queries[-1].strip())}</information>" if queries else HOW
    return [{"role": "user", "content": found}]


def plain(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def reward_fn(messages, golden_answers):
    answers = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"], re.DOTALL)
    return float(bool(answers) and plain(answers[-1]) in map(plain, golden_answers))
