"""Truncated sampling in training: the engine names the ids that each token was drawn from, and the
learner's probabilities are over these."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import nullcontext
from dataclasses import replace

import kit
import numpy as np
import pytest
import torch
from kit import embedded, make_learner, metrics, part_of, run, trajectories, words
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_core.config import parse_config
from rl_core.data.samples import samples_from_turns
from rl_core.engines.kv_slots import RowParams, sample
from rl_core.engines.sglang import SGLangEngine
from rl_core.learning import truncation
from rl_core.learning.padded_forward import FullLogitsForward, PaddedForward
from rl_core.learning.truncation import support_labels, support_logprobs
from rl_core.run.plan.algorithm_choice import choose_algorithm
from rl_core.run.plan.engine import choose_engine
from rl_core.sampling.groups import make_group
from rl_core.sampling.resumable_rollouts import read_groups
from rl_core.types import SamplingParams, Task, Turn

TOP = "--sampling.top_k 5 --sampling.top_p 0.8"
TOY = torch.tensor([0.15, 0.45, 0.1, 0.3])
# Limits of the toy -> probabilities of its four tokens, worked out by hand.
TABLE = [
    ({"top_k": 2}, [0, 0.6, 0, 0.4]),
    ({"top_p": 0.7}, [0, 0.6, 0, 0.4]),
    ({"min_p": 0.3}, [1 / 6, 1 / 2, 0, 1 / 3]),
    # Top-p of what top-k leaves: 1/2 and 1/3 are the first to reach 0.7.
    ({"top_k": 3, "top_p": 0.7}, [0, 0.6, 0, 0.4]),
    ({"top_k": 1}, [0, 1.0, 0, 0]),
    ({"top_k": 3, "min_p": 0.5}, [0, 0.6, 0, 0.4]),
]


def drawn(logits, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """(tokens, logprobs, ids that each was drawn from) of one row of logits at each uniform."""
    numbers = torch.tensor([[0.0, temperature, top_k, top_p, min_p]] * len(uniforms)).T
    most = top_k or len(logits)
    params = RowParams(numbers=numbers, num_ordered=most, num_kept=most)
    logits = logits.expand(len(uniforms), -1)
    tokens, logprobs, *kept = sample(logits, torch.tensor(uniforms), params)
    ids = [{int(n) for n in of_one if n >= 0} for of_one in torch.stack(kept, 1).tolist()]
    return tokens.long().tolist(), logprobs, ids


@pytest.mark.parametrize("limits, probs", TABLE)
def test_tokens_are_drawn_with_the_probabilities_of_the_table(limits, probs):
    uniforms = [n / 1000 for n in range(1000)]
    tokens, logprobs, ids = drawn(TOY.log(), uniforms, **limits)
    for token, prob in enumerate(probs):
        assert tokens.count(token) == pytest.approx(1000 * prob, abs=1)
    expected = torch.tensor(probs, dtype=torch.float32)[tokens]
    torch.testing.assert_close(logprobs.exp(), expected, atol=1e-6, rtol=0)
    assert all(kept == {n for n, p in enumerate(probs) if p} for kept in ids)


@pytest.mark.parametrize("seed", range(4))
def test_the_ids_and_their_probabilities_are_those_of_transformers_warpers(seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(20):
        logits = 3 * torch.randn(50, generator=generator)
        temperature, top_k = choose.uniform(0.5, 2), choose.randint(1, 60)
        top_p, min_p = choose.uniform(0.3, 1), choose.choice([0.0, choose.uniform(0, 0.3)])
        warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)]
        warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
        warped = logits[None]
        for warper in warpers:
            warped = warper(None, warped)
        expected = warped[0].log_softmax(0)
        tokens, logprobs, [ids] = drawn(logits, [0.7], temperature, top_k, top_p, min_p)
        assert ids == set(expected.isfinite().nonzero()[:, 0].tolist())
        torch.testing.assert_close(logprobs, expected[tokens], atol=1e-5, rtol=0)


def talks(engine, num: int, **limits) -> list[list[Turn]]:
    """The turns of conversations with an engine, two each. Each two begin alike."""

    async def talk(number: int) -> list[Turn]:
        draw, turns, seen = random.Random(number // 2), [], []
        for turn in range(2):
            new = [draw.randrange(8, 104) for _ in range(draw.randint(3, 12))]
            max_tokens = random.Random(number + 10 * turn).randint(1, 9)
            params = SamplingParams(max_tokens=max_tokens, **limits)
            draw_of = {"seed": number + 10 * turn, "session": f"{number}"}
            done = await engine.generate([*seen, *new], params, **draw_of)
            turns.append(Turn(new_ids=new, is_fresh=not turn, completion=done, name=str(draw_of)))
            seen += [*new, *done.token_ids]
        return turns

    async def play() -> list[list[Turn]]:
        turns_of = await asyncio.gather(*map(talk, range(num)))
        await engine.close()
        return turns_of

    return asyncio.run(play())


def conversations(model, **limits) -> list:
    """Samples of two turns by an engine with fewer slots than conversations, some untrained."""
    played = talks(embedded(model, num_slots=3), 8, keeps_ids=True, **limits)
    samples = []
    for number, turns in enumerate(played):
        # Branches of a conversation share a turn, which is trained once.
        trained = {turns[0].name} if number == 5 else set()
        advantage = random.Random(number).gauss(0, 1)
        samples += samples_from_turns(turns, advantage, f"{number // 2}", trained)
    return samples


@pytest.fixture(scope="module")
def played(make_model):
    """(folder of a model, samples of it with top-k 5 and top-p 0.8 at temperature 0.7)"""
    model = make_model(seed=3)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model, conversations(plain, top_k=5, top_p=0.8, temperature=0.7)


def batch_of(learner, samples):
    [minibatch], _ = learner.shard(samples)
    [batch] = minibatch.batches
    return batch


@torch.no_grad()
def test_the_learner_gives_the_engines_logprobs(played):
    model, samples = played
    learner = make_learner(model, TOP, "--sampling.temperature 0.7")
    batch = batch_of(learner, samples)
    logprobs, entropy = learner.forward(batch)
    torch.testing.assert_close(logprobs, batch.rollout_logprobs, atol=2e-5, rtol=0)
    assert len(batch.parents) > len(samples), "no prompt is shared"
    num_ids = (batch.labels >= 0).sum(1)
    assert num_ids.min() < num_ids.max() <= 5
    assert (entropy <= num_ids.log() + 1e-6).all()
    plain = make_learner(model, "--sampling.temperature 0.7")
    error = plain.forward(batch_of(plain, samples))[0] - batch.rollout_logprobs
    assert error.max() < 1e-5 and error.mean() < -0.1, "all ids would be the same"


def logprobs_and_entropies(logits, tokens):
    logp = logits.log_softmax(-1)
    terms = torch.where(logits.isneginf(), 0.0, logp.exp() * logp.clamp(min=-1e9))
    return logp.gather(1, tokens[:, None])[:, 0], -terms.sum(-1)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("tile_bytes", [1 << 20, 512])
def test_logprobs_and_entropy_are_those_of_masked_logits(monkeypatch, cap, tile_bytes):
    monkeypatch.setattr(truncation, "TILE_BYTES", tile_bytes)
    draw, choose = torch.Generator().manual_seed(0), random.Random(0)
    hidden, weight = (torch.randn(n, 16, generator=draw).double() for n in (23, 37))
    lines = [" ".join(map(str, choose.sample(range(37), choose.randint(1, 9)))) for _ in range(23)]
    first = torch.tensor([int(line.split()[-1]) for line in lines])
    labels, both = support_labels(first, lines), []
    share = torch.randn(2, 23, generator=draw).double()
    for is_ours in (True, False):
        h, w = (value.clone().requires_grad_() for value in (hidden, weight))
        if is_ours:
            logprobs, entropy = support_logprobs(h, w, labels, 0.7, cap)
        else:
            z = h @ w.T
            z = (z if cap is None else cap * (z / cap).tanh()) / 0.7
            mask = torch.full_like(z, -torch.inf)
            for row, line in enumerate(lines):
                mask[row, [int(n) for n in line.split()]] = 0.0
            logprobs, entropy = logprobs_and_entropies(z + mask, first)
        (share[0] * logprobs + share[1] * entropy).sum().backward()
        both.append((logprobs, entropy, h.grad, w.grad))
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_get_theirs():
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=draw).double() for n in (5, 9))
    labels = support_labels(torch.tensor([0, 1, 2, 3, 4]), ["0 8", "1 2 3", "2", "3 7", "4 0"])
    grads = []
    for is_trained in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        support_logprobs(h, w, labels)[0].sum().backward()
        grads.append(h.grad)
        assert (w.grad is not None) == is_trained
    assert torch.equal(*grads)


def test_bf16_products_are_summed_in_fp32():
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw).bfloat16() for n in (5, 9))
    labels = torch.arange(9).expand(5, -1)
    logprobs = support_logprobs(hidden, weight, labels)[0]
    expected = (hidden.double() @ weight.double().T).log_softmax(-1)[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("forward", [PaddedForward, FullLogitsForward])
def test_padded_rows_give_the_same(played, forward):
    model, samples = played
    learner = make_learner(model, TOP, "--sampling.temperature 0.7")
    batch = batch_of(learner, samples)
    packed = learner.policy(batch, 0.7)
    learner.policy.hf.set_attn_implementation("sdpa")
    learner.policy.use_forward(forward())
    padded = learner.policy(batch, 0.7)
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_each_label_stands_before_the_other_ids_of_its_line():
    labels = support_labels(torch.tensor([7, 3, 9]), ["4 7 1", "3", "9 0"])
    assert labels.tolist() == [[7, 4, 1], [3, -1, -1], [9, 0, -1]]


def test_tokens_without_their_ids_are_refused(played):
    model, samples = played
    learner = make_learner(model, TOP)
    first = samples[0]
    first = type(first)(**{n: getattr(first, n) for n in first.__slots__} | {"kept_ids": None})
    with pytest.raises(ValueError, match="tokens of policy do not name the ids"):
        learner.shard([first, *samples[1:]])


def test_what_training_cannot_do_is_refused_at_start_up(places):
    flags = words("--model {model} --env_path {dir}/letters.py --out x".format(**places))
    choose_algorithm(parse_config([*flags, *words(TOP)]), {})
    for wrong in ("--sampling.top_k 5000", "--sampling.top_p 0", "--sampling.min_p 2"):
        with pytest.raises(ValueError, match=wrong.split()[0]):
            parse_config([*flags, *words(wrong)])
    sft = words("--algorithm sft --data.train rows.jsonl --sampling.top_k 3")
    with pytest.raises(ValueError, match="top_k=3 has no meaning for --algorithm sft"):
        parse_config([*flags[:2], *flags[4:], *sft])


@pytest.mark.parametrize("version, is_refused", [("0.5.17", True), ("0.5.20", False)])
def test_an_sglang_that_names_more_ids_than_it_draws_from_is_refused(
    version, is_refused, tmp_path, monkeypatch
):
    (tmp_path / f"sglang-{version}.dist-info").mkdir()
    (tmp_path / f"sglang-{version}.dist-info/METADATA").write_text(f"Version: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = f"--model m --env_path x.py --out x --engine sglang {TOP} "
    SGLangEngine.check(parse_config(words(flags)), "policy", True)
    for also in ("--sampling.min_p 0.1", "--eval.sampling min_p=0.1"):
        says = pytest.raises(ValueError, match=r"policy: --sampling\.top_p=0\.8 with min_p")
        with says if is_refused else nullcontext():
            SGLangEngine.check(parse_config(words(flags + also)), "policy", True)


RUN = (
    "--model {model} --env_path {dir}/ask.py --max_tokens 10 --max_prompt_tokens 24 --num_steps 2 "
    "--tasks_per_step 4 --group_size 4 --optim.lr 1e-2 " + kit.STOP
)


def test_a_run_learns_with_several_updates_and_a_reference(places, tmp_path):
    """An adapter learns, whose head is frozen."""
    more = "--learner.epochs 2 --algo.kl_coef 0.1 --algo.importance_correction tis --eval_every 2"
    more += " --actors.policy.lora.rank 4"
    out = run(tmp_path / "run", RUN.format(**places), TOP, more)
    rows = [row for row in metrics(out) if "learn/policy/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["learn/policy/mismatch_kl_nats"] < 1e-7
        assert row["learn/policy/step_kl_nats"] > 1e-6
        assert row["learn/policy/entropy_nats"] < np.log(5)
    completions = [
        turn["completion"]
        for one in trajectories(out / "rollouts/step_000001.jsonl.zst")
        for turn in one["turns"]
    ]
    for done in completions:
        assert len(done["kept_ids"]) == len(done["token_ids"])
        for token, line in zip(done["token_ids"], done["kept_ids"], strict=True):
            assert str(token) in line.split() and len(line.split()) <= 5
    for file in (out / "rollouts").glob("eval*"):
        assert all(
            not turn["completion"]["kept_ids"]
            for one in trajectories(file)
            for turn in one["turns"]
        )


def test_a_resumed_run_is_the_uninterrupted_one(places, tmp_path):
    """Completions that were under way keep the ids of their first tokens."""
    more = "--max_staleness 1 --deterministic true --num_steps 4 --save_every 2"
    flags = (RUN.format(**places), TOP, more, "--keep_checkpoints 0")
    out = run(tmp_path / "run", *flags)
    expected = kit.weights(out)
    groups = read_groups(kit.rewind(out, 2), range(99), 0).values()
    assert re.search(r"'kept_ids': \['\d", str(list(groups)))
    run(out, *flags, "--resume")
    for name, value in kit.weights(out).items():
        assert torch.equal(value, expected[name]), name


def test_a_step_is_replayed_from_its_rollouts(places, tmp_path):
    from rl_core.tools.replay import replay

    out = run(tmp_path / "run", RUN.format(**places), TOP, "--learner.updates_per_epoch 2")
    step = replay(out, 2, [])
    assert step.recorded.keys() <= step.replayed.keys()
    for name in ("learn/policy/loss", "learn/policy/grad_norm", "learn/policy/entropy_nats"):
        assert step.replayed[name] == pytest.approx(step.recorded[name], rel=1e-4, abs=1e-6)


def test_ids_travel_from_ranks_that_only_sample(places, tmp_path):
    """And to the rank that trains on the sample."""
    more = "--rollout_ranks 1 --max_staleness 1 --max_turns 2"
    out = run(tmp_path / "run", RUN.format(**places), TOP, more, ranks=3)
    rows = [row for row in metrics(out) if "learn/policy/loss" in row]
    assert len(rows) == 2
    assert rows[0]["learn/policy/mismatch_kl_nats"] < 1e-7


@pytest.mark.parametrize("alone", ["--sampling.top_p 0.9", "--sampling.min_p 0.02"])
def test_top_p_or_min_p_alone_takes_the_largest_top_k_and_says_so(places, tmp_path, capfd, alone):
    note = "top_p and min_p choose among the 1,024 likeliest ids"
    out = run(tmp_path / "run", RUN.format(**places), alone)
    assert capfd.readouterr().out.count(note) == 1
    assert metrics(out)[-1]["learn/policy/mismatch_kl_nats"] < 1e-6
    again = [*words(RUN.format(**places), alone, "--num_steps 3"), "--resume"]
    assert len(metrics(run(out, *again))) > 2
    # The file of the run does not bind another run to this top_k.
    again = parse_config(["--config", str(out / "config.yaml"), "--sampling.top_k", "50"])
    assert again.of("policy").sampling.top_k == 50

    flags = "--actors.bob.model m --actors.judge.model m --actors.judge.train false --out x"
    flags += " --env_path x.py --actors.alice.model m --actors.alice.sampling.top_k 5"
    config = choose_engine(parse_config(words(flags, alone)), 1)
    assert {n: config.of(n).sampling.top_k for n in config.actors} == {
        "bob": 1024,
        "judge": 0,
        "alice": 5,
    }
    assert f"\nbob: {note}" in capfd.readouterr().out


def test_an_actor_has_limits_of_its_own(places, tmp_path):
    flags = (
        "--actors.bob.model {model} --actors.alice.model {other} --env_path {dir}/talk.py "
        "--max_tokens 10 --max_prompt_tokens 60 --tasks_per_step 4 --group_size 4 --num_steps 1 "
        f"--actors.bob.sampling.top_k 3 {kit.STOP}"
    )
    out = run(tmp_path / "run", flags.format(**places))
    [row] = [row for row in metrics(out) if "learn/bob/loss" in row]
    assert row["learn/bob/entropy_nats"] < np.log(3) < row["learn/alice/entropy_nats"]
    for name in ("bob", "alice"):
        assert row[f"learn/{name}/mismatch_kl_nats"] < 1e-7


def test_evaluations_have_limits_of_their_own_alone(places):
    flags = "--model {model} --env_path x.py --out x --actors.policy.sampling.top_k 3"
    config = parse_config(words(flags.format(**places), TOP))
    task = Task(id="0", env="x", row={}, messages=[])
    position = {"batch": "0", "number": 0, "size": 2}
    training = make_group(config, task, **position)
    greedy = make_group(config, task, {"temperature": 0.0}, **position)
    assert (training.params.top_k, training.params.top_p, training.params.keeps_ids) == (5, 0.8, 1)
    assert training.own_params["policy"] == {"top_k": 3}
    assert (greedy.params.top_k, greedy.params.top_p, greedy.params.keeps_ids) == (0, 1.0, 0)
    assert greedy.own_params["policy"] == {}


def test_an_actor_behind_an_api_gets_its_own_limits_alone(places):
    flags = (
        "--model {model} --env_path x.py --out x --actors.judge.api http://127.0.0.1:1/v1 "
        "--actors.judge.model m --actors.critic.api http://127.0.0.1:1/v1 --actors.critic.model m "
        "--actors.critic.sampling.top_p 0.5 --sampling.min_p 0.01"
    )
    config = parse_config(words(flags.format(**places), TOP))
    task = Task(id="0", env="x", row={}, messages=[])
    group = make_group(config, task, batch="0", number=0, size=2)
    params = {name: replace(group.params, **changes) for name, changes in group.own_params.items()}
    limits = {
        name: (changes.top_k, changes.top_p, changes.min_p) for name, changes in params.items()
    }
    assert limits == {"policy": (5, 0.8, 0.01), "judge": (0, 1.0, 0.0), "critic": (0, 0.5, 0.0)}


def test_without_limits_no_part_and_no_ids(places):
    learner = make_learner(places["model"])
    assert part_of(learner, "TruncationSupport") is None
    plain = AutoModelForCausalLM.from_pretrained(places["model"], dtype=torch.float32)
    samples = conversations(plain)
    assert all(one.kept_ids is None for one in samples)
    assert batch_of(learner, samples).labels.ndim == 1
