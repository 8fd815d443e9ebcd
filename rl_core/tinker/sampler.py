"""Snapshots of adapters, and the engine that samples with them in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from uuid import uuid4

from torch import Tensor

from rl_core.engines.factory import MakeEngine
from rl_core.engines.options import make_sampler
from rl_core.learning.lora import second_model
from rl_core.models.loading import load_hf_model, load_model_config, on_meta
from rl_core.models.policy import end_token_ids
from rl_core.sampling.engine import EmbeddedSpec, Engine, EngineDied, EngineSpec, WeightOwner
from rl_core.tinker.multi_lora import SCRATCH, MultiLora, scaling_of
from rl_core.tinker.queue import FairGate, Refused
from rl_core.tinker.wire import Lora, Sampling
from rl_core.types import Completion, InputImage, SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class Snapshot:
    name: str
    tenant: str
    weights: dict[str, Tensor]  # MultiLora.weights()
    lora: Lora
    slot: str  # Name of the engine's adapter.
    key: str = field(default_factory=lambda: uuid4().hex)  # Differs after a second load.
    num_users: int = 0  # Requests that sample with it.


class SnapshotSampler:
    """`num_slots` snapshots at once. The least recently used one of the tenant with most of them
    makes room for a new one."""

    def __init__(
        self,
        lora: MultiLora,
        engine: type[Engine],
        path: str,
        num_slots: int,
        num_rows: int,
        **spec,
    ):
        """`path`: of the base model. `num_rows`: requests that are decoded at once. `spec`: further
        arguments of EngineSpec."""
        self.lora, policy, device = lora, lora.policy, lora.ranks.device
        if engine.weight_owner is WeightOwner.SERVER:
            module = on_meta(load_model_config(path))
        elif policy.is_shareable:
            module = second_model(policy.hf)
        else:
            module = load_hf_model(path, policy.compute_dtype, device)
        config = policy.adapters[lora.learners[SCRATCH].adapter].to_dict()
        config |= {"lora_alpha": lora.max_rank}  # Weights arrive scaled.
        self.end_ids = tuple(end_token_ids(path))
        self.slots = [f"snapshot{number}" for number in range(num_slots)]
        self.engine = cast(MakeEngine, engine)(
            EngineSpec(
                name="tinker",
                model=path,
                module=module,
                num_slots=num_rows,
                max_context_tokens=lora.max_tokens,
                dtype=policy.compute_dtype,
                device=device,
                adapters=dict.fromkeys(self.slots, config),
                vision=lora.family,
                embedded=EmbeddedSpec(sampler=make_sampler),
                **spec,
            )
        )
        if self.engine.shortage:
            print(self.engine.shortage, flush=True)
        self.gate = FairGate(self.engine.capacity)
        self.snapshots: dict[str, Snapshot] = {}  # Least recently used first.
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="engine", daemon=True).start()

    async def in_thread(self, work):
        """The result of a coroutine in the engine's thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def start(self) -> None:
        """Starts the engine and fills all adapters with zeros: layers are computed by modules with
        adapters from here on."""
        await self.in_thread(self.engine.wake())
        for slot in self.slots:
            await self.in_thread(self.engine.load_adapter(self.lora.padded({}), adapter=slot))

    async def add(self, name: str, tenant: str, weights: dict[str, Tensor], lora: Lora) -> None:
        """Makes a snapshot. Raises ValueError for weights that are not finite, and Refused if all
        others are in use."""
        scaled = await asyncio.to_thread(self.scaled, weights, lora)
        self.snapshots.pop(name, None)
        used = {snapshot.slot for snapshot in self.snapshots.values()}
        free = [slot for slot in self.slots if slot not in used]
        slot = free[0] if free else self.evict().slot
        snapshot = Snapshot(name=name, tenant=tenant, weights=weights, lora=lora, slot=slot)
        self.snapshots[name] = snapshot
        snapshot.num_users += 1
        try:
            await self.in_thread(self.engine.load_adapter(scaled, adapter=slot))
        except BaseException:
            self.snapshots.pop(name, None)
            raise
        finally:
            snapshot.num_users -= 1

    def scaled(self, weights: dict[str, Tensor], lora: Lora) -> list[tuple[str, Tensor]]:
        """The engine's weights of an adapter. Raises ValueError if one is not finite: samples with
        other adapters in the same batch would be NaN."""
        scaled = list(self.lora.padded(weights, scaling_of(lora, self.lora.alpha)))
        dtype = self.lora.policy.compute_dtype
        if not all(bool(value.to(dtype).isfinite().all()) for _, value in scaled):
            raise ValueError("the adapter's weights are not finite; lower learning_rate")
        return scaled

    def evict(self) -> Snapshot:
        of_tenant = Counter(snapshot.tenant for snapshot in self.snapshots.values())
        for tenant, _ in of_tenant.most_common():
            for snapshot in self.snapshots.values():
                if snapshot.tenant == tenant and not snapshot.num_users:
                    return self.snapshots.pop(snapshot.name)
        raise Refused(
            f"all {len(self.slots)} snapshots are sampling (--max_snapshots); wait for some of them"
        )

    def find(self, name: str) -> Snapshot | None:
        """None if the snapshot was dropped."""
        snapshot = self.snapshots.pop(name, None)
        if snapshot is not None:
            self.snapshots[name] = snapshot  # The most recently used.
        return snapshot

    def drop(self, prefix: str) -> None:
        """Drops the snapshots of an ended session."""
        for name in [name for name in self.snapshots if name.startswith(prefix)]:
            if not self.snapshots[name].num_users:
                del self.snapshots[name]

    def params(self, asked: Sampling, num_prompt: int) -> SamplingParams:
        """Raises ValueError for a prompt without room for a token."""
        max_tokens = self.lora.max_tokens
        num_left = max_tokens - num_prompt
        if num_left < 1:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; --max_context_tokens is {max_tokens}"
            )
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        texts = tuple(text for text in stop if isinstance(text, str))
        numbers = [number for number in stop if isinstance(number, int)]
        # vLLM refuses ids that are no token's.
        ids = tuple(number for number in numbers if 0 <= number < self.lora.vocab_size)
        return SamplingParams(
            max_tokens=min(asked.max_tokens or num_left, num_left),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k),
            stop=texts,
            stop_token_ids=ids if stop else self.end_ids,
        )

    async def sample(
        self,
        tenant: str,
        ids: list[int],
        images: tuple[InputImage, ...],
        params: SamplingParams,
        seeds: list[int],
        adapter: str,
    ) -> list[Completion]:
        """A completion for each seed. A server that died is started again."""

        async def generate(seed: int) -> Completion:
            ask = partial(self.engine.generate, ids, params, seed=seed, adapter=adapter)
            try:
                return await ask(images=images)
            except EngineDied:
                await self.engine.wake()
                return await ask(images=images)

        def start(seed: int):
            return self.in_thread(generate(seed))

        tasks = [asyncio.ensure_future(self.gate.run(tenant, lambda s=s: start(s))) for s in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.close(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
