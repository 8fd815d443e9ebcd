"""Several drafts at once, by one model or by several, which one more turn combines into the answer.

    rl-core train --env_path envs/parallel_thinking.py --data.train openai/gsm8k:main --model M
    --out runs/parallel
    rl-core train ... --actors.ann.model A --actors.ben.model B --actors.combiner.model C

After ParaThinker (arXiv:2509.04475) and RSA (arXiv:2509.26626). Alone, an actor writes four drafts
and combines them. Of several, `combiner` (or the first by name) combines, and each other one writes
two drafts. Rows as in envs/math_answer.py, whose sums are used without --data.train. Reward:
whether the answer is right for who combines; a draft earns 0.7 if it is right itself, and 0.3 if
the answer is. Curve on a CPU: docs/evidence/curves.md.
"""

import asyncio

from math_answer import load_tasks

from rl_core.rewards import maths, numeric

__all__ = ["load_tasks"]
NUM_DRAFTS = 4
SHARED = 0.3  # Share of the combined answer's reward in a draft's reward.
HOW = "Here are drafts of an answer, some of them wrong. Give the right answer."
# Whoever combines reads all drafts; with --max_prompt_tokens it says how long that may be.
max_turns = 2 + NUM_DRAFTS


async def rightness(reply, answer):
    if reply.truncated:
        return 0.0
    score = numeric if isinstance(answer, (int, float)) else maths
    return await asyncio.to_thread(score, reply.answer, answer)


async def rollout(task, actors):
    combiner = "combiner" if "combiner" in actors else min(actors)
    drafters = [actors[name] for name in sorted(actors) if name != combiner]
    number = 2 if drafters else NUM_DRAFTS
    written = await asyncio.gather(
        *(d.respond(task.messages, n=number) for d in drafters or [actors[combiner]])
    )
    drafts = [draft for of_one in written for draft in of_one]
    shown = "\n".join(f"Draft {n}: {draft.answer.strip()}" for n, draft in enumerate(drafts, 1))
    asked = [
        *task.messages[:-1],
        {"role": "user", "content": f"{task.messages[-1]['content']}\n\n{HOW}\n{shown}"},
    ]
    answer = await actors[combiner].respond(asked)
    *scores, combined = await asyncio.gather(
        *(rightness(reply, task.row["answer"]) for reply in (*drafts, answer))
    )
    trajectories = [
        answer.trajectory(
            {"right": combined},
            player="combine",
            metrics={"drafts_right": sum(scores) / len(scores)},
        )
    ]
    for draft, right in zip(drafts, scores, strict=True):
        parts = {"right": (1 - SHARED) * right, "combined": SHARED * combined}
        trajectories.append(draft.trajectory(parts, player="draft"))
    return trajectories
