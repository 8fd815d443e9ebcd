"""AgentBench's database in MariaDB: what statements may do, and a server that ends with its process.
Neither MariaDB nor pymysql is among rl_core's requirements, so these run where both are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import stage
from kit import ROOT

from rl_core.environments.env_file import load_env
from rl_core.tools.cli import main as command

PLACES = f"{os.environ['PATH']}:/usr/sbin"
HAS_ALL = which("mariadbd", path=PLACES) and which("setpriv") and find_spec("pymysql")
MARIADB = pytest.mark.skipif(not HAS_ALL, reason="MariaDB is not installed, or pymysql")
PATH = ROOT / "envs/agentbench_db.py"
TABLE = {"columns": [{"name": "who"}, {"name": "a `%b"}], "rows": [["Ada", 1], ["Ben", 2]]}
ROW = {
    "prompt": "?",
    "type": ["UPDATE"],
    "label": ["UPDATE `my %s` SET `a ``%b` = 5 WHERE who = 'ada'"],
    "add_description": "",
    "table": {"table_name": "my %s", "table_info": TABLE},
}


def called(query: str) -> str:
    call = {"name": "execute_sql", "arguments": {"query": query}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@pytest.fixture(scope="module")
def env():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTBENCH_DB", "mariadb")
        return load_env(str(PATH))


@pytest.fixture
def database(env):
    made = env.hooks["oracle"].function.__globals__["Database"](ROW)
    yield made
    made.close()


def test_another_kind_of_database_is_refused(monkeypatch):
    monkeypatch.setenv("AGENTBENCH_DB", "mysql")
    with pytest.raises(ValueError, match="AGENTBENCH_DB=mysql is not one of mariadb, sqlite, auto"):
        load_env(str(PATH))


@pytest.mark.skipif(find_spec("pymysql") is None, reason="MariaDB is not installed, or pymysql")
def test_without_a_server_auto_is_sqlite_and_mariadb_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "agentbench_db.py").write_text(PATH.read_text())
    for file in ("mariadb.py", "calling.py", "sql_tables.py"):
        text = (ROOT / "envs/programs" / file).read_text()
        (tmp_path / "programs" / file).write_text(text.replace(":/usr/sbin:/usr/local/sbin", ""))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AGENTBENCH_DB", "mariadb")
    code = "import agentbench_db; print(agentbench_db.Database.__name__)"
    run = [sys.executable, "-c", code]
    refused = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "AGENTBENCH_DB=mariadb: MariaDB is not installed: apt-get" in refused.stderr
    monkeypatch.setenv("AGENTBENCH_DB", "auto")
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "SQLite", result.stderr


@MARIADB
def test_solutions_earn_one_and_doing_nothing_nothing(monkeypatch, capsys):
    monkeypatch.setenv("AGENTBENCH_DB", "mariadb")
    assert command(["check", str(PATH), "--oracle", "--num_tasks", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    scores = {(one["oracle"], one["nothing"]) for one in report["oracle"]}
    assert scores == {(1.0, 0.0)} and len(report["oracle"]) == 20


@MARIADB
def test_a_change_is_compared_with_the_label_in_a_database_of_its_own(env):
    def reward(*queries):
        return stage.play(env, *map(called, queries), "done", row=ROW, max_tokens=2000).reward

    # As in MySQL a text is equal to another of other case, and "..." is a text.
    assert reward('UPDATE `my %s` SET `a ``%b` = 5 WHERE who = "ADA"') == 1
    # The model's settings are not those of whoever compares.
    right = "UPDATE `my %s` SET `a ``%b` = 5 LIMIT 1"
    assert reward("SET sql_select_limit = 0", "LOCK TABLES `my %s` WRITE", right) == 1
    assert reward("UPDATE `my %s` SET `a ``%b` = 5") == 0
    assert reward("SELECT * FROM `my %s`") == reward("DROP TABLE `my %s`") == 0


@MARIADB
@pytest.mark.parametrize(
    "query, error",
    [
        ("SELECT SLEEP(60)", "max_statement_time exceeded"),
        ("SET STATEMENT max_statement_time = 0 FOR SELECT SLEEP(60)", "timed out"),
        ("SELECT 1 INTO OUTFILE '/tmp/agentbench_db'", "Access denied"),
        ("LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE `my %s`", "not allowed|disabled"),
        ("CREATE DATABASE other", "Access denied"),
        (
            "CREATE TABLE big (a TEXT) ENGINE = InnoDB "
            "SELECT REPEAT('x', 60000) AS a FROM seq_1_to_9999",
            "is full",
        ),
        ("SET GLOBAL max_statement_time = 0", "Access denied"),
        ("SHUTDOWN", "Access denied"),
        ("SELECT 1; SELECT 2", "error in your SQL syntax"),
        ("SELEC", "error in your SQL syntax"),
        ("SELECT '\ud800'", "surrogates"),
    ],
)
def test_a_statement_reaches_nothing_else_and_takes_neither_time_nor_disk(query, error, database):
    with pytest.raises(ValueError, match=error):
        database.execute_sql(query)
    assert json.loads(database.execute_sql("SELECT who FROM `my %s`")) == [["Ada"], ["Ben"]]


@MARIADB
def test_of_many_rows_the_first_are_shown_and_variables_stay(database):
    database.execute_sql("SET @kept = 7")
    result = json.loads(database.execute_sql("SELECT seq FROM seq_1_to_1000000000"))
    assert result == [[number] for number in range(1, 31)]
    assert database.execute_sql("SELECT @kept, 1.5, NULL") == '[[7, "1.5", null]]'
    assert database.execute_sql("DELETE FROM `my %s`") == "no rows"


@MARIADB
def test_a_session_drops_its_database_and_sees_no_other(env, database):
    other = env.hooks["oracle"].function.__globals__["Database"](ROW)
    name, server = other.session.name, other.session.server
    with pytest.raises(ValueError, match="command denied"):
        database.execute_sql(f"SELECT * FROM {name}.`my %s`")
    other.execute_sql("SELECT GET_LOCK('x', 1)")
    data = Path(server.socket).parent / "data"
    assert (data / name).exists()
    del other
    assert not (data / name).exists() and (data / database.session.name).exists()


@MARIADB
def test_the_hash_is_that_of_agentbenchs_query(env, database):
    table_md5 = env.hooks["oracle"].function.__globals__["table_md5"]
    database.execute_sql("INSERT INTO `my %s` VALUES ('Zoë', NULL), ('', '3')")
    [[wanted]] = database.session.execute(
        "SELECT MD5(GROUP_CONCAT(h ORDER BY h)) FROM (SELECT SUBSTRING(MD5(CONCAT_WS(',', who, "
        "`a ``%b`)), 1, 5) AS h FROM `my %s`) AS hashes"
    )
    assert table_md5(database.rows()) == wanted


ENDLESS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from programs import mariadb
made = mariadb.Session(2.0, 30)
[[pid]] = made.execute("SELECT @@pid_file")
print(open(pid).read().strip(), mariadb.server().socket, flush=True)
time.sleep(600)
"""


@MARIADB
def test_a_server_ends_with_its_process_and_is_made_anew(env):
    command = [sys.executable, "-c", ENDLESS, str(ROOT / "envs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, socket = process.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists() and Path(socket).exists()
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() and not Path(socket).parent.exists())
    process.stdout.close()

    made = env.hooks["oracle"].function.__globals__["Database"]
    lost = made(ROW)
    server = lost.session.server
    os.kill(int(Path(server.socket).with_name("pid").read_text()), signal.SIGKILL)
    server.process.wait(30)
    with pytest.raises(RuntimeError, match="MariaDB is gone"):
        lost.execute_sql("SELECT 1")
    lost.close()
    anew = made(ROW)
    assert anew.execute_sql("SELECT 1") == "[[1]]"
    anew.close()


def until(is_so):
    """Waits, at most 30 s."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@MARIADB
def test_agentbenchs_changes_give_the_hashes_that_mysql_gave(env, data_dir):
    """All 300 labels earn 1, and 199 of 200 hashes are MySQL's (docs/environments.md); here every
    fifth change."""
    path = data_dir / "agentbench/dbbench/standard.jsonl"
    if not path.exists():
        pytest.skip(f"no agentbench in {data_dir}: clone github.com/THUDM/AgentBench's data there")
    env_globals = env.hooks["oracle"].function.__globals__
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter()
    for row in [row for row in rows if row["type"][0] in ("INSERT", "UPDATE")][1::5]:
        made = env_globals["Database"](row)
        made.execute_sql(row["label"][0])
        counts[env_globals["table_md5"](made.rows()) in row["answer_md5"]] += 1
        made.close()
    assert counts == {True: 40}
