"""Proofs, tests and benchmarks on a machine with GPUs: a table on the terminal, JSON and logs in a
folder.

    python scripts/gpu_check.py --out gpu_check                  all stages
    python scripts/gpu_check.py --out gpu_check --first          SGLang starts, a run learns: 290 s
    python scripts/gpu_check.py --out gpu_check --second         speed, memory, tests: 390 s
    python scripts/gpu_check.py --out gpu_check --budget_s 580   ten minutes; repeat to continue
    python scripts/gpu_check.py --out gpu_check --only tests     these stages, again if done
    python scripts/gpu_check.py --out gpu_check --fake           tiny shapes on a CPU

Requires pytest and the packages of setup.py except datasets; stages with SGLang require that too.
Each stage has a deadline. A failed stage does not stop the others and is not repeated; a stage that
the budget cuts short is. All processes of a stage end with this script, even if it is killed.
not_reached.txt names the stages without a result, with the reason. The exit status is 75 if the
budget left stages out, otherwise the number of failed stages.

--fake runs the stages themselves, so that none fails on the day for a reason that a CPU shows.
Results go to OUT/fake; the embedded engine replaces SGLang if that is not installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from script_tools import ROOT, Table, make_parser, read_metrics

from rl_core.environments.agents.program import below_reaper

PACKAGES = ["torch", "triton", "transformers", "peft", "bitsandbytes", "flash-attn"]
PACKAGES += ["flash-attn-4", "liger-kernel", "sglang"]
UNFINISHED = 75  # Exit status if the budget left stages out.
# Stages of a call, and their budget in seconds.
FIRST = ["prove", "warm", "sort", "sglang"], 290
SECOND = ["run", "sync", "generate", "learner_0.6B", "learner_1.7B", "logprobs", "tests"], 390
# Metrics of a run that its stage prints.
FIGURES = re.compile("time/|memory/|canary|kl_nats|reward_mean|greedy_pass|mfu|restarts")
# Random weights; heads of the size that kernels are made for.
MODEL = {"hidden": 1024, "layers": 8, "heads": 16}
# Rewards that differ although most tokens have no text, so that every step updates.
ENV = """
import random

def load_tasks(split):
    return [{"prompt": f"{split} {n}"} for n in range(64)]

def reward_fn(completion):
    return random.random()
"""
LENGTHS = "--max_tokens 8 --max_prompt_tokens 16"
PROOF = ROOT / "tests/engines/test_sglang_cuda.py"


@dataclass(kw_only=True)
class Stage:
    commands: list[str]  # Arguments of python. Each runs if the one before succeeded.
    limit_s: float = 300
    num_gpus: int = 1
    package: str = ""  # Required package.
    after: str = ""  # Required stage.


@dataclass(kw_only=True)
class StageMaker:
    """Makes stages that write to a folder: for a GPU, or with tiny shapes for a CPU if is_fake."""

    out: Path
    is_fake: bool

    def __post_init__(self) -> None:
        self.folder = shlex.quote(str(self.out))
        has_server = not self.is_fake or importlib.util.find_spec("sglang") is not None
        self.package = "sglang" if has_server else ""
        self.sglang = "--engine sglang" if has_server else "--engine embedded"

    def sized(self, on_gpu: str, on_cpu: str) -> str:
        return on_cpu if self.is_fake else on_gpu

    def model(self, size: str) -> str:
        out = f"pathlib.Path({str(self.out)!r})"
        code = f"import gpu_check, pathlib; gpu_check.prepare({out}, {size!r})"
        return shlex.join(["-c", code])

    def train(self, name: str, flags: str, num_gpus: int = 1) -> str:
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {num_gpus}"
        return f"{torchrun} -m rl_core.train --out {self.folder}/runs/{name} {flags}"

    def run(self, name: str, flags: str, size: str = "", num_gpus: int = 1, **more) -> Stage:
        size = size or self.sized("model", "tiny")
        flags += f" --model {self.folder}/{size} --env_path {self.folder}/env.py"
        flags += " --max_prompt_tokens 64"
        flags += self.sized(
            " --tasks_per_step 16 --group_size 8", " --tasks_per_step 4 --group_size 2"
        )
        more["package"] = "sglang" if "--engine sglang" in flags else ""
        commands = [self.model(size), self.train(name, flags, num_gpus)]
        return Stage(commands=commands, num_gpus=num_gpus, **more)

    def warm(self) -> Stage:
        # Heads of 64.
        small = f"scripts/make_tiny_model.py --out {self.folder}/small --hidden 256 --layers 2"
        rows = f"scripts/demo_data.py --out {self.folder}/data --task sort --num_sft "
        sft = f"--algorithm sft --model {self.folder}/small"
        sft += f" --data.train {self.folder}/data/sft.jsonl {LENGTHS} --tasks_per_step 64"
        sft += " --optim.lr 1e-3 --optim.schedule cosine --num_steps " + self.sized("200", "4")
        commands = [f"{small} --heads 4", rows + self.sized("16000", "256")]
        return Stage(commands=[*commands, self.train("warm", sft)], limit_s=60)

    def sort(self) -> Stage:
        flags = f"{self.sglang} --model {self.folder}/runs/warm/hf/policy"
        flags += f" --env_path envs/sort_digits.py {LENGTHS} --tasks_per_step 16 --group_size 8"
        flags += " --optim.lr 3e-4 --optim.warmup_steps 5 --algo.clip_high 0.28 --num_steps "
        flags += self.sized("40 --eval_every 20", "2")
        commands = [self.train("sort", flags)]
        return Stage(commands=commands, limit_s=150, package=self.package, after="warm")

    def sync(self) -> Stage:
        size = self.sized("0.6B", "tiny")
        command = f"scripts/bench_sync.py {self.sglang} --weights device"
        command += f" --model {self.folder}/{size} --out {self.folder}/sync.json"
        command += f" --cycles {self.sized('10', '2')}"
        return Stage(commands=[self.model(size), command], limit_s=110, package=self.package)

    def generate(self) -> Stage:
        on_gpu = "grpo_ragged --device cuda --sizes 1024x8 --steps 2"
        shape = self.sized(on_gpu, "grpo_short --device cpu --sizes 32x1 --steps 1")
        return Stage(commands=[f"scripts/bench_generate.py --only {shape}"], limit_s=60)

    def learner(self, size: str) -> Stage:
        on_cpu = "--sizes tiny --lengths 512 --tokens 1024"
        shape = self.sized(f"--sizes {size} --lengths 8192", on_cpu)
        command = f"scripts/bench_learner.py {shape} --steps 2"
        return Stage(commands=[f"{command} --out {self.folder}/learner_{size}.json"], limit_s=75)

    def logprobs(self) -> Stage:
        shape = self.sized("cuda --shapes 8192x152064x2048", "cpu --shapes 64x104x32")
        command = f"scripts/bench_logprobs.py --only fused plain --out {self.folder}/logprobs.json"
        return Stage(commands=[f"{command} --device {shape}"], limit_s=60)

    def pytest(self, name: str, arguments: str, limit_s: float, package: str = "") -> Stage:
        command = f"-m pytest --tb=short -p no:cacheprovider --basetemp={self.folder}/{name}"
        return Stage(commands=[f"{command} {arguments}"], limit_s=limit_s, package=package)

    def tests(self) -> Stage:
        files = " ".join(str(file) for file in tests_of_a_gpu() if file != PROOF)
        has_workers = importlib.util.find_spec("xdist") and not self.is_fake
        arguments = f"-q -m gpu --junit-xml={self.folder}/tests.xml {files}"
        return self.pytest("tests", arguments + (" -n 4" if has_workers else ""), 120)


def stages(out: Path, is_fake: bool = False) -> dict[str, Stage]:
    """Name -> stage, the most informative first."""
    make = StageMaker(out=out, is_fake=is_fake)
    sglang, sized = make.sglang, make.sized
    by_files = "--weight_sync files" if make.package else ""
    halves = "--engine_tp 2" if make.package else ""
    short = sized("--max_tokens 64 --num_steps 3", "--max_tokens 4 --num_steps 2")
    evaluated = f"{short} --eval_every 1 --eval.num_tasks 16 --eval.samples 0 --save_every 1"
    steps = f"{sglang} --max_tokens {sized('512', '8')} --num_steps 4"
    ppo = f"--engine embedded {short} --learner.offload always --algorithm ppo"
    return {
        # The engine alone: tokens, logprobs, sleep, new weights.
        "prove": make.pytest("prove", f"-sv {PROOF} {sized('-m gpu', '')}", 110, make.package),
        "warm": make.warm(),
        # The default run: time slicing, sleep, new weights by CUDA IPC, canary, evaluation.
        "sort": make.sort(),
        # All CUDA graphs; the engine sleeps while the run evaluates and saves.
        "sglang": make.run("sglang", f"{sglang} {evaluated}", limit_s=100),
        # Speeds and memory of a step.
        "run": make.run("run", steps, sized("0.6B", "tiny")),
        "sync": make.sync(),
        "generate": make.generate(),
        "learner_0.6B": make.learner("0.6B"),
        "learner_1.7B": make.learner("1.7B"),
        "logprobs": make.logprobs(),
        "tests": make.tests(),
        "embedded": make.run("embedded", f"--engine embedded {evaluated}"),
        # Policy and critic on the host.
        "offload_ppo": make.run("offload_ppo", ppo),
        # With files the engine's weights stay on the device while the engine sleeps.
        "files": make.run("files", f"{sglang} {by_files} {evaluated} --learner.offload phase"),
        "nccl": make.run("nccl", f"--engine embedded {evaluated}", num_gpus=2),
        "nccl_sglang": make.run("nccl_sglang", f"{sglang} {halves} {evaluated}", num_gpus=2),
    }


def tests_of_a_gpu() -> list[Path]:
    """Files with tests marked gpu. Others import packages that these tests do not need."""
    return [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]


def prepare(out: Path, size: str = "model") -> None:
    """Writes env.py, the environment of the runs, and a model into the folder `size` if there is
    none: of MODEL's sizes, or a Qwen3 of a size of bench_learner.py."""
    (out / "env.py").write_text(ENV)
    if (out / size).exists():
        return
    unfinished = out / f"{size}.part"
    if size == "model":
        from make_tiny_model import make_tiny_model

        make_tiny_model(unfinished, **MODEL)
    else:
        make_qwen3(unfinished, size)
    unfinished.rename(out / size)


def make_qwen3(folder: Path, size: str) -> None:
    """Random weights, drawn on the GPU if there is one, and one token per character."""
    import torch
    from bench_learner import model_config
    from transformers import AutoModelForCausalLM, GenerationConfig

    from rl_core.tools.tiny_model import character_tokenizer

    tokenizer = character_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = model_config(size)
    config.update(ends | {"bos_token_id": None, "max_position_embeddings": 40960})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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


def used_mib() -> int | None:
    """Memory in use on all GPUs."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return sum(map(int, re.findall(r"^\d+", done.stdout, re.MULTILINE)))


def run_stage(stage: Stage, log: Path, limit_s: float) -> dict:
    """Runs a stage and returns its result. All processes of the stage are killed at the deadline,
    and if this process ends. The end of the log goes to the terminal."""
    began = time.monotonic()
    folders = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    script = " && ".join(f"{shlex.quote(sys.executable)} {command}" for command in stage.commands)
    with open(log, "w") as file:
        process = subprocess.Popen(
            below_reaper(["sh", "-c", script], file.fileno()),
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[file.fileno()],
            start_new_session=True,  # Ctrl-C would end the reaper before it has killed the rest.
        )
        try:
            code = process.wait(limit_s)
            status = f"exit {code}" if code else "ok"
        except subprocess.TimeoutExpired:
            status = f"over {limit_s:.0f} s"
        finally:
            process.terminate()
            process.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or ["printed nothing"]
    shown = lines[-8:] if status == "ok" else lines[-40:]
    print("\n".join(line[:200] for line in shown), flush=True)
    seconds = round(time.monotonic() - began, 1)
    return {
        "status": status,
        "seconds": seconds,
        "used_mib": used_mib(),
        "last_line": lines[-1][:200],
    }


def figures(folder: Path) -> dict[str, list[float]]:
    """Speeds, memory, divergences and scores of a run: at most the first and last three values."""
    values: dict[str, list[float]] = {}
    for row in read_metrics(folder) if (folder / "metrics.jsonl").exists() else []:
        for name in filter(FIGURES.search, row):
            values.setdefault(name, []).append(row[name])
    return {name: v if len(v) < 7 else [*v[:3], *v[-3:]] for name, v in values.items()}


def lacking(stage: Stage, results: dict[str, dict], facts: dict) -> str:
    """The requirement of a stage that is not met, or ""."""
    if len(facts["gpus"]) < stage.num_gpus:
        return f"needs {stage.num_gpus} GPUs"
    if stage.package and stage.package not in facts["packages"]:
        return f"needs {stage.package}"
    if stage.after and results.get(stage.after, {}).get("status") != "ok":
        return f"needs the stage {stage.after}"
    return ""


def run_all(
    wanted: dict[str, Stage],
    results: dict[str, dict],
    facts: dict,
    out: Path,
    budget_s: float,
    limit_s: float | None = None,
) -> dict[str, str]:
    """Runs the stages that have no result yet and fit in the budget, and writes all results after
    each stage. Returns the stages that were not reached, with the reason."""
    began, not_reached = time.monotonic(), {}
    for name, stage in wanted.items():
        if name in results:
            continue
        left_s, most_s = budget_s - (time.monotonic() - began), limit_s or stage.limit_s
        reason = lacking(stage, results, facts)
        # Stages usually take half of their limits.
        if not reason and left_s < most_s / 2:
            reason = f"no time: may take {most_s:.0f} s, {max(0, left_s):.0f} s were left"
        if reason:
            not_reached[name] = reason
            continue
        print(f"== {name}", flush=True)
        run_folder = out / "runs" / name
        shutil.rmtree(run_folder, ignore_errors=True)  # An earlier call may have been killed.
        result = run_stage(stage, out / f"{name}.log", min(most_s, left_s))
        if left_s < most_s and result["status"].startswith("over"):
            not_reached[name] = f"no time: stopped after {left_s:.0f} of {most_s:.0f} s"
            continue
        results[name] = result | {"figures": figures(run_folder)}
        for metric, values in results[name]["figures"].items():
            print(f"{metric:<40}", *(f"{value:.4g}" for value in values), flush=True)
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
    names = list(stages(Path()))
    one = parser.add_mutually_exclusive_group()
    form = {"default": [], "choices": names, "metavar": "STAGE", "help": "stages: %(choices)s"}
    one.add_argument("--only", nargs="+", **form)
    for flag, call in {"--first": FIRST, "--second": SECOND}.items():
        one.add_argument(flag, dest="call", action="store_const", const=call, help=str(call[0]))
    parser.add_argument("--budget_s", type=float, help="seconds of all stages, 7200 by default")
    parser.add_argument("--limit_s", type=float, help="deadline of each stage")
    parser.add_argument("--fake", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    out, limit_s = args.out.resolve(), args.limit_s
    chosen, budget_s = args.call or (args.only or names, 7200)
    if args.fake:
        out, limit_s = out / "fake", limit_s or 600
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    if args.fake:
        facts["gpus"] = ["a CPU", "the same CPU"]
    if not facts["gpus"]:
        error = "error: torch sees no CUDA device; give --fake to run the stages on a CPU"
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(facts), flush=True)
    plan = stages(out, args.fake)
    results = earlier_results(out, args.only)
    wanted = {name: plan[name] for name in chosen}
    not_reached = run_all(wanted, results, facts, out, args.budget_s or budget_s, limit_s)
    table = Table(stage="<14", status="<12", seconds=">7.0f", used_mib=">8d", last_line="<10")
    for name, result in results.items():
        table.add({"stage": name} | result)
    for name, reason in not_reached.items():
        table.add({"stage": name, "status": "not reached", "last_line": reason})
    if any(reason.startswith("no time") for reason in not_reached.values()):
        return UNFINISHED
    return sum(r["status"] != "ok" for r in results.values())


if __name__ == "__main__":
    sys.exit(main())
