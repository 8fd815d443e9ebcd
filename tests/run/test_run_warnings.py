"""Problems are printed when they begin: once, on stderr, in the panel, and in
warnings.jsonl."""

from __future__ import annotations

import json
import math

import pytest
from kit import STOP, words

from rl_core.config import parse_config
from rl_core.run.display.warnings import RunWarnings
from rl_core.train import main

SIZES = "--max_tokens 6 --tasks_per_step 2 --group_size 2 --optim.lr 0 --rollout.save false"


def warned(rows: list[dict], folder, *flags: str) -> list[tuple[int, str, str]]:
    """(step, kind, end of the metric's name) of all warnings of a run with these metrics."""
    config = parse_config(words("--model m --env_path e.py --out o --group_size 4", *flags))
    folder.mkdir(exist_ok=True)
    run = RunWarnings(config, folder)
    texts = [text for step, row in enumerate(rows, 1) for text in run.step(step, row)]
    lines = (
        [json.loads(line) for line in run.file.read_text().splitlines()]
        if run.file.exists()
        else []
    )
    assert all(any(line["text"].endswith(text[-40:]) for text in texts) for line in lines)
    assert len(texts) <= len(lines) and all("try" in text or "check" in text for text in texts)
    return [(line["step"], line["kind"], line["metric"].split("/", 2)[2]) for line in lines]


def row(**values: float) -> dict[str, float]:
    """Metrics of a healthy step, but for these."""
    arguments = {
        "reward_mean": 0.4,
        "zero_signal_frac": 0.2,
        "truncated_frac": 0.05,
        "entropy_nats": 0.8,
    }
    arguments |= {"mismatch_kl_nats": 1e-4} | values
    learn = ("entropy_nats", "mismatch_kl_nats")
    return {
        f"{'learn' if name in learn else 'rollout'}/policy/{name}": value
        for name, value in arguments.items()
    }


def learning(num: int, best: float = 0.98) -> list[dict[str, float]]:
    """A task is learned: the policy has low entropy, and most groups get the same
    rewards."""
    rows = []
    for n in range(num):
        done = min(1.0, n / 100)
        item = {"reward/right": best * done + 0.01 * (n % 3), "reward/format": 0.05 + 0.05 * done}
        item["reward/late"] = -0.2 * (1 - done) ** 2
        share = {
            "zero_signal_frac": 0.9 * done,
            "truncated_frac": 0.15 * (1 - done),
            "entropy_nats": 0.9 - 0.88 * done,
        }
        rows.append(row(reward_mean=sum(item.values()), **item, **share))
    return rows


def test_a_healthy_run_is_told_nothing(tmp_path):
    assert warned(learning(200), tmp_path / "a") == []
    game = [
        row(reward_mean=0.0, zero_signal_frac=0.3, entropy_nats=0.8 - 0.002 * n) for n in range(200)
    ]
    assert warned(game, tmp_path / "b") == []  # what one player wins the other loses
    small = [
        row(reward_mean=n, **{"reward/right": 0.8 + 0.001 * (n % 2), "reward/form": 0.01 * (n % 2)})
        for n in range(40)
    ]
    assert warned(small, tmp_path / "d") == []  # it still moves
    late = [
        row(reward_mean=n, **{"reward/right": n / 40, "reward/late": -0.1 * (n < 5)})
        for n in range(40)
    ]
    assert warned(late, tmp_path / "e") == []  # a penalty that is no longer earned
    stale = [row(mismatch_kl_nats=0.05, reward_mean=0.3 + 0.01 * n) for n in range(20)]
    assert warned(stale, tmp_path / "c", "--max_staleness 2") == []
    assert (
        warned(
            stale,
            tmp_path / "f",
            "--rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 3",
        )
        == []
    )
    # Within groups, of which these compare none.
    same = [row(reward_mean=n, zero_signal_frac=1.0) for n in range(9)]
    for n, flags in enumerate(
        ("ppo", "reinforce_pp --group_size 1", "grpo --algo.turn_discount 1")
    ):
        assert warned(same, tmp_path / f"g{n}", "--algorithm", *words(flags)) == []


@pytest.mark.parametrize(
    "rows, says",
    [
        ([row(reward_mean=n, truncated_frac=0.1 + 0.02 * n) for n in range(30)], [(9, "truncated", "truncated_frac")]),
        ([row(reward_mean=n / 99, zero_signal_frac=float(n > 5)) for n in range(30)], [(9, "no signal", "zero_signal_frac")]),
        ([row(reward_mean=n, truncated_frac=0.5) for n in range(9)], [(5, "truncated", "truncated_frac")]),
        (
            # All of step 1 failed.
            [row(reward_mean=0.5 if n else math.nan, zero_signal_frac=1.0) for n in range(9)],
            [(3, "no signal", "zero_signal_frac"), (6, "constant reward", "reward_mean")],
        ),
        # It ends, and begins anew after ten steps without it, and after one.
        (
            [row(reward_mean=n / 99, zero_signal_frac=float(n not in (8, 9, *range(20, 32)))) for n in range(40)],
            [(3, "no signal", "zero_signal_frac"), (35, "no signal", "zero_signal_frac")],
        ),
        ([row(reward_mean=n, mismatch_kl_nats=0.02 * (n > 2)) for n in range(9)], [(6, "mismatch", "mismatch_kl_nats")]),
        (
            [row(reward_mean=0.5, zero_signal_frac=1.0) for n in range(9)],
            [(3, "no signal", "zero_signal_frac"), (5, "constant reward", "reward_mean")],
        ),
        (
            [row(reward_mean=n, **{"reward/a": n, "reward/b": 0.5}) for n in range(40)],
            [(20, "constant reward", "reward/b")],
        ),
        (
            [row(reward_mean=1.0 + n, zero_signal_frac=1.0) for n in range(9)],
            [(3, "all solved", "zero_signal_frac")],
        ),
        # truncated_reward of the environment.
        (
            [row(reward_mean=n, **{"reward/a": n, "reward/truncated": 0.0}) for n in range(40)],
            [],
        ),
        # Low entropy, and wrong.
        (learning(200, best=0.1), [(96, "entropy", "entropy_nats")]),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_when_it_begins_and_once(rows, says, tmp_path):
    assert warned(rows, tmp_path) == says


def test_each_actor_is_warned_of_once_in_resumed_runs_too(tmp_path):
    flags = "--model m --env_path e.py --out o --group_size 4 --max_tokens 512"
    config = parse_config(words(flags))
    both = [row(reward_mean=n, truncated_frac=0.5) for n in range(8)]
    both = [r | {name.replace("policy", "bob"): value for name, value in r.items()} for r in both]
    live = RunWarnings(config, tmp_path)
    texts_of_steps = [live.step(step, r) for step, r in enumerate(both, 1)]
    assert [len(texts) for texts in texts_of_steps] == [0, 0, 0, 0, 1, 0, 0, 0]
    names = "rollout/policy/truncated_frac, rollout/bob/truncated_frac is 0.50 over 5 steps: "
    assert texts_of_steps[4][0].startswith(names)
    assert "try --max_tokens 1024 (it is 512), " in texts_of_steps[4][0]
    assert texts_of_steps[4][0].endswith(f": rl-core show {tmp_path}")
    before = live.file.read_text()
    assert [json.loads(line)["metric"] for line in before.splitlines()] == [
        "rollout/policy/truncated_frac", "rollout/bob/truncated_frac",
    ]  # fmt: skip
    lines = [{"step": 0, "eval/e/greedy_score": 0.1}]
    for step, values in enumerate(both, 1):
        lines += [
            {"step": step, "time/step_s": 1.0} | values,
            {"step": step, "eval/e/greedy_score": 0.1},
        ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = RunWarnings(config, tmp_path)
    assert again.file.read_text() == before and again.step(9, both[-1]) == []


def test_a_resumed_run_repeats_no_warning(places, tmp_path, capsys):
    env = (
        "def load_tasks(split): return [{'prompt': str(n)} for n in range(8)]\nasync def "
        "reward_fn(completion): return 0.5\n"
    )
    (tmp_path / "env.py").write_text(env)
    flags = words(
        "--model",
        places["model"],
        "--env_path",
        tmp_path / "env.py",
        SIZES,
        STOP,
        "--max_tokens 20",
    )
    seen = []
    for more in ("--num_steps 4", "--num_steps 6 --resume"):
        if seen:  # A run that was killed after its checkpoint had printed a warning.
            with open(tmp_path / "run/warnings.jsonl", "a") as file:
                file.write('{"step": 5, "kind": "constant reward"}\n')
        assert main([*flags, *words(more, "--out", tmp_path / "run")]) == 0
        printed, errors = capsys.readouterr()
        assert "steps made an update" in errors
        seen.append(
            [
                line.split(" is 1")[0].split(" has been")[0]
                for line in errors.splitlines()
                if "warning: step" in line
            ]
        )
        assert "warning: " not in printed
    assert seen == [
        ["warning: step 3: rollout/policy/zero_signal_frac"],
        ["warning: step 5: rollout/policy/reward_mean"],
    ]
    kept = [json.loads(line) for line in (tmp_path / "run/warnings.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in kept] == [
        (3, "no signal"),
        (5, "constant reward"),
    ]


def test_that_most_episodes_of_the_first_step_are_cut_off_is_told_at_once(tmp_path):
    cut = [row(reward_mean=n, truncated_frac=f) for n, f in enumerate((0.6, 0.1, 0.1, 0.9))]
    assert warned(cut, tmp_path) == [(1, "truncated", "truncated_frac")]
    half = [row(reward_mean=n, truncated_frac=f) for n, f in enumerate((0.5, 0.9))]
    assert warned(half, tmp_path / "half") == []


FAILING = """
def load_tasks(split): return [{"prompt": str(n), "n": n} for n in range(40)]
async def reward_fn(n):
    if n % 8 == 3: raise ValueError("no answer")
    if n % 8 == 5: raise KeyError("unknown")
    return 1.0 + n
"""


def test_what_programs_set_and_the_run_decides_is_told_once_for_each_name(tmp_path):
    first = row(agent_overridden=12.0, agent_overridden_temperature=8.0)
    later = first | row(agent_overridden_seed=4.0)
    later |= row(agent_overridden_response_format=2.0, agent_overridden_tools=1.0)
    without = [row(reward_mean=0.01 * n) for n in range(20)]
    assert warned([first, first, later, *without, later], tmp_path) == [
        (1, "overridden", "agent_overridden_temperature"),
        (3, "overridden", "agent_overridden_seed"),
        (3, "overridden", "agent_overridden_response_format"),
        (3, "overridden", "agent_overridden_tools"),
    ]
    lines = (tmp_path / "warnings.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert "agent_overridden_temperature is 8 per episode: requests set this" in texts[0]
    assert "--agents.response_format enforce" in texts[2] and "chat_template FILE" in texts[3]


def test_each_failure_is_told_once_with_its_count(places, tmp_path, capsys):
    (tmp_path / "env.py").write_text(FAILING)
    flags = words(
        "--model",
        places["model"],
        "--env_path",
        tmp_path / "env.py",
        SIZES,
        STOP,
        "--tasks_per_step 8",
    )
    # It learns from rewards that differ between tasks alone, so that the run does not end with an
    # error.
    flags += words(
        "--algorithm reinforce_pp --data.shuffle false --rollout.max_failed_fraction 0.9"
    )
    flags += words("--out", tmp_path / "run")
    warned = []
    for more in ("--num_steps 3", "--num_steps 5 --resume"):
        assert main([*flags, *words(more)]) == 0
        warned.append(
            [line for line in capsys.readouterr().err.splitlines() if " failed: " in line]
        )
    where = tmp_path / "env.py"
    reasons = [
        f"reward_fn() failed: {where}:4: ValueError: no answer",
        f"reward_fn() failed: {where}:5: KeyError: 'unknown'",
    ]
    assert warned == [[f"warning: step 1: 2 episodes failed: {reason}" for reason in reasons], []]
    lines = [
        json.loads(line) for line in (tmp_path / "run/warnings.jsonl").read_text().splitlines()
    ]
    kept = [(line["step"], line["reason"]) for line in lines if line["kind"] == "failed episodes"]
    assert kept == [(1, reason) for reason in reasons]
