"""Trackers are read back with their own libraries; and whatever one does, the run stays as it
is."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import sqlite3
import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kit import (
    RanksProcess,
    make_learner,
    metrics,
    run,
    run_ranks,
    sample,
    trajectories,
    wait_until,
    words,
)

from rl_core.run.display.mfu import mfu, peak_flops
from rl_core.tools import cli
from rl_core.train import main

ALL = "wandb,tensorboard,trackio,mlflow"
REWARD, SCORE = "rollout/policy/reward_mean", "eval/letters/greedy_score"
# Trackers of the tests. The first records its calls.
NOTES = """
import json, threading

released = threading.Event()  # ends what hangs

class Notes:
    def __init__(self, run):
        self.file = open(run.out + "/notes", "a")
        self.note("made", run.project, run.group, run.name, run.is_resumed)

    def note(self, *what):
        print(json.dumps(what), file=self.file, flush=True)

    def log(self, step, values):
        self.note("log", step, sorted(values))

    def table(self, step, name, table):
        self.note("table", step, name)

    def close(self, is_ok):
        self.note("close", is_ok)

class Raises(Notes):
    def log(self, step, values):
        raise RuntimeError("no\\nroute")

class Hangs(Notes):
    def log(self, step, values):
        released.wait()

def never_made(run):
    released.wait()

def no_account(run):
    raise KeyError("log in")
"""


@pytest.fixture(scope="module")
def flags(places, tmp_path_factory):
    """Metrics of a short run. Trackers write into a separate folder."""
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "notes.py").write_text(NOTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        # Trackio reads it once, and another test of this process may have imported it before.
        for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            patch.delitem(sys.modules, module)
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'mlruns'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        flags = (
            f"--model {places['model']} --env_path {places['dir']}/letters.py --max_tokens 6 "
            "--max_prompt_tokens 24"
        )
        yield words(
            flags,
            "--tasks_per_step 2 --group_size 2 --eval_every 2 --eval.samples 0 --optim.lr 1e-2",
        )


@pytest.fixture(scope="module")
def tracked(flags, tmp_path_factory) -> Path:
    """A run of two steps that was resumed for the third, in every tracker."""
    out = tmp_path_factory.mktemp("runs") / "digits" / "one"
    run(out, flags, "--num_steps 2 --trackers", ALL)
    return run(out, flags, "--num_steps 3 --resume --trackers", ALL)


@pytest.fixture(scope="module")
def sent(tracked) -> dict:
    """The metrics that each tracker must hold."""
    curves = {
        name: [(row["step"], row[name]) for row in metrics(tracked) if name in row]
        for name in (REWARD, SCORE)
    }
    assert [step for step, _ in curves[REWARD]] == [1, 2, 3] and [
        step for step, _ in curves[SCORE]
    ] == [0, 2, 3]
    [first, *_] = trajectories(tracked / "rollouts/step_000003.jsonl.zst")
    texts = [f"{m['role']}: {m['content']}" for m in first["messages"]]
    return {
        "curves": curves,
        "names": [tracked.parts[-3], "digits", "one"],
        "row": [*texts, first["reward"]],
    }


def test_tensorboard_has_it(tracked, sent):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(tracked / "tensorboard")).Reload()
    for name, curve in sent["curves"].items():
        assert {e.step: e.value for e in result.Scalars(name)} == pytest.approx(dict(curve))
    texts = {
        step.step: step.tensor_proto.string_val[0].decode()
        for step in result.Tensors("samples/step/text_summary")
    }
    assert sorted(texts) == [1, 2, 3] and "**status**" in texts[3]
    assert all(str(cell).splitlines()[0] in texts[3] for cell in sent["row"])
    assert (
        "**group_size**\n\n    2"
        in result.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )


def test_mlflow_has_it(tracked, sent):
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name(sent["names"][0])
    [result] = client.search_runs([experiment.experiment_id])
    assert (result.info.run_name, result.info.status, result.data.tags["group"]) == (
        "one",
        "FINISHED",
        "digits",
    )
    assert result.data.params["group_size"] == "2"
    for name, curve in sent["curves"].items():
        assert [
            (m.step, m.value) for m in client.get_metric_history(result.info.run_id, name)
        ] == curve
    table = json.loads(
        Path(client.download_artifacts(result.info.run_id, "samples/step_000003.json")).read_text()
    )
    assert (
        table["columns"] == ["prompt", "reply", "reward", "status"]
        and table["data"][0][:3] == sent["row"]
    )


def test_trackio_has_it(sent):
    [file] = Path(os.environ["TRACKIO_DIR"]).glob(f"{sent['names'][0]}.db")
    with sqlite3.connect(file) as db:
        [(name, config)] = db.execute("select run_name, config from configs").fetchall()
        lines = [
            (step, json.loads(text))
            for step, text in db.execute("select step, metrics from metrics order by id")
        ]
    assert name == "one" and json.loads(config)["group_size"] == 2
    for name, curve in sent["curves"].items():
        assert [(step, values[name]) for step, values in lines if name in values] == curve
    [table] = [
        values["samples/step"]["_value"]
        for step, values in lines
        if step == 3 and "samples/step" in values
    ]
    assert list(table[0].values())[:3] == sent["row"]


def test_wandb_has_it(tracked, sent):
    files = sorted(tracked.glob("wandb/offline-run-*/*.wandb"))
    first, second = map(wandb_records, files)
    runs = [next(r.run for r in each if r.HasField("run")) for each in (first, second)]
    assert [[r.project, r.run_group, r.display_name] for r in runs] == [sent["names"]] * 2
    assert runs[0].run_id == runs[1].run_id
    assert {u.key: u.value_json for u in runs[0].config.update}["group_size"] == "2"
    rows = []
    for each in (r.history for r in (*first, *second) if r.HasField("history")):
        values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in each.item}
        rows.append((each.step.num, values))
    for name, curve in sent["curves"].items():
        assert [(step, values[name]) for step, values in rows if name in values] == curve
    [table] = tracked.glob("wandb/offline-*/files/media/table/samples/step_3_*.json")
    assert json.loads(table.read_text())["data"][0][:3] == sent["row"]
    assert [r.exit.exit_code for r in (*first, *second) if r.HasField("exit")] == [0, 0]


def wandb_records(file: Path) -> list:
    """The messages of an offline run: after seven bytes, blocks of 32 KiB with pieces of them
    (LevelDB's log format)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, result, text = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        text += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            result.append(Record.FromString(text))
            text = b""
    return result


def notes(out: Path) -> list[list]:
    return [json.loads(line) for line in (out / "notes").read_text().splitlines()]


def steps_told(out: Path) -> list[int]:
    return [note[1] for note in notes(out) if note[0] == "log"]


def lasting(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(out)]


@pytest.mark.parametrize(
    "trackers, timeout_s, says",
    [
        (
            "notes:Raises,notes:no_account",
            600,
            ["notes:Raises is off: RuntimeError: no route", "notes:no_account is off: "],
        ),
        (
            "notes:Hangs,notes:never_made",
            4,
            ["notes:Hangs is left behind", "notes:never_made is left behind"],
        ),
    ],
)
def test_a_tracker_that_raises_or_hangs_is_a_line_and_no_more(
    trackers, timeout_s, says, flags, tmp_path, capfd
):
    released = importlib.import_module("notes").released
    released.clear()
    without = run(tmp_path / "without", flags, "--num_steps 2")
    capfd.readouterr()
    out = run(
        tmp_path / "out",
        flags,
        "--num_steps 2 --trackers",
        f"{trackers},notes:Notes",
        "--timeout_s",
        timeout_s,
    )
    shown = capfd.readouterr().err.splitlines()
    assert [sum(f"--trackers {text}" in line for line in shown) for text in says] == [1, 1], shown
    released.set()
    assert lasting(out) == lasting(without)


@pytest.mark.parametrize(
    "trackers, says",
    [
        ("tensorboard,wanbd", "--trackers wanbd is not known; did you mean 'wandb'?"),
        (
            "notes:Noets",
            "--trackers notes:Noets: AttributeError: module 'notes' has no attribute 'Noets'",
        ),
        (
            "no_such_module:Notes",
            "--trackers no_such_module:Notes: ModuleNotFoundError: No module named "
            "'no_such_module'",
        ),
        (
            "tensorboard,mlflow",
            "--trackers mlflow needs mlflow, which is not installed: pip install "
            "'rl_core[trackers]'",
        ),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_before_a_model_loads(
    trackers, says, flags, tmp_path, capfd, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlflow" else find(name)
    )
    assert main([*flags, "--trackers", trackers, "--out", str(tmp_path / "out")]) == 1
    assert f"error: {says}" in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_rl_core_train_finds_a_tracker_in_the_current_folder(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        sys,
        "path",
        [position for position in sys.path if position and Path(position) != Path.cwd()],
    )
    monkeypatch.delitem(sys.modules, "notes", raising=False)
    out = tmp_path / "out"
    assert (
        cli.main(["train", *flags, *words("--num_steps 0 --trackers notes:Notes --out", out)]) == 0
    )
    assert notes(out)[-1] == ["close", True]


def test_one_rank_of_several_tracks(flags, tmp_path):
    out = tmp_path / "out"
    arguments = words(
        flags, "--num_steps 1 --trackers notes:Notes --run_name team/first/try --out", out
    )
    run_ranks(2, "-m", "rl_core.train", *arguments)
    assert [note[:4] for note in notes(out) if note[0] == "made"] == [
        ["made", "team", "first", "try"]
    ]
    assert [note[1:] for note in notes(out) if note[0] == "table"] == [
        [0, "samples/eval"],
        [1, "samples/step"],
        [1, "samples/eval"],
    ]
    assert notes(out)[-1] == ["close", True]


def test_a_process_ends_whose_tracker_hangs(flags, tmp_path):
    more = words("--num_steps 1 --timeout_s 4 --trackers notes:Hangs --out", tmp_path / "out")
    process = RanksProcess(1, "-m", "rl_core.train", *flags, *more)
    printed, errors = process.communicate(timeout=90)
    assert process.returncode == 0 and "saved step 1" in printed, errors
    assert "without waiting for what still runs: --trackers notes:Hangs" in errors


def is_free(out: Path) -> bool:
    """True if no process holds the run's lock."""
    with open(out / ".lock") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_a_run_that_was_killed_goes_on_in_its_trackers_without_repeating(flags, tmp_path):
    out = tmp_path / "out"
    arguments = words(flags, "--save_every 2 --trackers notes:Notes --resume --out", out)
    process = RanksProcess(1, "-m", "rl_core.train", *arguments, "--num_steps", "1000")
    wait_until(lambda: (out / "notes").exists() and 3 in steps_told(out), "three steps are tracked")
    process.signal(9)
    wait_until(lambda: is_free(out), "the run is gone")
    last = metrics(out)[-1]["step"]
    run(out, arguments, "--num_steps", last + 2)
    assert [note[-1] for note in notes(out) if note[0] == "made"] == [False, True]
    # A row of an evaluation follows each second step and the last one.
    evaluated = {*range(2, last + 3, 2), last + 2}
    rows = sorted([*range(last + 3), *evaluated])
    sent = steps_told(out)
    # A row is noted as sent before it is sent, so that the kill may cost one.
    kept = [rows[:lost] + rows[lost + 1 :] for lost in range(len(rows))]
    assert sent in (rows, *kept), "each once, in order"


def test_a_tracker_that_comes_later_gets_all(flags, tmp_path):
    out = run(tmp_path / "out", flags, "--num_steps 2")
    run(out, flags, "--num_steps 2 --resume --trackers notes:Notes")
    assert steps_told(out) == [row["step"] for row in metrics(out)] == [0, 1, 2, 2]


def test_a_run_that_fails_is_failed_in_its_trackers(flags, places, tmp_path):
    (tmp_path / "bad.py").write_text(
        Path(places["dir"], "letters.py").read_text().replace("return sum", "return 'x', sum")
    )
    arguments = words(
        flags,
        "--env_path",
        tmp_path / "bad.py",
        "--eval_every 0 --num_steps 1 --trackers notes:Notes",
    )
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert notes(tmp_path / "out")[-1] == ["close", False]


FULL_DISK = """
import os
def load_tasks(split): return [{{"prompt": str(n)}} for n in range(8)]
async def reward_fn():
    file = "{out}/rollouts/.step_000001.jsonl.zst.tmp"
    if not os.path.lexists(file):
        os.symlink("/dev/full", file)
    return 1.0
"""


def test_trackers_hear_of_the_end_where_the_disk_is_full(flags, tmp_path):
    (tmp_path / "full.py").write_text(FULL_DISK.format(out=tmp_path / "out"))
    arguments = words(
        flags,
        "--env_path",
        tmp_path / "full.py",
        "--eval_every 0 --num_steps 1 --trackers notes:Notes --out",
        tmp_path / "out",
    )
    assert main(arguments) == 1
    assert notes(tmp_path / "out")[-1] == ["close", False]


def test_percentiles_of_lengths_are_those_of_the_episodes(tracked):
    lengths = [
        sum(len(turn["completion"]["token_ids"]) for turn in episode["turns"])
        for episode in trajectories(tracked / "rollouts/step_000001.jsonl.zst")
    ]
    row = next(row for row in metrics(tracked) if row["step"] == 1)
    result = [row[f"rollout/policy/length_{name}"] for name in ("p50", "p95", "max")]
    assert result == pytest.approx(np.percentile(lengths, [50, 95, 100]).tolist())


@pytest.mark.parametrize(
    "device, flags, passes",
    [
        ("NVIDIA H100 80GB HBM3", "", 6),
        ("NVIDIA A100-SXM4-80GB", "--learner.epochs 2 --algo.kl_coef 0.1", 16),
        ("NVIDIA GeForce RTX 4090", "--actors.policy.lora.rank 2", 4),
        ("NVIDIA H100 80GB HBM3", "--learner.dtype float32", None),
        ("Some GPU", "", None),
    ],
)
def test_mfu_is_the_matrix_products_over_the_peak(device, flags, passes, tiny_model):
    learner = make_learner(tiny_model, flags)
    _, packing = learner.shard([sample([5] * 30, [0] * 10 + [1] * 20, 1.0)])
    result = mfu(learner, packing["pack/fill_frac"].total, 2.0, peak_flops(device))
    peak = {"H100": 989e12, "A100": 312e12, "4090": 165e12}
    if passes is None:
        assert not result
    else:
        hf = learner.policy.hf
        size, width = (
            sum(p.numel() for p in hf.parameters()),
            hf.config.num_attention_heads * hf.config.head_dim,
        )
        attention = (
            2 * width * hf.config.num_hidden_layers * 29 * 29 / 2
        )  # multiply-adds of a triangle, of Q K and of P V; the last token is not read
        want = (
            passes
            * (size * 29 + attention)
            / (2.0 * next(p for name, p in peak.items() if name in device))
        )
        assert result["mfu"].value == pytest.approx(want)


@pytest.mark.gpu
def test_memory_and_mfu_of_a_run_on_a_gpu(flags, tmp_path):
    for row in (
        row
        for row in metrics(run(tmp_path / "out", flags, "--num_steps 2 --engine embedded"))
        if "time/step_s" in row
    ):
        assert {"memory/generate_gib", "memory/learn_gib", "memory/sync_gib"} <= row.keys()
        assert 0 < row.get("learn/policy/mfu", 0.5) < 1
