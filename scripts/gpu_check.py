"""Every GPU test and benchmark of the project in one command: a table on the terminal, JSON and logs in a folder.

    python scripts/gpu_check.py --out gpu_check            all of it, an hour at most
    python scripts/gpu_check.py --out gpu_check --only tests logprobs

Needs torch, triton, transformers and peft alone. Each stage is a process of its own with a deadline; one that fails does not
stop the others. The exit status is the number of stages that failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ["torch", "triton", "transformers", "peft", "bitsandbytes", "flash-attn", "liger-kernel", "sglang"]


def stages(out: Path) -> dict[str, tuple[int, list[str | Path]]]:
    """Name -> (deadline in seconds, arguments of python)."""
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junit-xml={out / 'tests.xml'}"]
    scripts = ROOT / "scripts"
    return {
        "tests": (900, [*tests, str(ROOT / "tests")]),
        "logprobs": (600, [scripts / "bench_logprobs.py", "--device", "cuda", "--out", out / "logprobs.json"]),
        "memory": (600, [scripts / "bench_memory.py", "--device", "cuda", "--out", out / "memory.json"]),
        "sync": (600, [scripts / "bench_sync.py", "--out", out / "sync.json"]),
        "learner": (900, [scripts / "bench_learner.py", "--out", out / "learner.json"]),
    }


def machine() -> dict:
    import torch

    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in PACKAGES}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{g.name}, {g.total_memory / (1 << 30):.0f} GiB" for g in gpus]
    when = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], "cuda": torch.version.cuda}
    return when | {"gpus": names, "packages": found}


def run_stage(arguments: list, limit_s: int, log: Path) -> dict:
    """How it ended. What it prints goes to the terminal and to the log; at the deadline it and its children are killed."""
    began = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        how = {"cwd": ROOT, "env": env, "stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *map(str, arguments)], **how)
        try:
            status = f"exit {code}" if (code := process.wait(limit_s)) else "ok"
        except subprocess.TimeoutExpired:
            status = f"over {limit_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    print(text, flush=True)
    last = (text.strip().splitlines() or ["printed nothing"])[-1]
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "last_line": last[:200]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument("--only", nargs="+", choices=list(stages(Path())), metavar="STAGE", help="of: %(choices)s")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    if not facts["gpus"]:
        print("error: torch sees no CUDA device here; this checks what needs one", file=sys.stderr)
        return 1
    print(json.dumps(facts), flush=True)
    results = {}
    for name, (limit_s, arguments) in stages(args.out.resolve()).items():
        if args.only and name not in args.only:
            continue
        print(f"== {name}", flush=True)
        results[name] = run_stage(arguments, limit_s, args.out / f"{name}.log")
        (args.out / "summary.json").write_text(json.dumps({"machine": facts, "stages": results}, indent=2))
    print(f"\n{'stage':>10} {'status':>12} {'seconds':>8}  last line")
    for name, r in results.items():
        print(f"{name:>10} {r['status']:>12} {r['seconds']:8.0f}  {r['last_line']}")
    return sum(r["status"] != "ok" for r in results.values())


if __name__ == "__main__":
    sys.exit(main())
