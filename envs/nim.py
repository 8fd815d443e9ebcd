"""Nim with one heap, of one actor against itself or of two against each other; evaluated against a
player who moves at random.

    rl-core train --env_path envs/nim.py --model M --out runs/nim --group_size 8 --max_tokens 4
    --max_prompt_tokens 128 \
        --eval_every 50
    rl-core train --env_path envs/nim.py --actors.ann.model A --actors.ben.model B --out runs/duel
    ...

Players take 1, 2 or 3 stones in turn, and who takes the last one wins: 1, else 0. A reply that is
not such a number, or more than there is, is a defeat. Who leaves a multiple of four can win
whatever the other does. Each seat has its own baseline.
"""

import re
import zlib

RULES = "Nim. Take 1, 2 or 3."
NUM_EVAL = 100
SEATS = ("first", "second")
max_turns = 5  # of one seat; with --max_prompt_tokens it says how long a game's conversation may be


def load_tasks(split):
    """Training: against a learner, from heaps of 1 to 9. Evaluation: against the random player,
    from heaps of 5 to 9."""
    if split == "eval":
        heaps = [(5 + n // 2 % 5, SEATS[n % 2]) for n in range(NUM_EVAL)]
    else:
        heaps = [(stones, seat) for stones in range(1, 10) for seat in SEATS]
    opponent = "random" if split == "eval" else "actor"
    return [
        {"prompt": RULES, "opponent": opponent, "stones": stones, "seat": seat}
        for stones, seat in heaps
    ]


def random_move(task_id, stones):
    """Hangs on task and heap alone, so that a run can be repeated."""
    return 1 + zlib.crc32(f"{task_id}/{stones}".encode()) % min(3, stones)


async def play(task, players):
    """One game. `players`: seat -> actor, or None for the random player. Gives each seat's last
    reply, who won, and who lost by an illegal move."""
    stones, seat, other, replies = task.row["stones"], *SEATS, {}
    while True:
        if players[seat] is None:
            taken = random_move(task.id, stones)
        else:
            if seat in replies:
                await replies[seat].respond(str(stones))
            else:
                replies[seat] = await players[seat].respond(f"{task.row['prompt']}\n\n{stones}")
            said = re.fullmatch(r"\s*([123])\s*", replies[seat].answer)
            taken = int(said[1]) if said and not replies[seat].truncated else 0
        if not 0 < taken <= stones:
            return replies, other, seat
        stones -= taken
        if not stones:
            return replies, seat, None
        seat, other = other, seat


async def rollout(task, actors):
    """The seat of the row is that of the first actor by name; alone, it plays the other one too."""
    names, seat = sorted(actors), task.row["seat"]
    other = SEATS[seat == "first"]
    if len(names) > 2:
        raise ValueError(
            f"nim is for one or two actors, there are {len(names)}: {', '.join(names)}"
        )
    against_random = task.row["opponent"] == "random"
    games = [{seat: actors[names[0]], other: actors[names[-1]]}]
    if against_random:
        games = [{seat: actors[name], other: None} for name in names]
    found = []
    for players in games:
        replies, won, illegal = await play(task, players)
        for place, reply in replies.items():
            metrics = {f"illegal{'_random' if against_random else ''}": float(place == illegal)}
            found.append(
                reply.trajectory({"won": float(place == won)}, seat=place, metrics=metrics)
            )
    return found
