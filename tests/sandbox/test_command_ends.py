"""The end of a command by every remote driver: an exit status comes from the service's record of the
end alone. Without one, or with a malformed one, the command fails, whatever its output was."""

import asyncio
import base64
import json

import box_services
import kube_server
import machine
import pytest

from rl_core.sandbox import boxes
from rl_core.sandbox.remote_driver import MAX_LATE_BYTES, MarkedOutputs, RemoteError


def status(code):
    return b"\3" + json.dumps(kube_server.exit_status(code)).encode()


def failure(*causes):
    details = {"causes": [{"reason": "ExitCode", "message": text} for text in causes]}
    return b"\3" + json.dumps({"status": "Failure", "message": "no", "details": details}).encode()


def event(content):
    data = json.dumps(content).encode()
    return b"\0" + len(data).to_bytes(4, "big") + data


def end(**fields):
    return event({"event": {"end": fields}})


OUT = b"\1half\n"
# Name -> messages of an exec at Kubernetes, and the exit status; None: it is unknown.
KUBERNETES = {
    "closed in order, nothing": ([], None),
    "closed in order, half": ([OUT], None),
    "empty messages": ([b"", b"\3", OUT, b"\1", status(0)], 0),
    "an empty status": ([OUT, b"\3"], None),
    "a truncated status": ([OUT, status(0)[:-1]], None),
    "no object": ([OUT, b"\3[0]"], None),
    "null": ([OUT, b"\3null"], None),
    "no text": ([OUT, b"\3\xff"], None),
    "an object without a status": ([OUT, b"\3{}"], None),
    "causes that are no list of objects": ([OUT, failure()[:-4] + b"[1]}}"], None),
    "a code that is not a number": ([OUT, failure("x")], None),
    "a failure with code 0": ([OUT, failure("0")], None),
    "a code of 300": ([OUT, failure("300")], None),
    "a code below 0": ([OUT, failure("-1")], None),
    "a status as text": ([OUT, status(0).decode()], None),
    "a status twice": ([OUT, status(3), status(3)], 3),
    "two statuses": ([OUT, status(0), status(3)], None),
    "a status before the output": ([status(3), OUT], 3),
    "a connection that stays": ([OUT, status(3), None], 3),
    "an unknown channel": ([OUT, b"\7x", status(0)], 0),
}

START = event({"event": {"start": {"pid": 7}}})
HELD = event({"event": {"data": {"stdout": base64.b64encode(b"half\n").decode()}}})
ENDED = end(exitCode=3, exited=True, status="exit status 3", error="exit status 3")
CLOSED = b"\2\0\0\0\2{}"
LIMITED = b'{"error": {"code": "resource_exhausted"}}'
LIMITED = b"\2\0\0\0" + bytes([len(LIMITED)]) + LIMITED
E2B = {
    "closed in order, nothing": ([START, CLOSED], None),
    "closed in order, half": ([START, HELD, CLOSED], None),
    "whole": ([START, HELD, ENDED, CLOSED], 3),
    "killed": ([START, HELD, end(exitCode=-1, status="signal: killed"), CLOSED], 137),
    "an empty end": ([START, HELD, end(), CLOSED], None),
    "no exit, code 0": ([START, HELD, end(exitCode=0, exited=False), CLOSED], None),
    "no exit, code 3": ([START, HELD, end(exitCode=3, exited=False), CLOSED], None),
    "code -1": ([START, HELD, end(exitCode=-1, exited=True), CLOSED], None),
    "code 300": ([START, HELD, end(exitCode=300, exited=True), CLOSED], None),
    "empty events": ([START, event({}), event({"event": {}}), HELD, ENDED, CLOSED], 3),
    "an empty frame": ([START, HELD, b"\0\0\0\0\0", ENDED, CLOSED], None),
    "no JSON": ([START, HELD, b"\0\0\0\0\1{", ENDED, CLOSED], None),
    "a frame that is cut": ([START, HELD, ENDED[:-5]], None),
    "cut after the half": ([START, HELD], None),
    "an end of another type": ([START, HELD, event({"event": {"end": [3]}}), CLOSED], None),
    "an end twice": ([START, HELD, ENDED, ENDED, CLOSED], 3),
    "two ends": ([START, HELD, end(exited=True), ENDED, CLOSED], None),
    "an end before the output": ([START, ENDED, HELD, CLOSED], 3),
    "no start": ([HELD, ENDED, CLOSED], None),
    "nothing at all": ([], None),
    "overloaded while it runs": ([START, HELD, LIMITED], None),
}

ERR = b"\2\2\2MARK\n"
# Messages of the log, the code in the command's record, and the exit status.
DAYTONA = {
    "closed in order, nothing": ([], None, None),
    "closed in order, half": ([b"\1\1\1half\n"], None, None),
    "half, and it ended since": ([b"\1\1\1half\n"], 0, None),
    "the mark of one output": ([b"\1\1\1half\n\1\1\1MARK\n"], 0, None),
    "whole": ([b"\1\1\1half\n\1\1\1MARK\n", ERR], 3, 3),
    "in pieces": ([b"\1\1", b"\1half", b"\n\1\1", b"", b"\1MARK", b"\n", ERR], 3, 3),
    "a forged mark": ([b"\1\1\1half\n\1\1\1MARK0\n\1\1\1MARK\n", ERR], None, None),
    "late output": ([b"\1\1\1half\n\1\1\1MARK\n", ERR, b"\1\1\1noise\n"], 3, 3),
    "too much late output": (
        [b"\1\1\1half\n\1\1\1MARK\n", ERR, b"\1\1\1" + b"n" * MAX_LATE_BYTES + b"\n"],
        3,
        None,
    ),
    "a truncated mark": ([b"\1\1\1half\n\1\1\1MAR\n", ERR], 0, None),
    "no kind of output": ([b"half\n", ERR], 0, None),
    "the other output first": ([ERR, b"\1\1\1half\n\1\1\1MARK\n"], 3, 3),
    "a code as text": ([b"\1\1\1half\n\1\1\1MARK\n", ERR], "0", None),
    "a code of 300": ([b"\1\1\1half\n\1\1\1MARK\n", ERR], 300, None),
}
# Answers to the SDK's requests of a kind, and the exit status.
MODAL = {
    "whole": ({}, 3),
    "killed": ({"TaskExecWait": [[{"signal": 9}]]}, 137),
    "an empty end": ({"TaskExecWait": [[{}]]}, None),
    "a code of 300": ({"TaskExecWait": [[{"code": 300}]]}, None),
    "a code below 0": ({"TaskExecWait": [[{"code": -1}]]}, None),
    "an error, after which the SDK asks again": ({"TaskExecWait": [(13, {})]}, 3),
    "overloaded while it runs": ({"TaskExecWait": [(8, {})]}, None),
    "a stdout that ends early": ({"stdout": [[b"half\n"]]}, None),
    "a stderr that ends early": ({"stderr": [[]]}, None),
}


def all_rows():
    for name, (frames, code) in KUBERNETES.items():
        yield pytest.param("kubernetes", {"exec": [frames]}, code, id=f"kubernetes: {name}")
    for name, (frames, code) in E2B.items():
        yield pytest.param("e2b", {"exec": [frames]}, code, id=f"e2b: {name}")
    for name, (frames, record, code) in DAYTONA.items():
        faults = {"follow": [frames], "command": [[record]]}
        yield pytest.param("daytona", faults, code, id=f"daytona: {name}")
    for kind in ("follow", "command"):
        yield pytest.param("daytona", {kind: [(429, {})]}, None, id=f"daytona: overloaded {kind}")
    for name, (faults, code) in MODAL.items():
        yield pytest.param("modal", faults, code, id=f"modal: {name}")


@pytest.fixture
def server_of(tmp_path, monkeypatch):
    """server_of(driver) -> a server of that driver."""
    running = []

    def start(driver):
        if driver != "kubernetes":
            running.append(box_services.service(driver, monkeypatch))
            return running[-1].__enter__()
        if reason := machine.missing():
            pytest.skip(reason)
        running.append(kube_server.KubeServer(tmp_path))
        server = running[-1].__enter__()
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        return server

    yield start
    boxes.SERVICES.close()
    for each in running:
        each.__exit__(None, None, None)


@pytest.mark.parametrize("driver, faults, code", all_rows())
def test_no_code_without_the_record_of_the_end(driver, faults, code, server_of):
    server = server_of(driver)

    async def work():
        async with await boxes.open({"box_driver": driver}) as box:
            server.faults |= faults
            return await box.exec("echo half; exit 3")

    if code is None:
        with pytest.raises(RemoteError, match=f"^{driver}: running a command: "):
            asyncio.run(work())
    else:
        result = asyncio.run(work())
        assert (result.code, result.timed_out) == (code, False)
        assert result.stdout == "half\n"


@pytest.mark.parametrize("driver", ["daytona", "modal"])
def test_a_program_that_prints_the_mark_of_its_output_ends_nothing(driver, server_of):
    server_of(driver)
    script = "for pid in /proc/[0-9]*; do tr '\\0 ;' '\\n\\n\\n' <$pid/cmdline; done "
    script += "| grep -xE '[0-9a-f]{32}' | head -n 1 | tr -d '\\n'"

    async def work():
        async with await boxes.open({"box_driver": driver}) as box:
            return await box.exec(f"{script}; {script} >&2; echo; echo after; exit 3")

    result = asyncio.run(work())
    assert result.code == 3
    assert len(result.stdout) == 32 + len("\nafter\n") and len(result.stderr) == 32, result


def test_a_cut_output_has_what_may_begin_a_mark():
    received = []
    outputs = MarkedOutputs(lambda *data: received.append(data))
    outputs.add(1, b"half" + outputs.mark[:16])
    with pytest.raises(TimeoutError), outputs:
        raise TimeoutError
    assert b"".join(data for stream, data in received if stream == 1) == b"half" + outputs.mark[:16]
