"""rl-core view --service: data of a service of environments, and its page. Services are
real ones, but for numbers whose times a test sets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from kit import wait_until
from test_service import COUNTER, TOKEN, said, serving
from test_view_page import AXE, faults_of, has, picture
from view_parts import CHROMIUM, HOSTILE, SCREENS, small_run

from rl_core.service import environments_pb2 as pb
from rl_core.service import manage
from rl_core.service.flags import TOKEN_VARIABLE
from rl_core.tools import cli
from rl_core.view.data import RunFolder
from rl_core.view.server import LOCAL, Viewer
from rl_core.view.service import NUM_OWNERS, PAGE, ServiceWatch

NOBODY = "grpc://127.0.0.1:1"


def worker(name: str, turns: int, sessions: int = 0, draining: bool = False, **ended: int):
    load = pb.Load(env="game", sessions=sessions, capacity=10, interactions=turns, ended=ended)
    return pb.Worker(name=name, host="h", pid=7, loads=[load], draining=draining)


def looked(*workers: pb.Worker, **queued: int) -> pb.WorkersReply:
    return pb.WorkersReply(workers=workers, queued=queued)


def held(*infos: pb.SessionInfo, silent: tuple[str, ...] = ()) -> pb.ListSessionsReply:
    return pb.ListSessionsReply(sessions=infos, silent=silent)


def shown(watch: ServiceWatch, first: int = 0, find: str = "", order: str = "oldest") -> dict:
    return watch.shown(first=first, find=find, order=order)


def test_rates_are_those_of_workers_that_were_in_both_looks():
    watch = ServiceWatch(NOBODY)
    watch.take(looked(worker("a", 100), worker("b", 900, completed=4)), held(), 10.0)
    assert shown(watch)["envs"][0]["turns_per_s"] is None
    later = looked(worker("a", 140), worker("c", 5000), worker("b", 910, completed=5, limit=1))
    watch.take(later, held(), 12.5)
    result = shown(watch)
    [env] = result["envs"]
    assert (env["turns"], env["turns_per_s"], env["capacity"]) == (6050, 20.0, 30)
    assert env["ended"] == [["completed", 5, 0.4], ["limit", 1, 0.4]]
    rates = {row["name"]: row["turns_per_s"] for row in result["workers"]}
    assert rates == {"a": 16.0, "b": 4.0, "c": 0.0} and not result["problems"]


def test_problems_name_workers_that_left_errors_and_what_waits():
    watch = ServiceWatch(NOBODY)
    before = [
        worker("gone", 5, 3, environment_error=1),
        worker("idle", 5, 0),
        worker("drained", 5, 2, draining=True),
        worker("back", 5, 4),
        worker("here", 5, 1, expired=2),
    ]
    watch.take(looked(*before), held(), 1.0)
    watch.take(looked(worker("here", 5, 1, expired=2)), held(), 3.0)
    here = worker("here", 5, 10, expired=2, environment_error=4), worker("back", 5, 4)
    watch.take(looked(*here, game=6), held(silent=("here",)), 5.0)
    assert watch.problems(63.0) == [
        "worker here does not answer: it may hold more sessions",
        "worker gone (h, PID 7) left 60 s ago; it held 3 sessions",
        "game: 5 sessions ended with an error of the environment, 2 a second since the last look",
        "game: 2 sessions ended because their client was silent",
        "game: 6 starts wait for room; 14 of 20 sessions run",
    ]


def test_a_thousand_sessions_are_paged_sorted_searched_and_summed_by_owner():
    watch = ServiceWatch(NOBODY)
    infos = [
        pb.SessionInfo(
            session=f"s{n}",
            env="game",
            owner=f"host/{n % 80}",
            worker="abc",
            task_id=f"train/{n}",
            age_s=n,
            idle_s=1000 - n,
            turns=n % 7,
            status=pb.RUNNING,
        )
        for n in range(1000)
    ]
    watch.take(looked(worker("abc", 0, 1000)), held(*infos), 1.0)
    result = shown(watch, first=950)
    assert [row["session"] for row in result["sessions"]] == [f"s{n}" for n in range(49, -1, -1)]
    assert (result["num_found"], len(shown(watch)["sessions"])) == (1000, PAGE)
    assert shown(watch, order="idle")["sessions"][0]["session"] == "s0"
    assert shown(watch, order="turns")["sessions"][0]["turns"] == 6
    assert shown(watch, find="TRAIN/99")["num_found"] == 11
    first, *_, rest = result["owners"]
    assert (len(result["owners"]), first["sessions"], first["oldest_s"]) == (
        NUM_OWNERS + 1,
        13,
        999,
    )
    assert (rest["owner"], rest["env"]) == (None, f"{80 - NUM_OWNERS} more")
    assert sum(row["sessions"] for row in result["owners"]) == 1000
    assert len(json.dumps(result)) < 25_000


@pytest.mark.parametrize(
    "flags, why",
    [
        ([], "needs folders of runs, --service grpc://HOST:PORT, or both"),
        (["--service", "localhost:5"], "must be grpc://HOST:PORT"),
        (["--service", f"{NOBODY}?tokenfile=x"], "unknown setting 'tokenfile'; known: "),
        (["--service", f"{NOBODY}?token_file=none"], "token_file none: No such file or directory"),
        (["--service", NOBODY, "--report", "x"], "--report shows runs alone: leave --service out"),
    ],
)
def test_a_command_that_gives_no_page_is_refused(flags, why, capsys):
    assert cli.main(["view", *flags]) != 0
    assert why in capsys.readouterr().err


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    path = tmp_path_factory.mktemp("service_page") / "counter.py"
    path.write_text(COUNTER)
    return path


@pytest.fixture
def service(counter, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with serving(counter, "--port", 0, "--workers", 2, token=TOKEN) as service:
        service.workers(2)
        yield service


@contextmanager
def viewed(url: str, *runs: RunFolder):
    """The address of a viewer of this service and runs, whose server runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(Viewer(list(runs), ServiceWatch(url)).app(LOCAL))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    runner = run(start())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        run(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def look_again(watch: ServiceWatch) -> dict:
    watch.asked_s = -100.0
    return watch.answer(first=0, find="", order="oldest")


def draining(result: dict) -> list[str]:
    return [row["name"] for row in result["workers"] if row["draining"]]


def test_what_a_service_said_last_stays_when_its_token_changes_and_when_it_dies(
    service, monkeypatch
):
    url = f"grpc://{service.address}"
    watch = ServiceWatch(url)
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong" * 8)
    result = look_again(watch)
    assert result["error"].startswith(f"{url}: UNAUTHENTICATED: ") and result["heard_s"] is None

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    session = service.start(owner="ann", task_id="train/4")
    service.interact(session, 1)
    other = service.start(owner="ben")
    result = look_again(watch)
    assert not result["error"] and result["heard_s"] < 60
    rows = {row["session"]: row for row in result["sessions"]}
    assert rows.keys() == {session, other} and {row["env"] for row in result["envs"]} == {"counter"}
    row = rows[session]
    assert (row["owner"], row["task"], row["turns"], row["state"]) == (
        "ann",
        "train/4",
        1,
        "running",
    )
    assert {row["owner"] for row in result["owners"]} == {"ann", "ben"}
    manage.drain(url, other[:12])
    wait_until(lambda: draining(look_again(watch)) == [other[:12]], "a heartbeat")

    service.refused("interact", session=session, number=2, said=said("fail 3"))
    failed = "counter: 1 sessions ended with an error of the environment"
    wait_until(lambda: any(failed in text for text in look_again(watch)["problems"]), "an error")
    service.process.send_signal(signal.SIGKILL)
    service.process.wait(30)
    result = look_again(watch)
    assert "UNAVAILABLE" in result["error"] and url in result["error"]
    assert result["sessions"] and result["workers"] and TOKEN not in json.dumps(result)


# The page


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_of_a_service_from_nothing_to_a_thousand_sessions_and_after_its_end(
    screen, service, page_of, tmp_path
):
    with viewed(f"grpc://{service.address}") as address:
        page = page_of(address, screen, bypass_csp=True)  # axe is put into the page
        has(page, "#range", "No session runs.")
        has(page, "#workers tbody tr", 2)
        assert page.locator("nav a:visible").all_inner_texts() == ["Service"]
        for n in range(1000 if screen == "light" else 60):
            service.start(owner=HOSTILE if n == 7 else f"host/{n % 3}", task_id=f"train/{n}")
        manage.drain(f"grpc://{service.address}", service.workers(2)[0].name)
        has(page, "#range", re.compile(r"1 to 50 of (1,000|60)"))
        has(page, "#workers tr.draining td:nth-child(5)", "draining")
        has(page, "#owners tbody tr", 4)
        page.get_by_role("button", name="Next").click()
        has(page, "#range", re.compile("51 to "))
        page.get_by_label("Find").last.fill("</SCRIPT>")
        has(page, "#sessions tbody tr", 1)
        assert HOSTILE.split()[0] in page.locator("#sessions tbody td:nth-child(3)").inner_text()
        has(page, "#range", re.compile(r"1 to 1 of 1, of (1,000|60) in all"))
        page.get_by_label("Find").last.fill("")
        page.get_by_label("Sort").last.select_option("turns")
        has(page, "#sessions tbody tr", 50)
        page.evaluate(AXE.read_text())
        picture(page, tmp_path, f"service_{screen}")
        assert not faults_of(page)

        service.process.send_signal(signal.SIGKILL)
        has(
            page,
            "#heard",
            re.compile(f"Nothing heard since ..:..:... grpc://{service.address}: UN"),
        )
        has(page, "nav a:visible", "Service (away)")
        has(page, "#news.old #sessions tbody tr", 50)
        picture(page, tmp_path, f"away_{screen}")
        assert not faults_of(page)


@pytest.mark.slow
@needs_browser
def test_a_service_that_refuses_the_token_is_told_beside_a_run(
    service, page_of, tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong" * 8)
    run = small_run(tmp_path)
    with viewed(f"grpc://{service.address}", run) as address:
        page = page_of(address)
        has(page, "nav a[href='#service']", "Service (away)")
        assert page.locator("nav a:visible").count() == 4 and page.locator("#curves").is_visible()
        page.get_by_role("link", name="Service").click()
        has(page, "#heard", re.compile("since this page was opened at ..:..:... .*UNAUTHENTICATED"))
        assert page.locator("#news").is_hidden()
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        has(page, "#heard", "")
        has(page, "#workers tbody tr", 2)
