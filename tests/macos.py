"""A process that lacks what macOS lacks: `python tests/macos.py FOLDER` imports every module of
rl_core and envs, takes steps of SFT and RL, and prints refusals as JSON.

Only code of this repository, and of the standard library on its behalf, misses these parts.
Libraries were built for Linux and keep them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import json
import mmap
import multiprocessing
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

# Libraries, and their imports, choose their parts by sys.platform when they are imported.
import psutil  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
# Attributes that typeshed declares for Linux and not for macOS.
MISSING = {
    os: """copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getresgid
    getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate
    removexattr sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setparam sched_setscheduler setresgid setresuid setxattr splice waitid
    EFD_CLOEXEC GRND_NONBLOCK MFD_CLOEXEC O_DIRECT O_NOATIME O_PATH O_TMPFILE P_PIDFD
    POSIX_FADV_DONTNEED RTLD_DEEPBIND SCHED_BATCH ST_NODEV XATTR_CREATE""",
    signal: "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait "
    "sigwaitinfo",
    socket: """AF_ALG AF_NETLINK AF_PACKET AF_VSOCK MSG_CMSG_CLOEXEC MSG_MORE SOCK_CLOEXEC
    SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_MARK SO_PASSCRED SO_PEERCRED SO_PROTOCOL
    TCP_DEFER_ACCEPT TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT""",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME "
    "RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_SETPIPE_SZ F_SETSIG F_NOTIFY",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    errno: "EBADFD EDEADLOCK ENOKEY ENOMEDIUM ERESTART EUCLEAN",
    mmap: "MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_REMOVE MAP_POPULATE",
}
# Functions of Linux's C library.
SYSTEM_CALLS = """accept4 capset clone3 epoll_create1 mount mount_setattr pivot_root prctl setns
signalfd umount2 unshare""".split()
PACKAGES = "bitsandbytes flash_attn liger_kernel py_landlock pyseccomp sglang triton".split()
FOLDERS = ("/proc", "/sys", "/dev/shm")
EVENTS = ("open", "os.listdir", "os.scandir", "os.readlink")


def is_ours() -> bool:
    """True if code of this repository asked, not a library."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and path != __file__:
            return True
        if "site-packages" in path:
            return False
        frame = frame.f_back
    return False


def is_hidden(path: object) -> bool:
    try:
        return os.fsdecode(path).startswith(FOLDERS)
    except TypeError:  # a file descriptor
        return False


def refuse(event: str, args: tuple) -> None:
    """An audit hook."""
    if event in EVENTS and args and is_hidden(args[0]) and is_ours():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])


def without_folders(function, absent):
    def answer(path, *args, **options):
        if is_hidden(path) and is_ours():
            return absent(path)
        return function(path, *args, **options)

    return answer


def not_there(path):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class Library(ctypes.CDLL):
    def __init__(self, name=None, *args, **options):
        if name and ".so" in str(name) and is_ours():
            raise OSError(f"dlopen({name}): no such file")
        super().__init__(name, *args, **options)

    def __getattr__(self, name):
        if name in SYSTEM_CALLS and is_ours():
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def become_macos() -> None:
    sys.modules |= dict.fromkeys(PACKAGES)  # An import raises ModuleNotFoundError.
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    os.stat = without_folders(os.stat, not_there)
    os.access = without_folders(os.access, lambda path: False)
    ctypes.CDLL = Library
    sysconfig.get_config_vars()  # A cache, made from a file that is named after the platform.
    multiprocessing.set_start_method("spawn")
    sys.addaudithook(refuse)
    sys.platform = "darwin"


@contextmanager
def without_extras() -> Iterator[None]:
    """Inside, an import may end at a package of an extra that is not installed."""
    try:
        yield
    except ImportError as error:
        first = error.__context__ or error
        name = (getattr(first, "name", "") or "rl_core").partition(".")[0]
        if name == "rl_core" or name in sys.stdlib_module_names:
            raise


def import_all() -> None:
    import rl_core

    for module in pkgutil.walk_packages(rl_core.__path__, "rl_core."):
        with without_extras():
            importlib.import_module(module.name)
    for path in sorted((ROOT / "envs").glob("*.py")):
        with without_extras():
            runpy.run_path(str(path))


def run_steps(folder: Path) -> None:
    """Two steps of each kind, with an evaluation and a checkpoint."""
    from demo_data import demo_data
    from make_tiny_model import make_tiny_model

    from rl_core.train import main

    os.chdir(folder)
    make_tiny_model("model")
    rows = demo_data("sort", 0, num_sft=64, num_train=8, num_eval=2)
    Path("sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["sft"]))
    sizes = "--tasks_per_step 4 --max_tokens 8 --max_prompt_tokens 64 --num_steps 2"
    stop = '--sampling.stop ["1","2"] --eval_every 2 --eval.num_tasks 2 --group_size 4'
    for name, kind in {
        "sft": "--algorithm sft --data.train sft.jsonl",
        "rl": f"--env_path {ROOT}/envs/sort_digits.py {stop}",
    }.items():
        assert main(["--model", "model", *kind.split(), *sizes.split(), "--out", name]) == 0


def use_guards() -> None:
    """Calls functions that a short run on one rank does not call. Each does less than on
    Linux."""
    from rl_core.run.process.signals import has_lost_a_neighbour
    from rl_core.run.process.torchrun_exit import end_with_launcher
    from rl_core.sandbox.engines import owner
    from rl_core.sandbox.reaper import descendants
    from rl_core.scratch import scratch_prefix

    end_with_launcher()
    assert not has_lost_a_neighbour()
    assert owner().endswith(f" {os.getpid()} ")
    assert os.getpid() in descendants(os.getppid())
    assert scratch_prefix("kind") == "rl_core_kind_"
    with without_extras():
        from rl_core.environments.service.worker import memory_bytes

        assert memory_bytes() == 0


def refusals() -> dict[str, str]:
    """Attempt -> the error."""
    from rl_core.sandbox import Sandbox, boxes
    from rl_core.train import run_command

    os.environ["PATH"] = ""  # Neither docker nor podman.
    errors = {}
    for name, tried in {"sandbox": Sandbox().start, "box": boxes.check_machine}.items():
        try:
            tried()
        except RuntimeError as error:
            errors[name] = str(error)
    train = "--model model --out refused --max_tokens 8 --env_path"
    flags = {
        "code": f"{train} {ROOT}/envs/code.py",
        "mps": f"{train} {ROOT}/envs/sort_digits.py --device mps",
    }
    for name, line in flags.items():
        with redirect_stderr(StringIO()) as shown:
            assert run_command(line.split(), ExitStack()) == 1
        errors[name] = shown.getvalue()
    return errors


if __name__ == "__main__":
    become_macos()
    folder = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    import_all()
    run_steps(folder)
    use_guards()
    print(json.dumps(refusals()))
