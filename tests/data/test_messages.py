"""Messages of other formats become one form, and a template that leaves something out is refused."""

from __future__ import annotations

import asyncio
import itertools
import json

import datasets
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
    user,
    without_space,
)

from rl_core.config import RolloutConfig, parse_config
from rl_core.data.messages import canonical_messages
from rl_core.data.rows import load_rows
from rl_core.data.tasks import make_task
from rl_core.engines.scripted import ScriptedActor
from rl_core.plugins.env_file import load_env, rows_of
from rl_core.plugins.sft import sft_samples
from rl_core.plugins.streaming import StreamedTasks, open_stream
from rl_core.plugins.tables import load_other
from rl_core.sampling.rollout import GroupPlayer
from rl_core.train import main as train

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


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name="clock", number=0, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def result(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}"}


def system(text, role="system"):
    return {"role": role, "content": text}


def inline(thoughts, text):
    return said(f"<think>\n{thoughts}\n</think>\n\n{text}")


NESTED = {"zonk": "kalmia", "days": 20417, "exact": True, "ways": ["lupin"], "more": {"ivy": "oak"}}
# Every text is a word that no template writes.
CONVERSATIONS = {
    "plain": [user("aster"), said("briar")],
    "system": [system("aster"), user("briar"), said("cedar")],
    "developer": [system("aster", "developer"), user("briar"), said("cedar")],
    "turns": [system("aster"), user("briar"), said("cedar"), user("dahlia"), said("elder")],
    "system_later": [user("aster"), said("briar"), system("cedar"), user("dahlia"), said("elder")],
    "two_users": [user("aster"), user("briar"), said("cedar")],
    "call": [user("aster"), said("", tool_calls=[call(zonk="briar")])],
    "call_result": [
        user("aster"),
        said(None, tool_calls=[call(zonk="briar")]),
        result("cedar"),
        said("dahlia"),
    ],
    "text_and_call": [
        user("aster"),
        said("briar", tool_calls=[call(zonk="cedar")]),
        result("dahlia"),
        said("elder"),
    ],
    "two_calls": [
        user("aster"),
        said("", tool_calls=[call(zonk="briar"), call("dice", 1, sidd="cedar")]),
        result("dahlia"),
        result("elder", 1),
        said("fennel"),
    ],
    "types": [user("aster"), said("", tool_calls=[call(**NESTED)])],
    "no_arguments": [user("aster"), said("", tool_calls=[call("dice")])],
    "result_alone": [user("aster"), said("briar"), result("cedar"), said("dahlia")],
    "thoughts": [user("aster"), said("briar", reasoning_content="cedar")],
    "thoughts_twice": [
        user("aster"),
        said("briar", reasoning_content="cedar"),
        user("dahlia"),
        said("elder", reasoning_content="fennel"),
    ],
    "thoughts_and_call": [
        user("aster"),
        said("", reasoning_content="briar", tool_calls=[call(zonk="cedar")]),
        result("dahlia"),
        said("elder", reasoning_content="fennel"),
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
    """What must come back of a message."""
    thoughts, _, text = (message["content"] or "").rpartition("</think>")
    found = [text.strip()] if text.strip() else []
    if with_thoughts:
        found += [thoughts.removeprefix("<think>").strip()] if thoughts else []
        found += words_of(message.get("reasoning_content", []))
    for one in message.get("tool_calls", []):
        function = one["function"]
        found += [function["name"], *words_of(function["arguments"], is_key=True)]
    return found


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
        "messages": [user("go"), said(None, tool_calls=[call("clock", zone="CET")])],
        "tools": [schema("clock", "zone", "string")],
    },
    {
        "messages": [user("go"), said(None, tool_calls=[call("dice", sides=6)]), result("4")],
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


@pytest.mark.parametrize(("name", "read"), SOURCES)
def test_a_table_says_what_its_rows_say(name, read, tmp_path):
    chat = chat_named("qwen2_5")
    WAYS[name](tmp_path / name)
    for row, written in zip(read(tmp_path / name), TABLE, strict=True):
        for found, expected in zip(sft_samples(chat, row), sft_samples(chat, written), strict=True):
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert "null" not in chat.tokenizer.decode(found.token_ids)


def test_a_null_that_json_says_is_an_argument():
    calls = [{"function": {"name": "clock", "arguments": '{"zone": null}'}}]
    for given in (calls, [call(zone=None)]):
        (message,) = canonical_messages([said(None, tool_calls=given, name=None)])
        assert message["tool_calls"][0]["function"]["arguments"] == {"zone": None}
        assert "name" not in message


BARE = json.dumps([TOOLS[0]["function"]])
CHAT_MESSAGES = [system("aster"), user("briar"), said("cedar"), user("dahlia")]
# Each row in one form, and the messages and tools that it says.
ROWS = [
    ({"prompt": "aster"}, [user("aster")], None),
    ({"prompt": "aster", "tools": TOOLS}, [user("aster")], TOOLS),
    ({"question": "aster", "tools": BARE}, [user("aster")], TOOLS),
    (
        {"system": "aster", "history": [["briar", "cedar"]], "instruction": "dahlia"},
        CHAT_MESSAGES,
        None,
    ),
    ({"system_prompt": "aster", "prompt": CHAT_MESSAGES[1:]}, CHAT_MESSAGES, None),
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
        if variables and "enable_thinking" not in chat.chat_template:
            continue
        answered = row | {"response": "elder"}
        try:
            expected = library_prompt(chat, messages, tools, variables)
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


@pytest.fixture(scope="module")
def env_of_a_reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("env") / "env.py"
    file.write_text("def reward_fn(completion): return 1.0")
    return load_env(str(file))


def prompt_of_rl(env, chat, row):
    """What the actor reads first in an episode."""
    actors = {"policy": ScriptedActor(name="policy", chat=chat, replies=["fennel"])}
    (group,) = make_groups([make_task(row, 0, env.name, "train")])
    (trajectory,) = asyncio.run(GroupPlayer({env.name: env}, actors, RolloutConfig()).play(group))
    assert trajectory.status == "ok", trajectory.error
    return trajectory.turns[0].new_ids


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
