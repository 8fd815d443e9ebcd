"""Programs that try to get out, to cheat or to do harm. Each prints ESCAPED if it got something
forbidden, or is given tests that it must not pass. `python tests/hostile.py` prints a table of
the results.

{port}, {secret_file}, {unix} and {pid} stand for things of the host that they shall not reach: a
TCP and UDP port that listens, a file that anybody may read, a unix socket, a process. {nap}:
seconds that no other process sleeps.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_core.sandbox import Sandbox
from rl_core.sandbox.isolation import LEVELS

SECRET = "k7Qx2-expected-value"
TESTS = [
    f"assert f(1) == {SECRET!r}",
    {"call": "f(2)", "expected": [SECRET, 4]},
    "assert f(3) == 41",
    "assert f(4)",
]
# Type of a Unix socket -> the name of the host's socket that it would reach. The kernel takes
# SOCK_RAW for SOCK_DGRAM.
UNIX_SOCKETS = {
    "SOCK_STREAM": "unix",
    "SOCK_SEQPACKET": "unix_seqpacket",
    "SOCK_DGRAM": "unix_dgram",
    "SOCK_RAW": "unix_dgram",
}


@dataclass
class Hostile:
    name: str
    code: str
    language: str = "python"
    tests: list | None = None
    timeout_s: float = 0.6


ALL: list[Hostile] = []


def add(names: str, *codes: str, **more) -> None:
    """Adds programs by their names. A word after `|` behind a name is the program's language."""
    for name, code in zip(names.split(","), codes, strict=True):
        name, _, language = (word.strip() for word in name.partition("|"))
        ALL.append(Hostile(name, code, **({"language": language} if language else {}) | more))


def tries(*lines: str, imports: str = "os, sys, socket, ctypes, subprocess, time") -> str:
    """A program that prints ESCAPED unless one of its lines raises."""
    body = "\n".join(f"    {line}" for line in "\n".join(lines).split("\n"))
    return (
        f"import {imports}\nlibc = ctypes.CDLL(None, use_errno=True)\ndef must(result):\n    if "
        "result < 0: raise OSError\n"
        f"    return result\ntry:\n{body}\n    print('ESCAPED')\nexcept Exception as error:\n    "
        "print(type(error).__name__)\n"
    )


# Programs that decide a test: __eq__, exits, patches, forged answers.
CLASS = "class A{base}:\n    def {method}(self, *a): return {value}\ndef f(x): return A()\n"
add(
    "eq of an object, eq of an int, eq of a str, eq of a list, bool of an object, iter and len of "
    "an object, getattr of an object",
    CLASS.format(base="", method="__eq__", value="True"),
    CLASS.format(base="(int)", method="__eq__", value="True"),
    CLASS.format(base="(str)", method="__eq__", value="True"),
    CLASS.format(base="(list)", method="__eq__", value="True"),
    "class A:\n    def __bool__(self): return True\n    def __eq__(self, o): return True\ndef "
    "f(x): return A()",
    f"class A:\n    def __iter__(self): return iter([{SECRET!r}])\n    def __len__(self): return "
    "1\ndef f(x): return A()",
    "class A:\n    def __getattr__(self, n): return lambda *a: True\ndef f(x): return A()",
    tests=TESTS,
)
add(
    "sys.exit while loading, sys.exit in a call, os._exit while loading, os._exit in a call, exit "
    "in atexit, "
    "exit in a thread, abort,"
    "SIGKILL to itself, exec of true, raise KeyboardInterrupt, closing all files, a segmentation "
    "fault, an endless loop in a call",
    "import sys; sys.exit(0)",
    "import sys\ndef f(x): sys.exit(0)",
    "import os; os._exit(0)",
    "import os\ndef f(x): os._exit(0)",
    "import atexit, os, sys\natexit.register(os._exit, 0)\nsys.exit(0)",
    "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "import os; os.abort()",
    "import os; os.kill(os.getpid(), 9)",
    "import os; os.execv('/bin/true', ['true'])",
    "def f(x): raise KeyboardInterrupt",
    "import os; os.closerange(0, 100)",
    "import ctypes\ndef f(x): return ctypes.string_at(1)",
    "def f(x):\n    while True: pass",
    tests=TESTS,
)
FIND = (
    "    for o in found:\n        if isinstance(o, str) and o.startswith('k7Qx2-exp'): return o\n"
)
add(
    "patching builtins, patching AssertionError, patching the checker, patching the encoder, "
    "patching json, "
    "names of builtins,"
    "a module called math, the tests by gc, the tests in frames, the tests in the heap, the tests "
    "on disk, "
    "the tests in arguments,"
    "a forged answer, a forged verdict, frames on every file, a signal handler that answers, "
    "settrace on the server loop",
    "import builtins\nfor n in ('isinstance', 'len', 'all', 'type'): setattr(builtins, n, lambda "
    "*a: True)\ndef f(x): return 0",
    "import builtins\nbuiltins.AssertionError = Warning\n__debug__\ndef f(x): raise AssertionError",
    "import rl_core.sandbox.checker as c, rl_core.sandbox.values as v\n"
    "c.is_same = v.is_same = lambda a, b: True\nc.run_test = lambda *a: {'passed': True}\ndef "
    "f(x): return 0",
    "import rl_core.sandbox.runner as r\nr.encode = lambda v: {'passed': True, 'value': True}\ndef "
    "f(x): return 0",
    "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 0",
    "def sorted(*a): return True\ndef isinstance(*a): return True\nrepr = len = abs = sorted\ndef "
    "f(x): return 0",
    "import sys, types\nsys.modules['math'] = math = types.SimpleNamespace(isclose=lambda *a: "
    "True)\ndef f(x): return 0",
    "import gc\ndef f(x):\n    found = [v for o in gc.get_objects() if isinstance(o, dict) for v "
    f"in list(o.values())]\n{FIND}",
    "import sys\ndef f(x):\n    found, frame = [], sys._getframe()\n    while frame:\n"
    f"        found += list(frame.f_locals.values()); frame = frame.f_back\n{FIND}",
    "import ctypes, re\nlibc = ctypes.CDLL(None)\nlibc.sbrk.restype = ctypes.c_void_p\nend = "
    "libc.sbrk(0)\n"
    "def f(x):\n    data = ctypes.string_at(end - 500_000, 500_000)\n"
    "    found = re.search(b'k7Qx2' + b'-expected-value', data)\n    return found and "
    "found[0].decode()",
    "import os\ndef f(x):\n    for folder, _, files in os.walk('/tmp'):\n        for name in "
    "files:\n"
    "            text = open(os.path.join(folder, name), errors='replace').read()\n"
    "            if 'k7Qx2-' in text: return text[text.index('k7Qx2-'):][:20]\n",
    f"import sys\ndef f(x):\n    found = [*sys.argv, *map(str, vars(sys).values())]\n{FIND}",
    "import socket, json\ns = socket.socket(fileno=4)\ndata = json.dumps({'value': "
    "True}).encode()\n"
    "for _ in range(9): s.sendall(len(data).to_bytes(4, 'big') + data)",
    "import socket, json\ns = socket.socket(fileno=3)\ndata = json.dumps({'passed': True, "
    "'status': 'ok', 'reason': ''}).encode()\n"
    "for _ in range(9): s.sendall(len(data).to_bytes(4, 'big') + data)\ndef f(x): return 0",
    "import os, json\ndata = json.dumps({'passed': True, 'exit': 0, 'value': True}).encode()\nfor "
    "fd in range(64):\n"
    "    try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n    except OSError: pass\ndef "
    "f(x): return 0",
    "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0)); "
    "signal.setitimer(signal.ITIMER_REAL, .01)\n"
    "def f(x):\n    while True: pass",
    "import sys\ndef trace(frame, event, arg):\n    frame.f_locals['answer'] = True\n    return "
    "trace\nsys.settrace(trace)\ndef f(x): return 0",
    tests=[*TESTS[:3], "assert math.isclose(f(4), 5)", "assert sorted([f(5), 1]) == [1, 2]"],
)
REDUCE = "import os\nclass A:\n    def __reduce__(self): return (os.system, ('touch /tmp/out',))\n"
add(
    "an object with __reduce__, bytes of a pickle, a value nested 100000 deep, a list that holds "
    "itself, "
    "300 MB in a value,"
    "an int of 10 million digits, a frame of garbage, a frame that never ends, a frame of 4 GB, an "
    "unknown tag, "
    "an unhashable key,"
    "infinity, nan, a generator without end, a coroutine",
    REDUCE + "def f(x): return A()",
    REDUCE + "import pickle\ndef f(x): return pickle.dumps(A())",
    "def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "def f(x): return 'a' * 300_000_000",
    "def f(x): return 10 ** 10_000_000",
    "import socket\ns = socket.socket(fileno=4)\ns.sendall(b'\\0\\0\\0\\5{{{{{')\ndef f(x): pass",
    "import socket, time\ns = socket.socket(fileno=4)\ns.sendall(b'\\0\\0\\1\\0x')\ntime.sleep(99)",
    "import socket\ns = socket.socket(fileno=4)\ns.sendall(b'\\xff' * 4096)\ndef f(x): pass",
    'import socket\ns = socket.socket(fileno=4)\nd = b\'{"value": {"os.system": "id"}}\'\n'
    "for _ in range(9): s.sendall(len(d).to_bytes(4, 'big') + d)",
    'import socket\ns = socket.socket(fileno=4)\nd = b\'{"value": {"dict": [[[], 1]]}}\'\n'
    "for _ in range(9): s.sendall(len(d).to_bytes(4, 'big') + d)",
    "def f(x): return float('inf')",
    "def f(x): return float('nan')",
    "def f(x):\n    while True: yield 1",
    "async def f(x): return 1",
    tests=[*TESTS[:3], "assert abs(f(4) - 5) < 1e-6", "assert list(f(5))[0] == 5"],
)
add(
    "another test's output, all outputs at once, output and exit status 1",
    "print('one')",
    "print('one\\ntwo\\nthree')",
    "print('two'); raise SystemExit(1)",
    tests=[("2", "two"), ("3", "three")],
)

# Network.
SEND = "{connect}\ns.send(b'x')"
for family, create, connect in [
    ("TCP", "socket.socket()", "s.settimeout(.3); s.connect(('127.0.0.1', {port}))"),
    (
        "TCP over IPv6",
        "socket.socket(socket.AF_INET6)",
        "s.settimeout(.3); s.connect(('::1', {port}))",
    ),
    (
        "UDP",
        "socket.socket(type=socket.SOCK_DGRAM)",
        "s.connect(('127.0.0.1', {port})); s.send(b'escaped'); s.settimeout(.3); s.recv(9)",
    ),
    ("a unix socket", "socket.socket(socket.AF_UNIX)", "s.connect({unix!r})"),
    (
        "an abstract unix socket",
        "socket.socket(socket.AF_UNIX)",
        "s.connect('\\0rl_core_hostile_unix_{port}')",
    ),
    (
        "a raw socket",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "s.connect(('127.0.0.1', 0))",
    ),
    ("a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)", "s.bind(('lo', 0))"),
    ("a netlink socket", "socket.socket(16, socket.SOCK_RAW, 9)", "s.bind((0, 0))"),
    ("a vsock socket", "socket.socket(40, socket.SOCK_STREAM)", "s.connect((2, 1024))"),
    (
        "a kernel crypto socket",
        "socket.socket(38, socket.SOCK_SEQPACKET)",
        "s.bind(('hash', 'sha256'))",
    ),
]:
    add(f"network: {family}", tries(f"s = {create}", SEND.format(connect=connect)))
# Every way to give an address to each type of Unix socket, separate or of a pair. Data at the other
# end of a pair went to nobody else.
UNIX = """import socket
kind, path, abstract = {kind}, {{{at}!r}}, '\\0rl_core_hostile_{at}_{{port}}'
def came_back(other):
    try: return bool(other.recv(9))
    except OSError: return False
def attempts(s, to):
    yield lambda: s.sendto(b'x', to)
    yield lambda: s.sendmsg([b'x'], [], 0, to)
    yield lambda: s.connect(to)
    yield lambda: s.bind(abstract + '_of_a_program')
for to in (path, abstract):
    for number in range(4):
        try:
            s, other = {ends}
            other.setblocking(False)
            list(attempts(s, to))[number]()
        except OSError as error:
            print(type(error).__name__)
        else:
            if not came_back(other): print('ESCAPED')
"""
for kind, at in UNIX_SOCKETS.items():
    alone = "(socket.socket(socket.AF_UNIX, kind), socket.socket(socket.AF_UNIX, kind))"
    for kind_of, ends in (
        ("a Unix socket", alone),
        ("a pair of Unix sockets", "socket.socketpair(type=kind)"),
    ):
        add(
            f"{kind_of} with addresses: {kind}",
            UNIX.format(kind=f"socket.{kind}", at=at, ends=ends),
        )
add(
    "network: DNS, network: curl, network: bash | bash, network: raw system calls",
    tries("socket.getaddrinfo('example.com', 80)"),
    tries(
        "assert subprocess.run(['curl', '-s', '-m', '1', 'http://127.0.0.1:{port}/'], "
        "capture_output=True).returncode in (0, 52, 56)"
    ),
    "(echo x > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo ESCAPED",
    tries(
        "s = must(libc.syscall(41, 2, 1, 0))",
        "a = (2).to_bytes(2, 'little') + ({port}).to_bytes(2, 'big') + bytes([127, 0, 0, 1]) + "
        "bytes(8)",
        "must(libc.connect(s, a, 16))",
    ),
)

# Files, processes and the kernel.
add(
    "a file of the host, a file of the host by a symlink, a file of the host "
    "by a hard link,"
    "/etc/passwd, the owner's environment, the owner's memory, "
    "/proc/1/root, "
    "core_pattern, a cgroup's release_agent, a write into the interpreter, a write into /usr,"
    "any writable folder, a device by mknod, a disk device, kernel memory, the owner's "
    "files by handle, secrets in the environment",
    tries("open({secret_file!r}).read()"),
    tries("os.symlink({secret_file!r}, 'x')", "open('x').read()"),
    tries("os.link({secret_file!r}, 'x')", "open('x').read()"),
    tries("open('/etc/passwd').read()"),
    tries("open('/proc/{pid}/environ', 'rb').read()"),
    tries("open('/proc/{pid}/mem', 'rb')"),
    tries("os.listdir('/proc/1/root/')"),
    tries("open('/proc/sys/kernel/core_pattern', 'r+')"),
    tries(
        "import glob",
        "[open(p, 'r+') for p in glob.glob('/sys/fs/cgroup/**/release_agent') or 1 / 0]",
    ),
    tries("open(sys.base_prefix + '/lib/evil.py', 'w')"),
    tries("open('/usr/evil', 'w')"),
    tries(
        "home = os.path.realpath('.')",
        "import glob; found = [p for n in range(4) for p in glob.glob('/*' * n + '/') if "
        "os.access(p, os.W_OK)]",
        "found = [p for p in found if not os.path.realpath(p).startswith(home)]",
        "found[0]; open(found[0] + '/evil', 'w'); os.unlink(found[0] + '/evil')",
    ),
    tries("os.mknod('disk', 0o60666, os.makedev(254, 0))", "open('disk', 'rb').read(1)"),
    tries("import glob", "[open(p, 'rb').read(1) for p in glob.glob('/dev/[svn]d[a-z]') or 1 / 0]"),
    tries("[open(p, 'rb').read(1) for p in ('/dev/mem', '/dev/kmem', '/dev/port')]"),
    tries("must(libc.syscall(304, -100, bytes(64), 0))"),
    tries("1 / any('SECRET' in name for name in os.environ)"),
)
add(
    "a signal to the owner, a signal to the supervisor, "
    "a signal to everybody, ptrace of the owner, ptrace of the supervisor,"
    "process_vm_readv, a pidfd of the owner, a new user namespace, clone into a user namespace, "
    "joining a namespace, a mount, chroot,"
    "setuid 0, a set-user-ID program, regaining capabilities, bpf, perf_event_open, io_uring, "
    "userfaultfd, "
    "the keyring, kexec,"
    "a kernel module, reboot, personality, a seccomp listener, raising its limits, the clock, a "
    "memfd that is run",
    tries("os.kill({pid}, 9)"),
    tries("1 / os.getppid()", "os.kill(os.getppid(), 9)"),
    # It succeeds where every signal was refused: host() looks after its victim.
    tries("os.kill(-1, 9)", "1 / 0"),
    tries("must(libc.ptrace(16, {pid}, 0, 0))"),
    tries("must(libc.ptrace(16, os.getppid(), 0, 0))"),
    tries(
        "v = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)",
        "must(libc.process_vm_readv({pid}, v, 1, v, 1, 0))",
    ),
    tries("import signal", "signal.pidfd_send_signal(os.pidfd_open({pid}), 9)"),
    tries("must(libc.unshare(0x10000000))"),
    tries("must(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))"),
    tries("must(libc.setns(os.open('/proc/{pid}/ns/net', 0), 0))"),
    tries("must(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))"),
    tries("os.chroot('/tmp')"),
    tries("os.setresuid(0, 0, 0)"),
    tries(
        "import shutil",
        "out = subprocess.run([shutil.which('su') or '/bin/su', '-c', 'id -u'], capture_output=True, text=True)",
        "1 / (out.stdout.strip() == '0')",
    ),
    tries(
        "must(libc.syscall(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)))"
    ),
    tries("must(libc.syscall(321, 0, bytes(128), 128))"),
    tries("must(libc.syscall(298, bytes(128), 0, -1, -1, 0))"),
    tries("must(libc.syscall(425, 4, bytes(120)))"),
    tries("must(libc.syscall(323, 0))"),
    tries("must(libc.syscall(250, 0, -3, 1))"),
    tries("must(libc.syscall(246, 0, 0, None, 0))"),
    tries("must(libc.syscall(175, b'x', 1, b''))"),
    tries("must(libc.syscall(169, 0xfee1dead, 672274793, 0x1234567, 0))"),
    tries("must(libc.syscall(135, 0x0040000))"),
    tries("must(libc.syscall(440, 0, 0, 0, 0, 0)); must(libc.syscall(438, 3, 0, 0))"),
    tries("import resource", "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))"),
    tries("time.clock_settime(0, 0)"),
    tries(
        "fd = os.memfd_create('x')",
        "os.write(fd, open('/bin/true', 'rb').read())",
        "os.execve(fd, ['x'], {})",
    ),
)

# Using up, and leaving behind.
SPIN = "while True: {}"
add(
    "a fork bomb, a fork bomb in bash | bash, a fork bomb in C++ | cpp, a thread bomb, memory by "
    "lists, "
    "memory by mmap, memory by many processes,"
    "a big file, a sparse file of 1 TB, many files, many files open, pipes full of data, SysV "
    "shared memory, "
    "POSIX shared memory,"
    "message queues, a stdout flood, a stderr flood, a flood from yes | bash, a stdout that is "
    "never read",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "f() { f | f & }; f; sleep 9",
    "#include <unistd.h>\nint main() { while (1) fork(); }",
    "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, "
    "args=(99,)).start()\n"
    "    except RuntimeError: time.sleep(.01)",
    "x = []\nwhile True: x.append(' ' * 10**7)",
    "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 26)); x[-1].write(b'x' * (1 << "
    "26))",
    "import os\nfor _ in range(4): os.fork()\nx = bytearray(300 << 20)\nimport time; "
    "time.sleep(99)",
    tries("f = open('x', 'wb')", "while f.tell() < 1 << 30: f.write(bytes(1 << 20))"),
    tries("f = open('x', 'wb')", "f.truncate(1 << 40)"),
    tries("for n in range(10**9): open(str(n), 'w').close()"),
    tries("x = [open('/dev/null') for _ in range(10_000)]"),
    tries(
        "for _ in range(2000):\n    r, w = os.pipe(); os.set_blocking(w, False); os.write(w, "
        "bytes(60000))"
    ),
    tries("n = must(libc.shmget(0x5ec, 1 << 20, 0o1666))"),
    tries(
        "from multiprocessing import shared_memory",
        "shared_memory.SharedMemory('rl_core_hostile', True, 1 << 20)",
    ),
    tries("must(libc.syscall(240, b'rl_core_hostile', 0o102, 0o666, None))"),
    SPIN.format("print('x' * 9999)"),
    "import sys\n" + SPIN.format("print('x' * 9999, file=sys.stderr)"),
    "yes",
    "import sys, time\nprint('x' * 100); sys.stdout.flush(); time.sleep(99)",
)
add(
    "a daemon by two forks, a child in another session, a background process in bash | bash, "
    "zombies, "
    "a thread that does not end,"
    "an endless loop, a sleep, all signals blocked, SIGXCPU and SIGTERM ignored, a regular "
    "expression in C,"
    "a power in C, sum of an endless iterator in C, a lock that is never free, a read of stdin, "
    "endless recursion, recursion through C",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: "
    "time.sleep({nap})\n    os._exit(0)",
    "import subprocess\nsubprocess.Popen(['sleep', '{nap}'], start_new_session=True)",
    "nohup sleep {nap} > /dev/null 2>&1 & disown; exit 0",
    "import os, time\nfor _ in range(10):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(.1)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=({nap},)).start()",
    SPIN.format("pass"),
    "import time; time.sleep({nap})",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n" + SPIN.format("pass"),
    "import signal\nfor s in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM): signal.signal(s, "
    "signal.SIG_IGN)\n" + SPIN.format("pass"),
    "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "print(len(str(9 ** (9 ** 9) % 7)))",
    "import itertools; sum(itertools.repeat(0))",
    "import threading; a = threading.Lock(); a.acquire(); a.acquire()",
    "import sys; sys.stdin.read(); print('ended')",
    "def f(x): return f(x)\nf(1)",
    "import ctypes\nlibc = ctypes.CDLL(None)\nC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, "
    "ctypes.c_void_p)\n"
    "a = (ctypes.c_int * 2)(2, 1)\ndef g(x, y):\n    libc.qsort(a, 2, 4, C(g)); return 0\ng(0, 0)",
    timeout_s=0.5,
)  # fmt: skip
# The compiler.
add(
    "C++ that includes a file of the host, C++ that embeds a file of the host, "
    "C++ that includes /dev/zero, C++ templates without end,"
    "C++ that makes a 10 GB array, C++ that reads out of bounds, C++ that divides by zero",
    '#include "{secret_file}"\nint main() {}',
    '#include <cstdio>\nextern char d[];\nasm("d: .incbin \\"{secret_file}\\"");\nint main() { '
    'puts("ESCAPED"); }',
    '#include "/dev/zero"\nint main() {}',
    "template<int N> struct A { enum { v = A<N + 1>::v + A<N + 2>::v }; };\nint main() { return "
    "A<0>::v; }",
    "#include <vector>\n#include <cstdio>\nint main() { std::vector<char> v(10000000000ull, 1); "
    "puts(\"ESCAPED\"); }",
    "int main() { volatile int *p = (int *)16; return *p; }",
    "int main() { volatile int z = 0; return 7 / z; }",
    language="cpp",
)  # fmt: skip
# Attempts of a second reader.
FRAMES = """import json, socket
s = socket.socket(fileno=4)
def out(what):
    data = what if isinstance(what, bytes) else json.dumps(what).encode()
    s.sendall(len(data).to_bytes(4, 'big') + data)
out({'value': None})
"""
add(
    "StopIteration in a map, members that are equal but of another type, changes of arguments that "
    "were not given,"
    "errors of every kind, objects that it does not have, JSON nested 8 million deep, keys of one "
    "hash,"
    "its names as those of the tests",
    "def f(x): raise StopIteration",
    "def f(x): return {(True,)} if x < 3 else {(True,): {1.0}}",
    FRAMES + "for _ in range(9): out({'value': 5, 'changed': {'-1': [6], '0': [6], '1': [6]}})",
    FRAMES
    + "for kind in ('SystemExit', 'GeneratorExit', 'StopIteration', 'ExceptionGroup', 'type', '__import__'):\n"
    "    out({'error': [kind], 'text': 'x'})\nfor kind in ([], 'x', None, 5): out({'error': kind, "
    "'text': 'x'})",
    FRAMES
    + "for number in (-1, 0, 1e300, '__class__', None): out({'object': number})\nfor other in (5, [], None, {}): out(other)",
    FRAMES
    + "for n in (900, 100_000, 8_000_000, 9, 9): out(b'{\"value\": ' + b'[' * n + b']' * n + b'}')",
    "def f(x): return {n * (2 ** 61 - 1): 1 for n in range(40_000)}",
    "import sys\nsys.modules['tests'] = sys.modules['checker'] = sys.modules['program']\n__name__ "
    "= 'tests'\nCASES = []\ndef f(x): return CASES",
    tests=[
        "CASES = [(1, 2), (3, 4)]\nassert all(map(lambda case: f(case[0]) == case[1], CASES))",
        {"call": "f(1)", "expected": {(1,)}},
        {"call": "f(3)", "expected": {(1,): {1}}},
        "a, b = [1], [2]\nassert f(a) == 5 and b == [6]",
        "assert f(5)[0] == 7",
        "assert f(6).x == 1 or f(7)[0]",
    ],
)
add(
    "an answer written into its stdin",
    "import os\nfor fd in (0, 3): os.write(fd, b'two')",
    tests=[("2", "two")],
)
add(
    "a signal to its process group, the limits of a process of the host, the priority of a process "
    "of the host,"
    "the cores of a process of the host, a terminal that others see, 32-bit system "
    "calls, x32 system calls,"
    "its parent's death unheeded, an urgent byte, a pair of sockets of another family,"
    "the mode of a file of the host, its output in a cycle of sockets, a folder closed "
    "to its owner, folders 3000 deep, C++ that looks for a file of the host | cpp",
    tries("os.kill(0, 9)", "1 / 0"),  # host() and the other programs suffer if it gets through
    tries("import resource", "resource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0))"),
    tries("os.setpriority(os.PRIO_PROCESS, {pid}, 19)"),
    tries("os.sched_setaffinity({pid}, os.sched_getaffinity(0))"),
    tries("os.openpty()"),
    tries("import mmap", "m = mmap.mmap(-1, 4096, prot=7)",
          "m.write(bytes.fromhex('53b866010000bb02000000b90100000031d2cd805bc3'))  # socket(2, 1, "
          "0) by int 0x80",
          "must(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"),
    tries("must(libc.syscall(0x40000000 + 41, 2, 1, 0))"),
    tries("must(libc.syscall(157, ctypes.c_long((1 << 32) + 1), 0, 0, 0, 0))"),
    tries("a, b = socket.socketpair()", "a.send(b'x', socket.MSG_OOB)"),
    tries("must(libc.socketpair(30, 1, 0, (ctypes.c_int * 2)()))"),
    tries("os.chmod({own_file!r}, 0o777)", "1 / (os.stat({own_file!r}).st_mode & 0o7)"),
    "import os, socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [a.fileno(), "
    "b.fileno(), 0, 1, 2, 3])\nos._exit(0)",
    "import os\nos.mkdir('left_{nap}'); open('left_{nap}/x', 'w').close(); os.chmod('left_{nap}', "
    "0)",
    "import os\nfor _ in range(3000): os.mkdir('left_{nap}'); os.chdir('left_{nap}')",
    '#include <cstdio>\n#if __has_include("{secret_file}")\nint main() { puts("ESCAPED"); '
    '}\n#else\nint main() {}\n#endif',
)  # fmt: skip


@contextmanager
def host():
    """Things of the host: what {names} in programs stand for."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_core_hostile_")))
        folder.chmod(0o755)
        (folder / "secret").write_text("the host's secret")
        ours = folder / "own"  # Belongs to the programs' user, where there is no user namespace.
        ours.touch(mode=0o600)
        if os.geteuid() == 0:
            os.chown(ours, 65534, 65534)
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        unix = unix_sockets(stack, folder, port)

        def echo():
            with suppress(OSError):
                while True:
                    data, sender = udp.recvfrom(99)
                    if not data:
                        return
                    udp.sendto(data, sender)

        thread = threading.Thread(target=echo)
        thread.start()
        victim = stack.enter_context(sleeper())
        try:
            yield {
                "nap": 3600 + os.getpid(),
                "port": port,
                "secret_file": str(folder / "secret"),
                "own_file": str(ours),
                **unix,
                "pid": victim.pid,
            }
        finally:
            with socket.socket(type=socket.SOCK_DGRAM) as stop:
                stop.sendto(b"", ("127.0.0.1", port))
            thread.join()
            for end in (tcp, udp):
                end.close()


def unix_sockets(stack: ExitStack, folder: Path, port: int) -> dict[str, str]:
    """Sockets of the host of each type, by a path and by an abstract name: what stands for the
    paths in programs."""
    paths = {}
    for kind, at in UNIX_SOCKETS.items():
        if at in paths:
            continue
        paths[at] = str(folder / at)
        abstract = f"\0rl_core_hostile_{at}_{port}"
        for address in (paths[at], abstract):
            end = stack.enter_context(socket.socket(socket.AF_UNIX, getattr(socket, kind)))
            end.bind(address)
            if kind != "SOCK_DGRAM":
                end.listen()
        os.chmod(paths[at], 0o777)
    return paths


@contextmanager
def sleeper():
    """A process of the host, as nobody where the sandbox is nobody too: only isolation protects
    it."""
    who = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen(["sleep", "600"], cwd="/", **who)
    try:
        yield process
        assert process.poll() is None, "a program has ended a process of the host"
    finally:
        process.kill()
        process.wait()


def started(level: str) -> Sandbox:
    """A sandbox of this level. A machine without it says so, and skips the test unless
    RL_CORE_SANDBOX_LEVELS names the level."""
    made = Sandbox(level=level, workers=8)
    must_have = os.environ.get("RL_CORE_SANDBOX_LEVELS", "").split()
    try:
        made.start()
    except RuntimeError as error:
        assert f"({level}: " in str(error)
        assert level not in must_have, f"RL_CORE_SANDBOX_LEVELS names {level}: {error}"
        pytest.skip(f"no sandbox level {level}: {error}")
    assert made.has_seccomp or level not in must_have, f"{level} has started without seccomp"
    return made


def filled(code: str, names: dict) -> str:
    """The code with what {names} stand for."""
    for name, value in names.items():
        code = code.replace("{" + name + "!r}", repr(value)).replace("{" + name + "}", str(value))
    return code


async def attack(sandbox, hostile: Hostile, names: dict) -> tuple[str, str]:
    """`stopped` or `open`, and the status."""
    code = filled(hostile.code, names)
    options = {"language": hostile.language, "timeout_s": hostile.timeout_s}
    result = await sandbox.run(code, tests=hostile.tests or (), **options)
    escaped = "ESCAPED" in result.stdout or any(result.passed)
    return ("open" if escaped else "stopped"), result.status


async def attack_all(sandbox) -> tuple[int, dict[str, tuple[str, str]]]:
    """The sleeping process of {nap}, and the result of each program by name."""
    with host() as names:
        values = await asyncio.gather(*(attack(sandbox, hostile, names) for hostile in ALL))
    return names["nap"], {hostile.name: result for hostile, result in zip(ALL, values, strict=True)}


def table() -> str:
    columns = {}
    for level in LEVELS:
        sandbox = Sandbox(level=level)
        _, columns[level] = asyncio.run(attack_all(sandbox))
        sandbox.close()
    lines = [f"| program | {' | '.join(LEVELS)} |", "|---|" + "---|" * len(LEVELS)]
    for hostile in ALL:
        cells = [
            f"{word}, {status}"
            for word, status in (columns[level][hostile.name] for level in LEVELS)
        ]
        lines.append(f"| {hostile.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    print(table())
