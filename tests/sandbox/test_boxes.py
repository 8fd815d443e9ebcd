"""Boxes: where agents' commands run. docs/sandbox.md"""

import asyncio
import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
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


def test_the_next_box_has_nothing_of_the_last_one():
    async def work():
        box = await boxes.open({})
        await box.exec("echo x | tee /app/a /tmp/b /root/c /dev/shm/d /new; sleep 1000 &")
        await box.close()
        async with await boxes.open({}) as box:
            observed = await box.exec("cat /app/* /tmp/* /root/* /dev/shm/* /new; ps | grep sleep")
        return observed.stdout

    assert asyncio.run(work()) == ""


def test_fifty_boxes_at_once_see_their_own_file_alone():
    async def one(number):
        async with await boxes.open({}) as box:
            await box.put("/tmp/mine", str(number))
            observed = await box.exec("cat /tmp/mine; ls /tmp | wc -l; pgrep -c sleep; sleep 0.1")
            return observed.stdout

    async def work():
        return await asyncio.gather(*map(one, range(50)))

    assert asyncio.run(work()) == [f"{number}1\n0\n" for number in range(50)]


def test_files_processes_network_and_variables_of_the_host_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-of-the-run")
    (tmp_path / "secret").write_text("x")
    commands = {
        f"cat {tmp_path}/secret": "",
        "cat /etc/shadow": "",
        "env | grep -c secret": "0\n",
        "cat /proc/[0-9]*/environ | grep -c secret": "0\n",
        "grep -c . /proc/net/route": "1\n",
        f"ls -d /proc/{os.getpid()}": "",
        "touch /usr/bin/x || echo refused": "refused\n",
        "echo /evil.so > /etc/ld.so.preload || echo refused": "refused\n",
        "mv /bin /bin2 || echo refused": "refused\n",
        "unshare -r true || echo refused": "refused\n",
        "kill -9 1; kill -STOP 1; echo alive": "alive\n",
        "grep CapPrm /proc/self/status": "CapPrm:\t0000000000000000\n",
        "ls /proc/1/fd": "",
        "ls /proc/self/fd | wc -l": "4\n",
    }
    # A namespace's own settings would stay for the next episode.
    commands["find /proc/sys -writable -type f"] = ""
    prefix = os.path.dirname(sys.prefix)
    commands[f"mv {prefix} {prefix}2 || echo refused"] = "refused\n"

    async def work(box):
        return {command: (await box.exec(command)).stdout for command in commands}

    assert in_box(work) == commands


def test_the_first_process_of_a_box_has_no_variables_of_the_run(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-of-the-run")

    async def work():
        box = await boxes.open({}, reuse=False)
        [inside] = psutil.Process(box.box.process.pid).children()
        try:
            return inside.environ()
        except psutil.AccessDenied:
            pytest.skip("only root reads the variables of a process that is not dumpable")
        finally:
            await box.close()

    assert asyncio.run(work()) == {"PWD": "/"}


def test_loopback_and_unix_sockets_work_inside():
    code = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 8000)), (socket.AF_UNIX, "/tmp/s")):
    server = socket.socket(family)
    server.bind(address)
    server.listen()
    client = socket.socket(family)
    client.connect(address)
    server.accept()[0].sendall(b"hi")
    print(client.recv(2).decode())
"""

    async def work(box):
        return await box.exec(["python3", "-c", code])

    assert in_box(work).stdout == "hi\nhi\n"


def test_a_bound_folder_is_read_only_unless_it_says_otherwise(tmp_path):
    for name in ("fixed", "open"):
        (tmp_path / name).mkdir(mode=0o777)
        (tmp_path / name).chmod(0o777)
    tmp_path.chmod(0o711)
    binds = {"/fixed": str(tmp_path / "fixed"), "/mnt/open": f"{tmp_path}/open:rw"}

    async def work(box):
        return await box.exec("echo a > /fixed/a; echo b > /mnt/open/b")

    assert "Read-only" in in_box(work, binds=binds).stderr
    assert (tmp_path / "open/b").read_text() == "b\n"
    assert list((tmp_path / "fixed").iterdir()) == []


FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
# Ignores every signal, hides in a separate session, and closes its pipes.
HIDDEN = """
import os, signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.closerange(0, 100)
open("/tmp/hidden", "w").close()
time.sleep(1000)
"""


def running_beside(box):
    return box.exec(
        ["python3", "-c", "import os; print(sum(map(str.isdigit, os.listdir('/proc'))))"]
    )


def test_a_fork_bomb_ends_at_its_deadline_and_the_box_still_works():
    async def work(box):
        bomb = await box.exec(["python3", "-c", FORK_BOMB], timeout_s=2)
        await box.end_processes()
        # The first process, the fork of it, and the command.
        return bomb.timed_out, (await running_beside(box)).stdout

    timed_out, running = in_box(work, limits=boxes.Limits(processes=50))
    assert timed_out and running == "3\n"


def test_at_a_deadline_what_hides_is_killed_too_and_other_commands_go_on():
    hide = f"python3 -c {shlex.quote(HIDDEN)}; while [ ! -e /tmp/hidden ]; do sleep 0.05; done;"

    async def work(box):
        await box.exec("sleep 1000 & echo")
        before = (await running_beside(box)).stdout
        result = await box.exec(hide + "sleep 1000", timeout_s=3)
        files = (await box.exec("ls /tmp")).stdout
        return before, result.timed_out, files, (await running_beside(box)).stdout

    before, timed_out, files, after = in_box(work)
    assert timed_out and files == "hidden\n" and before == after


def test_what_hides_outlives_its_command_and_not_end_processes():
    async def work(box):
        await box.exec(f"python3 -c {shlex.quote(HIDDEN)}; sleep 0.5")
        before = (await running_beside(box)).stdout
        await box.end_processes()
        return before, (await running_beside(box)).stdout

    # With it lives the fork that waits for it.
    assert in_box(work) == ("5\n", "3\n")


def test_a_command_that_stops_all_leaves_the_box_working():
    # The process that watches the command dies slowly: whatever else runs is before it.
    code = "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)); "
    deeds = [["python3", "-c", code + "os.kill(-1, 9)"]] * 20 + ["kill -STOP -1"]

    async def work(box):
        return {((await box.exec(deed, timeout_s=1)).code, await echo(box)) for deed in deeds}

    async def echo(box):
        return (await box.exec("echo works")).stdout

    assert in_box(work) == {(137, "works\n")}


def test_no_signal_from_inside_ends_the_first_process():
    code = "import os\nfor number in [*range(1, 32), *range(34, 65)]: os.kill(1, number)"

    async def work(box):
        sent = await box.exec(["python3", "-c", code])
        return sent.code, (await box.exec("echo works")).stdout

    assert in_box(work) == (0, "works\n")


@pytest.mark.parametrize(
    "deed",
    [
        "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (1000, 1000))",
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
        "import os; os.sched_setaffinity(1, [min(os.sched_getaffinity(0))])",
    ],
)
def test_what_a_program_does_to_the_first_process_does_not_reach_the_next(deed):
    state = (
        "import os, resource; print(resource.getrlimit(resource.RLIMIT_FSIZE),"
        "os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0))"
    )

    async def work():
        observed = []
        for command in ("", deed, ""):
            async with await boxes.open({}) as box:
                observed.append((await box.exec(["python3", "-c", state])).stdout)
                await box.exec(["python3", "-c", command])
        return observed

    first, _, last = asyncio.run(work())
    assert first == last


def test_a_full_disk_is_an_error_inside_and_emptied_for_the_next():
    limits = boxes.Limits(disk_mib=16)

    async def work():
        box = await boxes.open({}, limits=limits)
        full = await box.exec("head -c 100000000 /dev/zero > /app/a")
        with pytest.raises(OSError, match="No space"):
            await box.put("/app/b", b"x" * 100_000)
        assert (await box.exec("ls -A /app")).stdout == "a\n"
        many = await box.exec("rm /app/a; mkdir m; cd m; seq 100000 | xargs touch")
        await box.close()
        async with await boxes.open({}, limits=limits) as box:
            return full.stderr, many.stderr, (await box.exec("ls -A /app | wc -l")).stdout

    full, many, left = asyncio.run(work())
    assert "No space" in full and "No space" in many and left == "0\n"


def test_a_link_leads_only_to_files_of_the_box(tmp_path):
    (tmp_path / "secret").write_text("x")
    links = {"/app/file": tmp_path / "secret", "/app/mem": "/proc/self/mem", "/app/up": "/"}

    async def work(box):
        for path, target in links.items():
            await box.exec(["ln", "-s", str(target), path])
        await box.exec("mkfifo /app/pipe; ln -s /usr /app/usr; ln -s /dev/zero /app/zero")
        for path in ("file", "mem", "up", "pipe", "zero", "../../etc/shadow"):
            with pytest.raises(OSError):
                await box.get(path)
        await box.put("file", "new")
        with pytest.raises(OSError, match="Read-only"):
            await box.put("usr/file", "new")
        with pytest.raises(OSError, match="Read-only"):
            await box.put("../../../etc/passwd", "new")
        return await box.get("file")

    assert in_box(work) == b"new"
    assert (tmp_path / "secret").read_text() == "x"


def test_a_box_that_was_killed_from_outside_says_so():
    async def work():
        box = await boxes.open({}, reuse=False)
        [inside] = psutil.Process(box.box.process.pid).children()
        inside.kill()
        box.box.process.wait()
        with pytest.raises(boxes.BoxEnded, match="has ended"):
            await box.exec("true")
        await box.close()
        await box.close()

    asyncio.run(work())


def test_boxes_end_with_their_owner_however_it_ends():
    code = (
        "import asyncio, os, signal\n"
        "from rl_core.sandbox import boxes\n"
        "async def main():\n"
        "    kept = await boxes.open({})\n"
        "    box = await boxes.open({})\n"
        "    await kept.close()\n"
        "    print(box.box.process.pid, kept.box.process.pid, flush=True)\n"
        "    await box.exec('setsid sleep 1000 &')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    while any(map(psutil.pid_exists, pids)):
        time.sleep(0.01)


def test_a_call_that_comes_after_close_does_not_reach_the_next_episode(tmp_path):
    (tmp_path / "late").write_text("x")

    async def work():
        box = await boxes.open({})
        pid = box.box.process.pid
        running = asyncio.ensure_future(box.exec("sleep 1000"))
        uploading = asyncio.ensure_future(box.put("/app/up", tmp_path / "late"))
        await asyncio.sleep(0)
        await box.close()
        async with await boxes.open({}) as other:
            assert other.box.process.pid == pid
            late = [asyncio.ensure_future(box.exec("touch late"))]
            late.append(asyncio.ensure_future(box.put("late", "x")))
            for call in (running, uploading, *late):
                with pytest.raises(boxes.BoxEnded):
                    await call
            return (await other.exec("ls /app")).stdout

    assert asyncio.run(work()) == ""


def test_a_kept_box_that_was_killed_is_not_given_to_the_next():
    async def work():
        box = await boxes.open({})
        await box.close()
        process = box.box.process
        psutil.Process(process.pid).children()[0].kill()
        process.wait()
        async with await boxes.open({}) as other:
            return (await other.exec("echo works")).stdout

    assert asyncio.run(work()) == "works\n"


def test_a_long_answer_is_whole_though_its_reader_was_busy():
    command = "sleep 1000 >/dev/null 2>&1 & head -c 900000 /dev/zero | tr '\\0' a; sleep 1000"

    async def work(box):
        call = asyncio.ensure_future(box.exec(command, timeout_s=1))
        await asyncio.sleep(0.5)
        # This event loop reads nothing until well beyond the deadline.
        time.sleep(8)  # noqa: ASYNC251
        return await call

    result = in_box(work)
    assert (result.timed_out, len(result.stdout)) == (True, 900_000)


def test_a_fork_of_the_owner_neither_uses_nor_ends_its_boxes():
    async def opened():
        return await boxes.open({})

    async def name_in(box):
        return (await box.exec("cat /tmp/name")).stdout

    def fork_work():
        box = asyncio.run(opened())
        asyncio.run(box.close())
        gc.collect()
        return 0

    kept, box = asyncio.run(opened()), asyncio.run(opened())
    asyncio.run(kept.close())
    asyncio.run(box.put("/tmp/name", "mine"))
    gc.collect()
    gc.freeze()  # A process group that another test left would wait for its threads in the fork.
    pid = os.fork()
    if pid == 0:
        del box
        os._exit(fork_work())
    gc.unfreeze()
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(name_in(box)) == "mine"
    again = asyncio.run(opened())
    assert (
        again.box.process is kept.box.process and asyncio.run(again.exec("echo x")).stdout == "x\n"
    )
    for one in (box, again):
        asyncio.run(one.close())


def test_a_folder_that_is_too_deep_to_be_removed_ends_the_box():
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"

    async def work():
        box = await boxes.open({})
        await box.exec(["python3", "-c", deep])
        await box.close()
        async with await boxes.open({}) as other:
            return box.box.process is other.box.process, (await other.exec("ls")).stdout

    assert asyncio.run(work()) == (False, "")


def test_what_a_program_changes_of_the_first_folders_is_as_it_was():
    spoil = (
        "rmdir /app; ln -s /tmp /app; chmod 000 /dev/shm /run; mkdir -p /var/tmp/a/b;"
        "chmod 000 /var/tmp/a; mv /var/tmp /var/tmp2; touch /var/tmp"
    )

    async def work():
        async with await boxes.open({}) as box:
            await box.exec(spoil)
        async with await boxes.open({}) as again:
            assert again.box.process is box.box.process
            return await again.exec("touch /app/x /var/tmp/y /dev/shm/z /run/u && ls /tmp")

    result = asyncio.run(work())
    assert (result.code, result.stdout, result.stderr) == (0, "", "")


def test_without_bubblewrap_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        asyncio.run(boxes.open({}, driver="bubblewrap", reuse=False))
