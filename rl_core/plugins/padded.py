"""Models that packed attention does not cover: their own forward on padded rows, in the learner.

It is slower, and exact: no token sees what is behind it, so that padding on the right changes
nothing.

N rows of at most L tokens, T tokens of a packed batch, M trained tokens, V vocabulary, S new tokens
of an engine's row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from rl_core.distributed import Ranks
from rl_core.learning import attention
from rl_core.learning.policy import PolicyModel, packed_outputs
from rl_core.types import PackedBatch

PACKABLE = {"full_attention", "sliding_attention"}
# Where a model's own attention and its head are found out: a prompt, a sequence, and two that
# follow the prompt.
PROBE, PARENTS = (9, 7, 6, 5), [-1, -1, 0, 0]
# What a forward that is not made for its model raises.
ERRORS = (ValueError, TypeError, AttributeError, RuntimeError, KeyError)
# The largest difference in fp32; the mean one in less.
TOLERANCE_NATS, ROUNDED_TOLERANCE_NATS = 1e-4, 0.25


@torch.no_grad()
def choose_forward(policy: PolicyModel, ranks: Ranks) -> None:
    """Packed, if that gives what the model's own forward gives; else its own forward on padded
    rows."""
    hf, adapter, own = policy.hf, next(iter(policy.adapters), ""), own_attention(policy.hf)
    batch = probe_batch(hf.config.get_text_config().vocab_size, ranks.device)

    def logprobs(compute: Callable, implementation: str) -> Tensor:
        set_attention(hf, implementation)
        policy.compute = compute
        return policy(batch, 1.0, adapter)[0]

    def difference(compute: Callable, implementation: str) -> str:
        """Why this forward is not the model's; "" if it is."""
        try:
            error = (logprobs(compute, implementation) - expected).abs()
        except ERRORS as problem:
            return str(problem).splitlines()[0]
        # Where weights are NaN, both are.
        is_rounded = policy.compute_dtype != torch.float32
        differs = (
            error.mean() > ROUNDED_TOLERANCE_NATS if is_rounded else error.max() > TOLERANCE_NATS
        )
        return f"its logprobs differ by {error.max():.2g} nats" if differs else ""

    with (
        nullcontext() if policy.is_on_device else policy.on_device(),
        torch.compiler.set_stance("force_eager"),
    ):
        if policy.is_scoring:  # a new head is 0 everywhere
            policy.outputs = lambda hidden_MD, *_: (hidden_MD.float(), hidden_MD)
        # A head that is split over ranks has no logits of its own.
        expected = logprobs(
            padded_outputs if policy.is_scoring or ranks.mesh.tp > 1 else own_outputs, own
        )
        reason = own_layers(hf) or difference(packed_outputs, attention.NAME)
        if reason and difference(padded_outputs, own):
            policy.compute = own_outputs
        if policy.is_scoring:
            del policy.outputs
        if policy.is_sharded:
            policy.reshard()  # FSDP leaves it to the backward
    if reason and ranks.mesh.cp > 1:
        raise ValueError(
            f"--cp={ranks.mesh.cp} cuts packed sequences, which this model does not allow: "
            f"{reason}; take --cp 1"
        )
    if reason and ranks.rank == 0:
        print(
            f"{hf.name_or_path} is trained on padded rows, which is slower than packed: {reason}",
            flush=True,
        )


def own_layers(hf: nn.Module) -> str:
    """Why no exchanged attention can know the sequences of a batch; "" if it may."""
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ()) - PACKABLE
    if kinds or hf._is_stateful:
        return f"it has layers of kind {min(kinds, default='recurrent')}"
    return "" if hf._can_set_attn_implementation() else "its attention cannot be exchanged"


def own_attention(hf: nn.Module) -> str:
    return "sdpa" if hf._supports_sdpa else "eager"


def set_attention(hf: nn.Module, implementation: str) -> None:
    if hf._can_set_attn_implementation() and hf.config._attn_implementation != implementation:
        hf.set_attn_implementation(implementation)


def probe_batch(vocab_size: int, device: torch.device) -> PackedBatch:
    starts = list(itertools.accumulate(PROBE, initial=0))
    _, whole, *after = (torch.arange(*ends) for ends in itertools.pairwise(starts))
    sources = [
        whole[:-1],
        *(torch.cat([torch.tensor([PROBE[0] - 1]), piece[:-1]]) for piece in after),
    ]
    labels = torch.cat([whole[1:], *after])
    ids = torch.arange(starts[-1]).mul(7).add(3) % vocab_size
    first = [0, 0, PROBE[0], PROBE[0]]
    positions = torch.cat([torch.arange(n) + at for n, at in zip(PROBE, first, strict=True)])
    none, order = torch.zeros(len(labels)), torch.arange(3)
    sequences = torch.repeat_interleave(order, torch.tensor([len(part) for part in sources]))
    tensors = {
        "input_ids": ids,
        "position_ids": positions,
        "sources": torch.cat(sources),
        "labels": ids[labels],
    }
    tensors |= {
        "sequences": sequences,
        "order": order,
        "rollout_logprobs": none,
        "advantages": none,
    }
    tensors = {
        name: value.to(device) for name, value in (tensors | {"policy_versions": sequences}).items()
    }
    return PackedBatch(
        cu_seqlens=torch.tensor(starts, dtype=torch.int32), parents=PARENTS, **tensors
    )


def padded_rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(ids [N, L] of sequences, shared prompts in each; where the token before each trained one is
    among N * L)."""
    pieces = [range(a, b) for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]
    both, prompts = enumerate(zip(batch.parents, pieces, strict=True)), set(batch.parents)
    rows = [
        [*(pieces[up] if up >= 0 else ()), *piece] for n, (up, piece) in both if n not in prompts
    ]
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    places = torch.empty(len(batch.input_ids), dtype=torch.long)
    for n, row in enumerate(map(torch.tensor, rows)):
        tokens[n, : len(row)] = row
        places[row] = n * length + torch.arange(len(row))
    device = batch.input_ids.device
    return batch.input_ids[tokens.to(device)], places.to(device)[batch.sources]


def padded_outputs(
    policy: PolicyModel, batch: PackedBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """What PolicyModel.forward gives, by the model's own layers."""
    ids, places = padded_rows(batch)
    return policy.outputs(
        policy.hidden_states(input_ids=ids).flatten(0, 1)[places], batch.labels, temperature
    )


def own_outputs(
    policy: PolicyModel, batch: PackedBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same by its own head too, with all logits at once."""
    ids, places = padded_rows(batch)
    with policy.keeps_activations():
        logits = policy.hf(input_ids=ids, use_cache=False).logits
    logits = logits.flatten(0, 1)[places].float() / temperature
    logprobs_MV = logits.log_softmax(-1)
    entropy = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    return logprobs_MV.gather(1, batch.labels[:, None])[:, 0], entropy
