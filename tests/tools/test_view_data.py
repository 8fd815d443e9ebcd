"""rl-core view: folders of unusual runs, the values of tokens, and omissions of a report.
test_view.py has the usual."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import yaml
from view_parts import (
    NEW,
    answers,
    report_of,
    said,
    small_run,
    trajectory,
    write_metrics,
    write_step,
)

from rl_core.data.rows import write_whole
from rl_core.run.saving.run_files import write_trajectories
from rl_core.tools.viewer import server
from rl_core.tools.viewer.data import RunFolder, matching
from rl_core.tools.viewer.page import make_page
from rl_core.tools.viewer.tokens import shown_episode
from rl_core.types import Completion, Turn


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path)


def test_a_line_of_metrics_is_read_when_it_is_complete(run):
    file = run.path / "metrics.jsonl"
    write_metrics(run.path, [{"step": 2, "learn/policy/loss": 0.0}], "a")
    text = file.read_text()
    file.write_text(text[:-9])
    (run.path / "warnings.jsonl").write_text('{"step": 1, "text": "a"}\n{"step": 2, "te')
    run.refresh()
    assert [row["step"] for row in run.rows] == [one["step"] for one in run.warnings] == [1]
    with open(file, "a") as more:
        more.write(text[-9:])
    run.refresh()
    assert run.curves() == {
        "rollout/policy/reward_mean": [(1, 0.5)],
        "learn/policy/loss": [(2, 0.0)],
    }


def test_a_resumed_run_is_read_anew_where_its_files_are_as_long_as_before(run):
    metrics, file = run.path / "metrics.jsonl", run.path / "rollouts/step_000001.jsonl.zst"
    write_step(run.path, 1, [trajectory(n, reward=2.0) for n in range(4)])
    run.refresh()
    size = file.stat().st_size
    write_whole(metrics, metrics.read_text().replace("0.5", "0.7") + '{"step": 2}\n')
    write_step(run.path, 1, [trajectory(n, reward=3.0) for n in range(4)])
    assert file.stat().st_size == size
    run.refresh()
    assert [row.get("rollout/policy/reward_mean") for row in run.rows] == [0.7, None]
    assert {e.reward for e in matching(run.entries, kind="train")} == {3.0} and run.revision == 2


def test_rollouts_are_read_newest_first_and_once(run):
    for step in (999_999, 1_000_000):
        write_step(run.path, step, [trajectory(step)])
    assert [(run.refresh(-1.0), len(run.entries)) for _ in range(5)] == [
        *((False, n) for n in (1, 2, 6, 7)),
        (True, 7),
    ]
    assert [e.step for e in run.entries] == [1_000_000, 999_999, 1, 1, 1, 1, 1]


def test_evaluations_of_several_sets_are_told_apart(run):
    for name in ("greedy_aime", "sampled_maths_aime", "greedy_maths.v2.rank_00001"):
        write_step(run.path, 2, [trajectory(0)], f"eval_{{:06d}}_{name}")
    run.refresh()
    assert {e.kind for e in matching(run.entries, step=2)} == {
        "greedy aime",
        "sampled maths_aime",
        "greedy maths.v2",
    }


def test_calls_of_tools_are_searched(run):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Malmö"}}}
    row = trajectory(0, messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    write_step(run.path, 2, [row, trajectory(1)])
    run.refresh()
    assert [e.step for e in run.search("malmö", run.entries)] == [2]


def test_an_advantage_is_over_an_actors_player_and_step(run):
    def row(n, reward, **more):
        return trajectory(n, group_id="g", reward=reward, **more)

    others = [row(0, 50.0, actor="bob"), row(0, 60.0, player="black"), row(0, 70.0, env="digits")]
    failed = row(2, None, status="failed", error="why")
    write_step(run.path, 2, [row(0, 1.0), row(1, 4.0), failed, *others])
    write_step(run.path, 3, [row(0, 80.0)])
    write_step(run.path, 2, [row(0, 90.0)], "eval_{:06d}_greedy")
    run.refresh()
    ours = matching(run.entries, step=2)
    values = [shown_episode(run, e)["turns"][0]["values"].get("advantage") for e in ours]
    assert values == [[-1.5] * 3, [1.5] * 3, *[None] * 5]  # failed, alone in their groups, held out


def test_an_advantage_is_over_the_episodes_of_its_own_group_alone(run):
    rewards = {"train/0/0": (1.0, 4.0), "train/0/1": (10.0, 12.0), "train/0/2": (7.0, 7.0)}
    rows = [
        trajectory(n, group_id=group, reward=r)
        for group, ours in rewards.items()
        for n, r in enumerate(ours)
    ]
    write_step(run.path, 2, rows)
    run.refresh()
    ours = matching(run.entries, step=2)
    values = [shown_episode(run, e)["turns"][0]["values"]["advantage"][0] for e in ours]
    assert values == [-1.5, 1.5, -1.0, 1.0, 0.0, 0.0]


def test_each_token_has_its_own_logprob_and_version(run, tiny_model):
    done = Completion(
        token_ids=[20, 21, 22, 23],
        logprobs=[-0.1, -0.2, -0.3, -0.4],
        text="",
        finish_reason="stop",
        policy_version=3,
        newer_versions=[(1, 4), (3, 6)],
    )
    write_step(
        run.path,
        2,
        [trajectory(0, actor="alice", turns=[Turn(new_ids=[9], is_fresh=True, completion=done)])],
    )
    ours = {"bob": {"model": str(tiny_model)}, "alice": {"lora_base": "bob"}}
    (run.path / "config.yaml").write_text(yaml.safe_dump({"actors": ours}))
    (run.path / "tokens").mkdir()
    # A token too few.
    recorded = {"turns": [{"logprobs": [-0.15, -0.2, None, -0.5], "ratios": [1.0, 2.0, 3.0]}]}
    write_trajectories(run.path / "tokens/step_000002.jsonl.zst", [recorded])
    run.refresh()
    [turn] = shown_episode(run, matching(run.entries, step=2)[0])["turns"]
    assert turn["values"] == {
        "logprob": [-0.1, -0.2, -0.3, -0.4], "version": [3, 4, 4, 6],
        "gap": [-0.05, 0.0, None, -0.1],
    }  # fmt: skip
    # By the tokenizer of bob's model.
    assert turn["num_new"] == 1 and len(turn["texts"]) == 5 and all(turn["texts"])


# The server and the page


def test_a_live_run_gives_new_rows_and_keeps_its_panels(run):
    write_metrics(run.path, [{"step": 2, "learn/policy/grad_norm": 0.123456}], "a")
    _, (_, text) = answers(run.path, (NEW, {}), ("/api/0/new?revision=0&rows=1&entries=5", {}))
    news = json.loads(text)
    assert (news["rows"], news["entries"]) == ([[2, 0.12346]], [])
    assert news["panels"].keys() == {"reward", "gradient norm"}
    assert "(reward); healthy: rises" in news["about"]["rollout/policy/reward_mean"]


def test_what_was_seen_of_a_run_before_it_was_resumed_counts_for_nothing(run):
    write_step(run.path, 1, [trajectory(n) for n in range(150)])
    (run.path / "rollouts/eval_000001_greedy.rank_00001.jsonl.zst").unlink()
    result = answers(run.path, (NEW, {}), ("/api/0/new?revision=7&rows=1&entries=140", {}))
    news = json.loads(result[1][1])
    assert (len(news["entries"]), len(news["rows"])) == (150, 1)


def test_a_search_goes_on_where_the_time_ended(run, monkeypatch):
    write_step(
        run.path,
        1,
        [trajectory(n, messages=[{"role": "user", "content": f"x{n % 70}x"}]) for n in range(150)],
    )
    run.read_rollouts(run.rollouts()[-1:])
    ask = {"q": "X65x", "first": "0", "revision": "0"}
    complete = {"found": [65, 135], "next": None}
    assert server.search(run, SimpleNamespace(query=ask)) == complete
    monkeypatch.setattr(server, "SLICE_S", -1.0)
    result = []
    for _ in range(3):
        piece = server.search(run, SimpleNamespace(query=ask))
        result.append(piece["found"])
        ask["first"] = str(piece["next"])
    assert result == [[], [65], [135]] and ask["first"] == "None"


def test_the_name_of_a_run_cannot_end_the_title():
    page = make_page({"runs": [{"name": "</title><script>&lt;", "config": {}}]})
    assert re.search("<title>(.*?)</title>", page)[1].startswith(
        "&lt;/title&gt;&lt;script&gt;&amp;lt;"
    )


def test_the_page_may_run_only_its_own_scripts_and_ask_only_its_own_server():
    policy = re.search('Content-Security-Policy" content="(.*?)"', make_page({"runs": []}))[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("script-src").count("'sha256-") == 2 and "unsafe" not in policy.replace(
        "style-src 'unsafe", ""
    )
    assert rules == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
    }


# The report


def test_a_report_of_a_long_run_keeps_all_evaluations(run):
    rows = [{"step": step, "learn/policy/loss": step / 7} for step in range(1, 2501)]
    rows += [{"step": step, "eval/letters/greedy_score": 0.5} for step in range(100, 2501, 100)]
    write_metrics(run.path, sorted(rows, key=lambda row: row["step"]))
    data = report_of(run.path)
    names = ["step", *data["report"][0]["news"]["names"]]
    shown = [dict(zip(names, row, strict=True)) for row in data["report"][0]["news"]["rows"]]
    assert [row["step"] for row in shown if row["eval/letters/greedy_score"]] == [
        *range(100, 2501, 100)
    ]
    assert 800 < len(shown) < 1030 and "one step in 3;" in data["note"]


def test_a_report_of_text_that_is_all_markup_is_small_too(run):
    for step in range(1, 9):
        messages = [{"role": "assistant", "content": "<" * 10_000}]
        write_step(
            run.path, step, [trajectory(n, group_id="g", messages=messages) for n in range(8)]
        )
    data = report_of(run.path)
    assert (run.path / "report.html").stat().st_size < 1_000_000 and "more did not fit" in data[
        "note"
    ]
    assert len(data["report"][0]["news"]["entries"]) == len(data["report"][0]["episodes"]) > 1


def test_a_report_has_first_and_last_step_and_few_tokens(run):
    for step in range(2, 21):
        write_step(run.path, step, [trajectory(0, turns=[said(3000 if step == 20 else 2)])])
    [ours] = report_of(run.path)["report"]
    assert {1, 20} <= {entry[1] for entry in ours["news"]["entries"]} and len(
        ours["news"]["entries"]
    ) < 20
    assert ours["episodes"][-1]["turns"] == [] and "left out" in ours["episodes"][-1]["note"]


def test_a_folder_with_metrics_alone_is_a_run(tmp_path):
    write_metrics(
        tmp_path, [{"step": 1, "learn/policy/loss": None}, {"step": 2, "learn/policy/loss": None}]
    )
    only = RunFolder(tmp_path)
    assert (
        only.refresh()
        and not only.entries
        and not only.config
        and not only.is_live
        and not only.warnings
    )
    [ours] = report_of(tmp_path)["report"]
    assert ours["news"]["rows"] == [[1], [2]] and ours["news"]["panels"] == {}
    assert ours["episodes"] == []


def test_a_run_that_used_up_its_rows_in_fewer_steps_is_done(tmp_path):
    (tmp_path / "config.yaml").write_text("num_steps: 2\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 1.0}\n')
    assert RunFolder(str(tmp_path)).facts["state"] == "ended early"
    for end, state in (
        ('{"step": 1}', "done"),
        ('{"num_steps": 1}', "done"),
        ('{"num_steps": 2}', "ended early"),
        ('{"num_steps": 2, "step": 1, "signal": "SIGTERM"}', "stopped"),
        ("[]", "ended early"),
    ):
        (tmp_path / "end.json").write_text(end)
        assert RunFolder(str(tmp_path)).facts["state"] == state, end
