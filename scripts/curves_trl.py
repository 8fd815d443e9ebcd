"""TRL on a pretrained model, next to rl_core: reward or loss and CPU seconds of each step, and peak
memory. GRPO takes envs/instructions.py with the settings of curves_real.py's row `instructions`,
SFT a file of rows {"prompt": ..., "completion": ...}.

    python scripts/curves_trl.py --model models/smollm2 --num_steps 10 --out trl.json
    python scripts/curves_trl.py ... --lora_rank 16
    python scripts/curves_trl.py ... --sft rows.jsonl

Requires TRL: pip install -e '.[test]'. The other side:

    python scripts/curves_real.py instructions --model models/smollm2 --seeds 0
    python -m rl_core.train --algorithm sft --model models/smollm2 --data.train rows.jsonl
    --tasks_per_step 16 --num_steps 10 --max_prompt_tokens 256 --max_tokens 256 --optim.lr 2e-5
    --optim.schedule constant --optim.warmup_steps 3 --out runs/sft
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
import time
from pathlib import Path

import torch
from curves_real import MODEL
from datasets import Dataset
from peft import LoraConfig
from script_tools import ROOT, make_parser, write_json
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

TASKS, GROUP, MICROBATCH = 8, 8, 16
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "model_init_kwargs": {"dtype": "float32"},
    "per_device_train_batch_size": MICROBATCH,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}


class Meter(TrainerCallback):
    """Figures of each step."""

    def __init__(self):
        self.rows, self.begin = [], 0.0

    def on_step_begin(self, *args, **kwargs):
        self.begin = time.process_time()

    def on_log(self, args, state, control, logs, **kwargs):
        names = {"reward": "reward", "completions/mean_length": "tokens", "loss": "loss"}
        row = {names[name]: logs[name] for name in names if name in logs}
        if row:
            self.rows.append(row | {"cpu_s": time.process_time() - self.begin})
            print(self.rows[-1], flush=True)


def make_grpo(model: str, config: dict, more: dict) -> Trainer:
    env = runpy.run_path(str(ROOT / "envs/instructions.py"))
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "rules": json.dumps(row["rules"])}
        for row in env["load_tasks"]("train")
    ]

    def reward(completions, rules, **kwargs):
        pairs = zip(completions, rules, strict=True)
        return [env["reward_fn"](reply[0]["content"], json.loads(held)) for reply, held in pairs]

    grpo = GRPOConfig(
        **config,
        gradient_accumulation_steps=TASKS * GROUP // MICROBATCH,
        num_generations=GROUP,
        max_completion_length=48,
        beta=0.0,
        epsilon_high=0.28,
        temperature=1.0,
    )
    return GRPOTrainer(model, reward, grpo, Dataset.from_list(rows), **more)


def make_sft(model: str, config: dict, more: dict, path: Path) -> Trainer:
    roles = {"prompt": "user", "completion": "assistant"}
    rows = [
        {key: [{"role": role, "content": row[key]}] for key, role in roles.items()}
        for row in map(json.loads, path.read_text().splitlines())
    ]
    sft = SFTConfig(**config, max_length=512)
    return SFTTrainer(model, sft, train_dataset=Dataset.from_list(rows), **more)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, default=30)
    parser.add_argument("--lora_rank", type=int, help="train adapters, learning rate 2e-4")
    parser.add_argument("--sft", type=Path, metavar="ROWS", help="SFT on these rows")
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = COMMON | {"output_dir": str(args.out.with_suffix("")), "seed": args.seed}
    config["max_steps"] = args.num_steps
    meter = Meter()
    more: dict = {"callbacks": [meter]}
    if args.lora_rank:
        config["learning_rate"] = 2e-4
        more["peft_config"] = LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
        )
    begin = time.process_time()
    if args.sft:
        trainer = make_sft(args.model, config, more, args.sft)
    else:
        trainer = make_grpo(args.model, config, more)
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = {"cpu_s": time.process_time() - begin, "peak_gib": peak, "steps": meter.rows}
    write_json(args.out, figures)
    print(f"{figures['cpu_s']:.0f} CPU s, peak {peak:.1f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
