"""Columns of rows in published shapes: the ones that are read, and the warnings about others."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from rl_core.config import ActorConfig, Config
from rl_core.data.chat import Chat
from rl_core.data.column_names import RenamedColumns, check_columns_exist
from rl_core.data.preference_pairs import LeftOutError, pair_messages
from rl_core.data.task_rows import TaskSource, make_task, read_row
from rl_core.data.tasks.sources import train_tasks
from rl_core.data.warnings.column_use import column_use, read_messages
from rl_core.data.warnings.data_warnings import data_warnings
from rl_core.data.warnings.unread_columns import name_columns
from rl_core.engines.scripted import PLAIN_TEMPLATE, plain_chat
from rl_core.environments.env_file import load_env

WITHOUT_TOOLS = PLAIN_TEMPLATE[PLAIN_TEMPLATE.index("{%- for message") :]
SYSTEM = "Be terse."
TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "It is 4."}]
CLOCK = '[{"name": "clock", "description": "", "parameters": {"type": "object"}}]'
CALLING = [
    {"from": "human", "value": "2+2?"},
    {"from": "function_call", "value": '{"name": "clock", "arguments": {}}'},
    {"from": "observation", "value": "12:00"},
    {"from": "gpt", "value": "It is 4."},
]
VERL = {"prompt": TALK[:1], "reward_model": {"style": "rule", "ground_truth": "4"}, "ability": "m"}
MATHS = {"problem": "2+2?", "solution": "It is 4.", "answer": "4"}
PAIR = {"chosen": "It is 4.", "rejected": "It is 5."}
PREFERRED = {"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "It is 5."}]}
XLAM = '[{"name": "clock", "arguments": {}}]'
RANKED = {"context": TALK[:1], "response1": "It is 4.", "response2": "It is 5."}
RANKED |= {"overall_preference": -1}
ASKED = {"system": SYSTEM, "question": "2+2?"}
RL = ("grpo",)
TEXTS = ("grpo", "sft")
PAIRS = ("dpo", "rm")
# Name -> (algorithms, row, prompt's columns, label's columns if not RL's "answer", unread columns,
# columns that a warning names).
PUBLISHED = {
    "ToolACE": (
        TEXTS, {"system": SYSTEM, "conversations": SHARED},
        "conversations system", "conversations", "", ""),
    "OpenHermes 2.5": (
        TEXTS, {"system_prompt": SYSTEM, "conversations": SHARED, "custom_instruction": True},
        "conversations system_prompt", "conversations", "custom_instruction", ""),
    "APIGen-MT": (
        TEXTS, {"system": SYSTEM, "tools": CLOCK, "conversations": CALLING},
        "tools conversations system", "conversations", "", ""),
    "OpenOrca": (
        TEXTS, {"id": "a", "system_prompt": SYSTEM, "question": "2+2?", "response": "It is 4."},
        "question system_prompt", "response", "id", ""),
    "Nemotron, text": (
        TEXTS, {"system_prompt": SYSTEM, "input": "2+2?", "output": "It is 4.", "license": "x"},
        "input system_prompt", "output", "license", ""),
    "Nemotron, messages": (
        TEXTS, {"system_prompt": SYSTEM, "input": TALK[:1], "output": "It is 4."},
        "input system_prompt", "output", "", ""),
    "alpaca": (
        TEXTS, {"system": SYSTEM, "instruction": "2", "input": "+2?", "output": "It is 4."},
        "instruction input system", "output", "", ""),
    "dolly": (
        TEXTS, {"system": SYSTEM, "instruction": "2+2?", "context": "sums", "response": "It is 4."},
        "instruction system", "response", "context", "context"),
    "a persona": (
        TEXTS, {"system": SYSTEM, "question": "2+2?", "persona": "clerk", "response": "It is 4."},
        "question system", "response", "persona", "persona"),
    "MMLU-Pro": (
        TEXTS, ASKED | {"options": ["3", "4"], "cot_content": "", "response": "It is 4."},
        "question system", "response", "options", "options"),
    "HotpotQA": (
        TEXTS, ASKED | {"context": {"sentences": [["sums"]]}, "response": "It is 4."},
        "question system", "response", "context", "context"),
    "APPS": (
        TEXTS, ASKED | {"starter_code": "def f():", "response": "It is 4."},
        "question system", "response", "starter_code", "starter_code"),
    "IFEval": (
        TEXTS, ASKED | {"instruction_id_list": ["a:b"], "response": "It is 4."},
        "question system", "response", "instruction_id_list", ""),
    "options in the question": (
        TEXTS, ASKED | {"options": ["2", "+"], "response": "It is 4."},
        "question system", "response", "options", ""),
    "LIMO": (
        ("sft",), ASKED | {"solution": "We add 2, so it is 4.", "response": "It is 4."},
        "question system", "response", "solution", "solution"),
    "OpenR1-Math": (
        RL, MATHS | {"system": SYSTEM, "messages": TALK},
        "messages system", "", "problem solution", "messages problem"),
    "NuminaMath-CoT": (
        ("sft",), MATHS | {"system": SYSTEM, "messages": TALK},
        "messages system", "messages", "problem solution answer", ""),
    "another problem": (
        ("sft",), {"system": SYSTEM, "messages": TALK, "problem": "3+3?"},
        "messages system", "messages", "problem", "problem"),
    "orca_dpo_pairs": (
        PAIRS, {"system": SYSTEM, "question": "2+2?"} | PAIR,
        "question system", "chosen rejected", "", ""),
    "distilabel": (
        PAIRS, {"system": SYSTEM, "input": "2+2?", "rating": "[9, 5]"} | PAIR,
        "input system", "chosen rejected", "rating", ""),
    "UltraFeedback": (
        PAIRS, {"prompt": "2+2?", "system": SYSTEM, "messages": TALK} | PREFERRED,
        "system", "chosen rejected", "prompt messages", "messages"),
}  # fmt: skip


OTHER_FORMS = {
    "xlam": (
        "sft", {"query": "2+2?", "answers": XLAM, "tools": CLOCK, "id": 3},
        "answers query tools", "answers query", "id"),
    "HelpSteer 3": (
        "dpo", RANKED | {"domain": "general"},
        "context", "overall_preference response1 response2", "domain"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_columns_of_other_forms_are_those_of_the_file(name):
    algorithm, row, *expected = OTHER_FORMS[name]
    use = column_use(Config(algorithm=algorithm, tasks_per_step=1), source_of([row]), None)
    named = name_columns(use)
    columns = (sorted(named.prompt), sorted(named.label), named.unread)
    assert columns == tuple(map(str.split, expected))


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("column", ["image", "messages"])
def test_images_of_a_row_belong_to_its_prompt(algorithm, column, env):
    red = Image.new("RGB", (8, 8), "red")
    row: dict = {"prompt": "2+2?", "image": red, "response": "It is 4."}
    if column == "messages":
        content = [{"type": "image", "image": red}, {"type": "text", "text": "2+2?"}]
        row = {"messages": [{"role": "user", "content": content}, TALK[1]]}
    config = Config(algorithm=algorithm, tasks_per_step=1)
    use = column_use(config, source_of([row]), env if algorithm == "grpo" else None)
    named = name_columns(use)
    assert named.prompt == [name for name in row if name != "response"]
    replies = ["messages"] if column == "messages" else ["response"]
    assert named.label == (replies if algorithm == "sft" else [])


@pytest.mark.parametrize(
    "columns, remark",
    [
        ({"shot": Image.new("RGB", (8, 8))}, "column 'shot' holds an image that nothing reads"),
        ({"shot": {"bytes": None, "path": "a/b.png"}}, "column 'shot' holds an image"),
        ({"shot": [{"bytes": "x", "path": "b.png"}]}, "column 'shot' holds an image"),
        ({"image_path": "a/b.PNG"}, "--data.columns image=image_path puts it into the prompt"),
        ({"img": ["b.jpg", "c.jpg"]}, "column 'img' holds an image"),
        ({"about": "It looks like b.jpg"}, ""),
        ({"image_path": "b.png", "image": Image.new("RGB", (8, 8))}, ""),
        ({"image_2": Image.new("RGB", (8, 8)), "image": Image.new("RGB", (8, 8))},
         "column 'image_2' holds an image"),
        ({"rejected_images": [Image.new("RGB", (8, 8))]}, "column 'rejected_images' holds an image"),
        ({"answer": Image.new("RGB", (8, 8))}, ""),
        ({"prompt": "<image>2+2?"}, "has the mark <image>, which is read as text"),
        ({"prompt": "<image>2+2?", "image": Image.new("RGB", (8, 8))}, ""),
    ],
)  # fmt: skip
def test_images_that_no_prompt_has_are_remarked(columns, remark, env):
    config = Config(algorithm="grpo", tasks_per_step=1)
    rows = [{"prompt": "2+2?"} | columns] * 3
    [*remarks] = column_use(config, source_of(rows), env, plain_chat()).remarks
    assert [remark in line for line in remarks] == [True] * bool(remark), remarks


FOUR, FIVE = TALK, PREFERRED["rejected"]
REPLIES = {"response_0": "It is 4.", "response_1": "It is 5."}
SHP = {"history": "2+2?", "human_ref_A": "It is 4.", "human_ref_B": "It is 5.", "score_A": 9}
ARENA = {"model_a": "x", "model_b": "y", "conversation_a": FOUR, "conversation_b": FIVE}
ARENA_55K = {"prompt": '["2+2?"]', "response_a": '["It is 4."]', "response_b": '["It is 5."]'}
WEBGPT = {"question": {"full_text": "2+2?"}, "answer_0": "It is 4.", "answer_1": "It is 5."}
# Pairs without `chosen`, and the sum that is preferred; "" for a tie.
LABELLED = [
    ({"prompt": "2+2?", "better_response_id": 0, "safer_response_id": 1} | REPLIES, "4"),
    ({"prompt": "2+2?", "better_response_id": 1, "safer_response_id": 0} | REPLIES, "5"),
    (SHP | {"labels": 1}, "4"),
    (SHP | {"labels": 0}, "5"),
    (ARENA | {"winner": "model_a"}, "4"),
    (ARENA | {"winner": "model_b"}, "5"),
    (ARENA | {"winner": "tie (bothbad)"}, ""),
    (ARENA | {"winner": "both_bad"}, ""),
    (ARENA_55K | {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}, "4"),
    (ARENA_55K | {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}, "5"),
    (ARENA_55K | {"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1}, ""),
    (WEBGPT | {"score_0": 0.5, "score_1": -0.5}, "4"),
    (WEBGPT | {"score_0": -1.0, "score_1": 1.0}, "5"),
    (WEBGPT | {"score_0": 0.0, "score_1": 0.0}, ""),
]


@pytest.mark.parametrize("row, better", LABELLED)
def test_a_pair_has_the_sides_that_its_label_says(row, better):
    if not better:
        with pytest.raises(LeftOutError, match="a tie"):
            pair_messages(read_row(row))
        return
    asked = {"role": "user", "content": "2+2?"}
    replies = [
        {"role": "assistant", "content": f"It is {number}."}
        for number in (better, {"4": "5", "5": "4"}[better])
    ]
    assert pair_messages(read_row(row)) == [([asked], [reply]) for reply in replies]


@pytest.mark.parametrize(
    "row, error",
    [
        (
            ARENA | {"winner": "model_c"},
            "winner must be one of model_a, model_b, tie, .* 'model_c'",
        ),
        (
            {"prompt": "a", "a": "b", "c": "d", "preference": "a"},
            "'preference' may say which reply",
        ),
        ({"info": {}, "summaries": [], "choice": 1}, "'choice' may say which reply is better"),
    ],
)
def test_a_label_of_a_pair_that_is_not_read_is_refused(row, error):
    with pytest.raises(ValueError, match=error):
        pair_messages(read_row(row))


@pytest.fixture
def env(tmp_path):
    (tmp_path / "env.py").write_text("def reward_fn(completion, answer=None): return 1.0")
    return load_env(str(tmp_path / "env.py"))


def source_of(rows, env="env", files=(), is_pairs=False):
    fields = {"env": env, "split": "train", "seed": 0, "shuffle": False}
    return TaskSource(rows, **fields, files=files, is_pairs=is_pairs)


def warnings_of(config, env, *sources, chats=None):
    train, *held_out = sources
    evals = dict(enumerate(held_out))
    envs = {"env": env} if config.is_rl else {}
    return list(data_warnings(config, train, evals, envs=envs, chats=chats))


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("of_file", [True, False])
def test_tools_that_the_template_does_not_render_are_warned_of_once(algorithm, of_file, tmp_path):
    tools = json.loads(CLOCK)
    code = f"tools = {tools}\n" if of_file else ""
    (tmp_path / "env.py").write_text(f"{code}def reward_fn(completion): return 1.0")
    config = Config(algorithm=algorithm, tasks_per_step=1, actors={"policy": ActorConfig()})
    env = load_env(str(tmp_path / "env.py"))
    row = {"messages": TALK} if of_file else {"messages": TALK, "tools": CLOCK}
    is_read = algorithm == "sft" and of_file  # SFT reads tools of rows alone.
    for template, text, num in (
        (PLAIN_TEMPLATE, "2+2?", 0),
        (WITHOUT_TOOLS, "2+2?", 0 if is_read else 1),
        (WITHOUT_TOOLS, "Call clock(). 2+2?", 0),
    ):
        chat = Chat(plain_chat().tokenizer, template)
        asked = row | {"messages": [{"role": "user", "content": text}, TALK[1]]}
        source = source_of([asked, dict(asked)])
        lines = warnings_of(config, env, source, source, chats={"policy": chat})
        warned = [line for line in lines if "renders no tools" in line]
        assert len(warned) == num
        assert all("row 1" in line and "'clock'" in line for line in warned)


CASES = [(name, algorithm) for name, row in PUBLISHED.items() for algorithm in row[0]]


@pytest.mark.parametrize("name, algorithm", CASES)
def test_rows_as_published_keep_their_instructions(name, algorithm, env):
    _, row, prompt, label, unread, warned = PUBLISHED[name]
    config = Config(algorithm=algorithm, tasks_per_step=1)
    messages, is_rl = read_messages(config, row, []), algorithm == "grpo"
    asked = "2\n\n+2?" if name == "alpaca" else "2+2?"
    texts = [message["content"] for message in messages]
    assert texts[:2] == [SYSTEM, asked]
    assert [text for text in texts[2:] if text and "is" in text] == (
        [] if is_rl else ["It is 4.", "It is 5."][: 2 if algorithm in PAIRS else 1]
    )
    source = source_of([row, dict(row)])
    use = column_use(config, source, env if is_rl else None)
    if is_rl:
        replies = [column for column in label.split() if column not in prompt.split()]
        label = "answer" if "answer" in row else ""
        unread = " ".join(column for column in row if column in replies + unread.split())
    named = name_columns(use)
    assert (named.prompt, named.label, named.unread) == tuple(
        map(str.split, (prompt, label, unread))
    )
    lines = [line for line in warnings_of(config, env, source, source) if "column " in line]
    if is_rl and "conversations" in row:
        warned = "conversations"
    assert len(lines) == len(warned.split())
    for line, column in zip(lines, warned.split(), strict=True):
        assert f"column {column!r}" in line and "2 of the first 2 rows of env" in line


def test_replies_at_the_end_are_kept_by_the_name_of_a_prompt():
    for column, talk in (("messages", TALK), ("conversations", SHARED)):
        (row,) = RenamedColumns([{column: talk}], {"prompt": column})
        for ended in ({column: talk}, {column: [*talk, talk[-1]]}):
            assert make_task(ended, 0, "e", "train").messages == TALK[:1]
        assert make_task(row, 0, "e", "train").messages == TALK


def test_system_prompts_of_a_file_that_replace_a_column_are_said(env, tmp_path):
    code = 'system_prompts = {"policy": "a"}\ndef reward_fn(completion): return 1.0'
    (tmp_path / "prompts.py").write_text(code)
    source = source_of([{"system": "b", "prompt": "c"}])
    lines = warnings_of(Config(tasks_per_step=1), load_env(str(tmp_path / "prompts.py")), source)
    (line,) = lines
    assert "replace the rows' column 'system': the actors policy do not read it" in line


@pytest.mark.parametrize(
    "algorithm, column", [*((name, "output") for name in TEXTS), ("grpo", "answer")]
)
def test_a_prompt_that_ends_with_its_reply_is_said(algorithm, column, env):
    reply = "The sum of 2 and 2 is 4."
    row = {column: reply}
    if column == "output":
        row |= {"instruction": "2+2?", "input": ""}
    config = Config(algorithm=algorithm, tasks_per_step=1)
    for prompt, num in ((f"Add. 2+2? {reply}\n", 1), (f"Say: {reply} 2+2?", 0)):
        lines = warnings_of(config, env, source_of([row | {"prompt": prompt}]))
        warned = [line for line in lines if f"ends with the text of {column!r}" in line]
        assert len(warned) == num
        if "instruction" in row:
            assert all("--data.columns instruction=instruction" in line for line in warned)


@pytest.mark.parametrize(
    "columns, fixes",
    [
        (["persona"], ["--data.columns system=persona reads it"]),
        (["persona", "hint"], 2 * ["write 'persona' and 'hint' into one column, for"]),
        (["persona", "options"], ["system=persona reads it", "texts into column 'question'"]),
        (["functions", "query"], ["tools=functions reads it", "prompt=query reads it"]),
        (["video"], ["leave out rows that need it"]),
        (["persona_id"], []),
    ],
)
def test_the_advice_about_unread_columns_is_by_what_they_hold(columns, fixes, env):
    row = {"question": "2+2?", "answer": "4"} | dict.fromkeys(columns, "It is said elsewhere.")
    lines = warnings_of(Config(tasks_per_step=1), env, source_of([row, dict(row)]))
    lines = [line for line in lines if "is not read" in line]
    assert len(lines) == len(fixes)
    for line, fix in zip(lines, fixes, strict=True):
        assert fix in line


REMARKED = {
    "kto": ("sft", ASKED | {"completion": "It is 5.", "label": False}, "column 'label' is false"),
    "kto, text": ("sft", ASKED | {"response": "5", "label": "False"}, "row['label'] != 'False'"),
    "two texts": ("sft", ASKED | {"response": "5", "label": "incorrect"}, "'label' is 'incorrect'"),
    "wrong": ("sft", ASKED | {"response": "5", "is_correct": "Wrong"}, "!= 'Wrong'"),
    "a class": ("sft", ASKED | {"response": "5", "label": "no"}, ""),
    "is_correct": ("sft", ASKED | {"response": "5", "is_correct": False}, "column 'is_correct' is"),
    "resolved": ("sft", {"messages": TALK, "resolved": 0}, "filter(lambda row: row['resolved'])"),
    "target": ("sft", {"messages": TALK, "target": False}, "column 'target' is false"),
    "target, a number": ("sft", {"messages": TALK, "target": 0}, ""),
    "weight": ("sft", ASKED | {"response": "5", "weight": 0.0}, "column 'weight' is false"),
    "is_safe": ("sft", ASKED | {"response": "5", "is_safe": False}, "column 'is_safe' is false"),
    "score": ("sft", {"messages": TALK, "score": 0.0}, "column 'score' is false or 0"),
    "resolved, RL": ("grpo", ASKED | {"resolved": False}, ""),
    "kto, good": ("sft", ASKED | {"completion": "It is 4.", "label": True}, ""),
    "kto, trained": ("kto", ASKED | {"completion": "It is 5.", "kto_tag": False}, ""),
    "kto, prompts": ("grpo", ASKED | {"label": False}, ""),
    "scores": ("dpo", PREFERRED | {"score_chosen": 2, "score_rejected": 8.5}, "'score_chosen' is"),
    "ratings": ("rm", PREFERRED | {"chosen_rating": 2, "rejected_rating": 3}, "'chosen_rating' is"),
    "scores, other": ("rm", PREFERRED | {"chosen_score": 2, "rejected_score": 3}, "'chosen_score'"),
    "scores, a hyphen": (
        "dpo", PREFERRED | {"chosen-rating": 2.0, "rejected-rating": 4.0}, "'chosen-rating' is"),
    "equal scores": ("dpo", PREFERRED | {"chosen_score": 3, "rejected_score": 3}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REMARKED)
def test_rows_that_mark_a_trained_reply_as_bad_are_counted(name, env):
    algorithm, row, remark = REMARKED[name]
    config = Config(algorithm=algorithm, tasks_per_step=1)
    marks = ("label", "chosen_rating", "is_correct", "resolved", "target", "weight")
    marks += ("chosen-rating", "is_safe", "score")
    good = {key: value for key, value in row.items() if key not in marks}
    good |= {key: 9 for key in ("score_chosen", "chosen_score") if key in row}
    source = source_of([good, row, row], is_pairs=algorithm in PAIRS)
    lines = warnings_of(config, env, source)
    rows = "2 of the first 3 rows of env, such as row 2 of the split 'train': "
    assert [
        line for line in lines if "such as row" in line and remark in line and rows in line
    ] == ([line for line in lines if "such as row" in line])
    assert sum("such as row" in line for line in lines) == bool(remark)


@pytest.mark.parametrize(
    "labels, kind", [([1, 0, 1], ""), ([True, True], "good"), ([0.0, False], "bad")]
)
def test_labels_of_one_kind_are_warned_of(labels, kind, env):
    source = source_of([ASKED | {"completion": "4", "label": label} for label in labels])
    lines = warnings_of(Config(algorithm="kto", tasks_per_step=2), env, source)
    warned = [line for line in lines if "KTO compares" in line]
    assert [f"are labelled {kind}:" in line for line in warned] == [True] * bool(kind)


CALL = {"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {}}]}
TEXT_CALL = {"role": "assistant", "content": '<tool_call>{"name": "clock"}</tool_call>'}
CALLED = {"messages": [TALK[0], CALL]}
UNKNOWN = "replies call a tool that neither column 'tools' nor a message names"


@pytest.mark.parametrize(
    "algorithm, row, warning",
    [
        ("sft", CALLED, f"{UNKNOWN}; give the rows a column 'tools'"),
        ("sft", {"messages": [TALK[0], TEXT_CALL]}, UNKNOWN),
        ("sft", CALLED | {"metadata": {"tools": CLOCK}}, "--data.columns tools=metadata.tools"),
        ("sft", CALLED | {"extra": json.dumps({"functions": [1]})}, "tools=extra.functions reads"),
        ("sft", {"messages": [{"role": "system", "content": "a", "tools": CLOCK}, *CALLED["messages"]]},
         "tools=messages.0.tools reads them"),
        ("dpo", PREFERRED | {"chosen": [TALK[0], CALL]}, UNKNOWN),
        ("sft", CALLED | {"tools": CLOCK}, ""),
        ("sft", {"messages": [{"role": "system", "content": "clock()"}, *CALLED["messages"]]}, ""),
        ("grpo", CALLED, ""),
    ],
)  # fmt: skip
def test_calls_of_tools_that_no_prompt_names_are_said(algorithm, row, warning, env):
    config = Config(algorithm=algorithm, tasks_per_step=1)
    lines = warnings_of(config, env, source_of([row] * 2, is_pairs=algorithm == "dpo"))
    lines = [line for line in lines if "left out of the prompt" not in line]
    assert [warning in line for line in lines] == [True] * bool(warning), lines


LONG = "Add the numbers. " * 20
SCORED = {"role": "assistant", "content": "It is 4.", "quality": 3, "name": "ann"}


@pytest.mark.parametrize(
    "algorithm, row, named",
    [
        ("sft", {"messages": TALK, "anything": LONG}, "in 'anything' of"),
        ("dpo", PREFERRED | {"full_chosen": LONG, "steps": ["a"]}, "in 'full_chosen', 'steps' of"),
        ("grpo", {"prompt": "2+2?", "answer": [LONG], "tests": [[1, 2]]}, "in 'tests' of"),
        ("grpo", {"prompt": "2+2?", "solution": {"code": LONG}}, "in 'solution' of"),
        (
            "sft",
            {"messages": TALK, "note": LONG[:150], "tags": [], "id": 3, "meta": {"a": "b"}},
            "",
        ),
        ("sft", {"messages": TALK, "problem": "2+2?", "turns": ["2+2?", "It is 4."]}, ""),
        ("sft", {"messages": TALK, "text": f"{LONG}### 2+2?\n\n### It is 4."}, ""),
        ("sft", {"messages": [TALK[0], SCORED]}, "the keys 'quality' of assistants' messages"),
        ("grpo", {"prompt": [TALK[0], SCORED, TALK[0]]}, ""),
    ],
)
def test_what_nothing_reads_is_named_once_whatever_its_name(algorithm, row, named, env):
    config = Config(algorithm=algorithm, tasks_per_step=1)
    source = source_of([row] * 2, is_pairs=algorithm == "dpo")
    lines = warnings_of(config, env, source, source)
    lines = [line for line in lines if "held-out" not in line]
    assert [named in line for line in lines] == [True] * bool(named), lines


@pytest.mark.parametrize(
    "algorithm, prompts, is_said",
    [
        ("sft", ["-"] * 10, True),
        ("dpo", ["import re"] * 12 + ["2+2?"] * 11, True),
        ("sft", ["-"] * 10 + ["2+2?"] * 10, False),
        ("sft", ["-"] * 9, False),
        ("sft", [[{"role": "system", "content": f"Add {n}."}, TALK[0]] for n in range(10)], False),
        ("grpo", ["Play."] * 20, False),
    ],
)
def test_rows_with_one_prompt_are_said(algorithm, prompts, is_said, env):
    config = Config(algorithm=algorithm, tasks_per_step=1)
    source = source_of([{"prompt": prompt, "response": "b"} | PAIR for prompt in prompts])
    lines = [line for line in warnings_of(config, env, source) if "have the same prompt" in line]
    wanted = f"of the first {len(prompts)} rows of env have the same prompt, {prompts[0]!r}; "
    assert [wanted in line for line in lines] == [True] * is_said, lines


@pytest.mark.parametrize("parameter", ["task", "**columns"])
def test_columns_of_a_hook_that_gets_all_of_a_row_are_not_named(parameter, tmp_path):
    (tmp_path / "env.py").write_text(f"def reward_fn(completion, {parameter}): return 1.0")
    source = source_of([{"prompt": "2+2?", "anything": LONG}])
    assert not warnings_of(Config(tasks_per_step=1), load_env(str(tmp_path / "env.py")), source)


@pytest.mark.parametrize(
    "algorithm, row, fix",
    [
        ("grpo", ASKED | {"options": ["4"]}, "write its texts into column 'question'"),
        ("grpo", ASKED | {"passage": "4"}, "add its text to column 'system'"),
        ("grpo", {"question": "2", "passage": "4"}, "--data.columns system=passage reads it"),
        ("sft", MATHS | {"functions": "f"}, "--data.columns tools=functions reads it"),
        ("grpo", {"prompt": "import re", "query": "2+2?"}, "--data.columns prompt=query reads it"),
        (
            "sft",
            {"prompt": "a", "completion": "b", "problem_statement": "c"},
            "prompt=problem_stat",
        ),
        (
            "dpo",
            PAIR | {"prompt": "2?", "initial_reason_steps": "We"},
            "system=initial_reason_step",
        ),
        ("grpo", ASKED | {"hint": "Add."}, "add its text to column 'system'"),
        ("grpo", ASKED | {"table": [["a", "b"]]}, "write its texts into column 'question'"),
        ("sft", ASKED | {"premise": "It rains.", "response": "It is 4."}, "column 'premise'"),
        ("grpo", ASKED | {"A": "three"}, "write its texts into column 'question'"),
        ("grpo", ASKED | {"Incorrect Answer 1": "9"}, "write its texts into column 'question'"),
        ("grpo", ASKED | {"option1": "9"}, "write its texts into column 'question'"),
        ("grpo", ASKED | {"videos": ["a.mp4"]}, "models are trained on text and images"),
        ("grpo", ASKED | {"audios": {"array": [0]}}, "models are trained on text and images"),
        ("dpo", PREFERRED | {"prompt": "3?"}, "it is read where chosen and rejected are replies"),
    ],
)
def test_a_warning_of_a_lost_column_says_the_fix(algorithm, row, fix, env):
    config = Config(algorithm=algorithm, tasks_per_step=1)
    lines = [line for line in warnings_of(config, env, source_of([row])) if "column " in line]
    assert [fix in line for line in lines] == [True]


NESTED = {
    "reward_model": {"style": "rule", "ground_truth": "4", "tests": [["a"], ["b"]]},
    "extra_info": json.dumps({"answers": [{"text": "5"}], "a.b": "6"}),
    "meta.key": "7",
    "meta": {"key": "8", "other.key": {"deep": "9"}},
}


@pytest.mark.parametrize(
    "path, value",
    [
        ("reward_model.ground_truth", "4"),
        ("reward_model.tests.1.0", "b"),
        ("extra_info.answers.0.text", "5"),  # The column is a JSON text.
        ("extra_info.a.b", "6"),
        ("meta.key", "7"),  # The name of a column comes before a path.
        ("meta.other.key.deep", "9"),
    ],
)
def test_a_path_names_a_nested_column(path, value):
    check_columns_exist([{"x": 1}, NESTED], {"answer": path}, "x.jsonl")
    rows = RenamedColumns([NESTED, {"x": 1}], {"answer": path})
    assert rows[0] == NESTED | {"answer": value}
    assert rows[1] == {"x": 1}


@pytest.mark.parametrize(
    "path, hint",
    [
        ("reward_model.ground_truht", "did you mean 'reward_model.ground_truth'?"),
        ("extra_info.answer", "did you mean 'extra_info.answers'?"),
        ("reward_model.tests.2", "did you mean 'reward_model.tests'?"),
        ("reward_model.tests.-1", "did you mean 'reward_model.tests'?"),
    ],
)
def test_a_path_to_nothing_is_refused_with_the_nearest(path, hint):
    with pytest.raises(ValueError) as error:
        check_columns_exist([NESTED], {"answer": path}, "x.jsonl")
    assert str(error.value).startswith(f"--data.columns answer={path}: x.jsonl has no column")
    assert str(error.value).endswith(hint)


def test_a_nested_column_is_named_with_its_path(env):
    columns = {"answer": "reward_model.ground_truth"}
    config = Config(algorithm="grpo", tasks_per_step=1)
    config.data.columns = columns
    use = column_use(config, source_of(RenamedColumns([VERL], columns), files=[("x", 1)]), env)
    named = name_columns(use)
    assert (named.prompt, named.label) == (["prompt"], ["answer=reward_model.ground_truth"])
    assert named.unread == ["ability"]


def test_rows_of_load_tasks_are_renamed_as_those_of_a_file_are(tmp_path):
    code = "def reward_fn(completion): return 1.0\n"
    code += "def load_tasks(split): return [{'asked': '2+2?'}]"
    (tmp_path / "env.py").write_text(code)
    config = Config(tasks_per_step=1)
    config.data.columns = {"prompt": "asked"}
    [task] = train_tasks(config, {"env": load_env(str(tmp_path / "env.py"))}).sources[0]
    assert task.messages == TALK[:1]
    config.data.columns = {"prompt": "ask"}
    with pytest.raises(
        ValueError, match="the split 'train' has no column 'ask'; did you mean 'asked'"
    ):
        train_tasks(config, {"env": load_env(str(tmp_path / "env.py"))})


def test_a_renamed_input_hides_no_instruction():
    columns = {"input": "context"}
    (row,) = RenamedColumns([{"instruction": "a", "context": "b"}], columns)
    assert make_task(row, 0, "e", "train").messages == [{"role": "user", "content": "a\n\nb"}]
