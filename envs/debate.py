"""A debate for and against a motion, by one actor against itself or two against each other: opening
and reply of each side.

    rl-core train --env_path envs/debate.py --model M --out runs/debate --max_tokens 400
    rl-core train ... --actors.ann.model A --actors.ben.model B --actors.judge.api https://host/v1
    --actors.judge.model J

Rows: {"prompt": motion, "pro": 0 or 1}, who of the actors by name is for it; without --data.train
24 motions, each with both sides. An actor named `judge` compares the sides by the rubric, in both
orders. Without one, rules score each side from 0 to 1: argument (reasons are given, and the other's
words are met), evidence (numbers, sources, examples), consistency (it keeps to its side, and does
not repeat itself). They can be gamed, as tests/envs/test_envs_talk.py shows. Reward: 1 for the
winner, 0 for the other, 0.5 for a draw; a side that says nothing, or is cut off, has lost. Each
side has its own baseline. Needs a GPU for models that can argue; not run with one.
"""

import re
import zlib

from rl_core.rewards import compare, repetition

RUBRIC = (
    "Argument: reasons, and answers to the other side. Evidence: facts, numbers, examples. "
    "Consistency: one side throughout."
)
SIDES = {"pro": "for", "con": "against"}
ROUNDS = 2
# A side reads the other side's texts; with --max_prompt_tokens it says how long that may be.
max_turns = 2 * ROUNDS
PATTERNS = {
    "argument": r"\b(?:because|since|therefore|thus|so that|leads? to|means that|if|hence)\b",
    "evidence": (
        r"\d+|\b(?:for example|for instance|according "
        r"to|studies|study|research|data|survey|evidence)\b"
    ),
}
MOTIONS = """homework should be abolished | voting should be compulsory | zoos should be closed |
cars should be banned from city centres | school uniforms do more good than harm | public
transport should be free | exams should be replaced by projects | space travel is worth its cost |
robots should be taxed | meat should be taxed | museums should return what they took | working
from home is better | cash should be abolished | the voting age should be sixteen | nuclear power
is needed | social media does more harm than good | libraries should open at night | advertising
to children should be banned | every pupil should learn a second language | tourism should be
limited | zoning should be abolished | single-use plastic should be banned | the week should have
four working days | games belong in schools"""


def load_tasks(split):
    motions = " ".join(MOTIONS.split()).split(" | ")
    motions = [
        motion for motion in motions if (zlib.crc32(motion.encode()) % 6 == 0) == (split != "train")
    ]
    return [{"prompt": motion, "pro": pro} for motion in motions for pro in (0, 1)]


def merits(speeches, other, side):
    """Argument, evidence and consistency of one side's texts, each from 0 to 1."""
    text = " ".join(speeches)
    points = {
        name: min(1.0, len(set(re.findall(p, text.lower()))) / 3) for name, p in PATTERNS.items()
    }
    known = set(re.findall(r"\w{5,}", " ".join(other).lower()))
    met = len(known & set(re.findall(r"\w{5,}", speeches[-1].lower()))) / max(1, len(known))
    turned = re.search(
        rf"\bI (am|argue|speak) {SIDES['con' if side == 'pro' else 'pro']}\b", text, re.I
    )
    consistency = 0.0 if turned else 1 + repetition(text)
    return {
        "argument": (points["argument"] + min(1.0, 5 * met)) / 2,
        "evidence": points["evidence"],
        "consistency": consistency,
    }


async def win_of_pro(motion, texts, actors):
    if not all(texts["pro"]) or not all(texts["con"]):
        return (1 + all(texts["pro"]) - all(texts["con"])) / 2
    if "judge" in actors:
        return await compare(
            actors["judge"], motion, "\n\n".join(texts["pro"]), "\n\n".join(texts["con"]), RUBRIC
        )
    pro, con = (
        sum(merits(texts[s], texts[o], s).values()) for s, o in (("pro", "con"), ("con", "pro"))
    )
    return 0.5 if pro == con else float(pro > con)


async def rollout(task, actors):
    names, motion = sorted(actors.keys() - {"judge"}), task.messages[-1]["content"]
    speakers = {
        "pro": names[task.row["pro"] % len(names)],
        "con": names[(task.row["pro"] + 1) % len(names)],
    }
    replies, texts = {}, {"pro": [], "con": []}
    for _ in range(ROUNDS):
        for side, other in (("pro", "con"), ("con", "pro")):
            heard = f"The other side says:\n\n{texts[other][-1]}" if texts[other] else ""
            if side in replies:
                await replies[side].respond(f"{heard}\n\nReply to it.")
            else:
                opening = f"Motion: {motion}. You are {SIDES[side]} it. Give reasons and evidence."
                speaker = actors[speakers[side]]
                replies[side] = await speaker.respond(f"{opening}\n\n{heard}".strip())
            texts[side].append("" if replies[side].truncated else replies[side].answer.strip())
    won = await win_of_pro(motion, texts, actors)
    values = {"pro": won, "con": 1 - won}
    return [reply.trajectory({"won": values[side]}, player=side) for side, reply in replies.items()]
