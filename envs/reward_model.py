"""A reward model scores the conversation: one of `--algorithm rm`, served at $REWARD_MODEL_URL
(docs/rewards.md): python -m rl_core.plugins.reward_model --model runs/rm/hf/policy --port 8001
"""

import os

from rl_core.plugins.reward_model import remote_scores

URL = os.environ.get("REWARD_MODEL_URL", "http://127.0.0.1:8001")


async def reward_fn(messages):
    return (await remote_scores(URL, [messages]))[0]
