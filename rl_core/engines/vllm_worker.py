"""New weights in a worker process of vLLM, by the routes of its weight transfer engines. vLLM
imports this module in each worker (--worker-extension-cls)."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class WorkerExtension:
    """Methods that vLLM adds to its workers, for /collective_rpc."""

    def load_files(self, folder: str) -> None:
        """Loads the weights of a folder, "": of the server's model."""
        self.reload_weights(weights_path=folder or None)
        pack(self.get_model())

    def forget_adapters(self) -> None:
        """Empties all slots. vLLM reads the files of an adapter again at its next request."""
        self.model_runner.lora_manager.remove_all_adapters()


@torch.no_grad()
def pack(model: torch.nn.Module) -> None:
    """Packs new weights on a CPU. vLLM itself packs experts at its start alone, and leaves the
    packed copy of a head that is tied to the embedding as it was."""
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        if not weights or weights[0].device.type != "cpu":
            continue
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
            kernel.fused_experts.process_weights_after_loading(module)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A process group of the rank that broadcasts and the server's ranks; see
    weight_transfer.BroadcastTransfer."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@dataclass
class Blobs(WeightTransferUpdateInfo):
    blobs: list[str]  # Of each rank; see buckets.Bucket.blob().


@dataclass
class Facts(WeightTransferUpdateInfo):
    """Facts of a bucket that is broadcast; see buckets.Bucket.facts()."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class BucketEngine(WeightTransferEngine[InitInfo, Blobs]):
    """Loads buckets in the memory of the process that sends them. The key of the request protects
    the pickles."""

    init_info_cls, update_info_cls = InitInfo, Blobs

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Blobs) -> None:
        blob = update_info.blobs[self.vllm_config.parallel_config.rank]
        self.model.load_weights(weights_of(pickle.loads(base64.b64decode(blob))))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack(self.model)

    def shutdown(self) -> None:
        pass


class BroadcastEngine(BucketEngine):
    """Loads buckets that are broadcast, and no pickles: vLLM leaves its route to everybody."""

    update_info_cls = Facts

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        size, name = init_info.world_size, init_info.group_name
        store = dist.TCPStore(init_info.master_address, init_info.master_port, size, False)
        rank = init_info.rank_offset + self.vllm_config.parallel_config.rank
        self.group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(init_info.backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=default_pg_timeout,
        )

    def receive_weights(self, update_info: Facts) -> None:
        self.model.load_weights(self.received(update_info))

    def received(self, facts: Facts) -> Iterator[tuple[str, torch.Tensor]]:
        dtypes = [getattr(torch, name) for name in facts.dtypes]
        sizes = []
        for shape, dtype in zip(facts.shapes, dtypes, strict=True):
            sizes.append(math.prod(shape) * dtype.itemsize)
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.group.broadcast(flat, 0).wait()
        columns = facts.names, dtypes, facts.shapes, flat.split(sizes)
        for name, dtype, shape, value in zip(*columns, strict=True):
            yield name, value.view(dtype).view(shape)


def weights_of(bucket: dict) -> Iterator[tuple[str, torch.Tensor]]:
    flat = bucket["flattened_tensor"]
    for piece in bucket["metadata"]:
        # A copy, because vLLM may load a layer once all its weights are there, and the sender
        # fills the bucket again.
        value = flat[piece.start_idx : piece.end_idx].clone()
        yield piece.name, value.view(piece.dtype).view(piece.shape)


WeightTransferEngineFactory.register_engine("rl_core", BucketEngine)
WeightTransferEngineFactory.register_engine("rl_core_broadcast", BroadcastEngine)
