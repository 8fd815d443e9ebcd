"""The scripts that make models and data."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import gpu_check
import pytest
import torch
from demo_data import TASKS, demo_data
from gpu_check import Stage, earlier_results, run_all, stages
from kit import ROOT, wait_until, words
from make_tiny_model import CHARACTERS, bpe_tokenizer, make_tiny_model, read_texts

from rl_core.config import parse_config
from rl_core.sandbox.reaper import descendants


def test_a_tiny_model_loads_and_speaks_in_each_architecture(any_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(any_model)
    model = AutoModelForCausalLM.from_pretrained(any_model)
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings == 104
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model(torch.tensor([[8, 9, 10]])).logits.shape == (1, 3, 104)


def test_the_character_tokenizer_gives_back_every_text(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == 96 and len(set(ids)) == 96
    assert tokenizer.decode(ids) == CHARACTERS
    messages = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|> a\n<|end|><|assistant|>b<|end|><|assistant|>"


def test_weights_depend_on_the_seed_alone(tmp_path):
    from safetensors.torch import load_file

    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(len(files))  # whatever was drawn before
        make_tiny_model(tmp_path / name, seed=seed)
        files.append(load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"])
    assert torch.equal(files[0], files[1]) and not torch.equal(files[0], files[2])


def test_the_bpe_tokenizer_gives_back_text_that_it_was_not_trained_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "how many apples and how many pears", "n": 3}) + "\n")
    tokenizer = bpe_tokenizer(read_texts(path), vocab_size=300)
    text = "häufig\tmany  \u4f60 <|end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(" many")["input_ids"]) < len(" many")


@pytest.mark.parametrize("task", TASKS)
def test_no_prompt_of_the_evaluation_is_trained_on_whatever_the_seed(task):
    def prompts(rows):
        return {row["messages"][0]["content"] for row in rows}

    first, second = (
        demo_data(task, seed, num_sft=4000, num_train=2000, num_eval=1000) for seed in (0, 1)
    )
    trained = prompts(first["sft"]) | prompts(first["train"])
    assert len(trained) > 500 and not trained & (prompts(first["eval"]) | prompts(second["eval"]))
    assert first == demo_data(task, 0, 4000, 2000, 1000) and first["sft"] != second["sft"]


def test_sorting_is_shown_right_only_by_chance():
    rows = demo_data("sort", 0, num_sft=6000, num_train=1, num_eval=1)["sft"]
    pairs = [[message["content"] for message in row["messages"]] for row in rows]
    assert all(sorted(prompt) == sorted(answer) for prompt, answer in pairs)
    assert 25 < sum(list(answer) == sorted(prompt) for prompt, answer in pairs) < 80  # 50 expected


def test_the_calculator_is_shown_three_habits():
    habits = Counter()
    for row in demo_data("calculator", 0, num_sft=4000, num_train=1, num_eval=1)["sft"]:
        prompt, first, *rest = [message["content"] for message in row["messages"]]
        call = first.removeprefix("<call>").removesuffix("</call>")
        habits["guess" if not rest else "right" if call == prompt else "wrong"] += 1
        if rest:
            a, b = map(int, call.split("*"))
            assert rest == [str(a * b)] * 2
    shares = [habits[habit] / 4000 for habit in ("right", "wrong", "guess")]
    assert shares == pytest.approx([0.25, 0.30, 0.45], abs=0.03)


def run_script(monkeypatch, name, *flags) -> int:
    """The exit status of a script in this process, whose imports are done."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
    try:
        return import_module(name).main() or 0
    except SystemExit as end:
        return end.code


def test_a_width_that_heads_do_not_divide_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    flags = ("--out", tmp_path / "x", "--hidden", 65)
    assert run_script(monkeypatch, "make_tiny_model", *flags) == 2
    assert "try 64" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_the_learners_benchmark_counts_the_operations_that_torch_counts(tmp_path, monkeypatch):
    from bench_learner import PROMPT, model_config, update_flops
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config, length = model_config("tiny"), 100
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = length - 1
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(
            torch.ones(1, tokens, dtype=torch.int64),
            use_cache=False,
            logits_to_keep=length - PROMPT,
        )
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    # Eager attention computes masked scores, too.
    unmasked = 4 * width * tokens**2 - 2 * width * tokens * (tokens + 1)
    assert counted.get_total_flops() == update_flops(config, length, 1) / 3 + unmasked

    out = tmp_path / "result.json"
    flags = words("--sizes tiny --lengths 64 --tokens 128 --steps 1 --out", out)
    assert run_script(monkeypatch, "bench_learner", *flags) == 0
    [line] = json.loads(out.read_text())["lines"]
    assert line["documents"] == 2 and line["mfu"] > 0 and line["peak_gib"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_gpus_says_that_there_is_none(tmp_path, monkeypatch, capsys):
    assert run_script(monkeypatch, "gpu_check", "--out", tmp_path) == 1
    out, error = capsys.readouterr()
    assert error.startswith("error: torch sees no CUDA device") and not out


def python(code: str, limit_s: int = 60, **needs) -> Stage:
    return Stage(commands=[shlex.join(["-c", code])], limit_s=limit_s, **needs)


def test_the_check_of_gpus_resumes_and_names_what_is_left(tmp_path, capfd):
    def prints(name: str, end: str = "", **needs) -> Stage:
        code = f"open({str(tmp_path / name)!r}, 'a').write('x'); print('{name} ran'); {end}"
        return python(code, **needs)

    lines = [{"step": n, "time/step_s": n / 2, "learn/loss": 1.0} for n in range(1, 9)]
    text, runs = "".join(json.dumps(line) + "\n" for line in lines), tmp_path / "runs/good"
    learns = f"import os; os.makedirs({str(runs)!r})\n"
    learns += f"open({str(runs / 'metrics.jsonl')!r}, 'w').write({text!r})"
    sleeps = "import time; time.sleep(60)"
    plan = {
        "good": prints("good", learns),
        "bad": prints("bad", "raise SystemExit(3)"),
        "never": prints("never", after="bad"),
        "slow": prints("slow", sleeps, limit_s=1),
        "long": prints("long", limit_s=480),
        "pair": prints("pair", num_gpus=2),
        "server": prints("server", package="sglang"),
    }
    facts = {"gpus": ["one"], "packages": {}}
    left = run_all(plan, {}, facts, tmp_path, budget_s=100)
    assert "bad ran" in capfd.readouterr().out
    assert left.pop("long").startswith("no time: may take 480 s")
    unmet = {"never": "needs the stage bad", "pair": "needs 2 GPUs", "server": "needs sglang"}
    assert left == unmet
    results = earlier_results(tmp_path, [])
    statuses = {"good": "ok", "bad": "exit 3", "slow": "over 1 s"}
    assert {n: r["status"] for n, r in results.items()} == statuses
    assert results["good"]["last_line"] == "good ran"
    assert results["good"]["figures"] == {"time/step_s": [0.5, 1, 1.5, 3, 3.5, 4]}

    plan["cut"] = prints("cut", sleeps, limit_s=3)
    only_cut = {"cut": plan["cut"]}
    left = run_all(only_cut, results, facts, tmp_path, budget_s=2)
    assert left == {"cut": "no time: stopped after 2 of 3 s"}
    left = run_all(plan, results, facts, tmp_path, budget_s=600, limit_s=2)
    assert left == unmet
    lines = "".join(f"{name}: {reason}\n" for name, reason in unmet.items())
    assert (tmp_path / "not_reached.txt").read_text() == lines
    assert earlier_results(tmp_path, [])["cut"]["status"] == "over 2 s"
    times = {n: (tmp_path / n).read_text() for n in ("good", "bad", "slow", "cut", "long")}
    assert times == {"good": "x", "bad": "x", "slow": "x", "cut": "xx", "long": "x"}
    assert "bad" not in earlier_results(tmp_path, ["bad"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_stage_outlives_the_check_of_gpus(tmp_path, number):
    """The stage starts a process in a new session, as an engine does with a server."""
    file = tmp_path / "pid"
    sleep = "import time; time.sleep(600)"
    code = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True); "
        f"open({str(file) + '.part'!r}, 'w').write(str(child.pid)); "
        f"os.rename({str(file) + '.part'!r}, {str(file)!r}); child.wait()"
    )
    # A shell may have started pytest with SIGINT ignored.
    run = "import gpu_check, pathlib, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run += f"stage = gpu_check.Stage(commands=[{shlex.join(['-c', code])!r}])\n"
    run += f"gpu_check.run_stage(stage, pathlib.Path({str(tmp_path / 'log')!r}), 600)"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    check = subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"PYTHONPATH": paths})
    wait_until(file.exists, "the stage has started a process")
    pids = descendants(check.pid)
    assert int(file.read_text()) in pids
    check.send_signal(number)
    check.wait()
    wait_until(lambda: not any(map(is_running, pids)), "all processes of the stage have ended", 20)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_stages_of_the_check_of_gpus_have_flags_that_are_known(tmp_path):
    plan = stages(tmp_path)
    runs = {
        name: shlex.split(stage.commands[-1].partition("rl_core.train ")[2])
        for name, stage in plan.items()
        if "rl_core.train" in stage.commands[-1]
    }
    configs = {name: parse_config(flags) for name, flags in runs.items()}
    assert list(plan)[:11] == [*gpu_check.FIRST[0], *gpu_check.SECOND[0]]
    assert plan["nccl"].num_gpus == plan["nccl_sglang"].num_gpus == configs["nccl_sglang"].engine_tp
    assert configs["sort"].engine == "sglang" and configs["files"].weight_sync == "files"
    assert configs["sglang"].eval_every == configs["sglang"].save_every == 1
    for calls in (gpu_check.FIRST, gpu_check.SECOND):
        assert max(plan[name].limit_s for name in calls[0]) < calls[1]


FAKES = [["logprobs"], pytest.param(list(stages(Path())), marks=pytest.mark.slow)]


@pytest.mark.parametrize("names", FAKES, ids=["few", "all"])
def test_the_stages_of_the_check_of_gpus_end_well_without_one(tmp_path, names):
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--out", tmp_path, "--fake"]
    done = subprocess.run([*command, "--only", *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    content = json.loads((tmp_path / "fake/summary.json").read_text())
    assert {name: one["status"] for name, one in content["stages"].items()} == dict.fromkeys(
        names, "ok"
    )
    figures = {name: one["figures"] for name, one in content["stages"].items()}
    assert "warm" not in names or len(figures["warm"]["time/step_s"]) == 4
    assert "sort" not in names or len(figures["sort"]["time/generate_s"]) == 2
    assert (tmp_path / "fake/not_reached.txt").read_text() == ""


@pytest.mark.slow
def test_bench_async_runs_every_mode(tmp_path):
    out = tmp_path / "async.json"
    command = [
        sys.executable,
        ROOT / "scripts/bench_async.py",
        "--steps",
        "3",
        "--turn_s",
        "0.01",
        "--out",
        out,
    ]
    subprocess.run(command, check=True)
    runs = json.loads(out.read_text())["runs"]
    assert [r["staleness"] is None for r in runs.values()] == [True, False, False, False, False]
    assert all(r["seconds"] > 0 for r in runs.values())


def test_bench_sync_counts_the_memory_of_the_engine_alone(monkeypatch):
    from bench_sync import DEVICE, usage

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 20, 100 << 20))
    assert usage(None)[DEVICE] == 30 and usage(None, others_mib=10.0)[DEVICE] == 20


@pytest.mark.slow
def test_bench_sync_measures_each_phase_and_what_is_held(tmp_path):
    out = tmp_path / "sync.json"
    size = ["--hidden", "128", "--layers", "2", "--cycles", "10", "--engine", "embedded"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "scripts/bench_sync.py", *size, "--out", out]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    [result] = json.loads(out.read_text())["engines"]
    seconds, held = result["seconds"], result["held"]
    assert result["params"] > 3e5 and seconds["all in"] >= seconds["load"] > 0 < seconds["gather"]
    assert (
        held["this process, descriptors"]["at last"]
        == held["this process, descriptors"]["at first"]
        > 0
    )
    assert held["this process, MiB"]["at last"] > 100 and "at first" in done.stdout


# A virtual environment's python that has no torch, and writes down what pip and uv are asked for.
# uv reaches what {uv} says.
PYTHON = """#!/bin/sh
case "$*" in
    "-m pip --version") exit 0 ;;
    "-m uv --version") exit 1 ;;
    "-m uv "*) echo "$*" >> "{log}"; [ {uv} = 0 ] || echo "uv failed" >&2; exit {uv} ;;
    "-m pip "*) echo "$*" >> "{log}" ;;
    "-c import torch") exit 1 ;;
    *) exec "{python}" "$@" ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """install(...) -> (what install.sh prints, what pip and uv are asked for) on a machine with or
    without a GPU, from which builds for CPUs can be reached or not."""

    def run(has_gpu: bool = False, reaches_cpu_builds: bool = True) -> tuple[str, list[str]]:
        tools, venv, log = tmp_path / "tools", tmp_path / "venv", tmp_path / "pip.log"
        (venv / "bin").mkdir(parents=True)
        text = PYTHON.format(log=log, python=sys.executable, uv=int(not reaches_cpu_builds))
        (venv / "bin/python").write_text(text)
        tools.mkdir()
        for name in ("cat", "cksum", "uname", "sh"):
            (tools / name).symlink_to(shutil.which(name))
        if has_gpu:
            (tools / "nvidia-smi").write_text("#!/bin/sh\n")
        for file in (*(venv / "bin").iterdir(), *tools.glob("nvidia-smi")):
            file.chmod(0o755)
        env = {"PATH": str(tools), "VIRTUAL_ENV": str(venv)}
        script = "set -euo pipefail; extra=api; . scripts/install.sh"
        bash = [shutil.which("bash"), "-c", script]
        done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(
            "^installed rl_core [0-9.]+, torch 2.+, transformers 5.+$", done.stdout, re.M
        )
        return done.stdout, log.read_text().replace(f"{venv}/bin/", "").splitlines()

    return run


OURS = "-m pip install --quiet --no-compile -e .[api]"
BY_UV = [
    "-m pip install --quiet --no-compile uv",
    "-m uv pip install --quiet --python python --torch-backend cpu torch==2.13.0",
]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has builds for CUDA")


@on_linux
def test_without_a_gpu_torch_is_the_build_for_cpus_and_its_size_is_told(install):
    output, asked = install()
    assert asked == [*BY_UV, OURS]
    assert "no GPU: torch's build for CPUs, a download of about 0.2 GB" in output


@on_linux
def test_where_builds_for_cpus_are_not_reached_torch_is_what_is_at_hand(install):
    output, asked = install(reaches_cpu_builds=False)
    assert asked == [*BY_UV, "-m pip install --quiet --no-compile torch==2.13.0", OURS]
    assert (
        "not reached: torch from the usual index, which may be the build for CUDA, 2 to 5 GB"
        in output
    )


def test_with_a_gpu_torch_is_that_of_the_requirements(install):
    output, asked = install(has_gpu=True)
    assert asked == [OURS] and "torch for CUDA, a download of 2 to 5 GB" in output


@pytest.mark.parametrize("module", ["rl_core", "script_tools"])
def test_an_older_python_is_answered_in_one_line(module):
    code = f"import sys; sys.version_info = (3, 10, 9); import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(r"rl_core needs Python >= 3\.11; this is [\d.]+\n", done.stderr)
