"""rl-core tokens: each row as the learner gets it, with the trained text between « and » and notes
on values that were mapped, left out or refused; for RL the prompt. Then the warnings that a training
run prints about the first rows. Takes the flags of rl-core train. No model is loaded."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.algorithms import PRESETS
from rl_core.tools.parser import Parser
from rl_core.train import say_loading
from rl_core.types import InputImage

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.data.task_rows import TaskSource
    from rl_core.types import JSONObject, Task, TrainingSample

# File and code of the environment that RL uses if --env_path is absent.
NO_ENV = "prompts.py"
REWARD = "def reward_fn(**columns):\n    return 0.0\n"


def main(argv: list[str]) -> int:
    """Prints each row. Returns 1 if a row is refused. Raises ValueError for a file or a template
    that cannot be read."""
    options, flags = parse(argv)
    if options.rows < 1:
        raise ValueError(f"--rows={options.rows}: the number of rows to print must be at least 1")
    say_loading("the tokenizer")
    from rl_core.data.tasks.sources import train_tasks
    from rl_core.data.warnings.column_use import NUM_ROWS
    from rl_core.scratch import scratch_prefix

    num_refused = 0
    with tempfile.TemporaryDirectory(prefix=scratch_prefix("tokens")) as folder:
        shown = RowReports(flags, Path(folder))
        for source in train_tasks(shown.config, shown.envs).sources:
            fitting = []
            for number, index in enumerate(source.kept[: max(options.rows, NUM_ROWS)]):
                report = shown.report(source, index)
                fitting += [index] if "samples" in report else []
                if number < options.rows:
                    num_refused += "refused" in report
                    text = json.dumps(report) if options.json else as_text(shown.chats, report)
                    print(text, flush=True)
            if fitting:
                source.keep(fitting)
                for line in shown.warnings(source):
                    print(f"warning: {line}", file=sys.stderr, flush=True)
    return int(num_refused > 0)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options of this command, flags of rl-core train)."""
    parser = Parser(
        prog="rl-core tokens",
        usage="rl-core tokens --data.train FILE --model FOLDER [--algorithm sft] [flags of train]",
        description=__doc__,
    )
    parser.add_argument("--algorithm", default="sft", help="sft, dpo, kto, grpo, ... [sft]")
    parser.add_argument("--rows", type=int, default=10, help="number of rows, from the first [10]")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object a row: token ids, mask, weight"
    )
    options, flags = parser.parse_known_args(argv)
    if options.algorithm not in PRESETS or PRESETS[options.algorithm].is_rl:
        flags = ["--env_path", NO_ENV, *flags]
    return options, [*flags, "--algorithm", options.algorithm]


class RowReports:
    """Reports on rows, with the data sets, chats and limits of a run with these flags."""

    def __init__(self, flags: list[str], folder: Path):
        from rl_core.config import parse_config
        from rl_core.data.tasks.sft_dataset import SFTDataset
        from rl_core.run.display.terminal import quiet
        from rl_core.run.plan.environments import load_envs
        from rl_core.run.plan.model_checks import make_chats

        quiet()
        (folder / NO_ENV).write_text(REWARD)
        flags = [str(folder / NO_ENV) if flag == NO_ENV else flag for flag in flags]
        self.config, self.envs = load_envs(parse_config([*flags, "--out", str(folder / "run")]))
        self.chats, _ = make_chats(self.config)
        self.dataset = None
        self.spelled: tuple[str, str] | None = None
        if not self.config.is_rl:
            self.dataset = SFTDataset(self.config, self.chats[self.config.trained[0]])

    def report(self, source: TaskSource, index: int) -> JSONObject:
        """The notes on a row, with its samples or the reason why it is refused."""
        from rl_core.data.preference_pairs import LeftOutError
        from rl_core.data.rows import row_place
        from rl_core.data.task_rows import read_row
        from rl_core.data.tasks.row_lengths import is_fit
        from rl_core.data.warnings.column_use import read_messages

        where, notes = row_place(index, source.files, source.split), []
        report: JSONObject = {"row": where, "notes": notes}
        try:
            row = read_row(source.rows[index], notes, source.folder_of(index))
            read_messages(self.config, row, notes)
            task = source.task_of_row(index)
            if not is_fit(self.config, self.envs, self.chats, self.dataset, task):
                notes.append("left out: too long, or nothing in it is trained")
                return report
            return report | {"samples": self.samples(task, notes)}
        except LeftOutError as error:
            notes.append(f"left out: {error}")
            return report
        except ValueError as error:
            return report | {"refused": str(error).removeprefix(f"{where}: ")}

    def warnings(self, source: TaskSource) -> Iterator[str]:
        """The warnings of a training run about the kept rows of `source`."""
        from rl_core.data.warnings.data_warnings import row_warnings

        return row_warnings(self.config, [source], self.spelled, self.envs, self.chats)

    def samples(self, task: Task, notes: list[str]) -> list[JSONObject]:
        """The training samples of a row; for RL the first prompt of each actor with a chat."""
        algorithm = self.config.algorithm
        if self.dataset:
            if self.dataset.spelled:
                token = self.dataset.spelled[1]
                notes.append(f"a reply spells the special token {token!r}: trained as text")
                self.spelled = self.spelled or self.dataset.spelled
                self.dataset.spelled = None
            return [as_data(each, algorithm) for each in self.dataset.samples(task)]
        from rl_core.data.task_rows import row_variables

        turn_loop, samples = self.envs[task.env].turn_loop, []
        for name, chat in self.chats.items():
            chat, tools = chat.with_variables(row_variables(task.row)), turn_loop.tools_of(task)
            opening = turn_loop.opening(task, name)
            ids = chat.prompt_ids(opening, tools)
            zeros = [0] * len(ids)
            sample = {"actor": name, "ids": ids, "mask": zeros, "weight": zeros}
            samples.append(sample | described_images(chat.images_of(opening)))
        return samples


def described_images(images: Sequence[InputImage]) -> JSONObject:
    """The images of a sample by key, with their sizes; empty without images."""
    sizes = {str(-image.key): [image.width, image.height] for image in images}
    return {"images": sizes} if sizes else {}


def as_data(sample: TrainingSample, algorithm: str) -> JSONObject:
    mask = [int(trained) for trained in sample.loss_mask]
    weight = sample.advantages.tolist() if algorithm == "sft" else list(map(float, mask))
    ids = sample.token_ids.tolist()
    if algorithm == "rm":  # The last token stands for the score.
        ids, mask, weight = ids[:-1], mask[:-1], weight[:-1]
    return {"ids": ids, "mask": mask, "weight": weight} | described_images(sample.images)


def as_text(chats: dict[str, Chat], report: JSONObject) -> str:
    lines = [f"== {report['row']}", *(f"   {note}" for note in report["notes"])]
    if "refused" in report:
        lines.append(f"   refused: {report['refused']}")
    for sample in report.get("samples", ()):
        name = sample.get("actor") or next(iter(chats))
        if len(chats) > 1:
            lines.append(f"   actor {name}:")
        images = []
        for key, (width, height) in sample.get("images", {}).items():
            images.append(InputImage(key=-int(key), url="", width=width, height=height))
        lines.append(marked_text(chats[name], sample["ids"], sample["mask"], images))
    return "\n".join(lines)


def marked_text(
    chat: Chat, ids: list[int], mask: list[int], images: Sequence[InputImage] = ()
) -> str:
    """The tokens' text, with the trained text between « and »."""
    from rl_core.tools.shown_text import shown_text

    spans: list[tuple[int, list[int]]] = []
    for token, trained in zip(ids, mask, strict=True):
        if not spans or spans[-1][0] != trained:
            spans.append((trained, []))
        spans[-1][1].append(token)
    pieces = []
    for trained, tokens in spans:
        piece = shown_text(chat, tokens, images)
        pieces.append(f"«{piece}»" if trained else piece)
    return "".join(pieces)
