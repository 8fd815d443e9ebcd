"""rl-core view: files of a run, answers of the server, and the report.
test_view_page.py has the page."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import zstandard
from kit import LETTERS, ROOT, RanksProcess, wait_until, words
from tokenizers import Tokenizer, decoders, models
from view_parts import (
    CHROMIUM,
    HOSTILE,
    NEW,
    answers,
    report_of,
    said,
    small_run,
    trajectory,
    write_metrics,
    write_step,
)

from rl_core.run.display import report_file
from rl_core.tools.viewer.data import RunFolder, matching, panels_of
from rl_core.tools.viewer.tokens import texts


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path)


def test_the_index_says_what_each_trajectory_is(run):
    assert run.refresh()
    [last] = matching(run.entries, step=1, kind="train", index=3)
    assert (last.task, last.env, last.actor, last.reward) == ("train/3", "letters", "policy", 0.75)
    assert (last.num_turns, last.num_tokens, last.preview) == (2, 5, "Reply 3")
    assert run.episode(last)["turns"][0]["new_ids"] == [7, 8]
    [failed] = matching(run.entries, reason="TOO LONG")
    assert (failed.kind, failed.status, failed.reward, failed.num_turns) == (
        "greedy",
        "failed",
        None,
        0,
    )
    assert [e.index for e in matching(run.entries, rewards=(0.25, 0.5))] == [1, 2]


def test_text_that_looks_like_the_file_itself_is_text(run):
    named = [{"role": "user", "content": HOSTILE, "name": HOSTILE, "turns": [1], "reward": 2}]
    row = trajectory(
        9, messages=named, turns=[said(6, HOSTILE)], error=HOSTILE, reward_parts={HOSTILE: 1.0}
    )
    write_step(run.path, 2, [row, trajectory(1)])
    run.refresh()
    entry, other = matching(run.entries, step=2)
    assert (entry.num_tokens, entry.error, entry.reward) == (6, HOSTILE, 2.25)
    assert run.episode(entry)["messages"] == named and run.episode(other)["index"] == 1
    assert list(run.search("</SCRIPT>", run.entries)) == [entry]
    assert list(run.search("reply 1", [entry, other])) == [other]


@pytest.mark.parametrize("end", [b"", b"\xff" * 200_000], ids=["cut", "garbled"])
def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(run, end):
    rows = [
        trajectory(n, messages=[{"role": "user", "content": os.urandom(50_000).hex()}])
        for n in range(20)
    ]
    file = write_step(run.path, 3, rows)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] + end)
    assert run.refresh()
    left = matching(run.entries, step=3)
    assert 5 <= len(left) <= 10 and [e.index for e in left] == [*range(len(left))]
    assert run.episode(left[-1])["messages"] == rows[len(left) - 1].messages


def test_a_run_that_goes_on_adds_to_what_was_read(run):
    run.refresh()
    write_metrics(run.path, [{"step": 2, "learn/policy/loss": None}], "a")
    write_step(run.path, 2, [trajectory(5)])
    run.refresh()
    assert (len(run.entries), len(run.rows), run.revision) == (6, 2, 0)


def test_bytes_that_are_no_character_have_a_place_among_the_tokens():
    # As Llama's vocabulary has them.
    pieces = ["<0xE6>", "<0xBC>", "<0xA2>", "\u2581a", "b", "<0xFF>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert texts(tokenizer, [3, 0, 1, 2, 4]) == [" a", "", "", "\u6f22", "b"]
    for ids in itertools.product(range(6), repeat=4):
        assert [text.count("b") for text in texts(tokenizer, list(ids))] == [n == 4 for n in ids]


def test_every_metric_has_a_panel_and_what_belongs_together_has_one():
    panels = {
        "reward": ["rollout/bob/reward_mean", "rollout/bob/maths/reward_mean"],
        "parts of the reward": ["rollout/bob/reward/right"],
        "evaluation": [
            "eval/letters/greedy_score",
            "eval/maths/aime/bob/pass@8",
            "eval/letters/avg@8",
            "eval/loss",
        ],
        "length (tokens)": ["rollout/bob/length_p95"],
        "entropy (nats)": ["learn/bob/entropy_nats"],
        "KL (nats)": ["learn/bob/step_kl_nats", "learn/bob/ref_kl_nats"],
        "engine-learner mismatch": ["learn/bob/mismatch_kl_nats", "learn/bob/canary_max_diff"],
        "clip fraction": ["learn/bob/clip_frac"],
        "gradient norm": ["learn/bob/grad_norm"],
        "failed, truncated, without signal": ["rollout/bob/failed", "rollout/bob/zero_signal_frac"],
        "staleness (versions)": [
            "rollout/staleness",
            "rollout/staleness_max",
            "rollout/bob/lag_versions",
        ],
        "time per phase (s)": ["time/learn_s"],
        "tokens per second": ["time/learn_tokens_per_s"],
        "memory (GiB)": ["memory/generate_gib", "memory/learn_gib"],
        "fill": ["pack/fill_frac"],
        "learn/bob/updates": ["learn/bob/updates"],
    }
    result = panels_of(name for names in panels.values() for name in names)
    assert {title: sorted(curves.values()) for title, curves in result.items()} == {
        title: sorted(names) for title, names in panels.items()
    }
    assert result["reward"] == {
        "bob": "rollout/bob/reward_mean",
        "bob/maths": "rollout/bob/maths/reward_mean",
    }
    assert result["time per phase (s)"].keys() == result["tokens per second"].keys() == {"learn"}


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no folder of a run"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"not there; did you mean [^ ]*/nothing"):
        RunFolder(tmp_path / "nothin")


# The server


def test_the_server_gives_what_the_page_has_not_seen(run):
    new, more, one = answers(run.path, (NEW, {}), ("/api/0/new?revision=0&rows=1&entries=4", {}),
                             ("/api/0/episode?revision=0&number=1", {}))  # fmt: skip
    new, more, one = (json.loads(text) for _, text in (new, more, one))
    assert new["names"] == ["rollout/policy/reward_mean"] and new["rows"] == [[1, 0.5]]
    assert "reward" in new["about"]["rollout/policy/reward_mean"] and not new["is_live"]
    assert (len(new["entries"]), len(more["entries"]), more["rows"]) == (5, 1, [])
    assert (
        one["turns"][0]["ids"] == [7, 8, 0, 1, 2]
        and one["turns"][0]["values"]["advantage"] == [-0.125] * 3
    )


def test_numbers_that_are_not_finite_are_null_for_the_browser(run):
    odd = trajectory(0, metrics={"x": float("nan"), "y": float("-inf"), "z": 1.5})
    write_step(run.path, 2, [odd])
    _, (_, text) = answers(run.path, (NEW, {}), ("/api/0/episode?revision=0&number=0", {}))
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {
        "x": None,
        "y": None,
        "z": 1.5,
    }


def test_nothing_but_the_named_runs_can_be_reached(run):
    (run.path / "secret.txt").write_text("secret")
    paths = [
        "/secret.txt",
        "/../secret.txt",
        "/api/0/../../secret.txt",
        "/api/..%2f..%2fsecret.txt/new",
        "/%2e%2e/etc",
    ]
    paths += [
        f"/api/1/{NEW[7:]}",
        "/api/-1/new",
        "/api/0/new",
        "/assets/view.js",
        "/api/0/search?revision=5&q=a&first=0",
    ]
    asked = ("revision=0&number=99", "revision=0&number=../1", "revision=5&number=0")
    paths += [f"/api/0/episode?{query}" for query in asked]
    first, *result = answers(run.path, (NEW, {}), *((path, {}) for path in paths))
    assert first[0] == 200
    for path, (status, text) in zip(paths, result, strict=True):
        assert status == 404 and "secret" not in text.replace("secret.txt", ""), path


def test_notes_of_other_pages_are_refused(tmp_path):
    write_step(tmp_path, 1, [trajectory(0)])
    url, local = "/api/0/note?key=a&star=true&text=b", {"Host": "localhost"}
    asked = [(url, local), (url, local | {"X-Rl-Core": "note"}), (url, {"Host": "x.org"})]
    assert [status for status, _ in answers(tmp_path, *asked, method="POST")] == [404, 200, 403]
    assert len((tmp_path / "notes.jsonl").read_text().splitlines()) == 1
    long = url.replace("text=b", "text=" + "b" * 5000)
    [(status, text)] = answers(tmp_path, (long, local | {"X-Rl-Core": "note"}), method="POST")
    assert status == 404 and "a note has at most 4000 bytes" in text


def test_a_page_elsewhere_cannot_ask_the_server_under_its_own_name(run):
    allowed = ["localhost:6500", "LocalHost", "127.0.0.1", "127.0.0.1:80", "[::1]:1", "[::1]"]
    refused = ["evil.example:6500", "evil.example", "evil.example@localhost", "localhost:x", ""]
    refused += ["localhost.evil.example", "localhost/evil.example", "a:b:c", "::1", "[::1"]
    for path in (NEW, "/"):
        result = answers(run.path, *((path, {"Host": host}) for host in allowed + refused))
        assert [status for status, _ in result] == [200] * len(allowed) + [403] * len(refused)


def link_loop(path: Path) -> None:
    path.symlink_to(path.name)


# Entries that may stand where the viewer looks for a file.
NO_FILES = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a loop of links": link_loop,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
READ = ["rollouts/step_000002.jsonl.zst", "metrics.jsonl", "warnings.jsonl", "config.yaml"]
READ += [".lock", "tokens/step_000001.jsonl.zst", "rollouts"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_skipped_and_neither_page_nor_report_waits(kind, name, run):
    path = run.path / name
    if name == "rollouts":
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    NO_FILES[kind](path)
    (page, news), (status, text) = answers(run.path, ("/", {}), (NEW, {}))
    assert page == status == 200, news
    result = json.loads(text)
    assert len(result["entries"]) == (0 if name == "rollouts" else 5)
    assert len(result["rows"]) == (name != "metrics.jsonl")
    # A loop of links is as absent for Path.exists(). These two are looked into, not read.
    is_named = kind != "a loop of links" or name.startswith("rollouts/")
    if name not in (".lock", "rollouts") and not name.startswith("tokens") and is_named:
        assert f"{run.path}: skipped {name}: " in result["lost"]
        assert f"skipped {name}: " in report_of(run.path)["note"]
    else:
        assert report_of(run.path)["report"]
    if name.startswith("tokens"):
        [(status, _)] = answers(run.path, ("/api/0/episode?revision=0&number=0", {}))
        assert status == 404  # nothing is read before the first question


LINES = [
    "[1]",
    "3",
    '"text"',
    "null",
    '{"loss": 1.0}',
    '{"step": "2", "loss": 1.0}',
    '{"step": null}',
    '{"step": true}',
    "[" * 100_000,
    '{"step": 2, "learn/policy/loss": "0.5", "rollout/policy/reward_mean": 0.75}',
    '{"step": 3, "learn/policy/loss": {"a": 1}, "rollout/policy/reward_mean": 1}',
    '{"step": 4, "learn/policy/loss": 1' + "0" * 400 + ', "rollout/policy/reward_mean": NaN}',
]


def test_lines_of_metrics_that_no_run_writes_are_skipped_with_a_note(run):
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write("\n".join(LINES) + "\n")
    (run.path / "warnings.jsonl").write_text('[1]\n"a"\n{"step": 1}\n{"step": 1, "text": "x"}\n')
    [(status, text)] = answers(run.path, (NEW, {}))
    result = json.loads(text)
    assert status == 200 and result["names"] == ["rollout/policy/reward_mean"]
    assert result["rows"] == [[1, 0.5], [2, 0.75], [3, 1.0], [4, None]]
    skipped = "skipped metrics.jsonl: values that are not numbers of a step"
    assert result["lost"] == f"{run.path}: {skipped}"
    assert result["warnings"] == [{"step": 1, "text": "x"}]
    assert result["lost"] in report_of(run.path)["note"]
    for line in LINES:
        (run.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        folder = RunFolder(run.path)
        folder.read_metrics()
        # Text that is not JSON is a line that was cut short.
        assert bool(folder.note) == (not line.startswith("[[")), line


WRONG = [{"reward": "0.5"}, {"index": "1"}, {"env": None}, {"reward": [1]}, {"error": 3}]


def test_trajectories_that_no_run_writes_are_skipped_and_the_others_shown(run):
    file = write_step(run.path, 2, [trajectory(0), trajectory(1)])
    with zstandard.open(file, "rb") as rows:
        first, last = rows.read().splitlines()
    wrong = [json.dumps(json.loads(first) | more).encode() for more in WRONG]
    rows = [first, *wrong, b"{}", b"3", first.replace(b'"role"', b'"rule"'), last]
    file.write_bytes(zstandard.compress(b"\n".join(rows) + b"\n"))
    [(_, text)] = answers(run.path, (NEW, {}))
    result = json.loads(text)
    assert result["lost"].endswith(
        f"step_000002.jsonl.zst: {len(WRONG) + 2} lines that are not trajectories"
    )
    assert len(result["entries"]) == 3 + 5
    assert report_of(run.path)["note"].count(" lines that are not trajectories") == 1


# The report


def test_a_report_of_500_steps_is_below_a_megabyte(run):
    names = [f"learn/policy/{n}" for n in range(100)]
    write_metrics(
        run.path, [{"step": step} | dict.fromkeys(names, (step + 1) / 7**5) for step in range(500)]
    )
    for step in range(1, 501, 25):
        turns = [said(1900, "word " * 1900)]
        long = [trajectory(n, group_id=str(n // 8), turns=turns) for n in range(8)]
        write_step(run.path, step, long)
    data = report_of(run.path)
    assert 500_000 < (run.path / "report.html").stat().st_size < 1_000_000
    assert len(data["report"][0]["news"]["rows"]) == 250
    result = re.search(
        r"curves of one step in 2; (\d+) conversations of steps ([\d, ]+), of each the group",
        data["note"],
    )
    assert (
        int(result[1]) == len(data["report"][0]["episodes"]) >= 8
        and result[2].startswith("1, ")
        and result[2].endswith(", 476")
    )
    assert "; more did not fit. " in data["note"]


def test_a_report_shows_the_group_with_signal_and_what_failed(run):
    rows = [trajectory(n, group_id=f"g{n // 4}", reward=float(n in (5, 6))) for n in range(12)]
    rows[11].status, rows[11].reward, rows[11].error = "failed", None, "why"
    write_step(run.path, 2, rows)
    [ours] = report_of(run.path)["report"]
    assert [e["index"] for e in ours["episodes"][-5:]] == [4, 5, 6, 7, 11]


# The viewer's process waits for a file, as it does on a disk that does not answer.
SLOW = """
import sys, time
from pathlib import Path
while "--report" in sys.argv and not Path(GO_ON).exists():
    time.sleep(0.01)
"""


def slow_viewer(folder: Path) -> str:
    """PYTHONPATH of processes in which the viewer waits for folder/go_on."""
    (folder / "slow").mkdir()
    text = SLOW.replace("GO_ON", repr(str(folder / "go_on")))
    (folder / "slow/sitecustomize.py").write_text(text)
    return f"{folder}/slow:{ROOT}"


def test_a_report_that_cannot_be_written_is_a_warning_and_no_error(
    run, capsys, monkeypatch, tmp_path
):
    report_file.write_report(run.path)
    assert not capsys.readouterr().err
    (run.path / "report.html").unlink()
    (run.path / "report.html").mkdir()
    report_file.write_report(run.path)
    [line] = capsys.readouterr().err.splitlines()
    start = f"warning: {run.path}/report.html was not written: [Errno 21] Is a directory"
    assert line.startswith(start)
    monkeypatch.setattr(report_file, "PATIENCE_S", 0.0)
    monkeypatch.setattr(report_file, "MAX_WAIT_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", slow_viewer(tmp_path))
    report_file.write_report(run.path)
    out, [line] = (text.splitlines() for text in capsys.readouterr())
    assert (
        out == [f"writing {run.path}/report.html"]
        and "was not written: it took too long; rl-core view" in line
    )


def test_a_viewer_that_is_killed_or_cannot_start_is_a_warning(capsys, monkeypatch, tmp_path):
    out = tmp_path / "a run"
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report_file.write_report(out)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    report_file.write_report(out)
    killed, missing = capsys.readouterr().err.splitlines()
    assert "report.html was not written: the viewer ended with status -9; " in killed
    assert f"was not written: [Errno 2] No such file or directory: '{sys.executable}'; " in missing
    assert f"; rl-core view '{out}' --report '{out}/report.html' does it again" in killed


def test_no_rank_waits_for_the_report(tiny_model, tmp_path):
    # An environment's file runs in the run's process, whose children are slow.
    path = f"import os\nos.environ['PYTHONPATH'] = {slow_viewer(tmp_path)!r}\n"
    (tmp_path / "letters.py").write_text(LETTERS + path)
    sizes = "--group_size 2 --tasks_per_step 2 --num_steps 1 --max_tokens 6 --max_prompt_tokens 16"
    where = words(
        "--model",
        tiny_model,
        "--env_path",
        tmp_path / "letters.py",
        "--out",
        tmp_path / "out",
        sizes,
    )
    ranks = RanksProcess(2, "-m", "rl_core.train", *where, env={"KIT_REPORT": "1"})
    children = Path(f"/proc/{ranks.pid}/task/{ranks.pid}/children")
    try:
        wait_until(lambda: (tmp_path / "out/metrics.jsonl").exists(), "a step")
        wait_until(lambda: len(children.read_text().split()) == 1, "the end of the other rank")
        assert ranks.poll() is None and not (tmp_path / "out/report.html").exists()
        (tmp_path / "go_on").touch()
        assert ranks.wait(60) == 0, ranks.both()
    finally:
        ranks.signal(signal.SIGKILL)
    assert "conversations of steps 1, " in (tmp_path / "out/report.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_loads_and_its_mean_reward_is_over_episodes(serve, page_of, tmp_path):
    several = [trajectory(0, reward=1.0) for _ in range(3)]
    others = [trajectory(1, reward=0.0), trajectory(2, reward=0.5)]
    write_step(tmp_path, 1, [*several, *others])
    write_metrics(tmp_path, [{"step": 1}])
    page = page_of(serve(tmp_path))
    page.get_by_role("link", name="Conversations").click()
    page.get_by_text("5 of 5 trajectories, mean reward 0.5").wait_for()
