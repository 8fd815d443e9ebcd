"""Speed and memory of one learner's update: tokens per second, model FLOPs utilisation (MFU), peak
memory, offload and reload.

    python scripts/bench_learner.py                              GPU: Qwen3 0.6B, 1.7B, 4B
    python scripts/bench_learner.py --sizes tiny --lengths 512   a smoke run, also on a CPU
    torchrun --nproc_per_node 2 scripts/bench_learner.py --sizes tiny --lengths 512 --cp 2

Weights are random. A step trains on --tokens tokens in documents of one length, with GRPO's loss on
all but the first 32 tokens of each. FLOPs count 6 per weight of a matrix and token, and attention
under a causal mask, 6 H D (L + 1) per token and layer; recomputation does not count. MFU is
relative to --peak_tflops, or to the rate of a product of two 8192 x 8192 bf16 matrices.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import torch
from bench_logprobs import now_s, peak_mib
from script_tools import Table, make_parser, write_json
from transformers import AutoModelForCausalLM, Qwen3Config

from rl_core.algorithms import make_algorithm
from rl_core.config import parse_config
from rl_core.distributed import Ranks, close_ranks
from rl_core.learning.activation_memory import activation_bytes, widths
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.optimizers import adamw
from rl_core.learning.policies import make_policy, prepare
from rl_core.learning.sequence_shards import SequenceShards
from rl_core.models.kernels.fused_norms import fuse_norms
from rl_core.models.kernels.gpu_attention import find_kernel
from rl_core.models.options import choose_logprob_kernel
from rl_core.models.parallel.context_parallel import RingForward
from rl_core.models.parallel.fsdp import shard_policy
from rl_core.models.parallel.replicas import make_mesh
from rl_core.models.policy import PackedForward, Policy
from rl_core.run.process.joining import init_ranks
from rl_core.types import TrainingSample

PROMPT = 32
# config.json of Qwen3: layers, hidden size, MLP size, query heads, key heads, tied embeddings. The
# head dimension is 128 and the vocabulary has 151,936 ids.
QWEN3 = {
    "0.6B": (28, 1024, 3072, 16, 8, True),
    "1.7B": (28, 2048, 6144, 16, 8, True),
    "4B": (36, 2560, 9728, 32, 8, True),
    "8B": (36, 4096, 12288, 32, 8, False),
    "14B": (40, 5120, 17408, 40, 8, False),
    "32B": (64, 5120, 25600, 64, 8, False),
}


def model_config(size: str) -> Qwen3Config:
    if size == "tiny":
        layers, hidden, mlp, heads, kv_heads, is_tied = 2, 64, 192, 4, 2, True
        more = {"head_dim": 16, "vocab_size": 512}
    else:
        layers, hidden, mlp, heads, kv_heads, is_tied = QWEN3[size]
        more = {"head_dim": 128, "vocab_size": 151_936, "dtype": "bfloat16"}
    return Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=is_tied,
        **more,
    )


def make_learner(size: str, length: int, args: argparse.Namespace, ranks: Ranks) -> Learner:
    microbatch = max(args.microbatch_tokens, -(-length // args.cp))
    flags = (
        f"--model {size} --env_path none --out none --max_prompt_tokens {PROMPT} --max_tokens "
        f"{length - PROMPT} --cp {args.cp} --optim.lr 1e-6 "
        f"--learner.microbatch_tokens {microbatch}"
    )
    config = parse_config(flags.split())
    device, dtype = ranks.device, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        options = {"dtype": torch.float32, "attn_implementation": "rl_core_packed"}
        hf = AutoModelForCausalLM.from_config(model_config(size), **options)
    forward_pass = PackedForward(find_kernel("auto", device))
    if ranks.cp_group is not None:
        forward_pass = RingForward(forward_pass.kernel, ranks.cp_group)
    if device.type == "cuda":
        fuse_norms(hf)
    kernel = choose_logprob_kernel(device)
    policy = Policy(hf, torch.bfloat16, dtype, forward_pass, logprob_kernel=kernel)
    prepare(policy, is_frozen=False, recomputes=recomputes(size, microbatch, args, device))
    if ranks.weights_mesh is not None:
        shard_policy(policy, dtype, ranks)
    extensions = [SequenceShards(ranks)] if ranks.mesh.cp > 1 else []
    context = LearnerContext(
        config=config,
        algorithm=make_algorithm("grpo", config.algo),
        name="policy",
        policy=policy,
        ranks=ranks,
        load=make_policy,
        make_optimizer=adamw,
    )
    return Learner(context, extensions)


def recomputes(size: str, tokens: int, args: argparse.Namespace, device: torch.device) -> bool:
    """True if the activations of a microbatch would take half of the device's memory."""
    if args.recompute is not None or device.type == "cpu":
        return bool(args.recompute)
    kept = tokens * activation_bytes(widths(model_config(size)), 2, 1, False)
    return kept > torch.cuda.get_device_properties(device).total_memory / 2


def documents(length: int, num: int, vocabulary: int, seed: int) -> list[TrainingSample]:
    draw, mask = random.Random(seed), [0] * PROMPT + [1] * (length - PROMPT)
    same = {
        "loss_mask": mask,
        "rollout_logprobs": [-1.0 * m for m in mask],
        "policy_versions": [m - 1 for m in mask],
    }
    samples = []
    for i in range(num):
        ids = [draw.randrange(vocabulary) for _ in mask]
        advantages = [draw.choice([-1.0, 1.0])] * length
        sample = TrainingSample(token_ids=ids, advantages=advantages, group_id=f"{i:04d}", **same)
        samples.append(sample)
    return samples


def update_flops(config: Qwen3Config, length: int, num: int) -> float:
    """FLOPs of forward and backward of `num` documents, without recomputation."""
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    block = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
    tokens, trained = length - 1, length - PROMPT
    products = 6 * (block * layers * tokens + hidden * config.vocab_size * trained)
    # A forward has 2 products of 2 FLOPs per pair of tokens, of which the mask keeps half. A
    # backward has twice as many.
    return num * (products + layers * heads * head_dim * 6 * tokens * (tokens + 1))


def peak_tflops(device: torch.device) -> float:
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, best = torch.randn(n, n, device=device, dtype=dtype), 0.0
    for _ in range(5):
        start = now_s()
        a @ a
        best = max(best, 2 * n**3 / (now_s() - start) / 1e12)
    return best


def moves_s(learner: Learner, device: torch.device) -> dict:
    """Seconds of moving weights to the host and back, and of as many bytes of pinned memory."""
    if device.type != "cuda":
        return {}
    num_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in learner.policy.parameters())
    start = now_s()
    learner.policy.to("cpu")
    middle = now_s()
    learner.policy.to(device)
    end = now_s()
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    began = now_s()
    there.copy_(here)
    rate = (1 << 30) / (now_s() - began)
    return {"offload_s": middle - start, "reload_s": end - middle, "bus_s": num_bytes / rate}


def measure(size: str, length: int, args: argparse.Namespace, ranks: Ranks, peak: float) -> dict:
    device = ranks.device
    learner = make_learner(size, length, args, ranks)
    num = max(1, args.tokens // length) * ranks.mesh.dp
    mine = documents(length, num, model_config(size).vocab_size, 0)[ranks.rank :: ranks.size]
    times = []
    for step in range(args.steps + 1):  # The first step warms up.
        minibatches, _ = learner.shard(mine)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = now_s()
        learner.step(minibatches, step)
        times.append(now_s() - start)
    seconds = min(times[1:])
    flops = update_flops(model_config(size), length, num) / ranks.size
    return {
        "size": size,
        "length": length,
        "documents": num,
        "step_s": seconds,
        "tokens_per_s_and_rank": num * length / seconds / ranks.size,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / 1e12 / peak,
        "peak_gib": peak_mib(device.type) / 1024,
        "activations": "recompute" if learner.policy.recomputes else "keep",
        **moves_s(learner, device),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", choices=["tiny", *QWEN3], default=["0.6B", "1.7B", "4B"]
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 65536])
    parser.add_argument(
        "--tokens", type=int, default=65536, help="tokens of a step on one data-parallel rank"
    )
    parser.add_argument("--microbatch_tokens", type=int, default=16384)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="recompute activations; by default, where keeping them takes half of the memory",
    )
    parser.add_argument(
        "--peak_tflops", type=float, help="peak of the device, such as 989 for bf16 on an H100"
    )
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    mesh = make_mesh(int(os.environ.get("WORLD_SIZE", 1)), cp=args.cp)
    ranks = init_ranks(600, mesh, torch.cuda.is_available())
    if ranks.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    peak, lines = args.peak_tflops or peak_tflops(ranks.device), []
    is_first = ranks.rank == 0
    if is_first:
        moves = dict.fromkeys(("offload_s", "reload_s", "bus_s"), ">6.2f")
        table = Table(
            size="<5",
            length=">7d",
            step_s=">7.3f",
            tokens_per_s_and_rank=">9.0f",
            tflops=">7.2f",
            mfu=">6.1%",
            peak_gib=">8.2f",
            activations="<9",
            **moves,
            error="<5",
        )
    for size in args.sizes:
        for length in args.lengths:
            try:
                line = measure(size, length, args, ranks, peak)
            except torch.OutOfMemoryError as error:
                line = {"size": size, "length": length, "error": str(error).splitlines()[0]}
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            lines.append(line)
            if is_first:
                table.add(line)
    if is_first:
        write_json(args.out, {"peak_tflops": peak, "ranks": ranks.size, "lines": lines})
    close_ranks(ranks)


if __name__ == "__main__":
    main()
