"""vLLM's HTTP server as the handle of a child process, and the arguments of that process
(vllm_server_main.py)."""

from __future__ import annotations

import json
import math
import shlex

import torch

from rl_core.engines.server_process import ServerProcess, check_own_flags, check_package
from rl_core.sampling.engine import EngineSpec
from rl_core.types import JSONObject

OLDEST = (0, 32, 0)
# Logprobs of the distribution that tokens are drawn from, and weights of rl_core.
SETTINGS = {
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": -1,
    "worker_extension_cls": "rl_core.engines.vllm_worker.WorkerExtension",
}
# Pixels arrive as the vision tower reads them: vLLM would rescale and normalize them once more.
SEES = {"mm_device_do_normalize": False}
BROADCAST = '{"backend": "rl_core_broadcast"}'  # See vllm_worker.BroadcastEngine.
HEAD = '{"head_dtype": "float32"}'  # The learner computes logits in fp32.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Values that --max-lora-rank takes.
# Flag of the server that --engine_args may not set -> the flag of rl_core that sets it.
OWN_FLAGS = {
    "--model": "--model",
    "--tensor-parallel-size": "--engine_tp",
    "-tp": "--engine_tp",
    "--dtype": "--learner.dtype",
    "--seed": "--seed",
    "--max-model-len": "--max_context_tokens",
    "--max-num-seqs": "--rollout.max_concurrent",
    "--gpu-memory-utilization": "--engine_memory_frac",
    "--device-memory-utilization": "--engine_memory_frac",
    "--max-lora-rank": "--actors.NAME.lora.rank",
    "--host": "",
    "--port": "",
    "--api-key": "",
    "--logprobs-mode": "",
    "--max-logprobs": "",
    "--generation-config": "",
    "--hf-overrides": "",
    "--enable-sleep-mode": "",
    "--enable-lora": "",
    "--max-loras": "",
    "--weight-transfer-config": "",
    "--enable-scale-out": "",
    "--worker-extension-cls": "",
    "--mm-device-do-normalize": "",
}


def check_vllm(args: str = "", is_planned: bool = False) -> None:
    """Raises ValueError if `args` sets a flag that rl_core sets itself, or if vLLM is too old or,
    unless is_planned, not installed. Imports nothing."""
    check_own_flags(args, OWN_FLAGS, "vLLM")
    check_package("vllm", OLDEST, is_planned)


class VLLMServer(ServerProcess):
    """vLLM's HTTP server."""

    command = ("-m", "rl_core.engines.vllm_server_main")
    probe, key_name = "v1/models", "VLLM_API_KEY"

    def order(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        # The first variable adds the routes that pause the server and update its weights.
        env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        env |= {"VLLM_NO_USAGE_STATS": "1"}
        env.pop("VLLM_API_KEY", None)
        if self.spec.device.type == "cpu":
            if self.spec.server.tp == 1:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Saves a process: a faster start.
            env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(cache_bytes(self.spec) / 2**30))
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return server_args(self.spec), env


def cache_bytes(spec: EngineSpec) -> int:
    """Bytes of the keys and values of all slots."""
    config = spec.module.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_values = 2 * config.num_hidden_layers * width
    num_values *= getattr(config, "num_key_value_heads", None) or heads
    return num_values * spec.dtype.itemsize * spec.num_slots * spec.max_context_tokens


def flag_of(setting: str, value: object) -> str:
    """The flag of the server that sets this value."""
    name = setting.replace("_", "-")
    return f"--no-{name}" if value is False else f"--{name} {value}"


def missing_flags(info: JSONObject, spec: EngineSpec) -> list[str]:
    """Flags that a server was not started with. info: of its route /server_info."""
    config = info["vllm_config"]
    settings: JSONObject = {**config["model_config"], **config["parallel_config"]}
    settings |= settings.get("multimodal_config") or {}
    wanted = SETTINGS | {"dtype": str(spec.dtype).removeprefix("torch.")}
    wanted["max_model_len"] = max(settings["max_model_len"], spec.max_context_tokens)
    wanted |= SEES if spec.vision else {}
    flags = []
    for name, value in wanted.items():
        if str(settings.get(name)).removeprefix("torch.") != str(value):
            flags.append(flag_of(name, value))
    overrides = settings.get("hf_overrides")
    is_wide = isinstance(overrides, dict) and overrides.get("head_dtype") == "float32"
    if spec.dtype != torch.float32 and not is_wide:
        flags.append(f"--hf-overrides '{HEAD}'")
    transfer = config.get("weight_transfer_config") or {}
    is_joined = transfer.get("backend") == json.loads(BROADCAST)["backend"]
    if spec.server.weight_sync == "broadcast" and not is_joined:
        flags.append(f"--weight-transfer-config '{BROADCAST}'")
    return flags


def server_args(spec: EngineSpec) -> list[str]:
    """Arguments of `vllm serve`."""
    dtype, tp = str(spec.dtype).removeprefix("torch."), spec.server.tp
    args = f"--dtype {dtype} --tensor-parallel-size {tp} --seed {spec.seed} "
    args += f"--max-model-len {spec.max_context_tokens} --max-num-seqs {spec.num_slots} "
    # No defaults of the model's files.
    args += "--generation-config vllm --enable-scale-out --disable-uvicorn-access-log "
    settings = SETTINGS | (SEES if spec.vision else {})
    args += "".join(f"{flag_of(name, value)} " for name, value in settings.items())
    if spec.adapters:
        rank = max(config["r"] for config in spec.adapters.values())
        allowed = min((r for r in RANKS if r >= rank), default=rank)
        # An update loads the new version before the old one is unloaded. On a CPU the last slot
        # must stay empty: vLLM applies its adapter to requests without one.
        num_slots = len(spec.adapters) + 1 + (spec.device.type == "cpu")
        args += f"--enable-lora --max-lora-rank {allowed} --max-loras {num_slots} "
    if spec.device.type == "cpu":
        args += "--enforce-eager "
    else:
        args += f"--gpu-memory-utilization {spec.memory_frac} --enable-sleep-mode "
    words = ["--model", spec.model, *args.split()]
    words += ["--weight-transfer-config", json.dumps({"backend": "rl_core"})]
    if spec.vision:  # Images alone, which the run itself keeps.
        words += ["--limit-mm-per-prompt", json.dumps({"video": 0}), "--mm-processor-cache-gb", "0"]
    if spec.dtype != torch.float32:
        words += ["--hf-overrides", HEAD]
    return [*words, *shlex.split(spec.server.args)]
