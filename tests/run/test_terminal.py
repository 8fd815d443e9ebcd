"""The terminal output of a run: loaded models, a panel, episodes and warnings."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
from kit import wait_until, words

from rl_core.config import Config
from rl_core.run.display import terminal
from rl_core.run.display.summary import before_and_after
from rl_core.run.display.terminal import progress_line, time_left
from rl_core.run.evaluation.print_samples import cut
from rl_core.train import main


@pytest.fixture
def flags_of(places, tmp_path):
    """flags_of(reward) -> flags of a run whose episodes get it; its last word is --out."""

    def make(reward: str, *more, prompt: str = "str(n)") -> list[str]:
        env = f"def load_tasks(split): return [{{'prompt': {prompt}}} for n in range(8)]\n"
        (tmp_path / "env.py").write_text(f"{env}async def reward_fn(completion): return {reward}\n")
        sizes = "--max_tokens 6 --tasks_per_step 2 --group_size 2 --optim.lr 0"
        return words(
            "--model",
            places["model"],
            "--env_path",
            tmp_path / "env.py",
            sizes,
            *more,
            "--out",
            tmp_path / "run",
        )

    return make


def test_a_run_begins_with_what_was_loaded_and_libraries_are_quiet(
    flags_of, places, tmp_path, capfd
):
    assert (
        main(
            flags_of(
                "sum(map(ord, completion)) / 1000", "--num_steps 1 --actors.policy.lora.rank 2"
            )
        )
        == 0
    )
    printed, errors = capfd.readouterr()
    model, work, position, *_ = printed.splitlines()
    assert (
        model.startswith(f"policy: {places['model']} (")
        and "k parameters, " in model
        and model.endswith("k trained)")
    )
    assert work == "grpo: 8 rows; 1 step of 2 tasks x 2 episodes"
    assert position == f"1 x CPU, embedded engine; begins at step 0, in {tmp_path / 'run'}"
    assert (
        "Loading weights" not in errors
        and "Writing model shards" not in errors
        and "\x1b" not in printed
    )


def test_a_panel_stands_below_the_lines_on_a_terminal(flags_of, monkeypatch):
    reader, writer = pty.openpty()
    seen = []

    def read() -> None:
        with suppress(OSError):  # A closed terminal raises.
            while True:
                seen.append(os.read(reader, 65536))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with os.fdopen(writer, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        slow = "await __import__('asyncio').sleep(0.5) or 1.0"  # longer than the panel's period
        assert (
            main(
                flags_of(
                    slow,
                    "--num_steps 3 --save_every 1 --eval_every 3 --eval.num_tasks 2 --eval.samples "
                    "0",
                )
            )
            == 0
        )
        assert sys.stdout is terminal
        terminal.write("the end")
        terminal.flush()
        wait_until(lambda: b"the end" in b"".join(seen), "all is read")
    shown = b"".join(seen).decode()
    texts = [
        "/2 groups",
        "generate",
        "save",
        "step 2/3",
        "! rollout/policy/zero_sig",
    ]
    for text in texts:
        assert text in shown, text
    # Only the panel has speeds.
    assert re.search(r"reward 1 .* generate \S+ tokens/s", shown)


ONE = {"reward_mean": 0.5, "failed": 1, "maths/reward_mean": 9.0}
TIMES = {"time/generate_s": 0.5, "time/learn_s": 1.5, "time/sync_s": 0.001}
LONG = {"reward_mean": -0.12346, "length_mean": 2413.0, "failed": 12}


@pytest.mark.parametrize(
    "rollouts, learned, times, lines",
    [
        ({"bob": ONE}, {"loss": 0.1}, {}, ["reward 0.5  failed 1  2.00 s  ETA 0:01:00"]),
        ({"bob": {}}, {}, TIMES, ["2.00 s (generate 0.50, learn 1.50)  ETA 0:01:00"]),
        # Distillation: the rewards may all be 0, and the KL is what falls.
        (
            {"bob": {"reward_mean": 0.0}},
            {"loss": 0.1, "teacher_kl_nats": 0.25, "ref_kl_nats": 2.0},
            TIMES,
            ["reward 0  kl 0.25  2.00 s (generate 0.50, learn 1.50)  ETA 0:01:00"],
        ),
        # Phases would make this line longer than 100 columns.
        (
            {"bob": LONG},
            {"entropy_nats": 0.23456, "ref_kl_nats": 0.12346},
            TIMES,
            [
                "reward -0.1235  tokens 2413  entropy 0.2346  kl 0.1235  "
                "failed 12  2.00 s  ETA 0:01:00"
            ],
        ),
        # The limit of turns left none to alice.
        (
            {"bob": ONE, "alice": {"reward_mean": math.nan, "length_mean": math.nan}},
            {},
            TIMES,
            [
                "2.00 s (generate 0.50, learn 1.50)  ETA 0:01:00",
                "  bob    reward 0.5  failed 1",
                "  alice  no turns",
            ],
        ),
        (
            dict.fromkeys(["a_long_name", "bob", "carol", "dave"], LONG),
            {"entropy_nats": 0.23456, "ref_kl_nats": 0.12346},
            TIMES | {"time/sync_s": 0.125, "time/rank_groups_s": 0.125},
            [
                "2.00 s (generate 0.50, learn 1.50, sync 0.12, rank_groups 0.12)  ETA 0:01:00",
                *(
                    f"  {name}  reward -0.1235  tokens 2413  entropy 0.2346  kl 0.1235  failed 12"
                    for name in ("a_long_name", "bob        ", "carol      ", "dave       ")
                ),
            ],
        ),
    ],
)
def test_the_progress_line_fits_100_columns(rollouts, learned, times, lines):
    values = {"time/step_s": 2.0} | times
    for name, of_actor in rollouts.items():
        values |= {f"rollout/{name}/{metric}": value for metric, value in of_actor.items()}
        values |= {f"learn/{name}/{metric}": value for metric, value in learned.items()}
    line = progress_line(3, 9, values, list(rollouts), timedelta(minutes=1), True)
    assert line.splitlines() == [f"step 3/9  {lines[0]}", *lines[1:]]
    assert max(map(len, line.splitlines())) <= 100


def test_the_line_of_rows_has_their_loss():
    learned = {"loss": 0.625, "accuracy": 0.5, "grad_norm": 2.0, "entropy_nats": 1.0}
    values = {f"learn/bob/{metric}": value for metric, value in learned.items()}
    values["rollout/bob/reward_mean"] = 1.0  # As of an evaluation's episodes.
    values |= {"time/step_s": 2.0, "time/rows_s": 0.5}
    line = progress_line(3, 9, values, ["bob"], timedelta(minutes=1), False)
    start = "step 3/9  loss 0.625  accuracy 0.5  grad_norm 2  2.00 s"
    assert line == f"{start} (rows 0.50)  ETA 0:01:00"
    open_line = progress_line(3, 9, values, ["bob"], None, False)  # A run that stays open.
    assert open_line == f"{start} (rows 0.50)".replace("3/9", "3")


def test_short_steps_give_a_line_a_second_and_the_last_is_told(flags_of, capsys):
    began = time.monotonic()
    assert main(flags_of("float(len(completion))", "--num_steps 40 --rollout.save false")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) <= time.monotonic() - began + 2
    assert (
        lines[0].startswith("step  1/40")
        and lines[-1].startswith("step 40/40")
        and "  ETA 0:00:00" in lines[-1]
    )


def test_long_steps_and_evaluations_say_how_much_is_done(flags_of, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PROGRESS_S", 0.02)
    slow = "await __import__('asyncio').sleep(0.3) or 1.0"
    more = "--num_steps 2 --rollout.save false --eval_every 2 --eval.samples 0"
    more += " --algo.dynamic_sampling_rounds 1"
    assert main(flags_of(slow, more)) == 0
    printed = capsys.readouterr().out
    assert "eval/000000/greedy: 0 of 8 tasks\n" in printed
    # Dynamic sampling replaces both groups: their rewards are equal.
    assert "step 1: 0 of 4 episodes\n" in printed and "0 of 0" not in printed
    replaced = "2 groups had equal rewards, sampling others"
    assert f"step 1: 4 of 8 episodes; {replaced}\n" in printed
    assert "step 2: 0 of 4 episodes\n" in printed


def test_episodes_of_an_evaluation_are_printed_short(flags_of, capsys):
    more = "--eval_every 1 --print_samples 5 --eval.samples 0"
    prompt = "'7 ' * 100 + chr(27) + ' 7' * 100"
    assert (
        main(
            flags_of(
                "{'sum': sum(map(ord, completion)), 'right': 0.5}",
                more,
                "--num_steps 1",
                prompt=prompt,
            )
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in printed if line.startswith("-- eval/")]
    assert len(shown) == 2 * 5 and ", right 0.5), truncated" in shown[0] and "reward" in shown[0], (
        shown
    )
    prompts = [line for line in printed if line.startswith("   user: ")]
    assert len(prompts) == 10 and all(len(line) < 350 and "[...]" in line for line in prompts)
    assert len([line for line in printed if line.startswith("   assistant: ")]) == 10
    assert cut("\x1b[2J 7\n7") == r"\x1b[2J 7 7"


@pytest.mark.parametrize(
    "step, num_steps, eval_every, save_every, seconds",
    [
        (0, 10, 0, 0, 10 * 2 + 100),  # The last step is saved.
        (1, 10, 3, 0, 9 * 2 + 4 * 30 + 100),  # Evaluations at 3, 6, 9 and 10.
        (3, 9, 3, 4, 6 * 2 + 3 * 30 + 3 * 100),  # 3, 6, 9; saves at 4, 8, 9.
        (10, 10, 5, 0, 30 + 100),
    ],
)
def test_the_time_left_has_evaluations_and_saves(step, num_steps, eval_every, save_every, seconds):
    config = Config(num_steps=num_steps, eval_every=eval_every, save_every=save_every)
    measured = {"save": 100.0} | ({"eval": 30.0} if eval_every else {})
    assert time_left(step, config, 2.0, measured) == timedelta(seconds=seconds)
    assert time_left(step, config, 2.0, {}) == timedelta(seconds=2 * (num_steps - step))


def test_a_run_ends_with_its_time_and_scores(flags_of, tmp_path, capsys):
    resumed = "--num_steps 5 --resume true"
    for more, end in (("--num_steps 4", "4 of 4"), (resumed, "5 of 5")):
        since = r" \(from step 4\)" if more == resumed else ""
        flags = flags_of("float(len(completion))", more, "--eval_every 1 --eval.samples 0")
        assert main(flags) == 0
        printed = capsys.readouterr().out.splitlines()
        position = next(n for n, line in enumerate(printed) if line.startswith("done: "))
        assert json.loads((tmp_path / "run/end.json").read_text()) == {
            "num_steps": int(end[0]),
            "step": int(end[0]),
        }
        assert re.fullmatch(rf"done: step {end} in \d+:\d\d:\d\d{since}", printed[position])
        [passed, score, look] = printed[position + 1 :]
        assert re.fullmatch(r"  env/greedy_pass [\d.]+ -> [\d.]+", passed)
        assert re.fullmatch(r"  env/greedy_score [\d.]+ -> [\d.]+", score)
        assert look == f"  look at it: rl-core view {tmp_path / 'run'}"


@pytest.mark.parametrize(
    "name, number, at_once", [("SIGTERM", 15, "Ctrl-C"), ("SIGINT", 2, "Ctrl-C again")]
)
def test_a_run_that_a_signal_ended_says_how_it_goes_on(
    name, number, at_once, flags_of, capfd, tmp_path
):
    # One hook alone, since a second Ctrl-C ends the process.
    seen = "vars(__import__('sys')).setdefault('signals_of_this_test', set())"
    once = (
        f"({number} in {seen} or {seen}.add({number}) or "
        f"__import__('os').kill(__import__('os').getpid(), {number}))"
    )
    assert main(flags_of(f"1.0 if {once} else 1.0", "--num_steps 40")) == 128 + number
    out, errors = capfd.readouterr()
    assert (
        f"{name}: saves when this step is done, and ends; {at_once} ends at once, without saving\n"
        in errors
    )
    printed = out.splitlines()
    assert re.fullmatch(rf"ended by {name}: step 1 of 40 in \d+:\d\d:\d\d", printed[-3])
    assert printed[-1] == "  resume: the same command with --resume"
    end = {"num_steps": 40, "step": 1, "signal": name}
    assert json.loads((tmp_path / "run/end.json").read_text()) == end


def test_before_and_after_are_evaluations_or_means_of_steps():
    steps = [
        {"step": n, "rollout/bob/reward_mean": float(n), "learn/bob/loss": 0.5} for n in range(1, 6)
    ]
    assert before_and_after(steps) == ["bob/reward 1.5 -> 4.5 (means of 2 steps)"]
    evaluations = [{"step": n, "eval/sort/avg@4": value} for n, value in ((0, 0.25), (5, 0.75))]
    assert before_and_after([evaluations[0], *steps, evaluations[1]]) == ["sort/avg@4 0.25 -> 0.75"]
    losses = [{"step": n, "learn/bob/loss": value} for n, value in ((1, 2.0), (2, None), (3, 1.0))]
    assert before_and_after(losses) == ["bob/loss 2 -> 1"]
    pairs = [row | {"learn/bob/accuracy": row["step"] / 4} for row in losses]
    assert before_and_after(pairs) == ["bob/accuracy 0.25 -> 0.75", "bob/loss 2 -> 1"]
    taught = [row | {"learn/bob/teacher_kl_nats": 6.0 - row["step"]} for row in steps]
    kl = "bob/teacher_kl_nats 4.5 -> 1.5 (means of 2 steps)"
    assert before_and_after(taught) == [kl, *before_and_after(steps)]
    assert before_and_after(evaluations[:1]) == [] == before_and_after([])
