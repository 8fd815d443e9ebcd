"""rl-core eval and collect: models play episodes without a learner."""

from __future__ import annotations

import importlib.util
import json
import shutil
from math import comb
from pathlib import Path

import pytest
import yaml
from kit import STOP, ForkedProcess, load_rows, metrics, run, trajectories, words
from safetensors.torch import load_file, save_file
from stage import endpoint
from test_api_actor import reply, serving
from transformers import AutoTokenizer

from rl_core.tools.cli import main
from rl_core.tools.eval import mean, pass_at_k, scores, shown
from rl_core.types import Trajectory

SIZES = "--max_tokens 8 --max_prompt_tokens 64 --tasks_per_step 4 --group_size 2 " + STOP
FLAGS = "--env_path {dir}/letters.py " + SIZES


# Estimators


@pytest.mark.parametrize("n, right, k, value", [
    (1, 1, 1, 1.0), (4, 0, 2, 0.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (5, 2, 3, 0.9), (10, 3, 5, 1 - 21 / 252), (4, 3, 2, 1.0),
])  # fmt: skip
def test_pass_at_k_is_the_unbiased_estimator(n, right, k, value):
    assert pass_at_k(n, right, k) == pytest.approx(value)
    # The mean over all subsets of k samples.
    wrong = comb(n - right, k) / comb(n, k)
    assert pass_at_k(n, right, k) == 1 - wrong


def test_an_interval_is_1_96_standard_errors_of_the_mean_over_tasks():
    score = mean([2.0, 0.0, 2.0, 2.0])  # standard deviation 1
    assert (score.value, score.num_tasks) == (1.5, 4)
    assert score.ci95 == pytest.approx((0.52, 2.48))
    assert shown(score) == "1.5 ± 0.98"
    assert mean([0.5]).ci95 is mean([0.5, 0.5]).ci95 is None


@pytest.mark.parametrize("right, wrong, ci95, text", [
    (3, 1, (0.3006, 0.9544), "0.75 [0.3, 0.95]"),  # R: prop.test(3, 4, correct = FALSE)
    (256, 0, (256 / (256 + 1.96**2), 1.0), "1 [0.99, 1]"),
    (0, 256, (0.0, 1.96**2 / (256 + 1.96**2)), "0 [0, 0.015]"),
])  # fmt: skip
def test_the_interval_of_a_share_is_wilsons(right, wrong, ci95, text):
    score = mean([1.0] * right + [0.0] * wrong)
    assert score.ci95 == pytest.approx(ci95, abs=1e-4)
    assert shown(score) == text


def test_scores_of_known_rewards():
    def episodes(rewards, size):
        places = (
            {"task_id": f"t{n // size}", "env": "x", "group_id": f"g{n // size}", "index": n}
            for n in range(99)
        )
        return [
            Trajectory(**fields, reward=reward, status="ok" if reward is not None else "failed")
            for fields, reward in zip(places, rewards, strict=False)
        ]

    result = scores(
        episodes([1.0, 0.5], 1), episodes([1, 0, 0, 0, 1, 1, 0.5, None], 4), [1, 2, 4], 4, 1.0
    )
    assert {name: round(score.value, 4) for name, score in result.items()} == {
        "greedy_score": 0.75, "greedy_pass": 0.5, "avg@4": 0.5417, "pass@1": 0.4583,
        "pass@2": 0.75, "pass@4": 1.0, "tokens": 0.0, "truncated": 0.0, "failed": 0.1,
    }  # fmt: skip
    assert result["pass@4"].num_tasks == 1  # the other task has three samples that can be scored


# Eval


@pytest.mark.parametrize("flags, models, where", [
    ("--model {model} --env_path {dir}/letters.py", ("hf/policy", ""), {"letters": "letters"}),
    ("--actors.bob.model {model} --actors.alice.model {other} --env_path {dir}/talk.py --max_turns 3", ("",),
     {"talk/bob": "talk/bob", "talk/alice": "talk/alice"}),
])  # fmt: skip
def test_eval_of_a_runs_model_gives_the_scores_that_the_run_logged(
    places, tmp_path, capsys, flags, models, where
):
    learns = "--num_steps 2 --eval_every 2 --optim.lr 0.01 --eval.pass_reward 0.6"
    out = run(tmp_path / "run", flags.format(**places), SIZES, learns)
    first, *_, last = metrics(out)
    for model in (str(out / name) for name in models):
        capsys.readouterr()
        assert main(["eval", model, "--json", "--out", str(tmp_path / "x.json")]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads((tmp_path / "x.json").read_text())
        for name, logged in where.items():
            for metric in ("greedy_score", "greedy_pass", "avg@4", "pass@4"):
                result = printed[model][name][metric]["value"]
                assert result == pytest.approx(last[f"eval/{logged}/{metric}"], abs=1e-6), metric
            assert first[f"eval/{logged}/avg@4"] != last[f"eval/{logged}/avg@4"]  # it learned


def test_eval_asks_an_endpoint(places, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    with serving((200, reply("abc"))) as server:
        flags = words(FLAGS.format(**places), "--eval.samples 1 --json")
        assert main(["eval", f"gpt@{server.url}", *flags]) == 0
        result = json.loads(capsys.readouterr().out)[f"gpt@{server.url}"]["letters"]
        assert result["greedy_score"]["value"] == result["avg@1"]["value"] == pytest.approx(0.294)
        assert len(server.requests) == 16 and server.requests[0][2]["model"] == "gpt"


def test_eval_shows_several_models_and_environments_side_by_side(places, capsys, monkeypatch):
    monkeypatch.setattr("rl_core.tools.model_player.PROGRESS_S", 0.0)
    flags = words(
        FLAGS.format(**places).replace("letters.py", "letters.py,{dir}/ask.py".format(**places))
    )
    models = [places["model"], places["other"]]
    assert (
        main(["eval", *models, *flags, "--eval.samples", "2", "--k", "2", "--eval.num_tasks", "3"])
        == 0
    )
    printed, progress = capsys.readouterr()
    head, *lines, about = printed.splitlines()
    plays = "3 tasks, 1 greedy and 2 sampled episodes of each ..."
    for model in models:
        assert f"{model} in letters: {plays}\n{model} in ask: {plays}\n" in progress
    for label in ("greedy/letters", "sampled/ask"):
        assert progress.count(f"{label}: 2 of 3 tasks\n") == len(models)
    assert head.split() == ["environment", "metric", *models]
    assert about == "pass: a reward of at least 1 (--eval.pass_reward)"
    named = [tuple(line.split()[:2]) for line in lines]
    metrics = [
        "tasks",
        "greedy_score",
        "greedy_pass",
        "avg@2",
        "pass@2",
        "tokens",
        "truncated",
        "failed",
    ]
    assert named == [(env, name) for env in ("letters", "ask") for name in metrics]
    values = lines[3].split()[2:]
    assert values[1] == values[4] == "±" and values[0] != values[3]


def test_eval_needs_no_tracker_and_no_optimizer_of_the_run(places, tmp_path, monkeypatch, capsys):
    flags = (
        "--model {model} --env_path {dir}/letters.py --num_steps 1 --eval.samples 0 --eval_every 1 "
        "--keep_best greedy_score"
    )
    out = run(tmp_path / "run", flags.format(**places), SIZES)
    config = yaml.safe_load((out / "config.yaml").read_text()) | {"trackers": "not_here:Tracker"}
    config["optim"]["name"] = "adamw8bit"
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    capsys.readouterr()
    assert (
        main(
            ["eval", str(out), str(out / "best/policy"), "--out", str(tmp_path / "new/scores.json")]
        )
        == 0
    )
    best = json.loads((out / "best/best.json").read_text())["greedy_score"]
    result = json.loads((tmp_path / "new/scores.json").read_text())
    assert result[str(out / "best/policy")]["letters"]["greedy_score"]["value"] == pytest.approx(
        best
    )


@pytest.mark.parametrize("argv, status, says", [
    (["--k", "a"], 1, "--k=a must be a valid integer"),
    (["--k", "5"], 1, "--k 5 must be from 1 to --eval.samples=4"), (["--optim.lr", "-1"], 1, "--optim.lr=-1"),
    (["--algorithm", "sft"], 1, "name an environment by --env_path"),
])  # fmt: skip
def test_eval_refuses(places, capsys, argv, status, says):
    assert main(["eval", places["model"], *words(FLAGS.format(**places)), *argv]) == status
    assert says in capsys.readouterr().err


def test_eval_without_an_environment_or_rows_says_so(places, tmp_path, capsys):
    (tmp_path / "x.py").write_text("def reward_fn(completion): return 1.0\n")
    assert main(["eval", places["model"], "--env_path", str(tmp_path / "x.py")]) == 1
    assert "no held-out rows: --data.eval is missing" in capsys.readouterr().err
    (tmp_path / "hf/policy").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    for model in (tmp_path, tmp_path / "hf/policy"):
        assert main(["eval", str(model)]) == 1
        assert f"{model} is of a run of --algorithm sft" in capsys.readouterr().err


STOPS = """
import os
from pathlib import Path
from letters import load_tasks
HERE = Path(__file__).parent
async def reward_fn(completion, task):
    with open(HERE / "scored", "a") as file:
        file.write(f"{task.id}\\n")
    left = HERE / "left"
    if left.exists():
        left.write_text(str(int(left.read_text()) - 1))
        if left.read_text() == "0":
            left.unlink()
            os.kill(os.getpid(), 9)
    return len(completion) / 10
"""


def test_a_killed_eval_goes_on_and_plays_no_task_twice(places, tmp_path, capsys):
    (tmp_path / "letters.py").write_text(Path(f"{places['dir']}/letters.py").read_text())
    (tmp_path / "stops.py").write_text(STOPS)
    flags = words(
        "--env_path", tmp_path / "stops.py", SIZES, "--eval.samples 0 --rollout.max_concurrent 1"
    )
    models = [places["model"], places["other"]]
    command = ["eval", *models, *flags, "--folder", str(tmp_path / "out")]
    num_tasks = 8
    (tmp_path / "left").write_text(str(num_tasks + 3))  # In the second model's third task.
    killed = ForkedProcess("-m", "rl_core.tools.cli", *command)
    killed.communicate(timeout=60)
    assert killed.returncode in (-9, 137)
    before = (tmp_path / "scored").read_text().split()
    assert len(before) == num_tasks + 3
    [torn] = [
        f
        for f in (tmp_path / "out/episodes").glob("*.jsonl")
        if len(f.read_text().splitlines()) < 8
    ]
    with open(torn, "a") as file:
        file.write('{"label": "greedy/stops", "num')  # The machine died in a write.
    assert main(command) == 0
    # The task under way when it was killed is the only one that is scored a second time.
    assert len((tmp_path / "scored").read_text().split()) == 2 * num_tasks + 1
    result = json.loads((tmp_path / "out/scores.json").read_text())
    assert main(["eval", *models, *flags, "--out", str(tmp_path / "at_once.json")]) == 0
    assert result == json.loads((tmp_path / "at_once.json").read_text())
    head, _, *lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert head == f"| environment | metric | {models[0]} | {models[1]} |" and len(lines) == 6
    capsys.readouterr()
    assert main([*command, "--max_tokens", "4"]) == 1
    assert "--max_tokens 8, and this is 4; name another folder" in capsys.readouterr().err


def test_a_model_that_fails_leaves_the_others_their_scores(places, tmp_path, capsys):
    flags = words(
        FLAGS.format(**places), "--eval.samples 0 --eval.num_tasks 2 --folder", tmp_path / "out"
    )
    assert (
        main(["eval", str(tmp_path / "none"), places["model"], "--model", places["model"], *flags])
        == 1
    )
    result = json.loads((tmp_path / "out/scores.json").read_text())
    assert result[places["model"]]["letters"]["greedy_score"]["num_tasks"] == 2
    assert list(result["errors"]) == [str(tmp_path / "none")]
    assert "failed: " in (tmp_path / "out/table.md").read_text()
    capsys.readouterr()
    missing = [str(tmp_path / name) for name in ("none", "neither")]
    assert main(["eval", *missing, "--model", places["model"], *flags]) == 1
    assert not capsys.readouterr().out  # No table without scores.


# Collect


def test_sft_reads_collected_episodes_and_continues_them(places, tmp_path, capsys):
    out = tmp_path / "out"
    command = [
        "collect",
        places["model"],
        *words(FLAGS.format(**places)),
        "--out",
        str(out),
        "--min_reward",
        "0.4",
    ]
    assert main(command) == 0
    files = sorted((out / "rollouts").glob("step_*"))
    assert len(files) == 2  # eight tasks, four in a file
    before = [trajectories(file) for file in files]
    assert all(row["reward"] >= 0.4 for rows in before for row in rows)
    rows = load_rows(str(out / "rollouts"))
    assert len(rows) == sum(map(len, before)) > 0
    run(
        tmp_path / "sft",
        "--algorithm sft --num_steps 1 --tasks_per_step 2 --max_prompt_tokens 64 --max_tokens 8",
        "--model",
        places["model"],
        "--data.train",
        out / "rollouts",
    )
    files[1].unlink()
    written = files[0].stat().st_mtime_ns
    assert main(command) == 0
    assert (
        files[0].stat().st_mtime_ns == written and [trajectories(file) for file in files] == before
    )
    assert main([*command[:-1], "0.5"]) == 1
    assert "--data.min_reward 0.4 -> 0.5" in capsys.readouterr().err


def test_a_file_of_which_nothing_is_kept_is_not_played_again(places, tmp_path, capsys):
    command = [
        "collect",
        places["model"],
        *words(FLAGS.format(**places)),
        "--out",
        str(tmp_path),
        "--min_reward",
        "99",
    ]
    assert main([*command, "--num_tasks", "3"]) == 0
    assert capsys.readouterr().out.startswith("1/1  kept 0 of 8  reward ")
    assert main([*command, "--num_tasks", "3"]) == 0 and not capsys.readouterr().out


def test_a_file_in_which_the_model_never_speaks_holds_nothing(places, tmp_path, capsys):
    (tmp_path / "either.py").write_text(
        (Path(places["dir"]) / "talk.py").read_text() + "turns = '(bob/alice)'\n"
    )
    models = (
        "--actors.bob.model {model} --actors.alice.model {model} --actors.alice.train false "
        "--env_path"
    )
    flags = words(
        models.format(**places), tmp_path / "either.py", SIZES, "--tasks_per_step 1 --group_size 1"
    )
    assert main(["collect", places["model"], *flags, "--out", str(tmp_path / "out")]) == 0
    kept = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert set(kept) == {"kept 0 of 0", "kept 1 of 1"} and len(kept) == 8


def test_what_an_endpoint_says_is_collected_as_messages(places, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    with serving((200, reply("abc"))) as server:
        command = [
            "collect",
            f"gpt@{server.url}",
            *words(FLAGS.format(**places)),
            "--out",
            str(tmp_path / "out"),
        ]
        assert main(command) == 0
    rows = load_rows(str(tmp_path / "out/rollouts"))
    assert len(rows) == 16 and [message["content"] for message in rows[0]["messages"]][1:] == [
        "abc"
    ]
    sft = "--algorithm sft --num_steps 1 --tasks_per_step 2 --max_prompt_tokens 64 --max_tokens 8"
    run(
        tmp_path / "sft", sft, "--model", places["model"], "--data.train", tmp_path / "out/rollouts"
    )


# Folders that are continued


def spoil_a_weight(file: Path) -> None:
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})


CHANGES = {
    "weights of the model": ("me/model.safetensors", spoil_a_weight, "actor bob weights "),
    "weights of the opponent": ("you/model.safetensors", spoil_a_weight, "actor alice weights "),
    "template": (
        "t.jinja",
        lambda file: file.write_text(file.read_text() + " "),
        "actor bob weights ",
    ),
    "reward": (
        "env.py",
        lambda file: file.write_text(file.read_text() + "# another"),
        "code of env ",
    ),
    "a row": ("rows.jsonl", lambda f: f.write_text(f.read_text().replace("? 1", "? 9")), "rows"),
}


@pytest.mark.parametrize("verb", ["eval", "collect"])
def test_a_folder_is_continued_only_by_what_played_its_episodes(
    verb, places, tmp_path, capsys, monkeypatch
):
    for name in ("me", "you"):
        shutil.copytree(places["model"], tmp_path / name)
    (tmp_path / "env.py").write_text(Path(f"{places['dir']}/talk.py").read_text())
    rows = ({"prompt": f"? {n}", "answer": "a"} for n in range(2))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = AutoTokenizer.from_pretrained(places["model"]).chat_template
    (tmp_path / "t.jinja").write_text(template)
    command = words(
        verb,
        tmp_path / "me",
        f"--actors.bob.model x --actors.bob.chat_template {tmp_path}/t.jinja",
        f"--actors.alice.train false --env_path {tmp_path}/env.py {SIZES}",
        f"--data.train {tmp_path}/rows.jsonl --data.eval {tmp_path}/rows.jsonl",
        {"eval": "--eval.samples 0 --folder", "collect": "--out"}[verb],
        tmp_path / "out",
    )
    plays = words("--actors.alice.model", tmp_path / "you")
    assert main([*command, *plays]) == 0
    for name, change, says in CHANGES.values():
        file = tmp_path / name
        before = file.read_bytes()
        change(file)
        capsys.readouterr()
        assert main([*command, *plays]) == 1
        error = capsys.readouterr().err
        assert f"out holds episodes that were played with {says}" in error
        assert error.strip().endswith("name another folder")
        file.write_bytes(before)
    assert main([*command, *plays]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    with endpoint(lambda text: "abc") as url:
        assert main([*command, "--actors.alice.model", "gpt", "--actors.alice.api", url]) == 1
    error = capsys.readouterr().err
    assert url in error and "name another folder" in error


# Benchmarks


def program(row: dict, is_right: bool) -> str:
    """HumanEval's own solution, or one that Python cannot read."""
    body = row["canonical_solution"] if is_right else "    retrun 1\n"
    return f"```python\n{row['prompt']}{body}\n```"


def test_humanevals_solutions_pass_and_broken_ones_do_not(data_dir, monkeypatch, capsys):
    rows = load_rows(str(data_dir / "humaneval.jsonl.gz"))
    by_prompt = {row["prompt"]: program(row, i % 2 == 0) for i, row in enumerate(rows)}
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    with endpoint(lambda asked: by_prompt[asked]) as url:
        rows_flag = f"humaneval={data_dir}/humaneval.jsonl.gz"
        flags = words("--env_path code --eval.samples 0 --json --data.eval", rows_flag)
        limits = words("--max_tokens 1000 --max_prompt_tokens 2000 --rollout.max_failed_fraction 0")
        assert main(["eval", f"gpt@{url}", *flags, *limits]) == 0
    [scored] = json.loads(capsys.readouterr().out).values()
    assert scored["humaneval"]["greedy_score"]["num_tasks"] == len(rows) == 164
    assert scored["humaneval"]["greedy_pass"]["value"] == 0.5
    # A program that Python cannot read passes no test, not even `assert True`.
    assert scored["humaneval"]["greedy_score"]["value"] == 0.5
