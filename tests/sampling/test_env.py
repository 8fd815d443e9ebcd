"""A user's file: arguments, results and errors of hooks; deadlines; errors at start-up."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import load_rows, wait_until
from stage import ROW, cast, error_of, one, play, run, talk

from rl_core.data.task_rows import make_task
from rl_core.environments.env_file import load_env
from rl_core.environments.row_columns import check_columns
from rl_core.environments.run_checks import check_actors
from rl_core.run.evaluation.episode_metrics import rollout_metrics
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.deadlines import run_within
from rl_core.sampling.hooks import Hook
from rl_core.tools.cli import main as rl_core
from rl_core.types import RunError, SamplingParams, Task

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "envs"


# Episodes of one actor


MORE = "[{'role': 'user', 'content': 'x'}]"
AS_TEXT = (
    f"def interact(messages): return {MORE}\ndef reward_fn(completion): return float(completion)\n"
)
REWARDED = f"""
async def interact(messages, completion):
    return {{"messages": {MORE}, "reward": int(completion), "done": completion == "3"}}
def reward_fn(messages): return {{"last": len(messages)}}
"""
PLUS_HALF = "def reward_fn(bonus=0.5): return bonus\n"
EXACT = "def reward_fn(messages, answer): return float(messages[-1]['content'] == answer)"
ALONE = "def interact(completion): return {'reward': 2} if completion == 'win' else None"
# The file, replies and options, and what comes out: messages, parts of the reward, rewards of the
# turns, status.
EPISODES = {
    "reward_fn of messages and a column": (
        EXACT,
        ["4"],
        {},
        "u:2+2|a:4",
        {"reward_fn": 1},
        [],
        "ok",
    ),
    "a wrong reply": (EXACT, ["5"], {}, "u:2+2|a:5", {"reward_fn": 0}, [], "ok"),
    "interact is async, rewards turns and ends": (
        REWARDED,
        "1234",
        {},
        "u:2+2|a:1|u:x|a:2|u:x|a:3|u:x",
        {"interact": 6, "last": 7},
        [1, 2, 10],
        "ok",
    ),
    "after the last turn only the reward of interact counts": (
        REWARDED,
        "1234",
        {"max_turns": 2},
        "u:2+2|a:1|u:x|a:2",
        {"interact": 3, "last": 4},
        [1, 6],
        "ok",
    ),
    "interact alone": (ALONE, ["win"], {}, "u:2+2|a:win", {"interact": 2}, [2], "ok"),
    "interact alone gave nothing": (
        ALONE,
        ["lose"],
        {},
        "u:2+2|a:lose",
        {"interact": 0},
        [0],
        "ok",
    ),
    "a reply that is cut off is scored": (
        AS_TEXT,
        ["1", "55555", "1"],
        {"max_tokens": 3},
        "u:2+2|a:1|u:x|a:555",
        {"reward_fn": 555},
        [],
        "truncated",
    ),
    "a full context ends the episode": (
        AS_TEXT,
        "123",
        {"limits": {"max_context_tokens": 17}},
        "u:2+2|a:1|u:x|a:2|u:x",
        {"reward_fn": 2},
        [],
        "truncated",
    ),
    "a default is for rows without the column": (
        PLUS_HALF,
        "4",
        {},
        "u:2+2|a:4",
        {"reward_fn": 0.5},
        [],
        "ok",
    ),
    "a default is not for rows with it": (
        PLUS_HALF,
        "4",
        {"row": ROW | {"bonus": 2}},
        "u:2+2|a:4",
        {"reward_fn": 2},
        [],
        "ok",
    ),
}


@pytest.mark.parametrize(
    "code, replies, options, messages, parts, turn_rewards, status",
    EPISODES.values(),
    ids=EPISODES,
)
def test_an_episode_of_one_actor(
    env_of, code, replies, options, messages, parts, turn_rewards, status
):
    t = play(env_of(code), *replies, **options)
    assert ("|".join(talk(t.messages)), t.status) == (messages, status)
    assert (t.reward_parts, t.reward, t.turn_rewards) == (parts, sum(parts.values()), turn_rewards)


@pytest.mark.parametrize("end", ["None", "[]", "{'messages': []}", "{}", "{'done': True}"])
def test_interact_goes_on_until_it_has_nothing_to_say(env_of, end):
    env = env_of(
        f"def interact(messages): return {MORE} if len(messages) < 5 else {end}\ndef reward_fn(): "
        "return 1"
    )
    assert talk(play(env, "a", "b", "c").messages) == ["u:2+2", "a:a", "u:x", "a:b", "u:x", "a:c"]


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
    env = env_of(
        "def reward_fn(answer, **rest): return len(rest) + 100 * (rest['tests'] == [1, 2])"
    )
    # messages prompt completion task trajectory actor, and the column tests; not actors, which only
    # async hooks can use
    assert play(env, "4").reward == 107


def test_sync_async_and_callable_objects_are_hooks(env_of):
    for code in (
        "async def reward_fn(answer):\n    import asyncio\n    await asyncio.sleep(0)\n    return "
        "3",
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
        def group_reward_fn(trajectories):
            for t in trajectories: t.turns[0].new_ids.clear(); t.messages[0]["content"] = "spoilt"; t.metrics["x"] = 1
            return [0.0] * len(trajectories)
    """)
    row = dict(ROW, tests=[1, 2])
    for t in run(env, cast(policy="4"), rows=[row], group_size=2):
        assert (talk(t.messages), len(t.turns[0].completion.token_ids), t.metrics) == (
            ["u:2+2", "a:4"],
            2,
            {},
        )
        assert t.turns[0].new_ids
    assert row == ROW


def test_every_finite_scalar_is_a_reward(env_of):
    values = [
        True,
        1,
        1.0,
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.ones(1),
        torch.tensor(1.0),
        torch.ones(1),
    ]
    env = env_of("values = []\ndef reward_fn(messages): return values.pop()")
    env.hooks["reward_fn"].function.__globals__["values"].extend(values)
    for t in run(env, cast(policy="4"), group_size=len(values)):
        assert (type(t.reward), t.reward, t.status) == (float, 1.0, "ok"), t.error


@pytest.mark.parametrize(
    "value",
    [
        "float('nan')", "float('inf')", "10**400", "'1.0'", "[1.0]", "1j", "{}", "{1: 2.0}",
        "{'a': 1, 'b': float('nan')}",
        "__import__('torch').ones(2)", "__import__('torch').tensor(float('nan'))", "__import__('numpy').float32('nan')",
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_no_reward(env_of, value):
    error = error_of(env_of(f"def reward_fn(messages): return {value}"), "4")
    assert error.startswith("x.py: what reward_fn() returned")
    assert (
        "a reward must be a finite number, or a dict of them" in error
        or "a dict must name each part" in error
    )


TWO_REWARDS = """
from rl_core import reward
@reward
def exact(answer, completion): return None if answer == "open" else float(completion == answer)
@reward(weight=0.5)
def brief(completion): return None if len(completion) > 5 else 1.0
"""
OWN_ROLLOUT = """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    return [reply.trajectory({"exact": FIRST, "brief": 0.5 * SECOND if SECOND else SECOND})]
"""
PARTS = "def reward_fn(): return {'exact': FIRST, 'brief': 0.5 * SECOND if SECOND else SECOND}"
GROUPED = """
from rl_core import reward
@reward
def exact(): return FIRST
@reward(weight=0.5, batched=True)
def brief(trajectories): return [SECOND for t in trajectories]
@reward(weight=0)
def seen(): return None
"""


@pytest.mark.parametrize("code", [OWN_ROLLOUT, PARTS, GROUPED, TWO_REWARDS])
@pytest.mark.parametrize(
    "first, second, reward, parts",
    [
        (None, 1.0, 0.5, {"brief": 0.5}),
        (1.0, None, 1.0, {"exact": 1.0}),
        (1.0, 1.0, 1.5, {"exact": 1.0, "brief": 0.5}),
        (None, None, None, {}),
    ],
)
def test_a_reward_of_none_is_left_out_of_the_sum_and_counted(
    env_of, code, first, second, reward, parts
):
    code = code.replace("FIRST", repr(first)).replace("SECOND", repr(second))
    reply = "right" if second else "too long"
    row = dict(ROW, answer="open" if first is None else reply)
    [t] = run(env_of(code), cast(policy=reply), rows=[row])
    assert (t.reward, t.status) == (reward, "ok" if parts else "failed"), t.error
    if parts:
        assert t.reward_parts == parts
        none = {f"reward_none/{name}" for name in {"exact", "brief"} - parts.keys()}
        none |= {"reward_none/seen"} if "seen" in code else set()
        assert {name for name in t.metrics if name.startswith("reward_none/")} == none
        metrics = rollout_metrics([t, replace(t, index=t.index + 1)])
        assert [metrics[name].value for name in none] == [2] * len(none)
    else:
        assert "None" in t.error and "must be a number" in t.error
        assert "is a `return` missing?" in t.error or "rollout()" in t.error


def test_a_prompt_that_fills_the_context_is_an_error(env_of):
    error = run(env_of(AS_TEXT), cast(limits={"max_context_tokens": 4}, policy="1"))[0].error
    assert "fills the context of 4; raise --max_prompt_tokens" in error


@pytest.mark.parametrize(
    "value, match",
    [
        ("'go up'", 'must be a list of {"role": ..., "content": ...}, is \'go up\''),
        ("['go up']", "message 1 is 'go up'"),
        ("[{'role': 'user', 'content': 3}]", "message 1 is {'role': 'user', 'content': 3}"),
        ("{'mesages': []}", "has an unknown key 'mesages'; known: messages, reward, done"),
        ("{'messages': [], 'reward': float('nan')}", "a reward must be a finite number"),
    ],
)
def test_interact_must_return_messages(env_of, value, match):
    error = error_of(env_of(f"def interact(messages): return {value}"), "a", "b")
    assert "x.py: what interact() returned" in error and match in error


def test_a_part_that_two_hooks_give_is_refused(env_of):
    env = env_of("def interact(): return {'reward': 1}\ndef reward_fn(): return {'interact': 1}")
    assert "two hooks give the reward part 'interact'" in error_of(env, "a")


def test_state_is_made_once_for_each_episode(env_of):
    env = env_of("""
        def start(task, answer): return {"seen": [], "answer": answer}
        def interact(state, completion):
            state["seen"].append(completion)
            return [{"role": "user", "content": "x"}] if len(state["seen"]) < 3 else None
        def reward_fn(state): return len(state["seen"]) + 10 * (state["answer"] == "4")
    """)
    assert [t.reward for t in run(env, cast(policy=["a", "b", "c"]), group_size=3)] == [13] * 3


def test_tools_reach_the_chat_template_and_max_turns_the_episode(env_of):
    talk = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    template = "{{ tools[0].type if tools }}" + talk
    env = env_of(
        "tools = [{'name': 'f'}]\nmax_turns = 3\ndef interact(): return [{'role': 'user', "
        "'content': 'x'}]"
    )
    actors = cast(template=template, policy="a")
    assert len(one(run(env, actors)).turns) == 3
    assert actors["policy"].engine.asked[0][0].startswith("function<|user|>")


ADDS = """
def add(a: int, b: int):
    '''Adds.

    Args:
        a: one
        b: the other
    '''
    return str(a + b)

tools = [add]

def interact(messages):
    calls = [call["function"] for call in messages[-1].get("tool_calls", [])]
    return [{"role": "tool", "content": add(**call["arguments"])} for call in calls]

def reward_fn(completion): return float(completion)
"""


def test_a_python_function_is_a_tool_that_interact_answers(env_of):
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    env = env_of(ADDS)
    assert env.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    done = play(env, f"I add.{call}", "4", max_tokens=200)
    assert talk(done.messages) == ["u:2+2", "a:I add.", "t:4", "a:4"] and done.reward == 4
    assert done.metrics == {"tool_parse_failed": 0}
    assert [turn.is_fresh for turn in done.turns] == [True, False]
    env, broken = (
        env_of(ADDS.replace("float(completion)", "len(completion)")),
        call.replace("2}", "2"),
    )
    failed = play(env, broken, max_tokens=200)
    assert failed.metrics == {"tool_parse_failed": 1} and failed.messages[-1]["content"] == broken


# Hooks that fail, or take too long


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_hook_that_raises_is_named_with_the_line_and_its_reply_is_kept(env_of, kind):
    env = env_of(f"""
        import json
        def check(text):
            return json.loads(text)
        def interact(completion): return [{{"role": "user", "content": "go up"}}]
        {kind} reward_fn(completion):
            return check(completion)
    """)
    [failed] = run(env, cast(policy=["first", "no json"]), max_turns=2)
    assert (failed.status, failed.reward) == ("failed", None)
    assert failed.error.startswith(
        "reward_fn() failed for task train/0: x.py:4: JSONDecodeError: Exp"
    )
    assert [turn.completion.text for turn in failed.turns] == ["first", "no json"]
    assert talk(failed.messages) == ["u:2+2", "a:first", "u:go up", "a:no json"]


@pytest.mark.parametrize(
    "hook",
    [
        "def interact(messages): return [{'role': 'user', 'content': 'on'}]\ndef "
        "reward_fn(messages): return messages[3]",
        "async def rollout(task, actors):\n    await actors['policy'].respond('a')\n    return "
        "{}['x']",
        "def group_reward_fn(trajectories): return trajectories[0].messages[7]",
    ],
    ids=["reward", "rollout", "group"],
)
def test_a_hook_that_fails_in_a_truncated_episode_says_truncated(env_of, hook):
    says = "; the episode was truncated: a turn was cut off, as by --max_tokens"
    if "interact" in hook:
        says += "; interact() was not called after it"
    [cut] = run(env_of(hook), cast(policy="a long reply"), max_turns=2, max_tokens=5)
    assert cut.status == "failed" and cut.error.endswith(says)
    [trajectory] = run(env_of(hook.replace("[3]", "[9]")), cast(policy="a long reply"), max_turns=2)
    assert trajectory.status == "failed" and "truncated" not in trajectory.error


@pytest.mark.parametrize(
    "hook",
    [
        "def reward_fn(messages): return float('nan')",
        "async def rollout(task, actors):\n    reply = await actors['policy'].respond('a')\n"
        "    scored = reply.trajectory(1.0)\n    scored.reward = float('nan')\n    return [scored]",
        "def group_reward_fn(trajectories): return [float('nan')]\ndef reward_fn(messages): return "
        "1.0",
    ],
    ids=["reward", "rollout", "group"],
)
def test_a_reward_of_a_truncated_episode_that_is_no_number_says_truncated(env_of, hook):
    [cut] = run(env_of(hook), cast(policy="a long reply"), max_tokens=5)
    assert "must be a finite number" in cut.error and "; the episode was truncated: " in cut.error
    [trajectory] = run(env_of(hook), cast(policy="a long reply"))
    assert "must be a finite number" in trajectory.error and "truncated" not in trajectory.error


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    "raised",
    [
        "SystemExit(3)",
        "StopIteration",
        "TimeoutError('mine')",
        "KeyError('a')",
        "asyncio.CancelledError",
    ],
)
def test_whatever_a_hook_raises_fails_its_episode_alone(env_of, kind, raised):
    env = env_of(
        f"import asyncio\n{kind} reward_fn(messages, answer):\n    if answer == 'bad': raise "
        f"{raised}\n    return 1"
    )
    trajectories = run(env, cast(policy="a"), rows=[ROW | {"answer": "bad"}, ROW])
    assert [t.status for t in trajectories] == ["failed", "ok"]
    assert "reward_fn() failed for task train/0: " in trajectories[0].error


@pytest.mark.parametrize(
    "body",
    [
        "import time; time.sleep(100)",
        "return asyncio.sleep(100)",
        "await asyncio.sleep(100)",
        "await stubborn()",
    ],
)
def test_a_hook_that_hangs_is_given_up_at_its_deadline(env_of, body):
    env = env_of(
        f"""
        import asyncio
        async def stubborn():
            for _ in range(3):
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    pass
        {"async " if "await" in body else ""}def reward_fn(messages):
            {body}
        """,
        hook_timeout_s=0.2,
    )
    assert error_of(env, "a") == (
        "x.py: reward_fn() ran longer than 0.2 s for task train/0; make it faster or raise "
        "--rollout.hook_timeout_s"
    )


def test_a_hook_has_failed_that_ends_after_its_deadline():
    async def waits():
        await asyncio.sleep(1.9)

    async def main():
        task, message = (
            Task(id="train/0", env="x", row={}, messages=[]),
            {"path": __file__, "timeout_s": 1.0},
        )
        functions = (waits, lambda: waits(), lambda: time.sleep(1.9))
        hooks = [
            Hook(name="hook", function=function, ours=frozenset(), **message)
            for function in functions
        ]
        return await asyncio.gather(*(hook(task, {}) for hook in hooks), return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [TimeoutError] * 3


HANGING = """
import asyncio, time
from rl_core.sampling.hooks import Hook
from rl_core.types import Task
def reward_fn(answer):
    if answer == "hang": time.sleep(1000)
    return 1
hook = Hook(name="reward_fn", function=reward_fn, path="x.py", timeout_s=0.3, ours=frozenset())
async def main():
    rows = [{"answer": "hang" if i < 40 else ""} for i in range(60)]
    calls = [hook(Task(id="t", env="x", row=row, messages=[]), {}) for row in rows]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(x).__name__ for x in found] == ["TimeoutError"] * 40 + ["int"] * 20, found
asyncio.run(main())
print("done", flush=True)
"""


def test_hanging_hooks_stop_no_other_hook_and_no_exit():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


RUNNING = """
import threading, time
running = set()
def reward_fn():
    running.add(threading.get_ident())
    num_running = len(running)
    time.sleep(0.1)
    running.remove(threading.get_ident())
    return num_running
"""


def test_hooks_have_16_threads_and_queues_cost_no_time(env_of):
    played = run(env_of(RUNNING, hook_timeout_s=1.0), cast(policy="a"), group_size=250)
    assert {t.status for t in played} == {"ok"}
    assert 1 < max(t.reward for t in played) <= 16


def test_threads_of_hooks_end_with_the_event_loop(env_of):
    before = set(sys._current_frames())
    assert play(env_of("def reward_fn(completion): return 1"), "4").reward == 1
    wait_until(lambda: not set(sys._current_frames()) - before, "the threads end")


def test_a_cancelled_episode_leaves_the_threads_usable(env_of):
    env = env_of("import time\ndef reward_fn(completion): time.sleep(float(completion)); return 1")
    task, params = make_task(ROW, 0, "x", "train"), SamplingParams(max_tokens=9)

    async def main():
        def start(text):
            return asyncio.ensure_future(
                env.rollout(task, EpisodeActors(cast(policy=text), params, 0, "s"))
            )

        hung = [start("100") for _ in range(20)]
        await asyncio.sleep(0.1)
        for future in hung:
            future.cancel()
        [trajectory] = await asyncio.wait_for(start("0"), 20)
        return trajectory.reward

    assert asyncio.run(main()) == 1


def test_deadlines_stand_still_while_the_event_loop_is_blocked():
    async def three_waits():
        for _ in range(3):
            await asyncio.sleep(0.02)
        return "done"

    async def main():
        hook = Hook(
            name="hook", function=three_waits, path=__file__, timeout_s=0.3, ours=frozenset()
        )
        called = asyncio.ensure_future(hook(Task(id="train/0", env="x", row={}, messages=[]), {}))
        # An episode's.
        waited = asyncio.ensure_future(run_within(asyncio.sleep(0.1), 0.3))
        await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251  (a save)
        await waited
        return await called

    assert asyncio.run(main()) == "done"


def test_check_names_an_async_hook_that_blocks_the_loop(env_of, capfd):
    env_of("""
        import time
        works = [1]
        ours = {"__name__": "rl_core.sampling.actor"}
        exec("import time\\nasync def respond(): time.sleep(2.5)", ours)
        def load_tasks(split): return [{"prompt": "2+2"}]
        async def reward_fn():
            if works:
                works.pop()
                await ours["respond"]()  # Not the hook's fault.
                time.sleep(2.5)
            return 1
    """)
    assert rl_core(["check", "x.py"]) == 0
    lines = [x for x in capfd.readouterr().err.splitlines() if "blocked" in x]
    [line] = lines
    assert re.match(r"x.py:11: async reward_fn\(\) has blocked the event loop for 1 s", line)
    assert "await an async client (AsyncOpenAI, not OpenAI), make it once instead" in line


# Errors at start-up


@pytest.mark.parametrize(
    "code, rows, match",
    [
        ("def reward_fn(anwser): pass", [ROW], r"x\.py: reward_fn\(\) asks for 'anwser'; row 1 of a\.jsonl has .*; did you mean 'answ"),
        ("def reward_fn(answer): pass", [ROW, ROW, {"messages": []}], r"row 3 of a\.jsonl"),
        ("def reward_fn(state): pass", [ROW], r"it needs start\(task\)"),
        ("def start(completion): pass\ndef reward_fn(): pass", [ROW], r"start\(\) asks for 'completion'"),
        ("def reward_fn(trajectories): pass", [ROW], r"reward_fn\(\) asks for 'trajectories'"),
        ("system_prompts = {'bob': '{{ anwser }}'}\ndef reward_fn(): pass", [ROW],
         r"system_prompts\['bob'\] asks for 'anwser'"),
    ],
)  # fmt: skip
def test_an_argument_that_is_no_column_is_refused(env_of, code, rows, match):
    with pytest.raises(ValueError, match=match):
        check_columns(env_of(code), rows, [("a.jsonl", 3)])


def test_a_tables_columns_are_checked_and_state_may_be_one(env_of, tmp_path):
    import datasets

    datasets.Dataset.from_list([ROW]).save_to_disk(str(tmp_path / "rows"))
    rows = load_rows(str(tmp_path / "rows"))
    check_columns(env_of("def reward_fn(answer, bonus=0.5): return 1"), rows, [("rows", 1)])
    with pytest.raises(ValueError, match=r"'anser'.*did you mean 'answer'"):
        check_columns(env_of("def reward_fn(anser): return 1"), rows, [("rows", 1)])
    env = env_of("def reward_fn(state): return state")
    check_columns(env, [ROW | {"state": 5}])
    assert play(env, "a", row=ROW | {"state": 5}).reward == 5


GOOD = "def reward_fn(): return 1\n"


@pytest.mark.parametrize(
    "code, match",
    [
        ("def rewardfn(messages): return 1", "'rewardfn' is not a hook; did you mean 'reward_fn'"),
        ("def reward_function(messages): return 1", "did you mean 'reward_fn'"),
        (GOOD + "def interract(messages): pass", "'interract' is not a hook; did you mean 'interact'"),
        (GOOD + "def feedback(text): return 1", "'feedback' is not a hook; did you mean 'feedback_fn'"),
        ("def reward(n): return reward(n)\ndef interact(task): task.reward", "did you mean 'reward_fn'"),
        (GOOD + "maxturns = 3", "did you mean 'max_turns'"),
        (GOOD + "def load_task(split): pass", "did you mean 'load_tasks'"),
        (GOOD + "system_prompt = 'x'", "did you mean 'system_prompts'"),
        ("x = 1", r"defines no hook; it needs def reward_fn\(messages, \.\.\.\)"),
        ("def scored(prompts, completions, **kwargs): pass", r"no hook, only scored\(\); .* TRL passes lists"),
        ("reward_fn = 1", "reward_fn = 1 must be a function"),
        ("reward_fn = [len]", "mark each of several functions with @reward"),
        (GOOD + "max_turns = 0", "max_turns = 0 must be a whole number of at least 1"),
        (GOOD + "tools = [1]", "must be a list of functions or OpenAI schemas"),
        (GOOD + "def add(a: int): 'Adds.'\ntools = [add]", r"tools: add\(\): .*docstring in Google's format"),
        (GOOD + "def add(a):\n    '''Adds.\n\n    Args:\n        a: it\n    '''\ntools = [add]", "type hint for each argument"),
        (GOOD + "turns = 3", "turns = 3 must be a schedule, a list of names or a function"),
        (GOOD + "turns = []", "expected an actor's name"),
        (GOOD + "turns = 'bob -> -> alice'", r"x\.py: turns: expected an actor's name.* bob -> >>>-> alice$"),
        (GOOD + "system_prompts = {'bob': 3}", "must be a dict of names and texts"),
        (GOOD + "system_prompts = {'bob': 'a\\n{{ answer'}", r"system_prompts\['bob'\], line 2: "),
        (GOOD + "name_prefix = 'yes'", "name_prefix = 'yes' must be True or False"),
        (GOOD + "truncated_reward = float('nan')", "truncated_reward = nan must be None or a finite number"),
        ("def rollout(task, actors): pass", r"write async def rollout\(\.\.\.\)"),
        (GOOD + "async def rollout(task, actors): pass", r"rollout\(\) replaces 'reward_fn'"),
        (GOOD + "def interact(actors): pass", r"interact\(\) names 'actors', .* write async def interact"),
        (GOOD + "from rl_core import reward\n@reward(weight=float('nan'))\ndef f(): pass", "a weight is a finite number"),
        ("def reward_fn(messages:\n  return 1", r"x\.py:1: SyntaxError"),
        ("import math\n\n1 / 0", r"x\.py does not load: x\.py:3: ZeroDivisionError: division by zero"),
        ("import no_such_library", r"x\.py:1: ModuleNotFoundError: .*pip install it"),
        ("import daytona.client", r"pip install -e '\.\[daytona\]', or drop the import"),
        ("import sys\nsys.exit(1)", r"x\.py:2: SystemExit"),
        ("import os\ndef reward_fn(): os._exit(0)", r"x\.py: os\._exit\(\) in a hook would end the"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(env_of, code, match):
    with pytest.raises(ValueError, match=match):
        env_of(code)


def test_a_file_that_forks_may_end_its_child_by_os_exit(env_of):
    code = "import os\ndef reward_fn():\n    if not (pid := os.fork()): os._exit(3)\n"
    env = env_of(f"{code}    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
    assert play(env, "4").reward == 3


@pytest.mark.parametrize(
    "code, names, match",
    [
        (
            "turns = 'bob -> alise'",
            ["alice", "bob"],
            r"x\.py: turns: 'alise' is not an actor; did you mean 'alice'\? .* in bob -> >>>alise$",
        ),
        (
            "turns = ['bob', 'alise']",
            ["alice", "bob"],
            r"x\.py: turns: 'alise' is not an actor; did you mean 'alice'",
        ),
        (
            "system_prompts = {'bobb': 'x'}",
            ["bob"],
            r"system_prompts: 'bobb' is not an actor; did you mean 'bob'",
        ),
        (
            "",
            ["bob", "alice"],
            r'there are 2 actors, bob, alice, .* add turns = "bob" if .* or turns = "bob -> alice"',
        ),
    ],
)
def test_actors_that_cannot_play_are_refused(env_of, code, names, match):
    with pytest.raises(ValueError, match=match):
        check_actors(env_of(GOOD + code), names)


def test_max_turns_is_the_files_or_follows_from_its_hooks(env_of):
    several = "turns = 'bob -> (alice -> bob)*3'\n"
    for code, expected in (
        ("", 1),
        ("def interact(): pass\n", 8),
        (several, 7),
        (several + "max_turns = 3\n", 3),
    ):
        assert env_of(GOOD + code).max_turns == expected
    assert env_of(GOOD + "max_turns = 3", "y.py", max_turns=5).max_turns == 5


def test_helpers_and_constants_may_have_names_like_hooks(env_of):
    env_of(
        GOOD + "def reward_fn2(): return 1\nMAX_TURNS = 3\nmax_turns = MAX_TURNS\n_interacts = 1"
    )
    env_of(GOOD + "TURNS = 3\nSYSTEM_PROMPT = 'x'")
    env_of(
        "def feedback(text): return 1\ndef reward_fn():\n    return max(feedback(t) for t in 'a')"
    )


def test_a_missing_file_is_refused_with_the_nearest_name(env_of):
    env_of(GOOD, "sorting.py")
    with pytest.raises(
        ValueError, match=r"sort1ng\.py: no such file; did you mean 'sorting\.py'\?"
    ):
        load_env("sort1ng.py")


def test_a_file_may_have_dataclasses_and_import_what_lies_next_to_it(env_of):
    Path("next_to_me.py").write_text("HALF = 0.5")
    env = env_of("""
        from __future__ import annotations
        from dataclasses import dataclass
        from next_to_me import HALF
        @dataclass
        class Game:
            score: float = HALF
        def start(task): return Game()
        def reward_fn(state): return state.score
    """)
    assert play(env, "a").reward == 0.5


def test_load_tasks_gives_checked_rows(env_of):
    env = env_of(GOOD + "def load_tasks(split):\n    yield {'prompt': split}")
    assert env.load_tasks("eval") == [{"prompt": "eval"}]
    assert env_of(GOOD + "async def load_tasks(split): return [{}]").load_tasks("eval") == [{}]
    for body, match in (
        (
            "return None",
            r"load_tasks\('train'\) failed: .*load_tasks\(\) returned None: is a `return` missing\?",
        ),
        ("return [1]", "must give dictionaries, not \\[1\\]"),
        ("return 1 / 0", r"failed: x\.py:3: ZeroDivisionError"),
    ):
        with pytest.raises(ValueError, match=match):
            env_of(GOOD + f"def load_tasks(split):\n    {body}").load_tasks("train")


def test_advantage_fn_must_give_a_finite_number_for_each_reward(env_of):
    assert env_of(GOOD + "def advantage_fn(rewards): return [r - 1 for r in rewards]").advantage_fn(
        [1.0, 3.0]
    ) == [0, 2]
    for body, match in (
        ("[1]", "gave 1 values; it must give one for each reward"),
        ("[float('nan')] * len(rewards)", "an advantage is nan"),
        ("rewards / 2", r"failed: x\.py:2: TypeError"),
    ):
        with pytest.raises(RunError, match=match):
            env_of(GOOD + f"def advantage_fn(rewards): return {body}").advantage_fn([1.0, 2.0])


# The environments that come with the project


@pytest.mark.parametrize("name", ["sort_digits", "calculator"])
def test_an_environment_brings_disjoint_splits_that_never_change(name):
    env = load_env(str(ENVS / f"{name}.py"))
    train, held_out = (
        {r["messages"][0]["content"] for r in env.load_tasks(s)} for s in ("train", "eval")
    )
    assert train and held_out and not train & held_out
    assert env.load_tasks("train") == load_env(str(ENVS / f"{name}.py")).load_tasks("train")
    for split in ("train", "eval"):
        check_columns(env, env.load_tasks(split), split=split)


@pytest.mark.parametrize(
    "reply, reward",
    [
        ("12345", 1),
        (" 12345\n", 1),
        ("12354", 0.6),
        ("12344", 0),
        ("1234", 0),
        ("123456", 0),
        ("", 0),
    ],
)
def test_sorting_is_rewarded_by_right_positions(reply, reward):
    row = {"messages": [{"role": "user", "content": "31524"}], "answer": "12345"}
    assert play(load_env(str(ENVS / "sort_digits.py")), reply, row=row).reward == reward


@pytest.mark.parametrize(
    "replies, scores_, reward",
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
def test_the_calculator_answers_calls_and_scores_the_last_reply(replies, scores_, reward):
    row = {"messages": [{"role": "user", "content": "37*8"}], "answer": 296}
    t = play(load_env(str(ENVS / "calculator.py")), *replies, row=row)
    assert (t.reward, [m["content"] for m in t.messages if m["role"] == "tool"]) == (
        reward,
        [scores_] if scores_ else [],
    )
