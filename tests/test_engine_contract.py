"""What every engine promises: the embedded one and SGLang pass the same tests. SGLang's run where it is installed:
bash scripts/test_sglang.sh."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.remote import checksum
from rl_core.engines.sglang import SGLangEngine, make_skeleton
from rl_core.sampling.engine import EngineDied, EngineSpec
from rl_core.types import SamplingParams

CONTEXT = 512
GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=400)
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed: bash scripts/test_sglang.sh")


class Subject:
    """An engine and, as `hf`, a model with the weights that it should have."""

    def __init__(self, kind: str, folder: Path, log: Path, adapters: dict[str, dict] | None = None):
        self.kind, self.folder, self.version, self.adapters = kind, folder, 0, adapters or {}
        # One loop for all tests, in which the server's engine waits and is asked.
        self.loop = asyncio.new_event_loop()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.engine = self.make(log)
        if kind == "sglang":
            for begin in (self.engine.wake, self.engine.sleep, self.engine.wake):  # at once, as a run does
                self.run(begin())
        self.loaded = self.held()  # by itself, from the folder
        self.load_first_weights()

    def make(self, log: Path):
        if self.kind == "embedded":
            return make_embedded(self.folder, self.adapters)
        skeleton = make_skeleton(str(self.folder))
        return SGLangEngine(spec_of(self.folder, log, skeleton, self.tokenizer, adapters=self.adapters))

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 600))

    def load_first_weights(self) -> None:
        self.hf = load(self.folder)
        self.update()

    def update(self) -> None:
        self.version += 1
        self.run(self.engine.update(self.weights(), self.version))

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

    def ask(self, prompts, params):
        params = params if isinstance(params, list) else [params] * len(prompts)

        async def gather():
            pairs = enumerate(zip(prompts, params, strict=True))
            return await asyncio.gather(*(self.engine.generate(p, q, seed=i) for i, (p, q) in pairs))

        return self.run(gather())

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


def make_embedded(folder: Path, adapters: dict | None = None) -> EmbeddedEngine:
    limits = {"num_slots": 8, "max_context_tokens": CONTEXT}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return EmbeddedEngine(load(folder), **limits, tokenizer=tokenizer, adapters=adapters or {})


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=needs_sglang)])
def subject(request, tiny_model, tmp_path_factory):
    found = Subject(request.param, tiny_model, tmp_path_factory.mktemp("log") / "engine.log")
    yield found
    found.run(found.engine.close())
    found.loop.close()


@pytest.fixture
def fresh(subject):
    subject.load_first_weights()
    return subject


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(104) for _ in range(draw.randint(1, longest))] for _ in range(count)]


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


def test_new_weights_are_what_samples(fresh):
    prompt = [7] * 20
    [old] = fresh.ask([prompt], GREEDY)
    for _ in range(2):
        fresh.change()
        fresh.update()
        [new] = fresh.ask([prompt], GREEDY)
        fresh.check(prompt, new)
        assert new.policy_versions == [fresh.version] * 12
        assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)
    assert fresh.engine.version == fresh.version


def test_each_tensor_that_was_sent_is_exactly_what_the_engine_loads_itself(fresh):
    fresh.change()
    fresh.update()
    changed = fresh.held()
    assert changed.keys() == fresh.loaded.keys() and not changed.items() & fresh.loaded.items()
    fresh.load_first_weights()
    assert fresh.held() == fresh.loaded


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
    params = SamplingParams(max_tokens=60, temperature=0)
    expected = fresh.ask(prompts, params)

    async def cancel_some():
        tasks = [asyncio.create_task(fresh.engine.generate(p, params, seed=0)) for p in prompts]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = fresh.run(cancel_some())
    assert [i for i, r in enumerate(found) if isinstance(r, asyncio.CancelledError)] == [0, 3]
    for i in (1, 2, 4):
        fresh.check(prompts[i], found[i])
        assert len(found[i].token_ids) == len(expected[i].token_ids)


def test_paused_requests_go_on_with_newer_weights_after_a_sleep(fresh):
    prompts, old = random_prompts(3, seed=8), load(fresh.folder)

    async def change():
        tasks = [asyncio.create_task(fresh.engine.generate(p, LONG, seed=i)) for i, p in enumerate(prompts)]
        await asyncio.sleep(0.3)
        await fresh.engine.pause()
        tasks.append(asyncio.create_task(fresh.engine.generate([3, 4], GREEDY, seed=9)))
        await asyncio.sleep(0.05)
        assert not any(t.done() for t in tasks)
        await fresh.engine.sleep()
        await fresh.engine.update(fresh.weights(), fresh.version + 1)
        await fresh.engine.resume()
        return await asyncio.gather(*tasks)

    fresh.change()
    *found, late = fresh.run(change())
    fresh.version += 1
    fresh.check([3, 4], late)
    assert late.policy_versions == [fresh.version] * 12
    for prompt, completion in zip(prompts, found, strict=True):
        [(index, version)] = completion.newer_versions
        assert (len(completion.token_ids), version) == (400, fresh.version) and 0 < index < 400
        new = fresh.logprobs(prompt, completion.token_ids)
        fresh.hf, kept = old, fresh.hf
        before = fresh.logprobs(prompt, completion.token_ids)
        fresh.hf = kept
        expected = torch.cat((before[:index], new[index:]))
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


@needs_sglang
@pytest.mark.slow
def test_a_server_that_dies_is_an_error_for_all_who_wait_and_starts_again(tiny_model, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    subject = Subject("sglang", tiny_model, tmp_path / "engine.log")
    group = subject.engine.server.process.pid
    environ = Path(f"/proc/{group}/environ").read_bytes().split(b"\0")
    assert not [v for v in environ if v.startswith((b"RANK=", b"MASTER_", b"TORCHELASTIC_"))]
    assert len(processes_of(group)) > 1

    async def kill():
        tasks = [asyncio.create_task(subject.engine.generate([i], LONG, seed=0)) for i in range(3)]
        await asyncio.sleep(0.3)
        os.kill(group, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in subject.run(kill()):
        assert isinstance(error, EngineDied)
        assert "has died" in str(error) and "Prefill batch" in str(error)
    with pytest.raises(EngineDied, match="has died"):
        subject.ask([[1]], GREEDY)
    assert not left_of(group)

    subject.run(subject.engine.wake())
    subject.check([1, 2], subject.ask([[1, 2]], GREEDY)[0])  # with the weights that it had, which were kept
    assert subject.held() == subject.loaded
    subject.change()
    subject.update()
    subject.check([1, 2], subject.ask([[1, 2]], GREEDY)[0])
    group = subject.engine.server.process.pid
    subject.run(subject.engine.close())
    assert not left_of(group)
