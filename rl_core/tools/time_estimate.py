"""rl-core plan --gpus 8,64 --gpu H100: seconds of a step on N GPUs, by published figures.

Nothing here was measured. Every episode counts as long as it may be. docs/parallelism.md has the
formulas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_core.errors import nearest
from rl_core.run.display.gpus import PEAK_TFLOPS
from rl_core.tools.memory_estimate import GIB, Size, facts, model_size

if TYPE_CHECKING:
    from rl_core.config import Config
    from rl_core.plan.plan import Plan

NODE = 8  # GPUs of a node
MOST_GPUS = 1 << 20
# Fractions of published figures that a run reaches.
COMPUTE_FRAC, MEMORY_FRAC, LINK_FRAC = 0.4, 0.6, 0.8
USABLE_FRAC = 0.9  # Fraction of a GPU's memory.
# A sample, on every rank's CPU, where none is computed together with another; a tenth of it where
# groups are: scripts/bench_scale.py --plan.
PLAN_S = 3e-6
GRADIENT_BYTES = 4  # They are reduced in fp32.


@dataclass(kw_only=True, slots=True, frozen=True)
class Gpu:
    """NVIDIA's data sheets of the GPU and of its DGX. Speeds in GB/s, links in one direction."""

    tflops: float  # dense bfloat16
    memory_gib: float
    memory_gbs: float
    nvlink_gbs: float  # Link to other GPUs of the node.
    network_gbs: float  # Network card of one GPU.


GPUS = {
    "A100": Gpu(
        tflops=PEAK_TFLOPS["A100"],
        memory_gib=80,
        memory_gbs=2039,
        nvlink_gbs=300,
        network_gbs=25,
    ),
    "H100": Gpu(
        tflops=PEAK_TFLOPS["H100"],
        memory_gib=80,
        memory_gbs=3350,
        nvlink_gbs=450,
        network_gbs=50,
    ),
    "H200": Gpu(
        tflops=PEAK_TFLOPS["H200"],
        memory_gib=141,
        memory_gbs=4800,
        nvlink_gbs=450,
        network_gbs=50,
    ),
    "B200": Gpu(
        tflops=PEAK_TFLOPS["B200"],
        memory_gib=180,
        memory_gbs=8000,
        nvlink_gbs=900,
        network_gbs=50,
    ),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """A step of one actor."""

    size: Size
    active: float  # parameters that a token meets
    itemsize: int  # bytes of a number in compute
    num_tasks: int
    group_size: int
    prompt_tokens: int
    context_tokens: int
    forwards: float  # Forwards of each token without gradient.
    epochs: int
    is_recomputed: bool
    microbatch_tokens: int
    is_sampled: bool

    @property
    def num_samples(self) -> int:
        return self.num_tasks * self.group_size

    @property
    def forward_flops(self) -> float:
        """FLOPs of a token: products with weights, and with keys and values of half its context."""
        attention = 2 * self.size.layers * self.size.queries * self.context_tokens
        return 2 * self.active + attention

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token."""
        return 2 * self.size.layers * self.size.keys * self.itemsize


def parse_gpus(text: str, name: str) -> tuple[list[int], Gpu]:
    """Numbers of GPUs, in order, and their kind. Raises ValueError."""
    kinds = {kind.lower(): gpu for kind, gpu in GPUS.items()}
    if name.lower() not in kinds:
        raise ValueError(f"--gpu={name} is not known; {nearest(name, GPUS)}")
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = [0]
    if not 0 < numbers[0] <= numbers[-1] <= MOST_GPUS:
        raise ValueError(f"--gpus={text} must be numbers of GPUs with commas: --gpus 8,64,1024")
    return numbers, kinds[name.lower()]


@contextmanager
def as_ranks(number: int) -> Iterator[None]:
    """A context in which a run would have `number` ranks."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(number)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def gather_s(num_bytes: float, num_ranks: int, gpu: Gpu) -> float:
    """Seconds in which each rank gathers `num_bytes` from the others. The GPUs of a node share its
    network cards."""
    num_nodes = math.ceil(num_ranks / NODE)
    within = num_bytes * (1 - 1 / min(num_ranks, NODE)) / gpu.nvlink_gbs
    between = num_bytes * (1 - 1 / num_nodes) / (NODE * gpu.network_gbs)
    return max(within, between) / LINK_FRAC / 1e9


def sample_s(work: Work, num_engines: int, tp: int, slots: int, gpu: Gpu) -> dict[str, float]:
    """Prefill, once for each group, and decode of the engine that has the most groups."""
    flops_s = gpu.tflops * 1e12 * COMPUTE_FRAC * tp
    bytes_s = gpu.memory_gbs * 1e9 * MEMORY_FRAC * tp
    groups = math.ceil(work.num_tasks / num_engines)
    episodes = groups * work.group_size
    rows = min(slots, episodes)
    new_tokens = work.context_tokens - work.prompt_tokens
    mean_length = work.prompt_tokens + new_tokens / 2
    read = work.itemsize * work.size.total + rows * mean_length * work.kv_bytes
    step = max(read / bytes_s, rows * work.forward_flops / flops_s)
    prefill = groups * work.prompt_tokens * work.forward_flops / flops_s
    return {"prefill": prefill, "decode": math.ceil(episodes / rows) * new_tokens * step}


def learn_s(work: Work, plan: Plan, gpu: Gpu) -> dict[str, float]:
    """Compute, and the traffic of FSDP, of the rank that has the most samples."""
    mesh = plan.mesh
    samples = math.ceil(work.num_samples / mesh.dp)
    tokens = samples * work.context_tokens / mesh.cp
    with_gradient = work.epochs * (3 + work.is_recomputed)
    flops = tokens * (with_gradient + work.forwards) * work.forward_flops / mesh.tp
    microbatches = math.ceil(tokens / work.microbatch_tokens)
    shards = mesh.dp_shard * mesh.cp
    # Gathered in each forward and in each backward, in which gradients are scattered.
    gathered = (2 * work.epochs + work.forwards) * work.itemsize
    scattered = work.epochs * GRADIENT_BYTES
    traffic = microbatches * (gathered + scattered) * work.size.total / mesh.tp
    seconds = gather_s(traffic, shards * mesh.tp, gpu) if shards > 1 else 0.0
    if mesh.dp_replicate > 1:  # Gradients of each shard are summed over the copies.
        reduced = 2 * GRADIENT_BYTES * work.size.total / (shards * mesh.tp)
        seconds += reduced / (gpu.network_gbs * 1e9 * LINK_FRAC)
    return {"compute": flops / (gpu.tflops * 1e12 * COMPUTE_FRAC), "traffic": seconds}


def works(plan: Plan) -> Iterator[Work]:
    """The work of each actor that learns."""
    from rl_core.learning.minibatches import active_parameters
    from rl_core.learning.teachers.build_teacher import frozen_models
    from rl_core.models.loading import compute_dtype, load_model_config, on_meta

    for name in plan.config.trained:
        config, algorithm = plan.config.of(name), plan.algorithms[name]
        learner, actor = config.learner, plan.config.actors[name]
        num_replies = 2 if algorithm.is_pairs else 1
        is_old = config.is_rl and learner.updates_per_epoch * learner.epochs > 1
        yield Work(
            size=model_size(actor),
            active=active_parameters(on_meta(load_model_config(actor.model))),
            itemsize=compute_dtype(config).itemsize,
            num_tasks=config.tasks_per_step,
            group_size=config.group_size if config.is_rl else num_replies,
            prompt_tokens=config.max_prompt_tokens,
            context_tokens=config.max_context_tokens,
            forwards=is_old + bool(algorithm.needs_reference) + len(frozen_models(config)),
            epochs=learner.epochs,
            is_recomputed=learner.activations == "recompute",
            microbatch_tokens=learner.microbatch_tokens,
            is_sampled=config.is_rl,
        )


def estimate(plan: Plan, gpu: Gpu) -> dict[str, Any]:
    """Seconds of the parts of a step, GiB on one rank, and what to expect first."""
    config, mesh = plan.config, plan.mesh
    num_engines = max(1, (config.rollout_ranks or mesh.size) // config.engine_tp)
    names = ("prefill", "decode", "compute", "traffic", "sync", "plan")
    seconds = dict.fromkeys(names, 0.0)
    for work in works(plan):
        parts = learn_s(work, plan, gpu)
        parts["plan"] = PLAN_S * work.num_samples
        if work.is_sampled:
            slots = config.rollout.max_concurrent
            parts |= sample_s(work, num_engines, config.engine_tp, slots, gpu)
            num_bytes = work.itemsize * work.size.total
            copied = 2 * num_bytes / (gpu.memory_gbs * 1e9 * MEMORY_FRAC)
            parts["sync"] = gather_s(num_bytes, mesh.size, gpu) + copied
        for name, value in parts.items():
            seconds[name] += value
    sample = seconds["prefill"] + seconds["decode"]
    # The next block is gathered while one is computed.
    learn = max(seconds["compute"], seconds["traffic"]) + seconds["plan"]
    both = max(sample, learn) if config.rollout_ranks else sample + learn
    held = [actor["bytes_on_one_rank"]["sum"] for actor in facts(plan)["actors"].values()]
    most = max(sum(one[phase] for one in held) for phase in ("sample", "learn"))
    row = {
        "gpus": mesh.size + config.rollout_ranks,
        "engine": config.engine if config.is_rl else None,
        "dtype": config.learner.dtype,
        "seconds": seconds,
        "step_s": both + seconds["sync"],
        "memory_gib": most / GIB,
        "fits": most / GIB <= USABLE_FRAC * gpu.memory_gib,
    }
    row["limit"] = limit_of(row, config, num_engines, gpu)
    return row


def limit_of(row: dict[str, Any], config: Config, num_engines: int, gpu: Gpu) -> str:
    """The first limit: memory, idle engines, or the phase that takes the most time."""
    if not row["fits"]:
        return f"does not fit: {row['memory_gib']:.3g} GiB of memory in {gpu.memory_gib:g}"
    idle = num_engines - config.tasks_per_step
    if config.is_rl and idle > 0:
        return f"{idle} of {num_engines} engines have no group: more --tasks_per_step"
    seconds = row["seconds"]
    largest = max(seconds, key=seconds.get)
    return f"{largest}, {seconds[largest] / row['step_s']:.0%} of the step"


def estimates(numbers: list[int], gpu: Gpu, config: Config) -> list[dict[str, Any]]:
    """An estimate for each number of GPUs. Raises ValueError where the flags do not fit it."""
    from rl_core.plan.plan import make_plan

    if any(actor.ranks for actor in config.actors.values()):
        raise ValueError("--gpus does not know actors with separate ranks; leave out .ranks")
    if config.learner.dtype == "auto":  # Equal to the GPU's, not this machine's.
        config = replace(config, learner=replace(config.learner, dtype="bfloat16"))
    rows = []
    for number in numbers:
        with as_ranks(number):
            rows.append(estimate(make_plan(config, is_planned=True), gpu))
    least = next((row["step_s"] * row["gpus"] for row in rows if row["fits"]), None)
    for row in rows:
        used = row["step_s"] * row["gpus"]
        row["efficiency"] = least / used if row["fits"] else None
    return rows


ASSUMED = """\
assumed          {engine}{dtype}
figures          of data sheets, not measured: {tflops:g} TFLOP/s of which {compute:.0%} are reached, \
memory of {memory_gbs:g} GB/s ({memory:.0%}),
                 NVLink of {nvlink_gbs:g} and a network card of {network_gbs:g} GB/s for each GPU \
({link:.0%}); nodes of {node} GPUs; every episode as long as it may be
efficiency       against the first row that fits. A step is sampling, learning and sync, one after the other; with --rollout_ranks the two overlap
compute, traffic traffic is hidden behind compute; the longer one counts. plan: balancing all samples, on every rank's CPU"""
COLUMNS = ("prefill", "decode", "compute", "traffic", "sync", "plan")


def describe_estimates(rows: list[dict[str, Any]], gpu: Gpu) -> str:
    fracs = {"compute": COMPUTE_FRAC, "memory": MEMORY_FRAC, "link": LINK_FRAC, "node": NODE}
    engine = f"{rows[0]['engine']} engine, " if rows[0]["engine"] else ""
    text = ASSUMED.format(**asdict(gpu), **fracs, engine=engine, dtype=rows[0]["dtype"])
    names = "".join(f"{f'{name}, s':>11}" for name in (*COLUMNS, "step"))
    lines = [text, "", f"{'GPUs':>6}{names} {'efficiency':>11}{'GiB':>7}  what limits it"]
    for row in rows:
        seconds = [*(row["seconds"][name] for name in COLUMNS), row["step_s"]]
        shown = "".join(f"{value:>11.3g}" for value in seconds)
        efficiency = f"{row['efficiency']:.0%}" if row["fits"] else "-"
        facts_of = f"{efficiency:>12}{row['memory_gib']:>7.3g}  {row['limit']}"
        lines.append(f"{row['gpus']:>6}{shown}{facts_of}")
    return "\n".join(lines)
