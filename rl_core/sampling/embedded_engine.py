"""The in-process engine: continuous batching over a Hugging Face model's own forward, with its weights read in place.

Legend: n requests in a forward, S new tokens of each, V vocab.

Row i of the KV cache belongs to the i-th active request, so a forward always reads the first rows as one view and never
gathers. A row holds the keys and values of every token before the newest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_core.config import nearest
from rl_core.host_copies import HostCopies
from rl_core.sampling.adapters import AdapterTable
from rl_core.sampling.engine import EngineSpec, check_request
from rl_core.sampling.slot_cache import ATTENTION, ForwardPlan, SlotCache, Snapshot
from rl_core.sampling.weights import load_weights
from rl_core.types import Completion, SamplingParams, logit_change

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFILL_TOKENS = 8192  # padded tokens in one prefill forward: bounds its activations
REFILL_STEPS = 8  # waiting requests are admitted at the latest this many decode steps after the last ones


def truncated_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, V] with -inf where top-k, then top-p of the rest, then min-p exclude; limits [n] are per row."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    excluded = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(excluded, -torch.inf))


def sample_tokens(logits: Tensor, uniforms: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n] by inverse CDF at uniforms [n] in [0, 1), or the most likely where greedy, and their logprobs [n]."""
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1)
    # Scaled by the last entry, a uniform below 1 stays below it: rounding can never pick an excluded token.
    drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
    drawn = drawn.clamp(max=logits.shape[-1] - 1)  # NaN ends up behind the last token; the caller sees its logprob
    tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


PromptKey = tuple[str, tuple[int, ...]]  # keys and values are of a prompt and the adapter that read it


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # clamped to the context
    session: str
    adapter: str  # "" is none
    random_bits: Any  # of this request alone; one draw per token
    future: asyncio.Future[Completion]
    row: int = -1  # -1 while it waits
    num_cached: int = 0  # tokens of the prompt whose keys and values were kept from the session's last turn
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_prompted: int = 0  # of its tokens that stand in its prompt, because a pause dropped their keys and values
    versions: list[tuple[int, int]] = field(default_factory=list)  # (index, policy version): from this token on

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids) - self.num_prompted

    @property
    def key(self) -> PromptKey:
        return self.adapter, self.prompt


@dataclass(kw_only=True, slots=True)
class SharedPrompt:
    """A prompt that somebody waits for or decodes from; its first owner prefills it for all."""

    owners: list[Request] = field(default_factory=list)
    hidden: Tensor | None = None  # [hidden size] of its last token, once prefilled
    kept: Snapshot | None = None  # made when the last owner with a row leaves while others wait


@dataclass(kw_only=True, slots=True)
class Parked:
    adapter: str
    token_ids: list[int]
    kept: Snapshot


@dataclass(kw_only=True, slots=True)
class EngineStats:
    prefill_tokens: int = 0  # forwarded, without padding
    decode_steps: int = 0
    decode_tokens: int = 0


class EmbeddedEngine:
    """Samples from `model`, which it borrows only during a step: attention implementation and mode are put back.
    offloads: the model is its own; the weights wait on the host while it sleeps, and it is made asleep."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: int = 0,
        offloads: bool = False,
        adapters: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        if num_slots < 1 or max_context_tokens < 2:
            raise ValueError(f"{num_slots=} must be at least 1 and {max_context_tokens=} at least 2")
        if change := logit_change(model.config):
            raise ValueError(
                f"{type(model).__name__} sets {change}; the embedded engine does not apply that: use another engine"
            )
        self.model, self.tokenizer, self.version, self.capacity = model, tokenizer, version, num_slots
        self.max_context_tokens = max_context_tokens
        self.stats = EngineStats()
        self.adapter_versions: dict[str, int] = {}
        self._adapters, self._configs = AdapterTable(model), adapters or {}
        self._decoder = model.get_decoder()
        self._cache = SlotCache(num_slots, max_context_tokens)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # the i-th has row i
        self._prompts: dict[PromptKey, SharedPrompt] = {}
        self._parked: dict[str, Parked] = {}  # oldest first
        self._steps_since_refill = 0
        self._is_checked = self._is_paused = False
        self._task: asyncio.Task[None] | None = None
        self._copies = HostCopies(model.device) if offloads else None  # of the weights, while it sleeps
        if self._copies is not None:
            self._copies.to_host(model.parameters())

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = "", adapter: str = ""
    ) -> Completion:
        """One completion; see Engine. ValueError if the prompt leaves no room in the context, params make no sense or
        the adapter is not there."""
        check_request(prompt_ids, params, self.max_context_tokens, self.tokenizer)
        if adapter and adapter not in self.adapter_versions:
            raise ValueError(f"no adapter {adapter!r}; {nearest(adapter, self.adapter_versions)}")
        prompt = tuple(prompt_ids)
        request = Request(
            prompt=prompt,
            params=params,
            max_tokens=min(params.max_tokens, self.max_context_tokens - len(prompt)),
            session=session,
            adapter=adapter,
            random_bits=random.Random(seed).getrandbits,
            future=asyncio.get_running_loop().create_future(),
        )
        self._prompts.setdefault(request.key, SharedPrompt()).owners.append(request)
        self._waiting.append(request)
        self._start_running()
        return await request.future

    def end_session(self, session: str) -> None:
        self._parked.pop(session, None)

    async def update(self, weights: Iterable[tuple[str, Tensor]] | None, version: int, *, adapter: str = "") -> None:
        """Copies each weight into the model; see Engine. It is awake afterwards."""
        await self._drain()
        await self.wake()
        if adapter:
            self._parked = {session: p for session, p in self._parked.items() if p.adapter != adapter}
            self._adapters.load(adapter, weights, self._configs[adapter])
            self.adapter_versions[adapter] = version
            return
        self._parked.clear()
        if weights is not None:
            load_weights(self.model, weights)
        self.version = version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of what it samples with, without adapters; a tied weight comes once."""
        return self.model.named_parameters()

    async def sleep(self) -> None:
        """Frees the memory of the cache, of every session and, if it offloads, of the weights; see Engine."""
        await self._drain()
        self._free()
        if self._copies is not None and not self._copies.waiting:
            self._copies.to_host(self.model.parameters())

    async def wake(self) -> None:
        if self._copies is not None:
            self._copies.to_device()

    async def pause(self) -> None:
        """Stops between two tokens; see Engine. What a request has sampled becomes part of its prompt."""
        self._is_paused = True
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        for request in self._active:
            request.prompt += tuple(request.token_ids[request.num_prompted :])
            request.num_prompted, request.num_cached, request.row = len(request.token_ids), 0, -1
        self._waiting.extendleft(reversed(self._active))
        self._active.clear()
        self._prompts.clear()
        for request in self._waiting:
            self._prompts.setdefault(request.key, SharedPrompt()).owners.append(request)

    async def resume(self) -> None:
        self._is_paused = False
        if self._waiting:
            self._start_running()

    def _start_running(self) -> None:
        if not self._is_paused and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_stopped)

    async def _drain(self) -> None:
        running = [r for r in (*self._waiting, *self._active) if not r.future.done()]
        if running and not self._is_paused:
            raise RuntimeError(f"{len(running)} requests are running; await or cancel them, or pause the engine")
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])  # it drops requests that were cancelled

    def _free(self) -> None:
        self._parked.clear()
        self._cache = SlotCache(self.capacity, self.max_context_tokens)

    async def close(self) -> None:
        """Cancels what is running and frees the cache."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._reset(None)

    async def _run(self) -> None:
        await self.wake()
        with self._eval_mode():
            while True:
                self._step()
                # Left without another await, so that nobody who was answered finds the model in the wrong mode.
                if self._is_paused or (not self._waiting and not self._active):
                    return
                await asyncio.sleep(0)

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """For as long as requests run, because going over the modules at every step is not free."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _on_stopped(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for ever: what ended the loop is raised in every generate() that it has not answered."""
        if task.cancelled() or task.exception() is not None:
            self._reset(None if task.cancelled() else task.exception())

    def _reset(self, error: BaseException | None) -> None:
        for request in (*self._waiting, *self._active):
            if not request.future.done():
                request.future.cancel() if error is None else request.future.set_exception(error)
        self._waiting.clear()
        self._active.clear()
        self._prompts.clear()
        self._free()

    @torch.inference_mode()
    def _step(self) -> None:
        for request in [r for r in self._active if r.future.done()][::-1]:
            self._leave(request)
        if not self._is_checked:
            self._check_decoder()
        with self._attention(ATTENTION):
            if self._is_time_to_refill():
                self._admit()
            if self._active:
                self._decode()

    @contextlib.contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        config = self._decoder.config
        implementation = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = implementation

    def _check_decoder(self) -> None:
        """ValueError, at the first step, for a decoder that does more than this engine's attention and head."""
        token_ids = [token % self.model.config.vocab_size for token in (1, 2, 3)]
        with self._attention("eager"):
            tokens = torch.tensor([token_ids], device=self.model.device)
            expected = self.model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        with self._attention(ATTENTION):
            self._forward(slice(0, 1), [0], [token_ids[:2]], [""])
            hidden = self._forward(slice(0, 1), [2], [token_ids[2:]], [""])
        logits = self.model.get_output_embeddings()(hidden[0, -1]).float()
        tolerance = (1e-3 if self.model.dtype == torch.float32 else 0.1) * expected.abs().max()
        if (logits - expected).abs().max() > tolerance:
            raise ValueError(
                f"the embedded engine's logits differ from {type(self.model).__name__}'s own: it has an attention or a "
                "head that this engine does not apply; use another engine for this model"
            )
        self._is_checked = True

    def _is_time_to_refill(self) -> bool:
        """A prefill costs a forward however small it is, so wait for company, but not for long."""
        num_new = min(len(self._waiting), self.capacity - len(self._active))
        self._steps_since_refill += 1
        return num_new > 0 and (
            not self._active or 4 * num_new >= self.capacity or self._steps_since_refill >= REFILL_STEPS
        )

    def _admit(self) -> None:
        self._steps_since_refill = 0
        admitted: list[Request] = []
        while self._waiting and len(self._active) + len(admitted) < self.capacity:
            request = self._waiting.popleft()
            if request.future.done():  # cancelled
                self._leave(request)
            else:
                admitted.append(request)
        if admitted:
            self._start(admitted)

    def _start(self, admitted: list[Request]) -> None:
        """Prefills each prompt that is not in the cache yet, once, and samples everybody's first token."""
        leaders: dict[PromptKey, Request] = {}
        for request in admitted:
            if self._prompts[request.key].hidden is None and request.key not in leaders:
                leaders[request.key] = request
                request.num_cached = self._reusable_tokens(request)
        for chunk in prefill_chunks(list(leaders.values())):
            self._prefill(chunk)
        for request in admitted:
            if request.row < 0:
                self._share_prompt(request)
            version = self.adapter_versions.get(request.adapter, self.version)
            if not request.versions or request.versions[-1][1] != version:
                request.versions.append((len(request.token_ids), version))
        started = self._active[-len(admitted) :]
        self._sample(started, torch.stack([self._prompts[r.key].hidden for r in started]))

    def _reusable_tokens(self, request: Request) -> int:
        parked = self._parked.get(request.session) if request.session else None
        if parked is None or parked.adapter != request.adapter:
            return 0
        # The last token of the prompt is always forwarded: its hidden state gives the first logits.
        limit = min(len(parked.token_ids), len(request.prompt) - 1)
        pairs = zip(parked.token_ids[:limit], request.prompt, strict=False)
        return next((i for i, (old, new) in enumerate(pairs) if old != new), limit)

    def _enter(self, request: Request) -> None:
        request.row = len(self._active)
        self._active.append(request)

    def _prefill(self, requests: list[Request]) -> None:
        first_row = len(self._active)
        for request in requests:
            self._enter(request)
            parked = self._parked.pop(request.session, None) if request.session else None
            if request.num_cached:
                self._cache.restore(request.row, parked.kept, request.num_cached)
        rows = slice(first_row, len(self._active))
        width = max(len(r.prompt) - r.num_cached for r in requests)
        # More than one piece only if a single prompt is longer than PREFILL_TOKENS.
        for done in range(0, width, PREFILL_TOKENS):
            starts = [r.num_cached + done for r in requests]
            pieces = [list(r.prompt[s : s + PREFILL_TOKENS]) for r, s in zip(requests, starts, strict=True)]
            hidden = self._forward(rows, starts, pieces, [r.adapter for r in requests])
        last = torch.tensor([len(piece) - 1 for piece in pieces], device=hidden.device)
        for request, row in zip(requests, hidden[torch.arange(len(last), device=hidden.device), last], strict=True):
            self._prompts[request.key].hidden = row
        self.stats.prefill_tokens += sum(len(r.prompt) - r.num_cached for r in requests)

    def _share_prompt(self, request: Request) -> None:
        shared, length = self._prompts[request.key], len(request.prompt)
        self._enter(request)
        if shared.kept is not None:
            self._cache.restore(request.row, shared.kept, length)
        else:
            source = next(r for r in shared.owners if r.row >= 0 and r is not request)
            self._cache.copy_row(source.row, request.row, length)

    def _decode(self) -> None:
        requests = self._active
        starts, pieces = [r.num_tokens - 1 for r in requests], [[r.token_ids[-1]] for r in requests]
        hidden = self._forward(slice(0, len(requests)), starts, pieces, [r.adapter for r in requests])
        self.stats.decode_steps += 1
        self.stats.decode_tokens += len(requests)
        self._sample(list(requests), hidden[:, 0])

    def _forward(self, rows: slice, starts: list[int], pieces: list[list[int]], adapters: list[str]) -> Tensor:
        """Hidden states [n, S, hidden size] of `pieces`, padded to the longest, whose first tokens come at `starts`, each
        with its adapter."""
        device, width = self.model.device, max(map(len, pieces))
        tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=device)
        fresh = not any(starts)
        if fresh:
            position_ids = positions = torch.arange(width, device=device)[None]
        else:
            position_ids = torch.tensor(starts, device=device)[:, None]
            if width > 1:
                position_ids = position_ids + torch.arange(width, device=device)
            positions = position_ids
            if any(len(piece) < width for piece in pieces):
                lengths = torch.tensor([len(piece) for piece in pieces], device=device)[:, None]
                padding = torch.arange(width, device=device) >= lengths
                positions = positions.masked_fill(padding, self.max_context_tokens)
                position_ids = position_ids.masked_fill(padding, 0)
        plan = ForwardPlan(
            cache=self._cache,
            rows=rows,
            length=max(s + len(p) for s, p in zip(starts, pieces, strict=True)),
            fresh=fresh,
            positions=positions,
        )
        with self._adapters.of_rows(adapters):
            out = self._decoder(input_ids=tokens, position_ids=position_ids, use_cache=False, slot_plan=plan)
        return out.last_hidden_state

    def _sample(self, requests: list[Request], hidden: Tensor) -> None:
        logits = self.model.get_output_embeddings()(hidden).float()
        device, params = logits.device, [r.params for r in requests]
        temperatures = [p.temperature or 1.0 for p in params]
        if any(t != 1.0 for t in temperatures):
            logits = logits / torch.tensor(temperatures, device=device)[:, None]
        # The most likely token is the same with or without truncation, and its logprob is defined without.
        limits = [(p.top_k, p.top_p, p.min_p) if p.temperature else (0, 1.0, 0.0) for p in params]
        if any(limit != (0, 1.0, 0.0) for limit in limits):
            logits = truncated_logits(logits, *torch.tensor(limits, device=device).unbind(1))
        uniforms = torch.tensor([r.random_bits(24) * 2.0**-24 for r in requests], dtype=torch.float32, device=device)
        greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        tokens, logprobs = sample_tokens(logits, uniforms, greedy)
        # One transfer for both; token ids are exact in fp32.
        sampled_tokens, sampled_logprobs = torch.stack((tokens.float(), logprobs)).tolist()
        for request, token, logprob in zip(requests, sampled_tokens, sampled_logprobs, strict=True):
            if logprob != logprob:
                raise ValueError("the model's logits are NaN; its weights have diverged or were never loaded")
            request.token_ids.append(int(token))
            request.logprobs.append(logprob)
        for request in reversed(requests):
            reason = self._finish_reason(request)
            if reason:
                self._finish(request, reason)

    def _finish_reason(self, request: Request) -> str:
        params, token_ids = request.params, request.token_ids
        if token_ids[-1] in params.stop_token_ids:
            return "stop"
        if params.stop:
            # A token that decodes to something has a byte at least, so this tail holds any stop string that just ended.
            tail = token_ids[-max(len(s.encode()) for s in params.stop) - 4 :]
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(s in text for s in params.stop):
                return "stop"
        return "length" if len(token_ids) >= request.max_tokens else ""

    def _finish(self, request: Request, reason: str) -> None:
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(
                request.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        if request.session:
            self._park(request)
        if not request.future.done():
            request.future.set_result(
                Completion(
                    token_ids=request.token_ids,
                    logprobs=request.logprobs,
                    text=text,
                    finish_reason=reason,
                    policy_version=request.versions[0][1],
                    newer_versions=request.versions[1:],
                )
            )
        self._leave(request)

    def _park(self, request: Request) -> None:
        """Keeps a conversation's keys and values beside the slots, which others need while the hooks think."""
        token_ids = [*request.prompt, *request.token_ids[request.num_prompted : -1]]
        self._parked.pop(request.session, None)
        self._parked[request.session] = Parked(
            adapter=request.adapter, token_ids=token_ids, kept=self._cache.snapshot(request.row, len(token_ids))
        )
        limit = self.capacity * self.max_context_tokens
        # No more conversations than slots always fit: counting tokens at each turn takes time.
        while len(self._parked) > self.capacity and sum(len(p.token_ids) for p in self._parked.values()) > limit:
            del self._parked[next(iter(self._parked))]

    def _leave(self, request: Request) -> None:
        """Takes a request out of its prompt's owners and its row, and moves the last row into the hole."""
        shared = self._prompts[request.key]
        shared.owners.remove(request)
        if not shared.owners:
            del self._prompts[request.key]
        if request.row < 0:
            return
        if shared.owners and shared.kept is None and all(r.row < 0 for r in shared.owners):
            shared.kept = self._cache.snapshot(request.row, len(request.prompt))
        last = self._active.pop()
        if last is not request:
            self._cache.copy_row(last.row, request.row, last.num_tokens - 1)
            self._active[request.row] = last
            last.row = request.row


def prefill_chunks(requests: list[Request]) -> Iterator[list[Request]]:
    """Requests of like length and of like origin (cached before or not), at most PREFILL_TOKENS with padding."""
    ordered = sorted(requests, key=lambda r: (r.num_cached > 0, len(r.prompt) - r.num_cached))
    chunk: list[Request] = []
    for request in ordered:
        width = len(request.prompt) - request.num_cached
        if chunk:
            shortest = len(chunk[0].prompt) - chunk[0].num_cached
            is_full = width * (len(chunk) + 1) > PREFILL_TOKENS
            if is_full or width > 2 * shortest + 16 or bool(chunk[0].num_cached) != bool(request.num_cached):
                yield chunk
                chunk = []
        chunk.append(request)
    if chunk:
        yield chunk


def make_engine(spec: EngineSpec) -> EmbeddedEngine:
    limits = {"num_slots": spec.num_slots, "max_context_tokens": spec.max_context_tokens}
    return EmbeddedEngine(
        spec.module, **limits, tokenizer=spec.tokenizer, offloads=spec.owns_weights, adapters=spec.adapters
    )
