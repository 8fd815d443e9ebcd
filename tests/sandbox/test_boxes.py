"""Boxes: where agents' commands run. docs/sandbox.md"""

import asyncio
import shutil

import pytest

from rl_core.sandbox import boxes


def first_reason():
    """Why no box by bubblewrap can be made here; "" where it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"

    async def try_one():
        await (await boxes.open({}, driver="bubblewrap", reuse=False)).close()

    try:
        asyncio.run(try_one())
    except RuntimeError as error:
        return str(error)
    return ""


REASON = first_reason()
needs_bubblewrap = pytest.mark.skipif(bool(REASON), reason=REASON)
pytestmark = needs_bubblewrap


def in_box(work, **settings):
    async def run():
        async with await boxes.open({}, **settings) as box:
            return await work(box)

    return asyncio.run(run())


def test_a_command_has_its_output_and_status():
    async def work(box):
        return await box.exec("cat; echo bad >&2; exit 3", stdin="good")

    result = in_box(work)
    assert (result.code, result.stdout, result.stderr) == (3, "good", "bad\n")
    assert not result.timed_out


def test_a_file_that_is_put_comes_back(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/run.sh").write_text("echo ran")
    (tmp_path / "deep/run.sh").chmod(0o755)

    async def work(box):
        await box.put("/tests", tmp_path)
        await box.put("note", "hallo")
        result = await box.exec(["/bin/sh", "-c", "/tests/deep/run.sh"])
        assert result.stdout == "ran\n", result
        return await box.get("/app/note")

    assert in_box(work) == b"hallo"


def test_the_next_box_has_nothing_of_the_last_one():
    async def work():
        box = await boxes.open({})
        await box.exec("echo x | tee /app/a /tmp/b /root/c /dev/shm/d /new; sleep 1000 &")
        await box.close()
        async with await boxes.open({}) as box:
            found = await box.exec("cat /app/* /tmp/* /root/* /dev/shm/* /new; ps | grep sleep")
        return found.stdout

    assert asyncio.run(work()) == ""
