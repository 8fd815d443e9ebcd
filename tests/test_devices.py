"""Work on a device never waits for it: on meta tensors a read of a value raises, and so does a tensor of another device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_learner import FLAGS, ragged_samples
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_core.config import parse_config
from rl_core.distributed import init_ranks
from rl_core.engines.slots import SlotCache, SlotModel, sample
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.attention import NAME
from rl_core.learning.learner import Learner
from rl_core.learning.model import PolicyModel

META = torch.device("meta")
SGD = ["--optim.name", "sgd"]  # fused AdamW refuses meta tensors
# Every loss, each with what else looks at values: several updates, corrections, clipping, KL, entropy.
LOSSES = {
    "grpo": "--learner.epochs 2 --algo.kl_coef 0.1 --algo.entropy_coef 0.01 --algo.correction tis",
    "dr_grpo": "--algo.correction mask",
    "dapo": "--algo.dual_clip 3",
    "gspo": "--learner.epochs 2 --algo.correction sequence_mask",
    "cispo": "",
    "rloo": "--algo.kl_coef 0.1",
    "reinforce_pp": "",
    "sft": "",
    "dpo": "",
    "rm": "",
}


def meta_learner(folder, algorithm: str, flags: str, dtype=torch.float32) -> Learner:
    config = parse_config(["--model", str(folder), "--algorithm", algorithm, *FLAGS, *flags.split(), *SGD])
    family = AutoModelForSequenceClassification if algorithm == "rm" else AutoModelForCausalLM
    with META:
        hf = family.from_config(AutoConfig.from_pretrained(folder, num_labels=1), dtype=dtype, attn_implementation=NAME)
    ranks = dataclasses.replace(init_ranks(60), device=META)
    return Learner(config, make_algorithm(algorithm, config.algo), PolicyModel(hf, dtype), ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", LOSSES)
def test_an_update_reads_no_value_before_its_end_and_no_tensor_is_elsewhere(tiny_model, algorithm, dtype):
    learner = meta_learner(tiny_model, algorithm, LOSSES[algorithm], dtype)
    samples = ragged_samples(16, shared_prompt=30)
    if learner.algorithm.is_pairs:
        samples = [dataclasses.replace(s, group_id=f"{i // 2:04d}") for i, s in enumerate(samples)]
    (minibatch,), _ = learner.shard(samples)
    assert minibatch.batches[0].labels.device == META
    for batch in minibatch.batches:
        with torch.no_grad():
            batch.old_logprobs = batch.ref_logprobs = learner.policy(batch, 0.7)[0]
        losses, metrics = learner.losses(batch)
        losses.sum().backward()
        assert metrics
    learner.clip_gradients()
    learner.optimizer.step()
    assert all(p.grad is not None for p in learner.policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_of_the_embedded_engine_reads_no_value_before_its_tokens(tiny_model, dtype):
    with META:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype=dtype).eval()
        slots, cache = SlotModel(model), SlotCache(4, 64)
        tokens, numbers = torch.zeros(3, 7, dtype=torch.long), torch.zeros(6, 3, dtype=torch.float64)
        sizes, starts = torch.zeros(2, 3, dtype=torch.long)
        with slots.borrowed(), torch.inference_mode():
            slots.forward(cache, slice(0, 3), tokens, None, 7)  # prompts
            slots.forward(cache, slice(0, 3), tokens, starts, 14, sizes)  # what follows cached turns
            hidden = slots.forward(cache, slice(0, 3), tokens[:, :1], starts, 15)
            for known in (2, 3, 6):  # without a temperature, with one, with limits
                assert sample(slots.logits(hidden[:, 0]), numbers[:known]).device == META
