"""Real text: SFT of a model with 1M parameters and a byte-level BPE tokenizer trained on GSM8K's
own questions."""

from __future__ import annotations

import gzip
import json

from rl_core.train import main


def test_sft_on_gsm8k_learns_in_full_microbatches(data_dir, tmp_path):
    from make_tiny_model import bpe_tokenizer, make_tiny_model

    with gzip.open(data_dir / "gsm8k_train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][:2000]
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": r["question"], "response": r["answer"]}) + "\n" for r in rows)
    )
    tokenizer = bpe_tokenizer((r["question"] + "\n" + r["answer"] for r in rows), 4096)
    make_tiny_model(tmp_path / "model", hidden=128, layers=3, tokenizer=tokenizer)
    flags = [
        "--tasks_per_step",
        "32",
        "--num_steps",
        "12",
        "--optim.lr",
        "3e-3",
        "--optim.warmup_steps",
        "3",
    ]
    flags += [
        "--learner.microbatch_tokens",
        "2048",
        "--max_prompt_tokens",
        "1024",
        "--max_tokens",
        "512",
    ]
    out = tmp_path / "run"
    assert (
        main(
            [
                "--algorithm",
                "sft",
                "--model",
                str(tmp_path / "model"),
                "--data.train",
                str(data),
                "--out",
                str(out),
                *flags,
            ]
        )
        == 0
    )
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["learn/policy/loss"] > 7.5 and steps[-1]["learn/policy/loss"] < 6.3
    assert min(row["pack/fill_frac"] for row in steps) > 0.95
    assert all(row["pack/microbatches"] > 1 for row in steps)
