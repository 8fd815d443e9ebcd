"""Every flag: its default and its help line. One dataclass a section. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


def flag(default: Any, help: str) -> Any:
    """A dataclass field with its help line; a dataclass type as default makes a section."""
    factory = default if isinstance(default, type) else None
    return (
        field(default_factory=factory, metadata={"help": help})
        if factory
        else field(default=default, metadata={"help": help})
    )


@dataclass(kw_only=True)
class LoraConfig:
    rank: int = flag(0, "train adapters of this rank beside a frozen model; 0 trains the whole model")
    alpha: float = flag(32.0, "the adapter's product is scaled by alpha / rank")
    targets: str = flag("all-linear", "modules with an adapter, by the last part of their name: q_proj,v_proj")
    quantize: Literal["none", "nf4"] = flag("none", "of the frozen model: nf4 keeps it in 4 bits (QLoRA)")


@dataclass(kw_only=True)
class ActorConfig:
    model: str | None = flag(
        None, "folder or hub name of the model that this actor speaks with; with api, its name there"
    )
    train: bool | None = flag(None, "whether it learns; default: yes, unless it has an api. A frozen one only speaks")
    api: str | None = flag(
        None, "URL of an OpenAI-compatible endpoint, such as http://host:8000/v1, instead of a local model"
    )
    api_key_env: str = flag(
        "OPENAI_API_KEY", "environment variable that holds the endpoint's key; empty: it needs none"
    )
    api_concurrency: int = flag(64, "requests to the endpoint at once, from one rank")
    engine_urls: str | None = flag(
        None,
        "SGLang servers that run already, such as http://a:30000,http://b:30000, one for each rank that samples or for each "
        "few; default: this run's own engines",
    )
    engine_folder: str | None = flag(
        None, "where those servers find its new weights, by the same path; default: memory shared on this machine"
    )
    max_tokens: int | None = flag(None, "tokens that it may sample in one turn; default and most: --max_tokens")
    lr: float | None = flag(None, "peak learning rate; default: --optim.lr")
    share: str | None = flag(
        None,
        "name of an actor with adapters, whose model this one speaks with too: by an adapter of its own or, if frozen, by none",
    )
    chat_template: str | None = flag(None, "file with a Jinja chat template, instead of the tokenizer's own")
    lora: LoraConfig = flag(LoraConfig, "adapters")

    @property
    def servers(self) -> list[str]:
        """Addresses in engine_urls."""
        return [url.strip() for url in (self.engine_urls or "").split(",") if url.strip()]

    @property
    def is_trained(self) -> bool:
        return self.api is None if self.train is None else self.train


@dataclass(kw_only=True)
class EnvConfig:
    weight: float = flag(
        1.0, "share of a step's tasks, beside the other environments' weights; 0: it is only evaluated"
    )
    train: str | None = flag(None, "its training rows; default: its load_tasks")
    eval: str | None = flag(None, "its held-out rows; default: its load_tasks")
    max_tokens: int | None = flag(
        None, "tokens that an actor may sample in one turn here; default and most: --max_tokens"
    )
    max_turns: int | None = flag(None, "turns of an episode here; default: the file's max_turns, or 1, or 8")


@dataclass(kw_only=True)
class DataConfig:
    train: str | None = flag(
        None,
        "training rows: .json .jsonl .csv .parquet .arrow (.gz too) or a `datasets` name; sft: a run's rollouts/ folder too",
    )
    eval: str | None = flag(None, "held-out rows, same formats")
    shuffle: bool = flag(True, "a fresh order each epoch, drawn from the seed; false keeps the file's order")
    skip_long: bool = flag(False, "leave out rows that are longer than the limits instead of refusing the file")
    min_reward: float | None = flag(None, "sft from a run's rollouts: only episodes with at least this reward")
    actor: str | None = flag(
        None, "sft from a run's rollouts: only what this actor saw and said; needed if several spoke"
    )


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = flag(1.0, "of training samples; the learner's logprobs are at the same temperature")
    stop: list[str] = flag(list, "strings that end a turn; they stay in the text")


@dataclass(kw_only=True)
class OptimConfig:
    name: Literal["adamw", "adamw8bit", "sgd"] = flag(
        "adamw",
        "adamw8bit: bitsandbytes' AdamW, a quarter of the state's memory",
    )
    lr: float = flag(1e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = flag(
        "constant", "of the learning rate after the warm-up"
    )
    warmup_steps: int = flag(0, "steps over which the learning rate rises linearly from 0")
    decay_frac: float = flag(0.2, "of wsd: part of the run, at its end, over which the learning rate falls")
    min_lr_frac: float = flag(0.0, "where linear, cosine and wsd end, as a fraction of the peak")
    beta1: float = flag(0.9, "of AdamW: decay of the gradient's running mean; of SGD: momentum")
    beta2: float = flag(0.95, "of AdamW: decay of the squared gradient's running mean")
    eps: float = flag(1e-8, "of AdamW")
    weight_decay: float = flag(0.0, "on matrices only")
    max_grad_norm: float = flag(1.0, "the gradient is clipped to this 2-norm; 0 is off")


@dataclass(kw_only=True)
class AlgoConfig:
    """Parts of the algorithm. None keeps what the preset of --algorithm says."""

    advantage: Literal["group_mean", "group_norm", "group_norm_unbiased", "rloo", "gae", "none", "custom"] | None = (
        flag(
            None,
            "of rewards over their group: R - mean, or that over the standard deviation (of the population, or unbiased), or "
            "R - mean of the others; gae: over what a critic expects; none: R; custom: the environment's advantage_fn",
        )
    )
    normalize: Literal["none", "batch", "env"] | None = flag(
        None, "of advantages over a step: batch: (A - mean) / deviation; env: each environment's A / its deviation"
    )
    ratio: Literal["token", "sequence"] | None = flag(None, "new over old probability of a token, or sequence (GSPO)")
    objective: Literal["clip", "cispo"] | None = flag(None, "PPO's clipped ratio, or CISPO's weight on the logprob")
    clip_low: float | None = flag(None, "the ratio is clipped below 1 - clip_low; 1 is no bound")
    clip_high: float | None = flag(None, "the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = flag(None, "largest ratio that counts where the advantage is negative, above 1; 0 is off")
    aggregation: Literal["token", "sequence", "constant"] | None = flag(
        None, "mean over all tokens, mean of the sequences' means, or sum over sequences * largest length (Dr. GRPO)"
    )
    kl: Literal["k1", "k2", "k3"] | None = flag(None, "estimator of the KL to the reference, the model at the start")
    kl_in: Literal["reward", "loss", "advantage"] | None = flag(
        None, "where the KL goes: each token's reward (the sum to the end counts), the loss, or its own advantage"
    )
    kl_coef: float | None = flag(None, "weight of the KL to the reference model; 0 is off, and no reference is loaded")
    entropy_coef: float | None = flag(None, "weight of the entropy bonus, per token in nats; 0 is off")
    correction: Literal["none", "tis", "mask", "sequence_mask"] | None = flag(
        None, "of tokens that the engine sampled with c = learner's over engine's probability: weight min(c, high); c, or "
        "0 outside low..high (IcePop); 0 for sequences whose mean c is outside"
    )  # fmt: skip
    correction_low: float | None = flag(None, "lower bound of the correction; default 0.5")
    correction_high: float | None = flag(None, "upper bound of the correction; default 2")
    overlong: Literal["none", "mask", "soft"] | None = flag(
        None,
        "truncated episodes: as others, not trained on, or a penalty that grows over the last overlong_buffer tokens",
    )
    overlong_buffer: int | None = flag(None, "tokens before --max_tokens where the soft penalty begins; 0 is a fifth")
    refill_rounds: int | None = flag(
        None, "groups whose rewards are all equal are replaced by further tasks, in at most so many rounds; 0 is off"
    )
    turn_discount: float | None = flag(
        None,
        "each turn has its own advantage: of the rewards from it on, one further turn counting so much less, over all turns of "
        "the group; default: all turns have that of the episode",
    )
    target_kl: float | None = flag(
        None, "a step's other updates are left out once the KL to its start is more; 0 is off"
    )


@dataclass(kw_only=True)
class CriticConfig:
    model: str | None = flag(None, "folder or hub name that it starts from, a reward model too; default: the actor's")
    lr: float = flag(1e-5, "its peak learning rate; other settings of its optimizer are those of --optim")
    warmup_steps: int = flag(0, "steps in which the critic learns and the actor does not, after which both do")
    value_clip: float = flag(
        0.2, "a value's loss is at least that of one no farther than this from the step's start; 0 is off"
    )
    gamma: float = flag(1.0, "discount of a reward per token")
    gae_lambda: float = flag(0.95, "0 trusts the critic at the next token, 1 only rewards")


@dataclass(kw_only=True)
class PreferenceConfig:
    beta: float = flag(0.1, "dpo: how firmly the reference is held to; rewards are beta times log-ratios")
    loss: Literal["sigmoid", "ipo", "hinge"] = flag("sigmoid", "dpo: of a pair's reward margin")
    label_smoothing: float = flag(
        0.0, "dpo, sigmoid: the fraction of pairs that are believed to be the wrong way round"
    )
    reference_free: bool = flag(False, "dpo: log-ratios to a uniform reference; no reference model is held")
    length_normalized: bool = flag(False, "dpo: a reply's log-ratio is the mean over its tokens, not the sum")


@dataclass(kw_only=True)
class SftConfig:
    action_weight: float = flag(1.0, "of the loss of each token that an assistant says")
    observation_weight: float = flag(0.0, "of each token that an assistant is answered (world model)")


@dataclass(kw_only=True)
class LearnerConfig:
    minibatches: int = flag(1, "optimizer steps per batch of rollouts; each takes its share of the tasks")
    epochs: int = flag(1, "passes over a batch of rollouts")
    microbatch_tokens: int = flag(
        8192,
        "tokens of one forward and backward on one rank; memory grows with it. Together --cp ranks hold cp times as many",
    )
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    activation_offload: bool = flag(False, "keep activations on the host until the backward pass needs them")
    compile: bool = flag(False, "compile each block's MLP and norms with torch.compile, at the first step")
    offload: Literal["none", "phase", "always"] = flag(
        "none",
        "phase: weights, gradients and optimizer state wait on the host while engines sample; always: they stay there, the "
        "optimizer steps there, and each block's weights come to the device to compute",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of compute: auto is bfloat16 on a GPU, else float32; weights that are trained are kept in float32"
    )


@dataclass(kw_only=True)
class RolloutConfig:
    max_concurrent: int = flag(256, "episodes in flight, and slots of the embedded engine, on one rank")
    hook_timeout_s: float = flag(60.0, "seconds that one call of a hook may take")
    episode_timeout_s: float = flag(600.0, "seconds that one episode may take")
    engines_awake: Literal["auto", "all", "one"] = flag(
        "auto",
        "of several actors' engines on a device: all, or one while the others sleep; auto: one of SGLang's, else all",
    )
    max_failed_fraction: float = flag(0.1, "the run stops when more of a step's episodes than this fail")
    save: bool = flag(True, "write every trajectory to rollouts/")
    lagged_frac: float = flag(
        0.0,
        "part of the training turns that actors which learn speak by older weights, drawn for each turn alone; above 0 there is "
        "a second engine, with its own copy",
    )
    lagged_every: int = flag(4, "steps after which the older weights of lagged_frac become the newest")


@dataclass(kw_only=True)
class EvalConfig:
    num_tasks: int = flag(0, "tasks of the held-out data that are evaluated; 0 is all of them")
    samples: int = flag(4, "k of avg@k and pass@k; 0 evaluates greedily alone")
    temperature: float = flag(1.0, "of the k samples")
    top_p: float = flag(1.0, "nucleus truncation of the k samples, 1 is off; training samples are never truncated")
    top_k: int = flag(0, "top-k truncation of the k samples, 0 is off")
    min_p: float = flag(0.0, "min-p truncation of the k samples, 0 is off")
    pass_reward: float = flag(1.0, "an episode passes with at least this reward")


@dataclass(kw_only=True)
class Config:
    algorithm: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "sft", "dpo", "rm"
    ] = flag("grpo", "preset; --algo.* changes single parts of it")
    model: str | None = flag(None, "short for --actors.policy.model")
    env_path: str | None = flag(
        None, "Python file with reward_fn and, if wanted, interact and other hooks; several with commas between them"
    )
    out: str | None = flag(None, "folder of the run; must not exist yet, unless --resume")
    tasks_per_step: int = flag(16, "tasks (sft, dpo, rm: rows) of one step")
    group_size: int = flag(8, "episodes of each task")
    num_steps: int = flag(100, "steps of the whole run")
    max_tokens: int = flag(256, "tokens that an actor may sample in one turn")
    max_prompt_tokens: int = flag(512, "tokens of the first prompt; a longer one is refused at start-up")
    max_turns: int | None = flag(None, "turns of an episode; default: the environment's max_turns, or 1, or 8")
    eval_every: int = flag(0, "evaluate before the first step, every so many steps and at the end; 0 is never")
    save_every: int = flag(0, "checkpoint every so many steps; 0 is only at the end")
    keep_checkpoints: int = flag(2, "older checkpoints are deleted; 0 keeps all")
    seed: int = flag(0, "of everything that is drawn")
    resume: bool = flag(False, "go on from the newest checkpoint in --out; starts afresh where there is none")
    engine: Literal["auto", "sglang", "embedded"] = flag(
        "auto",
        "what samples: sglang in a process of its own; embedded in this one, on any device; auto: sglang where it is installed "
        "and there is a GPU",
    )
    engine_tp: int = flag(1, "sglang: ranks whose devices hold one engine together, a part of its matrices each")
    engine_memory_frac: float = flag(
        0.6, "sglang: part of a GPU's free memory for weights, keys and values of all engines awake together"
    )
    max_staleness: int = flag(
        0,
        "versions by which the weights trained on may be ahead of those that sampled a token; above 0 generation goes on "
        "where a step has enough groups, and the others are finished in later steps",
    )
    engine_ranks: int = flag(
        0, "of torchrun's ranks, the last so many only sample, while the others learn; 0: all do both"
    )
    liger: bool = flag(False, "Liger's kernels for norms, gated MLPs and rotary positions; needs a GPU")
    dp_replicate: int = flag(1, "copies of the weights, each split over the ranks that the copies leave it (HSDP)")
    cp: int = flag(1, "ranks that compute the same sequences, each a part of their tokens (ring attention)")
    attention: Literal["auto", "torch", "flash_attn", "ring_flash_attn"] = flag(
        "auto", "attention kernel of the learner; auto: flash_attn where it is installed, else torch's"
    )
    tp: int = flag(1, "ranks that compute the same tokens, each a part of the matrices (tensor parallel)")
    profile_step: int = flag(0, "write a trace of this step by torch.profiler, for ui.perfetto.dev; 0: none")
    canary_tolerance: float | None = flag(
        None,
        "nats by which logprobs of engine and learner may differ on fixed prompts after an update; more stops the run; 0 does "
        "not look; default: 0.001, in bfloat16 0.5",
    )
    timeout_s: float = flag(600.0, "seconds that a rank waits for the others before it gives up")
    dry_run: bool = flag(False, "print the plan, and what a step costs, and stop")
    debug: bool = flag(False, "errors with their traceback")
    actors: dict[str, ActorConfig] = flag(dict, "who speaks: --actors.NAME.model PATH")
    envs: dict[str, EnvConfig] = flag(dict, "each of several environments, by its file's name: --envs.NAME.weight 2")
    data: DataConfig = flag(DataConfig, "the rows")
    sampling: SamplingConfig = flag(SamplingConfig, "how tokens are drawn")
    rollout: RolloutConfig = flag(RolloutConfig, "episodes, deadlines, failures")
    algo: AlgoConfig = flag(AlgoConfig, "advantage and loss")
    critic: CriticConfig = flag(CriticConfig, "model that expects rewards (ppo)")
    preference: PreferenceConfig = flag(PreferenceConfig, "loss of pairs (dpo)")
    sft: SftConfig = flag(SftConfig, "what is imitated")
    learner: LearnerConfig = flag(LearnerConfig, "batches and memory")
    optim: OptimConfig = flag(OptimConfig, "optimizer and schedule")
    eval: EvalConfig = flag(EvalConfig, "evaluation")

    @property
    def is_rl(self) -> bool:
        """Samples episodes; otherwise imitates rows, or learns from pairs."""
        return self.algorithm not in ("sft", "dpo", "rm")

    def engine_of(self, name: str) -> str:
        """What samples for an actor whose model is here: "sglang" or "embedded"."""
        return "sglang" if self.actors[name].engine_urls else self.engine

    @property
    def trained(self) -> list[str]:
        """Names of the actors that learn."""
        return [name for name, actor in self.actors.items() if actor.is_trained]

    @property
    def sharers(self) -> dict[str, list[str]]:
        """Name of each actor whose model others share -> the others."""
        found: dict[str, list[str]] = {}
        for name, actor in self.actors.items():
            if actor.share:
                found.setdefault(actor.share, []).append(name)
        return found

    @property
    def env_paths(self) -> dict[str, str]:
        """Name -> file of each environment."""
        paths = [p.strip() for p in (self.env_path or "").split(",") if p.strip()]
        return {os.path.splitext(os.path.basename(p))[0]: p for p in paths}

    def turn_tokens(self, actor: str) -> int:
        """That this actor may sample in one turn."""
        return self.actors[actor].max_tokens or self.max_tokens

    @property
    def turn_limit(self) -> int:
        return self.max_turns or 1

    @property
    def max_context_tokens(self) -> int:
        """Tokens of a whole episode: first prompt, turns, and what the environment says in between."""
        return self.max_prompt_tokens + self.max_tokens * self.turn_limit


def nearest(name: str, known) -> str:
    """`, did you mean 'x'?` or the list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def to_yaml(config: Config) -> str:
    """The configuration as --config reads it."""
    return yaml.safe_dump(plain(config), sort_keys=False)


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
