"""All GPU runs, tests and benchmarks of the project in one command: a table on the terminal, JSON
and logs in a folder.

    python scripts/gpu_check.py --out gpu_check                     all stages
    python scripts/gpu_check.py --out gpu_check --budget_s 580      ten minutes; repeat to continue
    python scripts/gpu_check.py --out gpu_check --only tests        these stages, again if done

Requires pytest and the packages of setup.py except datasets; stages with SGLang require that too.
Each stage is a separate process of at most eight minutes. A failed stage does not stop the others
and is not repeated. not_reached.txt names the stages without a result, with the reason. The exit
status is 75 if the budget left stages out, otherwise the number of failed stages.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from script_tools import ROOT, Table, make_parser

PACKAGES = ["torch", "triton", "transformers", "peft", "bitsandbytes", "flash-attn"]
PACKAGES += ["flash-attn-4", "liger-kernel", "sglang"]
LIMIT_S = 480  # Time limit of a stage.
UNFINISHED = 75  # Exit status if the budget left stages out.
# Random weights; heads of the size that kernels are made for.
MODEL = {"hidden": 1024, "layers": 8, "heads": 16}
SIZES = "--max_tokens 64 --max_prompt_tokens 64 --tasks_per_step 16 --group_size 8 --num_steps 3"
# Rewards that differ, so that every step updates.
ENV = """
def load_tasks(split):
    return [{"prompt": f"{split} {n}"} for n in range(64)]

def reward_fn(completion):
    return sum(map(ord, completion)) % 7
"""
EVALUATED = "--eval_every 1 --eval.num_tasks 16 --eval.samples 0 --save_every 1"


@dataclass(kw_only=True)
class Stage:
    arguments: list[str]  # Arguments of python.
    limit_s: int = LIMIT_S
    num_gpus: int = 1
    package: str = ""  # Required package.


def stages(out: Path) -> dict[str, Stage]:
    """Name -> stage, the most informative first."""

    def run(name: str, flags: str, num_gpus: int = 1, package: str = "") -> Stage:
        torchrun = (
            f"-m torch.distributed.run --standalone --nproc_per_node {num_gpus} -m rl_core.train"
        )
        command = (
            f"{torchrun} --model {out}/model --env_path {out}/env.py --out {out}/runs/{name} "
            f"{SIZES} {flags}"
        )
        return Stage(arguments=command.split(), limit_s=300, num_gpus=num_gpus, package=package)

    def bench(name: str, flags: str, result: str = "") -> Stage:
        file = f"{out}/{result or name}.json"
        return Stage(arguments=[f"{ROOT}/scripts/bench_{name}.py", *flags.split(), "--out", file])

    sizes = "--sizes 1024x8 1024x28 --steps 4"
    generate = f"{ROOT}/scripts/bench_generate.py --device cuda --only grpo_ragged {sizes}"
    # Other test files import packages that GPU tests do not need.
    files = [str(file) for file in tests_of_a_gpu()]
    tests = f"-m pytest -q -m gpu -p no:cacheprovider --junit-xml={out}/tests.xml"
    return {
        # A default run: SGLang, --attention auto with SGLang's flash-attn, bf16. Engines sleep
        # while the run evaluates and saves.
        "sglang": run("sglang", f"--engine sglang {EVALUATED}", package="sglang"),
        "sglang_phase": run(
            "sglang_phase", f"--engine sglang --learner.offload phase {EVALUATED}", package="sglang"
        ),
        # With files the weights stay on the device during sleep.
        "sglang_files": run(
            "sglang_files", f"--engine sglang --weight_sync files {EVALUATED}", package="sglang"
        ),
        "embedded": run("embedded", f"--engine embedded {EVALUATED}"),
        "offload_always": run("offload_always", "--engine embedded --learner.offload always"),
        "nccl": run("nccl", f"--engine embedded {EVALUATED}", num_gpus=2),
        "tests": Stage(arguments=[*tests.split(), *files]),
        "offload_ppo": run(
            "offload_ppo", "--engine embedded --learner.offload always --algorithm ppo"
        ),
        "nccl_sglang": run(
            "nccl_sglang",
            f"--engine sglang --engine_tp 2 {EVALUATED}",
            num_gpus=2,
            package="sglang",
        ),
        "generate": Stage(arguments=generate.split()),
        "sync": bench("sync", "--cycles 50"),
        "logprobs": bench("logprobs", "--device cuda"),
        "learner_0.6B": bench("learner", "--sizes 0.6B", "learner_0.6B"),
        "learner_1.7B": bench("learner", "--sizes 1.7B", "learner_1.7B"),
        "learner_4B": bench("learner", "--sizes 4B", "learner_4B"),
    }


def tests_of_a_gpu() -> list[Path]:
    return [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]


def machine() -> dict:
    import torch

    installed = importlib.metadata.distributions()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "gpus": [f"{g.name}, {g.total_memory / (1 << 30):.0f} GiB" for g in gpus],
        "packages": {d.name: d.version for d in installed if d.name in PACKAGES},
    }


def prepare(out: Path) -> None:
    """Writes the model and the environment of the runs."""
    from make_tiny_model import make_tiny_model

    if not (out / "model").exists():
        make_tiny_model(out / "model.part", **MODEL)
        (out / "model.part").rename(out / "model")
    (out / "env.py").write_text(ENV)


def run_stage(stage: Stage, log: Path) -> dict:
    """Runs a stage and returns its status. Its output goes to the terminal and to the log. At the
    deadline the stage and its children are killed."""
    began = time.monotonic()
    path = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")])
    )
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(stage.limit_s)
            status = f"exit {code}" if code else "ok"
        except subprocess.TimeoutExpired:
            status = f"over {stage.limit_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    print(text, flush=True)
    last = (text.strip().splitlines() or ["printed nothing"])[-1]
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "last_line": last[:200],
    }


def lacking(stage: Stage, facts: dict) -> str:
    """The requirement of a stage that this machine does not meet, or ""."""
    if len(facts["gpus"]) < stage.num_gpus:
        return f"needs {stage.num_gpus} GPUs"
    if stage.package and stage.package not in facts["packages"]:
        return f"needs {stage.package}"
    return ""


def run_all(
    wanted: dict[str, Stage], results: dict[str, dict], facts: dict, out: Path, budget_s: float
) -> dict[str, str]:
    """Runs the stages that have no result yet and fit in the budget, and writes all results after
    each stage. Returns the stages that were not reached, with the reason."""
    began, not_reached = time.monotonic(), {}
    for name, stage in wanted.items():
        if name in results:
            continue
        left_s = budget_s - (time.monotonic() - began)
        reason = lacking(stage, facts)
        if not reason and left_s < stage.limit_s:
            reason = f"no time: may take {stage.limit_s} s, {max(0, left_s):.0f} s were left"
        if reason:
            not_reached[name] = reason
            continue
        print(f"== {name}", flush=True)
        shutil.rmtree(
            out / "runs" / name, ignore_errors=True
        )  # An earlier call may have been killed.
        results[name] = run_stage(stage, out / f"{name}.log")
        (out / "summary.json").write_text(
            json.dumps({"machine": facts, "stages": results}, indent=2)
        )
    lines = [f"{name}: {reason}\n" for name, reason in not_reached.items()]
    (out / "not_reached.txt").write_text("".join(lines))
    return not_reached


def earlier_results(out: Path, again: list[str]) -> dict[str, dict]:
    """Results of earlier calls, without the stages to run again."""
    file = out / "summary.json"
    results = json.loads(file.read_text())["stages"] if file.exists() else {}
    return {name: result for name, result in results.items() if name not in again}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=list(stages(Path())),
        metavar="STAGE",
        help="stages: %(choices)s",
    )
    parser.add_argument(
        "--budget_s", type=float, default=7200, help="start no stage that might end later"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    if not facts["gpus"]:
        print("error: torch sees no CUDA device; every stage needs a GPU", file=sys.stderr)
        return 1
    print(json.dumps(facts), flush=True)
    prepare(out)
    wanted = stages(out)
    if args.only:
        wanted = {name: wanted[name] for name in args.only}
    results = earlier_results(out, args.only)
    not_reached = run_all(wanted, results, facts, out, args.budget_s)
    table = Table(stage="<14", status="<12", seconds=">7.0f", last_line="<10")
    for name, result in results.items():
        table.add({"stage": name} | result)
    for name, reason in not_reached.items():
        table.add({"stage": name, "status": "not reached", "last_line": reason})
    if any(reason.startswith("no time") for reason in not_reached.values()):
        return UNFINISHED
    return sum(r["status"] != "ok" for r in results.values())


if __name__ == "__main__":
    sys.exit(main())
