"""Runs the agent's program and ends all its processes before the reward is written."""

import os
import signal
import subprocess
from pathlib import Path


def output(*command, text="", cwd="/app"):
    """Output of a program; None if it fails or takes more than 10 s."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=10, cwd=cwd
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def write_reward(is_right):
    """Into a folder that is made anew: a program may have written its own reward, or closed it."""
    end_others()
    folder = "/logs/verifier"
    anew = f"chmod -R u+rwX /logs; rm -rf {folder}; mkdir {folder}"
    subprocess.run(["/bin/sh", "-c", anew], stderr=subprocess.DEVNULL, check=False)
    Path(folder, "reward.txt").write_text(str(int(is_right)))


def end_others():
    """Ends every process but this one and those that it descends from."""
    ours = {1}
    pid = os.getpid()
    while pid > 1:
        ours.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for _ in range(100):
        others = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - ours
        for other in others:
            try:
                os.kill(other, signal.SIGKILL)
            except OSError:
                others = others - {other}
        if not others:
            return
