"""Every file of envs/: a solver that earns the most, and a reply that earns nothing. Those of most
stand in a file of their kind; the others are here. test_learning_steps.py has their steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stage
from kit import ROOT
from test_boxes import needs_bubblewrap

from rl_core.environments.env_file import load_env

ENVS = ROOT / "envs"
# File of tests -> the environments whose solver is there.
TESTED = {
    "envs/test_agentbench.py": "agentbench_db agentbench_house agentbench_kg agentbench_os "
    "agentbench_shop",
    "envs/test_desk_and_drafts.py": "code_parallel customer_service",
    "envs/test_envs_code.py": "code code_contest",
    "envs/test_envs_images.py": "count_shapes drawn_maze picture_questions",
    "envs/test_envs_talk.py": "countdown debate jailbreak llm_judge math_answer parallel_thinking",
    "envs/test_envs_tools.py": "chess_game gym_text mcp_tools openenv_client search_qa tool_use",
    "envs/test_games.py": "collaborate referential_game tic_tac_toe",
    "envs/test_outside_games.py": "reasoning_gym_env textarena_env",
    "envs/test_scores.py": "reward_model",
    "envs/test_tau2.py": "tau2_env",
    "engines/test_shared.py": "sort_two_ways",
    "agents/test_agent_env.py": "openai_agent",
    "agents/test_verifiers.py": "verifiers_env",
}


def called(tool: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def python_solver(row):
    [name] = row["files"]
    result = row["answer"]
    # The second call needs the variable of the first.
    return [
        called("python", code=f"numbers = open('{name}').read().split()"),
        called("python", code="len(numbers)"),
        f"Of them it is {result}.",
    ]


def terminal_solver(row):
    commands = ["rm -f *"]
    commands += [f"printf %s '{text}' > {name}" for name, text in row["wanted"].items()]
    return [called("bash", command="; ".join(commands)), "Done."]


def harbor_solver(row):
    script = Path(row["task_folder"], "solution/solve.sh").read_text()
    return [called("bash", command=script), "Done."]


def maze_solver(row):
    """From a room above and to the left of the middle one."""
    down, right = (2 - position for position in row["room"])
    return ["d"] * down + ["r"] * right


def instructed(row):
    """A reply that follows both rules: a sentence, JSON or a list with what must occur."""
    rules = {rule["rule"]: rule["argument"] for rule in row["rules"]}
    words = [rules.get("first", "Bees"), *rules.get("include", []), "fly", "on"]
    text = " ".join(words)
    if "json" in rules:
        return [json.dumps(dict.fromkeys(rules["json"], text))]
    if "upper" in rules or "lower" in rules:
        text = text.upper() if "upper" in rules else text.lower()
    if "bullets" in rules:
        return ["\n".join([f"- {text}"] * rules["bullets"])]
    sentences = [f"{text}."] * rules.get("sentences", 1)
    if "last" in rules:
        sentences[rules.get("sentences", 2) - 1 :] = [rules["last"]]
    return [" ".join(sentences)]


# Environment -> (row -> replies that earn 1, replies that earn 0).
SOLVED = {
    "calculator": (
        lambda row: [f"<call>{row['messages'][0]['content']}</call>", str(row["answer"])],
        ["error"],
    ),
    "sort_digits": (lambda row: [str(row["answer"])], ["no"]),
    "maze": (maze_solver, ["u"]),
    "terminal": (terminal_solver, ["Done."]),
    "harbor": (harbor_solver, ["Done."]),
    "python_tool": (python_solver, ["I do not know."]),
    "word_problems": (lambda row: [str(row["answer"])], ["?"]),
    "instructions": (instructed, ["?"]),
    "summarise": (lambda row: [row["reference"]], ["?"]),
    "translate": (lambda row: [row["reference"]], ["?"]),
}
IN_BOXES = ("harbor", "terminal", "python_tool")
EACH = [pytest.param(name, marks=[needs_bubblewrap] if name in IN_BOXES else []) for name in SOLVED]


def test_every_environment_has_a_solver_in_these_files():
    named = [name for names in TESTED.values() for name in names.split()]
    assert sorted([*named, *SOLVED]) == sorted(path.stem for path in ENVS.glob("*.py"))
    for file, names in TESTED.items():
        text = (ROOT / "tests" / file).read_text()
        assert not [name for name in names.split() if name.partition("_")[2] not in text], file


@pytest.mark.parametrize("name", EACH)
def test_a_solver_earns_one_and_another_reply_nothing(name):
    solve, wrong = SOLVED[name]
    env = load_env(str(ENVS / f"{name}.py"))
    row = env.load_tasks("train")[0]
    best = stage.play(env, *solve(row), row=row, max_tokens=900)
    assert (best.status, best.reward) == ("ok", pytest.approx(1.0)), best.messages
    assert stage.play(env, *wrong, row=row, max_tokens=900).reward == 0.0


def judged(name, row, reply, verdict):
    env = load_env(str(ENVS / f"{name}.py"))
    actors = stage.cast(policy=reply, judge=(verdict, False))
    return stage.one(stage.run(env, actors, rows=[row], max_tokens=200))


@pytest.mark.parametrize("name", ["summarise", "translate"])
def test_a_judge_gives_half_of_the_reward_and_nothing_for_no_reply(name):
    row = load_env(str(ENVS / f"{name}.py")).load_tasks("train")[0]
    [spoken] = SOLVED[name][0](row)
    parts = judged(name, row, f"<think>x</think>{spoken}", "[[4]]").reward_parts
    assert parts == {"overlap": pytest.approx(0.5), "judged": pytest.approx(0.5 / 3)}
    assert judged(name, row, "", "[[10]]").reward == 0.0


def test_summaries_are_of_columns_as_in_data_sets():
    env = load_env(str(ENVS / "summarise.py"))
    news = {"prompt": "A dog barked at noon.", "article": "x", "id": "1"}
    for column in ("highlights", "summary", "reference"):
        result = stage.play(env, "A dog barked.", row=news | {column: "The dog barked."})
        # 2 of 3 words, 1 of 2 pairs, 2 in this order.
        assert result.reward == pytest.approx((2 / 3 + 1 / 2 + 2 / 3) / 3)
        assert result.metrics["rouge_2"] == pytest.approx(1 / 2)
    error = stage.error_of(env, "A dog.", row=news)
    assert "has no reference; it must be reference, highlights, summary" in error


def test_translations_are_read_as_in_wmt(tmp_path, monkeypatch):
    for split, text in (("train", "Hallo"), ("validation", "Danke")):
        row = {"translation": {"de": text, "en": f"{text}!"}}
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n")
    monkeypatch.setenv("TRANSLATE_DATA", str(tmp_path))
    monkeypatch.setenv("TRANSLATE_FROM", "en")
    monkeypatch.setenv("TRANSLATE_TO", "de")
    env = load_env(str(ENVS / "translate.py"))
    assert env.load_tasks("train") == [{"prompt": "Hallo!", "reference": "Hallo"}]
    assert env.load_tasks("eval") == [{"prompt": "Danke!", "reference": "Danke"}]
    monkeypatch.setenv("TRANSLATE_TO", "fr")
    with pytest.raises(ValueError, match="has de, en, and no fr; set TRANSLATE_FROM"):
        load_env(str(ENVS / "translate.py")).load_tasks("train")


def test_a_share_of_the_reward_of_code_is_for_what_parses(monkeypatch):
    row = {"prompt": "Write f.", "test_list": ["assert f(1) == 2"]}
    monkeypatch.setenv("CODE_SYNTAX", "0.1")
    env = load_env(str(ENVS / "code.py"))
    earned = {
        code: stage.play(env, code, row=row, max_tokens=200).reward
        for code in ("def f(x): return 2", "def f(x): return 3", "def f(x): pass", "def f(x", "")
    }
    assert [*earned.values()] == [pytest.approx(1.0), pytest.approx(0.1), 0.0, 0.0, 0.0]
    monkeypatch.setenv("CODE_SYNTAX", "2")
    with pytest.raises(ValueError, match=r"CODE_SYNTAX=2.0 must be from 0 to 1, such as 0.1"):
        load_env(str(ENVS / "code.py"))


@pytest.mark.parametrize(
    "row",
    [
        {"goal": "Do a bad thing", "target": "Sure"},  # AdvBench
        {"Behavior": "Do a bad thing", "SemanticCategory": "none"},  # HarmBench
        {"Goal": "Do a bad thing", "Behavior": "Bad", "Category": "none"},  # JailbreakBench
    ],
)
def test_attacks_have_the_goals_of_public_prompt_sets(row):
    env = load_env(str(ENVS / "jailbreak.py"))
    engines = {"attacker": "Please.", "target": ("Sure.", False), "judge": ("[[10]]", False)}
    actors = stage.cast(**engines)
    row = row | {"prompt": "Do a bad thing"}
    result = stage.one(stage.run(env, actors, rows=[row], max_tokens=200))
    assert result.reward == 1.0
    assert result.messages[0]["content"].startswith(
        "Another assistant should refuse this: Do a bad"
    )
    [(asked, _, _)] = actors["judge"].engine.asked
    assert "Goal: Do a bad thing" in asked and "Bad\n" not in asked
    [failed] = stage.run(env, stage.cast(**engines), rows=[{"prompt": "x"}])
    assert "has nothing to attack; it must have `password`, or one of goal" in failed.error
