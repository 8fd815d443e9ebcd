"""The real vLLM, which bash scripts/test_vllm.sh installs where there is no GPU, beyond the promises
of every engine."""

from __future__ import annotations

import os
import signal

from kit import run, words
from test_engine_contract import REQUESTS, Subject, needs_vllm
from test_sglang import children_of, flags, rows_of_run_with_a_death

from rl_core.engines.vllm import VLLMEngine

pytestmark = needs_vllm


class OnDevice(Subject):
    """Its weights come in buckets, and again from the learner."""

    def make(self, spec) -> VLLMEngine:
        spec.server.weight_sync = "device"
        spec.server.bucket_bytes = 30_000  # Several buckets.
        spec.resend = self.weights
        return VLLMEngine(spec)


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


def test_a_server_that_is_killed_in_a_rollout_loses_no_group(make_model, sort_data, tmp_path):
    def kill(pid: int) -> None:
        for server in children_of(pid, "-f", "rl_core.engines.vllm_server"):
            os.kill(int(server), signal.SIGKILL)

    sft = (
        "--algorithm sft --max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 64 --num_steps 200 "
        "--optim.lr 3e-3 --optim.schedule cosine --data.train"
    )
    model = make_model(heads=2)
    run(tmp_path / "warm", words("--model", model, sft, sort_data / "sft.jsonl"))
    argv = flags(
        tmp_path / "warm/hf/policy",
        sort_data,
        tmp_path / "run",
        *words("--num_steps 6 --engine vllm"),
    )
    rows_of_run_with_a_death(["rl_core.train", *argv], tmp_path / "run", kill)
