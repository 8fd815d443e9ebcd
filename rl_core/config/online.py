"""Flags of a run that stays open, their defaults of other flags, and the rules between them."""

from dataclasses import dataclass

from rl_core.config.flag_parsing import Section
from rl_core.flags import AtLeast1, NotNegative, Positive, flag
from rl_core.types import JSONObject


@dataclass(kw_only=True)
class OnlineConfig(Section, prefix="online."):
    on: bool = flag(False, "learn from sessions of outside programs; short: --online")
    host: str = flag("127.0.0.1", "where their requests arrive; 0.0.0.0: from other machines too")
    port: int = flag(8100, "its port; 0 takes a free one")
    reward_s: NotNegative = flag(3600.0, "a reward may come so long after the end of its session")
    session_s: Positive = flag(3600.0, "a session without requests for so long ends")
    step_minutes: NotNegative = flag(
        0.0, "a step also begins after so long, with at least min_sessions; 0: never"
    )
    min_sessions: AtLeast1 = flag(1, "least number of rated sessions of a step")
    max_sessions: AtLeast1 = flag(1024, "open sessions at once; others get 429")
    wait_s: NotNegative = flag(60.0, "requests wait so long for a step that learns, then get 429")
    judge: str | None = flag(None, "actor that scores feedback without a number")


# Flag -> its default in a run with --online.
DEFAULTS: JSONObject = {"group_size": 1, "max_staleness": 4, "num_steps": 1_000_000}

# (True if the rule is broken, message). c: the configuration.
OF_ONLINE = [
    (
        lambda c: not 0 <= c.online.port < 65536,
        "--online.port={c.online.port} must be from 0 to 65535",
    ),
    (
        lambda c: not c.max_staleness,
        "--online needs --max_staleness of at least 1: sessions continue while a step learns",
    ),
    (
        lambda c: c.eval_every,
        "--online cannot be combined with --eval_every; score the exported models by rl-core eval",
    ),
    (
        lambda c: c.num_epochs or c.data.train or c.data.streaming,
        "--online reads no rows: leave out --data.train, --data.streaming and --num_epochs",
    ),
    (
        lambda c: c.deterministic,
        "--online cannot be combined with --deterministic; leave one out",
    ),
    (
        lambda c: any(actor.ranks for actor in c.actors.values()),
        "--online cannot be combined with --actors.NAME.ranks; leave one out",
    ),
    (
        lambda c: len(c.env_paths) > 1,
        "--online takes one environment; name one --env_path, or none",
    ),
    (
        lambda c: c.online.judge and c.online.judge not in c.actors,
        "--online.judge={c.online.judge} is not an actor; add it by "
        "--actors.{c.online.judge}.model or .api",
    ),
    (
        lambda c: c.online.min_sessions > c.tasks_per_step * c.group_size,
        "--online.min_sessions={c.online.min_sessions} must be at most the sessions of a step, "
        "--tasks_per_step={c.tasks_per_step} * --group_size={c.group_size}",
    ),
]
