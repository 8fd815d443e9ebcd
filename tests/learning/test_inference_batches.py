"""--learner.logprob_microbatch_tokens: joined forwards give what each microbatch gives by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from kit import answer, make_learner, of_ranks, words
from test_learner import ragged_samples
from transformers import AutoModelForCausalLM

from rl_core.config import parse_config
from rl_core.distributed import Ranks
from rl_core.learning.no_grad_batches import (
    ANNOTATED,
    activation_bytes,
    join_batches,
    num_joined,
    widths,
)
from rl_core.plan.option_rules import check_options

SMALL = "--learner.microbatch_tokens 100 --learner.updates_per_epoch 2"
CASES = {
    "old": "--learner.epochs 2",
    "reference": "--algo.kl_coef 0.1",
    "critic": "--algorithm ppo",
    "critic, KL in the reward": "--algorithm ppo --algo.kl_coef 0.1 --algo.kl_in reward",
    "batch": "--algorithm reinforce_pp --algo.kl_coef 0.1",
}


def annotated(model, flags: str, samples: list, ranks=None) -> tuple[list, int]:
    """(batches with what parts filled in, forwards of the policy) of a step."""
    learner, count = make_learner(model, SMALL, flags, ranks=ranks), []
    learner.policy.register_forward_hook(lambda *_: count.append(1))
    minibatches, _ = learner.shard(copy.deepcopy(samples))
    learner.annotate(minibatches)
    batches = []
    for minibatch in minibatches:
        batches += minibatch.batches
    return batches, len(count)


def assert_equal_batches(joined: list, alone: list) -> None:
    assert len(joined) == len(alone)
    for mine, theirs in zip(joined, alone, strict=True):
        for name in ANNOTATED:
            ours, expected = getattr(mine, name), getattr(theirs, name)
            assert (ours is None) == (expected is None), name
            if ours is not None:
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shared", [0, 20])
def test_joined_forwards_fill_in_what_single_ones_do(tiny_model, case, shared):
    samples = ragged_samples(24, shared_prompt=shared)
    alone, _ = annotated(tiny_model, CASES[case], samples)
    joined, _ = annotated(
        tiny_model, f"{CASES[case]} --learner.logprob_microbatch_tokens 400", samples
    )
    assert len(alone) > 4
    assert_equal_batches(joined, alone)


def test_old_logprobs_of_joined_batches_are_those_of_transformers(tiny_model):
    samples = ragged_samples(24)
    flags = (
        "--learner.epochs 2 --sampling.temperature 0.7 --learner.logprob_microbatch_tokens 10000"
    )
    [*batches], num_forwards = annotated(tiny_model, flags, samples)
    assert num_forwards == 1 < len(batches)
    hf = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    for batch in batches:
        for number, path in enumerate(batch.paths):
            with torch.no_grad():
                logits = hf(batch.input_ids[path][None]).logits[0] / 0.7
            of_sequence = batch.sequences == number
            places = [path.tolist().index(i) for i in batch.logit_indices[of_sequence].tolist()]
            expected = logits.log_softmax(-1)[places, batch.labels[of_sequence]]
            torch.testing.assert_close(
                batch.old_logprobs[of_sequence].double(), expected, rtol=0, atol=1e-5
            )


def test_forwards_without_gradient_are_fewer_by_the_ratio_of_the_flags(tiny_model):
    samples = ragged_samples(24)
    _, alone = annotated(tiny_model, "--learner.epochs 2", samples)
    _, joined = annotated(
        tiny_model, "--learner.epochs 2 --learner.logprob_microbatch_tokens 399", samples
    )
    assert joined == -(-alone // 3) < alone


def joined_on_ranks(ranks: Ranks, model: str, flags: str) -> list:
    samples = ragged_samples(24)[ranks.rank :: ranks.size]
    batches, _ = annotated(model, flags, samples, ranks)
    return [batch.old_logprobs.tolist() for batch in batches]


def test_two_ranks_join_in_step(tiny_model):
    flags = "--learner.epochs 2"
    case = __file__, "joined_on_ranks", str(tiny_model)
    alone = of_ranks(2, *case, flags)
    joined = of_ranks(2, *case, f"{flags} --learner.logprob_microbatch_tokens 200")
    for mine, theirs in zip(joined, alone, strict=True):
        for ours, expected in zip(mine, theirs, strict=True):
            assert ours == pytest.approx(expected, abs=1e-5)


def test_rows_of_fewer_ids_are_filled_when_they_are_joined(tiny_model):
    learner = make_learner(tiny_model, SMALL)
    [minibatch, *_], _ = learner.shard(ragged_samples(24))
    first, second, *_ = minibatch.batches
    first.labels = torch.stack([first.labels, first.labels + 1], -1)
    second.labels = second.labels[:, None]
    labels = join_batches([first, second]).labels
    assert labels[: len(first.labels)].tolist() == first.labels.tolist()
    assert labels[len(first.labels) :].tolist() == [[n, -1] for n in second.labels[:, 0].tolist()]


def test_auto_takes_the_memory_of_one_microbatch_with_gradient(tiny_model):
    learner = make_learner(tiny_model, "--learner.logprob_microbatch_tokens auto")
    text = learner.policy.hf.config
    # L = 2, D = 64, I = 128, all heads 4 x 16 wide, in fp32: written out by hand.
    size = widths(text)
    block = 2 * (4 + 8) * size.hidden + 8 * (size.queries + size.keys) + 16 * size.intermediate
    outside = 16 * size.hidden
    expected = (size.layers * block + outside) / (block + outside)
    assert size.layers == text.num_hidden_layers
    assert activation_bytes(size, 4, 1, False) == size.layers * block + outside
    assert num_joined(learner) == int(expected)
    deep = make_learner(
        tiny_model, "--learner.logprob_microbatch_tokens auto --learner.activations recompute"
    )
    assert num_joined(deep) == 1  # recomputed, a block's activations are all that is kept


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--learner.logprob_microbatch_tokens 9000",
            "at least twice --learner.microbatch_tokens=8192",
        ),
        ("--learner.logprob_microbatch_tokens 20000 --cp 2", "--cp=2"),
        ("--learner.logprob_microbatch_tokens auto --algo.teacher self", "leave it out"),
        ("--learner.logprob_microbatch_tokens automatic", "logprob_microbatch_tokens"),
    ],
)
def test_what_cannot_be_joined_is_refused(flags, message):
    arguments = words("--model m --env_path e.py --out x --engine embedded", flags)
    with pytest.raises(ValueError, match=message):
        check_options(parse_config(arguments))


if __name__ == "__main__":
    answer(globals())
