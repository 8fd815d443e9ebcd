"""The in-process engine: continuous batching over a Hugging Face model's own forward, with its
weights read in place.

Legend: n requests in a forward, S new tokens of each, V vocabulary.

Row i of the KV cache belongs to the i-th active request, so a forward reads the first rows as one
view and never gathers. A row holds the keys and values of every token before the newest one. A
request begins with a copy of them, where another row or a parked session begins with the same
tokens. A decode step sends one tensor of random numbers to the device and brings one tensor of
sampled tokens back; nothing else waits for the device. While no request enters or ends, the step
reads its tokens and positions on the device, and completions receive tokens of several steps at
once.
"""

from __future__ import annotations

import asyncio
import math
import operator
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.engines.kv_slots import (
    ForwardImages,
    RowParams,
    Snapshot,
    bytes_per_token,
    device_memory,
    head_weight,
    sample,
)
from rl_core.engines.requests import NO_LOGPROB, check_request, decoded, note_version
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.loading import max_positions
from rl_core.sampling.engine import Engine, EngineSpec, WeightOwner
from rl_core.types import Completion, InputImage, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from rl_core.engines.grammars import Grammars

PREFILL_TOKENS = 8192  # padded tokens in one prefill forward: bounds its activations
# A shorter common prefix of two conversations is computed again: copying it would need a separate
# prefill first.
SHARED_TOKENS = 64
# Decode steps after which sampled tokens are added to their completions at the latest.
RECORD_STEPS = 16
# Decode steps after which waiting requests are admitted at the latest.
REFILL_STEPS = 8
# Largest fraction of the cache for active slots when slots and parked sessions do not both fit.
SLOTS_FRAC = 0.75
# Rounds of the event loop before a decode step with free slots. Meanwhile callers score finished
# completions and submit new requests; without this wait, decode steps run half empty. The number
# falls with the steps since the last completion.
LOOP_ROUNDS = 11
Numbers = Sequence[float]
ALL_IDS = 2**31  # More than any vocabulary has.
RANDOM_BITS = 24  # Bits of the uniform number that samples a token.


@dataclass(kw_only=True, slots=True, eq=False)
class GenerationRequest:
    ids: list[int]  # Prompt and sampled tokens.
    end: int  # Number of ids at which the completion is cut off.
    completion: Completion  # Sampled tokens up to now.
    params: SamplingParams
    session: str
    adapter: str  # "" is none
    random_bits: Callable[[int], int]  # this request's generator; one draw per token
    future: asyncio.Future[Completion]
    num_prompt: int = 0  # ids when it was queued
    # Hash of the adapter and the first SHARED_TOKENS ids, once it is computed.
    known_head: int | None = None
    # Request whose keys and values of the common prefix are copied.
    source: GenerationRequest | None = None
    num_cached: int = 0  # Ids copied from the source.
    matcher: LLMatcher | None = None  # State of its JSON schema.
    row: int = -1  # Row of the cache; -1 while the request waits.
    # A copy of its row, while its session waits for the next turn and another request has the row.
    parked: Snapshot | None = None
    hidden: Tensor | None = None  # [hidden size] of its last token when it entered
    images: dict[int, InputImage] = field(default_factory=dict)  # By key.
    # [3, ids when it was queued] positions, if it has images.
    positions: Tensor | None = None
    shift: int = 0  # Position of a later token less its column.

    @property
    def head(self) -> int:
        if self.known_head is None:
            self.known_head = hash((self.adapter, *self.ids[:SHARED_TOKENS]))
        return self.known_head

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_cached

    @property
    def num_computed(self) -> int:
        """Ids with keys and values, once the request has a row. A sampled newest id has none."""
        return max(self.num_prompt, len(self.ids) - 1)

    @property
    def is_ready(self) -> bool:
        return self.source is None or self.source.row >= 0

    @property
    def num_kept(self) -> int:
        """Largest number of ids that the completion stores with each token."""
        return self.params.top_k if self.params.keeps_ids else 0

    @property
    def numbers(self) -> tuple[float, ...]:
        """A column of RowParams.numbers."""
        params = self.params
        limits = params.top_k, params.top_p, params.min_p
        return params.temperature == 0, params.temperature or 1.0, *limits


Step = tuple[list[float], list[float]]  # A token and its logprob for each request.


@dataclass(kw_only=True, slots=True)
class Batch:
    """The active requests, until one enters or ends."""

    requests: list[GenerationRequest]
    tokens: Tensor  # [n] newest token of each request
    columns: Tensor  # [n] positions of these tokens
    longest: int  # the largest position
    is_even: bool  # True if all positions are equal
    stop_ids: frozenset[int]
    needs_tokens: bool  # True if a completion needs each token before the next step.
    num_steps: int  # Steps after which completions receive their tokens.
    steps: list[Step] = field(default_factory=list)  # Not in the completions yet.
    shifts: Tensor | None = None  # [n] of the requests; None if all are 0.

    @property
    def is_due(self) -> bool:
        """True if the last step may have ended a completion."""
        is_full = self.needs_tokens or len(self.steps) >= self.num_steps
        return is_full or not self.stop_ids.isdisjoint(self.steps[-1][0])

    def record(self) -> None:
        steps, self.steps = self.steps, []
        if steps:
            record(self.requests, steps)
            self.num_steps = steps_to_record(self.requests)


class EmbeddedEngine(Engine):
    """Samples from `spec.module`, and restores its attention implementation and mode when no
    request runs. A context has at most as many tokens as the model has positions. An engine that
    offloads its weights starts asleep."""

    weight_owner = WeightOwner.LEARNER
    has_grammars = True
    sees = True

    @staticmethod
    def check(config: Config, name: str, is_planned: bool) -> None:
        for flag, default in (("engine_tp", 1), ("engine_args", ""), ("weight_sync", "auto")):
            value = getattr(config, flag)
            if value and value != default:
                raise ValueError(f"--{flag}={value} needs --engine sglang")

    def __init__(self, spec: EngineSpec) -> None:
        model = self.model = spec.module
        self.tokenizer, self.version, self.capacity = spec.tokenizer, 0, spec.num_slots
        positions, _ = max_positions(model.config)
        self.max_context_tokens = min(spec.max_context_tokens, positions or spec.max_context_tokens)
        self.stats = Counter()  # prefill_tokens (without padding), decode_steps, decode_tokens
        self.adapter_versions: dict[str, int] = {}
        self._adapters = None
        if spec.adapters:
            from rl_core.engines.adapters import AdapterTable

            self._adapters = AdapterTable(model, spec.adapters)
        settings = spec.embedded
        assert settings is not None
        self._slots = settings.sampler(model)
        self._recorder = settings.recorder(model) if settings.recorder else None
        self._vision = None
        if spec.vision is not None:
            from rl_core.models.vision import Vision

            self._vision = Vision(spec.vision, model)
        self._parked_limit = 0  # tokens
        if self._slots.is_batched:
            self._fit_memory(spec)
        elif spec.adapters:
            raise ValueError(
                f"{type(model).__name__} is sampled row by row, which has no adapters of several "
                "actors; leave share"
            )
        self._grammars: Grammars | None = None
        self._waiting: list[GenerationRequest] = []
        self._active: list[GenerationRequest] = []  # Request i has row i.
        self._batch: Batch | None = None
        self._parked: dict[str, GenerationRequest] = {}  # Session -> request, oldest first.
        # Sampling parameters of the active requests; None if the requests have changed.
        self._row_params: RowParams | None = None
        self._num_parked = 0  # tokens
        self._steps_since_refill = self._steps_since_answer = 0
        self._is_paused = False
        self._task: asyncio.Task[None] | None = None
        self._offloaded = list(model.parameters()) if settings.offloads_weights else []
        self._copies = HostCopies(model.device)
        self._drop_cache()
        self._offload()

    def _offload(self) -> None:
        if self._offloaded and not self._copies.waiting:
            self._copies.to_host(self._offloaded)

    def _fit_memory(self, spec: EngineSpec) -> None:
        """Limits slots and parked sessions to the memory that the weights leave. Slots come first;
        sessions that are not parked are prefilled again."""
        total = spec.memory_frac * device_memory(self.model.device)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        free_tokens = max(0, int((total - weights) / bytes_per_token(self._slots)))
        row = self.max_context_tokens + 1
        self.capacity = max(1, min(spec.num_slots, int(SLOTS_FRAC * free_tokens) // row))
        # At most spec.num_slots conversations are open.
        self._parked_limit = min(max(0, free_tokens - self.capacity * row), spec.num_slots * row)
        if self.capacity < spec.num_slots:
            self.shortage = (
                f"{spec.name}: {self.capacity} of {spec.num_slots} slots of "
                f"{self.max_context_tokens} tokens fit next to the weights in "
                f"{total / 2**30:.3g} GiB (--engine_memory_frac); other requests wait"
            )

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
        """One completion; see Engine."""
        check_request(prompt_ids, params, self.max_context_tokens)
        assert not adapter or adapter in self.adapter_versions, adapter
        completion = unfinished or Completion()
        random_bits = random.Random(seed).getrandbits
        for _ in completion.token_ids:
            random_bits(RANDOM_BITS)
        request = GenerationRequest(
            ids=[*prompt_ids, *completion.token_ids],
            end=min(len(prompt_ids) + params.max_tokens, self.max_context_tokens),
            completion=completion,
            params=params,
            session=session,
            adapter=adapter,
            random_bits=random_bits,
            matcher=self._matcher(params, completion) if params.json_schema else None,
            images={image.key: image for image in images},
            future=asyncio.get_running_loop().create_future(),
        )
        self._queue(request)
        self._start_running()
        return await request.future

    def _matcher(self, params: SamplingParams, completion: Completion) -> LLMatcher:
        if self._grammars is None:
            from rl_core.engines.grammars import Grammars

            assert self.tokenizer is not None
            num_ids = len(head_weight(self.model))
            self._grammars = Grammars(self.tokenizer, num_ids)
        return self._grammars.matcher(params, completion.token_ids)

    def end_session(self, session: str) -> None:
        if request := self._parked.pop(session, None):
            self._num_parked -= request.num_computed

    async def update(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        """Copies each weight into the model and wakes the engine; see Engine."""
        await self._drain()
        await self.wake()
        self._drop_parked()
        if adapter:
            assert self._adapters is not None and weights is not None
            self._adapters.load(adapter, weights)
            self.adapter_versions[adapter] = version
        else:
            if weights is not None:
                from rl_core.engines.weights import load_weights

                load_weights(self.model, weights)
            self.version = version

    async def load_adapter(self, weights: Iterable[tuple[str, Tensor]], *, adapter: str) -> None:
        """See Engine."""
        requests = (*self._waiting, *self._active)
        used = {request.adapter for request in requests if not request.future.done()}
        assert self._adapters is not None and adapter not in used, adapter
        self._adapters.load(adapter, weights)
        self.adapter_versions[adapter] = self.adapter_versions.get(adapter, 0) + 1

    async def sleep(self) -> None:
        """Frees the memory of the cache, of all sessions and, if they are offloaded, of the
        weights; see Engine."""
        await self._drain()
        self._drop_cache()
        self._offload()

    async def wake(self) -> None:
        self._copies.to_device()

    async def pause(self) -> None:
        """Stops between two tokens; see Engine. Requests are queued again with their sampled
        tokens."""
        self._is_paused = True
        await self._until_stopped()
        self._settle()
        requests = [*self._active, *self._waiting]
        self._active.clear()
        self._waiting.clear()
        for request in requests:
            self._queue(request)

    async def update_unfinished(self) -> None:
        """See Engine."""
        if self._batch is not None:
            self._batch.record()

    async def resume(self) -> None:
        self._is_paused = False
        self._start_running()

    async def close(self) -> None:
        """Cancels running requests and frees the cache."""
        if self._task is not None:
            self._task.cancel()
        await self._until_stopped()
        self._fail_all(asyncio.CancelledError())

    async def _until_stopped(self) -> None:
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        num = sum(not request.future.done() for request in (*self._waiting, *self._active))
        if num and not self._is_paused:
            raise RuntimeError(
                f"{num} requests are running; await or cancel them, or pause the engine"
            )
        await self._until_stopped()  # The task drops cancelled requests.

    def _drop_parked(self) -> None:
        self._parked.clear()
        self._num_parked = 0

    def _drop_cache(self) -> None:
        self._drop_parked()
        self._cache = self._slots.make_cache(self.capacity, self.max_context_tokens)

    def _queue(self, request: GenerationRequest) -> None:
        request.row, request.num_cached, request.num_prompt = -1, 0, len(request.ids)
        request.known_head = None
        if request.images:
            assert self._vision is not None
            request.positions = self._vision.positions(torch.tensor(request.ids), request.images)
            request.shift = int(request.positions.max()) + 1 - len(request.ids)
        self._waiting.append(request)

    def _start_running(self) -> None:
        is_running = self._task is not None and not self._task.done()
        if self._waiting and not self._is_paused and not is_running:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.wake()
            with self._slots.borrowed():
                while True:
                    self._step()
                    # Nothing is awaited before the model is restored: no caller may see it in
                    # evaluation mode.
                    if self._is_paused or not (self._waiting or self._active):
                        return
                    num_rounds = 1
                    if len(self._active) < self.capacity:
                        num_rounds += LOOP_ROUNDS // (1 + self._steps_since_answer)
                    for _ in range(num_rounds):
                        await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Raises the error in every unfinished generate()."""
        self._settle()
        for request in (*self._waiting, *self._active):
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting.clear()
        self._active.clear()
        self._drop_cache()

    @torch.inference_mode()
    def _step(self) -> None:
        self._leave([request for request in self._active if request.future.done()])
        # A prefill costs a forward however small it is: wait for more requests, but not for long.
        num_new = min(len(self._waiting), self.capacity - len(self._active))
        self._steps_since_refill += 1
        self._steps_since_answer += 1
        is_enough = (
            not self._active
            or 4 * num_new >= self.capacity
            or self._steps_since_refill >= REFILL_STEPS
        )
        if num_new > 0 and is_enough:
            self._admit()
        if self._active:
            self._decode()

    def _decode(self) -> None:
        """Samples one token of each active request."""
        if self._batch is None:
            self._batch = self._make_batch()
        batch = self._batch
        tokens, images = batch.tokens[:, None], {}
        if self._vision is not None:
            tokens = self._vision.model_ids(tokens)
        if batch.shifts is not None:
            images["images"] = ForwardImages(position_ids=(batch.columns + batch.shifts)[:, None])
        with self._using_adapters(batch.requests):
            hidden = self._slots.forward(
                self._cache,
                slice(0, len(batch.requests)),
                tokens,
                batch.columns,
                batch.longest + 1,
                is_even=batch.is_even,
                **images,
            )
        if self._row_params is None:
            self._row_params = self._params_of(batch.requests)
        sampled = self._sample(batch.requests, hidden[:, 0], self._row_params)
        batch.tokens, batch.columns = sampled[0].long(), batch.columns + 1
        batch.longest += 1
        batch.steps.append(self._received(batch.requests, sampled))
        self.stats["decode_steps"] += 1
        self.stats["decode_tokens"] += len(batch.requests)
        if batch.is_due:
            batch.record()
            self._finish_ended(batch.requests)

    def _make_batch(self) -> Batch:
        requests = list(self._active)
        newest = [request.ids[-1] for request in requests]
        starts = [len(request.ids) - 1 for request in requests]
        tokens, columns = self._to_device([newest, starts], torch.long)
        limits = [request.params for request in requests]
        shifts = [request.shift for request in requests]
        return Batch(
            shifts=self._to_device(shifts, torch.long) if any(shifts) else None,
            requests=requests,
            tokens=tokens,
            columns=columns,
            longest=max(starts),
            is_even=min(starts) == max(starts),
            stop_ids=frozenset().union(*(params.stop_token_ids for params in limits)),
            needs_tokens=any(p.stop or p.json_schema or p.keeps_ids for p in limits),
            num_steps=steps_to_record(requests),
        )

    def _settle(self) -> None:
        """Gives the completions all sampled tokens. Called before requests enter or leave."""
        if self._batch is not None:
            self._batch.record()
            self._batch = None

    def _admit(self) -> None:
        """Prefills the tokens of each prompt that no row and no parked session holds, and samples
        the first token of each request."""
        self._steps_since_refill = 0
        self._waiting = [request for request in self._waiting if not request.future.done()]
        started = self._waiting[: self.capacity - len(self._active)]
        if not started:
            return
        self._settle()
        computed: dict[int, list[GenerationRequest]] = defaultdict(list)  # Key: head.
        if self._slots.is_batched:
            for request in (*self._parked.values(), *self._active):
                computed[request.head].append(request)
        for request in started:
            self._find_source(request, computed[request.head])
            computed[request.head].append(request)
        left = started
        while left:
            # A request that shares a prefix with another of these comes after it.
            ready = [request for request in left if request.is_ready]
            ready.sort(key=lambda request: request.num_new)
            self._place(ready)
            new = [request for request in ready if request.num_new]
            for chunk in prefill_chunks(new) if self._slots.is_batched else ([r] for r in new):
                self._prefill(chunk)
            left = [request for request in left if request.row < 0]
        del self._waiting[: len(started)]
        hidden = []
        for request in started:
            version = self.adapter_versions.get(request.adapter, self.version)
            note_version(request.completion, version)
            assert request.hidden is not None
            hidden.append(request.hidden)
        sampled = self._sample(started, torch.stack(hidden), self._params_of(started))
        record(started, [self._received(started, sampled)])
        self._finish_ended(started)

    def _find_source(self, request: GenerationRequest, computed: list[GenerationRequest]) -> None:
        """Finds the longest computed prefix of the prompt, among requests with the same head and
        the parked request of its session."""
        parked = self._parked.get(request.session)
        computed = computed if parked is None else [parked, *computed]
        for source in computed:
            # A source with a longer common prefix has this token too.
            further = slice(request.num_cached, request.num_cached + 1)
            if source.ids[further] != request.ids[further]:
                continue
            num = num_shared(source, request)
            # Only a batched cache can be cut.
            if num > request.num_cached and (self._slots.is_batched or num == len(request.ids)):
                request.source, request.num_cached = source, num
            if request.num_new == 0:
                return

    def _place(self, requests: list[GenerationRequest]) -> None:
        """Gives the next rows to requests, and copies the prefix of each from its source: one copy
        for all requests with the same source."""
        takers: dict[tuple[GenerationRequest, int], list[int]] = defaultdict(list)
        self._row_params = None
        self._copy_parked(range(len(self._active), len(self._active) + len(requests)))
        for request in requests:
            request.row = len(self._active)
            self._active.append(request)
            self.end_session(request.session)
            source, request.source = request.source, None
            if source is not None:
                takers[source, request.num_cached].append(request.row)
                request.hidden = source.hidden
        for (source, num_cached), rows in takers.items():
            kept = source.parked or self._cache.snapshot(source.row, num_cached)
            self._cache.restore(rows, kept, num_cached)

    def _prefill(self, requests: list[GenerationRequest]) -> None:
        """Fills the rows of requests that are active."""
        longest = max(r.num_new for r in requests)
        # There are several pieces only if a single prompt is longer than PREFILL_TOKENS.
        is_cut = self._slots.is_batched and not any(r.images for r in requests)
        piece_tokens = PREFILL_TOKENS if is_cut else longest  # No image is cut.
        for done in range(0, longest, piece_tokens):
            starts = [request.num_cached + done for request in requests]
            hidden = self._forward(requests, starts, piece_tokens)
        for request, of_last in zip(requests, hidden, strict=True):
            request.hidden = of_last
        self.stats.update(prefill_tokens=sum(r.num_new for r in requests))

    def _forward(
        self, requests: list[GenerationRequest], starts: list[int], num_tokens: int
    ) -> Tensor:
        """Hidden states [n, hidden size] of the last tokens, after up to num_tokens tokens of each
        request from its start were computed. The requests have neighbouring rows."""
        pieces, sizes = [], []
        for request, start in zip(requests, starts, strict=True):
            pieces.append(request.ids[start : start + num_tokens])
            sizes.append(len(pieces[-1]))
        longest = max(sizes)
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        numbers = self._to_device([starts, sizes, *zip(*padded, strict=True)], torch.long)
        length = max(map(sum, zip(starts, sizes, strict=True)))
        rows = slice(requests[0].row, requests[-1].row + 1)
        tokens, images = numbers[2:].T, {}
        if self._vision is not None:
            if any(request.images for request in requests):
                from rl_core.engines.forward_images import images_of

                views = [(r.images, r.positions) for r in requests]
                images["images"] = images_of(self._vision, views, starts, padded)
            tokens = self._vision.model_ids(tokens)
        with self._using_adapters(requests):
            hidden = self._slots.forward(
                self._cache,
                rows,
                tokens,
                numbers[0] if any(starts) else None,
                length,
                numbers[1] if min(sizes) < longest else None,
                **images,
            )
        return hidden[torch.arange(len(requests), device=hidden.device), numbers[1] - 1]

    def _to_device(self, rows: Sequence[Numbers | float], dtype: torch.dtype) -> Tensor:
        device, is_gpu = self.model.device, self.model.device.type == "cuda"
        numbers = torch.tensor(rows, dtype=dtype, pin_memory=is_gpu)
        # On MPS such a copy may read memory that is freed by then (pytorch/pytorch#189690).
        return numbers.to(device, non_blocking=is_gpu)

    def _using_adapters(self, requests: list[GenerationRequest]) -> AbstractContextManager[None]:
        """Inside, each row of a forward uses the adapter of its request."""
        if self._adapters is None:
            return nullcontext()
        return self._adapters.of_rows([request.adapter for request in requests])

    def _params_of(self, requests: list[GenerationRequest]) -> RowParams:
        """Sampling parameters of the requests, in their order."""
        rows = [request.numbers for request in requests]
        used = set(rows)
        # Usually all requests have the same parameters.
        numbers = self._to_device(rows if len(used) > 1 else rows[:1], torch.float32)
        _, temperatures, top_k, top_p, min_p = zip(*used, strict=True)
        num_ordered = 0
        if any(top_k) or any(min_p) or min(top_p) < 1:
            num_ordered = max(int(number) or ALL_IDS for number in top_k)
        return RowParams(
            numbers=numbers.expand(len(rows), -1).T,
            is_scaled=set(temperatures) != {1},
            has_no_greedy=not any(is_greedy for is_greedy, *_ in used),
            num_ordered=num_ordered,
            num_kept=max(request.num_kept for request in requests),
        )

    def _sample(self, requests: list[GenerationRequest], hidden: Tensor, rows: RowParams) -> Tensor:
        """The result of sample() for each request's next token. hidden: [n, hidden size]."""
        bits = [request.random_bits(RANDOM_BITS) for request in requests]
        uniforms = self._to_device(bits, torch.float32) * 2.0**-RANDOM_BITS
        logits = self._slots.logits(hidden)
        if self._adapters is not None and self._adapters.head:
            with self._using_adapters(requests):
                self._adapters.head_products(hidden, logits)
        if any(request.matcher for request in requests):
            from rl_core.engines.grammars import masked_logits

            logits = masked_logits(logits, [request.matcher for request in requests])
        return sample(logits, uniforms, rows)

    def _received(self, requests: list[GenerationRequest], sampled: Tensor) -> Step:
        tokens, logprobs, *kept = sampled.tolist()  # The one wait for the device.
        if math.isnan(sum(logprobs)):
            self._fail_nan(requests, logprobs)
        if kept:
            self._keep_ids(requests, kept)
        return tokens, logprobs

    def _fail_nan(self, requests: list[GenerationRequest], logprobs: list[float]) -> None:
        """Raises an error in generate() of requests without a logprob, which leave with the next
        step. Clears their rows: masked values of whoever has the row next must be finite."""
        length = max(len(request.ids) for request in self._active)
        length += len(self._batch.steps) if self._batch else 0
        for request, logprob in zip(requests, logprobs, strict=True):
            if math.isnan(logprob):
                if not request.future.done():
                    request.future.set_exception(ValueError(NO_LOGPROB))
                if self._slots.is_batched:
                    self._cache.clear(request.row, length)

    def _finish_ended(self, requests: list[GenerationRequest]) -> None:
        """Finishes the requests that their newest token ended."""
        ended = []
        for request in requests:
            if request.future.done():  # Failed or cancelled.
                continue
            params, token = request.params, request.ids[-1]
            if len(request.ids) >= request.end or params.stop or token in params.stop_token_ids:
                request.completion.finish_reason = self._finish_reason(request)
                if request.completion.finish_reason:
                    ended.append(request)
        for request in ended:
            self._finish(request)
        self._leave(ended)

    def _keep_ids(self, requests: list[GenerationRequest], kept: list[list[float]]) -> None:
        """Adds to completions the ids that each token was sampled from. kept: [rank][request]."""
        for request, of_token in zip(requests, zip(*kept, strict=True), strict=True):
            if request.num_kept:
                ids = [str(int(number)) for number in of_token if number >= 0]
                request.completion.kept_ids.append(" ".join(ids))

    def _finish_reason(self, request: GenerationRequest) -> str:
        params, ids = request.params, request.completion.token_ids
        if ids[-1] in params.stop_token_ids:
            return "stop"
        if params.stop and self._has_stop_string(ids, params.stop):
            return "stop"
        return "length" if len(request.ids) >= request.end else ""

    def _has_stop_string(self, ids: list[int], stop: Sequence[str]) -> bool:
        # Each token has at least one byte, so this tail holds any stop string that has just ended.
        assert self.tokenizer is not None
        length = max(len(s.encode()) for s in stop) + 4
        text = decoded(self.tokenizer, ids[-length:], keeps_special=True)
        return any(s in text for s in stop)

    def _finish(self, request: GenerationRequest) -> None:
        if request.session and self._slots.is_batched:
            self._park(request)
        if request.matcher is not None:
            from rl_core.engines.grammars import failure

            if error := failure(request.matcher):
                request.future.set_exception(ValueError(error))
        if not request.future.done():
            completion = request.completion
            if self.tokenizer is not None:
                completion.text = decoded(self.tokenizer, completion.token_ids)
            if self._recorder:
                num_read = len(request.ids) - 1
                completion.experts = self._recorder.experts_of(self._cache, request.row, num_read)
            request.future.set_result(completion)
            self._steps_since_answer = 0

    def _park(self, request: GenerationRequest) -> None:
        """Keeps a conversation's keys and values in its row until another request needs the row."""
        self.end_session(request.session)  # The newest comes last.
        size = request.num_computed
        free_tokens = self._parked_limit - size
        while self._parked and self._num_parked > free_tokens:
            self.end_session(next(iter(self._parked)))
        if free_tokens >= 0:
            self._num_parked += size
            request.known_head = None
            self._parked[request.session] = request

    def _copy_parked(self, rows: range) -> None:
        """Copies parked sessions out of these rows, which other requests need."""
        for request in self._parked.values():
            if request.parked is None and request.row in rows:
                request.parked = self._cache.snapshot(request.row, request.num_computed)

    def _leave(self, requests: list[GenerationRequest]) -> None:
        """Frees the rows of requests. The last active requests move into these rows."""
        if not requests:
            return
        self._settle()
        left = set(requests)
        num_active = len(self._active) - len(left)
        if self._row_params is not None:
            self._row_params = self._row_params.of_fewer(num_active)
        holes = [request for request in self._active[:num_active] if request in left]
        moved = [request for request in self._active[num_active:] if request not in left]
        del self._active[num_active:]
        for hole, last in zip(holes, moved, strict=True):
            length = max(hole.num_computed, last.num_computed)
            self._cache.swap(hole.row, last.row, length)
            self._active[hole.row] = last
            hole.row, last.row = last.row, hole.row


def steps_to_record(requests: list[GenerationRequest]) -> int:
    """Decode steps until the first completion has its full length, at most RECORD_STEPS."""
    return min(RECORD_STEPS, *(request.end - len(request.ids) for request in requests))


def record(requests: list[GenerationRequest], steps: list[Step]) -> None:
    """Adds the sampled tokens of steps to completions."""
    tokens, logprobs = zip(*steps, strict=True)
    for request, new_tokens, new_logprobs in zip(
        requests, zip(*tokens, strict=True), zip(*logprobs, strict=True), strict=True
    ):
        ids = list(map(int, new_tokens))
        request.ids += ids
        request.completion.token_ids += ids
        request.completion.logprobs += new_logprobs
        if request.matcher is not None:
            for token in ids:
                request.matcher.consume_token(token)


def num_shared(source: GenerationRequest, request: GenerationRequest) -> int:
    """Length of the computed common prefix. The last id of the request counts only if the source
    keeps its hidden state, which the first logits need."""
    if source.adapter != request.adapter:
        return 0
    known = source.ids[: source.num_computed]
    if known == request.ids:
        num = len(known)
    else:
        num = len(list(takewhile(bool, map(operator.eq, known, request.ids))))
    has_hidden = num == len(request.ids) == source.num_prompt
    return num if has_hidden else min(num, len(request.ids) - 1)


def prefill_chunks(requests: Iterable[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Batches of requests sorted by length, of at most PREFILL_TOKENS with padding."""
    chunk: list[GenerationRequest] = []
    for request in requests:
        is_full = request.num_new * (len(chunk) + 1) > PREFILL_TOKENS
        if chunk and (is_full or request.num_new > 2 * chunk[0].num_new + 16):
            yield chunk
            chunk = []
        chunk.append(request)
    if chunk:
        yield chunk
