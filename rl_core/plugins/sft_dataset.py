"""Samples of rows for SFT, or of pairs for DPO and reward models. No row is tokenized twice."""

from __future__ import annotations

from dataclasses import replace

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.plugins.pairs import reply_pair, scored_pair
from rl_core.plugins.row_lengths import fits
from rl_core.plugins.sft import sft_samples
from rl_core.types import Task, TrainingSample

CACHED_TOKENS = 4_000_000  # 100 MB
# Preset -> (chat, row, *sft.weights) -> TrainingSamples of a row of data.
SAMPLES = {"sft": sft_samples, "dpo": reply_pair, "rm": scored_pair}


class SFTDataset:
    """What the check at start-up tokenized is kept, up to CACHED_TOKENS."""

    def __init__(self, config: Config, chat: Chat):
        self.config, self.chat = config, chat
        self.known: dict[str, list[TrainingSample]] = {}  # by the task's id
        self.num_tokens = 0

    def samples(self, task: Task, group_id: str = "") -> list[TrainingSample]:
        """The samples of one row or of one pair. Raises ValueError if it is too long, unless such
        rows are skipped."""
        samples = self.known.get(task.id)
        if samples is None:
            try:
                samples = self._tokenize(task)
            except ValueError as error:
                raise ValueError(f"{task.place}: {error}") from None
            self.num_tokens += sum(len(sample.token_ids) for sample in samples)
            if self.num_tokens <= CACHED_TOKENS:
                self.known[task.id] = samples
        return [replace(sample, group_id=group_id) for sample in samples]

    def _tokenize(self, task: Task) -> list[TrainingSample]:
        config = self.config
        weights = config.sft.weights if config.algorithm == "sft" else ()
        samples = SAMPLES[config.algorithm](self.chat, task.row, *weights)
        longest = max([len(sample.token_ids) for sample in samples], default=0)
        limit = config.max_context_tokens
        named = f"{limit} (max_prompt_tokens + max_tokens)"
        is_fit = fits("a sequence", longest, limit, named, config.data.skip_long)
        return samples if is_fit else []
