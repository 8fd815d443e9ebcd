"""Weights that all learners send again together. Without SGLang: an engine forgets its weights as a
server does that dies, or that sleeps without a copy. With it: tests/engines/test_sglang_again.py.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch
from kit import metrics
from test_golden import TWO

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.options import ENGINES, make_sampler
from rl_core.metrics import Sum
from rl_core.models.loading import load_hf_model
from rl_core.sampling.engine import EmbeddedSpec, EngineDied, WeightOwner
from rl_core.train import main

DIES_AT = (9, 60)  # requests


class ForgetfulEngine(EmbeddedEngine):
    """It has its weights until it sleeps; that of the last rank also dies twice in a rollout."""

    weight_owner = WeightOwner.SERVER

    def __init__(self, spec):
        spec.module = load_hf_model(spec.model, spec.dtype, spec.device)
        spec.embedded = EmbeddedSpec(sampler=make_sampler)
        super().__init__(spec)
        self.name, self.requests = spec.name, []
        self.num_requests = self.num_forgotten = 0
        self.was_updated = self.is_dead = self.has_slept = False

    def forget(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.num_forgotten += 1
        self.lacks_weights, self.is_dead, self.has_slept = True, False, False

    def die(self) -> None:
        self.is_dead = True
        for task in self.requests:
            task.cancel()

    async def generate(self, *args, **more):
        self.num_requests += 1
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last and self.num_requests in DIES_AT:
            self.die()
        if not self.is_dead:
            await self.wake()
        while self.lacks_weights:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self.is_dead:
            raise EngineDied("it is dead")
        self.requests.append(asyncio.ensure_future(super().generate(*args, **more)))
        [result] = await asyncio.gather(self.requests[-1], return_exceptions=True)
        if isinstance(result, BaseException):
            raise EngineDied("it has died") from result
        return result

    async def update(self, *args, **more):
        self.has_slept, self.was_updated = False, True
        await super().update(*args, **more)
        self.lacks_weights = False

    async def wake(self):
        await super().wake()
        if self.is_dead or (self.has_slept and self.was_updated):
            self.forget()

    async def sleep(self):
        await super().sleep()
        # A paused engine continues without a call of wake().
        self.has_slept = not self._active

    async def take_metrics(self):
        result, self.num_forgotten = self.num_forgotten, 0
        return await super().take_metrics() | {f"rollout/{self.name}/engine_restarts": Sum(result)}


def forgetful_run() -> None:
    ENGINES["sglang"] = lambda: ForgetfulEngine
    sys.exit(main(sys.argv[1:]))


def rows_of(out) -> list[dict]:
    """Metrics of steps in which no engine sampled with wrong weights."""
    rows = [row for row in metrics(out) if "time/learn_s" in row]
    for row in rows:
        for name, value in row.items():
            assert not name.endswith("/failed") or value == 0, "no group is lost"
            assert not name.endswith("canary_max_diff") or value < 1e-3
    return rows


@pytest.mark.parametrize(
    "num_ranks, more",
    [
        (2, ""),
        (2, "--max_staleness 1"),
        (3, "--rollout_ranks 1"),
        (3, "--rollout_ranks 1 --max_staleness 1"),
    ],
)
def test_ranks_send_weights_again_wherever_an_engine_lacks_them(
    num_ranks, more, torchrun, places, tmp_path
):
    """It dies in a rollout, and those that sleep for a save or an update forget too."""
    out = tmp_path / "run"
    arguments = f"--model {places['model']} --env_path {places['dir']}/letters.py --max_tokens 10"
    arguments += " --max_prompt_tokens 24 --tasks_per_step 4 --group_size 4 --num_steps 4"
    arguments += (
        f" --optim.lr 1e-2 --engine sglang --save_every 2 --eval_every 2 --out {out} {more}"
    )
    torchrun(num_ranks, __file__, *arguments.split())
    rows = rows_of(out)
    assert len(rows) == 4
    assert sum(row["rollout/policy/engine_restarts"] for row in rows) >= len(DIES_AT)
    if "staleness" not in more:
        assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6


def test_engines_of_two_actors_on_several_ranks_get_their_weights_again(torchrun, places, tmp_path):
    """Each learner in its turn sends the other's engine to sleep, which forgets."""
    out = tmp_path / "run"
    arguments = TWO.format(**places) + " --num_steps 3 --optim.lr 1e-2 --engine sglang"
    arguments += f" --rollout.engines_awake all --out {out}"
    torchrun(2, __file__, *arguments.split())
    rows = rows_of(out)
    assert len(rows) == 3
    for name in ("bob", "alice"):
        assert max(row[f"learn/{name}/mismatch_kl_nats"] for row in rows) < 1e-6
    assert min(row["rollout/bob/engine_restarts"] for row in rows) >= 2, "in each step"


if __name__ == "__main__":
    forgetful_run()
