"""macOS, as far as Linux can show it: what Linux alone has is hidden."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Attempt -> pieces of the error.
REFUSED = {
    "sandbox": ("this machine runs darwin; train on Linux, or in a Linux container",),
    "box": ("no sandbox: ", "bubblewrap needs Linux", "docker is not installed"),
    "code": ("error: ", "envs/code.py: ", "this machine runs darwin"),
    "mps": ("error: --device=mps: torch sees no Apple GPU",),
}


def test_the_quickstart_runs_without_what_macos_lacks_and_the_rest_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "tests/macos.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "runs/quickstart/result.json").read_text())["seed"] == 0
    assert "none of 2 steps made an update" not in done.stderr
    assert "macOS: not tested there" in done.stdout
    errors = json.loads(done.stdout.splitlines()[-1])
    for name, pieces in REFUSED.items():
        assert all(piece in errors[name] for piece in pieces), errors[name]
        assert errors[name].count("\n") <= 1 and "Traceback" not in errors[name]
