"""A pretrained model: SmolLM2-135M-Instruct, or the folder that RL_CORE_REAL_MODEL names.

python scripts/make_real_model.py --out models/smollm2
RL_CORE_REAL_MODEL=models/smollm2 python -m pytest -q -n 0 --slow tests/real
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from kit import metrics, rewind, run, steps, weights, words
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.data.tables import read_episodes
from rl_core.tools.cli import main

MODEL = os.environ.get("RL_CORE_REAL_MODEL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL, reason="no real model: RL_CORE_REAL_MODEL is not set"),
]
# The share of letters that are capitals: 0.05 in replies of the untrained model.
ENV = """
def load_tasks(split):
    topics = ["rain", "bees", "trains", "bread", "chess", "snow", "maps", "tea"]
    return [{"prompt": f"{word} {topic}."} for word in ("Describe", "Praise") for topic in topics]

def reward_fn(completion):
    letters = [c for c in completion if c.isalpha()]
    return sum(c.isupper() for c in letters) / max(1, len(letters))
"""
FLAGS = (
    "--max_prompt_tokens 64 --max_tokens 16 --tasks_per_step 8 --group_size 4 --num_steps 3 "
    "--eval.num_tasks 8 --eval.samples 4 --save_every 2 --keep_checkpoints 0"
)
KINDS = {
    "full": "--optim.lr 1e-4",
    "adapter": "--optim.lr 2e-3 --actors.policy.lora.rank 8",
}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "capitals.py"
    path.write_text(ENV)
    return path


@pytest.fixture(scope="module")
def trained(env, made_once):
    """trained(kind) -> a run of three steps."""

    def get(kind):
        flags = f"{FLAGS} --eval_every 3 {KINDS[kind]}"
        make = lambda out: run(out, "--model", MODEL, "--env_path", env, flags)  # noqa: E731
        return made_once(f"real_{kind}", make)

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_raise_a_dense_reward(kind, trained):
    name = "eval/capitals/avg@4"
    before, after = (row[name] for row in metrics(trained(kind)) if name in row)
    assert after > before + 0.02, (before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_learner_agree_on_each_token(kind, trained):
    # The k3 of equal logprobs is exact to a unit of 1.0 in fp32.
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps(trained(kind))) < 1e-7


def test_tokens_and_logprobs_of_a_reply_are_those_of_transformers(trained):
    """The first step samples from the untrained model."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    episodes = read_episodes(trained("full") / "rollouts/step_000001.jsonl.zst")
    for episode in list(episodes)[:8]:
        [turn] = episode["turns"]
        prompt = tokenizer.apply_chat_template(
            episode["messages"][:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        reply = turn["completion"]["token_ids"]
        assert turn["new_ids"] == prompt
        with torch.no_grad():
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0]
        # 576 terms a product and 30 layers in fp32.
        assert turn["completion"]["logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_read_by_transformers(kind, trained):
    base = AutoModelForCausalLM.from_pretrained(MODEL).state_dict()
    model, loading = AutoModelForCausalLM.from_pretrained(
        trained(kind) / "hf/policy", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    moved = {name for name, weight in model.state_dict().items() if not weight.equal(base[name])}
    # An adapter is merged. It is at the layers' matrices alone.
    assert moved == {name for name in base if kind == "full" or "_proj" in name}
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(env, trained, tmp_path):
    out = shutil.copytree(trained("adapter"), tmp_path / "run")
    rewind(out, 2)
    run(out, f"--model {MODEL} --env_path {env} {FLAGS} {KINDS['adapter']} --resume")
    expected, resumed = weights(trained("adapter")), weights(out)
    assert expected.keys() == resumed.keys()
    assert all(expected[name].equal(resumed[name]) for name in expected)


# Prints the memory of a process once the modules are loaded, then at its peak.
PEAK = """
import sys
import transformers
import rl_core.trainer
from rl_core.train import main

def held(name):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[name].split()[0]) * 1024

before = held("VmRSS")
assert main(sys.argv[1:]) == 0
print(before, held("VmHWM"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_the_peak_of_memory_is_what_plan_says(tmp_path, capsys):
    """Two microbatches of 512 tokens a step; the second step has the optimizer's state."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known = "river quiet moon small town where people sleep green window letter".split()
    with open(tmp_path / "rows.jsonl", "w") as file:
        for seed in range(8):
            ids = tokenizer(" ".join(random.Random(seed).choices(known, k=400)))["input_ids"]
            row = {"prompt": f"Say {seed}.", "completion": tokenizer.decode(ids[:86])}
            file.write(json.dumps(row) + "\n")
    flags = words(
        f"--algorithm sft --model {MODEL} --data.train {tmp_path / 'rows.jsonl'} --num_steps 2 "
        "--tasks_per_step 8 --max_prompt_tokens 64 --max_tokens 128",
        "--learner.microbatch_tokens 512",
    )
    assert main(["plan", "--json", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)["actors"]["policy"]["bytes_on_one_rank"]
    command = [sys.executable, "-c", PEAK, *flags, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(int, done.stdout.splitlines()[-1].split())
    assert peak - before == pytest.approx(planned["sum"]["learn"], rel=0.1)
