"""Configuration: flags, their help, ranges and rules by subject; command line and YAML ->
Config."""

from rl_core.config.actors import OWN_SECTIONS, ActorConfig, LoraConfig
from rl_core.config.algorithm import (
    RL,
    AlgoConfig,
    CriticConfig,
    PreferenceConfig,
    SftConfig,
)
from rl_core.config.config import Config
from rl_core.config.data import DataConfig, EnvConfig
from rl_core.config.learner import LearnerConfig, OptimConfig
from rl_core.config.online import OnlineConfig
from rl_core.config.parse import (
    checked,
    flat,
    from_sections,
    given_flags,
    known_flags,
    parse_config,
    read_config,
    to_yaml,
)
from rl_core.config.rollout import (
    MAX_TOP_K,
    AgentsConfig,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
)

__all__ = [
    "MAX_TOP_K",
    "OWN_SECTIONS",
    "RL",
    "ActorConfig",
    "AgentsConfig",
    "AlgoConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EnvConfig",
    "EvalConfig",
    "LearnerConfig",
    "LoraConfig",
    "OnlineConfig",
    "OptimConfig",
    "PreferenceConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SftConfig",
    "checked",
    "flat",
    "from_sections",
    "given_flags",
    "known_flags",
    "parse_config",
    "read_config",
    "to_yaml",
]
