"""rl-core tokens: what each row trains, between « and », and what was read in other words or refused;
for RL the prompt. By the code that a run tokenizes with; no model is loaded."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.types import TrainingSample

ALGORITHMS = ("sft", "dpo", "rm", "grpo")


def main(argv: list[str]) -> int:
    """Prints each row. 1 if a row is refused. Raises ValueError for a file or a template that cannot
    be read."""
    options = parse(argv)
    from rl_core.data.chat import load_chat
    from rl_core.data.rows import load_rows, row_place
    from rl_core.plugins.tables import load_other
    from rl_core.plugins.tool_calls import ToolCalls

    chat = load_chat(options.model, options.chat_template, tool_reader=ToolCalls)
    rows, files = load_rows(options.rows_of, "train", load_other)
    num_refused = 0
    for index in range(min(len(rows), options.rows)):
        report = describe(chat, rows[index], options.algorithm)
        report = {"row": row_place(index, files, "train"), **report}
        num_refused += "refused" in report
        print(json.dumps(report) if options.json else as_text(chat, report), flush=True)
    return int(num_refused > 0)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl-core tokens", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--data.train", dest="rows_of", required=True, metavar="FILE", help="rows, as a run's"
    )
    parser.add_argument("--model", required=True, help="folder or hub name: its tokenizer")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sft", help="[sft]")
    parser.add_argument("--chat_template", metavar="FILE", help="instead of the model's")
    parser.add_argument("--rows", type=int, default=10, help="number of rows, from the first [10]")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object a row: token ids, mask, weight"
    )
    return parser.parse_args(argv)


def describe(chat: Chat, row: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """A row's notes, and its samples or why it is refused."""
    from rl_core.data.tasks import prompt_messages, row_tools, row_variables
    from rl_core.plugins.sft import sft_messages
    from rl_core.plugins.sft_dataset import SAMPLES

    notes: list[str] = []
    try:
        tools = row_tools(row, notes)
        if algorithm == "grpo":
            messages = prompt_messages(row, notes)
            ids = chat.with_variables(row_variables(row)).prompt_ids(messages, tools)
            zeros = [0] * len(ids)
            return {"notes": notes, "samples": [{"ids": ids, "mask": zeros, "weight": zeros}]}
        samples = SAMPLES[algorithm](chat, row)
        if algorithm == "sft":
            sft_messages(row, notes)
        if not samples:
            notes.append("left out: nothing in it is trained")
    except ValueError as error:
        return {"notes": notes, "refused": str(error)}
    return {"notes": notes, "samples": [as_data(sample, algorithm) for sample in samples]}


def as_data(sample: TrainingSample, algorithm: str) -> dict[str, list]:
    mask = [int(trained) for trained in sample.loss_mask]
    weight = sample.advantages.tolist() if algorithm == "sft" else list(map(float, mask))
    ids = sample.token_ids.tolist()
    if algorithm == "rm":  # The last token stands for the score.
        ids, mask, weight = ids[:-1], mask[:-1], weight[:-1]
    return {"ids": ids, "mask": mask, "weight": weight}


def as_text(chat: Chat, report: dict[str, Any]) -> str:
    lines = [f"== {report['row']}", *(f"   {note}" for note in report["notes"])]
    if "refused" in report:
        lines.append(f"   refused: {report['refused']}")
    for sample in report.get("samples", ()):
        lines.append(marked_text(chat, sample["ids"], sample["mask"]))
    return "\n".join(lines)


def marked_text(chat: Chat, ids: list[int], mask: list[int]) -> str:
    """The tokens' text, with what is trained between « and »."""
    spans: list[tuple[int, list[int]]] = []
    for token, trained in zip(ids, mask, strict=True):
        if not spans or spans[-1][0] != trained:
            spans.append((trained, []))
        spans[-1][1].append(token)
    pieces = []
    for trained, tokens in spans:
        piece = chat.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        pieces.append(f"«{piece}»" if trained else piece)
    return "".join(pieces)
