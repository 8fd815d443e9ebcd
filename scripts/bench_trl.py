"""TRL's half of bench_cpu.py: its trainers as they come, measured from outside."""

from __future__ import annotations

import resource
import time

import torch
from bench_work import (
    GROUP_SIZE,
    LEARNING_RATE,
    NUM_PROMPTS,
    NUM_ROWS,
    NUM_SAMPLES,
    Measured,
    Work,
    completion_length,
    reward_of,
    rl_prompts,
    sft_rows,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


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
        self.work, self.eos = work, eos
        self.marks: list[float] = []
        self.totals = {name: [0] for name in ("generate_cpu_s", "generated", "learned", "computed")}
        self.generate = model.generate
        model.generate = self.measured_generate
        model.register_forward_pre_hook(self.count_tokens, with_kwargs=True)

    def measured_generate(self, input_ids, **kwargs):
        step = len(self.marks) - 1
        lengths = [completion_length(self.work, step, i) for i in range(len(input_ids))]
        begin = time.process_time()
        out = self.generate(input_ids, logits_processor=[EndsAt(input_ids.shape[1], lengths, self.eos)], **kwargs)
        self.totals["generate_cpu_s"][-1] += time.process_time() - begin
        self.totals["generated"][-1] += sum(lengths)
        is_end = out[:, input_ids.shape[1] :] == self.eos
        assert (is_end.int().argmax(1) + 1).tolist() == lengths
        return out

    def count_tokens(self, model, args, kwargs):
        if torch.is_grad_enabled():
            ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
            self.totals["computed"][-1] += ids.numel()
            self.totals["learned"][-1] += ids.numel() if mask is None else int(mask.sum())

    def on_train_begin(self, *args, **kwargs):
        self.start_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.marks.append(time.process_time())

    def on_step_end(self, *args, **kwargs):
        self.marks.append(time.process_time())
        for values in self.totals.values():
            values.append(0)

    def measured(self) -> Measured:
        # The last entry of each list began after the last step.
        per_step = {name: values[: len(self.marks) - 1] for name, values in self.totals.items()}
        return Measured(
            cpu_s=[end - begin for begin, end in zip(self.marks, self.marks[1:], strict=False)],
            generate_cpu_s=per_step["generate_cpu_s"],
            generated_tokens=per_step["generated"],
            learned_tokens=per_step["learned"],
            computed_tokens=per_step["computed"],
            start_mib=self.start_mib,
            peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )


def run_trl(work: Work, setting: dict, folder: str) -> Measured:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    meter = Meter(work, model, tokenizer.eos_token_id)
    make = grpo_trainer if work.algorithm == "grpo" else sft_trainer
    common = {
        "output_dir": "trl",
        "use_cpu": True,
        "bf16": False,
        "max_steps": work.all_steps,
        "learning_rate": LEARNING_RATE,
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
    make(work, common | setting, model, tokenizer, meter).train()
    return meter.measured()


def grpo_trainer(work: Work, settings: dict, model, tokenizer, meter: Meter) -> GRPOTrainer:
    def reward(completions, **kwargs):
        return [reward_of(completion[0]["content"]) for completion in completions]

    config = GRPOConfig(
        **settings,
        beta=0.0,
        num_generations=GROUP_SIZE,
        max_completion_length=work.longest,
        epsilon=0.2,
        epsilon_high=0.28,
        shuffle_dataset=False,
    )
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert batch == NUM_SAMPLES == NUM_PROMPTS * GROUP_SIZE
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in rl_prompts(work)]
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[meter],
    )


def sft_trainer(work: Work, settings: dict, model, tokenizer, meter: Meter) -> SFTTrainer:
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": response}]}
        for prompt, response in sft_rows(work)
    ]
    config = SFTConfig(**settings, max_length=work.longest if work.file else work.longest_prompt + work.longest)
    assert config.packing or config.per_device_train_batch_size * config.gradient_accumulation_steps == NUM_ROWS
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[meter],
    )
