"""Why a path is not a model, and a better path."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

from rl_core.errors import nearest_folder
from rl_core.run.plan.model_paths import check_local


def check_path(name: str) -> None:
    """Raises ValueError for a local folder that does not exist, or a hub that is not reachable."""
    check_local(name)
    path = Path(name)
    if not path.exists() and not (is_cached(name) or is_hub_reachable()):
        raise ValueError(
            f"model {name!r} is not a folder and cannot be loaded from the hub: the hub cannot be "
            "reached; name a model's folder, or write a tiny one by rl-core init"
            f"{nearest_folder(path)}"
        )


def is_cached(name: str) -> bool:
    """True if the hub's cache has the model's config.json."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # The name is not valid on the hub.
        return False


@cache
def is_hub_reachable() -> bool:
    """False if nothing listens at the hub's address; libraries would retry for half a minute."""
    from huggingface_hub import constants

    if getproxies() or constants.HF_HUB_OFFLINE:
        return True
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def check_plays(model: str) -> None:
    """Raises ValueError for a folder or run without a model that generates, before other checks."""
    if "://" in model:
        return
    check_path(model)
    for folder in (Path(model), *Path(model).glob("hf/*")):
        file = folder / "config.json"
        architectures = None
        with suppress(ValueError, OSError):  # Other errors are raised when the model loads.
            architectures = json.loads(file.read_text()).get("architectures")
        if "ForSequenceClassification" in str(architectures):
            refuse_reward_model(str(folder))


def refuse_reward_model(path: str) -> NoReturn:
    raise ValueError(
        f"model {path} looks like a reward model, which scores replies and generates none; name "
        "the model that it was trained from, and score with this one by RewardModel in a "
        "reward_fn (docs/rewards.md)"
    )


def why_no_model(name: str, error: Exception) -> str:
    """The text of an error for a path without a model. `error`: transformers' error for its
    config.json."""
    path = Path(name)  # Drops a leading ./ of the name.
    reason = str(error).splitlines()[0].rstrip(".")
    if (path / "hf").exists():
        models = exported(path / "hf")
        return f"model {path} is a run's folder; name the model that it exported: {models}"
    if (path / "manifest.json").exists():
        models = exported(path.parent.parent / "hf")
        return f"model {path} is a checkpoint; name the model of its run: {models}"
    if (path / "adapter_config.json").exists():
        return f"model {path} is an adapter; name a whole model, such as {merged_model(path)}"
    if path.is_dir():
        if not (models := models_in(path)) or (path / "config.json").exists():
            return f"model {name!r} cannot be loaded: {reason}"
        return f"model {path} is a folder of models; name one: {models}"
    # "org/name" may also mean a folder, which transformers' error does not mention.
    return (
        f"model {name!r} is not a folder and cannot be loaded from the hub: {reason}; name a "
        f"model's folder, or write a tiny one by rl-core init{nearest_folder(path)}"
    )


def merged_model(adapter: Path) -> str:
    """The folder of a whole model with this adapter, or a command that writes one."""
    merged = adapter.with_name(adapter.name.removesuffix("_adapter"))
    if merged != adapter and (merged / "config.json").exists():
        return f"the merged one in {merged}"
    code = (
        "from peft import AutoPeftModelForCausalLM as M; "
        f"M.from_pretrained('{adapter}').merge_and_unload().save_pretrained('{adapter}_merged')"
    )
    return f'{adapter}_merged, once python -c "{code}" has written it; copy the tokenizer there'


def exported(folder: Path) -> str:
    return models_in(folder) or f"{folder} has none yet"


def models_in(folder: Path) -> str:
    return " or ".join(sorted(str(file.parent) for file in folder.glob("*/config.json")))
