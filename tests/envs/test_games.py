"""The shipped environments with several actors: rules, rewards, players, and runs of the real
command."""

from __future__ import annotations

import asyncio
import json
import random
import runpy
from collections import Counter
from pathlib import Path

import pytest
from demo_data import game_data
from kit import ROOT, metrics
from make_tiny_model import CHARACTERS
from stage import make_groups, rollout

from rl_core.config import RolloutConfig
from rl_core.data.task_rows import make_task
from rl_core.distributed import Ranks
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.train import main

ENVS = ROOT / "envs"
GAME = runpy.run_path(str(ENVS / "tic_tac_toe.py"))


def play(
    name: str, replies: dict[str, list[str]], max_tokens: int = 99, split: str = "train", **columns
):
    """The trajectories of one episode by actors that say the replies in order, and the environment's
    task."""
    env, chat = load_env(str(ENVS / f"{name}.py")), plain_chat()
    row = env.load_tasks(split)[0] | columns
    task = make_task(row, 0, env.name, split)
    actors = {n: ScriptedActor(name=n, chat=chat, replies=reply) for n, reply in replies.items()}
    groups = make_groups([task], max_tokens=max_tokens)
    ranks = Ranks(rank=0, size=1, device=None)
    return asyncio.run(
        rollout({env.name: env}, actors, groups, RolloutConfig(max_failed_fraction=1.0), ranks)
    ), task


def rewards(result) -> dict[tuple[str, str], float]:
    assert all(t.status != "failed" for t in result), [t.error for t in result]
    return {(t.actor, t.player): t.reward for t in result}


# The referential game


def test_bob_alone_sees_the_object_and_alice_alone_the_candidates():
    result, _ = play(
        "referential_game", {"bob": ["37"], "alice": ["?"]}, object="k", candidates="ckp"
    )
    seen = {t.actor: [m["content"] for m in t.messages] for t in result}
    assert seen["bob"] == ["Send k as two digits.", "Go.", "37", "?"]
    assert seen["alice"] == ["Which of ckp?", "Go.\n\n37", "?"]


@pytest.mark.parametrize(
    "sent, picked, max_tokens, reward",
    [
        ("37", "k", 9, 1.0),
        ("37", "c", 9, 0.0),
        ("k", "k", 9, 0.0),
        ("375", "k", 9, 0.0),
        ("k", "k", 1, 0.0),
    ],
)
def test_both_earn_what_alice_found_if_bob_kept_to_two_digits(sent, picked, max_tokens, reward):
    result, _ = play(
        "referential_game",
        {"bob": [sent], "alice": [picked]},
        max_tokens,
        object="k",
        candidates="ckp",
    )
    assert rewards(result) == {(t.actor, ""): reward for t in result} and len(result) == (
        2 if max_tokens > 1 else 1
    )


def test_every_object_is_dealt_equally_often_among_three():
    env = load_env(str(ENVS / "referential_game.py"))
    train, held_out = env.load_tasks("train"), env.load_tasks("eval")
    assert all(
        row["object"] in row["candidates"] and len(set(row["candidates"])) == 3 for row in train
    )
    places = Counter(row["candidates"].index(row["object"]) for row in train)
    assert max(places.values()) < 1.15 * min(places.values())
    assert len(set(Counter(row["object"] for row in train + held_out).values())) == 1
    assert not {(r["object"], r["candidates"]) for r in train} & {
        (r["object"], r["candidates"]) for r in held_out
    }


def test_half_of_the_warm_up_follows_a_common_code():
    data = game_data(seed=0, num_sft=4000)
    sent = [
        (m[0]["content"].split()[1], m[-1]["content"])
        for m in (row["messages"] for row in data["bob"])
    ]
    code = {seen: Counter(s for o, s in sent if o == seen).most_common(1)[0][0] for seen, _ in sent}
    assert len(set(code.values())) == len(code) == 16
    assert sum(code[o] == s for o, s in sent) / 4000 == pytest.approx(0.505, abs=0.03)
    objects = {s: o for o, s in code.items()}
    rows = [[m["content"] for m in row["messages"]] for row in data["alice"]]
    heard = [
        (objects.get(user.removeprefix("Go.\n\n")), system[-4:-1], picked)
        for system, user, picked in rows
    ]
    coded = [(reply, picked) for reply, candidates, picked in heard if reply in list(candidates)]
    assert all(picked in candidates for _, candidates, picked in heard) and 1900 < len(coded) < 2300
    assert sum(reply == picked for reply, picked in coded) / len(coded) == pytest.approx(
        0.5 + 0.5 / 3, abs=0.04
    )


# Tic-tac-toe


def test_lines_and_free_cells():
    winner, shown, move_of = GAME["winner"], GAME["shown"], GAME["move_of"]
    assert len(GAME["LINES"]) == 8
    for line in [
        "xxx......",
        "...xxx...",
        "......xxx",
        "x..x..x..",
        ".x..x..x.",
        "..x..x..x",
        "x...x...x",
        "..x.x.x..",
    ]:
        assert winner(list(line)) == "x" and winner(list(line.replace("x", "o"))) == "o"
        assert winner(list(line.replace("x", "o", 1))) is None
    assert winner(list(".........")) is None and winner(list("xoxxoooxx")) is None
    assert shown(list("x..o.....")) == "x23\no56\n789"
    board = list("x..o.....")
    for text in ("1", "4", "0", "10", "", "two", "2 3", "-2", "\u0665"):
        assert move_of(text, board) is None
    assert (move_of("2", board), move_of(" 9\n", board)) == (1, 8)


def test_one_actor_plays_both_players_and_each_is_rewarded():
    result, _ = play("tic_tac_toe", {"policy": ["1", "4", "2", "5", "3"]})
    assert rewards(result) == {("policy", "x"): 1.0, ("policy", "o"): 0.0}
    x, o = sorted(result, key=lambda t: t.player != "x")
    assert [m["content"][-11:] for m in x.messages if m["role"] == "user"] == [
        "123\n456\n789", "x23\no56\n789", "xx3\noo6\n789"]  # fmt: skip
    assert (len(x.turns), len(o.turns)) == (3, 2) and "You are o." in o.messages[0]["content"]
    draw, _ = play("tic_tac_toe", {"policy": list("123547698")})
    assert rewards(draw) == {("policy", "x"): 0.5, ("policy", "o"): 0.5}


@pytest.mark.parametrize("bad", ["4", "1", "0", "", "I do not know.", "\x00}{<|end|>", "6 7"])
def test_an_illegal_or_garbage_move_loses(bad):
    result, _ = play("tic_tac_toe", {"ann": ["1", bad], "ben": ["4"]}, player="x")
    assert rewards(result) == {("ann", "x"): 0.0, ("ben", "o"): 1.0}
    assert {t.actor: t.metrics["illegal"] for t in result} == {"ann": 1.0, "ben": 0.0}


def test_a_reply_that_is_cut_off_loses():
    result, _ = play("tic_tac_toe", {"ann": ["1"], "ben": ["4"]}, max_tokens=1, player="x")
    assert rewards(result) == {("ann", "x"): 0.0}


def test_the_row_players_the_first_actor_and_opens_the_board():
    result, _ = play(
        "tic_tac_toe", {"ann": ["1", "2", "3"], "ben": ["4", "5"]}, player="o", opening="9"
    )
    # ben's stone lies on 9; ann (o) moves first: o1 x4 o2 x5 o3
    assert rewards(result) == {("ann", "o"): 1.0, ("ben", "x"): 0.0}
    assert result[0].messages[0]["content"].endswith("123\n456\n78x")
    result, _ = play("tic_tac_toe", {"a": ["1"], "b": ["2"], "c": ["3"]})
    assert all(
        t.status == "failed" and "one or two actors, there are 3: a, b, c" in t.error
        for t in result
    )


@pytest.mark.parametrize("side", ["x", "o"])
def test_the_random_player_moves_legally_and_the_same_way_again(side):
    order = random.Random(3).sample("123456789", 9)
    games = [
        play("tic_tac_toe", {"ann": order, "ben": order}, split="eval", player=side)[0]
        for _ in range(2)
    ]
    assert [t.messages for t in games[0]] == [t.messages for t in games[1]]
    assert {t.actor for t in games[0]} == {"ann", "ben"}  # Each has a separate game.
    for t in games[0]:
        assert t.player == side and {"won_random", "illegal_random"} <= t.metrics.keys()
        boards = [m["content"][-11:] for m in t.messages if m["role"] == "user"]
        stones = [(b.count("x"), b.count("o")) for b in boards]
        assert stones == [(n, n) if side == "x" else (n + 1, n) for n in range(len(boards))]
    tasks = [make_task({"prompt": ""}, n, "x", "eval") for n in range(200)]
    assert {GAME["random_move"](task.id, list("x.o......")) for task in tasks} == {
        1,
        3,
        4,
        5,
        6,
        7,
        8,
    }


# Collaboration


@pytest.mark.parametrize("names, rounds", [("ab", 2), ("dcba", 2), ("abcde", 1)])
def test_each_collaborator_speaks_in_turn(names, rounds):
    env = load_env(str(ENVS / "collaborate.py"))
    task = make_task(env.load_tasks("train")[0], 0, env.name, "train")
    assert asyncio.run(env.draw(task, list(names), seed=0)).info["turns"] == list(names) * rounds
    result, _ = play("collaborate", {name: ["9"] for name in names})
    assert sorted(t.actor for t in result) == sorted(names) and {len(t.turns) for t in result} == {
        rounds
    }


def test_the_last_speaker_answers_for_all_who_spoke():
    say = {"ann": ["no", "12"], "ben": ["no", "12"]}
    result, _ = play("collaborate", say, answer="12", prompt="5+7")
    assert {t.reward for t in result} <= {0.0, 1.0} and len({t.reward for t in result}) == 1
    for t in result:
        users = "\n".join(m["content"] for m in t.messages if m["role"] == "user")
        assert users.count("Reply with the answer alone") == 1
        assert ("ben says: " if t.actor == "ann" else "ann says: ") in users or len(result) == 1
    for reply, reward in (
        ("12", 1.0),
        (" 12\n", 1.0),
        ("<think>13?</think>\n12", 1.0),
        ("12.", 0.0),
        ("", 0.0),
    ):
        result, _ = play("collaborate", {"ann": [reply], "ben": [reply]}, answer=12, prompt="5+7")
        assert set(rewards(result).values()) == {reward}
    cut, _ = play(
        "collaborate", {"ann": ["12"], "ben": ["12"]}, max_tokens=2, answer="12", prompt="5+7"
    )
    assert [t.reward for t in cut] == [0.0]


# Runs


def sizes(out: Path, **more) -> list[str]:
    flags = {
        "tasks_per_step": 4,
        "group_size": 4,
        "num_steps": 2,
        "optim.lr": 1e-3,
        "out": out,
    } | more
    return [str(x) for name, value in flags.items() for x in (f"--{name}", value)]


@pytest.mark.parametrize(
    "name, actors, flags",
    [
        ("referential_game", ["bob", "alice"], {"max_tokens": 4, "max_prompt_tokens": 64}),
        ("tic_tac_toe", ["policy"], {"max_tokens": 4, "max_prompt_tokens": 256}),
        ("tic_tac_toe", ["ann", "ben"], {"max_tokens": 4, "max_prompt_tokens": 256}),
        ("collaborate", ["ann", "ben", "cleo"], {"max_tokens": 24, "max_prompt_tokens": 384}),
    ],
)
def test_two_steps_of_training(name, actors, flags, make_model, tmp_path):
    models = [
        x
        for n, a in enumerate(actors)
        for x in (f"--actors.{a}.model", str(make_model(seed=n % 2)))
    ]
    # An untrained model seldom ends a turn.
    stop = [
        "--sampling.stop",
        json.dumps(list("abcdefghijklm0123456789" if name == "collaborate" else CHARACTERS)),
    ]
    evaluation = ["--eval_every", "2", "--eval.num_tasks", "6", "--eval.samples", "2"]
    flags |= {"tasks_per_step": 16, "group_size": 8} if name == "tic_tac_toe" else {}
    out = tmp_path / "run"
    status = main(
        [*models, "--env_path", str(ENVS / f"{name}.py"), *stop, *evaluation, *sizes(out, **flags)]
    )
    # Untrained models lose every episode of the other games, of which the run warns.
    assert status == 0
    rows = metrics(out)
    assert not any(value for row in rows for key, value in row.items() if key.endswith("/failed"))
    for actor in actors:
        assert any(row.get(f"rollout/{actor}/turns_mean", 0) >= 1 for row in rows)
        score = (
            f"eval/{name}/{actor}/greedy_score" if len(actors) > 1 else f"eval/{name}/greedy_score"
        )
        assert 0 <= rows[-1][score] <= 1
        # A tenth of an untrained model's replies is a digit: a win if the other's is none.
        if name == "tic_tac_toe":
            assert any(0 < row.get(f"rollout/{actor}/won", 0) < 1 for row in rows)
            assert any(f"learn/{actor}/loss" in row for row in rows)
        assert (out / "hf" / actor / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def warm_players(make_model, tmp_path_factory) -> dict[str, Path]:
    """Two models that know the form of the game, and of a common code that it exists: see
    demo_data.py."""
    folder, result = tmp_path_factory.mktemp("players"), {}
    for seed, (name, rows) in enumerate(game_data(seed=0, num_sft=16000).items()):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sft = [
            "--algorithm",
            "sft",
            "--data.train",
            str(folder / f"{name}.jsonl"),
            "--optim.schedule",
            "cosine",
        ]
        lengths = {"max_tokens": 4, "max_prompt_tokens": 64, "tasks_per_step": 64, "optim.lr": 3e-3}
        flags = sizes(folder / name, num_steps=250, **lengths)
        assert main(["--model", str(make_model(seed=seed)), *sft, *flags]) == 0
        result[name] = folder / name / "hf/policy"
    return result


@pytest.mark.slow
def test_two_models_learn_a_common_code_and_one_alone_learns_less_of_it(warm_players, tmp_path):
    models = [
        x for name, path in warm_players.items() for x in (f"--actors.{name}.model", str(path))
    ]
    env = [
        "--env_path",
        str(ENVS / "referential_game.py"),
        "--algo.clip_high",
        "0.28",
        "--algo.entropy_coef",
        "0.01",
    ]
    more = {
        "tasks_per_step": 16,
        "group_size": 8,
        "max_tokens": 4,
        "max_prompt_tokens": 64,
        "optim.lr": 5e-4,
    }
    more |= {"optim.warmup_steps": 5, "num_steps": 100}
    curves = {}
    for label, flags in {"both": [], "bob": ["--actors.alice.train", "false"]}.items():
        assert main([*models, *env, *flags, *sizes(tmp_path / label, **more)]) == 0
        curves[label] = [row["rollout/bob/reward_mean"] for row in metrics(tmp_path / label)]
    last = {label: sum(curve[-10:]) / 10 for label, curve in curves.items()}
    print(
        {
            label: [round(sum(c[n : n + 10]) / 10, 2) for n in range(0, 100, 10)]
            for label, c in curves.items()
        }
    )
    assert sum(curves["both"][:2]) / 2 < 0.52
    assert last["both"] > 0.9 and last["bob"] < last["both"] - 0.1
