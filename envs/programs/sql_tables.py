"""A row's table in a separate database, for envs/agentbench_db.py: in SQLite, or in MariaDB."""

import json
import sqlite3
import time

from programs import mariadb

STATEMENT_S, MAX_ROWS = 2.0, 30
MAX_VALUE_BYTES, MAX_PAGES = 1 << 17, 1 << 14  # A page has 4 KiB.


def quoted(name):
    return "`" + name.replace("`", "``") + "`"


def columns_of(row):
    return [quoted(column["name"]) for column in row["table"]["table_info"]["columns"]]


def values_in(row):
    return [list(map(str, values)) for values in row["table"]["table_info"]["rows"]]


def in_order(rows):
    """Rows of texts without NULL, in a fixed order."""
    return sorted([[str(value) for value in row if value is not None] for row in rows])


def shown(rows):
    return json.dumps(rows, ensure_ascii=False, default=str) if rows else "no rows"


class SQLite:
    """The row's table in memory. Nothing else can be attached, and no setting changed."""

    def __init__(self, row):
        self.table = quoted(row["table"]["table_name"])
        names = columns_of(row)
        self.held = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.held.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self.held.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        self.held.execute(f"CREATE TABLE {self.table} ({', '.join(n + ' TEXT' for n in names)})")
        fill = f"INSERT INTO {self.table} VALUES ({', '.join('?' * len(names))})"
        self.held.executemany(fill, values_in(row))
        self.held.set_authorizer(permit)

    def execute_sql(self, query):
        """Its rows as text. Raises ValueError."""
        deadline = time.monotonic() + STATEMENT_S
        self.held.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            rows = self.held.execute(query).fetchmany(MAX_ROWS)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, MemoryError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return shown(rows)

    def rows(self):
        """The table's rows in a fixed order; None if it is gone or too large."""
        try:
            rows = self.held.execute(f"SELECT * FROM {self.table}").fetchmany(100_000)
        except sqlite3.Error:
            return None
        return in_order(rows)

    def close(self):
        self.held.close()


class MariaDB:
    """The row's table in a separate database on the server of this process."""

    def __init__(self, row):
        self.table = quoted(row["table"]["table_name"])
        self.session = mariadb.Session(STATEMENT_S, MAX_ROWS)
        self.close = self.session.close
        names = columns_of(row)
        places = ", ".join(["%s"] * len(names))
        with self.session.connect() as connection, connection.cursor() as cursor:
            columns = ", ".join(f"{name} TEXT" for name in names)
            cursor.execute(f"CREATE TABLE {self.table} ({columns})")
            fill = f"INSERT INTO {self.table.replace('%', '%%')} VALUES ({places})"
            cursor.executemany(fill, values_in(row))

    def execute_sql(self, query):
        """Its rows as text. Raises ValueError."""
        return shown(self.session.execute(query))

    def rows(self):
        """The table's rows in a fixed order; None if it is gone."""
        rows = self.session.rows(self.table, 100_000)
        return None if rows is None else in_order(rows)


def permit(action, *_):
    """SQLite asks before each thing that a statement does: other files and settings are closed."""
    is_closed = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_PRAGMA)
    return sqlite3.SQLITE_DENY if is_closed else sqlite3.SQLITE_OK
