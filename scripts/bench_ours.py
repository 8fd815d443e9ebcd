"""rl_core's half of bench_cpu.py: the trainer's own loop, measured from outside."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import bench_work
from bench_work import Measured, Work, completion_length

from rl_core.config import parse_config
from rl_core.distributed import close_ranks
from rl_core.run.plan.plan import make_plan
from rl_core.run.process.joining import init_ranks
from rl_core.run.process.run_to_end import run_to_end
from rl_core.trainer import Trainer

ENVIRONMENT = """
from bench_work import reward_of

def reward_fn(messages):
    return reward_of(messages[-1]["content"])
"""


class Meter:
    """Measures a run by wrapping its log, engine and model."""

    def __init__(self, work: Work, run: Trainer):
        self.work, self.log = work, run.log
        self.calls = self.answers = 0
        self.began = 0.0
        run.log = self
        [learner] = run.learners.values()
        self.shard, learner.shard = learner.shard, self.count_tokens
        for engine in run.device.engines:
            self.generate = engine.generate
            engine.generate = self.generate_at_length
        self.measured = Measured()
        self.measured.begin_step()

    async def generate_at_length(self, prompt_ids, params, **kwargs):
        step, index = divmod(self.calls, bench_work.NUM_SAMPLES)
        self.calls += 1
        if index == 0:
            self.began = time.process_time()
        length = completion_length(self.work, step, index)
        params = dataclasses.replace(params, max_tokens=length, stop_token_ids=())
        completion = await self.generate(prompt_ids, params, **kwargs)
        assert len(completion.token_ids) == length
        self.measured.generated_tokens[-1] += length
        self.answers += 1
        if self.answers % bench_work.NUM_SAMPLES == 0:
            self.measured.generate_cpu_s[-1] += time.process_time() - self.began
        return dataclasses.replace(completion, finish_reason="stop")

    def count_tokens(self, samples):
        minibatches, metrics = self.shard(samples)
        self.measured.learned_tokens[-1] += int(metrics["pack/tokens"].value)
        self.measured.computed_tokens[-1] += int(metrics["pack/computed_tokens"].value)
        return minibatches, metrics

    def write(self, step: int, metrics: dict) -> dict:
        values = self.log.write(step, metrics)
        self.measured.end_step()
        if len(self.measured.cpu_s) < self.work.all_steps:
            self.measured.begin_step()
        return values

    def progress(self, step: int, values: dict) -> None: ...

    def say(self, text: str) -> None: ...


def run_ours(work: Work, setting: dict, model: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(flags(work, setting, model, Path(folder)))
        ranks = init_ranks(config.timeout_s)
        run = Trainer(make_plan(config), ranks)
        meter = Meter(work, run)
        asyncio.run(run_to_end(run))
        close_ranks(ranks)
    return meter.measured


def flags(work: Work, setting: dict, model: str, folder: Path) -> list[str]:
    is_rl = work.algorithm == "grpo"
    per_step = bench_work.NUM_PROMPTS if is_rl else bench_work.NUM_ROWS
    if is_rl:
        rows = [
            {"messages": [bench_work.says("user", prompt)]}
            for prompt in bench_work.rl_prompts(work)
        ]
    else:
        rows = [
            {"messages": [bench_work.says("user", p), bench_work.says("assistant", r)]}
            for p, r in bench_work.sft_rows(work)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "env.py").write_text(ENVIRONMENT)
    values = {
        "algorithm": work.algorithm,
        "model": model,
        "out": folder / "run",
        "data.train": folder / "rows.jsonl",
        "data.shuffle": "false",
        "num_steps": work.all_steps,
        "tasks_per_step": per_step,
        "max_prompt_tokens": work.longest_prompt,
        "max_tokens": work.longest,
        "optim.lr": bench_work.LEARNING_RATE,
        "seed": work.seed,
        "rollout.save": "false",
    }
    if is_rl:
        values |= {"env_path": folder / "env.py", "group_size": bench_work.GROUP_SIZE}
        values |= {"canary_tolerance": 0}  # The canary would sample before the first step.
    return [f"--{name}={value}" for name, value in (values | setting).items()]
