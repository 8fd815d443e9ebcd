"""Boxes by every driver. Containers need docker or podman, and an image in RL_CORE_TEST_IMAGE
(scripts/test_containers.sh); remote drivers are tried at servers of these tests."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import box_services
import kube_server
import machine
import pytest

from rl_core.sandbox import boxes
from rl_core.sandbox.box_settings import Root, Sidecar
from rl_core.sandbox.engines import ask_engine, find_engine
from rl_core.sandbox.remote_driver import RemoteError

IMAGE = os.environ.get("RL_CORE_TEST_IMAGE", "")
needs_image = pytest.mark.skipif(
    not IMAGE, reason="no container runtime: scripts/test_containers.sh"
)
DB = Sidecar(name="db", image="a:1")
NAMES = ["ps", "--all", "--format", "{{.Names}}"]


def at_kubernetes(tmp_path, monkeypatch):
    """The cluster of RL_CORE_TEST_KUBECONFIG, if it is set."""
    if real := os.environ.get("RL_CORE_TEST_KUBECONFIG"):
        monkeypatch.setenv("KUBECONFIG", real)
        yield "kubernetes"
        return
    if reason := machine.missing():
        pytest.skip(reason)
    with kube_server.KubeServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield "kubernetes"
        boxes.SERVICES.close()


def at_engine(tmp_path, monkeypatch):
    if not IMAGE:
        pytest.skip("no container runtime: scripts/test_containers.sh")
    yield ""


def at_bubblewrap(tmp_path, monkeypatch):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    yield "bubblewrap"


def at_service(name):
    """Boxes of a sandbox service. scripts/test_box_services.sh installs the SDKs."""

    def at(tmp_path, monkeypatch):
        with box_services.service(name, monkeypatch):
            yield name

    return at


DRIVERS = {"engine": at_engine, "bubblewrap": at_bubblewrap, "kubernetes": at_kubernetes}
DRIVERS |= {name: at_service(name) for name in ("e2b", "daytona", "modal")}


@pytest.fixture(params=DRIVERS)
def driver_row(request, tmp_path_factory, monkeypatch):
    """A row whose boxes are opened by one driver."""
    making = DRIVERS[request.param](tmp_path_factory.mktemp("service"), monkeypatch)
    row = {"box_driver": next(making)}
    if request.param == "engine":
        row["image"] = IMAGE
    yield row
    next(making, None)


@pytest.fixture
def in_box(driver_row):
    """in_box(work) -> what work(box) returns."""

    async def run(work):
        async with await boxes.open(driver_row) as box:
            return await work(box)

    return lambda work: asyncio.run(run(work))


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"driver": "lxc"}, "is not one of bubblewrap, docker, podman, kubernetes"),
        ({"driver": "docker"}, "needs an image"),
        ({"driver": "bubblewrap", "image": "a:1"}, "needs driver docker or podman"),
        ({"driver": "bubblewrap", "sidecars": [DB]}, "bubblewrap has no services, and db is one"),
        ({"driver": "docker", "sidecars": [DB]}, "has no services|needs an image"),
        (
            {"driver": "kubernetes", "binds": {"/a": "/tmp:rw"}},
            "/a: a box by kubernetes gets copies",
        ),
        ({"driver": "kubernetes", "root": Root(layers=())}, "by kubernetes has no root="),
    ],
)
def test_settings_that_contradict_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        asyncio.run(boxes.open({}, **settings))


def test_an_image_without_an_engine_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="docker is not installed; podman is not installed"):
        asyncio.run(boxes.open({"image": "a:1"}))


def test_a_command_has_its_output_and_status(in_box):
    result = in_box(lambda box: box.exec("cat; echo bad >&2; pwd; exit 3", stdin="good\n"))
    assert (result.code, result.stderr, result.timed_out) == (3, "bad\n", False)
    assert result.stdout.splitlines()[0] == "good"


def test_files_are_put_and_got_inside_alone(in_box, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/run.sh").write_text("echo ran")
    (tmp_path / "deep/run.sh").chmod(0o755)
    (tmp_path / "deep/link").symlink_to("run.sh")

    async def work(box):
        await box.put("/tests", tmp_path)
        ran = await box.exec(["sh", "-c", "/tests/deep/link"])
        await box.exec(f"ln -s {tmp_path}/deep/run.sh /tmp/link; mkfifo /tmp/pipe")
        with pytest.raises(FileNotFoundError):
            await box.get("/tmp/link")
        with pytest.raises(OSError, match="is not a file"):
            await box.get("/tmp/pipe")
        await box.put("/tmp/link", b"\0\xff")
        return ran.stdout, await box.get("/tmp/link")

    assert in_box(work) == ("ran\n", b"\0\xff")
    assert (tmp_path / "deep/run.sh").read_text() == "echo ran"


def test_at_a_deadline_its_processes_end_and_others_go_on(in_box):
    async def work(box):
        await box.exec("sleep 1111 >/dev/null 2>&1 &", timeout_s=60)
        late = await box.exec("setsid sleep 2222 & sleep 3333", timeout_s=10 if IMAGE else 1.5)
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


def test_a_command_that_kills_all_leaves_the_box_working(in_box, driver_row):
    # The shell that marks the end of the outputs is killed too.
    is_marked = driver_row["box_driver"] in ("daytona", "modal")
    unknown = pytest.raises(RemoteError) if is_marked else nullcontext()

    async def work(box):
        with unknown:
            await box.exec("kill -9 -1; kill -9 1")
        return (await box.exec("echo works; cat /proc/net/route | wc -l")).stdout

    assert in_box(work) == "works\n1\n"


def test_output_without_end_keeps_its_beginning_and_its_end(in_box):
    async def work(box):
        return await box.exec("echo first; head -c 50000000 /dev/zero | tr '\\0' a; echo last")

    result = in_box(work)
    assert result.stdout.startswith("first\na") and result.stdout.endswith("alast\n")
    assert "bytes left out" in result.stdout and len(result.stdout) < 1_100_000


def test_output_that_never_stops_ends_at_the_deadline(in_box):
    result = in_box(lambda box: box.exec("yes", timeout_s=1))
    assert result.timed_out and result.stdout.startswith("y\ny\n")


def test_a_command_that_never_reads_its_stdin_ends_well(in_box):
    result = in_box(lambda box: box.exec("echo done", stdin="x" * 10_000_000))
    assert (result.code, result.stdout) == (0, "done\n")


def test_links_in_a_folder_that_is_put_stay_links(in_box, tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/link").symlink_to(tmp_path / "secret")

    async def work(box):
        for _ in range(2):
            await box.put("/tests", tmp_path / "tests")
        return (await box.exec("readlink /tests/link; cat /tests/link")).stdout

    assert in_box(work) == f"{tmp_path}/secret\n"


def test_a_cancelled_command_is_killed(in_box):
    async def work(box):
        command = asyncio.ensure_future(box.exec("sleep 1000 & echo $! > /tmp/pid; wait"))
        await box.exec("until [ -s /tmp/pid ]; do sleep 0.01; done")
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        gone = await box.exec("while kill -0 $(cat /tmp/pid); do sleep 0.01; done", timeout_s=30)
        assert not gone.timed_out

    in_box(work)


def test_a_background_process_serves_later_commands(in_box):
    async def work(box):
        await box.exec("(while true; do echo noise; sleep 0.01; done) & echo $! > /tmp/pid")
        await asyncio.sleep(0.1)
        return (await box.exec("kill -0 $(cat /tmp/pid) && echo alive")).stdout

    assert in_box(work) == "alive\n"


def test_a_box_serves_several_event_loops_and_ends_when_it_is_closed(driver_row):
    box = asyncio.run(boxes.open(driver_row))
    asyncio.run(box.put("note", "x"))
    assert asyncio.run(box.get("note")) == b"x"
    asyncio.run(box.close())
    asyncio.run(box.close())
    for call in (box.exec("true"), box.put("note", "x"), box.get("note")):
        with pytest.raises(boxes.BoxEnded):
            asyncio.run(call)


def test_a_command_of_any_length_has_its_words_and_variables(in_box):
    words = ["it's", "a\nb", "x" * 100_000]

    async def work(box):
        done = await box.exec(["printf", "%s|", *words], environ={"A": "it's"})
        named = await box.exec("echo $A; pwd", environ={"A": "it's b"}, cwd="/tmp")
        return done.stdout, named.stdout

    assert in_box(work) == ("it's|a\nb|" + "x" * 100_000 + "|", "it's b\n/tmp\n")


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

    async def run():
        async with await boxes.open({"image": IMAGE}) as box:
            await work(box)

    asyncio.run(run())


@needs_image
def test_containers_end_with_their_owner_and_with_close():
    code = (
        "import asyncio, os, signal\n"
        "from rl_core.sandbox import boxes\n"
        "from rl_core.sandbox.box_settings import Sidecar\n"
        "async def main():\n"
        f"    side = [Sidecar(name='a', image={IMAGE!r}, command=['sleep', '1000'])]\n"
        f"    closed = await boxes.open({{'image': {IMAGE!r}}}, sidecars=side)\n"
        f"    box = await boxes.open({{'image': {IMAGE!r}}}, sidecars=side)\n"
        "    await closed.close()\n"
        "    print(closed.box.name, box.box.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    closed, left = done.stdout.split()
    engine = find_engine("this test")
    names = ask_engine(engine, NAMES).split()
    assert not {closed, f"{closed}-a", f"{left}-a"}.intersection(names)
    while left in ask_engine(engine, NAMES).split():
        time.sleep(0.1)
