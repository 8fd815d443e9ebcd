"""Options of a run that take no images: refused when the first row with an image is read."""

from __future__ import annotations

from rl_core.config import Config
from rl_core.config.algorithm import SELF, is_url
from rl_core.data.vision_models import load_family
from rl_core.engines.options import engine_classes
from rl_core.run.plan.custom_components import CustomComponents
from rl_core.types import InputImage


def why_no_images(config: Config, name: str, custom: CustomComponents | None = None) -> str:
    """Reason why an actor whose model sees gets no images in this run; "" if it does."""
    settings, trained = config.of(name), config.actors[name].is_trained
    for flag, default in (("cp", 1), ("tp", 1), ("ep", 1), ("rollout_ranks", 0)):
        if getattr(config, flag) not in (default, "auto"):
            return f"--{flag}={getattr(config, flag)} takes no images; leave it out"
    made = custom and custom.engine
    if config.is_rl and (made or config.engine != "auto"):  # Tools that do not sample choose none.
        engine = engine_classes(config, made)[name]
        if not engine.sees:
            return f"{engine.__name__} takes no images; take --engine embedded"
        family = load_family(str(config.actors[name].model), config.data.max_image_pixels)
        families = engine.image_families
        if families and not isinstance(family, str) and family.config.model_type not in families:
            return (
                f"{engine.__name__} takes no images of {family.config.model_type}; take --engine "
                "embedded"
            )
    if any(actor.ranks for actor in config.actors.values()):
        return "--actors.NAME.ranks takes no images; leave it out"
    if not trained:
        return ""
    read_by = {"--critic.model": settings.critic.model, "--algo.reference": settings.algo.reference}
    others = {f"{flag}={path}": path for flag, path in read_by.items() if path}
    for teacher in settings.envs_by_teacher:
        flag = f"--algo.teacher={teacher}"
        if is_url(teacher):
            return f"{flag}: {NO_SERVER}"
        if teacher != SELF:
            actor = config.actors.get(teacher)
            others[flag] = str(actor.model if actor else teacher)
    for flag, path in others.items():
        if reason := why_other_tokens(str(config.actors[name].model), path, config):
            return f"{flag}: {reason}"
    return ""


NO_SERVER = "requests to a server have no images; name the folder of a model that sees"
# Height and width of images whose numbers of tokens are compared.
SIZES = ((28, 28), (200, 333), (1000, 1000), (1080, 1920), (4000, 300))


def why_other_tokens(model: str, other: str, config: Config) -> str:
    """Reason why a second model cannot read the image tokens of an actor's model; "" if it can."""
    first = load_family(model, config.data.max_image_pixels)
    second = load_family(other, config.data.max_image_pixels)
    if isinstance(first, str):
        return first
    if isinstance(second, str):
        return second
    for height, width in SIZES:
        image = InputImage(key=1, url="", width=width, height=height)
        ids, read = first.expand(image), second.expand(image)
        if ids != read:
            return (
                f"it reads an image of {width} x {height} pixels as {len(read)} tokens, and "
                f"{model} as {len(ids)}; take a model of the same family and image processor"
            )
    return ""
