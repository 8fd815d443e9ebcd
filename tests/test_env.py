from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_core.data.rows import load_rows
from rl_core.data.tasks import make_task
from rl_core.sampling.env import load_env
from rl_core.sampling.hooks import HookError
from rl_core.types import Completion, SamplingParams, Trajectory, Turn

ENVS = Path(__file__).parent.parent / "envs"
ROW = {"messages": [{"role": "user", "content": "2+2"}], "answer": "4", "tests": [1, 2]}


class Script:
    """A speaker that says what is written, and remembers how it was asked."""

    def __init__(
        self, *replies: str, name: str = "policy", max_turns: int = 8, room: int = 99, is_trainable: bool = True
    ):
        self.replies, self.name, self.max_turns, self.room = list(replies), name, max_turns, room
        self.is_trainable, self.params = is_trainable, SamplingParams(max_tokens=8)
        self.conversations: list[Conversation] = []

    def converse(self, messages, tools=None, params=None, label=""):
        self.conversations.append(Conversation(self, messages, tools))
        return self.conversations[-1]


class Conversation:
    def __init__(self, script, messages, tools):
        self.script, self.messages, self.tools = script, list(messages), tools
        self.turns, self.truncated = [], False

    async def respond(self):
        text = self.script.replies[len(self.turns)]
        self.truncated = text.endswith("...")
        reason = "length" if self.truncated else "stop"
        completion = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason=reason, policy_version=0)
        self.turns.append(Turn(new_ids=[0], is_fresh=not self.turns, completion=completion))
        self.messages.append({"role": "assistant", "content": text})
        return completion

    def add(self, messages):
        self.messages.extend(messages)
        self.truncated = len(self.messages) >= self.script.room
        return not self.truncated

    def trajectory(self, task, *, reward, reward_parts, metrics):
        return Trajectory(
            task_id=task.id, env=task.env, group_id="", actor=self.script.name, messages=list(self.messages),
            turns=list(self.turns), reward=reward,
            reward_parts=reward_parts, metrics=metrics, status="truncated" if self.truncated else "ok",
        )  # fmt: skip


@pytest.fixture
def env_of(tmp_path, monkeypatch):
    """env_of(code) -> the environment of a file x.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def make(code: str, name: str = "x.py", **options):
        Path(name).write_text(textwrap.dedent(code))
        return load_env(name, **options)

    return make


def play(env, *replies, row=ROW, **options) -> Trajectory:
    script = Script(*replies, **options)
    [trajectory] = asyncio.run(env.rollout(make_task(row, 0, env.name, "train"), {"policy": script}))
    return trajectory


def texts(trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages]


# One turn


def test_reward_fn_of_messages_and_a_column_works_exactly_so(env_of):
    env = env_of("def reward_fn(messages, answer): return float(messages[-1]['content'] == answer)")
    right, wrong = play(env, "4"), play(env, "5")
    assert (right.reward, right.reward_parts, right.status) == (1.0, {"reward_fn": 1.0}, "ok")
    assert wrong.reward == 0.0
    assert texts(right) == ["2+2", "4"]
    assert (env.name, env.is_multi_turn, env.max_turns, env.tools, env.load_tasks) == ("x", False, None, None, None)


def test_hooks_get_what_they_name(env_of):
    env = env_of("""
        def start(prompt, messages, answer): return [prompt, messages, answer]
        async def reward_fn(messages, prompt, completion, task, trajectory, actor, state, answer, absent=7, *, tests):
            assert prompt == [{"role": "user", "content": "2+2"}] and messages == prompt + [
                {"role": "assistant", "content": completion}]
            assert (task.id, task.row["answer"], trajectory.turns[0].completion.text) == ("train/0", "4", "four")
            assert (actor, state, answer, absent, tests) == ("policy", [prompt, prompt, "4"], "4", 7, [1, 2])
            return 1
    """)
    assert play(env, "four").reward == 1


def test_keyword_arguments_get_everything(env_of):
    env = env_of("def reward_fn(answer, **rest): return len(rest) + 100 * (rest['tests'] == [1, 2])")
    # messages prompt completion task trajectory actor, and the column tests; not actors, which only async hooks can use
    assert play(env, "4").reward == 107


def test_a_parameter_with_a_default_gets_its_column_where_there_is_one(env_of):
    env = env_of("def reward_fn(messages, bonus=0.5): return bonus")
    env.check_columns([ROW, ROW | {"bonus": 2}], "rows")
    assert play(env, "4").reward == 0.5
    assert play(env, "4", row=ROW | {"bonus": 2}).reward == 2


def test_sync_async_and_callable_objects_are_hooks(env_of):
    for code in (
        "async def reward_fn(answer):\n    import asyncio\n    await asyncio.sleep(0)\n    return 3",
        "class R:\n    async def __call__(self, answer): return 3\nreward_fn = R()",
        "class R:\n    def __call__(self, answer): return 3\nreward_fn = R()",
        "async def f(): return 3\nreward_fn = lambda answer: f()",
        "import functools\nreward_fn = functools.partial(lambda k, answer: k, 3)",
    ):
        assert play(env_of(code), "4").reward == 3


def test_hooks_cannot_spoil_the_conversation_nor_the_task(env_of):
    env = env_of("""
        def start(task):
            task.row.clear(); task.messages[0]["content"] = "spoilt"
        def reward_fn(messages, prompt, tests, task, trajectory):
            messages[0]["content"] = prompt[0]["content"] = "spoilt"
            del messages[1:]; tests.clear(); task.row.clear(); trajectory.turns[0].completion.token_ids.clear()
            return 1
    """)
    task = make_task(ROW, 0, "x", "train")
    for _ in range(2):
        [t] = asyncio.run(env.rollout(task, {"policy": Script("4")}))
        assert texts(t) == ["2+2", "4"]
        assert t.turns[0].completion.token_ids == [1]
    assert task.row == {"messages": [{"role": "user", "content": "2+2"}], "answer": "4", "tests": [1, 2]}


def test_a_dict_of_rewards_is_summed_and_kept(env_of):
    env = env_of("def reward_fn(messages): return {'right': 1, 'form': -0.25}")
    t = play(env, "4")
    assert (t.reward, t.reward_parts) == (0.75, {"right": 1.0, "form": -0.25})


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.ones(1), torch.tensor(1.0), torch.ones(1)]
)
def test_every_finite_scalar_is_a_reward(env_of, value):
    env = env_of("value = None\ndef reward_fn(messages): return value")
    env.hooks["reward_fn"].function.__globals__["value"] = value
    t = play(env, "4")
    assert type(t.reward) is float
    assert (t.reward, t.reward_parts) == (1.0, {"reward_fn": 1.0})


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("float('nan')", r"what reward_fn\(\) returned is nan; a reward must be finite"),
        ("float('inf')", "is inf; a reward must be finite"),
        ("10**400", "a reward must be finite"),
        ("None", "returned is None; a reward must be a finite number"),
        ("'1.0'", r"returned is '1\.0'; a reward must be a finite number"),
        ("[1.0]", r"returned is \[1\.0\]; a reward"),
        ("1j", "returned is 1j; a reward"),
        ("{}", "a dict must name each part"),
        ("{1: 2.0}", "a dict must name each part"),
        ("{'a': 1, 'b': float('nan')}", r"part 'b' of what reward_fn\(\) returned is nan"),
        ("__import__('torch').ones(2)", "a reward must be a finite number"),
        ("__import__('torch').tensor(float('nan'))", "a reward must be finite"),
        ("__import__('numpy').float32('nan')", "a reward must be finite"),
    ],
)
def test_what_is_no_finite_number_is_no_reward(env_of, value, match):
    env = env_of(f"def reward_fn(messages): return {value}")
    with pytest.raises(ValueError, match=rf"x\.py: .*{match}"):
        play(env, "4")


# Several turns


def test_interact_goes_on_until_it_has_nothing_to_say(env_of):
    for end in ("None", "[]", "{'messages': []}", "{}", "{'done': True}"):
        env = env_of(f"""
            def interact(messages):
                return [{{"role": "user", "content": "more"}}] if len(messages) < 5 else {end}
            def reward_fn(messages): return len(messages)
        """)
        t = play(env, "a", "b", "c")
        assert texts(t) == ["2+2", "a", "more", "b", "more", "c"][:6]
        assert t.reward == 6
        assert env.is_multi_turn


def test_interact_may_be_async_and_give_rewards_and_an_end(env_of):
    env = env_of("""
        async def interact(messages, completion):
            return {"messages": [{"role": "user", "content": "ok"}], "reward": int(completion), "done": completion == "3"}
        def reward_fn(messages): return {"last": len(messages)}
    """)
    t = play(env, "1", "2", "3", "4")
    assert t.reward_parts == {"interact": 6.0, "last": 7.0}
    assert t.reward == 13
    assert texts(t) == ["2+2", "1", "ok", "2", "ok", "3", "ok"]


def test_an_environment_of_interact_alone_scores_by_it(env_of):
    env = env_of("def interact(messages, completion): return {'reward': 2} if completion == 'win' else None")
    assert play(env, "win").reward == 2
    lost = play(env, "lose")
    assert (lost.reward, lost.reward_parts) == (0.0, {"interact": 0.0})


def test_after_the_last_turn_only_the_reward_of_interact_counts(env_of):
    env = env_of("def interact(messages): return {'messages': [{'role': 'user', 'content': 'x'}], 'reward': 1}")
    t = play(env, "a", "b", "c", max_turns=2)
    assert texts(t) == ["2+2", "a", "x", "b"]
    assert (t.reward, t.status) == (2, "ok")


def test_a_truncated_reply_ends_the_episode_and_is_scored(env_of):
    code = """
        def interact(messages): return [{"role": "user", "content": "x"}]
        def reward_fn(completion): return 0.5
    """
    cut = play(env_of(code), "a", "b...", "c")
    assert (texts(cut), cut.reward, cut.status) == (["2+2", "a", "x", "b..."], 0.5, "truncated")
    full = play(env_of(code), "a", "b", "c", room=5)
    assert (texts(full), full.reward, full.status) == (["2+2", "a", "x", "b", "x"], 0.5, "truncated")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("'go on'", r'must be a list of \{"role": \.\.\., "content": \.\.\.\}, is \'go on\''),
        ("['go on']", "message 1 is 'go on'"),
        ("[{'content': 'x'}]", "message 1 has no role"),
        ("[{'role': 'user', 'content': 3}]", "message 1 has no text"),
        ("{'role': 'user', 'content': 'x'}", "has an unknown key '(role|content)'; known: messages, reward, done"),
        ("{'messages': 'x'}", "must be a list"),
        ("{'messages': [], 'reward': float('nan')}", "a reward must be finite"),
        ("True", "is True"),
    ],
)
def test_interact_must_return_messages(env_of, value, match):
    env = env_of(f"def interact(messages): return {value}")
    with pytest.raises(ValueError, match=rf"x\.py: what interact\(\) returned {match}|x\.py: .*{match}"):
        play(env, "a", "b")


def test_a_part_that_two_hooks_give_is_refused(env_of):
    env = env_of("def interact(): return {'reward': 1}\ndef reward_fn(): return {'interact': 1}")
    with pytest.raises(ValueError, match="'interact' is given by two hooks"):
        play(env, "a")


def test_state_is_made_once_for_each_episode(env_of):
    env = env_of("""
        def start(task, answer): return {"seen": [], "task": task.id, "answer": answer}
        def interact(state, completion):
            state["seen"].append(completion)
            return [{"role": "user", "content": "x"}] if len(state["seen"]) < 3 else None
        def reward_fn(state): return len(state["seen"]) + 10 * (state["answer"] == "4")
    """)
    assert [play(env, "a", "b", "c").reward for _ in range(2)] == [13, 13]


def test_tools_reach_the_chat_template_and_max_turns_the_environment(env_of):
    env = env_of("tools = [{'type': 'function'}]\nmax_turns = 3\ndef reward_fn(): return 1")
    script = Script("a")
    asyncio.run(env.rollout(make_task(ROW, 0, "x", "train"), {"policy": script}))
    assert script.conversations[0].tools == env.tools == [{"type": "function"}]
    assert env.max_turns == 3


def test_several_actors_are_refused_where_nothing_says_whose_turn_it_is(env_of):
    env = env_of("def reward_fn(): return 1")
    with pytest.raises(ValueError, match=r'there are 2 actors, bob, alice, .* add turns = "bob -> alice"'):
        asyncio.run(env.rollout(make_task(ROW, 0, "x", "train"), {"bob": Script("a"), "alice": Script("a")}))


# Hooks that fail


def test_a_hook_that_raises_is_named_with_the_line_of_the_users_file(env_of):
    code = """
        import json
        def check(text):
            return json.loads(text)
        HOOK reward_fn(completion):
            return check(completion)
    """
    for kind in ("def", "async def"):
        env = env_of(code.replace("HOOK", kind))
        with pytest.raises(
            HookError, match=r"reward_fn\(\) failed for task train/0: x\.py:4: JSONDecodeError: Exp"
        ) as e:
            play(env, "no json")
        assert type(e.value.__cause__).__name__ == "JSONDecodeError"


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    "what", ["SystemExit(3)", "StopIteration", "TimeoutError('mine')", "AssertionError", "KeyError('a')"]
)
def test_whatever_a_hook_raises_is_a_hook_error(env_of, kind, what):
    env = env_of(f"{kind} reward_fn(messages):\n    raise {what}")
    with pytest.raises(HookError, match=r"x\.py:2: "):
        play(env, "a")


@pytest.mark.parametrize(
    "body",
    ["import time; time.sleep(100)", "return asyncio.sleep(100)", "await asyncio.sleep(100)", "await stubborn()"],
)
def test_a_hook_that_hangs_is_given_up_at_its_deadline(env_of, body):
    env = env_of(
        f"""
        import asyncio
        async def stubborn():
            for _ in range(100):
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    pass
        {"async " if "await" in body else ""}def reward_fn(messages):
            {body}
        """,
        hook_timeout_s=0.2,
    )

    async def run():
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"x\.py: reward_fn\(\) ran longer than 0\.2 s for task train/0"):
            await env.rollout(make_task(ROW, 0, "x", "train"), {"policy": Script("a")})
        return time.monotonic() - began

    loop = asyncio.new_event_loop()  # asyncio.run would wait for the stubborn one
    assert 0.2 <= loop.run_until_complete(run()) < 1.5
    loop.close()


def test_hanging_hooks_stop_neither_other_hooks_nor_the_exit_of_the_interpreter(env_of):
    env_of("""
        import time
        def reward_fn(completion):
            if completion == "hang": time.sleep(100)
            return 1
    """)
    code = textwrap.dedent("""
        import asyncio, sys, time
        sys.path[:0] = [%r, %r]
        from test_env import ROW, Script, load_env, make_task
        env = load_env("x.py", hook_timeout_s=0.3)
        async def main():
            task = make_task(ROW, 0, "x", "train")
            replies = ["hang"] * 40 + ["fine"] * 20
            results = await asyncio.gather(
                *(env.rollout(task, {"policy": Script(r)}) for r in replies), return_exceptions=True)
            assert [type(r).__name__ for r in results] == ["TimeoutError"] * 40 + ["list"] * 20, results
        asyncio.run(main())
        print("done", flush=True)
    """) % (str(ENVS.parent), str(ENVS.parent / "tests"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_time_in_the_queue_is_not_time_in_the_hook(env_of):
    # The last jobs wait longer than the deadline, and a busy machine may stretch each by a second.
    env = env_of("import time\ndef reward_fn(): time.sleep(0.25); return 1", hook_timeout_s=1.5)
    task = make_task(ROW, 0, "x", "train")

    async def run():
        return await asyncio.gather(*(env.rollout(task, {"policy": Script("a")}) for _ in range(100)))

    before = set(threading.enumerate())
    assert len(asyncio.run(run())) == 100
    assert 0 < len(set(threading.enumerate()) - before) <= 16


def test_a_cancelled_episode_leaves_the_threads_usable(env_of):
    env = env_of("import time\ndef reward_fn(completion): time.sleep(float(completion)); return 1", hook_timeout_s=0.5)
    task = make_task(ROW, 0, "x", "train")

    async def run():
        hung = [asyncio.ensure_future(env.rollout(task, {"policy": Script("100")})) for _ in range(20)]
        await asyncio.sleep(0.1)
        for future in hung:
            future.cancel()
        [trajectory] = await asyncio.wait_for(env.rollout(task, {"policy": Script("0")}), 5)
        return trajectory.reward

    assert asyncio.run(run()) == 1


# What is refused at start-up


def test_an_unknown_argument_is_refused_with_the_nearest_name(env_of):
    env = env_of("def reward_fn(messages, anwser): return 1")
    with pytest.raises(
        ValueError, match=r"x\.py: reward_fn\(\) names 'anwser', .* row 1 of a\.jsonl; did you mean 'answer'\?"
    ):
        env.check_columns([ROW], "a.jsonl")
    env.check_columns([ROW | {"anwser": 1}], "a.jsonl")


def test_every_row_is_checked_for_the_columns_that_hooks_name(env_of):
    env = env_of("def reward_fn(messages, answer): return 1")
    with pytest.raises(ValueError, match=r"row 3 of a\.jsonl"):
        env.check_columns([ROW, ROW, {"messages": ROW["messages"]}], "a.jsonl")


def test_a_tables_columns_are_checked(env_of, tmp_path):
    import datasets

    datasets.Dataset.from_list([ROW]).save_to_disk(str(tmp_path / "rows"))
    rows = load_rows(str(tmp_path / "rows"))
    env_of("def reward_fn(answer): return 1").check_columns(rows, "rows")
    with pytest.raises(ValueError, match=r"'anser'.*did you mean 'answer'"):
        env_of("def reward_fn(anser): return 1").check_columns(rows, "rows")


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def reward_fn(state): return 1", r"define start\(task\), which makes it"),
        ("def start(completion): pass\ndef reward_fn(): return 1", r"does not exist yet when start\(\) is called"),
        ("def start(state): pass\ndef reward_fn(): return 1", r"start\(\) names 'state'"),
    ],
)
def test_an_argument_that_cannot_be_there_is_refused(env_of, code, match):
    with pytest.raises(ValueError, match=match):
        env_of(code).check_columns([ROW], "rows")


def test_state_is_a_column_where_no_start_makes_it(env_of):
    env = env_of("def reward_fn(state): return state")
    env.check_columns([ROW | {"state": 5}], "rows")
    assert play(env, "a", row=ROW | {"state": 5}).reward == 5


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def rewardfn(messages): return 1", "'rewardfn' is no hook; did you mean 'reward_fn'"),
        ("def reward_func(messages): return 1", "did you mean 'reward_fn'"),
        ("def reward_function(messages): return 1", "did you mean 'reward_fn'"),
        ("def reward_fn(): return 1\ndef interract(messages): pass", "'interract' is no hook; did you mean 'interact'"),
        ("def reward_fn(): return 1\nmaxturns = 3", "did you mean 'max_turns'"),
        ("def reward_fn(): return 1\ndef load_task(split): pass", "did you mean 'load_tasks'"),
        ("x = 1", r"defines no hook; it needs def reward_fn\(messages, \.\.\.\)"),
        ("reward_fn = 1", "reward_fn must be a function, is 1"),
        ("def reward_fn(): return 1\nmax_turns = 0", "max_turns = 0 must be a whole number of at least 1"),
        ("def reward_fn(): return 1\nmax_turns = '3'", "max_turns = '3' must be"),
        ("def reward_fn(): return 1\ntools = [print]", "must be a list of OpenAI schemas"),
        ("def reward_fn(messages, /): return 1", r"reward_fn\(\) gets arguments by name; drop the '/'"),
        ("def reward_fn(messages:\n  return 1", r"x\.py:1: SyntaxError"),
        ("import math\n\n1 / 0", r"x\.py does not load: x\.py:3: ZeroDivisionError: division by zero"),
        ("import no_such_library", r"x\.py:1: ModuleNotFoundError: .*pip install it"),
        ("import sys\nsys.exit(1)", r"x\.py:2: SystemExit"),
    ],
)
def test_a_bad_file_is_refused(env_of, code, match):
    with pytest.raises(ValueError, match=match):
        env_of(code)


def test_a_helper_may_have_a_name_like_a_hook_that_is_there(env_of):
    env_of(
        "def reward_fn(): return 1\ndef reward_fn2(): return 1\nMAX_TURNS = 3\nmax_turns = MAX_TURNS\n_interacts = 1"
    )


def test_a_missing_file_is_refused_with_the_nearest_name(env_of):
    env_of("def reward_fn(): return 1", "sorting.py")
    with pytest.raises(ValueError, match=r"sort1ng\.py: no such file; did you mean 'sorting\.py'\?"):
        load_env("sort1ng.py")


def test_a_file_may_have_dataclasses_and_import_what_lies_beside_it(env_of):
    Path("beside_me.py").write_text("HALF = 0.5")
    env = env_of("""
        from __future__ import annotations
        from dataclasses import dataclass
        from beside_me import HALF
        @dataclass
        class Game:
            score: float = HALF
        def start(task): return Game()
        def reward_fn(state): return state.score
    """)
    assert play(env, "a").reward == 0.5


def test_load_tasks_gives_checked_rows(env_of):
    env = env_of("def reward_fn(): return 1\ndef load_tasks(split):\n    yield {'prompt': split}")
    assert env.load_tasks("eval") == [{"prompt": "eval"}]
    for body, match in (
        ("return None", r"load_tasks\('train'\) returned None"),
        ("return [1]", "row 1 must be a dict, is 1"),
        ("return 1 / 0", r"failed: x\.py:3: ZeroDivisionError"),
    ):
        with pytest.raises(ValueError, match=match):
            env_of(f"def reward_fn(): return 1\ndef load_tasks(split):\n    {body}").load_tasks("train")


# The environments that come with the project


@pytest.mark.parametrize("name", ["sort_digits", "calculator"])
def test_an_environment_brings_disjoint_splits_that_never_change(name):
    env = load_env(str(ENVS / f"{name}.py"))
    train, held_out = ({r["messages"][0]["content"] for r in env.load_tasks(s)} for s in ("train", "eval"))
    assert train and held_out and not train & held_out
    assert env.load_tasks("train") == load_env(str(ENVS / f"{name}.py")).load_tasks("train")
    for split in ("train", "eval"):
        env.check_columns(env.load_tasks(split), split)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("12345", 1), (" 12345\n", 1), ("12354", 0.6), ("12344", 0), ("1234", 0), ("123456", 0), ("", 0)],
)
def test_sorting_is_rewarded_by_right_positions(reply, reward):
    row = {"messages": [{"role": "user", "content": "31524"}], "answer": "12345"}
    assert play(load_env(str(ENVS / "sort_digits.py")), reply, row=row).reward == reward


@pytest.mark.parametrize(
    ("replies", "said", "reward"),
    [
        (["<call>37*8</call>", "296"], "296", 1),
        (["<call> 37 * 8 </call>", "295"], "296", 0),
        (["<call>__import__('os')</call>", "296"], "error", 1),
        (["<call>9**9**9</call>", "x"], "error", 0),
        (["296"], None, 1),
        (["0296"], None, 1),
        (["297"], None, 0),
        (["<call>37*8</call>", "<call>37*8</call>"], "296", 0),
    ],
)
def test_the_calculator_answers_calls_and_scores_the_last_reply(replies, said, reward):
    env = load_env(str(ENVS / "calculator.py"))
    row = {"messages": [{"role": "user", "content": "37*8"}], "answer": 296}
    t = play(env, *replies, row=row, max_turns=env.max_turns)
    assert t.reward == reward
    tools = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert tools == ([said] if said else [])


def test_the_shipped_environments_are_short():
    for path in ENVS.glob("*.py"):
        most = 110 if path.stem in ("tic_tac_toe", "nim") else 40  # a game brings its rules and an opponent
        assert 5 <= len(path.read_text().splitlines()) <= most, path
