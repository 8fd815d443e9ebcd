"""count_shapes, drawn_maze and picture_questions: solvers, learning steps, and rows of sets of pictures as published."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import stage
import zstandard
from kit import ROOT, metrics, run, words
from PIL import Image

from rl_core.data.image_columns import with_images
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.tools.cli import main

ENVS = ROOT / "envs"
STEPS = {"u": -4, "d": 4, "l": -1, "r": 1}


def solved_maze(row):
    """A shortest sequence of steps, found by breadth."""
    doors, paths = {frozenset(pair) for pair in row["doors"]}, [(row["room"], [])]
    for room, path in paths:
        if room == row["goal"]:
            return path
        paths += [
            (room + step, [*path, name])
            for name, step in STEPS.items()
            if {room, room + step} in doors
        ]
    raise AssertionError(row)


# Environment -> (row -> replies that earn 1, a reply that earns 0).
SOLVED = {
    "count_shapes": (lambda row: [str(row["answer"])], "no"),
    "drawn_maze": (solved_maze, "x"),
}
QUESTIONS = {"picture_questions": (lambda row: [f"It is {row['answer']}."], "no")}


def play(env, row, replies):
    actors = {"policy": ScriptedActor(name="policy", chat=plain_chat(), replies=replies)}
    return stage.one(stage.run(env, actors, rows=[row]))


def conversation(env, row, replies):
    return with_images({"messages": play(env, row, replies).messages}, None)


@pytest.mark.parametrize("name", [*SOLVED, *QUESTIONS])
def test_a_solver_earns_one_and_another_reply_nothing(name):
    solve, wrong = (SOLVED | QUESTIONS)[name]
    env = load_env(str(ENVS / f"{name}.py"))
    for row in env.load_tasks("eval")[:20]:
        assert play(env, row, solve(row)).reward == 1.0
    assert play(env, row, [wrong]).reward == 0.0


def test_the_control_shows_white_pictures(monkeypatch):
    colours = []
    for blank in ("0", "1"):
        monkeypatch.setenv("COUNT_SHAPES_BLANK", blank)
        [row, *_] = load_env(str(ENVS / "count_shapes.py")).load_tasks("eval")
        colours.append(
            [colour for _, colour in row["messages"][0]["content"][0]["image"].getcolors()]
        )
    white, blue, red = (255, 255, 255), (0, 0, 255), (255, 0, 0)
    assert sorted(colours[0]) == sorted([white, blue, red]) and colours[1] == [white]


def test_each_step_in_the_maze_shows_another_picture():
    env = load_env(str(ENVS / "drawn_maze.py"))
    row = max(env.load_tasks("eval"), key=lambda row: len(solved_maze(row)))
    episode = play(env, row, solved_maze(row))
    shown = [m["content"][0]["image"] for m in episode.messages if m["role"] == "user"]
    assert len(shown) == len(set(shown)) == len(episode.turns) == 6
    assert len({turn.state_key for turn in episode.turns}) == 6


@pytest.fixture(scope="module")
def warm(make_model, made_once):
    """(folder with a row of each environment, model that says right and wrong replies to it)"""

    def make(out):
        out.mkdir()
        conversations = []
        for name, (solve, wrong) in SOLVED.items():
            env = load_env(str(ENVS / f"{name}.py"))
            row = next(row for row in env.load_tasks("train") if len(solve(row)) < 3)
            (out / f"{name}.jsonl").write_text(json.dumps(with_images(row, None)) + "\n")
            conversations += [conversation(env, row, solve(row))] * 2
            conversations += [conversation(env, row, [wrong])]
        (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
        flags = "--algorithm sft --max_tokens 200 --max_prompt_tokens 40 --tasks_per_step 6 "
        flags += "--num_steps 30 --optim.lr 4e-3 --data.train"
        run(out / "run", "--model", make_model("qwen2_5_vl"), flags, out / "sft.jsonl")

    return made_once("warm_images", make)


@pytest.fixture(scope="module")
def learned(warm, made_once):
    """learned(name) -> (its flags, the folder of a run of three steps)"""

    def get(name):
        flags = ["--env_path", ENVS / f"{name}.py", "--data.train", warm / f"{name}.jsonl"]
        flags += ["--max_prompt_tokens 40 --max_tokens 3 --tasks_per_step 1 --group_size 8"]
        more = ["--model", warm / "run/hf/policy", "--num_steps 3 --optim.lr 1e-4"]
        return words(*flags), made_once(name, lambda out: run(out, *flags, *more))

    return get


@pytest.mark.parametrize("name", SOLVED)
def test_three_steps_learn(name, learned):
    out = learned(name)[1]
    result = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(result) == 3 and any(line.get("learn/policy/grad_norm", 0) > 0 for line in result)
    assert not any(line.get("rollout/policy/failed") for line in result)


SEEN = r"\[image 32x32, 16 tokens\]"
EVAL = "--eval.num_tasks 1 --eval.samples 1"
# Command -> a pattern in its output. RUN: a run's folder, NEW: a new folder, FLAGS: of the run.
COMMANDS = {
    "check ENV": r"\[image 32x32\]",
    "tokens --model RUN/hf/policy --algorithm grpo FLAGS": SEEN,
    "plan --model RUN/hf/policy FLAGS": "prompt from messages",
    "show RUN --step 1": r"\[image images/[0-9a-f]{16}\.png\]",
    "replay RUN --step 1": r"learn/policy/grad_norm +\S+ +\S+ +(equal|\S+e-\d\d)",
    "view RUN --report NEW.html": "wrote",
    f"eval RUN/hf/policy FLAGS --folder NEW {EVAL}": r"failed +0",
    "collect RUN FLAGS --out NEW --num_tasks 1": "kept 8 of 8",
    "tokens --algorithm sft --model RUN/hf/policy --data.train RUN/rollouts": f"{SEEN}.*«",
}


@pytest.mark.parametrize("name", SOLVED)
def test_each_command_reads_images_and_prints_no_pixels(name, learned, tmp_path, capsys):
    flags, out = learned(name)
    words_of = {"RUN": [str(out)], "ENV": [str(ENVS / f"{name}.py")], "FLAGS": flags}
    for number, (command, shown) in enumerate(COMMANDS.items()):
        new = str(tmp_path / str(number))
        argv = []
        for word in command.split():
            text = word.replace("RUN/", f"{out}/").replace("NEW", new)
            argv += words_of.get(word, [text])
        assert main(argv) == 0, command
        printed = capsys.readouterr()
        assert re.search(shown, printed.out), (command, printed.out)
        assert "base64," not in printed.out + printed.err, command
    for file in filter(Path.is_file, (*tmp_path.rglob("*"), *out.rglob("*"))):
        text = zstandard.open(file).read() if file.suffix == ".zst" else file.read_bytes()
        assert (b"base64," in text) == (file.suffix == ".html"), file


JUDGED = """
turns = ["policy"]

async def reward_fn(completion, actors, prompt):
    asked = [*prompt[0]["content"], {"type": "text", "text": f"Is {completion} right?"}]
    verdict = await actors["judge"].respond([{"role": "user", "content": asked}])
    [image] = verdict.turns[0].images
    return {verdict.answer: image.width}
"""


def test_a_judge_sees_the_image_of_the_prompt(tmp_path):
    (tmp_path / "env.py").write_text(JUDGED)
    actors = {
        name: ScriptedActor(name=name, chat=plain_chat(), replies=[text])
        for name, text in {"policy": "two", "judge": "yes"}.items()
    }
    asked = {"prompt": "Which?", "image": Image.new("RGB", (7, 3))}
    env = load_env(str(tmp_path / "env.py"))
    outcome = stage.one(stage.run(env, actors, rows=[asked]))
    assert outcome.reward_parts == {"yes": 7.0}


ASKED = "Find x."


def png(size: int) -> dict:
    """A cell of a column datasets.Image."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, 32), "white").save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def says(content) -> list[dict]:
    return [{"role": "user", "content": content}]


PARTS = [{"type": "image", "text": None}] * 2 + [{"type": "text", "text": ASKED}]
VERL = {"ability": "math", "reward_model": {"style": "rule", "ground_truth": "7"}}
# Published shape -> (row, flags, the prompt with the images at their positions).
PUBLISHED = {
    "geometry3k": (
        {"images": [png(40)], "problem": f"<image>{ASKED}", "answer": "7"},
        "",
        f"[image 40x32]{ASKED}",
    ),
    "verl": (
        {"prompt": says(f"See <image>{ASKED}"), "images": [png(40)], **VERL},
        "--data.columns answer=reward_model.ground_truth",
        f"See [image 40x32]{ASKED}",
    ),
    "trl image": (
        {"image": png(40), "prompt": says(ASKED), "answer": "7"},
        "",
        f"[image 40x32]{ASKED}",
    ),
    "trl images": (
        {"images": [png(40), png(48)], "prompt": says(PARTS), "answer": "7"},
        "",
        f"[image 40x32][image 48x32]{ASKED}",
    ),
}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_rows_of_published_sets_are_checked_with_their_images(shape, tmp_path, capsys):
    row, flags, shown = PUBLISHED[shape]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 4), tmp_path / "rows.parquet")
    command = ["check", str(ENVS / "math_answer.py"), "--json", *flags.split()]
    assert main([*command, "--data.train", str(tmp_path / "rows.parquet")]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert f"| {shown}<|end|>" in report["tokens"], report["tokens"]
    rewards = {outcome["reply"]: outcome["reward"] for outcome in report["episodes"]}
    assert (rewards["right"], rewards["plain"]) == (1.0, 0.0)
