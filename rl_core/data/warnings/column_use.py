"""Finds the use of columns in the first rows of a data set, and remarks on these rows."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import cast

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.image_parts import has_image
from rl_core.data.messages import MESSAGE_KEYS, is_filled, text_of
from rl_core.data.task_rows import (
    CONVERSATIONS,
    LEFT_OUT,
    TaskSource,
    in_form,
    prompt_messages,
    row_tools,
    row_variables,
    with_loaded_images,
)
from rl_core.data.warnings.read_row import ColumnUse, ReadRow
from rl_core.data.warnings.template_marks import mark_remarks, template_marks
from rl_core.sampling.env import Env
from rl_core.types import Message, Row

NUM_ROWS = 200  # The first rows of each data set are checked.


def read_messages(config: Config, row: Row, notes: list[str]) -> list[Message]:
    """The messages of a row of read_row(), read as training reads them. `notes` collects a line for
    each value that is mapped to another form. Raises ValueError for a row that is refused or left
    out."""
    row_tools(row, notes)
    row_variables(row)
    if config.is_rl:
        return prompt_messages(row, notes)
    if config.algorithm == "sft":
        from rl_core.data.sft_samples import sft_messages

        return sft_messages(row, notes)
    from rl_core.data.preference_pairs import labelled_messages, pair_messages

    if config.algorithm == "kto":
        return labelled_messages(row, notes)
    (context, chosen), (_, rejected) = pair_messages(row, notes)
    return [*context, *chosen, *rejected]


def column_use(
    config: Config, source: TaskSource, env: Env | None, chat: Chat | None = None
) -> ColumnUse:
    """The use of the columns of the first rows. `chat`: the chat that renders the rows."""
    of_hooks, asked = hook_columns(env) if env else set(), Counter()
    use = ColumnUse(config=config, source=source, env=env, of_hooks=of_hooks)
    marks = template_marks(chat) if chat else None
    sees = chat is not None and not isinstance(chat.vision, str)
    for index in islice(source.kept, NUM_ROWS):
        original, notes = with_loaded_images(source.rows[index], source.folder_of(index)), []
        row = cast(ReadRow, in_form(ReadRow(original), notes))
        row = row if row.made else ReadRow(original)
        messages = read_messages(config, row, notes)
        use.filled |= {name: None for name, value in original.items() if is_filled(value)}
        use.read |= row.read
        if "messages" in row.made and "chosen" not in row.made:
            use.of_messages |= row.read.keys()
        use.num_rows += 1
        use.has_tools |= bool(dict.get(row, "tools"))
        roles, remarks = [m["role"] for m in messages], []
        if config.is_rl and (roles[-1] == "assistant" or "user" not in roles):
            remarks.append("the prompt ends with an assistant's turn, or has no user message")
        for column in CONVERSATIONS:
            if (note := LEFT_OUT.format(column)) in notes:
                remarks.append(f"{note}; --data.columns prompt={column} keeps them")
        remarks += mark_remarks(chat, marks, messages)
        used = row.read.keys() | row.made | of_hooks
        is_all_used = row.keys() <= used and not row.read.keys().isdisjoint(CONVERSATIONS)
        if not config.is_rl or sees or not is_all_used:
            remarks += more_remarks(use, row, messages, remarks, sees)
        if not config.is_rl:
            use.keys.update(unread_keys(chat, messages))
            if not any(map(has_image, messages)):
                asked[tuple(text_of(m) for m in messages if m["role"] != "assistant")] += 1
        for remark in remarks:
            use.remarks.setdefault(remark, []).append(index)
    [(texts, use.equal)] = asked.most_common(1) or [((), 0)]
    use.equal_prompt = "\n".join(texts)
    return use


def more_remarks(
    use: ColumnUse, row: ReadRow, messages: list[Message], remarks: list[str], sees: bool
) -> list[str]:
    """Counts the unread columns of a row, and returns further remarks. `sees`: the model reads
    images."""
    from rl_core.data.warnings.row_remarks import label_remarks, reply_remarks, tool_remarks
    from rl_core.data.warnings.unread_columns import (
        image_remarks,
        long_columns,
        lost_columns,
        renamed_columns,
    )

    config = use.config
    used = row.read.keys() | row.made | use.of_hooks | renamed_columns(row, config.data.columns)
    lost = lost_columns(config, row, messages, used)
    use.lost.update(lost)
    use.nested.update(name for name in lost if not isinstance(dict.get(row, name), str))
    more = [*reply_remarks(config, row, messages, used), *image_remarks(sees, row, messages, used)]
    if not config.is_rl:
        more += [*label_remarks(config, row), *tool_remarks(row, messages)]
    texts = "".join([*remarks, *more])
    named = {name for name in row if f"column {name!r}" in texts}
    if not config.is_rl or (use.env and not sees_rows(use.env)):
        use.long.update(long_columns(row, messages, used.union(lost, named)))
    return more


def hook_columns(env: Env) -> set[str]:
    """Columns that hooks and system prompts of an environment name."""
    names = set().union(*(hook.named - hook.ours for hook in env.hooks.values()))
    return names.union(*(prompt.columns for prompt in env.turn_loop.system_prompts.values()))


def sees_rows(env: Env) -> bool:
    """True if a hook gets the whole row."""
    return any(hook.takes_all or "task" in hook.named for hook in env.hooks.values())


def unread_keys(chat: Chat | None, messages: list[Message]) -> set[str]:
    """Keys of assistants' messages that nothing reads."""
    words = chat.template_words if chat else ()
    keys = {key for each in messages if each["role"] == "assistant" for key in each}
    return keys.difference(MESSAGE_KEYS, words)
