"""Episodes of several actors: views, order, rewards, rollouts of the user's own, exact tokens."""

from __future__ import annotations

import asyncio
import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from kit import embedded, prompts_of
from make_tiny_model import bpe_tokenizer, make_tiny_model
from stage import ROW, cast, chat_of, make_groups, one, rollout, run, talk

from rl_core.config import RolloutConfig
from rl_core.data.chat import Chat
from rl_core.data.image_parts import images_of
from rl_core.data.samples import samples_from_turns
from rl_core.data.task_rows import make_task
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.environments.row_columns import check_columns
from rl_core.environments.run_checks import check_actors
from rl_core.run.evaluation.episode_metrics import rollout_metrics
from rl_core.run.process.joining import init_ranks
from rl_core.sampling.actor import Actor
from rl_core.types import Trajectory

ALTERNATING = (
    "{%- for message in messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('roles must alternate user/assistant/user') -}}{%- endif -%}"
    "{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


TEMPLATES = sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))

# Views


DEBATE = "turns = 'bob -> alice -> carol -> bob'\ndef reward_fn(messages): return len(messages)\n"
THOUGHT = "<think>hm</think>\n\nB"
# Replies of each actor, and its final view: its own turns as "a", all others as "u". Messages after
# an actor's last turn have no tokens.
VIEWS = {
    "others are users": (
        DEBATE,
        {"carol": "C"},
        5,
        {
            "bob": "u:2+2|a:B|u:A\n\nC|a:B",
            "alice": "u:2+2\n\nB|a:A|u:C\n\nB",
            "carol": "u:2+2\n\nB\n\nA|a:C|u:B",
        },
    ),
    "names stand before what others say if asked": (
        DEBATE + "name_prefix = True",
        {"carol": "C"},
        5,
        {"bob": "u:2+2|a:B|u:alice says: A\n\ncarol says: C|a:B"},
    ),
    "thoughts are for the actor itself and for hooks": (
        "turns = 'bob -> alice'\ndef reward_fn(messages): return 'hm' in messages[1]['content']",
        {"bob": THOUGHT},
        1,
        {"bob": f"u:2+2|a:{THOUGHT}|u:A", "alice": "u:2+2\n\nB|a:A"},
    ),
    "between two turns in a row stands a message": (
        "turns = 'bob*2 -> alice'\ndef reward_fn(messages): return len(messages)",
        {},
        4,
        {"bob": "u:2+2|a:B|u:Continue.|a:B|u:A"},
    ),
    "interact ends a schedule by done alone": (
        "turns = '(bob -> alice)*3'\ndef reward_fn(messages): return len(messages)\n"
        "def interact(messages, actor):\n"
        "    if len(messages) == 4: return {'messages': [{'role': 'user', 'content': 'stop'}], "
        "'done': True}",
        {},
        5,
        {"bob": "u:2+2|a:B|u:A|a:B|u:stop"},
    ),
    "an actor that was not drawn has no trajectory": (
        "turns = 'bob -> alice*0'\ndef reward_fn(): return 1",
        {},
        1,
        {"bob": "u:2+2|a:B"},
    ),
}


@pytest.mark.parametrize("template", [None, ALTERNATING], ids=["plain", "alternating"])
@pytest.mark.parametrize("code, say, reward, seen", VIEWS.values(), ids=VIEWS)
def test_what_each_actor_sees_under_any_template(env_of, template, code, say, reward, seen):
    trajectories = run(env_of(code), cast(template=template, **{"bob": "B", "alice": "A"} | say))
    views = {t.actor: "|".join(talk(t.messages)) for t in trajectories}
    assert ("alice" in views) == ("alice*0" not in code)
    assert seen.items() <= views.items() and {t.reward for t in trajectories} == {reward}
    assert all(len(samples_from_turns(t.turns, 1.0)) == 1 for t in trajectories)


# Rows that ask to continue a reply, whose text the first turn then holds too.
BEGUN = [*ROW["messages"], {"role": "assistant", "content": "is"}]
MARKED = [BEGUN[0], BEGUN[1] | {"partial": True}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": BEGUN, "continue_final_message": True},
        {"messages": BEGUN, "continue_final_message": True},
        {"messages": MARKED},
        {"messages": [*MARKED, {"role": "assistant", "content": " 4"}]},
    ],
)
def test_the_first_turn_continues_the_reply_that_a_row_begins(env_of, row):
    rewards = "def reward_fn(messages, completion): return len(messages) + (completion == 'A')\n"
    code = f"turns = 'bob -> alice'\n{rewards}"
    both = run(env_of(code), cast(template=ALTERNATING, bob=" four", alice="A"), rows=[row])
    views = {t.actor: "|".join(talk(t.messages)) for t in both}
    assert views == {"bob": "u:2+2|a:is four|u:A", "alice": "u:2+2\n\nis four|a:A"}
    assert [t.reward for t in both] == [4.0, 4.0]
    [turn] = next(t for t in both if t.actor == "bob").turns
    prompt = chat_of(ALTERNATING).tokenizer.decode(turn.new_ids)
    assert prompt.endswith("<|user|>\n2+2<|end|>\n<|assistant|>\nis")
    assert turn.completion.text == " four"
    [alone] = run(env_of(rewards.replace("'A'", "'is four'")), cast(policy=" four"), rows=[row])
    assert talk(alone.messages) == ["u:2+2", "a:is four"] and alone.reward == 3.0


OPENS_THOUGHTS = ALTERNATING.replace("'<|assistant|>\n'", "'<|assistant|>\n<think>\n'")


@pytest.mark.parametrize(
    "reply, max_tokens, seen",
    [
        ("so \\boxed{4} or 5?", 12, "<think>\nso \\boxed{4}"),
        ("hm</think>4 and more", 11, "hm</think>4"),
        ("no '</think>' yet", 13, "<think>\nno '</think>'"),
        ("so 4", 12, "so 4"),
    ],
)
def test_a_reply_cut_in_thoughts_of_its_prompt_has_their_mark(env_of, reply, max_tokens, seen):
    code = "def reward_fn(completion, messages): return 0.0"
    actors = cast(template=OPENS_THOUGHTS, bob=reply)
    [trajectory] = run(env_of(code), actors, max_tokens=max_tokens)
    assert trajectory.messages[-1]["content"] == seen
    assert trajectory.turns[0].completion.text == seen.removeprefix("<think>\n")


# As strict as Mistral's: users and replies without calls alternate.
STRICT = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) -%}{{- raise_exception('roles must alternate') "
    "-}}{%- endif -%}{%- set ns.n = ns.n + 1 -%}{%- endif -%}"
    "{{- '<|' + m.role + '|>\n' + (m.content or '') -}}{%- for c in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + c.function | tojson + '</tool_call>' -}}{%- endfor -%}{{- '<|end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
CALLED = '''
turns = "bob -> alice -> bob -> alice"
def add(a: int, b: int):
    """Adds.

    Args:
        a: first
        b: second
    """
tools = [add]
def interact(messages):
    calls = messages[-1].get("tool_calls") or []
    return [{"role": "tool", "content": "4", "tool_call_id": c["id"], "name": "add"} for c in calls]
def reward_fn(messages): return len(messages)
'''
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


@pytest.mark.parametrize("template", [None, STRICT], ids=["plain", "strict"])
@pytest.mark.parametrize("says", ["", "bob says: "])
def test_calls_and_their_answers_are_text_for_other_actors(env_of, template, says):
    code = CALLED + f"name_prefix = {bool(says)}\n"
    rules = {"bob": [CALL, "B"], "alice": "A"}
    env, actors = env_of(code), cast(template=template, **rules)
    trajectories = run(env, actors, max_tokens=200)
    bob, alice = one(trajectories, "bob").messages, one(trajectories, "alice").messages
    tool = says and "add says: "
    call = f'2+2\n\n{says}add({{"a": 2, "b": 2}})\n\n{tool}4'
    assert talk(alice) == [f"u:{call}", "a:A", f"u:{says}B", "a:A"]
    heard = f"{says and 'alice says: '}A"
    between = ["t:4", f"u:{heard}"] if template is None else [f"t:4\n\n{heard}"]
    assert talk(bob)[2:] == [*between, "a:B", f"u:{heard}"]
    assert bob[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    tokenizer = copy.deepcopy(chat_of().tokenizer)
    tokenizer.bos_token = "<|end|>"
    for path in TEMPLATES:
        chat = Chat(tokenizer, path.read_text())
        takes_tools = chat.render(alice[:1], env.tools) != chat.render(alice[:1])
        for view in [alice, bob] if takes_tools else [alice]:
            chat.render(view[:-1], env.tools)


SHOWN = """
turns = "bob -> alice -> bob"
name_prefix = True
def interact(messages):
    import numpy
    picture = numpy.zeros((2, len(messages), 3), "uint8")
    role = "tool" if len(messages) == 2 else "user"
    return [{"role": role, "content": [{"type": "image", "image": picture}]}]
def reward_fn(): return 1
"""


def test_images_stay_in_the_views_of_all_actors(env_of):
    replies = {"bob": "B", "alice": "A"}
    actors = {
        name: ScriptedActor(name=name, chat=plain_chat(), replies=[text])
        for name, text in replies.items()
    }
    both = run(env_of(SHOWN), actors)
    alice, bob = (one(both, name).messages for name in ("alice", "bob"))
    before, picture = alice[0]["content"]
    assert before == {"type": "text", "text": "2+2\n\nbob says: B\n\ntool says: "}
    assert picture["type"] == "image"
    assert [image.width for image in images_of(alice)] == [2, 4]
    assert [m["role"] for m in bob[2:4]] == ["tool", "user"]
    assert bob[3]["content"][0] == {"type": "text", "text": "alice says: A\n\n"}
    assert [image.width for image in images_of(bob)] == [2, 4]


def test_hooks_see_one_transcript_with_names(env_of):
    env = env_of("""
        turns = ["bob", "alice"]
        def start(task): return []
        def interact(messages, actor, completion, state):
            state.append((actor, completion, messages[-1]))
            return [{"role": "user", "content": "next"}]
        def reward_fn(messages, state):
            assert [m.get("name") for m in messages] == [None, "bob", None, "alice"], messages
            assert [m["content"] for m in messages] == ["2+2", "B", "next", "A"]
            assert [s[:2] for s in state] == [("bob", "B"), ("alice", "A")]
            return 1
    """)
    trajectories = run(env, cast(bob="B", alice="A"))
    assert talk(one(trajectories, "alice").messages) == ["u:2+2\n\nB\n\nnext", "a:A"]


def test_system_prompts_are_templates_over_columns(env_of):
    env = env_of("""
        turns = "bob -> alice"
        system_prompts = {"bob": "You know {{ answer }}{% if hint is defined %}!{% endif %}."}
        def reward_fn(): return 1
    """)
    check_columns(env, [ROW | {"hint": "x"}])
    row = ROW | {
        "messages": [{"role": "system", "content": "Own."}, *ROW["messages"]],
        "hint": "{{ answer }}",
    }
    trajectories = run(env, cast(bob="B", alice="A"), rows=[row])
    assert talk(one(trajectories, "bob").messages)[:2] == ["s:You know 4!.", "u:2+2"]
    assert talk(one(trajectories, "alice").messages)[:2] == ["s:Own.", "u:2+2\n\nB"]


def test_a_system_prompt_cannot_reach_into_python(env_of):
    env = env_of(
        "system_prompts = {'bob': '{{ answer.__class__.__mro__ }}'}\ndef reward_fn(): return 1"
    )
    [failed] = run(env, cast(bob="B"))
    assert re.search(r"system_prompts\['bob'\] fails for task train/0: SecurityError", failed.error)


# Order


def test_all_episodes_of_a_group_have_one_order_and_groups_differ(env_of):
    env = env_of("turns = '(bob/alice)*6'\ndef reward_fn(messages): return 1\n")
    orders: dict[str, set] = {}
    for t in run(env, cast(bob="B", alice="A"), group_size=4, rows=[ROW] * 8):
        # The whole transcript as this actor sees it, whose own turns are "a".
        mine, other = ("B", "A") if t.actor == "bob" else ("A", "B")
        order = "".join(re.findall("[AB]", " ".join(m["content"] for m in t.messages)))
        assert order.count(mine) == len(t.turns) and len(order) == 6, (order, other)
        orders.setdefault(t.group_id, set()).add(order)
    assert len(orders) == 8 and all(len(drawn) == 1 for drawn in orders.values())
    assert len({min(drawn) for drawn in orders.values()}) > 2


def test_max_turns_ends_a_function_that_yields_for_ever(env_of):
    env = env_of("""
        def turns(task, answer):
            yield "alice"
            while True: yield "bob" if answer == "4" else "alice"
        def reward_fn(messages): return len(messages)
    """)
    assert {t.reward for t in run(env, cast(bob="B", alice="A"), max_turns=5)} == {6.0}
    for body, match in (
        ("yield 'bobb'", r"turns\(\) for task train/0: 'bobb' is not an actor; did you mean 'bob'"),
        ("return 'bob'", r"turns\(\) gave 'bob'; it must yield names"),
        ("yield 1 / 0", "ZeroDivisionError"),
    ):
        env = env_of(f"def turns(task): {body}\ndef reward_fn(): return 1")
        failed = run(env, cast(bob="B", alice="A"), group_size=2)
        assert [(t.status, t.index) for t in failed] == [("failed", i) for i in (0, 0, 1, 1)]
        assert re.search(match, failed[0].error), failed[0].error


# Rewards


def test_a_hook_that_names_actor_is_called_for_each_learner(
    env_of,
):
    env = env_of("""
        from rl_core import reward
        turns = "bob -> alice -> judge"
        asked = []
        def reward_fn(actor, completion, trajectory):
            asked.append(actor)
            assert trajectory.actor == actor and trajectory.messages[-1]["content"] in ("B", "A", "J", "A\\n\\nJ")
            return {"mine": {"bob": 1.0, "alice": -1.0}[actor], "said": len(completion)}
        @reward(weight=0.5)
        async def together(messages): return 2 * len(messages)
        @reward(weight=0)
        def seen(actors_seen=3): return actors_seen
    """)
    trajectories = run(env, cast(bob="BBB", alice="A", judge=("J", False)))
    assert [t.actor for t in trajectories] == ["alice", "bob"]
    assert one(trajectories, "bob").reward_parts == {"mine": 1.0, "said": 3.0, "together": 4.0}
    assert one(trajectories, "alice").reward_parts == {"mine": -1.0, "said": 1.0, "together": 4.0}
    assert (one(trajectories, "bob").reward, one(trajectories, "bob").metrics) == (
        8.0,
        {"seen": 3.0},
    )


def test_where_no_actor_learns_all_that_spoke_are_scored(env_of):
    env = env_of("turns = 'bob -> judge'\ndef reward_fn(actor): return len(actor)")
    trajectories = run(env, cast(bob=("B", False), judge=("J", False)))
    assert [(t.actor, t.reward) for t in trajectories] == [("bob", 3.0), ("judge", 5.0)]


def test_a_dict_by_actor_is_refused_where_it_could_be_read_as_parts(env_of):
    env = env_of("turns = 'bob -> alice'\ndef reward_fn(): return {'bob': 1, 'alice': 0}")
    failed = run(env, cast(bob="B", alice="A"))
    assert {t.status for t in failed} == {"failed"} and len(failed) == 2
    assert "returned a part named 'bob', which is an actor" in failed[0].error


def test_rewards_of_interact_stand_on_the_turns_that_they_follow(env_of):
    env = env_of("""
        turns = "bob -> alice -> bob"
        def interact(messages): return {"reward": len(messages)}
        def reward_fn(): return 0.5
    """)
    trajectories = run(env, cast(bob="B", alice="A"))
    bob, alice = one(trajectories, "bob"), one(trajectories, "alice")
    assert (bob.turn_rewards, bob.reward, bob.reward_parts) == (
        [2.0, 4.5],
        6.5,
        {"interact": 6.0, "reward_fn": 0.5},
    )
    assert (alice.turn_rewards, alice.reward) == ([3.5], 3.5)
    # Among the messages, of which the task's is the first.
    assert (bob.message_indices, alice.message_indices) == ([2, 4], [3])
    assert one(run(env_of("def reward_fn(): return 1"), cast(bob="B"))).turn_rewards == []


def test_a_cut_turn_ends_the_episode_with_its_own_reward(env_of):
    code = "turns = 'bob -> alice -> bob'\ndef reward_fn(): return 1\n"
    for more, reward, parts in (
        ("", 1.0, {"reward_fn": 1.0}),
        ("truncated_reward = -2", -2.0, {"truncated": -2.0}),
    ):
        trajectories = run(env_of(code + more), cast(bob="B", alice="A" * 99), max_tokens=20)
        assert [(t.actor, t.status, t.reward, len(t.turns)) for t in trajectories] == [
            ("alice", "truncated", reward, 1), ("bob", "truncated", reward, 1)
        ]  # fmt: skip
        assert trajectories[0].reward_parts == parts


@pytest.mark.parametrize(
    "code, actors",
    [
        ("def reward_fn(): return 1\n", {"bob": "B" * 99}),
        (
            "max_turns = 3\ndef interact(): return [{'role': 'user', 'content': 'on'}]\n",
            {"bob": ["B", "B", "B" * 99]},
        ),
        ("turns = 'bob -> alice'\ndef reward_fn(): return 1\n", {"bob": "B", "alice": "A" * 99}),
    ],
    ids=["one turn", "the third of three", "of another actor"],
)
def test_an_episode_is_truncated_where_its_last_allowed_turn_is_cut(env_of, code, actors):
    trajectories = run(env_of(code), cast(**actors), max_tokens=20)
    assert [t.status for t in trajectories] == ["truncated"] * len(actors)
    assert sum(len(t.turns) for t in trajectories) == (3 if "max_turns" in code else len(actors))
    assert rollout_metrics(trajectories)["truncated_frac"].value == 1
    complete = run(env_of(code), cast(**dict.fromkeys(actors, "B")), max_tokens=20)
    assert [t.status for t in complete] == ["ok"] * len(actors)


def test_a_view_that_no_longer_fits_ends_the_episode_and_is_no_failure(env_of):
    env = env_of("turns = '(bob -> alice)*9'\ndef reward_fn(messages): return len(messages)")
    trajectories = run(
        env, cast(limits={"max_context_tokens": 60}, bob="B" * 9, alice="A" * 9), max_tokens=20
    )
    assert {t.status for t in trajectories} == {"truncated"} and len(trajectories) == 2
    only_bob = run(
        env, cast(limits={"max_context_tokens": 11}, bob="B" * 3, alice="A"), max_tokens=20
    )
    assert [(t.actor, t.status) for t in only_bob] == [("bob", "truncated")]


def test_a_group_is_scored_at_once_by_actor_and_without_those_that_failed(env_of):
    env = env_of("""
        from rl_core import reward
        turns = "bob -> alice"
        def reward_fn(completion):
            if completion.endswith("7"): raise ValueError("seven")
            return 10
        def group_reward_fn(trajectories, actor, answer):
            assert {t.actor for t in trajectories} == {actor} and answer == "4"
            ranks = sorted(t.turns[0].completion.text for t in trajectories)
            return [ranks.index(t.turns[0].completion.text) for t in trajectories]
        @reward(weight=0.5, batched=True)
        async def size(trajectories): return [len(trajectories)] * len(trajectories)
    """)
    trajectories = run(
        env, cast(bob=lambda p, s: f"b{s % 10}", alice=lambda p, s: f"a{s % 10}"), group_size=12
    )
    fine = [t for t in trajectories if t.status == "ok"]
    failed = [t for t in trajectories if t.status == "failed"]
    assert (
        fine
        and failed
        and len(failed) % 2 == 0
        and "seven" in failed[0].error
        and failed[0].reward is None
    )
    for name in ("bob", "alice"):
        group = [t for t in fine if t.actor == name]
        texts = sorted(t.turns[0].completion.text for t in group)
        for t in group:
            rank = texts.index(t.turns[0].completion.text)
            assert t.reward_parts == {
                "reward_fn": 10.0,
                "group_reward_fn": rank,
                "size": len(group) / 2,
            }
            assert t.reward == sum(t.reward_parts.values())


@pytest.mark.parametrize(
    "body, match",
    [
        (
            "return [1]",
            r"what group_reward_fn\(\) returned is \[1\]; it must be a list of 2 numbers",
        ),
        ("return 1.0", "returned is 1.0; it must be a list of 2 numbers"),
        (
            "return [1, float('nan')]",
            r"a number in x\.py: what group_reward_fn\(\) returned is nan",
        ),
        ("return [1, 'x']", r"what group_reward_fn\(\) returned is 'x'"),
        ("raise KeyError('k')", r"group_reward_fn\(\) failed for task train/0: x\.py:2: KeyError"),
        ("import time; time.sleep(60)", r"group_reward_fn\(\) ran longer than 0\.2 s"),
    ],
)
def test_a_group_that_cannot_be_scored_has_failed_as_a_whole(env_of, body, match):
    env = env_of(f"def group_reward_fn(trajectories):\n    {body}", hook_timeout_s=0.2)
    trajectories = run(env, cast(bob="B"), group_size=2)
    assert [(t.status, t.reward, t.index) for t in trajectories] == [
        ("failed", None, 0),
        ("failed", None, 1),
    ]
    assert all(re.search(match, t.error) for t in trajectories), trajectories[0].error


def test_what_scores_a_group_has_the_deadline_of_an_episode(env_of):
    env = env_of(
        "import asyncio\nasync def group_reward_fn(trajectories):\n    await asyncio.sleep(1.9)"
    )
    [failed] = run(env, cast(bob="B"), timeout_s=1)
    assert failed.error == "the scoring of the group took longer than --rollout.episode_timeout_s=1"


def test_a_reward_may_ask_another_actor_and_that_leaves_no_trajectory(env_of):
    env = env_of("""
        turns = "bob"
        async def reward_fn(completion, actors):
            verdict = await actors["judge"].respond(f"Is {completion} good?", temperature=0, max_tokens=9)
            return float(verdict.text)
        async def group_reward_fn(trajectories, actors):
            replies = await actors["judge"].respond("how many?", n=len(trajectories))
            return [len(replies)] * len(trajectories)
    """)
    actors = cast(bob="fine", judge="0.25")
    trajectories = run(env, actors, group_size=2)
    assert [(t.actor, t.reward) for t in trajectories] == [("bob", 2.25), ("bob", 2.25)]
    prompt, _, params = actors["judge"].engine.asked[0]
    assert "Is fine good?" in prompt and (params.temperature, params.max_tokens) == (0, 9)
    assert not {s for s in actors["judge"].engine.sessions if s}  # all closed


@pytest.mark.parametrize(
    "call, match",
    [
        (
            "actors['juge'].respond('x')",
            r"'juge' is not an actor; did you mean 'judge'.* \(--actors.juge.model PATH adds one\)",
        ),
        (
            "actors['judge'].respond('x', temprature=1)",
            r"respond\(temprature=\.\.\.\) is unknown; did you mean 'temperature'",
        ),
        (
            "actors['judge'].respond('x', temperature=-1)",
            "must have max_tokens >= 1, temperature >= 0",
        ),
        ("actors['judge'].respond('x', max_tokens=0)", "must have max_tokens >= 1"),
        ("actors['judge'].respond([{'role': 'user'}])", "message 1 is "),
    ],
)
def test_what_an_actor_cannot_be_asked_is_told(env_of, call, match):
    env = env_of(
        f"turns = 'bob'\nasync def reward_fn(actors):\n    return float((await {call}).text)"
    )
    [failed, _] = run(env, cast(bob="B", judge="1"))
    assert failed.status == "failed" and re.search(match, failed.error), failed.error


# Rollouts of the user's own


def test_a_rollout_continues_and_branches_conversations_with_exact_tokens(env_of):
    env = env_of("""
        async def rollout(task, actors, answer):
            bob = actors["bob"]
            reply = await bob.respond(task.messages)
            assert reply.text == reply.messages[-1]["content"] and reply.actor == bob.name == "bob" and answer == "4"
            other = reply.fork()
            await reply.respond("left")
            again = await other.respond([{"role": "user", "content": "right"}])
            assert again is other and not other.truncated
            third = other.fork()
            await third.respond("deeper")
            replies = await actors["alice"].respond(task.messages, n=3, max_tokens=30, stop=["!"])
            return [reply.trajectory(1.0), other.trajectory({"a": 0.5, "b": 0.25}, player="right"),
                    third.trajectory(True, player="third", metrics={"depth": 3})] + [r.trajectory(0) for r in replies]
    """)
    actors = cast(bob=lambda prompt, seed: f"b{seed}", alice=lambda prompt, seed: f"a{seed}")
    trajectories = run(env, actors)
    bob, alice = (
        [t for t in trajectories if t.actor == "bob"],
        [t for t in trajectories if t.actor == "alice"],
    )
    assert [(t.player, t.reward, len(t.turns)) for t in bob] == [
        ("", 1.0, 2),
        ("right", 0.75, 2),
        ("third", 1.0, 3),
    ]
    assert bob[1].reward_parts == {"a": 0.5, "b": 0.25} and bob[2].metrics == {"depth": 3}
    assert len({t.turns[0].completion.text for t in alice}) == 3  # Seeds differ.
    assert {(p.max_tokens, p.stop) for _, _, p in actors["alice"].engine.asked} == {(30, ("!",))}
    assert (
        bob[0].turns[0] == bob[1].turns[0] and len({t.turns[1].completion.text for t in bob}) == 2
    )
    assert bob[1].turns == bob[2].turns[:2]
    for t in bob:
        [sample] = samples_from_turns(t.turns, 1.0)
        begin = actors["bob"].chat.prompt_ids(ROW["messages"])
        texts = [t.messages[0]["content"], *(m["content"] for m in t.messages[1:])]
        text = actors["bob"].chat.tokenizer.decode(sample.token_ids)
        assert sample.token_ids[: len(begin)].tolist() == begin
        roles = ["user", "assistant"] * 3
        assert text == "".join(f"<|{r}|>{s}<|end|>" for r, s in zip(roles, texts, strict=False))
    assert not {s for a in actors.values() for s in a.engine.sessions if s}


def test_replies_do_not_hang_on_who_answers_first(env_of):
    env = env_of("""
        import asyncio
        async def rollout(task, actors):
            async def branch(i):
                first = await actors["bob"].respond(f"{i}")
                reply = await actors["bob"].respond(f"{first.text} {i}")
                return await reply.respond(f"more {i}")
            replies = await asyncio.gather(*(branch(i % 5) for i in range(10)))
            return [r.trajectory(0.0) for r in replies]
    """)

    def texts(wait_s):
        trajectories = run(
            env, cast(wait_s=wait_s, bob=lambda prompt, seed: f"{seed}"), group_size=3
        )
        assert {t.status for t in trajectories} == {"ok"}
        return sorted((t.index, talk(t.messages)) for t in trajectories)

    assert texts(0.0) == texts(0.03)


def test_a_conversation_without_room_gives_an_empty_truncated_reply(env_of):
    env = env_of("""
        async def rollout(task, actors):
            reply = await actors["bob"].respond(task.messages)
            for _ in range(2):
                await reply.respond("x" * 99)
                assert (reply.text, reply.truncated) == ("", True)
            return [reply.trajectory(-1.0)]
    """)
    t = one(run(env, cast(limits={"max_context_tokens": 60}, bob="B")))
    assert (t.status, t.reward, len(t.turns)) == ("truncated", -1.0, 1)


@pytest.mark.parametrize(
    "body, match",
    [
        ("return None", r"rollout\(\) returned None: is a `return` missing\?"),
        ("return []", r"rollout\(\) returned is \[\]; it must be"),
        ("return [reply]", "it must be a list of at least one Trajectory"),
        ("return reply.trajectory(1.0)", "it must be a list"),
        ("return [reply.trajectory(float('nan'))]", r"x\.py:4: .*trajectory\(reward=\.\.\.\) of bob is nan"),
        ("t = reply.trajectory(1); t.reward = None; return [t]", "the reward of x.py: a trajectory of 'bob' .* is None"),
        ("t = reply.trajectory(1); t.actor = 'bobb'; return [t]", "'bobb' is not an actor; did you mean 'bob'"),
        ("t = reply.trajectory(1); t.turn_rewards = [1, 2]; return [t]", "has 2 turn_rewards for 1 turns"),
        ("again = await reply.respond('x'); return [reply.trajectory(1), again.trajectory(0)]", "end in the same reply; fork"),
        ("cold = await actors['bob'].respond('x', temperature=0.5); return [cold.trajectory(1)]",
         "with another temperature cannot be trained"),
        ("return await asyncio.gather(reply.respond('x'), reply.respond('y'))", r"still being continued, .* fork\(\) before"),
        ("await asyncio.sleep(1.9)", r"the episode took longer than --rollout\.episode_timeout_s=1"),
        ("raise RuntimeError", r"rollout\(\) failed for task train/0: x\.py:4: RuntimeError"),
    ],
)  # fmt: skip
def test_what_is_no_trajectory_fails_its_episode_with_a_reason(env_of, body, match):
    env = env_of(f"""
        import asyncio
        async def rollout(task, actors):
            reply = await actors["bob"].respond(task.messages); await actors["judge"].respond("sure?"); {body}
    """)
    failed = run(env, cast(bob="B", alice="A", judge=("J", False)), timeout_s=1)
    assert {(t.status, t.reward) for t in failed} == {("failed", None)}
    assert {t.actor: len(t.turns) > 0 for t in failed} == {
        "alice": False,
        "bob": True,
        "judge": True,
    }
    assert all(re.search(match, t.error) for t in failed), failed[0].error


def test_a_frozen_actor_may_be_drawn_from_in_any_way_and_scored(env_of):
    env = env_of("""
        async def rollout(task, actors):
            return [(await actors["bob"].respond(task.messages, temperature=0.5, top_p=0.9)).trajectory(1)]
    """)
    assert one(run(env, cast(bob=("B", False)))).reward == 1


# The documentation's examples


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """Name -> the environment of the block of docs/environments.md that begins with its file's
    name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if name := re.match(r"# (\w+\.py)", code):
            Path(name[1]).write_text(code)
    return lambda name: load_env(f"{name}.py")


def test_documented_level_1(documented):
    t = one(run(documented("exact"), cast(policy=" 4")))
    assert (t.reward, t.reward_parts) == (0.98, {"right": 1.0, "short": -0.02})


def test_documented_level_2(documented):
    env = documented("tool")
    assert len(env.load_tasks("eval")) == 72
    row = {"messages": [{"role": "user", "content": "37*8"}], "answer": 296}
    say = lambda prompt, seed: "296" if "<|tool|>296" in prompt else "<call>37*8</call>"  # noqa: E731
    t = one(run(env, cast(policy=say), rows=[row]))
    assert (t.reward, len(t.turns)) == (1.0, 2)


def test_documented_level_3(documented):
    env = documented("hints")
    check_actors(env, ["bob", "alice"])
    check_columns(env, [ROW])
    trajectories = run(env, cast(bob="no", alice="4"))
    assert (one(trajectories, "bob").reward, one(trajectories, "alice").reward) == (0.0, 1.0)
    assert talk(one(trajectories, "bob").messages)[:2] == [
        "s:The answer is 4. Give hints, never the answer.",
        "u:2+2",
    ]


def test_documented_race_of_a_proposer_and_solvers(documented):
    env = documented("race")
    check_actors(env, ["proposer", "solver", "judge"])
    actors = cast(
        proposer=lambda prompt, seed: f"{seed % 2}+1",
        solver=lambda prompt, seed: str(seed % 3),
        judge=(
            lambda prompt, seed: (
                "yes" if prompt.split("\n")[1] == str(int(prompt.split("+")[0][-1]) + 1) else "no"
            ),
            False,
        ),
    )
    trajectories = run(env, actors, group_size=6)
    proposed, solved = (
        [t for t in trajectories if t.actor == "proposer"],
        [t for t in trajectories if t.actor == "solver"],
    )
    assert {t.status for t in trajectories} == {"ok"} and (len(proposed), len(solved)) == (6, 24)
    assert (
        {t.player for t in solved}
        == {t.messages[-1]["content"] for t in proposed}
        == {"0+1", "1+1"}
    )
    for t in solved:
        assert t.reward == float(int(t.messages[-1]["content"]) == int(t.player[0]) + 1)
    for t in proposed:
        rewards = [s.reward for s in solved if s.index == t.index]
        share = sum(rewards) / 4
        assert (t.metrics["solved"], t.reward) == (share, 4 * share * (1 - share))
    assert 0 < sum(t.reward for t in solved) < 24


def test_documented_game_of_one_actor_in_two_players(documented):
    env = documented("ten")
    check_actors(env, ["policy"])

    def best(prompt, seed):
        total = int(re.findall(r"It is (\d+)\.", prompt)[-1])
        return str((10 - total) % 4 or 1)

    for say, first, second in (
        (best, 1.0, -1.0),
        ("x", -1.0, None),
        ("1", -1.0, 1.0),
        ("3", 1.0, -1.0),
    ):
        by_name = {t.player: t for t in run(env, cast(policy=say))}
        assert {name: t.reward for name, t in by_name.items()} == {"first": first} | (
            {"second": second} if second else {}
        )
        assert all(len(samples_from_turns(t.turns, 1.0)) == 1 for t in by_name.values())


# Exactness


CHATML = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>\n' + message['content'] + "
    "'<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
# Architecture, template, and what that template puts behind a role, and behind an end token.
KINDS = {
    "bob": ("qwen3", None, "", ""),
    "alice": ("llama", CHATML, "\n", "\n"),
    "carol": ("qwen2", ALTERNATING, "\n", "\n"),
}


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Name -> (actor, model): three architectures, tokenizers and templates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    states = {}
    for seed, (name, (arch, template, _, _)) in enumerate(KINDS.items()):
        folder = tmp_path_factory.mktemp(name)
        tokenizer = (
            bpe_tokenizer(["the cat sat on the mat and that was that"], 320)
            if name == "alice"
            else None
        )
        make_tiny_model(folder, 32, 2, 2, seed=seed, arch=arch, tokenizer=tokenizer)
        chat = Chat(AutoTokenizer.from_pretrained(folder), template)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        engine = embedded(model, num_slots=6, max_context_tokens=600, tokenizer=chat.tokenizer)
        actor = Actor(
            name=name,
            engine=engine,
            chat=chat,
            stop_token_ids=chat.stop_token_ids,
            max_context_tokens=600,
        )
        states[name] = (actor, model)
    return states


def naive_ids(name: str, chat: Chat, messages: list[dict], turns: list) -> list[int]:
    """The expected prompt of the actor's next turn: its sampled tokens unchanged, all other text in
    the format of its template."""
    _, _, after_role, after_end = KINDS[name]
    end, text, ids, turns = chat.tokenizer.convert_tokens_to_ids("<|end|>"), "", [], iter(turns)
    for message in messages:
        text += f"<|{message['role']}|>{after_role}"
        if message["role"] != "assistant":
            text += f"{message['content']}<|end|>{after_end}"
            continue
        sampled = next(turns).completion.token_ids
        ids += chat.tokenizer.encode(text, add_special_tokens=False) + sampled
        text = after_end if sampled[-1] == end else f"<|end|>{after_end}"
    return ids + chat.tokenizer.encode(f"{text}<|assistant|>{after_role}", add_special_tokens=False)


def check_sample(t: Trajectory, model: torch.nn.Module) -> None:
    """Checks that only sampled tokens are trained, with the model's logprobs."""
    [sample] = samples_from_turns(t.turns, 1.0)  # its stream only grew
    prompts, replies = prompts_of(t.turns), [turn.completion.token_ids for turn in t.turns]
    assert sample.token_ids.tolist() == prompts[-1] + replies[-1]
    num_tokens = sum(len(turn.new_ids + ids) for turn, ids in zip(t.turns, replies, strict=True))
    assert num_tokens == len(sample.token_ids)
    sampled: list[int] = []
    for ids, new in zip(prompts, replies, strict=True):
        sampled += range(len(ids), len(ids + new))
    assert [i for i, m in enumerate(sample.loss_mask) if m] == sampled
    with torch.no_grad():
        logits = model(torch.tensor([sample.token_ids])).logits[0].double().log_softmax(-1)
    for i in sampled:
        expected = logits[i - 1, sample.token_ids[i]].item()
        assert abs(sample.rollout_logprobs[i] - expected) < 1e-4, (t.actor, i)


def check_views(views: list[Trajectory]) -> None:
    """Checks that every turn of an actor is in the views of the others, in the same order."""
    heard = {t.actor: [m["content"] for m in t.messages if m["role"] == "user"] for t in views}
    for t in views:
        texts = [turn.completion.text for turn in t.turns]
        for other in views:
            if other is not t:
                text = "\n\n".join(heard[other.actor])
                positions = [text.find(content) for content in texts if len(content) > 5]
                assert -1 not in positions and positions == sorted(positions)


def test_every_actors_tokens_masks_and_logprobs_equal_a_naive_simulation(env_of, trio):
    env = env_of("""
        turns = "bob -> alice -> carol -> (bob -> (alice/carol) -> carol)*3 -> alice"
        system_prompts = {"bob": "Be {{ answer }}.", "alice": "Be brief."}
        def interact(messages):
            if len(messages) % 3 == 0: return [{"role": "user", "content": "And?"}]
        def reward_fn(): return 1
    """)
    check_actors(env, list(trio))
    actors = {name: actor for name, (actor, _) in trio.items()}
    # Random models seldom end their turns: letters end them, so that some turns end without an end
    # token.
    stop = tuple("aeiou0123456789tT. ")
    tasks = [make_task(dict(ROW), i, env.name, "train") for i in range(3)]
    groups = make_groups(tasks, 2, seed=5, max_tokens=60, stop=stop)
    trajectories = asyncio.run(
        rollout(
            {env.name: env}, actors, groups, RolloutConfig(max_failed_fraction=0.0), init_ranks(60)
        )
    )
    episodes: dict[tuple, list] = {}
    for t in trajectories:
        episodes.setdefault((t.group_id, t.index), []).append(t)
    assert len(episodes) == 6 and {len(e) for e in episodes.values()} == {3}
    num_without_end = 0
    for t in trajectories:
        actor, model = trio[t.actor]
        texts = [m["content"] for m in t.messages if m["role"] == "assistant"]
        assert texts == [turn.completion.text for turn in t.turns]
        places = [i for i, m in enumerate(t.messages) if m["role"] == "assistant"]
        for number, (turn, prompt, position) in enumerate(
            zip(t.turns, prompts_of(t.turns), places, strict=True)
        ):
            assert prompt == naive_ids(t.actor, actor.chat, t.messages[:position], t.turns[:number])
            num_without_end += turn.completion.token_ids[-1] not in actor.stop_token_ids
        check_sample(t, model)
    assert num_without_end > 5
    for views in episodes.values():
        check_views(views)
