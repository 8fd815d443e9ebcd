"""Containers that are made before sessions ask, and those that serve one session after the other,
in bubblewrap's namespaces."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from test_containers import AsProcess, begin, is_running, say, until

from rl_core.service import environments_pb2 as pb
from rl_core.service.containers import ContainedEnv, container_settings
from rl_core.service.worker import Worker

ROOT = Path(__file__).parents[2]
DIRTY = """
import ctypes, multiprocessing, numpy.random, os, random, subprocess, sys, threading

image = "an-image:1"
capacity = 3
container = "KIND"
seen = []
open("/tmp/made_by_the_file", "w").close()

def start(task):
    return {}

def interact(completion, state):
    seen.append(completion)
    if completion == "litter":
        os.makedirs("/tmp/folder/in/it")
        open("/tmp/folder/in/it/file", "w").write("x")
        os.symlink("/etc", "/dev/shm/link")
        os.environ["LEFT"] = "1"
        os.chdir("/tmp/folder")
        sleep = ["setsid", "sleep", "4242"]
        started = subprocess.Popen(sleep, start_new_session=True, close_fds=False).pid
    if completion == "rewrite":
        open("/tmp/made_by_the_file", "w").write("y")
    if completion == "segment":
        ctypes.CDLL(None).shmget(0x77, 4096, 0o1666)
    if completion == "semaphore":
        ctypes.CDLL(None).semget(0x77, 1, 0o1666)
    if completion == "queue":
        ctypes.CDLL(None).msgget(0x77, 0o1666)
    if completion == "raise":
        raise KeyError("of the file")
    if completion == "hold":
        multiprocessing.get_context("fork").Process(target=threading.Event().wait).start()
        os._exit(5)
    files = sorted(os.listdir("/tmp") + os.listdir("/dev/shm"))
    sleeps = subprocess.run(["pgrep", "-fc", "sleep 4242"], capture_output=True, text=True)
    kept = len(seen), files, "LEFT" in os.environ, os.getcwd() == "/tmp/folder"
    drawn = random.random(), numpy.random.random()
    return [{"role": "user", "content": repr((os.getpid(), *kept, int(sleeps.stdout), *drawn))}]

def reward_fn(completion):
    return 1.0
"""


class InNamespaces(AsProcess):
    def argv(self, name, path, settings, hook_timeout_s, *more):
        folder = str(Path(path).parent)
        line = ["bwrap", "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
        line += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        line += ["--tmpfs", "/tmp", "--ro-bind", folder, folder, "--chdir", "/"]
        return [*line, *super().argv(name, path, settings, hook_timeout_s, *more)]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(script, kind, warm) runs script(worker, ask, env)."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not here")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "envs"
    folder.mkdir()

    async def main(script, warm):
        runtime = InNamespaces(program="", worker="0" * 12)
        path = str(folder / "boxed.py")
        limits = {"hook_timeout_s": 20.0, "idle_s": 60.0}
        env = await ContainedEnv.open(path, container_settings(path), runtime, warm=warm, **limits)
        worker = Worker([env], capacity=100, idle_s=60.0)

        async def ask(code: int = 0, **verb):
            reply = await worker.answer(pb.Request(**verb))
            assert reply.code == code, (reply.code, reply.error)
            return reply.error if code else getattr(reply, next(iter(verb)))

        try:
            return await script(worker, ask, env)
        finally:
            for held in list(worker.held.values()):
                worker.close(held)
            env.close()
            await runtime.close()

    def run(script, kind: str, warm: int = 0):
        (folder / "boxed.py").write_text(DIRTY.replace("KIND", kind))
        return asyncio.run(asyncio.wait_for(main(script, warm), 120))

    return run


async def look(ask, session: str, text: str = "look", **more):
    return eval(await say(ask, session, text, **more))


async def end(ask, session: str) -> None:
    await ask(cancel=pb.CancelRequest(session=session))


def test_a_container_serves_the_next_session_as_if_it_were_the_first(play):
    async def script(worker, ask, env):
        first = await begin(ask)
        box = worker.held[first].session.box
        clean = await look(ask, first)
        assert clean[1:6] == (1, clean[2], False, False, 0)
        dirty = await look(ask, first, "litter")
        assert dirty[1] == 2 and "folder" in dirty[2] and "link" in dirty[2]
        assert dirty[3:6] == (True, True, 1)
        await end(ask, first)
        await until(lambda: env.pool.idle)
        second = await begin(ask)
        assert worker.held[second].session.box is box
        again = await look(ask, second)
        assert again[1:6] == clean[1:6], (clean, again)
        assert again[0] != clean[0] and again[6] != clean[6] and again[7] != clean[7]
        assert "has ended" in await say(ask, first, "look", code=9)

    play(script, "reuse")


@pytest.mark.parametrize("text", ["rewrite", "segment", "semaphore", "queue"])
def test_a_container_that_cannot_be_cleaned_serves_no_other_session(play, text, capfd):
    async def script(worker, ask, env):
        first = await begin(ask)
        box = worker.held[first].session.box
        await look(ask, first, text)
        await end(ask, first)
        await until(lambda: box.end)
        assert not env.pool.idle
        second = await begin(ask)
        assert worker.held[second].session.box is not box
        assert (await look(ask, second))[1] == 1

    play(script, "reuse")
    assert "the container cannot be reused: the session changed" in capfd.readouterr().err


def test_a_session_that_dies_takes_its_container_along(play):
    async def script(worker, ask, env):
        first = await begin(ask)
        box = worker.held[first].session.box
        assert "ended (exit code 5" in await say(ask, first, "hold", code=2)
        assert box.end and not env.pool.idle

    play(script, "reuse")


def test_a_session_whose_hook_raises_leaves_its_container_to_no_other(play):
    async def script(worker, ask, env):
        first = await begin(ask)
        box = worker.held[first].session.box
        assert "KeyError" in await say(ask, first, "raise", code=2)
        await end(ask, first)
        await until(lambda: box.is_over or env.pool.idle)
        assert box.is_over and not env.pool.idle

    play(script, "reuse")


@pytest.mark.parametrize("kind", ["exclusive", "reuse"])
def test_warm_containers_are_there_before_they_are_asked_for(play, kind):
    async def script(worker, ask, env):
        await until(lambda: len(env.pool.idle) == 2)
        ready = list(env.pool.idle)
        first = await begin(ask)
        assert worker.held[first].session.box is ready[0]
        await until(lambda: len(env.pool.idle) == 2)
        await end(ask, first)
        if kind == "exclusive":
            await until(lambda: ready[0].end)
            assert ready[0] not in env.pool.idle
        else:
            await until(lambda: len(env.pool.idle) == 3)
        ready[1].process.kill()  # one that dies before it is asked for
        await until(lambda: ready[1].end)
        sessions = [await begin(ask) for _ in range(3)]
        assert [(await look(ask, session))[1] for session in sessions] == [1, 1, 1]
        boxes = [worker.held[session].session.box for session in sessions]
        assert len(set(boxes)) == 3 and ready[1] not in boxes
        pids = [box.process.pid for box in [*boxes, *env.pool.idle]]
        worker.drain()
        for session in sessions:
            await end(ask, session)
        return pids

    pids = play(script, kind, warm=2)
    assert not [pid for pid in pids if is_running(pid)]


def test_a_kind_of_container_that_there_is_not_is_refused(tmp_path):
    (tmp_path / "a.py").write_text('image = "a"\ncontainer = "reused"\n')
    with pytest.raises(ValueError, match='container = \'reused\' must be "exclusive" or "reuse"'):
        container_settings(str(tmp_path / "a.py"))


def test_a_container_with_a_folder_that_cannot_be_cleaned_is_refused(tmp_path, capfd):
    (tmp_path / "a.py").write_text("def reward_fn(messages):\n    return 1.0\n")

    async def main():
        runtime = AsProcess(program="", worker="0" * 12)
        path = str(tmp_path / "a.py")
        (tmp_path / "b.py").write_text('image = "a"\ncontainer = "reuse"\n')
        settings = container_settings(str(tmp_path / "b.py"))
        env = ContainedEnv(path, settings, runtime, hook_timeout_s=5.0, idle_s=5.0)
        box = await env.pool.take(lambda why: None)
        await until(lambda: box.end)
        env.close()
        await runtime.close()
        return box.end

    assert "exit code 1" in asyncio.run(asyncio.wait_for(main(), 60))
    assert "is writable and cannot be cleaned" in capfd.readouterr().err
