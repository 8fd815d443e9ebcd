"""A group: all episodes of one task."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_core.config import Config
from rl_core.data.task_rows import shown_columns
from rl_core.sampling.conversation import SAMPLING_FLAGS
from rl_core.types import AnyJSON, JSONObject, SamplingParams, Task, Trajectory, counter_seed

# API actors ignore --sampling.top_k, top_p and min_p, because many endpoints reject them.
NO_LIMITS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(kw_only=True, slots=True)
class Group:
    """All episodes of one task, for example number 3 of the batch "train/000012"."""

    task: Task
    batch: str  # Seeds depend on `batch` and `number`.
    number: int  # Index in the batch.
    size: int
    params: SamplingParams
    seed: int  # Seed of the run.
    # Label of an evaluation. Replaces `batch` in the id: all evaluations share `batch`, and so
    # seeds.
    label: str = ""
    position: int = 0  # Position of the task in the order of the data.
    version: int = -1  # Policy version at the start; -1 before it.
    # Actor -> sampling parameters that replace those of `params`.
    own_params: dict[str, JSONObject] = field(default_factory=dict)
    # Index of an ended episode -> its trajectories.
    ended: dict[int, list[Trajectory]] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)  # Filled after all have ended.
    columns: dict[str, str] = field(default_factory=dict)  # Columns of the task for rollouts/.

    def __post_init__(self) -> None:
        self.columns = shown_columns(self.task)

    @property
    def id(self) -> str:
        """Unique in the run."""
        return f"{self.label or self.batch}/{self.number:06d}"

    def seed_of(self, *parts: int | str) -> int:
        return counter_seed(self.seed, self.batch, self.number, *parts)


def training_group(config: Config, position: int, task: Task) -> Group:
    """The group of a position in the order of the data."""
    step, number = divmod(position, config.tasks_per_step)
    fields = {"batch": f"train/{step:06d}", "number": number, "position": position}
    return make_group(config, task, size=config.group_size, **fields)


def make_group(
    config: Config, task: Task, sampling: JSONObject | None = None, **fields: AnyJSON
) -> Group:
    """`sampling`: sampling parameters of an evaluation; None uses each actor's training parameters.
    `fields`: further fields of the Group, such as size, batch and number."""
    max_tokens, env = config.max_tokens, config.envs.get(task.env)
    if env and env.max_tokens:
        max_tokens = env.max_tokens
    is_evaluation = sampling is not None
    if sampling is None:
        sampling = {name: getattr(config.sampling, name) for name in SAMPLING_FLAGS}
        sampling["keeps_ids"] = True
    params = SamplingParams(max_tokens=max_tokens, stop=tuple(config.sampling.stop), **sampling)
    group = Group(task=task, params=params, seed=config.seed, **fields)
    for name, actor in config.actors.items():
        overrides: JSONObject = dict(actor.sampling)
        if "stop" in overrides:
            overrides["stop"] = tuple(overrides["stop"])
        if actor.api and not is_evaluation:
            overrides = NO_LIMITS | overrides
        if is_evaluation:
            overrides = {flag: v for flag, v in overrides.items() if flag not in SAMPLING_FLAGS}
        group.own_params[name] = overrides
    return group
