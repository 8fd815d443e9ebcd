"""Adapters of several actors in one engine: each row has its own, none sees another's, and versions are theirs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_embedded_engine import assert_logprobs, load, random_prompts
from transformers import AutoModelForCausalLM

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.types import SamplingParams

peft = pytest.importorskip("peft")
SAMPLED, GREEDY = SamplingParams(max_tokens=12, temperature=1.0), SamplingParams(max_tokens=12, temperature=0)
LORAS = {
    "bob": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "alice": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj"]},
}


def adapted(folder, name: str, seed: int) -> tuple[torch.nn.Module, dict, dict]:
    """(a model of its own with that adapter merged, the adapter's weights and configuration as peft writes them)"""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**LORAS[name]))
    for parameter in (p for n, p in model.named_parameters() if "lora_" in n):
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    weights = {n: w.clone() for n, w in peft.get_peft_model_state_dict(model).items()}
    return model.merge_and_unload().eval(), weights, model.peft_config["default"].to_dict()


def make_engine(folder, **kwargs) -> EmbeddedEngine:
    configs = {name: peft.LoraConfig(**lora).to_dict() for name, lora in LORAS.items()}
    return EmbeddedEngine(load(folder), num_slots=8, max_context_tokens=128, adapters=configs, **kwargs)


def ask(engine, requests, params=GREEDY):
    """Completions of (adapter, prompt) pairs, all at once."""

    async def gather():
        asked = (engine.generate(p, params, seed=i, adapter=name) for i, (name, p) in enumerate(requests))
        return await asyncio.gather(*asked)

    return asyncio.run(gather())


def update(engine, name, weights, config, version=1):
    asyncio.run(engine.update(weights.items(), version, adapter=name))


def test_requests_of_all_actors_in_one_batch_have_each_its_own_models_logprobs(any_model):
    engine, models = make_engine(any_model), {"": load(any_model)}
    for seed, name in enumerate(LORAS):
        models[name], weights, config = adapted(any_model, name, seed)
        update(engine, name, weights, config, version=seed + 5)
    # The same prompts for all, so that keys and values of one would do harm to the others.
    requests = [(name, prompt) for prompt in random_prompts(6) for name in ("bob", "", "alice")]
    for params in (GREEDY, SAMPLED):
        for (name, prompt), completion in zip(requests, ask(engine, requests, params), strict=True):
            assert_logprobs(models[name], prompt, completion)
            assert completion.policy_version == {"": 0, "bob": 5, "alice": 6}[name]
    said = {name: tuple(c.token_ids) for (name, _), c in zip(requests[:3], ask(engine, requests[:3]), strict=True)}
    assert len(set(said.values())) == 3, "the adapters are too weak to be told apart"


def test_an_update_of_one_adapter_leaves_the_others_and_the_weights_bit_for_bit(tiny_model):
    engine = make_engine(tiny_model)
    prompts = random_prompts(5)
    requests = [(name, p) for p in prompts for name in ("bob", "", "alice")]
    for seed, name in enumerate(LORAS):
        update(engine, name, *adapted(tiny_model, name, seed)[1:])
    before = ask(engine, requests)
    model, *new = adapted(tiny_model, "alice", seed=7)
    update(engine, "alice", *new, version=2)
    for (name, prompt), old, now in zip(requests, before, ask(engine, requests), strict=True):
        same = (old.token_ids, old.logprobs) == (now.token_ids, now.logprobs)
        assert same == (name != "alice") and now.policy_version == {"": 0, "bob": 1, "alice": 2}[name]
        if name == "alice":
            assert_logprobs(model, prompt, now)


def test_a_conversation_goes_on_with_its_own_keys_and_values_until_its_own_adapter_changes(tiny_model):
    engine = make_engine(tiny_model)
    models = {}
    for seed, name in enumerate(LORAS):
        models[name], *found = adapted(tiny_model, name, seed)
        update(engine, name, *found)
    [prompt] = random_prompts(1, longest=30)

    async def talk(name: str, update_of: str) -> tuple[int, list[int], object]:
        first = await engine.generate(prompt, GREEDY, seed=0, session="s", adapter="bob")
        if update_of:
            await engine.update(found[0].items(), 2, adapter=update_of)
        longer, before = [*prompt, *first.token_ids, 5, 6], engine.stats["prefill_tokens"]
        second = await engine.generate(longer, GREEDY, seed=1, session="s", adapter=name)
        return engine.stats["prefill_tokens"] - before, longer, second

    new, longer, second = asyncio.run(talk("bob", update_of="alice"))
    assert new < len(longer) / 2
    assert_logprobs(models["bob"], longer, second)
    new, longer, second = asyncio.run(talk("alice", update_of=""))  # who uses another's session has nothing of it
    assert new == len(longer)
    assert_logprobs(models["alice"], longer, second)


def test_what_does_not_fit_is_refused(tiny_model):
    engine = make_engine(tiny_model)
    _, weights, config = adapted(tiny_model, "bob", 0)
    some = next(iter(weights))
    less = {n: w for n, w in weights.items() if n != some}
    with pytest.raises(ValueError, match="1 weights did not arrive"):
        update(engine, "bob", less, config)
    update(engine, "bob", weights, config)
    fewer = {n: w for n, w in weights.items() if "down_proj" not in n}
    with pytest.raises(ValueError, match=r"did not arrive.*down_proj"):
        update(engine, "bob", fewer, config)
    with pytest.raises(ValueError, match=r"z_proj.*did you mean .*_proj"):
        update(engine, "bob", {n.replace("q_proj", "z_proj"): w for n, w in weights.items()}, config)
    with pytest.raises(ValueError, match="its rank is 4"):
        update(engine, "bob", {n: w[:2] if "lora_A" in n else w for n, w in weights.items()}, config)
    with pytest.raises(ValueError, match="no adapter 'bop'; did you mean 'bob'"):
        ask(engine, [("bop", [1])])


def test_a_pause_keeps_each_requests_adapter_and_its_versions(tiny_model):
    engine = make_engine(tiny_model)
    for seed, name in enumerate(LORAS):
        update(engine, name, *adapted(tiny_model, name, seed)[1:])
    requests = [(name, p) for p in random_prompts(3) for name in LORAS]
    want, (_, weights, _) = ask(engine, requests), adapted(tiny_model, "alice", 1)

    async def with_a_pause():
        asked = [asyncio.create_task(engine.generate(p, GREEDY, seed=0, adapter=name)) for name, p in requests]
        while not any(len(r.logprobs) >= 4 for r in engine._active):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.pause()
        await engine.update(weights.items(), 2, adapter="alice")
        await engine.resume()
        return await asyncio.gather(*asked)

    for (name, _), old, new in zip(requests, want, asyncio.run(with_a_pause()), strict=True):
        assert new.token_ids == old.token_ids  # alice's adapter came again as it was
        torch.testing.assert_close(torch.tensor(new.logprobs), torch.tensor(old.logprobs), atol=1e-5, rtol=0)
        assert set(new.policy_versions) == ({1, 2} if name == "alice" else {1})
