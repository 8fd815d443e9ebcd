"""Data sets as they are published: rows of our own in the shape of each set of `rl-core datasets`
are read, shown and trained on by the command that it prints."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from kit import ROOT, metrics, steps

from rl_core.data.published_sets import recipes
from rl_core.tools.cli import main as command
from rl_core.tools.datasets import full_name
from rl_core.train import main as train

SETS = yaml.safe_load((ROOT / "tests/cases/published.yaml").read_text())
# Renders tools, calls and thoughts, unlike the template of tiny models.
TEMPLATE = """
{%- set is_first_system = messages[0]['role'] == 'system' -%}
{%- if tools and not is_first_system %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif -%}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['reasoning_content'] %}{{ '<think>' + message['reasoning_content'] + '</think>' }}
{%- endif -%}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] -%}
{{- call['function']['name'] + call['function']['arguments'] | tojson -}}
{%- endfor -%}
{%- if tools and is_first_system and loop.first %}{{ tools | tojson }}{% endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""
POSITIONS = 40960
SMALL = ["--num_steps", "2", "--tasks_per_step", "3"]
SMALL_RL = ["--group_size", "2", "--max_tokens", "8", "--max_turns", "1"]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """A tiny model with the positions that printed sizes are for."""
    folder = tmp_path_factory.mktemp("published") / "M"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def seeing(make_model, tmp_path_factory):
    """A tiny model that sees, with these positions."""
    folder = tmp_path_factory.mktemp("seeing") / "M"
    shutil.copytree(make_model("qwen2_5_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = POSITIONS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def quiet_tables():
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_rows(name: str, recipe: dict[str, str], rows: list[dict]) -> None:
    """Writes a data set to where its command finds it, as a table, whose cells have the types and
    missing values of one on the hub. Runs the Python that the recipe begins with."""
    import datasets

    code = shlex.split(recipe["get"])[2].replace("hf://datasets/", "") if "get" in recipe else ""
    source, _, split = recipe["data"].partition("@")
    file = f"{source}/{split or 'train'}-0.parquet"
    named = re.search("data_files='(.*?)'", code)
    if named:
        file = named[1].replace("*", "0.parquet")
    elif code:
        split = re.search(r"split='(\w+)'", code)[1]
        file = f"{name}/{split}.parquet"
    Path(file).parent.mkdir(parents=True)
    table = datasets.Dataset.from_list(rows)
    table.to_json(file) if file.endswith(".jsonl") else table.to_parquet(file)
    if code and not named:
        config = re.search(r"load\('[^']*', '(\w+)'", code)
        data_files = f"[{{split: {split}, path: {split}.parquet}}]"
        card = f"- {{config_name: {config[1] if config else 'default'}, data_files: {data_files}}}"
        Path(name, "README.md").write_text(f"---\nconfigs:\n{card}\n---\n")
    exec(code, {})


def test_rows_of_each_set_are_here_and_no_others():
    assert set(SETS) == set(recipes())
    assert full_name("glaive") == "glaiveai/glaive-function-calling-v2"
    assert full_name("gsm8k:main@test") == "openai/gsm8k"


@pytest.mark.parametrize("name", SETS)
def test_a_set_as_published_is_read_shown_and_trained_on(
    name, request, tmp_path, monkeypatch, capsys
):
    recipe, published = recipes()[name], SETS[name]
    model = request.getfixturevalue("seeing" if "sees" in published else "model")
    monkeypatch.chdir(tmp_path)
    write_rows(name, recipe, published["rows"])
    words = shlex.split(recipe["command"].splitlines()[-1])
    _, verb, *flags = [str(model) if word == "M" else word for word in words]
    is_eval = verb == "eval"
    shown = ["--algorithm", "grpo", "--model", *flags] if is_eval else flags
    shown = [word.replace("--data.eval", "--data.train") for word in shown]
    if "--eval.samples" in shown:
        del shown[shown.index("--eval.samples") :]
    assert command(["tokens", *shown]) == 0, capsys.readouterr()
    first = capsys.readouterr().out.split("\n== ")[0].rstrip("\n")
    # A note on the row is indented by three spaces.
    assert re.split(r"\n(?:   \S[^\n]*\n)*", first, maxsplit=1)[1] == published["shown"]
    if is_eval:
        scored = [*flags[:-2], "--eval.samples", "1"] if "--eval.samples" in flags else flags
        assert command(["eval", *scored, *SMALL_RL[2:], "--out", "scores.json"]) == 0
        return
    small = SMALL if recipe["algorithm"] in ("sft", "dpo", "rm") else [*SMALL, *SMALL_RL]
    assert train([*flags, *small]) == 0
    out = Path(flags[flags.index("--out") + 1])
    assert len(steps(out)) == 2
    failed = [v for row in metrics(out) for key, v in row.items() if key.endswith("/failed")]
    assert not any(failed)


@pytest.mark.parametrize("flags", [[], ["--data.columns", "response=solution"]])
def test_an_error_on_a_known_set_names_its_recipe(flags, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("GAIR/LIMO").mkdir(parents=True)
    Path("GAIR/LIMO/train.jsonl").write_text('{"query": "1+1?", "answer": "2"}\n')
    source = ["--data.train", "GAIR/LIMO@train"]
    assert train(["--model", str(model), "--algorithm", "sft", *source, *flags, "--out", "run"])
    assert capsys.readouterr().err.strip().endswith("rl-core datasets GAIR/LIMO")
