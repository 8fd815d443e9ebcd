"""Process 1 of a box. It waits inside for requests; each is answered by a fork of it. Standard
library only.

A request comes over the control socket with a second socket: a frame there holds the request, the
answer goes back there, and closing it cancels the command. Process 1 cannot be killed or stopped
from inside. A fork can: then everything in the box is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rl_core.sandbox import isolation
from rl_core.sandbox.output import Output
from rl_core.sandbox.reaper import kill_descendants
from rl_core.sandbox.values import read_frame, receive, send, write_frame

SHM_MIB = 64  # The size of /dev/shm.
INODES_PER_MIB = 256
FOLDERS = {"/app": 0o755, "/tmp": 0o1777, "/root": 0o700, "/var/tmp": 0o1777, "/run": 0o755}
# Debian's, empty.
FOLDERS |= dict.fromkeys(("/opt", "/srv", "/home", "/mnt", "/media"), 0o755)
FOLDERS |= dict.fromkeys(("/var/log", "/var/lib", "/var/cache", "/var/spool"), 0o755)
WORKDIR = "/app"
TICK_S = 0.5
# Beyond a command's own deadline: its fork has then been stopped from inside.
OVERDUE_S = 5.0
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
REMOUNT = 0x20
PR_SET_SECCOMP, PR_CAPBSET_DROP = 22, 24
MAX_FILE_BYTES = 64 << 20
NUM_LIMITS = 16  # RLIM_NLIMITS of the kernel
ROOT = "/image"  # Layers of an image are mounted here.
WRITABLE = "/writable"  # the same without read-only folders
DETACH = 2  # MNT_DETACH
ENTERED = ("user", "mnt", "pid", "net", "ipc", "uts")  # Names in /proc/self/ns.


class FilterProgram(ctypes.Structure):
    """The kernel's sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def main(settings: dict[str, Any]) -> None:
    """Serves until the owner ends or closes the socket; the kernel then ends all in the box."""
    control = socket.socket(fileno=settings["control"])
    entered: list[int] = []
    try:
        if settings["layers"]:
            entered = set_up_root(settings)
            remaining: dict[str, int] = {}
        else:
            remaining = set_up(settings)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    socket.send_fds(control, [json.dumps({"ready": True}).encode()], entered)
    Init(control, settings, remaining).serve()


def set_up(settings: dict[str, Any]) -> dict[str, int]:
    """Bounds the disk and gives up all rights. Returns the files that no program made, with their
    modes."""
    bound_resources(settings["disk_mib"])
    if settings["is_root"]:
        become_unprivileged(filter(os.path.isdir, ["/", "/dev/shm", *FOLDERS]), "user")
    drop_rights(settings["filter"])
    make_folders()
    return snapshot("/") | snapshot("/dev/shm")


def bound_resources(disk_mib: int) -> None:
    """Bounds the disk, makes the kernel's settings read-only, and offers the box to the OOM
    killer before any rank."""
    os.umask(0o022)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    bound_disk("/", disk_mib)
    bound_disk("/dev/shm", SHM_MIB)
    # A user of the box may change settings of its namespaces, which a reused box would keep.
    isolation.mount("/proc/sys", "/proc/sys", flags=isolation.BIND)
    isolation.make_read_only("/proc/sys")


def become_unprivileged(folders: Iterable[str], *namespaces: str) -> None:
    """Becomes nobody on the host and root in new namespaces. The folders become writable and
    sticky, so that programs cannot replace files of the host's root."""
    for folder in folders:
        os.chmod(folder, 0o1777)
    isolation.become_nobody()
    uid, gid = os.geteuid(), os.getegid()
    isolation.unshare(*namespaces)
    isolation.map_ids(0, uid, gid)


def set_up_root(settings: dict[str, Any]) -> list[int]:
    """Replaces the root folder by an overlay of the image's layers, with the agent's changes in
    memory, bounded. Returns descriptors of this process's namespaces: join() enters them."""
    bound_resources(settings["disk_mib"])
    if settings["is_root"]:
        become_unprivileged(["/", "/dev/shm"], "user", "mount")
    root = mount_layers(settings["layers"])
    for folder in ("/proc", "/dev", *settings["shown"]):
        bind_below(root, folder, folder)
    for inside in settings["binds"]:
        bind_below(root, f"/bound{inside}", inside)
    for folder, mode in FOLDERS.items():
        if not os.path.isdir(root + folder):
            os.makedirs(root + folder)
            os.chmod(root + folder, mode)
    protect(root, settings)
    os.chdir(root)
    isolation.must(isolation.LIBC.syscall(isolation.PIVOT_ROOT, b".", b"."), "pivot_root")
    isolation.must(isolation.LIBC.umount2(b".", DETACH), "umount of the first root folder")
    os.chdir("/")
    sys.path.clear()  # The new root's modules are not this process's.
    entered = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ENTERED]
    drop_rights(settings["filter"])
    return entered


def mount_layers(layers: list[str]) -> str:
    """The path of an overlay of the layers, the topmost first. Changes are kept in memory."""
    for name in ("/episode/changes", "/episode/work", ROOT):
        os.makedirs(name, exist_ok=True)
    options = f"lowerdir={':'.join(layers)},upperdir=/episode/changes,workdir=/episode/work"
    isolation.mount("overlay", ROOT, "overlay", isolation.NODEV, f"{options},userxattr")
    return ROOT


def bind_below(root: str, source: str, inside: str) -> None:
    target = root + inside
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with suppress(FileExistsError), open(target, "x"):
            pass
    isolation.mount(source, target, flags=isolation.BIND | isolation.REC)


def protect(root: str, settings: dict[str, Any]) -> None:
    """Makes folders read-only, but for the working folder if it is in one of them."""
    os.makedirs(WRITABLE, exist_ok=True)
    isolation.mount(root, WRITABLE, flags=isolation.BIND)
    workdir = settings["workdir"]
    for folder in settings["protected"]:
        path = root + folder
        if os.path.realpath(path) != path or not os.path.isdir(path):
            continue
        isolation.mount(path, path, flags=isolation.BIND)
        isolation.make_read_only(path)
        if f"{workdir}/".startswith(f"{folder}/") and os.path.isdir(WRITABLE + workdir):
            isolation.mount(WRITABLE + workdir, root + workdir, flags=isolation.BIND)


def join(settings: dict[str, Any]) -> None:
    """Serves in the namespaces of a box, without the mounts that protect folders from the agent,
    and with the network that the process has which calls this."""
    control = socket.socket(fileno=settings["control"])
    try:
        enter_namespaces(settings)
        isolation.unshare("mount")
        for folder in reversed(settings["protected"]):
            isolation.LIBC.umount2(folder.encode(), DETACH)  # EINVAL: the image lacks the folder.
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    pid = os.fork()  # A PID namespace is entered by children.
    if pid:
        control.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    os.chdir("/")
    sys.path.clear()
    drop_rights(settings["filter"])
    control.send(json.dumps({"ready": True}).encode())
    Init(control, settings, {}).serve()


def enter_namespaces(settings: dict[str, Any]) -> None:
    """A user namespace gives rights on those that belong to it, and takes away those on others."""
    by_name = dict(zip(ENTERED, settings["namespaces"], strict=True))
    user, mount = by_name.pop("user"), by_name.pop("mnt")
    if settings["network"]:
        del by_name["net"]
    first = [] if settings["is_root"] else [user]
    last = [user, mount] if settings["is_root"] else [mount]
    if settings["is_root"]:
        os.setgroups([])
    for namespace in [*first, *by_name.values(), *last]:
        isolation.must(isolation.LIBC.setns(namespace, 0), "setns")
        if namespace == user:
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)


def bound_disk(folder: str, size_mib: int) -> None:
    options = f"size={size_mib}m,nr_inodes={size_mib * INODES_PER_MIB}"
    flags = REMOUNT | isolation.NOSUID | isolation.NODEV
    isolation.mount("", folder, "", flags, options)


def drop_rights(filter_fd: int) -> None:
    """No capabilities, no way to get some, no look at this process from its own user's others."""
    libc = isolation.LIBC
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    isolation.must(libc.prctl(isolation.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    isolation.set_capabilities(0)
    isolation.must(libc.prctl(isolation.PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    if filter_fd < 0:
        return
    with open(filter_fd, "rb") as file:
        code = file.read()
    program = FilterProgram(len(code) // 8, code)
    result = libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
    isolation.must(result, "seccomp")


def make_folders() -> None:
    for folder, mode in FOLDERS.items():
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError):  # Root's, and sticky; or the interpreter's, and read-only.
            os.chmod(folder, mode)


def snapshot(folder: str) -> dict[str, int]:
    """The mode of every file below the folder on the same disk."""
    device = os.lstat(folder).st_dev
    modes = {folder: os.lstat(folder).st_mode}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        status = os.lstat(path)
        if status.st_dev != device:
            continue
        modes[path] = status.st_mode
        if stat.S_ISDIR(status.st_mode):
            modes |= snapshot(path)
    return modes


class Init:
    """The loop of process 1."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], remaining: dict[str, int]):
        self.control = control
        self.settings = settings
        self.remaining = remaining
        # Process ids of forks, and when each is overdue. None: its command has ended. It answers as
        # fast as the owner reads, and waits for processes that the command left behind.
        self.forks: dict[int, float | None] = {}
        # Their sockets, closed here when a fork has answered or died and all is killed: else the
        # owner reads the end of a killed fork before it is reaped, and its next command is killed.
        self.channels: dict[int, socket.socket] = {}
        self.ended, self.tell_ended = os.pipe()
        self.first_state = own_state()

    def serve(self) -> None:
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The kernel keeps off other signals from inside, unless they have a handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        waiting = select.poll()
        owner = self.settings["owner"]
        for source in (wake, self.control, owner, self.ended):
            waiting.register(source, select.POLLIN)
        while True:
            timeout_ms = TICK_S * 1000 if self.forks else None
            ready = {fd for fd, _ in waiting.poll(timeout_ms)}
            if owner in ready:
                return
            if wake.fileno() in ready:
                wake.recv(1 << 12)
            if self.ended in ready:
                self.note_ended(int.from_bytes(os.read(self.ended, 4), "big"))
            self.reap()
            self.kill_overdue()
            if self.control.fileno() in ready and not self.take_request():
                return

    def note_ended(self, pid: int) -> None:
        if pid in self.forks:  # else it was killed meanwhile
            self.forks[pid] = None
            self.channels.pop(pid).close()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            was_fork = self.forks.pop(pid, 0.0) != 0.0
            if was_fork and os.WIFSIGNALED(status):
                kill_all()  # Its command is no longer watched.
            if channel := self.channels.pop(pid, None):
                channel.close()

    def kill_overdue(self) -> None:
        now = time.monotonic()
        for pid, overdue_at in self.forks.items():
            if overdue_at is not None and now > overdue_at:
                os.kill(pid, signal.SIGKILL)

    def take_request(self) -> bool:
        """False at the end of the stream."""
        header, fds, _, _ = socket.recv_fds(self.control, 1 << 12, 1)
        if not header:
            return False
        request = json.loads(header)
        if request["do"] == "quit":
            return False
        channel = socket.socket(fileno=fds[0])
        if request["do"] in ("end", "reset"):
            self.forks.clear()
            with channel, suppress(OSError):  # The owner waits no longer.
                send(channel, self.end_processes(request["do"] == "reset"))
            return True
        pid = os.fork()
        if pid == 0:
            self.run_fork(request["do"], channel)
        self.forks[pid] = time.monotonic() + request["timeout_s"] + OVERDUE_S
        self.channels[pid] = channel
        return True

    def end_processes(self, is_reset: bool) -> dict[str, Any]:
        kill_all()
        reap_all()
        self.close_channels()
        if not is_reset:
            return {"ready": True}
        try:
            empty(self.remaining)
            if own_state() != self.first_state:
                raise OSError("a program changed the first process")
        except (OSError, RecursionError) as error:
            return {"error": ["OSError", str(error)]}
        return {"ready": True}

    def close_channels(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def run_fork(self, verb: str, channel: socket.socket) -> None:
        status = 70
        try:
            self.control.close()
            self.close_channels()
            isolation.LIBC.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if verb == "exec":
                self.run_command(channel)
            else:
                {"put": put, "get": get}[verb](channel)
            status = 0
        except BaseException as error:
            with suppress(BaseException):
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(status)

    def run_command(self, channel: socket.socket) -> None:
        command = Command(receive(channel), self.settings)
        result = command.run(channel)
        os.write(self.tell_ended, os.getpid().to_bytes(4, "big"))
        with suppress(OSError):
            send(channel, result)
            write_frame(channel, command.stdout.data())
            write_frame(channel, command.stderr.data())
        channel.close()
        command.outlast()


def reap_all() -> None:
    """Waits until no child is left."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def own_state() -> list[Any]:
    """The state of process 1 that commands inherit and programs of its user can change."""
    limits = [resource.getrlimit(number) for number in range(NUM_LIMITS)]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return [limits, priority, os.sched_getscheduler(0), os.sched_getaffinity(0)]


def kill_all() -> None:
    """Every process of the box but this one."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


class Command:
    """One command, in a fork of process 1: its pipes, its deadline and its descendants, which
    become children of the fork when their parents end."""

    def __init__(self, wanted: dict[str, Any], settings: dict[str, Any]):
        self.settings = settings
        self.timeout_s = wanted["timeout_s"]
        self.stdin = memoryview(wanted["stdin"].encode(errors="surrogateescape"))
        self.stdout, self.stderr = Output(), Output()
        self.selector = selectors.DefaultSelector()
        pipes = [os.pipe() for _ in range(3)]
        self.pid = os.fork()
        if self.pid == 0:
            become_command(wanted, settings, [pipes[0][0], pipes[1][1], pipes[2][1]])
        for end in (pipes[0][0], pipes[1][1], pipes[2][1]):
            os.close(end)
        for end in (pipes[0][1], pipes[1][0], pipes[2][0]):
            os.set_blocking(end, False)
        self.selector.register(pipes[0][1], selectors.EVENT_WRITE, self.feed)
        self.selector.register(pipes[1][0], selectors.EVENT_READ, self.stdout)
        self.selector.register(pipes[2][0], selectors.EVENT_READ, self.stderr)

    def run(self, channel: socket.socket) -> dict[str, Any]:
        """Until the command has ended, its time is over, or the owner closes the channel."""
        process = os.pidfd_open(self.pid)
        self.selector.register(process, selectors.EVENT_READ, "ended")
        self.selector.register(channel, selectors.EVENT_READ, "cancelled")
        deadline = time.monotonic() + self.timeout_s
        reasons: set[str] = set()
        while not reasons:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                reasons.add("timed out")
                break
            reasons = self.pump(left_s)
        if "ended" not in reasons:
            end_descendants()
        status = os.waitpid(self.pid, 0)[1]
        if "ended" not in reasons:
            reap_all()  # They were killed, and are gone before the answer.
        self.selector.unregister(process)
        self.selector.unregister(channel)
        while self.selector.get_map() and self.pump(0.0, is_draining=True):
            pass
        code = os.waitstatus_to_exitcode(status)
        return {"code": code if code >= 0 else 128 - code, "timed_out": "timed out" in reasons}

    def pump(self, timeout_s: float, is_draining: bool = False) -> set[str]:
        """Moves the content of the pipes. Returns the other events; while draining, "data" if a
        pipe held something."""
        events = set()
        for key, _ in self.selector.select(timeout_s):
            if isinstance(key.data, str):
                events.add(key.data)
            elif key.data == self.feed:
                self.feed(key.fd)
            else:
                data = read_some(key.fd)
                key.data.add(data)
                if not data:
                    self.close_pipe(key.fd)
                elif is_draining and key.data.num_bytes < (64 << 20):
                    events.add("data")
        return events

    def feed(self, pipe: int) -> None:
        try:
            self.stdin = self.stdin[os.write(pipe, self.stdin[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:
            self.stdin = self.stdin[:0]
        if not self.stdin:
            self.close_pipe(pipe)

    def close_pipe(self, pipe: int) -> None:
        self.selector.unregister(pipe)
        os.close(pipe)

    def outlast(self) -> None:
        """Waits for processes that the command left in the background, which may still write."""
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if not self.selector.get_map():
                time.sleep(TICK_S)
                continue
            for key, _ in self.selector.select(TICK_S):
                if key.data == self.feed or not read_some(key.fd):
                    self.close_pipe(key.fd)


def read_some(pipe: int) -> bytes:
    """b"" at the end."""
    try:
        return os.read(pipe, 1 << 16)
    except OSError:
        return b""


def become_command(wanted: dict[str, Any], settings: dict[str, Any], pipes: list[int]) -> None:
    try:
        os.setsid()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
        os.closerange(3, 1 << 16)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for name, value in settings["limits"].items():
            limit(getattr(resource, f"RLIMIT_{name}"), value)
        enter(wanted["cwd"])
        argv = wanted["command"]
        if isinstance(argv, str):
            argv = [next(path for path in SHELLS if os.path.exists(path)), "-c", argv]
        environ = settings["environ"] | wanted["environ"]
        os.execvpe(argv[0], argv, environ)
    except FileNotFoundError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(127)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(126)


def limit(number: int, value: int) -> None:
    hard = resource.getrlimit(number)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(number, (value, value))


def enter(folder: str) -> None:
    try:
        os.chdir(folder or WORKDIR)
    except OSError:
        if folder:
            raise
        os.chdir("/")


def end_descendants() -> None:
    """Kills what this fork started. If those processes fork faster, this fork kills itself, and
    process 1 then kills everything."""
    if not kill_descendants(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)


def full_path(path: str) -> str:
    return os.path.join(WORKDIR, path)


def put(channel: socket.socket) -> None:
    """Writes the files of one request: a new file each, in place of whatever has the name."""
    job = receive(channel)
    try:
        for path, mode in job["files"]:
            write_file(full_path(path), read_frame(channel), mode)
        for path in job["folders"]:
            os.makedirs(full_path(path), exist_ok=True)
        for path, target in job["links"]:
            write_link(full_path(path), target)
        send(channel, {"ready": True})
    except OSError as error:
        send(channel, {"error": [type(error).__name__, str(error)]})


def write_file(path: str, data: bytes, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with replacing(path) as draft:
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(data)
        os.chmod(draft, mode)


def write_link(path: str, target: str) -> None:
    with replacing(path) as draft:
        os.symlink(target, draft)


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A second name in the path's folder. A file that is made there replaces the path, and is
    removed if that fails."""
    draft = f"{path}.{os.getpid()}.part"
    try:
        yield draft
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            os.unlink(draft)
        raise


def get(channel: socket.socket) -> None:
    path = full_path(receive(channel)["path"])
    try:
        # A pipe without a writer is not waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = read_file(path, file)
    except OSError as error:
        send(channel, {"error": [type(error).__name__, str(error)]})
        return
    send(channel, {"ready": True})
    write_frame(channel, data)


def read_file(path: str, file: Any) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_dev == os.stat("/proc").st_dev:
        raise OSError(f"{path} is not a file")
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(f"{path} has over {MAX_FILE_BYTES} bytes")
    return data


def empty(remaining: dict[str, int]) -> None:
    """Removes all files but those that were there before any program. Raises OSError if another
    stays."""
    for folder in ("/", "/dev/shm"):
        remove_below(folder, os.lstat(folder).st_dev)
    make_folders()
    for path, mode in remaining.items():
        if stat.S_ISDIR(mode):
            clear_folder(path, mode)
    left = snapshot("/") | snapshot("/dev/shm")
    if left != remaining:
        changed = sorted(left.items() ^ remaining.items())
        raise OSError(f"not as it was: {changed[:3]}")


def clear_folder(path: str, mode: int) -> None:
    with suppress(PermissionError):  # Root's: nobody has changed it.
        os.chmod(path, stat.S_IMODE(mode))
        for name in os.listxattr(path):
            os.removexattr(path, name)


def remove_below(folder: str, device: int) -> None:
    """Whatever can be removed, without crossing into another disk. A folder that is too deep for
    a path or for Python is an error."""
    with suppress(PermissionError):
        os.chmod(folder, stat.S_IMODE(os.lstat(folder).st_mode) | 0o700)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        status = os.lstat(path)
        if status.st_dev != device:
            continue
        with suppress(PermissionError, IsADirectoryError):
            if stat.S_ISDIR(status.st_mode):
                remove_below(path, device)
                remove_folder(path)
            else:
                os.unlink(path)


def remove_folder(path: str) -> None:
    with suppress(OSError):  # It holds a part of the system.
        os.rmdir(path)
