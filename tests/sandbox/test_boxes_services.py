"""Boxes at sandbox services: faults, costs and keys. Their table is in test_boxes_containers.py.
scripts/test_box_services.sh installs the SDKs."""

import asyncio
import importlib.util
import logging
import socket
import threading
import time
import traceback

import box_services
import kit
import pytest
from test_box_kubernetes import AGENT, ENV

from rl_core.sandbox import box_remote, boxes
from rl_core.sandbox.remote_driver import RemoteError

NAMES = ["e2b", "daytona", "modal"]
KEYS = {"e2b": "E2B_API_KEY", "daytona": "DAYTONA_API_KEY", "modal": "MODAL_TOKEN_ID"}
# gRPC's numbers of statuses at Modal.
FORBIDDEN = {"modal": 7}
LIMITED = {"modal": 8}


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def server(name, monkeypatch):
    with box_services.service(name, monkeypatch) as running:
        yield running


def refusal(name, numbers, status, headers=None):
    if name != "modal":
        return status, headers or {}
    from grpclib import Status

    return Status(numbers[name]), {}


def test_a_missing_extra_or_key_is_named(name, monkeypatch):
    monkeypatch.delenv(KEYS[name], raising=False)
    wanted = f"pip install 'rl_core[{name}]'"
    if importlib.util.find_spec(name) is not None:
        wanted = f"box driver {name} needs the variable {KEYS[name]}"
    with pytest.raises(RuntimeError, match=wanted.replace("[", r"\[")):
        asyncio.run(boxes.open({"box_driver": name}))


def test_a_key_is_in_no_output(name, server, capfd, caplog, monkeypatch):
    """The server's answers to failed calls name the key."""
    caplog.set_level(logging.DEBUG)
    refused = refusal(name, FORBIDDEN, 403)
    errors = []

    async def work():
        server.faults["create"] = [refused]
        with pytest.raises(RuntimeError) as error:
            await boxes.open({"box_driver": name})
        errors.append(error.value)
        box = await boxes.open({"box_driver": name})
        server.faults["exec"] = [refused]
        with pytest.raises(RemoteError) as error:
            await box.exec("true")
        errors.append(error.value)
        shown = await box.exec("env; cat /proc/[0-9]*/environ")
        server.faults["kill"] = [refused]
        await box.close()
        return shown.stdout

    shown = asyncio.run(work())
    texts = ["".join(traceback.format_exception(error)) for error in errors]
    assert all("no, ***" in str(error) for error in errors), errors
    output = capfd.readouterr()
    assert "no, ***" in output.err and "could not be ended" in output.err
    for text in (shown, *texts, *output, caplog.text):
        assert box_services.KEY not in text


def test_a_service_that_is_busy_is_asked_again(name, server):
    limited = refusal(name, LIMITED, 429, {"Retry-After": "1"})

    async def work():
        begun = time.monotonic()
        server.faults["create"] = [limited, limited]
        async with await boxes.open({"box_driver": name}) as box:
            waited_s = time.monotonic() - begun
            server.faults["exec"] = [limited]
            return waited_s, (await box.exec("echo once")).stdout

    waited_s, output = asyncio.run(work())
    assert output == "once\n" and len(server.machines) == 1
    assert waited_s >= 2 or name == "modal"


def test_an_answer_that_was_lost_leaves_one_box(name, server):
    async def work():
        server.faults["create"] = ["cut"]
        async with await boxes.open({"box_driver": name}) as box:
            return (await box.exec("echo works")).stdout, len(server.running())

    assert asyncio.run(work()) == ("works\n", 1)
    assert not server.running()


def test_a_command_whose_connection_is_cut_is_not_repeated(name, server):
    async def work():
        async with await boxes.open({"box_driver": name}) as box:
            server.faults["exec"] = ["cut"]
            # Modal's SDK reads on.
            try:
                await box.exec("echo x >> /tmp/n; sleep 1; echo y")
            except RemoteError as error:
                assert "running a command" in str(error)
                assert name != "modal"
            return (await box.exec("cat /tmp/n")).stdout

    # It may have been killed before its first line.
    assert asyncio.run(work()) in ("", "x\n")


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_box_that_the_service_ended_says_so(name, server, is_busy):
    async def work():
        async with await boxes.open({"box_driver": name}) as box:
            running = asyncio.ensure_future(box.exec("sleep 100" if is_busy else "true"))
            await asyncio.sleep(1)
            if not is_busy:
                await running
            server.loop.call_soon_threadsafe(server.machines[box.box.sandbox.id].kill)
            with pytest.raises(boxes.BoxEnded, match="has ended: "):
                await (running if is_busy else box.exec("true"))

    asyncio.run(asyncio.wait_for(work(), 50))


def created_with(name, request):
    """(run, idle time, lifetime, has a network) of a request."""
    if name == "e2b":
        return request["metadata"], request["timeout"], None, request["allow_internet_access"]
    if name == "daytona":
        lifetime_s = 60 * request["ttlMinutes"]
        idle_s = 60 * request["autoStopInterval"]
        assert request["autoDeleteInterval"] == 0
        return request["labels"], idle_s, lifetime_s, not request["networkBlockAll"]
    made = request.definition
    tags = {tag.tag_name: tag.tag_value for tag in request.tags}
    access = made.network_access.network_access_type
    return tags, made.idle_timeout_secs, made.timeout_secs, access != made.network_access.BLOCKED


def test_a_box_ends_with_its_run_however_that_ends(name, server, tmp_path):
    file = tmp_path / "boxes"
    boxes.configure(run_file=str(file), idle_s=1.8, lifetime_s=600)

    async def work():
        async with await boxes.open({"box_driver": name}) as box:
            seen = created_with(name, server.sandboxes[box.box.sandbox.id])
            await asyncio.sleep(1)
        return seen

    def killed():
        """Leaves a box, as a process that was killed."""
        box = asyncio.run(boxes.open({"box_driver": name}))
        [service] = boxes.SERVICES.by_key.values()
        service.loop.call_soon_threadsafe(service.loop.stop)
        boxes.SERVICES.by_key.clear()
        return box

    try:
        run, idle_s, lifetime_s, has_network = asyncio.run(work())
        assert run["rl_core_run"] == f"{file.read_text()}-0" and not has_network
        assert idle_s in (2, 60) and lifetime_s in (None, 600)
        assert not server.running()
        assert "renew" in server.seen or name == "modal"
        # A process that was killed leaves a box; another run has one too.
        boxes.SERVICES.close()
        ours, left = file.read_text(), []
        for text in (ours, "other", ours):
            file.write_text(text)
            left.append(killed())
        assert len(server.running()) == 2  # The third has removed the first.
        asyncio.run(work())
        assert server.running() == [left[1].box.sandbox.id]
    finally:
        boxes.configure()


def test_a_box_of_e2b_is_not_renewed_beyond_its_lifetime(monkeypatch):
    async def work(server):
        async with await boxes.open({"box_driver": "e2b"}) as box:
            timeouts = [server.sandboxes[box.box.sandbox.id]["timeout"]]
            await asyncio.sleep(1.5)
            return [*timeouts, server.sandboxes[box.box.sandbox.id]["timeout"]]

    with box_services.service("e2b", monkeypatch) as server:
        boxes.configure(idle_s=3.0, lifetime_s=3.0)
        try:
            assert asyncio.run(work(server)) == [3, 2]
        finally:
            boxes.configure()


def test_a_session_of_daytona_that_was_killed_is_replaced(monkeypatch):
    async def work(server):
        async with await boxes.open({"box_driver": "daytona"}) as box:
            assert (await box.exec("echo a")).stdout == "a\n"
            server.faults["exec"] = [(410, {})]
            return (await box.exec("echo b")).stdout

    with box_services.service("daytona", monkeypatch) as server:
        assert asyncio.run(work(server)) == "b\n"


def test_an_image_becomes_one_template_of_e2b(monkeypatch):
    async def work():
        row = {"box_driver": "e2b", "image": "python:3.12-slim"}
        opened = await asyncio.gather(*[boxes.open(row) for _ in range(3)])
        for box in opened:
            await box.close()

    with box_services.service("e2b", monkeypatch) as server:
        asyncio.run(work())
        assert server.built == "python:3.12-slim" and server.seen.count("build") == 1
        assert len({made["templateID"] for made in server.sandboxes.values()}) == 1


def test_an_image_that_is_never_built_has_a_deadline(monkeypatch):
    monkeypatch.setattr(box_remote, "CREATE_S", 1.5)
    error = "e2b: no box of never:built within 2 s: the service still pulls or builds it"
    with box_services.service("e2b", monkeypatch), pytest.raises(RuntimeError, match=error):
        asyncio.run(boxes.open({"box_driver": "e2b", "image": "never:built"}))


def test_a_program_in_a_box_reaches_a_socket_of_the_run(name, server, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "endpoint"))
    listening.listen()

    def answer():
        connection, _ = listening.accept()
        connection.sendall(connection.recv(100).upper() + b"\xff" * 100_000)
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/llm/endpoint');"
    code += "s.sendall(b'ask');"
    code += "print(b''.join(iter(lambda: s.recv(9999), b'')).count(b'\\xff'))"

    async def work():
        binds = {"/run/llm": str(folder)}
        async with await boxes.open({"box_driver": name}, binds=binds) as box:
            return await box.exec(["python3", "-c", code])

    result = asyncio.run(work())
    assert (result.code, result.stdout) == (0, "100000\n"), result


def test_a_run_trains_on_agents_in_boxes(name, server, tmp_path, make_model):
    """From the key to a trained step."""
    (tmp_path / "program.py").write_text(AGENT)
    (tmp_path / "env.py").write_text(ENV)
    out = kit.run(
        tmp_path / "out",
        f"--model {make_model(hidden=32)} --env_path {tmp_path / 'env.py'} --num_steps 1",
        "--tasks_per_step 2 --group_size 2 --max_prompt_tokens 64 --max_tokens 8",
        f"--sandbox.box_driver {name} --sandbox.max_boxes 3",
    )
    [row] = kit.steps(out)
    assert row["learn/policy/grad_norm"] > 0
    assert server.seen.count("create") >= 4
    kit.wait_until(lambda: not server.running(), "the end of the boxes")
    files = [file for file in out.rglob("*") if file.is_file()]
    assert not [file for file in files if box_services.KEY.encode() in file.read_bytes()]


def test_a_wrong_key_is_refused_before_a_model_loads(name, server, monkeypatch):
    monkeypatch.setenv(KEYS[name].replace("_ID", "_SECRET"), "another-key")
    with pytest.raises(RemoteError, match=f"401.*; check {KEYS[name]}") as error:
        boxes.check_machine(name)
    assert "another-key" not in str(error.value)
