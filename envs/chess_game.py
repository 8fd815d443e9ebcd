"""Chess of one actor against itself, or of two against each other; evaluated against a player who
moves at random.

    rl-core train --env_path envs/chess_game.py --model Qwen/Qwen3-0.6B --out runs/chess
    --group_size 8 --max_tokens 64 \
        --max_prompt_tokens 2048
    rl-core train --env_path envs/chess_game.py --actors.ann.model A --actors.ben.model B --out
    runs/duel ...

Who is to move sees the position (FEN) and its legal moves, and replies with one alone, as Nf3 or
g1f3. Reward: `result`, 1 for a win, 0.5 for a draw, 0 for a defeat; and `legal`, LEGAL times the
share of the player's moves that were legal, which pays before a win does. An illegal move, or a
reply that is cut off, loses. After MAX_PLIES more material gives up to 0.25 more than a draw.
White and black have a baseline each.

Positions are made up, at three levels: a mate in one; queen against king; the middle of a random
game. The position says to which split it belongs. Rows of your own: a prompt and `fen`. The first
actor by name moves first. Needs a GPU, not run.
"""

import random
import zlib
from contextlib import suppress

try:
    import chess
except ImportError:
    raise ImportError("chess is missing: pip install 'rl_core[envs]'") from None

RULES = "Chess. Reply with one legal move alone, such as Nf3 or g1f3."
# Black is False in python-chess.
SEATS = ("black", "white")
LEGAL, MAX_PLIES, PER_LEVEL = 0.2, 40, 150
VALUES = {
    chess.PAWN: 1,
    chess.KNIGHT: 3,
    chess.BISHOP: 3,
    chess.ROOK: 5,
    chess.QUEEN: 9,
    chess.KING: 0,
}
# Turns of one player; with --max_prompt_tokens they bound a game's conversation.
max_turns = 20


def position(level, rng):
    """A board that is not at its end, or None."""
    squares = rng.sample(range(64), 4)
    board = chess.Board()
    if level == 3:
        for _ in range(rng.randrange(4, 20)):
            board.push(rng.choice([*board.legal_moves] or [chess.Move.null()]))
    else:
        board.clear()
        for square, symbol in zip(squares, "KQkR" if level == 1 else "KQk", strict=False):
            board.set_piece_at(square, chess.Piece.from_symbol(symbol))
    if not board.is_valid() or board.is_game_over():
        return None
    return board if level > 1 or has_mate(board) else None


def has_mate(board):
    """True if a move mates."""
    return any(board.san(move).endswith("#") for move in board.legal_moves)


def load_tasks(split):
    """Training: against a learner. Evaluation: against the random player."""
    rng, rows = random.Random(0), {}
    opponent = "random" if split == "eval" else "actor"
    for level in (1, 2, 3):
        while len(rows) < level * PER_LEVEL:
            if board := position(level, rng):
                row = {"prompt": RULES, "fen": board.fen(), "level": level, "opponent": opponent}
                rows[row["fen"]] = row
    chosen = []
    for fen, row in rows.items():
        is_held_out = zlib.crc32(fen.encode()) % 10 == 0
        if is_held_out == (split == "eval"):
            chosen.append(row)
    return chosen


def move_of(text, board):
    """The legal move that a reply means, or None."""
    for read in (board.parse_san, board.parse_uci):
        with suppress(ValueError):
            return read(text.strip()) or None  # a null move is none


def shown(board):
    legal = ", ".join(board.san(move) for move in board.legal_moves)
    return f"{board.fen()}\nLegal: {legal}"


def random_move(task_id, board):
    """Hangs on task and position alone, so that a run can be repeated."""
    moves = sorted(board.legal_moves, key=chess.Move.uci)
    seed = zlib.crc32(f"{task_id}/{board.fen()}".encode())
    return random.Random(seed).choice(moves)


def results(board, illegal):
    """Result of white, from 0 to 1."""
    if illegal is not None:
        return float(illegal == "black")
    if outcome := board.outcome(claim_draw=True):
        return 0.5 if outcome.winner is None else float(outcome.winner)
    ahead = 0
    for piece in board.piece_map().values():
        value = VALUES[piece.piece_type]
        ahead += value if piece.color == chess.WHITE else -value
    return 0.5 + max(-0.25, min(0.25, ahead / 40))


async def play(task, players):
    """(board at the end, player -> last reply, player -> its legal moves, who moved illegally).
    `players`: None moves at random."""
    board, replies = chess.Board(task.row["fen"]), {}
    legal, illegal = dict.fromkeys(SEATS, 0), None
    while len(board.move_stack) < MAX_PLIES and not board.outcome(claim_draw=True):
        side = SEATS[board.turn]
        if players[side] is None:
            board.push(random_move(task.id, board))
            continue
        if side in replies:
            reply = await replies[side].respond(shown(board))
        else:
            asked = f"{task.row['prompt']} You are {side}.\n\n{shown(board)}"
            reply = replies[side] = await players[side].respond(asked)
        move = move_of(reply.answer, board)
        if move is None or reply.truncated:
            illegal = side
            break
        legal[side] += 1
        board.push(move)
    return board, replies, legal, illegal


async def rollout(task, actors):
    """The first actor by name moves first; alone, it plays the other player too."""
    names, turn = sorted(actors), chess.Board(task.row["fen"]).turn
    if len(names) > 2:
        raise ValueError(
            f"chess is for one or two actors, there are {len(names)}: {', '.join(names)}"
        )
    side, other = SEATS[turn], SEATS[not turn]
    games, suffix = [{side: actors[names[0]], other: actors[names[-1]]}], ""
    if task.row.get("opponent") == "random":
        games, suffix = [{side: actors[name], other: None} for name in names], "_random"
    trajectories = []
    for players in games:
        board, replies, legal, illegal = await play(task, players)
        for name, reply in replies.items():
            result = results(board, illegal)
            if name == "black":
                result = 1 - result
            is_illegal = float(illegal == name)
            parts = {"result": result, "legal": LEGAL * legal[name] / (legal[name] + is_illegal)}
            metrics = {f"illegal{suffix}": is_illegal, f"moves{suffix}": float(legal[name])}
            trajectories.append(reply.trajectory(parts, player=name, metrics=metrics))
    return trajectories
