"""Boxes in real containers. scripts/test_containers.sh runs these: they need docker or podman, and
an image in RL_CORE_TEST_IMAGE."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rl_core.sandbox import boxes
from rl_core.sandbox.engines import ask_engine, find_engine

IMAGE = os.environ.get("RL_CORE_TEST_IMAGE", "")
needs_image = pytest.mark.skipif(
    not IMAGE, reason="no container runtime: scripts/test_containers.sh"
)
NAMES = ["ps", "--all", "--format", "{{.Names}}"]


def in_box(work, **settings):
    async def run():
        async with await boxes.open({"image": IMAGE}, **settings) as box:
            return await work(box)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"driver": "lxc"}, "is not one of bubblewrap, docker, podman"),
        ({"driver": "docker"}, "needs an image"),
        ({"driver": "bubblewrap", "image": "a:1"}, "needs driver docker or podman"),
    ],
)
def test_settings_that_contradict_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        asyncio.run(boxes.open({}, **settings))


def test_an_image_without_an_engine_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="docker is not installed; podman is not installed"):
        asyncio.run(boxes.open({"image": "a:1"}))


@needs_image
def test_a_command_has_its_output_and_status():
    result = in_box(lambda box: box.exec("cat; echo bad >&2; pwd; exit 3", stdin="good\n"))
    assert (result.code, result.stderr, result.timed_out) == (3, "bad\n", False)
    assert result.stdout.splitlines()[0] == "good"


@needs_image
def test_files_are_put_and_got_inside_alone(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/run.sh").write_text("echo ran")
    (tmp_path / "deep/run.sh").chmod(0o755)
    (tmp_path / "deep/link").symlink_to("run.sh")

    async def work(box):
        await box.put("/tests", tmp_path)
        ran = await box.exec(["sh", "/tests/deep/link"])
        await box.exec(f"ln -s {tmp_path}/deep/run.sh /tmp/link; mkfifo /tmp/pipe")
        with pytest.raises(FileNotFoundError):
            await box.get("/tmp/link")
        with pytest.raises(OSError, match="is not a file"):
            await box.get("/tmp/pipe")
        await box.put("/tmp/link", b"\0\xff")
        return ran.stdout, await box.get("/tmp/link")

    assert in_box(work) == ("ran\n", b"\0\xff")
    assert (tmp_path / "deep/run.sh").read_text() == "echo ran"


@needs_image
def test_at_a_deadline_its_processes_end_and_others_go_on():
    async def work(box):
        await box.exec("sleep 1111 >/dev/null 2>&1 &", timeout_s=60)
        late = await box.exec("setsid sleep 2222 & sleep 3333", timeout_s=10)
        observed = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        await box.end_processes()
        left = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        return (
            late.timed_out,
            [f"sleep {n}" in observed.stdout for n in (1111, 2222, 3333)],
            left.stdout,
        )

    timed_out, are_running, left = in_box(work)
    assert timed_out and are_running == [True, False, False] and "sleep 1111" not in left


@needs_image
def test_a_command_that_kills_all_leaves_the_box_working():
    async def work(box):
        await box.exec("kill -9 -1; kill -9 1")
        return (await box.exec("echo works; cat /proc/net/route | wc -l")).stdout

    assert in_box(work) == "works\n1\n"


@needs_image
def test_a_fork_of_the_owner_does_not_end_its_container():
    async def opened():
        return await boxes.open({"image": IMAGE})

    box = asyncio.run(opened())
    pid = os.fork()
    if pid == 0:
        del box
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(box.exec("echo alive")).stdout == "alive\n"
    asyncio.run(box.close())


@needs_image
def test_a_cancelled_command_is_cancelled_though_the_engine_fails(monkeypatch):
    async def work(box):
        command = asyncio.ensure_future(box.exec("sleep 1000"))
        await asyncio.sleep(1)
        with monkeypatch.context() as without_engine:
            without_engine.setenv("PATH", "/nowhere")
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command

    in_box(work)


@needs_image
def test_containers_end_with_their_owner_and_with_close():
    code = (
        "import asyncio, os, signal\n"
        "from rl_core.sandbox import boxes\n"
        "async def main():\n"
        f"    closed = await boxes.open({{'image': {IMAGE!r}}})\n"
        f"    box = await boxes.open({{'image': {IMAGE!r}}})\n"
        "    await closed.close()\n"
        "    print(closed.box.name, box.box.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    closed, left = done.stdout.split()
    engine = find_engine("this test")
    assert closed not in ask_engine(engine, NAMES).split()
    while left in ask_engine(engine, NAMES).split():
        time.sleep(0.1)
