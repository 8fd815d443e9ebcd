"""The routers of a mixture of experts."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rl_core.models.policy import backbone


def find_routers(hf: PreTrainedModel) -> tuple[OutputRecorder | None, list[nn.Module]]:
    """(transformers' recorder of router outputs, routers by layer); (None, []) for a model without
    experts."""
    text = backbone(hf)
    recorder = (getattr(text, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return None, []
    routers = [m for m in text.modules() if isinstance(m, recorder.target_class)]
    return recorder, [router for router in routers if hasattr(router, "num_experts")]
