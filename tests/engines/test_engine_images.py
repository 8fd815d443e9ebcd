"""Promises of every engine that sees: tokens behind images have the logprobs of
transformers' forward. Tests of servers run where they are installed, as in test_engine_contract.py.
"""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from kit import embedded, make_skeleton, metrics, run
from oracle import frozen
from test_embedded_images import RUN, conversations, converse, expected_logprobs, noise, user
from test_embedded_images import folder as folder
from test_engine_contract import KINDS, SERVED, spec_of
from transformers import AutoModelForImageTextToText

from rl_core.data.chat_loading import load_chat
from rl_core.data.samples import samples_from_turns
from rl_core.data.token_stream import TokenStream
from rl_core.types import SamplingParams

KL = "learn/policy/mismatch_kl_nats"


class Subject:
    """An engine and, as `hf`, the weights that it should have."""

    def __init__(self, kind: str, path: str, log):
        self.loop, self.chat, self.version = asyncio.new_event_loop(), load_chat(path), 0
        self.path, self.hf = path, copy.deepcopy(frozen(path))
        more = {"num_slots": 8, "vision": self.chat.vision}
        if kind == "embedded":
            model = AutoModelForImageTextToText.from_pretrained(path)
            more |= {"tokenizer": self.chat.tokenizer, "max_context_tokens": 512}
            self.engine = embedded(model, **more)
        else:
            skeleton = make_skeleton(path)
            self.engine = SERVED[kind](spec_of(path, log, skeleton, self.chat.tokenizer, **more))
            self.run(self.engine.wake())

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 600))

    def update(self, names: str, factor: float) -> None:
        """Multiplies the parameters with these words in their names."""
        self.version += 1
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                parameter.mul_(factor if names in name else 1.0)
        named = self.hf.named_parameters()
        weights = ((name, p.detach().float()) for name, p in named)
        self.run(self.engine.update(weights, self.version))

    def check(self, samples) -> None:
        for sample in samples:
            ours = torch.from_numpy(sample.rollout_logprobs[sample.loss_mask])
            theirs = expected_logprobs(self.path, sample, self.hf)
            torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=KINDS)
def subject(request, make_model, tmp_path_factory):
    # vLLM's attention on a CPU takes heads of at least 32.
    path = str(make_model("qwen3_vl", heads=2))
    made = Subject(request.param, path, tmp_path_factory.mktemp("log") / "engine.log")
    yield made
    made.run(made.engine.close())
    made.loop.close()


@pytest.mark.parametrize("names, factor", [("visual", 1.0), ("visual", 1.5), ("language", 0.8)])
def test_logprobs_are_the_learners_after_each_update(subject, names, factor):
    """Features of equal images are computed again by new weights of the vision tower."""
    subject.update(names, factor)
    subject.check(subject.run(converse(subject.engine, subject.chat, *conversations())))


def test_a_sampled_placeholder_is_read_as_the_learner_reads_it(subject):
    opening, later = [user(noise(0), "how many?")], [user("why?")]
    talk = converse(subject.engine, subject.chat, [opening] * 8, [later] * 8, 60)
    samples = subject.run(talk)
    token_id = subject.chat.vision.token_id
    assert any((s.token_ids[s.loss_mask] == token_id).any() for s in samples)
    subject.check(samples)


def test_cancelled_and_paused_requests_keep_their_images(subject):
    stream = TokenStream(subject.chat, [user("a", noise(0), "b", noise(1))])
    params = SamplingParams(max_tokens=400)

    def ask():
        return asyncio.ensure_future(
            subject.engine.generate(stream.prompt_ids, params, seed=0, images=stream.images)
        )

    async def paused():
        asked = [ask() for _ in range(3)]
        await asyncio.sleep(0.3)
        asked.pop().cancel()
        await subject.engine.pause()
        await subject.engine.resume()
        return await asyncio.gather(*asked)

    all_done = subject.run(paused())
    assert [len(done.token_ids) for done in all_done] == [400] * 2
    for done in all_done:
        subject.check(samples_from_turns([stream.turn(done)], 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_grpo_learns_from_images_with_a_servers_logprobs(kind, folder, make_model):
    flags = ["--engine", kind, "--model", make_model("qwen3_vl", heads=2), RUN, "--env_path"]
    rows = ["--data.train", folder / "rows.jsonl", "--max_tokens 8 --optim.lr 3e-2"]
    out = run(folder / "run", *flags, folder / "env.py", *rows, "--num_steps 3")
    values = [row[KL] for row in metrics(out) if KL in row]
    assert len(values) == 3 and max(values) < 1e-6, values
