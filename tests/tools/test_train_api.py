"""train() from Python: the run is the command's, with the additions for a notebook."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import datetime
import gc
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from kit import DATA, DIGITS, ROOT, metrics, run, trajectories, weights
from PIL import Image

from rl_core import Config, Environment, reward, train
from rl_core.config import LoraConfig, OptimConfig
from rl_core.metrics import Mean
from rl_core.plugin import Plugin
from rl_core.tools.api.environment import as_rows
from rl_core.tools.api.ranks import write_rows
from rl_core.tools.api.train import errors_of_fields
from rl_core.types import RunError

ROWS = [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]
SIZES = {
    "num_steps": 2,
    "tasks_per_step": 2,
    "group_size": 4,
    "max_tokens": 8,
    "max_prompt_tokens": 40,
}


@pytest.fixture
def config_of(tiny_model, tmp_path):
    """config_of("run", **flags) -> the configuration of a tiny run in that folder."""
    return lambda name, **flags: Config(
        model=str(tiny_model), out=str(tmp_path / name), **SIZES | flags
    )


def test_a_run_from_a_running_event_loop_is_that_of_the_command(config_of, tiny_model, tmp_path):
    file = tmp_path / "digits.py"
    file.write_text(DIGITS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    run(
        tmp_path / "a",
        "--model",
        tiny_model,
        "--env_path",
        file,
        "--data.train",
        tmp_path / "rows.jsonl",
        flags,
    )
    spec = importlib.util.spec_from_file_location("digits", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    theirs, name = weights(tmp_path / "a"), "rollout/policy/reward_mean"

    async def notebook(out, env):
        return train(config_of(out), env=env, data=ROWS[:5])

    for out, env in {"path": file, "module": module, "function": module.reward_fn}.items():
        result = asyncio.run(notebook(out, env))
        assert result.model == tmp_path / out / "hf/policy" and result.step == 2
        ours = weights(result.out)
        assert theirs.keys() == ours.keys() and all(
            torch.equal(theirs[name], ours[name]) for name in theirs
        )
        assert result.metrics[name] == metrics(tmp_path / "a")[-1][name] == result.history[-1][name]
    assert len(module.load_tasks("train")) == 8, "the module is not changed"
    assert gc.get_freeze_count() == 0, "leftovers of a run can be collected"


def test_on_step_ends_the_run_with_a_checkpoint_from_which_it_goes_on(config_of, tmp_path):
    seen = []

    def on_step(step, values):
        seen.append((step, values["eval/env/greedy_score"]))
        return step != 1

    def env(completion):
        return len(completion)

    arguments = {"env": env, "data": ROWS, "eval_data": [ROWS[0] | {"held_out": True}]}
    config = config_of("run", num_steps=3, eval_every=1, eval={"samples": 0})
    assert train(config, on_step=on_step, **arguments).step == 1
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]
    config.resume = True
    result = train(config, on_step=on_step, **arguments)
    assert [step for step, _ in seen] == [1, 2, 3] and result.step == 3
    assert [
        line["eval/env/greedy_score"] for line in result.history if "learn/policy/loss" not in line
    ] == [
        result.history[0]["eval/env/greedy_score"],
        *(score for _, score in seen),
    ]


def test_environments_are_values_that_add_up(config_of, tmp_path):
    file = tmp_path / "digits.py"
    file.write_text(DIGITS)
    long = Environment(len_of, name="long", data=ROWS[:3], eval_data=ROWS[3:5], weight=3)
    digits = Environment(file, max_tokens=4)
    held_out = Environment(lambda completion: 1.0, name="held_out", eval_data=ROWS[5:], weight=0)
    both = [*(long + digits), held_out]
    assert long + digits + held_out == both and [env.name for env in both] == [
        "long",
        "digits",
        "held_out",
    ]
    config = config_of("mix", tasks_per_step=4, eval_every=2, eval={"samples": 0})
    result = train(config, env=long + digits + held_out)
    line = result.metrics
    for name in ("long", "digits", "held_out"):
        assert f"eval/{name}/greedy_score" in line
    assert line["eval/held_out/greedy_score"] == 1.0
    drawn = [
        row for n in (1, 2) for row in trajectories(result.out / f"rollouts/step_{n:06d}.jsonl.zst")
    ]
    of_long = {row["task_id"] for row in drawn if row["env"] == "long"}
    assert of_long == {"train/0", "train/1", "train/2"}
    assert {row["env"] for row in drawn} == {"long", "digits"}
    counts = [sum(row["env"] == name for row in drawn) for name in ("long", "digits")]
    assert counts == [24, 8], "3 of 4 tasks, in groups of 4, in 2 steps"
    with pytest.raises(ValueError, match="two reward functions have the name 'len_of'"):
        train(config_of("twice"), env=[len_of, len_of])
    with pytest.raises(ValueError, match="two environments have the name 'digits'"):
        train(config_of("twice"), env=[file, file])
    with pytest.raises(ValueError, match="rows of one environment, these are 2"):
        train(config_of("rows"), env=[len_of, file], data=ROWS)


def test_a_plugin_of_the_script_has_the_hooks_of_ours(config_of):
    seen = []

    class Mine(Plugin):
        async def after_rollout(self, step, groups):
            self.trainer.add_metrics("rollout/policy/", {"mine": Mean(step)})
            seen.append((step, len(groups)))

        def state(self):
            return {"mine": len(seen)}

    result = train(config_of("own"), env=len_of, data=ROWS, plugins=[Mine])
    assert seen == [(0, 2), (1, 2)] and result.metrics["rollout/policy/mine"] == 1.0
    state = json.loads((result.out / "checkpoints/step_000002/state.json").read_text())
    assert state["mine"] == 2


def test_two_ranks_from_python_are_those_of_the_command(config_of, tiny_model, tmp_path, capsys):
    file = tmp_path / "digits.py"
    file.write_text(DIGITS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    flags += ["--model", tiny_model, "--env_path", file, "--data.train", tmp_path / "rows.jsonl"]
    run(tmp_path / "command", flags, ranks=2)
    # As run() gives it to the command.
    config = config_of("python", dp_replicate=1)
    result = train(config, env=file, data=ROWS[:5], nproc=2)
    assert result.step == 2 and "saved step 2" in capsys.readouterr().out
    theirs, ours = weights(tmp_path / "command"), weights(result.out)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    with pytest.raises(ValueError, match="len_of must be a file, for other processes read it"):
        train(config_of("function"), env=len_of, data=ROWS, nproc=2)
    with pytest.raises(
        ValueError, match="on_step, plugins, loss, optimizer and engine are of this"
    ):
        train(config_of("called"), env=file, on_step=lambda *_: None, nproc=2)
    config = config_of("missing", data={"train": str(tmp_path / "none.jsonl")})
    with pytest.raises(RunError, match="no such file"):
        train(config, env=file, nproc=2)


@pytest.mark.parametrize("is_in_evaluation", [False, True])
def test_an_interrupt_saves_when_the_step_is_done(is_in_evaluation, config_of, tmp_path, capsys):
    steps_done = []

    def scored(completion, prompt):
        if "held out" in str(prompt) and steps_done and "interrupted" not in steps_done:
            interrupt(1)
            steps_done.append("interrupted")
        return len(completion)

    def on_step(step, result):
        steps_done.append(step)
        if not is_in_evaluation:
            interrupt(step)

    held_out = [{"prompt": "held out"}] * 400 if is_in_evaluation else None
    flags = {"eval_every": 2 * is_in_evaluation, "eval": {"samples": 0}}
    config = config_of("run", num_steps=1000, **flags)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, env=scored, data=ROWS, eval_data=held_out, on_step=on_step)
    finally:
        signal.signal(signal.SIGINT, before)
    [*_, state] = sorted((tmp_path / "run/checkpoints").glob("step_*/state.json"))
    assert json.loads(state.read_text())["to_evaluate"] is is_in_evaluation
    output = capsys.readouterr().out
    assert re.search(r"^ended by SIGINT: step \d+ of 1000 in ", output, re.MULTILINE)
    assert ("eval at step 2 interrupted; --resume repeats it" in output) == is_in_evaluation
    assert "  resume: train() again, with Config(resume=True)\n" in output


def len_of(completion):
    return len(completion)


def interrupt(step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "algorithm, data",
    [("sft", "rows"), ("dpo", "pairs"), ("rm", "pairs"), ("orpo", "pairs"), ("kto", "labelled")],
)
def test_sft_rows_and_pairs_need_no_environment(algorithm, data, config_of):
    flags = {"algorithm": algorithm, "eval_every": 2, "max_tokens": 16}
    result = train(config_of("run", **flags), data=DATA[data][:4], eval_data=DATA[data][4:6])
    assert any(name.startswith("eval/") for name in result.metrics) and result.model.is_dir()


def test_rows_hold_images_of_pillow(make_model, config_of, tmp_path):
    picture = Image.new("RGB", (24, 16), (9, 0, 0))
    asked = [{"type": "image", "image": picture}, {"type": "text", "text": "a"}]
    reply = {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [{"role": "user", "content": asked}, reply]},
        {"prompt": "a", "completion": "b", "image": picture, "shot": picture},
    ]
    config = dataclasses.replace(
        config_of("run", algorithm="sft"), model=str(make_model("qwen2_5_vl"))
    )
    assert train(config, data=rows * 2).step == 2
    # Rows for other processes.
    kept = [json.loads(row) for row in write_rows(tmp_path / "rows.jsonl", rows).open()]
    urls = [kept[0]["messages"][0]["content"][0]["image"], kept[1]["image"][0], kept[1]["shot"]]
    for url in urls:
        file = io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))
        assert Image.open(file).tobytes() == picture.tobytes()
    with pytest.raises(ValueError, match=r"row 2 of env.train: column 'image': image 1: .*not an"):
        write_rows(tmp_path / "env.train.jsonl", [rows[0], {"prompt": "a", "image": b"x"}])
    with pytest.raises(ValueError, match=r"row 1 of env.train: a value of type date; rows for"):
        write_rows(tmp_path / "env.train.jsonl", [{"prompt": "a", "day": datetime.date.today()}])


def test_mistakes_are_raised(config_of, monkeypatch, capsys):
    def broken(completion):
        raise RuntimeError("on purpose")

    def wants(solution):
        return 1.0

    def refused(says, error=ValueError, out="a", **arguments):
        arguments = {"env": len_of, "data": ROWS} | arguments
        of_config = {
            name: arguments.pop(name) for name in ("optim", "learner") if name in arguments
        }
        with pytest.raises(error, match=says) as caught:
            train(config_of(out, **of_config), **arguments)
        # IPython prints these lines instead of the traceback.
        if lines := getattr(caught.value, "_render_traceback_", None):
            [line] = lines()
            assert re.match(rf"{error.__name__}: \S[^\n]*$", line)
        assert (lines is None) == (error not in (ValueError, RunError))

    def trls(prompts, completions, **columns):
        return [0.0]

    refused('^optim={"lr": fast} must be a valid number', optim={"lr": "fast"})
    refused('^Config has no field optim={"lrr": ...}; did you mean optim={"lr"', optim={"lrr": 1})
    refused("^env is missing", env=None)
    says = r'^learner={"microbatch_tokens": 9} must hold .* max_prompt_tokens=40 \+ max_turns=1 \* '
    refused(says, learner={"microbatch_tokens": 9})
    refused("asks for 'completions'; .*; TRL passes lists, rl_core one reply: a reward", env=trls)
    refused("asks for 'answer'; ", env=lambda answer: 0.0)
    refused(r"^wants\(\) asks for 'solution'; row 1 of data", env=wants)
    refused("eval_data needs", eval_data=ROWS)
    says = r"^\d+ of \d+ episodes of step 1 failed. The first: train/\d: broken\(\) failed: .*"
    says += r"test_train_api.py:\d+: RuntimeError: on purpose"
    refused(says, RunError, "b", env=broken)
    refused("division", ZeroDivisionError, "c", on_step=lambda step, result: 1 / 0)
    refused("nproc=0 must be at least 1", nproc=0, data=None)
    refused("plugins has 'Mine', which has no hook", out="d", plugins=["Mine"])
    for field, value, says in (("weight", "x", "a valid number"), ("max_tokens", 0, "greater")):
        env = Environment(len_of, name="a", data=ROWS, **{field: value})
        refused(rf'^envs={{"a": {{"{field}": {value}}}}} must be {says}', env=env, data=None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("starts its own ranks")
    assert "error:" not in capsys.readouterr().err


NOTEBOOK = """
from rl_core import Config, train
small = dict(model=MODEL, num_steps=3, tasks_per_step=2, group_size=2, max_tokens=4, max_prompt_tokens=40)
rows = [{"prompt": str(n)} for n in range(8)]
---
train(Config(out="run", **small), env=lambda completion: len(completion), data=rows)
---
train(Config(out="run", resume=True, **small | {"num_steps": 5}), env=lambda completion: len(completion), data=rows)
---
from rl_core import view
view("run", height=500)
---
Config(num_generations=8)
---
train(Config(out="wrong", **small), env=len, data=[{"promt": "1"}])
---
def on_step(step, metrics): raise ValueError("of the script")
train(Config(out="own", **small), env=lambda completion: 1.0, data=rows, on_step=on_step)
"""


def test_a_notebook_shows_a_chart_and_a_mistake_in_one_line(tiny_model, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = NOTEBOOK.replace("MODEL", repr(str(tiny_model))).split("---\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    options = {"kernel_name": "python3", "allow_errors": True, "timeout": 120}
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, resources=resources, **options).execute()
    _, ran, resumed, shown, name, column, raised = (cell.outputs for cell in notebook.cells)
    # One display, in which the last step has replaced the others, and no line of a step.
    [chart] = [output.data for output in ran if output.output_type == "display_data"]
    assert chart["text/plain"].startswith("step 3/3  reward ")
    titles = re.findall(r"<div>(\w+) \S+<br><svg", chart["text/html"])
    assert titles == ["reward", "tokens", "entropy"]
    points = re.search(r'points="(.*?)"', chart["text/html"])[1].split()
    assert [point.split(",")[0] for point in points] == ["0.0", "100.0", "200.0"]
    [chart] = [output.data for output in resumed if output.output_type == "display_data"]
    points = re.search(r'points="(.*?)"', chart["text/html"])[1].split()
    assert [point.split(",")[0] for point in points] == ["0.0", "50.0", "100.0", "150.0", "200.0"]
    [page] = [output.data["text/html"] for output in shown]
    assert re.match(r'<iframe src="http://127.0.0.1:\d+/" width="100%" height="500"', page)
    printed = "".join(output.text for output in ran if output.output_type == "stream")
    assert "\ndone: step 3 of 3 in " in printed and "\nstep " not in printed
    assert ran[-1].data["text/plain"].startswith("TrainResult: step 3 in run; policy/reward ")
    assert [error.traceback for error in (*name, *column)] == [
        [f"ValueError: {error.evalue}"] for error in (*name, *column)
    ]
    assert len(raised[-1].traceback) > 1, "a mistake of the script keeps its traceback"


def test_an_unknown_name_in_python_is_answered_by_fields():
    with pytest.raises(ValueError, match="no field num_generations; rl_core calls it group_size"):
        Config(num_generations=8)
    with pytest.raises(ValueError, match=r'no field optim={"lrr": ...}; did you mean optim={"lr"'):
        OptimConfig(lrr=1e-6)
    with pytest.raises(ValueError, match=r'no field actors={"NAME": {"lora": {"r": ...}}}; '):
        LoraConfig(r=16)
    config = Config()
    with pytest.raises(
        ValueError,
        match=r'no field optim={"learning_rate": ...}; rl_core calls it optim={"lr": ...}',
    ):
        config.optim.learning_rate = 1e-5
    config.optim.lr = 1e-5
    copies = copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)
    assert all(made == config and made.optim.lr == 1e-5 for made in copies)


@pytest.mark.parametrize(
    "of_flags, of_fields",
    [
        ("--num_steps=0 must be more", "num_steps=0 must be more"),
        ("leave out --actors.a.train=false;", 'leave out actors={"a": {"train": False}};'),
        ("or give --algo.kl_coef 0.1.", 'or give algo={"kl_coef": 0.1}.'),
        ("name rows by --data.train", "name rows by data"),
        (
            "run rl-core check --env_path x, or --resume",
            "run rl-core check --env_path x, or resume",
        ),
        ("the engine's --max-model-len", "the engine's --max-model-len"),
        ("`git log --oneline` failed", "`git log --oneline` failed"),
    ],
)
def test_errors_of_flags_become_errors_of_fields(of_flags, of_fields):
    with pytest.raises(ValueError) as caught, errors_of_fields():
        raise ValueError(of_flags)
    assert str(caught.value) == of_fields


def test_reward_functions_in_a_list_are_summed(config_of):
    def half(completion):
        return 0.5

    async def mean(completion, prompt):
        return len(completion) / 8

    result = train(
        config_of("run", num_steps=1), env=[half, mean, reward(weight=2)(one)], data=ROWS
    )
    episodes = trajectories(result.out / "rollouts/step_000001.jsonl.zst")
    assert len(episodes) == 8
    for episode in episodes:
        reply = len(episode["messages"][-1]["content"])
        assert episode["reward_parts"] == {"half": 0.5, "mean": reply / 8, "one": 2.0}


def one(completion):
    return 1.0


def test_a_run_of_no_step_has_no_metrics(config_of):
    result = train(config_of("run", num_steps=0), env=len_of, data=ROWS)
    assert (result.step, result.metrics, result.history) == (0, {}, [])


def test_train_stays_callable_after_other_imports():
    code = (
        "import rl_core, sys; assert 'rl_core.config' not in sys.modules and 'torch' not in "
        "sys.modules; "
    )
    code += "from rl_core import train; import rl_core.train; from rl_core.train import main; "
    code += (
        "from rl_core import train, Config; assert callable(train) and train.main is main and "
        "Config().seed == 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_every_code_block_of_the_page_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "envs", "envs")
    # An untrained model gets no sum right, and rewards that are all equal end a run with an error.
    with open("envs/calculator.py", "a") as file:
        file.write("\n\ndef reward_fn(completion): return len(completion) / 8\n")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)
    names = {}
    for block in blocks:
        block = block.replace("float(answer in completion)", "len(completion) / 8")
        exec(block.replace("Qwen/Qwen3-0.6B", str(tiny_model)), names)
    assert len(blocks) == 10 and len(names["rewards"]) == 4 and names["result"].step == 2
    assert (
        names["model"].num_parameters() > 0 and names["dpo"].step == names["calculator"].step == 2
    )


def test_data_may_be_a_file_or_a_table_of_pandas(config_of, tmp_path):
    import pandas

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rewards = {"env": lambda completion: float("7" in completion)}
    results = [
        train(config_of(name, num_steps=1), data=data, **rewards)
        for name, data in {
            "list": ROWS,
            "file": str(tmp_path / "rows.jsonl"),
            "path": tmp_path / "rows.jsonl",
            "pandas": pandas.DataFrame(ROWS),
        }.items()
    ]
    prompts = [
        [t["messages"] for t in trajectories(result.out / "rollouts/step_000001.jsonl.zst")]
        for result in results
    ]
    assert prompts[0] and all(other == prompts[0] for other in prompts)
    many = dataclasses.replace(results[0], metrics={f"time/{n}_s": 1.0 for n in range(99)})
    for result in (results[0], many):
        lines = str(result).splitlines()
        assert len(lines) <= 2 and lines[0].startswith("TrainResult: step 1 in ")


def test_arrays_and_nulls_that_parquet_adds_are_not_in_rows_of_pandas(tmp_path):
    import pandas

    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    rows = [{"messages": talk, "answer": 3, "tags": ["a", "b"]}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    assert as_rows("data", pandas.read_parquet(tmp_path / "rows.parquet")) == rows


def test_data_of_a_wrong_kind_gets_one_sentence_about_the_argument(config_of):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match=r"^data is a DatasetDict of 'train'; give one of its"):
        train(config_of("a"), env=len, data=datasets.DatasetDict({"train": table}))
    with pytest.raises(ValueError, match=r"^data is empty; it must have at least one row"):
        train(config_of("a"), env=len, data=[])
    with pytest.raises(ValueError, match=r"^row 1 of data: needs one of the columns"):
        train(config_of("a"), env=len_of, data=[{"promt": "1"}])
    with pytest.raises(ValueError, match=r"^eval_data is a IterableDataset, which has no length"):
        train(config_of("a"), env=len, data=ROWS, eval_data=table.to_iterable_dataset())
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"^Config\(model=...\) is a Linear; give the folder"):
        train(dataclasses.replace(config_of("a"), model=model), env=len, data=ROWS)
