"""Data of the tests of rl-core view: a small run's folder, its trajectories, answers of the server
and content of a report."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp.test_utils import TestClient, TestServer

from rl_core.run.saving.run_files import write_trajectories
from rl_core.tools.view import main
from rl_core.tools.viewer import data
from rl_core.tools.viewer.data import RunFolder
from rl_core.tools.viewer.server import LOCAL, Viewer
from rl_core.types import Completion, Trajectory, Turn

HOSTILE = (
    'x\n"], "turns": [{"token_ids": [1, 2]}], "reward": 5, "messages": [ \u2028</script><script>'
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)
TIMEOUT_MS = 40_000  # Cores are busy.
SCREENS = {"light": ("light", 1280, 860), "dark": ("dark", 1280, 860), "phone": ("light", 390, 800)}
NEW = "/api/0/new?revision=-1&rows=0&entries=0"


def said(num: int, text: str = "hi") -> Turn:
    done = Completion(
        token_ids=[*range(num)],
        logprobs=[-0.5] * num,
        text=text,
        finish_reason="stop",
        policy_version=0,
    )
    return Turn(new_ids=[7, 8], is_fresh=True, completion=done)


def trajectory(n: int, **more) -> Trajectory:
    messages = [
        {"role": "user", "content": f"ask {n}"},
        {"role": "assistant", "content": f"Reply {n}"},
    ]
    arguments = {
        "messages": messages,
        "turns": [said(3), said(2, f"Reply {n}")],
        "reward": n / 4,
        "env": "letters",
    }
    arguments |= {"task_id": f"train/{n}", "group_id": "train/0/0", "index": n} | more
    return Trajectory(**arguments)


def write_metrics(folder: Path, rows: list[dict], mode: str = "w") -> None:
    with open(folder / "metrics.jsonl", mode) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_step(folder: Path, step: int, rows: list, name: str = "step_{:06d}") -> Path:
    file = folder / f"rollouts/{name.format(step)}.jsonl.zst"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(file, rows)
    return file


def small_run(folder: Path) -> RunFolder:
    """A step of four episodes, and an evaluation whose one episode failed."""
    write_step(folder, 1, [trajectory(n) for n in range(4)])
    failed = trajectory(4, reward=None, status="failed", error="the hook took too long", turns=[])
    write_step(folder, 1, [failed], "eval_{:06d}_greedy.rank_00001")
    write_metrics(folder, [{"step": 1, "rollout/policy/reward_mean": 0.5}])
    return RunFolder(folder)


def answers(
    folder: Path, *requests: tuple[str, dict], method: str = "GET"
) -> list[tuple[int, str]]:
    """(status, text) of each request (path, headers) to the server of a run."""

    async def ask():
        result = []
        async with TestClient(TestServer(Viewer([RunFolder(folder)]).app(LOCAL))) as client:
            for path, headers in requests:
                async with client.request(method, path, headers=headers) as response:
                    result.append((response.status, await response.text()))
        return result

    return asyncio.run(ask())


def report_of(folder: Path) -> dict:
    """The data in a report that the command writes."""
    assert main([str(folder), "--report", str(folder / "report.html")]) == 0
    text = (folder / "report.html").read_text()
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    )


@contextmanager
def disk_that_does_not_answer(monkeypatch, folder: Path) -> Iterator[None]:
    """Inside, whoever reads a file below the folder waits."""
    answers, at_once = threading.Event(), data.open_file

    def open_file(file: Path):
        if file.is_relative_to(folder):
            answers.wait()
        return at_once(file)

    monkeypatch.setattr(data, "open_file", open_file)
    yield
    answers.set()
