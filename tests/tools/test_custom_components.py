"""train(loss=..., optimizer=..., engine=..., plugins=...): a script's own, against the flags' and
torch's."""

from __future__ import annotations

import json

import pytest
import torch
from kit import weights

from rl_core import Config, train
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.plugin import Plugin
from rl_core.sampling.engine import Engine
from rl_core.types import Completion, RunError

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


def test_the_formula_of_the_default_gives_its_weights(weights_of):
    flags = {"learner": {"epochs": 2}, "algo": {"aggregation": "sequence"}}
    assert_equal(weights_of("own", flags, loss=ppo_clip), weights_of("flags", flags))


def test_another_loss_gives_other_weights(weights_of):
    ours = weights_of("own", {}, loss=lambda logprobs, advantages: -2 * advantages * logprobs)
    default = weights_of("flags", {})
    assert any(not torch.equal(ours[name], default[name]) for name in default)


def adamw(named, optim):
    return torch.optim.AdamW(
        named, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0, fused=True
    )


def test_an_optimizer_by_hand_gives_the_weights_of_the_flag_resumed_too(weights_of):
    expected = weights_of("flags", {}, num_steps=3)
    weights_of("cut", {}, num_steps=1, optimizer=adamw)
    assert_equal(weights_of("cut", {}, num_steps=3, resume=True, optimizer=adamw), expected)


def test_a_class_of_torch_gets_the_learning_rate(weights_of):
    flags = {"optim": {"lr": 0.1, "name": "sgd", "betas": (0.0, 0.0)}}
    ours = weights_of("own", {"optim": {"lr": 0.1}}, optimizer=torch.optim.SGD)
    assert_equal(ours, weights_of("flags", flags))


def sgd_of(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.parametrize(
    "parts, output",
    [
        ({"loss": lambda logprob: logprob}, "function of logprobs,.*missing .* 'logprob'"),
        ({"loss": 3}, "must be a function of logprobs"),
        ({"loss": lambda ref_logprobs: ref_logprobs}, "there is no reference model"),
        ({"loss": lambda logprobs: logprobs.mean()}, "neither mean nor sum"),
        ({"optimizer": lambda named: named}, "must be a function of .named_parameters"),
        ({"loss": ppo_clip, "nproc": 2}, "optimizer and engine are of this process"),
        ({"loss": lambda advantages: advantages * 0}, "losses without a gradient"),
        ({"optimizer": dict}, "a class of torch.optim: no signature"),
        ({"optimizer": lambda named, optim: sgd_of(p for _, p in named)}, "parameter ''"),
    ],
)
def test_what_does_not_fit_is_refused(weights_of, parts, output):
    with pytest.raises(ValueError, match=output):
        weights_of("run", {}, **parts)


class Counting(EmbeddedEngine):
    num_asked = 0

    async def generate(self, prompt_ids, params, **options):
        Counting.num_asked += 1
        return await super().generate(prompt_ids, params, **options)


class Whole(Engine):
    """Reads every token again for each new one, by the model's own forward."""

    def __init__(self, spec):
        self.model, self.version, self.capacity = spec.module, 0, spec.num_slots
        self.model.set_attn_implementation("sdpa")  # the learner's packs sequences

    async def generate(self, prompt_ids, params, *, seed, session="", adapter="", unfinished=None):
        reply = Completion(policy_version=self.version, finish_reason="length")
        for _ in range(params.max_tokens):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt_ids + reply.token_ids])).logits
            logprobs = logits[0, -1].log_softmax(-1)
            reply.token_ids.append((seed + len(reply.token_ids)) % len(logprobs))
            reply.logprobs.append(float(logprobs[reply.token_ids[-1]]))
        reply.text = "a" * (seed % 5)
        return reply

    async def update(self, weights, version, *, adapter=""):
        self.model.load_state_dict(dict(weights), strict=False)
        self.version = version


class Frozen(Whole):
    async def update(self, weights, version, *, adapter=""):
        list(weights)


def test_the_default_engine_given_as_a_class_gives_the_default_weights(weights_of):
    assert_equal(weights_of("own", {}, engine=Counting), weights_of("flags", {}))
    assert Counting.num_asked >= 2 * 2 * 4


def test_an_engine_from_nothing_samples_with_the_learners_weights(weights_of):
    """The canary compares its logprobs with the learner's, after the last update too."""
    weights_of("own", {"canary_tolerance": 1e-5}, engine=Whole)


def test_an_engine_that_drops_new_weights_is_found(weights_of):
    with pytest.raises(RunError, match="does not sample with its learner's weights"):
        weights_of("own", {"canary_tolerance": 1e-5}, engine=Frozen)


class NoUpdate(Engine):
    async def generate(
        self, prompt_ids, params, *, seed, session="", adapter="", unfinished=None
    ): ...


class Picky(Whole):
    @staticmethod
    def check(config, name, is_planned):
        raise ValueError(f"nothing for {name}")


@pytest.mark.parametrize(
    "engine, flags, output",
    [
        (3, {}, "engine=3 must be a subclass of rl_core.sampling.engine.Engine"),
        (NoUpdate, {}, "NoUpdate: it must override update"),
        (Whole, {"engine": "embedded"}, "the configuration names an engine, too"),
        (Whole, {"rollout_ranks": 1}, "cannot be on other ranks; leave out rollout_ranks"),
        (Whole, {"max_staleness": 1}, r"override pause\(\) and resume"),
        (Whole, {"algorithm": "sft"}, "sample nothing; leave it out"),
        (Picky, {}, "nothing for policy"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(weights_of, engine, flags, output):
    with pytest.raises(ValueError, match=output):
        weights_of("run", flags, engine=engine)


class Seen:
    """No Plugin: a plain object whose hooks may be def."""

    def __init__(self):
        self.steps, self.files = [], "not a hook"

    def before_step(self, step):
        self.steps.append(step)

    async def after_step(self, step, metrics):
        self.steps.append(metrics["rollout/policy/reward_mean"])

    def state(self):
        return {"seen": len(self.steps)}


def test_a_plain_object_has_the_hooks_that_it_needs(weights_of, tmp_path):
    seen = Seen()
    weights_of("own", {}, plugins=[seen])
    lines = (tmp_path / "own/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["rollout/policy/reward_mean"] for line in lines]
    assert seen.steps == [0, rewards[0], 1, rewards[1]]
    state = (tmp_path / "own/checkpoints/step_000002/state.json").read_text()
    assert json.loads(state)["seen"] == 4


class AsObject:
    async def after_rollout(self, step, groups):
        raise KeyError("on purpose")


class AsClass(Plugin, AsObject):
    after_rollout = AsObject.after_rollout


@pytest.mark.parametrize(
    "plugin, output",
    [
        (AsObject(), r"AsObject.after_rollout\(\) of plugins raised KeyError: 'on purpose'"),
        (AsClass, r"AsClass.after_rollout\(\) of plugins raised KeyError: 'on purpose'"),
        (lambda trainer: AsClass(trainer), r"AsClass.after_rollout\(\) of plugins raised KeyError"),
    ],
)
def test_a_hook_that_fails_is_told_by_name(weights_of, plugin, output):
    with pytest.raises(RunError, match=output):
        weights_of("run", {}, plugins=[plugin])


def with_methods(base=object, **methods):
    return type("Mine", (base,), methods)


def nothing(self): ...


@pytest.mark.parametrize(
    "plugin, output",
    [
        (with_methods(after_steps=nothing)(), "after_steps.* is not a hook"),
        (with_methods(Plugin, on_setp=nothing), "on_setp.* is not a hook"),
        (with_methods(after_backward=nothing, close=nothing)(), "after_backward.* is not a hook"),
        (with_methods(help=nothing)(), "plugins has <.*Mine.*>, which has no hook: load, "),
        (lambda trainer: None, "plugins has None, which has no hook"),
    ],
)
def test_a_plugin_that_would_never_be_called_is_refused(weights_of, plugin, output):
    with pytest.raises(ValueError, match=output):
        weights_of("run", {}, plugins=[plugin])
