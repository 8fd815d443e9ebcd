"""Pictures of the viewer for docs/: `python scripts/view_pictures.py`, where these runs are.

runs/quickstart/grpo         scripts/quickstart.sh
runs/quickstart/grpo_seed_1  the same command with --seed 1 and this --out
runs/game                    docs/actors.md, two models that agree on a code
runs/duel                    envs/tic_tac_toe.py with two actors, and `rl-core replay runs/duel
--step 20 --tokens`"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

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
        page.wait_for_selector(".u-legend")
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
