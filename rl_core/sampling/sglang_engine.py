"""SGLang as an engine, behind its HTTP server in a child process: a crash, its signals and its variables stay there.

Weights go over as safetensors files in shared memory, a bucket at a time, by /update_weights_from_disk: no pickle, on
every device, for every number of GPUs, the same in all supported versions. Where there is room they stay there until the
next ones come, for another server if this one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import secrets
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_core.config import nearest
from rl_core.http import request
from rl_core.link import in_buckets
from rl_core.sampling.adapter_slots import Slot, save_adapter
from rl_core.sampling.engine import EngineDied, EngineSpec, check_request
from rl_core.sampling.server_process import RunningServer, ServerProcess
from rl_core.sampling.sglang_server import ServerOptions, numbers
from rl_core.sampling.shared_folder import SharedFolder, remove_abandoned, shared_memory
from rl_core.sampling.weights import arriving, arriving_adapter, on_host
from rl_core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORGETS_ABORTED = (0, 5, 22)  # older ones wait for ever for an adapter's requests that were aborted in their queue
ANSWER_TIMEOUT_S = 600.0  # of everything but sampling, which the episode's deadline bounds
MEMORY = ("weights", "kv_cache", "cuda_graph")


class SGLangEngine:
    """An Engine over a server that starts at the first call. `skeleton` has the names and shapes of the model's weights, on
    "meta". Its seeds are the server's, not a request's: the same seed gives other tokens."""

    def __init__(
        self,
        name: str,
        options: ServerOptions,
        skeleton: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        log: Path,
        start_timeout_s: float = 600.0,
        url: str = "",
        folder: str | None = None,
        adapters: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """`url`: of a server that runs already, with options of its own. `folder`: where weights wait for it. `adapters`: what
        adapter_config.json would hold of each."""
        self.options, self.skeleton, self.tokenizer = options, skeleton, tokenizer
        self.version, self.capacity = 0, options.num_slots
        self.start_timeout_s = start_timeout_s
        self.is_own, self.folder = not url, folder or shared_memory()
        if url:
            self.server = RunningServer(name, url, os.environ.get("SGLANG_API_KEY", ""))
        else:
            module, key = "rl_core.sampling.sglang_server", secrets.token_hex(16)
            self.server = ServerProcess(name, module, options.args(), log, key, env=options.environment())
        self._has_started = self._needs_weights = False
        remove_abandoned()
        self._kept: SharedFolder | None = None  # the weights that it has, for another server
        self._configs = adapters or {}
        self._label = ""  # that those weights have at the server, which gives it with each answer
        self._slots: dict[str, Slot] = {}  # by the names of actors
        self._linear = {name: m for name, m in skeleton.named_modules() if isinstance(m, nn.Linear)}
        self.num_restarts = 0
        self._asleep: set[str] = set()  # of MEMORY
        self._changing = asyncio.Lock()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._num_pauses = 0
        self._num_running = 0  # requests that wait for their completion
        self._num_asked = 0  # of them at the server
        self._aborts: set[asyncio.Task] = set()

    async def start(self) -> None:
        """The server answers; nothing if it does already. EngineDied if it cannot, or has died since: see wake."""
        if self._has_started:
            return
        async with self._changing:
            if not self._has_started:
                await self.server.start(self.start_timeout_s)
                self._has_started = True

    async def _restart(self) -> None:
        """A new server with the same weights. Where there was no room to keep them they must come again."""
        self._has_started = False
        self._asleep.clear()
        await self.server.start(self.start_timeout_s)
        self._has_started, self._needs_weights = True, self.version != 0 or bool(self._slots)
        self.num_restarts += 1
        for folder in sorted(os.listdir(self._kept.name)) if self._kept else ():
            await self._load(Path(self._kept.name) / folder)
        for slot in self._slots.values():
            await self._load_adapter(slot)
        self._needs_weights = self.version != 0 and self._kept is None

    async def _revive(self) -> None:
        async with self._changing:
            if self._has_started and not self.server.is_alive:
                await self._restart()

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = "", adapter: str = ""
    ) -> Completion:
        """One completion; see Engine. Raises as EmbeddedEngine's, and EngineDied."""
        check_request(prompt_ids, params, self.options.max_context_tokens, self.tokenizer)
        if adapter and adapter not in self._slots:
            raise ValueError(f"no adapter {adapter!r}; {nearest(adapter, self._slots)}")
        max_tokens = min(params.max_tokens, self.options.max_context_tokens - len(prompt_ids))
        done = Completion(token_ids=[], logprobs=[], text="", finish_reason="", policy_version=self.version)
        self._num_running += 1
        try:
            while not done.finish_reason:
                await self._may_run.wait()
                await self.start()
                await self._set_awake(*MEMORY)
                # A pause may have come meanwhile; nothing is awaited from here to the request.
                if self._may_run.is_set():
                    await self._extend(done, prompt_ids, params, max_tokens, adapter)
        finally:
            self._num_running -= 1
        if self.tokenizer is not None:
            done.text = self.tokenizer.decode(
                done.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return done

    async def _extend(
        self, done: Completion, prompt_ids: list[int], params: SamplingParams, max_tokens: int, adapter: str
    ) -> None:
        """More tokens, up to the end or to the next pause."""
        if self._needs_weights:
            raise EngineDied(f"engine {self.server.name} was restarted; give it its weights by update")
        slot, rid, num_pauses = self._slots.get(adapter), uuid.uuid4().hex, self._num_pauses
        version = slot.version if slot else self.version
        if not done.token_ids:
            done.policy_version = version
        elif version != done.policy_versions[-1]:
            done.newer_versions.append((len(done.token_ids), version))
        body = {
            "rid": rid,
            "input_ids": [*prompt_ids, *done.token_ids],
            "return_logprob": True,
            "sampling_params": sampling_params(params, max_tokens - len(done.token_ids)),
        }
        if slot:
            body["lora_path"] = slot.name
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
        if slot:
            slot.was_aborted |= answer["meta_info"]["finish_reason"]["type"] == "abort"
        self._take(answer, done, params, max_tokens, num_pauses)

    def _take(
        self, answer: dict[str, Any], done: Completion, params: SamplingParams, max_tokens: int, num_pauses: int
    ) -> None:
        meta = answer["meta_info"]
        if self._label and meta.get("weight_version", self._label) != self._label:
            self.server.stop()
            raise self.server.died(
                "answered with other weights than it was given: it was started anew, or got some elsewhere"
            )
        tokens = answer.get("output_ids") or []
        logprobs = [item[0] for item in meta.get("output_token_logprobs") or []]
        if any(x is None or x != x for x in logprobs):
            raise ValueError("the model's logits are NaN; its weights have diverged or were never loaded")
        if len(logprobs) != len(tokens):
            raise ValueError(f"SGLang gave {len(tokens)} tokens and {len(logprobs)} logprobs")
        done.token_ids += tokens
        done.logprobs += logprobs
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and num_pauses == self._num_pauses:
            raise RuntimeError(f"SGLang aborted a request: {reason.get('message') or reason}")
        # SGLang also stops at the tokenizer's own end token, asked or not; then it is asked to go on.
        if reason["type"] == "stop" and (
            isinstance(reason.get("matched"), str) or done.token_ids[-1] in params.stop_token_ids
        ):
            done.finish_reason = "stop"
        elif len(done.token_ids) >= max_tokens:
            done.finish_reason = "length"

    def end_session(self, session: str) -> None:
        """Nothing: SGLang finds what prompts share by itself, and drops the oldest."""

    async def update(self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = "") -> None:
        """See Engine. Weights are looked at before they are sent, since SGLang leaves out unknown names without a word and
        dies of other shapes."""
        assert weights is not None, "the server has weights of its own"
        if adapter:
            await self._update_adapter(adapter, weights, version)
            return
        self._check_idle()
        coming = iter(weights)
        try:
            await self.start()
            await self._revive()
            await self._set_awake("weights")
            await self._send(coming)
            await self._flush()
        finally:
            for _ in coming:  # every rank is to take all: gathering one is a collective
                pass
        self.version, self._needs_weights = version, False

    async def _send(self, named_weights: Iterator[tuple[str, Tensor]]) -> None:
        self._label = uuid.uuid4().hex
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None
        place, sent = self.folder, SharedFolder(self.folder)
        is_roomy = place is not None and shutil.disk_usage(place).free > 2 * self._num_bytes()
        for number, bucket in enumerate(in_buckets(on_host(self._once(named_weights), self.options.dtype))):
            folder = Path(sent.name) / f"{number:05d}"
            folder.mkdir()
            save_file(bucket, folder / "model.safetensors")
            await self._load(folder)
            if not is_roomy:
                shutil.rmtree(folder)
        if is_roomy:
            self._kept = sent
        else:
            sent.cleanup()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As they were sent last; none where there was no room to keep them."""
        for folder in sorted(os.listdir(self._kept.name)) if self._kept else ():
            with safe_open(Path(self._kept.name) / folder / "model.safetensors", framework="pt") as bucket:
                for name in bucket.keys():  # noqa: SIM118
                    yield name, bucket.get_tensor(name)

    async def _load(self, folder: Path) -> None:
        body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
        body["weight_version"] = self._label
        answer = await self._ask("update_weights_from_disk", body)
        if not answer.get("success"):  # refusals are told, not raised
            raise EngineDied(f"engine {self.server.name} refused weights: {answer.get('message')}")

    async def _update_adapter(self, name: str, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The server takes it while it sleeps, too: what it frees then are not its slots."""
        config = self._configs[name]
        self._check_idle()
        coming, old, folder = iter(weights), self._slots.get(name), SharedFolder(self.folder)
        try:
            checked = arriving_adapter(name, coming, config["r"], self._linear, old.arrived if old else set())
            arrived = save_adapter(Path(folder.name), checked, config, self._linear, self.options.dtype)
            await self.start()
            await self._revive()
            new = Slot(name=f"{name}_{uuid.uuid4().hex}", version=version, folder=folder, arrived=arrived)
            await self._load_adapter(new)
        except BaseException:
            folder.cleanup()
            raise
        finally:
            for _ in coming:  # as update
                pass
        self._slots[name] = new
        if old is not None:
            old.folder.cleanup()
            if not old.was_aborted or numbers(importlib.metadata.version("sglang")) >= FORGETS_ABORTED:
                await self._change_adapters("unload", {"lora_name": old.name})

    async def _load_adapter(self, slot: Slot) -> None:
        await self._change_adapters("load", {"lora_name": slot.name, "lora_path": slot.folder.name})

    async def _change_adapters(self, how: str, body: dict[str, str]) -> None:
        answer = await self._ask(f"{how}_lora_adapter", body)
        if not answer.get("success"):
            raise RuntimeError(f"engine {self.server.name} did not {how} an adapter: {answer.get('error_message')}")

    def _num_bytes(self) -> int:
        return sum(p.numel() for p in self.skeleton.parameters()) * self.options.dtype.itemsize

    def _once(self, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Without the second name of a tied head."""
        seen = set()
        for name, weight, target in arriving(self.skeleton, named_weights):
            if id(target) not in seen:
                yield name, weight
            seen.add(id(target))

    def _check_idle(self) -> None:
        if self._num_running and self._may_run.is_set():
            raise RuntimeError(f"{self._num_running} requests are running; await or cancel them, or pause the engine")

    async def sleep(self) -> None:
        """Frees the memory of weights, keys and values; wakes with the same weights. RuntimeError if requests run. A server that
        somebody else started keeps its memory."""
        self._check_idle()
        if not self.is_own or not self.server.is_alive or self._asleep == set(MEMORY):
            return
        await self._flush()  # which also waits for what was cancelled: SGLang dies of a release beside requests
        async with self._changing:
            await self._ask("release_memory_occupation", {"tags": sorted(set(MEMORY) - self._asleep)})
            self._asleep = set(MEMORY)

    async def wake(self) -> None:
        """Starts it, again if it died, and takes the memory again; nothing if it is awake."""
        await self.start()
        await self._revive()
        await self._set_awake(*MEMORY)

    async def _set_awake(self, *tags: str) -> None:
        if not self._asleep:
            return
        async with self._changing:
            if found := sorted(self._asleep & set(tags)):
                await self._ask("resume_memory_occupation", {"tags": found})
                self._asleep -= set(found)

    async def pause(self) -> None:
        """See Engine. Requests are aborted at the server with what they have, and asked for again by `resume`: nothing of
        them is there while it sleeps, restarts or gets weights."""
        self._may_run.clear()
        self._num_pauses += 1
        while self._num_asked and self.server.is_alive:
            await self._ask("abort_request", {"abort_all": True})
            await asyncio.sleep(0.02)  # one may have been on its way there

    async def resume(self) -> None:
        self._may_run.set()

    async def close(self) -> None:
        """Kills the server, or ends the requests at one that somebody else started; whoever waits gets EngineDied."""
        if not self.is_own and self.server.is_alive:
            with contextlib.suppress(EngineDied, RuntimeError):
                await self._ask("abort_request", {"abort_all": True}, timeout_s=5)
        self.server.stop()
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None
        for slot in self._slots.values():
            slot.folder.cleanup()

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineDied):
            await self._ask("abort_request", {"rid": rid})

    async def _flush(self) -> None:
        """Drops cached keys and values, once the server is idle."""
        for _ in range(int(ANSWER_TIMEOUT_S / 0.1)):
            status, content = await self._request("flush_cache", {}, ANSWER_TIMEOUT_S)
            if status == 200:
                return
            await asyncio.sleep(0.1)
        raise EngineDied(f"engine {self.server.name} is not idle after {ANSWER_TIMEOUT_S:g} s: {content[:300]!r}")

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float | None = ANSWER_TIMEOUT_S) -> Any:
        """The answer's JSON. RuntimeError where the server refuses."""
        status, content = await self._request(path, body, timeout_s)
        if status != 200:
            raise RuntimeError(f"engine {self.server.name} refused /{path} with {status}: {content[:500]!r}")
        return json.loads(content) if content.strip() else None

    async def _request(self, path: str, body: dict[str, Any], timeout_s: float | None) -> tuple[int, bytes]:
        if not self.server.is_alive:
            raise self.server.died("has died")
        asked = request(f"{self.server.url}/{path}", json.dumps(body).encode(), self.server.headers)
        try:
            return await asyncio.wait_for(asked, timeout_s)
        except asyncio.TimeoutError:
            raise self.server.died(f"did not answer /{path} within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise await self.server.gone(error) from None


def sampling_params(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """As SGLang names them. Its logprobs are of the distribution before truncation, which training does not use."""
    found = {
        "max_new_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return found if params.stop or params.stop_token_ids else found | {"ignore_eos": True}


def make_engine(spec: EngineSpec) -> SGLangEngine:
    options = ServerOptions(
        model=spec.model,
        dtype=spec.dtype,
        device=spec.device,
        tp=spec.tp,
        memory_frac=spec.memory_frac,
        seed=spec.seed,
        num_slots=spec.num_slots,
        max_context_tokens=spec.max_context_tokens,
        adapters=list(spec.adapters.values()),
    )
    more = {"url": spec.url, "folder": spec.folder, "adapters": spec.adapters}
    return SGLangEngine(spec.name, options, spec.module, spec.tokenizer, spec.log, spec.start_timeout_s, **more)


def make_skeleton(path: str) -> PreTrainedModel:
    """The model with shapes alone, on "meta", and with its generation_config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model
