"""A reward model scores the conversation: one of `--algorithm rm`, served at $REWARD_MODEL_URL.

    python -m rl_core.rewards.reward_model --model runs/rm/hf/policy --port 8001 # in another shell
    REWARD_MODEL_URL=http://127.0.0.1:8001 rl-core train --env_path envs/reward_model.py
    --data.train rows.jsonl --model M --out runs/scored

docs/rewards.md says how to train and serve one.
"""

import os

from rl_core.rewards.reward_model import remote_scores

URL = os.environ.get("REWARD_MODEL_URL", "http://127.0.0.1:8001")


async def reward_fn(messages):
    return (await remote_scores(URL, [messages]))[0]
