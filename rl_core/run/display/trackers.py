"""--trackers, in addition to metrics.jsonl: W&B, TensorBoard, Trackio, MLflow. Each tracker runs in
a separate thread, so that one that raises or hangs does not hurt the run.

OUT/trackers/NAME.json holds the last row that a tracker received: a resumed run continues there and
sends no row twice.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from textwrap import indent
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.config.flag_parsing import flags_in
from rl_core.data.image_parts import without_pixels
from rl_core.data.row_files import read_json
from rl_core.data.rows import write_whole
from rl_core.distributed import all_gather_json
from rl_core.errors import nearest, require, split
from rl_core.plugin import Plugin, RunState
from rl_core.types import JSONObject, Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

NUM_ROWS = 8  # Rows of a table of samples.


class Trackers(Plugin):
    """Sends metrics and samples to trackers, on the writer rank."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.deadline_s = min(60.0, trainer.config.timeout_s / 2)  # The other ranks wait.
        self.threads: dict[str, tuple[threading.Thread, SimpleQueue]] = {}
        self.samples: dict[str, list[dict]] = {}  # "step" or "eval" -> rows of its table.

    async def start(self) -> None:
        trainer = self.trainer
        if not trainer.ranks.is_writer:
            return
        for name in split(trainer.config.trackers):
            run, queue = describe_run(trainer.config, name), SimpleQueue()
            # Not a daemon: exit_process() bounds the wait for a thread that hangs.
            thread = threading.Thread(target=follow, args=(run, queue), name=f"--trackers {name}")
            self.threads[name] = thread, queue
            thread.start()
        file = trainer.out / "metrics.jsonl"
        for line in read_json(file) if file.exists() else ():
            self.send(line.pop("step"), line)

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """Keeps samples for the tables. Of an evaluation only the first set is shown."""
        kind = "eval" if name.startswith("eval/") else "step"
        ranks = self.trainer.ranks
        rows = all_gather_json(samples(trajectories, max(1, NUM_ROWS // ranks.size)), ranks)
        self.samples.setdefault(kind, list(chain(*rows))[:NUM_ROWS])

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        self.send(step, metrics)

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.send(step, metrics)

    def send(self, step: int, metrics: Mapping[str, float | None]) -> None:
        kind = "eval" if "time/eval_s" in metrics else "step"
        values = {n: v for n, v in metrics.items() if v is not None and math.isfinite(v)}
        rows = self.samples.pop(kind, [])
        for _, queue in self.threads.values():
            queue.put((step, kind, values, rows))

    async def close(self) -> None:
        """Waits until all rows are sent, up to the deadline."""
        deadline = time.monotonic() + self.deadline_s
        for _, queue in self.threads.values():
            queue.put(sys.exc_info()[0] is None)
        for name, (thread, _) in self.threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                text = f"is left behind: not done {self.deadline_s:g} s after the run"
                print(f"--trackers {name} {text}", file=sys.stderr)


def describe_run(config: Config, tracker: str) -> SimpleNamespace:
    name = config.run_name or "/".join(config.folder.parts[-3:])
    *before, name = name.strip("/").split("/")
    project, *group = before or ["rl_core"]
    return SimpleNamespace(
        tracker=tracker,
        project=project,
        group="/".join(group),
        name=name,
        out=config.out,
        config={flag: value for flag, value, _ in flags_in(config)},
    )


def samples(trajectories: list[Trajectory], num: int) -> list[JSONObject]:
    """Some episodes, evenly spread."""
    rows = []
    for episode in trajectories[:: max(1, len(trajectories) // num)][:num]:
        roles = [message["role"] for message in episode.messages]
        texts = [f"{m['role']}: {without_pixels(m.get('content'))}" for m in episode.messages]
        first = (*roles, "assistant").index("assistant")
        row = {"prompt": "\n\n".join(texts[:first]), "reply": "\n\n".join(texts[first:])}
        row |= {"reward": episode.reward, "status": f"{episode.status} {episode.error}".strip()}
        rows.append(row)
    return rows


def follow(run: SimpleNamespace, queue: SimpleQueue) -> None:
    """Sends the rows of `queue` to a tracker; the last item is True if the run ended well."""
    try:
        path = Path(run.out) / "trackers" / f"{run.tracker}.json"
        path.parent.mkdir(exist_ok=True)
        state = json.loads(path.read_text()) if path.exists() else {}
        run.is_resumed, run.id = bool(state), state.get("id", uuid.uuid4().hex[:8])
        tracker = (TRACKERS.get(run.tracker) or resolve_name(run.tracker))(run)
        while not isinstance(message := queue.get(), bool):
            step, kind, values, rows = message
            position = [step, kind == "eval"]
            if position <= state.get("done", [-1]):
                continue
            # Written before the row is sent, so that a killed run does not send it twice.
            write_whole(path, json.dumps({"id": run.id, "done": position}))
            tracker.log(step, values)
            if rows:
                from pandas import DataFrame

                tracker.table(step, f"samples/{kind}", DataFrame(rows))
        tracker.close(message)
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"--trackers {run.tracker} is off: {type(error).__name__}: {text}", file=sys.stderr)


# A tracker is made from `run`: its name, project, group, config, folder `out`, `id` (which the
# tracker may set) and is_resumed. It has log(step, values), table(step, name, DataFrame) and
# close(is_ok).


def wandb(run: SimpleNamespace) -> SimpleNamespace:
    """W&B or Trackio, which has the same interface."""
    library, is_wandb = import_module(run.tracker), run.tracker == "wandb"
    options: JSONObject = {"embed": False}
    if is_wandb:
        # rl_core prints to the terminal. Another run of this process may still be open.
        settings = library.Settings(console="off", reinit="create_new")
        options = {"id": run.id, "dir": run.out, "settings": settings}
    resume = "allow" if run.is_resumed else "never"
    names = {"project": run.project, "group": run.group or None, "name": run.name}
    it = library.init(**names, **options, config=run.config, resume=resume)
    return SimpleNamespace(
        log=lambda step, values: it.log(values, step),
        table=lambda step, name, table: it.log({name: library.Table(dataframe=table)}, step),
        close=lambda is_ok: it.finish(1) if is_wandb and not is_ok else it.finish(),
    )


def tensorboard(run: SimpleNamespace) -> SimpleNamespace:
    from pandas import DataFrame
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(Path(run.out) / "tensorboard")

    def table(step: int, name: str, table: DataFrame) -> None:
        cells = (item for row in table.to_dict("records") for item in row.items())
        text = "\n\n".join(f"**{k}**\n\n{indent(str(v), '    ')}" for k, v in cells)
        writer.add_text(name, text, step)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    table(0, "config", DataFrame([run.config]))
    return SimpleNamespace(log=log, table=table, close=lambda is_ok: writer.close())


def mlflow(run: SimpleNamespace) -> SimpleNamespace:
    library = import_module("mlflow")
    library.set_experiment(run.project)
    known, tags = run.id if run.is_resumed else None, {"group": run.group}
    run.id = library.start_run(known, run_name=run.name, tags=tags).info.run_id
    if not run.is_resumed:
        library.log_params({name: str(value)[:500] for name, value in run.config.items()})

    def log(step: int, values: dict[str, float]) -> None:
        # avg@4 -> avg_4
        allowed = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in values.items()}
        library.log_metrics(allowed, step)

    return SimpleNamespace(
        log=log,
        table=lambda step, name, table: library.log_table(table, f"{name}_{step:06d}.json"),
        close=lambda is_ok: library.end_run("FINISHED" if is_ok else "FAILED"),
    )


TRACKERS = {"wandb": wandb, "trackio": wandb, "tensorboard": tensorboard, "mlflow": mlflow}


def check_trackers(names: str) -> None:
    """Raises ValueError for a tracker that is unknown, not installed, or does not import."""
    for name in split(names):
        if ":" in name:
            try:
                resolve_name(name)
            except Exception as error:  # The user's module may raise anything.
                raise ValueError(f"--trackers {name}: {type(error).__name__}: {error}") from error
        elif name not in TRACKERS:
            known = f"{nearest(name, TRACKERS)}; your own is MODULE:CLASS"
            raise ValueError(f"--trackers {name} is not known; {known}")
        else:
            require(name, f"--trackers {name}", "trackers")
