"""Rules of options: names that no option has, extras that are not installed, flags of an option
that contradict each other."""

from __future__ import annotations

from operator import attrgetter

from rl_core.config import ActorConfig, Config
from rl_core.config.learner import OF_INFERENCE, OF_MPS
from rl_core.config.rules import check_actors, check_envs
from rl_core.engines.options import ENGINES
from rl_core.errors import nearest, refuse, require
from rl_core.learning.options import OPTIMIZERS

# Flags whose values are the names of a table.
CHOICES = {"engine": ENGINES, "optim.name": OPTIMIZERS}
# (flag, value, library that it needs, extra of setup.py)
EXTRAS = (
    ("optim.name", "adamw8bit", "bitsandbytes", "bnb"),
    ("learner.kernels", "liger", "liger_kernel", "liger"),
    ("agents.response_format", "enforce", "llguidance", "grammar"),
)


def check_options(config: Config) -> None:
    """Raises ValueError for a name that no option has, and for flags of an option that contradict
    each other."""
    for settings in (config, *map(config.of, config.trained)):
        for flag, table in CHOICES.items():
            value = attrgetter(flag)(settings)
            if value not in (*table, "auto"):
                raise ValueError(f"--{flag}={value} is unknown; {nearest(value, table)}")
        for flag, value, library, extra in EXTRAS:
            if attrgetter(flag)(settings) == value:
                require(library, f"--{flag}={value}", extra)
        if config.device == "mps":
            refuse(OF_MPS, c=settings)
        if settings.learner.logprob_microbatch_tokens:
            refuse(OF_INFERENCE, c=settings)
    if config.actors != {"policy": ActorConfig(model=config.model)}:
        check_actors(config)
    for actor in config.actors.values():
        if actor.api:
            from rl_core.engines.api_dialects import dialect_of

            require(dialect_of(actor.api)[0].package, "--actors.NAME.api", "api")
    if config.envs or "," in (config.env_path or ""):
        check_envs(config)
