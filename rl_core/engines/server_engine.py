"""An engine behind the HTTP server of a separate process (server_process.py): its life, requests,
weights and adapters. sglang.py and vllm.py add the routes of their servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import safetensors.torch
import torch
from torch import Tensor, nn

from rl_core.engines.adapters import adapter_targets, arriving_adapter
from rl_core.engines.remote import ask
from rl_core.engines.requests import check_logprobs, check_request, decoded, note_version
from rl_core.engines.server_process import ServerProcess
from rl_core.engines.weight_transfer import (
    Transfer,
    choose_transfer,
    described_transfer,
    keeps_backup,
)
from rl_core.engines.weights import checkpoint_weights, on_host
from rl_core.errors import keep_ends
from rl_core.metrics import Metric, Sum
from rl_core.models.cpu_offload import release_cached_memory
from rl_core.sampling.engine import Engine, EngineDied, EngineSpec, WeightOwner
from rl_core.types import Completion, InputImage, JSONObject, SamplingParams

# (condition, message of the error). c: the configuration; a: the actor.
OF_SERVERS = [
    (lambda c, a: c.deterministic, ": --deterministic=true needs --engine embedded"),
    (
        lambda c, a: c.weight_sync == "device" and a.servers,
        ".engine_urls: --weight_sync=device needs a server that the run itself starts on its "
        "device; take broadcast or files",
    ),
    (
        lambda c, a: c.weight_sync == "broadcast" and not a.servers,
        ": --weight_sync=broadcast is for servers that run already, on separate GPUs "
        "(--actors.NAME.engine_urls); take device or files",
    ),
    (
        lambda c, a: a.lora_base and c.actors[a.lora_base].lora.quantize != "none",
        ".lora_base={a.lora_base}: only an embedded engine reads a shared model in 4 bits; take "
        "--engine embedded",
    ),
    (
        lambda c, a: a.router_replay,
        ".router_replay=true needs --engine embedded, which records the experts of each token",
    ),
]
ANSWER_TIMEOUT_S = 600.0  # Not for sampling, which the episode's deadline limits.
MAX_STARTS = 3  # Attempts to restart a server that died.
NO_WEIGHTS_POLL_S = 0.05


@dataclass(kw_only=True, slots=True)
class AdapterSlot:
    """An actor's adapter on the server."""

    version: int
    # Unique name per version: SGLang keeps the old adapter if a name is repeated.
    folder: Path
    was_aborted: bool = False  # True if a request for this adapter was aborted.


class ServedEngine(Engine):
    """See Engine. The server starts at the first call. A subclass has the requests of its server:
    the methods that raise NotImplementedError."""

    weight_owner = WeightOwner.SERVER
    server_class: ClassVar[type[ServerProcess]]
    transfers: ClassVar[dict[str, type[Transfer]]]  # Values of --weight_sync.
    # Layers that the server fuses: it loads only adapters of whole groups.
    fused: ClassVar[tuple[tuple[str, ...], ...]] = ()
    memory: tuple[str, ...]  # Tags of the memory that a sleeping server frees.

    def __init__(self, spec: EngineSpec):
        self.spec, self.server = spec, self.server_class(spec)
        self.weight_transfer = described_transfer(spec)
        self.transfer = self.transfers[choose_transfer(spec)](spec, self._ask)
        self.version, self.capacity, self._num_restarts = 0, spec.num_slots, 0
        self._is_started = False  # True once the newest weights and adapters are loaded.
        self._is_closed = False
        self._slots: dict[str, AdapterSlot] = {}  # Key: actor.
        self._needs_update = False  # True if the running server lacks weights.
        self._asleep: set[str] = set()  # Released tags of `memory`.
        self._changing, self._loading = asyncio.Lock(), asyncio.Lock()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._num_asked = 0  # Open sampling requests.
        self._aborts: set[asyncio.Task] = set()

    @property
    def lacks_weights(self) -> bool:
        """See Engine. False while the server is dead: it must restart first."""
        return self._needs_update and self._is_started and self.server.is_alive

    async def wake(self) -> None:
        """Starts the server, or restarts it with the same weights if it died, and allocates the
        memory that sleep() freed. Waits for resume() first, because a learner may use the device
        while the engine is paused."""
        await self._may_run.wait()
        await self._be_awake(restarts=True)

    async def _be_awake(
        self, tags: Iterable[str] | None = None, restarts: bool = False, loads: bool = True
    ) -> None:
        """Wakes `tags`, None: all. Without `loads`, the caller loads the weights."""
        tags = self.memory if tags is None else tags
        async with self._changing:
            if not self._is_started or (restarts and not self.server.is_alive):
                release_cached_memory()
                await self._start(loads)
            if not keeps_backup(self.spec) and "weights" in self._asleep.intersection(tags):
                # The learner may need the rest of the device to gather them.
                await self._resume(["weights"])
                if loads:
                    await self._load()
            await self._resume(tags)

    async def _resume(self, tags: Iterable[str]) -> None:
        if asleep := sorted(self._asleep.intersection(tags)):
            release_cached_memory()
            await self.allocate(asleep)
            self._asleep.difference_update(asleep)

    async def _start(self, loads: bool) -> None:
        """Starts the server. A restart of the run's own server is tried MAX_STARTS times, because
        the memory of the dead server may not be free yet."""
        num_tries = MAX_STARTS if self._is_started and self.server.is_own else 1
        self._num_restarts += self._is_started
        self._is_started = False
        for number in range(1, num_tries + 1):
            try:
                await self._start_once(loads)
            except EngineDied as error:
                if number == num_tries or self._is_closed:
                    raise
                print(
                    f"warning: {error}\n{self.server} is started again ({number + 1} of "
                    f"{num_tries})",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                return

    async def _start_once(self, loads: bool) -> None:
        self._asleep = set()
        await self.server.start()
        if not self.server.is_own:
            await self.check_server()
        if self.transfer.label and loads:
            if self.server.is_own and not keeps_backup(self.spec):
                await self._release(["kv_cache"])  # The learner needs the device too.
            await self._load()
        for slot in self._slots.values():
            await self.load_adapter_files(slot.folder)
        self._is_started = True

    async def _release(self, tags: Iterable[str]) -> None:
        await self.free(sorted(tags))
        self._asleep.update(tags)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        unfinished: Completion | None = None,
        images: Sequence[InputImage] = (),
    ) -> Completion:
        spec = self.spec
        check_request(prompt_ids, params, spec.max_context_tokens)
        assert not adapter or adapter in self._slots, adapter
        max_tokens = min(params.max_tokens, spec.max_context_tokens - len(prompt_ids))
        done = unfinished or Completion()
        while not done.finish_reason:
            await self._may_run.wait()
            await self._be_awake()
            await self.check_params(params)
            if self.lacks_weights:
                await asyncio.sleep(NO_WEIGHTS_POLL_S)
            # A pause may have come meanwhile; nothing is awaited from here to the request.
            elif self._may_run.is_set():
                await self._extend(done, prompt_ids, params, max_tokens, adapter, seed, images)
        if spec.tokenizer is not None:
            done.text = decoded(spec.tokenizer, done.token_ids)
        return done

    async def _extend(
        self,
        done: Completion,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        adapter: str,
        seed: int,
        images: Sequence[InputImage],
    ) -> None:
        """Samples tokens until the end of the completion or the next pause."""
        slot, rid = self._slots.get(adapter), uuid.uuid4().hex
        note_version(done, slot.version if slot else self.version)
        self._num_asked += 1
        try:
            await self.sample(done, prompt_ids, params, max_tokens, slot, rid, seed, images)
        except asyncio.CancelledError:
            self._aborts.add(task := asyncio.create_task(self._abort(rid)))
            task.add_done_callback(self._aborts.discard)
            if slot:
                slot.was_aborted = True
            raise
        finally:
            self._num_asked -= 1

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineDied):
            await self.abort(rid)

    async def update(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        """See Engine. Checks names and shapes first, because servers ignore unknown names or
        crash on wrong shapes. A server that is dead, or dies meanwhile, gets the weights when
        wake() restarts it."""
        assert weights is not None, "the server does not share the learner's weights"
        self._check_idle()
        if adapter:
            await self._send_adapter(adapter, weights, version)
        else:
            await self._send_weights(weights)
            self.version = version

    async def _send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # Servers expect the names of published checkpoints.
        self.transfer.take(checkpoint_weights(self.spec.module, weights))
        try:
            if self._is_served:
                with contextlib.suppress(EngineDied):
                    await self._be_awake(["weights"], restarts=True, loads=False)
                    await self._load()
                    await self.drop_cache()
        finally:
            self.transfer.drop()

    async def _load(self) -> None:
        """Loads the newest weights. The server is stopped if loading is interrupted, because its
        weights are then unknown."""
        self._needs_update = not self.transfer.has_weights
        if self._needs_update:
            return
        try:
            await self.transfer.load()
        except BaseException:
            if not self.transfer.is_atomic:
                self.server.stop()
            raise

    @property
    def _is_served(self) -> bool:
        """False if the run's own server is dead: updates wait for its next start, by generate() or
        wake(). No update starts the server, because a learner may use the device, and the server
        would take its share of the remaining memory only."""
        return self.server.is_alive or not self.server.is_own

    async def _send_adapter(
        self, actor: str, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        config, old = self.spec.adapters[actor], self._slots.get(actor)
        arrived = arriving_adapter(actor, weights, config, self.spec.module)
        module, dtype = self.spec.module, self.spec.dtype
        files = adapter_files(arrived, config, module, dtype, self.fused)
        folder = self.transfer.files.write(files, f"{actor}_")
        if self._is_served:
            with contextlib.suppress(EngineDied):
                await self._be_awake((), restarts=True)  # Adapters have slots while it sleeps.
                await self.load_adapter_files(folder)
        self._slots[actor] = AdapterSlot(version=version, folder=folder)
        if old is not None:
            self.transfer.files.remove(old.folder)
            if self._is_served:
                with contextlib.suppress(EngineDied):
                    await self.unload_adapter(old)

    async def load_adapter(self, weights: Iterable[tuple[str, Tensor]], *, adapter: str) -> None:
        """See Engine. One adapter at a time, because the server has one slot to spare."""
        async with self._loading:
            old = self._slots.get(adapter)
            await self._send_adapter(adapter, weights, old.version + 1 if old else 1)

    def _check_idle(self) -> None:
        if self._num_asked and self._may_run.is_set():
            raise RuntimeError(
                f"{self._num_asked} requests are running; await or cancel them, or pause the engine"
            )

    async def sleep(self) -> None:
        """See Engine. A server that the run did not start keeps its memory."""
        self._check_idle()
        if not self.server.is_own or not self.server.is_alive or self._asleep == set(self.memory):
            return
        with contextlib.suppress(EngineDied):
            # Waits for cancelled requests too: servers crash if memory is released during
            # requests.
            await self.drop_cache()
            async with self._changing:
                await self._release(set(self.memory) - self._asleep)

    async def pause(self) -> None:
        """See Engine. Aborts open requests on the server; after resume(), generate() sends them
        again with their tokens. Meanwhile the server may sleep, restart and load weights."""
        self._may_run.clear()
        # Waits for the tokens of open requests. A concurrent resume() also ends the loop: by then
        # each request has returned its tokens.
        while self._num_asked and self.server.is_alive and not self._may_run.is_set():
            with contextlib.suppress(EngineDied):
                await self.abort()
            await asyncio.sleep(0.02)  # A request may reach the server after the abort.

    async def resume(self) -> None:
        self._may_run.set()

    async def update_unfinished(self) -> None:
        """See Engine. Open requests are sent again with their tokens. Several learners may call
        this concurrently."""
        was_running = self._may_run.is_set()
        await self.pause()
        if was_running:
            await self.resume()

    async def take_metrics(self) -> dict[str, Metric]:
        """See Engine."""
        num_restarts, self._num_restarts = self._num_restarts, 0
        num_bytes, self.transfer.num_bytes = self.transfer.num_bytes, 0
        name = self.spec.name
        metrics: dict[str, Metric] = {f"rollout/{name}/engine_restarts": Sum(num_restarts)}
        if num_bytes:
            metrics[f"sync/{name}/{choose_transfer(self.spec)}_mib"] = Sum(num_bytes / 2**20)
        return metrics

    async def close(self) -> None:
        """Kills the server if the run started it. Callers that wait for it get EngineDied."""
        self._is_closed = True
        self.server.stop()
        self.transfer.close()

    async def _ask(
        self, path: str, body: JSONObject | None, timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> JSONObject:
        """The response's JSON object, or {} for any other response. Raises RuntimeError if the
        server refuses the request."""
        if not self.server.is_alive:
            raise self.server.died("has died")
        number = self.server.num_starts
        try:
            status, content = await ask(
                f"{self.server.url}/{path}", body, self.server.key, timeout_s
            )
        except EngineDied as error:
            raise await self.server.lost(number, str(error)) from None
        reply = keep_ends(content.decode(errors="replace"), 500)
        if status >= 500 and await self.is_broken():
            raise await self.server.lost(number, f"has died: {reply!r}")
        response = json.loads(content) if content.startswith(b"{") else {}
        # SGLang reports some refusals with status 200.
        if status != 200 or response.get("success") is False:
            raise RuntimeError(f"{self.server} refused /{path} with {status}: {reply!r}")
        return response

    def check_label(self, label: str) -> None:
        """Stops the server and raises EngineDied if its weights are not the newest ones."""
        if self.transfer.label and label != self.transfer.label:
            self.server.stop()
            raise self.server.died(
                "sampled with other weights than rl_core sent: somebody restarted or updated it, "
                "or the address is a router's"
            )

    def model_ids(self, prompt_ids: list[int], done: Completion) -> list[int]:
        """The ids of a request so far, as the model reads them."""
        ids, vision = [*prompt_ids, *done.token_ids], self.spec.vision
        return vision.model_ids(ids) if vision else ids

    def stop_token_ids(self, params: SamplingParams) -> list[int]:
        """The tokens at which the server ends a request. After a sampled placeholder of an image
        the rest is a new request, in which model_ids() replaces the placeholder."""
        vision = self.spec.vision
        return [*params.stop_token_ids, *(vision.media_ids if vision else ())]

    @staticmethod
    def add_tokens(done: Completion, tokens: list[int], logprobs: list[float]) -> None:
        check_logprobs(logprobs)
        assert len(logprobs) == len(tokens), (len(logprobs), len(tokens))
        done.token_ids += tokens
        done.logprobs += logprobs

    async def is_broken(self) -> bool:
        """True if the server answers although its engine has died."""
        return False

    async def check_server(self) -> None:
        """Raises RunError if a server that runs already lacks a setting that the run needs."""

    async def allocate(self, tags: list[str]) -> None:
        """Allocates memory that free() has freed."""
        raise NotImplementedError

    async def free(self, tags: list[str]) -> None:
        """Frees memory of the server."""
        raise NotImplementedError

    async def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError if the server cannot sample with these parameters."""

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
        """Sends one request and adds its tokens to `done`, with a finish_reason if they end the
        completion of at most `max_tokens`. `images`: of the prompt."""
        raise NotImplementedError

    async def abort(self, rid: str = "") -> None:
        """Ends the request, "": all, at the server, which answers with the tokens so far."""
        raise NotImplementedError

    async def drop_cache(self) -> None:
        """Drops the KV cache once the server is idle."""
        raise NotImplementedError

    async def load_adapter_files(self, folder: Path) -> None:
        """Loads an adapter under the folder's name."""
        raise NotImplementedError

    async def unload_adapter(self, slot: AdapterSlot) -> None:
        """Unloads an adapter whose files are gone."""
        raise NotImplementedError


def is_kept(params: SamplingParams) -> bool:
    """True if the completion stores the ids that each token was drawn from."""
    return params.keeps_ids and params.top_k > 0


def adapter_files(
    arrived: Iterable[tuple[str, Tensor]],
    config: JSONObject,
    model: nn.Module,
    dtype: torch.dtype,
    fused: Iterable[tuple[str, ...]],
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files of an adapter in peft's format, with zeros for the missing
    members of `fused` groups."""
    names = set(config["target_modules"])
    for group in fused:
        if names.intersection(group):
            names.update(group)
    targets = adapter_targets(config | {"target_modules": names}, model)
    tensors = {full: torch.zeros(target.shape, dtype=dtype) for full, target in targets.items()}
    tensors |= on_host(arrived, dtype)
    read = {
        "peft_type": "LORA",
        "r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "target_modules": sorted({full.split(".")[-3] for full in tensors}),
    }
    yield "adapter_model.safetensors", safetensors.torch.save(tensors)
    yield "adapter_config.json", json.dumps(read).encode()
