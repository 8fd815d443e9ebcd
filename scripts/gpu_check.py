"""Every GPU run, test and benchmark of the project in one command: a table on the terminal, JSON
and logs in a folder.

    python scripts/gpu_check.py --out gpu_check                     all of it, the most telling
    first
    python scripts/gpu_check.py --out gpu_check --budget_s 580      what fits in ten minutes; the
    next call goes on
    python scripts/gpu_check.py --out gpu_check --only tests        these stages, also if they are
    done

Needs pytest and what setup.py asks for, except datasets; runs with SGLang need that too. Each stage
is a process of its own, of at most eight minutes. A stage that fails does not stop the others and
is not repeated. not_reached.txt names the stages without a result, with the reason. The exit status
is the number of stages that failed, once none is left for another call.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).parent.parent
PACKAGES = [
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "flash-attn-4",
    "liger-kernel",
    "sglang",
]
LIMIT_S = 480  # of a stage at most
GO_ON = 75  # exit status: the budget is used up, the same command goes on
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
    arguments: list[str]  # of python
    limit_s: int = LIMIT_S
    num_gpus: int = 1
    package: str = ""  # that it needs


def stages(out: Path) -> dict[str, Stage]:
    """By name, the most telling first."""

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
    # Others need packages that a GPU's tests do not.
    files = [str(file) for file in tests_of_a_gpu()]
    tests = f"-m pytest -q -m gpu -p no:cacheprovider --junit-xml={out}/tests.xml"
    return {
        # No flag says how: SGLang, --attention auto beside its flash-attn, bf16; engines sleep for
        # evaluation and saving.
        "sglang": run("sglang", f"--engine sglang {EVALUATED}", package="sglang"),
        "sglang_phase": run(
            "sglang_phase", f"--engine sglang --learner.offload phase {EVALUATED}", package="sglang"
        ),
        # Without it the first run's weights stay on the device.
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

    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in PACKAGES}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{g.name}, {g.total_memory / (1 << 30):.0f} GiB" for g in gpus]
    when = {
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
    }
    return when | {"gpus": names, "packages": found}


def prepare(out: Path) -> None:
    """The model and the environment of the runs."""
    from make_tiny_model import make_tiny_model

    if not (out / "model").exists():
        make_tiny_model(out / "model.part", **MODEL)
        (out / "model.part").rename(out / "model")
    (out / "env.py").write_text(ENV)


def run_stage(stage: Stage, log: Path) -> dict:
    """How it ended. What it prints goes to the terminal and to the log; at the deadline it and its
    children are killed."""
    began = time.monotonic()
    path = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")])
    )
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        how = {
            "cwd": ROOT,
            "env": env,
            "stdout": file,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        process = subprocess.Popen([sys.executable, *stage.arguments], **how)
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
    """What this machine lacks for a stage; "" if nothing."""
    if len(facts["gpus"]) < stage.num_gpus:
        return f"needs {stage.num_gpus} GPUs"
    if stage.package and stage.package not in facts["packages"]:
        return f"needs {stage.package}"
    return ""


def run_all(
    wanted: dict[str, Stage], results: dict[str, dict], facts: dict, out: Path, budget_s: float
) -> dict[str, str]:
    """Runs the stages that have no result yet and fit in the budget, and writes all results after
    each. Returns those that were not reached, with the reason."""
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
        shutil.rmtree(out / "runs" / name, ignore_errors=True)  # of a call that was killed
        results[name] = run_stage(stage, out / f"{name}.log")
        (out / "summary.json").write_text(
            json.dumps({"machine": facts, "stages": results}, indent=2)
        )
    lines = [f"{name}: {reason}\n" for name, reason in not_reached.items()]
    (out / "not_reached.txt").write_text("".join(lines))
    return not_reached


def earlier_results(out: Path, again: list[str]) -> dict[str, dict]:
    """Of calls before this one, without those that are to be done again."""
    file = out / "summary.json"
    found = json.loads(file.read_text())["stages"] if file.exists() else {}
    return {name: result for name, result in found.items() if name not in again}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=list(stages(Path())),
        metavar="STAGE",
        help="of: %(choices)s",
    )
    parser.add_argument(
        "--budget_s", type=float, default=7200, help="no stage begins that might end later"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    if not facts["gpus"]:
        print("error: torch sees no CUDA device here; this checks what needs one", file=sys.stderr)
        return 1
    print(json.dumps(facts), flush=True)
    prepare(out)
    wanted = stages(out)
    if args.only:
        wanted = {name: wanted[name] for name in args.only}
    results = earlier_results(out, args.only)
    not_reached = run_all(wanted, results, facts, out, args.budget_s)
    print(f"\n{'stage':>14} {'status':>12} {'seconds':>8}  last line")
    for name, r in results.items():
        print(f"{name:>14} {r['status']:>12} {r['seconds']:8.0f}  {r['last_line']}")
    for name, reason in not_reached.items():
        print(f"{name:>14} {'not reached':>12} {'':>8}  {reason}")
    if any(reason.startswith("no time") for reason in not_reached.values()):
        return GO_ON
    return sum(r["status"] != "ok" for r in results.values())


if __name__ == "__main__":
    sys.exit(main())
