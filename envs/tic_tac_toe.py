"""Tic-tac-toe of one actor against itself, or of two against each other; evaluated against a player
who moves at random.

    rl-core train --env_path envs/tic_tac_toe.py --model M --out runs/self_play --group_size 8 \
        --max_tokens 8 --max_prompt_tokens 512 --eval_every 50 --eval.pass_reward 0.5
    rl-core train --env_path envs/tic_tac_toe.py --actors.ann.model A --actors.ben.model B --out
    runs/duel ...

A win is 1, a draw 0.5, a defeat 0, and a reply that is not the number of a free cell is a defeat.
Players x and o have a baseline each. With --eval.pass_reward 0.5 the evaluation's `pass` is how
often the random player did not win.
"""

import itertools
import random
import re
import zlib

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
RULES = "Tic-tac-toe. Reply with the number of a free cell alone."
SEATS = ("x", "o")
NUM_EVAL = 100
# Turns of one player; with --max_prompt_tokens they bound a game's conversation.
max_turns = 5


def load_tasks(split):
    """Training: against a learner, from every board with up to two stones. Evaluation: against the
    random player."""
    opponent, openings = "random", [""] * (NUM_EVAL // 2)
    if split != "eval":
        two_stones = ["".join(cells) for cells in itertools.permutations("123456789", 2)]
        opponent, openings = "actor", ["", *"123456789", *two_stones]
    rows = []
    for opening in openings:
        for mark in SEATS:
            row = {"prompt": RULES, "opponent": opponent, "opening": opening, "player": mark}
            rows.append(row)
    return rows


def free_cells(board):
    return [n for n, stone in enumerate(board) if stone == "."]


def winner(board):
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return None


def shown(board):
    """Three rows, in which a free cell has its number: `x2o`."""
    cells = list(board)
    for cell in free_cells(board):
        cells[cell] = str(cell + 1)
    return "\n".join("".join(cells[n : n + 3]) for n in (0, 3, 6))


def move_of(text, board):
    """The cell, from 0 on, that a reply means; None if it is not the number of a free one and
    nothing else."""
    number = re.fullmatch(r"\s*([1-9])\s*", text)
    if number and int(number[1]) - 1 in free_cells(board):
        return int(number[1]) - 1
    return None


def random_move(task_id, board):
    """Hangs on task and board alone, so that a run can be repeated."""
    seed = zlib.crc32(f"{task_id}/{''.join(board)}".encode())
    return random.Random(seed).choice(free_cells(board))


async def play(task, players):
    """One game. `players`: player -> actor, or None for the random player. Gives each player's last
    reply, who won (None: a draw), and who lost by an illegal move."""
    board, replies = ["."] * 9, {}
    for cell in task.row["opening"]:
        board[int(cell) - 1] = turn_of(board)
    while free_cells(board) and not winner(board):
        mark = turn_of(board)
        if players[mark] is None:
            board[random_move(task.id, board)] = mark
            continue
        if mark in replies:
            reply = await replies[mark].respond(shown(board))
        else:
            asked = f"{task.row['prompt']} You are {mark}.\n\n{shown(board)}"
            reply = replies[mark] = await players[mark].respond(asked)
        cell = move_of(reply.answer, board)
        if cell is None or reply.truncated:
            return replies, "o" if mark == "x" else "x", mark
        board[cell] = mark
    return replies, winner(board), None


def turn_of(board):
    return "xo"[(9 - len(free_cells(board))) % 2]


async def rollout(task, actors):
    """The row's player is the first actor by name; alone, it plays the other one too."""
    names, mark = sorted(actors), task.row["player"]
    other = "o" if mark == "x" else "x"
    if len(names) > 2:
        raise ValueError(
            f"tic-tac-toe is for one or two actors, there are {len(names)}: {', '.join(names)}"
        )
    if task.row["opponent"] == "random":
        games = [{mark: actors[name], other: None} for name in names]
    else:
        games = [{mark: actors[names[0]], other: actors[names[-1]]}]
    trajectories = []
    for players in games:
        replies, won, illegal = await play(task, players)
        for name, reply in replies.items():
            has_won = float(name == won)
            result = 0.5 if won is None else has_won
            against = "_random" if None in players.values() else ""
            metrics = {f"won{against}": has_won, f"illegal{against}": float(name == illegal)}
            trajectories.append(reply.trajectory({"result": result}, player=name, metrics=metrics))
    return trajectories
