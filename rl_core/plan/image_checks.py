"""Options of a run that take no images: refused when the first row with an image is read."""

from __future__ import annotations

from rl_core.config import Config
from rl_core.config.algorithm import SELF, is_url
from rl_core.data.image_families import load_family
from rl_core.engines.options import engine_factory
from rl_core.plugin import CustomComponents


def why_no_images(config: Config, name: str, custom: CustomComponents | None = None) -> str:
    """Reason why an actor whose model sees gets no images in this run; "" if it does."""
    settings, trained = config.of(name), config.actors[name].is_trained
    for flag, default in (("cp", 1), ("tp", 1), ("rollout_ranks", 0)):
        if getattr(config, flag) > default:
            return f"--{flag}={getattr(config, flag)} takes no images; leave it out"
    if config.algorithm == "rm":
        return "--algorithm rm reads text alone; take --algorithm dpo, or rows without images"
    made = custom and custom.engine
    if config.is_rl and (made or config.engine != "auto"):  # Tools that do not sample choose none.
        engine = engine_factory(config, engine=made).classes[name]
        if not engine.sees:
            return f"{engine.__name__} takes no images; take --engine embedded"
    if any(actor.ranks for actor in config.actors.values()):
        return "--actors.NAME.ranks takes no images; leave it out"
    if not trained:
        return ""
    if settings.critic.model:
        return f"--critic.model={settings.critic.model} reads text alone"
    if settings.algo.reference:
        family = load_family(settings.algo.reference, config.data.max_image_pixels)
        if isinstance(family, str):
            return f"--algo.reference={settings.algo.reference}: {family}"
    teachers = settings.envs_by_teacher
    for teacher in teachers:
        if teacher == SELF or is_url(teacher) or len(teachers) > 1:
            return f"--algo.teacher={teacher} takes no images; take one frozen model that sees"
        path = config.actors[teacher].model if teacher in config.actors else teacher
        family = load_family(str(path), config.data.max_image_pixels)
        if isinstance(family, str):
            return f"--algo.teacher={teacher}: {family}"
    return ""
