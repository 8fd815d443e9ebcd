"""A machine for servers of the tests that stand for a cluster or a sandbox service: commands that
they receive run here, in namespaces by bubblewrap."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from functools import cache

ROOT = "--tmpfs / --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib"
ROOT += " --symlink usr/lib64 /lib64 --symlink usr/sbin /sbin --ro-bind /etc /etc --proc /proc"
ROOT += f" --dev /dev --dir /tmp --chmod 1777 /tmp --dir /var/tmp --chmod 1777 /var/tmp --ro-bind {sys.base_prefix} {sys.base_prefix}"
APART = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --as-pid-1 --die-with-parent"
PATH = f"/tmp/bin:{sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# This shell reaps what others leave.
FIRST = "while :; do sleep 1000; done"
READY = 'echo ready; exec "$@" >/dev/null'
ENVIRON = {"PATH": PATH, "HOME": "/root"}


class Machine:
    """One box of a service: files, processes and a loopback."""

    def __init__(self, first=("/bin/sh", "-c", FIRST)):
        read, write = os.pipe()
        line = ["bwrap", *APART.split(), *ROOT.split(), "--dir", "/root"]
        if os.geteuid() != 0:
            line += ["--unshare-user", "--uid", "0", "--gid", "0"]
        line += ["--info-fd", str(write), "/bin/sh", "-c", READY, "sh", *first]
        self.process = subprocess.Popen(
            line,
            pass_fds=[write],
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        os.close(write)
        with os.fdopen(read) as info:
            self.first = json.load(info)["child-pid"]
        assert self.process.stdout.readline() == b"ready\n"
        self.is_running = True

    def line(self, argv, environ=None, cwd="/root"):
        """The command line that runs a command in the machine."""
        line = ["nsenter", f"--target={self.first}", "--mount", "--pid", "--ipc", "--net", "--root"]
        if os.geteuid() != 0:
            line += ["--user", "--preserve-credentials"]
        shown = [f"{name}={value}" for name, value in (ENVIRON | (environ or {})).items()]
        return [*line, "env", "--ignore-environment", f"--chdir={cwd}", *shown, *argv]

    async def start(self, argv, *, environ=None, cwd="/root", stdin=False):
        """A process with pipes for its output, and for its stdin on demand."""
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self.line(argv, environ, cwd),
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )

    async def read(self, path):
        """A file's content; None if there is none."""
        process = await self.start(["cat", path])
        data, _ = await process.communicate()
        return None if process.returncode else data

    async def write(self, path, data):
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        process = await self.start(["sh", "-c", script, "sh", path], stdin=True)
        await process.communicate(data)
        return process.returncode == 0

    def kill(self):
        if self.is_running:
            self.is_running = False
            os.kill(self.first, 9)
            self.process.wait()


@cache
def missing() -> str:
    """The reason why there are no machines here, or ""."""
    for name in ("bwrap", "nsenter"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    try:
        machine = Machine()
    except (ValueError, KeyError, AssertionError):
        return "bubblewrap makes no namespaces"
    done = subprocess.run(machine.line(["true"]), capture_output=True, text=True, check=False)
    machine.kill()
    return f"nsenter enters no namespaces: {done.stderr}" if done.returncode else ""
