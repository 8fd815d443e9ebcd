"""Model FLOPs utilization of a learner, on GPUs with a known peak. Recomputed activations do not
count (PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

import torch

from rl_core.learning.learner import Learner
from rl_core.learning.minibatches import active_parameters
from rl_core.learning.teachers.distill import SampledTeacher
from rl_core.metrics import Mean, Metric
from rl_core.plugin import Plugin, RunState

# Dense bfloat16 of a GPU, by words of torch's name for it, the longer first.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "H800": 989,
    "H20": 148,
    "B200": 2250,
    "GB200": 2500,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A10": 125,
    "A10G": 70,
    "A6000": 155,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "3090": 71,
    "4090": 165,
    "5090": 210,
}


def peak_flops(name: str) -> float | None:
    words = set(name.replace("-", " ").split())
    return next(
        (peak * 1e12 for known, peak in PEAK_TFLOPS.items() if words >= set(known.split())), None
    )


class Mfu(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.peak = peak_flops(torch.cuda.get_device_name())
        self.before = (0.0, 0.0)  # Work and seconds of the actors that learned before this one.

    async def before_learn(self, actor: str, step: int) -> None:
        self.before = self.so_far()

    async def after_sync(self, actor: str, version: int) -> None:
        work, seconds = self.so_far()
        if work:
            work, seconds = work - self.before[0], seconds - self.before[1]
            learner = self.trainer.learners[actor]
            self.trainer.add_metrics(f"learn/{actor}/", mfu(learner, work, seconds, self.peak))

    def so_far(self) -> tuple[float, float]:
        """(work of all ranks in this step, in tokens without attention, and its duration in
        seconds)."""
        totals = []
        for name in ("pack/fill_frac", "time/learn_s"):
            metric = self.trainer.metrics.get(name, Mean())
            assert isinstance(metric, Mean), name
            totals.append(float(metric.total))
        return totals[0], totals[1]


def mfu(learner: Learner, work: float, seconds: float, peak: float | None) -> dict[str, Metric]:
    """MFU of one step; {} if the peak is unknown, or in float32."""
    if peak is None or learner.config.learner.dtype == "float32":
        return {}
    parameters = active_parameters(learner.policy.hf)
    # The policy reads half of KTO's samples without a gradient, and half with one.
    share = 0.5 if learner.algorithm.objective == "kto" else 1.0
    forwards = float(learner.algorithm.is_rl and learner.updates_per_step > 1)
    forwards += learner.algorithm.needs_reference + (1 - share)
    backward = 2 if learner.adapter else 4  # Frozen weights have no gradient.
    passes = 2 * forwards + (2 + backward) * learner.config.learner.epochs * share
    flops = passes * parameters + 2 * read_parameters(learner)
    return {"mfu": Mean(flops * work / (seconds * peak * learner.ranks.size))}


def read_parameters(learner: Learner) -> float:
    """Parameters that a token passes in an actor's teachers; the mean over the teachers of
    environments."""
    sizes = []
    for extension in learner.extensions:
        if isinstance(extension, SampledTeacher):
            sizes += [active_parameters(model.hf) for model in extension.models]
    return sum(sizes) / max(1, len(sizes))
