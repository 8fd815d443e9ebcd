"""A run's folder belongs to one run at a time, and a resumed run reports its content."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from pathlib import Path

import pytest
import yaml
import zstandard
from kit import kill_session, start_process, words

from rl_core.run.run_folder import locked
from rl_core.run.saving.checkpoint import checkpoints_in
from rl_core.run.saving.lost_steps import drop_lost_steps
from rl_core.tools.cli import main as rl_core_command
from rl_core.train import main


@pytest.fixture
def flags(places):
    return words(
        f"--model {places['model']} --env_path {places['dir']}/letters.py --max_tokens 6 "
        "--tasks_per_step 2"
    )


def test_a_run_that_goes_on_says_from_where_and_what_differs(flags, tmp_path, capsys):
    out = tmp_path / "run"
    resume = [*flags, "--group_size", "2", "--out", str(out), "--resume", "--rollout.save", "false"]
    assert main([*resume, "--num_steps", "1"]) == 0
    assert f"--resume: no checkpoint yet; begins at step 0, in {out}" in capsys.readouterr().out
    assert main([*resume, "--num_steps", "2", "--optim.lr", "1e-4"]) == 0
    shown = capsys.readouterr().out
    assert "--resume: continues from step 1" in shown and "trains on" not in shown
    assert [line.split(": ")[1] for line in shown.splitlines() if "differs" in line] == [
        "--optim.lr 1e-06 -> 0.0001"
    ]
    assert yaml.safe_load((out / "config.yaml").read_text())["optim"]["lr"] == 1e-6
    assert not [*out.glob("rollouts/*.zst")], "nobody asked for them"
    assert main([*resume, "--num_steps", "2"]) == 0
    assert "step 2 of 2; a higher --num_steps trains on" in capsys.readouterr().out


def test_a_folder_of_a_run_that_is_going_on_is_refused(flags, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with open(out / ".lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main([*flags, "--out", str(out), "--resume"]) == 1
    assert f"error: --out {out} is used by another run" in capsys.readouterr().err
    assert not (out / "config.yaml").exists()
    ours = (
        rf"is used by another run \(process {os.getpid()} on "
        rf"{re.escape(socket.gethostname())}\); wait"
    )
    with locked(out), pytest.raises(ValueError, match=ours), locked(out):
        pass


def test_a_folder_names_the_run_that_has_it_and_none_before(tmp_path):
    (tmp_path / ".lock").write_text("process 1234567 on the machine of an earlier run")
    with locked(tmp_path):
        assert (
            tmp_path / ".lock"
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize(
    "start",
    [
        "os.fork() or time.sleep(600)",
        "get_context('fork').Process(target=time.sleep, args=[600]).start()",
    ],
)
def test_children_that_a_killed_run_has_forked_do_not_hold_its_folder(start, tmp_path):
    code = f"""
import os, sys, time
from multiprocessing import get_context
from pathlib import Path
from rl_core.run.run_folder import locked
with locked(Path(sys.argv[1])):
    {start}
    print("forked", flush=True)
    time.sleep(600)
"""
    process = start_process("-c", code, tmp_path)
    try:
        assert process.stdout.readline() == "forked\n", process.stderr.read()
        with pytest.raises(ValueError, match=rf"process {process.pid} on "), locked(tmp_path):
            pass
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        assert Path(f"/proc/{child}/cmdline").read_bytes(), "it lives on"
        with locked(tmp_path):
            pass
    finally:
        kill_session(process)


def test_a_folder_that_cannot_be_made_is_refused_with_the_fix(flags, tmp_path, monkeypatch, capsys):
    # The error is also printed if torchrun's folder is gone.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/attempt_0/0/error.json"))
    (tmp_path / "file").write_text("")
    assert main([*flags, "--out", str(tmp_path / "file/run")]) == 1
    output = capsys.readouterr().err
    assert output == (
        f"error: --out {tmp_path}/file/run cannot be made: Not a directory; name a folder where "
        "you may write\n"
    )


def test_who_looks_whether_a_run_goes_on_stops_none(tmp_path, monkeypatch):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(
            "rl_core.run.run_folder.time.sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN)
        )
        with locked(tmp_path):
            pass


# File with image 0 -> images left of 0 to 2, which lost files name, and 3, which no file names.
KEPT_IMAGES = {
    "rollouts/step_000002.jsonl.zst": "03",
    "rollouts/eval_000002.jsonl.zst": "03",
    "checkpoints/step_000002/groups_000.jsonl.zst": "03",
    "rollouts/step_000003.jsonl.zst": "3",
}


@pytest.mark.parametrize("kept", KEPT_IMAGES)
def test_images_that_only_lost_steps_name_are_deleted(kept, tmp_path):
    def names(file, numbers):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        parts = [{"type": "image", "image": f"images/{n:016x}.png"} for n in numbers]
        line = json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n"
        (tmp_path / file).write_bytes(zstandard.compress(line.encode()))

    names(kept, [0])
    names("rollouts/step_000004.jsonl.zst", [0, 1])
    names("rollouts/eval_000004.jsonl.zst", [2])
    images = tmp_path / "rollouts/images"
    images.mkdir()
    for n in range(4):
        (images / f"{n:016x}.png").touch()
    drop_lost_steps(tmp_path, 2, False)
    assert "".join(f.name[15] for f in sorted(images.iterdir())) == KEPT_IMAGES[kept]


def test_the_newest_checkpoint_is_the_one_of_most_steps(tmp_path):
    for step in (1_000_000, 999_999):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}/manifest.json").touch()
    assert checkpoints_in(tmp_path)[-1].name == "step_1000000"


@pytest.mark.parametrize(
    "make, name, says",
    [
        ([], "tniy", "no such folder; did you mean {dir}/tiny?"),
        (
            ["many/b/config.json", "many/a/config.json"],
            "many",
            "is a folder of models; name one: {dir}/many/a or {dir}/many/b",
        ),
        (
            ["run/hf/bob/config.json"],
            "run",
            "is a run's folder; name the model that it exported: {dir}/run/hf/bob",
        ),
        (
            ["run/hf/bob/config.json", "run/checkpoints/step_000001/manifest.json"],
            "run/checkpoints/step_000001",
            "is a checkpoint; name the model of its run: {dir}/run/hf/bob",
        ),
        (
            ["hf/bob_adapter/adapter_config.json"],
            "hf/bob_adapter",
            "is an adapter; name a whole model, such as {dir}/hf/bob",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_what_to_name(
    make, name, says, flags, tmp_path, capsys
):
    for file in ["tiny/config.json", *make]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert main([*flags, "--model", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"error: model {tmp_path / name}") and len(output.splitlines()) == 1
    assert says.format(dir=tmp_path).split("such as ")[-1] in output, output


def test_a_model_after_a_dot_is_a_folder(flags, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([*flags, "--model", "./tniy", "--out", "out"]) == 1
    assert capsys.readouterr().err == "error: model tniy: no such folder; did you mean tiny?\n"


def test_a_reward_model_does_not_speak(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm/hf/policy").mkdir(parents=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}
    (tmp_path / "rm/hf/policy/config.json").write_text(json.dumps(config))
    output = "error: model rm/hf/policy looks like a reward model"
    assert main([*flags, "--model", "rm/hf/policy", "--out", "out"]) == 1
    assert capsys.readouterr().err.startswith(output)
    for model in ("rm", "rm/hf/policy"):
        assert rl_core_command(["eval", model]) == 1
        assert capsys.readouterr().err.startswith(output)


def test_a_folder_that_is_not_beside_its_neighbours_is_no_name_of_the_hub(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/first").mkdir(parents=True)
    assert rl_core_command(["eval", "runs/frist"]) == 1
    output = "error: model runs/frist: no such folder; did you mean runs/first?\n"
    assert capsys.readouterr().err == output
