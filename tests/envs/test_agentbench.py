"""Environments after AgentBench: their solutions earn the most, and other replies nothing;
AgentBench's own rows, where they are there."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from functools import cache

import pytest
import stage
from kit import ROOT

from rl_core.environments.env_file import load_env
from rl_core.tools.cli import main as command

NAMES = ("db", "house", "kg", "os", "shop")


@cache
def env_of(name: str):
    return load_env(str(ROOT / f"envs/agentbench_{name}.py"))


def part_of(name: str, topic: str):
    """The object of this name in the file of an environment."""
    return env_of(name).hooks["oracle"].function.__globals__[topic]


@pytest.fixture(autouse=True)
def sqlite_everywhere(monkeypatch):
    """MariaDB, which only some machines have, is tested in test_mariadb.py."""
    monkeypatch.setenv("AGENTBENCH_DB", "sqlite")


def play(env, *replies, max_tokens: int = 2000, **options):
    return stage.play(env, *replies, max_tokens=max_tokens, **options)


def called(tool: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def agentbench(data_dir):
    """AgentBench's own data."""
    folder = data_dir / "agentbench"
    if not folder.exists():
        pytest.skip(f"no agentbench in {data_dir}: clone github.com/THUDM/AgentBench's data there")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_solutions_earn_the_most_and_doing_nothing_earns_nothing(name, capsys):
    flags = ["--oracle", "--num_tasks", "12" if name == "os" else "40", "--json"]
    assert command(["check", str(ROOT / f"envs/agentbench_{name}.py"), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {(one["oracle"], one["nothing"]) for one in report["oracle"]} == {(1.0, 0.0)}
    assert len(report["oracle"]) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_in_one_split(name):
    splits = [env_of(name).load_tasks(split) for split in ("train", "eval")]
    train, held_out = ({json.dumps(row, sort_keys=True) for row in rows} for rows in splits)
    assert len(train) > 400 and len(held_out) > 40 and not train & held_out
    kind = {"db": "type", "house": "kind"}.get(name, "level")
    assert len({str(row[kind]) for row in splits[1]}) >= 3


# Operating system

ROW = {"prompt": "How many?", "create": {"init": "mkdir ~/a && echo x > ~/a/b"}}


def os_row(**evaluation) -> dict:
    return ROW | {"evaluation": evaluation}


def test_checkers_get_the_answer_and_what_those_before_them_wrote():
    check = [None, {"language": "python", "code": "import sys; sys.exit(sys.argv[1:] != ['2', 'x\\n'])"}]  # fmt: skip
    row = os_row(check=check, example="cat ~/a/b")
    env = env_of("os")
    assert play(env, called("bash", command="ls"), "2", row=row).reward == 1
    assert play(env, "<think>1?</think>2", row=row).reward == 1
    assert play(env, "3", row=row).reward == 0
    assert play(env, *[called("bash", command="ls")] * 8, row=row).reward == 0
    cut = play(env, "2 2 2 2 2 2", row=row, max_tokens=3)
    assert (cut.status, cut.reward) == ("truncated", 0)


def test_a_script_checks_changes_in_the_box():
    row = os_row(check={"code": "[ -e ~/done ]"}) | {"start": "sleep 0.3; touch ~/late"}
    wait = called("bash", command="for n in $(seq 50); do [ -e ~/late ] && touch ~/done && exit; sleep 0.1; done")  # fmt: skip
    assert play(env_of("os"), wait, "It is done.", row=row).reward == 1
    assert play(env_of("os"), "It is done.", row=row).reward == 0
    assert play(env_of("os"), "no", row=os_row(match="no")).reward == 1


@pytest.mark.parametrize(
    "row, error",
    [
        (os_row(match="1") | {"create": {"init": "exit 3"}}, "preparing failed (3)"),
        (os_row(check=[{"file": "check/in.py"}]), "set AGENTBENCH_SCRIPTS"),
        (os_row(check=[{"code": "", "language": "perl"}]), "'perl' is not one of bash, python"),
    ],
)
def test_a_row_that_cannot_be_played_or_checked_fails_its_episode(row, error):
    assert error in stage.error_of(env_of("os"), "1", row=row)


def test_some_rows_of_agentbench_are_solved_by_their_examples(agentbench, monkeypatch, capsys):
    folder = agentbench / "os_interaction"
    monkeypatch.setenv("AGENTBENCH_SCRIPTS", str(folder / "scripts/7"))
    rows = ["--data.train", str(folder / "train_0317/training.json"), "--num_tasks", "6"]
    rows += ["--data.columns", "prompt=description", "--oracle"]
    assert command(["check", str(ROOT / "envs/agentbench_os.py"), *rows]) == 0
    assert "6 tasks: solutions solve them" in capsys.readouterr().out


# Database


def db_row(kind: str, label: list[str], **more) -> dict:
    columns = [{"name": "who", "type": "TEXT"}, {"name": "a b", "type": "INT"}]
    info = {"columns": columns, "rows": [["Ada", 1], ["Ben", 2]]}
    table = {"table_name": "my table", "table_info": info}
    row = {"prompt": "?", "type": [kind], "label": label, "add_description": "", "table": table}
    return row | more


@pytest.mark.parametrize(
    "label, answer, reward",
    [
        (["2"], "2", 1),
        (["2.0"], "2.004", 1),
        (["2.0"], "2.02", 0),
        (["1,234"], '["1234"]', 1),
        (["Ben", "Ada"], '["Ada", "Ben"]', 1),
        (["Ben", "Ada"], "Ben", 0),
        (["Ben"], "ben", 0),
        (["12%"], "12 %", 1),
        (["2"], "The answer is 2.", 0),
        (["2"], "nan", 0),
        (["2"], "", 0),
        (["2"], "[" * 100_000, 0),
    ],
)
def test_an_answer_is_compared_with_the_label(label, answer, reward):
    row = db_row("other", label)
    result = play(env_of("db"), answer, row=row, max_tokens=200_000)
    assert result.reward == reward


def test_a_change_is_right_if_the_table_is_as_after_the_label():
    row = db_row("UPDATE", ["UPDATE `my table` SET `a b` = 5 WHERE who = 'Ada'"])
    env = env_of("db")

    def reward(*queries):
        reply = [called("execute_sql", query=query) for query in queries]
        return play(env, *reply, "done", row=row).reward

    assert reward('UPDATE "my table" SET "a b" = \'5\' WHERE "a b" = \'1\'') == 1
    # In another order, and by other statements.
    assert reward("DELETE FROM `my table` WHERE who = 'Ada'", "INSERT INTO `my table` VALUES ('Ada', 5)") == 1  # fmt: skip
    assert reward("UPDATE `my table` SET `a b` = 5") == 0
    assert reward("SELECT * FROM `my table`") == reward("DROP TABLE `my table`") == 0


@pytest.mark.parametrize(
    "query, reply",
    [
        ("ATTACH 'x.db' AS x", "not authorized"),
        ("VACUUM INTO 'y.db'", "denied"),
        ("PRAGMA max_page_count = 999999999", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT zeroblob(900000000)", "too big"),
        (
            "WITH RECURSIVE a(n, s) AS (SELECT 1, 'xxxxxxxx' UNION ALL SELECT n + 1, s || s FROM a "
            "WHERE n < 40) SELECT max(length(s)) FROM a",
            "too big",
        ),
        (
            "WITH RECURSIVE a(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM a) SELECT max(n) FROM a",
            "interrupted",
        ),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT 'a\0b'", "null character"),
        ("SELEC", "syntax error"),
    ],
)
def test_a_statement_reaches_no_file_and_takes_neither_time_nor_memory(query, reply, tmp_path, monkeypatch):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    database = part_of("db", "Database")(db_row("other", ["1"]))
    began = time.monotonic()
    with pytest.raises(ValueError, match=reply):
        database.execute_sql(query)
    assert time.monotonic() - began < 30 and not list(tmp_path.iterdir())


def test_the_hash_of_a_table_is_mysqls_over_its_rows():
    rows = [["b", "2"], ["a", "1"]]
    hashes = sorted(hashlib.md5(text).hexdigest()[:5] for text in (b"a,1", b"b,2"))
    wanted = hashlib.md5(",".join(hashes).encode()).hexdigest()
    assert part_of("db", "table_md5")(rows) == wanted


def test_agentbenchs_changes_give_the_hashes_that_mysql_gave(agentbench):
    """195 of 200 in SQLite: five statements are MySQL's alone, such as a name without quotes that
    begins with a digit."""
    text = (agentbench / "dbbench/standard.jsonl").read_text()
    database, table_md5, result = part_of("db", "Database"), part_of("db", "table_md5"), Counter()
    for row in map(json.loads, text.splitlines()):
        if row["type"][0] in ("INSERT", "UPDATE"):
            made = database(row)
            try:
                made.held.execute(row["label"][0])
            except sqlite3.Error:
                continue
            result[row["type"][0]] += table_md5(made.rows()) in row["answer_md5"]
    assert result == {"INSERT": 98, "UPDATE": 97}


def test_agentbenchs_labels_earn_one_and_others_nothing(agentbench, capsys):
    rows = ["--data.train", str(agentbench / "dbbench/standard.jsonl"), "--json", "--oracle"]
    rows += ["--data.columns", "prompt=description"]
    assert command(["check", str(ROOT / "envs/agentbench_db.py"), *rows]) == 1
    report = json.loads(capsys.readouterr().out)
    scores = Counter((one["oracle"], one["nothing"]) for one in report["oracle"])
    # A label that SQLite cannot run, and a change that changes nothing.
    assert scores == {(1.0, 0.0): 298, (None, 0.0): 1, (1.0, 1.0): 1}


# Knowledge graph

LINKS = [("a", "r", "b"), ("a", "r", "c"), ("d", "r", "c"), ("d", "r", "e"), ("b", "n", 3)]
LINKS += [("c", "n", 5), ("b", "s", "a")]


def desk(entities=()):
    return part_of("kg", "Desk")(part_of("kg", "Graph")(LINKS), dict(entities))


def test_each_of_the_seven_tools_does_what_its_name_says():
    made = desk({"Anna": "a"})
    assert made.get_relations("Anna") == made.get_relations("a") == '["r"]'
    assert [made.get_neighbors("Anna", "r"), made.get_neighbors("d", "r")] == ["#0", "#1"]
    assert made.get_relations("#0") == '["s"]' and made.get_attributes("#0") == '["n"]'
    calls = [made.intersection("#0", "#1"), made.argmax("#0", "n"), made.argmin("#0", "n")]
    assert [*calls, made.count("#1")] == ["#2", "#3", "#4", "#5"]
    assert made.variables == [{"b", "c"}, {"c", "e"}, {"c"}, {"c"}, {"b"}, {"2"}]
    for tool, *argument_text in [
        ("get_neighbors", "a", "s"),
        ("count", "#9"),
        ("argmax", "#1", "x"),
    ]:
        with pytest.raises(ValueError):
            made.tools[tool](*argument_text)


def test_a_final_answer_is_the_set_and_a_part_of_it_is_only_measured():
    country = env_of("kg").load_tasks("train")
    row = next(row for row in country if row["actions"][-1].startswith("intersection"))
    calls = []
    for action in row["actions"]:
        name, _, argument_text = action[:-1].partition("(")
        first, _, second = argument_text.partition(",")
        keys = {"intersection": ("variable1", "variable2")}.get(name, ("variable", "relation"))
        calls.append(called(name, **dict(zip(keys, (first, second), strict=True))))
    result = play(env_of("kg"), *calls, "So: Final Answer: #2", row=row)
    assert (result.reward, result.metrics["f1"]) == (1, 1)
    result = play(env_of("kg"), *calls, "Final Answer: #0", row=row)
    assert result.reward == 0 and 0 < result.metrics["f1"] < 1
    for reply in ("Final Answer: #7", "Final Answer: 2", "#2", ""):
        assert play(env_of("kg"), *calls, reply, row=row).reward == 0
    odd = [called("argmax", variable="#0", attribute="x", pick="y"), called("drop"), "Final Answer: #0"]  # fmt: skip
    result = play(env_of("kg"), *odd, row=row)
    reply = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert (
        "unexpected keyword argument 'pick'" in reply[0] and "there is no tool 'drop'" in reply[1]
    )


def test_agentbenchs_calls_find_their_answers_in_a_graph_that_fits_them(agentbench):
    """The graph has what each call needs, and nothing else: all but the last one lead to strangers
    too."""
    played, graph = part_of("kg", "played"), part_of("kg", "Graph")
    rows = json.loads((agentbench / "knowledgegraph/std.json").read_text())
    for row in rows:
        wanted = {str(one["answer_argument"]) for one in row["answer"]}
        made = part_of("kg", "Desk")(graph([]), row["entities"])
        for number, action in enumerate(row["actions"]):
            name, _, argument_text = action[:-1].partition("(")
            is_last = number == len(row["actions"]) - 1
            goal, strangers = wanted, set() if is_last else {f"stranger {number}"}
            if any(a.startswith("count") for a in row["actions"]):
                goal = {f"one {n}" for n in range(int(*wanted))}
                is_before = row["actions"][number + 1 :] and "count" in row["actions"][number + 1]
                strangers = set() if is_before else strangers
            variable, _, relation = argument_text.partition(",")
            for one in made.read(variable) if name == "get_neighbors" else ():
                links = made.graph.links.setdefault(one, {}).setdefault(relation, set())
                links |= goal | strangers
            if name in ("argmax", "argmin"):
                for one in made.read(variable):
                    number_of = {"argmax": 1, "argmin": -1}[name] * (one in wanted)
                    made.graph.numbers.setdefault(one, {})[relation] = number_of
            played(made, [action]) if made.variables or name == "get_neighbors" else None
        assert made.variables[-1] == wanted, row["question"]
    assert len(rows) == 150


# Shop


def test_the_reward_is_the_share_of_what_was_wished():
    products = part_of("shop", "PRODUCTS")
    product = next(p for p in products.values() if p["category"] == "shirt")
    (color, other), size = product["options"]["color"], product["options"]["size"][0]
    row = {"prompt": "Buy.", "category": "shirt", "attributes": [product["attributes"][0], "new"]}
    row |= {"options": {"color": color, "size": size}, "max_price": product["price"]}

    def buy(*clicks, **more):
        reply = [called("search", keywords=product["name"])]
        reply += [called("click", value=value) for value in (product["name"], *clicks, "Buy Now")]
        return play(env_of("shop"), *reply, row=row | more)

    result = buy(color, size)
    assert (result.reward, len(result.turns)) == (pytest.approx(4 / 5), 5)
    assert result.metrics["bought"] == 1
    assert buy(other, color, size, attributes=product["attributes"]).reward == 1
    assert buy(other).reward == pytest.approx(2 / 5)
    assert buy(max_price=1).reward == pytest.approx(1 / 5)
    assert buy(color, size, category="mug").reward == 0
    assert play(env_of("shop"), "Buy Now", row=row).metrics["bought"] == 0


def test_clicks_need_links_and_searches_need_shared_words():
    shop = part_of("shop", "Shop")()
    for value in ("Buy Now", "Back", "Next", ""):
        with pytest.raises(ValueError, match="there is no"):
            shop.click(value)
    first = shop.search("a striped MUG, please")
    assert first.count("striped") == 10 and "[Next]" in first  # Five lines and their links.
    assert shop.search("zzz") == "Nothing was found."
    shop.search("mug")
    seen = []
    while "Next" in shop.page()[1]:
        seen += shop.page()[1][:-1]
        shop.click("Next")
    seen += shop.page()[1]
    products = part_of("shop", "PRODUCTS").values()
    assert Counter(seen) == Counter(p["name"] for p in products if p["category"] == "mug")


# Household


def test_things_are_where_they_were_put_and_closed_places_hide_them():
    row = {"seed": 3, "kind": "heat", "thing": "egg", "goal": "table 1"}
    house = part_of("house", "House")(row)
    house.where["egg 1"] = "drawer 1"
    assert "cannot" in house.act("take egg 1") and "egg 1" not in house.act("go to drawer 1")
    assert "egg 1" in house.act("> Open drawer 1.") and "You hold egg 1" in house.act("take egg 1")
    assert "cannot" in house.act("heat egg 1") and "cannot" in house.act("take egg 2")
    assert house.num_refused == 3 and not house.is_done()
    for action in ("go to table 1", "put egg 1 in table 1"):
        house.act(action)
    assert not house.is_done()  # It is cold.
    for action in ("take egg 1", "go to microwave 1", "open microwave 1", "heat egg 1"):
        house.act(action)
    for action in ("go to table 1", "put egg 1 in table 1"):
        house.act(action)
    assert house.is_done() and house.num_refused == 3


def test_the_last_line_of_a_reply_is_the_action():
    row = next(row for row in env_of("house").load_tasks("train") if row["kind"] == "put")
    actions = part_of("house", "solution")(part_of("house", "House")(row))
    reply = [f"<think>go to sink 1</think>I think.\n{action}" for action in actions]
    result = play(env_of("house"), *reply, row=row)
    assert result.reward == 1 and result.metrics["refused"] <= 2
    lost = play(env_of("house"), "dance", row=row)
    assert (lost.reward, len(lost.turns), lost.metrics["refused"]) == (0, 24, 24)


# Replies of two kinds


def steps_of(name: str) -> tuple[dict, list[list[str]]]:
    """A row, and replies of two kinds to it, of which one earns more."""
    if name == "os":
        return os_row(match="1"), [["1"], ["2"]]
    if name == "db":
        return db_row("other", ["1"]), [["1"], ["2"]]
    rows = env_of(name).load_tasks("train")
    if name == "kg":
        row = next(row for row in rows if "works_as" in row["actions"][0])
        [person] = row["entities"]
        calls = [called("get_neighbors", variable=person, relation=f"person.{relation}")
                 for relation in ("works_as", "born_in")]  # fmt: skip
        return row, [[call, "Final Answer: #0"] for call in calls]
    if name == "shop":
        row = next(row for row in rows if row["category"] == "mug" and row["level"] == 1)
        calls = [called("search", keywords="mug"), None, called("click", value="Buy Now")]
        shop = part_of("shop", "Shop")()
        shop.search("mug")
        products = [part_of("shop", "PRODUCTS")[link] for link in shop.page()[1][:5]]
        prices = sorted(product["price"] for product in products)
        names = [next(p["name"] for p in products if p["price"] == prices[n]) for n in (0, -1)]
        row = row | {"max_price": prices[0]}
        return row, [[calls[0], called("click", value=name), calls[2]] for name in names]
    row = min(rows[:300], key=lambda row: len(shortest(row)))
    actions = shortest(row)
    return row, [actions, [*actions[:-1], "go to sink 1"]]


def shortest(row: dict) -> list[str]:
    """The actions that solve a household's task, without those that cannot be done."""
    house, actions = part_of("house", "House")(row), []
    for action in part_of("house", "solution")(house):
        if action in house.actions():
            house.act(action)
            actions.append(action)
    return actions
