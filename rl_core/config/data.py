"""Flags of rows and environments, and the rules between those of several environments."""

from dataclasses import dataclass

from rl_core.config.flag_parsing import Section
from rl_core.errors import split
from rl_core.flags import AtLeast1, NotNegative, flag


@dataclass(kw_only=True)
class EnvConfig(Section, prefix="envs.NAME."):
    weight: NotNegative | None = flag(
        None, "its share of tasks; 0: only evaluated; default: 1, with --num_epochs its rows"
    )
    train: str | None = flag(None, "its training rows; default: its load_tasks")
    eval: str | None = flag(None, "its held-out rows, several sets too; default: its load_tasks")
    max_tokens: AtLeast1 | None = flag(None, "max new tokens of a turn here; default: --max_tokens")
    max_turns: AtLeast1 | None = flag(
        None, "turns of an episode here; default: the file's max_turns, 1 or 8"
    )
    teacher: str | None = flag(None, "its own --algo.teacher; none: nobody teaches here")

    @property
    def is_trained_in(self) -> bool:
        return self.weight != 0


NO_ENV = EnvConfig()  # An environment without separate flags.


@dataclass(kw_only=True)
class DataConfig(Section, prefix="data."):
    train: str | None = flag(
        None, "training rows: files, folders, globs, hub datasets a/b:config@split"
    )
    eval: str | None = flag(None, "held-out rows; several sets: gsm8k=a.jsonl,aime=b.jsonl")
    columns: dict[str, str] = flag(
        dict, "other names of columns: answer=solution reads solution as answer"
    )
    shuffle: bool = flag(True, "a new order each epoch, drawn from the seed")
    streaming: bool = flag(False, "read training rows one by one: large files, hub data sets")
    shuffle_buffer: AtLeast1 = flag(1000, "streaming: rows in memory, among which it shuffles")
    skip_long: bool = flag(False, "leave out rows that are too long, instead of refusing the file")
    max_image_pixels: AtLeast1 | None = flag(
        None, "resize larger images, as the model's processor does; default: its own limit"
    )
    max_images: AtLeast1 | None = flag(None, "images of a conversation; more are refused")
    min_reward: float | None = flag(
        None, "sft on rollouts: only episodes with this reward", only=("sft",)
    )


# (is it broken?, message). c: the configuration.
OF_ENVIRONMENTS = [
    (
        lambda c: len(c.env_paths) < len(split(c.env_path)),
        "--env_path={c.env_path}: two files have one name; rename one",
    ),
    (
        lambda c: not any(c.env(name).is_trained_in for name in c.env_paths),
        "every environment has --envs.NAME.weight 0, so that none is trained in; raise one",
    ),
    (
        lambda c: len(c.env_paths) > 1 and (c.data.train or c.data.eval),
        "--data.train and --data.eval are for one environment; give --envs.NAME.train and "
        "--envs.NAME.eval",
    ),
]
