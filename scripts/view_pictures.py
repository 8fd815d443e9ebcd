"""Pictures of the viewer for docs/: `python scripts/view_pictures.py`, where these runs are.

runs/quickstart/grpo         scripts/quickstart.sh
runs/quickstart/grpo_seed_1  the same command with --seed 1 and this --out
runs/game                    docs/actors.md, two models that agree on a code
runs/duel                    envs/tic_tac_toe.py with two actors, and `rl-core replay runs/duel
--step 20 --tokens`

The page of a service needs no run: it starts a service, and plays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from rl_core.service.manage import drain, list_workers

ROOT = Path(__file__).resolve().parent.parent
QUIET = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)


@contextmanager
def viewed(browser: Browser, scheme: str, *runs: str) -> Iterator[Page]:
    """The page of these runs."""
    command = [sys.executable, "-m", "rl_core.tools.cli", "view", *runs, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 720})
        page.goto(server.stdout.readline().split()[0])
        page.wait_for_selector(".u-legend, #workers tbody tr")
        yield page
    finally:
        server.terminate()


def main() -> None:
    out = ROOT / "docs/pictures"
    out.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=QUIET.split()
        )
        picture_of_a_service(browser, out / "view_service.png")
        with viewed(
            browser, "light", "runs/quickstart/grpo", "runs/quickstart/grpo_seed_1"
        ) as page:
            page.get_by_label("Smoothing").fill("0.6")
            page.hover("[data-title=reward] .u-over", position={"x": 150, "y": 60})
            page.screenshot(path=out / "view_curves.png")
        with viewed(browser, "dark", "runs/game") as page:
            talk(page, step="30", mode="Group of 8", reward="1")
            page.screenshot(path=out / "view_group.png")
        with viewed(browser, "light", "runs/duel") as page:
            talk(page, step="20", mode="All actors", reward="")
            page.get_by_label("Colour tokens by").select_option("entropy")
            page.locator(".tokens").last.press("End")
            page.screenshot(path=out / "view_tokens.png")


def picture_of_a_service(browser: Browser, file: Path) -> None:
    """Three workers, of which one is drained and one was killed with its sessions."""
    command = [sys.executable, "-m", "rl_core.tools.cli", "serve", "envs/calculator.py"]
    flags = ["--port", "0", "--http_port", "0", "--workers", "3"]
    server = subprocess.Popen(command + flags, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        lines = [server.stdout.readline(), server.stdout.readline()]
        [address] = re.findall(r"serving on (\S+)", "".join(lines))
        [http] = re.findall(r"HTTP on (\S+)", "".join(lines))
        rows = post(http, "tasks", env="calculator", split="train")["rows"]
        for number in range(90):
            play(http, rows[number], number)
        url = f"grpc://{address}"
        workers = list_workers(url).workers
        with viewed(browser, "light", "--service", url) as page:
            page.locator("#sessions tbody tr").first.wait_for()
            drain(url, workers[0].name)
            os.kill(workers[1].pid, signal.SIGKILL)
            page.locator("#problems li").first.wait_for()
            for number in range(90, 120):
                play(http, rows[number], number)
            page.wait_for_timeout(7000)
            page.screenshot(path=file)
    finally:
        server.terminate()


def play(http: str, row: str, number: int) -> None:
    """Starts a session and calls the calculator once."""
    owner = ("host-7/4242", "host-8/977")[number % 2]
    fields = {"env": "calculator", "row": row, "owner": owner, "task_id": f"train/{number}"}
    session = post(http, "start", **fields)["session"]
    guess = {"role": "assistant", "content": f"<call>{number}*8</call>"}
    post(http, "interact", session=session, number=1, said={"messages": json.dumps([guess])})


def post(http: str, verb: str, **fields: object) -> dict:
    request = urllib.request.Request(f"http://{http}/v1/{verb}", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def talk(page: Page, step: str, mode: str, reward: str) -> None:
    """Opens the longest conversation of a step."""
    page.get_by_role("link", name="Conversations").click()
    page.get_by_label("Step", exact=True).fill(step)
    page.get_by_label("Reward from").fill(reward)
    page.get_by_label("Sort").select_option("longest")
    page.locator("#list button").first.click()
    page.get_by_role("button", name=mode).click()
    page.locator("#reader h3").last.wait_for()


if __name__ == "__main__":
    main()
