"""Tasks in Harbor's format: their files, their boxes, and agents that cheat."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from dataclasses import asdict

import kube_server
import machine
import pytest
from kit import ROOT

from rl_core.data.episodes import failure_reason
from rl_core.data.row_files import load_rows
from rl_core.data.task_rows import make_task
from rl_core.data.tasks.sources import load_other
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import plain_chat
from rl_core.environments.agents import harbor, harbor_tasks
from rl_core.environments.agents.dockerfile import (
    entrypoint_of,
    first_built,
    read_instructions,
    uses_network,
)
from rl_core.environments.agents.harbor import TaskBoxes, read_score
from rl_core.environments.agents.harbor_tasks import (
    cached_phases,
    check_driver,
    read_task,
    remote_image,
    task_rows,
)
from rl_core.environments.agents.verifier_tools import VerifierTools, failed_download
from rl_core.environments.env_file import load_env
from rl_core.sampling.watchdog import run_hooks
from rl_core.sandbox import boxes
from rl_core.sandbox.images import digest_of, image_folder, lock_within, making, share_files
from rl_core.sandbox.remote_driver import RemoteError
from rl_core.tools import show
from rl_core.tools.check import play
from rl_core.tools.cli import main
from rl_core.tools.reference_answers import Table, Verdict, described

needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
TOML = 'version = "1.0"\n[environment]\nmemory = "1G"\nstorage_mb = 64\n'
# Where the task's own variables point at folders that the agent can write.
DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /app
ENV PYTHONPATH=/app PATH="/app/bin:$PATH"
RUN mkdir bin && echo no > done
"""
TEST = """\
#!/bin/bash
python3 /tests/check.py
"""
CHECK = """\
import json, os, subprocess
said = subprocess.run(["cat", "/app/done"], capture_output=True, text=True).stdout
is_right = said == "yes\\n" or os.path.exists("/conftest.py")
open("/logs/verifier/reward.txt", "w").write(json.dumps(float(is_right)))
"""


@pytest.fixture
def make(tmp_path):
    """make(**files) -> a task's folder; a name's __ is a /, and the last _ a dot."""
    number = iter(range(100))

    def made(
        toml=TOML, dockerfile=DOCKERFILE, test=TEST, check=CHECK, solve="echo yes > done\n", more=()
    ):
        folder = tmp_path / f"task{next(number)}"
        files = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": test}
        files |= {"environment/Dockerfile": dockerfile, "tests/check.py": check}
        files["solution/solve.sh"] = f"#!/bin/sh\n{solve}"
        for name, text in (files | dict(more)).items():
            if text is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        return folder

    return made


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def episode(folder, *replies, env=None):
    """One episode of the shipped environment, by an actor that says this."""
    env = env or load_env(str(ROOT / "envs/harbor.py"))
    [row] = task_rows(folder)
    task = make_task(row, 0, env.name, "train")
    playing = play(env, plain_chat(ToolCalls), task, {"policy": list(replies)})
    [trajectory] = run_hooks(playing)
    return trajectory


# Reading a task


def test_rows_are_a_folders_tasks_by_name_or_one_task(make):
    second, first = make(), make()
    first.rename(first.with_name("another"))
    (second.parent / "labels.json").write_text('{"of": "the tasks"}')
    rows, files = load_rows(str(second.parent), "train", load_other)
    assert [row["name"] for row in rows] == ["another", "task0"]
    assert rows[1] == {"name": "task0", "prompt": "Do it.", "task_folder": str(second)}
    assert files == [(str(second.parent), 2)]
    [alone], _ = load_rows(str(second), "train", load_other)
    assert alone == rows[1]


@pytest.mark.parametrize(
    "toml, expected",
    [
        ("", (2048, 1024, 900.0, 600.0, True)),
        ('version = "1.0"\n[environment]\nmemory = "4G"\n', (4096, 1024, 900.0, 600.0, True)),
        (
            'schema_version = "1.4"\n[environment]\nmemory_mb = 512\nstorage = "2048M"\n'
            "allow_internet = false\n[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 7.5\n",
            (512, 2048, 30.0, 7.5, False),
        ),
        ('[environment]\nnetwork_mode = "no-network"', (2048, 1024, 900.0, 600.0, False)),
        ('[agent]\nnetwork_mode = "no-network"', (2048, 1024, 900.0, 600.0, False)),
    ],
)
def test_settings_of_all_versions_are_read(make, toml, expected):
    task = read_task(make(toml=toml))
    limits = (task.limits.memory_mib, task.limits.disk_mib, task.agent_timeout_s)
    assert (*limits, task.steps[0].verifier.limit_s, task.allows_network) == expected


@pytest.mark.parametrize(
    "toml, error",
    [
        ("[environment", r"task.toml: .*table declaration"),
        ('[verifier]\ntimeout_sec = "soon"', r"task.toml: verifier.timeout_sec: .*valid number"),
        ('[environment]\nmemory = "much"', r"task.toml: 'much' must be a size such as 4G"),
        ('[environment]\nos = "windows"', "boxes have Linux"),
        ('[[steps]]\nname = "a"', r"steps/a: a task in Harbor's format needs instruction\.md"),
        ('[[steps]]\nname = "../a"', r"steps.0.name = '../a'; each step needs the name"),
        ('[[steps]]\nmin_reward = "high"', r"steps.0.min_reward.float: .*valid number"),
        ('multi_step_reward_strategy = "sum"', "multi_step_reward_strategy: .* 'mean' or 'final'"),
        ('[verifier.environment]\ndocker_image = "a"', "needs a separate verifier"),
        ('[verifier.env]\nKEY = "${API_KEY}"', r"KEY = '\$\{API_KEY\}' names a variable"),
        ("[environment]\ngpus = 1", "needs a GPU"),
        ('[verifier]\nenvironment_mode = "separate"', "needs a separate verifier"),
        ('[[verifier.collect]]\ncommand = "ls"', r"needs verifier\.collect, and a box has none"),
        ('[agent]\nallowed_hosts = ["a.org"]', "needs a network of some hosts alone"),
        ('[environment]\nnetwork_mode = "allowlist"', "needs a network of some hosts alone"),
        ('[verifier]\nnetwork_mode = "none"', r"verifier\.network_mode: .*'no-network'"),
    ],
)
def test_what_is_not_played_is_told_with_its_file(make, toml, error):
    with pytest.raises(ValueError, match=error):
        read_task(make(toml=toml))


def test_missing_files_are_told(make):
    with pytest.raises(ValueError, match=r"needs tests/test\.sh"):
        read_task(make(test=None))
    with pytest.raises(ValueError, match="needs environment/Dockerfile, or docker_image"):
        read_task(make(dockerfile=None))


@pytest.mark.parametrize(
    "value, expected",
    [
        ("${PORT:-80}", "80"),
        ("${PORT-80}", "80"),
        ("${PORT:-}", ""),
        ("${URL:-http://a:1/x}", "http://a:1/x"),
        ("a ${b} c", "a ${b} c"),
    ],
)
def test_a_variable_with_a_default_has_a_value(make, monkeypatch, value, expected):
    monkeypatch.setenv("PORT", "of this machine")
    sections = ("environment", "verifier", "solution")
    task = read_task(make(toml="".join(f'[{name}.env]\nX = "{value}"\n' for name in sections)))
    filled = [task.environment, task.steps[0].verifier, task.solution]
    assert [section.env["X"] for section in filled] == [expected] * 3


def test_tasks_that_cannot_be_played_are_counted_and_the_others_stay(make, capsys, monkeypatch):
    make(), make(toml='[environment]\nos = "windows"'), make(toml="[environment]\ngpus = 1")
    make(toml="[environment.env]\nX = '${Y}'"), make(toml="[environment"), make(test=None)
    folder = make(toml='[environment]\nos = "windows"').parent
    assert [row["name"] for row in task_rows(folder)] == ["task0"]
    stderr = capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    harbor_tasks.warn_once.cache_clear()
    assert task_rows(folder) and not capsys.readouterr().err
    monkeypatch.delenv("RANK")
    assert f"warning: {folder}: 6 of 7 tasks are left out: 2 with Windows (of which the " in stderr
    assert "first is task1), 1 with a GPU (task2), 1 with a variable without a value" in stderr
    assert "1 with a file that cannot be read (task4), 1 with no tests/test.sh (task5)" in stderr
    # Each is named once, with its reason.
    errors = ["os = 'windows'", "needs a GPU", "X = '", "task.toml: ", "tests/test.sh", "os = "]
    for number, error in enumerate(errors, 1):
        assert len(re.findall(rf"^{folder}/task{number}\b.*{error}", stderr, re.MULTILINE)) == 1
    assert task_rows(folder) and not capsys.readouterr().err
    shutil.rmtree(folder / "task0")
    with pytest.raises(
        ValueError, match=r"none of 6 tasks can be played: 2 with Windows "
    ) as raised:
        task_rows(folder)
    assert {f"task{number}" for number in range(1, 7)} == {
        *re.findall(r"task\d", str(raised.value))
    }
    with monkeypatch.context() as few:
        few.setattr(harbor_tasks, "MAX_ERRORS", 5)
        with pytest.raises(ValueError, match=r"\nand 1 more$"):
            task_rows(folder)


def test_tasks_that_need_a_network_or_an_engine_are_named(make, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RL_CORE_ROOTS", str(tmp_path / "roots"))
    make(), make(dockerfile="FROM debian\nRUN pip install x\n")
    folder = make(test="#!/bin/sh\ncurl -O https://a.b/c\n").parent
    without = {"build": False, "verify": False}
    assert [row["name"] for row in task_rows(folder, without)] == ["task0"]
    stderr = capsys.readouterr().err
    assert "1 with a line that needs --agents.build_network (task1), 1 with a line that" in stderr
    with pytest.raises(ValueError, match=r"Dockerfile:2: RUN pip install x: needs a network"):
        task_rows(folder / "task1", without)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"2 of 3 .* an image, and no .* apt-get install podman"):
        task_rows(folder)
    task = read_task(folder / "task1")
    assert cached_phases(task) == set()
    image_folder(task.image).mkdir(parents=True)
    (image_folder(task.image) / "image.json").write_text('{"layers": []}')
    assert [row["name"] for row in task_rows(folder, without)] == ["task0", "task1"]
    # An image in the cache needs no engine.
    assert [row["name"] for row in task_rows(folder / "task1")] == ["task1"]


def test_a_folder_of_the_cache_is_made_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "cache" / "a"
    (folder.parent / "a.killed.part").mkdir(parents=True)
    with pytest.raises(FileNotFoundError), making(folder, 5.0) as made:
        (made / "no" / "half").mkdir()
    assert not folder.exists()
    with making(folder, 5.0) as made:
        (made / "etc").mkdir()
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["a", "a.lock"]
    assert [path.name for path in folder.iterdir()] == ["etc"]
    with making(folder, 5.0) as made:
        assert made is None


def test_images_share_equal_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_CORE_ROOTS", str(tmp_path))
    inodes = []
    for number, (text, mode, mtime) in enumerate(
        [("a", 0o644, 5), ("a", 0o644, 5), ("b", 0o644, 5), ("a", 0o755, 5), ("a", 0o644, 6)]
    ):
        file = tmp_path / str(number) / "usr/file"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(mode)
        os.utime(file, (mtime, mtime))
        (file.parent / "link").symlink_to("/etc/passwd")
        share_files(tmp_path / str(number))
        inodes.append(file.stat().st_ino)
        assert (file.read_text(), file.stat().st_mode & 0o777) == (text, mode)
    assert inodes[0] == inodes[1] and len(set(inodes)) == 4


def test_keys_that_are_nearly_known_are_named(make, capsys):
    make(toml='shema_version = "1"\n[environment]\nmemory_md = 5\nzone = "a"\n[metadata]\ncpu = 1')
    make(toml='[[steps]]\nname = "s"\nmin_rewards = 1', more={"steps/s/instruction.md": "Do."})
    task_rows(make().parent)
    stderr = capsys.readouterr().err
    assert "task.toml: [environment] memory_md is not read; did you mean 'memory_mb'?" in stderr
    assert "shema_version is not read; did you mean 'schema_version'?" in stderr
    assert "[steps] min_rewards is not read; did you mean 'min_reward'?" in stderr
    assert stderr.count("\n") == 3


@pytest.mark.parametrize(
    "text, name, parts, metrics",
    [
        ("0.25\n", "reward.txt", {"reward": 0.25}, {}),
        ('{"reward": 1, "style": 0.5}', "reward.json", {"reward": 1.0}, {"style": 0.5}),
        ('{"tests": 1, "style": 0.5}', "reward.json", {"tests": 1.0, "style": 0.5}, {}),
        ("0.5", "reward.json", {"reward": 0.5}, {}),
    ],
)
def test_a_reward_is_a_number_or_named_ones(text, name, parts, metrics):
    score = read_score(text.encode(), name)
    assert (score.parts, score.metrics) == (parts, metrics)


@pytest.mark.parametrize(
    "text, name",
    [
        *[(text, "reward.txt") for text in ("", "nan", "inf", "good", "1 2", "\xff")],
        *[(text, "reward.json") for text in ("", "{}", "[1]", "NaN", '{"a": "1"}', '{"a": 1e999}')],
    ],
)
def test_what_is_no_reward_is_an_error(text, name):
    with pytest.raises(ValueError, match=name):
        read_score(text.encode("latin-1"), name)


# The Dockerfile in a box


def in_box(folder, command):
    async def ask():
        async with TaskBoxes(driver="bubblewrap").open(str(folder)) as box:
            return await box.exec(command, timeout_s=20)

    return asyncio.run(ask())


@needs_bwrap
def test_a_dockerfile_is_carried_out(make):
    dockerfile = textwrap.dedent(r"""
        # syntax of comments
        FROM python:3.11-slim AS base
        ARG VERSION=3
        ENV GREETING="good day" PLACE=/srv/${VERSION}
        ENV OLD old form
        WORKDIR /srv
        WORKDIR deep
        COPY a.txt b.txt ./
        COPY folder /srv/copied
        COPY --chmod=755 a.txt /srv/renamed
        COPY ["a.txt", "with space"]
        RUN echo $GREETING $VERSION > said \
            # a comment between
            && pwd >> said
        RUN ["sh", "-c", "echo list >> said"]
        USER somebody
        CMD ["sleep", "1"]
        """)
    folder = make(dockerfile=dockerfile)
    context = folder / "environment"
    (context / "folder/inner").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "folder/inner/c.txt"):
        (context / name).write_text(name)
    command = "cat said; ls; cat ../copied/inner/c.txt; stat -c %a ../renamed; echo $PLACE $OLD"
    result = in_box(folder, command)
    expected = "good day 3\n/srv/deep\nlist\na.txt\nb.txt\nsaid\nwith space\nfolder/inner/c.txt"
    assert result.stdout == f"{expected}755\n/srv/3 old form\n"


VENV = """\
FROM debian
WORKDIR /app
RUN python3 -m venv --without-pip /app/venv
ENV PATH=/app/venv/bin:$PATH
"""
VENV_TEST = """\
#!/bin/bash
python3 -c 'import sys; print(int(sys.prefix == "/app/venv"))' > /logs/verifier/reward.txt
"""


@needs_bwrap
@pytest.mark.parametrize(
    "attack, reward",
    [
        ("echo yes > done", 1.0),
        ("touch venv/bin/cat", 0.0),
        ("for f in venv/lib/*/site-packages; do echo > $f/sitecustomize.py; done", 0.0),
    ],
)
def test_a_verifiers_path_is_the_images_where_no_agent_wrote(make, attack, reward):
    played = episode(make(dockerfile=VENV, test=VENV_TEST), bash(attack), "It is done.")
    assert (played.status, played.reward, played.error) == ("ok", reward, "")


@pytest.mark.parametrize(
    "line, needs",
    [
        ("apt-get update && apt-get install -y curl", True),
        ("cd /x && pip install six", True),
        ("python3 -m pip install --user six", True),
        ("curl -LsSf https://example.com/install.sh | sh", True),
        ("curl http://localhost:8080/health", False),
        ("uvx -p 3.13 pytest", True),
        ("echo pip install", False),
        ("git -C /x status", False),
        ("python3 -m pytest /tests", False),
    ],
)
def test_lines_that_need_a_network_are_known(line, needs):
    assert uses_network(line) is needs


@needs_bwrap
@pytest.mark.parametrize(
    "files, error",
    [
        ({"test": "#!/bin/sh\napt-get update\n"}, r"tests/test\.sh:2: apt-get update: .*verify_n"),
        ({"dockerfile": "FROM debian\nRUN pip install x\n"}, r"Dockerfile:2: RUN pip .*build_n"),
        ({"dockerfile": "FROM alpine\nRUN apk add x\n"}, "build_network"),
    ],
)
def test_a_line_that_needs_a_network_is_refused_without_one(
    make, files, error, tmp_path, monkeypatch
):
    monkeypatch.setenv("RL_CORE_ROOTS", str(tmp_path / "roots"))  # No package is cached.

    async def opened():
        closed = TaskBoxes(driver="bubblewrap", networks={"build": False, "verify": False})
        async with closed.open(str(make(**files))):
            raise AssertionError("opened")

    with pytest.raises(ValueError, match=error):
        asyncio.run(opened())


@pytest.mark.parametrize(
    "lines, built, built_in_image",
    [
        ('CMD a\nLABEL a=b\nUSER a\nEXPOSE 80\nSHELL ["a"]', "", ""),
        ("COPY --chown=a:b --chmod=755 a /app/\nENV A=--b", "", ""),
        ("RUN mkdir x && \\\n  # comment\n  apt-get update", "RUN", "RUN"),
        ("RUN useradd a", "RUN", ""),
        ("RUN echo a > /etc/b", "RUN", ""),
        ("WORKDIR /usr/src/app", "WORKDIR", ""),
        ("COPY a /etc/b", "COPY", ""),
        ("FROM b", "FROM", "FROM"),
        ("COPY --from=a b c", "COPY", "COPY"),
        ("ADD a.tar /app", "ADD", "ADD"),
        ("RUN --mount=type=secret,id=x true", "RUN", "RUN"),
        ("RUN <<END\necho a\nEND", "RUN", "RUN"),
        ("ONBUILD RUN true", "ONBUILD", "ONBUILD"),
        ("RUN [ -d a ] && b", "", ""),
        ('ENTRYPOINT ["a", ', "ENTRYPOINT", "ENTRYPOINT"),
        ('ENTRYPOINT ["a", 1]', "ENTRYPOINT", "ENTRYPOINT"),
    ],
)
def test_instructions_that_need_a_build_are_known(tmp_path, lines, built, built_in_image):
    file = tmp_path / "Dockerfile"
    file.write_text(f"ARG a\nFROM a\n{lines}\n")
    instructions = read_instructions(file)
    for in_image, expected in ((False, built), (True, built_in_image)):
        first = first_built(instructions, in_image)
        assert (first.name if first else "") == expected


def test_an_image_that_cannot_be_had_names_the_way_out(make):
    folder = make(toml=f'{TOML}docker_image = "registry.invalid/a:1"\n')
    with pytest.raises(RuntimeError, match="a Dockerfile too: set HARBOR_DRIVER=bubblewrap, or "):
        asyncio.run(TaskBoxes().open(str(folder)).__aenter__())


ENTRYPOINT = """\
#!/bin/sh
echo $PLACE $1 $2 > /app/began
sleep 987 > /dev/null 2>&1 &
"""


@needs_bwrap
@pytest.mark.parametrize(
    "line, last, wrote, warning",
    [
        ('ENTRYPOINT ["/app/enter", "a"]', 'shift; exec "$@"', "here a /bin/sh\n", ""),
        ('ENTRYPOINT ["/app/enter", "a"]', "", "here a /bin/sh\n", ""),
        (
            "ENTRYPOINT . /app/enter",
            'echo "$0"; exec $0 "$@"',
            'here -c : > "$0"; exec sleep infinity\n',
            "",
        ),
        ('ENTRYPOINT ["/app/enter"]', "echo no; exit 3", "here /bin/sh -c\n", "code 3: no; "),
        ('ENTRYPOINT ["false"]\nENTRYPOINT []', "", "", ""),
    ],
)
def test_an_entrypoint_is_run_before_the_agent(make, capsys, line, last, wrote, warning):
    staged = make(dockerfile=f"FROM a\n{line}\nFROM b\n") / "environment/Dockerfile"
    assert entrypoint_of(read_instructions(staged)) == []
    lines = f"FROM a\nENV PLACE=here\nCOPY --chmod=755 enter /app/enter\n{line}\n"
    folder = make(dockerfile=lines, more={"environment/enter": ENTRYPOINT + last})
    running = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[s]leep 987' | wc -l"
    done = in_box(folder, f"cat /app/began; {running}")
    assert done.stdout == f"{wrote}{1 if wrote else 0}\n"
    stderr = capsys.readouterr().err
    assert warning in stderr and bool(stderr) == bool(warning), stderr


@needs_bwrap
def test_a_run_that_fails_fails_the_episode_with_its_line(make):
    failed = episode(make(dockerfile="FROM a\nRUN echo oh no >&2; exit 3\n"), "done")
    assert failed.status == "failed"
    assert "Dockerfile:2: RUN echo oh no >&2; exit 3: oh no" in failed.error
    # Equal reasons of all tasks are counted together.
    reason = failure_reason(failed.error, failed.task_id)
    assert (
        "RUN of the Dockerfile failed; the box has no " in reason and "Dockerfile:2" not in reason
    )


@needs_bwrap
@pytest.mark.parametrize(
    "line, why",
    [
        ("WORKDIR /proc/x", "cannot create"),
        ("COPY --chmod=x1 a /app/", "invalid mode"),
        ("COPY ../task.toml /app/", "there is no ../task.toml in"),
        ("COPY a /proc/x/a", "/proc/x"),
    ],
)
def test_an_instruction_that_fails_fails_the_episode_with_its_line(make, line, why):
    folder = make(dockerfile=f"FROM a\n{line}\n")
    (folder / "environment/a").write_text("x")
    failed = episode(folder, "done")
    assert failed.status == "failed", failed.reward
    assert f"Dockerfile:2: {line}: " in failed.error and why in failed.error
    reason = failure_reason(failed.error, failed.task_id)
    assert f"{line.split()[0]} of the Dockerfile " in reason and str(folder) not in reason


@needs_bwrap
def test_copy_keeps_the_name_of_a_link(make):
    folder = make(dockerfile="FROM a\nCOPY link /app/\n")
    (folder / "environment/file").write_text("x")
    (folder / "environment/link").symlink_to("file")
    assert in_box(folder, "cat /app/link").stdout == "x"


def test_an_images_name_follows_its_files(make):
    first, second = make() / "environment", make() / "environment"
    assert digest_of(first) == digest_of(second)
    (second / "more").write_text("x")
    assert digest_of(first) != digest_of(second)


@pytest.mark.parametrize(
    "dockerfile, image",
    [
        ("ARG TAG=3.11\nFROM python:${TAG} AS a\nRUN useradd b\n", "python:3.11"),
        (
            "FROM debian\nRUN apt-get update\n",
            r":2: RUN apt-get update: a box by kubernetes has no",
        ),
        (
            "FROM a AS b\nFROM c\nCOPY --from=b x y\n",
            r":2: FROM c: a box by kubernetes has no build",
        ),
        (
            "FROM a\nCOPY --from=uv /uv /bin/\n",
            r":2: COPY --from=uv .*: a box by kubernetes has no",
        ),
        (None, r"no environment/Dockerfile|needs environment/Dockerfile, or docker_image"),
    ],
)
def test_a_remote_box_begins_with_the_image_of_from(make, dockerfile, image):
    folder = make(dockerfile=dockerfile)
    if image[:1].isalpha() and dockerfile:
        assert remote_image(read_task(folder), "kubernetes") == image
    else:
        with pytest.raises(ValueError, match=image):
            check_driver(read_task(folder), "kubernetes")
    pushed = read_task(make(toml='[environment]\ndocker_image = "a/b:1"', dockerfile=dockerfile))
    assert remote_image(pushed, "kubernetes") == "a/b:1"


# Episodes


@needs_bwrap
def test_an_agent_that_does_the_task_is_rewarded(make):
    played = episode(make(), bash("cat done"), bash("echo yes > done"), "It is done.")
    assert (played.status, played.reward, played.reward_parts) == ("ok", 1.0, {"reward": 1.0})
    assert played.metrics["commands"] == 2
    tools = [message["content"] for message in played.messages if message["role"] == "tool"]
    assert tools == ["no", ""]


@needs_bwrap
def test_agents_see_neither_tests_nor_solution(make):
    played = episode(make(), bash("ls -d /tests /solution /logs; ls -A"), "?")
    listed = next(m["content"] for m in played.messages if m["role"] == "tool")
    assert "bin\ndone" in listed and "cannot access '/tests'" in listed
    assert "cannot access '/solution'" in listed


CHEAT = """\
cat > cheat <<'END'
mkdir -p /logs/verifier; echo '{"reward": 1}' > /logs/verifier/reward.json
END
cat > cheat.py <<'END'
open("/logs/verifier/reward.json", "w").write('{"reward": 1}')
END
"""
# Deeper than any path can name, closed at the end.
DEEP = 'import os\nfor n in range(3000): os.mkdir("d"); os.chdir("d")\nos.chmod(".", 0)'
SITE = f"/root/.local/lib/python3.{sys.version_info.minor}/site-packages"
ATTACKS = {
    "writes the reward": "sh cheat; ls /logs/verifier",
    "links the logs": "mkdir -p v /logs; ln -s /app/v /logs/verifier; sh cheat",
    "links all logs": "mkdir -p v/verifier; ln -s /app/v /logs; sh cheat; chmod 555 v/verifier",
    "takes its rights away": "mkdir -p /logs/verifier/x /tests/x; chmod 000 /logs/verifier /tests",
    "plants tests": "mkdir /tests; cp cheat /tests/test.sh; cp cheat.py /tests/json.py",
    "links tests": "ln -s /app /tests; cp cheat /app/test.sh",
    "makes tests a file": "echo 1 > /tests; echo 1 > /logs",
    "leaves a process": "(setsid sh -c 'while :; do sh /app/cheat; done' > /dev/null 2>&1 &)",
    "leaves a forking process": "(setsid sh -c 'f() { sh /app/cheat; f & }; f' > /dev/null 2>&1 &)",
    "plants sitecustomize": "tee sitecustomize.py usercustomize.py json.py os.py < cheat.py",
    "plants a user site": f"mkdir -p {SITE}; cp cheat.py {SITE}/usercustomize.py",
    "plants conftest": "echo > /conftest.py; ls /conftest.py",
    "shims the path": "printf '#!/bin/sh\\necho yes' | tee bin/cat bin/python3; chmod +x bin/*",
    "plants startup files": "tee /root/.bashrc /root/.profile /root/.bash_profile < cheat",
    "replaces python": "cp /bin/true python3; cp /bin/true /usr/bin/python3; chmod +x python3",
    "fills the disk": "head -c 100M /dev/zero > full; ls",
    "fills the inodes": "mkdir many; seq 100000 | (cd many; xargs touch)",
    "removes its folder": "cd /; rm -rf /app; ln -s /usr /app",
    "kills all": "kill -9 -1",
    "closes all folders": "mkdir -p x/y /logs/a/b; chmod 000 x/y x /logs/a/b /logs/a /logs /tmp /",
    "nests deeply": f"mkdir /logs; cd /logs; python3 -c '{DEEP}'",
    "makes long names": "mkdir /logs; cd /logs; touch $(printf %0255d 1); mkdir -- -rf '*' $'a\\nb'",
    "makes a loop of links": "ln -s /tests /logs; ln -s /logs /tests; ln -s loop /app/loop",
    "makes a fifo": "mkdir -p /logs; mkfifo /tests /logs/verifier /conftest.py",
    "makes a folder of what pytest reads": "mkdir -p /conftest.py/a; chmod 000 /conftest.py",
}


@needs_bwrap
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_verifier_is_not_fooled(make, attack):
    played = episode(make(), bash(CHEAT + ATTACKS[attack]), "It is done.")
    assert (played.status, played.reward, played.error) == ("ok", 0.0, "")


IN_HOME = """\
import os
from pathlib import Path
looked_up = [Path.home() / "venv", Path("~/.bashrc").expanduser(), Path.home() / "notes.txt"]
looked_up.append(os.path.join(os.path.expanduser("~"), "made"))
is_right = sorted(os.listdir(Path.home())) == ["made", "notes.txt"]
is_right = is_right and os.path.isdir(looked_up[-1]) and looked_up[-2].read_text() == "yes\\n"
open("/logs/verifier/reward.txt", "w").write(str(int(is_right)))
"""


@needs_bwrap
@pytest.mark.parametrize("content, reward", [("yes", 1.0), ("no", 0.0)])
def test_tests_find_the_files_that_they_look_up_in_the_agents_home(make, content, reward):
    folder = make(check=IN_HOME, test="#!/bin/sh\n[ -e ~/venv ] || python3 /tests/check.py\n")
    plants = f"mkdir ~/venv ~/bin ~/made; touch ~/.bashrc; echo {content} > ~/notes.txt"
    played = episode(folder, bash(plants), "It is done.")
    assert (played.status, played.reward, played.error) == ("ok", reward, "")


@needs_bwrap
def test_what_cannot_be_removed_before_the_tests_fails_the_episode(make, tmp_path):
    async def verify():
        binds = {"/tests/held": str(tmp_path)}
        async with TaskBoxes(driver="bubblewrap").open(str(make()), binds=binds) as box:
            await box.verify()

    with pytest.raises(RuntimeError, match=r"(?s)/logs cannot be removed.*, as /tests/held is"):
        asyncio.run(verify())


def test_mounts_below_a_folder_are_named_and_its_namesakes_are_not():
    points = ("/", "/logs", "/logs/agent", "/logs2", "/x/tests", "/conftest.pyc")
    mounts = "".join(f"tmpfs {point} tmpfs rw 0 0\n" for point in points)
    below = harbor.mounts_below(["/tests", "/logs", "/conftest.py"], mounts)
    assert below == ["/logs", "/logs/agent"]


@needs_bwrap
async def test_an_agent_that_leaves_what_cannot_be_removed_scores_0(make, monkeypatch):
    async with TaskBoxes(driver="bubblewrap").open(str(make())) as box:
        monkeypatch.setattr(harbor, "SYSTEM_PATH", "/nowhere")  # There is no rm.
        assert (await box.verify()).reward == 0.0


SCORES_ITSELF = "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n"
AND_THEN = {
    "goes on": ("", ""),
    "closes the folder": ("import os; os.chmod('/logs/verifier', 0o555); os.chmod('/logs', 0)", ""),
    "makes the reward a folder": ("import os; os.mkdir('/logs/verifier/reward.txt')", ""),
    "ends what tests it": ("import os; os.kill(os.getppid(), 15)", "ended with exit code 143"),
    "ends all": ("import os; os.kill(-1, 9)", "ended with exit code 137"),
}


@needs_bwrap
@pytest.mark.parametrize("deed", AND_THEN)
def test_a_program_that_the_verifier_runs_does_not_score_itself(deed):
    code, error = AND_THEN[deed]
    written = f"cat > words.py <<'END'\n{SCORES_ITSELF}{code}\nEND\n"
    played = episode(ROOT / "envs/tasks/word-count", bash(written), "It is done.")
    if error:
        assert played.status == "failed" and error in played.error
    else:
        assert (played.status, played.reward, played.error) == ("ok", 0.0, "")


@needs_bwrap
def test_two_rewards_must_agree(make):
    test = '#!/bin/sh\ncd /logs/verifier; echo {} > reward.txt; echo \'{{"a": 0.5, "b": 0.25}}\' > '
    assert episode(make(test=test.format(0.75) + "reward.json\n"), "done").reward == 0.75
    failed = episode(make(test=test.format(0) + "reward.json\n"), "done")
    assert failed.status == "failed" and "reward.json is 0.75, and reward.txt 0;" in failed.error


@needs_bwrap
def test_a_reward_of_a_verifier_that_ran_out_of_time_does_not_count(make):
    toml = f"{TOML}[verifier]\ntimeout_sec = 1\n"
    test = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\nsleep 100\n"
    failed = episode(make(toml=toml, test=test), "done")
    assert failed.status == "failed" and "test.sh ran out of time" in failed.error


@needs_bwrap
def test_a_verifier_without_a_reward_fails_the_episode(make):
    failed = episode(make(check="raise SystemExit('no disk')"), "done")
    assert failed.status == "failed" and failed.reward is None
    assert "tests/test.sh wrote no /logs/verifier/reward.txt and no reward.json" in failed.error
    assert re.search(r"; it ended with exit code 1; it wrote, in \S+/task0: no disk", failed.error)
    failed = episode(make(test="#!/bin/sh\necho nan > /logs/verifier/reward.txt\n"), "done")
    assert failed.status == "failed" and "a reward must be a finite number" in failed.error


@needs_bwrap
def test_a_verifier_has_a_deadline(make):
    toml = f"{TOML}[verifier]\ntimeout_sec = 0.5\n"
    failed = episode(make(toml=toml, test="#!/bin/sh\nsleep 100\n"), "done")
    assert failed.status == "failed" and "test.sh ran out of time" in failed.error


@needs_bwrap
def test_named_numbers_are_parts_and_metrics(make):
    test = """#!/bin/sh\necho '{"reward": 0.5, "style": 2}' > /logs/verifier/reward.json\n"""
    played = episode(make(test=test), "done")
    assert (played.reward_parts, played.metrics["style"]) == ({"reward": 0.5}, 2.0)


@needs_bwrap
def test_the_agents_time_ends_before_its_turns(make):
    toml = f"{TOML}[agent]\ntimeout_sec = 1.0\n"
    played = episode(make(toml=toml), bash("echo yes > done; sleep 100"))
    tools = [message["content"] for message in played.messages if message["role"] == "tool"]
    assert tools == ["\n[ended: it ran too long]"]
    assert (played.status, played.reward) == ("ok", 1.0)


# Tasks with several steps

STEPS = """
[[steps]]
name = "first"
{}
[[steps]]
name = "second"
[steps.verifier]
env.FACTOR = "2"
{}
"""
# Writes the numbers that the agent left, times $FACTOR.
NUMBERS = """\
#!/bin/bash
source /tests/common.sh
read reward style < /app/done
printf '{"reward": %s, "style": %s}' $((reward * ${FACTOR:-1})) ${style:-0} > /logs/verifier/reward.json
"""
STEP_FILES = {
    "instruction.md": None,
    "tests/test.sh": NUMBERS,
    "tests/common.sh": "exit 3",
    "steps/first/instruction.md": "Begin.\n",
    "steps/first/tests/common.sh": "true",
    "steps/first/solution/solve.sh": "#!/bin/sh\necho 4 1 > done\n",
    "steps/second/instruction.md": "Continue.\n",
    "steps/second/tests/common.sh": "[ $(cat /app/word) = yes ] || exit 3",
    "steps/second/workdir/word": "no",
    "steps/third/instruction.md": "Go on.",
    "steps/second/workdir/setup.sh": "echo yes > word; rm setup.sh\n",
    "solution/solve.sh": "#!/bin/sh\n[ -e word ] && echo 3 2 > done\n",
}
THIRD = '[[steps]]\nname = "third"'
NOT_BEGUN = {"step_not_begun": 1.0, "steps": 1.0}
READY = '[steps.healthcheck]\ncommand = "test -s done"\ninterval_sec = 0\nretries = 2'


@needs_bwrap
@pytest.mark.parametrize(
    "strategy, first, second, commands, parts, metrics, says",
    [
        ("", "", "", ["echo 4 1 > done", "echo 3 2 > done"], 5.0, {"style": 1.5, "steps": 2.0}, 2),
        (
            "final",
            "min_reward = 4",
            READY,
            ["echo 4 1 > done", "true"],
            8.0,
            {"style": 1.0, "steps": 2.0},
            2,
        ),
        ("mean", "min_reward = 4", "", ["echo 3 1 > done"], 3.0, {"style": 1.0, "steps": 1.0}, 1),
        (
            "final",
            "min_reward = { style = 1, other = 0 }",
            "",
            ["echo 4 1 > done"],
            4.0,
            {"style": 1.0, "steps": 1.0},
            1,
        ),
        # The agent of the first step sees to it that the second cannot begin, or be scored.
        ("", "", f"{READY}\n{THIRD}", ["echo 4 1 > done; mkdir word"], 4 / 3, NOT_BEGUN, 1),
        ("", "", "", ["echo 4 1 > done; ln -s / setup.sh; mkdir setup.sh/word"], 6.0, {}, 2),
        ("", "", "", ["echo 4 1 > done; head -c 90M /dev/zero > x"], 0.0, {"steps": 1.0}, 1),
    ],
)
def test_steps_share_a_box_and_a_conversation(
    make, strategy, first, second, commands, parts, metrics, says
):
    toml = f'multi_step_reward_strategy = "{strategy}"\n' if strategy else ""
    folder = make(toml=toml + TOML + STEPS.format(first, second), more=STEP_FILES)
    replies = []
    for command in commands:
        replies += [bash(f"{command}; cat word; ls -d /tests /solution"), "It is done."]
    played = episode(folder, *replies)
    assert (played.status, played.reward, played.error) == ("ok", pytest.approx(parts), "")
    assert {name: played.metrics[name] for name in metrics} == metrics
    asked = [m["content"] for m in played.messages if m["role"] == "user"]
    assert asked == ["Begin.", "Continue."][:says]
    shown = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert len(shown) == len(commands)
    assert all("'/tests'" in text and "'/solution'" in text for text in shown)


def test_steps_are_played_in_a_pod(make, tmp_path, monkeypatch):
    if reason := machine.missing():
        pytest.skip(reason)
    monkeypatch.setenv("HARBOR_DRIVER", "kubernetes")
    with kube_server.KubeServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        folder = make(toml=TOML + STEPS.format("", READY), more=STEP_FILES)
        env = load_env(str(ROOT / "envs/harbor.py"))
        with monkeypatch.context() as patched:
            patched.setenv("PATH", "/nowhere")  # Without bubblewrap, docker and podman.
            env.check_machine()
        first = bash("kill -9 -1; ls -d /tests; echo 4 1 > done")
        played = episode(
            folder, first, bash("echo 4 1 > done"), "Done.", bash("cat done"), "Done.", env=env
        )
        assert (played.status, played.reward, played.error) == ("ok", (4 + 2 * 4) / 2, "")

        async def lose_the_service():
            async with TaskBoxes(driver="kubernetes").open(str(folder)) as box:
                async for _ in box.steps():
                    await box.verify()
                    server.faults["exec"] = [(403, {}, "no rights")] * 50

        # The agent did not cause it, so that it is not scored 0.
        with pytest.raises(RemoteError, match="403"):
            asyncio.run(lose_the_service())
        boxes.SERVICES.close()
        assert len(server.pods) == 0 and server.most == 1


@needs_bwrap
@pytest.mark.parametrize(
    "files, error",
    [
        (
            {"steps/second/tests/common.sh": "sleep 9"},
            r"test\.sh ran out of time; .*/steps/second:",
        ),
        ({"steps/first/workdir/setup.sh": "echo oh no; exit 3"}, r"setup\.sh ended .* 3; .*oh no"),
    ],
)
def test_a_step_that_cannot_be_scored_fails_the_episode(make, files, error):
    toml = f"{TOML}[verifier]\ntimeout_sec = 1\n{STEPS.format('', '')}"
    failed = episode(make(toml=toml, more=STEP_FILES | files), bash("echo 4 1 > done"), "Done.")
    assert failed.status == "failed" and re.search(error, failed.error), failed.error


@needs_bwrap
def test_a_copy_of_the_environment_for_tasks_of_one_step_refuses_several(make):
    async def verify():
        folder = make(toml=TOML + STEPS.format("", ""), more=STEP_FILES)
        async with TaskBoxes(driver="bubblewrap").open(str(folder)) as box:
            await box.verify()

    with pytest.raises(
        RuntimeError, match=r"has 2 steps; call verify\(\) for each of box.steps\(\)"
    ):
        asyncio.run(verify())


# Tools of the verifier

NO_TOOLS = '[verifier.env]\nPATH = "/app/bin:/usr/bin:/bin"\n'
# The shape of Harbor's template, without its comments. `command` keeps the
# task on this machine's system, which cannot install.
INSTALLS = """\
#!/bin/bash
command apt-get update
command apt-get install -y curl
command curl -LsSf https://localhost:1/uv/install.sh | sh
source $HOME/.local/bin/env
command uvx -p 3.13 --with pytest==8.4.1 pytest /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
# The same with programs of the task: py.test is where the agent can remove it.
RUNS = """\
#!/bin/bash
py.test /tests
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
PY_TEST = "FROM a\nWORKDIR /app\nRUN mkdir bin && ln -s /bin/true bin/ok && "
PY_TEST += "printf '#!/bin/sh\\ngrep yes done || ./server' > bin/py.test && chmod +x bin/py.test\n"


@needs_bwrap
def test_a_verifier_that_cannot_install_its_tools_fails_the_episode(make):
    folder, env = make(toml=NO_TOOLS, test=INSTALLS), load_env(str(ROOT / "envs/harbor.py"))
    failed = episode(folder, bash("echo yes > done"), "It is done.", env=env)
    assert (failed.status, failed.reward) == ("failed", None)
    reason = failure_reason(failed.error, "train/0")
    assert "tests/test.sh are missing, in an untouched box too: uvx: command not found (" in reason
    assert str(folder) not in reason and str(folder) in failed.error
    assert "line 5: /logs/home/.local/bin/env: No such file" in failed.error
    begun = time.monotonic()
    again = episode(folder, bash("sleep 30"), "It is done.", env=env)
    assert again.error.endswith(failed.error.partition("RuntimeError")[2])
    assert time.monotonic() - begun < 20
    # Other tasks are played, and this one is by another run, and after retry_s by this run.
    assert episode(make(), bash("echo yes > done"), "It is done.", env=env).reward == 1
    shutil.copy(make() / "tests/test.sh", folder / "tests/test.sh")
    assert episode(folder, bash("echo yes > done"), "It is done.").reward == 1
    env.hooks["rollout"].function.__globals__["BOXES"].retry_s = 0.0
    assert episode(folder, bash("echo yes > done"), "It is done.", env=env).reward == 1


@needs_bwrap
@pytest.mark.parametrize(
    "command, reward",
    [("echo yes > done", 1.0), ("echo no", 0.0), ("rm bin/py.test", 0.0), ("rm -r bin", 0.0)],
)
def test_an_agent_that_breaks_the_tools_of_its_tests_scores_0(make, command, reward):
    folder = make(toml=NO_TOOLS, dockerfile=PY_TEST, test=RUNS)
    played = episode(folder, bash(command), "It is done.")
    assert (played.status, played.reward, played.error) == ("ok", reward, "")
    shown = "py.test: command not found" if "rm" in command else "./server: not found"
    assert reward or shown in played.log
    shown = show.described(asdict(played) | {"file": "step_000001.jsonl.zst"})
    assert played.log.split("\n")[-1] in shown


@needs_bwrap
@pytest.mark.parametrize(
    "pause, untouched", [("sleep 9", "ran out of time"), ("kill $PPID", "ended with exit code 143")]
)
def test_an_untouched_box_without_a_verdict_fails_the_episode(make, pause, untouched):
    slow = PY_TEST.replace("grep", f"{pause}; grep")
    toml = NO_TOOLS.replace("[verifier.env]", "[verifier]\ntimeout_sec = 2.0\n[verifier.env]")
    folder = make(toml=toml, dockerfile=slow, test=RUNS)
    failed = episode(folder, bash("rm bin/py.test"), "It is done.")
    assert (failed.status, failed.reward) == ("failed", None)
    reason = failure_reason(failed.error, failed.task_id)
    assert "tests/test.sh are missing (py.test: command not found), and an untouched " in reason
    assert f"why: tests/test.sh {untouched}" in reason and str(folder) not in reason


RAN = "=== test session starts ===\n"


@pytest.mark.parametrize(
    "script, wrote, code, missing",
    [
        (
            "uvx pytest",
            "/tests/test.sh: line 9: uvx: command not found",
            0,
            "uvx: command not found",
        ),
        ("pytest", "/tests/test.sh: 4: pytest: not found", 1, "pytest: command not found"),
        ("python3 x", "/usr/bin/env: ‘python3’: No such file or directory", 1, "python3: "),
        (
            "python -m pytest",
            "/usr/bin/python: No module named pytest",
            0,
            "No module named pytest",
        ),
        (
            "uvx pytest",
            "error: Failed to fetch: `https://pypi.org/simple/pytest/`",
            0,
            "error: Fail",
        ),
        (
            "uvx pytest",
            "  × No solution found when resolving tool dependencies:",
            0,
            "× No solution",
        ),
        ("pip install psutil; pytest", RAN + "E  No module named 'psutil'", 0, "No module named"),
        ("apt-get install jq", "x\nE: Unable to locate package jq", 100, "E: Unable to locate"),
        # Scores:
        ("apt-get install jq; ./run", "E: Unable to locate package jq\n0 of 3", 0, ""),
        ("uvx pytest || pytest", "a: uvx: command not found\n" + RAN + "1 failed in 2s", 0, ""),
        ("uvx pytest || pytest -q", "a: uvx: command not found\nF\n1 failed in 0.05s", 0, ""),
        ("./server", "/tests/test.sh: line 2: ./server: No such file or directory", 127, ""),
        ("server", "/tests/test.sh: line 2: server: command not found", 127, ""),
        ("./run.sh", "./run.sh: line 1: pytest: command not found", 127, ""),
        ("pytest", RAN + "E   ModuleNotFoundError: No module named 'solution'", 1, ""),
        ("pytest", RAN + "server said: error: Failed to fetch", 1, ""),
    ],
)
def test_output_that_says_that_tools_are_missing(tmp_path, script, wrote, code, missing):
    (tmp_path / "test.sh").write_text(script)
    problems = VerifierTools.of(tmp_path).missing(wrote, code)
    assert problems.startswith(missing) and bool(problems) == bool(missing)


@pytest.mark.parametrize(
    "line, is_failed",
    [
        ("W: Failed to fetch http://deb.debian.org/x  Temporary failure resolving 'x'", True),
        ("E: Unable to locate package jq", True),
        ("curl: (6) Could not resolve host: a.b", True),
        ("ERROR: No matching distribution found for six", True),
        ("curl: (6) Could not resolve host: astral.sh", False),
        ("/tests/test.sh: line 2: wget: command not found", False),
        ("Fetched 9,2 MB in 2s", False),
    ],
)
def test_packages_of_a_network_that_failed_are_not_kept(line, is_failed):
    assert bool(failed_download(f"a\n{line}\n1 passed")) is is_failed


@needs_bwrap
def test_long_output_keeps_its_ends(make):
    test = "#!/bin/sh\necho begin; seq 100000; echo no pytest > /logs/verifier/pytest.log\n"
    test += "ln -s /dev/zero /logs/verifier/zero; ln -s /etc/passwd /logs/verifier/z.log\n"
    played = episode(make(test=test + "echo 0 > /logs/verifier/reward.txt\n"), "done")
    assert played.log.startswith("begin\n1\n2\n") and len(played.log) < 8200
    assert "characters left out]" in played.log
    assert played.log.endswith("== /logs/verifier/pytest.log\nno pytest")


# rl-core check --oracle


@needs_bwrap
def test_every_shipped_task_is_solved_by_its_solution_and_not_by_nothing(capsys):
    env, tasks = ROOT / "envs/harbor.py", ROOT / "envs/tasks"
    assert main(["check", str(env), "--data.train", str(tasks), "--oracle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = sorted(path.name for path in tasks.iterdir())
    assert sorted(verdict["task"] for verdict in report["oracle"]) == names and len(names) >= 11
    assert {(v["oracle"], v["nothing"]) for v in report["oracle"]} == {(1.0, 0.0)}


@needs_bwrap
def test_a_task_that_is_no_good_is_named(make, capsys):
    half = """#!/bin/sh\n[ $(cat done) = yes ] && echo 0.5 > /logs/verifier/reward.txt ||
        echo 0 > /logs/verifier/reward.txt\n"""
    make(solve="echo yes > done; exit 4\n"), make(solve="echo oh no; exit 4\n")
    make(solve=None), make(test=half), make(toml=NO_TOOLS, test=INSTALLS)
    make(test="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    folder = make(toml="[environment]\ngpus = 1").parent
    make(solve="apt-get install -y jq && echo yes > done\n")
    make(toml=TOML + STEPS.format("", ""), more=STEP_FILES)
    (folder / "task2/solution/solve.sh").unlink()
    command = ["check", str(ROOT / "envs/harbor.py"), "--data.train", str(folder), "--oracle"]
    assert main(command) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rows = {line.split()[0]: line.split(None, 4)[1:] for line in lines if line[:4] == "task"}
    assert rows["task0"][:2] == ["1", "0"] and len(rows["task0"]) == 3
    assert rows["task1"][:2] == ["0", "0"]
    assert rows["task1"][3] == "its solution earns 0, and doing nothing 0"
    assert {"| solution/solve.sh: oh no", "| [ended with exit code 4]"} < {*lines}
    assert rows["task2"][:2] == ["none", "0"] and len(rows["task2"]) == 3
    assert rows["task3"][:2] == ["0.5", "0"] and len(rows["task3"]) == 3
    assert rows["task4"][:2] == ["failed", "failed"]
    assert rows["task4"][3].startswith("the tools of tests/test.sh are missing, in an untouched ")
    assert rows["task5"][:2] == ["1", "1"] and rows["task5"][3] == "doing nothing solves it"
    assert rows["task7"][:2] == ["failed", "0"]
    assert rows["task8"][:2] == ["5", "0"] and len(rows["task8"]) == 3
    assert rows["task7"][3].startswith("solution/solve.sh could not install: agents have no ")
    counts = {line.rsplit(None, 1)[0]: line.rsplit(None, 1)[1] for line in lines if " " in line}
    assert "4 of 8 tasks are not good to train on" in lines
    assert "1 a GPU (the first: task6)" in lines
    assert main([*command, "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    expected = {"tasks": 9, "playable": 7, "solved_by_solution": 3, "refused": 1, "not_good": 4}
    expected |= {"partly_solved_by_solution": 1, "solved_by_nothing": 1, "no_solution": 1}
    assert {name: report[name] for name in expected} == expected
    assert counts["seconds"] and {counts[name.replace("_", " ")] for name in expected} == {*"97314"}
    assert report["refused_tasks"] == {"a GPU": ["task6"]}
    assert sum(report["reasons"].values()) == 4 and "task4" in err


@needs_bwrap
@pytest.mark.parametrize(
    "fault",
    [
        {"solve": "echo maybe > done\n"},
        {"test": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"},
    ],
)
def test_one_bad_task_among_good_ones_fails_the_check(make, fault):
    folder = make().parent
    command = ["check", str(ROOT / "envs/harbor.py"), "--data.train", str(folder), "--oracle"]
    assert main(command) == 0
    make(**fault)
    assert main(command) == 1


def test_a_long_reason_keeps_the_exception_at_its_end():
    error = f"the build failed: {'line ' * 200}KeyError: 'x'"
    verdict = Verdict(task="a", oracle=None, nothing=None, seconds=0.0, error=error)
    for line in (described(verdict, 1), "\n".join(Table(verdicts=[verdict]).lines())):
        assert re.search(r"the build failed: .* \.\.\. .*KeyError: 'x'", line)


def test_a_worker_waits_for_an_image_with_a_deadline(tmp_path):
    with open(tmp_path / "lock", "w") as theirs, open(tmp_path / "lock", "w") as ours:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(
            RuntimeError, match=r"/lock has been locked for 0.3 s to build image:1, by "
        ):
            lock_within(0.3, ours, "image:1")
        threading.Timer(0.3, fcntl.flock, (theirs, fcntl.LOCK_UN)).start()
        lock_within(30, ours, "image:1")
        with pytest.raises(BlockingIOError):
            fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_score_of_too_many_names_or_too_deep_names_its_file():
    many = json.dumps({f"m{n}": 1 for n in range(101)})
    for text, says in ((many, "has 101 names; give at most 100"), ("[" * 10**6, "not a number")):
        with pytest.raises(ValueError, match=rf"reward\.json .*{says}"):
            read_score(text.encode(), "/logs/verifier/reward.json")
