"""Trackers beside metrics.jsonl: wandb, TensorBoard, Trackio, MLflow. Each runs in a process of its
own, which reads what the run writes into its folder. So it can neither slow the run nor stop it.

OUT/trackers/NAME.json holds the last line that a tracker got: a resumed run continues there, and
repeats nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rl_core.config import Config
from rl_core.data.rows import ROLLOUTS, TOKENIZERS, read_json, write_whole
from rl_core.rules import flags_in, nearest, split
from rl_core.types import option

if TYPE_CHECKING:
    from pandas import DataFrame

POLL_S = 0.5
NUM_ROWS = 8  # of a table of samples


class Trackers:
    """The processes, on the rank that writes the run's folder."""

    def __init__(self, config: Config):
        self.deadline_s = min(60.0, config.timeout_s / 2)  # the other ranks wait
        *before, name = (
            (config.run_name or "/".join(Path(config.out).parts[-3:])).strip("/").split("/")
        )
        project, *group = before or ["rl_core"]
        run = {"project": project, "group": "/".join(group), "name": name, "out": config.out}
        run |= {
            "deadline_s": self.deadline_s,
            "config": {flag: value for flag, value, _ in flags_in(config)},
        }
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes = {}
        for tracker in split(config.trackers):
            command = [
                sys.executable,
                "-m",
                "rl_core.plugins.trackers",
                json.dumps(run | {"tracker": tracker}),
            ]
            # In a session of its own, so that Ctrl-C is for the run alone.
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, start_new_session=True
            )
            self.processes[tracker] = process

    def close(self) -> None:
        """Waits until all is sent, but not beyond the deadline."""
        deadline, word = (
            time.monotonic() + self.deadline_s,
            b"failed" if sys.exc_info()[0] else b"ok",
        )
        for process in self.processes.values():
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(word)
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                print(
                    f"--trackers {name} was ended: not done {self.deadline_s:g} s after the run",
                    file=sys.stderr,
                )


# A tracker is made of `run`: its name, project, group, config, folder `out`, `id` (which it may
# set) and is_resumed. It has log(step, values), table(step, name, a DataFrame) and close(is_ok).


def wandb(run: SimpleNamespace) -> SimpleNamespace:
    """Trackio has the same interface."""
    library, is_wandb = import_module(run.tracker), run.tracker == "wandb"
    own = {"id": run.id, "dir": run.out} if is_wandb else {"embed": False}
    names = {"project": run.project, "group": run.group or None, "name": run.name}
    it = library.init(
        **names, **own, config=run.config, resume="allow" if run.is_resumed else "never"
    )
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
        writer.add_text(
            name, "\n\n".join(f"**{k}**\n\n{indent(str(v), '    ')}" for k, v in cells), step
        )

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
    allowed = partial(re.sub, r"[^\w\-./ ]", "_")  # avg@4 -> avg_4
    return SimpleNamespace(
        log=lambda step, values: library.log_metrics(
            {allowed(k): v for k, v in values.items()}, step
        ),
        table=lambda step, name, table: library.log_table(table, f"{name}_{step:06d}.json"),
        close=lambda is_ok: library.end_run("FINISHED" if is_ok else "FAILED"),
    )


TRACKERS = {"wandb": wandb, "trackio": wandb, "tensorboard": tensorboard, "mlflow": mlflow}


def check_trackers(names: str) -> None:
    """Raises ValueError for a tracker that is not known, not installed, or does not import."""
    for name in split(names):
        try:
            is_there = find_spec(name) if name in TRACKERS else ":" in name and option(name)
        except Exception as error:  # of the user's module
            raise ValueError(f"--trackers {name}: {type(error).__name__}: {error}") from error
        if not is_there:
            known = f"is not known; {nearest(name, TRACKERS)}; your own is MODULE:CLASS"
            missing = "is not installed: pip install 'rl_core[trackers]'"
            raise ValueError(f"--trackers {name} {missing if name in TRACKERS else known}")


def wait_for_end(end: threading.Event, deadline_s: float) -> None:
    """Standard input ends when the run is over, with the word ok if it ended well."""
    end.is_ok = sys.stdin.read() == "ok"
    signal.alarm(int(deadline_s) + 5)  # nobody else ends this process if the run was killed
    end.set()


def lines(path: Path, end: threading.Event) -> Iterator[dict[str, Any]]:
    """Of a file that grows until the end."""
    with open(path, "a+") as file:
        file.seek(0)
        while True:
            is_last, start, line = end.is_set(), file.tell(), file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
            elif is_last:
                return
            else:
                file.seek(start)
                end.wait(POLL_S)


def samples(folder: Path, name: str, end: threading.Event) -> DataFrame:
    """Some episodes of the first file of rollouts with this name that has any: a slow rank may have
    played none, and files may be complete only after the metrics are."""
    from pandas import DataFrame

    rows, is_last = [], not (folder / TOKENIZERS).exists()
    while not (episodes := next(filter(None, played(folder, name)), [])) and not is_last:
        is_last = end.wait(POLL_S)
    num = min(NUM_ROWS, len(episodes))
    for episode in (episodes[i * len(episodes) // num] for i in range(num)):
        texts = [f"{m['role']}: {m.get('content')}" for m in episode["messages"]]
        said = next(
            (i for i, text in enumerate(texts) if text.startswith("assistant: ")), len(texts)
        )
        parts = "\n\n".join(texts[:said]), "\n\n".join(texts[said:])
        rows.append([*parts, episode["reward"], f"{episode['status']} {episode['error']}".strip()])
    return DataFrame(rows, columns=["prompt", "reply", "reward", "status"])


def played(folder: Path, name: str) -> Iterator[list[dict]]:
    """The episodes of each rank."""
    return (list(read_json(file)) for file in sorted(folder.glob(f"{name}*{ROLLOUTS}")))


def follow(run: SimpleNamespace) -> None:
    """Tells a tracker all that the run writes."""
    out, end = Path(run.out), threading.Event()
    threading.Thread(target=wait_for_end, args=[end, run.deadline_s], daemon=True).start()
    (out / "trackers").mkdir(exist_ok=True)
    path = out / "trackers" / f"{run.tracker}.json"
    with open(path.with_suffix(".lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # that of the run which this one continues may not be done
        state = json.loads(path.read_text()) if path.exists() else {}
        run.is_resumed, run.id = bool(state), state.get("id", uuid.uuid4().hex[:8])
        tracker = (TRACKERS.get(run.tracker) or option(run.tracker))(run)
        for line in lines(out / "metrics.jsonl", end):
            step, is_eval = line.pop("step"), any(name.startswith("eval/") for name in line)
            if [step, is_eval] <= state.get("done", [-1]):
                continue
            tracker.log(step, {name: value for name, value in line.items() if value is not None})
            kind = "eval" if is_eval else "step"
            if run.config["rollout.save"] and len(
                table := samples(out / "rollouts", f"{kind}_{step:06d}", end)
            ):
                tracker.table(step, f"samples/{kind}", table)
            write_whole(path, json.dumps({"id": run.id, "done": [step, is_eval]}))
        tracker.close(end.is_ok)


if __name__ == "__main__":
    asked = SimpleNamespace(**json.loads(sys.argv[1]))
    try:
        follow(asked)
    except Exception as error:
        sys.exit(
            f"--trackers {asked.tracker} is off: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        )
