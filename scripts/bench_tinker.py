"""CPU time of a GRPO step through rl-core tinker, and of the same step in rl_core's own loop.

    python scripts/bench_tinker.py                        a tiny model; --quick for a smoke run
    python scripts/bench_tinker.py --model FOLDER         another one

Requires the client: pip install tinker==0.38.0. A step is 16 prompts with 8 samples of 24 tokens
each and one update of a LoRA adapter of rank 16, in fp32 with one torch thread. The measure is the
CPU time of the process with the model; the client's is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
from bench_ours import run_ours
from bench_work import (
    GROUP_SIZE,
    LEARNING_RATE,
    NUM_PROMPTS,
    Work,
    make_model,
    reward_of,
    rl_prompts,
    says,
)
from script_tools import make_parser

RANK, MICROBATCH_TOKENS = 16, 512
SETTINGS = {"actors.policy.lora.rank": RANK, "learner.microbatch_tokens": MICROBATCH_TOKENS}
COMMON = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TINKER_TELEMETRY": "0"}


def run_tinker(work: Work, model: str, folder: Path) -> list[float]:
    """CPU seconds of the server for each step."""
    command = [sys.executable, "-m", "rl_core.tools.cli", "tinker", "--model", model, "--port", "0"]
    command += ["--out", str(folder), "--max_models", "1", "--max_rank", str(RANK)]
    command += ["--learner.microbatch_tokens", str(MICROBATCH_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        line = next(line for line in lines if line.startswith("TINKER_BASE_URL="))
        url, key = line.strip().partition("=")[2], (folder / "keys").read_text().split()[1]
        process = psutil.Process(server.pid)

        def cpu_s() -> float:
            times = process.cpu_times()
            return times.user + times.system

        try:
            return train(work, model, url, key, cpu_s)
        finally:
            server.terminate()


def train(work: Work, model: str, url: str, key: str, cpu_s: Callable[[], float]) -> list[float]:
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(
        base_model=model, rank=RANK, train_unembed=False
    ).result()
    tokenizer = client.get_tokenizer()
    no_end = [len(tokenizer) + 1000]  # Samples end by their length alone.
    params = types.SamplingParams(max_tokens=work.longest, stop=no_end)
    texts, seconds = rl_prompts(work), []
    for step in range(work.all_steps):
        began = cpu_s()
        sampler = client.save_weights_and_get_sampling_client().result()
        futures = []
        for text in texts[step * NUM_PROMPTS : (step + 1) * NUM_PROMPTS]:
            chat = [says("user", text)]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            prompt = types.ModelInput.from_ints(ids)
            futures.append((ids, sampler.sample(prompt, GROUP_SIZE, params)))
        data = []
        for ids, future in futures:
            sequences = future.result().sequences
            rewards = [reward_of(tokenizer.decode(each.tokens)) for each in sequences]
            mean = statistics.mean(rewards)
            for sequence, reward in zip(sequences, rewards, strict=True):
                tokens, before = list(sequence.tokens), [0.0] * (len(ids) - 1)
                inputs = {
                    "target_tokens": [0] * len(before) + tokens,
                    "logprobs": before + list(sequence.logprobs),
                    "advantages": before + [reward - mean] * len(tokens),
                }
                model_input = types.ModelInput.from_ints(ids + tokens[:-1])
                data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        backward = client.forward_backward(data, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        backward.result()
        stepped.result()
        seconds.append(cpu_s() - began)
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="folder of a chat model; default: 0.6M parameters")
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after 1 of warm-up")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 1 step")
    args = parser.parse_args()
    os.environ |= COMMON
    import torch

    torch.set_num_threads(1)
    steps = 1 if args.quick else args.steps
    work = Work(
        name="tinker", algorithm="grpo", prompt=37, mean=24, longest=24, steps=steps, warmup=1
    )
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(Path(folder, "model"))
        if args.model is None:
            make_model(work, model)
        trainer = run_ours(work, SETTINGS, model).cpu_s
        server = run_tinker(work, model, Path(folder, "out"))
    sides = server, trainer
    of_server, of_trainer = (statistics.median(values[work.warmup :]) for values in sides)
    print(f"rl-core tinker: {of_server:.2f} CPU s a step, rl-core train: {of_trainer:.2f}")
    print(f"ratio {of_server / of_trainer:.2f}")


if __name__ == "__main__":
    main()
