"""Flags of references, teachers and batches that contradict each other are refused."""

from __future__ import annotations

import re

import pytest
from kit import words

from rl_core.config import parse_config
from rl_core.run.plan.algorithm_choice import choose_algorithm
from rl_core.run.plan.option_rules import check_options

JSD = "--algo.teacher_loss jsd"
JOINED = "--engine embedded --learner.logprob_microbatch_tokens"
SELF = "--algo.teacher self"
# Flags -> a fragment of the message.
REFUSED = {
    "--algo.kl_reward k9,0.1": "algo.kl_reward",
    "--algo.kl_reward k1": "algo.kl_reward",
    "--algo.kl_reward k1,-1": "algo.kl_reward",
    "--algo.kl_reward k1,0.1 --algo.kl_coef 0.1 --algo.kl_in reward": "two KLs in the reward",
    "--algo.kl_loss k3,0.1 --algo.kl_coef 0.1": "two KLs in the loss",
    "--algo.reference_every 3": "update a reference: give --algo.kl_coef",
    "--algo.reference_decay 0.9": "update a reference: give --algo.kl_coef",
    "--algo.kl_coef 1 --algo.reference_every 3 --algo.reference m": "starts as the actor's model; "
    "leave out --algo.reference",
    "--algo.kl_coef 1 --algo.reference_decay 1": "would never update the reference",
    "--algorithm dpo --algo.reference_decay 1": "would never update the reference",
    "--algo.reference t": "--algo.reference needs --algo.kl_coef",
    "--algorithm opd": "learns from a teacher alone: give --algo.teacher",
    "--algo.teacher_coef 2": "--algo.teacher_coef needs --algo.teacher",
    "--algorithm ppo --algo.teacher t": "a critic does not know the teacher's part",
    JSD: "--algo.teacher_loss=jsd needs --algo.teacher",
    "--algo.teacher t --algo.teacher_beta 0.1": "needs --algo.teacher_loss jsd",
    f"--algo.teacher t {JSD} --algo.teacher_beta 0": "--algo.teacher_beta=0.0 must be between 0 and 1",
    f"--algo.teacher http://h:1 {JSD}": "needs the teacher server's most likely tokens: give "
    "--algo.teacher_top_k",
    "--algo.teacher t --algo.teacher_top_k 5": "is for a teacher behind a URL",
    "--algo.teacher http://h:1 --sampling.temperature 0.7": "a teacher behind a URL gives logprobs "
    "at temperature 1",
    "--algorithm opd --algo.teacher t --algo.teacher_coef 2": "--algo.teacher_coef changes nothing",
    "--envs.e.teacher t": "--envs.e.teacher=t needs --algo.teacher",
    "--algo.teacher t --algo.teacher_update ema": "needs --algo.teacher self",
    f"{SELF} --algo.teacher_decay 0.9": "with --algo.teacher_update ema",
    f"{SELF} --algo.teacher_update ema --algo.teacher_decay 1": "must be below 1",
    f"{SELF} {JSD} --cp 2": "--cp=2 splits the sequences, and the teacher self",
    f"{JOINED} 9000": "at least twice --learner.microbatch_tokens=8192",
    f"{JOINED} 20000 --cp 2": "--cp=2",
    f"{JOINED} auto {SELF}": "leave it out",
    f"{JOINED} automatic": "logprob_microbatch_tokens",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_contradict_each_other_are_refused(flags):
    env = "" if "dpo" in flags else "--env_path e.py"
    with pytest.raises(ValueError, match=re.escape(REFUSED[flags])):  # noqa: PT012 Either may raise.
        config = parse_config(words("--model m --out runs/x", env, flags))
        check_options(config)
        choose_algorithm(config, {})
