"""Messages of other formats become one form, and a template that leaves something out is refused."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
from contextlib import nullcontext

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from jinja2 import TemplateError
from stage import make_groups
from test_chat import (
    TAKE_ONLY_PARTS,
    chat_named,
    chat_of,
    every_template,
    in_parts,
    make_tokenizer,
    user,
    without_space,
)

from rl_core.config import RolloutConfig, parse_config
from rl_core.data.canonical_messages import canonical_messages, canonical_tools
from rl_core.data.chat import Chat
from rl_core.data.preference_pairs import reply_pair, scored_pair
from rl_core.data.row_files import load_rows
from rl_core.data.sft_samples import sft_messages, sft_samples, trained_messages
from rl_core.data.tables import load_other
from rl_core.data.task_rows import make_task, row_tools
from rl_core.data.tasks.streaming import StreamedTasks, open_stream
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.agents.chat_completions import read as read_request
from rl_core.environments.agents.requests import Refusal
from rl_core.environments.data_hooks import rows_of
from rl_core.environments.env_file import load_env
from rl_core.rewards.reward_model import RewardModel
from rl_core.sampling.episode import read_answer
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.train import main as train
from rl_core.types import SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    }
]


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name="clock", number=0, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def result(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}"}


def system(text, role="system"):
    return {"role": role, "content": text}


def inline(thoughts, text):
    return assistant(f"<think>\n{thoughts}\n</think>\n\n{text}")


NESTED = {"zonk": "kalmia", "days": 20417, "exact": True, "ways": ["lupin"], "more": {"ivy": "oak"}}
# Every text is a word that no template writes.
CONVERSATIONS = {
    "plain": [user("aster"), assistant("briar")],
    "system": [system("aster"), user("briar"), assistant("cedar")],
    "developer": [system("aster", "developer"), user("briar"), assistant("cedar")],
    "turns": [
        system("aster"),
        user("briar"),
        assistant("cedar"),
        user("dahlia"),
        assistant("elder"),
    ],
    "system_later": [
        user("aster"),
        assistant("briar"),
        system("cedar"),
        user("dahlia"),
        assistant("elder"),
    ],
    "two_users": [user("aster"), user("briar"), assistant("cedar")],
    "call": [user("aster"), assistant("", tool_calls=[call(zonk="briar")])],
    "call_result": [
        user("aster"),
        assistant(None, tool_calls=[call(zonk="briar")]),
        result("cedar"),
        assistant("dahlia"),
    ],
    "text_and_call": [
        user("aster"),
        assistant("briar", tool_calls=[call(zonk="cedar")]),
        result("dahlia"),
        assistant("elder"),
    ],
    "two_calls": [
        user("aster"),
        assistant("", tool_calls=[call(zonk="briar"), call("dice", 1, sidd="cedar")]),
        result("dahlia"),
        result("elder", 1),
        assistant("fennel"),
    ],
    "types": [user("aster"), assistant("", tool_calls=[call(**NESTED)])],
    "no_arguments": [user("aster"), assistant("", tool_calls=[call("dice")])],
    "result_alone": [user("aster"), assistant("briar"), result("cedar"), assistant("dahlia")],
    "thoughts": [user("aster"), assistant("briar", reasoning_content="cedar")],
    "thoughts_twice": [
        user("aster"),
        assistant("briar", reasoning_content="cedar"),
        user("dahlia"),
        assistant("elder", reasoning_content="fennel"),
    ],
    "thoughts_and_call": [
        user("aster"),
        assistant("", reasoning_content="briar", tool_calls=[call(zonk="cedar")]),
        result("dahlia"),
        assistant("elder", reasoning_content="fennel"),
    ],
    "inline": [user("aster"), inline("briar", "cedar"), user("dahlia"), inline("elder", "fennel")],
}


def words_of(value, is_key=False):
    """Every string, and every number, in a value of JSON, and the keys of arguments."""
    if isinstance(value, dict):
        keys = list(value) if is_key else []
        return keys + [w for v in value.values() for w in words_of(v, is_key)]
    if isinstance(value, list):
        return [w for v in value for w in words_of(v, is_key)]
    return [str(value)] if isinstance(value, (str, int)) and not isinstance(value, bool) else []


def words(message, with_thoughts):
    """Pieces of text that must come back from a message."""
    thoughts, _, text = (message["content"] or "").rpartition("</think>")
    pieces = [text.strip()] if text.strip() else []
    if with_thoughts:
        pieces += [thoughts.removeprefix("<think>").strip()] if thoughts else []
        pieces += words_of(message.get("reasoning_content", []))
    for one in message.get("tool_calls", []):
        function = one["function"]
        pieces += [function["name"], *words_of(function["arguments"], is_key=True)]
    return pieces


def forms(messages):
    """The ways in which a template may want the same messages."""
    for as_text, as_parts, developer in itertools.product((0, 1), (0, 1), ("developer", "system")):
        formed = json.loads(json.dumps(messages))
        for message in formed:
            message["content"] = message["content"] or ""
            if as_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if message["role"] == "developer":
                message["role"] = developer
            for one in message.get("tool_calls", []) if as_text else []:
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        yield formed


def library_shows(chat, messages, tools):
    """True if the library itself renders, in one of the forms, all that stands before the last
    message, and behind that the whole of it."""

    def text(formed, **more):
        template = {"chat_template": chat.chat_template, "tokenize": False}
        return chat.tokenizer.apply_chat_template(formed, tools, **template, **more)

    history = [w for m in messages[:-1] for w in words(m, False)]
    for formed in forms(messages):
        try:
            prompt = text(formed[:-1], add_generation_prompt=True)
            after = without_space(text(formed)).partition(without_space(prompt))[2]
        except Exception:
            continue
        is_shown = "[{'type'" not in prompt and all(word in prompt for word in history)
        if is_shown and all(word in after for word in words(messages[-1], True)):
            return True
    return False


def trained_text(chat, sample):
    return chat.tokenizer.decode(sample.token_ids[sample.loss_mask])


@pytest.mark.parametrize("name", CONVERSATIONS)
@every_template
def test_a_conversation_is_trained_in_full_or_refused(path, name):
    chat, messages = chat_of(path), CONVERSATIONS[name]
    tools = TOOLS if any("tool_calls" in m for m in messages) else None
    ends = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]
    is_shown = all(library_shows(chat, messages[:end], tools) for end in ends)
    try:
        samples = sft_samples(chat, {"messages": messages, "tools": tools})
    except ValueError as error:
        assert not is_shown, error
        return
    texts = [chat.tokenizer.decode(sample.token_ids) for sample in samples]
    trained = " ".join(trained_text(chat, sample) for sample in samples)
    for message in messages:
        is_reply = message["role"] == "assistant"
        for word in words(message, is_reply):
            assert any(word in text for text in texts), word
            assert not is_reply or word in trained, word


def schema(name, argument, kind):
    properties = {argument: {"type": kind, "description": argument}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# In a table each call gets the other's argument too, and each message every key.
TABLE = [
    {
        "messages": [user("go"), assistant(None, tool_calls=[call("clock", zone="CET")])],
        "tools": [schema("clock", "zone", "string")],
    },
    {
        "messages": [user("go"), assistant(None, tool_calls=[call("dice", sides=6)]), result("4")],
        "tools": [schema("dice", "sides", "integer")],
    },
]


def jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE))


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)


def arrow(path):
    table = pyarrow.Table.from_pylist(TABLE)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def saved(path):
    datasets.Dataset.from_list(TABLE).save_to_disk(path)


def loaded_rows(path):
    return load_rows(str(path), "train", load_other)[0]


def streamed_rows(path):
    flags = f"--model m --algorithm sft --data.train {path} --data.shuffle false --out o"
    config = parse_config(flags.split())
    return StreamedTasks(open_stream(str(path), "train"), "x", config, "x", None, False).block(0)


def rows_of_a_hook(path):
    return rows_of(lambda split: datasets.Dataset.from_list(TABLE), "train", "env.py")


WAYS = {
    "rows.jsonl": jsonl,
    "rows.parquet": parquet,
    "rows.arrow": arrow,
    "saved": saved,
}
SOURCES = [*itertools.product(WAYS, (loaded_rows, streamed_rows)), ("rows.jsonl", rows_of_a_hook)]


@pytest.mark.parametrize("name, read", SOURCES)
def test_a_table_says_what_its_rows_say(name, read, tmp_path):
    chat = chat_named("qwen2_5")
    WAYS[name](tmp_path / name)
    for row, written in zip(read(tmp_path / name), TABLE, strict=True):
        for sample, expected in zip(
            sft_samples(chat, row), sft_samples(chat, written), strict=True
        ):
            assert sample.token_ids.tolist() == expected.token_ids.tolist()
            assert "null" not in chat.tokenizer.decode(sample.token_ids)


def test_a_null_that_json_says_is_an_argument():
    calls = [{"function": {"name": "clock", "arguments": '{"zone": null}'}}]
    for value in (calls, [call(zone=None)]):
        (message,) = canonical_messages([assistant(None, tool_calls=value, name=None)])
        assert message["tool_calls"][0]["function"]["arguments"] == {"zone": None}
        assert "name" not in message


def test_keys_of_a_tool_that_are_null_are_absent_and_its_values_stay():
    number = {"type": ["integer", "null"], "default": None, "enum": [1, None]}
    properties = {"n": number, "default": {"type": "string"}}
    count = {"name": "count", "parameters": {"type": "object", "properties": properties}}
    padded = {"n": number | {"description": None}, "zone": None, "enum": None}
    parameters = {"properties": properties | padded, "required": None, "type": "object"}
    tool = {"type": "function", "function": count | {"strict": None, "parameters": parameters}}
    notes = []
    assert canonical_tools([tool], notes) == [{"type": "function", "function": count}]
    assert notes == ["tool 1: keys that are null left out"]


BARE = json.dumps([TOOLS[0]["function"]])


def in_text(tools, key=""):
    """The tools with their parameters, or the value of this key of them, as JSON text."""
    tool = copy.deepcopy(tools[0])
    holder = tool["function"]["parameters"] if key else tool["function"]
    holder[key or "parameters"] = json.dumps(holder[key or "parameters"])
    return [tool]


CHAT_MESSAGES = [system("aster"), user("briar"), assistant("cedar"), user("dahlia")]
# Each row in one form, and the messages and tools that it says.
ROWS = [
    ({"prompt": "aster"}, [user("aster")], None),
    ({"prompt": "aster", "tools": TOOLS}, [user("aster")], TOOLS),
    ({"question": "aster", "tools": BARE}, [user("aster")], TOOLS),
    ({"prompt": "aster", "tools": in_text(TOOLS)}, [user("aster")], TOOLS),
    ({"prompt": "aster", "tools": in_text(TOOLS, "properties")}, [user("aster")], TOOLS),
    (
        {"system": "aster", "history": [["briar", "cedar"]], "instruction": "dahlia"},
        CHAT_MESSAGES,
        None,
    ),
    ({"system_prompt": "aster", "prompt": CHAT_MESSAGES[1:]}, CHAT_MESSAGES, None),
    ({"system_prompt": "aster", "input": CHAT_MESSAGES[1:]}, CHAT_MESSAGES, None),
    ({"prompt": CHAT_MESSAGES, "system": "aster", "history": []}, CHAT_MESSAGES, None),
    ({"history": CHAT_MESSAGES[:3], "problem": "dahlia"}, CHAT_MESSAGES, None),
    (
        {"prompt": "aster", "chat_template_kwargs": {"enable_thinking": False, "x": None}},
        [user("aster")],
        None,
    ),
]


@every_template
def test_rl_and_sft_of_a_row_have_the_librarys_prompt(path, env_of_a_reward):
    chat = chat_of(path)
    for row, messages, tools in ROWS:
        variables = {"enable_thinking": False} if "chat_template_kwargs" in row else {}
        without_comments = re.sub("{#.*?#}", "", chat.chat_template, flags=re.DOTALL)
        if variables and "enable_thinking" not in without_comments:
            continue
        answered = row | {"response": "elder"}
        try:
            expected = library_prompt(chat, messages, tools, variables)
            if chat.tokenizer.decode(expected).strip().endswith("<think>"):
                answered["response"] = "fennel</think>elder"
        except TemplateError:
            with pytest.raises(ValueError, match="the chat template refuses"):
                sft_samples(chat, answered)
            continue
        (sample,) = sft_samples(chat, answered)
        num_prompt = int(sample.loss_mask.argmax())
        assert sample.token_ids[:num_prompt].tolist() == expected
        # No reader knows the calls of this family, so that RL refuses its tools.
        if not (tools and path.stem.startswith("muse_glimmer")):
            assert prompt_of_rl(env_of_a_reward, chat, answered) == expected


def library_prompt(chat, messages, tools, variables):
    if chat.chat_template in TAKE_ONLY_PARTS:
        messages = in_parts(messages)
    more = {"chat_template": chat.chat_template, "add_generation_prompt": True}
    text = chat.tokenizer.apply_chat_template(messages, tools, tokenize=False, **more, **variables)
    return chat.tokenizer.encode(text, add_special_tokens=False)


# Writes a variable at the beginning.
VARIED = (
    "{{ mode }}\n{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_ROW = "{mode}\n<|im_start|>system\naster<|im_end|>\n<|im_start|>user\nbriar<|im_end|>\n"


@pytest.mark.parametrize("entry", ["sft", "rl", "dpo", "rm"])
def test_each_row_has_its_variables_before_those_of_the_flag(entry, env_of_a_reward):
    chat = Chat(make_tokenizer(), VARIED, {"mode": "oak"}, ToolCalls)
    pair = {"prompt": "briar", "chosen": "cedar", "rejected": "elder"}
    talks = {side: [user("briar"), assistant(pair[side])] for side in ("chosen", "rejected")}
    for mode in ("ash", "elm", None, "ash"):
        row = {"system": "aster", "chat_template_kwargs": {"mode": mode}}
        if entry == "rl":
            prompts = [prompt_of_rl(env_of_a_reward, chat, row | {"prompt": "briar"})]
        elif entry == "sft":
            (sample,) = sft_samples(chat, row | {"prompt": "briar", "response": "cedar"})
            prompts = [sample.token_ids]
        else:
            samples_of = {"dpo": reply_pair, "rm": scored_pair}[entry]
            samples = samples_of(chat, row | pair) + samples_of(chat, row | talks)
            prompts = [sample.token_ids for sample in samples]
        for token_ids in prompts:
            text = chat.tokenizer.decode(token_ids)
            assert text.startswith(CHATML_ROW.format(mode=mode or "oak")), text


@pytest.fixture(scope="module")
def env_of_a_reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("env") / "env.py"
    file.write_text("def reward_fn(completion): return 1.0")
    return load_env(str(file))


def prompt_of_rl(env, chat, row):
    """Text that the actor reads first in an episode."""
    actors = {"policy": ScriptedActor(name="policy", chat=chat, replies=["fennel"])}
    (group,) = make_groups([make_task(row, 0, env.name, "train")])
    (trajectory,) = asyncio.run(EpisodeRunner({env.name: env}, actors, RolloutConfig()).play(group))
    assert trajectory.status == "ok", trajectory.error
    return trajectory.turns[0].new_ids


def bare(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


AS_TEXT = '{"name": "clock", "arguments": {"zone": "CET"}}'
CLOCK = TOOLS[0]["function"]
QUOTED = """{"name": "clock", "arguments": '{"zone": "it's \\n"}'}"""
TALK = [user("aster"), assistant(None, tool_calls=[bare("clock", zone="CET")])]
ANSWERED = [*TALK, {"role": "tool", "content": "noon"}, assistant("briar")]
HH = "\n\nHuman: aster\n\nAssistant: briar\n\nHuman: cedar\n\nAssistant: dahlia"
HH_TALK = [user("aster"), assistant("briar"), user("cedar"), assistant("dahlia")]


def glaive(call, functions=BARE[1:-1]):
    chat = [
        f"USER: aster\n\n\nASSISTANT: <functioncall> {call} <|endoftext|>",
        "FUNCTION RESPONSE: noon",
        "ASSISTANT: briar <|endoftext|>",
    ]
    return {"system": f"SYSTEM: Help. Use them -\n{functions}\n", "chat": "\n\n\n".join(chat)}


def xlam(answers=f"[{AS_TEXT}]", **arguments):
    tool = {"name": "clock", "description": "The time.", "parameters": arguments}
    return {"id": 1, "query": "aster", "answers": answers, "tools": json.dumps([tool])}


def hermes(call, result="<tool_response>\nnoon\n</tool_response>"):
    texts = {"human": "aster", "gpt": call, "tool": result}
    turns = [{"from": role, "value": text} for role, text in texts.items()]
    return {"conversations": [*turns, {"from": "gpt", "value": "briar"}], "tools": BARE}


def flat_schema(required=(), **properties):
    parameters = {"type": "object", "properties": properties}
    parameters |= {"required": list(required)} if required else {}
    return [{"type": "function", "function": CLOCK | {"parameters": parameters}}]


# Each row as it is published, and the messages and tools that it says.
PUBLISHED = {
    "xlam": (
        xlam(
            zone={"type": "str", "description": "d"},
            days={"type": "List[int], optional", "description": "d", "default": [1]},
            key={"type": "Callable[[int], str]", "description": "d", "default": None},
            unit={"type": "str", "required": False},
        ),
        TALK,
        flat_schema(
            ["zone"],
            zone={"type": "string", "description": "d"},
            days={
                "type": "array",
                "items": {"type": "integer"},
                "description": "d",
                "default": [1],
            },
            key={"default": None, "description": "d (type: Callable[[int], str])"},
            unit={"type": "string"},
        ),
    ),
    "xlam_no_arguments": (xlam(), TALK, flat_schema()),
    "glaive": (glaive(QUOTED), None, TOOLS),
    "glaive_escaped": (glaive(QUOTED.replace("'s \\n", "\\'s")), None, TOOLS),
    "glaive_two": (glaive(AS_TEXT, f"{BARE[1:-1]}\n\n{BARE[1:-1]}"), None, TOOLS * 2),
    "glaive_none": (
        {"system": "SYSTEM: Help.", "chat": "USER: aster\n\n\nASSISTANT: briar <|endoftext|>"},
        [system("Help."), user("aster"), assistant("briar")],
        None,
    ),
    "hermes": (hermes(f"<tool_call>\n{AS_TEXT}\n</tool_call>"), ANSWERED, TOOLS),
    "hermes_literal": (
        hermes("<tool_call>\n{'arguments': {'zone': 'CET'}, 'name': 'clock'}\n</tool_call>"),
        ANSWERED,
        TOOLS,
    ),
    "hermes_no_tools": (
        hermes("<tool_call>{}</tool_call>", "noon") | {"tools": None},
        [user("aster"), assistant("<tool_call>{}</tool_call>"), *ANSWERED[2:]],
        None,
    ),
    "swe_smith": ({"messages": json.dumps(in_parts(HH_TALK))}, in_parts(HH_TALK), None),
    "capybara": (
        {
            "source": "s",
            "conversation": [
                {"input": "aster", "output": "briar"},
                {"input": "cedar", "output": "dahlia"},
            ],
        },
        HH_TALK,
        None,
    ),
    "wildchat": ({"conversation": HH_TALK, "turn": 2}, HH_TALK, None),
    "hh_rlhf": ({"messages": HH}, HH_TALK, None),
    "rm_static": (
        {"prompt": HH.removesuffix(" dahlia"), "response": " dahlia", "chosen": " dahlia"},
        HH_TALK,
        None,
    ),
    "helpsteer_2": (
        {
            "prompt": "aster\n<extra_id_1>Assistant\nbriar\n<extra_id_1>User\ncedar",
            "response": "dahlia",
            "helpfulness": 3,
        },
        HH_TALK,
        None,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_has_one_reading_for_rl_and_sft(name, env_of_a_reward):
    row, messages, tools = PUBLISHED[name]
    if messages is None:
        zones = {"glaive": "it's \n", "glaive_escaped": "it's"}
        calls = assistant(None, tool_calls=[bare("clock", zone=zones.get(name, "CET"))])
        messages = [system("Help. Use them"), user("aster"), calls, *ANSWERED[2:]]
    chat, written = chat_named("qwen2_5"), json.dumps(row)
    task = make_task(row, 0, "env", "train")
    assert json.dumps(row) == written
    assert [m | {"train": True} for m in sft_messages(task.row)] == [
        m | {"train": True} for m in messages
    ]
    assert row_tools(task.row) == tools
    last = max(i for i, message in enumerate(messages) if message["role"] != "assistant") + 1
    assert [m | {"train": True} for m in task.messages] == [
        m | {"train": True} for m in messages[:last]
    ]
    prompt = prompt_of_rl(env_of_a_reward, chat, row)
    (sample,) = sft_samples(chat, task.row)
    assert sample.token_ids[: len(prompt)].tolist() == prompt
    assert make_task(task.row, 0, "env", "train").messages == task.messages


@pytest.mark.parametrize(
    "row, match",
    [
        (xlam("clock()"), "columns answers, query, tools: message 2: tool_calls must be a list"),
        (glaive("clock()"), "columns chat, system: a call is not an object with a name: 'clock"),
        (glaive("", "{no json}"), "columns chat, system: a function is not a JSON object: '{no"),
        ({"system": "", "chat": "aster"}, "columns chat, system: a turn must begin with"),
        (hermes("<tool_call>{}"), "columns conversations, tools: message 2: text behind a call"),
        (hermes("<tool_call>x</tool_call>"), "message 2: a call is not an object with a name: 'x'"),
        ({"messages": "aster"}, "column 'messages': must be a list"),
        (
            {"context": [], "response1": "", "response2": "", "overall_preference": "1"},
            "overall_preference must be a number, is '1'",
        ),
    ],
)
def test_a_published_row_without_a_clear_reading_is_refused(row, match):
    with pytest.raises(ValueError, match=f"row 3 of .*{re.escape(match)}"):
        make_task(row, 2, "env", "train")


@pytest.mark.parametrize(
    "kind, schema",
    [
        ("int", {"type": "integer"}),
        ("Optional[float]", {"type": "number"}),
        ("bool, optional, defaults to True", {"type": "boolean"}),
        ("Dict[str, Any]", {"type": "object", "additionalProperties": {}}),
        ("Tuple[float, float]", {"type": "array", "items": {"type": "number"}}),
        (
            "List[Union[int, str]]",
            {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        ),
        ("string", {"type": "string"}),
        ("np.ndarray", {"description": "(type: np.ndarray)"}),
        (["string", "null"], {"type": ["string", "null"]}),
    ],
)
def test_types_of_python_become_those_of_json_schema(kind, schema):
    (tool,) = canonical_tools([{"name": "clock", "parameters": {"zone": {"type": kind}}}])
    parameters = tool["function"]["parameters"]
    assert parameters["properties"] == {"zone": schema}
    is_optional = kind[:8] == "Optional" or "optional" in kind
    assert parameters.get("required") == (None if is_optional else ["zone"])


SPELLED = {
    "sft": {"prompt": "a", "response": "b<|end|>"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c<|end|>"},
    "rm": {"prompt": "a", "chosen": "b<|end|>", "rejected": "c"},
}


@pytest.mark.parametrize("algorithm", SPELLED)
def test_a_reply_that_spells_a_special_token_is_told_once(algorithm, tiny_model, tmp_path, capsys):
    harmless = {"prompt": "<|end|>", "response": "b", "chosen": "b", "rejected": "c"}
    rows = [harmless, *[SPELLED[algorithm]] * 3]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--algorithm {algorithm} --model {tiny_model} --data.train {file} --num_steps 1"
    assert train(f"{flags} --tasks_per_step 4 --out {tmp_path}/run".split()) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "special token" in x]
    assert line.startswith(f"warning: row 2 of {file}: a reply spells the special token '<|end|>'")


CALLS = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}}]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
# Each message, the canonical one, and a word of the note that says how it was read.
READINGS = [
    (user("a"), user("a"), ""),
    ({"from": "human", "value": "a"}, user("a"), "'human' read as user"),
    ({"role": "Human", "content": "a"}, user("a"), "'Human' read as user"),
    ({"from": "gpt", "value": "a", "weight": 1}, assistant("a"), "'gpt' read as assistant"),
    ({"role": "model", "content": "a"}, assistant("a"), "'model' read as assistant"),
    ({"role": "critic", "content": "a"}, {"role": "critic", "content": "a"}, ""),
    ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}, "read as tool"),
    (
        {"role": "function", "name": "f", "content": "a"},
        {"role": "tool", "name": "f", "content": "a"},
        "'function' read as tool",
    ),
    (CALLED, CALLED, ""),
    ({"from": "function_call", "value": AS_TEXT}, CALLED, "'function_call' read as assistant"),
    ({"role": "tool_call", "content": f"[{AS_TEXT}]"}, CALLED, "'tool_call' read as assistant"),
    (
        assistant(None, function_call=json.loads(AS_TEXT)),
        CALLED,
        "function_call read as tool_calls",
    ),
    (assistant(None, tool_calls=json.loads(AS_TEXT)), CALLED, ""),
    (assistant(None, tool_calls=json.dumps(CALLS)), CALLED, ""),
    (
        assistant(
            None, tool_calls=[{"function": {"name": "clock", "arguments": '{"zone": "CET"}'}}]
        ),
        CALLED,
        "arguments of clock() parsed",
    ),
    # LangChain's, Llama's and Anthropic's calls.
    (
        assistant("", tool_calls=[{"name": "clock", "args": {"zone": "CET"}, "type": "tool_call"}]),
        assistant("", tool_calls=CALLS),
        "args of clock() read as arguments",
    ),
    (
        assistant(None, tool_calls=[{"name": "clock", "parameters": {"zone": "CET"}}]),
        CALLED,
        "parameters of clock() read as arguments",
    ),
    (
        assistant(None, tool_calls=[{"name": "clock", "input": {"zone": "CET"}}]),
        CALLED,
        "input of clock() read as arguments",
    ),
    (assistant("a", tool_calls=[]), assistant("a"), ""),
    (assistant("<think>b</think>a", reasoning_content=""), assistant("<think>b</think>a"), ""),
    (assistant("a", partial=True), assistant("a", prefix=True), "partial read as prefix"),
    (assistant("a", partial=False), assistant("a"), ""),
    (
        assistant("a", thinking="b"),
        assistant("a", reasoning_content="b"),
        "thinking read as reasoning",
    ),
    (
        assistant([{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]),
        assistant([{"type": "text", "text": "a"}], reasoning_content="b"),
        "thinking parts read as reasoning_content",
    ),
    (
        user(["a", {"type": "input_text", "text": "b"}]),
        user(in_parts([user("a")])[0]["content"] + [{"type": "text", "text": "b"}]),
        "",
    ),
]
UNTRAINED = itertools.product(
    (
        "train",
        "weight",
        "loss",
        "loss_mask",
        "trainable",
        "training",
        "train_on_turn",
        "weights",
        "loss_weight",
        "loss_scale",
        "step_loss_mask",
    ),
    (False, 0, 0.0, "false", "False", "0", np.bool_(False), np.int64(0)),
)
READINGS += [
    (assistant("a", **{k: v}), assistant("a", train=False), "not trained") for k, v in UNTRAINED
]
OTHER_ROLES = [(role, "assistant") for role in ("chatgpt", "ai", "bot", "chatbot")]
OTHER_ROLES += [(role, "tool") for role in ("ipython", "tool_response", "tool_result")]
OTHER_ROLES += [(role, "tool") for role in ("function_response", "function_result")]
READINGS += [
    ({"role": role, "content": "a"}, {"role": name, "content": "a"}, f"{role!r} read as {name}")
    for role, name in OTHER_ROLES
]
READINGS += [
    (assistant("a", train=each), assistant("a"), "") for each in (True, 1, 1.0, "true", np.True_)
]
SPAN = {"begin_offset": 0, "end_offset": 1}
READINGS += [
    (assistant("a", masked=1), assistant("a", train=False), "not trained (masked)"),
    (assistant("a", masked="false"), assistant("a"), ""),
    (assistant("a", train_detail=[SPAN | {"train": True}]), assistant("a"), ""),
]


@pytest.mark.parametrize("message, canonical, note", READINGS)
def test_messages_of_other_formats_have_one_form(message, canonical, note):
    notes, text = [], json.dumps(message, default=str)
    assert canonical_messages([message], notes) == [canonical]
    assert canonical_messages([canonical]) == [canonical]
    assert json.dumps(message, default=str) == text
    assert note in " ".join(notes) and (note or not notes)


@pytest.mark.parametrize(
    "mask, trained",
    [([0, 1], [3]), ([0, 0, 0, 1], [3]), ([1, False], [1]), ([1, 1], [1, 3]), (None, [1, 3])],
)
@pytest.mark.parametrize("column", ["loss_mask", "train"])
def test_a_column_may_exclude_messages_from_the_loss(column, mask, trained):
    row = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")], column: mask}
    assert trained_messages(sft_messages(row)) == trained
    if mask:
        with pytest.raises(ValueError, match="has 3 values, and there are 4 messages, 2 of assist"):
            sft_messages(row | {column: [1, 1, 1]})


RESPONSE = {"name": "clock", "response": {"time": "12:00"}}
HEARD = {"role": "tool", "name": "clock", "content": '{"time": "12:00"}'}
GEMINI_CALL = {"name": "clock", "args": {"zone": "CET"}}
NOON = [{"type": "text", "text": "noon"}]


@pytest.mark.parametrize(
    "message, canonical",
    [  # Gemini's parts and keys, Gemma's, and roles of published rows.
        ({"role": "user", "content": [{"function_response": RESPONSE}]}, [HEARD]),
        ({"role": "function", "parts": [{"functionResponse": RESPONSE}]}, [HEARD]),
        (
            {
                "role": "user",
                "parts": [{"functionResponse": RESPONSE | {"id": "c1"}, "text": None}],
            },
            [HEARD | {"tool_call_id": "c1"}],
        ),
        ({"role": "function_response", "content": RESPONSE}, [HEARD]),
        ({"role": "function_response", "parts": [], "function_response": RESPONSE}, [HEARD]),
        ({"role": "tool", "name": "clock", "function_response": '{"time": "12:00"}'}, [HEARD]),
        (
            {"role": "user", "parts": [{"function_response": RESPONSE}, {"text": "noon"}]},
            [HEARD, user(NOON)],
        ),
        ({"role": "model", "parts": [{"functionCall": GEMINI_CALL}]}, [CALLED]),
        (
            {"role": "assistant", "tool_calls": CALLS, "tool_responses": [RESPONSE, RESPONSE]},
            [CALLED, HEARD, HEARD],
        ),
        (
            assistant("noon", tool_calls=CALLS, tool_responses=[RESPONSE], thinking="b"),
            [CALLED | {"reasoning_content": "b"}, HEARD, assistant("noon")],
        ),
    ],
)
def test_results_of_functions_in_a_message_are_messages_of_tools(message, canonical):
    text = json.dumps(message)
    assert canonical_messages([message]) == canonical
    assert canonical_messages(canonical) == canonical
    assert json.dumps(message) == text


@pytest.mark.parametrize(
    "message, match",
    [
        (
            assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "a JSON object",
        ),
        (
            assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            "a JSON object",
        ),
        (assistant(None, tool_calls=[{"function": {"arguments": {}}}]), "a function with a name"),
        (assistant(None, tool_calls="f()"), "tool_calls must be a list, or its JSON text; is 'f"),
        ({"from": "function_call", "value": "call it"}, "must be a list, or its JSON text"),
        (assistant("a", weight=0.5), r"'weight' is 0.5; a message is trained \(true, 1\) or not"),
        (assistant("a", loss_mask=[0, 1]), r"'loss_mask' is \[0, 1\]; a message is trained"),
        (assistant("a", mask=1), "'mask' may say that it is trained, or that it is not; give the"),
        (
            assistant("a", train_detail=[SPAN | {"train": False}]),
            "'train' of a part is false",
        ),
        (
            assistant([{"type": "text", "text": "a", "weight": 0}]),
            "'weight' of a part is false",
        ),
        (assistant("a", thinking="b", reasoning="c"), "thinking and reasoning differ"),
        (
            assistant([{"type": "thinking", "thinking": "b"}], reasoning_content="c"),
            "reasoning_content and thinking differ",
        ),
        ({"role": "function_call"}, "is {'role': 'function_call'}"),
        (user("half \ud83d"), "a lone surrogate, '.ud83d', at character 5"),
        (user([{"type": "text", "text": "\udc00"}]), "a lone surrogate"),
        (assistant("a", thinking="b\ud83d"), "a lone surrogate, '.ud83d', at character 1"),
        (user("a") | {"images": ["b.png"]}, "a part of type 'images' is not supported"),
    ],
)
def test_a_message_without_a_clear_reading_is_refused_with_its_number(message, match):
    with pytest.raises(ValueError, match=f"message 2.*{match}"):
        canonical_messages([user("a"), message])


KINDS = [
    {"type": "video", "video": "a.mp4"},
    {"type": "input_audio", "input_audio": {"data": ""}},
    {"type": "file", "file": {"file_id": "a"}},
    {"type": "document", "source": {}},
]


def seen_by_rl(messages):
    make_task({"prompt": messages}, 0, "env", "train")


def heard_from_interact(messages):
    read_answer({"messages": messages}, "env.py", True)


def heard_from_a_hook(messages):
    actor = ScriptedActor(name="policy", chat=plain_chat(), replies=["a"])
    asyncio.run(actor.bind_episode(SamplingParams(max_tokens=9), 0, "s").respond(messages))


def scored(messages):
    model = RewardModel.__new__(RewardModel)
    model.token_ids(messages)


def sent_by_a_program(messages):
    try:
        read_request({"model": "m", "messages": messages})
    except Refusal as error:
        raise ValueError(error.message) from None


ENTRIES = {
    "sft": lambda messages: sft_samples(None, {"prompt": messages, "response": "a"}),
    "dpo": lambda messages: reply_pair(None, {"prompt": messages, "chosen": "a", "rejected": "b"}),
    "rm": lambda messages: scored_pair(None, {"prompt": messages, "chosen": "a", "rejected": "b"}),
    "rl": seen_by_rl,
    "interact": heard_from_interact,
    "respond": heard_from_a_hook,
    "reward model": scored,
    "program": sent_by_a_program,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("block", KINDS, ids=lambda block: block["type"])
def test_video_and_the_like_are_refused_wherever_messages_come_in(block, entry):
    text = {"type": "text", "text": "a"}
    with pytest.raises(ValueError, match=rf"a part of type '{block['type']}'"):
        ENTRIES[entry]([{"role": "user", "content": [text, block]}])


def test_an_assistant_that_begins_is_context():
    chat, talk = chat_named("qwen2_5"), [assistant("a"), user("b"), assistant("c")]
    shared = [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]
    for row in ({"messages": talk}, {"conversations": [*shared, {"from": "gpt", "value": "c"}]}):
        (sample,) = sft_samples(chat, row)
        assert trained_text(chat, sample) == "c<|im_end|>"
        assert "assistant\na<|im_end|>" in chat.tokenizer.decode(sample.token_ids)
    with pytest.raises(ValueError, match="nothing to train: give one with role 'assistant' behind"):
        sft_samples(chat, {"messages": [assistant("a"), assistant("b"), user("c")]})


def test_gpt_oss_trains_thoughts_behind_a_call_with_thoughts():
    chat = chat_named("gptoss")
    row = {"messages": CONVERSATIONS["thoughts_and_call"], "tools": TOOLS}
    samples = sft_samples(chat, row)
    assert "".join(trained_text(chat, sample) for sample in samples) == (
        "<|channel|>analysis<|message|>briar<|end|><|start|>assistant to=functions.clock"
        '<|channel|>commentary json<|message|>{"zonk": "cedar"}<|call|>'
        "<|channel|>analysis<|message|>fennel<|end|><|start|>assistant"
        "<|channel|>final<|message|>elder<|return|>"
    )


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "deepseekv3"])
def test_thoughts_that_stand_in_the_content_too_are_trained_once(name):
    block = "<think>\nbriar\n</think>\n\nelder"
    reply = assistant(block) | {"reasoning_content": "briar"}
    (sample,) = sft_samples(chat_named(name), {"messages": [user("b"), reply]})
    (bare,) = sft_samples(chat_named(name), {"messages": [user("b"), assistant(block)]})
    text = trained_text(chat_named(name), sample)
    assert text == trained_text(chat_named(name), bare)
    assert (text.count("briar"), text.count("</think>")) == (1, 1)


@pytest.mark.parametrize(
    "reply, trained",
    [
        (assistant("elder", reasoning_content="briar"), "briar\n</think>\n\nelder"),
        (assistant("<think>\nbriar\n</think>\n\nelder"), "briar\n</think>\n\nelder"),
        (assistant("briar</think> elder"), "briar</think> elder"),
    ],
)
def test_thoughts_are_closed_where_the_template_leaves_them_out(reply, trained):
    """DeepSeek's prompt ends in <think>, and its history has no thoughts."""
    (sample,) = sft_samples(chat_named("deepseekv3"), {"messages": [user("b"), reply]})
    assert trained_text(chat_named("deepseekv3"), sample) == f"{trained}<｜end▁of▁sentence｜>"


def test_conversations_of_one_shape_are_checked_once(monkeypatch):
    chat, rendered, counts = chat_named("qwen2_5"), [], []
    template = chat.tokenizer.apply_chat_template

    def counted(messages, **options):
        rendered.append(messages)
        return template(messages, **options)

    monkeypatch.setattr(chat.tokenizer, "apply_chat_template", counted)
    for number in range(4):
        before = len(rendered)
        sft_samples(chat, {"messages": [user(f"a{number}"), assistant(f"b{number}")]})
        counts.append(len(rendered) - before)
    assert counts[0] > counts[1] == counts[2] == counts[3] == 2


TURN = "{{{{ m.role + '\n' }}}}{}{{{{ '<|im_end|>\n' }}}}"
# A template, a conversation that it shows in full, and another of which it leaves something out.
SHAPES = {
    "tools": (
        "{% for m in messages if not (tools and m.role == 'system') %}"
        + TURN.format("{{ m.content }}")
        + "{% endfor %}{{ tools }}",
        ([system("aster"), assistant("briar")], None),
        ([system("aster"), assistant("briar")], TOOLS),
        "its text",
    ),
    "an argument": (
        "{% for m in messages %}"
        + TURN.format(
            "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
            "{% for key in call.function.arguments.keys() %}{{ key }}{% endfor %}{% endfor %}"
        )
        + "{% endfor %}",
        ([user("aster"), assistant("", tool_calls=[call(zone="")])], None),
        ([user("aster"), assistant("", tool_calls=[call(zone="CET")])], None),
        "the argument 'zone'",
    ),
    "thoughts": (
        "{% for m in messages %}"
        + TURN.format("{{ m.content.split('</think>')[-1] }}")
        + "{% endfor %}",
        ([user("aster"), inline("", "briar")], None),
        ([user("aster"), inline("cedar", "briar")], None),
        "its thoughts",
    ),
    "calls as a text of OLMo 3": (
        "{% for m in messages %}" + TURN.format("{{ m.content }}") + "{% endfor %}",
        ([user("aster"), assistant("briar", function_calls=" ")], None),
        ([user("aster"), assistant("briar", function_calls="clock()")], None),
        "its function_calls",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_of_another_shape_is_checked_anew(name):
    template, shown, lost, label = SHAPES[name]
    chat = Chat(make_tokenizer(), template)
    chat.prompt_ids(*shown, add_generation_prompt=False)
    with pytest.raises(ValueError, match=f"does not render {label}"):
        chat.prompt_ids(*lost, add_generation_prompt=False)
    chat.prompt_ids(*shown, add_generation_prompt=False)


# Writes the roles that it knows, and no calls.
SELECTIVE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAYS = "def interact(messages): return {said}\ndef reward_fn(completion): return 1.0\nmax_turns = 2"
LOST = {
    "the call of clock()": {**CALLED, "content": "a"},
    "its text": {"role": "critic", "content": "a"},
    "its thoughts": assistant("b", reasoning_content="a"),
}


@pytest.mark.parametrize("label", LOST)
def test_a_message_that_the_template_leaves_out_is_refused_at_every_entry(label, tmp_path):
    chat, lost = Chat(make_tokenizer(), SELECTIVE, tool_reader=ToolCalls), LOST[label]
    talk = [user("a"), lost, user("c")]
    refused = pytest.raises(
        ValueError, match=rf"message 2 of \[user {lost['role']}.*{re.escape(label)}"
    )
    with refused:
        sft_samples(chat, {"messages": [*talk, assistant("d")]})
    pair = {"prompt": talk, "chosen": "d", "rejected": "e"}
    if label == "its thoughts":
        pair = {"prompt": [user("a")], "chosen": [lost], "rejected": "e"}
    for samples_of in (reply_pair, scored_pair):
        with refused:
            samples_of(chat, pair)
    model = RewardModel.__new__(RewardModel)
    model.chat, model.lock, model.max_tokens = chat, nullcontext(), 1000
    with refused:
        model.token_ids(talk[:2])
    if label == "its thoughts":
        return  # Templates leave out those of turns that are not trained.
    with refused:
        chat.prompt_ids(talk)
    actor = ScriptedActor(name="policy", chat=chat, replies=["b"])
    episode = actor.bind_episode(SamplingParams(max_tokens=9), 0, "s")
    with refused:
        asyncio.run(episode.respond(talk))
    (tmp_path / "env.py").write_text(SAYS.format(said=[user("e"), lost]))
    env = load_env(str(tmp_path / "env.py"))
    (group,) = make_groups([make_task({"prompt": "a"}, 0, env.name, "train")])
    player = EpisodeRunner({env.name: env}, {"policy": actor}, RolloutConfig())
    (trajectory,) = asyncio.run(player.play(group))
    assert trajectory.status == "failed" and "message 4 of [user assist" in trajectory.error
    assert label in trajectory.error
