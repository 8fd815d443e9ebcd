"""train() for scripts and notebooks: with environments and rows as Python objects.

from rl_core import Config, train
result = train(Config(model="Qwen/Qwen3-0.6B", out="runs/first"), env=reward_fn, data=[{"prompt": "2
+ 2?", "answer": "4"}])
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import Config, DataConfig, checked, from_sections, known_flags
from rl_core.config.flag_errors import as_fields
from rl_core.errors import as_one_line, split
from rl_core.plugin import Plugin
from rl_core.tools.api.environment import (
    Environment,
    Environments,
    Rows,
    as_list,
    as_rows,
    with_environments,
)
from rl_core.types import JSONObject, RunError

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.plugin import RunState
    from rl_core.run.plan.custom_components import CustomComponents
    from rl_core.sampling.engine import Engine

OnStep = Callable[[int, dict[str, float]], object]


@dataclass(kw_only=True, slots=True, frozen=True, repr=False)
class TrainResult:
    out: Path  # the run's folder
    step: int  # steps that are done
    metrics: dict[str, float | None]  # the last value of each; None: not a finite number
    history: list[dict[str, float | None]]  # the lines of metrics.jsonl
    models: dict[str, Path]  # actor -> Hugging Face folder of its model, an adapter merged

    def __repr__(self) -> str:
        """Two lines: steps and at most three scores, before and after; names of the attributes."""
        from rl_core.run.display.summary import before_and_after

        facts = [f"step {self.step} in {self.out}", *before_and_after(self.history)[:3]]
        sizes = f".metrics ({len(self.metrics)}), .history ({len(self.history)} lines)"
        return f"TrainResult: {'; '.join(facts)}\n  .models ({', '.join(self.models)}), {sizes}"

    @property
    def model(self) -> Path:
        """The folder of the only actor that learned, or of the first."""
        return next(iter(self.models.values()))


@contextmanager
def errors_of_fields() -> Iterator[None]:
    """Inside, errors that speak of flags name fields of Config and arguments of train(), and a
    notebook shows errors of rl_core in one line. Options of other programs stay."""
    try:
        yield
    except (ValueError, RunError) as error:
        if type(error) in (ValueError, RunError):
            sections = {name.partition(".")[0] for name in known_flags()}
            error.args = (as_fields(str(error), sections),)
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").startswith("rl_core."):
                as_one_line(error)
        raise


@contextmanager
def errors_of_rows(environments: list[Environment]) -> Iterator[None]:
    """Inside, errors name the arguments `data` and `eval_data` where rows are theirs."""
    try:
        yield
    except (ValueError, RunError) as error:
        if type(error) in (ValueError, RunError) and len(environments) == 1:
            path = environments[0].path
            text = str(error).replace(f"{path}: {path}()", f"{path}()")  # Named once.
            for split in environments[0].rows:
                argument = {"train": "data", "eval": "eval_data"}[split]
                for name in (f"load_tasks({split!r})", f"the split {split!r}"):
                    text = text.replace(name, argument)
            error.args = (text,)
        raise


@errors_of_fields()
def train(
    config: Config,
    *,
    env: Environments = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    on_step: OnStep | None = None,
    plugins: Sequence[object] = (),
    loss: Callable | None = None,
    optimizer: Callable | None = None,
    engine: type[Engine] | None = None,
    nproc: int = 1,
) -> TrainResult:
    """Trains on this process's device and returns the result; the files are those of the command.

    `env`: an environment's file or module, a function that is its reward_fn, a list of reward
    functions, which are summed, an Environment, or a list of environments. `data`, `eval_data`:
    rows that replace config.data.train and .eval. Sections of the configuration may be
    dictionaries: Config(optim={"lr": 1e-5}). `on_step(step, metrics)` is called in the run's
    thread; returning False saves a checkpoint and ends the run, as Ctrl-C does. `plugins`:
    subclasses of rl_core.plugin.Plugin, or objects with some of its hooks. `loss`, `optimizer`,
    `engine`: replace those of the flags (tools/api/custom_components.py). `nproc`: number of ranks on
    this machine, each a process. Raises ValueError for a mistake and RunError if a run cannot
    continue.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "train() starts its own ranks (nproc=2): leave out torchrun, or call it as torchrun -m "
            "rl_core.train"
        )
    if nproc < 1:
        raise ValueError(f"nproc={nproc} must be at least 1: the number of ranks, one per GPU")
    check_model(config)
    rows: dict[str, Rows] = {}
    sources = {"train": as_rows("data", data), "eval": as_rows("eval_data", eval_data)}
    for key, source in sources.items():
        if isinstance(source, str):
            config = replace(config, data=replace(data_section(config), **{key: source}))
        elif source is not None:
            rows[key] = source
    config, environments = with_objects(config, env, rows)
    has_eval = any(env.eval_data is not None for env in environments)
    if has_eval and not config.eval_every:
        raise ValueError(
            "eval_data needs Config(eval_every=...): how many steps lie between evaluations"
        )
    if nproc > 1:
        from rl_core.tools.api.ranks import run_ranks

        if plugins or any(argument is not None for argument in (on_step, loss, optimizer, engine)):
            raise ValueError(
                f"nproc={nproc}: on_step, plugins, loss, optimizer and engine are of this process, "
                "where no rank is; leave them out, or give nproc=1"
            )
        run_ranks(config, environments, nproc)
        return read_result(config)
    from rl_core.tools.api.custom_components import custom_components

    stop = Interrupt()
    custom = custom_components(config, loss, optimizer, engine, plugins)
    # Errors of on_step are raised as they are.
    custom = replace(custom, plugins=(*custom.plugins, step_callback(on_step, stop)))
    # A thread has no event loop yet, unlike the caller in a notebook.
    with ThreadPoolExecutor(1, "rl_core") as pool:
        running = pool.submit(run_here, config, environments, custom)
        try:
            with errors_of_rows(environments):
                result_of(running)
        except KeyboardInterrupt:
            stop.send()
            print("interrupted: saves when this step is done", flush=True)
            result_of(running)
            raise
    return read_result(config)


def check_model(config: Config) -> None:
    """Raises ValueError for a model object where a path belongs."""
    if hasattr(config.model, "state_dict"):
        raise ValueError(
            f"Config(model=...) is a {type(config.model).__name__}; give the folder or hub name of "
            'a model: model.save_pretrained("m"), tokenizer.save_pretrained("m"), Config(model="m")'
        )


def data_section(config: Config) -> DataConfig:
    data = config.data
    return data if isinstance(data, DataConfig) else DataConfig(**data)


def result_of(running: Future[None]) -> None:
    """Waits for the run. A signal that the kernel gives to another thread interrupts no wait of
    this one, whose handlers run when it wakes."""
    while not running.done():
        wait([running], timeout=0.5)
    running.result()


class Interrupt:
    """Ctrl-C in the caller's thread, which a run in another thread reads as its own signal."""

    def __init__(self) -> None:
        self.is_sent = False
        self.ranks: Ranks | None = None  # Of the run, once it has begun.

    def begin(self, ranks: Ranks) -> None:
        self.ranks = ranks
        if self.is_sent:
            self.send()

    def send(self) -> None:
        from rl_core.distributed import SIGNAL_RECEIVED

        self.is_sent = True
        if self.ranks is not None:
            self.ranks.set_number(SIGNAL_RECEIVED, signal.SIGINT)


def step_callback(on_step: OnStep | None, stop: Interrupt) -> type[Plugin]:
    """A plugin that calls a function of the script after each step, which may end the run."""

    class StepCallback(Plugin):
        def __init__(self, trainer: RunState):
            super().__init__(trainer)
            stop.begin(trainer.ranks)
            self.evaluated: dict[str, float] = {}  # since the last call

        async def before_step(self, step: int) -> None:
            self.evaluated = {}

        async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
            self.evaluated = metrics

        async def after_step(self, step: int, metrics: dict[str, float]) -> None:
            if on_step is not None and on_step(step, metrics | self.evaluated) is False:
                self.trainer.end("ended by on_step")

    return StepCallback


def with_objects(
    config: Config, env: Environments, rows: dict[str, Rows]
) -> tuple[Config, list[Environment]]:
    """The checked configuration, and its environments."""
    config = from_sections(without_paths(asdict(config)))
    environments = as_list(split(config.env_path) if env is None else env)
    if rows and not (environments or config.is_rl):
        # Nothing is sampled that it could score.
        environments = [Environment(lambda messages: 0.0, name="data")]
    config, environments = with_environments(config, environments, rows)
    # Weights and limits of Environments were not checked yet.
    return checked(from_sections(asdict(config))), environments


def without_paths(values: JSONObject) -> JSONObject:
    """The same with texts for pathlib's paths, such as result.model."""
    texts = {key: str(value) for key, value in values.items() if isinstance(value, Path)}
    return (
        values
        | texts
        | {key: without_paths(value) for key, value in values.items() if isinstance(value, dict)}
    )


def run_here(config: Config, environments: list[Environment], custom: CustomComponents) -> None:
    """The run itself."""
    from rl_core.distributed import close_ranks
    from rl_core.learners import is_sharded
    from rl_core.run.plan.plan import make_plan
    from rl_core.run.process.joining import init_ranks
    from rl_core.run.process.run_to_end import run_to_end
    from rl_core.run.run_folder import keeping_failure, locked
    from rl_core.sampling.watchdog import run_hooks
    from rl_core.trainer import Trainer

    modules = {env.name: env.module() for env in environments if not env.is_file}
    plan = make_plan(config, modules, custom=custom)
    ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config), device_name=config.device)
    try:
        with locked(config.folder), keeping_failure(config.folder):
            trainer = Trainer(plan, ranks)
            run_hooks(run_to_end(trainer))
    finally:
        close_ranks(ranks)
    trainer.after_run()


def read_result(config: Config) -> TrainResult:
    out, metrics = config.folder, {}
    file = out / "metrics.jsonl"  # A run without steps and evaluations writes none.
    history = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for line in history:
        metrics |= line
    step = metrics.pop("step", 0)
    models = {name: out / "hf" / name for name in config.trained}
    return TrainResult(out=out, step=step, metrics=metrics, history=history, models=models)
