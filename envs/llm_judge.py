"""Open questions, judged by any actor: pairs of a group's replies, each in both orders, and a score
by a rubric.

    rl-core train --env_path envs/llm_judge.py --data.train rows.jsonl --actors.policy.model M --out
    runs/judged \
        --actors.judge.api https://host/v1 --actors.judge.model large-model

Rows: a prompt, and perhaps `rubric`; without --data.train, 60 questions about writing. Each reply
meets the next two of its group, in a circle: a group of 8 costs 32 verdicts. Reward: the share of
comparisons that it wins, plus, where the row has a rubric, its score from 0 to 1. A judge who
always prefers one place gives all the same. Needs a GPU for a judge that can judge; not run with
one.
"""

import asyncio
import itertools
import zlib

from rl_core.rewards import compare, judge

RUBRIC = (
    "The reply does what is asked, is true and clear, and has no needless word. Longer is not "
    "better."
)
NEIGHBOURS = 2
turns = "policy"
FORMS = (
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "What do most people get wrong about {}?",
)
TOPICS = """rainbows, magnets, sleep, bridges, vaccines, glaciers, chess, prime numbers,
inflation, bees, recycling, gravity, batteries, the moon, tides, yeast, black holes, maps,
photosynthesis, clocks"""


def load_tasks(split):
    asked = [
        form.format(" ".join(topic.split()))
        for topic, form in itertools.product(TOPICS.split(","), FORMS)
    ]
    return [
        {"prompt": q} for q in asked if (zlib.crc32(q.encode()) % 10 == 0) == (split != "train")
    ]


def question_of(prompt):
    return "\n\n".join(message["content"] for message in prompt)


async def reward_fn(prompt, completion, actors, rubric=None):
    return {
        "score": await judge(actors["judge"], question_of(prompt), answer_of(completion), rubric)
        if rubric
        else 0.0
    }


def answer_of(text):
    return text.rpartition("</think>")[2].strip()


async def group_reward_fn(trajectories, prompt, actors, rubric=None):
    replies, judge_actor = (
        [answer_of(t.messages[-1]["content"]) for t in trajectories],
        actors["judge"],
    )
    size, wins = len(replies), [[] for _ in replies]
    pairs = {
        tuple(sorted((n, (n + step) % size)))
        for n in range(size)
        for step in range(1, NEIGHBOURS + 1)
    }
    pairs = sorted(pair for pair in pairs if pair[0] != pair[1])
    asked = (
        compare(judge_actor, question_of(prompt), replies[a], replies[b], rubric or RUBRIC)
        for a, b in pairs
    )
    for (a, b), won in zip(pairs, await asyncio.gather(*asked), strict=True):
        wins[a].append(won)
        wins[b].append(1 - won)
    return [sum(points) / len(points) if points else 0.5 for points in wins]
