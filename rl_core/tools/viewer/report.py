"""report.html: the page with a run's curves and a sample of its conversations, in one file that
needs no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.data.rows import write_whole
from rl_core.tools.viewer.data import UNREADABLE, Entry, RunFolder
from rl_core.tools.viewer.page import make_page, outline, summary, values_of
from rl_core.tools.viewer.tokens import shown_episode

if TYPE_CHECKING:
    from rl_core.types import JSONObject


# Rows of metrics, and values in them. A longer run has only every second step, or every third, and
# so on, and all evaluations.
MAX_ROWS, MAX_VALUES = 1000, 30_000
NUM_FILES = 8  # Files of rollouts/, from the first to the last.
MAX_TOKENS = 2000  # Tokens of an episode that is shown token by token.
MAX_BYTES = 340_000  # Bytes of conversations.
MAX_IMAGE_BYTES = 350_000  # Bytes of their images.


def write_report(file: Path, runs: list[RunFolder]) -> Path:
    parts, notes = [], []
    for run in runs:
        run.read_metrics()
        num_values = sum(map(len, run.rows))
        every = max(1, -(-len(run.rows) // MAX_ROWS), -(-num_values // MAX_VALUES))
        run.read_rollouts(sampled(run.rollouts()))
        entries = sample(run.entries)
        episodes = episodes_of(run, entries)
        held = [e for e, _ in episodes]
        news = summary(run, 0, every) | {"entries": [values_of(e) for e in held]}
        parts.append(
            {
                "news": news | {"is_complete": True, "is_live": False, "lost": ""},
                "episodes": [shown for _, shown in episodes],
            }
        )
        notes.append(omissions(run, held, every, is_all=len(held) == len(entries)))
    data = {"runs": [outline(run) for run in runs], "report": parts, "note": " ".join(notes)}
    write_whole(file, make_page(data))
    return file


def sampled(files: list[Path]) -> list[Path]:
    """Training steps and evaluations, evenly spaced, the first and the last included."""
    last = len(files) - 1
    return (
        [files[n] for n in sorted({round(i * last / (NUM_FILES - 1)) for i in range(NUM_FILES)})]
        if files
        else []
    )


def sample(entries: list[Entry]) -> list[Entry]:
    """From each file the group whose rewards differ most, and the first two failed episodes."""
    chosen = []
    for file in dict.fromkeys(e.file for e in entries):
        groups: dict[tuple, list[Entry]] = {}
        of_file = [e for e in entries if e.file == file]
        for e in of_file:
            groups.setdefault((e.env, e.group), []).append(e)
        widest = max(groups.values(), key=spread)
        chosen += widest + [e for e in of_file if e.status == "failed" and e not in widest][:2]
    return chosen


def spread(group: list[Entry]) -> float:
    rewards = [e.reward for e in group if e.reward is not None]
    return max(rewards) - min(rewards) if rewards else -1.0


def episodes_of(run: RunFolder, entries: list[Entry]) -> list[tuple[Entry, JSONObject]]:
    """Entries that fit, as the page shows them: up to MAX_BYTES, an equal share for each file. An
    image is in the first episode that shows it."""
    chosen, num_bytes, files = [], 0, list(dict.fromkeys(e.file for e in entries))
    images: dict[str, str] = {}
    for e in entries:
        try:
            episode = shown_episode(run, e)
        except (OSError, *UNREADABLE) as error:
            run.skip(run.path / "rollouts" / e.file, error)
            continue
        if sum(len(turn["ids"]) for turn in episode["turns"]) > MAX_TOKENS:
            episode |= {
                "turns": [],
                "note": f"Tokens of episodes beyond {MAX_TOKENS} are left out of a report.",
            }
        of_episode = episode.pop("images")
        text = json.dumps(episode)
        size = len(text) + 5 * text.count("<")  # The page writes < as \u003c.
        share = (files.index(e.file) + 1) / len(files)
        if num_bytes + size <= MAX_BYTES * share:
            new = {name: url for name, url in of_episode.items() if name not in images}
            if sum(map(len, [*images.values(), *new.values()])) > MAX_IMAGE_BYTES * share:
                new = {}  # The page shows their names.
            images |= new
            chosen.append((e, episode | {"images": new}))
            num_bytes += size
    return chosen


def omissions(run: RunFolder, entries: list[Entry], every: int, is_all: bool) -> str:
    """A sentence about the steps and conversations that the report leaves out."""
    steps = ", ".join(map(str, sorted({e.step for e in entries})))
    lines = [
        f"Report of {run.name}: curves of "
        + ("all steps" if every == 1 else f"one step in {every}")
    ]
    if entries:
        lines.append(
            f"{len(entries)} conversations of steps {steps}, of each the group whose rewards "
            "differ most"
        )
        lines += [] if is_all else ["more did not fit"]
    lines += filter(None, [run.note])
    return f"{'; '.join(lines)}. rl-core view {run.name} shows all."
