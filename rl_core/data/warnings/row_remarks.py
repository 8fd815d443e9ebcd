"""Remarks on single rows: values that are trained or left out in a way that may not be meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_core.config import Config
from rl_core.data.messages import TRAIN_KEYS, is_filled, text_of
from rl_core.data.rows import is_trajectory
from rl_core.data.task_rows import CONVERSATIONS, PROMPT_COLUMNS, row_tools, row_variables
from rl_core.data.warnings.read_row import ReadRow
from rl_core.types import Message, Row

REPLIES = ("response", "completion", "output", "solution", "answer")
REASONS = re.compile("^solution$|reason|think|thought|rationale|explanation|(^|_)cot($|_)", re.I)
MIN_REPLY_CHARS = 20  # A shorter text may be at the end of a prompt by chance.
# Columns that say whether a reply is good.
GOOD = re.compile(
    "^((is|was)_)?(correct|resolved|solved|passed|success|successful|verified|accepted|safe)$|"
    "^(label|target|reward|score)$|_(is_)?correct$|_passed$",
    re.I,
)
# Texts of these columns that mark a bad reply. Others, such as "no" or "bad", may be an answer.
FALSE = re.compile(r"\s*(false|incorrect|wrong|failed|failure|unsafe|undesirable)\s*", re.I)
TOOLS = re.compile(r"(^|\.)(tools|functions)$")
TEXT_CALL = re.compile(r'<tool_call>\s*\{\s*"name":\s*"([^"]+)"')
SCORE = re.compile("score|rating|reward", re.I)
# Columns about others, such as context_id.
ABOUT = re.compile("_(ids?|id_list|type|source|num|len|length)$", re.I)


def reply_remarks(
    config: Config, row: ReadRow, messages: list[Message], used: set[str]
) -> Iterator[str]:
    """Remarks on replies that a prompt ends with, or whose thoughts are not read."""
    prompt = next((name for name in PROMPT_COLUMNS if name in row.read), "")
    if prompt in ("", *CONVERSATIONS):
        return
    asked = [text_of(message).rstrip() for message in messages if message["role"] == "user"]
    others = [name for name in PROMPT_COLUMNS if name not in ("input", prompt) and row.get(name)]
    conversation = "\n".join(map(text_of, messages))
    can_be_reason = config.algorithm == "sft" and "reasoning_content" not in messages[-1]
    for name, value in dict.items(row):
        text = value.strip() if isinstance(value, str) else ""
        if name in REPLIES and len(text) >= MIN_REPLY_CHARS and asked and asked[-1].endswith(text):
            fix = f"{others[0]}={others[0]}" if others else "prompt=NAME"
            yield (
                f"column {prompt!r} ends with the text of {name!r}, so that prompts give it away; "
                f"--data.columns {fix} reads another prompt"
            )
        is_reason = REASONS.search(name) and not ABOUT.search(name) and name not in used
        is_longer = len(text) > len(text_of(messages[-1])) and text not in conversation
        if can_be_reason and is_reason and is_longer:
            yield (
                f"column {name!r} is longer than the reply and not read; --data.columns "
                f"response={name} or reasoning_content={name} trains it"
            )


def label_remarks(config: Config, row: ReadRow) -> Iterator[str]:
    """Remarks on columns that mark a reply as bad."""
    # Rewards of episodes are chosen by --data.min_reward.
    is_trained = config.algorithm == "sft" and not is_trajectory(row)
    names = [name for name in row if GOOD.search(name) or name in TRAIN_KEYS]
    for name in names if is_trained else ():
        value = dict.get(row, name)
        is_number = isinstance(value, (int, float)) and name not in ("label", "target")
        is_text = isinstance(value, str)
        if value is False or (is_text and FALSE.fullmatch(value)) or (is_number and value == 0):
            kept = f"row[{name!r}] != {value!r}" if is_text else f"row[{name!r}]"
            shown = repr(value) if is_text else "false or 0"
            yield (
                f"column {name!r} is {shown}, which marks a bad reply, and SFT trains it; write "
                f"a file without such rows: load_dataset(...).filter(lambda row: {kept})"
                ".to_json(...)"
            )
    scores = [name for name in row if "chosen" in name and SCORE.search(name)]
    for name in scores if not config.is_rl else ():
        names = name, name.replace("chosen", "rejected")
        chosen, rejected = (dict.get(row, each) for each in names)
        if not isinstance(chosen, (int, float)) or not isinstance(rejected, (int, float)):
            continue
        if chosen < rejected:
            yield (
                f"column {names[0]!r} is below {names[1]!r}: the worse reply is preferred; leave "
                "these rows out, or if all are so, --data.columns "
                "chosen=rejected,rejected=chosen"
            )


def tool_remarks(row: ReadRow, messages: list[Message]) -> Iterator[str]:
    """A remark on replies that call a tool of which no prompt says anything."""
    called, texts = set(), [str(row_variables(row))]
    known = {tool["function"]["name"] for tool in row_tools(row) or ()}
    for message in messages:
        if message["role"] != "assistant":
            texts.append(text_of(message))
            continue
        called.update(call["function"]["name"] for call in message.get("tool_calls") or ())
        called.update(TEXT_CALL.findall(text_of(message)))
    prompts = "\n".join(texts)
    if not any(name not in known and name not in prompts for name in called):
        return
    fix = "give the rows a column 'tools'"
    if path := tools_path(row):
        fix = f"--data.columns tools={path} reads them"
    yield f"replies call a tool that neither column 'tools' nor a message names; {fix}"


def tools_path(row: Row) -> str | None:
    """The path to a nested value with the name of tools."""
    from rl_core.data.column_names import MISSING, nested_names, nested_value

    paths = [path for path in nested_names(dict(row)) if path != "tools" and TOOLS.search(path)]
    paths += [f"{column}.0.tools" for column in CONVERSATIONS]
    values = {path: nested_value(dict(row), path) for path in paths}
    return next(
        (path for path, value in values.items() if is_filled(value) and value is not MISSING), None
    )
