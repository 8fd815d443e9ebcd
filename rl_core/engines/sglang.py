"""SGLang as an engine, used through its HTTP server (sglang_server.py).
weight_transfer.py sends new weights to the server.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rl_core.config import Config
from rl_core.engines import sglang_images
from rl_core.engines.server_engine import (
    ANSWER_TIMEOUT_S,
    OF_SERVERS,
    AdapterSlot,
    ServedEngine,
    is_kept,
)
from rl_core.engines.server_process import numbers
from rl_core.engines.sglang_cuda import check_allocator, check_build_tools, check_tp_devices
from rl_core.engines.sglang_images import FAMILIES, VARIABLE, image_data
from rl_core.engines.sglang_server import SGLangServer, check_sglang
from rl_core.engines.sglang_versions import FORGETS_ABORTED, NAMES_SAMPLED_IDS, is_older_than
from rl_core.engines.weight_transfer import TRANSFERS
from rl_core.errors import refuse
from rl_core.models.device import this_device
from rl_core.sampling.engine import EngineSpec
from rl_core.types import Completion, InputImage, JSONObject, RunError, SamplingParams

# SGLang fuses each of these groups into one layer, and loads only adapters of whole groups: missing
# members get zeros.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
INEXACT = (
    "of the actor, of evaluations or of an actor with the same engine, needs SGLang >= 0.5.20: "
    "older versions name more ids than they draw from; leave one of the two out"
)
FOR_IMAGES = (
    "the server of a model that sees is started with rl_core on its PYTHONPATH and with "
    f"{VARIABLE}={sglang_images.__name__}"
)


class SGLangEngine(ServedEngine):
    """See ServedEngine. SGLang ignores the seeds of requests, so tokens are not reproducible. Its
    radix cache finds shared prefixes and evicts the oldest."""

    server_class, transfers = SGLangServer, TRANSFERS
    sees, image_families = True, FAMILIES
    fused, memory = FUSED, ("weights", "kv_cache", "cuda_graph")
    # SGLang applies adapters of these layers in all its models.
    lora_layers = frozenset(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )

    @staticmethod
    def check(config: Config, name: str, is_planned: bool) -> None:
        actor = config.actors[name]
        may_lack = is_planned or bool(actor.servers)
        check_sglang(config.engine_args, may_lack)
        if torch.cuda.is_available() and not may_lack:
            check_build_tools(os.environ)
            num_visible, first = torch.cuda.device_count(), first_gpu(config, os.environ)
            check_tp_devices(config.engine_tp, num_visible, first)
            if config.weight_sync == "device":
                check_allocator(os.environ)
        refuse(OF_SERVERS, f"--actors.{name}", c=config, a=actor)
        check_min_p(config, name)

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        # True once the server is known to name just the ids that it draws from.
        self._names_sampled_ids = self.server.is_own and not is_older_than(NAMES_SAMPLED_IDS)
        self._keeps_top_p = self._has_min_p = False  # Of requests so far.
        # Somebody may update a running server, which keeps features of images through updates.
        self._label = "" if self.server.is_own else uuid.uuid4().hex

    async def allocate(self, tags: list[str]) -> None:
        await self._ask("resume_memory_occupation", {"tags": tags})

    async def free(self, tags: list[str]) -> None:
        await self._ask("release_memory_occupation", {"tags": tags})

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
        ids, stops = self.model_ids(prompt_ids, done), self.stop_token_ids(params)
        body = {"rid": rid, "input_ids": ids, "return_logprob": True}
        body["sampling_params"] = sampling_params(params, stops, max_tokens - len(done.token_ids))
        if images:
            assert self.spec.vision, self.spec.model
            body["image_data"] = image_data(
                images, self.spec.vision, self.transfer.label or self._label
            )
        body |= {"lora_path": slot.folder.name} if slot else {}
        body |= {"return_sampling_mask": True} if is_kept(params) else {}
        try:
            answer = await self._ask("generate", body, timeout_s=None)
        except RuntimeError as error:
            if not images or self.server.is_own:
                raise
            raise RunError(f"{error}; {FOR_IMAGES}") from None
        num_read = answer["meta_info"].get("prompt_tokens", len(ids))
        if images and answer.get("output_ids") and num_read != len(ids):
            raise RunError(f"{self.server} read {num_read} of {len(ids)} tokens; {FOR_IMAGES}")
        if slot and answer["meta_info"]["finish_reason"]["type"] == "abort":
            slot.was_aborted = True
        self._take(answer, done, params, max_tokens)

    async def check_params(self, params: SamplingParams) -> None:
        """See ServedEngine. Raises ValueError if the server names more ids than it draws from,
        because a batch may have requests that keep their ids with top_p, and requests with
        min_p."""
        self._keeps_top_p |= params.keeps_ids and params.top_p < 1
        self._has_min_p |= params.min_p > 0
        if self._names_sampled_ids or not (self._keeps_top_p and self._has_min_p):
            return
        version = (await self._ask("server_info", None)).get("version", "")
        if numbers(version) < NAMES_SAMPLED_IDS:
            raise ValueError(f"{self.server}, version {version}: top_p with min_p, {INEXACT}")
        self._names_sampled_ids = True

    def _take(
        self, answer: dict, done: Completion, params: SamplingParams, max_tokens: int
    ) -> None:
        meta = answer["meta_info"]
        reason, tokens = meta["finish_reason"], answer.get("output_ids") or []
        self.check_label(meta.get("weight_version", self.transfer.label))
        is_aborted = reason["type"] == "abort"
        if is_kept(params):
            masks = meta.get("output_token_sampling_mask") or []
            logprobs = meta.get("output_token_sampling_logprobs") or []
            # An abort in SGLang's queue, after a retraction, leaves the ids out. Such tokens are
            # sampled again.
            tokens = tokens[: len(masks)] if is_aborted else tokens
            if len(masks) != len(tokens):
                raise RuntimeError(
                    f"{self.server} named the ids of {len(masks)} of {len(tokens)} tokens; top_k, "
                    "top_p and min_p in training need SGLang >= 0.5.17"
                )
            done.kept_ids += [" ".join(map(str, ids)) for ids in masks]
        else:
            logprobs = [item[0] for item in meta.get("output_token_logprobs") or []]
        self.add_tokens(done, tokens, logprobs)
        # Not aborted by pause(), which waits for all open requests.
        if is_aborted and self._may_run.is_set():
            raise RuntimeError(f"SGLang aborted a request: {reason.get('message') or reason}")
        is_stop_token = bool(tokens) and tokens[-1] in params.stop_token_ids
        if reason["type"] == "stop" and (isinstance(reason.get("matched"), str) or is_stop_token):
            done.finish_reason = "stop"
        # SGLang also truncates at the model's context and at its memory.
        elif reason["type"] == "length" or len(done.token_ids) >= max_tokens:
            done.finish_reason = "length"
        elif not tokens and not is_aborted:
            raise RuntimeError(f"SGLang gave no token: {reason}")
        # Otherwise the request was paused, or ended at the tokenizer's EOS token, which is not a
        # stop token of this request: generate() sends it again.

    async def abort(self, rid: str = "") -> None:
        await self._ask("abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def drop_cache(self) -> None:
        """See ServedEngine."""
        until = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                await self._ask("flush_cache", {})
                return
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

    async def load_adapter_files(self, folder: Path) -> None:
        await self._ask("load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})

    async def unload_adapter(self, slot: AdapterSlot) -> None:
        if may_unload(slot):
            await self._ask("unload_lora_adapter", {"lora_name": slot.folder.name})


def sampling_params(
    params: SamplingParams, stop_token_ids: list[int], max_tokens: int
) -> JSONObject:
    """Sampling parameters under SGLang's names."""
    sent = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_new_tokens": max_tokens,
        "top_k": params.top_k or -1,
        "skip_special_tokens": False,
        "stop": list(params.stop),
        "stop_token_ids": stop_token_ids,
        "no_stop_trim": True,
    }
    return sent if params.stop or stop_token_ids else sent | {"ignore_eos": True}


def first_gpu(config: Config, environ: Mapping[str, str]) -> int:
    """Number of the first GPU of this rank's server; 0 if another rank starts the server, or if
    ranks are in groups, which SGLangServer checks."""
    is_grouped = config.rollout_ranks or any(actor.ranks for actor in config.actors.values())
    if is_grouped or int(environ.get("RANK", 0)) % config.engine_tp:
        return 0
    return this_device().index or 0


def check_min_p(config: Config, name: str) -> None:
    """Raises ValueError if the installed SGLang names more ids than it draws an actor's tokens
    from."""
    actor, top_p = config.actors[name], config.sampling.top_p
    is_exact = actor.servers or not is_older_than(NAMES_SAMPLED_IDS)
    if is_exact or not actor.is_trained or top_p == 1:
        return
    owner = actor.lora_base or name
    actors = [config.actors[user] for user in (owner, *config.sharers(owner))]
    min_ps = [config.sampling.min_p, *(user.sampling.get("min_p") for user in actors)]
    if any([*min_ps, config.eval.sampling.get("min_p")]):
        raise ValueError(f"--actors.{name}: --sampling.top_p={top_p} with min_p, {INEXACT}")


def may_unload(slot: AdapterSlot) -> bool:
    return not slot.was_aborted or not is_older_than(FORGETS_ABORTED)
