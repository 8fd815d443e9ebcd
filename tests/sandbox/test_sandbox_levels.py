"""Each level of the sandbox: start, a program's view, verdicts on its end,
where its limits are."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import glob
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import started
from kit import ROOT

from rl_core.sandbox import Limits, Sandbox, isolation
from rl_core.tools.cli import main as command

LEVELS = list(isolation.LEVELS)


@pytest.fixture(scope="module", params=LEVELS)
def closed(request) -> Iterator[Sandbox]:
    made = started(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


def run(sandbox: Sandbox, code: str, **options):
    return asyncio.run(sandbox.run(code, **{"timeout_s": 20} | options))


def test_system_calls_have_the_numbers_that_the_kernel_gave_them():
    seccomp = pytest.importorskip("pyseccomp")
    names = ("mount_setattr", "pivot_root", "capset")
    for machine, arch in {"x86_64": seccomp.Arch.X86_64, "generic": seccomp.Arch.AARCH64}.items():
        numbers = tuple(seccomp.resolve_syscall(arch, name) for name in names)
        assert isolation.NUMBERS[machine] == numbers
    used = (isolation.MOUNT_SETATTR, isolation.PIVOT_ROOT, isolation.CAPSET)
    assert used == tuple(seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) for name in names)


# A program's view

LOOK = """
import json, os, stat, sys
def is_open(path):
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            os.listdir(path)
        elif stat.S_ISREG(kind):
            open(path, "rb").close()
        else:
            return False
    except OSError:
        return False
    return True
def listed(path):
    try: return sorted(os.listdir(path))
    except OSError: return None
FOLDERS = ("/", "/dev", "/dev/pts", "/dev/shm", "/proc", ".")
paths = json.load(sys.stdin)
found = {"open": [path for path in paths if is_open(path)], "variables": dict(os.environ), "cwd": os.getcwd()}
print(json.dumps(found | {"folders": {path: listed(path) for path in FOLDERS}}))
"""
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
SYSTEM += ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
VARIABLES = [
    "HOME",
    "LANG",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "TMPDIR",
]
DEVICES = ["full", "null", "random", "urandom", "zero"]
# Bubblewrap's, which are empty.
TERMINALS = ["core", "fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout", "tty"]


def allowed() -> set[str]:
    """The system's libraries and this interpreter."""
    python = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    paths = [path for path in [*SYSTEM, *python] if os.path.exists(path)]
    return {*paths, *map(os.path.realpath, paths)}


def is_below(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


@pytest.fixture
def planted(monkeypatch) -> Iterator[list[str]]:
    """Secrets in the home folder, the current folder and the environment of this process: their
    paths."""
    # Not below /tmp: a program has a separate /tmp.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        home, here = Path(folder, "home"), Path(folder, "here")
        for root in (home, here):
            root.mkdir()
            (root / "secret").write_text("planted")
        os.chmod(folder, 0o755)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("SECRET", "planted")
        monkeypatch.chdir(here)
        yield [folder, *glob.glob(f"{folder}/*"), *glob.glob(f"{folder}/*/*")]
        monkeypatch.undo()  # nothing stands in a folder that is gone


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_program_sees_is_what_it_may_see(level, planted):
    ours = [f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cwd/secret"]
    host = [*glob.glob("/*"), *glob.glob("/*/*"), *glob.glob("/home/*/*"), *planted, *ours]
    made = started(level)
    output = run(made, LOOK, stdin=json.dumps(host))
    made.close()
    observed = json.loads(output.stdout)

    may = allowed()
    above = {str(folder) for path in may for folder in Path(path).parents}
    mounts = {"/proc", "/dev", "/tmp", "/dev/pts", "/dev/shm"}
    # Its own copies of them, where nothing else lies.
    in_box = mounts | above if level != "landlock" else set()
    outside = [path for path in observed["open"] if not is_below(os.path.realpath(path), may)]
    assert [path for path in outside if path not in in_box] == []
    assert [path for path in may if path in host and path not in observed["open"]] == []

    more = ["PWD"] if level == "bubblewrap" else []
    assert sorted(observed["variables"]) == sorted(VARIABLES + more)
    assert "planted" not in observed["variables"].values()
    assert observed["variables"]["HOME"] == observed["variables"]["TMPDIR"] == observed["cwd"]
    folders = observed["folders"]
    assert folders["."] == []
    if level == "landlock":
        assert folders["/"] is folders["/dev"] is folders["/proc"] is None
        return
    assert set(folders["/"]) == {path.split("/")[1] for path in may | mounts} | {"box"}
    assert folders["/dev"] == sorted(DEVICES + TERMINALS)
    assert folders["/proc"] == []
    assert not folders["/dev/pts"] and not folders["/dev/shm"]


OWNERS = """
import fcntl, os, socket, struct
mine, other = socket.socketpair()
owner = struct.pack("i", os.getpid())
calls = [(fcntl.fcntl, 8, os.getpid()), (fcntl.fcntl, 15, struct.pack("ii", 1, os.getpid()))]
calls += [(fcntl.ioctl, 0x8901, owner), (fcntl.ioctl, 0x8902, owner)]
for call, command, argument in calls:
    try:
        call(mine, command, argument)
        print("open")
    except PermissionError:
        print("refused")
"""


@pytest.fixture
def filtered(closed) -> Sandbox:
    """A level that has seccomp, which a Python whose packages lie where the level does not look has
    not."""
    if not closed.has_seccomp:
        pytest.skip(f"{closed.level} has no seccomp here")
    return closed


def test_the_command_says_where_system_calls_are_not_filtered(closed, capsys):
    assert command(["sandbox", "level", "--level", closed.level]) == 0
    assert ("without seccomp" in capsys.readouterr().out) == (not closed.has_seccomp)


def test_a_program_sets_no_owner_of_its_descriptors(filtered):
    observed = run(filtered, OWNERS)
    assert (observed.stdout.split(), observed.stderr) == (["refused"] * 4, "")


SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, *arguments in CALLS:
    libc[name](*arguments)
    print(name, ctypes.get_errno())
"""


def test_a_program_reaches_no_queue_or_semaphore_of_the_host(
    filtered,
):
    libc = ctypes.CDLL(None)
    memory = libc.shmget(0, 4096, 0o666)
    queue = libc.msgget(0, 0o666)
    semaphore = libc.semget(0, 1, 0o666)
    get_value = 12
    calls = [("shmat", memory, None, 0), ("msgrcv", queue, None, 0, 0, os.O_NONBLOCK)]
    calls += [
        ("semctl", semaphore, 0, get_value),
        ("semop", semaphore, None, 0),
        ("shmctl", memory, 0, None),
    ]
    try:
        observed = run(filtered, SYSTEM_V.replace("CALLS", repr(calls)))
    finally:
        libc.shmctl(memory, 0, None)
        libc.msgctl(queue, 0, None)
        libc.semctl(semaphore, 0, 0)
    numbers = {number for _, number in (line.split() for line in observed.stdout.splitlines())}
    assert numbers == {str(errno.EPERM)}, (observed.stdout, observed.stderr)


CHANGES = """
import ctypes, struct
libc = ctypes.CDLL(None)
path = PATH
value = ctypes.create_string_buffer(b"changed")
attribute = struct.pack("QII", ctypes.addressof(value), 7, 0)
libc.syscall(452, -100, path, 0o777, 0)  # fchmodat2
libc.syscall(463, -100, path, 0, b"user.changed", attribute, 16)  # setxattrat
"""


def test_system_calls_newer_than_libseccomp_change_no_file_of_the_host(filtered):
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        os.chmod(file.name, 0o600)
        if os.geteuid() == 0:  # Root's programs run as nobody.
            os.chown(file.name, 65534, 65534)
        observed = run(filtered, CHANGES.replace("PATH", repr(file.name.encode())))
        assert (observed.status, observed.stderr) == ("ok", "")
        assert os.stat(file.name).st_mode & 0o777 == 0o600
        assert os.listxattr(file.name) == []


# Verdicts on a program's end


@pytest.mark.parametrize("end", ["import ctypes; ctypes.string_at(0)", "import os; os.abort()"])
def test_the_right_output_does_not_count_if_a_signal_ends_the_program(closed, end):
    code = f"print(int(input()) * 2, flush=True)\n{end}"
    observed = run(closed, code, tests=[("2", "4")])
    assert (observed.status, observed.passed, observed.stdout) == ("error", [False], "4\n")
    assert (
        observed.failures == ["input '2': expected '4', error, exit status -11"]
        or "exit status -6" in observed.failures[0]
    )
    alone = run(closed, code, stdin="2")
    assert (alone.status, alone.share) == ("error", 0.0)


# Limits

MIB = 1 << 20
OPENED = "import os\nfor _ in range({n}): os.open('/dev/null', 0)"
THREADS = """
import threading
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range({n})]
try:
    for thread in threads: thread.start()
finally:
    stop.set()
"""
FILES = "for n in range({n}): open(str(n), 'wb').write(bytes(1 << 20))"
# A program, a number just below the limit and one just above, and the status then.
EDGES = {
    "timeout_s": ("import time; time.sleep({n})", 0.8, 2.2, "timeout"),
    "memory_mib": (f"x = bytearray({{n}} * {MIB})", 300, 512, "memory"),
    "processes": (THREADS, 12, 16, "error"),
    "file_mib": (f"with open('x', 'wb') as f: f.write(bytes({{n}} * {MIB} + 1))", 15, 16, "error"),
    "disk_mib": (FILES, 60, 65, "error"),
    "open_files": (OPENED, 50, 64, "error"),
    "output_kib": ("print('x' * ({n} * 1024 - 1))", 256, 257, "output"),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_limit_holds_where_it_is_said_to_be(strongest, name):
    if name == "disk_mib" and strongest.start() == "landlock":
        pytest.skip("no sandbox level with a separate disk")
    code, below, above, status = EDGES[name]
    timeout_s = 1.5 if name == "timeout_s" else 60
    observed = [
        run(strongest, code.format(n=n), timeout_s=timeout_s).status for n in (below, above)
    ]
    assert observed == ["ok", status]


def test_limits_of_the_kernel_are_those_that_were_given(closed):
    names = ("AS", "NPROC", "FSIZE", "NOFILE", "CPU", "CORE")
    ask = (
        f"import resource\nfor name in {names}: print(*resource.getrlimit(getattr(resource, "
        "'RLIMIT_' + name)))"
    )
    arguments = Limits(memory_mib=300, processes=9, file_mib=3, open_files=33)
    made = Sandbox(level=closed.level, limits=arguments)
    text = run(made, ask, timeout_s=6.5).stdout.split("\n")[:-1]
    made.close()
    limits = {name: tuple(map(int, line.split())) for name, line in zip(names, text, strict=True)}
    if closed.level == "landlock":  # the user's other threads count there, too
        assert limits.pop("NPROC")[0] >= 9
    else:
        assert limits.pop("NPROC") == (9, 9)
    expected = {"AS": 300 * MIB, "FSIZE": 3 * MIB, "NOFILE": 33, "CPU": 7, "CORE": 0}
    assert limits == {name: (value, value) for name, value in expected.items()}


def test_limits_that_are_not_given_are_those_of_the_docs():
    text = (ROOT / "docs/sandbox.md").read_text()
    listed = ", ".join(f"{name}={getattr(Limits(), name)}" for name in Limits.__slots__)
    assert f"limits=Limits({listed})" in text


# A program that shares one core with its own processes.
CROWDED = """
import os, threading, time
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
def spin():
    while True: pass
{begin}
while time.process_time() < 0.5: pass
"""
CROWDS = {
    "children": "for _ in range(6):\n    if os.fork() == 0: spin()",
    "orphans": "for _ in range(6):\n    if os.fork() == 0:\n        if os.fork() == 0: spin()\n        os._exit(0)",
    "orphans that nobody waits "
    "for": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "for _ in range(6):\n    if os.fork() == 0:\n        if os.fork() == 0: spin()\n        "
    "os._exit(0)",
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_program_gets_no_time_for_waiting_for_its_own_processes(closed, crowd):
    """One core shared with six processes of the program gives it a seventh: it needs seven times
    its limit."""
    code = CROWDED.format(begin=CROWDS[crowd]).replace("{{", "{").replace("}}", "}")
    # At level landlock the user's other processes count too, such as those of tests that run
    # at the same time.
    roomy = Sandbox(level=closed.level, limits=Limits(processes=1000))
    assert run(roomy, code, timeout_s=0.8).status == "timeout"
    roomy.close()
