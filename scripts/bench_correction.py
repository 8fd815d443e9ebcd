"""What --algo.correction gives in synchronous runs whose engine computes with coarser weights than
the learner.

    python scripts/bench_correction.py --model runs/quickstart/sft/hf/policy [--steps 60]
        [--seeds 3] [--engines embedded,mantissa_7,...,sglang] [--out runs/correction]

The task is the quickstart's. `embedded` samples with the learner's own tensors, in fp32. So does
`mantissa_3`, but with weights that are rounded to three bits of mantissa; bfloat16 has 7, FP8 has 3
(E4M3) or 2 (E5M2). `sglang` samples and learns in bfloat16. A line of the table is one engine with
one correction: the mean reward of the last ten steps by seed; over all seeds that of ten steps from
the middle on, and over all steps the mismatch, the fraction of tokens above 0.5 nats, and the
gradient's norm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rl_core import registry
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.train import main as train

ROOT = Path(__file__).parent.parent
TASK = (
    "--tasks_per_step 16 --group_size 8 --max_tokens 8 --max_prompt_tokens 16 --optim.lr 3e-4 "
    "--optim.warmup_steps 5 --algo.clip_high 0.28 --canary_tolerance 0 --rollout.save false"
)
CORRECTIONS = ("none", "tis", "mask")
MANTISSAS = {f"mantissa_{bits}": bits for bits in (7, 3, 2, 1)}
LAST = 10  # steps whose rewards count
METRICS = ("mismatch_kl_nats", "mismatch_tail_frac", "grad_norm")


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The nearest values with so many bits of mantissa after the first."""
    mantissa, exponent = torch.frexp(weight)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


class RoundedEngine(EmbeddedEngine):
    shares_weights = False
    bits: int

    async def update(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        coarse = ((name, rounded(weight, self.bits)) for name, weight in weights)
        await super().update(coarse, version, adapter=adapter)


def rounded_engine(name: str) -> type[EmbeddedEngine]:
    return type(name, (RoundedEngine,), {"bits": MANTISSAS[name]})


def measure(engine: str, correction: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Of one run."""
    out = args.out / f"{engine}_{correction}_{seed}"
    flags = [*TASK.split(), "--model", args.model, "--env_path", ROOT / "envs/sort_digits.py"]
    flags += ["--engine", engine, "--algo.correction", correction, "--seed", seed, "--out", out]
    flags += ["--num_steps", args.steps]
    flags += ["--learner.dtype", "bfloat16" if engine == "sglang" else "float32"]
    status = train(list(map(str, flags)))
    assert status == 0, status
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    found = {"reward": mean(rewards[-LAST:]), "middle": mean(rewards[len(rows) // 2 :][:LAST])}
    for name in METRICS:
        found[name] = mean([row[f"learn/policy/{name}"] for row in rows])
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--engines", default=",".join(("embedded", *MANTISSAS)))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/correction"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in MANTISSAS:
        registry.ENGINES[name] = partial(rounded_engine, name)

    lines = ["| engine | correction | reward, by seed | middle | mismatch | tail | norm |"]
    for engine in args.engines.split(","):
        for correction in CORRECTIONS:
            runs = [measure(engine, correction, seed, args) for seed in range(args.seeds)]
            kl, tail, norm = (mean([one[name] for one in runs]) for name in METRICS)
            rewards = " ".join(f"{one['reward']:.3f}" for one in runs)
            middle = mean([one["middle"] for one in runs])
            numbers = f"{rewards} | {middle:.3f} | {kl:.1e} | {tail:.4f} | {norm:.2f}"
            lines.append(f"| {engine} | {correction} | {numbers} |")
            print(f"\n{lines[-1]}", flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
