"""Files of a run, for the viewer: curves, an index of its trajectories, and one
trajectory when it is asked for.

The index holds the columns of lists and filters. Messages and tokens stay in rollouts/ and
are unpacked when one is opened or searched. Files that a killed run left cut short are read as far
as they go.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

import yaml
import zstandard

from rl_core.config import flat
from rl_core.data.rows import END
from rl_core.errors import nearest_folder

if TYPE_CHECKING:
    from rl_core.types import AnyJSON, JSONObject, Message


FILE = re.compile(r"(step|eval)_(\d+)_?(.*?)(?:\.rank_\d+)?\.jsonl\.zst")
TOKEN_IDS = re.compile(rb'"token_ids": \[([^\]]*)\]')
PREVIEW_CHARS = 120
RESCORED = "rescored.jsonl.zst"  # The rewards that rl-core rescore wrote.
NOTES, MAX_NOTE_BYTES = "notes.jsonl", 4000
# Metrics in the list of runs: the first that one of the patterns names, in this order.
SUMMARY = {
    "evaluation": [
        rf"eval/(?:[^/]+/)*{name}" for name in ("greedy_pass", "greedy_score", r"avg@\d+", "loss")
    ],
    "reward": [r"rollout/[^/]+/reward_mean"],
}
MAX_POINTS = 40  # Points of a curve in the list of runs.
# Errors of reading values that were not written by a run.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first takes a tenth of the time
# Title of a panel -> which metrics it shows; the groups that matched name a curve.
PANELS = {
    "reward": r"rollout/([^/]+(?:/[^/]+)?)/reward_mean",
    "evaluation": r"eval/((?:[^/]+/)*(?:greedy_score|greedy_pass|avg@\d+|pass@\d+|loss))",
    "length (tokens)": r"rollout/([^/]+)/(length_(?:mean|p50|p95|max))",
    "entropy (nats)": r"learn/([^/]+)/entropy_nats",
    "failed, truncated, without "
    "signal": r"rollout/([^/]+)/(failed|truncated_frac|zero_signal_frac|engine_restarts)",
    "parts of the reward": r"rollout/([^/]+(?:/[^/]+)?)/reward/(.+)",
    "loss": r"learn/([^/]+)/loss",
    "KL (nats)": r"learn/([^/]+)/((?:step|ref)_kl)_nats",
    "engine-learner "
    "mismatch": r"learn/([^/]+)/(mismatch_(?:kl_nats|kl_nats_max|tail_frac)|canary_max_diff)",
    "clip fraction": r"learn/([^/]+)/clip_frac",
    "gradient norm": r"learn/([^/]+)/grad_norm",
    "learning rate": r"learn/([^/]+)/lr",
    "staleness (versions)": r"rollout/(?:([^/]+)/)?(staleness|staleness_max|lag_versions)",
    "time per phase (s)": r"time/([^/]+)_s(?<!per_s)",
    "tokens per second": r"time/([^/]+)_tokens_per_s",
    "memory (GiB)": r"memory/([^/]+)_gib",
    "fill": r"pack/(fill_frac)",
}


# Smallest range of an axis, relative to its values: a smaller change is a flat line.
LEAST_RANGE_FRAC = 0.01
NEAR_ZERO = 1e-6  # Lower bound of these values, where they are as small as rounding.
CONSTANT_FRAC = 1e-6  # a curve that changes less is constant but for rounding


@dataclass(kw_only=True, slots=True, frozen=True)
class Entry:
    """A trajectory in the index. Its line is `size` bytes from `start` of the unpacked file."""

    file: str
    start: int
    size: int
    # "train", "greedy" or "sampled", the last two with the held-out set behind it where there are
    # several.
    kind: str
    step: int
    env: str
    task: str
    group: str
    index: int
    actor: str
    player: str
    reward: float | None
    status: str
    error: str
    num_turns: int
    num_tokens: int  # sampled
    preview: str  # the beginning of its last reply
    parts: dict[str, float]  # Parts of the reward.
    metrics: dict[str, float]
    rescored: float | None = None  # The reward in RESCORED.


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml", "rollouts"))


def check_run(path: Path) -> None:
    """Raises ValueError, with the runs nearby, if a path does not exist, or is a folder that is no
    run and holds some."""
    if is_run(path) or path.is_file():
        return
    near = "" if path.exists() else nearest_folder(path)
    if not near:
        folders = [path] if path.exists() else [path.parent, Path("runs"), Path()]
        runs = {str(run): None for folder in folders for run in inner_runs(folder, depth=1)}
        verb = "is one" if len(runs) == 1 else "are some"
        near = f"; {', '.join([*runs][:5])} {verb}" if runs else ""
    if near or not path.exists():
        raise ValueError(f"no run in {path}{'' if path.exists() else ', which is not there'}{near}")


class RunFolder:
    """A run's folder, which may still grow: refresh() reads new lines. Raises ValueError if there
    is no run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        check_run(self.path)
        if not is_run(self.path):
            raise ValueError(
                f"{self.path}: no folder of a run; it has neither metrics.jsonl nor config.yaml "
                "nor rollouts/"
            )
        self.rows: list[JSONObject] = []  # lines of metrics.jsonl
        self.entries: list[Entry] = []  # In the order of reading.
        # Changes where rows or entries did not only grow: a resumed run writes steps again.
        self.revision = 0
        self.files: dict[
            str, tuple[int, int]
        ] = {}  # File of rollouts/ that was read -> time and size.
        self.rescored: dict[str, list[float | None]] = {}  # File of rollouts/ -> rewards.
        self.rescored_at: float | None = None  # Time of the last change of RESCORED.
        self.metrics_read: tuple[int, int] = (0, 0)  # inode of metrics.jsonl, bytes read
        self.skipped: dict[str, str] = {}  # path below the folder -> why, or how much of it

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> JSONObject:
        """Flag -> value, of config.yaml; {} if it cannot be read."""
        file = self.path / "config.yaml"
        if not file.exists():
            return {}
        try:
            with open_file(file) as raw:
                return flat(yaml.load(raw, Loader=LOADER) or {})
        except (OSError, yaml.YAMLError, *UNREADABLE) as error:
            self.skip(file, error)
            return {}

    def skip(self, file: Path, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self.skipped[str(file.relative_to(self.path))] = " ".join(str(reason or error).split())

    @property
    def note(self) -> str:
        """Names of the files that are skipped because they cannot be read, with reasons; "" if all
        are shown."""
        parts = [f"{name}: {reason}" for name, reason in sorted(self.skipped.items())]
        return f"{self.path}: skipped {'; '.join(parts)}" if parts else ""

    @property
    def is_live(self) -> bool:
        """True if a run holds the folder's lock."""
        try:
            with open_file(self.path / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def failure(self) -> str:
        """The first line of failure.txt; "" without one."""
        try:
            with open_file(self.path / "failure.txt") as raw:
                return raw.readline(MAX_NOTE_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    @property
    def facts(self) -> JSONObject:
        """State, steps, times, and the curves of SUMMARY, for the list of runs."""
        began, wrote = self.changed("config.yaml"), self.changed("metrics.jsonl")
        step, curves = progress_of(self.path / "metrics.jsonl", wrote)
        end = self.end
        num_steps = end.get("num_steps") or self.config.get("num_steps") or 0
        has_ended = step == end.get("step")
        signal = end.get("signal", "") if has_ended else ""
        is_done = step >= num_steps or (has_ended and not signal)
        state = "done" if is_done else "ended early"
        failure = self.failure
        state = "stopped" if signal and not is_done else state
        state = "failed" if failure else state
        return {
            "state": "live" if self.is_live else state,
            "failure": failure,
            "signal": signal,
            "engine_logs": any(self.path.glob("engine_*.log")),
            "step": step,
            "num_steps": num_steps,
            "started": began,
            "duration_s": None if began is None or wrote is None else wrote - began,
            "curves": curves,
        }

    @property
    def sessions(self) -> list[JSONObject]:
        """The sessions of a run with --online whose files it keeps."""
        from rl_core.environments.agents.session_files import summaries

        return summaries(self.path / "rollouts")

    @property
    def end(self) -> JSONObject:
        """Content of end.json; {} without one."""
        try:
            with open_file(self.path / END) as file:
                end = json.loads(file.read())
        except (OSError, ValueError):
            return {}
        return end if isinstance(end, dict) else {}

    def changed(self, name: str) -> float | None:
        """Time of a file's last change (s since 1970); None if the file is missing."""
        try:
            return (self.path / name).stat().st_mtime
        except OSError:
            return None

    @property
    def notes(self) -> dict[str, JSONObject]:
        """Address of a conversation -> its star and note: the last lines of notes.jsonl."""
        try:
            with open_file(self.path / NOTES) as raw:
                rows = rows_of(raw.read())
        except OSError:
            return {}
        return {
            row["key"]: {"star": bool(row.get("star")), "text": str(row.get("text", ""))}
            for row in rows
            if isinstance(row, dict) and isinstance(row.get("key"), str)
        }

    def add_note(self, key: str, star: bool, text: str) -> None:
        """Appends a line to notes.jsonl. Raises ValueError if it is too long."""
        line = json.dumps({"key": key, "star": star, "text": text, "time": time.time()})
        if len(line) > MAX_NOTE_BYTES:
            raise ValueError(f"a note has at most {MAX_NOTE_BYTES} bytes")
        with open(self.path / NOTES, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    @property
    def warnings(self) -> list[JSONObject]:
        """Lines of warnings.jsonl: step, kind, metric, text."""
        file = self.path / "warnings.jsonl"
        if not file.exists():
            return []
        try:
            with open_file(file) as raw:
                rows = rows_of(raw.read())
        except OSError as error:
            self.skip(file, error)
            return []
        return [row for row in rows if isinstance(row, dict) and {"step", "text"} <= row.keys()]

    def refresh(self, limit_s: float = float("inf")) -> bool:
        """Reads new metrics, and new rollouts, newest first, until the time is over, but at least
        one file. True if nothing is left to read. Raises ValueError if the folder is gone;
        entries stay."""
        deadline = time.monotonic() + limit_s
        self.read_metrics()
        files = self.rollouts()
        if gone := self.files.keys() - {file.name for file in files}:
            self.files = {name: state for name, state in self.files.items() if name not in gone}
            self.entries = [e for e in self.entries if e.file not in gone]
            self.revision += 1
        return self.read_rollouts(files[::-1], deadline)

    def rollouts(self) -> list[Path]:
        """Files of trajectories in the order of their steps."""
        files = (self.path / "rollouts").glob("*.jsonl.zst")
        return sorted(
            (file for file in files if FILE.fullmatch(file.name)),
            key=lambda file: (step_of(file), file.name),
        )

    def read_rollouts(self, files: list[Path], deadline: float = float("inf")) -> bool:
        """Indexes files that are new or have changed. Returns False if time.monotonic() passes the
        deadline first."""
        self.read_rescored()
        for file in files:
            try:
                status = file.stat()
                state = (status.st_mtime_ns, status.st_size)
                if self.files.get(file.name) == state:
                    continue
                new_entries, num_bad = index_of(file)
            except FileNotFoundError:  # A resumed run removed the file after it was listed.
                continue
            except OSError as error:
                self.skip(file, error)
                continue
            rewards = self.rescored.get(file.name, [])
            if len(rewards) == len(new_entries):
                pairs = zip(new_entries, rewards, strict=True)
                new_entries = [replace(e, rescored=reward) for e, reward in pairs]
            self.skipped.pop(f"rollouts/{file.name}", None)
            if num_bad:
                self.skip(file, ValueError(f"{num_bad} lines that are not trajectories"))
            if file.name in self.files:
                self.entries = [e for e in self.entries if e.file != file.name]
                self.revision += 1
            # Who searches in a thread has the list as it was.
            self.entries = [*self.entries, *new_entries]
            self.files[file.name] = state
            # At least one file is read, also from a slow disk.
            if time.monotonic() > deadline:
                return False
        return True

    def read_rescored(self) -> None:
        """Reads the rewards of RESCORED if it has changed; all rollouts are then indexed again."""
        changed = self.changed(RESCORED)
        if changed == self.rescored_at:
            return
        from rl_core.data.tables import read_rewards

        self.rescored_at, self.rescored = changed, {}
        self.files, self.entries, self.revision = {}, [], self.revision + 1
        try:
            rows = read_rewards(self.path / RESCORED) if changed else {}
            self.rescored = {name: [row["reward"] for row in of] for name, of in rows.items()}
        except (OSError, ValueError) as error:
            self.skip(self.path / RESCORED, error)

    def read_metrics(self) -> None:
        file = self.path / "metrics.jsonl"
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: the folder is gone; the data that was read stays here")
        if not file.exists():
            return
        try:
            self.read_lines(file)
        except OSError as error:
            self.skip(file, error)

    def read_lines(self, file: Path) -> None:
        """Adds the lines of metrics.jsonl that are complete and not read yet."""
        inode, done = self.metrics_read
        with open_file(file) as raw:
            status = os.fstat(raw.fileno())
            if (status.st_ino, status.st_size) == self.metrics_read:
                return
            if done and (status.st_ino != inode or status.st_size < done):
                self.rows, self.revision, done = [], self.revision + 1, 0
                self.skipped.pop(file.name, None)
            raw.seek(done)
            data = raw.read()
        lines = data[: data.rfind(b"\n") + 1]
        for row in rows_of(lines):
            values = numbers_of(row)
            if values is not None:
                self.rows.append(values)
            if values is None or len(values) < len(row):
                self.skip(file, ValueError("values that are not numbers of a step"))
        self.metrics_read = (status.st_ino, done + len(lines))

    def curves(self, first: int = 0) -> dict[str, list[tuple[int, float]]]:
        """Metric -> its points (step, value), of the rows from `first` on."""
        points: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows[first:]:
            for name, value in row.items():
                if name != "step" and value is not None:
                    points.setdefault(name, []).append((row["step"], value))
        return points

    def episode(self, entry: Entry) -> JSONObject:
        """The whole trajectory: messages, turns with tokens, rewards."""
        return json.loads(self.line(entry))

    def line(self, entry: Entry) -> bytes:
        return self.text(entry.file)[entry.start : entry.start + entry.size]

    def text(self, name: str) -> bytes:
        """A file of rollouts/, unpacked."""
        file = self.path / "rollouts" / name
        return unpacked(file, file.stat().st_mtime_ns)

    def search(self, text: str, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Entries with the text in their messages, in upper or lower case. Faster if entries of one
        file follow each other."""
        wanted = text.casefold()
        for entry in entries:
            try:
                line = self.line(entry)
                messages = json.loads(line[slice(*parts_of(line).messages)])
                texts = [text for message in messages for text in texts_of(message)]
            except UNREADABLE:  # Opening the entry says why.
                continue
            if any(wanted in text.casefold() for text in texts):
                yield entry


def open_file(file: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError for a pipe, a device or a folder: reading it might
    never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is not a file")
    return open(file, "rb")


def numbers_of(row: AnyJSON) -> JSONObject | None:
    """The numbers of a line of metrics, and its nulls. None if it is not an object with a step."""
    step = row.get("step") if isinstance(row, dict) else None
    if not is_number(step) or step % 1:
        return None
    return {name: value for name, value in row.items() if value is None or is_number(value)}


def is_number(value: object) -> TypeGuard[float]:
    """True for JSON's numbers that a float holds, NaN and infinity included."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(value, float) or abs(value) < 1e300


def rows_of(lines: bytes) -> list[AnyJSON]:
    """Values of metrics.jsonl or warnings.jsonl, without lines that a killed run or a full disk
    left cut short."""
    rows = []
    for line in lines.splitlines():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return rows


def sorted_rows(lines: Iterable[bytes]) -> list[JSONObject]:
    """Rows of metrics in the order of their steps."""
    rows = filter(None, map(numbers_of, rows_of(b"\n".join(lines))))
    return sorted(rows, key=lambda row: row["step"])


@lru_cache(maxsize=1000)
def progress_of(file: Path, changed: float | None) -> tuple[int, JSONObject]:
    """(last step, key of SUMMARY -> its metric's name, best point and some of its points) of a
    metrics.jsonl, of which evaluations and some other lines are parsed. `changed`: time of the
    file's last change."""
    try:
        with open_file(file) as raw:
            lines = raw.read().splitlines()
    except OSError:
        return 0, {}
    every = -(-len(lines) // MAX_POINTS) or 1
    shown = {n for n, line in enumerate(lines) if n % every == 0 or b'"eval/' in line}
    # The first may be an evaluation, and the last cut short.
    numbers = range(len(lines))
    shown |= {*numbers[:3], *numbers[-3:]}
    rows, points = sorted_rows(lines[n] for n in sorted(shown)), {}
    for row in rows:
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                points.setdefault(name, {})[row["step"]] = value
    curves = {}
    for key, patterns in SUMMARY.items():
        matches = (name for pattern in patterns for name in points if re.fullmatch(pattern, name))
        if name := next(matches, ""):
            steps, best = points[name], min if name.endswith("/loss") else max
            curves[key] = {
                "name": name,
                "best": best(steps.items(), key=lambda pair: pair[1]),
                "points": thinned(list(steps.items())),
            }
    return max((int(row["step"]) for row in rows), default=0), curves


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS of them, the first and the last included."""
    every = -(-len(points) // (MAX_POINTS - 1))
    return [*points[:-1:every], points[-1]]


def inner_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Runs below a folder, at most `depth` folders down; a run's own folders are not searched."""
    if is_run(folder):
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    inner = (inner_runs(path, depth - 1) for path in sorted(folder.iterdir()) if path.is_dir())
    return [run for runs in inner for run in runs]


def runs_in(folders: Iterable[Path]) -> list[RunFolder]:
    """The runs that these folders are or hold. Raises ValueError for a folder without one."""
    return [RunFolder(path) for folder in folders for path in inner_runs(folder) or [folder]]


def axis_range(values: Iterable[float]) -> tuple[float, float] | None:
    """The range of an axis on which these values are a flat line; None if they are not."""
    values = list(values)
    low, high = min(values), max(values)
    least = LEAST_RANGE_FRAC * max(abs(low), abs(high), NEAR_ZERO)
    if high - low >= least:
        return None
    if low == high == 0:
        return 0.0, 1.0
    middle = (low + high) / 2
    return middle - least / 2, middle + least / 2


def is_constant(values: Iterable[float]) -> bool:
    values = list(values)
    low, high = min(values), max(values)
    return high - low <= max(CONSTANT_FRAC * max(abs(low), abs(high)), LEAST_RANGE_FRAC * NEAR_ZERO)


def panels_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Title of a panel -> curve -> metric. Metrics without a panel have one each, at the end, by
    their name."""
    panels: dict[str, dict[str, str]] = {title: {} for title in PANELS}
    others = {}
    for name in sorted(names):
        matches = ((title, re.fullmatch(pattern, name)) for title, pattern in PANELS.items())
        title, match = next(((title, match) for title, match in matches if match), ("", None))
        if match:
            panels[title][" ".join(filter(None, match.groups()))] = name
        else:
            others[name] = {name: name}
    return {title: curves for title, curves in panels.items() if curves} | others


def matching(
    entries: Iterable[Entry],
    reason: str = "",
    rewards: tuple[float, float] | None = None,
    **wanted: object,
) -> list[Entry]:
    """Entries with these values (step=, env=, task=, group=, actor=, status=, kind= ...; None is
    any), with `reason` in their error, and a reward from the first to the second of `rewards`."""
    wanted = {name: value for name, value in wanted.items() if value is not None}
    return [
        e
        for e in entries
        if all(getattr(e, name) == value for name, value in wanted.items())
        and reason.casefold() in e.error.casefold()
        and (rewards is None or (e.reward is not None and rewards[0] <= e.reward <= rewards[1]))
    ]


def texts_of(message: Message) -> Iterator[str]:
    """Its content, and whatever else it holds as JSON."""
    for key, value in message.items():
        if key != "role" and value:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def named(file: Path) -> re.Match[str]:
    """The parts of the name of a file of rollouts/."""
    match = FILE.fullmatch(file.name)
    assert match, file
    return match


def step_of(file: Path) -> int:
    return int(named(file)[2])


@dataclass(slots=True, frozen=True)
class Parts:
    """Places in a trajectory's line. A quotation mark within a string has a backslash before it, so
    that these keys are found without reading what stands between them."""

    messages: tuple[int, int]
    turns: tuple[int, int]


def parts_of(line: bytes) -> Parts:
    """Raises ValueError for a line that is no trajectory's."""
    begins, ends = line.index(b', "messages": [') + 14, line.rindex(b'], "reward": ') + 1
    between = line.rindex(b'], "turns": [', begins, ends) + 1
    return Parts((begins, between), (between + 11, ends))


def index_of(file: Path) -> tuple[list[Entry], int]:
    """(index entries of a file's trajectories, number of lines that are not trajectories). Raises
    OSError if `file` is not a regular file."""
    match = named(file)
    kind = "train" if match[1] == "step" else intern(match[3].replace("_", " ", 1))
    entries, start, num_bad = [], 0, 0
    for line in BytesIO(unpacked(file, file.stat().st_mtime_ns)):
        try:
            entries.append(entry_of(line, file.name, start, kind, int(match[2])))
        except UNREADABLE:
            # A line without an end is the last one of a killed run.
            num_bad += line.endswith(b"\n")
        start += len(line)
    return entries, num_bad


def entry_of(line: bytes, file: str, start: int, kind: str, step: int) -> Entry:
    """The index's entry of a line. Raises one of UNREADABLE for a line that is no trajectory's."""
    parts = parts_of(line)
    begins, ends = parts.turns
    # All but messages and turns, which are most of it.
    row = json.loads(line[: parts.messages[0] - 14] + line[ends:])
    if not (row["reward"] is None or is_number(row["reward"])) or not is_number(row["index"]):
        raise TypeError("reward and index must be numbers")
    ids = TOKEN_IDS.findall(line, begins, ends)
    return Entry(
        file=intern(file),
        start=start,
        size=len(line),
        kind=kind,
        step=step,
        env=intern(row["env"]),
        task=intern(row["task_id"]),
        group=intern(row["group_id"]),
        index=row["index"],
        actor=intern(row["actor"]),
        player=intern(row["player"]),
        reward=row["reward"],
        status=intern(row["status"]),
        error=intern(row["error"]),
        num_turns=len(ids),
        num_tokens=sum(i.count(b",") + 1 for i in ids if i),
        preview=last_reply(line, begins, ends),
        parts=named_numbers(row["reward_parts"]),
        metrics=named_numbers(row["metrics"]),
    )


def named_numbers(values: JSONObject) -> dict[str, float]:
    return {intern(name): value for name, value in values.items() if is_number(value)}


def last_reply(line: bytes, begins: int, ends: int) -> str:
    begins = line.rfind(b', "text": "', begins, ends) + 10
    if begins < 10:
        return ""
    text = json.loads(line[begins : line.index(b', "finish_reason": ', begins)])
    return " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


@lru_cache(maxsize=2)  # Files of rollouts/ and tokens/; one may have 300 MB.
def unpacked(file: Path, version: int) -> bytes:
    """A file's content, as far as it goes. `version`: when it was written."""
    with open_file(file) as raw:
        reader, parts = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), []
        try:
            while chunk := reader.read(1 << 16):
                parts.append(chunk)
        except zstandard.ZstdError:
            pass
    return b"".join(parts)
