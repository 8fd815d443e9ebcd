"""Any game of TextArena (arXiv:2504.11442), for one player or more:
https://github.com/LeonGuertler/TextArena.

    pip install textarena
    TEXTARENA_ENV=TicTacToe-v0 rl-core train --env_path envs/textarena_env.py --model M
    --max_tokens 256 --max_turns 12 --out runs/arena
    TEXTARENA_ENV=KuhnPoker-v0 rl-core train ... --actors.ann.model A --actors.ben.model B

Players are the actors in the order of their names; one actor plays all of them. $TEXTARENA_PLAYERS
(2) says how many there are. Each has a conversation, in which the game and the others speak.
Reward: the game's, usually 1, 0 or -1. Whose reply is cut off loses (-1) and ends the game; a game
that is not over after --max_turns turns of a player earns 0. Metrics: `invalid`, `unfinished`.
Every seed of $TEXTARENA_GAMES (1,000) is a task, and every tenth is held out. The library draws
from Python's global generator: here each game has a separate stream. A game that cannot begin is
refused before training; word games need NLTK's word lists. What was run: docs/environments.md.
"""

import os
import random
import re

try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
except ImportError:
    raise ImportError("textarena is missing: pip install textarena") from None

NAME = os.environ.get("TEXTARENA_ENV", "TicTacToe-v0")
PLAYERS = int(os.environ.get("TEXTARENA_PLAYERS", "2"))
GAMES = int(os.environ.get("TEXTARENA_GAMES", "1000"))
NLTK = "words averaged_perceptron_tagger_eng"  # the word lists of its word games
max_turns = 12

if NAME not in ENV_REGISTRY:
    known = sorted(name for name in ENV_REGISTRY if name.endswith("-v0"))
    raise ValueError(f"TEXTARENA_ENV={NAME} is no game; there are {', '.join(known)}")


def check_game():
    """Begins one game. Raises ValueError, in one line, for a game that cannot begin here."""
    try:
        Game(0)
    except Exception as error:
        missing = re.search(r"nltk\.download\('(\w+)'\)", str(error))
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if missing:
            why = f"it needs NLTK's {missing[1]}: run `python -m nltk.downloader {NLTK}` where "
            why += "there is a network, and name the folder with NLTK_DATA"
        players = f"{PLAYERS} players (TEXTARENA_PLAYERS)"
        raise ValueError(f"TEXTARENA_ENV={NAME} cannot begin with {players}: {why}") from None


def load_tasks(split):
    check_game()
    same = {"prompt": f"Play {NAME}.", "game": NAME}
    seeds = [seed for seed in range(GAMES) if (seed % 10 == 0) == (split != "train")]
    return [same | {"seed": seed} for seed in seeds]


class Game:
    """A game with a separate random stream."""

    def __init__(self, seed):
        self.drawn = random.Random(seed).getstate()
        # Without wrappers a player sees only news since its last turn.
        raw = f"{NAME}-raw"
        self.env = self.call(textarena.make, raw if raw in ENV_REGISTRY else NAME)
        self.call(self.env.reset, PLAYERS, seed)

    def call(self, function, *args):
        before = random.getstate()
        random.setstate(self.drawn)
        try:
            return function(*args)
        finally:
            self.drawn = random.getstate()
            random.setstate(before)

    def look(self):
        """(number of the player to move, observations since its last turn)."""
        player, observed = self.call(self.env.get_observation)
        if isinstance(observed, str):
            return player, observed
        lines = []
        for sender, message, _ in observed:
            if sender != player:
                name = f"Player {sender}: " if sender >= 0 else ""
                lines.append(name + message)
        return player, "\n".join(lines)


async def play(game, actor_of):
    """(each player's conversation, who was cut off or None, whether the game is over)."""
    replies = {}
    while True:
        player, text = game.look()
        text = text or "It is your turn."
        speaker = replies.get(player) or actor_of[player]
        reply = await speaker.respond(text)
        replies[player] = reply
        if reply.truncated:
            return replies, player, False
        is_done, _ = game.call(game.env.step, reply.answer)
        if is_done:
            return replies, None, True
        if len(reply.turns) >= actor_of[player].max_turns:
            return replies, None, False


async def rollout(task, actors):
    names = sorted(actors)
    if len(names) not in (1, PLAYERS):
        raise ValueError(f"{len(names)} actors for {PLAYERS} players; give one, or {PLAYERS}")
    actor_of = [actors[names[player % len(names)]] for player in range(PLAYERS)]
    game = Game(task.row["seed"])
    replies, cut, is_over = await play(game, actor_of)
    rewards, infos = dict.fromkeys(replies, 0.0), {}
    if is_over:
        rewards, infos = game.call(game.env.close)
    if cut is not None:
        rewards[cut] = -1.0
    trajectories = []
    for player, reply in replies.items():
        invalid = infos.get(player, {}).get("invalid_move", False)
        metrics = {"invalid": float(invalid), "unfinished": float(not is_over)}
        player_name = f"player {player}"
        trajectories.append(
            reply.trajectory(float(rewards[player]), player=player_name, metrics=metrics)
        )
    return trajectories
