"""--eval.background: the same numbers at the same steps as evaluations that training waits for; what
was under way when a run was killed is neither lost nor repeated; what fails is recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit import (
    STOP,
    ForkedProcess,
    kill_session,
    metrics,
    run,
    start_process,
    trajectories,
    wait_until,
    words,
)

from rl_core.run.evaluation.background_evaluation import (
    BackgroundEvaluation,
    end_orphan,
    environment_of,
)
from rl_core.tools.cli import main as command
from rl_core.train import main

SIZES = "--max_tokens 8 --max_prompt_tokens 64 --tasks_per_step 4 --group_size 2 " + STOP
FLAGS = "--model {model} --env_path {dir}/letters.py --optim.lr 0.01 --eval.samples 2 " + SIZES
BESIDE = "--eval.background cpu"
# Held-out tasks are scored in the process alone.
HELD_OUT = """
import asyncio, os
from pathlib import Path
HOLD = Path(__file__).parent / "hold"
def load_tasks(split): return [{{"prompt": f"{{split}} {{n}}"}} for n in range(8)]
async def reward_fn(completion, prompt):
    if "eval" in prompt[-1]["content"]:
        {held_out}
    return sum(map(ord, completion)) / 1000
"""


def evaluations(out) -> dict[int, dict[str, float]]:
    result = [row for row in metrics(out) if "time/eval_s" in row]
    by_step = {}
    for row in result:
        by_step[row["step"]] = {name: row[name] for name in row if name.startswith("eval/")}
    assert len(by_step) == len(result)
    return by_step


def test_scores_are_those_of_the_steps_own_weights(places, tmp_path):
    flags = words(FLAGS.format(**places), "--num_steps 3 --eval_every 3")
    waited = run(tmp_path / "waited", *flags)
    target = run(tmp_path / "beside", *flags, *words(BESIDE), ranks=2)
    expected, result = evaluations(waited), evaluations(target)
    assert list(result) == list(expected) == [0, 3]
    for step in expected:
        assert result[step].pop("eval/background_failed") == 0
        assert result[step] == pytest.approx(expected[step], abs=1e-6)
    assert result[0]["eval/letters/avg@2"] != result[3]["eval/letters/avg@2"]  # It learned.
    assert not list((target / "evaluations").iterdir())
    for step in (0, 3):
        assert (target / f"rollouts/eval_{step:06d}_greedy.jsonl.zst").is_file()
    assert len(trajectories(target / "rollouts/eval_000003_sampled.jsonl.zst")) == 16


def test_an_evaluation_under_way_outlives_a_kill_once(places, tmp_path, capsys):
    code = HELD_OUT.format(held_out="while HOLD.exists(): await asyncio.sleep(0.05)")
    (tmp_path / "held.py").write_text(code)
    (tmp_path / "hold").touch()
    out = tmp_path / "run"
    env = ["--env_path", tmp_path / "held.py", *words(SIZES, "--eval.samples 0")]
    flags = words("--model", places["model"], *env, "--out", out, BESIDE)
    flags += words("--num_steps 3 --eval_every 3 --save_every 1 --optim.lr 0.01")
    process = ForkedProcess("-m", "rl_core.train", *flags)
    folder = out / "evaluations/step_000000"
    # Steps continue while the evaluation of the first weights is held.
    wait_until(lambda: list(out.glob("checkpoints/step_000002/manifest.json")), "two steps")
    pid = int((folder / "pid").read_text())
    process.kill()
    process.wait()
    assert not evaluations(out) and os.path.exists(f"/proc/{pid}")
    (tmp_path / "hold").unlink()
    assert main([*flags, "--resume"]) == 0
    assert list(evaluations(out)) == [0, 3]
    assert not list((out / "evaluations").iterdir())
    capsys.readouterr()
    assert command(["eval", places["model"], *map(str, env), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)[places["model"]]["held"]["greedy_score"]["value"]
    assert evaluations(out)[0]["eval/held/greedy_score"] == pytest.approx(plain, abs=1e-6)


def test_a_process_that_has_an_evaluations_number_by_now_is_not_ended(tmp_path):
    """A run was killed, and so was its evaluation; the system gave the number to another process,
    which leads a process group."""
    folder = tmp_path / "evaluations/step_000002"
    folder.mkdir(parents=True)
    sleep = ["-c", "import time; time.sleep(60)"]
    other, of_one = start_process(*sleep), start_process(*sleep, folder)
    try:
        for process in (of_one, other):  # While a program begins, its arguments are empty.
            arguments = Path(f"/proc/{process.pid}/cmdline")
            wait_until(lambda arguments=arguments: arguments.read_text(), "it begins")
        (folder / "pid").write_text(str(other.pid))
        end_orphan(folder)
        (folder / "pid").write_text(str(of_one.pid))
        end_orphan(folder)
        assert of_one.wait(30) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1)  # A process that was killed may take a moment to end.
    finally:
        for process in (of_one, other):
            kill_session(process)


# Folders in evaluations/ of a run with a checkpoint of step 4 -> True if the evaluation is still to be
# done. metrics.jsonl has the evaluation of step 2.
LEFT = {
    "step_000002": False,  # logged already
    "step_000003": True,
    "step_000004": True,
    "step_000005": False,  # Its step comes after the checkpoint and is repeated.
    "step_000003.tmp": False,
}


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_evaluations_after_the_checkpoint_are_not_taken_up(has_checkpoint, tmp_path):
    for name in LEFT:
        (tmp_path / "evaluations" / name).mkdir(parents=True)
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 2, "time/eval_s": 1}\n{"step": 3, "time/step_s": 1}\n')
    plugin = BackgroundEvaluation.__new__(BackgroundEvaluation)
    checkpoint = tmp_path if has_checkpoint else None
    plugin.trainer = SimpleNamespace(
        log=SimpleNamespace(path=log), checkpoint=checkpoint, first_step=4 * has_checkpoint
    )
    plugin.folder, plugin.is_left = tmp_path / "evaluations", False
    kept = [name for name, is_kept in LEFT.items() if is_kept and has_checkpoint]
    assert plugin.steps_left() == [int(name.removeprefix("step_")) for name in kept]
    assert sorted(path.name for path in plugin.folder.iterdir()) == kept


def test_an_evaluation_that_fails_is_recorded_and_training_goes_on(places, tmp_path, capfd):
    (tmp_path / "ends.py").write_text(HELD_OUT.format(held_out="os._exit(3)"))
    flags = words("--model", places["model"], "--env_path", tmp_path / "ends.py", SIZES, BESIDE)
    out = run(tmp_path / "run", *flags, *words("--num_steps 2 --eval_every 2"))
    assert evaluations(out) == {step: {"eval/background_failed": 1.0} for step in (0, 2)}
    assert "the evaluation of step 2 failed: status 3" in capfd.readouterr().out


@pytest.mark.parametrize("flags, says", [
    ("--eval.background gpu", "--eval.background=gpu must be cpu, or a GPU such as cuda:7"),
    ("--eval.background cuda:99", "is not a GPU of this machine, which shows"),
    (f"{BESIDE} --keep_best greedy_score", "leave out --keep_best"),
    (f"{BESIDE} --trackers wandb", "which W&B does not accept"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(places, tmp_path, capsys, monkeypatch, flags, says):
    monkeypatch.setattr("rl_core.run.display.trackers.check_trackers", lambda names: None)
    case = words(FLAGS.format(**places), "--num_steps 1 --eval_every 1", flags)
    assert main([*case, "--out", str(tmp_path / "run")]) == 1
    assert says in capsys.readouterr().err


def test_the_process_sees_its_device_and_is_no_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    result = environment_of("cuda:2")
    assert result["CUDA_VISIBLE_DEVICES"] == "6" and not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & {
        *result
    }
    assert environment_of("cpu")["CUDA_VISIBLE_DEVICES"] == ""
