"""macOS, as far as Linux can show it: what Linux alone has is hidden."""

from __future__ import annotations

import json

from kit import ROOT, metrics, run_afresh

# Attempt -> pieces of the error.
REFUSED = {
    "sandbox": ("this machine runs darwin; train on Linux, or in a Linux container",),
    "box": ("no sandbox: ", "bubblewrap needs Linux", "docker is not installed"),
    "code": ("error: ", "envs/code.py: ", "this machine runs darwin"),
    "mps": ("error: --device=mps: torch sees no Apple GPU",),
}


def test_steps_run_without_linux_and_the_rest_is_refused(tmp_path):
    code = f"import runpy; runpy.run_path('{ROOT}/tests/macos.py', run_name='__main__')"
    output, _ = run_afresh(code, str(tmp_path))
    assert "step" in metrics(tmp_path / "rl")[-1] and "macOS: not tested there" in output
    errors = json.loads(output.splitlines()[-1])
    for name, pieces in REFUSED.items():
        assert all(piece in errors[name] for piece in pieces), errors[name]
        assert errors[name].count("\n") <= 1 and "Traceback" not in errors[name]
