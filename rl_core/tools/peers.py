"""Flags by the names that TRL, verl, OpenRLHF and others give them -> ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from rl_core.rules import nearest

OURS = {
    "optim.lr": "lr learning_rate actor_learning_rate",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "optim.warmup_steps": "warmup_steps lr_warmup_steps num_warmup_steps warmup_ratio",
    "optim.max_grad_norm": "max_grad_norm max_norm grad_clip clip_grad",
    "optim.weight_decay": "weight_decay l2",
    "optim.name": "optimizer optimizer_type optim",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.min_lr_frac": "lr_scheduler_kwargs",
    "tasks_per_step": "batch_size train_batch_size rollout_batch_size global_batch_size generation_batch_size",
    "group_size": "num_generations n_samples_per_prompt rollout_n num_samples_per_prompt rollouts_per_example",
    "learner.microbatch_tokens": "per_device_train_batch_size micro_batch_size micro_train_batch_size"
    " gradient_accumulation_steps max_tokens_per_gpu ppo_max_token_len_per_gpu",
    "learner.kernels": "use_liger_kernel torch_compile",
    "learner.minibatches": "steps_per_generation mini_batch_size ppo_mini_batch_size num_mini_batches",
    "learner.epochs": "ppo_epochs num_iterations num_ppo_epochs max_epochs",
    "learner.activations": "gradient_checkpointing activation_checkpointing activation_offloading",
    "learner.dtype": "bf16 fp16 torch_dtype dtype precision",
    "algo.kl_coef (dpo: --preference.beta)": "kl_coef beta init_kl_coef kl_loss_coef",
    "algo.entropy_coef": "entropy_coef entropy_loss_coef entropy_coeff",
    "algo.clip_high": "epsilon_high clip_ratio_high eps_clip_high clip_higher",
    "algo.clip_low": "epsilon eps_clip clip_ratio clip_ratio_low cliprange",
    "algo.dual_clip": "delta",
    "algo.aggregation (dpo: --preference.loss)": "loss_type loss_agg_mode",
    "algo.advantage": "scale_rewards",
    "algo.objective": "importance_sampling_level",
    "algo.overlong": "mask_truncated_completions",
    "algo.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "algo.correction_range": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
    "preference.label_smoothing": "label_smoothing",
    "critic.gae_lambda": "lam gae_lambda lambd",
    "critic.lr": "critic_learning_rate critic_lr",
    "algorithm": "advantage_estimator adv_estimator",
    "max_tokens": "max_completion_length max_length max_seq_length max_new_tokens generate_max_len"
    " max_response_length response_length",
    "max_prompt_tokens": "max_prompt_length prompt_max_len",
    "max_turns": "max_tool_calling_iterations",
    "num_epochs": "num_train_epochs",
    "num_steps": "max_steps total_training_steps num_rollout total_episodes",
    "save_every": "save_steps save_freq save_interval",
    "eval_every": "eval_steps test_freq eval_interval eval_strategy",
    "keep_best": "load_best_model_at_end metric_for_best_model",
    "keep_checkpoints": "save_total_limit max_ckpt_num",
    "out": "output_dir save_path default_local_dir save_dir",
    "model": "model_name_or_path pretrain model_name hf_checkpoint",
    "data.train": "dataset dataset_name prompt_data train_files train_file",
    "data.eval": "eval_dataset val_files eval_file",
    "data.shuffle": "shuffle_dataset",
    "env_path": "reward_fn reward_funcs reward_func custom_reward_function remote_rm_url",
    "sampling.temperature": "temperature",
    "engine": "use_vllm vllm_mode rollout_backend",
    "actors.policy.engine_urls": "vllm_server_base_url vllm_server_host vllm_server_port",
    "engine_memory_frac": "vllm_gpu_memory_utilization gpu_memory_utilization mem_fraction_static",
    "engine_tp": "vllm_tensor_parallel_size tensor_model_parallel_size rollout_num_gpus_per_engine",
    "max_staleness": "off_policy_steps max_async_level steps_off_policy",
    "actors.policy.lora.rank": "lora_r lora_rank use_peft",
    "actors.policy.lora.alpha": "lora_alpha",
    "actors.policy.lora.targets": "lora_target_modules target_modules",
    "actors.policy.lora.quantize": "load_in_4bit",
    "actors.policy.chat_template": "chat_template_path",
    "actors.policy.router_aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coeff",
    "attention": "attn_implementation",
    "log_samples": "log_completions num_completions_to_print",
    "run_name": "project",
    "push_to_hub": "hub_model_id",
    "timeout_s": "ddp_timeout",
    "trackers": "report_to use_wandb logger wandb",
    "resume": "resume_from_checkpoint load_checkpoint",
}

# What no flag of ours says.
ELSEWHERE = {
    "a run takes every GPU that torch sees, else the CPU: CUDA_VISIBLE_DEVICES=0 or '' "
    "chooses": "device no_cuda use_cpu n_gpus_per_node num_gpus gpus",
}


def unknown(name: str, value: Any, known: Iterable[str]) -> str:
    """What an unknown flag is answered with: our name of it, `--group_size` for `num_generations`,
    or the nearest one. A value that is a dictionary holds what stands behind a dot: verl's
    `actor_rollout_ref.rollout.n`."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return f"unknown flag --{name}; {answer(name, known)}"


def without_dashes(argument: str, known: Iterable[str]) -> str:
    """What an argument is answered with that is no flag and no flag's value, such as verl's
    a.b.c=8."""
    name, equals, _ = argument.partition("=")
    hint = f"; {answer(name, known)}" if equals else ""
    return f"argument {argument!r} has no flag before it; write --name value{hint}"


def answer(name: str, known: Iterable[str]) -> str:
    known = list(known)
    if name in known:
        return f"here it is --{name}"
    parts = name.replace("-", "_").lower().split(".")
    for word in ("_".join(parts[i:]) for i in range(len(parts))):  # rollout_n before n
        for own, theirs in OURS.items():
            if word in theirs.split():
                return f"here it is --{own}"
        for rule, theirs in ELSEWHERE.items():
            if word in theirs.split():
                return rule
    meant = misspelled(parts[-1])
    if meant and not difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return f"did you mean {meant!r}?"
    if difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return nearest(name, known)
    sections = dict.fromkeys(flag.partition(".")[0] for flag in known if "." in flag)
    return (
        f"no flag has a similar name; sections: {', '.join(sections)}; --help SECTION lists one, "
        "--help all"
    )


def misspelled(word: str) -> str | None:
    """Our flag of which another trainer's name is nearly `word`: optim.lr of learning_rte."""
    names = {theirs: own for own, words in OURS.items() for theirs in words.split()}
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.85)
    return names[close[0]] if close else None
