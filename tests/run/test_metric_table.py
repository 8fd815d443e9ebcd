"""The table of metrics: every name that runs write has a row, every row is a name that something
writes."""

from __future__ import annotations

import json
import re

import pytest
from kit import ROOT, metrics, run
from stage import endpoint
from test_experts import family  # noqa: F401
from test_golden import FIT, RL, TWO

from rl_core.run.display.metric_table import describe, page, rows
from rl_core.run.display.warnings import MISMATCH, TRUNCATED
from rl_core.tools.cli import main

OWN = """
from rl_core import reward

tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

async def reward_fn(completion):
    return {"sum": sum(map(ord, completion)) / 1000, "length": len(completion), "open": None}

@reward(weight=0)
async def vowels(completion):
    return sum(completion.count(c) for c in "aeiou")
"""
TIMES = "--eval_every 1 --eval.samples 2"
PAIRS = "--algorithm rm --data.train {dir}/pairs.jsonl --data.eval {dir}/pairs.jsonl --eval_every 1"
API = "--actors.alice.api {url} --actors.alice.model m --actors.alice.api_key_env "
RUNS = {
    "own": f"--model {{model}} --env_path {{dir}}/own.py --max_tokens 10 --max_prompt_tokens 400 --tasks_per_step 2 {TIMES}",
    "environments": RL.replace("letters.py", "letters.py,{dir}/digits.py"),
    "ppo": f"{RL} --algorithm ppo --critic.value_clip 0.1 --critic.warmup_steps 1 --num_steps 2",
    "fp16": f"{RL} --learner.dtype float16",
    "far": f"{RL} --algo.kl_coef 0.1 --learner.epochs 3 --algo.target_kl 1e-9",
    "taught": f"{RL} --algorithm opd --algo.teacher {{other}} --algo.teacher_loss jsd",
    "dapo": f"{RL} --algorithm dapo",
    "older": f"{RL} --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 3 --num_steps 3",
    "stale": f"{RL} --max_staleness 1 --num_steps 2 --rollout_ranks 1",
    "keyed": RL.replace("letters.py", "keyed.py"),
    "apart": f"{TWO} --actors.alice.ranks 1",
    "turns": f"{TWO} --actors.alice.train false --rollout.engines_awake one",
    "judge": TWO.replace("--actors.alice.model {other}", API),
    "pairs": f"{FIT} {PAIRS}",
    "labels": f"{FIT} --algorithm kto --data.train {{dir}}/labelled.jsonl",
    "experts": f"{RL.replace('{model}', '{experts}')} --actors.policy.router_aux_loss_coef 0.1",
    "nan": f"{FIT} --algorithm rm --data.train {{dir}}/wide.jsonl",
}
# Written on GPUs alone, and where SGLang dies: only that the code has these names is checked.
ELSEWHERE = {
    **dict.fromkeys(("online/started", "online/open", "online/left_out"), "run/online.py"),
    "rollout/ACTOR/engine_restarts": "engines/server_engine.py",
    "sync/ACTOR/{device,broadcast,files}_mib": "engines/server_engine.py",
    "learn/ACTOR/mfu": "run/display/mfu.py",
    "memory/{generate,learn,sync,eval}_gib": "run/phase_timer.py",
}


def test_every_metric_of_runs_has_a_row_and_every_row_is_written(places, family, tmp_path, request):  # noqa: F811
    written, folder = set(), places["dir"]
    (tmp_path / "own.py").write_text(OWN)
    wide = {"prompt": "1", "chosen": "a", "rejected": "b", "margin": 1e300}  # its loss is infinite
    (tmp_path / "wide.jsonl").write_text((json.dumps(wide) + "\n") * 4)
    with endpoint(lambda asked: "yes") as url:
        words = places | {"experts": family("qwen3_moe"), "url": url}
        for name, flags in RUNS.items():
            words["dir"] = tmp_path if name in ("own", "nan") else folder
            defaults = [] if "--num_steps" in flags else ["--num_steps", "1"]
            flags = [word.format(**words) for word in flags.split(" ")]
            ranks, status = 2 if name in ("stale", "apart") else 1, int(name == "nan")
            out = run(tmp_path / name, flags, defaults, ranks=ranks, status=status)
            # Metrics() refuses others.
            written |= {key for line in metrics(out) for key in line if key != "step"}
    result = {describe(key).name for key in written}
    assert {row.name for row in rows()} - result == ELSEWHERE.keys()
    of_users = {key.rpartition("/")[2] for key in written if describe(key).is_of_user}
    assert of_users == {
        "vowels",
        "greedy_vowels",
        "sampled_vowels",
        "greedy_tool_parse_failed",
        "sampled_tool_parse_failed",
    }
    for name, file in ELSEWHERE.items():
        assert re.split("[/}]", name)[-1] in (ROOT / "rl_core" / file).read_text(), name


NAMED = {
    "rollout": """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages, tools=tools)
    return [reply.trajectory({"all": len(reply.text), "greedy_score": 1.0}, metrics=GIVEN)]
""",
    "reward": """
from rl_core import reward

def reward_fn(completion):
    return {"all": len(completion), "greedy_score": 1.0}

if GIVEN:
    @reward(weight=0)
    def even(completion):  # A reward may name 100 parts.
        return dict(list(GIVEN.items())[::2])

    @reward(weight=0)
    def odd(completion):
        return dict(list(GIVEN.items())[1::2])
""",
    "direct": """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages, tools=tools)
    found = reply.trajectory({"all": len(reply.text), "greedy_score": 1.0})
    found.metrics |= {name: value for name, value in GIVEN.items() if name not in found.metrics}
    return [found]
""",
}
TIMED = re.compile("time/|step$")


@pytest.mark.parametrize("kind", NAMED)
def test_an_environment_that_names_every_metric_changes_none(kind, places, tmp_path):
    names = {"score", "pass", "avg@2", "x/pass@2", "greedy_score", "env/tokens", "reward/all", "a"}
    for row in rows():
        names |= {row.name, *row.short_names, *map(str.lower, row.short_names)}
    tools = OWN.split("\n\n")[1]
    result = {}
    for name, arguments in (("plain", {}), ("named", dict.fromkeys(sorted(names), -7.0))):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "env.py"
        file.write_text(
            f"GIVEN = {arguments!r}\n{tools}\n"
            'def load_tasks(split): return [{"prompt": str(n)} for n in range(4)]\n' + NAMED[kind]
        )
        flags = f"--model {places['model']} --env_path {file} --max_tokens 10 --group_size 4 "
        flags += "--max_prompt_tokens 400 --tasks_per_step 2 --optim.lr 1e-2 --num_steps 2 "
        flags += "--eval_every 1 --eval.samples 2 --keep_best greedy_score"
        out = run(tmp_path / name / "run", flags.split(" "))
        lines = [{k: v for k, v in row.items() if not TIMED.match(k)} for row in metrics(out)]
        result[name] = lines, json.loads((out / "best/best.json").read_text())
    (plain, best), (named, best_named) = result.values()
    assert best_named == best and best["greedy_score"] > 1
    assert [{k: row[k] for k in then} for row, then in zip(named, plain, strict=True)] == plain
    added = {key for row in named for key in row} - {key for row in plain for key in row}
    assert {"rollout/policy/a", "rollout/policy/env_tokens", "eval/env/greedy_env_score"} < added
    assert {row[key] for row in named for key in added if key in row} == {-7.0}


@pytest.mark.parametrize("name, row", [
    ("rollout/bob/reward_mean", "rollout/ACTOR/[ENV/]reward_mean"),
    ("rollout/bob/math/reward/format", "rollout/ACTOR/[ENV/]reward/PART"),
    ("rollout/policy/solved", "rollout/ACTOR/[ENV/]METRIC"),
    ("eval/math/pass@8", "eval/SET/[ACTOR/]pass@K"),
    ("eval/math/greedy_failed", "eval/SET/[ACTOR/]{greedy,sampled}_failed"),
    ("eval/math/bob/greedy_steps", "eval/SET/[ACTOR/]{greedy,sampled}_METRIC"),
    ("eval/math/aime/bob/avg@2", "eval/SET/[ACTOR/]avg@K"), ("eval/loss", "eval/[SET/]loss"),
    ("learn/policy/nonsense", None), ("eval/pass@8", None), ("eval/math/avg@all", None), ("time/generate_s/x", None),
])  # fmt: skip
def test_a_name_of_metrics_jsonl_finds_its_row(name, row):
    result = describe(name)
    assert (result and result.name) == row


def test_a_unit_in_a_name_is_that_of_the_row():
    units = {
        "s": "s",
        "nats": "nats",
        "frac": "fraction",
        "gib": "GiB",
        "tokens_per_s": "tokens/s",
        "versions": "versions",
    }
    result = [(row, re.search(r"_(tokens_per_s|[a-z]+?)(_max)?$", row.name)) for row in rows()]
    named = [(row, units[match[1]]) for row, match in result if match and match[1] in units]
    assert len(named) > 20 and [row.name for row, unit in named if row.unit != unit] == []


def test_warnings_begin_where_a_value_is_no_longer_healthy():
    assert describe("rollout/policy/truncated_frac").above == TRUNCATED
    assert describe("learn/policy/mismatch_kl_nats").above == MISMATCH


def test_metrics_that_pages_name_have_a_row():
    num = 0
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        names = re.findall(
            r"`((?:rollout|learn|eval|time|pack|memory)/[^`\s{]*[\w*])`", file.read_text()
        )
        wrong = [name for name in names if (row := describe(name)) is None or row.is_of_user]
        assert not wrong or file.name == "metrics.md", f"{file.name}: {wrong}"
        num += len(names)
    assert num > 20


def test_the_page_is_that_of_the_table():
    text = (ROOT / "docs/metrics.md").read_text()
    assert text == page(), "python -m rl_core.run.display.metric_table > docs/metrics.md"


def test_info_tells_of_a_metric_by_its_name_or_the_end_of_it(capsys):
    assert (
        main(["info", "metrics", "learn/policy/clip_frac"])
        == main(["info", "metrics", "clip_frac"])
        == 0
    )
    by_name = capsys.readouterr().out.splitlines()
    assert by_name[0] == "learn/ACTOR/clip_frac  (fraction)" and by_name == by_name[:3] * 2
    assert main(["info", "metrics", "avg@8", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [
        "eval/SET/[ACTOR/]avg@K"
    ]
    assert main(["info", "metrics"]) == 0
    assert capsys.readouterr().out.count("healthy: ") > 30
    assert main(["info", "metrics", "learn/policy/clip_fraction"]) == 1
    assert "did you mean 'clip_frac'?" in capsys.readouterr().err
