"""Rows that a run trains and evaluates on: those of each split, up to the limit, and to the last
one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kit import run, trajectories, words
from make_tiny_model import bpe_tokenizer, make_tiny_model

from rl_core.config import Config, parse_config
from rl_core.data.chat import Chat
from rl_core.data.chat_loading import load_chat
from rl_core.data.task_rows import TaskSource
from rl_core.data.tasks.eval_sets import named_sets
from rl_core.data.warnings.data_warnings import data_warnings
from rl_core.run.plan.plan import make_plan
from rl_core.tools.cli import main

SPLITS = """
def load_tasks(split):
    return [{"prompt": f"{split} {n}"} for n in range(%d)]

async def reward_fn(completion):
    return len(set(completion)) / 8
"""
SIZES = "--num_steps 1 --tasks_per_step 2 --group_size 2 --max_prompt_tokens 40 --max_tokens 4"
# A data set in the cache of `datasets`, as a download from the hub leaves it there, and the texts
# of each of its splits.
HUB = """
import json, sys
from datasets import DatasetInfo, Features, Value
from datasets.arrow_writer import ArrowWriter
from pathlib import Path

folder = Path(sys.argv[1]) / "org___name/default/0.0.0/0123456789abcdef"
folder.mkdir(parents=True)
features, splits = Features({"prompt": Value("string")}), {}
for split in ("train", "test", "validation"):
    with ArrowWriter(features=features, path=str(folder / f"name-{split}.arrow")) as writer:
        for n in range(3):
            writer.write({"prompt": f"{split} {n}"})
        num_rows, num_bytes = writer.finalize()
    splits[split] = {"name": split, "num_bytes": num_bytes, "num_examples": num_rows, "dataset_name": "name"}
same = {"builder_name": "parquet", "dataset_name": "name", "config_name": "default", "version": "0.0.0"}
DatasetInfo(features=features, splits=splits, **same).write_to_directory(str(folder))

from functools import partial
from rl_core.data import row_files
from rl_core.data.tables import load_other

load_rows = partial(row_files.load_rows, load_other=load_other)

asked = {"train": ("org/name", "train"), "test": ("org/name", "test"), "validation": ("org/name@validation", "train")}
print(json.dumps({name: [row["prompt"] for row in load_rows(*how)[0]] for name, how in asked.items()}))
"""


def prompts(out, pattern: str) -> set[str]:
    """Prompts of the episodes in these files."""
    files = sorted((out / "rollouts").glob(pattern))
    return {
        row["messages"][0]["content"].split()[0] for file in files for row in trajectories(file)
    }


@pytest.mark.parametrize("source", ["load_tasks", "folder"])
def test_a_run_trains_on_the_training_split_and_evaluates_on_the_other(
    source, tiny_model, tmp_path
):
    env, flags = SPLITS % 4, ""
    if source == "folder":
        env = env[env.index("async") :]
        for split in ("train", "test"):
            rows = [json.dumps({"prompt": f"{split} {n}"}) for n in range(4)]
            (tmp_path / f"my_{split}.jsonl").write_text("\n".join(rows))
        flags = f"--data.train {tmp_path} --data.eval {tmp_path}"
    (tmp_path / "env.py").write_text(env)
    evaluated = "--eval_every 1 --eval.samples 2"
    out = run(
        tmp_path / "run",
        "--model",
        tiny_model,
        SIZES,
        evaluated,
        flags,
        "--env_path",
        tmp_path / "env.py",
    )
    assert prompts(out, "step_*") == {"train"}
    assert prompts(out, "eval_*") == {"eval" if source == "load_tasks" else "test"}


def test_a_split_of_the_hub_gives_its_own_rows(tmp_path):
    cache = {"HF_DATASETS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    # A new process: `datasets` reads its folder when it is imported.
    command = [sys.executable, "-c", HUB, str(tmp_path)]
    output = subprocess.run(
        command, env=os.environ | cache, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout
    assert json.loads(output.splitlines()[-1]) == {
        split: [f"{split} {n}" for n in range(3)] for split in ("train", "test", "validation")
    }


def test_the_limit_keeps_a_row_and_leaves_out_a_longer_one(tiny_model, tmp_path):
    texts = ["train " + "7" * n for n in (5, 6, 7, 6)]
    chat = load_chat(str(tiny_model))
    limit = len(chat.prompt_ids([{"role": "user", "content": texts[1]}]))
    (tmp_path / "env.py").write_text(
        "async def reward_fn(completion):\n    return len(set(completion)) / 8\n"
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    flags = (
        f"--num_steps 1 --tasks_per_step 3 --group_size 2 --max_prompt_tokens {limit} --max_tokens "
        "4"
    )
    data = [
        "--data.skip_long true --data.train",
        tmp_path / "rows.jsonl",
        "--env_path",
        tmp_path / "env.py",
    ]
    out = run(tmp_path / "run", "--model", tiny_model, flags, *data)
    [file] = (out / "rollouts").glob("step_*")
    asked = sorted(row["messages"][0]["content"] for row in trajectories(file))
    assert asked == sorted([texts[0], texts[1], texts[3]] * 2)


def test_a_run_checks_lengths_of_first_and_drawn_rows(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text("async def reward_fn(completion): return 0.0\n")

    def plan(long_row: int, *flags: str):
        rows = [{"prompt": "7" * (90 if n == long_row else 3)} for n in range(1200)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = ["--data.train", tmp_path / "rows.jsonl", "--env_path", tmp_path / "env.py"]
        sizes = "--max_prompt_tokens 40 --max_tokens 4 --tasks_per_step 4"
        command = words("--model", tiny_model, sizes, "--out", tmp_path / "run", *data, *flags)
        return make_plan(parse_config(command)).train

    order = plan(-1).order
    drawn = [order.row_index(position) for position in range(1200)]
    early = next(row for row in drawn[:40] if row >= 1000)
    late = next(row for row in reversed(drawn) if row >= 1000)
    for row, flags in (
        (999, "--num_steps 1"),
        (early, "--num_steps 10"),
        (late, "--num_steps 300"),
        (late, "--num_epochs 0.5"),
    ):
        with pytest.raises(ValueError, match=f"^row {row + 1} of .*a prompt of .* tokens"):
            plan(row, flags)
    assert len(plan(late, "--num_steps 10")) == 1200
    assert len(plan(late, "--num_steps 10 --data.skip_long true")) == 1199


def test_a_row_of_sft_of_exactly_the_limit_is_kept(tiny_model, tmp_path):
    chat = load_chat(str(tiny_model))
    rows = []
    for n in (3, 4, 5):
        talk = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "1" * n}]
        rows.append({"messages": talk})
    # The template's text behind the last end token is not trained.
    limit = len(chat.prompt_ids(rows[1]["messages"][:1])) + 4 + 1
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = (
        f"--algorithm sft --num_steps 1 --tasks_per_step 2 --max_prompt_tokens {limit - 8} "
        "--max_tokens 8"
    )
    data = ["--data.skip_long true --data.train", tmp_path / "rows.jsonl"]
    out = run(tmp_path / "run", "--model", tiny_model, flags, *data)
    [row] = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert row["pack/tokens"] == limit + limit - 1


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_rows_that_are_left_out_are_told(algorithm, tiny_model, tmp_path, capsys):
    (tmp_path / "env.py").write_text("async def reward_fn(completion): return len(completion)\n")
    rows = [{"prompt": "7" * n, "response": "1"} for n in (3, 4, 90)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows[1:])))
    flags = words(
        "--model", tiny_model, "--data.train", tmp_path / "rows.jsonl", "--data.skip_long"
    )
    flags += words("--data.eval", tmp_path / "held.jsonl", "--eval_every 1 --algorithm", algorithm)
    flags += words("--max_prompt_tokens 40 --max_tokens 4 --tasks_per_step 2 --num_steps 1")
    if algorithm == "grpo":
        flags += words("--group_size 2 --env_path", tmp_path / "env.py")
    assert main(["plan", *flags]) == 0
    train, held_out = "(1 of 3 were left out: too long)", "(1 of 2 were left out: too long)"
    planned = f"2 rows to train on {train}, 1 held out {held_out}\n"
    assert planned in capsys.readouterr().out
    run(tmp_path / "run", flags)
    expected = f"\n{algorithm}: 2 rows {train}, 1 held out {held_out}; 1 step of"
    assert expected in capsys.readouterr().out


def test_the_last_shorter_file_of_collected_episodes_is_written(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(SPLITS % 5)
    flags = words("--env_path", tmp_path / "env.py", SIZES, "--out", tmp_path / "out")
    flags = [flag for flag in flags if flag not in ("--num_steps", "1")]
    assert main(["collect", str(tiny_model), *flags]) == 0
    tasks = [
        {row["task_id"] for row in trajectories(file)}
        for file in sorted((tmp_path / "out/rollouts").glob("step_*"))
    ]
    assert [len(tasks_of_rank) for tasks_of_rank in tasks] == [2, 2, 1]
    assert len(set().union(*tasks)) == 5


@pytest.mark.parametrize("algorithm", ["sft", "grpo", "dpo", "rm"])
def test_a_row_that_cannot_fit_is_not_encoded(algorithm, tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "bytes", tokenizer=bpe_tokenizer(["7 12"], 270))
    encode = Chat._encode

    def encode_short(chat, text, *args, **more):
        assert len(text) < 1000
        return encode(chat, text, *args, **more)

    monkeypatch.setattr(Chat, "_encode", encode_short)
    (tmp_path / "env.py").write_text("async def reward_fn(completion): return len(completion)\n")
    rows = [{"prompt": "7" * n, "answer": "1", "response": "1"} for n in (3, 4, 1_000_000)]
    rows = [row | {"chosen": "1", "rejected": "2"} for row in rows]
    if algorithm in ("dpo", "rm"):
        rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = words("--model", tmp_path / "bytes", "--data.train", tmp_path / "rows.jsonl")
    flags += words("--max_prompt_tokens 40 --max_tokens 4 --tasks_per_step 2 --num_steps 1")
    flags += words("--out", tmp_path / "run", "--algorithm", algorithm)
    if algorithm == "grpo":
        flags += words("--group_size 2 --env_path", tmp_path / "env.py")
    with pytest.raises(ValueError, match=r"row 3.* of at least \d+ tokens is longer than"):
        make_plan(parse_config(flags))
    assert len(make_plan(parse_config([*flags, "--data.skip_long", "true"])).train) == 2


def source_of(rows, split, env="env"):
    return TaskSource(rows, env=env, split=split, seed=0, shuffle=False)


@pytest.mark.parametrize(
    "numbers, says",
    [
        ((5, 4, 3, 2, 1, 0), "6 of the first 6 held-out rows of env are training rows too"),
        ((40, 11, 99), "1 of the first 3 held-out rows of env are training rows too"),
        ((12, 13), None),
    ],
)
def test_held_out_rows_that_are_training_rows_are_noticed_in_any_order(numbers, says):
    train = [{"prompt": str(n), "answer": [n]} for n in range(12)]
    held_out = [{"answer": [n], "prompt": str(n)} for n in numbers]
    config = Config(tasks_per_step=1)
    for env, expected in (("env", says), ("other", None)):
        warnings = data_warnings(
            config,
            source_of(train, "train", env),
            {"env": source_of(held_out, "eval")},
        )
        assert [w.partition(";")[0] for w in warnings] == ([expected] if expected else [])


def test_a_path_with_an_equals_sign_is_no_name_of_a_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("year=2024", "runs/lr=3"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").touch()
    for value, sets in (
        ("year=2024/a.jsonl", {"": "year=2024/a.jsonl"}),
        ("year=2024/*.jsonl", {"": "year=2024/*.jsonl"}),
        ("runs/lr=3/a.jsonl", {"": "runs/lr=3/a.jsonl"}),
        ("aime=year=2024/a.jsonl,b.jsonl", {"aime": "year=2024/a.jsonl,b.jsonl"}),
        ("gsm8k=a.jsonl,aime=b.jsonl", {"gsm8k": "a.jsonl", "aime": "b.jsonl"}),
    ):
        assert named_sets(value) == sets


# Files as projects have them: one brings problems to train on, one both, one a benchmark.
SEED_ENVS = {
    "codeforces_env": "[{'prompt': f'code {n}'} for n in range(4)] if split == 'train' else []",
    "math_env": "[{'prompt': f'math-{split} {n}'} for n in range(4)]",
    "aime_eval": "[{'prompt': f'aime {n}'} for n in range(3)] if split != 'train' else []",
}


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_environments_train_or_evaluate_on_one_split_alone(
    is_evaluated, tiny_model, tmp_path, capsys
):
    for name, rows in SEED_ENVS.items():
        code = SPLITS.replace('[{"prompt": f"{split} {n}"} for n in range(%d)]', rows)
        (tmp_path / f"{name}.py").write_text(code)
    paths = ",".join(str(tmp_path / f"{name}.py") for name in SEED_ENVS)
    flags = words("--model", tiny_model, SIZES, "--env_path", paths)
    flags += words("--eval_every 1 --eval.samples 0") if is_evaluated else []
    out = run(tmp_path / "run", flags)
    assert prompts(out, "step_*") == {"code", "math-train"}
    assert prompts(out, "eval_*") == ({"math-eval", "aime"} if is_evaluated else set())
    output = capsys.readouterr().out
    assert ("aime_eval is never played" in output) != is_evaluated
    assert ("aime_eval has no training rows" in output) == is_evaluated


def test_environments_without_training_rows_alone_are_refused(tiny_model, tmp_path):
    files = {"aime": "[{'prompt': 'x'}] if split == 'eval' else []", "none": "[]"}
    for name, rows in files.items():
        code = SPLITS.replace('[{"prompt": f"{split} {n}"} for n in range(%d)]', rows)
        (tmp_path / f"{name}.py").write_text(code)
    aime, none = (str(tmp_path / f"{name}.py") for name in files)
    bare = tmp_path / "bare.py"
    bare.write_text("async def reward_fn(completion):\n    return 1.0\n")
    for paths, says in {
        str(bare): r"--data.train is missing: .*; .*bare\.py has no load_tasks",
        aime: r"--data.train is missing: .*; load_tasks\('train'\) of .* gives no rows",
        f"{aime},{none}": r"--envs.none.train is missing: ",
        f"{aime},{aime.replace('aime', 'b')}": "no environment has training rows",
    }.items():
        (tmp_path / "b.py").write_text((tmp_path / "aime.py").read_text())
        command = words(
            "--model", tiny_model, SIZES, "--out", tmp_path / "run", "--env_path", paths
        )
        with pytest.raises(ValueError, match=says):
            make_plan(parse_config(command))
