"""Runs that stay open, with clients that play while the run is killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from statistics import fmean

import httpx
import pytest
from kit import RanksProcess, start_process, steps, trajectories, wait_until, words

SIZES = "--max_tokens 6 --max_prompt_tokens 64 --max_turns 4 --optim.lr 1e-3"
ADMIN = "sk-admin-of-the-tests-0123456789"
PER_STEP = 10


class Killed:
    """A run that is started again each time that it was killed."""

    def __init__(self, out: Path, model: str, num_sessions: int, num_ranks: int):
        self.out, self.num_ranks, self.url = out, num_ranks, ""
        flags = f"--online --online.port 0 --tasks_per_step {PER_STEP} --save_every 1 {SIZES}"
        flags += f" --online.min_sessions {PER_STEP}"  # Of the step after a signal too.
        flags += f" --num_steps {num_sessions // PER_STEP} --max_staleness 100000 --resume"
        self.flags = words(flags, "--model", model, "--out", out)
        self.num_answered, self.processes = 0, []
        self.start()

    def start(self) -> None:
        env = {"RL_CORE_ADMIN_KEY": ADMIN}
        self.process = RanksProcess(self.num_ranks, "-m", "rl_core.train", *self.flags, env=env)
        self.processes.append(self.process)
        self.url = ""

    async def find(self) -> None:
        """Waits for the address of the run's server."""
        while not self.url and self.process.poll() is None:
            if match := re.search(r"open at (\S+),", self.process.text("stdout")):
                self.url = match[1]
            await asyncio.sleep(0.05)

    async def kill(self, number: int) -> None:
        await self.find()
        if number == signal.SIGKILL:
            self.process.signal(number)
        else:
            self.process.ask_to_end()
        is_gone = lambda: self.process.poll() is not None and not is_alive(self.process.pid)  # noqa: E731
        await asyncio.to_thread(wait_until, is_gone, "the run has ended")
        self.start()

    async def call(self, http, path, key, body) -> httpx.Response:
        """The answer of whichever process gives one. Later tries are marked as retries."""
        headers = {"Authorization": f"Bearer {key}"}
        for number in range(100_000):
            try:
                answer = await http.post(self.url + path, headers=headers, json=body)
                if answer.status_code not in (429, 503):
                    self.num_answered += 1
                    return answer
            except (httpx.HTTPError, httpx.UnsupportedProtocol):
                pass
            headers["x-stainless-retry-count"] = str(number + 1)
            await asyncio.sleep(0.1)
            await self.find()
            if self.process.poll() == 0:  # It has trained a session whose client got no answer.
                return httpx.Response(410)
        raise AssertionError("no answer")


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def play(run: Killed, http, number: int) -> None:
    """A session of two turns, each of which is asked for again. Its reward is its number."""
    key = f"sk-session-of-client-{number:05d}"
    body = {"task_id": f"task-{number}", "api_key": key}
    begun = await run.call(http, "/rl/start_session", ADMIN, body)
    assert begun.status_code == 200, begun.text
    messages = [{"role": "user", "content": str(number % 10)}]
    for _ in range(2):
        asked = {"model": "any", "messages": messages}
        first = await run.call(http, "/v1/chat/completions", key, asked)
        assert first.status_code == 200, first.text
        text = first.json()["choices"][0]["message"]["content"]
        again = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": "1"}
        try:
            second = await http.post(f"{run.url}/v1/chat/completions", headers=again, json=asked)
            if second.status_code == 200:
                assert second.json()["choices"][0]["message"]["content"] == text
        except httpx.HTTPError:
            pass
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "a"}]
    rated = await run.call(http, "/rl/set_reward", key, {"reward": number})
    assert rated.status_code == 200, rated.text
    ended = await run.call(http, "/rl/end_session", key, {})
    assert ended.status_code in (200, 410), ended.text


async def play_all(run: Killed, num_sessions: int, signals: list[int], seed: int) -> None:
    """Plays eight sessions at once, and kills the run after random numbers of answers."""
    chance, at_once = random.Random(seed), asyncio.Semaphore(8)
    # A session has five answers; the last ones may end the run.
    numbers_of_answers = sorted(chance.sample(range(1, 4 * num_sessions), len(signals)))

    async def kill() -> None:
        for answers, number in zip(numbers_of_answers, signals, strict=True):
            while run.num_answered < answers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(chance.random() / 5)
            await run.kill(number)

    async with httpx.AsyncClient(timeout=120) as http:

        async def one(number: int) -> None:
            async with at_once:
                await play(run, http, number)

        await run.find()
        await asyncio.gather(kill(), *map(one, range(num_sessions)))


# Number of sessions, signals that the run gets, ranks.
KILLS = {
    "twice": (20, [signal.SIGKILL] * 2, 1),
    "once, and ended, on two ranks": (20, [signal.SIGKILL, signal.SIGTERM], 2),
    "forty times": (500, [signal.SIGKILL] * 40, 1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name[0] == "f")) for name in KILLS]
)
def test_a_killed_run_trains_every_rated_session_once(case, tiny_model, tmp_path):
    num_sessions, signals, num_ranks = KILLS[case]
    run = Killed(tmp_path / "run", tiny_model, num_sessions, num_ranks)
    asyncio.run(play_all(run, num_sessions, signals, len(case)))
    assert run.process.wait(120) == 0, run.process.why()
    trained: Counter[str] = Counter()
    for file in (tmp_path / "run/rollouts").glob("step_*.jsonl.zst"):
        for row in trajectories(file):
            trained[row["task_id"]] += 1
            assert row["reward"] == float(row["task_id"].partition("-")[2])
            assert len(row["turns"]) == 2
    assert trained == Counter(f"task-{number}" for number in range(num_sessions))
    last = steps(tmp_path / "run")[-1]
    assert last["step"] == num_sessions // PER_STEP
    written = [run.out, *(Path(f"{each.out}.stdout").parent for each in run.processes)]
    assert not keys_in(written), "a key stands in a file"


# Name -> (flags, ranks, tasks of the rated sessions, tasks of each step).
STEPS = {
    "groups": ("--tasks_per_step 1 --group_size 2", 1, "abcab", ["aa", "bb"]),
    "by the clock": (
        "--tasks_per_step 9 --online.step_minutes 0.02 --online.min_sessions 3",
        1,
        "abc",
        ["abc"],
    ),
    "of an engine's rank": ("--tasks_per_step 2 --rollout_ranks 1", 2, "abcd", ["ab", "cd"]),
    "none": ("--tasks_per_step 2 --online.min_sessions 2", 2, "a", []),
}


def steps_of(out: Path) -> list[dict]:
    return steps(out) if (out / "metrics.jsonl").exists() else []


@pytest.mark.parametrize("case", STEPS)
def test_steps_have_rated_sessions_and_a_signal_makes_no_empty_one(case, tiny_model, tmp_path):
    flags, num_ranks, tasks, expected = STEPS[case]
    out = tmp_path / "run"
    flags = f"--online --online.port 0 --save_every 0 {SIZES} {flags}"
    run = RanksProcess(
        num_ranks,
        "-m",
        "rl_core.train",
        *words(flags, "--model", tiny_model, "--out", out),
        env={"RL_CORE_ADMIN_KEY": ADMIN},
    )
    wait_until(lambda: "open at" in run.text("stdout") or run.poll(), "the run is open", 120)
    assert run.poll() is None, run.why()
    with httpx.Client(
        base_url=re.search(r"open at (\S+),", run.text("stdout"))[1], timeout=120
    ) as http:
        for number, task in enumerate(tasks):
            key = {"Authorization": f"Bearer sk-session-of-client-{number:05d}"}
            body = {"task_id": task, "api_key": f"sk-session-of-client-{number:05d}"}
            admin = {"Authorization": f"Bearer {ADMIN}"}
            http.post("/rl/start_session", headers=admin, json=body).raise_for_status()
            asked = {"model": "any", "messages": [{"role": "user", "content": "1"}]}
            http.post("/v1/chat/completions", headers=key, json=asked).raise_for_status()
            http.post("/rl/set_reward", headers=key, json={"reward": number}).raise_for_status()
            http.post("/rl/end_session", headers=key).raise_for_status()
        wait_until(lambda: len(steps_of(out)) == len(expected), "the steps are done", 120)
    run.ask_to_end()
    assert run.wait(120) == 128 + signal.SIGTERM, run.why()
    assert "ended by SIGTERM" in run.text("stdout"), run.why()
    files = sorted((out / "rollouts").glob("step_*.zst"))
    played = ["".join(sorted(row["task_id"] for row in trajectories(file))) for file in files]
    assert [tasks for tasks in played if tasks] == expected
    assert len(steps_of(out)) == len(expected)
    saved = sorted(each.name for each in (out / "checkpoints").glob("step_*"))
    assert saved == [f"step_{len(expected):06d}"] * bool(expected)


def keys_in(folders: list[Path]) -> list[Path]:
    """Files that have a key of a session or of the admin."""
    files = []
    for file in {file for folder in folders for file in folder.rglob("*") if file.is_file()}:
        data = file.read_bytes()
        if b"sk-session-of" in data or ADMIN.encode() in data:
            files.append(file)
    return files


@pytest.mark.slow
@pytest.mark.parametrize("seed, more", [(0, ""), (1, ""), (2, ""), (0, "--random")])
def test_digits_in_order_are_learnt_from_a_programs_rewards(seed, more, tiny_model, tmp_path):
    out = tmp_path / "run"
    flags = "--online --online.port 0 --tasks_per_step 32 --num_steps 100 --max_tokens 8 "
    flags += f"--max_prompt_tokens 32 --max_turns 1 --optim.lr 3e-3 --seed {seed}"
    env = {"RL_CORE_ADMIN_KEY": ADMIN}
    run = RanksProcess(
        1, "-m", "rl_core.train", *words(flags, "--model", tiny_model, "--out", out), env=env
    )
    wait_until(lambda: "open at" in run.text("stdout"), "the run is open")
    url = re.search(r"open at (\S+),", run.text("stdout"))[1]
    (tmp_path / "key").write_text(ADMIN)
    arguments = words("--url", url, "--admin_key_file", tmp_path / "key", more)
    printed, _ = start_process("scripts/online_digits.py", *arguments).communicate(timeout=3600)
    scores = [float(score) for score in re.findall(r"score (\S+)", printed)]
    assert run.wait(120) == 0, run.why()
    served = []  # Newest version that answered a session of each step.
    for file in sorted((out / "rollouts").glob("step_*.jsonl.zst")):
        turns = [turn["completion"] for row in trajectories(file) for turn in row["turns"]]
        served.append(max(each["policy_version"] for each in turns))
    assert served == [*range(100)]
    first, last = scores[0], fmean(scores[-2:])
    assert (last > 3 * first) if not more else (abs(last - first) < 0.1), printed
