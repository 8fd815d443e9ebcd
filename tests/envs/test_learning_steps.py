"""One run of the real command on a mix of environments: each samples replies of both kinds from a
model, scores them, and learns from them."""

from __future__ import annotations

import json

import pytest
import stage
import test_agentbench
import test_desk_and_drafts
import test_each_env
import test_tau2
from kit import ROOT, metrics, run, trajectories
from test_boxes import REASON
from test_envs_tools import LETTERS, MATE, openenv, shop  # noqa: F401  (fixtures)
from test_tau2 import desk  # noqa: F401  (a fixture)

from rl_core.environments.env_file import load_env

ENVS = ROOT / "envs"
ANSWER = {"prompt": "Which is it?", "answer": "0"}
# Environment -> (a row, replies of two kinds to it, of which one earns more).
KINDS = {
    "chess_game": (MATE | {"prompt": "Go."}, [["Qh8"], ["Qh9"]]),
    "code": ({"prompt": "a", "test_list": ["assert f(-1) == 1"]}, [["f=abs"], ["f=int"]]),
    "code_contest": ({"prompt": "b", "tests": [["", "1"]]}, [["print(1)"], ["print(2)"]]),
    "countdown": (
        {"nums": [3, 5], "target": 8, "prompt": "8?"},
        [["<answer>3+5</answer>"], ["3*5"]],
    ),
    "debate": ({"prompt": "Bees fly", "pro": 0}, [["because"], ["I"]]),
    "gym_text": (LETTERS, [["a v a v"], ["?"]]),
    "math_answer": ({"prompt": "3+4?", "answer": "7"}, [["7"], ["8"]]),
    "mcp_tools": (ANSWER, [["0"], ["1"]]),
    "openenv_client": ({"prompt": "Go.", "reset": {"seed": 1}}, [["aa", "a", "a"], ["b"] * 3]),
    "parallel_thinking": ({"prompt": "3+4?", "answer": 7}, [["7"], ["8"]]),
    "search_qa": (
        {"question": "Which?", "golden_answers": ["a"]},
        [["<answer>a</answer>"], ["<answer>b</answer>"]],
    ),
    "tau2_env": (None, [["We have tea."] * 2, ["We have milk."] * 2]),
    "tool_use": (ANSWER | {"answer": 0}, [["0"], ["1"]]),
}


def kinds_of(name: str) -> tuple[dict, list[list[str]]]:
    if name in test_each_env.SOLVED:
        solve, wrong = test_each_env.SOLVED[name]
        rows = load_env(str(ENVS / f"{name}.py")).load_tasks("train")
        row = min(rows, key=lambda row: len(json.dumps(row)))  # a tiny model learns it soon
        return row, [solve(row), wrong]
    if name.startswith("agentbench_"):
        return test_agentbench.steps_of(name.partition("_")[2])
    return KINDS[name] if name in KINDS else test_desk_and_drafts.facts(name)


NAMES = [*KINDS, "code_parallel", "customer_service"]
NAMES += [f"agentbench_{name}" for name in test_agentbench.NAMES]
NAMES += [n for n in test_each_env.SOLVED if not (REASON and n in test_each_env.IN_BOXES)]


def conversation(env, row: dict, replies: list[str]) -> dict:
    """The conversation as a row for SFT."""
    [*_, played] = stage.run(
        env, stage.cast(policy=replies), rows=[row], max_tokens=1500, max_turns=len(replies)
    )
    spoken, messages = iter(replies), []
    for message in played.messages:
        content = next(spoken, "") if message["role"] == "assistant" else message["content"]
        messages.append({"role": message["role"], "content": content})
    return {"messages": messages}


@pytest.fixture
def mixed(tmp_path, monkeypatch, shop, openenv, desk):  # noqa: F811
    """Flags of a mix with one task of each environment, and rows for SFT of both kinds."""
    monkeypatch.setenv("MCP_SERVER", shop)
    monkeypatch.setenv("AGENTBENCH_DB", "sqlite")
    openenv()
    (tmp_path / "tasks.json").write_text(json.dumps([test_tau2.TEA]))
    flags, conversations = [], []
    for name in NAMES:
        env, (row, kinds) = load_env(str(ENVS / f"{name}.py")), kinds_of(name)
        row = row or env.load_tasks("train")[0]
        conversations += [conversation(env, row, replies) for replies in kinds]
        file = tmp_path / f"{name}.jsonl"
        file.write_text(f"{json.dumps(row)}\n")
        flags += [f"--envs.{name}.train", file]
    return ["--env_path", ",".join(str(ENVS / f"{n}.py") for n in NAMES), *flags], conversations


def test_a_mix_of_all_environments_learns(mixed, tiny_model, tmp_path):
    flags, conversations = mixed
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    sft = "--algorithm sft --max_tokens 1500 --max_prompt_tokens 1000 --tasks_per_step 10 "
    sft += "--num_steps 70 --optim.lr 4e-3 --optim.schedule cosine --data.train"
    run(tmp_path / "warm", "--model", tiny_model, sft, tmp_path / "sft.jsonl")
    sizes = f"--tasks_per_step {len(NAMES)} --group_size 6 --num_steps 3 --optim.lr 1e-4 "
    sizes += "--max_tokens 60 --max_prompt_tokens 1500 --sampling.temperature 0.7 --max_turns 4"
    out = run(tmp_path / "run", "--model", tmp_path / "warm/hf/policy", *flags, sizes)
    lines = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(lines) == 3 and all(line["learn/policy/grad_norm"] > 0 for line in lines)
    played = [t for file in out.glob("rollouts/*.zst") for t in trajectories(file)]
    assert not [(t["env"], t["error"]) for t in played if t["status"] == "failed"]
    rewards = {name: {t["reward"] for t in played if t["env"] == name} for name in NAMES}
    # A model this small says no long call without a mistake.
    assert all(rewards.values()) and sum(len(earned) > 1 for earned in rewards.values()) > 15
