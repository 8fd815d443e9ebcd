"""Isolation of programs by the kernel: namespaces, Landlock, seccomp and limits. Standard library
only.

Two layers. Bubblewrap makes the *box* once, around the process that forks programs. The box has no
network, no environment variables, and of the disk only the interpreter and the system's libraries,
read-only. Each *program* gets separate namespaces inside the box. Where namespaces are not allowed,
Landlock and seccomp close files and network instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

LEVELS = {
    "bubblewrap": "bubblewrap, and user, pid, mount, net, ipc, uts namespaces for each program",
    "landlock": "Landlock for files, seccomp for the network",
}
NOBODY = 65534
PACKAGE = Path(__file__).parents[1]
BOX_PACKAGE = "/box/rl_core"  # Path of this package inside a box.
BOX_FOLDER = "/box/run"  # Folder of the socket inside a container.
CONTAINERS = {"docker": "a container of docker", "podman": "a container of podman"}
REMOTE = ("kubernetes", "e2b", "daytona", "modal")  # Drivers of boxes elsewhere. box_remote.py
# Inside a remote box, as root: each process is another user, behind seccomp. remote_programs.py
BOX = "box"
FIRST_USER, NUM_USERS = 20_000, 40_000
PROGRAMS = "/rl_core/programs"  # Folder of the programs' folders at this level.
SYSTEM = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
]
DEVICES = ["null", "zero", "full", "random", "urandom"]
LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = {
    "mount": 0x20000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
READ_SEARCH = 1 << 2  # CAP_DAC_READ_SEARCH
# Numbers of mount_setattr, pivot_root and capset. Machines that are not listed, such as aarch64,
# have the kernel's generic numbers.
NUMBERS = {"x86_64": (442, 155, 126), "generic": (442, 41, 91)}
MOUNT_SETATTR, PIVOT_ROOT, CAPSET = NUMBERS.get(os.uname().machine, NUMBERS["generic"])
# System calls that seccomp refuses with EPERM. Programs do not need them, and each has been, or
# helps, a way out of namespaces or a way to hold memory.
DENIED = """
socket connect bind listen ptrace process_vm_readv process_vm_writev process_madvise kcmp
pidfd_getfd pidfd_open unshare setns mount umount2 pivot_root chroot open_tree open_tree_attr
move_mount fsopen fsconfig fsmount fspick mount_setattr open_by_handle_at name_to_handle_at keyctl
add_key request_key bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
io_uring_register memfd_create memfd_secret fanotify_init kexec_load kexec_file_load shmget shmat
shmctl msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open mq_unlink init_module
finit_module delete_module swapon swapoff reboot acct quotactl syslog iopl ioperm modify_ldt
settimeofday clock_settime clock_adjtime adjtimex personality lookup_dcookie vhangup sethostname
setdomainname
""".split()  # noqa: SIM905
# System calls that seccomp answers without an effect, so that copies of files succeed. Landlock
# does not cover them, and the host's files may belong to the same user.
METADATA = """
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat
file_setattr
""".split()  # noqa: SIM905
# Numbers for a libseccomp that is older than the kernel; they are the same on all machines.
NEW = {
    "memfd_secret": 447,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
# Landlock confines signals from ABI 6 on (Linux 6.12).
SIGNALS = ["kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"]
# Without a pid namespace these act on any process of the same user. The first argument 0 means the
# calling process.
OF_OTHERS = [
    "prlimit64",
    "sched_setaffinity",
    "sched_setscheduler",
    "sched_setparam",
    "sched_setattr",
]
PRIORITIES = ["setpriority", "ioprio_set"]
# System call -> index of its flags. MSG_OOB between Unix sockets was a way into the kernel:
# CVE-2025-38236.
FLAGS_OF = {"sendto": 3, "recvfrom": 3, "sendmsg": 2, "recvmsg": 2, "sendmmsg": 3, "recvmmsg": 3}
# Sockets of these types reach any Unix socket of the host by its address, which sendmsg holds in
# memory where no filter sees it. Of streams and SOCK_SEQPACKET a pair speaks with its other end
# alone. The kernel takes SOCK_RAW for SOCK_DGRAM.
ADDRESSED, SOCKET_TYPE = [int(socket.SOCK_DGRAM), int(socket.SOCK_RAW)], 0xF
# A descriptor's owner gets signals of the descriptor's, any that the program names: a way around
# SIGNALS.
# F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP.
SET_OWNER = {"fcntl": [8, 15], "ioctl": [0x8901, 0x8902]}
# Without pid namespaces a program's children are ended by their process group.
NEW_GROUPS = ["setsid", "setpgid"]


def must(result: int, action: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def unshare(*names: str) -> None:
    must(LIBC.unshare(sum(NAMESPACES[name] for name in names)), f"unshare {' '.join(names)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    text = [value.encode() or None for value in (source, target, kind)]
    must(
        LIBC.mount(*text, ctypes.c_ulong(flags), data.encode() or None),
        f"mount {source} at {target}",
    )


def make_read_only(target: str) -> None:
    """Makes a mount and all mounts below it read-only. Unlike a remount, keeps the flags that an
    outer namespace has locked."""
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID, 0, 0, 0)
    must(
        LIBC.syscall(MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, 32),
        f"mount_setattr {target}",
    )


def become_nobody(keeps_reading: bool = False, user: int = NOBODY) -> None:
    """Gives up root's rights for good, except the right to read all files if `keeps_reading`. Has
    no effect on the ids of other users."""
    if os.geteuid() == 0:
        if keeps_reading:
            must(LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keepcaps")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        set_capabilities(READ_SEARCH if keeps_reading else 0)
    # Root would otherwise own /proc/self, and user namespaces could not map ids.
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def set_capabilities(mask: int) -> None:
    """Sets effective and permitted capabilities; clears inheritable ones."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(mask, mask)
    must(LIBC.syscall(CAPSET, header, sets), "capset")


def python_needs_root() -> bool:
    """True if the interpreter is below a folder that only root can open, such as /root."""
    paths = [Path(sys.base_prefix), Path(sys.prefix), Path(sys.executable).resolve()]
    folders = {folder for path in paths for folder in (path, *path.parents)}
    return os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in folders)


def map_ids(inside: int, uid: int, gid: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside} {gid} 1")


def visible_paths() -> list[str]:
    """Paths that a program may read: system libraries and tools, and the interpreter with its
    packages."""
    wanted = [
        *SYSTEM,
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
    ]
    wanted += [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]
    paths = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    return [
        p
        for p in paths
        if not any(p != other and p.startswith(other.rstrip("/") + "/") for other in paths)
    ]


def bubblewrap(argv: list[str]) -> list[str]:
    """The command that runs argv in a box by bubblewrap. Root keeps the right to become nobody."""
    line = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-net",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--clearenv",
    ]
    line += (
        ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if os.geteuid() == 0
        else ["--unshare-user"]
    )
    parents = {str(folder) for path in visible_paths() for folder in Path(path).parents} - {"/"}
    # Bubblewrap would copy the mode of a closed folder such as /root.
    for folder in sorted(parents):
        line += ["--perms", "0755", "--dir", folder]
    for path in visible_paths():
        line += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else ["--ro-bind", path, path]
        )
    line += [
        "--ro-bind",
        str(PACKAGE),
        BOX_PACKAGE,
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--dir",
        "/tmp",
    ]
    for name in program_environment().items():
        line += ["--setenv", *name]
    return [*line, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", *argv]


def program_environment() -> dict[str, str]:
    """All environment variables that a program sees. The hash seed is fixed: sets have the same
    order in every run."""
    names = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
    }
    return names | {
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def enter_program_namespaces(disk_mib: int) -> None:
    """Enters namespaces for one program. The first child is process 1 of the pid namespace: when
    that child ends, the kernel ends all other processes."""
    uid, gid = os.geteuid(), os.getegid()
    unshare("user", "mount", "pid", "net", "ipc", "uts")
    map_ids(1000, uid, gid)
    mount("none", "/", flags=REC | PRIVATE)
    mount("none", "/proc", "tmpfs", RDONLY | NOSUID | NODEV, "size=4k,mode=555")
    if os.path.isdir("/dev/pts"):  # Terminals in bubblewrap's box are visible to other programs.
        mount("none", "/dev/pts", "tmpfs", RDONLY | NOSUID | NODEV, "size=4k,mode=555")
    mount(
        "none",
        "/tmp",
        "tmpfs",
        NOSUID | NODEV,
        f"size={disk_mib}m,nr_inodes=4096,mode=700,uid=1000,gid=1000",
    )
    os.chdir("/tmp")


def make_filter(level: str) -> Any:
    """A seccomp filter, or None where pyseccomp or libseccomp is missing. load() it in the
    program's process."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError):
        return None
    made = seccomp.SyscallFilter(seccomp.ALLOW)
    alone = level in ("bubblewrap", BOX)
    more = [] if alone else NEW_GROUPS + PRIORITIES + ([] if landlock_version() >= 6 else SIGNALS)
    for name in DENIED + more:
        # A name that is unknown on this machine cannot be called.
        with suppress(OSError, ValueError):
            made.add_rule(seccomp.ERRNO(errno.EPERM), NEW.get(name, name))
    for name in METADATA if level == "landlock" else []:
        with suppress(OSError, ValueError):
            made.add_rule(seccomp.ERRNO(0), NEW.get(name, name))
    for name in [] if alone else OF_OTHERS:
        made.add_rule(seccomp.ERRNO(errno.EPERM), name, seccomp.Arg(0, seccomp.NE, 0))
    low = 0xFFFFFFFF  # The kernel reads only these bits of the register.
    made.add_rule(
        seccomp.ERRNO(errno.EPERM),
        "prctl",
        seccomp.Arg(0, seccomp.MASKED_EQ, low, PR_SET_PDEATHSIG),
    )
    made.add_rule(
        seccomp.ERRNO(errno.EPERM), "socketpair", seccomp.Arg(0, seccomp.NE, socket.AF_UNIX)
    )
    for kind in ADDRESSED:
        refused = seccomp.Arg(1, seccomp.MASKED_EQ, SOCKET_TYPE, kind)
        made.add_rule(seccomp.ERRNO(errno.EPERM), "socketpair", refused)
    urgent = int(socket.MSG_OOB)
    for name, flags in FLAGS_OF.items():
        made.add_rule(
            seccomp.ERRNO(errno.EPERM), name, seccomp.Arg(flags, seccomp.MASKED_EQ, urgent, urgent)
        )
    for name, commands in SET_OWNER.items():
        for command in commands:
            made.add_rule(
                seccomp.ERRNO(errno.EPERM), name, seccomp.Arg(1, seccomp.MASKED_EQ, low, command)
            )
    for flag in (*NAMESPACES.values(), 0x2000000):
        made.add_rule(
            seccomp.ERRNO(errno.EPERM), "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag)
        )
    # The flags of clone3 lie in memory, where no filter sees them. Libraries fall back to clone.
    made.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    return made


def landlock_version() -> int:
    """ABI version of the kernel's Landlock; 0 without Landlock."""
    try:
        import py_landlock

        return int(py_landlock.get_abi_version())
    except Exception:  # The package or the kernel's support is missing.
        return 0


def restrict_files(folder: str) -> None:
    """Applies Landlock: the program reads and runs visible_paths(), writes in its folder, and
    neither signals nor traces processes outside."""
    from py_landlock import AccessFs, Landlock

    def allow(path: str, access: AccessFs) -> None:
        if os.path.exists(path):
            rules.add_path_rule(
                path, access=access if os.path.isdir(path) else access & ~of_folders
            )

    of_folders = (
        AccessFs.READ_DIR
        | AccessFs.MAKE_REG
        | AccessFs.MAKE_DIR
        | AccessFs.MAKE_SYM
        | AccessFs.MAKE_FIFO
    )
    of_folders |= AccessFs.REMOVE_DIR | AccessFs.REMOVE_FILE | AccessFs.REFER
    reads = AccessFs.READ_FILE | AccessFs.READ_DIR
    writes = AccessFs.WRITE_FILE | AccessFs.TRUNCATE
    rules = Landlock(strict=False)
    for path in visible_paths():
        allow(path, reads | AccessFs.EXECUTE)
    for name in DEVICES:
        allow(f"/dev/{name}", reads | writes)
    allow(folder, reads | writes | AccessFs.EXECUTE | of_folders)
    rules.apply()


def set_limits(limits: dict[str, int]) -> None:
    mib = 1 << 20
    values = {
        "AS": limits["memory_mib"] * mib,
        "CPU": limits["cpu_s"],
        "FSIZE": limits["file_mib"] * mib,
    }
    values |= {
        "NPROC": limits["processes"],
        "NOFILE": limits["open_files"],
        "CORE": 0,
        "MSGQUEUE": 0,
    }
    for name, value in values.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def num_threads_of(uid: int) -> int:
    """Number of threads of a user on this machine. Without a user namespace a program's limit
    counts them too."""
    total = 0
    for folder in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{folder}").st_uid == uid:
                total += len(os.listdir(f"/proc/{folder}/task"))
    return total


def confine(
    level: str, folder: str, limits: dict[str, int], filters: Any, keeps_reading: bool
) -> None:
    """Confines this process, the program's, for good."""
    others = num_threads_of(os.getuid()) if level != "bubblewrap" else 0
    set_limits(limits | {"processes": limits["processes"] + others})
    must(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if level == "landlock" or (level in CONTAINERS and filters is not None and landlock_version()):
        restrict_files(folder)
    set_capabilities(READ_SEARCH if keeps_reading else 0)
    if filters is not None:
        filters.load()


def prepare(level: str) -> tuple[Any, bool]:
    """Prepares the forking process. Returns (seccomp filter of programs, True if programs keep
    root's right to read). They keep that right under Landlock if Python lies below /root. Raises
    OSError if the machine lacks the level."""
    with suppress(OSError):  # Out of memory, the kernel ends a program rather than a rank.
        Path("/proc/self/oom_score_adj").write_text("1000")
    filters = make_filter(level)
    keeps_reading = level not in ("bubblewrap", BOX) and python_needs_root()
    if level == "landlock" and not (filters and landlock_version()):
        raise OSError(
            "Landlock in the kernel, and the packages py-landlock and pyseccomp, are needed"
        )
    if level == BOX and (filters is None or os.geteuid()):
        raise OSError(
            f"its image needs libseccomp (libseccomp2 of Debian and Ubuntu), and root as its user; "
            f"it has {'no ' if filters is None else ''}libseccomp and the user {os.geteuid()}"
        )
    if level != BOX:
        become_nobody(keeps_reading)
    if not os.path.exists(os.path.realpath(sys.executable)):
        raise OSError(
            f"uid {os.geteuid()} cannot read {sys.executable}; install Python where other users "
            "can read it"
        )
    try_a_program(level)
    return filters, keeps_reading


def try_a_program(level: str) -> None:
    """Raises OSError if a program would not get its namespaces or user: AppArmor or a container
    may allow the box and refuse namespaces inside it."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if level == "bubblewrap":
                enter_program_namespaces(1)
            elif level == BOX:
                become_nobody(user=FIRST_USER)
        except OSError as error:
            lacking = "namespaces" if level == "bubblewrap" else "user"
            os.write(send, f"no {lacking} for a program: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(send)
    os.waitpid(pid, 0)
    with open(receive, encoding="utf-8") as pipe:
        if error := pipe.read():
            raise OSError(error)


def open_folder(level: str, disk_mib: int, user: int) -> str:
    """Opens the private folder of one program, makes it the current folder and returns its path."""
    if level == "bubblewrap":
        enter_program_namespaces(disk_mib)
        return "/tmp"
    # Without dir= the module would remember a folder that programs cannot use.
    parent = PROGRAMS if level == BOX else "/tmp"
    folder = tempfile.mkdtemp(prefix="rl_core_sandbox_", dir=parent)
    if level == BOX:
        os.chown(folder, user, user)
    os.chdir(folder)
    return folder


def kill_user(user: int) -> None:
    """Kills all processes of a user at once. A fork that is under way fails."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def remove_folder(folder: str) -> None:
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    # The program closed a folder to its owner, or nested folders too deep for Python.
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )
