"""A machine for servers of the tests that stand for a cluster or a sandbox service: commands that
they receive run here, in namespaces by bubblewrap."""

import asyncio
import json
import os
import subprocess

from kube_server import APART, PATH, ROOT

# This shell reaps what others leave.
FIRST = "echo ready; exec >/dev/null; while :; do sleep 1000; done"
ENVIRON = {"PATH": PATH, "HOME": "/root"}


class Machine:
    """One box of a service: files, processes and a loopback."""

    def __init__(self):
        read, write = os.pipe()
        line = ["bwrap", *APART.split(), *ROOT.split(), "--dir", "/root"]
        if os.geteuid() != 0:
            line += ["--unshare-user", "--uid", "0", "--gid", "0"]
        line += ["--info-fd", str(write), "/bin/sh", "-c", FIRST]
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

    async def start(self, argv, *, environ=None, cwd="/root", stdin=False):
        """A process with pipes for its output, and for its stdin on demand."""
        line = ["nsenter", f"--target={self.first}", "--mount", "--pid", "--ipc", "--net", "--root"]
        if os.geteuid() != 0:
            line += ["--user", "--preserve-credentials"]
        shown = [f"{name}={value}" for name, value in (ENVIRON | (environ or {})).items()]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *[*line, "env", "--ignore-environment", f"--chdir={cwd}", *shown, *argv],
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
