"""What rl_core/costs.py predicts of an update, beside what is counted while one runs on CPUs; and its predictions for GPUs.

    python scripts/bench_costs.py --out result.json     1, 2 and 4 processes; predicted, measured, ratio; a minute or two
    python scripts/bench_costs.py --plan                8 and 64 GPUs of 80 and 141 GB: predictions alone, nothing runs

Operations are counted by the formulas of torch.utils.flop_counter, to which two are added that it lacks: the CPU's flash
attention, of which only what a causal mask leaves is counted, and products that are added in place. Activations are the
storages that autograd keeps at the end of a forward, weights excepted; state is summed over tensors. Bytes sent follow from
the sizes of the collectives that are called, as a ring would send them. Counts of ranks are means over them. No number
depends on time, so that a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core import costs
from rl_core.build import compute_dtype
from rl_core.command_line import parse_config
from rl_core.distributed import Mesh, Ranks, all_gather_json, close_ranks, init_ranks, make_mesh, on_mesh
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.learner import Learner
from rl_core.learning.model import load_model_config, make_policy
from rl_core.types import TrainingSample

aten, c10d = torch.ops.aten, torch.ops.c10d
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    "small": {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 4096},
}
ONE = Mesh()


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    shape: str = "tiny"
    arch: str = "qwen3"
    flags: tuple[str, ...] = ()
    mesh: Mesh = ONE


CHECKPOINTING = ("--learner.activation_checkpointing",)
RAGGED = tuple(40 + 37 * i % 300 for i in range(24))
LONG = (2000, 2000)
EVEN = (400,) * 8
EPOCHS = ("--learner.epochs", "2")
LORA = ("--actors.policy.lora.rank", "8")
BF16 = ("--learner.dtype", "bfloat16")
ALONE = [
    Case(name="tiny, 24 ragged", lengths=RAGGED),
    Case(name="tiny, 24 ragged, checkpointing", lengths=RAGGED, flags=CHECKPOINTING),
    Case(name="tiny, 2 of 2000", lengths=LONG),
    Case(name="tiny, 2 of 2000, checkpointing", lengths=LONG, flags=CHECKPOINTING),
    Case(name="tiny qwen2, 24 ragged", arch="qwen2", lengths=RAGGED),
    Case(name="tiny llama, 24 ragged", arch="llama", lengths=RAGGED),
    Case(name="small, 24 ragged", shape="small", lengths=RAGGED),
    Case(name="small, 24 ragged, checkpointing", shape="small", lengths=RAGGED, flags=CHECKPOINTING),
    Case(name="small, 2 of 2000", shape="small", lengths=LONG),
    Case(name="tiny, SGD", lengths=RAGGED, flags=("--optim.name", "sgd")),
    Case(name="tiny, 2 epochs", lengths=EVEN, flags=EPOCHS),
    Case(name="small, LoRA", shape="small", lengths=EVEN, flags=LORA),
]
SIZES = (2, 4)
TOGETHER = [
    Case(name="dp 2", lengths=EVEN, mesh=Mesh(dp_shard=2)),
    Case(name="dp 2, 2 epochs", lengths=EVEN, mesh=Mesh(dp_shard=2), flags=EPOCHS),
    Case(name="small dp 2, bf16", shape="small", lengths=EVEN, mesh=Mesh(dp_shard=2), flags=BF16),
    Case(name="small dp 2, LoRA", shape="small", lengths=EVEN, mesh=Mesh(dp_shard=2), flags=LORA),
    Case(name="cp 2", lengths=EVEN, mesh=Mesh(cp=2)),
    Case(name="cp 2, bf16", lengths=EVEN, mesh=Mesh(cp=2), flags=BF16),
    Case(name="cp 2, checkpointing", lengths=EVEN, mesh=Mesh(cp=2), flags=CHECKPOINTING),
    Case(name="tp 2", lengths=EVEN, mesh=Mesh(tp=2)),
    Case(name="tp 2, checkpointing", lengths=EVEN, mesh=Mesh(tp=2), flags=CHECKPOINTING),
    Case(name="hsdp 2 x 2", lengths=EVEN, mesh=Mesh(dp_replicate=2, dp_shard=2)),
    Case(name="dp 2 x cp 2", lengths=EVEN, mesh=Mesh(dp_shard=2, cp=2)),
    Case(name="cp 4", lengths=EVEN, mesh=Mesh(cp=4)),
    Case(name="small cp 4, checkpointing", shape="small", lengths=EVEN, mesh=Mesh(cp=4), flags=CHECKPOINTING),
    Case(name="small dp 2 x tp 2", shape="small", lengths=EVEN, mesh=Mesh(dp_shard=2, tp=2)),
]


def make_model(folder: Path, shape: str, arch: str) -> Path:
    """A random model, heads of keys half as many as of queries."""
    path, sizes = folder / f"{shape}_{arch}", dict(SHAPES[shape])
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if not path.exists():
        sizes |= {"num_key_value_heads": heads // 2, "head_dim": hidden // heads, "intermediate_size": 3 * hidden}
        config = AutoConfig.for_model(arch, **sizes, tie_word_embeddings=True, dtype="float32", eos_token_id=1)
        config.bos_token_id = config.pad_token_id = None
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_samples(lengths: tuple[int, ...]) -> list[TrainingSample]:
    """The second half of each is trained; no two share a prompt."""
    draw, samples = random.Random(0), []
    for i, length in enumerate(lengths):
        mask = [int(2 * place >= length) for place in range(length)]
        samples.append(
            TrainingSample(
                token_ids=[draw.randrange(2, 100) for _ in mask],
                loss_mask=mask,
                rollout_logprobs=[-4.6 * m for m in mask],
                policy_versions=[m - 1 for m in mask],
                advantages=[float(m * (1 + i % 3)) for m in mask],
                group_id=f"{i:04d}",
            )
        )
    return samples


def causal_flops(products: int, query, key, is_causal: bool) -> float:
    batch, heads, num_q, width = query
    pairs = num_q * (num_q + 1) / 2 if is_causal else num_q * key[2]
    return 2 * products * batch * heads * pairs * width


def attention_flops(query, key, value, dropout=0.0, is_causal=False, **_) -> float:
    return causal_flops(2, query, key, is_causal)


def attention_backward_flops(grad, query, key, value, out, lse, dropout=0.0, is_causal=False, **_) -> float:
    return causal_flops(5, query, key, is_causal)


FORMULAS = flop_registry | {
    ATTENTION[0]: shape_wrapper(attention_flops),
    ATTENTION[1]: shape_wrapper(attention_backward_flops),
    aten.addmm_: flop_registry[aten.addmm],
}


class Counter(TorchDispatchMode):
    """Operations of what runs within, and bytes that this rank sends, by operator."""

    def __init__(self):
        super().__init__()
        self.flops: dict = {}
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again, as what a rank does with its part
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in FORMULAS:
            self.flops[packet] = self.flops.get(packet, 0) + FORMULAS[packet](*args, **kwargs, out_val=out)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = packet.__name__.rstrip("_")
            self.sent[name] = self.sent.get(name, 0) + sent(name, args)
        return out

    def of(self, *packets) -> float:
        return sum(self.flops.get(packet, 0) for packet in packets)


def sent(name: str, args) -> float:
    """Bytes of one call."""
    if name == "send":
        return sum(t.nbytes for t in args[0])
    if name in ("_allgather_base", "_reduce_scatter_base"):
        return abs(args[0].nbytes - args[1].nbytes)
    if name == "allgather":
        return sum(t.nbytes for t in args[1]) * (len(args[0][0]) - 1)
    if name == "allreduce":
        return 2 * costs.scattered(sum(t.nbytes for t in args[0]), dist.ProcessGroup.unbox(args[1]).size())
    if name == "all_gather_into_tensor":
        return args[0].nbytes * (args[1] - 1)
    if name == "all_reduce":
        group = dist.distributed_c10d._resolve_process_group(args[2])
        return 2 * costs.scattered(args[0].nbytes, group.size())
    if name in ("recv", "wait_tensor", "_wrap_tensor_autograd", "barrier"):
        return 0
    raise ValueError(f"{name} is not counted yet")


def is_weight(value: torch.Tensor) -> bool:
    return isinstance(value if value._base is None else value._base, nn.Parameter)


def kept_bytes(learner: Learner, batch) -> int:
    """What a forward keeps for its backward, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        local = value.to_local() if isinstance(value, DTensor) else value
        local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
        if not is_weight(value) and not is_weight(local):
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        losses, _ = learner.losses(batch)
    size = sum(storage.nbytes() for storage in storages.values())
    losses.sum().backward()  # every rank's collectives
    learner.policy.zero_grad()
    return size


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def pieces_of(batch) -> list[tuple[int, int]]:
    lengths = [b - a for a, b in pairwise(batch.cu_seqlens.tolist())]
    return [(n, lengths[p] if p >= 0 else 0) for n, p in zip(lengths, batch.parents, strict=True)]


def compare(case: Case, model: Path, ranks: Ranks) -> list[dict]:
    """Rows of what is predicted and what is counted, one rank's mean."""
    flags = ["--model", str(model), "--env_path", "x.py", "--out", "x", "--max_prompt_tokens", "1000"]
    flags += ["--max_tokens", "1000", "--learner.microbatch_tokens", "2000", *case.flags]
    mesh = {name: str(getattr(case.mesh, name)) for name in ("dp_replicate", "cp", "tp")}
    config = parse_config(flags + [x for name, n in mesh.items() for x in (f"--{name}", n)])
    algorithm = make_algorithm("grpo", config.algo)
    ranks = on_mesh(ranks, case.mesh) if ranks.size > 1 else ranks
    lora, checkpointing = config.actors["policy"].lora, config.learner.activation_checkpointing
    policy = make_policy(str(model), compute_dtype(config), ranks, checkpointing, lora)
    learner = Learner(config, algorithm, policy, ranks)
    samples = make_samples(case.lengths)[ranks.rank :: ranks.size]
    (minibatch,), _ = learner.shard(samples)
    largest = max(minibatch.batches, key=lambda batch: len(batch.input_ids))
    tokens, trained = len(largest.input_ids) // case.mesh.cp, len(largest.labels) // case.mesh.cp
    activations = kept_bytes(learner, largest)
    weights, gradients = local_bytes(policy.parameters()), []

    def at_step(optimizer, *_):
        gradients.append(local_bytes(p.grad for p in policy.parameters() if p.grad is not None))

    learner.optimizer.register_step_pre_hook(at_step)
    with Counter() as update:
        learner.annotate([minibatch])
        learner.step([minibatch], 0)
    moments = [v for state in learner.optimizer.state.values() for v in state.values() if v.ndim]
    with Counter() as sync:
        for _ in learner.named_weights():
            pass

    s = costs.make_setup(config, algorithm, ranks.size, load_model_config(str(model)))
    facts = [[pieces_of(b), len(b.labels)] for b in minibatch.batches]
    # Ranks of one cp and tp group hold the same batches.
    all_facts = [fact for part in all_gather_json(facts, ranks)[:: case.mesh.cp * case.mesh.tp] for fact in part]
    work = costs.work_of([tuple(p) for pieces, _ in all_facts for p in pieces], sum(n for _, n in all_facts))
    expected_sent = costs.sent_bytes(s, work)
    expected_sync = expected_sent.pop("sync", 0)
    flops = costs.learn_flops(s, work)
    attention, others = update.of(*ATTENTION), [op for op in update.flops if op not in ATTENTION]
    rows = {
        "weights, B": (costs.held_bytes(s, s.model)[0], weights),
        "gradients, B": (costs.held_bytes(s, s.model)[1], gradients[0]),
        "optimizer, B": (costs.held_bytes(s, s.model)[2], local_bytes(moments)),
        "activations, B": (costs.activation_bytes(s, s.model, tokens, trained), activations),
        "attention, FLOP": (flops["attention"] / ranks.size, attention),
        "products, FLOP": ((flops["matrices"] + flops["head"]) / ranks.size, update.of(*others)),
        "all, FLOP": (sum(flops.values()) / ranks.size, attention + update.of(*others)),
        "sent to update, B": (sum(expected_sent.values()), sum(update.sent.values())),
        "sent to sync, B": (expected_sync, sum(sync.sent.values())),
    }
    measured = all_gather_json([counted for _, counted in rows.values()], ranks)
    means = [sum(column) / ranks.size for column in zip(*measured, strict=True)]
    found = []
    for (what, (predicted, _)), counted in zip(rows.items(), means, strict=True):
        if predicted or counted:
            found.append({"case": case.name, "what": what, "predicted": predicted, "measured": counted})
    detail = {"update": update.sent, "sync": sync.sent, "expected": expected_sent}
    return [*found, {"case": case.name, "sent": detail}] if ranks.size > 1 else found


def run_ranks(size: int, folder: Path) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}", __file__]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--rank_of", str(folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.split("torch/distributed/elastic")[0][-3000:])
    return json.loads((folder / f"{size}.json").read_text())


def one_rank(folder: Path) -> None:
    ranks, rows = init_ranks(300), []
    for case in TOGETHER:
        if case.mesh.size == ranks.size:
            rows += compare(case, folder / f"{case.shape}_{case.arch}", ranks)
    if ranks.rank == 0:
        (folder / f"{ranks.size}.json").write_text(json.dumps(rows))
    close_ranks(ranks)


def bench(out: Path | None) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {(c.shape, c.arch): make_model(folder, c.shape, c.arch) for c in (*ALONE, *TOGETHER)}
        rows = [row for c in ALONE for row in compare(c, paths[c.shape, c.arch], init_ranks(60))]
        for size in SIZES:
            rows += run_ranks(size, folder)
    print("| case | what | predicted | measured | ratio |\n|---|---|---|---|---|")
    for row in rows:
        if "what" in row:
            ratio = row["predicted"] / row["measured"] if row["measured"] else float("inf")
            print(f"| {row['case']} | {row['what']} | {row['predicted']:.4g} | {row['measured']:.4g} | {ratio:.3f} |")
    print_ratios(rows)
    if out:
        out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


def print_ratios(rows: list[dict]) -> None:
    """One line a case: what was predicted over what was counted."""
    columns = [
        "weights, B",
        "gradients, B",
        "optimizer, B",
        "activations, B",
        "attention, FLOP",
        "products, FLOP",
        "all, FLOP",
    ]
    columns += ["sent to update, B", "sent to sync, B"]
    print("\n| predicted / measured |", *[f" {c.split(',')[0]} |" for c in columns], "\n|---|" + "---|" * len(columns))
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {r["what"]: r["predicted"] / r["measured"] for r in rows if r["case"] == case and r.get("measured")}
        print(f"| {case} |", *[f"{found[c]:.3f} |" if c in found else "|" for c in columns])


# layers, hidden, MLP, heads of queries and keys, tied: config.json of Qwen3-0.6B ... Qwen3-32B; heads of 128, 151,936 words.
QWEN3 = {
    "0.6B": (28, 1024, 3072, 16, 8, True),
    "1.7B": (28, 2048, 6144, 16, 8, True),
    "4B": (36, 2560, 9728, 32, 8, True),
    "8B": (36, 4096, 12288, 32, 8, False),
    "32B": (64, 5120, 25600, 64, 8, False),
}


def qwen3(name: str):
    layers, hidden, mlp, heads, kv_heads, is_tied = QWEN3[name]
    return AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=is_tied,
        dtype="bfloat16",
    )


def setup(name: str, length: int, num_ranks: int, gib: float, is_rl: bool, slots: int) -> costs.Setup:
    """64 sequences a step, of which each rank computes one at a time."""
    flags = ["--model", name, "--out", "x", "--learner.activation_checkpointing", "--device_memory_gib", str(gib)]
    flags += [
        "--max_prompt_tokens",
        "1024",
        "--max_tokens",
        str(length - 1024),
        "--learner.microbatch_tokens",
        str(length),
    ]
    rl = ["--env_path", "x.py", "--tasks_per_step", "8", "--group_size", "8", "--rollout.max_concurrent", str(slots)]
    config = parse_config(flags + (rl if is_rl else ["--algorithm", "sft", "--tasks_per_step", "64"]))
    return costs.make_setup(config, make_algorithm(config.algorithm, config.algo), num_ranks, qwen3(name))


def planned(start: costs.Setup) -> str:
    """Of the meshes that fit and learn within a tenth of the least time, that with least cp * tp; "-" if none fits."""
    config, found = start.config, []
    for cp in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):  # all models have 8 heads of keys
            if start.mesh.size % (cp * tp):
                continue
            mesh = make_mesh(start.mesh.size, 1, cp, tp)
            learner = dataclasses.replace(config.learner, microbatch_tokens=-(-config.max_context_tokens // cp))
            s = dataclasses.replace(start, mesh=mesh, config=dataclasses.replace(config, learner=learner, cp=cp, tp=tp))
            need, phase = costs.peak_of(s)
            if need <= costs.USABLE * config.device_memory_gib * 2**30:
                device = costs.device_of(config)[1]
                times = costs.seconds(s, costs.most_work(s.config, s.algorithm), device)
                found.append((times["learn"], need, phase, times.get("generate"), s))
    if not found:
        return "-"
    fastest = min(learn for learn, *_ in found)
    near = [entry for entry in found if entry[0] <= 1.1 * fastest]
    learn, need, phase, generate, s = min(near, key=lambda entry: entry[-1].mesh.cp * entry[-1].mesh.tp)
    mesh = " x ".join(f"{n} {v}" for n, v in (("dp", s.mesh.dp), ("cp", s.mesh.cp), ("tp", s.mesh.tp)) if v > 1) or "1"
    slots = f"{config.rollout.max_concurrent} slots, {shown(generate)} + " if generate else ""
    return f"{mesh}: {need / 2**30:.0f} GiB ({phase}), {slots}{shown(learn)} s"


def shown(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def plan() -> None:
    for is_rl in (False, True):
        title = (
            "GRPO, the embedded engine on each GPU; seconds to generate + learn" if is_rl else "SFT; seconds to learn"
        )
        print(f"\n{title}\n\n| GPUs | tokens | model | 80 GB (H100) | 141 GB (H200) |\n|---|---|---|---|---|")
        for num_ranks in (8, 64):
            for length in (8192, 65536):
                for name in QWEN3:
                    cells = []
                    for gib in (80, 141):
                        slots = (32, 16, 8, 4, 2, 1) if is_rl else (1,)
                        tried = (planned(setup(name, length, num_ranks, gib, is_rl, n)) for n in slots)
                        cells.append(next((cell for cell in tried if cell != "-"), "-"))
                    print(f"| {num_ranks} | {length} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print what is predicted for GPUs")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--rank_of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        one_rank(args.rank_of)
    elif args.plan:
        plan()
    else:
        bench(args.out)


if __name__ == "__main__":
    main()
