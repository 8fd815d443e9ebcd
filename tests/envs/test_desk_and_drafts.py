"""A service desk whose customer is scripted or played, and programs drafted side by side."""

from __future__ import annotations

import json
import re

import pytest
import stage
from kit import ROOT

from rl_core.environments.env_file import load_env
from rl_core.tools.cli import main as command


def env_of(name: str):
    return load_env(str(ROOT / f"envs/{name}.py"))


def called(tool: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


# The desk


def row_of(kind: str, **wanted) -> dict:
    rows = env_of("customer_service").load_tasks("train")
    return next(row for row in rows if row["kind"] == kind and wanted.items() <= row.items())


def serve(row: dict, *replies: str, user=None, **flags):
    """The agent's trajectory."""
    actors = {"agent": list(replies)}
    if user:
        actors["user"] = (user, False)
    result = stage.run(
        env_of("customer_service"), stage.cast(**actors), rows=[row], max_tokens=900, **flags
    )
    return stage.one(result, "agent")


def test_solutions_earn_one_and_doing_nothing_nothing(capsys):
    path = str(ROOT / "envs/customer_service.py")
    assert command(["check", path, "--oracle", "--num_tasks", "200"]) == 0
    assert "200 tasks: solutions solve them" in capsys.readouterr().out


def test_a_scripted_customer_tells_its_facts_one_by_one_and_then_stops():
    row = row_of("cancel")
    cancel = called("cancel_order", order=row["order"])
    result = serve(row, "Your e-mail?", "Your postcode?", cancel, "It is cancelled.")
    heard = [m["content"] for m in result.messages if m["role"] == "user"]
    assert heard == [row["prompt"], *row["facts"]] and result.reward == 1
    # Before the customer is done nothing counts, and an action that nobody asked for is wrong.
    assert serve(row, "Hm?", cancel, max_turns=2).reward == 0
    address = called("change_address", order=row["order"], address="1 Hill Road")
    assert serve(row, cancel, address, "a", "b", "c").reward == 0
    assert serve(row, "a", "b", "c").reward == 0


def test_what_a_rule_forbids_must_be_refused_by_its_number():
    for rule in ("1", "2"):
        rows = env_of("customer_service").load_tasks("train")
        row = next(row for row in rows if row["actions"] == [["refuse", row["order"], rule]])
        for reply, reward in ((rule, 1), ("4", 0)):
            refuse = called("refuse", order=row["order"], rule=reply)
            assert serve(row, refuse, "No.", "No.", "No.").reward == reward
        cancel = called("cancel_order", order=row["order"])
        assert serve(row, cancel, "Done.", "Yes.", "Bye.").reward == 0


def test_a_status_must_be_told_and_calls_that_do_not_fit_are_counted():
    row = row_of("status", status="shipped")
    look = called("get_order", order=row["order"])
    assert serve(row, look, "It is Shipped.", "Yes.", "Bye.").reward == 1
    result = serve(row, called("get_order", order="1"), called("drop"), "I see.", "a", "b")
    assert (result.reward, result.metrics["refused_calls"]) == (0, 2)


def test_a_customer_may_be_played_by_an_actor_that_knows_the_scenario():
    row = row_of("cancel")
    seen = []

    def user(prompt, seed):
        seen.append(prompt)
        return "It is ada." if prompt.count("<|assistant|>") < 3 else "Thanks. ###STOP###"

    cancel = called("cancel_order", order=row["order"])
    result = serve(row, "Who are you?", cancel, "Cancelled.", user=user)
    assert result.reward == 1 and "It is ada." in str(result.messages)
    assert row["scenario"] in seen[0] and "Who are you?" in seen[0]
    # The customer does not see calls.
    assert "cancel_order" not in seen[-1] and len(seen) == 2


# Drafts


def solution(prompt: str) -> str:
    """The program for a row of envs/code_parallel.py: two values of a line."""
    x, y, w = map(
        int, re.search(r"f\((\d+)\) is (\d+).*\((\d+) is 7\*a", prompt, re.DOTALL).groups()
    )
    for a in range(2, 10):
        if a * 7 + (y - a * x) * 3 == w:
            return f"def f(x): return {a}*x+{y - a * x}"
    raise LookupError(prompt)


def drafted(actors: dict, row: dict) -> dict[str, list]:
    result = stage.run(env_of("code_parallel"), stage.cast(**actors), rows=[row], max_tokens=900)
    players: dict[str, list] = {}
    for trajectory in result:
        assert trajectory.status != "failed", trajectory.error
        players.setdefault(trajectory.player, []).append(trajectory)
    return players


def test_a_failed_draft_is_written_again_and_seen_with_its_tests():
    row = env_of("code_parallel").load_tasks("train")[0]
    right, wrong = solution(row["prompt"]), "def f(x): return 0"
    actors = {"ann": [wrong, right], "ben": wrong, "combiner": right}
    players = drafted(actors, row)
    [answer] = players["combine"]
    assert (answer.actor, answer.reward, answer.metrics["drafts_best"]) == ("combiner", 1, 1)
    shown = answer.messages[0]["content"]
    assert shown.count("Draft ") == 4 and "All tests passed." in shown and right in shown
    assert shown.count("0 of 2 tests passed: wrong.\nassert f(0) ==") == 2
    # A program that knows the shown tests alone earns nothing.
    zero, one = (int(test.split("== ")[1]) for test in row["test_list"][:2])
    known = drafted({"policy": f"def f(x): return {{0: {zero}, 1: {one}}}[x]"}, row)
    assert [t.reward for t in known["combine"] + known["draft"]] == [0, 0, 0, 0]
    result = {t.actor: (t.reward, len(t.turns)) for t in players["draft"]}
    assert result == {"ann": (1.0, 2), "ben": (pytest.approx(0.3), 2)}


def test_one_actor_drafts_and_combines_and_wrong_programs_earn_nothing():
    row = env_of("code_parallel").load_tasks("train")[0]
    players = drafted({"policy": "def f(x): return 0"}, row)
    assert [t.reward for t in players["combine"] + players["draft"]] == [0, 0, 0, 0]
    players = drafted({"policy": solution(row["prompt"])}, row)
    assert [t.reward for t in players["combine"] + players["draft"]] == [1, 1, 1, 1]
    assert {len(t.turns) for t in players["draft"]} == {1}


# Replies of two kinds


def facts(name: str) -> tuple[dict, list[list[str]]]:
    """A row, and replies of two kinds, of which one earns more."""
    if name == "code_parallel":
        row = {"prompt": "f", "test_list": ["assert f(0) == 1", "assert f(1) == 1"]}
        return row, [["def f(x): return 1"], ["def f(x): return 2"]]
    row = row_of("status", status="shipped") | {"facts": []}
    return row, [["It is shipped."], ["It is pending."]]
