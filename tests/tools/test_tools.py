"""rl-core info, show and plot, and the answers to flags of other trainers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from kit import ROOT, metrics

from rl_core.config import known_flags
from rl_core.config.flag_errors import PEERS
from rl_core.run.saving.run_files import write_trajectories
from rl_core.sandbox.isolation import LEVELS
from rl_core.tools.cli import main
from rl_core.tools.info import extras
from rl_core.tools.viewer.data import axis_range, is_constant
from rl_core.types import Trajectory

# Flags of others

OURS = {
    flag.removeprefix("--"): theirs
    for flag, theirs in yaml.safe_load(PEERS.read_text()).items()
    if flag.startswith("--")
}


def test_replay_of_a_run_that_is_not_there_names_the_nearest(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    assert main(["replay", str(tmp_path / "frist"), "--step", "1"]) == 1
    assert f"frist, which is not there; did you mean {tmp_path}/first?" in capsys.readouterr().err


def test_the_names_that_are_answered_with_exist_and_none_is_listed_twice():
    known = {name.replace("NAME", "policy") for name in known_flags()}
    assert {name.split()[0].partition("=")[0] for name in OURS} <= known
    theirs = [name for names in OURS.values() for name in names.split()]
    assert len(theirs) == len(set(theirs)) and not known & set(theirs)


def test_the_page_for_users_of_trl_has_every_argument():
    """The table has the arguments with a flag, lists have the others."""
    import trl

    names = ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward", "Model")
    configs = [getattr(trl, f"{name}Config") for name in names]
    fields = {f.name for config in configs for f in dataclasses.fields(config)}
    rows = ["| TRL | here |", "|---|---|"]
    sentences = {}
    for ours, theirs in yaml.safe_load(PEERS.read_text()).items():
        named = [name for name in theirs.split() if name in fields]
        if not ours.startswith("--"):
            sentences |= dict.fromkeys(named, ours)
            continue
        here = re.sub(r" \((\w+[\w, ]*:?) (--.*)\)", r"`, \1 `\2", ours)
        rows += [f"| {', '.join(f'`{name}`' for name in named)} | `{here}` |"] * bool(named)
    page = (ROOT / "docs/from_trl.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == rows, "\n".join(rows)
    same, needless, missing = (
        set(re.findall(r"`-{0,2}(\w+)`", text))
        for text in re.findall(
            r"^\*\*(?:Equal|Not needed|Missing)\.\*\* (.*?)\n\n", page + "\n", re.M | re.S
        )
    )
    assert same == fields & known_flags().keys()
    none = "rl_core has no counterpart"
    assert missing == {name for name, text in sentences.items() if text == none}
    assert needless == sentences.keys() - missing
    in_table = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert not fields - in_table - same - needless - missing


# Info


def test_info_names_versions_extras_algorithms_and_environments(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"rl_core", "python", "torch"} <= result["versions"].keys() and result["devices"]
    [(level, name)] = result["sandbox"].items()
    assert name == LEVELS.get(level) or level == "none", result["sandbox"]
    assert result["algorithms"][:2] == ["grpo", "dr_grpo"] and result["algorithms"][-1] == "rm"
    assert result["environments"]["envs/sort_digits.py"].startswith("Sort five different digits")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"== algorithms\n  grpo dr_grpo(.*\n)+  envs/maze.py +A square of numbered", text
    )


def test_an_environment_that_does_not_parse_is_listed_with_its_mistake(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/broken.py").write_text("x = 1\ndef reward_fn(:\n")
    monkeypatch.chdir(tmp_path)
    assert main(["info"]) == 0
    assert re.search(r"envs/broken.py  line 2: invalid syntax", capsys.readouterr().out)


def test_an_extra_that_is_missing_comes_with_the_line_that_installs_it():
    wanted = [
        "torch>=2",
        'pytest>=8; extra == "test"',
        'pytest>=8; extra == "y"',
        'no_such_thing>=1; extra == "x"',
        'pytest; extra == "x"',
    ]
    assert extras(wanted) == {"y": "installed", "x": "pip install 'no_such_thing>=1'"}


# Show


@pytest.fixture
def run(tmp_path):
    """Folder of a run with episodes of two steps, one of which failed."""
    (tmp_path / "rollouts").mkdir()
    for step in (1, 12):
        columns = {"answer": "four\x07"}
        result = [episode(step, number, float(number), columns=columns) for number in range(4)]
        result.append(episode(step, 4, None, status="failed", error="x.py:5: it\nbroke\x07"))
        write_trajectories(tmp_path / f"rollouts/step_{step:06d}.jsonl.zst", result)
    write_trajectories(tmp_path / "rollouts/eval_000012_greedy.jsonl.zst", [episode(12, 9, 0.5)])
    return tmp_path


def episode(step, number, reward, **more):
    output = [
        {"role": "user", "content": f"step {step}?"},
        {"role": "assistant", "content": "word " * 40},
    ]
    parts = {} if reward is None else {"right": reward, "form": 0.0}
    fields = {
        "task_id": f"train/{number}",
        "env": "x",
        "group_id": f"train/{step}",
        "index": number,
    }
    return Trajectory(**fields, messages=output, reward=reward, reward_parts=parts, **more)


@pytest.mark.parametrize("flags, shown", [
    ("", [0, 1, 2]), ("--best --num 2", [3, 2]), ("--worst --num 2", [0, 1]), ("--failed", [4]), ("--step 1 --num 1", [0]),
    ("--eval", [9]),
])  # fmt: skip
def test_show_chooses_episodes_of_a_step(run, capsys, flags, shown):
    assert main(["show", str(run), *flags.split(), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == shown
    assert rows[0]["messages"][0]["content"] == ("step 1?" if "--step" in flags else "step 12?")


def test_show_prints_a_conversation_role_by_role(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", str(run), "--best", "--num", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "== policy  train/3  episode 3  step_000012  reward 3 (right 3, form 0)  ok"
    assert (
        lines[:2] == ["[row]", "  answer: four\\x07"]
        and lines[2:5] == ["[user]", "  step 12?", "[assistant]"]
        and len(lines) > 8
        and max(map(len, lines)) <= 60
    )
    assert main(["show", str(run), "--failed"]) == 0
    assert "  reason: x.py:5: it\\nbroke\\x07\n" in capsys.readouterr().out


def test_show_says_that_no_episode_failed(run, capsys):
    assert main(["show", str(run), "--eval", "--step", "12", "--failed"]) == 0
    assert capsys.readouterr().out == f"{run}: no episode failed\n"


def test_show_counts_why_episodes_failed_over_all_steps(run, capsys):
    cause = "r() failed for task train/{0}: x.py:2: KeyError: '{0}'"
    more = [episode(13, n, None, status="failed", error=cause.format(n)) for n in range(3)]
    line = "r() failed for task train/3: x.py:3: KeyError: '0'"
    more.append(episode(13, 3, None, status="failed", error=line))
    write_trajectories(run / "rollouts/step_000013.jsonl.zst", more)
    assert main(["show", str(run), "--reasons"]) == 0
    table = [
        "6 of 14 episodes failed",
        "  failed  steps        reason",
        "       3  13           r() failed: x.py:2: KeyError: '0'  (and 2 other values)",
    ]
    assert capsys.readouterr().out.splitlines() == [
        *table,
        "       2  1 to 12      x.py:5: it\\nbroke\\x07",
        "       1  13           r() failed: x.py:3: KeyError: '0'",
    ]
    assert main(["show", str(run), "--reasons", "--step", "12"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "1 of 5 episodes failed"
    assert main(["show", str(run), "--reasons", "--eval"]) == 0
    assert capsys.readouterr().out == "0 of 1 episodes failed\n"


@pytest.mark.parametrize("flags, says", [
    ("--step 3", "steps with step episodes: 1, 12"), ("--actor bob", "none among bob's episodes of the newest step; --step N"),
])  # fmt: skip
def test_show_says_what_there_is(run, capsys, flags, says):
    assert main(["show", str(run), *flags.split()]) == 1
    assert says in capsys.readouterr().err


def test_show_says_why_a_run_has_no_episodes(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("algorithm: dpo\n")
    assert main(["show", str(tmp_path)]) == 1
    assert "none; --algorithm dpo learns from rows and plays no" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("algorithm: grpo\neval_every: 0\n")
    assert main(["show", str(tmp_path), "--eval"]) == 1
    assert capsys.readouterr().err.endswith(
        "steps with eval episodes: none; the run has --eval_every 0\n"
    )


def test_show_tells_the_range_of_many_steps(tmp_path, capsys):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    for step in range(1, 101):
        (tmp_path / f"rollouts/step_{step:06d}.jsonl.zst").touch()
    assert main(["show", str(tmp_path), "--step", "400"]) == 1
    assert capsys.readouterr().err.endswith("steps with step episodes: 100 from 1 to 100\n")


def test_show_names_the_runs_in_a_folder_that_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("first/run/rollouts").mkdir(parents=True)
    assert main(["show", "first"]) == 1
    assert capsys.readouterr().err == "error: no run in first; first/run is one\n"
    for verb in (
        "show",
        "show --open",
        "view",
        "plot",
        "rescore --env_path x.py",
        "replay --step 1",
    ):
        verb, *flags = verb.split()
        assert main([verb, "first/other", *flags]) == 1
        assert capsys.readouterr().err == (
            "error: no run in first/other, which is not there; first/run is one\n"
        )
    monkeypatch.chdir("first")  # The folder of the name is also this one.
    assert main(["show", "nowhere"]) == 1
    assert capsys.readouterr().err == ("error: no run in nowhere, which is not there; run is one\n")


def test_show_of_what_is_no_run_is_one_line(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "runs").mkdir()
    for name, says in {
        "rows.jsonl": f"row 1 of {tmp_path}/rows.jsonl: no episode of a run; it has prompt",
        "rnus": f"no run in {tmp_path}/rnus, which is not there; did you mean {tmp_path}/runs?",
        "runs": "steps with step episodes: none",
    }.items():
        assert main(["show", str(tmp_path / name)]) == 1
        assert says in capsys.readouterr().err


# Plot

LINE = {
    "rollout/bob/reward_mean": 0.5,
    "rollout/bob/length_mean": 7.0,
    "learn/bob/loss": None,
    "learn/bob/step_kl_nats": 0.1,
}
LINE |= {
    "learn/bob/entropy_nats": 2.0,
    "rollout/amy/reward_mean": 0.25,
    "eval/sort/greedy_score": 0.9,
    "time/step_s": 1.0,
}


def test_plot_draws_a_panel_for_each_kind_of_metric(tmp_path, capsys):
    from rl_core.tools.plot import curves_of

    lines = ({"step": step, **LINE, "learn/bob/loss": step or None} for step in range(3))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = curves_of(tmp_path)
    assert {title: sorted(curves) for title, curves in result.items()} == {
        "reward": ["amy", "bob"],
        "evaluation": ["sort/greedy_score"],
        "loss": ["bob"],
        "KL (nats)": ["bob/step_kl"],
        "entropy (nats)": ["bob"],
        "length (tokens)": ["bob"],
    }
    assert result["loss"]["bob"] == [(1, 1), (2, 2)]
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_reads_a_run_whose_last_line_is_cut_short(tmp_path):
    from rl_core.tools.plot import curves_of

    lines = [json.dumps({"step": step, "rollout/bob/reward_mean": step / 4}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines)[:-9])
    assert curves_of(tmp_path)["reward"]["bob"] == [(1, 0.25), (2, 0.5)]
    assert main(["plot", str(tmp_path)]) == 0


def test_plot_leaves_out_charts_that_are_constant_but_for_rounding(tmp_path, capsys):
    def write(**values) -> None:
        rows = [
            {"step": step, **{name: value(step) for name, value in values.items()}}
            for step in (1, 2, 3)
        ]
        text = "".join(
            json.dumps({name.replace("__", "/"): v for name, v in row.items()}) + "\n"
            for row in rows
        )
        (tmp_path / "metrics.jsonl").write_text(text)

    noise = {
        "learn__bob__loss": lambda step: 1e-9 * (-1) ** step,
        "rollout__bob__length_mean": lambda step: 7 + 1e-8 * step,
    }
    write(rollout__bob__reward_mean=lambda step: step / 4, **noise)
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 0
    assert "constant, and so left out: loss -1e-09, length (tokens) 7\n" in capsys.readouterr().out
    drawn = (tmp_path / "x.svg").read_text()
    assert (
        "<!-- reward -->" in drawn
        and "<!-- loss -->" not in drawn
        and "<!-- length (tokens) -->" not in drawn
    )
    write(**noise)
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 0
    assert (
        "left out" not in capsys.readouterr().out
        and "<!-- loss -->" in (tmp_path / "x.svg").read_text()
    )


def test_an_axis_goes_at_least_over_a_hundredth_of_its_values():
    assert axis_range([100.0, 100.5]) == pytest.approx((99.7475, 100.7525))
    assert axis_range([100.0, 101.1]) is None and axis_range([-1.0, 1.0]) is None
    low, high = axis_range([1e-6] * 3)
    assert 0.9e-6 < low < 1e-6 < high < 1.1e-6
    assert axis_range([0.0]) == (0, 1) and axis_range([1e-10, -1e-10]) == (-0.5e-8, 0.5e-8)
    assert is_constant([0.3, 0.1 + 0.2]) and not is_constant([0.3, 0.30001])


def test_plot_draws_two_runs_of_one_name(tmp_path):
    runs = [tmp_path / "first/grpo", tmp_path / "second/grpo"]
    for run in runs:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "rollout/bob/reward_mean": 0.5}) + "\n"
        )
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "x.svg")]) == 0
    drawn = (tmp_path / "x.svg").read_text()
    assert all(f"<!-- {run} bob -->" in drawn for run in runs)


# Init


@pytest.mark.slow
def test_what_init_writes_runs_by_the_commands_that_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    printed = capsys.readouterr().out
    for line in re.findall(r"rl-core (train|check) (.*?)(?: +#.*)?\n", printed):
        assert main([line[0], *line[1].split()]) == 0
    lines = metrics(tmp_path / "first/run")
    rewards = [
        line["rollout/policy/reward_mean"] for line in lines if "rollout/policy/reward_mean" in line
    ]
    assert len(rewards) == 60 and sum(rewards[-5:]) / 5 > 0.6 > sum(rewards[:5])
    assert "warning" not in capsys.readouterr().out.partition("step  1/60")[0]
    assert main(["init", "first/"]) == 1
    assert (
        "first exists already; name another folder: rl-core init first_2" in capsys.readouterr().err
    )
    for line in re.findall(r"rl-core ((?:eval|show|plot)[^,\n]*)", printed):
        assert main(line.split()) == 0
