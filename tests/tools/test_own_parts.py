"""train(loss=..., optimizer=...): a script's own, against the flags' and torch's."""

from __future__ import annotations

import pytest
import torch
from kit import weights

from rl_core import Config, train

ROWS = [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]
SIZES = {"tasks_per_step": 2, "group_size": 4, "max_tokens": 8, "max_prompt_tokens": 40}


async def reward_fn(completion):
    return sum(map(ord, completion)) / 1000


@pytest.fixture
def weights_of(tiny_model, tmp_path):
    """weights_of("run", flags, **parts) -> the weights of a tiny run."""

    def made(name: str, flags: dict, num_steps: int = 2, resume: bool = False, **parts):
        flags = {"optim": {"lr": 1e-3}} | SIZES | flags
        config = Config(model=str(tiny_model), out=str(tmp_path / name), **flags)
        config.num_steps, config.resume = num_steps, resume
        return weights(train(config, env=reward_fn, data=ROWS, **parts).out)

    return made


def assert_equal(one: dict, other: dict) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one | other)


def ppo_clip(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_formula_of_the_default_gives_its_weights(weights_of, aggregation):
    flags = {"learner": {"epochs": 2}, "algo": {"aggregation": aggregation}}
    assert_equal(weights_of("own", flags, loss=ppo_clip), weights_of("flags", flags))


def test_another_loss_gives_other_weights(weights_of):
    own = weights_of("own", {}, loss=lambda logprobs, advantages: -2 * advantages * logprobs)
    default = weights_of("flags", {})
    assert any(not torch.equal(own[name], default[name]) for name in default)


def adamw(named, optim):
    return torch.optim.AdamW(
        named, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0, fused=True
    )


def test_an_optimizer_by_hand_gives_the_weights_of_the_flag_resumed_too(weights_of):
    expected = weights_of("flags", {}, num_steps=3)
    assert_equal(weights_of("own", {}, num_steps=3, optimizer=adamw), expected)
    weights_of("cut", {}, num_steps=1, optimizer=adamw)
    assert_equal(weights_of("cut", {}, num_steps=3, resume=True, optimizer=adamw), expected)


def test_a_class_of_torch_gets_the_learning_rate(weights_of):
    flags = {"optim": {"lr": 0.1, "name": "sgd", "betas": (0.0, 0.0)}}
    own = weights_of("own", {"optim": {"lr": 0.1}}, optimizer=torch.optim.SGD)
    assert_equal(own, weights_of("flags", flags))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"loss": lambda logprob: logprob}, "names 'logprob'.*did you mean 'logprobs'"),
        ({"loss": 3}, "must be a function of logprobs"),
        ({"loss": lambda ref_logprobs: ref_logprobs}, "there is no reference model"),
        ({"loss": lambda logprobs: logprobs.mean()}, "neither mean nor sum"),
        ({"optimizer": lambda named: named}, "must be a class of torch.optim, or a function"),
        ({"optimizer": "adam"}, "must be a class of torch.optim"),
        ({"optimizer": lambda named, optim: 3}, "must return a torch.optim.Optimizer"),
        ({"loss": ppo_clip, "nproc": 2}, "loss and optimizer are of this process"),
    ],
)
def test_what_does_not_fit_is_refused(weights_of, parts, said):
    with pytest.raises(ValueError, match=said):
        weights_of("run", {}, **parts)
