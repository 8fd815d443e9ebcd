"""The CUDA installation, arguments and memory that SGLang's server is given."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from kit import engine_spec, make_learner, make_skeleton, words
from make_tiny_model import make_tiny_model
from test_engine_contract import needs_sglang, spec_of
from test_weight_transfer import Model

from rl_core.config import Config, parse_config
from rl_core.engines import sglang_cuda
from rl_core.engines.server_process import own_flag, reserved_port
from rl_core.engines.sglang import SGLangEngine
from rl_core.engines.sglang_cuda import (
    GRAPH_SAVER,
    check_allocator,
    check_build_tools,
    check_tp_devices,
    cuda_args,
    cuda_environment,
    cuda_toolkit,
    runtime_folders,
    with_room,
)
from rl_core.engines.sglang_server import (
    LOG_LEVEL,
    OWN_FLAGS,
    SGLangServer,
    child_environment,
    server_args,
)
from rl_core.engines.weight_transfer import described_transfer
from rl_core.learning.optimizers import missing_state_bytes
from rl_core.run.plan.engine import choose_engine
from rl_core.sampling.engine import EngineSpec, ServerSpec
from rl_core.types import SamplingParams


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def toolkit(folder: Path) -> Path:
    executable(folder / "bin/nvcc")
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()
    return folder


@pytest.mark.parametrize("folder", ["cu13", "cuda_runtime", "cu12"])
def test_a_process_without_a_toolkit_loads_the_runtime_of_torchs_wheels(
    folder, tmp_path, monkeypatch
):
    """Any shared library under the runtime's name: the loader searches by name."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
    wheels = tmp_path / "nvidia"
    (wheels / folder / "lib").mkdir(parents=True)
    shutil.copy(library, wheels / folder / "lib/libcudart.so.99")
    (wheels / "cublas/lib").mkdir(parents=True)

    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcudart.so.99')"]
    without = {"PATH": "/usr/bin:/bin"}
    assert (
        "libcudart.so.99"
        in subprocess.run(load, env=without, capture_output=True, text=True).stderr
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert str(wheels / folder / "lib") in runtime_folders()
    assert str(wheels / "cublas/lib") not in runtime_folders()
    subprocess.run(load, env=cuda_environment(without), check=True)
    kept = cuda_environment({**without, "LD_LIBRARY_PATH": "/first"})
    assert kept["LD_LIBRARY_PATH"].startswith(f"/first:{wheels}/{folder}/lib")


def test_the_toolkit_is_the_one_with_nvcc_and_headers(tmp_path, monkeypatch):
    real, wrapper = toolkit(tmp_path / "cuda"), executable(tmp_path / "wrapped/bin/nvcc")
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", ())
    wrapped = {"PATH": str(wrapper.parent)}
    assert cuda_toolkit(wrapped) is None
    assert cuda_toolkit({"PATH": str(real / "bin")}) == real
    assert cuda_toolkit({**wrapped, "CUDA_HOME": str(real)}) == real
    assert cuda_toolkit({"PATH": str(real / "bin"), "CUDA_HOME": str(wrapper.parent)}) is None
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", (str(real),))
    assert cuda_environment(wrapped)["CUDA_HOME"] == str(real)


def test_missing_build_tools_are_named_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_cuda, "TOOLKITS", ())
    tools = tmp_path / "bin"
    environ = {"PATH": str(tools)}
    with pytest.raises(
        ValueError, match=r"not found: nvcc .*CUDA_HOME.*, ninja .*, a C\+\+ compiler"
    ):
        check_build_tools(environ)
    check_build_tools({**environ, "TVM_FFI_CACHE_DIR": str(tmp_path)})
    executable(tools / "g++")
    environ["CUDA_HOME"] = str(toolkit(tmp_path / "cuda"))
    with pytest.raises(ValueError, match=r"not found: ninja \(pip install ninja\)$"):
        check_build_tools(environ)
    executable(tools / "ninja")
    check_build_tools(environ)


def shapes(num_parameters: float) -> torch.nn.Module:
    model = torch.nn.Linear(1000, int(num_parameters / 1000), bias=False, device="meta")
    model.config = SimpleNamespace()
    return model


@pytest.mark.parametrize("parameters, fits", [(1.7e9, True), (4e9, True), (5.5e9, False)])
def test_a_servers_pool_leaves_room_for_the_optimizer(parameters, fits, monkeypatch):
    """80 GB, --learner.offload none, fp32 weights of 4 bytes, Adam's two moments of 4 each: at the
    second wake-up 12 bytes a parameter are in use, at the start of the server 4."""
    moments = 8 * parameters
    reserved, used = [moments], [4 * parameters]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9 - sum(used), 80e9))
    spec = engine_spec(
        shapes(parameters), dtype=torch.bfloat16, memory_frac=0.6, reserved=reserved.pop
    )
    if not fits:
        with pytest.raises(ValueError, match=r"^the engine gets 0\.6 .*; set --learner\.offload p"):
            with_room(spec, True)
        return
    pool = with_room(spec, True).memory_frac * (80e9 - sum(used))
    assert 2 * parameters < pool <= 80e9 - 12 * parameters
    assert pool == pytest.approx(0.6 * (80e9 - 12 * parameters), rel=1e-2)
    # A server that restarts when the moments exist takes the same memory.
    reserved, used = [0.0], [4 * parameters, moments]
    spec.server.reserved = reserved.pop
    assert with_room(spec, False).memory_frac * (80e9 - sum(used)) == pytest.approx(pool, rel=1e-2)


def test_a_server_whose_weights_do_not_fit_is_refused_at_its_first_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10e9, 24e9))
    spec = engine_spec(shapes(4e9), dtype=torch.bfloat16, memory_frac=0.6)
    with pytest.raises(ValueError, match="set --engine_tp or --engine_memory_frac"):
        with_room(spec, True)
    # The memory of a dead server may not be free yet; a quantised model is smaller.
    assert with_room(spec, False).memory_frac == 0.6
    spec.server.args = "--quantization fp8"
    assert with_room(spec, True).memory_frac == 0.6
    spec.server.args, spec.module.config.quantization_config = "", {"quant_method": "fp8"}
    assert with_room(spec, True).memory_frac == 0.6


@pytest.mark.parametrize("options", ["sft", "sft --optim.name sgd", "ppo"])
def test_the_bytes_of_an_optimizers_state_are_known_before_its_first_step(options, tiny_model):
    options = f"--algorithm {options}"
    learner = make_learner(tiny_model, *options.split())
    expected = missing_state_bytes(learner)
    moments = []
    for trained in learner.trained():
        for _, parameter in trained.trained_parameters():
            parameter.grad = torch.ones_like(parameter)
        trained.optimizer.step()
        moments += [state for state in trained.optimizer_state() if state.ndim]
    assert expected == sum(moment.nbytes for moment in moments) > 0
    assert missing_state_bytes(learner) == 0
    offloaded = make_learner(tiny_model, *options.split(), "--learner.offload", "phase")
    assert missing_state_bytes(offloaded) == 0


@pytest.mark.parametrize(
    "tp, num_visible, first, message",
    [
        (1, 1, 0, None),
        (2, 4, 2, None),
        (2, 1, 0, "GPUs 0 to 1 and this rank sees 1"),  # A launcher that shows each rank one.
        (4, 8, 6, "--engine_tp=4: a server needs the GPUs 6 to 9 and this rank sees 8"),
    ],
)
def test_a_server_has_as_many_gpus_as_it_spans(tp, num_visible, first, message):
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_tp_devices(tp, num_visible, first)


GROUPS = "--actors.bob.model m --actors.policy.ranks 0-1 --actors.bob.ranks 2-3"
SEGMENTS = "expandable_segments:True"


def parsed(flags: str, tmp_path: Path, monkeypatch) -> Config:
    """Flags of a run where SGLang 0.5.19 is installed."""
    facts = tmp_path / "sglang-0.5.19.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: sglang\nVersion: 0.5.19\n")
    monkeypatch.syspath_prepend(tmp_path)
    return parse_config(words("--model m --env_path x.py --out x --engine sglang", flags))


@pytest.mark.parametrize(
    "flags, rank, environ, message",
    [
        ("--engine_tp 2", 2, {}, "needs the GPUs 2 to 3 and this rank sees 3"),
        ("--engine_tp 2", 1, {}, None),  # Rank 0 starts the server.
        (f"--engine_tp 2 {GROUPS}", 2, {}, None),
        ("--weight_sync device", 0, {"PYTORCH_ALLOC_CONF": SEGMENTS}, f"with PYTORCH.*{SEGMENTS}"),
        ("", 0, {"PYTORCH_ALLOC_CONF": SEGMENTS}, None),
        ("", 0, {"TVM_FFI_CACHE_DIR": "", "PATH": ""}, r"not found: .*a C\+\+ compiler"),
    ],
)
def test_a_rank_checks_its_gpus_and_variables_before_a_model_loads(
    flags, rank, environ, message, tmp_path, monkeypatch
):
    config = parsed(flags, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TVM_FFI_CACHE_DIR": "x"}
    for name, value in (ranks | environ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        SGLangEngine.check(config, "policy", False)


def test_each_start_of_a_server_on_a_gpu_is_sized_anew_and_has_a_new_port(
    own_server, tiny_model, tmp_path, monkeypatch
):
    """A killed server may hold its port and memory until the driver has freed them."""
    free = [1, 80e9]  # Bytes at the second and at the first start.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free.pop(), 80e9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("os.environ", {**os.environ, GRAPH_SAVER: "0"})
    skeleton = make_skeleton(str(tiny_model))
    options = {"reserved": lambda: 20e9, "memory_frac": 0.4}
    spec = spec_of(tiny_model, tmp_path / "log", skeleton, None, **options)
    server = SGLangServer(replace(spec, device=torch.device("cuda")))
    try:
        for _ in range(2):
            asyncio.run(server.start())
    finally:
        server.stop()
    starts = [line.split() for line in own_server.starts.read_text().splitlines()]
    sizes, ports = (
        [args[args.index(flag) + 1] for args in starts]
        for flag in ("--mem-fraction-static", "--nccl-port")
    )
    assert sizes == ["0.3", "0.0"]  # 0.4 of the 60 GB that are left of 80, and none.
    assert ports[0] != ports[1]


TOP_P, MIN_P = "--actors.policy.sampling.top_p 0.9", "--actors.bob.sampling.min_p 0.1"
SHARED = "--actors.policy.lora.rank 2 --actors.bob.lora.rank 2 --actors.bob.lora_base policy"


@pytest.mark.parametrize(
    "flags, refused",
    [
        (f"{TOP_P}", None),
        ("--sampling.min_p 0.1", None),
        (f"{TOP_P} --sampling.min_p 0.1", "policy"),
        (f"{TOP_P} --eval.sampling min_p=0.1", "policy"),
        (f"{TOP_P} --actors.bob.model m {MIN_P}", None),
        (f"{TOP_P} --actors.policy.model m {SHARED} {MIN_P}", "policy"),
        (
            f"--actors.policy.model m {SHARED} --actors.bob.sampling.top_p 0.9 "
            "--actors.policy.sampling.min_p 0.1",
            "bob",
        ),
        (
            f"{TOP_P} --sampling.min_p 0.1 --actors.policy.engine_urls http://a:1",
            None,  # The engine asks the server.
        ),
    ],
)
def test_top_p_with_min_p_needs_an_sglang_that_names_ids(flags, refused, tmp_path, monkeypatch):
    config = parsed(flags, tmp_path, monkeypatch)
    message = f"^--actors.{refused}: --sampling.top_p=0.9 with min_p, .* SGLang >= 0.5.20"
    with pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext():
        choose_engine(config, 1)


def cuda_spec(hidden: int, dtype: torch.dtype = torch.bfloat16, **server) -> EngineSpec:
    """A model with the ids of Qwen3: 151,936. Its head in fp32 is 0.58 GiB with 1,024 channels."""
    return EngineSpec(
        name="policy",
        model="m",
        module=torch.nn.Linear(hidden, 151_936, bias=False, device="meta"),
        tokenizer=None,
        num_slots=640,
        max_context_tokens=64,
        memory_frac=0.5,
        dtype=dtype,
        device=torch.device("cuda"),
        seed=0,
        server=ServerSpec(**server),
        log=Path("log"),
        start_timeout_s=1,
    )


TF32, GRAPHS = "--enable-tf32-matmul", "--cuda-graph-max-bs-decode 512"
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
SERVERS = [
    ((0, 5, 17), cuda_spec(1024), {}, [TF32, GRAPHS]),
    ((0, 5, 17), cuda_spec(2048), {}, [TF32, GRAPHS, NO_PREFILL_GRAPHS]),
    ((0, 5, 17), cuda_spec(2048, tp=2), {}, [TF32, GRAPHS]),
    ((0, 5, 17), cuda_spec(2048, torch.float32), {}, [GRAPHS]),
    ((0, 5, 17), cuda_spec(2048), {GRAPH_SAVER: "0"}, [TF32, GRAPHS]),
    ((0, 5, 17), cuda_spec(2048, args="--cuda-graph-bs-decode 1 2"), {}, [TF32]),
    ((0, 5, 18), cuda_spec(8192), {}, [GRAPHS]),
    ((0, 5, 18), replace(cuda_spec(8), num_slots=48), {}, ["--cuda-graph-max-bs-decode 48"]),
    ((0, 5, 18), replace(cuda_spec(8, tp=4), num_slots=1), {}, ["--cuda-graph-max-bs-decode 4"]),
    ((0, 5, 23), cuda_spec(1024), {GRAPH_SAVER: "Yes"}, [GRAPHS, NO_PREFILL_GRAPHS]),
]


@pytest.mark.parametrize("version, spec, environ, expected", SERVERS)
def test_graphs_are_freed_in_sleep_where_they_hold_a_gibibyte(version, spec, environ, expected):
    args = cuda_args(spec, version, environ)
    assert args == " ".join(["--mm-feature-transport cpu", *expected]).split()
    # With graphs of prompts such a server would not start.
    saver = child_environment(spec, environ, version).get(GRAPH_SAVER)
    assert (saver == "true") == (NO_PREFILL_GRAPHS in args)


@needs_sglang
def test_sglang_knows_the_arguments_of_a_server_on_a_gpu(monkeypatch):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    adapters = {"bob": {"r": 4, "target_modules": ["q_proj"]}}
    for version, spec, environ, _ in SERVERS:
        monkeypatch.setattr("os.environ", {**os.environ, **environ})
        spec.adapters = adapters
        args = parser.parse_args([*server_args(spec, version), "--nccl-port", "1"])
        assert args.enable_fp32_lm_head and args.enable_memory_saver and args.nccl_port == 1
    refused = {
        name for name in parser._option_string_actions if own_flag(name, OWN_FLAGS, {LOG_LEVEL})
    }
    assert refused - {"--no-enable-tf32-matmul"} == OWN_FLAGS.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tf32_keeps_all_values_of_16_bits(dtype):
    """TF32 drops the lowest 13 bits of the 23 of fp32's significand."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    assert len(values) > 60_000 and not (values.view(torch.int32) & (1 << 13) - 1).any()
    assert torch.tensor(1 / 3).view(torch.int32) & (1 << 13) - 1


def test_a_reserved_port_is_for_a_child_alone_and_again_after_its_restart():
    reserved = reserved_port()
    address = reserved.getsockname()
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(address)
        store = dist.TCPStore(*address, is_master=True)
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store


@pytest.mark.parametrize(
    "variable, value, setting",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", " expandable_segments : True ", "expandable_segments:True"),
        (
            "PYTORCH_ALLOC_CONF",
            "roundup_power2_divisions:[256:1,>:4],expandable_segments:True,max_split_size_mb:64",
            "expandable_segments:True",
        ),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,expandable_segments:False", ""),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,backend:native", ""),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:true", ""),  # torch itself refuses it.
        ("PYTORCH_CUDA_ALLOC_CONF", "", ""),
        ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", ""),
    ],
)
def test_memory_that_no_other_process_maps_is_not_sent(variable, value, setting, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    spec = replace(cuda_spec(8), resend=dict)
    if not setting:
        assert described_transfer(spec) == "device"
        check_allocator(os.environ)
        return
    assert described_transfer(spec) == f"files ({variable}={setting}; unset it for device)"
    with pytest.raises(ValueError, match=f"--weight_sync=device: with {variable}={setting}.*unset"):
        check_allocator(os.environ)


@needs_sglang
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_server_in_bf16_samples_and_sleeps_and_has_the_new_weights_awake(device, tmp_path):
    """The default engine of a run on one GPU, and the steps of the run with it. Prints the
    memory of the sleeping server."""
    make_tiny_model(tmp_path / "model", hidden=256, layers=4, heads=4)  # Heads of 64.
    device, sampled = torch.device(device), SamplingParams(max_tokens=32)

    def used_mib() -> int:
        if device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) >> 20

    options = {"weight_sync": "device", "bucket_bytes": 1 << 20, "memory_frac": 0.3}
    folders = tmp_path / "model", tmp_path / "engine.log"
    model = Model(*folders, device=device, dtype=torch.bfloat16, **options)
    before = used_mib()
    try:
        model.run(model.engine.wake())
        awake = used_mib() - before
        model.check_logprobs(sampled, atol=0.25)
        model.run(model.engine.sleep())
        asleep = used_mib() - before
        print(f"server: {awake} MiB awake, {asleep} MiB asleep")
        assert asleep <= awake / 2
        model.update(1, factor=1.1)
        model.run(model.engine.wake())
        model.check_logprobs(sampled, atol=0.25)
        model.run(model.engine.sleep())  # Without an update the learner sends the weights again.
        model.run(model.engine.wake())
        model.check_logprobs(sampled, atol=0.25)
    finally:
        model.close()
