"""SGLang as an engine. First without it: a server of a few lines speaks its HTTP. Then the real
one, which bash scripts/test_sglang.sh installs where there is no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from glob import glob
from pathlib import Path

import models_table
import numpy as np
import pytest
import torch
from aiohttp import web
from kit import ROOT, learn, make_learner, make_skeleton, metrics, sample, wait_until, words
from models_table import load_plain, make_family
from safetensors.torch import load_file
from test_engine_contract import GREEDY, logprobs_of, needs_sglang, random_prompts, spec_of

from rl_core.config import LoraConfig, parse_config
from rl_core.data.images import read_image
from rl_core.data.vision_models import load_family
from rl_core.engines.factory import EngineFactory
from rl_core.engines.sglang import SGLangEngine
from rl_core.engines.sglang_images import hash_of, read_image_data, tensors_of
from rl_core.engines.sglang_server import OWN_FLAGS, check_sglang, server_args
from rl_core.learning.lora import adapter_weights, is_served
from rl_core.metrics import Sum
from rl_core.run.plan.engine import choose_engine
from rl_core.run.plan.plan import make_plan
from rl_core.run.saving.checkpoint import export_policy
from rl_core.sampling.engine import Engine, EngineDied, ServerSpec
from rl_core.train import main
from rl_core.types import Completion, RunError, SamplingParams

ENV = ROOT / "envs/sort_digits.py"


class Standin:
    """Answers in SGLang's format, with tokens set by the test. `held`, `adapters`: the weights that
    it has read."""

    def __init__(self):
        self.answers, self.held, self.label, self.requests = (
            [([5], {"type": "length"})],
            {},
            "default",
            [],
        )
        # (path, number of the request to it) at which it dies.
        self.deaths, self.counts = set(), Counter()
        self.wait_for: dict[str, threading.Event] = {}  # path -> what its answers wait for
        self.version = "0.5.19"
        self.num_read: int | None = None  # Tokens of prompts with images, which None refuses.
        self.adapters, self.loop, started = {}, asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self.serve, args=(started,), daemon=True).start()
        assert started.wait(60)
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def serve(self, started) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path}", self.answer)
        self.runner = web.AppRunner(app)
        self.loop.run_until_complete(self.runner.setup())
        self.loop.run_until_complete(web.TCPSite(self.runner, "127.0.0.1", 0).start())
        started.set()
        self.loop.run_forever()

    async def answer(self, request) -> web.Response:
        path, body = (
            request.match_info["path"],
            await request.json() if request.can_read_body else {},
        )
        self.requests.append((path, body))
        self.counts[path] += 1
        if (path, self.counts[path]) in self.deaths:
            self.held, self.adapters, self.label = {}, {}, "default"  # Restarted at once.
            request.transport.close()
        while path in self.wait_for and not self.wait_for[path].is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if "image_data" in body and self.num_read is None:
            return web.json_response({"error": "Non-base64 digit found"}, status=400)
        if path == "generate":
            tokens, reason, *logprob = (
                self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            )
            meta = {
                "finish_reason": reason,
                "output_token_logprobs": [[*(logprob or [-0.5]), t] for t in tokens],
                "prompt_tokens": self.num_read or len(body["input_ids"]),
            }
            if body.get("return_sampling_mask") and self.version != "0.5.16":
                # Lacks newer tokens, as of a request that is aborted in the queue.
                named = tokens[:1] if reason["type"] == "abort" else tokens
                meta["output_token_sampling_mask"] = [[t, t + 100] for t in named]
                meta["output_token_sampling_logprobs"] = [-0.25] * len(named)
            return web.json_response(
                {"output_ids": tokens, "meta_info": meta | {"weight_version": self.label}}
            )
        if path == "update_weights_from_disk":
            self.label = body["weight_version"]
            for file in glob(f"{body['model_path']}/*.safetensors"):
                self.held |= load_file(file)
        if path == "load_lora_adapter":
            self.adapters[body["lora_name"]] = load_file(
                f"{body['lora_path']}/adapter_model.safetensors"
            )
        if path == "unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        return web.json_response({"success": True, "version": self.version})


@pytest.fixture
def standin():
    server = Standin()
    yield server
    server.loop.call_soon_threadsafe(server.loop.stop)


@pytest.fixture
def make(tiny_model, standin, tmp_path):
    """Makes engines over the stand-in's server; they are closed at the end."""
    made = []

    def engine(**more) -> SGLangEngine:
        skeleton = make_skeleton(str(tiny_model))
        spec = spec_of(tiny_model, tmp_path / "engine.log", skeleton, None, url=standin.url, **more)
        made.append(SGLangEngine(spec))
        return made[-1]

    yield engine
    for one in made:
        asyncio.run(one.close())


@pytest.mark.parametrize("num_read, error", [(None, "with 400"), (3, "read 3 of 7 tokens")])
def test_a_running_server_needs_rl_cores_processor_of_images(
    num_read, error, make, standin, make_model
):
    family = load_family(str(make_model("qwen3_vl", heads=2)))
    image = read_image(np.zeros((16, 24, 3), np.uint8))
    standin.num_read, labels = num_read, set()
    for _run in range(2):
        answer = make(vision=family).generate(
            [4, *family.expand(image)], SamplingParams(max_tokens=1), seed=0, images=[image]
        )
        with pytest.raises(RunError, match=f"{error}.*SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"):
            asyncio.run(answer)
        asked = standin.requests[-1][1]
        assert asked["input_ids"] == [4, *[family.token_id] * 6]
        data = read_image_data(asked["image_data"])
        labels.add(data["label"])
    assert len(labels) == 2, "a server that somebody updated has features of older weights"
    with pytest.raises(ValueError, match=r"has 5 tokens of images; .* they have 6"):
        tensors_of(data, asked["input_ids"][:-1], family.path)
    assert tensors_of(data, asked["input_ids"], family.path).keys() == family.tensors(image).keys()
    assert len({hash_of(1, "1"), hash_of(1, "2"), hash_of(2, "1")}) == 3


def weights_of(engine: SGLangEngine, value: float) -> dict[str, torch.Tensor]:
    shapes = {name: p.shape for name, p in engine.spec.module.named_parameters()}
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def update(engine: SGLangEngine, value: float, version: int) -> dict[str, torch.Tensor]:
    asyncio.run(engine.update((weights := weights_of(engine, value)).items(), version))
    return weights


def ask(engine: SGLangEngine, params: SamplingParams = GREEDY, adapter: str = ""):
    return asyncio.run(
        asyncio.wait_for(engine.generate([1, 2], params, seed=0, adapter=adapter), 60)
    )


def restart(engine: SGLangEngine, standin: Standin) -> None:
    """Somebody starts the server anew, and the engine finds out."""
    standin.held, standin.label = {}, "default"
    with pytest.raises(EngineDied, match="sampled with other weights than rl_core sent"):
        ask(engine)
    asyncio.run(engine.wake())


def is_same(held, sent) -> bool:
    return held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)


# Responses of the server


def test_a_request_that_the_server_cuts_off_is_a_completion_of_that_length(make, standin):
    """At the model's context, say, which may be shorter than the run's."""
    standin.answers = [([5, 6, 7], {"type": "length"})]
    done = ask(make())
    assert (done.token_ids, done.finish_reason) == ([5, 6, 7], "length") and GREEDY.max_tokens > 3


def test_an_end_token_that_was_not_asked_for_does_not_end_a_completion(make, standin):
    standin.answers = [
        ([5, 2], {"type": "stop", "matched": 2}),
        ([9], {"type": "stop", "matched": 9}, -0.25),
    ]
    done = ask(make(), SamplingParams(max_tokens=8, stop_token_ids=(9,)))
    assert (done.token_ids, done.finish_reason) == ([5, 2, 9], "stop")
    assert done.logprobs == [-0.5, -0.5, -0.25]
    assert [body["input_ids"] for path, body in standin.requests if path == "generate"] == [
        [1, 2],
        [1, 2, 5, 2],
    ]


def test_the_server_draws_as_it_is_asked_to(make, standin):
    engine = make()
    for asked in (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1},
        {"temperature": 0.0},
    ):
        ask(engine, SamplingParams(max_tokens=8, stop_token_ids=(9,), **asked))
        sent = [body for path, body in standin.requests if path == "generate"][-1][
            "sampling_params"
        ]
        off = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}  # SGLang's
        same = {
            "max_new_tokens": 8,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        assert {name: sent[name] for name in off | same} == off | same | asked


KEEPING = SamplingParams(max_tokens=12, top_k=7, keeps_ids=True)


def test_a_server_that_names_too_many_ids_is_refused(make, standin):
    """Also by requests of two actors, or of training and an evaluation: a batch may have both."""
    engine, top_p = make(), replace(KEEPING, top_p=0.9)
    assert ask(engine, top_p).kept_ids == ["5 105"]
    for min_p in (replace(GREEDY, min_p=0.1), replace(top_p, min_p=0.1)):
        with pytest.raises(ValueError, match=r"version 0\.5\.19: top_p with min_p, .*>= 0\.5\.20"):
            ask(engine, min_p)
    standin.version = "0.5.20"
    assert ask(engine, min_p).kept_ids == ["5 105"]
    standin.version = "0.5.16"
    with pytest.raises(RuntimeError, match=r"ids of 0 of 1 tokens; top_k, .* SGLang >= 0\.5\.17"):
        ask(engine, KEEPING)


@pytest.mark.parametrize(
    "answer, says",
    [
        (([], {"type": "stop", "matched": 2}), "gave no token"),
        (([], {"type": "abort", "message": "out of memory"}), "aborted a request: out of memory"),
        (([5], {"type": "length"}, None), "logits are NaN"),
    ],
)
def test_an_answer_that_nobody_can_use_is_an_error(make, standin, answer, says):
    standin.answers = [answer]
    with pytest.raises((RuntimeError, ValueError), match=says):
        ask(make())


def test_a_server_that_somebody_starts_anew_gets_its_weights_again(make, standin):
    engine = make()
    sent = update(engine, 0.5, version=3)
    assert is_same(standin.held, sent) and ask(engine).policy_version == 3
    restart(engine, standin)
    assert is_same(standin.held, sent) and ask(engine).policy_version == 3
    size = sum(file.stat().st_size for file in engine.transfer.folder.iterdir())
    expected = {"rollout/policy/engine_restarts": Sum(1)}
    # At first, and after the restart.
    expected["sync/policy/files_mib"] = Sum(2 * size / 2**20)
    assert asyncio.run(engine.take_metrics()) == expected
    assert len(list(Path(engine.transfer.files.home.name).iterdir())) == 1, (
        "of one version at a time"
    )


def test_an_update_of_a_lone_adapter_sends_no_other_weight(tiny_model, make, standin):
    learner = make_learner(tiny_model, "--actors.policy.lora.rank 4")
    engine, policy = (
        make(adapters={"policy": learner.policy.adapters["default"].to_dict()}),
        learner.policy,
    )
    policy.is_served = True
    for version, value in enumerate((0.5, 0.25)):
        for name, parameter in learner.trained_parameters():
            parameter.data.fill_(value * (1 + (".lora_A." in name)))
        asyncio.run(engine.update(learner.engine_weights(False), version, adapter="policy"))
        [(name, held)] = standin.adapters.items()
        assert (
            is_same(held, dict(adapter_weights(policy.hf, "default")))
            and ask(engine, adapter="policy").policy_version == version
        )
        assert standin.requests[-1][1]["lora_path"] == name
        assert {w.max().item() for w in held.values()} == {value, 2 * value}
    assert [path for path, _ in standin.requests].count(
        "load_lora_adapter"
    ) == 2 and not standin.held
    standin.deaths = {("generate", 3)}
    with pytest.raises(EngineDied):
        ask(engine, adapter="policy")
    asyncio.run(engine.wake())
    [held_again] = standin.adapters.values()
    assert is_same(held_again, held) and ask(engine, adapter="policy").policy_version == 1


def test_which_actors_send_their_adapter_to_sglang(tiny_model, tmp_path):
    def adapter(*changes, model=tiny_model, name="policy") -> str:
        config = parse_config(words("--model", model, "--env_path x.py --out x", *changes))
        config = replace(config, engine=config.engine.replace("auto", "sglang"))
        return EngineFactory(config).weights.adapter_of(name)

    lora = "--actors.policy.lora.rank 4"
    assert adapter(lora) == "policy"
    assert adapter(lora, "--engine embedded") == "", "merged, which samples faster"
    assert adapter() == "" and adapter(lora, "--actors.policy.engine_urls http://a:1") == "", (
        "started without --enable-lora"
    )
    in_4_bits = LoraConfig(rank=4, quantize="nf4")
    layers = SGLangEngine.lora_layers
    assert not is_served(str(tiny_model), in_4_bits, layers), (
        "SGLang's base would not be the learner's"
    )
    for name in ("phi", "gemma3"):
        make_family(tmp_path / name, name)
    assert adapter(lora, model=tmp_path / "phi") == "", "SGLang has no kernels for adapters of fc1"
    assert adapter(lora, "--actors.policy.lora.targets q_proj", model=tmp_path / "phi") == "policy"
    assert adapter(lora, model=tmp_path / "gemma3") == ""


DIGITS = """
def load_tasks(split):
    return [{"prompt": str(n)} for n in range(16)]

def reward_fn(completion):
    return ord(completion) % 7
"""


def test_a_run_goes_on_whoever_meets_the_death_of_its_server(tiny_model, standin, tmp_path):
    """The canary's four requests come before the eight of a step's episodes."""
    canary, episode = ("generate", 14), ("generate", 33)
    standin.deaths = {canary, episode, ("update_weights_from_disk", 4), ("flush_cache", 3)}
    standin.answers = [([24 + n % 10], {"type": "length"}) for n in range(200)]
    (tmp_path / "env.py").write_text(DIGITS)
    url = ["--actors.policy.engine_urls", standin.url, "--canary_tolerance", 1000, "--num_steps", 4]
    sizes = words(
        "--tasks_per_step 4 --group_size 2 --max_tokens 8 --max_prompt_tokens 16 --save_every 4"
    )
    flags = ["--model", tiny_model, "--env_path", tmp_path / "env.py", *url, *sizes]
    assert main([str(f) for f in (*flags, "--out", tmp_path / "run")]) == 0
    asked = [body["input_ids"] for path, body in standin.requests if path == "generate"]
    assert asked[canary[1] - 1] in asked[:4] and asked[episode[1] - 1] not in asked[:4]
    assert all(standin.counts[path] >= number for path, number in standin.deaths)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 4 and {row["rollout/policy/failed"] for row in rows} == {0}
    assert sum(row["rollout/policy/engine_restarts"] for row in rows) >= 3
    assert is_same(standin.held, load_file(tmp_path / "run/hf/policy/model.safetensors")), (
        "the newest weights"
    )


@pytest.mark.parametrize("deaths", [{("abort_request", 1)}, {("generate", 1)}])
def test_a_death_in_a_pause_is_no_error_of_the_pause(make, standin, deaths):
    standin.deaths, engine = deaths, make()
    standin.answers = [([5], {"type": "abort"}), ([6], {"type": "length"})]

    async def main():
        await engine.wake()
        request = asyncio.create_task(engine.generate([1, 2], GREEDY, seed=0))
        while not engine._num_asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.pause()
        await engine.sleep()
        reviving = asyncio.create_task(engine.wake())
        await asyncio.sleep(0.05)
        assert engine.server.is_alive == reviving.done() is False, (
            "it waits, while a learner may have the device"
        )
        await engine.resume()
        await reviving
        [error] = await asyncio.gather(request, return_exceptions=True)
        assert isinstance(error, EngineDied) or error.token_ids[-1] == 6
        assert (await engine.generate([1, 2], GREEDY, seed=0)).token_ids == [6]

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    "params, first, kept", [(GREEDY, [5], []), (KEEPING, [5, 8], ["5 105", "6 106", "7 107"])]
)
def test_ranks_that_catch_up_at_once_all_wait_for_the_tokens_so_far(
    make, standin, params, first, kept
):
    """One pause of the server returns tokens of all requests, when several learners ask for them.
    Tokens without the ids that they were drawn from are sampled again."""
    held, engine = threading.Event(), make()
    standin.answers = [(first, {"type": "abort"}), ([6, 7], {"type": "length"})]
    standin.wait_for["generate"] = held
    unfinished = Completion(token_ids=[], logprobs=[], text="", finish_reason="", policy_version=-1)

    async def update_unfinished() -> list[int]:
        await engine.update_unfinished()
        return list(unfinished.token_ids)

    async def main():
        await engine.wake()
        request = asyncio.create_task(
            engine.generate([1, 2], params, seed=0, unfinished=unfinished)
        )
        while not standin.counts["generate"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asking = [asyncio.create_task(update_unfinished()) for _ in range(2)]
        await asyncio.sleep(0.05)
        held.set()
        known = await asyncio.gather(*asking)
        assert [tokens[:1] for tokens in known] == [[5], [5]]
        assert (await request).token_ids == [5, 6, 7]
        assert unfinished.kept_ids == kept and unfinished.logprobs == [-0.25 if kept else -0.5] * 3

    asyncio.run(asyncio.wait_for(main(), 60))


# The server's process, its port and its folders


def test_wake_starts_a_dead_server_with_the_newest_weights(tiny_model, own_server, tmp_path):
    """A learner has the device while weights are sent, so that a new server would take a share of
    the rest."""
    engine = SGLangEngine(
        spec_of(tiny_model, tmp_path / "engine.log", make_skeleton(str(tiny_model)), None)
    )

    async def main():
        for path in (
            "release_memory_occupation",
            "update_weights_from_disk",
            "resume_memory_occupation",
        ):
            await engine.wake()
            number = engine.server.num_starts
            own_server.dies_of(path)
            await engine.sleep()
            assert engine.server.is_alive != (path == "release_memory_occupation")
            await engine.update(weights_of(engine, number).items(), number)
            assert engine.server.num_starts == number and not engine.server.is_alive, path
            await engine.sleep()
        await engine.wake()
        assert own_server.lines()[-1].split()[1:] == [
            "update_weights_from_disk",
            str(engine.transfer.folder),
        ]
        metrics = await engine.take_metrics()
        assert metrics["rollout/policy/engine_restarts"] == Sum(3)
        assert (
            await engine.generate([1, 2], replace(GREEDY, max_tokens=1), seed=0)
        ).policy_version == engine.version

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        asyncio.run(engine.close())


OWNER = """
import json, os, subprocess, sys
CHILD = '''
import os, subprocess, time
from rl_core.engines.server_child import read_order
read_order()
print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, start_new_session=True)
child.stdin.write(json.dumps({"parent": os.getpid(), "authkey": "00"}).encode())
child.stdin.close()
child.wait()
"""


@pytest.mark.parametrize("killed", ["owner", "server"])
def test_processes_of_a_server_end_with_it_and_with_its_owner(killed):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    server, worker = map(int, owner.stdout.readline().split())
    try:
        os.kill({"owner": owner.pid, "server": server}[killed], signal.SIGKILL)
        wait_until(lambda: not has_processes(server), "the server's group has ended", 20)
    finally:
        owner.kill()
        owner.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def has_processes(group: int) -> bool:
    """True if a process of the group runs; dead ones may wait for their parent."""
    states = []
    for stat in glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = Path(stat).read_text().rpartition(")")[2].split()
            states += [fields[0]] if int(fields[2]) == group else []
    return any(state not in "ZX" for state in states)


@pytest.mark.parametrize("path", ["model_info", "update_weights_from_disk"])
def test_a_server_that_dies_at_its_start_is_retried_with_a_bound(
    path, tiny_model, own_server, tmp_path, capsys
):
    """It dies before its first answer, or when it gets its weights."""
    skeleton = make_skeleton(str(tiny_model))
    engine = SGLangEngine(spec_of(tiny_model, tmp_path / "engine.log", skeleton, None))

    async def die(num_times: int) -> None:
        os.killpg(engine.server.process.pid, signal.SIGKILL)
        engine.server.process.wait()
        own_server.dies_of(path, num_times)
        await engine.wake()

    async def main():
        own_server.dies_of("model_info", 1)
        with pytest.raises(EngineDied, match="exit status"):
            await engine.wake()  # The first start is tried once.
        assert engine.server.num_starts == 1
        await engine.wake()
        await engine.update(weights_of(engine, 1).items(), 1)
        await die(2)
        assert engine.server.is_alive and engine.server.num_starts == 2 + 3
        assert capsys.readouterr().err.count("engine policy is started again (") == 2
        with pytest.raises(EngineDied, match="exit status"):
            await die(3)
        assert engine.server.num_starts == 2 + 3 + 3

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        asyncio.run(engine.close())


def test_nobody_else_gets_a_servers_port_before_it_listens(tiny_model, tmp_path):
    spec = spec_of(tiny_model, tmp_path / "engine.log", make_skeleton(str(tiny_model)), None)
    engines = [SGLangEngine(spec) for _ in range(2)]
    ports = [int(engine.server.url.rpartition(":")[2]) for engine in engines]
    assert len(set(ports)) == 2
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_server_that_does_not_start_quotes_its_log(tiny_model, tmp_path):
    spec = spec_of(
        Path("no/such model"), tmp_path / "engine.log", make_skeleton(str(tiny_model)), None
    )
    engine = SGLangEngine(spec)
    with pytest.raises(
        EngineDied,
        match=r"engine policy did not start .exit status 1.; the end of .*engine.log:(.|\n)*Error",
    ):
        asyncio.run(engine.wake())
    asyncio.run(engine.close())


HOLD = """
import sys
from rl_core.engines.weight_transfer import WeightFiles
from rl_core.sampling.engine import ServerSpec
files = WeightFiles(ServerSpec())
print(files.write([("model", b"weights")]), flush=True)
sys.stdin.read()
"""


def test_weights_for_the_runs_own_server_are_memory_that_goes_with_the_run():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "-c", HOLD], env=env, **pipes)
    try:
        file = Path(run.stdout.readline().strip()) / "model"
        assert file.read_bytes() == b"weights" and file.stat().st_nlink == 0, (
            "no file system has it"
        )
    finally:
        run.kill()
        run.communicate()
    assert file.is_symlink() and not file.exists()
    shutil.rmtree(file.parent.parent)


# Flags


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def flags(model, data, out, *more) -> list[str]:
    files = [
        "--model",
        model,
        "--env_path",
        ENV,
        "--data.train",
        data / "train.jsonl",
        "--out",
        out,
        *more,
    ]
    lengths = words("--max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 16 --group_size 8")
    return [str(f) for f in (*files, *lengths)]


def test_ranks_that_servers_do_not_divide_are_refused(tiny_model, sort_data, tmp_path):
    urls = ["--actors.policy.engine_urls", "http://localhost:3,http://localhost:4"]
    with pytest.raises(ValueError, match=r"engine_urls \(2\) must divide the 1 ranks"):
        make_plan(parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), *urls]))


def test_a_servers_own_flags_reach_it_and_ours_are_refused(tiny_model, tmp_path):
    extra = "--quantization fp8 --kv-cache-dtype=fp8_e5m2 --json-model-override-args '{\"a\": 1}'"
    skeleton = make_skeleton(str(tiny_model))
    spec = spec_of(tiny_model, tmp_path / "log", skeleton, None, args=extra)
    assert server_args(spec)[-4:] == [
        "fp8",
        "--kv-cache-dtype=fp8_e5m2",
        "--json-model-override-args",
        '{"a": 1}',
    ]
    base = ["--model", "m", "--env_path", "x.py", "--out", "x"]
    assert parse_config([*base, "--engine_args", extra, "--num_steps", "3"]).engine_args == extra
    with pytest.raises(ValueError, match="--engine_args=--x needs --engine sglang"):
        choose_engine(parse_config([*base, "--engine", "embedded", "--engine_args=--x"]), 1)
    for flag, ours in {
        "--tp-size 2": "--engine_tp",
        "--tp 2": "--engine_tp",
        "--mem_fraction_static=0.5": "--engine_memory_frac",
        "--mem-fraction 0.3": "--engine_memory_frac",  # As argparse allows.
        "--log-level debug --mem=0.3": "--engine_memory_frac",
    }.items():
        with pytest.raises(ValueError, match=f"itself sets --.* of SGLang's server; give {ours}"):
            check_sglang(flag)
    on_gpu = replace(
        spec,
        server=ServerSpec(),
        device=torch.device("cuda"),
        adapters={"bob": {"r": 4, "target_modules": ["q_proj"]}},
    )
    arguments = {arg for arg in server_args(on_gpu, (0, 5, 17)) if arg.startswith("--")}
    assert arguments - OWN_FLAGS.keys() == {"--cuda-graph-max-bs-decode"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_of_our_own_is_told_to_compute_logits_in_fp32(device, tiny_model, tmp_path):
    """Logits are in fp32 like the learner's. Also runs where SGLang is not installed."""
    spec = spec_of(tiny_model, tmp_path / "log", make_skeleton(str(tiny_model)), None)
    on_device = replace(spec, device=torch.device(device))
    assert "--enable-fp32-lm-head" in server_args(on_device, (0, 5, 23))


def test_a_running_server_that_does_not_answer_is_named(tiny_model, sort_data, tmp_path, capfd):
    url = [
        "--actors.policy.engine_urls",
        f"http://127.0.0.1:{(port := free_port())}",
        "--timeout_s",
        "1",
    ]
    assert main([*flags(tiny_model, sort_data, tmp_path / "run"), *url]) == 1
    printed = capfd.readouterr().err
    assert f"error: engine policy at http://127.0.0.1:{port} did not answer within 1 s" in printed
    assert "Traceback" not in printed


def test_auto_is_the_embedded_engine_without_a_gpu(tiny_model, sort_data, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = make_plan(parse_config(flags(tiny_model, sort_data, tmp_path / "run")))
    assert plan.config.engine == "embedded"


# The real one


def two_ways(model, out, *more, engine="sglang") -> list[str]:
    """Flags of two actors over one model that learn opposite tasks."""
    flags = [
        "--actors.up.model",
        model,
        "--actors.up.lora.rank",
        16,
        "--actors.down.lora_base",
        "up",
    ]
    flags += [
        "--env_path",
        ENV.parent / "sort_two_ways.py",
        "--out",
        out,
        "--engine",
        engine,
        *more,
    ]
    return [str(f) for f in (*flags, "--max_tokens", 8, "--max_prompt_tokens", 16)]


@needs_sglang
def test_a_lone_adapters_server_has_its_learners_weights_after_updates(
    torchrun, warm_model, sort_data, tmp_path
):
    learn = words("--engine sglang --actors.policy.lora.rank 4 --num_steps 3 --optim.lr 5e-3")
    torchrun(
        1,
        "-m",
        "rl_core.train",
        *flags(warm_model, sort_data, tmp_path / "run", *learn),
        timeout_s=900,
    )
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3 and min(row["learn/policy/grad_norm"] for row in rows) > 0
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6
    log = (tmp_path / "run/engine_policy_00000.log").read_text()
    assert log.count("Start load Lora adapter") == 4 and "Start update_weights" not in log


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize(
    "name, way",
    [
        ("qwen3_moe", "files"),
        ("qwen3_moe", "device"),
        ("glm4_moe", "files"),
        ("glm4_moe", "device"),
    ],
)
def test_a_mixture_of_experts_samples_with_the_learners_logprobs(name, way, tmp_path):
    check_experts(SGLangEngine, name, way, tmp_path)


@pytest.mark.slow
@needs_sglang
def test_servers_of_two_ranks_have_the_experts_that_ep_splits(torchrun, tmp_path):
    check_split_experts("sglang", "qwen3_moe", torchrun, tmp_path)


def check_split_experts(engine: str, name: str, torchrun, tmp_path: Path) -> None:
    """Two ranks with half of the experts each send all of them to a server each."""
    make_family(tmp_path / "model", name)
    (tmp_path / "env.py").write_text(models_table.ENV)
    argv = words(f"-m rl_core.train --engine {engine} --ep 2 --num_steps 3 --group_size 4")
    argv += words(models_table.LIMITS, "--model", tmp_path / "model", "--out", tmp_path / "run")
    torchrun(2, *argv, "--env_path", str(tmp_path / "env.py"), timeout_s=900)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["learn/policy/grad_norm"] > 0
        assert row["learn/policy/mismatch_kl_nats"] < 1e-6


def check_experts(
    engine_class: type[Engine], name: str, way: str, tmp_path: Path, num_versions: int = 2
) -> None:
    """Compares logprobs from the learner's export, which transformers loads too, and after updates
    with other weights and routers' biases."""
    tokenizer, prompts = make_family(tmp_path / "model", name), random_prompts(6)
    learner = make_learner(
        tmp_path / "model", "--algorithm sft --optim.lr 1e-2 --max_prompt_tokens 48"
    )
    learn(
        learner,
        [sample([*p, 9, 8, 7], [0] * len(p) + [1] * 3, 1.0) for p in random_prompts(8, seed=1)],
    )
    export_policy(learner.policy, tokenizer, tmp_path / "export", learner.ranks)
    skeleton, log = make_skeleton(str(tmp_path / "export")), tmp_path / "log"
    spec = spec_of(tmp_path / "export", log, skeleton, None, weight_sync=way, bucket_bytes=30_000)

    def logprobs(prompt, done) -> torch.Tensor:
        results = sample(
            [*prompt, *done.token_ids], [0] * len(prompt) + [1] * len(done.token_ids), 1.0
        )
        [minibatch], _ = learner.shard([results])
        with torch.no_grad():
            return learner.forward(minibatch.batches[0])[0]

    async def compare() -> None:
        engine, plain = engine_class(spec), load_plain(tmp_path / "export")
        try:
            await engine.wake()
            for version in range(num_versions):
                done = await asyncio.gather(*(engine.generate(p, GREEDY, seed=0) for p in prompts))
                for prompt, one in zip(prompts, done, strict=True):
                    sampled = torch.tensor(one.logprobs)
                    torch.testing.assert_close(sampled, logprobs(prompt, one), atol=1e-4, rtol=0)
                    if not version:
                        of_plain = logprobs_of(plain, prompt, one.token_ids)
                        torch.testing.assert_close(sampled, of_plain, atol=1e-4, rtol=0)
                for weight_name, weight in learner.policy.hf.state_dict().items():
                    weight.mul_(-9 if "correction_bias" in weight_name else 1.2)
                await engine.update(learner.named_weights(), version + 1)
        finally:
            await engine.close()

    asyncio.run(compare())


@pytest.mark.slow
@needs_sglang
def test_reward_rises_with_sglang_and_nothing_of_it_is_left(
    torchrun, warm_model, sort_data, tmp_path
):
    learn = words("--num_steps 30 --optim.lr 6e-4 --optim.warmup_steps 3 --algo.clip_high 0.28")
    out = tmp_path / "run"
    torchrun(
        1,
        "-m",
        "rl_core.train",
        "--engine",
        "sglang",
        *flags(warm_model, sort_data, out, *learn),
        timeout_s=900,
    )
    rows = metrics(out)
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    assert len(rewards) == 30 and sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-3
    assert (
        str(out)
        not in subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    )


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize("way", ["files", "device"])
def test_one_engine_over_two_ranks_has_both_learners_weights(
    way, torchrun, warm_model, sort_data, tmp_path
):
    out = tmp_path / "run"
    learn = ["--engine", "sglang", "--engine_tp", "2", "--num_steps", "3", "--optim.lr", "1e-3"]
    learn += ["--weight_sync", way]
    torchrun(2, "-m", "rl_core.train", *flags(warm_model, sort_data, out, *learn), timeout_s=900)
    rows = metrics(out)
    assert len(rows) == 3 and max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6
    assert min(row["rollout/policy/tokens"] for row in rows) > 0
    assert [p.name for p in out.glob("engine_*")] == ["engine_policy_00000.log"]


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node"]


def rows_of_run_with_a_death(
    command: list, out: Path, kill, num_steps: int = 4, actors: tuple[str, ...] = ("policy",)
) -> list[dict]:
    """Calls kill(process id of the run) once two steps are done. The first actor's engine dies."""
    command = [sys.executable, "-m", *map(str, command)]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while run.poll() is None and (
            not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2
        ):
            time.sleep(0.02)
        kill(run.pid)
        text, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 0, text
    rows = metrics(out)
    restarts = f"rollout/{actors[0]}/engine_restarts"
    assert len(rows) == num_steps and sum(row.get(restarts, 0) for row in rows) >= 1
    for actor in actors:
        assert all(row.get(f"rollout/{actor}/failed", 0) == 0 for row in rows), "no group is lost"
        mismatch = [row.get(f"learn/{actor}/mismatch_kl_nats", 0) for row in rows]
        assert max(mismatch) < 1e-3, "the new server has the newest weights"
    return rows


def children_of(pid: int | str, *more: str) -> list[str]:
    return subprocess.run(
        ["pgrep", "-P", str(pid), *more], capture_output=True, text=True
    ).stdout.split()


def kill_servers(pid: int) -> None:
    """Kills every server of a run under torchrun."""
    for rank in children_of(pid):
        for server in children_of(rank, "-f", "rl_core.engines.sglang_server"):
            os.kill(int(server), signal.SIGKILL)


@needs_sglang
def test_two_actors_on_one_server_have_their_learners_weights(warm_model, tmp_path):
    """A server that is killed in a rollout gets both adapters again, and no group is lost. It is
    that of a rank that only samples."""
    out = tmp_path / "run"
    learn = ["--num_steps", 4, "--tasks_per_step", 16, "--group_size", 8, "--optim.lr", "5e-3"]
    learn += ["--rollout_ranks", 1]
    # One of them learns from truncated samples.
    learn += ["--actors.up.sampling.top_k", 20, "--actors.up.sampling.top_p", 0.9]
    command = [*TORCHRUN, 2, "-m", "rl_core.train", *two_ways(warm_model, out, *learn)]
    rows = rows_of_run_with_a_death(command, out, kill_servers, actors=("up", "down"))
    assert [p.name for p in out.glob("engine_*")] == ["engine_up_00000.log"]
    for name in ("up", "down"):
        # Each task is one actor's.
        learned = [row for row in rows if f"learn/{name}/grad_norm" in row]
        assert max(row[f"learn/{name}/grad_norm"] for row in learned) > 0
        assert max(row[f"learn/{name}/mismatch_kl_nats"] for row in learned) < 1e-6


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(["1"], id="in step"),
        pytest.param(["2", "--rollout_ranks", "1"], id="engine rank"),
        pytest.param(["1", "--weight_sync", "device"], id="no copy"),
        pytest.param(
            ["2", "--rollout_ranks", "1", "--weight_sync", "device", "--max_staleness", "1"],
            id="no copy, engine rank",
        ),
    ],
)
def test_a_server_that_is_killed_in_a_rollout_loses_no_group(
    ranks, warm_model, sort_data, tmp_path
):
    command = [*TORCHRUN, ranks[0], "-m", "rl_core.train"]
    argv = flags(
        warm_model, sort_data, tmp_path / "run", "--num_steps", 4, "--engine", "sglang", *ranks[1:]
    )
    rows_of_run_with_a_death([*command, *argv], tmp_path / "run", kill_servers)


@needs_sglang
def test_a_running_server_gets_the_weights_after_a_new_start(
    warm_model, sort_data, tmp_path, monkeypatch
):
    monkeypatch.setenv("SGLANG_API_KEY", "its-key")
    out, port, servers = tmp_path / "run", free_port(), []

    def serve(_=None) -> None:
        """Starts a server on a CPU with a key, and kills the previous one."""
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
        limits = (
            "--dtype float32 --max-running-requests 64 --max-total-tokens 8192 --device cpu "
            "--disable-cuda-graph"
        )
        kernels = "--attention-backend torch_native --sampling-backend pytorch --api-key its-key"
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(warm_model),
            "--port",
            str(port),
        ]
        command += [*limits.split(), *kernels.split()]
        env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
        with open(tmp_path / "server.log", "a") as file:
            pipes = {"stdout": file, "stderr": file, "env": env, "start_new_session": True}
            servers[:] = [subprocess.Popen(command, **pipes)]

    url = [
        "--actors.policy.engine_urls",
        f"http://127.0.0.1:{port}",
        "--num_steps",
        "4",
        "--optim.lr",
        "6e-4",
    ]
    serve()
    try:
        rows_of_run_with_a_death(
            ["rl_core.train", *flags(warm_model, sort_data, out, *url)], out, serve
        )
        assert servers[0].poll() is None, "it is not the run's to end"
    finally:
        os.killpg(servers[0].pid, signal.SIGKILL)
    assert not list(out.glob("engine_*"))
