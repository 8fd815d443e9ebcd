"""Hashes of the weights, templates, environment files and rows that played the episodes of a
folder, and names of endpoints, in a YAML file. rl-core eval --folder and collect --out continue a
folder only with equal ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
import yaml

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.chat_loading import fingerprint
from rl_core.data.rows import write_whole
from rl_core.run.saving.checkpoint import facts_of
from rl_core.run.saving.resumed_config import read_config
from rl_core.sampling.env import Env
from rl_core.types import JSONObject, Task

WEIGHTS = (".safetensors", ".bin", ".json")  # Files of a model that change its replies.


class PlayedBy:
    """The facts of one file."""

    def __init__(self, file: Path, where: str, has_episodes: bool):
        """`where` begins errors: the flag and its folder."""
        self.file, self.where = file, where
        self.known = read_config(file) if has_episodes and file.exists() else {}

    def check(self, facts: Mapping[str, str]) -> None:
        """Raises ValueError if one of the facts is known otherwise; keeps the others."""
        for name, value in facts.items():
            if (was := self.known.get(name, value)) != value:
                raise ValueError(
                    f"{self.where} holds episodes that were played with {name} {was}, and this is "
                    f"{value}; name another folder"
                )
        if facts.items() - self.known.items():
            self.known = {**self.known, **facts}
            write_whole(self.file, yaml.safe_dump(self.known))


def facts_of_actors(config: Config, chats: Mapping[str, Chat]) -> dict[str, str]:
    """The model or the endpoint of each actor. A server's weights are known by their name alone."""
    facts = {"actors": ",".join(sorted(config.actors))}
    for name, actor in config.actors.items():
        facts[f"actor {name}"] = f"{actor.model} at {actor.api}"
        if name in chats:
            assert actor.model
            weights = hash_of_model(actor.model)
            facts[f"actor {name}"] = f"weights {weights} template {fingerprint(chats[name])[:12]}"
    return facts


def hash_of_model(model: str) -> str:
    from transformers.utils import cached_file

    config = cached_file(model, "config.json")
    assert config
    files = sorted(file for file in Path(config).parent.iterdir() if file.suffix in WEIGHTS)
    return hashed({file.name: facts_of(file) for file in files})


def facts_of_env(name: str, env: Env, config: Config) -> dict[str, str]:
    return {
        f"code of {name}": env.code(),
        f"max_turns of {name}": str(env.max_turns),
        f"max_tokens of {name}": str(config.env(name).max_tokens),
    }


def hash_of_rows(tasks: Iterable[Task]) -> str:
    return hashed([[task.id, task.row] for task in tasks])


def hashed(facts: list | JSONObject) -> str:
    def shown(value: object) -> str:  # The text of an object may have its address.
        return value.hex() if isinstance(value, bytes) else type(value).__name__

    text = json.dumps(facts, sort_keys=True, default=shown)
    return xxhash.xxh3_64(text.encode()).hexdigest()
