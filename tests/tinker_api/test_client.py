"""The official tinker client trains on the server, unchanged."""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import contextmanager

import kit
import numpy as np
import pytest
import torch
from PIL import Image
from test_multi_lora import rows

from rl_core.data.images import image_in_bytes
from rl_core.data.vision_models import load_family
from rl_core.tinker.server import TinkerServer
from rl_core.tinker.tenants import read_keys
from rl_core.tools.tinker import make_lora, make_tenants, read_flags
from rl_core.types import TrainingSample, counter_seed

tinker = pytest.importorskip("tinker", reason="tinker is not installed")
from tinker import types  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)


@contextmanager
def serving(model, out):
    """A client of a server in this process."""
    args, config = read_flags(["--model", str(model), "--out", str(out), "--max_models", "12"])
    tenants = make_tenants(args, config, make_lora(args, config))
    keys = read_keys(out / "keys", ["me"])
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []

    async def serve():
        server = TinkerServer(tenants, keys)
        await tenants.sampler.start()
        asyncio.create_task(tenants.turns.work())  # noqa: RUF006
        ports.append(await server.http.listen())
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=loop.run_until_complete, args=[serve()], daemon=True).start()
    assert ready.wait(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        url = f"http://127.0.0.1:{ports[0]}"
        yield tinker.ServiceClient(base_url=url, api_key=keys["me"])


@pytest.fixture(scope="module")
def service(tiny_model, tmp_path_factory):
    with serving(tiny_model, tmp_path_factory.mktemp("tinker")) as client:
        yield client


@pytest.fixture
def make_client(service, tiny_model):
    def make(**options):
        options = {"rank": 8, "seed": 3, **options}
        return service.create_lora_training_client(base_model=str(tiny_model), **options).result()

    return make


def datum(ids, **inputs):
    inputs = inputs or {"weights": [1.0] * (len(ids) - 1)}
    inputs["target_tokens"] = ids[1:]
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def learn(client, data, loss_fn="cross_entropy"):
    """Requests are sent before the first has a result, as programs do."""
    backward, step = client.forward_backward(data, loss_fn), client.optim_step(ADAM)
    result = backward.result()
    step.result()
    return result


def logprobs_of(client, data):
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return [out["logprobs"].to_torch() for out in outputs]


def test_a_client_learns_samples_and_continues_from_a_state(service, make_client):
    client = make_client()
    data = [datum(ids) for ids in rows(3)]
    losses = [learn(client, data).metrics["loss:sum"] for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    tokenizer = client.get_tokenizer()
    assert len(tokenizer) == 104
    sampler = client.save_weights_and_get_sampling_client().result()
    [ids] = rows(1)
    params = types.SamplingParams(max_tokens=8, seed=1, stop=[1])
    sampled = sampler.sample(types.ModelInput.from_ints(ids), 2, params).result()
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    for sequence in sampled.sequences:
        all_ids = types.ModelInput.from_ints(ids + list(sequence.tokens))
        again = sampler.compute_logprobs(all_ids).result()
        assert again[len(ids) :] == pytest.approx(list(sequence.logprobs), abs=1e-5)
    path = client.save_state("s").result().path
    named = client.save_weights_for_sampler("w").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    learn(client, data)
    learn(other, data)
    for got, want in zip(logprobs_of(other, data), logprobs_of(client, data), strict=True):
        assert torch.equal(got, want)
    sampler = service.create_sampling_client(model_path=named).result()
    base = service.create_sampling_client(base_model=client.get_info().model_name).result()
    prompt = types.ModelInput.from_ints(ids)
    assert sampler.compute_logprobs(prompt).result() != base.compute_logprobs(prompt).result()


def test_custom_losses_are_those_of_autograd(make_client):
    data = [datum(ids) for ids in rows(3)]
    custom, direct = make_client(), make_client()
    for client in (custom, direct):
        learn(client, data)

    def squares(data, logprobs):
        return sum((x**2).sum() for x in logprobs), {"num:sum": len(data)}

    result = custom.forward_backward_custom(data, squares).result()
    custom.optim_step(ADAM).result()
    before = logprobs_of(direct, data)
    assert result.metrics["loss:sum"] == pytest.approx(float(sum((x**2).sum() for x in before)))
    assert result.metrics["num:sum"] == 3
    # d sum(x^2) / dx = 2 x
    weighted = [
        datum(ids, weights=(-2 * x).tolist()) for ids, x in zip(rows(3), before, strict=True)
    ]
    learn(direct, weighted)
    for got, want in zip(logprobs_of(custom, data), logprobs_of(direct, data), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_importance_sampling_learns_what_is_rewarded(make_client):
    client = make_client()
    prompt = types.ModelInput.from_ints([8, 9])
    params = types.SamplingParams(max_tokens=1, stop=[1000])
    shares = []
    for _ in range(8):
        sampler = client.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(prompt, 64, params).result().sequences
        rewards = [float(sequence.tokens[0] < 56) for sequence in sampled]
        shares.append(sum(rewards) / 64)
        data = []
        for sequence, reward in zip(sampled, rewards, strict=True):
            ids = [8, 9, *sequence.tokens]
            advantages = [0.0, reward - shares[-1]]
            data.append(datum(ids, logprobs=[0.0, *sequence.logprobs], advantages=advantages))
        ratios = learn(client, data, "importance_sampling")
        assert ratios.metrics["loss:sum"] == pytest.approx(0, abs=1e-2), "ratio 1, centred"
    assert shares[-1] > 0.9 > 0.7 > shares[0]


def test_3000_data_are_one_step(make_client):
    all_ids, parts = make_client(), make_client()
    data = [datum(ids) for ids in rows(3000)]
    result = all_ids.forward_backward(data, "cross_entropy").result()
    losses = [parts.forward_backward([d], "cross_entropy") for d in data[:2]]
    assert [len(out["logprobs"].data) for out in result.loss_fn_outputs] == [
        len(ids) - 1 for ids in rows(3000)
    ]
    for out, loss in zip(result.loss_fn_outputs, losses, strict=False):
        assert -sum(out["logprobs"].data) == pytest.approx(loss.result().metrics["loss:sum"], 1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(
        -sum(sum(out["logprobs"].data) for out in result.loss_fn_outputs), 1e-5
    )


@pytest.mark.parametrize(
    "options, match",
    [
        ({"rank": 33}, "--max_rank 32"),
        ({"base_model": "other"}, "this server has"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "dimuon is not supported"),
    ],
)
def test_models_that_cannot_be_made_are_refused_by_name(service, tiny_model, options, match):
    options = {"base_model": str(tiny_model), "rank": 8} | options
    with pytest.raises(tinker.RequestFailedError, match=match):
        service.create_lora_training_client(**options).result()


def test_the_cookbooks_default_loss_is_refused_with_the_way_out(make_client):
    with pytest.raises(tinker.RequestFailedError, match="give loss_fn=importance_sampling"):
        make_client().forward_backward([datum(rows(1)[0])], "stable_reinforce").result()


def image_chunk(num_tokens=None):
    """A picture of 16 x 24 pixels: 2 x 3 tokens."""
    pixels, file = np.random.RandomState(0).randint(0, 256, (16, 24, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=num_tokens)


def text_chunk(ids):
    return types.EncodedTextChunk(tokens=ids)


def test_a_model_that_sees_learns_and_samples_as_in_runs(make_model, tmp_path):
    path, image = make_model("qwen3_vl"), image_chunk(6)
    before, after = [20, 21, 22], rows(1)[0]
    family = load_family(str(path))
    seen = image_in_bytes(image.data)
    ids = [*before, *family.expand(seen), *after]
    num = len(ids) - len(after)
    learner = kit.make_learner(
        path, "--algorithm sft --actors.policy.lora.rank 32 --optim.lr 1e-2 --optim.max_grad_norm 0"
    )
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=[False] * num + [True] * len(after),
        rollout_logprobs=[0] * len(ids),
        policy_versions=[0] * len(ids),
        advantages=[0] * num + [1] * len(after),
        images=(seen,),
    )
    weights = [0.0] * (num - 1) + [1 / len(after)] * len(after)
    chunks = [text_chunk(before), image, text_chunk(after[:-1])]
    inputs = {"target_tokens": [0] * (num - 1) + after, "weights": weights}
    data = [types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)]
    with serving(path, tmp_path) as service:
        seed = counter_seed(0, "policy")  # A run's.
        client = service.create_lora_training_client(
            base_model=str(path), seed=seed, train_unembed=False
        ).result()
        for step in range(3):
            want = learner.step(learner.shard([sample])[0], step)["loss"].value
            assert learn(client, data).metrics["loss:sum"] == pytest.approx(want, abs=1e-5), step
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput(chunks=[text_chunk(before), image])
        params = types.SamplingParams(max_tokens=5, seed=1, stop=[1000])
        [sampled] = sampler.sample(prompt, 1, params).result().sequences
        chunks = [*prompt.chunks, text_chunk(sampled.tokens[:-1])]
        inputs = {"target_tokens": [0] * (num - 1) + sampled.tokens}
        again = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
        got = logprobs_of(client, [again])[0][num - 1 :].tolist()
        assert got == pytest.approx(sampled.logprobs, abs=1e-5)
        wrong = types.ModelInput(chunks=[text_chunk(before), image_chunk(7)])
        with pytest.raises(tinker.RequestFailedError, match="6 tokens; expected_tokens is 7"):
            sampler.sample(wrong, 1, params).result()


def test_images_for_a_model_that_reads_text_are_refused_by_name(service, make_client, tiny_model):
    prompt = types.ModelInput(chunks=[text_chunk([8]), image_chunk(6)])
    inputs = {"target_tokens": [9] * 7}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]
    with pytest.raises(tinker.RequestFailedError, match="reads text alone; leave images out"):
        make_client().forward_backward(data, "cross_entropy").result()
    base = service.create_sampling_client(base_model=str(tiny_model)).result()
    params = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match="reads text alone; leave images out"):
        base.sample(prompt, 1, params).result()
    pointer = types.ImageAssetPointerChunk(format="png", location="x.png", expected_tokens=6)
    with pytest.raises(tinker.RequestFailedError, match="bytes in an ImageChunk"):
        base.sample(types.ModelInput(chunks=[pointer]), 1, params).result()
