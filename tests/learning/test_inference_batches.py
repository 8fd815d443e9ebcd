"""--learner.logprob_microbatch_tokens: joined forwards give what each microbatch gives by itself."""

from __future__ import annotations

import copy

import torch
from kit import make_learner
from test_learner import ragged_samples
from transformers import AutoModelForCausalLM

from rl_core.learning.activation_memory import activation_bytes, widths
from rl_core.learning.no_grad_batches import join_batches, num_joined

SMALL = "--learner.microbatch_tokens 100 --learner.updates_per_epoch 2"


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
    assert num_joined(learner.config.learner, learner.policy, 1) == int(expected)
    deep = make_learner(
        tiny_model, "--learner.logprob_microbatch_tokens auto --learner.activations recompute"
    )
    # Recomputed, a block's activations are all that is kept.
    assert num_joined(deep.config.learner, deep.policy, 1) == 1
