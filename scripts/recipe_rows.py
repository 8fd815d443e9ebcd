"""Writes the rows of a public data set as rl_core reads them, for recipes whose data no flag reads.

    python scripts/recipe_rows.py orz orz_math_57k_collection.json --out data/orz.jsonl
    python scripts/recipe_rows.py pairs Skywork/Skywork-Reward-Preference-80K-v0.2@train \
        --out data/skywork.jsonl --held_out data/skywork_eval.jsonl

orz    Open-Reasoner-Zero's file: an array of [{"from": "human", "value"}, {"from": "assistant",
       "ground_truth": {"value"}}]. Written: prompt (the question, and how to mark the answer) and
       answer.
pairs  chosen and rejected of any source that --data.train takes. Pairs that no preference loss can
       use are left out and counted: an empty reply, or two equal ones.

--held_out writes an even share of the rows, at most 1,000 and a tenth, to a second file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from script_tools import make_parser
from script_tools import write_rows as write_file

from rl_core.data.preference_pairs import pair_messages
from rl_core.data.row_files import load_rows
from rl_core.data.tables import load_other

Row = dict[str, Any]
MARK = "Think step by step, and write the final answer as \\boxed{answer}."
MAX_HELD_OUT = 1000


def orz_rows(source: str) -> Iterator[Row]:
    """{"prompt", "answer"} of each problem. Raises ValueError, with the row's number, for a file of
    another shape."""
    dialogs = json.loads(Path(source).read_text(encoding="utf-8"))
    for number, dialog in enumerate(dialogs, 1):
        try:
            question = dialog[0]["value"]
            answer = dialog[1]["ground_truth"]["value"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"row {number} of {source}: must be "
                '[{"from", "value"}, {"from", "ground_truth": {"value"}}]; is '
                f"{json.dumps(dialog)[:80]}"
            ) from None
        yield {"prompt": f"{question}\n\n{MARK}", "answer": answer}


def pair_rows(source: str) -> Iterator[Row]:
    """Rows whose chosen and rejected replies are neither empty nor equal."""
    rows, _ = load_rows(source, "train", load_other)
    refused = []
    for number in range(len(rows)):
        row = rows[number]
        try:
            (_, chosen), (_, rejected) = pair_messages(row)
        except ValueError as error:
            refused.append(f"row {number + 1}: {error}")
            continue
        if chosen == rejected:
            refused.append(f"row {number + 1}: equal replies")
        else:
            yield row
    print(f"left out {len(refused)} of {len(rows)} rows of {source}", *refused[:3], sep="\n  ")


KINDS = {"orz": orz_rows, "pairs": pair_rows}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    lines = list(rows)
    write_file(path, lines)
    print(f"wrote {path}: {len(lines)} rows")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("source")
    parser.add_argument("--out", type=Path, required=True, help="file of rows to write")
    parser.add_argument("--held_out", type=Path, help="file for rows that are not in --out")
    args = parser.parse_args()
    rows = list(KINDS[args.kind](args.source))
    if args.held_out:
        every = max(10, len(rows) // MAX_HELD_OUT)
        write_rows(args.held_out, rows[::every])
        rows = [row for index, row in enumerate(rows) if index % every]
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
