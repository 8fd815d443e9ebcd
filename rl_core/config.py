"""Every flag: its default, its help line, its check. One dataclass a section; jsonargparse reads them.

    config = parse_config(["--model", "m", "--data.train", "rows.jsonl", "--env_path", "envs/x.py", "--out", "runs/x"])

Imports nothing heavy: an error in a flag is told before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import re
import shutil
import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    model: str | None = flag(None, "folder or hub name of the model that this actor speaks with")
    chat_template: str | None = flag(None, "file with a Jinja chat template, instead of the tokenizer's own")
    lora: LoraConfig = flag(LoraConfig, "adapters")


@dataclass(kw_only=True)
class DataConfig:
    train: str | None = flag(None, "training rows: .json .jsonl .csv .parquet .arrow (.gz too) or a `datasets` name")
    eval: str | None = flag(None, "held-out rows, same formats")
    shuffle: bool = flag(True, "a fresh order each epoch, drawn from the seed; false keeps the file's order")
    skip_long: bool = flag(False, "leave out rows that are longer than the limits instead of refusing the file")


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = flag(1.0, "of training samples; the learner's logprobs are at the same temperature")
    stop: list[str] = flag(list, "strings that end a turn; they stay in the text")


@dataclass(kw_only=True)
class OptimConfig:
    name: Literal["adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "sgd"] = flag(
        "adamw",
        "8bit and paged ones through bitsandbytes: a quarter of the state's memory, and state that moves to the host",
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

    advantage: (
        Literal["group_mean", "group_norm", "group_norm_unbiased", "rloo", "batch_norm", "none", "custom"] | None
    ) = flag(
        None,
        "of rewards over their group: R - mean, or that over the standard deviation (of the population, or unbiased), or "
        "R - mean of the others; batch_norm: over the whole batch; custom: the environment's advantage_fn",
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
    target_kl: float | None = flag(
        None, "a step's other updates are left out once the KL to its start is more; 0 is off"
    )


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
class LearnerConfig:
    minibatches: int = flag(1, "optimizer steps per batch of rollouts; each takes its share of the tasks")
    epochs: int = flag(1, "passes over a batch of rollouts")
    microbatch_tokens: int = flag(8192, "tokens of one forward and backward on one rank; memory grows with it")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of compute: auto is bfloat16 on a GPU, else float32")


@dataclass(kw_only=True)
class RolloutConfig:
    max_concurrent: int = flag(256, "episodes in flight, and slots of the embedded engine, on one rank")
    hook_timeout_s: float = flag(60.0, "seconds that one call of a hook may take")
    episode_timeout_s: float = flag(600.0, "seconds that one episode may take")
    max_failed_fraction: float = flag(0.1, "the run stops when more of a step's episodes than this fail")
    save: bool = flag(True, "write every trajectory to rollouts/")


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
    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "sft", "dpo", "rm"] = flag(
        "grpo", "preset; --algo.* changes single parts of it"
    )
    model: str | None = flag(None, "short for --actors.policy.model")
    env_path: str | None = flag(None, "Python file with reward_fn and, if wanted, interact and other hooks")
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
    engine: Literal["embedded"] = flag("embedded", "what samples: embedded is in-process, on any device")
    timeout_s: float = flag(600.0, "seconds that a rank waits for the others before it gives up")
    dry_run: bool = flag(False, "print the plan and stop")
    debug: bool = flag(False, "errors with their traceback")
    actors: dict[str, ActorConfig] = flag(dict, "who speaks: --actors.NAME.model PATH")
    data: DataConfig = flag(DataConfig, "the rows")
    sampling: SamplingConfig = flag(SamplingConfig, "how tokens are drawn")
    rollout: RolloutConfig = flag(RolloutConfig, "episodes, deadlines, failures")
    algo: AlgoConfig = flag(AlgoConfig, "advantage and loss")
    preference: PreferenceConfig = flag(PreferenceConfig, "loss of pairs (dpo)")
    learner: LearnerConfig = flag(LearnerConfig, "batches and memory")
    optim: OptimConfig = flag(OptimConfig, "optimizer and schedule")
    eval: EvalConfig = flag(EvalConfig, "evaluation")

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


def sections() -> dict[str, type]:
    """Section name -> its dataclass; the dictionary of actors counts as one."""
    found = {}
    for name, hint in get_type_hints(Config).items():
        section = get_args(hint)[1] if get_origin(hint) is dict else hint
        if dataclasses.is_dataclass(section):
            found[name] = section
    return found


def flags_of(cls: type, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any]]:
    """Dotted name -> its field and type, those of nested dataclasses included."""
    found, hints = {}, get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name, hint = prefix + f.name, hints[f.name]
        found |= flags_of(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: (f, hint)}
    return found


def flag_names(actors=("policy",)) -> dict[str, dataclasses.Field]:
    """Every dotted flag name -> its field."""
    names = {f.name: f for f in dataclasses.fields(Config) if f.name not in sections()}
    for section, cls in sections().items():
        prefixes = [f"actors.{a}" for a in actors] if section == "actors" else [section]
        names |= {name: f for prefix in prefixes for name, (f, _) in flags_of(cls, f"{prefix}.").items()}
    return names


def help_page(section: str = "") -> str:
    """One section's flags with their help and defaults; without a name, the general flags and the list of sections."""
    if section and section not in sections():
        raise ValueError(f"--help {section}: no such section; {nearest(section, sections())}")
    prefix = "actors.NAME." if section == "actors" else f"{section}." if section else ""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [
        "usage: torchrun --nproc_per_node N -m rl_core.train --model PATH --env_path FILE --out FOLDER [--flag value]"
    ]
    flags = (
        flags_of(sections()[section])
        if section
        else {n: (f, get_type_hints(Config)[n]) for n, f in flag_names(()).items() if "." not in n}
    )
    for name, (f, hint) in flags.items():
        value = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        choices = [c for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
        about = f.metadata["help"] + (f" {{{', '.join(choices)}}}" if choices else "")
        about += "" if value in (None, [], False) else f" [{value}]"
        lines += textwrap.wrap(about, width, initial_indent=f"  --{prefix + name:<26} ", subsequent_indent=" " * 31)
    if not section:
        lines.append("  --config FILE                a YAML file with the same keys; flags override it")
        lines += ["", "more, each with a page of its own (--help SECTION):"]
        lines += [
            f"  {name:<10} {f.metadata['help']}" for f in dataclasses.fields(Config) if (name := f.name) in sections()
        ]
    return "\n".join(lines)


def check_flags(argv: list[str]) -> list[str]:
    """argv with bare boolean flags spelled out. Raises ValueError for an unknown flag, with the nearest known one."""
    actors = {a.split(".")[1] for a in argv if a.startswith("--actors.") and a.count(".") > 1} or {"policy"}
    known = flag_names(sorted(actors))
    out: list[str] = []
    for i, arg in enumerate(argv):
        name = arg[2:].split("=")[0]
        if not arg.startswith("--") and (i == 0 or not argv[i - 1].startswith("--") or "=" in argv[i - 1]):
            raise ValueError(f"argument {arg!r} has no flag before it")
        if arg.startswith("--") and name != "config" and name not in known:
            raise ValueError(f"unknown flag --{name}; {nearest(name, known)}")
        following = argv[i + 1] if i + 1 < len(argv) else "--"
        if arg.startswith("--") and name in known and known[name].type == "bool" and "=" not in arg:
            arg += "" if following.lower() in ("true", "false") else "=true"
        out.append(arg)
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
    known = flag_names([str(a) for a in content.get("actors") or {}])

    def walk(node: dict, prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            is_group = name in sections() or any(k.startswith(f"{name}.") for k in known)
            if is_group and isinstance(value, dict):
                walk(value, name + ".")
            elif name not in known and not (is_group and value is None):
                raise ValueError(f"--config {path}: unknown key {name!r}; {nearest(name, known)}")

    walk(content, "")


def parse_config(argv: list[str]) -> Config:
    """The checked configuration of a command line. Raises ValueError that says the value, the rule and the fix; prints
    and exits on --help."""
    if "--help" in argv or "-h" in argv:
        at = argv.index("--help" if "--help" in argv else "-h")
        print(help_page(argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("-") else ""))
        raise SystemExit(0)
    argv = check_flags(argv)
    files = [
        a.split("=", 1)[1] if "=" in a else (argv[i + 1 : i + 2] or [""])[0]
        for i, a in enumerate(argv)
        if a.split("=")[0] == "--config"
    ]
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times; give one file, and flags for what differs")
    for path in files:
        check_file(path)
    config = to_config(argv)
    check_config(config)
    return config


def to_config(argv: list[str]) -> Config:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config)
    try:
        values = parser.parse_args(argv)
        config = parser.instantiate_classes(values)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(one_line(" ".join(str(error).split()))) from None
    made = Config(**{f.name: config[f.name] for f in dataclasses.fields(Config)})
    if made.model is not None:
        made.actors.setdefault("policy", ActorConfig()).model = made.model
    return made


def one_line(error: str) -> str:
    """jsonargparse's message about a value, as flag, value and rule."""
    found = re.match(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', error)
    if not found:
        return error
    known = flag_names([found[1].split(".")[1]]) if found[1].startswith("actors.") else flag_names()
    hint = str(known[found[1]].type) if found[1] in known else "of another type"
    return f"--{found[1]}={found[2]} must be {hint.replace('Optional', '').replace('Literal', 'one of ')}"


def check_config(config: Config) -> None:
    """Raises ValueError for what can be known from the flags alone."""

    def refuse(bad: Any, text: str) -> None:
        if bad:
            raise ValueError(text)

    for name in ("tasks_per_step", "group_size", "max_tokens", "max_prompt_tokens"):
        refuse(getattr(config, name) < 1, f"--{name}={getattr(config, name)} must be at least 1")
    refuse(config.num_steps < 0, f"--num_steps={config.num_steps} must be at least 0")
    refuse(
        not config.out and not config.dry_run, "--out is missing: name a folder for the run, such as --out runs/first"
    )
    refuse(not config.actors, "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B")
    refuse(
        list(config.actors) != ["policy"], f"actors {', '.join(config.actors)}: one actor named 'policy' is supported"
    )
    for name, actor in config.actors.items():
        refuse(not actor.model, f"--actors.{name}.model is missing: a folder or hub name")
    is_rl, is_pairs = config.algorithm not in ("sft", "dpo", "rm"), config.algorithm in ("dpo", "rm")
    p = config.preference
    refuse(
        config.algorithm != "dpo" and p != PreferenceConfig(),
        f"--preference.* has no meaning for --algorithm {config.algorithm}; leave it out",
    )
    refuse(p.beta <= 0, f"--preference.beta={p.beta} must be above 0; 0.1 is usual")
    refuse(
        not 0 <= p.label_smoothing < 0.5 or (p.label_smoothing and p.loss != "sigmoid"),
        f"--preference.label_smoothing={p.label_smoothing} must lie in 0..0.5 and needs --preference.loss sigmoid",
    )
    refuse(
        is_rl and not config.env_path,
        "--env_path is missing: a Python file with a reward_fn, such as envs/sort_digits.py",
    )
    n, m = config.tasks_per_step, config.learner.minibatches
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    refuse(
        m < 1 or n % m,
        f"--learner.minibatches={m} must divide --tasks_per_step={n}; try {min(divisors, key=lambda d: abs(d - m))}",
    )
    refuse(config.learner.epochs < 1, f"--learner.epochs={config.learner.epochs} must be at least 1")
    refuse(
        config.sampling.temperature <= 0 and is_rl,
        f"--sampling.temperature={config.sampling.temperature} must be above 0: greedy samples of a group are all the same",
    )
    refuse(
        not 0 <= config.rollout.max_failed_fraction <= 1,
        f"--rollout.max_failed_fraction={config.rollout.max_failed_fraction} must lie in 0..1",
    )
    longest = config.max_context_tokens * (2 if is_pairs else 1)
    refuse(
        config.learner.microbatch_tokens < longest,
        f"--learner.microbatch_tokens={config.learner.microbatch_tokens} must hold one whole "
        f"{'pair' if is_pairs else 'episode'} of up to {longest} tokens ({'2 * ' if is_pairs else ''}(max_prompt_tokens + "
        "max_turns * max_tokens)); raise it or lower these",
    )
    refuse(config.optim.lr < 0, f"--optim.lr={config.optim.lr} must not be negative")
    refuse(
        not 0 < config.optim.decay_frac <= 1, f"--optim.decay_frac={config.optim.decay_frac} must lie above 0, up to 1"
    )
    check_extras(config)


def check_extras(config: Config) -> None:
    """Raises ValueError if a flag needs an optional library that is not installed, or contradicts another."""
    needed = []
    if config.optim.name not in ("adamw", "sgd"):
        needed.append(("bnb", "bitsandbytes", f"--optim.name={config.optim.name}"))
    for name, actor in config.actors.items():
        at, lora = f"--actors.{name}.lora", actor.lora
        if lora.rank < 0 or lora.alpha <= 0:
            raise ValueError(f"{at}.rank={lora.rank} and {at}.alpha={lora.alpha} must not be negative, and alpha not 0")
        if lora.quantize != "none" and not lora.rank:
            raise ValueError(f"{at}.quantize={lora.quantize} freezes the model: give it adapters, such as {at}.rank=16")
        if lora.rank and config.algorithm == "rm":
            raise ValueError(f"{at}.rank={lora.rank}: --algorithm rm trains the whole model; leave adapters out")
        if lora.rank:
            needed.append(("lora", "peft", f"{at}.rank={lora.rank}"))
        if lora.quantize != "none":
            needed.append(("bnb", "bitsandbytes", f"{at}.quantize={lora.quantize}"))
    for extra, library, flag_given in needed:
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"{flag_given} needs {library}, which is not installed: pip install .[{extra}]")


def to_yaml(config: Config) -> str:
    """The configuration as --config reads it."""
    return yaml.safe_dump(plain(config), sort_keys=False)


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
