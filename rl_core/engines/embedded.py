"""The in-process engine: continuous batching over a Hugging Face model's own forward, with its
weights read in place.

Legend: n requests in a forward, S new tokens of each, V vocabulary.

Row i of the KV cache belongs to the i-th active request, so a forward reads the first rows as one
view and never gathers. A row holds the keys and values of every token before the newest one. A
decode step sends one tensor of numbers to the device and brings one tensor of sampled tokens back;
nothing else waits for the device.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rl_core.engines.adapters import AdapterTable
from rl_core.engines.slots import Snapshot, bytes_per_token, choose_model, sample, share_cache
from rl_core.host_copies import HostCopies, device_memory
from rl_core.sampling.engine import Engine, EngineSpec, check_request, note_version
from rl_core.sampling.weights import load_weights
from rl_core.types import Completion, SamplingParams, option

PREFILL_TOKENS = 8192  # padded tokens in one prefill forward: bounds its activations
# Waiting requests are admitted at the latest this many decode steps after the last ones.
REFILL_STEPS = 8
# Rounds of the event loop before a decode step with free slots: callers that were answered score
# the reply and ask again meanwhile. A step that does not wait for them runs half empty.
LOOP_ROUNDS = 12
RECORDER = "rl_core.plugins.router_replay:Recorder"
RANDOM_BITS = 24  # of each token's draw
NO_LIMITS = (0, 1.0, 0.0)  # top_k, top_p, min_p


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    ids: list[int]  # the prompt and what was sampled
    end: int  # number of ids at which it is cut off
    said: Completion  # so far
    params: SamplingParams
    session: str
    adapter: str  # "" is none
    random_bits: Any  # this request's generator; one draw per token
    future: asyncio.Future[Completion]
    key: tuple = ()  # the same for requests with the same tokens and adapter
    row: int = -1  # of the cache; -1 while it waits
    num_cached: int = 0  # ids with keys and values from the session's last turn
    hidden: Tensor | None = None  # [hidden size] of its last token when it entered

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_cached


class EmbeddedEngine(Engine):
    """Samples from `spec.module`, which it borrows while requests run: attention implementation and
    mode are put back. A context is at most as long as the model has positions. With weights of its
    own it starts asleep, and CPU-offloads them while it sleeps."""

    shares_weights = True
    records_experts = True

    def __init__(self, spec: EngineSpec) -> None:
        model = self.model = spec.module
        self.tokenizer, self.version, self.capacity = spec.tokenizer, 0, spec.num_slots
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_context_tokens = min(spec.max_context_tokens, positions or spec.max_context_tokens)
        self.stats = Counter()  # prefill_tokens (without padding), decode_steps, decode_tokens
        self.adapter_versions: dict[str, int] = {}
        self._adapters = AdapterTable(model, spec.adapters)
        self._slots = choose_model(model)
        if spec.adapters and not self._slots.is_batched:
            raise ValueError(
                f"{type(model).__name__} is sampled row by row, which has no adapters of several "
                "actors; leave share"
            )
        self._parked_room = 0  # tokens
        if self._slots.is_batched:
            self._fit_memory(spec)
        self._recorder = option(RECORDER)(model) if spec.records_experts else None
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # the i-th has row i
        self._num_waiting: Counter[tuple] = Counter()  # by their keys
        # Of waiting requests: cache and last hidden state.
        self._prompts: dict[tuple, tuple[Snapshot, Tensor]] = {}
        # Session -> adapter, ids, cache; oldest first.
        self._parked: dict[str, tuple[str, list[int], Snapshot]] = {}
        self._steps_since_refill = 0
        self._is_paused = False
        self._task: asyncio.Task[None] | None = None
        self._own, self._copies = (
            list(model.parameters()) if spec.owns_weights else [],
            HostCopies(model.device),
        )
        self._drop_cache()
        self._copies.to_host(self._own)

    def _fit_memory(self, spec: EngineSpec) -> None:
        """Takes as many slots, and parks as much, as fits in its part of the device beside the
        weights."""
        total = spec.memory_frac * device_memory(self.model.device)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        room = max(0.0, total - weights) / bytes_per_token(self._slots)
        self.capacity, self._parked_room = share_cache(
            spec.num_slots, self.max_context_tokens, room
        )
        if self.capacity < spec.num_slots:
            self.shortage = (
                f"{spec.name}: {self.capacity} of {spec.num_slots} slots of "
                f"{self.max_context_tokens} tokens fit beside the "
                f"weights in {total / 2**30:.3g} GiB (--engine_memory_frac); other requests wait"
            )

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
        """One completion; see Engine."""
        check_request(prompt_ids, params, self.max_context_tokens, self.tokenizer)
        assert not adapter or adapter in self.adapter_versions, adapter
        said = begun or Completion(
            token_ids=[], logprobs=[], text="", finish_reason="", policy_version=self.version
        )
        random_bits = random.Random(seed).getrandbits
        for _ in said.token_ids:
            random_bits(RANDOM_BITS)
        request = Request(
            ids=[*prompt_ids, *said.token_ids],
            end=min(len(prompt_ids) + params.max_tokens, self.max_context_tokens),
            said=said,
            params=params,
            session=session,
            adapter=adapter,
            random_bits=random_bits,
            future=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        self._note_key(request)
        self._start_running()
        return await request.future

    def end_session(self, session: str) -> None:
        self._parked.pop(session, None)

    async def update(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        """Copies each weight into the model; see Engine. It is awake afterwards."""
        await self._drain()
        await self.wake()
        self._parked = {
            s: parked for s, parked in self._parked.items() if adapter and parked[0] != adapter
        }
        if adapter:
            self._adapters.load(adapter, weights)
            self.adapter_versions[adapter] = version
        else:
            if weights is not None:
                load_weights(self.model, weights)
            self.version = version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of what it samples with, without adapters; a tied weight
        comes once."""
        return self.model.named_parameters()

    async def sleep(self) -> None:
        """Frees the memory of the cache, of every session and, if it offloads, of the weights; see
        Engine."""
        await self._drain()
        self._drop_cache()
        if not self._copies.waiting:
            self._copies.to_host(self._own)

    async def wake(self) -> None:
        self._copies.to_device()

    async def pause(self) -> None:
        """Stops between two tokens; see Engine. Requests are queued again with their sampled
        tokens."""
        self._is_paused = True
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        self._waiting.extendleft(reversed(self._active))
        for held in (self._active, self._num_waiting, self._prompts):
            held.clear()
        for request in self._waiting:
            request.row, request.num_cached = -1, 0
            self._note_key(request)

    async def resume(self) -> None:
        self._is_paused = False
        if self._waiting:
            self._start_running()

    async def close(self) -> None:
        """Cancels what is running and frees the cache."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all(None)

    async def _drain(self) -> None:
        num = sum(not r.future.done() for r in (*self._waiting, *self._active))
        if num and not self._is_paused:
            raise RuntimeError(
                f"{num} requests are running; await or cancel them, or pause the engine"
            )
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])  # it drops requests that were cancelled

    def _drop_cache(self) -> None:
        self._parked.clear()
        self._cache = self._slots.make_cache(self.capacity, self.max_context_tokens)

    def _note_key(self, request: Request) -> None:
        request.key = request.adapter, *request.ids
        self._num_waiting[request.key] += 1

    def _start_running(self) -> None:
        if not self._is_paused and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_stopped)

    async def _run(self) -> None:
        await self.wake()
        with self._slots.borrowed():
            while True:
                self._step()
                # No await before this block is left: a caller must not find the model in the wrong
                # mode.
                if self._is_paused or (not self._waiting and not self._active):
                    return
                for _ in range(LOOP_ROUNDS if len(self._active) < self.capacity else 1):
                    await asyncio.sleep(0)

    def _on_stopped(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._fail_all(None if task.cancelled() else task.exception())

    def _fail_all(self, error: BaseException | None) -> None:
        """Raises the error in every generate() without an answer, so that none waits for ever; None
        cancels them."""
        for request in (*self._waiting, *self._active):
            if not request.future.done():
                request.future.cancel() if error is None else request.future.set_exception(error)
        for held in (self._waiting, self._active, self._num_waiting, self._prompts):
            held.clear()
        self._drop_cache()

    @torch.inference_mode()
    def _step(self) -> None:
        for request in [r for r in self._active if r.future.done()][::-1]:  # cancelled
            self._leave(request)
        # A prefill costs a forward however small it is: wait for more requests, but not for long.
        num_new = min(len(self._waiting), self.capacity - len(self._active))
        self._steps_since_refill += 1
        is_enough = (
            not self._active
            or 4 * num_new >= self.capacity
            or self._steps_since_refill >= REFILL_STEPS
        )
        if num_new > 0 and is_enough:
            self._admit()
        if self._active:
            requests = list(self._active)
            numbers, longest = self._numbers(requests), max(len(r.ids) for r in requests)
            tokens, starts = numbers[:2].long()
            with self._adapters.of_rows([r.adapter for r in requests]):
                rows = slice(0, len(requests))
                hidden = self._slots.forward(self._cache, rows, tokens[:, None], starts, longest)
            self._take(requests, sample(self._slots.logits(hidden[:, 0]), numbers[2:]))
            self.stats.update(decode_steps=1, decode_tokens=len(requests))

    def _admit(self) -> None:
        """Prefills each new prompt once, and samples every request's first token."""
        self._steps_since_refill, first, admitted, begun = 0, len(self._active), [], Counter()
        while self._waiting and first + len(admitted) < self.capacity:
            request = self._waiting.popleft()
            begun[request.key] += 1
            if not request.future.done():  # cancelled
                admitted.append(request)
        leaders: dict[tuple, Request] = {}
        for request in admitted:
            if (
                request.key not in self._prompts
                and leaders.setdefault(request.key, request) is request
            ):
                request.num_cached = self._num_reusable(request)
        chunks = list(prefill_chunks(leaders.values()))
        followers = [request for request in admitted if leaders.get(request.key) is not request]
        for request in (*chain(*chunks), *followers):
            request.row = len(self._active)
            self._active.append(request)
        for chunk in chunks:
            self._prefill(chunk)
        for request in followers:
            kept, request.hidden = self._prompts[request.key]
            self._cache.restore(request.row, kept, len(request.ids))
        self._num_waiting -= begun  # drops what is 0
        self._prompts = {
            key: kept for key, kept in self._prompts.items() if key in self._num_waiting
        }
        if started := self._active[first:]:
            for request in started:
                note_version(request.said, self.adapter_versions.get(request.adapter, self.version))
            hidden = torch.stack([request.hidden for request in started])
            self._take(started, sample(self._slots.logits(hidden), self._numbers(started)[2:]))

    def _num_reusable(self, request: Request) -> int:
        adapter, ids, _ = self._parked.get(request.session, ("", [], None))
        # The last token is always forwarded: its hidden state gives the first logits.
        limit = min(len(ids), len(request.ids) - 1) if adapter == request.adapter else 0
        pairs = zip(ids[:limit], request.ids, strict=False)
        return next((i for i, (old, new) in enumerate(pairs) if old != new), limit)

    def _prefill(self, requests: list[Request]) -> None:
        rows, device = slice(requests[0].row, requests[-1].row + 1), self.model.device
        for request in requests:
            _, _, kept = self._parked.pop(request.session, ("", [], None))
            if request.num_cached:
                self._cache.restore(request.row, kept, request.num_cached)
        longest = max(r.num_new for r in requests)
        # More than one piece only if a single prompt is longer than PREFILL_TOKENS.
        piece_tokens = PREFILL_TOKENS if self._slots.is_batched else longest
        for done in range(0, longest, piece_tokens):
            starts = [r.num_cached + done for r in requests]
            pieces = [
                r.ids[start : start + piece_tokens]
                for r, start in zip(requests, starts, strict=True)
            ]
            sizes = list(map(len, pieces))
            tokens = torch.tensor(
                [piece + [0] * (max(sizes) - len(piece)) for piece in pieces], device=device
            )
            length = max(map(sum, zip(starts, sizes, strict=True)))
            ragged = torch.tensor(sizes, device=device) if min(sizes) < max(sizes) else None
            where = torch.tensor(starts, device=device) if any(starts) else None
            with self._adapters.of_rows([r.adapter for r in requests]):
                hidden = self._slots.forward(self._cache, rows, tokens, where, length, ragged)
        for i, request in enumerate(requests):
            request.hidden = hidden[i, sizes[i] - 1].clone()
            if self._num_waiting[request.key] > 1:
                self._prompts[request.key] = (
                    self._cache.snapshot(request.row, len(request.ids)),
                    request.hidden,
                )
        self.stats.update(prefill_tokens=sum(r.num_new for r in requests))

    def _numbers(self, requests: list[Request]) -> Tensor:
        """[4, 5 or 8, n] on the device: last token, its position, uniform in [0, 1), is greedy;
        temperature if one is not 1; top_k, top_p, min_p if one has limits. Greedy requests have
        neither: their logprobs are those without."""
        params = [r.params for r in requests]
        temperatures = [p.temperature or 1.0 for p in params]
        limits = [(p.top_k, p.top_p, p.min_p) if p.temperature else NO_LIMITS for p in params]
        rows = [
            [r.ids[-1] for r in requests],
            [len(r.ids) - 1 for r in requests],
            [r.random_bits(RANDOM_BITS) * 2.0**-RANDOM_BITS for r in requests],
            [p.temperature == 0 for p in params],
        ]
        if any(limit != NO_LIMITS for limit in limits):
            rows += [temperatures, *zip(*limits, strict=True)]
        elif any(t != 1.0 for t in temperatures):
            rows.append(temperatures)
        device = self.model.device
        # Token ids are exact in float64.
        numbers = torch.tensor(rows, dtype=torch.float64, pin_memory=device.type == "cuda")
        return numbers.to(device, non_blocking=True)

    def _take(self, requests: list[Request], sampled: Tensor) -> None:
        tokens, logprobs = sampled.tolist()  # the one wait for the device
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if logprob != logprob:
                raise ValueError(
                    "the model's logits are NaN; its weights have diverged or were never loaded"
                )
            request.ids.append(int(token))
            request.said.token_ids.append(int(token))
            request.said.logprobs.append(logprob)
        for request in reversed(requests):
            request.said.finish_reason = self._finish_reason(request)
            if request.said.finish_reason:
                self._finish(request)

    def _finish_reason(self, request: Request) -> str:
        params, ids = request.params, request.said.token_ids
        if ids[-1] in params.stop_token_ids:
            return "stop"
        if params.stop:
            # A token that decodes to something has a byte at least, so this tail holds any stop
            # string that just ended.
            length = max(len(s.encode()) for s in params.stop) + 4
            text = self._decoded(ids[-length:], skip_special_tokens=False)
            if any(s in text for s in params.stop):
                return "stop"
        return "length" if len(request.ids) >= request.end else ""

    def _decoded(self, ids: list[int], skip_special_tokens: bool) -> str:
        how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **how) if self.tokenizer is not None else ""

    def _finish(self, request: Request) -> None:
        if request.session and self._slots.is_batched:
            self._park(request)
        if not request.future.done():
            request.said.text = self._decoded(request.said.token_ids, skip_special_tokens=True)
            if self._recorder:
                num_read = len(request.ids) - 1
                request.said.experts = self._recorder.experts_of(self._cache, request.row, num_read)
            request.future.set_result(request.said)
        self._leave(request)

    def _park(self, request: Request) -> None:
        """Keeps a conversation's keys and values beside the slots, which other requests need
        meanwhile."""
        ids = request.ids[:-1]
        self._parked.pop(request.session, None)  # the newest comes last
        # Counting tokens at each turn takes time.
        while (
            len(self._parked) + 1
        ) * self.max_context_tokens > self._parked_room and self._parked:
            if (
                sum(len(kept) for _, kept, _ in self._parked.values()) + len(ids)
                <= self._parked_room
            ):
                break
            del self._parked[next(iter(self._parked))]
        if len(ids) <= self._parked_room:
            self._parked[request.session] = (
                request.adapter,
                ids,
                self._cache.snapshot(request.row, len(ids)),
            )

    def _leave(self, request: Request) -> None:
        """Frees a request's row, and moves the last row into it."""
        last = self._active.pop()
        if last is not request:
            self._cache.copy_row(last.row, request.row, len(last.ids) - 1)
            self._active[request.row] = last
            last.row = request.row


def prefill_chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Batches of requests with similar lengths, cached or not, of at most PREFILL_TOKENS with
    padding."""
    chunk: list[Request] = []
    for request in sorted(requests, key=lambda r: (r.num_cached > 0, r.num_new)):
        first = chunk[0] if chunk else request
        is_full = request.num_new * (len(chunk) + 1) > PREFILL_TOKENS
        is_unlike = request.num_new > 2 * first.num_new + 16 or bool(request.num_cached) != bool(
            first.num_cached
        )
        if chunk and (is_full or is_unlike):
            yield chunk
            chunk = []
        chunk.append(request)
    if chunk:
        yield chunk
