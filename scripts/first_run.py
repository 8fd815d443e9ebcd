"""From an untrained model to one that sorts digits, cell by cell: `python scripts/first_run.py`, or
as a notebook in an editor that knows `# %%` (VS Code, Spyder, jupytext). A CPU takes about a
minute. `--short` trains a few steps only.
"""

# %% Imports. Tiny models gain nothing from more threads.
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rl_core import Config, train
from rl_core.tools.cli import main as rl_core
from rl_core.tools.tiny_model import make_tiny_model

SHORT = "--short" in sys.argv
OUT = Path("runs") / time.strftime("first_run_%Y%m%d_%H%M%S")
SIZES = {"max_prompt_tokens": 16, "max_tokens": 8}

# %% A model: a Qwen3 of 0.1 M parameters with one token per character. It knows nothing.
make_tiny_model(OUT / "model")

# %% Rows that show the form of an answer: the digits of the prompt, in any order.
draw = random.Random(0)


def digits() -> str:
    return "".join(draw.sample("0123456789", 5))


def shuffled(text: str) -> str:
    return "".join(draw.sample(text, len(text)))


prompts = [digits() for _ in range(64 if SHORT else 4000)]
form = [{"prompt": prompt, "response": shuffled(prompt)} for prompt in prompts]
print(form[:3])

# %% Imitate them (SFT): then the model writes five digits, in the right order once in 120 times.
warm = train(
    Config(
        algorithm="sft",
        model=OUT / "model",
        out=OUT / "sft",
        num_steps=2 if SHORT else 400,
        tasks_per_step=64,
        optim={"lr": 3e-3, "schedule": "cosine"},
        **SIZES,
    ),
    data=form,
)


# %% An environment: rows, and a reward. Columns of a row are arguments of the reward.
def reward_fn(completion, answer):
    """The share of digits in their right place."""
    places = sum(a == b for a, b in zip(completion, answer, strict=False))
    return places / max(5, len(completion))


rows = [
    {"prompt": prompt, "answer": "".join(sorted(prompt))}
    for prompt in (digits() for _ in range(1100))
]

# %% Learn from the reward (GRPO): eight answers to each prompt; answers above the group's mean
# become likelier.
result = train(
    Config(
        model=warm.model,
        out=OUT / "grpo",
        num_steps=2 if SHORT else 100,
        tasks_per_step=16,
        group_size=8,
        eval_every=1 if SHORT else 50,
        eval={"num_tasks": 8 if SHORT else 100, "samples": 0},
        optim={"lr": 3e-4, "warmup_steps": 5},
        **SIZES,
    ),
    env=reward_fn,
    data=rows[:1000],
    eval_data=rows[1000:],
)

# %% Held-out prompts: the mean reward and the share of right answers, before, halfway and after.
for line in result.history:
    scores = {
        name.rpartition("/")[2]: value for name, value in line.items() if name.startswith("eval/")
    }
    if scores:
        print(
            f"step {line['step']:>3}  score {scores['greedy_score']:.2f}  right "
            f"{scores['greedy_pass']:.2f}"
        )

# %% Curves: OUT/grpo/curves.png. `rl-core info metrics NAME` explains a metric.
rl_core(["plot", str(OUT / "grpo")])

# %% Conversations of the last evaluation, the worst first.
rl_core(["show", str(OUT / "grpo"), "--eval", "--worst"])
