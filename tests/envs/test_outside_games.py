"""Tasks of reasoning-gym and games of TextArena. Neither library is among rl_core's requirements, so
these run where they are installed (docs/environments.md)."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec

import pytest
import stage
from kit import ROOT, metrics, run

from rl_core.environments.env_file import load_env

REASONING_GYM = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
TEXTARENA = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")


def env_of(name: str, monkeypatch, **variables: str):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    return load_env(str(ROOT / f"envs/{name}.py"))


# reasoning-gym


@REASONING_GYM
def test_the_librarys_answers_earn_one_at_every_level(monkeypatch):
    names = "chain_sum,countdown,leg_counting,spell_backward"
    env = env_of(
        "reasoning_gym_env",
        monkeypatch,
        REASONING_GYM=names,
        REASONING_GYM_LEVELS="0,3",
        REASONING_GYM_SIZE="20",
    )
    train, held_out = env.load_tasks("train"), env.load_tasks("eval")
    assert (len(train), len(held_out)) == (160, 16)
    assert {(row["gym"], row["level"]) for row in train} == {
        (name, level) for name in names.split(",") for level in (0, 3)
    }
    sizes = dict.fromkeys((0, 3), 0)
    for row in [*train[::8], *held_out[::4]]:
        result = stage.play(env, f"So: {row['answer']}", row=row, max_tokens=500)
        assert result.reward == 1, row
        wrong = stage.play(env, row["answer"].replace("answer", "b"), row=row, max_tokens=500)
        assert wrong.reward < 0.1
    for row in train:
        sizes[row["level"]] += len(row["prompt"])
    assert sizes[3] > sizes[0]


@REASONING_GYM
def test_an_unknown_task_is_refused_with_the_nearest(monkeypatch):
    with pytest.raises(ValueError, match="no task 'leg_countin'; near are: leg_counting"):
        env_of("reasoning_gym_env", monkeypatch, REASONING_GYM="chain_sum,leg_countin")


# TextArena


def play(env, actors: dict, seed: int = 1, max_tokens: int = 200, **options):
    row = {"prompt": "Play.", "game": "", "seed": seed}
    return stage.run(env, stage.cast(**actors), rows=[row], max_tokens=max_tokens, **options)


@TEXTARENA
def test_two_actors_or_one_play_and_the_games_rewards_are_theirs(monkeypatch):
    env = env_of("textarena_env", monkeypatch, TEXTARENA_ENV="TicTacToe-v0")
    result = play(env, {"ann": ["[0]", "[1]", "[2]"], "ben": ["[3]", "[4]"]})
    assert {(t.actor, t.player, t.reward) for t in result} == {
        ("ann", "player 0", 1.0),
        ("ben", "player 1", -1.0),
    }
    ben = next(t for t in result if t.actor == "ben")
    assert "Player 0: [0]" in ben.messages[0]["content"] and len(ben.turns) == 2
    assert (
        "[0]" not in ben.messages[2]["content"].split("Current Board")[0]
    )  # New observations alone.
    separate = play(env, {"policy": ["[4]", "[0]", "[8]", "[1]"]})
    assert {t.actor for t in separate} == {"policy"} and sorted(t.player for t in separate) == [
        "player 0",
        "player 1",
    ]
    [lost] = [t for t in separate if t.reward == -1]
    assert lost.metrics["invalid"] == 1  # Whoever took the other's cell again and again.


@TEXTARENA
def test_who_is_cut_off_loses_and_a_game_that_is_not_over_earns_nothing(monkeypatch):
    env = env_of("textarena_env", monkeypatch, TEXTARENA_ENV="TicTacToe-v0")
    [cut] = play(env, {"ann": "[0] is my move", "ben": "[1]"}, max_tokens=5)
    assert (cut.actor, cut.status, cut.reward) == ("ann", "truncated", -1)
    result = play(env, {"ann": "[0]", "ben": "[1]"}, max_turns=1)
    assert {t.reward for t in result} == {0.0} and result[0].metrics["unfinished"] == 1
    [failed] = play(env, {"ann": "[0]", "ben": "[1]", "cleo": "[2]"})[:1]
    assert "3 actors for 2 players" in failed.error


@TEXTARENA
def test_games_side_by_side_draw_as_alone(monkeypatch):
    env = env_of("textarena_env", monkeypatch, TEXTARENA_ENV="KuhnPoker-v0")
    random.seed(5)
    before = random.getstate()
    together = play(env, {"ann": "[check]", "ben": "[check]"}, group_size=6)
    assert random.getstate() == before
    alone = play(env, {"ann": "[check]", "ben": "[check]"})
    heard = {t.actor: [m["content"] for m in t.messages] for t in alone}
    assert all([m["content"] for m in t.messages] == heard[t.actor] for t in together)
    other = play(env, {"ann": "[check]", "ben": "[check]"}, seed=2)
    assert [m["content"] for m in other[0].messages] != heard[other[0].actor]


@TEXTARENA
@pytest.mark.parametrize(
    "game, players, why",
    [
        ("Hangman-v0", "1", "NLTK's words: run `python -m nltk.downloader words averaged"),
        ("TicTacToe-v0", "3", r"cannot begin with 3 players \(TEXTARENA_PLAYERS\): Assert"),
    ],
)
def test_a_game_that_cannot_begin_is_refused_in_one_line(game, players, why, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [])
    env = env_of("textarena_env", monkeypatch, TEXTARENA_ENV=game, TEXTARENA_PLAYERS=players)
    with pytest.raises(ValueError, match=why) as refused:
        env.load_tasks("train")
    assert "\n" not in str(refused.value)


@TEXTARENA
def test_an_unknown_game_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"TEXTARENA_ENV=Go is no game; there are .*TicTacToe-v0"):
        env_of("textarena_env", monkeypatch, TEXTARENA_ENV="Go")


# Steps of the real command


@pytest.fixture(scope="module")
def warm_syllogisms(tiny_model, made_once):
    """A tiny model that says Yes or No, at random."""

    def make(out):
        out.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            env = env_of("reasoning_gym_env", patch, REASONING_GYM="syllogism")
        rows = []
        for number, row in enumerate(env.load_tasks("train")[:60]):
            reply = f"<answer>{('Yes', 'No')[number % 2]}</answer>"
            asked = {"role": "user", "content": row["prompt"]}
            rows.append({"messages": [asked, {"role": "assistant", "content": reply}]})
        (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = "--algorithm sft --max_tokens 30 --max_prompt_tokens 1000 --tasks_per_step 8 "
        flags += "--num_steps 60 --optim.lr 4e-3 --data.train"
        run(out / "run", "--model", tiny_model, flags, out / "sft.jsonl")

    return made_once("warm_syllogisms", make) / "run/hf/policy"


@REASONING_GYM
def test_three_steps_of_a_task_learn(warm_syllogisms, monkeypatch, tmp_path):
    monkeypatch.setenv("REASONING_GYM", "syllogism")
    flags = (
        "--tasks_per_step 2 --group_size 6 --num_steps 3 --max_tokens 30 --max_prompt_tokens 1000"
    )
    path = ROOT / "envs/reasoning_gym_env.py"
    out = run(tmp_path / "run", "--model", warm_syllogisms, "--env_path", path, flags)
    result = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(result) == 3 and any(line.get("learn/policy/grad_norm", 0) > 0 for line in result)
    assert any(0 < line["rollout/policy/reward_mean"] < 1 for line in result)
    assert not any(line.get("rollout/policy/failed") for line in result)


@pytest.fixture(scope="module")
def warm(tiny_model, made_once):
    """A tiny model that says a cell, at random."""

    def make(out):
        out.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            env = env_of("textarena_env", patch, TEXTARENA_ENV="TicTacToe-v0")
        played = play(env, {"ann": ["[0]", "[1]", "[2]"], "ben": ["[3]", "[4]"]})
        rows = []
        for number in range(60):
            asked = played[number % 2].messages[0]
            reply = {"role": "assistant", "content": f"[{number % 9}]"}
            rows.append({"messages": [asked, reply]})
        (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = "--algorithm sft --max_tokens 8 --max_prompt_tokens 1500 --tasks_per_step 8 "
        flags += "--num_steps 60 --optim.lr 4e-3 --data.train"
        run(out / "run", "--model", tiny_model, flags, out / "sft.jsonl")

    return made_once("warm_cells", make) / "run/hf/policy"


@TEXTARENA
def test_three_steps_of_a_game_learn(warm, monkeypatch, tmp_path):
    monkeypatch.setenv("TEXTARENA_ENV", "TicTacToe-v0")
    flags = (
        "--tasks_per_step 2 --group_size 4 --num_steps 3 --max_tokens 8 --max_prompt_tokens 2500"
    )
    path = ROOT / "envs/textarena_env.py"
    out = run(tmp_path / "run", "--model", warm, "--env_path", path, flags)
    result = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(result) == 3 and any(line.get("learn/policy/grad_norm", 0) > 0 for line in result)
    assert not any(line.get("rollout/policy/failed") for line in result)
