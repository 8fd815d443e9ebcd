"""Models that packed attention does not support: the learner runs their forward on padded rows.

This is slower, and exact: no token sees later ones, so that padding on the right changes nothing.

Legend: N rows of at most L tokens, T tokens of a packed batch, M trained tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rl_core.data.packing import pack_samples
from rl_core.distributed import Ranks
from rl_core.learning.minibatches import to_device
from rl_core.models import attention
from rl_core.models.loading import set_attention
from rl_core.models.policy import ForwardPass, Outputs, Policy
from rl_core.types import PackedBatch, TrainingSample

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily

PACKABLE = {"full_attention", "sliding_attention"}
# Samples that probe a model's attention and head: tokens before the trained ones, length, and step
# between token ids. Samples with the same step share a prefix.
PROBE = ((1, 8, 5), (6, 14, 7), (9, 16, 7), (9, 15, 7))
# Errors of a forward on a model that it does not support.
ERRORS = (ValueError, TypeError, AttributeError, RuntimeError, KeyError)
# Largest difference in fp32; mean difference in lower precision.
TOLERANCE_NATS, ROUNDED_TOLERANCE_NATS = 1e-4, 0.25


class PaddedForward:
    """Computes a batch on padded rows with the model's layers."""

    repeats_prompts = True
    calls_outputs = True

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float, outputs: Outputs
    ) -> tuple[Tensor, ...]:
        rows, indices = padded_rows(batch)
        arguments = arguments_of(policy, batch, rows)
        hidden = policy.hidden_states(**arguments)
        width = arguments["input_ids"].shape[1]
        hidden_MD = hidden.flatten(0, 1)[in_width(indices, rows.shape[1], width)]
        return outputs(hidden_MD, batch.labels, temperature)

    def tokens(self, batch: PackedBatch) -> Tensor:
        return padded_rows(batch)[0].flatten()


class FullLogitsForward(PaddedForward):
    """PaddedForward that also uses the model's head, with all logits at once."""

    calls_outputs = False

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float, outputs: Outputs
    ) -> tuple[Tensor, ...]:
        rows, indices = padded_rows(batch)
        arguments = arguments_of(policy, batch, rows)
        with policy.activations():
            logits = policy.hf(**arguments, use_cache=False).logits
        indices = in_width(indices, rows.shape[1], logits.shape[1])
        logits = logits.flatten(0, 1)[indices].float() / temperature
        if batch.labels.ndim == 2:
            from rl_core.learning.truncation import over_support

            return over_support(logits.gather(1, batch.labels.clamp(0)), batch.labels)
        logprobs_MV = logits.log_softmax(-1)
        entropy = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        return logprobs_MV.gather(1, batch.labels[:, None])[:, 0], entropy


def arguments_of(policy: Policy, batch: PackedBatch, rows: Tensor) -> dict[str, Tensor]:
    """Arguments of the model's forward on padded_rows()."""
    if policy.vision is None:
        return {"input_ids": batch.input_ids[rows.clamp(0)]}
    ids = batch.input_ids[rows.clamp(0)].masked_fill(rows < 0, 0)
    return policy.vision.padded(ids, batch.images, policy.is_sharded)


def in_width(indices: Tensor, width: int, wider: int) -> Tensor:
    """Indices of rows of `width` tokens in rows of `wider`."""
    return indices if wider == width else indices // width * wider + indices % width


@torch.no_grad()
def choose_forward(policy: Policy, ranks: Ranks) -> None:
    """Chooses the packed forward if it equals the model's own forward, else the model's forward on
    padded rows."""
    hf, adapter = policy.hf, next(iter(policy.adapters), "")
    kind = own_attention(hf)
    # Images are refused with tp and cp.
    sees = policy.vision is not None and ranks.mesh.tp == ranks.mesh.cp == 1
    family = policy.vision.family if policy.vision is not None and sees else None
    batch = probe_batch(hf.config.get_text_config().vocab_size, ranks.device, family)
    packed, padded = policy.forward_pass, PaddedForward()
    # A new head is 0 everywhere.
    outputs = hidden_outputs if policy.is_scoring else None

    def logprobs_of(forward_pass: ForwardPass, implementation: str) -> Tensor:
        set_attention(hf, implementation)
        policy.use_forward(forward_pass)
        return policy(batch, 1.0, adapter, outputs)[0]

    def difference(forward_pass: ForwardPass, implementation: str) -> str:
        """Reason why this forward differs from the model's; "" if it does not."""
        try:
            error = (logprobs_of(forward_pass, implementation) - expected).abs()
        except ERRORS as problem:
            return str(problem).splitlines()[0]
        # Where weights are NaN, both outputs are.
        if policy.compute_dtype == torch.float32:
            differs = error.max() > TOLERANCE_NATS
        else:
            differs = error.mean() > ROUNDED_TOLERANCE_NATS
        return f"its logprobs differ by {error.max():.2g} nats" if differs else ""

    on_device = nullcontext() if policy.is_on_device else policy.on_device()
    with on_device, torch.compiler.set_stance("force_eager"):
        # A head that is split over ranks cannot give all logits.
        has_no_logits = policy.is_scoring or ranks.mesh.tp > 1
        expected = logprobs_of(padded if has_no_logits else FullLogitsForward(), kind)
        reason = own_layers(hf) or difference(packed, attention.NAME)
        if reason and difference(padded, kind):
            policy.use_forward(FullLogitsForward())
        if isinstance(policy, FSDPModule):
            policy.reshard()  # FSDP reshards only in the backward.
    if reason and ranks.mesh.cp > 1:
        raise ValueError(
            f"--cp={ranks.mesh.cp} splits packed sequences, which this model does not support: "
            f"{reason}; take --cp 1"
        )
    if reason and ranks.rank == 0:
        print(
            f"{hf.name_or_path} is trained on padded rows, which is slower than packed: {reason}",
            flush=True,
        )


def hidden_outputs(hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
    return hidden_MD.float(), hidden_MD


def own_layers(hf: PreTrainedModel) -> str:
    """Reason why custom attention cannot separate the sequences of a batch; "" if it may."""
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ()) - PACKABLE
    if kinds or hf._is_stateful:
        return f"it has layers of kind {min(kinds, default='recurrent')}"
    return "" if hf._can_set_attn_implementation() else "its attention cannot be replaced"


def own_attention(hf: PreTrainedModel) -> str:
    return "sdpa" if hf._supports_sdpa else "eager"


def probe_batch(
    vocab_size: int, device: torch.device, family: ImageFamily | None = None
) -> PackedBatch:
    """A batch of one sequence and a tree of three, all of which begin with an image of the
    family."""
    samples = []
    seen = [] if family is None else family.expand(family.blank)
    for number, (prompt, length, step) in enumerate(PROBE):
        indices = np.arange(length)
        is_own = indices >= prompt
        token_ids = (indices * step + 3 + number * is_own) % vocab_size
        none, is_own = np.zeros(len(seen) + length), np.pad(is_own, (len(seen), 0))
        sample = TrainingSample(
            token_ids=np.array([*seen, *token_ids]),
            images=() if family is None else (family.blank,),
            loss_mask=is_own,
            rollout_logprobs=none,
            policy_versions=none,
            advantages=none,
        )
        samples.append(sample)
    return to_device(pack_samples(samples), device)


def padded_rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(tokens [N, L], the batch's tokens by sequence, shared ones repeated, -1 for padding; [M]
    index into N * L of the token before each trained token)."""
    rows = [torch.from_numpy(path) for path in batch.paths]
    # A rank without samples computes its untrained token.
    rows = rows or [torch.arange(len(batch.input_ids))]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)
    indices = torch.empty(len(batch.input_ids), dtype=torch.long)
    for n, row in enumerate(rows):
        indices[row] = n * tokens.shape[1] + torch.arange(len(row))
    device = batch.input_ids.device
    return tokens.to(device), indices.to(device)[batch.logit_indices]
