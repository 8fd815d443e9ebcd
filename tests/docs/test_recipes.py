"""scripts/recipes: each is parsed and planned with the real sizes of its model, and fits the GPUs
that its header names."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from bench_learner import model_config
from kit import ROOT, metrics, trajectories
from recipe_rows import KINDS, MARK, write_rows
from recipe_twin import TRAINS, TWINS, commands, passage, retriever, write_data
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from rl_core.config import parse_config
from rl_core.environments.env_file import load_env
from rl_core.run.plan.plan import make_plan
from rl_core.tools.memory_estimate import facts
from rl_core.tools.plan import describe
from rl_core.train import main

RECIPES = sorted((ROOT / "scripts/recipes").glob("*.yaml"))
USER = {"role": "user", "content": "2 + 2?"}
PAIR = {
    "chosen": [USER, {"role": "assistant", "content": "4"}],
    "rejected": [USER, {"role": "assistant", "content": "5"}],
}
PROBLEM = {"question": "2 + 2?", "answer": "4", "golden_answers": ["4"]}
ROWS = {
    "dpo": PAIR,
    "rm": PAIR,
    "ppo": {"prompt": [USER], "answer": "4"},
    "grpo": PROBLEM,
    "dapo": PROBLEM,
    "opd": PROBLEM,
}
LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)
# config.json of the models that are no Qwen3.
CONFIGS = {
    "Qwen/Qwen2.5-3B": Qwen2Config(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
    "allenai/Llama-3.1-Tulu-3-8B-SFT": LLAMA,
}
CONFIGS["Qwen/Qwen2.5-7B-Instruct"] = CONFIGS["Qwen/Qwen2.5-7B"]


@pytest.fixture
def folder_of(tmp_path, tiny_model):
    """folder_of("Qwen/Qwen3-4B") -> a folder with its real config.json, a tokenizer of characters,
    and no weights."""

    def make(name):
        config = CONFIGS.get(name) or model_config(name.rpartition("-")[2])
        folder = tmp_path / name.rpartition("/")[2]
        config.max_position_embeddings = 40960
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_and_fits_its_gpus(recipe, folder_of, tmp_path, monkeypatch):
    text = recipe.read_text()
    header, arguments = text.partition("\nalgorithm:")[0], yaml.safe_load(text)
    assert f"--config scripts/recipes/{recipe.name}" in header and "Expect:" in header
    assert "\n# Not run on a GPU" in header
    number, gigabytes = map(int, re.search(r"Hardware: (\d+) GPUs? of (\d+) GB", header).groups())
    assert number == int((re.search(r"--nproc_per_node (\d+)", header) or [0, 1])[1])
    row = ROWS.get(arguments["algorithm"]) or {"question": "2 + 2?", "solution": "4", "answer": "4"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--config", recipe, "--out", tmp_path / "run"]
    if "model" in arguments:
        flags += ["--model", folder_of(arguments["model"])]
    for name, actor in arguments.get("actors", {}).items():
        if "model" in actor:
            flags += [f"--actors.{name}.model", folder_of(actor["model"])]
    flags += [
        f"--data.{piece}={tmp_path / 'rows.jsonl'}"
        for piece in ("train", "eval")
        if piece in arguments.get("data", {})
    ]
    if teacher := arguments.get("algo", {}).get("teacher"):
        flags += ["--algo.teacher", folder_of(teacher)]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(number))
    shown = describe(
        facts(make_plan(parse_config([*map(str, flags), "--learner.dtype", "bfloat16"])))
    )
    gib = [float(value) for value in re.search(r"^sum +(\S+) +(\S+)$", shown, re.M).groups()]
    assert max(gib) < 0.9 * gigabytes * 1e9 / 2**30, "a tenth is for CUDA and fragments"
    assert f"runs/{recipe.stem}" == arguments["out"], "recipes write to separate folders"


def test_the_search_environment_asks_its_server_and_compares_answers(monkeypatch):
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            passages = [
                {"document": {"contents": f"Title\n{query} is known"}}
                for query in asked[-1]["queries"]
            ]
            self.wfile.write(json.dumps({"result": [passages]}).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{server.server_port}/retrieve")
    hooks = load_env(str(ROOT / "envs/search_qa.py")).hooks
    interact, reward = hooks["interact"].function, hooks["reward_fn"].function

    def says(text):
        return [{"role": "assistant", "content": text}]

    try:
        [values] = asyncio.run(interact(says("I look <search> Paris </search>")))
    finally:
        server.shutdown()
    assert values["role"] == "user" and "Paris is known" in values["content"]
    assert asked == [{"queries": ["Paris"], "topk": 3, "return_scores": True}]
    assert asyncio.run(interact(says("<answer>Paris</answer>"))) is None
    assert "<answer>" in asyncio.run(interact(says("I do not know")))[0]["content"]
    answers = ["the Eiffel Tower!", "Louvre"]
    assert [
        reward(says(text), answers)
        for text in ("<answer>Eiffel tower</answer>", "<answer>x</answer>", "Louvre")
    ] == [1, 0, 0]
    assert [reward(says(f"<answer>{text}</answer>"), "Ulm") for text in ("ulm", "U")] == [1, 0]


# Flags of a twin, and steps of its warm-up, that show a recipe's settings in force.
SHORT = {
    "limo_qwen2.5_7b": "--num_steps 6",
    "open_reasoner_zero_qwen2.5_7b": "--num_steps 5 --tasks_per_step 4 --eval.num_tasks 4",
    "search_r1_qwen2.5_3b": "--num_steps 1 --eval.num_tasks 4",
}
WARM_UP_STEPS = {"search_r1_qwen2.5_3b": 100}
LN_2 = 0.6931472  # The loss of a pair whose sides are equal.


@pytest.fixture
def play(tmp_path, tiny_model, monkeypatch):
    """play(name) -> what each step of a short run of the twin measured, in place of as long a
    run."""

    def make(name):
        monkeypatch.chdir(ROOT)
        with retriever() as url:
            monkeypatch.setenv("SEARCH_URL", url)
            files = write_data(name, tmp_path / "data", num_sft=640)
            *warm_up, twin = commands(name, tmp_path, tiny_model, files)
            for flags in warm_up:
                assert main([*flags, "--num_steps", str(WARM_UP_STEPS.get(name, 2))]) == 0
            short = SHORT.get(name, "--num_steps 2")
            assert main([*twin, "--num_epochs", "null", *short.split()]) == 0
        return metrics(tmp_path / "twin")

    return make


def column(lines, name):
    return [line[name] for line in lines if name in line]


def test_every_recipe_of_a_known_result_has_a_twin():
    named = {path.stem for path in RECIPES if "twin of it runs" in path.read_text()}
    assert named | {"reward_model_qwen3_0.6b"} == set(TWINS)


def test_the_twin_of_limo_learns_the_solutions(play):
    losses = column(play("limo_qwen2.5_7b"), "learn/policy/loss")
    assert losses[-1] < losses[0] - 1


def test_the_twin_of_open_reasoner_zero_lets_its_critic_learn_first(play):
    lines = play("open_reasoner_zero_qwen2.5_7b")
    assert len(column(lines, "learn/policy/critic_loss")) == 5
    assert [line["step"] for line in lines if "learn/policy/updates" in line] == [5]


@pytest.mark.slow
def test_the_twin_of_search_r1_asks_the_server(play, tmp_path):
    play("search_r1_qwen2.5_3b")
    [file] = (tmp_path / "twin/rollouts").glob("step_000001*")
    episodes = [episode["messages"] for episode in trajectories(file)]
    result = []
    for _, question, *output in episodes:
        assert question["content"].startswith("Which gate"), "and not the row's prompt"
        assert len([m for m in output if m["role"] == "assistant"]) <= 2
        result += [m["content"] for m in output if "leaves from gate" in m["content"]]
    assert result and set(result) <= {passage(train) for train in TRAINS}


@pytest.mark.parametrize(
    "name",
    [
        "ultrafeedback_dpo_llama3.1_8b",
        "skywork_reward_llama3.1_8b",
        pytest.param("reward_model_qwen3_0.6b", marks=pytest.mark.slow),
    ],
)
def test_a_twin_of_pairs_begins_at_ln_2_and_ends_below(name, play):
    losses = column(play(name), "eval/loss")
    assert losses[0] == pytest.approx(LN_2, abs=1e-5) and losses[-1] < LN_2 - 1e-6


def test_rows_of_open_reasoner_zero_become_a_prompt_and_an_answer(tmp_path):
    human = {"from": "human", "value": "2 + 2?"}
    dialog = [human, {"from": "assistant", "ground_truth": {"value": "4", "pass_at_n": None}}]
    file = tmp_path / "orz.json"
    file.write_text(json.dumps([dialog]))
    assert list(KINDS["orz"](file)) == [{"prompt": f"2 + 2?\n\n{MARK}", "answer": "4"}]
    file.write_text(json.dumps([dialog, {"prompt": "2 + 2?", "answer": "4"}]))
    with pytest.raises(ValueError, match=r"row 2 of .*ground_truth"):
        list(KINDS["orz"](file))


def test_pairs_that_no_loss_can_use_are_left_out_and_counted(tmp_path, capsys):
    empty = {**PAIR, "rejected": [USER, {"role": "assistant", "content": " "}]}
    rows = [PAIR, {**PAIR, "rejected": PAIR["chosen"]}, empty]
    write_rows(tmp_path / "pairs.jsonl", rows)
    assert list(KINDS["pairs"](str(tmp_path / "pairs.jsonl"))) == [PAIR]
    assert "left out 2 of 3 rows" in capsys.readouterr().out
