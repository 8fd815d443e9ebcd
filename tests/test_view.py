"""rl-core view: what it reads of a run's folder, what its server gives away, and the report. test_view_page.py has the page."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, decoders, models

from rl_core.data.rows import write_trajectories
from rl_core.tools.view import main
from rl_core.tools.view.data import RunFolder, matching, panels_of
from rl_core.tools.view.report import write_at_end
from rl_core.tools.view.server import LOCAL, Viewer
from rl_core.tools.view.tokens import texts
from rl_core.types import Completion, Trajectory, Turn

HOSTILE = 'x\n"], "turns": [{"token_ids": [1, 2]}], "reward": 5, "messages": [ \u2028</script><script>'


def said(num: int, text: str = "hi") -> Turn:
    done = Completion(token_ids=[*range(num)], logprobs=[-0.5] * num, text=text, finish_reason="stop", policy_version=0)
    return Turn(new_ids=[7, 8], is_fresh=True, completion=done)


def trajectory(n: int, **more) -> Trajectory:
    messages = [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"Reply {n}"}]
    given = {"messages": messages, "turns": [said(3), said(2, f"Reply {n}")], "reward": n / 4}
    given |= {"task_id": f"train/{n}", "group_id": "train/0/0", "index": n} | more
    return Trajectory(env="letters", **given)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    write_trajectories(tmp_path / "rollouts/step_000001.jsonl.zst", [trajectory(n) for n in range(4)])
    failed = trajectory(4, reward=None, status="failed", error="the hook took too long", turns=[])
    write_trajectories(tmp_path / "rollouts/eval_000001_greedy.rank_00001.jsonl.zst", [failed])
    write_metrics(tmp_path, [{"step": 1, "rollout/policy/reward_mean": 0.5}])
    return RunFolder(tmp_path)


def write_metrics(folder, rows, mode="w"):
    with open(folder / "metrics.jsonl", mode) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_the_index_says_what_each_trajectory_is(run):
    assert run.refresh()
    [last] = matching(run.entries, step=1, kind="train", index=3)
    assert (last.task, last.env, last.actor, last.reward) == ("train/3", "letters", "policy", 0.75)
    assert (last.num_turns, last.num_tokens, last.preview) == (2, 5, "Reply 3")
    assert run.episode(last)["turns"][0]["new_ids"] == [7, 8]
    [failed] = matching(run.entries, reason="TOO LONG")
    assert (failed.kind, failed.status, failed.reward, failed.num_turns) == ("greedy", "failed", None, 0)
    assert [e.index for e in matching(run.entries, rewards=(0.25, 0.5))] == [1, 2]


def test_text_that_looks_like_the_file_itself_is_text(run):
    named = [{"role": "user", "content": HOSTILE, "name": HOSTILE, "turns": [1], "reward": 2}]
    row = trajectory(9, messages=named, turns=[said(6, HOSTILE)], error=HOSTILE, reward_parts={HOSTILE: 1.0})
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [row, trajectory(1)])
    run.refresh()
    entry, other = matching(run.entries, step=2)
    assert (entry.num_tokens, entry.error, entry.reward) == (6, HOSTILE, 2.25)
    assert run.episode(entry)["messages"] == named and run.episode(other)["index"] == 1
    assert list(run.search("</SCRIPT>", run.entries)) == [entry]
    assert list(run.search("reply 1", [entry, other])) == [other]


@pytest.mark.parametrize("end", [b"", b"\xff" * 200_000], ids=["cut", "garbled"])
def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(run, end):
    file = run.path / "rollouts/step_000003.jsonl.zst"
    rows = [trajectory(n, messages=[{"role": "user", "content": os.urandom(50_000).hex()}]) for n in range(20)]
    write_trajectories(file, rows)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] + end)
    with open(run.path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 2, "ro\n{"step": 2, "rollout/pol')
    (run.path / "warnings.jsonl").write_text('{"step": 1, "text": "a"}\n{"step": 3, "te')
    assert run.refresh()
    left = matching(run.entries, step=3)
    assert 5 <= len(left) <= 10 and [e.index for e in left] == [*range(len(left))]
    assert run.episode(left[-1])["messages"] == rows[len(left) - 1].messages
    assert [row["step"] for row in run.rows] == [1] and run.warnings == [{"step": 1, "text": "a"}]


def test_a_run_that_goes_on_adds_to_what_was_read_and_a_resumed_one_replaces_it(run):
    run.refresh()
    write_metrics(run.path, [{"step": 2, "learn/policy/loss": None}], "a")
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [trajectory(5)])
    run.refresh()
    assert (len(run.entries), len(run.rows), run.revision) == (6, 2, 0)
    (run.path / "metrics.jsonl").unlink()
    write_metrics(run.path, [{"step": 1, "rollout/policy/reward_mean": 0.75}])
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [trajectory(6), trajectory(7)])
    run.refresh()
    assert run.revision == 2 and run.curves() == {"rollout/policy/reward_mean": [(1, 0.75)]}
    assert [e.index for e in matching(run.entries, step=2)] == [6, 7]


def test_bytes_that_are_no_character_have_a_place_among_the_tokens():
    pieces = ["<0xE6>", "<0xBC>", "<0xA2>", "\u2581a", "b", "<0xFF>"]  # as Llama's vocabulary has them
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert texts(tokenizer, [3, 0, 1, 2, 4]) == [" a", "", "", "\u6f22", "b"]
    for ids in itertools.product(range(6), repeat=4):
        assert [text.count("b") for text in texts(tokenizer, list(ids))] == [n == 4 for n in ids]


def test_every_metric_has_a_panel():
    names = ["rollout/bob/reward_mean", "rollout/bob/maths/reward_mean", "rollout/bob/length_p95", "time/learn_s"]
    names += ["rollout/bob/reward/right", "learn/bob/updates", "time/learn_tokens_per_s"]
    assert panels_of(names) == {
        "reward": {"bob": names[0], "bob/maths": names[1]},
        "parts of the reward": {"bob right": "rollout/bob/reward/right"},
        "length (tokens)": {"bob length_p95": "rollout/bob/length_p95"},
        "time per phase (s)": {"learn": "time/learn_s"},
        "tokens per second": {"learn": "time/learn_tokens_per_s"},
        "learn/bob/updates": {"learn/bob/updates": "learn/bob/updates"},
    }


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no folder of a run"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no such file; did you mean 'nothing'"):
        RunFolder(tmp_path / "nothin")


# The server


def answers(folder, *requests: tuple[str, dict]) -> list[tuple[int, str]]:
    """(status, text) of each request (path, headers) to the server of a run."""

    async def ask():
        found = []
        async with TestClient(TestServer(Viewer([RunFolder(folder)]).app(LOCAL))) as client:
            for path, headers in requests:
                async with client.get(path, headers=headers) as response:
                    found.append((response.status, await response.text()))
        return found

    return asyncio.run(ask())


NEW = "/api/0/new?revision=-1&rows=0&entries=0"


def test_the_server_gives_what_the_page_has_not_seen(run):
    new, more, one = answers(run.path, (NEW, {}), ("/api/0/new?revision=0&rows=1&entries=4", {}),
                             ("/api/0/episode?revision=0&number=1", {}))  # fmt: skip
    new, more, one = (json.loads(text) for _, text in (new, more, one))
    assert new["names"] == ["rollout/policy/reward_mean"] and new["rows"] == [[1, 0.5]]
    assert "reward" in new["about"]["rollout/policy/reward_mean"] and not new["is_live"]
    assert (len(new["entries"]), len(more["entries"]), more["rows"]) == (5, 1, [])
    assert one["turns"][0]["ids"] == [7, 8, 0, 1, 2] and one["turns"][0]["values"]["advantage"] == [-0.125] * 3


def test_numbers_that_are_not_finite_are_null_for_the_browser(run):
    odd = trajectory(0, metrics={"x": float("nan"), "y": float("-inf"), "z": 1.5})
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [odd])
    _, (_, text) = answers(run.path, (NEW, {}), ("/api/0/episode?revision=0&number=0", {}))
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"x": None, "y": None, "z": 1.5}


def test_nothing_but_the_named_runs_can_be_reached(run):
    (run.path / "secret.txt").write_text("secret")
    paths = ["/secret.txt", "/../secret.txt", "/api/0/../../secret.txt", "/api/..%2f..%2fsecret.txt/new", "/%2e%2e/etc"]
    paths += [
        f"/api/1/{NEW[7:]}",
        "/api/-1/new",
        "/api/0/new",
        "/assets/view.js",
        "/api/0/search?revision=5&q=a&first=0",
    ]
    asked = ("revision=0&number=99", "revision=0&number=../1", "revision=5&number=0")
    paths += [f"/api/0/episode?{query}" for query in asked]
    first, *found = answers(run.path, (NEW, {}), *((path, {}) for path in paths))
    assert first[0] == 200
    for path, (status, text) in zip(paths, found, strict=True):
        assert status == 404 and "secret" not in text.replace("secret.txt", ""), path


def test_a_page_elsewhere_cannot_ask_the_server_under_its_own_name(run):
    hosts = ["evil.example:6500", "localhost:6500", "127.0.0.1", "[::1]:1"]
    found = answers(run.path, *((NEW, {"Host": host}) for host in hosts), ("/", {"Host": "evil.example"}))
    assert [status for status, _ in found] == [403, 200, 200, 200, 403]


# The report


def report_of(folder) -> dict:
    assert main([str(folder), "--report", str(folder / "report.html")]) == 0
    text = (folder / "report.html").read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


def test_a_report_of_200_steps_is_small_and_says_what_it_leaves_out(run):
    names = [f"learn/policy/{n}" for n in range(100)]
    write_metrics(run.path, [{"step": step} | dict.fromkeys(names, (step + 1) / 7**5) for step in range(200)])
    for step in range(1, 201, 10):
        turns = [said(1900, "word " * 1900)]
        long = [trajectory(n, group_id=str(n // 8), turns=turns) for n in range(8)]
        write_trajectories(run.path / f"rollouts/step_{step:06d}.jsonl.zst", long)
    data = report_of(run.path)
    assert 1_000_000 < (run.path / "report.html").stat().st_size < 5_000_000
    assert len(data["report"][0]["news"]["rows"]) == 200
    found = re.search(r"curves of all steps; (\d+) conversations of steps ([\d, ]+), of each the group", data["note"])
    assert (
        int(found[1]) == len(data["report"][0]["episodes"]) >= 16
        and found[2].startswith("1, ")
        and found[2].endswith(", 191")
    )
    assert "; more did not fit. " in data["note"]


def test_a_report_shows_the_group_with_signal_and_what_failed(run):
    rows = [trajectory(n, group_id=f"g{n // 4}", reward=float(n in (5, 6))) for n in range(12)]
    rows[11].status, rows[11].reward, rows[11].error = "failed", None, "why"
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", rows)
    [own] = report_of(run.path)["report"]
    assert [e["index"] for e in own["episodes"][-5:]] == [4, 5, 6, 7, 11]


def test_a_report_that_cannot_be_written_is_one_line_and_no_error(run, capsys):
    (run.path / "report.html").mkdir()
    ranks, plan = SimpleNamespace(is_writer=True), SimpleNamespace(chats={})
    asyncio.run(write_at_end(SimpleNamespace(out=run.path, ranks=ranks, plan=plan, writing=None)))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run.path}/report.html was not written: IsADirectoryError")
