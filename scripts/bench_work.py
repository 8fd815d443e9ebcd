"""The work of bench_cpu.py, equal for both sides: prompts, lengths, rows, rewards, settings."""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass, field

from rl_core.types import counter_seed

NUM_PROMPTS, GROUP_SIZE = 16, 8
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE  # Samples of a GRPO step.
NUM_ROWS = 64  # Rows of an SFT step.
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
LEARNING_RATE = 1e-4


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """A task of both sides. Lengths are in tokens."""

    name: str
    algorithm: str  # "grpo" or "sft"
    prompt: int = 0  # Letters of a prompt (sft: their mean); the chat template adds three tokens.
    mean: int = 0  # Mean length of a completion, including the end token.
    longest: int  # Length limit; mean == longest gives all completions one length.
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    steps: int = 8  # Measured steps.
    warmup: int = 2  # Steps before the measured ones.
    seed: int = 0

    @property
    def all_steps(self) -> int:
        return self.steps + self.warmup

    @property
    def longest_prompt(self) -> int:
        return 2 * self.prompt + 3


WORKS = {
    work.name: work
    for work in (
        Work(name="grpo_short", algorithm="grpo", prompt=5, mean=6, longest=6, steps=20),
        Work(name="grpo_ragged", algorithm="grpo", prompt=37, mean=24, longest=96),
        Work(name="sft_ragged", algorithm="sft", prompt=32, mean=64, longest=256, steps=12),
    )
}
PACKED = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
# On these tasks other settings only change the number of tokens in one forward.
TRL_SETTINGS = {
    "grpo": {
        "128 a microbatch": {"per_device_train_batch_size": 128},
        "32 a microbatch": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
    },
    "sft": {
        "padded, 64 a microbatch": {"per_device_train_batch_size": 64},
        "padded, 4 a microbatch": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 16,
        },
        "packed, 1 row a microbatch": PACKED,
    },
}
OUR_SETTINGS = {
    algorithm: {f"{n} tokens a microbatch": {"learner.microbatch_tokens": n} for n in (1024, 2048)}
    for algorithm in ("grpo", "sft")
}


def letters(work: Work, count: int, *parts: int | str) -> str:
    return "".join(random.Random(counter_seed(work.seed, *parts)).choices(LETTERS, k=count))


def completion_length(work: Work, step: int, index: int) -> int:
    """A length drawn from an exponential distribution, clipped to [2, longest]: many short ones and
    a tail, like a policy's."""
    if work.mean == work.longest:
        return work.mean
    drawn = random.Random(counter_seed(work.seed, "length", step, index)).expovariate(1 / work.mean)
    return max(2, min(work.longest, round(drawn)))


def rl_prompts(work: Work) -> list[str]:
    num = work.all_steps * NUM_PROMPTS
    return [letters(work, work.prompt, "prompt", i) for i in range(num)]


def sft_rows(work: Work) -> list[tuple[str, str]]:
    """(prompt, response) of all steps; lengths of prompts vary as much as those of responses."""
    rows: list[tuple[str, str]] = []
    for i in range(work.all_steps * NUM_ROWS):
        size = random.Random(counter_seed(work.seed, "size", i)).randint(1, 2 * work.prompt)
        prompt = letters(work, size, "prompt", i)
        rows.append((prompt, letters(work, completion_length(work, 0, i) - 1, "response", i)))
    return rows


def says(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def reward_of(text: str) -> float:
    """A reward that differs within nearly every group, so that no side skips samples without a
    signal."""
    return counter_seed(text) % 1000 / 1000


@dataclass(kw_only=True, slots=True)
class Measured:
    """Measurements of a side. Lists have one value per step, including the warm-up."""

    cpu_s: list[float] = field(default_factory=list)
    generate_cpu_s: list[float] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    # Tokens in the training forwards, including prompts.
    learned_tokens: list[int] = field(default_factory=list)
    # Positions of those forwards, including padding.
    computed_tokens: list[int] = field(default_factory=list)
    start_mib: float = 0.0  # Resident memory after the model is loaded.
    peak_mib: float = 0.0

    def begin_step(self) -> None:
        if not self.cpu_s:
            self.start_mib = peak_mib()
        for values in (
            self.generate_cpu_s,
            self.generated_tokens,
            self.learned_tokens,
            self.computed_tokens,
        ):
            values.append(0)
        self.cpu_s.append(-time.process_time())

    def end_step(self) -> None:
        self.cpu_s[-1] += time.process_time()
        self.peak_mib = peak_mib()


def peak_mib() -> float:
    """Peak resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_model(work: Work, folder: str) -> None:
    from make_tiny_model import make_tiny_model

    make_tiny_model(folder, work.hidden, work.layers, work.heads, work.seed)
