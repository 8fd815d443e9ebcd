"""Flags of other trainers: each gets our flag, or a sentence where none is needed."""

from __future__ import annotations

import pytest

from rl_core.config import known_flags, parse_config

# Older names of our flags.
OLDER = """
rollout.lagged --rollout.stale_policy_frac
rollout.fixed_order --deterministic
algo.state_coef --algo.gigpo_coef
algo.state_discount --algo.gigpo_discount
algo.refill_rounds --algo.dynamic_sampling_rounds
algo.correction --algo.importance_correction
algo.overlong --algo.truncation_penalty
engine_ranks --rollout_ranks
engine_weights --weight_sync
learner.inference_tokens --learner.logprob_microbatch_tokens
learner.minibatches --learner.updates_per_epoch
log_samples --print_samples
agents.address --agents.public_host
optim.load --optim.init_from
actors.policy.share --actors.policy.lora_base
actors.policy.learn_every --actors.policy.update_every
"""
# Names as their configurations have them -> our flag, or the beginning of a sentence.
RL2 = """
train_data.path --data.train
train_data.experience.responses_per_prompt --group_size
train_data.responses_per_prompt --group_size
train_data.experience.max_turns --max_turns
train_data.max_turns --max_turns
train_data.experience.max_new_tokens --max_tokens
train_data.sampling_params.max_new_tokens --max_tokens
train_data.experience.mask_offpolicy_data --algo.importance_correction
test_data.path --data.eval
test_data.experience.responses_per_prompt --eval.samples
data.train.path --data.train
data.train.max_length --max_tokens
data.train.batch_size --tasks_per_step
data.train.prompt_key --data.columns
data.train.apply_chat_template the chat template is always applied
data.test.path --data.eval
data.path --data.train
data.max_length --max_tokens
data.batch_size --tasks_per_step
actor.model_name --model
actor.max_length_per_device --learner.microbatch_tokens
actor.max_inference_length_per_device --learner.logprob_microbatch_tokens
actor.temperature --sampling.temperature
actor.update_per_rollout --learner.updates_per_epoch
actor.clip --algo.clip_low
actor.tis_coef --algo.importance_correction
actor.avg_level --algo.aggregation
actor.freeze_steps --critic.warmup_steps
actor.offload_model --learner.offload
actor.offload_optimizer --learner.offload
actor.adv_estimator --algorithm
actor.kl.coef --algo.kl_coef
actor.kl.type --algo.kl_in
actor.kl.reward_estimator --algo.kl
actor.kl.loss_estimator --algo.kl
actor.entropy.coef --algo.entropy_coef
actor.use_liger_kernel --learner.kernels
actor.dtype --learner.dtype
actor.enable_gradient_checkpointing --learner.activations
actor.ddp_size --dp_replicate
actor.tp_size --tp
actor.cp_size --cp
actor.sp_size --cp
actor.optimizer.lr --optim.lr
actor.optimizer.weight_decay --optim.weight_decay
actor.max_grad_norm --optim.max_grad_norm
actor.scheduler.name --optim.schedule
actor.scheduler.warmup_ratio --optim.warmup_frac
actor.beta --algo.kl_coef
actor.apply_len_norm --preference.loss
actor.tf_config.pipeline_model_parallel_size rl_core has no pipeline
actor.tf_config.tensor_model_parallel_size --tp
actor.tf_config.context_parallel_size --cp
ref_actor.model_name --algo.reference
critic.model_name --critic.model
critic.update_per_rollout --critic.updates
critic.clip --critic.value_clip
critic.optimizer.lr --critic.lr
rollout.server_args.tp_size --engine_tp
rollout.server_args.mem_fraction_static --engine_memory_frac
rollout.train_prompts_per_rollout --tasks_per_step
rollout.test_prompts_per_rollout --eval.num_tasks
rollout.train_sampling_params.temperature --sampling.temperature
rollout.train_sampling_params.stop did you mean 'sampling.stop'
rollout.train_sampling_params.no_stop_trim stop strings stay in the text
rollout.test_sampling_params.temperature --eval.sampling
rollout.env_path --env_path
rollout.max_turns --max_turns
rollout.partial_rollout --max_staleness
rollout.dynamic_filtering --algo.dynamic_sampling_rounds
adv.estimator --algorithm
adv.gamma did you mean 'critic.gamma'
adv.lamda --critic.gae_lambda
adv.global_norm --algo.normalize
adv.norm_var --algo.advantage
trainer.project --run_name
trainer.experiment_name --run_name
trainer.load_ckpt_from --resume
trainer.total_steps --num_steps
trainer.n_epochs --num_epochs
trainer.test_freq --eval_every
trainer.save_dir --out
trainer.save_freq --save_every
trainer.save_optimizer --save_optimizer
trainer.use_wandb --trackers
"""
TRL = """
output_dir --out
per_device_train_batch_size --learner.microbatch_tokens
per_device_eval_batch_size --learner.logprob_microbatch_tokens
num_train_epochs --num_epochs
epochs --num_epochs
max_steps --num_steps
learning_rate --optim.lr
lr_scheduler_type --optim.schedule
lr_scheduler_kwargs --optim.min_lr_frac
warmup_steps --optim.warmup_steps
warmup_ratio --optim.warmup_frac
optim --optim.name
weight_decay --optim.weight_decay
adam_beta1 --optim.betas
adam_epsilon --optim.eps
gradient_accumulation_steps --learner.microbatch_tokens
average_tokens_across_devices the loss is divided by the tokens of all ranks
max_grad_norm --optim.max_grad_norm
bf16 --learner.dtype
gradient_checkpointing --learner.activations
gradient_checkpointing_kwargs --learner.activations
torch_compile --learner.kernels
use_liger_kernel --learner.kernels
neftune_noise_alpha rl_core has no counterpart
auto_find_batch_size --learner.microbatch_tokens
logging_steps metrics of every step
report_to --trackers
project --run_name
eval_strategy --eval_every
eval_steps --eval_every
eval_on_start the first evaluation comes before the first step
save_only_model --save_optimizer
save_strategy --save_every
save_steps --save_every
save_total_limit --keep_checkpoints
hub_model_id --push_to_hub
hub_token the token is Hugging Face's own
load_best_model_at_end --keep_best
metric_for_best_model --keep_best
full_determinism --seed
data_seed --seed
use_cpu a run takes every GPU
dataloader_num_workers rows need no loader processes
remove_unused_columns columns stay
ddp_timeout --timeout_s
fsdp FSDP2 shards over all ranks
deepspeed FSDP2 shards over all ranks; no DeepSpeed config
do_train a run trains
do_eval --eval_every
resume_from_checkpoint --resume
local_rank torchrun's --nproc_per_node
trust_remote_code the code of a model folder is never executed
disable_dropout dropout is always off
num_generations --group_size
num_generations_eval --eval.samples
max_completion_length --max_tokens
max_prompt_length --max_prompt_tokens
shuffle_dataset --data.shuffle
pad_to_multiple_of packing is always on
generation_batch_size --tasks_per_step
steps_per_generation --learner.updates_per_epoch
temperature --sampling.temperature
top_k --sampling.top_k
repetition_penalty rl_core has no counterpart
use_vllm --engine
vllm_mode --engine
vllm_enable_sleep_mode engines and learners share the GPUs
vllm_server_base_url --actors.policy.engine_urls
vllm_gpu_memory_utilization --engine_memory_frac
vllm_max_model_length the context is --max_prompt_tokens
vllm_tensor_parallel_size --engine_tp
beta --algo.kl_coef
num_iterations --learner.epochs
epsilon --algo.clip_low
epsilon_high --algo.clip_high
delta --algo.dual_clip
importance_sampling_level --algo.objective
reward_weights rewards are weighed in the environment
scale_rewards --algo.advantage
loss_type --algo.aggregation
mask_truncated_completions --algo.truncation_penalty
sync_ref_model --algo.reference_every
ref_model_mixup_alpha --algo.reference_decay
entropy_coef --algo.entropy_coef
max_tool_calling_iterations --max_turns
vllm_importance_sampling_correction --algo.importance_correction
vllm_importance_sampling_clip_max --algo.correction_range
log_completions --print_samples
chat_template_path --actors.policy.chat_template
dataset_text_field SFT reads prompt and completion
dataset_num_proc rows need no loader processes
max_length --max_tokens
packing packing is always on
padding_free packing is always on
eval_packing packing is always on
completion_only_loss SFT trains the assistant's turns alone
assistant_only_loss SFT trains the assistant's turns alone
activation_offloading --learner.activations
precompute_ref_log_probs rl_core has no counterpart
label_smoothing --preference.label_smoothing
model_name_or_path --model
dtype --learner.dtype
attn_implementation --attention
use_peft --actors.policy.lora.rank
lora_r --actors.policy.lora.rank
lora_alpha --actors.policy.lora.alpha
lora_dropout dropout is always off
lora_target_modules --actors.policy.lora.targets
use_dora rl_core has no counterpart
load_in_4bit --actors.policy.lora.quantize
dataset_name --data.train
dataset_config --data.train
dataset_train_split --data.train
dataset_test_split --data.eval
dataset_streaming --data.streaming
"""
VERL = """
trainer.n_gpus_per_node torchrun's --nproc_per_node
trainer.nnodes torchrun's --nproc_per_node
trainer.total_epochs --num_epochs
trainer.total_training_steps --num_steps
trainer.save_freq --save_every
trainer.test_freq --eval_every
trainer.max_actor_ckpt_to_keep --keep_checkpoints
trainer.resume_mode --resume
trainer.resume_from_path --resume
trainer.default_local_dir --out
trainer.project_name --run_name
trainer.experiment_name --run_name
trainer.logger --trackers
trainer.log_val_generations --print_samples
trainer.rollout_data_dir every trajectory is in rollouts/
trainer.val_before_train the first evaluation comes before
trainer.val_only rl-core eval RUN evaluates alone
trainer.critic_warmup --critic.warmup_steps
trainer.balance_batch every rank gets an equal share
trainer.device a run takes every GPU
trainer.ray_wait_register_center_timeout no Ray
ray_kwargs.ray_init no Ray
actor_rollout_ref.hybrid_engine no Ray
actor_rollout_ref.nccl_timeout --timeout_s
actor_rollout_ref.model.path --model
actor_rollout_ref.model.trust_remote_code the code of a model folder
actor_rollout_ref.model.custom_chat_template --actors.policy.chat_template
actor_rollout_ref.model.enable_gradient_checkpointing --learner.activations
actor_rollout_ref.model.enable_activation_offload --learner.activations
actor_rollout_ref.model.use_remove_padding packing is always on
actor_rollout_ref.model.use_liger --learner.kernels
actor_rollout_ref.model.use_fused_kernels --learner.kernels
actor_rollout_ref.model.lora_rank --actors.policy.lora.rank
actor_rollout_ref.model.lora_alpha --actors.policy.lora.alpha
actor_rollout_ref.model.target_modules --actors.policy.lora.targets
actor_rollout_ref.actor.strategy FSDP2 shards over all ranks
actor_rollout_ref.actor.ppo_mini_batch_size --learner.updates_per_epoch
actor_rollout_ref.actor.ppo_epochs --learner.epochs
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu --learner.microbatch_tokens
actor_rollout_ref.actor.ppo_max_token_len_per_gpu --learner.microbatch_tokens
actor_rollout_ref.actor.use_dynamic_bsz --learner.microbatch_tokens
actor_rollout_ref.actor.clip_ratio --algo.clip_low
actor_rollout_ref.actor.clip_ratio_low --algo.clip_low
actor_rollout_ref.actor.clip_ratio_high --algo.clip_high
actor_rollout_ref.actor.clip_ratio_c --algo.dual_clip
actor_rollout_ref.actor.policy_loss.loss_mode --algorithm
actor_rollout_ref.actor.loss_agg_mode --algo.aggregation
actor_rollout_ref.actor.entropy_coeff --algo.entropy_coef
actor_rollout_ref.actor.use_kl_loss --algo.kl_in loss
actor_rollout_ref.actor.kl_loss_coef --algo.kl_coef
actor_rollout_ref.actor.kl_loss_type --algo.kl
actor_rollout_ref.actor.grad_clip --optim.max_grad_norm
actor_rollout_ref.actor.optim.lr --optim.lr
actor_rollout_ref.actor.optim.lr_warmup_steps --optim.warmup_steps
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio --optim.warmup_frac
actor_rollout_ref.actor.optim.lr_scheduler_type --optim.schedule
actor_rollout_ref.actor.optim.min_lr_ratio --optim.min_lr_frac
actor_rollout_ref.actor.optim.weight_decay --optim.weight_decay
actor_rollout_ref.actor.optim.clip_grad --optim.max_grad_norm
actor_rollout_ref.actor.fsdp_config.param_offload --learner.offload
actor_rollout_ref.actor.fsdp_config.optimizer_offload --learner.offload
actor_rollout_ref.actor.fsdp_config.fsdp_size --dp_replicate
actor_rollout_ref.actor.ulysses_sequence_parallel_size --cp
actor_rollout_ref.actor.megatron.tensor_model_parallel_size --tp
actor_rollout_ref.actor.checkpoint.save_contents --save_optimizer
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu --learner.logprob_microbatch_tokens
actor_rollout_ref.ref.fsdp_config.param_offload --learner.offload
actor_rollout_ref.rollout.n --group_size
actor_rollout_ref.rollout.name --engine
actor_rollout_ref.rollout.temperature --sampling.temperature
actor_rollout_ref.rollout.top_k --sampling.top_k
actor_rollout_ref.rollout.top_p --sampling.top_p
actor_rollout_ref.rollout.prompt_length --max_prompt_tokens
actor_rollout_ref.rollout.response_length --max_tokens
actor_rollout_ref.rollout.gpu_memory_utilization --engine_memory_frac
actor_rollout_ref.rollout.tensor_model_parallel_size --engine_tp
actor_rollout_ref.rollout.expert_parallel_size rl_core has no pipeline and no expert
actor_rollout_ref.rollout.free_cache_engine engines and learners share the GPUs
actor_rollout_ref.rollout.enforce_eager --engine_args
actor_rollout_ref.rollout.max_num_batched_tokens --engine_args
actor_rollout_ref.rollout.max_num_seqs --rollout.max_concurrent
actor_rollout_ref.rollout.max_model_len the context is --max_prompt_tokens
actor_rollout_ref.rollout.enable_prefix_caching prefixes are always shared
actor_rollout_ref.rollout.calculate_log_probs logprobs of sampled tokens are always
actor_rollout_ref.rollout.val_kwargs.n --eval.samples
actor_rollout_ref.rollout.val_kwargs.temperature --eval.sampling
actor_rollout_ref.rollout.val_kwargs.do_sample --eval.samples
actor_rollout_ref.rollout.multi_turn.max_assistant_turns --max_turns
actor_rollout_ref.rollout.multi_turn.tool_config_path tools stand in the environment's file
actor_rollout_ref.rollout.multi_turn.interaction_config_path the environment's file says how
actor_rollout_ref.rollout.multi_turn.format the chat template says how calls
actor_rollout_ref.rollout.agent.default_agent_loop the environment's file says how
actor_rollout_ref.rollout.agent.num_workers --rollout.max_concurrent
data.train_files --data.train
data.val_files --data.eval
data.train_max_samples rl_core has no counterpart
data.val_max_samples --eval.num_tasks
data.prompt_key --data.columns
data.max_prompt_length --max_prompt_tokens
data.max_response_length --max_tokens
data.train_batch_size --tasks_per_step
data.seed --seed
data.dataloader_num_workers rows need no loader processes
data.filter_overlong_prompts --data.skip_long
data.truncation --data.skip_long
data.image_key rl_core has no counterpart
data.apply_chat_template_kwargs --chat_template_kwargs
critic.model.path --critic.model
critic.optim.lr --critic.lr
critic.cliprange_value --critic.value_clip
critic.ppo_epochs --critic.updates
critic.ppo_micro_batch_size_per_gpu --learner.microbatch_tokens
reward_model.enable a reward model is called in the environment
reward_model.model.path a reward model is called in the environment
reward_model.reward_manager --env_path
reward_model.sandbox_fusion.url the sandbox of docs/sandbox.md
custom_reward_function.path --env_path
custom_reward_function.name --env_path
algorithm.adv_estimator --algorithm
algorithm.gamma did you mean 'critic.gamma'
algorithm.lam --critic.gae_lambda
algorithm.norm_adv_by_std_in_grpo --algo.advantage
algorithm.use_kl_in_reward --algo.kl_in reward
algorithm.kl_penalty --algo.kl
algorithm.kl_ctrl.kl_coef --algo.kl_coef
algorithm.kl_ctrl.target_kl rl_core has no counterpart
algorithm.rollout_correction.rollout_is --algo.importance_correction
algorithm.rollout_correction.rollout_is_threshold --algo.correction_range
algorithm.filter_groups.enable --algo.dynamic_sampling_rounds
global_profiler.steps --profile_step
"""
OPENRLHF = """
pretrain --model
actor.model_name_or_path --model
critic_pretrain --critic.model
critic.model_name_or_path --critic.model
reward_pretrain a reward model is called
reward.model_name_or_path a reward model is called
remote_rm_url --env_path
reward.remote_url --env_path
agent_func_path --env_path
train.agent_func_path --env_path
actor_num_nodes torchrun's
actor.num_gpus_per_node torchrun's
ref.num_nodes torchrun's
vllm_num_engines --rollout_ranks
vllm.num_engines --rollout_ranks
vllm.tensor_parallel_size --engine_tp
vllm.gpu_memory_utilization --engine_memory_frac
vllm.enable_sleep engines and learners share
vllm.enforce_eager --engine_args
vllm_sync_with_ray no Ray
train.colocate_all engines and learners share
deepspeed_enable_sleep engines and learners share
async_train --max_staleness
train.async_queue_size --max_staleness
train.partial_rollout_enable --max_staleness
eval.steps --eval_every
eval_steps --eval_every
save_steps --save_every
ckpt.save_steps --save_every
logging_steps metrics of every step
logger.logging_steps metrics of every step
ckpt_path --out
ckpt.output_dir --out
ckpt.max_num --keep_checkpoints
ckpt.load_enable --resume
ckpt.best_metric_key --keep_best
zero_stage FSDP2 shards over all ranks; no DeepSpeed
ds.zero_stage FSDP2 shards over all ranks; no DeepSpeed
ds.overlap_comm FSDP2 shards over all ranks; no DeepSpeed
adam_offload --learner.offload
ds.adam_offload --learner.offload
ds.packing_samples packing is always on
ds.param_dtype --learner.dtype
ds.tensor_parallel_size --tp
ds.ring_attn_size --cp
ds.use_liger_kernel --learner.kernels
ds.attn_implementation --attention
ds.lora.rank --actors.policy.lora.rank
ds.lora.alpha --actors.policy.lora.alpha
ds.lora.target_modules --actors.policy.lora.targets
ds.load_in_4bit --actors.policy.lora.quantize
actor.gradient_checkpointing_enable --learner.activations
ref.offload --learner.offload
use_dynamic_batch --learner.microbatch_tokens
train.max_tokens_per_gpu --learner.microbatch_tokens
rollout.max_tokens_per_gpu --learner.logprob_microbatch_tokens
micro_train_batch_size --learner.microbatch_tokens
micro_rollout_batch_size --learner.logprob_microbatch_tokens
rollout.batch_size --tasks_per_step
rollout_batch_size --tasks_per_step
rollout.n_samples_per_prompt --group_size
rollout.max_new_tokens --max_tokens
prompt_max_len --max_prompt_tokens
generate_max_len --max_tokens
data.max_len --max_tokens
max_norm --optim.max_grad_norm
actor.max_norm --optim.max_grad_norm
l2 --optim.weight_decay
actor.adam.lr --optim.lr
actor.adam.betas --optim.betas
critic.adam.lr --critic.lr
actor.lr_scheduler --optim.schedule
actor.lr_warmup_ratio --optim.warmup_frac
actor.min_lr_ratio --optim.min_lr_frac
eps_clip --algo.clip_low
actor.eps_clip_low_high --algo.clip_low
actor.dual_clip did you mean 'algo.dual_clip'
critic.value_clip --critic.value_clip
value_clip did you mean 'critic.value_clip'
algo.advantage.lambd --critic.gae_lambda
algo.advantage.estimator --algorithm
algo.advantage.no_std_norm --algo.advantage
algo.advantage.is_correction_type --algo.importance_correction
algo.kl.init_coef --algo.kl_coef
algo.kl.estimator --algo.kl
algo.kl.use_loss --algo.kl_in loss
algo.kl.horizon rl_core has no counterpart
algo.dynamic_filtering_enable --algo.dynamic_sampling_rounds
actor.policy_loss_type --algorithm
actor.entropy_coef --algo.entropy_coef
actor.aux_loss_coef --actors.policy.router_aux_loss_coef
critic.freezing_steps --critic.warmup_steps
reward.overlong_buffer_len --algo.overlong_buffer
reward.stop_properly_penalty_coef an environment punishes truncated
reward.clip_range rl_core has no counterpart
train.enable_ema rl_core has no counterpart
train.num_episodes --num_epochs
train.max_epochs --learner.epochs
train.seed --seed
train.full_determinism_enable --seed
prompt_data --data.train
data.prompt_dataset --data.train
data.prompt_probs each environment has its share
data.input_key --data.columns
data.apply_chat_template the chat template is always applied
eval.dataset --data.eval
eval.temperature --eval.sampling
eval.n_samples_per_prompt --eval.samples
use_wandb --trackers
logger.wandb.project --run_name
logger.tensorboard_dir --trackers
use_ms rl_core has no counterpart
"""
ROWS = {
    tuple(line.split(" ", 1))
    for table in (OLDER, RL2, TRL, VERL, OPENRLHF)
    for line in table.strip().splitlines()
}
SAME = {name for name, ours in ROWS if f"--{name}" == ours}


def test_flags_of_the_same_name_are_ours():
    assert SAME and known_flags().keys() >= SAME


@pytest.mark.parametrize("name, ours", sorted(row for row in ROWS if row[0] not in SAME))
def test_a_flag_of_another_trainer_gets_its_answer(name, ours):
    with pytest.raises(ValueError, match="unknown flag") as caught:
        parse_config([f"--{name}", "1"])
    output = str(caught.value).removeprefix(f"unknown flag --{name}; ")
    if ours.startswith("--"):
        assert output.partition(" (")[0] == f"rl_core calls it {ours}"
        known = {flag.replace("NAME", "policy") for flag in known_flags()}
        assert ours.removeprefix("--").partition(" ")[0] in known
    else:
        assert output.startswith(ours)


def test_no_answer_has_a_placeholder():
    names = {name for name, _ in ROWS} | {"weigth", "actors.bob.foo", "lora.rnk", "engine_arg"}
    names |= {"actors.bob.lora.rnk", "foo.rank"}
    for name in sorted(names - SAME):
        with pytest.raises(ValueError) as caught:
            parse_config([f"--{name}", "1"])
        assert "actors.NAME" not in str(caught.value), caught.value
