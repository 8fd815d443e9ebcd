"""The table of flags with which Qwen3 fits GPUs, in docs/parallelism.md. Reads no weights and needs
no GPU.

    python scripts/memory_table.py

GRPO with the defaults of rl_core, except episodes of 1,024 + 3,072 tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

from bench_learner import QWEN3, model_config

from rl_core.algorithms import make_algorithm
from rl_core.config import parse_config
from rl_core.distributed import Mesh
from rl_core.run.plan.plan import Plan
from rl_core.tools.gpu_fit import ADAPTERS, FULL, Flags, fitting_flags
from rl_core.tools.memory_estimate import GIB, Size, model_size

GPUS_GIB = (24, 80, 141)
NUMS = (1, 2, 8)
FLAGS = (
    "--env_path none --out none --engine sglang --learner.dtype bfloat16 --max_prompt_tokens 1024 "
    "--max_tokens 3072"
)
LETTERS = {
    "recompute": "R",
    "phase": "P",
    "always": "A",
    16: "L",
    "nf4": "Q",
    0.85: "M",
    2: "T2",
    4: "T4",
    8: "T8",
}


def main() -> None:
    print("\n".join(lines()))


def lines(names: Iterable[str] = QWEN3) -> list[str]:
    header = "".join(f" {gib} GB |" for gib in GPUS_GIB)
    result = [f"| model, GPUs |{header}", f"|---|{'---|' * len(GPUS_GIB)}"]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model_config(name).save_pretrained(folder)
            config = parse_config(["--model", folder, *FLAGS.split()])
            size = model_size(config.actors["policy"])
        plan = Plan(
            config=config,
            algorithms={"policy": make_algorithm("grpo", config.algo)},
            mesh=Mesh(),
            envs={},
            local=["policy"],
        )
        for num in NUMS:
            plan.mesh = Mesh(dp_shard=num)
            cells = [f" {cell(plan, size, gib)} |" for gib in GPUS_GIB]
            result.append(f"| {name}, {num} |{''.join(cells)}")
    return result


def cell(plan: Plan, size: Size, gib: int) -> str:
    """Flags for full weights and, if these stay on the CPU or do not fit, flags for adapters."""
    full = fitting(plan, size, gib, FULL)
    if full and not full.startswith("A"):
        return full
    return ", ".join(filter(None, (full, fitting(plan, size, gib, ADAPTERS)))) or "-"


def fitting(plan: Plan, size: Size, gib: int, learners: Iterable[Flags]) -> str:
    """Letters of the flags, and GiB while sampling / learning."""
    result = fitting_flags(plan, "policy", size, plan.mesh, gib, learners)
    if result is None:
        return ""
    flags, fit = result
    sampling, learning = (f"{value / GIB:.0f}" for value in fit.table["sum"])
    return f"{''.join(LETTERS[value] for value in flags.values())} {sampling}/{learning}".strip()


if __name__ == "__main__":
    main()
