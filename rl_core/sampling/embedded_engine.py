"""The in-process engine: continuous batching over a Hugging Face model's own forward, with its weights read in place.

Legend: n rows (requests in a forward), S new tokens per row, L cached tokens, H heads, K key-value heads, D head dim, V vocab.

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
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rl_core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ATTENTION = "rl_core_slots"
PREFILL_TOKENS = 8192  # padded tokens in one prefill forward: bounds its activations
REFILL_STEPS = 8  # waiting requests are admitted at the latest this many decode steps after the last ones
LOGIT_RULES = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")

Snapshot = list[tuple[Tensor, Tensor]]  # per layer, keys and values [K, L, D] of one row


class SlotCache:
    """Keys and values, per layer [num_slots, K, max_tokens + 1, D]; the last column takes what padding writes."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.layers:
            # Zeros, because what a mask hides still has to be finite.
            self.layers[index] = tuple(
                x.new_zeros(self.num_slots, x.shape[1], self.max_tokens + 1, x.shape[3]) for x in (key, value)
            )
        return self.layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        for pair in self.layers.values():
            for cache in pair:
                cache[target, :, :length] = cache[source, :, :length]

    def snapshot(self, row: int, length: int) -> Snapshot:
        return [(k[row, :, :length].clone(), v[row, :, :length].clone()) for k, v in self.layers.values()]

    def restore(self, row: int, kept: Snapshot, length: int) -> None:
        for pair, kept_pair in zip(self.layers.values(), kept, strict=True):
            for cache, kept_cache in zip(pair, kept_pair, strict=True):
                cache[row, :, :length] = kept_cache[:, :length]


@dataclass(kw_only=True, slots=True)
class ForwardPlan:
    """Where one forward's tokens go in the cache and what they see. It reaches slot_attention as a model argument."""

    cache: SlotCache
    rows: slice
    length: int  # L, the longest of its rows with the new tokens
    fresh: bool  # nothing is cached before these tokens
    positions: Tensor  # [n, S] column that each token is written to; [1, S] if fresh
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window, built once for all layers
    write_index: Tensor | None = None  # [n * K] decode only

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [n, K, S, D] keys and values and returns views of the caches [n, K, L, D]."""
        caches = self.cache.layer(layer, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            if self.fresh:
                cache[self.rows, :, : self.length] = new
            elif new.shape[2] == 1:
                num_heads, size = cache.shape[1], cache.shape[2]
                if self.write_index is None or len(self.write_index) != len(new) * num_heads:
                    heads = torch.arange(self.rows.start * num_heads, self.rows.stop * num_heads, device=new.device)
                    self.write_index = heads * size + self.positions.repeat_interleave(num_heads)
                cache.view(-1, cache.shape[3]).index_copy_(0, self.write_index, new.reshape(-1, new.shape[3]))
            else:
                rows = torch.arange(self.rows.start, self.rows.stop, device=new.device)[:, None]
                cache[rows, :, self.positions] = new.transpose(1, 2)
        return tuple(cache[self.rows, :, : self.length] for cache in caches)

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, S, L] bool, True where a query sees a key."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, None, :, None]
            seen = keys <= queries
            self.masks[window] = seen if window is None else seen & (keys > queries - window)
        return self.masks[window]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,  # [n, H, S, D]
    key: Tensor,  # [n, K, S, D]
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_plan: ForwardPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [n, S, H, D] over the slots, after the new keys and values were written into them."""
    keys, values = slot_plan.write(module.layer_idx, key, value)
    if slot_plan.fresh and (sliding_window is None or slot_plan.length <= sliding_window):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        mask = slot_plan.mask(sliding_window)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


# No mask function is registered under this name, which is how transformers is told to build no mask.
AttentionInterface.register(ATTENTION, slot_attention)


def truncated_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, V] with -inf for what top-k, then top-p of the rest, then min-p exclude; the [n] limits are per row."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    excluded = (before >= top_p[:, None]) & (rank > 0) | (probs < min_p[:, None] * probs[:, :1])
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(excluded, -torch.inf))


def sample_tokens(logits: Tensor, uniforms: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n] by inverse CDF at uniforms [n] in [0, 1), or the most likely where greedy, and their logprobs [n]."""
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1)
    # Scaled by the last entry, a uniform below 1 stays below it: rounding can never pick an excluded token.
    drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
    tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # clamped to the context
    session: str
    random_bits: Any  # of this request alone; one draw per token
    future: asyncio.Future[Completion]
    row: int = -1  # -1 while it waits
    num_cached: int = 0  # tokens of the prompt whose keys and values were kept from the session's last turn
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class SharedPrompt:
    """A prompt that somebody waits for or decodes from; its first owner prefills it for all."""

    owners: list[Request] = field(default_factory=list)
    hidden: Tensor | None = None  # [hidden size] of its last token, once prefilled
    kept: Snapshot | None = None  # made when the last owner with a row leaves while others wait


@dataclass(kw_only=True, slots=True)
class Parked:
    token_ids: list[int]
    kept: Snapshot


@dataclass(kw_only=True, slots=True)
class EngineStats:
    prefill_tokens: int = 0  # forwarded, without padding
    decode_steps: int = 0
    decode_tokens: int = 0


class EmbeddedEngine:
    """Samples from `model`, which it borrows only during a step: attention implementation and mode are put back."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy_version: int = 0,
    ) -> None:
        if num_slots < 1 or max_context_tokens < 2:
            raise ValueError(f"{num_slots=} must be at least 1 and {max_context_tokens=} at least 2")
        for rule in LOGIT_RULES:
            if getattr(model.config, rule, None) not in (None, 0, 1):
                raise ValueError(
                    f"{type(model).__name__} has {rule}={getattr(model.config, rule)}, which the embedded engine does "
                    "not apply; use another engine for this model"
                )
        self.model, self.tokenizer, self.policy_version, self.capacity = model, tokenizer, policy_version, num_slots
        self.max_context_tokens = max_context_tokens
        self.stats = EngineStats()
        self._decoder = model.get_decoder()
        self._cache = SlotCache(num_slots, max_context_tokens)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # the i-th has row i
        self._prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self._parked: dict[str, Parked] = {}  # oldest first
        self._steps_since_refill = 0
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = ""
    ) -> Completion:
        """One completion; see Engine. ValueError if the prompt leaves no room in the context or params are impossible."""
        self._check_request(prompt_ids, params)
        prompt = tuple(prompt_ids)
        request = Request(
            prompt=prompt,
            params=params,
            max_tokens=min(params.max_tokens, self.max_context_tokens - len(prompt)),
            session=session,
            random_bits=random.Random(seed).getrandbits,
            future=asyncio.get_running_loop().create_future(),
        )
        self._prompts.setdefault(prompt, SharedPrompt()).owners.append(request)
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_stopped)
        return await request.future

    def end_session(self, session: str) -> None:
        self._parked.pop(session, None)

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """None means that the weights were changed in place. Otherwise each is copied into the model; see Engine."""
        if self._waiting or self._active:
            raise RuntimeError(f"weights changed under {len(self._waiting) + len(self._active)} running requests")
        self._parked.clear()
        if named_weights is not None:
            load_weights(self.model, named_weights)
        self.policy_version = version

    def sleep(self) -> None:
        """Frees the cache's memory and every session's; the next request allocates it again."""
        assert not self._active, len(self._active)
        self._parked.clear()
        self._cache = SlotCache(self.capacity, self.max_context_tokens)

    async def close(self) -> None:
        """Cancels what is running and frees the cache."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._reset(None)

    def _check_request(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if not 0 < len(prompt_ids) < self.max_context_tokens:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens must have at least 1 and fewer than "
                f"max_context_tokens={self.max_context_tokens}; shorten it or raise the limit"
            )
        if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
            raise ValueError(f"{params} must have max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop} needs a tokenizer; give the engine one or use stop_token_ids")

    async def _run(self) -> None:
        while self._waiting or self._active:
            self._step()
            await asyncio.sleep(0)

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
        self.sleep()

    @torch.inference_mode()
    def _step(self) -> None:
        for request in [r for r in self._active if r.future.done()][::-1]:
            self._leave(request)
        for request in [r for r in self._waiting if r.future.done()]:
            self._waiting.remove(request)
            self._leave(request)
        with self._borrowed_model():
            if self._is_time_to_refill():
                self._admit()
            if self._active:
                self._decode()

    @contextlib.contextmanager
    def _borrowed_model(self) -> Iterator[None]:
        config, training = self._decoder.config, [m for m in self.model.modules() if m.training]
        implementation = config._attn_implementation
        config._attn_implementation = ATTENTION
        for module in training:
            module.training = False
        try:
            yield
        finally:
            config._attn_implementation = implementation
            for module in training:
                module.training = True

    def _is_time_to_refill(self) -> bool:
        """A prefill costs a forward however small it is, so wait for company, but not for long."""
        num_new = min(len(self._waiting), self.capacity - len(self._active))
        self._steps_since_refill += 1
        return num_new > 0 and (
            not self._active or 4 * num_new >= self.capacity or self._steps_since_refill >= REFILL_STEPS
        )

    def _admit(self) -> None:
        self._steps_since_refill = 0
        num_new = min(len(self._waiting), self.capacity - len(self._active))
        admitted = [self._waiting.popleft() for _ in range(num_new)]
        leaders: dict[tuple[int, ...], Request] = {}
        for request in admitted:
            if self._prompts[request.prompt].hidden is None and request.prompt not in leaders:
                leaders[request.prompt] = request
                request.num_cached = self._reusable_tokens(request)
        for chunk in prefill_chunks(list(leaders.values())):
            self._prefill(chunk)
        for request in admitted:
            if request.row < 0:
                self._share_prompt(request)
        hidden = torch.stack([self._prompts[r.prompt].hidden for r in self._active[-num_new:]])
        self._sample(self._active[-num_new:], hidden)

    def _reusable_tokens(self, request: Request) -> int:
        parked = self._parked.get(request.session) if request.session else None
        if parked is None:
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
        starts = [r.num_cached for r in requests]
        width = max(len(r.prompt) - r.num_cached for r in requests)
        # More than one piece only if a single prompt is longer than PREFILL_TOKENS.
        for first in range(0, width, PREFILL_TOKENS):
            pieces = [list(r.prompt[s + first : s + first + PREFILL_TOKENS]) for r, s in zip(requests, starts, strict=True)]
            hidden = self._forward(rows, [s + first for s in starts], pieces)
        last = torch.tensor([len(piece) - 1 for piece in pieces], device=hidden.device)
        for request, row in zip(requests, hidden[torch.arange(len(last), device=hidden.device), last], strict=True):
            self._prompts[request.prompt].hidden = row
        self.stats.prefill_tokens += sum(len(r.prompt) - r.num_cached for r in requests)

    def _share_prompt(self, request: Request) -> None:
        shared, length = self._prompts[request.prompt], len(request.prompt)
        self._enter(request)
        if shared.kept is not None:
            self._cache.restore(request.row, shared.kept, length)
        else:
            source = next(r for r in shared.owners if r.row >= 0 and r is not request)
            self._cache.copy_row(source.row, request.row, length)

    def _decode(self) -> None:
        requests = self._active
        hidden = self._forward(
            slice(0, len(requests)), [r.num_tokens - 1 for r in requests], [[r.token_ids[-1]] for r in requests]
        )
        self.stats.decode_steps += 1
        self.stats.decode_tokens += len(requests)
        self._sample(list(requests), hidden[:, 0])

    def _forward(self, rows: slice, starts: list[int], pieces: list[list[int]]) -> Tensor:
        """Hidden states [n, S, hidden size] of `pieces`, padded to the longest, whose first tokens come at `starts`."""
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
        uniforms = torch.tensor([r.random_bits(24) * 2.0**-24 for r in requests], device=device)
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
                    policy_version=self.policy_version,
                )
            )
        self._leave(request)

    def _park(self, request: Request) -> None:
        """Keeps a conversation's keys and values beside the slots, which others need while the hooks think."""
        token_ids = [*request.prompt, *request.token_ids[:-1]]
        self._parked.pop(request.session, None)
        self._parked[request.session] = Parked(
            token_ids=token_ids, kept=self._cache.snapshot(request.row, len(token_ids))
        )
        while sum(len(p.token_ids) for p in self._parked.values()) > self.capacity * self.max_context_tokens:
            del self._parked[next(iter(self._parked))]

    def _leave(self, request: Request) -> None:
        """Takes a request out of its prompt's owners and its row, and moves the last row into the hole."""
        shared = self._prompts[request.prompt]
        shared.owners.remove(request)
        if not shared.owners:
            del self._prompts[request.prompt]
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


@torch.no_grad()
def load_weights(model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into the model. ValueError on an unknown name, another shape, or a parameter left out."""
    targets = model.state_dict(keep_vars=True)
    loaded = set()
    for name, weight in named_weights:
        if name not in targets:
            raise ValueError(f"weight {name!r} is not in {type(model).__name__}; send its own state_dict's names")
        if weight.shape != targets[name].shape:
            raise ValueError(f"weight {name!r} has shape {list(weight.shape)}, not {list(targets[name].shape)}")
        targets[name].copy_(weight)
        loaded.add(id(targets[name]))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in loaded]
    if missing:
        raise ValueError(f"{len(missing)} parameters did not arrive, such as {missing[0]!r}; send all of them")
