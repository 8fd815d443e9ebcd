"""Makes the pictures of the viewer in docs/pictures from runs of the current code.

    python scripts/docs_pictures.py             minutes; needs Chromium and playwright

The runs are two seeds of the quickstart and a warmed-up model that learns to use tools. Runs that
exist are kept: remove runs/ to make them anew.
"""

from __future__ import annotations

import asyncio
import shutil
import threading

import curves
from aiohttp import web
from playwright.sync_api import sync_playwright
from script_tools import ROOT, make_parser, run

from rl_core.tools.viewer.data import RunFolder
from rl_core.tools.viewer.server import LOCAL, Viewer

QUICK, SECOND, TOOLS = "runs/quickstart/grpo", "runs/quickstart_2/grpo", "runs/curves/tool_use_0/rl"
LOW = "only_step=40&only_high=0.5"
MIXED = "step=40&kind=train&task=train/175&index=0"  # One of its group's rewards is 0.
# Picture -> runs, address of the page, its height.
PICTURES = {
    "view_curves": ([QUICK, SECOND], "#curves?seeds=1&smooth=0.5", 640),
    "view_group": ([TOOLS], f"#talks?mode=group&only_step=40&{MIXED}", 680),
    "view_tokens": ([TOOLS], f"#talks?colour=entropy&{LOW}", 620),
    "view_tasks": ([QUICK], "#tasks?kind=sampled&state=learning", 640),
}


def make_runs() -> None:
    for name, seed in ((QUICK, 0), (SECOND, 1)):
        if not (ROOT / name).exists():
            run(f"scripts/quickstart.py --seed {seed}")
    if not (ROOT / TOOLS).exists():
        curves.prepare("tool_use", 0, (ROOT / TOOLS).parent)
        warm, learn = curves.commands("tool_use", 0)
        run(warm)
        run(f"{learn} --rollout.save true")
        run(f"-m rl_core.tools.cli replay {TOOLS} --step 40 --tokens")


def main() -> None:
    make_parser(__doc__).parse_args()
    make_runs()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def serve(names: list[str]) -> int:
        app = Viewer([RunFolder(name) for name in names]).app(LOCAL)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (runs, address, height) in PICTURES.items():
            port = asyncio.run_coroutine_threadsafe(serve(runs), loop).result()
            page = browser.new_page(viewport={"width": 1440, "height": height})
            page.goto(f"http://127.0.0.1:{port}/{address}")
            page.wait_for_timeout(4000)  # until all rollouts are read
            page.screenshot(path=ROOT / f"docs/pictures/{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
