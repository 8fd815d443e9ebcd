"""Every flag with its default, range and help, and how a command line and YAML become a checked Config. Imports nothing heavy.

config = parse_config(["--model", "m", "--data.train", "rows.jsonl", "--env_path", "envs/x.py", "--out", "runs/x"])
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from rl_core.rules import check, nearest, split

NAMED = ("actors", "envs")  # sections that hold one section for each name that the user gives
RL = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
HELP = "rl_core.tools.help"  # what --help prints; the spine imports no tool


def flag(default: Any, help: str, *, at_least=None, above=None, at_most=None, only=()) -> Any:
    """A field with its help line and range. A type as default makes a section, a list or a dict. Setting the flag for an
    algorithm that is not among `only` is refused."""
    rule = {"help": help, "at_least": at_least, "above": above, "at_most": at_most, "only": only}
    return field(**{"default_factory" if isinstance(default, type) else "default": default}, metadata=rule)


@dataclass(kw_only=True)
class LoraConfig:
    rank: int = flag(0, "LoRA: rank of the adapters beside a frozen model; 0 trains the whole model", at_least=0)
    alpha: float = flag(32.0, "LoRA: the adapters' product is scaled by alpha / rank", above=0)
    targets: str = flag("all-linear", "LoRA: modules with an adapter, by their last name, such as q_proj,v_proj")
    quantize: Literal["none", "nf4"] = flag("none", "QLoRA: nf4 keeps the frozen model in 4 bits")


@dataclass(kw_only=True)
class ActorConfig:
    model: str | None = flag(None, "folder or hub name of its model; with api, the model's name there")
    train: bool | None = flag(None, "whether it learns; default: yes, unless it has an api")
    api: str | None = flag(None, "URL of an OpenAI-compatible endpoint, such as http://host:8000/v1")
    api_key_env: str = flag("OPENAI_API_KEY", "environment variable that holds the endpoint's key; '': none")
    engine_urls: str | None = flag(None, "SGLang servers that run already: http://a:30000,http://b:30000")
    max_tokens: int | None = flag(None, "max new tokens of one of its turns; default: --max_tokens", at_least=1)
    lr: float | None = flag(None, "its peak learning rate; default: --optim.lr", at_least=0)
    share: str | None = flag(None, "actor with LoRA whose base model and engine this one uses too")
    chat_template: str | None = flag(None, "file with a Jinja chat template, instead of the tokenizer's")
    lora: LoraConfig = flag(LoraConfig, "adapters")

    @property
    def servers(self) -> list[str]:
        """Addresses in engine_urls."""
        return split(self.engine_urls)

    @property
    def is_trained(self) -> bool:
        return self.api is None if self.train is None else self.train


@dataclass(kw_only=True)
class EnvConfig:
    weight: float = flag(1.0, "its share of a step's tasks; 0: it is only evaluated", at_least=0)
    train: str | None = flag(None, "its training rows; default: its load_tasks")
    eval: str | None = flag(None, "its held-out rows; default: its load_tasks")
    max_tokens: int | None = flag(None, "max new tokens of a turn here; default: --max_tokens", at_least=1)
    max_turns: int | None = flag(None, "turns of an episode here; default: the file's max_turns, 1 or 8", at_least=1)


@dataclass(kw_only=True)
class DataConfig:
    train: str | None = flag(None, "training rows: json, jsonl, csv, parquet, a hub dataset; sft: rollouts/ too")
    eval: str | None = flag(None, "held-out rows, same formats")
    shuffle: bool = flag(True, "a new order each epoch, drawn from the seed")
    skip_long: bool = flag(False, "leave out rows that are too long, instead of refusing the file")
    min_reward: float | None = flag(None, "sft on rollouts: only episodes with this reward", only=("sft",))
    actor: str | None = flag(None, "sft on rollouts: only this actor's view and replies", only=("sft",))


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = flag(1.0, "of training samples, and of the learner's logprobs", above=0)
    stop: list[str] = flag(list, "strings that end a turn; they stay in the text")


@dataclass(kw_only=True)
class OptimConfig:
    name: Literal["adamw", "adamw8bit", "sgd"] = flag("adamw", "optimizer; adamw8bit is that of bitsandbytes")
    lr: float = flag(1e-6, "peak learning rate", at_least=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = flag("constant", "learning rate after the warmup")
    warmup_steps: int = flag(0, "steps over which the learning rate rises from 0", at_least=0)
    min_lr_frac: float = flag(0.0, "where linear, cosine and wsd end, as a fraction of lr", at_least=0, at_most=1)
    betas: tuple[float, float] = flag((0.9, 0.95), "AdamW; the first is SGD's momentum", at_least=0, at_most=1)
    eps: float = flag(1e-8, "AdamW's epsilon", at_least=0)
    weight_decay: float = flag(0.0, "weight decay of matrices; biases and norms have none", at_least=0)
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm; 0 is off", at_least=0)


@dataclass(kw_only=True)
class AlgoConfig:
    """Parts of the algorithm. None keeps what the preset of --algorithm says."""

    advantage: Literal["group_mean", "group_norm", "group_norm_unbiased", "rloo", "gae", "none", "custom"] | None = (
        flag(None, "baseline over the group; gae: a critic's; custom: advantage_fn", only=RL)
    )
    normalize: Literal["none", "batch", "env"] | None = flag(None, "whiten advantages over a batch or env", only=RL)
    ratio: Literal["token", "sequence"] | None = flag(None, "importance ratio; sequence is GSPO's", only=RL)
    objective: Literal["clip", "cispo"] | None = flag(None, "PPO's clipped ratio, or CISPO", only=RL)
    clip_low: float | None = flag(None, "PPO clip range: lower bound 1 - clip_low", at_least=0, at_most=1, only=RL)
    clip_high: float | None = flag(None, "PPO clip range: upper bound 1 + clip_high", at_least=0, only=RL)
    dual_clip: float | None = flag(None, "dual clip of negative advantages; 0 is off", at_least=0, only=RL)
    aggregation: Literal["token", "sequence", "constant"] | None = flag(
        None, "loss: token mean, sequence mean, or constant length", only=(*RL, "sft")
    )
    kl: Literal["k1", "k2", "k3"] | None = flag(None, "estimator of the KL to the reference model", only=RL)
    kl_in: Literal["reward", "loss", "advantage"] | None = flag(None, "where the KL penalty goes", only=RL)
    kl_coef: float | None = flag(None, "weight of the KL penalty (beta); 0: no reference model", at_least=0, only=RL)
    entropy_coef: float | None = flag(None, "weight of the entropy bonus; 0 is off", only=RL)
    correction: Literal["none", "tis", "mask", "sequence_mask"] | None = flag(
        None, "importance sampling correction of off-policy tokens: truncated, or masked (IcePop)", only=RL
    )
    correction_range: tuple[float, float] | None = flag(None, "its bounds, such as 0.5,2", at_least=0, only=RL)
    overlong: Literal["none", "mask", "soft"] | None = flag(None, "truncated: mask, or DAPO's penalty", only=RL)
    overlong_buffer: int | None = flag(None, "last tokens with soft penalty; 0: a fifth", at_least=0, only=RL)
    refill_rounds: int | None = flag(None, "dynamic sampling: refill zero-signal groups", at_least=0, only=RL)
    turn_discount: float | None = flag(None, "advantage per turn, with this discount", at_least=0, at_most=1, only=RL)
    target_kl: float | None = flag(None, "early stop of a step above this KL; 0 is off", at_least=0, only=RL)


@dataclass(kw_only=True)
class CriticConfig:
    model: str | None = flag(None, "value model to start from, a reward model too; default: the actor's", only=RL)
    lr: float = flag(1e-5, "its peak learning rate; --optim has the rest", at_least=0, only=RL)
    warmup_steps: int = flag(0, "steps in which only the critic learns", at_least=0, only=RL)
    value_clip: float = flag(0.2, "clip range of values; 0 is off", at_least=0, only=RL)
    gamma: float = flag(1.0, "discount of rewards per token", at_least=0, at_most=1, only=RL)
    gae_lambda: float = flag(0.95, "GAE's lambda: 0 trusts the critic, 1 the rewards", at_least=0, at_most=1, only=RL)


@dataclass(kw_only=True)
class PreferenceConfig:
    beta: float = flag(0.1, "DPO: strength of the KL to the reference", above=0, only=("dpo",))
    loss: Literal["sigmoid", "ipo", "hinge"] = flag("sigmoid", "DPO: loss of a pair's margin", only=("dpo",))
    label_smoothing: float = flag(0.0, "DPO: fraction of swapped pairs", at_least=0, at_most=0.5, only=("dpo",))
    reference_free: bool = flag(False, "DPO: without a reference model", only=("dpo",))
    length_normalized: bool = flag(False, "DPO: mean of token logprobs instead of their sum", only=("dpo",))


@dataclass(kw_only=True)
class SftConfig:
    weights: tuple[float, float] = flag(
        (1.0, 0.0),
        "loss weights of what assistants say, and of what they are answered (world model)",
        at_least=0,
        only=("sft",),
    )


@dataclass(kw_only=True)
class LearnerConfig:
    minibatches: int = flag(1, "optimizer steps of one step, each on its share of the tasks", at_least=1)
    epochs: int = flag(1, "passes over the episodes of a step", at_least=1)
    microbatch_tokens: int = flag(8192, "tokens of one forward and backward on a rank, packed", at_least=1)
    activations: Literal["keep", "recompute", "offload"] = flag("keep", "recompute: gradient checkpointing")
    kernels: Literal["default", "compile", "liger"] = flag("default", "torch.compile, or Liger's kernels")
    offload: Literal["none", "phase", "always"] = flag("none", "CPU offload; phase: while sampling")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "mixed precision; auto: bfloat16 on a GPU")


@dataclass(kw_only=True)
class RolloutConfig:
    max_concurrent: int = flag(256, "concurrent episodes, requests to an api and engine slots of one rank", at_least=1)
    hook_timeout_s: float = flag(60.0, "timeout of one call of a hook (reward, interact)", above=0)
    episode_timeout_s: float = flag(600.0, "timeout of one episode", above=0)
    engines_awake: Literal["auto", "all", "one"] = flag("auto", "colocate: all, or one while others sleep")
    max_failed_fraction: float = flag(
        0.1, "the run stops when more episodes of its last 200 rows fail, or a whole step", at_least=0, at_most=1
    )
    save: bool = flag(True, "write every trajectory to rollouts/")
    lagged: tuple[float, int] = flag(
        (0.0, 4), "off-policy: fraction of turns by older weights, steps between their renewals", at_least=0, only=RL
    )


@dataclass(kw_only=True)
class EvalConfig:
    num_tasks: int = flag(0, "held-out tasks that are evaluated; 0: all", at_least=0)
    samples: int = flag(4, "k of avg@k and pass@k; 0: greedy alone", at_least=0)
    sampling: dict[str, float] = flag(dict, "of the k samples, such as temperature=0.6,top_p=0.95,top_k=20")
    pass_reward: float = flag(1.0, "an episode passes with at least this reward")


@dataclass(kw_only=True)
class Config:
    algorithm: Literal[(*RL, "sft", "dpo", "rm")] = flag("grpo", "preset; --algo.* changes single parts")
    model: str | None = flag(None, "short for --actors.policy.model")
    env_path: str | None = flag(None, "Python file with reward_fn and other hooks; several: a.py,b.py")
    out: str | None = flag(None, "output folder of the run; new, unless --resume")
    tasks_per_step: int = flag(16, "tasks (sft, dpo, rm: rows) of one step", at_least=1)
    group_size: int = flag(8, "episodes (generations) of each task", at_least=1)
    num_steps: int = flag(100, "steps of the whole run", at_least=0)
    max_tokens: int = flag(256, "max new tokens of one turn", at_least=1)
    max_prompt_tokens: int = flag(512, "max tokens of the first prompt", at_least=1)
    max_turns: int | None = flag(None, "turns of an episode; default: the environment's max_turns, 1 or 8", at_least=1)
    eval_every: int = flag(0, "evaluate every so many steps, at the start and the end; 0: never", at_least=0)
    save_every: int = flag(0, "checkpoint every so many steps; 0: at the end", at_least=0)
    keep_checkpoints: int = flag(2, "newest checkpoints that are kept; 0: all", at_least=0)
    seed: int = flag(0, "random seed of everything that is drawn")
    resume: bool = flag(False, "go on from the newest checkpoint in --out")
    engine: Literal["auto", "sglang", "embedded"] = flag("auto", "inference engine; auto: sglang on a GPU")
    engine_tp: int = flag(1, "sglang: tensor parallel ranks of one engine", at_least=1)
    engine_memory_frac: float = flag(0.6, "sglang: fraction of GPU memory", above=0, at_most=0.99)
    engine_ranks: int = flag(0, "asynchronous: last ranks that only sample", at_least=0, only=RL)
    max_staleness: int = flag(0, "asynchronous: versions by which samples may be off-policy", at_least=0, only=RL)
    attention: Literal["auto", "torch", "flash_attn", "ring_flash_attn"] = flag(
        "auto", "varlen attention kernel; auto: flash_attn if installed, else torch's"
    )
    dp_replicate: int = flag(1, "HSDP: copies of the weights, each sharded (FSDP) over the other ranks", at_least=1)
    cp: int = flag(1, "context parallel: ranks that split each sequence (ring attention)", at_least=1)
    tp: int = flag(1, "tensor parallel: ranks that split each matrix", at_least=1)
    profile_step: int = flag(0, "write torch.profiler's trace of this step; 0: none", at_least=0)
    canary_tolerance: float | None = flag(None, "largest logprob mismatch of engine and learner; 0: off", at_least=0)
    timeout_s: float = flag(600.0, "seconds that a rank waits for the others", above=0)
    dry_run: bool = flag(False, "print the plan and its memory, and stop")
    debug: bool = flag(False, "errors with their traceback")
    actors: dict[str, ActorConfig] = flag(dict, "who speaks: --actors.NAME.model PATH")
    envs: dict[str, EnvConfig] = flag(dict, "each of several environments, by its file's name: --envs.NAME.weight 2")
    data: DataConfig = flag(DataConfig, "the rows")
    sampling: SamplingConfig = flag(SamplingConfig, "how tokens are drawn")
    rollout: RolloutConfig = flag(RolloutConfig, "episodes, deadlines, failures")
    algo: AlgoConfig = flag(AlgoConfig, "advantage and loss")
    critic: CriticConfig = flag(CriticConfig, "value model (ppo)")
    preference: PreferenceConfig = flag(PreferenceConfig, "loss of pairs (dpo)")
    sft: SftConfig = flag(SftConfig, "what is imitated")
    learner: LearnerConfig = flag(LearnerConfig, "batches and memory")
    optim: OptimConfig = flag(OptimConfig, "optimizer and schedule")
    eval: EvalConfig = flag(EvalConfig, "evaluation")

    @property
    def is_rl(self) -> bool:
        """Samples episodes; otherwise imitates rows, or learns from pairs."""
        return self.algorithm in RL

    def engine_of(self, name: str) -> str:
        """What samples for an actor whose model is here: "sglang" or "embedded"."""
        return "sglang" if self.actors[name].engine_urls else self.engine

    @property
    def has_servers(self) -> bool:
        return any(actor.engine_urls for actor in self.actors.values())

    @property
    def trained(self) -> list[str]:
        """Names of the actors that learn."""
        return [name for name, actor in self.actors.items() if actor.is_trained]

    @property
    def sharers(self) -> dict[str, list[str]]:
        """Name of each actor whose model others share -> the others."""
        owners = dict.fromkeys(actor.share for actor in self.actors.values() if actor.share)
        return {owner: [name for name, actor in self.actors.items() if actor.share == owner] for owner in owners}

    @property
    def env_paths(self) -> dict[str, str]:
        """Name -> file of each environment."""
        return {os.path.splitext(os.path.basename(path))[0]: path for path in split(self.env_path)}

    def env(self, name: str) -> EnvConfig:
        return self.envs.get(name) or EnvConfig()

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

    @property
    def longest_tokens(self) -> int:
        """Of an episode, or of a pair, on one rank of --cp: the least that a microbatch must hold."""
        return -(-self.max_context_tokens * (2 if self.algorithm in ("dpo", "rm") else 1) // self.cp)


def leaves(
    cls: type, given: dict[str, list[str]] | None = None, prefix: str = ""
) -> dict[str, tuple[dataclasses.Field, Any]]:
    """Dotted flag name -> its field and type. `given`: names that the user gave in sections that take any (actors, envs)."""
    found, hints = {}, get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint, names = hints[f.name], [f.name]
        if get_origin(hint) is dict and dataclasses.is_dataclass(get_args(hint)[1]):
            hint, names = get_args(hint)[1], [f"{f.name}.{n}" for n in (given or {}).get(f.name) or ["NAME"]]
        for name in names:
            is_section = dataclasses.is_dataclass(hint)
            found |= leaves(hint, None, f"{prefix}{name}.") if is_section else {prefix + name: (f, hint)}
    return found


def parse_config(argv: list[str]) -> Config:
    """The checked configuration of a command line. Raises ValueError with the value, the rule and the fix; prints and exits
    on --help."""
    for arg, after in zip(argv, [*argv[1:], "--"], strict=True):
        if arg in ("--help", "-h"):
            print(import_module(HELP).help_page("" if after.startswith("-") else after))
            raise SystemExit(0)
    config = resolve(read_values(spelled_out(argv)))
    check(config)
    return config


def given_flags(argv: list[str]) -> list[tuple[str, str | None]]:
    """(name, value) of each flag; the value is None where none follows."""
    found: list[tuple[str, str | None]] = []
    for arg in argv:
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            found.append((name, value if equals else None))
        elif found and found[-1][1] is None:
            found[-1] = found[-1][0], arg
        else:
            raise ValueError(f"argument {arg!r} has no flag before it")
    return found


def spelled_out(argv: list[str]) -> list[str]:
    """argv as jsonargparse reads it. Raises ValueError for an unknown flag, with the nearest known one."""
    out, given = [], given_flags(argv)
    words = [name.split(".") for name, _ in given]
    known = leaves(Config, {s: sorted({w[1] for w in words if w[0] == s and w[2:]}) for s in NAMED})
    for name, value in given:
        if name == "config":
            check_file(value or "")
        elif name not in known:
            raise ValueError(f"unknown flag --{name}; {nearest(name, known)}")
        kind = str(known[name][0].type) if name in known else "str"
        if value is None and kind != "bool":
            raise ValueError(f"--{name} has no value")
        if kind.startswith("tuple") and not value.startswith("["):
            value = f"[{value}]"  # 0.9,0.95
        elif kind.startswith("dict") and "=" in value:
            value = "{" + value.replace("=", ": ") + "}"  # temperature=0.6,top_p=0.95
        out.append(f"--{name}={'true' if value is None else value}")
    return out


def check_file(path: str) -> None:
    """Raises ValueError if a YAML file is not there, does not parse, or has a key that is no flag."""
    if not os.path.isfile(path):
        raise ValueError(f"--config {path}: no such file")
    with open(path) as file:
        try:
            content = yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold keys and values, holds a {type(content).__name__}")
    known = leaves(Config, {s: [str(name) for name in content.get(s) or {}] for s in NAMED})

    def walk(node: dict, prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            is_section = any(k.startswith(f"{name}.") for k in known) or name in NAMED
            if is_section and isinstance(value, dict):
                walk(value, name + ".")
            elif name not in known and not (is_section and value is None):
                raise ValueError(f"--config {path}: unknown key {name!r}; {nearest(name, known)}")

    walk(content, "")


def read_values(argv: list[str]) -> Config:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config)
    try:
        config = parser.instantiate_classes(parser.parse_args(argv))
    except (jsonargparse.ArgumentError, TypeError) as error:
        text = " ".join(str(error).split())
        found = re.match(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', text)
        if not found:
            raise ValueError(text) from None
        section, _, rest = found[1].partition(".")
        known = leaves(Config, {section: [rest.partition(".")[0]]})
        hint = str(known[found[1]][0].type) if found[1] in known else "of another type"
        rule = hint.replace("Literal", "one of ").replace(" | None", "")
        raise ValueError(f"--{found[1]}={found[2]} must be {rule}") from None
    return Config(**{f.name: config[f.name] for f in dataclasses.fields(Config)})


def resolve(config: Config) -> Config:
    """A new configuration: --model is the actor policy's, and an actor that shares a model has what it takes from the owner."""
    actors = copy.deepcopy(config.actors)
    if config.model is not None:
        actors.setdefault("policy", ActorConfig()).model = config.model
    for actor in actors.values():
        if owner := actors.get(actor.share):
            actor.model = owner.model if actor.model is None else actor.model
            if actor.is_trained:
                own, quantize = actor.lora, max(actor.lora.quantize, owner.lora.quantize, key=lambda q: q != "none")
                inherited = owner.lora if replace(own, quantize="none") == LoraConfig() else own
                actor.lora = replace(inherited, quantize=quantize)
    return replace(config, actors=actors)


def to_yaml(config: Config) -> str:
    """The configuration as --config reads it."""
    return yaml.safe_dump(plain(config), sort_keys=False)


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
