"""The real vLLM, which bash scripts/test_vllm.sh installs where there is no GPU, beyond the promises
of every engine."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import models_table
import numpy as np
import pytest
import torch
from kit import ROOT, engine_spec, metrics, run, words
from test_engine_contract import REQUESTS, Subject, needs_vllm
from test_sglang import (
    check_experts,
    check_split_experts,
    children_of,
    flags,
    free_port,
    rows_of_run_with_a_death,
    two_ways,
)

from rl_core.config import parse_config
from rl_core.data.images import read_image
from rl_core.data.vision_models import load_family
from rl_core.engines.server_process import own_flag, quoted_log
from rl_core.engines.vllm import VLLMEngine
from rl_core.engines.vllm_images import image_features
from rl_core.engines.vllm_server import BROADCAST, OWN_FLAGS, SETTINGS, flag_of, missing_flags
from rl_core.run.plan.image_checks import why_no_images
from rl_core.sampling.engine import EngineDied


@pytest.fixture(scope="module")
def warm(make_model, sort_data, tmp_path_factory) -> Path:
    """A model with heads of 32, as vLLM needs, after SFT on the form of an answer."""
    sft = (
        "--algorithm sft --max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 64 --num_steps 300 "
        "--optim.lr 3e-3 --optim.schedule cosine --data.train"
    )
    out = tmp_path_factory.mktemp("warm")
    run(out, words("--model", make_model(heads=2), sft, sort_data / "sft.jsonl"))
    return out / "hf/policy"


class OnDevice(Subject):
    """Its weights come in buckets, and again from the learner."""

    def make(self, spec) -> VLLMEngine:
        spec.server.weight_sync = "device"
        spec.server.bucket_bytes = 30_000  # Several buckets.
        spec.resend = self.weights
        return VLLMEngine(spec)


@needs_vllm
def test_a_server_maps_the_buckets_and_gets_them_again_after_a_death(make_model, tmp_path):
    subject = OnDevice("vllm", make_model(heads=2), tmp_path / "engine.log").load_first_weights()
    assert subject.held() == subject.held_first
    for _ in range(2):
        subject.change()
        subject.update()
        subject.check_all(REQUESTS, subject.speak(REQUESTS))
    held = subject.held()
    os.killpg(subject.engine.server.process.pid, signal.SIGKILL)
    subject.engine.server.process.wait()
    subject.run(subject.engine.wake())
    assert subject.held() == held
    subject.check_all(REQUESTS, subject.speak(REQUESTS))
    subject.close()


class Host(Subject):
    """A server that takes broadcasts."""

    def make(self, spec) -> VLLMEngine:
        spec.server.args = f"--weight-transfer-config '{BROADCAST}'"
        return VLLMEngine(spec)


class Broadcast(Subject):
    """Its server runs already."""

    url = ""

    def make(self, spec) -> VLLMEngine:
        spec.server.url, spec.server.weight_sync = self.url, "broadcast"
        spec.server.bucket_bytes = 30_000
        spec.resend = self.weights
        return VLLMEngine(spec)


@needs_vllm
def test_a_running_server_gets_broadcasts_after_a_new_start(make_model, tmp_path, monkeypatch):
    folder = make_model(heads=2)
    host = Host("vllm", folder, tmp_path / "engine.log")
    server = host.engine.server
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    monkeypatch.setattr(Broadcast, "url", server.url)
    subject = Broadcast("vllm", folder, tmp_path / "none.log").load_first_weights()
    assert subject.held() == subject.held_first
    for _ in range(2):
        subject.change()
        subject.update()
        subject.check_all(REQUESTS, subject.speak(REQUESTS))
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    host.run(host.engine.wake())
    with pytest.raises(EngineDied):
        subject.speak(REQUESTS[:1])
    subject.run(subject.engine.wake())
    subject.check_all(REQUESTS, subject.speak(REQUESTS))
    subject.close()
    host.close()


@needs_vllm
@pytest.mark.parametrize("num_steps", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_run_learns_though_its_server_is_killed_and_loses_no_group(
    num_steps, request, make_model, sort_data, tmp_path
):
    """In the short run, of an untrained model, the process that samples is killed, in the long one
    the process that answers."""
    model = make_model(heads=2) if num_steps == 4 else request.getfixturevalue("warm")

    def kill(pid: int) -> None:
        [server] = children_of(pid, "-f", "rl_core.engines.vllm_server")
        [core] = children_of(server, "-f", "EngineCore")
        os.kill(int(core if num_steps == 4 else server), signal.SIGKILL)

    learn = f"--engine vllm --num_steps {num_steps} --optim.lr 6e-4 --optim.warmup_steps 3"
    argv = flags(model, sort_data, tmp_path / "run", *words(learn, "--algo.clip_high 0.28"))
    rows = rows_of_run_with_a_death(["rl_core.train", *argv], tmp_path / "run", kill, num_steps)
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    assert num_steps < 40 or sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


@needs_vllm
@pytest.mark.slow
def test_two_actors_on_one_server_have_their_learners_weights(warm, tmp_path):
    learn = "--num_steps 3 --tasks_per_step 16 --group_size 8 --optim.lr 5e-3"
    learn += " --actors.up.sampling.top_k 20 --actors.up.sampling.top_p 0.9"
    run_folder = tmp_path / "run"
    run(run_folder, two_ways(warm, run_folder, *words(learn), engine="vllm"))
    rows = metrics(run_folder)
    assert len(rows) == 3
    assert [path.name for path in run_folder.glob("engine_*")] == ["engine_up_00000.log"]
    for name in ("up", "down"):
        learned = [row for row in rows if f"learn/{name}/grad_norm" in row]
        assert max(row[f"learn/{name}/grad_norm"] for row in learned) > 0
        assert max(row[f"learn/{name}/mismatch_kl_nats"] for row in learned) < 1e-6


@pytest.fixture
def mixture(monkeypatch) -> str:
    """A family with heads of 32, as vLLM needs on a CPU."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    family = models_table.FAMILIES["qwen3_moe"] | heads
    monkeypatch.setitem(models_table.FAMILIES, "qwen3_moe", family)
    return "qwen3_moe"


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("way", ["files", "device"])
def test_a_mixture_of_experts_samples_with_the_learners_logprobs(way, mixture, tmp_path):
    check_experts(VLLMEngine, mixture, way, tmp_path, num_versions=3)


@needs_vllm
@pytest.mark.slow
def test_servers_of_two_ranks_have_the_experts_that_ep_splits(mixture, torchrun, tmp_path):
    check_split_experts("vllm", mixture, torchrun, tmp_path)


@needs_vllm
@pytest.mark.slow
def test_running_servers_get_weights_after_a_new_start_of_one(
    warm, sort_data, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_API_KEY", "its-key")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    out, ports, servers = tmp_path / "run", [free_port(), free_port()], {}

    def serve(port: int) -> None:
        """Starts a server, or kills it and starts it anew."""
        if port in servers:
            os.killpg(servers[port].pid, signal.SIGKILL)
        arguments = ["serve", warm, "--port", port, "--dtype", "float32", "--max-model-len", 64]
        arguments += ["--enforce-eager", "--enable-scale-out"]
        for name, value in SETTINGS.items():
            arguments += flag_of(name, value).split()
        with open(tmp_path / f"{port}.log", "a") as file:
            servers[port] = subprocess.Popen(
                [Path(sys.executable).with_name("vllm"), *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    learn = words("--engine vllm --num_steps 4 --optim.lr 6e-4 --actors.policy.engine_urls", urls)
    torchrun = "torch.distributed.run --standalone --nproc_per_node 2 -m rl_core.train"
    try:
        for port in ports:
            serve(port)
        argv = flags(warm, sort_data, out, *learn)
        rows_of_run_with_a_death([*words(torchrun), *argv], out, lambda _: serve(ports[1]))
        assert all(server.poll() is None for server in servers.values()), "they are not the run's"
    finally:
        for server in servers.values():
            os.killpg(server.pid, signal.SIGKILL)
    assert not list(out.glob("engine_*"))


def test_a_log_is_quoted_with_its_cause_far_above_its_end():
    cause = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    prefix = "(EngineCore pid=16843) ERROR 11-28 01:28:12 [core.py:1512] "
    limits = "This can cause errors like `OSError: [Errno 24] Too many open files`."
    trace = [limits, "Traceback (most recent call last):", cause, dead, cause, dead]
    ends = [f"leak {number}" for number in range(12)]
    wanted = [*ends, "errors before these lines:", cause, dead]
    assert quoted_log("\n".join([prefix + line for line in trace] + ends)).split("\n") == wanted
    assert quoted_log("\n".join(["it starts", *ends])).split("\n") == ends


@needs_vllm
def test_flags_that_are_ours_are_refused_by_all_names_that_vllm_knows():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    owned = {id(known[flag]) for flag in OWN_FLAGS}
    refused = {name for name in known if own_flag(name, OWN_FLAGS)}
    assert refused == {name for name, action in known.items() if id(action) in owned}
    for arg in ("--gpu-mem=0.3", "--hf_overrides.head_dtype", "-tp=2"):
        assert own_flag(arg, OWN_FLAGS)


def test_a_running_server_without_needed_settings_is_refused():
    model = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1, "dtype": "torch.bfloat16"}
    model |= {"max_model_len": 512, "hf_overrides": {"head_dtype": "float32"}}
    extension = "rl_core.engines.vllm_worker.WorkerExtension"
    spec = engine_spec(None, dtype=torch.bfloat16, max_context_tokens=512)
    sees = {"multimodal_config": {"mm_device_do_normalize": True}}
    broadcast = f"--weight-transfer-config '{BROADCAST}'"
    for changed, expected in [
        ({}, ""),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_logprobs": 20}, "--max-logprobs -1"),
        ({"dtype": "torch.float16"}, "--dtype bfloat16"),
        ({"max_model_len": 511}, "--max-model-len 512"),
        ({"max_model_len": 1024}, ""),
        ({"weight_sync": "broadcast"}, broadcast),
        ({"weight_sync": "broadcast", "transfer": {"backend": "nccl"}}, broadcast),
        ({"weight_sync": "broadcast", "transfer": json.loads(BROADCAST)}, ""),
        (sees, ""),
        (sees | {"vision": "family"}, "--no-mm-device-do-normalize"),
        ({"hf_overrides": {}}, """--hf-overrides '{"head_dtype": "float32"}'"""),
        ({"worker_extension_cls": ""}, f"--worker-extension-cls {extension}"),
    ]:
        info = {"model_config": model | changed, "parallel_config": {}}
        info["parallel_config"]["worker_extension_cls"] = extension
        info["parallel_config"] |= {k: v for k, v in changed.items() if k.startswith("worker")}
        info["weight_transfer_config"] = changed.get("transfer")
        spec.vision, spec.server.weight_sync = changed.get("vision"), changed.get("weight_sync")
        assert " ".join(missing_flags({"vllm_config": info}, spec)) == expected


@pytest.mark.parametrize(
    "arch, reason", [("qwen2_5_vl", ""), ("mistral3", "no images of mistral3")]
)
def test_families_whose_images_vllm_does_not_take_are_refused(arch, reason, make_model):
    flags = words("--model", make_model(arch), "--env_path x.py --out x --engine vllm")
    refusal = why_no_images(parse_config(flags), "policy")
    assert reason in refusal and bool(reason) == bool(refusal)


def test_each_image_of_a_request_has_its_range_and_tensors(make_model):
    family = load_family(str(make_model("qwen3_vl", heads=2)))
    small, large = (read_image(np.full((16, width, 3), 9, np.uint8)) for width in (16, 24))
    images, frames = [small, small, large, small], [[5], [], [7, 8], [5], [9]]
    ids = frames[0] + [n for i, f in zip(images, frames[1:], strict=True)
                       for n in (*family.expand(i), *f)]  # fmt: skip
    made = image_features(images, ids, family, torch.float32)
    ranges = [(span["offset"], span["length"]) for span in made["mm_placeholders"]["image"]]
    assert ranges == [(1, 4), (5, 4), (11, 6), (18, 4)]
    assert made["mm_hashes"]["image"] == [str(image.key) for image in images]
    for image, text in zip(images, made["kwargs_data"]["image"], strict=True):
        assert family.tensors(image)["pixel_values"].numpy().tobytes() in base64.b64decode(text)
