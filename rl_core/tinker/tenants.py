"""Tenants, their sessions, models and saved weights; what each request of the client does.

A tenant is a key. It reaches its own sessions, models, futures and folder alone. Ids begin with a
session's, which is random.

OUT/keys                                    tenant, a space, its key
OUT/TENANT/SESSION:train:0/weights/NAME     tinker://SESSION:train:0/weights/NAME
                          /sampler_weights/NAME
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
from safetensors import torch as safetensors

from rl_core.data.rows import undo_rename
from rl_core.http_guard import HttpError
from rl_core.learning.lora import WEIGHTS
from rl_core.tinker.multi_lora import ADAPTER, SCRATCH, MultiLora, read_facts
from rl_core.tinker.queue import Lane, Promise, Promises, Refused, Result, Turns
from rl_core.tinker.sampler import Snapshot, SnapshotSampler
from rl_core.tinker.wire import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Lora,
    OfModel,
    OptimizerChoice,
    OptimStep,
    Sample,
    SamplingSession,
    SaveForSampler,
    SaveWeights,
    sample_response,
)
from rl_core.types import JSONObject, counter_seed

TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
PATH = re.compile(
    r"tinker://([0-9a-f-]{36}:train:\d{1,19})/(weights|sampler_weights)/"
    r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})"
)
MAX_SESSIONS = 100  # Of a tenant; a silent one ends for a new one.
MAX_SAMPLERS = 10_000  # Sampling sessions of a session; the oldest is forgotten.
SILENT_S = 300.0  # A session without a heartbeat for so long makes room for others.
FREED = f"A session without a heartbeat is freed after {SILENT_S:g} s."
# Tokens of a tenant's sequences that wait, and what each sequence counts in addition.
MAX_SAMPLED_TOKENS, SEQUENCE_TOKENS = 32 << 20, 1024
RESTARTED = "the server restarted, or the session ended: begin a new session from saved weights"


@dataclass(kw_only=True, slots=True, eq=False)
class ClientSession:
    id: str
    tenant: str
    heard_s: float = field(default_factory=time.monotonic)
    samplers: dict[str, SamplerEntry] = field(default_factory=dict)

    def add(self, entry: SamplerEntry) -> SamplerEntry:
        """The sampler of this id, which is `entry` unless there was one."""
        added = self.samplers.setdefault(entry.id, entry)
        while len(self.samplers) > MAX_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]
        return added


@dataclass(kw_only=True, slots=True, eq=False)
class SamplerEntry:
    """A sampling session."""

    id: str
    path: str = ""  # Saved weights; "": a snapshot, or the base model.
    is_base: bool = False
    known: dict[int, Promise] = field(default_factory=dict)  # By seq_id.
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(kw_only=True, slots=True, eq=False)
class Model:
    id: str
    session: ClientSession
    learner: str
    lane: Lane
    lora: Lora


def read_keys(file: Path, names: list[str]) -> dict[str, str]:
    """Tenant -> its key. New tenants get one. Raises ValueError for a wrong name or file."""
    keys: dict[str, str] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            name, _, key = line.partition(" ")
            keys[name] = key.strip()
    for name in names:
        keys.setdefault(name, f"tml-{secrets.token_urlsafe(32)}")
    for name, key in keys.items():
        if not TENANT.fullmatch(name) or name == file.name or not key.startswith("tml-"):
            raise ValueError(
                f"{file}: a line is a name of [a-z0-9_-] other than {file.name}, a space and a key "
                "tml-..."
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.tmp")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as opened:
        opened.writelines(f"{name} {key}\n" for name, key in keys.items())
    os.replace(scratch, file)
    return keys


def folder_of(out: Path, tenant: str, path: str) -> Path:
    """The folder of saved weights. Raises ValueError for a path that is none."""
    parts = PATH.fullmatch(path)
    if parts is None:
        raise ValueError(f"path={path[:200]} must be tinker://MODEL_ID/weights/NAME")
    return out.joinpath(tenant, *parts.groups())


class Tenants:
    def __init__(
        self,
        lora: MultiLora,
        sampler: SnapshotSampler,
        model: str,
        out: Path,
        num_tenants: int = 1,
    ):
        self.lora, self.sampler, self.model, self.out = lora, sampler, model, out
        self.num_models = len(lora.learners) - 1  # Without SCRATCH.
        self.max_models = max(1, self.num_models - num_tenants + 1)  # Of a tenant.
        self.promises = Promises()
        self.turns = Turns(self.promises, self.drop_gradients)
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, Model] = {}
        self.logprob_lanes: dict[str, Lane] = {}  # By tenant.
        self.sampled_tokens: Counter[str] = Counter()  # By tenant, of sequences that wait.
        for before in out.glob("*/*/*/.*.old"):
            undo_rename(before)

    # Sessions

    def create_session(self, tenant: str) -> ClientSession:
        sessions = [session for session in self.sessions.values() if session.tenant == tenant]
        if len(sessions) >= MAX_SESSIONS:
            oldest = min(sessions, key=lambda session: session.heard_s)
            if time.monotonic() - oldest.heard_s < SILENT_S:
                raise HttpError(429, f"a key may have {MAX_SESSIONS} sessions; end one. {FREED}")
            self.end_session(oldest)
        session = ClientSession(id=str(uuid4()), tenant=tenant)
        self.sessions[session.id] = session
        return session

    def session(self, tenant: str, session_id: str) -> ClientSession:
        """Raises HttpError 410 for an unknown one: the client's heartbeat ends."""
        session = self.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise HttpError(410, f"no such session: {RESTARTED}")
        session.heard_s = time.monotonic()
        return session

    def end_session(self, session: ClientSession) -> None:
        for model in [m for m in self.models.values() if m.session is session]:
            self.unload(model)
        for entry in session.samplers.values():
            for promise in entry.known.values():
                if promise.task is not None:
                    promise.task.cancel()
        self.sampler.drop(session.id)
        self.sessions.pop(session.id, None)

    # Models

    def find_model(self, tenant: str, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None or model.session.tenant != tenant:
            raise HttpError(404, f"no such model: {RESTARTED}")
        model.session.heard_s = time.monotonic()
        return model

    def unload(self, model: Model) -> None:
        self.turns.drop(model.lane, "the model was unloaded")
        self.models.pop(model.id, None)

    def drop_gradients(self, lane: Lane) -> None:
        for model in list(self.models.values()):
            if model.lane is lane:
                self.lora.call("drop_gradients", name=model.learner)

    def add_model(self, session: ClientSession, number: int, lora: Lora) -> Model:
        """A model with a free learner. Raises Refused if there is none for this tenant."""
        held = [m for m in self.models.values() if m.session.tenant == session.tenant]
        used = {model.learner for model in self.models.values()}
        free = [name for name in self.lora.learners if name not in used and name != SCRATCH]
        if not free or len(held) >= self.max_models:
            may_end = held if len(held) >= self.max_models else self.models.values()
            oldest = min(may_end, key=lambda model: model.session.heard_s)
            if time.monotonic() - oldest.session.heard_s < SILENT_S:
                raise Refused(
                    f"a key may have {self.max_models} of this server's {self.num_models} models "
                    "(--max_models), and these are in use; end another session, or unload a "
                    f"model. {FREED}"
                )
            self.unload(oldest)
            free = [oldest.learner]
        model_id = f"{session.id}:train:{number}"
        lane = Lane(tenant=session.tenant, next_id=0)
        model = Model(id=model_id, session=session, learner=free[0], lane=lane, lora=lora)
        self.models[model_id] = model
        return model

    def begin_model(
        self,
        tenant: str,
        session_id: str,
        number: int,
        lora: Lora,
        begin: Callable[[Model], Result],
    ) -> Promise:
        """The promise of request 0 of a model, which makes the model."""
        session = self.session(tenant, session_id)
        model = self.models.get(f"{session.id}:train:{number}")
        if model is None:
            try:
                model = self.add_model(session, number, lora)
            except Refused as error:
                promise = self.promises.add(tenant, f"{session.id}:train:{number}:refused")
                self.promises.finish(promise, error)
                return promise

        loop = asyncio.get_running_loop()

        def run() -> Result:
            try:
                return begin(model)
            except Exception:
                # Requests behind this one fail: see submit(). The loop reads models meanwhile.
                loop.call_soon_threadsafe(self.models.pop, model.id, None)
                raise

        return self.turns.submit(model.lane, 0, f"{model.id}:0", run)

    def create_model(self, tenant: str, asked: CreateModel) -> Promise:
        lora = asked.lora_config or Lora(rank=32)

        def begin(model: Model) -> Result:
            self.check_base(asked.base_model)
            check_optimizer(asked.optimizer_config)
            seed = counter_seed(model.id) if lora.seed is None else lora.seed
            self.lora.call("create", name=model.learner, lora=lora.model_dump(), seed=seed)
            return {"type": "create_model", "model_id": model.id}

        return self.begin_model(tenant, asked.session_id, asked.model_seq_id, lora, begin)

    def check_base(self, base_model: str | None) -> None:
        if base_model not in (None, self.model):
            raise ValueError(f"base_model={base_model}: this server has {self.model}")

    def info(self, tenant: str, model_id: str) -> JSONObject:
        model = self.find_model(tenant, model_id)
        is_folder = Path(self.model).is_dir()
        data = {
            "arch": self.lora.policy.hf.config.model_type,
            "model_name": self.model,
            "tokenizer_id": str(Path(self.model).resolve()) if is_folder else self.model,
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": self.model,
            "optimizer_config": {"type": "adamw"},
        }

    def submit(
        self, tenant: str, asked: OfModel, run: Callable[[Model], Result], **options
    ) -> Promise:
        model = self.find_model(tenant, asked.model_id)
        if asked.seq_id < 1:
            raise HttpError(400, "seq_id begins at 1")

        def run_if_loaded() -> Result:
            # The learner of a model that could not be made may be another tenant's.
            if self.models.get(model.id) is not model:
                raise Refused("the model was unloaded, or could not be made")
            return run(model)

        request_id = f"{model.id}:{asked.seq_id}"
        return self.turns.submit(model.lane, asked.seq_id, request_id, run_if_loaded, **options)

    def forward_backward(self, tenant: str, asked: ForwardBackward, body: bytes) -> Promise:
        kind = "" if asked.forward_only else "backward"
        position = OfModel(model_id=asked.model_id, seq_id=asked.seq_id)

        def run(model: Model) -> Result:
            return self.lora.call("forward_backward", name=model.learner, body=body)

        return self.submit(tenant, position, run, kind=kind, size=len(body))

    def optim_step(self, tenant: str, asked: OptimStep) -> Promise:
        def run(model: Model) -> Result:
            if asked.adam_params is None:
                check_optimizer(asked.optimizer_params or OptimizerChoice())
                raise ValueError("optim_step has no adam_params")
            params = asked.adam_params.model_dump()
            return self.lora.call("optim_step", name=model.learner, params=params)

        return self.submit(tenant, asked, run, kind="step")

    # Saved weights

    def save(self, model: Model, kind: str, name: str, may_replace: bool) -> str:
        path = f"tinker://{model.id}/{kind}/{name}"
        folder = folder_of(self.out, model.session.tenant, path)
        if folder.exists() and not may_replace:
            raise ValueError(f"{path} exists; give another name, or overwrite=True")
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = {"base_model": self.model, "path": path}
        self.lora.call(
            "save",
            name=model.learner,
            folder=str(folder),
            facts=facts,
            has_state=kind == "weights",
        )
        return path

    def save_weights(self, tenant: str, asked: SaveWeights) -> Promise:
        def run(model: Model) -> Result:
            path = self.save(model, "weights", asked.path, asked.overwrite)
            return {"type": "save_weights", "path": path}

        return self.submit(tenant, asked, run)

    def save_for_sampler(self, tenant: str, asked: SaveForSampler) -> Promise:
        loop = asyncio.get_running_loop()

        def run(model: Model) -> Result:
            answer: JSONObject = {"type": "save_weights_for_sampler"}
            if asked.path is not None:
                return answer | {"path": self.save(model, "sampler_weights", asked.path, True)}
            entry = SamplerEntry(id=f"{model.session.id}:sample:{asked.sampling_session_seq_id}")
            if entry.id in model.session.samplers:
                raise ValueError(
                    f"sampling_session_seq_id {asked.sampling_session_seq_id} is taken"
                )
            weights = self.lora.call("weights", name=model.learner)

            async def add() -> None:
                await self.sampler.add(entry.id, tenant, weights, model.lora)
                model.session.add(entry)

            asyncio.run_coroutine_threadsafe(add(), loop).result()
            return answer | {"sampling_session_id": entry.id}

        return self.submit(tenant, asked, run)

    def load_weights(self, tenant: str, asked: LoadWeights) -> Promise:
        def begin(model: Model) -> Result:
            self.check_base(asked.base_model)
            check_optimizer(asked.optimizer_config or OptimizerChoice())
            folder, _ = self.saved_facts(tenant, asked.path)
            if folder.parent.name != "weights":
                raise ValueError(f"{asked.path} is for sampling; load the result of save_state()")
            self.lora.call(
                "load", name=model.learner, folder=str(folder), has_optimizer=asked.optimizer
            )
            model.lora = self.lora.loras[model.learner]
            return {"type": "load_weights", "path": asked.path, "model_id": model.id}

        if asked.model_id is not None:
            position = OfModel(model_id=asked.model_id, seq_id=asked.seq_id)
            return self.submit(tenant, position, begin)
        if asked.session_id is None:
            raise HttpError(400, "load_weights needs model_id or session_id")
        return self.begin_model(tenant, asked.session_id, asked.model_seq_id, Lora(rank=1), begin)

    def saved_facts(self, tenant: str, path: str) -> tuple[Path, JSONObject]:
        """The folder and facts of saved weights of this base model. Raises ValueError."""
        folder = folder_of(self.out, tenant, path)
        facts = read_facts(folder, replace(self.lora.ranks, size=1))
        self.check_base(facts["base_model"])
        self.lora.check_saved(facts)
        return folder, facts

    # Samples

    async def create_sampler(self, tenant: str, asked: SamplingSession) -> SamplerEntry:
        """Raises ValueError for weights that cannot be read."""
        session = self.session(tenant, asked.session_id)
        if asked.model_path:
            await asyncio.to_thread(self.saved_facts, tenant, asked.model_path)
        else:
            self.check_base(asked.base_model)
        sampler_id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        path = asked.model_path or ""
        return session.add(SamplerEntry(id=sampler_id, path=path, is_base=not path))

    def find_sampler(self, tenant: str, sampler_id: str) -> SamplerEntry:
        session = self.sessions.get(sampler_id.partition(":")[0])
        if session is None or session.tenant != tenant or sampler_id not in session.samplers:
            raise HttpError(404, f"no such sampling session: {RESTARTED}")
        session.heard_s = time.monotonic()
        return session.samplers[sampler_id]

    async def snapshot_of(self, tenant: str, entry: SamplerEntry) -> Snapshot | None:
        """The weights to sample with; None: the base model's. Saved ones are read again after they
        made room for others. Raises ValueError for a snapshot that did."""
        if entry.is_base:
            return None
        async with entry.loading:
            if self.sampler.find(entry.id) is None:
                if not entry.path:
                    raise ValueError(
                        f"these weights made room for newer ones (--max_snapshots "
                        f"{len(self.sampler.slots)}); save them by a name, or take a new client"
                    )
                folder, facts = await asyncio.to_thread(self.saved_facts, tenant, entry.path)
                file = folder / ADAPTER / WEIGHTS
                weights = await asyncio.to_thread(safetensors.load_file, file)
                await self.sampler.add(entry.id, tenant, weights, Lora(**facts["lora"]))
            return self.sampler.snapshots[entry.id]

    def sample(self, tenant: str, asked: Sample) -> Promise:
        entry = self.find_sampler(tenant, asked.sampling_session_id)
        if asked.seq_id in entry.known:
            return entry.known[asked.seq_id]
        size = asked.num_tokens(self.lora.max_tokens) + asked.num_samples * SEQUENCE_TOKENS
        waiting = self.sampled_tokens[tenant]
        if waiting and waiting + size > MAX_SAMPLED_TOKENS:
            raise HttpError(429, f"sequences of {waiting} tokens wait; ask for fewer at once")
        request_id = f"{entry.id}:{asked.seq_id}"
        promise = self.promises.add(tenant, request_id, entry.known, asked.seq_id)
        names = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        promise.facts = {"sample_sequence_ids": names}
        self.sampled_tokens[tenant] += size
        promise.task = asyncio.ensure_future(self.sampled(tenant, entry, asked))
        promise.task.add_done_callback(lambda _: self.end_sample(promise, size))
        return promise

    def end_sample(self, promise: Promise, size: int) -> None:
        task, promise.task = promise.task, None
        assert task is not None
        self.sampled_tokens[promise.tenant] -= size
        if task.cancelled():
            result: Result | BaseException = Refused("the request was cancelled")
        else:
            result = task.exception() or task.result()
        self.promises.finish(promise, result)

    async def sampled(self, tenant: str, entry: SamplerEntry, asked: Sample) -> bytes:
        ids, images = await asyncio.to_thread(lambda: self.lora.token_ids(asked.prompt.read()))
        params = self.sampler.params(asked.sampling_params, len(ids))
        seed = asked.sampling_params.seed
        start = f"{entry.id}/{asked.seq_id}" if seed is None else str(seed)
        seeds = [counter_seed(start, number) for number in range(asked.num_samples)]
        snapshot = await self.snapshot_of(tenant, entry)
        if snapshot is not None:
            snapshot.num_users += 1
        try:
            adapter = "" if snapshot is None else snapshot.slot
            done = await self.sampler.sample(tenant, ids.tolist(), images, params, seeds, adapter)
            prompt_logprobs = None
            if asked.prompt_logprobs:
                prompt_logprobs = await self.prompt_logprobs(tenant, ids, bool(images), snapshot)
                if last := asked.prompt_logprobs_last_n:
                    prompt_logprobs[: max(0, len(ids) - last)] = np.nan
        finally:
            if snapshot is not None:
                snapshot.num_users -= 1
        sequences = [(each.finish_reason, each.token_ids, each.logprobs) for each in done]
        return sample_response(sequences, prompt_logprobs)

    async def prompt_logprobs(
        self, tenant: str, ids: np.ndarray, has_images: bool, snapshot: Snapshot | None
    ) -> np.ndarray:
        """[n] by the learner's forward, in the tenant's turn; NaN for the first token."""
        if has_images:
            raise ValueError("prompt logprobs of images are not supported; leave one out")
        if len(ids) < 2:
            return np.full(len(ids), np.nan, np.float32)
        lane = self.logprob_lanes.setdefault(tenant, Lane(tenant=tenant))
        results: list[np.ndarray] = []

        def run() -> Result:
            arguments: JSONObject = {"ids": ids.tolist(), "snapshot": ""}
            if snapshot is not None:
                arguments |= {"snapshot": snapshot.key, **snapshot.lora.model_dump()}
                if snapshot.key != self.lora.in_scratch:
                    arguments["body"] = safetensors.save(snapshot.weights)
            results.append(self.lora.call("logprobs", **arguments))
            return b""

        promise = self.turns.submit(lane, None, f"{tenant}:logprobs:{secrets.token_hex(8)}", run)
        await promise.done.wait()
        if not results:
            assert isinstance(promise.result, dict)
            raise Refused(promise.result["error"])
        return np.concatenate([np.full(1, np.nan, np.float32), results[0]])


def check_optimizer(asked: OptimizerChoice) -> None:
    if asked.type != "adamw":
        raise ValueError(
            f"optimizer {asked.type} is not supported, because its formula is not public; give "
            "AdamParams, and no optimizer to create_lora_training_client"
        )
