"""GRPO of TRL on envs/instructions.py with the settings of curves_real.py's row `instructions`:
reward and CPU seconds of each step, and peak memory.

    python scripts/curves_trl.py --model models/smollm2 --num_steps 10 --out trl.json

Requires TRL: pip install -e '.[test]'. The other side:

    python scripts/curves_real.py instructions --model models/smollm2 --seeds 0
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
from script_tools import ROOT, make_parser, write_json
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TASKS, GROUP, MICROBATCH = 8, 8, 16


class Meter(TrainerCallback):
    def __init__(self):
        self.rows, self.begin = [], 0.0

    def on_step_begin(self, *args, **kwargs):
        self.begin = time.process_time()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:
            row = {"reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            row["cpu_s"] = time.process_time() - self.begin
            self.rows.append(row)
            print(row, flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = runpy.run_path(str(ROOT / "envs/instructions.py"))
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "rules": json.dumps(row["rules"])}
        for row in env["load_tasks"]("train")
    ]

    def reward(completions, rules, **kwargs):
        pairs = zip(completions, rules, strict=True)
        return [env["reward_fn"](reply[0]["content"], json.loads(held)) for reply, held in pairs]

    config = GRPOConfig(
        output_dir=str(args.out.with_suffix("")),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=args.num_steps,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=TASKS * GROUP // MICROBATCH,
        num_generations=GROUP,
        max_completion_length=48,
        learning_rate=2e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon_high=0.28,
        temperature=1.0,
        seed=args.seed,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    meter = Meter()
    data = Dataset.from_list(rows)
    begin = time.process_time()
    GRPOTrainer(args.model, reward, config, data, callbacks=[meter]).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = {"cpu_s": time.process_time() - begin, "peak_gib": peak, "steps": meter.rows}
    write_json(args.out, figures)
    print(f"{figures['cpu_s']:.0f} CPU s, peak {peak:.1f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
