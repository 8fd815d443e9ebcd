"""rl-core plot runs/x: a run's curves as a PNG: rewards, evaluations, loss, KL, entropy and
lengths."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

from rl_core.tools.parser import Parser

Curves = dict[str, list[tuple[int, float]]]  # name -> points (step, value)
# Title of a panel -> which metrics it shows; their last group is left out of the legend.
PANELS = {
    "reward": r"rollout/([^/]+)/reward_mean",
    "evaluation": r"eval/((?:[^/]+/)*(?:greedy_score|greedy_pass|avg@\d+|pass@\d+|loss))",
    "loss": r"learn/([^/]+)/loss",
    "KL (nats)": r"learn/([^/]+/(?:step|ref|mismatch)_kl)_nats",
    "entropy (nats)": r"learn/([^/]+)/entropy_nats",
    "length (tokens)": r"rollout/([^/]+)/length_mean",
}


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core plot", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of runs, or files of rl-core rescore; several are drawn into each other",
    )
    parser.add_argument("--out", help="the file; default: RUN/curves.png")
    options = parser.parse_args(argv)
    curves = {}
    for run in options.runs:
        for title, panel in curves_of(Path(run)).items():
            of_run = f"{run} " if len(options.runs) > 1 else ""
            curves.setdefault(title, {}).update(
                {of_run + name: points for name, points in panel.items()}
            )
    first = Path(options.runs[0])
    default = first.with_name(f"{first.name.partition('.')[0]}.png")  # Of a file.
    file = Path(options.out or (default if first.is_file() else first / "curves.png"))
    flat = {title: panel for title, panel in curves.items() if is_flat(panel)}
    draw({title: panel for title, panel in curves.items() if title not in flat} or curves, file)
    print(f"wrote {file}")
    if 0 < len(flat) < len(curves):
        print(f"constant, and so left out: {', '.join(map(last_values, flat, flat.values()))}")
    return 0


def curves_of(run: Path) -> dict[str, Curves]:
    """Panel -> curve -> its points (step, value). A last line that is being written, or that a
    killed run left cut short, is left out. Raises ValueError if the run has no metrics."""
    from rl_core.tools.viewer.data import RunFolder

    if run.is_file():
        return curves_of_rewards(run)
    folder = RunFolder(run)
    folder.read_metrics()
    curves: dict[str, Curves] = {}
    for row in folder.rows:
        for title, pattern in PANELS.items():
            for name, value in row.items():
                if value is not None and (match := re.fullmatch(pattern, name)):
                    curves.setdefault(title, {}).setdefault(match[1], []).append(
                        (row["step"], value)
                    )
    if not curves:
        raise ValueError(f"{run}: metrics.jsonl holds no step yet; wait for the first")
    return {title: curves[title] for title in PANELS if title in curves}


def curves_of_rewards(file: Path) -> dict[str, Curves]:
    """Means of rewards and of their parts, before and after rl-core rescore, by step and actor."""
    from rl_core.data.tables import read_rewards
    from rl_core.tools.viewer.data import step_of

    values: dict[tuple[str, str, int], list[float]] = {}
    for name, rows in read_rewards(file).items():
        step = step_of(Path(name))
        for row in (row for row in rows if row["reward"] is not None):
            both = {
                "before": (row["before"], row["parts_before"]),
                "after": (row["reward"], row["reward_parts"]),
            }
            for when, (reward, parts) in both.items():
                named = {"reward": reward} | {f"part {n}": v for n, v in parts.items()}
                for title, value in named.items():
                    key = title, f"{row['actor']} {when}", step
                    values.setdefault(key, []).append(value)
    if not values:
        raise ValueError(f"{file}: no rewards to draw; all its trajectories failed")
    curves: dict[str, Curves] = {}
    for (title, name, step), of_step in sorted(values.items()):
        curves.setdefault(title, {}).setdefault(name, []).append((step, fmean(of_step)))
    return curves


def is_flat(curves: Curves) -> bool:
    """True if a panel has more than one step, and none of its curves changes."""
    from rl_core.tools.viewer.data import is_constant

    longest = max(len(points) for points in curves.values())
    return longest > 1 and all(
        is_constant(value for _, value in points) for points in curves.values()
    )


def last_values(title: str, curves: Curves) -> str:
    values = {f"{points[-1][1]:.4g}" for points in curves.values()}
    return f"{title} {' and '.join(sorted(values))}"


def draw(curves: dict[str, Curves], file: Path) -> None:
    from matplotlib.figure import Figure

    from rl_core.tools.viewer.data import axis_range

    figure = Figure(figsize=(12, 3.2 * -(-len(curves) // 3)), layout="constrained")
    for number, (title, panel) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(-(-len(curves) // 3), 3, number, title=title, xlabel="step")
        for name, points in panel.items():
            axes.plot(
                *zip(*points, strict=True), label=name, marker="." if len(points) < 20 else ""
            )
        if flat := axis_range(value for points in panel.values() for _, value in points):
            axes.set_ylim(*flat)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
