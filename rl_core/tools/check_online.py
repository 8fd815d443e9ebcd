"""rl-core check --online [my_env.py]: the protocol of a run that stays open, played without a model
by written replies, so that a client can be written first. It serves until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path

from rl_core.config import AgentsConfig, OnlineConfig
from rl_core.errors import printable
from rl_core.tools.parser import Parser


def main(argv: list[str]) -> int:
    from rl_core.sampling.watchdog import run_hooks

    parser = Parser(prog="rl-core check --online", description=__doc__)
    parser.add_argument("env", nargs="?", help="Python file with a reward_fn or feedback_fn")
    parser.add_argument("--reply", action="append", metavar="TEXT", help="reply of the next turn")
    parser.add_argument("--model", help="folder or hub name of a chat template; default: a plain")
    parser.add_argument("--online.host", dest="host", default=OnlineConfig.host)
    parser.add_argument("--online.port", dest="port", type=int, default=OnlineConfig.port)
    parser.add_argument("--online.reward_s", dest="reward_s", type=float, default=60.0)
    parser.add_argument("--hook_timeout_s", type=float, default=60.0, help="of one call of a hook")
    options = parser.parse_args([arg for arg in argv if arg != "--online"])
    run_hooks(serve(options), options.hook_timeout_s)
    return 0


async def unjudged(*_: object) -> None:
    """Accepts a text without a score, in place of the actor that --online.judge names in a run."""


async def serve(options) -> None:
    """Until it is cancelled."""
    from rl_core.data.chat_loading import load_chat
    from rl_core.data.tool_calls import ToolCalls
    from rl_core.engines.scripted import ScriptedActor, plain_chat
    from rl_core.environments.agents.online import OnlineServer
    from rl_core.environments.agents.rollout import unscored_module
    from rl_core.environments.agents.session_scores import Scorer
    from rl_core.environments.agents.sessions import TICK_S, Sessions
    from rl_core.environments.env_file import load_env
    from rl_core.run.online import ADMIN_KEY
    from rl_core.sampling.actor import EpisodeActors
    from rl_core.tools.check import UNLIMITED, describe_tokens, say
    from rl_core.types import SamplingParams

    env = load_env(
        options.env or "--online",
        module=None if options.env else unscored_module(),
        hook_timeout_s=options.hook_timeout_s,
    )
    chat = plain_chat(ToolCalls)
    if options.model:
        chat = load_chat(options.model, tool_reader=ToolCalls)
    actor = ScriptedActor(name="policy", chat=chat, replies=options.reply or ["I do not know."])

    def make_players(number: int) -> EpisodeActors:
        params = SamplingParams(max_tokens=UNLIMITED)
        return EpisodeActors({"policy": actor}, params, number, f"check/{number}")

    key = os.environ.get(ADMIN_KEY) or f"sk-admin-{secrets.token_urlsafe(12)}"
    with tempfile.TemporaryDirectory(prefix="rl_core_check_") as folder:
        sessions = Sessions(
            rollouts=Path(folder),
            config=OnlineConfig(reward_s=options.reward_s),
            make_players=make_players,
            scorer=Scorer(env=env, judge=unjudged),
        )
        server = OnlineServer(AgentsConfig(host=options.host), options.port, sessions, key)
        await server.start()
        shown = f"${ADMIN_KEY}" if os.environ.get(ADMIN_KEY) else f"{key}, for this check alone"
        say("open", [f"at {server.address}, admin key {shown}    Ctrl-C ends it"])
        try:
            while True:
                await asyncio.sleep(TICK_S)
                sessions.tick()
                for session in sessions.rated:
                    rewards = [f"{t.reward:.4g} {t.reward_parts}" for t in session.trajectories]
                    tokens = describe_tokens(chat, session.trajectories)
                    title = f"{session.id}, task {printable(session.task_id)}: would be trained"
                    say(title, [f"reward {', '.join(rewards)}", *tokens])
                    sessions.take(session, 1)
                for reason in sessions.counts.keys() - {"started"}:
                    say("a session is left out", [printable(reason)])
                sessions.counts.clear()
        finally:
            await server.close()
