"""The server over HTTP, as the tinker client speaks with it: sessions, tenants, paths, limits, kills."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import threading
from contextlib import asynccontextmanager, suppress
from itertools import count

import aiohttp
import numpy as np
import pytest
from bodies import forward_backward, row
from peft import PeftModel
from test_engine_contract import KINDS
from test_multi_lora import ADAM, LORA, read_output, rows
from transformers import AutoModelForCausalLM

from rl_core.engines.remote import ask
from rl_core.tinker import queue
from rl_core.tinker import tenants as tenants_module
from rl_core.tinker.server import TinkerServer
from rl_core.tinker.tenants import Tenants, read_keys
from rl_core.tinker.wire import PROTOBUF, as_bytes, fields_of, message, varint
from rl_core.tools import tinker as command
from rl_core.tools.cli import main
from rl_core.tools.tinker import make_lora, make_tenants, read_flags

ADAM_STEP = {"type": "optim_step", "adam_params": ADAM}


class Client:
    """A session with one model."""

    def __init__(self, http, url, key, model):
        self.http, self.url, self.model, self.seq = http, f"{url}/api/v1", model, 0
        self.headers = {"X-API-Key": key}

    async def post(self, path, body, status=200):
        """The JSON or the bytes of an answer."""
        more = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = self.headers | ({"Content-Type": PROTOBUF} if isinstance(body, bytes) else {})
        async with self.http.post(f"{self.url}/{path}", headers=headers, **more) as response:
            assert response.status == status, await response.text()
            is_proto = response.content_type == PROTOBUF
            return await response.read() if is_proto else await response.json()

    async def result(self, path, body):
        """The result of a request with a promise, sent twice. Asks again while it is pending."""
        promise = await self.post(path, body)
        assert await self.post(path, body) == promise, "a repeat has the first promise"
        while True:
            result = await self.post("retrieve_future", {"request_id": promise["request_id"]})
            if isinstance(result, bytes) or result.get("type") != "try_again":
                return result

    async def begin(self, **lora):
        self.seq = 0
        self.session = (await self.post("create_session", {}))["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self.model}
        made = await self.result("create_model", body | {"lora_config": LORA | lora})
        self.model_id = made.get("model_id", "")
        return made

    def step(self, endpoint, **body):
        self.seq += 1
        return self.result(endpoint, {"model_id": self.model_id, "seq_id": self.seq, **body})

    def backward(self, ids, **options):
        self.seq += 1
        position = {"model_id": self.model_id, "seq_id": self.seq}
        return self.result("forward_backward", forward_backward([row(ids)], **position, **options))

    async def learn(self, seed=0):
        """Logprobs of a row before a step on it."""
        [ids] = rows(1, seed)
        output = await self.backward(ids)
        await self.step("optim_step", **ADAM_STEP)
        return read_output(output)[0][0].tolist()

    async def sampler(self, **body):
        made = await self.step("save_weights_for_sampler", **body)
        return made.get("sampling_session_id") or made

    async def sample(self, sampler, ids, seq_id=0, num=1, **params):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": ids}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "num_samples": num}
        body |= {"prompt": prompt, "prompt_logprobs": True}
        body["sampling_params"] = {"max_tokens": 6, "seed": 3, "stop": [1], **params}
        return await self.result("asample", body)


def read_samples(body: bytes) -> tuple[list[list[int]], list[list[float]], np.ndarray]:
    """Tokens and logprobs of each sequence, logprobs of the prompt."""
    tokens, logprobs, prompt = [], [], np.zeros(0)
    for number, value in fields_of(body):
        if number == 1:
            parts = dict(fields_of(as_bytes(value)))
            tokens.append(np.frombuffer(parts[2], "<i4").tolist())
            logprobs.append(np.frombuffer(parts[3], "<f4").tolist())
        elif number == 2:
            prompt = np.frombuffer(as_bytes(value), "<f4")
    return tokens, logprobs, prompt


FLAGS = ["--max_rank", "4", "--max_models", "2", "--max_snapshots", "2"]


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory) -> Tenants:
    out = str(tmp_path_factory.mktemp("tinker"))
    flags = ["--out", out, "--tenants", "alice,bob", *FLAGS]
    args, config = read_flags(["--model", str(tiny_model), *flags])
    return make_tenants(args, config, make_lora(args, config))


@asynccontextmanager
async def serve(tenants):
    """(client of tenant alice, of bob, the server's tenants)"""
    keys = read_keys(tenants.out / "keys", ["alice", "bob"])
    server = TinkerServer(tenants, keys)
    await tenants.sampler.start()
    working = asyncio.create_task(tenants.turns.work())
    url = f"http://127.0.0.1:{await server.http.listen()}"
    async with aiohttp.ClientSession() as http:
        clients = [Client(http, url, key, tenants.model) for key in keys.values()]
        yield (*clients, tenants)
    working.cancel()
    await server.http.close()


@pytest.fixture
def serving(made, tiny_model, tmp_path):
    """serving(): see serve()"""
    tenants = Tenants(made.lora, made.sampler, str(tiny_model), tmp_path, num_tenants=2)
    tenants.sampler.snapshots.clear()
    return lambda: serve(tenants)


async def test_a_session_trains_samples_saves_and_loads(serving, tiny_model, tmp_path, monkeypatch):
    async with serving() as (alice, _, tenants):
        await alice.begin()
        info = await alice.post("get_info", {"model_id": alice.model_id})
        assert info["lora_rank"] == 4
        assert info["model_data"]["tokenizer_id"] == str(tiny_model)
        logprobs = [await alice.learn() for _ in range(3)]
        assert sum(logprobs[2]) > sum(logprobs[0])
        sampler = await alice.sampler(sampling_session_seq_id=0)
        [ids] = rows(1)
        body = await alice.sample(sampler, ids, num=2)
        tokens, sampled, prompt = read_samples(body)
        assert tokens[0] != tokens[1]
        assert np.isnan(prompt[0])
        assert prompt[1:].tolist() == pytest.approx(await alice.learn(), abs=1e-5)
        _, _, all_logprobs = read_samples(await alice.sample(sampler, ids + tokens[1], 1))
        assert all_logprobs[len(ids) :].tolist() == pytest.approx(sampled[1], abs=1e-5)
        assert read_samples(await alice.sample(sampler, ids, 2, num=2))[0] == tokens
        state = (await alice.step("save_weights", path="s"))["path"]
        want = [await alice.learn(5), await alice.learn(5)]
        loaded = await alice.step("load_weights", path=state, optimizer=True)
        assert loaded["model_id"] == alice.model_id
        assert [await alice.learn(5), await alice.learn(5)] == want
        other = await alice.sampler(path="w.tmp")
        named = await alice.sampler(path="w")
        asked = {"session_id": alice.session, "sampling_session_seq_id": 9}
        made = await alice.post("create_sampling_session", asked | {"model_path": named["path"]})
        for saved in (named, other):
            facts = await alice.post("weights_info", {"tinker_path": saved["path"]})
            assert (facts["lora_rank"], facts["base_model"]) == (4, str(tiny_model))
        prompt = read_samples(await alice.sample(made["sampling_session_id"], ids))[2]
        oracle = exported(named["path"], tmp_path, tiny_model)
        assert prompt[1:].tolist() == pytest.approx(oracle(ids), abs=1e-5)
        assert (await alice.post("telemetry", {"events": []})) == {"status": "accepted"}
        folder = tenants_module.folder_of(tmp_path, "alice", state)
        os.rename(folder, folder.with_name(f".{folder.name}.old"))  # As a kill may leave it.
        Tenants(tenants.lora, tenants.sampler, tenants.model, tmp_path)
        await alice.post("weights_info", {"tinker_path": state})
        # Another server's weights would be others.
        for name, value, match in (
            ("alpha", 16.0, "saved with --lora_alpha 32"),
            ("has_head", False, "no adapters of the head"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(tenants.lora, name, value)
                assert match in (await alice.step("load_weights", path=state))["error"]
                asked |= {"sampling_session_seq_id": 10, "model_path": named["path"]}
                refused = await alice.post("create_sampling_session", asked, 422)
                assert match in refused["error"]


def exported(path, out, model):
    """Logprobs of transformers' model with the adapter that the command exports."""
    target = out / "adapter"
    flags = ["--to", str(target), "--out", str(out), "--tenant", "alice"]
    assert main(["tinker", "export", path, *flags]) == 0
    base = AutoModelForCausalLM.from_pretrained(str(model))
    peft = PeftModel.from_pretrained(base, str(target)).eval()

    def logprobs(ids):
        import torch

        with torch.no_grad():
            logprobs = peft(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    return logprobs


async def test_one_tenant_reaches_nothing_of_another(serving, tmp_path):
    async with serving() as (alice, bob, _):
        await alice.begin()
        await bob.begin()
        state = (await alice.step("save_weights", path="s"))["path"]
        sampler = await alice.sampler(sampling_session_seq_id=0)
        promise = await alice.post(
            "asample",
            {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [9]}]}},
        )
        denied = [
            ("get_info", {"model_id": alice.model_id}, 404),
            ("optim_step", {"model_id": alice.model_id, "seq_id": 9, **ADAM_STEP}, 404),
            ("unload_model", {"model_id": alice.model_id}, 404),
            ("forward_backward", forward_backward([row([8, 9])], model_id=alice.model_id), 404),
            ("retrieve_future", {"request_id": promise["request_id"]}, 410),
            ("cancel_future", {"request_id": promise["request_id"]}, 410),
            ("session_heartbeat", {"session_id": alice.session}, 410),
            ("weights_info", {"tinker_path": state}, 422),
            (
                "create_sampling_session",
                {
                    "session_id": bob.session,
                    "sampling_session_seq_id": 0,
                    "model_path": state,
                },
                422,
            ),
            (
                "asample",
                {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": []}},
                404,
            ),
        ]
        for path, body, status in denied:
            await bob.post(path, body, status)
        await bob.step("save_weights", path="s")
        others = state.replace("tinker://", f"tinker://{bob.model_id}/weights/../../../alice/")
        for path in (state, others, "tinker://../../alice"):
            error = (await bob.step("load_weights", path=path, optimizer=True))["error"]
            assert re.search("no such weights|must be tinker", error)
        for headers in ({}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": "é"}):
            bob.headers = headers
            await bob.post("create_session", {}, 401)
        assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["Me", "a/b", "keys"])
def test_a_tenant_whose_name_cannot_be_a_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="other than keys"):
        read_keys(tmp_path / "keys", ["me", name])
    assert not (tmp_path / "keys").exists()


async def test_chunks_that_arrive_last_first_are_learned_in_order(serving):
    async with serving() as (alice, _, _):
        await alice.begin()
        data = [row(ids) for ids in rows(3000)]
        promises = {}
        for seq in (3, 2, 1):
            chunk = data[1000 * (seq - 1) : 1000 * seq]
            body = forward_backward(chunk, model_id=alice.model_id, seq_id=seq)
            promises[seq] = await alice.post("forward_backward", body)
        outputs = []
        for seq in (1, 2, 3):
            asked = {"request_id": promises[seq]["request_id"]}
            outputs += read_output(await alice.post("retrieve_future", asked))[0]
        assert [len(values) for values in outputs] == [len(ids) - 1 for ids in rows(3000)]


async def test_a_failed_request_is_its_clients_alone(serving, made, monkeypatch):
    async with serving() as (alice, bob, tenants):
        assert made.max_models == tenants.max_models, "the quota of --tenants"
        await alice.begin()
        await bob.begin()
        bad = await alice.backward([8, 200])
        assert "outside of the vocabulary" in bad["error"]
        assert "earlier request" in (await alice.step("optim_step", **ADAM_STEP))["error"]
        assert await alice.learn() == await bob.learn(), "the step after it is the first"
        greedy = Client(alice.http, "", "", alice.model)
        greedy.url, greedy.headers = bob.url, bob.headers
        refused = "a key may have 1 of this server's 2 models"
        error = (await greedy.begin())["error"]
        assert refused in error
        assert "without a heartbeat is freed after 300 s" in error
        await alice.post("unload_model", {"model_id": alice.model_id})
        assert refused in (await greedy.begin())["error"], "the other model is for other keys"
        await alice.begin()
        await bob.post("unload_model", {"model_id": bob.model_id})
        assert (await greedy.begin())["model_id"]
        steep = {"adam_params": ADAM | {"learning_rate": 1e38}}
        await alice.backward([8, 9])
        await alice.step("optim_step", **steep)
        error = (await alice.sampler(sampling_session_seq_id=0))["error"]
        assert "weights are not finite" in error
        assert "are not finite" in (await alice.step("save_weights", path="x"))["error"]
        dimuon = {"optimizer_params": {"type": "dimuon"}}
        assert "dimuon is not supported" in (await alice.step("optim_step", **dimuon))["error"]
        with monkeypatch.context() as patch:
            patch.setattr(tenants_module, "MAX_SESSIONS", 1)
            await bob.post("create_session", {}, 429)
        monkeypatch.setattr(tenants_module, "SILENT_S", 0.0)
        assert (await bob.begin())["model_id"], "a silent session's model makes room"


async def test_requests_of_a_model_that_could_not_be_made_touch_no_learner(serving):
    async with serving() as (alice, _, tenants):
        held = threading.Event()
        tenants.turns.thread.submit(held.wait)
        session = (await alice.post("create_session", {}))["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": alice.model}
        await alice.post("create_model", asked | {"lora_config": {"rank": 1000}})
        body = {"model_id": f"{session}:train:0", "seq_id": 1, "path": "stolen"}
        promise = await alice.post("save_weights", body)
        held.set()
        result = await alice.post("retrieve_future", {"request_id": promise["request_id"]})
        assert "could not be made" in result["error"]


async def test_snapshots_make_room_for_newer_ones_of_their_tenant(serving):
    async with serving() as (alice, bob, tenants):
        await alice.begin()
        await bob.begin()
        [ids] = rows(1)
        samplers = [await bob.sampler(sampling_session_seq_id=0)]
        for number in range(2):
            samplers.append(await alice.sampler(sampling_session_seq_id=number))
            await alice.learn()
        results = [
            await client.sample(sampler, ids)
            for client, sampler in zip((bob, alice, alice), samplers, strict=True)
        ]
        assert isinstance(results[2], bytes)
        assert "--max_snapshots 2" in results[0 if isinstance(results[1], bytes) else 1]["error"]
        tenants.sampler.snapshots.clear()
        used, unused = [await alice.sampler(sampling_session_seq_id=n) for n in (2, 3)]
        await alice.sample(used, ids)
        newest = await alice.sampler(sampling_session_seq_id=4)
        results = [await alice.sample(each, ids, seq_id=1) for each in (newest, used, unused)]
        assert [isinstance(result, bytes) for result in results] == [True, True, False]
        for snapshot in tenants.sampler.snapshots.values():
            snapshot.num_users += 1
        error = (await alice.sampler(sampling_session_seq_id=7))["error"]
        assert "all 2 snapshots are sampling" in error


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_real_engine_samples_with_the_learners_logprobs(kind, make_model, tmp_path):
    """Two of three saved adapters are loaded at once, also by a server that was killed."""
    flags = ["--engine", kind, "--out", str(tmp_path), "--max_context_tokens", "128", *FLAGS]
    args, config = read_flags(["--model", str(make_model(heads=2)), *flags])
    tenants, samplers = make_tenants(args, config, make_lora(args, config)), []
    engine, ([ids], numbers) = tenants.sampler.engine, (rows(1), count())

    async def check(client, sampler, **params):
        tokens, sampled, _ = read_samples(
            await client.sample(sampler, ids, next(numbers), num=2, **params)
        )
        for sequence, logprobs in zip(tokens, sampled, strict=True):
            body = await client.sample(sampler, ids + sequence, next(numbers), max_tokens=1)
            ours = read_samples(body)[2]
            assert logprobs == pytest.approx(ours[len(ids) :].tolist(), abs=1e-4)
        return ours[1 : len(ids)]

    async with serve(tenants) as (alice, bob, _):
        assert "give train_unembed=False" in (await alice.begin())["error"]
        for seed, client in enumerate((alice, bob, alice)):
            if seed < 2:
                await client.begin(train_unembed=False)
            for _ in range(4):
                await client.learn(seed)
            named = await client.sampler(path=f"w{seed}")
            asked = {"session_id": client.session, "sampling_session_seq_id": seed}
            asked["model_path"] = named["path"]
            made = await client.post("create_sampling_session", asked)
            samplers.append((client, made["sampling_session_id"]))
        prompts = [await check(*each) for each in samplers for _ in range(2)]
        assert abs(prompts[0] - prompts[2]).max() > 0.1, "adapters too weak to be distinguished"
        _, models = await ask(f"{engine.server.url}/v1/models", token=engine.server.key)
        assert len(json.loads(models)["data"]) == 1 + 2
        asking = asyncio.create_task(check(*samplers[2], max_tokens=100, stop=[1000]))
        while not engine._num_asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.killpg(engine.server.process.pid, signal.SIGKILL)
        assert (await asking).tolist() == pytest.approx(prompts[-1].tolist(), abs=1e-5)
        await check(*samplers[1])
    await asyncio.to_thread(tenants.sampler.close)


async def test_samples_are_bounded_and_cancelled(serving, monkeypatch):
    monkeypatch.setattr(tenants_module, "MAX_SAMPLED_TOKENS", 16000)
    async with serving() as (alice, _, tenants):
        await alice.begin()
        asked = {"session_id": alice.session, "sampling_session_seq_id": 0}
        made = await alice.post("create_sampling_session", asked | {"base_model": alice.model})
        body = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0}
        body |= {"prompt": {"chunks": [{"tokens": [9]}]}}
        long = body | {"num_samples": 3, "sampling_params": {"max_tokens": 4000, "stop": [1000]}}
        promise = await alice.post("asample", long)
        assert len(set(promise["sample_sequence_ids"])) == 3
        assert await alice.post("asample", long) == promise, "a repeat counts once"
        await alice.post("asample", body | {"seq_id": 1}, 429)  # 3 * (4000 + 1024) tokens wait.
        await alice.post("cancel_future", {"request_id": promise["request_id"]})
        result = await alice.post("retrieve_future", {"request_id": promise["request_id"]})
        assert "cancelled" in result["error"]
        assert isinstance(await alice.sample(made["sampling_session_id"], [9], 2), bytes)
        last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1}
        last |= {"seq_id": 3, "prompt": {"chunks": [{"tokens": [9] * 4}]}}
        _, _, logprobs = read_samples(await alice.result("asample", body | last))
        assert np.isnan(logprobs).tolist() == [True, True, True, False]
        for number in (4, 5):  # Each counts the longest context.
            endless = {"seq_id": number, "sampling_params": {"max_tokens": 1 << 30}}
            await alice.post("asample", body | endless)
        await alice.post(f"sessions/{alice.session}/finish", {})
        await alice.post("session_heartbeat", {"session_id": alice.session}, 410)
        assert not tenants.models


@pytest.mark.parametrize(
    "path, body, status, match",
    [
        ("checkpoints", {}, 404, "no management API"),
        ("create_model", {"session_id": 3}, 422, "session_id"),
        ("forward_backward", {"model_id": "m"}, 415, "reads application/x-protobuf"),
        ("forward_backward", b"\xff", 422, "not protobuf"),
        ("session_heartbeat", {"session_id": "x"}, 410, "server restarted"),
        ("optim_step", {"model_id": "x", "seq_id": 1}, 404, "begin a new session from saved"),
    ],
)
async def test_other_requests_have_an_answer(serving, path, body, status, match):
    async with serving() as (alice, _, _):
        assert re.search(match, (await alice.post(path, body, status))["error"])


# Fields of a request, each within the one before: model_id, seq_id, data (chunks: text, image, sound; inputs:
# name, tensor: values, sparse, dtype, shape; spans), loss_fn, settings, forward_only, settings again.
FIELDS = [
    *([number] for number in range(1, 9)),
    *([3, number] for number in range(1, 5)),
    *([3, 1, chunk] for chunk in range(1, 5)),
    *([3, 1, 2, number] for number in range(1, 5)),
    *([3, 1, 1, 1], [3, 2, 1], [3, 2, 2]),
    *([3, 2, 2, number] for number in range(1, 5)),
    *([7, 1], [7, 2], [7, 2, 1], [7, 2, 2]),
]
BYTES = [b"", b"\xff", b"\x08\x01", b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 11, b"a" * 7]
VALUES = [
    lambda number: varint(number << 3) + b"\xff" * 9 + b"\x01",
    lambda number: varint(number << 3 | 1) + b"\xff" * 8,
    lambda number: varint(number << 3 | 3),
    lambda number: varint(number << 3 | 5) + b"\xff" * 4,
    *(
        lambda number, data=data: varint(number << 3 | 2) + varint(len(data)) + data
        for data in BYTES
    ),
]


def malformed():
    """Fields of requests with other values than theirs."""
    for path in FIELDS:
        for value in VALUES:
            body = value(path[-1])
            for number in path[-2::-1]:
                body = message([(number, body)])
            yield body


async def test_a_hostile_tenant_hinders_nobody(serving, monkeypatch):
    monkeypatch.setattr(queue, "MAX_WAITING", 20)
    async with serving() as (alice, bob, _):
        await alice.begin(seed=5)
        await bob.begin()
        await alice.learn(1)
        want = await alice.learn(1)
        # A finite adapter whose logits are NaN fails the samples of its tenant alone.
        await bob.backward([8, 9])
        await bob.step("optim_step", adam_params=ADAM | {"learning_rate": 1e20})
        samplers = [await each.sampler(sampling_session_seq_id=0) for each in (alice, bob)]
        long = {"max_tokens": 60, "stop": [1000]}
        [ids] = rows(1)
        samples = read_samples(await alice.sample(samplers[0], ids, 0, 4, **long))
        for number in range(1, 4):
            bad, longer, good = await asyncio.gather(
                bob.sample(samplers[1], ids * 4, number, 8, **long),
                alice.sample(samplers[0], ids * 4, 10 + number, 4, **long),
                alice.sample(samplers[0], ids, number, 4, **long),
            )
            assert "logits are NaN" in bad["error"]
            tokens, logprobs, _ = read_samples(good)
            assert tokens == samples[0]
            assert np.ravel(logprobs).tolist() == pytest.approx(np.ravel(samples[1]), abs=1e-4)
            assert np.isfinite(read_samples(longer)[1]).all()
        await bob.post("unload_model", {"model_id": bob.model_id})
        await bob.begin()
        await alice.post("unload_model", {"model_id": alice.model_id})
        await alice.begin(seed=5)
        await alice.learn(1)
        refusals = []
        for junk in malformed():
            start = message([(1, bob.model_id), (2, bob.seq + 1), (3, row([8, 9])), (4, "ppo")])
            headers = bob.headers | {"Content-Type": PROTOBUF}
            url = f"{bob.url}/forward_backward"
            async with bob.http.post(url, data=start + junk, headers=headers) as response:
                answer = await response.json()
            assert response.status in (200, 404, 422), (junk, answer)
            if response.status == 200 and answer["request_id"].endswith(f":{bob.seq + 1}"):
                bob.seq += 1
                refusals.append(await bob.post("retrieve_future", answer))
        assert all(each["category"] == "user" for each in refusals)
        many_fields = message([(3, b"\x08\x01" * (20 << 20))])
        large = b'{"model_id": "m", "x": [' + b"0," * (20 << 20) + b"0]}"
        bob.headers |= {"Content-Type": "application/json"}
        sent = [
            bob.post("forward_backward", many_fields, 404),
            bob.post("forward_backward", b"\xff" * (40 << 20), 422),
            bob.post("forward_backward", bytes(65 << 20), 413),
            bob.http.post(f"{bob.url}/optim_step", data=large, headers=bob.headers),
        ]
        flood = [asyncio.ensure_future(each) for each in sent]
        for number in range(40):
            gap = {"model_id": bob.model_id, "seq_id": bob.seq + 2 + number}
            status = 200 if number < 20 else 429
            await bob.post("optim_step", gap | ADAM_STEP, status)
        # The tenant next to it takes the steps that it would have taken alone.
        assert await alice.learn(1) == want
        *_, too_large = await asyncio.gather(*flood)
        assert too_large.status == 413


async def learn_and_save(client, state: str, after: dict[str, list], num: int) -> None:
    """Continues from a state, "" for none, and saves others. The two steps after a state are those
    that an earlier server made."""
    if state:
        client.session = (await client.post("create_session", {}))["session_id"]
        asked = {"session_id": client.session, "model_seq_id": 0, "path": state}
        made = await client.result("load_weights", asked | {"optimizer": True})
        client.model_id, client.seq = made["model_id"], 0
    else:
        await client.begin(seed=5)
    for _ in range(num):
        steps = [await client.learn(1), await client.learn(1)]
        assert after.setdefault(state, steps) == steps
        state = (await client.step("save_weights", path=f"s{len(after)}"))["path"]
        client.saved.append(state)
    await client.post(f"sessions/{client.session}/finish", {})


async def kill_at_random(client, server, draw) -> None:
    last = client.seq + draw.randint(0, 20)
    while client.seq < last:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(draw.uniform(0, 0.05))
    server.kill()


@pytest.mark.parametrize("num_kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_servers_go_on_from_saved_states(tiny_model, tmp_path, num_kills):
    """At random moments of programs that learn and save. Folders that a kill left complete load too,
    and the steps after a state are the same bits."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_core.tools.tinker", "rl_core.tinker.server", "peft"])
    draw, port = random.Random(num_kills), free_port()
    argv = ["--model", str(tiny_model), "--port", str(port), "--out", str(tmp_path), *FLAGS]
    after: dict[str, list] = {}
    saved: list[str] = []

    async def life(is_killed: bool) -> None:
        server = context.Process(target=command.main, args=[argv], daemon=True)
        server.start()
        while True:
            with suppress(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
                break
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}"
            key = (tmp_path / "keys").read_text().split()[1]
            client = Client(http, url, key, str(tiny_model))
            client.saved = saved
            if is_killed:
                killing = asyncio.create_task(kill_at_random(client, server, draw))
                with suppress(aiohttp.ClientError):
                    await learn_and_save(client, saved_states(tmp_path)[-1], after, 100)
                await killing
            else:
                for state in saved_states(tmp_path):
                    await learn_and_save(client, state, after, 1)
                server.kill()
        server.join()

    for _ in range(num_kills):
        asyncio.run(life(True))
    num_states = len(saved_states(tmp_path)) - 1
    assert saved
    assert set(saved) <= {*saved_states(tmp_path)}
    print(f"{num_kills} kills: {len(saved)} states were saved, {num_states} are there")
    asyncio.run(life(False))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def saved_states(out) -> list[str]:
    """Paths of saved states, the latest last; first "" for none."""
    folders = sorted(out.glob("me/*/weights/s*"), key=lambda folder: folder.stat().st_mtime_ns)
    return ["", *(f"tinker://{'/'.join(folder.parts[-3:])}" for folder in folders)]
