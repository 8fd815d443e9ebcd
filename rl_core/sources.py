"""Environments of a run, and the tasks that it trains and evaluates on. Wrong ones are refused here."""

from __future__ import annotations

from dataclasses import replace

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import ROLLOUTS, is_trajectory, load_rows
from rl_core.data.tasks import TaskSource
from rl_core.learning.algorithms import Algorithm
from rl_core.rules import check
from rl_core.sampling.env import Env, load_env
from rl_core.types import Task, TrainingSample, option

# What makes samples of a row, by the algorithm.
ROWS = {
    "sft": "rl_core.options.imitation:imitation_samples",
    "dpo": "rl_core.options.pairs:reply_pair",
    "rm": "rl_core.options.pairs:scored_pair",
}
MIX = "rl_core.options.mix:TaskMix"
CACHED_TOKENS = 4_000_000  # 100 MB
CHECKED_ROWS = 20_000  # of which the length is checked at start-up; rows beyond are checked when they are drawn


def load_envs(config: Config) -> tuple[Config, dict[str, Env]]:
    """(the configuration with --max_turns filled in, environments by the names of their files). The flags' limits hold, then a
    file's own."""
    envs = {}
    for name, path in config.env_paths.items():
        env = envs[name] = load_env(path, hook_timeout_s=config.rollout.hook_timeout_s)
        env.check_actors(list(config.actors))
        given = config.env(name)
        env.max_turns = given.max_turns or config.max_turns or env.max_turns or (8 if env.is_multi_turn else 1)
        env.max_tokens = given.max_tokens or config.max_tokens
    if envs:
        sections = {name: replace(config.env(name), max_turns=env.max_turns) for name, env in envs.items()}
        limit = max(env.max_turns for env in envs.values())
        config = replace(config, max_turns=limit, envs=sections if len(envs) > 1 else config.envs)
        check(config)
    if config.is_rl:
        check_speakers(config, envs)
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(f"of {config.env_path} some define advantage_fn and some do not; let all do, or none")
    return config, envs


def check_speakers(config: Config, envs: dict[str, Env]) -> None:
    """Raises ValueError if an actor that should learn can speak in no environment that is trained in."""
    trained_in = {n: env for n, env in envs.items() if config.env(n).weight}
    spoken = [env.speakers(list(config.actors)) for env in trained_in.values()]
    for name in config.trained:
        if all(names is not None and name not in names for names in spoken):
            paths = ", ".join(env.path for env in trained_in.values())
            raise ValueError(
                f"--actors.{name} would never speak, so that it cannot learn: `turns` of {paths} does not name it; name it "
                f"there, or give --actors.{name}.train false"
            )


def train_source(config: Config, envs: dict[str, Env], algorithm: Algorithm) -> TaskSource:
    weights = {name: config.env(name).weight for name in envs} or {"data": 1.0}
    sources = {}
    for name in (name for name, weight in weights.items() if weight):
        source = sources[name] = load_source(config, envs.get(name), name, "train", algorithm)
        if source is None:
            flag = "--data.train" if len(weights) == 1 else f"--envs.{name}.train"
            hint = f"; {envs[name].path} has no load_tasks" if envs else ""
            raise ValueError(f"{flag} is missing: a file or `datasets` name{hint}")
    if len(sources) == 1:
        return next(iter(sources.values()))
    return option(MIX)(list(sources.values()), [weights[name] for name in sources])


def eval_sources(config: Config, envs: dict[str, Env], algorithm: Algorithm) -> dict[str, TaskSource]:
    """Held-out tasks by the name of their environment."""
    sources = {name: load_source(config, envs.get(name), name, "eval", algorithm) for name in envs or ["data"]}
    if all(source is None for source in sources.values()):
        raise ValueError(
            "--eval_every asks for evaluation, but there is no --data.eval and no load_tasks in the environment"
        )
    return {name: source for name, source in sources.items() if source is not None}


def load_source(config: Config, env: Env | None, name: str, split: str, algorithm: Algorithm) -> TaskSource | None:
    path = getattr(config.envs.get(name), split, None) or getattr(config.data, split)
    if path:
        is_train = split == "train"
        may_choose = not algorithm.is_rl and (is_train or path.endswith(ROLLOUTS))
        min_reward, actor = config.data.min_reward if is_train else None, config.data.actor
        rows = load_rows(path, "train" if is_train else "test", *((min_reward, actor) if may_choose else ()))
        if (algorithm.is_rl or algorithm.is_pairs) and is_trajectory(rows[0]):
            raise ValueError(f"--data.{split} {path} holds a run's episodes, which are for --algorithm sft; name rows")
    elif env and env.load_tasks:
        rows = env.load_tasks(split)
    else:
        return None
    if env and algorithm.is_rl:
        env.check_columns(rows, path or f"load_tasks({split!r})")
    shuffle = config.data.shuffle and split == "train"
    return TaskSource(rows, env=name, split=split, seed=config.seed, shuffle=shuffle, is_pairs=algorithm.is_pairs)


def check_lengths(
    config: Config, envs: dict[str, Env], chats: dict[str, Chat], imitated: ImitatedRows | None, source: TaskSource
) -> None:
    """Every row renders and fits, or is left out if --data.skip_long says so."""
    kept = []
    for number, (index, task) in enumerate(zip(source.kept, source, strict=True)):
        if number >= CHECKED_ROWS:
            kept.append(index)
        elif imitated:
            kept += [index] if imitated.samples(task) else []
        else:
            env = envs[task.env]
            prompts = ((chat, env.opening(task, name)) for name, chat in chats.items())
            length = max(len(chat.prompt_ids(messages, env.tools)) for chat, messages in prompts)
            if length <= config.max_prompt_tokens:
                kept.append(index)
            elif not config.data.skip_long:
                raise ValueError(
                    f"{task.id}: a prompt of {length} tokens is longer than --max_prompt_tokens={config.max_prompt_tokens}; "
                    "raise it, or leave such rows out with --data.skip_long"
                )
    if len(kept) < len(source):
        source.keep(kept)


class ImitatedRows:
    """The samples of rows that are imitated. What the check at start-up tokenized is kept, up to CACHED_TOKENS."""

    def __init__(self, config: Config, chat: Chat):
        self.config, self.chat, self.known, self.num_tokens = config, chat, {}, 0

    def samples(self, task: Task, group_id: str = "") -> list[TrainingSample]:
        """The samples of one row or of one pair. Raises ValueError if it is too long, unless such rows are skipped."""
        samples = self.known.get(task.id)
        if samples is None:
            samples = self._tokenize(task)
            self.num_tokens += sum(len(sample.token_ids) for sample in samples)
            if self.num_tokens <= CACHED_TOKENS:
                self.known[task.id] = samples
        return [replace(sample, group_id=group_id) for sample in samples]

    def _tokenize(self, task: Task) -> list[TrainingSample]:
        config = self.config
        weights = config.sft.weights if config.algorithm == "sft" else ()
        try:
            samples = option(ROWS[config.algorithm])(self.chat, task.row, *weights)
        except ValueError as error:
            raise ValueError(f"{task.id}: {error}") from None
        longest, limit = max((len(s.token_ids) for s in samples), default=0), config.max_context_tokens
        if longest <= limit:
            return samples
        if config.data.skip_long:
            return []
        raise ValueError(
            f"{task.id}: a row of {longest} tokens is longer than {limit} (max_prompt_tokens + max_tokens); "
            "raise --max_prompt_tokens or --max_tokens, or leave such rows out with --data.skip_long"
        )
