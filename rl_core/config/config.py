"""Every flag with its default, range and help, and how a command line and YAML become a checked
Config. Imports nothing heavy.

config = parse_config(["--model", "m", "--data.train", "rows.jsonl", "--env_path", "envs/x.py",
"--out", "runs/x"])
"""

import dataclasses
import glob
import math
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from annotated_types import Ge, Gt, Le

from rl_core.algorithms import ADVANTAGES, KL_ESTIMATES, OBJECTIVES, PRESETS
from rl_core.config.flag_parsing import Section, answer, flag, is_table, typed, unknown, validated
from rl_core.errors import check, flags_in, split

RL = tuple(name for name, algorithm in PRESETS.items() if algorithm.is_rl)
DRAWN = Literal["temperature", "top_p", "top_k", "min_p"]
Count = Annotated[int, Ge(0)]
AtLeast1 = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
MemoryFraction = Annotated[float, Gt(0), Le(0.99)]
MAX_TOP_K = 1024  # Largest number of ids that are stored with each token of a training sample.
# Sections of flags that an actor can replace.
OWN_SECTIONS = ("algo", "critic", "learner", "optim", "sampling")
OWN = ("algorithm", "engine_tp", "engine_args", "engine_memory_frac", *OWN_SECTIONS)


def own(section: type, only: tuple[str, ...] = ()) -> Any:
    """A field of an actor: its own values of a section's flags, by name."""
    return flag(dict, f"replaces --{section.prefix}* for this actor", only)


@dataclass(kw_only=True)
class EnvConfig(Section, prefix="envs.NAME."):
    weight: NotNegative = flag(1.0, "its share of a step's tasks; 0: it is only evaluated")
    train: str | None = flag(None, "its training rows; default: its load_tasks")
    eval: str | None = flag(None, "its held-out rows, several sets too; default: its load_tasks")
    max_tokens: AtLeast1 | None = flag(None, "max new tokens of a turn here; default: --max_tokens")
    max_turns: AtLeast1 | None = flag(
        None, "turns of an episode here; default: the file's max_turns, 1 or 8"
    )
    teacher: str | None = flag(None, "its own --algo.teacher; none: nobody teaches here")


NO_ENV = EnvConfig()  # An environment without separate flags.


@dataclass(kw_only=True)
class DataConfig(Section, prefix="data."):
    train: str | None = flag(
        None, "training rows: files, folders, globs, hub datasets a/b:config@split"
    )
    eval: str | None = flag(None, "held-out rows; several sets: gsm8k=a.jsonl,aime=b.jsonl")
    columns: dict[str, str] = flag(
        dict, "other names of columns: answer=solution reads solution as answer"
    )
    shuffle: bool = flag(True, "a new order each epoch, drawn from the seed")
    streaming: bool = flag(False, "read training rows one by one: large files, hub data sets")
    shuffle_buffer: AtLeast1 = flag(1000, "streaming: rows in memory, among which it shuffles")
    skip_long: bool = flag(False, "leave out rows that are too long, instead of refusing the file")
    min_reward: float | None = flag(
        None, "sft on rollouts: only episodes with this reward", only=("sft",)
    )


@dataclass(kw_only=True)
class SamplingConfig(Section, prefix="sampling."):
    temperature: Positive = flag(1.0, "of training samples, and of the learner's logprobs")
    top_k: Annotated[int, Ge(0), Le(MAX_TOP_K)] = flag(
        0, "top-k sampling in training; also limits the ids of the ratio; 0: off", RL
    )
    top_p: Annotated[float, Gt(0), Le(1)] = flag(
        1.0, "of training samples, among top_k: the nucleus of this probability; 1: off", RL
    )
    min_p: Fraction = flag(
        0.0, "of training samples, among top_k: at least this share of the top's; 0: off", RL
    )
    stop: list[str] = flag(list, "strings that end a turn; they stay in the text")


@dataclass(kw_only=True)
class OptimConfig(Section, prefix="optim."):
    name: str = flag("adamw", "optimizer; adamw8bit is that of bitsandbytes")
    lr: NotNegative = flag(1e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = flag(
        "constant", "learning rate after the warmup"
    )
    warmup_steps: Count = flag(0, "steps over which the learning rate rises from 0")
    warmup_frac: Fraction = flag(0.0, "warmup_ratio: warmup_steps as a fraction of --num_steps")
    min_lr_frac: Fraction = flag(0.0, "where linear, cosine and wsd end, as a fraction of lr")
    betas: tuple[Fraction, Fraction] = flag((0.9, 0.95), "AdamW; the first is SGD's momentum")
    eps: NotNegative = flag(1e-8, "AdamW's epsilon")
    weight_decay: NotNegative = flag(0.0, "weight decay of matrices; biases and norms have none")
    max_grad_norm: NotNegative = flag(1.0, "clip the gradient to this norm; 0 is off")
    load: str | None = flag(None, "run or checkpoint whose optimizer state a new run starts from")


@dataclass(kw_only=True)
class AlgoConfig(Section, prefix="algo."):
    """Parts of the algorithm. None keeps the part of the preset --algorithm."""

    advantage: Literal[tuple(ADVANTAGES)] | None = flag(
        None, "baseline over the group; gae: a critic's; custom: advantage_fn; zero: a teacher's"
    )
    normalize: Literal["none", "batch", "env", "task"] | None = flag(
        None, "whiten advantages over a batch or each task (environment); env: scale alone"
    )
    objective: Literal[tuple(OBJECTIVES)] | None = flag(
        None, "importance ratio: clip (PPO), GSPO or CISPO"
    )
    clip_low: Fraction | None = flag(None, "PPO clip range: lower bound 1 - clip_low")
    clip_high: NotNegative | None = flag(None, "PPO clip range: upper bound 1 + clip_high")
    dual_clip: NotNegative | None = flag(None, "dual clip of negative advantages; 0 is off")
    aggregation: Literal["token", "sequence", "constant"] | None = flag(
        None, "loss: token mean, sequence mean, or constant length", only=(*RL, "sft")
    )
    kl: Literal[tuple(KL_ESTIMATES)] | None = flag(
        None, "estimator of the KL to the reference model"
    )
    kl_in: Literal["reward", "loss", "advantage"] | None = flag(None, "where the KL penalty goes")
    kl_coef: NotNegative | None = flag(
        None, "weight of the KL penalty (beta); 0: no reference model"
    )
    kl_reward: tuple[Literal[tuple(KL_ESTIMATES)], NotNegative] | None = flag(
        None, "a KL penalty in the reward: its estimator and coefficient, such as k1,0.05"
    )
    kl_loss: tuple[Literal[tuple(KL_ESTIMATES)], NotNegative] | None = flag(
        None, "KL penalty in the loss, next to one in the reward: k3,0.001"
    )
    log_kl: bool | None = flag(None, "log the KL to the reference model without a penalty")
    entropy_coef: float | None = flag(None, "weight of the entropy bonus; 0 is off")
    correction: Literal["none", "tis", "mask", "sequence_mask"] | None = flag(
        None, "importance sampling correction of off-policy tokens: truncated, or masked (IcePop)"
    )
    correction_range: tuple[NotNegative, NotNegative] | None = flag(
        None, "its bounds, such as 0.5,2"
    )
    overlong: Literal["none", "mask", "soft"] | None = flag(
        None, "truncated: mask, or DAPO's penalty"
    )
    overlong_buffer: Count | None = flag(None, "last tokens with soft penalty; 0: a fifth")
    refill_rounds: Count | None = flag(None, "dynamic sampling: refill zero-signal groups")
    turn_discount: Fraction | None = flag(None, "advantage per turn, with this discount")
    state_coef: NotNegative | None = flag(None, "GiGPO: weight of equal states' turns; default: 1")
    state_discount: Fraction | None = flag(None, "GiGPO: discount of their returns; default: 0.95")
    reference: str | None = flag(
        None, "reference model of the KL and of DPO: folder or hub name", only=(*RL, "dpo")
    )
    reference_every: Count | None = flag(
        None, "sync the reference model with the policy every N steps; 0: never", only=(*RL, "dpo")
    )
    reference_decay: Fraction | None = flag(
        None,
        "EMA of the reference: decay * reference + (1 - decay) * policy at each sync",
        only=(*RL, "dpo"),
    )
    teacher: str | None = flag(
        None, "on-policy distillation: teacher's folder, hub name, actor, server's URL, or self"
    )
    teacher_update: Literal["start", "latest", "ema"] | None = flag(
        None, "self-distillation: the teacher's weights; default: those of the start"
    )
    teacher_decay: Fraction | None = flag(None, "EMA decay of the teacher self; default: 0.99")
    teacher_coef: Positive | None = flag(None, "weight of the KL to the teacher; default: 1")
    teacher_loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] | None = flag(
        None,
        "sampled: each token's logprob as advantage; exact KL or jsd (GKD) over the vocabulary",
    )
    teacher_top_k: Count | None = flag(
        None, "exact forms by a server: its likeliest tokens (top logprobs), all others as one"
    )
    teacher_beta: Fraction | None = flag(None, "jsd: beta, between forward and reverse KL")
    target_kl: NotNegative | None = flag(None, "early stop of a step above this KL; 0 is off")


@dataclass(kw_only=True)
class CriticConfig(Section, prefix="critic."):
    model: str | None = flag(
        None, "value model to start from, a reward model too; default: the actor's"
    )
    lr: NotNegative = flag(1e-5, "its peak learning rate; --optim has the rest")
    warmup_steps: Count = flag(0, "steps in which only the critic learns")
    updates: AtLeast1 = flag(1, "its updates for each update of the policy")
    value_clip: NotNegative = flag(0.2, "clip range of values; 0 is off")
    gamma: Fraction = flag(1.0, "discount of rewards per token")
    gae_lambda: Fraction = flag(0.95, "GAE's lambda: 0 trusts the critic, 1 the rewards")


@dataclass(kw_only=True)
class PreferenceConfig(Section, prefix="preference."):
    beta: Positive = flag(0.1, "DPO: strength of the KL to the reference")
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "ipo_norm", "hinge"] = flag(
        "sigmoid", "DPO: loss of a pair's margin; norm: length-normalized, mean of token logprobs"
    )
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = flag(0.0, "DPO: fraction of swapped pairs")


@dataclass(kw_only=True)
class SftConfig(Section, prefix="sft."):
    weights: tuple[NotNegative, NotNegative] = flag(
        (1.0, 0.0), "loss weights: assistant, others (world model)"
    )


@dataclass(kw_only=True)
class LearnerConfig(Section, prefix="learner."):
    minibatches: AtLeast1 = flag(1, "optimizer steps of one step, each on its share of the tasks")
    epochs: AtLeast1 = flag(1, "passes over the episodes of a step")
    microbatch_tokens: AtLeast1 = flag(8192, "tokens of one forward and backward on a rank, packed")
    inference_tokens: Count | Literal["auto"] = flag(
        0, "of forwards without gradient (old logprobs, reference); 0: microbatch_tokens; auto"
    )
    activations: Literal["keep", "recompute", "offload"] = flag(
        "keep", "recompute: gradient checkpointing"
    )
    kernels: Literal["default", "compile", "liger"] = flag(
        "default", "torch.compile, or Liger's kernels"
    )
    offload: Literal["none", "phase", "always"] = flag("none", "CPU offload; phase: while sampling")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "mixed precision; auto: bfloat16 on a GPU, or float16 if it has none"
    )


@dataclass(kw_only=True)
class LoraConfig(Section, prefix="actors.NAME.lora."):
    rank: Count = flag(0, "LoRA: rank of the adapters of a frozen model; 0 trains all weights")
    alpha: Positive = flag(32.0, "LoRA: the adapters' product is scaled by alpha / rank")
    targets: str = flag(
        "all-linear", "LoRA: modules with an adapter, by last name: q_proj,v_proj; experts too"
    )
    quantize: Literal["none", "nf4"] = flag("none", "QLoRA: nf4 keeps the frozen model in 4 bits")


@dataclass(kw_only=True)
class ActorConfig(Section, prefix="actors.NAME."):
    model: str | None = flag(
        None, "folder or hub name of its model; with api, the model's name there"
    )
    train: bool | None = flag(None, "whether it learns; default: yes, unless it has an api")
    api: str | None = flag(
        None,
        "URL of a chat API: .../v1, or .../v1/responses, or Anthropic's .../v1/messages",
    )
    api_key_env: str | None = flag(
        None,
        "environment variable with the API's key; '': none; default: OPENAI_ or ANTHROPIC_API_KEY",
    )
    engine_urls: str | None = flag(
        None, "SGLang servers that run already: http://a:30000,http://b:30000"
    )
    max_tokens: AtLeast1 | None = flag(
        None, "max new tokens of one of its turns; default: --max_tokens"
    )
    lr: NotNegative | None = flag(None, "its peak learning rate; default: --optim.lr")
    router_aux_loss_coef: NotNegative = flag(
        0.0, "mixture of experts: load balancing loss, 0.001 is usual"
    )
    router_replay: bool = flag(
        False, "mixture of experts: the learner routes as the engine did (R3)", only=RL
    )
    share: str | None = flag(None, "actor with LoRA whose base model and engine this one uses too")
    chat_template: str | None = flag(
        None, "file with a Jinja chat template, instead of the tokenizer's"
    )
    chat_template_kwargs: dict[str, Any] = flag(
        dict, "as --chat_template_kwargs, for its own template"
    )
    lora: LoraConfig = flag(LoraConfig, "adapters")
    algorithm: Literal[RL] | None = flag(None, "its own preset; default: --algorithm", only=RL)
    learn_every: AtLeast1 = flag(1, "update this actor every N steps", only=RL)
    ranks: str | None = flag(
        None, "separate ranks, such as 4-7: actors on separate ranks learn concurrently", only=RL
    )
    engine_tp: AtLeast1 | None = flag(None, "its own --engine_tp")
    engine_args: str | None = flag(None, "its own --engine_args")
    engine_memory_frac: MemoryFraction | None = flag(None, "its own --engine_memory_frac")
    algo: dict[str, Any] = own(AlgoConfig, RL)
    critic: dict[str, Any] = own(CriticConfig, RL)
    learner: dict[str, Any] = own(LearnerConfig)
    optim: dict[str, Any] = own(OptimConfig)
    sampling: dict[str, Any] = own(SamplingConfig)

    @property
    def servers(self) -> list[str]:
        """Addresses in engine_urls."""
        return split(self.engine_urls)

    @property
    def own(self) -> dict[str, Any]:
        """The actor's values that replace the global flags; sections as tables."""
        found = {}
        for name in OWN:
            value = getattr(self, name)
            if name == "optim" and self.lr is not None:
                value = {"lr": self.lr} | value
            if value not in (None, {}):
                found[name] = value
        return found

    @property
    def is_trained(self) -> bool:
        return self.api is None if self.train is None else self.train


@dataclass(kw_only=True)
class RolloutConfig(Section, prefix="rollout."):
    max_concurrent: AtLeast1 = flag(
        256, "concurrent episodes, requests to an api and engine slots of one rank"
    )
    hook_timeout_s: Positive = flag(60.0, "timeout of one call of a hook (reward, interact)")
    episode_timeout_s: Positive = flag(600.0, "timeout of one episode")
    engines_awake: Literal["auto", "all", "one"] = flag(
        "auto", "colocate: all, or one while others sleep"
    )
    max_failed_fraction: Fraction = flag(
        0.1,
        "the run stops when more of its last 200 rows (at least 50) fail, or a whole step",
    )
    save: bool = flag(True, "write every trajectory to rollouts/")
    fixed_order: bool = flag(False, "tests: asynchronous runs that repeat bit for bit; slow")
    lagged: tuple[Fraction, Annotated[int, Ge(2)]] = flag(
        (0.0, 4), "off-policy: share of turns by older weights, steps to renew"
    )


@dataclass(kw_only=True)
class AgentsConfig(Section, prefix="agents."):
    host: str = flag(
        "127.0.0.1", "where requests of agent programs arrive; 0.0.0.0: from other machines too"
    )
    address: str | None = flag(
        None, "hostname that agent programs connect to; default: --agents.host or this machine's"
    )
    response_format: Literal["ignore", "refuse", "enforce"] = flag(
        "ignore", "JSON schema that a request wants of its reply; ignore: counted, not enforced"
    )
    build_network: bool = flag(True, "Harbor: RUN lines of Dockerfiles have a network")
    verify_network: bool = flag(True, "Harbor: test.sh has a network; agents: HARBOR_NETWORK=1")


@dataclass(kw_only=True)
class EvalConfig(Section, prefix="eval."):
    num_tasks: Count = flag(0, "held-out tasks that are evaluated; 0: all")
    samples: Count = flag(4, "k of avg@k and pass@k; 0: greedy alone")
    sampling: dict[DRAWN, float] = flag(
        dict, "of the k samples, such as temperature=0.6,top_p=0.95,top_k=20"
    )
    pass_reward: float = flag(1.0, "an episode passes with at least this reward")
    background: str | None = flag(
        None, "evaluate asynchronously, on a separate device: cpu, cuda:7"
    )


@dataclass(kw_only=True)
class Config(Section):
    __pydantic_config__: ClassVar[dict] = {"extra": "forbid", "coerce_numbers_to_str": True}

    algorithm: Literal[tuple(PRESETS)] = flag("grpo", "preset; --algo.* changes single parts")
    model: str | None = flag(None, "short for --actors.policy.model")
    env_path: str | None = flag(
        None, "Python file with hooks, or a name that rl-core envs lists; several: a.py,b.py"
    )
    out: str | None = flag(None, "output folder of the run; new, unless --resume")
    tasks_per_step: AtLeast1 = flag(16, "tasks (sft, dpo, rm: rows) of one step")
    group_size: AtLeast1 = flag(8, "episodes (generations) of each task")
    num_steps: Count = flag(100, "steps of the whole run")
    num_epochs: Positive | None = flag(None, "instead of num_steps: passes over the training rows")
    max_tokens: AtLeast1 = flag(256, "max new tokens of one turn")
    max_prompt_tokens: AtLeast1 = flag(512, "max tokens of the first prompt")
    max_turns: AtLeast1 | None = flag(
        None, "turns of an episode; default: the environment's max_turns, 1 or 8"
    )
    eval_every: Count = flag(0, "evaluate every N steps, at the start and the end; 0: never")
    save_every: Count = flag(0, "checkpoint every N steps; 0: by the clock and at the end")
    save_minutes: NotNegative = flag(30.0, "checkpoint when the last one is so old; 0: off")
    keep_checkpoints: Count = flag(2, "newest checkpoints that are kept; 0: all")
    save_optimizer: bool = flag(
        True, "false: smaller checkpoints; a resumed run's optimizer begins anew"
    )
    keep_best: str | None = flag(
        None, "export the best by this metric of an evaluation: greedy_score"
    )
    push_to_hub: str | None = flag(
        None, "ORG/NAME on the Hugging Face hub that gets the model at the end"
    )
    seed: int = flag(0, "random seed of everything that is drawn")
    resume: bool = flag(False, "resume from the newest checkpoint in --out")
    chat_template_kwargs: dict[str, Any] = flag(
        dict, 'what templates read: {"enable_thinking": false}'
    )
    engine: str = flag("auto", "inference engine; auto: sglang on a GPU")
    engine_tp: AtLeast1 = flag(1, "sglang: tensor parallel ranks of one engine")
    engine_args: str = flag("", "sglang: more flags of its server: '--quantization fp8'")
    engine_memory_frac: MemoryFraction = flag(
        0.6, "fraction of GPU memory for weights and KV cache of engines"
    )
    engine_weights: Literal["auto", "device", "broadcast", "files"] = flag(
        "auto", "sglang: how new weights get there; auto: on GPUs device (CUDA IPC), else files"
    )
    engine_bucket_mib: AtLeast1 = flag(512, "device and broadcast: MiB of weights sent at once")
    engine_ranks: Count = flag(0, "asynchronous: last ranks that only sample", only=RL)
    max_staleness: Count = flag(
        0, "asynchronous: versions by which samples may be off-policy", only=RL
    )
    attention: Literal["auto", "torch", "flash_attn"] = flag(
        "auto", "varlen attention kernel; auto: flash_attn if it imports, else torch's"
    )
    dp_replicate: AtLeast1 | Literal["auto"] = flag(
        "auto", "HSDP: copies of the weights; auto: one per rank for small models on CPUs, else 1"
    )
    cp: AtLeast1 = flag(1, "context parallel: ranks that split each sequence (ring attention)")
    tp: AtLeast1 = flag(1, "tensor parallel: ranks that split each matrix")
    trackers: str | None = flag(
        None, "experiment trackers: wandb, tensorboard, trackio, mlflow; several: wandb,mlflow"
    )
    run_name: str | None = flag(
        None, "project/group/name in trackers; default: the last folders of --out"
    )
    log_samples: Count = flag(0, "number of episodes of each evaluation to print")
    profile_step: Count = flag(0, "write torch.profiler's trace of this step; 0: none")
    canary_tolerance: NotNegative | None = flag(
        None, "largest logprob mismatch of engine and learner; 0: off"
    )
    timeout_s: Positive = flag(600.0, "seconds that a rank waits for the others")
    actors: dict[str, ActorConfig] = flag(dict, "who speaks: --actors.NAME.model PATH")
    envs: dict[str, EnvConfig] = flag(
        dict, "each of several environments, by its file's name: --envs.NAME.weight 2"
    )
    data: DataConfig = flag(DataConfig, "the rows")
    sampling: SamplingConfig = flag(SamplingConfig, "how tokens are drawn")
    rollout: RolloutConfig = flag(RolloutConfig, "episodes, deadlines, failures")
    agents: AgentsConfig = flag(AgentsConfig, "the endpoint of agent programs", only=RL)
    algo: AlgoConfig = flag(AlgoConfig, "advantage and loss", only=RL)
    critic: CriticConfig = flag(CriticConfig, "value model (ppo)", only=RL)
    preference: PreferenceConfig = flag(PreferenceConfig, "loss of pairs (dpo)", only=("dpo",))
    sft: SftConfig = flag(SftConfig, "what SFT trains", only=("sft",))
    learner: LearnerConfig = flag(LearnerConfig, "batches and memory")
    optim: OptimConfig = flag(OptimConfig, "optimizer and schedule")
    eval: EvalConfig = flag(EvalConfig, "evaluation")

    @property
    def is_rl(self) -> bool:
        """Samples episodes; otherwise learns from rows, or from pairs."""
        return self.algorithm in RL

    @property
    def trained(self) -> list[str]:
        """Names of the actors that learn."""
        return [name for name, actor in self.actors.items() if actor.is_trained]

    def of(self, name: str) -> "Config":
        """The configuration with an actor's settings instead of the global ones."""
        own = self.actors[name].own
        for section in own.keys() & set(OWN_SECTIONS):
            own[section] = replace(getattr(self, section), **own[section])
        return replace(self, **own)

    def limits_ids(self, name: str) -> bool:
        """True if top_p, min_p or JSON schemas leave a part of the ids to an actor's tokens."""
        sampling = self.of(name).sampling
        is_limited = sampling.top_p < 1 or sampling.min_p > 0
        return is_limited or self.agents.response_format == "enforce"

    def sharers(self, name: str) -> list[str]:
        """Names of the actors that share this one's model."""
        return [other for other, actor in self.actors.items() if actor.share == name]

    @property
    def env_paths(self) -> dict[str, str]:
        """Name -> file of each environment."""
        return {Path(path.partition("?")[0]).stem: path for path in split(self.env_path)}

    def env(self, name: str) -> EnvConfig:
        return self.envs.get(name, NO_ENV)

    @property
    def turn_limit(self) -> int:
        return self.max_turns or 1

    @property
    def max_context_tokens(self) -> int:
        """Tokens of an episode: first prompt, turns, and the environment's messages between
        them."""
        return self.max_prompt_tokens + self.max_tokens * self.turn_limit

    @property
    def longest_sample(self) -> int:
        """Tokens on one rank of the longest episode, or of both replies of a pair."""
        num = 2 if self.algorithm in ("dpo", "rm") else 1
        return math.ceil(num * self.max_context_tokens / self.cp)


@cache
def known_flags() -> dict[str, tuple[Any, dataclasses.Field]]:
    """Name -> (default, field) of every flag, with NAME for the name of an actor or an
    environment."""
    every, known = Config(actors={"NAME": ActorConfig()}, envs={"NAME": EnvConfig()}), {}
    for name, default, f in flags_in(every):
        known[name] = default, f
        if name.partition(".")[0] in OWN_SECTIONS:
            known[f"actors.NAME.{name}"] = None, f
    for section in OWN_SECTIONS:
        del known[f"actors.NAME.{section}"]
    return known


def parse_config(argv: list[str]) -> Config:
    """The checked configuration of a command line. Raises ValueError with the value, the rule and
    the fix."""
    return checked(read_config(argv))


def checked(config: Config) -> Config:
    """The configuration with short forms written out: --model is the actor policy's, and an
    actor that shares a model takes the owner's, and its LoRA where it has none. Raises
    ValueError with the value, the rule and the fix."""
    actors = dict(config.actors)
    if config.model is not None:
        other = actors.get("policy", ActorConfig()).model
        if other not in (None, config.model):
            raise ValueError(
                f"--model {config.model} is short for --actors.policy.model, which is {other}: "
                "give one of them"
            )
        actors["policy"] = replace(actors.get("policy", ActorConfig()), model=config.model)
    for name, actor in actors.items():
        if owner := actors.get(actor.share):
            actors[name] = sharing(actor, owner)
    config = replace(config, actors=actors)
    check(config)
    return config


def sharing(actor: ActorConfig, owner: ActorConfig) -> ActorConfig:
    lora = actor.lora
    if actor.is_trained and lora == LoraConfig():
        lora = replace(owner.lora)
    elif actor.is_trained and lora.quantize == "none":
        lora = replace(lora, quantize=owner.lora.quantize)
    return replace(actor, model=actor.model or owner.model, lora=lora)


def read_config(argv: list[str]) -> Config:
    """The configuration of a command line; its flags override the files of --config. Raises
    ValueError for unknown names and wrong types."""
    files, flags = [], []
    for name, value in given_flags(argv):
        if name == "config":
            files.append(read_file(value))
        else:
            for part in reversed(name.split(".")):
                value = {part: value}
            flags.append(value)
            for layer in files:
                forget_model(layer, name)
    check_names(flags)
    return from_sections(*files, *flags)


def check_names(flags: list[dict[str, Any]]) -> None:
    """Raises ValueError for all unknown flags and wrong values at once."""
    errors = []
    for sections in flags:
        try:
            add(sections, {})
        except ValueError as error:
            errors.append(str(error))
    if len(errors) > 1:
        raise ValueError("; ".join(errors))


def forget_model(layer: dict[str, Any], flag: str) -> None:
    """Removes the policy's model from a file's sections if a flag names the model anew."""
    policy = (layer.get("actors") or {}).get("policy") or {}
    if flag == "model":
        policy.pop("model", None)
    elif flag == "actors.policy.model":
        layer.pop("model", None)


def read_file(path: str) -> dict[str, Any]:
    """The sections of a YAML file. Raises ValueError, with its name, for all that is wrong in
    them."""
    try:
        text = Path(path).read_text()
        sections = yaml.safe_load(text)
        from_sections(sections)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; name a YAML file of flags") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    if folders := start_folders(Path(os.path.abspath(path)).parent, text, sections.get("out")):
        sections = with_paths(sections, folders)
        sections["out"] = str(Path(path).parent)
    return sections


STARTED = (
    "# Relative paths are of {}, where the run was started.\n"  # A run's config.yaml's line 1.
)


def start_folders(run: Path, text: str, out: str | None) -> list[Path]:
    """Candidates for the folder in which the run with this config.yaml was started, the likeliest
    first. Empty if this process is in that folder, or if the file does not belong to a run. A
    relative `out` gives the folder also after the run and its inputs were moved together."""
    if not (out and (run / "hf").is_dir()):
        return []
    parts, folders = Path(os.path.normpath(out)).parts, []
    if not Path(out).is_absolute() and run.parts[-len(parts) :] == parts:
        folders.append(Path(*run.parts[: -len(parts)]))
    if match := re.match(STARTED.format("(.+)"), text):
        folders.append(Path(match[1]))
    return [] if Path.cwd() in folders[:1] else folders


# Fields that hold paths, or names that are not paths.
PATH_FIELDS = (
    "env_path",
    "model",
    "chat_template",
    "train",
    "eval",
    "reference",
    "teacher",
    "load",
)


def with_paths(sections: dict[str, Any], folders: list[Path]) -> dict[str, Any]:
    """Sections in which a path that is found from one of the folders is absolute."""
    moved = {}
    for key, value in sections.items():
        if isinstance(value, dict):
            value = with_paths(value, folders)
        elif isinstance(value, str) and key in PATH_FIELDS:
            value = ",".join(absolute(path, folders) for path in split(value))
        moved[key] = value
    return moved


def absolute(path: str, folders: list[Path]) -> str:
    """A path, also one with a name (`easy=rows.jsonl`), a query or a split behind it."""
    named = re.match(r"[A-Za-z][\w-]*=", path)
    for prefix in ("", named[0] if named else ""):
        rest = path.removeprefix(prefix)
        for folder in folders:
            if glob.glob(os.path.join(glob.escape(str(folder)), re.split("[?@]", rest)[0])):
                return prefix + str(folder / rest)
    return path


def from_sections(*layers: dict[str, Any]) -> Config:
    """The configuration of flags in sections, as YAML holds them; later layers override."""
    tree: dict[str, Any] = {}
    for layer in layers:
        add(layer, tree)
    return validated("", tree, Config)


def given_flags(argv: list[str]) -> list[tuple[str, Any]]:
    """(name, value) of each flag; the value is True where none follows."""
    flags: list[tuple[str, Any]] = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        if name.startswith("--") and " " not in name:  # "--quantization fp8" is a value
            flags.append((name[2:], value if equals else True))
        elif flags and flags[-1][1] is True:
            flags[-1] = flags[-1][0], arg
        else:
            near = answer(name, known_flags())
            raise ValueError(f"argument {arg!r} has no flag before it; write --name value; {near}")
    return flags


def add(sections: dict[str, Any], tree: dict[str, Any], prefix: str = "", parent: str = "") -> None:
    """Puts the flags of sections into a tree. `parent`: as `prefix`, with NAME for the name of an
    actor or an environment. Raises ValueError for an unknown name."""
    if not isinstance(sections, dict):
        raise ValueError(f"here belong keys with values, not {sections!r}")
    flags = known_flags()
    for key, value in sections.items():
        name = f"{prefix}{key}"
        known = f"{parent}NAME" if parent in ("actors.", "envs.") else f"{parent}{key}"
        if known in flags:
            kind = flags[known][1].type
            if isinstance(value, dict) and not takes_table(known, kind):
                raise unknown(f"{name}.{next(iter(flat(value)), '')}", flags)
            tree[str(key)] = typed(name, value, kind)
        elif value is None or isinstance(value, dict):
            add(value or {}, tree.setdefault(str(key), {}), f"{name}.", f"{known}.")
        else:
            raise unknown(name, flags)


def takes_table(name: str, kind: Any) -> bool:
    """True if a flag's value may be a table: names of held-out sets, or a dictionary."""
    return is_table(kind) or name in ("data.eval", "envs.NAME.eval")


def to_yaml(config: Config) -> str:
    """The configuration as --config reads it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    values = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values
