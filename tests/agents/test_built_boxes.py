"""Boxes of bubblewrap whose Dockerfile was built from packages: one base, with a network."""

from __future__ import annotations

import asyncio
import shutil
import urllib.request
import uuid

import pytest

from rl_core.environments.agents.harbor import TaskBoxes
from rl_core.environments.agents.image_root import cached_phases
from rl_core.sandbox.roots import DEBIAN, unreachable_mirrors

pytestmark = pytest.mark.slow  # fetching and unpacking a base takes minutes
TOML = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage_mb = 512\nbuild_timeout_sec = 600\n'
DOCKERFILE = """\
FROM debian:12 AS first
RUN apt-get update && apt-get install -y --no-install-recommends tree
RUN useradd -m player && groupadd players && id player
RUN mkdir -p /made && date > /made/when
FROM debian:12
COPY --from=first /made /made
RUN apt-get update && apt-get install -y --no-install-recommends python3 tree
ENV PATH=/opt/tools/bin:$PATH
RUN useradd -m player && mkdir -p /opt/tools/bin
WORKDIR /app
"""
# The form of Harbor's template.
TEST = """\
#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source $HOME/.local/bin/env
if uvx --with pytest==8.4.1 pytest /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
OUTPUTS = """\
from pathlib import Path
def test_done():
    assert Path("/app/done").read_text() == "yes\\n" and Path("/made/when").read_text()
"""
FAKE = "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > {0}; chmod +x {0}"
# Each earns nothing. An agent has at most an exit code of its command.
CHEATS = {
    "nothing": "true",
    "a program of the system": FAKE.format("/usr/local/bin/uvx"),
    "another program of the system": FAKE.format("/usr/bin/curl"),
    "an account": "echo root::0:0::/:/bin/sh > /etc/passwd",
    "the loader's settings": "echo /app/evil.so > /etc/ld.so.preload",
    "a package in the cache": "find /var/cache/rl_core -type f -exec sh -c 'echo > {}' \\;",
    "a new cache": "mv /var/cache/rl_core /var/cache/old; mkdir -p /var/cache/rl_core/uv",
    "a planted uvx": "mkdir -p ~/.local/bin /logs/home/.local/bin; "
    + FAKE.format("/logs/home/.local/bin/uvx"),
    "a folder of PATH": FAKE.format("/opt/tools/bin/uvx"),
    "a program that stays": "(while :; do echo 1 > /logs/verifier/reward.txt; done) & sleep 0.1",
    "a pytest in the working folder": "echo 'print(1)' > pytest.py; cp pytest.py conftest.py",
}


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    if not shutil.which("mmdebstrap") or not shutil.which("bwrap"):
        pytest.skip("no package registry answers: mmdebstrap or bubblewrap is not installed")
    if why := unreachable_mirrors():
        pytest.skip(f"no package registry answers: {why}")
    try:
        urllib.request.urlopen(f"{DEBIAN}/dists/bookworm/Release", timeout=10).close()
    except OSError as error:
        pytest.skip(f"no package registry answers: {error}")
    folder = tmp_path_factory.mktemp("built") / "task"
    files = {"task.toml": TOML, "instruction.md": "Do it.\n", "environment/Dockerfile": DOCKERFILE}
    files |= {"tests/test.sh": TEST, "tests/test_outputs.py": OUTPUTS}
    files["solution/solve.sh"] = "#!/bin/sh\necho yes > done\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def score_of(task, command: str) -> float:
    async def play() -> float:
        async with TaskBoxes(driver="bubblewrap").open(str(task)) as box:
            if command == "solve":
                await box.solve()
            else:
                await box.exec(command, timeout_s=30)
            score = await box.verify()
            print(score.wrote)
            return score.reward

    return asyncio.run(play())


def test_a_built_task_is_solved_by_its_solution(task):
    assert score_of(task, "solve") == 1


@pytest.mark.parametrize("command", CHEATS.values(), ids=CHEATS)
def test_cheats_in_a_built_box_earn_nothing(task, command):
    assert score_of(task, command) == 0


@pytest.mark.parametrize(
    "command, code",
    [
        ("tree --version && id player && test -s /made/when", 0),
        # The image debian:12 has the former and not the latter.
        ("for name in useradd mount umount mkfs.ext4; do command -v $name || exit 1; done", 0),
        ("command -v ps || command -v curl", 1),
        ("touch /usr/x || touch /etc/x || touch /var/cache/rl_core/x || touch /opt/tools/bin/x", 1),
        ("python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 3)'", 1),
        ("touch /app/x /opt/x /srv/x /home/player/x /root/x /tmp/x", 0),
    ],
)
async def test_an_agent_in_a_built_box_has_its_packages_and_no_network(task, command, code):
    async with TaskBoxes(driver="bubblewrap").open(str(task)) as box:
        assert (await box.exec(command, timeout_s=30)).code == code


def test_packages_are_kept_once_the_network_gives_them(task, tmp_path, monkeypatch):
    folder = tmp_path / "task"
    shutil.copytree(task, folder)
    script = f"#!/bin/sh\n# {uuid.uuid4()}\napt-get update\necho 1 > /logs/verifier/reward.txt\n"
    (folder / "tests/test.sh").write_text(script)
    boxes = TaskBoxes(driver="bubblewrap")

    def phases_after_an_episode() -> set[str]:
        async def play() -> None:
            async with boxes.open(str(folder)):
                pass

        asyncio.run(play())
        return cached_phases(folder / "environment/Dockerfile", [[folder / "tests"]])

    with monkeypatch.context() as closed:
        closed.setenv("http_proxy", "http://127.0.0.1:9")
        assert phases_after_an_episode() == {"build"}
    assert phases_after_an_episode() == {"build"}  # Not tried again before retry_s.
    boxes.retry_s = 0.0
    assert phases_after_an_episode() == {"build", "verify"}
