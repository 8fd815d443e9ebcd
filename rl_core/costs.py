"""What a step costs before it runs: bytes held and sent, floating-point operations, and seconds where a device is known.

From the model's config, the mesh and the flags alone; no weight is read. docs/parallelism.md has the formulas, and how near
they came to what was measured on a CPU.

w bytes of a number in compute, L blocks, D hidden size, I of the MLP, Q and K widths of all heads of queries and of keys,
V vocabulary; T tokens and M trained tokens of a microbatch on one rank.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from rl_core.build import Plan, compute_dtype, has_reference
from rl_core.checks import check_config
from rl_core.config import ActorConfig, Config
from rl_core.data.packing import is_worth_sharing
from rl_core.distributed import Mesh, make_mesh
from rl_core.learning.algorithms import Algorithm
from rl_core.learning.logprobs import CPU_TILE_BYTES, KEPT_BYTES, SIDE_BYTES, TRITON_TILE_BYTES
from rl_core.learning.lora import adapter_size, linear_layers
from rl_core.learning.model import load_model_config

GIB = 2**30
ENGINE_ROWS = ("engine weights", "KV cache", "sampling")  # of the table of memory
PHASES = ("generate", "annotate", "update", "sync")
OPTIMIZER_BYTES = {"adamw": 8, "paged_adamw": 8, "adamw8bit": 2.03, "paged_adamw8bit": 2.03}  # a parameter
NF4_BYTES = 0.5625  # a weight: 4 bits, and a scale in fp32 for every 64
# Assumptions, not measurements: what the tables below are multiplied by.
USABLE = 0.9  # of a device's memory; the rest is CUDA's, NCCL's, and gaps between tensors
EFFICIENCY = 0.4  # of peak operations per second
BANDWIDTH_EFFICIENCY = 0.7  # of bytes per second


@dataclass(kw_only=True, slots=True, frozen=True)
class Device:
    """Figures of a public data sheet."""

    memory_gib: float
    bf16_flops: float  # a second, dense
    memory_bandwidth: float  # bytes a second
    link: float  # bytes a second that a GPU sends to others of its node
    network: float  # to other nodes
    per_node: int = 8


# NVIDIA's data sheets of H100 SXM, H200 SXM (NVLink 900 GB/s, both ways together) and of the DGX (400 Gb/s for each GPU).
DEVICES = {
    "H100": Device(memory_gib=80, bf16_flops=989e12, memory_bandwidth=3.35e12, link=450e9, network=50e9),
    "H200": Device(memory_gib=141, bf16_flops=989e12, memory_bandwidth=4.8e12, link=450e9, network=50e9),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """Counts of parameters, and widths."""

    layers: int
    hidden: int
    intermediate: int
    queries: int  # Q
    keys: int  # K
    heads: int
    vocabulary: int
    head_norms: bool  # of queries and keys, as Qwen3 has them
    linear: int  # in the matrices of one block
    adapters: int  # in all blocks; 0 trains the whole model
    blocks: int  # in all blocks
    root: int  # embedding, final norm, and the head if it is not tied to the embedding
    largest: int  # of one parameter

    @property
    def total(self) -> int:
        return self.blocks + self.root


def model_size(hf: PretrainedConfig, config: Config, is_scoring: bool = False) -> ModelSize:
    """Of the model that the config describes, made without memory; adapters are those of the policy."""
    with torch.device("meta"):
        model = (AutoModel if is_scoring else AutoModelForCausalLM).from_config(hf)
    lora, text = actor_of(config).lora, hf.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = [p.numel() for p in model.parameters()]
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    blocks = sum(p.numel() for p in layers.parameters())
    return ModelSize(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        queries=text.num_attention_heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_dim,
        heads=text.num_attention_heads,
        vocabulary=0 if is_scoring else text.vocab_size,
        head_norms=any(n.endswith("q_norm") for n, _ in layers[0].named_modules()),
        linear=sum(p.numel() for p in layers[0].parameters() if p.ndim > 1),
        adapters=adapter_size(lora, linear_layers(model)) if lora.rank and not is_scoring else 0,
        blocks=blocks,
        root=sum(sizes) - blocks + (text.hidden_size if is_scoring else 0),
        largest=max(sizes),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """Of one pass over the samples of a step, on all ranks together."""

    tokens: int  # that are computed; a prompt that a group shares counts once
    pairs: float  # how often a token sees one, itself included
    trained: int  # tokens whose logprobs are computed


def work_of(pieces: list[tuple[int, int]], trained: int) -> Work:
    """Of pieces (tokens, tokens before them that they see), causal."""
    return Work(
        tokens=sum(n for n, _ in pieces), pairs=sum(n * (n + 1) / 2 + n * m for n, m in pieces), trained=trained
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Setup:
    """All that costs depend on."""

    config: Config
    algorithm: Algorithm
    mesh: Mesh
    model: ModelSize
    critic: ModelSize | None
    asks_reference: bool
    frozen_bytes: int  # of a frozen weight beside adapters
    width: int  # w
    on_gpu: bool
    is_shared: bool = False  # several actors speak with its model, and one engine
    base_of: str = ""  # another actor, with whom the frozen weights and the engine are counted

    @property
    def shards(self) -> int:
        """Ranks over which FSDP splits one copy of a weight."""
        return self.mesh.dp_shard * self.mesh.cp

    @property
    def is_split(self) -> bool:
        return self.mesh.size > 1 or self.width != 4 or self.config.learner.offload == "always"

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a model of its own, not this one without its adapters."""
        return self.asks_reference and not self.model.adapters

    @property
    def copies_weights(self) -> bool:
        """Whether an engine has weights of its own."""
        if not self.algorithm.is_rl or self.base_of:
            return False
        in_4_bits = actor_of(self.config).lora.quantize != "none"
        return self.engine == "sglang" or self.is_split or (in_4_bits if self.is_shared else self.model.adapters > 0)

    @property
    def engine(self) -> str:
        """What samples: "embedded", "sglang", or "elsewhere": a server with memory of its own."""
        actor = actor_of(self.config)
        return "elsewhere" if actor.servers else self.config.engine

    @property
    def has_older(self) -> bool:
        """Whether a second engine speaks by older weights, which are its own."""
        is_trained = actor_of(self.config).is_trained
        return self.algorithm.is_rl and is_trained and self.config.rollout.lagged_frac > 0

    @property
    def annotations(self) -> int:
        """Forwards of the policy's size, without a backward, over the samples of a step."""
        repeated = self.algorithm.is_rl and self.config.learner.minibatches * self.config.learner.epochs > 1
        return int(repeated) + int(self.asks_reference)

    @property
    def phases(self) -> list[str]:
        skipped = set() if self.algorithm.is_rl else {"generate", "sync"}
        if not self.annotations and self.critic is None:
            skipped.add("annotate")
        return [phase for phase in PHASES if phase not in skipped]


def make_setup(
    config: Config,
    algorithm: Algorithm,
    num_ranks: int,
    hf: PretrainedConfig,
    critic: PretrainedConfig | None = None,
    reference: bool = False,
) -> Setup:
    on_gpu = bool(config.device_memory_gib) or torch.cuda.is_available()
    dtype = compute_dtype(config)
    if config.learner.dtype == "auto" and on_gpu:
        dtype = torch.bfloat16
    return Setup(
        config=config,
        algorithm=algorithm,
        mesh=make_mesh(num_ranks, config.dp_replicate, config.cp, config.tp),
        model=model_size(hf, config, algorithm.objective == "rm"),
        critic=model_size(critic or hf, config, is_scoring=True) if algorithm.has_critic else None,
        asks_reference=reference,
        frozen_bytes=2 if hf.dtype == dtype == torch.bfloat16 else 4,
        width=dtype.itemsize,
        on_gpu=on_gpu,
    )


def actor_of(config: Config) -> ActorConfig:
    """Whose learner it is about: the first that learns."""
    return config.actors[next(iter(config.trained or config.actors))]


def setup_of(plan: Plan, num_ranks: int, name: str) -> Setup:
    """Of the learner of one actor, or of a frozen one's engine."""
    base_of = plan.config.actors[name].share or ""
    config = replace(plan.config, actors={name: replace(plan.config.actors[name], share=None)})
    hf = load_model_config(actor_of(config).model)
    critic = load_model_config(config.critic.model) if config.critic.model else None
    s = make_setup(config, plan.algorithm, num_ranks, hf, critic, has_reference(plan))
    return replace(s, base_of=base_of, is_shared=bool(base_of) or name in plan.config.sharers)


def most_work(config: Config, algorithm: Algorithm) -> Work:
    """Of a step whose episodes are all as long as they may be."""
    n, longest = config.tasks_per_step, config.max_context_tokens
    if algorithm.objective == "rm":
        return work_of([(longest, 0)] * 2 * n, 2 * n)
    if not algorithm.is_rl:
        n *= 2 if algorithm.is_pairs else 1
        return work_of([(longest, 0)] * n, longest * n)
    prompt, group = config.max_prompt_tokens, config.group_size
    rest = longest - prompt
    if config.cp == 1 and is_worth_sharing(prompt, group, group * longest):
        return work_of([(prompt, 0)] * n + [(rest, prompt)] * n * group, rest * n * group)
    return work_of([(longest, 0)] * n * group, rest * n * group)


def num_microbatches(s: Setup, work: Work) -> int:
    """Of one rank in one pass over a step's samples."""
    parts, room = s.config.learner.minibatches, s.config.learner.microbatch_tokens * s.mesh.cp
    return parts * math.ceil(work.tokens / parts / room / s.mesh.dp)


def held_bytes(s: Setup, model: ModelSize) -> tuple[float, float, float]:
    """Of one rank: weights, gradients and optimizer state of a model that is trained, split over a copy's ranks."""
    parts, optim = s.shards * s.mesh.tp, s.config.optim
    trained, frozen = model.adapters or model.total, 0.0
    if model.adapters and not s.base_of:
        linear = model.layers * model.linear
        of_linear = NF4_BYTES if actor_of(s.config).lora.quantize == "nf4" else s.frozen_bytes
        frozen = of_linear * linear + s.frozen_bytes * (model.total - linear)
    moments = OPTIMIZER_BYTES.get(optim.name, 4 * (optim.beta1 > 0))  # SGD's momentum
    return (4 * trained + frozen) / parts, 4 * trained / parts, moments * trained / parts


def layer_bytes(s: Setup, model: ModelSize) -> float:
    """What one block keeps for its backward, a token. Norms keep their input in fp32, the normalised input if their weight
    is trained, and the output; attention its queries, keys, values, output and log-sum-exp; the MLP gate, activated gate,
    up and their product."""
    w, m = s.width, model
    normalised = 0 if m.adapters else w
    norms = 2 * (4 + normalised + w) * m.hidden
    of_heads = m.head_norms * ((4 + normalised) * (m.queries + m.keys) + 8 * m.heads)
    attention = 2 * w * (m.queries + m.keys) + 4 * m.heads
    return norms + (of_heads + attention + 4 * w * m.intermediate) / s.mesh.tp


def activation_bytes(s: Setup, model: ModelSize, tokens: int, trained: int) -> float:
    """What a forward keeps for its backward on one rank; with activation checkpointing the input of each block alone."""
    w = s.width
    a_layer = w * model.hidden if s.config.learner.activation_checkpointing else layer_bytes(s, model)
    final_norm, before_head = (4 + w) * model.hidden, w * model.hidden
    return tokens * (model.layers * a_layer + final_norm) + trained * before_head + kept_logits(s, model, trained)


def kept_logits(s: Setup, model: ModelSize, trained: int) -> float:
    """See keeps in fused_logprobs()."""
    size = 4 * trained * model.vocabulary / s.mesh.tp
    return size if not s.on_gpu and size <= KEPT_BYTES else 0


def logprob_bytes(s: Setup, model: ModelSize, trained: int) -> float:
    """Of tiles, and of the gradient of the head while it is summed."""
    words = model.vocabulary / s.mesh.tp
    tile = min(4 * trained * words, TRITON_TILE_BYTES if s.on_gpu else CPU_TILE_BYTES)
    sides = min(SIDE_BYTES, 4 * model.hidden * words)
    return 2 * tile + sides + 4 * words * model.hidden if words else 0


Table = dict[str, dict[str, float]]  # what -> phase -> bytes


def memory(s: Setup, work: Work) -> tuple[Table, Table]:
    """What one rank holds at the worst moment of each phase: on its device, and on the host. A CPU's device is the host."""
    device: Table = {}
    host: Table = {}
    learner, model, w, tp = s.config.learner, s.model, s.width, s.mesh.tp

    def hold(name: str, size: float, phases, on_host: bool = False) -> None:
        row = (host if on_host and s.on_gpu else device).setdefault(name, {})
        for phase in phases:
            if phase in s.phases and size:
                row[phase] = row.get(phase, 0) + size

    def hold_state(name: str, size: float) -> None:
        hold(name, size, PHASES[1:], on_host=learner.offload == "always")
        hold(name, size, PHASES[:1], on_host=learner.offload != "none")

    weights, gradients, moments = held_bytes(s, model)
    hold_state("weights", weights)
    is_paged = s.config.optim.name.startswith("paged")
    hold("optimizer", moments, PHASES, True) if is_paged else hold_state("optimizer", moments)
    if s.critic is not None:
        critic_weights, critic_gradients, critic_moments = held_bytes(s, s.critic)
        hold_state("critic, its optimizer", critic_weights + critic_moments)
        gradients = max(gradients, critic_gradients)  # one learns after the other
    hold("gradients", gradients, ["update"], on_host=learner.offload == "always")
    if s.has_reference:
        size = 4 * model.total / s.shards / tp
        hold("reference", size, PHASES, on_host=True)
        hold("reference", size, ["annotate"] if s.on_gpu else [])

    of_one = s.config.max_context_tokens * (2 if s.algorithm.is_pairs else 1)
    tokens = max(of_one, math.ceil(work.tokens / s.mesh.dp))
    tokens = min(learner.microbatch_tokens, math.ceil(tokens / s.mesh.cp))
    trained = math.ceil(tokens * work.trained / work.tokens)
    block = model.blocks / model.layers / tp
    one_layer = tokens * layer_bytes(s, model)
    if s.is_split:
        hold("gathered weights", w * (model.root / tp + 2 * block), ["annotate", "update"])
    hold("activations", one_layer, ["annotate"])
    hold("logprobs", logprob_bytes(s, model, trained) - 4 * model.vocabulary / tp * model.hidden, ["annotate"])
    kept, logprobs = activation_bytes(s, model, tokens, trained), logprob_bytes(s, model, trained)
    if learner.activation_offload:
        hold("activations", kept, ["update"], on_host=True)
        kept = one_layer if s.on_gpu else 0
    elif learner.activation_checkpointing:
        kept += one_layer  # one block at a time
    # A backward begins with all activations and ends with none, but with the gradients of embedding and head.
    first = {"activations": kept, "logprobs": logprobs, "unreduced gradients": (w + 4) * block * s.is_split}
    last = {"unreduced gradients": (w + 4) * model.root / tp * s.is_split * (not model.adapters)}
    for name, size in max(first, last, key=lambda moment: sum(moment.values())).items():
        hold(name, size, ["update"])

    if s.algorithm.is_rl:
        if s.engine == "sglang":
            size = w * model.total * (1 + s.has_older) / s.config.engine_tp
            hold("engine weights", size, ["generate", "sync"])
            hold("engine weights", size, PHASES if s.on_gpu else [], on_host=True)
        elif s.engine == "embedded":
            hold("engine weights", w * model.total * (s.copies_weights + s.has_older), PHASES)
        if s.copies_weights:
            hold("a whole weight", 4 * model.largest * (3 if model.adapters else 1) * (not s.is_shared), ["sync"])
        for name, size in engine_cache_bytes(s).items():
            hold(name, size * (not s.base_of and s.engine != "elsewhere"), ["generate"])
    return device, host


def engine_cache_bytes(s: Setup) -> dict[str, float]:
    slots, model = engine_slots(s), s.model
    cache = slots * (s.config.max_context_tokens + 1) * 2 * model.layers * model.keys * s.width
    return {"KV cache": cache * (1 + s.has_older), "sampling": 4 * 4 * slots * model.vocabulary}


def peak(table: Table, phases: list[str]) -> tuple[float, str]:
    """(bytes, phase) of the phase that holds most."""
    return max((sum(row.get(phase, 0) for row in table.values()), phase) for phase in phases)


def forward_flops(model: ModelSize, work: Work) -> dict[str, float]:
    """Of a forward without what adapters add."""
    return {
        "matrices": 2 * model.layers * model.linear * work.tokens,
        "attention": 4 * model.layers * model.queries * work.pairs,
        "head": 2 * model.vocabulary * model.hidden * work.trained,
    }


def update_flops(s: Setup, model: ModelSize, work: Work, kept_tokens: int) -> dict[str, float]:
    """Of forward and backward over a step's samples. A matrix has two products in the backward, one if it is frozen;
    attention five for two, since it keeps no scores; the head's logits are computed again, unless a CPU kept those of a
    microbatch of kept_tokens trained ones. A block that is recomputed ends before its last matrix, whose result nobody needs."""
    found = forward_flops(model, work)
    recomputed = s.config.learner.activation_checkpointing
    last_matrix = 2 * model.layers * model.hidden * model.intermediate * work.tokens
    matrices = 3 * found["matrices"]
    if model.adapters:  # nothing asks for a gradient of the first block's input
        first = 2 * model.hidden * (model.queries + 2 * model.keys) * work.tokens
        matrices = 2 * found["matrices"] - first + 6 * model.adapters * work.tokens
    again = (found["matrices"] - last_matrix + 2 * model.adapters * work.tokens) if recomputed else 0
    products = (3 if model.adapters else 4) - bool(kept_logits(s, model, kept_tokens))
    return {
        "matrices": matrices + again,
        "attention": found["attention"] * (4.5 if recomputed else 3.5),
        "head": found["head"] * products,
    }


def learn_flops(s: Setup, work: Work) -> dict[str, float]:
    """Of all ranks in a step's learning, by part."""
    micro = math.ceil(work.trained / s.mesh.dp / s.mesh.cp / max(1, num_microbatches(s, work)))
    parts = [(s.config.learner.epochs, update_flops(s, s.model, work, micro))]
    parts += [(s.annotations, forward_flops(s.model, work))]
    if s.critic is not None:
        parts += [(1, forward_flops(s.critic, work))]
        parts += [(s.config.learner.epochs, update_flops(s, s.critic, work, micro))]
    return {name: sum(times * part[name] for times, part in parts) for name in parts[0][1]}


def generate_flops(s: Setup) -> dict[str, float]:
    """Of all ranks in a step's episodes, all as long as they may be; a group's prompt is computed once."""
    config = s.config
    prompt, group, n = config.max_prompt_tokens, config.group_size, config.tasks_per_step
    rest = config.max_context_tokens - prompt
    work = work_of([(prompt, 0)] * n + [(rest, prompt)] * n * group, config.max_tokens * config.turn_limit * n * group)
    return forward_flops(s.model, work)


def sent_bytes(s: Setup, work: Work) -> dict[str, float]:
    """Of one rank in a step, by what for. A ring's gather or scatter of n bytes over k ranks sends n (k - 1) / k, its
    sum twice that."""
    mesh, config, w = s.mesh, s.config, s.width
    count, epochs = num_microbatches(s, work), config.learner.epochs
    found = dict.fromkeys(
        ("gather weights", "reduce gradients", "sum over copies", "ring", "tensor parallel", "sync"), 0.0
    )
    forwards = {id(s.model): s.annotations, id(s.critic): 1}
    tokens, trained = work.tokens / mesh.dp / mesh.cp, work.trained / mesh.dp / mesh.cp
    recomputed = config.learner.activation_checkpointing
    for model in filter(None, (s.model, s.critic)):
        only_forward, learned = forwards[id(model)], 4 * (model.adapters or model.total) / mesh.tp
        # A backward gathers blocks again; embedding and head stay from a forward on until the next backward ends.
        blocks, is_apart = model.blocks + model.adapters, s.has_reference and model is s.model
        gathers = count * ((2 * epochs + only_forward) * blocks + epochs * model.root) + is_apart * model.root
        found["gather weights"] += scattered(w * gathers / mesh.tp, s.shards)
        found["reduce gradients"] += scattered(count * epochs * learned, s.shards)
        found["sum over copies"] += 2 * scattered(count * epochs * learned / s.shards, mesh.dp_replicate)
        # Keys and values go round with every forward; with the backward their gradients too, in fp32, one step farther.
        kv, cp = 2 * model.keys / mesh.tp * model.layers * tokens, mesh.cp
        steps = (only_forward + epochs * (2 + recomputed)) * (cp - 1) * w + epochs * cp * 4
        found["ring"] += (steps * kv + 8 * (cp - 1) * trained * (only_forward + epochs)) * (cp > 1)
        # Two sums a block in the forward, two in the backward, one again if it is recomputed; one of the embedding; of
        # logprobs four numbers a token and, backward, the hidden state.
        sums = model.layers * (2 * only_forward + epochs * (4 + recomputed)) + only_forward + epochs
        of_head = trained * (16 * (only_forward + epochs) + w * model.hidden * epochs) if model.vocabulary else 0
        found["tensor parallel"] += 2 * scattered(w * model.hidden * tokens * sums + of_head, mesh.tp)
    if s.copies_weights or (s.is_shared and s.is_split):
        whole = 4 * s.model.total if not s.model.adapters else 4 * s.model.adapters
        whole += s.frozen_bytes * s.model.total if s.model.adapters and not s.is_shared else 0
        found["sync"] = scattered(whole, s.shards * mesh.tp)
    return {name: size for name, size in found.items() if size}


def scattered(size: float, num: int) -> float:
    return size * (num - 1) / num


def seconds(s: Setup, work: Work, device: Device) -> dict[str, float]:
    """Of each phase at the assumed efficiencies. Gathers, scatters and the ring go on beside the products, sums of tensor
    parallelism do not. Decoding reads all weights and the cache at every token; what launching kernels costs is not in it."""
    sent, per_rank, mesh = sent_bytes(s, work), 1 / s.mesh.size, s.mesh
    rate, speed = EFFICIENCY * device.bf16_flops, BANDWIDTH_EFFICIENCY

    def over(name: str, extent: int) -> float:
        return sent.get(name, 0) / speed / (device.link if extent <= device.per_node else device.network)

    copy_extent = s.shards * mesh.tp
    beside = (
        over("gather weights", copy_extent) + over("reduce gradients", copy_extent) + over("sum over copies", mesh.size)
    )
    beside += over("ring", mesh.cp * mesh.tp)
    products = sum(learn_flops(s, work).values()) * per_rank / rate
    found = {"learn": max(products, beside) + over("tensor parallel", mesh.tp)}
    if s.algorithm.is_rl:
        config, m = s.config, s.model
        episodes = math.ceil(config.tasks_per_step * config.group_size * per_rank)
        slots = engine_slots(s)
        steps = math.ceil(episodes / slots) * config.max_tokens * config.turn_limit
        mean_length = config.max_prompt_tokens + (config.max_context_tokens - config.max_prompt_tokens) / 2
        read = s.width * (m.total + slots * mean_length * 2 * m.layers * m.keys)
        decode = steps * read / speed / device.memory_bandwidth
        found["generate"] = max(decode, sum(generate_flops(s).values()) * per_rank / rate)
        found["sync"] = over("sync", copy_extent)
    return found


def engines_bytes(plan: Plan, num_ranks: int) -> dict[str, float]:
    """What each local actor's engine holds on a rank while it samples: weights, keys and values, logits. An engine that
    reads its learner's weights in place holds none of its own, but older ones."""
    found = {}
    for name in plan.chats:
        actor = plan.config.actors[name]
        if actor.share or actor.servers:
            continue
        s = setup_of(plan, num_ranks, name)
        num_copies = int(s.copies_weights or not actor.is_trained) + s.has_older
        held = num_copies * s.width * s.model.total
        found[name] = held / plan.config.engine_tp + sum(engine_cache_bytes(s).values())
    return found


def memory_fracs(plan: Plan, num_ranks: int) -> dict[str, float]:
    """Of each SGLang engine: the part of a GPU's memory that it takes. One that is awake alone has --engine_memory_frac, those
    that are awake together divide it by what they need; an actor's older weights have as much as its newest. Raises ValueError
    if one has no room for its weights."""
    config = plan.config
    needs = engines_bytes(plan, num_ranks) if config.engine == "sglang" and plan.algorithm.is_rl else {}
    of_all = sum(needs.values())
    found = {}
    for name, need in needs.items():
        s = setup_of(plan, num_ranks, name)
        found[name] = frac = config.engine_memory_frac * (1 if plan.takes_turns else need / of_all) / (1 + s.has_older)
        if not config.device_memory_gib and not torch.cuda.is_available():
            continue
        room, weights = frac * limit_bytes(config, num_ranks) / GIB, s.width * s.model.total / config.engine_tp / GIB
        if weights > USABLE * room:
            rest = ", or one engine awake at a time (--rollout.engines_awake one)" if len(needs) > 1 else ""
            raise ValueError(
                f"the engine of {name} has {room:.3g} GiB by --engine_memory_frac={config.engine_memory_frac}, and its weights "
                f"alone take {weights:.3g}; raise it, or --engine_tp={config.engine_tp}{rest if not plan.takes_turns else ''}"
            )
    return found


def takes_turns(plan: Plan, num_ranks: int) -> bool:
    """Whether one engine is awake at a time: as --rollout.engines_awake says, or if there are several that a GPU has no
    room for beside what learners keep there."""
    asked, config = plan.config.rollout.engines_awake, plan.config
    engines = {config.actors[name].share or name for name in plan.chats if not config.actors[name].servers}
    if len(engines) < 2 or not plan.algorithm.is_rl or asked == "all":
        return False
    if asked == "one":
        return True
    on_gpu = bool(config.device_memory_gib) or torch.cuda.is_available()
    return on_gpu and awake_bytes(plan, num_ranks) > USABLE * limit_bytes(config, num_ranks)


def awake_bytes(plan: Plan, num_ranks: int) -> float:
    """Of a rank's device while all engines sample."""
    kept = 0.0  # by learners
    for name in plan.config.trained:
        s = setup_of(plan, num_ranks, name)
        table = memory(s, most_work(s.config, s.algorithm))[0]
        kept += sum(row.get("generate", 0) for what, row in table.items() if what not in ENGINE_ROWS)
    return kept + sum(engines_bytes(plan, num_ranks).values())


def device_of(config: Config) -> tuple[str, Device] | None:
    """The GPU here, or one with the memory that is planned for, if its figures are known."""
    if config.device_memory_gib:
        near = (d for d in DEVICES.items() if abs(d[1].memory_gib / config.device_memory_gib - 1) < 0.05)
        return next(near, None)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((d for d in DEVICES.items() if d[0] in name), None)


def limit_bytes(config: Config, num_ranks: int) -> float:
    """Memory of one rank's device: as planned for, or the GPU's own, or this host's over its ranks."""
    if config.device_memory_gib:
        return config.device_memory_gib * GIB
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / here


def fit_warning(s: Setup) -> str | None:
    """What is too large and which flags make it fit, found by computing the plan anew with them; None if it fits."""
    limit = limit_bytes(s.config, s.mesh.size)
    need, phase = peak_of(s)
    if need <= USABLE * limit:
        return None
    table = memory(s, most_work(s.config, s.algorithm))[0]
    largest = max(table, key=lambda name: table[name].get(phase, 0))
    found = fitting(s, USABLE * limit)
    advice = (
        f"it fits with {found[0]} ({found[1] / GIB:.3g} GiB)" if found else "no flag that is tried here makes it fit"
    )
    return (
        f"this plan will not fit: {phase} needs {need / GIB:.3g} GiB on a rank ({largest}: {table[largest][phase] / GIB:.3g}), "
        f"and {USABLE:.0%} of {limit / GIB:.3g} GiB is there; {advice}"
    )


def peak_of(s: Setup) -> tuple[float, str]:
    return peak(memory(s, most_work(s.config, s.algorithm))[0], s.phases)


def fitting(s: Setup, room: float) -> tuple[str, float] | None:
    """(flags, bytes needed) of what fits, on as few times more ranks as will do."""
    for factor in (1, 2, 4, 8, 16, 32, 64, 128):
        more = replace(s, mesh=replace(s.mesh, dp_shard=s.mesh.dp_shard * factor))
        flags = fitting_flags(more, room)
        if flags is not None:
            words = [spelled(flags), f"{more.mesh.size} ranks" if factor > 1 else ""]
            return " on ".join(filter(None, words)), peak_of(changed(more, flags))[0]
    return None


def fitting_flags(s: Setup, room: float) -> dict | None:
    """Nothing if that fits; the first change that alone is enough; else changes one upon the other, each of
    which lowers the peak, without those that turn out not to be needed; None if these are not enough."""

    def need(flags: dict) -> float:
        other = changed(s, flags)
        return peak_of(other)[0] if other else math.inf

    for flags in ({}, *changes(s)):
        if need(flags) <= room:
            return flags
    chosen: dict = {}
    while (now := need(chosen)) > room:
        options = (chosen | flags for flags in changes(changed(s, chosen)))
        better = next((flags for flags in options if need(flags) < 0.99 * now), None)
        if better is None:
            return None
        chosen = better
    for name in list(chosen):
        fewer = {other: value for other, value in chosen.items() if other != name}
        chosen = fewer if need(fewer) <= room else chosen
    return chosen


def engine_slots(s: Setup) -> int:
    """Requests that a rank's engine holds keys and values of."""
    groups = math.ceil(s.config.tasks_per_step / s.mesh.size)
    return min(s.config.rollout.max_concurrent, groups * s.config.group_size)


def changes(s: Setup) -> Iterator[dict]:
    """Flags and values that may lower the peak, what changes least first."""
    config, learner = s.config, s.config.learner
    longest = config.max_context_tokens * (2 if s.algorithm.is_pairs else 1)
    if not learner.activation_checkpointing and not learner.activation_offload:
        yield {"learner.activation_checkpointing": True}
    smaller, least = learner.microbatch_tokens, math.ceil(longest / config.cp)
    while smaller > least:
        smaller = max(least, smaller // 2)
        yield {"learner.microbatch_tokens": smaller}
    slots = engine_slots(s)
    while s.algorithm.is_rl and slots > 8:
        slots = max(8, slots // 2)
        yield {"rollout.max_concurrent": slots}
    if config.dp_replicate > 1:
        yield {"dp_replicate": 1}
    if config.optim.name == "adamw":
        yield {"optim.name": "adamw8bit"}
    for cp in (2, 4, 8, 16, 32):
        if cp > config.cp and (tokens := math.ceil(longest / cp)) < learner.microbatch_tokens:
            yield {"cp": cp, "learner.microbatch_tokens": tokens}
    if learner.offload == "none":
        yield {"learner.offload": "phase"}
    if learner.offload != "always":
        yield {"learner.offload": "always"}


def changed(s: Setup, flags: dict) -> Setup | None:
    """The setup with these flags; None if they contradict others or the ranks."""
    config = s.config
    for name, value in flags.items():
        section, _, last = name.rpartition(".")
        if section:
            value = replace(getattr(config, section), **{last: value})
        config = replace(config, **{section or last: value})
    try:
        check_config(config)
        mesh = make_mesh(s.mesh.size, config.dp_replicate, config.cp, config.tp)
    except ValueError:
        return None
    return replace(s, config=config, mesh=mesh)


def spelled(flags: dict) -> str:
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())


def describe(plan: Plan, num_ranks: int) -> str:
    """What --dry_run prints of each actor that learns."""
    parts = [describe_learner(plan, num_ranks, name) for name in plan.config.trained]
    if len(plan.config.actors) == 1:
        return parts[0]
    titled = [f"== {name}\n{part}" for name, part in zip(plan.config.trained, parts, strict=True)]
    engines = ", ".join(f"{name} {size / GIB:.3g}" for name, size in engines_bytes(plan, num_ranks).items())
    how = "one at a time" if plan.takes_turns else "all at once"
    last = f"engines awake          {how}; GiB on one rank: {engines}" if plan.algorithm.is_rl else ""
    return "\n\n".join(filter(None, [*titled, last]))


def describe_learner(plan: Plan, num_ranks: int, name: str) -> str:
    """The plan, and for a step memory, operations, bytes sent and, of known devices, seconds."""
    s = setup_of(plan, num_ranks, name)
    config = s.config
    work = most_work(config, plan.algorithm)
    kind, episodes = "rows", config.tasks_per_step
    if plan.algorithm.is_rl:
        kind, episodes = "episodes", config.tasks_per_step * config.group_size
    elif plan.algorithm.is_pairs:
        kind, episodes = "replies", 2 * config.tasks_per_step
    model = f"{actor_of(config).model}, {s.model.total / 1e6:.2f} M parameters"
    model += f", of adapters {s.model.adapters / 1e6:.2f} M" if s.model.adapters else ""
    model += f"; all else of it, and its engine, counts with {s.base_of}" if s.base_of else ""
    rows = {
        "algorithm": f"{config.algorithm} {plan.algorithm}",
        "model": model,
        "data": f"{len(plan.train)} rows to train on"
        + (f", {sum(map(len, plan.eval.values()))} held out" if plan.eval else ""),
        "ranks": f"{num_ranks}, mesh " + " x ".join(f"{k} {v}" for k, v in dataclasses.asdict(s.mesh).items()),
        "tokens per step": f"at most {episodes * config.max_context_tokens}: {episodes} {kind} of at most "
        f"{config.max_context_tokens} tokens and {config.turn_limit} turns, in {num_microbatches(s, work)} microbatches of "
        f"{config.learner.microbatch_tokens} on each rank",
        "updates": f"{config.num_steps} steps, {config.learner.minibatches} minibatches, {config.learner.epochs} epochs",
    }
    lines = [f"{name:<20} {text}" for name, text in rows.items()]
    device, host = memory(s, work)
    lines += ["", *table_lines("GiB on one rank", device, s.phases)]
    if host:
        lines += ["", *table_lines("GiB on its host", host, s.phases)]
    lines += [
        "",
        f"{'of a step, at most':<22} " + " ".join(f"{n:>10}" for n in ("matrices", "attention", "head", "sum")),
    ]
    flops = {"generate": generate_flops(s)} if plan.algorithm.is_rl else {}
    for phase, parts in (flops | {"learn": learn_flops(s, work)}).items():
        cells = [*parts.values(), sum(parts.values())]
        lines.append(f"{'TFLOP to ' + phase:<22} " + " ".join(f"{x / 1e12:>10.3g}" for x in cells))
    if sent := sent_bytes(s, work):
        lines.append("GiB sent by a rank     " + ", ".join(f"{name} {size / GIB:.3g}" for name, size in sent.items()))
    if (known := device_of(config)) and s.width == 2:
        times = ", ".join(f"{phase} {t:.3g}" for phase, t in seconds(s, work, known[1]).items())
        lines.append(f"seconds, predicted     {times}: {known[0]} data sheet, {EFFICIENCY:.0%} of its operations and "
                     f"{BANDWIDTH_EFFICIENCY:.0%} of its bandwidths assumed")  # fmt: skip
    if warning := fit_warning(s):
        lines += ["", f"warning: {warning}"]
    return "\n".join(lines)


def table_lines(title: str, table: Table, phases: list[str]) -> list[str]:
    lines = [f"{title:<22} " + " ".join(f"{phase:>10}" for phase in phases)]
    total = {phase: sum(row.get(phase, 0) for row in table.values()) for phase in phases}
    for name, row in [*table.items(), ("sum", total)]:
        if any(row.values()):
            cells = [f"{row[p] / GIB:>10.3g}" if row.get(p) else f"{'-':>10}" for p in phases]
            lines.append(f"{name:<22} " + " ".join(cells))
    return lines
