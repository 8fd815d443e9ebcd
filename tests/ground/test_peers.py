"""Flags of other trainers: each gets our flag, or a sentence where none is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit import words

from rl_core.config import known_flags, parse_config, to_yaml
from rl_core.config.flag_errors import peers

DOCS = Path(__file__).parents[2] / "docs"
# Spellings of names in other trainers.
SPELLINGS = """
lr --optim.lr
per-device-train-batch-size --tasks_per_step (prompts: TRL's batch of completions
micro_batch_size --learner.microbatch_tokens (tokens of one forward and backward
train_batch_size --tasks_per_step (tasks (without episodes: rows) of one step)
ppo_mini_batch_size --learner.updates_per_epoch (optimizer updates (minibatches) of one epoch
log_prob_micro_batch_size --learner.logprob_microbatch_tokens (tokens of a forward without
save_steps --save_every (checkpoint every N steps
optim.learning_rate --optim.lr
optimizer.lr --optim.lr
num_generations --group_size
kto_chosen_weight --preference.desirable_weight (KTO: weight of good replies)
steps --num_steps
batch_size --tasks_per_step
bf16 --learner.dtype=bfloat16
fp16 --learner.dtype=float16
use_peft --actors.policy.lora.rank=16
load_in_4bit --actors.policy.lora.quantize=nf4
gradient_checkpointing --learner.activations=recompute
use_wandb --trackers=wandb
actor.megatron.expert_model_parallel_size --ep (expert parallel
"""
SENTENCES = """
fsdp FSDP2 shards over all ranks
actor_rollout_ref.actor.strategy FSDP2 shards over all ranks
zero_stage FSDP2 shards over all ranks; no DeepSpeed
ds.overlap_comm FSDP2 shards over all ranks; no DeepSpeed
deepspeed FSDP2 shards over all ranks; no DeepSpeed config
dataset_text_field SFT reads prompt and completion
completion_only_loss SFT trains the assistant's turns alone
assistant_only_loss SFT trains the assistant's turns alone
reward.model_name_or_path a reward model is called
reward_pretrain a reward model is called
reward_model.model.path a reward model is called in the environment
reward_model.enable a reward model is called in the environment
use_cpu a run takes every GPU
trainer.device --device
do_train a run trains
reward.stop_properly_penalty_coef an environment punishes truncated
remove_unused_columns columns stay
actor.dual_clip did you mean 'algo.dual_clip'
algorithm.gamma did you mean 'critic.gamma'
adv.gamma did you mean 'critic.gamma'
value_clip did you mean 'critic.value_clip'
rollout.train_sampling_params.stop did you mean 'sampling.stop'
disable_dropout dropout is always off
lora_dropout dropout is always off
data.prompt_probs each environment has its share
deepspeed_enable_sleep engines and learners share
vllm.enable_sleep engines and learners share
actor_rollout_ref.rollout.free_cache_engine engines and learners share the GPUs
vllm_enable_sleep_mode engines and learners share the GPUs
trainer.balance_batch every rank gets an equal share
trainer.rollout_data_dir every trajectory is in rollouts/
actor_rollout_ref.rollout.calculate_log_probs logprobs of sampled tokens are always
logger.logging_steps metrics of every step
logging_steps metrics of every step
trainer.ray_wait_register_center_timeout no Ray
ray_kwargs.ray_init no Ray
eval_packing packing is always on
actor_rollout_ref.model.use_remove_padding packing is always on
actor_rollout_ref.rollout.enable_prefix_caching prefixes are always shared
reward_weights rewards are weighed in the environment
trainer.val_only rl-core eval RUN evaluates alone
precompute_ref_log_probs rl_core has no counterpart
algo.kl.horizon rl_core has no counterpart
actor.tf_config.pipeline_model_parallel_size rl_core has no pipeline
actor_rollout_ref.rollout.expert_parallel_size a rollout server splits experts by --engine_args
data.dataloader_num_workers rows need no loader processes
dataset_num_proc rows need no loader processes
rollout.train_sampling_params.no_stop_trim stop strings stay in the text
data.train.apply_chat_template the chat template is always applied
data.apply_chat_template the chat template is always applied
actor_rollout_ref.rollout.multi_turn.format the chat template says how calls
actor_rollout_ref.model.trust_remote_code the code of a model folder
trust_remote_code the code of a model folder is never executed
actor_rollout_ref.rollout.max_model_len the context is --max_prompt_tokens
vllm_max_model_length the context is --max_prompt_tokens
actor_rollout_ref.rollout.multi_turn.interaction_config_path the environment's file says how
actor_rollout_ref.rollout.agent.default_agent_loop the environment's file says how
trainer.val_before_train the first evaluation comes before
eval_on_start the first evaluation comes before the first step
average_tokens_across_devices the loss is divided by the tokens of all ranks
reward_model.sandbox_fusion.url the sandbox of docs/sandbox.md
hub_token the token is Hugging Face's own
actor_rollout_ref.rollout.multi_turn.tool_config_path tools stand in the environment's file
actor_num_nodes torchrun's
ref.num_nodes torchrun's
trainer.nnodes torchrun's --nproc_per_node
trainer.n_gpus_per_node torchrun's --nproc_per_node
actors actors is a section; --help actors lists its flags
hf_checkpoin did you mean hf_checkpoint? rl_core calls it --model
neftune_noise_alpa no flag has a similar name
verbose no flag has a similar name
"""
# Trainers whose names get answers, and names of their tables that stand for another flag elsewhere,
# or for a value.
PAGES = {"coming_from.md": ("verl", "OpenRLHF", "RL2"), "from_trl.md": ("All names",)}
AMBIGUOUS = set(
    "name geometric lora_alpha target_modules alpha tensor_model_parallel_size temperature top_p "
    "top_k min_p stop train.batch_size ckpt.save_hf".split()
)


def rows_of_docs() -> dict[str, set[str]]:
    """Name of a flag in another trainer -> our flags in its rows."""
    rows: dict[str, set[str]] = {}
    for page, sections in PAGES.items():
        section = ""
        for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                section = line[3:]
            if section not in sections or not line.startswith("| `"):
                continue
            theirs, ours, *_ = line.strip("|").split(" | ")
            flags = set(re.findall(r"--([\w.]+)", ours))
            for name in re.findall(r"`\.*([\w.]*\w)(?:[= ][^`]*)?`", theirs):
                if flags and name not in known_flags().keys() | AMBIGUOUS:
                    rows.setdefault(name, set()).update(flags)
    return rows


def answer_to(name: str) -> str:
    with pytest.raises(ValueError, match="unknown flag") as caught:
        parse_config([f"--{name}", "1"])
    return str(caught.value).removeprefix(f"unknown flag --{name}; ")


def test_another_trainers_switch_names_a_value_of_ours():
    for ours in filter(re.compile("--.*=").match, peers().values()):
        config = parse_config(words("--model m --env_path e.py --out o", *words(ours)))
        assert ours.partition("=")[2] in to_yaml(config)


def test_a_section_with_values_is_answered_by_its_flags():
    with pytest.raises(ValueError, match=r"write --optim\.lr=1e-3 --optim\.schedule=cosine"):
        parse_config(words("--optim lr=1e-3,schedule=cosine"))


def test_most_names_of_the_pages_are_checked():
    assert len(rows_of_docs()) > 250


@pytest.mark.parametrize("name, flags", rows_of_docs().items())
def test_a_flag_of_another_trainer_gets_the_answer_of_its_page(name, flags):
    answer = answer_to(name)
    named = re.findall(r"--([\w.]+)|'([\w.]+)'", answer)
    assert {one or other for one, other in named} & flags, answer
    assert "actors.NAME" not in answer


@pytest.mark.parametrize(
    "name, answer",
    [tuple(line.split(" ", 1)) for line in (SPELLINGS + SENTENCES).strip().splitlines() if line],
)
def test_another_spelling_and_a_name_without_a_flag_get_their_answer(name, answer):
    result = answer_to(name)
    if answer.startswith("--"):
        assert re.match(re.escape(f"rl_core calls it {answer}") + r"(?![\w.])", result), result
    else:
        assert result.startswith(answer)


@pytest.mark.parametrize(
    "name",
    ["weigth", "actors.bob.foo", "lora.rnk", "engine_arg", "actors.bob.lora.rnk", "foo.rank"],
)
def test_no_answer_has_a_placeholder(name):
    assert "actors.NAME" not in answer_to(name)
