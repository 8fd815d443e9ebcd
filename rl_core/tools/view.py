"""rl-core view runs/x [runs/y ...]: curves, conversations and tokens of runs, as a page on this
machine; live runs update."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rl_core.tools.parser import Parser


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core view", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders of runs, or of folders of runs"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that is listened on [127.0.0.1, this machine alone]",
    )
    parser.add_argument(
        "--port", type=int, default=6500, help="its port; 0 takes a free one [6500]"
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write the page with its data into one file instead"
    )
    options = parser.parse_args(argv)
    from rl_core.tools.viewer.data import runs_in

    folders = [Path(name) for name in options.runs]
    runs = runs_in(folders)
    if options.report:
        from rl_core.tools.viewer.report import write_report

        print(f"wrote {write_report(Path(options.report), runs)}")
        return 0
    from rl_core.tools.viewer.server import serve

    asyncio.run(serve(runs, options.host, options.port, folders))
    return 0
