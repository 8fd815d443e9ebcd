"""train() for scripts and notebooks: one device, with the environment and the rows as Python
objects.

from rl_core import Config, train
result = train(Config(model="Qwen/Qwen3-0.6B", out="runs/first"), env=reward_fn, data=[{"prompt": "2
+ 2?", "answer": "4"}])
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.config import Config, checked, from_sections

if TYPE_CHECKING:
    from rl_core.trainer import Trainer

Rows = Sequence[dict[str, Any]]  # a list, or a table of `datasets`
OnStep = Callable[[int, dict[str, float]], Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainResult:
    out: Path  # the run's folder
    step: int  # steps that are done
    metrics: dict[str, float | None]  # the last value of each; None: not a finite number
    history: list[dict[str, float | None]]  # the lines of metrics.jsonl
    models: dict[str, Path]  # actor -> Hugging Face folder of its model, an adapter merged

    @property
    def model(self) -> Path:
        """The folder of the only actor that learned, or of the first."""
        return next(iter(self.models.values()))


def train(
    config: Config,
    *,
    env: str | Path | ModuleType | Callable | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    on_step: OnStep | None = None,
) -> TrainResult:
    """What a run on this process's device has learned; the files are those of the command.

    `env`: an environment's file or module, or a function that is its reward_fn. `data`,
    `eval_data`: rows instead of config.data.train and .eval. Sections of the configuration may be
    dictionaries: Config(optim={"lr": 1e-5}). `on_step(step, metrics)`, in the run's thread, ends
    the run by returning False; then a checkpoint is saved, and as well at Ctrl-C. Raises ValueError
    for a mistake and RunError where a run cannot go on.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "train() is for one device: several ranks are started by torchrun -m rl_core.train"
        )
    if eval_data is not None and not config.eval_every:
        raise ValueError(
            "eval_data needs Config(eval_every=...): how many steps lie between evaluations"
        )
    config, module = with_objects(config, env, {"train": data, "eval": eval_data})
    stop = threading.Event()

    def after_step(trainer: Trainer, metrics: dict[str, float]) -> None:
        if on_step is not None and on_step(trainer.step, metrics) is False:
            trainer.end("ended by on_step")
        if stop.is_set():
            trainer.end("interrupted", is_interrupted=True)

    # A thread has no event loop yet, unlike the caller in a notebook.
    with ThreadPoolExecutor(1, "rl_core") as pool:
        running = pool.submit(run_here, config, module, after_step)
        try:
            running.result()
        except KeyboardInterrupt:
            stop.set()
            print("interrupted: saves when this step is done", flush=True)
            running.result()
            raise
    return read_result(config)


def with_objects(
    config: Config, env: Any, rows: dict[str, Rows | None]
) -> tuple[Config, ModuleType | None]:
    """The checked configuration, and the module of an environment that no file tells."""
    config, module = from_sections(without_paths(asdict(config))), None
    if isinstance(env, ModuleType):
        module, config.env_path = env, getattr(env, "__file__", None) or env.__name__
    elif callable(env):
        module, config.env_path = ModuleType("reward_fn"), "reward_fn"
        module.reward_fn = env
    elif env is not None:
        config.env_path = str(env)
    rows = {split: own for split, own in rows.items() if own is not None}
    if rows and not (config.env_path or config.is_rl):
        module, config.env_path = ModuleType("data"), "data"
        module.reward_fn = lambda messages: 0.0  # nothing is sampled that it could score
    for split in rows:
        setattr(config.data, split, None)
    config = checked(config)
    return config, with_rows(config, module, rows) if rows else module


def without_paths(given: dict[str, Any]) -> dict[str, Any]:
    """The same with texts for pathlib's paths, such as result.model."""
    texts = {key: str(value) for key, value in given.items() if isinstance(value, Path)}
    return (
        given
        | texts
        | {key: without_paths(value) for key, value in given.items() if isinstance(value, dict)}
    )


def with_rows(config: Config, module: ModuleType | None, rows: dict[str, Rows]) -> ModuleType:
    """A copy of the environment's module whose load_tasks gives these rows."""
    from rl_core.plugins.env_hooks import execute_file

    if module is None and "://" in config.env_path:
        from rl_core.service.client import load_module

        module = load_module(config.env_path)
    module = module or execute_file(config.env_path)
    own = getattr(module, "load_tasks", lambda split: [])
    copy = ModuleType(module.__name__)
    vars(copy).update(
        vars(module), load_tasks=lambda split: rows[split] if split in rows else own(split)
    )
    return copy


def run_here(
    config: Config,
    module: ModuleType | None,
    on_step: Callable[[Trainer, dict[str, float]], None],
) -> None:
    """The run itself."""
    from rl_core.distributed import close_ranks, init_ranks
    from rl_core.models import is_sharded
    from rl_core.plan import make_plan
    from rl_core.plugins.watchdog import run_hooks
    from rl_core.run_folder import locked
    from rl_core.trainer import Trainer, run_to_end

    plan = make_plan(config, module, on_step=on_step)
    ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config))
    try:
        with locked(Path(config.out)):
            trainer = Trainer(plan, ranks)
            run_hooks(run_to_end(trainer))
    finally:
        close_ranks(ranks)
    from rl_core.tools.view.report import write_at_end

    write_at_end(trainer)
    trainer.after_run()


def read_result(config: Config) -> TrainResult:
    out, metrics = Path(config.out), {}
    file = out / "metrics.jsonl"  # which a run of no step and no evaluation does not write
    history = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for line in history:
        metrics |= line
    step = metrics.pop("step", 0)
    models = {name: out / "hf" / name for name in config.trained}
    return TrainResult(out=out, step=step, metrics=metrics, history=history, models=models)
