"""What every engine promises, with adapters of several actors beside its weights: the embedded one and SGLang pass the same
tests. SGLang's run where it is installed: bash scripts/test_sglang.sh."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.remote import ask, checksum
from rl_core.engines.sglang import SGLangEngine, make_skeleton
from rl_core.sampling.engine import EngineDied, EngineSpec
from rl_core.types import SamplingParams

CONTEXT = 512
GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=400)
LORAS = {
    "bob": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "alice": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj"]},
    "carol": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"]},
}
CONFIGS = {name: peft.LoraConfig(**lora).to_dict() for name, lora in LORAS.items()}
NAMES = ["", *LORAS]  # "" has no adapter
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed: bash scripts/test_sglang.sh")


class Subject:
    """An engine; as `hf`, a model with the weights that it should have; and as `models`, what each actor should have."""

    def __init__(self, kind: str, folder: Path, log: Path):
        self.kind, self.folder, self.version, self.versions = kind, folder, 0, {}
        # One loop for all tests, in which the server's engine waits and is asked.
        self.loop = asyncio.new_event_loop()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.engine = self.make(log)
        if kind == "sglang":
            for begin in (self.engine.wake, self.engine.sleep, self.engine.wake):  # at once, as a run does
                self.run(begin())
        self.loaded = self.held()  # by itself, from the folder
        self.adapters: dict[str, dict] = {}
        self.load_first_weights()

    def make(self, log: Path):
        if self.kind == "embedded":
            return make_embedded(self.folder, CONFIGS)
        skeleton = make_skeleton(str(self.folder))
        return SGLangEngine(spec_of(self.folder, log, skeleton, self.tokenizer, adapters=CONFIGS))

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 600))

    def load_first_weights(self) -> None:
        self.hf = load(self.folder)
        self.update()
        for seed, name in enumerate(LORAS):
            self.update_adapter(name, seed)

    def update(self) -> None:
        self.version += 1
        self.run(self.engine.update(self.weights(), self.version))

    def update_adapter(self, name: str, seed: int) -> None:
        """To random weights, as peft names them."""
        model = peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[name]))
        draw = torch.Generator().manual_seed(seed)
        shapes = {n: p.shape for n, p in peft.get_peft_model_state_dict(model).items()}
        self.adapters[name] = {n: torch.randn(shape, generator=draw) / 5 for n, shape in shapes.items()}
        self.versions[name] = self.versions.get(name, 1000 * len(self.versions) + 1000) + 1
        self.run(self.engine.update(self.adapters[name].items(), self.versions[name], adapter=name))

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        found = {"": self.hf}
        for name, weights in self.adapters.items():
            model = peft.get_peft_model(copy.deepcopy(self.hf), peft.LoraConfig(**LORAS[name]))
            peft.set_peft_model_state_dict(model, weights)
            found[name] = model.merge_and_unload().eval()
        return found

    def held(self) -> dict[str, int | str]:
        """A checksum of each tensor that the engine has, by its own names."""
        if self.kind == "embedded":
            return {name: checksum(value.detach()) for name, value in self.engine.named_weights()}
        [rank] = self.run(self.engine._ask("weights_checker", {"action": "checksum"}))["ranks"]
        return rank["checksums"]

    def weights(self):
        return ((name, p.detach()) for name, p in self.hf.named_parameters())

    def change(self, factor: float = 1.3) -> None:
        """Of the weights that it should have."""
        with torch.no_grad():
            for parameter in self.hf.parameters():
                parameter.mul_(factor)

    def ask(self, prompts, params=GREEDY, adapters=None):
        """Completions of all prompts at once."""
        params = params if isinstance(params, list) else [params] * len(prompts)
        adapters = adapters or [""] * len(prompts)

        async def gather():
            asked = enumerate(zip(prompts, params, adapters, strict=True))
            return await asyncio.gather(*(self.engine.generate(p, q, seed=i, adapter=a) for i, (p, q, a) in asked))

        return self.run(gather())

    def speak(self, params=GREEDY):
        """What each actor says to the same prompts, so that keys and values of one would do harm to the others."""
        return self.ask([prompt for _, prompt in REQUESTS], params, [name for name, _ in REQUESTS])

    def check_all(self, completions, temperature: float = 1.0, requests=()) -> None:
        base, models = self.hf, self.models
        for (name, prompt), completion in zip(requests or REQUESTS, completions, strict=True):
            self.hf = models[name]
            self.check(prompt, completion, temperature)
            assert set(completion.policy_versions) == {self.versions.get(name, self.version)}
        self.hf = base

    @torch.no_grad()
    def logprobs(self, prompt, token_ids, temperature: float = 1.0):
        ids = torch.tensor([*prompt, *token_ids])
        logits = self.hf(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]

    def check(self, prompt, completion, temperature: float = 1.0) -> None:
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, self.logprobs(prompt, completion.token_ids, temperature), atol=1e-4, rtol=0)


def spec_of(folder: Path, log: Path, skeleton, tokenizer, **more) -> EngineSpec:
    return EngineSpec(
        name="policy", model=str(folder), module=skeleton, tokenizer=tokenizer, num_slots=8, max_context_tokens=CONTEXT,
        dtype=torch.float32, device=torch.device("cpu"), seed=0, log=log, start_timeout_s=600, memory_frac=0.5, **more,
    )  # fmt: skip


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(104) for _ in range(draw.randint(1, longest))] for _ in range(count)]


REQUESTS = [(name, prompt) for prompt in random_prompts(5) for name in NAMES]


def make_embedded(folder: Path, adapters: dict | None = None) -> EmbeddedEngine:
    limits = {"num_slots": 8, "max_context_tokens": CONTEXT}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return EmbeddedEngine(load(folder), **limits, tokenizer=tokenizer, adapters=adapters or {})


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=needs_sglang)])
def subject(request, tiny_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # as torchrun would
        for name, value in {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            patch.setenv(name, value)
        found = Subject(request.param, tiny_model, tmp_path_factory.mktemp("log") / "engine.log")
        yield found
        group = found.engine.server.process.pid if found.kind == "sglang" else None
        found.run(found.engine.close())
        found.loop.close()
        assert group is None or not left_of(group)


@pytest.fixture
def fresh(subject):
    subject.load_first_weights()
    return subject


def test_greedy_tokens_are_the_most_likely_and_come_again(fresh):
    prompts = random_prompts(6)
    first, again = fresh.ask(prompts, GREEDY), fresh.ask(prompts, GREEDY)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    for prompt, completion in zip(prompts, first, strict=True):
        fresh.check(prompt, completion)
        best = fresh.hf(input_ids=torch.tensor([[*prompt, *completion.token_ids]])).logits[0].argmax(-1)
        assert completion.token_ids == best[len(prompt) - 1 : -1].tolist()
        assert completion.text == fresh.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_many_requests_at_once_are_those_of_a_plain_forward(fresh, temperature):
    prompts = random_prompts(20, seed=1)
    params = [SamplingParams(max_tokens=1 + i % 17, temperature=temperature) for i in range(20)]
    for prompt, q, completion in zip(prompts, params, fresh.ask(prompts, params), strict=True):
        fresh.check(prompt, completion, temperature)
        assert (len(completion.token_ids), completion.finish_reason) == (q.max_tokens, "length")


def test_new_weights_are_what_samples_and_each_tensor_is_exactly_what_was_sent(fresh):
    prompt = [7] * 20
    [old] = fresh.ask([prompt])
    for _ in range(2):
        fresh.change()
        fresh.update()
        [new] = fresh.ask([prompt])
        fresh.check(prompt, new)
        assert new.policy_versions == [fresh.version] * 12
        assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)
    assert fresh.engine.version == fresh.version
    changed = fresh.held()
    assert changed.keys() == fresh.loaded.keys() and not changed.items() & fresh.loaded.items()
    fresh.load_first_weights()
    assert fresh.held() == fresh.loaded, "it is what the engine loads from the folder itself"


def test_a_stop_token_ends_the_completion_and_stays_in_it(fresh):
    prompts = random_prompts(4, seed=3)
    free = fresh.ask(prompts, GREEDY)
    stop = free[0].token_ids[0]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))
    for before, after in zip(free, fresh.ask(prompts, params), strict=True):
        end = before.token_ids.index(stop) + 1 if stop in before.token_ids else None
        assert after.token_ids == before.token_ids[:end]
        assert after.finish_reason == ("length" if end is None else "stop")


def test_only_the_stop_tokens_that_are_asked_for_end_a_completion(fresh):
    """The tokenizer's own end token does not."""
    params, end = SamplingParams(max_tokens=200, stop_token_ids=(103,)), fresh.tokenizer.eos_token_id
    assert end != 103
    found = fresh.ask(random_prompts(8, seed=4), params)
    assert any(end in c.token_ids[:-1] for c in found)
    for completion in found:
        is_over = completion.token_ids[-1] == 103
        assert (len(completion.token_ids) == 200) != (is_over and len(completion.token_ids) < 200)
        assert completion.finish_reason == ("stop" if is_over else "length")


def test_a_stop_string_ends_the_completion_and_stays_in_its_text(fresh):
    prompt = random_prompts(1, seed=4)[0]
    fresh.change(1.2)  # so that greedy tokens are not all the same
    fresh.update()
    [free] = fresh.ask([prompt], SamplingParams(max_tokens=40, temperature=0))
    ids = free.token_ids
    stop = fresh.tokenizer.decode(ids[9:12])
    end = next(i for i in range(1, 41) if stop in fresh.tokenizer.decode(ids[:i]))
    [cut] = fresh.ask([prompt], SamplingParams(max_tokens=40, temperature=0, stop=("\0", stop)))
    assert (cut.token_ids, cut.finish_reason) == (ids[:end], "stop")
    assert cut.text == fresh.tokenizer.decode(cut.token_ids, skip_special_tokens=True)


def test_a_completion_fills_the_context_and_no_more(fresh):
    prompt = [5] * (CONTEXT - 7)
    [completion] = fresh.ask([prompt], SamplingParams(max_tokens=50))
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")
    with pytest.raises(ValueError, match=f"prompt of {CONTEXT} tokens"):
        fresh.ask([[1] * CONTEXT], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}])
def test_impossible_params_are_refused(subject, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        subject.ask([[1]], SamplingParams(**{"max_tokens": 4, **wrong}))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "did not arrive, such as 'model.norm.weight'"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), r"has shape \[3\], not \[64\]"),
        (lambda weights: weights.update({"model.nrom.weight": torch.ones(64)}), "'model.nrom.weight' is not in"),
    ],
)
def test_weights_that_do_not_fit_are_an_error_and_all_are_taken(fresh, change, error):
    weights, taken = dict(fresh.weights()), []
    change(weights)

    def stream():
        for name, weight in weights.items():
            taken.append(name)
            yield name, weight

    with pytest.raises(ValueError, match=error):
        fresh.run(fresh.engine.update(stream(), version=99))
    assert fresh.engine.version == fresh.version
    if fresh.kind == "sglang":  # what other ranks wait for
        assert taken == list(weights)
    fresh.update()
    fresh.check([1, 2], fresh.ask([[1, 2]], GREEDY)[0])


def test_weights_do_not_change_under_a_running_request(fresh):
    async def update():
        task = asyncio.create_task(fresh.engine.generate([1], LONG, seed=0))
        await asyncio.sleep(0.05)
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
    prompts = random_prompts(5, seed=7)

    async def cancel_some():
        tasks = [asyncio.create_task(fresh.engine.generate(p, LONG, seed=0)) for p in prompts]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = fresh.run(cancel_some())
    assert [i for i, r in enumerate(found) if isinstance(r, asyncio.CancelledError)] == [0, 3]
    for i in (1, 2, 4):
        fresh.check(prompts[i], found[i])
        assert len(found[i].token_ids) == 400


@pytest.mark.parametrize("delay_s", [0.02, 0.3])
def test_paused_requests_go_on_with_newer_weights_after_a_sleep(fresh, delay_s):
    """However far they have come."""
    prompts, old = random_prompts(3, seed=8), load(fresh.folder)

    async def change():
        tasks = [asyncio.create_task(fresh.engine.generate(p, LONG, seed=i)) for i, p in enumerate(prompts)]
        await asyncio.sleep(delay_s)
        await fresh.engine.pause()
        tasks.append(asyncio.create_task(fresh.engine.generate([3, 4], GREEDY, seed=9)))
        await fresh.engine.sleep()
        await fresh.engine.update(fresh.weights(), fresh.version + 1)
        assert not tasks[-1].done()
        await fresh.engine.resume()
        return await asyncio.gather(*tasks)

    fresh.change()
    *found, late = fresh.run(change())
    fresh.version += 1
    fresh.check([3, 4], late)
    assert late.policy_versions == [fresh.version] * 12
    for prompt, completion in zip(prompts, found, strict=True):
        versions, new = completion.policy_versions, fresh.logprobs(prompt, completion.token_ids)
        assert (
            len(versions) == 400 and versions == sorted(versions) and {*versions} <= {fresh.version - 1, fresh.version}
        )
        fresh.hf, kept = old, fresh.hf
        before = fresh.logprobs(prompt, completion.token_ids)
        fresh.hf = kept
        expected = torch.where(torch.tensor(versions) == fresh.version, new, before)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_it_sleeps_and_wakes_again_and_again_with_the_same_weights(fresh):
    [before] = fresh.ask([[1, 2, 3]], GREEDY)
    for _ in range(3):
        fresh.run(fresh.engine.sleep())
        fresh.run(fresh.engine.sleep())
        assert fresh.ask([[1, 2, 3]], GREEDY)[0].token_ids == before.token_ids
    fresh.run(fresh.engine.wake())
    fresh.run(fresh.engine.wake())
    fresh.end = fresh.engine.end_session("never seen")


# Adapters


def test_requests_of_all_actors_in_one_batch_have_each_its_own_models_logprobs(fresh):
    for params in (GREEDY, SamplingParams(max_tokens=12, temperature=0.7)):
        found = fresh.speak(params)
        fresh.check_all(found, params.temperature or 1.0)
        told = {tuple(round(x, 2) for x in c.logprobs) for c in found[:4]}
        assert len(told) == 4, "the adapters are too weak to be told apart"


def test_an_update_of_one_adapter_leaves_the_others_and_the_weights(fresh):
    before = fresh.speak()
    for seed in (7, 8):
        fresh.update_adapter("alice", seed)
        after = fresh.speak()
        fresh.check_all(after)
        for (name, _), old, new in zip(REQUESTS, before, after, strict=True):
            assert (new.logprobs == pytest.approx(old.logprobs, abs=1e-5)) == (name != "alice")
    assert fresh.engine.version == fresh.version
    if fresh.kind == "sglang":  # older versions are gone
        server = fresh.engine.server
        _, models = fresh.run(ask(f"{server.url}/v1/models", None, server.key))
        assert len(json.loads(models)["data"]) == 1 + len(LORAS)


def test_new_weights_keep_the_adapters_beside_them(fresh):
    fresh.change()
    fresh.update()
    fresh.check_all(fresh.speak())


def test_adapters_stay_while_it_sleeps_and_come_while_it_sleeps(fresh):
    fresh.run(fresh.engine.sleep())
    fresh.check_all(fresh.speak())
    fresh.run(fresh.engine.sleep())
    fresh.update_adapter("bob", 9)
    fresh.check_all(fresh.speak())


def test_a_pause_keeps_each_requests_adapter_and_its_versions(fresh):
    requests = [(name, p) for p in random_prompts(2, seed=8) for name in NAMES]
    newer = fresh.versions["alice"] + 1

    async def with_a_pause():
        asked = [fresh.engine.generate(p, LONG, seed=i, adapter=name) for i, (name, p) in enumerate(requests)]
        asked = [asyncio.create_task(coroutine) for coroutine in asked]
        await asyncio.sleep(0.1)
        await fresh.engine.pause()
        await fresh.engine.update(fresh.adapters["alice"].items(), newer, adapter="alice")
        await fresh.engine.resume()
        return await asyncio.gather(*asked)

    found = fresh.run(with_a_pause())
    for (name, _), completion in zip(requests, found, strict=True):
        assert completion.policy_versions[-1] == (newer if name == "alice" else fresh.versions.get(name, fresh.version))
        completion.policy_version, completion.newer_versions = completion.policy_versions[-1], []
    fresh.versions["alice"] = newer
    fresh.check_all(found, requests=requests)  # alice's adapter came again as it was


def test_adapters_that_do_not_fit_are_an_error_and_all_are_taken(fresh):
    def refused(change, text):
        weights, taken = change(dict(fresh.adapters["bob"])), []

        def stream():
            for name, weight in weights.items():
                taken.append(name)
                yield name, weight

        with pytest.raises(ValueError, match=text):
            fresh.run(fresh.engine.update(stream(), 99, adapter="bob"))
        if fresh.kind == "sglang":  # what other ranks wait for
            assert taken == list(weights)

    some = next(iter(fresh.adapters["bob"]))
    refused(lambda w: {n: x for n, x in w.items() if n != some}, "1 weights did not arrive")
    refused(lambda w: {n: x for n, x in w.items() if "down_proj" not in n}, r"did not arrive.*down_proj")
    refused(lambda w: {n.replace("q_proj", "z_proj"): x for n, x in w.items()}, r"z_proj.*did you mean .*_proj")
    refused(lambda w: {n: x[:2] if "lora_A" in n else x for n, x in w.items()}, "its rank is 4")
    with pytest.raises(ValueError, match="no adapter 'bop'; did you mean 'bob'"):
        fresh.ask([[1]], adapters=["bop"])
    fresh.update_adapter("bob", 3)
    fresh.check_all(fresh.speak())


# SGLang's process


def processes_of(group: int) -> list[str]:
    """Of a process group, those that have ended and wait to be reaped left out."""
    rows = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True).stdout.splitlines()
    return [r for r in rows if r.split()[0] == str(group) and not r.split()[1].startswith("Z")]


def left_of(group: int) -> list[str]:
    """Of a process group that was killed, which takes its time where much memory is given back."""
    deadline = time.monotonic() + 30
    while (found := processes_of(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_an_engine_that_dies_is_an_error_for_all_who_wait_and_wakes_with_what_it_had(fresh):
    fresh.change()
    fresh.update()
    fresh.update_adapter("carol", 6)
    held = fresh.held()
    if fresh.kind == "sglang":
        kill(fresh)
    fresh.run(fresh.engine.wake())
    assert fresh.held() == held
    fresh.check_all(fresh.speak())
    fresh.update_adapter("carol", 7)
    fresh.check_all(fresh.speak())


def kill(subject: Subject) -> None:
    """The server, while requests are running."""
    group = subject.engine.server.process.pid
    environ = Path(f"/proc/{group}/environ").read_bytes().split(b"\0")
    assert not [v for v in environ if v.startswith((b"RANK=", b"MASTER_", b"TORCHELASTIC_"))]
    assert len(processes_of(group)) > 1

    async def kill_at_work():
        tasks = [asyncio.create_task(subject.engine.generate([i], LONG, seed=0)) for i in range(3)]
        await asyncio.sleep(0.1)
        os.kill(group, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in subject.run(kill_at_work()):
        assert isinstance(error, EngineDied) and "has died" in str(error) and "Prefill batch" in str(error)
    with pytest.raises(EngineDied, match="has died"):
        subject.ask([[1]])
    assert not left_of(group)
