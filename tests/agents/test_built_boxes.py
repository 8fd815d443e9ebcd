"""Boxes of bubblewrap with the root of an image that podman, buildah or docker builds.
scripts/test_containers.sh runs these: RL_CORE_TEST_IMAGE is an image of Debian with python3 and
pip."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from pathlib import Path

import pytest

from rl_core.environments.agents.harbor import TaskBoxes, task_image
from rl_core.environments.agents.harbor_tasks import cached_phases, read_task
from rl_core.sandbox.images import BUILDERS, build_image, remove, unpack_image

IMAGE = os.environ.get("RL_CORE_TEST_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not IMAGE, reason="no container runtime: scripts/test_containers.sh"
)
TOML = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage_mb = 512\nbuild_timeout_sec = 600\n'
DOCKERFILE = f"""\
FROM {IMAGE} AS first
RUN mkdir -p /made && date > /made/when
FROM {IMAGE} AS second
ENTRYPOINT ["/opt/enter"]
FROM second
COPY --from=first /made /made
COPY enter /opt/
RUN apt-get update && apt-get install -y --no-install-recommends tree
ENV PATH=/opt/tools/bin:$PATH
RUN useradd -m player && groupadd players && mkdir -p /opt/tools/bin
WORKDIR /app
"""
ENTER = '#!/bin/sh\necho entered > /app/entered\nexec "$@"\n'
# The form of Harbor's template, with pip instead of uv, whose installer no registry has.
TEST = """\
#!/bin/bash
apt-get update
apt-get install -y jq
export PATH="$HOME/.local/bin:$PATH"
pip install --break-system-packages pytest==8.4.1 || pip install pytest==8.4.1
if pytest /tests/test_outputs.py -rA && [ "$(echo 7 | jq .)" = 7 ]; then
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
    "a program of the system": FAKE.format("/usr/local/bin/python3"),
    "another program of the system": FAKE.format("/usr/bin/jq"),
    "an account": "echo root::0:0::/:/bin/sh > /etc/passwd",
    "the loader's settings": "echo /app/evil.so > /etc/ld.so.preload",
    "a package in the cache": "find /var/cache/rl_core -type f -exec sh -c 'echo > {}' \\;",
    "a new cache": "mv /var/cache/rl_core /var/cache/old; mkdir -p /var/cache/rl_core/apt",
    "a planted pytest": "mkdir -p ~/.local/bin /logs/home/.local/bin; "
    + FAKE.format("/logs/home/.local/bin/pytest"),
    "a folder of PATH": FAKE.format("/opt/tools/bin/pytest"),
    "a program that stays": "(while :; do echo 1 > /logs/verifier/reward.txt; done) & sleep 0.1",
    "a pytest in the working folder": "echo 'print(1)' > pytest.py; cp pytest.py conftest.py",
}


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "task"
    files = {"task.toml": TOML, "instruction.md": "Do it.\n", "environment/Dockerfile": DOCKERFILE}
    files["environment/enter"] = ENTER
    files |= {"tests/test.sh": TEST, "tests/test_outputs.py": OUTPUTS}
    files["solution/solve.sh"] = "#!/bin/sh\necho yes > done\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "environment/enter").chmod(0o755)
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
        # The second stage's ENTRYPOINT is inherited.
        ("cat /app/entered", 0),
        ("command -v jq", 1),
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
        return cached_phases(read_task(folder))

    with monkeypatch.context() as closed:
        closed.setenv("http_proxy", "http://127.0.0.1:9")
        assert phases_after_an_episode() == {"build"}
    assert phases_after_an_episode() == {"build"}  # Not tried again before retry_s.
    boxes.retry_s = 0.0
    assert phases_after_an_episode() == {"build", "verify"}


@pytest.mark.parametrize("engine", BUILDERS)
def test_images_of_all_engines_are_unpacked_alike(engine, tmp_path, monkeypatch):
    if not shutil.which(engine) or (
        engine == "docker" and os.system("docker info > /dev/null 2>&1")
    ):
        pytest.skip(f"no container runtime: {engine}")
    (tmp_path / "Dockerfile").write_text(
        'FROM scratch\nCOPY of /opt/of\nENV A=b\nENTRYPOINT ["/x", "a"]\nWORKDIR /opt\n'
    )
    (tmp_path / "of").write_text(engine)
    monkeypatch.setenv("RL_CORE_ROOTS", str(tmp_path / "cache"))
    image = unpack_image(engine, build_image(engine, tmp_path, 60.0), 60.0)
    assert (image.environ["A"], image.cwd, image.entrypoint) == ("b", "/opt", ["/x", "a"])
    [root] = image.layers
    file = Path(root) / "opt/of"
    assert file.read_text() == engine
    assert file.stat().st_uid == (os.getuid() or 65534)
    remove(tmp_path / "cache")


def test_an_image_that_a_task_names_is_unpacked(task, tmp_path):
    folder = shutil.copytree(task, tmp_path / "named", ignore=lambda *_: ["environment"])
    name = read_task(task).image
    task_image(read_task(task), network=True)
    (folder / "task.toml").write_text(f'{TOML}docker_image = "{name}"\n')
    assert score_of(folder, "solve") == 1


def test_a_build_that_fails_names_its_line(task, tmp_path):
    folder = shutil.copytree(task, tmp_path / "bad")
    (folder / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nRUN useradd x && exit 3\n")
    with pytest.raises(RuntimeError, match=r"(?s)build --tag .* failed: .*useradd x && exit 3"):
        score_of(folder, "true")
