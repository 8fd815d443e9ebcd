"""vLLM as an engine, used through its HTTP server (vllm_server.py): the route of tokens in and out,
and the routes that pause the server and update its weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.engines.buckets import Bucket, in_flat_buckets
from rl_core.engines.remote import ask
from rl_core.engines.server_engine import OF_SERVERS, AdapterSlot, ServedEngine, is_kept
from rl_core.engines.vllm_images import FAMILIES, image_features
from rl_core.engines.vllm_server import VLLMServer, check_vllm, missing_flags
from rl_core.engines.weight_transfer import (
    BroadcastTransfer,
    BucketsTransfer,
    FilesTransfer,
    Transfer,
    keeps_backup,
)
from rl_core.errors import refuse
from rl_core.sampling.engine import EngineDied, EngineSpec
from rl_core.types import (
    Completion,
    InputImage,
    JSONObject,
    RunError,
    SamplingParams,
    counter_seed,
)

LOWEST = -9999.0  # vLLM's number for a logprob of -inf, and for NaN.
# More ids than top_k are asked for, because vLLM keeps all ids whose logits equal the last one's.
NUM_TIED = 32
HEALTH_S = 10.0
PAUSE, RESUME = "pause?mode=abort&clear_cache=true", "resume"


class VLLMFiles(FilesTransfer):
    """Files that the server's workers read anew. vLLM drops the KV cache at a pause."""

    is_atomic = False

    async def load(self) -> None:
        folder = self.folder
        assert folder is not None, "take() comes first"
        await self.ask(PAUSE, {})
        await self.ask("collective_rpc", {"method": "load_files", "args": [str(folder)]})
        await self.ask("update_weight_version", {"new_version": self.label})
        await self.ask(RESUME, {})
        self.num_bytes += sum(file.stat().st_size for file in folder.iterdir())


class VLLMDevice(BucketsTransfer):
    """Buckets whose memory the run's own server maps (vllm_worker.py): CUDA IPC, or shared memory
    on a CPU."""

    async def load(self) -> None:
        if not self.label:
            # The server starts with the weights of its model.
            await self.ask("collective_rpc", {"method": "load_files", "args": [""]})
            return
        await super().load()

    async def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        spec = self.spec
        await self.ask(PAUSE, {})
        await self.ask("start_weight_update", {})
        for bucket in in_flat_buckets(weights, spec.dtype, spec.device, self.bucket_bytes):
            if spec.device.type == "cuda":
                torch.cuda.synchronize(spec.device)  # Another process reads the bucket.
            await self.send_bucket(bucket, {})
            self.num_bytes += bucket.num_bytes
        await self.ask("finish_weight_update", {"weight_version": self.label})
        await self.ask(RESUME, {})

    async def send_bucket(self, bucket: Bucket, body: JSONObject) -> None:
        # Each rank of the server opens a separate handle: handles are counted.
        blobs = [bucket.blob() for _ in range(self.spec.server.tp)]
        await self.ask("update_weights", {"update_info": {"blobs": blobs}})


class VLLMBroadcast(BroadcastTransfer, VLLMDevice):
    """See BroadcastTransfer and vllm_worker.BroadcastEngine."""

    sent = ""  # Label of the weights that the server got last.

    async def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if (await self.ask("weight_info", None))["weight_version"] != self.sent:
            self.group = None  # The server was started anew.
        await super().send(weights)
        self.sent = self.label

    async def num_ranks(self) -> int:
        return (await self.ask("get_world_size", None))["world_size"]

    async def ask_to_join(self, body: JSONObject) -> JSONObject:
        return await self.ask("init_weight_transfer_engine", {"init_info": body})

    async def ask_to_receive(self, bucket: Bucket, body: JSONObject) -> JSONObject:
        return await self.ask("update_weights", {"update_info": bucket.facts()})


class VLLMEngine(ServedEngine):
    """See ServedEngine. A request's seed gives its tokens, up to rounding, which depends on the
    requests that are computed together."""

    server_class, sees, image_families = VLLMServer, True, FAMILIES
    transfers: ClassVar[dict[str, type[Transfer]]] = {
        "files": VLLMFiles,
        "device": VLLMDevice,
        "broadcast": VLLMBroadcast,
    }
    lora_layers = frozenset(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )

    @staticmethod
    def check(config: Config, name: str, is_planned: bool) -> None:
        actor = config.actors[name]
        check_vllm(config.engine_args, is_planned or bool(actor.servers))
        refuse(OF_SERVERS, f"--actors.{name}", c=config, a=actor)

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        # vLLM refuses its sleep mode on a CPU.
        self.memory = () if spec.device.type == "cpu" else ("kv_cache", "weights")

    async def is_broken(self) -> bool:
        """See ServedEngine. vLLM samples in another process than the one that answers."""
        try:
            status, _ = await ask(f"{self.server.url}/health", None, self.server.key, HEALTH_S)
        except EngineDied:
            return True
        return status == 503

    async def check_server(self) -> None:
        """See ServedEngine."""
        try:
            info = await self._ask("server_info?config_format=json", None)
        except RuntimeError as error:
            raise RunError(
                f"{error}; engine_urls needs the address of each vLLM server, started with "
                "VLLM_SERVER_DEV_MODE=1. A router would pause and update one of its servers"
            ) from None
        if flags := missing_flags(info, self.spec):
            raise RunError(f"{self.server} was not started with {' '.join(flags)}")

    async def allocate(self, tags: list[str]) -> None:
        await self._ask("wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})

    async def free(self, tags: list[str]) -> None:
        if tags == ["kv_cache"]:
            await self._ask("release_kv_cache_memory", {})
        else:
            await self._ask(f"sleep?level={1 if keeps_backup(self.spec) else 2}", {})

    async def sample(
        self,
        done: Completion,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        slot: AdapterSlot | None,
        rid: str,
        seed: int,
        images: Sequence[InputImage],
    ) -> None:
        num_ids = self._num_ids(params) if is_kept(params) else 0
        # A continued request draws other random numbers than its first tokens did.
        seed = counter_seed(seed, "vllm", len(done.token_ids)) % 2**31
        ids, stops = self.model_ids(prompt_ids, done), self.stop_token_ids(params)
        body = {"request_id": rid, "token_ids": ids}
        if images:
            vision, dtype = self.spec.vision, self.spec.dtype
            assert vision, self.spec.model
            body["features"] = await asyncio.to_thread(
                image_features, images, prompt_ids, vision, dtype
            )
        left = max_tokens - len(done.token_ids)
        body["sampling_params"] = sampling_params(params, stops, left, seed)
        body["sampling_params"]["logprobs"] = num_ids
        body |= {"model": slot.folder.name} if slot else {}
        answer = await self._ask("inference/v1/generate", body, timeout_s=None)
        self._take(answer["choices"][0], done, params, max_tokens, num_ids)

    def _num_ids(self, params: SamplingParams) -> int:
        return min(params.top_k + NUM_TIED, self.spec.module.config.get_text_config().vocab_size)

    def _take(
        self,
        choice: JSONObject,
        done: Completion,
        params: SamplingParams,
        max_tokens: int,
        num_ids: int,
    ) -> None:
        tokens, items = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        for span in choice.get("weight_versions") or ():
            self.check_label(span["version"])
        logprobs = [item["logprob"] for item in items]
        if any(value is None or value <= LOWEST for value in logprobs):
            logprobs = [math.nan]
        self.add_tokens(done, tokens, logprobs)
        if num_ids:
            done.kept_ids += [kept_ids(item["top_logprobs"], params.top_k) for item in items]
        reason, stop = choice["finish_reason"], choice.get("stop_reason")
        if reason == "abort" and self._may_run.is_set():
            raise RuntimeError("vLLM aborted a request")
        is_stop_token = bool(tokens) and tokens[-1] in params.stop_token_ids
        if reason == "stop" and (isinstance(stop, str) or is_stop_token):
            done.finish_reason = "stop"
        elif reason == "length" or len(done.token_ids) >= max_tokens:
            done.finish_reason = "length"
        elif not tokens and reason != "abort":
            raise RuntimeError(f"vLLM gave no token: {reason}")

    async def abort(self, rid: str = "") -> None:
        """See ServedEngine. A request whose connection is closed is ended by the server itself."""
        if not rid:
            await self._ask("abort_requests", {})

    async def drop_cache(self) -> None:
        await self._ask(PAUSE, {})
        await self._ask(RESUME, {})

    async def load_adapter_files(self, folder: Path) -> None:
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        await self._ask("v1/load_lora_adapter", body)

    async def unload_adapter(self, slot: AdapterSlot) -> None:
        await self._ask("v1/unload_lora_adapter", {"lora_name": slot.folder.name})
        if self.spec.device.type == "cpu":
            # Unloaded adapters keep their slots in the workers; see server_args().
            await self._ask("collective_rpc", {"method": "forget_adapters"})


def sampling_params(
    params: SamplingParams, stop_token_ids: list[int], max_tokens: int, seed: int
) -> JSONObject:
    """Sampling parameters under vLLM's names."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_tokens": max_tokens,
        "top_k": params.top_k or 0,
        "seed": seed,
        "stop": list(params.stop),
        "stop_token_ids": stop_token_ids,
        "include_stop_str_in_output": True,
        # Stop strings alone need the text.
        "detokenize": bool(params.stop),
        "ignore_eos": True,
    }


def kept_ids(candidates: list[JSONObject], top_k: int) -> str:
    """The ids that a token was drawn from: those with a probability. Raises RuntimeError if more
    ids were kept than vLLM named."""
    kept = {one["token_id"]: one["logprob"] for one in candidates if one["logprob"] > LOWEST}
    if abs(sum(map(math.exp, kept.values())) - 1) > 1e-3:
        raise RuntimeError(f"{top_k=}: vLLM drew from more ids than the {len(kept)} that it named")
    return " ".join(map(str, kept))
