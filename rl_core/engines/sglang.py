"""SGLang as an engine, used through its HTTP server (sglang_server.py).
weight_transfer.py sends new weights to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from rl_core.config import Config
from rl_core.distributed import this_device
from rl_core.engines.adapters import adapter_targets, arriving_adapter
from rl_core.engines.remote import ask
from rl_core.engines.requests import check_logprobs, check_request, decoded, note_version
from rl_core.engines.sglang_cuda import check_allocator, check_build_tools, check_tp_devices
from rl_core.engines.sglang_server import SGLangServer, check_sglang
from rl_core.engines.sglang_versions import (
    FORGETS_ABORTED,
    NAMES_SAMPLED_IDS,
    is_older_than,
    numbers,
)
from rl_core.engines.weight_transfer import (
    TRANSFERS,
    choose_transfer,
    described_transfer,
    keeps_backup,
)
from rl_core.engines.weights import arriving_at, checkpoint_weights, on_host
from rl_core.errors import refuse
from rl_core.metrics import Metric, Sum
from rl_core.models.cpu_offload import release_cached_memory
from rl_core.sampling.engine import Engine, EngineDied, EngineSpec, WeightOwner
from rl_core.types import Completion, JSONObject, SamplingParams

ANSWER_TIMEOUT_S = 600.0  # Not for sampling, which the episode's deadline limits.
MAX_STARTS = 3  # Attempts to restart a server that died.
MEMORY = ("weights", "kv_cache", "cuda_graph")
NO_WEIGHTS_POLL_S = 0.05
# SGLang fuses each of these groups into one layer, and loads only adapters of whole groups: missing
# members get zeros.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(kw_only=True, slots=True)
class AdapterSlot:
    """An actor's adapter on the server."""

    version: int
    # Unique name per version: SGLang keeps the old adapter if a name is repeated.
    folder: Path
    was_aborted: bool = False  # True if a request for this adapter was aborted.


INEXACT = (
    "of the actor, of evaluations or of an actor with the same engine, needs SGLang >= 0.5.20: "
    "older versions name more ids than they draw from; leave one of the two out"
)
# (condition, message of the error). c: the configuration; a: the actor.
OF_SGLANG = [
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
        "--engine "
        "embedded",
    ),
    (
        lambda c, a: a.router_replay,
        ".router_replay=true needs --engine embedded, which records the experts of each token",
    ),
]


class SGLangEngine(Engine):
    """See Engine. The server starts at the first call. It ignores the seeds of requests, so tokens
    are not reproducible. Its radix cache finds shared prefixes and evicts the oldest."""

    weight_owner = WeightOwner.SERVER
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
        refuse(OF_SGLANG, f"--actors.{name}", c=config, a=actor)
        check_min_p(config, name)

    def __init__(self, spec: EngineSpec):
        self.spec, self.server = spec, SGLangServer(spec)
        self.weight_transfer = described_transfer(spec)
        self.transfer = TRANSFERS[choose_transfer(spec)](spec, self._ask)
        self.version, self.capacity, self._num_restarts = 0, spec.num_slots, 0
        self._is_started = False  # True once the newest weights and adapters are loaded.
        self._is_closed = False
        self._slots: dict[str, AdapterSlot] = {}  # Key: actor.
        self._needs_update = False  # True if the running server lacks weights.
        self._asleep: set[str] = set()  # Released tags of MEMORY.
        self._changing, self._may_run = asyncio.Lock(), asyncio.Event()
        self._may_run.set()
        self._num_asked = 0  # Open sampling requests.
        # True once the server is known to name just the ids that it draws from.
        self._names_sampled_ids = self.server.is_own and not is_older_than(NAMES_SAMPLED_IDS)
        self._keeps_top_p = self._has_min_p = False  # Of requests so far.
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
        self, tags: Iterable[str] = MEMORY, restarts: bool = False, loads: bool = True
    ) -> None:
        """Wakes `tags`. Without `loads`, the caller loads the weights."""
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
            await self._ask("resume_memory_occupation", {"tags": asleep})
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
        if self.transfer.label and loads:
            if self.server.is_own and not keeps_backup(self.spec):
                await self._release(["kv_cache"])  # The learner needs the device too.
            await self._load()
        for slot in self._slots.values():
            await self._load_adapter(slot.folder)
        self._is_started = True

    async def _release(self, tags: Iterable[str]) -> None:
        await self._ask("release_memory_occupation", {"tags": sorted(tags)})
        self._asleep.update(tags)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        begun: Completion | None = None,
    ) -> Completion:
        spec = self.spec
        check_request(prompt_ids, params, spec.max_context_tokens)
        assert not adapter or adapter in self._slots, adapter
        max_tokens = min(params.max_tokens, spec.max_context_tokens - len(prompt_ids))
        done = begun or Completion()
        while not done.finish_reason:
            await self._may_run.wait()
            await self._be_awake()
            await self._check_sampled_ids(params)
            if self.lacks_weights:
                await asyncio.sleep(NO_WEIGHTS_POLL_S)
            # A pause may have come meanwhile; nothing is awaited from here to the request.
            elif self._may_run.is_set():
                await self._extend(done, prompt_ids, params, max_tokens, adapter)
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
    ) -> None:
        """Samples tokens until the end of the completion or the next pause."""
        slot, rid = self._slots.get(adapter), uuid.uuid4().hex
        note_version(done, slot.version if slot else self.version)
        body = {"rid": rid, "input_ids": [*prompt_ids, *done.token_ids], "return_logprob": True}
        body["sampling_params"] = sampling_params(params, max_tokens - len(done.token_ids))
        body |= {"lora_path": slot.folder.name} if slot else {}
        body |= {"return_sampling_mask": True} if is_kept(params) else {}
        self._num_asked += 1
        try:
            answer = await self._ask("generate", body, timeout_s=None)
        except asyncio.CancelledError:
            self._aborts.add(task := asyncio.create_task(self._abort(rid)))
            task.add_done_callback(self._aborts.discard)
            if slot:
                slot.was_aborted = True
            raise
        finally:
            self._num_asked -= 1
        if slot and answer["meta_info"]["finish_reason"]["type"] == "abort":
            slot.was_aborted = True
        self._take(answer, done, params, max_tokens)

    async def _check_sampled_ids(self, params: SamplingParams) -> None:
        """Raises ValueError if the server names more ids than it draws from, because a batch may
        have requests that keep their ids with top_p, and requests with min_p."""
        self._keeps_top_p |= params.keeps_ids and params.top_p < 1
        self._has_min_p |= params.min_p > 0
        if self._names_sampled_ids or not (self._keeps_top_p and self._has_min_p):
            return
        version = (await self._ask("server_info", None)).get("version", "")
        if numbers(version) < NAMES_SAMPLED_IDS:
            raise ValueError(f"{self.server}, version {version}: top_p with min_p, {INEXACT}")
        self._names_sampled_ids = True

    def _check_label(self, meta: JSONObject) -> None:
        """Raises EngineDied if the server sampled with weights that rl_core did not send."""
        label = self.transfer.label
        if label and meta.get("weight_version", label) != label:
            self.server.stop()
            raise self.server.died(
                "sampled with other weights than rl_core sent: somebody restarted or updated it"
            )

    def _take(
        self, answer: dict, done: Completion, params: SamplingParams, max_tokens: int
    ) -> None:
        meta = answer["meta_info"]
        reason, tokens = meta["finish_reason"], answer.get("output_ids") or []
        self._check_label(meta)
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
        check_logprobs(logprobs)
        assert len(logprobs) == len(tokens), (len(logprobs), len(tokens))
        done.token_ids += tokens
        done.logprobs += logprobs
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

    async def update(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        """See Engine. Checks names and shapes first, because SGLang ignores unknown names and
        crashes on wrong shapes. A server that is dead, or dies meanwhile, gets the weights when
        wake() restarts it."""
        assert weights is not None, "the server does not share the learner's weights"
        self._check_idle()
        if adapter:
            await self._send_adapter(adapter, weights, version)
        else:
            await self._send_weights(weights)
            self.version = version

    async def _send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        coming = ((name, weight) for name, weight, _ in arriving_at(self.spec.module, weights))
        # SGLang expects the names of published checkpoints.
        self.transfer.take(checkpoint_weights(self.spec.module, coming))
        try:
            if self._is_served:
                with contextlib.suppress(EngineDied):
                    await self._be_awake(["weights"], restarts=True, loads=False)
                    await self._load()
                    await self._flush()
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
        files = adapter_files(arrived, config, self.spec.module, self.spec.dtype)
        folder = self.transfer.files.write(files, f"{actor}_")
        if self._is_served:
            with contextlib.suppress(EngineDied):
                await self._be_awake((), restarts=True)  # Adapters have slots while it sleeps.
                await self._load_adapter(folder)
        self._slots[actor] = AdapterSlot(version=version, folder=folder)
        if old is not None:
            self.transfer.files.remove(old.folder)
            if self._is_served and may_unload(old):
                with contextlib.suppress(EngineDied):
                    await self._ask("unload_lora_adapter", {"lora_name": old.folder.name})

    async def _load_adapter(self, folder: Path) -> None:
        await self._ask("load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})

    def _check_idle(self) -> None:
        if self._num_asked and self._may_run.is_set():
            raise RuntimeError(
                f"{self._num_asked} requests are running; await or cancel them, or pause the engine"
            )

    async def sleep(self) -> None:
        """See Engine. A server that the run did not start keeps its memory."""
        self._check_idle()
        if not self.server.is_own or not self.server.is_alive or self._asleep == set(MEMORY):
            return
        with contextlib.suppress(EngineDied):
            # Waits for cancelled requests too: SGLang crashes if memory is released during
            # requests.
            await self._flush()
            async with self._changing:
                await self._release(set(MEMORY) - self._asleep)

    async def pause(self) -> None:
        """See Engine. Aborts open requests on the server; after resume(), generate() sends them
        again with their tokens. Meanwhile the server may sleep, restart and load weights."""
        self._may_run.clear()
        # Waits for the tokens of open requests. A concurrent resume() also ends the loop: by then
        # each request has returned its tokens.
        while self._num_asked and self.server.is_alive and not self._may_run.is_set():
            with contextlib.suppress(EngineDied):
                await self._ask("abort_request", {"abort_all": True})
            await asyncio.sleep(0.02)  # A request may reach the server after the abort.

    async def resume(self) -> None:
        self._may_run.set()

    async def catch_up(self) -> None:
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

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineDied):
            await self._ask("abort_request", {"rid": rid})

    async def _flush(self) -> None:
        """Drops the KV cache once the server is idle."""
        until = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                await self._ask("flush_cache", {})
                return
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

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
        response = json.loads(content) if content.startswith(b"{") else {}
        # SGLang reports some refusals with status 200.
        if status != 200 or response.get("success") is False:
            raise RuntimeError(f"{self.server} refused /{path} with {status}: {content[:500]!r}")
        return response


def sampling_params(params: SamplingParams, max_tokens: int) -> JSONObject:
    """Sampling parameters under SGLang's names."""
    sent = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_new_tokens": max_tokens,
        "top_k": params.top_k or -1,
        "skip_special_tokens": False,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "no_stop_trim": True,
    }
    return sent if params.stop or params.stop_token_ids else sent | {"ignore_eos": True}


def adapter_files(
    arrived: Iterable[tuple[str, Tensor]],
    config: JSONObject,
    model: nn.Module,
    dtype: torch.dtype,
) -> Iterator[tuple[str, bytes]]:
    """Files of an adapter in peft's format, with the zeros that SGLang needs."""
    names = set(config["target_modules"])
    for group in FUSED:
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


def is_kept(params: SamplingParams) -> bool:
    """True if the completion stores the ids that each token was drawn from."""
    return params.keeps_ids and params.top_k > 0
