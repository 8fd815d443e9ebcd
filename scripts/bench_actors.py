"""What several actors cost beyond what they sample and learn: conversations over the bare engines, two learners over one.

    python scripts/bench_actors.py                      all parts; --only conversations agents memory
    python scripts/bench_actors.py --quick --out result.json

conversations  Episodes of three actors, 256 at once, six turns in an order of their own; hooks wait at random, and some raise
               or hang until their deadline. The engines then answer the same requests without anything around them, as the
               same conversations, and in any order: what they need over what the episodes needed.
agents         One run in which two models learn, and two runs of one, back to back: the same prompts, lengths and updates.
memory         What a second model that learns adds to the process at its peak, beside the bytes that were to be expected:
               16 for each weight (weight, gradient, two moments of AdamW) and the engine's keys and values.

One torch thread. CPU seconds are of the process, all its threads; wall time hangs on what else the machine does. Lengths are
forced, so that all sides sample equally many tokens. agents and memory measure each run in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import make_tiny_model

from rl_core.build import build, make_plan
from rl_core.command_line import parse_config
from rl_core.config import RolloutConfig
from rl_core.data.chat import load_chat
from rl_core.data.tasks import make_task
from rl_core.distributed import Ranks, close_ranks, init_ranks
from rl_core.loop import train
from rl_core.sampling.actor import Actor
from rl_core.sampling.embedded_engine import EmbeddedEngine
from rl_core.sampling.env import load_env
from rl_core.sampling.rollout import RolloutPlan, rollout
from rl_core.types import Completion, SamplingParams, counter_seed

HERE = Path(__file__).resolve().parent
NAMES = ("ann", "ben", "cleo")
MEAN, LONGEST = 24, 96  # tokens of a turn
GROUP_SIZE = 4
HOOK_TIMEOUT_S = 5.0

TALK = '''
import asyncio, random, time, zlib

turns = "ann -> ben -> cleo -> (ann/ben/cleo)*3"
name_prefix = True
FAILURES = ("interact raises", "interact hangs", "an async interact hangs", "the reward raises", "the reward is nan")

def failure(messages):
    """What goes wrong in this episode, by its first turn: in 5 of 32 something does."""
    kind = zlib.crc32(next(m["content"] for m in messages if m["role"] == "assistant").encode()) % 32
    return FAILURES[kind] if kind < len(FAILURES) else ""

def interact(messages, task):
    said = sum(m["role"] == "assistant" for m in messages)
    wrong = failure(messages) if said == 2 else ""
    if wrong == "interact hangs":
        time.sleep(3600)
    if wrong == "interact raises":
        raise ValueError("it was to fail")
    return wait(3600 if wrong == "an async interact hangs" else 0.05 * random.Random(f"{task.id}/{said}").random())

async def wait(seconds):
    await asyncio.sleep(seconds)

async def reward_fn(messages):
    wrong = failure(messages)
    await asyncio.sleep(0.01)
    if wrong == "the reward raises":
        raise KeyError("it was to fail")
    return float("nan") if wrong == "the reward is nan" else 1.0
'''
# What a failed episode must say.
REASONS = {
    "interact raises": r"interact\(\) failed .* ValueError: it was to fail",
    "interact hangs": r"interact\(\) ran longer than",
    "an async interact hangs": r"interact\(\) ran longer than",
    "the reward raises": r"reward_fn\(\) failed .* KeyError",
    "the reward is nan": r"reward_fn\(\) returned nan|is nan",
}


@dataclass(kw_only=True, slots=True)
class Asked:
    """A request, and how many tokens were its answer."""

    actor: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    session: str
    num_tokens: int = 0


@dataclass(kw_only=True)
class Recorder:
    """Stands between actors and engines: forces lengths, and notes what each episode, which is a task of the loop, asked."""

    engines: dict[str, EmbeddedEngine]
    episodes: dict[asyncio.Task, list[Asked]] = field(default_factory=dict)
    first_texts: dict[str, str] = field(default_factory=dict)  # by the start of the session's name: group/index

    def listen(self, name: str):
        generate = self.engines[name].generate

        async def generate_at_length(prompt_ids, params, *, seed, session="", adapter=""):
            params = dataclasses.replace(params, max_tokens=forced_length(seed), stop_token_ids=())
            asked = Asked(actor=name, prompt_ids=prompt_ids, params=params, seed=seed, session=session)
            self.episodes.setdefault(asyncio.current_task(), []).append(asked)
            completion: Completion = await generate(prompt_ids, params, seed=seed, session=session)
            asked.num_tokens = len(completion.token_ids)
            self.first_texts.setdefault(session.rsplit("/", 2)[0], completion.text)
            return dataclasses.replace(completion, finish_reason="stop")

        return generate_at_length


def forced_length(seed: int) -> int:
    """Exponential about the mean: many short turns and a tail."""
    drawn = random.Random(counter_seed(seed, "length")).expovariate(1 / MEAN)
    return max(2, min(LONGEST, round(drawn)))


@dataclass(kw_only=True, slots=True)
class Clock:
    """Seconds since it was made."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self) -> dict[str, float]:
        return {"cpu_s": time.process_time() - self.cpu, "wall_s": time.perf_counter() - self.wall}


def load_engines(args: argparse.Namespace, folder: Path) -> dict[str, EmbeddedEngine]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engines = {}
    for seed, name in enumerate(NAMES):
        path = folder / name
        make_tiny_model(path, args.hidden, args.layers, 4, seed)
        engines[name] = EmbeddedEngine(
            AutoModelForCausalLM.from_pretrained(path), num_slots=args.concurrent, max_context_tokens=1024,
            tokenizer=AutoTokenizer.from_pretrained(path),
        )  # fmt: skip
    return engines


def measure_conversations(args: argparse.Namespace, folder: Path) -> dict:
    (folder / "talk.py").write_text(TALK)
    engines = load_engines(args, folder)
    one_round(args, folder, engines, "warm-up", 8 * GROUP_SIZE)
    rounds = [one_round(args, folder, engines, str(number), args.episodes) for number in range(args.rounds)]
    ratios = {}
    for unit in ("cpu_s", "wall_s"):
        for side in ("same conversations", "any order"):
            ratios[f"{side}, {unit}"] = statistics.median(r[side][unit] / r["episodes"][unit] for r in rounds)
    return {"rounds": rounds, "engine_over_episodes": ratios}


def one_round(args: argparse.Namespace, folder: Path, engines: dict[str, EmbeddedEngine], name: str, num: int) -> dict:
    env = load_env(str(folder / "talk.py"), hook_timeout_s=HOOK_TIMEOUT_S)
    recorder = Recorder(engines=engines)
    found, spent = asyncio.run(talk(args, env, recorder, folder, name, num))
    failure = env.hooks["interact"].function.__globals__["failure"]
    statuses = check_outcome(found, failure, recorder.first_texts, num)
    asked = list(recorder.episodes.values())
    tokens = sum(a.num_tokens for episode in asked for a in episode)
    result = {"episodes": spent, "tokens": tokens, "requests": sum(map(len, asked)), "statuses": statuses}
    result["same conversations"] = asyncio.run(answer(engines, asked, args.concurrent))
    alone = [[dataclasses.replace(a, session="")] for episode in asked for a in episode]
    result["any order"] = asyncio.run(answer(engines, alone, args.concurrent))
    return result


async def talk(args, env, recorder: Recorder, folder: Path, number: str, num: int) -> tuple[list, dict]:
    actors, originals = {}, {}
    for name, engine in recorder.engines.items():
        chat = load_chat(str(folder / name))
        originals[name], engine.generate = engine.generate, recorder.listen(name)
        actors[name] = Actor(
            name=name, engine=engine, chat=chat, stop_token_ids=chat.stop_token_ids, max_turns=env.max_turns,
            max_context_tokens=1024,
        )  # fmt: skip
    tasks = [make_task({"prompt": f"Talk about {n}."}, n, env.name, "train") for n in range(num // GROUP_SIZE)]
    plan = RolloutPlan(
        name=f"train/{number}", tasks=tasks, group_size=GROUP_SIZE, params=SamplingParams(max_tokens=LONGEST), seed=0
    )
    config = RolloutConfig(max_concurrent=args.concurrent, max_failed_fraction=1.0)
    clock = Clock()
    found = await rollout(env, actors, plan, config, Ranks(rank=0, size=1, device=torch.device("cpu"), store=None))
    spent = clock.read()
    for name, engine in recorder.engines.items():
        engine.generate = originals[name]
        await engine.sleep()
    return found, spent


def check_outcome(found: list, failure, first_texts: dict[str, str], num_episodes: int) -> dict[str, int]:
    """How many episodes ended in which way. Each failed exactly where it was to, says why, and has no reward."""
    counts: Counter[str] = Counter()
    for key in {(t.group_id, t.index) for t in found}:
        episode = [t for t in found if (t.group_id, t.index) == key]
        kind = failure([{"role": "assistant", "content": first_texts[f"{key[0]}/{key[1]}"]}])
        for t in episode:
            if kind:
                assert (t.status, t.reward) == ("failed", None) and re.search(REASONS[kind], t.error), (kind, t.error)
            else:
                assert (t.status, t.reward) == ("ok", 1.0), (t.status, t.error)
        counts[kind or "scored"] += 1
    assert counts.total() == num_episodes, counts
    return dict(counts)


async def answer(engines: dict[str, EmbeddedEngine], conversations: list[list[Asked]], concurrent: int) -> dict:
    """Seconds that the engines need for the requests, so many conversations at once."""
    waiting = iter(conversations)

    async def work() -> None:
        for conversation in waiting:
            for a in conversation:
                completion = await engines[a.actor].generate(a.prompt_ids, a.params, seed=a.seed, session=a.session)
                assert len(completion.token_ids) == a.num_tokens
            for a in conversation:
                engines[a.actor].end_session(a.session)

    clock = Clock()
    await asyncio.gather(*(work() for _ in range(concurrent)))
    spent = clock.read()
    for engine in engines.values():
        await engine.sleep()
    return spent


SIDE_BY_SIDE = """
import asyncio, zlib

async def rollout(task, actors):
    replies = await asyncio.gather(*(actor.respond(task.messages) for actor in actors.values()))
    return [reply.trajectory(zlib.crc32(reply.text.encode()) % 1000 / 1000) for reply in replies]
"""


def run_agents(job: dict[str, Any]) -> dict:
    """One run in this process: by step its CPU and wall seconds, the tokens that were trained on, and the peak memory."""
    folder = Path(job["folder"])
    models = [f"--actors.{name}.model={folder / name}" for name in job["names"]]
    out = folder / f"run_{'_'.join(job['names'])}_{job['number']}"
    flags = {
        "env_path": folder / "side_by_side.py", "data.train": folder / "rows.jsonl", "out": out, "data.shuffle": "false",
        "num_steps": job["steps"], "tasks_per_step": job["tasks"], "group_size": 8, "max_tokens": job["longest"],
        "max_prompt_tokens": 64, "optim.lr": 1e-4, "rollout.save": "false", "learner.offload": job["offload"],
        "learner.microbatch_tokens": 2048,
    }  # fmt: skip
    config = parse_config([*models, *(f"--{name}={value}" for name, value in flags.items())])
    ranks = init_ranks(config.timeout_s)
    run = build(make_plan(config), ranks)
    for engine in run.engines.values():
        engine.generate = at_length(engine.generate, job["longest"])
    steps, marks, write = [], Clock(), run.log.write

    def note(step, metrics):
        nonlocal marks
        values = write(step, metrics)
        if "pack/tokens" in metrics:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            steps.append(marks.read() | {"tokens": values["pack/tokens"], "peak_mib": peak_kib / 1024})
        marks = Clock()
        return values

    run.log.write, run.log.progress = note, lambda step, values: None
    asyncio.run(train(run))
    close_ranks(ranks)
    parameters = sum(p.numel() for p in run.learners[job["names"][0]].policy.parameters())
    return {"steps": steps, "peak_mib": steps[-1]["peak_mib"], "weights": parameters}


def at_length(generate, longest: int):
    async def generate_at_length(prompt_ids, params, *, seed, session="", adapter=""):
        params = dataclasses.replace(params, max_tokens=min(longest, forced_length(seed)), stop_token_ids=())
        return dataclasses.replace(await generate(prompt_ids, params, seed=seed, session=session), finish_reason="stop")

    return generate_at_length


def run_apart(job: dict[str, Any]) -> dict:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    clock = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(HERE / "bench_actors.py"), "--job", json.dumps(job)],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the run of {job['names']} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) | {"process_wall_s": time.perf_counter() - clock}


def make_job(args: argparse.Namespace, folder: Path, names: list[str], number: int, **changes: Any) -> dict[str, Any]:
    job = {"folder": str(folder), "names": names, "number": number, "steps": args.steps + 1, "tasks": args.tasks}
    return job | {"longest": LONGEST, "offload": "none"} | changes


def prepare_agents(folder: Path, hidden: int, layers: int, num_rows: int) -> None:
    for seed, name in enumerate(NAMES[:2]):
        make_tiny_model(folder / name, hidden, layers, 4, seed)
    (folder / "side_by_side.py").write_text(SIDE_BY_SIDE)
    rows = [{"prompt": f"{n:05d} " + "a prompt of some letters "[n % 20 :]} for n in range(num_rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_agents(args: argparse.Namespace, folder: Path) -> dict:
    prepare_agents(folder, args.hidden, args.layers, (args.steps + 1) * args.tasks)
    rounds = []
    for number in range(args.rounds):
        both = total([run_apart(make_job(args, folder, ["ann", "ben"], number))])
        rounds.append({"both": both, "one after the other": total([
            run_apart(make_job(args, folder, [name], number)) for name in NAMES[:2]
        ])})  # fmt: skip
        assert both["tokens"] == rounds[-1]["one after the other"]["tokens"], rounds[-1]
    ratios = {
        unit: statistics.median(r["one after the other"][unit] / r["both"][unit] for r in rounds)
        for unit in ("cpu_s", "wall_s", "process_wall_s")
    }
    return {"rounds": rounds, "throughput_of_both": ratios}


def total(runs: list[dict]) -> dict[str, float]:
    """Sums over runs of their steps after the first, which warms up."""
    found = {key: sum(step[key] for run in runs for step in run["steps"][1:]) for key in ("cpu_s", "wall_s", "tokens")}
    return found | {"process_wall_s": sum(run["process_wall_s"] for run in runs)}


def measure_memory(args: argparse.Namespace, folder: Path) -> dict:
    prepare_agents(folder, args.memory_hidden, args.memory_layers, 3)
    found = {}
    for offload in ("none", "phase"):
        small = {"offload": offload, "steps": 3, "tasks": 1, "longest": 16}
        one, both = (
            run_apart(make_job(args, folder, names, n, **small))
            for n, names in enumerate([["ann"], ["ann", "ben"]], 2 * len(found))
        )
        mib = one["weights"] / 2**20
        found[offload] = {
            "weights": one["weights"],
            "one_mib": one["peak_mib"],
            "both_mib": both["peak_mib"],
            "growth_mib": both["peak_mib"] - one["peak_mib"],
            "weights_and_optimizer_mib": 12 * mib,
        }
    return found


def report(results: dict[str, dict]) -> str:
    lines = []
    if found := results.get("conversations"):
        lines += [f"{'':>20} {'CPU s':>8} {'wall s':>8} {'tokens/CPU s':>13} {'tokens/wall s':>14}"]
        for n, r in enumerate(found["rounds"]):
            lines.append(f"round {n}: {r['requests']} requests, {r['tokens']} tokens, {r['statuses']}")
            lines += [row(side, r[side], r["tokens"]) for side in ("episodes", "same conversations", "any order")]
        lines += [f"engine alone / episodes, {k}: {v:.3f}" for k, v in found["engine_over_episodes"].items()]
    if found := results.get("agents"):
        lines += [f"{'':>20} {'CPU s':>8} {'wall s':>8} {'tokens/CPU s':>13} {'tokens/wall s':>14}"]
        for r in found["rounds"]:
            lines += [row(side, spent, spent["tokens"]) for side, spent in r.items()]
        lines += [f"throughput of both in one run / one after the other, {k}: {v:.3f}" for k, v in
                  found["throughput_of_both"].items()]  # fmt: skip
    for offload, m in results.get("memory", {}).items():
        lines.append(
            f"peak with --learner.offload {offload}: one {m['one_mib']:.0f} MiB, both {m['both_mib']:.0f}: "
            f"{m['growth_mib']:.0f} more; weights and AdamW's state are {m['weights_and_optimizer_mib']:.0f}"
        )
    return "\n".join(lines)


def row(side: str, spent: dict[str, float], tokens: float) -> str:
    cpu, wall = spent["cpu_s"], spent["wall_s"]
    return f"{side:>20} {cpu:>8.2f} {wall:>8.2f} {tokens / cpu:>13.0f} {tokens / wall:>14.0f}"


PARTS = {"conversations": measure_conversations, "agents": measure_agents, "memory": measure_memory}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument(
        "--hidden", type=int, default=128, help="width of the models; 128 with 3 layers is 0.6M weights"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--memory_hidden", type=int, default=512, help="of those whose memory is measured; 25M weights")
    parser.add_argument("--memory_layers", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=512, help="of a round")
    parser.add_argument("--concurrent", type=int, default=256, help="episodes at once")
    parser.add_argument("--tasks", type=int, default=16, help="agents: tasks of a step, with 8 episodes each")
    parser.add_argument("--steps", type=int, default=4, help="agents: that count, after one that warms up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        small = {"hidden": 64, "layers": 2, "memory_hidden": 64, "memory_layers": 2, "episodes": 32, "concurrent": 32}
        vars(args).update(small | {"tasks": 2, "steps": 1, "rounds": 1})
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    if args.job:
        print("\n" + json.dumps(run_agents(json.loads(args.job))))
        return
    results = {}
    for part in args.only:
        print(part, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results[part] = PARTS[part](args, Path(folder))
    print(report(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
