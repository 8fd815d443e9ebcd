"""rl_core's half of bench_cpu.py: the trainer's own loop, measured from outside."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_work
import torch
from bench_work import Measured, Work, completion_length

from rl_core.config import parse_config
from rl_core.distributed import close_ranks, init_ranks
from rl_core.run.plan.plan import make_plan
from rl_core.trainer import Trainer, run_to_end

ENVIRONMENT = """
from bench_work import reward_of

def reward_fn(messages):
    return reward_of(messages[-1]["content"])
"""
TOOL = """
def interact(messages):
    return [{{"role": "tool", "content": {content!r}}}]
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
        for model in learner.models():
            model.forward = self.timed(model.forward)
        learner.optimizer.step = self.timed(learner.optimizer.step)
        torch.Tensor.backward = self.timed(torch.Tensor.backward)
        for engine in run.device.engines:
            self.generate = engine.generate
            engine.generate = self.generate_at_length
        self.measured = Measured()
        self.measured.begin_step()

    def timed(self, call: Callable) -> Callable:
        def call_timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = call(*args, **kwargs)
            self.measured.inside_cpu_s[-1] += time.process_time() - begin
            return result

        return call_timed

    async def generate_at_length(self, prompt_ids, params, **kwargs):
        num_calls = bench_work.NUM_SAMPLES * self.work.turns
        step, index = divmod(self.calls, num_calls)
        self.calls += 1
        if index == 0:
            self.began = time.process_time()
        length = completion_length(self.work, step, index)
        params = dataclasses.replace(params, max_tokens=length, stop_token_ids=())
        completion = await self.generate(prompt_ids, params, **kwargs)
        assert len(completion.token_ids) == length
        self.measured.generated_tokens[-1] += length
        self.answers += 1
        if self.answers % num_calls == 0:
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
    per_step = work.num_prompts if is_rl else bench_work.NUM_ROWS
    if is_rl:
        rows = [
            {"messages": [bench_work.says("user", prompt)]}
            for prompt in bench_work.rl_prompts(work)
        ]
    elif work.algorithm in ("dpo", "rm"):
        names = "prompt", "chosen", "rejected"
        rows = [dict(zip(names, pair, strict=True)) for pair in bench_work.pairs(work)]
        per_step = bench_work.NUM_ROWS // 2
    else:
        rows = [
            {"messages": [bench_work.says("user", p), bench_work.says("assistant", r)]}
            for p, r in bench_work.sft_rows(work)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = TOOL.format(content="x" * work.tool_letters) if work.tool_letters else ""
    (folder / "env.py").write_text(ENVIRONMENT + tool)
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
        values |= {"max_turns": work.turns}
        values |= {"canary_tolerance": 0}  # The canary would sample before the first step.
    return [f"--{name}={value}" for name, value in (values | setting).items()]
