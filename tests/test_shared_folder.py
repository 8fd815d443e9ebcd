"""Weights in shared memory whose run was killed are removed by the next one; those of a run that lives stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from rl_core.sampling.shared_folder import remove_abandoned

HOLD = """
import sys
from pathlib import Path
from rl_core.sampling.shared_folder import SharedFolder, shared_memory
folder = SharedFolder(shared_memory())
(Path(folder.name) / "00000").mkdir()
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders():
    """Two processes with a folder each, as (process, folder)."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    made = [subprocess.Popen([sys.executable, "-c", HOLD], env=env, **pipes) for _ in range(2)]
    yield [(process, Path(process.stdout.readline().strip())) for process in made]
    for process in made:
        process.communicate()  # ends it


def test_a_folder_goes_once_its_process_was_killed_and_no_sooner(holders):
    (killed, left), (_, held) = holders
    killed.kill()
    killed.wait()
    remove_abandoned()
    assert left.exists(), "it may be so new that its process has not locked it yet"
    for folder in (left, held):
        os.utime(folder, (0, 0))
    remove_abandoned()
    assert not left.exists() and (held / "00000").exists()
