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
from kit import ROOT
from transformers import AutoTokenizer

from rl_core.config import parse_config
from rl_core.plan import make_plan
from rl_core.plugins.env_file import load_env
from rl_core.tools.plan import describe, facts

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
    "ppo": {"prompt": [USER]},
    "grpo": PROBLEM,
    "dapo": PROBLEM,
    "opd": PROBLEM,
}


@pytest.fixture
def folder_of(tmp_path, tiny_model):
    """folder_of("Qwen/Qwen3-4B") -> a folder with its real config.json, a tokenizer of characters,
    and no weights."""

    def make(name):
        config, folder = model_config(name.rpartition("-")[2]), tmp_path / name.rpartition("/")[2]
        config.max_position_embeddings = 40960
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_and_fits_its_gpus(recipe, folder_of, tmp_path, monkeypatch):
    text = recipe.read_text()
    header, given = text.partition("\nalgorithm:")[0], yaml.safe_load(text)
    assert f"--config scripts/recipes/{recipe.name}" in header and "Expect:" in header
    assert "\n# Not run on a GPU" in header
    number, gigabytes = map(int, re.search(r"Hardware: (\d+) GPUs? of (\d+) GB", header).groups())
    assert number == int((re.search(r"--nproc_per_node (\d+)", header) or [0, 1])[1])
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[given["algorithm"]]) + "\n")
    flags = ["--config", recipe, "--out", tmp_path / "run"]
    if "model" in given:
        flags += ["--model", folder_of(given["model"])]
    for name, actor in given.get("actors", {}).items():
        if "model" in actor:
            flags += [f"--actors.{name}.model", folder_of(actor["model"])]
    flags += [
        f"--data.{part}={tmp_path / 'rows.jsonl'}"
        for part in ("train", "eval")
        if part in given.get("data", {})
    ]
    if teacher := given.get("algo", {}).get("teacher"):
        flags += ["--algo.teacher", folder_of(teacher)]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(number))
    shown = describe(
        facts(make_plan(parse_config([*map(str, flags), "--learner.dtype", "bfloat16"])))
    )
    gib = [float(value) for value in re.search(r"^sum +(\S+) +(\S+)$", shown, re.M).groups()]
    assert max(gib) < 0.9 * gigabytes * 1e9 / 2**30, "a tenth is for CUDA and fragments"
    assert f"runs/{recipe.stem}" == given["out"], "recipes write to folders of their own"


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

    def said(text):
        return [{"role": "assistant", "content": text}]

    try:
        [found] = asyncio.run(interact(said("I look <search> Paris </search>")))
    finally:
        server.shutdown()
    assert found["role"] == "user" and "Paris is known" in found["content"]
    assert asked == [{"queries": ["Paris"], "topk": 3, "return_scores": True}]
    assert asyncio.run(interact(said("<answer>Paris</answer>"))) is None
    assert "<answer>" in asyncio.run(interact(said("I do not know")))[0]["content"]
    answers = ["the Eiffel Tower!", "Louvre"]
    assert [
        reward(said(text), answers)
        for text in ("<answer>Eiffel tower</answer>", "<answer>x</answer>", "Louvre")
    ] == [1, 0, 0]
