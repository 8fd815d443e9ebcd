"""TRL's half of bench_cpu.py: unchanged trainers of TRL, measured from outside."""

from __future__ import annotations

import time
from functools import partial

import bench_work
import torch
from bench_work import Measured, Work, completion_length
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from rl_core.data.pretrained import load_pretrained


class EndsAt(LogitsProcessor):
    """Row i samples the end token as its lengths[i]-th token and no earlier."""

    def __init__(self, prompt_length: int, lengths: list[int], eos: int):
        self.prompt_length, self.lengths, self.eos = prompt_length, torch.tensor(lengths), eos

    def __call__(self, input_ids, scores):
        ends = self.lengths == input_ids.shape[1] - self.prompt_length + 1
        eos_scores = scores[:, self.eos].clone()
        scores.masked_fill_(ends[:, None], -torch.inf)
        scores[:, self.eos] = torch.where(ends, eos_scores, -torch.inf)
        return scores


class Meter(TrainerCallback):
    def __init__(self, work: Work, model, eos: int):
        self.work, self.eos, self.measured = work, eos, Measured()
        self.generate = model.generate
        model.generate = self.measured_generate
        model.register_forward_pre_hook(self.count_tokens, with_kwargs=True)

    def measured_generate(self, input_ids, **kwargs):
        step = len(self.measured.cpu_s) - 1
        lengths = [completion_length(self.work, step, i) for i in range(len(input_ids))]
        begin = time.process_time()
        out = self.generate(
            input_ids, logits_processor=[EndsAt(input_ids.shape[1], lengths, self.eos)], **kwargs
        )
        self.measured.generate_cpu_s[-1] += time.process_time() - begin
        self.measured.generated_tokens[-1] += sum(lengths)
        is_end = out[:, input_ids.shape[1] :] == self.eos
        assert (is_end.int().argmax(1) + 1).tolist() == lengths
        return out

    def count_tokens(self, model, args, kwargs):
        if torch.is_grad_enabled():
            ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
            self.measured.computed_tokens[-1] += ids.numel()
            self.measured.learned_tokens[-1] += ids.numel() if mask is None else int(mask.sum())

    def on_train_begin(self, *args, **kwargs):
        self.measured.begin_step()

    def on_step_end(self, *args, **kwargs):
        self.measured.end_step()
        if len(self.measured.cpu_s) < self.work.all_steps:
            self.measured.begin_step()


def run_trl(work: Work, setting: dict, folder: str) -> Measured:
    model = load_pretrained(AutoModelForCausalLM, folder, dtype=torch.float32)
    tokenizer = load_pretrained(AutoTokenizer, folder)
    meter = Meter(work, model, tokenizer.eos_token_id)
    common = {
        "output_dir": "trl",
        "use_cpu": True,
        "bf16": False,
        "max_steps": work.all_steps,
        "learning_rate": bench_work.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": work.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": work.all_steps,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    settings = common | setting
    num_samples = settings["per_device_train_batch_size"] * settings.get(
        "gradient_accumulation_steps", 1
    )
    if work.algorithm == "grpo":
        assert num_samples == bench_work.NUM_SAMPLES
        rows = [
            {"prompt": [bench_work.says("user", prompt)]} for prompt in bench_work.rl_prompts(work)
        ]
        settings |= {
            "beta": 0.0,
            "num_generations": bench_work.GROUP_SIZE,
            "max_completion_length": work.longest,
        }
        config = GRPOConfig(**settings, epsilon=0.2, epsilon_high=0.28, shuffle_dataset=False)
        make = partial(GRPOTrainer, reward_funcs=reward)
    else:
        assert settings.get("packing") or num_samples == bench_work.NUM_ROWS
        pairs = bench_work.sft_rows(work)
        rows = [
            {
                "prompt": [bench_work.says("user", p)],
                "completion": [bench_work.says("assistant", r)],
            }
            for p, r in pairs
        ]
        config = SFTConfig(**settings, max_length=work.longest_prompt + work.longest)
        make = SFTTrainer
    data = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [meter],
    }
    make(model=model, args=config, **data).train()
    return meter.measured


def reward(completions, **kwargs):
    return [bench_work.reward_of(completion[0]["content"]) for completion in completions]
