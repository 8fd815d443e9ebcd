"""Forwards and CPU seconds of old logprobs, by --learner.inference_tokens, on a tiny model:
docs/performance.md quotes what this prints.

python scripts/bench_inference.py [--model FOLDER] [--samples 256]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from make_tiny_model import make_tiny_model

from rl_core.algorithms import make_algorithm
from rl_core.config import parse_config
from rl_core.distributed import init_ranks
from rl_core.models import make_learner
from rl_core.types import TrainingSample

SIZES = ("0", "400", "800", "1600")


def samples(num: int) -> list[TrainingSample]:
    """Prompts and replies of different lengths; nothing is shared."""
    draw, found = random.Random(0), []
    for number in range(num):
        prompt, reply = draw.randint(1, 15), draw.randint(2, 40)
        mask = [0] * prompt + [1] * reply
        found.append(
            TrainingSample(
                token_ids=[draw.randrange(8, 104) for _ in mask],
                loss_mask=mask,
                rollout_logprobs=[-4.6 * trained for trained in mask],
                policy_versions=[trained - 1 for trained in mask],
                advantages=[float(trained) for trained in mask],
                group_id=str(number),
            )
        )
    return found


def measure(model: str, size: str, num: int) -> tuple[int, float]:
    """(forwards, least of five CPU times) of one step's old logprobs."""
    flags = f"--model {model} --env_path x.py --out x --engine embedded --max_prompt_tokens 20 "
    flags += f"--max_tokens 60 --learner.microbatch_tokens 100 --learner.inference_tokens {size}"
    config = parse_config([*flags.split(), "--learner.epochs", "2"])
    algorithm = make_algorithm(config.algorithm, config.algo)
    learner = make_learner(config, algorithm, "policy", init_ranks(60))
    minibatches, _ = learner.shard(samples(num))
    forwards: list[int] = []
    learner.policy.register_forward_hook(lambda *_: forwards.append(1))
    times = []
    for _ in range(5):
        began = time.process_time()
        learner.annotate(minibatches)
        times.append(time.process_time() - began)
    return len(forwards) // 5, min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--samples", type=int, default=256)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = flags.model or str(Path(folder) / "model")
        if not flags.model:
            make_tiny_model(Path(model))
        rows = {size: measure(model, size, flags.samples) for size in SIZES}
    print("| `--learner.inference_tokens` | forwards | CPU s | ratio |\n|---|---|---|---|")
    for size, (forwards, seconds) in rows.items():
        print(f"| {size} | {forwards} | {seconds:.3f} | {rows['0'][1] / seconds:.1f} |")


if __name__ == "__main__":
    main()
