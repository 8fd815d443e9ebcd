"""AgentBench's database (arXiv:2308.03688): questions about a table, and changes of it, in SQL.

    rl-core train --env_path envs/agentbench_db.py --data.columns prompt=description --model M
    --data.train AgentBench/data/dbbench/standard.jsonl --max_prompt_tokens 1024 --out runs/db

The model calls `execute_sql`. Its last message, without a call, is the answer; several values are a
JSON list. Reward: 1 if it equals the row's `label` (numbers to 0.01), or, for types INSERT, UPDATE
and DELETE, if the table is then as after the label, or has the row's `answer_md5`; else 0. Each
episode has a separate database, and 2 s for a statement. $AGENTBENCH_DB: mariadb (Debian's
mariadb-server and pymysql; a server of this process, without a network), sqlite (in memory, without
files), or auto (the default: MariaDB where both are installed). Columns are texts, as in
AgentBench. Without --data.train: made-up orders, five types; a hash of the prompt says which tenth
is held out. docs/environments.md. Needs a GPU, not run.
"""

import hashlib
import json
import os
import random
import zlib
from importlib.util import find_spec

from programs import mariadb
from programs.calling import answers, tool
from programs.sql_tables import MariaDB, SQLite

CHANGES = ("INSERT", "UPDATE", "DELETE")
NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana")
CHOICES = ("mariadb", "sqlite", "auto")
KIND = os.environ.get("AGENTBENCH_DB", "auto")
if KIND not in CHOICES:
    raise ValueError(f"AGENTBENCH_DB={KIND} is not one of {', '.join(CHOICES)}")
if KIND == "mariadb" and mariadb.missing():
    raise ImportError(f"AGENTBENCH_DB=mariadb: {mariadb.missing()}")
if KIND == "auto":
    KIND = "mariadb" if find_spec("pymysql") and not mariadb.missing() else "sqlite"
SQL = {"mariadb": "MariaDB", "sqlite": "SQLite"}[KIND]

max_turns = 8
tools = [tool("execute_sql", "Runs one statement and gives its rows.", query=f"{SQL}'s SQL")]
system_prompts = {
    "policy": (
        f"Answer with the help of a database in {SQL}; call execute_sql. "
        "{{ add_description }} When "
        "you know the answer, reply without a call: the answer alone. If a change is asked for, "
        "make it and reply: done"
    )
}


def make_row(kind, rng):
    columns = ["customer", "item", "price"]
    made = [[rng.choice(NAMES), rng.choice(("tea", "milk", "rice")), ""] for _ in range(8)]
    for row in made:
        row[2] = str(rng.randrange(2, 100))
    name, item, _ = rng.choice(made)
    new = rng.randrange(100, 200)
    asked, label = {
        "counting": (f"How many orders has {name}?", sum(row[0] == name for row in made)),
        "aggregation-SUM": (
            f"What do all orders of {item} cost?",
            sum(int(row[2]) for row in made if row[1] == item),
        ),
        "ranking": (
            f"What is the highest price of {item}?",
            max(int(row[2]) for row in made if row[1] == item),
        ),
        "INSERT": (
            f"Add that {name} orders {item} for {new}.",
            f"INSERT INTO orders VALUES ('{name}', '{item}', '{new}')",
        ),
        "UPDATE": (
            f"Set the price of all {item} that {name} ordered to {new}.",
            f"UPDATE orders SET price = '{new}' WHERE customer = '{name}' AND item = '{item}'",
        ),
    }[kind]
    info = {"columns": [{"name": column, "type": "TEXT"} for column in columns], "rows": made}
    return {
        "prompt": asked,
        "type": [kind],
        "label": [str(label)],
        "add_description": f"The table orders has the columns {', '.join(columns)}.",
        "table": {"table_name": "orders", "table_info": info},
    }


def load_tasks(split):
    rng, rows = random.Random(0), []
    for number in range(1000):
        kinds = ("counting", "aggregation-SUM", "ranking", "INSERT", "UPDATE")
        rows.append(make_row(kinds[number % 5], rng))
    return [row for row in rows if is_held_out(row) == (split != "train")]


def is_held_out(row):
    return zlib.crc32(json.dumps(row).encode()) % 10 == 0


Database = {"mariadb": MariaDB, "sqlite": SQLite}[KIND]


def table_md5(rows):
    """MySQL's md5(group_concat(hash)) over the sorted hashes of rows, as AgentBench computes it."""
    hashes = [hashlib.md5(",".join(row).encode()).hexdigest()[:5] for row in rows]
    # MySQL cuts group_concat after 1,024 bytes.
    return hashlib.md5(",".join(sorted(hashes))[:1024].encode()).hexdigest()


def start(task):
    return Database(task.row)


def interact(messages, state):
    return answers(messages[-1], {"execute_sql": state.execute_sql})


def is_changed_right(database, row):
    rows = database.rows()
    if rows is None:
        return False
    if row.get("answer_md5") and table_md5(rows) in row["answer_md5"]:
        return True
    wanted = Database(row)
    try:
        wanted.execute_sql(row["label"][0])
        return rows == wanted.rows()
    except ValueError:
        if not row.get("answer_md5"):
            raise
        return False  # MySQL runs it and this database does not: the hash alone decides.
    finally:
        wanted.close()


def values_of(text):
    """The values of an answer: those of a JSON list, or one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = text
    values = values if isinstance(values, list) else [values]
    return [str(value).strip().strip("'\"").rstrip("%").replace(",", "") for value in values]


def is_same(value, wanted):
    try:
        return abs(float(value) - float(wanted)) <= 0.01
    except ValueError:
        return value == wanted


def is_right(answer, label):
    values = sorted(values_of(answer))
    wanted = sorted(values_of(json.dumps(label)))
    return len(values) == len(wanted) and all(map(is_same, values, wanted))


def reward_fn(messages, state, task):
    last, row = messages[-1], task.row
    if last.get("tool_calls") or last["role"] != "assistant":
        return 0.0
    if row["type"][0] in CHANGES:
        return float(is_changed_right(state, row))
    return float(is_right(last["content"].rpartition("</think>")[2].strip(), row["label"]))


def oracle(task):
    row, database = task.row, Database(task.row)
    if row["type"][0] in CHANGES:
        database.execute_sql(row["label"][0])
    message = {"role": "assistant", "content": json.dumps(row["label"])}
    return reward_fn([message], database, task)
