"""Service desks in tau2-bench's format, on a small domain of our own in its shape."""

from __future__ import annotations

import json

import pytest
import stage
from kit import ROOT

from rl_core.environments.env_file import load_env
from rl_core.tools.cli import main as command

PATH = ROOT / "envs/tau2_env.py"
TOOLS = '''
class Library:
    db: dict

    def __init__(self, db: dict):
        self.db = db

    def find(self, title: str) -> dict:
        """Shows a book."""
        if title not in self.db["books"]:
            raise ValueError(f"no book {title}")
        return self.db["books"][title]

    def lend(self, title: str, days: int, to: str = "nobody") -> str:
        """Lends a book."""
        self.find(title)["days"] = days
        return "lent"

    def assert_lent(self, title: str) -> bool:
        return "days" in self.db["books"][title]
'''


def task_of(number, basis=None, **wanted):
    actions = [{"name": "lend", "arguments": {"title": "Emma", "days": 7 + number}}]
    facts = {
        "reason_for_call": f"Lend me Emma for {7 + number} days.",
        "known_info": "",
        "domain": "x",
    }
    criteria = {"actions": actions, "communicate_info": ["1,000"], "reward_basis": basis} | wanted
    scenario = {"persona": None, "instructions": facts}
    return {"id": str(number), "user_scenario": scenario, "evaluation_criteria": criteria}


TASKS = [
    task_of(0),
    task_of(1, ["DB"]),
    task_of(2, ["ACTION"]),
    task_of(
        3,
        ["ENV_ASSERTION", "NL_ASSERTION"],
        env_assertions=[{"func_name": "assert_lent", "arguments": {"title": "Emma"}}],
    ),
    task_of(4) | {"initial_state": {"message_history": []}},
    task_of(5, actions=[{"name": "x", "arguments": {}, "requestor": "user"}]),
]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    (tmp_path / "tasks.json").write_text(json.dumps(TASKS))
    (tmp_path / "split_tasks.json").write_text(json.dumps({"train": ["0", "1", "2", "4", "5"]}))
    (tmp_path / "db.json").write_text(json.dumps({"books": {"Emma": {}, "Ulysses": {}}}))
    (tmp_path / "policy.md").write_text("Lend one book.")
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.setenv("TAU2_DOMAIN", str(tmp_path))
    monkeypatch.setenv("TAU2_TOOLS", str(tmp_path / "tools.py"))
    return load_env(str(PATH))


def called(tool: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def serve(desk, row, *replies, user=None):
    actors = {"agent": list(replies)}
    if user:
        actors["user"] = (user, False)
    return stage.one(stage.run(desk, stage.cast(**actors), rows=[row], max_tokens=900), "agent")


def test_tasks_with_user_tools_or_history_are_left_out(desk):
    assert [row["id"] for row in desk.load_tasks("train")] == ["0", "1", "2"]
    [held_out] = desk.load_tasks("eval")
    assert held_out["id"] == "3" and held_out["prompt"] == "Lend me Emma for 10 days."


def test_each_part_of_the_reward_is_what_the_task_names(desk):
    rows = desk.load_tasks("train") + desk.load_tasks("eval")
    no, other = "It is a thousand.", called("lend", title="Ulysses", days=7)

    def rewards(row, days):
        lend = called("lend", title="Emma", days=days)
        plays = ([lend, "It is 1000."], [lend, no], [other, lend, "1,000"], ["1000"])
        return [serve(desk, row, *play, "Bye.").reward for play in plays]

    assert rewards(rows[0], 7) == [1, 0, 0, 0] and rewards(rows[0], 8) == [0, 0, 0, 0]
    assert rewards(rows[1], 8) == [1, 1, 0, 0] and rewards(rows[1], 7) == [0, 0, 0, 0]
    assert rewards(rows[2], 9) == [1, 1, 1, 0]
    assert rewards(rows[3], 1) == [1, 1, 1, 0]
    assert serve(desk, rows[3], "a", "b").metrics["unjudged"] == 1


def test_tools_refuse_and_the_agent_hears_why(desk):
    row = desk.load_tasks("train")[1]
    calls = called("find", title="Faust"), called("fnd"), called("lend", name="Emma")
    result = serve(desk, row, *calls, called("find", title="Emma"), "a", "b")
    reply = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert reply[0] == "Error: no book Faust" and "there are find, lend" in reply[1]
    assert "unexpected keyword argument" in reply[2] and reply[3] == "{}"
    assert result.metrics["refused_calls"] == 3


def test_a_played_customer_has_a_conversation_of_its_own(desk):
    row = desk.load_tasks("train")[1]
    user = ["Lend me Emma, please.", "###STOP###"]
    lend = called("lend", title="Emma", days=8)
    result = serve(desk, row, lend, "Done.", user=user)
    heard = [m["content"] for m in result.messages if m["role"] == "user"]
    assert heard == ["Lend me Emma, please."] and result.reward == 1
    assert result.messages[0] == {"role": "system", "content": "Lend one book."}


def test_solutions_earn_one_and_doing_nothing_nothing(desk, capsys):
    assert command(["check", str(PATH), "--oracle", "--num_tasks", "3"]) == 0
    assert "3 tasks: solutions solve them" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("TAU2_DOMAIN", "/nowhere", "TAU2_DOMAIN='/nowhere' must be a folder with tasks.json"),
        ("TAU2_TOOLS", "", "TAU2_TOOLS must name the tools"),
        ("TAU2_TOOLS", "json", "TAU2_TOOLS=json has 0 classes that take db"),
    ],
)
def test_what_is_missing_is_said(desk, monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    made = load_env(str(PATH)).hooks["oracle"].function.__globals__
    with pytest.raises(ValueError, match=says):  # noqa: PT012 either may raise
        made["load_tasks"]("train")
        made["Desk"]()


TEA = task_of(0, ["COMMUNICATE"], actions=[], communicate_info=["tea"])


def test_a_file_that_is_cut_short_is_named(desk, tmp_path):
    (tmp_path / "db.json").write_text('{"books"')
    with pytest.raises(ValueError, match=r"db\.json is not JSON: .*; fetch it whole"):
        desk.hooks["oracle"].function.__globals__["Desk"]()
