"""Programs of a Sandbox in pods that they share, one after another. tests/sandbox/kube_server.py"""

import asyncio
import os
import subprocess
import sys

import pytest
from hostile import ALL, attack, host
from test_box_kubernetes import REASON, server  # noqa: F401

from rl_core.sandbox import Sandbox, boxes, programs_main

pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.skipif(os.geteuid() != 0, reason="not root: a box needs other users"),
]
DOUBLE = "def f(x): return x * 2"
CPP = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2 << '\\n'; }"
# Open with any user: the image's files, which hold no secret.
READABLE = {"/etc/passwd"}


@pytest.fixture
def one_box(server):  # noqa: F811
    """Two boxes for a process: one for programs."""
    boxes.configure(box_driver="kubernetes", max_boxes=2)
    return server


def run(code, **options):
    return asyncio.run(Sandbox().run(code, **{"timeout_s": 20} | options))


def in_box(server, *argv, stdin=None):  # noqa: F811
    """Runs a command as root in the only machine."""
    [pod] = server.pods.values()
    done = subprocess.run(pod.machine.line(argv), input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout


def test_programs_and_tests_give_the_same_as_on_this_machine(one_box):
    tests = ["assert f(2) == 4", "assert f(3) == 7", {"call": "f(2)", "expected": 4}]
    called = run(DOUBLE, tests=tests)
    assert (called.status, called.passed) == ("wrong", [True, False, True])
    assert called.failures[1] == "assert f(3) == 7: f(3) gave 6"
    pairs = run("print(int(input()) * 2)", tests=[("2", "4"), ("3", "7"), ("x", "1")])
    assert pairs.passed == [True, False, False] and "invalid literal" in pairs.failures[2]
    compiled = run(CPP, tests=[("2", "4")], language="cpp")
    assert (compiled.status, run("int", language="cpp").status) == ("ok", "syntax")
    with pytest.raises(ValueError, match="the tests are broken: SyntaxError"):
        run(DOUBLE, tests=["assert f("])
    # The answer is longer than the output of a command.
    long = run("print(input() * 250_000)", tests=[(str(n), str(n) * 250_000) for n in range(4)])
    assert long.status == "ok"
    assert run("while True: pass", timeout_s=0.5).status == "timeout"
    assert one_box.seen.count("create") == 1


# Programs that leave or take something, by name. The next program is LOOK.
HOSTILE = {
    "a process that hides": """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        for n in range(3, 64):
            try: os.close(n)
            except OSError: pass
        while True: time.sleep(0.1)
    os._exit(0)
""",
    "processes that fork": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "files for others": """
import os, site, sys
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/", "/rl_core", "/rl_core/code",
               "/rl_core/code/rl_core/sandbox", "/rl_core/programs", "/etc", "/root",
               os.path.expanduser("~root"), *sys.path, *site.getsitepackages()):
    for name in ("colorsys.py", "any.pth", "left"):
        try:
            open(os.path.join(folder, name), "w").write("print('ESCAPED')")
            print("ESCAPED", folder)
        except OSError:
            pass
""",
    "a folder that is deep and closed": """
import os
for n in range(3000):
    os.mkdir("d"); os.chdir("d")
os.chmod(".", 0)
""",
    "a socket to the service": """
import socket
try: socket.create_connection(("127.0.0.1", 8123)); print("ESCAPED")
except OSError: pass
""",
    "memory and descriptors of others": """
import glob, os
for path in glob.glob("/proc/[0-9]*"):
    if os.path.basename(path) != str(os.getpid()):
        for name in ("mem", "environ", "fd/0", "root/etc/passwd"):
            try: open(f"{path}/{name}", "rb").read(1); print("ESCAPED", path, name)
            except OSError: pass
        try: os.kill(int(os.path.basename(path)), 9); print("ESCAPED kill", path)
        except OSError: pass
""",
    "the programs of others": """
import os
for folder in ("/tmp", "/rl_core/programs", "/rl_core"):
    try: print("ESCAPED", os.listdir(folder))
    except OSError: pass
""",
}
LOOK = """
import os
users = set()
for name in filter(str.isdigit, os.listdir("/proc")):
    users.add(os.stat(f"/proc/{name}").st_uid)
print(sorted(users), os.listdir("."))
import colorsys
"""


def test_a_program_leaves_nothing_to_the_next_in_its_box(one_box):
    assert run("print(1)").stdout == "1\n"
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 8123)); time.sleep(60)"
    [pod] = one_box.pods.values()
    service = subprocess.Popen(pod.machine.line(["python3", "-c", listen]))
    for name, code in HOSTILE.items():
        done = run(code, timeout_s=1)
        assert "ESCAPED" not in done.stdout, (name, done)
    service.kill()
    service.wait()
    assert run(LOOK).stdout == "[0, 20000] []\n"
    assert in_box(one_box, "find", "/", "-xdev", "-uid", "+19999") == ""
    assert one_box.seen.count("create") == 1


def test_a_box_that_cannot_be_cleaned_or_ends_is_replaced(one_box):
    assert run("print(1)").stdout == "1\n"
    busy = "/rl_core/programs/busy"
    in_box(one_box, "sh", "-c", f"mkdir {busy} && mount -t tmpfs none {busy}")
    assert run("print(2)").stdout == "2\n"
    assert run("print(3)").stdout == "3\n" and one_box.seen.count("create") == 2

    async def evict_during(number):
        running = asyncio.ensure_future(Sandbox().run("import time\ntime.sleep(2)\nprint(4)"))
        for _ in range(number):
            await asyncio.sleep(1.5)
            one_box.evict(next(iter(one_box.pods)))
        return await running

    assert asyncio.run(evict_during(1)).stdout == "4\n"
    other = Sandbox(image="other:1")
    assert asyncio.run(other.run("print(5)")).stdout == "5\n"
    assert [pod.manifest["spec"]["containers"][0]["image"] for pod in one_box.pods.values()] == [
        "other:1"
    ]
    assert one_box.most == 1


def test_boxes_of_programs_and_of_episodes_share_the_bound(one_box):
    async def work():
        async with await boxes.open({}) as box:
            many = await asyncio.gather(*(Sandbox().run(f"print({n})") for n in range(3)))
            return [(await box.exec("echo box")).stdout, *(each.stdout for each in many)]

    assert asyncio.run(work()) == ["box\n", "0\n", "1\n", "2\n"] and one_box.most == 2
    boxes.configure(box_driver="kubernetes", max_boxes=1)
    assert run("print(1)").stdout == "1\n"
    with pytest.raises(RuntimeError, match=r"one box, and programs of rewards have it; give at le"):
        asyncio.run(boxes.open({}))


def test_what_programs_in_boxes_need_is_named(server, env_of, monkeypatch):  # noqa: F811
    """Before a model loads if this machine lacks it, otherwise when the first box opens."""
    env = env_of("from rl_core.sandbox import Sandbox\nsandbox = Sandbox()\ndef reward_fn(): ...")
    server.faults["list"] = [(401, {}, "Unauthorized")]
    with pytest.raises(OSError, match="401: Unauthorized"):
        env.check_machine()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(RuntimeError, match=r"need pyseccomp: pip install 'rl_core\[sandbox\]'"):
        env.check_machine()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            programs_main.prepare()
        except OSError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"root as its user; it has no libseccomp and the user 65534" in os.read(reading, 1000)


@pytest.mark.slow
def test_hostile_programs_get_nothing_in_a_box(server):  # noqa: F811
    async def work(names):
        sandbox = Sandbox()
        return await asyncio.gather(*(attack(sandbox, hostile, names) for hostile in ALL))

    with host() as names:
        ends = asyncio.run(work(names))
    opened = {hostile.name for hostile, (end, _) in zip(ALL, ends, strict=True) if end == "open"}
    assert opened == READABLE
    assert server.most == 8
    # A busy machine may clean a box too slowly, which then is replaced.
    assert server.seen.count("create") < 16
