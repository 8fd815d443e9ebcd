"""Config: the flags that have no section, and the sections of each subject. Imports nothing
heavy."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from rl_core.algorithms import PRESETS
from rl_core.config.actors import ActorConfig
from rl_core.config.algorithm import (
    RL,
    SELF,
    AlgoConfig,
    CriticConfig,
    PreferenceConfig,
    SftConfig,
    is_url,
)
from rl_core.config.data import NO_ENV, DataConfig, EnvConfig
from rl_core.config.flag_parsing import Section
from rl_core.config.learner import LearnerConfig, OptimConfig
from rl_core.config.online import OnlineConfig
from rl_core.config.rollout import (
    AgentsConfig,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
)
from rl_core.errors import split
from rl_core.flags import AtLeast1, Count, MemoryFraction, NotNegative, OneOf, Positive, flag


@dataclass(kw_only=True)
class Config(Section):
    __pydantic_config__: ClassVar[dict] = {"extra": "forbid", "coerce_numbers_to_str": True}

    algorithm: OneOf[str, PRESETS] = flag("grpo", "preset; --algo.* changes single parts")
    model: str | None = flag(None, "short for --actors.policy.model")
    env_path: str | None = flag(
        None, "Python file with hooks, or a name that rl-core envs lists; several: a.py,b.py"
    )
    out: str | None = flag(None, "output folder of the run; new, unless --resume")
    tasks_per_step: AtLeast1 = flag(16, "tasks (without episodes: rows) of one step")
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
    deterministic: bool = flag(
        False, "tests: asynchronous runs that repeat bit for bit; slow", only=RL
    )
    resume: bool = flag(False, "resume from the newest checkpoint in --out")
    chat_template_kwargs: dict[str, object] = flag(
        dict, 'what templates read: {"enable_thinking": false}'
    )
    engine: str = flag("auto", "inference engine; auto: on a GPU sglang, else vllm")
    engine_tp: AtLeast1 = flag(1, "sglang, vllm: tensor parallel ranks of one engine")
    engine_args: str = flag("", "sglang, vllm: more flags of its server: '--quantization fp8'")
    engine_memory_frac: MemoryFraction = flag(
        0.6, "fraction of GPU memory for weights and KV cache of engines"
    )
    weight_sync: Literal["auto", "device", "broadcast", "files"] = flag(
        "auto",
        "sglang, vllm: how new weights get there; auto: on GPUs device (CUDA IPC), else files",
    )
    engine_bucket_mib: AtLeast1 = flag(512, "device and broadcast: MiB of weights sent at once")
    rollout_ranks: Count = flag(0, "asynchronous: last ranks that only sample", only=RL)
    max_staleness: Count = flag(
        0, "asynchronous: versions by which samples may be off-policy", only=RL
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = flag(
        "auto", "mps: an Apple GPU (docs/quickstart.md); auto: CUDA's GPUs, else the CPU"
    )
    attention: Literal["auto", "torch", "flash_attn"] = flag(
        "auto", "varlen attention kernel; auto: flash_attn if it imports, else torch's"
    )
    dp_replicate: AtLeast1 | Literal["auto"] = flag(
        "auto", "HSDP: copies of the weights; auto: one per rank for small models on CPUs, else 1"
    )
    cp: AtLeast1 = flag(1, "context parallel: ranks that split each sequence (ring attention)")
    tp: AtLeast1 = flag(1, "tensor parallel: ranks that split each matrix")
    ep: AtLeast1 | Literal["auto"] = flag(
        1,
        "expert parallel: ranks that split each layer's experts; auto: as many as fit, up to 8",
    )
    trackers: str | None = flag(
        None, "experiment trackers: wandb, tensorboard, trackio, mlflow; several: wandb,mlflow"
    )
    run_name: str | None = flag(
        None, "project/group/name in trackers; default: the last folders of --out"
    )
    print_samples: Count = flag(0, "number of episodes of each evaluation to print")
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
    online: OnlineConfig = flag(OnlineConfig, "a run that stays open", only=RL)
    sandbox: SandboxConfig = flag(SandboxConfig, "boxes of agents", only=RL)
    algo: AlgoConfig = flag(AlgoConfig, "advantage and loss", only=RL)
    critic: CriticConfig = flag(CriticConfig, "value model (ppo)", only=RL)
    preference: PreferenceConfig = flag(
        PreferenceConfig, "loss of pairs, and of replies with a label"
    )
    sft: SftConfig = flag(SftConfig, "what SFT trains", only=("sft",))
    learner: LearnerConfig = flag(LearnerConfig, "batches and memory")
    optim: OptimConfig = flag(OptimConfig, "optimizer and schedule")
    eval: EvalConfig = flag(EvalConfig, "evaluation")

    @property
    def is_rl(self) -> bool:
        """Samples episodes; otherwise learns from rows, or from pairs."""
        return self.algorithm in RL

    @property
    def folder(self) -> Path:
        """The output folder. Raises AssertionError without --out."""
        assert self.out is not None
        return Path(self.out)

    @property
    def trained(self) -> list[str]:
        """Names of the actors that learn."""
        return [name for name, actor in self.actors.items() if actor.is_trained]

    def of(self, name: str) -> "Config":
        """The configuration with an actor's settings instead of the global ones."""
        values = self.actors[name].overrides
        for key, value in values.items():
            if isinstance(value, dict):
                values[key] = replace(getattr(self, key), **value)
        return replace(self, **values)

    def limits_ids(self, name: str) -> bool:
        """True if top_p, min_p or JSON schemas leave a part of the ids to an actor's tokens."""
        sampling = self.of(name).sampling
        is_limited = sampling.top_p < 1 or sampling.min_p > 0
        return is_limited or self.agents.response_format == "enforce"

    @property
    def has_adapters(self) -> bool:
        return any(actor.lora.rank for actor in self.actors.values())

    def sharers(self, name: str) -> list[str]:
        """Names of the actors that share this one's model."""
        return [other for other, actor in self.actors.items() if actor.lora_base == name]

    @property
    def env_paths(self) -> dict[str, str]:
        """Name -> file of each environment."""
        return {Path(path.partition("?")[0]).stem: path for path in split(self.env_path)}

    def env(self, name: str) -> EnvConfig:
        return self.envs.get(name, NO_ENV)

    @property
    def envs_by_teacher(self) -> dict[str, list[str]]:
        """Name of a teacher -> environments whose samples the teacher reads."""
        envs: dict[str, list[str]] = {}
        if self.algo.teacher:
            for env in self.env_paths:
                envs.setdefault(self.env(env).teacher or self.algo.teacher, []).append(env)
        envs.pop("none", None)
        return envs

    def model_path(self, name: str) -> str:
        """Path of a model: a folder, a hub name, or the model of an actor of the run."""
        actor = self.actors.get(name)
        path = name if actor is None else actor.model
        assert path
        return path

    @property
    def frozen_models(self) -> dict[str, str]:
        """Role (reference, teacher) -> path of each frozen model that is loaded in addition to the
        actor's."""
        paths = {}
        if self.algo.reference:
            paths["reference"] = self.algo.reference
        for name, envs in self.envs_by_teacher.items():
            if not is_url(name) and name not in (SELF, *self.trained):
                is_of_all = len(envs) == len(self.env_paths)
                role = "teacher" if is_of_all else f"teacher of {', '.join(envs)}"
                paths[role] = self.model_path(name)
        return paths

    @property
    def self_taught(self) -> list[str]:
        """Environments in which the actor is its own teacher."""
        return self.envs_by_teacher.get(SELF, [])

    @property
    def has_teacher_server(self) -> bool:
        """True if a teacher is behind a URL."""
        names = [self.algo.teacher, *(env.teacher for env in self.envs.values())]
        return any(name and is_url(name) for name in names)

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
        """Tokens on one rank of the longest episode, or of both samples of a row."""
        num = 2 if PRESETS[self.algorithm].is_pairs else 1
        return math.ceil(num * self.max_context_tokens / self.cp)
