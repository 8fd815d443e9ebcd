"""What every engine promises that several actors share: the embedded one and SGLang pass the same tests."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal

import pytest
import torch
from test_engine_contract import GREEDY, LONG, Subject, needs_sglang, random_prompts

from rl_core.http import request
from rl_core.sampling.engine import EngineDied
from rl_core.types import SamplingParams

peft = pytest.importorskip("peft")
LORAS = {
    "bob": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "alice": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj"]},
    "carol": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"]},
}
CONFIGS = {name: peft.LoraConfig(**lora).to_dict() for name, lora in LORAS.items()}
NAMES = ["", *LORAS]


class Actors(Subject):
    """With `models` that have the weights which each actor should have; "" has no adapter."""

    def load_first_weights(self) -> None:
        super().load_first_weights()
        self.loaded, self.versions = {}, {}
        for seed, name in enumerate(LORAS):
            self.update_adapter(name, seed)

    def adapter(self, name: str, seed: int) -> dict[str, torch.Tensor]:
        """Random weights, as peft names them."""
        model = peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[name]))
        draw = torch.Generator().manual_seed(seed)
        shapes = {n: p.shape for n, p in peft.get_peft_model_state_dict(model).items()}
        return {n: torch.randn(shape, generator=draw) / 5 for n, shape in shapes.items()}

    def update_adapter(self, name: str, seed: int) -> None:
        self.loaded[name] = self.adapter(name, seed)
        self.versions[name] = self.versions.get(name, 10 * len(self.versions) + 10) + 1
        self.run(self.engine.update(self.loaded[name].items(), self.versions[name], adapter=name))

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        found = {"": self.hf}
        for name, weights in self.loaded.items():
            model = peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[name]))
            peft.set_peft_model_state_dict(model, weights)
            found[name] = model.merge_and_unload().eval()
        return found

    def speak(self, requests, params=GREEDY):
        """Completions of (adapter, prompt) pairs, all at once."""

        async def gather():
            asked = (self.engine.generate(p, params, seed=i, adapter=name) for i, (name, p) in enumerate(requests))
            return await asyncio.gather(*asked)

        return self.run(gather())

    def check_all(self, requests, completions, temperature: float = 1.0) -> None:
        base, models = self.hf, self.models
        for (name, prompt), completion in zip(requests, completions, strict=True):
            self.hf = models[name]
            self.check(prompt, completion, temperature)
            assert set(completion.policy_versions) == {self.versions.get(name, self.version)}
        self.hf = base


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=needs_sglang)])
def subject(request, tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "engine.log"
    found = Actors(request.param, tiny_model, log, CONFIGS)
    yield found
    found.run(found.engine.close())
    found.loop.close()


@pytest.fixture
def fresh(subject):
    subject.load_first_weights()
    return subject


# The same prompts for all, so that keys and values of one would do harm to the others.
REQUESTS = [(name, prompt) for prompt in random_prompts(5) for name in NAMES]


def test_requests_of_all_actors_in_one_batch_have_each_its_own_models_logprobs(fresh):
    for params in (GREEDY, SamplingParams(max_tokens=12, temperature=0.7)):
        found = fresh.speak(REQUESTS, params)
        fresh.check_all(REQUESTS, found, params.temperature or 1.0)
        told = {tuple(round(x, 2) for x in c.logprobs) for c in found[:4]}
        assert len(told) == 4, "the adapters are too weak to be told apart"


def test_an_update_of_one_adapter_leaves_the_others_and_the_weights(fresh):
    before = fresh.speak(REQUESTS)
    for seed in (7, 8):
        fresh.update_adapter("alice", seed)
        after = fresh.speak(REQUESTS)
        fresh.check_all(REQUESTS, after)
        for (name, _), old, new in zip(REQUESTS, before, after, strict=True):
            assert (new.logprobs == pytest.approx(old.logprobs, abs=1e-5)) == (name != "alice")
    assert fresh.engine.version == fresh.version
    if fresh.kind == "sglang":  # older versions are gone
        server = fresh.engine.server
        _, models = fresh.run(request(f"{server.url}/v1/models", b"", server.headers, "GET"))
        assert len(json.loads(models)["data"]) == 1 + len(LORAS)


def test_new_weights_keep_the_adapters_beside_them(fresh):
    fresh.change()
    fresh.update()
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))


def test_adapters_stay_while_it_sleeps_and_come_while_it_sleeps(fresh):
    fresh.run(fresh.engine.sleep())
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))
    fresh.run(fresh.engine.sleep())
    fresh.update_adapter("bob", 9)
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))


def test_a_pause_keeps_each_requests_adapter_and_its_versions(fresh):
    requests = [(name, p) for p in random_prompts(2, seed=8) for name in NAMES]

    async def with_a_pause():
        asked = [fresh.engine.generate(p, LONG, seed=i, adapter=name) for i, (name, p) in enumerate(requests)]
        asked = [asyncio.create_task(coroutine) for coroutine in asked]
        await asyncio.sleep(0.3)
        await fresh.engine.pause()
        await fresh.engine.update(fresh.loaded["alice"].items(), 99, adapter="alice")
        await fresh.engine.resume()
        return await asyncio.gather(*asked)

    found = fresh.run(with_a_pause())
    for (name, _), completion in zip(requests, found, strict=True):
        before = {fresh.versions.get(name, fresh.version)}
        assert set(completion.policy_versions) == before | ({99} if name == "alice" else set())
        completion.newer_versions.clear()
    fresh.check_all(requests, found)  # alice's adapter came again as it was


def test_adapters_that_do_not_fit_are_an_error_and_all_are_taken(fresh):
    def refused(change, text):
        weights, taken = change(dict(fresh.loaded["bob"])), []

        def stream():
            for name, weight in weights.items():
                taken.append(name)
                yield name, weight

        with pytest.raises(ValueError, match=text):
            fresh.run(fresh.engine.update(stream(), 99, adapter="bob"))
        if fresh.kind == "sglang":  # what other ranks wait for
            assert taken == list(weights)

    some = next(iter(fresh.loaded["bob"]))
    refused(lambda w: {n: x for n, x in w.items() if n != some}, "1 weights did not arrive")
    refused(lambda w: {n: x for n, x in w.items() if "down_proj" not in n}, r"did not arrive.*down_proj")
    refused(lambda w: {n.replace("q_proj", "z_proj"): x for n, x in w.items()}, r"z_proj.*did you mean .*_proj")
    refused(lambda w: {n: x[:2] if "lora_A" in n else x for n, x in w.items()}, "its rank is 4")
    with pytest.raises(ValueError, match="no adapter 'bop'; did you mean 'bob'"):
        fresh.speak([("bop", [1])])
    fresh.update_adapter("bob", 3)
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))


def test_a_revived_engine_has_its_weights_and_the_newest_adapters(fresh):
    fresh.change()
    fresh.update()
    fresh.update_adapter("carol", 6)
    if fresh.kind == "sglang":
        os.kill(fresh.engine.server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            fresh.speak(REQUESTS)
    fresh.run(fresh.engine.wake())
    if fresh.kind == "sglang":
        assert fresh.engine.num_restarts == 1
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))
    fresh.update_adapter("carol", 7)
    fresh.check_all(REQUESTS, fresh.speak(REQUESTS))
