"""Boxes by bubblewrap: a bwrap for each, with box_init.py as its first process. docs/sandbox.md"""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rl_core.errors import keep_ends
from rl_core.sandbox import isolation
from rl_core.sandbox.box_settings import BoxEnded, BoxSettings, ExecResult, make_upload
from rl_core.sandbox.values import MAX_FRAME

START_S = 60.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/rl_core.pem"  # An image's box has this machine's certificates here.
HOST_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
BOUND = "/bound"  # The first root folder has settings.binds here.
GRACE_S = 30.0  # beyond a command's own deadline, until its box counts as lost
TRANSFER_S = 120.0
END_S = 2.0
OPEN_FILES = 65536
BEGIN = (
    "import sys, json; sys.path.insert(0, {path!r}); from rl_core.sandbox.box_init import main; "
    "main(json.loads(sys.argv[1]))"
)
JOIN = BEGIN.replace("main", "join")
MAX_NAMESPACES = 8
ETC = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Files by which names are resolved and certificates checked.
ETC_OF_NETWORK = ["/etc/resolv.conf", "/etc/ssl", "/etc/pki", "/etc/ca-certificates"]
# An agent's programs serve and connect inside the box.
ALLOWED = {"socket", "connect", "bind", "listen", "pidfd_open"}
AF_NETLINK = 16  # socket.AF_NETLINK, which Python has on Linux alone.
FAMILIES = {int(socket.AF_UNIX), int(socket.AF_INET), int(socket.AF_INET6), AF_NETLINK}
MAX_FAMILY = 64
# Done in name only: the box has one user, and archives name others.
OWNERS = ["chown", "fchown", "lchown", "fchownat"]
USERS = ["setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups"]
USERS += ["setfsuid", "setfsgid"]
ERRORS = {
    kind.__name__: kind
    for kind in (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
}


def find_bwrap() -> str:
    """Its path. Raises OSError."""
    if sys.platform != "linux":
        raise OSError("bubblewrap needs Linux")
    path = shutil.which("bwrap")
    if path is None:
        raise OSError("bwrap is not installed; on Debian: apt-get install bubblewrap")
    return path


def check_bwrap() -> None:
    """Raises OSError unless bubblewrap is here and can make namespaces, with the fix."""
    line = [find_bwrap(), "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    if os.geteuid() != 0:
        line.append("--unshare-user")
    line += ["--ro-bind", "/", "/", "true"]
    try:
        tried = subprocess.run(line, capture_output=True, check=False, timeout=START_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"bwrap did not start a program within {START_S} s") from None
    if tried.returncode:
        reason = " ".join(tried.stderr.decode(errors="replace").split())
        raise OSError(f"bwrap fails ({keep_ends(reason, 200)}); allow user namespaces")


def compile_filter(is_image: bool = False) -> bytes:
    """A seccomp filter as the kernel takes it; b"" where pyseccomp or libseccomp is missing. An
    image's installers change users, which then succeeds in name only."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError):
        return b""
    made = seccomp.SyscallFilter(seccomp.ALLOW)
    refused = seccomp.ERRNO(errno.EPERM)
    for name in set(isolation.DENIED) - ALLOWED:
        with suppress(OSError, ValueError):  # Unknown on this machine.
            made.add_rule(refused, isolation.NEW.get(name, name))
    for name in OWNERS + USERS * is_image:
        with suppress(OSError, ValueError):
            made.add_rule(seccomp.ERRNO(0), name)
    for family in set(range(MAX_FAMILY)) - FAMILIES:
        made.add_rule(refused, "socket", seccomp.Arg(0, seccomp.EQ, family))
    made.add_rule(refused, "socket", seccomp.Arg(0, seccomp.GE, MAX_FAMILY))
    netlink = seccomp.Arg(0, seccomp.EQ, AF_NETLINK)
    # Programs such as useradd take this error for a kernel without audit.
    unknown = seccomp.ERRNO(errno.EPROTONOSUPPORT)
    made.add_rule(unknown, "socket", netlink, seccomp.Arg(2, seccomp.NE, 0))
    urgent = int(socket.MSG_OOB)
    for name, flags in isolation.FLAGS_OF.items():
        made.add_rule(refused, name, seccomp.Arg(flags, seccomp.MASKED_EQ, urgent, urgent))
    for flag in (*isolation.NAMESPACES.values(), 0x2000000):
        made.add_rule(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # Its flags lie in memory; libraries then use clone.
    made.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with open(os.memfd_create("filter"), "w+b") as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()


def network_files() -> dict[str, str]:
    """Path in an image's box -> text: names and certificates of this machine."""
    files = {}
    sources = {"/etc/hosts": "/etc/hosts", "/etc/resolv.conf": "/etc/resolv.conf"}
    sources[CERTIFICATES] = os.environ.get("SSL_CERT_FILE") or HOST_CERTIFICATES
    for path, source in sources.items():
        with suppress(OSError):
            files[path] = Path(source).read_text()
    return files


def memory_file(stack: ExitStack, data: bytes) -> int:
    """A descriptor from which the data can be read, until the stack ends."""
    descriptor = os.memfd_create("box")
    stack.callback(os.close, descriptor)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def view(files: dict[str, int], settings: BoxSettings) -> list[str]:
    """Arguments of bwrap for the files that a box sees. `files`: path in /etc -> a descriptor with
    its text."""
    paths = [path for path in isolation.visible_paths() if not path.startswith("/etc/")]
    in_etc = [path for path in isolation.SYSTEM if path.startswith("/etc/")]
    if settings.network and settings.root is None:
        in_etc += ETC_OF_NETWORK
    shown = {path: path for path in paths} | {isolation.BOX_PACKAGE: str(isolation.PACKAGE)}
    # Root's are closed to programs by their owner, a user's by a mount.
    mounts = {"/etc"}
    if os.geteuid() != 0:
        mounts |= {"/" + path.split("/")[1] for path in shown if path.count("/") > 1}
    line = []
    for folder in sorted(mounts):
        line += ["--tmpfs", folder]
    binds = dict(settings.binds)
    if settings.root is not None:
        binds = {f"{BOUND}{inside}": path for inside, path in settings.binds}
        binds |= {f"/layers/{n}": path for n, path in enumerate(settings.root.layers)}
    parents = {str(folder) for path in [*shown, *binds] for folder in Path(path).parents}
    # Bubblewrap would make a closed copy of a closed folder such as /root.
    for folder in sorted(parents - {"/"} - mounts):
        line += ["--perms", "0755", "--dir", folder]
    for inside, path in shown.items():
        line += ["--ro-bind", os.path.realpath(path), inside]
    for path in filter(os.path.exists, in_etc):
        line += ["--ro-bind", os.path.realpath(path), path]
    for path, descriptor in files.items():
        line += ["--perms", "0644", "--file", str(descriptor), path]
    line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"]
    for inside, path in binds.items():
        kind = "--bind" if path.endswith(":rw") else "--ro-bind"
        line += [kind, path.removesuffix(":rw"), inside]
    for folder in [*sorted(mounts), "/dev"]:
        line += ["--remount-ro", folder]
    return line


def command_line(settings: BoxSettings, files: dict[str, int], init: dict[str, Any]) -> list[str]:
    line = [find_bwrap(), "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts"]
    line += ["--clearenv", "--hostname", "box"]
    if not settings.network:
        line.append("--unshare-net")
    rights = ["CAP_SYS_ADMIN", "CAP_SETPCAP"]
    if settings.root is not None:
        rights += ["CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_CHOWN", "CAP_SYS_CHROOT"]
    if os.geteuid() == 0:
        rights += ["CAP_SETUID", "CAP_SETGID"]
    else:
        line += ["--unshare-user", "--uid", "0", "--gid", "0"]
    for right in rights:
        line += ["--cap-add", right]
    line += view(files, settings)
    begin = BEGIN.format(path=os.path.dirname(isolation.BOX_PACKAGE))
    return [*line, "--chdir", "/", sys.executable, "-I", "-S", "-c", begin, json.dumps(init)]


def end_process(control: socket.socket, process: subprocess.Popen, owner: int) -> None:
    """Returns when nothing of the box is left. In a fork of the owner it only forgets the box."""
    if os.getpid() != owner:
        control.close()
        return
    # A fork of this process may hold the socket too, so closing it is not enough.
    with control, suppress(OSError):
        control.send(b'{"do": "quit"}')
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class BubblewrapBox:
    """One box. It may be used from any event loop."""

    def __init__(self, settings: BoxSettings):
        self.settings = settings
        self.filter = compile_filter(settings.root is not None)
        self.pid = os.getpid()
        # Without a filter a program can leave System V memory behind.
        self.can_be_reset = bool(self.filter) and settings.root is None
        self.namespaces: list[int] = []
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with theirs, ExitStack() as stack:
            self.process = self.start(theirs, stack)
        self.finalizer = weakref.finalize(self, end_process, self.control, self.process, self.pid)

    def start(self, theirs: socket.socket, stack: ExitStack) -> subprocess.Popen:
        # Readable once this process has ended, however it ended. --die-with-parent would end the
        # box with the thread that made it.
        owner = os.pidfd_open(os.getpid())
        stack.callback(os.close, owner)
        shown = ETC | (network_files() if self.settings.root is not None else {})
        files = {path: memory_file(stack, text.encode()) for path, text in shown.items()}
        init = self.init_settings(theirs, owner, stack)
        passed = [theirs.fileno(), owner, *files.values()]
        if self.filter:
            passed.append(init["filter"])
        return self.popen(command_line(self.settings, files, init), passed)

    def init_settings(self, theirs: socket.socket, owner: int, stack: ExitStack) -> dict[str, Any]:
        """Settings of box_init.py."""
        limits, root = self.settings.limits, self.settings.root
        environ = isolation.program_environment() | {"HOME": "/root"}
        init = {
            "control": theirs.fileno(),
            "owner": owner,
            "filter": memory_file(stack, self.filter) if self.filter else -1,
            "is_root": os.geteuid() == 0,
            "disk_mib": limits.disk_mib,
            "limits": {
                "DATA": limits.memory_mib << 20,
                "NPROC": limits.processes,
                "NOFILE": OPEN_FILES,
                "CORE": 0,
                "MSGQUEUE": 0,
            },
            "environ": environ,
            "layers": [],
        }
        if root is None:
            return init
        return init | {
            "environ": {"HOME": "/root", "PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            "layers": [f"/layers/{n}" for n in range(len(root.layers))],
            "protected": root.protected,
            "workdir": root.workdir,
            "binds": [inside for inside, _ in self.settings.binds],
            "shown": list(network_files()),
        }

    def popen(self, line: list[str], passed: list[int]) -> subprocess.Popen:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for the owner
        )

    @classmethod
    async def open(cls, settings: BoxSettings) -> BubblewrapBox:
        """Raises OSError if this machine makes no such box."""
        box = cls(settings)
        await box.hear_ready()
        return box

    async def hear_ready(self) -> None:
        """Waits until the box serves. Raises OSError, with the box ended, if it does not."""
        try:
            hello = await asyncio.wait_for(self.first_message(), START_S)
            reason = json.loads(hello or b"{}").get("error", "")
            if not hello:
                reason = (await asyncio.to_thread(self.process.stderr.read, 4000)).decode().strip()
            if reason or not hello:
                raise OSError(reason or "its process ended at once")
        except BaseException:
            self.finalizer()
            raise
        self.process.stderr.close()

    async def first_message(self) -> bytes:
        """The first message of the box, with descriptors of its namespaces."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self.control, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(self.control)
        hello, self.namespaces, _, _ = socket.recv_fds(self.control, 1 << 16, MAX_NAMESPACES)
        for descriptor in self.namespaces:
            weakref.finalize(self, os.close, descriptor)
        return hello

    async def join(self, network: bool) -> BubblewrapBox:
        """A box with the same files and the agent's changes to these, for the verifier: its folders
        can be written, and it may have a network. Raises OSError."""
        joined = copy.copy(self)
        joined.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        joined.control.setblocking(False)
        joined.namespaces = []
        with theirs, ExitStack() as stack:
            owner = os.pidfd_open(os.getpid())
            stack.callback(os.close, owner)
            init = self.init_settings(theirs, owner, stack)
            init |= {"namespaces": self.namespaces, "network": network}
            passed = [theirs.fileno(), owner, *self.namespaces]
            if self.filter:
                passed.append(init["filter"])
            begin = JOIN.format(path=str(isolation.PACKAGE.parent))
            line = [sys.executable, "-I", "-S", "-c", begin, json.dumps(init)]
            joined.process = self.popen(line, passed)
        joined.finalizer = weakref.finalize(
            joined, end_process, joined.control, joined.process, self.pid
        )
        await joined.hear_ready()
        return joined

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def transfer(self) -> BubblewrapBox:
        """The same box as a new object. By this one nobody reaches it any more: a call that comes
        late would else be in another episode."""
        heir = copy.copy(self)
        self.finalizer.detach()
        heir.finalizer = weakref.finalize(heir, end_process, self.control, self.process, self.pid)
        self.control = socket.socket()
        self.control.close()
        return heir

    @asynccontextmanager
    async def request(self, verb: str, timeout_s: float) -> AsyncIterator[Channel]:
        """Raises BoxEnded if the box is gone, or gives no answer within the time."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        header = json.dumps({"do": verb, "timeout_s": timeout_s}).encode()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self.control, [header], [theirs.fileno()])
                except OSError as error:
                    raise BoxEnded(f"the box has ended ({error})") from None
            yield Channel(ours)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str = "",
        environ: dict[str, str] | None = None,
        cwd: str = "",
    ) -> ExecResult:
        """The command's result. A string is run by bash, or sh. Its whole process tree is killed
        when its time is over, or when this is cancelled."""
        wanted = {
            "command": command if isinstance(command, str) else list(command),
            "timeout_s": timeout_s,
            "stdin": stdin,
            "environ": environ or {},
            "cwd": cwd,
        }
        async with self.request("exec", timeout_s) as channel:
            frames = await self.wait(channel.exchange([to_json(wanted)], 3), timeout_s + GRACE_S)
        if len(frames) < 3:
            self.check_alive()
            text = "the command killed or stopped what watched it: all in the box was killed"
            return ExecResult(code=137, stdout="", stderr=text)
        head, stdout, stderr = frames
        stdout, stderr = (text.decode(errors="replace") for text in (stdout, stderr))
        return ExecResult(stdout=stdout, stderr=stderr, **json.loads(head))

    async def wait(self, answer: Any, timeout_s: float) -> list[bytes]:
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self.finalizer()
            raise BoxEnded(f"the box gave no answer in {timeout_s:g} s and was ended") from None

    def check_alive(self) -> None:
        try:
            alive = bool(self.control.recv(1))
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            raise BoxEnded("the box has ended: it was closed, or killed from outside")

    async def put(self, path: str, data: bytes | str | Path) -> None:
        """Writes a file, or a folder of the host with all below it. A link that has the name is
        replaced. Raises OSError."""
        upload = await asyncio.to_thread(make_upload, path, data)
        files = [(name, mode) for name, mode, _ in upload.files]
        wanted = {"files": files, "folders": upload.folders, "links": upload.links}
        frames = [to_json(wanted), *(content for _, _, content in upload.files)]
        await self.ask("put", frames, 1)

    async def get(self, path: str) -> bytes:
        """A file's content, at most 64 MiB. Raises FileNotFoundError, OSError."""
        _, data = await self.ask("get", [to_json({"path": path})], 2)
        return data

    async def ask(self, verb: str, frames: list[bytes], num: int) -> list[bytes]:
        """The first `num` frames of an answer. Raises the error that the answer names."""
        async with self.request(verb, TRANSFER_S) as channel:
            answers = await self.wait(channel.exchange(frames, num), TRANSFER_S + GRACE_S)
        if not answers:
            self.check_alive()
            raise OSError(f"{verb}: a process of the box killed what did it")
        answer = json.loads(answers[0])
        if "error" in answer:
            kind, text = answer["error"]
            raise ERRORS.get(kind, OSError)(text)
        return answers

    async def end_processes(self) -> None:
        """Kills everything that runs in the box."""
        await self.ask("end", [], 1)

    async def reset(self) -> None:
        """Kills everything and removes all files. Raises OSError if one cannot be removed."""
        await self.ask("reset", [], 1)

    async def close(self) -> None:
        """Ends the box; the kernel removes its files. Idempotent."""
        await asyncio.to_thread(self.finalizer)


def to_json(wanted: dict[str, Any]) -> bytes:
    return json.dumps(wanted).encode()


class Channel:
    """Frames of one request and its answer."""

    def __init__(self, end: socket.socket):
        self.end = end
        self.loop = asyncio.get_running_loop()

    async def exchange(self, frames: list[bytes], num: int) -> list[bytes]:
        """At most `num` frames: fewer if the other end closes or sends an error."""
        with suppress(ConnectionError):  # It answers before it has read all: the disk is full, say.
            for data in frames:
                await self.loop.sock_sendall(self.end, len(data).to_bytes(4, "big") + data)
        received: list[bytes] = []
        while len(received) < num:
            head = await self.read(4)
            size = int.from_bytes(head, "big")
            if len(head) < 4 or size > MAX_FRAME:
                break
            received.append(await self.read(size))
            if received[0][:8] == b'{"error"':
                break
        return received

    async def read(self, size: int) -> bytes:
        data = bytearray()
        with suppress(ConnectionError):
            while len(data) < size:
                piece = await self.loop.sock_recv(self.end, min(size - len(data), 1 << 20))
                if not piece:
                    break
                data += piece
        return bytes(data)
