"""Actors with ranks of their own: the same weights as where all share all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import STOP, metrics, run, steps, words
from test_runs import assert_same_weights, lasting

TALK = """
def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

turns = "bob -> judge -> alice -> bob"

async def reward_fn(completion, actor):
    return sum(map(ord, completion)) / (1000 if actor == "bob" else -1000)
"""
# Bob learns, the judge is frozen, Alice learns.
THREE = (
    "--actors.bob.model {model} --actors.alice.model {other} --actors.judge.model {other} "
    "--actors.judge.train false --env_path {env} --max_tokens 12 --max_prompt_tokens 80 "
    "--tasks_per_step 4 --group_size 4 --optim.name sgd --optim.lr 0.05 --timeout_s 60 "
    f"{STOP}"
)


@pytest.fixture(scope="module")
def given(places, tmp_path_factory):
    """given(flags) -> arguments."""
    env = tmp_path_factory.mktemp("places") / "three.py"
    env.write_text(TALK)
    return lambda *flags: words(*(flag.format(env=env, **places) for flag in flags))


SPLIT = {
    "two and two": (4, "--actors.alice.ranks 2-3"),
}


@pytest.mark.parametrize("how", SPLIT)
def test_actors_apart_learn_what_they_learn_together(how, given, tmp_path):
    num_ranks, apart = SPLIT[how]
    together = run(tmp_path / "together", given(THREE, "--num_steps 2"), ranks=2)
    out = run(tmp_path / "apart", given(THREE, "--num_steps 2", apart), ranks=num_ranks)
    assert_same_weights(together, out, atol=1e-5, rtol=1e-5)
