"""rl-core init [FOLDER]: an environment, ten rows, a config.yaml and a tiny model that run as they
are on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from rl_core.tools.parser import Parser

ENVIRONMENT = '''"""Add two digits: `3+4` -> `7`. Change the reward, and the rows, to your own task."""


def reward_fn(messages, answer):
    """The reward of one episode. `answer` is a column of the rows."""
    reply = messages[-1]["content"]
    return 1.0 if reply == answer else 0.2 * reply.startswith(answer)


# def interact(messages): ...    the environment's next messages, for episodes of several turns; None ends one
'''
ROWS = [
    {"prompt": f"{a}+{b}", "answer": str(a + b)}
    for a, b in enumerate((5, 3, 1, 4, 2, 0, 2, 1, 0, 0))
]
CONFIG = """# rl-core train --config {folder}/config.yaml    flags override what stands here; rl-core train --help lists them
algorithm: grpo
model: {folder}/model  # an untrained one with 0.1 M parameters; yours: a folder or a hub name, such as Qwen/Qwen3-0.6B
env_path: {folder}/task.py
data:
  train: {folder}/rows.jsonl  # eval: FILE, rows that are not trained on, with eval_every: 20
out: {folder}/run
tasks_per_step: 10  # rows of a step
group_size: 32  # episodes of each row
num_steps: 60
max_prompt_tokens: 16
max_tokens: 4  # of a reply
algo:
  entropy_coef: 0.01  # replies stay varied; 0 is usual
optim:
  lr: 0.002  # of a model this small; 1e-6 is usual
"""


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core init", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", default="first", help="folder to write; default: first"
    )
    name = parser.parse_args(argv).folder.rstrip("/")
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{name} exists already; name another folder: rl-core init {name}_2")
    from transformers.utils.logging import disable_progress_bar

    from rl_core.tools.tiny_model import make_tiny_model

    disable_progress_bar()
    make_tiny_model(folder / "model")
    (folder / "task.py").write_text(ENVIRONMENT)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "config.yaml").write_text(CONFIG.format(folder=name))
    print(
        f"wrote {name}: task.py (the environment), rows.jsonl, config.yaml, model (tiny, "
        "untrained)\n\n"
        f"  rl-core train --config {name}/config.yaml    # about 15 s on a CPU\n\n"
        f"before:  rl-core check {name}/task.py --data.train {name}/rows.jsonl\n"
        f"after:   rl-core eval {name}/run {name}/model --data.eval {name}/rows.jsonl\n"
        f"         rl-core show {name}/run --best\n"
        f"         rl-core plot {name}/run"
    )
    return 0
