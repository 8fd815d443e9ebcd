"""rl_core: reinforcement learning for language models with torchrun and nothing else."""

__version__ = "0.1.0"
