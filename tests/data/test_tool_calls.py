"""Checks before a model loads that calls written by a chat template are read back."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import stage
from test_chat import SAID, TEMPLATES, TOOLS, completion, make_tokenizer, tool_chat, user
from transformers import AutoTokenizer

from rl_core.config import parse_config
from rl_core.data.chat import Chat
from rl_core.data.tool_calls import ToolCalls, python_calls, sample_arguments, typed_value
from rl_core.environments.env_file import load_env
from rl_core.run.plan.plan import make_plan
from rl_core.tools.cli import main

KINDS = ("string", "integer", "number", "boolean", "array", "object", ["integer", "null"])
PARAMETERS = {f"p{n}": {"type": kind, "description": "a"} for n, kind in enumerate(KINDS)}
PARAMETERS["unit"] = {"type": "string", "enum": ["C", "F"], "description": "b"}
ALL_TYPES = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"properties": PARAMETERS},
        },
    }
]
# Its calls are written in one way and read in another.
FOREIGN = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.role + "
    "': ' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '@' + c.function.name + '!' }}{% endfor %}{{ '</s>' }}{% "
    "endfor %}ai: "
)


def takes_tools(template: str) -> bool:
    chat = Chat(make_tokenizer(), template)
    return chat.render([user("x")], TOOLS) != chat.render([user("x")])


def test_calls_of_every_template_that_takes_tools_come_back_or_are_refused():
    refused, num_checked = Counter(), 0
    for path in TEMPLATES:
        if not takes_tools(path.read_text()):
            continue
        num_checked += 1
        reader = tool_chat(path.stem).tool_calls
        for tools in (TOOLS, ALL_TYPES) * 2:  # Refused again, whatever is remembered.
            try:
                reader.check(tools, "env.py")
            except ValueError as error:
                assert "not read back" in str(error) and "--actors.NAME.chat_template" in str(error)
                refused[path.stem] += 1
    assert num_checked > 25
    assert refused == {"muse_glimmer": 4, "muse_glimmer_training": 4}


def test_arguments_of_python_calls_are_values_of_json():
    def of(text):
        return re.fullmatch("(?P<arguments>.*)", text)

    text = "[f(x=(1, 2), y={'a': true}, z=None)]"
    assert python_calls(of(text), []) == [
        {"name": "f", "arguments": {"x": [1, 2], "y": {"a": True}, "z": None}}
    ]
    for argument in ("**{'a': 1}", "x=b'a'", "x={1, 2}", "x=1j", "x=...", "1"):
        with pytest.raises((ValueError, TypeError)):
            python_calls(of(f"[f({argument})]"), [])


def test_a_template_that_says_nothing_of_tools_is_left_to_the_environment():
    without_tools = FOREIGN.replace("tools or []", "[]")
    Chat(make_tokenizer(), without_tools, tool_reader=ToolCalls).tool_calls.check(TOOLS, "env.py")


def test_rollouts_refuse_tools_whose_calls_are_not_read(tmp_path):
    (tmp_path / "env.py").write_text(
        f"_TOOLS = {TOOLS!r}\nasync def rollout(task, actors):\n"
        "    reply = await actors['policy'].respond(task.messages, tools=_TOOLS)\n    return "
        "[reply.trajectory(1.0)]\n"
    )
    env = load_env(str(tmp_path / "env.py"))
    [failed] = stage.run(env, stage.cast(policy="hello", template=FOREIGN))
    assert "actor policy: tools: the chat template of" in failed.error
    assert stage.play(env, "hello").reward == 1.0


def test_start_up_refuses_tools_whose_calls_are_not_read(tiny_model, tmp_path, capsys):
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    (tmp_path / "foreign.jinja").write_text(FOREIGN)
    (tmp_path / "env.py").write_text(f"tools = {TOOLS!r}\ndef reward_fn(messages): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    flags = f"--env_path {tmp_path}/env.py --data.train {tmp_path}/rows.jsonl --out {tmp_path}/run"
    template = (
        f"--actors.policy.model {tiny_model} --actors.policy.chat_template {tmp_path}/foreign.jinja"
    )
    assert main(["train", *flags.split(), *template.split()]) == 1
    error = capsys.readouterr().err
    assert "env.py: tools: the chat template of" in error and "@weather!" in error
    assert not (tmp_path / "run").exists()


def test_a_judge_that_gets_no_tools_may_have_any_template(tiny_model, tmp_path):
    (tmp_path / "foreign.jinja").write_text(FOREIGN)
    code = (
        f"tools = {TOOLS!r}\ndef reward_fn(messages): return 1.0\ndef load_tasks(split): return "
        f"[{{'prompt': '1'}}]\n"
    )
    env = tmp_path / "env.py"
    judge = (
        f"--actors.judge.model {tiny_model} --actors.judge.train false "
        f"--actors.judge.chat_template {tmp_path}/foreign.jinja"
    )
    flags = f"--actors.policy.model {tiny_model} {judge} --env_path {env} --out {tmp_path}/run"
    env.write_text(f'turns = "policy"\n{code}')
    assert set(make_plan(parse_config(flags.split())).chats) == {"policy", "judge"}
    env.write_text(f'turns = "policy -> judge"\n{code}')
    with pytest.raises(ValueError, match="not read back"):
        make_plan(parse_config(flags.split()))


PLANNED = "I might call {} or write <tool_call> but that is dangerous."


@pytest.mark.parametrize("name", SAID)
def test_calls_within_thoughts_are_no_calls(name):
    chat, (call, end, _) = tool_chat(name), SAID[name]
    call = call.rpartition("</think>\n\n")[2]
    planned, real = PLANNED.format(call.format("Rome")), call.format("Paris") + end
    city = {"name": "weather", "arguments": {"city": "Paris"}}
    if name == "gptoss":
        analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
        spelled = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"
        spelled = spelled.format('{"city": "Rome"}')
        named = "to=functions.weather<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
        turns = [(analysis.format("I might call to=functions.weather or say it."), "hello")]
        turns += [(analysis.format(f"I might {spelled} but no"), "hello")]
        turns += [(named.format('I might {"city": "Rome"}'), "hello")]
    else:
        turns = [(f"<think>\n{planned}\n</think>\n\n", "hello")]
        turns += [(f"{planned}\n</think>\n\n", "hello<think>\n")]
    for thoughts, prompt in turns:
        for mention in ("", "say <tool_call> "):
            text = thoughts.replace("I might", mention + "I might")
            reply = completion(chat.encode(text + real), chat)
            message, has_failed = chat.tool_calls.read(reply, 0, TOOLS, prompt)
            assert not has_failed and [c["function"] for c in message["tool_calls"]] == [city]
            only = completion(chat.encode(text + "hello"), chat)
            assert chat.tool_calls.read(only, 0, TOOLS, prompt) == (None, False)
    if name == "gptoss":
        unclosed = [(f"<|channel|>analysis<|message|>I might {spelled}", "hello")]
    else:
        unclosed = [(planned, "hello<think>\n"), (f"hello\n<think>{planned}", "hello")]
    for text, prompt in unclosed:
        cut = completion(chat.encode(text), chat)
        assert chat.tool_calls.read(cut, 0, TOOLS, prompt) == (None, False)


@pytest.mark.parametrize("name", sorted(SAID.keys() - {"llama3_1"}))  # Its turn is the call.
@pytest.mark.parametrize(
    "mention, behind",
    [
        ("I write <think> first. ", ""),
        ("`<think>`: ", ""),
        ("No '</think>'. ", ""),
        ("I write `<think>`, ", "\nand `</think>`."),
    ],
)
def test_a_mention_of_thoughts_does_not_hide_a_call(name, mention, behind):
    chat, (call, end, _) = tool_chat(name), SAID[name]
    text = call.rpartition("</think>\n\n")[2].format("Paris")
    if name not in ("apertus", "mistral"):  # Their calls reach to the end of the turn.
        text += behind
    if name == "gptoss":
        mention = f"<|channel|>commentary<|message|>{mention}<|end|><|start|>assistant"
    message, has_failed = chat.tool_calls.read(
        completion(chat.encode(mention + text + end), chat), 0
    )
    city = {"name": "weather", "arguments": {"city": "Paris"}}
    assert not has_failed and [c["function"] for c in message["tool_calls"]] == [city]


ROOT = {
    "$defs": {
        "count": {"type": "integer"},
        "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}},
    }
}
TYPED = [
    ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
    ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ("None", {"type": ["string", "null"]}, None),
    ("null", {"type": "string"}, "null"),
    ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
    ("[1]", {"oneOf": [{"type": "array"}, {"type": "null"}]}, [1]),
    ("7", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, 7),
    ("7", {"allOf": [{"$ref": "#/$defs/count"}], "description": "n"}, 7),
    ("7", {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, 7),
    ("2", {"type": ["string", "integer"], "anyOf": [{"enum": [1, 2]}]}, 2),
    ("7", {"type": ["string", "integer"], "allOf": [{"type": "number"}]}, 7),
    ("7", {"$ref": "#/$defs/count"}, 7),
    ('{"x": 1.5}', {"$ref": "#/$defs/place"}, {"x": 1.5}),
    ("null", {"$ref": "#/$defs/self"}, None),
    ("7", {"$ref": "#/$defs/absent"}, "7"),
    ("2", {"enum": [1, 2]}, 2),
    ("2", {"enum": ["1", "2"]}, "2"),
    ("2", {"enum": ["auto", 2]}, 2),
    ("auto", {"enum": ["auto", 2]}, "auto"),
    ("true", {"const": True}, True),
    ("True", {"enum": [True, False]}, True),
    ("3", {"const": 3}, 3),
    ("3", {}, "3"),
    ("3", True, "3"),
    ("3", None, "3"),
    ("5.0", {"type": "integer"}, 5),
    ("5.5", {"type": "integer"}, 5.5),
    ("5.0", {"type": "number"}, 5.0),
    ("{'k': True, 'n': null}", {"type": "object"}, {"k": True, "n": None}),
    ("['a', None]", {"type": "array"}, ["a", None]),
    ("['a']", {"type": ["string", "array"]}, "['a']"),
    ("{1, 2}", {"type": "array"}, "{1, 2}"),
    ("[f()]", {"type": "array"}, "[f()]"),
    ("7", {"allOf": [{"type": "array"}, {"type": "integer"}]}, 7),
    ("7", {"enum": []}, 7),
]


@pytest.mark.parametrize("text, schema, value", TYPED)
def test_the_type_of_an_argument_is_that_of_its_schema(text, schema, value):
    read = typed_value(text, schema, ROOT)
    assert (read, type(read)) == (value, type(value))
    parameters = ROOT | {"type": "object", "properties": {"x": schema}}
    assert sample_arguments({"name": "f", "parameters": parameters}).keys() == {"x"}
