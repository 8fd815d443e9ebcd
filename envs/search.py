"""Questions answered with a search engine, as in Search-R1 (arXiv:2503.09516): `<search>query</search>` brings passages, and
`<answer>...</answer>` ends. Reward: 1 for one of the row's `golden_answers`, apart from case, articles and punctuation.

Passages come from Search-R1's retrieval server, or one that answers alike, at $SEARCH_URL:
    POST {"queries": ["..."], "topk": 3, "return_scores": true} -> {"result": [[{"document": {"contents": "title\\ntext"}}, ...]]}
"""

import os
import re

import aiohttp

URL = os.environ.get("SEARCH_URL", "http://127.0.0.1:8000/retrieve")
HOW = "Think first. If you need to know more, write <search>query</search>. Then write <answer>...</answer>, the answer alone."
max_turns = 4
system_prompts = {"policy": HOW}


async def interact(messages):
    if "<answer>" in messages[-1]["content"]:
        return None
    queries = re.findall(r"(?s)<search>(.*?)</search>", messages[-1]["content"])
    if not queries:
        return [{"role": "user", "content": HOW}]
    asked = {"queries": [queries[-1].strip()], "topk": 3, "return_scores": True}
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(URL, json=asked) as reply:
        [found] = (await reply.json())["result"]
    return [{"role": "user", "content": "\n\n".join(passage["document"]["contents"][:1500] for passage in found)}]


def plain(text):
    return re.findall(r"\b(?!(?:an?|the)\b)\w+", text.lower())


def reward_fn(messages, golden_answers):
    answers = re.findall(r"(?s)<answer>(.*?)</answer>", messages[-1]["content"])
    return float(bool(answers) and plain(answers[-1]) in map(plain, golden_answers))
