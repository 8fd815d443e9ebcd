"""Samples of rows for SFT and KTO, or of pairs for DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.messages import text_of
from rl_core.data.preference_pairs import (
    LeftOutError,
    labelled_reply,
    mismatched,
    reply_pair,
    scored_pair,
    trained_messages_of,
)
from rl_core.data.rows import is_trajectory
from rl_core.data.sft_samples import sft_samples
from rl_core.data.task_rows import fits
from rl_core.distributed import Ranks
from rl_core.types import Message, Row, Task, TrainingSample

CACHED_TOKENS = 4_000_000  # 100 MB
# Preset -> (chat, row, *sft.weights) -> TrainingSamples of a row of data.
SAMPLES = {"sft": sft_samples, "rm": scored_pair, "kto": labelled_reply}
SAMPLES |= dict.fromkeys(("dpo", "simpo", "orpo"), reply_pair)


def check_rows(config: Config, rows: Sequence[Row], path: str, is_train: bool) -> None:
    """Raises ValueError for rollouts outside of SFT, or for other rows with --data.min_reward."""
    if is_trajectory(rows[0]) and config.algorithm != "sft":
        raise ValueError(f"{path} holds a run's episodes, which are for --algorithm sft; name rows")
    tables = [table for table in getattr(rows, "datasets", [rows]) if len(table)]
    min_reward = config.data.min_reward
    if is_train and min_reward is not None and not all(is_trajectory(table[0]) for table in tables):
        raise ValueError(
            f"--data.min_reward={min_reward} is for a run's rollouts, and {path} holds none; drop "
            "it"
        )


class SFTDataset:
    """Tokenizes rows. Keeps the samples of the check at start-up, up to CACHED_TOKENS."""

    def __init__(self, config: Config, chat: Chat):
        self.config, self.chat = config, chat
        self.known: dict[str, list[TrainingSample]] = {}  # Samples by the task's id.
        self.left_out: dict[str, str] = {}  # Reasons by the ids of pairs that are left out.
        self.num_tokens = 0
        # The first row with a reply that spells a special token, and the token.
        self.spelled: tuple[str, str] | None = None

    def samples(self, task: Task, group_id: str = "") -> list[TrainingSample]:
        """The samples of one row or of one pair; none for a pair that is left out. Raises
        ValueError if it is too long, unless such rows are skipped."""
        samples = self.known.get(task.id)
        if samples is None:
            try:
                samples = self._tokenize(task)
            except LeftOutError as error:
                self.left_out[task.id], samples = str(error), []
            except ValueError as error:
                raise ValueError(f"{task.place}: {error}") from None
            self.num_tokens += sum(len(sample.token_ids) for sample in samples)
            if self.num_tokens <= CACHED_TOKENS:
                self.known[task.id] = samples
        return [replace(sample, group_id=group_id) for sample in samples]

    def samples_at(
        self, task_at: Callable[[int], Task], positions: Sequence[int], ranks: Ranks
    ) -> list[TrainingSample]:
        """This rank's samples of the tasks at the positions of a step. For KTO each row's sample is
        followed by one of its prompt with the reply of the row before it in the step, which for
        the first row is the last one."""
        of_step: dict[int, list[TrainingSample]] = {}  # By index.

        def samples_of(index: int) -> list[TrainingSample]:
            if index not in of_step:
                position = positions[index]
                of_step[index] = self.samples(task_at(position), f"{position:012d}")
            return of_step[index]

        samples = []
        for index in range(ranks.rank, len(positions), ranks.size):
            of_row = samples_of(index)
            samples += of_row
            if of_row and self.config.algorithm == "kto":
                # Rows that are left out have no reply. The row itself is the last one.
                before = ((index - n) % len(positions) for n in range(1, len(positions) + 1))
                [other] = next(filter(None, map(samples_of, before)))
                samples.append(mismatched(of_row[0], other, self.config.max_context_tokens))
        return samples

    def _tokenize(self, task: Task) -> list[TrainingSample]:
        config, limit = self.config, self.config.max_context_tokens
        named = f"{limit} (max_prompt_tokens + max_tokens)"
        conversations, replies = trained_messages_of(task.row, config.algorithm)
        least = max(map(self.chat.least_tokens, conversations))
        if least > limit:  # It is not encoded.
            fits("a sequence", least, limit, named, config.data.skip_long, "at least ")
            return []
        weights = config.sft.weights if config.algorithm == "sft" else ()
        samples = SAMPLES[config.algorithm](self.chat, task.row, *weights)
        longest = max([len(sample.token_ids) for sample in samples], default=0)
        if not self.spelled and (token := spelled_token(self.chat, replies)):
            self.spelled = task.place, token
        is_fit = fits("a sequence", longest, limit, named, config.data.skip_long)
        return samples if is_fit else []


def spelled_token(chat: Chat, replies: list[Message]) -> str | None:
    """The first special token that a trained reply spells as text."""
    for message in replies:
        text = text_of(message) + message.get("reasoning_content", "")
        if match := chat.special_token.search(text):
            return match[0]
    return None
