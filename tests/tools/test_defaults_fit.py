"""Defaults of turns, tokens and microbatches fit each other."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from kit import ROOT
from transformers import AutoConfig

from rl_core.config import parse_config
from rl_core.run.plan.environments import load_envs, naming_turns
from rl_core.run.plan.model_checks import make_chats
from rl_core.tools.envs import main

AGENT = """
async def agent(task, llm): ...
def reward_fn(result): return 0.0
"""


def written(folder: Path, text: str) -> list[str]:
    (folder / "my_env.py").write_text(text)
    return ["--env_path", str(folder / "my_env.py"), "--out", str(folder / "run")]


def test_an_agent_without_max_turns_gets_as_many_as_fit(tiny_model, tmp_path):
    flags = [*written(tmp_path, AGENT), "--model", str(tiny_model)]
    # 4096 positions of the tiny model, 512 + 14 * 256 = 4096.
    config, envs = load_envs(parse_config(flags))
    assert config.max_turns == envs["my_env"].max_turns == 14
    # A microbatch of 2048: 512 + 6 * 256.
    config, _ = load_envs(parse_config([*flags, "--learner.microbatch_tokens", "2048"]))
    assert config.max_turns == 6
    # Two ranks hold a sequence of 4096 in microbatches of 2048.
    split = ["--learner.microbatch_tokens", "2048", "--cp", "2"]
    config, _ = load_envs(parse_config([*flags, *split]))
    assert config.max_turns == 14
    # Longer turns of one environment: 512 + 7 * 512 = 4096.
    config, _ = load_envs(parse_config([*flags, "--envs.my_env.max_tokens", "512"]))
    assert config.max_turns == 7
    config, _ = load_envs(parse_config([*flags, "--max_tokens", "8"]))
    assert config.max_turns == 64
    config, _ = load_envs(parse_config([*flags, "--max_turns", "3"]))
    assert config.max_turns == 3


def test_turns_that_do_not_fit_are_refused_with_their_source(tiny_model, tmp_path):
    arguments = [*written(tmp_path, AGENT + "max_turns = 40\n"), "--model", str(tiny_model)]
    with pytest.raises(ValueError) as caught:
        load_envs(parse_config(arguments))
    message = str(caught.value)
    assert message.startswith("--learner.microbatch_tokens=8192 must hold a whole episode")
    assert "10752 tokens, --max_prompt_tokens=512 + --max_turns=40 * --max_tokens=256" in message
    assert message.endswith(f"--max_turns=40 is max_turns of {tmp_path / 'my_env.py'}")
    config = parse_config([*arguments, "--learner.microbatch_tokens", "12000"])
    config, envs = load_envs(config)
    message = r"has 4096 positions.*; --max_turns=40 is "
    with pytest.raises(ValueError, match=message), naming_turns(envs):
        make_chats(config)


def test_commands_that_envs_prints_fit(tmp_path, monkeypatch, capsys):
    """Sizes of each command hold for a model of 40,960 positions, as Qwen3 has them."""
    monkeypatch.chdir(ROOT)
    assert main(["--json"]) == 0
    folder = tmp_path / "model"
    model = AutoConfig.for_model("qwen3", max_position_embeddings=40960)
    model.save_pretrained(folder)
    for listing in json.loads(capsys.readouterr().out):
        lines = listing["command"].replace("\\\n", " ").splitlines()
        start = next(i for i, line in enumerate(lines) if "rl-core train" in line)
        command = " ".join(lines[start:]).partition("rl-core train")[2]
        command = re.split(r"\srl-core ", command)[0]
        words = shlex.split(command, comments=True)
        while re.match(r"[A-Z_]+=", words[-1]):  # Variables of the next command.
            words.pop()
        if not any(word.endswith(".model") for word in words):
            words += ["--model", str(folder)]
        config = parse_config([*words, "--out", "run"])
        try:
            config, _ = load_envs(config)
        except ValueError as error:
            assert "microbatch" not in str(error), (listing["path"], error)
            continue
        limit = min(40960, config.learner.microbatch_tokens * config.cp)
        assert replace(config).max_context_tokens <= limit, listing["path"]
