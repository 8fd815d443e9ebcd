"""Promises of every engine: the embedded one and SGLang pass the same tests. Tests of SGLang run
where it is installed: bash scripts/test_sglang.sh."""

from __future__ import annotations

import ast
import asyncio
import copy
import hashlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from kit import ROOT, embedded, engine_spec, make_learner, make_skeleton, wait_until, words
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process

from rl_core.config import parse_config
from rl_core.distributed import Ranks
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.factory import EngineFactory
from rl_core.engines.options import ENGINES
from rl_core.engines.remote import ask
from rl_core.engines.sglang import SGLangEngine
from rl_core.engines.vllm import VLLMEngine
from rl_core.metrics import Sum
from rl_core.run.plan.engine import choose_engine
from rl_core.run.plan.model_checks import make_chats
from rl_core.sampling.engine import (
    RESENT_BY_RANKS,
    STALE_SUFFIX,
    Engine,
    EngineDied,
    EngineSpec,
    WeightOwner,
)
from rl_core.types import Completion, SamplingParams

CONTEXT = 512
GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=400)
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_sglang = pytest.mark.skipif(
    not HAS_SGLANG, reason="SGLang is not installed: bash scripts/test_sglang.sh"
)
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vLLM is not installed: bash scripts/test_vllm.sh"
)
SERVED = {"sglang": SGLangEngine, "vllm": VLLMEngine}
KINDS = [
    "embedded",
    pytest.param("sglang", marks=needs_sglang),
    pytest.param("vllm", marks=needs_vllm),
]
LORAS = {
    "bob": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "alice": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj"]},
    "carol": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"]},
}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(104) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def spec_of(folder: Path, log: Path, skeleton, tokenizer, **more) -> EngineSpec:
    return engine_spec(
        skeleton,
        model=str(folder),
        tokenizer=tokenizer,
        max_context_tokens=CONTEXT,
        log=log,
        **more,
    )


def make_embedded(folder: Path, adapters: dict | None = None) -> EmbeddedEngine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return embedded(
        load(folder), max_context_tokens=CONTEXT, tokenizer=tokenizer, adapters=adapters or {}
    )


def hash_of(value) -> str:
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


@torch.no_grad()
def logprobs_of(model, prompt, token_ids, temperature: float = 1.0) -> torch.Tensor:
    """[L] of each sampled token, by one plain forward."""
    ids = torch.tensor([*prompt, *token_ids], device=model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0].cpu()


class Subject:
    """An engine and, as `hf` and `loaded`, the weights and the adapters that it should have."""

    def __init__(self, kind: str, folder: Path, log: Path):
        self.kind, self.folder, self.version, self.versions = kind, folder, 0, {}
        # One loop for all tests, in which the server's engine waits and is asked.
        self.loop = asyncio.new_event_loop()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        adapters = {name: peft.LoraConfig(**lora).to_dict() for name, lora in LORAS.items()}
        if kind == "embedded":
            self.engine = make_embedded(folder, adapters)
        else:
            skeleton = make_skeleton(str(folder))
            self.engine = self.make(
                spec_of(folder, log, skeleton, self.tokenizer, adapters=adapters)
            )
            # At once, as a run does.
            for begin in (self.engine.wake, self.engine.sleep, self.engine.wake):
                self.run(begin())
        self.held_first = self.held()  # Loaded from the folder by the engine.

    def make(self, spec: EngineSpec) -> Engine:
        return SERVED[self.kind](spec)

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 600))

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()

    def load_first_weights(self) -> Subject:
        self.hf, self.loaded = load(self.folder), {}
        self.update()
        for seed, name in enumerate(LORAS):
            self.update_adapter(name, seed)
        return self

    def update(self) -> None:
        self.version += 1
        self.run(self.engine.update(self.weights(), self.version))

    def update_adapter(self, name: str, seed: int) -> None:
        """Random weights, as peft names them."""
        shapes = peft.get_peft_model_state_dict(
            peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[name]))
        )
        draw = torch.Generator().manual_seed(seed)
        self.loaded[name] = {n: torch.randn(p.shape, generator=draw) / 5 for n, p in shapes.items()}
        self.versions[name] = self.versions.get(name, 1000 * (1 + len(self.versions))) + 1
        self.run(self.engine.update(self.loaded[name].items(), self.versions[name], adapter=name))

    def model(self, adapter: str):
        if not adapter:
            return self.hf
        model = peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[adapter]))
        peft.set_peft_model_state_dict(model, self.loaded[adapter])
        return model.merge_and_unload().eval()

    def held(self) -> dict[str, int | str]:
        """A checksum of each tensor that the engine has, by its own names."""
        if self.kind == "embedded":
            named = self.engine.model.named_parameters()
            return {name: hash_of(value) for name, value in named}
        if self.kind == "vllm":
            body = {"action": "checksum"}
            sums = self.run(self.engine._ask("weight_checker", body))["checksums"]
            # On a CPU vLLM packs the others' weights, so that their tensors are empty.
            return {name: value for name, value in sums.items() if "_proj." not in name}
        [rank] = self.run(self.engine._ask("weights_checker", {"action": "checksum"}))["ranks"]
        return rank["checksums"]

    def weights(self):
        return ((name, p.detach()) for name, p in self.hf.named_parameters())

    def change(self, factor: float = 1.3) -> None:
        """Changes the expected weights."""
        with torch.no_grad():
            for parameter in self.hf.parameters():
                parameter.mul_(factor)

    def start(self, prompts, params, adapters=None) -> list[asyncio.Task]:
        calls = enumerate(zip(prompts, adapters or [""] * len(prompts), strict=True))
        return [
            self.loop.create_task(self.engine.generate(p, params, seed=i, adapter=a))
            for i, (p, a) in calls
        ]

    def ask(self, prompts, params, adapters=None):
        async def all_of():
            return await asyncio.gather(*self.start(prompts, params, adapters))

        return self.run(all_of())

    async def has_begun(self, num_steps: int = 5) -> None:
        """Its requests have some tokens, and more to come."""
        if self.kind == "sglang":
            await asyncio.sleep(0.3 if num_steps else 0.02)
            return
        if self.kind == "vllm":
            goal = (await self.counts())[1] + num_steps * self.engine.capacity
            while num_steps:
                num_running, num_tokens = await self.counts()
                num_open = min(self.engine._num_asked, self.engine.capacity)
                if num_running >= num_open and num_tokens >= goal:
                    return
                await asyncio.sleep(0.005)
            return
        goal = self.engine.stats["decode_steps"] + num_steps
        while self.engine.stats["decode_steps"] < goal:  # noqa: ASYNC110 - an event would serve tests alone
            await asyncio.sleep(0)

    def check(self, prompt, completion, temperature: float = 1.0, model=None) -> None:
        expected = logprobs_of(model or self.hf, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)

    def check_all(self, requests, completions, temperature: float = 1.0) -> None:
        models = {name: self.model(name) for name in ("", *LORAS)}
        for (name, prompt), completion in zip(requests, completions, strict=True):
            self.check(prompt, completion, temperature, models[name])
            assert set(completion.policy_versions) == {self.versions.get(name, self.version)}

    async def counts(self) -> list[float]:
        """vLLM's numbers of running requests and of sampled tokens."""
        server = self.engine.server
        _, text = await ask(f"{server.url}/metrics", token=server.key)
        names = ("num_requests_running", "generation_tokens_total")
        return [
            float(re.search(rf"^vllm:{name}{{.*}} (.*)", text.decode(), re.M)[1]) for name in names
        ]

    def speak(self, requests, params=GREEDY):
        return self.ask([prompt for _, prompt in requests], params, [name for name, _ in requests])


# Variables of torchrun's ranks, which a server must not get.
RANKS_VARIABLES = {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(scope="module", params=KINDS)
def subject(request, make_model, tmp_path_factory):
    # vLLM's attention on a CPU takes heads of at least 32.
    folder = make_model(heads=2)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RANKS_VARIABLES.items():
            patch.setenv(name, value)
        made = Subject(request.param, folder, tmp_path_factory.mktemp("log") / "engine.log")
    yield made
    group = made.engine.server.process.pid if request.param != "embedded" else None
    made.close()
    wait_until(lambda: not processes_of(group), "all processes of the server have ended")


@pytest.fixture
def fresh(subject):
    return subject.load_first_weights()


# Sampling


def test_greedy_tokens_are_the_most_likely_and_come_again(fresh):
    prompts = random_prompts(6)
    first, again = fresh.ask(prompts, GREEDY), fresh.ask(prompts, GREEDY)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    for prompt, completion in zip(prompts, first, strict=True):
        fresh.check(prompt, completion)
        best = (
            fresh.hf(input_ids=torch.tensor([[*prompt, *completion.token_ids]]))
            .logits[0]
            .argmax(-1)
        )
        assert completion.token_ids == best[len(prompt) - 1 : -1].tolist()
        assert completion.text == fresh.tokenizer.decode(
            completion.token_ids, skip_special_tokens=True
        )


# The same prompts for all, so that keys and values of one would do harm to the others.
REQUESTS = [(name, prompt) for prompt in random_prompts(5) for name in ("", *LORAS)]


@pytest.mark.parametrize("temperature", [0, 1.0, 0.6])
def test_requests_with_own_adapters_equal_plain_forwards(fresh, temperature):
    result = fresh.speak(REQUESTS, SamplingParams(max_tokens=13, temperature=temperature))
    fresh.check_all(REQUESTS, result, temperature or 1.0)
    assert {(len(c.token_ids), c.finish_reason) for c in result} == {(13, "length")}
    assert len({tuple(round(x, 2) for x in c.logprobs) for c in result[:4]}) == 4, (
        "adapters too weak to be distinguished"
    )


def test_a_stop_token_ends_the_completion_and_stays_in_it(fresh):
    prompts = random_prompts(4, seed=3)
    free = fresh.ask(prompts, GREEDY)
    stop = free[0].token_ids[0]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))
    for before, after in zip(free, fresh.ask(prompts, params), strict=True):
        end = before.token_ids.index(stop) + 1 if stop in before.token_ids else None
        assert after.token_ids == before.token_ids[:end] and len(after.logprobs) == len(
            after.token_ids
        )
        assert after.finish_reason == ("length" if end is None else "stop")


def test_only_the_stop_tokens_that_are_asked_for_end_a_completion(fresh):
    """The tokenizer's own end token does not."""
    params, end = (
        SamplingParams(max_tokens=200, stop_token_ids=(103,)),
        fresh.tokenizer.eos_token_id,
    )
    result = fresh.ask(random_prompts(8, seed=4), params)
    assert end != 103 and any(end in c.token_ids[:-1] for c in result)
    for completion in result:
        is_over = completion.token_ids[-1] == 103
        assert is_over or len(completion.token_ids) == 200
        assert completion.finish_reason == ("stop" if is_over else "length")


def test_a_stop_string_ends_the_completion_and_stays_in_its_text(fresh):
    prompt = random_prompts(1, seed=4)[0]
    fresh.change(1.2)  # Greedy tokens are not all equal.
    fresh.update()
    [free] = fresh.ask([prompt], SamplingParams(max_tokens=40, temperature=0))
    ids = free.token_ids
    stop = fresh.tokenizer.decode(ids[9:12])
    end = next(i for i in range(1, 41) if stop in fresh.tokenizer.decode(ids[:i]))
    [cut] = fresh.ask([prompt], SamplingParams(max_tokens=40, temperature=0, stop=("\0", stop)))
    assert (cut.token_ids, cut.finish_reason) == (ids[:end], "stop")
    assert cut.text == fresh.tokenizer.decode(cut.token_ids, skip_special_tokens=True)


def test_a_completion_fills_the_context_and_no_more(fresh):
    [completion] = fresh.ask([[5] * (CONTEXT - 7)], SamplingParams(max_tokens=50))
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")
    with pytest.raises(ValueError, match=f"prompt of {CONTEXT} tokens"):
        fresh.ask([[1] * CONTEXT], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}]
)
def test_impossible_params_are_refused(fresh, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fresh.ask([[1]], SamplingParams(**{"max_tokens": 4, **wrong}))


def warped(logits, temperature: float, limits: dict, kind: str) -> torch.Tensor:
    """[L, V] logprobs that transformers draws from. SGLang takes top-p of all ids, vLLM applies
    min-p first."""
    z = logits_process.TemperatureLogitsWarper(temperature)(None, logits)
    min_p = logits_process.MinPLogitsWarper(limits.get("min_p", 0.0))
    z = min_p(None, z) if kind == "vllm" else z
    top_k = logits_process.TopKLogitsWarper(limits["top_k"])(None, z)
    top_p = logits_process.TopPLogitsWarper(limits.get("top_p", 1.0))
    z = top_p(None, z if kind == "sglang" else top_k).masked_fill(top_k.isneginf(), -torch.inf)
    return min_p(None, z).log_softmax(-1)


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 3},
        {"top_k": 1024, "top_p": 0.6},
        {"top_k": 1024, "min_p": 0.3},
        {"top_k": 9, "top_p": 0.5, "min_p": 0.25},
    ],
)
def test_truncated_samples_name_the_ids_that_they_are_drawn_from(fresh, limits):
    fresh.change(1.5)
    fresh.update()
    prompts, num, temperature = random_prompts(6, seed=9), 400, 0.7
    params = SamplingParams(max_tokens=12, temperature=temperature, keeps_ids=True, **limits)
    sizes = set()
    for prompt, done in zip(prompts, fresh.ask(prompts, params), strict=True):
        ids = torch.tensor([*prompt, *done.token_ids])
        with torch.no_grad():
            logits = fresh.hf(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        expected = warped(logits, temperature, limits, fresh.kind)
        kept = [set(map(int, line.split())) for line in done.kept_ids]
        assert kept == [set(row.isfinite().nonzero()[:, 0].tolist()) for row in expected]
        logprobs = expected.gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), logprobs, atol=1e-4, rtol=0)
        sizes |= set(map(len, kept))
    assert max(sizes) > 2
    # All of the ids are drawn, as often as they are likely.
    first = expected[0].exp() * num
    counts = Counter(
        c.token_ids[0] for c in fresh.ask([prompt] * num, replace(params, max_tokens=1))
    )
    assert all(abs(counts[i] - n) < 5 * n**0.5 + 1 for i, n in enumerate(first.tolist()))


# New weights


def test_new_weights_are_what_samples_and_adapters_stay_beside_them(fresh):
    old = fresh.speak(REQUESTS[:4])
    for _ in range(2):
        fresh.change()
        fresh.update()
        new = fresh.speak(REQUESTS)
        fresh.check_all(REQUESTS, new)
        assert all(
            a.logprobs != pytest.approx(b.logprobs, abs=1e-3)
            for a, b in zip(new[:4], old, strict=True)
        )
    assert fresh.engine.version == fresh.version


CHANGE_WEIGHTS = {
    "sglang": ("update_weights_from_tensor", "update_weights_from_disk"),
    "vllm": ("update_weights", "collective_rpc", "pause"),
}


def test_an_update_of_one_adapter_leaves_the_others_and_the_weights(fresh):
    before = fresh.speak(REQUESTS)
    for seed in (7, 8):
        fresh.update_adapter("alice", seed)
        after = fresh.speak(REQUESTS)
        fresh.check_all(REQUESTS, after)
        for (name, _), old, new in zip(REQUESTS, before, after, strict=True):
            assert (new.logprobs == pytest.approx(old.logprobs, abs=1e-5)) == (name != "alice")
    assert fresh.engine.version == fresh.version
    if fresh.kind in SERVED:  # older versions are gone
        server = fresh.engine.server
        _, models = fresh.run(ask(f"{server.url}/v1/models", token=server.key))
        assert len(json.loads(models)["data"]) == 1 + len(LORAS)
        # Other users of the machine change nothing, and have no pickles loaded.
        for route in ("v1/load_lora_adapter", *CHANGE_WEIGHTS[fresh.kind]):
            assert fresh.run(ask(f"{server.url}/{route}", {}))[0] == 401, route


def test_each_tensor_that_was_sent_is_exactly_what_the_engine_loads_itself(fresh):
    fresh.change()
    fresh.update()
    changed = fresh.held()
    assert (
        changed.keys() == fresh.held_first.keys() and not changed.items() & fresh.held_first.items()
    )
    assert fresh.load_first_weights().held() == fresh.held_first


NORM, LAYER = "model.norm.weight", "down_proj"
WRONG = {
    "did not arrive, such as 'model.norm.weight'": (
        "",
        lambda w: {n: x for n, x in w.items() if n != NORM},
    ),
    r"has shape \[3\], not \[64\]": ("", lambda w: w | {NORM: torch.ones(3)}),
    "'model.nrom.weight' is not in": ("", lambda w: w | {"model.nrom.weight": torch.ones(64)}),
    "1 weights of adapter 'bob' did not arrive": ("bob", lambda w: dict(list(w.items())[1:])),
    r"did not arrive.*down_proj": ("bob", lambda w: {n: x for n, x in w.items() if LAYER not in n}),
    "z_proj.* is not in adapter 'bob'": (
        "bob",
        lambda w: {n.replace("q_proj", "z_proj"): x for n, x in w.items()},
    ),
    r"has shape \[2, 64\], not \[4, 64\]": (
        "bob",
        lambda w: {n: x[:2] if "lora_A" in n else x for n, x in w.items()},
    ),
}


@pytest.mark.parametrize("error", WRONG)
def test_weights_that_do_not_fit_are_an_error_and_good_ones_may_follow(fresh, error):
    adapter, change = WRONG[error]
    weights = change(dict(fresh.loaded[adapter] if adapter else fresh.weights()))
    with pytest.raises(ValueError, match=error):
        fresh.run(fresh.engine.update(weights.items(), 99, adapter=adapter))
    assert fresh.engine.version == fresh.version
    fresh.load_first_weights()
    fresh.check_all(REQUESTS[:4], fresh.speak(REQUESTS[:4]))


# Its life


def test_weights_do_not_change_under_a_running_request(fresh):
    async def update():
        [task] = fresh.start([[1]], LONG)
        await fresh.has_begun()
        for refused in (fresh.engine.update(fresh.weights(), version=98), fresh.engine.sleep()):
            with pytest.raises(RuntimeError, match="1 requests are running"):
                await refused
        task.cancel()
        await asyncio.wait([task])
        await fresh.engine.update(fresh.weights(), version=99)
        return task.cancelled()

    assert fresh.run(update())
    assert fresh.engine.version == 99


def test_who_is_cancelled_disturbs_nobody(fresh):
    # Long enough that a fast server is not done when some are cancelled.
    prompts, params = random_prompts(12, seed=7), SamplingParams(max_tokens=400, temperature=0)

    async def cancel_some():
        tasks = fresh.start(prompts, params)
        await fresh.has_begun()
        for i in (0, 3, 11):  # The last one waits for a slot.
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = fresh.run(cancel_some())
    assert [i for i, r in enumerate(results) if isinstance(r, asyncio.CancelledError)] == [0, 3, 11]
    for prompt, completion in zip(prompts, results, strict=True):
        if not isinstance(completion, asyncio.CancelledError):
            fresh.check(prompt, completion)
            assert len(completion.token_ids) == 400


@pytest.mark.parametrize("num_steps", [0, 5])
def test_paused_requests_go_on_with_newer_weights_after_a_sleep(fresh, num_steps):
    """However far they have come."""
    prompts, old = random_prompts(3, seed=8), load(fresh.folder)

    async def change():
        tasks = fresh.start(prompts, LONG)
        await fresh.has_begun(num_steps)
        await fresh.engine.pause()
        tasks += fresh.start([[3, 4]], GREEDY)
        await asyncio.sleep(0.05)
        assert not [t for t in tasks if t.done()]
        await fresh.engine.sleep()
        await fresh.engine.update(fresh.weights(), fresh.version + 1)
        await fresh.engine.resume()
        return await asyncio.gather(*tasks)

    fresh.change()
    *early, late = fresh.run(change())
    fresh.version += 1
    fresh.check([3, 4], late)
    assert late.policy_versions == [fresh.version] * 12
    for prompt, completion in zip(prompts, early, strict=True):
        versions = completion.policy_versions
        assert len(versions) == 400 and versions == sorted(versions)
        assert (
            set(versions) - {fresh.version} == ({fresh.version - 1} if num_steps else set())
            or fresh.kind in SERVED
        )
        before, after = (
            logprobs_of(model, prompt, completion.token_ids) for model in (old, fresh.hf)
        )
        expected = torch.where(torch.tensor(versions) == fresh.version, after, before)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def continued(completion, num_tokens: int):
    """Its first tokens, as they were before the others."""
    first = {name: getattr(completion, name)[:num_tokens] for name in ("token_ids", "logprobs")}
    return replace(completion, **first, text="", finish_reason="")


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 11])
def test_what_was_begun_is_continued(fresh, num_tokens):
    prompts = random_prompts(4, seed=5)

    async def go_on(params, unfinished):
        calls = enumerate(zip(prompts, unfinished, strict=True))
        return await asyncio.gather(
            *(fresh.engine.generate(p, params, seed=i, unfinished=b) for i, (p, b) in calls)
        )

    for params in (GREEDY, replace(GREEDY, temperature=1.0)):
        complete = fresh.ask(prompts, params)
        result = fresh.run(go_on(params, [continued(c, num_tokens) for c in complete]))
        for prompt, completion, before in zip(prompts, result, complete, strict=True):
            fresh.check(prompt, completion)
            is_repeated = params is GREEDY or fresh.kind == "embedded"  # SGLang's seeds are its own
            assert len(completion.token_ids) == 12
            assert (
                completion.token_ids[: 12 if is_repeated else num_tokens]
                == before.token_ids[: 12 if is_repeated else num_tokens]
            )
            assert completion.text == fresh.tokenizer.decode(
                completion.token_ids, skip_special_tokens=True
            )


def test_unfinished_completions_have_all_tokens_so_far(fresh):
    # Keeps all ids of the vocabulary.
    prompts, params = random_prompts(3, seed=6), replace(LONG, top_k=1024, keeps_ids=True)

    async def look():
        nothing = {
            "token_ids": [],
            "logprobs": [],
            "text": "",
            "finish_reason": "",
            "policy_version": -1,
        }
        unfinished = [Completion(**copy.deepcopy(nothing)) for _ in prompts]
        calls = enumerate(zip(prompts, unfinished, strict=True))
        asked = [
            fresh.loop.create_task(fresh.engine.generate(p, params, seed=i, unfinished=b))
            for i, (p, b) in calls
        ]
        await fresh.has_begun()
        await fresh.engine.update_unfinished()
        return copy.deepcopy(unfinished), await asyncio.gather(*asked)

    before, after = fresh.run(look())
    for prompt, early, late in zip(prompts, before, after, strict=True):
        assert 0 < len(early.token_ids) < LONG.max_tokens == len(late.token_ids)
        assert late.token_ids[: len(early.token_ids)] == early.token_ids and not early.finish_reason
        assert [len(one.kept_ids) for one in (early, late)] == [len(early.token_ids), 400]
        fresh.check(prompt, late)


def test_a_pause_keeps_each_requests_adapter_and_its_versions(fresh):
    requests = [(name, p) for p in random_prompts(2, seed=8) for name in ("", *LORAS)]

    async def with_a_pause():
        tasks = fresh.start([p for _, p in requests], LONG, [name for name, _ in requests])
        await fresh.has_begun()
        await fresh.engine.pause()
        await fresh.engine.update_unfinished()  # The engine stays paused.
        await fresh.engine.update(fresh.loaded["alice"].items(), 99, adapter="alice")
        await fresh.engine.resume()
        return await asyncio.gather(*tasks)

    results = fresh.run(with_a_pause())
    for (name, _), completion in zip(requests, results, strict=True):
        before = {fresh.versions.get(name, fresh.version)}
        assert set(completion.policy_versions) == before | ({99} if name == "alice" else set())
        completion.newer_versions.clear()
    fresh.check_all(requests, results)  # alice's adapter came again as it was


def test_an_engine_sleeps_and_wakes_with_the_same_weights(
    fresh,
):
    for seed in range(2):
        for change in (fresh.engine.sleep, fresh.engine.sleep):
            fresh.run(change())
        fresh.update_adapter("bob", 9 + seed)
        fresh.check_all(REQUESTS, fresh.speak(REQUESTS))
    for change in (fresh.engine.wake, fresh.engine.wake):
        fresh.run(change())
    fresh.engine.end_session("never seen")


# Engines in a run


class Renamed(EmbeddedEngine):
    """The same, by another name."""


@pytest.mark.parametrize("flags", ["", "--actors.policy.lora.rank 2"])
def test_an_engine_is_known_by_what_it_can_and_not_by_its_name(tiny_model, flags, monkeypatch):
    monkeypatch.setitem(ENGINES, "renamed", lambda: Renamed)
    has_copy = []
    for name in ("embedded", "renamed"):
        flags_of = words("--model", tiny_model, "--env_path x.py --out x --max_tokens 16", flags)
        config = choose_engine(parse_config([*flags_of, "--engine", name]), 1)
        learner = make_learner(tiny_model, flags, "--engine", name)
        chat = make_chats(config)[0]["policy"]
        engine = EngineFactory(config).make("policy", chat, {"policy": learner}, learner.ranks)
        assert type(engine) is ENGINES[name]() and engine._adapters is None
        has_copy.append(engine.model is not learner.policy.hf)
    assert has_copy == [bool(flags)] * 2


class NotedEngine(Engine):
    """Keeps its arguments."""

    weight_owner = WeightOwner.SERVER

    def __init__(self, spec: EngineSpec):
        self.spec = spec


BOB = "--actors.bob.model MODEL"
BOTH = f"{BOB} --rollout.engines_awake all"
LAGGED = "--max_staleness 1 --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 2"
URL = "--actors.policy.engine_urls http://{}:1"


@pytest.mark.parametrize(
    "num_ranks, flags, role, expected",
    [
        (1, "", "", {"memory_frac": 0.6, "url": "", "tp": 1, "args": "", "folder": None}),
        (1, "--engine_bucket_mib 3", "", {"bucket_bytes": 3 * 2**20, "resend": "learner"}),
        (1, "--max_staleness 1", "", {"resend": RESENT_BY_RANKS}),
        (2, "--weight_sync files", "", {"resend": RESENT_BY_RANKS, "weight_sync": "files"}),
        (1, BOB, "", {"memory_frac": 0.6, "resend": "learner"}),
        (2, BOB, "", {"memory_frac": 0.6, "resend": None}),
        (2, BOTH, "", {"memory_frac": 0.3, "resend": RESENT_BY_RANKS}),
        (1, f"{BOTH} --actors.policy.engine_memory_frac 0.2", "", {"memory_frac": 0.2}),
        (1, LAGGED, "", {"memory_frac": 0.3, "resend": RESENT_BY_RANKS, "name": "policy"}),
        (1, LAGGED, STALE_SUFFIX, {"memory_frac": 0.3, "resend": None, "name": "policy.older"}),
        (
            2,
            "--engine_args=--a --actors.policy.engine_tp 2 --actors.policy.engine_args=--b",
            "",
            {"tp": 2, "args": "--b"},
        ),
        (1, URL.format("localhost"), "", {"url": "http://localhost:1", "folder": None}),
        (1, URL.format("a"), "", {"url": "http://a:1", "folder": str(Path("x").resolve())}),
    ],
)
def test_a_servers_arguments_are_those_of_the_flags(num_ranks, flags, role, expected, tiny_model):
    base = f"--model {tiny_model} --env_path x.py --out x {flags}"
    config = parse_config(words(base.replace("MODEL", str(tiny_model))))
    ranks = Ranks(rank=0, size=num_ranks, device=torch.device("cpu"))
    learner, chat = make_learner(tiny_model), make_chats(config)[0]["policy"]
    factory = EngineFactory(config, engine=NotedEngine)
    spec = factory.make("policy", chat, {"policy": learner}, ranks, role).spec
    values = vars(spec) | vars(spec.server)
    values["resend"] = "learner" if callable(spec.resend) else spec.resend
    assert {name: values[name] for name in expected} == expected and spec.embedded is None


def test_nothing_is_decided_by_an_engines_name():
    for file in (ROOT / "rl_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                values = {
                    getattr(operand, "value", None) for operand in (node.left, *node.comparators)
                }
                assert not values & ENGINES.keys(), f"{file}: {ast.unparse(node)}"


# A server's process


def processes_of(group: int | None) -> list[str]:
    """Processes of a group, without zombies; of no group none."""
    rows = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True
    ).stdout.splitlines()
    return [r for r in rows if r.split()[0] == str(group) and not r.split()[1].startswith("Z")]


# Last: the server of all tests above is killed here.
@pytest.mark.parametrize("subject", KINDS[1:], indirect=True)
def test_a_server_that_dies_is_an_error_for_all_who_wait_and_starts_again(subject):
    subject.load_first_weights()
    subject.change()
    subject.update()
    group = subject.engine.server.process.pid
    environ = Path(f"/proc/{group}/environ").read_bytes().split(b"\0")
    assert not [v for v in environ if v.startswith((b"RANK=", b"MASTER_", b"TORCHELASTIC_"))]
    assert len(processes_of(group)) > 1

    async def kill():
        tasks = subject.start([[i] for i in range(3)], LONG)
        await subject.has_begun()
        os.kill(group, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in subject.run(kill()):
        assert isinstance(error, EngineDied)
        assert "does not answer" in str(error) and "the end of" in str(error)
    with pytest.raises(EngineDied, match="has died"):
        subject.ask([[1]], GREEDY)
    wait_until(lambda: not processes_of(group), "all processes of the server have ended")

    subject.run(subject.engine.wake())
    metrics = subject.run(subject.engine.take_metrics())
    assert metrics["rollout/policy/engine_restarts"] == Sum(1)
    subject.check_all(REQUESTS, subject.speak(REQUESTS))  # The weights were kept.
    subject.update_adapter("carol", 7)
    subject.check_all(REQUESTS, subject.speak(REQUESTS))
