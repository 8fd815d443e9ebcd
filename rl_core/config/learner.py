"""Flags of the learner and its optimizer."""

import math
from dataclasses import dataclass
from typing import Literal

from rl_core.config.flag_parsing import Section
from rl_core.flags import AtLeast1, Count, Fraction, NotNegative, flag

WSD_DECAY_FRAC = 0.2


@dataclass(kw_only=True)
class OptimConfig(Section, prefix="optim."):
    name: str = flag(
        "adamw", "optimizer; adamw8bit: of bitsandbytes; muon: matrices, AdamW the rest"
    )
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
    init_from: str | None = flag(
        None, "run or checkpoint whose optimizer state a new run starts from"
    )

    def lr_at(self, step: float, num_steps: int) -> float:
        """The learning rate of an update that starts `step` (a fraction for later minibatches) of
        num_steps. wsd: constant until the last fifth of the run, then linear (Hu et al. 2024,
        arXiv:2404.06395, section 4)."""
        warmup = self.warmup_steps or self.warmup_frac * num_steps
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, num_steps - warmup)
        heights = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "wsd": min(1.0, (num_steps - step) / (WSD_DECAY_FRAC * max(1, num_steps))),
        }
        return self.lr * (self.min_lr_frac + (1 - self.min_lr_frac) * heights[self.schedule])


PARTS = ("vision", "projector", "language")  # Of a model that sees.


@dataclass(kw_only=True)
class LearnerConfig(Section, prefix="learner."):
    updates_per_epoch: AtLeast1 = flag(
        1, "optimizer updates (minibatches) of one epoch, each on its share of the tasks"
    )
    epochs: AtLeast1 = flag(1, "passes over the episodes of a step")
    microbatch_tokens: AtLeast1 = flag(8192, "tokens of one forward and backward on a rank, packed")
    logprob_microbatch_tokens: Count | Literal["auto"] = flag(
        0, "tokens of a forward without gradient (old logprobs); 0: microbatch_tokens; auto"
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
    train: str | None = flag(
        None, "parts of a model that sees: some of vision,projector,language; default: all"
    )


# c: the configuration, with the actor's own settings.
OF_INFERENCE = [
    (
        lambda c: (
            c.learner.logprob_microbatch_tokens != "auto"
            and c.learner.logprob_microbatch_tokens < 2 * c.learner.microbatch_tokens
        ),
        "--learner.logprob_microbatch_tokens={c.learner.logprob_microbatch_tokens} must be at "
        "least twice "
        "--learner.microbatch_tokens={c.learner.microbatch_tokens}, since whole microbatches are "
        "joined; raise it, or leave it out",
    ),
    (
        lambda c: c.cp > 1,
        "--learner.logprob_microbatch_tokens cannot join sequences that --cp={c.cp} splits; "
        "leave one out",
    ),
    (
        lambda c: c.algo.teacher == "self" or c.algo.teacher_loss not in (None, "sampled"),
        "--learner.logprob_microbatch_tokens cannot be combined with --algo.teacher self, nor "
        "with an "
        "--algo.teacher_loss other than sampled; leave it out",
    ),
    (
        lambda c: any(env.teacher for env in c.envs.values()),
        "--learner.logprob_microbatch_tokens cannot be combined with --envs.NAME.teacher; leave "
        "it out",
    ),
]

# Flags for which torch, or a library, lacks operators on an Apple GPU. c: as above.
OF_MPS = [
    (
        lambda c: c.engine not in ("auto", "embedded") or any(a.servers for a in c.actors.values()),
        "--device=mps samples with the embedded engine alone; leave out --engine={c.engine} and "
        "engine_urls, or --device",
    ),
    (
        lambda c: c.learner.dtype not in ("auto", "float32"),
        "--device=mps trains in float32, since FSDP's mixed precision does not support MPS; leave "
        "out --learner.dtype={c.learner.dtype}, or --device",
    ),
    (
        lambda c: c.learner.offload != "none" or c.learner.activations == "offload",
        "--device=mps offloads nothing: an Apple GPU has the CPU's memory. Leave out "
        "--learner.offload and --learner.activations=offload, or --device",
    ),
    (
        lambda c: c.learner.kernels != "default",
        "--device=mps is incompatible with --learner.kernels={c.learner.kernels}; leave one out",
    ),
    (
        lambda c: (
            c.optim.name == "adamw8bit" or any(a.lora.quantize != "none" for a in c.actors.values())
        ),
        "--device=mps has no kernels of bitsandbytes; leave out --optim.name=adamw8bit and "
        "lora.quantize, or --device",
    ),
]
