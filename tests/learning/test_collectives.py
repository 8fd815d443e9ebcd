"""Collectives of an update and of a weight sync, against a count by hand. torch's fake process
group has any number of ranks in one process; two meshes are confirmed by gloo in test_mesh.py."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from kit import make_learner
from test_equivalence import draw_model, ragged_samples
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.distributed import Mesh, Ranks, on_mesh
from rl_core.learning.minibatches import shard_samples
from rl_core.models import weight_gathering

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, MLP, WORDS = 3, 32, 4, 2, 16, 64, 128
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": WORDS,
    "tie_word_embeddings": True,
}
MESHES = {
    "dp 2": Mesh(dp_shard=2),
    "dp 4": Mesh(dp_shard=4),
    "dp 8": Mesh(dp_shard=8),
    "hsdp 2 x 2": Mesh(dp_replicate=2, dp_shard=2),
    "hsdp 2 x 4": Mesh(dp_replicate=2, dp_shard=4),
    "dp 2 x cp 2": Mesh(dp_shard=2, cp=2),
    "cp 4": Mesh(cp=4),
    "cp 2 x tp 2": Mesh(cp=2, tp=2),
    "hsdp 2 x cp 2 x tp 2": Mesh(dp_replicate=2, cp=2, tp=2),
}
ON_GLOO = ("hsdp 2 x 2", "cp 2 x tp 2")
Counts = dict[str, tuple[int, int]]


class Calls(TorchDispatchMode):
    """Counts collectives: kind -> (calls, bytes). Bytes of a gather or scatter are those of the
    other ranks' chunks, which a ring moves through each rank; of the others, those of the tensor."""

    def __init__(self):
        super().__init__()
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # It calls collectives with plain tensors.
            return NotImplemented
        name = func._schema.name.split("::")[1]
        if "c10d" in func.namespace:
            kinds = ("reduce_scatter", "gather", "reduce", "send")
            if kind := next((kind for kind in kinds if kind in name), None):
                first, second = (
                    sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, torch.Tensor))
                    for arg in args[:2]
                )
                is_chunked = kind in ("reduce_scatter", "gather")
                self.counts[kind][0] += 1
                self.counts[kind][1] += abs(first - second) if is_chunked else first
        return func(*args, **(kwargs or {}))

    def take(self) -> Counts:
        counts = {kind: (calls, size) for kind, (calls, size) in self.counts.items()}
        self.counts.clear()
        return counts


def count(ranks: Ranks, model) -> tuple[dict[str, Counts], list[list[int]]]:
    """(collectives of each phase, [tokens, trained tokens, most of a cp rank] of this rank's
    microbatches)."""
    flags = "--learner.dtype bfloat16 --learner.microbatch_tokens 100"
    learner = make_learner(model, flags, ranks=ranks)
    alone = Ranks(rank=0, size=1, device=ranks.device)
    budget = dataclasses.replace(learner.budget, num_ranks=1, max_tokens=100)
    parts = learner.algorithm, learner.config, budget, alone, learner.extensions
    [minibatch], _ = shard_samples(ragged_samples(12), *parts)
    sizes = []
    for batch in minibatch.batches:
        shard = batch.shard
        if shard is None:
            sizes.append([len(batch.input_ids), len(batch.labels), 0])
        else:
            sizes.append([len(shard.tokens), len(shard.logit_indices), max(shard.counts)])
    phases = {}
    with Calls() as calls:
        learner.backward(minibatch)
        phases["backward"] = calls.take()
        learner.clip_gradients()
        phases["clip"] = calls.take()
        learner.optimizer.step()
        learner.policy.zero_grad()
        phases["optimizer"] = calls.take()
        for _ in learner.engine_weights(False) or ():
            pass
        phases["sync"] = calls.take()
    return phases, sizes


def by_hand(mesh: Mesh, sizes: list[list[int]]) -> dict[str, Counts]:
    """The collectives of phases whose bytes do not depend on the optimizer."""
    matrices = 2 * WIDTH * HEAD * (HEADS + KV_HEADS) + 3 * WIDTH * MLP
    block = matrices // mesh.tp + 2 * WIDTH + 2 * HEAD
    rest = WORDS * WIDTH // mesh.tp + WIDTH
    n, num, cp = mesh.dp_shard * mesh.cp, len(sizes), mesh.cp

    def others(numbers: int) -> int:
        return numbers * (n - 1) // n

    tokens = sum(size[0] for size in sizes)
    trained, longest = sum(size[1] for size in sizes), sum(size[2] for size in sizes)
    # Blocks are gathered in bf16 for the forward and again for the backward, the rest once.
    gather = [num * (2 * LAYERS + 1), num * 2 * others(rest + 2 * LAYERS * block)]
    # Gradients are scattered in fp32 in each microbatch. Replicas add their shards once an update.
    scatter = [num * (LAYERS + 1), num * 4 * others(rest + LAYERS * block)]
    reduce, send = [0, 0], [0, 0]
    if mesh.dp_replicate > 1:
        reduce = [LAYERS + 1, 4 * (rest + LAYERS * block) // n]
    if cp > 1:
        # Keys and values go round in the forward and in the backward, followed by their gradients,
        # which are in fp32 from their second step on. Logprobs and entropy are gathered.
        kv = 2 * tokens * KV_HEADS // mesh.tp * HEAD * LAYERS
        send = [num * LAYERS * (4 * (cp - 1) + 2 * cp), kv * (2 * 2 * (cp - 1) + 2 + 4 * (cp - 1))]
        gather = [gather[0] + num, gather[1] + (cp - 1) * 2 * longest * 4]
    if mesh.tp > 1:
        # Hidden states: the embedding's, and of each block two in the forward, two in the backward.
        # The head's gradient of hidden states; four numbers of each trained token.
        reduce[0] += num * (4 * LAYERS + 1) + num
        reduce[1] += 2 * WIDTH * (tokens * (4 * LAYERS + 1) + trained)
        gather = [gather[0] + num, gather[1] + (mesh.tp - 1) * 4 * trained * 4]
    backward = {"gather": gather, "reduce_scatter": scatter, "reduce": reduce, "send": send}
    # In bf16, over both dimensions of the mesh.
    sync = [1, 2 * others(rest + LAYERS * block)]
    if mesh.tp > 1:
        sync = [2, sync[1] + 2 * (mesh.tp - 1) * (LAYERS * matrices + WORDS * WIDTH) // mesh.tp]
    return {
        "backward": {kind: (calls, size) for kind, (calls, size) in backward.items() if calls},
        "sync": {"gather": (sync[0], sync[1])},
        "optimizer": {},
    }


@pytest.fixture(scope="session")
def model(made_once):
    return made_once("collectives", lambda folder: draw_model(folder, "qwen3", **SIZES))


def on_fake_ranks(mesh: Mesh, model) -> tuple[dict[str, Counts], list[list[int]]]:
    """count() on rank 0 of a process group that moves nothing."""
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        ranks = Ranks(rank=0, size=mesh.size, device=torch.device("cpu"))
        return count(on_mesh(ranks, mesh), model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MESHES)
def test_collectives_are_as_counted_by_hand(name, model):
    mesh = MESHES[name]
    phases, sizes = on_fake_ranks(mesh, model)
    assert len(sizes) > 1
    clip = phases.pop("clip")
    assert phases == by_hand(mesh, sizes)
    # A norm of all gradients; with tp of both meshes, and the gradients of split heads' norms.
    assert clip["reduce"][0] == (4 if mesh.tp > 1 else 1) and len(clip) == 1


def test_weights_that_exceed_a_group_travel_in_several(model, monkeypatch):
    """A model of any size is gathered in a bounded memory: a matrix by its columns."""
    monkeypatch.setattr(weight_gathering, "GROUP_BYTES", 1)
    phases, _ = on_fake_ranks(MESHES["dp 4"], model)
    of_layer = 5 * WIDTH + HEADS * HEAD + MLP + 4  # Four norms.
    assert phases["sync"]["gather"][0] == LAYERS * of_layer + WIDTH + 1
