"""state_key(): the key of a turn's state, at every level of an environment."""

from __future__ import annotations

import json
import re

import pytest
from kit import ROOT, trajectories, words
from kit import run as run_command
from stage import cast, error_of, play, run

from rl_core.config import parse_config
from rl_core.environments.run_checks import check_environments
from rl_core.tools.replay import replay


def keys_of(t) -> list[str]:
    return [turn.state_key for turn in t.turns]


def test_each_turn_gets_the_key_of_the_state_in_which_it_began(env_of):
    env = env_of("""
        max_turns = 3
        def start(task): return {"steps": 0}
        def state_key(messages, state, answer, actor, completion, trajectory):
            assert (completion is None) == (trajectory is None) == (state["steps"] == 0)
            return [state["steps"], answer, messages[-1]["content"], actor]
        def interact(messages, state):
            state["steps"] += 1
            return [{"role": "user", "content": "go up"}]
        def reward_fn(): return 1.0
    """)
    t = play(env, "a", "b", "c")
    known = [[0, "4", "2+2"], [1, "4", "go up"], [2, "4", "go up"]]
    assert [json.loads(key) for key in keys_of(t)] == [[*key, "policy"] for key in known]


def test_the_hook_is_told_whose_turn_begins(env_of):
    env = env_of("""
        turns = "bob -> alice -> bob"
        def state_key(actor, messages): return f"{actor}{len(messages)}" if actor == "bob" else None
        def reward_fn(): return 1.0
    """)
    keys = {t.actor: keys_of(t) for t in run(env, cast(bob="B", alice="A"))}
    assert keys == {"bob": ["bob1", "bob3"], "alice": [""]}


def test_a_rollout_gives_keys_to_respond(env_of):
    env = env_of("""
        async def rollout(task, actors):
            replies = await actors["policy"].respond("hi", n=2, state_key={"b": 1, "a": (2, None)})
            await replies[0].respond("and", state_key="text")
            await replies[0].respond("on")
            branch = replies[0].fork()
            await branch.respond("left", state_key=3)
            return [r.trajectory(1.0) for r in (*replies, branch)]
    """)
    first, second, branch = run(env, cast(policy="x"))
    opening = '{"a": [2, null], "b": 1}'
    assert keys_of(first) == [opening, "text", ""] and keys_of(second) == [opening]
    assert keys_of(branch) == [opening, "text", "", "3"]


@pytest.mark.parametrize(
    "body, why",
    [
        ("raise KeyError('board')", r"state_key\(\) failed for task .*x.py:2: KeyError: 'board'"),
        ("return float('nan')", "the state_key nan is neither text nor JSON: Out of range float"),
        ("return {1, 2}", "neither text nor JSON: Object of type set is not JSON serializable"),
        ("return object()", "Object of type object is not JSON serializable"),
        ("a = []; a.append(a); return a", "neither text nor JSON: Circular reference"),
    ],
)
def test_a_hook_that_fails_fails_the_episode_with_its_reason(env_of, body, why):
    env = env_of(f"def state_key(messages):\n    {body}\ndef reward_fn(): return 1.0")
    assert re.search(why, error_of(env, "a"))


def test_a_hook_that_hangs_fails_the_episode_at_its_deadline(env_of):
    code = "import time\ndef state_key(): time.sleep(5)\ndef reward_fn(): return 1.0"
    assert "state_key() ran longer than 0.2 s" in error_of(env_of(code, hook_timeout_s=0.2), "a")


@pytest.mark.parametrize(
    "code, why",
    [
        ("async def rollout(task, actors): return []", "rollout() replaces 'state_key'"),
        (
            "def agent(task, llm): return 1\ndef reward_fn(): return 1.0",
            "agent replaces 'state_key'",
        ),
        ("", "defines no hook"),
    ],
)
def test_it_is_refused_where_nobody_would_call_it(env_of, code, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        env_of(f"{code}\ndef state_key(messages): return 1")


def test_its_name_and_its_arguments_are_checked_at_start_up(env_of):
    with pytest.raises(ValueError, match="'state_keys' is not a hook; did you mean 'state_key'"):
        env_of("def reward_fn(): return 1\ndef state_keys(messages): return 1")


FLAGS = "--model m --out runs/x --env_path x.py"


@pytest.mark.parametrize(
    "flag", ["--algo.gigpo_coef 0.5", "--actors.policy.algo.gigpo_discount 0.9"]
)
def test_flags_of_states_need_an_environment_that_tells_them(env_of, flag):
    config = parse_config(words(FLAGS, flag))
    without = env_of("def reward_fn(): return 1")
    with pytest.raises(ValueError, match=r"defines none; add def state_key\(messages, state\)"):
        check_environments(config, {"x": without})
    with_hook = env_of("def reward_fn(): return 1\ndef state_key(): return 1")
    check_environments(config, {"x": with_hook})


def test_a_recorded_step_is_learned_again_by_its_keys(places, tmp_path):
    flags = "--model {model} --env_path {dir}/keyed.py --max_tokens 10 --max_prompt_tokens 24 "
    flags += "--tasks_per_step 4 --group_size 4 --num_steps 2 --optim.lr 1e-2 --save_every 1"
    out = run_command(tmp_path / "run", words(flags.format(**places)))
    rows = trajectories(out / "rollouts/step_000002.jsonl.zst")
    keys = {turn["state_key"] for row in rows for turn in row["turns"]}
    assert "[1, " in "".join(keys) and len(keys) > 2
    result = replay(out, 2, [])
    assert result.replayed == result.recorded
    off = replay(out, 2, ["--algo.gigpo_coef", "0"])
    assert off.replayed["learn/policy/grad_norm"] != result.replayed["learn/policy/grad_norm"]


def test_the_environment_of_the_page_says_where_a_turn_begins(env_of):
    page = (ROOT / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(# walk.py\n.*?)```", page, re.S)
    row = {"prompt": "l or r?", "goal": 4}
    arrived = play(env_of(code), "l", "r", "r", "r", row=row)
    assert (keys_of(arrived), arrived.reward) == (["2", "1", "2", "3"], 1.0)
    fallen = play(env_of(code), "l", "what", "l", row=row)
    assert (keys_of(fallen), fallen.reward) == (["2", "1", "1"], 0.0)
