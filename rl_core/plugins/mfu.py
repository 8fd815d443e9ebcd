"""Model FLOPs utilisation of a learner, on GPUs whose peak is known. Recomputed activations do not
count (PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from rl_core.learning.learner import Learner
from rl_core.learning.minibatches import active_parameters
from rl_core.metrics import Mean, Metric

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


def mfu(
    learner: Learner, packing: dict[str, Metric], seconds: float, device: str
) -> dict[str, Metric]:
    """Of one step; nothing where the peak is not known, or computes in float32."""
    peak = peak_flops(device)
    if peak is None or learner.config.learner.dtype == "float32":
        return {}
    parameters = active_parameters(learner.policy.hf)
    work = packing["pack/fill_frac"].total  # of all ranks, in tokens that see no other
    forwards = learner.algorithm.is_rl and learner.updates_per_step > 1
    forwards += learner.algorithm.needs_reference
    backward = 2 if learner.adapter else 4  # frozen weights have no gradient
    passes = 2 * forwards + (2 + backward) * learner.config.learner.epochs
    return {"mfu": Mean(passes * parameters * work / (seconds * peak * learner.ranks.size))}
