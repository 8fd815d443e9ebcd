"""Weights on their way to SGLang: in buckets through the device's memory, or by a broadcast. First
without SGLang; then the real one, which bash scripts/test_sglang.sh installs where there is no
GPU."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kit import engine_spec, make_skeleton
from test_engine_contract import GREEDY, load, logprobs_of, needs_sglang, random_prompts, spec_of
from test_sglang import free_port
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.config import parse_config
from rl_core.engines.buckets import in_flat_buckets
from rl_core.engines.options import ENGINES
from rl_core.engines.sglang import SGLangEngine
from rl_core.engines.sglang_server import server_args
from rl_core.engines.weight_transfer import (
    BroadcastTransfer,
    DeviceTransfer,
    FilesTransfer,
    choose_transfer,
    keeps_backup,
)
from rl_core.sampling.engine import RESENT_BY_RANKS, EngineDied
from rl_core.types import RunError, SamplingParams

CPU = torch.device("cpu")
VERSIONS = {"server_info": {"version": "0.5.23", "tp_size": 1}}


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of several dtypes and sizes, one empty, one larger than a bucket of 400 bytes."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (3,), (64, 9), (), (0, 4), (2, 2, 2), (33,)]
    weights = {f"w{n}": torch.randn(shape, generator=draw) for n, shape in enumerate(shapes)}
    weights["ids"] = torch.randint(100, (5,), generator=draw)
    weights["last"] = torch.randn(6, generator=draw, dtype=torch.float64)
    return weights


def unpacked(flat: torch.Tensor, metadata) -> dict[str, torch.Tensor]:
    """Tensors of a bucket, split by SGLang's rule."""
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in metadata}


def read_blob(blob: str) -> dict[str, torch.Tensor]:
    content = pickle.loads(base64.b64decode(blob))
    return unpacked(content["flattened_tensor"], content["metadata"])


# Buckets


@pytest.mark.parametrize("bucket_bytes", [1, 8, 100, 400, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_tensor_cast_and_are_no_larger_than_asked(bucket_bytes, dtype):
    weights = some_weights()
    received, sizes = {}, []
    for bucket in in_flat_buckets(weights.items(), dtype, CPU, bucket_bytes):
        received |= {name: value.clone() for name, value in read_blob(bucket.blob()).items()}
        sizes.append((bucket.num_bytes, sum(shape.numel() > 0 for shape in bucket.shapes.values())))
    assert list(received) == list(weights), "in their order"
    for name, value in weights.items():
        expected = value.to(dtype) if value.is_floating_point() else value
        assert torch.equal(received[name], expected) and received[name].dtype == expected.dtype
    assert all(size <= bucket_bytes or count == 1 for size, count in sizes)
    assert sum(size for size, _ in sizes) == sum(v.nbytes for v in received.values())


def test_a_bucket_is_as_full_as_the_next_tensor_allows():
    weights = {f"w{n}": torch.zeros(n % 7 + 1) for n in range(40)}
    filled = [b.num_bytes for b in in_flat_buckets(weights.items(), torch.float32, CPU, 64)]
    firsts = [b.shapes for b in in_flat_buckets(weights.items(), torch.float32, CPU, 64)]
    for (size, _), (_, shapes) in pairwise(zip(filled, firsts, strict=True)):
        assert size + 4 * next(iter(shapes.values())).numel() > 64


class Gathered:
    """Tensors made one by one, as shards are gathered. `most`: alive at once."""

    def __init__(self, count: int):
        self.count, self.alive, self.most = count, 0, 0

    def __iter__(self):
        for n in range(self.count):
            storage = torch.full((25,), float(n))
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield f"w{n}", Watched.of(storage, self)
            del storage


class Watched(torch.Tensor):
    @staticmethod
    def of(value: torch.Tensor, owner: Gathered) -> Watched:
        watched = value.as_subclass(Watched)
        watched.owner = owner
        return watched

    def __del__(self):
        if owner := getattr(self, "owner", None):
            owner.alive -= 1


def test_two_buckets_and_one_gathered_tensor_are_alive_at_most():
    """The weights are 40 times 100 bytes, a bucket has 500."""
    gathered, places = Gathered(40), []
    for bucket in in_flat_buckets(gathered, torch.float32, CPU, 500):
        places.append(bucket.memory.data_ptr())
        assert len(bucket.memory) == 500
    assert len(places) == 8 and len(set(places)) == 2
    assert all(a != b for a, b in pairwise(places)), "the one before may still be read"
    # The generator that made a tensor holds it while it makes the next.
    assert gathered.most <= 2


class CountedCopies(TorchDispatchMode):
    """Bytes that operations of torch copy."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        if func.name().endswith(("copy_", "_to_copy", "clone", "cat")):
            self.num_bytes += output.nbytes
        return output


def test_files_copy_weights_twice_on_the_host_and_buckets_once():
    weights = {f"w{n}": torch.randn(1000) for n in range(10)}
    total = sum(value.nbytes for value in weights.values())
    with CountedCopies() as counted:
        sent = [
            bucket.num_bytes
            for bucket in in_flat_buckets(weights.items(), torch.float32, CPU, 8000)
        ]
    assert counted.num_bytes == total == sum(sent)
    # torch copies nothing on the way to a file: safetensors makes the file's bytes, which are written.
    with CountedCopies() as counted:
        way = FilesTransfer(spec_with(weights), None)
        way.take(weights.items())
    files = list(way.folder.glob("*"))
    assert counted.num_bytes == 0
    assert total <= sum(file.stat().st_size for file in files) < 1.05 * total
    way.close()


@pytest.mark.parametrize("way_of", [FilesTransfer, DeviceTransfer])
def test_updates_and_adapters_leave_no_file_descriptors(way_of):
    weights = some_weights()

    def open_files() -> set[tuple[str, str]]:
        links = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # The listing's descriptor.
                links.add((link.name, os.readlink(link)))
        return links

    def sent(way, label: str) -> None:
        way.take(weights.items())
        asyncio.run(way.load())
        way.drop()
        folder = way.files.write([("a.safetensors", b"1"), ("b.json", b"2")], label)
        way.files.remove(folder)

    # Garbage of other tests may close its files meanwhile, so count those that are new.
    before, counts = open_files(), []
    for _ in range(2):  # torch opens one for good with the first bucket
        way = way_of(spec_with(weights), Loopback())
        for step in range(4):
            sent(way, f"step{step}")
            counts.append(len(open_files() - before))
        way.close()
        counts.append(len(open_files() - before))
    assert len(set(counts[:4])) == 1
    assert counts[4] == counts[9] <= counts[0]


# The device's memory


def spec_with(weights: dict[str, torch.Tensor], **more):
    module = torch.nn.ParameterDict({n: w for n, w in weights.items() if w.is_floating_point()})
    return engine_spec(module, **more)


class Loopback:
    """Takes what SGLang is asked, and reads the buckets."""

    def __init__(self, dies_at: int = 0):
        self.held, self.paths, self.num_buckets, self.dies_at = {}, [], 0, dies_at

    async def __call__(self, path, body):
        self.paths.append(path)
        if path == "update_weights_from_tensor":
            self.num_buckets += 1
            if self.num_buckets == self.dies_at:
                raise EngineDied("killed")
            blobs = body["serialized_named_tensors"]
            self.num_blobs, self.label = len(blobs), body["weight_version"]
            for blob in blobs:
                self.held |= {name: value.clone() for name, value in read_blob(blob).items()}
        return VERSIONS.get(path, {})


def drawn(weights, log: list):
    for name, value in weights.items():
        log.append(name)
        yield name, value


def test_one_session_brings_all_buckets_to_a_server():
    weights, ask = some_weights(), Loopback()
    way = DeviceTransfer(spec_with(weights, bucket_bytes=200, tp=3), ask)
    way.take(weights.items())
    asyncio.run(way.load())
    assert ask.paths[:2] == ["server_info", "begin_weight_update"]
    assert ask.paths[-1] == "end_weight_update" and ask.num_buckets > 2 and ask.num_blobs == 3
    assert ask.label == way.label and ask.held.keys() == weights.keys()
    assert all(
        torch.equal(ask.held[n], w.float() if n == "last" else w) for n, w in weights.items()
    )
    way.take(weights.items())
    asyncio.run(way.load())
    assert ask.paths.count("server_info") == 1
    way.close()


def test_an_update_waits_where_ranks_can_agree_on_one():
    weights = some_weights()
    ways = [FilesTransfer, DeviceTransfer]
    for waits in (True, False):
        for cls in ways:
            way = cls(spec_with(weights, resend=RESENT_BY_RANKS if waits else None), Loopback())
            assert way.has_weights, "the model's own"
            way.take(weights.items())
            assert way.has_weights
            way.drop()
            assert way.has_weights == (cls is FilesTransfer or not waits)
            way.close()


def test_a_death_between_buckets_leaves_no_weight_ungathered():
    weights, log, again = some_weights(), [], []
    spec = spec_with(weights, bucket_bytes=200, resend=lambda: drawn(weights, again))
    way = DeviceTransfer(spec, ask := Loopback(dies_at=2))
    way.take(drawn(weights, log))
    with pytest.raises(EngineDied, match="killed"):
        asyncio.run(way.load())
    assert log == list(weights), "gathering is a collective"
    way.drop()
    asyncio.run(way.load())
    assert again == list(weights) and ask.held.keys() == weights.keys()
    assert ask.paths.count("server_info") == 2, "the next server may have another version"
    way.close()


def test_a_dead_server_gets_no_weights_and_every_rank_gathers():
    weights, log = some_weights(), []
    way = DeviceTransfer(spec_with(weights), ask := Loopback())
    way.take(drawn(weights, log))
    way.drop()
    assert log == list(weights) and not ask.paths and way.label
    with pytest.raises(RunError, match="keeps no copy"):
        asyncio.run(way.load())
    way.close()


# A broadcast, to a process that has no code of ours

RECEIVER = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

asked = json.loads(sys.stdin.readline())
name, size = asked["group_name"], asked["world_size"]
store = dist.TCPStore(asked["master_address"], asked["master_port"], size, False)
group, _ = _new_process_group_helper(
    size, asked["rank_offset"], [], Backend(asked["backend"]), dist.PrefixStore(name, store),
    group_name=name, timeout=timedelta(seconds=60),
)
print(json.dumps({}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    dtypes = [getattr(torch, name) for name in asked["dtypes"]]
    sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(asked["shapes"], dtypes)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast(flat, 0).wait()
    parts = zip(asked["names"], flat.split(sizes), dtypes, asked["shapes"])
    found = {n: part.view(dtype).view(shape).tolist() for n, part, dtype, shape in parts}
    print(json.dumps(found), flush=True)
"""


class Receiver:
    """A server's rank in a separate process; a new one joins each group."""

    def __init__(self, dies_at: int = 0):
        self.held, self.num_buckets, self.num_groups, self.dies_at = {}, 0, 0, dies_at
        self.process = None

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", RECEIVER], **pipes)
        self.num_groups += 1

    async def __call__(self, path, body):
        if path == "init_weights_update_group":
            self.start()
        elif path != "update_weights_from_distributed":
            return VERSIONS.get(path, {})
        else:
            self.num_buckets += 1
            if self.num_buckets == self.dies_at:
                self.process.kill()
                raise EngineDied("killed")
        self.process.stdin.write(json.dumps(body) + "\n")
        self.process.stdin.flush()
        line = await asyncio.to_thread(self.process.stdout.readline)
        self.held |= json.loads(line)
        return {}


def test_a_broadcast_brings_every_value_after_a_death_too():
    weights = some_weights()
    weights["last"] = weights["last"].float()
    more = {"url": "http://127.0.0.1:9", "bucket_bytes": 200, "resend": lambda: weights.items()}
    way = BroadcastTransfer(spec_with(weights, **more), ask := Receiver(dies_at=3))
    try:
        way.take(weights.items())
        with pytest.raises(EngineDied, match="killed"):
            asyncio.run(asyncio.wait_for(way.load(), 60))
        assert ask.held.keys() != weights.keys()
        for _ in range(2):  # The second time by the same group.
            ask.held = {}
            asyncio.run(asyncio.wait_for(way.load(), 60))
            assert ask.held == {name: value.tolist() for name, value in weights.items()}
        assert ask.num_groups == 2
    finally:
        ask.process.kill()
        way.close()


# Choice of the way


def some_spec(device: str, **more):
    return engine_spec(None, **{"resend": print, "device": torch.device(device)} | more)


@pytest.mark.parametrize(
    "spec, way, backup",
    [
        (some_spec("cuda"), "device", False),
        (some_spec("cuda", adapters={"bob": {}}), "device", True),
        (some_spec("cuda", resend=None), "files", True),
        (some_spec("cuda", resend=RESENT_BY_RANKS), "device", False),
        (some_spec("cuda", url="http://a:1"), "files", True),
        (some_spec("cpu"), "files", True),
        (some_spec("cpu", weight_sync="device"), "device", False),
        (some_spec("cuda", weight_sync="device", resend=None), "device", True),
        (some_spec("cuda", weight_sync="files"), "files", True),
    ],
)
def test_the_way_is_chosen_by_what_learner_and_server_can(spec, way, backup):
    assert (choose_transfer(spec), keeps_backup(spec)) == (way, backup)


def test_a_server_keeps_no_copy_of_weights_that_the_learner_can_send_again(tiny_model, tmp_path):
    spec = spec_of(tiny_model, tmp_path / "log", make_skeleton(str(tiny_model)), None)
    spec.device = torch.device("cuda")
    assert "--enable-weights-cpu-backup" in server_args(spec, (0, 5, 23))
    spec.resend = dict
    assert "--enable-weights-cpu-backup" not in server_args(spec, (0, 5, 23))
    assert "--enable-memory-saver" in server_args(spec, (0, 5, 23))


URL = ["--actors.policy.engine_urls", "http://a:1"]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--engine", "embedded", "--weight_sync", "files"], "files needs --engine sglang"),
        (["--engine", "sglang", "--weight_sync", "broadcast"], "for servers that run already"),
        (
            [*URL, "--engine", "sglang", "--weight_sync", "device"],
            "a server that the run itself",
        ),
    ],
)
def test_a_way_that_cannot_be_is_refused_at_the_start(flags, says, tiny_model):
    arguments = ["--model", str(tiny_model), "--env_path", "x.py", "--out", "x", *flags]
    config = parse_config(arguments)
    with pytest.raises(ValueError, match=says):
        ENGINES[config.engine]().check(config, "policy", is_planned=True)


# The real one


class Model:
    """A plain model, and the engine that is to have its weights."""

    def __init__(self, folder, log, **more):
        more = {"bucket_bytes": 20_000, "resend": self.weights} | more
        self.spec = spec_of(folder, log, make_skeleton(str(folder)), None, **more)
        self.hf = load(folder).to(self.spec.device, self.spec.dtype)
        self.loop = asyncio.new_event_loop()
        self.engine = SGLangEngine(self.spec)

    def weights(self):
        return ((name, p.detach()) for name, p in self.hf.named_parameters())

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 600))

    def update(self, version: int, factor: float = 1.0, weights=None) -> None:
        with torch.no_grad():
            for parameter in self.hf.parameters():
                parameter.mul_(factor)
        self.run(self.engine.update(weights or self.weights(), version))

    def held(self) -> list[dict[str, str]]:
        """Hashes of the tensors at each of the server's ranks."""
        answer = self.run(self.engine._ask("weights_checker", {"action": "checksum"}))
        return [rank["checksums"] for rank in answer["ranks"]]

    def check_logprobs(self, params: SamplingParams = GREEDY, atol: float = 1e-4) -> None:
        for prompt in random_prompts(3):
            done = self.run(self.engine.generate(prompt, params, seed=0))
            expected = logprobs_of(self.hf, prompt, done.token_ids)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=atol, rtol=0)
            assert set(done.policy_versions) == {self.engine.version}

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()


def killing(model: Model, after: int):
    for n, item in enumerate(model.weights()):
        if n == after:
            os.killpg(model.engine.server.process.pid, signal.SIGKILL)
            model.engine.server.process.wait()
        yield item


@needs_sglang
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_servers_ranks_read_buckets_again_after_a_death(tp, tiny_model, tmp_path):
    """q, k and v of a layer, which the server computes as one, come in different buckets. Weights
    that the server lost in its sleep come with the next request, as on a GPU without a backup."""
    model = Model(tiny_model, tmp_path / "log", weight_sync="device", tp=tp)
    try:
        model.run(model.engine.wake())
        first = model.held()
        assert len(first) == tp == len({frozenset(rank.items()) for rank in first})
        model.update(1, factor=2)
        changed = model.held()
        assert all(not a.items() & b.items() for a, b in zip(first, changed, strict=True))
        model.check_logprobs()
        model.update(2, factor=0.5)
        assert model.held() == first, "every hash equals that of the folder's weights"

        model.run(model.engine.sleep())
        model.run(model.engine._ask("weights_checker", {"action": "reset_tensors"}))
        model.check_logprobs()
        assert model.held() == first

        model.update(3, factor=2, weights=killing(model, after=9))
        assert not model.engine.server.is_alive and model.engine.version == 3
        model.run(model.engine.wake())
        model.check_logprobs()
        assert model.held() == changed and model.engine.server.num_starts == 2
    finally:
        model.close()


@pytest.mark.slow
@needs_sglang
def test_a_tied_head_and_halves_of_fused_layers_arrive(tiny_model, tmp_path):
    """The head is the embedding's weight, which comes once. SGLang computes q, k and v as one
    layer, gate and up as another: their parts come in different buckets."""
    buckets = []

    class WatchedTransfer(DeviceTransfer):
        async def send_bucket(self, bucket, body):
            buckets.append(list(bucket.shapes))
            await super().send_bucket(bucket, body)

    model = Model(tiny_model, tmp_path / "log", weight_sync="device")
    assert model.hf.config.tie_word_embeddings
    model.engine.transfer = WatchedTransfer(model.spec, model.engine._ask)
    try:
        model.run(model.engine.wake())
        model.update(1, factor=1.5)
        model.check_logprobs()
    finally:
        model.close()
    names = [name for bucket in buckets for name in bucket]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(list(model.hf.parameters()))
    for first, second in (("q_proj", "k_proj"), ("gate_proj", "up_proj")):
        together = [bucket for bucket in buckets if first in str(bucket) and second in str(bucket)]
        assert not together, (first, together)


@needs_sglang
def test_a_server_that_runs_already_gets_weights_by_a_broadcast(tiny_model, tmp_path):
    port = free_port()
    spec = spec_of(tiny_model, tmp_path / "log", make_skeleton(str(tiny_model)), None)
    command = [sys.executable, "-m", "sglang.launch_server", *server_args(spec)]
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    model = Model(tiny_model, tmp_path / "log", weight_sync="broadcast", url=url)
    try:
        model.run(model.engine.wake())
        first = model.held()
        model.update(1, factor=2)
        model.check_logprobs()
        model.update(2, factor=0.5)
        assert model.held() == first
    finally:
        model.close()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.gpu
def test_another_process_reads_the_buckets_on_the_gpu(tmp_path):
    """Reads by a handle of CUDA IPC: sums equal those of the weights."""
    weights = {f"w{n}": torch.randn(100, 30, device="cuda") for n in range(5)}
    code = (
        "import base64, pickle, sys, torch; f = pickle.loads(base64.b64decode(sys.stdin.read())); "
        "m = f['metadata']; t = f['flattened_tensor']; assert t.is_cuda; "
        "print(sum(t[p.start_idx:p.end_idx].view(p.dtype).double().sum().item() for p in m))"
    )
    total = 0.0
    for bucket in in_flat_buckets(weights.items(), torch.float32, torch.device("cuda"), 30_000):
        torch.cuda.synchronize()
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, input=bucket.blob(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        total += float(done.stdout)
    assert total == pytest.approx(sum(w.double().sum().item() for w in weights.values()))
