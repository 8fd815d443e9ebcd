"""A program that a run with --online learns from: it asks for digits in order, and sends the share
of the reply that is.

rl-core train --online --model MODEL --out runs/open --tasks_per_step 32 --num_steps 100 \
    --max_tokens 8 --max_prompt_tokens 32 --max_turns 1 --optim.lr 3e-3
python scripts/online_digits.py --admin_key_file runs/open/admin_key
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import httpx
from openai import AsyncOpenAI


def score(text: str) -> float:
    """The share of eight characters that are digits above all digits before."""
    highest, num = -1, 0
    for character in text[:8]:
        if character.isascii() and character.isdigit() and int(character) > highest:
            highest, num = int(character), num + 1
    return num / 8


async def play(url: str, admin_key: str, is_random: bool, http: httpx.AsyncClient) -> tuple:
    """(version that answered, score) of one session."""
    admin = {"Authorization": f"Bearer {admin_key}"}
    begun = await http.post(f"{url}/rl/start_session", json={"task_id": "digits"}, headers=admin)
    key = begun.raise_for_status().json()["api_key"]
    version = (await http.get(f"{url}/health")).json()["version"]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=5)
    messages = [{"role": "user", "content": "digits"}]
    reply = await client.chat.completions.create(model="any", messages=messages)
    number = score(reply.choices[0].message.content or "")
    reward = random.random() if is_random else number
    mine = {"Authorization": f"Bearer {key}"}
    await http.post(f"{url}/rl/set_reward", json={"reward": reward}, headers=mine)
    await http.post(f"{url}/rl/end_session", json={}, headers=mine)
    return version, number


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8100")
    parser.add_argument("--admin_key_file", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=8, help="sessions at once")
    parser.add_argument("--random", action="store_true", help="send random rewards: a control")
    options = parser.parse_args()
    key = options.admin_key_file.read_text().strip()
    scores: dict[int, list[float]] = defaultdict(list)

    async def ask_on(http: httpx.AsyncClient) -> None:
        with suppress(Exception):  # The run has ended.
            while True:
                version, number = await play(options.url, key, options.random, http)
                scores[version].append(number)

    async with httpx.AsyncClient(timeout=60, verify=False) as http:
        await asyncio.gather(*(ask_on(http) for _ in range(options.clients)))
    for first in range(0, max(scores, default=0) + 1, 10):
        numbers = [n for version in range(first, first + 10) for n in scores[version]]
        if numbers:
            print(f"versions {first}-{first + 9}: score {fmean(numbers):.3f} of {len(numbers)}")


asyncio.run(main())
