"""MariaDB for environments: a server of this process without a network, a database a session.

The server is Debian's package mariadb-server, and has a Unix socket in a temporary folder. It ends,
and its folder goes, when this process ends in whatever way. Started by root it runs as the user
mysql or nobody. Tables are MyISAM's, at most 16 MiB each, and nobody can choose another engine.
"""

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from importlib.util import find_spec

START_S = 60.0
COLLATION = "utf8mb4_unicode_520_nopad_ci"  # The nearest to MySQL 8's utf8mb4_0900_ai_ci.
MAX_VALUE_BYTES = 1 << 20
# The shell ends with the server, and the server when the shell's stdin does: this process holds its
# other end. 4 GiB of addresses (in KiB), 256 MiB a file (in blocks of 512 bytes): a server that
# ignores XFSZ reports a file that is too large, and lives.
SUPERVISOR = """
trap '' XFSZ
ulimit -v 4194304 && ulimit -f 524288 || exit
exec 3<&0
folder=$1; shift
"$@" < /dev/null 3<&- & server=$!
(cat <&3 > /dev/null; kill -9 $server) & watcher=$!
wait $server
kill $watcher
rm -rf "$folder"
"""
INSTALL = (
    "--no-defaults --auth-root-authentication-method=normal --skip-test-db --skip-name-resolve "
    "--innodb-log-file-size=4M"
)
# Without a strict mode: so AgentBench's recorded hashes come out.
SERVE = (
    "--no-defaults --skip-networking --skip-name-resolve --innodb=OFF --event-scheduler=DISABLED "
    "--default-storage-engine=MyISAM --enforce-storage-engine=MyISAM --myisam-data-pointer-size=3 "
    f"--local-infile=OFF --max-allowed-packet={MAX_VALUE_BYTES} --character-set-server=utf8mb4 "
    f"--sync-frm=OFF --sql-mode= --key-buffer-size=8M --aria-pagecache-buffer-size=8M "
    f"--collation-server={COLLATION}"
)


def program(name):
    """The path of one of MariaDB's programs, or None."""
    return shutil.which(
        name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    )


def missing():
    """Missing requirements of MariaDB on this machine as text; empty if there are none."""
    if not (program("mariadbd") and program("mariadb-install-db") and shutil.which("setpriv")):
        return "MariaDB is not installed: apt-get install mariadb-server"
    return "" if find_spec("pymysql") else "pymysql is missing: pip install pymysql"


def server_user():
    """Whom the server runs as. It refuses to be root's."""
    if os.geteuid() != 0:
        return getpass.getuser()
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "mysql" if "mysql" in names else "nobody"


class Server:
    """Starts when somebody asks for it, and again if it has died."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process, self.socket, self.num_databases = None, "", 0

    def start(self):
        """Raises RuntimeError with the end of the server's log."""
        folder = tempfile.mkdtemp(prefix="mariadb-")
        self.socket = f"{folder}/socket"
        user = server_user()
        shutil.chown(folder, user)
        drop = ["setpriv", "--pdeathsig", "KILL"]
        if os.geteuid() == 0:
            drop += [
                "--reuid",
                user,
                "--regid",
                str(pwd.getpwnam(user).pw_gid),
                "--clear-groups",
            ]
        places = [f"--datadir={folder}/data"]
        made = subprocess.run(
            [*drop, program("mariadb-install-db"), *INSTALL.split(), *places],
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        if made.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(
                f"mariadb-install-db failed: {made.stdout[-500:]}{made.stderr[-500:]}"
            )
        places += [f"--socket={self.socket}", f"--pid-file={folder}/pid", f"--tmpdir={folder}"]
        serve = [*drop, program("mariadbd"), *SERVE.split(), *places]
        with tempfile.TemporaryFile("w+") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", SUPERVISOR, "sh", folder, *serve],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            deadline = time.monotonic() + START_S
            while not self.answers():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.process.stdin.close()
                    log.seek(0)
                    raise RuntimeError(f"MariaDB did not start: {log.read()[-1000:]}")
                time.sleep(0.05)

    def answers(self):
        import pymysql

        try:
            self.connect().close()
        except pymysql.Error:
            return False
        return True

    def connect(self, **options):
        """A new connection, of root if `options` has no user."""
        import pymysql

        defaults = {"user": "root", "charset": "utf8mb4", "autocommit": True, "read_timeout": 30}
        # A TLS context takes 60 ms to make.
        options = defaults | options | {"ssl_disabled": True}
        return pymysql.connect(unix_socket=self.socket, connect_timeout=10, **options)

    def run(self, *statements):
        connection = self.connect(init_command="SET lock_wait_timeout = 10")
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
        finally:
            connection.close()

    def new_database(self):
        """The name of a new database. A user of that name may do anything, but in it alone."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
            self.num_databases += 1
            name = f"session{self.num_databases}"
        self.run(
            f"CREATE DATABASE {name}",
            f"CREATE USER {name}@localhost",
            f"GRANT ALL ON {name}.* TO {name}@localhost",
        )
        return name

    def drop(self, name):
        """The user goes first, so that no connection of its can begin."""
        import pymysql

        with suppress(pymysql.Error):  # The server is gone, and all databases with it.
            self.run(
                f"DROP USER {name}@localhost",
                f"KILL HARD USER {name}@localhost",
                f"DROP DATABASE {name}",
            )


@cache
def server():
    return Server()


class Session:
    """A separate database with one user. It is dropped with this object, or by close()."""

    def __init__(self, statement_s, max_rows):
        self.statement_s, self.max_rows = statement_s, max_rows
        self.server, self.connection = server(), None
        self.name = self.server.new_database()
        self.close = weakref.finalize(self, self.server.drop, self.name)

    def connect(self, **options):
        return self.server.connect(user=self.name, database=self.name, **options)

    def execute(self, query):
        """The first rows of a statement's result. Raises ValueError with MariaDB's error, or if it
        takes too long, and RuntimeError if the server is gone. A statement that lifts MariaDB's own
        limit of time ends the connection, and with it temporary tables and variables."""
        import pymysql

        try:
            if self.connection is None:
                limit = f"SET max_statement_time = {self.statement_s}"
                self.connection = self.connect(
                    init_command=limit, read_timeout=self.statement_s + 1
                )
            cursor = self.connection.cursor(pymysql.cursors.SSCursor)
            cursor.execute(query)
            rows = list(cursor.fetchmany(self.max_rows))
            if len(rows) == self.max_rows:  # Else close() would read millions of rows.
                self.server.run(f"KILL QUERY {self.connection.thread_id()}")
            with suppress(pymysql.OperationalError):  # It was interrupted.
                cursor.close()
            return rows
        except (pymysql.Error, UnicodeError, ValueError) as error:
            self.check(error)
            raise ValueError(f"{type(error).__name__}: {error}") from None

    def check(self, error):
        """Ends a connection that does not answer. Raises RuntimeError if the server does not."""
        code = error.args[0] if error.args else 0
        if (
            isinstance(code, int) and 1000 <= code < 2000
        ):  # An error of the server about a statement.
            return
        if not self.server.answers():
            raise RuntimeError(f"MariaDB is gone: {error}") from None
        self.disconnect()

    def disconnect(self):
        """A thread that still works for this connection would continue."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        import pymysql

        with suppress(pymysql.Error):  # It has ended meanwhile.
            self.server.run(f"KILL HARD {connection.thread_id()}")
        with suppress(pymysql.Error):
            connection.close()

    def rows(self, table, most):
        """All rows of a table, read by a connection of which no setting was changed; None if it is
        gone. Raises RuntimeError if the server is."""
        import pymysql

        self.disconnect()
        try:
            connection = self.connect()
            with connection, connection.cursor() as cursor:
                cursor.execute(f"SELECT * FROM {table} LIMIT {most}")
                return list(cursor.fetchall())
        except pymysql.Error as error:
            self.check(error)
            return None
